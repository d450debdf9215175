"""The prefill measurement on the CPU: what its rows hold, and that it refuses to time what is wrong."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from . import minimax_m3 as m3

if reason := m3.why_not():
    pytest.skip(reason, allow_module_level=True)

from pageweaver.__main__ import app
from pageweaver.bench import Run
from pageweaver.bridges import transformers as bridge
from pageweaver.eval import prefill
from pageweaver.eval.output import SCHEMA_VERSION, CheckFailed
from pageweaver.eval.report import make_page
from pageweaver.eval.runs import read_run

from .report_rows import write


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(prefill, "SAMPLED_ROWS", 5)
    yield
    bridge.register()


def measuring(
    report: Any, arms: str = "per_query,union8", tokens: int = 400, schema: str = "x"
) -> Iterator[dict[str, Any]]:
    config = m3.build(num_hidden_layers=2, layer_types=["minimax_m3_sparse"] * 2).config
    options = {"tokens": tokens, "chunk": 256, "rounds": 2, "device": torch.device("cpu"), "seed": 0}
    return prefill.measure(
        config,
        prefill.parse_arms(arms),
        smooths=[1, 40],
        header={"schema": schema},
        report=report,
        **options,
    )


def measured(report: Any = lambda *_: None, arms: str = "per_query,union8") -> list[dict[str, Any]]:
    return list(measuring(report, arms))


def test_rows() -> None:
    """Parts add up to the layer, arms take turns, and eager attention comes last."""
    told: list[str] = []
    rows = measured(lambda _, text: told.append(text))
    timings = [text for text in told if text.startswith("timing")]
    assert timings == [f"timing {arm}" for arm in ("per_query", "union8", "union8", "per_query")] * 2
    assert len(rows) == 2 * (2 * 4 + 1)
    for smooth in (1, 40):
        *timed, eager = (row for row in rows if row["smooth"] == smooth)
        for arm in ("per_query", "union8"):
            own = {row["boundary"]: row for row in timed if row["arm"] == arm}
            assert all(len(row["samples_ms"]) == 2 and min(row["samples_ms"]) > 0 for row in own.values())
            for turn in range(2):
                parts = [own[name]["samples_ms"][turn] for name in ("indexer", "attention", "rest")]
                assert sum(parts) == pytest.approx(own["layer"]["samples_ms"][turn])
            assert own["attention"]["path"].startswith(f"{arm} (reference, bf16)")
            assert 0 < own["attention"]["nrms"] < prefill.MOST_NRMS[False]
            assert 1 < own["attention"]["reuse"] < 8
        assert eager["tokens_read"] == 400 and eager["out_of_memory"] is False and eager["median_ms"] > 0


@pytest.mark.parametrize(("stopped", "finished"), [(2, 0), (3, 1), (5, None)])
def test_ctrl_c_keeps_finished_rounds(stopped: int, finished: int | None, tmp_path: Path) -> None:
    """In the first round there is nothing to keep; later, also where eager attention runs, there is."""
    told: list[str] = []

    def report(_: float, text: str) -> None:
        told.extend([text] if text.startswith(("timing", "transformers")) else [])
        if len(told) == stopped:
            raise KeyboardInterrupt

    def made(**_: Any) -> Iterator[dict[str, Any]]:
        return measuring(report)

    console = Console(width=100, record=True, file=io.StringIO())
    run = Run("prefill", tmp_path / "o", None, console=console)
    with pytest.raises(KeyboardInterrupt):
        run.collect(made, prefill.print_prefill)
    rows = run.rows
    assert len(rows) == (2 * 4 if finished != 0 else 0) == (tmp_path / "o.partial").exists() * 8
    assert all(len(row["samples_ms"]) == (finished or 2) for row in rows)
    assert all(row["interrupted"] is (finished is not None) for row in rows)
    text = console.export_text()
    assert ("union8" in text) == (finished != 0) and "Eager attention" not in text


def test_rows_of_some_parts_are_printed() -> None:
    """An arm's line has what its rows have, whichever they are."""
    checked = {"nrms": 0.01, "reuse": 1.5}
    row = {"case": "x", "arm": "union8", "boundary": "attention", "median_ms": 2.5, **checked}
    console = Console(width=100, record=True, file=io.StringIO())
    prefill.print_prefill(console, [row])
    line = next(line for line in console.export_text().splitlines() if "union8" in line)
    assert line.split() == ["union8", "-", "2.50", "-", "-", "1.00%", "1.50"]


