// Row sums of probabilities, as columns of their product with ones; of split ones, with zeros and ones.
//
// The tensor core keeps 13 bits of an accumulator and truncates. PV loses by that, and what its weights still
// come to is what a column of ones gives in the same steps: column 0, which normalises. The sum itself, which
// an LSE wants, are the other columns together: each has ones for a few tokens only, and a short sum loses
// little.
#pragma once

#include <cstdint>

#include "prepare/device.cuh"

namespace pageweaver {

constexpr uint32_t kE4m3Ones = 0x38383838u;

// Four tokens, from `token` on, of a column of kColumns.
template <int kColumns>
__device__ __forceinline__ uint32_t row_sum_ones(int column, int token) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (column == 0 || (token + i) % (kColumns - 1) == column - 1) word |= kE4m3Ones & 0xffu << 8 * i;
    return word;
}

// What normalises a thread's row `half`, from its quad's lane that has column 0. Registers are as wgmma has
// them (primitives/wgmma.cuh). By whole warps, as the next.
template <int kCount>
__device__ __forceinline__ float row_normaliser(const float (&sums)[kCount], int half) {
    return __shfl_sync(kAllLanes, sums[2 * half], 0, 4);
}

// The sum of all columns but column 0: of a quad's lower row in its lanes 0 and 2, of its upper one in 1
// and 3.
template <int kCount>
__device__ __forceinline__ float row_sum(const float (&sums)[kCount], int quad) {
    float parts[2] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) parts[i / 2 % 2] += i < 4 && i % 2 == 0 && quad == 0 ? 0.0f : sums[i];
    const bool is_upper = quad % 2 == 1;
    float sum = is_upper ? parts[1] : parts[0];
    sum += __shfl_xor_sync(kAllLanes, is_upper ? parts[0] : parts[1], 1);
    return sum + __shfl_xor_sync(kAllLanes, sum, 2);
}

}  // namespace pageweaver
