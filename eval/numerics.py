"""How exact is each arm? Every strategy and arithmetic against float64, and against one query at a time.

Errors are NRMS over sampled rows, with the worst single row beside it. On a CUDA device the kernels run on
all rows, and `per_query`'s Triton kernel is the second reference; elsewhere the torch references run on a
selection's last queries, and the second reference is `per_query` in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.selection import Selection
from pageweaver.common.strategy import available, load
from pageweaver.eval import paper
from pageweaver.eval.arms import (
    OFFLINE_WINDOWS,
    make_strategy,
    parse_arm,
    sample_rows,
    without_arithmetic,
)
from pageweaver.eval.inputs import INPUTS, draw_problem
from pageweaver.eval.operator import NOT_RUN, UNSUPPORTED, case_of, number
from pageweaver.eval.output import CheckFailed, Report, naming_red, part_of
from pageweaver.strategies.query_union import QueryUnion

BENCH = "numerics"
PEER = "per_query"
BASE = "union8"  # whose bits all orders keep
CPU_ROWS = 33  # milliseconds a row and arm


def default_arms() -> list[str]:
    """Every strategy, and union8's other mapping; one offline window stands for both."""
    return [*(name for name in available() if name != "offline_w512"), f"{BASE}/cluster"]


def arithmetics_of(arm: str, backend: str, kv_dtype: torch.dtype) -> tuple[str, ...]:
    """Arithmetics that an arm has on a backend for a cache.

    Raises
    ------
    UnsupportedDeviceError
        None: the backend, or the cache, is not built.
    """
    name, _ = parse_arm(arm)
    able = _class_of(name).capabilities.get(backend)
    if able is None or kv_dtype not in able.arithmetics:
        raise UnsupportedDeviceError(f"{name} has no {backend} kernels for {kv_dtype} caches in this build")
    return able.arithmetics[kv_dtype]


def _class_of(name: str) -> Any:
    if name in OFFLINE_WINDOWS:  # cannot be made without ids
        from pageweaver.strategies.regroup.offline import OfflineRegroup

        return OfflineRegroup
    return load(name)


