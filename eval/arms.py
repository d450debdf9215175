"""The arms of every measurement: one table of names, and what each makes.

An arm is ``NAME`` or ``NAME/VARIANT/...``: a strategy, a diagnostic order or a baseline, with options.
``union8/cluster`` is union8 in another mapping, ``regroup_w128/rounds`` groups for rounds,
``page_union/single`` pairs no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from pageweaver.common.problem import (
    HEAD_DIM,
    TILE_ROWS,
    AttentionProblem,
    check_selection,
    selection_support,
)
from pageweaver.common.reference import nrms
from pageweaver.common.selection import Selection
from pageweaver.common.strategy import Strategy, available, load
from pageweaver.eval.baselines import BASELINES, Baseline
from pageweaver.eval.baselines.dense import Dense
from pageweaver.eval.output import CheckFailed
from pageweaver.strategies.regroup.diagnostics import FixedIds, MaterialisedReorder, hashed_ids, random_ids
from pageweaver.strategies.regroup.offline import TILES_PER_GROUP, search

OFFLINE_WINDOWS = {"offline_w512": 512, "offline_w2048": 2048}
ORIGINAL = "union8"

# Variant -> options of the strategy's constructor.
VARIANTS: Mapping[str, Mapping[str, str | bool]] = {
    "cluster": {"mapping": "cluster"},
    "single": {"pairs": False},
    "visits": {"objective": "visits"},
    "rounds": {"objective": "rounds"},
    "fp8": {"arithmetic": "fp8"},
    "split": {"arithmetic": "split"},
    "bf16": {"arithmetic": "bf16"},
    "float32": {"arithmetic": "float32"},
}
# Arms that answer a problem of their own: `expected` says which.
ANSWERS_ANOTHER = (MaterialisedReorder, Dense)
# What decides the order and not how it is executed: a fixed order takes none of these as an option.
ORDER_OPTIONS = ("objective",)

SAMPLED_ROWS = 33  # as the paper samples
# On N(0, 1) inputs rounding of single FP8 probabilities and queries is about 4%, that of BF16 ones 0.23%, of
# split ones 0.31%; an arm past its bound is wrong, not imprecise.
MOST_NRMS = {"fp8": 0.05}
MOST_NRMS_OTHERWISE = 0.005

Options = dict[str, Any]
# (selection, options that decide the order, query heads a KV head) -> int32 [num_kv_heads, total_q].
Order = Callable[[Selection, Options, int], torch.Tensor]


@dataclass(frozen=True)
class Diagnostic:
    """An order made ahead, and how it is executed.

    Attributes
    ----------
    order : callable
        Makes the ids.
    about : str
        A line for tables.
    kind : type
        The strategy that executes them.
    """

    order: Order
    about: str
    kind: type[FixedIds] | type[MaterialisedReorder] = FixedIds


def _greedy(name: str) -> Order:
    """The order that an online strategy makes, by its reference."""

    def order(selection: Selection, options: Options, group_size: int) -> torch.Tensor:
        strategy = load(name, backend="reference", **options)
        schedule: Any = strategy.prepare(counting_problem(selection, group_size))
        return schedule.query_ids

    return order


def _searched(window: int) -> Order:
    def order(selection: Selection, options: Options, group_size: int) -> torch.Tensor:
        found = search(selection, window=window, group_size=group_size, **options)
        return torch.from_numpy(found.query_ids)

    return order


def _random(selection: Selection, options: Options, group_size: int) -> torch.Tensor:
    _refuse(options, "random_ids")
    boundaries = selection.cu_seqlens_q.tolist()
    return torch.from_numpy(random_ids(boundaries, selection.num_kv_heads, selection.total_q))


def _hashed(selection: Selection, options: Options, group_size: int) -> torch.Tensor:
    _refuse(options, "hash_w128")
    support, boundaries = selection_support(selection).numpy(), selection.cu_seqlens_q.tolist()
    group = TILES_PER_GROUP * TILE_ROWS // group_size
    return torch.from_numpy(hashed_ids(support, boundaries, window=128, queries_per_group=group))


def _refuse(options: Options, name: str) -> None:
    if options:
        raise ValueError(f"arms: got {next(iter(options))} for {name}, supported: none")


DIAGNOSTICS: Mapping[str, Diagnostic] = {
    "fixed_w64": Diagnostic(_greedy("regroup_w64"), "ids of regroup_w64, ready"),
    "fixed_w128": Diagnostic(_greedy("regroup_w128"), "ids of regroup_w128, ready"),
    "fixed_auto": Diagnostic(_greedy("auto"), "ids of auto, ready"),
    "fixed_w512": Diagnostic(_searched(512), "ids of offline_w512, ready"),
    "fixed_w2048": Diagnostic(_searched(2048), "ids of offline_w2048, ready"),
    "random_ids": Diagnostic(_random, "a random order in each request"),
    "hash_w128": Diagnostic(_hashed, "a global order by minimum hashes, then the greedy in windows of 128"),
    "reorder_w128": Diagnostic(
        _greedy("regroup_w128"),
        "q and page ids moved into W128's order, outputs moved back",
        MaterialisedReorder,
    ),
}
# Online strategy -> the arm that runs its ids ready-made: T_fixed_ids of Eq. 7.
FIXED = {"regroup_w64": "fixed_w64", "regroup_w128": "fixed_w128", "auto": "fixed_auto"}


def arm_names() -> tuple[str, ...]:
    """Every name that an arm may start with."""
    return (*available(), *DIAGNOSTICS, *BASELINES)


def parse_arm(arm: str) -> tuple[str, list[str]]:
    """Split an arm into its name and its variants.

    Raises
    ------
    ValueError
        An unknown name or variant, the known ones are listed; or two variants of one option.
    """
    name, *variants = arm.split("/")
    if name not in arm_names():
        raise ValueError(f"strategies: got {name!r}, supported: {', '.join(arm_names())}")
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"strategies: got {arm!r}, supported after a slash: {', '.join(VARIANTS)}")
    options = [option for variant in variants for option in VARIANTS[variant]]
    if repeated := next((option for option in options if options.count(option) > 1), None):
        same = ", ".join(variant for variant, sets in VARIANTS.items() if repeated in sets)
        raise ValueError(f"strategies: got {arm!r}, supported after a slash: at most one of {same}")
    return name, variants


def parse_arms(words: str | Sequence[str]) -> list[str]:
    """Arms of a comma-separated list, checked, without repetitions.

    Raises
    ------
    ValueError
        None, or an unknown one.
    """
    parts = words.split(",") if isinstance(words, str) else words
    arms = list(dict.fromkeys(x.strip() for x in parts if x.strip()))
    if not arms:
        raise ValueError(f"strategies: got none, supported: {', '.join(arm_names())}")
    for arm in arms:
        parse_arm(arm)
    return arms


def original_of(arm: str) -> str:
    """The arm that runs the original order as this one runs its own: T_original of Eq. 7."""
    _, variants = parse_arm(arm)
    return "/".join([ORIGINAL, *(v for v in variants if not set(VARIANTS[v]) & set(ORDER_OPTIONS))])


def fixed_of(arm: str) -> str | None:
    """The arm that runs this one's ids ready-made, None where it makes none."""
    name, variants = parse_arm(arm)
    return "/".join([FIXED[name], *variants]) if name in FIXED else None


