"""The exact reference equals a plain dense implementation, whatever its chunks, in bounded memory."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common import reference
from pageweaver.common.reference import exact_attention, nrms

from .helpers import E4M3, constant, naive_attention, paged_case, random_problem, replaced

# Sums of up to 1,000 terms of size one: a few hundred roundings of the unit in the last place.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}
SIZES = [
    {"kv_dtype": E4M3, "group_size": 16, "k_scale": 0.5, "v_scale": 3.0},
    {"kv_dtype": torch.bfloat16, "group_size": 4, "num_kv_heads": 3, "page_size": 64, "topk": 32},
    {"kv_dtype": torch.bfloat16, "group_size": 1, "num_kv_heads": 2, "topk": 1, "softmax_scale": 0.3},
    {"kv_dtype": E4M3, "group_size": 2, "page_size": 64, "topk": 5, "k_scale": torch.full((1,), 2.0)},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_dense_attention(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    problem = random_problem(seed=1, **sizes)
    out, lse = exact_attention(problem, dtype)
    expected, expected_lse = naive_attention(problem)
    assert out.dtype == lse.dtype == dtype
    assert (out - expected).abs().max() <= TOLERANCE[dtype] * 3
    dead = expected_lse == -torch.inf
    assert dead.any() and not dead.all()
    assert torch.equal(lse == -torch.inf, dead) and (out[dead] == 0).all() and not out[dead].signbit().any()
    # Relative: an LSE here is up to 10.
    assert ((lse - expected_lse)[~dead] / 10).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_do_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(num_kv_heads=2, group_size=4)
    whole, whole_lse = exact_attention(problem, dtype)
    calls: list[int] = []
    gather = reference.gather_pages

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(args[-1]))
        return gather(*args)

    monkeypatch.setattr(reference, "gather_pages", counted)
    row_bytes = dtype.itemsize * problem.topk * problem.page_size * (2 * 128 + 3 * 4)
    for rows in (0, 1, 7, 10_000):
        calls.clear()
        monkeypatch.setattr(reference, "CHUNK_BYTES", rows * row_bytes)
        out, lse = exact_attention(problem, dtype)
        assert max(calls) <= max(rows, 1) * problem.topk
        assert (out - whole).abs().max() <= TOLERANCE[dtype]
        assert (lse - whole_lse).nan_to_num(0.0).abs().max() <= TOLERANCE[dtype] * 10


def test_chosen_rows() -> None:
    problem = random_problem()
    out, lse = exact_attention(problem)
    rows = torch.tensor([40, 0, 57, 3, 3])
    part, part_lse = exact_attention(problem, rows=rows)
    assert (part - out[rows]).abs().max() <= TOLERANCE[torch.float64]
    assert torch.allclose(part_lse, lse[rows], rtol=1e-13, atol=0.0)
    none, none_lse = exact_attention(problem, rows=rows[:0])
    assert none.shape == (0, 16, 128) and none_lse.shape == (0, 16)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype: got torch\.bfloat16, supported: torch\.float64"):
        exact_attention(random_problem(), torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        ([1], "list"),
        (torch.tensor([1.0]), r"torch\.float32"),
        (torch.tensor([1], dtype=torch.int32), r"torch\.int32"),
        (torch.tensor(1), r"shape \(\)"),
        (torch.tensor([0, -1]), "-1"),
        (torch.tensor([3, 0]), "3"),
    ],
    ids=str,
)
def test_rows_that_are_none_are_refused(rows: Any, got: str) -> None:
    problem = paged_case([[0, 2], [1], []], prefixes=[383])
    with pytest.raises(
        (TypeError, ValueError), match=rf"^rows: got {got}, supported: int64 rows from 0 to 2"
    ):
        exact_attention(problem, rows=rows)


def test_a_problem_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^problem: got int, supported: AttentionProblem$"):
        exact_attention(3)  # type: ignore[arg-type]


def test_readable_values() -> None:
    problem = paged_case([[0, 2], [1], []], prefixes=[383])
    out, lse = exact_attention(problem)
    assert torch.allclose(out[:, 0, 0], torch.tensor([1.0, 1.0, 0.0]).double())
    assert lse[:, 5].tolist() == pytest.approx([math.log(256), math.log(128), -math.inf])


def test_nan_stays_in_its_row_and_head() -> None:
    problem = random_problem()
    expected, expected_lse = exact_attention(problem)
    q = problem.q.clone()
    row = int((expected_lse[:, 0] > -torch.inf).nonzero()[4])
    q[row, 3, 7] = math.nan
    out, lse = exact_attention(replaced(problem, q=q))
    assert out[row, 3].isnan().all() and lse[row, 3].isnan()
    out[row, 3], lse[row, 3] = expected[row, 3], expected_lse[row, 3]
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_memory_of_64k_context() -> None:
    """2,048 queries x 16 heads over 64K tokens: the whole process stays within 4 GiB.

    In float64; chunks are counted in bytes, so float32 needs no more.
    """
    code = """
import resource, pageweaver as pw
from pageweaver.common.supports import uniform
problem = pw.make_problem(uniform(2048, 65536))
out, lse = pw.exact_attention(problem)
assert out.shape == (2048, 16, 128) and bool(lse.isfinite().all())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    peak_bytes = int(done.stdout) * 1024
    assert 2**29 < peak_bytes < 4 * 2**30, f"{peak_bytes / 2**30:.2f} GiB"


def test_nrms() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert nrms(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert nrms(exact, exact) == 0.0
    assert math.isnan(nrms(torch.tensor([3.0, math.nan]), exact))
    # The error is taken in float64, also of BF16 outputs.
    assert nrms(exact.bfloat16(), exact.double() * (1 + 1e-9)) == pytest.approx(1e-9, rel=1e-6)


def test_v_of_one_gives_one() -> None:
    problem = paged_case(
        [[0, 1, 2]] * 40,
        prefixes=[340],
        q0=torch.linspace(-8, 8, 40),
        k0=lambda _, positions: (positions % 7 - 3).float(),
        v=constant(1.0),
    )
    out, _ = pw.exact_attention(problem)
    assert (out - 1).abs().max() <= TOLERANCE[torch.float64]
