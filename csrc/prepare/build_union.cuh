// The union of one group, by one warp: what build_unions does for groups of given queries, and the search for
// an order (csrc/regroup) for those that it found.
#pragma once

#include "prepare/device.cuh"
#include "prepare/prepare.hpp"
#include "primitives/launch.cuh"

namespace pageweaver {

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

// Queries of a request. Boundaries that pass total_q are refused in debug mode; here they must not make
// groups or windows that have no row: nobody would write these.
__device__ __forceinline__ int query_count(const PrepareParams& p, int request) {
    const int first = min(max(p.cu_seqlens_q[request], 0), p.total_q);
    return max(min(p.cu_seqlens_q[request + 1], p.total_q) - first, 0);
}

// Slots of one group, or window, of `length` slots at most.
struct Span {
    int first, last;
};

// `unit`: of the request.
__device__ inline Span span_of(const PrepareParams& p, int request, int unit, int length) {
    // Boundaries that pass total_q are refused in debug mode; here they must not lead out of the tensors.
    const int begin = p.cu_seqlens_q[request] + unit * length;
    const int first = min(max(begin, 0), p.total_q);
    return {first, max(first, min(min(first + length, p.cu_seqlens_q[request + 1]), p.total_q))};
}

// Brings the ids that these threads' rows selected, a row a thread, from memory to L2, while it is still on
// its way which rows they are: of all CTAs together they are those of the call.
__device__ __forceinline__ void prefetch_ids(const PrepareParams& p, int64_t head, int64_t row) {
    if (head < p.num_kv_heads && row < p.total_q)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.q2k_indices + head * p.q2k_stride_head +
                                                      row * p.q2k_stride_row));
}

// What a query's position is above its row.
__device__ __forceinline__ int64_t position_shift(const PrepareParams& p, int request) {
    return int64_t{p.seqused_k[request]} - p.cu_seqlens_q[request + 1];
}

// The page that a query selected in a column, -1 where it is none or starts after the query. Without a
// branch: several of these wait for memory together.
__device__ __forceinline__ int visible_page(const PrepareParams& p, int head, int64_t shift, int query,
                                            int column) {
    const int page =
        p.q2k_indices[head * p.q2k_stride_head + query * p.q2k_stride_row + column * p.q2k_stride_column];
    const bool is_page = static_cast<uint32_t>(page) < static_cast<uint32_t>(p.max_pages);
    const bool is_visible = int64_t{page} * kPageSize <= query + shift;
    return is_page & is_visible ? page : -1;
}

