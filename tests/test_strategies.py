"""What every strategy promises: exact selections, equal bits, and refusals of what would break them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import pageweaver as pw
from pageweaver.common.arithmetic import ARITHMETICS
from pageweaver.common.captures import save_selections
from pageweaver.common.reference import exact_attention
from pageweaver.common.strategy import REFERENCE_CAPABILITIES
from pageweaver.strategies.page_union import UNIT_TILES, PageUnion
from pageweaver.strategies.page_union.pairing import MOST_PAIRED
from pageweaver.strategies.query_union import Union4, Union8
from pageweaver.strategies.regroup import RegroupW64
from pageweaver.strategies.regroup.offline import FORMAT

from .helpers import (
    E4M3,
    REFERENCE_TARGETS,
    Result,
    Target,
    assert_empty,
    assert_random,
    assert_same_bits,
    poison,
    random_problem,
    replaced,
    selection_of,
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


class TestWorkspaces:
    def test_reuse_after_a_bigger_problem(self, target: Target) -> None:
        bigger = random_problem(lengths=(90, 0, 80), prefixes=(900, 1, 50), topk=12, device=target.device)
        smaller = random_problem(lengths=(5, 0, 9), prefixes=(200, 1, 0), past_rows=2, device=target.device)
        workspace = target.load(bigger).workspace(bigger)
        first = target.run(bigger, workspace=workspace)
        expected = target.run(smaller)
        # `run` poisons it again; without poison, what the bigger call left is in the way.
        assert_same_bits(target.run(smaller, workspace=workspace), expected)
        target.run(bigger, workspace=workspace)
        strategy = target.load(smaller)
        lse = torch.empty(16, 16, device=target.device)
        out = strategy(smaller, None, lse, workspace)
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)
        assert_same_bits(target.run(bigger, workspace=workspace), first)

    def test_bytes_from_shapes_alone(self, target: Target) -> None:
        problem = random_problem(device=target.device)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        assert strategy.workspace_bytes(problem) == workspace.nbytes > 0
        empty = replaced(problem, q2k_indices=torch.full_like(problem.q2k_indices, -1))
        assert strategy.workspace_bytes(empty) == workspace.nbytes

    def test_too_small(self, target: Target) -> None:
        bigger = random_problem(lengths=(90, 80), prefixes=(900, 50), device=target.device)
        smaller = random_problem(lengths=(5,), prefixes=(200,), past_rows=0, device=target.device)
        workspace = target.load(smaller).workspace(smaller)
        with pytest.raises(ValueError, match=r"workspace\['\w+'\]: got \d+ bytes .* at least \d+ bytes"):
            target.load(bigger).prepare(bigger, workspace)

    @pytest.mark.parametrize("pairs", [True, False])
    def test_extreme_incidence(self, pairs: bool) -> None:
        """C43: one page that all rows choose, and rows that share no page; no list leaves its buffer."""
        rows, topk = 2048, 16
        page = torch.zeros(1, 64, 1, 128, dtype=BF16).expand(rows * topk, -1, -1, -1)
        for ids in (
            torch.zeros(rows, topk, dtype=torch.int32),
            torch.arange(rows * topk, dtype=torch.int32).reshape(rows, topk),
        ):
            problem = pw.AttentionProblem(
                q=torch.zeros(rows, 1, 128, dtype=BF16),
                k_cache=page,
                v_cache=page,
                q2k_indices=ids[None],
                cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
                seqused_k=torch.tensor([rows * topk * 64], dtype=torch.int32),
                page_table=torch.arange(rows * topk, dtype=torch.int32)[None],
            )
            report = PageUnion(pairs=pairs).work(problem)
            if ids.any():
                assert report.edges == rows * topk
                # Of pages that nobody has in common with others but one row, the first 1,024 are paired.
                assert report.groups == rows * topk - (MOST_PAIRED // 2 if pairs else 0)
            else:
                assert (report.edges, report.groups) == (rows, rows // (64 * UNIT_TILES))

    @pytest.mark.parametrize("pages", [512, 8192])
    def test_bytes_at_16k_queries(self, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernels take at most 1.1 GiB for 16,384 queries of Top16 over 64K tokens, or a million."""
        rows = 16384
        cache = torch.zeros(1, 128, 1, 128).to(torch.float8_e4m3fn)
        problem = pw.AttentionProblem(
            q=torch.zeros(1, 16, 128, dtype=BF16).expand(rows, -1, -1),
            k_cache=cache,
            v_cache=cache,
            q2k_indices=torch.zeros(1, rows, 16, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
            seqused_k=torch.tensor([pages * 128], dtype=torch.int32),
            page_table=torch.zeros(1, pages, dtype=torch.int32),
        )
        strategy = PageUnion()
        monkeypatch.setattr(strategy, "resolve", lambda _problem: ("cuda", "fp8"))
        # Partials alone take 1 GiB.
        assert 2**30 < strategy.workspace_bytes(problem) <= 1.1 * 2**30

    def test_more_than_the_device_holds(self) -> None:
        # Views of one row: only the workspace would need memory, 560 TB of it.
        rows, heads = 2**26 - 1, 64
        problem = pw.AttentionProblem(
            q=torch.zeros(1, 1, 128, dtype=BF16).expand(rows, 16 * heads, -1),
            k_cache=torch.zeros(1, 64, heads, 128, dtype=BF16),
            v_cache=torch.zeros(1, 64, heads, 128, dtype=BF16),
            q2k_indices=torch.zeros(1, 1, 1, dtype=torch.int32).expand(heads, rows, 32),
            cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
            seqused_k=torch.zeros(0, dtype=torch.int32),
            page_table=torch.zeros(0, 1, dtype=torch.int32),
        )
        strategy = PageUnion()
        assert strategy.workspace_bytes(problem) > 2**47
        with pytest.raises(
            MemoryError, match=rf"page_union: workspace of {strategy.workspace_bytes(problem)} "
        ):
            strategy.workspace(problem)

    def test_of_another_strategy(self) -> None:
        problem = random_problem()
        with pytest.raises(ValueError, match=r"workspace\['unit_pages'\]: got 0 bytes of None"):
            PageUnion().prepare(problem, Union8().workspace(problem))

    def test_of_another_device(self) -> None:
        problem = random_problem()
        fields = {
            field.name: getattr(problem, field.name).to("meta")
            for field in dataclasses.fields(problem)
            if isinstance(getattr(problem, field.name), torch.Tensor)
        }
        elsewhere = replaced(problem, **fields)
        for strategy in (Union8(backend="reference"), PageUnion(backend="reference")):
            with pytest.raises(ValueError, match=r"workspace: got buffers on cpu, supported: meta"):
                strategy.prepare(elsewhere, strategy.workspace(problem))


class TestSchedules:
    """A schedule runs on what it was made for, or is refused."""

    def test_of_another_strategy(self) -> None:
        problem = random_problem()
        schedule = Union4().prepare(problem)
        for other in (Union8(), RegroupW64(), PageUnion()):
            with pytest.raises(ValueError, match=rf"schedule: got one of 'union4'.*one of '{other.name}'"):
                other.execute(problem, schedule)

    @pytest.mark.parametrize(
        "sizes",
        [
            {"lengths": (21, 1, 0, 33)},
            {"lengths": (22, 34), "prefixes": (300, 777)},
            {"topk": 9},
            {"page_size": 64},
            {"num_kv_heads": 2, "group_size": 8},
            {"kv_dtype": BF16},
            {"prefixes": (300, 0, 64, 999)},
        ],
        ids=str,
    )
    def test_of_another_problem(self, target: Target, sizes: dict[str, Any]) -> None:
        problem = random_problem(device=target.device)
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        if sizes.get("kv_dtype") == problem.k_cache.dtype:
            sizes = {"kv_dtype": E4M3}
        other = random_problem(device=target.device, **sizes)
        out = torch.full(other.q.shape, 7.0, dtype=strategy(problem).dtype, device=target.device)
        with pytest.raises(ValueError, match="schedule: got one of"):
            strategy.execute(other, schedule, out)
        assert (out == 7.0).all()

    def test_overwritten(self, target: Target) -> None:
        """The next `prepare` on a workspace takes the tensors of the schedule before."""
        first, second = (random_problem(seed=seed, device=target.device) for seed in (1, 2))
        strategy = target.load(first)
        workspace = strategy.workspace(first)
        schedule = strategy.prepare(first, workspace)
        expected = strategy.execute(first, schedule).clone()
        again = target.load(second).prepare(second, workspace)
        with pytest.raises(ValueError, match="schedule: got one whose workspace was prepared again"):
            strategy.execute(first, schedule)
        target.load(second).execute(second, again)
        assert torch.equal(strategy.execute(first, strategy.prepare(first, workspace)), expected)

    def test_other_tensors_are_refused(self, target: Target) -> None:
        """Kernels keep V from when they prepared: caches and metadata must be those very tensors."""
        problem = random_problem(seed=1, device=target.device)
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        for name in ("k_cache", "v_cache", "page_table", "cu_seqlens_q", "seqused_k"):
            other = replaced(problem, **{name: getattr(problem, name).clone()})
            with pytest.raises(ValueError, match="made from other caches or request metadata"):
                strategy.execute(other, schedule)

    def test_new_ids_in_the_same_buffers(self, target: Target) -> None:
        """A serving engine writes the next layer's selection where the last one's was."""
        problem = random_problem(seed=1, device=target.device)
        before = target.run(problem)
        problem.q2k_indices.copy_(torch.where(problem.q2k_indices > 1, problem.q2k_indices - 1, 0))
        fresh = replaced(problem, q2k_indices=problem.q2k_indices.clone())
        after = target.run(problem)
        assert_same_bits(after, target.run(fresh))
        assert not torch.equal(after.out, before.out)

    @pytest.mark.parametrize("strides", [(128, 128, 1), (2048, 64, 1), (2048, 0, 1)])
    def test_overlapping_output(self, target: Target, strides: tuple[int, ...]) -> None:
        problem = random_problem(device=target.device)
        buffer = torch.empty(59 * 2048, dtype=torch.bfloat16, device=target.device)
        with pytest.raises(ValueError, match=r"out\.stride\(\): .*no two elements in one place"):
            target.load(problem)(problem, buffer.as_strided((59, 16, 128), strides))

    def test_other_queries_in_the_same_schedule(self, target: Target) -> None:
        """q and scales may change under a schedule."""
        problem = random_problem(seed=1, device=target.device)
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        other = replaced(problem, q=random_problem(seed=2, device=target.device).q, k_scale=0.5, v_scale=2.0)
        assert torch.equal(strategy.execute(other, schedule), target.load(other)(other))

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (
                {"dtype": torch.float16},
                TypeError,
                r"out\.dtype: got torch\.float16, supported: torch\.bfloat16",
            ),
            (
                {"shape": (3, 16, 128)},
                ValueError,
                r"out\.shape: got \(3, 16, 128\), supported: \(59, 16, 128\)",
            ),
            ({"device": "meta"}, ValueError, r"out\.device: got meta, supported: cpu"),
        ],
    )
    def test_outputs(self, change: dict[str, Any], error: type[Exception], words: str) -> None:
        problem = random_problem()
        arguments: dict[str, Any] = {"dtype": BF16, "device": "cpu"} | change
        shape = arguments.pop("shape", tuple(problem.q.shape))
        with pytest.raises(error, match=words):
            Union8()(problem, torch.empty(shape, **arguments))
        arguments["dtype"] = torch.float64 if "dtype" in change else torch.float32
        with pytest.raises(error, match=words.split(":")[0].replace("out", "lse")):
            Union8()(problem, None, torch.empty(shape[:2], **arguments))

    def test_outputs_that_alias(self) -> None:
        problem = random_problem()
        one_row = torch.empty(1, 16, 128, dtype=BF16).expand(problem.q.shape)
        with pytest.raises(ValueError, match=r"out\.stride\(\): .*no two elements in one place"):
            Union8()(problem, one_row)
        with pytest.raises(ValueError, match=r"out\.stride\(-1\): got 2, supported: 1"):
            Union8()(problem, torch.empty(59, 16, 256, dtype=BF16)[..., ::2])
        with pytest.raises(ValueError, match=r"lse\.stride\(\)"):
            Union8()(problem, None, torch.empty(1, 16).expand(59, 16))
        with pytest.raises(TypeError, match=r"out\.dtype: got list, supported: torch\.bfloat16"):
            Union8()(problem, [1.0])  # type: ignore[arg-type]


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


