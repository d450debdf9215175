// Producer of page union, FP8: every unit of work gathers the queries that selected its page, or both pages
// of its pair, and writes a normalised partial output and its LSE for each.
// One kernel for units of pairs, then one for single pages, whose CTAs start as the other's end.
//
// Grid: two CTAs an SM for the whole launch; a CTA takes the next unit, the largest first, until there is
// none.
//
// Threads: 256. Warp 0 of warpgroup 0 copies K and V^T of the units' pages. Warpgroup 1 consumes: it holds a
// tile of 64 head-rows, all of them of members, and its warp w rows 16 w to 16 w + 15.
//
// Shared memory, 97 KiB: pages 3 x (K 16 KiB, V^T 16 KiB), ones 1 KiB, what the units are, barriers. A unit
// keeps its one or two pages through all of its tiles, at most kUnitTiles; the next page comes meanwhile.
//
// Registers: 32 producing, 224 consuming (scores 64 a page, output 64, probabilities 16 a page, Q 16).
//
// A tile of a pair, beside the same of another CTA on the SM:
//
//   tensor cores     QK(t) b  | PV(t)     | QK(t+1) a     | QK(t+1) b ...
//   everything else  max a    | max b, exp, pack; Q(t+1) arrives | normalise, store(t)
//
// One maximum covers both pages, so nothing is ever rescaled. Rows past the unit's last member repeat it and
// are not stored. Measurements: docs/page_union.md.

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

constexpr int kStages = 3;
constexpr int kThreads = 256, kCtasPerSm = 2;
constexpr int kProducerRegisters = 32, kConsumerRegisters = 224;
constexpr int kConsumerWarps = 4;
constexpr int kPageBytes = kPageSize * kHeadDim, kOnesBytes = 8 * 128;
constexpr uint32_t kE4m3Ones = 0x38383838u;
constexpr float kPScaleLog2 = 8.0f;     // as in common/arithmetic.py
constexpr float kLargeLogit = 8192.0f;  // base 2; above, FP32 rounds a logit by 2^-11 and more

// What a slot holds: a page, and with the first page of a unit what the unit is.
struct Unit {
    int32_t page;
    int32_t head, first, members;  // in the head's unit_queries; no members: no more units
    int32_t shift;                 // position of a row in its request: row + shift
};

