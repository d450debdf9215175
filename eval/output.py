"""What the commands share: consoles, errors, progress, provenance, and files that are whole or not there."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from pageweaver.common.captures import atomic_write_bytes
from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.selection import Selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with every common colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#595959"

SCHEMA_VERSION = "1"  # of rows that bench commands write: the end of their schema
RESULTS = Path("results")  # where outputs go by default: made where it is missing, as no other folder is
DEFAULT_CAPTURES = Path("captures") / "smollm2_64k.safetensors"

MAX_SEED = 2**32 - 1
SELECTION_HELP = "FILE.safetensors, FILE.safetensors:NAME, or synthetic:low|mid|high|interleaved."
EXPECTED_ERRORS = (
    FileNotFoundError,
    ImportError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
    UnsupportedDeviceError,
    torch.OutOfMemoryError,
)

# Signals that ask a process to end.
ENDING = ("SIGINT", "SIGTERM", "SIGHUP")

# Called with the fraction done, from 0 to 1, and what comes next in words.
Report = Callable[[float, str], None]


class CheckFailed(ValueError):
    """An arm computes something wrong: no report may follow."""


class Console(RichConsole):
    """Falls silent when its reader leaves (`| head`), so that the work ends and its files are written.

    Strings are printed as they are: names of selections may look like rich's markup.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, **settings)

    def on_broken_pipe(self) -> None:
        """Send what follows, and what Python flushes at exit, nowhere."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def flag(name: str, **settings: Any) -> Any:
    """An option that takes no value: help shows its name alone."""
    return typer.Option(name, metavar="", **settings)


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end; as with Ctrl-C, finished rows are kept."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_status(stop: KeyboardInterrupt) -> int:
    """Of a process that a signal ended."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


@contextmanager
def _stopping() -> Iterator[None]:
    """Raise `Stopped` where a time limit or a closed terminal would end the process at once."""
    asked = [s for name in ENDING[1:] if (s := getattr(signal, name, None)) is not None]
    # One that is ignored (nohup) stays so; handlers are for the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        asked = []
    before = {s: signal.getsignal(s) for s in asked if signal.getsignal(s) == signal.SIG_DFL}

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn errors that the caller can mend, red checks and Ctrl-C into one line and an exit code.

    SIGTERM and SIGHUP are taken as Ctrl-C is; their exit codes are 128 and their number.
    """
    errors = Console(stderr=True)
    try:
        with _stopping():
            yield
    except KeyboardInterrupt as stop:
        errors.print("Interrupted; no file was left half-written.", style="yellow")
        raise typer.Exit(exit_status(stop)) from None
    except EXPECTED_ERRORS as error:
        text = " ".join(str(error).split()) or type(error).__name__
        errors.print(Text(f"Error: {text}", style="bold red"), soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, CheckFailed) else 2) from None


@contextmanager
def naming_red(red: Sequence[str]) -> Iterator[None]:
    """Raise `CheckFailed` with what the body adds to `red`, also where an error or Ctrl-C ends it.

    What failed until then is worth more than why the rest was not run.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if not red:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        cause = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped by {text}"
        raise CheckFailed("; ".join([*red, f"then {cause}"])) from error
    if red:
        raise CheckFailed("; ".join(red))


