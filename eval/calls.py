"""The report's section of timed calls: every arm on every selection, and what explains the differences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pageweaver.eval import figures, paper
from pageweaver.eval.arms import ORIGINAL
from pageweaver.eval.operator import COUNTED, number
from pageweaver.eval.output import counted
from pageweaver.eval.page import Page, html_heading, html_not_run, html_note, html_plot, html_table
from pageweaver.eval.roofline import floor_of
from pageweaver.eval.runs import SYNTHETIC, Row, Run, cases_of, complete_medians, is_ablation, reuse8

ALONE = (
    "Attention alone is a graph of its own, timed beside the others and not inside of the complete call. The"
    " card's power cap moves the clock from graph to graph, by what was drawn just before, so it can read"
    " longer than the complete call that it is part of."
)
SERVING = ("union4", "union8", "regroup_w64", "regroup_w128", "auto", "page_union")


def calls_section(run: Run, page: Page) -> str:
    rows = run.rows
    timed = [row for row in rows if row["median_ms"] is not None]
    if not timed:
        return html_note("Counted alone: these rows hold no times.") + _counts(rows)
    cases, arms = cases_of(timed), list(dict.fromkeys(row["arm"] for row in timed))
    policies = {row["arm"]: row.get("arithmetic") for row in timed}
    reuse = reuse8(timed)
    parts = []
    for boundary, title in (
        ("complete", "Complete calls, ms: all from BF16 q, cache and page ids to the output"),
        ("attention", "Attention alone, ms"),
        ("prepare", "Preparation alone, ms"),
        ("eager", "Complete calls outside graphs, ms"),
    ):
        times = {(r["case"], r["arm"]): r["median_ms"] for r in timed if r["boundary"] == boundary}
        shown = [arm for arm in arms if any((case, arm) in times for case in cases)]
        if not shown:
            continue
        lines = [
            [case, number(reuse.get(case), ".2f"), *(number(times.get((case, arm)), ".4f") for arm in shown)]
            for case in cases
        ]
        headings = ["selection", "reuse", *(f"{arm} ({policies[arm]})" for arm in shown)]
        parts.append(html_heading(title) + html_table(headings, lines, kept=2))
        if boundary == "attention":
            parts.append(html_note(ALONE))
        if boundary == "complete":
            plain = [r for r in timed if r["boundary"] == boundary and not is_ablation(r["arm"])]
            caption = "Complete calls, ms; arms of ablations are in the table alone"
            if plain:
                parts.append(html_plot(page, run, "calls", figures.complete_calls(plain, cases), caption))
    headings, lines = _beside(timed, cases)
    if lines:
        inputs = f"Ours: the selections above. Theirs: {paper.SETUP.removeprefix('the paper: ')}."
        parts.append(
            html_heading("Beside the paper") + html_table(headings, lines, text=4) + html_note(inputs)
        )
    if any(row["boundary"] == "attention" for row in timed):
        caption = "Work against time: which of the counts a kernel's time follows"
        parts.append(html_plot(page, run, "work", figures.work_against_time(timed), caption))
    if any(row["boundary"] == "complete" and "net_us" in row for row in timed):
        parts.append(html_heading("Orders of queries (Eq. 7), us") + _eq7(timed, cases))
        caption = "Net saving of orders, and what grouping took of it"
        parts.append(html_plot(page, run, "savings", figures.savings(timed, cases), caption))
    floors = [row for row in timed if row["boundary"] == "attention" and floor_of(row) is not None]
    if floors:
        parts.append(html_heading("Over the floor") + _floors(floors, cases))
        caption = "Attention's time over the floor of its own work; a bar is an arm's median"
        parts.append(html_plot(page, run, "roofline", figures.roofline(timed, cases), caption))
    winners = _winners(timed, cases)
    if winners:
        headings = ["selection", "reuse", "fewest rounds", "fastest", "ahead of the predicted one"]
        note = (
            "Of the strategies that serve, in one arithmetic and cache. Rounds (Eq. 4) predict the time of"
            " those that own their queries; page_union's also write partial results, and it is only measured."
        )
        parts.append(
            html_heading("Predicted and measured to win") + html_table(headings, winners) + html_note(note)
        )
    errors = {(row["arm"], row["arithmetic"]): [] for row in timed}  # type: dict[tuple[str, str], list[float]]
    for row in timed:
        if row.get("nrms") is not None:
            errors[row["arm"], row["arithmetic"]].append(row["nrms"])
    lines = [[a, p, f"{min(e):.3%}", f"{max(e):.3%}"] for (a, p), e in errors.items() if e]
    parts.append(
        html_heading("Error to float64 on sampled rows")
        + html_table(["arm", "arithmetic", "least", "most"], lines)
    )
    return "".join(parts) + html_not_run(rows)


def _beside(rows: Sequence[Row], cases: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Ours and the paper's, where a figure of it has a like in these rows."""
    times = complete_medians(rows)

    def ratios(over: str, under: str) -> list[float]:
        return [times[c, over] / times[c, under] for c in cases if (c, over) in times and (c, under) in times]

    def shown(values: Sequence[float], form: str) -> str:
        count = len(values)
        mean = statistics.geometric_mean(values)
        return f"{mean:{form}} ({min(values):{form}} to {max(values):{form}}, {counted(count, 'selection')})"

    lines = []
    for arm in dict.fromkeys(arm for _, arm in times):
        found = ratios(arm, ORIGINAL)
        if arm == "union4" and found:
            value = f"{paper.UNION4_OVER_UNION8:.3f}x"
            lines.append(["union4 over union8, complete call", shown(found, ".3f"), value, "geometric means"])
        elif arm in ("per_query", "flashinfer", "sglang", "vllm", "dense", "flex") and found:
            peers = ", ".join(f"{name} {value:.3f}x" for name, value in paper.UNION8_SPEEDUP.items())
            lines.append(
                [
                    f"{arm} over union8, complete call",
                    shown(found, ".2f"),
                    peers,
                    "geometric means; theirs of its peers over 6 captures",
                ]
            )
    for arm in ("regroup_w64", "regroup_w128", "auto"):
        own = [row for row in rows if row["arm"] == arm and row["boundary"] == "complete"]
        saved = [1 - 1 / r for r in ratios(ORIGINAL, arm)]
        if saved:
            low, high = paper.ONLINE_SAVINGS
            over = f"ours over {counted(len(saved), 'selection')}"
            theirs = "-"
            if arm == "regroup_w128":
                theirs, over = f"{low:.2%} to {high:.2%}", f"{over}; theirs over five 64K captures"
            span = f"{min(saved):+.2%} to {max(saved):+.2%}, median {statistics.median(saved):+.2%}"
            lines.append([f"{arm}: share of union8's call saved", span, theirs, over])
        added = [row["increment_us"] for row in own if "increment_us" in row]
        if added:
            known = paper.INCREMENT_US.get(arm)
            span = f"{min(added):.1f} to {max(added):.1f}, median {statistics.median(added):.1f}"
            theirs = "-" if known is None else f"{known} ({paper.CAPTURE})"
            over = f"online less ready-made ids; ours over {counted(len(added), 'selection')}"
            lines.append([f"{arm}: increment, us", span, theirs, over])
    inter = f"{SYNTHETIC}interleaved"
    if (inter, "page_union") in times and (inter, ORIGINAL) in times:
        ours = f"{times[inter, 'page_union']:.3f} against union8 {times[inter, ORIGINAL]:.3f}"
        mine, peer = paper.INTERLEAVED_MS["64K"]
        lines.append(
            [
                "page_union on interleaved supports, ms",
                ours,
                f"{mine} against FlashInfer {peer}",
                "one selection each, 64K tokens",
            ]
        )
    errors = [row["nrms"] for row in rows if row["arm"] == ORIGINAL and row.get("nrms")]
    if errors:
        over = f"33 rows a selection; ours over {counted(len(cases), 'selection')}, theirs on captures"
        low, high = paper.NRMS
        ours = f"{min(errors):.2%} to {max(errors):.2%}"
        lines.append(
            [
                "NRMS of union8",
                ours,
                f"{low:.2%} to {high:.2%}",
                over,
            ]
        )
    return ["what", "ours", "the paper's", "how"], lines


