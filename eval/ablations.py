"""Which part buys what: group size, mapping, window, order, and each step of the preparation.

The orders are those of the paper's section 5.4, printed beside its figures. Inputs differ, so read ratios to
union8 across and not milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageweaver.common.problem import selection_support
from pageweaver.common.selection import Selection
from pageweaver.eval import paper
from pageweaver.eval.arms import ORIGINAL, Arm
from pageweaver.eval.operator import COUNTED, NOT_RUN, number, untimed
from pageweaver.eval.survey import union_counts
from pageweaver.eval.timing import kernel_microseconds

BENCH = "ablations"
KERNEL = "kernel"  # boundary of a row that holds one kernel of a complete call
GROUPS = (4, 8, 16)
GROUP_ARMS = ("union4", ORIGINAL)
MAPPING_ARMS = (ORIGINAL, f"{ORIGINAL}/cluster")
ORDER_ARMS = (
    ORIGINAL,
    "regroup_w64",
    "fixed_w64",
    "regroup_w128",
    "fixed_w128",
    "regroup_w128/visits",
    "fixed_w128/visits",
    "auto",
    "fixed_auto",
    "fixed_w512",
    "fixed_w2048",
    "hash_w128",
    "random_ids",
    "reorder_w128",
)
# Arms whose calls are taken apart into kernels.
STEP_ARMS = (ORIGINAL, "fixed_w128", "regroup_w128", "reorder_w128")


def default_arms() -> list[str]:
    """All arms of the ablations."""
    return list(dict.fromkeys([*GROUP_ARMS, *MAPPING_ARMS, *ORDER_ARMS]))


def group_rows(selection: Selection, header: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Unions of 4, 8 and 16 consecutive queries, counted: also of sizes that no kernel runs."""
    support, boundaries = selection_support(selection).numpy(), selection.cu_seqlens_q.tolist()
    for group in GROUPS:
        edges, visits, _ = (int(x.sum()) for x in union_counts(support, boundaries, group))
        yield {
            **header,
            "case": selection.name,
            "sha256": selection.sha256,
            **untimed(f"groups_of_{group}", COUNTED),
            "edges": edges,
            "visits": visits,
            "reuse": edges / visits if visits else 0.0,
        }


