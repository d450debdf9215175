"""Page reuse per layer and KV head over capture files, as the paper's eight-source survey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pageweaver.common.captures import parse_capture_name, resolve_selection
from pageweaver.common.problem import selection_support
from pageweaver.common.selection import Selection
from pageweaver.eval.output import BLUE, GREY, ORANGE, Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Heads that fit beside each other in 80 columns; with more, a layer's row holds its quartiles.
MAX_HEAD_COLUMNS = 9
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
QUARTILE_NAMES = ("min", "25%", "median", "75%", "max")
PLOTTED_SOURCES = 12
MAX_NAMED_TICKS = 8


@dataclass(frozen=True)
class Observation:
    """Reuse of one layer and KV head.

    Attributes
    ----------
    source : str
        The text that the model read; the file's stem where a selection does not say.
    selection, sha256 : str
        Name and hash of the selection.
    layer, kv_head : int or None
        None where the selection is of no model layer.
    group : int
        Consecutive queries that share a union.
    edges, visits, groups : int
        Eq. 3: selected (query, page) pairs, pages traversed, groups with at least one page.
    reuse : float
        Eq. 3: ``edges / visits``; 0 when nothing is selected.
    """

    source: str
    selection: str
    sha256: str
    layer: int | None
    kv_head: int | None
    group: int
    edges: int
    visits: int
    groups: int
    reuse: float


def union_counts(
    support: NDArray[np.int64], boundaries: Sequence[int], group: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Count edges, visits and groups of Eq. 3 for queries in their original order.

    Parameters
    ----------
    support : numpy.ndarray
        int64 ``[num_kv_heads, total_q, topk]``; `canonical_support`, -1 is nothing.
    boundaries : sequence of int
        ``cu_seqlens_q``; no group crosses a request.
    group : int
        Queries a group.

    Returns
    -------
    edges, visits, groups : numpy.ndarray
        int64 ``[num_kv_heads]``.
    """
    heads, _, topk = support.shape
    edges, visits, groups = (np.zeros(heads, dtype=np.int64) for _ in range(3))
    for first, last in pairwise(boundaries):
        if first == last:
            continue
        rows = support[:, first:last]
        padding = -(last - first) % group
        rows = np.pad(rows, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
        pages = np.sort(rows.reshape(heads, -1, group * topk), axis=2)
        new = pages >= 0
        edges += new.sum(axis=(1, 2))
        groups += new[:, :, -1].sum(axis=1)
        new[:, :, 1:] &= pages[:, :, 1:] != pages[:, :, :-1]
        visits += new.sum(axis=(1, 2))
    return edges, visits, groups


def observe(selection: Selection, source: str, group: int = 8) -> list[Observation]:
    """Measure one selection, an observation a KV head.

    Raises
    ------
    ValueError
        `group` is less than 1.
    """
    if group < 1:
        raise ValueError(f"group: got {group}, supported: at least 1 query")
    support = selection_support(selection).numpy()
    edges, visits, groups = union_counts(support, selection.cu_seqlens_q.tolist(), group)
    known = _known(selection)
    heads = range(selection.num_kv_heads)
    return [
        Observation(
            source=source,
            selection=selection.name,
            sha256=selection.sha256,
            layer=known.get("layer"),
            kv_head=known.get("kv_head") if len(heads) == 1 else head,
            group=group,
            edges=int(edges[head]),
            visits=int(visits[head]),
            groups=int(groups[head]),
            reuse=float(edges[head] / visits[head]) if visits[head] else 0.0,
        )
        for head in heads
    ]


def _known(selection: Selection) -> dict[str, Any]:
    """Text, layer and KV head of a selection: from its metadata, else from its name, else nothing."""
    if "layer" in selection.metadata:
        return dict(selection.metadata)
    try:
        return parse_capture_name(selection.name)
    except ValueError:
        return dict(selection.metadata)


def survey(files: Sequence[str], group: int = 8, progress: Report | None = None) -> list[Observation]:
    """Measure every selection of some files.

    Parameters
    ----------
    files : sequence of str
        Words for `resolve_selection`.
    group : int
        Consecutive queries that share a union.
    progress : callable, optional
        ``progress(fraction, text)``.

    Returns
    -------
    list of Observation
        By source in the order of the files, then by layer and head. A text that several files hold is one
        source for each of them.
    """
    found = [(word, selection) for word in dict.fromkeys(files) for selection in resolve_selection(word)]
    stems = {word: "synthetic" if word.startswith("synthetic:") else Path(word).stem for word in files}
    texts = [(word, str(_known(s).get("text_id", stems[word]))) for word, s in found]
    words_of = {text: {word for word, other in texts if other == text} for _, text in texts}
    observations: list[Observation] = []
    for index, ((word, selection), (_, text)) in enumerate(zip(found, texts, strict=True)):
        if progress is not None:
            progress(index / len(found), selection.name)
        shared = len(words_of[text]) > 1 and stems[word] != text
        observations += observe(selection, f"{text} ({stems[word]})" if shared else text, group)
    order = list(dict.fromkeys(o.source for o in observations))
    return sorted(
        observations, key=lambda o: (order.index(o.source), _place(o.layer), _place(o.kv_head), o.selection)
    )


def _place(value: int | None) -> int:
    return -1 if value is None else value


def by_source(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    """Observations of each source, in order."""
    sources: dict[str, list[Observation]] = {}
    for observation in observations:
        sources.setdefault(observation.source, []).append(observation)
    return sources


def quartiles(observations: Sequence[Observation]) -> list[float]:
    """Minimum, quartiles and maximum of reuse, interpolated linearly."""
    return [float(q) for q in np.quantile([o.reuse for o in observations], QUARTILES)]


def json_rows(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """JSON-ready: a summary row a source (``kind`` "source"), then an "observation" row for each."""
    summaries = [
        {
            "kind": "source",
            "source": source,
            "group": found[0].group,
            "observations": len(found),
            **dict(zip(("min", "q25", "median", "q75", "max"), quartiles(found), strict=True)),
        }
        for source, found in by_source(observations).items()
    ]
    return summaries + [{"kind": "observation", **asdict(o)} for o in observations]


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def print_survey(console: Console, observations: Sequence[Observation]) -> None:
    """Print quartiles of all sources, then a table of layers and heads for each."""
    sources = by_source(observations)
    summary = _table()
    summary.add_column("source", overflow="fold")
    for heading in ("heads", *QUARTILE_NAMES):
        summary.add_column(heading, justify="right", no_wrap=True)
    for source, found in sources.items():
        summary.add_row(source, str(len(found)), *(f"{q:.2f}" for q in quartiles(found)))
    heading = f"Reuse (edges per visit, Eq. 3) of groups of {observations[0].group} queries"
    console.print(Text(heading, style="bold"))
    console.print(summary)
    for source, found in sources.items():
        console.print()
        console.print(Text(source, style="bold"))
        console.print(_layer_table(found))
    console.print()
    least, most = (pick(observations, key=lambda o: o.reuse) for pick in (min, max))
    note = "A reuse of 1 means that neighbours share no page; the group's size, that they share all."
    if len(observations) > 1:
        note += f" Least: {least.selection} ({least.reuse:.2f}); most: {most.selection} ({most.reuse:.2f})."
    console.print(Text(note))


def _layer_table(found: Sequence[Observation]) -> Table:
    """Layers down and heads across; by name where there is no layer; quartiles where heads are many."""
    table = _table()
    cells = {(o.layer, o.kv_head): o for o in found}
    if any(o.layer is None for o in found) or len(cells) < len(found):
        table.add_column("selection", overflow="fold")
        for heading in ("head", "reuse", "visits"):
            table.add_column(heading, justify="right", no_wrap=True)
        for o in found:
            place = "-" if o.kv_head is None else str(o.kv_head)
            table.add_row(o.selection, place, f"{o.reuse:.2f}", f"{o.visits:,}")
        return table
    layers = sorted({_place(o.layer) for o in found})
    heads = sorted({_place(o.kv_head) for o in found})
    table.add_column("layer", justify="right", no_wrap=True)
    if len(heads) > MAX_HEAD_COLUMNS:
        for heading in ("heads", *QUARTILE_NAMES):
            table.add_column(heading, justify="right", no_wrap=True)
        for layer in layers:
            own = [o for o in found if o.layer == layer]
            table.add_row(str(layer), str(len(own)), *(f"{q:.2f}" for q in quartiles(own)))
        return table
    for head in heads:
        table.add_column(f"head {head}", justify="right", no_wrap=True)
    for layer in layers:
        row = [cells.get((layer, head)) for head in heads]
        table.add_row(str(layer), *("-" if o is None else f"{o.reuse:.2f}" for o in row))
    return table


def survey_figure(observations: Sequence[Observation]) -> Figure:
    """Reuse over layers, a point a head, one panel a source (the first `PLOTTED_SOURCES`)."""
    from matplotlib.figure import Figure

    sources = by_source(observations)
    shown = list(sources.items())[:PLOTTED_SOURCES]
    columns = min(len(shown), 3)
    lines = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(1.5 + 4.6 * columns, 3.4 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for index, (panel, (source, found)) in enumerate(zip(panels, shown, strict=False)):
        layered = all(o.layer is not None for o in found)
        x = [_place(o.layer) for o in found] if layered else list(range(len(found)))
        low, q25, median, q75, high = quartiles(found)
        panel.axhspan(q25, q75, color=BLUE, alpha=0.12, linewidth=0, label="middle half")
        panel.axhline(median, color=ORANGE, linewidth=1.8, label="median")
        panel.scatter(
            x,
            [o.reuse for o in found],
            s=22,
            color=BLUE,
            edgecolor="white",
            linewidth=0.5,
            zorder=3,
            label="one KV head",
        )
        panel.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
        panel.set_title(f"{source}: median {median:.2f} ({low:.2f} to {high:.2f})", fontsize=10)
        if layered:
            panel.set_xlabel("layer")
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.set_xlim(min(x) - 1, max(x) + 1)
        else:
            panel.set_xlim(-0.5, len(found) - 0.5)
            if len(found) <= MAX_NAMED_TICKS:
                panel.set_xticks(x, [o.selection for o in found], rotation=20, ha="right", fontsize=8)
            else:
                panel.set_xticks([])
                panel.set_xlabel("selections, in the order of the table")
        if index % columns == 0:
            panel.set_ylabel(f"reuse, groups of {found[0].group}")
        panel.grid(axis="y", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    panels[0].set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    title = "Reuse over layers"
    if len(sources) > len(shown):
        title += f" (first {len(shown)} of {len(sources)} sources)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
