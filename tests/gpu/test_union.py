"""union4 and union8 on Hopper: what the shared cases (contract/) do not ask of a kernel.

Tolerances: FP8 costs at most 5% NRMS of float64 on N(0, 1) numbers. A kernel takes the same FP8 steps as its
torch twin, the reference backend: it may lose 1.2 times as much, and differ by 2%, by exponentials that
round to the other side, not by another way of rounding. Probabilities sum to one as rounded, so that V = 1
comes back; 3% is half of what one biased rounding of them would show.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset
from pageweaver.strategies import query_union

from ..helpers import (
    E4M3,
    RANDOM_LSE_ERROR,
    RANDOM_NRMS,
    Result,
    Target,
    assert_close,
    assert_empty,
    assert_same_bits,
    constant,
    page_number,
    paged_case,
    poison,
    random_problem,
    replaced,
)
from .hopper import TARGETS, WATCHDOG, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

DEVICE = "cuda"
GIB = 2**30
TWIN_FACTOR = 1.2
TWIN_NRMS = 0.02
# Rows that see a page or more average the errors of their logits.
LSE_ERROR = 0.05
V_ONE_ERROR = 0.03

# Several requests, one without queries, one of one token, rows past the last one; messy ids, strided views.
MESSY: dict[str, Any] = {"lengths": (70, 1, 0, 90), "prefixes": (2100, 0, 64, 4000)}
SIZES: tuple[dict[str, Any], ...] = (
    {"topk": 16},
    {"group_size": 8, "topk": 15, "k_scale": 0.7, "v_scale": 1.9},
    {"group_size": 4, "topk": 17},
    {"group_size": 2, "topk": 32},
    {"group_size": 1, "topk": 16},
    {"num_kv_heads": 2, "topk": 32},
    {"num_kv_heads": 2, "group_size": 8, "topk": 1},
    {"num_kv_heads": 3, "group_size": 1, "topk": 17, "softmax_scale": 0.05},
)


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


def twin(target: Target) -> Target:
    """The same FP8 steps in torch, on the same device."""
    return dataclasses.replace(target, backend="reference")


@cache
def messy(case: int) -> pw.AttentionProblem:
    return random_problem(seed=case, device=DEVICE, **MESSY, **SIZES[case])


@cache
def selected(name: str, rows: int) -> pw.AttentionProblem:
    """A selection as benchmarks run it, N(0, 1) numbers."""
    return pw.make_problem(preset(name, total_q=rows, prefix=49152), device=DEVICE)


@cache
def exact(problem: pw.AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = exact_attention(problem)
    return out.cpu(), lse.cpu()


def million_tokens(rows: int, topk: int, group_size: int) -> pw.AttentionProblem:
    """The last rows of 1,048,576 tokens; 8,192 logical pages share 64 physical ones."""
    pages = 8192
    rng = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, pages, (1, rows, topk), generator=rng, dtype=torch.int32)
    ids[:, :, 0], ids[:, ::2, 1] = 0, pages - 1
    caches = [torch.randn(64, 128, 1, 128, generator=rng).to(E4M3).to(DEVICE) for _ in range(2)]
    return pw.AttentionProblem(
        q=torch.randn(rows, group_size, 128, generator=rng).bfloat16().to(DEVICE),
        k_cache=caches[0],
        v_cache=caches[1],
        q2k_indices=ids.to(DEVICE),
        cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor([pages * 128], dtype=torch.int32, device=DEVICE),
        page_table=torch.randint(0, 64, (1, pages), generator=rng, dtype=torch.int32).to(DEVICE),
    )


LONG = ((40, 16, 16), (600, 16, 16), (300, 32, 1))


@cache
def long_context(case: int) -> pw.AttentionProblem:
    return million_tokens(*LONG[case])


def assert_accurate(target: Target, problem: pw.AttentionProblem) -> None:
    """Against float64 and against the torch twin."""
    result, expected = target.run(problem), twin(target).run(problem)
    out, lse = exact(problem)
    dead = lse == -torch.inf
    assert torch.equal(result.lse == -torch.inf, dead), "lse: -inf in other rows"
    assert_empty(result[dead.all(dim=1)])
    error, most = nrms(result.out, out), TWIN_FACTOR * nrms(expected.out, out)
    allowed = RANDOM_NRMS[target.arithmetic]
    assert error <= min(allowed, most), f"NRMS {error}, at most {allowed} and {most}"
    assert nrms(result.out, expected.out) <= TWIN_NRMS, "NRMS of the twin"
    lse_error = torch.where(dead, 0.0, (result.lse - lse).abs())
    assert lse_error.max() <= RANDOM_LSE_ERROR[target.arithmetic]
    # Two pages or more: one of them is seen whole.
    pages = (problem.support >= 0).sum(dim=2).repeat_interleave(problem.group_size, dim=0).T.cpu()
    wide = lse_error[pages >= 2]
    assert not wide.numel() or wide.max() <= LSE_ERROR


class TestAccuracy:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_messy(self, target: Target, case: int) -> None:
        assert_accurate(target, messy(case))

    @pytest.mark.parametrize("name", ["low", "mid", "high"])
    def test_selections(self, target: Target, name: str) -> None:
        assert_accurate(target, selected(name, 1000))

    @pytest.mark.parametrize("case", range(len(LONG)))
    def test_a_million_tokens(self, target: Target, case: int) -> None:
        assert_accurate(target, long_context(case))


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


def shuffled_ids(problem: pw.AttentionProblem, seed: int) -> torch.Tensor:
    """Another order of every request's queries, for each KV head."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.arange(problem.total_q, dtype=torch.int32).repeat(problem.num_kv_heads, 1)
    for head in range(problem.num_kv_heads):
        for first, last in pairwise(problem.cu_seqlens_q.tolist()):
            ids[head, first:last] = first + torch.randperm(last - first, generator=rng).int()
    return ids.to(problem.device)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e7, 1e15, 1e30])
