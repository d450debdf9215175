"""The arithmetic policies at their edges: step by step, and through every strategy."""

from __future__ import annotations

import math

import pytest
import torch

from pageweaver.common.arithmetic import (
    ARITHMETICS,
    E4M3,
    E4M3_MAX,
    LOG2E,
    Arithmetic,
    SoftmaxState,
    batched_matmul,
    exp2,
    normalize_q,
    quantize_q,
    split_e4m3,
    split_q,
)
from pageweaver.common.problem import AttentionProblem

from .helpers import (
    LINE_ERROR,
    LINEAR_ERROR,
    P_ERROR,
    PerToken,
    Result,
    Target,
    assert_close,
    assert_same_bits,
    constant,
    naive_attention,
    paged_case,
    random_problem,
    replaced,
)

# "fp8" with exponentials, as page_union has it, and with codes linear in the logit, as the unions have it.
LINEAR = "fp8, linear codes"
POLICIES = (*ARITHMETICS, LINEAR)
POLICY_ERROR = {**P_ERROR, LINEAR: LINEAR_ERROR}


def policy(name: str) -> Arithmetic:
    """One of `POLICIES`."""
    return Arithmetic("fp8", linear_codes=True) if name == LINEAR else Arithmetic(name)


class TestExp2:
    def test_accuracy(self) -> None:
        x = torch.cat([torch.linspace(-126, 127.99, 100_001), torch.randn(100_000) * 3])
        relative = (exp2(x).double() / torch.exp2(x.double()) - 1).abs().max()
        # Nine multiply-adds on [1, 2), each rounded twice, the last ones dominating: three units of 2**-24.
        assert relative <= 3 * 2.0**-24

    def test_whole_numbers_are_exact(self) -> None:
        x = torch.arange(-126.0, 128.0)
        assert torch.equal(exp2(x).double(), torch.exp2(x.double()))

    def test_edges(self) -> None:
        x = torch.tensor([-math.inf, -1e30, -127.0, -126.001, math.nan, 0.0, -0.0])
        assert exp2(x).nan_to_num(7.0).tolist() == [0.0, 0.0, 0.0, 0.0, 7.0, 1.0, 1.0]

    def test_monotone(self) -> None:
        x = torch.linspace(-20, 0, 50_001)
        assert (exp2(x).diff() >= 0).all() and exp2(x).max() == 1.0

    def test_bits_of_one_element(self, threads: int) -> None:
        x = torch.randn(70_001) * 8 - 10
        whole = exp2(x)
        for start, end in ((0, 1), (3, 8), (5, 36), (69_990, 70_001), (17, 60_000)):
            assert torch.equal(exp2(x[start:end].clone()), whole[start:end])


class TestQuantizeQ:
    def test_relative_error(self) -> None:
        q = (torch.randn(500, 16, 128) * torch.logspace(-30, 30, 500)[:, None, None]).bfloat16()
        q8, scale = quantize_q(q)
        assert q8.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == (500, 16)
        values = q8.double() * scale[..., None].double()
        error = (values - q.double()).abs()
        amax = q.double().abs().amax(dim=-1, keepdim=True)
        # Half a unit of three mantissa bits, or of the smallest E4M3 number (2**-9 of 448) below that; ties,
        # and so the bound itself, are common, and the FP32 scale is rounded.
        assert (
            error <= (q.double().abs() * P_ERROR["fp8"]).maximum(amax * 2.0**-10 / E4M3_MAX) * 1.00001
        ).all()
        assert (q8.float().abs().amax(dim=-1) == E4M3_MAX).all()

    @pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-30, 2.0**-100, 1.0, 3e38, -3.3895e38])
    def test_edge_rows(self, value: float) -> None:
        q = torch.full((1, 16, 128), value).bfloat16()
        q8, scale = quantize_q(q)
        assert scale.isfinite().all() and (scale > 0).all() and q8.float().isfinite().all()
        restored = q8.double() * scale.double()[..., None]
        # A row below the floor may vanish: its logits do too, |q.k| <= 2**-100 * 448 * 128.
        assert ((restored - q.double()).abs() <= q.double().abs() * 1e-6 + 2.0**-100).all()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_other_rows_are_untouched(self, value: float) -> None:
        q = torch.randn(3, 16, 128).bfloat16()
        clean, clean_scale = quantize_q(q)
        q[1, 5, 9] = value
        q8, scale = quantize_q(q)
        other = torch.ones(3, 16, dtype=torch.bool)
        other[1, 5] = False
        assert torch.equal(q8.view(torch.uint8)[other], clean.view(torch.uint8)[other])
        assert torch.equal(scale[other], clean_scale[other])
        assert q8[1, 5].float().isnan().any()


