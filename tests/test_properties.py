"""Properties of schedules and counts, on selections that hypothesis makes up; brute force over sets tells."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pageweaver as pw
from pageweaver.common import problem as common_problem
from pageweaver.strategies.page_union import PageUnion
from pageweaver.strategies.page_union.cuda import cuda_capacity, cuda_layout
from pageweaver.strategies.page_union.pairing import (
    ROUND_PAGES,
    Rounds,
    chunk_pages,
    incidence,
    most_selected,
    paired_limit,
    propose_pairs,
    work_lists,
)
from pageweaver.strategies.query_union.unions import members
from pageweaver.strategies.regroup.greedy import greedy_order_numpy

from .helpers import INT32_MAX, INT32_MIN, Target, poison, visible_pages

PAGE_SIZE = 64
OWNERS = ("per_query", "union4", "union8", "regroup_w64", "regroup_w128", "auto", "offline_w512")

# One cache for all problems: schedules never read it. Enough pages for the longest prefix.
CACHE = torch.zeros(64, PAGE_SIZE, 2, 128).bfloat16()


@st.composite
def problems(draw: st.DrawFn) -> pw.AttentionProblem:
    """Up to four requests, any ids; queries and cache without content."""
    heads = draw(st.integers(1, 2), label="num_kv_heads")
    group_size = draw(st.sampled_from([1, 4, 16]), label="group_size")
    topk = draw(st.integers(1, 6), label="topk")
    lengths = draw(st.lists(st.integers(0, 30) | st.integers(60, 150), max_size=4), label="lengths")
    prefixes = [draw(st.sampled_from([0, 1, 63, 64, 200, 640])) for _ in lengths]
    total_q = sum(lengths) + draw(st.integers(0, 3), label="past_rows")
    # Drawn by a seed: one by one, this many numbers would leave hypothesis small problems only.
    rng = np.random.default_rng(draw(st.integers(0, 2**32), label="seed"))
    span = draw(st.sampled_from([2, 5, 13]), label="span")
    ids = rng.integers(0, span, (heads, total_q, topk))
    odd = rng.choice([-1, -1, -2, INT32_MIN, INT32_MAX, 1000], ids.shape)
    ids = np.where(rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.2, 0.8])), odd, ids)
    used = [length + prefix for length, prefix in zip(lengths, prefixes, strict=True)]
    width = max([1, *(-(-tokens // PAGE_SIZE) for tokens in used)])
    cache = CACHE[:, :, :heads]
    return pw.AttentionProblem(
        q=torch.zeros(total_q, heads * group_size, 128).bfloat16(),
        k_cache=cache,
        v_cache=cache,
        q2k_indices=torch.from_numpy(ids.astype(np.int32)),
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int(),
        seqused_k=torch.tensor(used, dtype=torch.int32),
        page_table=torch.arange(width, dtype=torch.int32).expand(len(lengths), -1),
    )


def supports(problem: pw.AttentionProblem) -> list[list[set[tuple[int, int]]]]:
    """[num_kv_heads][total_q] sets of (request, page)."""
    requests = problem.request_ids.tolist()
    return [
        [{(requests[row], page) for page in pages} for row, pages in enumerate(rows)]
        for rows in visible_pages(problem)
    ]


def groups_of(problem: pw.AttentionProblem, size: int) -> list[list[int]]:
    """Slots of every group, by the words: consecutive, from each request's start, never across requests."""
    bounds = problem.cu_seqlens_q.tolist()
    return [
        list(range(start, min(start + size, last)))
        for first, last in pairwise(bounds)
        for start in range(first, last, size)
    ]


def greedy_pairs(shared: dict[tuple[int, int], int]) -> dict[int, int]:
    """One pair after another: most common queries first, ties to the lowest pages."""
    partner: dict[int, int] = {}
    for (a, b), count in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
        if count and a not in partner and b not in partner:
            partner[a], partner[b] = b, a
    return partner


