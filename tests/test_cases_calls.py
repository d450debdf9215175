"""Faults that people hit in kernels like these (2/2): what requests, boundaries, scales and sizes can do.

Each test carries the number of its case.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.strategies.regroup.greedy import greedy_order_numpy

from .helpers import (
    INT32_MAX,
    INT32_MIN,
    Result,
    Target,
    assert_close,
    assert_empty,
    assert_random,
    assert_repeats,
    assert_same_bits,
    constant,
    ids_tensor,
    naive_attention,
    page_number,
    paged_case,
    random_problem,
    replaced,
)


def test_c25_page_count_edges(target: Target) -> None:
    """Off by one in the length of the last page, at exact multiples of a page and of 16 pages."""
    totals = [1, 127, 128, 129, 1920, 1921, 2047, 2048, 2049]
    lengths = [min(total, 2) for total in totals]
    rows = []
    for total, length in zip(totals, lengths, strict=True):
        pages = -(-total // 128)
        rows += [list(range(max(0, pages - 16), pages))] * length
    problem = paged_case(
        rows,
        prefixes=[total - length for total, length in zip(totals, lengths, strict=True)],
        lengths=lengths,
        q0=16.0,
        # The last token outweighs all others 40 times: seen by the last row, never by the one before.
        k0=lambda request, positions: 8.0 * (positions == totals[request] - 1),
        v=lambda _, positions: positions / 64,
        device=target.device,
    )
    result = target.run(problem)
    out, lse = naive_attention(problem)
    last = [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]
    before = [row for row in range(len(rows)) if row not in last]
    assert_close(target, result[before], out[before], lse[before])
    assert_close(target, result[last], out[last], lse[last], spread=32.0)


class TestC26Prefix:
    """The query index used as its position, or one prefix used for all requests."""

    def test_three_prefixes(self, target: Target) -> None:
        prefixes = [0, 130, 1000]
        problem = paged_case(
            [list(range(16))] * 15,
            prefixes=prefixes,
            lengths=[5, 5, 5],
            v=lambda request, positions: 1.0 + (positions >= prefixes[request]),
            device=target.device,
        )
        seen = torch.tensor([[prefix + i + 1.0 for i in range(5)] for prefix in prefixes]).reshape(15, 1)
        new = torch.arange(1.0, 6.0).repeat(3)[:, None]
        # The LSE counts the tokens to one part in a thousand; V tells old ones from new.
        assert_close(target, target.run(problem), (1 + new / seen)[..., None], seen.log())

    def test_chunked_prompt(self, target: Target) -> None:
        whole = paged_case(
            [[0, 1, 2]] * 300,
            prefixes=[0],
            q0=torch.arange(300.0) % 7,
            k0=lambda _, positions: (positions % 5).float(),
            v=lambda request, positions: page_number(request, positions) + 1,
            device=target.device,
        )

        def chunks(lengths: Sequence[int], first: int = 0) -> pw.AttentionProblem:
            """The rows from `first` on as requests over one cache."""
            ends = first + np.cumsum(lengths)
            rows = slice(first, int(ends[-1]))
            return replaced(
                whole,
                q=whole.q[rows],
                q2k_indices=whole.q2k_indices[:, rows],
                cu_seqlens_q=torch.tensor([0, *(ends - first)], dtype=torch.int32, device=target.device),
                seqused_k=torch.tensor(ends, dtype=torch.int32, device=target.device),
                page_table=whole.page_table.expand(len(lengths), -1),
            )

        one_shot = target.run(whole)
        out, lse = naive_attention(whole)
        assert_close(target, one_shot, out, lse, spread=2.0)
        for problem in (chunks([128, 128, 44]), chunks([1] * 300)):
            assert_repeats(target, target.run(problem), one_shot, 2.0)
        for first, length in ((0, 128), (128, 128), (256, 44), (299, 1)):
            part = target.run(chunks([length], first))
            assert_repeats(target, part, one_shot[first : first + length], 2.0)


class TestC27Straddling:
    """A tile or a union that mixes two requests, or runs past the last one."""

    def test_same_logical_page(self, target: Target) -> None:
        problem = paged_case(
            [[0]] * 8,
            prefixes=[100, 100],
            lengths=[4, 4],
            v=lambda request, positions: torch.full(positions.shape, 1.0 + request),
            device=target.device,
        )
        result = target.run(problem)
        assert (result.out[:4] == 1.0).all() and (result.out[4:] == 2.0).all()

    def test_many_lengths(self, target: Target) -> None:
        lengths = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 0, 3]
        total = sum(lengths)
        problem = paged_case(
            [[1, 0]] * total,
            prefixes=[0] * 12,
            lengths=lengths,
            v=lambda request, positions: torch.full(positions.shape, 1.0 + request),
            device=target.device,
        )
        # The boundaries are the last bytes of their allocation.
        storage = torch.full((1000 + 13,), INT32_MAX, dtype=torch.int32, device=target.device)
        storage[1000:] = problem.cu_seqlens_q
        problem = replaced(problem, cu_seqlens_q=storage[1000:])
        result = target.run(problem)
        owner = torch.repeat_interleave(torch.arange(12.0), torch.tensor(lengths))
        seen = torch.cat([torch.arange(1.0, n + 1) for n in lengths])
        assert_close(target, result, (owner + 1)[:, None, None], seen.log()[:, None])
        if target.owns_queries:
            ids = target.load(problem).prepare(problem).query_ids.cpu().long()  # type: ignore[attr-defined]
            assert torch.equal(owner[ids], owner[None])


@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [
        ([], []),
        ([0, 0, 0], [0, 0, 0]),
        ([0, 130, 5], [0, 0, 0]),
        ([0, 40, 0, 200, 7, 0], [0, 3, 0, 0, 1, 0]),
        ([5, 6, 7, 8], [1, 0, 1, 1]),
        ([0] * 9, [1, 0, 1, 1, 0, 0, 1, 1, 1]),
    ],
)
def test_c28_empty_requests(target: Target, prefixes: list[int], lengths: list[int]) -> None:
    """A grid of zero, a division by zero, or an error that sticks to the next call."""
    rows = sum(lengths)
    problem = paged_case(
        torch.zeros(1, rows, 16, dtype=torch.int32),
        prefixes=prefixes,
        lengths=lengths,
        v=constant(2.0),
        device=target.device,
    )
    result = target.run(problem)
    assert result.out.shape == (rows, 16, 128) and result.lse.shape == (rows, 16)
    assert_close(target, result, torch.full((rows, 16, 128), 2.0))
    strategy = target.load(problem)
    plain = strategy(problem)  # allocates out itself
    assert plain.shape == (rows, 16, 128) and torch.equal(plain.float().cpu(), result.out)
    assert strategy.work(problem).edges == rows
    after = paged_case([[0, 1]] * 9, prefixes=[250], v=constant(3.0), device=target.device)
    assert_close(target, target.run(after), 3.0)


def test_c28_page_table_of_no_pages(target: Target) -> None:
    """Nothing in the cache yet, and rows that are nobody's."""
    problem = paged_case([[0]] * 4, prefixes=[0, 0], lengths=[0, 0], device=target.device)
    problem = replaced(problem, page_table=problem.page_table[:, :0])
    assert_empty(target.run(problem))
    assert target.load(problem).work(problem).edges == 0


