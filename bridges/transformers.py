"""MiniMax-M3 of Hugging Face transformers: its sparse layers on a PageWeaver strategy.

`register` adds the attention implementation ``pageweaver`` through transformers' public registries of
attention and mask functions; nothing is patched. A sparse layer hands over the blocks that its indexer chose
(``block_indices``) beside query, key and value; layers without them go to torch's scaled-dot-product
attention. See docs/bridge_transformers.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.problem import HEAD_DIM, AttentionProblem
from pageweaver.common.strategy import load

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ImportError as error:
    raise ImportError("the bridge needs transformers 5.17 or later: pip install '.[transformers]'") from error

__all__ = ["IMPLEMENTATION", "paths", "register", "using"]

IMPLEMENTATION = "pageweaver"
E4M3_MAX = 448.0

_ATTENTION, _MASKS = AttentionInterface(), AttentionMaskInterface()


@dataclass(frozen=True)
class _Options:
    strategy: str = "union8"
    arithmetic: str | None = None
    backend: str | None = None
    fp8_copy: bool = False

    def __post_init__(self) -> None:
        strategy = load(self.strategy, backend=self.backend, arithmetic=self.arithmetic)
        if not isinstance(self.fp8_copy, bool):
            raise TypeError(f"fp8_copy: got {type(self.fp8_copy).__name__}, supported: bool")
        # A call would refuse the same, layers deep in a model.
        backend, dtype = self.backend or "cuda", torch.float8_e4m3fn if self.fp8_copy else torch.bfloat16
        policies = strategy.capabilities[backend].arithmetics.get(dtype, ())
        if self.arithmetic is not None and self.arithmetic not in policies:
            raise ValueError(
                f"arithmetic: got {self.arithmetic!r}, supported by {self.strategy} on {backend}"
                f" with fp8_copy={self.fp8_copy}: {policies}"
            )


# A plain global: torch.compile guards on it, so that another choice compiles anew.
_options = _Options()
_paths: dict[int, str] = {}


def register(
    *,
    strategy: str = "union8",
    arithmetic: str | None = None,
    backend: str | None = None,
    fp8_copy: bool = False,
) -> None:
    """Add the attention implementation ``pageweaver`` to transformers; again, to change the options.

    Afterwards ``from_pretrained(..., attn_implementation="pageweaver")`` or
    ``model.set_attn_implementation("pageweaver")`` runs a model's sparse layers here.

    Parameters
    ----------
    strategy : str
        One of `pageweaver.available`; offline strategies need ids of one selection and are refused.
    arithmetic : str, optional
        A policy of the strategy; default its first for the cache's dtype.
    backend : {"cuda", "reference"}, optional
        Default "cuda". Tensors on the CPU are refused until "reference" is asked for: it is slow, and checks
        every value.
    fp8_copy : bool
        Run on an E4M3 copy of keys and values, made at every call, in FP8 arithmetic. On N(0, 1) inputs the
        attention's output moves by about 5% (NRMS), against at most 0.3% in BF16; the model's own cache
        stays as it is.

    Raises
    ------
    ValueError
        An option is not supported; the message names it and what is.
    """
    global _options
    _options = _Options(strategy, arithmetic, backend, fp8_copy)
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


@contextmanager
def using(**options: Any) -> Iterator[None]:
    """Other options of `register` for the calls inside, of any thread.

    Parameters
    ----------
    **options
        Of `register`; what is not named stays.
    """
    global _options
    before = _options
    _options = replace(before, **options)
    try:
        yield
    finally:
        _options = before


def paths() -> dict[int, str]:
    """What each layer ran on last, by its index in the model.

    Returns
    -------
    dict of int to str
        Such as ``"union8 (cuda, bf16), cache viewed"`` or ``"sdpa"``. A replayed CUDA graph leaves the
        entry of its capture; compiled layers without blocks leave none.
    """
    return dict(sorted(_paths.items()))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    block_indices: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls; see its attention interface. Returns ``[batch, queries, heads, head_dim]``."""
    layer = getattr(module, "layer_idx", None)
    if block_indices is None:
        if layer is not None and not torch.compiler.is_compiling():
            _paths[layer] = "sdpa"
        result: tuple[torch.Tensor, None] = _ATTENTION["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
        return result
    if dropout:
        raise ValueError(f"dropout: got {dropout}, supported: 0 (inference; call model.eval())")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError(
            "query.requires_grad: got True, supported: False"
            " (inference; no gradient is computed: call the model under torch.no_grad())"
        )
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask: got one of {attention_mask.dtype} and shape {tuple(attention_mask.shape)},"
            " supported: None, or a mask of [batch, tokens]"
        )
    options = _options
    out = torch.ops.pageweaver.block_attention(
        query,
        key,
        value,
        block_indices,
        others.get("position_ids"),
        softmax_scale=HEAD_DIM**-0.5 if scaling is None else scaling,
        block_size=module.config.index_block_size,  # type: ignore[union-attr]
        layer=-1 if layer is None else layer,
        strategy=options.strategy,
        arithmetic=options.arithmetic,
        backend=options.backend,
        fp8_copy=options.fp8_copy,
    )
    return out, None


