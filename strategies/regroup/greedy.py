"""Bounded greedy grouping (Eq. 6 of the method) on the CPU: the C++ search and its NumPy twin."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pageweaver.common.native import load_native

Int32Array = npt.NDArray[np.int32]


def greedy_order(
    pages: Int32Array,
    window: int,
    group: int,
    subgroup: int = 4,
    objective: str = "visits",
    threads: int = 0,
) -> Int32Array:
    """Order queries so that each execution group shares pages (Eq. 6), in C++.

    Inside every window of consecutive rows, each slot takes the untaken row with the fewest pages that the
    open group has not read yet; ties go to the lowest row. The group's union starts empty at the window's
    start and again after every `group` slots.

    Parameters
    ----------
    pages : int32 [rows, topk]
        The pages that each query of one request selected for one KV head, in query order; any strides.
        Negative entries are no page, repeated ones count once. topk up to 4096.
    window : int
        Rows per window; the last window may be shorter.
    group : int
        Slots per execution group, counted from the window's start.
    subgroup : int
        Slots per subgroup, counted from the group's start; used by "rounds" only.
    objective : {"visits", "rounds"}
        "visits": fewest new pages of the open group. "rounds": fewest new pages of the open subgroup, then
        of the open group; the first slot of a subgroup goes by new pages of the group alone.
    threads : int
        Threads that share the windows, 0 for one per hardware thread. The result does not depend on it.

    Returns
    -------
    int32 [rows]
        Slot to row: a bijection inside every window.

    Raises
    ------
    ValueError
        An argument outside its supported set; the message names the argument, its value and the set.
    """
    order: Int32Array = load_native().greedy_order(pages, window, group, subgroup, objective, threads)
    return order


def greedy_order_numpy(
    pages: Int32Array,
    window: int,
    group: int,
    subgroup: int = 4,
    objective: str = "visits",
) -> Int32Array:
    """Order queries as `greedy_order` does, written to be read: the oracle of the C++ and CUDA versions.

    It counts every candidate's new pages anew at every slot, from a membership matrix of the window.
    """
    rows = pages.shape[0]
    order = np.empty(rows, dtype=np.int32)
    for begin in range(0, rows, window):
        member = _membership(pages[begin : begin + window])
        count = member.shape[0]
        taken = np.zeros(count, dtype=bool)
        for slot in range(count):
            if slot % group == 0:
                group_union = np.zeros(member.shape[1], dtype=bool)
            if slot % group % subgroup == 0:
                subgroup_union = np.zeros(member.shape[1], dtype=bool)
            new_to_group = (member & ~group_union).sum(axis=1)
            cost = [new_to_group]
            if objective == "rounds" and slot % group % subgroup != 0:
                cost.insert(0, (member & ~subgroup_union).sum(axis=1))
            # The least significant key comes first: taken rows last, then the costs in order, then the row.
            best = np.lexsort((np.arange(count), *reversed(cost), taken))[0]
            taken[best] = True
            group_union |= member[best]
            subgroup_union |= member[best]
            order[begin + slot] = begin + best
    return order


def _membership(pages: Int32Array) -> npt.NDArray[np.bool_]:
    """Return bool [rows, distinct pages]: which row selected which page (M of Eq. 3)."""
    distinct = np.unique(pages[pages >= 0])
    row, column = np.nonzero(pages >= 0)
    member = np.zeros((pages.shape[0], distinct.size), dtype=bool)
    member[row, np.searchsorted(distinct, pages[row, column])] = True
    return member
