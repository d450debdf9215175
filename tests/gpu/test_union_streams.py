"""union4 and union8 on Hopper: devices, streams and threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ..helpers import Result, Target, assert_same_bits, random_problem, replaced
from .hopper import WATCHDOG, missing
from .problems import DEVICE, selected

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]


class TestC34OtherDevice:
    @pytest.fixture(autouse=True)
    def two(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")

    def test_same_bits(self, target: Target) -> None:
        first, second = (random_problem(device=device) for device in ("cuda:0", "cuda:1"))
        with torch.cuda.device(0):
            expected = target.run(first)
            assert_same_bits(target.run(second), expected)
            assert torch.cuda.current_device() == 0
            assert_same_bits(target.run(first), expected)

    def test_mixed(self) -> None:
        problem = random_problem(device="cuda:0")
        with pytest.raises(ValueError, match=r"q2k_indices\.device: got cuda:1"):
            replaced(problem, q2k_indices=problem.q2k_indices.to("cuda:1"))


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
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        with torch.cuda.stream(stream):
            strategy(problem, out, None, workspace)
        stream.synchronize()
        assert not torch.cuda.default_stream().query(), "waited for the default stream"
        torch.cuda.synchronize()
        assert torch.equal(out.float().cpu(), expected.out)


def test_c38_two_threads(target: Target) -> None:
    """Two threads with streams and workspaces of their own share nothing."""
    problems = [selected("mid", 1000), selected("low", 4096)]
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
    assert [int(x) for x in differ] == [0, 0]