@pytest.mark.parametrize("name", OWNERS)
@settings(max_examples=80)
@given(problem=problems(), resident=st.sampled_from([0, 10, 264]))
def test_union_schedule(name: str, problem: pw.AttentionProblem, resident: int) -> None:
    """Slots are a bijection; unions hold exactly what their queries selected; masks say exactly who did.

    A GPU that holds `resident` tiles at once runs fewer queries a tile in a small call.
    """
    with patch.object(common_problem, "RESIDENT_TILES", resident):
        check_union_schedule(name, problem, resident)


def check_union_schedule(name: str, problem: pw.AttentionProblem, resident: int) -> None:
    strategy = Target(name).load(problem)
    workspace = strategy.workspace(problem)
    poison(workspace)
    schedule = strategy.prepare(problem, workspace)
    sets = supports(problem)
    tile = 64 // problem.group_size
    size = {"per_query": 1, "union4": tile}.get(name, 2 * tile)
    assert schedule.queries_per_group == size  # type: ignore[attr-defined]
    expected = groups_of(problem, size)
    # Halved while the tiles of half as many queries all fit.
    run = max(t for t in (1, 2, 4, 8, 16, 32, 64) if t <= tile)
    while run > 1 and problem.num_kv_heads * problem.total_q / (run / 2) <= resident:
        run //= 2
    offsets = schedule.group_offsets.tolist()  # type: ignore[attr-defined]
    groups = [list(range(a, b)) for a, b in pairwise(offsets)]
    assert groups[: len(expected)] == expected and not any(groups[len(expected) :])
    requests = problem.request_ids.tolist()
    edges = visits = rounds = longest = live_groups = 0
    for head in range(problem.num_kv_heads):
        ids = schedule.query_ids[head].tolist()  # type: ignore[attr-defined]
        assert sorted(ids) == list(range(problem.total_q))
        assert [requests[query] for query in ids] == requests
        for group, slots in enumerate(groups):
            count = int(schedule.union_counts[head, group])  # type: ignore[attr-defined]
            pages = schedule.union_pages[head, group].tolist()  # type: ignore[attr-defined]
            words = schedule.union_masks[head, group].tolist()  # type: ignore[attr-defined]
            selected = [sets[head][ids[slot]] for slot in slots]
            union = {page for _, page in set().union(*selected)}
            assert pages == sorted(union) + [-1] * (len(pages) - len(union)) and count == len(union)
            for place, page in enumerate(pages):
                bits = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words[place]))
                found = {bit for bit in range(32 * len(words[place])) if bits >> bit & 1}
                assert found == {i for i, s in enumerate(selected) if page in {p for _, p in s}}
            for first in range(0, len(selected), min(run, size)):
                rounds += len(set().union(*selected[first : first + min(run, size)]))
            edges += sum(map(len, selected))
            visits += len(union)
            longest = max(longest, len(union))
            live_groups += bool(union)
    report = strategy.work(problem)
    assert (report.edges, report.visits, report.rounds) == (edges, visits, rounds)
    assert (report.groups, report.max_union) == (live_groups, longest)
    assert report.reuse == (edges / visits if visits else 0.0)
    assert report.mean_union == (visits / live_groups if live_groups else 0.0)
    assert (report.partials, report.saved_partials, report.partial_bytes) == (0, 0, 0)
    page_bytes = 2 * PAGE_SIZE * 128 * 2
    assert report.page_bytes == report.moved_bytes == rounds * page_bytes
    if name == "union8":
        assert pw.load("union8", mapping="cluster").work(problem).page_bytes == visits * page_bytes
    assert report.workspace_bytes == workspace.nbytes


@settings(max_examples=80)
@given(problem=problems())
def test_regroup_is_eq_6(problem: pw.AttentionProblem) -> None:
    """Windows and groups start anew in each request and KV head."""
    tile = 64 // problem.group_size
    bounds = problem.cu_seqlens_q.tolist()
    pages = problem.support.int().numpy()
    cases = product((("regroup_w64", 64), ("regroup_w128", 128)), ("visits", "rounds"))
    for (name, window), objective in cases:
        ids = pw.load(name, objective=objective).prepare(problem).query_ids.numpy()  # type: ignore[attr-defined]
        for head in range(problem.num_kv_heads):
            for first, last in pairwise(bounds):
                rows = pages[head, first:last]
                expected = first + greedy_order_numpy(rows, max(window, 2 * tile), 2 * tile, tile, objective)
                np.testing.assert_array_equal(ids[head, first:last], expected)


