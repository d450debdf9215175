"""strategy="auto" on the reference backend: what it chooses, and that it shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.common.supports import preset
from pageweaver.strategies.regroup import online
from pageweaver.strategies.regroup.online import count_rounds, least_rounds, sought_below

from .helpers import choices_problem, random_problem


@pytest.fixture
def searches_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every window is searched, also in the small calls of these tests."""
    monkeypatch.setattr(online, "sought_below", lambda _: 257)


@pytest.mark.usefixtures("searches_all")
@pytest.mark.parametrize("objective", ["visits", "rounds"])
@pytest.mark.parametrize("name", ["low", "high", "interleaved"])
def test_takes_one_of_three(name: str, objective: str) -> None:
    """Each window has the order that it says; W128's is left where what it saves is not worth its search."""
    problem = pw.make_problem(preset(name, total_q=700, prefix=9000))
    strategy = pw.load("auto", objective=objective)
    schedule: Any = strategy.prepare(problem)
    assert schedule.window_choices.shape == (1, 6)
    others = [pw.load("union8")] + [
        pw.load(other, objective=objective) for other in ("regroup_w64", "regroup_w128")
    ]
    ids = torch.stack([other.prepare(problem).query_ids[0] for other in others])
    for window, choice in enumerate(schedule.window_choices[0].tolist()):
        for half in range(window * 128, min((window + 1) * 128, 700), 64):
            slots = slice(half, min(half + 64, 700))
            # One of the halves may have given up.
            allowed = (0, 1) if choice == 1 else (choice,)
            assert any(torch.equal(schedule.query_ids[0, slots], ids[k, slots]) for k in allowed)
    original, halves = (other.work(problem).rounds for other in others[:2])
    # A round of 3,441 is less than building unions again costs.
    assert strategy.work(problem).rounds <= 1 + min(original, halves)


@pytest.mark.usefixtures("searches_all")
@pytest.mark.parametrize("objective", ["visits", "rounds"])
def test_every_way_to_choose(objective: str) -> None:
    problem = choices_problem()
    schedule: Any = pw.load("auto", objective=objective).prepare(problem)
    assert schedule.window_choices[0, :4].tolist() == [0, 1, 1, 2]
    assert torch.equal(schedule.query_ids[0, :192], torch.arange(192, dtype=torch.int32))
    halves: Any = pw.load("regroup_w64", objective=objective).prepare(problem)
    found: Any = pw.load("regroup_w128", objective=objective).prepare(problem)
    support = problem.support[0].numpy()

    def rounds(order: torch.Tensor, first: int, slots: int) -> int:
        return count_rounds(support[order[0, first : first + slots]], 4)

    # Both searches of the third window save the same, and that of all of it stops half way.
    original = torch.arange(640)[None]
    assert rounds(found.query_ids, 256, 128) == rounds(halves.query_ids, 256, 128)
    assert rounds(found.query_ids, 256, 32) < rounds(original, 256, 32)
    # In the last one the search saves rounds at first, and goes on.
    assert schedule.window_choices[0, 4] != 2
    assert rounds(found.query_ids, 512, 32) < rounds(original, 512, 32)
    assert 16 * rounds(halves.query_ids, 512, 128) > 9 * np.count_nonzero(support[512:640] >= 0)
    assert 15 * rounds(found.query_ids, 512, 128) > 16 * rounds(original, 512, 128)


@pytest.mark.usefixtures("searches_all")
def test_original_order_wins_ties() -> None:
    problem = pw.make_problem(preset("low", total_q=256, prefix=9000))
    problem.q2k_indices[:] = problem.q2k_indices[:, :1]
    schedule: Any = pw.load("auto").prepare(problem)
    assert not schedule.window_choices.any()
    assert torch.equal(schedule.query_ids[0], torch.arange(256, dtype=torch.int32))


@pytest.mark.usefixtures("searches_all")
def test_groups_as_large_as_the_window() -> None:
    """At group size 1 a group is a window of 128: halves cannot be searched."""
    problem = random_problem(lengths=(300,), prefixes=(4000,), group_size=1)
    schedule: Any = pw.load("auto").prepare(problem)
    assert not (schedule.window_choices == 1).any()


def test_searches_where_it_can_pay() -> None:
    """A bound near the original order's rounds leaves nothing to save, a small call too little time."""
    for name, total_q, searched in (
        ("low", 1000, False),
        ("interleaved", 1000, True),
        ("interleaved", 500, False),
        ("low", 4000, True),
        ("high", 4000, False),
    ):
        problem = pw.make_problem(preset(name, total_q=total_q, prefix=49152))
        schedule: Any = pw.load("auto").prepare(problem)
        assert bool(schedule.window_choices.any()) == searched, (name, total_q)
        support, most = problem.support[0].numpy(), sought_below(problem)
        for first, choice in zip(range(0, total_q, 128), schedule.window_choices[0].tolist(), strict=False):
            window = support[first : first + 128]
            # Whatever the order, none gets below the bound.
            least = least_rounds(window, 4)
            order = schedule.query_ids[0, first : first + 128].numpy()
            assert least <= count_rounds(support[order], 4)
            assert choice == 0 or 256 * least < most * count_rounds(window, 4)


def test_bound_of_rounds() -> None:
    """Page 0 of six queries takes two tiles of four at least, each of the others one."""
    pages = np.array([[0, k + 1] for k in range(6)] + [[-1, 1], [-1, -1]])
    assert least_rounds(pages, 4) == 2 + 6
    assert least_rounds(pages, 8) == 1 + 6
    assert least_rounds(pages[:0], 4) == 0


def test_more_is_searched_in_larger_calls() -> None:
    """From none to nearly 0.95 of the original order's rounds."""
    sizes = (1, 300, 1000, 4000, 16000)
    problems = [pw.make_problem(preset("high", total_q=n, prefix=9000)) for n in sizes]
    limits = [sought_below(problem) for problem in problems]
    assert limits == sorted(limits) and limits[0] == 0 and limits[1] < 64 and 224 < limits[-1] < 243
    # Four queries a tile: a bound is a quarter of the rounds at least.
    assert pw.load("auto").prepare(problems[1]).identity and not pw.load("auto").prepare(problems[2]).identity


def test_given_ids_choose_nothing() -> None:
    problem = random_problem()
    ids = torch.arange(problem.total_q, dtype=torch.int32).expand(problem.num_kv_heads, -1).contiguous()
    schedule: Any = pw.load("auto").prepare(problem, query_ids=ids)
    assert schedule.window_choices is None


def test_objective_is_named() -> None:
    with pytest.raises(ValueError, match=r"objective: got 'pages', supported: \('visits', 'rounds'\)"):
        pw.load("auto", objective="pages")


@pytest.mark.usefixtures("searches_all")
def test_searches_nothing_where_a_tile_holds_one_query() -> None:
    """Every order has as many rounds as there are edges: the original one stands, without a search."""
    problem = pw.make_problem(preset("interleaved", total_q=264, prefix=9000))
    strategy = pw.load("auto")
    schedule: Any = strategy.prepare(problem)
    assert schedule.identity and not schedule.window_choices.any()
    assert torch.equal(schedule.query_ids[0], torch.arange(264, dtype=torch.int32))
    work = strategy.work(problem)
    assert work.rounds == work.edges == 264 * 16
    larger: Any = strategy.prepare(pw.make_problem(preset("interleaved", total_q=265, prefix=9000)))
    assert not larger.identity and larger.window_choices.any()
