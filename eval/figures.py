"""Plots of measured rows, for the report and the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pageweaver.eval import paper
from pageweaver.eval.output import BLUE, GREEN, GREY, ORANGE, compact
from pageweaver.eval.roofline import floor_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

# Okabe and Ito's others but for yellow, which white swallows; marks tell arms apart without colour.
PINK, SKY, RED, BLACK = "#CC79A7", "#56B4E9", "#D55E00", "#000000"
# What an arm looks like goes by its name, in every plot: colour and mark. Arms of one order share the colour.
LOOKS: Mapping[str, tuple[str, str]] = {
    "per_query": (BLUE, "o"),
    "union4": (ORANGE, "s"),
    "union8": (GREEN, "D"),
    "regroup_w64": (PINK, "^"),
    "fixed_w64": (PINK, "<"),
    "regroup_w128": (SKY, "v"),
    "fixed_w128": (SKY, ">"),
    "hash_w128": (SKY, "p"),
    "reorder_w128": (SKY, "*"),
    "auto": (RED, "P"),
    "fixed_auto": (RED, "d"),
    "offline_w512": (BLUE, "v"),
    "fixed_w512": (BLUE, ">"),
    "offline_w2048": (ORANGE, "v"),
    "fixed_w2048": (ORANGE, ">"),
    "page_union": (BLACK, "X"),
    "page_union/single": (GREY, "h"),
    "random_ids": (GREY, "d"),
    "dense": (BLACK, "o"),
    "flex": (RED, "s"),
    "flashinfer": (PINK, "D"),
    "sglang": (ORANGE, "H"),
    "vllm": (GREY, "P"),
}
OTHER = (GREY, "o")
# Variants are told by the filling: an arithmetic by its colour, others by the part that has it.
INSIDE = {"split": "white", "fp8": "#F0F0F0", "bf16": "#D9D9D9", "float32": "#BFBFBF"}
PART = {"cluster": "left", "single": "right", "visits": "bottom", "rounds": "top"}


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any, columns: int = 4) -> None:
    axes.figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=9)


def _arms(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def style_of(arm: str) -> dict[str, Any]:
    """Colour, mark and filling of an arm, whatever else is in the plot."""
    name, *variants = arm.split("/")
    if "single" in variants and f"{name}/single" in LOOKS:
        name = f"{name}/single"
        variants.remove("single")
    colour, mark = LOOKS.get(name, OTHER)
    inside = next((INSIDE[x] for x in variants if x in INSIDE), colour)
    return {
        "color": colour,
        "marker": mark,
        "markeredgecolor": colour,
        "markerfacecolor": inside,
        "markerfacecoloralt": "white" if inside != "white" else "#BFBFBF",
        "fillstyle": next((PART[x] for x in variants if x in PART), "full"),
    }


def _styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {arm: style_of(arm) for arm in arms}


def complete_calls(rows: Sequence[Row], cases: Sequence[str]) -> Figure:
    """Complete calls of every arm: a band a selection, and in it the arms one below the other."""
    rows = [row for row in rows if row["boundary"] == "complete"]
    arms = _arms(rows)
    times = {(row["case"], row["arm"]): row["median_ms"] for row in rows}
    figure, axes = _figure(9.0, 1.3 + len(cases) * (0.055 * len(arms) + 0.12))
    for place in range(0, len(cases), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#F3F3F3", linewidth=0, zorder=0)
    step = 0.8 / len(arms)
    for index, (arm, style) in enumerate(_styles(arms).items()):
        held = [(place, times[case, arm]) for place, case in enumerate(cases) if (case, arm) in times]
        axes.plot(
            [ms for _, ms in held],
            [place + (index - (len(arms) - 1) / 2) * step for place, _ in held],
            linestyle="",
            markersize=5,
            markeredgewidth=0.6,
            label=arm,
            **style,
        )
    axes.set_yticks(range(len(cases)), cases)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("complete call, ms")
    axes.grid(axis="x", alpha=0.25)
    _legend(axes)
    return figure


def work_against_time(rows: Sequence[Row]) -> Figure:
    """Page visits and 64-row rounds against the time of attention, a point an arm and selection."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["boundary"] == "attention" and row["rounds"] is not None]
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, field, label in zip(
        panels, ("visits", "rounds"), ("page visits (Eq. 3)", "64-row rounds (Eq. 4)"), strict=True
    ):
        for arm, style in _styles(_arms(rows)).items():
            own = [row for row in rows if row["arm"] == arm]
            panel.plot(
                [row[field] for row in own],
                [row["median_ms"] for row in own],
                linestyle="",
                markersize=5.5,
                markeredgewidth=0.6,
                label=arm if field == "visits" else None,
                **style,
            )
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(lambda value, _: compact(value))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("attention, ms")
    panels[0].set_ylim(bottom=0)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def savings(rows: Sequence[Row], cases: Sequence[str]) -> Figure:
    """What each order saves of union8's complete call, in microseconds, and what grouping added to it."""
    rows = [row for row in rows if row["boundary"] == "complete" and "net_us" in row]
    arms = [arm for arm in _arms(rows) if any("increment_us" in r for r in rows if r["arm"] == arm)]
    arms = arms or _arms(rows)
    held = {(row["case"], row["arm"]): row for row in rows}
    figure, axes = _figure(9.0, 1.4 + len(cases) * (0.13 * len(arms) + 0.12))
    height = 0.8 / len(arms)
    for index, (arm, style) in enumerate(_styles(arms).items()):
        places = [place for place, case in enumerate(cases) if (case, arm) in held]
        own = [held[cases[place], arm] for place in places]
        at = [place + (index - (len(arms) - 1) / 2) * height for place in places]
        colour = style["color"]
        axes.barh(at, [row["net_us"] for row in own], height=height, color=colour, label=f"{arm}: net")
        # Execution alone saves this much more.
        axes.barh(
            at,
            [row.get("increment_us", 0.0) for row in own],
            left=[row["net_us"] for row in own],
            height=height,
            color="white",
            edgecolor=colour,
            hatch="////",
            linewidth=0.6,
            label="spent on grouping" if index == 0 and any("increment_us" in row for row in own) else None,
        )
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.axvline(
        paper.NET_US["regroup_w128"],
        color=GREY,
        linestyle=":",
        label=f"the paper's W128 on {paper.CAPTURE[:6]}",
    )
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlabel("saved of union8's complete call, us")
    axes.grid(axis="x", alpha=0.25)
    _legend(axes, 3)
    return figure


