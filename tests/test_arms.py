"""Arms: one table of names, each checked before it is timed; and how samples become rows."""

from __future__ import annotations

import os
import re
import time
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import exact_attention
from pageweaver.common.supports import preset, streams
from pageweaver.eval import arms, operator, timing
from pageweaver.eval.arms import make_arm, make_strategy, parse_arms
from pageweaver.eval.baselines import BASELINES
from pageweaver.eval.timing import Protocol, Timings, time_rounds

CPU = torch.device("cpu")


def silent(_: float, __: str) -> None:
    """No progress."""


def several_requests() -> pw.Selection:
    return streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)


# --- names ---


def test_arms_are_parsed_once_each() -> None:
    assert parse_arms(" union8, union8/cluster,union8 ,random_ids") == [
        "union8",
        "union8/cluster",
        "random_ids",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "strategies: got none, supported: per_query, union4"),
        ("union9", "strategies: got 'union9', supported: per_query, union4"),
        ("union8,union8/fast", "strategies: got 'union8/fast', supported after a slash: cluster"),
        (
            "auto/rounds/visits",
            "got 'auto/rounds/visits', supported after a slash: at most one of visits, rounds",
        ),
        ("union8/split/cluster/fp8", "after a slash: at most one of fp8, split, bf16, float32"),
    ],
)
def test_unknown_arms_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_arms(words)


@pytest.mark.parametrize("arm", ["per_query/cluster", "random_ids/rounds", "union8/rounds"])
def test_a_variant_that_an_arm_lacks_is_refused_by_name(arm: str) -> None:
    selection = several_requests()
    with pytest.raises(ValueError, match=f"{arm}|{arm.split('/')[0]}, supported: none"):
        make_strategy(arm, selection, pw.make_problem(selection), "reference")


def test_companions_of_an_arm() -> None:
    assert arms.fixed_of("regroup_w128/rounds") == "fixed_w128/rounds"
    assert arms.fixed_of("union8") is None
    assert arms.original_of("fixed_w64/rounds/fp8") == "union8/fp8"
    assert set(arms.FIXED.values()) <= set(arms.DIAGNOSTICS)


# --- orders ---


@pytest.mark.parametrize("group_size", [8, 16])
def test_fixed_arms_run_the_ids_of_their_strategies(group_size: int) -> None:
    selection = several_requests()
    problem = pw.make_problem(selection, group_size=group_size)
    for online, fixed in arms.FIXED.items():
        expected = pw.load(online, backend="reference").prepare(problem).query_ids
        schedule = make_strategy(fixed, selection, problem, "reference").prepare(problem)
        assert torch.equal(schedule.query_ids, expected)
    for window in (512, 2048):
        ids = pw.search(selection, window=window, group_size=group_size)
        strategies = [
            make_strategy(name, selection, problem, "reference")
            for name in (f"fixed_w{window}", f"offline_w{window}")
        ]
        for strategy in strategies:
            assert torch.equal(strategy.prepare(problem).query_ids, torch.from_numpy(ids.query_ids))
    by_visits = make_strategy("fixed_w512/visits", selection, problem, "reference").prepare(problem)
    ids = pw.search(selection, window=512, group_size=group_size, objective="visits")
    assert torch.equal(by_visits.query_ids, torch.from_numpy(ids.query_ids))


def test_every_arm_passes_its_check_and_counts_its_work() -> None:
    selection = several_requests()
    problem = pw.make_problem(selection)
    rows = arms.sample_rows(selection, seed=0)
    exact, _ = exact_attention(problem, torch.float64, rows)
    engines = [name for name, kind in BASELINES.items() if kind.module is not None]
    edges = pw.load("union8").work(problem).edges
    for name in arms.arm_names():
        if name in engines:  # tests/test_baselines.py has them
            continue
        arm = make_arm(name, selection, [problem], rows, exact, backend="reference")
        assert arm.nrms is not None and 0 < arm.nrms < 0.05, name
        assert arm.work["edges"] == edges or name == "dense"
        assert arm.work["strategy"] == name
        for calls in arm.calls.values():
            calls[0]()
        ours = {"complete", "attention", "prepare"}
        assert set(arm.calls) == (ours if arm.ours else ours - {"prepare"})


