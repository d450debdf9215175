"""The report: every number in it is a row's, runs stay apart, and the page needs nothing but itself."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pageweaver.__main__ import app
from pageweaver.common.supports import preset
from pageweaver.eval import ablations, calls, figures, operator, paper, report, roofline, survey
from pageweaver.eval.arms import VARIANTS, arm_names
from pageweaver.eval.readme import arithmetic_table, measured_table
from pageweaver.eval.report import make_page
from pageweaver.eval.roofline import floor_of
from pageweaver.eval.runs import cases_of, read_run
from pageweaver.eval.scaling import Shape, measure
from pageweaver.eval.timing import Protocol

ROOT = Path(__file__).resolve().parents[1]
UNION = ROOT / "results" / "h200" / "union.jsonl"
COMMITTED = sorted(UNION.parent.glob("*.jsonl"))
PNG = b"\x89PNG\r\n\x1a\n"
Row = dict[str, Any]


class Outline(HTMLParser):
    """What a reader sees: text, tables, and where pictures come from."""

    void = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        held = dict(attributes)
        if tag == "img":
            self.sources.append(str(held["src"]))
            assert held["alt"]
        if tag == "a":
            self.links.append(str(held["href"]))
        if tag == "tr":
            self.cells.append([])
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def header(bench: str) -> Row:
    return {
        "schema": f"pageweaver-{bench}-1",
        "command": "pageweaver bench <x>",
        "device": "NVIDIA H200",
        "driver": "1.2",
        "cuda": "13.0",
        "torch": "2.11",
        "commit": "0123456789abcdef",
        "dirty": True,
    }


def timed(arm: str, case: str, ms: float, boundary: str = "complete", **more: Any) -> Row:
    return {
        **header("operator"),
        "case": case,
        "sha256": "0",
        "total_q": 15272,
        "context": 64424,
        "group_size": 16,
        "num_kv_heads": 1,
        "page_size": 128,
        "kv_dtype": "float8_e4m3fn",
        "arm": arm,
        "arithmetic": "fp8",
        "boundary": boundary,
        "median_ms": ms,
        "samples_ms": [ms, ms],
        "nrms": 0.036,
        "edges": 244352,
        "visits": 102540,
        "rounds": 127705,
        "reuse": 2.38,
        "partials": 0,
        "page_bytes": 1,
        "partial_bytes": 0,
        "protocol": {"rounds": 7, "calls": 20, "inputs": 1, "input_bytes": 1, "l2_bytes": 1},
        "interrupted": False,
        "sm_mhz": [1700, 1755, 1980],
        **more,
    }


@pytest.fixture
def online(tmp_path: Path) -> Path:
    """An operator run with orders of queries."""
    rows: list[Row] = []
    for case, scale in (("synthetic.low", 1.0), ("austen-x.L1.h0", 0.8)):
        for boundary, union8, regroup in (
            ("complete", 0.7, 0.65),
            ("attention", 0.6, 0.5),
            ("prepare", 0.01, 0.03),
        ):
            terms = {"net_us": 50.0 * scale, "increment_us": 12.0 * scale, "grouping_us": 9.0}
            more = terms if boundary == "complete" else {}
            rows.append(timed("union8", case, union8 * scale, boundary))
            rows.append(timed("union4", case, union8 * scale * 1.05, boundary))
            rows.append(timed("regroup_w128", case, regroup * scale, boundary, **more))
    rows.append(
        {**timed("sglang", "synthetic.low", 0.0, "not run"), "median_ms": None, "reason": "no <module>"}
    )
    return write(tmp_path / "online.jsonl", rows)


# --- rows ---


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


# --- the page ---


def test_committed_rows_make_a_page_that_stands_alone() -> None:
    page = make_page([read_run(UNION)])
    seen = Outline(page.html)
    assert all(source.startswith("data:image/png;base64,") for source in seen.sources)
    assert all(link.startswith("#") for link in seen.links)
    assert not re.search(r"(src|href)=\"(?!data:|#)|url\(|@import|<script", page.html)
    assert set(page.plots) == {f"union-{name}.png" for name in ("calls", "work", "savings", "roofline")}
    assert len(seen.sources) == len(page.plots)
    assert all(data.startswith(PNG) for data in page.plots.values())
    # Every complete call of the rows, to the digits shown.
    shown = {(row[0], cell) for row in seen.cells for cell in row[2:]}
    for row in lines(UNION):
        if row["boundary"] == "complete":
            assert (row["case"], f"{row['median_ms']:.4f}") in shown
    # Equal rows, equal bytes: the page is a function of them.
    assert make_page([read_run(UNION)]).html == page.html


def test_the_papers_figures_stand_beside_ours(online: Path) -> None:
    seen = Outline(make_page([read_run(online)]).html)
    found = {row[0]: row[1:] for row in seen.cells}
    ours, theirs, _ = found["union4 over union8, complete call"]
    assert ours == "1.050 (1.050 to 1.050, 2 selections)" and theirs == f"{paper.UNION4_OVER_UNION8:.3f}x"
    ours, theirs, how = found["regroup_w128: increment, us"]
    assert ours == "9.6 to 12.0, median 10.8" and theirs.startswith("37.55 (")
    assert how.endswith("ours over 2 selections")
    saved = found["regroup_w128: share of union8's call saved"]
    assert saved[0] == "+7.14% to +7.14%, median +7.14%" and saved[1] == "3.26% to 7.66%"
    assert saved[2] == "ours over 2 selections; theirs over five 64K captures"
    assert found["NRMS of union8"][1] == "2.66% to 4.51%"


def test_orders_floors_and_arms_that_were_not_run(online: Path) -> None:
    page = make_page([read_run(online)])
    assert set(page.plots) == {f"online-{name}.png" for name in ("calls", "work", "savings", "roofline")}
    seen = Outline(page.html)
    assert ["austen-x.L1.h0", "regroup_w128", "102,540", "127,705", "+40.0", "+9.6", "+9.0"] in seen.cells
    # Text of rows is text, also where it looks like HTML.
    assert "sglang was not run: no &lt;module&gt;" in page.html and "bench &lt;x&gt;" in page.html
    assert any("0123456789 (dirty)" in row and "1700 to 1980" in row for row in seen.cells)
    assert ["austen-x.L1.h0", "2.38", "union8", "regroup_w128", "7.1%"] in seen.cells
    floor = floor_of(timed("union8", "x", 0.6, "attention"))
    assert floor is not None
    assert any(
        row[:2] == ["synthetic.low", "union8"] and f"{0.6 / floor.milliseconds:.2f}" in row
        for row in seen.cells
    )


def test_floors_are_the_ceilings_by_hand() -> None:
    """A subgroup round is 512 tensor cycles of 132 SMs' share, a page 32 KiB through L2."""
    floor = floor_of(timed("union8", "x", 0.6))
    assert floor is not None
    assert floor.matrix == pytest.approx(127705 * 64 * 128 * 128 * 4 / 1.79e15 * 1e3)
    assert floor.exponentials == pytest.approx(244352 * 16 * 128 / (132 * 16 * 1.755e9) * 1e3)
    assert floor.pages == pytest.approx(127705 * 32768 / 9.0e12 * 1e3)
    assert floor.memory == pytest.approx((15272 * 16 * 128 * 2 * 2 + 504 * 32768) / 4.1e12 * 1e3)
    assert floor.milliseconds == floor.pages and floor.bound == "page traffic"
    split, bf16 = (floor_of(timed("union8", "x", 1, arithmetic=name)) for name in ("split", "bf16"))
    assert split is not None and bf16 is not None
    assert split.matrix == bf16.matrix == 2 * floor.matrix and split.bound == "tensor cores"
    cluster = floor_of(timed("union8/cluster", "x", 1))
    assert cluster is not None and cluster.pages == pytest.approx(102540 * 32768 / 9.0e12 * 1e3)
    wide = floor_of(timed("union8", "x", 1, kv_dtype="bfloat16", arithmetic="bf16"))
    assert wide is not None and wide.pages == 2 * floor.pages
    alone = floor_of(timed("per_query", "x", 1, arithmetic="bf16", rounds=244352))
    assert alone is not None
    assert alone.matrix == pytest.approx(244352 * 16 * 128 * 128 * 4 / roofline.MMA_SYNC_BF16_FLOPS * 1e3)
    assert floor_of(timed("dense", "x", 1)) is None and floor_of(timed("union8", "x", 1, rounds=None)) is None


