// Union attention over FP8 caches: shared memory, and the warps that fill it with pages.
#pragma once

#include <cuda_bf16.h>

#include "union_attention/pages.cuh"

namespace pageweaver {

// How tiles meet CTAs. A worker is a warpgroup that computes, on tiles of its own.
enum class Layout {
    // Three to a CTA, one CTA an SM: they keep it busy where two wait for each other's products, and 152
    // registers a thread are what three leave each other.
    kWorkers,
    kAlone,    // one to a CTA, two CTAs an SM, for few tiles: PV of a page runs beside QK of the next
    kCluster,  // one to a CTA, two CTAs a cluster that shares the group's page stream by multicast
};
template <Layout kLayout>
constexpr int kWorkers = kLayout == Layout::kWorkers ? 3 : 1;

constexpr int kStages = 2;
using PageRing = RingPosition<kStages>;  // of keys and of values: both go from page to page

struct PageSlots {
    uint8_t keys[kStages][kPageBytes];
    ValueSlot values[kStages];
    uint8_t q[kQBytes];  // E4M3, with the swizzle
};

struct WorkerState {
    int32_t rows[kTileSlots][kTileRows];  // the query of each row, -1 where the tile has none
    Tile tiles[kTileSlots];               // of no unit: there are no more
    PageMeta meta[kStages];
    uint64_t full_key[kStages], empty_key[kStages], full_value[kStages], empty_value[kStages];
    uint64_t full_tile[kTileSlots], empty_tile[kTileSlots];
};

template <Layout kLayout>
struct SharedMemory {
    PageSlots slots[kWorkers<kLayout>];
    WorkerState states[kWorkers<kLayout>];
    alignas(128) uint8_t zeros[kHeadDim];  // a row of Q
};
static_assert(sizeof(SharedMemory<Layout::kWorkers>) <= 227 * 1024 &&
              sizeof(SharedMemory<Layout::kAlone>) <= 113 * 1024);

// Draws a tile that has queries, or (unit below 0) none: there are no more. Its rows are looked up, and their
// queries asked for. By a warp; `number` is the first tile to try, below 0 the next that nobody has.
template <Layout kLayout>
__device__ __forceinline__ void draw_tile(const UnionParams& p, int number, Tile& tile, int32_t* rows) {
    const int lane = threadIdx.x % kWarp;
    int live_rows = 0;
    for (;; number = -1) {
        if (number < 0) {
            if (lane == 0) number = kWorkers<kLayout> * gridDim.x + atomicAdd(&p.counters[kTilesDrawn], 1);
            number = __shfl_sync(kAllLanes, number, 0);
        }
        const bool exists = number < tile_count(p);
        if (lane == 0) {
            if (exists)
                tile = tile_at(p, number);
            else
                tile.unit = -1;
        }
        __syncwarp();
        if (!exists) return;
        live_rows = max(tile.live_queries, 0) << p.group_shift;
        // In a cluster a tile without queries still copies its half of every page.
        if (kLayout == Layout::kCluster || live_rows > 0) break;
    }
#pragma unroll 1
    for (int row = lane; row < kTileRows; row += kWarp) {
        const int head_row = head_row_of(row);
        int query = -1;
        if (head_row < live_rows) {
            query = static_cast<int>(query_of(p, tile, head_row >> p.group_shift));
            const __nv_bfloat16* const source = query_row(p, tile, query, row);
            asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(source + kHeadDim / 2));
        }
        rows[row] = query;
    }
}

// Draws tiles for all workers of the CTA, one ahead of those at work. By a warp.
template <Layout kLayout>
__device__ void draw_tiles(const UnionParams& p, SharedMemory<kLayout>& shared) {
    constexpr bool kIsCluster = kLayout == Layout::kCluster;
    constexpr int kCount = kWorkers<kLayout>;
    const int lane = threadIdx.x % kWarp;
    // A bit a worker: who may have more tiles, who had none yet, and the place in its ring of tiles.
    uint32_t running = (1u << kCount) - 1, is_new = running, stages = 0, phases = 0;
    while (running != 0) {
        bool has_drawn = false;
#pragma unroll 1
        for (int worker = 0; worker < kCount; ++worker) {
            const uint32_t bit = 1u << worker;
            const int stage = (stages & bit) != 0;
            WorkerState& state = shared.states[worker];
            if (!(running & bit)) continue;
            const bool is_free =
                mbarrier_test_wait(smem_address(&state.empty_tile[stage]), (phases & bit) == 0);
            if (!__all_sync(kAllLanes, is_free)) continue;
            int number = is_new & bit ? static_cast<int>(worker * gridDim.x + blockIdx.x) : -1;
            // A cluster has but one.
            if (kIsCluster && number < 0) number = tile_count(p);
            is_new &= ~bit;
            draw_tile<kLayout>(p, number, state.tiles[stage], state.rows[stage]);
            __syncwarp();
            if (state.tiles[stage].unit < 0) running &= ~bit;
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_address(&state.full_tile[stage]));
            if (stage == 1) phases ^= bit;
            stages ^= bit;
            has_drawn = true;
        }
        // Tiles last for tens of microseconds.
        if (!has_drawn) __nanosleep(1000);
    }
    // The last CTA to find none leaves the counters as they were.
    if (!kIsCluster && lane == 0 && atomicAdd(&p.counters[kCtasDone], 1) == static_cast<int>(gridDim.x) - 1)
        p.counters[kTilesDrawn] = p.counters[kCtasDone] = 0;
}

