"""union4 and union8 on Hopper: equal bits in any grouping and order, from any layout, on every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.strategies import query_union

from ..helpers import E4M3, Result, Target, assert_same_bits, poison, random_problem, replaced
from .hopper import WATCHDOG, missing
from .problems import DEVICE, LONG, SIZES, assert_accurate, long_context, messy, selected, shuffled_ids

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]


class TestSameBits:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_any_grouping(self, peers: tuple[Target, ...], case: int) -> None:
        """union4, union8, its mappings, all in any order of queries."""
        problem = messy(case)
        expected = peers[0].run(problem)
        for target in peers:
            assert_same_bits(target.run(problem), expected)
            strategy = target.load(problem)
            for seed in range(2):
                out = torch.full_like(expected.out, torch.nan, dtype=torch.bfloat16, device=DEVICE)
                lse = torch.full_like(expected.lse, 777.0, device=DEVICE)
                workspace = strategy.workspace(problem)
                poison(workspace)
                ids = shuffled_ids(problem, seed)
                schedule = strategy.prepare(problem, workspace, query_ids=ids)  # type: ignore[call-arg]
                strategy.execute(problem, schedule, out, lse)
                assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_any_tile(self, target: Target, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A small call fills tiles in part, down to one query: the bits of full ones."""
        problem = messy(case)
        full = tile = problem.queries_per_tile
        results: list[Result] = []
        while tile >= 1:
            monkeypatch.setattr(query_union, "tile_queries", lambda rows, group, tile=tile: tile)
            results.append(target.run(problem))
            tile //= 2
        assert len(results) == full.bit_length()
        for result in results[1:]:
            assert_same_bits(result, results[0])

    @pytest.mark.parametrize("name", ["low", "high"])
    def test_selections(self, peers: tuple[Target, ...], name: str) -> None:
        problem = selected(name, 4096)
        expected = peers[0].run(problem)
        for target in peers[1:]:
            assert_same_bits(target.run(problem), expected)

    def test_a_million_tokens(self, peers: tuple[Target, ...]) -> None:
        for case in range(len(LONG)):
            problem = long_context(case)
            expected = peers[0].run(problem)
            for target in peers[1:]:
                assert_same_bits(target.run(problem), expected)

    @pytest.mark.parametrize("kind", ["low", "high", "ties"])
    def test_c50_repeats(self, target: Target, kind: str) -> None:
        """The same bits 50 times while another stream keeps the GPU busy."""
        problem = selected("low" if kind == "ties" else kind, 4096)
        if kind == "ties":
            ids = problem.q2k_indices[:, :1].expand(-1, problem.total_q, -1)
            problem = replaced(problem, q2k_indices=ids)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
        strategy(problem, out, lse, workspace)
        expected, expected_lse = out.clone(), lse.clone()
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
            product = torch.empty_like(matrix)
        torch.cuda.synchronize()
        for _ in range(50):
            with torch.cuda.stream(other):
                for _ in range(4):
                    torch.mm(matrix, matrix, out=product)
            poison(workspace)
            out.fill_(torch.nan)
            strategy(problem, out, lse, workspace)
            differ += (out.view(torch.int16) != expected.view(torch.int16)).sum()
            differ += (lse.view(torch.int32) != expected_lse.view(torch.int32)).sum()
        torch.cuda.synchronize()
        assert int(differ) == 0

    def test_scales_on_the_device(self, target: Target) -> None:
        scales: dict[str, Any] = {"k_scale": 0.7, "v_scale": 1.9, "softmax_scale": 0.11}
        problem = random_problem(device=DEVICE, **scales)
        fetched = {name: torch.tensor(x, device=DEVICE) for name, x in scales.items()}
        assert_same_bits(target.run(replaced(problem, **fetched)), target.run(problem))
        assert_accurate(target, problem)


class TestC32Views:
    """Strides are followed: bit-identical to contiguous copies."""

    @staticmethod
    def plain(heads: int) -> pw.AttentionProblem:
        problem = random_problem(num_kv_heads=heads, group_size=16 // heads, device=DEVICE)
        names = ("q", "k_cache", "v_cache")
        return replaced(problem, **{name: getattr(problem, name).contiguous() for name in names})

    def test_queries(self, target: Target) -> None:
        problem = self.plain(1)
        expected, rows = target.run(problem), problem.total_q
        packed = torch.full((rows, 18, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        packed[:, :16] = problem.q
        wide = torch.full((rows, 16, 136), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        wide[..., 8:] = problem.q
        views = {
            "slice of packed rows": packed[:, :16],
            "head-major": problem.q.transpose(0, 1).contiguous().transpose(0, 1),
            "slice of wide heads": wide[..., 8:],
            "every second row": problem.q.repeat_interleave(2, dim=0)[::2],
        }
        for name, view in views.items():
            assert torch.equal(view.nan_to_num(7.0), problem.q.nan_to_num(7.0)), name
            assert_same_bits(target.run(replaced(problem, q=view)), expected)

    @pytest.mark.parametrize("heads", [1, 2])
    def test_caches(self, target: Target, heads: int) -> None:
        problem = self.plain(heads)
        expected = target.run(problem)
        raw = [cache.view(torch.uint8) for cache in (problem.k_cache, problem.v_cache)]
        pages = problem.num_pages
        nan = torch.full((2 * pages, 128, heads, 384), 0x7F, dtype=torch.uint8, device=DEVICE)
        packed = torch.cat(raw, dim=-1)
        wide, pool = nan[:pages].clone(), nan[..., :256].clone()
        wide[..., 16:144], wide[..., 160:288] = raw
        pool[1::2] = packed
        views = {
            "packed rows": (packed[..., :128], packed[..., 128:]),
            "unbound pair": torch.stack(raw, dim=1).unbind(1),
            "slices of wide rows": (wide[..., 16:144], wide[..., 160:288]),
            "head-major pages": tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in raw),
            "every second page": (pool[1::2, ..., :128], pool[1::2, ..., 128:]),
            "K and V apart": (packed[..., :128], raw[1]),
        }
        if heads == 1:
            # The stride of a dimension of one element means nothing.
            views["odd stride"] = tuple(x.as_strided(x.shape, (*x.stride()[:2], 1, 1)) for x in raw)
        for name, (k_view, v_view) in views.items():
            assert torch.equal(k_view, raw[0]) and torch.equal(v_view, raw[1]), name
            moved = replaced(problem, k_cache=k_view.view(E4M3), v_cache=v_view.view(E4M3))
            assert_same_bits(target.run(moved), expected)

    def test_outputs(self, target: Target) -> None:
        """Written in place, and nothing beside them."""
        problem = self.plain(2)
        expected, rows = target.run(problem), problem.total_q
        wide = torch.full((16, rows, 200), 5.0, dtype=torch.bfloat16, device=DEVICE)
        wide_lse = torch.full((16, 2 * rows), 5.0, device=DEVICE)
        out, lse = wide[..., 8:136].transpose(0, 1), wide_lse[:, ::2].T
        target.load(problem)(problem, out, lse)
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)
        assert (wide[..., :8] == 5.0).all() and (wide[..., 136:] == 5.0).all()
        assert (wide_lse[:, 1::2] == 5.0).all()
