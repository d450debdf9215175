"""The arithmetic policies at their edges: step by step, and through every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
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
    linear_codes,
    normalize_q,
    quantize_q,
    split_e4m3,
    split_q,
)
from pageweaver.common.problem import AttentionProblem, make_problem
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset
from pageweaver.strategies.query_union import unions

from .helpers import (
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
# A part f of an octave above a power of two the line through E4M3's numbers is (1 + f) 2**-f 2**(-3/64) of
# the exponential: 0.968, at f = 0, to 1.028. A code is rounded to the nearest, 1 + f by up to 1/16: to
# 2**(-1/16) 0.968 = 0.927 of the exponential at f = 1/16, to 1.5 2**(-7/16) 0.968 = 1.072 at f = 7/16.
LINE_ERROR, LINEAR_ERROR = 0.032, 0.0731
POLICY_ERROR = {**P_ERROR, LINEAR: LINEAR_ERROR}


def policy(name: str) -> Arithmetic:
    """One of `POLICIES`."""
    return Arithmetic("fp8", linear_codes=True) if name == LINEAR else Arithmetic(name)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread and two, for what must not depend on how work is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


class TestLinearCodes:
    # E4M3's numbers by the format: an exponent of four bits with bias 7, three bits of fraction.
    VALUES = np.array(
        [(8 + code % 8) * 2.0 ** (code // 8 - 10) if code >= 8 else code * 2.0**-9 for code in range(127)]
    )

    @staticmethod
    def weights(exponents: torch.Tensor) -> torch.Tensor:
        return policy(LINEAR).weights(exponents).double()

    @staticmethod
    def octaves() -> torch.Tensor:
        """4,096 exponents an octave, in the middle between ties, for octaves of normal codes."""
        return -(torch.arange(13 * 4096) + 0.5) / 4096

    def test_table(self) -> None:
        assert torch.equal(torch.from_numpy(self.VALUES), torch.arange(127).byte().view(E4M3).double())
        assert self.VALUES[120] == 256.0

    def test_codes(self) -> None:
        """By fractions, every tie among them: all steps are exact in FP32 here."""
        exponents = torch.arange(-20 * 256, 1) / 256
        places = [Fraction(step, 256) * 8 + Fraction(957, 8) for step in range(-20 * 256, 1)]
        expected = [round(max(place, place * Fraction(3, 16) + 4, 0)) for place in places]
        assert linear_codes(exponents).tolist() == expected
        assert np.array_equal(self.weights(exponents).numpy(), self.VALUES[expected])

    def test_random_codes(self) -> None:
        exponents = -torch.rand(200_000, generator=torch.Generator().manual_seed(2)) * 17
        places = exponents.double().numpy() * 8 + 119.625
        places = np.maximum(np.maximum(places, places * 3 / 16 + 4), 0.0)
        # FP32 rounds the place by at most 2**-18, and may take it over a tie of codes.
        off = np.abs(linear_codes(exponents).numpy() - places)
        assert off.max() <= 0.5 + 2.0**-18

    def test_error(self) -> None:
        exponents = self.octaves()
        ratio = self.weights(exponents) / torch.exp2(exponents.double() + 8)
        places = exponents.double().numpy() * 8 + 119.625
        line = np.interp(places, np.arange(127), self.VALUES) / np.exp2(exponents.double().numpy() + 8)
        assert line.min() >= 1 - LINE_ERROR and line.max() <= 1 + LINE_ERROR
        # The bound is met, or it would say nothing.
        assert 0.07 < (ratio - 1).abs().max() <= LINEAR_ERROR

    def test_mean_of_an_octave(self) -> None:
        """The line is 0.7% above on average (4.1% without the 3/8 of a code), and rounding adds nothing."""
        exponents = self.octaves()
        means = (self.weights(exponents) / torch.exp2(exponents.double() + 8)).view(13, 4096).mean(dim=1)
        assert ((means - 1).abs() <= 0.01).all()

    def test_monotone(self) -> None:
        exponents = torch.linspace(-20, 0, 100_001)
        weights = self.weights(exponents)
        assert (weights.diff() >= 0).all()
        # Every number of E4M3 up to 2**8 comes up.
        assert weights.unique().tolist() == self.VALUES[:121].tolist()

    def test_edges(self) -> None:
        # Half a code, the last that is rounded to 0, is 17.2865 octaves below the maximum.
        exponents = torch.tensor([0.0, -0.0, -17.2866, -17.2864, -30.0, -1e38, -3e38, -math.inf, math.nan])
        expected = [256.0, 256.0, 0.0, 2.0**-9, 0.0, 0.0, 0.0, 0.0, 7.0]
        assert self.weights(exponents).nan_to_num(7.0).tolist() == expected

    def test_as_the_kernel_counts(self) -> None:
        """All FP16 numbers up to 125, by the kernel's four steps: integers are in the order of numbers."""
        places = np.arange(65536, dtype=np.uint16).view(np.float16)
        places = places[places <= 125]
        with np.errstate(over="ignore"):
            exact = places.astype(np.float64)  # FP16 rounds a fused multiply-add once
            line, tail = (exact + 1024).astype(np.float16), (exact * 3 / 16 + 1028).astype(np.float16)
        found = np.maximum(np.maximum(line.view(np.int16), tail.view(np.int16)), 0x6400)
        exponents = (torch.from_numpy(places.astype(np.float32)) - 119.625) / 8
        assert len(places) > 54_000 and (found >> 8 == 0x64).all()
        assert np.array_equal(found & 0xFF, linear_codes(exponents).numpy())

    def test_bits_of_one_element(self, threads: int) -> None:
        exponents = -torch.rand(70_001) * 16
        whole = linear_codes(exponents)
        for start, end in ((0, 1), (3, 8), (5, 36), (69_990, 70_001), (17, 60_000)):
            assert torch.equal(linear_codes(exponents[start:end].clone()), whole[start:end])

    @pytest.mark.parametrize("name", [name for name in ARITHMETICS if name != "fp8"])
    def test_other_policies(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"linear_codes: got True for arithmetic '{name}', supported: "):
            Arithmetic(name, linear_codes=True)

    def test_nrms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At most 5% of float64, as asked of "fp8", and little more than exponentials that are rounded."""
        problem = make_problem(preset("mid").tail(33))
        expected, _ = exact_attention(problem)
        target = Target("union8")
        error = nrms(target.run(problem).out, expected)
        monkeypatch.setattr(unions, "Arithmetic", lambda name, **_: Arithmetic(name))
        rounded = nrms(target.run(problem).out, expected)
        assert rounded < error <= min(0.05, 1.2 * rounded)

    @pytest.mark.parametrize(("share", "bound"), [(0.5, 0.04), (0.8, 0.05), (0.9, 0.08), (0.95, 0.13)])
    def test_below_a_sink(self, share: float, bound: float) -> None:
        """A key of V = 0 takes most of the weight; the output is what 2,047 keys far below it make.

        In a model of these steps 64 rows have 3.1, 3.8, 5.5 and 9.9%, exponentials that are rounded 2.7, 2.8,
        3.3 and 5.8%, and a single line, which ends at 2**-15, 3.2, 7.5, 18 and 38%.
        """
        generator = torch.Generator().manual_seed(5)
        total = error = 0.0
        for _ in range(32):
            logits = torch.randn(2048, generator=generator).double() / math.log(2)
            logits[0] = torch.exp2(logits[1:]).sum().log2() + math.log2(share / (1 - share))
            values = torch.randn(2048, 16, generator=generator).double()
            values[0] = 0
            exact = torch.softmax(logits * math.log(2), dim=0) @ values
            weights = self.weights((logits - logits.max()).float())
            total += float((exact**2).sum())
            error += float(((weights @ values / weights.sum() - exact) ** 2).sum())
        assert math.sqrt(error / total) <= bound

    @pytest.mark.parametrize(
        ("target", "weight"),
        [
            (Target("union4"), 192.0),
            (Target("union8"), 192.0),
            (Target("per_query"), 192.0),
            (Target("page_union"), 176.0),
            (Target("union8", "split"), 181.0),
        ],
        ids=str,
    )
    def test_who_has_them(self, target: Target, weight: float) -> None:
        """A key half an octave below the maximum: 2**7.5 is 181, of which E4M3 makes 176 and the line 192."""
        problem = paged_case(
            [[0]],
            prefixes=[1],
            q0=1.0,
            k0=lambda _, positions: -0.5 * positions,
            v=lambda _, positions: positions.float(),
            softmax_scale=math.log(2),
        )
        result = target.run(problem)
        assert result.out.flatten().tolist() == pytest.approx([weight / (256 + weight)] * 2048, rel=2.0**-8)

    @pytest.mark.parametrize("strategy", ["union4", "union8"])
    def test_v_of_one_gives_exactly_one(self, strategy: str) -> None:
        problem = random_problem(seed=3)
        v_cache = torch.ones_like(problem.v_cache.float()).to(problem.v_cache.dtype)
        result = Target(strategy).run(replaced(problem, v_cache=v_cache))
        live = result.lse > -math.inf
        assert live.any() and (result.out[live] == 1).all() and (result.out[~live] == 0).all()


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
