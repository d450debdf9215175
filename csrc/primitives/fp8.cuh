// E4M3 and BF16 packing and the base-2 exponential.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace pageweaver {

constexpr float kE4m3Max = 448.0f;

__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds four floats to E4M3, the first in the lowest byte.
__device__ __forceinline__ uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
    uint32_t packed;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

// Rounds to the four significant bits that E4M3 holds of numbers from 2^-6 to 448: adding 2^20 x cuts 20 bits
// off the mantissa, and taking it away again is exact (after Veltkamp's splitting).
__device__ __forceinline__ float round_to_e4m3(float x) {
    constexpr float kShift = 1048576.0f;
    return __fmaf_rn(x, -kShift, __fmaf_rn(x, kShift, x));
}

// Two E4M3 numbers as floats, the lower byte first.
__device__ __forceinline__ float2 cvt_float2(uint16_t e4m3x2) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(e4m3x2));
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// Rounds two floats to BF16, the first in the lower half.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
    return packed;
}

}  // namespace pageweaver
