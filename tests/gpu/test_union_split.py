"""Two E4M3 parts on Hopper: what the FP8 kernels are asked, with the tolerances of BF16.

The modules of the union kernels hold the cases; this one says on what they run.
"""

from __future__ import annotations

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import nrms

from ..helpers import RANDOM_NRMS, Target, assert_same_bits, replaced
from .hopper import SPLIT_TARGETS, WATCHDOG, missing
from .problems import LSE_ERROR, exact, selected
from .test_union_accuracy import TestAccuracy, TestOnes, test_huge_logits  # noqa: F401
from .test_union_bits import TestSameBits  # noqa: F401
from .test_union_graphs import TestC36Graphs  # noqa: F401

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not SPLIT_TARGETS, reason="the union kernels have no arithmetic 'split'"),
    WATCHDOG,
]


# Orders have no arithmetic of their own: that they change no bit is enough.
ORIGINAL_ORDER = tuple(target for target in SPLIT_TARGETS if target.strategy in ("union4", "union8"))


@pytest.fixture(params=ORIGINAL_ORDER, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


@pytest.fixture
def peers() -> tuple[Target, ...]:
    return SPLIT_TARGETS


@pytest.mark.parametrize("power", [2.0**-40, 2.0**40])
def test_powers_of_two(target: Target, power: float) -> None:
    """A power of two in the queries, taken out of the softmax scale, changes no bit."""
    problem = selected("mid", 300)
    moved = replaced(problem, q=problem.q * power, softmax_scale=problem.softmax_scale / power)
    assert_same_bits(target.run(moved), target.run(problem))


def test_outliers(target: Target) -> None:
    """An element far above the others of its head-row leaves these their eight bits."""
    problem = selected("mid", 300)
    q, k_cache = problem.q.clone(), problem.k_cache.clone()
    q[:, :, 5] = 64.0
    k_cache.view(torch.uint8)[..., 5] = 0
    uneven = replaced(problem, q=q, k_cache=k_cache)
    result, (out, lse) = target.run(uneven), exact(uneven)
    assert nrms(result.out, out) <= RANDOM_NRMS["split"]
    assert (result.lse - lse).abs().max() <= LSE_ERROR["split"]


def test_both_arithmetics_take_turns(target: Target) -> None:
    """One problem, two arithmetics, one after the other: neither leaves anything for the other."""
    problem = selected("high", 1000)
    expected = target.run(problem)
    fp8 = pw.load(target.strategy, arithmetic="fp8", **target.options)
    strategy = target.load(problem)
    workspace = strategy.workspace(problem)
    single = fp8(problem)
    for _ in range(2):
        assert torch.equal(strategy(problem, None, None, workspace).float().cpu(), expected.out)
        assert torch.equal(fp8(problem, None, None, workspace), single)
    assert not torch.equal(single.float().cpu(), expected.out)
