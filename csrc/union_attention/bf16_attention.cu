// Union attention, BF16: each 64-row tile of head-rows (4 queries x 16 heads) traverses the pages that any of
// its queries selected, in ascending order, with one online softmax a row. Semantics are those of
// union_attention.cu; here K, V, Q and the probabilities are BF16, and K and V are read as they lie
// in the cache.
//
// Grid: one CTA a tile, two resident on an SM, the largest unions first.
//
// Threads: 256. Warp 0 of warpgroup 0 copies K and V. Warpgroup 1 consumes: its warp w holds rows 16 w to
// 16 w + 15, which is one query at group size 16.
//
// Shared memory, 113 KiB: one ring of 7 x 16 KiB in the order of use, four slots a page: K columns 0 to 63,
// 64 to 127, V tokens 0 to 63, 64 to 127. Ones, positions, page metadata and barriers take 736 bytes.
//
// Registers: 32 producing, 224 consuming (output 64, scores 64, Q 32, probabilities 32).
//
// Pipeline, round j of the consumers; the other CTA of the SM has the tensor cores meanwhile:
//
//   tensor cores     PV(j-1) | QK(j) |
//   everything else                  | max S(j), exp, pack P(j), O *= a
//
// Invariants: full takes one arrival of the producer and the bytes of the slot; empty one arrival of each
// consumer warp, each for itself: an elected thread could release what a slower warp still reads. O stays in
// the accumulators: adding PV of probabilities that are all 0 changes no bit of it. V is zeroed from the
// request's length on before its product: a probability of 0 does not silence a NaN. Measurements behind each
// choice: docs/bf16_attention.md.

#include <cuda_bf16.h>

#include "prepare/device.cuh"
#include "primitives/bulk_copy.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/queries.cuh"
#include "union_attention/tile.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {
namespace {

constexpr int kSlots = 7;
constexpr int kThreads = 256, kCtasPerSm = 2, kWarpgroup = 128;
constexpr int kProducerRegisters = 32, kConsumerRegisters = 224;
constexpr int kConsumerWarps = 4;
constexpr int kSlotBytes = kPageSize * kHeadDim;  // half of a page of K or V
constexpr int kHalfColumns = kHeadDim / 2, kHalfTokens = kPageSize / 2;
constexpr uint32_t kBf16Ones = 0x3f803f80u;

struct alignas(16) PageMeta {
    uint64_t mask;  // queries of the tile that selected the page
    int32_t page;   // logical page
};

struct SharedMemory {
    uint8_t slots[kSlots][kSlotBytes];
    uint32_t ones[64];             // 8 rows of sixteen 1.0
    int32_t positions[kTileRows];  // of each row's query; -1 where the tile has none
    PageMeta meta[kSlots];         // of the page whose K begins in the slot
    uint64_t full[kSlots], empty[kSlots];
};
static_assert(kCtasPerSm * (sizeof(SharedMemory) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");

using Ring = RingPosition<kSlots>;

// Copies K and V of every page that the tile's queries selected, ascending.
__device__ void produce(const UnionParams& p, const CUtensorMap& key_map, const CUtensorMap& value_map,
                        SharedMemory& shared, const Tile& tile) {
    const int lane = threadIdx.x % 32;
    const int count = p.union_counts[tile.unit];
    const int64_t first = int64_t{tile.unit} * p.max_union;
    const int32_t* pages = p.union_pages + first;
    const uint32_t* masks = p.union_masks + first * p.mask_words;
    const int32_t* sources = p.page_table + tile.request * p.page_table_stride;
    Ring ring;
    for (int base = 0; base < count; base += 32) {
        const int place = base + lane;
        int page = 0, source = 0;
        uint64_t mask = 0;
        if (place < count) {
            page = pages[place];
            mask = tile_mask(masks + int64_t{place} * p.mask_words, tile.index, p.queries_per_tile);
            source = sources[page];
        }
        for (uint32_t wanted = __ballot_sync(kAllLanes, mask != 0); wanted; wanted &= wanted - 1) {
            const bool issues = lane == __ffs(wanted) - 1;  // the lane that holds the entry
#pragma unroll
            for (int slot = 0; slot < 4; ++slot) {
                if (issues) {
                    const uint32_t target = smem_address(shared.slots[ring.stage]);
                    const uint32_t full = smem_address(&shared.full[ring.stage]);
                    mbarrier_wait(smem_address(&shared.empty[ring.stage]), ring.phase ^ 1);
                    if (slot == 0) {
                        shared.meta[ring.stage].mask = mask;
                        shared.meta[ring.stage].page = page;
                    }
                    mbarrier_arrive_expect_tx(full, kSlotBytes);
                    const int half = slot % 2;
                    if (slot < 2)
                        cp_async_bulk_tensor(target, &key_map, full, 0, 0, half, tile.head, source);
                    else
                        cp_async_bulk_tensor(target, &value_map, full, 0, half * kHalfTokens, 0, tile.head,
                                             source);
                }
                ring.advance();
            }
            __syncwarp();
        }
    }
}

using Fragment = uint32_t[4];

// Registers of the k-th 16 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[32], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// Loads the head-rows `row` and `row` + 8 of a tile as A fragments, brought near 1 by a power of two a row so
// that products of a huge query stay finite. Returns the powers.
__device__ inline float2 load_queries(const UnionParams& p, const Tile& tile, int row,
                                      uint32_t (&fragments)[32]) {
    const int quad = threadIdx.x % 4;
    float powers[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int slot = (row + 8 * r) >> p.group_shift;
        float values[32] = {}, amax = 0.0f;
        if (slot < tile.live_queries) {
            const uint32_t* source = reinterpret_cast<const uint32_t*>(
                static_cast<const __nv_bfloat16*>(p.q) + query_of(p, tile, slot) * p.q_stride_row +
                qo_head_of(p, tile, row + 8 * r) * p.q_stride_head);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const uint32_t pair = __ldg(source + 4 * i + quad);
                values[2 * i] = __uint_as_float(pair << 16);
                values[2 * i + 1] = __uint_as_float(pair & 0xffff0000u);
            }
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fabsf(values[i]));
        amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 2));
        const int exponent = min(max(static_cast<int>(__float_as_uint(amax) >> 23) - 127, -126), 126);
        powers[r] = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
        const float inverse = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 16; ++i)
            fragments[i / 2 * 4 + i % 2 * 2 + r] =
                cvt_bf16x2(values[2 * i] * inverse, values[2 * i + 1] * inverse);
    }
    return make_float2(powers[0], powers[1]);
}

