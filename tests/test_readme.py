"""What the README says is run: its code, its commands, and its figures against the committed rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageweaver.__main__ import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^pageweaver ((?:bench )?\w+)", README, flags=re.MULTILINE)
ROWS = ROOT / "results" / "h200" / "union.jsonl"


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
    """Each cell of the measured table is the median of a committed row, to the digits it shows."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    medians = {(row["case"], row["arm"]): row["median_ms"] for row in rows if row["boundary"] == "complete"}
    table = README[README.index("## Measured") : README.index("## Limits")]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line
    ]
    arms = [re.sub(r"[`]", "", cell) for cell in lines[0][2:]]
    cells = 0
    for line in lines[2:]:
        for arm, cell in zip(arms, line[2:], strict=True):
            assert cell == f"{medians[line[0].strip('`'), arm]:.3f}", (line[0], arm)
            cells += 1
    assert cells == len(arms) * len(lines[2:]) > 0
