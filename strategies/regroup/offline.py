"""offline_w512 and offline_w2048: run ids that were searched ahead in larger windows."""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pageweaver.common.captures import Selection, atomic_write_bytes
from pageweaver.common.native import load_native
from pageweaver.common.problem import (
    GROUP_SIZES,
    TILE_ROWS,
    AttentionProblem,
    selection_support,
    tile_queries,
)
from pageweaver.common.strategy import register
from pageweaver.strategies.query_union import QueryUnion
from pageweaver.strategies.query_union.unions import check_query_ids
from pageweaver.strategies.regroup.improve import Improved, run_slices
from pageweaver.strategies.regroup.online import greedy_query_ids

FORMAT = "pageweaver-query-ids 2"
TILES_PER_GROUP = 2
OBJECTIVES = ("visits", "rounds")


@dataclass(frozen=True, eq=False)
class OfflineIds:
    """Query ids bound to the selection that they were searched for.

    Attributes
    ----------
    query_ids : numpy.ndarray
        int32 ``[num_kv_heads, total_q]``; slot to query.
    selection_sha256 : str
        `Selection.sha256` of that selection; no other is executed with these ids.
    window, queries_per_group : int
        Queries a search window and a group.
    objective : str
        "visits" or "rounds".
    visits, rounds : int
        Work of these ids (Eq. 3 and Eq. 4), summed over requests and KV heads; groups are counted from each
        window's start.
    greedy_visits, greedy_rounds : int
        Work of the greedy's order, from which the improving search starts.
    bound : int
        What the objective cannot fall below inside these windows (`Improved`).
    """

    query_ids: NDArray[np.int32]
    selection_sha256: str
    window: int
    queries_per_group: int
    objective: str
    visits: int
    rounds: int
    greedy_visits: int
    greedy_rounds: int
    bound: int

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with a JSON header, whole or not at all."""
        header = {
            "format": FORMAT,
            "selection_sha256": self.selection_sha256,
            "window": self.window,
            "queries_per_group": self.queries_per_group,
            "objective": self.objective,
            "visits": self.visits,
            "rounds": self.rounds,
            "greedy_visits": self.greedy_visits,
            "greedy_rounds": self.greedy_rounds,
            "bound": self.bound,
        }
        data = save({"query_ids": np.ascontiguousarray(self.query_ids)}, {"pageweaver": json.dumps(header)})
        atomic_write_bytes(path, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OfflineIds:
        """Read a file of `save`.

        Raises
        ------
        FileNotFoundError
            No such file.
        ValueError
            The file is not one of these.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(f"path: got {os.fspath(path)!r}, supported: an existing file of ids")
        try:
            with safe_open(os.fspath(path), framework="numpy") as stream:
                header = json.loads((stream.metadata() or {}).get("pageweaver", "{}"))
                found = header.pop("format", None)
                if found != FORMAT:
                    raise ValueError(f"its format is {found!r}" if found else "it names no format")
                return cls(query_ids=stream.get_tensor("query_ids"), **header)
        except (SafetensorError, OSError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"path: got {os.fspath(path)!r}, supported: safetensors files of format {FORMAT!r} ({error})"
            ) from error


