"""Comparisons: what is counted, what the error is taken on, and files that are whole or not there."""

from __future__ import annotations

import contextlib
import io
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

import pageweaver as pw
from pageweaver.__main__ import app
from pageweaver.common.captures import save_selections
from pageweaver.common.reference import nrms
from pageweaver.common.supports import preset, streams, uniform
from pageweaver.eval import compare, output
from pageweaver.eval.compare import Comparison, Result, compare_selection, counting_problem

MANY = pw.available()


def several_requests() -> pw.Selection:
    return streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)


def renamed(selection: pw.Selection, name: str) -> pw.Selection:
    return pw.Selection(
        name, selection.q2k_indices, selection.cu_seqlens_q, selection.seqused_k, selection.page_size
    )


def printed(comparison: Comparison, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    compare.print_comparison(console, comparison)
    return console.export_text()


def fake_results(**changes: dict[str, Any]) -> list[Result]:
    """Results with given counts: name -> changed fields of the work report."""
    base = {
        "edges": 1000,
        "groups": 10,
        "visits": 500,
        "reuse": 2.0,
        "rounds": 800,
        "mean_union": 50.0,
        "max_union": 60,
        "partials": 0,
        "saved_partials": 0,
        "workspace_bytes": 0,
        "page_bytes": 2**20,
        "partial_bytes": 0,
    }
    return [
        Result(pw.WorkReport(strategy=name, **{**base, **fields}), 0.03, "reference", None, None)  # type: ignore[arg-type]
        for name, fields in changes.items()
    ]


# --- counts ---


@pytest.mark.parametrize("group_size", [1, 4, 16])
def test_counting_problem_counts_as_a_real_one(group_size: int) -> None:
    selection = several_requests()
    counting = counting_problem(selection, group_size)
    problem = pw.make_problem(selection, group_size=group_size)
    for name in MANY:
        if name in compare.OFFLINE_WINDOWS:
            window = compare.OFFLINE_WINDOWS[name]
            strategy = pw.load(name, ids=pw.search(selection, window=window, group_size=group_size))
        else:
            strategy = pw.load(name)
        assert strategy.work(counting) == strategy.work(problem)


def test_counting_problem_holds_no_numbers() -> None:
    problem = counting_problem(preset("low"))
    assert problem.q.untyped_storage().nbytes() + problem.k_cache.untyped_storage().nbytes() < 2048


def test_offline_windows_are_those_of_the_strategies() -> None:
    assert set(compare.OFFLINE_WINDOWS) == {name for name in MANY if name.startswith("offline")}


# --- errors ---


def test_error_is_taken_on_the_sampled_rows() -> None:
    selection = preset("mid", total_q=80, prefix=3000)
    found = compare_selection(selection, ["union8", "page_union", "offline_w512"], rows=50, seed=3)
    assert found.tail_rows == 50 and len(found.sampled_rows) == compare.SAMPLED_ROWS
    assert all(30 <= row < 80 for row in found.sampled_rows)
    tail = selection.tail(50)
    problem = pw.make_problem(tail, seed=3)
    rows = torch.tensor(found.sampled_rows) - 30
    exact, _ = pw.exact_attention(problem, torch.float64, rows)
    for result in found.results:
        name = result.work.strategy
        options = {"ids": pw.search(tail, window=512)} if name == "offline_w512" else {}
        assert result.nrms == nrms(pw.load(name, arithmetic="fp8", **options)(problem)[rows], exact)
        assert result.time_ms is None and result.nrms_backend == "reference"
    again = compare_selection(selection, ["union8"], rows=50, seed=3)
    assert again.sampled_rows == found.sampled_rows and again.results[0].nrms == found.results[0].nrms
    assert compare_selection(selection, ["union8"], rows=50, seed=4).sampled_rows != found.sampled_rows


def test_more_rows_than_queries_takes_all() -> None:
    found = compare_selection(several_requests(), ["union4"], rows=1000)
    assert found.tail_rows == 25 and found.sampled_rows == tuple(range(40, 65))


def test_errors_are_of_the_last_request_with_queries() -> None:
    found = compare_selection(streams(query_lens=[30, 0], prefix_lens=[700, 64], topk=4), MANY, rows=20)
    assert found.tail_rows == 20 and set(found.sampled_rows) <= set(range(10, 30))
    assert all(r.nrms is not None and r.nrms < 0.1 for r in found.results)


def test_nothing_to_take_an_error_on() -> None:
    no_queries = streams(query_lens=[0, 0], prefix_lens=[700, 64], topk=4)
    empty_rows = pw.Selection("empty", np.full((1, 6, 4), -1), np.array([0, 6]), np.array([900]))
    no_requests = pw.Selection("none", np.full((1, 3, 4), -1), np.array([0]), np.array([], dtype=np.int32))
    for selection in (no_queries, empty_rows, no_requests):
        found = compare_selection(selection, MANY)
        assert [r.nrms for r in found.results] == [None] * len(MANY)
        assert all(json.loads(line)["nrms"] is None for line in output.json_lines(found.rows()).splitlines())
        assert printed(found).count(" -\n") == len(MANY)
        assert output.png(compare.comparison_figure([found])).startswith(b"\x89PNG")
        assert compare.notes([found])


def test_refuses() -> None:
    selection = preset("mid", total_q=8, prefix=3000)
    with pytest.raises(ValueError, match="strategies: got 'union5', supported: per_query"):
        compare_selection(selection, ["union4", "union5"])
    with pytest.raises(ValueError, match="strategies: got none"):
        compare_selection(selection, [])
    with pytest.raises(ValueError, match="rows: got 0"):
        compare_selection(selection, ["union4"], rows=0)
    odd = pw.Selection("odd", np.zeros((1, 2, 4)).astype(int), np.array([0, 2]), np.array([9]), page_size=100)
    with pytest.raises(ValueError, match="page_size"):
        compare_selection(odd, ["union4"])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.41])