@pytest.mark.parametrize("group_size", [16, 2])
def test_huge_logits(target: Target, size: float, group_size: int) -> None:
    """Rounding of logits far from 0 leaves a row's largest probability alone, and other rows too.

    Such rows are nearly one-hot. The tensor core keeps 13 bits of a product, so the kernel may turn a
    near-tie that the twin does not: about one head-row in a hundred. A row that lost its largest probability
    would be empty or wild, and all of them would.
    """
    problem = random_problem(seed=7, group_size=group_size, device="cuda")
    scale = torch.ones(problem.total_q, 1, 1, device="cuda")
    scale[::2] = size
    huge = replaced(problem, q=(problem.q.float() * scale).bfloat16())
    result, wanted = target.run(huge), twin(target).run(huge)
    assert result.lse.isfinite().equal(wanted.lse.isfinite())
    error = (result.out - wanted.out)[::2].norm(dim=-1) / wanted.out[::2].norm(dim=-1).clamp(min=1e-6)
    assert (error > 0.1).float().mean() <= 0.05
    assert_same_bits(target.run(problem)[1::2], result[1::2])


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


class TestSameBits:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_any_grouping(self, case: int) -> None:
        """union4, union8, its mappings, all in any order of queries."""
        problem = messy(case)
        expected = TARGETS[0].run(problem)
        for target in TARGETS:
            assert_same_bits(target.run(problem), expected)
            strategy = target.load(problem)
            for seed in range(2):
                out = torch.full_like(expected.out, torch.nan, dtype=torch.bfloat16, device=DEVICE)
                lse = torch.full_like(expected.lse, 777.0, device=DEVICE)
                workspace = strategy.workspace(problem)
                poison(workspace)
                ids = shuffled_ids(problem, seed)
                schedule = strategy.prepare(problem, workspace, query_ids=ids)  # type: ignore[call-arg]
                strategy.execute(problem, schedule, out, lse)
                assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    @pytest.mark.parametrize("name", ["low", "high"])
    def test_selections(self, name: str) -> None:
        problem = selected(name, 4096)
        expected = TARGETS[0].run(problem)
        for target in TARGETS[1:]:
            assert_same_bits(target.run(problem), expected)

    def test_a_million_tokens(self) -> None:
        for case in range(len(LONG)):
            problem = long_context(case)
            expected = TARGETS[0].run(problem)
            for target in TARGETS[1:]:
                assert_same_bits(target.run(problem), expected)

    @pytest.mark.parametrize("kind", ["low", "high", "ties"])
    def test_c50_repeats(self, target: Target, kind: str) -> None:
        """The same bits 50 times while another stream keeps the GPU busy."""
        problem = selected("low" if kind == "ties" else kind, 4096)
        if kind == "ties":
            ids = problem.q2k_indices[:, :1].expand(-1, problem.total_q, -1)
            problem = replaced(problem, q2k_indices=ids)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
        strategy(problem, out, lse, workspace)
        expected, expected_lse = out.clone(), lse.clone()
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
            product = torch.empty_like(matrix)
        torch.cuda.synchronize()
        for _ in range(50):
            with torch.cuda.stream(other):
                for _ in range(4):
                    torch.mm(matrix, matrix, out=product)
            poison(workspace)
            out.fill_(torch.nan)
            strategy(problem, out, lse, workspace)
            differ += (out.view(torch.int16) != expected.view(torch.int16)).sum()
            differ += (lse.view(torch.int32) != expected_lse.view(torch.int32)).sum()
        torch.cuda.synchronize()
        assert int(differ) == 0

    def test_scales_on_the_device(self, target: Target) -> None:
        scales: dict[str, Any] = {"k_scale": 0.7, "v_scale": 1.9, "softmax_scale": 0.11}
        problem = random_problem(device=DEVICE, **scales)
        fetched = {name: torch.tensor(x, device=DEVICE) for name, x in scales.items()}
        assert_same_bits(target.run(replaced(problem, **fetched)), target.run(problem))
        assert_accurate(target, problem)


