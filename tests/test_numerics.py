"""Errors of every arm: what they are taken against, and the inputs they are taken on."""

from __future__ import annotations

import io
import json
import math
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
from pageweaver.common.captures import save_selections
from pageweaver.common.reference import nrms
from pageweaver.common.supports import preset, streams
from pageweaver.eval import numerics
from pageweaver.eval.arms import sample_rows
from pageweaver.eval.inputs import E4M3_MAX, INPUTS, draw_problem
from pageweaver.eval.output import CheckFailed
from pageweaver.strategies.query_union import Union8

CPU = torch.device("cpu")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def silent(_: float, __: str) -> None:
    """No progress."""


def measured(
    selection: pw.Selection, arms: list[str], kinds: list[str], **options: Any
) -> list[dict[str, Any]]:
    header = {"schema": "s"}
    return list(
        numerics.measure([selection], arms, kinds, header=header, device=CPU, report=silent, **options)
    )


@pytest.fixture(scope="module")
def selection() -> pw.Selection:
    return preset("mid", total_q=40, prefix=4096)


# --- inputs ---


@pytest.mark.parametrize("kind", list(INPUTS))
@pytest.mark.parametrize("kv_dtype", [FP8, BF16])
def test_inputs_are_finite_and_repeatable(kind: str, kv_dtype: torch.dtype, selection: pw.Selection) -> None:
    problem = draw_problem(kind, selection, kv_dtype=kv_dtype, seed=3)
    again = draw_problem(kind, selection, kv_dtype=kv_dtype, seed=3)
    other = draw_problem(kind, selection, kv_dtype=kv_dtype, seed=4)
    for name in ("q", "k_cache", "v_cache"):
        tensor = getattr(problem, name).float()
        assert tensor.isfinite().all() and tensor.any()
        assert torch.equal(tensor, getattr(again, name).float())
        assert not torch.equal(tensor, getattr(other, name).float())
    scaled = INPUTS[kind].scaled and kv_dtype == FP8
    assert (problem.k_scale != 1.0) == (problem.v_scale != 1.0) == scaled
    if scaled:  # the largest value takes all of E4M3's range
        assert float(problem.k_cache.float().abs().max()) == E4M3_MAX
    problem.check_values()


def test_inputs_have_the_tails_and_channels_they_claim(selection: pw.Selection) -> None:
    def share_beyond(kind: str, deviations: float) -> float:
        q = draw_problem(kind, selection).q.float()
        return float((q.abs() > deviations * q.std()).float().mean())

    # Beyond 4 deviations lie 6e-5 of a normal and about 0.6% of Student's t of 3 degrees in units of its own.
    assert share_beyond("normal", 4) < 2e-4 < 2e-3 < share_beyond("heavy", 4) < 2e-2
    keys = draw_problem("model", selection, kv_dtype=BF16).k_cache.float()[:, 1:]
    spread = keys.square().mean(dim=(0, 1, 2)).sqrt().sort(descending=True).values
    assert spread[3] > 2 * spread[len(spread) // 2]
    assert draw_problem("model", selection, kv_dtype=BF16).v_cache.float().std() < 0.5


def test_model_inputs_are_attended_as_drawn(selection: pw.Selection) -> None:
    """The scales undo the division: FP8 caches stand for the same attention as BF16 ones, to its rounding."""
    fp8, _ = pw.exact_attention(draw_problem("model", selection, kv_dtype=FP8))
    bf16, _ = pw.exact_attention(draw_problem("model", selection, kv_dtype=BF16))
    assert 0.005 < nrms(fp8, bf16) < 0.1


def test_unknown_inputs_are_refused(selection: pw.Selection) -> None:
    with pytest.raises(ValueError, match="inputs: got 'uniform', supported: normal, heavy, model"):
        draw_problem("uniform", selection)


# --- errors ---


def test_row_errors() -> None:
    reference = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[1.0, 0.0]]])
    out = torch.tensor([[[3.0, 4.5]], [[0.0, 0.0]], [[0.0, 1e-9]], [[torch.nan, 0.0]]])
    found = numerics.row_errors(out, reference)
    assert found[:3].tolist() == [0.1, 0.0, float("inf")] and found[3].isnan()


