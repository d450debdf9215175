"""A self-contained HTML page: its headings, notes, tables and plots."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pageweaver.eval.operator import NOT_RUN
from pageweaver.eval.output import png
from pageweaver.eval.runs import Row, Run

SHOWN_LINES = 40  # a longer table is folded
WIDE = 12  # columns that fit a wide window
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto;
  padding: 1.5rem; max-width: 72rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; border-top: 1px solid #ccc; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
/* Where columns lie further right a shadow stands at that edge; a cover at the end of the table hides it. */
.scroll { overflow-x: auto; margin: .75rem 0; background:
  linear-gradient(to left, #fff 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, rgb(0 80 140 / .45), transparent) right / 1.75rem 100% no-repeat scroll; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #e3e3e3; vertical-align: bottom; }
th { font-weight: 600; border-bottom-color: #888; }
.t { text-align: left; }
.k0, .k1 { position: sticky; left: 0; background: #fff; z-index: 1; }
.two .k0 { box-sizing: border-box; min-width: 13rem; max-width: 13rem; overflow-wrap: anywhere; }
.two .k1 { left: 13rem; }
summary { cursor: pointer; color: #0072B2; font-size: .85rem; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: .85rem; max-width: 60rem; }
"""


@dataclass
class Page:
    """What the report consists of.

    Attributes
    ----------
    html : str
        One self-contained page.
    plots : dict
        File name -> PNG bytes: the page's plots, for use elsewhere.
    """

    html: str
    plots: dict[str, bytes] = field(default_factory=dict)


def html_document(sections: Sequence[tuple[str, str]]) -> str:
    links = " ".join(f'<a href="#s{i}">{escape(title)}</a>' for i, (title, _) in enumerate(sections))
    bodies = "".join(
        f'<section id="s{i}"><h2>{escape(title)}</h2>{body}</section>'
        for i, (title, body) in enumerate(sections)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>PageWeaver, measured</title><style>{STYLE}</style></head><body>"
        f"<h1>PageWeaver, measured</h1><nav>{links}</nav>{bodies}</body></html>\n"
    )


def html_heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def html_note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def html_table(headings: Sequence[str], lines: Sequence[Sequence[str]], text: int = 1, kept: int = 1) -> str:
    """A table; its first `text` columns hold words, its first `kept` (1 or 2) stay when it is scrolled."""

    def row(cells: Sequence[str], tag: str) -> str:
        names = [
            " ".join(("t",) * (index < text) + (f"k{index}",) * (index < kept)) for index in range(len(cells))
        ]
        marks = [f' class="{name}"' if name else "" for name in names]
        return (
            "<tr>"
            + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=True))
            + "</tr>"
        )

    body = "".join(row(line, "td") for line in lines)
    opened = '<table class="two">' if kept == 2 else "<table>"
    table = (
        f'<div class="scroll">{opened}<thead>{row(headings, "th")}</thead><tbody>{body}</tbody></table></div>'
    )
    if len(headings) > WIDE:
        table = html_note(f"{len(headings)} columns: scroll to the right for more.") + table
    if len(lines) <= SHOWN_LINES:
        return table
    return f"<details><summary>{len(lines)} lines</summary>{table}</details>"


def html_plot(page: Page, run: Run, name: str, figure: Any, caption: str) -> str:
    data = png(figure, f"{run.file}, SHA-256 {run.sha256}")
    page.plots[f"{run.name}-{name}.png"] = data
    source = base64.b64encode(data).decode()
    text = escape(caption)
    image = f'<img alt="{text}" src="data:image/png;base64,{source}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def html_not_run(rows: Sequence[Row]) -> str:
    """Arms that were asked for and could not run, each once for a reason."""
    reasons = {(row["arm"], row["reason"]) for row in rows if row.get("boundary") == NOT_RUN}
    return "".join(html_note(f"{arm} was not run: {reason}") for arm, reason in sorted(reasons))
