"""regroup_w64, regroup_w128 and auto: regroup queries by page affinity inside a window, on every call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from pageweaver.common.problem import AttentionProblem
from pageweaver.common.strategy import Layout, register
from pageweaver.strategies.query_union import QueryUnion
from pageweaver.strategies.query_union.cuda import OBJECTIVES, WINDOWS, Search, max_windows
from pageweaver.strategies.regroup.greedy import greedy_order

# Slots after which a search of `auto` may give up; as csrc/regroup has it.
SAMPLE = 32


def greedy_query_ids(
    support: torch.Tensor,
    boundaries: Sequence[int],
    *,
    window: int,
    queries_per_group: int,
    queries_per_tile: int,
    objective: str = "visits",
) -> torch.Tensor:
    """Bounded greedy of Eq. 6 for every request and KV head, on the host.

    Parameters
    ----------
    support : torch.Tensor
        int64 ``[num_kv_heads, total_q, topk]``; `AttentionProblem.support`.
    boundaries : sequence of int
        ``cu_seqlens_q``; windows start anew in each request.
    window : int
        Queries a search window. One smaller than a group is widened to a group.
    queries_per_group, queries_per_tile : int
        Selections after which the union resets, and those that share a 64-row tile.
    objective : {"visits", "rounds"}
        What the greedy minimises.

    Returns
    -------
    torch.Tensor
        int32 ``[num_kv_heads, total_q]`` on the support's device; identity past the last request.
    """
    pages = support.to(torch.int32).cpu().numpy()
    heads, total_q = pages.shape[:2]
    ids = np.tile(np.arange(total_q, dtype=np.int32), (heads, 1))
    for head in range(heads):
        for first, last in pairwise(boundaries):
            if last > first:
                ids[head, first:last] = first + greedy_order(
                    np.ascontiguousarray(pages[head, first:last]),
                    window=max(window, queries_per_group),
                    group=queries_per_group,
                    subgroup=min(queries_per_tile, queries_per_group),
                    objective=objective,
                )
    return torch.from_numpy(ids).to(support.device)


class OnlineRegroup(QueryUnion):
    """union8 over query ids that a greedy search makes on every call, inside windows of queries.

    Parameters
    ----------
    objective : {"rounds", "visits"}
        What the search minimises. "visits": new pages of the open group (Eq. 6). "rounds", which runs
        faster (docs/regroup.md): new pages of the open 64-row tile, then of the group; a tile's first
        query goes by the group alone.
    **options
        See `QueryUnion`.

    Raises
    ------
    ValueError
        `objective` is not one of these.
    """

    tiles_per_group = 2
    window: ClassVar[int]

    def __init__(self, *, objective: str = "rounds", **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(objective, str) or objective not in OBJECTIVES:
            raise ValueError(f"objective: got {objective!r}, supported: {OBJECTIVES}")
        self.objective = objective

    def _search(self, problem: AttentionProblem, window: int) -> torch.Tensor:
        return greedy_query_ids(
            problem.support,
            problem.cu_seqlens_q.tolist(),
            window=window,
            queries_per_group=self.queries_per_group(problem),
            queries_per_tile=problem.queries_per_tile,  # full ones, also in a small call
            objective=self.objective,
        )

    def _order(
        self, problem: AttentionProblem, views: dict[str, torch.Tensor], backend: str
    ) -> torch.Tensor | Search | None:
        if backend == "cuda":
            return Search(max(self.window, self.queries_per_group(problem)), self.objective)
        return self._search(problem, self.window)


@register
class RegroupW64(OnlineRegroup):
    """Windows of 64 queries."""

    name = "regroup_w64"
    window = 64


@register
class RegroupW128(OnlineRegroup):
    """Windows of 128 queries."""

    name = "regroup_w128"
    window = 128


@register
class Auto(OnlineRegroup):
    """In every window of 128 queries the original order, that of W64, or that of W128.

    A window is searched where that can save what it costs. No order has fewer rounds (Eq. 4, the work of the
    kernel) than one in which, for each page, all queries that select it stand together; that bound has to be
    below a part of the original order's rounds, a smaller one in smaller calls (`sought_below`).

    A search, of a window or of one of its halves (W64), gives up and keeps the original order if its first 32
    slots need no fewer rounds than those of that one; windows and halves of fewer than 32 queries, such as
    the last of a request, never give up. That of a window gives up after 64 slots too, since its second half
    would hold up the call, if it is of 96 queries or more, its first 64 slots need at least 5/6 of the rounds
    of the first 32 slots of both halves, and the halves need rounds for at most 9/16 of their selected pages.
    A window takes its own order (W128); if that search gave up, or if another order saves more than a
    sixteenth of its rounds, that one of the original order and the halves' with fewer rounds, the original at
    a tie.

    ``schedule.window_choices``, int32 ``[num_kv_heads, max_windows]``, says 0 (original), 1 (halves) or 2
    (its own), windows of a request after those of the one before. A call so small that no window can be
    searched, or that a tile holds one query (`tile_queries`), keeps the original order without a look at its
    pages. Rounds are those of full tiles.
    """

    name = "auto"
    window = 128

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Those of a union schedule, and the choices."""
        layout = super().workspace_layout(problem)  # first: it refuses what is no problem
        shape = (problem.num_kv_heads, max_windows(problem, self.window))
        return {**layout, "window_choices": (shape, torch.int32)}

    def _order(
        self, problem: AttentionProblem, views: dict[str, torch.Tensor], backend: str
    ) -> torch.Tensor | Search | None:
        choices = views["window_choices"]
        # Every order has the same rounds; or no bound is so low, since a tile joins only so many queries.
        if self.queries_per_tile(problem) == 1 or sought_below(problem) * problem.queries_per_tile <= 256:
            choices.zero_()
            return None
        if backend == "cuda":
            return Search(self.window, self.objective, choices, sought_below(problem))
        original = torch.arange(problem.total_q, dtype=torch.int32).expand(problem.num_kv_heads, -1)
        boundaries, support = problem.cu_seqlens_q.tolist(), problem.support.cpu().numpy()

        def rounds(head: int, order: torch.Tensor, slots: slice) -> int:
            return count_rounds(support[head, order[head, slots].numpy()], problem.queries_per_tile)

        def gives_up(head: int, order: torch.Tensor, window: slice) -> bool:
            first = slice(window.start, window.start + SAMPLE)
            return first.stop <= window.stop and rounds(head, order, first) >= rounds(head, original, first)

        orders = [original]  # choice -> order; that of the halves only where they hold a group
        for length in WINDOWS:
            if length >= self.queries_per_group(problem):
                orders.append(self._search(problem, length).cpu())
        for head, half in product(range(len(original)), _windows(boundaries, WINDOWS[0])):
            if len(orders) == 3 and gives_up(head, orders[1], half):
                orders[1][head, half] = original[head, half]

        def stops_half_way(head: int, window: slice) -> bool:
            middle = window.start + WINDOWS[0]
            if len(orders) < 3 or window.stop - middle < SAMPLE:
                return False
            sampled = sum(
                rounds(head, orders[1], slice(half, half + SAMPLE)) for half in (window.start, middle)
            )
            edges = np.count_nonzero(support[head, window] >= 0)
            return bool(
                6 * rounds(head, orders[2], slice(window.start, middle)) >= 5 * sampled
                and 16 * rounds(head, orders[1], window) <= 9 * edges
            )

        ids, most = original.clone(), sought_below(problem)
        choices.zero_()
        for head in range(len(ids)):
            for index, window in enumerate(_windows(boundaries, self.window)):
                least = least_rounds(support[head, window], problem.queries_per_tile)
                if 256 * least >= most * rounds(head, original, window):
                    continue
                *counts, own = (rounds(head, order, window) for order in orders)
                choice, other = 2, counts.index(min(counts))
                given_up = gives_up(head, orders[-1], window) or stops_half_way(head, window)
                if given_up or 16 * counts[other] < 15 * own:
                    choice = other
                choices[head, index] = choice
                ids[head, window] = (orders[-1] if choice == 2 else orders[other])[head, window]
        return ids.to(problem.device)