class OfflineSearch:
    """A search of query ids that can be interrupted and continued.

    Parameters
    ----------
    selection, window, objective, group_size, seed, start
        As in `search`.

    Raises
    ------
    ValueError
        As in `search`.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        window: int = 2048,
        objective: str = "rounds",
        group_size: int = 16,
        seed: int = 0,
        start: OfflineIds | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window: got {window!r}, supported: a positive integer")
        if not isinstance(objective, str) or objective not in OBJECTIVES:
            raise ValueError(f"objective: got {objective!r}, supported: {OBJECTIVES}")
        if group_size not in GROUP_SIZES:
            raise ValueError(f"group_size: got {group_size!r}, supported: {GROUP_SIZES}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(f"seed: got {seed!r}, supported: integers from 0 to 2**32 - 1")
        self.window, self.objective, self.seed = window, objective, seed
        self.tile = tile_queries(selection.num_kv_heads * selection.total_q, group_size)
        self.queries_per_group = TILES_PER_GROUP * TILE_ROWS // group_size
        self.selection_sha256 = selection.sha256
        if start is not None:
            self._check_start(start, (selection.num_kv_heads, selection.total_q))
        support = selection_support(selection)
        boundaries = selection.cu_seqlens_q.tolist()
        parts = []
        for head in range(selection.num_kv_heads):
            parts.append(
                greedy_query_ids(
                    support[head : head + 1],
                    boundaries,
                    window=window,
                    queries_per_group=self.queries_per_group,
                    queries_per_tile=self.tile,
                    objective=objective,
                )
            )
            if progress is not None:
                progress((head + 1) / selection.num_kv_heads)
        self._pages = support.to(torch.int32).numpy()
        self._query_ids: NDArray[np.int32] = torch.cat(parts).numpy()
        self._units = [
            (head, first, last)
            for head in range(selection.num_kv_heads)
            for first, last in pairwise(boundaries)
            if last > first
        ]
        self._greedy = [Improved.of(self._improver(index)) for index in range(len(self._units))]
        self._found = list(self._greedy)
        if start is not None:
            self._query_ids = start.query_ids.copy()
            self._found = [Improved.of(self._improver(index)) for index in range(len(self._units))]

    def _check_start(self, start: OfflineIds, shape: tuple[int, int]) -> None:
        if start.selection_sha256 != self.selection_sha256:
            raise ValueError(
                f"start: got ids of another selection, whose SHA-256 is {start.selection_sha256},"
                f" supported: ids of this one, {self.selection_sha256}"
            )
        for name in ("window", "queries_per_group", "objective"):
            got, wanted = getattr(start, name), getattr(self, name)
            if got != wanted:
                raise ValueError(f"start.{name}: got {got}, supported: {wanted}, as in this search")
        if start.query_ids.shape != shape or start.query_ids.dtype != np.int32:
            raise ValueError(
                f"start.query_ids: got {start.query_ids.dtype} {start.query_ids.shape},"
                f" supported: int32 {shape}"
            )

    def _improver(self, index: int) -> Any:
        """The C++ search of one request and KV head, from the ids as they stand."""
        head, first, last = self._units[index]
        return load_native().Improver(
            self._pages[head, first:last],
            self._query_ids[head, first:last] - first,
            # As in greedy_query_ids.
            window=max(self.window, self.queries_per_group),
            group=self.queries_per_group,
            subgroup=self.tile,
            objective=self.objective,
            seed=(self.seed << 32) + index,
        )

    def run(self, seconds: float, progress: Callable[[float], None] | None = None) -> None:
        """Improve the ids for about `seconds`; each request and KV head gets a share by its queries.

        After an exception, KeyboardInterrupt included, `ids` still gives the best found until then.

        Raises
        ------
        ValueError
            `seconds` is not a finite number from 0 up.
        """
        check_seconds(seconds)
        queries = sum(last - first for _, first, last in self._units)
        begun = 0
        for index, (head, first, last) in enumerate(self._units):
            share = (last - first) / queries
            improver = self._improver(index)

            def report(fraction: float, base: float = begun / queries, share: float = share) -> None:
                if progress is not None:
                    progress(base + share * fraction)

            try:
                if seconds > 0:
                    run_slices(improver, seconds * share, report)
            finally:
                self._found[index] = Improved.of(improver)
                self._query_ids[head, first:last] = first + self._found[index].order
            begun += last - first
        if progress is not None:
            progress(1.0)

    def bounds(self) -> tuple[int, int]:
        """What visits and rounds cannot fall below inside these windows (`Improved`)."""
        return sum(x.visits_bound for x in self._greedy), sum(x.rounds_bound for x in self._greedy)

    def ids(self) -> OfflineIds:
        """The best ids found so far."""
        return OfflineIds(
            query_ids=self._query_ids.copy(),
            selection_sha256=self.selection_sha256,
            window=self.window,
            queries_per_group=self.queries_per_group,
            objective=self.objective,
            visits=sum(x.visits for x in self._found),
            rounds=sum(x.rounds for x in self._found),
            greedy_visits=sum(x.visits for x in self._greedy),
            greedy_rounds=sum(x.rounds for x in self._greedy),
            bound=self.bounds()[self.objective == "rounds"],
        )


def check_seconds(seconds: float) -> None:
    """Refuse a time limit that is no finite number from 0 up."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: got {seconds!r}, supported: finite numbers from 0 up")


