"""The whole call as one torch operator, ``pageweaver::sparse_prefill``, for torch.compile."""

from __future__ import annotations

import torch

from pageweaver.common.problem import AttentionProblem
from pageweaver.common.strategy import load

_LIBRARY = torch.library.Library("pageweaver", "DEF")
_LIBRARY.define(
    "sparse_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor q2k_indices, *, Tensor cu_seqlens_q,"
    " Tensor seqused_k, Tensor page_table, float softmax_scale, Tensor? softmax_scale_tensor, float k_scale,"
    " Tensor? k_scale_tensor, float v_scale, Tensor? v_scale_tensor, Tensor(a!) out, Tensor(b!)? lse,"
    " str strategy, str? backend, str? arithmetic) -> ()"
)


def _run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q2k_indices: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    softmax_scale_tensor: torch.Tensor | None,
    k_scale: float,
    k_scale_tensor: torch.Tensor | None,
    v_scale: float,
    v_scale_tensor: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    strategy: str,
    backend: str | None,
    arithmetic: str | None,
) -> None:
    problem = AttentionProblem(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        q2k_indices=q2k_indices,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale if softmax_scale_tensor is None else softmax_scale_tensor,
        k_scale=k_scale if k_scale_tensor is None else k_scale_tensor,
        v_scale=v_scale if v_scale_tensor is None else v_scale_tensor,
    )
    load(strategy, backend=backend, arithmetic=arithmetic)(problem, out, lse)


_LIBRARY.impl("sparse_prefill", _run, "CompositeExplicitAutograd")


@torch.library.register_fake("pageweaver::sparse_prefill", lib=_LIBRARY)
def _fake(*arguments: object, **options: object) -> None:
    """Outputs are the caller's; nothing is made."""


def split_scale(scale: float | torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """A scale as the operator takes it: a number, and the tensor that stands for it where there is one."""
    return (1.0, scale) if isinstance(scale, torch.Tensor) else (float(scale), None)
