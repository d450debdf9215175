"""Measured rows of one run, and what tables and plots of every kind ask of them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageweaver.eval.ablations import KERNEL
from pageweaver.eval.arms import DIAGNOSTICS, ORIGINAL
from pageweaver.eval.inputs import INPUTS
from pageweaver.eval.operator import COUNTED, NOT_RUN
from pageweaver.eval.output import PARTIAL, SCHEMA_VERSION, read_lines
from pageweaver.eval.timing import BOUNDARIES, EAGER

Row = dict[str, Any]
SYNTHETIC = "synthetic."
ABLATED = frozenset({"cluster", "visits", "rounds"})
DIGITS = 12  # of a hash
# Commands whose rows a report knows, by the middle of their schema.
BENCHES = ("operator", "ablations", "numerics", "scaling", "prefill", "survey")


# --- what rows hold ---


@dataclass(frozen=True)
class Value:
    """What a key holds: in words, and whether a value is that."""

    about: str
    holds: Callable[[Any], bool]

    def or_null(self) -> Value:
        """The same, or null."""
        return Value(f"{self.about} or null", lambda x: x is None or self.holds(x))


def _is_number(x: Any) -> bool:
    # 1e999 is JSON and reads as infinity; plots take no integer above a word. No bool is a number.
    return (type(x) is int and abs(x) <= sys.maxsize) or (type(x) is float and math.isfinite(x))


def _is_count(x: Any) -> bool:
    return type(x) is int and 0 <= x <= sys.maxsize


def _is_protocol(x: Any) -> bool:
    return isinstance(x, dict) and all(_is_count(x.get(name)) for name in ("rounds", "calls", "inputs"))


def _one_of(words: Iterable[str]) -> Value:
    known = list(words)
    return Value(", ".join(known), lambda x: x in known)


TEXT = Value("text", lambda x: isinstance(x, str))
NULL = Value("null", lambda x: x is None)
NUMBER = Value("a number", _is_number)
# Larger ones, which nobody measures, are more than plots can take.
ABOVE = Value("a number above 0 and below 1e12", lambda x: _is_number(x) and 0 < x < 1e12)
COUNT = Value("a count", _is_count)
SIZE = Value("a count above 0", lambda x: _is_count(x) and x > 0)
FLAG = Value("true, false", lambda x: isinstance(x, bool))
CLOCKS = Value(
    "three numbers above 0", lambda x: isinstance(x, list) and len(x) == 3 and all(map(ABOVE.holds, x))
)
PROTOCOL = Value("counts of rounds, calls and inputs", _is_protocol)

Keys = Mapping[str, Value]
_ARM: Keys = {"case": TEXT, "arm": TEXT}
_WORK: Keys = {"visits": COUNT, "reuse": NUMBER, "rounds": COUNT}
_TIMED: Keys = {
    **_ARM,
    **_WORK,
    **{"arithmetic": TEXT, "median_ms": ABOVE, "nrms": NUMBER.or_null()},
    **{"edges": COUNT, "partials": COUNT, "kv_dtype": TEXT},
}
# Groups that no kernel runs have no rounds.
_COUNTED: Keys = {**_ARM, **_WORK, "median_ms": NULL, "rounds": COUNT.or_null()}
_NOT_RUN: Keys = {**_ARM, "median_ms": NULL, "reason": TEXT}
_CALLS: Mapping[str, Keys] = {
    **dict.fromkeys((*BOUNDARIES, EAGER), _TIMED),
    **{COUNTED: _COUNTED, NOT_RUN: _NOT_RUN},
}
_ERRORS = ("nrms", "worst_row_nrms", "lse_error", "peer_nrms", "peer_worst_row_nrms")
_SHAPE: Keys = {"kind": TEXT, "weight": NUMBER, "sha256": TEXT}
_LAYER: Keys = {**_ARM, "median_ms": ABOVE}
# What the report needs of each command's rows, by boundary; of a survey's, by kind. Rows may hold more.
REQUIRED: Mapping[str, Mapping[str, Keys]] = {
    "operator": _CALLS,
    "ablations": {**_CALLS, KERNEL: {**_ARM, "kernel": TEXT, "median_ms": NUMBER}},
    "numerics": {
        "numerics": {
            **_ARM,
            **dict.fromkeys(_ERRORS, NUMBER.or_null()),
            **{"inputs": _one_of(INPUTS), "arithmetic": TEXT, "bits_of_union8": FLAG.or_null()},
            **{"sampled_rows": Value("a list", lambda x: isinstance(x, list)), "total_q": COUNT},
            **{"peer": TEXT, "backend": TEXT},
        },
        NOT_RUN: {**_ARM, "reason": TEXT},
    },
    "scaling": {
        "complete": {**_TIMED, **_SHAPE, "context": COUNT, "total_q": COUNT},
        COUNTED: {**_COUNTED, **_SHAPE},
        NOT_RUN: {**_NOT_RUN, **_SHAPE},
    },
    "prefill": {
        **dict.fromkeys(("indexer", "attention", "rest"), _LAYER),
        # Eager attention may run out of memory.
        "layer": {**_LAYER, "median_ms": ABOVE.or_null()},
    },
    "survey": {
        "source": {
            **{"source": TEXT, "observations": COUNT},
            **dict.fromkeys(("min", "q25", "median", "q75", "max"), NUMBER),
        },
        "observation": {"source": TEXT, "reuse": NUMBER, "group": COUNT},
    },
}
# Of any row, where it is there.
OPTIONAL: Keys = {
    **{"command": TEXT, "workload": TEXT.or_null(), "nrms": NUMBER.or_null()},
    **{"protocol": PROTOCOL.or_null(), "sm_mhz": CLOCKS.or_null()},
    **dict.fromkeys(("net_us", "increment_us", "grouping_us"), NUMBER),
    **dict.fromkeys(("group_size", "page_size", "num_kv_heads"), SIZE),
    **dict.fromkeys(("total_q", "context", "partial_bytes"), COUNT.or_null()),
}


def _fault(bench: str, row: Row) -> str | None:
    """What keeps a row from being one of its command's, in words."""
    kinds, name = REQUIRED[bench], "kind" if bench == "survey" else "boundary"
    keys: dict[str, Value] = {name: _one_of(kinds)}
    if row.get(name) in list(kinds):
        keys |= kinds[row[name]]
    if bench == "scaling" and row.get("kind") == "workload":
        keys["weight"] = ABOVE  # shares of it are of a total above 0
    missing = [key for key in keys if key not in row]
    if missing:
        return f"has no {missing[0]!r}"
    for key, value in {**OPTIONAL, **keys}.items():
        if key in row and not value.holds(row[key]):
            return f"has {key} {row[key]!r:.80}, supported: {value.about}"
    return None


