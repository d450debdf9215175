// Producer of page union: its shared memory, and the warps that fill it with pages and queries.
#pragma once

#include "page_union/page_union.hpp"
#include "primitives/bulk_copy.cuh"
#include "primitives/mbarrier.cuh"
#include "union_attention/tile.cuh"

namespace pageweaver {

constexpr int kCtasPerSm = 2;
constexpr int kConsumerWarps = 4;
constexpr int kPageBytes = kPageSize * kHeadDim;

// What a slot holds: a page, and with the first page of a unit what the unit is.
struct Unit {
    int32_t page;
    int32_t head, first, members;  // in the head's unit_queries; no members: no more units
    int32_t shift;                 // position of a row in its request: row + shift
};

template <int kUnitPages, bool kIsSplit_>
struct SharedMemory {
    static constexpr int kPages = kUnitPages;
    static constexpr bool kIsSplit = kIsSplit_;
    static constexpr int kRowBytes = kQueryRowBytes<kIsSplit>, kTileBytes = kTileRows * kRowBytes;
    // What fits beside another CTA. Tiles of two parts leave no room for a third page.
    static constexpr int kSlots = kIsSplit ? 2 : kPages + 1;
    static constexpr int kTiles = kIsSplit ? 2 : kPages == 2 ? 1 : 4;
    static constexpr int kSumColumns = kIsSplit ? 16 : 8;
    using PageRing = RingPosition<kSlots>;
    using TileRing = RingPosition<kTiles>;

