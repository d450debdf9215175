"""Online grouping on the device: its ids are the CPU search's, exactly, and results do not depend on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.common.supports import preset
from pageweaver.strategies.regroup import online

from ..helpers import E4M3, Target, assert_same_bits, choices_problem, poison, random_problem, replaced
from .hopper import WATCHDOG, missing

DEVICE = "cuda"
CAPTURES = Path(__file__).resolve().parents[2] / "captures"
pytestmark = [WATCHDOG, pytest.mark.skipif(bool(missing()), reason=missing() or "runs")]

ONLINE = ("regroup_w64", "regroup_w128", "auto")
OBJECTIVES = ("visits", "rounds")


def load(name: str, objective: str, backend: str) -> pw.Strategy:
    return pw.load(name, objective=objective, backend=backend)


def searching(below: int) -> Any:
    """Windows that `auto` searches: those whose bound is below so many 256ths, whatever the call's size."""
    return mock.patch.object(online, "sought_below", lambda _: below)


def assert_same_groups(problem: pw.AttentionProblem, name: str, objective: str) -> Any:
    """Ids, choices and unions of the device against the CPU's; returns the device's schedule."""
    if name == "auto":
        for below in (0, 66, 160):  # none, without a look or hardly any with one, and some
            with searching(below):
                _assert_same_groups(problem, name, objective)
    with searching(257):  # all
        return _assert_same_groups(problem, name, objective)