def test_errors_are_those_of_the_strategies(selection: pw.Selection) -> None:
    arms = ["per_query", "union4", "union8", "page_union", "offline_w2048"]
    rows = measured(selection, arms, ["normal", "model"], rows=36, seed=2)
    assert [(r["inputs"], r["arm"], r["arithmetic"]) for r in rows] == [
        (kind, arm, arithmetic)
        for kind in ("normal", "model")
        for arm in ["union8", *(arm for arm in arms if arm != "union8")]
        for arithmetic in pw.load("union8").capabilities["reference"].arithmetics[FP8]
    ]
    tail = selection.tail(36)
    sampled = sample_rows(tail, 2)
    for kind in ("normal", "model"):
        problem = draw_problem(kind, tail, seed=2)
        exact, exact_lse = pw.exact_attention(problem, torch.float64, sampled)
        peer = pw.load("per_query", arithmetic="float32")(problem)
        for name in ("union8", "page_union"):
            lse = torch.empty(36, 16)
            out = pw.load(name, arithmetic="fp8")(problem, lse=lse)
            row = next(r for r in rows if (r["inputs"], r["arm"], r["arithmetic"]) == (kind, name, "fp8"))
            assert row["nrms"] == nrms(out[sampled], exact) < row["worst_row_nrms"]
            assert row["worst_row_nrms"] == max(nrms(out[i], e) for i, e in zip(sampled, exact, strict=True))
            assert (row["peer_nrms"], row["peer_rows"]) == (nrms(out, peer), 36)
            assert row["lse_error"] == float((lse[sampled] - exact_lse).abs().max())
            assert row["bits_of_union8"] is (name == "union8")
    assert all(row["bits_of_union8"] for row in rows if row["arm"] in ("union4", "offline_w2048"))


def test_bf16_caches_have_arithmetics_of_their_own(selection: pw.Selection) -> None:
    rows = measured(selection, ["union8"], ["normal"], kv_dtype=BF16, rows=8)
    assert [row["arithmetic"] for row in rows] == list(
        pw.load("union8").capabilities["reference"].arithmetics[BF16]
    )
    assert all(row["kv_dtype"] == "bfloat16" and row["nrms"] < 0.005 for row in rows)