// Waits till those that compute have given a slot back. They hold its page for a microsecond.
template <bool kIsCluster>
__device__ __forceinline__ void wait_for_slot(uint64_t& empty, uint32_t phase) {
    if constexpr (kIsCluster)
        mbarrier_wait_cluster(smem_address(&empty), phase ^ 1);
    else
        mbarrier_wait_asleep(smem_address(&empty), phase ^ 1);
}

// Copies K and V^T of every page that a tile's queries selected, ascending; in a cluster this CTA's half of
// every page of the union, to both. By a warp.
template <bool kIsCluster>
__device__ void produce(const UnionParams& p, const CUtensorMap& key_map, PageSlots& slots,
                        WorkerState& state, const Tile& tile, PageRing& ring) {
    const int lane = threadIdx.x % kWarp;
    const int count = p.union_counts[tile.unit];
    for (int base = 0; base < count; base += kWarp) {
        const int place = base + lane;
        int page = 0, key_source = 0, value_source = 0;
        uint64_t members = 0;
        if (place < count) {
            const int64_t entry = int64_t{tile.unit} * p.max_union + place;
            page = p.union_pages[entry];
            members =
                member_bytes(tile_mask(p.union_masks + entry * p.mask_words, tile.index, p.queries_per_tile),
                             p.group_shift);
            key_source = p.page_table[tile.request * p.page_table_stride + page];
            value_source =
                p.packed_slots[(int64_t{tile.head} * p.batch_size + tile.request) * p.max_pages + page];
        }
        for (uint32_t wanted = __ballot_sync(kAllLanes, kIsCluster ? place < count : members != 0); wanted;
             wanted &= wanted - 1) {
            // The lane that holds the entry issues its copies.
            if (lane == __ffs(wanted) - 1) {
                const int s = ring.stage;
                const uint32_t half = kIsCluster ? cluster_cta_rank() : 0;  // a tile's place in its group
                wait_for_slot<kIsCluster>(state.empty_key[s], ring.phase);
                state.meta[s].members = members;
                state.meta[s].start = page * kPageSize;
                uint32_t full = smem_address(&state.full_key[s]);
                mbarrier_arrive_expect_tx(full, kPageBytes);
                uint32_t target = smem_address(slots.keys[s]) + half * (kPageBytes / 2);
                if constexpr (kIsCluster)
                    cp_async_bulk_tensor_multicast(target, &key_map, full, 3, 0, half * (kPageSize / 2),
                                                   tile.head, key_source);
                else
                    cp_async_bulk_tensor(target, &key_map, full, 0, 0, tile.head, key_source);

                wait_for_slot<kIsCluster>(state.empty_value[s], ring.phase);
                full = smem_address(&state.full_value[s]);
                mbarrier_arrive_expect_tx(full, kPageBytes);
                target = smem_address(slots.values[s].page) + half * (kPageBytes / 2);
                const uint8_t* const from =
                    p.packed_v + int64_t{value_source} * kPackedPageBytes + half * (kPageBytes / 2);
                if constexpr (kIsCluster)
                    cp_async_bulk_multicast(target, from, kPageBytes / 2, full, 3);
                else
                    cp_async_bulk(target, from, kPageBytes, full);
            }
            __syncwarp();
            ring.advance();
        }
    }
}

// The same for all tiles of a worker.
template <bool kIsCluster>
__device__ void produce_tiles(const UnionParams& p, const CUtensorMap& key_map, PageSlots& slots,
                              WorkerState& state) {
    PageRing ring;
    for (TileRing tiles;; tiles.advance()) {
        mbarrier_wait_asleep(smem_address(&state.full_tile[tiles.stage]), tiles.phase);
        const Tile& tile = state.tiles[tiles.stage];  // registers are few here
        if (tile.unit < 0) break;
        produce<kIsCluster>(p, key_map, slots, state, tile, ring);
        __syncwarp();
        if (threadIdx.x % kWarp == 0) mbarrier_arrive(smem_address(&state.empty_tile[tiles.stage]));
    }
}

}  // namespace pageweaver