def make_strategy(arm: str, selection: Selection, problem: AttentionProblem, backend: str) -> Strategy:
    """The strategy of an arm, with the ids that it needs, on a backend.

    Parameters
    ----------
    arm : str
    selection : Selection
        Whose order is made.
    problem : AttentionProblem
        Of that selection, on the device that will execute.
    backend : {"cuda", "reference"}

    Raises
    ------
    ValueError
        A variant that the strategy does not have.
    """
    name, variants = parse_arm(arm)
    options: Options = {k: v for variant in variants for k, v in VARIANTS[variant].items()}
    try:
        if name in BASELINES:
            return BASELINES[name](backend=backend, **options)
        if name in DIAGNOSTICS:
            diagnostic = DIAGNOSTICS[name]
            ordering = {k: options.pop(k) for k in ORDER_OPTIONS if k in options}
            ids = diagnostic.order(selection, ordering, problem.group_size)
            return diagnostic.kind(problem, ids, backend=backend, **options)
        if name in OFFLINE_WINDOWS:
            ordering = {k: options.pop(k) for k in ORDER_OPTIONS if k in options}
            window = OFFLINE_WINDOWS[name]
            options["ids"] = search(selection, window=window, group_size=problem.group_size, **ordering)
        return load(name, backend=backend, **options)
    except TypeError as error:  # an unexpected keyword: the constructor names it
        raise ValueError(f"strategies: got {arm!r}, which {name} does not have ({error})") from error


