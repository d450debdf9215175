"""Union schedules on Hopper: arguments of the compiled kernels, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.native import load_cuda
from pageweaver.common.problem import HEAD_DIM, AttentionProblem
from pageweaver.common.strategy import Capabilities, Layout
from pageweaver.strategies.query_union.unions import UnionSchedule, union_layout

# Places are the codes of csrc/union_attention, here and in MAPPINGS.
FP8_ARITHMETICS = ("fp8", "split")
MAPPINGS = ("independent", "cluster")
CUDA_CAPABILITIES = Capabilities(
    arithmetics={torch.float8_e4m3fn: FP8_ARITHMETICS, torch.bfloat16: ("bf16",)},
    page_sizes=(128,),
    graph_capturable=True,
)
# Kernels read 16 bytes at a time, and the copy engine addresses in units of them.
ALIGNMENT_BYTES = 16
# Two tables of union sizes, the counts of packed pages, live groups and live windows; see csrc/prepare.
COUNTERS = 2 * 256 + 6
# Windows that csrc/regroup searches; its objectives, places being their codes.
WINDOWS = (64, 128)
OBJECTIVES = ("visits", "rounds")


def cuda_layout(problem: AttentionProblem, queries_per_group: int) -> Layout:
    """Buffers of a union schedule and of the packed V that FP8 kernels read, from shapes alone."""
    base = union_layout(problem, queries_per_group)
    heads, batch, max_pages = problem.num_kv_heads, problem.batch_size, problem.max_pages
    max_groups = base["union_counts"][0][1]
    packed_slots = heads * batch * max_pages if problem.k_cache.dtype == torch.float8_e4m3fn else 0
    # No more pages can be selected than there are edges.
    max_packed = min(packed_slots, heads * problem.total_q * problem.topk)
    return {
        **base,
        "group_requests": ((max_groups,), torch.int32),
        # As if each query were a tile, which smaller calls come to.
        "tile_counts": ((heads, max_groups, queries_per_group), torch.int32),
        "unit_order": ((heads * max_groups,), torch.int32),
        "packed_slots": ((packed_slots,), torch.int32),
        "page_marks": ((heads * batch * -(-max_pages // 32) if packed_slots else 0,), torch.int32),
        "packed_v": ((max_packed, HEAD_DIM, problem.page_size), torch.uint8),
        "group_starts": ((batch + 1,), torch.int32),
        "window_starts": ((batch + 1,), torch.int32),
        "counters": ((COUNTERS,), torch.int32),
    }


def check_device(problem: AttentionProblem) -> None:
    """Refuse a device that the kernels do not run on.

    Raises
    ------
    UnsupportedDeviceError
        The kernels were not built, or the device is not of compute capability 9.0.
    """
    load_cuda()
    capability = torch.cuda.get_device_capability(problem.device)
    if capability != (9, 0):
        raise UnsupportedDeviceError(
            f"device: got {torch.cuda.get_device_name(problem.device)} of compute capability"
            f" {capability[0]}.{capability[1]}, supported: 9.0 (Hopper);"
            " pass backend='reference' to run the torch path"
        )


def check_alignment(name: str, tensor: torch.Tensor) -> None:
    """Refuse addresses or strides that are no multiple of 16 bytes, and expanded caches.

    Raises
    ------
    ValueError
        Naming the tensor, what is misaligned, and the alignment.
    """
    size = tensor.element_size()
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"{name}: got an address {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of 16,"
            f" supported: {ALIGNMENT_BYTES}-byte alignment"
        )
    for dim, (length, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)):
        # The copy engine reads keys, and values where they are not packed, and takes no such stride.
        if length > 1 and stride == 0 and (name == "k_cache" or (name == "v_cache" and size == 2)):
            raise ValueError(
                f"{name}.stride({dim}): got 0 (an expanded tensor), supported: pages with memory of their own"
            )
        if length > 1 and (stride * size) % ALIGNMENT_BYTES:
            raise ValueError(
                f"{name}.stride({dim}): got {stride * size} bytes,"
                f" supported: multiples of 16, for {ALIGNMENT_BYTES}-byte alignment"
            )


def strides(prefix: str, tensor: torch.Tensor, **dims: int) -> dict[str, int]:
    """Strides in elements; that of a dimension of size 1 is never used, whatever it says."""
    return {
        f"{prefix}_stride_{name}": tensor.stride(dim) if tensor.shape[dim] > 1 else HEAD_DIM
        for name, dim in dims.items()
    }


@dataclass(frozen=True)
class RequestMetadata:
    """Request metadata as kernels read it: contiguous. Copies live as long as this, past the launch."""

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    page_table: torch.Tensor

    @classmethod
    def of(cls, problem: AttentionProblem) -> RequestMetadata:
        """A problem's metadata."""
        return cls(
            problem.cu_seqlens_q.contiguous(), problem.seqused_k.contiguous(), problem.page_table.contiguous()
        )

    def arguments(self) -> dict[str, int]:
        """Addresses and the stride that kernels take."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q.data_ptr(),
            "seqused_k": self.seqused_k.data_ptr(),
            "page_table": self.page_table.data_ptr(),
            "page_table_stride": self.page_table.shape[1],
        }


def scale_arguments(problem: AttentionProblem) -> dict[str, Any]:
    """The three scales, as numbers or as addresses of device tensors."""
    arguments: dict[str, Any] = {}
    for name in ("softmax_scale", "k_scale", "v_scale"):
        scale = getattr(problem, name)
        on_device = isinstance(scale, torch.Tensor)
        arguments[name] = 1.0 if on_device else float(scale)
        arguments[f"{name}_pointer"] = scale.data_ptr() if on_device else 0
    return arguments


def output_arguments(out: torch.Tensor, lse: torch.Tensor | None) -> dict[str, int]:
    """Addresses and strides of the outputs; 0 for no LSE."""
    return {
        **strides("out", out, row=0, head=1),
        "out": out.data_ptr(),
        "lse": 0 if lse is None else lse.data_ptr(),
        "lse_stride_row": 0 if lse is None else lse.stride(0),
        "lse_stride_head": 0 if lse is None else lse.stride(1),
    }


def _schedule_arguments(
    problem: AttentionProblem,
    metadata: RequestMetadata,
    views: dict[str, torch.Tensor],
    queries_per_tile: int,
) -> dict[str, Any]:
    heads, max_groups, max_union, mask_words = views["union_masks"].shape
    names = (
        "group_offsets group_requests union_pages union_masks union_counts tile_counts unit_order"
        " packed_slots page_marks packed_v group_starts window_starts counters"
    )
    return {
        **{name: views[name].data_ptr() for name in names.split()},
        **metadata.arguments(),
        "total_q": problem.total_q,
        "num_kv_heads": heads,
        "batch_size": problem.batch_size,
        "max_pages": problem.max_pages,
        "queries_per_tile": queries_per_tile,
        "tiles_per_group": views["tile_counts"].shape[2] // queries_per_tile,
        "max_groups": max_groups,
        "max_union": max_union,
        "mask_words": mask_words,
        "max_packed": views["packed_v"].shape[0],
    }


@dataclass(frozen=True)
class Search:
    """What the grouping kernel looks for.

    Attributes
    ----------
    window : int
        Queries a search window, one of `WINDOWS`.
    objective : str
        One of `OBJECTIVES`.
    choices : torch.Tensor or None
        int32 ``[num_kv_heads, max_windows]``, written: 0 where a window keeps the original order, 1 where it
        takes that of its halves, 2 where its own. None: every window takes its own.
    sought_below : int
        Windows that may choose are searched where a lower bound of their rounds is below so many 256ths of
        those of the original order.
    """

    window: int
    objective: str
    choices: torch.Tensor | None = None
    sought_below: int = 0


def max_windows(problem: AttentionProblem, window: int) -> int:
    """Most search windows of one KV head: every request may end in a partial one.

    One at least where there are rows: it clears the groups of a call that has no request.
    """
    most = (problem.total_q + problem.batch_size * (window - 1)) // window
    return min(problem.total_q, max(1, most))


def prepare_cuda(
    problem: AttentionProblem,
    views: dict[str, torch.Tensor],
    order: Search | torch.Tensor | None,
    queries_per_tile: int,
) -> None:
    """Build unions, order units, pack the V^T of FP8 caches: on the problem's device and current stream.

    Parameters
    ----------
    problem : AttentionProblem
    views : dict
        The buffers of `cuda_layout`, shaped; ``query_ids`` is filled.
    order : Search, torch.Tensor or None
        Where the ids come from: found on the device, given (int32 ``[num_kv_heads, total_q]``), or the
        original order.
    queries_per_tile : int
        See `QueryUnion.queries_per_tile`.
    """
    if isinstance(order, torch.Tensor):
        views["query_ids"].copy_(order)
    search = order if isinstance(order, Search) else None
    q2k = problem.q2k_indices
    metadata = RequestMetadata.of(problem)
    ids = views["query_ids"].data_ptr()
    given = isinstance(order, torch.Tensor)
    arguments = {
        **_schedule_arguments(problem, metadata, views, queries_per_tile),
        **strides("v", problem.v_cache, page=0, token=1, head=2),
        "q2k_indices": q2k.data_ptr(),
        "q2k_stride_head": q2k.stride(0),
        "q2k_stride_row": q2k.stride(1),
        "q2k_stride_column": q2k.stride(2),
        "v_cache": problem.v_cache.data_ptr(),
        "topk": problem.topk,
        "query_ids": ids if given else 0,
        "written_ids": 0 if given else ids,
        "window": search.window if search else 0,
        "max_windows": max_windows(problem, search.window) if search else 0,
        "by_rounds": OBJECTIVES.index(search.objective) if search else 0,
        "window_choices": search.choices.data_ptr() if search and search.choices is not None else 0,
        "sought_below": search.sought_below if search else 0,
    }
    with torch.cuda.device(problem.device):
        load_cuda().prepare_unions(arguments, torch.cuda.current_stream().cuda_stream)


def execute_cuda(
    problem: AttentionProblem, schedule: UnionSchedule, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Run a prepared union schedule on the problem's device and current stream."""
    check_alignment("q", problem.q)  # may be another one than the schedule's
    check_alignment("out", out)
    for name in ("query_ids", "group_offsets", "union_pages", "union_masks", "union_counts"):
        if getattr(schedule, name) is not schedule.views[name]:
            raise ValueError(
                f"schedule.{name}: got a replaced tensor, supported on cuda: what prepare made"
                " (pass query_ids to prepare to run in another order)"
            )
    metadata = RequestMetadata.of(problem)
    arguments = {
        **_schedule_arguments(problem, metadata, schedule.views, schedule.queries_per_tile),
        **strides("q", problem.q, row=0, head=1),
        **strides("k", problem.k_cache, page=0, token=1, head=2),
        **strides("v", problem.v_cache, page=0, token=1, head=2),
        **output_arguments(out, lse),
        **scale_arguments(problem),
        "q": problem.q.data_ptr(),
        "k_cache": problem.k_cache.data_ptr(),
        "v_cache": problem.v_cache.data_ptr(),
        "num_pages": problem.num_pages,
        "num_qo_heads": problem.num_qo_heads,
        "group_shift": problem.group_size.bit_length() - 1,
        "mapping": MAPPINGS.index(schedule.mapping),
        "arithmetic": 0 if schedule.arithmetic == "bf16" else FP8_ARITHMETICS.index(schedule.arithmetic),
        "query_ids": 0 if schedule.identity else schedule.query_ids.data_ptr(),
    }
    with torch.cuda.device(problem.device):
        kernels = load_cuda()
        run = kernels.bf16_attention if schedule.arithmetic == "bf16" else kernels.union_attention
        run(arguments, torch.cuda.current_stream().cuda_stream)
