// V as FP8 PV needs it: transposed (d-major, tokens contiguous), token order and swizzle of the attention
// kernel.
//
// wgmma takes FP8 operands K-major only, so PV's B operand is V^T. One CTA transposes one selected page.
// Inside each 32 tokens the byte at k = 16 * half + 4 * c + b is token 16 * half + 8 * (b / 2) + 2 * c + b %
// 2: the order in which a thread of the QK product holds its columns, so that its probabilities are PV's A
// fragments with no shuffle. Rows go by d, but inside each 32 in an order (packed_row_of) that gives a thread
// of the product eight neighbouring columns, 16 bytes of output. A row holds 128 bytes; chunk i of 16 bytes
// of row n lies at chunk i ^ (n % 8), the 128-byte swizzle, so that a plain bulk copy fills a shared-memory
// operand. Tokens at or past seqused_k become 0: whatever lies there can reach no result.
//
// The same launch sorts units by size, largest first, for an even end of the attention kernel.

#include "prepare/device.cuh"
#include "prepare/prepare.hpp"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
constexpr int kOrderBlocks = 8;

// The row of V^T that holds output column d = 32 g + 8 q + 2 k + b: 32 g + 8 k + 2 q + b, which is in
// accumulator 4 (4 g + k) + b of lanes of quad position q.
__device__ __forceinline__ int packed_row_of(int d) {
    return (d & ~31) | (d & 6) << 2 | (d & 24) >> 2 | (d & 1);
}

// Counting sort by bin; the order inside a bin is free, since results do not depend on it. Sizes are on their
// way while bins are summed: this stands between the last union and the attention kernel.
__device__ void order_units(const PrepareParams& p) {
    __shared__ int bin_begin[kSizeBins], warp_sums[kThreads / kWarp];
    static_assert(kThreads == kSizeBins, "a thread a bin");
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int in_bin = p.counters[threadIdx.x], live_groups = p.counters[kLiveGroups];
    const int64_t units = int64_t{p.num_kv_heads} * p.max_groups;
    // Sizes do not wait for the number of groups that there are.
    const auto bin_of = [&](int64_t unit) {
        if (unit >= units) return -1;
        int pages = 0;
        for (int tile = 0; tile < p.tiles_per_group; ++tile)
            pages += p.tile_counts[unit * p.tiles_per_group + tile];
        return unit % p.max_groups < live_groups ? size_bin(pages) : -1;
    };
    int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    int bin = bin_of(unit);
    const int end = warp_inclusive_sum(in_bin, lane);
    if (lane == kWarp - 1) warp_sums[warp] = end;
    __syncthreads();
    int before = 0;
    for (int w = 0; w < warp; ++w) before += warp_sums[w];
    bin_begin[threadIdx.x] = before + end - in_bin;
    __syncthreads();
    for (; unit < units; unit += int64_t{kOrderBlocks} * kThreads, bin = bin_of(unit))
        if (bin >= 0)
            p.unit_order[bin_begin[bin] + atomicAdd(&p.counters[kSizeBins + bin], 1)] =
                static_cast<int32_t>(unit);
}

// A load that stands where it is written, and waits where its value is used.
__device__ __forceinline__ int load(const int32_t* address) {
    int value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
}

// Transposes one page. By a CTA; `tile` holds a page.
__device__ __forceinline__ void pack_page(const PrepareParams& p, int head, int64_t physical, int valid,
                                          int packed, uint8_t* tile) {
    const uint8_t* source = p.v_cache + physical * p.v_stride_page + head * p.v_stride_head;
    // Each thread transposes 4 x 4 bytes, 4 tokens of one k quad and 4 neighbouring d, in each 32 tokens.
    // All of the page is asked for at once.
    constexpr int kBlocks = kPageSize / 32;
    static_assert(kBlocks * kThreads * 16 == kPackedPageBytes);
    const int c = threadIdx.x % 4, d = threadIdx.x / 4 % 32 * 4, half = threadIdx.x / 128;
    const int first = 16 * half + 2 * c;
    source += first * p.v_stride_token + d;
    uint32_t rows[kBlocks][4];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k)
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const int token = 32 * k + 8 * (b / 2) + b % 2;
            rows[k][b] = first + token < valid
                             ? *reinterpret_cast<const uint32_t*>(source + token * p.v_stride_token)
                             : 0u;
        }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
        // Interleave bytes of token pairs, then pairs of pairs.
        const uint32_t low01 = __byte_perm(rows[k][0], rows[k][1], 0x5140);
        const uint32_t high01 = __byte_perm(rows[k][0], rows[k][1], 0x7362);
        const uint32_t low23 = __byte_perm(rows[k][2], rows[k][3], 0x5140);
        const uint32_t high23 = __byte_perm(rows[k][2], rows[k][3], 0x7362);
        const uint32_t columns[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632),
                                     __byte_perm(high01, high23, 0x5410),
                                     __byte_perm(high01, high23, 0x7632)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = packed_row_of(d + i), chunk = (2 * k + half) ^ (row % 8);
            *reinterpret_cast<uint32_t*>(tile + row * kPageSize + chunk * 16 + 4 * c) = columns[i];
        }
    }
    __syncthreads();
    uint4* target = reinterpret_cast<uint4*>(p.packed_v + int64_t{packed} * kPackedPageBytes);
