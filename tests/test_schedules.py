"""Workspaces and schedules: what may be used again, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.strategies.page_union import UNIT_TILES, PageUnion
from pageweaver.strategies.page_union.pairing import MOST_PAIRED
from pageweaver.strategies.query_union import Union4, Union8
from pageweaver.strategies.regroup import RegroupW64

from .helpers import E4M3, Result, Target, assert_same_bits, random_problem, replaced

BF16 = torch.bfloat16


class TestWorkspaces:
    def test_reuse_after_a_bigger_problem(self, target: Target) -> None:
        bigger = random_problem(lengths=(90, 0, 80), prefixes=(900, 1, 50), topk=12, device=target.device)
        smaller = random_problem(lengths=(5, 0, 9), prefixes=(200, 1, 0), past_rows=2, device=target.device)
        workspace = target.load(bigger).workspace(bigger)
        first = target.run(bigger, workspace=workspace)
        expected = target.run(smaller)
        # `run` poisons it again; without poison, what the bigger call left is in the way.
        assert_same_bits(target.run(smaller, workspace=workspace), expected)
        target.run(bigger, workspace=workspace)
        strategy = target.load(smaller)
        lse = torch.empty(16, 16, device=target.device)
        out = strategy(smaller, None, lse, workspace)
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)
        assert_same_bits(target.run(bigger, workspace=workspace), first)

    def test_bytes_from_shapes_alone(self, target: Target) -> None:
        problem = random_problem(device=target.device)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        assert strategy.workspace_bytes(problem) == workspace.nbytes > 0
        empty = replaced(problem, q2k_indices=torch.full_like(problem.q2k_indices, -1))
        assert strategy.workspace_bytes(empty) == workspace.nbytes

    def test_too_small(self, target: Target) -> None:
        bigger = random_problem(lengths=(90, 80), prefixes=(900, 50), device=target.device)
        smaller = random_problem(lengths=(5,), prefixes=(200,), past_rows=0, device=target.device)
        workspace = target.load(smaller).workspace(smaller)
        with pytest.raises(ValueError, match=r"workspace\['\w+'\]: got \d+ bytes .* at least \d+ bytes"):
            target.load(bigger).prepare(bigger, workspace)

    @pytest.mark.parametrize("pairs", [True, False])
    def test_extreme_incidence(self, pairs: bool) -> None:
        """C43: one page that all rows choose, and rows that share no page; no list leaves its buffer."""
        rows, topk = 2048, 16
        page = torch.zeros(1, 64, 1, 128, dtype=BF16).expand(rows * topk, -1, -1, -1)
        for ids in (
            torch.zeros(rows, topk, dtype=torch.int32),
            torch.arange(rows * topk, dtype=torch.int32).reshape(rows, topk),
        ):
            problem = pw.AttentionProblem(
                q=torch.zeros(rows, 1, 128, dtype=BF16),
                k_cache=page,
                v_cache=page,
                q2k_indices=ids[None],
                cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
                seqused_k=torch.tensor([rows * topk * 64], dtype=torch.int32),
                page_table=torch.arange(rows * topk, dtype=torch.int32)[None],
            )
            report = PageUnion(pairs=pairs).work(problem)
            if ids.any():
                assert report.edges == rows * topk
                # Of pages that nobody has in common with others but one row, the first 1,024 are paired.
                assert report.groups == rows * topk - (MOST_PAIRED // 2 if pairs else 0)
            else:
                assert (report.edges, report.groups) == (rows, rows // (64 * UNIT_TILES))

    @pytest.mark.parametrize("pages", [512, 8192])
    def test_bytes_at_16k_queries(self, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernels take at most 1.1 GiB for 16,384 queries of Top16 over 64K tokens, or a million."""
        rows = 16384
        cache = torch.zeros(1, 128, 1, 128).to(torch.float8_e4m3fn)
        problem = pw.AttentionProblem(
            q=torch.zeros(1, 16, 128, dtype=BF16).expand(rows, -1, -1),
            k_cache=cache,
            v_cache=cache,
            q2k_indices=torch.zeros(1, rows, 16, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
            seqused_k=torch.tensor([pages * 128], dtype=torch.int32),
            page_table=torch.zeros(1, pages, dtype=torch.int32),
        )
        strategy = PageUnion()
        monkeypatch.setattr(strategy, "resolve", lambda _problem: ("cuda", "fp8"))
        # Partials alone take 1 GiB.
        assert 2**30 < strategy.workspace_bytes(problem) <= 1.1 * 2**30

    def test_more_than_the_device_holds(self) -> None:
        # Views of one row: only the workspace would need memory, 560 TB of it.
        rows, heads = 2**26 - 1, 64
        problem = pw.AttentionProblem(
            q=torch.zeros(1, 1, 128, dtype=BF16).expand(rows, 16 * heads, -1),
            k_cache=torch.zeros(1, 64, heads, 128, dtype=BF16),
            v_cache=torch.zeros(1, 64, heads, 128, dtype=BF16),
            q2k_indices=torch.zeros(1, 1, 1, dtype=torch.int32).expand(heads, rows, 32),
            cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
            seqused_k=torch.zeros(0, dtype=torch.int32),
            page_table=torch.zeros(0, 1, dtype=torch.int32),
        )
        strategy = PageUnion()
        assert strategy.workspace_bytes(problem) > 2**47
        with pytest.raises(
            MemoryError, match=rf"page_union: workspace of {strategy.workspace_bytes(problem)} "
        ):
            strategy.workspace(problem)

    def test_of_another_strategy(self) -> None:
        problem = random_problem()
        with pytest.raises(ValueError, match=r"workspace\['unit_pages'\]: got 0 bytes of None"):
            PageUnion().prepare(problem, Union8().workspace(problem))

    def test_of_another_device(self) -> None:
        problem = random_problem()
        fields = {
            field.name: getattr(problem, field.name).to("meta")
            for field in dataclasses.fields(problem)
            if isinstance(getattr(problem, field.name), torch.Tensor)
        }
        elsewhere = replaced(problem, **fields)
        for strategy in (Union8(backend="reference"), PageUnion(backend="reference")):
            with pytest.raises(ValueError, match=r"workspace: got buffers on cpu, supported: meta"):
                strategy.prepare(elsewhere, strategy.workspace(problem))


class TestSchedules:
    """A schedule runs on what it was made for, or is refused."""

    def test_of_another_strategy(self) -> None:
        problem = random_problem()
        schedule = Union4().prepare(problem)
        for other in (Union8(), RegroupW64(), PageUnion()):
            with pytest.raises(ValueError, match=rf"schedule: got one of 'union4'.*one of '{other.name}'"):
                other.execute(problem, schedule)

    @pytest.mark.parametrize(
        "sizes",
        [
            {"lengths": (21, 1, 0, 33)},
            {"lengths": (22, 34), "prefixes": (300, 777)},
            {"topk": 9},
            {"page_size": 64},
            {"num_kv_heads": 2, "group_size": 8},
            {"kv_dtype": BF16},
            {"prefixes": (300, 0, 64, 999)},
        ],
        ids=str,
    )
    def test_of_another_problem(self, target: Target, sizes: dict[str, Any]) -> None:
        problem = random_problem(device=target.device)
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        if sizes.get("kv_dtype") == problem.k_cache.dtype:
            sizes = {"kv_dtype": E4M3}
        other = random_problem(device=target.device, **sizes)
        out = torch.full(other.q.shape, 7.0, dtype=strategy(problem).dtype, device=target.device)
        with pytest.raises(ValueError, match="schedule: got one of"):
            strategy.execute(other, schedule, out)
        assert (out == 7.0).all()

    def test_overwritten(self, target: Target) -> None:
        """The next `prepare` on a workspace takes the tensors of the schedule before."""
        first, second = (random_problem(seed=seed, device=target.device) for seed in (1, 2))
        strategy = target.load(first)
        workspace = strategy.workspace(first)
        schedule = strategy.prepare(first, workspace)
        expected = strategy.execute(first, schedule).clone()
        again = target.load(second).prepare(second, workspace)
        with pytest.raises(ValueError, match="schedule: got one whose workspace was prepared again"):
            strategy.execute(first, schedule)
        target.load(second).execute(second, again)
        assert torch.equal(strategy.execute(first, strategy.prepare(first, workspace)), expected)

    def test_other_tensors_are_refused(self, target: Target) -> None:
        """Kernels keep V from when they prepared: caches and metadata must be those very tensors."""
        problem = random_problem(seed=1, device=target.device)
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        for name in ("k_cache", "v_cache", "page_table", "cu_seqlens_q", "seqused_k"):
            other = replaced(problem, **{name: getattr(problem, name).clone()})
            with pytest.raises(ValueError, match="made from other caches or request metadata"):
                strategy.execute(other, schedule)

    def test_new_ids_in_the_same_buffers(self, target: Target) -> None:
        """A serving engine writes the next layer's selection where the last one's was."""
        problem = random_problem(seed=1, device=target.device)
        before = target.run(problem)
        problem.q2k_indices.copy_(torch.where(problem.q2k_indices > 1, problem.q2k_indices - 1, 0))
        fresh = replaced(problem, q2k_indices=problem.q2k_indices.clone())
        after = target.run(problem)
        assert_same_bits(after, target.run(fresh))
        assert not torch.equal(after.out, before.out)

    @pytest.mark.parametrize("strides", [(128, 128, 1), (2048, 64, 1), (2048, 0, 1)])
    def test_overlapping_output(self, target: Target, strides: tuple[int, ...]) -> None:
        problem = random_problem(device=target.device)
        buffer = torch.empty(59 * 2048, dtype=torch.bfloat16, device=target.device)
        with pytest.raises(ValueError, match=r"out\.stride\(\): .*no two elements in one place"):
            target.load(problem)(problem, buffer.as_strided((59, 16, 128), strides))

    def test_other_queries_in_the_same_schedule(self, target: Target) -> None:
        """q and scales may change under a schedule."""
        problem = random_problem(seed=1, device=target.device)
        strategy = target.load(problem)
        schedule = strategy.prepare(problem)
        other = replaced(problem, q=random_problem(seed=2, device=target.device).q, k_scale=0.5, v_scale=2.0)
        assert torch.equal(strategy.execute(other, schedule), target.load(other)(other))

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (
                {"dtype": torch.float16},
                TypeError,
                r"out\.dtype: got torch\.float16, supported: torch\.bfloat16",
            ),
            (
                {"shape": (3, 16, 128)},
                ValueError,
                r"out\.shape: got \(3, 16, 128\), supported: \(59, 16, 128\)",
            ),
            ({"device": "meta"}, ValueError, r"out\.device: got meta, supported: cpu"),
        ],
    )
    def test_outputs(self, change: dict[str, Any], error: type[Exception], words: str) -> None:
        problem = random_problem()
        arguments: dict[str, Any] = {"dtype": BF16, "device": "cpu"} | change
        shape = arguments.pop("shape", tuple(problem.q.shape))
        with pytest.raises(error, match=words):
            Union8()(problem, torch.empty(shape, **arguments))
        arguments["dtype"] = torch.float64 if "dtype" in change else torch.float32
        with pytest.raises(error, match=words.split(":")[0].replace("out", "lse")):
            Union8()(problem, None, torch.empty(shape[:2], **arguments))

    def test_outputs_that_alias(self) -> None:
        problem = random_problem()
        one_row = torch.empty(1, 16, 128, dtype=BF16).expand(problem.q.shape)
        with pytest.raises(ValueError, match=r"out\.stride\(\): .*no two elements in one place"):
            Union8()(problem, one_row)
        with pytest.raises(ValueError, match=r"out\.stride\(-1\): got 2, supported: 1"):
            Union8()(problem, torch.empty(59, 16, 256, dtype=BF16)[..., ::2])
        with pytest.raises(ValueError, match=r"lse\.stride\(\)"):
            Union8()(problem, None, torch.empty(1, 16).expand(59, 16))
        with pytest.raises(TypeError, match=r"out\.dtype: got list, supported: torch\.bfloat16"):
            Union8()(problem, [1.0])  # type: ignore[arg-type]
