"""page_union: the problem turned round; pages own their queries, partial outputs are combined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from pageweaver.common.arithmetic import Arithmetic, SoftmaxState
from pageweaver.common.problem import AttentionProblem
from pageweaver.common.reference import CHUNK_BYTES, gather_pages
from pageweaver.common.strategy import (
    REFERENCE_CAPABILITIES,
    Capabilities,
    Layout,
    Schedule,
    Strategy,
    Workspace,
    register,
    shape_key,
    source_key,
)
from pageweaver.common.work import WorkReport
from pageweaver.strategies.page_union.pairing import incidence, propose_pairs, work_lists

__all__ = ["PageSchedule", "PageUnion", "combine_partials"]

# Most queries a work unit: a popular page is cut into several, so that no unit outlasts the others.
UNIT_QUERIES = 256


@dataclass(eq=False)
class PageSchedule(Schedule):
    """Work units of pages and the partials they write.

    Attributes
    ----------
    unit_pages : torch.Tensor
        int32 ``[num_kv_heads, max_units, 2]``; logical pages of a unit, the second -1 for a single page.
    unit_offsets : torch.Tensor
        int32 ``[num_kv_heads, max_units + 1]``; members of each unit; unused units are empty.
    unit_queries, unit_slots : torch.Tensor
        int32 ``[num_kv_heads, total_q * topk]``; query and partial slot of each member, then -1.
    partial_counts : torch.Tensor
        int32 ``[num_kv_heads, total_q]``; partials of each query.
    partials : torch.Tensor
        ``[num_kv_heads, total_q, topk, group_size, head_dim]``; normalised partial outputs, bfloat16
        (float32 with arithmetic "float32").
    lse_partials : torch.Tensor
        float32 ``[num_kv_heads, total_q, topk, group_size]``; natural log.
    """

    unit_pages: torch.Tensor
    unit_offsets: torch.Tensor
    unit_queries: torch.Tensor
    unit_slots: torch.Tensor
    partial_counts: torch.Tensor
    partials: torch.Tensor
    lse_partials: torch.Tensor


def combine_partials(partials: torch.Tensor, lse_partials: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge normalised partials by their LSE, slot after slot.

    Parameters
    ----------
    partials : torch.Tensor
        ``[n, slots, ..., head_dim]``; anything, NaN included, where the LSE is -inf.
    lse_partials : torch.Tensor
        float32 ``[n, slots, ...]``, natural log; -inf marks a dead partial.

    Returns
    -------
    out : torch.Tensor
        float32 ``[n, ..., head_dim]``; 0 where all are dead; a single live partial bit for bit.
    lse : torch.Tensor
        float32 ``[n, ...]``; -inf where all are dead.
    """
    top = torch.full(lse_partials.shape[:1] + lse_partials.shape[2:], -torch.inf, device=partials.device)
    for slot in range(partials.shape[1]):
        top = torch.maximum(top, lse_partials[:, slot])
    base = torch.where(top == -torch.inf, 0.0, top)
    total = torch.zeros_like(base)
    out = torch.zeros(base.shape + partials.shape[-1:], device=partials.device)
    for slot in range(partials.shape[1]):
        live = lse_partials[:, slot] != -torch.inf
        weight = torch.exp(lse_partials[:, slot] - base)
        total = total + weight
        out = out + torch.where(live[..., None], weight[..., None] * partials[:, slot].float(), 0.0)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    return out / safe[..., None], torch.where(empty, -torch.inf, base + torch.log(safe))