def test_inputs_take_turns_with_tensors_of_their_own() -> None:
    selection = several_requests()
    problems = [pw.make_problem(selection, seed=seed) for seed in range(3)]
    rows = arms.sample_rows(selection, seed=0)
    exact, _ = exact_attention(problems[0], torch.float64, rows)
    arm = make_arm("union8", selection, problems, rows, exact, backend="reference")
    assert [len(calls) for calls in arm.calls.values()] == [3, 3, 3]
    for call, problem in zip(arm.calls["attention"], problems, strict=True):
        assert torch.equal(call(), pw.load("union8")(problem))  # type: ignore[arg-type]


def test_a_red_check_stops_the_report() -> None:
    selection = several_requests()
    problem = pw.make_problem(selection)
    rows = arms.sample_rows(selection, seed=0)
    exact, _ = exact_attention(problem, torch.float64, rows)
    with pytest.raises(ValueError, match=r"union8: got NRMS 0\.\d+ against float64, supported: at most 0.05"):
        make_arm("union8", selection, [problem], rows, exact * 1.06, backend="reference")
    # FP32 cannot explain what FP8 can.
    with pytest.raises(ValueError, match=r"at most 0\.005"):
        make_arm("union8/float32", selection, [problem], rows, exact * 1.02, backend="reference")
    with pytest.raises(ValueError, match="NRMS nan"):
        make_arm("union8", selection, [problem], rows, exact * torch.nan, backend="reference")
    with pytest.raises(ValueError, match="got non-zero rows"):
        make_arm("union8", selection, [problem], rows, exact * 0, backend="reference")


def test_reorder_is_checked_on_the_problem_that_it_answers() -> None:
    selection = several_requests()
    problem = pw.make_problem(selection, group_size=8)
    rows = arms.sample_rows(selection, seed=0)
    strategy = make_strategy("reorder_w128", selection, problem, "reference")
    exact = strategy.expected(problem, rows)  # type: ignore[attr-defined]
    assert pw.common.reference.nrms(strategy(problem)[rows], exact) < 0.05
    assert not torch.allclose(exact, exact_attention(problem, torch.float64, rows)[0])


def test_sampled_rows_belong_to_requests() -> None:
    selection = several_requests()
    padded = np.pad(selection.q2k_indices, ((0, 0), (0, 300), (0, 0)), constant_values=-1)
    longer = pw.Selection("padded", padded, selection.cu_seqlens_q, selection.seqused_k)
    rows = arms.sample_rows(longer, seed=1)
    assert len(rows) == 33 and int(rows.max()) < 65 and rows.tolist() == sorted(set(rows.tolist()))


# --- rotation ---


def recorded(count: int) -> tuple[list[Callable[[], object]], list[int]]:
    order: list[int] = []
    return [lambda index=index: order.append(index) for index in range(count)], order  # type: ignore[misc]


def test_every_round_has_all_arms_in_a_changing_order() -> None:
    runs, order = recorded(5)
    times = iter(range(100))

    def stopwatch(run: Callable[[], object]) -> float:
        run()
        return float(next(times))

    samples, interrupted = time_rounds(runs, 7, silent, stopwatch)
    assert not interrupted
    rounds = [order[first : first + 5] for first in range(0, len(order), 5)]
    assert rounds[0] == [0, 1, 2, 3, 4]  # warmed up
    assert len(rounds) == 8 and all(sorted(own) == [0, 1, 2, 3, 4] for own in rounds)
    for index, own in enumerate(samples):
        assert own == [5.0 * turn + rounds[turn].index(index) for turn in range(1, 8)]
    # There and back, and no arm has the same one before it all the time.
    assert all(rounds[turn + 1] == rounds[turn][::-1] for turn in (1, 3, 5))
    for index in range(5):
        before = [own[own.index(index) - 1] for own in rounds[1:] if own[0] != index]
        assert len(set(before)) > 1


@pytest.mark.parametrize(("after", "kept"), [(8, 1), (9, 2), (11, 2)])
def test_ctrl_c_keeps_whole_rounds(after: int, kept: int) -> None:
    runs, _ = recorded(3)
    measured = []

    def stopwatch(run: Callable[[], object]) -> float:
        if len(measured) == after:
            raise KeyboardInterrupt
        measured.append(run())
        return 1.0

    samples, interrupted = time_rounds(runs, 7, silent, stopwatch)
    assert interrupted and samples == [[1.0] * kept] * 3