def test_c28_no_request(target: Target) -> None:
    """Rows of nobody and nothing else."""
    problem = paged_case([[0]] * 9, prefixes=[], lengths=[], device=target.device)
    assert_empty(target.run(problem))
    assert target.load(problem).work(problem).edges == 0


def test_c29_rows_past_the_last_request(target: Target) -> None:
    """Padded rows of a static buffer: written, and their ids and queries never read."""
    garbage = [0, 1, INT32_MAX, INT32_MIN, 100000, 7]
    q0 = torch.ones(64)
    q0[40:] = math.nan
    problem = paged_case(
        [[0, 1]] * 40 + [garbage] * 24,
        prefixes=[88],
        lengths=[40],
        q0=q0,
        v=constant(1.0),
        device=target.device,
    )
    result = target.run(problem)
    assert_close(target, result[:40], 1.0, (89.0 + torch.arange(40))[:, None].log())
    assert_empty(result[40:])
    assert target.load(problem).work(problem).edges == 40  # nobody sees page 1


class TestC33Layouts:
    """Strided views are followed; other types are refused with the wanted one."""

    def test_strided_ids(self, target: Target) -> None:
        problem = random_problem(num_kv_heads=2, group_size=4, topk=16, device=target.device)
        ids = problem.q2k_indices.contiguous()
        rows = ids.shape[1]
        expected = target.run(replaced(problem, q2k_indices=ids))
        persistent = torch.full((2, 8192, 16), 0, dtype=torch.int32, device=target.device)
        persistent[:, :rows] = ids
        wide = torch.full((2, rows, 32), 0, dtype=torch.int32, device=target.device)
        wide[..., :16] = ids
        views = {
            "slice of a persistent buffer": persistent[:, :rows],
            "slice of wide rows": wide[..., :16],
            "token-major": ids.permute(1, 0, 2).contiguous().permute(1, 0, 2),
            "column-major": ids.transpose(1, 2).contiguous().transpose(1, 2),
            "every second row": ids.repeat_interleave(2, dim=1)[:, ::2],
        }
        for name, view in views.items():
            assert torch.equal(view, ids), name
            assert_same_bits(target.run(replaced(problem, q2k_indices=view)), expected)

    def test_strided_metadata(self, target: Target) -> None:
        problem = random_problem(device=target.device)
        expected = target.run(problem)
        spaced = {
            name: getattr(problem, name).repeat_interleave(3, dim=-1)[..., ::3]
            for name in ("cu_seqlens_q", "seqused_k", "page_table")
        }
        assert all(view.stride(-1) == 3 for view in spaced.values())
        assert_same_bits(target.run(replaced(problem, **spaced)), expected)

    @pytest.mark.parametrize("name", ["q2k_indices", "page_table", "cu_seqlens_q", "seqused_k"])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.uint32, torch.int16, torch.float32])
    def test_other_types(self, name: str, dtype: torch.dtype) -> None:
        problem = paged_case([[0]], prefixes=[0])
        with pytest.raises(TypeError, match=rf"{name}\.dtype: got {dtype}, supported: torch\.int32"):
            replaced(problem, **{name: getattr(problem, name).to(dtype)})


