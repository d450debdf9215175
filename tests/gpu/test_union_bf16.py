"""Unions over BF16 caches on Hopper: what the shared cases (contract/) do not ask of a kernel.

Tolerances: on N(0, 1) numbers BF16 outputs alone cost 0.17% NRMS of float64, BF16 probabilities a little
more: 0.3% is asked for. The torch twin rounds the same values; the kernel's exponentials differ from its own
by a few units in the last place of FP32, so that one probability in some thousand rounds to the other side,
by 2**-8 of itself, and hardly an output does: 0.1% between the two.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset
from pageweaver.strategies import query_union

from ..helpers import (
    BF16_ERROR,
    INT32_MAX,
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
from .hopper import BF16_TARGETS, WATCHDOG, missing, use_bf16_caches
from .problems import DEVICE, LONG, MESSY, SIZES, long_context, shuffled_ids, twin
from .test_union_graphs import TestC36Graphs  # noqa: F401

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

BF16 = torch.bfloat16
MOST_NRMS = 0.003
TWIN_NRMS = 0.001
# A sum of rounded probabilities moves by at most 2**-9 of itself.
LSE_ERROR = 2.0**-9


@pytest.fixture(params=BF16_TARGETS, ids=str)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    use_bf16_caches(monkeypatch)
    chosen: Target = request.param
    return chosen


@cache
def messy(case: int) -> pw.AttentionProblem:
    return random_problem(seed=case, device=DEVICE, kv_dtype=BF16, **MESSY, **SIZES[case])


@cache
def selected(name: str, rows: int) -> pw.AttentionProblem:
    """A selection as benchmarks run it, N(0, 1) numbers."""
    return pw.make_problem(preset(name, total_q=rows, prefix=49152), kv_dtype=BF16, device=DEVICE)


def million_tokens(case: int) -> pw.AttentionProblem:
    """The same numbers as in FP8, which BF16 holds exactly."""
    problem = long_context(case)
    return replaced(problem, k_cache=problem.k_cache.bfloat16(), v_cache=problem.v_cache.bfloat16())


def assert_accurate(target: Target, problem: pw.AttentionProblem) -> None:
    """Against float64 and against the torch twin."""
    result, expected = target.run(problem), twin(target).run(problem)
    out, lse = (x.cpu() for x in exact_attention(problem))
    dead = lse == -torch.inf
    assert torch.equal(result.lse == -torch.inf, dead), "lse: -inf in other rows"
    assert_empty(result[dead.all(dim=1)])
    assert nrms(result.out, out) <= MOST_NRMS
    assert nrms(result.out, expected.out) <= TWIN_NRMS
    assert torch.where(dead, 0.0, (result.lse - lse).abs()).max() <= LSE_ERROR
    # The same probabilities are summed, in FP32 on both sides.
    assert torch.where(dead, 0.0, (result.lse - expected.lse).abs()).max() <= LSE_ERROR / 4


class TestAccuracy:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_messy(self, target: Target, case: int) -> None:
        assert_accurate(target, messy(case))

    @pytest.mark.parametrize("name", ["low", "high"])
    def test_selections(self, target: Target, name: str) -> None:
        assert_accurate(target, selected(name, 1000))

    @pytest.mark.parametrize("case", range(len(LONG)))
    def test_a_million_tokens(self, target: Target, case: int) -> None:
        assert_accurate(target, million_tokens(case))

    def test_accumulators_keep_fp32(self, target: Target) -> None:
        """Sums of products are not cut to the 13 bits that FP8 products leave.

        Raw scores are 64 for even keys and 64 + 2**-13 for odd ones, and the scale makes that twice as
        probable. Cut to 13 bits both are 64.
        """
        problem = paged_case([[0]], prefixes=[127], v=lambda _, positions: positions % 2, device=DEVICE)
        k_cache, q = problem.k_cache.clone(), torch.ones_like(problem.q)
        k_cache[..., :64], k_cache[..., 64:] = 1.0, 0.0
        k_cache[:, 1::2, :, 64] = 2.0**-13
        fine = replaced(problem, q=q, k_cache=k_cache, softmax_scale=2.0**13 * math.log(2))
        assert_close(target, target.run(fine), 2 / 3, spread=1.0)

    @pytest.mark.parametrize("size", [1e2, 1e4, 1e7, 1e15, 1e30, 3e38])
    @pytest.mark.parametrize("group_size", [16, 2])
    def test_huge_logits(self, target: Target, size: float, group_size: int) -> None:
        """Rounding of logits far from 0 leaves a row's largest probability alone, and other rows too.

        Such rows are nearly one-hot: the order of FP32 additions may turn a near-tie, in few of them.
        """
        problem = random_problem(seed=7, group_size=group_size, device=DEVICE)
        scale = torch.ones(problem.total_q, 1, 1, device=DEVICE)
        scale[::2] = size
        huge = replaced(problem, q=(problem.q.float().clamp(-1, 1) * scale).bfloat16())
        result, wanted = target.run(huge), twin(target).run(huge)
        assert result.out.isfinite().all() and result.lse.isfinite().equal(wanted.lse.isfinite())
        error = (result.out - wanted.out)[::2].norm(dim=-1) / wanted.out[::2].norm(dim=-1).clamp(min=1e-6)
        assert (error > 0.1).float().mean() <= 0.01
        assert_same_bits(target.run(replaced(huge, q=problem.q.clamp(-1, 1)))[1::2], result[1::2])

    @pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
    def test_ones(self, target: Target, size: float) -> None:
        """V = 1 comes back, whatever the probabilities are rounded to: their sum is of the rounded ones."""
        problem = selected("mid", 1000)
        ones = replaced(problem, v_cache=torch.ones_like(problem.v_cache), q=problem.q * size)
        assert (target.run(ones).out - 1).abs().max() <= BF16_ERROR

    def test_scales_on_the_device(self, target: Target) -> None:
        scales: dict[str, Any] = {"k_scale": 0.7, "v_scale": 1.9, "softmax_scale": 0.11}
        problem = random_problem(device=DEVICE, **scales)
        fetched = {name: torch.tensor(x, device=DEVICE) for name, x in scales.items()}
        assert_same_bits(target.run(replaced(problem, **fetched)), target.run(problem))
        assert_accurate(target, problem)
        for value in (torch.nan, -1.0):
            out = target.load(problem)(replaced(problem, k_scale=torch.tensor(value, device=DEVICE)))
            seen = (problem.support >= 0).any(dim=2)[0]
            assert out[seen].isnan().all() and (out[~seen] == 0).all()


class TestSameBits:
    @staticmethod
    def assert_any_grouping(problem: pw.AttentionProblem) -> None:
        """union4, union8 and a regrouped order, in any order of queries."""
        expected = BF16_TARGETS[0].run(problem)
        for target in BF16_TARGETS:
            assert_same_bits(target.run(problem), expected)
            strategy = target.load(problem)
            for seed in range(2):
                out = torch.full_like(expected.out, torch.nan, dtype=BF16, device=DEVICE)
                lse = torch.full_like(expected.lse, 777.0, device=DEVICE)
                workspace = strategy.workspace(problem)
                poison(workspace)
                ids = shuffled_ids(problem, seed)
                schedule = strategy.prepare(problem, workspace, query_ids=ids)  # type: ignore[call-arg]
                strategy.execute(problem, schedule, out, lse)
                assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_messy(self, case: int) -> None:
        self.assert_any_grouping(messy(case))

    @pytest.mark.parametrize("name", ["low", "high"])
    def test_selections(self, name: str) -> None:
        self.assert_any_grouping(selected(name, 4096))

    def test_a_million_tokens(self) -> None:
        self.assert_any_grouping(million_tokens(1))

    def test_values_of_any_size(self) -> None:
        """A page of huge values that a query did not select costs its own small ones no bit."""
        problem = messy(0)
        rng = torch.Generator().manual_seed(1)
        sizes = torch.exp2(torch.randint(-60, 61, (problem.num_pages, 1, 1, 1), generator=rng).float())
        self.assert_any_grouping(
            replaced(problem, v_cache=(problem.v_cache.float() * sizes.to(DEVICE)).bfloat16())
        )

    @pytest.mark.parametrize("kind", ["low", "high"])
    def test_c50_repeats(self, target: Target, kind: str) -> None:
        """The same bits 50 times while another stream keeps the GPU busy."""
        problem = selected(kind, 4096)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
        strategy(problem, out, lse, workspace)
        expected, expected_lse = out.clone(), lse.clone()
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            matrix = torch.ones(4096, 4096, dtype=BF16, device=DEVICE)
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


@pytest.mark.parametrize("valid", [1, 2, 63, 64, 65, 100, 127, 128])
@pytest.mark.parametrize("group_size", [16, 1])
def test_unwritten_slots(target: Target, valid: int, group_size: int) -> None:
    """NaN and infinities past a request's length reach no row, nor the cache itself a zero."""
    for fill in ((torch.nan, torch.nan), (torch.inf, -torch.inf)):
        problem = paged_case(
            [[0, 1, 2]] * 70 + [[2, 0]] * 2,
            lengths=[70, 1, 1],
            prefixes=[256 + valid - 70, 255 + valid, 255 + 128],
            unwritten=fill,
            group_size=group_size,
            device=DEVICE,
        )
        before = [x.clone() for x in (problem.k_cache, problem.v_cache)]
        result = target.run(problem)
        seen = torch.tensor([256 + valid - 69 + i for i in range(70)])
        whole = [(seen - 128 * page).clamp(0, 128) for page in range(3)]
        mean = sum(page * count for page, count in enumerate(whole)) / seen
        assert_close(target, result[:70], mean[:, None, None], seen.float().log()[:, None])
        for row, count in ((70, valid), (71, 128)):
            mean = torch.tensor(2.0 * count / (128 + count))
            assert_close(target, result[row : row + 1], mean, math.log(128 + count))
        for old, new in zip(before, (problem.k_cache, problem.v_cache), strict=True):
            assert torch.equal(old.view(torch.int16), new.view(torch.int16)), "written to"


