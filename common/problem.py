"""The inputs of one sparse-prefill call, and every check on them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.selection import Selection

HEAD_DIM = 128
DEFAULT_SOFTMAX_SCALE = HEAD_DIM**-0.5
PAGE_SIZES = (64, 128)
GROUP_SIZES = (1, 2, 4, 8, 16)
MAX_TOPK = 32
MAX_TOTAL_Q = (2**31 - 1) // MAX_TOPK  # int32 numbers a KV head's selected pages
TILE_ROWS = 64  # rows of one tensor-core tile: TILE_ROWS // group_size queries
KV_DTYPES = (torch.float8_e4m3fn, torch.bfloat16)
# Tiles that the 132 multiprocessors of an H100 or H200 SXM hold at once, two each or more. A constant, so
# that sizes follow from shapes alone.
RESIDENT_TILES = 2 * 132

_INT32_MAX = 2**31 - 1
_FLOAT32 = torch.finfo(torch.float32)


def tile_queries(rows: int, group_size: int) -> int:
    """Queries that a tile of a union strategy takes.

    As many as fill its 64 rows; in a call so small that the GPU holds the tiles of half as many at once,
    half, and so on: more tiles work at a time, each over the shorter union of fewer queries. Outputs keep
    their bits.

    Parameters
    ----------
    rows : int
        ``num_kv_heads * total_q``.
    group_size : int
        Query heads a KV head.
    """
    queries = TILE_ROWS // group_size
    while queries > 1 and 2 * rows <= RESIDENT_TILES * queries:
        queries //= 2
    return queries


def _fail_type(name: str, value: object, wanted: str) -> None:
    raise TypeError(f"{name}: got {value}, supported: {wanted}")


def _fail_value(name: str, value: object, wanted: str) -> None:
    raise ValueError(f"{name}: got {value}, supported: {wanted}")


def _check_kind(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        _fail_type(name, type(value).__name__, wanted)


def _check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], ndim: int) -> None:
    wanted = " or ".join(str(d) for d in dtypes)
    if not isinstance(tensor, torch.Tensor):
        _fail_type(name, type(tensor).__name__, f"torch.Tensor of {wanted}")
        return
    if tensor.dtype not in dtypes:
        _fail_type(f"{name}.dtype", tensor.dtype, wanted)
    if tensor.ndim != ndim:
        _fail_value(f"{name}.shape", tuple(tensor.shape), f"{ndim} dimensions")
    if tensor.layout != torch.strided:
        _fail_type(f"{name}.layout", tensor.layout, "torch.strided")


def _check_unit_last(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        _fail_value(f"{name}.stride(-1)", tensor.stride(-1), "1 (other strides are free)")


def _check_scale(name: str, scale: object, device: torch.device) -> None:
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32:
            _fail_type(f"{name}.dtype", scale.dtype, "torch.float32, or a Python float")
        if scale.numel() != 1:
            _fail_value(f"{name}.shape", tuple(scale.shape), "one element")
        if scale.device != device:
            _fail_value(f"{name}.device", scale.device, f"{device}, the device of q")
        if scale.device.type == "cpu":
            _check_scale_value(name, scale.item())
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        _fail_type(name, type(scale).__name__, "float or a one-element torch.float32 tensor")
    else:
        _check_scale_value(name, scale)


def _check_scale_value(name: str, value: float) -> None:
    # What counts is the float32 that the arithmetic uses: 1e39 is infinite there, and 1e-60 is 0.
    if not _FLOAT32.tiny <= value <= _FLOAT32.max:
        _fail_value(name, value, f"a finite positive number, {_FLOAT32.tiny} to {_FLOAT32.max}")


@dataclass(frozen=True, eq=False)
class AttentionProblem:
    """One call of page-selected sparse attention over a paged KV cache.

    Validation happens at construction: types, shapes, strides and devices always; values of
    ``cu_seqlens_q``, ``seqused_k``, ``page_table`` and the scales where they lie in host memory
    (CPU tensors), never on a CUDA tensor, which would synchronise. Page ids in ``q2k_indices`` are
    data, not arguments: an id that is negative, past the request's pages, or names a page that
    starts after the query's position is ignored (contract of the semantics, points 2 and 3).

    Parameters
    ----------
    q : torch.Tensor
        bfloat16 ``[total_q, num_qo_heads, head_dim]``; packed queries of all requests, any strides,
        unit last.
    k_cache, v_cache : torch.Tensor
        float8_e4m3fn or bfloat16 ``[num_pages, page_size, num_kv_heads, head_dim]``; any page, token
        and head strides, unit last.
    q2k_indices : torch.Tensor
        int32 ``[num_kv_heads, total_q, topk]``; logical pages of the query's own request, any
        strides, any order, -1 and duplicates anywhere.
    cu_seqlens_q : torch.Tensor
        int32 ``[batch_size + 1]``; request boundaries in ``q``. Rows at or past the last boundary
        yield zeros and an LSE of -inf.
    seqused_k : torch.Tensor
        int32 ``[batch_size]``; KV length of each request, this chunk included: query ``i`` of request
        ``b`` sits at position ``seqused_k[b] - q_len[b] + i``.
    page_table : torch.Tensor
        int32 ``[batch_size, max_pages]``; logical to physical page.
    softmax_scale : float or torch.Tensor, optional
        Multiplies q.k before the softmax (Eq. 1); default ``head_dim ** -0.5``.
    k_scale, v_scale : float or torch.Tensor
        Dequantisation scales: the true key is ``k_cache * k_scale``. A float, or a one-element
        float32 tensor on the device of ``q``.

    Raises
    ------
    TypeError
        An argument has the wrong type or dtype.
    ValueError
        A shape, stride, device or host-known value is not supported. Both name the argument, the
        value and the supported set.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q2k_indices: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    page_table: torch.Tensor
    softmax_scale: float | torch.Tensor = DEFAULT_SOFTMAX_SCALE
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0

    def __post_init__(self) -> None:
        _check_tensor("q", self.q, (torch.bfloat16,), 3)
        _check_tensor("k_cache", self.k_cache, KV_DTYPES, 4)
        _check_tensor("v_cache", self.v_cache, KV_DTYPES, 4)
        _check_tensor("q2k_indices", self.q2k_indices, (torch.int32,), 3)
        _check_tensor("cu_seqlens_q", self.cu_seqlens_q, (torch.int32,), 1)
        _check_tensor("seqused_k", self.seqused_k, (torch.int32,), 1)
        _check_tensor("page_table", self.page_table, (torch.int32,), 2)
        self._check_shapes()
        self._check_memory()
        for name in ("softmax_scale", "k_scale", "v_scale"):
            _check_scale(name, getattr(self, name), self.q.device)
        if self.q.device.type == "cpu":
            self.check_values()

    def _check_shapes(self) -> None:
        total_q, num_qo_heads, head_dim = self.q.shape
        num_pages, page_size, num_kv_heads, kv_dim = self.k_cache.shape
        if head_dim != HEAD_DIM:
            _fail_value("q.shape[2] (head_dim)", head_dim, str(HEAD_DIM))
        if kv_dim != HEAD_DIM:
            _fail_value("k_cache.shape[3] (head_dim)", kv_dim, str(HEAD_DIM))
        if self.v_cache.shape != self.k_cache.shape:
            _fail_value(
                "v_cache.shape", tuple(self.v_cache.shape), f"{tuple(self.k_cache.shape)}, as k_cache"
            )
        if self.v_cache.dtype != self.k_cache.dtype:
            _fail_type("v_cache.dtype", self.v_cache.dtype, f"{self.k_cache.dtype}, as k_cache")
        if page_size not in PAGE_SIZES:
            _fail_value("k_cache.shape[1] (page_size)", page_size, str(PAGE_SIZES))
        if num_pages > _INT32_MAX:
            _fail_value("k_cache.shape[0] (num_pages)", num_pages, f"at most {_INT32_MAX}")
        if (
            num_kv_heads == 0
            or num_qo_heads % num_kv_heads
            or num_qo_heads // num_kv_heads not in GROUP_SIZES
        ):
            _fail_value(
                "num_qo_heads / num_kv_heads (group_size)",
                f"{num_qo_heads} / {num_kv_heads}",
                f"a group size in {GROUP_SIZES}",
            )
        heads, rows, topk = self.q2k_indices.shape
        if heads != num_kv_heads or rows != total_q:
            _fail_value(
                "q2k_indices.shape",
                tuple(self.q2k_indices.shape),
                f"[num_kv_heads, total_q, topk] = [{num_kv_heads}, {total_q}, 1..{MAX_TOPK}]"
                " (pass a token-major tensor transposed)",
            )
        if not 1 <= topk <= MAX_TOPK:
            _fail_value("q2k_indices.shape[2] (topk)", topk, f"1 to {MAX_TOPK}")
        if total_q > MAX_TOTAL_Q:
            _fail_value("q.shape[0] (total_q)", total_q, f"at most {MAX_TOTAL_Q}")
        if self.cu_seqlens_q.shape[0] < 1:
            _fail_value("cu_seqlens_q.shape", tuple(self.cu_seqlens_q.shape), "[batch_size + 1]")
        batch_size = self.cu_seqlens_q.shape[0] - 1
        if self.seqused_k.shape[0] != batch_size:
            _fail_value("seqused_k.shape", tuple(self.seqused_k.shape), f"[batch_size] = [{batch_size}]")
        if self.page_table.shape[0] != batch_size:
            _fail_value(
                "page_table.shape",
                tuple(self.page_table.shape),
                f"[batch_size, max_pages] = [{batch_size}, ...]",
            )

    def _check_memory(self) -> None:
        for name in ("q", "k_cache", "v_cache"):
            _check_unit_last(name, getattr(self, name))
        device = self.q.device
        for name in ("k_cache", "v_cache", "q2k_indices", "cu_seqlens_q", "seqused_k", "page_table"):
            other = getattr(self, name).device
            if other != device:
                _fail_value(f"{name}.device", other, f"{device}, the device of q")
        for name in ("q", "k_cache", "v_cache", "softmax_scale", "k_scale", "v_scale"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                _fail_value(
                    f"{name}.requires_grad", True, "False: this is inference; no gradient is computed"
                )

    def check_values(self) -> None:
        """Check the values of the metadata tensors; reads them, so it synchronises a CUDA device.

        Runs by itself on CPU tensors. For CUDA tensors it is the debug mode: call it yourself.

        Raises
        ------
        ValueError
            Boundaries that do not start at 0, fall, or pass ``total_q``; a KV length shorter than its
            queries or longer than the page table holds; a physical page outside the cache in an entry
            that the request uses.
        """
        boundaries = self.cu_seqlens_q.tolist()
        if boundaries[0] != 0 or any(b < a for a, b in pairwise(boundaries)):
            _fail_value("cu_seqlens_q", boundaries[:8], "non-decreasing boundaries that start at 0")
        if boundaries[-1] > self.total_q:
            _fail_value("cu_seqlens_q[-1]", boundaries[-1], f"at most total_q = {self.total_q}")
        page_counts = []
        for request, length in enumerate(self.seqused_k.tolist()):
            q_len = boundaries[request + 1] - boundaries[request]
            if length < q_len:
                _fail_value(f"seqused_k[{request}]", length, f"at least the request's {q_len} queries")
            page_counts.append(-(-length // self.page_size))
            if page_counts[-1] > self.max_pages:
                _fail_value(
                    f"seqused_k[{request}]",
                    length,
                    f"at most max_pages * page_size = {self.max_pages * self.page_size}",
                )
        if self.batch_size:
            used = torch.arange(self.max_pages)[None, :] < torch.tensor(page_counts)[:, None]
            table = self.page_table.cpu()
            bad = used & ((table < 0) | (table >= self.num_pages))
            if bad.any():
                request, page = (int(x) for x in bad.nonzero()[0])
                _fail_value(
                    f"page_table[{request}, {page}]", int(table[request, page]), f"0 to {self.num_pages - 1}"
                )

    @property
    def device(self) -> torch.device:
        """Device of every tensor of the problem."""
        return self.q.device

    @property
    def total_q(self) -> int:
        """Rows of ``q``, padding rows past ``cu_seqlens_q[-1]`` included."""
        return self.q.shape[0]

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements a head."""
        return self.q.shape[2]

    @property
    def num_pages(self) -> int:
        """Physical pages in the cache."""
        return self.k_cache.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads, each with its own selection."""
        return self.k_cache.shape[2]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def topk(self) -> int:
        """Columns of ``q2k_indices``."""
        return self.q2k_indices.shape[2]

    @property
    def batch_size(self) -> int:
        """Requests packed in the call."""
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def max_pages(self) -> int:
        """Logical pages that the page table can hold for a request."""
        return self.page_table.shape[1]

    @property
    def queries_per_tile(self) -> int:
        """Queries whose heads fill one 64-row tile: 4 at group size 16."""
        return TILE_ROWS // self.group_size

    @property
    def request_ids(self) -> torch.Tensor:
        """int64 ``[total_q]``: the request of every row; ``batch_size`` for rows past the last one."""
        rows = torch.arange(self.total_q, device=self.device)
        return torch.searchsorted(self.cu_seqlens_q[1:].long().contiguous(), rows, right=True)

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[total_q]``: position c_i of every row in its request; -1 past the last request."""
        rows = torch.arange(self.total_q, device=self.device)
        if self.batch_size == 0:
            return torch.full_like(rows, -1)
        own = self.request_ids
        request = own.clamp(max=self.batch_size - 1)
        ends = self.cu_seqlens_q[1:].long()[request]
        positions = self.seqused_k.long()[request] - ends + rows
        return torch.where(own < self.batch_size, positions, -1)

    @property
    def support(self) -> torch.Tensor:
        """S_i of Eq. 2 in canonical form: int64 ``[num_kv_heads, total_q, topk]``.

        Visible logical pages, ascending and unique, then -1. Everything that the contract ignores
        (ids out of range, future pages, duplicates, rows past the last request) is gone. Computed anew
        each time, like `positions`: a serving engine writes new ids into the same buffers.
        """
        return canonical_support(self.q2k_indices, self.positions, self.page_size, self.max_pages)

    def scale_tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One of the three scales as a 0-d tensor on the problem's device."""
        scale = getattr(self, name)
        if isinstance(scale, torch.Tensor):
            return scale.reshape(()).to(dtype)
        return torch.tensor(scale, dtype=dtype, device=self.device)


def canonical_support(
    indices: torch.Tensor, positions: torch.Tensor, page_size: int, max_pages: int
) -> torch.Tensor:
    """Tidy raw page ids into S_i of Eq. 2.

    Parameters
    ----------
    indices : torch.Tensor
        Integer ``[num_kv_heads, total_q, topk]``; raw ids, anything allowed.
    positions : torch.Tensor
        int64 ``[total_q]``; c_i, -1 for rows of no request.
    page_size, max_pages : int
        Tokens a page; ids at or past `max_pages` are dropped.

    Returns
    -------
    torch.Tensor
        int64, the shape of `indices`: visible pages ascending and unique, then -1.
    """
    ids = indices.long()
    # A page is visible when it starts at or before the query's position; the position lies inside the
    # request, so this bounds the id by the request's page count as well. The page table's width bounds
    # it again where lengths on a device were never checked.
    visible = (ids >= 0) & (ids < max_pages) & (ids * page_size <= positions[None, :, None])
    ids = torch.where(visible, ids, max_pages).sort(dim=2).values
    repeated = torch.zeros_like(visible)
    repeated[:, :, 1:] = ids[:, :, 1:] == ids[:, :, :-1]
    ids = torch.where(repeated, max_pages, ids).sort(dim=2).values
    return torch.where(ids < max_pages, ids, -1)


def selection_support(selection: Selection) -> torch.Tensor:
    """S_i of a selection that has no tensors yet: `canonical_support` of its ids, on the CPU."""
    lengths = selection.seqused_k
    return canonical_support(
        torch.from_numpy(selection.q2k_indices.copy()),
        torch.from_numpy(selection.positions.copy()),
        selection.page_size,
        -(-int(lengths.max()) // selection.page_size) if len(lengths) else 0,
    )


def check_selection(selection: Selection, group_size: int, kv_dtype: torch.dtype) -> None:
    """Check what a problem is to be made of.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what is supported.
    """
    _check_kind("selection", selection, Selection, "Selection")
    if selection.page_size not in PAGE_SIZES:
        _fail_value("selection.page_size", selection.page_size, str(PAGE_SIZES))
    if selection.topk > MAX_TOPK:
        _fail_value("selection.topk", selection.topk, f"1 to {MAX_TOPK}")
    _check_kind("group_size", group_size, int, "int")
    if group_size not in GROUP_SIZES:
        _fail_value("group_size", group_size, str(GROUP_SIZES))
    if kv_dtype not in KV_DTYPES:
        _fail_type("kv_dtype", repr(kv_dtype), " or ".join(map(str, KV_DTYPES)))


def _check_device(device: str | torch.device) -> torch.device:
    """A device that tensors can be put on."""
    _check_kind("device", device, (str, torch.device), "str or torch.device")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device: got {device!r}, supported: what torch names so, such as 'cpu' or 'cuda:0'"
        ) from error
    try:
        torch.empty(0, device=chosen)
    # Builds of torch without the device, and machines without it, answer in all these ways.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedDeviceError(
            f"device: got {str(device)!r}, supported: a device of this machine ({reason[:200]})"
        ) from error
    return chosen


def make_problem(
    selection: Selection,
    *,
    group_size: int = 16,
    kv_dtype: torch.dtype = torch.float8_e4m3fn,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> AttentionProblem:
    """Give a page selection random N(0, 1) queries, keys and values.

    Parameters
    ----------
    selection : Selection
        ``q2k_indices`` int32 ``[num_kv_heads, total_q, topk]`` with its boundaries and KV lengths.
    group_size : int
        Query heads a KV head.
    kv_dtype : torch.dtype
        float8_e4m3fn or bfloat16.
    seed : int
        Seeds the CPU generator: the same numbers on every device.
    device : str or torch.device
        Where the tensors go.

    Returns
    -------
    AttentionProblem
        Physical pages are a random permutation, as in a cache that has lived for a while.

    Raises
    ------
    TypeError, ValueError
        An argument is not supported; the message names it, its value and what is supported.
    UnsupportedDeviceError
        This machine, or this build of torch, lacks the device.
    MemoryError
        The caches do not fit in memory.
    """
    check_selection(selection, group_size, kv_dtype)
    _check_kind("seed", seed, int, "int")
    if not 0 <= seed < 2**64:
        _fail_value("seed", seed, "0 to 2**64 - 1")
    place = _check_device(device)
    generator = torch.Generator().manual_seed(seed)
    heads, total_q = selection.num_kv_heads, selection.total_q
    lengths = torch.from_numpy(selection.seqused_k.copy())
    page_counts = -(-lengths // selection.page_size)
    max_pages = int(page_counts.max()) if len(page_counts) else 1
    num_pages = max(int(page_counts.sum()), 1)
    shape = (num_pages, selection.page_size, heads, HEAD_DIM)
    try:
        q = torch.randn(total_q, heads * group_size, HEAD_DIM, generator=generator).bfloat16()
        k_cache, v_cache = (torch.randn(shape, generator=generator).to(kv_dtype) for _ in range(2))
    except RuntimeError as error:  # what torch's CPU allocator raises
        raise MemoryError(
            f"selection: got caches of shape {list(shape)}, which do not fit in memory"
        ) from error
    physical = torch.randperm(num_pages, generator=generator).int()
    page_table = torch.zeros(len(lengths), max_pages, dtype=torch.int32)
    start = 0
    for request, count in enumerate(page_counts.tolist()):
        page_table[request, :count] = physical[start : start + count]
        start += count
    return AttentionProblem(
        q=q.to(place),
        k_cache=k_cache.to(place),
        v_cache=v_cache.to(place),
        q2k_indices=torch.from_numpy(selection.q2k_indices.copy()).to(place),
        cu_seqlens_q=torch.from_numpy(selection.cu_seqlens_q.copy()).to(place),
        seqused_k=lengths.to(place),
        page_table=page_table.to(place),
    )