#pragma unroll
    for (int k = 0; k < kBlocks; ++k)
        target[threadIdx.x + k * kThreads] = reinterpret_cast<const uint4*>(tile)[threadIdx.x + k * kThreads];
    __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 4) pack_values(PrepareParams p, int claimers, PageRange range) {
    grid_dependency_launch();  // what follows sets up meanwhile, and waits for this kernel before it reads
    // That the kernel before let this one start says nothing about what is seen of its marks: an acquired
    // count of its CTAs does. One that is not full yet, or cleared again, leaves the wait for all of it.
    const bool is_early =
        blockIdx.x >= kOrderBlocks && claimers > 0 && load_acquire(&p.counters[kClaimers]) == claimers;
    if (!is_early) grid_dependency_wait();
    if (blockIdx.x < kOrderBlocks) {
        if (blockIdx.x == 0 && threadIdx.x == 0) p.counters[kClaimers] = 0;
        order_units(p);
        return;
    }
    __shared__ alignas(16) uint8_t tile[kPackedPageBytes];
    __shared__ int first_numbered;
    const bool has_room = int64_t{p.num_kv_heads} * p.batch_size * p.max_pages <= p.max_packed;
    const int64_t wanted = p.num_kv_heads * range.count, step = gridDim.x - kOrderBlocks;
    const int lane = threadIdx.x % kWarp;
    // Few of many pages may be selected: each lane looks one of the CTA's pages up, and all warps find the
    // same.
    for (int64_t base = blockIdx.x - kOrderBlocks; base < wanted; base += kWarp * step) {
        const int64_t own = base + lane * step;
        int64_t index = 0, physical = 0;
        int head = 0, valid = 0, packed = -1;
        if (own < wanted) {
            head = static_cast<int>(own / range.count);
            const int64_t at = range.first + own % range.count;
            index = int64_t{head} * p.batch_size * p.max_pages + at;
            const int page = static_cast<int>(at % p.max_pages), request = static_cast<int>(at / p.max_pages);
            // The call's own tensors: on their way beside the mark.
            physical = load(p.page_table + request * p.page_table_stride + page);
            valid = min(load(p.seqused_k + request) - page * kPageSize, kPageSize);
            if (p.page_marks) {
                const uint32_t marks =
                    p.page_marks[(int64_t{head} * p.batch_size + request) * mark_words(p.max_pages) +
                                 page / 32];
                packed = marks >> (page % 32) & 1 ? 0 : -1;
            } else {
                packed = p.packed_slots[index];
            }
        }
        uint32_t marked = __ballot_sync(kAllLanes, packed >= 0);
        if (p.page_marks) {
            // Where there is room for all pages of all requests, a page's slot is its index; else slots are
            // numbered as pages turn up. No more are marked than there are edges, so a number stays in the
            // buffer.
            if (!has_room && marked != 0) {
                if (threadIdx.x == 0) first_numbered = atomicAdd(&p.counters[kPackedCount], __popc(marked));
                __syncthreads();
            }
            if (packed >= 0)
                packed =
                    has_room ? static_cast<int>(index) : first_numbered + __popc(marked & ((1u << lane) - 1));
            if (threadIdx.x < kWarp && own < wanted) p.packed_slots[index] = packed;
        }
        for (; marked != 0; marked &= marked - 1) {
            const int from = __ffs(marked) - 1;
            pack_page(p, __shfl_sync(kAllLanes, head, from), __shfl_sync(kAllLanes, physical, from),
                      __shfl_sync(kAllLanes, valid, from), __shfl_sync(kAllLanes, packed, from), tile);
        }
    }
}

}  // namespace

cudaError_t launch_pack_values(const PrepareParams& p, int64_t claimers, PageRange range,
                               cudaStream_t stream) {
    const int64_t slots = p.num_kv_heads * range.count;
    const int64_t pages = p.max_packed == 0 ? 0 : slots < 132 * 8 ? slots : 132 * 8;
    if (const cudaError_t error = prefer_shared_memory(pack_values); error != cudaSuccess) return error;
    return launch_dependent(pack_values, 1, kOrderBlocks + pages, kThreads, 0, stream, p,
                            static_cast<int>(claimers), range);
}

}  // namespace pageweaver
