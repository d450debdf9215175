// Union attention: launcher. No torch here.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace pageweaver {

// How the tiles of a group meet CTAs. Results are the same bit for bit.
enum class Mapping : int32_t {
    kIndependent = 0,  // each tile loads the pages that its own queries selected
    kCluster = 1,  // the two tiles of a group are a cluster that shares the group's page stream by multicast
};

// How Q and the probabilities are rounded, as in common/arithmetic.py.
enum class Arithmetic : int32_t {
    kFp8 = 0,    // E4M3
    kSplit = 1,  // a high and a low E4M3 part
};

// Pointers are device addresses; strides are in elements.
struct UnionParams {
    const void* q;  // bf16 [total_q, num_qo_heads, head_dim]
    int64_t q_stride_row, q_stride_head;
    void* out;  // bf16, as q
    int64_t out_stride_row, out_stride_head;
    float* lse;  // [total_q, num_qo_heads], null: not wanted
    int64_t lse_stride_row, lse_stride_head;
    const int32_t* cu_seqlens_q;
    const int32_t* seqused_k;
    const int32_t* page_table;
    int64_t page_table_stride;
    const int32_t* query_ids;       // [num_kv_heads, total_q]; null: original order
    const int32_t* group_offsets;   // [max_groups + 1]
    const int32_t* group_requests;  // [max_groups]
    const int32_t* union_pages;     // [num_kv_heads, max_groups, max_union]
    const uint32_t* union_masks;    // [num_kv_heads, max_groups, max_union, mask_words]
    const int32_t* union_counts;    // [num_kv_heads, max_groups]
    const int32_t* tile_counts;     // [num_kv_heads, max_groups, tiles_per_group]
    const int32_t* unit_order;      // [num_kv_heads * max_groups]
    int32_t* counters;              // as in prepare.hpp
    const int32_t* packed_slots;    // [num_kv_heads, batch_size, max_pages]
    const uint8_t* packed_v;        // [max_packed, head_dim, page_size]
    // Scales: the pointer wins where it is not null.
    const float *softmax_scale_pointer, *k_scale_pointer, *v_scale_pointer;
    float softmax_scale, k_scale, v_scale;
    int32_t total_q, num_kv_heads, num_qo_heads, batch_size, max_pages;
    int32_t group_shift;  // log2 of the query heads a KV head
    int32_t queries_per_tile, tiles_per_group, max_groups, max_union, mask_words;
};

// K as it lies in the cache: a tensor map over [num_pages, num_kv_heads, page_size, head_dim] bytes with the
// 128-byte swizzle, `box_tokens` tokens of one page and head a copy. Strides are in bytes.
cudaError_t make_key_map(CUtensorMap* map, const void* k_cache, int64_t num_pages, int64_t num_kv_heads,
                         int64_t stride_page, int64_t stride_token, int64_t stride_head, int box_tokens);

cudaError_t launch_union_attention(const UnionParams& params, const CUtensorMap& key_map, Mapping mapping,
                                   Arithmetic arithmetic, cudaStream_t stream);

// The same with Arithmetic::kSplit, which the above hands on.
cudaError_t launch_split_attention(const UnionParams& params, const CUtensorMap& key_map, Mapping mapping,
                                   cudaStream_t stream);

// K or V of a BF16 cache: a tensor map over [num_pages, num_kv_heads, 2, page_size, 64] with the 128-byte
// swizzle, the last dimension half of a head's columns; `box_halves` halves of `box_tokens` tokens of one
// page and head a copy. Strides are in bytes.
cudaError_t make_bf16_map(CUtensorMap* map, const void* cache, int64_t num_pages, int64_t num_kv_heads,
                          int64_t stride_page, int64_t stride_token, int64_t stride_head, int box_tokens,
                          int box_halves);

// Attention over BF16 caches, mapping kIndependent.
cudaError_t launch_bf16_attention(const UnionParams& params, const CUtensorMap& key_map,
                                  const CUtensorMap& value_map, cudaStream_t stream);

}  // namespace pageweaver
