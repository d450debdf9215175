"""The improving search: stays inside windows, never gets worse, counts rightly, and pays."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pageweaver as pw
from pageweaver.common.native import load_native
from pageweaver.common.supports import streams
from pageweaver.strategies.regroup.greedy import Int32Array, greedy_order
from pageweaver.strategies.regroup.improve import count_work_numpy, improve_order
from pageweaver.strategies.regroup.offline import OfflineSearch

INT32_MAX = 2**31 - 1
CAPTURES = Path(__file__).resolve().parents[1] / "captures" / "smollm2_64k.safetensors"


def _random(rows: int, high: int, seed: int = 0) -> Int32Array:
    return np.random.default_rng(seed).integers(-2, high, size=(rows, 16), dtype=np.int32)


def _assert_inside_windows(order: Int32Array, window: int) -> None:
    for begin in range(0, len(order), window):
        part = np.sort(order[begin : begin + window])
        np.testing.assert_array_equal(part, np.arange(begin, begin + len(part)))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_properties(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40), label="rows")
    topk = data.draw(st.integers(1, 6), label="topk")
    window = data.draw(st.integers(1, 48), label="window")
    group = data.draw(st.sampled_from([1, 2, 3, 4, 8, 16, 255]), label="group")
    subgroup = data.draw(st.sampled_from([1, 2, 4, 5]), label="subgroup")
    objective = data.draw(st.sampled_from(["visits", "rounds"]), label="objective")
    seconds = data.draw(st.sampled_from([0.0, 0.0, 0.003]), label="seconds")
    entries = st.integers(-2, 9) | st.integers(INT32_MAX - 2, INT32_MAX)
    flat = data.draw(st.lists(entries, min_size=rows * topk, max_size=rows * topk), label="pages")
    pages = np.array(flat, dtype=np.int32).reshape(rows, topk)

    start = greedy_order(pages, window, group, subgroup, objective)
    found = improve_order(pages, start, window, group, subgroup, objective, seconds=seconds, threads=2)
    _assert_inside_windows(found.order, window)
    # What the swaps' changes add up to is what a new count gives.
    assert (found.visits, found.rounds) == count_work_numpy(pages, found.order, window, group, subgroup)
    before = count_work_numpy(pages, start, window, group, subgroup)
    assert found.objective(objective) <= before[objective == "rounds"]
    assert found.visits_bound <= found.visits and found.rounds_bound <= found.rounds


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ends_where_no_swap_helps(data: st.DataObject) -> None:
    """Checked by trying every swap of every window."""
    rows, window, group = 12, data.draw(st.sampled_from([7, 12]), label="window"), 4
    objective = data.draw(st.sampled_from(["visits", "rounds"]), label="objective")
    flat = data.draw(st.lists(st.integers(-1, 7), min_size=rows * 3, max_size=rows * 3), label="pages")
    pages = np.array(flat, dtype=np.int32).reshape(rows, 3)
    found = improve_order(pages, np.arange(rows, dtype=np.int32), window, group, 2, objective)
    which = int(objective == "rounds")

    def value(order: Int32Array) -> tuple[int, int]:
        work = count_work_numpy(pages, order, window, group, 2)
        return work[which], work[1 - which]

    least = value(found.order)
    for a in range(rows):
        for b in range(a):
            if a // window == b // window:
                other = found.order.copy()
                other[[a, b]] = other[[b, a]]
                assert value(other) >= least


def test_bound_is_met_where_the_best_is_known() -> None:
    # Two kinds of queries, taking turns: groups of one kind each are best, and the bound says so.
    pages = np.where(np.arange(64)[:, None] % 2, [[0, 1, 2]], [[5, 6, 7]]).astype(np.int32)
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)]).astype(np.int32)
    order[[0, 9, 32, 63]] = order[[32, 63, 0, 9]]
    began = time.monotonic()
    found = improve_order(pages, order, 64, 8, seconds=60.0)
    assert found.visits == found.visits_bound == 8 * 3
    assert time.monotonic() - began < 30  # stops at the bound


@pytest.mark.parametrize("objective", ["visits", "rounds"])
def test_passes_do_not_depend_on_threads_or_slices(objective: str) -> None:
    pages = _random(700, 80)
    start = greedy_order(pages, 128, 8, 4, objective)
    expected = improve_order(pages, start, 128, 8, 4, objective, threads=1)
    for threads in (0, 2, 7):
        again = improve_order(pages, start, 128, 8, 4, objective, seed=threads, threads=threads)
        np.testing.assert_array_equal(again.order, expected.order)
    sliced = load_native().Improver(pages, start, 128, 8, 4, objective, 0, 2)
    while not sliced.run(1e-4, False):
        _assert_inside_windows(sliced.order(), 128)
    np.testing.assert_array_equal(sliced.order(), expected.order)


@pytest.mark.parametrize("objective", ["visits", "rounds"])
def test_a_second_beats_the_greedy_on_a_capture(objective: str) -> None:
    pages = pw.resolve_selection(f"{CAPTURES}:austen-a.L18.h2")[0].q2k_indices[0]
    start = greedy_order(pages, 512, 8, 4, objective)
    greedy = count_work_numpy(pages, start, 512, 8)[objective == "rounds"]
    found = improve_order(pages, start, 512, 8, 4, objective, seconds=1.0)
    assert (found.visits, found.rounds) == count_work_numpy(pages, found.order, 512, 8)
    _assert_inside_windows(found.order, 512)
    assert found.bound(objective) <= found.objective(objective) < 0.985 * greedy


def test_restarts_go_beyond_the_passes_and_stop_in_time() -> None:
    pages = _random(512, 120)
    start = greedy_order(pages, 512, 8)
    passes = improve_order(pages, start, 512, 8)
    began = time.monotonic()
    found = improve_order(pages, start, 512, 8, seconds=0.5)
    assert time.monotonic() - began < 10  # a busy machine may be late, not hang
    assert found.visits < passes.visits < count_work_numpy(pages, start, 512, 8)[0]


def test_runs_without_the_gil() -> None:
    ticks = 0
    done = threading.Event()
    improver = load_native().Improver(_random(2048, 400), np.arange(2048, dtype=np.int32), 2048, 8)

    def work() -> None:
        improver.run(0.5, True)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        time.sleep(0.005)
        ticks += 1
    thread.join()
    assert ticks > 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window = 0; supported: integers >= 1"),
        ({"group": 0}, "group = 0; supported: integers >= 1"),
        ({"group": 256}, "group = 256; supported: 1 to 255"),
        ({"subgroup": 0}, "subgroup = 0"),
        ({"threads": -1}, "threads = -1"),
        ({"objective": "pages"}, "objective = 'pages'"),
        ({"pages": np.zeros((8, 2), dtype=np.int64)}, "pages has dtype int64"),
        ({"order": np.zeros(8, dtype=np.int64)}, "order: supported: int32"),
        ({"order": np.zeros(7, dtype=np.int32)}, "order: supported: int32"),
        ({"order": np.zeros(8, dtype=np.int32)}, "order has row 0 at slot 1"),
        ({"order": np.arange(8, dtype=np.int32)[::-1]}, "order has row 7 at slot 0"),
        ({"order": np.arange(8, dtype=np.int32) - 1}, "order has row -1 at slot 0"),
    ],
)
def test_refusals_name_the_value(change: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {
        "pages": np.zeros((8, 2), dtype=np.int32),
        "order": np.arange(8, dtype=np.int32),
        "window": 4,
        "group": 2,
    }
    with pytest.raises(ValueError) as caught:
        improve_order(**(arguments | change))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_empty_shapes() -> None:
    none = improve_order(np.empty((0, 4), dtype=np.int32), np.empty(0, dtype=np.int32), 8, 4)
    assert (none.order.shape, none.visits, none.visits_bound) == ((0,), 0, 0)
    rows = np.arange(9, dtype=np.int32)
    found = improve_order(np.empty((9, 0), dtype=np.int32), rows, 2**40, 4, seconds=0.01)
    assert found.order.tolist() == rows.tolist() and found.rounds == 0


# --- pageweaver.search ---


@pytest.fixture(scope="module")
def several() -> pw.Selection:
    """Several requests, one of them empty, and two KV heads."""
    return streams(query_lens=[90, 0, 57], prefix_lens=[5000, 64, 9000], num_kv_heads=2, topk=6, seed=1)


@pytest.mark.parametrize("objective", ["visits", "rounds"])
def test_search_counts_what_the_strategy_runs(objective: str, several: pw.Selection) -> None:
    problem = pw.make_problem(several)
    greedy = pw.search(several, window=512, objective=objective)
    assert (greedy.visits, greedy.rounds) == (greedy.greedy_visits, greedy.greedy_rounds)
    found = pw.search(several, window=512, objective=objective, seconds=0.3)
    for ids in (greedy, found):
        work = pw.load("offline_w512", ids=ids).work(problem)
        assert (work.visits, work.rounds) == (ids.visits, ids.rounds)
    assert (found.greedy_visits, found.greedy_rounds) == (greedy.visits, greedy.rounds)
    assert found.bound == greedy.bound <= getattr(found, objective) < getattr(greedy, objective)


def test_search_shares_its_time_and_reports(several: pw.Selection) -> None:
    seen: list[float] = []
    began = time.monotonic()
    pw.search(several, window=512, seconds=0.5, progress=seen.append)
    assert time.monotonic() - began < 20
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) >= 4


def test_an_interrupted_search_keeps_what_it_found(several: pw.Selection) -> None:
    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    search = OfflineSearch(several, window=512)
    with pytest.raises(KeyboardInterrupt):
        search.run(0.5, progress=interrupt)
    kept = search.ids()
    assert kept.rounds < kept.greedy_rounds
    work = pw.load("offline_w512", ids=kept).work(pw.make_problem(several))
    assert (work.visits, work.rounds) == (kept.visits, kept.rounds)
    further = pw.search(several, window=512, seconds=0.2, start=kept)
    assert further.rounds <= kept.rounds
    assert further.greedy_rounds == kept.greedy_rounds


def test_start_is_for_the_same_search(several: pw.Selection) -> None:
    start = pw.search(several, window=512)
    for change, words in (
        ({"window": 2048}, "start.window: got 512, supported: 2048"),
        ({"objective": "visits"}, "start.objective: got rounds, supported: visits"),
        ({"group_size": 8}, "start.queries_per_group: got 8, supported: 16"),
    ):
        with pytest.raises(ValueError, match=words):
            pw.search(several, **({"window": 512, "start": start} | change))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"start: got ids of another selection, whose SHA-256 is [0-9a-f]{64}, supp"
    ):
        pw.search(several.tail(20), window=512, start=start)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": -1.0}, "seconds: got -1.0"),
        ({"seconds": float("nan")}, "seconds: got nan"),
        ({"seconds": float("inf")}, "seconds: got inf"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 1.5}, r"seed: got 1\.5"),
    ],
)
def test_search_refuses(change: dict[str, float], words: str, several: pw.Selection) -> None:
    with pytest.raises(ValueError, match=words):
        pw.search(several, **change)  # type: ignore[arg-type]
