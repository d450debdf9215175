"""``pageweaver bench ...``: measurements, a command a question. What they do lies in ``pageweaver.eval``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

import pageweaver
from pageweaver.eval import output as files
from pageweaver.eval.output import (
    MAX_SEED,
    SELECTION_HELP,
    Console,
    counted,
    flag,
    progress_bar,
    reporting_errors,
    say,
)

bench = typer.Typer(help="Measure; one command a question. Times need a CUDA device.", no_args_is_help=True)

Row = dict[str, Any]
Show = Callable[[Console, Sequence[Row]], object]

# What `--quick` shortens.
QUICK_ROUNDS, QUICK_CALLS, QUICK_SELECTIONS, QUICK_SHAPES, QUICK_TOKENS = 3, 10, 2, 6, 16_384


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
    bool, flag("--quick", help="About two minutes: fewer selections, shapes, rounds and calls.")
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
    eager: Annotated[bool, flag("--eager", help="Time complete calls outside graphs too.")] = False,
    seed: Seed = 0,
    group_size: GroupSize = 16,
    kv_dtype: CacheType = KvDtype.fp8,
    commit: Commit = None,
    quick: Quick = False,
    output: RowFile = Path("results/operator.jsonl"),
) -> None:
    """Time complete calls, attention alone and preparation alone, all arms inside every round."""
    from pageweaver.eval import operator as timing
    from pageweaver.eval.arms import parse_arms
    from pageweaver.eval.timing import Protocol

    run = Run(timing.BENCH, output, commit, selections or ())
    made = partial(
        timing.measure,
        _selections(selections, quick),
        parse_arms(strategies),
        protocol=_protocol(Protocol(rounds, calls, inputs, eager), quick),
        seed=seed,
        group_size=group_size,
        kv_dtype=kv_dtype.torch,
    )
    run.collect(made, lambda console, rows: console.print(timing.table_of(rows)))
    run.close()


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
        bool, flag("--steps", help="Also take complete calls apart into kernels, by the profiler.")
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

    run = Run(ablating.BENCH, output, commit, selections or ())
    found = _selections(selections, quick)
    measure = partial(
        timing.measure,
        names=ablating.default_arms() if strategies is None else parse_arms(strategies),
        protocol=_protocol(Protocol(rounds, calls, inputs), quick),
        seed=seed,
        group_size=group_size,
        skip_missing=strategies is None,
        extra=ablating.step_rows if steps else None,
    )

    def made(*, header: Row, device: torch.device, report: files.Report) -> Iterator[Row]:
        for index, selection in enumerate(found):
            part = files.part_of(report, index, len(found))
            yield from ablating.group_rows(selection, header)
            yield from measure([selection], header=header, device=device, report=part)

    run.collect(made, ablating.print_ablations)
    run.close(ablating.notes(run.device.type == "cuda"))


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
    from pageweaver.eval.inputs import INPUTS

    run = Run(checking.BENCH, output, commit, selections or ())
    kinds = list(dict.fromkeys(x.strip() for x in inputs.split(",") if x.strip()))
    if not kinds:
        raise ValueError(f"inputs: got {inputs!r}, supported: some of {', '.join(INPUTS)}")
    made = partial(
        checking.measure,
        _selections(selections, quick),
        checking.default_arms() if strategies is None else parse_arms(strategies),
        kinds,
        rows=rows,
        seed=seed,
        group_size=group_size,
        kv_dtype=kv_dtype.torch,
    )
    run.close(checking.notes(run.collect(made, checking.print_numerics)), is_timed=False)


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
    quick: Quick = False,
    output: RowFile = Path("results/prefill.jsonl"),
) -> None:
    """Time a long prefill of transformers' MiniMax-M3 layers: indexer, attention and the rest.

    Needs pip install '.\\[transformers]'. Weights and prompts are random.
    """
    from pageweaver.eval import prefill as timing

    run = Run(timing.BENCH, output, commit)
    if run.device.type != "cuda":
        raise pageweaver.UnsupportedDeviceError("bench prefill needs a CUDA device; torch sees none")
    made = partial(
        timing.measure,
        timing.real_config(layers),
        timing.parse_arms(strategies),
        tokens=min(tokens, QUICK_TOKENS) if quick else tokens,
        chunk=chunk,
        smooths=list(dict.fromkeys(smooth or [1, 16])),
        rounds=QUICK_ROUNDS if quick else rounds,
        seed=seed,
    )
    run.collect(made, timing.print_prefill)
    run.close()


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

    run = Run(growing.BENCH, output, commit, [workload])
    shapes = growing.grid([x.strip() for x in grid.split(",") if x.strip() not in ("", "none")], quick)
    note = None
    if workload is not None:
        listed, note = growing.read_workload(workload, QUICK_SHAPES if quick else None)
        shapes += listed
    if not shapes:
        raise ValueError("grid: got none without a workload, supported: one of the two")
    made = partial(
        growing.measure,
        shapes,
        growing.default_arms() if strategies is None else parse_arms(strategies),
        protocol=_protocol(Protocol(rounds, calls), quick),
        overlap=overlap,
        workload=note,
        seed=seed,
        kv_dtype=kv_dtype.torch,
        skip_missing=strategies is None,
    )
    growing.print_scaling(run.console, run.collect(made))
    run.close(None if note is None else f"{note}.")


def _selections(words: list[str] | None, quick: bool) -> list[pageweaver.Selection]:
    found = files.distinct(
        s for word in words or [files.default_captures()] for s in pageweaver.resolve_selection(word)
    )
    return found[:QUICK_SELECTIONS] if quick else found


def _protocol(protocol: Any, quick: bool) -> Any:
    return replace(protocol, rounds=QUICK_ROUNDS, calls=QUICK_CALLS) if quick else protocol


@dataclass
class Run:
    """One command's run: where its rows go and what they say of themselves.

    Parameters
    ----------
    bench : str
        The command.
    output : Path
        Gets the rows; refused here where it cannot be written.
    commit : str or None
        As the user gave it.
    reads : sequence of str or Path
        Files and selections that the output must not replace.
    """

    bench: str
    output: Path
    commit: str | None
    reads: Sequence[str | Path | None] = ()
    console: Console = field(default_factory=Console)
    device: torch.device = field(init=False)
    rows: list[Row] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        files.check_file(self.output, made=files.RESULTS, reads=self.reads)
        self._kept = files.kept_beside(self.output)
        files.check_file(self._kept, made=files.RESULTS, reads=self.reads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def header(self) -> Row:
        """What every row says of where it came from."""
        schema = f"pageweaver-{self.bench}-{files.SCHEMA_VERSION}"
        header: Row = {"schema": schema, **files.provenance(self.device)}
        if self.commit is not None:
            header["commit"], header["dirty"] = files.split_commit(self.commit)
        return header

    def collect(self, made: Callable[..., Iterator[Row]], show: Show | None = None) -> list[Row]:
        """Gather rows, show each case's when it is finished, and write them.

        An error or Ctrl-C leaves an earlier file as it was; finished rows go to a file beside it.

        Raises
        ------
        ValueError
            A row has a NaN or an infinity, or there is none.
        """
        shown, screen = 0, files.Screen(self.console)

        def show_finished() -> None:
            nonlocal shown
            if show is not None and shown < len(self.rows):
                screen.show(show, self.rows[shown:])
                shown = len(self.rows)

        try:
            with files.keeping(self.rows, self._kept):
                with progress_bar(self.console) as report:
                    for row in made(header=self.header(), device=self.device, report=report):
                        if self.rows and row["case"] != self.rows[-1]["case"]:
                            show_finished()
                        self._check(row)
                        self.rows.append(row)
                    show_finished()
                if not self.rows:
                    raise ValueError("rows: got none, supported: at least one selection, or shape, and arm")
                written = {self.output.name: files.json_lines(self.rows)}
                files.write_files(self.output.parent, written)
            screen.close()
        except BaseException:
            show_finished()
            raise
        return self.rows

    @staticmethod
    def _check(row: Row) -> None:
        """Refuse what could not be written, before it is among the finished rows."""
        try:
            files.json_lines([row])
        except ValueError as error:
            place = f"{row['case']}, {row.get('arm')}"
            raise ValueError(f"rows: got one of {place} that JSON lacks ({error})") from error

    def close(self, note: str | None = None, is_timed: bool = True) -> None:
        """Say what was written; `is_timed`: whether a CUDA device would have given times."""
        if note is not None:
            self.console.print(Text(note, style="dim"))
        untimed = " No CUDA device: counts, no times." if is_timed and self.device.type != "cuda" else ""
        say(self.console, f"Wrote {self.output} ({counted(len(self.rows), 'row')}).{untimed}")
        files.name_earlier(self.console, self._kept)
