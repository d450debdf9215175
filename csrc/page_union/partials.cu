// Producer of page union over FP8 caches: every unit of work gathers the queries that selected its page, or
// both pages of its pair, and writes a normalised partial output and its LSE for each. One kernel runs the
// units of pairs, then one those of single pages, whose CTAs start as the other's end.
//
// Grid: two CTAs an SM for the whole launch; a CTA takes the next unit, the largest first, until there is
// none.
//
// Threads: 256. Warpgroup 0 produces: warp 0 copies K and V^T of the units' pages, warp 1 gathers the queries
// of one tile after the other. Warpgroup 1 consumes: it holds a tile of 64 head-rows, all of them of members,
// and its warp w rows 16 w to 16 w + 15.
//
// Arithmetic: single E4M3 parts of Q and probabilities, or (kIsSplit) a high and a low part of both, whose
// products go into one accumulator, low parts first. An accumulator keeps 13 bits and truncates. Beside two
// parts that shows in an LSE, which takes the sum of fifteen short columns then; what normalises is one of
// ones, truncated as the output is.
//
// Shared memory of pairs / single pages / split, 106 / 102 / 100 KiB: pages (K 16 KiB, V^T 16 KiB) 3 / 2 / 2,
// tiles of queries (9 KiB, split 17) 1 / 4 / 2, ones, what the units and tiles are, barriers. A unit keeps
// its one or two pages through all of its tiles, at most kUnitTiles; the next page comes meanwhile. Fragments
// of a tile's queries go to registers at once, so that its place is free for another tile while it is
// multiplied.
//
// Registers: 32 producing, 224 consuming (scores 64 a page, output 64, probabilities 16 a page and part, Q 16
// a part).
//
// Tile t of a pair, beside a tile of another CTA on the SM (a single page has no b):
//
//   tensor cores     QK(t) b |                  | PV(t), QK(t+1) a    | QK(t+1) b
//   everything else  max a   | max b, exp, pack | normalise, store(t) | max a
//
// Split has no registers for QK beside PV: its steps follow one another, and the other CTA fills the gaps.
//
// Invariants: one maximum covers both pages, so nothing is ever rescaled. Rows past the unit's last member
// are not stored. Ordinary loads read what the copy engine wrote (Q and its factors) and will overwrite: a
// proxy fence stands between them and giving the place back. Measurements: docs/page_union.md.

#include <cuda_bf16.h>

#include "page_union/pipeline.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/row_sums.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
constexpr int kProducerRegisters = 32, kConsumerRegisters = 224;

using Fragment = uint32_t[4];

