"""union4 and union8 on Hopper: their numbers against float64 and against their torch twin.

Probabilities sum to one as rounded, so that V = 1 comes back. In FP8, 3% is half of what one biased rounding
of them would show; in two parts one step of BF16 is allowed, half of what cut-off low parts would show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..helpers import (
    E4M3,
    RANDOM_LSE_ERROR,
    Target,
    assert_same_bits,
    constant,
    paged_case,
    random_problem,
    replaced,
)
from .hopper import WATCHDOG, missing
from .problems import (
    DEVICE,
    LONG,
    SIZES,
    assert_accurate,
    exact,
    long_context,
    messy,
    run_alone_and_crowded,
    selected,
    twin,
)

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

V_ONE_ERROR = {"fp8": 0.03, "split": 2.0**-8}


class TestAccuracy:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_messy(self, target: Target, case: int) -> None:
        assert_accurate(target, messy(case))

    @pytest.mark.parametrize("name", ["low", "mid", "high"])
    def test_selections(self, target: Target, name: str) -> None:
        assert_accurate(target, selected(name, 1000))

    @pytest.mark.parametrize("case", range(len(LONG)))
    def test_a_million_tokens(self, target: Target, case: int) -> None:
        assert_accurate(target, long_context(case))


@pytest.mark.parametrize("size", [1e2, 1e4, 1e7, 1e15, 1e30, 3e37])
@pytest.mark.parametrize("group_size", [16, 2])
def test_huge_logits(target: Target, size: float, group_size: int) -> None:
    """Rounding of logits far from 0 leaves a row's largest probability alone, and other rows too.

    Such rows are nearly one-hot. The tensor core keeps 13 bits of a product, so the kernel may turn a
    near-tie that the twin does not: about one head-row in a hundred. A row that lost its largest probability
    would be empty or wild, and all of them would.
    """
    problem = random_problem(seed=7, group_size=group_size, device="cuda")
    scale = torch.ones(problem.total_q, 1, 1, device="cuda")
    scale[::2] = size
    huge = replaced(problem, q=(problem.q.float() * scale).bfloat16())
    result, wanted = run_alone_and_crowded(target, huge), twin(target).run(huge)
    assert result.lse.isfinite().equal(wanted.lse.isfinite())
    error = (result.out - wanted.out)[::2].norm(dim=-1) / wanted.out[::2].norm(dim=-1).clamp(min=1e-6)
    assert (error > 0.1).float().mean() <= 0.05
    assert_same_bits(target.run(problem)[1::2], result[1::2])


class TestOnes:
    """V = 1 comes back, whatever the probabilities are rounded to."""

    @pytest.mark.parametrize(
        ("q0", "key"),
        [
            # One key above 2,047 others by 0 to 0.18: all of them are rounded alike, and not the largest.
            (torch.linspace(0, 2, 16), lambda _, positions: (positions == 3).float()),
            (torch.linspace(0, 2, 16), lambda _, positions: (positions == 2040).float()),
            # Rising, falling and negative logits; mass on one page, on one key, on all of 2,000.
            (torch.linspace(-16, 16, 16), lambda _, positions: positions / 512 - 2),
            (torch.linspace(-300, 300, 16), lambda _, positions: (positions % 7).float()),
            (torch.linspace(0, 0.1, 16), lambda _, positions: (positions % 9).float() - 4),
        ],
    )
    def test_one(self, target: Target, q0: torch.Tensor, key: Any) -> None:
        problem = paged_case(
            [list(range(16))] * 8,
            prefixes=[2040],
            q0=q0.expand(8, 16),
            k0=key,
            v=constant(1.0),
            device=DEVICE,
        )
        result = run_alone_and_crowded(target, problem)
        assert (result.out - 1).abs().max() <= V_ONE_ERROR[target.arithmetic]
        assert (result.lse - exact(problem)[1]).abs().max() <= RANDOM_LSE_ERROR[target.arithmetic]

    @pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
    def test_random(self, target: Target, size: float) -> None:
        problem = selected("mid", 1000)
        ones = torch.ones(problem.v_cache.shape, device=DEVICE).to(E4M3)
        result = run_alone_and_crowded(target, replaced(problem, v_cache=ones, q=problem.q * size))
        assert (result.out - 1).abs().max() <= V_ONE_ERROR[target.arithmetic]


@pytest.mark.parametrize("logit", [1e-9, 1e-4, 0.5, 3.0, 1e4, 1e30])
def test_largest_sums(target: Target, logit: float) -> None:
    """Scores may be FP16: nothing overflows where every product is the largest, nor do small factors vanish.

    All dims of the queries are 1, all keys 448 in page 0 and -448 in page 1, some of it not visible yet.
    """
    problem = paged_case(
        [[0, 1]] * 8,
        prefixes=[200],
        q0=1.0,
        k0=lambda _, positions: 448.0 - 896.0 * (positions // 128),
        device=DEVICE,
        softmax_scale=logit / (128 * 448),
    )
    keys = problem.k_cache.float()[..., :1].expand(problem.k_cache.shape).to(E4M3)
    result = run_alone_and_crowded(target, replaced(problem, q=torch.ones_like(problem.q), k_cache=keys))
    visible = torch.tensor([128.0, 73.0]).double().repeat(8, 1)
    visible[:, 1] += torch.arange(8)
    weights = visible * torch.tensor([0.0, -2 * logit]).double().exp()
    out, lse = weights[:, 1] / weights.sum(dim=1), weights.sum(dim=1).log() + logit
    # V is 0 or 1, so that an output is off by a quarter of what E4M3 rounds a weight by, at most.
    assert (result.out.cpu() - out[:, None, None]).abs().max() <= 0.02
    error = (result.lse.cpu() - lse[:, None]).abs() / lse[:, None].clamp(min=1.0)
    assert error.max() <= RANDOM_LSE_ERROR[target.arithmetic]


@pytest.mark.parametrize("group_size", [16, 4])
def test_infinite_query_without_pages(target: Target, group_size: int) -> None:
    """It sees nothing, whoever shares its warp; the others' bits are those beside a finite query."""
    problem = random_problem(seed=11, group_size=group_size, device=DEVICE)
    ids = problem.q2k_indices.clone()
    ids[:, ::3] = -1
    plain = replaced(problem, q2k_indices=ids)
    q = problem.q.clone()
    q[::3, :, 5] = torch.inf
    result, wanted = run_alone_and_crowded(target, replaced(plain, q=q)), target.run(plain)
    assert (result.out[::3] == 0).all() and (result.lse[::3] == -torch.inf).all()
    assert_same_bits(result, wanted)


@pytest.mark.parametrize("group_size", [16, 4, 1])
@pytest.mark.parametrize("other", [-1.0, 1.0])
def test_negative_scores(target: Target, group_size: int, other: float) -> None:
    """Rows that see nothing but negative scores, from the first token on, beside rows that may not.

    Query i sits at position i: it sees one token of page 0 and more, or nothing of page 1.
    """
    lengths = 64 if group_size == 16 else 160
    problem = paged_case(
        [[0, 1]] * lengths,
        prefixes=[0],
        q0=torch.where(torch.arange(lengths) % 2 == 0, 1.0, other)[:, None].expand(lengths, group_size),
        k0=lambda _, positions: -1.0 - (positions % 5).float(),
        group_size=group_size,
        device=DEVICE,
    )
    result = run_alone_and_crowded(target, problem)
    out, lse = exact(problem)
    # V is the page's number: 0 or 1.
    assert (result.out.double().cpu() - out.double().cpu()).abs().max() <= 0.03
    assert (result.lse.double().cpu() - lse.double().cpu()).abs().max() <= RANDOM_LSE_ERROR[target.arithmetic]