struct SharedMemory {
    uint8_t keys[kStages][kPageBytes];
    uint8_t values[kStages][kPageBytes];
    uint32_t ones[kOnesBytes / 4];  // 8 rows of 1.0 in e4m3
    Unit units[kStages];
    uint64_t full[kStages], empty[kStages];
};
static_assert(kCtasPerSm * (sizeof(SharedMemory) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");

using Ring = RingPosition<kStages>;

// Copies the pages of one unit after the other. By one thread.
template <int kPages>
__device__ void load_units(const PageUnionParams& p, const CUtensorMap& key_map, SharedMemory& shared) {
    const auto first_unit = [&](int head) { return kPages == 2 ? 0 : p.unit_counts[2 * head]; };
    const auto unit_end = [&](int head) { return p.unit_counts[2 * head + 2 - kPages]; };
    int most_units = 0;
    for (int head = 0; head < p.num_kv_heads; ++head)
        most_units = max(most_units, unit_end(head) - first_unit(head));
    Ring ring;
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

using Fragment = uint32_t[4];

// Registers of the k-th 32 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[16], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// The consumer warpgroup on one unit of kPages pages; the ring stands at the first one.
template <int kPages>
__device__ __forceinline__ void consume(const PageUnionParams& p, SharedMemory& shared, const Unit& unit,
                                        Ring& ring) {
    const int warp = threadIdx.x / 32 % kConsumerWarps, lane = threadIdx.x % 32;
    const int quad = lane % 4, row0 = 16 * warp + lane / 4;
    const int group_mask = (1 << p.group_shift) - 1;
    const int queries_per_tile = kTileRows >> p.group_shift;
    const int tiles = (unit.members + queries_per_tile - 1) / queries_per_tile;
    const int member0 = row0 >> p.group_shift, member1 = (row0 + 8) >> p.group_shift;
    const int sub0 = row0 & group_mask, sub1 = (row0 + 8) & group_mask;
    const int64_t first = int64_t{unit.head} * p.total_q * p.topk + unit.first;

    int stages[kPages];
    Ring last = ring;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
        if (i > 0) last.advance();
        stages[i] = last.stage;
    }

    // Members of the next tile, query << 5 | slot; then their Q and logit factors.
    int next0, next1;
    const auto ask_members = [&](int tile) {
        const auto ask = [&](int member) {
            const int64_t at = first + min(tile * queries_per_tile + member, unit.members - 1);
            return __ldg(p.unit_queries + at) << 5 | __ldg(p.unit_slots + at);
        };
        next0 = ask(member0);
        next1 = ask(member1);
    };
    uint32_t q_fragments[16];
    float next_factor0, next_factor1;
    const auto ask_queries = [&] {
        const auto ask = [&](int next, int sub, int half, float& factor) {
            const int64_t row = ((int64_t{unit.head} * p.total_q + (next >> 5)) << p.group_shift) + sub;
            const uint4* source = reinterpret_cast<const uint4*>(p.packed_q + row * kHeadDim + 32 * quad);
            const uint4 low = __ldg(source), high = __ldg(source + 1);
            const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int k = 0; k < 8; ++k) q_fragments[2 * k + half] = words[k];
            factor = __ldg(p.logit_factors + row);
        };
        ask(next0, sub0, 0, next_factor0);
        ask(next1, sub1, 1, next_factor1);
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
        const uint64_t ones = wgmma_descriptor(smem_address(shared.ones));
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

    // Starts on the rows asked for, whose scores are on their way, and asks who comes after them. The last
    // member stands for those past it, in the tile after the last too.
    const auto begin_tile = [&](int tile) {
        mine0 = next0, mine1 = next1;
        ask_members(tile + 1);
        factor0 = next_factor0, factor1 = next_factor1;
        top0 = top1 = -INFINITY;
        if constexpr (kPages == 2) {
            issue_qk(1);
            wgmma_wait_group<1>();
            raise_maxima(0);
        }
    };
    // Scores to probabilities; the rows of the next tile are asked for meanwhile.
    const auto softmax = [&] {
        wgmma_wait_group<0>();
        fence_registers(scores[kPages - 1]);
        raise_maxima(kPages - 1);
        ask_queries();
        exponentiate();
    };
    const auto store_row = [&](int tile, int member, int mine, int sub, float total, float top, float factor,
                               int offset) {
        if (tile * queries_per_tile + member >= unit.members) return;
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
        store_row(tile, member0, mine0, sub0, sums[0], top0, factor0, 0);
        store_row(tile, member1, mine1, sub1, sums[2], top1, factor1, 2);
    };

    ask_members(0);
    ask_queries();
    issue_qk(0);
    if constexpr (kPages == 2) mbarrier_wait(smem_address(&shared.full[last.stage]), last.phase);
    begin_tile(0);
    for (int tile = 0; tile < tiles - 1; ++tile) {
        softmax();
        issue_pv();
        issue_qk(0);
        wgmma_wait_group<1>();
        store_tile(tile);
        begin_tile(tile + 1);
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
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(raw_shared);

    // Barriers
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(smem_address(&shared.full[s]), 1);
            mbarrier_init(smem_address(&shared.empty[s]), kConsumerWarps);
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
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        Ring ring;
        for (;;) {
            mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase);
            const Unit& unit = shared.units[ring.stage];
            if (unit.members == 0) break;
            consume<kPages>(p, shared, unit, ring);
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
                             static_cast<int>(sizeof(SharedMemory)));
    if (error != cudaSuccess) return error;
    return launch_dependent(produce_partials<kPages>, 1, int64_t{kCtasPerSm} * multiprocessors, kThreads,
                            sizeof(SharedMemory), stream, p, key_map);
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
