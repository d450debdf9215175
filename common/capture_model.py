"""Page selections of a Hugging Face causal language model reading a text.

The model runs unchanged, on plain causal attention. A function registered with the attention interface of
transformers sees every layer's queries and keys on their way to attention and keeps, for each query and KV
head, the pages whose best key scores highest: what a block indexer would select if it were exact.

What such a capture is not
--------------------------
The model has no trained page indexer and was not trained to read only what is selected. A small model
models a long text badly, and one that reads past the positions it was trained for worse still;
`rope_base_factor` stretches its rotary embedding so that it can read there at all. Layers with a sliding
window are left out, because what they read is decided by the window.

Needs ``pip install '.[capture]'`` in the repository.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pageweaver.common.captures import save_selections
from pageweaver.common.selection import Selection

__all__ = ["ATTENTION_NAME", "capture_model", "capture_tokens", "select_pages"]

ATTENTION_NAME = "pageweaver_capture"

# Scores held at once, in elements: 64 MiB of float32.
_SCORE_ELEMENTS = 1 << 24


def select_pages(
    query: torch.Tensor, key: torch.Tensor, *, page_size: int = 128, topk: int = 16
) -> torch.Tensor:
    """Select each query's pages by the largest q.k in them.

    Parameters
    ----------
    query : float tensor, [num_qo_heads, rows, head_dim]
        The last `rows` positions of the context, after rotary embedding.
    key : float tensor, [num_kv_heads, context, head_dim]
    page_size, topk : int

    Returns
    -------
    int32 tensor, [num_kv_heads, rows, topk], on the CPU
        Logical pages, ascending, -1 last. A page's score is the maximum of q.k over its tokens up to the
        query's position and over the query heads of the KV head's group; the query's own page is always
        among them; of equal scores any may win.

    Raises
    ------
    ValueError
        For shapes that do not fit together.
    RuntimeError
        If a score is NaN: the model's activations overflowed.
    """
    if (
        query.ndim != 3
        or key.ndim != 3
        or key.shape[0] == 0
        or query.shape[0] % key.shape[0]
        or query.shape[1] > key.shape[1]
    ):
        raise ValueError(
            f"query, key: got {tuple(query.shape)}, {tuple(key.shape)}, supported:"
            " [num_qo_heads, rows, head_dim], [num_kv_heads, context, head_dim], rows <= context, full groups"
        )
    num_kv_heads, context, head_dim = key.shape
    rows = query.shape[1]
    grouped = query.reshape(num_kv_heads, -1, rows, head_dim)
    result = torch.full((num_kv_heads, rows, topk), -1, dtype=torch.int32)
    step = max(1, _SCORE_ELEMENTS // max(1, grouped.shape[1] * context))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        # No row of this block sees a key past the block's last position.
        visible = context - rows + end
        positions = torch.arange(visible - (end - begin), visible, device=key.device)
        pages = -(-visible // page_size)
        for head in range(num_kv_heads):
            scores = grouped[head, :, begin:end].float() @ key[head, :visible].float().T
            best = scores.amax(dim=0)  # over the group: [rows, visible]
            future = torch.arange(visible, device=key.device) > positions[:, None]
            best = best.masked_fill_(future, -torch.inf)
            best = torch.nn.functional.pad(best, (0, pages * page_size - visible), value=-torch.inf)
            best = best.view(end - begin, pages, page_size).amax(dim=2)
            if torch.isnan(best).any():
                raise RuntimeError("q.k is NaN: the model's activations overflowed; try dtype float32")
            best.scatter_(1, (positions // page_size)[:, None], torch.inf)
            values, ids = best.topk(min(topk, pages), dim=1)
            # Pages that start after the query sort behind the others and then become -1.
            ids = ids.masked_fill(values == -torch.inf, pages).sort(dim=1).values
            ids = ids.masked_fill(ids == pages, -1)
            result[head, begin:end, : ids.shape[1]] = ids.to("cpu", torch.int32)
    return result


@dataclass
class _Recorder:
    """What a running capture keeps, layer by layer."""

    prefix_tokens: int
    total_tokens: int
    page_size: int
    topk: int
    layers: frozenset[int]
    seen_tokens: int = 0  # tokens of finished chunks
    indices: dict[int, NDArray[np.int32]] = field(
        default_factory=dict
    )  # layer: [num_kv_heads, total_q, topk]

    def observe(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        """Keep a chunk's selections; query [1, num_qo_heads, rows, :], key [1, num_kv_heads, context, :]."""
        if layer not in self.layers:
            return
        rows, context = query.shape[2], key.shape[2]
        if query.shape[0] != 1 or context != self.seen_tokens + rows:
            raise RuntimeError(
                f"layer {layer} attends to {context} keys, expected {self.seen_tokens + rows}: its cache does"
                " not keep the whole context, so that its pages cannot be numbered"
            )
        skipped = max(0, self.prefix_tokens - (context - rows))
        if skipped >= rows:
            return
        pages = select_pages(query[0, :, skipped:], key[0], page_size=self.page_size, topk=self.topk).numpy()
        if layer not in self.indices:
            shape = (key.shape[1], self.total_tokens - self.prefix_tokens, self.topk)
            self.indices[layer] = np.full(shape, -1, dtype=np.int32)
        end = context - self.prefix_tokens
        self.indices[layer][:, end - (rows - skipped) : end] = pages