def counting_problem(
    selection: Selection, group_size: int = 16, kv_dtype: torch.dtype = torch.float8_e4m3fn
) -> AttentionProblem:
    """A problem with a selection's pages and no numbers: enough for `Strategy.work`, and no memory."""
    check_selection(selection, group_size, kv_dtype)
    heads, lengths = selection.num_kv_heads, torch.from_numpy(selection.seqused_k.copy())
    max_pages = -(-int(lengths.max()) // selection.page_size) if len(lengths) else 0
    one_head = torch.zeros(1, 1, 1, HEAD_DIM)
    cache = one_head.to(kv_dtype).expand(1, selection.page_size, heads, HEAD_DIM)
    return AttentionProblem(
        q=one_head[0].bfloat16().expand(selection.total_q, heads * group_size, HEAD_DIM),
        k_cache=cache,
        v_cache=cache,
        q2k_indices=torch.from_numpy(selection.q2k_indices.copy()),
        cu_seqlens_q=torch.from_numpy(selection.cu_seqlens_q.copy()),
        seqused_k=lengths,
        page_table=torch.zeros(len(lengths), max_pages, dtype=torch.int32),
    )


def sample_rows(selection: Selection, seed: int, count: int = SAMPLED_ROWS) -> torch.Tensor:
    """Rows that errors are taken on: int64, ascending, all of them where there are fewer."""
    used = int(selection.cu_seqlens_q[-1])
    rows = np.random.default_rng(seed).choice(used, min(count, used), replace=False)
    return torch.from_numpy(np.sort(rows))


@dataclass
class Arm:
    """One arm on one selection: checked, and ready to be timed.

    Attributes
    ----------
    name : str
    arithmetic : str
    nrms : float or None
        Error on the sampled rows against float64; None where they read nothing.
    work : dict
        Counts, as `WorkReport`.
    ours : bool
        False for a baseline, whose failures are no fault of a measurement.
    calls : dict
        Boundary ("complete", "attention", "prepare") -> one call for each of the inputs, which take turns.
    """

    name: str
    arithmetic: str
    nrms: float | None
    work: dict[str, Any]
    ours: bool = True
    calls: dict[str, list[Callable[[], object]]] = field(default_factory=dict)


def make_arm(
    name: str,
    selection: Selection,
    problems: Sequence[AttentionProblem],
    rows: torch.Tensor,
    exact: torch.Tensor,
    *,
    backend: str = "cuda",
) -> Arm:
    """Set up an arm on one or several inputs of a selection, count its work and check it.

    Parameters
    ----------
    name : str
    selection : Selection
    problems : sequence of AttentionProblem
        The selection with different queries, keys and values, on one device.
    rows, exact : torch.Tensor
        Sampled rows, and float64 attention of the first input on them.
    backend : {"cuda", "reference"}

    Raises
    ------
    CheckFailed
        The error on `rows` is above what the arithmetic can explain.
    """
    problem = problems[0]
    strategy = make_strategy(name, selection, problem, backend)
    arithmetic = strategy.resolve(problem)[1]
    # Counted by the reference: counting may synchronise, and needs no kernel.
    counter = (
        strategy
        if backend == "reference" or isinstance(strategy, Baseline)
        else make_strategy(without_arithmetic(name), selection, problem, "reference")
    )
    work = {
        **counter.work(problem).to_dict(),
        "strategy": name,
        "workspace_bytes": strategy.workspace_bytes(problem),
    }
    arm = Arm(name, arithmetic, None, work, ours=not isinstance(strategy, Baseline))
    for boundary in ("complete", "attention", "prepare"):
        if boundary != "prepare" or strategy.workspace_layout(problem):
            arm.calls[boundary] = []
    for index, own in enumerate(problems):
        out = torch.full_like(own.q, torch.nan)
        complete, split = strategy.workspace(own), strategy.workspace(own)
        found = strategy(own, out, workspace=complete)
        if index == 0:
            arm.nrms = check_error(name, strategy, own, found, rows, exact)
        schedule = strategy.prepare(own, split)
        arm.calls["complete"].append(partial(strategy, own, out, workspace=complete))
        arm.calls["attention"].append(partial(strategy.execute, own, schedule, out))
        if "prepare" in arm.calls:
            arm.calls["prepare"].append(partial(strategy.prepare, own, complete))
    return arm


def check_error(
    name: str,
    strategy: Strategy,
    problem: AttentionProblem,
    out: torch.Tensor,
    rows: torch.Tensor,
    exact: torch.Tensor,
) -> float | None:
    """NRMS of an arm's output on sampled rows.

    Raises
    ------
    CheckFailed
        It is above what the arithmetic can explain, or NaN.
    """
    if isinstance(strategy, ANSWERS_ANOTHER):
        exact = strategy.expected(problem, rows)
    found = out[rows]
    if not bool(exact.any()):
        if bool(found.any()):
            raise CheckFailed(f"{name}: got non-zero rows, supported: zeros where nothing is read")
        return None
    error = nrms(found, exact)
    most = MOST_NRMS.get(strategy.resolve(problem)[1], MOST_NRMS_OTHERWISE)
    if not error <= most:
        raise CheckFailed(f"{name}: got NRMS {error:.4f} against float64, supported: at most {most}")
    return error


def without_arithmetic(arm: str) -> str:
    """The same order for the reference, which has arithmetics of its own and counts alike in each."""
    name, variants = parse_arm(arm)
    return "/".join([name, *(v for v in variants if "arithmetic" not in VARIANTS[v])])
