// Combine: finishes every query from its normalised partials, weighted by their LSE, in the order of slots.
//
// Half a warp a head-row: a lane holds 8 columns and asks for all slots at once; lane s weighs slot s, then
// s + 16. It streams through the partials once, which is all it costs. A query without a partial, padding
// rows past cu_seqlens_q[-1] among them, yields zeros and an LSE of -inf; what lies in a dead slot is never
// read.

#include <cuda_bf16.h>

#include "page_union/page_union.hpp"
#include "prepare/prepare.hpp"
#include "primitives/launch.cuh"
#include "union_attention/queries.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = 16;

__global__ void __launch_bounds__(kThreads) combine_partials(PageUnionParams p) {
    grid_dependency_wait();
    const int lane = threadIdx.x % kRowLanes;
    const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kRowLanes;
    const int64_t rows = (int64_t{p.num_kv_heads} * p.total_q) << p.group_shift;
    const int sub = static_cast<int>(row & ((1 << p.group_shift) - 1));
    const int64_t owner = row >> p.group_shift;  // head * total_q + query
    const int count = row < rows ? p.partial_counts[owner] : 0;
    const int64_t first = ((owner * p.topk) << p.group_shift) + sub;
    const uint4* const partials = static_cast<const uint4*>(p.partials) + first * kRowLanes + lane;

    float lse[2], weights[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int slot = lane + kRowLanes * i;
        lse[i] = slot < count ? __ldcs(p.lse_partials + first + (int64_t{slot} << p.group_shift)) : -INFINITY;
    }
    const uint32_t halves[2] = {__ballot_sync(kAllLanes, lse[0] != -INFINITY),
                                __ballot_sync(kAllLanes, lse[1] != -INFINITY)};
    const int shift = threadIdx.x % 32 / kRowLanes * kRowLanes;

    float top = fmaxf(lse[0], lse[1]);
    for (int step = 1; step < kRowLanes; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    // Nothing alive: -inf - -inf would be NaN.
    const float base = top == -INFINITY ? 0.0f : top;
    float acc[8] = {}, total = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        weights[i] = ex2_approx((lse[i] - base) * kLog2e);
        if (i == 1 && halves[1] == 0) break;
        const uint32_t live = halves[i] >> shift & 0xffff;
        uint4 values[kRowLanes];
#pragma unroll
        for (int s = 0; s < kRowLanes; ++s)
            values[s] = live >> s & 1
                            ? __ldcs(partials + ((int64_t{kRowLanes * i + s} * kRowLanes) << p.group_shift))
                            : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int s = 0; s < kRowLanes; ++s) {
            const float weight = __shfl_sync(kAllLanes, weights[i], s, kRowLanes);
            const uint32_t words[4] = {values[s].x, values[s].y, values[s].z, values[s].w};
            total += weight;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                acc[2 * k] = fmaf(weight, __uint_as_float(words[k] << 16), acc[2 * k]);
                acc[2 * k + 1] = fmaf(weight, __uint_as_float(words[k] & 0xffff0000u), acc[2 * k + 1]);
            }
        }
    }
    if (row >= rows) return;
    const int64_t query = owner % p.total_q, qo_head = (owner / p.total_q << p.group_shift) + sub;
    const float v_scale = p.v_scale_pointer ? *p.v_scale_pointer : p.v_scale;
    const float scale = total == 0.0f ? 0.0f : v_scale / total;
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(acc[2 * k] * scale, acc[2 * k + 1] * scale);
        words[k] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + query * p.out_stride_row +
                             qo_head * p.out_stride_head)[lane] =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (p.lse && lane == 0)
        p.lse[query * p.lse_stride_row + qo_head * p.lse_stride_head] =
            total == 0.0f ? -INFINITY : base + logf(total);
}

}  // namespace

cudaError_t launch_combine_partials(const PageUnionParams& p, cudaStream_t stream) {
    const int64_t rows = (int64_t{p.num_kv_heads} * p.total_q) << p.group_shift;
    if (rows == 0) return cudaSuccess;
    return launch_dependent(combine_partials, 1, (rows * kRowLanes + kThreads - 1) / kThreads, kThreads, 0,
                            stream, p);
}

}  // namespace pageweaver