class TestC32Views:
    """Strides are followed: bit-identical to contiguous copies."""

    @pytest.mark.parametrize("heads", [1, 2])
    def test_caches(self, target: Target, heads: int) -> None:
        problem = random_problem(num_kv_heads=heads, group_size=16 // heads, device=DEVICE)
        keys, values = problem.k_cache.contiguous(), problem.v_cache.contiguous()
        expected = target.run(replaced(problem, k_cache=keys, v_cache=values))
        pages = problem.num_pages
        packed = torch.cat([keys, values], dim=-1)
        wide = torch.full((pages, 128, heads, 384), torch.nan, dtype=BF16, device=DEVICE)
        wide[..., 8:136], wide[..., 160:288] = keys, values
        pool = torch.full((2 * pages, 128, heads, 256), torch.nan, dtype=BF16, device=DEVICE)
        pool[1::2] = packed
        views: dict[str, tuple[torch.Tensor, ...]] = {
            "packed rows": (packed[..., :128], packed[..., 128:]),
            "unbound pair": torch.stack([keys, values], dim=1).unbind(1),
            "slices of wide rows": (wide[..., 8:136], wide[..., 160:288]),
            "head-major pages": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values)),
            "every second page": (pool[1::2, ..., :128], pool[1::2, ..., 128:]),
            "K and V apart": (packed[..., :128], values),
        }
        if heads == 1:
            # The stride of a dimension of one element means nothing.
            views["odd stride"] = tuple(
                x.as_strided(x.shape, (*x.stride()[:2], 1, 1)) for x in (keys, values)
            )
        for name, (k_view, v_view) in views.items():
            assert torch.equal(k_view.view(torch.int16), keys.view(torch.int16)), name
            assert_same_bits(target.run(replaced(problem, k_cache=k_view, v_cache=v_view)), expected)

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_refused(self, target: Target, name: str) -> None:
        """The copy engine reads K and V: alignment and strides that it cannot follow are refused by name."""
        problem = random_problem(device=DEVICE)
        cache = getattr(problem, name).contiguous()
        flat = torch.zeros(cache.numel() + 8, dtype=BF16, device=DEVICE)
        wide = torch.zeros(*cache.shape[:-1], 132, dtype=BF16, device=DEVICE)
        for view, words in (
            (flat[4:-4].view(cache.shape), "got an address 8 bytes past a multiple of 16"),
            (wide[..., :128], r"got \d+ bytes, supported: multiples of 16"),
            (cache[:1].expand_as(cache), r"got 0 \(an expanded tensor\)"),
        ):
            with pytest.raises(ValueError, match=rf"^{name}.*{words}"):
                target.run(replaced(problem, **{name: view}))