class Screen:
    """Shows results while work goes on; where that fails (a full disk behind stdout), the work comes first.

    Parameters
    ----------
    console : Console
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.error: OSError | None = None

    def show(self, print_: Callable[..., object], *values: Any) -> None:
        """Print with ``print_(console, *values)``, unless that has failed before."""
        if self.error is None:
            try:
                print_(self.console, *values)
            except OSError as error:
                self.error = error

    def close(self) -> None:
        """Raise what showing failed with; called when all is written."""
        if self.error is not None:
            raise self.error


def say(console: RichConsole, text: str) -> None:
    """Print a line as it is: no markup, and no breaks inside paths."""
    console.print(Text(text), soft_wrap=True)


@contextmanager
def progress_bar(console: RichConsole) -> Iterator[Report]:
    """Show a progress bar while the body runs; it vanishes at the end.

    Parameters
    ----------
    console : Console
        Where the body prints. The bar shares it, so that lines printed meanwhile appear above the bar; when
        it is no terminal (a pipe, a file) the bar goes to stderr, or nowhere.

    Yields
    ------
    callable
        ``report(fraction, text)``.
    """
    where = console if console.is_terminal else RichConsole(stderr=True)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=where,
        transient=True,
        disable=not where.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=1.0)

        def report(fraction: float, text: str) -> None:
            bar.update(task, completed=fraction, description=text)

        yield report


def part_of(report: Report, index: int, count: int) -> Report:
    """A report for one of `count` equal parts of the work."""
    return lambda fraction, text: report((index + fraction) / count, text)


def repository_root() -> Path | None:
    """The checkout that this package runs from, None for an installed copy."""
    import pageweaver

    root = Path(pageweaver.__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() else None


def default_captures() -> str:
    """The real captures that the repository carries, as a word for `resolve_selection`.

    Raises
    ------
    FileNotFoundError
        Neither the package's checkout nor the current directory holds them.
    """
    for root in (repository_root(), Path.cwd()):
        if root is not None and (root / DEFAULT_CAPTURES).is_file():
            return str(root / DEFAULT_CAPTURES)
    raise FileNotFoundError(
        f"no {DEFAULT_CAPTURES} here: run from a checkout of the repository, or name a selection:"
        " FILE.safetensors, FILE.safetensors:NAME or synthetic:low"
    )


def provenance(device: torch.device) -> dict[str, Any]:
    """What a JSON row says of where it came from: command, device, versions, commit and its state."""
    commit, dirty = _commit()
    return {
        "command": shlex.join(["pageweaver", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": driver_version() if device.type == "cuda" else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "torch": torch.__version__,
        "pageweaver": version("pageweaver"),
        "commit": commit,
        "dirty": dirty,
    }


def driver_version() -> str | None:
    """NVIDIA's driver, as its own tool tells it; None where the tool does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _commit() -> tuple[str | None, bool | None]:
    """Hash of the checkout's commit, and whether tracked files differ from it; None where git cannot tell."""
    root = repository_root()
    if root is None:
        return None, None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    return split_commit(done.stdout.strip()) if done.returncode == 0 else (None, None)


def split_commit(text: str) -> tuple[str, bool]:
    """Take ``HASH`` or ``HASH-dirty`` apart."""
    return text.removesuffix("-dirty"), text.endswith("-dirty")


