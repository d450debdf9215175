// The queries of a tile: where they are, and their quantisation.
#pragma once

#include <cuda_bf16.h>

#include "prepare/device.cuh"
#include "primitives/fp8.cuh"
#include "primitives/mbarrier.cuh"
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

// Quantises the raw head-rows of a tile in shared memory where they lie, BF16 of 256 bytes a row, to E4M3 of
// 128 bytes with the 128-byte swizzle. By the consumer warpgroup; a warp turns its own 16 rows, eight lanes a
// row. Split: a power of two is the scale, and what E4M3 leaves of a value goes into a second tile behind the
// first. Returns the logit factors (base 2) of rows lane / 4 and that + 8 of the warp.
template <bool kIsSplit>
__device__ inline float2 quantize_rows(uint8_t* q, const int32_t* rows, float unit_factor, int warp, int lane,
                                       int barrier) {
    constexpr int kRowsAtOnce = 4;
    const int part = lane % 8;
    uint4 raw[kRowsAtOnce][2];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = 16 * warp + kRowsAtOnce * i + lane / 8;
        const uint4* const source = reinterpret_cast<const uint4*>(q + row * (2 * kHeadDim) + part * 32);
        const bool exists = rows[row] >= 0;  // nobody has written the others
        raw[i][0] = exists ? source[0] : make_uint4(0, 0, 0, 0);
        raw[i][1] = exists ? source[1] : make_uint4(0, 0, 0, 0);
    }
    // What is written next lies where other warps' raw rows are.
    named_barrier_sync(barrier, 4 * kWarp);
    float factors[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = 16 * warp + kRowsAtOnce * i + lane / 8;
        const uint32_t pairs[8] = {raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w,
                                   raw[i][1].x, raw[i][1].y, raw[i][1].z, raw[i][1].w};
        float values[16], amax = kQAmaxFloor;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            values[2 * k] = __uint_as_float(pairs[k] << 16);
            values[2 * k + 1] = __uint_as_float(pairs[k] & 0xffff0000u);
        }
#pragma unroll
        for (int k = 0; k < 16; ++k) amax = fmaxf(amax, fabsf(values[k]));
#pragma unroll
        for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
        const QueryScale<kIsSplit> scale(amax);
        uint32_t words[4], low_words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = values[4 * k + j] * scale.inverse;
            words[k] = cvt_e4m3x4(v[0], v[1], v[2], v[3]);
            low_words[k] = low_parts(words[k], v);
        }
        uint8_t* const target = q + row * kHeadDim + (part ^ (row % 8)) * 16;
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        if constexpr (kIsSplit)
            *reinterpret_cast<uint4*>(target + kTileRows * kHeadDim) =
                make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
        factors[i] = logit_factor(unit_factor, scale.value);
    }
    // Row r was turned by lanes 8 * (r % 4) and the next seven, in step r / 4.
    const int source = lane / 4 % kRowsAtOnce * 8;
    float mine[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) mine[i] = __shfl_sync(kAllLanes, factors[i], source);
    return lane < 16 ? make_float2(mine[0], mine[2]) : make_float2(mine[1], mine[3]);
}

}  // namespace pageweaver
