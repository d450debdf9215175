"""The kernels' arithmetic in torch, step by step as Hopper does it.

Every strategy's reference backend computes with one of the policies here, so that what a kernel rounds
can be told apart from what its organisation does. Statistics are FP32 in every policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Below this a head-row's logits vanish in FP32 whatever the keys (|q.k| <= 2**-100 * 448 * 128), and
# 1 / scale would overflow: quantise such a row as if its maximum were this.
Q_AMAX_FLOOR = 2.0**-100
# The largest logit factor: with raw products up to 448 * 448 * 128 (FP8 keys) a finite factor keeps the
# scaled logits finite, so that a huge query gives a one-hot row and not inf - inf.
LOGIT_FACTOR_MAX = 2.0**100
# Probabilities lie in [0, 1] relative to the running maximum. Times 2**8 they use E4M3 down to
# 2**-17 of the maximum; 2**8 < 448 leaves room for rounding up.
P_SCALE_LOG2 = 8.0
# E4M3 has eight codes an octave; code 120 is 2**8.
CODES_PER_OCTAVE = 8.0
# What is rounded to the code of the maximum, 120. Between powers of two a line is above 2**x, by up to 6%:
# 3/8 of a code less, it is 3.2% below to 2.8% above, 0.7% above on average. It has to be less than half a
# code, so that the maximum itself is 2**8 exactly.
TOP_CODE = 120 - 0.375
# Codes under 8 are subnormal: the line of the others would reach 0 at 2**-15 of the maximum, where powers of
# two go on. What is far below one large key, an attention sink, lies there. A second line, from code 5 down
# to 2**-17.3, is within a quarter of them down to code 1, before it is rounded.
TAIL_CODE, TAIL_SLOPE = 4.0, 3.0 / 16.0
LOG2E = math.log2(math.e)

# "split" scales a head-row by a power of two that brings its maximum into [2**7, 2**8), below E4M3_MAX.
Q_SPLIT_LOG2 = 7

ARITHMETICS = ("fp8", "split", "bf16", "float32")


# 2**f on [0, 1): Taylor coefficients of exp(f ln 2), highest first; the rest is under 2**-27.
_EXP2_COEFFICIENTS = tuple(math.log(2) ** k / math.factorial(k) for k in range(9, -1, -1))


def exp2(x: torch.Tensor) -> torch.Tensor:
    """2**x for float32 `x` <= 128, from correctly rounded operations only.

    ``torch.exp2`` rounds an element differently in a vector loop and in its tail, so that a row's bits
    would depend on how many rows ride along. Results below 2**-126 are 0, as in ``ex2.approx.ftz``.
    """
    whole = torch.floor(x).clamp(-127.0, 127.0)
    fraction = x - whole
    power = torch.full_like(fraction, _EXP2_COEFFICIENTS[0])
    for coefficient in _EXP2_COEFFICIENTS[1:]:
        power = power * fraction + coefficient
    # The exponent field of 2**whole; whole = -127 gives the bits of 0. A NaN survives in `power`.
    scale = ((torch.nan_to_num(whole) + 127.0).to(torch.int32) << 23).view(torch.float32)
    return torch.where(x < -126.0, 0.0, power * scale)


def quantize_q(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise queries to E4M3, one scale a head-row (query, head).

    Parameters
    ----------
    q : torch.Tensor
        bfloat16 ``[..., head_dim]``.

    Returns
    -------
    q8 : torch.Tensor
        float8_e4m3fn, the shape of `q`.
    scale : torch.Tensor
        float32 ``[...]``: ``q`` is about ``q8 * scale``.
    """
    values = q.float()
    amax = values.abs().amax(dim=-1).clamp(min=Q_AMAX_FLOOR)
    q8 = (values * (E4M3_MAX / amax)[..., None]).to(E4M3)
    return q8, amax * (1.0 / E4M3_MAX)