def search(
    selection: Selection,
    *,
    window: int = 2048,
    objective: str = "rounds",
    group_size: int = 16,
    seconds: float = 0.0,
    seed: int = 0,
    start: OfflineIds | None = None,
    progress: Callable[[float], None] | None = None,
) -> OfflineIds:
    """Search query ids for a selection: the greedy of Eq. 6 in large windows, then swaps while time allows.

    Parameters
    ----------
    selection : Selection
        ``q2k_indices`` int32 ``[num_kv_heads, total_q, topk]`` with its boundaries.
    window : int
        Queries a search window. The strategies run ids of 512 and 2048, the paper's; others are for study.
    objective : {"rounds", "visits"}
        What the search minimises: 64-row rounds (Eq. 4), which the time follows, or visits (Eq. 3).
    group_size : int
        Query heads a KV head; groups hold 128 / group_size queries.
    seconds : float
        About how long to improve the greedy's order; 0 leaves it as it is. How far this comes depends on the
        machine, so only 0 gives the same ids everywhere.
    seed : int
        Of the improving search.
    start : OfflineIds, optional
        Ids of an earlier search of the same selection, window, objective and group size, to go on from.
    progress : callable, optional
        Called with the fraction done, from 0 to 1.

    Returns
    -------
    OfflineIds

    Raises
    ------
    ValueError
        An argument is not supported, or `start` belongs to another search.
    """
    check_seconds(seconds)
    running = OfflineSearch(
        selection,
        window=window,
        objective=objective,
        group_size=group_size,
        seed=seed,
        start=start,
        progress=None if seconds > 0 else progress,
    )
    if seconds > 0:
        running.run(seconds, progress)
    return running.ids()


def problem_sha256(problem: AttentionProblem) -> str:
    """`Selection.sha256` of a problem's selection; copies it to the host, so it synchronises."""
    return Selection(
        name="problem",
        q2k_indices=problem.q2k_indices.cpu().numpy(),
        cu_seqlens_q=problem.cu_seqlens_q.cpu().numpy(),
        seqused_k=problem.seqused_k.cpu().numpy(),
        page_size=problem.page_size,
    ).sha256


class _Checked:
    """Ids on the device, and the selection that they were found to belong to."""

    def __init__(self, problem: AttentionProblem, query_ids: torch.Tensor) -> None:
        self.query_ids = query_ids
        self._group_size = problem.group_size
        self._seen = [(weakref.ref(t), None if t.is_inference() else t._version) for t in _read(problem)]

    def holds(self, problem: AttentionProblem) -> bool:
        """Whether nothing that the check read can have changed since."""
        return self._group_size == problem.group_size and all(
            # Inference tensors keep no count of their changes.
            seen() is tensor and version is not None and version == tensor._version
            for tensor, (seen, version) in zip(_read(problem), self._seen, strict=True)
        )


def _read(problem: AttentionProblem) -> tuple[torch.Tensor, ...]:
    return problem.q2k_indices, problem.cu_seqlens_q, problem.seqused_k


class OfflineRegroup(QueryUnion):
    """union8 over ids from `search`.

    Parameters
    ----------
    ids : OfflineIds
        Searched for the selection that will be executed, with this strategy's window.
    **options
        See `Strategy`.

    Raises
    ------
    TypeError
        `ids` is missing or of another type.
    ValueError
        `ids` were searched in another window; or, when a problem is prepared, for another selection or
        group size, or are no bijection inside its requests.
    """

    tiles_per_group = TILES_PER_GROUP
    window: ClassVar[int]

    def __init__(self, *, ids: OfflineIds | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(ids, OfflineIds):
            raise TypeError(
                f"ids: got {type(ids).__name__}, supported by {self.name}: OfflineIds from"
                f" pageweaver.search(selection, window={self.window}), given to pageweaver.load"
            )
        if ids.window != self.window:
            raise ValueError(f"ids.window: got {ids.window}, supported by {self.name}: {self.window}")
        self.ids = ids
        self._checked: _Checked | None = None

    def _order(self, problem: AttentionProblem, views: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
        """The searched ids, after checking that they belong to this selection and order its queries.

        The check reads the selection on the host. It is not repeated while the very same tensors are
        unchanged, so that a call can be captured after a warm-up.
        """
        if self._checked is None or not self._checked.holds(problem):
            self._checked = _Checked(problem, self._check(problem))
        return self._checked.query_ids

    def _check(self, problem: AttentionProblem) -> torch.Tensor:
        found = problem_sha256(problem)
        if found != self.ids.selection_sha256:
            raise ValueError(
                f"ids.selection_sha256: got {self.ids.selection_sha256},"
                f" supported: {found}, the problem's selection"
            )
        if self.ids.queries_per_group != self.queries_per_group(problem):
            raise ValueError(
                f"ids.queries_per_group: got {self.ids.queries_per_group},"
                f" supported: {self.queries_per_group(problem)} at group size {problem.group_size}"
            )
        return check_query_ids(problem, torch.from_numpy(self.ids.query_ids.copy()).to(problem.device))


@register
class OfflineW512(OfflineRegroup):
    """Windows of 512 queries."""

    name = "offline_w512"
    window = 512


@register
class OfflineW2048(OfflineRegroup):
    """Windows of 2,048 queries."""

    name = "offline_w2048"
    window = 2048