def _eq7(rows: Sequence[Row], cases: Sequence[str]) -> str:
    names = ("net_us", "increment_us", "grouping_us")
    lines = [
        [row["case"], row["arm"], f"{row['visits']:,}", f"{row['rounds']:,}"]
        + [number(row.get(name), "+.1f") for name in names]
        for case in cases
        for row in rows
        if row["case"] == case and row["boundary"] == "complete" and "net_us" in row
    ]
    return html_table(
        ["selection", "arm", "visits", "rounds", "net", "increment", "grouping"], lines, text=2, kept=2
    )


def _winners(rows: Sequence[Row], cases: Sequence[str]) -> list[list[str]]:
    """Which strategy has the fewest rounds on each selection, and which is the fastest."""
    reuse = reuse8(rows)
    base = next((row for row in rows if row["arm"] == ORIGINAL), None)
    lines = []
    for case in cases:
        own = [
            row
            for row in rows
            if base is not None
            and row["case"] == case
            and row["boundary"] == "complete"
            and row["arm"] in SERVING
            and row["arithmetic"] == base["arithmetic"]
        ]
        owning = [row for row in own if not row["partials"]]
        if owning and len(own) > 1:
            predicted = min(owning, key=lambda row: row["rounds"])
            fastest = min(own, key=lambda row: row["median_ms"])
            ahead = f"{1 - fastest['median_ms'] / predicted['median_ms']:.1%}"
            names = [predicted["arm"], fastest["arm"]]
            lines.append([case, number(reuse.get(case), ".2f"), *names, ahead])
    return lines


def _floors(rows: Sequence[Row], cases: Sequence[str]) -> str:
    lines = []
    for case in cases:
        for row in rows:
            floor = floor_of(row)
            if row["case"] == case and floor is not None:
                terms = (row["median_ms"], floor.matrix, floor.exponentials, floor.pages, floor.memory)
                times = [f"{x:.3f}" for x in terms]
                ratio = f"{row['median_ms'] / floor.milliseconds:.2f}"
                lines.append([case, row["arm"], *times, ratio, floor.bound])
    headings = ["selection", "arm", "attention ms", "tensor cores", "exponentials", "page traffic", "memory"]
    note = (
        "Floors in ms, from ceilings that kernels which do nothing else reach on an H200 (eval/roofline.py)."
    )
    return html_table([*headings, "times the floor", "which is"], lines, text=2, kept=2) + html_note(note)


def _counts(rows: Sequence[Row]) -> str:
    lines = [
        [r["case"], r["arm"], f"{r['visits']:,}", f"{r['reuse']:.2f}", number(r["rounds"], ",")]
        for r in rows
        if r["boundary"] == COUNTED
    ]
    return html_table(
        ["selection", "arm", "visits", "reuse", "rounds"], lines, text=2, kept=2
    ) + html_not_run(rows)
