// Producer of page union, FP8: every unit of work gathers the queries that selected its page, or both pages
// of its pair, and writes a normalised partial output and its LSE for each.
// One kernel for units of pairs, then one for single pages, whose CTAs start as the other's end.
//
// Grid: two CTAs an SM for the whole launch; a CTA takes the next unit, the largest first, until there is
// none.
//
// Threads: 256. Warpgroup 0 produces: warp 0 copies K and V^T of the units' pages, warp 1 gathers the queries
// of one tile after the other. Warpgroup 1 consumes: it holds a tile of 64 head-rows, all of them of members,
// and its warp w rows 16 w to 16 w + 15.
//
// Shared memory of pairs / single pages, 105 / 100 KiB: pages (K 16 KiB, V^T 16 KiB) 3 / 2, tiles of queries
// (9 KiB) 1 / 4, ones, what the units and tiles are, barriers. A unit keeps its one or two pages through all
// of its tiles, at most kUnitTiles; the next page comes meanwhile. Fragments of a tile's queries go to
// registers at once, so that its place is free for another tile while it is multiplied.
//
// Registers: 32 producing, 224 consuming (scores 64 a page, output 64, probabilities 16 a page, Q 16).
//
// Tile t of a pair, beside a tile of another CTA on the SM (a single page has no b):
//
//   tensor cores     QK(t) b |                  | PV(t), QK(t+1) a    | QK(t+1) b
//   everything else  max a   | max b, exp, pack | normalise, store(t) | max a
//
// One maximum covers both pages, so nothing is ever rescaled. Rows past the unit's last member are not
// stored. Measurements: docs/page_union.md.

#include <cuda_bf16.h>

#include "page_union/page_union.hpp"
#include "primitives/bulk_copy.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/tile.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256, kCtasPerSm = 2;
constexpr int kProducerRegisters = 32, kConsumerRegisters = 224;
constexpr int kConsumerWarps = 4;
constexpr int kPageBytes = kPageSize * kHeadDim, kOnesBytes = 8 * 32;
constexpr int kTileBytes = kTileRows * kQueryRowBytes;
constexpr uint32_t kE4m3Ones = 0x38383838u;
constexpr float kPScaleLog2 = 8.0f;     // as in common/arithmetic.py
constexpr float kLargeLogit = 8192.0f;  // base 2; above, FP32 rounds a logit by 2^-11 and more

// What a slot holds: a page, and with the first page of a unit what the unit is.
struct Unit {
    int32_t page;
    int32_t head, first, members;  // in the head's unit_queries; no members: no more units
    int32_t shift;                 // position of a row in its request: row + shift
};

template <int kPages>
constexpr int kSlots = kPages + 1;
template <int kPages>
constexpr int kTiles = kPages == 2 ? 1 : 4;

