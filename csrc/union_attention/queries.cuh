// The queries of a tile: where they are, and their quantisation.
#pragma once

#include <cuda_bf16.h>

#include "prepare/device.cuh"
#include "primitives/fp8.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// As in common/arithmetic.py, which says what they guard.
constexpr float kQAmaxFloor = 7.888609052210118e-31f;      // 2^-100
constexpr float kLogitFactorMax = 1.2676506002282294e30f;  // 2^100
constexpr float kLogitFactorMin = 1e-37f;

// What raw products of queries of scale `q_scale` are multiplied by to be logits in base 2.
template <typename Params>
__device__ inline float logit_factor(const Params& p, float q_scale) {
    const float softmax_scale = p.softmax_scale_pointer ? *p.softmax_scale_pointer : p.softmax_scale;
    const float k_scale = p.k_scale_pointer ? *p.k_scale_pointer : p.k_scale;
    const float factor = q_scale * (softmax_scale * k_scale * kLog2e);
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

// The tile of this CTA.
struct Tile {
    int64_t unit;  // head * max_groups + group
    int head, request, index, first_slot, live_queries;
};

__device__ inline int64_t query_of(const UnionParams& p, const Tile& tile, int slot) {
    const int64_t at = tile.first_slot + slot;
    return p.query_ids ? p.query_ids[int64_t{tile.head} * p.total_q + at] : at;
}

__device__ inline int64_t qo_head_of(const UnionParams& p, const Tile& tile, int row) {
    return (int64_t{tile.head} << p.group_shift) + (row & ((1 << p.group_shift) - 1));
}

// Quantises the 16 head-rows of this warp to E4M3 in shared memory, two lanes a row, and notes their
// positions. Returns the logit factor (base 2) of row lane / 2. Split: a power of two is the scale, and what
// E4M3 leaves of a value goes into a second tile behind the first.
template <bool kIsSplit>
__device__ inline float quantize_rows(const UnionParams& p, uint8_t* shared_q, int32_t* positions,
                                      const Tile& tile, int warp, int lane) {
    const int row = 16 * warp + lane / 2, half = lane % 2;
    const int slot = row >> p.group_shift;
    float values[kHeadDim / 2] = {};
    int position = -1;
    if (slot < tile.live_queries) {
        const int64_t query = query_of(p, tile, slot);
        position = static_cast<int>(query) + p.seqused_k[tile.request] - p.cu_seqlens_q[tile.request + 1];
        const uint4* source = reinterpret_cast<const uint4*>(
            static_cast<const __nv_bfloat16*>(p.q) + query * p.q_stride_row +
            qo_head_of(p, tile, row) * p.q_stride_head + half * (kHeadDim / 2));
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
            const uint4 packed = __ldg(source + i);
            const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                values[8 * i + 2 * k] = __uint_as_float(words[k] << 16);
                values[8 * i + 2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
            }
        }
    }
    if (half == 0) positions[row] = position;
    float amax = kQAmaxFloor;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) amax = fmaxf(amax, fabsf(values[i]));
    amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, 1));
    const QueryScale<kIsSplit> scale(amax);
#pragma unroll
    for (int i = 0; i < kHeadDim / 32; ++i) {
        uint32_t words[4], low_words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = values[16 * i + 4 * k + j] * scale.inverse;
            words[k] = cvt_e4m3x4(v[0], v[1], v[2], v[3]);
            low_words[k] = low_parts(words[k], v);
        }
        const int chunk = (half * (kHeadDim / 32) + i) ^ (row % 8);
        *reinterpret_cast<uint4*>(shared_q + row * kHeadDim + chunk * 16) =
            make_uint4(words[0], words[1], words[2], words[3]);
        if constexpr (kIsSplit)
            *reinterpret_cast<uint4*>(shared_q + kTileRows * kHeadDim + row * kHeadDim + chunk * 16) =
                make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
    }
    return logit_factor(p, scale.value);
}

}  // namespace pageweaver