def step_rows(arms: Sequence[Arm], common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a complete call, as the profiler sees them; needs a CUDA device."""
    for arm in arms:
        if arm.name in STEP_ARMS:
            for kernel, microseconds in kernel_microseconds(arm.calls["complete"][0]).items():
                row = {**common, **untimed(arm.name, KERNEL), "kernel": kernel}
                yield {**row, "median_ms": microseconds / 1000}


def tables_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], list[list[str]]]]:
    """Headings and lines of each table of one selection's rows, the orders beside the paper's."""
    tables = [_groups(rows), _orders(rows)]
    if _median(rows, ORIGINAL, "complete") is not None:
        tables.append(_times(rows))
    if any(row["boundary"] == KERNEL for row in rows):
        tables.append(_steps(rows))
    return tables


def print_ablations(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one selection's tables."""
    console.print(Text(rows[0]["case"], style="bold"))
    for headings, lines in tables_of(rows):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for row in rows:
        if row["boundary"] == NOT_RUN:
            console.print(Text(f"{row['arm']} not run: {row['reason']}", style="dim"))
    console.print()


def notes(timed: bool) -> str:
    """What holds for all tables."""
    parts = [
        f"Paper: {paper.CAPTURE}: other selections and another kernel, so compare columns of changes.",
        "Fixed, hashed and random ids are made ahead, and no call pays for them; reorder moves q, page ids"
        " and outputs in every call.",
    ]
    if timed:
        parts.append(
            "ms: complete calls. net: what an order saves on union8's; incr: what grouping adds to"
            " ready-made ids (Eq. 7); grouping: the same of preparations. All are medians of differences"
            " inside a round."
        )
    else:
        parts.append("Times need a CUDA device; here everything is counted.")
    return " ".join(parts)


def _of(rows: Sequence[Mapping[str, Any]], arm: str, boundary: str) -> Mapping[str, Any] | None:
    return next((row for row in rows if (row["arm"], row["boundary"]) == (arm, boundary)), None)


def _median(rows: Sequence[Mapping[str, Any]], arm: str, boundary: str) -> float | None:
    row = _of(rows, arm, boundary)
    return None if row is None else row["median_ms"]


def _groups(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Group sizes by counts, and the arms that run them in original order."""
    arms = dict.fromkeys((*(f"groups_of_{group}" for group in GROUPS), *GROUP_ARMS, *MAPPING_ARMS))
    timed = any(_median(rows, arm, "complete") is not None for arm in arms)
    headings = ["original order", "visits", "reuse", "rounds"]
    lines = []
    for arm in arms:
        row = _of(rows, arm, "complete") or _of(rows, arm, COUNTED)
        if row is not None:
            lines.append([arm, f"{row['visits']:,}", f"{row['reuse']:.2f}", number(row["rounds"], ",")])
            if timed:
                lines[-1] += [number(_median(rows, arm, b), ".4f") for b in ("complete", "attention")]
    return headings + (["complete ms", "attention ms"] if timed else []), lines


def _in_order(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of the arms that differ by their order of queries."""
    found = []
    for arm in dict.fromkeys(row["arm"] for row in rows if row["boundary"] in ("complete", COUNTED)):
        if arm == ORIGINAL or not (arm in (*GROUP_ARMS, *MAPPING_ARMS) or arm.startswith("groups_of")):
            row = _of(rows, arm, "complete") or _of(rows, arm, COUNTED)
            assert row is not None
            found.append(row)
    return found


def _orders(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Work of orders beside the paper's, relative to union8 on both sides."""
    base = _of(rows, ORIGINAL, "complete") or _of(rows, ORIGINAL, COUNTED)
    known, lines = paper.ORDERS[ORIGINAL], []
    for row in _in_order(rows):
        theirs = paper.ORDERS.get(row["arm"].partition("/")[0])
        lines.append(
            [
                row["arm"],
                f"{row['visits']:,}",
                _change(row["visits"], None if base is None else base["visits"]),
                _change(None if theirs is None else theirs.visits, known.visits),
                number(row["rounds"], ","),
                _change(row["rounds"], None if base is None else base["rounds"]),
            ]
        )
    return ["order", "visits", "change", "paper", "rounds", "change"], lines


def _times(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Complete calls of orders beside the paper's, and the terms of Eq. 7."""
    base, known, lines = _median(rows, ORIGINAL, "complete"), paper.ORDERS[ORIGINAL], []
    for row in _in_order(rows):
        theirs = paper.ORDERS.get(row["arm"].partition("/")[0])
        lines.append(
            [
                row["arm"],
                number(row["median_ms"], ".4f"),
                _change(row["median_ms"], base),
                _change(None if theirs is None else theirs.complete_ms, known.complete_ms),
                *(number(row.get(name), "+.1f") for name in ("net_us", "increment_us", "grouping_us")),
            ]
        )
    name = "regroup_w128"
    low, high = paper.GROUPING_US[name]
    eq7 = [f"{paper.NET_US[name]:+.1f}", f"{paper.INCREMENT_US[name]:+.1f}", f"{low} to {high}"]
    lines.append([f"paper {name}", "", "", "", *eq7])
    return ["order", "ms", "change", "paper", "net us", "incr us", "grouping us"], lines


def _change(value: float | None, base: float | None) -> str:
    return f"{value / base - 1:+.1%}" if value is not None and base else "-"


def _steps(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Kernels of complete calls, as the profiler saw them."""
    lines = []
    for row in rows:
        if row["boundary"] == KERNEL:
            name = row["kernel"] if len(row["kernel"]) <= 50 else f"{row['kernel'][:47]}..."
            lines.append([name, row["arm"], f"{1000 * row['median_ms']:.1f}"])
    return ["kernel", "arm", "us"], lines
