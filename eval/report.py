"""One page from measured rows, the source of truth: tables, plots and the paper's figures beside ours.

Rows of different runs never meet in a table or a plot: what a difference means is known inside a run alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from pageweaver.eval import ablations, figures, paper
from pageweaver.eval.calls import calls_section
from pageweaver.eval.inputs import INPUTS
from pageweaver.eval.operator import NOT_RUN, number
from pageweaver.eval.output import counted
from pageweaver.eval.page import (
    Page,
    html_document,
    html_heading,
    html_not_run,
    html_note,
    html_plot,
    html_table,
)
from pageweaver.eval.runs import BENCHES, DIGITS, Row, Run, cases_of
from pageweaver.eval.scaling import BASELINE, weigh


def make_page(runs: Sequence[Run]) -> Page:
    """Build the report of some runs.

    Raises
    ------
    ValueError
        No run, or two of one name, by which plots and tables tell them apart.
    """
    if not runs:
        raise ValueError("rows: got no file, supported: at least one")
    names = [run.name for run in runs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"rows: got two runs named {repeated[0]!r}, supported: runs of different names")
    page = Page("")
    kept = _without_repeats(runs)
    repeats = [f"{run.name} (SHA-256 {run.sha256[:DIGITS]})" for run in runs if run not in kept]
    note = html_note(f"Parts of one of these files, left out: {', '.join(repeats)}.") if repeats else ""
    sections = [("Runs", _provenance(kept) + note)]
    makers: dict[str, Callable[[Run, Page], str]] = {
        "operator": calls_section,
        "ablations": _ablations,
        "numerics": _numerics,
        "scaling": _scaling,
        "prefill": _prefill,
        "survey": _survey,
    }
    titles = {
        "operator": "Calls",
        "ablations": "Ablations",
        "numerics": "Numerics",
        "scaling": "Scaling",
        "prefill": "Prefill of a layer",
        "survey": "Reuse",
    }
    for bench in BENCHES:
        for run in kept:
            if run.bench == bench:
                sections.append((f"{titles[bench]}: {run.name}", makers[bench](run, page)))
    page.html = html_document(sections)
    return page


def _without_repeats(runs: Sequence[Run]) -> list[Run]:
    """The runs but for those all of whose rows another one holds; large ones first."""
    kept: list[tuple[Run, set[str]]] = []
    for run in sorted(runs, key=lambda run: -len(run.rows)):
        rows = {json.dumps(row, sort_keys=True) for row in run.rows}
        if not any(rows <= others for _, others in kept):
            kept.append((run, rows))
    return [run for run, _ in kept]


# --- sections ---


def _provenance(runs: Sequence[Run]) -> str:
    lines, commands = [], []
    for run in runs:
        row = run.rows[0]
        if "command" in row:
            commands.append([run.name, row["command"]])
        clocks = [r["sm_mhz"] for r in run.rows if r.get("sm_mhz")]
        seen = f"{min(c[0] for c in clocks)} to {max(c[2] for c in clocks)}" if clocks else "-"
        protocol = next((r["protocol"] for r in run.rows if r.get("protocol")), None)
        how = "-"
        if protocol is not None:
            how = f"{protocol['rounds']} x {protocol['calls']}, {counted(protocol['inputs'], 'input')}"
        commit = str(row.get("commit") or "-")[:10] + (" (dirty)" if row.get("dirty") else "")
        lines.append(
            [
                run.name,
                str(row.get("device", "-")),
                f"{row.get('driver') or '-'}, CUDA {row.get('cuda') or '-'}, torch {row.get('torch', '-')}",
                commit,
                how,
                seen,
                f"{len(run.rows)}" + (", interrupted" if run.is_partial else ""),
                run.sha256[:DIGITS],
            ]
        )
    headings = ["file", "device", "driver", "commit", "rounds x calls", "SM MHz seen", "rows", "SHA-256"]
    note = (
        "Medians over rounds of CUDA graphs; every sample is in the rows. With one input, K and V"
        " stay partly in L2 from call to call."
    )
    return (
        html_table(headings, lines, text=4)
        + html_note(note)
        + html_table(["file", "command"], commands, text=2)
    )


def _ablations(run: Run, page: Page) -> str:
    parts = [html_note(ablations.notes(any(row["median_ms"] is not None for row in run.rows)))]
    for case in cases_of(run.rows):
        rows = [row for row in run.rows if row["case"] == case]
        parts.append(html_heading(case))
        for headings, lines in ablations.tables_of(rows):
            parts.append(html_table(headings, lines))
    return "".join(parts) + html_not_run(run.rows)


def _numerics(run: Run, page: Page) -> str:
    parts = []
    rows = [row for row in run.rows if row["boundary"] != NOT_RUN]
    for case in dict.fromkeys(row["case"] for row in rows):
        for kind in dict.fromkeys(row["inputs"] for row in rows if row["case"] == case):
            own = [row for row in rows if (row["case"], row["inputs"]) == (case, kind)]
            parts.append(html_heading(f"{case}, {kind}: {INPUTS[kind].about}"))
            lines = [
                [
                    row["arm"],
                    row["arithmetic"],
                    number(row["nrms"], ".3%"),
                    number(row["worst_row_nrms"], ".3%"),
                    number(row["lse_error"], ".5f"),
                    number(row["peer_nrms"], ".3%"),
                    number(row["peer_worst_row_nrms"], ".3%"),
                    {True: "union8's", False: "own", None: "-"}[row["bits_of_union8"]],
                ]
                for row in own
            ]
            headings = [
                "arm",
                "arithmetic",
                "NRMS",
                "worst row",
                "largest LSE error",
                "to per_query",
                "worst row",
            ]
            parts.append(html_table([*headings, "bits"], lines, text=2))
    from pageweaver.eval.numerics import notes

    return "".join(parts) + html_note(notes(run.rows)) + html_not_run(run.rows)


def _scaling(run: Run, page: Page) -> str:
    timed = [row for row in run.rows if row["median_ms"] is not None]
    parts = []
    if any(row["kind"] in ("context", "queries") for row in timed):
        overlap = ", ".join(dict.fromkeys(str(row.get("overlap", "-")) for row in timed))
        caption = f"Complete calls over context and queries; page selections: {overlap}"
        parts.append(html_plot(page, run, "scaling", figures.scaling(timed), caption))
    for kind in dict.fromkeys(row["kind"] for row in run.rows):
        own = [row for row in run.rows if row["kind"] == kind and row["boundary"] != NOT_RUN]
        arms = list(dict.fromkeys(row["arm"] for row in own))
        lines = []
        for case in dict.fromkeys((row["case"], row["sha256"], row["weight"]) for row in own):
            held = {r["arm"]: r for r in own if (r["case"], r["sha256"], r["weight"]) == case}
            cells = [number(held[arm]["median_ms"], ".3f") if arm in held else "-" for arm in arms]
            weight = [f"{case[2]:,.0f}"] if kind == "workload" else []
            lines.append([case[0].removeprefix(f"{kind}."), *weight, *cells])
        headings = [kind, *(["calls"] if kind == "workload" else []), *arms]
        parts.append(html_heading(f"{kind}: complete calls, ms") + html_table(headings, lines))
    beside = _interleaved(timed)
    if beside:
        headings = ["context", "page_union, ms", "others, ms", "the paper's page_union", "its FlashInfer"]
        parts.append(html_heading("Interleaved supports beside the paper") + html_table(headings, beside))
        parts.append(
            html_note("Ours: the preset's supports on this shape. Theirs: " + paper.INTERLEAVED + ".")
        )
    totals = weigh(run.rows)
    if totals:
        base = next((one.seconds for one in totals if one.arm == BASELINE), None)
        lines = [
            [
                one.arm,
                f"{one.seconds:.2f}",
                "-" if base is None else f"{base / one.seconds:.2f}",
                f"{one.worst_ratio:.2f}",
                one.worst_case,
            ]
            for one in totals
        ]
        headings = ["arm", "weighted s", f"{BASELINE} over it", "worst ratio to the fastest", "on"]
        notes = dict.fromkeys(row["workload"] for row in run.rows if row.get("workload"))
        parts.append(
            html_heading("The mix of calls") + html_table(headings, lines) + "".join(map(html_note, notes))
        )
    return "".join(parts) + html_not_run(run.rows)


def _interleaved(rows: Sequence[Row]) -> list[list[str]]:
    """Controlled interleaved supports of the contexts that the paper measured."""
    lines = []
    for name, theirs in paper.INTERLEAVED_MS.items():
        own = {
            row["arm"]: f"{row['median_ms']:.3f}"
            for row in rows
            if (row["kind"], row.get("overlap")) == ("context", "interleaved")
            and row["boundary"] == "complete"
            and row["case"].endswith(f".c{name}")
        }
        if "page_union" in own:
            others = ", ".join(f"{arm} {ms}" for arm, ms in own.items() if arm != "page_union")
            lines.append([name, own["page_union"], others, *(f"{ms:.3f}" for ms in theirs)])
    return lines


def _prefill(run: Run, page: Page) -> str:
    parts = []
    for case in dict.fromkeys(row["case"] for row in run.rows):
        lines = [
            [row["arm"], row["boundary"], number(row["median_ms"], ".2f"), number(row.get("nrms"), ".3%")]
            for row in run.rows
            if row["case"] == case
        ]
        parts.append(html_heading(case) + html_table(["arm", "part", "ms a layer", "NRMS"], lines, text=2))
    return "".join(parts)


def _survey(run: Run, page: Page) -> str:
    sources = [row for row in run.rows if row.get("kind") == "source"]
    names = ("min", "q25", "median", "q75", "max")
    lines = [[r["source"], str(r["observations"]), *(f"{r[name]:.2f}" for name in names)] for r in sources]
    low, high = paper.SURVEY_MEDIANS
    lines.append(["the paper's eight sources", "2736", "-", "-", f"{low:.2f} to {high:.2f}", "-", "-"])
    caption = "Reuse of every layer and head"
    return html_table(["source", "heads", *names], lines) + html_plot(
        page, run, "reuse", figures.reuse(run.rows), caption
    )
