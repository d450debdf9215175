"""How long does a call take? Complete calls, attention alone and preparation alone, on one CUDA device.

Every arm is captured in a CUDA graph; the arms take turns inside a round, and the order differs from round to
round. A row's `median_ms` is over rounds, and all samples are kept. Before it is timed, an arm is compared
with float64 on sampled rows; a red check stops the report. Without a CUDA device arms are counted, not timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.problem import AttentionProblem, make_problem
from pageweaver.common.reference import exact_attention
from pageweaver.common.selection import Selection
from pageweaver.eval.arms import (
    Arm,
    counting_problem,
    fixed_of,
    make_arm,
    make_strategy,
    original_of,
    parse_arm,
    sample_rows,
    without_arithmetic,
)
from pageweaver.eval.baselines import BASELINES
from pageweaver.eval.output import CheckFailed, Report, part_of
from pageweaver.eval.timing import (
    BOUNDARIES,
    EAGER,
    Protocol,
    Timings,
    describe_inputs,
    time_arms,
)

BENCH = "operator"
DEFAULT_ARMS = "per_query,union4,union8,union8/cluster"
# A row's boundary where nothing was timed: no CUDA device, or no kernels of this arm in this build.
COUNTED, NOT_RUN = "counted", "not run"
COUNTS = (
    *("edges", "visits", "rounds", "reuse", "partials", "saved_partials", "page_bytes", "partial_bytes"),
    "workspace_bytes",
)

# How a strategy refuses a problem that it does not support, or that does not fit.
UNSUPPORTED = (UnsupportedDeviceError, TypeError, ValueError, MemoryError, torch.OutOfMemoryError)

Samples = Mapping[tuple[str, str], Sequence[float]]
Extra = Callable[[Sequence[Arm], Mapping[str, Any]], Iterator[dict[str, Any]]]


def regrouping(samples: Samples, arm: str) -> dict[str, float]:
    """What an order costs and saves, in microseconds, by Eq. 7: medians of differences inside a round.

    Parameters
    ----------
    samples : mapping
        (arm, boundary) -> milliseconds, all of the same rounds.
    arm : str

    Returns
    -------
    dict
        Whichever of these the samples tell. ``net_us``: the original order's complete call less this one's.
        ``increment_us``: this complete call less that of its own ids, ready-made; what grouping adds.
        ``grouping_us``: the same of preparations alone.
    """

    def difference(more: tuple[str, str], less: tuple[str, str]) -> float | None:
        if more not in samples or less not in samples:
            return None
        pairs = zip(samples[more], samples[less], strict=True)
        return 1000 * statistics.median(a - b for a, b in pairs)

    found: dict[str, float | None] = {}
    original, fixed = original_of(arm), fixed_of(arm)
    if arm != original and parse_arm(arm)[0] != "per_query":
        found["net_us"] = difference((original, "complete"), (arm, "complete"))
    if fixed is not None:
        found["increment_us"] = difference((arm, "complete"), (fixed, "complete"))
        found["grouping_us"] = difference((arm, "prepare"), (fixed, "prepare"))
    return {name: value for name, value in found.items() if value is not None}


def case_of(problem: AttentionProblem, selection: Selection) -> dict[str, Any]:
    """What a row says of its input."""
    return {
        "case": selection.name,
        "sha256": selection.sha256,
        "total_q": selection.total_q,
        "batch_size": selection.batch_size,
        "context": int(selection.seqused_k.max()) if selection.batch_size else 0,
        "topk": selection.topk,
        "page_size": selection.page_size,
        "num_kv_heads": selection.num_kv_heads,
        "group_size": problem.group_size,
        "kv_dtype": str(problem.k_cache.dtype).removeprefix("torch."),
    }


def timed_rows(
    arms: Sequence[Arm], timings: Timings, common: Mapping[str, Any], protocol: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A JSON-ready row for each arm and boundary that was timed."""
    for arm in arms:
        for boundary in (*BOUNDARIES, EAGER):
            samples = timings.samples.get((arm.name, boundary))
            if samples is None:
                continue
            yield {
                **common,
                "arm": arm.name,
                "arithmetic": arm.arithmetic,
                "boundary": boundary,
                "median_ms": statistics.median(samples),
                "samples_ms": samples,
                "nrms": arm.nrms,
                **{key: arm.work[key] for key in COUNTS},
                **(regrouping(timings.samples, arm.name) if boundary == "complete" else {}),
                "protocol": dict(protocol),
                "interrupted": timings.interrupted,
                "sm_mhz": timings.sm_mhz,
            }


