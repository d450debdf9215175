"""Survey of page reuse, against the strategies' own counts and against plain sets."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import pageweaver as pw
from pageweaver.common.captures import save_selections
from pageweaver.common.supports import local, streams
from pageweaver.eval import output
from pageweaver.eval.survey import (
    PLOTTED_SOURCES,
    Observation,
    by_source,
    json_rows,
    observe,
    print_survey,
    quartiles,
    survey,
    survey_figure,
)


def tagged(name: str, seed: int = 0, **metadata: object) -> pw.Selection:
    made = streams(12, 900, topk=4, seed=seed)
    return pw.Selection(name, made.q2k_indices, made.cu_seqlens_q, made.seqused_k, metadata=metadata)


def observation(source: str, layer: int | None, head: int | None, reuse: float) -> Observation:
    return Observation(source, f"{source}.{layer}.{head}", "", layer, head, 8, 100, 50, 5, reuse)


def printed(observations: list[Observation], width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_survey(console, observations)
    return console.export_text()


# --- counts ---


@pytest.mark.parametrize("group", [1, 3, 8, 100])
def test_counts_are_those_of_sets(group: int) -> None:
    rng = np.random.default_rng(group)
    # Duplicates, -1, future pages and rows past the last request among them.
    indices = rng.integers(-1, 12, (2, 60, 6))
    boundaries, lengths = [0, 19, 19, 50], [900, 70, 1400]
    selection = pw.Selection("messy", indices, np.array(boundaries), np.array(lengths))
    for head, found in enumerate(observe(selection, "messy", group)):
        edges = visits = groups = 0
        for request, length in enumerate(lengths):
            first, last = boundaries[request], boundaries[request + 1]
            for start in range(first, last, group):
                union: set[int] = set()
                for row in range(start, min(start + group, last)):
                    position = length - last + row
                    pages = {int(p) for p in indices[head, row] if 0 <= p <= position // 128}
                    edges += len(pages)
                    union |= pages
                visits += len(union)
                groups += bool(union)
        assert (found.edges, found.visits, found.groups) == (edges, visits, groups)
        assert found.reuse == edges / visits and found.kv_head == head and found.layer is None


@pytest.mark.parametrize("group_size", [16, 8])
def test_counts_are_those_of_union8(group_size: int) -> None:
    selection = streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)
    work = pw.load("union8").work(pw.make_problem(selection, group_size=group_size))
    found = observe(selection, "s", 128 // group_size)
    assert sum(o.visits for o in found) == work.visits
    assert sum(o.edges for o in found) == work.edges
    assert sum(o.groups for o in found) == work.groups


def test_extremes() -> None:
    same = np.tile(np.arange(4), (1, 16, 1))
    shared = pw.Selection("same", same, np.array([0, 16]), np.array([600]))
    assert observe(shared, "s")[0].reuse == 8.0
    nothing = pw.Selection("none", np.full((1, 9, 4), -1), np.array([0, 9]), np.array([600]))
    assert observe(nothing, "s")[0].reuse == 0.0
    assert (
        observe(pw.Selection("n", np.zeros((1, 0, 4), int), np.array([0]), np.array([], int)), "s")[0].visits
        == 0
    )
    with pytest.raises(ValueError, match="group: got 0"):
        observe(shared, "s", 0)


def test_presets_have_their_calibrated_reuse() -> None:
    (low,) = survey(["synthetic:low"])
    assert low.source == "synthetic" and low.reuse == pytest.approx(2.39, abs=0.05)


# --- sources ---


def test_sources_come_from_metadata_then_names_then_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    save_selections(
        first, [tagged("austen.L3.h1"), tagged("x", text_id="emma", layer=2, kv_head=0), tagged("plain")]
    )
    save_selections(second, [tagged("austen.L1.h0", 1), tagged("persuasion.L7.h2", 2)])
    found = survey([str(first), str(second), str(first)])
    assert [(o.source, o.layer, o.kv_head) for o in found] == [
        ("austen (first)", 3, 1),
        ("emma", 2, 0),
        ("first", None, None),
        ("austen (second)", 1, 0),
        ("persuasion", 7, 2),
    ]


def test_layers_and_heads_are_sorted(tmp_path: Path) -> None:
    names = ["t.L10.h0", "t.L2.h1", "t.L2.h0"]
    save_selections(tmp_path / "t.safetensors", [tagged(n, i) for i, n in enumerate(names)])
    seen: list[float] = []
    found = survey([str(tmp_path / "t.safetensors")], progress=lambda fraction, _: seen.append(fraction))
    assert [o.selection for o in found] == ["t.L2.h0", "t.L2.h1", "t.L10.h0"]
    assert seen == [0, 1 / 3, 2 / 3]


# --- what is printed and drawn ---


def test_quartiles_and_rows() -> None:
    found = [observation("a", i, 0, r) for i, r in enumerate((5.0, 1.0, 2.0, 3.0, 4.0))]
    assert quartiles(found) == [1, 2, 3, 4, 5]
    summary, *rows = json_rows([*found, observation("b", 0, 0, 1.5)])
    assert summary["observations"] == 5 and summary["q25"] == 2 and summary["group"] == 8
    assert [r["kind"] for r in rows] == ["source"] + ["observation"] * 6
    assert output.json_lines(rows)
    assert list(by_source([*found, observation("b", 0, 0, 1.5)])) == ["a", "b"]


def test_tables() -> None:
    few = [observation("few", layer, head, 1 + layer + head / 10) for layer in (0, 3) for head in (0, 2)]
    lines = [line.split() for line in printed(few).splitlines()]
    assert ["layer", "head", "0", "head", "2"] in lines and ["3", "4.00", "4.20"] in lines
    many = [observation("many", layer, head, 1 + head / 10) for layer in (0, 1) for head in range(16)]
    text = printed(many)
    assert ["0", "16", "1.00", "1.38", "1.75", "2.12", "2.50"] in [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80
    unnamed = [observation("synthetic", None, None, 2.0)]
    assert "synthetic.None.None" in printed(unnamed)


def test_figure() -> None:
    layered = [observation("a", layer, head, 1.0 + layer) for layer in range(4) for head in range(3)]
    named = [observation("b", None, None, 2.0), observation("b", None, None, 3.0)]
    figure = survey_figure([*layered, *named])
    assert [a.get_title() for a in figure.axes] == [
        "a: median 2.50 (1.00 to 4.00)",
        "b: median 2.50 (2.00 to 3.00)",
    ]
    points = figure.axes[0].collections[0].get_offsets()
    assert np.asarray(points).tolist() == [[o.layer, o.reuse] for o in layered]
    assert output.png(figure).startswith(b"\x89PNG")
    sources = [observation(f"s{i}", 0, 0, 2.0) for i in range(PLOTTED_SOURCES + 1)]
    assert survey_figure(sources).get_suptitle().endswith("(first 12 of 13 sources)")


def test_a_sliding_window_shares_nearly_all() -> None:
    assert observe(local(64, 4096, topk=4), "s")[0].reuse > 7
