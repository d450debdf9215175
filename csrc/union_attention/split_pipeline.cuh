// Union attention in split arithmetic: its shared memory, and the warps that fill it with pages.
#pragma once

#include <type_traits>

#include "union_attention/pages.cuh"

namespace pageweaver {

constexpr int kSplitStages = 3, kSplitValueStages = 2;
constexpr int kCtasPerSm = 2;
constexpr int kRawRowBytes = 2 * kHeadDim;

struct SplitMemory {
    uint8_t keys[kSplitStages][kPageBytes];
    ValueSlot values[kSplitValueStages];
    uint8_t q[2 * kQBytes];               // raw; then E4M3, low parts behind
    int32_t rows[kTileSlots][kTileRows];  // the query of each row, -1 where the tile has none
    Tile tiles[kTileSlots];               // of no unit: there are no more
    PageMeta meta[kSplitStages];
    uint64_t full_key[kSplitStages], empty_key[kSplitStages], full_value[kSplitValueStages],
        empty_value[kSplitValueStages];
    uint64_t full_tile[kTileSlots], empty_tile[kTileSlots], full_q, empty_q;
};
static_assert(kCtasPerSm * (sizeof(SplitMemory) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");

using KeyRing = RingPosition<kSplitStages>;
using ValueRing = RingPosition<kSplitValueStages>;

// Draws tiles, one ahead of those at work, and copies their queries as they are. By a warp.
template <bool kIsCluster>
__device__ void draw_tiles(const UnionParams& p, SplitMemory& shared) {
    const int lane = threadIdx.x % 32;
    TileRing ring;
    uint32_t q_phase = 0;
    for (int number = blockIdx.x;;) {
        const bool exists = number < tile_count(p);
        mbarrier_wait(smem_address(&shared.empty_tile[ring.stage]), ring.phase ^ 1);
        Tile& tile = shared.tiles[ring.stage];
        if (lane == 0) {
            if (exists)
                tile = tile_at(p, number);
            else
                tile.unit = -1;
        }
        __syncwarp();
        // In a cluster a tile without queries still copies its half of every page.
        const int live_rows = exists ? max(tile.live_queries, 0) << p.group_shift : 0;
        if (kIsCluster || !exists || live_rows > 0) {
            int queries[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int head_row = head_row_of(lane + 32 * i);
                queries[i] = head_row < live_rows
                                 ? static_cast<int>(query_of(p, tile, head_row >> p.group_shift))
                                 : -1;
                shared.rows[ring.stage][lane + 32 * i] = queries[i];
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_address(&shared.full_tile[ring.stage]));
            if (!exists) break;
            ring.advance();

            const uint32_t full = smem_address(&shared.full_q);
            mbarrier_wait(smem_address(&shared.empty_q), q_phase ^ 1);
            q_phase ^= 1;
            if (lane == 0) mbarrier_arrive_expect_tx(full, live_rows * kRawRowBytes);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = lane + 32 * i;
                if (queries[i] >= 0)
                    cp_async_bulk(smem_address(shared.q) + row * kRawRowBytes,
                                  query_row(p, tile, queries[i], row), kRawRowBytes, full);
            }
        }
        if constexpr (kIsCluster) {
            number = tile_count(p);
        } else {
            if (lane == 0) number = gridDim.x + atomicAdd(&p.counters[kTilesDrawn], 1);
            number = __shfl_sync(kAllLanes, number, 0);
        }
    }
    // The last CTA to find none leaves the counters as they were.
    if (!kIsCluster && lane == 0 && atomicAdd(&p.counters[kCtasDone], 1) == static_cast<int>(gridDim.x) - 1)
        p.counters[kTilesDrawn] = p.counters[kCtasDone] = 0;
}

// Copies K (kIsKey) or V^T of every page that a tile's queries selected, ascending; in a cluster this CTA's
// half of every page of the union, to both. By a warp.
template <bool kIsCluster, bool kIsKey, typename Ring>
__device__ void produce(const UnionParams& p, const CUtensorMap& key_map, SplitMemory& shared,
                        const Tile& tile, Ring& ring) {
    const int lane = threadIdx.x % 32;
    const int count = p.union_counts[tile.unit];
    for (int base = 0; base < count; base += 32) {
        const int place = base + lane;
        int page = 0, source = 0;
        uint64_t members = 0;
        if (place < count) {
            const int64_t entry = int64_t{tile.unit} * p.max_union + place;
            const int32_t* const sources =
                kIsKey ? p.page_table + tile.request * p.page_table_stride
                       : p.packed_slots + (int64_t{tile.head} * p.batch_size + tile.request) * p.max_pages;
            page = p.union_pages[entry];
            if constexpr (kIsKey || !kIsCluster)
                members = tile_mask(p.union_masks + entry * p.mask_words, tile.index, p.queries_per_tile);
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
                const uint32_t half = kIsCluster ? cluster_cta_rank() : 0;  // a tile's place in its group
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

// The same for all tiles that the CTA draws.
template <bool kIsCluster, bool kIsKey>
__device__ void produce_tiles(const UnionParams& p, const CUtensorMap& key_map, SplitMemory& shared) {
    std::conditional_t<kIsKey, KeyRing, ValueRing> ring;
    for (TileRing tiles;; tiles.advance()) {
        mbarrier_wait(smem_address(&shared.full_tile[tiles.stage]), tiles.phase);
        const Tile& tile = shared.tiles[tiles.stage];  // registers are few here
        if (tile.unit < 0) break;
        produce<kIsCluster, kIsKey>(p, key_map, shared, tile, ring);
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&shared.empty_tile[tiles.stage]));
    }
}

}  // namespace pageweaver
