"""The per-query baseline as a Triton kernel: one program a query and KV head, its pages in a loop.

This is the design that serving engines run today. Programs share nothing: a page that eight neighbouring
queries select is loaded and widened eight times, and a tensor-core tile holds the 16 head-rows of one query.

Arithmetic ("bf16"): FP8 keys and values widen to BF16, which is exact; probabilities are rounded to BF16;
products accumulate in FP32; softmax statistics are FP32. A BF16 cache runs the same kernel.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from pageweaver.common.arithmetic import LOG2E, LOGIT_FACTOR_MAX
from pageweaver.common.problem import HEAD_DIM, AttentionProblem
from pageweaver.strategies.per_query.tuning import Tuning

__all__ = ["attend"]

_LOG2E = tl.constexpr(LOG2E)
_LOGIT_FACTOR_MAX = tl.constexpr(LOGIT_FACTOR_MAX)
_HEAD_DIM = tl.constexpr(HEAD_DIM)
_HALF_DIM = tl.constexpr(HEAD_DIM // 2)
_ROWS = tl.constexpr(16)  # the least M of a product; smaller groups leave rows unused

_VECTOR_BYTES = 16  # the widest load


@triton.jit
def _read_scale(scale: tl.tensor, is_pointer: tl.constexpr) -> tl.tensor:
    # One return: Triton compiles what follows a return too.
    if is_pointer:
        scale = tl.load(scale)
    return scale


@triton.jit
def _widen(x: tl.tensor) -> tl.tensor:
    # By way of FP32: the direct conversion of FP8 passes FP16 -> BF16, a quarter-rate instruction an element.
    if x.dtype != tl.bfloat16:
        x = x.to(tl.float32).to(tl.bfloat16)
    return x


@triton.jit
def _load_tokens(pointers: tl.tensor, visible: tl.tensor, masked: tl.constexpr) -> tl.tensor:
    # Unwritten slots may hold NaN, and 0 * NaN is NaN: they are not even read.
    return tl.load(pointers, mask=visible[:, None], other=0.0) if masked else tl.load(pointers)


@triton.jit
def _visit(
    queries: tl.tensor,
    factor: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    acc_0: tl.tensor,
    acc_1: tl.tensor,
    k_pointers: tl.tensor,
    v_pointers: tl.tensor,
    seen: tl.tensor,
    tokens: tl.constexpr,
    pairs: tl.constexpr,
    masked: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One step of online softmax over `tokens` keys, of which the first `seen` are visible if `masked`."""
    visible = tl.arange(0, tokens) < seen
    keys = _load_tokens(k_pointers, visible, masked)
    if pairs:
        both = _load_tokens(v_pointers, visible, masked)
        values_0 = (both & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        values_1 = (both >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        values_0 = _load_tokens(v_pointers, visible, masked)
        values_1 = _load_tokens(v_pointers + _HALF_DIM, visible, masked)
    logits = tl.dot(queries, tl.trans(_widen(keys))) * factor[:, None]
    if masked:
        logits = tl.where(visible[None, :], logits, -float("inf"))
    # Each step has a visible key, so the maximum is finite unless the query itself is not.
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    weights = tl.exp2(logits - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    weights = weights.to(tl.bfloat16)
    acc_0 = tl.dot(weights, _widen(values_0), acc_0 * rescale[:, None])
    acc_1 = tl.dot(weights, _widen(values_1), acc_1 * rescale[:, None])
    return new_max, row_sum, acc_0, acc_1


# Lengths and strides vary from call to call: specialising on their values would compile again for each.
# 64-bit strides make every offset 64 bits wide. `*_unit` says what strides are multiples of, in elements:
# they come divided by it, so that the compiler knows and loads 16 bytes at a time.
@triton.jit(
    do_not_specialize=[
        "batch_size", "max_pages", "topk", "q_row_stride", "q_head_stride",
        "k_page_stride", "k_token_stride", "k_head_stride",
        "v_page_stride", "v_token_stride", "v_head_stride",
        "ids_head_stride", "ids_row_stride", "ids_column_stride",
        "table_row_stride", "table_column_stride", "bounds_stride", "lengths_stride",
        "out_row_stride", "out_head_stride", "lse_row_stride", "lse_head_stride",
    ]
)  # fmt: skip
def _per_query(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    ids: tl.tensor,
    bounds: tl.tensor,
    lengths: tl.tensor,
    page_table: tl.tensor,
    softmax_scale: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    batch_size: tl.int32,
    max_pages: tl.int32,
    topk: tl.int32,
    q_row_stride: tl.int64,
    q_head_stride: tl.int64,
    k_page_stride: tl.int64,
    k_token_stride: tl.int64,
    k_head_stride: tl.int64,
    v_page_stride: tl.int64,
    v_token_stride: tl.int64,
    v_head_stride: tl.int64,
    ids_head_stride: tl.int64,
    ids_row_stride: tl.int64,
    ids_column_stride: tl.int64,
    table_row_stride: tl.int64,
    table_column_stride: tl.int64,
    bounds_stride: tl.int64,
    lengths_stride: tl.int64,
    out_row_stride: tl.int64,
    out_head_stride: tl.int64,
    lse_row_stride: tl.int64,
    lse_head_stride: tl.int64,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    page_size: tl.constexpr,
    columns: tl.constexpr,
    scale_pointers: tl.constexpr,
    with_lse: tl.constexpr,
    row_unit: tl.constexpr,
    k_unit: tl.constexpr,
    v_unit: tl.constexpr,
    tokens: tl.constexpr,
    pairs: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // num_kv_heads).to(tl.int64)
    head = program % num_kv_heads

    # Request: the first that ends past the row; batch_size where none does.
    request = tl.full([], 0, tl.int32)
    high = batch_size
    while request < high:
        middle = (request + high) // 2
        if tl.load(bounds + (middle + 1) * bounds_stride) <= row:
            request = middle + 1
        else:
            high = middle
    live = request < batch_size

    # Keys up to the row's own position; none where the row belongs to no request.
    length = tl.load(lengths + request * lengths_stride, mask=live, other=0)
    request_end = tl.load(bounds + (request + 1) * bounds_stride, mask=live, other=0)
    seen = tl.where(live, tl.maximum(length - request_end + row.to(tl.int32) + 1, 0), 0)
    whole_pages = tl.minimum(seen // page_size, max_pages)
    rest = seen - whole_pages * page_size

    # Pages seen whole, ranked: they run ascending and once each, so that neither the order of the ids nor
    # repetition can touch a bit. An id that fails `whole` is never dereferenced.
    column = tl.arange(0, columns)
    page_ids = ids + head * ids_head_stride + row * ids_row_stride
    page = tl.load(page_ids + column * ids_column_stride, mask=live & (column < topk), other=-1)
    earlier = (page[:, None] == page[None, :]) & (column[:, None] < column[None, :])
    whole = (page >= 0) & (page < whole_pages) & (tl.sum(earlier.to(tl.int32), 0) == 0)
    lower = whole[:, None] & (page[:, None] < page[None, :])
    rank = tl.where(whole, tl.sum(lower.to(tl.int32), 0), -1)
    count = tl.sum(whole.to(tl.int32), 0)
    pages = page_table + request * table_row_stride
    physical = tl.load(pages + page * table_column_stride, mask=whole, other=0)

    # Queries: a power of two, which is exact, brings each head-row's largest element into [1, 4), so that
    # products of a huge query stay finite.
    slot = tl.arange(0, _ROWS)
    dim = tl.arange(0, _HEAD_DIM)
    qo_head = head * group_size + slot
    in_group = slot < group_size
    q_rows = q + row * (q_row_stride * row_unit) + qo_head[:, None] * (q_head_stride * row_unit)
    raw = tl.load(q_rows + dim[None, :], mask=(in_group & live)[:, None], other=0.0).to(tl.float32)
    exponent = tl.max(tl.abs(raw), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    queries = (raw * shrink[:, None]).to(tl.bfloat16)
    factor = _read_scale(softmax_scale, scale_pointers[0]) * _read_scale(k_scale, scale_pointers[1]) * _LOG2E
    factor = tl.minimum((exponent << 23).to(tl.float32, bitcast=True) * factor, _LOGIT_FACTOR_MAX)

    # Tiles of the first step of page 0; steps add to them.
    token = tl.arange(0, tokens)[:, None]
    half = tl.arange(0, _HALF_DIM)[None, :]
    k_page, k_token = k_page_stride * k_unit, k_token_stride * k_unit
    v_page, v_token = v_page_stride * v_unit, v_token_stride * v_unit
    k_tile = k_cache + head * (k_head_stride * k_unit) + token * k_token + dim[None, :]
    if pairs:
        v_cache = v_cache.to(tl.pointer_type(tl.uint16))
    v_tile = v_cache + head * (v_head_stride * v_unit) + token * v_token + half

    row_max = tl.full([_ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([_ROWS], tl.float32)
    acc_0 = tl.zeros([_ROWS, _HALF_DIM], tl.float32)
    acc_1 = tl.zeros([_ROWS, _HALF_DIM], tl.float32)
    steps: tl.constexpr = page_size // tokens
    for step in range(count * steps):
        base = tl.sum(tl.where(rank == step // steps, physical, 0), 0).to(tl.int64)
        first = step % steps * tokens
        k_step = k_tile + (base * k_page + first * k_token)
        v_step = v_tile + (base * v_page + first * v_token)
        row_max, row_sum, acc_0, acc_1 = _visit(
            queries, factor, row_max, row_sum, acc_0, acc_1, k_step, v_step, tokens, tokens, pairs, False
        )

    # Only the page of the row's own position is seen in part; being the highest, it comes last.
    selected = tl.sum((page == whole_pages).to(tl.int32), 0) > 0
    if selected & (rest > 0) & (whole_pages < max_pages):
        base = tl.load(pages + whole_pages * table_column_stride).to(tl.int64)
        for step in range(tl.cdiv(rest, tokens)):
            first = step * tokens
            left = rest - first
            k_step = k_tile + (base * k_page + first * k_token)
            v_step = v_tile + (base * v_page + first * v_token)
            row_max, row_sum, acc_0, acc_1 = _visit(
                queries, factor, row_max, row_sum, acc_0, acc_1, k_step, v_step, left, tokens, pairs, True
            )

    # A row without a key is 0 with LSE -inf. The accumulators hold even and odd dimensions, or halves.
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    acc = tl.join(acc_0, acc_1)
    if not pairs:
        acc = tl.permute(acc, (0, 2, 1))
    result = tl.reshape(acc, (_ROWS, _HEAD_DIM)) * (_read_scale(v_scale, scale_pointers[2]) / total)[:, None]
    result = tl.where(empty[:, None], 0.0, result).to(tl.bfloat16)
    out_rows = out + row * (out_row_stride * row_unit) + qo_head[:, None] * (out_head_stride * row_unit)
    tl.store(out_rows + dim[None, :], result, mask=in_group[:, None])
    if with_lse:
        row_lse = tl.where(empty, -float("inf"), (row_max + tl.log2(total)) / _LOG2E)
        tl.store(lse + row * lse_row_stride + qo_head * lse_head_stride, row_lse, mask=in_group)


def attend(problem: AttentionProblem, out: torch.Tensor, lse: torch.Tensor | None, tuning: Tuning) -> None:
    """Launch the kernel: every row of `out` and `lse` is written.

    Parameters
    ----------
    problem : AttentionProblem
        On a CUDA device; on the CPU only under Triton's interpreter.
    out : torch.Tensor
        bfloat16 ``[total_q, num_qo_heads, head_dim]``, any strides, unit last.
    lse : torch.Tensor or None
        float32 ``[total_q, num_qo_heads]``, natural log, any strides.
    tuning : Tuning

    Notes
    -----
    Runs on the current stream of the tensors' device, without a host synchronisation. One compilation
    serves all lengths, strides and batch sizes; alignment to 16 bytes, sizes of heads and pages, and which of
    the scales are tensors select another.
    """
    programs = problem.total_q * problem.num_kv_heads
    if programs == 0:
        return
    k_cache, v_cache = problem.k_cache, problem.v_cache
    row_unit = _unit(problem.q, out)
    k_unit, v_unit = _unit(k_cache), _unit(v_cache)
    pairs = tuning.pairs and v_cache.dtype == torch.float8_e4m3fn and v_unit > 1
    scales = (problem.softmax_scale, problem.k_scale, problem.v_scale)
    lse_strides = (0, 0) if lse is None else lse.stride()
    device = problem.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        # One axis: the others end at 65,535.
        _per_query[(programs,)](
            problem.q,
            k_cache,
            v_cache,
            problem.q2k_indices,
            problem.cu_seqlens_q,
            problem.seqused_k,
            problem.page_table,
            *(scale if isinstance(scale, torch.Tensor) else float(scale) for scale in scales),
            out,
            lse,
            problem.batch_size,
            problem.max_pages,
            problem.topk,
            *(stride // row_unit for stride in problem.q.stride()[:2]),
            *(stride // k_unit for stride in k_cache.stride()[:3]),
            *(stride // v_unit for stride in v_cache.stride()[:3]),
            *problem.q2k_indices.stride(),
            *problem.page_table.stride(),
            *problem.cu_seqlens_q.stride(),
            *problem.seqused_k.stride(),
            *(stride // row_unit for stride in out.stride()[:2]),
            *lse_strides,
            num_kv_heads=problem.num_kv_heads,
            group_size=problem.group_size,
            page_size=problem.page_size,
            columns=triton.next_power_of_2(problem.topk),
            scale_pointers=tuple(isinstance(scale, torch.Tensor) for scale in scales),
            with_lse=lse is not None,
            row_unit=row_unit,
            k_unit=k_unit,
            # With pairs the kernel counts 16-bit elements.
            v_unit=v_unit // 2 if pairs else v_unit,
            tokens=min(tuning.tokens, problem.page_size),
            pairs=pairs,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )


def _unit(*tensors: torch.Tensor) -> int:
    """Elements of 16 bytes if every address of a last dimension is a multiple of that, else 1."""
    elements = _VECTOR_BYTES // tensors[0].element_size()
    for tensor in tensors:
        if tensor.data_ptr() % _VECTOR_BYTES:
            return 1
        # The stride of a dimension of one is never used; it may be anything.
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
            if size > 1 and stride % elements:
                return 1
    return elements
