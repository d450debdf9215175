"""The interface of an execution strategy, and the registry of all of them."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.problem import GROUP_SIZES, KV_DTYPES, MAX_TOPK, PAGE_SIZES, AttentionProblem
from pageweaver.common.work import WorkReport

BACKENDS = ("cuda", "reference")

# The order of tables and plots.
TABLE_ORDER = (
    "per_query",
    "union4",
    "union8",
    "regroup_w64",
    "regroup_w128",
    "auto",
    "offline_w512",
    "offline_w2048",
    "page_union",
)

# Buffer name -> (shape, dtype): what a strategy needs for a problem, from shapes alone.
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Capabilities:
    """What one backend of a strategy supports; anything else is refused before any work.

    Attributes
    ----------
    kv_dtypes : tuple of torch.dtype
        Cache dtypes.
    arithmetics : mapping of torch.dtype to tuple of str
        Arithmetic policies for each cache dtype, the default first.
    group_sizes, page_sizes : tuple of int
        Query heads a KV head; tokens a page.
    max_topk : int
        Columns of ``q2k_indices``.
    graph_capturable : bool
        Whether a call can be captured in a CUDA graph after a warm-up.
    """

    arithmetics: Mapping[torch.dtype, tuple[str, ...]]
    group_sizes: tuple[int, ...] = GROUP_SIZES
    page_sizes: tuple[int, ...] = PAGE_SIZES
    max_topk: int = MAX_TOPK
    graph_capturable: bool = False

    @property
    def kv_dtypes(self) -> tuple[torch.dtype, ...]:
        """Cache dtypes."""
        return tuple(self.arithmetics)


REFERENCE_CAPABILITIES = Capabilities(
    arithmetics={
        torch.float8_e4m3fn: ("fp8", "split", "bf16", "float32"),
        torch.bfloat16: ("bf16", "float32"),
    }
)
assert REFERENCE_CAPABILITIES.kv_dtypes == KV_DTYPES


@dataclass(eq=False)
class Workspace:
    """Buffers of one strategy on one device, reusable by every problem that they are large enough for.

    Attributes
    ----------
    strategy : str
        Name of the strategy that it was made for.
    buffers : mapping of str to torch.Tensor
        Flat tensors.
    prepared : int
        Calls of `Strategy.prepare` so far: only the last one's schedule still holds.
    """

    strategy: str
    buffers: Mapping[str, torch.Tensor]
    prepared: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The leading part of a buffer, shaped for a problem.

        Raises
        ------
        ValueError
            The buffer is missing, of another dtype, or too small; bytes needed and available are named.
        """
        buffer = self.buffers.get(name)
        needed = math.prod(shape)
        if buffer is None or buffer.dtype != dtype or buffer.numel() < needed:
            available = 0 if buffer is None else buffer.numel() * buffer.element_size()
            raise ValueError(
                f"workspace[{name!r}]: got {available} bytes of {None if buffer is None else buffer.dtype},"
                f" supported: at least {needed * dtype.itemsize} bytes of {dtype} for shape {list(shape)}"
                " (call strategy.workspace on the largest problem)"
            )
        return buffer.view(-1)[:needed].view(shape)


@dataclass(eq=False)
class Schedule:
    """What `Strategy.prepare` made for one problem; strategies add their tensors as fields."""

    strategy: str
    backend: str
    arithmetic: str
    shape: tuple[Any, ...]
    sources: tuple[int, ...]
    workspace: Workspace = field(repr=False)
    prepared: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.prepared = self.workspace.prepared


def shape_key(problem: AttentionProblem) -> tuple[Any, ...]:
    """The sizes, cache dtype and device that a schedule is bound to."""
    return (
        problem.num_kv_heads,
        problem.total_q,
        problem.topk,
        problem.group_size,
        problem.page_size,
        problem.batch_size,
        problem.max_pages,
        str(problem.k_cache.dtype),
        str(problem.device),
    )