class TestC37Scales:
    """Descales dropped, swapped or misread; scales of 1 hide it."""

    @staticmethod
    def case(target: Target, **scales: Any) -> pw.AttentionProblem:
        return paged_case(
            [[0, 1]] * 5,
            prefixes=[250],
            q0=8.0,
            k0=lambda _, positions: 4.0 * (positions // 128),
            v=lambda request, positions: page_number(request, positions) + 1,
            device=target.device,
            **scales,
        )

    def test_kinds(self, target: Target) -> None:
        problem = self.case(target, k_scale=0.5, v_scale=2.0)
        out, lse = naive_attention(problem)
        expected = target.run(problem)
        assert_close(target, expected, out, lse, spread=2.0)
        for shape in ((), (1,), (1, 1)):
            k_scale, v_scale = (torch.full(shape, x, device=target.device) for x in (0.5, 2.0))
            assert_same_bits(target.run(self.case(target, k_scale=k_scale, v_scale=v_scale)), expected)
        for wrong in ({"k_scale": 2.0, "v_scale": 0.5}, {"k_scale": 0.5}, {"v_scale": 2.0}):
            with pytest.raises(AssertionError, match="error"):
                assert_close(target, target.run(self.case(target, **wrong)), out, lse, spread=2.0)

    def test_softmax_scale(self, target: Target) -> None:
        for scale in (0.25, torch.tensor(0.25, device=target.device)):
            problem = self.case(target, softmax_scale=scale)
            out, lse = naive_attention(problem)
            assert_close(target, target.run(problem), out, lse, spread=1.0)

    @pytest.mark.parametrize("name", ["softmax_scale", "k_scale", "v_scale"])
    @pytest.mark.parametrize(
        "value",
        [0.0, -1.0, math.nan, math.inf, 1e39, 1e-60, 10**400, torch.tensor(0.0), torch.tensor([-1.0])],
    )
    def test_unusable_values(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=rf"{name}: got .*, supported: a finite positive"):
            self.case(Target("union8"), **{name: value})

    @pytest.mark.parametrize("name", ["softmax_scale", "k_scale", "v_scale"])
    @pytest.mark.parametrize(
        "value", [torch.tensor(0.5).bfloat16(), torch.tensor(1), torch.tensor(0.5).double(), True, "1", None]
    )
    def test_other_types(self, name: str, value: Any) -> None:
        with pytest.raises(TypeError, match=rf"{name}.*supported: .*float"):
            self.case(Target("union8"), **{name: value})

    @pytest.mark.parametrize("shape", [(16,), (0,), (1, 16)])
    def test_one_a_head(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"k_scale\.shape: got .*, supported: one element"):
            self.case(Target("union8"), k_scale=torch.ones(shape))

    def test_zero_and_huge_rows(self, target: Target) -> None:
        q0 = torch.ones(3, 16)
        q0[0], q0[1, 3], q0[2, 5] = 0.0, 3e38, -3e38
        problem = paged_case(
            [[0, 1]] * 3,
            prefixes=[250],
            q0=q0,
            k0=lambda _, positions: 8.0 * (positions == 5) - 4.0 * (positions == 7),
            v=lambda _, positions: 1.0 + 3.0 * (positions == 5) + 7.0 * (positions == 7),
            k_scale=2.0,
            device=target.device,
        )
        result = target.run(problem)
        out, lse = naive_attention(problem)
        assert (result.out[1, 3] == 4.0).all() and (result.out[2, 5] == 8.0).all()
        # A logit of 1e38 has no LSE to compare; it is large and no NaN.
        assert result.lse[1, 3] > 1e30 and result.lse[2, 5] > 1e30
        lse[1, 3], lse[2, 5] = result.lse[1, 3], result.lse[2, 5]
        assert_close(target, result, out, lse, spread=7.0)


class TestC40Shapes:
    """The right answer, or an error before any work that names the value and what is supported."""

    @pytest.mark.parametrize(
        "sizes",
        [
            {"group_size": 1},
            {"group_size": 8, "topk": 1},
            {"num_kv_heads": 2, "topk": 15},
            {"group_size": 4, "topk": 17, "page_size": 64},
            {"num_kv_heads": 2, "group_size": 2, "topk": 32},
        ],
    )
    def test_supported(self, target: Target, sizes: dict[str, Any]) -> None:
        problem = random_problem(lengths=(13, 6), prefixes=(250, 0), device=target.device, **sizes)
        assert_random(target, target.run(problem), *naive_attention(problem))

    @pytest.mark.parametrize(
        ("q_shape", "kv_shape", "topk", "words"),
        [
            ((4, 15, 128), (3, 128, 1, 128), 16, ["15 / 1", "(1, 2, 4, 8, 16)"]),
            ((4, 32, 128), (3, 128, 1, 128), 16, ["32 / 1", "(1, 2, 4, 8, 16)"]),
            ((4, 64, 128), (3, 128, 1, 128), 16, ["64 / 1", "(1, 2, 4, 8, 16)"]),
            ((4, 16, 128), (3, 128, 3, 128), 16, ["16 / 3", "(1, 2, 4, 8, 16)"]),
            ((4, 0, 128), (3, 128, 1, 128), 16, ["0 / 1", "(1, 2, 4, 8, 16)"]),
            ((4, 16, 128), (3, 16, 1, 128), 16, ["page_size", "got 16", "(64, 128)"]),
            ((4, 16, 128), (3, 256, 1, 128), 16, ["page_size", "got 256", "(64, 128)"]),
            ((4, 16, 64), (3, 128, 1, 64), 16, ["head_dim", "got 64", "128"]),
            ((4, 16, 256), (3, 128, 1, 256), 16, ["head_dim", "got 256", "128"]),
            ((4, 16, 128), (3, 128, 1, 128), 33, ["topk", "got 33", "1 to 32"]),
            ((4, 16, 128), (3, 128, 1, 128), 0, ["topk", "got 0", "1 to 32"]),
        ],
    )
    def test_refused(
        self, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], topk: int, words: list[str]
    ) -> None:
        with pytest.raises(ValueError) as caught:
            pw.sparse_prefill(
                torch.zeros(q_shape).bfloat16(),
                torch.zeros(kv_shape).bfloat16(),
                torch.zeros(kv_shape).bfloat16(),
                torch.zeros(kv_shape[2], q_shape[0], topk, dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
                seqused_k=torch.tensor([300], dtype=torch.int32),
                page_table=torch.arange(3, dtype=torch.int32)[None],
            )
        for word in words:
            assert word in str(caught.value)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
    def test_refused_q(self, dtype: torch.dtype) -> None:
        problem = paged_case([[0]], prefixes=[0])
        with pytest.raises(TypeError, match=rf"q\.dtype: got {dtype}, supported: torch\.bfloat16"):
            replaced(problem, q=problem.q.to(dtype))


class TestC42Sizes:
    """A page table that is exactly full, and sizes that contradict each other."""

    @pytest.mark.parametrize("tokens", [255, 256, 257])
    def test_table_at_the_end_of_memory(self, target: Target, tokens: int) -> None:
        problem = paged_case(
            [[0, 1, 2], [2, 1]], prefixes=[0, tokens - 1], lengths=[1, 1], device=target.device
        )
        width = -(-tokens // 128)
        assert problem.page_table.shape == (2, width)
        storage = torch.full((500 + 2 * width,), INT32_MAX, dtype=torch.int32, device=target.device)
        storage[500:] = problem.page_table.flatten()
        moved = replaced(problem, page_table=storage[500:].view(2, width))
        wider = torch.cat([problem.page_table, torch.full_like(problem.page_table, INT32_MAX)], dim=1)
        result = target.run(moved)
        assert_same_bits(result, target.run(problem))
        assert_same_bits(result, target.run(replaced(problem, page_table=wider)))
        seen = [t // 128 for t in range(128, tokens)]
        assert_close(target, result[1:], sum(seen) / len(seen), math.log(len(seen)))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"seqused_k": [385]}, ["seqused_k[0]", "385", "384"]),
            ({"seqused_k": [7]}, ["seqused_k[0]", "7", "8 queries"]),
            ({"cu_seqlens_q": [0, 9]}, ["cu_seqlens_q[-1]", "9", "8"]),
            ({"page_table": [[1, 2, 5]]}, ["page_table[0, 2]", "5", "0 to 4"]),
            ({"page_table": [[1, -1, 3]]}, ["page_table[0, 1]", "-1", "0 to 4"]),
            ({"page_table": [[1, 2]]}, ["seqused_k[0]", "380", "256"]),
        ],
    )
    def test_contradictions(self, change: dict[str, Any], words: list[str]) -> None:
        problem = paged_case([[0, 1, 2]] * 8, prefixes=[372])
        with pytest.raises(ValueError) as caught:
            replaced(problem, **{k: torch.tensor(x, dtype=torch.int32) for k, x in change.items()})
        for word in words:
            assert word in str(caught.value)


