"""The bridge to transformers on Hopper: real head counts, against eager attention and float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import nrms

from .. import minimax_m3 as m3
from .hopper import WATCHDOG, missing

if reason := m3.why_not():
    pytest.skip(reason, allow_module_level=True)

from transformers import CompileConfig, DynamicCache, StaticCache

from pageweaver.bridges import transformers as bridge

from ..test_bridge_transformers import LAYOUTS, MARGIN, MODULE, attend, exact, layer_inputs

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), WATCHDOG]

DEVICE = "cuda"
HEADS = {"64:4": (64, 4), "16:1": (16, 1)}
CONTEXTS = (1024, 4096, 16384)
# Eager attention holds several masks of 64 heads, 1 GiB each at the longest context; others share the device.
EAGER_CHUNK = 512
STRATEGIES = [
    name
    for name in pw.available()
    if not name.startswith("offline_w")
    and "cuda" in (able := pw.load(name).capabilities)
    and torch.bfloat16 in able["cuda"].kv_dtypes
]
# BF16 probabilities and outputs on N(0, 1) inputs, and E4M3 copies of the same; see test_bridge_transformers.
BF16_NRMS, FP8_NRMS = 0.003, 0.06


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    bridge.register()
    torch._dynamo.reset()
    yield
    bridge.register()


@functools.cache
def model(heads: str) -> Any:
    qo_heads, kv_heads = HEADS[heads]
    sizes = {"hidden_size": 512, "index_head_dim": 128, "index_topk_blocks": 16, "vocab_size": 1024}
    return m3.build(
        heads=qo_heads, kv_heads=kv_heads, num_hidden_layers=4, initializer_range=0.1, device=DEVICE, **sizes
    )


def prompt(tokens: int) -> torch.Tensor:
    return m3.prompt(tokens, device=DEVICE, vocabulary=1024)


def chunked(heads: str, implementation: str, tokens: int, size: int) -> torch.Tensor:
    """Logits of a prompt in chunks of `size` on a DynamicCache."""
    sizes = [min(size, tokens - start) for start in range(0, tokens, size)]
    cache = DynamicCache(config=model(heads).config)
    return m3.chunked_logits(model(heads), implementation, prompt(tokens), sizes, cache)


@functools.cache
def noise(heads: str, tokens: int) -> tuple[torch.Tensor, float]:
    """See `minimax_m3.noise`; in chunks, which is all that fits."""
    eager = chunked(heads, "eager", tokens, EAGER_CHUNK)
    return eager, nrms(chunked(heads, "sdpa", tokens, EAGER_CHUNK), eager)


@functools.cache
def layer(layout: str, group: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Inputs of two requests and KV heads, NaN past what is valid, and what they give."""
    tokens, buffer, q_len, _ = LAYOUTS[layout]
    sizes = {"batch": 2, "kv_heads": 2, "index_heads": 2, "group": group}
    given = layer_inputs(**sizes, tokens=tokens, buffer=buffer, q_len=q_len, first=tokens - q_len)
    return given, exact(*given, tokens - q_len)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", [4, 16])
