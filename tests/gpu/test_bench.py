"""Measurements on a GPU: graphs of calls, rotated rounds, and what the rows say of them."""

from __future__ import annotations

import pytest
import torch

import pageweaver as pw
from pageweaver.common.supports import preset
from pageweaver.eval import ablations, numerics, operator, scaling
from pageweaver.eval.arms import DIAGNOSTICS, make_strategy
from pageweaver.eval.timing import Protocol

from .hopper import WATCHDOG, missing

pytestmark = [pytest.mark.skipif(missing() != "", reason=missing() or "runs here"), WATCHDOG]

ARMS = ["per_query", "union4", "union8", *DIAGNOSTICS]


def silent(_: float, __: str) -> None:
    """No progress."""


@pytest.mark.parametrize("inputs", [1, 3])
def test_arms_are_timed(inputs: int) -> None:
    selection = preset("low", total_q=512, prefix=8192)
    protocol = Protocol(rounds=3, calls=4, inputs=inputs, eager=True)
    rows = list(
        operator.measure(
            [selection],
            ARMS,
            protocol=protocol,
            header={"schema": "s"},
            device=torch.device("cuda"),
            extra=ablations.step_rows,
            report=silent,
        )
    )
    counting = pw.make_problem(selection)
    for arm in ARMS:
        own = {row["boundary"]: row for row in rows if row["arm"] == arm and row["boundary"] != "kernel"}
        prepares = {"prepare"} if arm != "per_query" else set()
        assert set(own) == {"complete", "attention", "eager"} | prepares
        for row in own.values():
            assert len(row["samples_ms"]) == 3 and 0 < min(row["samples_ms"]) < 100
            assert row["protocol"]["inputs"] == inputs and row["protocol"]["l2_bytes"] > 2**20
        assert (
            own["complete"]["visits"]
            == make_strategy(arm, selection, counting, "reference").work(counting).visits
        )
    kernels = [row["kernel"] for row in rows if row["boundary"] == "kernel" and row["arm"] == "union8"]
    assert len(kernels) >= 2


def test_fixed_ids_never_wait_for_the_device() -> None:
    """A call of a fixed order queues its work and comes back: a check of the ids would synchronise."""
    selection = preset("low", total_q=512, prefix=8192)
    problem = pw.make_problem(selection, device="cuda")
    for name in ("fixed_w128", "reorder_w128"):
        strategy = make_strategy(name, selection, problem, "cuda")
        workspace = strategy.workspace(problem)
        out = torch.empty_like(problem.q)
        strategy(problem, out, workspace=workspace)
        torch.cuda.set_sync_debug_mode("error")
        try:
            strategy(problem, out, workspace=workspace)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [name for name in DIAGNOSTICS if name != "reorder_w128"])
def test_orders_keep_the_bits_of_union8(name: str) -> None:
    selection = preset("mid", total_q=700, prefix=8192)
    problem = pw.make_problem(selection, device="cuda")
    out = torch.full_like(problem.q, torch.nan)
    make_strategy(name, selection, problem, "cuda")(problem, out)
    assert torch.equal(out, pw.load("union8")(problem))


def test_numerics_on_kernels() -> None:
    selection = preset("mid", total_q=300, prefix=4096)
    arms = ["per_query", "union8", "union8/cluster", "regroup_w128", "auto", "offline_w2048"]
    rows = list(
        numerics.measure(
            [selection], arms, ["normal", "model"], header={}, device=torch.device("cuda"), report=silent
        )
    )
    assert {row["arm"] for row in rows} == set(arms)
    for row in rows:
        assert row["boundary"] == "numerics" and row["backend"] == "cuda" and row["peer_rows"] == 300
        if row["inputs"] == "normal":
            assert 0 < row["nrms"] < (0.05 if row["arithmetic"] == "fp8" else 0.005)
        assert row["bits_of_union8"] or row["arm"] == "per_query"


def test_scaling_over_shapes_of_a_mix() -> None:
    shapes = [
        scaling.Shape("queries", (128,), (8192,)),
        scaling.Shape("requests", (70, 200), (3000, 900)),
        scaling.Shape("workload", (300,), (5000,), weight=3),
    ]
    rows = list(
        scaling.measure(
            shapes,
            ["per_query", "union8", "auto"],
            protocol=Protocol(rounds=3, calls=4),
            header={},
            device=torch.device("cuda"),
            skip_missing=False,
            report=silent,
        )
    )
    assert [(row["case"], row["arm"]) for row in rows] == [
        (shape.name, arm) for shape in shapes for arm in ("per_query", "union8", "auto")
    ]
    assert all(0 < row["median_ms"] < 100 and row["boundary"] == "complete" for row in rows)
    assert {one.arm for one in scaling.weigh(rows)} == {"per_query", "union8", "auto"}


def test_torch_baselines_are_timed_or_named() -> None:
    """Whether torch's compiler is there or not, ours are measured."""
    selection = preset("mid", total_q=256, prefix=4096)
    rows = list(
        operator.measure(
            [selection],
            ["union8", "dense", "flex"],
            protocol=Protocol(rounds=2, calls=2),
            header={},
            device=torch.device("cuda"),
            skip_missing=True,
            report=silent,
        )
    )
    found = {row["arm"]: row for row in rows if row["boundary"] in ("complete", operator.NOT_RUN)}
    assert set(found) == {"union8", "dense", "flex"} and found["union8"]["median_ms"] > 0
    assert found["dense"]["boundary"] == "complete" and found["dense"]["nrms"] < 0.005
