// Union attention over FP8 caches: the queries of a tile, quantised by those that compute.
#pragma once

#include "primitives/fp16.cuh"
#include "primitives/fp8.cuh"
#include "union_attention/queries.cuh"

namespace pageweaver {

// Quantises a tile's queries to E4M3 in `q`, with the 128-byte swizzle. By a worker; a warp turns its own 16
// rows, eight lanes a row. Returns the logit factors (base 2) of a thread's rows. A head-row's maximum goes
// to 448 over a power of two, so large that FP16 holds the difference of any two sums of its products with
// keys.
__device__ inline float2 load_queries(const UnionParams& p, const Tile& tile, const int32_t* rows, uint8_t* q,
                                      float unit_factor, int warp, int lane) {
    constexpr int kRowsAtOnce = 4;
    // Rounding to E4M3 adds a seventeenth at most; the rest of a sixteenth is more than what subnormals gain.
    constexpr float kOverflow = 2.0f * 1.0625f * kE4m3Max * kE4m3Max / kHalfMax;
    const int part = lane % 8;
    uint4 raw[kRowsAtOnce][2];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = 16 * warp + kRowsAtOnce * i + lane / 8, query = rows[row];
        const uint4* const source = reinterpret_cast<const uint4*>(query_row(p, tile, query, row)) + 2 * part;
        raw[i][0] = query >= 0 ? source[0] : make_uint4(0, 0, 0, 0);
        raw[i][1] = query >= 0 ? source[1] : make_uint4(0, 0, 0, 0);
    }
    float factors[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = 16 * warp + kRowsAtOnce * i + lane / 8;
        float values[16], sum = 0.0f;
        unpack_part(raw[i], values);
        const float amax = row_amax(values);
        // Of values over 2^8, or FP32 might not hold it.
        constexpr float kSmall = 0.00390625f;
#pragma unroll
        for (float value : values) sum = fmaf(fabsf(value), kSmall, sum);
#pragma unroll
        for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        // The power of two that is no less; a row of zeros counts as one of its maximum.
        const float small_amax = amax * kSmall, excess = fmaxf(sum, small_amax) / small_amax * kOverflow;
        const float power = __uint_as_float((__float_as_uint(excess) + 0x7fffffu) & 0x7f800000u);
        const float inverse = kE4m3Max / power / amax;
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
            words[k] = cvt_e4m3x4(values[4 * k] * inverse, values[4 * k + 1] * inverse,
                                  values[4 * k + 2] * inverse, values[4 * k + 3] * inverse);
        *reinterpret_cast<uint4*>(q + row * kHeadDim + (part ^ (row % 8)) * 16) =
            make_uint4(words[0], words[1], words[2], words[3]);
        factors[i] = logit_factor(unit_factor, amax * (power * (1.0f / kE4m3Max)));
    }
    return own_factors(factors, lane);
}

}  // namespace pageweaver