@register
class PageUnion(Strategy):
    """Pages, then disjoint page pairs, gather their queries; each writes a partial that is combined.

    A pair's two pages share one softmax state for the queries they have in common, which saves a
    partial for each of them; queries of one page only are covered by single-page units. Every edge is
    covered exactly once. Its rounding is its own: partials are stored between producer and combine.

    Parameters
    ----------
    pairs : bool
        False runs single pages, the KV-outer organisation.
    **options
        See `Strategy`.
    """

    name = "page_union"
    capabilities: ClassVar[dict[str, Capabilities]] = {"reference": REFERENCE_CAPABILITIES}

    def __init__(self, *, pairs: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(pairs, bool):
            raise TypeError(f"pairs: got {type(pairs).__name__}, supported: bool")
        self.pairs = pairs

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Work lists and partials; see `PageSchedule`."""
        _, arithmetic = self.resolve(problem)
        heads, total_q, topk = problem.num_kv_heads, problem.total_q, problem.topk
        edges = total_q * topk
        pages = min(problem.batch_size * problem.max_pages, edges)
        # Two pages have at most three lists (common, two exclusive); cutting adds one unit a full piece.
        max_units = min(edges, edges // UNIT_QUERIES + (3 * pages + 1) // 2)
        partial_dtype = torch.float32 if arithmetic == "float32" else torch.bfloat16
        return {
            "unit_pages": ((heads, max_units, 2), torch.int32),
            "unit_offsets": ((heads, max_units + 1), torch.int32),
            "unit_queries": ((heads, edges), torch.int32),
            "unit_slots": ((heads, edges), torch.int32),
            "partial_counts": ((heads, total_q), torch.int32),
            "partials": ((heads, total_q, topk, problem.group_size, problem.head_dim), partial_dtype),
            "lse_partials": ((heads, total_q, topk, problem.group_size), torch.float32),
        }

    def prepare(self, problem: AttentionProblem, workspace: Workspace | None = None) -> PageSchedule:
        """Invert the incidence, pair pages and build the work lists; see `Strategy.prepare`."""
        backend, arithmetic = self.resolve(problem)
        workspace, views = self._views(problem, workspace)
        for name, empty in (
            ("unit_pages", -1),
            ("unit_queries", -1),
            ("unit_slots", -1),
            ("partial_counts", 0),
        ):
            views[name].fill_(empty)
        support = problem.support.cpu().numpy()
        requests = problem.request_ids.cpu().numpy()[:, None]
        max_pages = problem.max_pages
        for head in range(problem.num_kv_heads):
            matrix, keys = incidence(support[head], requests * max_pages + support[head])
            partner = propose_pairs(matrix) if self.pairs else np.full(matrix.shape[0], -1, dtype=np.int64)
            lists = work_lists(matrix, partner, UNIT_QUERIES)
            pages = np.where(lists.unit_pages >= 0, keys[lists.unit_pages] % max_pages, -1)
            units, members = len(pages), len(lists.unit_queries)
            for name, values, count in (
                ("unit_pages", pages, units),
                ("unit_offsets", lists.unit_offsets, units + 1),
                ("unit_queries", lists.unit_queries, members),
                ("unit_slots", lists.unit_slots, members),
                ("partial_counts", lists.partial_counts, problem.total_q),
            ):
                views[name][head, :count] = torch.from_numpy(values).to(views[name])
            views["unit_offsets"][head, units + 1 :] = members
        return PageSchedule(
            strategy=self.name,
            backend=backend,
            arithmetic=arithmetic,
            shape=shape_key(problem),
            sources=source_key(problem),
            workspace=workspace,
            **views,
        )

    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        v_scale = problem.scale_tensor("v_scale")
        schedule.lse_partials.fill_(-torch.inf)
        for head in range(problem.num_kv_heads):
            produce_partials(problem, schedule, head)
            heads = slice(head * problem.group_size, (head + 1) * problem.group_size)
            result, result_lse = combine_partials(schedule.partials[head], schedule.lse_partials[head])
            out[:, heads] = (result * v_scale).to(out.dtype)
            if lse is not None:
                lse[:, heads] = result_lse

    def work(self, problem: AttentionProblem) -> WorkReport:
        """See `Strategy.work`; rounds are filled 64-row tiles times the pages of their unit."""
        # Counting needs the lists, not the partials: leave their storage out.
        layout = self.workspace_layout(problem)
        lists = {k: v for k, v in layout.items() if k not in ("partials", "lse_partials")}
        buffers = {
            k: torch.empty(shape, dtype=dtype, device=problem.device) for k, (shape, dtype) in lists.items()
        }
        for name in ("partials", "lse_partials"):
            shape, dtype = layout[name]
            buffers[name] = torch.empty(shape, dtype=dtype, device="meta")
        schedule = self.prepare(problem, Workspace(self.name, buffers))
        sizes = (schedule.unit_offsets[:, 1:] - schedule.unit_offsets[:, :-1]).long()
        pages = (schedule.unit_pages >= 0).sum(dim=2)
        live = sizes > 0
        visits = int(pages[live].sum())
        edges, partials = int((sizes * pages).sum()), int(sizes.sum())
        tiles = -(-sizes // problem.queries_per_tile)
        row_bytes = problem.group_size * (problem.head_dim * schedule.partials.element_size() + 4)
        page_bytes = 2 * problem.page_size * problem.head_dim * problem.k_cache.element_size()
        groups = int(live.sum())
        return WorkReport(
            strategy=self.name,
            edges=edges,
            groups=groups,
            visits=visits,
            reuse=edges / visits if visits else 0.0,
            rounds=int((tiles * pages).sum()),
            mean_union=visits / groups if groups else 0.0,
            max_union=int(pages.max()) if pages.numel() else 0,
            partials=partials,
            saved_partials=edges - partials,
            workspace_bytes=self.workspace_bytes(problem),
            page_bytes=visits * page_bytes,
            partial_bytes=2 * partials * row_bytes,
        )


def produce_partials(problem: AttentionProblem, schedule: PageSchedule, head: int) -> None:
    """Run every unit of one KV head: both pages of a pair in one softmax state, one partial a query."""
    arithmetic = Arithmetic(schedule.arithmetic)
    heads = slice(head * problem.group_size, (head + 1) * problem.group_size)
    factor = problem.scale_tensor("softmax_scale") * problem.scale_tensor("k_scale")
    q, logit_factor = arithmetic.load_q(problem.q[:, heads], factor)
    tokens = torch.arange(problem.page_size, device=problem.device)
    one = torch.ones((), device=problem.device)
    positions, request_ids = problem.positions, problem.request_ids
    offsets = schedule.unit_offsets[head].long()
    members = int(offsets[-1])
    unit = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=problem.device), offsets.diff())
    chunk = max(1, CHUNK_BYTES // (4 * 4 * problem.page_size * problem.head_dim))
    for start in range(0, members, chunk):
        part = slice(start, min(start + chunk, members))
        query = schedule.unit_queries[head, part].long()
        pages = schedule.unit_pages[head].long()[unit[part]]
        state = SoftmaxState.empty(len(query), problem.group_size, problem.head_dim, problem.device)
        for page in pages.unbind(dim=1):
            index = (page >= 0).nonzero().squeeze(1)
            if len(index) == 0:
                continue
            owner = query[index]
            seen = page[index, None] * problem.page_size + tokens <= positions[owner, None]
            keys, values = (
                gather_pages(problem, cache, head, request_ids[owner], page[index])
                .float()
                .masked_fill_(~seen[..., None], 0)
                for cache in (problem.k_cache, problem.v_cache)
            )
            arithmetic.update(state, index, q[owner], logit_factor[owner], keys, values, seen)
        result, result_lse = arithmetic.finish(state, one)
        slot = schedule.unit_slots[head, part].long()
        schedule.partials[head, query, slot] = result.to(schedule.partials.dtype)
        schedule.lse_partials[head, query, slot] = result_lse
