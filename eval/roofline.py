"""How fast could a call be? The least time that each unit of an H200 needs for the work of an arm.

Ceilings were measured on one H200 (132 SMs, clocks as found): what small kernels that do nothing else reach.
A floor is the largest of an arm's terms; nothing here models latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TILE_ROWS, HEAD_DIM = 64, 128
SMS = 132
DEFAULT_MHZ = 1755  # where a row does not say which clock was seen
FP8_FLOPS = 1.79e15  # wgmma e4m3, two warpgroups
MMA_SYNC_BF16_FLOPS = 5.86e14  # mma.sync m16n8k16, what Triton's small tiles become
EXPONENTIALS_PER_CLOCK = 16  # a SM
# To shared memory. Bulk copies of 16 KiB alone had 9.0e12; union attention has 9.9e12 where tiles share least
L2_BYTES_PER_SECOND = 1.0e13
DRAM_BYTES_PER_SECOND = 4.1e12  # device-to-device copy, read and written

# Matrix work over that of single FP8 products. "split" multiplies two parts of Q and two of P; BF16 products
# run at half of FP8's rate, as the instruction set has it.
MATRIX_FACTOR = {"fp8": 1.0, "split": 2.0, "bf16": 2.0}
PER_QUERY = "per_query"


@dataclass(frozen=True)
class Floor:
    """Least milliseconds of each unit.

    Attributes
    ----------
    matrix, exponentials, pages, memory : float
        Tensor cores; exponentials of members, of which the FP8 probabilities of unions need none; K and V
        from L2 to shared memory; queries, outputs, partials and each page once, through device memory.
    """

    matrix: float
    exponentials: float
    pages: float
    memory: float

    @property
    def milliseconds(self) -> float:
        """The largest."""
        return max(self.matrix, self.exponentials, self.pages, self.memory)

    @property
    def bound(self) -> str:
        """Which unit that is."""
        names = {
            "tensor cores": self.matrix,
            "exponentials": self.exponentials,
            "page traffic": self.pages,
            "memory": self.memory,
        }
        return max(names, key=names.__getitem__)


def floor_of(row: Mapping[str, Any]) -> Floor | None:
    """The floor of a measured row; None where its work or arithmetic is not one of these.

    Rows of earlier versions say fewer sizes: a group of 16 heads, pages of 128 tokens and an FP8 cache are
    what they were measured with.
    """
    arithmetic = row.get("arithmetic")
    if not row.get("rounds") or arithmetic not in MATRIX_FACTOR or row.get("arm") in ("dense", "flex"):
        return None
    group, page_size = row.get("group_size", 16), row.get("page_size", 128)
    item = 2 if row.get("kv_dtype") == "bfloat16" else 1
    clock = (row.get("sm_mhz") or [0, DEFAULT_MHZ, 0])[1] * 1e6
    per_query = row["arm"].partition("/")[0] == PER_QUERY
    # A query alone has as many rows as heads, which mma.sync need not pad to a tile.
    rows = min(max(group, 16), TILE_ROWS) if per_query else TILE_ROWS
    flops = row["rounds"] * rows * page_size * HEAD_DIM * 2 * 2
    rate = MMA_SYNC_BF16_FLOPS if per_query else FP8_FLOPS / MATRIX_FACTOR[arithmetic]
    page_bytes = 2 * page_size * HEAD_DIM * item
    # A cluster reads a group's page once, page_union a unit's; other tiles load what their queries selected.
    is_page_union = row["arm"].startswith("page_union")
    shared = row["arm"].endswith("/cluster") or is_page_union
    loads = row["visits"] if shared else row["rounds"]
    queries = row.get("total_q") or 0
    heads = group * row.get("num_kv_heads", 1)
    # Their codes are linear in the logit.
    exponentials = 0 if arithmetic == "fp8" and not is_page_union else row["edges"] * group * page_size
    memory = 2 * queries * heads * HEAD_DIM * 2 + (row.get("partial_bytes") or 0)
    memory += -(-(row.get("context") or 0) // page_size) * page_bytes * row.get("num_kv_heads", 1)
    return Floor(
        1e3 * flops / rate,
        1e3 * exponentials / (SMS * EXPONENTIALS_PER_CLOCK * clock),
        1e3 * loads * page_bytes / L2_BYTES_PER_SECOND,
        1e3 * memory / DRAM_BYTES_PER_SECOND,
    )
