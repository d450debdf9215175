"""FP8 probabilities of the unions: E4M3 codes linear in the logit, and what they cost."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from pageweaver.common.arithmetic import ARITHMETICS, E4M3, Arithmetic, linear_codes
from pageweaver.common.problem import make_problem
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset
from pageweaver.strategies.query_union import unions

from .helpers import LINE_ERROR, LINEAR_ERROR, Target, paged_case, random_problem, replaced


class TestLinearCodes:
    # E4M3's numbers by the format: an exponent of four bits with bias 7, three bits of fraction.
    VALUES = np.array(
        [(8 + code % 8) * 2.0 ** (code // 8 - 10) if code >= 8 else code * 2.0**-9 for code in range(127)]
    )

    @staticmethod
    def weights(exponents: torch.Tensor) -> torch.Tensor:
        return Arithmetic("fp8", linear_codes=True).weights(exponents).double()

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
