"""The report's plots: arms look the same in all of them, and runs and ablations stay apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pageweaver.eval import figures, output, report
from pageweaver.eval.arms import VARIANTS, arm_names
from pageweaver.eval.report import make_page
from pageweaver.eval.runs import read_run

from .report_rows import UNION, Outline, Row, online_rows, timed, write


@pytest.fixture
def online(tmp_path: Path) -> Path:
    """An operator run with orders of queries."""
    return write(tmp_path / "online.jsonl", online_rows())


def test_ablations_alone_have_no_plot_of_calls(tmp_path: Path) -> None:
    rows = [timed("union8/cluster", "x", 1.0), timed("union8", "x", 0.9, "attention")]
    page = make_page([read_run(write(tmp_path / "cut.jsonl", rows))])
    assert not any(name.endswith("-calls.png") for name in page.plots)


def test_arms_of_ablations_stay_out_of_the_plot_of_calls(
    online: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    inner = figures.complete_calls

    def noted(rows: Sequence[Row], cases: Sequence[str]) -> Any:
        shown.extend(dict.fromkeys(row["arm"] for row in rows))
        return inner(rows, cases)

    monkeypatch.setattr(report.figures, "complete_calls", noted)
    arms = ["union8", "union8/cluster", "fixed_w128", "regroup_w128/visits", "union8/split", "flex"]
    page = make_page([read_run(write(tmp_path / "all.jsonl", [timed(arm, "x", 1.0) for arm in arms]))])
    assert shown == ["union8", "union8/split", "flex"]
    assert {row[0] for row in Outline(page.html).cells if len(row) == 4} >= set(arms)  # errors of all


def test_no_two_arms_look_the_same() -> None:
    variants = (
        "cluster",
        "visits",
        "rounds",
        "fp8",
        "split",
        "bf16",
        "float32",
        "visits/split",
        "single/split",
    )
    arms = dict.fromkeys(
        [*figures.LOOKS, *(f"{name}/{variant}" for name in arm_names() for variant in ("single", *variants))]
    )
    looks = {arm: tuple(figures.style_of(arm).values()) for arm in arms}
    assert len(set(looks.values())) == len(arms)
    # Each name and variant that an arm may have stands in the tables.
    assert set(figures.LOOKS) - {"page_union/single"} == set(arm_names())
    assert set(figures.INSIDE) | set(figures.PART) == set(VARIANTS)
    for name in arm_names():
        assert figures.style_of(f"{name}/split")["color"] == figures.style_of(name)["color"]


def test_an_arm_looks_the_same_in_every_plot() -> None:
    """Whatever stands beside it: by its name, in two plots of other arms in another order."""
    drawn: list[dict[str, Any]] = []

    def noted(rows: Sequence[Row]) -> None:
        figure = figures.complete_calls(rows, ["x"])
        drawn.append(
            {
                line.get_label(): (line.get_color(), line.get_marker(), line.get_markerfacecolor())
                for line in figure.axes[0].get_lines()
            }
        )

    noted([timed(arm, "x", 1.0) for arm in ("auto/split", "union8/split", "flex", "auto")])
    noted(
        [timed(arm, "x", 1.0) for arm in ("union8", "auto", "union8/cluster", "auto/split", "union8/split")]
    )
    shared = set(drawn[0]) & set(drawn[1])
    assert shared == {"auto", "auto/split", "union8/split"}
    assert all(drawn[0][arm] == drawn[1][arm] for arm in shared)


@pytest.mark.parametrize("spread", [1.0, 1.01, 1.05, 1.5, 2.0, 4.0, 6.0, 100.0])
@pytest.mark.parametrize("least", [0.0131, 0.31, 0.646, 0.97, 3.3])
def test_times_can_be_read_off(least: float, spread: float) -> None:
    """At least two labels on the axis of milliseconds, however near the times are."""
    rows = [
        {"kind": "context", "context": 2**14 * size, "total_q": 64, "boundary": "complete", "arm": "x"}
        | {"median_ms": ms}
        for size, ms in ((1, least), (2, least * spread))
    ]
    figure = figures.scaling(rows)
    output.png(figure)
    axis = figure.axes[0].yaxis
    low, high = figure.axes[0].get_ylim()
    labels = [
        tick.label1.get_text()
        for ticks in (axis.get_major_ticks(), axis.get_minor_ticks())
        for tick in ticks
        if low <= tick.get_loc() <= high and tick.label1.get_text()
    ]
    assert len(labels) >= 2 and len(set(labels)) == len(labels)
    assert all(low <= float(text) <= high for text in labels)


def test_runs_never_meet_in_a_plot(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    inner = figures.complete_calls

    def noted(rows: Sequence[Row], cases: Sequence[str]) -> Any:
        seen.append({row["command"] for row in rows})
        return inner(rows, cases)

    monkeypatch.setattr(report.figures, "complete_calls", noted)
    make_page([read_run(UNION), read_run(online)])
    assert len(seen) == 2 and all(len(commands) == 1 for commands in seen)
