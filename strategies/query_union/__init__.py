"""union4 and union8: neighbouring queries run together over the union of their pages."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from pageweaver.common.problem import AttentionProblem, tile_queries
from pageweaver.common.strategy import (
    REFERENCE_CAPABILITIES,
    Capabilities,
    Layout,
    Strategy,
    Workspace,
    register,
    shape_key,
    source_key,
)
from pageweaver.common.work import WorkReport
from pageweaver.strategies.query_union.cuda import (
    CUDA_CAPABILITIES,
    MAPPINGS,
    Search,
    check_alignment,
    check_device,
    cuda_layout,
    execute_cuda,
    prepare_cuda,
)
from pageweaver.strategies.query_union.unions import (
    UnionSchedule,
    build_unions,
    check_query_ids,
    execute_reference,
    union_layout,
    union_work,
)

__all__ = ["QueryUnion", "Union4", "Union8", "UnionSchedule"]


class QueryUnion(Strategy):
    """Groups of consecutive execution slots, each traversing the union of its queries' pages.

    Subclasses say how many queries make a group and in which order they run; the execution is one.
    Outputs do not depend on either, bit for bit: no query sees another's pages or softmax state.

    Parameters
    ----------
    mapping : {"independent", "cluster"}
        How the CUDA kernel runs a group of two tiles. "independent", the faster one: each tile
        loads the pages its own queries selected. "cluster", the paper's: two CTAs share the group's
        page stream by multicast. Outputs are the same bit for bit; the reference backend has no such choice.
    **options
        See `Strategy`.

    Raises
    ------
    ValueError
        `mapping` is not one of these, or "cluster" is asked of groups that are not two tiles.
    """

    tiles_per_group: ClassVar[int]
    capabilities: ClassVar[dict[str, Capabilities]] = {
        "cuda": CUDA_CAPABILITIES,
        "reference": REFERENCE_CAPABILITIES,
    }

    def __init__(self, *, mapping: str = "independent", **options: Any) -> None:
        super().__init__(**options)
        supported = MAPPINGS if self.tiles_per_group == 2 else MAPPINGS[:1]
        if not isinstance(mapping, str) or mapping not in supported:
            raise ValueError(f"mapping: got {mapping!r}, supported by {self.name}: {supported}")
        self.mapping = mapping

    def resolve(self, problem: AttentionProblem) -> tuple[str, str]:
        """See `Strategy.resolve`; refuses mapping "cluster" where the CUDA kernel has no such choice."""
        backend, arithmetic = super().resolve(problem)
        if backend == "cuda" and arithmetic == "bf16" and self.mapping not in MAPPINGS[:1]:
            raise ValueError(
                f"mapping: got {self.mapping!r}, supported by {self.name} for {problem.k_cache.dtype}:"
                f" {MAPPINGS[:1]}"
            )
        return backend, arithmetic

    def queries_per_group(self, problem: AttentionProblem) -> int:
        """Slots of a full group: ``tiles_per_group`` tiles of 64 head-rows."""
        return self.tiles_per_group * problem.queries_per_tile

    def queries_per_tile(self, problem: AttentionProblem) -> int:
        """Slots that run together in one tile: fewer than fill it in a small call, see `tile_queries`."""
        if self.mapping != MAPPINGS[0]:
            return problem.queries_per_tile  # a cluster is two tiles
        return tile_queries(problem.num_kv_heads * problem.total_q, problem.group_size)

    def _order(
        self, problem: AttentionProblem, views: dict[str, torch.Tensor], backend: str
    ) -> torch.Tensor | Search | None:
        """Slot to query, int32 ``[num_kv_heads, total_q]``, or how the device finds it; here None, the
        original order."""
        return None

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Query ids, group offsets and union lists; see `UnionSchedule`. On CUDA the packed V too."""
        layout = cuda_layout if self.resolve(problem)[0] == "cuda" else union_layout
        return layout(problem, self.queries_per_group(problem))

    def prepare(
        self,
        problem: AttentionProblem,
        workspace: Workspace | None = None,
        query_ids: torch.Tensor | None = None,
    ) -> UnionSchedule:
        """Build the union lists of a problem.

        Parameters
        ----------
        problem : AttentionProblem
        workspace : Workspace, optional
            See `Strategy.prepare`.
        query_ids : torch.Tensor, optional
            int32 ``[num_kv_heads, total_q]``; run in this order instead of the strategy's own (random,
            fixed or searched ids of an ablation). Checked, which synchronises a CUDA device.

        Returns
        -------
        UnionSchedule
        """
        backend, arithmetic = self.resolve(problem)
        if backend == "cuda":
            check_device(problem)
            for name in ("q", "k_cache", "v_cache"):
                check_alignment(name, getattr(problem, name))
        workspace, views = self._views(problem, workspace)
        order = (
            self._order(problem, views, backend) if query_ids is None else check_query_ids(problem, query_ids)
        )
        group = self.queries_per_group(problem)
        if backend == "cuda":
            prepare_cuda(problem, views, order, self.queries_per_tile(problem))
        else:
            assert not isinstance(order, Search)
            views["query_ids"].copy_(torch.arange(problem.total_q) if order is None else order)
            build_unions(problem, views, group)
        names = ("query_ids", "group_offsets", "union_pages", "union_masks", "union_counts")
        return UnionSchedule(
            strategy=self.name,
            backend=backend,
            arithmetic=arithmetic,
            shape=shape_key(problem),
            sources=source_key(problem),
            workspace=workspace,
            queries_per_group=group,
            queries_per_tile=self.queries_per_tile(problem),
            identity=order is None,
            mapping=self.mapping,
            window_choices=views.get("window_choices") if query_ids is None else None,
            views=views,
            **{name: views[name] for name in names},
        )

    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        run = execute_cuda if schedule.backend == "cuda" else execute_reference
        run(problem, schedule, out, lse)

    def work(self, problem: AttentionProblem) -> WorkReport:
        """See `Strategy.work`."""
        return union_work(self.name, problem, self.prepare(problem), self.workspace_bytes(problem))


@register
class Union4(QueryUnion):
    """One 64-row tile a group: four queries of 16 heads share a page stream."""

    name = "union4"
    tiles_per_group = 1


@register
class Union8(QueryUnion):
    """Two 64-row tiles a group: eight queries of 16 heads share a page stream."""

    name = "union8"
    tiles_per_group = 2