// The consumer warpgroup: the whole life of one tile.
__device__ void consume(const UnionParams& p, SharedMemory& shared, const Tile& tile) {
    const int warp = threadIdx.x / 32 % kConsumerWarps, lane = threadIdx.x % 32;
    const int quad = lane % 4, row_low = lane / 4;

    // Q as A fragments: it stays in registers for the whole tile and costs no shared-memory bandwidth.
    uint32_t q_fragments[32];
    const float2 powers = load_queries(p, tile, 16 * warp + row_low, q_fragments);
    const float unit_factor = unit_logit_factor(p);
    const float factor0 = logit_factor(unit_factor, powers.x), factor1 = logit_factor(unit_factor, powers.y);
    const int length = p.seqused_k[tile.request];
    int32_t* const positions = shared.positions + 16 * warp;  // read by this warp alone
    if (lane < 16) {
        const int slot = (16 * warp + lane) >> p.group_shift;
        positions[lane] = slot < tile.live_queries ? static_cast<int>(query_of(p, tile, slot)) + length -
                                                         p.cu_seqlens_q[tile.request + 1]
                                                   : -1;
    }
    __syncwarp();
    const int warp_slot = 16 * warp >> p.group_shift;
    const uint32_t all_members = (1u << (16 >> p.group_shift)) - 1;
    // Pages that end before the warp's lowest position need no mask.
    const int low_position = __reduce_min_sync(kAllLanes, positions[lane % 16]);

    float acc[64], scores[64], sums[4];
    uint32_t probabilities[32];
    float max0 = -INFINITY, max1 = -INFINITY;
    uint32_t members = 0;  // of this warp's queries, in the page at hand
    int page_start = 0;
    Ring ring, held;  // `held`: the first slot not yet given back

    const auto wait_full = [&] { mbarrier_wait(smem_address(&shared.full[ring.stage]), ring.phase); };
    // Gives two slots back. Every warp for itself: an elected one could release what a slower one still
    // reads.
    const auto release = [&] {
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (lane == 0) mbarrier_arrive(smem_address(&shared.empty[held.stage]));
            held.advance();
        }
    };

    // Scores of the page that begins at `ring`.
    const auto issue_qk = [&] {
        discard_registers(scores);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wait_full();
            if (half == 0) {
                const PageMeta& meta = shared.meta[ring.stage];
                members = static_cast<uint32_t>(meta.mask >> warp_slot) & all_members;
                page_start = meta.page * kPageSize;
            }
            wgmma_fence();
            const uint64_t operand = wgmma_descriptor(smem_address(shared.slots[ring.stage]));
#pragma unroll
            for (int k = 0; k < kHalfColumns / 16; ++k)
                wgmma_m64n128k16_rs(scores, fragment(q_fragments, half * 4 + k), operand + 2 * k,
                                    half + k > 0);
            ring.advance();
        }
        wgmma_commit_group();
    };

    // Zeroes V of the slots at `ring` from the request's length on.
    const auto zero_tail = [&] {
        Ring at = ring;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mbarrier_wait(smem_address(&shared.full[at.stage]), at.phase);
            uint4* const target = reinterpret_cast<uint4*>(shared.slots[at.stage]);
            const int first = max(length - page_start - half * kHalfTokens, 0);
            for (int i = first * 8 + threadIdx.x % kWarpgroup; i < kHalfTokens * 8; i += kWarpgroup)
                target[i] = target[i + kHalfTokens * 8] = make_uint4(0, 0, 0, 0);
            at.advance();
        }
        fence_proxy_async();
        named_barrier_sync(1, kWarpgroup);
    };

    // O += PV, and the row sums of the rounded probabilities along, as their product with a column of ones.
    const auto issue_pv = [&] {
        if (page_start + kPageSize > length) zero_tail();
        const uint64_t ones = wgmma_descriptor_plain(smem_address(shared.ones));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            wait_full();
            wgmma_fence();
            const uint64_t operand =
                wgmma_descriptor_mn(smem_address(shared.slots[ring.stage]), kSlotBytes / 2);
#pragma unroll
            for (int k = 0; k < kHalfTokens / 16; ++k) {
                wgmma_m64n8k16_rs(sums, fragment(probabilities, half * 4 + k), ones, 1);
                wgmma_m64n128k16_rs_mn(acc, fragment(probabilities, half * 4 + k), operand + 128 * k, 1);
            }
            ring.advance();
        }
        wgmma_commit_group();
    };

    // Scores to probabilities for one page, and O to the new maximum.
    const auto softmax = [&] {
        fence_registers(scores);
        if (!members) {
#pragma unroll
            for (int k = 0; k < 32; ++k) probabilities[k] = 0;
            return;
        }
        if (page_start + kPageSize - 1 > low_position || members != all_members) {
            // The last visible column of each row, -1 where the row's query is no member.
            const auto limit = [&](int row) {
                const bool selected = members >> (row >> p.group_shift) & 1;
                return selected ? positions[row] - page_start : -1;
            };
            const int limit0 = limit(row_low), limit1 = limit(row_low + 8);
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const int column = 8 * k + 2 * quad;
                if (column > limit0) scores[4 * k] = -INFINITY;
                if (column + 1 > limit0) scores[4 * k + 1] = -INFINITY;
                if (column > limit1) scores[4 * k + 2] = -INFINITY;
                if (column + 1 > limit1) scores[4 * k + 3] = -INFINITY;
            }
        }
        // Two chains a row keep the maximum's latency short.
        float high0 = fmaxf(max0, scores[0]), high1 = fmaxf(max1, scores[2]);
        float low0 = scores[1], low1 = scores[3];
