"""One page from measured rows, the source of truth: tables, plots and the paper's figures beside ours.

Rows of different runs never meet in a table or a plot: what a difference means is known inside a run alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from pageweaver.common.supports import PRESETS
from pageweaver.eval import ablations, figures, paper
from pageweaver.eval.arms import DIAGNOSTICS, ORIGINAL
from pageweaver.eval.inputs import INPUTS
from pageweaver.eval.operator import COUNTED, NOT_RUN, number
from pageweaver.eval.output import png, read_lines
from pageweaver.eval.roofline import floor_of
from pageweaver.eval.scaling import BASELINE, weigh

Row = dict[str, Any]
SYNTHETIC = "synthetic."
SERVING = ("union4", "union8", "regroup_w64", "regroup_w128", "auto", "page_union")
ABLATED = frozenset({"cluster", "visits", "rounds"})
DIGITS = 12  # of a hash
SHOWN_LINES = 40  # a longer table is folded
# Commands whose rows this page knows, by the middle of their schema.
BENCHES = ("operator", "ablations", "numerics", "scaling", "prefill", "survey")


@dataclass
class Run:
    """Rows of one file.

    Attributes
    ----------
    name : str
        The file's stem.
    bench : str
        One of `BENCHES`.
    rows : list of dict
    sha256 : str
        Of the file: plots and page name what they were made from.
    """

    name: str
    bench: str
    rows: list[Row]
    sha256: str


@dataclass
class Page:
    """What the report consists of.

    Attributes
    ----------
    html : str
        One self-contained page.
    plots : dict
        File name -> PNG bytes: the page's plots, for use elsewhere.
    """

    html: str
    plots: dict[str, bytes] = field(default_factory=dict)


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a file of rows.

    Raises
    ------
    ValueError
        It is no JSON lines, is empty, or comes from no command of `BENCHES`.
    """
    rows: list[Row] = []
    lines = read_lines("rows", path)
    for index, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"rows: got {path}, whose line {index} is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"rows: got {path}, whose line {index} is no JSON object")
        rows.append(row)
    first = rows[0] if rows else {}
    bench = str(first.get("schema", "")).removeprefix("pageweaver-").rpartition("-")[0]
    if first.get("kind") in ("source", "observation"):
        bench = "survey"
    if bench not in BENCHES:
        raise ValueError(f"rows: got {path}, supported: rows of {', '.join(BENCHES)}")
    return Run(
        Path(path).stem, bench, rows, hashlib.sha256("".join(f"{x}\n" for x in lines).encode()).hexdigest()
    )


def cases_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Selections: synthetic ones as they come, then others by the reuse of groups of 8, the least first."""
    rows = list(rows)
    names = list(dict.fromkeys(row["case"] for row in rows))
    known = _reuse8(rows)
    made = [name for name in names if name.startswith(SYNTHETIC)]
    return made + sorted((n for n in names if n not in made), key=lambda name: known.get(name, 0.0))


def _reuse8(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Reuse of each selection's groups of 8 in original order, whatever the arithmetic that ran them."""
    originals = (row for row in rows if str(row.get("arm")).partition("/")[0] == ORIGINAL)
    return {row["case"]: row["reuse"] for row in originals if row.get("reuse")}