def test_an_error_that_rounding_does_not_make_is_a_red_check(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strategy is named with its selection, and the rows of the others are kept."""
    inner = compare._Yardstick.error
    monkeypatch.setattr(
        compare._Yardstick,
        "error",
        lambda self, name, backend: value if name == "union4" else inner(self, name, backend),
    )
    selections = [renamed(preset("mid", total_q=40, prefix=1024), name) for name in ("a", "b")]
    save_selections(tmp_path / "two.safetensors", selections)
    out = tmp_path / "out"
    words = ["compare", str(tmp_path / "two.safetensors"), "--strategies", "union4,union8"]
    result = CliRunner().invoke(app, [*words, "--rows", "8", "--output", str(out)], env={"COLUMNS": "80"})
    assert result.exit_code == 1, result.output
    failed = [f"{name}, union4: got NRMS {value}, supported: at most 0.1" for name in ("a", "b")]
    assert f"Error: {'; '.join(failed)}\n" in result.output
    assert [path.name for path in out.iterdir()] == ["compare.jsonl.partial"]
    rows = [json.loads(line) for line in (out / "compare.jsonl.partial").read_text().splitlines()]
    assert [(row["selection"], row["strategy"]) for row in rows] == [("a", "union8"), ("b", "union8")]


@pytest.mark.parametrize(
    ("stop", "told"), [(KeyboardInterrupt(), "interrupted"), (RuntimeError("fault"), "stopped by fault")]
)
def test_a_red_check_is_named_where_the_run_is_stopped(
    stop: BaseException, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(yardstick: Any, name: str, backend: str) -> float:
        if yardstick.problem.total_q == 20:
            raise stop
        return np.nan

    monkeypatch.setattr(compare._Yardstick, "error", error)
    save_selections(tmp_path / "a.safetensors", [renamed(preset("mid", total_q=40, prefix=1024), "a")])
    save_selections(tmp_path / "b.safetensors", [renamed(preset("mid", total_q=20, prefix=1024), "b")])
    words = ["compare", *(str(tmp_path / f"{name}.safetensors") for name in "ab"), "--strategies", "union8"]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "out")], env={"COLUMNS": "80"})
    assert result.exit_code == 1, result.output
    assert f"Error: a, union8: got NRMS nan, supported: at most 0.1; then {told}\n" in result.output


def test_names_tell_selections_apart(tmp_path: Path) -> None:
    first, other = preset("mid", total_q=20, prefix=9000), preset("low", total_q=20, prefix=9000)
    assert output.distinct([first, other, first]) == [first, other]
    with pytest.raises(ValueError, match="selections: got two that differ as 'a', supported: own names"):
        output.distinct([renamed(first, "a"), renamed(other, "a")])
    for name, selection in (("one", first), ("two", other)):
        save_selections(tmp_path / f"{name}.safetensors", [renamed(selection, "a")])
    files = [str(tmp_path / f"{name}.safetensors") for name in ("one", "two")]
    for words in (["compare", *files], ["bench", "operator", *files, "--output", str(tmp_path / "o.jsonl")]):
        result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
        assert result.exit_code == 2 and "got two that differ as 'a'" in result.output


def test_what_cannot_be_kept_hides_no_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="fault"), output.keeping([{"a": 1}], tmp_path / "none" / "rows"):
        raise RuntimeError("fault")


def test_letters_that_the_font_lacks(recwarn: pytest.WarningsRecorder) -> None:
    figure = Figure()
    figure.suptitle("\u9801")
    assert output.png(figure).startswith(b"\x89PNG") and not recwarn.list


def test_progress_goes_up_to_the_last_step() -> None:
    seen: list[tuple[float, str]] = []
    compare_selection(
        preset("mid", total_q=8, prefix=3000),
        ["union4", "union8"],
        progress=lambda f, text: seen.append((f, text)),
    )
    fractions = [f for f, _ in seen]
    assert fractions == sorted(fractions) and fractions[0] == 0 and fractions[-1] < 1
    assert len(seen) == 5 and seen[-1][1] == "synthetic.mid: union8, error"
    parts: list[float] = []
    output.part_of(lambda fraction, _: parts.append(fraction), 1, 4)(0.5, "")
    assert parts == [0.375]


# --- time ---


def test_time_call_is_the_median_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol on a clock of its own; tests/gpu times real kernels."""
    calls = 0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1

        def record(self) -> None:
            self.at = calls

        def elapsed_time(self, end: Event) -> float:
            assert end.at == self.at + 1
            return float(end.at - compare.WARMUP_CALLS) ** 2

    class Strategy:
        def workspace(self, _: pw.AttentionProblem) -> str:
            return "workspace"

        def __call__(self, problem: pw.AttentionProblem, out: torch.Tensor, workspace: str) -> torch.Tensor:
            nonlocal calls
            calls += 1
            assert out.shape == problem.q.shape and workspace == "workspace"
            return out

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    problem = pw.make_problem(preset("mid", total_q=8, prefix=3000))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    median = compare.time_call(Strategy(), problem)  # type: ignore[arg-type]
    assert calls == compare.WARMUP_CALLS + compare.TIMED_CALLS
    assert median == ((compare.TIMED_CALLS + 1) / 2) ** 2


def test_table_names_what_is_not_built() -> None:
    results = fake_results(union4={}, union8={})
    timed = Result(results[1].work, 0.03, "cuda", 1.23456, None)
    found = Comparison(several_requests(), torch.device("cuda"), 16, 0, 4, (1, 2, 3, 4), [results[0], timed])
    text = printed(found)
    assert any(line.split()[-2:] == ["NRMS", "ms"] for line in text.splitlines() if line)
    assert "not built" in text and "1.235" in text
    assert "median of" in compare.notes([found])


# --- what is printed and drawn ---


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits(width: int) -> None:
    big = {"visits": 2_500_000, "rounds": 2_500_000, "partials": 2_500_000, "page_bytes": 99_999 * 2**20}
    results = fake_results(offline_w2048=big, page_union=big)
    found = Comparison(several_requests(), torch.device("cuda"), 16, 0, 4, (1, 2, 3, 4), results)
    lines = printed(found, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.count("2,500,000") == 3 and "99,999" in line and "not" in line for line in lines)


def test_sentence() -> None:
    pages = {"partials": 400, "visits": 20, "partial_bytes": 3 * 2**20}
    text = compare.sentence(
        fake_results(union8={}, regroup_w64={"visits": 400}, regroup_w128={"rounds": 600}, page_union=pages)
    )
    assert text == (
        "How to read: of the strategies without partials regroup_w64 has the fewest page visits (-20.0%"
        " against union8) and regroup_w128 the fewest rounds (-25.0%); page_union visits a page once per 50"
        " queries and moves 3 MiB of partial outputs for it."
    )
    assert "union8 has the fewest page visits and rounds." in compare.sentence(
        fake_results(union8={}, union4={})
    )
    assert compare.sentence(fake_results(union8={})) == ""


def test_figure_says_what_it_leaves_out() -> None:
    results = fake_results(union4={}, union8={"visits": 300})
    found = [
        Comparison(renamed(uniform(4, 600, topk=2), f"s{i}"), torch.device("cpu"), 16, 0, 4, (1,), results)
        for i in range(compare.PLOTTED_SELECTIONS + 3)
    ]
    figure = compare.comparison_figure(found[:2])
    assert [a.get_title() for a in figure.axes] == ["s0", "s1"]
    bars = [round(p.get_width()) for p in figure.axes[0].patches]
    assert bars == [500, 300, 800, 800]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["union4", "union8"]
    title = compare.comparison_figure(found).get_suptitle()
    assert title.endswith("(first 12 of 15 selections)")


def test_compact() -> None:
    assert [output.compact(v) for v in (0, 812, 64_355, 1_210_000, 3e9)] == [
        "0",
        "812",
        "64.4k",
        "1.21M",
        "3G",
    ]


# --- files ---


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a" / "b"
    output.write_files(folder, {"one": b"1", "two": b"2"})
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"one": b"1", "two": b"2"}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.write_files(folder, {"one": b"new"})
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"one": b"1", "two": b"2"}


