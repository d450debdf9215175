"""The per-query Triton kernel without a GPU: in Triton's interpreter, and what surrounds the kernel.

Whether a kernel is interpreted is settled when its module is imported, so the cases run in a process of their
own: this module started again with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.strategies import per_query
from pageweaver.strategies.per_query import PerQuery, Tuning

from .helpers import Target, paged_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class InterpretedPerQuery(PerQuery):
    """The kernel's backend on CPU tensors."""

    def resolve(self, problem: pw.AttentionProblem) -> tuple[str, str]:
        return "cuda", "bf16"


class InterpretedTarget(Target):
    """Runs the kernel where other targets run the reference."""

    def load(self, problem: pw.AttentionProblem) -> pw.Strategy:
        return InterpretedPerQuery(**self.options)


if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    from .per_query_cases import *  # noqa: F403
    from .test_cases import (  # noqa: F401
        TestC16RowsWithoutKeys,
        TestC18FirstPageMasked,
        TestC19LseBase,
        TestC21DuplicateIds,
        TestC24UnwrittenSlots,
    )
    from .test_cases_calls import (  # noqa: F401
        TestC37Scales,
        TestC42Sizes,
        test_c25_page_count_edges,
        test_c28_empty_requests,
        test_c28_page_table_of_no_pages,
        test_c29_rows_past_the_last_request,
    )

    _patch_tensor = interpreter._patch_lang_tensor
    _builder = interpreter.InterpreterBuilder
    _cast, _fp_to_fp, _dot = _builder.cast_impl, _builder.create_fp_to_fp, _builder.create_dot

    def _patch_tensor_index(tensor: Any, scope: Any) -> None:
        """Loop bounds come as arrays of one element, which NumPy 2.4 no longer takes for an integer."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def _cast_rounded(self: Any, source: Any, kind: Any) -> Any:
        """BF16 is rounded to nearest by hardware, where the interpreter cuts it off."""
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return _cast(self, source, kind)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), kind.scalar)

    def _convert(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        """NaN of E4M3 is one, where the interpreter reads 480."""
        if source.dtype.scalar != tl.float8e4nv or kind.scalar != tl.float32:
            return _fp_to_fp(self, source, kind, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn).float()
        return interpreter.TensorHandle(wide.numpy(), kind.scalar)

    def _dot_widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter would multiply the bit patterns of BF16 as integers."""
        wide = (_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return _dot(self, *wide, *rest)

    interpreter._patch_lang_tensor = _patch_tensor_index
    _builder.cast_impl = _cast_rounded
    _builder.create_fp_to_fp = _convert
    _builder.create_dot = _dot_widened

    @pytest.fixture
    def target() -> Target:
        return InterpretedTarget("per_query", "bf16", backend="cuda")

else:

    @pytest.mark.timeout(900)
    def test_cases_in_the_interpreter() -> None:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        # One case of hundreds of rows would take a third of the time.
        options = ["-q", "-p", "no:cacheprovider", "-k", "not one_row_of_a_group"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(Path(__file__))],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_missing_triton(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(per_query, "find_spec", lambda name: None)
        with pytest.raises(pw.UnsupportedDeviceError, match=r"needs the package triton.*pip install triton"):
            per_query._check_triton(paged_case([[0]], prefixes=[0]))

    @pytest.mark.parametrize(
        ("tune", "message"),
        [
            ({"num_warps": 3}, r"tune\['num_warps'\]: got 3, supported: \(2, 4, 8\)"),
            ({"num_stages": 0}, r"tune\['num_stages'\]: got 0, supported: \(1, 2, 3, 4\)"),
            ({"tokens": 16}, r"tune\['tokens'\]: got 16, supported: \(32, 64, 128\)"),
            ({"warps": 4}, r"tune: got 'warps', supported: \('num_warps', "),
        ],
    )
    def test_tuning_refused(tune: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            pw.load("per_query", tune=tune)

    def test_tuning_defaults() -> None:
        assert Tuning.of(None) == Tuning() == Tuning.of({})
        assert Tuning.of({"num_warps": 8, "pairs": False}) == Tuning(num_warps=8, pairs=False)