def test_ctrl_c_before_a_round_is_done_keeps_nothing() -> None:
    runs, _ = recorded(3)
    measured = []

    def stopwatch(run: Callable[[], object]) -> float:
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append(run())
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        time_rounds(runs, 7, silent, stopwatch)


# --- rows ---


def test_eq_7_is_taken_inside_rounds() -> None:
    """Differences of medians would give 0: the clock fell from round to round."""
    samples = {
        ("union8", "complete"): [1.10, 2.10, 3.10],
        ("regroup_w128", "complete"): [1.00, 2.01, 2.99],
        ("fixed_w128", "complete"): [0.98, 2.00, 2.97],
        ("regroup_w128", "prepare"): [0.050, 0.060, 0.071],
        ("fixed_w128", "prepare"): [0.030, 0.041, 0.050],
    }
    found = operator.regrouping(samples, "regroup_w128")
    assert found == pytest.approx({"net_us": 100, "increment_us": 20, "grouping_us": 20})
    # Eq. 7 as it stands: what execution saves less what grouping costs, in every round.
    original, fixed, online = (
        np.array(samples[arm, "complete"]) for arm in ("union8", "fixed_w128", "regroup_w128")
    )
    assert found["net_us"] == pytest.approx(1000 * np.median((original - fixed) - (online - fixed)))
    assert operator.regrouping(samples, "fixed_w128") == pytest.approx({"net_us": 120})
    assert operator.regrouping(samples, "union8") == {}
    alone = {("regroup_w128", "complete"): [1.0]}
    assert operator.regrouping(alone, "regroup_w128") == {}


def test_rows_hold_every_sample_and_where_they_come_from() -> None:
    selection = several_requests()
    problem = pw.make_problem(selection)
    rows = arms.sample_rows(selection, seed=0)
    exact, _ = exact_attention(problem, torch.float64, rows)
    names = ["union8", "regroup_w64", "fixed_w64"]
    made = [make_arm(name, selection, [problem], rows, exact, backend="reference") for name in names]
    samples = {(a, b): [3.0, 1.0, 2.0] for a in names for b in ("complete", "prepare", "eager")}
    protocol = timing.describe_inputs([problem], Protocol(3, 20))
    common = {"schema": "s", **operator.case_of(problem, selection)}
    found = list(operator.timed_rows(made, Timings(samples, False, [1200, 1500, 1800]), common, protocol))
    assert [(row["arm"], row["boundary"]) for row in found] == [
        (a, b) for a in names for b in ("complete", "prepare", "eager")
    ]
    online = next(row for row in found if row["arm"] == "regroup_w64" and row["boundary"] == "complete")
    assert online["median_ms"] == 2.0 and online["samples_ms"] == [3.0, 1.0, 2.0]
    assert (online["increment_us"], online["grouping_us"], online["net_us"]) == (0, 0, 0)
    assert online["sm_mhz"] == [1200, 1500, 1800] and online["interrupted"] is False
    assert online["visits"] == pw.load("regroup_w64").work(problem).visits
    size = problem.q.nbytes + 2 * problem.k_cache.nbytes + problem.q2k_indices.nbytes
    assert online["protocol"] == {
        "rounds": 3,
        "calls": 20,
        "inputs": 1,
        "input_bytes": size,
        "l2_bytes": None,
    }
    assert (online["case"], online["sha256"], online["batch_size"]) == (selection.name, selection.sha256, 3)
    assert (online["kv_dtype"], online["group_size"], online["context"]) == ("float8_e4m3fn", 16, 1025)


def test_without_a_gpu_everything_is_counted() -> None:
    selections = [several_requests(), preset("low", total_q=64, prefix=4096)]
    names = ["union4", "regroup_w64/fp8", "page_union", "offline_w512"]
    found = list(
        operator.measure(
            selections, names, protocol=Protocol(), header={"schema": "s"}, device=CPU, report=silent
        )
    )
    assert [(row["case"], row["arm"]) for row in found] == [(s.name, n) for s in selections for n in names]
    for row in found:
        assert row["boundary"] == operator.COUNTED and row["median_ms"] is None and row["samples_ms"] == []
    work = pw.load("page_union").work(pw.make_problem(selections[1]))
    assert (found[6]["visits"], found[6]["partials"]) == (work.visits, work.partials)


