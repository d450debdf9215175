// Disjoint pairs of pages with most queries in common: the greedy matching of
// strategies/page_union/pairing.py, pair for pair.
//
//   count_pages     |R_p| of every page           } only where a request may have more pages than are paired
//   choose_pages    the most selected ones        }
//   count_overlaps  |R_a & R_b| of all pairs: the bitmaps are operands of a binary tensor-core product
//   match_pages     a cluster a request: in each round every pair that is the best remaining choice of both
//   its
//                   pages is matched; choices are in a strict order, so this ends in the sequential greedy's
//                   pairs
//
// A request pairs at most paired_limit pages, which bounds the matrix of overlaps by shapes: the most
// selected ones, the lowest of equals.

#include "page_union/device.cuh"
#include "primitives/launch.cuh"
#include "primitives/mbarrier.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMatchThreads = 1024, kMatchCtas = 8;
constexpr int kMostCommon = (1 << 22) - 1;  // more common queries than this count as so many
constexpr int kTilePages = 32;

__global__ void __launch_bounds__(kThreads) count_pages(PageListParams p) {
    grid_dependency_wait();
    const int lane = threadIdx.x % 32;
    const int64_t index = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
    if (index >= int64_t{p.num_kv_heads} * p.batch_size * p.max_pages) return;
    const int page = static_cast<int>(index % p.max_pages);
    const int request = static_cast<int>(index / p.max_pages % p.batch_size);
    const int head = static_cast<int>(index / p.max_pages / p.batch_size);
    const RequestBits bits = request_bits(p, request);
    const uint32_t* words = page_words(p, head, bits, page);
    int count = 0;
    for (int w = lane; w < bits.words; w += 32) count += __popc(words[w]);
    count = __reduce_add_sync(kAllLanes, count);
    if (lane == 0) p.page_counts[index] = count;
}

// Sum of a number over the CTA, to all threads.
__device__ int block_sum(int value, int* warp_sums) {
    value = __reduce_add_sync(kAllLanes, value);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += warp_sums[w];
    __syncthreads();
    return sum;
}

__global__ void __launch_bounds__(kThreads) choose_pages(PageListParams p) {
    grid_dependency_wait();
    __shared__ int warp_sums[kWarps];
    const int64_t unit = blockIdx.x;  // head * batch_size + request
    int32_t* const counts = p.page_counts + unit * p.max_pages;
    const auto reaching = [&](int least) {
        int pages = 0;
        for (int page = threadIdx.x; page < p.max_pages; page += kThreads) pages += counts[page] >= least;
        return block_sum(pages, warp_sums);
    };
    // No page is selected more than total_q times.
    int low = 1, high = p.total_q + 1;
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (reaching(middle) <= p.paired_limit)
            high = middle;
        else
            low = middle + 1;
    }
    // Those that reach it, and of the next lower count the first ones that still have room.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int spare = low > 1 ? p.paired_limit - reaching(low) : 0;
    int reached = 0, equal = 0;
    for (int base = 0; base < p.max_pages; base += kThreads) {
        const int page = base + threadIdx.x, count = page < p.max_pages ? counts[page] : 0;
        const uint32_t is_above = __ballot_sync(kAllLanes, count >= low);
        const uint32_t is_equal = __ballot_sync(kAllLanes, count > 0 && count == low - 1);
        if (lane == 0) warp_sums[warp] = __popc(is_above) | __popc(is_equal) << 16;
        __syncthreads();
        const uint32_t before = (1u << lane) - 1;
        int above_rank = reached + __popc(is_above & before), equal_rank = equal + __popc(is_equal & before);
        for (int w = 0; w < kWarps; ++w) {
            const int above_count = warp_sums[w] & 0xffff, equal_count = warp_sums[w] >> 16;
            if (w < warp) above_rank += above_count, equal_rank += equal_count;
            reached += above_count;
            equal += equal_count;
        }
        const bool is_chosen = is_above >> lane & 1 || (is_equal >> lane & 1 && equal_rank < spare);
        const int64_t place = unit * p.paired_limit + above_rank + min(equal_rank, spare);
        if (is_chosen) p.paired_pages[place] = page;
        if (page < p.max_pages) counts[page] = is_chosen ? static_cast<int32_t>(place) : -1;
        __syncthreads();
    }
    const int chosen = reached + min(equal, spare);
    if (threadIdx.x == 0) p.paired_counts[unit] = chosen;
}

