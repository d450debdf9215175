// Union preparation: which pages each group of queries traverses, and which of its queries belong to each.
//
// Three kernels, no host synchronisation, every size bounded by shapes:
//   plan_groups    one CTA scans request lengths into first groups and windows; the others clear what later
//                  kernels count in
//   build_unions   one warp a group: a bitmap of the request's pages in shared memory makes the union
//                  ascending and unique without sorting; ranks come from popcounts; masks are OR-ed at the
//                  rank. Where the call searches for an order, csrc/regroup finds it and builds the unions.
//   pack_values    (pack_values.cu) V^T of the pages that unions marked, and the order of units
// Any page count that the bitmap's shared memory holds: 4 bytes * ceil(max_pages / 32) twice a warp.

#include "prepare/build_union.cuh"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kUnionWarps = 8;  // at most, where shared memory holds their scratch

// First unit of every request, units of `length` queries; returns their number. All threads of one CTA.
__device__ int scan_requests(const PrepareParams& p, int length, int32_t* starts) {
    __shared__ int warp_sums[kPlanThreads / kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int carry = 0;
    for (int base = 0; base < p.batch_size; base += kPlanThreads) {
        const int request = base + threadIdx.x;
        int units = 0;
        if (request < p.batch_size) units = (query_count(p, request) + length - 1) / length;
        const int inclusive = warp_inclusive_sum(units, lane);
        __syncthreads();
        if (lane == kWarp - 1) warp_sums[warp] = inclusive;
        __syncthreads();
        int before = carry, total = 0;
        for (int w = 0; w < kPlanThreads / kWarp; ++w) {
            if (w < warp) before += warp_sums[w];
            total += warp_sums[w];
        }
        if (request < p.batch_size) starts[request] = before + inclusive - units;
        carry += total;
    }
    return carry;
}

__global__ void __launch_bounds__(kPlanThreads) plan_groups(PrepareParams p) {
    grid_dependency_launch();  // the next kernel waits where it needs what this one writes
    if (blockIdx.x > 0) {
        const int64_t marks = int64_t{p.num_kv_heads} * p.batch_size * mark_words(p.max_pages);
        const int64_t first = int64_t{blockIdx.x - 1} * kPlanThreads + threadIdx.x;
        const int64_t step = int64_t{gridDim.x - 1} * kPlanThreads;
        if (p.max_packed > 0)
            for (int64_t i = first; i < marks; i += step) p.page_marks[i] = 0;
        if (p.written_ids) {
            // A search writes the ids of all requests; those of rows past them stay as they are.
            const int start = p.window > 0 ? min(max(p.cu_seqlens_q[p.batch_size], 0), p.total_q) : 0;
            const int rows = p.total_q - start;
            for (int64_t i = first; i < int64_t{p.num_kv_heads} * rows; i += step) {
                const int64_t head = i / rows;
                const int row = start + static_cast<int>(i - head * rows);
                p.written_ids[head * p.total_q + row] = row;
            }
        }
        return;
    }
    for (int i = threadIdx.x; i < kCounters; i += kPlanThreads) p.counters[i] = 0;
    const int groups = scan_requests(p, p.queries_per_tile * p.tiles_per_group, p.group_starts);
    const int windows = p.window > 0 ? scan_requests(p, p.window, p.window_starts) : 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        // Boundaries that pass total_q are refused in debug mode; here they must not overrun the schedule.
        p.group_starts[p.batch_size] = min(groups, p.max_groups);
        p.counters[kLiveGroups] = min(groups, p.max_groups);
        p.counters[kLiveWindows] = min(windows, p.max_windows);
    }
}

