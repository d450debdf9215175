"""The command line: arguments, errors and exit codes; what the commands do lies in ``pageweaver.eval``.

Exit codes: 0 done, 1 a red check (an arm computes something wrong, or `doctor` found the CPU path unusable),
2 an error that is the caller's to mend (one red line), 130 interrupted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from rich.text import Text

import pageweaver
from pageweaver.bench import bench
from pageweaver.eval.output import (
    MAX_SEED,
    SELECTION_HELP,
    Console,
    counted,
    default_captures,
    flag,
    progress_bar,
    reporting_errors,
    say,
)

SHOWN_TABLES = 10  # of a comparison; a capture file may hold a hundred selections

app = typer.Typer(
    name="pageweaver",
    help="Query unions over paged KV for page-selected sparse attention.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Device(str, Enum):
    """Where a comparison runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Window(str, Enum):
    """Windows that an offline strategy runs."""

    w512 = "512"
    w2048 = "2048"


class Objective(str, Enum):
    """What the offline search minimises."""

    rounds = "rounds"
    visits = "visits"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pageweaver {pageweaver.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        flag("--version", callback=_show_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Query unions over paged KV for page-selected sparse attention."""


app.add_typer(bench, name="bench")


@app.command()
@reporting_errors()
def compare(
    selections: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SELECTION", help=f"{SELECTION_HELP} Default: the repository's real captures."
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help=f"Default: all of {', '.join(pageweaver.available())}."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Last queries to run for the error against float64.")
    ] = 256,
    seed: Annotated[
        int, typer.Option(min=0, max=MAX_SEED, help="Of queries, keys, values and sampled rows.")
    ] = 0,
    group_size: Annotated[int, typer.Option(help="Query heads a KV head: 1, 2, 4, 8 or 16.")] = 16,
    device: Annotated[
        Device, typer.Option(help="auto is a GPU where there is one; calls are timed there.")
    ] = Device.auto,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Gets compare.jsonl and compare.png.")] = Path(
        "results/compare"
    ),
) -> None:
    """Compare strategies on page selections: work, error, and time on a GPU."""
    from pageweaver.eval import compare as comparing
    from pageweaver.eval import output as files

    began = time.perf_counter()
    console = Console()
    chosen = (
        list(pageweaver.available())
        if strategies is None
        else comparing.check_strategies([x.strip() for x in strategies.split(",") if x.strip()])
    )
    place = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device is Device.auto else device.value
    )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise pageweaver.UnsupportedDeviceError(
            "device: got cuda, but torch sees no GPU; `pageweaver doctor` says why"
        )
    kept = files.kept_beside(output / "compare.jsonl")
    files.check_folder(output, "compare.jsonl", "compare.png", kept.name)
    found = files.distinct(
        s for word in selections or [default_captures()] for s in pageweaver.resolve_selection(word)
    )
    origin = files.provenance(place)
    done: list[comparing.Comparison] = []
    lines: list[dict[str, Any]] = []
    red: list[str] = []
    screen = files.Screen(console)
    with files.keeping(lines, kept), progress_bar(console) as report:
        with files.naming_red(red):
            for index, selection in enumerate(found):
                comparison = comparing.compare_selection(
                    selection,
                    chosen,
                    rows=rows,
                    seed=seed,
                    group_size=group_size,
                    device=place,
                    progress=files.part_of(report, index, len(found)),
                )
                lines += [{**row, **origin} for row in comparison.rows()]
                red += comparison.red()
                done.append(comparison)
                if index < SHOWN_TABLES:
                    screen.show(comparing.print_comparison, comparison)
        report(1.0, "plot")
        written = {
            "compare.jsonl": files.json_lines(lines),
            "compare.png": files.png(comparing.comparison_figure(done)),
        }
        files.write_files(output, written)
    screen.close()
    took = time.perf_counter() - began
    if len(done) > SHOWN_TABLES:
        say(console, f"{len(done) - SHOWN_TABLES} more tables are left out; their rows are in the file.")
    console.print(Text(comparing.notes(done), style="dim"))
    say(
        console,
        f"Wrote {output / 'compare.jsonl'} ({counted(len(lines), 'row')}) and compare.png in {took:.0f} s.",
    )
    files.name_earlier(console, kept)


@app.command()
@reporting_errors()
def survey(
    selections: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Capture files. Default: the repository's real captures."),
    ] = None,
    group: Annotated[int, typer.Option(min=1, help="Consecutive queries that share a union.")] = 8,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Gets survey.jsonl and survey.png.")] = Path(
        "results/survey"
    ),
) -> None:
    """Page reuse per layer and KV head over capture files: quartiles, table, plot."""
    from pageweaver.eval import output as files
    from pageweaver.eval import survey as surveying

    console = Console()
    files.check_folder(output, "survey.jsonl", "survey.png")
    with progress_bar(console) as report:
        observations = surveying.survey(selections or [default_captures()], group, report)
    origin = files.provenance(torch.device("cpu"))
    lines = [{**row, **origin} for row in surveying.json_rows(observations)]
    files.write_files(
        output,
        {
            "survey.jsonl": files.json_lines(lines),
            "survey.png": files.png(surveying.survey_figure(observations)),
        },
    )
    surveying.print_survey(console, observations)
    say(console, f"Wrote {output / 'survey.jsonl'} ({counted(len(lines), 'row')}) and survey.png.")


def _ids_to_go_on_from(output: Path, window: int, objective: str) -> pageweaver.OfflineIds:
    """Those in the output file, if they are of a search like this one."""
    ids = pageweaver.OfflineIds.load(output)
    for name, wanted, got in (("window", window, ids.window), ("objective", objective, ids.objective)):
        if wanted != got:
            raise ValueError(f"{name}: got {wanted} with --resume, supported: {got}, of the ids in {output}")
    return ids


def _keep_searched_ids(output: Path) -> None:
    """Refuse an output that holds ids which time was spent on."""
    try:
        ids = pageweaver.OfflineIds.load(output)
    except (OSError, ValueError):
        return
    if (ids.visits, ids.rounds) != (ids.greedy_visits, ids.greedy_rounds):
        raise ValueError(
            f"output: got {output}, which has ids that a search improved (window {ids.window}),"
            " supported: --resume, which goes on from them, or another file"
        )


@app.command()
@reporting_errors()
def search(
    selection: Annotated[str, typer.Argument(metavar="SELECTION", help=f"One selection: {SELECTION_HELP}")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Gets the query ids (safetensors).")],
    window: Annotated[Window, typer.Option(help="Queries a search window.")] = Window.w2048,
    objective: Annotated[
        Objective,
        typer.Option(help="What the search minimises: 64-row rounds, which the time follows, or visits."),
    ] = Objective.rounds,
    group_size: Annotated[int, typer.Option(help="Query heads a KV head: 1, 2, 4, 8 or 16.")] = 16,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="About how long to improve the greedy's order; 0: not at all.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the improving search.")] = 0,
    resume: Annotated[bool, flag("--resume", help="Go on from the ids in the output file.")] = False,
) -> None:
    """Search query ids for an offline strategy and save them with the selection's hash.

    Ctrl-C ends an improving search early: the best ids so far are saved.
    """
    from pageweaver.eval import output as files
    from pageweaver.eval.compare import counting_problem
    from pageweaver.strategies.regroup.offline import OfflineSearch, check_seconds

    console = Console()
    found = pageweaver.resolve_selection(selection)
    if len(found) != 1:
        names = ", ".join(s.name for s in found)
        raise ValueError(
            f"selection: got {len(found)} of {selection}, supported: one, as {selection}:NAME of {names}"
        )
    files.check_file(output, reads=[selection])
    check_seconds(seconds)
    if resume and seconds == 0:
        raise ValueError("seconds: got 0 with --resume, supported: above 0, the time to go on for")
    start = _ids_to_go_on_from(output, int(window.value), objective.value) if resume else None
    if not resume:
        _keep_searched_ids(output)
    chosen = found[0]
    problem = counting_problem(chosen, group_size)
    began = time.perf_counter()
    text = f"{chosen.name}, window {window.value}"
    stop: KeyboardInterrupt | None = None
    with progress_bar(console) as report:
        report(0.0, text)
        running = OfflineSearch(
            chosen,
            window=int(window.value),
            objective=objective.value,
            group_size=group_size,
            seed=seed,
            start=start,
            progress=None if seconds > 0 else lambda fraction: report(fraction, text),
        )
        if seconds > 0:
            try:
                running.run(seconds, lambda fraction: report(fraction, text))
            except KeyboardInterrupt as asked:
                stop = asked
    took = time.perf_counter() - began
    ids = running.ids()
    with files.undisturbed():
        ids.save(output)
    if stop is not None:
        errors = Console(stderr=True)
        errors.print(f"Interrupted; {output} has the best found so far.", style="yellow", soft_wrap=True)
        raise typer.Exit(files.exit_status(stop))
    before = pageweaver.load("union8").work(problem)
    after = pageweaver.load(f"offline_w{window.value}", ids=ids).work(problem)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("order")
    for heading in ("visits", "reuse", "rounds"):
        table.add_column(heading, justify="right")
    edges = before.reuse * before.visits
    rows = [("original (union8)", before.visits, before.rounds)]
    if seconds > 0:
        rows.append(("greedy", ids.greedy_visits, ids.greedy_rounds))
    rows.append((f"searched, window {window.value}", after.visits, after.rounds))
    for name, visits, rounds in rows:
        table.add_row(name, f"{visits:,}", f"{edges / visits:.2f}" if visits else "-", f"{rounds:,}")
    visits, rounds = running.bounds()
    table.add_row("lower bound", f"{visits:,}", "-", f"{rounds:,}")
    if before.visits:
        change = [f"{getattr(after, x) / getattr(before, x) - 1:+.1%}" for x in ("visits", "reuse", "rounds")]
        table.add_row("change", *change, style="dim")
    console.print(Text(chosen.name, style="bold"))
    console.print(table)
    say(console, f"Wrote {output} after {took:.2f} s of search for {objective.value}.")


@app.command()
@reporting_errors()
def capture(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A transformers folder, a .gguf file, or a Hugging Face name."),
    ],
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="UTF-8 text file.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Selection file to write (.safetensors).")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text to read.")] = 4096,
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Leading tokens whose own selections are not kept.")
    ] = 0,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 128,
    topk: Annotated[int, typer.Option(min=1, help="Pages a query selects.")] = 16,
    layers: Annotated[
        str | None, typer.Option(metavar="0,4,10-12", help="Default: all that see the whole context.")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens a prefill step.")] = 512,
    rope_base_factor: Annotated[
        float, typer.Option(help="Factor on the rotary base, for texts longer than the model was trained on.")
    ] = 1.0,
    device: Annotated[str, typer.Option(help="Where the model runs, as torch names it.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Capture the page selections of a Hugging Face model reading a text.

    Needs pip install '.\\[capture]' in the repository. The selections are those of an exact block indexer
    (maximum of q.k in a page, the query's own page forced); the model itself runs on full attention.
    """
    from pageweaver.common.capture_model import capture_model
    from pageweaver.eval import output as files

    console = Console()
    files.check_file(output, reads=[text])
    wanted = None if layers is None else _numbers("layers", layers)
    try:
        with _short_warnings(), progress_bar(console) as report:
            report(0.0, "loading the model")
            captured = capture_model(
                model,
                text,
                output,
                max_tokens=max_tokens,
                prefix_tokens=prefix_tokens,
                page_size=page_size,
                topk=topk,
                layers=wanted,
                chunk_tokens=chunk_tokens,
                rope_base_factor=rope_base_factor,
                device=device,
                dtype=dtype,
                progress=lambda done, total: report(done / total, f"{done:,} of {total:,} tokens"),
            )
    except RuntimeError as error:
        # A model that does not fit what can be captured, or a device that torch does not have.
        raise ValueError(str(error)) from error
    rows, columns = captured[0].total_q, captured[0].topk
    say(console, f"Wrote {output}: {counted(len(captured), 'selection')} of {rows:,} queries x Top{columns}.")
    say(console, f"Next: pageweaver survey {output}")


def _numbers(argument: str, text: str) -> list[int]:
    """Read ``0,4,10-12``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{argument}: got {text!r}, supported: numbers and ranges, such as 0,4,10-12")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Show a warning as one line for users, without the source line that raised it."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        Console(stderr=True).print(Text(f"Warning: {message}", style="yellow"), soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@app.command()
@reporting_errors()
def report(
    rows: Annotated[
        list[Path], typer.Argument(metavar="ROWS", help="Files of bench commands and of survey (JSON lines).")
    ],
    readme: Annotated[
        bool,
        flag("--readme", help="Print the README's tables of bench operator files instead."),
    ] = False,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", help="Columns of the first of them. Default: all that the first file timed."
        ),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Gets report.html and its plots.")] = Path(
        "results/report"
    ),
) -> None:
    """Make one page of tables and plots from measured rows, the paper's figures beside ours."""
    from pageweaver.eval import output as files
    from pageweaver.eval.readme import arithmetic_table, measured_table
    from pageweaver.eval.report import make_page
    from pageweaver.eval.runs import read_runs

    console = Console()
    if not readme:
        if strategies is not None:
            raise ValueError(f"strategies: got {strategies!r} without --readme, supported: with it")
        files.check_folder(output, "report.html")
    runs = read_runs(rows)
    if readme:
        first = next((run for run in runs if run.bench == "operator"), None)
        if first is None:
            raise ValueError("rows: got no file of bench operator, supported with --readme: one")
        if partial := next((run.file for run in runs if run.is_partial), None):
            raise ValueError(f"rows: got {partial}, supported with --readme: rows of whole runs")
        columns = None if strategies is None else [x.strip() for x in strategies.split(",") if x.strip()]
        say(console, f"{measured_table(first.rows, columns)}\n\n{arithmetic_table(runs)}")
        return
    page = make_page(runs)
    # Which plots there are is known now: none is written where one of them cannot be.
    files.check_folder(output, "report.html", *page.plots)
    files.write_files(output, {"report.html": page.html.encode(), **page.plots})
    say(console, f"Wrote {output / 'report.html'} and {counted(len(page.plots), 'plot')}.")


@app.command()
@reporting_errors()
def doctor() -> None:
    """Say what is installed, what runs here, what is missing and how to get it."""
    from pageweaver.eval import doctor as examining

    findings = examining.examine()
    examining.print_findings(Console(), findings)
    if not examining.usable(findings):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="pageweaver")


if __name__ == "__main__":
    main()
