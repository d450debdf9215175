"""The ablations and the bench commands around them, without a GPU and with made-up times."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import pageweaver as pw
from pageweaver import bench
from pageweaver.__main__ import app
from pageweaver.common.captures import save_selections
from pageweaver.common.supports import preset, streams
from pageweaver.eval import ablations, operator, paper
from pageweaver.eval import output as output_files
from pageweaver.eval.arms import arm_names, parse_arm

Row = dict[str, Any]


@pytest.fixture(scope="module")
def selections() -> list[pw.Selection]:
    several = streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)
    return [preset("low", total_q=256, prefix=8192), several]


@pytest.fixture(scope="module")
def selection_file(selections: list[pw.Selection], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selections") / "small.safetensors"
    save_selections(path, selections)
    return path


def json_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def printed(rows: Sequence[Row], width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    ablations.print_ablations(console, rows)
    return console.export_text()


def timed(rows: Sequence[Row], milliseconds: dict[str, float]) -> list[Row]:
    """Counted rows as a GPU would leave them."""
    found = []
    for row in rows:
        if row["arm"].startswith("groups_of"):
            found.append(row)
        elif row["arm"] in milliseconds:
            ms = milliseconds[row["arm"]]
            more = {"net_us": 1000 * (milliseconds["union8"] - ms)} if row["arm"] != "union8" else {}
            found.append({**row, "boundary": "complete", "median_ms": ms, "samples_ms": [ms], **more})
    return found


@pytest.mark.parametrize("name", ["union8", "fixed_w128", "random_ids", "groups_of_16"])
def test_ablations_count_what_the_strategies_do(
    name: str, selections: list[pw.Selection], selection_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "ablations.jsonl"
    result = CliRunner().invoke(app, ["bench", "ablations", str(selection_file), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "No CUDA device: counts, no times." in result.output
    rows = json_rows(output)
    cases = [s.name for s in selections]
    assert list(dict.fromkeys(row["case"] for row in rows)) == cases
    for selection in selections:
        own = {row["arm"]: row for row in rows if row["case"] == selection.name}
        assert set(own) == {*ablations.default_arms(), "groups_of_4", "groups_of_8", "groups_of_16"}
        problem = pw.make_problem(selection)
        # Groups of 4, 8 are those of union4 and union8: two ways to count the same.
        for size in (4, 8):
            work = pw.load(f"union{size}").work(problem)
            counts = (own[f"groups_of_{size}"]["visits"], own[f"groups_of_{size}"]["edges"])
            assert counts == (work.visits, work.edges) == (own[f"union{size}"]["visits"], work.edges)
        online = pw.load("regroup_w128").work(problem)
        assert own["fixed_w128"]["visits"] == own["regroup_w128"]["visits"] == online.visits
        assert own[name]["schema"] == "pageweaver-ablations-1" and own[name]["dirty"] is not None
        assert own[name]["sha256"] == selection.sha256


def test_default_arms_are_arms() -> None:
    for arm in ablations.default_arms():
        assert parse_arm(arm)[0] in arm_names()
    assert set(paper.ORDERS) <= set(ablations.default_arms())


def test_tables_fit_and_show_the_papers_figures(selections: list[pw.Selection]) -> None:
    header: Row = {"schema": "s"}
    counted = [
        *ablations.group_rows(selections[0], header),
        *operator.counted_rows(selections[0], ablations.default_arms(), 16, _fp8(), header),
    ]
    text = printed(counted)
    assert max(map(len, text.splitlines())) <= 80
    assert " ms" not in text
    assert re.search(r"\nfixed_w128/visits +[\d,]+ +[-+.\d]+% +-12.7% +[\d,]+ +[-+.\d]+% *\n", text)

    times = {arm: 0.8 for arm in ablations.default_arms()} | {"union8": 1.0, "regroup_w128": 0.75}
    shown = printed(timed(counted, times))
    assert max(map(len, shown.splitlines())) <= 80
    visits = {row["arm"]: row["visits"] for row in counted}
    change = f"{visits['regroup_w128'] / visits['union8'] - 1:+.1%}"
    # Ours, then the paper's: 89,426 of 102,429 visits and 1.30792 of 1.36633 ms.
    assert re.search(rf"\nregroup_w128 +{visits['regroup_w128']:,} +\{change} +-12.7% ", shown), shown
    assert re.search(r"\nregroup_w128 +0.7500 +-25.0% +-4.3% +\+250.0 +- +-\n", shown), shown
    assert re.search(r"paper regroup_w128 +\+58.4 +\+37.5 +34.6 to 34.9", shown)
    assert re.search(r"\nunion4 .* 0\.8000 ", shown)


def _fp8() -> Any:
    import torch

    return torch.float8_e4m3fn


def test_an_arm_without_kernels_is_named(selections: list[pw.Selection]) -> None:
    row = {"case": "x", **operator.untimed("regroup_w64", operator.NOT_RUN), "reason": "no kernels here"}
    base = {"case": "x", **operator.untimed("union8", operator.COUNTED)}
    base |= {"visits": 10, "reuse": 1.0, "rounds": 20}
    assert "regroup_w64 not run: no kernels here" in printed([base, row])


def test_papers_figures_agree_with_each_other() -> None:
    """Eq. 7 with the paper's own terms."""
    orders = paper.ORDERS
    original, fixed, online = (orders[x].complete_ms for x in ("union8", "fixed_w128", "regroup_w128"))
    assert 1000 * (online - fixed) == pytest.approx(paper.INCREMENT_US["regroup_w128"], abs=0.01)
    saving = (original - fixed) - (online - fixed)
    assert 1000 * saving == pytest.approx(paper.NET_US["regroup_w128"], abs=0.01)
    assert orders["regroup_w128"].visits == orders["fixed_w128"].visits