class TestC49SilentFallback:
    """Asked for one thing, given another without a word."""

    ROWS = ([0, 1, 2, 3, 4, 5, 6, 600], [520, 521, 522, 523, 524, 525, 526, 610])

    def case(self, target: Target) -> pw.AttentionProblem:
        """701 pages; even rows share one set of pages, odd rows another: grouping has much to find."""
        return paged_case(
            [self.ROWS[i % 2] for i in range(64)],
            prefixes=[700 * 128],
            v=lambda request, positions: torch.where(page_number(request, positions) < 512, 1.0, 3.0),
            device=target.device,
        )

    def test_more_than_512_pages(self, target: Target) -> None:
        problem = self.case(target)
        result: Result = target.run(problem)
        expected = torch.tensor([(7 * 1.0 + 3.0) / 8, 3.0]).repeat(32)
        assert_close(target, result, expected[:, None, None], math.log(8 * 128))
        strategy = target.load(problem)
        visits = strategy.work(problem).visits
        expected_visits = {"per_query": 64 * 8, "union4": 16 * 16, "union8": 8 * 16, "page_union": 16}
        # A call of 64 queries has one a tile, hence the same rounds in any order: `auto` does not search.
        expected_visits["auto"] = expected_visits["union8"]
        # Every regrouping makes groups of equal rows.
        assert visits == expected_visits.get(target.strategy, 8 * 8)

    @pytest.mark.parametrize("name", ["regroup_w64", "regroup_w128"])
    def test_grouping_is_eq_6(self, name: str) -> None:
        problem = self.case(Target(name))
        ids = pw.load(name).prepare(problem).query_ids[0].numpy()  # type: ignore[attr-defined]
        expected = greedy_order_numpy(problem.q2k_indices[0].numpy(), int(name[9:]), 8)
        np.testing.assert_array_equal(ids, expected)
        # The lowest row opens a group and the next seven of its kind follow.
        assert ids.tolist() == [
            i + j for i in range(0, 64, 16) for first in (0, 1) for j in range(first, 16, 2)
        ]

    def test_one_query(self, target: Target) -> None:
        result = target.run(paged_case([[0]], prefixes=[127], v=constant(1.0), device=target.device))
        assert_close(target, result, 1.0, math.log(128))

    @pytest.mark.parametrize("name", ["regroup_w64", "regroup_w128"])
    def test_missing_extension(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = paged_case([[0]] * 9, prefixes=[127])
        monkeypatch.setitem(sys.modules, "pageweaver._native", None)
        with pytest.raises(ImportError, match="build it from the repository root"):
            pw.load(name)(problem)

    @pytest.mark.parametrize("name", pw.available())
    def test_kernels_for_host_tensors(self, name: str) -> None:
        problem = paged_case([[0]] * 9, prefixes=[127])
        strategy = Target(name).load(problem)
        strategy.backend = "cuda"
        out = torch.full(problem.q.shape, 7.0, dtype=torch.bfloat16)
        with pytest.raises(pw.UnsupportedDeviceError, match=r"'cuda' needs CUDA tensors.*'reference'"):
            strategy(problem, out)
        assert (out == 7.0).all()

    def test_unknown_names(self) -> None:
        with pytest.raises(ValueError, match=r"strategy: got 'union16', supported: \('per_query', "):
            pw.load("union16")
        with pytest.raises(ValueError, match=r"backend: got 'gpu', supported: \('cuda', 'reference'\)"):
            pw.load("union8", backend="gpu")
        problem = paged_case([[0]], prefixes=[0])
        with pytest.raises(ValueError, match=r"arithmetic: got 'fp16', supported .*\('fp8', 'split', "):
            pw.load("union8", arithmetic="fp16")(problem)
        assert ids_tensor([[0]]).shape == (1, 1, 16)
