"""Every field of a problem is checked before any work, in words: argument, value, and what is supported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pageweaver as pw
from pageweaver.common.problem import HEAD_DIM, canonical_support, make_problem, tile_queries
from pageweaver.common.supports import uniform
from pageweaver.strategies.query_union.cuda import cuda_layout

from .helpers import E4M3, INT32_MAX, INT32_MIN, paged_case, random_problem, replaced, visible_pages

TENSORS = ("q", "k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table")


def small(**changes: Any) -> pw.AttentionProblem:
    """8 queries of one request after 300 tokens, 3 pages; with some fields changed."""
    return replaced(paged_case([[0, 1, 2]] * 8, prefixes=[300]), **changes)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(error: type[Exception], words: list[str], **changes: Any) -> None:
    problem = small()
    with pytest.raises(error) as caught:
        replaced(problem, **changes)
    message = str(caught.value)
    for word in [*words, ": got ", ", supported: "]:
        assert word in message, f"{word!r} is not in {message!r}"
    # The one-call interface refuses alike, and before it touches the output.
    fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__} | changes
    if isinstance(fields["q"], torch.Tensor) and fields["q"].dtype == torch.bfloat16:
        out = torch.full(fields["q"].shape, 7.0, dtype=torch.bfloat16)
        with pytest.raises(error) as again:
            pw.sparse_prefill(**fields, out=out)
        assert str(again.value) == message and (out == 7.0).all()


def test_what_is_supported_is_accepted() -> None:
    problem = small()
    assert (problem.total_q, problem.num_qo_heads, problem.head_dim) == (8, 16, HEAD_DIM)
    assert (problem.num_kv_heads, problem.group_size, problem.topk) == (1, 16, 16)
    assert (problem.num_pages, problem.page_size, problem.max_pages, problem.batch_size) == (5, 128, 3, 1)
    assert problem.queries_per_tile == 4
    assert problem.softmax_scale == pytest.approx(1 / math.sqrt(128))
    assert problem.positions.tolist() == list(range(300, 308))
    problem.check_values()


@pytest.mark.parametrize("group_size", [1, 2, 4, 8, 16])
def test_small_calls_keep_multiprocessors_busy(group_size: int) -> None:
    """Half a tile where the GPU holds the tiles that this makes at once, and never otherwise."""
    full = 64 // group_size
    sizes = [tile_queries(rows, group_size) for rows in range(20_000)]
    assert sizes[0] == sizes[264] == 1 and sizes[-1] == full
    assert sizes == sorted(sizes) and set(sizes) == {full >> shift for shift in range(full.bit_length())}
    for rows, tile in enumerate(sizes):
        assert tile == 1 or -(-rows // (tile // 2)) > 264
        assert tile == full or -(-rows // tile) <= 264


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("value", [None, 1.0, [[1]], np.zeros((1, 1), dtype=np.int32)])
def test_not_a_tensor(name: str, value: Any) -> None:
    refused(TypeError, [f"{name}: got {type(value).__name__}", "torch.Tensor of"], **{name: value})


DTYPES: dict[str, tuple[list[torch.dtype], list[str]]] = {
    "q": ([torch.float16, torch.float32, torch.float64, E4M3, torch.int8], ["torch.bfloat16"]),
    "k_cache": (
        [torch.float16, torch.float32, torch.float8_e5m2, torch.uint8],
        ["torch.float8_e4m3fn or torch.bfloat16"],
    ),
    "v_cache": (
        [torch.float16, torch.float32, torch.float8_e5m2, torch.uint8],
        ["torch.float8_e4m3fn or torch.bfloat16"],
    ),
    **{
        name: ([torch.int64, torch.int16, torch.uint32, torch.float32, torch.bool], ["torch.int32"])
        for name in ("q2k_indices", "cu_seqlens_q", "seqused_k", "page_table")
    },
}


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, (dtypes, _) in DTYPES.items() for d in dtypes])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    value = getattr(small(), name).float().to(dtype)
    refused(TypeError, [f"{name}.dtype: got {dtype}", *DTYPES[name][1]], **{name: value})


def test_caches_of_two_dtypes() -> None:
    refused(
        TypeError,
        ["v_cache.dtype: got torch.bfloat16", "torch.float8_e4m3fn, as k_cache"],
        v_cache=small().v_cache.bfloat16(),
    )


@pytest.mark.parametrize("name", TENSORS)
def test_number_of_dimensions(name: str) -> None:
    value = getattr(small(), name)
    for other in (value[None], value[0]):
        refused(ValueError, [f"{name}.shape: got {tuple(other.shape)}", f"{value.ndim} dim"], **{name: other})


@pytest.mark.parametrize("name", TENSORS)
def test_sparse_layouts(name: str) -> None:
    value = getattr(small(), name)
    dtype = torch.bfloat16 if value.dtype == E4M3 else value.dtype  # float8 has no sparse form
    sparse = torch.zeros(value.shape, dtype=dtype).to_sparse()
    refused(TypeError, [f"{name}.layout: got torch.sparse_coo", "torch.strided"], **{name: sparse})


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("q", (8, 16, 64), ["q.shape[2] (head_dim): got 64", "128"]),
        ("q", (8, 16, 0), ["q.shape[2] (head_dim): got 0", "128"]),
        ("q", (8, 3, 128), ["(group_size): got 3 / 1", "(1, 2, 4, 8, 16)"]),
        ("q", (8, 0, 128), ["(group_size): got 0 / 1", "(1, 2, 4, 8, 16)"]),
        ("q", (7, 16, 128), ["q2k_indices.shape: got (1, 8, 16)", "[1, 7, 1..32]"]),
        ("k_cache", (5, 128, 1, 64), ["k_cache.shape[3] (head_dim): got 64", "128"]),
        ("v_cache", (5, 128, 1, 64), ["v_cache.shape: got (5, 128, 1, 64)", "(5, 128, 1, 128), as k_cache"]),
        ("v_cache", (4, 128, 1, 128), ["v_cache.shape: got (4, 128, 1, 128)", "as k_cache"]),
        ("v_cache", (5, 128, 2, 128), ["v_cache.shape: got (5, 128, 2, 128)", "as k_cache"]),
        ("q2k_indices", (1, 8, 0), ["q2k_indices.shape[2] (topk): got 0", "1 to 32"]),
        ("q2k_indices", (1, 8, 33), ["q2k_indices.shape[2] (topk): got 33", "1 to 32"]),
        ("q2k_indices", (8, 1, 16), ["q2k_indices.shape: got (8, 1, 16)", "token-major tensor transposed"]),
        ("q2k_indices", (2, 8, 16), ["q2k_indices.shape: got (2, 8, 16)", "[1, 8, 1..32]"]),
        ("cu_seqlens_q", (0,), ["cu_seqlens_q.shape: got (0,)", "[batch_size + 1]"]),
        ("seqused_k", (2,), ["seqused_k.shape: got (2,)", "[batch_size] = [1]"]),
        ("seqused_k", (0,), ["seqused_k.shape: got (0,)", "[batch_size] = [1]"]),
        ("page_table", (2, 3), ["page_table.shape: got (2, 3)", "[1, ...]"]),
    ],
)
def test_shapes(name: str, shape: tuple[int, ...], words: list[str]) -> None:
    value = torch.zeros(shape, dtype=torch.float32).to(getattr(small(), name).dtype)
    refused(ValueError, words, **{name: value})


@pytest.mark.parametrize(("page_size", "heads"), [(16, 1), (127, 1), (256, 1), (0, 1), (128, 0), (128, 3)])
def test_shapes_of_both_caches(page_size: int, heads: int) -> None:
    cache = torch.zeros(5, page_size, heads, 128).to(E4M3)
    if page_size != 128:
        words = [f"k_cache.shape[1] (page_size): got {page_size}", "(64, 128)"]
    else:
        words = [f"(group_size): got 16 / {heads}", "(1, 2, 4, 8, 16)"]
    refused(ValueError, words, k_cache=cache, v_cache=cache)


def test_more_pages_or_rows_than_int32_counts() -> None:
    # Views of one page: no memory behind them.
    page = torch.zeros(1, 128, 1, 128, dtype=torch.bfloat16).expand(2**31, -1, -1, -1)
    refused(ValueError, ["k_cache.shape[0] (num_pages): got 2147483648"], k_cache=page, v_cache=page)
    rows = 2**31 // 32
    with pytest.raises(ValueError, match=rf"q\.shape\[0\] \(total_q\): got {rows}, supported: at most"):
        small(
            q=torch.zeros(1, 1, 128, dtype=torch.bfloat16).expand(rows, -1, -1),
            q2k_indices=int32([[-1]]).expand(1, rows, 1),
        )


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_last_stride(name: str) -> None:
    value = getattr(small(), name)
    for view in (value.repeat_interleave(2, dim=-1)[..., ::2], value[..., :1].expand(value.shape)):
        stride = view.stride(-1)
        refused(
            ValueError, [f"{name}.stride(-1): got {stride}", "1 (other strides are free)"], **{name: view}
        )


@pytest.mark.parametrize("name", TENSORS[1:])
def test_devices(name: str) -> None:
    value = getattr(small(), name).to("meta")
    refused(ValueError, [f"{name}.device: got meta", "cpu, the device of q"], **{name: value})


@pytest.mark.parametrize("name", ["softmax_scale", "k_scale", "v_scale"])
def test_scales_on_another_device(name: str) -> None:
    value = torch.ones((), device="meta")
    refused(ValueError, [f"{name}.device: got meta", "cpu, the device of q"], **{name: value})


def test_values_are_read_on_the_host_only() -> None:
    """A device's values are nobody's business: reading them would synchronise."""
    fields = {name: getattr(small(), name).to("meta") for name in TENSORS}
    problem = pw.AttentionProblem(**fields, k_scale=torch.ones(1, device="meta"))
    assert problem.device.type == "meta" and problem.total_q == 8
    with pytest.raises(pw.UnsupportedDeviceError, match="meta"):
        pw.load("union8", backend="cuda").prepare(problem)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("cu_seqlens_q", [1, 8], ["cu_seqlens_q: got [1, 8]", "start at 0"]),
        ("cu_seqlens_q", [-1, 8], ["cu_seqlens_q: got [-1, 8]", "start at 0"]),
        ("cu_seqlens_q", [0, -1], ["cu_seqlens_q: got [0, -1]", "non-decreasing"]),
        ("cu_seqlens_q", [0, 9], ["cu_seqlens_q[-1]: got 9", "at most total_q = 8"]),
        ("seqused_k", [7], ["seqused_k[0]: got 7", "the request's 8 queries"]),
        ("seqused_k", [-1], ["seqused_k[0]: got -1", "the request's 8 queries"]),
        ("seqused_k", [385], ["seqused_k[0]: got 385", "max_pages * page_size = 384"]),
        ("seqused_k", [INT32_MAX], [f"seqused_k[0]: got {INT32_MAX}", "384"]),
        ("page_table", [[1, 2, 5]], ["page_table[0, 2]: got 5", "0 to 4"]),
        ("page_table", [[-1, 2, 3]], ["page_table[0, 0]: got -1", "0 to 4"]),
        ("page_table", [[1, INT32_MIN, 3]], [f"page_table[0, 1]: got {INT32_MIN}", "0 to 4"]),
        ("page_table", [[1, 2, INT32_MAX]], [f"page_table[0, 2]: got {INT32_MAX}", "0 to 4"]),
    ],
)
def test_values(name: str, value: Any, words: list[str]) -> None:
    refused(ValueError, words, **{name: torch.tensor(value, dtype=torch.int32)})


def test_values_of_a_second_request() -> None:
    problem = paged_case([[0]] * 4, prefixes=[0, 200], lengths=[2, 2])
    with pytest.raises(ValueError, match=r"cu_seqlens_q: got \[0, 3, 2\]"):
        replaced(problem, cu_seqlens_q=int32(0, 3, 2))
    with pytest.raises(ValueError, match=r"seqused_k\[1\]: got 1, supported: at least the request's 2"):
        replaced(problem, seqused_k=int32(2, 1))
    with pytest.raises(ValueError, match=r"page_table\[1, 1\]: got 99"):
        replaced(problem, page_table=int32([1, 99], [2, 99]))
    # Entries past a request's pages may hold anything.
    replaced(problem, page_table=int32([1, 99], [2, 3]))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "softmax_scale", "k_scale", "v_scale"])
def test_gradients_are_refused(name: str) -> None:
    value = getattr(small(), name)
    changes: dict[str, Any] = {name: value.clone() if isinstance(value, torch.Tensor) else torch.ones(1)}
    if "cache" in name:  # float8 takes no gradient, a BF16 cache does
        changes = {other: getattr(small(), other).bfloat16() for other in ("k_cache", "v_cache")}
    changes[name].requires_grad_(True)
    refused(ValueError, [f"{name}.requires_grad: got True", "no gradient"], **changes)


class TestSupport:
    """S_i in canonical form, the one place where messy ids are tidied."""

    @pytest.mark.parametrize("seed", range(4))
    def test_equals_the_contract_in_words(self, seed: int) -> None:
        problem = random_problem(num_kv_heads=2, group_size=4, topk=9, page_size=64, seed=seed)
        support = problem.support
        assert support.dtype == torch.int64 and support.shape == problem.q2k_indices.shape
        expected = visible_pages(problem)
        assert any(expected[0]) and not all(expected[0])
        for head in range(2):
            for row in range(problem.total_q):
                pages = expected[head][row]
                assert support[head, row].tolist() == pages + [-1] * (9 - len(pages))

    def test_ids_that_no_product_may_overflow(self) -> None:
        ids = int32([[INT32_MAX, INT32_MIN, 2**30, 2**25, 16777216, 0, -1, 3]])
        support = canonical_support(ids, torch.tensor([300]), 128, 4)
        assert support.tolist() == [[[0] + [-1] * 7]]

    def test_width_of_the_table_bounds_ids(self) -> None:
        # Lengths on a device are not checked: the table's width must hold by itself.
        support = canonical_support(int32([[0, 1, 2, 3]]), torch.tensor([10_000]), 128, 2)
        assert support.tolist() == [[[0, 1, -1, -1]]]

    def test_positions_and_requests(self) -> None:
        problem = paged_case(torch.zeros(1, 9, 16, dtype=torch.int32), prefixes=[5, 9, 0], lengths=[3, 0, 2])
        assert problem.positions.tolist() == [5, 6, 7, 0, 1, -1, -1, -1, -1]
        assert problem.request_ids.tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3]


class TestMakeProblem:
    @pytest.mark.parametrize("kv_dtype", [E4M3, torch.bfloat16])
    def test_carries_the_selection(self, kv_dtype: torch.dtype) -> None:
        selection = uniform(
            query_lens=[9, 0, 3], prefix_lens=[200, 5, 0], topk=4, page_size=64, num_kv_heads=2
        )
        problem = make_problem(selection, group_size=4, kv_dtype=kv_dtype, seed=3)
        assert problem.k_cache.dtype == kv_dtype and problem.num_qo_heads == 8
        assert torch.equal(problem.q2k_indices, torch.from_numpy(selection.q2k_indices.copy()))
        used = [-(-int(n) // 64) for n in selection.seqused_k]
        mapped = [int(p) for row, n in zip(problem.page_table, used, strict=True) for p in row[:n]]
        assert sorted(mapped) == list(range(sum(used))) and mapped != sorted(mapped)

    def test_seeds(self) -> None:
        selection = uniform(9, 200, topk=4)
        one, same, other = (make_problem(selection, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one.q, same.q) and not torch.equal(one.q, other.q)

    def test_no_requests(self) -> None:
        selection = uniform(query_lens=[], prefix_lens=[])
        problem: pw.AttentionProblem = make_problem(selection)
        build: Callable[..., torch.Tensor] = pw.load("union8")
        assert build(problem).shape == (0, 16, 128)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"selection": None}, TypeError, "selection: got NoneType, supported: Selection"),
        ({"selection": np.zeros((1, 8, 4))}, TypeError, "selection: got ndarray, supported: Selection"),
        ({"selection": "synthetic:low"}, TypeError, "selection: got str, supported: Selection"),
        ({"page_size": 16}, ValueError, "selection.page_size: got 16, supported: (64, 128)"),
        ({"topk": 33}, ValueError, "selection.topk: got 33, supported: 1 to 32"),
        ({"group_size": 3}, ValueError, "group_size: got 3, supported: (1, 2, 4, 8, 16)"),
        ({"group_size": -1}, ValueError, "group_size: got -1, supported: (1, 2, 4, 8, 16)"),
        ({"group_size": 0}, ValueError, "group_size: got 0, supported: (1, 2, 4, 8, 16)"),
        ({"group_size": 2.0}, TypeError, "group_size: got float, supported: int"),
        ({"group_size": True}, TypeError, "group_size: got bool, supported: int"),
        ({"group_size": None}, TypeError, "group_size: got NoneType, supported: int"),
        ({"kv_dtype": "fp8"}, TypeError, "kv_dtype: got 'fp8', supported: torch.float8_e4m3fn or torch.b"),
        ({"kv_dtype": torch.float16}, TypeError, "kv_dtype: got torch.float16, supported: torch.float8"),
        ({"kv_dtype": None}, TypeError, "kv_dtype: got None, supported: torch.float8_e4m3fn or torch.b"),
        ({"seed": "a"}, TypeError, "seed: got str, supported: int"),
        ({"seed": 1.0}, TypeError, "seed: got float, supported: int"),
        ({"seed": -1}, ValueError, "seed: got -1, supported: 0 to 2**64 - 1"),
        ({"seed": 2**64}, ValueError, f"seed: got {2**64}, supported: 0 to 2**64 - 1"),
        ({"device": "gpu"}, ValueError, "device: got 'gpu', supported: what torch names so"),
        ({"device": ""}, ValueError, "device: got '', supported: what torch names so"),
        ({"device": None}, TypeError, "device: got NoneType, supported: str or torch.device"),
        ({"device": "cuda:99"}, pw.UnsupportedDeviceError, "device: got 'cuda:99', supported: a device of"),
    ],
)
def test_make_problem_names_the_argument(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    sizes = {name: changes.pop(name) for name in ("page_size", "topk") if name in changes}
    ids = np.zeros((1, 8, sizes.get("topk", 4)), np.int32)
    selection = pw.Selection("a", ids, np.array([0, 8]), np.array([64]), sizes.get("page_size", 64))
    with pytest.raises(error) as caught:
        make_problem(**{"selection": selection, **changes})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("group_size", [1, 16])
def test_buffers_of_a_call_hold_every_smaller_one(group_size: int) -> None:
    """A smaller call has more tiles a group."""

    def sizes(rows: int) -> dict[str, int]:
        problem = random_problem(lengths=(rows,), prefixes=(300,), past_rows=0, group_size=group_size)
        layout = cuda_layout(problem, 128 // group_size)
        return {name: math.prod(shape) for name, (shape, _) in layout.items()}

    large = sizes(529)
    for rows in (1, 60, 264, 265, 528):
        small = sizes(rows)
        assert small.keys() == large.keys() and all(small[name] <= large[name] for name in large)
        # A tile of one query each would fit.
        assert small["tile_counts"] >= rows
