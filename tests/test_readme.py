"""What the README says is run: its code, its commands, and its figures against the committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageweaver.__main__ import app
from pageweaver.eval.report import measured_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^pageweaver ((?:bench )?\w+)", README, flags=re.MULTILINE)
ROWS = ROOT / "results" / "h200" / "operator.jsonl"


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


def test_figures_are_the_rows() -> None:
    """The measured table is what `pageweaver report --readme` prints from the committed rows."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    measured = README[README.index("## Measured") : README.index("## Limits")]
    table = [line for line in measured.splitlines() if line.startswith("|")]
    arms = [re.sub(r"[`]", "", cell.strip()) for cell in table[0].strip("|").split("|")[2:]]
    assert "\n".join(table) == measured_table(rows, arms)
