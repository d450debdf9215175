"""strategy="auto" on the reference backend: what it chooses, and that it shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.supports import preset

from .helpers import random_problem


@pytest.mark.parametrize("objective", ["visits", "rounds"])
@pytest.mark.parametrize("name", ["low", "high", "interleaved"])
def test_takes_the_best_of_three(name: str, objective: str) -> None:
    """Each window has the fewest rounds that the three orders give, so their sum is at most each one's."""
    problem = pw.make_problem(preset(name, total_q=700, prefix=9000))
    strategy = pw.load("auto", objective=objective)
    schedule: Any = strategy.prepare(problem)
    choices = schedule.window_choices
    assert choices.shape == (1, 6)
    others = [pw.load("union8")] + [
        pw.load(other, objective=objective) for other in ("regroup_w64", "regroup_w128")
    ]
    ids = torch.stack([other.prepare(problem).query_ids for other in others])
    for window, choice in enumerate(choices[0].tolist()):
        # A half may have given up and kept the original order.
        for start in range(window * 128, min((window + 1) * 128, 700), 64 if choice == 1 else 128):
            slots = slice(start, min(start + (64 if choice == 1 else 128), 700))
            allowed = {0: (0,), 1: (0, 1), 2: (2,)}[choice]
            assert any(torch.equal(schedule.query_ids[0, slots], ids[k, 0, slots]) for k in allowed)
    rounds = [other.work(problem).rounds for other in others]
    # Searches that gave up might have found a little.
    assert strategy.work(problem).rounds <= 1.005 * min(rounds)


def test_a_search_gives_up_where_its_first_slots_gain_nothing() -> None:
    """Only the second half of a window can gain: its own search goes on, those of the rest give up."""
    problem = pw.make_problem(preset("low", total_q=128, prefix=9000))
    pages = problem.q2k_indices
    pages[:] = torch.arange(16, dtype=torch.int32)
    pages[:, 64::2] += 16
    schedule: Any = pw.load("auto").prepare(problem)
    assert pw.load("regroup_w128").work(problem).rounds < pw.load("union8").work(problem).rounds
    assert schedule.window_choices.tolist() == [[1]]
    assert torch.equal(schedule.query_ids[0, :64], torch.arange(64, dtype=torch.int32))


def test_original_order_wins_ties() -> None:
    problem = pw.make_problem(preset("low", total_q=256, prefix=9000))
    problem.q2k_indices[:] = problem.q2k_indices[:, :1]
    schedule: Any = pw.load("auto").prepare(problem)
    assert not schedule.window_choices.any()
    assert torch.equal(schedule.query_ids[0], torch.arange(256, dtype=torch.int32))


def test_groups_as_large_as_the_window() -> None:
    """At group size 1 a group is a window of 128: halves cannot be searched."""
    problem = random_problem(lengths=(300,), prefixes=(4000,), group_size=1)
    schedule: Any = pw.load("auto").prepare(problem)
    assert not (schedule.window_choices == 1).any()


def test_given_ids_choose_nothing() -> None:
    problem = random_problem()
    ids = torch.arange(problem.total_q, dtype=torch.int32).expand(problem.num_kv_heads, -1).contiguous()
    schedule: Any = pw.load("auto").prepare(problem, query_ids=ids)
    assert schedule.window_choices is None


def test_objective_is_named() -> None:
    with pytest.raises(ValueError, match=r"objective: got 'pages', supported: \('visits', 'rounds'\)"):
        pw.load("auto", objective="pages")