#pragma unroll
        for (int k = 1; k < 16; ++k) {
            high0 = fmaxf(high0, scores[4 * k]);
            low0 = fmaxf(low0, scores[4 * k + 1]);
            high1 = fmaxf(high1, scores[4 * k + 2]);
            low1 = fmaxf(low1, scores[4 * k + 3]);
        }
        high0 = fmaxf(high0, low0);
        high1 = fmaxf(high1, low1);
        high0 = fmaxf(high0, __shfl_xor_sync(kAllLanes, high0, 1));
        high1 = fmaxf(high1, __shfl_xor_sync(kAllLanes, high1, 1));
        high0 = fmaxf(high0, __shfl_xor_sync(kAllLanes, high0, 2));
        high1 = fmaxf(high1, __shfl_xor_sync(kAllLanes, high1, 2));

        // A row that has seen nothing yet subtracts 0: -inf - -inf would be NaN.
        const float top0 = high0 == -INFINITY ? 0.0f : high0, top1 = high1 == -INFINITY ? 0.0f : high1;
        const bool moved = high0 != max0 || high1 != max1;
        const float rescale0 = ex2_approx((max0 - top0) * factor0);
        const float rescale1 = ex2_approx((max1 - top1) * factor1);
        max0 = high0;
        max1 = high1;
        // Logits so large that a maximum's rounding shows in an exponential: subtract before multiplying.
        const bool large0 = fabsf(top0) * factor0 > kLargeLogit, large1 = fabsf(top1) * factor1 > kLargeLogit;
        if (__any_sync(kAllLanes, large0 || large1)) {
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                scores[4 * k] -= large0 ? top0 : 0.0f;
                scores[4 * k + 1] -= large0 ? top0 : 0.0f;
                scores[4 * k + 2] -= large1 ? top1 : 0.0f;
                scores[4 * k + 3] -= large1 ? top1 : 0.0f;
            }
        }
        const float base0 = large0 ? 0.0f : -top0 * factor0, base1 = large1 ? 0.0f : -top1 * factor1;
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            probabilities[2 * k] = cvt_bf16x2(ex2_approx(fmaf(scores[4 * k], factor0, base0)),
                                              ex2_approx(fmaf(scores[4 * k + 1], factor0, base0)));
            probabilities[2 * k + 1] = cvt_bf16x2(ex2_approx(fmaf(scores[4 * k + 2], factor1, base1)),
                                                  ex2_approx(fmaf(scores[4 * k + 3], factor1, base1)));
        }
        // Where no maximum moved the factors are 1.
        if (__any_sync(kAllLanes, moved)) {
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                acc[4 * k] *= rescale0;
                acc[4 * k + 1] *= rescale0;
                acc[4 * k + 2] *= rescale1;
                acc[4 * k + 3] *= rescale1;
            }
            sums[0] *= rescale0;
            sums[2] *= rescale1;
        }
    };

    const int rounds = tile.rounds;