def test_attention_is_exact(strategy: str, layout: str, group: int) -> None:
    """In BF16, and on an E4M3 copy."""
    tokens, _, q_len, cache = LAYOUTS[layout]
    first = tokens - q_len
    given, wanted = layer(layout, group)
    query, key, value, blocks = (tensor.to(DEVICE) for tensor in given)
    options = {"block_indices": blocks, "position_ids": first + torch.arange(q_len, device=DEVICE)[None]}
    with bridge.using(strategy=strategy):
        out = attend(query, key, value, **options)
        assert bridge.paths()[MODULE.layer_idx] == f"{strategy} (cuda, bf16), cache {cache}"
        assert nrms(out.double().cpu(), wanted) < BF16_NRMS
        with bridge.using(fp8_copy=True):
            out = attend(query, key.nan_to_num(), value.nan_to_num(), **options)
            assert bridge.paths()[MODULE.layer_idx].endswith("cache copied to E4M3")
        assert BF16_NRMS < nrms(out.double().cpu(), wanted) < FP8_NRMS


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tokens", CONTEXTS)
@pytest.mark.parametrize("heads", HEADS)
def test_logits_are_eagers(heads: str, tokens: int, strategy: str) -> None:
    """A prompt in one piece, and in chunks that end inside of pages."""
    eager, error = noise(heads, tokens)
    with bridge.using(strategy=strategy):
        whole = m3.logits(model(heads), "pageweaver", prompt(tokens))
        parts = chunked(heads, "pageweaver", tokens, tokens // 2 - 37)
        assert bridge.paths()[3].startswith(f"{strategy} (cuda, bf16), cache ")
    assert bridge.paths()[0] == "sdpa"
    assert nrms(whole, eager) <= MARGIN * error
    assert nrms(parts, eager) <= MARGIN * error
    assert nrms(parts, whole) <= MARGIN * error


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("heads", HEADS)
def test_greedy_tokens_are_eagers(heads: str, strategy: str) -> None:
    """32 tokens after 1,024, each the eager model's choice."""
    ids, error = prompt(1024), noise(heads, 1024)[1]
    model(heads).set_attn_implementation("pageweaver")
    with bridge.using(strategy=strategy):
        tokens = model(heads).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False
        )
    assert tokens.shape == (1, 1056)
    m3.assert_greedy(model(heads), tokens, 1024, error)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_graph_of_a_decode_step(strategy: str) -> None:
    """Replays on a static cache, whose positions move on inside the graph, give the bits of eager calls."""
    chosen = model("16:1")
    caches = [StaticCache(config=chosen.config, max_cache_len=1280) for _ in range(2)]
    token = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)

    def step(cache: Any) -> torch.Tensor:
        return m3.logits(chosen, "pageweaver", token, **m3.with_cache(chosen, cache))

    with bridge.using(strategy=strategy):
        for cache in caches:
            m3.logits(chosen, "pageweaver", prompt(1020), **m3.with_cache(chosen, cache))
        assert bridge.paths()[1].endswith("cache viewed")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.equal(step(caches[0]), step(caches[1]))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(caches[0])
        for index in range(8):  # over the end of a page at 1,024
            token.fill_(2 + index)
            graph.replay()
            assert torch.equal(captured, step(caches[1]))


@pytest.mark.timeout(120, method="thread")
def test_generate_compiled() -> None:
    """transformers compiles a static cache's decode step whole, and runs it in CUDA graphs."""
    chosen = model("16:1")
    ids, error = prompt(1024), noise("16:1", 1024)[1]
    chosen.set_attn_implementation("pageweaver")
    tokens = chosen.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=32,
        do_sample=False,
        cache_implementation="static",
        compile_config=CompileConfig(fullgraph=True, mode="reduce-overhead"),
    )
    m3.assert_greedy(chosen, tokens, 1024, error)


def test_fp8_copy_in_a_model() -> None:
    """Further from eager than BF16 is, and not lost."""
    eager, _ = noise("64:4", 4096)
    plain = m3.logits(model("64:4"), "pageweaver", prompt(4096))
    with bridge.using(fp8_copy=True):
        copied = m3.logits(model("64:4"), "pageweaver", prompt(4096))
        assert bridge.paths()[1] == "union8 (cuda, fp8), cache copied to E4M3"
    assert nrms(plain, eager) < nrms(copied, eager) < 0.5


def test_no_call_waits_for_the_device() -> None:
    """A sparse layer's attention reads nothing back."""
    given = layer_inputs(batch=2, kv_heads=2, index_heads=2, tokens=500, buffer=512, q_len=40, first=460)
    query, key, value, blocks = (tensor.to(DEVICE) for tensor in given)
    positions = torch.arange(460, 500, device=DEVICE)[None]
    for fp8_copy in (False, True):
        with bridge.using(fp8_copy=fp8_copy):
            attend(query, key, value, block_indices=blocks, position_ids=positions)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                attend(query, key, value, block_indices=blocks, position_ids=positions)
            finally:
                torch.cuda.set_sync_debug_mode("default")
