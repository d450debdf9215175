"""`pageweaver report`: the files that it writes, and the README's tables that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageweaver.__main__ import app
from pageweaver.eval.readme import arithmetic_table, measured_table
from pageweaver.eval.runs import read_run

from .report_rows import UNION, lines, online_rows, timed, write


@pytest.fixture
def online(tmp_path: Path) -> Path:
    """An operator run with orders of queries."""
    return write(tmp_path / "online.jsonl", online_rows())


def test_measured_table() -> None:
    rows = lines(UNION)
    table = measured_table(rows, ["union8", "per_query"]).splitlines()
    assert table[0] == "| selection | reuse | `union8` | `per_query` |" and len(table) == 16
    times = {(r["case"], r["arm"]): r["median_ms"] for r in rows if r["boundary"] == "complete"}
    case = "austen-a.L4.h1"
    assert f"| `{case}` | 5.43 | {times[case, 'union8']:.3f} | {times[case, 'per_query']:.3f} |" in table
    with pytest.raises(ValueError, match="rows: got none of"):
        measured_table([*rows, timed("regroup_w64", case, 1.0)], ["union8", "regroup_w64"])
    with pytest.raises(ValueError, match="rows: got none of complete calls"):
        measured_table([])


def test_command(online: Path, tmp_path: Path) -> None:
    words = ["report", str(UNION), str(online), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert f"Wrote {tmp_path / 'out' / 'report.html'} and 8 plots." in result.output
    assert len(list((tmp_path / "out").iterdir())) == 9
    one = write(tmp_path / "one.jsonl", [timed("union8", "x", 1.0)])
    result = CliRunner().invoke(app, ["report", str(one), *words[-2:]], env={"COLUMNS": "200"})
    assert "report.html and 1 plot.\n" in result.output
    table = CliRunner().invoke(app, ["report", str(online), "--readme", "--strategies", "union4,union8"])
    expected = [measured_table(lines(online), ["union4", "union8"]), arithmetic_table([read_run(online)])]
    assert table.output == "\n\n".join(expected) + "\n"
    assert '| `"fp8"` | FP8 | 3.60% | 0.700 / - / - / - | `online.jsonl` |' in table.output
    refused = CliRunner().invoke(
        app, ["report", str(online), "--output", str(online)], env={"COLUMNS": "200"}
    )
    assert refused.exit_code == 2 and "Error: output: got" in refused.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategies", "union8"], "got 'union8' without --readme, supported: with it"),
        (["--readme", "--strategies", ","], "got none, supported: union8, union4, regroup_w128"),
        (["--readme", "--strategies", "union8,nope"], "got 'nope', supported: union8, union4, regroup_w128"),
    ],
)
def test_columns_are_arms_of_the_table(more: list[str], message: str, online: Path, tmp_path: Path) -> None:
    words = ["report", str(online), "--output", str(tmp_path / "out"), *more]
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and f"Error: strategies: {message}" in refused.output
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_where_a_plot_cannot_be(online: Path, tmp_path: Path) -> None:
    taken = tmp_path / "out" / "online-work.png"
    taken.mkdir(parents=True)
    words = ["report", str(online), "--output", str(taken.parent)]
    refused = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and f"Error: output: got {taken}, supported: a file" in refused.output
    assert list(taken.parent.iterdir()) == [taken]
