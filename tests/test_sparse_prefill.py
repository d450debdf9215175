"""The whole call, and what it refuses before any work."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

import pageweaver as pw

from .helpers import E4M3, Result, Target, assert_empty, assert_same_bits, random_problem

BF16 = torch.bfloat16


class TestSparsePrefill:
    def test_is_the_strategy(self) -> None:
        problem = random_problem()
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        for name in ("union8", "regroup_w128", "page_union"):
            expected = Target(name).run(problem)
            out, lse = pw.sparse_prefill(**fields, strategy=name, return_lse=True)
            assert out.dtype == BF16 and lse.dtype == torch.float32
            assert_same_bits(Result(out.float(), lse), expected)
        given = torch.empty_like(problem.q.contiguous())
        assert pw.sparse_prefill(**fields, out=given) is given
        for wrong in (torch.ones(2), "no", None, 1):
            with pytest.raises(TypeError, match=r"^return_lse: got \w+, supported: bool$"):
                pw.sparse_prefill(**fields, return_lse=wrong)
        fields["softmax_scale"] = None
        again = pw.sparse_prefill(**fields)
        assert isinstance(again, torch.Tensor) and torch.equal(again, given)

    @pytest.mark.parametrize("strategy", ["union8", "page_union"])
    @pytest.mark.parametrize("kv_dtype", [E4M3, BF16])
    def test_output_dtype(self, strategy: str, kv_dtype: torch.dtype) -> None:
        """BF16, whatever the cache holds; float32 for who asks for this arithmetic."""
        problem = random_problem(kv_dtype=kv_dtype)
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        fields["strategy"] = strategy
        plain = pw.sparse_prefill(**fields)
        float32 = pw.sparse_prefill(**fields, arithmetic="float32")
        assert isinstance(plain, torch.Tensor) and plain.dtype == BF16
        assert isinstance(float32, torch.Tensor) and float32.dtype == torch.float32
        given = torch.empty(problem.q.shape, dtype=BF16)
        assert pw.sparse_prefill(**fields, arithmetic="float32", out=given) is given
        assert torch.equal(given, float32.bfloat16())
        with pytest.raises(TypeError, match=r"out\.dtype: got torch\.float32, supported: torch\.bfloat16$"):
            pw.sparse_prefill(**fields, out=float32)
        default = "fp8" if kv_dtype == E4M3 else "bf16"
        assert torch.equal(pw.sparse_prefill(**fields, arithmetic=default), plain)

    def test_rows_of_nobody(self) -> None:
        problem = random_problem(lengths=(4,), prefixes=(100,), past_rows=6)
        result = Target("union8").run(problem)
        assert_empty(result[4:])
        assert (result.lse[:4] > -math.inf).any()


@pytest.mark.parametrize("name", [n for n in pw.available() if not n.startswith("offline")])
def test_a_bad_output_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong outputs cost nothing: neither are queries grouped nor is a schedule in the workspace ended."""
    strategy, problem = pw.load(name, backend="reference"), random_problem(seed=1)
    workspace = strategy.workspace(problem)
    good, rows = torch.empty_like(problem.q), torch.empty(problem.q.shape[:2])
    bad: list[tuple[Any, Any, str]] = [
        (good.float(), None, "out.dtype"),
        (good[1:], None, "out.shape"),
        (torch.empty_like(good, requires_grad=True), None, "out.requires_grad"),
        (good.to_sparse(), None, "out.layout"),
        (good, rows.bfloat16(), "lse.dtype"),
        (good, rows.clone().requires_grad_(), "lse.requires_grad"),
        ("x", None, "out"),
    ]
    for out, lse, argument in bad:
        with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(argument)}.*: got .*supported: "):
            strategy(problem, out, lse, workspace)
        assert workspace.prepared == 0


@pytest.mark.parametrize("name", [n for n in pw.available() if not n.startswith("offline")])
def test_arguments_of_another_kind_are_named(name: str) -> None:
    strategy, problem = pw.load(name, backend="reference"), random_problem(seed=1)
    wrong: Any
    for wrong in (None, 5, "x", {}):
        with pytest.raises(TypeError, match=r"^problem: got .*supported: AttentionProblem"):
            strategy.prepare(wrong)
        for method in ("workspace", "workspace_bytes", "workspace_layout", "work"):
            with pytest.raises(TypeError, match=r"^problem: got .*supported: AttentionProblem"):
                getattr(strategy, method)(wrong)
        with pytest.raises(TypeError, match=r"^schedule: got .*supported: Schedule"):
            strategy.execute(problem, wrong)
    for wrong in (0, 5, {}, "x"):
        with pytest.raises(TypeError, match=r"^workspace: got .*supported: Workspace"):
            strategy.prepare(problem, wrong)
    for option in ("backend", "arithmetic"):
        with pytest.raises(ValueError, match=rf"^{option}: got .*supported"):
            pw.load(name, **{"backend": "reference", option: torch.zeros(2)})(problem)
    # Values that are false are no way to say "the default".
    for wrong in ("", 0, False):
        with pytest.raises(ValueError, match=r"^arithmetic: got .*supported by "):
            pw.load(name, backend="reference", arithmetic=wrong)(problem)


@pytest.mark.parametrize("name", [[], {}, None, 5])
def test_a_strategy_name_of_any_kind_is_refused_by_name(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^strategy: got .*supported: "):
        pw.load(name)


@pytest.mark.parametrize("name", pw.available())
def test_unknown_options_are_named(name: str) -> None:
    """Beside those that the strategy takes, each of which is really one."""
    with pytest.raises(TypeError) as caught:
        pw.load(name, unknown=3)
    start = f"unknown: got 3, which is no option of {name}, supported: "
    assert str(caught.value).startswith(start)
    listed = str(caught.value).removeprefix(start).split(", ")
    assert {"backend", "arithmetic"} <= set(listed)
    own = {
        "per_query": "tune",
        "page_union": "pairs",
        "union8": "mapping",
        "auto": "objective",
        "offline_w512": "ids",
    }
    assert own.get(name, "backend") in listed
    for option in listed:
        try:
            pw.load(name, **{option: object()})
        except (TypeError, ValueError) as error:  # a wrong value, not an unknown option
            assert "no option" not in str(error) and "keyword" not in str(error)
