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
from pageweaver.strategies.page_union.cuda import (
    CUDA_CAPABILITIES,
    cuda_capacity,
    cuda_layout,
    execute_cuda,
    prepare_cuda,
)
from pageweaver.strategies.page_union.pairing import (
    UNIT_TILES,
    Rounds,
    incidence,
    most_selected,
    paired_limit,
    propose_pairs,
    work_lists,
)
from pageweaver.strategies.query_union.cuda import check_alignment, check_device

__all__ = ["PageSchedule", "PageUnion", "combine_partials"]


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
        int32 ``[num_kv_heads, total_q * topk]``; query and partial slot of each member; places past the
        last member mean nothing.
    partial_counts : torch.Tensor
        int32 ``[num_kv_heads, total_q]``; partials of each query.
    partials : torch.Tensor
        ``[num_kv_heads, total_q, topk, group_size, head_dim]``; normalised partial outputs, bfloat16
        (float32 with arithmetic "float32").
    lse_partials : torch.Tensor
        float32 ``[num_kv_heads, total_q, topk, group_size]``; natural log.
    views : dict
        Every buffer of the workspace, shaped for the problem: those above and what kernels keep beside.
    """

    unit_pages: torch.Tensor
    unit_offsets: torch.Tensor
    unit_queries: torch.Tensor
    unit_slots: torch.Tensor
    partial_counts: torch.Tensor
    partials: torch.Tensor
    lse_partials: torch.Tensor
    views: dict[str, torch.Tensor]


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


# Buffers that execution alone writes.
_RESULTS = ("partials", "lse_partials", "packed_q")


@register
class PageUnion(Strategy):
    """Pages, then disjoint page pairs, gather their queries; each writes a partial that is combined.

    A pair's two pages share one softmax for the queries they have in common, which saves a
    partial for each of them; queries of one page only are covered by single-page units. Every edge is
    covered exactly once. Its rounding is its own: partials are stored between producer and combine.
    A request pairs at most 1,024 pages, fewer in large batches: its most selected ones.

    Parameters
    ----------
    pairs : bool
        False runs single pages, the KV-outer organisation.
    **options
        See `Strategy`.
    """

    name = "page_union"
    capabilities: ClassVar[dict[str, Capabilities]] = {
        "cuda": CUDA_CAPABILITIES,
        "reference": REFERENCE_CAPABILITIES,
    }

    def __init__(self, *, pairs: bool = True, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(pairs, bool):
            raise TypeError(f"pairs: got {type(pairs).__name__}, supported: bool")
        self.pairs = pairs

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Work lists and partials; see `PageSchedule`. On CUDA what the kernels keep beside too."""
        backend, arithmetic = self.resolve(problem)
        heads, total_q, topk = problem.num_kv_heads, problem.total_q, problem.topk
        edges = total_q * topk
        pages = min(problem.batch_size * problem.max_pages, edges)
        # Two pages have at most three lists (common, two exclusive); cutting adds one unit a full piece.
        max_units = min(edges, edges // (UNIT_TILES * problem.queries_per_tile) + (3 * pages + 1) // 2)
        partial_dtype = torch.float32 if arithmetic == "float32" else torch.bfloat16
        layout: Layout = {
            "unit_pages": ((heads, max_units, 2), torch.int32),
            "unit_offsets": ((heads, max_units + 1), torch.int32),
            "unit_queries": ((heads, edges), torch.int32),
            "unit_slots": ((heads, edges), torch.int32),
            "partial_counts": ((heads, total_q), torch.int32),
            "partials": ((heads, total_q, topk, problem.group_size, problem.head_dim), partial_dtype),
            "lse_partials": ((heads, total_q, topk, problem.group_size), torch.float32),
        }
        return cuda_layout(problem, layout, self.pairs, arithmetic) if backend == "cuda" else layout

    def workspace_capacity(self, problem: AttentionProblem) -> Layout:
        """As `Strategy.workspace_capacity`: fewer requests may pair more pages each."""
        layout = self.workspace_layout(problem)
        return cuda_capacity(problem, layout) if self.resolve(problem)[0] == "cuda" else layout

    def prepare(self, problem: AttentionProblem, workspace: Workspace | None = None) -> PageSchedule:
        """Invert the incidence, pair pages and build the work lists; see `Strategy.prepare`."""
        backend, arithmetic = self.resolve(problem)
        if backend == "cuda":
            check_device(problem)
            for name in ("q", "k_cache", "v_cache"):
                check_alignment(name, getattr(problem, name))
        workspace, views = self._views(problem, workspace)
        if backend == "cuda":
            prepare_cuda(problem, views)
        else:
            self._build_lists(problem, views)
        names = "unit_pages unit_offsets unit_queries unit_slots partial_counts partials lse_partials"
        return PageSchedule(
            strategy=self.name,
            backend=backend,
            arithmetic=arithmetic,
            shape=shape_key(problem),
            sources=source_key(problem),
            workspace=workspace,
            views=views,
            **{name: views[name] for name in names.split()},
        )

    def _build_lists(self, problem: AttentionProblem, views: dict[str, torch.Tensor]) -> None:
        """Fill a schedule's lists in torch."""
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
        limit = paired_limit(problem.num_kv_heads, problem.batch_size, max_pages) if self.pairs else 0
        rounds = Rounds.of(problem.batch_size, max_pages, problem.total_q * problem.topk, limit)
        for head in range(problem.num_kv_heads):
            matrix, keys = incidence(support[head], requests * max_pages + support[head])
            if self.pairs:
                counts = np.diff(matrix.indptr).astype(np.int64)
                partner = propose_pairs(matrix, most_selected(counts, keys // max(1, max_pages), limit))
            else:
                partner = np.full(matrix.shape[0], -1, dtype=np.int64)
            turns = keys // rounds.pages if rounds.count > 1 else None
            lists = work_lists(matrix, partner, problem.queries_per_tile, rounds=turns)
            pages = np.where(lists.unit_pages >= 0, keys[lists.unit_pages] % max(1, max_pages), -1)
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

    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        if schedule.backend == "cuda":
            check_alignment("q", problem.q)  # may be another one than the schedule's
            check_alignment("out", out)
            execute_cuda(problem, schedule.views, out, lse, schedule.arithmetic)
            return
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
        buffers = {
            name: torch.empty(shape, dtype=dtype, device="meta" if name in _RESULTS else problem.device)
            for name, (shape, dtype) in self.workspace_layout(problem).items()
        }
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
    """Run every unit of one KV head: both pages of a pair in one softmax, one partial a query."""
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
    chunk = max(1, CHUNK_BYTES // (2 * 4 * 4 * problem.page_size * problem.head_dim))
    for start in range(0, members, chunk):
        part = slice(start, min(start + chunk, members))
        query, slot = (x[head, part].long() for x in (schedule.unit_queries, schedule.unit_slots))
        pages = schedule.unit_pages[head].long()[unit[part]]
        state = SoftmaxState.empty(len(query), problem.group_size, problem.head_dim, problem.device)
        for width in (1, 2):
            index = ((pages >= 0).sum(dim=1) == width).nonzero().squeeze(1)
            if len(index) == 0:
                continue
            owner = query[index]
            keys: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            seen: list[torch.Tensor] = []
            for page in pages[index, :width].unbind(dim=1):
                seen.append(page[:, None] * problem.page_size + tokens <= positions[owner, None])
                for gathered, cache in ((keys, problem.k_cache), (values, problem.v_cache)):
                    tokens_of_page = gather_pages(problem, cache, head, request_ids[owner], page).float()
                    gathered.append(tokens_of_page.masked_fill_(~seen[-1][..., None], 0))
            # One maximum covers the pages of a pair, as if they were one page of twice the size.
            arithmetic.update(
                state,
                index,
                q[owner],
                logit_factor[owner],
                *(torch.cat(x, dim=1) for x in (keys, values, seen)),
            )
        result, result_lse = arithmetic.finish(state, one)
        schedule.partials[head, query, slot] = result.to(schedule.partials.dtype)
        schedule.lse_partials[head, query, slot] = result_lse