template <int kPages>
struct SharedMemory {
    uint8_t keys[kSlots<kPages>][kPageBytes];
    uint8_t values[kSlots<kPages>][kPageBytes];
    uint8_t queries[kTiles<kPages>][kTileBytes];
    uint32_t ones[kOnesBytes / 4];               // 8 rows of 1.0 in e4m3
    int32_t members[kTiles<kPages>][kTileRows];  // query << 5 | slot
    Unit units[kSlots<kPages>];
    uint64_t full[kSlots<kPages>], empty[kSlots<kPages>];
    uint64_t full_tile[kTiles<kPages>], empty_tile[kTiles<kPages>];
};
static_assert(kCtasPerSm * (sizeof(SharedMemory<1>) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");
static_assert(kCtasPerSm * (sizeof(SharedMemory<2>) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");

template <int kPages>
using PageRing = RingPosition<kSlots<kPages>>;
template <int kPages>
using TileRing = RingPosition<kTiles<kPages>>;

// Copies the pages of one unit after the other. By one thread.
template <int kPages>
__device__ void load_units(const PageUnionParams& p, const CUtensorMap& key_map,
                           SharedMemory<kPages>& shared) {
    const auto first_unit = [&](int head) { return kPages == 2 ? 0 : p.unit_counts[2 * head]; };
    const auto unit_end = [&](int head) { return p.unit_counts[2 * head + 2 - kPages]; };
    int most_units = 0;
    for (int head = 0; head < p.num_kv_heads; ++head)
        most_units = max(most_units, unit_end(head) - first_unit(head));
    PageRing<kPages> ring;
    const auto wait_empty = [&] { mbarrier_wait(smem_address(&shared.empty[ring.stage]), ring.phase ^ 1); };
    for (;;) {
        // Heads take turns, so that the largest units of all come first.
        const uint32_t ticket = atomicAdd(&p.unit_tickets[2 - kPages], 1u);
        const int turn = static_cast<int>(ticket / p.num_kv_heads),
                  head = static_cast<int>(ticket % p.num_kv_heads);
        if (turn >= most_units) break;
        const int index = first_unit(head) + turn;
        if (index >= unit_end(head)) continue;
        const int64_t place = int64_t{head} * p.max_units + index;
        const int request = p.unit_requests[place];
        const int32_t* const table = p.page_table + request * p.page_table_stride;
        const int32_t* const slots = p.packed_slots + (int64_t{head} * p.batch_size + request) * p.max_pages;
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
template <int kPages>
__device__ void gather_queries(const PageUnionParams& p, SharedMemory<kPages>& shared) {
    const int lane = threadIdx.x % kWarp, queries_per_tile = kTileRows >> p.group_shift;
    const uint32_t member_bytes = static_cast<uint32_t>(kQueryRowBytes) << p.group_shift;
    PageRing<kPages> ring;
    TileRing<kPages> tiles;
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
                    shared.members[tiles.stage][lane + kWarp * i] = next[i];
            __syncwarp();
            if (lane == 0) mbarrier_arrive_expect_tx(full, kTileBytes);
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
        if constexpr (kPages == 2) {
            mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase);
            release_page();
        }
    }
}

using Fragment = uint32_t[4];

// Registers of the k-th 32 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[16], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// The consumer warpgroup on one unit of kPages pages; the rings stand at its first page and tile.
template <int kPages>
__device__ __forceinline__ void consume(const PageUnionParams& p, SharedMemory<kPages>& shared,
                                        PageRing<kPages>& ring, TileRing<kPages>& tile_ring) {
    const int warp = threadIdx.x / kWarp % kConsumerWarps, lane = threadIdx.x % kWarp;
    const int quad = lane % 4, row0 = 16 * warp + lane / 4;
    const int queries_per_tile = kTileRows >> p.group_shift;
    const Unit& unit = shared.units[ring.stage];
    const int tiles = (unit.members + queries_per_tile - 1) / queries_per_tile;

    int stages[kPages];
    PageRing<kPages> last = ring;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
        if (i > 0) last.advance();
        stages[i] = last.stage;
    }

    // Q of the next tile as A fragments.
    uint32_t q_fragments[16];
    const auto take_queries = [&] {
        mbarrier_wait(smem_address(&shared.full_tile[tile_ring.stage]), tile_ring.phase);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4* source = reinterpret_cast<const uint4*>(
                shared.queries[tile_ring.stage] + (row0 + 8 * half) * kQueryRowBytes + 32 * quad);
            const uint4 low = source[0], high = source[1];
            const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int k = 0; k < 8; ++k) q_fragments[2 * k + half] = words[k];
        }
    };

    float scores[kPages][64], acc[64], sums[4];
    uint32_t probabilities[kPages][16];
    int mine0, mine1;
    float factor0, factor1, top0, top1;

    const auto issue_qk = [&](int i) {
        const uint64_t operand = wgmma_descriptor(smem_address(shared.keys[stages[i]]));
        discard_registers(scores[i]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 32; ++k)
            wgmma_m64n128k32_rs(scores[i], fragment(q_fragments, k), operand + 2 * k, k > 0);
        wgmma_commit_group();
    };
    // Row sums of the rounded probabilities are their product with a column of ones.
    const auto issue_pv = [&] {
        const uint64_t ones = wgmma_descriptor_plain(smem_address(shared.ones));
        discard_registers(sums);
        discard_registers(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kPages; ++i) {
            const uint64_t operand = wgmma_descriptor(smem_address(shared.values[stages[i]]));
#pragma unroll
            for (int k = 0; k < kPageSize / 32; ++k) {
                wgmma_m64n8k32_rs(sums, fragment(probabilities[i], k), ones, i + k > 0);
                wgmma_m64n128k32_rs(acc, fragment(probabilities[i], k), operand + 2 * k, i + k > 0);
            }
        }
        wgmma_commit_group();
    };

    // Masks a page's scores and raises the maxima of both rows.
    const auto raise_maxima = [&](int i) {
        fence_registers(scores[i]);
        // The last visible column of each row: none is below 0, for a selected page is visible.
        const int start = shared.units[stages[i]].page * kPageSize - unit.shift;
        const int limit0 = (mine0 >> 5) - start, limit1 = (mine1 >> 5) - start;
        if (__any_sync(kAllLanes, min(limit0, limit1) < kPageSize - 1)) {
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const int column = 8 * k + 2 * quad;
                if (column > limit0) scores[i][4 * k] = -INFINITY;
                if (column + 1 > limit0) scores[i][4 * k + 1] = -INFINITY;
                if (column > limit1) scores[i][4 * k + 2] = -INFINITY;
                if (column + 1 > limit1) scores[i][4 * k + 3] = -INFINITY;
            }
        }
        // Two chains a row keep the maximum's latency short.
        float high0 = scores[i][1], high1 = scores[i][3];
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            top0 = fmaxf(top0, scores[i][4 * k]);
            top1 = fmaxf(top1, scores[i][4 * k + 2]);
            if (k > 0) high0 = fmaxf(high0, scores[i][4 * k + 1]);
            if (k > 0) high1 = fmaxf(high1, scores[i][4 * k + 3]);
        }
        top0 = fmaxf(top0, high0);
        top1 = fmaxf(top1, high1);
    };
    const auto exponentiate = [&] {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            top0 = fmaxf(top0, __shfl_xor_sync(kAllLanes, top0, step));
            top1 = fmaxf(top1, __shfl_xor_sync(kAllLanes, top1, step));
        }
        // A row of NaN has no maximum: it must stay NaN.
        if (top0 == -INFINITY) top0 = 0.0f;
        if (top1 == -INFINITY) top1 = 0.0f;
        // Logits so large that a maximum's rounding shows in an exponential: subtract before multiplying.
        const bool large0 = fabsf(top0) * factor0 > kLargeLogit, large1 = fabsf(top1) * factor1 > kLargeLogit;
        if (__any_sync(kAllLanes, large0 || large1)) {
#pragma unroll
            for (int i = 0; i < kPages; ++i)
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    scores[i][4 * k] -= large0 ? top0 : 0.0f;
                    scores[i][4 * k + 1] -= large0 ? top0 : 0.0f;
                    scores[i][4 * k + 2] -= large1 ? top1 : 0.0f;
                    scores[i][4 * k + 3] -= large1 ? top1 : 0.0f;
                }
        }
        const float base0 = large0 ? kPScaleLog2 : fmaf(-top0, factor0, kPScaleLog2);
        const float base1 = large1 ? kPScaleLog2 : fmaf(-top1, factor1, kPScaleLog2);
