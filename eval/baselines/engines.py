"""Prefill kernels of serving engines for MiniMax-M3's selections, used where their packages are installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pageweaver.common.problem import AttentionProblem
from pageweaver.eval.baselines.base import Baseline, capabilities


@dataclass
class _State:
    """Caches in the kernel's layout, ids ascending with -1 last, and lengths on the host.

    Attributes
    ----------
    k_cache, v_cache : torch.Tensor
        The kernel's; views of one pool where it wants that.
    pages : torch.Tensor
        int32 ``[num_kv_heads, total_q, topk]``, as an engine's indexer writes them.
    prefix_lens : torch.Tensor
        int32 ``[batch_size]``.
    most_queries : int
        Of the longest request.
    more : torch.Tensor or None
        What else the kernel reads.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    pages: torch.Tensor
    prefix_lens: torch.Tensor
    most_queries: int
    more: torch.Tensor | None = None


def _state(problem: AttentionProblem, k_cache: torch.Tensor, v_cache: torch.Tensor) -> _State:
    lengths = problem.cu_seqlens_q.diff()
    return _State(
        k_cache,
        v_cache,
        problem.support.int().contiguous(),
        (problem.seqused_k - lengths).int(),
        int(lengths.max()) if problem.batch_size else 0,
    )


def _pool(problem: AttentionProblem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K beside V in one pool, ``[num_pages, num_kv_heads, page_size, 2 * head_dim]``: the two halves."""
    parts = [cache.to(dtype).transpose(1, 2) for cache in (problem.k_cache, problem.v_cache)]
    pool = torch.cat(parts, dim=3).contiguous()
    return pool[..., : problem.head_dim], pool[..., problem.head_dim :]


def _refuse_scales(name: str, problem: AttentionProblem) -> None:
    if problem.k_scale != 1 or problem.v_scale != 1:
        raise ValueError(
            f"k_scale, v_scale: got {problem.k_scale}, {problem.v_scale}, supported by {name}: 1"
        )


class FlashInferMsa(Baseline):
    """flashinfer.msa_ops.msa_sparse_attention: unions of neighbouring tokens, FP8 halves of Q and P."""

    name = "flashinfer"
    module = "flashinfer.msa_ops"
    capabilities = capabilities("split", "cuda")

    def lay_out(self, problem: AttentionProblem) -> _State:
        """K and V interleaved in one pool of the cache's type."""
        _refuse_scales(self.name, problem)
        return _state(problem, *_pool(problem, problem.k_cache.dtype))

    def run(self, problem: AttentionProblem, state: _State, plan: None) -> torch.Tensor:
        """The public call; the prefix follows from the lengths."""
        module: Any = self._module
        found = module.msa_sparse_attention(
            problem.q,
            state.k_cache,
            state.v_cache,
            state.pages,
            problem.cu_seqlens_q,
            causal=True,
            softmax_scale=float(problem.softmax_scale),
            page_table=problem.page_table,
            seqused_k=problem.seqused_k,
        )
        return found[0] if isinstance(found, tuple) else found


class SglangM3(Baseline):
    """SGLang's Triton kernel, one query at a time: BF16, K and V widened ahead."""

    name = "sglang"
    module = "sglang.srt.layers.attention.minimax_sparse_ops.prefill.topk_sparse"
    capabilities = capabilities("bf16", "cuda")

    def lay_out(self, problem: AttentionProblem) -> _State:
        """Caches of slots, and each request's slots."""
        _refuse_scales(self.name, problem)
        k_cache, v_cache = (x.bfloat16().flatten(0, 1) for x in (problem.k_cache, problem.v_cache))
        state = _state(problem, k_cache, v_cache)
        tokens = torch.arange(problem.page_size, device=problem.device)
        slots = problem.page_table[..., None] * problem.page_size + tokens
        state.more = slots.flatten(1).int().contiguous()
        return state

    def run(self, problem: AttentionProblem, state: _State, plan: None) -> torch.Tensor:
        """Its prefill call, blocks of one query and of one page."""
        module: Any = self._module
        requests = torch.arange(problem.batch_size, dtype=torch.int32, device=problem.device)
        return module.flash_prefill_with_gqa_share_sparse(
            q=problem.q,
            k_cache=state.k_cache,
            v_cache=state.v_cache,
            sink=None,
            req_to_token=state.more,
            slot_ids=requests,
            topk_idx=state.pages,
            block_size_q=1,
            block_size_k=problem.page_size,
            cu_seqlens=problem.cu_seqlens_q,
            seq_lens=problem.seqused_k,
            prefix_lens=state.prefix_lens,
            max_seqlen_q=state.most_queries,
            sm_scale=float(problem.softmax_scale),
        )


class VllmM3(Baseline):
    """vLLM's Triton kernel, one query at a time: BF16, an FP8 cache widened as it is read.

    It reads as many ids as a query has visible pages, up to topk: selections with fewer are refused.
    """

    name = "vllm"
    module = "vllm.models.minimax_m3.common.ops.sparse_attn"
    capabilities = capabilities("bf16", "cuda")

    def lay_out(self, problem: AttentionProblem) -> _State:
        """K and V interleaved in one pool of the cache's type."""
        _refuse_scales(self.name, problem)
        support = problem.support
        visible = (problem.positions // problem.page_size + 1).clamp(max=problem.topk)
        if not bool(((support >= 0).sum(dim=2) == visible).all()):
            raise ValueError(f"q2k_indices: got rows with fewer pages, supported by {self.name}: full ones")
        return _state(problem, *_pool(problem, problem.k_cache.dtype))

    def run(self, problem: AttentionProblem, state: _State, plan: None) -> torch.Tensor:
        """Its prefill call, which writes to a tensor of ours."""
        module: Any = self._module
        heads, pages = problem.num_kv_heads, problem.num_pages
        pool = state.k_cache.as_strided(
            (pages, heads, problem.page_size, 2 * problem.head_dim), state.k_cache.stride()
        )
        out = torch.empty_like(problem.q)
        module.minimax_m3_sparse_attn(
            problem.q,
            pool,
            state.pages,
            problem.page_table,
            problem.cu_seqlens_q,
            problem.seqused_k,
            state.prefix_lens,
            state.most_queries,
            heads,
            float(problem.softmax_scale),
            out,
        )
        return out