__global__ void __launch_bounds__(kUnionWarps* kWarp, 4) build_unions(PrepareParams p) {
    extern __shared__ uint32_t shared_words[];
    __shared__ int64_t requests[kUnionWarps];  // of a KV head, of each warp's group
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int64_t unit = int64_t{blockIdx.x} * warps + warp, words = union_words(p);
    uint32_t* const scratch = shared_words + warp * words;
    const int head = static_cast<int>(unit / p.max_groups), group = static_cast<int>(unit % p.max_groups);
    const int group_length = p.queries_per_tile * p.tiles_per_group;
    if (lane < group_length) prefetch_ids(p, head, int64_t{group} * group_length + lane);
    grid_dependency_wait();
    const bool exists = unit < int64_t{p.num_kv_heads} * p.max_groups;
    const bool is_live = exists && group < p.counters[kLiveGroups];
    if (exists && !is_live) clear_group(p, head, group, lane);
    if (lane == 0) requests[warp] = -1;
    const SlotOf slot_of(p.topk);
    int slots = 0, count = 0;
    if (is_live) {
        const int request = request_of(p.group_starts, p.batch_size, group);
        const Span span = span_of(p, request, group - p.group_starts[request], group_length);
        slots = span.last - span.first;
        if (head == 0 && lane == 0) note_group(p, group, request, span);
        if (lane == 0) requests[warp] = int64_t{head} * p.batch_size + request;
        clear_union(p, head, group, scratch);
        const int64_t shift = position_shift(p, request);
        count = collect_pages(p, slot_of, slots, scratch, [&](int slot, int column) {
            const int at = span.first + slot;
            const int query = p.query_ids ? p.query_ids[int64_t{head} * p.total_q + at] : at;
            return visible_page(p, head, shift, query, column);
        });
    }
    __syncthreads();
    // Neighbours are mostly of one request and share pages. Bitmaps lie first in each warp's scratch.
#pragma unroll 1
    for (int word = threadIdx.x; word < mark_words(p.max_pages); word += blockDim.x) {
        int64_t request = -1;
        uint32_t pages = 0;
        for (int w = 0; w < warps; ++w) {
            if (requests[w] < 0) continue;
            if (requests[w] != request) {
                mark_pages(p, request, word, pages);
                request = requests[w];
                pages = 0;
            }
            pages |= shared_words[w * words + word];
        }
        mark_pages(p, request, word, pages);
    }
    __syncthreads();
    pages_are_marked(p, threadIdx.x == 0);
    if (!is_live) return;
    const int rounds =
        write_union(p, slot_of, head, group, slots, count, scratch, [](int slot) { return slot; });
    if (lane == 0) count_size(p, rounds);
}

cudaError_t launch_build_unions(const PrepareParams& p, cudaStream_t stream, int64_t& ctas) {
    const size_t warp_bytes = sizeof(uint32_t) * union_words(p);
    constexpr size_t kMaxShared = 226 * 1024;  // what static arrays take stays free
    if (warp_bytes > kMaxShared) return cudaErrorInvalidValue;
    int warps = kUnionWarps;
    while (warps > 1 && warps * warp_bytes > 48 * 1024) warps /= 2;
    const size_t shared = warps * warp_bytes;
    cudaError_t error = prefer_shared_memory(build_unions);
    if (error == cudaSuccess) error = allow_shared_memory(build_unions, kMaxShared);
    if (error != cudaSuccess) return error;
    ctas = (int64_t{p.num_kv_heads} * p.max_groups + warps - 1) / warps;
    return launch_dependent(build_unions, 1, ctas, warps * kWarp, shared, stream, p);
}

}  // namespace

cudaError_t launch_regroup(const PrepareParams& params, cudaStream_t stream);

cudaError_t launch_prepare(const PrepareParams& p, cudaStream_t stream) {
    if (p.max_groups == 0) return cudaSuccess;
    const int64_t marks = int64_t{p.num_kv_heads} * p.batch_size * mark_words(p.max_pages);
    const int64_t rows = p.window > 0 ? 1 : int64_t{p.num_kv_heads} * p.total_q;
    const int64_t clearing = ((marks > rows ? marks : rows) + kPlanThreads - 1) / kPlanThreads;
    cudaError_t error = prefer_shared_memory(plan_groups);
    if (error != cudaSuccess) return error;
    plan_groups<<<1 + static_cast<unsigned>(clearing < 264 ? clearing : 264), kPlanThreads, 0, stream>>>(p);
    error = cudaGetLastError();
    int64_t claimers = int64_t{p.num_kv_heads} * p.max_windows;
    if (error == cudaSuccess)
        error = p.window > 0 ? launch_regroup(p, stream) : launch_build_unions(p, stream, claimers);
    return error == cudaSuccess
               ? launch_pack_values(p, claimers, {0, int64_t{p.batch_size} * p.max_pages}, stream)
               : error;
}

}  // namespace pageweaver
