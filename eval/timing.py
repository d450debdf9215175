"""Time on a CUDA device: graphs of calls, all arms inside every round, every sample kept."""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pageweaver.common.problem import AttentionProblem
from pageweaver.eval.arms import Arm
from pageweaver.eval.output import Report

WARMUP_CALLS = 3
BOUNDARIES = ("complete", "attention", "prepare")
EAGER = "eager"
CLOCK_PERIOD_MS = 100
# Of one command: its selections have orders of their own, another time the same ones.
_ORDERS = random.Random(0)

Call = Callable[[], object]
# Milliseconds that a run takes.
Stopwatch = Callable[[Call], float]


@dataclass(frozen=True)
class Protocol:
    """How arms are timed.

    Attributes
    ----------
    rounds : int
        Samples of each arm. Every round takes all arms, in an order that changes from round to round.
    calls : int
        Calls in a sample: one CUDA graph.
    inputs : int
        Sets of queries, keys and values that the calls of a sample take in turn. One set partly stays in the
        L2 cache from call to call; several that are larger than it do not.
    eager : bool
        Whether complete calls are timed outside a graph as well.
    """

    rounds: int = 7
    calls: int = 20
    inputs: int = 1
    eager: bool = False


@dataclass
class Timings:
    """Samples of all arms.

    Attributes
    ----------
    samples : dict
        (arm, boundary) -> milliseconds a call, one a finished round.
    interrupted : bool
        Whether Ctrl-C ended it before the last round.
    sm_mhz : list of int or None
        Lowest, median and highest SM clock seen during the rounds.
    failed : dict
        Baselines that no graph could be captured of, and why.
    """

    samples: dict[tuple[str, str], list[float]]
    interrupted: bool = False
    sm_mhz: list[int] | None = None
    failed: dict[str, str] = field(default_factory=dict)


def capture(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    """`count` calls, taken from `calls` in turn, as one graph, after a warm-up on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(max(WARMUP_CALLS, len(calls))):
            calls[index % len(calls)]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    return graph


def cuda_milliseconds(run: Call) -> float:
    """Milliseconds between events around a run on the current stream; waits for its end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def time_rounds(
    runs: Sequence[Call], rounds: int, report: Report, stopwatch: Stopwatch = cuda_milliseconds
) -> tuple[list[list[float]], bool]:
    """Time every run once a round, in a random order and in the next round the other way round.

    The clock follows the power that was drawn just before: an arm that always came after the same one would
    share its luck (on an H200, up to 9% after one that draws little).

    Returns
    -------
    samples : list of list of float
        ``[runs][finished rounds]``, milliseconds a run.
    interrupted : bool
        Whether Ctrl-C came; the rounds finished before it are kept.

    Raises
    ------
    KeyboardInterrupt
        Ctrl-C came before the first round was finished: there is nothing to keep.
    """
    samples: list[list[float]] = [[] for _ in runs]
    done = 0
    try:
        for run in runs:
            stopwatch(run)
        order: list[int] = []
        for turn in range(rounds):
            order = order[::-1] if turn % 2 else _ORDERS.sample(range(len(runs)), len(runs))
            for index in order:
                samples[index].append(stopwatch(runs[index]))
            done = turn + 1
            report(done / rounds, "timing")
    except KeyboardInterrupt:
        if done == 0:
            raise
        return [own[:done] for own in samples], True
    return samples, False


def time_arms(
    arms: Sequence[Arm],
    protocol: Protocol,
    report: Report,
    boundaries: Sequence[str] = BOUNDARIES,
) -> Timings:
    """Time arms against each other on the current CUDA device."""
    timed: list[tuple[Arm, str]] = []
    runs: list[Call] = []
    failed: dict[str, str] = {}
    for index, arm in enumerate(arms):
        report(0.0, f"capturing {arm.name} ({index + 1} of {len(arms)})")
        wanted = [boundary for boundary in boundaries if boundary in arm.calls]
        try:
            own = [capture(arm.calls[boundary], protocol.calls).replay for boundary in wanted]
        except Exception as error:  # what others' code raises inside a capture has no common type
            if arm.ours:
                raise
            failed[arm.name] = f"no graph of it could be captured ({' '.join(str(error).split())})"
            continue
        timed += [(arm, boundary) for boundary in wanted]
        runs += own
        if protocol.eager:
            timed.append((arm, EAGER))
            runs.append(_eager(arm.calls["complete"], protocol.calls))
    with watched_clock() as clock:
        samples, interrupted = time_rounds(runs, protocol.rounds, report)
    found = {
        (arm.name, boundary): [x / protocol.calls for x in own]
        for (arm, boundary), own in zip(timed, samples, strict=True)
    }
    return Timings(found, interrupted, clock.summary(), failed)


def _eager(calls: Sequence[Call], count: int) -> Call:
    def run() -> None:
        for index in range(count):
            calls[index % len(calls)]()

    return run


def describe_inputs(problems: Sequence[AttentionProblem], protocol: Protocol) -> dict[str, Any]:
    """The protocol as a row says it, with what the inputs weigh beside the L2 cache."""
    size = sum(
        tensor.numel() * tensor.element_size()
        for problem in problems
        for tensor in (problem.q, problem.k_cache, problem.v_cache, problem.q2k_indices)
    )
    device = problems[0].device
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else None
    return {
        "rounds": protocol.rounds,
        "calls": protocol.calls,
        "inputs": protocol.inputs,
        "input_bytes": size,
        "l2_bytes": cache,
    }


@dataclass
class ClockLog:
    """SM clocks that were seen, in MHz."""

    megahertz: list[int] = field(default_factory=list)

    def summary(self) -> list[int] | None:
        """Lowest, median, highest; None where no clock was seen."""
        seen = self.megahertz
        return [min(seen), int(statistics.median(seen)), max(seen)] if seen else None


@contextmanager
def watched_clock() -> Iterator[ClockLog]:
    """Note the SM clock ten times a second while the body runs; NVIDIA's tool runs beside it.

    Notes nothing where the tool is missing.
    """
    log = ClockLog()
    identity = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    command += ["-lms", str(CLOCK_PERIOD_MS), *([] if identity is None else ["-i", f"GPU-{identity}"])]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield log
        return

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if re.fullmatch(r"\s*\d+\s*", line):
                log.megahertz.append(int(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield log
    finally:
        process.terminate()
        process.wait()
        reader.join(timeout=1)


def kernel_microseconds(call: Call, repeats: int = 5) -> Mapping[str, float]:
    """Kernels of a call and their mean times in microseconds, in the order of their first launch.

    Seen by the profiler outside a graph, so that times are a few per cent off; empty where it sees none.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in sorted(seen.events() or [], key=lambda event: event.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.time_range.elapsed_us() / repeats
    return found
