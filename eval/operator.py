"""How long does a call take? Complete calls, attention alone and preparation alone, on one CUDA device.

Every arm is captured in a CUDA graph of `CALLS` calls; the arms take turns inside a round, and the order
rotates from round to round. A row's `median_ms` is over rounds, and all samples are kept. Before it is
timed, an arm is compared with float64 on sampled rows; a red check stops the report.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pageweaver.common.captures import Selection
from pageweaver.common.problem import AttentionProblem, make_problem
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.strategy import Strategy, load
from pageweaver.eval.output import Report, part_of, provenance

SCHEMA = "pageweaver-operator-1"
CALLS, ROUNDS, WARMUP_CALLS = 20, 7, 3
SAMPLED_ROWS = 33
# Rounding of single FP8 probabilities and queries is about 4%, that of BF16 ones 0.23%; an arm past this is
# wrong, not imprecise.
MOST_NRMS = {"fp8": 0.05, "bf16": 0.003}
BOUNDARIES = ("complete", "attention", "prepare")


@dataclass
class Arm:
    """One strategy, ready to be captured."""

    name: str
    strategy: Strategy
    nrms: float
    work: dict[str, Any]
    calls: dict[str, Callable[[], object]]


def make_arm(name: str, problem: AttentionProblem, rows: torch.Tensor, exact: torch.Tensor) -> Arm:
    """Set up a strategy on a problem and check it.

    Raises
    ------
    ValueError
        Its error against float64 on `rows` is above `MOST_NRMS` of its arithmetic.
    """
    base, _, mapping = name.partition("/")
    strategy = load(base, backend="cuda", **({"mapping": mapping} if mapping else {}))
    complete, split = strategy.workspace(problem), strategy.workspace(problem)
    out = torch.full_like(problem.q, torch.nan)
    strategy(problem, out, workspace=complete)
    error, most = nrms(out[rows].cpu(), exact.cpu()), MOST_NRMS[strategy.resolve(problem)[1]]
    if not error <= most:
        raise ValueError(f"{name}: got NRMS {error:.4f} against float64, supported: at most {most}")
    # Counted by the reference's schedule: counting may synchronise, timing may not.
    work = load(base, backend="reference").work(problem).to_dict()
    schedule = strategy.prepare(problem, split)
    calls: dict[str, Callable[[], object]] = {
        "complete": lambda: strategy(problem, out, workspace=complete),
        "attention": lambda: strategy.execute(problem, schedule, out),
    }
    if strategy.workspace_layout(problem):
        calls["prepare"] = lambda: strategy.prepare(problem, complete)
    return Arm(name, strategy, error, work, calls)


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`CALLS` calls as one graph, after a warm-up on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def time_rotated(graphs: Sequence[torch.cuda.CUDAGraph], report: Report) -> list[list[float]]:
    """Milliseconds a call, ``[graphs][ROUNDS]``; the first graph of a round moves on by one each time."""
    samples: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    for turn in range(ROUNDS):
        for place in range(len(graphs)):
            index = (turn + place) % len(graphs)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[index].replay()
            end.record()
            torch.cuda.synchronize()
            samples[index].append(start.elapsed_time(end) / CALLS)
        report((turn + 1) / ROUNDS, "timing")
    return samples


def measure(
    selections: Sequence[Selection],
    names: Sequence[str],
    *,
    kv_dtype: torch.dtype = torch.float8_e4m3fn,
    seed: int,
    command: str,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Time every arm on every selection.

    Parameters
    ----------
    selections : sequence of Selection
    names : sequence of str
        Strategies with a CUDA backend; ``union8/cluster`` is union8 in another mapping.
    kv_dtype : torch.dtype
        Of the caches.
    seed : int
        Of queries, keys and values.
    command : str
        What made the rows, kept in each.
    report : callable
        Told the fraction done.

    Yields
    ------
    dict
        One JSON-ready row an arm and boundary.
    """
    device = torch.device("cuda")
    header = {"schema": SCHEMA, "command": command, **provenance(device)}
    for index, selection in enumerate(selections):
        part = part_of(report, index, len(selections))
        problem = make_problem(selection, kv_dtype=kv_dtype, seed=seed, device=device)
        sampled = np.random.default_rng(seed).choice(
            selection.total_q, min(SAMPLED_ROWS, selection.total_q), replace=False
        )
        rows = torch.from_numpy(np.sort(sampled)).to(device)
        exact, _ = exact_attention(problem, torch.float64, rows)
        arms = [make_arm(name, problem, rows, exact) for name in names]
        timed = [(arm, boundary) for arm in arms for boundary in BOUNDARIES if boundary in arm.calls]
        samples = time_rotated([capture(arm.calls[boundary]) for arm, boundary in timed], part)
        for (arm, boundary), milliseconds in zip(timed, samples, strict=True):
            yield {
                **header,
                "case": selection.name,
                "sha256": selection.sha256,
                "arm": arm.name,
                "kv_dtype": str(kv_dtype).removeprefix("torch."),
                "arithmetic": arm.strategy.resolve(problem)[1],
                "boundary": boundary,
                "median_ms": statistics.median(milliseconds),
                "samples_ms": milliseconds,
                "nrms": arm.nrms,
                **{key: arm.work[key] for key in ("edges", "visits", "rounds", "reuse")},
            }
