// Pairs of FP16 numbers in a register.
#pragma once

#include <cstdint>

namespace pageweaver {

constexpr float kHalfMax = 65504.0f, kHalfMin = 5.9604644775390625e-8f;  // the largest, and 2^-24

__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
    return packed;
}

// One of a pair: 0 the lower, 1 the upper.
template <int kHalf>
__device__ __forceinline__ float half_of(uint32_t pair) {
    float value;
    if constexpr (kHalf == 0)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
            : "=f"(value)
            : "r"(pair));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}"
            : "=f"(value)
            : "r"(pair));
    return value;
}

// A pair that is one of `pair` twice.
template <int kHalf>
__device__ __forceinline__ uint32_t twice(uint32_t pair) {
    return __byte_perm(pair, pair, kHalf == 0 ? 0x1010 : 0x3232);
}

// a * b + c, a + b and -a, each half on its own.
__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t add_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t neg_f16x2(uint32_t a) {
    uint32_t d;
    asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

}  // namespace pageweaver