def _mask(**arguments: Any) -> torch.Tensor | None:
    """What transformers calls once a forward pass: the mask of layers without blocks, and checks.

    Sparse layers need no mask, as blocks and positions say all; so what only a mask could say is refused.
    """
    if hasattr(arguments["config"], "index_block_size"):
        padding = arguments.get("attention_mask")
        if padding is not None:
            arguments["attention_mask"] = torch.ops.pageweaver.check_padding(padding)
        # Compiling without a cache, transformers wraps the causal pattern whether rows are packed or not.
        if arguments["mask_function"] is not causal_mask_function and not torch.compiler.is_compiling():
            raise ValueError(
                "mask_function: got a pattern other than causal (packed sequences, or one of the model's),"
                " supported: causal"
            )
    mask: torch.Tensor | None = _MASKS["sdpa"](**arguments)
    return mask


# Operators, so that compiled models meet them whole: inside, strides and errors are those of a run.
_LIBRARY = torch.library.Library("pageweaver", "FRAGMENT")
_LIBRARY.define("check_padding(Tensor mask) -> Tensor")
_LIBRARY.define(
    "block_attention(Tensor query, Tensor key, Tensor value, Tensor block_indices, Tensor? position_ids, *,"
    " float softmax_scale, int block_size, int layer, str strategy, str? arithmetic, str? backend,"
    " bool fp8_copy) -> Tensor"
)


