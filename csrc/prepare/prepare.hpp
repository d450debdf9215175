// Device-side preparation of a union call: group plan, union lists, packed V. Launchers only; no torch here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pageweaver {

constexpr int kPageSize = 128;
constexpr int kHeadDim = 128;
// One packed page of V^T: kHeadDim rows of kPageSize tokens, one byte each.
constexpr int kPackedPageBytes = kPageSize * kHeadDim;
constexpr int kTileRows = 64;
constexpr int kSizeBins = 256;

// What one call's preparation reads and fills. Pointers are device addresses; strides are in elements.
struct PrepareParams {
    // inputs
    const int32_t* q2k_indices;  // [num_kv_heads, total_q, topk]
    int64_t q2k_stride_head, q2k_stride_row, q2k_stride_column;
    const int32_t* cu_seqlens_q;  // [batch_size + 1]
    const int32_t* seqused_k;     // [batch_size]
    const int32_t* page_table;    // [batch_size, max_pages]
    int64_t page_table_stride;
    const uint8_t* v_cache;  // [num_pages, page_size, num_kv_heads, head_dim] e4m3
    int64_t v_stride_page, v_stride_token, v_stride_head;
    const int32_t* query_ids;  // [num_kv_heads, total_q]; null: original order, or what the search finds
    int32_t total_q, num_kv_heads, topk, batch_size, max_pages;
    int32_t queries_per_tile, tiles_per_group;
    int32_t max_groups, max_union, mask_words;
    int32_t max_packed;  // 0: V is read as it lies, and packed_slots is not touched
    // search for an order (csrc/regroup); window 0: none
    int32_t window;       // queries a search window, 64 or 128, at least a group
    int32_t max_windows;  // of one KV head
    int32_t by_rounds;    // objective: 0 visits, 1 rounds
    // [num_kv_heads, max_windows]; null: every window takes the order searched for it. Else a window is
    // searched where a lower bound of its rounds is below `sought_below` 256ths of those that it has.
    int32_t* window_choices;
    int32_t sought_below;
    // schedule
    int32_t* written_ids;    // [num_kv_heads, total_q]; original order or what was found; null: ids are given
    int32_t* group_offsets;  // [max_groups + 1]
    int32_t* group_requests;  // [max_groups]
    int32_t* union_pages;     // [num_kv_heads, max_groups, max_union]
    uint32_t* union_masks;    // [num_kv_heads, max_groups, max_union, mask_words]
    int32_t* union_counts;    // [num_kv_heads, max_groups]
    int32_t* tile_counts;     // [num_kv_heads, max_groups, tiles_per_group]
    int32_t* unit_order;      // [num_kv_heads * max_groups]; head * max_groups + group, largest unions first
    // packed V
    int32_t* packed_slots;  // [num_kv_heads, batch_size, max_pages]; slot of a selected page, else -1
    uint32_t* page_marks;   // [num_kv_heads, batch_size, ceil(max_pages / 32)]: a bit a page that some query
                            // selected, which gets a slot when it is packed; null: pages have their slots
    uint8_t* packed_v;      // [max_packed, head_dim, page_size]
    // scratch
    int32_t* group_starts;   // [batch_size + 1]; first group of each request
    int32_t* window_starts;  // [batch_size + 1]; first search window of each request
    int32_t* counters;       // [kCounters]: unions of each size, cursors, then the places in device.cuh
};

// Plans groups, searches for an order where one is wanted, builds union lists and masks, orders units by
// size, packs V^T of every selected page.
cudaError_t launch_prepare(const PrepareParams& params, cudaStream_t stream);

// Pages of every KV head, counted through the requests: page `first % max_pages` of request `first /
// max_pages` and so on.
struct PageRange {
    int64_t first, count;
};

// The last part of it alone: orders units and packs V^T of the pages in `range` that are marked, or have a
// slot where there are no marks. claimers: CTAs of the kernel before that count themselves when all they will
// mark is marked; pages are then packed while that kernel goes on. 0: it is waited for.
cudaError_t launch_pack_values(const PrepareParams& params, int64_t claimers, PageRange range,
                               cudaStream_t stream);

}  // namespace pageweaver
