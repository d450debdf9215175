"""Counts of the work a strategy does for a selection (Eq. 3 and 4)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WorkReport:
    """What one call costs in units that do not depend on a machine.

    Attributes
    ----------
    strategy : str
        Name of the strategy.
    edges : int
        Selected (query, page) pairs of all KV heads, duplicates and invisible pages left out.
    groups : int
        Execution groups with at least one visible page; work units for page_union.
    visits : int
        V of Eq. 3: pages traversed, summed over groups.
    reuse : float
        Eq. 3: ``edges / visits``; 0 when nothing is selected.
    rounds : int
        R of Eq. 4: (64-row tile, page) pairs with at least one member; the matrix work.
    mean_union, max_union : float, int
        Pages a group traverses.
    partials : int
        Partial outputs written before a combine; 0 for strategies that own their queries.
    saved_partials : int
        Partials that pairing pages avoided.
    workspace_bytes : int
        Bytes of the workspace for the call's shapes.
    page_bytes : int
        K and V bytes loaded through L2: a page once a visit where a group shares it (page_union, mapping
        "cluster"), else once a round.
    partial_bytes : int
        Partial output and LSE bytes, written and read.
    """

    strategy: str
    edges: int
    groups: int
    visits: int
    reuse: float
    rounds: int
    mean_union: float
    max_union: int
    partials: int
    saved_partials: int
    workspace_bytes: int
    page_bytes: int
    partial_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes of pages and partials together."""
        return self.page_bytes + self.partial_bytes

    def to_dict(self) -> dict[str, Any]:
        """All counts, JSON-ready."""
        return asdict(self)
