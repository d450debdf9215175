// Q to E4M3, once a call: a query of sixteen pages would else be quantised up to sixteen times.
//
// A head-row takes kQueryRowBytes. Its 128 values lie as four times the 32 bytes that a lane of a quad needs
// as A fragments: byte 32 c + 8 k + 4 h + b is column 32 k + 16 h + 4 c + b. Its logit factor follows. Rows
// 144 bytes apart let eight lanes read two of them from shared memory without a bank conflict.

#include <cuda_bf16.h>

#include "page_union/page_union.hpp"
#include "primitives/launch.cuh"
#include "union_attention/queries.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;

// Eight lanes a head-row, 16 columns each.
__global__ void __launch_bounds__(kThreads) quantize_queries(PageUnionParams p) {
    grid_dependency_wait();
    if (blockIdx.x == 0 && threadIdx.x < 2) p.unit_tickets[threadIdx.x] = 0;
    const int part = threadIdx.x % 8;
    const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 8;
    const bool is_row = row < int64_t{p.total_q} * p.num_qo_heads;
    // Rows in the order of q, for whole lines; what they become lies by KV head.
    const int64_t query = is_row ? row / p.num_qo_heads : 0, qo_head = is_row ? row % p.num_qo_heads : 0;
    const uint4* source = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) +
                                                         query * p.q_stride_row + qo_head * p.q_stride_head) +
                          2 * part;
    const uint4 packed[2] = {__ldcs(source), __ldcs(source + 1)};
    float values[16], amax = kQAmaxFloor;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            values[8 * i + 2 * k] = __uint_as_float(words[k] << 16);
            values[8 * i + 2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(values[i]));
    for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, step));
    if (!is_row) return;
    const float inverse = kE4m3Max / amax;
    const int group_mask = (1 << p.group_shift) - 1;
    const int64_t target =
        (((qo_head >> p.group_shift) * p.total_q + query) << p.group_shift) + (qo_head & group_mask);
    uint32_t* words = reinterpret_cast<uint32_t*>(p.packed_q + target * kQueryRowBytes) + part;
#pragma unroll
    for (int c = 0; c < 4; ++c)
        words[8 * c] = cvt_e4m3x4(values[4 * c] * inverse, values[4 * c + 1] * inverse,
                                  values[4 * c + 2] * inverse, values[4 * c + 3] * inverse);
    if (part == 0)
        words[kHeadDim / 4] = __float_as_uint(logit_factor(unit_logit_factor(p), amax * (1.0f / kE4m3Max)));
}

}  // namespace

cudaError_t launch_quantize_queries(const PageUnionParams& p, cudaStream_t stream) {
    const int64_t rows = int64_t{p.total_q} * p.num_qo_heads;
    return launch_dependent(quantize_queries, 1, (rows * 8 + kThreads - 1) / kThreads, kThreads, 0, stream,
                            p);
}

}  // namespace pageweaver
