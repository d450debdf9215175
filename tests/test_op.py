"""The torch operator: what torch.compile and torch.library's own checks ask of it (case C47)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common import supports


def arguments(
    total_q: int, device: str = "cpu", kv_dtype: torch.dtype = torch.float8_e4m3fn
) -> dict[str, Any]:
    """Arguments of `sparse_prefill` for one request after a prefix of 512."""
    selection = supports.local(total_q, 512 + total_q)
    problem = pw.make_problem(selection, group_size=4, kv_dtype=kv_dtype, device=device)
    names = ("q", "k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table")
    return {name: getattr(problem, name) for name in names}


def call(**options: Any) -> Any:
    """As a model calls it: with the LSE, through a strategy named by a constant."""
    return pw.sparse_prefill(**options, return_lse=True, strategy="union8")


@pytest.mark.parametrize("scale", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_compiled_without_a_graph_break(scale: Any) -> None:
    """Same bits as eager, at a second length too."""
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for total_q in (64, 65):
        given = {**arguments(total_q), "softmax_scale": scale}
        for got, wanted in zip(compiled(**given), call(**given), strict=True):
            assert torch.equal(got, wanted) and got.stride() == wanted.stride()


def test_compiled_writes_the_callers_output() -> None:
    torch._dynamo.reset()
    given = arguments(16)
    buffer = torch.full((2, 16, 4, 128), torch.nan, dtype=torch.bfloat16)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    compiled(**given, out=buffer[1])
    assert torch.equal(buffer[1], call(**given)[0])
    assert buffer[0].isnan().all()


def test_gradient_is_refused_not_dropped() -> None:
    given = arguments(16)
    given["q"].requires_grad_()
    with pytest.raises(ValueError, match="requires_grad"):
        call(**given)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="requires_grad"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(**given)


def test_operator_check() -> None:
    """torch.library's own tests of schema, fake and dispatch; they compute with inputs, which FP8 cannot."""
    given = arguments(16, kv_dtype=torch.bfloat16)
    positional = tuple(given.pop(n) for n in ("q", "k_cache", "v_cache", "q2k_indices"))
    given |= {f"{n}_scale": 1.0 for n in ("softmax", "k", "v")}
    given |= {f"{n}_scale_tensor": None for n in ("softmax", "k", "v")}
    given |= {"out": torch.empty_like(positional[0]), "lse": torch.empty(16, 4)}
    given |= {"strategy": "union8", "backend": None, "arithmetic": None}
    torch.library.opcheck(torch.ops.pageweaver.sparse_prefill.default, positional, given)


def test_errors_reach_the_caller() -> None:
    """Validation inside the operator raises what eager raises."""
    torch._dynamo.reset()
    given = arguments(16)
    given["q2k_indices"] = given["q2k_indices"].long()
    with pytest.raises(TypeError, match="q2k_indices"):
        call(**given)
    with pytest.raises(TypeError, match="q2k_indices"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(**given)