# --- what the bench commands share ---


def test_operator_without_a_gpu_counts(selection_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    words = ["bench", "operator", str(selection_file), "--strategies", "union8,page_union", "--quick"]
    result = CliRunner().invoke(app, [*words, "--commit", "0123abc-dirty", "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = json_rows(output)
    assert [row["boundary"] for row in rows] == ["counted"] * 4
    assert all((row["commit"], row["dirty"]) == ("0123abc", True) for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("operator SMALL --strategies union9", "Error: strategies: got 'union9'"),
        ("ablations SMALL --strategies union8/slow", "Error: strategies: got 'union8/slow'"),
        ("ablations missing.safetensors", "Error: selection: got 'missing.safetensors'"),
        ("operator SMALL --group-size 3", "Error: group_size: got 3, supported: (1, 2, 4, 8, 16)"),
        ("operator SMALL --output .", "Error: output: got ., supported: a file"),
    ],
)
def test_errors_leave_no_file(words: str, message: str, selection_file: Path, tmp_path: Path) -> None:
    parts = words.replace("SMALL", str(selection_file)).split()
    if "--output" not in parts:
        parts += ["--output", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(app, ["bench", *parts], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("has_old", [True, False])
def test_finished_rows_are_kept(
    stop: type[BaseException], has_old: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, or a red check on a later selection, ends a run: what was green until then is on disk, beside
    what an earlier run wrote."""
    shown: list[list[str]] = []
    output, kept = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.partial"
    if has_old:
        output.write_text("old\n")

    def made(**_: Any) -> Iterator[Row]:
        yield {"case": "a", "arm": "x"}
        yield {"case": "a", "arm": "y"}
        yield {"case": "b", "arm": "x"}
        raise stop

    run = bench.Run("operator", output, None)
    with pytest.raises(stop):
        run.collect(made, lambda _, rows: shown.append([row["case"] + row["arm"] for row in rows]))
    assert [row["case"] + row["arm"] for row in json_rows(kept)] == ["ax", "ay", "bx"]
    assert shown == [["ax", "ay"], ["bx"]]
    assert capsys.readouterr().err == f"Kept 3 finished rows in {kept}.\n"
    assert output.exists() == has_old and (not has_old or output.read_text() == "old\n")


def test_finished_rows_outlive_a_second_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while they are written waits until they are."""
    inner = output_files.atomic_write_bytes

    def written(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        inner(*arguments)

    def made(**_: Any) -> Iterator[Row]:
        yield {"case": "a", "arm": "x"}
        monkeypatch.setattr(output_files, "atomic_write_bytes", written)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.Run("operator", tmp_path / "o", None).collect(made)
    assert json_rows(tmp_path / "o.partial") == [{"case": "a", "arm": "x"}]


def test_rows_of_an_earlier_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They stay beside the output of a later run, which says so, finished or not."""
    kept = tmp_path / "o.partial"
    kept.write_text('{"case": "old"}\n')

    def made(**_: Any) -> Iterator[Row]:
        raise KeyboardInterrupt
        yield {}

    named = f"{kept} is of an earlier run that ended early.\n"
    with pytest.raises(KeyboardInterrupt):
        bench.Run("operator", tmp_path / "o", None).collect(made)
    assert capsys.readouterr().err == named
    run = bench.Run("operator", tmp_path / "o", None)
    run.collect(lambda **_: iter([{"case": "a", "arm": "x"}]))
    run.close()
    assert capsys.readouterr().out.endswith(named) and json_rows(kept) == [{"case": "old"}]


def test_finished_rows_outlive_what_shows_them(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError

    rows: list[Row] = [{"case": "a", "arm": "x"}, {"case": "b", "arm": "x"}]
    with pytest.raises(RuntimeError):
        bench.Run("operator", tmp_path / "o", None).collect(lambda **_: iter(rows), fail)
    assert json_rows(tmp_path / "o.partial") == rows[:1]


def test_rows_outlive_an_output_that_was_taken_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "o"

    def made(**_: Any) -> Iterator[Row]:
        yield {"case": "a", "arm": "x"}
        output.mkdir()

    with pytest.raises(OSError, match="directory"):
        bench.Run("operator", output, None).collect(made)
    assert json_rows(tmp_path / "o.partial") == [{"case": "a", "arm": "x"}]


def test_rows_that_cannot_be_written_are_none(tmp_path: Path) -> None:
    rows: list[Row] = [{"case": "a", "arm": "x"}, {"case": "a", "arm": "y", "nrms": float("nan")}]
    with pytest.raises(ValueError, match="rows: got one of a, y that JSON lacks"):
        bench.Run("operator", tmp_path / "o", None).collect(lambda **_: iter(rows))
    assert json_rows(tmp_path / "o.partial") == rows[:1] and not (tmp_path / "o").exists()
    with pytest.raises(ValueError, match="rows: got none"):
        bench.Run("operator", tmp_path / "o", None).collect(lambda **_: iter(()))
    (tmp_path / "p.partial").mkdir()
    with pytest.raises(ValueError, match=r"output: got .*p\.partial, supported: a file"):
        bench.Run("operator", tmp_path / "p", None)


def test_nothing_finished_leaves_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "rows.jsonl"
    old.write_text("old\n")

    def made(**_: Any) -> Iterator[Row]:
        raise KeyboardInterrupt
        yield {}

    with pytest.raises(KeyboardInterrupt):
        bench.Run("operator", old, None).collect(made)
    assert old.read_text() == "old\n" and list(tmp_path.iterdir()) == [old]
