// Union attention over FP8 caches: the warps that compute.
#pragma once

#include <cuda_bf16.h>

#include "primitives/fp8.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/pipeline.cuh"

namespace pageweaver {

constexpr float kPScaleLog2 = 8.0f;     // as in common/arithmetic.py
constexpr float kLargeLogit = 8192.0f;  // base 2; above, FP32 rounds a logit by 2^-11 and more
constexpr int kConsumerBarrier = 1;

using Fragment = uint32_t[4];

// Registers of the k-th 32 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[16], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// The consumer warpgroup: the whole life of one tile.
template <bool kIsCluster, bool kIsSplit>
__device__ void consume(const UnionParams& p, SharedMemory<kIsSplit>& shared, const Tile& tile) {
    const int warp = threadIdx.x / 32 % kConsumerWarps, lane = threadIdx.x % 32;
    const int quad = lane % 4, row_low = lane / 4;

    // Rows of a warp are read by that warp alone, here and in the tensor core.
    const float row_factor = quantize_rows<kIsSplit>(p, shared.q[0], shared.positions, tile, warp, lane);
    const float factor0 = __shfl_sync(kAllLanes, row_factor, 2 * row_low);
    const float factor1 = __shfl_sync(kAllLanes, row_factor, 2 * (row_low + 8));
    // Q as A fragments: it stays in registers for the whole tile and costs no shared-memory bandwidth. Split
    // arithmetic needs these registers for its probabilities and multiplies Q from shared memory.
    uint32_t q_fragments[16];
    if constexpr (kIsSplit) {
        fence_proxy_async();
        named_barrier_sync(kConsumerBarrier, kConsumerWarps * 32);
    } else {
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int row = 16 * warp + row_low + 8 * (k % 2), chunk = (k / 4 * 2 + k % 4 / 2) ^ (row % 8);
            q_fragments[k] =
                *reinterpret_cast<const uint32_t*>(shared.q[0] + row * kHeadDim + chunk * 16 + 4 * quad);
        }
    }
    const int warp_slot = 16 * warp >> p.group_shift;
    const uint32_t all_members = (1u << (16 >> p.group_shift)) - 1;
    // Pages that end before the warp's lowest position need no mask.
    const int low_position = __reduce_min_sync(kAllLanes, shared.positions[16 * warp + lane % 16]);

    constexpr int kParts = kIsSplit ? 2 : 1;
    // Output columns 0 to 63 and 64 to 127; one half of a page's PV.
    float acc_low[32], acc_high[32], product[32], sums[4], scores[64];
    uint32_t probabilities[kParts][16];  // high parts, then low parts
    float max0 = -INFINITY, max1 = -INFINITY, total0 = 0.0f, total1 = 0.0f;
    float rescale0 = 1.0f, rescale1 = 1.0f;
    bool member = false, key_ready = false, value_ready = false;
    Ring key_ring, value_ring;