#pragma unroll
        for (int i = 0; i < kPages; ++i)
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                float e[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    e[j] = ex2_approx(j % 4 < 2 ? fmaf(scores[i][8 * k + j], factor0, base0)
                                                : fmaf(scores[i][8 * k + j], factor1, base1));
                probabilities[i][2 * k] = cvt_e4m3x4(e[0], e[1], e[4], e[5]);
                probabilities[i][2 * k + 1] = cvt_e4m3x4(e[2], e[3], e[6], e[7]);
            }
    };

    // Starts on the tile whose queries were taken and whose scores are on their way: takes the members that
    // own this thread's two rows and their logit factors, and gives the tile's place back.
    const auto begin_tile = [&] {
        const auto take = [&](int row, int& mine, float& factor) {
            mine = shared.members[tile_ring.stage][row >> p.group_shift];
            factor = *reinterpret_cast<const float*>(shared.queries[tile_ring.stage] + row * kQueryRowBytes +
                                                     kHeadDim);
        };
        take(row0, mine0, factor0);
        take(row0 + 8, mine1, factor1);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&shared.empty_tile[tile_ring.stage]));
        tile_ring.advance();
        top0 = top1 = -INFINITY;
        if constexpr (kPages == 2) {
            issue_qk(1);
            wgmma_wait_group<1>();
            raise_maxima(0);
        }
    };
    const auto softmax = [&] {
        wgmma_wait_group<0>();
        fence_registers(scores[kPages - 1]);
        raise_maxima(kPages - 1);
        exponentiate();
    };
    const auto store_row = [&](int tile, int tile_row, int mine, float total, float top, float factor,
                               int offset) {
        if (tile * queries_per_tile + (tile_row >> p.group_shift) >= unit.members) return;
        const int sub = tile_row & ((1 << p.group_shift) - 1);
        const int64_t row =
            (((int64_t{unit.head} * p.total_q + (mine >> 5)) * p.topk + mine % 32) << p.group_shift) + sub;
        const float scale = 1.0f / total;
        uint4* target = static_cast<uint4*>(p.partials) + row * (kHeadDim / 8) + quad;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const __nv_bfloat162 pair = __floats2bfloat162_rn(acc[16 * g + 4 * j + offset] * scale,
                                                                  acc[16 * g + 4 * j + offset + 1] * scale);
                words[j] = *reinterpret_cast<const uint32_t*>(&pair);
            }
            __stcs(target + 4 * g, make_uint4(words[0], words[1], words[2], words[3]));
        }
        if (quad == 0) p.lse_partials[row] = (top * factor + log2f(total) - kPScaleLog2) * kLn2;
    };
    const auto store_tile = [&](int tile) {
        fence_registers(sums);
        fence_registers(acc);
        store_row(tile, row0, mine0, sums[0], top0, factor0, 0);
        store_row(tile, row0 + 8, mine1, sums[2], top1, factor1, 2);
    };

    take_queries();
    issue_qk(0);
    if constexpr (kPages == 2) mbarrier_wait(smem_address(&shared.full[last.stage]), last.phase);
    begin_tile();
    for (int tile = 0; tile < tiles - 1; ++tile) {
        softmax();
        issue_pv();
        take_queries();
        issue_qk(0);
        wgmma_wait_group<1>();
        store_tile(tile);
        begin_tile();
    }
    softmax();
    issue_pv();
    wgmma_wait_group<0>();
    store_tile(tiles - 1);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
        if (lane == 0) mbarrier_arrive(smem_address(&shared.empty[ring.stage]));
        ring.advance();
    }
}

