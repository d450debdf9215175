"""Compare execution strategies on page selections: work, error, and time where a GPU runs them.

Work (Eq. 3 and 4) is counted on the whole selection. The error is that of a strategy's own execution in FP8
against float64 attention, on rows sampled from the selection's last queries, because the reference backend
on a CPU takes milliseconds a query.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.problem import AttentionProblem, make_problem
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.selection import Selection
from pageweaver.common.strategy import Strategy, available, load
from pageweaver.common.work import WorkReport
from pageweaver.eval import arms
from pageweaver.eval.arms import OFFLINE_WINDOWS, SAMPLED_ROWS, counting_problem
from pageweaver.eval.output import BLUE, ORANGE, Report, compact
from pageweaver.strategies.regroup.offline import OfflineIds, search

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KV_DTYPE = torch.float8_e4m3fn
ARITHMETIC = "fp8"
# Twice what the timing arms may have: a selection may be a few rows of one head.
MOST_NRMS = 2 * arms.MOST_NRMS[ARITHMETIC]
DEFAULT_ROWS = 256
WARMUP_CALLS, TIMED_CALLS = 5, 25
PLOTTED_SELECTIONS = 12


@dataclass(frozen=True)
class Result:
    """One strategy on one selection.

    Attributes
    ----------
    work : WorkReport
        Counts on the whole selection.
    nrms : float or None
        Error against float64, None where no sampled row reads a page.
    nrms_backend : str
        "cuda" or "reference": what ran for `nrms`.
    time_ms : float or None
        Median complete call on the whole selection; None off a GPU or without kernels.
    search_seconds : float or None
        CPU seconds of the offline search that made the ids, which no call includes.
    """

    work: WorkReport
    nrms: float | None
    nrms_backend: str
    time_ms: float | None
    search_seconds: float | None

    @property
    def is_red(self) -> bool:
        """Whether the error is NaN, infinite, or none that rounding makes."""
        return self.nrms is not None and not self.nrms <= MOST_NRMS


@dataclass(frozen=True, eq=False)
class Comparison:
    """All strategies on one selection.

    Attributes
    ----------
    selection : Selection
    device : torch.device
    group_size : int
        Query heads a KV head.
    seed : int
        Of queries, keys and values, and of the sampled rows.
    tail_rows : int
        Last queries of the last request that ran for the error.
    sampled_rows : tuple of int
        Rows of the selection that the error is taken on.
    results : list of Result
    """

    selection: Selection
    device: torch.device
    group_size: int
    seed: int
    tail_rows: int
    sampled_rows: tuple[int, ...]
    results: list[Result]

    def rows(self) -> list[dict[str, Any]]:
        """JSON-ready, one a strategy but for those that `red` names: JSON has no NaN and no infinity."""
        return [
            {
                "selection": self.selection.name,
                "sha256": self.selection.sha256,
                **result.work.to_dict(),
                "moved_bytes": result.work.moved_bytes,
                "nrms": result.nrms,
                "nrms_backend": result.nrms_backend,
                "nrms_tail_rows": self.tail_rows,
                "nrms_rows": list(self.sampled_rows),
                "seed": self.seed,
                "time_ms": result.time_ms,
                "search_seconds": result.search_seconds,
                "group_size": self.group_size,
                "kv_dtype": str(KV_DTYPE).removeprefix("torch."),
                "arithmetic": ARITHMETIC,
            }
            for result in self.results
            if not result.is_red
        ]

    def red(self) -> list[str]:
        """Strategies whose error is none that rounding makes, each with the selection, in words."""
        return [
            f"{self.selection.name}, {result.work.strategy}:"
            f" got NRMS {result.nrms}, supported: at most {MOST_NRMS}"
            for result in self.results
            if result.is_red
        ]


def check_strategies(names: Sequence[str]) -> list[str]:
    """Refuse a name that is no strategy, and drop repetitions.

    Raises
    ------
    ValueError
        No name, or one that is not `available`.
    """
    unknown = [name for name in names if name not in available()]
    if unknown or not names:
        got = repr(unknown[0]) if unknown else "none"
        raise ValueError(f"strategies: got {got}, supported: {', '.join(available())}")
    return list(dict.fromkeys(names))


def time_call(strategy: Strategy, problem: AttentionProblem) -> float:
    """Time the complete call (`prepare` and `execute`) on a GPU.

    Returns
    -------
    float
        Milliseconds between CUDA events around a call, median of several after a warm-up.

    Raises
    ------
    UnsupportedDeviceError
        The strategy has no kernels here.
    """
    with torch.cuda.device(problem.device):
        workspace = strategy.workspace(problem)
        out = torch.empty(problem.q.shape, dtype=torch.bfloat16, device=problem.device)
        for _ in range(WARMUP_CALLS):
            strategy(problem, out, workspace=workspace)
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(TIMED_CALLS)
        ]
        for start, end in events:
            start.record()
            strategy(problem, out, workspace=workspace)
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events)


def compare_selection(
    selection: Selection,
    strategies: Sequence[str],
    *,
    rows: int = DEFAULT_ROWS,
    seed: int = 0,
    group_size: int = 16,
    device: torch.device | str = "cpu",
    progress: Report | None = None,
) -> Comparison:
    """Count, check and, on a GPU, time strategies on one selection.

    Parameters
    ----------
    selection : Selection
    strategies : sequence of str
        Names of `available`.
    rows : int
        Last queries of the last request to run for the error; all of them when there are fewer.
    seed : int
        Seeds queries, keys, values and the choice of the rows that the error is taken on.
    group_size : int
        Query heads a KV head.
    device : torch.device or str
        On a CUDA device calls are timed, and the error is that of the kernels where they exist.
    progress : callable, optional
        ``progress(fraction, text)``.

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError, TypeError
        An argument, or a size of the selection, is not supported.
    """
    names, device = check_strategies(strategies), torch.device(device)
    if rows < 1:
        raise ValueError(f"rows: got {rows}, supported: at least 1")
    done, steps = 0, 2 * len(names) + 1

    def step(text: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done / steps, f"{selection.name}: {text}")
        done += 1

    step("float64 attention")
    counting = counting_problem(selection, group_size)
    timed = (
        make_problem(selection, group_size=group_size, seed=seed, device=device)
        if device.type == "cuda"
        else None
    )
    yardstick = _Yardstick(selection, rows, seed, group_size, device)
    results = []
    for name in names:
        step(f"{name}, work")
        ids, search_seconds = None, None
        if name in OFFLINE_WINDOWS:
            began = time.perf_counter()
            ids = search(selection, window=OFFLINE_WINDOWS[name], group_size=group_size)
            search_seconds = time.perf_counter() - began
        work = _load(name, "reference", ids).work(counting)
        time_ms = None
        if timed is not None:
            # Without kernels: shown as not built, and the reference path gives the error below.
            with contextlib.suppress(UnsupportedDeviceError):
                time_ms = time_call(_load(name, "cuda", ids), timed)
        backend = "reference" if time_ms is None else "cuda"
        step(f"{name}, error")
        results.append(Result(work, yardstick.error(name, backend), backend, time_ms, search_seconds))
    return Comparison(
        selection, device, group_size, seed, yardstick.tail_rows, yardstick.sampled_rows, results
    )


def _load(name: str, backend: str, ids: OfflineIds | None) -> Strategy:
    options = {} if ids is None else {"ids": ids}
    # Kernels have arithmetics of their own; references all run the same one.
    arithmetic = ARITHMETIC if backend == "reference" else None
    return load(name, backend=backend, arithmetic=arithmetic, **options)


class _Yardstick:
    """Exact attention on rows sampled from a selection's tail, and errors against it."""

    def __init__(
        self, selection: Selection, rows: int, seed: int, group_size: int, device: torch.device
    ) -> None:
        self.tail_rows = min(rows, selection.tail_rows)
        self.group_size = group_size
        self.sampled_rows: tuple[int, ...] = ()
        if self.tail_rows == 0:
            return
        self.tail = selection.tail(self.tail_rows)
        self.problem = make_problem(self.tail, group_size=group_size, seed=seed, device=device)
        count = min(SAMPLED_ROWS, self.tail_rows)
        sampled = np.sort(np.random.default_rng(seed).choice(self.tail_rows, count, replace=False))
        first = int(selection.cu_seqlens_q[-1]) - self.tail_rows
        self.sampled_rows = tuple((first + sampled).tolist())
        self.rows = torch.from_numpy(sampled).to(device)
        self.exact, _ = exact_attention(self.problem, torch.float64, self.rows)

    def error(self, name: str, backend: str) -> float | None:
        """NRMS of a strategy on the sampled rows; None where these read nothing."""
        if self.tail_rows == 0 or not bool(self.exact.any()):
            return None
        ids = None
        if name in OFFLINE_WINDOWS:
            # Ids belong to one selection; those of the whole one name queries that the tail lacks.
            ids = search(self.tail, window=OFFLINE_WINDOWS[name], group_size=self.group_size)
        return nrms(_load(name, backend, ids)(self.problem)[self.rows], self.exact)