    const auto issue_qk = [&] {
        if (!key_ready) mbarrier_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
        const uint64_t operand = wgmma_descriptor(smem_address(shared.keys[key_ring.stage]));
        discard_registers(scores);
        wgmma_fence();
        if constexpr (kIsSplit) {
            // Low parts first: what the accumulator truncates is then relative to them.
#pragma unroll
            for (int k = 0; k < 2 * kHeadDim / 32; ++k) {
                const uint64_t part = wgmma_descriptor(smem_address(shared.q[k < kHeadDim / 32]));
                wgmma_m64n128k32_ss(scores, part + 2 * (k % 4), operand + 2 * (k % 4), k > 0);
            }
        } else {
#pragma unroll
            for (int k = 0; k < kHeadDim / 32; ++k)
                wgmma_m64n128k32_rs(scores, fragment(q_fragments, k), operand + 2 * k, k > 0);
        }
        wgmma_commit_group();
    };
    const auto issue_pv = [&](int first_row) {
        const uint64_t operand =
            wgmma_descriptor(smem_address(shared.values[value_ring.stage] + first_row * kPageSize));
        discard_registers(product);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kParts * kPageSize / 32; ++k)
            wgmma_m64n64k32_rs(product, fragment(probabilities[kParts - 1 - k / 4], k % 4),
                               operand + 2 * (k % 4), k > 0);
        wgmma_commit_group();
    };
    // The low half brings the row sums of the rounded probabilities along, as their product with a column of
    // ones.
    const auto issue_pv_low = [&] {
        if (!value_ready) mbarrier_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
        const uint64_t ones = wgmma_descriptor_plain(smem_address(shared.ones));
        discard_registers(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kParts * kPageSize / 32; ++k)
            wgmma_m64n8k32_rs(sums, fragment(probabilities[kParts - 1 - k / 4], k % 4), ones, k > 0);
        issue_pv(0);
    };
    // O = O * rescale + PV. A warp without a member has PV = 0 and leaves O alone.
    const auto add_product = [&](float (&acc)[32]) {
        fence_registers(product);
        if (!member) return;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            acc[4 * k] = fmaf(acc[4 * k], rescale0, product[4 * k]);
            acc[4 * k + 1] = fmaf(acc[4 * k + 1], rescale0, product[4 * k + 1]);
            acc[4 * k + 2] = fmaf(acc[4 * k + 2], rescale1, product[4 * k + 2]);
            acc[4 * k + 3] = fmaf(acc[4 * k + 3], rescale1, product[4 * k + 3]);
        }
    };
    const auto add_low = [&] {
        fence_registers(sums);
        add_product(acc_low);
        if (member) {
            total0 = fmaf(total0, rescale0, sums[0]);
            total1 = fmaf(total1, rescale1, sums[2]);
        }
    };
    const auto finish_pv = [&] {
        wgmma_wait_group<0>();
        add_product(acc_high);
        __syncwarp();
        if (lane == 0) release<kIsCluster>(shared.empty_value[value_ring.stage]);
        value_ring.advance();
    };

    // Scores to probabilities for one page; `before_exp` runs between the maximum and the exponentials.
    const auto softmax = [&](auto before_exp) {
        fence_registers(scores);
        const uint32_t members =
            static_cast<uint32_t>(shared.meta[key_ring.stage].mask >> warp_slot) & all_members;
        const int page_start = shared.meta[key_ring.stage].page * kPageSize;
        __syncwarp();
        if (lane == 0) release<kIsCluster>(shared.empty_key[key_ring.stage]);
        key_ring.advance();

        float high0 = max0, high1 = max1;
        if (members) {
            if (page_start + kPageSize - 1 > low_position || members != all_members) {
                // The last visible column of each row, -1 where the row's query is no member.
                const auto limit = [&](int row) {
                    const bool selected = members >> (row >> p.group_shift) & 1;
                    return selected ? shared.positions[16 * warp + row] - page_start : -1;
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
            float low0 = scores[1], low1 = scores[3];
            high0 = fmaxf(high0, scores[0]), high1 = fmaxf(high1, scores[2]);
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
        }

        before_exp();
        // Asked now, answered when the exponentials are done.
        key_ready = mbarrier_test_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
        value_ready =
            mbarrier_test_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
        member = members != 0;
        if (member) {
            // A row that has seen nothing yet subtracts 0: -inf - -inf would be NaN.
            const float top0 = high0 == -INFINITY ? 0.0f : high0, top1 = high1 == -INFINITY ? 0.0f : high1;
            rescale0 = ex2_approx((max0 - top0) * factor0);
            rescale1 = ex2_approx((max1 - top1) * factor1);
            max0 = high0;
            max1 = high1;
            // Logits so large that a maximum's rounding shows in an exponential: subtract before multiplying.
            const bool large0 = fabsf(top0) * factor0 > kLargeLogit,
                       large1 = fabsf(top1) * factor1 > kLargeLogit;
            if (__any_sync(kAllLanes, large0 || large1)) {
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    scores[4 * k] -= large0 ? top0 : 0.0f;
                    scores[4 * k + 1] -= large0 ? top0 : 0.0f;
                    scores[4 * k + 2] -= large1 ? top1 : 0.0f;
                    scores[4 * k + 3] -= large1 ? top1 : 0.0f;
                }
            }
            const float base0 = large0 ? kPScaleLog2 : fmaf(-top0, factor0, kPScaleLog2);
            const float base1 = large1 ? kPScaleLog2 : fmaf(-top1, factor1, kPScaleLog2);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                float e[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    e[j] = ex2_approx(j % 4 < 2 ? fmaf(scores[8 * k + j], factor0, base0)
                                                : fmaf(scores[8 * k + j], factor1, base1));
                if constexpr (kIsSplit) {
                    float high[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        high[j] = round_to_e4m3(e[j]);
                        e[j] -= high[j];
                    }
                    probabilities[0][2 * k] = cvt_e4m3x4(high[0], high[1], high[4], high[5]);
                    probabilities[0][2 * k + 1] = cvt_e4m3x4(high[2], high[3], high[6], high[7]);
                }
                probabilities[kParts - 1][2 * k] = cvt_e4m3x4(e[0], e[1], e[4], e[5]);
                probabilities[kParts - 1][2 * k + 1] = cvt_e4m3x4(e[2], e[3], e[6], e[7]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < 16; ++k) probabilities[0][k] = probabilities[kParts - 1][k] = 0;
        }
    };

    const int rounds = p.tile_counts[tile.unit * p.tiles_per_group + tile.index];
#pragma unroll
    for (int k = 0; k < 32; ++k) acc_low[k] = acc_high[k] = 0.0f;
    const auto multiply_values = [&] {
        issue_pv_low();
        wgmma_wait_group<0>();
        add_low();
        issue_pv(kHeadDim / 2);
        finish_pv();
    };
    if constexpr (kIsCluster) {
        // A CTA that waits for a page holds no slot, or the two could wait for each other: PV ends before the
        // next page.
        const int count = p.union_counts[tile.unit];
        for (int place = 0; place < count; ++place) {
            mbarrier_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
            if (shared.meta[key_ring.stage].mask != 0) {
                key_ready = true;
                issue_qk();
                wgmma_wait_group<0>();
                softmax([] {});
                multiply_values();
            } else {
                mbarrier_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
                __syncwarp();
                if (lane == 0) {
                    release<kIsCluster>(shared.empty_key[key_ring.stage]);
                    release<kIsCluster>(shared.empty_value[value_ring.stage]);
                }
                key_ring.advance();
                value_ring.advance();
            }
        }
    } else if (rounds > 0) {
        issue_qk();
        wgmma_wait_group<0>();
        softmax([] {});
        for (int j = 1; j < rounds; ++j) {
            issue_pv_low();
            issue_qk();
            wgmma_wait_group<1>();
            add_low();
            issue_pv(kHeadDim / 2);
            wgmma_wait_group<1>();
            softmax(finish_pv);
        }
        multiply_values();
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
        for (int k = 0; k < 8; ++k) {
            *reinterpret_cast<__nv_bfloat162*>(target + 8 * k) =
                __floats2bfloat162_rn(acc_low[4 * k + offset] * scale, acc_low[4 * k + offset + 1] * scale);
            *reinterpret_cast<__nv_bfloat162*>(target + kHeadDim / 2 + 8 * k) =
                __floats2bfloat162_rn(acc_high[4 * k + offset] * scale, acc_high[4 * k + offset + 1] * scale);
        }
        if (p.lse && quad == 0)
            p.lse[query * p.lse_stride_row + qo_head * p.lse_stride_head] =
                total == 0.0f ? -INFINITY : (high * factor + log2f(total) - kPScaleLog2) * kLn2;
    };
    store_row(16 * warp + row_low, total0, max0, factor0, 0);
    store_row(16 * warp + row_low + 8, total1, max1, factor1, 2);
}

}  // namespace pageweaver
