// The union of one group, by one warp: what build_unions does for groups of given queries, and the search for
// an order (csrc/regroup) for those that it found.
#pragma once

#include "prepare/device.cuh"
#include "prepare/prepare.hpp"

namespace pageweaver {

__device__ inline int warp_inclusive_sum(int value, int lane) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// The last request whose first group, or window, is not past `unit`.
__device__ inline int request_of(const int32_t* starts, int batch_size, int unit) {
    int request = 0;
    for (int low = 0, high = batch_size - 1; low <= high;) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= unit) {
            request = middle;
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    return request;
}

// Slots of one group, or window, of `length` slots at most.
struct Span {
    int first, last;
};

__device__ inline Span span_of(const PrepareParams& p, const int32_t* starts, int request, int unit,
                               int length) {
    // Boundaries that pass total_q are refused in debug mode; here they must not lead out of the tensors.
    const int begin = p.cu_seqlens_q[request] + (unit - starts[request]) * length;
    const int first = min(max(begin, 0), p.total_q);
    return {first, max(first, min(min(first + length, p.cu_seqlens_q[request + 1]), p.total_q))};
}

// The page that a query of `request` selected in a column, -1 where it is none or starts after the query.
__device__ inline int visible_page(const PrepareParams& p, int head, int request, int query, int column) {
    const int page =
        p.q2k_indices[head * p.q2k_stride_head + query * p.q2k_stride_row + column * p.q2k_stride_column];
    const int64_t position = int64_t{query} + p.seqused_k[request] - p.cu_seqlens_q[request + 1];
    return page >= 0 && page < p.max_pages && int64_t{page} * kPageSize <= position ? page : -1;
}

// 32-bit words of shared memory that a warp needs to build a union.
__host__ __device__ inline int64_t union_words(const PrepareParams& p) {
    const int64_t edges = int64_t{p.queries_per_tile} * p.tiles_per_group * p.topk;
    return int64_t{2} * ((p.max_pages + 31) / 32) + int64_t{p.max_union} * p.mask_words + edges;
}

__device__ inline void note_group(const PrepareParams& p, int group, int request, Span span) {
    if (group == 0) p.group_offsets[0] = span.first;
    p.group_offsets[group + 1] = span.last;
    p.group_requests[group] = request;
}

// A group that the call does not have.
__device__ inline void clear_group(const PrepareParams& p, int head, int group, int lane) {
    const int64_t unit = int64_t{head} * p.max_groups + group;
    const int mask_total = p.max_union * p.mask_words;
    if (head == 0 && lane == 0) {
        p.group_offsets[group + 1] = p.cu_seqlens_q[p.batch_size];
        if (group == 0) p.group_offsets[0] = p.cu_seqlens_q[0];
        p.group_requests[group] = -1;
    }
    if (lane == 0) p.union_counts[unit] = 0;
    for (int t = lane; t < p.tiles_per_group; t += kWarp) p.tile_counts[unit * p.tiles_per_group + t] = 0;
    for (int r = lane; r < p.max_union; r += kWarp) p.union_pages[unit * p.max_union + r] = -1;
    for (int i = lane; i < mask_total; i += kWarp) p.union_masks[unit * mask_total + i] = 0;
}

// Gives a selected page a place in packed_v. Where that has room for all pages of all requests a page's place
// is its index; else places are numbered as pages turn up. A CTA calls this once a page: these few lines of
// memory are everybody's.
__device__ inline void claim_place(const PrepareParams& p, int64_t index) {
    if (p.max_packed == 0) return;
    int32_t* const place = p.packed_slots + index;
    if (int64_t{p.num_kv_heads} * p.batch_size * p.max_pages <= p.max_packed)
        *place = static_cast<int32_t>(index);
    else if (*reinterpret_cast<volatile int32_t*>(place) == -1 && atomicCAS(place, -1, kClaimed) == -1)
        // No more pages can be selected than there are edges, so the number stays inside the buffer.
        *place = atomicAdd(&p.counters[kPackedCount], 1);
}

// Writes the union of a group of `slots` slots; page_of(slot, column) is a page or -1. `scratch` holds
// union_words(p) words of this warp, the bitmap of the union's pages first; that is left there.
template <typename PageOf>
__device__ void build_union(const PrepareParams& p, int head, int group, int slots, uint32_t* scratch,
                            const PageOf& page_of) {
    constexpr int kLoads = 4;  // in flight
    const int lane = threadIdx.x % kWarp;
    const int page_words = (p.max_pages + 31) / 32;
    const int mask_total = p.max_union * p.mask_words;
    uint32_t* const bitmap = scratch;
    uint32_t* const prefix = bitmap + page_words;
    uint32_t* const masks = prefix + page_words;
    int* const edge_pages = reinterpret_cast<int*>(masks + mask_total);
    const int64_t unit = int64_t{head} * p.max_groups + group;
    int32_t* const pages_out = p.union_pages + unit * p.max_union;
    uint32_t* const masks_out = p.union_masks + unit * mask_total;

    // The code is short on purpose, loops are not unrolled: a warp runs it once, and what it waits for is
    // its next instruction.
#pragma unroll 1
    for (int w = lane; w < page_words; w += kWarp) bitmap[w] = 0;
#pragma unroll 1
    for (int i = lane; i < mask_total; i += kWarp) masks[i] = 0;
    __syncwarp();

    // An edge is a slot and a column, slot * topk + column; 24 bits of 1 / topk divide any number of edges.
    const int edges = slots * p.topk;
    const uint32_t reciprocal = (1u << 24) / p.topk + 1;
    const auto slot_of = [&](int edge) { return static_cast<int>(__umulhi(edge << 8, reciprocal)); };
#pragma unroll 1
    for (int base = 0; base < edges; base += kLoads * kWarp) {
        int loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = base + i * kWarp + lane, slot = slot_of(edge);
            loaded[i] = edge < edges ? page_of(slot, edge - slot * p.topk) : -1;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (const int edge = base + i * kWarp + lane; edge < edges) edge_pages[edge] = loaded[i];
            if (loaded[i] >= 0) atomicOr(&bitmap[loaded[i] / 32], 1u << (loaded[i] % 32));
        }
    }
    __syncwarp();
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < page_words; base += kWarp) {
        const int word = base + lane;
        const int ones = word < page_words ? __popc(bitmap[word]) : 0;
        const int inclusive = warp_inclusive_sum(ones, lane);
        if (word < page_words) prefix[word] = count + inclusive - ones;
        count += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    }
    __syncwarp();

    // Write pages at their ranks; queries that share a page write the same.
