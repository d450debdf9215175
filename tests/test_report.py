"""The report: every number in it is a row's, runs stay apart, and the page needs nothing but itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pageweaver.common.supports import preset
from pageweaver.eval import ablations, operator, paper, roofline, survey
from pageweaver.eval.readme import arithmetic_table
from pageweaver.eval.report import make_page
from pageweaver.eval.roofline import floor_of
from pageweaver.eval.runs import read_run
from pageweaver.eval.scaling import Shape, measure
from pageweaver.eval.timing import Protocol

from .report_rows import UNION, Outline, Row, header, lines, online_rows, timed, write

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def online(tmp_path: Path) -> Path:
    """An operator run with orders of queries."""
    return write(tmp_path / "online.jsonl", online_rows())


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
    assert floor.exponentials == 0
    assert floor.pages == pytest.approx(127705 * 32768 / 1.0e13 * 1e3)
    assert floor.memory == pytest.approx((15272 * 16 * 128 * 2 * 2 + 504 * 32768) / 4.1e12 * 1e3)
    assert floor.milliseconds == floor.pages and floor.bound == "page traffic"
    split, bf16 = (floor_of(timed("union8", "x", 1, arithmetic=name)) for name in ("split", "bf16"))
    assert split is not None and bf16 is not None
    assert split.matrix == bf16.matrix == 2 * floor.matrix and split.bound == "tensor cores"
    turned = floor_of(timed("page_union", "x", 1))
    assert turned is not None
    exponentials = 244352 * 16 * 128 / (132 * 16 * 1.755e9) * 1e3
    assert turned.exponentials == split.exponentials == pytest.approx(exponentials)
    cluster = floor_of(timed("union8/cluster", "x", 1))
    assert cluster is not None and cluster.pages == pytest.approx(102540 * 32768 / 1.0e13 * 1e3)
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


def test_prompts_of_a_prefill_have_a_table_each(tmp_path: Path) -> None:
    row = {**header("prefill"), "arm": "union8", "boundary": "layer", "nrms": 0.002}
    prompts = {"smooth": 1.25, "<rough>": 2.5}
    rows = [{**row, "case": case, "median_ms": ms} for case, ms in prompts.items()]
    html = make_page([read_run(write(tmp_path / "layers.jsonl", rows))]).html
    _, first, second = re.split(r"<h3>(?=smooth|&lt;rough)", html)
    assert first.startswith("smooth</h3>") and second.startswith("&lt;rough&gt;</h3>")
    for own, ms in ((first, "1.25"), (second, "2.50")):
        assert own.count("<table") == 1 and re.findall(r">(\d\.\d\d)<", own) == [ms]


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
