"""Baselines: torch's on small problems, and engines' through stand-ins that read what their kernels would."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import exact_attention, nrms
from pageweaver.common.supports import preset, streams, uniform
from pageweaver.eval import arms, operator
from pageweaver.eval.arms import make_arm, make_strategy
from pageweaver.eval.baselines import BASELINES
from pageweaver.eval.timing import Protocol, Timings

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def several_requests() -> pw.Selection:
    return streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, BF16])
@pytest.mark.parametrize("group_size", [4, 16])
@pytest.mark.parametrize("name", ["dense", "flex"])
def test_torch_baselines_answer_their_problem(name: str, group_size: int, kv_dtype: torch.dtype) -> None:
    selection = several_requests()
    problem = pw.make_problem(selection, group_size=group_size, kv_dtype=kv_dtype)
    rows = arms.sample_rows(selection, 0)
    exact, _ = exact_attention(problem, torch.float64, rows)
    arm = make_arm(name, selection, [problem], rows, exact, backend="reference")
    # BF16 rounding of probabilities and outputs; `make_arm` refuses more than 0.5%.
    assert arm.arithmetic == "bf16" and arm.nrms is not None and arm.nrms > 0.0005
    assert not arm.ours and set(arm.calls) == {"complete", "attention"}
    for calls in arm.calls.values():
        calls[0]()


def test_dense_is_another_problem_of_more_edges() -> None:
    selection = preset("mid", total_q=24, prefix=4096)
    problem = pw.make_problem(selection)
    dense = make_strategy("dense", selection, problem, "reference")
    rows = torch.tensor([0, 23])
    exact, _ = exact_attention(problem, torch.float64, rows)
    assert nrms(dense(problem)[rows], exact) > 0.3
    assert dense.work(problem).edges == 24 * 33
    # Where every visible page is selected the two are one.
    everything = preset("mid", total_q=24, prefix=900)
    problem = pw.make_problem(everything)
    assert torch.equal(problem.support.ge(0).sum(2), (problem.positions // 128 + 1)[None])
    dense = make_strategy("dense", everything, problem, "reference")
    assert nrms(dense(problem), exact_attention(problem)[0]) < 0.005
    assert dense.work(problem).edges == pw.load("union8").work(problem).edges


def test_flex_reads_unions_of_eight_queries() -> None:
    selection = preset("mid", total_q=44, prefix=4096)
    problem = pw.make_problem(selection)
    strategy: Any = make_strategy("flex", selection, problem, "reference")
    plan = strategy.prepare(problem).plan
    assert plan.kv_num_blocks.sum() == pw.load("union8").work(problem).visits
    assert strategy.work(problem).visits == strategy.work(problem).edges


def test_scales_enter_the_torch_baselines() -> None:
    from dataclasses import replace

    selection = several_requests()
    problem = replace(pw.make_problem(selection), k_scale=1.7, v_scale=0.3)
    rows = arms.sample_rows(selection, 0)
    exact, _ = exact_attention(problem, torch.float64, rows)
    for name in ("dense", "flex"):
        arm = make_arm(name, selection, [problem], rows, exact, backend="reference")
        assert arm.nrms is not None and arm.nrms < 0.005


def flashinfer_stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
) -> torch.Tensor:
    """Reads K and V as halves of one pool, ``[num_pages, num_kv_heads, page_size, head_dim]`` each."""
    assert causal and q2k_indices.is_contiguous() and k.dtype == torch.float8_e4m3fn
    assert v.data_ptr() - k.data_ptr() == 128 and k.stride() == v.stride() and k.stride(2) == 256
    problem = pw.AttentionProblem(
        q=q,
        k_cache=k.transpose(1, 2),
        v_cache=v.transpose(1, 2),
        q2k_indices=q2k_indices,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
    )
    return exact_attention(problem)[0].bfloat16()


def vllm_stand_in(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_idx: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: torch.Tensor,
) -> None:
    assert kv_cache.shape[1:] == (num_kv_heads, 128, 256)
    assert torch.equal(prefix_lens, seq_lens - cu_seqlens_q.diff())
    assert max_query_len == int(cu_seqlens_q.diff().max())
    k, v = kv_cache.transpose(1, 2).split(128, dim=3)
    problem = pw.AttentionProblem(
        q=q,
        k_cache=k,
        v_cache=v,
        q2k_indices=topk_idx,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seq_lens,
        page_table=block_table,
        softmax_scale=sm_scale,
    )
    output.copy_(exact_attention(problem)[0])


def sglang_stand_in(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sink: None,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    topk_idx: torch.Tensor,
    block_size_q: int,
    block_size_k: int,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_seqlen_q: int,
    sm_scale: float,
) -> torch.Tensor:
    assert (block_size_q, block_size_k, sink) == (1, 128, None)
    assert k_cache.dtype == v_cache.dtype == q.dtype == BF16
    assert torch.equal(prefix_lens, seq_lens - cu_seqlens.diff())
    # The slots of a page stand together here, as they do in the caches it was made from.
    pages = req_to_token[slot_ids.long(), ::128] // 128
    problem = pw.AttentionProblem(
        q=q,
        k_cache=k_cache.unflatten(0, (-1, 128)),
        v_cache=v_cache.unflatten(0, (-1, 128)),
        q2k_indices=topk_idx,
        cu_seqlens_q=cu_seqlens,
        seqused_k=seq_lens,
        page_table=pages.int(),
        softmax_scale=sm_scale,
    )
    return exact_attention(problem)[0].bfloat16()


STAND_INS: dict[str, tuple[str, Any]] = {
    "flashinfer": ("msa_sparse_attention", flashinfer_stand_in),
    "vllm": ("minimax_m3_sparse_attn", vllm_stand_in),
    "sglang": ("flash_prefill_with_gqa_share_sparse", sglang_stand_in),
}


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for an engine's module, and CPU tensors let through."""
    kind = BASELINES[name]
    assert kind.module is not None
    function, stand_in = STAND_INS[name]
    parts = kind.module.split(".")
    for count in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(sys.modules[kind.module], function, stand_in)
    monkeypatch.setattr(kind, "capabilities", {"reference": kind.capabilities["cuda"]})


