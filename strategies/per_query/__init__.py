"""per_query: every query alone over its own pages, the design that unions are measured against."""

from __future__ import annotations

from pageweaver.common.problem import AttentionProblem
from pageweaver.common.strategy import register
from pageweaver.strategies.query_union import QueryUnion

__all__ = ["PerQuery"]


@register
class PerQuery(QueryUnion):
    """A union of one: no page is shared, and every selected page is one visit and one round."""

    name = "per_query"
    tiles_per_group = 1

    def queries_per_group(self, problem: AttentionProblem) -> int:
        """One."""
        return 1
