"""Problem builders, targets, poisoned buffers and an independent oracle for the contract tests.

A `Target` is one strategy on one backend, device and arithmetic. Tests of the contract take it as the fixture
``target`` (conftest.py runs them over every reference backend) and make their inputs with the builders
here on ``target.device``. Kernels run the same cases from a folder whose conftest.py overrides that fixture:
``from ..test_cases import *``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import pageweaver as pw
from pageweaver.common.reference import nrms

E4M3 = torch.float8_e4m3fn
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)

# E4M3 has four significant bits: rounding changes a probability by at most this part of itself. BF16 has
# eight; so have two E4M3 parts. (Codes linear in the logit, the unions' "fp8", are up to 7.3% off. A mean
# weighted by them moves by at most half of that times the spread of its values, where half of the weight is
# too large and half too small, and an LSE by more than this only where nearly all keys have the worst of
# logits. So the bounds made of this number stand for them too.)
P_ERROR = {"fp8": 2.0**-4, "split": 2.0**-9, "bf16": 2.0**-9}
# A part f of an octave above a power of two the line through E4M3's numbers is (1 + f) 2**-f 2**(-3/64) of
# the exponential: 0.968, at f = 0, to 1.028. A code is rounded to the nearest, 1 + f by up to 1/16: to
# 2**(-1/16) 0.968 = 0.927 of the exponential at f = 1/16, to 1.5 2**(-7/16) 0.968 = 1.072 at f = 7/16.
LINE_ERROR, LINEAR_ERROR = 0.032, 0.0731
# A probability under half of the smallest scaled E4M3 number, 2**-18 of the largest, is lost (codes linear in
# the logit: under 2**-17.3; no case has more than a few hundredths of a row's weight there), and so is what
# two parts leave of a larger one; 2,048 keys, the most that 16 pages hold, lose less than this together.
P_LOST = {"fp8": 2048 * 2.0**-18, "split": 2048 * 2.0**-18, "bf16": 0.0}
# BF16 has eight significant bits; outputs and stored partials are rounded once each.
BF16_ERROR = 2.0**-9
# Random Q quantised to E4M3: a logit moves by about 0.026 (128 products of N(0, 1) numbers, relative errors
# up to 2**-4, times 1 / sqrt(128)); this is over five times that. The other policies leave Q as it is, and
# rounded probabilities move their sum by at most P_ERROR; two E4M3 parts often have a ninth bit, and half of
# that is asked of them.
RANDOM_LSE_ERROR = {"fp8": 0.15, "split": 1e-3, "bf16": 2.0**-9}
# What is asked for: of "fp8" by the method, of the others in place of BF16, whose outputs alone cost 0.17%.
RANDOM_NRMS = {"fp8": 0.05, "split": 0.003, "bf16": 0.003}
# FP32 sums of up to 4,096 terms of the sizes used here.
FP32_ERROR = 2e-5

# (request, positions [n] int64) -> [n] float: what the keys or values of a request are.
PerToken = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Result:
    """Outputs of one call on the host, widened to float32, which loses nothing."""

    out: torch.Tensor
    lse: torch.Tensor

    def __getitem__(self, rows: Any) -> Result:
        return Result(self.out[rows], self.lse[rows])


@dataclass(frozen=True)
class Target:
    """One way to run a problem."""

    strategy: str
    arithmetic: str = "fp8"
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    backend: str = "reference"

    def __str__(self) -> str:
        options = "".join(f"-{name}={value}" for name, value in self.options.items())
        return f"{self.strategy}{options}-{self.arithmetic}"

    @property
    def owns_queries(self) -> bool:
        """Whether one group computes a query whole, so that grouping cannot touch its bits."""
        return self.strategy != "page_union"

    def load(self, problem: pw.AttentionProblem) -> pw.Strategy:
        """The strategy, with ids searched for this problem where it wants them."""
        options = dict(self.options)
        if self.strategy.startswith("offline_w"):
            options["ids"] = pw.search(
                selection_of(problem),
                window=int(self.strategy.removeprefix("offline_w")),
                group_size=problem.group_size,
            )
        # FP8 policies are refused on a BF16 cache; take its default.
        fp8_only = self.arithmetic in ("fp8", "split")
        arithmetic = None if fp8_only and problem.k_cache.dtype != E4M3 else self.arithmetic
        return pw.load(self.strategy, backend=self.backend, arithmetic=arithmetic, **options)

    def run(
        self,
        problem: pw.AttentionProblem,
        *,
        strategy: pw.Strategy | None = None,
        workspace: pw.Workspace | None = None,
        nan_rows: Sequence[int] = (),
    ) -> Result:
        """One complete call into poisoned outputs and a poisoned workspace, with guard rows checked.

        A NaN outside of `nan_rows` fails here.
        """
        strategy = strategy or self.load(problem)
        workspace = workspace or strategy.workspace(problem)
        poison(workspace)
        float32 = strategy.resolve(problem)[1] == "float32"
        out_buffer = torch.full(
            (problem.total_q + 2, problem.num_qo_heads, problem.head_dim),
            torch.nan,
            dtype=torch.float32 if float32 else torch.bfloat16,
            device=problem.device,
        )
        lse_buffer = torch.full((problem.total_q + 2, problem.num_qo_heads), 777.0, device=problem.device)
        out, lse = out_buffer[1:-1], lse_buffer[1:-1]
        assert strategy(problem, out, lse, workspace) is out
        assert out_buffer[[0, -1]].isnan().all() and (lse_buffer[[0, -1]] == 777.0).all(), "guard rows"
        result = Result(out.float().cpu(), lse.cpu())
        clean = torch.ones(problem.total_q, dtype=torch.bool)
        clean[list(nan_rows)] = False
        assert not result.out[clean].isnan().any() and not result.lse[clean].isnan().any()
        return result


# Every organisation in the FP8 arithmetic; rounding and organisation are independent, so that the two
# executions, by queries and by pages, are enough in the others.
REFERENCE_TARGETS = (
    Target("per_query"),
    Target("union4"),
    Target("union8"),
    Target("regroup_w64"),
    Target("regroup_w128"),
    Target("offline_w512"),
    Target("offline_w2048"),
    Target("page_union", options={"pairs": True}),
    Target("page_union", options={"pairs": False}),
    *(
        Target(strategy, arithmetic)
        for arithmetic in ("split", "bf16", "float32")
        for strategy in ("union8", "page_union")
    ),
)


def poison(workspace: pw.Workspace) -> None:
    """Fill every buffer with what breaks a reader of memory that nobody wrote."""
    for buffer in workspace.buffers.values():
        if buffer.dtype == E4M3:
            buffer.view(torch.uint8).fill_(0x7F)  # NaN
        elif buffer.dtype.is_floating_point:
            buffer.fill_(torch.nan)
        else:
            buffer.fill_(torch.iinfo(buffer.dtype).max)


def selection_of(problem: pw.AttentionProblem) -> pw.Selection:
    """The selection that a problem carries."""
    return pw.Selection(
        name="problem",
        q2k_indices=problem.q2k_indices.cpu().numpy(),
        cu_seqlens_q=problem.cu_seqlens_q.cpu().numpy(),
        seqused_k=problem.seqused_k.cpu().numpy(),
        page_size=problem.page_size,
    )


def replaced(problem: pw.AttentionProblem, **changes: Any) -> pw.AttentionProblem:
    """A problem with some fields changed, checked anew."""
    return dataclasses.replace(problem, **changes)


def ids_tensor(rows: Sequence[Sequence[int]], topk: int = 16) -> torch.Tensor:
    """int32 ``[1, total_q, topk]`` from lists of pages, filled up with -1."""
    return torch.tensor([[*row, *[-1] * (topk - len(row))] for row in rows], dtype=torch.int32).reshape(
        1, len(rows), topk
    )


def page_number(_request: int, positions: torch.Tensor) -> torch.Tensor:
    """V = page number for pages of 128: the output says which pages were used."""
    return positions // 128


def constant(value: float) -> PerToken:
    """The same number in every token."""
    return lambda _request, positions: torch.full(positions.shape, value)


zero = constant(0.0)


def paged_case(
    ids: torch.Tensor | Sequence[Sequence[int]],
    *,
    prefixes: Sequence[int],
    lengths: Sequence[int] | None = None,
    q0: float | torch.Tensor = 0.0,
    k0: PerToken = zero,
    v: PerToken = page_number,
    group_size: int = 16,
    page_size: int = 128,
    kv_dtype: torch.dtype = E4M3,
    unwritten: tuple[float, float] = (torch.nan, torch.nan),
    placement: int = 0,
    device: str | torch.device = "cpu",
    **scales: Any,
) -> pw.AttentionProblem:
    """The shared fixture of the cases: readable numbers over a poisoned paged cache.

    Only dim 0 of q and k is non-zero, so a logit is ``q0 * k0 / sqrt(128)``; all dims of v are equal.
    Everything that no token owns is poison: slots past the KV lengths, physical page 0 (never mapped), a
    spare page, and page-table entries past a request's pages (0x7FFFFFFF).

    Parameters
    ----------
    ids : torch.Tensor or nested sequence
        Logical pages: int32 ``[num_kv_heads, total_q, topk]``, or lists for one KV head.
    prefixes : sequence of int
        KV tokens before each request's queries.
    lengths : sequence of int, optional
        Queries of each request, default one request of all rows; more rows than their sum lie past the last
        request.
    q0 : float or torch.Tensor
        Broadcast to ``[total_q, num_qo_heads]``.
    k0, v : callable
        (request, positions) to numbers.
    unwritten : tuple of float
        What unowned slots of the K and V caches hold.
    placement : int
        Seed of the physical pages' permutation.
    """
    ids = ids if isinstance(ids, torch.Tensor) else ids_tensor(ids)
    num_kv_heads, total_q, _ = ids.shape
    lengths = [total_q] if lengths is None else list(lengths)
    used = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    counts = [-(-tokens // page_size) for tokens in used]
    num_pages = sum(counts) + 2
    physical = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(placement))
    page_table = torch.full((len(lengths), max([1, *counts])), INT32_MAX, dtype=torch.int32)
    shape = (num_pages, page_size, num_kv_heads, 128)
    k_cache, v_cache = (torch.full(shape, fill) for fill in unwritten)
    start = 0
    for request, (tokens, count) in enumerate(zip(used, counts, strict=True)):
        page_table[request, :count] = physical[start : start + count]
        start += count
        positions = torch.arange(tokens)
        where = (page_table[request, positions // page_size].long(), positions % page_size)
        keys = torch.zeros(tokens, num_kv_heads, 128)
        keys[:, :, 0] = k0(request, positions)[:, None]
        k_cache[where] = keys
        v_cache[where] = v(request, positions).float()[:, None, None].expand_as(keys)
    q = torch.zeros(total_q, num_kv_heads * group_size, 128)
    q0 = torch.as_tensor(q0, dtype=torch.float32)
    q[:, :, 0] = q0[:, None] if q0.ndim == 1 else q0
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int()
    return pw.AttentionProblem(
        q=q.bfloat16().to(device),
        k_cache=k_cache.to(kv_dtype).to(device),
        v_cache=v_cache.to(kv_dtype).to(device),
        q2k_indices=ids.to(device),
        cu_seqlens_q=boundaries.to(device),
        seqused_k=torch.tensor(used, dtype=torch.int32).to(device),
        page_table=page_table.to(device),
        **scales,
    )


def choices_problem(device: str | torch.device = "cpu") -> pw.AttentionProblem:
    """Five windows of 128 queries, and what `auto` chooses.

    Alike (0); two kinds in turns, in one half (1) and in both (1, the search of all gives up half way); 32
    kinds (2); a trap, where the search of all goes on to its end and comes out worse (0 or 1).
    """
    alike, turns = torch.arange(4).repeat(128, 1), torch.arange(4).repeat(128, 1)
    turns[::2] += 4
    kinds = torch.cat([torch.arange(64).view(32, 2), torch.full((32, 2), -1)], dim=1).repeat(4, 1)
    # Tiles of neighbours with other pages strewn in: the greedy takes what is cheap and leaves a costly rest.
    rng = torch.Generator().manual_seed(54)
    strewn = torch.rand(128, 4, generator=rng) < 0.3
    trap = torch.randint(70, (32, 4), generator=rng).repeat_interleave(4, dim=0)
    trap = torch.where(strewn, torch.randint(70, (128, 4), generator=rng), trap)
    problem = random_problem(lengths=(640,), prefixes=(9000,), topk=4, device=device)
    ids = torch.full(problem.q2k_indices.shape, -1, dtype=torch.int32)
    ids[0, :640] = torch.cat([alike, alike[:64], turns[:64], turns, kinds, trap])
    return replaced(problem, q2k_indices=ids.to(device))


def random_problem(
    *,
    lengths: Sequence[int] = (21, 1, 0, 34),
    prefixes: Sequence[int] = (300, 0, 64, 777),
    past_rows: int = 3,
    num_kv_heads: int = 1,
    group_size: int = 16,
    topk: int = 8,
    page_size: int = 128,
    kv_dtype: torch.dtype = E4M3,
    seed: int = 0,
    device: str | torch.device = "cpu",
    **scales: Any,
) -> pw.AttentionProblem:
    """Random numbers, messy ids, strided views: what a serving engine may hand over.

    Rows hold visible pages in any order with -1, duplicates, future pages and ids of no page among them; some
    rows are empty. Q is a slice of packed QKV rows, K and V are halves of packed rows, ids are a
    token-major buffer transposed, the page table is cut from a wider one; all gaps are poison.
    """
    rng = torch.Generator().manual_seed(seed)
    used = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    counts = [-(-tokens // page_size) for tokens in used]
    total_q, heads = sum(lengths) + past_rows, num_kv_heads * group_size
    num_pages, max_pages = sum(counts) + 2, max([1, *counts])
    physical = torch.randperm(num_pages, generator=rng).int()
    table = torch.full((len(lengths), max_pages + 5), INT32_MAX, dtype=torch.int32)
    packed = torch.full((num_pages, page_size, num_kv_heads, 256), torch.nan)
    ids = torch.full((total_q, num_kv_heads, topk), INT32_MAX, dtype=torch.int32)
    start = row = 0
    for request, (tokens, count, length) in enumerate(zip(used, counts, lengths, strict=True)):
        table[request, :count] = physical[start : start + count]
        start += count
        positions = torch.arange(tokens)
        where = (table[request, positions // page_size].long(), positions % page_size)
        packed[where] = torch.randn(tokens, num_kv_heads, 256, generator=rng)
        for position in range(tokens - length, tokens):
            local = position // page_size
            # Near the end of what is visible, so that neighbours share pages and future pages come up.
            drawn = (
                local + 2 - torch.randint(0, min(local + 3, 3 * topk), (num_kv_heads, topk), generator=rng)
            )
            kind = torch.rand(num_kv_heads, topk, generator=rng)
            drawn[kind < 0.1] = -1
            drawn[(kind >= 0.1) & (kind < 0.15)] = INT32_MAX
            drawn[(kind >= 0.15) & (kind < 0.2)] = INT32_MIN + position
            drawn[torch.rand(num_kv_heads, generator=rng) < 0.06] = -1
            ids[row] = drawn.int()
            row += 1
    qkv = torch.full((total_q, heads + 2, 128), torch.nan)
    qkv[:, 1:-1] = torch.randn(total_q, heads, 128, generator=rng)
    qkv[row:] = torch.nan  # rows past the last request are nobody's
    wide_ids = torch.full((total_q, num_kv_heads, topk + 3), 0, dtype=torch.int32)
    wide_ids[:, :, :topk] = ids
    # To the device first, then sliced: a copy of a view would not keep its strides.
    qkv_device, packed_device = qkv.bfloat16().to(device), packed.to(kv_dtype).to(device)
    return pw.AttentionProblem(
        q=qkv_device[:, 1:-1],
        k_cache=packed_device[..., :128],
        v_cache=packed_device[..., 128:],
        q2k_indices=wide_ids.to(device)[:, :, :topk].transpose(0, 1),
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        seqused_k=torch.tensor(used, dtype=torch.int32).to(device),
        page_table=table.to(device)[:, :max_pages],
        **scales,
    )


def visible_pages(problem: pw.AttentionProblem) -> list[list[list[int]]]:
    """S_i by the words of the contract, from the raw tensors: ``[num_kv_heads][total_q]`` sorted pages."""
    bounds = problem.cu_seqlens_q.tolist()
    raw = problem.q2k_indices.tolist()
    pages: list[list[list[int]]] = [[[] for _ in range(problem.total_q)] for _ in raw]
    for request, length in enumerate(problem.seqused_k.tolist()):
        first, last = bounds[request], bounds[request + 1]
        for head, rows in enumerate(raw):
            for row in range(first, last):
                position = length - (last - first) + (row - first)
                pages[head][row] = sorted(
                    {p for p in rows[row] if p >= 0 and p * problem.page_size <= position}
                )
    return pages


def naive_attention(
    problem: pw.AttentionProblem, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 1 and 2, one query and head after another, sharing no code with the package. On the host."""
    bounds = problem.cu_seqlens_q.tolist()
    lengths = problem.seqused_k.tolist()
    table = problem.page_table.tolist()
    q, keys, values = (x.cpu().to(dtype) for x in (problem.q, problem.k_cache, problem.v_cache))
    scales = (problem.softmax_scale, problem.k_scale, problem.v_scale)
    softmax_scale, k_scale, v_scale = (float(scale) for scale in scales)
    out = torch.zeros(problem.total_q, problem.num_qo_heads, problem.head_dim, dtype=dtype)
    lse = torch.full((problem.total_q, problem.num_qo_heads), -torch.inf, dtype=dtype)
    pages = visible_pages(problem)
    for request in range(problem.batch_size):
        first, last = bounds[request], bounds[request + 1]
        for row in range(first, last):
            position = lengths[request] - last + row
            for head in range(problem.num_kv_heads):
                tokens = [
                    (table[request][page], slot)
                    for page in pages[head][row]
                    for slot in range(problem.page_size)
                    if page * problem.page_size + slot <= position
                ]
                if not tokens:
                    continue
                where = tuple(torch.tensor(tokens).T)
                for qo in range(head * problem.group_size, (head + 1) * problem.group_size):
                    logits = keys[(*where, head)] @ q[row, qo] * (softmax_scale * k_scale)
                    weights = torch.exp(logits - logits.max())
                    out[row, qo] = weights @ values[(*where, head)] / weights.sum() * v_scale
                    lse[row, qo] = logits.max() + weights.sum().log()
    return out, lse