def row_errors(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """NRMS of each row, float64 ``[rows]``; 0 where both are 0."""
    reference = reference.double().flatten(1)
    difference = (out.double().flatten(1) - reference).norm(dim=1)
    size = reference.norm(dim=1)
    # A row that should be 0 and is not has an infinite error; NaN stays.
    return torch.where((size == 0) & (difference == 0), 0.0, difference / size)


def measure(
    selections: Sequence[Selection],
    arms: Sequence[str],
    kinds: Sequence[str],
    *,
    header: Mapping[str, Any],
    device: torch.device,
    rows: int | None = None,
    seed: int = 0,
    group_size: int = 16,
    kv_dtype: torch.dtype = torch.float8_e4m3fn,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Errors of every arm, arithmetic and kind of input.

    Parameters
    ----------
    selections : sequence of Selection
    arms : sequence of str
    kinds : sequence of str
        Of `pageweaver.eval.inputs.INPUTS`.
    header : mapping
        Kept in each row.
    device : torch.device
        Kernels run on a CUDA device, references on any other.
    rows : int, optional
        Last queries to run, of the last request that has any; left out: all on a CUDA device, `CPU_ROWS`
        elsewhere.
    seed, group_size, kv_dtype, report
        As in `pageweaver.eval.operator.measure`.

    Yields
    ------
    dict
        One JSON-ready row an arm, arithmetic and kind; errors are None where its rows read nothing.

    Raises
    ------
    ValueError
        An arm names an arithmetic.
    CheckFailed
        An output holds NaN or is not 0 where nothing is read, an error is not finite, or an order changes
        bits that it must not. Such an arm has no row; the others have, and all that failed is named at the
        end.
    """
    for arm in arms:
        if arm != without_arithmetic(arm):
            raise ValueError(f"strategies: got {arm!r}, supported: no arithmetic, for each arm runs in all")
    wanted = rows or (None if device.type == "cuda" else CPU_ROWS)
    steps = [(selection, kind) for selection in selections for kind in kinds]
    red: list[str] = []
    with naming_red(red):
        for place, (whole, kind) in enumerate(steps):
            yield from _measure_case(
                _tail(whole, wanted),
                kind,
                arms,
                header=header,
                device=device,
                seed=seed,
                group_size=group_size,
                kv_dtype=kv_dtype,
                report=part_of(report, place, len(steps)),
                red=red,
            )


def _measure_case(
    selection: Selection,
    kind: str,
    arms: Sequence[str],
    *,
    header: Mapping[str, Any],
    device: torch.device,
    seed: int,
    group_size: int,
    kv_dtype: torch.dtype,
    report: Report,
    red: list[str],
) -> Iterator[dict[str, Any]]:
    """Rows of one selection and kind of input; arms that fail a check are named in `red` instead."""
    backend = "cuda" if device.type == "cuda" else "reference"
    problem = draw_problem(
        kind, selection, group_size=group_size, kv_dtype=kv_dtype, seed=seed, device=device
    )
    sampled = sample_rows(selection, seed).to(device)
    exact, exact_lse = exact_attention(problem, torch.float64, sampled)
    peer_policy = "float32" if backend == "reference" else load(PEER, backend="cuda").resolve(problem)[1]
    peer = load(PEER, backend=backend, arithmetic=peer_policy)(problem)
    common = {
        **header,
        **case_of(problem, selection),
        "inputs": kind,
        "seed": seed,
        "backend": backend,
        "sampled_rows": sampled.tolist(),
        "peer": f"{PEER}/{peer_policy}",
    }
    bits: dict[str, torch.Tensor] = {}
    # The others are compared with its bits.
    ordered = sorted(arms, key=lambda arm: arm != BASE)
    for index, arm in enumerate(ordered):
        report(index / len(ordered), f"{selection.name}, {kind}: {arm}")
        try:
            policies = arithmetics_of(arm, backend, kv_dtype)
        except UnsupportedDeviceError as error:
            yield {**common, "arm": arm, "arithmetic": None, "boundary": NOT_RUN, "reason": str(error)}
            continue
        for arithmetic in policies:
            lse = torch.full(problem.q.shape[:2], torch.nan, device=device)
            try:
                strategy = make_strategy(f"{arm}/{arithmetic}", selection, problem, backend)
                out = strategy(problem, None, lse)
            except UNSUPPORTED as error:
                known = {**common, "arm": arm, "arithmetic": arithmetic, "boundary": NOT_RUN}
                yield {**known, "reason": str(error)}
                continue
            try:
                if not bool(out.isfinite().all()):
                    raise CheckFailed("got NaN or infinite outputs, supported: finite")
                if arm == BASE:
                    bits[arithmetic] = out
                errors = _errors_of(out, lse, sampled, exact, exact_lse, peer)
                same = torch.equal(out, bits[arithmetic]) if arithmetic in bits else None
                # Orders of queries share one execution, and it keeps their bits (contract, point 7).
                if same is False and isinstance(strategy, QueryUnion):
                    raise CheckFailed(f"got other bits than {BASE}, supported: the same")
            except CheckFailed as error:
                red.append(f"{selection.name}, {kind}, {arm}/{arithmetic}: {error}")
                continue
            known = {**common, "arm": arm, "arithmetic": arithmetic, "boundary": "numerics"}
            yield {**known, **errors, "bits_of_union8": same}


def _errors_of(
    out: torch.Tensor,
    lse: torch.Tensor,
    sampled: torch.Tensor,
    exact: torch.Tensor,
    exact_lse: torch.Tensor,
    peer: torch.Tensor,
) -> dict[str, Any]:
    """The part of a row that says how exact an arm is; refuses what is no error but a fault."""
    errors = {
        **_against("", out[sampled], exact),
        "lse_error": _lse_error(lse[sampled], exact_lse),
        **_against("peer_", out, peer),
    }
    # An LSE may be infinite beside a finite one, and a peer NaN where the arm is not.
    if strange := [name for name, x in errors.items() if x is not None and not math.isfinite(x)]:
        raise CheckFailed(f"got {strange[0]} {errors[strange[0]]}, supported: finite errors")
    return errors


def _tail(selection: Selection, rows: int | None) -> Selection:
    """The last rows of the last request that has any; the whole selection where that is asked for, or where
    no request has one."""
    if rows is None or not selection.tail_rows:
        return selection
    return selection.tail(min(rows, selection.tail_rows))


def _against(prefix: str, out: torch.Tensor, reference: torch.Tensor) -> dict[str, Any]:
    """Errors of rows, None where they read nothing."""
    errors = row_errors(out, reference)
    if bool(errors.isinf().any()):
        raise CheckFailed("got non-zero rows, supported: zeros where nothing is read")
    reads = bool(reference.any())
    return {
        f"{prefix}nrms": nrms(out, reference) if reads else None,
        f"{prefix}worst_row_nrms": float(errors.max()) if reads else None,
        f"{prefix}rows": len(errors),
    }


def _lse_error(lse: torch.Tensor, exact: torch.Tensor) -> float | None:
    """Largest absolute difference, None without rows; those that see nothing are -inf on both sides and
    count as 0."""
    if not len(lse):
        return None
    difference = (lse.double() - exact).abs()
    return float(torch.where(lse.double() == exact, 0.0, difference).max())


def print_numerics(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table a kind of input for one selection's rows; arms of equal bits share a line."""
    console.print(Text(rows[0]["case"], style="bold"))
    for kind in dict.fromkeys(row["inputs"] for row in rows):
        console.print(Text(f"{kind}: {INPUTS[kind].about}", style="dim"))
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("arm")
        table.add_column("arithmetic", no_wrap=True)
        for heading in ("NRMS", "worst row", "LSE", "to per_query", "worst row"):
            table.add_column(heading, justify="right", no_wrap=True)
        own = [row for row in rows if row["inputs"] == kind and row["boundary"] != NOT_RUN]
        lines: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in own:
            leader = BASE if row["bits_of_union8"] else row["arm"]
            lines.setdefault((leader, row["arithmetic"]), []).append(row)
        for (_, arithmetic), equal in lines.items():
            row = equal[0]
            table.add_row(
                ", ".join(r["arm"] for r in equal),
                arithmetic,
                number(row["nrms"], ".2%"),
                number(row["worst_row_nrms"], ".2%"),
                number(row["lse_error"], ".4f"),
                number(row["peer_nrms"], ".2%"),
                number(row["peer_worst_row_nrms"], ".2%"),
            )
        console.print(table)
    for row in {row["arm"]: row for row in rows if row["boundary"] == NOT_RUN}.values():
        console.print(Text(f"{row['arm']} not run: {row['reason']}", style="dim"))
    console.print()


def notes(rows: Sequence[Mapping[str, Any]]) -> str:
    """What holds for all tables."""
    row = next((row for row in rows if row["boundary"] != NOT_RUN), None)
    if row is None:
        return "Nothing was run."
    low, high = paper.NRMS
    return (
        f"NRMS to float64 on {len(row['sampled_rows'])} sampled rows; to per_query ({row['peer']},"
        f" {row['backend']}) on all {row['total_q']:,}. LSE: largest absolute difference. Arms on a line gave"
        f" the same bits. The paper: {low:.2%} to {high:.2%} for its FP8 kernel against FP32 on captures."
    )
