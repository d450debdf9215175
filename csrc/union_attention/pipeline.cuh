// Union attention over FP8 caches: its shared memory, and the warps that fill it with pages.
#pragma once

#include <type_traits>

#include "primitives/bulk_copy.cuh"
#include "primitives/mbarrier.cuh"
#include "union_attention/tile.cuh"

namespace pageweaver {

constexpr int kStages = 3;
constexpr int kCtasPerSm = 2;
constexpr int kConsumerWarps = 4;
constexpr int kPageBytes = kPageSize * kHeadDim, kQBytes = kTileRows * kHeadDim;

// Who selected the page of a slot. A warp's rows are two halves of eight (head_row_of): `members` has a byte
// for each, a bit for each query there.
struct alignas(16) PageMeta {
    uint64_t members;
    int32_t start;  // the page's first position
};
static_assert(kConsumerWarps == 4, "a byte for each half");

// The bytes of the queries in `mask`, a bit a query of the tile.
__device__ __forceinline__ uint64_t member_bytes(uint64_t mask, int group_shift) {
    const uint32_t half_queries = group_shift > 3 ? 1u : (1u << (8 >> group_shift)) - 1;
    uint32_t words[2] = {};
#pragma unroll 1
    for (int half = 0; half < 2 * kConsumerWarps; ++half) {
        const uint32_t queries =
            static_cast<uint32_t>(mask >> (head_row_of(8 * half) >> group_shift)) & half_queries;
        (half < kConsumerWarps ? words[0] : words[1]) |= queries << 8 * (half % kConsumerWarps);
    }
    return uint64_t{words[1]} << 32 | words[0];
}

// V^T of a page, and below it 8 rows of 1.0 in e4m3: columns of PV that are the row sums of P.
struct ValueSlot {
    uint8_t page[kPageBytes];
    uint32_t ones[8 * kPageSize / 4];
};

template <bool kIsSplit>
constexpr int kValueStages = kIsSplit ? 2 : 3;

template <bool kIsSplit>
struct SharedMemory {
    uint8_t keys[kStages][kPageBytes];
    ValueSlot values[kValueStages<kIsSplit>];
    uint8_t q[kIsSplit ? 2 : 1][kQBytes];  // split: high parts, then low parts
    int32_t positions[kTileRows];          // of each row's query; -1 where the tile has none
    PageMeta meta[kStages];
    uint64_t full_key[kStages], empty_key[kStages];
    uint64_t full_value[kValueStages<kIsSplit>], empty_value[kValueStages<kIsSplit>];
};
static_assert(kCtasPerSm * (sizeof(SharedMemory<true>) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");

using KeyRing = RingPosition<kStages>;
template <bool kIsSplit>
using ValueRing = RingPosition<kValueStages<kIsSplit>>;

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

// Copies K (kIsKey) or V^T of every page that the tile's queries selected, ascending; in a cluster this CTA's
// half of every page of the union, to both.
template <bool kIsCluster, bool kIsKey, bool kIsSplit>
__device__ void produce(const UnionParams& p, const CUtensorMap& key_map, SharedMemory<kIsSplit>& shared,
                        const Tile& tile) {
    const int lane = threadIdx.x % 32;
    const int count = p.union_counts[tile.unit];
    const int32_t* pages = p.union_pages + tile.unit * p.max_union;
    const uint32_t* masks = p.union_masks + tile.unit * p.max_union * p.mask_words;
    const int32_t* sources =
        kIsKey ? p.page_table + tile.request * p.page_table_stride
               : p.packed_slots + (int64_t{tile.head} * p.batch_size + tile.request) * p.max_pages;
    std::conditional_t<kIsKey, KeyRing, ValueRing<kIsSplit>> ring;
    for (int base = 0; base < count; base += 32) {
        const int place = base + lane;
        int page = 0, source = 0;
        uint64_t members = 0;
        if (place < count) {
            page = pages[place];
            members = tile_mask(masks + int64_t{place} * p.mask_words, tile.index, p.queries_per_tile);
            if constexpr (kIsKey) members = member_bytes(members, p.group_shift);
            source = sources[page];
        }
        for (uint32_t wanted = __ballot_sync(kAllLanes, kIsCluster ? place < count : members != 0); wanted;
             wanted &= wanted - 1) {
            // The lane that holds the entry issues its copy.
            if (lane == __ffs(wanted) - 1) {
                const int s = ring.stage;
                const uint32_t full = smem_address(kIsKey ? &shared.full_key[s] : &shared.full_value[s]);
                const uint32_t empty = smem_address(kIsKey ? &shared.empty_key[s] : &shared.empty_value[s]);
                if constexpr (kIsCluster)
                    mbarrier_wait_cluster(empty, ring.phase ^ 1);
                else
                    mbarrier_wait(empty, ring.phase ^ 1);
                if constexpr (kIsKey) {
                    shared.meta[s].members = members;
                    shared.meta[s].start = page * kPageSize;
                }
                mbarrier_arrive_expect_tx(full, kPageBytes);
                const int half = kIsCluster ? tile.index : 0;  // a tile's place in its group is its rank
                const uint32_t target =
                    smem_address(kIsKey ? shared.keys[s] : shared.values[s].page) + half * (kPageBytes / 2);
                const uint8_t* from =
                    p.packed_v + int64_t{source} * kPackedPageBytes + half * (kPageBytes / 2);
                if constexpr (kIsCluster && kIsKey)
                    cp_async_bulk_tensor_multicast(target, &key_map, full, 3, 0, half * (kPageSize / 2),
                                                   tile.head, source);
                else if constexpr (kIsCluster)
                    cp_async_bulk_multicast(target, from, kPageBytes / 2, full, 3);
                else if constexpr (kIsKey)
                    cp_async_bulk_tensor(target, &key_map, full, 0, 0, tile.head, source);
                else
                    cp_async_bulk(target, from, kPageBytes, full);
            }
            __syncwarp();
            ring.advance();
        }
    }
}

}  // namespace pageweaver
