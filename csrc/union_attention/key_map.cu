// Tensor map of the key cache.

#include "prepare/prepare.hpp"
#include "union_attention/union_attention.hpp"

namespace pageweaver {

cudaError_t make_key_map(CUtensorMap* map, const void* k_cache, int64_t num_pages, int64_t num_kv_heads,
                         int64_t stride_page, int64_t stride_token, int64_t stride_head, int box_tokens) {
    using Encode =
        CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    // A map cannot be empty: without a page it stands for one that nobody reads.
    if (num_pages == 0) {
        num_pages = 1;
        k_cache = reinterpret_cast<const void*>(uintptr_t{256});
    }
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
    const cuuint64_t sizes[4] = {kHeadDim, kPageSize, static_cast<cuuint64_t>(num_kv_heads),
                                 static_cast<cuuint64_t>(num_pages)};
    const cuuint64_t strides[3] = {static_cast<cuuint64_t>(stride_token),
                                   static_cast<cuuint64_t>(stride_head),
                                   static_cast<cuuint64_t>(stride_page)};
    const cuuint32_t box[4] = {kHeadDim, static_cast<cuuint32_t>(box_tokens), 1, 1}, steps[4] = {1, 1, 1, 1};
    const CUresult result = reinterpret_cast<Encode>(entry)(
        map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, const_cast<void*>(k_cache), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace pageweaver