def test_a_last_chunk_of_a_few_tokens_has_no_reuse(tmp_path: Path) -> None:
    """None in rows, which a report reads, and a dash in the table."""
    schema = f"pageweaver-prefill-{SCHEMA_VERSION}"
    rows = list(measuring(lambda *_: None, "union8", tokens=260, schema=schema))
    assert [row["reuse"] for row in rows if row["arm"] == "union8"] == [None] * 8
    console = Console(width=100, record=True, file=io.StringIO())
    prefill.print_prefill(console, rows[:5])
    line = next(line for line in console.export_text().splitlines() if "union8" in line)
    assert line.split()[-1] == "-"
    assert "union8" in make_page([read_run(write(tmp_path / "layers.jsonl", rows))]).html


def test_a_prompt_named_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def noted(*_: Any, smooths: list[int], **__: Any) -> Iterator[dict[str, Any]]:
        given.extend(smooths)
        return iter(())

    monkeypatch.setattr(prefill, "measure", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("pageweaver.eval.output.provenance", lambda _: {})
    words = ["bench", "prefill", "--smooth", "4", "--smooth", "1", "--smooth", "4"]
    CliRunner().invoke(app, [*words, "--output", str(tmp_path / "o")])
    assert given == [4, 1]


def test_copy_in_fp8_is_an_arm() -> None:
    rows = measured(arms="union8/fp8_copy")
    assert rows[0]["path"] == "union8 (reference, fp8), cache copied to E4M3"
    assert 0.02 < rows[0]["nrms"] < prefill.MOST_NRMS[True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (" , ", "strategies: got none"),
        ("union9", "strategy: got 'union9'"),
        ("offline_w512", "ids"),
        ("union8/cluster", "strategies: got 'union8/cluster', supported after a slash: fp8_copy"),
    ],
)
def test_arms_are_checked(words: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        prefill.parse_arms(words)


def test_red_check_stops_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that misses the scale is refused."""
    right = prefill.exact_rows
    monkeypatch.setattr(prefill, "exact_rows", lambda *given: 2 * right(*given))
    with pytest.raises(CheckFailed, match=r"per_query: got NRMS 0\.5"):
        measured()


def test_memory_that_runs_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(prefill.Prefill, "_attention", full)
    with pytest.raises(MemoryError, match=r"per_query: a prefill of 400 tokens in chunks of 256, .* not fit"):
        measured()


def test_memory_that_runs_out_in_a_round_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the check before: the rounds of an arm that stopped early would be its fastest."""
    right, told = prefill.Prefill._attention, [""]

    def full(*given: Any, **options: Any) -> Any:
        if told[-1] == "timing union8" and given[2].shape[2] == 400 - 256:
            raise torch.OutOfMemoryError("no more")
        return right(*given, **options)

    monkeypatch.setattr(prefill.Prefill, "_attention", full)
    with pytest.raises(MemoryError, match=r"union8: a prefill of 400 tokens in chunks of 256, .* not fit"):
        measured(lambda _, text: told.append(text))
    assert told[-1] == "timing union8"


def test_prompts() -> None:
    """Random embeddings every few tokens, and straight lines between them."""
    config = prefill.real_config(1)
    rough, smooth = (prefill.make_prompt(config, 203, n, 0, torch.device("cpu")).float()[0] for n in (1, 20))
    assert rough.shape == smooth.shape == (203, 6144)
    assert rough.std() == pytest.approx(config.initializer_range, rel=0.01)
    bends = (smooth[2:] - 2 * smooth[1:-1] + smooth[:-2]).abs().amax(dim=1)
    assert (bends > 0.01).sum() <= 2 * 203 / 20
    assert torch.cosine_similarity(rough[1:], rough[:-1]).abs().max() < 0.1
    assert torch.cosine_similarity(smooth[1:], smooth[:-1]).min() > 0.9


def test_reuse() -> None:
    """Eight queries on the same two pages, then eight on their own page each."""
    blocks = torch.full((1, 1, 16, 3), -1)
    blocks[0, 0, :8, :2] = torch.tensor([4, 1])
    blocks[0, 0, 8:, 0] = torch.arange(8)
    assert prefill.reuse(blocks, 9) == (16 + 8) / (2 + 8)
    assert prefill.reuse(blocks[:, :, :7], 9) is None  # a last chunk of a few tokens


def test_real_widths() -> None:
    """The attention of the released model: 64 heads on 4, Top16 of blocks of 128."""
    config = prefill.real_config(3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 4, 128)
    assert (config.index_n_heads, config.index_topk_blocks, config.index_block_size) == (4, 16, 128)
    assert config.layer_types == ["minimax_m3_sparse"] * 3 and config.hidden_size == 6144
