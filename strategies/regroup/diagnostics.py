"""Orders of queries that tell what regrouping is worth: given, random, hashed, or moved in memory.

None of these is a way to serve: ids are made on the host, once, and no call pays for them. They run on the
kernels of `QueryUnion`, so that their times differ from union8's by nothing but the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pageweaver.common.problem import AttentionProblem
from pageweaver.common.reference import exact_attention
from pageweaver.common.strategy import Layout, Workspace
from pageweaver.strategies.query_union import QueryUnion, UnionSchedule
from pageweaver.strategies.query_union.unions import check_query_ids
from pageweaver.strategies.regroup.greedy import greedy_order

# Hashes of a signature: enough that queries of equal signature share most of their pages.
SIGNATURE_HASHES = 4


class _GivenIds(QueryUnion):
    """union8 with an order made ahead.

    Parameters
    ----------
    problem : AttentionProblem
        The ids are checked against its requests, here and once: a call checks nothing and never waits.
    query_ids : torch.Tensor
        int32 ``[num_kv_heads, total_q]``; a bijection in each request.
    **options
        See `QueryUnion`.

    Raises
    ------
    TypeError, ValueError
        The ids are none of that; or, when another problem is prepared, not of its shape.
    """

    tiles_per_group = 2

    def __init__(self, problem: AttentionProblem, query_ids: torch.Tensor, **options: Any) -> None:
        super().__init__(**options)
        self.given = check_query_ids(problem, query_ids.to(problem.device)).contiguous()

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """See `QueryUnion.workspace_layout`."""
        layout = super().workspace_layout(problem)  # first: it refuses what is no problem
        shape = (problem.num_kv_heads, problem.total_q)
        if tuple(self.given.shape) != shape:
            raise ValueError(f"query_ids.shape: got {tuple(self.given.shape)}, supported: {shape}")
        return layout


class FixedIds(_GivenIds):
    """union8 over ids that are ready: T_fixed_ids of Eq. 7, which pays for unions and not for grouping."""

    name = "fixed_ids"

    def _views(
        self, problem: AttentionProblem, workspace: Workspace | None
    ) -> tuple[Workspace, dict[str, Any]]:
        workspace, views = super()._views(problem, workspace)
        # The schedule reads the ids where they lie: a copy in every call would be counted as union work.
        views["query_ids"] = self.given
        return workspace, views

    def _order(self, problem: AttentionProblem, views: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
        """The ids themselves; torch launches nothing to copy a tensor onto itself."""
        return self.given


class MaterialisedReorder(_GivenIds):
    """union8 in original order over queries moved in memory: what reading through ids avoids.

    Every call moves q and the page ids into the order of the ids, and the outputs back. A moved query sits at
    the position of the place that it moves to: with it moves the causal edge inside the pages of the chunk,
    so that this arm answers the problem of `moved`, not the caller's.
    """

    name = "reorder"

    def __init__(self, problem: AttentionProblem, query_ids: torch.Tensor, **options: Any) -> None:
        super().__init__(problem, query_ids, **options)
        self._rows = self.given.long()

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """As `QueryUnion.workspace_layout`, and the moved tensors."""
        return {
            **super().workspace_layout(problem),
            "moved_q": (tuple(problem.q.shape), torch.bfloat16),
            "moved_q2k_indices": (tuple(problem.q2k_indices.shape), torch.int32),
            "moved_out": (tuple(problem.q.shape), torch.bfloat16),
            "moved_lse": (tuple(problem.q.shape[:2]), torch.float32),
        }

    def expected(self, problem: AttentionProblem, rows: torch.Tensor) -> torch.Tensor:
        """What output rows should hold, in float64: those of the moved problem."""
        moved, parts = self.moved(problem), []
        for head, slots in enumerate(self._rows.argsort(dim=1)):
            heads = slice(head * problem.group_size, (head + 1) * problem.group_size)
            parts.append(exact_attention(moved, torch.float64, slots[rows])[0][:, heads])
        return torch.cat(parts, dim=1)

    def moved(self, problem: AttentionProblem) -> AttentionProblem:
        """The problem that is answered; its row ``s`` goes to output row ``query_ids[s]``."""
        q, pages = torch.empty_like(problem.q), torch.empty_like(problem.q2k_indices)
        self._move_queries(problem, q)
        self._move_pages(problem, pages)
        return replace(problem, q=q, q2k_indices=pages)

    def prepare(
        self,
        problem: AttentionProblem,
        workspace: Workspace | None = None,
        query_ids: torch.Tensor | None = None,
    ) -> UnionSchedule:
        """Move the page ids, then build their unions; see `QueryUnion.prepare`."""
        if query_ids is not None:
            raise ValueError(f"query_ids: got ids, supported by {self.name}: those that it was made with")
        workspace = workspace or self.workspace(problem)
        name = "moved_q2k_indices"
        pages = workspace.view(name, *self.workspace_layout(problem)[name])
        self._move_pages(problem, pages)
        return super().prepare(replace(problem, q2k_indices=pages), workspace)

    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        views = schedule.views
        self._move_queries(problem, views["moved_q"])
        moved_lse = None if lse is None else views["moved_lse"]
        super()._execute(replace(problem, q=views["moved_q"]), schedule, views["moved_out"], moved_lse)
        for rows, heads in self._heads(problem):
            out[:, heads].index_copy_(0, rows, views["moved_out"][:, heads])
            if lse is not None:
                lse[:, heads].index_copy_(0, rows, views["moved_lse"][:, heads])

    def _heads(self, problem: AttentionProblem) -> Iterator[tuple[torch.Tensor, slice]]:
        """The rows of each KV head, slot to query, and its query heads."""
        for head, rows in enumerate(self._rows):
            yield rows, slice(head * problem.group_size, (head + 1) * problem.group_size)

    def _move_queries(self, problem: AttentionProblem, q: torch.Tensor) -> None:
        for rows, heads in self._heads(problem):
            torch.index_select(problem.q[:, heads], 0, rows, out=q[:, heads])

    def _move_pages(self, problem: AttentionProblem, pages: torch.Tensor) -> None:
        for head, rows in enumerate(self._rows):
            torch.index_select(problem.q2k_indices[head], 0, rows, out=pages[head])


def random_ids(boundaries: Sequence[int], heads: int, total_q: int, seed: int = 0) -> NDArray[np.int32]:
    """Each request's queries in a random order, one a KV head: the least that an order can share.

    Parameters
    ----------
    boundaries : sequence of int
        ``cu_seqlens_q``.
    heads, total_q : int
    seed : int

    Returns
    -------
    numpy.ndarray
        int32 ``[heads, total_q]``; identity past the last request.
    """
    rng = np.random.default_rng(seed)
    ids = np.tile(np.arange(total_q, dtype=np.int32), (heads, 1))
    for head in range(heads):
        for first, last in pairwise(boundaries):
            ids[head, first:last] = first + rng.permutation(last - first)
    return ids


def hashed_ids(
    support: NDArray[np.int64], boundaries: Sequence[int], *, window: int, queries_per_group: int
) -> NDArray[np.int32]:
    """Queries of like pages brought together over the whole request, then the greedy of Eq. 6 in windows.

    Like pages are found by minimum hashes: two queries agree in one with the probability that a page of
    either is of both. Pages that more than half of the request selected say nothing and are left out.

    Parameters
    ----------
    support : numpy.ndarray
        int64 ``[num_kv_heads, total_q, topk]``; `canonical_support`, -1 is nothing.
    boundaries : sequence of int
        ``cu_seqlens_q``.
    window, queries_per_group : int
        Of the greedy, in the hashed order.

    Returns
    -------
    numpy.ndarray
        int32 ``[num_kv_heads, total_q]``; identity past the last request.
    """
    heads, total_q, _ = support.shape
    ids = np.tile(np.arange(total_q, dtype=np.int32), (heads, 1))
    for head in range(heads):
        for first, last in pairwise(boundaries):
            if last == first:
                continue
            pages = support[head, first:last]
            order = _hashed_order(pages)
            moved = np.ascontiguousarray(pages[order], dtype=np.int32)
            window_rows = max(window, queries_per_group)
            ids[head, first:last] = first + order[greedy_order(moved, window_rows, queries_per_group)]
    return ids


def _hashed_order(pages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows sorted by their signatures; equal ones keep their order."""
    count = max(int(pages.max()) + 1, 1)
    selected = np.bincount(pages[pages >= 0], minlength=count)
    known = (pages >= 0) & (selected[pages] <= len(pages) / 2)
    rng = np.random.default_rng(0)
    hashes = [
        np.where(known, rng.permutation(count)[pages], count).min(axis=1) for _ in range(SIGNATURE_HASHES)
    ]
    return np.lexsort(hashes[::-1])
