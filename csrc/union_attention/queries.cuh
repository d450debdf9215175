// The queries of a tile: where they are, and their quantisation.
#pragma once

#include <cuda_bf16.h>

#include "prepare/device.cuh"
#include "primitives/fp8.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {

constexpr float kPScaleLog2 = 8.0f;     // of probabilities in FP8; as in common/arithmetic.py
constexpr float kLargeLogit = 8192.0f;  // base 2; above, FP32 rounds a logit by 2^-11 and more
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// As in common/arithmetic.py, which says what they guard.
constexpr float kQAmaxFloor = 7.888609052210118e-31f;      // 2^-100
constexpr float kLogitFactorMax = 1.2676506002282294e30f;  // 2^100
constexpr float kLogitFactorMin = 1e-37f;

// What raw products of queries of scale 1 are multiplied by to be logits in base 2.
template <typename Params>
__device__ inline float unit_logit_factor(const Params& p) {
    const float softmax_scale = p.softmax_scale_pointer ? *p.softmax_scale_pointer : p.softmax_scale;
    const float k_scale = p.k_scale_pointer ? *p.k_scale_pointer : p.k_scale;
    return softmax_scale * k_scale * kLog2e;
}

// The same of queries of scale `q_scale`.
__device__ __forceinline__ float logit_factor(float unit_factor, float q_scale) {
    const float factor = q_scale * unit_factor;
    // A scale that is NaN or negative yields NaN, not a plausible row.
    if (factor < 0.0f) return NAN;
    return factor > kLogitFactorMax ? kLogitFactorMax : factor < kLogitFactorMin ? kLogitFactorMin : factor;
}

// What a head-row of this maximum is divided by on its way to E4M3.
template <bool kIsSplit>
struct QueryScale {
    float value, inverse;

    __device__ explicit QueryScale(float amax) {
        // Split: the maximum comes to 2^7 to 2^8. That of a row with an infinity is infinity, which yields
        // NaN.
        const float power = __uint_as_float(__float_as_uint(amax) & 0x7f800000u);
        value = kIsSplit ? power * (1.0f / 128.0f) : amax * (1.0f / kE4m3Max);
        inverse = kIsSplit ? 128.0f / power : kE4m3Max / amax;
    }
};

// What four E4M3 numbers leave of the values that they were rounded from, in E4M3.
__device__ __forceinline__ uint32_t low_parts(uint32_t high, const float (&v)[4]) {
    const float2 first = cvt_float2(high & 0xffff), second = cvt_float2(high >> 16);
    return cvt_e4m3x4(v[0] - first.x, v[1] - first.y, v[2] - second.x, v[3] - second.y);
}

// A tile: some queries of a group, and what its roles need to know.
struct Tile {
    int unit;  // head * max_groups + group; below 0: none
    int head, request, index, first_slot, live_queries;
    int rounds;  // pages that any of its queries selected
    int shift;   // position of a row in its request: row + shift
};

__device__ inline int64_t query_of(const UnionParams& p, const Tile& tile, int slot) {
    const int64_t at = tile.first_slot + slot;
    return p.query_ids ? p.query_ids[int64_t{tile.head} * p.total_q + at] : at;
}

// The head-row that row `row` of a tile holds; head-rows go by query, then by head. A warp's lower and upper
// eight rows are different registers of its threads. At group size 16 they belong to two queries, each shared
// by two warps: where only one of them selected a page, both warps have half of a softmax to do, not one warp
// all of it while three wait. The two are not neighbours, which select the same pages more often.
__device__ __forceinline__ int head_row_of(int row) {
    return (row & 7) | (row & 8) << 2 | (row & 48) >> 1;
}

__device__ inline int64_t qo_head_of(const UnionParams& p, const Tile& tile, int head_row) {
    return (int64_t{tile.head} << p.group_shift) + (head_row & ((1 << p.group_shift) - 1));
}

// Row `row` of a tile, of query `query`, as it came.
__device__ __forceinline__ const __nv_bfloat16* query_row(const UnionParams& p, const Tile& tile,
                                                          int64_t query, int row) {
    return static_cast<const __nv_bfloat16*>(p.q) + query * p.q_stride_row +
           qo_head_of(p, tile, head_row_of(row)) * p.q_stride_head;
}

// An eighth of a head-row of BF16, 16 columns, as floats.
__device__ __forceinline__ void unpack_part(const uint4 (&raw)[2], float (&values)[16]) {
    const uint32_t pairs[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w,
                               raw[1].x, raw[1].y, raw[1].z, raw[1].w};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        values[2 * k] = __uint_as_float(pairs[k] << 16);
        values[2 * k + 1] = __uint_as_float(pairs[k] & 0xffff0000u);
    }
}

// The largest magnitude of a head-row of which each of eight lanes holds an eighth; kQAmaxFloor at least.
__device__ __forceinline__ float row_amax(const float (&values)[16]) {
    float amax = kQAmaxFloor;
#pragma unroll
    for (float value : values) amax = fmaxf(amax, fabsf(value));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
    return amax;
}

// Logit factors of a warp's 16 rows; that of row r was worked out by lanes 8 * (r % 4) and the next seven, in
// step r / 4. Returns those of rows lane / 4 and that + 8.
__device__ __forceinline__ float2 own_factors(const float (&factors)[4], int lane) {
    const int source = lane / 4 % 4 * 8;
    float mine[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) mine[i] = __shfl_sync(kAllLanes, factors[i], source);
    return lane < 16 ? make_float2(mine[0], mine[2]) : make_float2(mine[1], mine[3]);
}

}  // namespace pageweaver