_RECORDER: ContextVar[_Recorder | None] = ContextVar("pageweaver_recorder", default=None)


def _register() -> None:
    """Enter the capturing attention and its mask in the registries of transformers; repeatable."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "a capture needs transformers 5 or later: pip install '.[capture]' in the repository"
        ) from error

    def capturing_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        recorder = _RECORDER.get()
        if recorder is not None:
            if kwargs.get("s_aux") is not None:
                raise ValueError("the model has attention sinks, which SDPA does not apply; supported: none")
            recorder.observe(int(module.layer_idx), query, key)  # type: ignore[arg-type]
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return attended

    AttentionInterface.register(ATTENTION_NAME, capturing_attention)
    # Without a mask of its own a custom attention gets none, and every query would see the future.
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


@contextlib.contextmanager
def _capturing(model: Any, recorder: _Recorder) -> Iterator[None]:
    """Route `model` through the capturing attention, and back."""
    _register()
    before = model.config._attn_implementation
    training = model.training
    if before != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)
    token = _RECORDER.set(recorder)
    try:
        model.eval()
        yield
    finally:
        _RECORDER.reset(token)
        model.train(training)
        if before != ATTENTION_NAME:
            model.set_attn_implementation(before)


def capture_tokens(
    model: Any,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    name: str = "capture",
    prefix_tokens: int = 0,
    page_size: int = 128,
    topk: int = 16,
    layers: Sequence[int] | None = None,
    chunk_tokens: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> list[Selection]:
    """Capture the selections of a loaded model on given tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal model whose attention goes through the attention interface.
    token_ids : sequence of int or int tensor, [tokens]
    name : str
        Selections are named ``{name}.L{layer}.h{kv_head}``.
    prefix_tokens : int
        Tokens that are read but whose own selections are not kept: queries are positions ``prefix_tokens`` to
        ``tokens - 1``. The first ``topk * page_size`` positions select all they see, which says nothing.
    page_size, topk : int
    layers : sequence of int, optional
        Left out: all that see the whole context.
    chunk_tokens : int
        Prefill chunk. Memory is that of one chunk and of the KV cache.
    progress : callable, optional
        Called as ``progress(done_tokens, tokens)`` at the start and after each chunk.

    Returns
    -------
    list of Selection
        One per layer and KV head, each [1, tokens - prefix_tokens, topk], layers ascending.

    Raises
    ------
    ImportError
        Without transformers.
    ValueError
        Naming the argument, its value and what is supported.
    RuntimeError
        If a layer's attention does not go through the interface or does not keep the whole context.
    """
    for argument, value, least in (
        ("prefix_tokens", prefix_tokens, 0),
        ("page_size", page_size, 1),
        ("topk", topk, 1),
        ("chunk_tokens", chunk_tokens, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{argument}: got {value!r}, supported: an integer of at least {least}")
    if not name or ":" in name:
        raise ValueError(f"name: got {name!r}, supported: a non-empty string without ':'")
    tokens = torch.as_tensor(token_ids, dtype=torch.long).reshape(1, -1).to(model.device)
    total = tokens.shape[1]
    if total <= prefix_tokens:
        raise ValueError(
            f"token_ids: got {total} tokens, supported: more than prefix_tokens, {prefix_tokens}"
        )
    config = model.config.get_text_config(decoder=True)
    chosen = _choose_layers(config, layers, total)
    trained = _check_positions(config, total)
    recorder = _Recorder(prefix_tokens, total, page_size, topk, frozenset(chosen))
    with _capturing(model, recorder), torch.inference_mode():
        _prefill(model, tokens, recorder, chunk_tokens, progress)
    missing = [layer for layer in chosen if layer not in recorder.indices]
    if missing:
        raise RuntimeError(
            f"model: got {type(model).__name__}, where the attention of layers {missing} does not go through"
            " the attention interface of transformers, supported: models where it does"
        )
    shared = {
        "kind": "captured",
        "source_model": _describe(config),
        "weights": f"run in {str(next(model.parameters()).dtype).removeprefix('torch.')}",
        "rule": f"per KV head: maximum of q.k over each page of {page_size} and over the grouped query heads,"
        f" future masked, local page forced, Top{topk}, ascending",
        "rope": f"base {base:g}" if (base := _rope_base(config)) is not None else "none",
        "limits": "no trained page indexer"
        + (f"; read {total} positions, trained on {trained}" if trained and total > trained else ""),
    }
    return [
        Selection(
            name=f"{name}.L{layer}.h{head}",
            q2k_indices=recorder.indices[layer][head : head + 1],
            cu_seqlens_q=np.array([0, total - prefix_tokens], dtype=np.int32),
            seqused_k=np.array([total], dtype=np.int32),
            page_size=page_size,
            metadata={**shared, "text_id": name, "layer": layer, "kv_head": head},
        )
        for layer in chosen
        for head in range(recorder.indices[layer].shape[0])
    ]


def _prefill(
    model: Any,
    tokens: torch.Tensor,
    recorder: _Recorder,
    chunk_tokens: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Run the model over `tokens` [1, total] in chunks, without its vocabulary projection."""
    from transformers import DynamicCache

    body = model.base_model
    # The argument has two names across the 5.x releases.
    accepted = inspect.signature(body.forward).parameters
    cache_argument = "cache" if "cache" in accepted else "past_key_values"
    # Made without a config the cache keeps everything for every layer, those with a window included.
    cache = DynamicCache()
    total = tokens.shape[1]
    if progress is not None:
        progress(0, total)
    for begin in range(0, total, chunk_tokens):
        end = min(begin + chunk_tokens, total)
        body(tokens[:, begin:end], use_cache=True, **{cache_argument: cache})
        recorder.seen_tokens = end
        if progress is not None:
            progress(end, total)


