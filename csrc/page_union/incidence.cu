// Which queries selected which page, as bitmaps: from the selection as it comes to R_p for every page.
//
//   clear_lists      zeroes what later kernels count in or OR into
//   collect_members  drops what the contract ignores and sets the query's bit in each of its pages
//
// Setting bits needs no order, so the bitmaps, and all that follows from them, are the same every time.

#include "page_union/device.cuh"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
constexpr int kCollectThreads = 128;

template <typename T>
__device__ void fill(T* target, int64_t count, T value) {
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
         i += int64_t{gridDim.x} * kThreads)
        target[i] = value;
}

__global__ void __launch_bounds__(kThreads) clear_lists(PageListParams p) {
    const int64_t pages = int64_t{p.num_kv_heads} * p.batch_size * p.max_pages;
    // The buffer's size is a multiple of 16 bytes.
    fill(reinterpret_cast<uint4*>(p.member_bits), (p.num_kv_heads * p.head_words + 3) / 4,
         make_uint4(0, 0, 0, 0));
    fill(p.partners, pages, -1);
    fill(p.class_totals, int64_t{p.num_kv_heads} * p.chunks * kClasses, uint64_t{0});
    fill(p.counters, kCounters, 0);
}

// A CTA sets the bits of 32 rows: a lane is a row, and lanes that find the same page in the same column set
// their bits together. Duplicates and the order of columns do not show in bits.
__global__ void __launch_bounds__(kCollectThreads) collect_members(PageListParams p) {
    grid_dependency_wait();
    const int lane = threadIdx.x % kWarp, windows = (p.total_q + 31) / 32;
    const int head = blockIdx.x / windows, query = blockIdx.x % windows * 32 + lane;
    const int request = query < p.total_q ? request_of(p, query) : -1;
    const RequestBits bits = request_bits(p, max(request, 0));
    const int64_t first_page = (int64_t{head} * p.batch_size + request) * p.max_pages;
#pragma unroll 4
    for (int column = threadIdx.x / kWarp; column < p.topk; column += kCollectThreads / kWarp) {
        const int page = request >= 0 ? selected_page(p, head, request, query, column) : -1;
        const int64_t index = page >= 0 ? first_page + page : -1;
        const uint32_t members = __match_any_sync(kAllLanes, static_cast<unsigned long long>(index));
        if (page < 0 || __ffs(members) - 1 != lane) continue;
        atomicOr(const_cast<uint32_t*>(page_words(p, head, bits, page)) + query / 32 - bits.first_word,
                 members);
    }
}

}  // namespace

cudaError_t launch_page_incidence(const PageListParams& p, cudaStream_t stream) {
    clear_lists<<<264, kThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    const int64_t windows = int64_t{p.num_kv_heads} * ((p.total_q + 31) / 32);
    if (windows == 0 || p.batch_size == 0) return cudaSuccess;
    return launch_dependent(collect_members, 1, windows, kCollectThreads, 0, stream, p);
}

}  // namespace pageweaver
