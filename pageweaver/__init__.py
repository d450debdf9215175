"""PageWeaver: query unions over paged KV for page-selected sparse attention.

`sparse_prefill` is the one call that a serving engine needs; `load` gives a strategy with its parts
(workspace, prepare, execute, work) for ablations.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import torch

if find_spec("pageweaver.strategies") is None:
    raise ImportError(
        f"pageweaver is the source folder {__path__[0]}, which lacks the parts that installing puts under it:"
        " run from another folder, or install with `pip install -e .`"
    )

import pageweaver.strategies  # noqa: F401  (registers the strategies)
from pageweaver.common.captures import load_selections, resolve_selection
from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.op import split_scale
from pageweaver.common.problem import DEFAULT_SOFTMAX_SCALE, AttentionProblem, make_problem
from pageweaver.common.reference import exact_attention
from pageweaver.common.selection import Selection
from pageweaver.common.strategy import Schedule, Strategy, Workspace, available, load
from pageweaver.common.work import WorkReport
from pageweaver.strategies.regroup.offline import OfflineIds, search

__version__ = version("pageweaver")

__all__ = [
    "AttentionProblem",
    "OfflineIds",
    "Schedule",
    "Selection",
    "Strategy",
    "UnsupportedDeviceError",
    "WorkReport",
    "Workspace",
    "available",
    "exact_attention",
    "load",
    "load_selections",
    "make_problem",
    "resolve_selection",
    "search",
    "sparse_prefill",
]


def sparse_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q2k_indices: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float | torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    strategy: str = "union8",
    backend: str | None = None,
    arithmetic: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over exactly the KV pages selected for it (Eq. 1 and 2).

    Parameters
    ----------
    q : torch.Tensor
        bfloat16 ``[total_q, num_qo_heads, 128]``; packed queries of all requests.
    k_cache, v_cache : torch.Tensor
        float8_e4m3fn or bfloat16 ``[num_pages, page_size, num_kv_heads, 128]``; paged, strided views
        welcome.
    q2k_indices : torch.Tensor
        int32 ``[num_kv_heads, total_q, topk]``; logical pages of the query's own request, any order, -1
        and duplicates anywhere.
    cu_seqlens_q : torch.Tensor
        int32 ``[batch_size + 1]``; request boundaries in `q`.
    seqused_k : torch.Tensor
        int32 ``[batch_size]``; KV length of each request, this chunk included.
    page_table : torch.Tensor
        int32 ``[batch_size, max_pages]``; logical to physical page.
    softmax_scale : float or torch.Tensor, optional
        Default ``128 ** -0.5``.
    k_scale, v_scale : float or torch.Tensor
        Dequantisation scales of an FP8 cache; a one-element float32 tensor stays on the device.
    out : torch.Tensor, optional
        bfloat16, the shape of `q`; written in place.
    return_lse : bool
        Also return the log-sum-exp.
    strategy : str
        One of `available`. Results are the same bit for bit, but for page_union and for per_query's CUDA
        kernel, which computes in BF16; offline strategies need ids, see `load`.
    backend : {"cuda", "reference"}, optional
        Default by the device of `q`. Nothing falls back silently.
    arithmetic : {"fp8", "split", "bf16", "float32"}, optional
        How queries and probabilities are rounded; statistics are FP32. "fp8" (default for FP8 caches): to
        E4M3, about 4% NRMS on N(0, 1) inputs. "split": into a high and a low E4M3 part each, 0.2%, in 1.3
        to 1.6 times the time (page_union: 1.2 to 1.3; H200, README). "bf16" (default for BF16 caches):
        queries as they are, probabilities in BF16, 0.2%. "float32": every step in FP32 (reference backend;
        `out` is float32). What a backend lacks is refused.

    Returns
    -------
    out : torch.Tensor
        bfloat16 ``[total_q, num_qo_heads, 128]``; exactly 0 for a row with no visible key or past
        ``cu_seqlens_q[-1]``.
    lse : torch.Tensor
        float32 ``[total_q, num_qo_heads]``, natural log, -inf for such a row; only with `return_lse`.

    Raises
    ------
    TypeError, ValueError
        An argument is not supported; the message names it, its value and what is supported.
    UnsupportedDeviceError
        The backend has no kernels for this device or build.
    """
    scale = DEFAULT_SOFTMAX_SCALE if softmax_scale is None else softmax_scale
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: got {type(return_lse).__name__}, supported: bool")
    if torch.compiler.is_compiling():
        # One opaque operator: validation and work happen when it runs.
        if q.requires_grad:
            raise ValueError(
                "q.requires_grad: got True, supported: False (inference; no gradient is computed)"
            )
        if out is None:
            dtype = torch.float32 if arithmetic == "float32" else torch.bfloat16
            out = torch.empty(q.shape, dtype=dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        numbers = {"softmax_scale": scale, "k_scale": k_scale, "v_scale": v_scale}
        parts = {name: split_scale(value) for name, value in numbers.items()}
        torch.ops.pageweaver.sparse_prefill(
            q,
            k_cache,
            v_cache,
            q2k_indices,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
            page_table=page_table,
            **{name: part[0] for name, part in parts.items()},
            **{f"{name}_tensor": part[1] for name, part in parts.items()},
            out=out,
            lse=lse,
            strategy=strategy,
            backend=backend,
            arithmetic=arithmetic,
        )
        return out if lse is None else (out, lse)
    problem = AttentionProblem(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        q2k_indices=q2k_indices,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    runner = load(strategy, backend=backend, arithmetic=arithmetic)
    lse = (
        torch.empty(problem.total_q, problem.num_qo_heads, dtype=torch.float32, device=problem.device)
        if return_lse
        else None
    )
    result = runner(problem, out, lse)
    return result if lse is None else (result, lse)