def _check_padding(mask: torch.Tensor) -> torch.Tensor:
    """A ``[batch, tokens]`` mask, whose rows must be tokens and then padding.

    Reads the mask, as transformers' own mask functions do; not while a CUDA graph is captured.
    """
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask: got padding in front of tokens, supported: padding at the end of a row"
            " (padding_side='right'): blocks are counted from the first slot of the cache"
        )
    return mask.clone()


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_indices: torch.Tensor,
    position_ids: torch.Tensor | None,
    *,
    softmax_scale: float,
    block_size: int,
    layer: int,
    strategy: str,
    arithmetic: str | None,
    backend: str | None,
    fp8_copy: bool,
) -> torch.Tensor:
    """Attention over chosen blocks: query, key and value ``[batch, heads, tokens, head_dim]``."""
    _check(query, key, value, block_indices, backend)
    batch_size, num_qo_heads, q_len, _ = query.shape
    num_kv_heads = key.shape[1]
    device = query.device
    scales: dict[str, torch.Tensor] = {}
    if fp8_copy:
        key, scales["k_scale"] = _to_e4m3(key, block_size)
        value, scales["v_scale"] = _to_e4m3(value, block_size)
    k_cache, v_cache, request_stride, copied = _paged(key, value, block_size)
    pages = torch.arange(-(-key.shape[2] // block_size), dtype=torch.int32, device=device)
    requests = torch.arange(batch_size + 1, dtype=torch.int32, device=device)
    # The first position, since tokenizers' padding repeats the last.
    start = key.shape[2] - q_len if position_ids is None else position_ids[..., 0].reshape(-1)
    seqused_k = torch.zeros_like(requests[1:]) + (start + q_len)
    ids = block_indices.transpose(0, 1).to(torch.int32, memory_format=torch.contiguous_format)
    # One selection for several KV heads, where the model has fewer index heads.
    ids = ids[:, None].expand(-1, num_kv_heads // len(ids), -1, -1, -1)
    problem = AttentionProblem(
        q=query.transpose(1, 2).reshape(batch_size * q_len, num_qo_heads, HEAD_DIM),
        k_cache=k_cache,
        v_cache=v_cache,
        q2k_indices=ids.reshape(num_kv_heads, batch_size * q_len, -1),
        cu_seqlens_q=requests * q_len,
        seqused_k=seqused_k.to(torch.int32),
        page_table=pages + requests[:-1, None] * request_stride,
        softmax_scale=softmax_scale,
        **scales,
    )
    runner = load(strategy, backend=backend, arithmetic=arithmetic)
    how = "copied to E4M3" if fp8_copy else "copied" if copied else "viewed"
    _paths[layer] = f"{strategy} ({', '.join(runner.resolve(problem))}), cache {how}"
    out = torch.empty(batch_size, q_len, num_qo_heads, HEAD_DIM, dtype=query.dtype, device=device)
    runner(problem, out.view(batch_size * q_len, num_qo_heads, HEAD_DIM))
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_indices: torch.Tensor,
    backend: str | None,
) -> None:
    """Refuse, in the terms of transformers, what the paged problem would refuse in its own."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(
                f"{name}.dtype: got {tensor.dtype}, supported: torch.bfloat16"
                " (load the model with dtype=torch.bfloat16)"
            )
        if tensor.shape[3] != HEAD_DIM:
            raise ValueError(f"{name}.shape[3] (head_dim): got {tensor.shape[3]}, supported: {HEAD_DIM}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name}.shape[0] (batch): got {tensor.shape[0]}, supported: {query.shape[0]}")
    rows, heads = (query.shape[0], query.shape[2]), key.shape[1]
    if (block_indices.shape[0], block_indices.shape[2]) != rows or heads % block_indices.shape[1]:
        raise ValueError(
            f"block_indices.shape: got {tuple(block_indices.shape)}, supported:"
            f" [batch, index heads, queries, topk] with batch and queries {rows}"
            f" and index heads a divisor of {heads} KV heads"
        )
    if query.device.type == "cpu" and backend is None:
        raise UnsupportedDeviceError(
            "query.device: got cpu, supported: cuda; pass register(backend='reference') to run the torch path"
            " on any device"
        )


def _to_e4m3(tensor: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy in E4M3 whose tokens fill whole pages, and its scale.

    The scale is the power of two that brings the largest magnitude under E4M3's largest number: multiplying
    BF16 numbers by it rounds nothing.
    """
    largest = torch.linalg.vector_norm(tensor, ord=torch.inf).float()
    exponent = torch.frexp(largest / E4M3_MAX).exponent.clamp(min=-100)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return _whole_pages(tensor / scale.to(tensor.dtype), block_size, torch.float8_e4m3fn), scale


def _whole_pages(tensor: torch.Tensor, page_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy of ``[batch, heads, tokens, head_dim]`` with tokens filled up to whole pages.

    What fills them is never shown: no request is that long.
    """
    batch_size, heads, tokens, head_dim = tensor.shape
    shape = (batch_size, heads, -(-tokens // page_size) * page_size, head_dim)
    copy = torch.empty(shape, dtype=dtype, device=tensor.device)
    copy[:, :, :tokens] = tensor
    return copy


def _paged(
    key: torch.Tensor, value: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
    """Keys and values as caches of pages, viewed where strides allow.

    Returns
    -------
    k_cache, v_cache : torch.Tensor
        ``[pages, page_size, heads, head_dim]``; both are copies if either had to be.
    request_stride : int
        Physical pages from one request's first page to the next one's.
    copied : bool
    """
    views = [_pages_view(tensor, page_size) for tensor in (key, value)]
    copied = None in views or views[0][1] != views[1][1]  # type: ignore[index]
    if copied:
        copies = (_whole_pages(tensor, page_size, tensor.dtype) for tensor in (key, value))
        views = [_pages_view(copy, page_size) for copy in copies]
    assert views[0] is not None and views[1] is not None
    return views[0][0], views[1][0], views[0][1], copied


def _pages_view(tensor: torch.Tensor, page_size: int) -> tuple[torch.Tensor, int] | None:
    """``[batch, heads, tokens, head_dim]`` as ``[pages, page_size, heads, head_dim]``, if that needs no copy.

    Page ``r * stride + j`` is page ``j`` of request ``r``. In a contiguous cache heads lie between requests:
    pages of all heads are counted through, and the page numbers between two requests' own are not used.

    Returns
    -------
    view, stride : torch.Tensor, int
    """
    batch_size, heads, tokens, head_dim = tensor.shape
    by_request, by_head, by_token, by_element = tensor.stride()
    page = page_size * by_token
    if tokens % page_size or by_element != 1 or (batch_size > 1 and by_request % page):
        return None
    stride = by_request // page if batch_size > 1 else 0
    pages = (batch_size - 1) * stride + tokens // page_size
    return tensor.as_strided((pages, page_size, heads, head_dim), (page, by_token, by_head, 1)), stride


_LIBRARY.impl("check_padding", _check_padding, "CompositeExplicitAutograd")
_LIBRARY.impl("block_attention", _block_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("pageweaver::check_padding", lib=_LIBRARY)
def _fake_check_padding(mask: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(mask)


@torch.library.register_fake("pageweaver::block_attention", lib=_LIBRARY)
def _fake_block_attention(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    batch_size, heads, q_len, head_dim = query.shape
    return query.new_empty(batch_size, q_len, heads, head_dim)