def comparison_table(comparison: Comparison) -> Group:
    """One table with its heading, and a sentence that says how to read it."""
    selection, results = comparison.selection, comparison.results
    timed = comparison.device.type == "cuda"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    for heading in ("visits", "reuse", "rounds", "partials", "MiB\nmoved", "NRMS"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    if timed:
        # The one column that may wrap ("not built"), so that large counts fit 80 columns.
        table.add_column("ms", justify="right")
    for result in results:
        work = result.work
        cells = [
            work.strategy,
            f"{work.visits:,}",
            f"{work.reuse:.2f}",
            f"{work.rounds:,}",
            f"{work.partials:,}",
            f"{work.moved_bytes / 2**20:,.0f}",
            "-" if result.nrms is None else f"{result.nrms:.2%}",
        ]
        if timed:
            cells.append("not built" if result.time_ms is None else f"{result.time_ms:.3f}")
        table.add_row(*cells)
    return Group(
        Text(selection.name, style="bold"),
        Text(describe(comparison), style="dim"),
        table,
        Text(sentence(results)),
    )


def describe(comparison: Comparison) -> str:
    """What the selection is, in one line."""
    selection = comparison.selection
    heads = selection.num_kv_heads
    context = int(selection.seqused_k.max()) if selection.batch_size else 0
    return (
        f"{selection.total_q:,} queries x Top{selection.topk}, {heads} KV head{'s' if heads > 1 else ''}"
        f" x {comparison.group_size} query heads, pages of {selection.page_size}, context {context:,}"
        + (f", {selection.batch_size} requests" if selection.batch_size > 1 else "")
    )


def sentence(results: Sequence[Result]) -> str:
    """How to read the table: who reads the fewest pages, and what the partials of page_union cost."""
    parts = []
    owners = [r.work for r in results if r.work.partials == 0]
    if len(owners) > 1:
        base = next((w for w in owners if w.strategy == "union8"), owners[0])
        visits, rounds = min(owners, key=lambda w: w.visits), min(owners, key=lambda w: w.rounds)
        change = _change(visits.visits, base.visits, f" against {base.strategy}")
        text = f"of the strategies without partials {visits.strategy} has the fewest page visits{change}"
        other = "" if rounds.strategy == visits.strategy else f" {rounds.strategy} the fewest"
        parts.append(f"{text} and{other} rounds{_change(rounds.rounds, base.rounds)}")
    for work in (r.work for r in results if r.work.partials):
        parts.append(
            f"{work.strategy} visits a page once per {work.edges / work.visits:,.0f} queries"
            f" and moves {work.partial_bytes / 2**20:,.0f} MiB of partial outputs for it"
        )
    return f"How to read: {'; '.join(parts)}." if parts else ""


def _change(value: int, base: int, against: str = "") -> str:
    return f" ({value / base - 1:+.1%}{against})" if base and abs(value / base - 1) >= 0.0005 else ""


def notes(comparisons: Sequence[Comparison]) -> str:
    """What holds for all tables: the rows that the error is taken on, the searched ids, the timing."""
    tested = [c for c in comparisons if c.tail_rows]
    parts = []
    if tested:
        spans = {
            (int(c.selection.seqused_k[-1]) - c.tail_rows, int(c.selection.seqused_k[-1])) for c in tested
        }
        sizes = sorted({c.tail_rows for c in tested})
        counts = sorted({len(c.sampled_rows) for c in tested})
        where = f"the last {_range(sizes)} queries"
        if len(spans) == 1:
            (first, end), *_ = spans
            where += f" (positions {first:,} to {end - 1:,})"
        parts.append(
            "NRMS: each strategy's own execution against float64 attention (FP8; per_query's GPU kernel"
            f" computes in BF16), on {_range(counts)} rows"
            f" sampled from {where}, random q, k, v, seed {tested[0].seed}."
        )
    seconds = [r.search_seconds for c in comparisons for r in c.results if r.search_seconds is not None]
    if seconds:
        parts.append(f"Offline ids: searched ahead on the CPU, at most {max(max(seconds), 0.01):.2f} s each.")
    if any(c.device.type == "cuda" for c in comparisons):
        parts.append(
            f"ms: complete call, median of {TIMED_CALLS} after {WARMUP_CALLS}, not captured in a graph; where"
            " kernels are not built the reference path gave the NRMS."
        )
    return " ".join(parts)


def _range(values: Sequence[int]) -> str:
    """An ascending list as one number or from-to."""
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print one selection's table and its sentence."""
    console.print(comparison_table(comparison))
    console.print()


def comparison_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Visits and rounds of every strategy, one panel a selection (the first `PLOTTED_SELECTIONS`)."""
    from matplotlib.figure import Figure

    shown = comparisons[:PLOTTED_SELECTIONS]
    columns = min(len(shown), 3)
    lines = math.ceil(len(shown) / columns)
    strategies = max(len(c.results) for c in shown)
    figure = Figure(
        figsize=(1.2 + 4.4 * columns, lines * (1.5 + 0.46 * strategies) + 0.6), layout="constrained"
    )
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for panel, comparison in zip(panels, shown, strict=False):
        works = [r.work for r in comparison.results]
        at = np.arange(len(works))
        top = max((max(w.visits, w.rounds) for w in works), default=1) or 1
        for offset, colour, hatch, field in (
            (-0.2, BLUE, "", "visits"),
            (0.2, ORANGE, "///", "rounds"),
        ):
            values = [getattr(w, field) for w in works]
            bars = panel.barh(
                at + offset,
                values,
                height=0.38,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
                label=field,
            )
            panel.bar_label(bars, [compact(v) for v in values], padding=3, fontsize=8)
        panel.set_xlim(0, 1.16 * top)
        panel.set_title(comparison.selection.name, fontsize=10)
        panel.xaxis.set_major_formatter(lambda value, _: compact(value))
        panel.set_xlabel("page visits (Eq. 3), 64-row rounds (Eq. 4)", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_yticks(at, [w.strategy for w in works])
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    panels[0].invert_yaxis()  # shared by all
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False)
    title = "Work of each strategy; fewer is better; partials and bytes are in the table"
    if len(comparisons) > len(shown):
        title += f" (first {len(shown)} of {len(comparisons)} selections)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
