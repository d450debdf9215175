"""page_union on Hopper: its lists against the reference's, its partials, its combine, its workspace.

Lists are the reference's place for place. The modules of the union kernels hold what is asked of any kernel's
numbers and calls; this one says that page_union is asked as well.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.captures import resolve_selection
from pageweaver.eval.output import default_captures
from pageweaver.strategies import page_union
from pageweaver.strategies.page_union import PageUnion, combine_partials, pairing
from pageweaver.strategies.page_union.cuda import execute_cuda

from ..helpers import (
    E4M3,
    Target,
    assert_close,
    assert_empty,
    assert_same_bits,
    paged_case,
    poison,
    replaced,
)
from .hopper import PAGE_TARGETS, WATCHDOG, missing
from .problems import DEVICE, LONG, SIZES, TWIN_NRMS, long_context, messy, selected, twin
from .test_union_accuracy import TestAccuracy, TestOnes, test_huge_logits  # noqa: F401
from .test_union_bits import TestC32Views  # noqa: F401
from .test_union_calls import (  # noqa: F401
    TestC41Alignment,
    test_cache_without_a_page,
    test_expanded_keys_are_refused,
    test_narrow_page_table,
    test_unusable_device_scales,
    test_workspace_of_a_longer_context,
)
from .test_union_graphs import TestC36Graphs  # noqa: F401
from .test_union_sizes import huge_cache, test_c30_caches_past_32_bits, test_c31_long_grids  # noqa: F401

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

LISTS = ("unit_pages", "unit_offsets", "partial_counts", "unit_queries", "unit_slots")


@pytest.fixture(params=PAGE_TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


def assert_same_lists(target: Target, problem: pw.AttentionProblem) -> Any:
    """What the kernels prepared is what torch prepares; returns it."""
    strategy = target.load(problem)
    workspace = strategy.workspace(problem)
    poison(workspace)
    found: Any = strategy.prepare(problem, workspace)
    expected: Any = twin(target).load(problem).prepare(problem)
    for head in range(problem.num_kv_heads):
        members = int(expected.unit_offsets[head, -1])
        for name in LISTS:
            length = members if name in ("unit_queries", "unit_slots") else None
            ours, theirs = (getattr(schedule, name)[head, :length] for schedule in (found, expected))
            assert torch.equal(ours, theirs), name
    return found


def wide_batch(pages: int = 3000, heads: int = 2) -> pw.AttentionProblem:
    """More pages a request than are paired, in a batch that shares the matrix of overlaps."""
    lengths = [90, 0, 33, 200, 1, 64]
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(0, pages, (heads, sum(lengths), 16), generator=rng, dtype=torch.int32)
    ids[:, :, 8:] %= 50
    cache = torch.randn(64, 128, heads, 128, generator=rng).to(E4M3).to(DEVICE)
    return pw.AttentionProblem(
        q=torch.randn(sum(lengths), 4 * heads, 128, generator=rng).bfloat16().to(DEVICE),
        k_cache=cache,
        v_cache=cache,
        q2k_indices=ids.to(DEVICE),
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE),
        seqused_k=torch.full((len(lengths),), pages * 128, dtype=torch.int32, device=DEVICE),
        page_table=torch.randint(0, 64, (len(lengths), pages), generator=rng, dtype=torch.int32).to(DEVICE),
    )


class TestLists:
    @pytest.mark.parametrize("case", range(len(SIZES)))
    def test_messy(self, target: Target, case: int) -> None:
        assert_same_lists(target, messy(case))

    @pytest.mark.parametrize("name", ["low", "mid", "high", "interleaved"])
    def test_selections(self, target: Target, name: str) -> None:
        assert_same_lists(target, selected(name, 4096))

    @pytest.mark.parametrize("case", range(len(LONG)))
    def test_a_million_tokens(self, target: Target, case: int) -> None:
        """8,192 pages, of which 1,024 are paired."""
        assert_same_lists(target, long_context(case))

    def test_wide_batch(self, target: Target) -> None:
        assert_same_lists(target, wide_batch())

    def test_ties(self, target: Target) -> None:
        """All rows with equal page sets: every overlap is the same."""
        problem = selected("low", 1000)
        same = problem.q2k_indices[:, :1].expand(-1, problem.total_q, -1)
        assert_same_lists(target, replaced(problem, q2k_indices=same))

    def test_many_requests(self, target: Target) -> None:
        """Requests that begin anywhere in a word of queries, a third of them empty."""
        lengths = [(7 * i) % 3 for i in range(5000)]
        total = sum(lengths)
        cache = torch.zeros(1, 128, 1, 128, device=DEVICE).to(E4M3)
        problem = pw.AttentionProblem(
            q=torch.zeros(total + 5, 16, 128, dtype=torch.bfloat16, device=DEVICE),
            k_cache=cache,
            v_cache=cache,
            q2k_indices=torch.randint(-1, 3, (1, total + 5, 16), dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE),
            seqused_k=torch.tensor([n + (i % 300) for i, n in enumerate(lengths)]).int().to(DEVICE),
            page_table=torch.zeros(len(lengths), 3, dtype=torch.int32, device=DEVICE),
        )
        assert_same_lists(target, problem)

    @pytest.mark.parametrize("case", [0, 2, 4])
    def test_work(self, target: Target, case: int) -> None:
        problem = messy(case)
        strategy = target.load(problem)
        counts = twin(target).load(problem).work(problem)
        bytes_needed = strategy.workspace_bytes(problem)
        assert strategy.work(problem) == dataclasses.replace(counts, workspace_bytes=bytes_needed)


@pytest.mark.parametrize("kind", ["long", "batch", "short"])
def test_rounds(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V packed for some pages at a time: lists are the reference's, outputs those of one round."""
    made = {"long": lambda: long_context(1), "batch": wide_batch, "short": lambda: selected("mid", 1000)}
    problem = made[kind]()
    runs: list[Any] = []
    for room in (2**30, 64):
        monkeypatch.setattr(pairing, "ROUND_PAGES", room)
        schedule = assert_same_lists(target, problem)
        runs.append((schedule.views["unit_counts"].shape[0] - 1, target.run(problem)))
    (rounds, expected), (more, found) = runs
    # Pages that may be paired all have room at once: over a short context those are all pages.
    assert rounds == 1 and (more > 1) == (kind != "short" or not target.options["pairs"])
    assert_same_bits(found, expected)


