"""How do times grow? Over context, queries, heads and requests, and over the calls of a real mix.

Shapes hold no page selections: these are drawn by a preset of `pageweaver.common.supports`, of the reuse of
real ones. A workload file says which calls a service makes and how often; totals weigh times by that.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageweaver.common.problem import HEAD_DIM, MAX_TOTAL_Q, AttentionProblem
from pageweaver.common.selection import Selection
from pageweaver.common.strategy import available
from pageweaver.common.supports import PRESETS
from pageweaver.eval.operator import NOT_RUN, case_of, counted_rows, measure_case, number
from pageweaver.eval.output import Report, part_of, read_lines
from pageweaver.eval.timing import Protocol

BENCH = "scaling"
BASELINE = "per_query"
CHUNK = 16_384  # queries of a prefill step
KIBI = 1024
# Whom the numbers of a known workload file come from.
SOURCES = {
    "m3_prefill_call_shapes.jsonl": "from the MiniMax-AI/MSA repository, MIT licence, Copyright (c) MiniMax"
}
KINDS = ("context", "queries", "group_size", "kv_heads", "requests")
# KV lengths are int32.
MAX_CONTEXT = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """The sizes of one call.

    Attributes
    ----------
    kind : str
        What it belongs to: "context", "queries", "group_size", "kv_heads", "requests" or "workload".
    query_lens, prefix_lens : tuple of int
        Queries of each request, and KV tokens before them.
    group_size, num_kv_heads : int
    weight : float
        Calls that it stands for; 0 outside a workload.
    """

    kind: str
    query_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    group_size: int = 16
    num_kv_heads: int = 1
    weight: float = 0.0

    @property
    def total_q(self) -> int:
        """Queries of all requests."""
        return sum(self.query_lens)

    @property
    def context(self) -> int:
        """Tokens of the longest request, its queries included."""
        return max(q + p for q, p in zip(self.query_lens, self.prefix_lens, strict=True))

    @property
    def name(self) -> str:
        """For tables and rows."""
        parts = [f"q{_size(self.total_q)}", f"c{_size(self.context)}"]
        if len(self.query_lens) > 1:
            parts.append(f"r{len(self.query_lens)}")
        if (self.group_size, self.num_kv_heads) != (16, 1):
            parts.append(f"h{self.num_kv_heads}x{self.group_size}")
        return f"{self.kind}.{'.'.join(parts)}"


def _size(count: int) -> str:
    """128, 15272, 64K, 1M."""
    for unit, letter in ((KIBI * KIBI, "M"), (KIBI, "K")):
        if count and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def grid(kinds: Sequence[str] = KINDS, quick: bool = False) -> list[Shape]:
    """Shapes that change one size at a time: 8K to 1M tokens, 128 to 32K queries, heads and requests.

    All others depart from 16K queries of one request at the end of 64K tokens, 16 query heads on one KV head,
    which stands among the contexts.

    Raises
    ------
    ValueError
        A kind is not one of `KINDS`.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"grid: got {unknown[0]!r}, supported: {', '.join(KINDS)}")
    contexts = [8, 64, 1024] if quick else [8, 16, 32, 64, 128, 256, 512, 1024]
    queries = [128, 2048, 32768] if quick else [128, 256, 512, 768, 1024, 2048, 4096, 8192, 32768]
    groups = [4] if quick else [8, 4, 2, 1]
    heads = [2] if quick else [2, 4]
    requests = [4] if quick else [4, 16, 64]
    shapes = []
    for kibi in contexts:
        chunk = min(CHUNK, kibi * KIBI)
        shapes.append(Shape("context", (chunk,), (kibi * KIBI - chunk,)))
    shapes += [Shape("queries", (count,), (64 * KIBI - count,)) for count in queries]
    prefix = 64 * KIBI - CHUNK
    shapes += [Shape("group_size", (CHUNK,), (prefix,), group_size=group) for group in groups]
    shapes += [Shape("kv_heads", (CHUNK // n,), (prefix,), num_kv_heads=n) for n in heads]
    for count in requests:
        shapes.append(Shape("requests", (CHUNK // count,) * count, (prefix // count,) * count))
    return [shape for shape in shapes if shape.kind in kinds]


def read_workload(path: str | os.PathLike[str], most: int | None = None) -> tuple[list[Shape], str]:
    """Shapes of a workload file, and what of it is left out, in words; lines of one shape are added up.

    Parameters
    ----------
    path : path
        JSON lines with ``query_lens``, ``prefix_lens`` (tokens) and ``representative_weight`` (calls).
    most : int, optional
        Only so many shapes, those of most weight.

    Raises
    ------
    ValueError
        A line is no such object, or none has both lengths and a weight. A value of another kind is never
        rounded or left out: the file, the line and the value are named.
    """
    weights: dict[Shape, float] = {}
    total, unmeasured = 0.0, 0
    for index, line in enumerate(read_lines("workload", path), 1):
        if not line.strip():
            continue
        try:
            shape = _read_call(line)
        except ValueError as error:
            raise ValueError(f"workload: got {path}, whose line {index} {error}") from error
        total += shape.weight
        if shape.weight and shape.query_lens and shape.prefix_lens:
            # Lines of one shape are one call: rows would differ in nothing, and totals take one of them.
            calls = replace(shape, weight=0.0)
            weights[calls] = weights.get(calls, 0.0) + shape.weight
        else:
            unmeasured += 1
    if not math.isfinite(total):
        raise ValueError(f"workload: got {path}, supported: representative_weights whose sum is finite")
    shapes = [replace(calls, weight=weight) for calls, weight in weights.items()]
    if not shapes:
        raise ValueError(f"workload: got {path}, supported: calls with lengths and representative_weight")
    shapes = sorted(shapes, key=lambda shape: -shape.weight)[:most]
    covered = sum(shape.weight for shape in shapes)
    count = len(weights) + unmeasured
    name = Path(path).name
    source = f" ({SOURCES[name]})" if name in SOURCES else ""
    return shapes, (
        f"{name}{source}: {len(shapes)} of {count} call shapes, {covered:,.0f} of {total:,.0f} calls;"
        " left out: rows that lack the lengths of each request, or a weight"
        + ("" if most is None else f", and all but the {most} heaviest")
    )


def _read_call(line: str) -> Shape:
    """The shape of a line; lengths are empty and the weight is 0 where it tells none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not a call ({error}), supported: a JSON object") from error
    if not isinstance(row, dict):
        raise ValueError(f"is not a call ({type(row).__name__}), supported: a JSON object")
    lengths = []
    for name, most in (("query_lens", MAX_TOTAL_Q), ("prefix_lens", MAX_CONTEXT)):
        values = row.get(name)
        if values is None:
            values = []
        # By type: true is an int to isinstance.
        if not isinstance(values, list) or not all(type(n) is int and 0 <= n <= most for n in values):
            raise ValueError(f"has {name} {_shown(values)}, supported: a list of integers from 0 to {most}")
        lengths.append(tuple(values))
    queries, prefixes = lengths
    weight = row.get("representative_weight")
    if weight is None:
        weight = 0
    # Compared as it is: an integer beyond floats cannot be converted.
    elif type(weight) not in (int, float) or not 0 < weight <= sys.float_info.max:
        raise ValueError(
            f"has representative_weight {_shown(weight)}, supported: a finite number above 0, or null"
        )
    if queries and prefixes:
        if len(queries) != len(prefixes):
            raise ValueError(
                f"has {len(queries)} query_lens and {len(prefixes)} prefix_lens,"
                " supported: one of each a request"
            )
        if sum(queries) > MAX_TOTAL_Q:
            raise ValueError(f"has {sum(queries)} queries, supported: at most {MAX_TOTAL_Q} in all")
        context = max(q + p for q, p in zip(queries, prefixes, strict=True))
        if context > MAX_CONTEXT:
            raise ValueError(f"has a request of {context} tokens, supported: at most {MAX_CONTEXT}")
    return Shape("workload", queries, prefixes, weight=float(weight))


def _shown(value: object) -> str:
    """A value as the file has it, cut where it would flood a message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def select(shape: Shape, overlap: str, seed: int) -> Selection:
    """Draw the page selection of a shape by a preset's generator."""
    chosen = PRESETS[overlap]
    made = chosen.generator(
        query_lens=shape.query_lens,
        prefix_lens=shape.prefix_lens,
        num_kv_heads=shape.num_kv_heads,
        seed=seed,
        **chosen.parameters,
    )
    return Selection(shape.name, made.q2k_indices, made.cu_seqlens_q, made.seqused_k, made.page_size)


class Pool:
    """One allocation of queries and caches on a device, cut to each shape.

    Drawing them anew for each would take longer than timing them.
    """

    def __init__(self, device: torch.device, kv_dtype: torch.dtype, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._kv_dtype = kv_dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        held = self._buffers.get(name)
        if held is None or held.numel() < count:
            drawn = torch.randn(count, generator=self._generator, device=self._generator.device)
            held = self._buffers[name] = drawn.to(dtype)
        return held[:count].view(shape)

    def problem(self, selection: Selection, group_size: int) -> AttentionProblem:
        """N(0, 1) queries, keys and values for a selection; physical pages are a random permutation."""
        device, heads = self._generator.device, selection.num_kv_heads
        lengths = torch.from_numpy(selection.seqused_k.copy())
        counts = -(-lengths // selection.page_size)
        cache = (int(counts.sum()), selection.page_size, heads, HEAD_DIM)
        physical = torch.randperm(cache[0], generator=self._generator, device=device).int()
        table = torch.zeros(len(lengths), int(counts.max()), dtype=torch.int32, device=device)
        for request, pages in enumerate(physical.split(counts.tolist())):
            table[request, : len(pages)] = pages
        return AttentionProblem(
            q=self._take("q", (selection.total_q, heads * group_size, HEAD_DIM), torch.bfloat16),
            k_cache=self._take("k", cache, self._kv_dtype),
            v_cache=self._take("v", cache, self._kv_dtype),
            q2k_indices=torch.from_numpy(selection.q2k_indices.copy()).to(device),
            cu_seqlens_q=torch.from_numpy(selection.cu_seqlens_q.copy()).to(device),
            seqused_k=lengths.to(device),
            page_table=table,
        )


def default_arms() -> list[str]:
    """What serves, and the baseline."""
    wanted = (BASELINE, "union4", "union8", "regroup_w128", "auto", "page_union")
    return [name for name in wanted if name in available()]


def measure(
    shapes: Sequence[Shape],
    arms: Sequence[str],
    *,
    protocol: Protocol,
    header: Mapping[str, Any],
    device: torch.device,
    overlap: str = "mid",
    workload: str | None = None,
    seed: int = 0,
    kv_dtype: torch.dtype = torch.float8_e4m3fn,
    skip_missing: bool = True,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Time complete calls of every arm on every shape; count them where there is no CUDA device.

    Parameters
    ----------
    shapes : sequence of Shape
    arms : sequence of str
    protocol, header, device, seed, kv_dtype, skip_missing, report
        As in `pageweaver.eval.operator.measure`.
    overlap : str
        The preset that draws the selections.
    workload : str, optional
        Where the shapes of kind "workload" come from; kept in their rows.

    Yields
    ------
    dict
        One JSON-ready row a shape and arm, with the shape's ``kind`` and ``weight``.
    """
    if overlap not in PRESETS:
        raise ValueError(f"overlap: got {overlap!r}, supported: {', '.join(PRESETS)}")
    pool = Pool(device, kv_dtype, seed)
    for index, shape in enumerate(shapes):
        part = part_of(report, index, len(shapes))
        part(0.0, shape.name)
        selection = select(shape, overlap, seed)
        common = {**header, "kind": shape.kind, "weight": shape.weight, "overlap": overlap}
        common["workload"] = workload if shape.kind == "workload" else None
        if device.type != "cuda":
            yield from counted_rows(selection, arms, shape.group_size, kv_dtype, common)
            continue
        problem = pool.problem(selection, shape.group_size)
        yield from measure_case(
            selection,
            [problem],
            arms,
            protocol=protocol,
            common={**common, **case_of(problem, selection)},
            seed=seed,
            skip_missing=skip_missing,
            boundaries=("complete",),
            report=part,
        )


@dataclass(frozen=True)
class Weighted:
    """One arm over a workload.

    Attributes
    ----------
    arm : str
    seconds : float
        Its calls' times, weighed by how often they come.
    worst_ratio : float
        Its largest time over that of the fastest arm on the same shape.
    worst_case : str
        That shape.
    """

    arm: str
    seconds: float
    worst_ratio: float
    worst_case: str


def weigh(rows: Sequence[Mapping[str, Any]]) -> list[Weighted]:
    """Weighted totals of the arms that ran every shape of a workload, the fastest first."""
    times: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "workload" and row["boundary"] == "complete":
            # Two calls of a file may be of equal name; what tells them apart is their input.
            case = f"{row['case']} {row['sha256'][:6]}"
            times.setdefault(row["arm"], {})[case] = row["median_ms"]
            weights[case] = row["weight"]
    found = []
    for arm, own in times.items():
        if own.keys() == weights.keys():
            ratios = {
                case: ms / min(t[case] for t in times.values() if case in t) for case, ms in own.items()
            }
            worst = max(ratios, key=ratios.__getitem__)
            seconds = sum(ms * weights[case] for case, ms in own.items()) / 1000
            found.append(Weighted(arm, seconds, ratios[worst], worst.rsplit(" ", 1)[0]))
    return sorted(found, key=lambda one: one.seconds)


def print_scaling(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table a kind of shape, a column an arm; then the workload's totals."""
    timed = any(row["median_ms"] is not None for row in rows)
    arms = list(dict.fromkeys(row["arm"] for row in rows if row["boundary"] != NOT_RUN))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(f"{kind}, {'ms' if timed else 'visits'}", no_wrap=True)
        for arm in arms:
            table.add_column(arm, justify="right")
        for case in dict.fromkeys((row["case"], row["sha256"]) for row in own):
            cells = {row["arm"]: row for row in own if (row["case"], row["sha256"]) == case}
            line = []
            for arm in arms:
                row = cells.get(arm)
                if row is None or row["boundary"] == NOT_RUN:
                    line.append("-")
                else:
                    line.append(number(row["median_ms"], ".3f") if timed else number(row["visits"], ","))
            table.add_row(case[0].removeprefix(f"{kind}."), *line)
        console.print(table)
        console.print()
    totals = weigh(rows)
    if totals:
        base = next((one.seconds for one in totals if one.arm == BASELINE), None)
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("workload", no_wrap=True)
        for heading in ("weighted s", f"{BASELINE} over it", "worst ratio to the best", "on"):
            table.add_column(heading, justify="right")
        for one in totals:
            ratio = "-" if base is None else f"{base / one.seconds:.2f}"
            table.add_row(one.arm, f"{one.seconds:.2f}", ratio, f"{one.worst_ratio:.2f}", one.worst_case)
        console.print(table)
    for row in {row["arm"]: row for row in rows if row["boundary"] == NOT_RUN}.values():
        console.print(Text(f"{row['arm']} not run: {row['reason']}", style="dim"))