def _windows(boundaries: Sequence[int], length: int) -> Iterator[slice]:
    """Slots of each search window, request after request."""
    for first, last in pairwise(boundaries):
        for start in range(first, last, length):
            yield slice(start, min(start + length, last))


def sought_below(problem: AttentionProblem) -> int:
    """256ths of the original order's rounds below which the bound of a window has it searched by `auto`.

    From shapes alone, by what was measured (docs/regroup.md): of the rounds between the bound and 0.95 of the
    original ones a search saves about three tenths; it costs 8.8 microseconds, and a call takes 30
    microseconds, and 6.25 nanoseconds for each column of `q2k_indices` of each full tile.
    """
    columns = problem.num_kv_heads * problem.total_q * problem.topk // problem.queries_per_tile
    # 256 x 0.95; 256 x 8.8 us / 0.3 / 6.25 ns; 30 us / 6.25 ns
    return max(0, 243 - 1_200_000 // (columns + 4800))


def least_rounds(pages: NDArray[np.int64], queries_per_tile: int) -> int:
    """Rounds (Eq. 4) that queries need in any order at least: for each page all that select it in a row.

    Parameters are those of `count_rounds`.
    """
    selecting = np.unique(pages[pages >= 0], return_counts=True)[1]
    return int((-(-selecting // queries_per_tile)).sum())


def count_rounds(pages: NDArray[np.int64], queries_per_tile: int) -> int:
    """Rounds (Eq. 4) of queries that run in this order: distinct pages, tile after tile.

    Parameters
    ----------
    pages : numpy.ndarray
        int64 ``[slots, topk]``; canonical pages of each slot's query, -1 = nothing.
    queries_per_tile : int
        Slots of a 64-row tile.
    """
    slot, column = np.nonzero(pages >= 0)
    tiles = slot // queries_per_tile
    return len(np.unique(np.stack([tiles, pages[slot, column]]), axis=1).T)
