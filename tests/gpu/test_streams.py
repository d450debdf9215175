"""Devices, streams and threads: what is asked of every strategy with kernels."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ..helpers import Result, Target, assert_same_bits, random_problem, replaced
from .hopper import ALL_TARGETS, WATCHDOG, missing
from .problems import DEVICE, long_context, selected

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]


@pytest.fixture(params=ALL_TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = request.param
    return chosen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestC34OtherDevice:
    """Calls run where their tensors lie, whatever the current device is, and touch no other."""

    def test_same_bits(self, target: Target) -> None:
        first, second = (random_problem(device=device) for device in ("cuda:0", "cuda:1"))
        for current in (0, 1):
            with torch.cuda.device(current):
                expected = target.run(first)
                assert_same_bits(target.run(second), expected)
                assert torch.cuda.current_device() == current
                assert_same_bits(target.run(first), expected)

    def test_its_own_stream(self, target: Target) -> None:
        """Work follows the current stream of the tensors' device, not that of the current device."""
        problem = random_problem(device="cuda:1")
        expected = target.run(problem)
        q = torch.zeros_like(problem.q)
        late = replaced(problem, q=q)
        strategy = target.load(late)
        workspace = strategy.workspace(late)
        strategy(late, None, None, workspace)
        stream = torch.cuda.Stream("cuda:1")
        torch.cuda.synchronize("cuda:1")
        # Streams of one device alone: the current device stays 0, and its stream is idle.
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            q.copy_(problem.q)
            with torch.cuda.device(0):
                out = strategy(late, None, None, workspace)
        stream.synchronize()
        assert torch.equal(out.float().cpu(), expected.out)

    @pytest.mark.parametrize(
        "name", ["k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table"]
    )
    @pytest.mark.parametrize("elsewhere", ["cuda:1", "cpu"])
    def test_mixed_inputs(self, name: str, elsewhere: str) -> None:
        problem = random_problem(device="cuda:0")
        message = rf"^{name}\.device: got {elsewhere}, supported: cuda:0, the device of q"
        with pytest.raises(ValueError, match=message):
            replaced(problem, **{name: getattr(problem, name).to(elsewhere)})

    @pytest.mark.parametrize("name", ["softmax_scale", "k_scale", "v_scale"])
    def test_mixed_scales(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"^{name}\.device: got cuda:1, supported: cuda:0"):
            random_problem(device="cuda:0", **{name: torch.ones(1, device="cuda:1")})

    def test_mixed_outputs(self, target: Target) -> None:
        first, second = (random_problem(device=device) for device in ("cuda:0", "cuda:1"))
        strategy = target.load(first)
        out = torch.full(second.q.shape, 7.0, dtype=torch.bfloat16, device="cuda:1")
        lse = torch.full(second.q.shape[:2], 7.0, device="cuda:1")
        with pytest.raises(ValueError, match=r"^out\.device: got cuda:1, supported: cuda:0, the device of q"):
            strategy(first, out)
        with pytest.raises(ValueError, match=r"^lse\.device: got cuda:1, supported: cuda:0, the device of q"):
            strategy(first, None, lse)
        assert (out == 7.0).all() and (lse == 7.0).all()

    def test_mixed_workspaces(self, target: Target) -> None:
        first, second = (random_problem(device=device) for device in ("cuda:0", "cuda:1"))
        workspace = target.load(second).workspace(second)
        if not workspace.nbytes:
            pytest.skip(f"{target.strategy} needs no workspace")
        with pytest.raises(ValueError, match=r"^workspace: got buffers on cuda:1, supported: cuda:0"):
            target.load(first)(first, None, None, workspace)


class TestC35Streams:
    """Kernels wait for the stream that they are called on, and for no other."""

    @pytest.mark.parametrize("external", [False, True])
    def test_late_inputs(self, target: Target, external: bool) -> None:
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        names = ("q", "q2k_indices", "v_cache", "cu_seqlens_q")
        late = replaced(problem, **{name: torch.zeros_like(getattr(problem, name)) for name in names})
        strategy = target.load(late)
        workspace = strategy.workspace(late)
        own = torch.cuda.Stream()
        stream = torch.cuda.ExternalStream(own.cuda_stream) if external else own
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for name in names:
                getattr(late, name).copy_(getattr(problem, name))
            lse = torch.empty(problem.q.shape[:2], device=DEVICE)
            out = strategy(late, None, lse, workspace)
        stream.synchronize()
        assert_same_bits(Result(out.float().cpu(), lse.cpu()), expected)

    def test_busy_default_stream(self, target: Target) -> None:
        problem = random_problem(device=DEVICE)
        expected = target.run(problem)
        strategy = target.load(problem)
        workspace = strategy.workspace(problem)
        out = torch.empty_like(problem.q, memory_format=torch.contiguous_format)
        strategy(problem, out, None, workspace)  # compiled
        out.fill_(torch.nan)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        with torch.cuda.stream(stream):
            strategy(problem, out, None, workspace)
        stream.synchronize()
        assert not torch.cuda.default_stream().query(), "waited for the default stream"
        torch.cuda.synchronize()
        assert torch.equal(out.float().cpu(), expected.out)


def test_c38_threads(target: Target) -> None:
    """Threads with streams and workspaces of their own share nothing, nor what their kernels need."""
    problems = [selected("mid", 1000), selected("low", 4096), selected("mid", 100), long_context(0)]
    strategies = [target.load(problem) for problem in problems]
    expected = [strategy(problem) for strategy, problem in zip(strategies, problems, strict=True)]
    differ = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in problems]
    torch.cuda.synchronize()
    start = threading.Barrier(len(problems), timeout=60)

    def work(i: int) -> None:
        strategy, problem = strategies[i], problems[i]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            workspace, out = strategy.workspace(problem), torch.empty_like(problem.q)
            start.wait()
            for _ in range(200):
                strategy(problem, out, None, workspace)
                differ[i].add_((out.view(torch.int16) != expected[i].view(torch.int16)).sum())
        stream.synchronize()

    with ThreadPoolExecutor(len(problems)) as pool:
        for done in [pool.submit(work, i) for i in range(len(problems))]:
            done.result(timeout=120)
    assert not any(int(x) for x in differ)