class TestSplit:
    @pytest.mark.parametrize("most", [448.0, 1.0, 2.0**-6])
    def test_error(self, most: float) -> None:
        values = (torch.rand(100_000) * 2 - 1) * most
        high, low = split_e4m3(values)
        assert high.dtype == low.dtype == E4M3
        total = high.float() + low.float()
        assert torch.equal(total.double(), high.double() + low.double())
        # Eight significant bits, and half of the smallest E4M3 number.
        error = (total.double() - values.double()).abs()
        assert (error <= (values.double().abs() * 2.0**-9).clamp(min=2.0**-10)).all()
        assert error.max() > most * 2.0**-11

    def test_eight_bits_are_exact(self) -> None:
        eight_bits = torch.arange(128.0, 256.0)
        values = torch.cat([eight_bits * 2.0**power for power in range(-9, 1)])
        high, low = split_e4m3(values)
        assert torch.equal(high.float() + low.float(), values)

    def test_queries(self) -> None:
        q = (torch.randn(500, 16, 128) * torch.logspace(-30, 30, 500)[:, None, None]).bfloat16()
        high, low, scale = split_q(q)
        assert high.dtype == low.dtype == E4M3 and scale.dtype == torch.float32 and scale.shape == (500, 16)
        assert (torch.frexp(scale).mantissa == 0.5).all(), "powers of two"
        error = ((high.double() + low.double()) * scale[..., None].double() - q.double()).abs()
        amax = q.double().abs().amax(dim=-1, keepdim=True)
        assert (error <= amax * 2.0**-17).all()
        assert (error[q.double().abs() >= amax * 2.0**-9] == 0).all()
        assert (error > 0).any(), "the smallest elements are rounded"

    @pytest.mark.parametrize("value", [0.0, 1e-45, 9.2e-41, 1e-38, 2.0**-126, 1.0, 3e38, -3.3895e38])
    def test_edge_rows(self, value: float) -> None:
        q = torch.full((1, 16, 128), value).bfloat16()
        values, scale = normalize_q(q)
        assert torch.equal(values.double() * scale.double()[..., None], q.double())
        assert values.abs().max() < 2 and (scale > 0).all()
        high, low, scale = split_q(q)
        restored = (high.double() + low.double()) * scale.double()[..., None]
        # A subnormal row may lose bits: its logits are nothing.
        assert ((restored - q.double()).abs() <= 2.0**-140).all()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_other_rows_are_untouched(self, value: float) -> None:
        q = torch.randn(3, 16, 128).bfloat16()
        clean = split_q(q)
        q[1, 5, 9] = value
        other = torch.ones(3, 16, dtype=torch.bool)
        other[1, 5] = False
        broken = split_q(q)
        for part, clean_part in zip(broken, clean, strict=True):
            assert torch.equal(part.float()[other], clean_part.float()[other])
        assert (broken[0].float() + broken[1].float())[1, 5].isnan().any()