template <int kPages>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    produce_partials(const PageUnionParams p, const __grid_constant__ CUtensorMap key_map) {
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    SharedMemory<kPages>& shared = *reinterpret_cast<SharedMemory<kPages>*>(raw_shared);

    // Barriers
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        for (int s = 0; s < kSlots<kPages>; ++s) {
            mbarrier_init(smem_address(&shared.full[s]), 1);
            mbarrier_init(smem_address(&shared.empty[s]), kConsumerWarps + 1);  // and the gathering warp
        }
        for (int s = 0; s < kTiles<kPages>; ++s) {
            mbarrier_init(smem_address(&shared.full_tile[s]), 1);
            mbarrier_init(smem_address(&shared.empty_tile[s]), kConsumerWarps);
        }
        fence_mbarrier_init();
    }
    for (int i = threadIdx.x; i < kOnesBytes / 4; i += kThreads) shared.ones[i] = kE4m3Ones;
    fence_proxy_async();
    __syncthreads();
    // Single pages read nothing that pairs write. Their kernel starts once every CTA of the other has begun,
    // so what that one waited for is there.
    const bool follows = kPages == 1 && p.has_pairs;
    if (!follows) grid_dependency_wait();
    if constexpr (kPages == 2) grid_dependency_launch();

    // Roles
    if (threadIdx.x < kThreads - 32 * kConsumerWarps) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) load_units<kPages>(p, key_map, shared);
        if (threadIdx.x / kWarp == 1) gather_queries<kPages>(p, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        PageRing<kPages> ring;
        TileRing<kPages> tile_ring;
        for (;;) {
            mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase);
            if (shared.units[ring.stage].members == 0) break;
            consume<kPages>(p, shared, ring, tile_ring);
        }
    }
    // Whoever waits for this kernel waits for both.
    if (follows) grid_dependency_wait();
}

template <int kPages>
cudaError_t launch_units(const PageUnionParams& p, const CUtensorMap& key_map, int multiprocessors,
                         cudaStream_t stream) {
    const cudaError_t error =
        cudaFuncSetAttribute(produce_partials<kPages>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(SharedMemory<kPages>)));
    if (error != cudaSuccess) return error;
    return launch_dependent(produce_partials<kPages>, 1, int64_t{kCtasPerSm} * multiprocessors, kThreads,
                            sizeof(SharedMemory<kPages>), stream, p, key_map);
}

}  // namespace

cudaError_t launch_quantize_queries(const PageUnionParams& params, cudaStream_t stream);

cudaError_t launch_page_partials(const PageUnionParams& p, const CUtensorMap& key_map, cudaStream_t stream) {
    const int64_t rows = int64_t{p.total_q} * p.num_qo_heads;
    if (rows == 0) return cudaSuccess;
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = launch_quantize_queries(p, stream);
    if (error == cudaSuccess && p.has_pairs) error = launch_units<2>(p, key_map, multiprocessors, stream);
    return error == cudaSuccess ? launch_units<1>(p, key_map, multiprocessors, stream) : error;
}

}  // namespace pageweaver