    uint8_t keys[kSlots][kPageBytes];
    uint8_t values[kSlots][kPageBytes];
    uint8_t queries[kTiles][kTileBytes];
    uint32_t ones[kSumColumns * 32 / 4];  // rows of 1.0 in e4m3, or (split, row_sums.cuh) of 1.0 and 0
    // query << 5 | slot. They are read after the tile's place was given back, before the next tile's is: two
    // turns of the ring.
    int32_t members[2][kTiles][kTileRows];
    Unit units[kSlots];
    uint64_t full[kSlots], empty[kSlots];
    uint64_t full_tile[kTiles], empty_tile[kTiles];
};
template <int kPages, bool kIsSplit>
constexpr bool kFitsTwice =
    kCtasPerSm * (sizeof(SharedMemory<kPages, kIsSplit>) + 1024) <= 228 * 1024;  // on an SM
static_assert(kFitsTwice<1, false> && kFitsTwice<2, false> && kFitsTwice<1, true> && kFitsTwice<2, true>);

// Copies the pages of one unit after the other. By one thread.
template <typename Shared>
__device__ void load_units(const PageUnionParams& p, const CUtensorMap& key_map, Shared& shared) {
    constexpr int kPages = Shared::kPages;
    // Pairs, or single pages of this launch's round.
    const int part = kPages == 2 ? 0 : 1 + p.round;
    const auto unit_end = [&](int head) { return p.unit_counts[part * p.num_kv_heads + head]; };
    const auto first_unit = [&](int head) {
        return kPages == 2 ? 0 : p.unit_counts[p.round * p.num_kv_heads + head];
    };
    int most_units = 0;
    for (int head = 0; head < p.num_kv_heads; ++head)
        most_units = max(most_units, unit_end(head) - first_unit(head));
    typename Shared::PageRing ring;
    const auto wait_empty = [&] { mbarrier_wait(smem_address(&shared.empty[ring.stage]), ring.phase ^ 1); };
    for (;;) {
        // Heads take turns, so that the largest units of all come first.
        const uint32_t ticket = atomicAdd(&p.unit_tickets[part], 1u);
        const int turn = static_cast<int>(ticket / p.num_kv_heads),
                  head = static_cast<int>(ticket % p.num_kv_heads);
        if (turn >= most_units) break;
        const int index = first_unit(head) + turn;
        if (index >= unit_end(head)) continue;
        const int64_t place = int64_t{head} * p.max_units + index;
        const int request = p.unit_requests[place];
        const int32_t* const table = p.page_table + request * p.page_table_stride;
        const int32_t* const slots = (kPages == 2 ? p.pair_slots : p.packed_slots) +
                                     (int64_t{head} * p.batch_size + request) * p.max_pages;
#pragma unroll 1
        for (int i = 0; i < kPages; ++i) {
            const int page = p.unit_pages[2 * place + i], physical = table[page], packed = slots[page];
            wait_empty();
            if (i == 0) {
                const int32_t* const offsets = p.unit_offsets + place + head;
                Unit& unit = shared.units[ring.stage];
                unit.head = head;
                unit.first = offsets[0];
                unit.members = offsets[1] - offsets[0];
                unit.shift = p.seqused_k[request] - p.cu_seqlens_q[request + 1];
            }
            shared.units[ring.stage].page = page;
            const uint32_t full = smem_address(&shared.full[ring.stage]);
            mbarrier_arrive_expect_tx(full, 2 * kPageBytes);
            cp_async_bulk_tensor(smem_address(shared.keys[ring.stage]), &key_map, full, 0, 0, head, physical);
            cp_async_bulk(smem_address(shared.values[ring.stage]),
                          p.packed_v + int64_t{packed} * kPackedPageBytes, kPageBytes, full);
            ring.advance();
        }
    }
    wait_empty();
    shared.units[ring.stage].members = 0;
    mbarrier_arrive(smem_address(&shared.full[ring.stage]));
}

// Gathers the queries of one tile after the other. By a warp. Rows past a unit's last member repeat it.
template <typename Shared>
__device__ void gather_queries(const PageUnionParams& p, Shared& shared) {
    const int lane = threadIdx.x % kWarp, queries_per_tile = kTileRows >> p.group_shift;
    const uint32_t member_bytes = static_cast<uint32_t>(Shared::kRowBytes) << p.group_shift;
    typename Shared::PageRing ring;
    typename Shared::TileRing tiles;
    const auto release_page = [&] {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&shared.empty[ring.stage]));
        ring.advance();
    };
    for (;;) {
        mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase);
        const int members = shared.units[ring.stage].members;
        if (members == 0) break;
        const int64_t rows = int64_t{shared.units[ring.stage].head} * p.total_q;
        const int64_t first = rows * p.topk + shared.units[ring.stage].first;
        const int32_t* const queries = p.unit_queries + first;
        const int32_t* const slots = p.unit_slots + first;
        const uint8_t* const packed_q = p.packed_q + rows * member_bytes;
        release_page();
        // A lane's members of the next tile: two of them where a member is one row.
        int next[2];
        const auto ask_members = [&](int tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = min(tile * queries_per_tile + lane + kWarp * i, members - 1);
                next[i] = __ldg(queries + at) << 5 | __ldg(slots + at);
            }
        };
        ask_members(0);
        for (int tile = 0; tile * queries_per_tile < members; ++tile) {
            const uint32_t full = smem_address(&shared.full_tile[tiles.stage]);
            mbarrier_wait(smem_address(&shared.empty_tile[tiles.stage]), tiles.phase ^ 1);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (lane + kWarp * i < queries_per_tile)
                    shared.members[tiles.phase][tiles.stage][lane + kWarp * i] = next[i];
            __syncwarp();
            if (lane == 0) mbarrier_arrive_expect_tx(full, Shared::kTileBytes);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int member = lane + kWarp * i;
                if (member < queries_per_tile)
                    cp_async_bulk(smem_address(shared.queries[tiles.stage]) + member * member_bytes,
                                  packed_q + int64_t{next[i] >> 5} * member_bytes, member_bytes, full);
            }
            tiles.advance();
            ask_members(tile + 1);
        }
        if constexpr (Shared::kPages == 2) {
            mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase);
            release_page();
        }
    }
}

}  // namespace pageweaver
