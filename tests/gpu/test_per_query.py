"""The per-query kernel on a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset
from pageweaver.strategies import per_query

from ..helpers import (
    INT32_MAX,
    Target,
    assert_close,
    assert_empty,
    paged_case,
    random_problem,
    replaced,
)
from ..per_query_cases import *  # noqa: F403
from ..test_cases import (  # noqa: F401
    TestC16RowsWithoutKeys,
    TestC18FirstPageMasked,
    TestC19LseBase,
    TestC21DuplicateIds,
    TestC22UnsortedIds,
    TestC24UnwrittenSlots,
    test_c20_lse_axes,
)
from ..test_cases_calls import (  # noqa: F401
    TestC26Prefix,
    TestC33Layouts,
    TestC37Scales,
    TestC40Shapes,
    TestC42Sizes,
    test_c25_page_count_edges,
    test_c28_empty_requests,
    test_c28_page_table_of_no_pages,
    test_c29_rows_past_the_last_request,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

GIB = 2**30


@pytest.fixture
def target() -> Target:
    return Target("per_query", "bf16", device="cuda", backend="cuda")


def test_selection_of_a_long_context(target: Target) -> None:
    """A thousand rows as benchmarks run them."""
    problem = pw.make_problem(preset("low", total_q=1000, prefix=49152), device="cuda")
    result = target.run(problem)
    out, _ = exact_attention(problem)
    assert nrms(result.out, out.cpu()) <= 0.005


def test_narrow_page_table(target: Target) -> None:
    """Lengths on a device are never checked: ids past the table's width are not looked up."""
    problem = paged_case([[0, 1, 2, 3]] * 3, prefixes=[400], device="cuda")
    narrow = replaced(problem, page_table=problem.page_table[:, :2].clone())
    assert_close(target, target.run(narrow), 0.5)


def rows_of_one_page(rows: int, requests: int) -> pw.AttentionProblem:
    """Equal requests over the same physical page, whose values are their positions."""
    length = rows // requests
    values = torch.arange(128.0, device="cuda").bfloat16().view(1, 128, 1, 1)
    return pw.AttentionProblem(
        q=torch.zeros(rows, 1, 128, dtype=torch.bfloat16, device="cuda"),
        k_cache=torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16, device="cuda"),
        v_cache=values.expand(-1, -1, -1, 128).contiguous(),
        q2k_indices=torch.zeros(1, rows, 1, dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.arange(0, rows + 1, length, dtype=torch.int32, device="cuda"),
        seqused_k=torch.full((requests,), length, dtype=torch.int32, device="cuda"),
        page_table=torch.zeros(requests, 1, dtype=torch.int32, device="cuda"),
    )


@pytest.mark.parametrize(
    ("rows", "requests"), [(65536, 1024), (65537, 65537), (70000, 70000), (524289, 174763)]
)
def test_c31_long_grids(target: Target, rows: int, requests: int) -> None:
    result = target.run(rows_of_one_page(rows, requests))
    length = rows // requests
    expected = torch.arange(length).repeat(requests) / 2  # the mean of 0 to the row's position
    assert_close(target, result, expected[:, None, None])


def test_c30_caches_past_32_bits(target: Target) -> None:
    """262,160 pages of 16,384 elements: element 2**31 lies in page 131,072, 2**32 in 262,144."""
    pages = 262160
    if torch.cuda.mem_get_info()[0] < 10 * GIB:
        pytest.skip("needs 10 GiB of free device memory")
    raw = [torch.zeros(pages, 128, 1, 128, dtype=torch.uint8, device="cuda") for _ in range(2)]
    k_cache, v_cache = (x.view(torch.float8_e4m3fn) for x in raw)
    placed = [5, 131077, 262149, 262159, 6]
    for value, page in ((1, 5), (2, 131077), (3, 262149), (4, 262159), (7, 15)):
        v_cache[page] = torch.full((128, 1, 128), float(value), device="cuda").to(torch.float8_e4m3fn)
    problem = pw.AttentionProblem(
        q=torch.zeros(8, 16, 128, dtype=torch.bfloat16, device="cuda"),
        k_cache=k_cache,
        v_cache=v_cache,
        q2k_indices=torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda").expand(1, 8, 4),
        cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32, device="cuda"),
        seqused_k=torch.tensor([520], dtype=torch.int32, device="cuda"),
        page_table=torch.tensor([placed], dtype=torch.int32, device="cuda"),
    )
    assert_close(target, target.run(problem), 2.5)