@pytest.mark.parametrize("name", ["union8", "regroup_w64", "page_union"])
@settings(max_examples=30)
@given(problem=problems(), data=st.data())
def test_order_of_ids_is_irrelevant(name: str, problem: pw.AttentionProblem, data: st.DataObject) -> None:
    """Permuted columns give the same schedule, tensor by tensor."""
    columns = data.draw(st.permutations(range(problem.topk)), label="columns")
    other = pw.AttentionProblem(
        **{f: getattr(problem, f) for f in problem.__dataclass_fields__}
        | {"q2k_indices": problem.q2k_indices[:, :, list(columns)]}
    )
    layout = pw.load(name).workspace_layout(problem)
    schedules = [pw.load(name).prepare(p) for p in (problem, other)]
    for field in set(layout) - {"partials", "lse_partials"}:
        first, second = (getattr(schedule, field) for schedule in schedules)
        assert torch.equal(first, second), field


@pytest.mark.parametrize("pairs", [True, False])
@settings(max_examples=80)
@given(problem=problems())
def test_page_union_schedule(pairs: bool, problem: pw.AttentionProblem) -> None:
    """Every edge once; pairs disjoint; partials saved are the queries that paired pages have in common."""
    strategy = PageUnion(pairs=pairs)
    workspace = strategy.workspace(problem)
    poison(workspace)
    schedule = strategy.prepare(problem, workspace)
    sets = supports(problem)
    requests = problem.request_ids.tolist()
    edges = partials = saved = visits = units = rounds = longest = 0
    for head in range(problem.num_kv_heads):
        offsets = schedule.unit_offsets[head].tolist()
        assert offsets == sorted(offsets) and offsets[0] == 0
        queries = schedule.unit_queries[head].tolist()
        slots = schedule.unit_slots[head].tolist()
        assert set(queries[offsets[-1] :]) <= {-1} and set(slots[offsets[-1] :]) <= {-1}
        covered: list[tuple[int, tuple[int, int]]] = []
        partner: dict[tuple[int, int], tuple[int, int]] = {}
        used_slots: list[tuple[int, int]] = []
        for unit, pages in enumerate(schedule.unit_pages[head].tolist()):
            part = slice(offsets[unit], offsets[unit + 1])
            listed = [page for page in pages if page >= 0]
            mine = queries[part]
            if not mine:
                assert listed == []
                continue
            assert listed and mine == sorted(set(mine)) and len({requests[q] for q in mine}) == 1
            covered += [(query, (requests[query], page)) for query in mine for page in listed]
            used_slots += list(zip(mine, slots[part], strict=True))
            if len(listed) == 2:
                a, b = ((requests[mine[0]], page) for page in listed)
                assert partner.get(a, b) == b and partner.get(b, a) == a
                partner[a], partner[b] = b, a
                saved += len(mine)
            units += 1
            visits += len(listed)
            longest = max(longest, len(listed))
            partials += len(mine)
            rounds += -(-len(mine) * problem.group_size // 64) * len(listed)
        expected = [(query, key) for query, keys in enumerate(sets[head]) for key in keys]
        assert sorted(covered) == sorted(expected)
        edges += len(expected)
        # The slots of a query count up from 0.
        counts = schedule.partial_counts[head].tolist()
        assert sorted(used_slots) == [(q, slot) for q, count in enumerate(counts) for slot in range(count)]
        owners: dict[tuple[int, int], set[int]] = {}
        for query, key in expected:
            owners.setdefault(key, set()).add(query)
        order = sorted(owners)
        shared = {
            (i, j): len(owners[order[i]] & owners[order[j]]) for i, j in combinations(range(len(order)), 2)
        }
        sequential = {order[a]: order[b] for a, b in greedy_pairs(shared).items()} if pairs else {}
        assert partner == sequential
    report = strategy.work(problem)
    assert (report.edges, report.partials, report.saved_partials) == (edges, partials, saved)
    assert edges - partials == saved and (pairs or saved == 0)
    assert (report.groups, report.visits, report.rounds, report.max_union) == (units, visits, rounds, longest)
    assert report.reuse == (edges / visits if visits else 0.0)
    assert report.mean_union == (visits / units if units else 0.0)
    # BF16 partials and FP32 LSE, written and read.
    assert report.partial_bytes == 2 * partials * problem.group_size * (128 * 2 + 4)
    assert report.page_bytes == visits * 2 * PAGE_SIZE * 128 * 2
    assert report.moved_bytes == report.page_bytes + report.partial_bytes
    assert report.workspace_bytes == workspace.nbytes


@settings(max_examples=150)
@given(
    rows=st.lists(st.sets(st.integers(0, 9), max_size=5), max_size=30),
    queries_per_tile=st.integers(1, 3),
    unit_tiles=st.integers(1, 3),
    pairs=st.booleans(),
    round_pages=st.integers(1, 10),
)
def test_pairs_and_work_lists(
    rows: list[set[int]], queries_per_tile: int, unit_tiles: int, pairs: bool, round_pages: int
) -> None:
    """Pairs are the sequential greedy's; units are bounded, every edge runs once.

    Pairs come first, then single pages round after round, of each the largest first.
    """
    support = np.full((len(rows), 5), -1, dtype=np.int64)
    for i, row in enumerate(rows):
        support[i, : len(row)] = sorted(row)
    matrix, keys = incidence(support, support + 100)
    pages = sorted(set().union(*rows))
    assert keys.tolist() == [100 + page for page in pages]
    owners = [{i for i, row in enumerate(rows) if page in row} for page in pages]
    assert [set(matrix[[i]].indices.tolist()) for i in range(len(pages))] == owners
    partner = propose_pairs(matrix) if pairs else np.full(len(pages), -1)
    shared = {(i, j): len(owners[i] & owners[j]) for i, j in combinations(range(len(pages)), 2)}
    expected = greedy_pairs(shared) if pairs else {}
    assert {a: b for a, b in enumerate(partner.tolist()) if b >= 0} == expected

    turns = np.array(pages, dtype=np.int64) // round_pages
    lists = work_lists(matrix, partner, queries_per_tile, unit_tiles, turns)
    sizes = np.diff(lists.unit_offsets)
    assert ((sizes >= 1) & (sizes <= unit_tiles * queries_per_tile)).all()
    order = [
        (b >= 0, 0 if b >= 0 else -turns[a], -(-size // queries_per_tile), -a, -start)
        for (a, b), size, start in zip(
            lists.unit_pages.tolist(), sizes.tolist(), lists.unit_offsets[:-1].tolist(), strict=True
        )
    ]
    assert order == sorted(order, reverse=True)
    covered = []
    for unit, (a, b) in enumerate(lists.unit_pages.tolist()):
        mine = lists.unit_queries[lists.unit_offsets[unit] : lists.unit_offsets[unit + 1]].tolist()
        assert mine == sorted(mine)
        assert b == -1 or (a < b and expected[a] == b)
        covered += [(query, page) for query in mine for page in (a, b) if page >= 0]
    assert sorted(covered) == sorted((i, pages.index(page)) for i, row in enumerate(rows) for page in row)
    assert lists.partial_counts.sum() == len(lists.unit_queries)
    # Slots follow the first page of the unit: one order of combining, whatever the order of the units.
    first_page = np.repeat(lists.unit_pages[:, 0], sizes)
    for query, count in enumerate(lists.partial_counts):
        mine = np.flatnonzero(lists.unit_queries == query)
        assert lists.unit_slots[mine[np.argsort(first_page[mine])]].tolist() == list(range(count))


@settings(max_examples=100)
@given(
    requests=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=9), max_size=4),
    limit=st.integers(1, 8),
)
def test_most_selected_pages(requests: list[list[int]], limit: int) -> None:
    ids = np.repeat(np.arange(len(requests)), [len(counts) for counts in requests]).astype(np.int64)
    flat = np.array([count for counts in requests for count in counts], dtype=np.int64)
    chosen = most_selected(flat, ids, limit)
    for request, counts in enumerate(requests):
        expected = sorted(range(len(counts)), key=lambda page: (-counts[page], page))[:limit]
        assert np.flatnonzero(chosen[ids == request]).tolist() == sorted(expected)


def test_unpaired_pages() -> None:
    """Pages that may not be paired stay alone, and leave their partners to others."""
    support = np.array([[0, 1, 2]] * 3 + [[1, 2, -1]], dtype=np.int64)
    matrix, _ = incidence(support, support)
    assert propose_pairs(matrix).tolist() == [-1, 2, 1]
    assert propose_pairs(matrix, np.array([True, True, False])).tolist() == [1, 0, -1]


def test_overlaps_fit_a_matrix() -> None:
    assert [paired_limit(1, 1, pages) for pages in (0, 1, 512, 1024, 8192)] == [0, 1, 512, 1024, 1024]
    assert paired_limit(0, 0, 7) == 7
    for heads, batch in ((1, 16), (4, 100), (8, 70000)):
        limit = paired_limit(heads, batch, 8192)
        assert heads * batch * limit**2 <= 2**22 < heads * batch * (limit + 1) ** 2


def test_rounds_fit_their_room() -> None:
    """One round wherever V of all selected pages has room; a smaller problem never needs more of it."""
    edges = 16384 * 16
    assert Rounds.of(1, 512, edges, 512) == Rounds(512, 1)
    assert Rounds.of(1, 8192, ROUND_PAGES, 1024) == Rounds(8192, 1)
    assert Rounds.of(0, 0, 0, 0) == Rounds(1, 1)
    assert Rounds.of(1, 8192, edges, 1024) == Rounds(ROUND_PAGES, 6)
    for batch, pages, some in product((1, 5, 32, 700), (1, 256, 1409, 8192), (1, 1408, 5000, edges)):
        paired = paired_limit(2, batch, pages)
        rounds = Rounds.of(batch, pages, some, paired)
        assert rounds.pages * (rounds.count - 1) < batch * pages <= rounds.pages * rounds.count
        # A CTA orders pages of one round, and pairs have room at once.
        assert rounds.count == 1 or rounds.pages % chunk_pages(batch, pages) == 0
        assert rounds.count == 1 or rounds.pages >= batch * paired
        most = Rounds.of(batch, pages, edges, paired).pages
        assert min(rounds.pages, some) <= min(most, edges)


def test_members_come_in_the_order_of_execution() -> None:
    problem = problem_by_hand()
    rank, group, slot, page = members(pw.load("union8").prepare(problem), 0)  # type: ignore[arg-type]
    assert list(zip(group.tolist(), rank.tolist(), slot.tolist(), page.tolist(), strict=True)) == [
        (0, 0, 0, 0),
        (0, 0, 2, 0),
        (1, 0, 8, 1),
        (0, 1, 0, 2),
        (0, 1, 7, 2),
        (0, 2, 7, 5),
    ]


def problem_by_hand() -> pw.AttentionProblem:
    """Nine rows of 16 heads: row 0 selects pages 0 and 2, row 2 page 0, row 7 pages 2 and 5, row 8 page 1."""
    ids = torch.full((1, 9, 2), -1, dtype=torch.int32)
    for row, pages in {0: (2, 0), 2: (0, 0), 7: (5, 2), 8: (1, -1)}.items():
        ids[0, row] = torch.tensor(pages)
    return pw.AttentionProblem(
        q=torch.zeros(9, 16, 128).bfloat16(),
        k_cache=CACHE[:, :, :1],
        v_cache=CACHE[:, :, :1],
        q2k_indices=ids,
        cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32),
        seqused_k=torch.tensor([640], dtype=torch.int32),
        page_table=torch.arange(10, dtype=torch.int32)[None],
    )