def _choose_layers(config: Any, layers: Sequence[int] | None, total: int) -> list[int]:
    """Return the layers to capture, ascending; those with a window shorter than the text cannot be."""
    count = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = bool(window) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * count
    short = window is None or window < total
    whole = [
        i
        for i in range(count)
        if kinds[i] == "full_attention" or (kinds[i] == "sliding_attention" and not short)
    ]
    if layers is None:
        if not whole:
            raise ValueError(
                f"model: no layer sees all {total} tokens (window {window}), supported: at least one"
            )
        return whole
    wanted = sorted(set(layers))
    for layer in wanted:
        if layer not in whole:
            raise ValueError(
                f"layers: got {layer}, supported: {_ranges(whole)} (layers that see the whole context)"
            )
    if not wanted:
        raise ValueError(f"layers: got none, supported: {_ranges(whole)}")
    return wanted


def _ranges(values: Sequence[int]) -> str:
    """Write ascending integers as ``0-4, 7``."""
    parts: list[str] = []
    for first in (v for v in values if v - 1 not in values):
        last = first
        while last + 1 in values:
            last += 1
        parts.append(str(first) if last == first else f"{first}-{last}")
    return ", ".join(parts)


def _check_positions(config: Any, total: int) -> int | None:
    """Warn where the text is longer than the model was trained for; return that length."""
    trained = getattr(config, "max_position_embeddings", None)
    if trained is None or total <= trained:
        return trained
    if _rope_base(config) is None:
        raise ValueError(
            f"max_tokens: got {total}, supported: at most {trained}, as many positions as the model has"
        )
    warnings.warn(
        f"{total} tokens are more than the {trained} positions that the model was trained on: its selections"
        " there show how it fails as much as how it reads (rope_base_factor helps)",
        stacklevel=3,
    )
    return int(trained)