def _assert_same_groups(problem: pw.AttentionProblem, name: str, objective: str) -> Any:
    strategy = load(name, objective, "cuda")
    workspace = strategy.workspace(problem)
    poison(workspace)
    found: Any = strategy.prepare(problem, workspace)
    expected: Any = load(name, objective, "reference").prepare(problem)
    for field in ("query_ids", "group_offsets", "union_counts", "union_pages"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    pages = expected.union_pages >= 0
    assert torch.equal(found.union_masks[pages], expected.union_masks[pages]), "union_masks"
    if name == "auto":
        assert torch.equal(found.window_choices, expected.window_choices), "window_choices"
    else:
        assert found.window_choices is None
    return found


def random_selection(seed: int, **options: Any) -> pw.AttentionProblem:
    return random_problem(seed=seed, device=DEVICE, **options)


MESSY: tuple[dict[str, Any], ...] = (
    {},
    {"lengths": (1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 0, 3), "prefixes": (0, 300, 5, 9, 1, 700, *[64] * 6)},
    {"lengths": (300,), "prefixes": (5000,), "group_size": 1},
    {"lengths": (300, 41), "prefixes": (5000, 20), "group_size": 2, "num_kv_heads": 3},
    {"lengths": (260, 2), "prefixes": (900, 0), "group_size": 8, "topk": 17},
    {"lengths": (200,), "prefixes": (9000,), "group_size": 16, "topk": 32, "num_kv_heads": 2},
    {"lengths": (130,), "prefixes": (3000,), "group_size": 4, "topk": 1},
    # As many requests as a warp counts by itself, and more than that.
    {"lengths": (3, 0, 70, 8) * 8, "prefixes": (300, 0, 9, 1000) * 8},
    {"lengths": (5, 130, 0, 9) * 10, "prefixes": (40, 300, 7, 1000) * 10},
)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ONLINE)
class TestIds:
    @pytest.mark.parametrize("case", range(len(MESSY)))
    def test_messy(self, name: str, objective: str, case: int) -> None:
        assert_same_groups(random_selection(case, **MESSY[case]), name, objective)

    @pytest.mark.parametrize("selection", ["low", "mid", "high", "interleaved"])
    def test_synthetic(self, name: str, objective: str, selection: str) -> None:
        problem = pw.make_problem(preset(selection, total_q=1500, prefix=49152), device=DEVICE)
        assert_same_groups(problem, name, objective)

    def test_real(self, name: str, objective: str) -> None:
        for path in sorted(CAPTURES.glob("*.safetensors")):
            for selection in pw.load_selections(path):
                problem = pw.make_problem(selection.tail(1500), device=DEVICE)
                assert_same_groups(problem, name, objective)

    def test_ties(self, name: str, objective: str) -> None:
        """All rows alike, then two kinds in turns: only the tie break decides."""
        problem = random_selection(0, lengths=(256,), prefixes=(8000,))
        ids = problem.q2k_indices
        same = ids[:, :1].expand_as(ids).contiguous()
        schedule = assert_same_groups(replaced(problem, q2k_indices=same), name, objective)
        assert torch.equal(schedule.query_ids[0].cpu(), torch.arange(problem.total_q, dtype=torch.int32))
        same[:, ::2] = ids[:, 1:2]
        assert_same_groups(replaced(problem, q2k_indices=same), name, objective)

    def test_every_way_to_choose(self, name: str, objective: str) -> None:
        problem = choices_problem(DEVICE)
        assert_same_groups(problem, name, objective)
        with searching(257):
            assert torch.equal(load(name, objective, "cuda")(problem), pw.load("union8")(problem))

    def test_nothing_selected(self, name: str, objective: str) -> None:
        problem = random_selection(0, lengths=(200,), prefixes=(1000,))
        ids = problem.q2k_indices.clone()
        ids[:, 20:190] = -1
        assert_same_groups(replaced(problem, q2k_indices=ids), name, objective)
        assert_same_groups(replaced(problem, q2k_indices=torch.full_like(ids, -1)), name, objective)

    def test_any_context(self, name: str, objective: str) -> None:
        """No cap on pages: a million tokens, and a page table wider than the window's table."""
        rng = torch.Generator().manual_seed(5)
        for pages, topk in ((8192, 16), (8192, 32), (20_000, 16)):
            rows = 300
            ids = torch.randint(0, pages, (1, rows, topk), generator=rng, dtype=torch.int32)
            # Neighbours share pages, or no order would be better than another.
            ids[:, :, : topk // 2] = ids[:, torch.arange(rows) % 11][:, :, : topk // 2]
            cache = torch.zeros(64, 128, 1, 128, dtype=torch.float8_e4m3fn, device=DEVICE)
            problem = pw.AttentionProblem(
                q=torch.zeros(rows, 16, 128, dtype=torch.bfloat16, device=DEVICE),
                k_cache=cache,
                v_cache=torch.randn(cache.shape, device=DEVICE).to(cache.dtype),
                q2k_indices=ids.to(DEVICE),
                cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
                seqused_k=torch.tensor([pages * 128], dtype=torch.int32, device=DEVICE),
                page_table=torch.randint(0, 64, (1, pages), generator=rng, dtype=torch.int32).to(DEVICE),
            )
            assert_same_groups(problem, name, objective)
            # Pages were marked for packing in every pass.
            for below in (66, 257):
                with searching(below):
                    found = load(name, objective, "cuda")(problem)
                assert torch.equal(found, pw.load("union8")(problem))


@pytest.mark.parametrize("name", ONLINE)
class TestResults:
    def test_bits_are_union8s(self, name: str) -> None:
        for case in (1, 3, 5):
            problem = random_selection(case, **MESSY[case])
            options: dict[str, Any] = {"device": DEVICE, "backend": "cuda"}
            with searching(257):
                found = Target(name, **options).run(problem)
            assert_same_bits(found, Target("union8", **options).run(problem))

    def test_strided_ids(self, name: str) -> None:
        problem = random_selection(3, **MESSY[3])
        wide = torch.full((*problem.q2k_indices.shape[:2], 40), 3, dtype=torch.int32, device=DEVICE)
        wide[:, :, 1::2][:, :, : problem.topk] = problem.q2k_indices
        view = wide[:, :, 1::2][:, :, : problem.topk]
        strategy = pw.load(name)
        with searching(257):
            found: Any = strategy.prepare(replaced(problem, q2k_indices=view))
            expected: Any = strategy.prepare(problem)
        assert torch.equal(found.query_ids, expected.query_ids)

    def test_graph_with_fresh_inputs(self, name: str) -> None:
        """C36: every kernel is captured, and nothing of the captured input stays."""
        problem = pw.make_problem(preset("low", total_q=1500, prefix=9000), device=DEVICE)
        other = pw.make_problem(preset("interleaved", total_q=1500, prefix=9000), device=DEVICE)
        strategy = pw.load(name)
        workspace = strategy.workspace(problem)
        out = torch.empty_like(problem.q)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            strategy(problem, out, workspace=workspace)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            strategy(problem, out, workspace=workspace)
        fresh = replaced(problem, q2k_indices=other.q2k_indices)
        expected = strategy(fresh)
        problem.q2k_indices.copy_(other.q2k_indices)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)

    def test_repeats(self, name: str) -> None:
        """C50: the same ids and bits every time, with another stream at work."""
        problem = pw.make_problem(preset("low", total_q=4096, prefix=49152), device=DEVICE)
        strategy = pw.load(name)
        workspace = strategy.workspace(problem)
        busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
        first: Any = None
        for _ in range(50):
            with torch.cuda.stream(busy):
                noise @ noise
            schedule: Any = strategy.prepare(problem, workspace)
            result = schedule.query_ids.clone(), strategy.execute(problem, schedule)
            first = first or result
            assert all(torch.equal(a, b) for a, b in zip(result, first, strict=True))


