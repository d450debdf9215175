"""Measured rows of one run, and what tables and plots of every kind ask of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageweaver.eval.arms import DIAGNOSTICS, ORIGINAL
from pageweaver.eval.output import SCHEMA_VERSION, read_lines

Row = dict[str, Any]
SYNTHETIC = "synthetic."
ABLATED = frozenset({"cluster", "visits", "rounds"})
DIGITS = 12  # of a hash
# Commands whose rows a report knows, by the middle of their schema.
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


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a file of rows.

    Raises
    ------
    ValueError
        It is no JSON lines, is empty, comes from no command of `BENCHES` or from several, has a schema
        of another version, or is a survey's without an observation.
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
    benches = {_bench_of(row) for row in rows}
    if len(benches) != 1 or not benches <= set(BENCHES):
        *timed, last = (bench if bench == "survey" else f"bench {bench}" for bench in BENCHES)
        raise ValueError(f"rows: got {path}, supported: rows of one command, {', '.join(timed)} or {last}")
    bench = benches.pop()
    if bench == "survey":
        if all(row["kind"] == "source" for row in rows):
            raise ValueError(f"rows: got {path}, a survey's rows of which none is an observation")
    elif strange := {row["schema"] for row in rows} - {f"pageweaver-{bench}-{SCHEMA_VERSION}"}:
        raise ValueError(
            f"rows: got {path} of schema {strange.pop()!r}, supported: pageweaver-{bench}-{SCHEMA_VERSION}"
        )
    sha256 = hashlib.sha256("".join(f"{x}\n" for x in lines).encode()).hexdigest()
    return Run(Path(path).stem, bench, rows, sha256)


def _bench_of(row: Row) -> str:
    if row.get("kind") in ("source", "observation"):
        return "survey"
    return str(row.get("schema", "")).removeprefix("pageweaver-").rpartition("-")[0]


def cases_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Selections: synthetic ones as they come, then others by the reuse of groups of 8, the least first."""
    rows = list(rows)
    names = list(dict.fromkeys(row["case"] for row in rows))
    known = reuse8(rows)
    made = [name for name in names if name.startswith(SYNTHETIC)]
    return made + sorted((n for n in names if n not in made), key=lambda name: known.get(name, 0.0))


def reuse8(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Reuse of each selection's groups of 8 in original order, whatever the arithmetic that ran them."""
    originals = (row for row in rows if str(row.get("arm")).partition("/")[0] == ORIGINAL)
    return {row["case"]: row["reuse"] for row in originals if row.get("reuse")}


def complete_medians(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """(selection, arm) -> milliseconds of the complete call."""
    return {(row["case"], row["arm"]): row["median_ms"] for row in rows if row["boundary"] == "complete"}


def is_ablation(arm: str) -> bool:
    """Whether an arm stands for a question of its own, not for a way to run attention."""
    name, *variants = arm.split("/")
    return name in DIAGNOSTICS or not ABLATED.isdisjoint(variants)