class TestOfflineIds:
    def test_another_selection(self) -> None:
        problem = random_problem()
        ids = pw.search(selection_of(problem), window=512)
        strategy = pw.load("offline_w512", ids=ids)
        strategy(problem)
        changed = problem.q2k_indices.clone()
        changed[0, 4, 1] = 2
        moved = problem.seqused_k.clone()
        moved[0] += 1
        for other in (replaced(problem, q2k_indices=changed), replaced(problem, seqused_k=moved)):
            with pytest.raises(
                ValueError, match=r"ids\.selection_sha256: got [0-9a-f]{64}, supported: [0-9a-f]{64}"
            ):
                strategy(other)

    def test_another_window_or_group(self) -> None:
        problem = random_problem(group_size=8)
        selection = selection_of(problem)
        with pytest.raises(ValueError, match=r"ids\.window: got 512, supported by offline_w2048: 2048"):
            pw.load("offline_w2048", ids=pw.search(selection, window=512))
        ids = pw.search(selection, window=512, group_size=16)
        with pytest.raises(ValueError, match=r"ids\.queries_per_group: got 8, supported: 16 at group size 8"):
            pw.load("offline_w512", ids=ids)(problem)
        with pytest.raises(TypeError, match=r"ids: got NoneType, supported: OfflineIds from pageweaver"):
            pw.load("offline_w512")

    def test_damaged(self) -> None:
        """The hash vouches for the selection, not for the ids."""
        problem = random_problem()
        ids = pw.search(selection_of(problem), window=512)
        for damage in (ids.query_ids[:, :-1], ids.query_ids * 0, ids.query_ids[:, ::-1]):
            damaged = dataclasses.replace(ids, query_ids=damage)
            with pytest.raises(ValueError, match=r"query_ids"):
                pw.load("offline_w512", ids=damaged)(problem)

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        problem = random_problem(num_kv_heads=2, group_size=8)
        ids = pw.search(selection_of(problem), window=512, group_size=8, objective="rounds")
        path = tmp_path / "ids.safetensors"
        ids.save(path)
        loaded = pw.OfflineIds.load(path)
        assert (loaded.query_ids == ids.query_ids).all()
        for name in ("selection_sha256", "window", "queries_per_group", "objective"):
            assert getattr(loaded, name) == getattr(ids, name)
        expected = Union8()(problem)
        assert torch.equal(pw.load("offline_w512", ids=loaded)(problem), expected)
        assert [p.name for p in tmp_path.iterdir()] == ["ids.safetensors"]

    def test_not_a_file_of_ids(self, tmp_path: Path) -> None:
        selections = tmp_path / "selections.safetensors"
        save_selections(selections, [selection_of(random_problem())], {})
        garbage = tmp_path / "garbage.safetensors"
        garbage.write_bytes(b"not a file")
        bare = tmp_path / "bare.safetensors"
        safetensors.numpy.save_file({"query_ids": np.zeros((1, 2), dtype=np.int32)}, bare)
        truncated, odd_header, no_ids, wrong_json = (tmp_path / f"{n}.safetensors" for n in "abcd")
        ids = pw.search(selection_of(random_problem()), window=512)
        ids.save(truncated)
        truncated.write_bytes(truncated.read_bytes()[:-8])
        good = {"selection_sha256": "", "window": 1, "queries_per_group": 8, "objective": "visits"}
        for path, tensor, header in (
            (odd_header, "query_ids", json.dumps({"format": FORMAT, "more": 1})),
            (no_ids, "ids", json.dumps(good | {"format": FORMAT})),
            (wrong_json, "query_ids", "{"),
        ):
            content = {tensor: np.zeros((1, 2), dtype=np.int32)}
            safetensors.numpy.save_file(content, path, {"pageweaver": header})
        for path in (selections, garbage, bare, truncated, odd_header, no_ids, wrong_json):
            with pytest.raises(ValueError, match=rf"path: got '{path}', supported: "):
                pw.OfflineIds.load(path)
        with pytest.raises(FileNotFoundError):
            pw.OfflineIds.load(tmp_path / "missing.safetensors")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"window": 0}, r"window: got 0, supported: a positive integer"),
            ({"window": 2.5}, r"window: got 2\.5, supported: a positive integer"),
            ({"objective": "reuse"}, r"objective: got 'reuse', supported: \('visits', 'rounds'\)"),
            ({"group_size": 3}, r"group_size: got 3, supported: \(1, 2, 4, 8, 16\)"),
        ],
    )
    def test_search_refuses(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            pw.search(selection_of(random_problem()), **change)

    def test_progress(self) -> None:
        seen: list[float] = []
        pw.search(selection_of(random_problem(num_kv_heads=4, group_size=4)), progress=seen.append)
        assert seen == [0.25, 0.5, 0.75, 1.0]


class TestSparsePrefill:
    def test_is_the_strategy(self) -> None:
        problem = random_problem()
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        for name in ("union8", "regroup_w128", "page_union"):
            expected = Target(name).run(problem)
            out, lse = pw.sparse_prefill(**fields, strategy=name, return_lse=True)
            assert out.dtype == BF16 and lse.dtype == torch.float32
            assert_same_bits(Result(out.float(), lse), expected)
        given = torch.empty_like(problem.q.contiguous())
        assert pw.sparse_prefill(**fields, out=given) is given
        fields["softmax_scale"] = None
        again = pw.sparse_prefill(**fields)
        assert isinstance(again, torch.Tensor) and torch.equal(again, given)

    @pytest.mark.parametrize("strategy", ["union8", "page_union"])
    @pytest.mark.parametrize("kv_dtype", [E4M3, BF16])
    def test_output_dtype(self, strategy: str, kv_dtype: torch.dtype) -> None:
        """BF16, whatever the cache holds; float32 for who asks for this arithmetic."""
        problem = random_problem(kv_dtype=kv_dtype)
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        fields["strategy"] = strategy
        plain = pw.sparse_prefill(**fields)
        float32 = pw.sparse_prefill(**fields, arithmetic="float32")
        assert isinstance(plain, torch.Tensor) and plain.dtype == BF16
        assert isinstance(float32, torch.Tensor) and float32.dtype == torch.float32
        given = torch.empty(problem.q.shape, dtype=BF16)
        assert pw.sparse_prefill(**fields, arithmetic="float32", out=given) is given
        assert torch.equal(given, float32.bfloat16())
        with pytest.raises(TypeError, match=r"out\.dtype: got torch\.float32, supported: torch\.bfloat16$"):
            pw.sparse_prefill(**fields, out=float32)
        default = "fp8" if kv_dtype == E4M3 else "bf16"
        assert torch.equal(pw.sparse_prefill(**fields, arithmetic=default), plain)

    def test_rows_of_nobody(self) -> None:
        problem = random_problem(lengths=(4,), prefixes=(100,), past_rows=6)
        result = Target("union8").run(problem)
        assert_empty(result[4:])
        assert (result.lse[:4] > -math.inf).any()


@pytest.mark.parametrize("name", [n for n in pw.available() if not n.startswith("offline")])
def test_a_bad_output_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong outputs cost nothing: neither are queries grouped nor is a schedule in the workspace ended."""
    strategy, problem = pw.load(name, backend="reference"), random_problem(seed=1)
    workspace = strategy.workspace(problem)
    good, rows = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2])
    bad: list[tuple[Any, Any, str]] = [
        (good.float(), None, "out.dtype"),
        (good[1:], None, "out.shape"),
        (torch.empty_like(good, requires_grad=True), None, "out.requires_grad"),
        (good.to_sparse(), None, "out.layout"),
        (good, rows.bfloat16(), "lse.dtype"),
        (good, rows.clone().requires_grad_(), "lse.requires_grad"),
        ("x", None, "out"),
    ]
    for out, lse, argument in bad:
        with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(argument)}.*: got .*supported: "):
            strategy(problem, out, lse, workspace)
        assert workspace.prepared == 0


@pytest.mark.parametrize("name", [n for n in pw.available() if not n.startswith("offline")])
def test_arguments_of_another_kind_are_named(name: str) -> None:
    strategy, problem = pw.load(name, backend="reference"), random_problem(seed=1)
    wrong: Any
    for wrong in (None, 5, "x", {}):
        with pytest.raises(TypeError, match=r"^problem: got .*supported: AttentionProblem"):
            strategy.prepare(wrong)
        with pytest.raises(TypeError, match=r"^schedule: got .*supported: Schedule"):
            strategy.execute(problem, wrong)
    for wrong in (0, 5, {}, "x"):
        with pytest.raises(TypeError, match=r"^workspace: got .*supported: Workspace"):
            strategy.prepare(problem, wrong)
    # Values that are false are no way to say "the default".
    for wrong in ("", 0, False):
        with pytest.raises(ValueError, match=r"^arithmetic: got .*supported by "):
            pw.load(name, backend="reference", arithmetic=wrong)(problem)


@pytest.mark.parametrize("name", [[], {}, None, 5])
def test_a_strategy_name_of_any_kind_is_refused_by_name(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^strategy: got .*supported: "):
        pw.load(name)


@pytest.mark.parametrize("name", pw.available())
def test_unknown_options_are_named(name: str) -> None:
    """Beside those that the strategy takes, each of which is really one."""
    with pytest.raises(TypeError) as caught:
        pw.load(name, unknown=3)
    start = f"unknown: got 3, which is no option of {name}, supported: "
    assert str(caught.value).startswith(start)
    listed = str(caught.value).removeprefix(start).split(", ")
    assert {"backend", "arithmetic"} <= set(listed)
    own = {
        "per_query": "tune",
        "page_union": "pairs",
        "union8": "mapping",
        "auto": "objective",
        "offline_w512": "ids",
    }
    assert own.get(name, "backend") in listed
    for option in listed:
        try:
            pw.load(name, **{option: object()})
        except (TypeError, ValueError) as error:  # a wrong value, not an unknown option
            assert "no option" not in str(error) and "keyword" not in str(error)