@pytest.mark.parametrize("name", ["union8", *ONLINE])
def test_boundaries_past_the_rows(name: str) -> None:
    """A last boundary past total_q makes no group without a row, and the rows that there are stand."""
    problem = random_problem(lengths=(100, 30), prefixes=(5000, 3000), past_rows=0, device=DEVICE)
    # Finite past the end as well, which `past` says is 400 tokens further.
    problem = replaced(problem, v_cache=problem.v_cache.float().nan_to_num().to(E4M3))
    past = replaced(
        problem,
        cu_seqlens_q=problem.cu_seqlens_q + torch.tensor([0, 0, 400], dtype=torch.int32, device=DEVICE),
        # Positions are counted from the last boundary.
        seqused_k=problem.seqused_k + torch.tensor([0, 400], dtype=torch.int32, device=DEVICE),
    )
    strategy = pw.load(name)
    expected = strategy(problem)
    workspace = strategy.workspace(past)
    poison(workspace)
    schedule: Any = strategy.prepare(past, workspace)
    live = -(-100 // 8) + -(-30 // 8)
    assert (schedule.union_counts[0, :live] > 0).all() and not schedule.union_counts[0, live:].any()
    assert int(schedule.group_offsets[live]) == problem.total_q
    assert torch.equal(strategy.execute(past, schedule), expected)


def test_auto_takes_what_is_worth_its_search() -> None:
    """W128's order where it has far fewer rounds; else the better of the original one and W64's."""
    for name in ("low", "high", "interleaved"):
        problem = pw.make_problem(preset(name, total_q=2000, prefix=49152), device=DEVICE)
        with searching(257):
            rounds = {
                name: pw.load(name).work(problem).rounds
                for name in ("union8", "regroup_w64", "regroup_w128", "auto")
            }
        best = min(rounds["union8"], rounds["regroup_w64"])
        # The last window has 80 queries, whose search goes on to its end.
        assert rounds["auto"] <= (rounds["regroup_w128"] if name == "interleaved" else best)


@pytest.mark.parametrize(
    ("rows", "objective"), [(500, "rounds"), (1000, "rounds"), (6000, "rounds"), (6000, "visits")]
)
@pytest.mark.parametrize("name", ["low", "mid", "high", "interleaved"])
def test_auto_searches_where_it_can_pay(name: str, rows: int, objective: str) -> None:
    """As the twin does, in calls of any size; results are union8's."""
    problem = pw.make_problem(preset(name, total_q=rows, prefix=49152), device=DEVICE)
    _assert_same_groups(problem, "auto", objective)
    assert torch.equal(load("auto", objective, "cuda")(problem), pw.load("union8")(problem))


@pytest.mark.parametrize("window", [512, 2048])
def test_offline_ids(window: int) -> None:
    """Searched ids run on the device, the same bits; another selection is refused, a first call or not."""
    selection = preset("low", total_q=1100, prefix=49152)
    problem = pw.make_problem(selection, device=DEVICE)
    ids = pw.search(selection, window=window)
    strategy = pw.load(f"offline_w{window}", ids=ids)
    schedule: Any = strategy.prepare(problem)
    assert np.array_equal(schedule.query_ids.cpu().numpy(), ids.query_ids)
    assert torch.equal(strategy.execute(problem, schedule), pw.load("union8")(problem))
    strategy.prepare(dataclasses.replace(problem, q=problem.q.clone()))
    problem.q2k_indices[0, 0, 0] += 1
    with pytest.raises(ValueError, match="selection_sha256"):
        strategy.prepare(problem)
