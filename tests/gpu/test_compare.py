"""Comparisons on a GPU: timed where kernels are built, and said where they are not."""

from __future__ import annotations

import pytest
import torch

import pageweaver as pw
from pageweaver.common.supports import preset
from pageweaver.eval.compare import compare_selection

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def test_compare_times_what_is_built() -> None:
    selection = preset("mid", total_q=256, prefix=4096)
    found = compare_selection(selection, pw.available(), rows=64, device="cuda")
    on_cpu = compare_selection(selection, pw.available(), rows=64)
    for here, there in zip(found.results, on_cpu.results, strict=True):
        assert here.work == there.work
        assert (here.time_ms is None) == (here.nrms_backend == "reference")
        assert here.time_ms is None or 0 < here.time_ms < 1000
        # per_query's kernel widens to BF16; its reference computes in FP8 like every other.
        expected = 0.002 if here.work.strategy == "per_query" else there.nrms
        assert here.nrms == pytest.approx(expected, abs=0.01 if expected > 0.01 else 0.001)