class TestBatchedMatmul:
    @pytest.mark.parametrize("group_size", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize("page_size", [64, 128])
    def test_bits_of_one_item(self, group_size: int, page_size: int, threads: int) -> None:
        items = 301
        q = torch.randn(items, group_size, 128)
        pages = torch.randn(items, page_size, 128)
        weights = torch.randn(items, group_size, page_size)
        for a, b in ((q, pages.transpose(1, 2)), (weights, pages)):
            whole = batched_matmul(a, b)
            assert torch.allclose(whole, a @ b, atol=1e-4)
            for start, end in ((0, 1), (300, 301), (7, 9), (5, 36), (100, 301)):
                part = batched_matmul(a[start:end].clone(), b[start:end].clone())
                assert torch.equal(part, whole[start:end])

    def test_no_items(self) -> None:
        assert batched_matmul(torch.zeros(0, 4, 8), torch.zeros(0, 8, 3)).shape == (0, 4, 3)


class TestOnlineSoftmax:
    @staticmethod
    def run(name: str, logits: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        """One head-row over pages of 64 tokens: ``[pages, 64]`` logits and values."""
        arithmetic = policy(name)
        q = torch.zeros(1, 1, 128).bfloat16()
        q[..., 0] = 1.0
        # `logits` in natural units: the factor turns products into base 2 and must be exact in E4M3 steps.
        operand, factor = arithmetic.load_q(q, torch.tensor(1.0))
        state = SoftmaxState.empty(1, 1, 128, torch.device("cpu"))
        for page_logits, page_values in zip(logits, values, strict=True):
            keys = torch.zeros(1, 64, 128)
            keys[0, :, 0] = page_logits
            seen = (page_logits > -math.inf)[None]
            keys.masked_fill_(~seen[..., None], 0)
            content = page_values.reshape(1, 64, 1).expand(1, 64, 128)
            arithmetic.update(state, torch.zeros(1).long(), operand, factor, keys, content, seen)
        out, lse = arithmetic.finish(state, torch.tensor(1.0))
        assert (out == out[0, 0, 0]).all()
        return float(out[0, 0, 0]), float(lse[0, 0])

    @pytest.mark.parametrize("name", POLICIES)
    def test_random(self, name: str) -> None:
        generator = torch.Generator().manual_seed(1)
        for spread in (0.1, 1.0, 5.0):
            logits = torch.randn(9, 64, generator=generator) * spread
            values = torch.randn(9, 64, generator=generator)
            out, lse = self.run(name, logits, values)
            weights = torch.softmax(logits.double().flatten(), dim=0)
            # Independent roundings mostly cancel: the worst case of the sum is far away.
            tolerance = 4 * POLICY_ERROR.get(name, 0.0) / math.sqrt(3) * float(weights.norm()) + 1e-5
            assert abs(out - float(weights @ values.double().flatten())) <= tolerance
            # Where logits lie in a part of an octave, what the line is off by there stays in the sum.
            tolerance += -math.log(1 - LINE_ERROR) if name == LINEAR else 0.0
            assert abs(lse - float(torch.logsumexp(logits.double().flatten(), 0))) <= tolerance

    @pytest.mark.parametrize("name", POLICIES)
    @pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
    def test_weights_sum_to_one(self, name: str, spread: float) -> None:
        """The sum takes what was multiplied: rounded weights still sum to one."""
        out, _ = self.run(name, torch.randn(32, 64) * spread, torch.ones(32, 64))
        assert out == pytest.approx(1.0, abs=1e-5)

    @pytest.mark.parametrize("name", POLICIES)
    def test_nothing_seen(self, name: str) -> None:
        dead = torch.full((3, 64), -math.inf)
        assert self.run(name, dead, torch.ones(3, 64)) == (0.0, -math.inf)
        # And a page after it counts as if it were the first.
        live = torch.cat([dead, torch.full((1, 64), -2.0)])
        out, lse = self.run(name, live, torch.full((4, 64), 3.0))
        assert out == pytest.approx(3.0, rel=1e-6) and lse == pytest.approx(math.log(64) - 2, rel=1e-5)

    @pytest.mark.parametrize("name", POLICIES)
    @pytest.mark.parametrize("logit", [-37.3, -1.0, 0.0, 0.7, 300.0])
    def test_one_key(self, name: str, logit: float) -> None:
        """The maximum is 1, or 2**8, in every policy: nothing of its LSE is rounded but in FP32."""
        logits = torch.full((2, 64), -math.inf)
        logits[1, 17] = logit
        out, lse = self.run(name, logits, torch.full((2, 64), 3.0))
        assert out == 3.0 and lse == pytest.approx(logit, rel=1e-6, abs=1e-6)

    @pytest.mark.parametrize("name", POLICIES)
    def test_nan(self, name: str) -> None:
        """A row with a NaN among its logits is NaN, whatever came before and comes after."""
        for poisoned in range(3):
            arithmetic = policy(name)
            state = SoftmaxState.empty(1, 2, 128, torch.device("cpu"))
            operand, factor = arithmetic.load_q(torch.ones(1, 2, 128).bfloat16(), torch.tensor(1.0))
            for page in range(3):
                q = operand.clone()
                q[0, 0] = math.nan if page == poisoned else 1.0
                keys, values = torch.zeros(1, 64, 128), torch.ones(1, 64, 128)
                seen = torch.ones(1, 64, dtype=torch.bool)
                arithmetic.update(state, torch.tensor([0]), q, factor, keys, values, seen)
            out, lse = arithmetic.finish(state, torch.tensor(1.0))
            assert out[0, 0].isnan().all() and lse[0, 0].isnan()
            assert (out[0, 1] == 1).all() and lse[0, 1] == pytest.approx(math.log(192), rel=1e-6)

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match=r"arithmetic: got 'fp16', supported: \('fp8', 'split', "):
            Arithmetic("fp16")

    def test_factor_is_bounded(self) -> None:
        for name in ARITHMETICS:
            operand, factor = Arithmetic(name).load_q(
                torch.full((1, 1, 128), 3e38).bfloat16(), torch.tensor(1.0)
            )
            largest = operand.double().abs().sum() * 448 * factor.double()
            assert largest < 3e38
            operand, factor = Arithmetic(name).load_q(torch.ones(1, 1, 128).bfloat16(), torch.tensor(0.5))
            assert operand.double() @ torch.ones(128).double() * factor == pytest.approx(64 * LOG2E, rel=1e-6)


def spread_out(request: int, positions: torch.Tensor) -> torch.Tensor:
    """One strong key at position 40, 2,000 weak ones around it."""
    return 8.0 * (positions == 40)


# name -> (q0 of the rows, k0, v, largest difference of values)
EDGES: dict[str, tuple[list[float], PerToken, PerToken, float]] = {
    # softmax_scale * 8 * q0 = 0.7, 3.5, 7.1, 9.9, 11.3: the strong key outweighs 2, 33, 1,200, 20,000 and
    # 80,000 weak ones; at 7.6 both sides have the same mass.
    "one strong key and 2,000 weak ones": (
        [1.0, 5.0, 10.0, 14.0, 16.0, 10.75],
        spread_out,
        lambda _, positions: 1.0 * (positions != 40),
        1.0,
    ),
    "one weak key and 2,000 strong ones": (
        [-1.0, -5.0, -10.0, -16.0],
        spread_out,
        lambda _, positions: 1.0 + 7.0 * (positions == 40),
        7.0,
    ),
    "2,000 equal keys": ([1.0, -3.0, 0.0], constant(2.0), lambda _, p: (p % 4).float(), 0.0),
    "logits that rise page after page": (
        [0.5, 4.0, 16.0, 64.0],
        lambda _, positions: (positions // 128).float(),
        lambda _, positions: positions // 128 + 1.0,
        15.0,
    ),
    "logits that fall page after page": (
        [-0.5, -4.0, -16.0, -64.0],
        lambda _, positions: (positions // 128).float(),
        lambda _, positions: positions // 128 + 1.0,
        15.0,
    ),
    "negative logits": (
        [4.0, 16.0, 64.0, 448.0],
        lambda _, positions: -8.0 - (positions % 2),
        lambda _, positions: 1.0 + (positions % 2),
        1.0,
    ),
    "huge logits of both signs": (
        [448.0, -448.0, 1e4, 1e30],
        lambda _, positions: 448.0 * (positions % 2) - 224.0,
        lambda _, positions: 1.0 + (positions % 2),
        1.0,
    ),
    "rows that vanish": ([0.0, 1e-38, -1e-38, 1e-30], constant(448.0), lambda _, p: (p % 8).float(), 0.0),
}


def edge_problem(target: Target, name: str, v: PerToken | None = None) -> AttentionProblem:
    q0, k0, values, _ = EDGES[name]
    # Every row sees 2,001 keys or a few more.
    return paged_case(
        [list(range(16))] * len(q0),
        prefixes=[2000],
        q0=torch.tensor(q0),
        k0=k0,
        v=v or values,
        device=target.device,
    )


@pytest.mark.parametrize("name", EDGES)
def test_edges(target: Target, name: str) -> None:
    problem = edge_problem(target, name)
    result = target.run(problem)
    out, lse = naive_attention(problem)
    # Q0 in BF16 is exact after its quantisation: dim 0 alone is the row's maximum.
    assert_close(target, result, out, lse, spread=EDGES[name][3])


@pytest.mark.parametrize("name", EDGES)
def test_v_of_one_gives_one(target: Target, name: str) -> None:
    result = target.run(edge_problem(target, name, constant(1.0)))
    assert ((result.out - 1).abs() <= 0.03).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_v_of_one_gives_one_for_random_rows(target: Target, scale: float) -> None:
    problem = random_problem(softmax_scale=scale, device=target.device)
    v_cache = torch.ones_like(problem.v_cache.float()).to(problem.v_cache.dtype)
    result = target.run(replaced(problem, v_cache=v_cache))
    live = result.lse > -math.inf
    assert live.any() and ((result.out[live] - 1).abs() <= 0.03).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_query_stays_in_its_row_and_head(target: Target, value: float) -> None:
    """Contract point 6."""
    problem = random_problem(device=target.device)
    clean = target.run(problem)
    row = int((clean.lse[:, 3] > -math.inf).nonzero()[5])
    q = problem.q.clone()
    q[row, 3, 17] = value
    result = target.run(replaced(problem, q=q), nan_rows=[row])
    assert not torch.equal(result.out[row, 3], clean.out[row, 3])
    result.out[row, 3], result.lse[row, 3] = clean.out[row, 3], clean.lse[row, 3]
    assert_same_bits(result, clean)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_bad_key_or_value_stays_in_its_request(target: Target, cache: str) -> None:
    """Contract point 6: rows of a group may share it, another request never sees it."""
    problem = random_problem(lengths=(9, 9, 9), prefixes=(200, 50, 0), past_rows=0, device=target.device)
    clean = target.run(problem)
    pages = problem.page_table[1, :1].long()
    poisoned = getattr(problem, cache).clone()
    poisoned.view(torch.uint8)[pages, 3] = 0x7F
    result = target.run(replaced(problem, **{cache: poisoned}), nan_rows=range(9, 18))
    assert result.out[9:18].isnan().any()
    for rows in (slice(0, 9), slice(18, 27)):
        assert_same_bits(Result(result.out[rows], result.lse[rows]), clean[rows])