def counted_rows(
    selection: Selection,
    names: Sequence[str],
    group_size: int,
    kv_dtype: torch.dtype,
    common: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """A JSON-ready row for each arm, with its work and no time: for machines without a CUDA device."""
    counting = counting_problem(selection, group_size, kv_dtype)
    for name in names:
        case = {**common, **case_of(counting, selection)}
        try:
            counter = make_strategy(without_arithmetic(name), selection, counting, "reference")
        except UnsupportedDeviceError as error:
            yield {**case, **untimed(name, NOT_RUN), "reason": str(error)}
            continue
        work = counter.work(counting).to_dict()
        counts = {key: work[key] for key in COUNTS}
        yield {**case, **untimed(name, COUNTED), **counts}


def untimed(arm: str, boundary: str) -> dict[str, Any]:
    """The part of a row that says that nothing was timed; counts are None until they are filled in."""
    return {
        "arm": arm,
        "arithmetic": None,
        "boundary": boundary,
        "median_ms": None,
        "samples_ms": [],
        "nrms": None,
        **dict.fromkeys(COUNTS),
    }


def measure(
    selections: Sequence[Selection],
    names: Sequence[str],
    *,
    protocol: Protocol,
    header: Mapping[str, Any],
    device: torch.device,
    seed: int = 0,
    group_size: int = 16,
    kv_dtype: torch.dtype = torch.float8_e4m3fn,
    skip_missing: bool = False,
    extra: Extra | None = None,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Time every arm on every selection.

    Parameters
    ----------
    selections : sequence of Selection
    names : sequence of str
        Arms; see `pageweaver.eval.arms`.
    protocol : Protocol
    header : mapping
        What made the rows, kept in each.
    device : torch.device
        Arms are timed on a CUDA device and counted on any other.
    seed : int
        Of queries, keys, values and the sampled rows.
    group_size : int
        Query heads a KV head.
    kv_dtype : torch.dtype
        Of the cache.
    skip_missing : bool
        Name an arm of ours that has no kernels here, or does not support the case, in a row of its own, as
        baselines always are.
    extra : callable, optional
        ``extra(arms, common)`` gives more rows for a selection whose arms are timed.
    report : callable
        Told the fraction done.

    Yields
    ------
    dict
        One JSON-ready row an arm and boundary.

    Raises
    ------
    UnsupportedDeviceError
        An arm has no kernels here, unless `skip_missing`.
    CheckFailed
        An arm is wrong.
    KeyboardInterrupt
        Ctrl-C; what was finished has been yielded.
    """
    for index, selection in enumerate(selections):
        part = part_of(report, index, len(selections))
        part(0.0, selection.name)
        if device.type != "cuda":
            yield from counted_rows(selection, names, group_size, kv_dtype, header)
            continue
        problems = [
            make_problem(
                selection, group_size=group_size, kv_dtype=kv_dtype, seed=seed + place, device=device
            )
            for place in range(protocol.inputs)
        ]
        common = {**header, **case_of(problems[0], selection)}
        yield from measure_case(
            selection,
            problems,
            names,
            protocol=protocol,
            common=common,
            seed=seed,
            skip_missing=skip_missing,
            extra=extra,
            report=part,
        )


def measure_case(
    selection: Selection,
    problems: Sequence[AttentionProblem],
    names: Sequence[str],
    *,
    protocol: Protocol,
    common: Mapping[str, Any],
    seed: int,
    skip_missing: bool,
    boundaries: Sequence[str] = BOUNDARIES,
    extra: Extra | None = None,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Time every arm on the inputs of one selection, on their CUDA device.

    Parameters
    ----------
    selection : Selection
    problems : sequence of AttentionProblem
        The selection with different queries, keys and values; calls take them in turn.
    common : mapping
        Kept in each row.
    boundaries : sequence of str
        What to time: "complete", "attention", "prepare".
    names, protocol, seed, skip_missing, extra, report
        As in `measure`, which see for what is yielded and raised.
    """
    rows = sample_rows(selection, seed).to(problems[0].device)
    exact, _ = exact_attention(problems[0], torch.float64, rows)
    arms = []
    for name in names:
        report(0.0, f"{selection.name}: {name}")
        try:
            arms.append(make_arm(name, selection, problems, rows, exact))
        except Exception as error:  # a baseline fails in ways of its own, and ends its own arm alone
            skipped = isinstance(error, UNSUPPORTED) and not isinstance(error, CheckFailed) and skip_missing
            if not skipped and parse_arm(name)[0] not in BASELINES:
                raise
            yield {**common, **untimed(name, NOT_RUN), "reason": " ".join(str(error).split())}
    timings = time_arms(arms, protocol, report, boundaries)
    for name, reason in timings.failed.items():
        yield {**common, **untimed(name, NOT_RUN), "reason": reason}
    yield from timed_rows(arms, timings, common, describe_inputs(problems, protocol))
    if timings.interrupted:
        raise KeyboardInterrupt
    if extra is not None:
        yield from extra(arms, common)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows for people: times where there are some, else counts."""
    timed = any(row["median_ms"] is not None for row in rows)
    regroups = any("net_us" in row for row in rows)
    counts = ["visits", "rounds"] if timed else ["visits", "reuse", "rounds"]
    table = Table("selection", "arm", "boundary", box=box.SIMPLE_HEAD, pad_edge=False)
    headings = [*(["ms", "NRMS"] if timed else []), *counts]
    for heading in [*headings, *(["net us", "increment us", "grouping us"] if regroups else [])]:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row["case"], row["arm"], row["boundary"]]
        if timed:
            cells += [number(row["median_ms"], ".4f"), number(row["nrms"], ".2%")]
        cells += [number(row[name], ".2f" if name == "reuse" else ",") for name in counts]
        if regroups:
            cells += [number(row.get(name), "+.1f") for name in ("net_us", "increment_us", "grouping_us")]
        table.add_row(*cells)
    return table


def number(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)