// Registers of the k-th 32 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[16], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// The consumer warpgroup on one unit; the rings stand at its first page and tile.
template <typename Shared>
__device__ __forceinline__ void consume(const PageUnionParams& p, Shared& shared,
                                        typename Shared::PageRing& ring,
                                        typename Shared::TileRing& tile_ring) {
    constexpr int kPages = Shared::kPages, kParts = Shared::kIsSplit ? 2 : 1;
    const int warp = threadIdx.x / kWarp % kConsumerWarps, lane = threadIdx.x % kWarp;
    const int quad = lane % 4, row0 = 16 * warp + lane / 4;
    const int queries_per_tile = kTileRows >> p.group_shift;
    const Unit& unit = shared.units[ring.stage];
    const int tiles = (unit.members + queries_per_tile - 1) / queries_per_tile;

    int stages[kPages];
    typename Shared::PageRing last = ring;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
        if (i > 0) last.advance();
        stages[i] = last.stage;
    }

    // Takes Q of the next tile as A fragments, and the logit factors of this thread's two rows.
    uint32_t q_fragments[kParts][16];  // high parts, then low parts
    float factor0, factor1;
    const auto take_queries = [&] {
        mbarrier_wait(smem_address(&shared.full_tile[tile_ring.stage]), tile_ring.phase);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4* source = reinterpret_cast<const uint4*>(shared.queries[tile_ring.stage] +
                                                                     (row0 + 8 * half) * Shared::kRowBytes +
                                                                     part * kHeadDim + 32 * quad);
                const uint4 first = source[0], second = source[1];
                const uint32_t words[8] = {first.x,  first.y,  first.z,  first.w,
                                           second.x, second.y, second.z, second.w};
#pragma unroll
                for (int k = 0; k < 8; ++k) q_fragments[part][2 * k + half] = words[k];
            }
        const auto factor = [&](int row) {
            return *reinterpret_cast<const float*>(shared.queries[tile_ring.stage] + row * Shared::kRowBytes +
                                                   kParts * kHeadDim);
        };
        factor0 = factor(row0);
        factor1 = factor(row0 + 8);
    };
    // Gives its place back. The copy engine writes there next: a fence orders these reads before it.
    const auto release_queries = [&] {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&shared.empty_tile[tile_ring.stage]));
    };

    float scores[kPages][64], acc[64], sums[Shared::kSumColumns / 2];
    uint32_t probabilities[kPages][kParts][16];
    int mine0, mine1;
    float top0, top1;

    const auto issue_qk = [&](int i) {
        const uint64_t operand = wgmma_descriptor(smem_address(shared.keys[stages[i]]));
        discard_registers(scores[i]);
        wgmma_fence();
        // Low parts first: what the accumulator truncates is then relative to them.
#pragma unroll
        for (int k = 0; k < kParts * kHeadDim / 32; ++k)
            wgmma_m64n128k32_rs(scores[i], fragment(q_fragments[kParts - 1 - k / 4], k % 4),
                                operand + 2 * (k % 4), k > 0);
        wgmma_commit_group();
    };
    // Row sums of the rounded probabilities are their product with columns of ones.
    const auto issue_pv = [&] {
        const uint64_t ones = wgmma_descriptor_plain(smem_address(shared.ones));
        discard_registers(sums);
        discard_registers(acc);
        wgmma_fence();
#pragma unroll
        for (int part = kParts - 1; part >= 0; --part)
#pragma unroll
            for (int i = 0; i < kPages; ++i) {
                const uint64_t operand = wgmma_descriptor(smem_address(shared.values[stages[i]]));
#pragma unroll
                for (int k = 0; k < kPageSize / 32; ++k) {
                    const Fragment& weights = fragment(probabilities[i][part], k);
                    const bool adds = part < kParts - 1 || i + k > 0;
                    if constexpr (kParts == 2)
                        wgmma_m64n16k32_rs(sums, weights, ones, adds);
                    else
                        wgmma_m64n8k32_rs(sums, weights, ones, adds);
                    wgmma_m64n128k32_rs(acc, weights, operand + 2 * k, adds);
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
                if constexpr (kParts == 2) {
                    float high[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        high[j] = round_to_e4m3(e[j]);
                        e[j] -= high[j];
                    }
                    probabilities[i][0][2 * k] = cvt_e4m3x4(high[0], high[1], high[4], high[5]);
                    probabilities[i][0][2 * k + 1] = cvt_e4m3x4(high[2], high[3], high[6], high[7]);
                }
                probabilities[i][kParts - 1][2 * k] = cvt_e4m3x4(e[0], e[1], e[4], e[5]);
                probabilities[i][kParts - 1][2 * k + 1] = cvt_e4m3x4(e[2], e[3], e[6], e[7]);
            }
    };

    // Starts on the tile whose queries were taken and whose scores are on their way: takes the members that
    // own this thread's two rows.
    const auto begin_tile = [&] {
        const int32_t* const members = shared.members[tile_ring.phase][tile_ring.stage];
        mine0 = members[row0 >> p.group_shift];
        mine1 = members[(row0 + 8) >> p.group_shift];
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
        // From here on the logits of the maxima: the factors of the next tile come.
        top0 *= factor0;
        top1 *= factor1;
    };
    // `lse_sum` is the sum that the LSE takes, in the lane that stores it.
    const auto store_row = [&](int tile, int tile_row, int mine, float normaliser, float lse_sum, float top,
                               int offset) {
        if (tile * queries_per_tile + (tile_row >> p.group_shift) >= unit.members) return;
        const int sub = tile_row & ((1 << p.group_shift) - 1);
        const int64_t row =
            (((int64_t{unit.head} * p.total_q + (mine >> 5)) * p.topk + mine % 32) << p.group_shift) + sub;
        const float scale = 1.0f / normaliser;
        uint4* target = static_cast<uint4*>(p.partials) + row * (kHeadDim / 8) + quad;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 16 * g + 4 * j + offset;
                const __nv_bfloat162 pair = __floats2bfloat162_rn(acc[at] * scale, acc[at + 1] * scale);
                words[j] = *reinterpret_cast<const uint32_t*>(&pair);
            }
            __stcs(target + 4 * g, make_uint4(words[0], words[1], words[2], words[3]));
        }
        if (quad == (kParts == 2 ? offset / 2 : 0))
            p.lse_partials[row] = (top + log2f(lse_sum) - kPScaleLog2) * kLn2;
    };
    const auto store_tile = [&](int tile) {
        fence_registers(sums);
        fence_registers(acc);
        if constexpr (kParts == 2) {
            const float lse_sum = row_sum(sums, quad);
            const float normaliser0 = row_normaliser(sums, 0), normaliser1 = row_normaliser(sums, 1);
            store_row(tile, row0, mine0, normaliser0, lse_sum, top0, 0);
            store_row(tile, row0 + 8, mine1, normaliser1, lse_sum, top1, 2);
        } else {
            store_row(tile, row0, mine0, sums[0], sums[0], top0, 0);
            store_row(tile, row0 + 8, mine1, sums[2], sums[2], top1, 2);
        }
    };

    const auto start_tile = [&] {
        take_queries();
        issue_qk(0);
        release_queries();
    };
    const auto wait_last_page = [&] {
        if constexpr (kPages == 2) mbarrier_wait(smem_address(&shared.full[last.stage]), last.phase);
    };
    if constexpr (Shared::kIsSplit) {
        // Two parts of Q and of probabilities have no room beside each other: the CTAs of an SM overlap.
        for (int tile = 0; tile < tiles; ++tile) {
            start_tile();
            wait_last_page();
            begin_tile();
            softmax();
            issue_pv();
            wgmma_wait_group<0>();
            store_tile(tile);
        }
    } else {
        start_tile();
        wait_last_page();
        begin_tile();
        for (int tile = 0; tile < tiles - 1; ++tile) {
            softmax();
            issue_pv();
            start_tile();
            wgmma_wait_group<1>();
            store_tile(tile);
            begin_tile();
        }
        softmax();
        issue_pv();
        wgmma_wait_group<0>();
        store_tile(tiles - 1);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
        if (lane == 0) mbarrier_arrive(smem_address(&shared.empty[ring.stage]));
        ring.advance();
    }
}

