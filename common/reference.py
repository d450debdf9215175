"""Exact page-selected attention (Eq. 1 and 2), the yardstick of every strategy."""

from __future__ import annotations

import torch

from pageweaver.common.problem import AttentionProblem

# Gathered keys, values and scores of one chunk stay under this: 2,048 queries x 16 heads over a 64K
# context then fit in 4 GiB beside the inputs.
CHUNK_BYTES = 512 * 2**20


def gather_pages(
    problem: AttentionProblem, cache: torch.Tensor, head: int, requests: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """Read logical pages through the page table.

    Parameters
    ----------
    problem : AttentionProblem
        Supplies the page table.
    cache : torch.Tensor
        ``k_cache`` or ``v_cache``.
    head : int
        KV head.
    requests, pages : torch.Tensor
        int64 ``[n]``; request and logical page of each item (valid, non-negative).

    Returns
    -------
    torch.Tensor
        ``[n, page_size, head_dim]`` in the cache's dtype.
    """
    physical = problem.page_table[requests, pages].long()
    # Index a byte view: not every device and version indexes float8 tensors.
    raw = cache[:, :, head].view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache[:, :, head]
    return raw[physical].view(cache.dtype)


def exact_attention(
    problem: AttentionProblem, dtype: torch.dtype = torch.float64, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over each query's supported tokens, computed plainly.

    Parameters
    ----------
    problem : AttentionProblem
        The call.
    dtype : torch.dtype
        float64 or float32, for every step.
    rows : torch.Tensor, optional
        int64 ``[n]``; rows of ``q`` to compute, default all of them.

    Returns
    -------
    out : torch.Tensor
        ``[n, num_qo_heads, head_dim]`` in `dtype`; exactly 0 for a row with no visible key.
    lse : torch.Tensor
        ``[n, num_qo_heads]`` in `dtype`, natural log; -inf for such a row.

    Raises
    ------
    TypeError, ValueError
        `problem` is none, `dtype` is neither float64 nor float32, or `rows` are no int64 rows of ``q``.

    Notes
    -----
    Eq. 1 and 2 of the method. Work goes in chunks of queries, so memory stays bounded.
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem: got {type(problem).__name__}, supported: AttentionProblem")
    if dtype not in (torch.float64, torch.float32):
        raise TypeError(f"dtype: got {dtype}, supported: torch.float64, torch.float32")
    if rows is None:
        rows = torch.arange(problem.total_q, device=problem.device)
    else:
        _check_rows(rows, problem.total_q)
        rows = rows.to(problem.device)
    group, tokens = problem.group_size, problem.topk * problem.page_size
    out = torch.zeros(len(rows), problem.num_qo_heads, problem.head_dim, dtype=dtype, device=problem.device)
    lse = torch.full((len(rows), problem.num_qo_heads), -torch.inf, dtype=dtype, device=problem.device)
    row_bytes = dtype.itemsize * tokens * (2 * problem.head_dim + 3 * group)
    chunk = max(1, CHUNK_BYTES // row_bytes)
    scale = problem.scale_tensor("softmax_scale", dtype) * problem.scale_tensor("k_scale", dtype)
    v_scale = problem.scale_tensor("v_scale", dtype)
    offsets = torch.arange(problem.page_size, device=problem.device)
    support, request_ids, positions = problem.support, problem.request_ids, problem.positions
    for head in range(problem.num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        for start in range(0, len(rows), chunk):
            part = rows[start : start + chunk]
            pages = support[head, part]
            live = pages >= 0
            if not live.any():
                continue
            requests = request_ids[part, None].expand_as(pages)
            seen = live[..., None] & (
                pages[..., None] * problem.page_size + offsets <= positions[part, None, None]
            )
            seen = seen.reshape(len(part), tokens)
            keys, values = (
                _zero_unseen(
                    gather_pages(problem, cache, head, requests[live], pages[live]).to(dtype),
                    live,
                    seen,
                )
                for cache in (problem.k_cache, problem.v_cache)
            )
            scores = torch.bmm(problem.q[part, heads].to(dtype), keys.transpose(1, 2)) * scale
            scores.masked_fill_(~seen[:, None], -torch.inf)
            chunk_lse = torch.logsumexp(scores, dim=2)
            # A row with no key has LSE -inf; subtract 0 there so that its weights are 0 and not NaN.
            base = torch.where(chunk_lse == -torch.inf, 0.0, chunk_lse)
            weights = torch.exp(scores - base[..., None])
            out[start : start + chunk, heads] = torch.bmm(weights, values) * v_scale
            lse[start : start + chunk, heads] = chunk_lse
    return out, lse


def _check_rows(rows: object, total_q: int) -> None:
    wanted = f"int64 rows from 0 to {total_q - 1}" if total_q else "int64, no rows (total_q is 0)"
    if not isinstance(rows, torch.Tensor) or rows.dtype != torch.int64:
        got = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise TypeError(f"rows: got {got}, supported: {wanted}")
    if rows.ndim != 1:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, supported: {wanted}, shape [n]")
    # Indexing would count a negative row from the end.
    outside = rows[(rows < 0) | (rows >= total_q)]
    if len(outside):
        raise ValueError(f"rows: got {int(outside[0])}, supported: {wanted}")


def _zero_unseen(pages: torch.Tensor, live: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Lay gathered pages ``[n, page_size, d]`` out per query and clear every unseen slot.

    Unwritten slots may hold NaN, and 0 * NaN is NaN: masking the scores alone is not enough.
    """
    rows, topk = live.shape
    full = torch.zeros(rows, topk, *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    full[live] = pages
    return full.reshape(rows, seen.shape[1], -1).masked_fill_(~seen[..., None], 0)


def nrms(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Normalised root-mean-square error ``||out - reference|| / ||reference||``, in float64.

    Returns NaN when `out` holds one: a NaN never passes as small.
    """
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm())