def source_key(problem: AttentionProblem) -> tuple[int, ...]:
    """Where and how the tensors lie that a schedule was made from; kernels keep some of their contents."""
    tensors = (problem.k_cache, problem.v_cache, problem.cu_seqlens_q, problem.seqused_k, problem.page_table)
    return tuple(x for tensor in tensors for x in (tensor.data_ptr(), *tensor.stride()))


class Strategy(ABC):
    """One way of deciding which queries run together.

    Parameters
    ----------
    backend : {"cuda", "reference"}, optional
        Default: "cuda" for CUDA tensors, "reference" for CPU tensors. Nothing falls back silently: a
        CUDA tensor on a device without the kernels raises, and the caller may ask for "reference".
    arithmetic : str, optional
        A policy of `Capabilities.arithmetics`; default the first one for the cache's dtype.

    Raises
    ------
    ValueError
        `backend` is not one of these.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Mapping[str, Capabilities]]

    def __init__(self, *, backend: str | None = None, arithmetic: str | None = None) -> None:
        if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
            raise ValueError(f"backend: got {backend!r}, supported: {BACKENDS} or None")
        self.backend = backend
        self.arithmetic = arithmetic

    def resolve(self, problem: AttentionProblem) -> tuple[str, str]:
        """Choose backend and arithmetic for a problem, or refuse it.

        Returns
        -------
        backend, arithmetic : str

        Raises
        ------
        UnsupportedDeviceError
            The tensors' device, or this build, has no kernels for the strategy.
        TypeError, ValueError
            The backend does not support the cache's dtype, a size, or the arithmetic asked for.
        """
        _check_kind("problem", problem, AttentionProblem)
        device = problem.device
        backend = self.backend or ("reference" if device.type == "cpu" else "cuda")
        if backend == "cuda" and device.type != "cuda":
            raise UnsupportedDeviceError(
                f"{self.name}: backend 'cuda' needs CUDA tensors, q is on {device};"
                " supported there: 'reference'"
            )
        if backend not in self.capabilities:
            raise UnsupportedDeviceError(
                f"{self.name}: this build has no {backend!r} backend, supported: {tuple(self.capabilities)}"
                " (pass backend='reference' to run the torch path on any device)"
            )
        able = self.capabilities[backend]
        if problem.k_cache.dtype not in able.kv_dtypes:
            raise TypeError(
                f"k_cache.dtype: got {problem.k_cache.dtype},"
                f" supported by {self.name} on {backend}: {able.kv_dtypes}"
            )
        for what, value, supported in (
            ("num_qo_heads / num_kv_heads (group_size)", problem.group_size, able.group_sizes),
            ("page_size", problem.page_size, able.page_sizes),
        ):
            if value not in supported:
                raise ValueError(f"{what}: got {value}, supported by {self.name} on {backend}: {supported}")
        if problem.topk > able.max_topk:
            raise ValueError(
                f"topk: got {problem.topk}, supported by {self.name} on {backend}: at most {able.max_topk}"
            )
        policies = able.arithmetics[problem.k_cache.dtype]
        arithmetic = policies[0] if self.arithmetic is None else self.arithmetic
        if not isinstance(arithmetic, str) or arithmetic not in policies:
            raise ValueError(
                f"arithmetic: got {arithmetic!r}, supported by {self.name} on {backend}"
                f" for {problem.k_cache.dtype}: {policies}"
            )
        return backend, arithmetic

    @abstractmethod
    def workspace_layout(self, problem: AttentionProblem) -> Layout:
        """Buffers for a problem's shapes; no value of any tensor is read."""

    def workspace_capacity(self, problem: AttentionProblem) -> Layout:
        """Buffers that hold the layout of this problem and of every smaller one of its group size."""
        return self.workspace_layout(problem)

    def workspace_bytes(self, problem: AttentionProblem) -> int:
        """Bytes that `workspace` will allocate for a problem, from shapes alone."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.workspace_capacity(problem).values()
        )

    def workspace(self, problem: AttentionProblem) -> Workspace:
        """Allocate buffers for this problem and every smaller one of the same group size.

        Raises
        ------
        MemoryError
            The device has not enough memory; the bytes needed are named.
        """
        layout = self.workspace_capacity(problem)
        try:
            buffers = {
                name: torch.empty(math.prod(shape), dtype=dtype, device=problem.device)
                for name, (shape, dtype) in layout.items()
            }
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(
                f"{self.name}: workspace of {self.workspace_bytes(problem)} bytes"
                f" does not fit on {problem.device}"
            ) from error
        return Workspace(self.name, buffers)

    def _views(
        self, problem: AttentionProblem, workspace: Workspace | None
    ) -> tuple[Workspace, dict[str, Any]]:
        """The workspace, made when the caller has none, and its buffers shaped for `problem`.

        Earlier schedules in the workspace end here.
        """
        if workspace is None:
            workspace = self.workspace(problem)
        _check_kind("workspace", workspace, Workspace)
        for buffer in workspace.buffers.values():
            # Buffers that a count never touches may lie on no device at all.
            if buffer.device not in (problem.device, torch.device("meta")):
                raise ValueError(
                    f"workspace: got buffers on {buffer.device}, supported: {problem.device}, the device of q"
                )
        layout = self.workspace_layout(problem)
        # A workspace that is too small raises here and leaves its last schedule in force.
        views = {name: workspace.view(name, *spec) for name, spec in layout.items()}
        workspace.prepared += 1
        return workspace, views

    @abstractmethod
    def prepare(self, problem: AttentionProblem, workspace: Workspace | None = None) -> Schedule:
        """Group queries and build the work lists of a problem.

        Caches must be final: kernels pack V here.

        Parameters
        ----------
        problem : AttentionProblem
        workspace : Workspace, optional
            From `workspace`; one is allocated when missing. The schedule's tensors lie in it, so the
            next `prepare` on the same workspace overwrites them.

        Returns
        -------
        Schedule
        """

    @abstractmethod
    def _execute(
        self, problem: AttentionProblem, schedule: Any, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Write every row of checked outputs."""

    def execute(
        self,
        problem: AttentionProblem,
        schedule: Schedule,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run a prepared problem.

        Parameters
        ----------
        problem : AttentionProblem
            The problem of `schedule`, or the same with other queries or scales: kernels pack V when they
            prepare, so selection, caches and placement are the schedule's.
        schedule : Schedule
            From this strategy's `prepare`, the last one on its workspace; kernels count in there, so one
            execution at a time.
        out : torch.Tensor, optional
            bfloat16 ``[total_q, num_qo_heads, head_dim]``, or float32 where the arithmetic is "float32"; any
            strides, unit last; written in place. Allocated when missing: float32 where the arithmetic is
            "float32".
        lse : torch.Tensor, optional
            float32 ``[total_q, num_qo_heads]``; natural-log LSE, written in place when given.

        Returns
        -------
        torch.Tensor
            `out`. A row with no visible key, or past ``cu_seqlens_q[-1]``, is exactly 0 with LSE -inf.

        Raises
        ------
        TypeError, ValueError
            The schedule is of another strategy, of other shapes, or overwritten by a later `prepare`; an
            output does not fit.
        """
        _check_kind("problem", problem, AttentionProblem)
        _check_kind("schedule", schedule, Schedule)
        if schedule.strategy != self.name or schedule.shape != shape_key(problem):
            raise ValueError(
                f"schedule: got one of {schedule.strategy!r} for shapes {schedule.shape},"
                f" supported: one of {self.name!r} for shapes {shape_key(problem)}"
            )
        if schedule.sources != source_key(problem):
            raise ValueError(
                "schedule: got one made from other caches or request metadata, supported: one of these very"
                " tensors (prepare again; q and scales alone may be others)"
            )
        if schedule.prepared != schedule.workspace.prepared:
            raise ValueError(
                "schedule: got one whose workspace was prepared again, supported: the last one of a workspace"
                " (keep a workspace for each schedule that is used later)"
            )
        _check_outputs(problem, schedule.arithmetic, out, lse)
        if out is None:
            # Who asks for float32 wants to see it.
            dtype = torch.float32 if schedule.arithmetic == "float32" else torch.bfloat16
            out = torch.empty(problem.q.shape, dtype=dtype, device=problem.device)
        self._execute(problem, schedule, out, lse)
        return out

    def __call__(
        self,
        problem: AttentionProblem,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        workspace: Workspace | None = None,
    ) -> torch.Tensor:
        """`prepare` then `execute`: the complete call; outputs that do not fit are refused before both."""
        if out is not None or lse is not None:
            _check_outputs(problem, self.resolve(problem)[1], out, lse)
        return self.execute(problem, self.prepare(problem, workspace), out, lse)

    @abstractmethod
    def work(self, problem: AttentionProblem) -> WorkReport:
        """Count what the strategy would do for a problem (Eq. 3 and 4); may synchronise, for evaluation."""


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, supported: {kind.__name__}")


def _check_outputs(
    problem: AttentionProblem, arithmetic: str, out: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    if out is not None:
        dtypes = (torch.bfloat16, torch.float32) if arithmetic == "float32" else (torch.bfloat16,)
        _check_output("out", out, dtypes, tuple(problem.q.shape), problem.device)
        if out.stride(-1) != 1:
            raise ValueError(f"out.stride(-1): got {out.stride(-1)}, supported: 1 (other strides are free)")
    if lse is not None:
        _check_output("lse", lse, (torch.float32,), (problem.total_q, problem.num_qo_heads), problem.device)


def _check_output(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        got = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name}.dtype: got {got}, supported: {' or '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape: got {tuple(tensor.shape)}, supported: {shape}")
    if tensor.device != device:
        raise ValueError(f"{name}.device: got {tensor.device}, supported: {device}, the device of q")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}.layout: got {tensor.layout}, supported: torch.strided")
    if tensor.requires_grad:
        raise ValueError(f"{name}.requires_grad: got True, supported: False (no gradient is computed)")
    extent = 1  # elements that the dimensions so far reach over, smallest stride first
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel() and stride < extent:
            raise ValueError(
                f"{name}.stride(): got {tensor.stride()}, supported: no two elements in one place"
            )
        extent += (size - 1) * stride


_REGISTRY: dict[str, type[Strategy]] = {}


def register(cls: type[Strategy]) -> type[Strategy]:
    """Class decorator: make a strategy loadable by its name, one of `TABLE_ORDER`."""
    if cls.name in _REGISTRY or cls.name not in TABLE_ORDER:
        raise ValueError(f"name: got {cls.name!r}, supported: a name of {TABLE_ORDER} not registered yet")
    _REGISTRY[cls.name] = cls
    return cls


def available() -> tuple[str, ...]:
    """Names of all registered strategies, the per-query baseline first, then as the method lists them."""
    return tuple(sorted(_REGISTRY, key=TABLE_ORDER.index))


def load(name: str, **options: Any) -> Strategy:
    """Make a strategy by name.

    Parameters
    ----------
    name : str
        One of `available`.
    **options
        Passed to the strategy: ``backend``, ``arithmetic``, and what it adds.

    Raises
    ------
    ValueError
        No such strategy; the supported names are listed.
    TypeError
        The strategy takes no such option; those that it takes are listed.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"strategy: got {name!r}, supported: {available()}")
    supported = _options(_REGISTRY[name])
    for option, value in options.items():
        if option not in supported:
            raise TypeError(
                f"{option}: got {value!r}, which is no option of {name}, supported: {', '.join(supported)}"
            )
    return _REGISTRY[name](**options)


def _options(cls: type[Strategy]) -> tuple[str, ...]:
    """Keyword arguments of a strategy, and of what it derives from as far as it passes others on."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return tuple(dict.fromkeys(names))
