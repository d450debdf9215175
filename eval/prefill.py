"""Where does a long prefill's time go in a layer of MiniMax-M3: the indexer, attention, or the rest?

Sparse layers of transformers' own class, real widths and random weights, read a prompt in chunks on a
DynamicCache. The prompt is random embeddings; a smooth one, whose embeddings move from one random point to
the next in a straight line, makes neighbours choose alike, as text does. Arms are strategies of the bridge,
``union8/fp8_copy`` one on an E4M3 copy; they take turns in every round, in an order that changes. A row's
`median_ms` is over rounds, for one layer and the whole prompt. Before it is timed, an arm's attention in the
last chunk is compared with float64 on sampled rows; a red check stops the report. At the end transformers'
eager attention reads the same chunks, or runs out of memory.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from pageweaver.bridges import transformers as bridge
from pageweaver.common.reference import nrms
from pageweaver.common.strategy import available, load
from pageweaver.eval.operator import number
from pageweaver.eval.output import CheckFailed, Report, part_of

BENCH = "prefill"
TIMED = "pageweaver_timed"
EAGER = "eager"  # arm of a row of transformers' own attention
BOUNDARIES = ("indexer", "attention", "rest", "layer")
SAMPLED_ROWS = 33
REUSE_QUERIES = 8  # of a group of union8, at 16 query heads a KV head
FP8_COPY = "fp8_copy"
# Queries and keys are normalised here, so that errors are about those of N(0, 1) inputs: 0.23% and 5.2%.
MOST_NRMS = {False: 0.01, True: 0.1}


def real_config(layers: int) -> Any:
    """Sparse layers as wide as the released model's; prompts are embeddings, and need no vocabulary."""
    from transformers import MiniMaxM3VLTextConfig

    return MiniMaxM3VLTextConfig(
        num_hidden_layers=layers,
        layer_types=["minimax_m3_sparse"] * layers,
        vocab_size=2,
        bos_token_id=0,
        eos_token_id=1,
    )


def parse_arms(words: str) -> dict[str, dict[str, Any]]:
    """Arms of a comma-separated list and their options of the bridge, without repetitions.

    Raises
    ------
    ValueError
        None, or one that is no strategy, that needs ids, or that names another variant than an E4M3 copy.
    """
    arms: dict[str, dict[str, Any]] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        strategy, *variants = word.split("/")
        if variants not in ([], [FP8_COPY]):
            raise ValueError(f"strategies: got {word!r}, supported after a slash: {FP8_COPY}")
        load(strategy)
        arms[word] = {"strategy": strategy, "fp8_copy": bool(variants)}
    if not arms:
        raise ValueError(f"strategies: got none, supported: {', '.join(available())}")
    return arms


