"""Problems that the tests of kernels share, and what is asked of a kernel's numbers.

What an arithmetic may lose of float64 on N(0, 1) numbers is helpers.RANDOM_NRMS. A kernel takes the same
steps as its torch twin, the reference backend: it may lose little more, and differ little, by probabilities
that round to the other side, not by another way of rounding. (The unions count FP8 codes in FP16: a model of
these steps is 1.6% NRMS from the twin on N(0, 1) numbers.)
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise
from typing import Any

import torch

import pageweaver as pw
from pageweaver.common.problem import RESIDENT_TILES
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset

from ..helpers import (
    E4M3,
    RANDOM_LSE_ERROR,
    RANDOM_NRMS,
    Result,
    Target,
    assert_empty,
    assert_same_bits,
    random_problem,
    replaced,
)

DEVICE = "cuda"
# Of "split" the twin loses 0.18%, nearly all by its BF16 output. A tensor core sums FP8 products to 13 bits:
# that may cost what is left of the 0.3% that are asked.
TWIN_FACTOR = {"fp8": 1.2, "split": 1.7}
TWIN_NRMS = {"fp8": 0.02, "split": 0.003}
# Rows that see a page or more average the errors of their logits.
LSE_ERROR = {"fp8": 0.05, "split": 1e-3}
# Where rounding is fine, no row may hide a coarse step behind the others.
ROW_ERROR = {"split": 0.01}

# Several requests, one without queries, one of one token, rows past the last one; messy ids, strided views.
MESSY: dict[str, Any] = {"lengths": (70, 1, 0, 90), "prefixes": (2100, 0, 64, 4000)}

SIZES: tuple[dict[str, Any], ...] = (
    {"topk": 16},
    {"group_size": 8, "topk": 15, "k_scale": 0.7, "v_scale": 1.9},
    {"group_size": 4, "topk": 17},
    {"group_size": 2, "topk": 32},
    {"group_size": 1, "topk": 16},
    {"num_kv_heads": 2, "topk": 32},
    {"num_kv_heads": 2, "group_size": 8, "topk": 1},
    {"num_kv_heads": 3, "group_size": 1, "topk": 17, "softmax_scale": 0.05},
)


def twin(target: Target) -> Target:
    """The same FP8 steps in torch, on the same device."""
    return dataclasses.replace(target, backend="reference")


@cache
def messy(case: int) -> pw.AttentionProblem:
    return random_problem(seed=case, device=DEVICE, **MESSY, **SIZES[case])


@cache
def selected(name: str, rows: int) -> pw.AttentionProblem:
    """A selection as benchmarks run it, N(0, 1) numbers."""
    return pw.make_problem(preset(name, total_q=rows, prefix=49152), device=DEVICE)


@cache
def exact(problem: pw.AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = exact_attention(problem)
    return out.cpu(), lse.cpu()


def million_tokens(rows: int, topk: int, group_size: int) -> pw.AttentionProblem:
    """The last rows of 1,048,576 tokens; 8,192 logical pages share 64 physical ones."""
    pages = 8192
    rng = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, pages, (1, rows, topk), generator=rng, dtype=torch.int32)
    ids[:, :, 0], ids[:, ::2, 1] = 0, pages - 1
    caches = [torch.randn(64, 128, 1, 128, generator=rng).to(E4M3).to(DEVICE) for _ in range(2)]
    return pw.AttentionProblem(
        q=torch.randn(rows, group_size, 128, generator=rng).bfloat16().to(DEVICE),
        k_cache=caches[0],
        v_cache=caches[1],
        q2k_indices=ids.to(DEVICE),
        cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor([pages * 128], dtype=torch.int32, device=DEVICE),
        page_table=torch.randint(0, 64, (1, pages), generator=rng, dtype=torch.int32).to(DEVICE),
    )


LONG = ((40, 16, 16), (600, 16, 16), (300, 32, 1))


@cache
def long_context(case: int) -> pw.AttentionProblem:
    return million_tokens(*LONG[case])


def shuffled_ids(problem: pw.AttentionProblem, seed: int) -> torch.Tensor:
    """Another order of every request's queries, for each KV head."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.arange(problem.total_q, dtype=torch.int32).repeat(problem.num_kv_heads, 1)
    for head in range(problem.num_kv_heads):
        for first, last in pairwise(problem.cu_seqlens_q.tolist()):
            ids[head, first:last] = first + torch.randperm(last - first, generator=rng).int()
    return ids.to(problem.device)


