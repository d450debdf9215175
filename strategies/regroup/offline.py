"""offline_w512 and offline_w2048: run ids that were searched ahead in larger windows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pageweaver.common.captures import Selection, atomic_write_bytes
from pageweaver.common.problem import GROUP_SIZES, TILE_ROWS, AttentionProblem, canonical_support
from pageweaver.common.strategy import REFERENCE_CAPABILITIES, Capabilities, register
from pageweaver.strategies.query_union import QueryUnion
from pageweaver.strategies.query_union.unions import check_query_ids
from pageweaver.strategies.regroup.online import greedy_query_ids

FORMAT = "pageweaver-query-ids 1"
TILES_PER_GROUP = 2
OBJECTIVES = ("visits", "rounds")


@dataclass(frozen=True, eq=False)
class OfflineIds:
    """Query ids bound to the selection that they were searched for.

    Attributes
    ----------
    query_ids : numpy.ndarray
        int32 ``[num_kv_heads, total_q]``; slot to query.
    selection_sha256 : str
        `Selection.sha256` of that selection; no other is executed with these ids.
    window, queries_per_group : int
        Queries a search window and a group.
    objective : str
        "visits" or "rounds".
    """

    query_ids: NDArray[np.int32]
    selection_sha256: str
    window: int
    queries_per_group: int
    objective: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file with a JSON header, whole or not at all."""
        header = {
            "format": FORMAT,
            "selection_sha256": self.selection_sha256,
            "window": self.window,
            "queries_per_group": self.queries_per_group,
            "objective": self.objective,
        }
        data = save({"query_ids": np.ascontiguousarray(self.query_ids)}, {"pageweaver": json.dumps(header)})
        atomic_write_bytes(path, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> OfflineIds:
        """Read a file of `save`.

        Raises
        ------
        ValueError
            The file is not one of these.
        """
        try:
            with safe_open(os.fspath(path), framework="numpy") as stream:
                header = json.loads((stream.metadata() or {}).get("pageweaver", "{}"))
                if header.pop("format", None) != FORMAT:
                    raise ValueError("another format")
                return cls(query_ids=stream.get_tensor("query_ids"), **header)
        except (SafetensorError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"path: got {os.fspath(path)!r}, supported: safetensors files of format {FORMAT!r} ({error})"
            ) from error


def search(
    selection: Selection,
    *,
    window: int = 2048,
    objective: str = "visits",
    group_size: int = 16,
    progress: Callable[[float], None] | None = None,
) -> OfflineIds:
    """Search query ids for a selection by the greedy of Eq. 6 in large windows.

    Parameters
    ----------
    selection : Selection
        ``q2k_indices`` int32 ``[num_kv_heads, total_q, topk]`` with its boundaries.
    window : int
        Queries a search window (the paper: 512 and 2048).
    objective : {"visits", "rounds"}
        What the greedy minimises.
    group_size : int
        Query heads a KV head; groups hold 128 / group_size queries.
    progress : callable, optional
        Called with the fraction done, from 0 to 1, after each KV head.

    Returns
    -------
    OfflineIds

    Raises
    ------
    ValueError
        `window`, `objective` or `group_size` is not supported.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window: got {window!r}, supported: a positive integer")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: got {objective!r}, supported: {OBJECTIVES}")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size: got {group_size!r}, supported: {GROUP_SIZES}")
    lengths = selection.seqused_k
    max_pages = -(-int(lengths.max()) // selection.page_size) if len(lengths) else 0
    support = canonical_support(
        torch.from_numpy(selection.q2k_indices.copy()),
        torch.from_numpy(selection.positions.copy()),
        selection.page_size,
        max_pages,
    )
    tile = TILE_ROWS // group_size
    parts = []
    for head in range(selection.num_kv_heads):
        parts.append(
            greedy_query_ids(
                support[head : head + 1],
                selection.cu_seqlens_q.tolist(),
                window=window,
                queries_per_group=TILES_PER_GROUP * tile,
                queries_per_tile=tile,
                objective=objective,
            )
        )
        if progress is not None:
            progress((head + 1) / selection.num_kv_heads)
    return OfflineIds(
        query_ids=torch.cat(parts).numpy(),
        selection_sha256=selection.sha256,
        window=window,
        queries_per_group=TILES_PER_GROUP * tile,
        objective=objective,
    )


def problem_sha256(problem: AttentionProblem) -> str:
    """`Selection.sha256` of a problem's selection; copies it to the host, so it synchronises."""
    return Selection(
        name="problem",
        q2k_indices=problem.q2k_indices.cpu().numpy(),
        cu_seqlens_q=problem.cu_seqlens_q.cpu().numpy(),
        seqused_k=problem.seqused_k.cpu().numpy(),
        page_size=problem.page_size,
    ).sha256


class OfflineRegroup(QueryUnion):
    """union8 over ids from `search`.

    Parameters
    ----------
    ids : OfflineIds
        Searched for the selection that will be executed, with this strategy's window.
    **options
        See `Strategy`.

    Raises
    ------
    TypeError
        `ids` is missing or of another type.
    ValueError
        `ids` were searched in another window; or, when a problem is prepared, for another selection or
        group size, or are no bijection inside its requests.
    """

    tiles_per_group = TILES_PER_GROUP
    capabilities: ClassVar[dict[str, Capabilities]] = {"reference": REFERENCE_CAPABILITIES}
    window: ClassVar[int]

    def __init__(self, *, ids: OfflineIds | None = None, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(ids, OfflineIds):
            raise TypeError(
                f"ids: got {type(ids).__name__},"
                f" supported: OfflineIds from pageweaver.search(selection, window={self.window})"
            )
        if ids.window != self.window:
            raise ValueError(f"ids.window: got {ids.window}, supported by {self.name}: {self.window}")
        self.ids = ids

    def order(self, problem: AttentionProblem) -> torch.Tensor:
        """The searched ids, after checking that they belong to this selection and order its queries."""
        found = problem_sha256(problem)
        if found != self.ids.selection_sha256:
            raise ValueError(
                f"ids.selection_sha256: got {self.ids.selection_sha256},"
                f" supported: {found}, the problem's selection"
            )
        if self.ids.queries_per_group != self.queries_per_group(problem):
            raise ValueError(
                f"ids.queries_per_group: got {self.ids.queries_per_group},"
                f" supported: {self.queries_per_group(problem)} at group size {problem.group_size}"
            )
        return check_query_ids(problem, torch.from_numpy(self.ids.query_ids.copy()).to(problem.device))


@register
class OfflineW512(OfflineRegroup):
    """Windows of 512 queries."""

    name = "offline_w512"
    window = 512


@register
class OfflineW2048(OfflineRegroup):
    """Windows of 2,048 queries."""

    name = "offline_w2048"
    window = 2048
