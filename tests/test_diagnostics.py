"""Orders made ahead: the same bits as union8, what they cost in counts, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.common.problem import selection_support
from pageweaver.common.reference import nrms
from pageweaver.common.supports import preset, streams, uniform
from pageweaver.strategies.regroup.diagnostics import FixedIds, MaterialisedReorder, hashed_ids, random_ids


def several_requests() -> pw.Selection:
    return streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)


def shuffled(selection: pw.Selection, seed: int = 0) -> torch.Tensor:
    boundaries = selection.cu_seqlens_q.tolist()
    return torch.from_numpy(random_ids(boundaries, selection.num_kv_heads, selection.total_q, seed))


@pytest.mark.parametrize("group_size", [4, 16])
def test_fixed_ids_give_the_bits_of_union8_and_the_work_of_their_order(group_size: int) -> None:
    selection = several_requests()
    problem = pw.make_problem(selection, group_size=group_size)
    ids = shuffled(selection)
    strategy = FixedIds(problem, ids)
    schedule = strategy.prepare(problem)
    assert torch.equal(schedule.query_ids, ids)
    lse, expected = (torch.empty(problem.q.shape[:2]) for _ in range(2))
    out = strategy.execute(problem, schedule, lse=lse)
    assert torch.equal(out, pw.load("union8")(problem, lse=expected)) and torch.equal(lse, expected)
    other = pw.load("union8").prepare(problem, query_ids=ids)
    assert torch.equal(schedule.union_pages, other.union_pages)
    assert torch.equal(schedule.union_masks, other.union_masks)


def test_a_call_with_fixed_ids_neither_checks_nor_copies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking synchronises a GPU, and a copy would be counted as union work."""
    selection = several_requests()
    problem = pw.make_problem(selection)
    ids = shuffled(selection)
    strategy = FixedIds(problem, ids)
    workspace = strategy.workspace(problem)

    def never(*_: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("pageweaver.strategies.query_union.check_query_ids", never)
    schedule = strategy.prepare(problem, workspace)
    # Neither a copy of the ids nor the workspace's: the tensor that was given.
    assert schedule.query_ids is strategy.given is schedule.views["query_ids"]


def test_ids_that_leave_a_request_are_refused() -> None:
    selection = several_requests()
    problem = pw.make_problem(selection)
    ids = shuffled(selection)
    ids[0, [0, 64]] = ids[0, [64, 0]]
    with pytest.raises(ValueError, match="query_ids: got ids that repeat or leave a request"):
        FixedIds(problem, ids)
    strategy = FixedIds(problem, shuffled(selection))
    other = pw.make_problem(preset("mid", total_q=16, prefix=2048))
    with pytest.raises(ValueError, match=r"query_ids.shape: got \(2, 65\), supported: \(1, 16\)"):
        strategy.workspace(other)


@pytest.mark.parametrize("group_size", [8, 16])
def test_reorder_answers_the_moved_problem(group_size: int) -> None:
    selection = several_requests()
    problem = pw.make_problem(selection, group_size=group_size)
    ids = shuffled(selection)
    strategy = MaterialisedReorder(problem, ids, arithmetic="fp8")
    lse = torch.full(problem.q.shape[:2], torch.nan)
    out = strategy(problem, torch.full_like(problem.q, torch.nan), lse)
    exact, exact_lse = pw.exact_attention(strategy.moved(problem))
    for head in range(2):
        heads = slice(head * group_size, (head + 1) * group_size)
        rows = ids[head].long()
        assert nrms(out[rows][:, heads], exact[:, heads]) < 0.05
        assert torch.allclose(lse[rows][:, heads].double(), exact_lse[:, heads], atol=0.05)
    # Rows trade places inside a request, so that some causal edges move: this is another problem.
    assert nrms(out, pw.exact_attention(problem)[0]) > 0.1


def test_reorder_of_whole_pages_changes_no_position_that_matters() -> None:
    """In a window of one page, after it, the counts are those of reading through ids."""
    selection = preset("low", total_q=256, prefix=4096)
    problem = pw.make_problem(selection)
    ids = pw.load("regroup_w128").prepare(problem).query_ids
    moved, fixed = (kind(problem, ids).work(problem) for kind in (MaterialisedReorder, FixedIds))
    assert (moved.visits, moved.rounds) == (fixed.visits, fixed.rounds)
    # It holds moved copies of q, the page ids, outputs and LSE beside.
    rows, numbers = 256, 2 * 16 * 128 * 2 + 16 * 4 + 16 * 4
    assert moved.workspace_bytes == fixed.workspace_bytes + rows * numbers


def test_reorder_keeps_to_its_ids() -> None:
    selection = several_requests()
    problem = pw.make_problem(selection)
    strategy = MaterialisedReorder(problem, shuffled(selection))
    with pytest.raises(ValueError, match="query_ids: got ids, supported by reorder"):
        strategy.prepare(problem, query_ids=shuffled(selection, 1))


def test_random_ids_share_less_than_the_original_order() -> None:
    selection = preset("high", total_q=512, prefix=8192)
    problem = pw.make_problem(selection)
    found = FixedIds(problem, shuffled(selection)).work(problem)
    assert found.visits > 1.5 * pw.load("union8").work(problem).visits
    assert torch.equal(shuffled(selection), shuffled(selection))
    assert not torch.equal(shuffled(selection), shuffled(selection, 1))


def test_hashed_ids_bring_far_queries_together() -> None:
    """Communities of 400 in turn: a window of 128 holds no two queries of one; the hash finds them all."""
    page_sets = np.arange(400)[:, None] * 4 + np.arange(4)
    rows = np.concatenate([page_sets] * 8)[None].astype(np.int32)
    selection = pw.Selection("far", rows, np.array([0, 3200]), np.array([3200 + 1600 * 128]))
    support = selection_support(selection).numpy()
    ids = hashed_ids(support, [0, 3200], window=128, queries_per_group=8)
    assert sorted(ids[0].tolist()) == list(range(3200))
    groups = (ids[0] % 400).reshape(400, 8)
    assert (groups == groups[:, :1]).all()


def test_hashed_ids_ignore_what_all_select() -> None:
    """A page of everybody would be everybody's minimum under some hashes."""
    own = 1 + np.arange(64) % 2
    rows = np.stack([np.zeros(64, dtype=np.int64), own], axis=1)[None]
    ids = hashed_ids(rows, [0, 64, 64], window=64, queries_per_group=32)
    assert sorted(ids[0].tolist()) == list(range(64))
    assert {tuple(sorted(set((ids[0, s : s + 32] % 2).tolist()))) for s in (0, 32)} == {(0,), (1,)}


def test_ids_are_identity_past_the_last_request() -> None:
    selection = uniform(query_lens=[40, 0, 25], prefix_lens=[7000, 64, 9000], num_kv_heads=2, topk=6)
    support = np.pad(selection_support(selection).numpy(), ((0, 0), (0, 5), (0, 0)), constant_values=-1)
    for ids in (
        random_ids([0, 40, 40, 65], 2, 70),
        hashed_ids(support, [0, 40, 40, 65], window=16, queries_per_group=8),
    ):
        assert ids[:, 65:].tolist() == [list(range(65, 70))] * 2
        assert (np.sort(ids[:, :40]) == np.arange(40)).all() and (ids[:, :40] != np.arange(40)).any()