def split_e4m3(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two E4M3 numbers, high and low, that sum to each of float32 `values` of at most 448.

    The sum holds eight significant bits or more, down to half of the smallest E4M3 number, 2**-10; it is
    exact in FP32.
    """
    high = values.to(E4M3)
    return high, (values - high.float()).to(E4M3)


def normalize_q(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring queries near 1 by a power of two for each head-row, which rounds nothing.

    Parameters
    ----------
    q : torch.Tensor
        bfloat16 ``[..., head_dim]``.

    Returns
    -------
    values : torch.Tensor
        float32, the shape of `q`; the largest magnitude of a head-row lies in [1, 2), unless it is 0 or
        subnormal. Where a head-row holds an infinity that turns into NaN.
    scale : torch.Tensor
        float32 ``[...]``, powers of two: ``q == values * scale``.
    """
    values = q.float()
    # The exponent field of the maximum alone; that of infinity and NaN is infinity.
    exponent = values.abs().amax(dim=-1).view(torch.int32) & 0x7F800000
    scale = exponent.view(torch.float32).clamp(min=2.0**-126)
    return values / scale[..., None], scale


def split_q(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split queries into two E4M3 parts, with one power of two a head-row as their scale.

    BF16 has eight significant bits, and two E4M3 parts hold eight: with a power of two as the scale nothing
    is rounded but elements under 2**-9 of their row's maximum, by at most 2**-17 of the maximum. A scale
    that brings the maximum to 448 would round every element.

    Parameters
    ----------
    q : torch.Tensor
        bfloat16 ``[..., head_dim]``.

    Returns
    -------
    high, low : torch.Tensor
        float8_e4m3fn, the shape of `q`.
    scale : torch.Tensor
        float32 ``[...]``, powers of two: ``q`` is ``(high + low) * scale``.
    """
    values, scale = normalize_q(q)
    high, low = split_e4m3(values * 2.0**Q_SPLIT_LOG2)
    return high, low, scale * 2.0**-Q_SPLIT_LOG2


def linear_codes(exponents: torch.Tensor) -> torch.Tensor:
    """E4M3 codes of ``2 ** (exponents + 8)``, linear in the exponent.

    Parameters
    ----------
    exponents : torch.Tensor
        float32, at most 0 or NaN.

    Returns
    -------
    torch.Tensor
        uint8, the shape of `exponents`: 120 for 0, 0 for -17.3 and less; 0x7F, E4M3's NaN, for NaN.
    """
    # The product is exact and so is rounding to an integer: one rounding, the sum's, of at most 2**-18.
    places = exponents * CODES_PER_OCTAVE + TOP_CODE
    tail = places * TAIL_SLOPE + TAIL_CODE
    codes = torch.round(torch.maximum(places, tail).clamp(min=0.0))
    return codes.nan_to_num(nan=127.0).to(torch.uint8)


@dataclass
class SoftmaxState:
    """Online softmax of n head-row blocks: what a consumer keeps in registers between pages.

    Attributes
    ----------
    row_max : torch.Tensor
        float32 ``[n, group_size]``; running maximum of the scaled logits in base 2.
    row_sum : torch.Tensor
        float32 ``[n, group_size]``; sum of the probabilities as they were multiplied, relative to
        `row_max`.
    acc : torch.Tensor
        float32 ``[n, group_size, head_dim]``; unnormalised output.
    """

    row_max: torch.Tensor
    row_sum: torch.Tensor
    acc: torch.Tensor

    @classmethod
    def empty(cls, n: int, group_size: int, head_dim: int, device: torch.device) -> SoftmaxState:
        """State before any page."""
        return cls(
            torch.full((n, group_size), -torch.inf, device=device),
            torch.zeros(n, group_size, device=device),
            torch.zeros(n, group_size, head_dim, device=device),
        )


class Arithmetic:
    """One arithmetic policy: operands once, then `update` page after page, then `finish`.

    Parameters
    ----------
    name : {"fp8", "split", "bf16", "float32"}
        How Q and the probabilities are rounded; every policy accumulates in FP32.

        "fp8": E4M3 Q (one scale a head-row) and E4M3 probabilities.
        "split": Q and probabilities each a high and a low E4M3 part. One scale serves both parts, so that
        their products go into one accumulator.
        "bf16": Q as it is, probabilities in BF16.
        "float32": every step in FP32, for telling rounding from organisation.
    linear_codes : bool
        For "fp8" alone: a probability is no exponential that is rounded to E4M3. Its code, the byte, is the
        logit below the maximum times eight and `TOP_CODE`, or a second line far down, rounded. E4M3 codes
        are eight an octave and nearly linear in the logarithm: before it is rounded this is the exponential
        to within 3.2%, and the kernel of the unions computes none.

    Notes
    -----
    "fp8" of the unions is with `linear_codes`; exponentials that are rounded to E4M3 have 3.5% there.

    Measured on N(0, 1) inputs against float64, BF16 outputs included, which alone cost 0.17% NRMS; page_union
    stores BF16 partials besides. LSE: rows of thousands of keys, and of a few keys.

    ======= ====== ================== ======= =======
    policy  unions page_union         LSE     few keys
    ======= ====== ================== ======= =======
    fp8     3.9%   3.4%               0.02    0.08
    split   0.18%  0.24%              1e-4    5e-4
    bf16    0.23%  0.28%              3e-4    1.2e-3
    ======= ====== ================== ======= =======

    Raises
    ------
    ValueError
        `name` is not one of these, or `linear_codes` is set for another policy than "fp8".
    """

    def __init__(self, name: str, *, linear_codes: bool = False) -> None:
        if not isinstance(name, str) or name not in ARITHMETICS:
            raise ValueError(f"arithmetic: got {name!r}, supported: {ARITHMETICS}")
        if linear_codes and name != "fp8":
            raise ValueError(f"linear_codes: got True for arithmetic {name!r}, supported: 'fp8' alone")
        self.name = name
        self.linear_codes = linear_codes
        # Scaled where E4M3 would lose what is small beside the maximum.
        self.p_scale_log2 = P_SCALE_LOG2 if name in ("fp8", "split") else 0.0

    def load_q(self, q: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare queries.

        Parameters
        ----------
        q : torch.Tensor
            bfloat16 ``[n, group_size, head_dim]``.
        factor : torch.Tensor
            0-d float32: ``softmax_scale * k_scale``.

        Returns
        -------
        operand : torch.Tensor
            float32 ``[n, group_size, head_dim]`` holding the values that the tensor core multiplies.
        logit_factor : torch.Tensor
            float32 ``[n, group_size]``; raw products times this are logits in base 2.
        """
        if self.name == "fp8":
            q8, scale = quantize_q(q)
            operand = q8.float()
        elif self.name == "split":
            high, low, scale = split_q(q)
            # Exact, and so is the sum of the two products that it stands for, up to FP32's own rounding.
            operand = high.float() + low.float()
        else:
            # Near 1, so that products of a huge query stay finite.
            operand, scale = normalize_q(q)
        return operand, (scale * (factor * LOG2E)).clamp(max=LOGIT_FACTOR_MAX)

    def weights(self, exponents: torch.Tensor) -> torch.Tensor:
        """Probabilities as the tensor core multiplies them.

        Parameters
        ----------
        exponents : torch.Tensor
            float32, at most 0 or NaN; logits in base 2, less the maximum of their row.

        Returns
        -------
        torch.Tensor
            float32; ``2 ** (exponents + p_scale_log2)``, rounded. NaN stays.
        """
        if self.linear_codes:
            return linear_codes(exponents).view(E4M3).float()
        weights = exp2(exponents + self.p_scale_log2)
        if self.name == "fp8":
            return weights.to(E4M3).float()
        if self.name == "split":
            high, low = split_e4m3(weights)
            return high.float() + low.float()
        return weights.bfloat16().float() if self.name == "bf16" else weights

    def update(
        self,
        state: SoftmaxState,
        index: torch.Tensor,
        q: torch.Tensor,
        logit_factor: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
    ) -> None:
        """Visit one page for each of m head-row blocks.

        Parameters
        ----------
        state : SoftmaxState
            Updated in place at `index`.
        index : torch.Tensor
            int64 ``[m]``, unique; blocks of `state` that visit a page now.
        q, logit_factor : torch.Tensor
            ``[m, group_size, head_dim]`` and ``[m, group_size]``, from `load_q`.
        keys, values : torch.Tensor
            float32 ``[m, page_size, head_dim]``, unseen slots cleared.
        seen : torch.Tensor
            bool ``[m, page_size]``.
        """
        logits = batched_matmul(q, keys.transpose(1, 2)) * logit_factor[..., None]
        logits.masked_fill_(~seen[:, None], -torch.inf)
        old_max = state.row_max[index]
        new_max = torch.maximum(old_max, logits.amax(dim=2))
        # A row that has seen nothing yet: subtract 0, or -inf - -inf is NaN and stays.
        base = torch.where(new_max == -torch.inf, 0.0, new_max)
        weights = self.weights(logits - base[..., None])
        rescale = exp2(old_max - base)
        # The sum takes the rounded probabilities: weights then sum to one whatever was rounded away.
        state.row_sum[index] = state.row_sum[index] * rescale + weights.sum(dim=2)
        state.acc[index] = state.acc[index] * rescale[..., None] + batched_matmul(weights, values)
        state.row_max[index] = new_max

    def finish(self, state: SoftmaxState, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise.

        Returns
        -------
        out : torch.Tensor
            float32 ``[n, group_size, head_dim]``; exactly 0 where nothing was seen.
        lse : torch.Tensor
            float32 ``[n, group_size]``, natural log; -inf where nothing was seen.
        """
        empty = state.row_sum == 0
        total = torch.where(empty, 1.0, state.row_sum)
        out = state.acc * (v_scale / total)[..., None]
        lse = (state.row_max + torch.log2(total.double()).float() - self.p_scale_log2) / LOG2E
        return torch.where(empty[..., None], 0.0, out), torch.where(empty, -torch.inf, lse)


def batched_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product whose bits for one item do not depend on how many items ride along.

    A batch of one takes another code path on the CPU than a batch of several, so it is doubled.
    """
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
