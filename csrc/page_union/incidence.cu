// Which queries selected which page, as bitmaps: from the selection as it comes to R_p for every page.
//
//   clear_lists      zeroes what later kernels count in or OR into
//   collect_members  one warp a query: drops what the contract ignores, sorts, sets the query's bit in each
//   page
//
// Setting bits needs no order, so the bitmaps, and all that follows from them, are the same every time.

#include "page_union/device.cuh"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
constexpr int kNothing = 0x7fffffff;

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
    fill(p.packed_slots, pages, -1);
    fill(p.partners, pages, -1);
    fill(p.class_totals, int64_t{p.num_kv_heads} * p.chunks * kClasses, uint64_t{0});
    fill(p.counters, kCounters, 0);
}

__global__ void __launch_bounds__(kThreads) collect_members(PageListParams p) {
    grid_dependency_wait();
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
    if (row >= int64_t{p.num_kv_heads} * p.total_q) return;
    const int head = static_cast<int>(row / p.total_q), query = static_cast<int>(row % p.total_q);
    const int request = request_of(p, query);

    int page = kNothing;
    if (request >= 0 && lane < p.topk) {
        const int id =
            p.q2k_indices[head * p.q2k_stride_head + query * p.q2k_stride_row + lane * p.q2k_stride_column];
        const int64_t position = int64_t{query} + p.seqused_k[request] - p.cu_seqlens_q[request + 1];
        if (id >= 0 && id < p.max_pages && int64_t{id} * kPageSize <= position) page = id;
    }
    // The first lane of equal ones stays; its rank among the others is its place.
    if (__ffs(__match_any_sync(kAllLanes, page)) - 1 != lane) page = kNothing;
    int rank = 0;
    for (int other = 0; other < p.topk; ++other) rank += __shfl_sync(kAllLanes, page, other) < page;
    const bool selected = page != kNothing;
    const int count = __popc(__ballot_sync(kAllLanes, selected));
    int32_t* const support = p.support + row * p.topk;
    if (lane >= count && lane < p.topk) support[lane] = -1;
    if (!selected) return;
    support[rank] = page;

    const RequestBits bits = request_bits(p, request);
    atomicOr(const_cast<uint32_t*>(page_words(p, head, bits, page)) + query / 32 - bits.first_word,
             1u << (query % 32));

    // A place in packed_v, as prepare/unions.cu gives them.
    const int64_t index = (int64_t{head} * p.batch_size + request) * p.max_pages + page;
    int32_t* const slot = p.packed_slots + index;
    if (int64_t{p.num_kv_heads} * p.batch_size * p.max_pages <= p.max_packed) {
        *slot = static_cast<int32_t>(index);
    } else if (*reinterpret_cast<volatile int32_t*>(slot) == -1 && atomicCAS(slot, -1, kClaimed) == -1) {
        *slot = atomicAdd(&p.counters[kPackedCount], 1);
    }
}

}  // namespace

cudaError_t launch_page_incidence(const PageListParams& p, cudaStream_t stream) {
    clear_lists<<<264, kThreads, 0, stream>>>(p);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    const int64_t rows = int64_t{p.num_kv_heads} * p.total_q;
    if (rows == 0) return cudaSuccess;
    return launch_dependent(collect_members, 1, (rows * 32 + kThreads - 1) / kThreads, kThreads, 0, stream,
                            p);
}

}  // namespace pageweaver
