"""Union schedules in torch: which pages each group of queries traverses, and who belongs to which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageweaver.common.arithmetic import Arithmetic, SoftmaxState
from pageweaver.common.problem import AttentionProblem
from pageweaver.common.reference import CHUNK_BYTES, gather_pages
from pageweaver.common.strategy import Layout, Schedule
from pageweaver.common.work import WorkReport

MASK_WORD_BITS = 32


@dataclass(eq=False)
class UnionSchedule(Schedule):
    """Groups of execution slots and the pages each group traverses.

    Fields are for reading: kernels derive more from them. To run in another order pass ``query_ids`` to
    `QueryUnion.prepare`.

    Attributes
    ----------
    query_ids : torch.Tensor
        int32 ``[num_kv_heads, total_q]``; slot to query, a bijection inside each request.
    group_offsets : torch.Tensor
        int32 ``[max_groups + 1]``; group ``g`` holds the slots from ``group_offsets[g]`` up to
        ``group_offsets[g + 1]``. Groups never cross requests; unused groups are empty.
    union_pages : torch.Tensor
        int32 ``[num_kv_heads, max_groups, max_union]``; logical pages, ascending, then -1.
    union_masks : torch.Tensor
        int32 ``[num_kv_heads, max_groups, max_union, mask_words]``; bit ``s % 32`` of word ``s // 32``
        says that the group's slot ``s`` selected the page.
    union_counts : torch.Tensor
        int32 ``[num_kv_heads, max_groups]``; pages in each union.
    queries_per_group : int
        Slots of a full group.
    queries_per_tile : int
        Slots of a full tile.
    identity : bool
        Whether `query_ids` is the original order.
    mapping : str
        How the CUDA kernel runs a group; see `QueryUnion`.
    window_choices : torch.Tensor or None
        What strategy "auto" chose, None for all others; see `pageweaver.strategies.regroup.Auto`.
    views : dict
        Every buffer of the workspace, shaped for the problem: those above and what kernels keep beside.
    """

    query_ids: torch.Tensor
    group_offsets: torch.Tensor
    union_pages: torch.Tensor
    union_masks: torch.Tensor
    union_counts: torch.Tensor
    queries_per_group: int
    queries_per_tile: int
    identity: bool
    mapping: str
    window_choices: torch.Tensor | None
    views: dict[str, torch.Tensor]


def union_layout(problem: AttentionProblem, queries_per_group: int) -> Layout:
    """Buffers of a union schedule, from shapes alone.

    A request may end in a partial group, so ``batch_size`` more groups than full ones can exist.
    """
    total_q, batch = problem.total_q, problem.batch_size
    max_groups = min(total_q, (total_q + batch * (queries_per_group - 1)) // queries_per_group)
    max_union = min(queries_per_group * problem.topk, problem.max_pages)
    mask_words = -(-queries_per_group // MASK_WORD_BITS)
    heads = problem.num_kv_heads
    return {
        "query_ids": ((heads, total_q), torch.int32),
        "group_offsets": ((max_groups + 1,), torch.int32),
        "union_pages": ((heads, max_groups, max_union), torch.int32),
        "union_masks": ((heads, max_groups, max_union, mask_words), torch.int32),
        "union_counts": ((heads, max_groups), torch.int32),
    }


def check_query_ids(problem: AttentionProblem, query_ids: torch.Tensor) -> torch.Tensor:
    """Check caller-made ids: a bijection inside each request, identity past the last one.

    Parameters
    ----------
    query_ids : torch.Tensor
        int32 ``[num_kv_heads, total_q]`` on the problem's device. Values are read, so this
        synchronises a CUDA device; it serves ablations, not the hot path.

    Raises
    ------
    TypeError, ValueError
        The dtype, shape or device is wrong, or a request's slots do not name its queries once each.
    """
    shape = (problem.num_kv_heads, problem.total_q)
    if not isinstance(query_ids, torch.Tensor) or query_ids.dtype != torch.int32:
        raise TypeError(
            f"query_ids: got {getattr(query_ids, 'dtype', type(query_ids))}, supported: torch.int32"
        )
    if tuple(query_ids.shape) != shape:
        raise ValueError(f"query_ids.shape: got {tuple(query_ids.shape)}, supported: {shape}")
    if query_ids.device != problem.device:
        raise ValueError(f"query_ids.device: got {query_ids.device}, supported: {problem.device}")
    rows = torch.arange(problem.total_q, device=problem.device)
    ids = query_ids.long()
    inside = (ids >= 0) & (ids < problem.total_q)
    request_ids = problem.request_ids
    own = request_ids[ids.clamp(0, max(problem.total_q - 1, 0))] == request_ids
    if not bool((inside & own).all()) or not bool((ids.sort(dim=1).values == rows).all()):
        raise ValueError(
            "query_ids: got ids that repeat or leave a request, supported: a bijection in each request"
        )
    past = request_ids == problem.batch_size
    if not bool((ids[:, past] == rows[past]).all()):
        raise ValueError("query_ids: got moved rows past cu_seqlens_q[-1], supported: identity there")
    return query_ids


def group_offsets(problem: AttentionProblem, queries_per_group: int, max_groups: int) -> torch.Tensor:
    """First slot of every group: int64 ``[max_groups + 1]``, trailing groups empty."""
    bounds = problem.cu_seqlens_q.long()
    lengths = bounds[1:] - bounds[:-1]
    ends = torch.cumsum((lengths + queries_per_group - 1) // queries_per_group, 0)
    groups = torch.arange(max_groups + 1, device=problem.device)
    if problem.batch_size == 0:
        return torch.zeros_like(groups)
    request = torch.searchsorted(ends, groups, right=True)
    inside = request < problem.batch_size
    request = request.clamp(max=problem.batch_size - 1)
    local = groups - torch.where(request > 0, ends[(request - 1).clamp(min=0)], 0)
    return torch.where(inside, bounds[request] + local * queries_per_group, bounds[-1])


def build_unions(problem: AttentionProblem, views: dict[str, torch.Tensor], queries_per_group: int) -> None:
    """Fill a schedule's tensors from ``views["query_ids"]``.

    Pages of a union are ascending, unique logical pages of the group's request (U_g of Eq. 3);
    masks are its membership M.
    """
    max_groups = views["group_offsets"].shape[0] - 1
    offsets = group_offsets(problem, queries_per_group, max_groups)
    views["group_offsets"].copy_(offsets)
    for name, empty in (("union_pages", -1), ("union_masks", 0), ("union_counts", 0)):
        views[name].fill_(empty)
    if max_groups == 0 or problem.max_pages == 0:
        return
    slots = torch.arange(problem.total_q, device=problem.device)
    support = problem.support
    slot_group = torch.searchsorted(offsets[1:].contiguous(), slots, right=True).clamp(max=max_groups - 1)
    for head in range(problem.num_kv_heads):
        pages = support[head, views["query_ids"][head].long()]
        slot, column = (pages >= 0).nonzero(as_tuple=True)
        group, page = slot_group[slot], pages[slot, column]
        unions, visit = torch.unique(group * problem.max_pages + page, return_inverse=True)
        visit_group = unions // problem.max_pages
        counts = torch.bincount(visit_group, minlength=max_groups)
        rank = torch.arange(len(unions), device=problem.device) - (counts.cumsum(0) - counts)[visit_group]
        views["union_counts"][head] = counts.int()
        views["union_pages"][head, visit_group, rank] = (unions % problem.max_pages).int()
        bit = slot - offsets[group]
        # Edges are unique, so adding single bits is the same as or-ing them.
        words = torch.zeros(
            len(unions), views["union_masks"].shape[-1], dtype=torch.int64, device=problem.device
        )
        words.index_put_((visit, bit // MASK_WORD_BITS), 1 << (bit % MASK_WORD_BITS), accumulate=True)
        views["union_masks"][head, visit_group, rank] = words.to(torch.int32)


def members(
    schedule: UnionSchedule, head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expand membership masks of one KV head, in the order of execution.

    Returns
    -------
    rank, group, slot, page : torch.Tensor
        int64 ``[edges]``; `rank` is the place of the page in its union (ascending over the result),
        `slot` the execution slot.
    """
    bits = torch.arange(schedule.queries_per_group, device=schedule.union_masks.device)
    words = schedule.union_masks[head][..., bits // MASK_WORD_BITS]
    group, rank, bit = ((words >> (bits % MASK_WORD_BITS)) & 1).nonzero(as_tuple=True)
    order = torch.argsort(rank, stable=True)
    group, rank, bit = group[order], rank[order], bit[order]
    slot = schedule.group_offsets.long()[group] + bit
    return rank, group, slot, schedule.union_pages[head].long()[group, rank]


def execute_reference(
    problem: AttentionProblem, schedule: UnionSchedule, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Run a union schedule in torch: pages ascending, each only for its members, online softmax.

    Step ``r`` visits the page of rank ``r`` of every union that is longer than ``r``, as a CTA does
    with one page after another. Outputs go straight to the original rows.
    """
    # As the kernel has them: its probabilities cost no exponential.
    arithmetic = Arithmetic(schedule.arithmetic, linear_codes=schedule.arithmetic == "fp8")
    factor = problem.scale_tensor("softmax_scale") * problem.scale_tensor("k_scale")
    v_scale = problem.scale_tensor("v_scale")
    tokens = torch.arange(problem.page_size, device=problem.device)
    positions, request_ids = problem.positions, problem.request_ids
    chunk = max(1, CHUNK_BYTES // (4 * 4 * problem.page_size * problem.head_dim))
    for head in range(problem.num_kv_heads):
        heads = slice(head * problem.group_size, (head + 1) * problem.group_size)
        q, logit_factor = arithmetic.load_q(problem.q[:, heads], factor)
        state = SoftmaxState.empty(problem.total_q, problem.group_size, problem.head_dim, problem.device)
        rank, _, slot, page = members(schedule, head)
        query = schedule.query_ids[head].long()[slot]
        steps = torch.bincount(rank).tolist() if len(rank) else []
        start = 0
        for step in steps:
            for first in range(start, start + step, chunk):
                part = slice(first, min(first + chunk, start + step))
                index, pages = query[part], page[part]
                seen = pages[:, None] * problem.page_size + tokens <= positions[index, None]
                keys, values = (
                    gather_pages(problem, cache, head, request_ids[index], pages)
                    .float()
                    .masked_fill_(~seen[..., None], 0)
                    for cache in (problem.k_cache, problem.v_cache)
                )
                arithmetic.update(state, index, q[index], logit_factor[index], keys, values, seen)
            start += step
        result, result_lse = arithmetic.finish(state, v_scale)
        out[:, heads] = result.to(out.dtype)
        if lse is not None:
            lse[:, heads] = result_lse


def union_work(
    name: str, problem: AttentionProblem, schedule: UnionSchedule, workspace_bytes: int
) -> WorkReport:
    """Counts of a union schedule: Eq. 3 for groups, Eq. 4 for tiles."""
    queries_per_tile = schedule.queries_per_tile
    counts = schedule.union_counts.long()
    visits, groups = int(counts.sum()), int((counts > 0).sum())
    edges = rounds = 0
    for head in range(problem.num_kv_heads):
        rank, group, slot, _ = members(schedule, head)
        tile = (slot - schedule.group_offsets.long()[group]) // queries_per_tile
        tiles = -(-schedule.queries_per_group // queries_per_tile)
        edges += len(rank)
        key = (group * schedule.union_pages.shape[2] + rank) * tiles + tile
        rounds += len(torch.unique(key))
    page_bytes = 2 * problem.page_size * problem.head_dim * problem.k_cache.element_size()
    # The tiles of a cluster share a load of a page; independent ones load the pages of their own members.
    loads = visits if schedule.mapping == "cluster" else rounds
    return WorkReport(
        strategy=name,
        edges=edges,
        groups=groups,
        visits=visits,
        reuse=edges / visits if visits else 0.0,
        rounds=rounds,
        mean_union=visits / groups if groups else 0.0,
        max_union=int(counts.max()) if counts.numel() else 0,
        partials=0,
        saved_partials=0,
        workspace_bytes=workspace_bytes,
        page_bytes=loads * page_bytes,
        partial_bytes=0,
    )
