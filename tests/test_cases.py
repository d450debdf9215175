"""Faults that people hit in kernels like these (1/2): what one row's ids, pages and positions can do.

Each test carries the number of its case. V = page number makes most of them readable: the output says
which pages were used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from pageweaver.common.problem import AttentionProblem
from pageweaver.strategies.page_union import PageUnion, combine_partials

from .helpers import (
    E4M3,
    INT32_MAX,
    INT32_MIN,
    Result,
    Target,
    assert_close,
    assert_empty,
    assert_repeats,
    assert_same_bits,
    constant,
    ids_tensor,
    naive_attention,
    page_number,
    paged_case,
    replaced,
)

INF = math.inf


def page_plus_one(request: int, positions: torch.Tensor) -> torch.Tensor:
    """V that page 0 cannot hide behind."""
    return page_number(request, positions) + 1


class TestC16RowsWithoutKeys:
    """0/0 in the final normalise, or an LSE from the initial maximum."""

    def test_rows_among_others(self, target: Target) -> None:
        rows = [[], [9], [-1] * 15 + [0], *[[0, 1, 2]] * 5]  # page 9 does not exist yet
        problem = paged_case(rows, prefixes=[256], v=page_plus_one, device=target.device)
        result = target.run(problem)
        assert_empty(result[:2])
        assert_close(target, result[2:3], 1.0, math.log(128))
        out, lse = naive_attention(problem)
        assert_close(target, result, out, lse)
        # The other rows are what they are beside full neighbours.
        full = paged_case([[0, 1, 2]] * 2 + rows[2:], prefixes=[256], v=page_plus_one, device=target.device)
        assert_repeats(target, result[2:], target.run(full)[2:], 0.0)

    def test_whole_batch(self, target: Target) -> None:
        problem = paged_case([[]] * 40, prefixes=[256], device=target.device)
        assert_empty(target.run(problem))

    def test_whole_window(self, target: Target) -> None:
        rows = [[] if 64 <= i < 128 else [i % 3, 2] for i in range(192)]
        result = target.run(paged_case(rows, prefixes=[384], v=page_plus_one, device=target.device))
        assert_empty(result[64:128])
        expected = [sum(p + 1 for p in {i % 3, 2}) / len({i % 3, 2}) for i in range(64)]
        assert_close(target, result[:64], torch.tensor(expected)[:, None, None])


class TestC17EmptyPartials:
    """(-inf) - (-inf) inside the combine; it has no target, for it is one function."""

    @pytest.mark.parametrize(
        ("lse", "out", "merged"),
        [
            ([-INF, -INF], 0.0, -INF),
            ([-INF, 0.5], 2.0, 0.5),
            ([0.5, -INF], 1.0, 0.5),
            ([-INF] * 16, 0.0, -INF),
            ([3.0, 3.0], 1.5, 3.0 + math.log(2)),
            ([-1e30, 2.0], 2.0, 2.0),
            ([-1e30, -INF], 1.0, -1e30),
            ([], 0.0, -INF),
        ],
    )
    def test_combine(self, lse: list[float], out: float, merged: float) -> None:
        slots = len(lse)
        lse_partials = torch.tensor(lse).reshape(1, slots, 1).expand(3, slots, 16)
        # Slot i holds i + 1, a dead one uninitialised memory.
        partials = torch.arange(1.0, slots + 1)[None, :, None, None].expand(3, slots, 16, 128).clone()
        partials[lse_partials == -INF] = torch.nan
        result, result_lse = combine_partials(partials, lse_partials)
        assert torch.equal(result, torch.full((3, 16, 128), out))
        assert not result.signbit().any()
        assert torch.allclose(result_lse, torch.full((3, 16), merged), rtol=1e-6, atol=0.0)
        if sum(value != -INF for value in lse) == 1:
            assert torch.equal(result_lse, torch.full((3, 16), merged))


class TestC18FirstPageMasked:
    """The running maximum is still -inf when the row meets a page that is not its own."""

    @pytest.mark.parametrize("own", [15, 0])
    def test_own_page_last_or_first(self, target: Target, own: int) -> None:
        others = [page for page in range(16) if page != own]
        problem = paged_case([[own]] + [others] * 7, prefixes=[2040], device=target.device)
        result = target.run(problem)
        tokens = 121 if own == 15 else 128  # position 2040 sees 121 slots of page 15
        assert_close(target, result[:1], float(own), math.log(tokens))
        out, lse = naive_attention(problem)
        assert_close(target, result, out, lse)

    def test_first_page_after_the_row(self, target: Target) -> None:
        # Rows 0 to 7 sit at 120 to 127 and list page 1, which starts at 128; rows 8 to 15 see it.
        problem = paged_case([[1, 0]] * 8 + [[1]] * 8, prefixes=[120], v=page_plus_one, device=target.device)
        result = target.run(problem)
        assert_close(target, result[:8], 1.0)
        assert_close(target, result[8:], 2.0, torch.arange(1.0, 9.0).log()[:, None])


class TestC19LseBase:
    """A base-2 LSE fed to a natural-log merge gives 0.983 or 0.877."""

    @staticmethod
    def case(target: Target, pages: list[int]) -> Result:
        return target.run(
            paged_case(
                [pages],
                prefixes=[255],
                q0=4.0,
                k0=lambda _, positions: 8.0 * (positions // 128),
                v=page_number,
                device=target.device,
            )
        )

    def test_lse_and_merge(self, target: Target) -> None:
        def run(pages: list[int]) -> Result:
            return self.case(target, pages)

        both, first, second = run([0, 1]), run([0]), run([1])
        logit = 32 / math.sqrt(128)
        assert_close(target, first, 0.0, math.log(128))
        assert_close(target, second, 1.0, math.log(128) + logit)
        # 15.1 is rounded to 15 of 256 in E4M3: 0.9446 instead of 0.9442.
        assert (both.out - 0.9442).abs().max() < 3e-3
        assert (both.lse - (math.log(128) + math.log1p(math.exp(logit)))).abs().max() < 2e-3
        merged, merged_lse = combine_partials(
            torch.stack([first.out, second.out], dim=1), torch.stack([first.lse, second.lse], dim=1)
        )
        assert (merged - both.out).abs().max() < 3e-3
        assert (merged_lse - both.lse).abs().max() < 2e-3


@pytest.mark.parametrize("rows", [15, 16, 17])
def test_c20_lse_axes(target: Target, rows: int) -> None:
    """[total_q, heads] and not [heads, total_q], also where both have 16 entries."""
    problem = paged_case(
        [[0]] * rows,
        prefixes=[112],
        # Later rows see larger keys, later heads look at them less: nothing is symmetric.
        q0=(15 - torch.arange(16.0)).expand(rows, 16),
        k0=lambda _, positions: (positions - 112).clamp(min=0) / 2,
        device=target.device,
    )
    result = target.run(problem)
    _, lse = naive_attention(problem)
    assert result.lse.shape == (rows, 16)
    assert lse[10, 5] - lse[5, 10] > 1.0
    assert_close(target, result, 0.0, lse, spread=1.0)


class TestC21DuplicateIds:
    """No dedup counts a page three times, dedup of neighbours twice."""

    LISTS = (
        ([0, 1, 1, 1], [0, 1], 0.5),
        ([1, 0, 1], [0, 1], 0.5),
        ([2] * 16, [2], 2.0),
        ([0, 1] + [2] * 14, [0, 1, 2], 1.0),
    )

    @pytest.mark.parametrize(("listed", "pages", "value"), LISTS)
    def test_value_and_bits(self, target: Target, listed: list[int], pages: list[int], value: float) -> None:
        result = target.run(paged_case([listed], prefixes=[383], device=target.device))
        assert_close(target, result, value, math.log(128 * len(pages)))
        assert_same_bits(result, target.run(paged_case([pages], prefixes=[383], device=target.device)))

    def test_one_row_of_a_group(self, target: Target) -> None:
        for listed, pages, value in self.LISTS:
            rows = [[0, 1, 2]] * 70
            messy, tidy = (
                target.run(paged_case([*rows[:3], row, *rows[4:]], prefixes=[512], device=target.device))
                for row in (listed, pages)
            )
            assert_close(target, messy[3:4], value)
            assert_close(target, messy[4:], 1.0)
            assert_same_bits(messy, tidy)

    @pytest.mark.parametrize(
        ("pairs", "counts"),
        [
            (False, [2, 2, 1, 3]),
            # Pages 0 and 1 share three queries and merge their partials; page 2 stays alone.
            (True, [1, 1, 1, 2]),
        ],
    )
    def test_partials(self, pairs: bool, counts: list[int]) -> None:
        problem = paged_case([listed for listed, _, _ in self.LISTS], prefixes=[384])
        schedule = PageUnion(pairs=pairs).prepare(problem)
        assert schedule.partial_counts[0].tolist() == counts


class TestC22UnsortedIds:
    """Kernels that stop at the first -1, assume ascending ids, or take the last listed page for the tail."""

    @pytest.mark.parametrize("rows", [63, 64, 65])
    @pytest.mark.parametrize(
        ("listed", "pages"),
        [
            ([5, -1, 2, -1, -1, 0], [0, 2, 5]),
            ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]),
            ([5, 0, 1], [0, 1, 5]),
            ([-1] * 13 + [3, 1, 2], [1, 2, 3]),  # the tail page is not selected
            ([-1] * 15 + [5], [5]),
        ],
    )
    def test_bits_of_the_tidy_list(
        self, target: Target, rows: int, listed: list[int], pages: list[int]
    ) -> None:
        # Positions 640 to 704: page 5 is the tail, partly visible.
        def run(row: list[int]) -> Result:
            return target.run(
                paged_case(
                    [row] * rows,
                    prefixes=[640],
                    q0=2.0,
                    k0=lambda _, positions: (positions % 3).float(),
                    v=page_plus_one,
                    device=target.device,
                )
            )

        messy = run(listed)
        assert_same_bits(messy, run(pages))
        weight = torch.tensor([math.exp(2 * (slot % 3) / math.sqrt(128)) for slot in range(705)])
        for i in (0, rows - 1):
            seen = [t for p in pages for t in range(128 * p, min(128 * p + 128, 641 + i))]
            value = (weight[seen] * (torch.tensor(seen) // 128 + 1)).sum() / weight[seen].sum()
            assert_close(target, messy[i : i + 1], float(value), spread=5.0)


class TestC23IdsOutOfRange:
    """Only id >= 0 is tested, or a bitmap word is computed from a negative or huge id."""

    BAD = (0x7FC00000, INT32_MAX, INT32_MIN, -2, 4, 5, 512, 100000)

    def test_ignored_beside_valid_ids(self, target: Target) -> None:
        # Two requests of 4 pages each: past the first one's page table lies the second one's.
        def rows(bad: Sequence[int]) -> torch.Tensor:
            return ids_tensor([[*bad[:i], 1, bad[i], 3, *bad[i + 1 :]] for i in range(8)] * 2)

        def run(ids: torch.Tensor) -> tuple[AttentionProblem, Result]:
            problem = paged_case(
                ids,
                prefixes=[500, 500],
                lengths=[8, 8],
                v=lambda request, positions: positions // 128 + 4 * request,
                device=target.device,
            )
            return problem, target.run(problem)

        problem, messy = run(rows(self.BAD))
        _, tidy = run(ids_tensor([[1, 3]] * 16))
        assert_same_bits(messy, tidy)
        out, lse = naive_attention(problem)
        assert_close(target, messy, out, lse, spread=0.0)
        assert {float(x) for x in messy.out[:8].flatten().round()} == {2.0}
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        if target.owns_queries:
            assert schedule.query_ids.long().sort(dim=1).values.tolist() == [list(range(16))]  # type: ignore[attr-defined]

    def test_nothing_else(self, target: Target) -> None:
        rows = [[bad] * 16 for bad in self.BAD]
        assert_empty(target.run(paged_case(rows, prefixes=[500], device=target.device)))


class TestC24UnwrittenSlots:
    """Scores masked, V not: 0 * NaN. The builder poisons pages and slots that nobody wrote."""

    @pytest.mark.parametrize(
        ("kv_dtype", "unwritten"),
        [
            (E4M3, (math.nan, math.nan)),
            (torch.bfloat16, (math.nan, math.nan)),
            (torch.bfloat16, (INF, INF)),
            (torch.bfloat16, (-INF, math.nan)),
        ],
    )
    def test_bits_of_zeros(
        self, target: Target, kv_dtype: torch.dtype, unwritten: tuple[float, float]
    ) -> None:
        def run(fill: tuple[float, float]) -> Result:
            return target.run(
                paged_case(
                    [[0, -1, 2]] * 6 + [[2]],
                    prefixes=[293],
                    q0=1.0,
                    k0=constant(-3.0),  # a zero key would win against the written ones
                    v=page_plus_one,
                    kv_dtype=kv_dtype,
                    unwritten=fill,
                    device=target.device,
                )
            )

        poisoned = run(unwritten)
        assert_same_bits(poisoned, run((0.0, 0.0)))
        assert_close(target, poisoned[6:], 3.0, math.log(44) - 3 / math.sqrt(128))

    def test_every_partial_length(self, target: Target) -> None:
        # 127 requests of one query each, at the end of 1 to 127 tokens.
        def run(fill: tuple[float, float]) -> Result:
            return target.run(
                paged_case(
                    [[0]] * 127,
                    prefixes=list(range(127)),
                    lengths=[1] * 127,
                    v=constant(1.0),
                    unwritten=fill,
                    device=target.device,
                )
            )

        poisoned = run((math.nan, math.nan))
        assert_same_bits(poisoned, run((0.0, 0.0)))
        assert_close(target, poisoned, 1.0, torch.arange(1.0, 128.0).log()[:, None])

    def test_parking_page_is_poison(self, target: Target) -> None:
        problem = paged_case([[0]], prefixes=[0], device=target.device)
        assert problem.k_cache[0].float().isnan().all() and not (problem.page_table == 0).any()
        moved = replaced(problem, page_table=torch.zeros_like(problem.page_table))
        # Reading it does show, so the tests above can fail.
        assert target.run(moved, nan_rows=[0]).out.isnan().all()
