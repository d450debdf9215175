"""The execution strategies; importing this package registers them all."""

from pageweaver.strategies import page_union, per_query, query_union, regroup

__all__ = ["page_union", "per_query", "query_union", "regroup"]
