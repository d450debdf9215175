"""union4 and union8 on Hopper: captured in CUDA graphs, and never waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pageweaver as pw

from ..helpers import Result, Target, assert_same_bits, poison, random_problem, replaced
from .hopper import WATCHDOG, missing
from .problems import DEVICE

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

GRAPH_SIZES: dict[str, Any] = {"lengths": (150, 1, 105), "prefixes": (300, 9, 777), "topk": 16}
TENSORS = ("q", "k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table")
SCALES = ("softmax_scale", "k_scale", "v_scale")


class TestC36Graphs:
    """Capturable, and never waiting for the device."""

    def problem(self, seed: int) -> pw.AttentionProblem:
        numbers = {"softmax_scale": 0.09 + 0.01 * seed, "k_scale": 0.5 + seed, "v_scale": 2.0 / (1 + seed)}
        scales: dict[str, Any] = {name: torch.tensor(x, device=DEVICE) for name, x in numbers.items()}
        return random_problem(seed=seed, device=DEVICE, **GRAPH_SIZES, **scales)

    def test_replays(self, target: Target) -> None:
        """Captured once without a synchronisation, replayed with everything else in the same buffers."""
        variants = [self.problem(seed) for seed in range(3)]
        first, second, _ = variants
        bounds = [[0, 60, 61, 140], [0, 0, 256, 256], [0, 0, 0, 0]]
        moved = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in bounds]
        lengths = torch.tensor([450, 300, 882], dtype=torch.int32, device=DEVICE)
        # The third request's first six pages are full of written slots, in whatever order.
        shuffled = first.page_table[2, torch.randint(0, 6, (3, first.max_pages), device=DEVICE)]
        anywhere = replaced(first, page_table=shuffled)
        variants += [
            replaced(first, q2k_indices=torch.full_like(first.q2k_indices, -1)),
            replaced(second, cu_seqlens_q=moved[0], seqused_k=second.seqused_k - 7),
            anywhere,
            replaced(anywhere, cu_seqlens_q=moved[1], seqused_k=lengths),
            replaced(second, cu_seqlens_q=moved[2]),
            first,
        ]
        static = replaced(first, **{name: getattr(first, name).clone() for name in TENSORS + SCALES})
        strategy = target.load(static)
        workspace = strategy.workspace(static)
        out = torch.empty(static.q.shape, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.empty(out.shape[:2], device=DEVICE)
        strategy(static, out, lse, workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda.set_sync_debug_mode("error")
            try:
                strategy(static, out, lse, workspace)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for problem in variants:
            expected = target.run(problem)
            for name in TENSORS + SCALES:
                getattr(static, name).copy_(getattr(problem, name))
            poison(workspace)
            out.fill_(torch.nan)
            lse.fill_(777.0)
            graph.replay()
            assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    def test_no_rows(self, target: Target) -> None:
        """Nothing to launch, in a graph beside a call that has something."""
        nothing = random_problem(lengths=(0, 0), prefixes=(5, 300), past_rows=0, device=DEVICE)
        problem = self.problem(0)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        expected = target.run(problem)
        out = torch.empty(problem.q.shape, dtype=torch.bfloat16, device=DEVICE)
        empty = torch.empty(nothing.q.shape, dtype=torch.bfloat16, device=DEVICE)
        strategy(nothing, empty, None, workspace)
        strategy(problem, out, None, workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            strategy(nothing, empty, None, workspace)
            strategy(problem, out, None, workspace)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.float().cpu(), expected.out)

    def test_no_sync(self, target: Target) -> None:
        """Nor does an eager call fetch anything."""
        problem = self.problem(0)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            strategy(problem, out, lse, workspace)
        finally:
            torch.cuda.set_sync_debug_mode("default")
