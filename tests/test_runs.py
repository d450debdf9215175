"""Files of measured rows: which are read, and which are refused by file, line and key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pageweaver.__main__ import app
from pageweaver.eval import calls, report
from pageweaver.eval.readme import arithmetic_table
from pageweaver.eval.report import make_page
from pageweaver.eval.runs import cases_of, read_run

from .report_rows import COMMITTED, UNION, lines, timed, write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "supported: rows of one command, bench operator, bench ablations, "),
        ("{", "whose line 1 is no JSON"),
        ("[1]", "whose line 1 is no JSON object"),
        ('{"schema": "pageweaver-other-1"}', "supported: rows of one command, bench"),
        ('{"strategy": "union8"}', "bench scaling, bench prefill or survey"),  # of compare
        ('{"schema": "pageweaver-operator-1"}\n{"kind": "source"}', "supported: rows of one command, bench"),
        ('{"schema": "pageweaver-operator-2"}', "'pageweaver-operator-2', supported: pageweaver-operator-1"),
        ('{"kind": "source"}\n{"kind": "source"}', "of which none is an observation"),
        ('{"kind": "observation"}', "whose line 1 has no 'source'"),
        ('{"schema": "pageweaver-operator-1"}', "whose line 1 has no 'boundary'"),
        ('{}\n{"a": NaN}', "whose line 2 is no JSON (NaN"),
        ('{"a": -Infinity}', "whose line 1 is no JSON (-Infinity"),
        ("[" * 100_000, "whose line 1 is no JSON"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_run(path)
    with pytest.raises(ValueError, match="rows: got no file"):
        make_page([])


def test_repeated_rows_are_refused(tmp_path: Path) -> None:
    rows = [timed("union8", "x", 0.5), timed("union4", "x", 0.6), timed("union8", "x", 0.7)]
    message = "lines 1 and 3 both have the complete call of union8 on x, supported: one"
    with pytest.raises(ValueError, match=message):
        read_run(write(tmp_path / "rows.jsonl", rows))


def test_kept_rows_are_those_of_a_part(tmp_path: Path) -> None:
    """Of a run that ended early: told from whole ones in the page, and no tables of the README's."""
    whole = write(tmp_path / "rows.jsonl", [timed("union8", "x", 0.5), timed("union4", "x", 0.6)])
    part = write(tmp_path / "rows.jsonl.partial", [timed("union8", "x", 0.7)])
    runs = [read_run(whole), read_run(part)]
    assert [(run.name, run.is_partial) for run in runs] == [("rows", False), ("rows.jsonl.partial", True)]
    page = make_page(runs)
    assert {"rows-calls.png", "rows.jsonl.partial-calls.png"} <= set(page.plots)
    assert page.html.count("1, interrupted") == 1
    done = CliRunner().invoke(app, ["report", str(part), "--readme"])
    assert (
        done.exit_code == 2
        and "got rows.jsonl.partial, supported with --readme: rows of whole" in done.output
    )


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [
        ("boundary", "whole", "complete, attention, prepare, eager, counted, not run"),
        ("boundary", [], "complete, attention, prepare"),
        ("case", 1, "text"),
        ("arm", None, "text"),
        ("command", ["pageweaver"], "text"),
        ("median_ms", 0, "a number above 0"),
        ("median_ms", True, "a number above 0"),
        ("median_ms", 1e300, "a number above 0 and below 1e12"),
        ("median_ms", float("1e999"), "a number above 0"),
        ("nrms", "x", "a number or null"),
        ("rounds", -1, "a count"),
        ("visits", 1.5, "a count"),
        ("page_size", 0, "a count above 0"),
        ("net_us", None, "a number"),
        ("net_us", 10**30, "a number"),
        ("sm_mhz", [1700], "three numbers above 0 or null"),
        ("protocol", {"rounds": 7}, "counts of rounds, calls and inputs or null"),
    ],
)
def test_values_of_another_kind_are_refused(key: str, value: Any, supported: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    held = json.dumps({**timed("union8", "x", 1.0), key: value}).replace("Infinity", "1e999")
    path.write_text(json.dumps(timed("union8", "x", 1.0)) + "\n" + held)
    with pytest.raises(
        ValueError, match=re.escape(f"{path}, whose line 2 has {key} {value!r}, supported: {supported}")
    ):
        read_run(path)


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in COMMITTED
        if p.stem in {"baselines", "ablations", "numerics", "scaling_mix", "prefill", "survey"}
    ],
    ids=lambda p: p.stem,
)
def test_rows_lack_a_key_or_make_a_page(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind of committed row, without any one key: refused by its name, or never asked for."""
    monkeypatch.setattr(report, "html_plot", lambda *_: "")
    monkeypatch.setattr(calls, "html_plot", lambda *_: "")
    rows = {(row.get("boundary"), row.get("kind"), len(row)): row for row in lines(path)}
    whole = list(rows.values())
    for place, row in enumerate(whole):
        for key in row:
            less = [*whole[:place], {k: v for k, v in row.items() if k != key}, *whole[place + 1 :]]
            try:
                run = read_run(write(tmp_path / "rows.jsonl", less))
            except ValueError as error:
                assert f"line {place + 1} has no {key!r}" in str(error) or key in ("schema", "kind")
            else:
                make_page([run])
                arithmetic_table([run])


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_rows_are_read(path: Path) -> None:
    assert len(read_run(path).rows) == len(lines(path))


def test_selections_stand_in_the_order_of_reuse() -> None:
    cases = cases_of(lines(UNION))
    assert cases[:4] == [f"synthetic.{name}" for name in ("low", "mid", "high", "interleaved")]
    reuse = {row["case"]: row["reuse"] for row in lines(UNION) if row["arm"] == "union8"}
    others = [reuse[case] for case in cases[4:]]
    assert others == sorted(others) and len(others) == 10


@pytest.mark.parametrize(
    ("first", "second"), [("a/run.jsonl", "b/run.jsonl"), ("a/run.jsonl", "a/run.jsonl")]
)
@pytest.mark.parametrize("more", [[], ["--readme"]])
def test_files_of_one_name_are_refused(first: str, second: str, more: list[str], tmp_path: Path) -> None:
    paths = [tmp_path / first, tmp_path / second]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        write(path, [timed("union8", str(path), 1.0)])
    words = ["report", *map(str, paths), "--output", str(tmp_path / "out"), *more]
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and not (tmp_path / "out").exists()
    assert (
        f"Error: rows: got {paths[0]} and {paths[1]}, supported: files of different names" in refused.output
    )