class TestOnes:
    """V = 1 comes back, whatever the probabilities are rounded to."""

    @pytest.mark.parametrize(
        ("q0", "key"),
        [
            # One key above 2,047 others by 0 to 0.18: all of them are rounded alike, and not the largest.
            (torch.linspace(0, 2, 16), lambda _, positions: (positions == 3).float()),
            (torch.linspace(0, 2, 16), lambda _, positions: (positions == 2040).float()),
            # Rising, falling and negative logits; mass on one page, on one key, on all of 2,000.
            (torch.linspace(-16, 16, 16), lambda _, positions: positions / 512 - 2),
            (torch.linspace(-300, 300, 16), lambda _, positions: (positions % 7).float()),
            (torch.linspace(0, 0.1, 16), lambda _, positions: (positions % 9).float() - 4),
        ],
    )
    def test_one(self, target: Target, q0: torch.Tensor, key: Any) -> None:
        problem = paged_case(
            [list(range(16))] * 8,
            prefixes=[2040],
            q0=q0.expand(8, 16),
            k0=key,
            v=constant(1.0),
            device=DEVICE,
        )
        result = target.run(problem)
        assert (result.out - 1).abs().max() <= V_ONE_ERROR
        assert (result.lse - exact(problem)[1]).abs().max() <= RANDOM_LSE_ERROR[target.arithmetic]

    @pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
    def test_random(self, target: Target, size: float) -> None:
        problem = selected("mid", 1000)
        ones = torch.ones(problem.v_cache.shape, device=DEVICE).to(E4M3)
        result = target.run(replaced(problem, v_cache=ones, q=problem.q * size))
        assert (result.out - 1).abs().max() <= V_ONE_ERROR


def one_byte(value: float) -> int:
    """The E4M3 byte of a number."""
    return int(torch.tensor(value).to(E4M3).view(torch.uint8))


@pytest.fixture(scope="module")
def huge_cache() -> Any:
    """Two caches of 262,160 pages in one piece of memory."""
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB of free device memory")
    yield torch.zeros(2 * 262160 * 16384, dtype=torch.uint8, device=DEVICE)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", ["apart", "halves"])