def copies(problem: pw.AttentionProblem, times: int) -> pw.AttentionProblem:
    """The same requests several times over, of one cache."""
    lengths = problem.cu_seqlens_q.diff().repeat(times)
    rows = int(problem.cu_seqlens_q[-1])
    return replaced(
        problem,
        q=problem.q[:rows].repeat(times, 1, 1),
        q2k_indices=problem.q2k_indices[:, :rows].repeat(1, times, 1),
        cu_seqlens_q=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        seqused_k=problem.seqused_k.repeat(times),
        page_table=problem.page_table.repeat(times, 1),
    )


def tile_bound(target: Target, problem: pw.AttentionProblem) -> int:
    """Tiles that a call may have, by its shapes."""
    strategy: Any = target.load(problem)
    (heads, max_groups), _ = strategy.workspace_layout(problem)["union_counts"]
    return int(heads * max_groups * strategy.queries_per_group(problem) // strategy.queries_per_tile(problem))


def tiles_per_multiprocessor(target: Target, problem: pw.AttentionProblem) -> int:
    """By which union attention chooses its layout: two CTAs up to 2 and from 4 to 6, else three workers."""
    return -(-tile_bound(target, problem) // (RESIDENT_TILES // 2))


def run_alone_and_crowded(target: Target, problem: pw.AttentionProblem) -> Result:
    """The result of a call, which each of its copies in larger calls has too.

    Calls of few and of many tiles are different layouts of a kernel, and a layout takes a turn or several.
    (Pages computed whole are paired by what else is in the call.)
    """
    result, rows = target.run(problem), int(problem.cu_seqlens_q[-1])
    if not target.owns_queries:
        return result
    has_one_layout = target.options.get("mapping") == "cluster"
    for times, layout in ((2, (4, 5, 6)), (-(-8192 // rows), (3, *range(7, 99)))):
        crowd = copies(problem, times)
        while tiles_per_multiprocessor(target, crowd) not in layout and not has_one_layout:
            times += -(-times // 4)
            assert times * rows < 65536, "no other layout"
            crowd = copies(problem, times)
        crowded = target.run(crowd)
        for first in range(0, times * rows, rows):
            assert_same_bits(crowded[first : first + rows], result[:rows])
    return result


def assert_accurate(target: Target, problem: pw.AttentionProblem) -> None:
    """Against float64 and against the torch twin."""
    result, expected = run_alone_and_crowded(target, problem), twin(target).run(problem)
    out, lse = exact(problem)
    dead = lse == -torch.inf
    assert torch.equal(result.lse == -torch.inf, dead), "lse: -inf in other rows"
    assert_empty(result[dead.all(dim=1)])
    arithmetic = target.arithmetic
    error, most = nrms(result.out, out), TWIN_FACTOR[arithmetic] * nrms(expected.out, out)
    allowed = RANDOM_NRMS[arithmetic]
    assert error <= min(allowed, most), f"NRMS {error}, at most {allowed} and {most}"
    assert nrms(result.out, expected.out) <= TWIN_NRMS[arithmetic], "NRMS of the twin"
    if arithmetic in ROW_ERROR:
        row_errors = (result.out - out).norm(dim=-1)[~dead] / out.norm(dim=-1)[~dead]
        assert row_errors.max() <= ROW_ERROR[arithmetic], "worst row"
    lse_error = torch.where(dead, 0.0, (result.lse - lse).abs())
    assert lse_error.max() <= RANDOM_LSE_ERROR[arithmetic]
    # Two pages or more: one of them is seen whole.
    pages = (problem.support >= 0).sum(dim=2).repeat_interleave(problem.group_size, dim=0).T.cpu()
    wide = lse_error[pages >= 2]
    assert not wide.numel() or wide.max() <= LSE_ERROR[arithmetic]