# --- from arms to rows, with stand-ins for what only a CUDA device has ---


class Graph:
    """Calls as a graph would replay them."""

    def __init__(self, calls: Sequence[Callable[[], object]], count: int) -> None:
        self.calls, self.count = calls, count

    def replay(self) -> None:
        for index in range(self.count):
            self.calls[index % len(self.calls)]()


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs that are loops, a stopwatch that counts runs, a clock that nobody reads; returns run counts."""
    runs: list[int] = []
    inner = time_rounds

    def rotated(given: Sequence[Callable[[], object]], rounds: int, report: Any) -> Any:
        def stopwatch(run: Callable[[], object]) -> float:
            run()
            runs.append(given.index(run))
            return 6.0 + runs[-1]

        return inner(given, rounds, report, stopwatch)

    reference = make_arm
    monkeypatch.setattr(timing, "capture", Graph)
    monkeypatch.setattr(timing, "time_rounds", rotated)
    monkeypatch.setattr(timing, "watched_clock", lambda: nullcontext(timing.ClockLog([1500, 1700, 1600])))
    monkeypatch.setattr(operator, "make_arm", lambda *a: reference(*a, backend="reference"))
    return runs


def test_a_case_from_arms_to_rows(no_device: list[int]) -> None:
    selection = several_requests()
    problems = [pw.make_problem(selection, seed=seed) for seed in range(2)]
    rows = list(
        operator.measure_case(
            selection,
            problems,
            ["per_query", "union8", "regroup_w64"],
            protocol=Protocol(rounds=2, calls=3, inputs=2, eager=True),
            common={"case": "x"},
            seed=0,
            skip_missing=False,
            extra=lambda made, common: iter([{**common, "arms": [arm.name for arm in made]}]),
            report=silent,
        )
    )
    *timed, more = rows
    # Boundaries of an arm stand together, and no two runs are of one place.
    assert [(row["arm"], row["boundary"]) for row in timed] == [
        (arm, boundary)
        for arm in ("per_query", "union8", "regroup_w64")
        for boundary in ("complete", "attention", "prepare", "eager")
    ]
    assert [row["median_ms"] for row in timed] == [(6.0 + place) / 3 for place in range(12)]
    assert len(no_device) == 12 * 3  # one unrecorded run each, then two rounds
    assert timed[0]["sm_mhz"] == [1500, 1600, 1700] and timed[0]["protocol"]["inputs"] == 2
    assert more == {"case": "x", "arms": ["per_query", "union8", "regroup_w64"]}


def test_an_interrupted_case_yields_its_rounds_then_stops(
    no_device: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = several_requests()
    made = operator.measure_case(
        selection,
        [pw.make_problem(selection)],
        ["union4", "union8"],
        protocol=Protocol(rounds=5, calls=2),
        common={"case": "x"},
        seed=0,
        skip_missing=False,
        boundaries=("complete",),
        report=lambda fraction, text: _interrupt(fraction, text),
    )
    rows = []
    with pytest.raises(KeyboardInterrupt):
        for row in made:
            rows.append(row)
    assert [(row["arm"], len(row["samples_ms"]), row["interrupted"]) for row in rows] == [
        ("union4", 2, True),
        ("union8", 2, True),
    ]


def _interrupt(fraction: float, text: str) -> None:
    """Ctrl-C as the second of five rounds is told."""
    if text == "timing" and fraction == 0.4:
        raise KeyboardInterrupt


def test_the_clock_is_what_the_tool_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho 1980\necho "[N/A]"\necho 1755\nexec sleep 60\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: types.SimpleNamespace(uuid="12-34"))
    with timing.watched_clock() as log:
        deadline = time.monotonic() + 20
        while len(log.megahertz) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert log.summary() == [1755, 1867, 1980]
    assert "--query-gpu=clocks.sm" in (tmp_path / "asked").read_text()
    assert (tmp_path / "asked").read_text().strip().endswith("-i GPU-12-34")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with timing.watched_clock() as log:
        pass
    assert log.summary() is None
