// What the attention kernels of a union schedule share beside their arithmetic.
#pragma once

#include <cuda_bf16.h>

#include "prepare/device.cuh"
#include "union_attention/queries.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {

// A ring position that several roles keep each on its own.
template <int kStages>
struct RingPosition {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Tiles of the call; those of the largest unions come first.
__device__ __forceinline__ int tile_count(const UnionParams& p) {
    return p.max_groups > 0 ? p.num_kv_heads * p.counters[kLiveGroups] * p.tiles_per_group : 0;
}

// One of a group's tail may have no queries.
__device__ __forceinline__ Tile tile_at(const UnionParams& p, int number) {
    Tile tile;
    tile.unit = p.unit_order[number / p.tiles_per_group];
    tile.index = number % p.tiles_per_group;
    tile.head = tile.unit / p.max_groups;
    const int group = tile.unit % p.max_groups;
    tile.request = p.group_requests[group];
    tile.first_slot = p.group_offsets[group] + tile.index * p.queries_per_tile;
    tile.live_queries = min(p.group_offsets[group + 1] - tile.first_slot, p.queries_per_tile);
    tile.rounds = p.tile_counts[int64_t{tile.unit} * p.tiles_per_group + tile.index];
    tile.shift = p.seqused_k[tile.request] - p.cu_seqlens_q[tile.request + 1];
    return tile;
}

// Rows that belong to no request: zeros and an LSE of -inf.
__device__ inline void zero_padding_rows(const UnionParams& p) {
    for (int64_t row = max(p.cu_seqlens_q[p.batch_size], 0) + int64_t{blockIdx.x}; row < p.total_q;
         row += gridDim.x) {
        for (int i = threadIdx.x; i < p.num_qo_heads * kHeadDim; i += blockDim.x)
            static_cast<__nv_bfloat16*>(
                p.out)[row * p.out_stride_row + i / kHeadDim * p.out_stride_head + i % kHeadDim] =
                __nv_bfloat16(0.0f);
        if (p.lse)
            for (int head = threadIdx.x; head < p.num_qo_heads; head += blockDim.x)
                p.lse[row * p.lse_stride_row + head * p.lse_stride_head] = -INFINITY;
    }
}

}  // namespace pageweaver