# --- runs ---


@dataclass
class Run:
    """Rows of one file.

    Attributes
    ----------
    file : str
        The file's name.
    bench : str
        One of `BENCHES`.
    rows : list of dict
    sha256 : str
        Of the file: plots and page name what they were made from.
    """

    file: str
    bench: str
    rows: list[Row]
    sha256: str

    @property
    def name(self) -> str:
        """What plots and tables call it: the file's name, without ``.jsonl``."""
        return self.file.removesuffix(".jsonl")

    @property
    def is_partial(self) -> bool:
        """Whether these are the rows that were kept of a run that ended early."""
        return self.file.endswith(PARTIAL) or any(row.get("interrupted") for row in self.rows)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read files of rows, as `read_run` does.

    Raises
    ------
    ValueError
        Two are of one name, by which plots and tables tell runs apart.
    """
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise ValueError(f"rows: got {seen[path.stem]} and {path}, supported: files of different names")
        seen[path.stem] = path
    return [read_run(path) for path in paths]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a file of rows.

    Raises
    ------
    ValueError
        It is no JSON lines, is empty, comes from no command of `BENCHES` or from several, has a schema
        of another version, or is a survey's without an observation; or a row lacks one of the keys that are
        `REQUIRED`, or holds something else in it.
    """
    rows: list[Row] = []
    lines = read_lines("rows", path)
    for index, line in enumerate(lines, 1):
        try:
            row = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
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
    for index, row in enumerate(rows, 1):
        if fault := _fault(bench, row):
            raise ValueError(f"rows: got {path}, whose line {index} {fault}")
    seen: dict[tuple[Any, ...], int] = {}
    for index, row in enumerate(rows, 1):
        if row.get("boundary") != "complete":
            continue
        first = seen.setdefault(tuple(row.get(key) for key in ("kind", "case", "arm", "sha256")), index)
        if first != index:
            raise ValueError(
                f"rows: got {path}, whose lines {first} and {index} both have the complete call of"
                f" {row['arm']} on {row['case']}, supported: one"
            )
    sha256 = hashlib.sha256("".join(f"{x}\n" for x in lines).encode()).hexdigest()
    return Run(Path(path).name, bench, rows, sha256)


def _refuse(constant: str) -> None:
    """Python reads constants that JSON lacks."""
    raise ValueError(constant)


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
