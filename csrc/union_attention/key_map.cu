// Tensor maps of K and V as they lie in the cache.

#include "prepare/prepare.hpp"
#include "union_attention/union_attention.hpp"

namespace pageweaver {
namespace {

// Encodes a map with the 128-byte swizzle; `strides` in bytes, of all dimensions but the first.
template <int kRank>
cudaError_t encode(CUtensorMap* map, CUtensorMapDataType type, const void* cache,
                   const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                   const cuuint32_t (&box)[kRank]) {
    using Encode =
        CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) return error;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
    cuuint32_t steps[kRank];
    for (cuuint32_t& step : steps) step = 1;
    const CUresult result = reinterpret_cast<Encode>(entry)(
        map, type, kRank, const_cast<void*>(cache), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A map cannot be empty: without a page it stands for one that nobody reads.
void avoid_empty(const void*& cache, int64_t& num_pages) {
    if (num_pages > 0) return;
    num_pages = 1;
    cache = reinterpret_cast<const void*>(uintptr_t{256});
}

}  // namespace

cudaError_t make_key_map(CUtensorMap* map, const void* k_cache, int64_t num_pages, int64_t num_kv_heads,
                         int64_t stride_page, int64_t stride_token, int64_t stride_head, int box_tokens) {
    avoid_empty(k_cache, num_pages);
    const cuuint64_t sizes[4] = {kHeadDim, kPageSize, static_cast<cuuint64_t>(num_kv_heads),
                                 static_cast<cuuint64_t>(num_pages)};
    const cuuint64_t strides[3] = {static_cast<cuuint64_t>(stride_token),
                                   static_cast<cuuint64_t>(stride_head),
                                   static_cast<cuuint64_t>(stride_page)};
    const cuuint32_t box[4] = {kHeadDim, static_cast<cuuint32_t>(box_tokens), 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, k_cache, sizes, strides, box);
}

cudaError_t make_bf16_map(CUtensorMap* map, const void* cache, int64_t num_pages, int64_t num_kv_heads,
                          int64_t stride_page, int64_t stride_token, int64_t stride_head, int box_tokens,
                          int box_halves) {
    avoid_empty(cache, num_pages);
    constexpr int kHalfColumns = kHeadDim / 2;
    const cuuint64_t sizes[5] = {kHalfColumns, kPageSize, 2, static_cast<cuuint64_t>(num_kv_heads),
                                 static_cast<cuuint64_t>(num_pages)};
    const cuuint64_t strides[4] = {static_cast<cuuint64_t>(stride_token), kHalfColumns * sizeof(uint16_t),
                                   static_cast<cuuint64_t>(stride_head),
                                   static_cast<cuuint64_t>(stride_page)};
    const cuuint32_t box[5] = {kHalfColumns, static_cast<cuuint32_t>(box_tokens),
                               static_cast<cuuint32_t>(box_halves), 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cache, sizes, strides, box);
}

}  // namespace pageweaver
