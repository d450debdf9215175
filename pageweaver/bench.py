"""``pageweaver bench ...``: measurements, a command a question. What they do lies in ``pageweaver.eval``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

import pageweaver
from pageweaver.eval import output as files
from pageweaver.eval.output import MAX_SEED, SELECTION_HELP, Console, progress_bar, reporting_errors, say

bench = typer.Typer(help="Measure; one command a question. Times need a CUDA device.", no_args_is_help=True)

Row = dict[str, Any]

# What `--quick` shortens.
QUICK_ROUNDS, QUICK_CALLS, QUICK_SELECTIONS, QUICK_SHAPES = 3, 10, 2, 6


class KvDtype(str, Enum):
    """Cache types."""

    fp8 = "fp8"
    bf16 = "bf16"

    @property
    def torch(self) -> torch.dtype:
        """What torch calls it."""
        return torch.float8_e4m3fn if self is KvDtype.fp8 else torch.bfloat16


Selections = Annotated[
    list[str] | None,
    typer.Argument(metavar="SELECTION", help=f"{SELECTION_HELP} Default: the repository's real captures."),
]
Rounds = Annotated[int, typer.Option(min=1, help="Samples of each arm; arms take turns in every round.")]
Calls = Annotated[int, typer.Option(min=1, help="Calls in a sample: one CUDA graph.")]
Inputs = Annotated[
    int,
    typer.Option(
        min=1,
        help="Sets of q, K and V that calls take in turn; above 1 little stays in L2 from call to call.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of queries, keys, values and sampled rows.")]
GroupSize = Annotated[int, typer.Option(help="Query heads a KV head: 1, 2, 4, 8 or 16.")]
CacheType = Annotated[KvDtype, typer.Option(help="Of the cache.")]
Commit = Annotated[
    str | None,
    typer.Option(metavar="HASH", help="Commit to note in the rows where the folder has no git history."),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="About two minutes: fewer selections, rounds and calls.")
]
RowFile = Annotated[Path, typer.Option(metavar="FILE", help="Gets the JSON rows.")]


@bench.command()
@reporting_errors()
def operator(
    selections: Selections = None,
    strategies: Annotated[
        str, typer.Option(metavar="A,B,...", help="Arms, as NAME or NAME/VARIANT; they take turns.")
    ] = "per_query,union4,union8,union8/cluster",
    rounds: Rounds = 7,
    calls: Calls = 20,
    inputs: Inputs = 1,
    eager: Annotated[bool, typer.Option("--eager", help="Time complete calls outside graphs too.")] = False,
    seed: Seed = 0,
    group_size: GroupSize = 16,
    kv_dtype: CacheType = KvDtype.fp8,
    commit: Commit = None,
    quick: Quick = False,
    output: RowFile = Path("results/operator.jsonl"),
) -> None:
    """Time complete calls, attention alone and preparation alone, all arms rotating inside a round."""
    from pageweaver.eval import operator as timing
    from pageweaver.eval.arms import parse_arms
    from pageweaver.eval.timing import Protocol

    console = Console()
    arms = parse_arms(strategies)
    files.check_folder(output.parent, output.name)
    found = _selections(selections, quick)
    device, protocol = _device(), _protocol(Protocol(rounds, calls, inputs, eager), quick)
    with progress_bar(console) as report:
        made = timing.measure(
            found,
            arms,
            protocol=protocol,
            header=_header(timing.BENCH, device, commit),
            device=device,
            seed=seed,
            group_size=group_size,
            kv_dtype=kv_dtype.torch,
            report=report,
        )
        rows = _collect(console, made, output, lambda rows: console.print(timing.table_of(rows)))
    _close(console, rows, output, device)


@bench.command()
@reporting_errors()
def ablations(
    selections: Selections = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Arms. Default: those of every ablation.")
    ] = None,
    rounds: Rounds = 11,
    calls: Calls = 50,
    inputs: Inputs = 1,
    steps: Annotated[
        bool, typer.Option("--steps", help="Also take complete calls apart into kernels, by the profiler.")
    ] = False,
    seed: Seed = 0,
    group_size: GroupSize = 16,
    commit: Commit = None,
    quick: Quick = False,
    output: RowFile = Path("results/ablations.jsonl"),
) -> None:
    """Group size, mapping, window and order of the queries, beside the paper's section 5.4.

    Without a CUDA device everything is counted and nothing timed.
    """
    from pageweaver.eval import ablations as ablating
    from pageweaver.eval import operator as timing
    from pageweaver.eval.arms import parse_arms
    from pageweaver.eval.timing import Protocol

    console = Console()
    arms = ablating.default_arms() if strategies is None else parse_arms(strategies)
    files.check_folder(output.parent, output.name)
    found = _selections(selections, quick)
    device, protocol = _device(), _protocol(Protocol(rounds, calls, inputs), quick)
    header = _header(ablating.BENCH, device, commit)

    def rows_of(report: files.Report) -> Iterator[Row]:
        for index, selection in enumerate(found):
            yield from ablating.group_rows(selection, header)
            yield from timing.measure(
                [selection],
                arms,
                protocol=protocol,
                header=header,
                device=device,
                seed=seed,
                group_size=group_size,
                skip_missing=strategies is None,
                extra=ablating.step_rows if steps else None,
                report=files.part_of(report, index, len(found)),
            )

    with progress_bar(console) as report:
        rows = _collect(
            console, rows_of(report), output, lambda rows: ablating.print_ablations(console, rows)
        )
    console.print(Text(ablating.notes(device.type == "cuda"), style="dim"))
    _close(console, rows, output, device)


@bench.command()
@reporting_errors()
def numerics(
    selections: Selections = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Default: every strategy, in all its arithmetics.")
    ] = None,
    inputs: Annotated[
        str, typer.Option(metavar="A,B,...", help="Kinds of queries, keys and values: normal, heavy, model.")
    ] = "normal,heavy,model",
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Last queries to run. Default: all on a GPU, 33 elsewhere."),
    ] = None,
    seed: Seed = 0,
    group_size: GroupSize = 16,
    kv_dtype: CacheType = KvDtype.fp8,
    commit: Commit = None,
    quick: Quick = False,
    output: RowFile = Path("results/numerics.jsonl"),
) -> None:
    """Errors of every strategy and arithmetic: to float64 on 33 rows, and to per_query on all."""
    from pageweaver.eval import numerics as checking
    from pageweaver.eval.arms import parse_arms

    console = Console()
    arms = checking.default_arms() if strategies is None else parse_arms(strategies)
    files.check_folder(output.parent, output.name)
    found, device = _selections(selections, quick), _device()
    with progress_bar(console) as report:
        made = checking.measure(
            found,
            arms,
            [x.strip() for x in inputs.split(",") if x.strip()],
            header=_header(checking.BENCH, device, commit),
            device=device,
            rows=rows,
            seed=seed,
            group_size=group_size,
            kv_dtype=kv_dtype.torch,
            report=report,
        )
        done = _collect(console, made, output, lambda own: checking.print_numerics(console, own))
    console.print(Text(checking.notes(done), style="dim"))
    say(console, f"Wrote {output} ({len(done)} rows).")


@bench.command()
@reporting_errors()
def prefill(
    strategies: Annotated[
        str, typer.Option(metavar="A,B,...", help="Arms, as NAME or NAME/fp8_copy; they take turns.")
    ] = "per_query,union8,regroup_w128,union8/fp8_copy",
    tokens: Annotated[int, typer.Option(min=1, help="Of the prompt.")] = 65536,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens a forward pass.")] = 16384,
    layers: Annotated[int, typer.Option(min=1, help="Sparse layers of MiniMax-M3, as wide as it is.")] = 3,
    smooth: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Prompts: a random embedding every N tokens. Again for more; default 1, 16.",
        ),
    ] = None,
    rounds: Rounds = 5,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of weights and prompt.")] = 0,
    commit: Commit = None,
    output: RowFile = Path("results/prefill.jsonl"),
) -> None:
    """Time a long prefill of transformers' MiniMax-M3 layers: indexer, attention and the rest.

    Needs pip install '.\\[transformers]'. Weights and prompts are random.
    """
    from pageweaver.eval import prefill as timing

    console = Console()
    device = _device()
    if device.type != "cuda":
        raise pageweaver.UnsupportedDeviceError("bench prefill needs a CUDA device; torch sees none")
    files.check_folder(output.parent, output.name)
    config, arms = timing.real_config(layers), timing.parse_arms(strategies)
    with progress_bar(console) as report:
        made = timing.measure(
            config,
            arms,
            tokens=tokens,
            chunk=chunk,
            smooths=smooth or [1, 16],
            rounds=rounds,
            header=_header(timing.BENCH, device, commit),
            device=device,
            seed=seed,
            report=report,
        )
        rows = _collect(console, made, output, lambda rows: timing.print_prefill(console, rows))
    _close(console, rows, output, device)


@bench.command()
@reporting_errors()
def scaling(
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Call shapes with weights (JSON lines), timed beside the grid."),
    ] = None,
    grid: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="What varies: context, queries, group_size, kv_heads, requests; none: the workload alone.",
        ),
    ] = "context,queries,group_size,kv_heads,requests",
    strategies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Arms. Default: those that serve, and per_query.")
    ] = None,
    overlap: Annotated[str, typer.Option(help="Preset that draws the selections.")] = "mid",
    rounds: Rounds = 7,
    calls: Calls = 20,
    seed: Seed = 0,
    kv_dtype: CacheType = KvDtype.fp8,
    commit: Commit = None,
    quick: Quick = False,
    output: RowFile = Path("results/scaling.jsonl"),
) -> None:
    """Complete calls over context, queries, heads and requests, and over a workload's mix of calls."""
    from pageweaver.eval import scaling as growing
    from pageweaver.eval.arms import parse_arms
    from pageweaver.eval.timing import Protocol

    console = Console()
    arms = growing.default_arms() if strategies is None else parse_arms(strategies)
    files.check_folder(output.parent, output.name)
    shapes = growing.grid([x.strip() for x in grid.split(",") if x.strip() not in ("", "none")], quick)
    note = None
    if workload is not None:
        listed, note = growing.read_workload(workload, QUICK_SHAPES if quick else None)
        shapes += listed
    if not shapes:
        raise ValueError("grid: got none without a workload, supported: one of the two")
    device, protocol = _device(), _protocol(Protocol(rounds, calls), quick)
    with progress_bar(console) as report:
        made = growing.measure(
            shapes,
            arms,
            protocol=protocol,
            header=_header(growing.BENCH, device, commit),
            device=device,
            overlap=overlap,
            workload=note,
            seed=seed,
            kv_dtype=kv_dtype.torch,
            skip_missing=strategies is None,
            report=report,
        )
        rows = _collect(console, made, output)
    growing.print_scaling(console, rows)
    if note is not None:
        console.print(Text(f"{note}.", style="dim"))
    _close(console, rows, output, device)