#pragma unroll
    for (int k = 0; k < 64; ++k) acc[k] = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[k] = 0.0f;
    if (rounds > 0) {
        issue_qk();
        wgmma_wait_group<0>();
        release();
        softmax();
        for (int j = 1; j < rounds; ++j) {
            issue_pv();
            issue_qk();
            wgmma_wait_group<1>();
            release();
            wgmma_wait_group<0>();
            release();
            fence_registers(acc);
            fence_registers(sums);
            softmax();
        }
        issue_pv();
        wgmma_wait_group<0>();
        fence_registers(acc);
        fence_registers(sums);
    }

    // Normalise and store to the original rows.
    const float v_scale = p.v_scale_pointer ? *p.v_scale_pointer : p.v_scale;
    const auto store_row = [&](int row, float total, float high, float factor, int offset) {
        const int slot = row >> p.group_shift;
        if (slot >= tile.live_queries) return;
        const int64_t query = query_of(p, tile, slot);
        const int64_t qo_head = qo_head_of(p, tile, row);
        const float scale = total == 0.0f ? 0.0f : v_scale / total;
        __nv_bfloat16* target = static_cast<__nv_bfloat16*>(p.out) + query * p.out_stride_row +
                                qo_head * p.out_stride_head + 2 * quad;
#pragma unroll
        for (int k = 0; k < 16; ++k)
            *reinterpret_cast<__nv_bfloat162*>(target + 8 * k) =
                __floats2bfloat162_rn(acc[4 * k + offset] * scale, acc[4 * k + offset + 1] * scale);
        if (p.lse && quad == 0)
            p.lse[query * p.lse_stride_row + qo_head * p.lse_stride_head] =
                total == 0.0f ? -INFINITY : (high * factor + log2f(total)) * kLn2;
    };
    store_row(16 * warp + row_low, sums[0], max0, factor0, 0);
    store_row(16 * warp + row_low + 8, sums[2], max1, factor1, 2);
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    bf16_attention(const UnionParams p, const __grid_constant__ CUtensorMap key_map,
                   const __grid_constant__ CUtensorMap value_map) {
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(raw_shared);

    // Barriers
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        prefetch_tensormap(&value_map);
        for (int s = 0; s < kSlots; ++s) {
            mbarrier_init(smem_address(&shared.full[s]), 1);
            mbarrier_init(smem_address(&shared.empty[s]), kConsumerWarps);
        }
        fence_mbarrier_init();
    }
    if (threadIdx.x < 64) shared.ones[threadIdx.x] = kBf16Ones;
    fence_proxy_async();
    __syncthreads();
    grid_dependency_wait();

    // Schedule
    zero_padding_rows(p);
    if (static_cast<int>(blockIdx.x) >= tile_count(p)) return;
    const Tile tile = tile_at(p, blockIdx.x);
    if (tile.live_queries <= 0) return;

    // Roles
    if (threadIdx.x < kWarpgroup) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x < 32) produce(p, key_map, value_map, shared, tile);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume(p, shared, tile);
    }
}

}  // namespace

cudaError_t launch_bf16_attention(const UnionParams& p, const CUtensorMap& key_map,
                                  const CUtensorMap& value_map, cudaStream_t stream) {
    if (const cudaError_t error = allow_shared_memory(bf16_attention, sizeof(SharedMemory))) return error;
    // One CTA at least: a call without a tile still zeroes its padding rows.
    const int64_t tiles = int64_t{p.num_kv_heads} * p.max_groups * p.tiles_per_group;
    return launch_dependent(bf16_attention, 1, tiles < 1 ? 1 : tiles, kThreads, sizeof(SharedMemory), stream,
                            p, key_map, value_map);
}

}  // namespace pageweaver
