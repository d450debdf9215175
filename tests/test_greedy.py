"""Eq. 6 on the CPU: the C++ search equals its NumPy twin and keeps its promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageweaver.common.native import load_native
from pageweaver.strategies.regroup.greedy import Int32Array, greedy_order, greedy_order_numpy

INT32_MAX = 2**31 - 1


def _random(rng: np.random.Generator, rows: int, topk: int, high: int) -> Int32Array:
    return rng.integers(0, high, size=(rows, topk), dtype=np.int32)


def _drifting(rng: np.random.Generator, rows: int, topk: int) -> Int32Array:
    """Neighbours share pages, the pool moves on, the local page is always in: like a real selection."""
    pool = np.arange(rows)[:, None] // 16 + rng.integers(0, 40, size=(rows, topk))
    pool[:, 0] = np.arange(rows) // 128 + 40
    return pool.astype(np.int32)


def _inputs(name: str) -> Int32Array:
    rng = np.random.default_rng(7)
    if name == "random":
        return _random(rng, 300, 16, 90)
    if name == "drifting":
        return _drifting(rng, 401, 16)
    if name == "duplicates":
        return _random(rng, 200, 32, 12)
    if name == "mostly empty":
        pages = _random(rng, 200, 16, 40)
        pages[rng.random(pages.shape) < 0.9] = -1
        return pages
    if name == "negatives of any value":
        return rng.integers(-(2**31), 30, size=(150, 16), dtype=np.int32)
    if name == "all empty":
        return np.full((70, 16), -1, dtype=np.int32)
    if name == "all equal":
        return np.tile(np.arange(16, dtype=np.int32), (131, 1))
    if name == "huge ids":
        return (INT32_MAX - _random(rng, 150, 16, 60)).astype(np.int32)
    if name == "colliding ids":
        return (_random(rng, 150, 16, 60) * (1 << 20)).astype(np.int32)
    if name == "disjoint":
        return np.arange(100 * 16, dtype=np.int32).reshape(100, 16)
    raise AssertionError(name)


@pytest.mark.parametrize("objective", ["visits", "rounds"])
@pytest.mark.parametrize(
    "name",
    [
        "random",
        "drifting",
        "duplicates",
        "mostly empty",
        "negatives of any value",
        "all empty",
        "all equal",
        "huge ids",
        "colliding ids",
        "disjoint",
    ],
)
def test_native_equals_twin(name: str, objective: str) -> None:
    pages = _inputs(name)
    for window, group in [(64, 8), (128, 8), (64, 4), (128, 16), (2048, 8), (1, 8), (3, 4), (100, 8)]:
        expected = greedy_order_numpy(pages, window, group, 4, objective)
        actual = greedy_order(pages, window, group, 4, objective)
        np.testing.assert_array_equal(actual, expected, err_msg=f"window {window}, group {group}")
        assert actual.dtype == np.int32


@pytest.mark.parametrize("subgroup", [1, 2, 3, 8, 16])
def test_other_subgroups(subgroup: int) -> None:
    pages = _inputs("random")
    expected = greedy_order_numpy(pages, 128, 8, subgroup, "rounds")
    np.testing.assert_array_equal(greedy_order(pages, 128, 8, subgroup, "rounds"), expected)


def test_by_hand() -> None:
    pages = np.array([[0, 1], [2, 3], [0, 1], [2, 4], [1, 0], [3, 2]], dtype=np.int32)
    # Group of 3: rows 0, 2, 4 share their pages; then row 1 opens the second group, 5 adds nothing, 3 adds 4.
    np.testing.assert_array_equal(greedy_order(pages, 6, 3), [0, 2, 4, 1, 5, 3])
    # Window of 2: nothing can be gained.
    np.testing.assert_array_equal(greedy_order(pages, 2, 2), np.arange(6))


def test_rounds_differs_from_visits_where_it_should() -> None:
    pages = np.array([[-1, -1], [3, -1], [2, -1], [3, 1], [2, 0]], dtype=np.int32)
    # Slots 0 and 1 take rows 0 and 1; slot 2 opens the second subgroup with row 2. For slot 3 rows 3 and 4
    # add one page each to the group {2, 3}; to the subgroup {2} row 3 adds two pages and row 4 one.
    assert greedy_order(pages, 5, 4, 2, "visits").tolist() == [0, 1, 2, 3, 4]
    assert greedy_order(pages, 5, 4, 2, "rounds").tolist() == [0, 1, 2, 4, 3]


@pytest.mark.parametrize("objective", ["visits", "rounds"])
def test_threads_do_not_matter(objective: str) -> None:
    pages = _drifting(np.random.default_rng(3), 3000, 16)
    expected = greedy_order(pages, 64, 8, 4, objective, threads=1)
    for threads in (0, 2, 7):
        np.testing.assert_array_equal(greedy_order(pages, 64, 8, 4, objective, threads), expected)


def test_strides_and_empty_shapes() -> None:
    wide = _random(np.random.default_rng(5), 130, 32, 50)
    views = [wide[:, ::2], wide.T.copy().T, wide[::-1]]
    for view in views:
        np.testing.assert_array_equal(greedy_order(view, 64, 8), greedy_order(view.copy(), 64, 8))
    assert greedy_order(np.empty((0, 16), dtype=np.int32), 64, 8).shape == (0,)
    np.testing.assert_array_equal(greedy_order(np.empty((9, 0), dtype=np.int32), 4, 8), np.arange(9))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_properties(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40), label="rows")
    topk = data.draw(st.integers(1, 6), label="topk")
    window = data.draw(st.integers(1, 48), label="window")
    group = data.draw(st.sampled_from([1, 2, 4, 8, 16]), label="group")
    objective = data.draw(st.sampled_from(["visits", "rounds"]), label="objective")
    entries = st.integers(-1, 9) | st.integers(INT32_MAX - 2, INT32_MAX)
    flat = data.draw(st.lists(entries, min_size=rows * topk, max_size=rows * topk), label="pages")
    pages = np.array(flat, dtype=np.int32).reshape(rows, topk)

    order = greedy_order(pages, window, group, 4, objective)
    np.testing.assert_array_equal(order, greedy_order_numpy(pages, window, group, 4, objective))

    # Stated again with sets, apart from both implementations.
    selected = [{int(p) for p in row if p >= 0} for row in pages]
    for begin in range(0, rows, window):
        left = set(range(begin, min(begin + window, rows)))
        union: set[int] = set()
        sub_union: set[int] = set()
        for slot, row in enumerate(order[begin : begin + window].tolist()):
            if slot % group == 0:
                union = set()
            opens = slot % group % 4 == 0
            if opens:
                sub_union = set()

            def cost(
                j: int, union: set[int] = union, sub_union: set[int] = sub_union, opens: bool = opens
            ) -> tuple[int, int, int]:
                sub = 0 if objective == "visits" or opens else len(selected[j] - sub_union)
                return sub, len(selected[j] - union), j

            assert row == min(left, key=cost)
            left.remove(row)
            union |= selected[row]
            sub_union |= selected[row]
        assert not left


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, ["window = 0", ">= 1"]),
        ({"group": -3}, ["group = -3", ">= 1"]),
        ({"subgroup": 0}, ["subgroup = 0", ">= 1"]),
        ({"threads": -1}, ["threads = -1", ">= 0"]),
        ({"objective": "pages"}, ["objective = 'pages'", "'visits'", "'rounds'"]),
        ({"pages": np.zeros((4, 4), dtype=np.int64)}, ["pages", "int64", "int32"]),
        ({"pages": np.zeros(4, dtype=np.int32)}, ["pages", "1 dimensions", "[rows, topk]"]),
        ({"pages": np.zeros((1, 5000), dtype=np.int32)}, ["topk = 5000", "4096"]),
    ],
)
def test_refusals_name_the_value(change: dict[str, object], words: list[str]) -> None:
    arguments: dict[str, object] = {"pages": np.zeros((4, 4), dtype=np.int32), "window": 4, "group": 8}
    with pytest.raises(ValueError) as caught:
        load_native().greedy_order(**(arguments | change))
    for word in words:
        assert word in str(caught.value)
