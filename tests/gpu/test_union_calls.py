"""union4 and union8 on Hopper: what a call refuses, and what it leaves for the next one."""

from __future__ import annotations

import pytest
import torch

import pageweaver as pw
from pageweaver.strategies import query_union

from ..helpers import (
    E4M3,
    Target,
    assert_close,
    assert_empty,
    assert_same_bits,
    page_number,
    paged_case,
    random_problem,
    replaced,
)
from .hopper import WATCHDOG, missing
from .problems import DEVICE, long_context, messy

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]


class TestC41Alignment:
    """Addresses and strides that the copy engine cannot take are refused, and harm no later call."""

    WORDS = "16-byte alignment"

    @pytest.mark.parametrize(("offset", "fits"), [(1, False), (4, False), (8, True)])
    def test_queries_and_outputs(self, target: Target, offset: int, fits: bool) -> None:
        problem = random_problem(device=DEVICE, past_rows=0)
        expected = target.run(problem)
        rows, strategy = problem.total_q, target.load(problem)
        flat = torch.zeros(rows * 2048 + 8, dtype=torch.bfloat16, device=DEVICE)
        moved = flat[offset : offset + rows * 2048].view(rows, 16, 128)
        moved.copy_(problem.q)
        if fits:
            assert_same_bits(target.run(replaced(problem, q=moved)), expected)
            strategy(problem, moved)
            assert torch.equal(moved.float().cpu(), expected.out)
        else:
            with pytest.raises(ValueError, match=rf"^q: .*{self.WORDS}"):
                strategy(replaced(problem, q=moved))
            with pytest.raises(ValueError, match=rf"^out: .*{self.WORDS}"):
                strategy(problem, moved)
            assert torch.equal(moved, problem.q), "written before it was refused"
            assert_same_bits(target.run(problem), expected)

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    @pytest.mark.parametrize(("offset", "fits"), [(1, False), (8, False), (16, True)])
    def test_caches(self, target: Target, name: str, offset: int, fits: bool) -> None:
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        raw = getattr(problem, name).view(torch.uint8)
        flat = torch.zeros(raw.numel() + 16, dtype=torch.uint8, device=DEVICE)
        view = flat[offset : offset + raw.numel()].view(raw.shape)
        view.copy_(raw)
        moved = replaced(problem, **{name: view.view(E4M3)})
        if fits:
            assert_same_bits(target.run(moved), expected)
        else:
            with pytest.raises(ValueError, match=rf"^{name}: .*{self.WORDS}"):
                target.load(moved)(moved)
            assert_same_bits(target.run(problem), expected)

    @pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
    def test_strides(self, target: Target, name: str) -> None:
        problem = random_problem(device=DEVICE)
        like = problem.q if name == "out" else getattr(problem, name)
        raw = like.view(torch.uint8)
        wide = torch.zeros(*raw.shape[:-1], raw.shape[-1] + 8, dtype=torch.uint8, device=DEVICE)
        # 8 bytes more a row of 128 elements: every second row lies between two multiples of 16.
        wide[..., : raw.shape[-1]] = raw
        view = wide.view(like.dtype)[..., :128]
        strategy = target.load(problem)
        with pytest.raises(ValueError, match=rf"^{name}\.stride\(\d\): .*{self.WORDS}"):
            if name == "out":
                strategy(problem, view)
            else:
                strategy(replaced(problem, **{name: view}))