def assert_same_bits(actual: Result, expected: Result) -> None:
    """Equal bit for bit, signs of zeros and NaN payloads included."""
    for name in ("out", "lse"):
        a, b = (getattr(x, name).contiguous().view(torch.int32) for x in (actual, expected))
        assert a.shape == b.shape
        different = (a != b).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert not different, f"{name} differs in rows {different[:8]}"


def assert_repeats(target: Target, actual: Result, expected: Result, spread: float) -> None:
    """The same bits where one group owns a query; page_union may group the pages of a row otherwise."""
    if target.owns_queries:
        assert_same_bits(actual, expected)
    else:
        assert_close(target, actual, expected.out, expected.lse, spread)


def assert_empty(result: Result) -> None:
    """Contract point 1: exactly +0.0 and -inf."""
    assert (result.out.contiguous().view(torch.int32) == 0).all()
    assert (result.lse == -torch.inf).all()


def assert_close(
    target: Target,
    result: Result,
    out: torch.Tensor | float,
    lse: torch.Tensor | float | None = None,
    spread: float = 0.0,
) -> None:
    """Compare with exact values inside what the arithmetic may round.

    Parameters
    ----------
    spread : float
        Largest difference between values that one row mixes with unequal weights; 0 where the weights are
        equal, and so rounded alike.

    Notes
    -----
    With weights w (1 + d) and d within +-e, the weighted mean moves by
    ``sum w d (v - mean) / sum w (1 + d)``, at most ``spread * e / (1 - e)``; the LSE by at most
    ``-log(1 - e)``. Outputs are then rounded to BF16, and in page_union partials before them.
    """
    out = torch.as_tensor(out, dtype=torch.float32)
    magnitude = out.abs()
    if target.arithmetic == "float32":
        tolerance = FP32_ERROR * (1 + magnitude)
        lse_tolerance = FP32_ERROR
    else:
        p_error = P_ERROR[target.arithmetic]
        weight_error = p_error / (1 - p_error) + P_LOST[target.arithmetic]
        tolerance = spread * weight_error + 2.5 * BF16_ERROR * magnitude
        lse_tolerance = (0.0 if spread == 0 else weight_error) + FP32_ERROR
    error = (result.out - out).abs()
    assert (error <= tolerance).all(), f"out: error {error.max()}, got {result.out.flatten()[:4]}"
    if lse is not None:
        expected = torch.as_tensor(lse, dtype=torch.float32).expand_as(result.lse)
        dead = expected == -torch.inf
        assert torch.equal(result.lse == -torch.inf, dead), "lse: -inf in other rows"
        error = torch.where(dead, 0.0, (result.lse - expected).abs() / expected.abs().clamp(min=1.0))
        assert (error <= lse_tolerance).all(), f"lse: error {error.max()}, got {result.lse.flatten()[:4]}"


def assert_random(target: Target, result: Result, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Compare with float64 on N(0, 1) inputs: within float rounding, or within what the policy costs."""
    dead = lse == -torch.inf
    assert torch.equal(result.lse == -torch.inf, dead), "lse: -inf in other rows"
    assert (result.out[dead] == 0).all()
    lse_error = torch.where(dead, 0.0, (result.lse.double() - lse).abs()).max()
    if target.arithmetic == "float32":
        error = float((result.out.double() - out).abs().max())
        assert error <= FP32_ERROR and lse_error <= FP32_ERROR, f"out: error {error}, lse: {lse_error}"
    else:
        error = nrms(result.out, out)
        assert error <= RANDOM_NRMS[target.arithmetic], f"NRMS {error}"
        assert lse_error <= RANDOM_LSE_ERROR[target.arithmetic], f"lse: error {lse_error}"
