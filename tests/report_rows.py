"""Rows of measurements for the tests of reports, and a page's outline as a reader sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "h200"
UNION = RESULTS / "union.jsonl"
COMMITTED = sorted(RESULTS.glob("*.jsonl"))
Row = dict[str, Any]


class Outline(HTMLParser):
    """What a reader sees: text, tables, and where pictures come from."""

    void = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        held = dict(attributes)
        if tag == "img":
            self.sources.append(str(held["src"]))
            assert held["alt"]
        if tag == "a":
            self.links.append(str(held["href"]))
        if tag == "tr":
            self.cells.append([])
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)


def lines(path: Path) -> list[Row]:
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Make a file of rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def header(bench: str) -> Row:
    """What begins every row of a command."""
    return {
        "schema": f"pageweaver-{bench}-1",
        "command": "pageweaver bench <x>",
        "device": "NVIDIA H200",
        "driver": "1.2",
        "cuda": "13.0",
        "torch": "2.11",
        "commit": "0123456789abcdef",
        "dirty": True,
    }


def timed(arm: str, case: str, ms: float, boundary: str = "complete", **more: Any) -> Row:
    """A row of `bench operator`."""
    return {
        **header("operator"),
        "case": case,
        "sha256": "0",
        "total_q": 15272,
        "context": 64424,
        "group_size": 16,
        "num_kv_heads": 1,
        "page_size": 128,
        "kv_dtype": "float8_e4m3fn",
        "arm": arm,
        "arithmetic": "fp8",
        "boundary": boundary,
        "median_ms": ms,
        "samples_ms": [ms, ms],
        "nrms": 0.036,
        "edges": 244352,
        "visits": 102540,
        "rounds": 127705,
        "reuse": 2.38,
        "partials": 0,
        "page_bytes": 1,
        "partial_bytes": 0,
        "protocol": {"rounds": 7, "calls": 20, "inputs": 1, "input_bytes": 1, "l2_bytes": 1},
        "interrupted": False,
        "sm_mhz": [1700, 1755, 1980],
        **more,
    }


def online_rows() -> list[Row]:
    """An operator run with orders of queries."""
    rows: list[Row] = []
    for case, scale in (("synthetic.low", 1.0), ("austen-x.L1.h0", 0.8)):
        for boundary, union8, regroup in (
            ("complete", 0.7, 0.65),
            ("attention", 0.6, 0.5),
            ("prepare", 0.01, 0.03),
        ):
            terms = {"net_us": 50.0 * scale, "increment_us": 12.0 * scale, "grouping_us": 9.0}
            more = terms if boundary == "complete" else {}
            rows.append(timed("union8", case, union8 * scale, boundary))
            rows.append(timed("union4", case, union8 * scale * 1.05, boundary))
            rows.append(timed("regroup_w128", case, regroup * scale, boundary, **more))
    rows.append(
        {**timed("sglang", "synthetic.low", 0.0, "not run"), "median_ms": None, "reason": "no <module>"}
    )
    return rows
