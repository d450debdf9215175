"""regroup_w64 and regroup_w128: regroup queries by page affinity inside a window, on every call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch

from pageweaver.common.problem import AttentionProblem
from pageweaver.common.strategy import REFERENCE_CAPABILITIES, Capabilities, register
from pageweaver.strategies.query_union import QueryUnion
from pageweaver.strategies.regroup.greedy import greedy_order


def greedy_query_ids(
    support: torch.Tensor,
    boundaries: Sequence[int],
    *,
    window: int,
    queries_per_group: int,
    queries_per_tile: int,
    objective: str = "visits",
) -> torch.Tensor:
    """Bounded greedy of Eq. 6 for every request and KV head, on the host.

    Parameters
    ----------
    support : torch.Tensor
        int64 ``[num_kv_heads, total_q, topk]``; `AttentionProblem.support`.
    boundaries : sequence of int
        ``cu_seqlens_q``; windows start anew in each request.
    window : int
        Queries a search window. One smaller than a group is widened to a group.
    queries_per_group, queries_per_tile : int
        Selections after which the union resets, and those that share a 64-row tile.
    objective : {"visits", "rounds"}
        What the greedy minimises.

    Returns
    -------
    torch.Tensor
        int32 ``[num_kv_heads, total_q]`` on the support's device; identity past the last request.
    """
    pages = support.to(torch.int32).cpu().numpy()
    heads, total_q = pages.shape[:2]
    ids = np.tile(np.arange(total_q, dtype=np.int32), (heads, 1))
    for head in range(heads):
        for first, last in pairwise(boundaries):
            if last > first:
                ids[head, first:last] = first + greedy_order(
                    np.ascontiguousarray(pages[head, first:last]),
                    window=max(window, queries_per_group),
                    group=queries_per_group,
                    subgroup=min(queries_per_tile, queries_per_group),
                    objective=objective,
                )
    return torch.from_numpy(ids).to(support.device)


class OnlineRegroup(QueryUnion):
    """union8 over query ids that a greedy search makes on every call."""

    tiles_per_group = 2
    capabilities: ClassVar[dict[str, Capabilities]] = {"reference": REFERENCE_CAPABILITIES}
    window: ClassVar[int]

    def order(self, problem: AttentionProblem) -> torch.Tensor:
        """Slot to query by Eq. 6, int32 ``[num_kv_heads, total_q]``."""
        return greedy_query_ids(
            problem.support,
            problem.cu_seqlens_q.tolist(),
            window=self.window,
            queries_per_group=self.queries_per_group(problem),
            queries_per_tile=problem.queries_per_tile,
        )


@register
class RegroupW64(OnlineRegroup):
    """Windows of 64 queries."""

    name = "regroup_w64"
    window = 64


@register
class RegroupW128(OnlineRegroup):
    """Windows of 128 queries."""

    name = "regroup_w128"
    window = 128
