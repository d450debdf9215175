"""The bridge to transformers: its attention function against float64, and whole models against eager ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.reference import nrms

from . import minimax_m3 as m3
from .helpers import FP32_ERROR

if reason := m3.why_not():
    pytest.skip(reason, allow_module_level=True)

from transformers import AttentionInterface, DynamicCache, StaticCache

from pageweaver.bridges import transformers as bridge

# Logits differ from eager's as sdpa's do; the two errors are random, of hundreds of rows.
MARGIN = 1.5
# Half the spacing of numbers of eight significant bits: outputs are rounded once.
BF16_ROUNDING = 2.0**-8
MODULE = SimpleNamespace(layer_idx=7, config=SimpleNamespace(index_block_size=128))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    bridge.register(backend="reference")
    torch._dynamo.reset()
    yield
    bridge.register()


@pytest.fixture
def in_float32() -> Iterator[None]:
    """No rounding of probabilities: only the output's is left."""
    with bridge.using(arithmetic="float32"):
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    return m3.build()


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """The registered function, called as a sparse layer does."""
    out, weights = AttentionInterface()["pageweaver"](
        MODULE, query, key, value, options.pop("attention_mask", None), scaling=128**-0.5, **options
    )
    assert weights is None
    return out


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor, first: int
) -> torch.Tensor:
    """Dense attention in float64 under the mask that blocks and positions make."""
    heads, q_len = query.shape[1:3]
    tokens = torch.arange(key.shape[2])
    chosen = torch.stack([(blocks == page).any(dim=3) for page in range(-(-key.shape[2] // 128))], dim=3)
    chosen = chosen.repeat_interleave(128, dim=3)[..., : key.shape[2]]
    seen = chosen.repeat_interleave(heads // blocks.shape[1], dim=1)
    seen = seen & (tokens <= first + torch.arange(q_len)[:, None])
    group = heads // key.shape[1]
    keys, values = (t.double().nan_to_num().repeat_interleave(group, dim=1) for t in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * 128**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=3)
    return (weights @ values).transpose(1, 2)


def layer_inputs(
    *,
    batch: int,
    kv_heads: int,
    index_heads: int,
    tokens: int,
    buffer: int,
    q_len: int,
    first: int,
    group: int = 4,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, key, value and blocks in score order, the query's own among them; NaN past what is valid."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch, kv_heads * group, q_len, 128, generator=generator).bfloat16()
    caches = torch.randn(2, batch, kv_heads, buffer, 128, generator=generator).bfloat16()
    caches[:, :, :, tokens:] = torch.nan
    own = (first + torch.arange(q_len)) // 128
    scores = torch.rand(batch, index_heads, q_len, -(-buffer // 128), generator=generator)
    scores[..., :] = scores.masked_fill(torch.arange(scores.shape[3]) > own[:, None], -torch.inf)
    scores.scatter_(3, own.expand(batch, index_heads, -1)[..., None], torch.inf)
    best, blocks = scores.topk(min(3, scores.shape[3]), dim=3)
    return query, caches[0], caches[1], blocks.masked_fill(best == -torch.inf, -1)


LAYOUTS = {
    # tokens, buffer, queries, what becomes of the cache
    "whole pages": (512, 512, 40, "viewed"),
    "a part of a page": (500, 500, 40, "copied"),
    "static": (500, 1024, 40, "viewed"),
    "static, odd length": (500, 1000, 40, "copied"),
    "one query": (500, 512, 1, "viewed"),
    "one query at a page's start": (129, 384, 1, "viewed"),
    "whole prompt": (300, 300, 300, "copied"),
}


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "kv_heads", "index_heads"), [(1, 1, 1), (2, 2, 2), (2, 4, 2)])
def test_attention_is_exact(layout: str, batch: int, kv_heads: int, index_heads: int) -> None:
    tokens, buffer, q_len, cache = LAYOUTS[layout]
    first = tokens - q_len
    query, key, value, blocks = layer_inputs(
        batch=batch,
        kv_heads=kv_heads,
        index_heads=index_heads,
        tokens=tokens,
        buffer=buffer,
        q_len=q_len,
        first=first,
    )
    out = attend(query, key, value, block_indices=blocks, position_ids=first + torch.arange(q_len)[None])
    wanted = exact(query, key, value, blocks, first)
    assert out.shape == wanted.shape and out.is_contiguous()
    torch.testing.assert_close(out.double(), wanted, rtol=BF16_ROUNDING, atol=FP32_ERROR)
    assert bridge.paths()[MODULE.layer_idx] == f"union8 (reference, float32), cache {cache}"


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize(
    "strategy", ["per_query", "union4", "regroup_w64", "regroup_w128", "auto", "page_union"]
)
def test_every_strategy_runs(strategy: str) -> None:
    """Chosen for the calls inside, and only for them; the same attention."""
    query, key, value, blocks = layer_inputs(
        batch=2, kv_heads=2, index_heads=2, tokens=512, buffer=512, q_len=40, first=472
    )
    options = {"block_indices": blocks, "position_ids": torch.arange(472, 512)[None]}
    usual = attend(query, key, value, **options)
    with bridge.using(strategy=strategy):
        out = attend(query, key, value, **options)
        assert bridge.paths()[MODULE.layer_idx] == f"{strategy} (reference, float32), cache viewed"
    torch.testing.assert_close(out, usual, rtol=2 * BF16_ROUNDING, atol=FP32_ERROR)
    attend(query, key, value, **options)
    assert bridge.paths()[MODULE.layer_idx].startswith("union8 ")


@pytest.mark.usefixtures("in_float32")
def test_values_with_other_strides_than_keys() -> None:
    """Without a cache, values come straight from their projection: viewed for one request, copied for two."""
    query, key, value, blocks = layer_inputs(
        batch=2, kv_heads=2, index_heads=2, tokens=512, buffer=512, q_len=40, first=472
    )
    projected = value.transpose(1, 2).contiguous().transpose(1, 2)
    for batch, cache in ((1, "viewed"), (2, "copied")):
        given = [tensor[:batch] for tensor in (query, key, projected)]
        # The model hands over no positions where it has none: the queries are the last tokens.
        out = attend(*given, block_indices=blocks[:batch])
        wanted = exact(*given, blocks[:batch], 472)
        torch.testing.assert_close(out.double(), wanted, rtol=BF16_ROUNDING, atol=FP32_ERROR)
        assert bridge.paths()[MODULE.layer_idx].endswith(f"cache {cache}")


def test_default_is_the_strategys_for_bf16() -> None:
    """Probabilities rounded to BF16: 0.23% on N(0, 1) inputs, of which none is left in float32."""
    query, key, value, blocks = layer_inputs(
        batch=2, kv_heads=2, index_heads=2, tokens=512, buffer=512, q_len=40, first=472
    )
    out = attend(query, key, value, block_indices=blocks)
    assert bridge.paths()[MODULE.layer_idx] == "union8 (reference, bf16), cache viewed"
    assert nrms(out.double(), exact(query, key, value, blocks, 472)) < 0.003


def test_view_shares_memory() -> None:
    """`viewed` means that no key was copied."""
    key = torch.randn(3, 4, 256, 128).bfloat16()
    view, stride = bridge._pages_view(key, 128) or (None, 0)
    assert view is not None and view.data_ptr() == key.data_ptr()
    for request in range(3):
        for page in range(2):
            pages = key[request, :, page * 128 : (page + 1) * 128].transpose(0, 1)
            assert torch.equal(view[request * stride + page], pages)
    assert bridge._pages_view(key[:, :, :250], 128) is None


def test_fp8_copy_costs_what_it_says() -> None:
    """About 5% on random inputs, whatever their magnitude; E4M3 ends at 448.

    Rounding to E4M3 moves a number by 2.6% (root mean square). So much comes from V, from P, and from Q and K
    each, as a logit of N(0, 1) inputs is about 1: together twice that.
    """
    query, key, value, blocks = layer_inputs(
        batch=2, kv_heads=2, index_heads=2, tokens=500, buffer=500, q_len=60, first=440
    )
    options = {"block_indices": blocks, "position_ids": torch.arange(440, 500)[None]}
    for factor in (1.0, 2.0**12, 2.0**-12):
        wanted = exact(query, key, value * factor, blocks, 440)
        with bridge.using(fp8_copy=True):
            out = attend(query, key, value * factor, **options)
            assert bridge.paths()[MODULE.layer_idx] == "union8 (reference, fp8), cache copied to E4M3"
            louder = attend(query / factor, key * factor, value * factor, **options)
        assert 0.045 < nrms(out.double(), wanted) < 0.06
        assert torch.equal(louder, out)


def test_arithmetic_is_passed_on() -> None:
    """An E4M3 copy has a choice of two; in FP32 only the copy's rounding is left."""
    query, key, value, blocks = layer_inputs(
        batch=1, kv_heads=2, index_heads=2, tokens=512, buffer=512, q_len=4, first=508
    )
    # The largest of so many N(0, 1) numbers lies between 448 / 128 and 448 / 64.
    copies = [(tensor * 64).to(torch.float8_e4m3fn).bfloat16() / 64 for tensor in (key, value)]
    with bridge.using(fp8_copy=True, arithmetic="float32"):
        out = attend(query, key, value, block_indices=blocks)
    assert bridge.paths()[MODULE.layer_idx] == "union8 (reference, float32), cache copied to E4M3"
    wanted = exact(query, *copies, blocks, 508)
    torch.testing.assert_close(out.double(), wanted, rtol=BF16_ROUNDING, atol=FP32_ERROR)


def test_layers_without_blocks_go_to_sdpa() -> None:
    """With all that they were given: the vision tower's attention is not causal."""
    query, key, value, _ = layer_inputs(
        batch=2, kv_heads=8, index_heads=8, tokens=64, buffer=64, q_len=64, first=0, group=1
    )
    out = attend(query, key, value, is_causal=False)
    wanted, _ = AttentionInterface()["sdpa"](
        MODULE, query, key, value, None, scaling=128**-0.5, is_causal=False
    )
    assert torch.equal(out, wanted) and bridge.paths()[MODULE.layer_idx] == "sdpa"
    assert not torch.equal(out, attend(query, key, value))


def test_empty_selection_is_zero() -> None:
    query, key, value, blocks = layer_inputs(
        batch=1, kv_heads=1, index_heads=1, tokens=512, buffer=512, q_len=4, first=508
    )
    out = attend(query, key, value, block_indices=torch.full_like(blocks, -1))
    assert (out == 0).all()


def _refused(error: type[Exception], message: str, **changes: Any) -> None:
    query, key, value, blocks = layer_inputs(
        batch=2, kv_heads=2, index_heads=2, tokens=512, buffer=512, q_len=4, first=508
    )
    given = {"query": query, "key": key, "value": value, "block_indices": blocks, **changes}
    with pytest.raises(error, match=message):
        attend(**given)


HALF = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"dropout: got 0\.1, supported: 0", {"dropout": 0.1}),
        (ValueError, r"query\.shape\[3\] \(head_dim\): got 64, supported: 128", {"query": HALF}),
        (TypeError, r"query\.dtype: got torch\.float16.*bfloat16", {"query": HALF.half()}),
        (ValueError, r"key\.shape\[0\] \(batch\): got 1", {"key": torch.zeros(1, 2, 512, 128).bfloat16()}),
        (TypeError, r"value\.dtype: got torch\.float32", {"value": torch.zeros(2, 2, 512, 128)}),
        (
            ValueError,
            r"block_indices\.shape: got \(2, 3, 4, 3\)",
            {"block_indices": torch.zeros(2, 3, 4, 3).long()},
        ),
        (
            ValueError,
            r"block_indices\.shape: got \(2, 2, 5, 3\)",
            {"block_indices": torch.zeros(2, 2, 5, 3).long()},
        ),
        (
            ValueError,
            r"attention_mask: got one of torch\.float32",
            {"attention_mask": torch.zeros(2, 1, 4, 512)},
        ),
        (ValueError, "topk", {"block_indices": torch.zeros(2, 2, 4, 33).long()}),
    ],
)
def test_unsupported_is_refused(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    _refused(error, message, **changes)


def test_gradient_is_refused_not_dropped() -> None:
    query = torch.zeros(2, 8, 4, 128, dtype=torch.bfloat16, requires_grad=True)
    _refused(ValueError, "query.requires_grad.*no_grad", query=query)


def test_cpu_tensors_need_the_reference_asked_for() -> None:
    with bridge.using(backend=None):
        _refused(pw.UnsupportedDeviceError, "query.device: got cpu.*backend='reference'")


def test_other_block_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE.config, "index_block_size", 32)
    _refused(ValueError, r"page_size\): got 32, supported")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "union9"}, "strategy: got 'union9'"),
        ({"strategy": "offline_w512"}, "ids"),
        ({"backend": "cpu"}, "backend: got 'cpu'"),
        ({"arithmetic": "fp9"}, "arithmetic: got 'fp9', supported by union8"),
        ({"arithmetic": "split"}, "arithmetic: got 'split', supported by union8"),
        (
            {"arithmetic": "float32", "backend": "cuda"},
            "arithmetic: got 'float32'",
        ),
        ({"arithmetic": "bf16", "fp8_copy": True, "backend": "cuda"}, "with fp8_copy=True: "),
        ({"fp8_copy": "no"}, "fp8_copy: got str, supported: bool"),
    ],
)
def test_options_are_checked_when_registered(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        bridge.register(**options)
    with pytest.raises((TypeError, ValueError), match=message), bridge.using(**options):
        pass
    assert bridge._options.strategy == "union8" and bridge._options.backend == "reference"


def test_operator_check() -> None:
    """torch.library's own tests of schema, fake and dispatch."""
    query, key, value, blocks = layer_inputs(
        batch=2, kv_heads=2, index_heads=2, tokens=500, buffer=512, q_len=4, first=496
    )
    options = {
        "softmax_scale": 0.1,
        "block_size": 128,
        "layer": 1,
        "strategy": "union8",
        "backend": "reference",
    }
    torch.library.opcheck(
        torch.ops.pageweaver.block_attention.default,
        (query, key.nan_to_num(), value.nan_to_num(), blocks, torch.arange(496, 500)[None]),
        {**options, "arithmetic": None, "fp8_copy": False},
    )
    torch.library.opcheck(torch.ops.pageweaver.check_padding.default, (torch.ones(2, 5).bool(),))


def test_missing_transformers_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; import pageweaver.bridges.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install '.[transformers]'" in done.stderr.splitlines()[-1]


# Whole models from here on.


@pytest.mark.parametrize("heads", [{}, {"heads": 16, "kv_heads": 1}], ids=["8:2", "16:1"])
def test_logits_are_eagers(heads: dict[str, int]) -> None:
    model = m3.build(**heads)
    ids = m3.prompt(700, batch_size=2)
    eager, error = m3.noise(model, ids)
    assert nrms(m3.logits(model, "pageweaver", ids), eager) <= MARGIN * error
    path = "union8 (reference, bf16), cache copied"
    assert {layer: bridge.paths()[layer] for layer in range(3)} == {0: "sdpa", 1: path, 2: path}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_chunks_are_the_whole(model: Any, static: bool) -> None:
    """A prompt in one piece, and in chunks that start and end inside of pages, the last a single query."""
    ids = m3.prompt(700, batch_size=2)
    cache = (
        StaticCache(config=model.config, max_cache_len=1024) if static else DynamicCache(config=model.config)
    )
    eager, error = m3.noise(model, ids)
    chunked = m3.chunked_logits(model, "pageweaver", ids, (300, 256, 143, 1), cache)
    assert nrms(chunked, m3.logits(model, "pageweaver", ids)) <= MARGIN * error
    assert nrms(chunked, eager) <= MARGIN * error


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_generates_what_eager_does(model: Any, static: bool) -> None:
    ids = m3.prompt(300, batch_size=2)
    error = m3.noise(model, ids)[1]
    model.set_attn_implementation("pageweaver")
    options = {"cache_implementation": "static"} if static else {}
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=32,
        min_new_tokens=32,
        do_sample=False,
        **options,
    )
    assert tokens.shape == (2, 332)
    m3.assert_greedy(model, tokens, 300, error)
    # The check can fail: other tokens are no greedy ones.
    with pytest.raises(AssertionError, match="behind"):
        m3.assert_greedy(model, torch.cat([ids, tokens[:, 300:].flip(0).roll(1, 1)], 1), 300, error)


