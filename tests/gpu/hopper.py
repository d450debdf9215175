"""Targets of the Hopper kernels, and why they may not be run here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import pageweaver as pw
from pageweaver.common.native import cuda_status

from ..helpers import E4M3, Result, Target, paged_case, random_problem


class KernelTarget(Target):
    """A strategy on a backend that supports less than the contract's cases ask for."""

    def run(
        self,
        problem: pw.AttentionProblem,
        *,
        strategy: pw.Strategy | None = None,
        workspace: pw.Workspace | None = None,
        nan_rows: Sequence[int] = (),
    ) -> Result:
        """See `Target.run`; an unsupported problem must be refused, by name, and then ends the test."""
        able = pw.load(self.strategy).capabilities[self.backend]
        wanted = None
        if problem.k_cache.dtype not in able.kv_dtypes:
            wanted = f"k_cache.dtype: got {problem.k_cache.dtype}, supported by {self.strategy}"
        elif problem.page_size not in able.page_sizes:
            wanted = f"page_size: got {problem.page_size}, supported by {self.strategy}"
        elif self.arithmetic == "bf16" and "bf16" not in able.arithmetics[problem.k_cache.dtype]:
            wanted = f"arithmetic: got 'bf16', supported by {self.strategy}"
        elif self.options.get("mapping") == "cluster" and problem.k_cache.dtype == torch.bfloat16:
            wanted = f"mapping: got 'cluster', supported by {self.strategy}"
        if wanted is not None:
            with pytest.raises((TypeError, ValueError)) as caught:
                self.load(problem)(problem)
            assert str(caught.value).startswith(wanted)
            pytest.skip(f"refused, as it has to be: {caught.value}")
        return super().run(problem, strategy=strategy, workspace=workspace, nan_rows=nan_rows)


TARGETS = (
    KernelTarget("union4", device="cuda", backend="cuda"),
    KernelTarget("union8", device="cuda", backend="cuda"),
    KernelTarget("union8", options={"mapping": "cluster"}, device="cuda", backend="cuda"),
    KernelTarget("regroup_w128", device="cuda", backend="cuda"),
    KernelTarget("auto", device="cuda", backend="cuda"),
)

# The same in the arithmetic of two E4M3 parts, where kernels have it.
SPLIT_TARGETS = tuple(
    replace(target, arithmetic="split")
    for target in TARGETS
    if "split" in pw.load(target.strategy).capabilities["cuda"].arithmetics[E4M3]
)

# Besides, every other strategy that has kernels: for what is asked of any call, whatever it computes.
ALL_TARGETS = TARGETS + tuple(
    KernelTarget(name, able["cuda"].arithmetics[E4M3][0], device="cuda", backend="cuda")
    for name in ("per_query", "regroup_w64", "regroup_w128", "page_union")
    if "cuda" in (able := pw.load(name).capabilities) and name not in {t.strategy for t in TARGETS}
)

PAGE_TARGETS = tuple(
    KernelTarget("page_union", options={"pairs": pairs}, device="cuda", backend="cuda")
    for pairs in (True, False)
)
PAGE_SPLIT_TARGETS = tuple(replace(target, arithmetic="split") for target in PAGE_TARGETS)

# BF16 caches, in their own arithmetic; for tests that call `use_bf16_caches`.
BF16_TARGETS = tuple(
    KernelTarget(name, "bf16", device="cuda", backend="cuda") for name in ("union4", "union8", "regroup_w128")
)


def use_bf16_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the builders of problems make BF16 caches where a test does not name a dtype."""
    for builder in (paged_case, random_problem):
        monkeypatch.setitem(builder.__kwdefaults__, "kv_dtype", torch.bfloat16)


# A kernel that waits for itself never returns to Python: only another thread can end the run then.
WATCHDOG = pytest.mark.timeout(60, method="thread")


def missing() -> str:
    """What keeps the kernels from running here; empty where nothing does."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is not of compute capability 9.0"
    built, reason = cuda_status()
    return "" if built else f"pageweaver._cuda: {reason}"