def _rope_base(config: Any) -> float | None:
    """Return the base of the rotary embedding, None for a model without one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    base = (nested[0] if nested else parameters).get("rope_theta", getattr(config, "rope_theta", None))
    return None if base is None else float(base)


def _stretch_rope(config: Any, factor: float) -> None:
    """Multiply the base of every rotary embedding of `config`."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    stretched = [group for group in groups if group.get("rope_theta") is not None]
    if not stretched:
        raise ValueError(
            f"rope_base_factor: got {factor}, supported by this model: 1 (it has no rotary embedding)"
        )
    for group in stretched:
        group["rope_theta"] = group["rope_theta"] * factor


def _describe(config: Any) -> str:
    query_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return (
        f"{config.model_type} ({config.num_hidden_layers} layers, {query_heads} query heads,"
        f" {kv_heads} KV heads, head_dim {head_dim})"
    )


def capture_model(
    model: str | os.PathLike[str],
    text_path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    max_tokens: int = 4096,
    prefix_tokens: int = 0,
    page_size: int = 128,
    topk: int = 16,
    layers: Sequence[int] | None = None,
    chunk_tokens: int = 512,
    rope_base_factor: float = 1.0,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> list[Selection]:
    """Capture the selections of a model on a text file: what ``pageweaver capture`` runs.

    Parameters
    ----------
    model : str or path
        A folder saved by transformers, a ``.gguf`` file (read offline, its tokenizer too), or the name of a
        model on the Hugging Face hub.
    text_path : path
        UTF-8 text.
    output : path or None
        The selection file (``captures/README.md``), written at the end and at once; None writes nothing.
    max_tokens : int
        Tokens of the text to read, fewer if it is shorter.
    prefix_tokens, page_size, topk, layers, chunk_tokens, progress
        As for `capture_tokens`.
    rope_base_factor : float
        Factor on the base of the rotary embedding (NTK), for texts longer than the model was trained on:
        about the ratio of the two lengths.
    device, dtype : str
        Where and in what the model runs, as torch names them.

    Returns
    -------
    list of Selection
        One per layer and KV head, named ``{stem of text_path}.L{layer}.h{kv_head}``.

    Raises
    ------
    ImportError
        Naming the missing package and how to get it.
    FileNotFoundError
        For a text, a model or an output folder that does not exist, also where the hub cannot be asked.
    ValueError
        Naming the argument, its value and what is supported.
    OSError
        From transformers, for a model that it cannot read.

    Warns
    -----
    UserWarning
        If the text is longer than what the model was trained on.
    """
    text_file = Path(text_path)
    if not text_file.is_file():
        raise FileNotFoundError(f"text_path: got {text_file}, supported: an existing text file")
    # Asked before the long part, not after it.
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise FileNotFoundError(f"output: got {output}, supported: a file in an existing folder")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens <= prefix_tokens:
        raise ValueError(
            f"max_tokens: got {max_tokens!r}, supported: an integer above prefix_tokens, {prefix_tokens}"
        )
    if not rope_base_factor > 0:
        raise ValueError(f"rope_base_factor: got {rope_base_factor}, supported: above 0")
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"dtype: got {dtype!r}, supported: float32, bfloat16, float16")
    data = text_file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text_path: got {text_file} ({error}), supported: UTF-8 text") from error

    loaded, tokenizer, label = _load(model, torch_dtype, rope_base_factor)
    loaded.to(device)
    token_ids = tokenizer(text, verbose=False)["input_ids"][:max_tokens]
    if len(token_ids) <= prefix_tokens:
        raise ValueError(
            f"prefix_tokens: got {prefix_tokens}, supported for this text: below its {len(token_ids)} tokens"
        )
    text_id = re.sub(r"[^A-Za-z0-9_-]+", "-", text_file.stem).strip("-") or "text"
    captured = capture_tokens(
        loaded,
        token_ids,
        name=text_id,
        prefix_tokens=prefix_tokens,
        page_size=page_size,
        topk=topk,
        layers=layers,
        chunk_tokens=chunk_tokens,
        progress=progress,
    )
    # File names only: a file that is passed on should not tell where its sources lay.
    shared = {
        **{k: v for k, v in captured[0].metadata.items() if k not in ("text_id", "layer", "kv_head")},
        "source_model": f"{label}: {captured[0].metadata['source_model']}",
        "text": f"{text_file.name}, first {len(token_ids)} tokens",
        "text_sha256": hashlib.sha256(data).hexdigest(),
        "rope_base_factor": float(rope_base_factor),
    }
    selections = [
        Selection(
            name=s.name,
            q2k_indices=s.q2k_indices,
            cu_seqlens_q=s.cu_seqlens_q,
            seqused_k=s.seqused_k,
            page_size=s.page_size,
            metadata={**s.metadata, **shared},
        )
        for s in captured
    ]
    if output is not None:
        save_selections(output, selections, shared)
    return selections