def roofline(rows: Sequence[Row], cases: Sequence[str]) -> Figure:
    """Attention's time over its floor, a column an arm, a point a selection; 1 is the floor."""
    points = [
        (row["arm"], row["case"], row["median_ms"] / floor.milliseconds)
        for row in rows
        if row["boundary"] == "attention" and (floor := floor_of(row)) is not None
    ]
    arms = list(dict.fromkeys(arm for arm, _, _ in points))
    figure, axes = _figure(9.0, 3.6)
    rng = np.random.default_rng(0)
    for index, (arm, style) in enumerate(_styles(arms).items()):
        own = [(cases.index(case), ratio) for name, case, ratio in points if name == arm]
        spread = index + rng.uniform(-0.18, 0.18, len(own))
        median = np.median([r for _, r in own])
        axes.hlines(median, index - 0.3, index + 0.3, color=style["color"], linewidth=2)
        axes.plot(spread, [r for _, r in own], linestyle="", markersize=5.5, markeredgewidth=0.6, **style)
    axes.axhline(1, color=GREY, linestyle=":", linewidth=1)
    axes.set_xticks(range(len(arms)), arms, rotation=25, ha="right", rotation_mode="anchor", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("attention, times its floor")
    axes.grid(axis="y", alpha=0.25)
    return figure


def reuse(rows: Sequence[Row]) -> Figure:
    """Reuse of all layers and heads, a box a source, beside the span of the paper's medians."""
    observed = [row for row in rows if row.get("kind") == "observation"]
    sources = list(dict.fromkeys(row["source"] for row in observed))
    values = [[row["reuse"] for row in observed if row["source"] == source] for source in sources]
    figure, axes = _figure(9.0, 1.4 + 0.5 * len(sources))
    axes.axvspan(
        *paper.SURVEY_MEDIANS, color=ORANGE, alpha=0.25, linewidth=0, label="medians of the paper's sources"
    )
    # Whiskers reach the least and the most.
    line = {"color": BLUE, "linewidth": 2}
    axes.boxplot(values, orientation="horizontal", widths=0.5, whis=(0, 100), medianprops=line)
    names = [f"{source} ({len(own)})" for source, own in zip(sources, values, strict=True)]
    axes.set_yticks(range(1, len(sources) + 1), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(f"reuse of groups of {observed[0]['group']} (edges per visit, Eq. 3)")
    axes.grid(axis="x", alpha=0.25)
    _legend(axes)
    return figure


def scaling(rows: Sequence[Row]) -> Figure:
    """Complete calls over context and over queries, whichever there are, on logarithmic axes."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["boundary"] == "complete"]
    figure = Figure(figsize=(9.0, 3.9), layout="constrained")
    axes = {
        "context": ("context", "tokens of context, 16K queries (fewer below)"),
        "queries": ("total_q", "queries at the end of 64K tokens"),
    }
    kinds = [kind for kind in axes if any(row["kind"] == kind for row in rows)]
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    arms = _arms(rows)
    for panel, kind in zip(panels, kinds, strict=True):
        field, label = axes[kind]
        for arm, style in _styles(arms).items():
            own = sorted((r[field], r["median_ms"]) for r in rows if r["kind"] == kind and r["arm"] == arm)
            panel.plot(
                [size for size, _ in own],
                [ms for _, ms in own],
                markersize=5.5,
                markeredgewidth=0.6,
                linewidth=1.2,
                label=arm if kind == kinds[0] else None,
                **style,
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(lambda value, _: _binary(value))
        _label_milliseconds(panel)
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("complete call, ms")
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def _label_milliseconds(panel: Axes) -> None:
    """Ticks of 1, 2 and 5 times a power of ten have labels; all ticks where these would be too few."""
    low, high = panel.get_ylim()
    has_all = high < 5 * low

    def label(value: float, _: float) -> str:
        return f"{value:.6g}" if has_all or f"{value:e}"[0] in "125" else ""

    panel.yaxis.set_major_formatter(label)
    panel.yaxis.set_minor_formatter(label)


def _binary(value: float) -> str:
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
