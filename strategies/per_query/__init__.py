"""per_query: every query alone over its own pages, the design that unions are measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.problem import AttentionProblem
from pageweaver.common.strategy import (
    REFERENCE_CAPABILITIES,
    Capabilities,
    Layout,
    Schedule,
    Workspace,
    register,
    shape_key,
    source_key,
)
from pageweaver.common.work import WorkReport
from pageweaver.strategies.per_query.tuning import Tuning
from pageweaver.strategies.query_union import QueryUnion

__all__ = ["PerQuery", "Tuning"]

# Compute capabilities from which Triton has BF16 products and E4M3 conversions.
_LEAST_CAPABILITY = {torch.bfloat16: (8, 0), torch.float8_e4m3fn: (8, 9)}


@register
class PerQuery(QueryUnion):
    """A union of one: no page is shared, and every selected page is one visit and one round.

    The "cuda" backend is a Triton kernel and the baseline of all comparisons. It needs no preparation and no
    workspace. Its arithmetic is "bf16": K and V widened to BF16, probabilities in BF16, statistics in FP32.

    Parameters
    ----------
    backend, arithmetic : str, optional
        See `Strategy`.
    tune : mapping of str to int, optional
        Entries of `Tuning` that replace its defaults; for the "cuda" backend.
    """

    name = "per_query"
    tiles_per_group = 1
    capabilities: ClassVar[dict[str, Capabilities]] = {
        "cuda": Capabilities(
            arithmetics={torch.float8_e4m3fn: ("bf16",), torch.bfloat16: ("bf16",)}, graph_capturable=True
        ),
        "reference": REFERENCE_CAPABILITIES,
    }

    def __init__(
        self,
        *,
        backend: str | None = None,
        arithmetic: str | None = None,
        tune: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(backend=backend, arithmetic=arithmetic)
        self.tuning = Tuning.of(tune)

    def queries_per_group(self, problem: AttentionProblem) -> int:
        """One."""
        return 1

    def resolve(self, problem: AttentionProblem) -> tuple[str, str]:
        """See `Strategy.resolve`; refuses "cuda" where Triton is missing or the device is too old for it."""
        backend, arithmetic = super().resolve(problem)
        if backend == "cuda":
            _check_triton(problem)
        return backend, arithmetic

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Nothing for the kernel; a union schedule for the reference."""
        return {} if self.resolve(problem)[0] == "cuda" else super().workspace_layout(problem)

    def prepare(
        self,
        problem: AttentionProblem,
        workspace: Workspace | None = None,
        query_ids: torch.Tensor | None = None,
    ) -> Any:
        """See `QueryUnion.prepare`; on "cuda" there is nothing to do and no order to choose.

        Raises
        ------
        ValueError
            `query_ids` is given on "cuda".
        """
        backend, arithmetic = self.resolve(problem)
        if backend != "cuda":
            return super().prepare(problem, workspace, query_ids)
        if query_ids is not None:
            raise ValueError(
                "query_ids: got a tensor, supported by per_query on cuda: None, the original order"
            )
        workspace = workspace or self.workspace(problem)
        return Schedule(self.name, backend, arithmetic, shape_key(problem), source_key(problem), workspace)

    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        if schedule.backend != "cuda":
            super()._execute(problem, schedule, out, lse)
            return
        from pageweaver.strategies.per_query.triton_kernel import attend

        attend(problem, out, lse, self.tuning)

    def work(self, problem: AttentionProblem) -> WorkReport:
        """See `Strategy.work`."""
        # The counts are those of the method, whichever backend runs.
        report = QueryUnion.work(PerQuery(backend="reference"), problem)
        return replace(report, workspace_bytes=self.workspace_bytes(problem))


def _check_triton(problem: AttentionProblem) -> None:
    """Refuse a device that Triton cannot compile the kernel for, and an environment without Triton."""
    if find_spec("triton") is None:
        raise UnsupportedDeviceError(
            "per_query: backend 'cuda' needs the package triton, which is not installed: pip install triton"
            " (or pass backend='reference' to run the torch path on any device)"
        )
    capability = torch.cuda.get_device_capability(problem.device)
    least = _LEAST_CAPABILITY[problem.k_cache.dtype]
    if capability < least:
        raise UnsupportedDeviceError(
            f"per_query: got compute capability {capability} of {problem.device},"
            f" supported for {problem.k_cache.dtype}: {least} and later"
        )
