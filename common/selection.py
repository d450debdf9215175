"""Page selections.

A selection is what an indexer hands to sparse attention: for every query and KV head the logical KV pages
that the query may read (S_i of Eq. 3). Nothing in this package adds or removes an edge of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["INT32_MAX", "Selection"]

INT32_MAX = 2**31 - 1


def _as_int32(argument: str, value: Any, ndim: int, shape_in_words: str) -> NDArray[np.int32]:
    """Return `value` as a read-only contiguous int32 array that no caller can write through."""
    array = np.asarray(value)
    if array.size == 0 and not np.issubdtype(array.dtype, np.integer):
        array = array.astype(np.int32)  # an empty list has no dtype of its own
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{argument}: got {array.dtype}, supported: integer dtypes (stored as int32)")
    if array.ndim != ndim:
        raise ValueError(f"{argument}: got {tuple(array.shape)}, supported: {shape_in_words}")
    info = np.iinfo(array.dtype)
    if array.size and (info.max > INT32_MAX or info.min < -(2**31)):
        low, high = int(array.min()), int(array.max())
        if low < -(2**31) or high > INT32_MAX:
            raise ValueError(f"{argument}: got values from {low} to {high}, supported: the int32 range")
    # Always a copy: a read-only array can have a writable view or base that the caller keeps.
    result = np.array(array, dtype=np.int32, order="C", copy=True)
    result.setflags(write=False)
    return result


@dataclass(frozen=True, eq=False)
class Selection:
    """One layer's page selection.

    Parameters
    ----------
    name : str
        For example ``austen-a.L4.h0`` or ``synthetic.low``. Not empty, no ``:``, which
        `resolve_selection` splits at.
    q2k_indices : int array, [num_kv_heads, total_q, topk]
        Logical pages of the query's own request; -1 is nothing. Any order, -1 and duplicates anywhere. Ids
        that name no visible page are kept as they are: the strategies ignore them, and an input that must
        not be tidied on the way to a test is a legitimate input.
    cu_seqlens_q : int array, [batch_size + 1]
        Request boundaries in the query rows: starts at 0, does not decrease, ends at or before ``total_q``.
        Rows past its last value belong to no request.
    seqused_k : int array, [batch_size]
        KV length of each request in tokens, this chunk included; at least the request's number of queries.
        Query i of request b sits at position ``seqused_k[b] - query_len[b] + i``.
    page_size : int
        Tokens in a page.
    metadata : mapping of str to JSON values
        Source model, text, layer, kv_head, rule and so on.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what is supported.

    Notes
    -----
    Arrays become read-only int32 copies, so that `sha256` stays true for the life of the object.
    """

    name: str
    q2k_indices: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]
    seqused_k: NDArray[np.int32]
    page_size: int = 128
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name: got {type(self.name).__name__}, supported: str")
        if not self.name or ":" in self.name:
            raise ValueError(f"name: got {self.name!r}, supported: a non-empty string without ':'")
        indices = _as_int32("q2k_indices", self.q2k_indices, 3, "[num_kv_heads, total_q, topk]")
        if indices.shape[0] < 1 or indices.shape[2] < 1:
            raise ValueError(
                f"q2k_indices: got {indices.shape}, supported: [num_kv_heads >= 1, total_q, topk >= 1]"
            )
        boundaries = _as_int32("cu_seqlens_q", self.cu_seqlens_q, 1, "[batch_size + 1]")
        lengths = _as_int32("seqused_k", self.seqused_k, 1, "[batch_size]")
        if boundaries.size < 1 or boundaries[0] != 0:
            raise ValueError(
                f"cu_seqlens_q: got {_shorten(boundaries)}, supported: at least one value, the first 0"
            )
        query_lens = np.diff(boundaries.astype(np.int64))
        if (query_lens < 0).any():
            raise ValueError(
                f"cu_seqlens_q: got {_shorten(boundaries)}, supported: values that never decrease"
            )
        if int(boundaries[-1]) > indices.shape[1]:
            raise ValueError(
                f"cu_seqlens_q[-1]: got {int(boundaries[-1])}, supported: at most total_q, {indices.shape[1]}"
            )
        if lengths.size != boundaries.size - 1:
            raise ValueError(
                f"seqused_k: got {lengths.size} values, supported: one per request of cu_seqlens_q,"
                f" {boundaries.size - 1}"
            )
        short = np.flatnonzero(lengths < query_lens)
        if short.size:
            b = int(short[0])
            raise ValueError(
                f"seqused_k[{b}]: got {int(lengths[b])}, supported: at least the request's"
                f" {int(query_lens[b])} queries (the KV length includes this chunk)"
            )
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int | np.integer):
            raise TypeError(f"page_size: got {type(self.page_size).__name__}, supported: int")
        if not 1 <= self.page_size <= INT32_MAX:
            raise ValueError(f"page_size: got {self.page_size}, supported: 1 to {INT32_MAX} tokens")
        if not isinstance(self.metadata, Mapping):
            raise TypeError(f"metadata: got {type(self.metadata).__name__}, supported: a mapping")
        object.__setattr__(self, "q2k_indices", indices)
        object.__setattr__(self, "cu_seqlens_q", boundaries)
        object.__setattr__(self, "seqused_k", lengths)
        object.__setattr__(self, "page_size", int(self.page_size))
        object.__setattr__(self, "metadata", dict(self.metadata))

    @property
    def num_kv_heads(self) -> int:
        """KV heads, each with its own selection."""
        return int(self.q2k_indices.shape[0])

    @property
    def total_q(self) -> int:
        """Query rows, those past the last request included."""
        return int(self.q2k_indices.shape[1])

    @property
    def topk(self) -> int:
        """Columns: the most pages a query may select."""
        return int(self.q2k_indices.shape[2])

    @property
    def batch_size(self) -> int:
        """Requests."""
        return int(self.seqused_k.shape[0])

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Position of every query in its request, [total_q] int64; -1 for rows past ``cu_seqlens_q[-1]``."""
        boundaries = self.cu_seqlens_q.astype(np.int64)
        query_lens = np.diff(boundaries)
        # Row r of request b sits at seqused_k[b] - query_len[b] + (r - boundaries[b]).
        offsets = self.seqused_k - query_lens - boundaries[:-1]
        positions = np.full(self.total_q, -1, dtype=np.int64)
        used = int(boundaries[-1])
        positions[:used] = np.arange(used) + np.repeat(offsets, query_lens)
        positions.setflags(write=False)
        return positions

    @cached_property
    def sha256(self) -> str:
        """Hex digest of everything that decides what is read.

        SHA-256 over, in order: `q2k_indices` (contiguous little-endian int32), its three sizes
        (little-endian int64), `cu_seqlens_q`, `seqused_k` (little-endian int32) and `page_size`
        (little-endian int64). The name and the metadata do not enter.
        """
        digest = hashlib.sha256()
        digest.update(np.ascontiguousarray(self.q2k_indices, dtype="<i4").tobytes())
        digest.update(np.array(self.q2k_indices.shape, dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(self.cu_seqlens_q, dtype="<i4").tobytes())
        digest.update(np.ascontiguousarray(self.seqused_k, dtype="<i4").tobytes())
        digest.update(np.array(self.page_size, dtype="<i8").tobytes())
        return digest.hexdigest()

    @property
    def tail_rows(self) -> int:
        """Most rows of a `tail`: queries of the last request that has any, 0 where none has."""
        filled = np.diff(self.cu_seqlens_q)
        return int(filled[filled > 0][-1]) if filled.any() else 0

    def tail(self, rows: int) -> Selection:
        """Return the last `rows` queries of the last request that has any, as a selection of one request.

        Parameters
        ----------
        rows : int
            1 to `tail_rows`, that request's number of queries. Its `seqused_k` stays, so that positions do
            too.

        Returns
        -------
        Selection
            Named ``{name}.tail{rows}``.
        """
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
            raise TypeError(f"rows: got {type(rows).__name__}, supported: int")
        if self.batch_size == 0:
            raise ValueError("batch_size: got 0, supported by tail: at least 1")
        last = int(self.cu_seqlens_q[-1])
        if last == 0:
            raise ValueError("cu_seqlens_q[-1]: got 0, supported by tail: at least 1 query in a request")
        if not 1 <= rows <= self.tail_rows:
            raise ValueError(f"rows: got {rows}, supported: 1 to the last request's {self.tail_rows} queries")
        return Selection(
            name=f"{self.name}.tail{rows}",
            q2k_indices=self.q2k_indices[:, last - rows : last],
            cu_seqlens_q=np.array([0, rows], dtype=np.int32),
            seqused_k=self.seqused_k[np.diff(self.cu_seqlens_q) > 0][-1:],
            page_size=self.page_size,
            metadata={**self.metadata, "tail_of": self.name, "tail_rows": int(rows)},
        )


def _shorten(values: NDArray[Any], limit: int = 8) -> str:
    """Show an array in an error message without flooding it."""
    shown = ", ".join(str(v) for v in values[:limit].tolist())
    return f"[{shown}{', ...' if values.size > limit else ''}]"