@pytest.mark.parametrize("name", list(STAND_INS))
def test_engines_are_called_with_this_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins rebuild the problem from what they are given: a wrong layout gives a wrong answer."""
    install(name, monkeypatch)
    selection = uniform(query_lens=[33, 20], prefix_lens=[1024, 900], num_kv_heads=2, topk=4, seed=2)
    problem = pw.make_problem(selection, group_size=8)
    rows = arms.sample_rows(selection, 0)
    exact, _ = exact_attention(problem, torch.float64, rows)
    arm = make_arm(name, selection, [problem], rows, exact, backend="reference")
    assert arm.arithmetic == ("split" if name == "flashinfer" else "bf16")
    assert arm.nrms is not None and 0.0005 < arm.nrms < 0.003  # BF16 outputs
    # Ids reach the kernel as an indexer writes them, whatever order they came in.
    shuffled = pw.Selection(
        "x", selection.q2k_indices[:, :, ::-1], selection.cu_seqlens_q, selection.seqused_k
    )
    turned = pw.make_problem(shuffled, group_size=8)
    strategy = make_strategy(name, shuffled, turned, "reference")
    assert torch.equal(strategy(turned), make_strategy(name, selection, problem, "reference")(problem))


@pytest.mark.parametrize("name", list(STAND_INS))
def test_engines_refuse_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    install(name, monkeypatch)
    selection = several_requests()
    problem = replace(pw.make_problem(selection), v_scale=0.5)
    with pytest.raises(ValueError, match=f"k_scale, v_scale: got 1.0, 0.5, supported by {name}: 1"):
        make_strategy(name, selection, problem, "reference")(problem)


def test_vllm_refuses_rows_with_fewer_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    install("vllm", monkeypatch)
    selection = uniform(query_lens=[8], prefix_lens=[1024], topk=4, seed=2)
    ids = selection.q2k_indices.copy()
    ids[0, 3, 1] = -1
    thinner = pw.Selection("thin", ids, selection.cu_seqlens_q, selection.seqused_k)
    problem = pw.make_problem(thinner)
    with pytest.raises(ValueError, match="got rows with fewer pages, supported by vllm"):
        make_strategy("vllm", thinner, problem, "reference")(problem)


def test_a_baseline_that_answers_wrongly_is_named_and_ours_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selection = several_requests()
    problem = pw.make_problem(selection)
    inner = operator.make_arm

    def wrong(name: str, *arguments: Any) -> Any:
        if name in ("dense", "union4"):
            raise arms.CheckFailed(f"{name}: got NRMS 0.9")
        return inner(name, *arguments, backend="reference")

    def timed(made: Any, *_: Any) -> Timings:
        return Timings({(arm.name, "complete"): [1.0] for arm in made})

    monkeypatch.setattr(operator, "time_arms", timed)
    monkeypatch.setattr(operator, "make_arm", wrong)

    def run(*names: str) -> list[dict[str, Any]]:
        options: dict[str, Any] = {"protocol": Protocol(), "common": {}, "seed": 0, "skip_missing": True}
        return list(operator.measure_case(selection, [problem], names, **options, report=lambda *_: None))

    assert [(row["arm"], row["boundary"]) for row in run("dense", "union8")] == [
        ("dense", "not run"),
        ("union8", "complete"),
    ]
    with pytest.raises(arms.CheckFailed, match="union4: got NRMS"):
        run("union8", "union4")


@pytest.mark.parametrize("name", list(STAND_INS))
def test_a_missing_package_is_named_as_not_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = BASELINES[name].module
    assert module is not None
    monkeypatch.setitem(sys.modules, module.split(".")[0], None)  # whether it is installed here or not
    selection = several_requests()
    message = f"{name}: {module} is not usable here ("
    with pytest.raises(pw.UnsupportedDeviceError, match=re.escape(message)):
        make_strategy(name, selection, pw.make_problem(selection), "cuda")
    options = {"protocol": Protocol(), "header": {}, "device": CPU, "report": lambda *_: None}
    (row,) = operator.measure([selection], [name], **options)  # type: ignore[arg-type]
    assert row["boundary"] == operator.NOT_RUN and row["reason"].startswith(message)


def test_a_baseline_that_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' failures end their own arm; ours end the measurement."""
    selection = several_requests()
    problem = pw.make_problem(selection)

    def timed(made: Any, *_: Any) -> Timings:
        good = {(arm.name, "complete"): [1.0] for arm in made if arm.ours}
        return Timings(good, failed={arm.name: "no graph" for arm in made if not arm.ours})

    inner = operator.make_arm

    def on_the_reference(*arguments: Any) -> Any:
        return inner(*arguments, backend="reference")

    monkeypatch.setattr(operator, "time_arms", timed)
    monkeypatch.setattr(operator, "make_arm", on_the_reference)
    found = list(
        operator.measure_case(
            selection,
            [problem],
            ["union8", "dense"],
            protocol=Protocol(),
            common={},
            seed=0,
            skip_missing=False,
            report=lambda *_: None,
        )
    )
    assert [(row["arm"], row["boundary"]) for row in found] == [("dense", "not run"), ("union8", "complete")]
    assert found[0]["reason"] == "no graph"
