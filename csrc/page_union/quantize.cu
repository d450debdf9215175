// Q to E4M3, once a call: a query of sixteen pages would else be quantised up to sixteen times.
//
// A head-row takes kQueryRowBytes. Its 128 values lie as four times the 32 bytes that a lane of a quad needs
// as A fragments: byte 32 c + 8 k + 4 h + b is column 32 k + 16 h + 4 c + b. Split: their low parts follow in
// the same order. Then its logit factor. Rows 16 bytes past a multiple of 128 apart let eight lanes read two
// of them from shared memory without a bank conflict.

#include <cuda_bf16.h>

#include "page_union/page_union.hpp"
#include "primitives/launch.cuh"
#include "union_attention/queries.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;

// Eight lanes a head-row, 16 columns each.
template <bool kIsSplit>
__global__ void __launch_bounds__(kThreads) quantize_queries(PageUnionParams p) {
    grid_dependency_wait();
    if (blockIdx.x == 0 && threadIdx.x <= p.rounds) p.unit_tickets[threadIdx.x] = 0;
    const int part = threadIdx.x % 8;
    const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 8;
    const bool is_row = row < int64_t{p.total_q} * p.num_qo_heads;
    // Rows in the order of q, for whole lines; what they become lies by KV head.
    const int64_t query = is_row ? row / p.num_qo_heads : 0, qo_head = is_row ? row % p.num_qo_heads : 0;
    const uint4* source = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) +
                                                         query * p.q_stride_row + qo_head * p.q_stride_head) +
                          2 * part;
    const uint4 packed[2] = {__ldcs(source), __ldcs(source + 1)};
    float values[16];
    unpack_part(packed, values);
    const float amax = row_amax(values);
    if (!is_row) return;
    const QueryScale<kIsSplit> scale(amax);
    const int group_mask = (1 << p.group_shift) - 1;
    const int64_t target =
        (((qo_head >> p.group_shift) * p.total_q + query) << p.group_shift) + (qo_head & group_mask);
    constexpr int kParts = kIsSplit ? 2 : 1, kPartWords = kHeadDim / 4;
    uint32_t* words = reinterpret_cast<uint32_t*>(p.packed_q + target * kQueryRowBytes<kIsSplit>) + part;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = values[4 * c + j] * scale.inverse;
        words[8 * c] = cvt_e4m3x4(v[0], v[1], v[2], v[3]);
        if constexpr (kIsSplit) words[kPartWords + 8 * c] = low_parts(words[8 * c], v);
    }
    if (part == 0)
        words[kParts * kPartWords] = __float_as_uint(logit_factor(unit_logit_factor(p), scale.value));
}

}  // namespace

cudaError_t launch_quantize_queries(const PageUnionParams& p, cudaStream_t stream) {
    const int64_t rows = int64_t{p.total_q} * p.num_qo_heads;
    return launch_dependent(p.is_split ? quantize_queries<true> : quantize_queries<false>, 1,
                            (rows * 8 + kThreads - 1) / kThreads, kThreads, 0, stream, p);
}

}  // namespace pageweaver