def test_c30_caches_past_32_bits(target: Target, huge_cache: torch.Tensor, layout: str) -> None:
    """Element 2**31 of a cache lies in page 131,072, 2**32 in 262,144; of halves, in half of that."""
    pages = 262160
    huge_cache.zero_()
    if layout == "apart":
        keys, values = huge_cache.view(2, pages, 128, 1, 128).unbind(0)
    else:
        keys, values = huge_cache.view(pages, 2, 128, 1, 128).unbind(1)
    # What a product of 32 bits would read in place of page 262,159 is page 15.
    for page, value in ((5, 1.0), (131077, 2.0), (262149, 3.0), (262159, 4.0), (15, 7.0)):
        values[page] = one_byte(value)
    problem = pw.AttentionProblem(
        q=torch.zeros(8, 16, 128, dtype=torch.bfloat16, device=DEVICE),
        k_cache=keys.view(E4M3),
        v_cache=values.view(E4M3),
        q2k_indices=torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE).expand(1, 8, 4),
        cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor([520], dtype=torch.int32, device=DEVICE),
        page_table=torch.tensor([[5, 131077, 262149, 262159, 6]], dtype=torch.int32, device=DEVICE),
    )
    assert_close(target, target.run(problem), 2.5, math.log(512))
    # Keys of their own in every page: now a key from elsewhere shows, in the LSE at least.
    logits = {5: 1.0, 131077: 2.0, 262149: 0.0, 262159: -2.0, 15: 14.0}
    for page, key in logits.items():
        keys[page, :, :, 0] = one_byte(key)
    q = problem.q.clone()
    q[:, :, 0] = 8.0
    weights = torch.tensor(
        [math.exp(8 * logits[page] / math.sqrt(128)) for page in (5, 131077, 262149, 262159)]
    )
    value = float(weights @ torch.tensor([1.0, 2.0, 3.0, 4.0]) / weights.sum())
    result = target.run(replaced(problem, q=q))
    assert_close(target, result, value, math.log(128 * float(weights.sum())), spread=3.0)


