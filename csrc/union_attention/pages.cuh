// Union attention over FP8 caches: what its two arithmetics have in common.
#pragma once

#include <type_traits>

#include "primitives/bulk_copy.cuh"
#include "primitives/mbarrier.cuh"
#include "union_attention/tile.cuh"

namespace pageweaver {

constexpr int kTileSlots = 2;
constexpr int kConsumerWarps = 4;
constexpr int kPageBytes = kPageSize * kHeadDim, kQBytes = kTileRows * kHeadDim;

// Who selected the page of a slot. A warp's rows are two halves of eight (head_row_of): `members` has a byte
// for each, a bit for each query there.
struct alignas(16) PageMeta {
    uint64_t members;
    int32_t start;  // the page's first position
};
static_assert(kConsumerWarps == 4, "a byte for each half");

// The bits of the queries of a half.
__device__ __forceinline__ uint32_t all_half_queries(int group_shift) {
    return group_shift > 3 ? 1u : (1u << (8 >> group_shift)) - 1;
}

// The bytes of the queries in `mask`, a bit a query of the tile.
__device__ __forceinline__ uint64_t member_bytes(uint64_t mask, int group_shift) {
    const uint32_t half_queries = all_half_queries(group_shift);
    uint32_t words[2] = {};
#pragma unroll 1
    for (int half = 0; half < 2 * kConsumerWarps; ++half) {
        const uint32_t queries =
            static_cast<uint32_t>(mask >> (head_row_of(8 * half) >> group_shift)) & half_queries;
        (half < kConsumerWarps ? words[0] : words[1]) |= queries << 8 * (half % kConsumerWarps);
    }
    return uint64_t{words[1]} << 32 | words[0];
}

// V^T of a page, and below it 8 rows of 1.0 in e4m3 (split: of 1.0 and 0, row_sums.cuh): columns of PV that
// are the row sums of P.
struct ValueSlot {
    uint8_t page[kPageBytes];
    uint32_t ones[8 * kPageSize / 4];
};

using TileRing = RingPosition<kTileSlots>;

// Gives a slot back to the producers that fill it.
template <bool kIsCluster>
__device__ __forceinline__ void release(uint64_t& barrier) {
    if constexpr (kIsCluster) {
        mbarrier_arrive_cluster(smem_address(&barrier), 0);
        mbarrier_arrive_cluster(smem_address(&barrier), 1);
    } else {
        mbarrier_arrive(smem_address(&barrier));
    }
}

// The lowest position of a half's queries: pages that end before it need no mask. By a warp.
__device__ __forceinline__ int lowest_position(const int32_t* rows, const Tile& tile, int warp, int half,
                                               int lane) {
    const int query = rows[16 * warp + 8 * half + lane % 8];
    return __reduce_min_sync(kAllLanes, query < 0 ? -1 : query + tile.shift);
}

using Fragment = uint32_t[4];

// Registers of the k-th 32 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[16], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// Calls body(has_low, has_high), both of them compile-time, for whichever of a warp's two halves of rows are
// members; not at all where neither is.
template <typename Body>
__device__ __forceinline__ void for_members(const bool (&is_member)[2], const Body& body) {
    if (__builtin_expect(is_member[0] && is_member[1], true))
        body(std::true_type{}, std::true_type{});
    else if (is_member[0])
        body(std::true_type{}, std::false_type{});
    else if (is_member[1])
        body(std::false_type{}, std::true_type{});
}

}  // namespace pageweaver