@pytest.mark.parametrize(
    ("name", "edges", "groups", "visits", "rounds"),
    [
        ("per_query", 6, 4, 6, 6),
        ("union4", 6, 3, 2 + 2 + 1, 5),
        ("union8", 6, 2, 3 + 1, 2 + 2 + 1),
        # Empty rows cost nothing and go first: 1, 3, 4, 5 | 6, 2, 0, 7 and 8.
        ("regroup_w64", 6, 2, 3 + 1, 3 + 1),
        # Pairs (0, 2) and, with nothing in common left, pages 5 and 1 alone: lists 0+2, 0, 2, 5, 1.
        ("page_union", 6, 5, 6, 6),
    ],
)
def test_counts_by_hand(name: str, edges: int, groups: int, visits: int, rounds: int) -> None:
    # Nine queries run one a tile, where a round is an edge.
    assert pw.load(name).work(problem_by_hand()).rounds == 6
    with patch.object(common_problem, "RESIDENT_TILES", 0):  # full tiles
        report = pw.load(name).work(problem_by_hand())
    assert (report.edges, report.groups, report.visits, report.rounds) == (edges, groups, visits, rounds)
    assert report.to_dict()["visits"] == visits and report.strategy == name


SHAPES = st.fixed_dictionaries(
    {
        "num_kv_heads": st.sampled_from([1, 2, 8]),
        "batch_size": st.integers(1, 160),
        "max_pages": st.one_of(st.integers(1, 600), st.integers(1, 8320)),
        "total_q": st.integers(1, 4000),
        "topk": st.integers(1, 32),
    }
)


