"""union4 and union8 on Hopper: caches past 32 bits, and more rows than a grid axis holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pageweaver as pw

from ..helpers import E4M3, Target, assert_close, poison, replaced
from .hopper import WATCHDOG, missing
from .problems import DEVICE

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

GIB = 2**30


def one_byte(value: float) -> int:
    """The E4M3 byte of a number."""
    return int(torch.tensor(value).to(E4M3).view(torch.uint8))


@pytest.fixture(scope="module")
def huge_cache() -> Any:
    """Two caches of 262,160 pages in one piece of memory."""
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB of free device memory")
    yield torch.zeros(2 * 262160 * 16384, dtype=torch.uint8, device=DEVICE)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout", ["apart", "halves"])
def test_c30_caches_past_32_bits(target: Target, huge_cache: torch.Tensor, layout: str) -> None:
    """Element 2**31 of a cache lies in page 131,072, 2**32 in 262,144; of halves, in half of that."""
    pages = 262160
    huge_cache.zero_()
    if layout == "apart":
        keys, values = huge_cache.view(2, pages, 128, 1, 128).unbind(0)
    else:
        keys, values = huge_cache.view(pages, 2, 128, 1, 128).unbind(1)
    # What a product of 32 bits would read in place of page 262,159 is page 15.
    for page, value in ((5, 1.0), (131077, 2.0), (262149, 3.0), (262159, 4.0), (15, 7.0)):
        values[page] = one_byte(value)
    problem = pw.AttentionProblem(
        q=torch.zeros(8, 16, 128, dtype=torch.bfloat16, device=DEVICE),
        k_cache=keys.view(E4M3),
        v_cache=values.view(E4M3),
        q2k_indices=torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE).expand(1, 8, 4),
        cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor([520], dtype=torch.int32, device=DEVICE),
        page_table=torch.tensor([[5, 131077, 262149, 262159, 6]], dtype=torch.int32, device=DEVICE),
    )
    assert_close(target, target.run(problem), 2.5, math.log(512))
    # Keys of their own in every page: now a key from elsewhere shows, in the LSE at least.
    logits = {5: 1.0, 131077: 2.0, 262149: 0.0, 262159: -2.0, 15: 14.0}
    for page, key in logits.items():
        keys[page, :, :, 0] = one_byte(key)
    q = problem.q.clone()
    q[:, :, 0] = 8.0
    weights = torch.tensor(
        [math.exp(8 * logits[page] / math.sqrt(128)) for page in (5, 131077, 262149, 262159)]
    )
    value = float(weights @ torch.tensor([1.0, 2.0, 3.0, 4.0]) / weights.sum())
    result = target.run(replaced(problem, q=q))
    assert_close(target, result, value, math.log(128 * float(weights.sum())), spread=3.0)


@pytest.mark.parametrize(
    ("rows", "requests", "heads"),
    [
        (65536, 1024, 16),
        (65537, 65537, 16),
        (70000, 70000, 16),
        (524289, 174763, 1),
        (524289, 174763, 16),
        (524289, 1, 16),
    ],
)
def test_c31_long_grids(target: Target, rows: int, requests: int, heads: int) -> None:
    """More rows, requests, groups than a grid's y axis holds; each row sees its own page to its position."""
    length = rows // requests
    own_pages = -(-length // 128)
    position = torch.arange(length, dtype=torch.int32, device=DEVICE).repeat(requests)
    values = torch.arange(128.0, device=DEVICE).to(E4M3)
    raw = values.view(torch.uint8).view(1, 128, 1, 1).expand(-1, -1, -1, 128).contiguous()
    problem = pw.AttentionProblem(
        q=torch.zeros(1, heads, 128, dtype=torch.bfloat16, device=DEVICE).expand(rows, -1, -1),
        k_cache=torch.zeros_like(raw).view(E4M3),
        v_cache=raw.view(E4M3),
        q2k_indices=(position // 128)[None, :, None],
        cu_seqlens_q=torch.arange(0, rows + 1, length, dtype=torch.int32, device=DEVICE),
        seqused_k=torch.full((requests,), length, dtype=torch.int32, device=DEVICE),
        page_table=torch.zeros(requests, own_pages, dtype=torch.int32, device=DEVICE),
    )
    out = torch.full((rows, heads, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.full((rows, heads), 777.0, device=DEVICE)
    strategy = target.load(problem)
    workspace = strategy.workspace(problem)
    poison(workspace)
    strategy(problem, out, lse, workspace)
    column, seen = out[:, 0, 0].float(), position % 128 + 1
    assert (out == out[:, :1, :1]).all() and (lse == lse[:, :1]).all()
    expected = (values.float().cumsum(0) / torch.arange(1, 129, device=DEVICE))[seen - 1]
    assert ((column - expected).abs() <= 2.0**-8 * expected).all()
    assert ((lse[:, 0] - seen.float().log()).abs() <= 1e-4).all()