def test_c36_graph(target: Target) -> None:
    """Captured once, replayed with other ids, boundaries, lengths, pages and values."""
    strategy = pw.load("per_query")
    sizes: dict[str, Any] = {"lengths": (90, 1, 60), "prefixes": (300, 9, 777), "topk": 16}
    variants = [random_problem(seed=seed, device="cuda", **sizes) for seed in range(3)]
    variants.append(replaced(variants[0], q2k_indices=torch.full_like(variants[0].q2k_indices, -1)))
    moved = torch.tensor([0, 60, 61, 140], dtype=torch.int32, device="cuda")
    variants.append(replaced(variants[1], cu_seqlens_q=moved, seqused_k=variants[1].seqused_k - 7))
    names = ("q", "k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table")
    static = replaced(variants[0], **{name: getattr(variants[0], name).clone() for name in names})
    out = torch.empty_like(static.q)
    lse = torch.empty(out.shape[:2], device="cuda")
    strategy(static, out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strategy(static, out, lse)
    for problem in variants:
        for name in names:
            getattr(static, name).copy_(getattr(problem, name))
        out.fill_(torch.nan)
        lse.fill_(777.0)
        graph.replay()
        expected = target.run(problem)
        assert torch.equal(out.float().cpu(), expected.out) and torch.equal(lse.cpu(), expected.lse)


def test_c36_no_sync() -> None:
    """Scales on the device are not fetched, nor is anything else."""
    scales = {name: torch.ones(1, device="cuda") for name in ("softmax_scale", "k_scale", "v_scale")}
    problem = random_problem(device="cuda", **scales)
    out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        pw.load("per_query")(problem, out, lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_c44_one_compilation(target: Target) -> None:
    """Lengths, strides and batch sizes compile nothing anew."""
    from triton import knobs

    compiled: list[Any] = []
    target.run(random_problem(device="cuda"))
    knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details)
    try:
        for total in (1, 2, 16, 17, 1000, 1024, 1199):
            target.run(
                random_problem(lengths=(total,), prefixes=(total,), past_rows=total % 3, device="cuda")
            )
        target.run(random_problem(lengths=(16, 16), prefixes=(2048, 8), device="cuda"))
        wide = random_problem(device="cuda")
        buffer = torch.zeros(wide.num_pages, 256, 1, 512, dtype=torch.uint8, device="cuda")
        view = buffer[:, :128, :, :128].view(torch.float8_e4m3fn)
        target.run(replaced(wide, k_cache=view))
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_strided_outputs(target: Target) -> None:
    """Outputs of any strides are written in place, and nothing beside them."""
    problem = random_problem(device="cuda", num_kv_heads=2, group_size=8)
    expected = target.run(problem)
    rows, heads = problem.total_q, problem.num_qo_heads
    wide = torch.full((heads, rows, 200), 5.0, dtype=torch.bfloat16, device="cuda")
    wide_lse = torch.full((heads, 2 * rows), 5.0, device="cuda")
    for first in (0, 3):
        wide.fill_(5.0)
        out, lse = wide[..., first : first + 128].transpose(0, 1), wide_lse[:, ::2].T
        pw.load("per_query")(problem, out, lse)
        assert torch.equal(out.float().cpu(), expected.out) and torch.equal(lse.cpu(), expected.lse)
        assert (wide[..., :first] == 5.0).all() and (wide[..., first + 128 :] == 5.0).all()
        assert (wide_lse[:, 1::2] == 5.0).all()


def test_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(device="cuda")
    strategy = pw.load("per_query")
    assert strategy.resolve(problem) == ("cuda", "bf16")
    assert strategy.workspace_bytes(problem) == 0
    counts = pw.load("per_query", backend="reference").work(problem)
    assert strategy.work(problem) == dataclasses.replace(counts, workspace_bytes=0)
    with pytest.raises(ValueError, match=r"query_ids: got a tensor, supported by per_query on cuda: None"):
        strategy.prepare(problem, query_ids=torch.zeros(1, problem.total_q))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"arithmetic: got 'fp8', supported by per_query on cuda"):
        pw.load("per_query", arithmetic="fp8")(problem)
    monkeypatch.setattr(per_query, "find_spec", lambda name: None)
    with pytest.raises(pw.UnsupportedDeviceError, match="needs the package triton"):
        strategy(problem)


def test_everything_past_the_last_request(target: Target) -> None:
    problem = paged_case([[INT32_MAX]] * 5, prefixes=[], lengths=[], device="cuda")
    assert_empty(target.run(problem))
