// What preparation, search and attention kernels agree on about a schedule.
#pragma once

#include <cstdint>

#include "prepare/prepare.hpp"

namespace pageweaver {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Places in PrepareParams::counters behind the two size tables.
constexpr int kPackedCount = 2 * kSizeBins, kLiveGroups = kPackedCount + 1, kLiveWindows = kPackedCount + 2;
// Tiles that attention's CTAs have drawn beyond those they begin with, and CTAs that found none left; 0
// between kernels.
constexpr int kTilesDrawn = kPackedCount + 3, kCtasDone = kPackedCount + 4;
// CTAs that have marked all pages which their queries selected; 0 between calls.
constexpr int kClaimers = kPackedCount + 5;
constexpr int kCounters = kPackedCount + 6;

// Words of a request's page_marks.
__host__ __device__ inline int mark_words(int max_pages) {
    return (max_pages + 31) / 32;
}

// What others wrote before they released the value that is read here, is seen behind it.
__device__ __forceinline__ int load_acquire(const int32_t* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ inline int warp_inclusive_sum(int value, int lane) {
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Bits of one tile's queries in a group's membership words.
__device__ __forceinline__ uint64_t tile_mask(const uint32_t* words, int tile, int queries_per_tile) {
    if (queries_per_tile == 64) return (uint64_t{words[2 * tile + 1]} << 32) | words[2 * tile];
    // A power of two: a tile's bits lie in one word.
    const int first = tile * queries_per_tile;
    return (words[first / 32] >> (first % 32)) & (0xffffffffu >> (32 - queries_per_tile));
}

// Bin of a unit's size, the largest sizes in the first bins.
__device__ __forceinline__ int size_bin(int pages) {
    return kSizeBins - 1 - min(pages, kSizeBins - 1);
}

}  // namespace pageweaver
