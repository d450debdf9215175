"""Shapes of calls: the grid, workloads with weights, and the inputs that are drawn for them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import pageweaver as pw
from pageweaver.__main__ import app
from pageweaver.common.supports import PRESETS
from pageweaver.eval import operator, scaling
from pageweaver.eval.scaling import Pool, Shape, grid, read_workload, select, weigh
from pageweaver.eval.timing import Protocol

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


def silent(_: float, __: str) -> None:
    """No progress."""


def workload_rows() -> list[dict[str, Any]]:
    return [
        {"query_lens": [40], "prefix_lens": [2048], "representative_weight": 3},
        {"query_lens": [10, 30], "prefix_lens": [0, 4096], "representative_weight": 10},
        {"query_lens": None, "prefix_lens": None, "representative_weight": 5},  # lengths not told
        {"query_lens": [7], "prefix_lens": [128], "representative_weight": None},  # stands for nothing
    ]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "calls.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in workload_rows()) + "\n")
    return path


def test_the_grid_spans_what_it_says() -> None:
    shapes = grid()
    contexts = [shape.context for shape in shapes if shape.kind == "context"]
    queries = [shape.total_q for shape in shapes if shape.kind == "queries"]
    assert (min(contexts), max(contexts)) == (8 * 1024, 1024 * 1024)
    assert (min(queries), max(queries)) == (128, 32 * 1024)
    assert {shape.group_size for shape in shapes} == {16, 8, 4, 2, 1}
    assert max(len(shape.query_lens) for shape in shapes) == 64
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert all(shape.weight == 0 and min(shape.prefix_lens) >= 0 for shape in shapes)
    base = next(shape for shape in shapes if shape.name == "context.q16K.c64K")
    for shape in shapes:  # one size at a time
        if shape.kind in ("group_size", "requests", "kv_heads"):
            assert shape.total_q * shape.num_kv_heads == base.total_q
    assert {shape.kind for shape in grid(["requests", "context"])} == {"requests", "context"}
    assert {s.name for s in grid(quick=True)} <= {s.name for s in shapes}


def test_workloads_are_read_with_their_weights(workload: Path) -> None:
    shapes, note = read_workload(workload)
    assert [(s.query_lens, s.prefix_lens, s.weight) for s in shapes] == [
        ((10, 30), (0, 4096), 10.0),
        ((40,), (2048,), 3.0),
    ]
    assert [s.name for s in shapes] == ["workload.q40.c4126.r2", "workload.q40.c2088"]
    assert note.startswith("calls.jsonl: 2 of 4 call shapes, 13 of 18 calls")
    shapes, note = read_workload(workload, most=1)
    assert [s.weight for s in shapes] == [10.0] and note.endswith("all but the 1 heaviest")


def test_lines_of_one_shape_are_one(workload: Path) -> None:
    """Totals go by shape: of two lines one alone would count."""
    again = [{**workload_rows()[0], "representative_weight": 9}, *workload_rows()[2:]]
    workload.write_text(workload.read_text() + "".join(json.dumps(row) + "\n" for row in again))
    shapes, note = read_workload(workload)
    assert [(s.query_lens, s.weight) for s in shapes] == [((40,), 12.0), ((10, 30), 10.0)]
    # Those that tell no lengths may be anything.
    assert note.startswith("calls.jsonl: 2 of 6 call shapes, 22 of 32 calls")


def test_weights_beyond_any_number_are_refused(workload: Path) -> None:
    rows = [{**row, "representative_weight": 1e308} for row in workload_rows()[:2]]
    workload.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"workload: got .*calls.jsonl, supported: .* whose sum is finite"):
        read_workload(workload)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        "[" * 100_000,
        "1" * 5_000,
    ],
    ids=lambda line: line[:3],
)
def test_lines_that_are_no_calls_are_refused(line: str, workload: Path) -> None:
    workload.write_text(workload.read_text().strip() + "\n" + line + "\n")
    with pytest.raises(
        ValueError,
        match=r"workload: got .*calls.jsonl, whose line 5 is not a call .*supported: a JSON object",
    ):
        read_workload(workload)


@pytest.mark.parametrize(
    ("name", "value", "supported"),
    [
        *(
            ("query_lens", value, "a list of integers from 0 to 67108863")
            for value in ("[Infinity]", "[1.7]", "[1.0]", "[true]", '{"3": 1}', '["x"]', "[-1]", '""', "0")
        ),
        ("query_lens", "[67108864]", "a list of integers from 0 to 67108863"),
        ("query_lens", f"[{10**30}]", "a list of integers from 0 to 67108863"),
        ("prefix_lens", "[NaN]", "a list of integers from 0 to 2147483647"),
        ("prefix_lens", "[2147483648]", "a list of integers from 0 to 2147483647"),
        *(
            ("representative_weight", value, "a finite number above 0, or null")
            for value in ("Infinity", "NaN", "1e999", "-1", "0", "true", '"3"', "[]")
        ),
        ("representative_weight", "1" + "0" * 400, "a finite number above 0, or null"),
    ],
    ids=lambda text: text[:30],
)
def test_numbers_of_a_workload_are_taken_as_they_are_or_refused(
    name: str, value: str, supported: str, tmp_path: Path
) -> None:
    call = {"query_lens": "[1]", "prefix_lens": "[3]", "representative_weight": "1", name: value}
    path = tmp_path / "calls.jsonl"
    path.write_text("\n{" + ", ".join(f'"{key}": {text}' for key, text in call.items()) + "}\n")
    shown = value.replace("1e999", "Infinity")[:80]
    expected = f"workload: got {path}, whose line 2 has {name} {shown}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}.*, supported: {supported}$"):
        read_workload(path)


@pytest.mark.parametrize(
    ("queries", "prefixes", "message"),
    [
        ([1, 2], [3], "has 2 query_lens and 1 prefix_lens, supported: one of each a request"),
        ([2**25, 2**25], [0, 0], "has 67108864 queries, supported: at most 67108863 in all"),
        ([1], [2**31 - 1], "has a request of 2147483648 tokens, supported: at most 2147483647"),
    ],
)
def test_calls_that_no_problem_can_be_are_refused(
    queries: list[int], prefixes: list[int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"query_lens": queries, "prefix_lens": prefixes, "representative_weight": 1}))
    with pytest.raises(ValueError, match=f"whose line 1 {message}$"):
        read_workload(path)


def test_the_longest_context_of_a_workload_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text('{"query_lens": [3], "prefix_lens": [2147483644], "representative_weight": 0.5}')
    (shape,), _ = read_workload(path)
    assert select(shape, "mid", seed=0).seqused_k.tolist() == [2**31 - 1]


def test_a_workload_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"query_lens": [1], "prefix_lens": [3]}\n')
    with pytest.raises(ValueError, match="supported: calls with lengths and representative_weight"):
        read_workload(tmp_path / "none.jsonl")


def test_selections_and_problems_have_the_shape() -> None:
    shape = Shape("requests", (20, 0, 33), (300, 4096, 1000), group_size=4, num_kv_heads=2)
    selection = select(shape, "mid", seed=1)
    assert np.diff(selection.cu_seqlens_q).tolist() == [20, 0, 33]
    assert selection.seqused_k.tolist() == [320, 4096, 1033]
    pool = Pool(CPU, FP8, seed=1)
    problem = pool.problem(selection, shape.group_size)
    assert problem.q.shape == (53, 8, 128) and problem.num_kv_heads == 2
    problem.check_values()
    assert problem.q.float().std() == pytest.approx(1, abs=0.05)
    # Every request's pages are its own.
    used = [problem.page_table[b, : -(-int(n) // 128)] for b, n in enumerate(selection.seqused_k)]
    assert len(torch.cat(used).unique()) == problem.num_pages == 3 + 32 + 9
    exact, _ = pw.exact_attention(problem)
    assert pw.common.reference.nrms(pw.load("union8")(problem), exact) < 0.05


def test_the_pool_is_cut_and_grown() -> None:
    pool = Pool(CPU, FP8, seed=1)
    small = pool.problem(select(Shape("x", (8,), (500,)), "mid", 0), 16)
    large = pool.problem(select(Shape("x", (64,), (9000,)), "mid", 0), 16)
    again = pool.problem(select(Shape("x", (8,), (500,)), "mid", 0), 16)
    assert again.q.data_ptr() == large.q.data_ptr() != small.q.data_ptr()
    assert torch.equal(again.q, large.q[:8])


def test_counts_without_a_gpu(workload: Path) -> None:
    shapes, _ = read_workload(workload)
    rows = list(
        scaling.measure(
            shapes, ["union4", "union8"], protocol=Protocol(), header={}, device=CPU, report=silent
        )
    )
    assert [(r["case"], r["arm"], r["weight"], r["boundary"]) for r in rows] == [
        (shape.name, arm, shape.weight, "counted") for shape in shapes for arm in ("union4", "union8")
    ]
    selection = select(shapes[0], "mid", 0)
    assert rows[1]["visits"] == pw.load("union8").work(pw.make_problem(selection)).visits
    assert rows[0]["kind"] == "workload" and rows[0]["overlap"] == "mid"
    assert weigh(rows) == []


def test_an_unknown_preset_is_refused() -> None:
    made = scaling.measure(
        grid(), ["union8"], protocol=Protocol(), header={}, device=CPU, overlap="x", report=silent
    )
    with pytest.raises(ValueError, match=f"overlap: got 'x', supported: {', '.join(PRESETS)}"):
        next(made)


def test_totals_weigh_each_shape_and_name_the_worst() -> None:
    def row(case: str, arm: str, ms: float, weight: float) -> dict[str, Any]:
        timed = {"boundary": "complete", "median_ms": ms, "weight": weight, "kind": "workload"}
        return {"case": case, "sha256": case * 6, "arm": arm, "reason": "", **timed}

    rows = [
        row("a", "per_query", 4.0, 100),
        row("a", "union8", 2.0, 100),
        row("b", "per_query", 1.0, 300),
        row("b", "union8", 1.5, 300),
        row("a", "page_union", 9.0, 100),  # refuses b: no total
        {**row("c", "union8", 9.0, 0), "kind": "context"},
    ]
    union8, per_query = weigh(rows)
    assert (union8.arm, union8.seconds, union8.worst_ratio, union8.worst_case) == ("union8", 0.65, 1.5, "b")
    assert (per_query.seconds, per_query.worst_ratio, per_query.worst_case) == (0.7, 2.0, "a")
    missing = {**row("b", "page_union", 0, 300), "boundary": operator.NOT_RUN, "reason": "too many pages"}
    console = Console(width=80, record=True, file=io.StringIO())
    scaling.print_scaling(console, [*rows, missing])
    text = console.export_text()
    assert "page_union not run: too many pages" in text
    assert " 0.65 " in text and " 1.08 " in text and " 1.50 " in text


def test_command(workload: Path, tmp_path: Path) -> None:
    words = [
        "bench",
        "scaling",
        "--workload",
        str(workload),
        "--grid",
        "none",
        "--strategies",
        "union4,union8",
    ]
    result = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "s.jsonl")], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "2 of 4 call shapes" in result.output and "workload, visits" in result.output
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["schema"] == "pageweaver-scaling-1"
    for value, message in (("none", "grid: got none"), ("heads", "grid: got 'heads', supported: context")):
        refused = CliRunner().invoke(app, ["bench", "scaling", "--grid", value], env={"COLUMNS": "200"})
        assert refused.exit_code == 2 and message in refused.output