class TestC48LaunchErrors:
    """A launch that fails says so in its own call, by name, and the next call works."""

    def test_of_the_attention(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """No tensor map of keys at an odd address, should the check of it ever be missing."""
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        raw = problem.k_cache.contiguous().view(torch.uint8)
        flat = torch.zeros(raw.numel() + 8, dtype=torch.uint8, device=DEVICE)
        moved = replaced(problem, k_cache=flat[8:].view(raw.shape).view(E4M3))
        with monkeypatch.context() as patch:
            patch.setattr(query_union, "check_alignment", lambda _name, _tensor: None)
            with pytest.raises(RuntimeError, match=r"union_attention .*k_cache.*cudaErrorInvalidValue"):
                target.load(moved)(moved)
        torch.cuda.synchronize()
        assert_same_bits(target.run(problem), expected)

    def test_of_the_preparation(self, target: Target) -> None:
        """A page table whose bitmap no SM can hold, 32 times what is supported."""
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        wide = torch.zeros(problem.batch_size, 2**20, dtype=torch.int32, device=DEVICE)
        wide[:, : problem.max_pages] = problem.page_table
        wider = replaced(problem, page_table=wide)
        with pytest.raises((RuntimeError, ValueError), match=r"prepare_unions|page_table|max_pages"):
            target.load(wider)(wider)
        torch.cuda.synchronize()
        assert_same_bits(target.run(problem), expected)


def test_expanded_keys_are_refused(target: Target) -> None:
    problem = random_problem(device="cuda")
    page = problem.k_cache[:1].contiguous()
    with pytest.raises(ValueError, match=r"k_cache\.stride\(0\): got 0 \(an expanded tensor\)"):
        target.run(replaced(problem, k_cache=page.expand_as(problem.k_cache)))


def test_cache_without_a_page(target: Target) -> None:
    """Nothing is selected, for there is nothing."""
    problem = random_problem(lengths=(), prefixes=(), device="cuda")
    assert_empty(target.run(replaced(problem, k_cache=problem.k_cache[:0], v_cache=problem.v_cache[:0])))


def test_unusable_device_scales(target: Target) -> None:
    """Nobody reads a scale on the host: a NaN or negative one shows, it gives no plausible row."""
    for value in (torch.nan, -1.0):
        problem = random_problem(device="cuda", k_scale=torch.tensor(value, device="cuda"))
        out = target.load(problem)(problem)
        seen = (problem.support >= 0).any(dim=2)[0]
        assert out[seen].isnan().all() and (out[~seen] == 0).all()


def test_narrow_page_table(target: Target) -> None:
    """Lengths on a device are never checked: ids past the table's width are not looked up."""
    problem = paged_case([[0, 1, 2, 3]] * 3, prefixes=[400], v=page_number, device=DEVICE)
    narrow = replaced(problem, page_table=problem.page_table[:, :2].clone())
    assert_close(target, target.run(narrow), 0.5)


def test_interface(target: Target) -> None:
    problem = random_problem(device=DEVICE)
    assert pw.load(target.strategy).resolve(problem) == ("cuda", "fp8")  # what a CUDA tensor gets by itself
    assert pw.load(target.strategy).capabilities["cuda"].graph_capturable
    with pytest.raises(ValueError, match=r"arithmetic: got 'float32', supported by \w+ on cuda"):
        pw.load(target.strategy, arithmetic="float32")(problem)
    with pytest.raises(ValueError, match=r"page_size: got 64, supported by \w+ on cuda: \(128,\)"):
        pw.load(target.strategy)(random_problem(device=DEVICE, page_size=64))


def test_workspace_of_a_longer_context(target: Target) -> None:
    """What a call of 8,192 pages left behind is in nobody's way."""
    longest, problem = long_context(1), messy(0)
    strategy = target.load(longest)
    workspace = strategy.workspace(longest)
    first, expected = target.run(longest), target.run(problem)
    strategy(longest, workspace=workspace)
    out = strategy(problem, workspace=merged(workspace, strategy.workspace(problem)))
    assert torch.equal(out.float().cpu(), expected.out)
    assert_same_bits(target.run(longest), first)


def merged(workspace: pw.Workspace, other: pw.Workspace) -> pw.Workspace:
    """The larger one of each pair of buffers."""
    buffers = {
        name: max(buffer, other.buffers[name], key=torch.Tensor.numel)
        for name, buffer in workspace.buffers.items()
    }
    return pw.Workspace(workspace.strategy, buffers)
