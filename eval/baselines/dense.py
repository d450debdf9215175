"""Dense causal attention through torch: what selecting pages saves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from pageweaver.common.problem import AttentionProblem
from pageweaver.common.work import WorkReport
from pageweaver.eval.baselines.base import Baseline, capabilities, logical_cache


@dataclass
class _State:
    keys: torch.Tensor
    values: torch.Tensor
    starts: list[int]
    boundaries: list[int]
    lengths: list[int]


class Dense(Baseline):
    """torch's scaled_dot_product_attention over every key up to the query: BF16, another problem's answer."""

    name = "dense"
    capabilities = capabilities("bf16", "cuda", "reference")

    def lay_out(self, problem: AttentionProblem) -> _State:
        """Keys and values in BF16 and logical order, and lengths on the host."""
        keys, starts = logical_cache(problem, problem.k_cache)
        values, _ = logical_cache(problem, problem.v_cache)
        return _State(keys, values, starts, problem.cu_seqlens_q.tolist(), problem.seqused_k.tolist())

    def run(self, problem: AttentionProblem, state: _State, plan: None) -> torch.Tensor:
        """A call a request and KV head; scales enter as numbers."""
        out = torch.zeros_like(problem.q)
        scale = _number(problem.softmax_scale) * _number(problem.k_scale)
        for request, length in enumerate(state.lengths):
            rows = slice(state.boundaries[request], state.boundaries[request + 1])
            count = rows.stop - rows.start
            if count == 0:
                continue
            first = state.starts[request] * problem.page_size
            tokens = slice(first, first + length)
            for head in range(problem.num_kv_heads):
                heads = slice(head * problem.group_size, (head + 1) * problem.group_size)
                q = problem.q[rows, heads].transpose(0, 1)[None]
                keys, values = (
                    x[head, tokens].expand(1, problem.group_size, -1, -1) for x in (state.keys, state.values)
                )
                bias = causal_lower_right(count, length)
                found = scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)
                out[rows, heads] = found[0].transpose(0, 1)
        return out if _number(problem.v_scale) == 1 else out * _number(problem.v_scale)

    def expected(self, problem: AttentionProblem, rows: torch.Tensor) -> torch.Tensor:
        """Float64 attention over every key up to each row's position."""
        keys, starts = logical_cache(problem, problem.k_cache)
        values, _ = logical_cache(problem, problem.v_cache)
        positions, requests = problem.positions[rows].tolist(), problem.request_ids[rows].tolist()
        scale = _number(problem.softmax_scale) * _number(problem.k_scale)
        parts = []
        for row, position, request in zip(rows.tolist(), positions, requests, strict=True):
            first = starts[request] * problem.page_size
            tokens = slice(first, first + position + 1)
            q = problem.q[row].double().view(problem.num_kv_heads, problem.group_size, -1)
            weights = torch.softmax(q @ keys[:, tokens].double().transpose(1, 2) * scale, dim=2)
            found = weights @ values[:, tokens].double() * _number(problem.v_scale)
            parts.append(found.flatten(0, 1))
        return torch.stack(parts)

    def work(self, problem: AttentionProblem) -> WorkReport:
        """Every visible page of every query is an edge."""
        pages = int((problem.positions // problem.page_size + 1).clamp(min=0).sum()) * problem.num_kv_heads
        report = super().work(problem).to_dict()
        return WorkReport(**{**report, "edges": pages, "visits": pages, "rounds": pages})


def _number(scale: float | torch.Tensor) -> float:
    """A scale on the host; problems of measurements hold numbers."""
    if isinstance(scale, torch.Tensor):
        raise ValueError("scales: got a tensor, supported by dense: numbers")
    return float(scale)