def check_file(path: Path, made: Path | None = None, reads: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before any work, a file that could not be written; raises as `check_folder` does.

    Its folder exists, or is the one that the caller has `made` when it is missing. It is none of the files,
    or selections of a file, that the command `reads`.
    """
    folder = path.parent
    if not os.path.exists(folder) and folder != made:
        raise ValueError(f"output: got {path}, supported: a file in an existing folder")
    check_folder(folder, path.name)
    for word in filter(None, reads):
        for file in (str(word), str(word).rpartition(":")[0]):
            if path.exists() and os.path.exists(file) and path.samefile(file):
                raise ValueError(f"output: got {path}, which is read, supported: another file")


def check_folder(path: Path, *names: str) -> None:
    """Refuse, before any work, a folder that `write_files` could not write these files to.

    The folder may be new where its parent exists. Files of these names are written in a new folder that is
    then removed, as deep as they would lie.

    Raises
    ------
    ValueError
        `path` or a parent is no folder, its parent does not exist and is not `RESULTS`, or a name is empty or
        that of something else than a file.
    OSError
        A file cannot be created there.
    """
    existing = path.absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise ValueError(f"output: got {path}, supported: a folder ({existing} is a file)")
        if not path.absolute().parent.exists() and path.parent != RESULTS:
            raise ValueError(f"output: got {path}, supported: a folder in an existing folder")
        for name in names:
            target = path / name
            if not name or (target.exists() and not target.is_file()):
                kind = "a folder" if target.is_dir() else "no regular file"
                raise ValueError(f"output: got {target}, supported: a file (this is {kind})")
        with tempfile.TemporaryDirectory(prefix=".pageweaver.", dir=existing) as trial:
            write_files(Path(trial) / path.absolute().relative_to(existing), dict.fromkeys(names, b""))
    except OSError as error:
        raise OSError(
            f"output: got {path}, supported: a folder that can be written"
            f" ({existing}: {error.strerror or error})"
        ) from error


def read_lines(argument: str, path: str | os.PathLike[str]) -> list[str]:
    """Lines of a UTF-8 text file that an argument names.

    Raises
    ------
    ValueError
        It cannot be read, or is no such text; the argument, the path and the reason are named.
    """
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise ValueError(f"{argument}: got {path}, supported: a text file ({reason})") from error


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to a folder, made when missing; each is the old file or the whole new one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        atomic_write_bytes(folder / name, data)


@contextmanager
def keeping(rows: Sequence[Mapping[str, Any]], path: Path) -> Iterator[None]:
    """Write the rows that are finished when an error or Ctrl-C ends the body, and say where they are.

    Parameters
    ----------
    rows : sequence of mapping
        The body adds to it.
    path : Path
        Gets them.
    """
    try:
        yield
    except BaseException:
        errors = Console(stderr=True)
        if rows:
            try:
                with undisturbed():
                    write_files(path.parent, {path.name: json_lines(rows)})
                    say(errors, f"Kept {counted(len(rows), 'finished row')} in {path}.")
            except OSError as error:  # what ended the body is worth more
                say(errors, f"{counted(len(rows), 'finished row')} could not be kept: {error}")
        else:
            name_earlier(errors, path)
        raise


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let what asks the process to end wait for the body. Handlers are for the main thread alone."""
    asked = [s for name in ENDING if (s := getattr(signal, name, None)) is not None]
    if threading.current_thread() is not threading.main_thread():
        asked = []
    came: list[int] = []
    # One that is ignored (nohup) stays so, and one of another language's too.
    before = {s: h for s in asked if (h := signal.getsignal(s)) not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


PARTIAL = ".partial"


def kept_beside(output: Path) -> Path:
    """The file of the rows that were finished when a run ended early; `output` stays as it was."""
    return output.with_name(f"{output.name}{PARTIAL}")


def name_earlier(console: RichConsole, kept: Path) -> None:
    """Say that the rows beside an output are of an earlier run, where there are such."""
    if kept.exists():
        say(console, f"{kept} is of an earlier run that ended early.")


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object a line, UTF-8; a NaN or an infinity, which JSON lacks, is an error."""
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def png(figure: Figure, source: str | None = None) -> bytes:
    """Render a figure made without pyplot, so that no display is asked for; the file names its `source`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text as PlotText

    # Names of selections may look like formulas.
    for text in figure.findobj(PlotText):
        text.set_parse_math(False)
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    # No software version in the file: equal figures stay equal bytes.
    metadata = {"Software": None, **({} if source is None else {"Source": source})}
    with warnings.catch_warnings():
        # Names may have letters that the font lacks.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(buffer, format="png", dpi=144, metadata=metadata)
    return buffer.getvalue()


def distinct(selections: Iterable[Selection]) -> list[Selection]:
    """Selections without repetitions.

    Raises
    ------
    ValueError
        Two that differ have one name, by which rows and tables tell them apart.
    """
    found: dict[str, Selection] = {}
    for selection in selections:
        first = found.setdefault(selection.name, selection)
        if first.sha256 != selection.sha256:
            raise ValueError(f"selections: got two that differ as {selection.name!r}, supported: own names")
    return list(found.values())


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 row``, ``1,234 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def compact(value: float) -> str:
    """A count in four characters or so, for labels in plots: 812, 64.4k, 1.21M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
