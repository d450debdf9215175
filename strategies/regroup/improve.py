"""Improving search behind the greedy: swaps between groups of a window, in C++, and the counts it lowers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pageweaver.common.native import load_native
from pageweaver.strategies.regroup.greedy import Int32Array

# The C++ search returns this often, so that Ctrl-C and progress are served from Python.
SLICE_SECONDS = 0.2


@dataclass(frozen=True, eq=False)
class Improved:
    """An order and what it costs.

    Attributes
    ----------
    order : numpy.ndarray
        int32 ``[rows]``, slot to row; a bijection inside every window.
    visits, rounds : int
        Eq. 3 and Eq. 4 of that order, groups counted from each window's start.
    visits_bound, rounds_bound : int
        No order inside the same windows has less: a group of G queries holds at most G of the n_p queries
        of its window that selected page p, so each window has at least sum_p ceil(n_p / G) visits.
    """

    order: Int32Array
    visits: int
    rounds: int
    visits_bound: int
    rounds_bound: int

    def objective(self, name: str) -> int:
        """The count by name."""
        return self.visits if name == "visits" else self.rounds

    def bound(self, name: str) -> int:
        """The lower bound of that count."""
        return self.visits_bound if name == "visits" else self.rounds_bound

    @classmethod
    def of(cls, improver: Any) -> Improved:
        """What a C++ ``Improver`` holds now."""
        return cls(improver.order(), *improver.work(), *improver.bound())


def improve_order(
    pages: Int32Array,
    order: Int32Array,
    window: int,
    group: int,
    subgroup: int = 4,
    objective: str = "visits",
    seed: int = 0,
    seconds: float = 0.0,
    threads: int = 0,
) -> Improved:
    """Lower an order's visits or rounds by swaps of two queries inside a window, in C++.

    Parameters
    ----------
    pages : int32 [rows, topk]
        As `greedy_order` takes them.
    order : int32 [rows]
        Slot to row, a bijection inside every window, as `greedy_order` gives it.
    window, group, subgroup : int
        Rows a window; slots a group (up to 255), counted from the window's start; slots a subgroup, counted
        from the group's start.
    objective : {"visits", "rounds"}
        The count that comes first; the other breaks ties.
    seed : int
        Of the restarts' perturbations.
    seconds : float
        0: swaps until no swap of any two queries helps, once; the result depends neither on threads nor on
        time. Above 0: the same and then restarts, for about that long.
    threads : int
        Threads that share the windows, 0 for one per hardware thread.

    Returns
    -------
    Improved

    Raises
    ------
    ValueError
        An argument outside its supported set; the message names it.
    """
    improver = load_native().Improver(pages, order, window, group, subgroup, objective, seed, threads)
    run_slices(improver, seconds)
    return Improved.of(improver)


def run_slices(improver: Any, seconds: float, progress: Callable[[float], None] | None = None) -> None:
    """Run a C++ ``Improver`` in slices, so that Ctrl-C ends the search between two of them.

    Parameters
    ----------
    improver : pageweaver._native.Improver
        Holds its best order between slices.
    seconds : float
        As in `improve_order`.
    progress : callable, optional
        Called with the fraction of `seconds` that has passed, after each slice.
    """
    restarts = seconds > 0
    began = time.monotonic()
    left = seconds if restarts else math.inf
    while left > 0 and not improver.run(min(SLICE_SECONDS, left), restarts):
        if restarts:
            left = began + seconds - time.monotonic()
            if progress is not None:
                progress(min(1.0, 1.0 - left / seconds))


def count_work_numpy(
    pages: Int32Array, order: Int32Array, window: int, group: int, subgroup: int = 4
) -> tuple[int, int]:
    """Count visits (Eq. 3) and rounds (Eq. 4) of an order, written to be read: the oracle of the search.

    Parameters
    ----------
    pages, order, window, group, subgroup
        As in `improve_order`.

    Returns
    -------
    tuple[int, int]
        Visits and rounds.
    """
    slot = np.arange(pages.shape[0])
    in_window = slot % window
    in_group = in_window % group
    group_of = slot - in_group  # numbered by their first slots
    subgroup_of = slot - in_group % subgroup
    chosen = pages[order]
    counts = []
    for part in (group_of, subgroup_of):
        selected = np.stack([np.broadcast_to(part[:, None], chosen.shape), chosen], axis=-1)
        counts.append(len(np.unique(selected[chosen >= 0], axis=0)))
    return counts[0], counts[1]
