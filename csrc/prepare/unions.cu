// Union preparation: which pages each group of queries traverses, and which of its queries belong to each.
//
// Three kernels, no host synchronisation, every size bounded by shapes:
//   plan_groups    one CTA scans request lengths into first groups; the others clear what later kernels count
//   in build_unions   one warp a group: a bitmap of the request's pages in shared memory makes the union
//   ascending and
//                  unique without sorting; ranks come from popcounts; masks are OR-ed at the rank
//   pack_values    (pack_values.cu) V^T of the pages that build_unions claimed, and the order of units
// Any page count that the bitmap's shared memory holds: 4 bytes * ceil(max_pages / 32) twice a warp.

#include "prepare/device.cuh"
#include "prepare/prepare.hpp"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kWarp = 32;
constexpr int kOwnEdges = 4;
constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ int warp_inclusive_sum(int value, int lane) {
    for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__global__ void __launch_bounds__(kPlanThreads) plan_groups(PrepareParams p) {
    const int queries_per_group = p.queries_per_tile * p.tiles_per_group;
    if (blockIdx.x > 0) {
        const int64_t slots = int64_t{p.num_kv_heads} * p.batch_size * p.max_pages;
        const int64_t first = int64_t{blockIdx.x - 1} * kPlanThreads + threadIdx.x;
        const int64_t step = int64_t{gridDim.x - 1} * kPlanThreads;
        if (p.max_packed > 0)
            for (int64_t i = first; i < slots; i += step) p.packed_slots[i] = -1;
        if (p.identity_ids) {
            const int64_t rows = int64_t{p.num_kv_heads} * p.total_q;
            for (int64_t i = first; i < rows; i += step)
                p.identity_ids[i] = static_cast<int32_t>(i % p.total_q);
        }
        return;
    }
    __shared__ int warp_sums[kPlanThreads / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (int i = threadIdx.x; i < 2 * kSizeBins + 2; i += kPlanThreads) p.counters[i] = 0;
    __syncthreads();
    int carry = 0;
    for (int base = 0; base < p.batch_size; base += kPlanThreads) {
        const int request = base + threadIdx.x;
        int groups = 0;
        if (request < p.batch_size) {
            const int length = p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
            groups = (max(length, 0) + queries_per_group - 1) / queries_per_group;
        }
        const int inclusive = warp_inclusive_sum(groups, lane);
        __syncthreads();
        if (lane == kWarp - 1) warp_sums[warp] = inclusive;
        __syncthreads();
        int before = carry, total = 0;
        for (int w = 0; w < kPlanThreads / kWarp; ++w) {
            if (w < warp) before += warp_sums[w];
            total += warp_sums[w];
        }
        if (request < p.batch_size) p.group_starts[request] = before + inclusive - groups;
        carry += total;
    }
    if (threadIdx.x == 0) {
        // Boundaries that pass total_q are refused in debug mode; here they must not overrun the schedule.
        p.group_starts[p.batch_size] = min(carry, p.max_groups);
        p.counters[kLiveGroups] = min(carry, p.max_groups);
    }
}

__global__ void build_unions(PrepareParams p) {
    extern __shared__ uint32_t shared_words[];
    grid_dependency_wait();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int page_words = (p.max_pages + 31) / 32;
    const int mask_total = p.max_union * p.mask_words;
    uint32_t* bitmap = shared_words + warp * (2 * page_words + mask_total);
    uint32_t* prefix = bitmap + page_words;
    uint32_t* masks = prefix + page_words;

    const int64_t unit = int64_t{blockIdx.x} * warps + warp;
    if (unit >= int64_t{p.num_kv_heads} * p.max_groups) return;
    const int head = static_cast<int>(unit / p.max_groups), group = static_cast<int>(unit % p.max_groups);
    const int live_groups = p.counters[kLiveGroups];
    const int queries_per_group = p.queries_per_tile * p.tiles_per_group;
    int32_t* const pages_out = p.union_pages + unit * p.max_union;
    uint32_t* const masks_out = p.union_masks + unit * mask_total;
    int32_t* const tile_counts_out = p.tile_counts + unit * p.tiles_per_group;

    if (group >= live_groups) {
        if (head == 0 && lane == 0) {
            p.group_offsets[group + 1] = p.cu_seqlens_q[p.batch_size];
            if (live_groups == 0 && group == 0) p.group_offsets[0] = p.cu_seqlens_q[0];
            p.group_requests[group] = -1;
        }
        if (lane == 0) p.union_counts[unit] = 0;
        for (int t = lane; t < p.tiles_per_group; t += kWarp) tile_counts_out[t] = 0;
        for (int r = lane; r < p.max_union; r += kWarp) pages_out[r] = -1;
        for (int i = lane; i < mask_total; i += kWarp) masks_out[i] = 0;
        return;
    }

    // The request of a group: the last one whose first group is not past it.
    int request = 0;
    for (int low = 0, high = p.batch_size - 1; low <= high;) {
        const int middle = (low + high) / 2;
        if (p.group_starts[middle] <= group) {
            request = middle;
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    const int request_end = p.cu_seqlens_q[request + 1];
    // Boundaries that pass total_q are refused in debug mode; here they must not lead out of the tensors.
    const int first = min(
        max(p.cu_seqlens_q[request] + (group - p.group_starts[request]) * queries_per_group, 0), p.total_q);
    const int last = max(first, min(min(first + queries_per_group, request_end), p.total_q));
    if (head == 0 && lane == 0) {
        if (group == 0) p.group_offsets[0] = first;
        p.group_offsets[group + 1] = last;
        p.group_requests[group] = request;
    }

    for (int w = lane; w < page_words; w += kWarp) bitmap[w] = 0;
    for (int i = lane; i < mask_total; i += kWarp) masks[i] = 0;
    __syncwarp();

    // Positions of the request's queries: row + shift. A page is visible when it starts at or before its
    // query.
    const int shift = p.seqused_k[request] - request_end;
    const int edges = (last - first) * p.topk;
    const auto edge_page = [&](int edge) {
        if (edge >= edges) return -1;
        const int slot = edge / p.topk, column = edge % p.topk;
        const int query = p.query_ids ? p.query_ids[int64_t{head} * p.total_q + first + slot] : first + slot;
        const int page =
            p.q2k_indices[head * p.q2k_stride_head + query * p.q2k_stride_row + column * p.q2k_stride_column];
        const bool visible =
            page >= 0 && page < p.max_pages && int64_t{page} * kPageSize <= int64_t{query} + shift;
        return visible ? page : -1;
    };
    // A lane keeps the pages of its first edges: all of them at group size 16 and topk 16.
    int own_pages[kOwnEdges];
#pragma unroll
    for (int i = 0; i < kOwnEdges; ++i) own_pages[i] = edge_page(lane + i * kWarp);
    const auto for_each_edge = [&](auto visit) {
#pragma unroll
        for (int i = 0; i < kOwnEdges; ++i)
            if (own_pages[i] >= 0) visit(lane + i * kWarp, own_pages[i]);
        for (int edge = lane + kOwnEdges * kWarp; edge < edges; edge += kWarp)
            if (const int page = edge_page(edge); page >= 0) visit(edge, page);
    };
    for_each_edge([&](int, int page) { atomicOr(&bitmap[page / 32], 1u << (page % 32)); });
    __syncwarp();

    int count = 0;
    for (int base = 0; base < page_words; base += kWarp) {
        const int word = base + lane;
        const int ones = word < page_words ? __popc(bitmap[word]) : 0;
        const int inclusive = warp_inclusive_sum(ones, lane);
        if (word < page_words) prefix[word] = count + inclusive - ones;
        count += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    }
    __syncwarp();
    for_each_edge([&](int edge, int page) {
        const int rank = prefix[page / 32] + __popc(bitmap[page / 32] & ((1u << (page % 32)) - 1));
        const int slot = edge / p.topk;
        atomicOr(&masks[rank * p.mask_words + slot / 32], 1u << (slot % 32));
    });
    __syncwarp();

    // Write the union and give every page of it a place in packed_v. Where that has room for all pages of all
    // requests a page's place is its index and writing it twice does no harm; else places are numbered as
    // pages turn up.
    const int64_t slot_base = (int64_t{head} * p.batch_size + request) * p.max_pages;
    const bool has_room = int64_t{p.num_kv_heads} * p.batch_size * p.max_pages <= p.max_packed;
    for (int word = lane; word < page_words; word += kWarp) {
        int rank = prefix[word];
        for (uint32_t bits = bitmap[word]; bits; bits &= bits - 1, ++rank) {
            const int64_t index = slot_base + word * 32 + __ffs(bits) - 1;
            pages_out[rank] = static_cast<int32_t>(index - slot_base);
            if (p.max_packed == 0) continue;
            int32_t* const slot = p.packed_slots + index;
            if (has_room) {
                *slot = static_cast<int32_t>(index);
            } else if (*reinterpret_cast<volatile int32_t*>(slot) == -1 &&
                       atomicCAS(slot, -1, kClaimed) == -1) {
                // No more pages can be selected than there are edges, so the number stays inside the buffer.
                *slot = atomicAdd(&p.counters[kPackedCount], 1);
            }
        }
    }
    for (int i = lane; i < mask_total; i += kWarp) masks_out[i] = masks[i];
    for (int r = count + lane; r < p.max_union; r += kWarp) pages_out[r] = -1;

    int largest = 0;
    for (int tile = 0; tile < p.tiles_per_group; ++tile) {
        int pages = 0;
        for (int r = lane; r < count; r += kWarp)
            pages += tile_mask(masks + r * p.mask_words, tile, p.queries_per_tile) != 0;
        pages = __reduce_add_sync(kAllLanes, pages);
        if (lane == 0) tile_counts_out[tile] = pages;
        largest += pages;
    }
    if (lane == 0) {
        p.union_counts[unit] = count;
        atomicAdd(&p.counters[size_bin(largest)], 1);
    }
}

}  // namespace

cudaError_t launch_pack_values(const PrepareParams& params, cudaStream_t stream);

cudaError_t launch_prepare(const PrepareParams& p, cudaStream_t stream) {
    if (p.max_groups == 0) return cudaSuccess;
    const int64_t slots = int64_t{p.num_kv_heads} * p.batch_size * p.max_pages;
    const int64_t rows = int64_t{p.num_kv_heads} * p.total_q;
    const int64_t clearing = ((slots > rows ? slots : rows) + kPlanThreads - 1) / kPlanThreads;
    plan_groups<<<1 + static_cast<unsigned>(clearing < 264 ? clearing : 264), kPlanThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

    const size_t warp_bytes =
        sizeof(uint32_t) * (2 * ((p.max_pages + 31) / 32) + size_t{1} * p.max_union * p.mask_words);
    constexpr size_t kMaxShared = 227 * 1024;
    if (warp_bytes > kMaxShared) return cudaErrorInvalidValue;
    int warps = 4;
    while (warps > 1 && warps * warp_bytes > 48 * 1024) warps /= 2;
    const size_t shared = warps * warp_bytes;
    if (shared > 48 * 1024) {
        const cudaError_t error = cudaFuncSetAttribute(
            build_unions, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
        if (error != cudaSuccess) return error;
    }
    const int64_t units = int64_t{p.num_kv_heads} * p.max_groups;
    const cudaError_t error =
        launch_dependent(build_unions, 1, (units + warps - 1) / warps, warps * kWarp, shared, stream, p);
    return error == cudaSuccess ? launch_pack_values(p, stream) : error;
}

}  // namespace pageweaver
