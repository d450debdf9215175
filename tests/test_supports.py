"""Synthetic selections: what every row promises, and what the presets are calibrated to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageweaver.common import supports
from pageweaver.common.captures import Selection
from pageweaver.common.supports import PRESETS, preset

GENERATORS: dict[str, Callable[..., Selection]] = {
    name: getattr(supports, name) for name in ("affinity", "streams", "interleaved", "uniform", "local")
}
CALIBRATED = {"low": 2.39, "mid": 4.11, "high": 5.70, "interleaved": 1.12}
every_generator = pytest.mark.parametrize("generator", GENERATORS.values(), ids=list(GENERATORS))


def visits(ids: np.ndarray, group: int = 8) -> int:
    """V of Eq. 3 for one KV head and one request, rows in the given order."""
    chosen = ids >= 0
    keys = (np.arange(len(ids)) // group)[:, None] * (int(ids.max()) + 1) + ids.astype(np.int64)
    return int(np.unique(keys[chosen]).size)


def reuse(selection: Selection, group: int = 8) -> float:
    """Edges per visit (Eq. 3)."""
    ids = selection.q2k_indices
    return int((ids >= 0).sum()) / sum(visits(head, group) for head in ids)


def greedy_order(ids: np.ndarray, window: int = 128, group: int = 8) -> np.ndarray:
    """Eq. 6, plainly: ids [rows, topk] of one request and KV head, unique in a row, all valid."""
    order = []
    for start in range(0, len(ids), window):
        rows = ids[start : start + window]
        member = np.zeros((len(rows), int(ids.max()) + 1), bool)
        np.put_along_axis(member, rows.astype(np.int64), True, axis=1)
        taken = np.zeros(len(rows), bool)
        cost = np.zeros(len(rows), np.int64)
        for slot in range(len(rows)):
            if slot % group == 0:
                union = np.zeros(member.shape[1], bool)
                cost = member.sum(axis=1)
            best = int(np.where(taken, np.iinfo(np.int64).max, cost).argmin())
            taken[best] = True
            order.append(start + best)
            fresh = np.flatnonzero(member[best] & ~union)
            union[fresh] = True
            cost = cost - member[:, fresh].sum(axis=1)
    return np.array(order)


def check_rows(selection: Selection, first_page: bool) -> None:
    """What the module promises of every row."""
    ids = selection.q2k_indices.astype(np.int64)
    local = (selection.positions // selection.page_size)[None, :, None]
    chosen = ids >= 0
    assert ids.min(initial=0) >= -1 and (ids <= local).all()
    np.testing.assert_array_equal(
        chosen.sum(axis=2), np.broadcast_to(np.minimum(selection.topk, local[..., 0] + 1), ids.shape[:2])
    )
    # Ascending and unique, -1 last.
    assert ((np.diff(ids, axis=2) > 0) | ~chosen[..., 1:]).all()
    assert (chosen[..., :-1] | ~chosen[..., 1:]).all()
    assert (ids == local).any(axis=2).all()
    # With one column the local page takes it.
    if first_page and selection.topk > 1:
        assert (ids[..., 0] == 0).all()


@every_generator
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 900)), max_size=4),
    topk=st.integers(1, 33),
    page_size=st.sampled_from([1, 7, 64, 128]),
    num_kv_heads=st.integers(1, 3),
    first_page=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_rows(
    generator: Callable[..., Selection],
    requests: list[tuple[int, int]],
    topk: int,
    page_size: int,
    num_kv_heads: int,
    first_page: bool,
    seed: int,
) -> None:
    selection = generator(
        query_lens=[q for q, _ in requests],
        prefix_lens=[p for _, p in requests],
        topk=topk,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        first_page=first_page,
        seed=seed,
    )
    assert selection.q2k_indices.shape == (num_kv_heads, sum(q for q, _ in requests), topk)
    assert selection.seqused_k.tolist() == [q + p for q, p in requests]
    check_rows(selection, first_page)


@every_generator
def test_default_shape_is_fast_and_seeded(generator: Callable[..., Selection]) -> None:
    generator(64, 4096)
    begin = time.perf_counter()
    selection = generator()
    # 0.1 s where the machine is idle.
    assert time.perf_counter() - begin < 1.0
    assert selection.q2k_indices.shape == (1, 15272, 16)
    assert selection.positions[[0, -1]].tolist() == [49152, 64423]
    again, other = generator(), generator(seed=1)
    assert selection.sha256 == again.sha256
    assert (selection.sha256 == other.sha256) == (
        generator is supports.local
    )  # the plain window has no chance in it
    assert selection.metadata["generator"] in GENERATORS and selection.metadata["seed"] == 0


@every_generator
def test_requests_do_not_depend_on_their_batch_mates(generator: Callable[..., Selection]) -> None:
    one = generator(query_lens=[30, 20], prefix_lens=[5000, 9000], num_kv_heads=2)
    two = generator(query_lens=[30, 50], prefix_lens=[5000, 100], num_kv_heads=2)
    alone = generator(30, 5030)
    np.testing.assert_array_equal(one.q2k_indices[:, :30], two.q2k_indices[:, :30])
    np.testing.assert_array_equal(one.q2k_indices[:1, :30], alone.q2k_indices)


def test_heads_differ() -> None:
    heads = supports.streams(200, 40000, num_kv_heads=2).q2k_indices
    assert (heads[0] != heads[1]).any()


def test_uniform_is_uniform() -> None:
    # Page 499 is the local one of all 4,000 rows, so the other 15 columns fall on 499 pages: 120 each.
    ids = supports.uniform(100, 500 * 128, num_kv_heads=40).q2k_indices
    counts = np.bincount(ids.ravel(), minlength=500)[:499]
    assert counts.mean() == pytest.approx(4000 * 15 / 499)
    assert counts.std() < 1.2 * counts.mean() ** 0.5


def test_local_is_a_sliding_window() -> None:
    ids = supports.local(200, 20000).q2k_indices[0]
    assert (np.diff(ids, axis=1) == 1).all()
    wide = supports.local(200, 20000, span_pages=40)
    local = wide.positions[:, None] // 128
    assert (wide.q2k_indices[0] > local - 40).all() and (np.diff(wide.q2k_indices[0], axis=1) > 1).any()


def test_interleaved_communities_share_everything_within_and_nothing_across() -> None:
    ids = supports.interleaved(240, 50000, communities=8).q2k_indices[0]
    sets = [set(row.tolist()) for row in ids]
    assert all(len(sets[i] & sets[i + 8]) >= 15 for i in range(200))
    # Page 0 and the local page are common to neighbours.
    assert all(len(sets[i] & sets[i + 1]) <= 2 for i in range(200))


def test_affinity_and_run_length_raise_reuse() -> None:
    values = [
        reuse(supports.affinity(2000, 40000, affinity=a, run_length=r, num_clusters=32))
        for a, r in ((0.0, 1), (1.0, 1), (1.0, 50))
    ]
    assert values[0] < values[1] < values[2]


def test_affinity_selects_from_the_clusters_set() -> None:
    ids = supports.affinity(300, 60000, num_clusters=1, affinity=1.0, cluster_pages=20).q2k_indices[0]
    # The set, page 0, the local pages and the few that replace a page of the set still to come.
    assert np.unique(ids[:100]).size <= 20 + 2 + 100 // 128 + 1 + 5


def test_stream_parameters_do_what_they_say() -> None:
    steady: dict[str, Any] = {"num_streams": 1, "stay": 1.0, "drift": 0.0, "noise": 0.0}
    assert reuse(supports.streams(1000, 60000, **steady)) > 7.5
    for change in ({"drift": 0.2}, {"noise": 0.2}, {"num_streams": 6, "stay": 0.5}):
        assert reuse(supports.streams(1000, 60000, **{**steady, **change})) < 5


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("seed", range(3))
def test_presets_are_calibrated(name: str, seed: int) -> None:
    selection = preset(name, seed=seed)
    assert selection.name == f"synthetic.{name}" and selection.metadata["preset"] == name
    check_rows(selection, first_page=True)
    measured = reuse(selection)
    assert measured == pytest.approx(CALIBRATED[name], rel=0.02)
    if seed == 0:
        assert measured == pytest.approx(PRESETS[name].reuse, abs=0.002)


@pytest.mark.parametrize("name", CALIBRATED)
def test_presets_save_what_they_say(name: str) -> None:
    ids = preset(name).q2k_indices[0]
    order = greedy_order(ids)
    assert np.array_equal(np.sort(order), np.arange(len(ids)))
    saving = 1 - visits(ids[order]) / visits(ids)
    assert saving == pytest.approx(PRESETS[name].saving_w128, abs=0.002)
    # The arrays that the presets were modelled on saved 13.1%, 7.5%, nothing and 70%.
    assert saving == pytest.approx(
        {"low": 0.131, "mid": 0.075, "high": 0.0, "interleaved": 0.70}[name], abs=0.01
    )


def test_preset_of_another_size() -> None:
    selection = preset("mid", total_q=100, prefix=1000, seed=4)
    assert selection.total_q == 100 and selection.seqused_k.tolist() == [1100]
    check_rows(selection, first_page=True)
    assert preset("low", total_q=0, prefix=0).total_q == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: preset("huge"), "name: got 'huge', supported: low, mid, high, interleaved"),
        (lambda: supports.uniform(10, 5), "context: got 5, supported: at least 10"),
        (lambda: supports.uniform(-1), "total_q: got -1"),
        (lambda: supports.uniform(query_lens=[1]), "query_lens, prefix_lens: got one of them"),
        (lambda: supports.uniform(query_lens=[1], prefix_lens=[1, 2]), "prefix_lens: got 2 values"),
        (lambda: supports.uniform(query_lens=[1], prefix_lens=[-1]), "prefix_lens: got -1"),
        (lambda: supports.uniform(5, query_lens=[1], prefix_lens=[1]), "total_q, context: got 5, None"),
        (lambda: supports.uniform(5, topk=0), "topk: got 0"),
        (lambda: supports.uniform(5, page_size=0), "page_size: got 0"),
        (lambda: supports.uniform(5, num_kv_heads=0), "num_kv_heads: got 0"),
        (lambda: supports.uniform(5, seed=-1), "seed: got -1"),
        (lambda: supports.affinity(5, affinity=1.5), "affinity: got 1.5, supported: 0 to 1"),
        (lambda: supports.affinity(5, run_length=0.5), "run_length: got 0.5"),
        (lambda: supports.affinity(5, num_clusters=0), "num_clusters: got 0"),
        (lambda: supports.affinity(5, cluster_pages=0), "cluster_pages: got 0"),
        (lambda: supports.streams(5, drift=float("nan")), "drift: got nan"),
        (lambda: supports.streams(5, num_streams=0), "num_streams: got 0"),
        (lambda: supports.interleaved(5, communities=0), "communities: got 0"),
        (lambda: supports.local(5, span_pages=3), "span_pages: got 3, supported: at least 16"),
    ],
)
def test_refusals(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_lengths_must_be_integers() -> None:
    with pytest.raises(TypeError, match="query_lens: got float"):
        supports.uniform(query_lens=[1.5], prefix_lens=[1])  # type: ignore[list-item]