def complete_medians(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """(selection, arm) -> milliseconds of the complete call."""
    return {(row["case"], row["arm"]): row["median_ms"] for row in rows if row["boundary"] == "complete"}


def measured_table(rows: Sequence[Mapping[str, Any]], arms: Sequence[str] | None = None) -> str:
    """The README's table: complete calls in Markdown, a line a selection.

    Parameters
    ----------
    rows : sequence of mapping
        Of one `bench operator` run.
    arms : sequence of str, optional
        Columns; left out: all that were timed.

    Raises
    ------
    ValueError
        An arm was not timed on every selection, or nothing was timed.
    """
    times = complete_medians(rows)
    chosen = list(dict.fromkeys(arm for _, arm in times)) if arms is None else list(arms)
    cases = cases_of(row for row in rows if row["boundary"] == "complete")
    missing = [(case, arm) for case in cases for arm in chosen if (case, arm) not in times]
    if missing or not cases:
        raise ValueError(
            f"rows: got none of {missing[0] if missing else 'complete calls'}, supported: a full run"
        )
    reuse = _reuse8(rows)
    lines = [
        "| selection | reuse | " + " | ".join(f"`{arm}`" for arm in chosen) + " |",
        "|---" * (2 + len(chosen)) + "|",
    ]
    for case in cases:
        shown = f"{reuse[case]:.2f}" if case in reuse else "-"
        cells = [f"{times[case, arm]:.3f}" for arm in chosen]
        lines.append("| " + " | ".join([f"`{case}`", shown, *cells]) + " |")
    return "\n".join(lines)


def arithmetic_table(runs: Iterable[Run]) -> str:
    """The README's table of arithmetics: caches, error, and complete calls of union8 on the synthetic sets.

    Parameters
    ----------
    runs : iterable of Run
        Of `bench operator`; an arithmetic is taken from the first that has it.
    """
    found: dict[str, tuple[str, list[Row]]] = {}
    for run in runs:
        for row in run.rows if run.bench == "operator" else []:
            name, arithmetic = str(row["arm"]).partition("/")[0], row["arithmetic"]
            if name == ORIGINAL and row["boundary"] == "complete" and not _is_ablation(row["arm"]):
                held = found.setdefault(arithmetic, (run.name, []))
                if held[0] == run.name:
                    held[1].append(row)
    cases = [f"{SYNTHETIC}{name}" for name in PRESETS]
    names = " / ".join(f"`{name}`" for name in PRESETS)
    lines = [
        f"| `arithmetic` | caches | NRMS, at most | `{ORIGINAL}`, ms on {names} | rows |",
        "|---|---|---|---|---|",
    ]
    for arithmetic, (name, rows) in found.items():
        times = {row["case"]: f"{row['median_ms']:.3f}" for row in rows}
        errors = [row["nrms"] for row in rows]
        caches = "BF16" if rows[0]["kv_dtype"] == "bfloat16" else "FP8"
        shown = " / ".join(times.get(case, "-") for case in cases)
        lines.append(f'| `"{arithmetic}"` | {caches} | {max(errors):.2%} | {shown} | `{name}.jsonl` |')
    return "\n".join(lines)


def make_page(runs: Sequence[Run]) -> Page:
    """Build the report of some runs.

    Raises
    ------
    ValueError
        No run.
    """
    if not runs:
        raise ValueError("rows: got no file, supported: at least one")
    page = Page("")
    kept = _without_repeats(runs)
    repeats = [f"{run.name} (SHA-256 {run.sha256[:DIGITS]})" for run in runs if run not in kept]
    note = _note(f"Parts of one of these files, left out: {', '.join(repeats)}.") if repeats else ""
    sections = [("Runs", _provenance(kept) + note)]
    makers: dict[str, Callable[[Run, Page], str]] = {
        "operator": _operator,
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
    page.html = _document(sections)
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
            how = f"{protocol['rounds']} x {protocol['calls']}, {protocol['inputs']} input(s)"
        commit = str(row.get("commit") or "-")[:10] + (" (dirty)" if row.get("dirty") else "")
        cut = any(r.get("interrupted") for r in run.rows)
        lines.append(
            [
                run.name,
                str(row.get("device", "-")),
                f"{row.get('driver') or '-'}, CUDA {row.get('cuda') or '-'}, torch {row.get('torch', '-')}",
                commit,
                how,
                seen,
                f"{len(run.rows)}" + (", interrupted" if cut else ""),
                run.sha256[:DIGITS],
            ]
        )
    headings = ["file", "device", "driver", "commit", "rounds x calls", "SM MHz seen", "rows", "SHA-256"]
    note = (
        "Medians over rounds of CUDA graphs; every sample is in the rows. With one input, K and V"
        " stay partly in L2 from call to call."
    )
    return _table(headings, lines, text=4) + _note(note) + _table(["file", "command"], commands, text=2)


def _operator(run: Run, page: Page) -> str:
    rows = run.rows
    timed = [row for row in rows if row["median_ms"] is not None]
    if not timed:
        return _note("Counted alone: these rows hold no times.") + _counts(rows)
    cases, arms = cases_of(timed), list(dict.fromkeys(row["arm"] for row in timed))
    policies = {row["arm"]: row.get("arithmetic") for row in timed}
    reuse = _reuse8(timed)
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
        parts.append(_heading(title) + _table(headings, lines))
        if boundary == "complete":
            plain = [row for row in timed if not _is_ablation(row["arm"])]
            caption = "Complete calls, ms; arms of ablations are in the table alone"
            parts.append(_plot(page, run, "calls", figures.complete_calls(plain, cases), caption))
    headings, lines = _beside(timed, cases)
    if lines:
        inputs = f"Ours: the selections above. Theirs: {paper.SETUP.removeprefix('the paper: ')}."
        parts.append(_heading("Beside the paper") + _table(headings, lines, text=4) + _note(inputs))
    if any(row["boundary"] == "attention" for row in timed):
        caption = "Work against time: which of the counts a kernel's time follows"
        parts.append(_plot(page, run, "work", figures.work_against_time(timed), caption))
    if any("net_us" in row for row in timed):
        parts.append(_heading("Orders of queries (Eq. 7), us") + _eq7(timed, cases))
        caption = "Net saving of orders, and what grouping took of it"
        parts.append(_plot(page, run, "savings", figures.savings(timed, cases), caption))
    floors = [row for row in timed if row["boundary"] == "attention" and floor_of(row) is not None]
    if floors:
        parts.append(_heading("Over the floor") + _floors(floors, cases))
        caption = "Attention's time over the floor of its own work; a bar is an arm's median"
        parts.append(_plot(page, run, "roofline", figures.roofline(timed, cases), caption))
    winners = _winners(timed, cases)
    if winners:
        headings = ["selection", "reuse", "fewest rounds", "fastest", "ahead of the predicted one"]
        note = (
            "Of the strategies that serve, in one arithmetic and cache. Rounds (Eq. 4) predict the time of"
            " those that own their queries; page_union's also write partial results, and it is only measured."
        )
        parts.append(_heading("Predicted and measured to win") + _table(headings, winners) + _note(note))
    errors = {(row["arm"], row["arithmetic"]): [] for row in timed}  # type: dict[tuple[str, str], list[float]]
    for row in timed:
        if row.get("nrms") is not None:
            errors[row["arm"], row["arithmetic"]].append(row["nrms"])
    lines = [[a, p, f"{min(e):.3%}", f"{max(e):.3%}"] for (a, p), e in errors.items() if e]
    parts.append(
        _heading("Error to float64 on sampled rows") + _table(["arm", "arithmetic", "least", "most"], lines)
    )
    return "".join(parts) + _not_run(rows)


def _is_ablation(arm: str) -> bool:
    """Whether an arm stands for a question of its own, not for a way to run attention."""
    name, *variants = arm.split("/")
    return name in DIAGNOSTICS or not ABLATED.isdisjoint(variants)


def _beside(rows: Sequence[Row], cases: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Ours and the paper's, where a figure of it has a like in these rows."""
    times = complete_medians(rows)

    def ratios(over: str, under: str) -> list[float]:
        return [times[c, over] / times[c, under] for c in cases if (c, over) in times and (c, under) in times]

    def shown(values: Sequence[float], form: str) -> str:
        count = len(values)
        mean = statistics.geometric_mean(values)
        return f"{mean:{form}} ({min(values):{form}} to {max(values):{form}}, {count} selections)"

    lines = []
    for arm in dict.fromkeys(arm for _, arm in times):
        found = ratios(arm, ORIGINAL)
        if arm == "union4" and found:
            value = f"{paper.UNION4_OVER_UNION8:.3f}x"
            lines.append(["union4 over union8, complete call", shown(found, ".3f"), value, "geometric means"])
        elif arm in ("per_query", "flashinfer", "sglang", "vllm", "dense", "flex") and found:
            peers = ", ".join(f"{name} {value:.3f}x" for name, value in paper.UNION8_SPEEDUP.items())
            lines.append(
                [f"{arm} over union8, complete call", shown(found, ".2f"), peers, "its peers, 6 captures"]
            )
    for arm in ("regroup_w64", "regroup_w128", "auto"):
        own = [row for row in rows if row["arm"] == arm and row["boundary"] == "complete"]
        saved = [1 - 1 / r for r in ratios(ORIGINAL, arm)]
        if saved:
            low, high = paper.ONLINE_SAVINGS
            theirs = f"{low:.2%} to {high:.2%}" if arm == "regroup_w128" else "-"
            span = f"{min(saved):+.2%} to {max(saved):+.2%}, median {statistics.median(saved):+.2%}"
            lines.append([f"{arm}: share of union8's call saved", span, theirs, "five 64K captures"])
        added = [row["increment_us"] for row in own if "increment_us" in row]
        if added:
            known = paper.INCREMENT_US.get(arm)
            span = f"{min(added):.1f} to {max(added):.1f}, median {statistics.median(added):.1f}"
            theirs = "-" if known is None else f"{known} ({paper.CAPTURE})"
            lines.append([f"{arm}: increment, us", span, theirs, "online less ready-made ids"])
    inter = f"{SYNTHETIC}interleaved"
    if (inter, "page_union") in times and (inter, ORIGINAL) in times:
        ours = f"{times[inter, 'page_union']:.3f} against union8 {times[inter, ORIGINAL]:.3f}"
        mine, peer = paper.INTERLEAVED_MS["64K"]
        lines.append(
            [
                "page_union on interleaved supports, ms",
                ours,
                f"{mine} against FlashInfer {peer}",
                "64K tokens",
            ]
        )
    errors = [row["nrms"] for row in rows if row["arm"] == ORIGINAL and row.get("nrms")]
    if errors:
        low, high = paper.NRMS
        ours = f"{min(errors):.2%} to {max(errors):.2%}"
        lines.append(["NRMS of union8", ours, f"{low:.2%} to {high:.2%}", "33 rows; theirs on captures"])
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
    return _table(["selection", "arm", "visits", "rounds", "net", "increment", "grouping"], lines, text=2)


def _winners(rows: Sequence[Row], cases: Sequence[str]) -> list[list[str]]:
    """Which strategy has the fewest rounds on each selection, and which is the fastest."""
    reuse = _reuse8(rows)
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
            lines.append([case, f"{reuse[case]:.2f}", *names, ahead])
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
    return _table([*headings, "times the floor", "which is"], lines, text=2) + _note(note)


def _counts(rows: Sequence[Row]) -> str:
    lines = [
        [r["case"], r["arm"], f"{r['visits']:,}", f"{r['reuse']:.2f}", number(r["rounds"], ",")]
        for r in rows
        if r["boundary"] == COUNTED
    ]
    return _table(["selection", "arm", "visits", "reuse", "rounds"], lines, text=2) + _not_run(rows)


def _ablations(run: Run, page: Page) -> str:
    parts = [_note(ablations.notes(any(row["median_ms"] is not None for row in run.rows)))]
    for case in cases_of(run.rows):
        rows = [row for row in run.rows if row["case"] == case]
        parts.append(_heading(case))
        for headings, lines in ablations.tables_of(rows):
            parts.append(_table(headings, lines))
    return "".join(parts) + _not_run(run.rows)


def _numerics(run: Run, page: Page) -> str:
    parts = []
    rows = [row for row in run.rows if row["boundary"] != NOT_RUN]
    for case in dict.fromkeys(row["case"] for row in rows):
        for kind in dict.fromkeys(row["inputs"] for row in rows if row["case"] == case):
            own = [row for row in rows if (row["case"], row["inputs"]) == (case, kind)]
            parts.append(_heading(f"{case}, {kind}: {INPUTS[kind].about}"))
            lines = [
                [
                    row["arm"],
                    row["arithmetic"],
                    f"{row['nrms']:.3%}",
                    f"{row['worst_row_nrms']:.3%}",
                    f"{row['lse_error']:.5f}",
                    f"{row['peer_nrms']:.3%}",
                    f"{row['peer_worst_row_nrms']:.3%}",
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
            parts.append(_table([*headings, "bits"], lines, text=2))
    from pageweaver.eval.numerics import notes

    return "".join(parts) + _note(notes(run.rows)) + _not_run(run.rows)


def _scaling(run: Run, page: Page) -> str:
    timed = [row for row in run.rows if row["median_ms"] is not None]
    parts = []
    if any(row["kind"] in ("context", "queries") for row in timed):
        overlap = ", ".join(dict.fromkeys(str(row.get("overlap", "-")) for row in timed))
        caption = f"Complete calls over context and queries; page selections: {overlap}"
        parts.append(_plot(page, run, "scaling", figures.scaling(timed), caption))
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
        parts.append(_heading(f"{kind}: complete calls, ms") + _table(headings, lines))
    beside = _interleaved(timed)
    if beside:
        headings = ["context", "page_union, ms", "others, ms", "the paper's page_union", "its FlashInfer"]
        parts.append(_heading("Interleaved supports beside the paper") + _table(headings, beside))
        parts.append(_note("Ours: the preset's supports on this shape. Theirs: " + paper.INTERLEAVED + "."))
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
        parts.append(_heading("The mix of calls") + _table(headings, lines) + "".join(map(_note, notes)))
    return "".join(parts) + _not_run(run.rows)


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
    lines = [
        [row["arm"], row["boundary"], number(row["median_ms"], ".2f"), number(row.get("nrms"), ".3%")]
        for row in run.rows
    ]
    case = run.rows[0].get("case", "")
    return _note(str(case)) + _table(["arm", "part", "ms a layer", "NRMS"], lines, text=2)


def _survey(run: Run, page: Page) -> str:
    sources = [row for row in run.rows if row.get("kind") == "source"]
    names = ("min", "q25", "median", "q75", "max")
    lines = [[r["source"], str(r["observations"]), *(f"{r[name]:.2f}" for name in names)] for r in sources]
    low, high = paper.SURVEY_MEDIANS
    lines.append(["the paper's eight sources", "2736", "-", "-", f"{low:.2f} to {high:.2f}", "-", "-"])
    caption = "Reuse of every layer and head"
    return _table(["source", "heads", *names], lines) + _plot(
        page, run, "reuse", figures.reuse(run.rows), caption
    )


def _not_run(rows: Sequence[Row]) -> str:
    """Arms that were asked for and could not run, each once for a reason."""
    reasons = {(row["arm"], row["reason"]) for row in rows if row.get("boundary") == NOT_RUN}
    return "".join(_note(f"{arm} was not run: {reason}") for arm, reason in sorted(reasons))


# --- HTML ---

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto;
  padding: 1.5rem; max-width: 72rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; border-top: 1px solid #ccc; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e3; vertical-align: bottom; }
th { font-weight: 600; border-bottom-color: #888; }
.t { text-align: left; }
summary { cursor: pointer; color: #0072B2; font-size: .85rem; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .85rem; max-width: 60rem; }
"""


def _document(sections: Sequence[tuple[str, str]]) -> str:
    links = " ".join(f'<a href="#s{i}">{escape(title)}</a>' for i, (title, _) in enumerate(sections))
    bodies = "".join(
        f'<section id="s{i}"><h2>{escape(title)}</h2>{body}</section>'
        for i, (title, body) in enumerate(sections)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>PageWeaver, measured</title><style>{STYLE}</style></head><body>"
        f"<h1>PageWeaver, measured</h1><nav>{links}</nav>{bodies}</body></html>\n"
    )


def _heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]], text: int = 1) -> str:
    """A table; its first `text` columns hold words."""

    def row(cells: Sequence[str], tag: str) -> str:
        marks = [' class="t"' if index < text else "" for index in range(len(cells))]
        return (
            "<tr>"
            + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=True))
            + "</tr>"
        )

    body = "".join(row(line, "td") for line in lines)
    table = (
        f'<div class="scroll"><table><thead>{row(headings, "th")}</thead><tbody>{body}</tbody></table></div>'
    )
    if len(lines) <= SHOWN_LINES:
        return table
    return f"<details><summary>{len(lines)} lines</summary>{table}</details>"


def _plot(page: Page, run: Run, name: str, figure: Any, caption: str) -> str:
    data = png(figure, f"{run.name}.jsonl, SHA-256 {run.sha256}")
    page.plots[f"{run.name}-{name}.png"] = data
    source = base64.b64encode(data).decode()
    text = escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{source}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"