def page_layout(shape: dict[str, int], pairs: bool, arithmetic: str = "fp8") -> tuple[Any, Any]:
    problem = SimpleNamespace(**shape, group_size=16, page_size=PAGE_SIZE)
    base = {"unit_pages": ((shape["num_kv_heads"], 1, 2), torch.int32)}
    return problem, cuda_layout(problem, base, pairs, arithmetic)  # type: ignore[arg-type]


@settings(max_examples=400)
@given(shape=SHAPES, pairs=st.booleans())
def test_every_page_of_a_round_has_a_place(shape: dict[str, int], pairs: bool) -> None:
    """Places that rounds number run to `pages`; in one round no further than there are edges."""
    problem, layout = page_layout(shape, pairs)
    rounds = Rounds.of(
        problem.batch_size, problem.max_pages, problem.total_q * problem.topk, layout["overlaps"][0][2]
    )
    places = layout["packed_v"][0][0] // problem.num_kv_heads
    assert places == (
        min(rounds.pages, problem.total_q * problem.topk) if rounds.count == 1 else rounds.pages
    )
    assert rounds.count * rounds.pages >= problem.batch_size * problem.max_pages


@settings(max_examples=400)
@given(shape=SHAPES, pairs=st.booleans(), data=st.data())
def test_a_workspace_serves_smaller_problems(shape: dict[str, int], pairs: bool, data: st.DataObject) -> None:
    """Fewer requests, narrower tables, fewer rows and columns need no more of any buffer."""
    problem, layout = page_layout(shape, pairs)
    capacity = cuda_capacity(problem, layout)
    fixed = ("num_kv_heads",)
    smaller = {
        name: size if name in fixed else data.draw(st.integers(1, size)) for name, size in shape.items()
    }
    for name, (wanted, dtype) in page_layout(smaller, pairs)[1].items():
        assert capacity[name][1] == dtype and math.prod(wanted) <= math.prod(capacity[name][0]), name


@pytest.mark.parametrize(("heads", "fewer"), [(16, 15), (32, 31), (8, 1)])
def test_a_workspace_serves_fewer_kv_heads(heads: int, fewer: int) -> None:
    """Each of them pairs more pages, and room for V goes by whole chunks of 448."""
    shape = {"batch_size": 19, "max_pages": 2836, "total_q": 26_005, "topk": 30}
    capacity = cuda_capacity(*page_layout({**shape, "num_kv_heads": heads}, pairs=True))
    for name, (wanted, _) in page_layout({**shape, "num_kv_heads": fewer}, pairs=True)[1].items():
        assert math.prod(wanted) <= math.prod(capacity[name][0]), name