def _check_hub(name: str) -> None:
    """Refuse a name that is unknown to the hub, asked once: transformers asks again and again."""
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str) or file_exists(name, "config.json"):
            return
        reason = "not found on the hub"
    except HFValidationError:
        reason = "not a hub name"
    except HfHubHTTPError:
        return  # the hub answered, with a wish for a licence, say: transformers tells it
    except Exception as error:  # of whatever library carries the request
        reason = f"the hub cannot be reached: {error}"
    raise FileNotFoundError(
        f"model: got {name}, supported: an existing folder, a GGUF file or a hub name"
        f" (there is no such folder, and {reason})"
    )


def _load(model: str | os.PathLike[str], dtype: torch.dtype, rope_base_factor: float) -> tuple[Any, Any, str]:
    """Load model and tokenizer; the third value is the model's name without its folders."""
    _register()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model: got {path}, supported: an existing GGUF file")
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"a GGUF model needs {package}: pip install '.[capture]' in the repository")
        source, options, label = str(path.parent), {"gguf_file": path.name}, path.name
    else:
        if not path.exists() and (path.is_absolute() or str(model).startswith(".") or len(path.parts) > 2):
            raise FileNotFoundError(
                f"model: got {path}, supported: an existing folder, a GGUF file or a hub name"
            )
        if not path.exists():
            _check_hub(str(model))
        source, options, label = str(model), {}, path.name if path.exists() else str(model)
    config = AutoConfig.from_pretrained(source, **options)
    if rope_base_factor != 1:
        _stretch_rope(config.get_text_config(decoder=True), rope_base_factor)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    loaded = AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME, **options
    )
    return loaded, tokenizer, label