#pragma unroll 1
    for (int edge = lane; edge < edges; edge += kWarp) {
        const int page = edge_pages[edge];
        if (page < 0) continue;
        const int rank = prefix[page / 32] + __popc(bitmap[page / 32] & ((1u << (page % 32)) - 1));
        const int slot = slot_of(edge);
        atomicOr(&masks[rank * p.mask_words + slot / 32], 1u << (slot % 32));
        pages_out[rank] = page;
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < mask_total; i += kWarp) masks_out[i] = masks[i];
#pragma unroll 1
    for (int r = count + lane; r < p.max_union; r += kWarp) pages_out[r] = -1;

    int rounds = 0;
#pragma unroll 1
    for (int tile = 0; tile < p.tiles_per_group; ++tile) {
        int pages = 0;
#pragma unroll 1
        for (int r = lane; r < count; r += kWarp)
            pages += tile_mask(masks + r * p.mask_words, tile, p.queries_per_tile) != 0;
        pages = __reduce_add_sync(kAllLanes, pages);
        if (lane == 0) p.tile_counts[unit * p.tiles_per_group + tile] = pages;
        rounds += pages;
    }
    if (lane == 0) {
        p.union_counts[unit] = count;
        atomicAdd(&p.counters[size_bin(rounds)], 1);
    }
    __syncwarp();
}

}  // namespace pageweaver
