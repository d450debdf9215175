"""union4 and union8 on Hopper: the unions that kernels prepare are those of the torch twin."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pageweaver as pw

from ..helpers import Target, paged_case, poison, replaced
from .hopper import WATCHDOG, missing
from .problems import DEVICE, LONG, SIZES, long_context, messy, selected, shuffled_ids, twin

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]


def assert_same_schedule(
    target: Target, problem: pw.AttentionProblem, query_ids: torch.Tensor | None = None
) -> None:
    """What the kernels prepared is what torch prepares; masks say nothing where there is no page."""
    strategy = target.load(problem)
    workspace = strategy.workspace(problem)
    poison(workspace)
    found: Any = strategy.prepare(problem, workspace, query_ids=query_ids)  # type: ignore[call-arg]
    expected: Any = twin(target).load(problem).prepare(problem, query_ids=query_ids)  # type: ignore[call-arg]
    for name in ("query_ids", "group_offsets", "union_counts", "union_pages"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    pages = expected.union_pages >= 0
    assert torch.equal(found.union_masks[pages], expected.union_masks[pages]), "union_masks"


class TestSchedule:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_messy(self, target: Target, case: int) -> None:
        problem = messy(case)
        assert_same_schedule(target, problem)
        assert_same_schedule(target, problem, shuffled_ids(problem, case))

    @pytest.mark.parametrize("name", ["low", "mid", "high", "interleaved"])
    def test_selections(self, target: Target, name: str) -> None:
        assert_same_schedule(target, selected(name, 1000))

    @pytest.mark.parametrize("case", range(len(LONG)))
    def test_a_million_tokens(self, target: Target, case: int) -> None:
        assert_same_schedule(target, long_context(case))

    def test_many_requests(self, target: Target) -> None:
        """More than one scan of request lengths holds, a third of them empty."""
        lengths = [(7 * i) % 3 for i in range(5000)]
        total = sum(lengths)
        ids = torch.randint(-1, 3, (1, total + 5, 16), dtype=torch.int32)
        problem = paged_case(ids[:, :0], prefixes=[], lengths=[], device=DEVICE)
        problem = replaced(
            problem,
            q=torch.zeros(total + 5, 16, 128, dtype=torch.bfloat16, device=DEVICE),
            q2k_indices=ids.to(DEVICE),
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE),
            seqused_k=torch.tensor([n + (i % 300) for i, n in enumerate(lengths)]).int().to(DEVICE),
            page_table=torch.zeros(len(lengths), 3, dtype=torch.int32, device=DEVICE),
        )
        assert_same_schedule(target, problem)

    @pytest.mark.parametrize("case", [0, 2, 4])
    def test_work(self, target: Target, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts read no memory that nobody wrote."""
        problem = messy(case)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        poison(workspace)
        monkeypatch.setattr(strategy, "workspace", lambda _problem: workspace)
        counts = twin(target).load(problem).work(problem)
        assert strategy.work(problem) == dataclasses.replace(counts, workspace_bytes=workspace.nbytes)
