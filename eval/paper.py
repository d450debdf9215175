"""What the source paper measured, to stand beside our figures: other inputs, another kernel, the same GPU.

"PageWeaver: KV-Guided Query Unions for Sparse Attention" (2026-10-08), on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SETUP = (
    "the paper: MiniMax-M3 selections, Top16 of 128-token pages, 16 query heads a KV head, FP8 KV, H200;"
    " its kernel quantises, packs and attends in its own way"
)
CAPTURE = "L43/r1, 15,272 queries after 49,152 tokens"


@dataclass(frozen=True)
class Order:
    """One order of queries on the paper's capture; None where it gives no figure.

    Attributes
    ----------
    visits : int or None
        Page visits of groups of 8.
    complete_ms : float
        Complete call.
    """

    visits: int | None
    complete_ms: float


# Section 5.4, all on `CAPTURE`.
ORDERS: Mapping[str, Order] = {
    "union8": Order(102_429, 1.36633),
    "fixed_w128": Order(89_426, 1.27037),
    "regroup_w128": Order(89_426, 1.30792),
    "fixed_w512": Order(None, 1.234),
    "fixed_w2048": Order(None, 1.185),
    "random_ids": Order(None, 1.832),
    "hash_w128": Order(None, 1.298),
    "reorder_w128": Order(None, 1.315),
}
ORIGINAL = "union8"
# Eq. 7 of regroup_w128 there: what the online call adds to ready-made ids, and what is left of the saving.
INCREMENT_US = {"regroup_w128": 37.55}
NET_US = {"regroup_w128": 58.41}
GROUPING_US = {"regroup_w64": (19.3, 19.5), "regroup_w128": (34.6, 34.9)}
SEARCH_SECONDS_W2048 = 1.50

# union4's complete call over union8's, at the same arithmetic.
UNION4_OVER_UNION8 = 1.075
# Geometric means over six captures: a peer's complete call over union8's.
UNION8_SPEEDUP = {"FlashInfer": 1.701, "native SM90 (SGLang PR 37236)": 2.662}
# Reuse of groups of 8: the span of per-source medians over eight sources.
SURVEY_MEDIANS = (3.85, 4.54)
# Controlled interleaved supports: context -> (page_union ms, FlashInfer ms).
INTERLEAVED = "controlled supports of the paper's own making, its kernels"
INTERLEAVED_MS = {"32K": (1.340, 1.588), "64K": (2.852, 3.172)}
# NRMS against FP32, the span over inputs, 33 rows each.
NRMS = (0.0266, 0.0451)
# Online W128 over five 64K captures: share of union8's call that it saves.
ONLINE_SAVINGS = (0.0326, 0.0766)