def test_other_bits_are_a_red_check(selection: pw.Selection, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Union8._execute

    def broken(self: Any, problem: Any, schedule: Any, out: torch.Tensor, lse: Any) -> None:
        inner(self, problem, schedule, out, lse)
        if self.name == "regroup_w64":
            out[3, 2, 1] += 1

    monkeypatch.setattr("pageweaver.strategies.query_union.QueryUnion._execute", broken)
    with pytest.raises(ValueError, match="regroup_w64/fp8: got other bits than union8"):
        measured(selection, ["union8", "regroup_w64"], ["normal"], rows=8)


def test_nan_is_a_red_check(selection: pw.Selection, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Union8._execute

    def broken(self: Any, problem: Any, schedule: Any, out: torch.Tensor, lse: Any) -> None:
        inner(self, problem, schedule, out, lse)
        out[3, 2, 1] = torch.nan

    monkeypatch.setattr("pageweaver.strategies.query_union.QueryUnion._execute", broken)
    with pytest.raises(ValueError, match="union8/fp8: got NaN or infinite outputs"):
        measured(selection, ["union8"], ["normal"], rows=8)


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_an_lse_of_another_kind_is_a_red_check(
    value: float, selection: pw.Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arm is named with its case, and what the others gave is written."""
    inner = Union8._execute

    def broken(self: Any, problem: Any, schedule: Any, out: torch.Tensor, lse: Any) -> None:
        inner(self, problem, schedule, out, lse)
        if self.name == "union8" and self.arithmetic == "fp8":
            lse[3, 2] = value

    monkeypatch.setattr("pageweaver.strategies.query_union.QueryUnion._execute", broken)
    path, output = tmp_path / "one.safetensors", tmp_path / "rows.jsonl"
    save_selections(path, [selection])
    words = ["bench", "numerics", str(path), "--strategies", "union4,union8", "--rows", "8"]
    words += ["--inputs", "normal,heavy", "--output", str(output)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 1, result.output
    got = "nan" if math.isnan(value) else "inf"
    failed = [
        f"{selection.name}.tail8, {kind}, union8/fp8: got lse_error {got}, supported: finite errors"
        for kind in ("normal", "heavy")
    ]
    assert f"Error: {'; '.join(failed)}\n" in result.output
    assert not output.exists()
    rows = [json.loads(line) for line in Path(f"{output}.partial").read_text().splitlines()]
    policies = pw.load("union8").capabilities["reference"].arithmetics[FP8]
    found = {(row["inputs"], row["arm"], row["arithmetic"]) for row in rows}
    assert found == {
        (kind, arm, policy)
        for kind in ("normal", "heavy")
        for arm in ("union4", "union8")
        for policy in policies
        if (arm, policy) != ("union8", "fp8")
    }
    # Outputs are union8's all the same.
    assert all(row["bits_of_union8"] for row in rows)


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (MemoryError(), "stopped by MemoryError"),
        (RuntimeError("a\nfault"), "stopped by a fault"),
    ],
)
def test_red_checks_are_told_where_a_run_is_stopped(
    stop: BaseException, told: str, selection: pw.Selection, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, draw = Union8._execute, numerics.draw_problem

    def broken(self: Any, problem: Any, schedule: Any, out: torch.Tensor, lse: Any) -> None:
        inner(self, problem, schedule, out, lse)
        if self.name == "union8":
            lse[3, 2] = torch.inf

    def stopping(kind: str, *given: Any, **options: Any) -> Any:
        if kind == "heavy":
            raise stop
        return draw(kind, *given, **options)

    monkeypatch.setattr("pageweaver.strategies.query_union.QueryUnion._execute", broken)
    monkeypatch.setattr(numerics, "draw_problem", stopping)
    with pytest.raises(CheckFailed, match=f"union8/fp8: got lse_error inf.*; then {told}$"):
        measured(selection, ["union8"], ["normal", "heavy"], rows=8)


def test_an_arm_with_an_arithmetic_is_refused(selection: pw.Selection) -> None:
    with pytest.raises(ValueError, match="strategies: got 'union8/fp8', supported: no arithmetic"):
        measured(selection, ["union4", "union8/fp8"], ["normal"], rows=8)


def test_command_and_table(tmp_path: Path) -> None:
    several = streams(query_lens=[30, 20], prefix_lens=[700, 1000], num_kv_heads=2, topk=6, seed=1)
    path = tmp_path / "two.safetensors"
    save_selections(path, [several])
    words = ["bench", "numerics", str(path), "--strategies", "union8,union4,page_union", "--rows", "10"]
    words += ["--inputs", "heavy,heavy", "--output", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["case"] for row in rows} == {f"{several.name}.tail10"}
    assert len({(row["arm"], row["arithmetic"]) for row in rows}) == len(rows)  # a kind named twice runs once
    assert "union8, union4" in result.output and "page_union" in result.output
    console = Console(width=80, record=True, file=io.StringIO())
    numerics.print_numerics(console, rows)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    union8 = next(row for row in rows if row["arm"] == "union8" and row["arithmetic"] == "fp8")
    assert f" {union8['nrms']:.2%} " in text and f" {union8['worst_row_nrms']:.2%} " in text


def test_what_a_strategy_refuses_is_named(selection: pw.Selection, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Union8.prepare

    def refusing(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.name == "union4":
            raise ValueError("mapping: got 'x'")
        return inner(self, *arguments, **options)

    monkeypatch.setattr("pageweaver.strategies.query_union.QueryUnion.prepare", refusing)
    rows = measured(selection, ["union8", "union4"], ["normal"], rows=8)
    refused = [row for row in rows if row["arm"] == "union4"]
    assert {(row["boundary"], row["reason"]) for row in refused} == {("not run", "mapping: got 'x'")}
    assert all(row["boundary"] == "numerics" for row in rows if row["arm"] == "union8")


def of_pages(pages: list[list[int]], boundaries: list[int], lengths: list[int]) -> pw.Selection:
    return pw.Selection("few", np.array([pages], np.int32), np.array(boundaries), np.array(lengths))


@pytest.mark.parametrize(
    ("few", "sampled", "lse"),
    [
        (of_pages([[-1]] * 5, [0, 5], [300]), 5, 0.0),
        (of_pages([[0]] * 3, [0], []), 0, None),
        (of_pages([[0]] * 3, [0, 0, 0], [4, 5]), 0, None),
    ],
    ids=["no page", "no request", "no query"],
)
@pytest.mark.parametrize("rows", [None, 2])
def test_where_nothing_is_read_there_is_no_error(
    few: pw.Selection, sampled: int, lse: float | None, rows: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "few.safetensors"
    save_selections(path, [few])
    words = ["bench", "numerics", str(path), "--strategies", "union8,page_union", "--inputs", "normal,model"]
    words += ["--output", str(tmp_path / "rows.jsonl"), *([] if rows is None else ["--rows", str(rows)])]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "nan" not in result.output and re.search(r" fp8 +- +- ", result.output)
    for line in (tmp_path / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = ("nrms", "worst_row_nrms", "peer_nrms", "peer_worst_row_nrms")
        assert [row[name] for name in names] == [None] * 4
        assert row["lse_error"] == lse and row["rows"] == min(sampled, sampled if rows is None else rows)


def test_the_last_request_with_queries_is_taken() -> None:
    few = of_pages([[0], [0], [1], [1]], [0, 1, 4, 4], [9, 300, 5])
    rows = measured(few, ["union8"], ["normal"])
    assert all(row["case"] == "few.tail3" and row["rows"] == 3 and row["nrms"] < 0.2 for row in rows)


def test_rows_that_should_be_zero_are_a_red_check(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Union8._execute

    def broken(self: Any, problem: Any, schedule: Any, out: torch.Tensor, lse: Any) -> None:
        inner(self, problem, schedule, out, lse)
        out[1, 2, 1] = 1 if self.name == "union8" else 0

    monkeypatch.setattr("pageweaver.strategies.query_union.QueryUnion._execute", broken)
    with pytest.raises(ValueError, match="union8/fp8: got non-zero rows, supported: zeros where nothing"):
        measured(of_pages([[0], [-1]], [0, 2], [300]), ["union8"], ["normal"])