template <int kPages, bool kIsSplit>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    produce_partials(const PageUnionParams p, const __grid_constant__ CUtensorMap key_map) {
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    using Shared = SharedMemory<kPages, kIsSplit>;
    Shared& shared = *reinterpret_cast<Shared*>(raw_shared);

    // Barriers
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        for (int s = 0; s < Shared::kSlots; ++s) {
            mbarrier_init(smem_address(&shared.full[s]), 1);
            mbarrier_init(smem_address(&shared.empty[s]), kConsumerWarps + 1);  // and the gathering warp
        }
        for (int s = 0; s < Shared::kTiles; ++s) {
            mbarrier_init(smem_address(&shared.full_tile[s]), 1);
            mbarrier_init(smem_address(&shared.empty_tile[s]), kConsumerWarps);
        }
        fence_mbarrier_init();
    }
    // As wgmma_descriptor_plain has them, 32 tokens, the same for every 32 of a page.
    for (int i = threadIdx.x; i < Shared::kSumColumns * 32 / 4; i += kThreads) {
        const int column = i / 64 * 8 + i / 4 % 8, token = i / 32 % 2 * 16 + i % 4 * 4;
        shared.ones[i] = kIsSplit ? row_sum_ones<Shared::kSumColumns>(column, token) : kE4m3Ones;
    }
    fence_proxy_async();
    __syncthreads();
    // Single pages read nothing that pairs write. Their kernel starts once every CTA of the other has begun,
    // so what that one waited for is there.
    const bool follows = kPages == 1 && p.has_pairs && p.rounds == 1;
    if (!follows) grid_dependency_wait();
    if constexpr (kPages == 2) grid_dependency_launch();

    // Roles
    if (threadIdx.x < kThreads - 32 * kConsumerWarps) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) load_units(p, key_map, shared);
        if (threadIdx.x / kWarp == 1) gather_queries(p, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        typename Shared::PageRing ring;
        typename Shared::TileRing tile_ring;
        for (;;) {
            mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase);
            if (shared.units[ring.stage].members == 0) break;
            consume(p, shared, ring, tile_ring);
        }
    }
    // Whoever waits for this kernel waits for both.
    if (follows) grid_dependency_wait();
}