// Pages of a request that are paired, and the one at a place.
__device__ __forceinline__ int paired_count(const PageListParams& p, int64_t unit) {
    return p.paired_counts ? p.paired_counts[unit] : p.max_pages;
}
__device__ __forceinline__ int paired_page(const PageListParams& p, int64_t unit, int place) {
    return p.paired_pages ? p.paired_pages[unit * p.paired_limit + place] : place;
}

// acc += popcount(a & b) over 256 bits, A [16 x 256], B [8 x 256]. Which bits of a row a lane holds matters
// only in that both operands agree.
__device__ __forceinline__ void mma_m16n8k256_and_popc(int (&acc)[4], const uint32_t (&a)[4],
                                                       const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// One 32 x 32 tile of a request's matrix on or above the diagonal, written to both sides. The warps share the
// queries among them.
__global__ void __launch_bounds__(kThreads) count_overlaps(PageListParams p) {
    __shared__ int counts[kTilePages][kTilePages + 1];
    for (int i = threadIdx.x; i < kTilePages * (kTilePages + 1); i += kThreads) (&counts[0][0])[i] = 0;
    grid_dependency_wait();
    const int tiles = (p.paired_limit + kTilePages - 1) / kTilePages, tile_pairs = tiles * (tiles + 1) / 2;
    const int64_t unit = blockIdx.x / tile_pairs;
    const int head = static_cast<int>(unit / p.batch_size), request = static_cast<int>(unit % p.batch_size);
    int tile_b = 0, tile_a = blockIdx.x % tile_pairs;  // tile_a <= tile_b
    while (tile_a > tile_b) tile_a -= ++tile_b;
    const int pages = paired_count(p, unit);
    if (tile_b * kTilePages >= pages) return;

    const RequestBits bits = request_bits(p, request);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto row_words = [&](int place) {
        return place < pages ? page_words(p, head, bits, paired_page(p, unit, place)) : nullptr;
    };
    const uint32_t *words_a[4], *words_b[4];
    for (int i = 0; i < 4; ++i) {
        words_a[i] = row_words(tile_a * kTilePages + 8 * i + lane / 4);
        words_b[i] = row_words(tile_b * kTilePages + 8 * i + lane / 4);
    }
    __syncthreads();
    int acc[2][4][4] = {};
    for (int step = warp; step * kBlockWords < bits.words; step += kWarps) {
        const auto load = [&](const uint32_t* words, int half) {
            const int w = step * kBlockWords + 4 * half + lane % 4;
            return words && w < bits.words ? __ldg(words + w) : 0u;
        };
        uint32_t a[2][4], b[4][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) a[i][k] = load(words_a[2 * i + k % 2], k / 2);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k) b[i][k] = load(words_b[i], k);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) mma_m16n8k256_and_popc(acc[i][j], a[i], b[j]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                atomicAdd(&counts[16 * i + lane / 4 + 8 * (r / 2)][8 * j + 2 * (lane % 4) + r % 2],
                          acc[i][j][r]);
    __syncthreads();
    uint32_t* const matrix = p.overlaps + unit * p.paired_limit * p.overlap_stride;
    for (int i = threadIdx.x; i < kTilePages * kTilePages; i += kThreads) {
        const int x = i / kTilePages, y = i % kTilePages;
        const auto store = [&](int a, int b, int count) {
            if (a >= pages || b >= pages) return;
            const uint32_t key = static_cast<uint32_t>(min(count, kMostCommon)) << 10 | (kMostPaired - 1 - b);
            matrix[int64_t{a} * p.overlap_stride + b] = a == b || count == 0 ? 0 : key;
        };
        store(tile_a * kTilePages + x, tile_b * kTilePages + y, counts[x][y]);
        if (tile_a != tile_b) store(tile_b * kTilePages + x, tile_a * kTilePages + y, counts[y][x]);
    }
}

// The free page with most queries in common with that of `row`, the lowest of equals; -1 without one. By a
// warp.
__device__ int best_choice(const uint32_t* row, int pages, const uint32_t* taken, int lane) {
    uint32_t best = 0;
#pragma unroll 4
    for (int b = 4 * lane; b < pages; b += 4 * kWarp) {
        const uint4 keys = __ldg(reinterpret_cast<const uint4*>(row + b));
        const uint32_t bits = taken[b / 32] >> (b % 32);
        best = max(best, bits & 1 ? 0 : keys.x);
        best = max(best, bits & 2 ? 0 : keys.y);
        best = max(best, bits & 4 ? 0 : keys.z);
        best = max(best, bits & 8 ? 0 : keys.w);
    }
    best = __reduce_max_sync(kAllLanes, best);
    return best == 0 ? -1 : kMostPaired - 1 - static_cast<int>(best & (kMostPaired - 1));
}

// The CTAs of a cluster share the pages that look for a choice, and each keeps all choices and does the rest
// of a round on its own.
__global__ void __launch_bounds__(kMatchThreads) match_pages(PageListParams p) {
    __shared__ int32_t choices[kMostPaired];
    __shared__ uint32_t taken[kMostPaired / 32];  // bits of matched pages, and of those past the last one
    __shared__ int16_t stale[kMostPaired];        // own pages whose choice was taken
    __shared__ int stale_count;
    static_assert(kMatchThreads == kMostPaired, "a thread a page");
    grid_dependency_wait();
    const int64_t unit = blockIdx.x / kMatchCtas;
    const int rank = cluster_cta_rank();
    const uint32_t* matrix = p.overlaps + unit * p.paired_limit * p.overlap_stride;
    const int pages = paired_count(p, unit);
    const int a = threadIdx.x, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const uint32_t outside = __ballot_sync(kAllLanes, a >= pages);
    if (lane == 0) taken[warp] = outside;
    choices[a] = -1;
    if (a * kMatchCtas + rank < pages) stale[a] = static_cast<int16_t>(a * kMatchCtas + rank);
    if (a == 0) stale_count = (pages - rank + kMatchCtas - 1) / kMatchCtas;
    cluster_sync();
    for (;;) {
        for (int i = warp; i < stale_count; i += kMatchThreads / kWarp) {
            const int page = stale[i];
            const int best = best_choice(matrix + int64_t{page} * p.overlap_stride, pages, taken, lane);
            if (lane < kMatchCtas) store_cluster(smem_address(&choices[page]), lane, best);
        }
        cluster_sync();
        const int mine = choices[a];
        const bool is_free = !(taken[warp] >> lane & 1);
        const bool is_matched = is_free && mine >= 0 && choices[max(mine, 0)] == a;
        const uint32_t matched = __ballot_sync(kAllLanes, is_matched);
        __syncthreads();
        if (lane == 0) taken[warp] |= matched;
        if (a == 0) stale_count = 0;
        if (is_matched && rank == 0)
            p.partners[unit * p.max_pages + paired_page(p, unit, a)] = paired_page(p, unit, mine);
        __syncthreads();
        const bool is_stale =
            is_free && !is_matched && mine >= 0 && taken[max(mine, 0) / 32] >> (max(mine, 0) % 32) & 1;
        if (is_stale && a % kMatchCtas == rank) stale[atomicAdd(&stale_count, 1)] = static_cast<int16_t>(a);
        // The best remaining pair is always matched: without a choice taken there is none left.
        if (!__syncthreads_or(is_stale)) break;
        cluster_sync();
    }
}

}  // namespace

cudaError_t launch_pair_pages(const PageListParams& p, cudaStream_t stream) {
    const int64_t units = int64_t{p.num_kv_heads} * p.batch_size;
    if (p.paired_limit < 2 || units == 0) return cudaSuccess;
    if (p.paired_limit > kMostPaired) return cudaErrorInvalidValue;
    cudaError_t error = cudaSuccess;
    if (p.page_counts) {
        error = launch_dependent(count_pages, 1, (units * p.max_pages * 32 + kThreads - 1) / kThreads,
                                 kThreads, 0, stream, p);
        if (error == cudaSuccess) error = launch_dependent(choose_pages, 1, units, kThreads, 0, stream, p);
    }
    const int64_t tiles = (p.paired_limit + kTilePages - 1) / kTilePages;
    if (error == cudaSuccess)
        error = launch_dependent(count_overlaps, 1, units * tiles * (tiles + 1) / 2, kThreads, 0, stream, p);
    if (error == cudaSuccess)
        error = launch_dependent(match_pages, kMatchCtas, units * kMatchCtas, kMatchThreads, 0, stream, p);
    return error;
}

}  // namespace pageweaver