def test_check_folder(tmp_path: Path) -> None:
    output.check_folder(tmp_path / "new", "rows")
    output.check_file(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"output: got .*deeper, supported: a folder in an existing folder"):
        output.check_folder(tmp_path / "new" / "deeper")
    with pytest.raises(ValueError, match=r"output: got .*deeper, supported: a file in an existing folder"):
        output.check_file(tmp_path / "new" / "deeper")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"output: got .*file is a file"):
            output.check_folder(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_default_folder_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output.check_folder(Path("results/compare"), "compare.jsonl")
    output.check_file(Path("results/rows.jsonl"), made=output.RESULTS)
    # What does not make it: `search` and `capture`.
    with pytest.raises(ValueError, match=r"output: got results/ids, supported: a file in an existing folder"):
        output.check_file(Path("results/ids"))
    with pytest.raises(ValueError, match=r"output: got results/a/b, supported: a folder in an existing"):
        output.check_folder(Path("results/a/b"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/proc/pageweaver", "rows"),
        ("/proc", "rows"),
        ("/sys", "rows"),
        ("/dev", "null"),
        (".", ""),
        (".", "n" * 300),
        ("f" * 300, "rows"),
        (".", "n" * 250),  # what is written first has a longer name
    ],
)
def test_check_folder_tries(folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom the file system refuses even where permissions would not say so, as root's in /proc."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=f"^output: got {folder}"):
        output.check_folder(Path(folder), name)
    assert not list(tmp_path.iterdir())


def test_json_has_no_nan() -> None:
    assert output.json_lines([{"a": 1}, {"b": None}]) == b'{"a": 1}\n{"b": null}\n'
    with pytest.raises(ValueError, match="JSON"):
        output.json_lines([{"nrms": float("nan")}])


def test_default_captures_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(output.default_captures()).is_file()
    monkeypatch.setattr(output, "repository_root", lambda: None)
    with pytest.raises(FileNotFoundError, match="name a selection"):
        output.default_captures()


def test_provenance_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    found = output.provenance(cpu)
    assert found["device"] == "cpu" and found["pageweaver"] == pw.__version__
    done = types.SimpleNamespace(returncode=0, stdout="0123abc-dirty\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    found = output.provenance(cpu)
    assert (found["commit"], found["dirty"]) == ("0123abc", True)
    done.stdout = "0123abc\n"
    assert output.provenance(cpu)["dirty"] is False
    monkeypatch.setattr(output, "repository_root", lambda: None)
    found = output.provenance(cpu)
    assert found["commit"] is None and found["dirty"] is None