@pytest.mark.parametrize(
    ("rows", "requests", "heads"),
    [
        (65536, 1024, 16),
        (65537, 65537, 16),
        (70000, 70000, 16),
        (524289, 174763, 1),
        (524289, 174763, 16),
        (524289, 1, 16),
    ],
)
def test_c31_long_grids(target: Target, rows: int, requests: int, heads: int) -> None:
    """More rows, requests, groups than a grid's y axis holds; each row sees its own page to its position."""
    length = rows // requests
    own_pages = -(-length // 128)
    position = torch.arange(length, dtype=torch.int32, device=DEVICE).repeat(requests)
    values = torch.arange(128.0, device=DEVICE).to(E4M3)
    raw = values.view(torch.uint8).view(1, 128, 1, 1).expand(-1, -1, -1, 128).contiguous()
    problem = pw.AttentionProblem(
        q=torch.zeros(1, heads, 128, dtype=torch.bfloat16, device=DEVICE).expand(rows, -1, -1),
        k_cache=torch.zeros_like(raw).view(E4M3),
        v_cache=raw.view(E4M3),
        q2k_indices=(position // 128)[None, :, None],
        cu_seqlens_q=torch.arange(0, rows + 1, length, dtype=torch.int32, device=DEVICE),
        seqused_k=torch.full((requests,), length, dtype=torch.int32, device=DEVICE),
        page_table=torch.zeros(requests, own_pages, dtype=torch.int32, device=DEVICE),
    )
    out = torch.full((rows, heads, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((rows, heads), 777.0, device=DEVICE)
    strategy = target.load(problem)
    workspace = strategy.workspace(problem)
    poison(workspace)
    strategy(problem, out, lse, workspace)
    column, seen = out[:, 0, 0].float(), position % 128 + 1
    assert (out == out[:, :1, :1]).all() and (lse == lse[:, :1]).all()
    expected = (values.float().cumsum(0) / torch.arange(1, 129, device=DEVICE))[seen - 1]
    assert ((column - expected).abs() <= 2.0**-8 * expected).all()
    assert ((lse[:, 0] - seen.float().log()).abs() <= 1e-4).all()


class TestC32Views:
    """Strides are followed: bit-identical to contiguous copies."""

    @staticmethod
    def plain(heads: int) -> pw.AttentionProblem:
        problem = random_problem(num_kv_heads=heads, group_size=16 // heads, device=DEVICE)
        names = ("q", "k_cache", "v_cache")
        return replaced(problem, **{name: getattr(problem, name).contiguous() for name in names})

    def test_queries(self, target: Target) -> None:
        problem = self.plain(1)
        expected, rows = target.run(problem), problem.total_q
        packed = torch.full((rows, 18, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        packed[:, :16] = problem.q
        wide = torch.full((rows, 16, 136), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        wide[..., 8:] = problem.q
        views = {
            "slice of packed rows": packed[:, :16],
            "head-major": problem.q.transpose(0, 1).contiguous().transpose(0, 1),
            "slice of wide heads": wide[..., 8:],
            "every second row": problem.q.repeat_interleave(2, dim=0)[::2],
        }
        for name, view in views.items():
            assert torch.equal(view.nan_to_num(7.0), problem.q.nan_to_num(7.0)), name
            assert_same_bits(target.run(replaced(problem, q=view)), expected)

    @pytest.mark.parametrize("heads", [1, 2])
    def test_caches(self, target: Target, heads: int) -> None:
        problem = self.plain(heads)
        expected = target.run(problem)
        raw = [cache.view(torch.uint8) for cache in (problem.k_cache, problem.v_cache)]
        pages = problem.num_pages
        nan = torch.full((2 * pages, 128, heads, 384), 0x7F, dtype=torch.uint8, device=DEVICE)
        packed = torch.cat(raw, dim=-1)
        wide, pool = nan[:pages].clone(), nan[..., :256].clone()
        wide[..., 16:144], wide[..., 160:288] = raw
        pool[1::2] = packed
        views = {
            "packed rows": (packed[..., :128], packed[..., 128:]),
            "unbound pair": torch.stack(raw, dim=1).unbind(1),
            "slices of wide rows": (wide[..., 16:144], wide[..., 160:288]),
            "head-major pages": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in raw),
            "every second page": (pool[1::2, ..., :128], pool[1::2, ..., 128:]),
            "K and V apart": (packed[..., :128], raw[1]),
        }
        if heads == 1:
            # The stride of a dimension of one element means nothing.
            views["odd stride"] = tuple(x.as_strided(x.shape, (*x.stride()[:2], 1, 1)) for x in raw)
        for name, (k_view, v_view) in views.items():
            assert torch.equal(k_view, raw[0]) and torch.equal(v_view, raw[1]), name
            moved = replaced(problem, k_cache=k_view.view(E4M3), v_cache=v_view.view(E4M3))
            assert_same_bits(target.run(moved), expected)

    def test_outputs(self, target: Target) -> None:
        """Written in place, and nothing beside them."""
        problem = self.plain(2)
        expected, rows = target.run(problem), problem.total_q
        wide = torch.full((16, rows, 200), 5.0, dtype=torch.bfloat16, device=DEVICE)
        wide_lse = torch.full((16, 2 * rows), 5.0, device=DEVICE)
        out, lse = wide[..., 8:136].transpose(0, 1), wide_lse[:, ::2].T
        target.load(problem)(problem, out, lse)
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)
        assert (wide[..., :8] == 5.0).all() and (wide[..., 136:] == 5.0).all()
        assert (wide_lse[:, 1::2] == 5.0).all()


class TestC34OtherDevice:
    @pytest.fixture(autouse=True)
    def two(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")

    def test_same_bits(self, target: Target) -> None:
        first, second = (random_problem(device=device) for device in ("cuda:0", "cuda:1"))
        with torch.cuda.device(0):
            expected = target.run(first)
            assert_same_bits(target.run(second), expected)
            assert torch.cuda.current_device() == 0
            assert_same_bits(target.run(first), expected)

    def test_mixed(self) -> None:
        problem = random_problem(device="cuda:0")
        with pytest.raises(ValueError, match=r"q2k_indices\.device: got cuda:1"):
            replaced(problem, q2k_indices=problem.q2k_indices.to("cuda:1"))


class TestC35Streams:
    """Kernels wait for the stream that they are called on, and for no other."""

    @pytest.mark.parametrize("external", [False, True])
    def test_late_inputs(self, target: Target, external: bool) -> None:
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        names = ("q", "q2k_indices", "v_cache", "cu_seqlens_q")
        late = replaced(problem, **{name: torch.zeros_like(getattr(problem, name)) for name in names})
        strategy = target.load(late)
        workspace = strategy.workspace(late)
        own = torch.cuda.Stream()
        stream = torch.cuda.ExternalStream(own.cuda_stream) if external else own
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for name in names:
                getattr(late, name).copy_(getattr(problem, name))
            lse = torch.empty(problem.q.shape[:2], device=DEVICE)
            out = strategy(late, None, lse, workspace)
        stream.synchronize()
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    def test_busy_default_stream(self, target: Target) -> None:
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out = torch.empty_like(problem.q, memory_format=torch.contiguous_format)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        with torch.cuda.stream(stream):
            strategy(problem, out, None, workspace)
        stream.synchronize()
        assert not torch.cuda.default_stream().query(), "waited for the default stream"
        torch.cuda.synchronize()
        assert torch.equal(out.float().cpu(), expected.out)


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


def test_c38_two_threads(target: Target) -> None:
    """Two threads with streams and workspaces of their own share nothing."""
    problems = [selected("mid", 1000), selected("low", 4096)]
    strategies = [target.load(problem) for problem in problems]
    expected = [strategy(problem) for strategy, problem in zip(strategies, problems, strict=True)]
    differ = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in problems]
    torch.cuda.synchronize()
    start = threading.Barrier(len(problems), timeout=60)

    def work(i: int) -> None:
        strategy, problem = strategies[i], problems[i]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            workspace, out = strategy.workspace(problem), torch.empty_like(problem.q)
            start.wait()
            for _ in range(200):
                strategy(problem, out, None, workspace)
                differ[i].add_((out.view(torch.int16) != expected[i].view(torch.int16)).sum())
        stream.synchronize()

    with ThreadPoolExecutor(len(problems)) as pool:
        for done in [pool.submit(work, i) for i in range(len(problems))]:
            done.result(timeout=120)
    assert [int(x) for x in differ] == [0, 0]


class TestC41Alignment:
    """Addresses and strides that the copy engine cannot take are refused, and harm no later call."""

    WORDS = "16-byte alignment"

    @pytest.mark.parametrize(("offset", "fits"), [(1, False), (4, False), (8, True)])
    def test_queries_and_outputs(self, target: Target, offset: int, fits: bool) -> None:
        problem = random_problem(device=DEVICE, past_rows=0)
        expected = target.run(problem)
        rows, strategy = problem.total_q, target.load(problem)
        flat = torch.zeros(rows * 2048 + 8, dtype=torch.bfloat16, device=DEVICE)
        moved = flat[offset : offset + rows * 2048].view(rows, 16, 128)
        moved.copy_(problem.q)
        if fits:
            assert_same_bits(target.run(replaced(problem, q=moved)), expected)
            strategy(problem, moved)
            assert torch.equal(moved.float().cpu(), expected.out)
        else:
            with pytest.raises(ValueError, match=rf"^q: .*{self.WORDS}"):
                strategy(replaced(problem, q=moved))
            with pytest.raises(ValueError, match=rf"^out: .*{self.WORDS}"):
                strategy(problem, moved)
            assert torch.equal(moved, problem.q), "written before it was refused"
            assert_same_bits(target.run(problem), expected)

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    @pytest.mark.parametrize(("offset", "fits"), [(1, False), (8, False), (16, True)])
    def test_caches(self, target: Target, name: str, offset: int, fits: bool) -> None:
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        raw = getattr(problem, name).view(torch.uint8)
        flat = torch.zeros(raw.numel() + 16, dtype=torch.uint8, device=DEVICE)
        view = flat[offset : offset + raw.numel()].view(raw.shape)
        view.copy_(raw)
        moved = replaced(problem, **{name: view.view(E4M3)})
        if fits:
            assert_same_bits(target.run(moved), expected)
        else:
            with pytest.raises(ValueError, match=rf"^{name}: .*{self.WORDS}"):
                target.load(moved)(moved)
            assert_same_bits(target.run(problem), expected)

    @pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
    def test_strides(self, target: Target, name: str) -> None:
        problem = random_problem(device=DEVICE)
        like = problem.q if name == "out" else getattr(problem, name)
        raw = like.view(torch.uint8)
        wide = torch.zeros(*raw.shape[:-1], raw.shape[-1] + 8, dtype=torch.uint8, device=DEVICE)
        # 8 bytes more a row of 128 elements: every second row lies between two multiples of 16.
        wide[..., : raw.shape[-1]] = raw
        view = wide.view(like.dtype)[..., :128]
        strategy = target.load(problem)
        with pytest.raises(ValueError, match=rf"^{name}\.stride\(\d\): .*{self.WORDS}"):
            if name == "out":
                strategy(problem, view)
            else:
                strategy(replaced(problem, **{name: view}))


class TestC48LaunchErrors:
    """A launch that fails says so in its own call, by name, and the next call works."""

    def test_of_the_attention(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """No tensor map of keys at an odd address, should the check of it ever be missing."""
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        raw = problem.k_cache.contiguous().view(torch.uint8)
        flat = torch.zeros(raw.numel() + 8, dtype=torch.uint8, device=DEVICE)
        moved = replaced(problem, k_cache=flat[8:].view(raw.shape).view(E4M3))
        with monkeypatch.context() as patch:
            patch.setattr(query_union, "check_alignment", lambda _name, _tensor: None)
            with pytest.raises(RuntimeError, match=r"union_attention .*k_cache.*cudaErrorInvalidValue"):
                target.load(moved)(moved)
        torch.cuda.synchronize()
        assert_same_bits(target.run(problem), expected)

    def test_of_the_preparation(self, target: Target) -> None:
        """A page table whose bitmap no SM can hold, 32 times what is supported."""
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        wide = torch.zeros(problem.batch_size, 2**20, dtype=torch.int32, device=DEVICE)
        wide[:, : problem.max_pages] = problem.page_table
        wider = replaced(problem, page_table=wide)
        with pytest.raises((RuntimeError, ValueError), match=r"prepare_unions|page_table|max_pages"):
            target.load(wider)(wider)
        torch.cuda.synchronize()
        assert_same_bits(target.run(problem), expected)


def test_expanded_keys_are_refused(target: Target) -> None:
    problem = random_problem(device="cuda")
    page = problem.k_cache[:1].contiguous()
    with pytest.raises(ValueError, match=r"k_cache\.stride\(0\): got 0 \(an expanded tensor\)"):
        target.run(replaced(problem, k_cache=page.expand_as(problem.k_cache)))


def test_cache_without_a_page(target: Target) -> None:
    """Nothing is selected, for there is nothing."""
    problem = random_problem(lengths=(), prefixes=(), device="cuda")
    assert_empty(target.run(replaced(problem, k_cache=problem.k_cache[:0], v_cache=problem.v_cache[:0])))


def test_unusable_device_scales(target: Target) -> None:
    """Nobody reads a scale on the host: a NaN or negative one shows, it gives no plausible row."""
    for value in (torch.nan, -1.0):
        problem = random_problem(device="cuda", k_scale=torch.tensor(value, device="cuda"))
        out = target.load(problem)(problem)
        seen = (problem.support >= 0).any(dim=2)[0]
        assert out[seen].isnan().all() and (out[~seen] == 0).all()


def test_narrow_page_table(target: Target) -> None:
    """Lengths on a device are never checked: ids past the table's width are not looked up."""
    problem = paged_case([[0, 1, 2, 3]] * 3, prefixes=[400], v=page_number, device=DEVICE)
    narrow = replaced(problem, page_table=problem.page_table[:, :2].clone())
    assert_close(target, target.run(narrow), 0.5)


def test_interface(target: Target) -> None:
    problem = random_problem(device=DEVICE)
    assert pw.load(target.strategy).resolve(problem) == ("cuda", "fp8")  # what a CUDA tensor gets by itself
    assert pw.load(target.strategy).capabilities["cuda"].graph_capturable
    with pytest.raises(ValueError, match=r"arithmetic: got 'float32', supported by union\d on cuda"):
        pw.load(target.strategy, arithmetic="float32")(problem)
    wide_cache = random_problem(device=DEVICE, kv_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"k_cache\.dtype: got torch\.bfloat16, supported by union\d on cuda"):
        pw.load(target.strategy)(wide_cache)
    with pytest.raises(ValueError, match=r"page_size: got 64, supported by union\d on cuda: \(128,\)"):
        pw.load(target.strategy)(random_problem(device=DEVICE, page_size=64))


def test_workspace_of_a_longer_context(target: Target) -> None:
    """What a call of 8,192 pages left behind is in nobody's way."""
    longest, problem = long_context(1), messy(0)
    strategy = target.load(longest)
    workspace = strategy.workspace(longest)
    first, expected = target.run(longest), target.run(problem)
    strategy(longest, workspace=workspace)
    out = strategy(problem, workspace=merged(workspace, strategy.workspace(problem)))
    assert torch.equal(out.float().cpu(), expected.out)
    assert_same_bits(target.run(longest), first)


def merged(workspace: pw.Workspace, other: pw.Workspace) -> pw.Workspace:
    """The larger one of each pair of buffers."""
    buffers = {
        name: max(buffer, other.buffers[name], key=torch.Tensor.numel)
        for name, buffer in workspace.buffers.items()
    }
    return pw.Workspace(workspace.strategy, buffers)
