"""MiniMax-M3 of transformers with random weights, and what its logits are compared by."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from pageweaver.common.reference import nrms


def why_not() -> str:
    """Why the bridge cannot be tested here; empty when nothing does."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return "the extra [transformers] is not installed"
    major, minor = (int(part) for part in found.split(".")[:2])
    return "" if (major, minor) >= (5, 17) else f"transformers {found}: the bridge needs 5.17 or later"


def build(*, heads: int = 8, kv_heads: int = 2, device: str = "cpu", **changes: Any) -> Any:
    """A small model of the real class: one dense layer, then sparse ones; blocks of 128, heads of 128.

    Weights are large, so that queries differ in the blocks that they choose and logits in every token;
    queries are long, so that attention is to few tokens and not the mean of all.
    """
    from transformers import AutoModelForCausalLM, MiniMaxM3VLTextConfig

    layers = changes.get("num_hidden_layers", 3)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": kv_heads,
        "index_head_dim": 64,
        "index_block_size": 128,
        "index_topk_blocks": 3,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * (layers - 1),
        # A mixture of experts in eager mode reads its routing on the host, which nothing here needs.
        "mlp_layer_types": ["dense"] * layers,
        "max_position_embeddings": 32768,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
    }
    torch.manual_seed(0)
    config = MiniMaxM3VLTextConfig(**{**sizes, **changes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 1.0)
    return model


def prompt(tokens: int, batch_size: int = 1, device: str = "cpu", vocabulary: int = 64) -> torch.Tensor:
    """Random token ids past the special ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (batch_size, tokens), generator=generator).to(device)


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """A forward pass's argument for a cache, whose name changed in transformers 5.2x."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@torch.no_grad()
def logits(model: Any, implementation: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """float32 ``[batch, tokens, vocabulary]`` of one forward pass."""
    model.set_attn_implementation(implementation)
    result: torch.Tensor = model(ids, **options).logits.float()
    return result


def chunked_logits(
    model: Any, implementation: str, ids: torch.Tensor, sizes: Sequence[int], cache: Any
) -> torch.Tensor:
    """The same of one forward pass a chunk, with a cache between them."""
    parts = [
        logits(model, implementation, part, **with_cache(model, cache))
        for part in ids.split(list(sizes), dim=1)
    ]
    return torch.cat(parts, dim=1)


def noise(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The eager logits, and the error that BF16 leaves in them.

    transformers' own two implementations differ as the bridge differs from eager: in where logits and
    probabilities are rounded, and so in which of two nearly equal blocks the next layer's indexer takes.
    """
    eager = logits(model, "eager", ids)
    return eager, nrms(logits(model, "sdpa", ids), eager)


def assert_greedy(model: Any, tokens: torch.Tensor, prompt_tokens: int, error: float) -> None:
    """Every generated token is the eager model's choice, or within its BF16 error of it.

    Parameters
    ----------
    tokens : torch.Tensor
        ``[batch, prompt_tokens + generated]``.
    error : float
        NRMS of the logits between implementations; two logits of error `e` each change places within
        ``4 * sqrt(2) * e``, if four standard deviations are enough.
    """
    eager = logits(model, "eager", tokens)[:, prompt_tokens - 1 : -1]
    chosen = eager.gather(2, tokens[:, prompt_tokens:, None])[..., 0]
    behind = (eager.amax(dim=2) - chosen).max().item()
    allowed = 4 * 2**0.5 * error * eager.square().mean().sqrt().item()
    assert behind <= allowed, f"a chosen token is {behind:.3f} behind, allowed {allowed:.3f}"