def test_pages_of_counts_alone_and_of_every_command(tmp_path: Path) -> None:
    selection = preset("mid", total_q=64, prefix=4096)
    fp8, cpu = torch.float8_e4m3fn, torch.device("cpu")

    def silent(_: float, __: str) -> None:
        """No progress."""

    counted = operator.counted_rows(selection, ["union8", "random_ids"], 16, fp8, header("operator"))
    sizes = [Shape("context", (64,), (1000,)), Shape("workload", (32,), (1000,), weight=7)]
    options: Row = {"protocol": Protocol(), "header": header("scaling"), "device": cpu, "report": silent}
    grown = measure(sizes, ["union8", "per_query"], workload="calls.jsonl: all", **options)
    ablated = [
        *ablations.group_rows(selection, header("ablations")),
        *operator.counted_rows(selection, ["union4", "union8", "fixed_w128"], 16, fp8, header("ablations")),
    ]
    observed = survey.json_rows(survey.observe(selection, "a book", 8))
    numerics = {
        **header("numerics"),
        "case": "x",
        "inputs": "normal",
        "boundary": "numerics",
        "arm": "union8",
        "arithmetic": "fp8",
        "nrms": 0.0355,
        "worst_row_nrms": 0.0444,
        "lse_error": 0.01,
        "peer_nrms": 0.0354,
        "peer_worst_row_nrms": 0.05,
        "bits_of_union8": True,
        "sampled_rows": [1, 2],
        "peer": "per_query/bf16",
        "backend": "cuda",
        "total_q": 64,
    }
    layer = {
        **header("prefill"),
        "case": "64 tokens",
        "arm": "union8",
        "boundary": "layer",
        "median_ms": 3.25,
    }
    files = {
        "counted": list(counted),
        "scaling": list(grown),
        "ablations": ablated,
        "survey": observed,
        # Rows of which nothing was read have no error.
        "numerics": [numerics, {**numerics, "arm": "union4", "nrms": None, "peer_nrms": None}],
        "prefill": [layer],
    }
    runs = [read_run(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in files.items()]
    assert [run.bench for run in runs] == [
        "operator",
        "scaling",
        "ablations",
        "survey",
        "numerics",
        "prefill",
    ]
    page = make_page(runs)
    seen = Outline(page.html)
    cells = {cell for row in seen.cells for cell in row}
    assert {"3.550%", "4.440%", "3.25", "q32.c1032"} <= cells
    assert ["union4", "fp8", "-", "4.440%", "0.01000", "-"] in [row[:6] for row in seen.cells]
    assert f"{files['ablations'][-1]['visits']:,}" in cells
    assert next(row[:2] for row in seen.cells if row and row[0] == "a book") == ["a book", "1"]
    assert set(page.plots) == {"survey-reuse.png"}
    assert "Counted alone" in page.html


def test_scaling_rows_make_curves_and_totals(tmp_path: Path) -> None:
    rows = []
    for kind, case, queries, context, weight in (
        ("context", "context.q16K.c64K", 16384, 65536, 0),
        ("context", "context.q16K.c1M", 16384, 1048576, 0),
        ("queries", "queries.q128.c64K", 128, 65536, 0),
        ("workload", "workload.q338.c74578", 338, 74578, 1418),
    ):
        for arm, ms in (("per_query", 2.0), ("union8", 0.5)):
            more = {"kind": kind, "weight": weight, "workload": "calls: all", **header("scaling")}
            rows.append({**timed(arm, case, ms), "total_q": queries, "context": context, **more})
    page = make_page([read_run(write(tmp_path / "grown.jsonl", rows))])
    assert set(page.plots) == {"grown-scaling.png"}
    seen = Outline(page.html)
    assert ["union8", "0.71", "4.00", "1.00", "workload.q338.c74578"] in seen.cells
    assert ["q338.c74578", "1,418", "2.000", "0.500"] in seen.cells and "calls: all" in page.html


def test_interleaved_contexts_stand_beside_the_papers(tmp_path: Path) -> None:
    rows = [
        {
            **timed(arm, f"context.q16K.c{size}K", ms, overlap=overlap, kind="context", weight=0),
            **header("scaling"),
            "context": size * 1024,
        }
        for overlap in ("interleaved", "mid")
        for size in (32, 64, 128)
        for arm, ms in (("union8", 1.1), ("page_union", 0.7 + size / 1000))
    ]
    page = make_page(
        [
            read_run(write(tmp_path / f"{o}.jsonl", [r for r in rows if r["overlap"] == o]))
            for o in ("interleaved", "mid")
        ]
    )
    seen = Outline(page.html)
    assert ["32K", "0.732", "union8 1.100", "1.340", "1.588"] in seen.cells
    assert ["64K", "0.764", "union8 1.100", "2.852", "3.172"] in seen.cells
    assert page.html.count("beside the paper") == 1 and "page selections: interleaved" in page.html


# --- the README's table ---


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


def test_a_part_of_another_file_is_left_out(online: Path, tmp_path: Path) -> None:
    part = write(tmp_path / "part.jsonl", lines(online)[:3])
    other = write(tmp_path / "other.jsonl", [timed("union8", "synthetic.low", 0.71)])
    page = make_page([read_run(path) for path in (part, online, other)])
    assert "left out: part (SHA-256 " in page.html and {name.partition("-")[0] for name in page.plots} == {
        "online",
        "other",
    }


def test_runs_of_one_name_are_refused(online: Path, tmp_path: Path) -> None:
    """Equal or not: the plots of one would replace those of the other."""
    (tmp_path / "later").mkdir()
    again = write(tmp_path / "later" / online.name, [timed("union8", "synthetic.low", 0.9)])
    first, second = read_run(online), read_run(again)
    for runs in ([first, first], [first, second]):
        with pytest.raises(ValueError, match="rows: got two runs named 'online', supported: runs of diff"):
            make_page(runs)
    # The README's table takes an arithmetic from the first, whatever it is called.
    assert arithmetic_table([first, first]) == arithmetic_table([first, second]) == arithmetic_table([first])


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


def test_winners_by_rounds_own_their_queries(tmp_path: Path) -> None:
    """page_union's rounds are another kernel's: it may be the fastest and is never the predicted one."""
    arms = {"union8": (0.9, 900, 0), "auto": (0.8, 800, 0), "page_union": (0.5, 100, 7)}
    rows = [
        timed(arm, "x", ms, rounds=rounds, partials=partials) for arm, (ms, rounds, partials) in arms.items()
    ]
    seen = Outline(make_page([read_run(write(tmp_path / "all.jsonl", rows))]).html)
    assert ["x", "2.38", "auto", "page_union", "37.5%"] in seen.cells


def test_winners_of_a_selection_without_the_original_order(tmp_path: Path) -> None:
    """union8 refused one selection: its reuse is unknown there."""
    rows = [timed("union8", "x", 0.9), timed("union4", "y", 0.7), timed("auto", "y", 0.6, rounds=90)]
    seen = Outline(make_page([read_run(write(tmp_path / "some.jsonl", rows))]).html)
    assert ["y", "-", "auto", "auto", "0.0%"] in seen.cells


def test_ablations_alone_have_no_plot_of_calls(tmp_path: Path) -> None:
    rows = [timed("union8/cluster", "x", 1.0), timed("union8", "x", 0.9, "attention")]
    page = make_page([read_run(write(tmp_path / "cut.jsonl", rows))])
    assert not any(name.endswith("-calls.png") for name in page.plots)


def test_arms_of_ablations_stay_out_of_the_plot_of_calls(
    online: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    inner = figures.complete_calls

    def noted(rows: Sequence[Row], cases: Sequence[str]) -> Any:
        shown.extend(dict.fromkeys(row["arm"] for row in rows))
        return inner(rows, cases)

    monkeypatch.setattr(report.figures, "complete_calls", noted)
    arms = ["union8", "union8/cluster", "fixed_w128", "regroup_w128/visits", "union8/split", "flex"]
    page = make_page([read_run(write(tmp_path / "all.jsonl", [timed(arm, "x", 1.0) for arm in arms]))])
    assert shown == ["union8", "union8/split", "flex"]
    assert {row[0] for row in Outline(page.html).cells if len(row) == 4} >= set(arms)  # errors of all


def test_no_two_arms_look_the_same() -> None:
    variants = (
        "cluster",
        "visits",
        "rounds",
        "fp8",
        "split",
        "bf16",
        "float32",
        "visits/split",
        "single/split",
    )
    arms = dict.fromkeys(
        [*figures.LOOKS, *(f"{name}/{variant}" for name in arm_names() for variant in ("single", *variants))]
    )
    looks = {arm: tuple(figures.style_of(arm).values()) for arm in arms}
    assert len(set(looks.values())) == len(arms)
    # Each name and variant that an arm may have stands in the tables.
    assert set(figures.LOOKS) - {"page_union/single"} == set(arm_names())
    assert set(figures.INSIDE) | set(figures.PART) == set(VARIANTS)
    for name in arm_names():
        assert figures.style_of(f"{name}/split")["color"] == figures.style_of(name)["color"]


def test_an_arm_looks_the_same_in_every_plot() -> None:
    """Whatever stands beside it: by its name, in two plots of other arms in another order."""
    drawn: list[dict[str, Any]] = []

    def noted(rows: Sequence[Row]) -> None:
        figure = figures.complete_calls(rows, ["x"])
        drawn.append(
            {
                line.get_label(): (line.get_color(), line.get_marker(), line.get_markerfacecolor())
                for line in figure.axes[0].get_lines()
            }
        )

    noted([timed(arm, "x", 1.0) for arm in ("auto/split", "union8/split", "flex", "auto")])
    noted(
        [timed(arm, "x", 1.0) for arm in ("union8", "auto", "union8/cluster", "auto/split", "union8/split")]
    )
    shared = set(drawn[0]) & set(drawn[1])
    assert shared == {"auto", "auto/split", "union8/split"}
    assert all(drawn[0][arm] == drawn[1][arm] for arm in shared)


def test_wide_tables_keep_their_first_columns(online: Path, tmp_path: Path) -> None:
    page = make_page([read_run(online)]).html
    assert (
        '<table class="two"><thead><tr><th class="t k0">selection</th><th class="k1">reuse</th><th>' in page
    )
    assert page.count("longer than the complete call that it is part of") == 1
    assert "columns: scroll to the right" not in page and "7 x 20, 1 input<" in page
    arms = [
        f"{name}/{arithmetic}" for name in ("union4", "union8", "auto") for arithmetic in ("fp8", "split")
    ]
    rows = [timed(f"{arm}{more}", "x", 1.0) for arm in arms for more in ("", "/cluster")]
    wide = make_page([read_run(write(tmp_path / "wide.jsonl", rows))]).html
    assert "14 columns: scroll to the right for more." in wide


def test_long_tables_are_folded(tmp_path: Path) -> None:
    rows = [timed("union8", f"c{i}", 1.0, net_us=1.0) for i in range(41)]
    html = make_page([read_run(write(tmp_path / "all.jsonl", rows))]).html
    assert html.count("<details><summary>41 lines</summary>") == 2 and html.count("</details>") == 2


def test_runs_never_meet_in_a_plot(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    inner = figures.complete_calls

    def noted(rows: Sequence[Row], cases: Sequence[str]) -> Any:
        seen.append({row["command"] for row in rows})
        return inner(rows, cases)

    monkeypatch.setattr(report.figures, "complete_calls", noted)
    make_page([read_run(UNION), read_run(online)])
    assert len(seen) == 2 and all(len(commands) == 1 for commands in seen)