def make_prompt(config: Any, tokens: int, smooth: int, seed: int, device: torch.device) -> torch.Tensor:
    """Embeddings ``[1, tokens, hidden_size]``: a random one every `smooth` tokens, straight lines between."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(1, config.hidden_size, -(-tokens // smooth), generator=generator).to(device)
    if smooth > 1:
        points = torch.nn.functional.interpolate(points, scale_factor=smooth, mode="linear")[..., :tokens]
    return (points.transpose(1, 2) * config.initializer_range).to(torch.bfloat16)


class Stopwatch:
    """Sums of times between marks, by part: of events on a CUDA device, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[str, Any, Any]] = []

    def mark(self) -> Any:
        """Now, in the order of the device's work."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, part: str, start: Any) -> None:
        """A part that began at `start` ends now."""
        self.spans.append((part, start, self.mark()))

    def take(self) -> dict[str, float]:
        """Milliseconds of every part since the last `take`."""
        if self.cuda:
            torch.cuda.synchronize()
        sums: dict[str, float] = defaultdict(float)
        for part, start, end in self.spans:
            sums[part] += start.elapsed_time(end) if self.cuda else (end - start) * 1e3
        self.spans.clear()
        return sums


class Prefill:
    """A model whose layers are timed and whose attention is checked."""

    def __init__(self, config: Any, device: torch.device, seed: int) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModel

        self._bridged = AttentionInterface()[bridge.IMPLEMENTATION]
        AttentionInterface.register(TIMED, self._attention)
        AttentionMaskInterface.register(TIMED, AttentionMaskInterface()[bridge.IMPLEMENTATION])
        torch.manual_seed(seed)
        with torch.device(device):
            self.model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation=TIMED).eval()
        self.watch = Stopwatch(device)
        self.checking = False
        self.errors: list[float] = []
        self.reuse: list[float | None] = []  # of a layer each
        for layer in self.model.layers:
            self._time(layer, "layer")
            self._time(layer.self_attn.indexer, "indexer")

    def _time(self, module: torch.nn.Module, part: str) -> None:
        starts: list[Any] = []
        module.register_forward_pre_hook(lambda *_: starts.append(self.watch.mark()))
        module.register_forward_hook(lambda *_: self.watch.add(part, starts.pop()))

    def _attention(self, module: torch.nn.Module, *tensors: Any, **options: Any) -> Any:
        start = self.watch.mark()
        out, weights = self._bridged(module, *tensors, **options)
        self.watch.add("attention", start)
        if self.checking:
            query, key, value = tensors[:3]
            blocks = options["block_indices"]
            rows = torch.randperm(query.shape[2], device=query.device)[:SAMPLED_ROWS]
            size: Any = module.config.index_block_size  # type: ignore[union-attr]
            wanted = exact_rows(query, key, value, blocks, rows, size, options["scaling"])
            self.errors.append(nrms(out[0, rows].cpu(), wanted.cpu()))
            self.reuse.append(reuse(blocks, -(-key.shape[2] // size)))
        return out, weights

    @torch.no_grad()
    def run(self, prompt: torch.Tensor, chunk: int, *, check: bool = False) -> int:
        """Read a prompt; returns the tokens read, fewer where memory ran out."""
        from transformers import DynamicCache

        # Its name changed from one release to another.
        names = inspect.signature(self.model.forward).parameters
        cache = {"cache" if "cache" in names else "past_key_values": DynamicCache(config=self.model.config)}
        self.errors, self.reuse = [], []
        read = 0
        for part in prompt.split(chunk, dim=1):
            self.checking = check and read + part.shape[1] == prompt.shape[1]
            try:
                self.model(inputs_embeds=part, **cache)
            except torch.OutOfMemoryError:
                break
            read += part.shape[1]
        return read


def exact_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    block_size: int,
    scaling: float,
) -> torch.Tensor:
    """float64 ``[rows, heads, head_dim]`` of sampled queries, which are the first request's last tokens."""
    tokens = torch.arange(key.shape[2], device=query.device)
    seen_causally = tokens <= (key.shape[2] - query.shape[2] + rows)[:, None]
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(key.shape[1]):
        own = blocks[0, head * blocks.shape[1] // key.shape[1], rows]
        seen = seen_causally & (own[:, :, None] == tokens // block_size).any(dim=1)
        q = query[0, head * group : (head + 1) * group, rows].double()
        logits = (q @ key[0, head].double().T * scaling).masked_fill(~seen, -torch.inf)
        heads.append(logits.softmax(dim=2) @ value[0, head].double())
    return torch.cat(heads).transpose(0, 1)


def reuse(blocks: torch.Tensor, pages: int) -> float | None:
    """Edges a visit (Eq. 3) of the first request's whole groups of `REUSE_QUERIES`; None of none."""
    whole = blocks.shape[2] // REUSE_QUERIES * REUSE_QUERIES
    chosen = torch.zeros(blocks.shape[1], whole, pages + 1, dtype=torch.bool, device=blocks.device)
    ids = blocks[0, :, :whole]
    chosen.scatter_(2, torch.where(ids < 0, pages, ids), True)
    chosen = chosen[..., :pages]
    visits = int(chosen.unflatten(1, (-1, REUSE_QUERIES)).any(dim=2).sum())
    return int(chosen.sum()) / visits if visits else None


def measure(
    config: Any,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    tokens: int,
    chunk: int,
    smooths: Sequence[int],
    rounds: int,
    header: Mapping[str, Any],
    device: torch.device,
    seed: int,
    report: Report,
) -> Iterator[dict[str, Any]]:
    """Time prefills with every arm.

    Parameters
    ----------
    config : MiniMaxM3VLTextConfig
        Whose layers are all sparse.
    arms : mapping
        From `parse_arms`.
    tokens, chunk : int
        Of the prompt, and of each forward pass.
    smooths : sequence of int
        Prompts, by the tokens from one random embedding to the next.
    rounds : int
        Samples of each arm.
    header : mapping
        What begins every row.
    device : torch.device
        On the CPU the reference backend runs, for a look at what the rows hold.
    seed : int
        Of weights and prompts.
    report : callable
        Told the fraction done.

    Yields
    ------
    dict
        For each prompt, one JSON-ready row an arm and boundary, then one of transformers' eager attention.

    Raises
    ------
    CheckFailed
        An arm's error against float64 is above `MOST_NRMS`.
    MemoryError
        An arm, or the model's own indexer, runs out of device memory.
    KeyboardInterrupt
        Ctrl-C; rows of the rounds finished before it have been yielded.
    """
    import transformers

    bridge.register(backend=None if device.type == "cuda" else "reference")
    report(0.0, "building the model")
    prefill = Prefill(config, device, seed)
    for index, smooth in enumerate(smooths):
        case = {
            **header,
            "case": f"{tokens} tokens in chunks of {chunk}, a random one every {smooth}",
            "transformers": transformers.__version__,
            "layers": config.num_hidden_layers,
            "heads": f"{config.num_attention_heads}:{config.num_key_value_heads}",
            "hidden_size": config.hidden_size,
            "tokens": tokens,
            "chunk": chunk,
            "smooth": smooth,
        }
        prompt = make_prompt(config, tokens, smooth, seed, device)
        yield from _measure(prefill, prompt, arms, case, rounds, part_of(report, index, len(smooths)))


def _measure(
    prefill: Prefill,
    prompt: torch.Tensor,
    arms: Mapping[str, Mapping[str, Any]],
    case: Mapping[str, Any],
    rounds: int,
    report: Report,
) -> Iterator[dict[str, Any]]:
    tokens, chunk, layers = case["tokens"], case["chunk"], case["layers"]

    def read_all(arm: str, *, check: bool = False) -> None:
        with bridge.using(**arms[arm]):
            if prefill.run(prompt, chunk, check=check) < tokens:
                raise MemoryError(f"{arm}: a prefill of {case['case']} does not fit")

    known: dict[str, dict[str, Any]] = {}
    prefill.model.set_attn_implementation(TIMED)
    for arm, options in arms.items():
        report(0.1, f"checking {arm}")
        if prompt.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        # A run of its own: what a first one compiles or allocates is in no timed one, nor is the check.
        read_all(arm, check=True)
        error, most = max(prefill.errors), MOST_NRMS[options["fp8_copy"]]
        if not error <= most:
            raise CheckFailed(f"{arm}: got NRMS {error:.4f} against float64, supported: at most {most}")
        reused = [one for one in prefill.reuse if one is not None]
        known[arm] = {"path": bridge.paths()[0], "nrms": error}
        known[arm]["reuse"] = statistics.mean(reused) if reused else None
        known[arm]["peak_bytes"] = torch.cuda.max_memory_allocated() if prompt.is_cuda else None
    prefill.watch.take()
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    done, interrupted = 0, False
    try:
        for turn in range(rounds):
            for place in range(len(arms)):
                arm = list(arms)[(turn + place) % len(arms)]
                report(0.2 + 0.7 * turn / rounds, f"timing {arm}")
                read_all(arm)
                parts = prefill.watch.take()
                parts["rest"] = parts["layer"] - parts["indexer"] - parts["attention"]
                for boundary in BOUNDARIES:
                    samples[arm, boundary].append(parts[boundary] / layers)
            done = turn + 1
    except KeyboardInterrupt:
        if done == 0:
            raise
        interrupted = True
    for (arm, boundary), milliseconds in samples.items():
        finished = milliseconds[:done]
        own = {"arm": arm, "boundary": boundary, "median_ms": statistics.median(finished)}
        yield {**case, **own, "samples_ms": finished, **known[arm], "interrupted": interrupted}
    if interrupted:
        raise KeyboardInterrupt
    report(0.9, "transformers' eager attention")
    if prompt.is_cuda:
        torch.cuda.empty_cache()
    prefill.model.set_attn_implementation("eager")
    read = prefill.run(prompt, chunk)
    took = prefill.watch.take()["layer"] / layers
    fits = read == tokens
    own = {"arm": EAGER, "boundary": "layer", "median_ms": took if fits else None}
    yield {**case, **own, "out_of_memory": not fits, "tokens_read": read}


def print_prefill(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line an arm: milliseconds a layer, in parts, those there are; last what eager attention did."""
    timed = [row for row in rows if row["arm"] != EAGER]
    table = Table("arm", *BOUNDARIES, "NRMS", "reuse", box=box.SIMPLE, title=f"{rows[0]['case']}: ms a layer")
    for arm in dict.fromkeys(row["arm"] for row in timed):
        own = {row["boundary"]: row for row in timed if row["arm"] == arm}
        milliseconds = [number(own.get(part, {}).get("median_ms"), ".2f") for part in BOUNDARIES]
        some = next(iter(own.values()))  # what was checked is in every row of an arm
        table.add_row(arm, *milliseconds, number(some["nrms"], ".2%"), number(some["reuse"], ".2f"))
    console.print(table)
    # An interrupted case has none.
    for eager in (row for row in rows if row["arm"] == EAGER):
        done = f"{eager['tokens_read']:,} of {eager['tokens']:,} tokens"
        end = (
            "then memory ran out" if eager["out_of_memory"] else f"{eager['median_ms']:.2f} ms a layer, once"
        )
        console.print(f"Eager attention read {done}: {end}.")