template <int kPages, bool kIsSplit>
cudaError_t launch_units(const PageUnionParams& p, const CUtensorMap& key_map, int multiprocessors,
                         cudaStream_t stream) {
    constexpr size_t kShared = sizeof(SharedMemory<kPages, kIsSplit>);
    auto* const kernel = produce_partials<kPages, kIsSplit>;
    if (const cudaError_t error = allow_shared_memory(kernel, kShared)) return error;
    return launch_dependent(kernel, 1, int64_t{kCtasPerSm} * multiprocessors, kThreads, kShared, stream, p,
                            key_map);
}

template <bool kIsSplit>
cudaError_t launch_all_units(PageUnionParams p, const CUtensorMap& key_map, PrepareParams values,
                             int multiprocessors, cudaStream_t stream) {
    const int64_t pages = int64_t{p.batch_size} * p.max_pages;
    const auto pack = [&](const int32_t* slots, PageRange range) {
        if (p.rounds == 1) return cudaSuccess;  // done in preparation
        values.packed_slots = const_cast<int32_t*>(slots);
        return launch_pack_values(values, 0, range, stream);
    };
    cudaError_t error = cudaSuccess;
    if (p.has_pairs) {
        error = pack(p.pair_slots, {0, pages});
        if (error == cudaSuccess) error = launch_units<2, kIsSplit>(p, key_map, multiprocessors, stream);
    }
    for (p.round = 0; error == cudaSuccess && p.rounds > p.round; ++p.round) {
        const int64_t first = int64_t{p.round} * p.round_pages;
        error = pack(p.packed_slots, {first, pages - first < p.round_pages ? pages - first : p.round_pages});
        if (error == cudaSuccess) error = launch_units<1, kIsSplit>(p, key_map, multiprocessors, stream);
    }
    return error;
}

}  // namespace

cudaError_t launch_quantize_queries(const PageUnionParams& params, cudaStream_t stream);

cudaError_t launch_page_partials(const PageUnionParams& p, const CUtensorMap& key_map,
                                 const PrepareParams& values, cudaStream_t stream) {
    const int64_t rows = int64_t{p.total_q} * p.num_qo_heads;
    if (rows == 0) return cudaSuccess;
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = launch_quantize_queries(p, stream);
    if (error != cudaSuccess) return error;
    return p.is_split ? launch_all_units<true>(p, key_map, values, multiprocessors, stream)
                      : launch_all_units<false>(p, key_map, values, multiprocessors, stream);
}

}  // namespace pageweaver
