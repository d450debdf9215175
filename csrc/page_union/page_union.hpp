// Direct page union: work lists, partials and their combine. Launchers only; no torch here.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "prepare/prepare.hpp"

namespace pageweaver {

constexpr int kUnitTiles = 16;  // most 64-row tiles a unit
// Units run from class kClasses down: pairs from full to one tile, then single pages. A warp orders each
// class.
constexpr int kClasses = 2 * kUnitTiles;
constexpr int kMostPaired = 1024;
// A quantised head-row: head_dim bytes a part, its logit factor, and what keeps eight rows apart in shared
// memory.
template <bool kIsSplit>
constexpr int kQueryRowBytes = kIsSplit ? 272 : 144;

// What building the lists of one call reads and fills. Pointers are device addresses; strides are in
// elements. A list is the members that a page, or a page and its partner, run together: `[.., 0]` the page's
// queries that did not select its partner, `[.., 1]` those that selected both, kept by the lower page.
struct PageListParams {
    // inputs
    const int32_t* q2k_indices;  // [num_kv_heads, total_q, topk]
    int64_t q2k_stride_head, q2k_stride_row, q2k_stride_column;
    const int32_t* cu_seqlens_q;  // [batch_size + 1]
    const int32_t* seqused_k;     // [batch_size]
    int32_t total_q, num_kv_heads, topk, batch_size, max_pages;
    int32_t queries_per_tile, max_units, max_packed;
    int32_t paired_limit;  // most pages of a request that are paired; 0: none
    // V is packed for this many pages of a head at a time, its requests' pages counted through. Single pages
    // run in as many rounds, pairs before them.
    int32_t round_pages, rounds;
    // schedule
    int32_t* unit_pages;      // [num_kv_heads, max_units, 2]
    int32_t* unit_offsets;    // [num_kv_heads, max_units + 1]
    int32_t* unit_requests;   // [num_kv_heads, max_units]
    int32_t* unit_counts;     // [rounds + 1, num_kv_heads]; of pairs, and of both kinds up to a round's end
    int32_t* unit_queries;    // [num_kv_heads, total_q * topk]
    int32_t* unit_slots;      // [num_kv_heads, total_q * topk]
    int32_t* partial_counts;  // [num_kv_heads, total_q]
    int32_t* packed_slots;    // [num_kv_heads, batch_size, max_pages]; as in prepare.hpp
    // scratch
    uint32_t* member_bits;  // [num_kv_heads, head_words]; see device.cuh
    int64_t head_words;
    // [num_kv_heads, batch_size, max_pages]; null: all pages may be paired. Queries of a page, then its
    // number among the pages that may be paired, or -1.
    int32_t* page_counts;
    int32_t* paired_pages;   // [num_kv_heads, batch_size, paired_limit]; null likewise
    int32_t* paired_counts;  // [num_kv_heads, batch_size]; null likewise
    // [num_kv_heads, batch_size, paired_limit, overlap_stride]; common queries << 10 | 1023 - place of the
    // other page, so that the largest is the best choice; 0 without a common query
    uint32_t* overlaps;
    int32_t overlap_stride;  // a multiple of 4
    int32_t* partners;       // [num_kv_heads, batch_size, max_pages]; page or -1
    int32_t*
        list_prefixes;  // [num_kv_heads, head_blocks, 2]; members of a list before a block of 256 queries
    int64_t head_blocks;
    int32_t* list_sizes;          // [num_kv_heads, batch_size, max_pages, 2]
    int32_t* list_starts;         // [.., 2]; first member of full units, and of the rest less those
    uint64_t* class_totals;       // [num_kv_heads, chunks, kClasses]; units << 32 | members
    int32_t chunks, chunk_pages;  // pages of a head whose lists one CTA orders
    int32_t* counters;            // as in prepare.hpp
};

// Producer and combine. Pointers are device addresses; strides are in elements.
struct PageUnionParams {
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
    const int32_t *unit_pages, *unit_offsets, *unit_requests, *unit_counts, *unit_queries, *unit_slots;
    const int32_t* partial_counts;
    const int32_t* packed_slots;
    const int32_t* pair_slots;  // those of pages in pairs, where single pages run in rounds
    const uint8_t* packed_v;    // [max_packed, head_dim, page_size]
    uint8_t* packed_q;          // [num_kv_heads, total_q, group_size, kQueryRowBytes]; see quantize.cu
    void* partials;             // bf16 [num_kv_heads, total_q, topk, group_size, head_dim]
    float* lse_partials;        // [num_kv_heads, total_q, topk, group_size]; natural log
    uint32_t* unit_tickets;     // [1 + rounds]; next unit of pairs and of each round
    // Scales: the pointer wins where it is not null.
    const float *softmax_scale_pointer, *k_scale_pointer, *v_scale_pointer;
    float softmax_scale, k_scale, v_scale;
    int32_t total_q, topk, num_kv_heads, num_qo_heads, batch_size, max_pages, max_units;
    int32_t round_pages, rounds;  // as in PageListParams
    int32_t round;                // the one that a launch runs
    int32_t group_shift;          // log2 of the query heads a KV head
    bool has_pairs;               // whether there may be units of pairs
    bool is_split;                // two E4M3 parts of Q and of probabilities, not one
};

// Finds who selected which page, pairs pages, builds the work lists and says which pages' V to pack.
cudaError_t launch_page_lists(const PageListParams& params, cudaStream_t stream);

// Quantises Q and runs every unit. In several rounds it packs V before each of them; in one, `values` is not
// read.
cudaError_t launch_page_partials(const PageUnionParams& params, const CUtensorMap& key_map,
                                 const PrepareParams& values, cudaStream_t stream);

// Finishes every query from its partials.
cudaError_t launch_combine_partials(const PageUnionParams& params, cudaStream_t stream);

}  // namespace pageweaver
