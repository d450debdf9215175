"""The README's tables of measured rows, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pageweaver.common.supports import PRESETS
from pageweaver.eval.arms import ORIGINAL
from pageweaver.eval.operator import number
from pageweaver.eval.runs import SYNTHETIC, Row, Run, cases_of, complete_medians, is_ablation, reuse8


def measured_table(rows: Sequence[Mapping[str, Any]], strategies: Sequence[str] | None = None) -> str:
    """The README's table: complete calls in Markdown, a line a selection.

    Parameters
    ----------
    rows : sequence of mapping
        Of one `bench operator` run.
    strategies : sequence of str, optional
        Columns; left out: all that were timed.

    Raises
    ------
    ValueError
        `strategies` is empty or names an arm that was not timed, an arm was not timed on every selection,
        or nothing was timed.
    """
    times = complete_medians(rows)
    known = list(dict.fromkeys(arm for _, arm in times))
    chosen = known if strategies is None else list(strategies)
    unknown = [repr(arm) for arm in chosen if arm not in known]
    if known and (unknown or not chosen):
        raise ValueError(f"strategies: got {[*unknown, 'none'][0]}, supported: {', '.join(known)}")
    cases = cases_of(row for row in rows if row["boundary"] == "complete")
    missing = [(case, arm) for case in cases for arm in chosen if (case, arm) not in times]
    if missing or not cases:
        raise ValueError(
            f"rows: got none of {missing[0] if missing else 'complete calls'}, supported: a full run"
        )
    reuse = reuse8(rows)
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
    found: dict[str, tuple[Run, list[Row]]] = {}
    for run in runs:
        for row in run.rows if run.bench == "operator" else []:
            name = row["arm"].partition("/")[0]
            if name == ORIGINAL and row["boundary"] == "complete" and not is_ablation(row["arm"]):
                held = found.setdefault(row["arithmetic"], (run, []))
                # By identity: two runs may be of one name.
                if held[0] is run:
                    held[1].append(row)
    cases = [f"{SYNTHETIC}{name}" for name in PRESETS]
    names = " / ".join(f"`{name}`" for name in PRESETS)
    lines = [
        f"| `arithmetic` | caches | NRMS, at most | `{ORIGINAL}`, ms on {names} | rows |",
        "|---|---|---|---|---|",
    ]
    for arithmetic, (first, rows) in found.items():
        times = {row["case"]: f"{row['median_ms']:.3f}" for row in rows}
        error = number(max((row["nrms"] for row in rows if row["nrms"] is not None), default=None), ".2%")
        caches = "BF16" if rows[0]["kv_dtype"] == "bfloat16" else "FP8"
        shown = " / ".join(times.get(case, "-") for case in cases)
        lines.append(f'| `"{arithmetic}"` | {caches} | {error} | {shown} | `{first.file}` |')
    return "\n".join(lines)
