"""How a kernel that is not ours becomes an arm."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.problem import KV_DTYPES, AttentionProblem
from pageweaver.common.reference import exact_attention, gather_pages
from pageweaver.common.strategy import (
    Capabilities,
    Layout,
    Schedule,
    Strategy,
    Workspace,
    load,
    shape_key,
    source_key,
)
from pageweaver.common.work import WorkReport


def capabilities(arithmetic: str, *backends: str) -> dict[str, Capabilities]:
    """One arithmetic for every cache."""
    able = Capabilities(arithmetics=dict.fromkeys(KV_DTYPES, (arithmetic,)), page_sizes=(128,))
    return dict.fromkeys(backends, able)


@dataclass(eq=False)
class BaselineWorkspace(Workspace):
    """What lies ready before a call: caches in the kernel's layout, lengths that its host code needs."""

    state: Any = None


@dataclass(eq=False)
class BaselineSchedule(Schedule):
    """What a call made of the selection."""

    state: Any = None
    plan: Any = None


class Baseline(Strategy):
    """A kernel of others.

    Subclasses lay caches out (`lay_out`, no part of a call), turn the selection into what the kernel reads
    (`plan`, part of it) and run it (`run`). Outputs are the kernel's own tensors: where it takes none to
    write to, a copy would be charged to it.
    """

    module: ClassVar[str | None] = None  # to import; None for torch itself

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._module = self._import()

    def _import(self) -> ModuleType | None:
        if self.module is None:
            return None
        try:
            return importlib.import_module(self.module)
        except Exception as error:  # a package may fail in ways of its own where its device is missing
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UnsupportedDeviceError(
                f"{self.name}: {self.module} is not usable here ({reason})"
            ) from error

    @abstractmethod
    def lay_out(self, problem: AttentionProblem) -> Any:
        """What lies ready before a call; may synchronise."""

    def plan(self, problem: AttentionProblem, state: Any) -> Any:
        """What a call makes of the selection; nothing where the kernel reads it as it is."""

    @abstractmethod
    def run(self, problem: AttentionProblem, state: Any, plan: Any) -> torch.Tensor:
        """The kernel's output, ``[total_q, num_qo_heads, head_dim]``."""

    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Nothing that is sized from shapes alone."""
        return {}

    def workspace(self, problem: AttentionProblem) -> BaselineWorkspace:
        """Lay caches out; for this problem only."""
        self.resolve(problem)
        return BaselineWorkspace(self.name, {}, state=self.lay_out(problem))

    def prepare(self, problem: AttentionProblem, workspace: Workspace | None = None) -> BaselineSchedule:
        """See `Strategy.prepare`; the workspace is one of this problem."""
        backend, arithmetic = self.resolve(problem)
        held, _ = self._views(problem, workspace)
        assert isinstance(held, BaselineWorkspace)
        plan = self.plan(problem, held.state)
        return BaselineSchedule(
            self.name,
            backend,
            arithmetic,
            shape_key(problem),
            source_key(problem),
            held,
            state=held.state,
            plan=plan,
        )

    def execute(
        self,
        problem: AttentionProblem,
        schedule: Schedule,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the kernel; the result is its own tensor, and `out` stays as it is."""
        assert isinstance(schedule, BaselineSchedule)
        if lse is not None:
            raise ValueError(f"lse: got a tensor, supported by {self.name}: None")
        return self.run(problem, schedule.state, schedule.plan)

    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        raise NotImplementedError  # `execute` is replaced

    def expected(self, problem: AttentionProblem, rows: torch.Tensor) -> torch.Tensor:
        """What rows of the output should hold, in float64."""
        return exact_attention(problem, torch.float64, rows)[0]

    def work(self, problem: AttentionProblem) -> WorkReport:
        """That of one query at a time."""
        report = load("per_query", backend="reference").work(problem)
        return WorkReport(**{**report.to_dict(), "strategy": self.name})


def logical_cache(problem: AttentionProblem, cache: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """A cache widened to BF16, pages of all requests one after another in logical order.

    Returns
    -------
    tensor : torch.Tensor
        bfloat16 ``[num_kv_heads, pages * page_size, head_dim]``.
    starts : list of int
        First page of each request, and the count of all.
    """
    counts = (-(-problem.seqused_k // problem.page_size)).tolist()
    requests = torch.repeat_interleave(
        torch.arange(len(counts), device=problem.device), torch.tensor(counts, device=problem.device)
    )
    pages = torch.cat([torch.arange(count, device=problem.device) for count in counts])
    heads = [
        gather_pages(problem, cache, head, requests, pages).to(torch.bfloat16).flatten(0, 1)
        for head in range(problem.num_kv_heads)
    ]
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return torch.stack(heads), starts