// 32-bit words of shared memory that a warp needs to build a union.
__host__ __device__ inline int64_t union_words(const PrepareParams& p) {
    const int64_t edges = int64_t{p.queries_per_tile} * p.tiles_per_group * p.topk;
    return int64_t{2} * mark_words(p.max_pages) + int64_t{p.max_union} * p.mask_words + edges;
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

// Marks those of 32 pages of a request of a KV head that are bits of `pages`. A CTA calls this once for each
// word: these few lines of memory are everybody's.
__device__ inline void mark_pages(const PrepareParams& p, int64_t request, int word, uint32_t pages) {
    if (pages != 0 && p.max_packed > 0)
        atomicOr(&p.page_marks[request * mark_words(p.max_pages) + word], pages);
}

// Behind a barrier of the threads that have marked what a CTA's queries selected, `is_first` in one of them:
// pack_values may start, and sees it once it has seen all CTAs counted.
__device__ inline void pages_are_marked(const PrepareParams& p, bool is_first) {
    if (is_first) {
        __threadfence();
        atomicAdd(&p.counters[kClaimers], 1);
    }
    grid_dependency_launch();
}

// What a warp keeps of a group in shared memory, union_words(p) words of `scratch`.
struct UnionScratch {
    uint32_t *bitmap, *prefix, *masks;  // of the request's pages; of ones before each word; of each rank
    int* edge_pages;                    // the page of each (slot, column), or -1
    int page_words, mask_total;

    __device__ UnionScratch(const PrepareParams& p, uint32_t* scratch)
        : page_words(mark_words(p.max_pages)), mask_total(p.max_union * p.mask_words) {
        bitmap = scratch;
        prefix = bitmap + page_words;
        masks = prefix + page_words;
        edge_pages = reinterpret_cast<int*>(masks + mask_total);
    }
};

// The slot of an edge, slot * topk + column; 24 bits of 1 / topk divide any number of edges.
struct SlotOf {
    uint32_t reciprocal;
    __device__ explicit SlotOf(int topk) : reciprocal((1u << 24) / topk + 1) {}
    __device__ int operator()(int edge) const { return static_cast<int>(__umulhi(edge << 8, reciprocal)); }
};

// All of a union's preparation that does not ask which queries it is of. Code of these three functions is
// short on purpose, loops are not unrolled: a warp runs it once.
__device__ inline void clear_union(const PrepareParams& p, int head, int group, uint32_t* scratch) {
    const int lane = threadIdx.x % kWarp;
    const UnionScratch shared(p, scratch);
    int32_t* const pages_out = p.union_pages + (int64_t{head} * p.max_groups + group) * p.max_union;
#pragma unroll 1
    for (int w = lane; w < shared.page_words; w += kWarp) shared.bitmap[w] = 0;
#pragma unroll 1
    for (int i = lane; i < shared.mask_total; i += kWarp) shared.masks[i] = 0;
#pragma unroll 1
    for (int r = lane; r < p.max_union; r += kWarp) pages_out[r] = -1;
    __syncwarp();
}

// Reads the pages of a group of `slots` slots, makes the bitmap of their union and ranks them; returns their
// number. page_of(slot, column) is a page or -1. Slots may be in another order than those of the group.
template <typename PageOf>
__device__ int collect_pages(const PrepareParams& p, const SlotOf& slot_of, int slots, uint32_t* scratch,
                             const PageOf& page_of) {
    constexpr int kLoads = 4;  // in flight
    const int lane = threadIdx.x % kWarp, edges = slots * p.topk;
    const UnionScratch shared(p, scratch);
#pragma unroll 1
    for (int base = 0; base < edges; base += kLoads * kWarp) {
        int loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            // Past the end the last one again: a branch here would have each load wait for the one before.
            const int edge = min(base + i * kWarp + lane, edges - 1), slot = slot_of(edge);
            loaded[i] = page_of(slot, edge - slot * p.topk);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (const int edge = base + i * kWarp + lane; edge < edges) shared.edge_pages[edge] = loaded[i];
            if (loaded[i] >= 0) atomicOr(&shared.bitmap[loaded[i] / 32], 1u << (loaded[i] % 32));
        }
    }
    __syncwarp();
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < shared.page_words; base += kWarp) {
        const int word = base + lane;
        const int ones = word < shared.page_words ? __popc(shared.bitmap[word]) : 0;
        const int inclusive = warp_inclusive_sum(ones, lane);
        if (word < shared.page_words) shared.prefix[word] = count + inclusive - ones;
        count += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    }
    __syncwarp();
    return count;
}

// Counts a union of so many rounds for the order of units, in one thread.
__device__ inline void count_size(const PrepareParams& p, int rounds) {
    atomicAdd(&p.counters[size_bin(rounds)], 1);
}

// Writes the union of the group whose `count` pages the warp has collected; place_of(slot) is the group's
// slot that was collected as `slot`. Returns its rounds (Eq. 4).
template <typename PlaceOf>
__device__ int write_union(const PrepareParams& p, const SlotOf& slot_of, int head, int group, int slots,
                           int count, uint32_t* scratch, const PlaceOf& place_of) {
    const int lane = threadIdx.x % kWarp, edges = slots * p.topk;
    const UnionScratch shared(p, scratch);
    uint32_t* const masks = shared.masks;
    const int mask_total = shared.mask_total;
    const int64_t unit = int64_t{head} * p.max_groups + group;
    int32_t* const pages_out = p.union_pages + unit * p.max_union;
    uint32_t* const masks_out = p.union_masks + unit * mask_total;

    // Write pages at their ranks; queries that share a page write the same.
#pragma unroll 1
    for (int edge = lane; edge < edges; edge += kWarp) {
        const int page = shared.edge_pages[edge];
        if (page < 0) continue;
        const int rank =
            shared.prefix[page / 32] + __popc(shared.bitmap[page / 32] & ((1u << (page % 32)) - 1));
        const int slot = place_of(slot_of(edge));
        atomicOr(&masks[rank * p.mask_words + slot / 32], 1u << (slot % 32));
        pages_out[rank] = page;
    }
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < mask_total; i += kWarp) masks_out[i] = masks[i];

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
    if (lane == 0) p.union_counts[unit] = count;
    __syncwarp();
    return rounds;
}

}  // namespace pageweaver