def test_c30_caches_past_32_bits(target: Target) -> None:
    """Element 2**31 of a cache lies in page 131,072."""
    pages = 131080
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free device memory")
    keys, values = torch.zeros(pages, 2, 128, 1, 128, dtype=BF16, device=DEVICE).unbind(1)
    # What a product of 32 bits would read in place of page 131,077 is page 5.
    for page, value in ((5, 7.0), (131077, 2.0), (65539, 3.0), (3, 9.0), (6, 1.0)):
        values[page] = value
    problem = pw.AttentionProblem(
        q=torch.zeros(8, 16, 128, dtype=BF16, device=DEVICE),
        k_cache=keys,
        v_cache=values,
        q2k_indices=torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE).expand(1, 8, 3),
        cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor([520], dtype=torch.int32, device=DEVICE),
        page_table=torch.tensor([[6, 131077, 65539, 6, 6]], dtype=torch.int32, device=DEVICE),
    )
    assert_close(target, target.run(problem), 2.0, math.log(384))


def test_no_page_and_narrow_table(target: Target) -> None:
    """Nothing is selected where there is nothing, and ids past the table's width are not looked up."""
    empty = random_problem(lengths=(), prefixes=(), device=DEVICE)
    assert_empty(target.run(replaced(empty, k_cache=empty.k_cache[:0], v_cache=empty.v_cache[:0])))
    problem = paged_case([[0, 1, 2, 3]] * 3, prefixes=[400], v=page_number, device=DEVICE)
    narrow = replaced(problem, page_table=problem.page_table[:, :2].clone())
    assert_close(target, target.run(narrow), 0.5)


