"""What every strategy promises: exact selections, and equal bits in any order of queries."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.arithmetic import ARITHMETICS
from pageweaver.common.reference import exact_attention
from pageweaver.common.strategy import REFERENCE_CAPABILITIES
from pageweaver.strategies.query_union import Union8

from .helpers import (
    E4M3,
    REFERENCE_TARGETS,
    Result,
    Target,
    assert_random,
    assert_same_bits,
    poison,
    random_problem,
    replaced,
)

BF16 = torch.bfloat16
# Group sizes, selections, pages, caches and batches, each value met several times.
SIZES: tuple[dict[str, Any], ...] = (
    {"group_size": 16, "topk": 16, "page_size": 128, "kv_dtype": E4M3, "k_scale": 0.7, "v_scale": 1.9},
    {"group_size": 16, "topk": 32, "page_size": 64, "kv_dtype": E4M3},
    {"group_size": 8, "topk": 1, "page_size": 128, "kv_dtype": E4M3, "num_kv_heads": 2},
    {"group_size": 8, "topk": 7, "page_size": 64, "kv_dtype": BF16},
    {"group_size": 4, "topk": 16, "page_size": 64, "kv_dtype": E4M3, "num_kv_heads": 3, "softmax_scale": 0.2},
    {"group_size": 4, "topk": 9, "page_size": 128, "kv_dtype": BF16, "num_kv_heads": 2},
    {"group_size": 2, "topk": 4, "page_size": 128, "kv_dtype": E4M3, "num_kv_heads": 2},
    {"group_size": 2, "topk": 32, "page_size": 64, "kv_dtype": BF16},
    {"group_size": 1, "topk": 16, "page_size": 64, "kv_dtype": E4M3, "num_kv_heads": 4},
    {"group_size": 1, "topk": 2, "page_size": 128, "kv_dtype": BF16},
    # Long enough for several windows of 64 and 128, and for units of page_union that are cut.
    {"group_size": 16, "topk": 5, "lengths": (150, 0, 131), "prefixes": (300, 7, 0), "kv_dtype": E4M3},
    {"group_size": 16, "topk": 1, "lengths": (300,), "prefixes": (0,), "page_size": 64, "kv_dtype": E4M3},
)
OWNERS = [t for t in REFERENCE_TARGETS if t.owns_queries and t.arithmetic == "fp8"]


@cache
def problem_of(case: int) -> pw.AttentionProblem:
    return random_problem(seed=100 + case, **SIZES[case])


@cache
def exact_of(case: int) -> tuple[torch.Tensor, torch.Tensor]:
    return exact_attention(problem_of(case))


def with_arithmetic(target: Target, arithmetic: str) -> Target:
    return dataclasses.replace(target, arithmetic=arithmetic)


@pytest.mark.parametrize("case", range(len(SIZES)))
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_equals_exact_attention(case: int, arithmetic: str) -> None:
    """Within what each policy rounds of float64; and every grouping has the same bits."""
    problem = problem_of(case)
    supported = REFERENCE_CAPABILITIES.arithmetics[problem.k_cache.dtype]
    if arithmetic not in supported:
        listed = re.escape(f"supported by union8 on reference for torch.bfloat16: {supported}")
        with pytest.raises(ValueError, match=rf"arithmetic: got '{arithmetic}', {listed}"):
            pw.load("union8", arithmetic=arithmetic)(problem)
        return
    exact = exact_of(case)
    first: Result | None = None
    for target in OWNERS:
        target = with_arithmetic(target, arithmetic)
        result = target.run(problem)
        assert_random(target, result, *exact)
        first = first or result
        assert_same_bits(result, first)
    for pairs in (True, False):
        target = Target("page_union", arithmetic, options={"pairs": pairs})
        assert_random(target, target.run(problem), *exact)


def test_sizes_cover_what_is_supported() -> None:
    assert {s["group_size"] for s in SIZES} == {1, 2, 4, 8, 16}
    assert {s.get("page_size", 128) for s in SIZES} == {64, 128}
    assert {s["kv_dtype"] for s in SIZES} == {E4M3, BF16}
    assert {1, 32} <= {s["topk"] for s in SIZES} and {1, 4} <= {s.get("num_kv_heads", 1) for s in SIZES}


def repeatable(target: Target, **sizes: Any) -> tuple[pw.AttentionProblem, Result]:
    problem = random_problem(num_kv_heads=2, group_size=8, device=target.device, **sizes)
    return problem, target.run(problem)


class TestBits:
    """Contract point 7; page_union has a rounding of its own and repeats it."""

    def test_repeated(self, target: Target) -> None:
        problem, result = repeatable(target)
        assert_same_bits(target.run(problem), result)

    def test_physical_placement(self, target: Target) -> None:
        problem, result = repeatable(target)
        order = torch.randperm(problem.num_pages, generator=torch.Generator().manual_seed(5))
        order = order.to(problem.device)
        raw = torch.cat([problem.k_cache, problem.v_cache], dim=-1).view(torch.uint8)
        moved = torch.empty_like(raw)
        moved[order] = raw
        moved = moved.view(problem.k_cache.dtype)
        table = problem.page_table.clone()
        mapped = (table >= 0) & (table < problem.num_pages)
        table[mapped] = order[table[mapped].long()].int()
        k_cache, v_cache = moved[..., :128], moved[..., 128:]
        assert not torch.equal(k_cache.view(torch.uint8), problem.k_cache.view(torch.uint8))
        assert_same_bits(
            target.run(replaced(problem, k_cache=k_cache, v_cache=v_cache, page_table=table)), result
        )

    @pytest.mark.parametrize("seed", range(3))
    def test_order_of_ids(self, target: Target, seed: int) -> None:
        problem, result = repeatable(target)
        generator = torch.Generator().manual_seed(seed)
        ids = problem.q2k_indices.cpu()
        shuffled = ids.gather(2, torch.rand(ids.shape, generator=generator).argsort(dim=2))
        # Repeat a page of the row in place of what names none.
        ignored = (shuffled < 0) | (shuffled > 1000)
        best = torch.where(ignored, -1, shuffled).amax(dim=2, keepdim=True)
        shuffled = torch.where(ignored, best, shuffled).int().to(problem.device)
        assert not torch.equal(shuffled, problem.q2k_indices)
        assert_same_bits(target.run(replaced(problem, q2k_indices=shuffled)), result)

    def test_batch_mates(self, target: Target) -> None:
        lengths, prefixes = (21, 1, 70, 0, 34), (300, 0, 64, 9, 777)
        problem, result = repeatable(target, lengths=lengths, prefixes=prefixes, past_rows=5)
        bounds = problem.cu_seqlens_q.tolist()
        for request in range(5):
            rows = slice(bounds[request], bounds[request + 1])
            alone = replaced(
                problem,
                q=problem.q[rows],
                q2k_indices=problem.q2k_indices[:, rows],
                cu_seqlens_q=problem.cu_seqlens_q[request : request + 2] - bounds[request],
                seqused_k=problem.seqused_k[request : request + 1],
                page_table=problem.page_table[request : request + 1],
            )
            assert_same_bits(target.run(alone), result[rows])

    def test_contiguous_copies(self, target: Target) -> None:
        problem, result = repeatable(target)
        names = ("q", "k_cache", "v_cache", "q2k_indices", "page_table")
        strided = [name for name in names if not getattr(problem, name).is_contiguous()]
        assert strided == list(names)
        copies = {name: getattr(problem, name).contiguous() for name in names}
        assert_same_bits(target.run(replaced(problem, **copies)), result)

    def test_strided_outputs(self, target: Target) -> None:
        problem, result = repeatable(target)
        strategy = target.load(problem)
        dtype = strategy(problem).dtype
        buffer = torch.full((problem.total_q, 18, 256), 777.0, dtype=dtype, device=problem.device)
        lse_buffer = torch.full((16, problem.total_q), 777.0, device=problem.device)
        strategy(problem, buffer[:, 1:17, :128], lse_buffer.T)
        assert_same_bits(Result(buffer[:, 1:17, :128].float().cpu(), lse_buffer.T.cpu()), result)
        buffer[:, 1:17, :128] = 777.0
        assert (buffer == 777.0).all()

    def test_without_lse(self, target: Target) -> None:
        problem, result = repeatable(target)
        assert torch.equal(target.load(problem)(problem).float().cpu(), result.out)


@pytest.mark.parametrize(
    "target", [Target("union8"), Target("union8", "float32"), Target("page_union")], ids=str
)
def test_threads_of_the_host(target: Target) -> None:
    problem, result = repeatable(target)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert_same_bits(target.run(problem), result)
    finally:
        torch.set_num_threads(before)


class TestQueryIds:
    """Ids given from outside replace the strategy's own and change no bit."""

    @staticmethod
    def random_ids(problem: pw.AttentionProblem, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.arange(problem.total_q, dtype=torch.int32).repeat(problem.num_kv_heads, 1)
        bounds = problem.cu_seqlens_q.tolist()
        for head in range(problem.num_kv_heads):
            for first, last in pairwise(bounds):
                ids[head, first:last] = first + torch.randperm(last - first, generator=generator).int()
        return ids.to(problem.device)

    @pytest.mark.parametrize("seed", range(2))
    def test_random(self, target: Target, seed: int) -> None:
        if not target.owns_queries:
            with pytest.raises(TypeError, match="query_ids"):  # pages own their queries: there is no order
                target.load(random_problem()).prepare(random_problem(), query_ids=None)  # type: ignore[call-arg]
            return
        problem, expected = repeatable(target)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        poison(workspace)
        ids = self.random_ids(problem, seed)
        schedule = strategy.prepare(problem, workspace, query_ids=ids)  # type: ignore[call-arg]
        assert torch.equal(schedule.query_ids, ids)  # type: ignore[attr-defined]
        lse = torch.empty(problem.total_q, problem.num_qo_heads, device=problem.device)
        out = strategy.execute(problem, schedule, None, lse)
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    @pytest.mark.parametrize(
        ("ids", "error", "words"),
        [
            ([0, 0, 2, 3, 4], ValueError, "bijection"),
            ([1, 0, 3, 2, 5], ValueError, "bijection"),
            ([1, 0, -1, 3, 4], ValueError, "bijection"),
            ([2, 0, 1, 3, 4], ValueError, "bijection"),  # rows 0 and 1 are one request, 2 and 3 another
            ([0, 1, 4, 3, 2], ValueError, "bijection"),  # row 4 is nobody's
            ([0, 1, 2, 3], ValueError, r"query_ids\.shape: got \(1, 4\), supported: \(1, 5\)"),
            (torch.zeros(1, 5).long(), TypeError, r"query_ids: got torch\.int64, supported: torch\.int32"),
            (torch.zeros(1, 5).int().to("meta"), ValueError, r"query_ids\.device: got meta, supported: cpu"),
            ([[0, 1, 2, 3, 4]], TypeError, "query_ids: got <class 'list'>"),
        ],
    )
    def test_refused(self, ids: Any, error: type[Exception], words: str) -> None:
        problem = random_problem(lengths=(2, 2), prefixes=(0, 300), past_rows=1)
        if isinstance(ids, list) and not isinstance(ids[0], list):
            ids = torch.tensor([ids], dtype=torch.int32)
        with pytest.raises(error, match=words):
            Union8().prepare(problem, query_ids=ids)

    def test_rows_of_nobody_stay(self) -> None:
        problem = random_problem(lengths=(2,), prefixes=(0,), past_rows=2)
        with pytest.raises(ValueError, match="identity there"):
            Union8().prepare(problem, query_ids=torch.tensor([[1, 0, 3, 2]], dtype=torch.int32))
