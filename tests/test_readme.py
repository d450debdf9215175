"""What the README says is run: its code, its commands, and its figures against the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from pageweaver.__main__ import app
from pageweaver.eval.readme import arithmetic_table, measured_table
from pageweaver.eval.report import make_page
from pageweaver.eval.runs import DIGITS, read_run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^pageweaver ((?:bench )?\w+)", README, flags=re.MULTILINE)
ROWS = ROOT / "results" / "h200"


def test_code_runs() -> None:
    """The blocks run in order, as one reader would; they hold their own assertion."""
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_exist(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output


def tables() -> list[list[str]]:
    """Lines of each table."""
    return [
        [line for line in block.splitlines() if line.startswith("|")]
        for block in re.findall(r"(?:^\|.*\n)+", README, flags=re.MULTILINE)
    ]


def test_figures_are_the_rows() -> None:
    """The measured tables are what `pageweaver report --readme` prints from the committed rows."""
    runs = [read_run(ROWS / f"{name}.jsonl") for name in ("operator", "split", "bf16")]
    (measured,) = [table for table in tables() if table[0].startswith("| selection |")]
    arms = [re.sub(r"[`]", "", cell.strip()) for cell in measured[0].strip("|").split("|")[2:]]
    assert "\n".join(measured) == measured_table(runs[0].rows, arms)
    (arithmetics,) = [table for table in tables() if table[0].startswith("| `arithmetic` |")]
    assert "\n".join(arithmetics) == arithmetic_table(runs)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert any(target.endswith(".png") for target in targets)
    for target in targets:
        assert (ROOT / target).exists(), target


def test_the_plot_is_of_the_rows() -> None:
    """It names the hash of the rows that it shows, and is one that the report makes."""
    (target,) = re.findall(r"!\[[^]]+\]\(([^)]+\.png)\)", README)
    plot, run = ROOT / target, read_run(ROWS / "operator.jsonl")
    with Image.open(plot) as image:
        assert image.text["Source"] == f"operator.jsonl, SHA-256 {run.sha256}"  # type: ignore[attr-defined]
    assert plot.name in make_page([run]).plots


def test_the_page_is_of_the_rows() -> None:
    page = (ROWS / "report" / "report.html").read_text()
    for path in ROWS.glob("*.jsonl"):
        assert f"{read_run(path).sha256[:DIGITS]}" in page, path.name
    # No plot is left from earlier rows.
    for path in (ROWS / "report").glob("*.png"):
        with Image.open(path) as image:
            name, _, digest = image.text["Source"].partition(", SHA-256 ")  # type: ignore[attr-defined]
        assert digest == read_run(ROWS / name).sha256, path.name
