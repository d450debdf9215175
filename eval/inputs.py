"""Queries, keys and values to measure errors on: normal, heavy-tailed, and as large as a trained model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from pageweaver.common.problem import HEAD_DIM, AttentionProblem, make_problem
from pageweaver.common.selection import Selection

E4M3_MAX = 448.0
HEAVY_DEGREES = 3
# Of "model": spread of the channels' gains, and the few channels of keys that stand out.
GAIN_SPREAD, OUTLIER_CHANNELS, OUTLIER_GAIN = 0.5, 4, 6.0
SINK_LOGIT, VALUE_SCALE = 6.0, 0.1

# (q shape, cache shape, generator) -> float32 q, keys, values.
Draw = Callable[[torch.Size, torch.Size, torch.Generator], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _normal(
    q: torch.Size, cache: torch.Size, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = (torch.randn(shape, generator=generator) for shape in (q, cache, cache))
    return first, second, third


def _heavy(
    q: torch.Size, cache: torch.Size, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def draw(shape: torch.Size) -> torch.Tensor:
        squares = sum(torch.randn(shape, generator=generator).square() for _ in range(HEAVY_DEGREES))
        chi = torch.as_tensor(squares) / HEAVY_DEGREES
        # Its variance is degrees / (degrees - 2).
        scale = ((HEAVY_DEGREES - 2) / HEAVY_DEGREES) ** 0.5
        return torch.randn(shape, generator=generator) * scale / chi.sqrt()

    return draw(q), draw(cache), draw(cache)


def _model(
    q: torch.Size, cache: torch.Size, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def gains() -> torch.Tensor:
        return torch.exp(GAIN_SPREAD * torch.randn(HEAD_DIM, generator=generator))

    def unit(shape: torch.Size) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn * HEAD_DIM**0.5 / drawn.norm(dim=-1, keepdim=True)

    queries, keys, values = unit(q) * gains(), unit(cache), torch.randn(cache, generator=generator)
    gain = gains()
    gain[torch.randperm(HEAD_DIM, generator=generator)[:OUTLIER_CHANNELS]] *= OUTLIER_GAIN
    keys = keys * gain
    # One direction that every query has: the first slot of every page draws attention by it.
    direction = torch.randn(HEAD_DIM, generator=generator)
    direction /= direction.norm()
    strength = (SINK_LOGIT * HEAD_DIM**0.5) ** 0.5
    queries = queries + strength * direction
    keys[:, 0] += strength * direction
    return queries, keys, values * VALUE_SCALE * gains()


@dataclass(frozen=True)
class Inputs:
    """One kind of input.

    Attributes
    ----------
    draw : callable
    scaled : bool
        Whether an FP8 cache holds values divided by a scale, its largest then being E4M3's.
    about : str
    """

    draw: Draw
    scaled: bool
    about: str


INPUTS: Mapping[str, Inputs] = {
    "normal": Inputs(_normal, False, "N(0, 1) queries, keys and values"),
    "heavy": Inputs(_heavy, False, "Student's t of 3 degrees, unit variance"),
    "model": Inputs(
        _model,
        True,
        "as a trained model's after QK norm: gains by channel, 4 key channels 6 times larger, an attention"
        " sink a page, small values, FP8 caches with scales",
    ),
}


def draw_problem(
    kind: str,
    selection: Selection,
    *,
    group_size: int = 16,
    kv_dtype: torch.dtype = torch.float8_e4m3fn,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> AttentionProblem:
    """Give a selection inputs of a kind: the same numbers on every device.

    Raises
    ------
    ValueError
        No such kind.
    """
    if kind not in INPUTS:
        raise ValueError(f"inputs: got {kind!r}, supported: {', '.join(INPUTS)}")
    problem = make_problem(selection, group_size=group_size, kv_dtype=kv_dtype, seed=seed)
    if kind != "normal":
        chosen = INPUTS[kind]
        generator = torch.Generator().manual_seed(seed)
        q, keys, values = chosen.draw(problem.q.shape, problem.k_cache.shape, generator)
        k_scale, v_scale = (
            float(x.abs().max()) / E4M3_MAX if chosen.scaled and kv_dtype != torch.bfloat16 else 1.0
            for x in (keys, values)
        )
        # Beyond its largest number E4M3 has only NaN.
        most = E4M3_MAX if kv_dtype != torch.bfloat16 else torch.finfo(kv_dtype).max
        k_cache, v_cache = (
            (x / scale).clamp(-most, most).to(kv_dtype) for x, scale in ((keys, k_scale), (values, v_scale))
        )
        problem = replace(
            problem, q=q.bfloat16(), k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale
        )
    names = ("q", "k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table")
    return replace(problem, **{name: getattr(problem, name).to(device) for name in names})