def _selections(words: list[str] | None, quick: bool) -> list[pageweaver.Selection]:
    found = [s for word in words or [files.default_captures()] for s in pageweaver.resolve_selection(word)]
    return found[:QUICK_SELECTIONS] if quick else found


def _protocol(protocol: Any, quick: bool) -> Any:
    from dataclasses import replace

    return replace(protocol, rounds=QUICK_ROUNDS, calls=QUICK_CALLS) if quick else protocol


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _header(name: str, device: torch.device, commit: str | None) -> Row:
    """What every row of a command says of where it came from."""
    command = shlex.join(["pageweaver", *sys.argv[1:]])
    header = {"schema": f"pageweaver-{name}-1", "command": command, **files.provenance(device)}
    if commit is not None:
        header["commit"], header["dirty"] = files.split_commit(commit)
    return header


def _collect(
    console: Console,
    made: Iterator[Row],
    output: Path,
    show: Callable[[Sequence[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Gather rows, show each case's when finished, and write them, also those before an error or Ctrl-C."""
    rows: list[Row] = []
    shown = 0

    def show_finished() -> None:
        nonlocal shown
        if shown < len(rows):
            show(rows[shown:])
            shown = len(rows)

    try:
        for row in made:
            if rows and row["case"] != rows[-1]["case"]:
                show_finished()
            rows.append(row)
        show_finished()
    except BaseException:
        if rows:
            show_finished()
            files.write_files(output.parent, {output.name: files.json_lines(rows)})
            say(Console(stderr=True), f"Kept {len(rows)} finished rows in {output}.")
        raise
    files.write_files(output.parent, {output.name: files.json_lines(rows)})
    return rows


def _close(console: Console, rows: Sequence[Row], output: Path, device: torch.device) -> None:
    untimed = "" if device.type == "cuda" else " No CUDA device: counts, no times."
    say(console, f"Wrote {output} ({len(rows)} rows).{untimed}")