def test_fp8_copy_in_a_model(model: Any) -> None:
    """It runs, and is further from eager than BF16 is: the option is not dropped on the way."""
    ids = m3.prompt(300)
    eager = m3.logits(model, "eager", ids)
    plain = m3.logits(model, "pageweaver", ids)
    with bridge.using(fp8_copy=True):
        copied = m3.logits(model, "pageweaver", ids)
    assert nrms(plain, eager) < nrms(copied, eager) < 0.5


def test_right_padding_is_ignored(model: Any) -> None:
    ids = m3.prompt(400, batch_size=2)
    mask = torch.ones_like(ids)
    mask[1, 250:] = 0
    alone = m3.logits(model, "pageweaver", ids[1:, :250])
    padded = m3.logits(model, "pageweaver", ids, attention_mask=mask)
    assert nrms(padded[1:, :250], alone) <= MARGIN * m3.noise(model, ids)[1]


def test_left_padding_is_refused(model: Any) -> None:
    ids = m3.prompt(200, batch_size=2)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    with pytest.raises(ValueError, match="attention_mask: got padding in front of tokens"):
        m3.logits(model, "pageweaver", ids, attention_mask=mask)
    with pytest.raises(ValueError, match="attention_mask: got padding in front of tokens"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static")


def test_packed_sequences_are_refused(model: Any) -> None:
    ids = m3.prompt(200)
    positions = torch.cat([torch.arange(120), torch.arange(80)])[None]
    with pytest.raises(ValueError, match="mask_function: got a pattern other than causal"):
        m3.logits(model, "pageweaver", ids, position_ids=positions, use_cache=False)


def test_training_with_dropout_is_refused() -> None:
    model = m3.build(attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"dropout: got 0\.1"):
        m3.logits(model, "pageweaver", m3.prompt(200))


def test_loaded_with_the_implementation(model: Any, tmp_path: Path) -> None:
    """As the README says: named when a checkpoint is loaded."""
    from transformers import AutoModelForCausalLM

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="bfloat16", attn_implementation="pageweaver"
    ).eval()
    ids = m3.prompt(200)
    with torch.no_grad():
        result = loaded(ids).logits.float()
    assert bridge.paths()[2] == "union8 (reference, bf16), cache copied"
    assert torch.equal(result, m3.logits(model, "pageweaver", ids))


def test_compiled_without_a_graph_break() -> None:
    """The bits of the uncompiled model: a prompt, other options, one query on a static cache; and errors."""
    model = m3.build(num_hidden_layers=2)
    ids = m3.prompt(300)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted = m3.logits(model, "pageweaver", ids, use_cache=False)
    with torch.no_grad():
        assert torch.equal(compiled(ids, use_cache=False).logits.float(), wanted)
        with bridge.using(strategy="union4"):
            assert torch.equal(compiled(ids, use_cache=False).logits.float(), wanted)
            assert bridge.paths()[1].startswith("union4 ")
        caches = [StaticCache(config=model.config, max_cache_len=384) for _ in range(2)]
        for cache in caches:
            m3.logits(model, "pageweaver", ids, **m3.with_cache(model, cache))
        for token in range(2, 5):
            steps = [
                run(torch.full((1, 1), token), **m3.with_cache(model, cache)).logits
                for run, cache in zip((compiled, model), caches, strict=True)
            ]
            assert torch.equal(*steps)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        with pytest.raises(ValueError, match="attention_mask: got padding in front of tokens"):
            compiled(ids, attention_mask=mask, use_cache=False)
