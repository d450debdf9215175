"""Page union on Hopper: buffers and arguments of the compiled kernels, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import torch

from pageweaver.common.native import load_cuda
from pageweaver.common.problem import HEAD_DIM, AttentionProblem
from pageweaver.common.strategy import Capabilities, Layout
from pageweaver.strategies.page_union.pairing import (
    CHUNK_PAGES,
    MOST_CHUNKS,
    MOST_OVERLAPS,
    MOST_PAIRED,
    UNIT_TILES,
    Rounds,
    chunk_pages,
    paired_limit,
)
from pageweaver.strategies.query_union.cuda import (
    COUNTERS,
    FP8_ARITHMETICS,
    RequestMetadata,
    output_arguments,
    scale_arguments,
    strides,
)

CUDA_CAPABILITIES = Capabilities(
    arithmetics={torch.float8_e4m3fn: FP8_ARITHMETICS}, page_sizes=(128,), graph_capturable=True
)
# As in csrc/page_union: classes of units, queries a word and a block, bytes of a quantised head-row.
CLASSES = 2 * UNIT_TILES
WORD_QUERIES, BLOCK_QUERIES = 32, 256
QUERY_ROW_BYTES = {"fp8": 144, "split": 272}


def cuda_layout(problem: AttentionProblem, base: Layout, pairs: bool, arithmetic: str) -> Layout:
    """Buffers of the lists in `base` and of what the kernels keep beside, from shapes alone.

    Partials dominate: ``total_q * topk`` of them a KV head, 1.0 GiB at 16,384 queries of Top16 and 16 heads.
    """
    heads, batch, max_pages = problem.num_kv_heads, problem.batch_size, problem.max_pages
    total_q, topk, group_size = problem.total_q, problem.topk, problem.group_size
    limit = paired_limit(heads, batch, max_pages) if pairs else 0
    # Where no request has more pages than are paired, nobody counts or lists them.
    chosen = (heads, batch) if max_pages > limit > 0 else (0, 0)
    max_units = base["unit_pages"][0][1]
    chunks = max(1, -(-batch * max_pages // chunk_pages(batch, max_pages)))
    rounds = Rounds.of(batch, max_pages, total_q * topk, limit)
    # Words are cleared 16 bytes at a time.
    words = -(-heads * max_pages * (total_q // WORD_QUERIES + batch) // 4) * 4
    return {
        **base,
        "unit_requests": ((heads, max_units), torch.int32),
        "unit_counts": ((rounds.count + 1, heads), torch.int32),
        "member_bits": ((words,), torch.int32),
        "page_counts": ((*chosen, max_pages), torch.int32),
        "paired_pages": ((*chosen, limit), torch.int32),
        "paired_counts": (chosen, torch.int32),
        # Rows are read 16 bytes at a time.
        "overlaps": ((heads, batch, limit, -(-limit // 4) * 4), torch.int32),
        "partners": ((heads, batch, max_pages), torch.int32),
        "list_prefixes": ((heads, max_pages * (total_q // BLOCK_QUERIES + batch), 2), torch.int32),
        "list_sizes": ((heads, batch, max_pages, 2), torch.int32),
        "list_starts": ((heads, batch, max_pages, 2, 2), torch.int32),
        "class_totals": ((heads, chunks, CLASSES), torch.int64),
        "packed_slots": ((heads, batch, max_pages), torch.int32),
        # No more pages can be selected than there are edges.
        "packed_v": (
            (heads * min(rounds.pages, total_q * topk), HEAD_DIM, problem.page_size),
            torch.uint8,
        ),
        "counters": ((COUNTERS,), torch.int32),
        "packed_q": ((heads, total_q, group_size, QUERY_ROW_BYTES[arithmetic]), torch.uint8),
        "unit_tickets": ((rounds.count + 1,), torch.int32),
    }


def cuda_capacity(problem: AttentionProblem, layout: Layout) -> Layout:
    """`cuda_layout` with those buffers larger that a smaller problem may need more of.

    Requests share a bounded matrix of overlaps, and pages a bounded number of chunks: fewer of them have more
    each. The bounds here grow with every dimension.
    """
    heads, batch, max_pages = problem.num_kv_heads, problem.batch_size, problem.max_pages
    pages, edges = batch * max_pages, problem.total_q * problem.topk
    most = min(max_pages, MOST_PAIRED) if layout["overlaps"][0][2] else 0  # of a request
    # limit <= sqrt(MOST_OVERLAPS / matrices), for any number of matrices up to this one.
    paired = min(heads * batch * most, math.isqrt(MOST_OVERLAPS * heads * batch) + 1)
    overlaps = min(heads * batch * most**2, MOST_OVERLAPS) + 3 * paired

    def rounds_of(heads: int) -> Rounds:
        per_head = min(batch * most, math.isqrt(MOST_OVERLAPS * batch // heads) + 1)
        return Rounds.most(batch, max_pages, per_head)

    count = rounds_of(heads).count
    # Fewer KV heads pair more pages of each, and whole chunks of them may then take more room in all.
    places = max(few * min(rounds_of(few).pages, edges) for few in range(1, heads + 1))
    chunks = max(1, min(MOST_CHUNKS, -(-pages // CHUNK_PAGES)))
    sizes = {
        "overlaps": overlaps,
        "paired_pages": paired if math.prod(layout["paired_pages"][0]) else 0,
        "class_totals": heads * chunks * CLASSES,
        "unit_counts": (count + 1) * heads,
        "unit_tickets": count + 1,
        "packed_v": places * HEAD_DIM * problem.page_size,
    }
    return {**layout, **{name: ((size,), layout[name][1]) for name, size in sizes.items()}}


def _lists(
    problem: AttentionProblem, metadata: RequestMetadata, views: dict[str, torch.Tensor]
) -> dict[str, Any]:
    names = (
        "unit_pages unit_offsets unit_requests unit_counts unit_queries unit_slots partial_counts"
        " packed_slots packed_v"
    )
    limit = views["overlaps"].shape[2]
    rounds = Rounds.of(problem.batch_size, problem.max_pages, problem.total_q * problem.topk, limit)
    return {
        **{name: views[name].data_ptr() for name in names.split()},
        **metadata.arguments(),
        **strides("v", problem.v_cache, page=0, token=1, head=2),
        "v_cache": problem.v_cache.data_ptr(),
        "counters": views["counters"].data_ptr(),
        "max_packed": views["packed_v"].shape[0],
        "round_pages": rounds.pages,
        "rounds": rounds.count,
        "total_q": problem.total_q,
        "topk": problem.topk,
        "num_kv_heads": problem.num_kv_heads,
        "batch_size": problem.batch_size,
        "max_pages": problem.max_pages,
        "max_units": views["unit_pages"].shape[1],
    }


def prepare_cuda(problem: AttentionProblem, views: dict[str, torch.Tensor]) -> None:
    """Pair pages, build the work lists and pack V^T on the problem's device and current stream.

    Parameters
    ----------
    problem : AttentionProblem
    views : dict
        The buffers of `cuda_layout`, shaped.
    """
    q2k = problem.q2k_indices
    names = (
        "member_bits page_counts paired_pages paired_counts overlaps partners list_prefixes"
        " list_sizes list_starts class_totals"
    )
    metadata = RequestMetadata.of(problem)
    arguments = {
        **_lists(problem, metadata, views),
        # A kernel takes the address 0 for a list that nobody keeps.
        **{name: views[name].data_ptr() if views[name].numel() else 0 for name in names.split()},
        "q2k_indices": q2k.data_ptr(),
        "q2k_stride_head": q2k.stride(0),
        "q2k_stride_row": q2k.stride(1),
        "q2k_stride_column": q2k.stride(2),
        "queries_per_tile": problem.queries_per_tile,
        "paired_limit": views["overlaps"].shape[2],
        "overlap_stride": views["overlaps"].shape[3],
        "head_words": problem.max_pages * (problem.total_q // WORD_QUERIES + problem.batch_size),
        "head_blocks": views["list_prefixes"].shape[1],
        "chunks": views["class_totals"].shape[1],
        "chunk_pages": chunk_pages(problem.batch_size, problem.max_pages),
    }
    with torch.cuda.device(problem.device):
        load_cuda().prepare_page_union(arguments, torch.cuda.current_stream().cuda_stream)


def execute_cuda(
    problem: AttentionProblem,
    views: dict[str, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arithmetic: str,
    *,
    combine_only: bool = False,
) -> None:
    """Run prepared lists on the problem's device and current stream.

    Parameters
    ----------
    problem : AttentionProblem
    views : dict
        As `prepare_cuda` left them.
    out, lse : torch.Tensor
        As `Strategy.execute` takes them.
    arithmetic : {"fp8", "split"}
        That of the schedule.
    combine_only : bool
        Take ``partials``, ``lse_partials`` and ``partial_counts`` as they are.
    """
    metadata = RequestMetadata.of(problem)
    rounds = views["unit_counts"].shape[0] - 1
    names = "packed_q partials lse_partials unit_tickets"
    arguments = {
        **_lists(problem, metadata, views),
        **{name: views[name].data_ptr() for name in names.split()},
        **strides("q", problem.q, row=0, head=1),
        **strides("k", problem.k_cache, page=0, token=1, head=2),
        **output_arguments(out, lse),
        **scale_arguments(problem),
        "q": problem.q.data_ptr(),
        "k_cache": problem.k_cache.data_ptr(),
        "num_pages": problem.num_pages,
        "num_qo_heads": problem.num_qo_heads,
        "group_shift": problem.group_size.bit_length() - 1,
        "has_pairs": views["overlaps"].shape[2] > 1,
        "is_split": arithmetic == "split",
        "pair_slots": views["packed_slots" if rounds == 1 else "page_counts"].data_ptr(),
    }
    with torch.cuda.device(problem.device):
        stream = torch.cuda.current_stream().cuda_stream
        if not combine_only:
            load_cuda().page_partials(arguments, stream)
        load_cuda().combine_partials(arguments, stream)
