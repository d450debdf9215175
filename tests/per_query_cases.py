"""What the per-query kernel must do, wherever it runs: in Triton's interpreter or on a GPU.

Beside the shared cases, which ask for right answers within FP8, these ask for the accuracy of BF16 and for
equal bits. Modules that collect them define the fixture ``target``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import exact_attention, nrms

from .helpers import (
    E4M3,
    INT32_MAX,
    INT32_MIN,
    Target,
    assert_close,
    assert_empty,
    assert_same_bits,
    ids_tensor,
    paged_case,
    random_problem,
    replaced,
)

MOST_NRMS = 0.005
# Sums of FP32 weights from the logits that BF16 products give exactly.
LSE_ERROR = 1e-4

# Several requests, one without queries, rows past the last one; small enough for an interpreter.
SIZES: tuple[dict[str, Any], ...] = (
    {},
    {"kv_dtype": torch.bfloat16, "topk": 5},
    {"num_kv_heads": 2, "group_size": 8, "page_size": 64, "topk": 16},
    {"num_kv_heads": 3, "group_size": 4, "topk": 17, "kv_dtype": torch.bfloat16, "page_size": 64},
    {"group_size": 2, "topk": 32, "k_scale": 0.5, "v_scale": 2.0},
    {"group_size": 1, "topk": 1},
)


def small(**sizes: Any) -> pw.AttentionProblem:
    """Random numbers and messy ids in strided views, some of it nobody's."""
    return random_problem(lengths=(6, 1, 0, 9), prefixes=(300, 0, 64, 777), past_rows=2, **sizes)


def assert_bf16_accurate(target: Target, problem: pw.AttentionProblem) -> None:
    """NRMS at most 0.5% of float64 on the values that the cache holds, from poisoned outputs."""
    result = target.run(problem)
    out, lse = (x.cpu() for x in exact_attention(problem))
    dead = lse == -torch.inf
    assert torch.equal(result.lse == -torch.inf, dead)
    assert_empty(result[dead.all(dim=1)])
    assert nrms(result.out, out) <= MOST_NRMS
    assert (result.lse - lse)[~dead].abs().max() <= LSE_ERROR


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())) or "default")
def test_random_numbers(target: Target, sizes: dict[str, Any]) -> None:
    assert_bf16_accurate(target, small(device=target.device, seed=len(sizes), **sizes))


@pytest.mark.parametrize("kv_dtype", [E4M3, torch.bfloat16])
def test_same_bits(target: Target, kv_dtype: torch.dtype) -> None:
    """Repeated, with ids in another order, with neighbours gone, from contiguous tensors: one answer."""
    problem = small(device=target.device, kv_dtype=kv_dtype, num_kv_heads=2, group_size=4, topk=4)
    expected = target.run(problem)
    assert_same_bits(target.run(problem), expected)
    shuffled = problem.q2k_indices[..., torch.randperm(problem.topk)]
    assert_same_bits(target.run(replaced(problem, q2k_indices=shuffled)), expected)
    tidy = problem.support.int()
    assert_same_bits(target.run(replaced(problem, q2k_indices=tidy)), expected)
    contiguous = {name: getattr(problem, name).contiguous() for name in ("q", "k_cache", "v_cache")}
    assert_same_bits(target.run(replaced(problem, **contiguous)), expected)
    alone = replaced(
        problem,
        q=problem.q[7:16],
        q2k_indices=problem.q2k_indices[:, 7:16],
        cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32, device=target.device),
        seqused_k=problem.seqused_k[3:],
        page_table=problem.page_table[3:],
    )
    assert_same_bits(target.run(alone), expected[7:16])


@pytest.mark.parametrize(
    "tune",
    [
        {"num_warps": 2, "num_stages": 2, "tokens": 32},
        {"num_warps": 8, "tokens": 128},
        {"num_stages": 1, "tokens": 128, "pairs": False},
        {"num_stages": 4},
    ],
    ids=lambda tune: "-".join(f"{name}={value}" for name, value in tune.items()),
)
@pytest.mark.parametrize("page_size", [64, 128])
def test_tuned(target: Target, tune: dict[str, int], page_size: int) -> None:
    """Launch choices change how fast, not what."""
    tuned = type(target)(target.strategy, target.arithmetic, {"tune": tune}, target.device, target.backend)
    assert_bf16_accurate(tuned, small(device=target.device, page_size=page_size, seed=5))


def test_c23_ids_out_of_range(target: Target) -> None:
    """Bad ids beside valid ones; past the first request's page table lies the second one's."""
    bad = (0x7FC00000, INT32_MAX, INT32_MIN, -2, 4, 5, 512, 100000)

    def case(rows: list[list[int]]) -> pw.AttentionProblem:
        return paged_case(
            ids_tensor(rows * 2),
            prefixes=[500, 500],
            lengths=[8, 8],
            v=lambda request, positions: positions // 128 + 4 * request,
            device=target.device,
        )

    messy = target.run(case([[*bad[:i], 1, bad[i], 3, *bad[i + 1 :]] for i in range(8)]))
    assert_same_bits(messy, target.run(case([[1, 3]] * 8)))
    assert {float(x) for x in messy.out[:8].flatten().round()} == {2.0}
    assert_empty(target.run(case([[value] * 16 for value in bad])))


def test_c27_requests_apart(target: Target) -> None:
    """Each row answers from its own request; the boundaries are the last bytes of their allocation."""
    lengths = [1, 3, 0, 5, 2, 0, 1]
    rows = sum(lengths)
    problem = paged_case(
        [[1, 0]] * rows,
        prefixes=[120] * len(lengths),
        lengths=lengths,
        v=lambda request, positions: torch.full(positions.shape, 1.0 + request),
        device=target.device,
    )
    storage = torch.full((1000 + len(lengths) + 1,), INT32_MAX, dtype=torch.int32, device=target.device)
    storage[1000:] = problem.cu_seqlens_q
    result = target.run(replaced(problem, cu_seqlens_q=storage[1000:]))
    owner = torch.repeat_interleave(torch.arange(float(len(lengths))), torch.tensor(lengths))
    seen = torch.cat([120 + torch.arange(1.0, n + 1) for n in lengths])
    assert_close(target, result, (owner + 1)[:, None, None], seen.log()[:, None])


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_c41_misaligned(target: Target, offset: int) -> None:
    """Addresses that are no multiple of 16 bytes give the same answer, read more slowly."""
    problem = small(device=target.device)

    def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
        raw = tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor
        flat = torch.empty(raw.numel() + elements, dtype=raw.dtype, device=raw.device)
        view = flat[elements:].view(raw.shape).copy_(raw)
        return view.view(tensor.dtype)

    names = ("q", "k_cache", "v_cache")
    shifted = replaced(problem, **{name: moved(getattr(problem, name), offset) for name in names})
    assert_bf16_accurate(target, shifted)


def test_nan_query_stays_in_its_head(target: Target) -> None:
    """Contract point 6."""
    problem = small(device=target.device)
    broken = problem.q.clone()
    broken[2, 5], broken[3, 0, 7], broken[4, 1, 9] = torch.nan, torch.inf, -torch.inf
    expected = target.run(problem)
    result = target.run(replaced(problem, q=broken), nan_rows=[2, 3, 4])
    touched = torch.zeros(result.lse.shape, dtype=torch.bool)
    touched[2, 5] = touched[3, 0] = touched[4, 1] = True
    assert torch.equal(result.out[~touched], expected.out[~touched])
    assert torch.equal(result.lse[~touched], expected.lse[~touched])
    assert result.out[2, 5].isnan().all() or expected.lse[2, 5] == -torch.inf
