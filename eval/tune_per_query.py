"""Which launch choices make the per-query baseline fastest? Measured on one CUDA device.

    python -m pageweaver.eval.tune_per_query [--selection synthetic:low]

Every variant is checked against float64 first; one that is wrong is reported, and never timed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator

import torch

from pageweaver.common.captures import resolve_selection
from pageweaver.common.problem import AttentionProblem, make_problem
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.strategies.per_query import PerQuery

CHECKED_ROWS = 64
MOST_NRMS = 0.005
WARMUP_CALLS, TIMED_CALLS = 3, 20


def variants() -> Iterator[dict[str, int]]:
    """All of the kernel with paired values; of the plain one, what the paired one's best come from."""
    for pairs, num_warps, num_stages, tokens in itertools.product(
        (True, False), (2, 4, 8), (1, 2, 3, 4), (32, 64, 128)
    ):
        if pairs or (num_warps > 2 and num_stages in (2, 3) and tokens > 32):
            yield {"num_warps": num_warps, "num_stages": num_stages, "tokens": tokens, "pairs": pairs}


def time_call(strategy: PerQuery, problem: AttentionProblem, out: torch.Tensor) -> float:
    """Median milliseconds of a complete call, by CUDA events.

    All calls are queued before the first is waited for, so that the device never waits for the host.
    """
    events = []
    for _ in range(WARMUP_CALLS + TIMED_CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        strategy(problem, out)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[WARMUP_CALLS:])


def main() -> None:
    """Print a line a variant as it is measured, then the fastest five."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--selection", default="synthetic:low", help="as for `pageweaver compare`")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    selection = resolve_selection(arguments.selection)[0]
    problem = make_problem(selection, device="cuda")
    rows = torch.linspace(0, problem.total_q - 1, CHECKED_ROWS, device="cuda").long()
    exact, _ = exact_attention(problem, rows=rows)
    print(f"{selection.name}: {problem.total_q} queries, {torch.cuda.get_device_name()}")
    print("num_warps  num_stages  tokens  pairs       ms    NRMS")
    found: list[tuple[float, str]] = []
    for tune in variants():
        name = "{num_warps:9d}  {num_stages:10d}  {tokens:6d}  {pairs!s:5}".format(**tune)
        strategy = PerQuery(backend="cuda", tune=tune)
        out = torch.full_like(problem.q, torch.nan)
        try:
            error = nrms(strategy(problem, out)[rows], exact)
        except Exception as failure:  # Triton has an error of its own for each step that can refuse a variant
            print(f"{name}  {type(failure).__name__}: {str(failure).splitlines()[0]}", flush=True)
            continue
        if not error <= MOST_NRMS:
            print(f"{name}    wrong  {error:.2%}", flush=True)
            continue
        found.append((time_call(strategy, problem, out), name))
        print(f"{name}  {found[-1][0]:7.3f}  {error:.2%}", flush=True)
    print("\nfastest:")
    for milliseconds, name in sorted(found)[:5]:
        print(f"{name}  {milliseconds:7.3f}")


if __name__ == "__main__":
    main()