def test_interface(target: Target) -> None:
    problem = random_problem(device=DEVICE)
    strategy = pw.load(target.strategy)
    assert strategy.resolve(problem) == ("cuda", "bf16")  # what a BF16 cache gets by itself
    sizes = {name: buffer.numel() for name, buffer in strategy.workspace(problem).buffers.items()}
    assert sizes["packed_v"] == sizes["packed_slots"] == 0, "packed V, which nobody reads"
    with pytest.raises(ValueError, match=r"arithmetic: got 'fp8', supported by \w+ on cuda .*\('bf16',\)"):
        pw.load(target.strategy, arithmetic="fp8")(problem)
    with pytest.raises(ValueError, match=r"page_size: got 64, supported by \w+ on cuda: \(128,\)"):
        strategy(random_problem(device=DEVICE, page_size=64))
    if target.strategy == "union8":
        words = r"mapping: got 'cluster', supported by union8 for torch\.bfloat16: \('independent',\)"
        for call in ("workspace", "prepare", "__call__"):
            with pytest.raises(ValueError, match=words):
                getattr(pw.load("union8", mapping="cluster"), call)(problem)


def test_failed_launch(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor map of values at an odd address, should the check of it ever be missing: named, then over."""
    problem = random_problem(device=DEVICE)
    expected = target.run(problem)
    cache = problem.v_cache.contiguous()
    flat = torch.zeros(cache.numel() + 8, dtype=BF16, device=DEVICE)
    moved = replaced(problem, v_cache=flat[4:-4].view(cache.shape))
    with monkeypatch.context() as patch:
        patch.setattr(query_union, "check_alignment", lambda _name, _tensor: None)
        with pytest.raises(RuntimeError, match=r"bf16_attention .*v_cache.*cudaErrorInvalidValue"):
            target.load(moved)(moved)
    torch.cuda.synchronize()
    assert_same_bits(target.run(problem), expected)


def test_after_fp8(target: Target) -> None:
    """A workspace without room for V is refused where V is packed; that room is in nobody's way."""
    problem, fp8 = random_problem(device=DEVICE), random_problem(device=DEVICE, kv_dtype=torch.float8_e4m3fn)
    expected = target.run(problem)
    strategy = target.load(problem)
    packed = pw.load(target.strategy)
    with pytest.raises(ValueError, match=r"workspace\['packed_slots'\]"):
        packed(fp8, workspace=strategy.workspace(problem))
    workspace = packed.workspace(fp8)
    packed(fp8, workspace=workspace)
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
    strategy(problem, out, lse, workspace)
    assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)


def test_v_of_one_page_only(target: Target) -> None:
    """V = 1 in a page and NaN in all that nobody selected; ids of no page among them."""
    problem = paged_case([[3, -1, INT32_MAX, 3]] * 5, prefixes=[600], v=constant(1.0), device=DEVICE)
    values = torch.full_like(problem.v_cache, torch.nan)
    page = int(problem.page_table[0, 3])
    values[page] = 1.0
    assert_close(target, target.run(replaced(problem, v_cache=values)), 1.0, math.log(128))
