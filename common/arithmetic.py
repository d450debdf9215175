"""FP8 arithmetic in torch, step by step as the Hopper kernels do it.

Every strategy's reference backend computes with one of the policies here, so that what a kernel rounds
can be told apart from what its organisation does. Statistics are FP32 in both policies.
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
LOG2E = math.log2(math.e)

ARITHMETICS = ("fp8", "float32")


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
    name : {"fp8", "float32"}
        "fp8": E4M3 Q (per head-row scale) and E4M3 probabilities, FP32 accumulation. "float32": every
        step in FP32, for telling rounding from organisation.

    Raises
    ------
    ValueError
        `name` is not one of these.
    """

    def __init__(self, name: str) -> None:
        if name not in ARITHMETICS:
            raise ValueError(f"arithmetic: got {name!r}, supported: {ARITHMETICS}")
        self.name = name

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
        if self.name == "float32":
            values = q.float()
            # Huge rows are brought below 4 by a power of two, which rounds nothing.
            exponent = torch.frexp(values.abs().amax(dim=-1)).exponent.clamp(0, 126)
            power = ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
            return values / power[..., None], (factor * LOG2E * power).clamp(max=LOGIT_FACTOR_MAX)
        q8, scale = quantize_q(q)
        return q8.float(), (scale * (factor * LOG2E)).clamp(max=LOGIT_FACTOR_MAX)

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
        if self.name == "float32":
            weights = exp2(logits - base[..., None])
        else:
            weights = exp2(logits - base[..., None] + P_SCALE_LOG2).to(E4M3).float()
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
        p_scale = 0.0 if self.name == "float32" else P_SCALE_LOG2
        lse = (state.row_max + torch.log2(total.double()).float() - p_scale) / LOG2E
        return torch.where(empty[..., None], 0.0, out), torch.where(empty, -torch.inf, lse)


def batched_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched product whose bits for one item do not depend on how many items ride along.

    A batch of one takes another code path on the CPU than a batch of several, so it is doubled.
    """
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)