def test_lists_of_real_captures(target: Target) -> None:
    """Whose pairs tests/test_pairing.py compares with the best matching."""
    for selection in resolve_selection(default_captures()):
        assert_same_lists(target, pw.make_problem(selection, device=DEVICE))


class TestPartials:
    def test_against_the_twin(self, target: Target) -> None:
        """Every partial on its own."""
        problem = messy(0)
        schedules: list[Any] = []
        for side in (target, twin(target)):
            strategy = side.load(problem)
            workspace = strategy.workspace(problem)
            poison(workspace)
            schedules.append(strategy.prepare(problem, workspace))
            strategy.execute(problem, schedules[-1])
        ours, theirs = schedules
        live = torch.arange(problem.topk, device=DEVICE) < ours.partial_counts[..., None]
        found, expected = ours.partials[live].float(), theirs.partials[live].float()
        assert (found - expected).norm() <= TWIN_NRMS[target.arithmetic] * expected.norm()
        # A partial may see one token, whose logit both sides round alike.
        lse_error = (ours.lse_partials[live] - theirs.lse_partials[live]).abs().max()
        assert lse_error <= {"fp8": 0.05, "split": 1e-3}[target.arithmetic]

    @pytest.mark.parametrize("kind", ["low", "interleaved", "ties"])
    def test_c50_repeats(self, target: Target, kind: str) -> None:
        """The same bits and lists 50 times while another stream keeps the GPU busy."""
        problem = selected("low" if kind == "ties" else kind, 4096)
        if kind == "ties":
            same = problem.q2k_indices[:, :1].expand(-1, problem.total_q, -1)
            problem = replaced(problem, q2k_indices=same)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out, lse = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2], device=DEVICE)
        schedule: Any = strategy.prepare(problem, workspace)
        strategy.execute(problem, schedule, out, lse)
        members = int(schedule.unit_offsets[0, -1])
        watched = [out.view(torch.int16), lse.view(torch.int32), schedule.unit_queries[:, :members]]
        expected = [x.clone() for x in watched]
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=DEVICE)
            product = torch.empty_like(matrix)
        torch.cuda.synchronize()
        for _ in range(50):
            with torch.cuda.stream(other):
                torch.mm(matrix, matrix, out=product)
            out.fill_(torch.nan)
            strategy(problem, out, lse, workspace)
            for mine, first in zip(watched, expected, strict=True):
                differ += (mine != first).sum()
        torch.cuda.synchronize()
        assert int(differ) == 0

    def test_busy_memory(self, target: Target) -> None:
        """The same bits 400 times while another stream keeps memory busy, so that reads and writes wait."""
        problem = selected("mid", 1000)
        strategy = target.load(problem)
        workspace, out = strategy.workspace(problem), torch.empty_like(problem.q)
        expected = strategy(problem, None, None, workspace)
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            source, copy = torch.zeros(2, 2**27, dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize()
        for _ in range(400):
            with torch.cuda.stream(other):
                for _ in range(4):
                    copy.copy_(source)
            strategy(problem, out, None, workspace)
            differ += (out.view(torch.int16) != expected.view(torch.int16)).sum()
        torch.cuda.synchronize()
        assert int(differ) == 0


class TestC17Combine:
    """The combine alone, on partials made by hand."""

    @staticmethod
    def combine(
        lse_rows: list[list[float]], group_size: int = 16, v_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """One query a row of LSE values; dead partials hold NaN, live ones random numbers."""
        rows, topk = len(lse_rows), 32
        problem = paged_case(
            torch.full((1, rows, topk), -1, dtype=torch.int32),
            prefixes=[0],
            group_size=group_size,
            v_scale=v_scale,
            device=DEVICE,
        )
        strategy = PageUnion(backend="cuda")
        workspace = strategy.workspace(problem)
        poison(workspace)
        schedule: Any = strategy.prepare(problem, workspace)
        rng = torch.Generator().manual_seed(rows)
        schedule.partials.copy_(torch.randn(schedule.partials.shape, generator=rng))
        for row, values in enumerate(lse_rows):
            lse = torch.tensor(values, device=DEVICE)
            schedule.partial_counts[0, row] = len(values)
            schedule.lse_partials[0, row, : len(values)] = lse[:, None]
            schedule.partials[0, row, : len(values)][lse == -torch.inf] = torch.nan
            schedule.partials[0, row, len(values) :] = torch.nan
        out = torch.full(problem.q.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.full(problem.q.shape[:2], 777.0, device=DEVICE)
        execute_cuda(problem, schedule.views, out, lse, "fp8", combine_only=True)
        return out, lse, schedule

    @pytest.mark.parametrize("group_size", [16, 4, 1])
    def test_by_hand(self, group_size: int) -> None:
        inf = math.inf
        rows = [
            [-inf, -inf],
            [-inf, 0.5],
            [0.5, -inf],
            [-inf] * 16,
            [-inf] * 32,
            [3.0, 3.0],
            [-1e30, 2.0],
            [],
            [0.25 * i for i in range(16)],
            [80.0 - 5.0 * i for i in range(32)],
            [-90.0, -91.0, -inf, -90.5],
        ]
        out, lse, schedule = self.combine(rows, group_size)
        assert not out.isnan().any() and not lse.isnan().any()
        partials = schedule.partials[0]
        for row in (0, 3, 4, 7):
            assert (out[row].view(torch.int16) == 0).all() and (lse[row] == -inf).all()
        for row, slot, value in ((1, 1, 0.5), (2, 0, 0.5), (6, 1, 2.0)):
            assert torch.equal(out[row], partials[row, slot]) and (lse[row] == value).all()
        for row in (5, 8, 9, 10):
            values = schedule.lse_partials[0, row : row + 1, : len(rows[row])]
            wanted, wanted_lse = combine_partials(partials[row : row + 1, : len(rows[row])], values)
            # BF16 rounds once more; weights come from an approximate exponential.
            assert ((out[row] - wanted[0]).abs() <= 2.0**-8 * wanted[0].abs() + 1e-6).all()
            assert ((lse[row] - wanted_lse[0]).abs() <= 1e-5 * wanted_lse[0].abs()).all()

    def test_a_row_of_nan_stays_alone(self) -> None:
        """A query that is not a number shows in its own row."""
        out, lse, _ = self.combine([[1.0, 2.0], [math.nan, 1.0], [1.0]])
        assert out[1].isnan().all() and lse[1].isnan().all()
        assert not out[::2].isnan().any() and not lse[::2].isnan().any()

    def test_value_scale(self) -> None:
        plain, scaled = (self.combine([[1.0, 2.0], [0.0]], v_scale=scale)[0] for scale in (1.0, 4.0))
        assert torch.equal(scaled, 4 * plain)


def guarded(strategy: pw.Strategy, problem: pw.AttentionProblem) -> tuple[pw.Workspace, list[torch.Tensor]]:
    """A workspace whose every buffer lies between guard words, all poisoned."""
    buffers, guards = {}, []
    for name, (shape, dtype) in strategy.workspace_layout(problem).items():
        size = math.prod(shape) * dtype.itemsize
        whole = torch.full((size + 512,), 0x7F, dtype=torch.uint8, device=DEVICE)
        buffers[name] = whole[256 : 256 + size].view(dtype)
        guards += [whole[:256], whole[256 + size :]]
    return pw.Workspace(strategy.name, buffers), guards


class TestC43Workspace:
    @pytest.mark.parametrize("kind", ["one page", "disjoint", "all", "messy"])
    def test_guard_words(self, target: Target, kind: str) -> None:
        """The most crowded list, the most units, a work list of exactly ``total_q * topk`` members."""
        rows, topk = 16384, 16
        if kind == "messy":
            problem = messy(0)
        else:
            pages = {"one page": 1, "disjoint": rows * topk, "all": 16}[kind]
            ids = torch.arange(rows * topk, dtype=torch.int32, device=DEVICE).view(1, rows, topk) % pages
            cache = torch.ones(8, 128, 1, 128, device=DEVICE).to(E4M3)
            problem = pw.AttentionProblem(
                q=torch.zeros(rows, 1, 128, dtype=torch.bfloat16, device=DEVICE),
                k_cache=cache,
                v_cache=cache,
                q2k_indices=ids,
                cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
                seqused_k=torch.tensor([pages * 128 + rows], dtype=torch.int32, device=DEVICE),
                page_table=torch.arange(pages, dtype=torch.int32, device=DEVICE)[None] % 8,
            )
        strategy = target.load(problem)
        workspace, guards = guarded(strategy, problem)
        out = torch.full(problem.q.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        strategy(problem, out, None, workspace)
        assert all((guard == 0x7F).all() for guard in guards), "guard words"
        if kind != "messy":
            assert (out == 1).all()

    @pytest.mark.parametrize("pages", [512, 8192])
    def test_bytes_at_16k_queries(self, pages: int) -> None:
        """At most 1.1 GiB for 16,384 queries of Top16, whatever the context, and said in advance."""
        rows = 16384
        cache = torch.zeros(1, 128, 1, 128, device=DEVICE).to(E4M3)
        problem = pw.AttentionProblem(
            q=torch.zeros(1, 16, 128, dtype=torch.bfloat16, device=DEVICE).expand(rows, -1, -1),
            k_cache=cache,
            v_cache=cache,
            q2k_indices=torch.zeros(1, rows, 16, dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
            seqused_k=torch.tensor([pages * 128], dtype=torch.int32, device=DEVICE),
            page_table=torch.zeros(1, pages, dtype=torch.int32, device=DEVICE),
        )
        strategy = PageUnion(backend="cuda")
        needed = strategy.workspace_bytes(problem)
        assert needed == strategy.workspace(problem).nbytes <= 1.1 * 2**30


def test_partials_past_32_bits(target: Target) -> None:
    """70,000 queries x 16 partials x 2,048 elements: 2**31 of them lie before the last rows'."""
    rows, pages = 70000, 16
    values = torch.arange(1.0, pages + 1, device=DEVICE).view(pages, 1, 1, 1).to(E4M3)
    problem = pw.AttentionProblem(
        q=torch.zeros(1, 16, 128, dtype=torch.bfloat16, device=DEVICE).expand(rows, -1, -1),
        k_cache=torch.zeros(pages, 128, 1, 128, dtype=torch.uint8, device=DEVICE).view(E4M3),
        v_cache=values.view(torch.uint8).expand(-1, 128, 1, 128).contiguous().view(E4M3),
        q2k_indices=torch.arange(pages, dtype=torch.int32, device=DEVICE).expand(1, rows, -1),
        cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32, device=DEVICE),
        seqused_k=torch.tensor([pages * 128 + rows], dtype=torch.int32, device=DEVICE),
        page_table=torch.arange(pages, dtype=torch.int32, device=DEVICE)[None],
    )
    assert rows * problem.topk * problem.num_qo_heads * problem.head_dim > 2**31
    out = torch.full(problem.q.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    target.load(problem)(problem, out)
    assert ((out.float() - 8.5).abs() <= 2.0**-7 * 8.5).all()


def test_c19_partials_in_base_e(target: Target) -> None:
    """Two pages merged by hand from two calls, and by the strategy."""
    case: dict[str, Any] = {
        "prefixes": [255],
        "q0": 4.0,
        "k0": lambda _, positions: 8.0 * (positions >= 128),
        "v": lambda _, positions: (positions >= 128).float(),
        "device": DEVICE,
    }
    whole, first, second = (target.run(paged_case([ids], **case)) for ids in ([0, 1], [0], [1]))
    assert_close(target, whole, 0.9442, spread=1.0)
    assert_close(target, first, 0.0, math.log(128))
    weights = torch.stack([first.lse, second.lse]).softmax(dim=0)
    merged = weights[0, ..., None] * first.out + weights[1, ..., None] * second.out
    assert ((merged - whole.out).abs() <= 0.01).all()


def test_c48_launch_errors(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that fails says so in its own call, by name, and the next call works."""
    problem = messy(0)
    expected = target.run(problem)
    raw = problem.k_cache.contiguous().view(torch.uint8)
    flat = torch.zeros(raw.numel() + 8, dtype=torch.uint8, device=DEVICE)
    moved = replaced(problem, k_cache=flat[8:].view(raw.shape).view(E4M3))
    with monkeypatch.context() as patch:
        patch.setattr(page_union, "check_alignment", lambda _name, _tensor: None)
        with pytest.raises(RuntimeError, match=r"page_union .*k_cache.*cudaErrorInvalidValue"):
            target.load(moved)(moved)
    torch.cuda.synchronize()
    assert_same_bits(target.run(problem), expected)


def test_padding_rows(target: Target) -> None:
    """Rows past the last request are zeroed whatever their ids say, and write no partial."""
    problem = messy(0)
    result = target.run(problem)
    last = int(problem.cu_seqlens_q[-1])
    assert last < problem.total_q
    assert_empty(result[last:])
    wild = problem.q2k_indices.clone()
    wild[:, last:] = 2**31 - 1
    assert_same_bits(target.run(replaced(problem, q2k_indices=wild)), result)


def test_interface(target: Target) -> None:
    problem = messy(0)
    assert pw.load("page_union").resolve(problem) == ("cuda", "fp8")
    assert pw.load("page_union").capabilities["cuda"].graph_capturable
    with pytest.raises(ValueError, match=r"arithmetic: got 'float32', supported by page_union on cuda"):
        pw.load("page_union", arithmetic="float32")(problem)
