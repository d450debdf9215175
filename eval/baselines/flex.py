"""FlexAttention of torch on the same selection: eight queries' heads packed to a block of 128 rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pageweaver.common.problem import AttentionProblem
from pageweaver.eval.baselines.base import Baseline, capabilities, logical_cache

BLOCK = 128  # rows, and keys: a page


@dataclass
class _State:
    keys: torch.Tensor
    values: torch.Tensor
    first_pages: torch.Tensor
    member: torch.Tensor
    mask: Any


class Flex(Baseline):
    """flex_attention with a block mask of unions and a mask function for who selected what: BF16."""

    name = "flex"
    capabilities = capabilities("bf16", "cuda", "reference")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kernel: Any = None

    def lay_out(self, problem: AttentionProblem) -> _State:
        """Keys and values in BF16 and logical order; the membership matrix is filled by every call."""
        keys, starts = logical_cache(problem, problem.k_cache)
        values, _ = logical_cache(problem, problem.v_cache)
        requests = problem.request_ids.clamp(max=max(problem.batch_size - 1, 0))
        first_pages = torch.tensor(starts[:-1] or [0], device=problem.device)[requests]
        member = torch.zeros(
            problem.num_kv_heads, problem.total_q, starts[-1], dtype=torch.bool, device=problem.device
        )
        group, page_size = problem.group_size, problem.page_size
        last = first_pages * page_size + problem.positions

        def mask(batch: Any, head: Any, row: Any, token: Any) -> Any:
            query = row // group
            return member[head, query, token // page_size] & (token <= last[query])

        return _State(keys, values, first_pages, member, mask)

    def plan(self, problem: AttentionProblem, state: _State) -> BlockMask:
        """Membership of every query, and the union of each block of rows."""
        support = problem.support
        pages = state.first_pages[None, :, None] + support
        state.member.zero_()
        # What selects nothing writes to a page of its own that exists in no cache.
        heads, queries, total = state.member.shape
        wide = torch.zeros(heads, queries, total + 1, dtype=torch.bool, device=problem.device)
        wide.scatter_(2, torch.where(support >= 0, pages, total), True)
        state.member.copy_(wide[..., :total])
        per_block = max(BLOCK // problem.group_size, 1)
        padding = -queries % per_block
        padded = torch.nn.functional.pad(state.member, (0, 0, 0, padding))
        union = padded.view(heads, -1, per_block, total).any(dim=2)
        counts = union.sum(dim=2, dtype=torch.int32)
        order = union.int().argsort(dim=2, descending=True, stable=True).int()
        return BlockMask.from_kv_blocks(
            counts[None],
            order[None].contiguous(),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=state.mask,
            seq_lengths=(queries * problem.group_size, total * problem.page_size),
            compute_q_blocks=False,
        )

    def run(self, problem: AttentionProblem, state: _State, plan: BlockMask) -> torch.Tensor:
        """Queries of a KV head as rows, eight of them a block."""
        if self._kernel is None:
            # Outside a GPU torch's own loop is enough, and there is no compiler to wait for.
            cuda = problem.device.type == "cuda"
            self._kernel = torch.compile(flex_attention, dynamic=False) if cuda else flex_attention
        heads, group = problem.num_kv_heads, problem.group_size
        q = problem.q.view(problem.total_q, heads, group, -1).transpose(0, 1).reshape(heads, -1, 128)
        scale = float(problem.softmax_scale) * float(problem.k_scale)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            out = self._kernel(q[None], state.keys[None], state.values[None], block_mask=plan, scale=scale)
        out = out[0].view(heads, problem.total_q, group, -1).transpose(0, 1).reshape(problem.q.shape)
        return out if problem.v_scale == 1 else out * problem.v_scale
