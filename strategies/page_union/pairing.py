"""Disjoint page pairs and exactly-once work lists, from the incidence of pages and queries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Int = NDArray[np.int64]

# Most 64-row tiles a unit: a popular page is cut into several, so that no unit outlasts the others.
UNIT_TILES = 16
# Pages of a request that are paired: a device keeps a matrix of their overlaps, of at most this many
# elements for all requests together.
MOST_PAIRED, MOST_OVERLAPS = 1024, 2**22
# Pages of a KV head whose V lies packed at a time, 22 MiB: that of a million tokens would take 128 MiB.
ROUND_PAGES = 1408
CHUNK_PAGES, MOST_CHUNKS = 64, 128


def paired_limit(heads: int, batch_size: int, max_pages: int) -> int:
    """Most pages of a request that may be paired, from shapes alone."""
    matrices = max(1, heads * batch_size)
    return min(max_pages, MOST_PAIRED, math.isqrt(MOST_OVERLAPS // matrices))


@dataclass(frozen=True)
class Rounds:
    """How single pages of a KV head share the memory of packed V: `pages` of them at a time, `count` times.

    Pages of a head are counted through its requests. In one round V of all selected pages lies packed; in
    several it is packed before each, and for pages that may be paired before all of them.
    """

    pages: int
    count: int

    @classmethod
    def of(cls, batch_size: int, max_pages: int, edges: int, paired: int) -> Rounds:
        """Rounds of a problem, from shapes alone.

        Parameters
        ----------
        batch_size, max_pages : int
        edges : int
            ``total_q * topk``: no more pages of a KV head can be selected.
        paired : int
            Most pages of a request that may be paired.
        """
        pages = batch_size * max_pages
        # Units are ordered by chunks of pages.
        chunk = chunk_pages(batch_size, max_pages)
        room = -(-max(ROUND_PAGES, batch_size * paired) // chunk) * chunk
        if min(pages, edges) <= room:
            return cls(max(1, pages), 1)
        return cls(room, -(-pages // room))

    @classmethod
    def most(cls, batch_size: int, max_pages: int, paired: int) -> Rounds:
        """At least the memory and the rounds of any problem with no more requests and pages.

        Parameters
        ----------
        batch_size, max_pages : int
        paired : int
            Most pages of a KV head that may be paired in any of them.
        """
        pages = batch_size * max_pages
        largest = chunk_pages(batch_size, max_pages)
        room = max(ROUND_PAGES, paired)
        room = max(-(-room // chunk) * chunk for chunk in range(CHUNK_PAGES, largest + 1, CHUNK_PAGES))
        return cls(max(1, min(pages, room)), max(1, -(-pages // ROUND_PAGES)))


def chunk_pages(batch_size: int, max_pages: int) -> int:
    """Pages of a KV head whose units one CTA orders: few, but few CTAs read what all others counted."""
    return CHUNK_PAGES * max(1, -(-batch_size * max_pages // (CHUNK_PAGES * MOST_CHUNKS)))


def incidence(support: NDArray[np.int64], page_keys: NDArray[np.int64]) -> tuple[sparse.csr_array, Int]:
    """R_p for every page of one KV head.

    Parameters
    ----------
    support : numpy.ndarray
        int64 ``[total_q, topk]``; canonical pages, -1 = nothing.
    page_keys : numpy.ndarray
        int64 ``[total_q, topk]``; a number for each page that is unique across requests.

    Returns
    -------
    matrix : scipy.sparse.csr_array
        ``[pages, total_q]``, 1 where the query selected the page; query indices ascending in each row.
    keys : numpy.ndarray
        int64 ``[pages]``; page key of each row, ascending.
    """
    query, column = np.nonzero(support >= 0)
    keys, row = np.unique(page_keys[query, column], return_inverse=True)
    ones = np.ones(len(query), dtype=np.int32)
    matrix = sparse.csr_array((ones, (row, query)), shape=(len(keys), support.shape[0]))
    matrix.sort_indices()
    return matrix, keys


def most_selected(counts: Int, requests: Int, limit: int) -> NDArray[np.bool_]:
    """Pages that may be paired: the most selected of each request, the lowest of equals.

    Parameters
    ----------
    counts : numpy.ndarray
        int64 ``[pages]``; queries of each page.
    requests : numpy.ndarray
        int64 ``[pages]``, ascending; request of each page.
    limit : int
        Most pages a request.

    Returns
    -------
    numpy.ndarray
        bool ``[pages]``.
    """
    chosen = np.zeros(len(counts), dtype=bool)
    bounds = np.r_[0, np.flatnonzero(np.diff(requests)) + 1, len(requests)]
    for start, end in pairwise(bounds.tolist()):
        chosen[start + np.argsort(-counts[start:end], kind="stable")[:limit]] = True
    return chosen


def propose_pairs(matrix: sparse.csr_array, chosen: NDArray[np.bool_] | None = None) -> Int:
    """Match pages into disjoint pairs, most common queries first.

    Greedy over |R_a & R_b| descending, ties to the lowest (a, b). Each round matches every pair that is
    the best remaining choice of both its pages, which yields the same pairs as going through them one
    by one and needs few rounds.

    Parameters
    ----------
    matrix : scipy.sparse.csr_array
        From `incidence`.
    chosen : numpy.ndarray, optional
        bool ``[pages]``; pages that may be paired, all by default.

    Returns
    -------
    numpy.ndarray
        int64 ``[pages]``; partner of each page, or -1. Pairs share at least one query.
    """
    pages = matrix.shape[0]
    partner = np.full(pages, -1, dtype=np.int64)
    overlap = sparse.triu(matrix @ matrix.T, k=1).tocoo()
    a, b = overlap.row.astype(np.int64), overlap.col.astype(np.int64)
    order = np.lexsort((b, a, -overlap.data.astype(np.int64)))
    a, b = a[order], b[order]
    if chosen is not None:
        both = chosen[a] & chosen[b]
        a, b = a[both], b[both]
    while len(a):
        place = np.arange(len(a))
        best = np.full(pages, len(a))
        np.minimum.at(best, a, place)
        np.minimum.at(best, b, place)
        mutual = (best[a] == place) & (best[b] == place)
        partner[a[mutual]], partner[b[mutual]] = b[mutual], a[mutual]
        free = (partner[a] < 0) & (partner[b] < 0)
        a, b = a[free], b[free]
    return partner


@dataclass(frozen=True)
class WorkLists:
    """Units of work of one KV head; their members cover every edge exactly once.

    Attributes
    ----------
    unit_pages : numpy.ndarray
        int64 ``[units, 2]``; rows of the incidence matrix, the second -1 for a single page.
    unit_offsets : numpy.ndarray
        int64 ``[units + 1]``; members of each unit in `unit_queries`.
    unit_queries : numpy.ndarray
        int64 ``[members]``; queries, ascending inside a unit.
    unit_slots : numpy.ndarray
        int64 ``[members]``; partial slot of the member inside its query: slots of a query go up from 0
        in the order of the unit's first page, so that the combine has one fixed order.
    partial_counts : numpy.ndarray
        int64 ``[total_q]``; partials of each query.
    """

    unit_pages: Int
    unit_offsets: Int
    unit_queries: Int
    unit_slots: Int
    partial_counts: Int


def work_lists(
    matrix: sparse.csr_array,
    partner: Int,
    queries_per_tile: int,
    unit_tiles: int = UNIT_TILES,
    rounds: Int | None = None,
) -> WorkLists:
    """Split every page's queries into common and exclusive lists and cut these into bounded units.

    Parameters
    ----------
    matrix : scipy.sparse.csr_array
        From `incidence`.
    partner : numpy.ndarray
        From `propose_pairs`, or all -1 to run single pages.
    queries_per_tile : int
        Queries that fill one 64-row tile.
    unit_tiles : int
        Most tiles a unit.
    rounds : numpy.ndarray, optional
        int64 ``[pages]``; the round in which a page runs alone; by default all in one.

    Returns
    -------
    WorkLists
        Units of pairs first, then single pages round after round; of each kind those of most tiles first
        (ties by list), so that a dynamic scheduler ends evenly.
    """
    unit_queries = unit_tiles * queries_per_tile
    pages, total_q = matrix.shape
    counts = np.diff(matrix.indptr)
    page = np.repeat(np.arange(pages), counts)
    query = matrix.indices.astype(np.int64)
    # Edge (page, query) is common when the partner page holds the query too.
    mate = partner[page]
    edge_keys = page * total_q + query  # ascending: CSR with sorted indices
    mate_keys = mate * total_q + query
    at = np.searchsorted(edge_keys, mate_keys)
    common = mate >= 0
    common[common] = edge_keys[np.minimum(at[common], len(edge_keys) - 1)] == mate_keys[common]
    # A common edge is written once, by the lower page of the pair.
    keep = ~common | (page < mate)
    page, query, mate, common = page[keep], query[keep], mate[keep], common[keep]
    lists = page * 2 + common  # exclusive or common list of a page
    order = np.lexsort((query, lists))
    page, query, mate, common, lists = (x[order] for x in (page, query, mate, common, lists))
    first = (
        np.flatnonzero(np.r_[True, lists[1:] != lists[:-1]]) if len(lists) else np.zeros(0, dtype=np.int64)
    )
    lengths = np.diff(np.r_[first, len(lists)])
    pieces = -(-lengths // unit_queries)
    list_of = np.repeat(np.arange(len(first)), pieces)
    piece = np.arange(len(list_of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = first[list_of] + piece * unit_queries
    size = np.minimum(unit_queries, first[list_of] + lengths[list_of] - start)
    turn = np.where(common[start], -1, 0 if rounds is None else rounds[page[start]])
    tiles = -(-size // queries_per_tile)
    rank = np.lexsort((-tiles, turn))
    start, size = start[rank], size[rank]
    offsets = np.r_[0, np.cumsum(size)].astype(np.int64)
    member = np.repeat(start - offsets[:-1], size) + np.arange(offsets[-1])
    unit_pages = np.stack([page[start], np.where(common[start], mate[start], -1)], axis=1)
    slots = np.empty(len(query), dtype=np.int64)
    by_query = np.lexsort((page, query))
    partials = np.bincount(query, minlength=total_q)
    slots[by_query] = np.arange(len(query)) - np.repeat(np.cumsum(partials) - partials, partials)
    return WorkLists(unit_pages, offsets, query[member], slots[member], partials)
