// Work lists: common and exclusive members of every page, cut into units, pairs first and the largest first.
// The same lists as strategies/page_union/pairing.py makes, place for place.
//
//   size_lists    one warp a page: its place in packed_v, list sizes, members before each block of 256
//                 queries, units of each class
//   order_units   one warp a class: places of units and of their members, pairs first, then single pages
//                 round after round; of each by class and then by list
//   fill_lists    one warp a query: each edge finds its list, its rank there by counting bits, and its slot
//
// A page is read once or twice by a warp, a query once; nothing is sorted, and no order is left to chance.

#include "page_union/device.cuh"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
constexpr int kOrderThreads = 32 * kClasses;

__device__ __forceinline__ int unit_queries(const PageListParams& p) {
    return kUnitTiles * p.queries_per_tile;
}

// Class of a unit of `size` members.
__device__ __forceinline__ int unit_class(const PageListParams& p, int size, int is_common) {
    return (size + p.queries_per_tile - 1) / p.queries_per_tile + kUnitTiles * is_common;
}

__global__ void __launch_bounds__(kThreads) size_lists(PageListParams p) {
    grid_dependency_wait();
    const int lane = threadIdx.x % 32;
    const int64_t pages = int64_t{p.batch_size} * p.max_pages;
    const int64_t index = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
    if (index >= p.num_kv_heads * pages) return;
    const int head = static_cast<int>(index / pages), request = static_cast<int>(index % pages / p.max_pages);
    const int page = static_cast<int>(index % p.max_pages), mate = p.partners[index];
    const RequestBits bits = request_bits(p, request);
    const uint32_t* own_words = page_words(p, head, bits, page);
    const uint32_t* mate_words = page_words(p, head, bits, max(mate, 0));
    int2* const prefixes = reinterpret_cast<int2*>(p.list_prefixes) + head * p.head_blocks + bits.block_base +
                           int64_t{page} * bits.blocks;
    int sizes[2] = {0, 0};
    uint32_t members = 0;
    for (int base = 0; base < bits.words; base += 32) {
        const int w = base + lane;
        const uint32_t own = w < bits.words ? own_words[w] : 0;
        const uint32_t other = w < bits.words && mate >= 0 ? mate_words[w] : 0;
        members |= own;
        // Both counts in one word: 32 words hold at most 1,024 members.
        const int common = page < mate ? __popc(list_word(own, other, true)) : 0;
        const int counts = __popc(list_word(own, other, false)) | common << 16;
        int inclusive = counts;
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(kAllLanes, inclusive, step);
            if (lane >= step) inclusive += before;
        }
        const int before = inclusive - counts;
        if (lane % kBlockWords == 0 && w < bits.words)
            prefixes[w / kBlockWords] = make_int2(sizes[0] + (before & 0xffff), sizes[1] + (before >> 16));
        const int all = __shfl_sync(kAllLanes, inclusive, 31);
        sizes[0] += all & 0xffff;
        sizes[1] += all >> 16;
    }
    const bool is_selected = __any_sync(kAllLanes, members != 0);
    if (lane >= 2) return;
    // A place in packed_v: that of the page in its round, or, where one round has no room for all pages but
    // for all edges, as pages turn up.
    if (lane == 0) {
        const bool is_numbered = p.rounds == 1 && p.num_kv_heads * pages > p.max_packed;
        const int64_t place = int64_t{head} * p.round_pages + index % pages % p.round_pages;
        p.packed_slots[index] = !is_selected  ? -1
                                : is_numbered ? atomicAdd(&p.counters[kPackedCount], 1)
                                              : static_cast<int32_t>(place);
    }
    const int size = lane == 0 ? sizes[0] : sizes[1];
    p.list_sizes[2 * index + lane] = size;
    unsigned long long* const totals = reinterpret_cast<unsigned long long*>(p.class_totals) +
                                       (int64_t{head} * p.chunks + index % pages / p.chunk_pages) * kClasses;
    const auto add = [&](int unit_class, int units, int members) {
        if (units > 0)
            atomicAdd(&totals[unit_class - 1], static_cast<unsigned long long>(units) << 32 | members);
    };
    const int whole = size / unit_queries(p), rest = size % unit_queries(p);
    add(kUnitTiles * (1 + lane), whole, whole * unit_queries(p));
    add(unit_class(p, rest, lane), rest > 0, rest);
}

// A CTA places the units of some pages of one head; warp w those of class kClasses - w.
__global__ void __launch_bounds__(kOrderThreads) order_units(PageListParams p) {
    grid_dependency_wait();
    // In order of class, descending; units << 32 | members. Of pairs all, of single pages those of the round
    // and of the rounds before.
    __shared__ uint64_t all_units[kClasses], earlier_units[kClasses];
    const int head = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_class = kClasses - warp;
    const auto warp_sum = [](uint64_t value) {
        for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
        return value;
    };
    const bool is_single = own_class <= kUnitTiles;
    const int round_chunks = p.rounds == 1 ? p.chunks : p.round_pages / p.chunk_pages;
    const int round = chunk / round_chunks;
    const int first_chunk = is_single ? round * round_chunks : 0;
    const int end_chunk = is_single ? first_chunk + round_chunks : p.chunks;
    uint64_t all = 0, before = 0, earlier = 0;
    const uint64_t* totals = p.class_totals + int64_t{head} * p.chunks * kClasses + own_class - 1;
    for (int c = lane; c < p.chunks; c += 32) {
        const uint64_t value = totals[int64_t{c} * kClasses];
        if (c < first_chunk)
            earlier += value;
        else if (c < end_chunk)
            all += value;
        if (c >= first_chunk && c < chunk) before += value;
    }
    all = warp_sum(all);
    earlier = warp_sum(earlier);
    if (lane == 0) all_units[warp] = all;
    if (lane == 0) earlier_units[warp] = earlier;
    __syncthreads();
    // Places begin behind the rounds before, all higher classes, and this class in the chunks before.
    uint64_t place =
        warp_sum((lane < warp ? all_units[lane] : 0) + (is_single ? earlier_units[lane] : 0) + before);
    const uint64_t total = warp_sum(all_units[lane] + earlier_units[lane]),
                   pairs = warp_sum(lane < kUnitTiles ? all_units[lane] : 0);
    static_assert(kClasses == 32, "a lane a class");

    int32_t* const unit_pages = p.unit_pages + int64_t{head} * p.max_units * 2;
    int32_t* const unit_offsets = p.unit_offsets + int64_t{head} * (p.max_units + 1);
    int32_t* const unit_requests = p.unit_requests + int64_t{head} * p.max_units;
    const int64_t pages = int64_t{p.batch_size} * p.max_pages;
    const int64_t first_page = int64_t{chunk} * p.chunk_pages;
    const int capacity = unit_queries(p);
    for (int base = 0; base < 2 * p.chunk_pages; base += 32) {
        const int64_t at = first_page + (base + lane) / 2;  // request * max_pages + page
        const int is_common = lane % 2;
        const int size = at < pages ? p.list_sizes[2 * (head * pages + at) + is_common] : 0;
        const int whole = size / capacity, rest = size % capacity;
        const bool has_whole = whole > 0 && kUnitTiles * (1 + is_common) == own_class;
        const bool has_rest = rest > 0 && unit_class(p, rest, is_common) == own_class;
        const uint64_t own =
            (static_cast<uint64_t>(has_whole ? whole : 0) << 32 | (has_whole ? whole * capacity : 0)) +
            (has_rest ? uint64_t{1} << 32 | rest : 0);
        if (__ballot_sync(kAllLanes, own != 0) == 0) continue;
        uint64_t inclusive = own;
        for (int step = 1; step < 32; step *= 2) {
            const uint64_t left = __shfl_up_sync(kAllLanes, inclusive, step);
            if (lane >= step) inclusive += left;
        }
        const uint64_t start = place + inclusive - own;
        int2* const starts = reinterpret_cast<int2*>(p.list_starts) + 2 * (head * pages + at) + is_common;
        const int first_member = static_cast<int>(start);
        if (has_whole) starts->x = first_member;
        // Behind full units of the same class; less the members that those hold, here or elsewhere.
        if (has_rest) starts->y = first_member + (has_whole ? whole * capacity : 0) - whole * capacity;
        const int first_unit = static_cast<int>(start >> 32), units = static_cast<int>(own >> 32);
        const int page = static_cast<int>(at % p.max_pages), request = static_cast<int>(at / p.max_pages);
        const int mate = units > 0 && is_common ? p.partners[head * pages + at] : -1;
        for (int i = 0; i < units; ++i) {
            reinterpret_cast<int2*>(unit_pages)[first_unit + i] = make_int2(page, mate);
            unit_offsets[first_unit + i] = first_member + i * capacity;
            unit_requests[first_unit + i] = request;
        }
        place += __shfl_sync(kAllLanes, inclusive, 31);
    }

    const int units = static_cast<int>(total >> 32), members = static_cast<int>(total);
    int32_t* const counts = p.unit_counts + head;
    if (threadIdx.x == 0 && chunk == 0) counts[0] = static_cast<int>(pairs >> 32);
    if (threadIdx.x == 0 && chunk % round_chunks == 0) counts[(round + 1) * p.num_kv_heads] = units;
    if (chunk < p.chunks - 1) return;
    for (int unit = units + threadIdx.x; unit <= p.max_units; unit += kOrderThreads) {
        unit_offsets[unit] = members;
        if (unit < p.max_units) unit_pages[2 * unit] = unit_pages[2 * unit + 1] = -1;
    }
}

__global__ void __launch_bounds__(kThreads) fill_lists(PageListParams p) {
    grid_dependency_wait();
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
    if (row >= int64_t{p.num_kv_heads} * p.total_q) return;
    const int head = static_cast<int>(row / p.total_q), query = static_cast<int>(row % p.total_q);
    const int request = request_of(p, query);
    int page = request >= 0 && lane < p.topk ? selected_page(p, head, request, query, lane) : -1;
    // The first of equal ones stays.
    if (__ffs(__match_any_sync(kAllLanes, page)) - 1 != lane) page = -1;
    if (__ballot_sync(kAllLanes, page >= 0) == 0) {
        if (lane == 0) p.partial_counts[row] = 0;
        return;
    }
    const RequestBits bits = request_bits(p, request);
    const int64_t index = (int64_t{head} * p.batch_size + request) * p.max_pages + max(page, 0);
    const int mate = page >= 0 ? p.partners[index] : -1;
    const uint32_t* own_words = page_words(p, head, bits, max(page, 0));
    const uint32_t* mate_words = page_words(p, head, bits, max(mate, 0));
    const int word = query / 32 - bits.first_word, bit = query % 32;
    const bool is_common = mate >= 0 && mate_words[word] >> bit & 1;
    // A common edge is written once, by the lower page of the pair.
    const bool is_kept = page >= 0 && !(is_common && page > mate);
    const uint32_t kept = __ballot_sync(kAllLanes, is_kept);
    if (lane == 0) p.partial_counts[row] = __popc(kept);
    // Slots go by page: those kept below this one.
    int slot = 0;
    for (uint32_t rest = kept; rest; rest &= rest - 1)
        slot += __shfl_sync(kAllLanes, page, __ffs(rest) - 1) < page;
    if (!is_kept) return;

    const int block = word / kBlockWords;
    const int2 prefix = reinterpret_cast<const int2*>(
        p.list_prefixes)[head * p.head_blocks + bits.block_base + int64_t{page} * bits.blocks + block];
    int rank = is_common ? prefix.y : prefix.x;
    for (int w = block * kBlockWords; w <= word; ++w) {
        const uint32_t members = list_word(own_words[w], mate >= 0 ? mate_words[w] : 0, is_common);
        rank += __popc(w < word ? members : members & ((1u << bit) - 1));
    }
    const int64_t list = 2 * index + is_common;
    const int size = p.list_sizes[list], capacity = unit_queries(p);
    const int2 starts = reinterpret_cast<const int2*>(p.list_starts)[list];
    const int64_t member =
        int64_t{head} * p.total_q * p.topk + rank + (rank < size / capacity * capacity ? starts.x : starts.y);
    p.unit_queries[member] = query;
    p.unit_slots[member] = slot;
}

}  // namespace

cudaError_t launch_page_incidence(const PageListParams& params, cudaStream_t stream);
cudaError_t launch_pair_pages(const PageListParams& params, cudaStream_t stream);

cudaError_t launch_page_lists(const PageListParams& p, cudaStream_t stream) {
    cudaError_t error = launch_page_incidence(p, stream);
    if (error == cudaSuccess) error = launch_pair_pages(p, stream);
    const int64_t pages = int64_t{p.num_kv_heads} * p.batch_size * p.max_pages;
    const int64_t rows = int64_t{p.num_kv_heads} * p.total_q;
    if (error == cudaSuccess && pages > 0)
        error =
            launch_dependent(size_lists, 1, (pages * 32 + kThreads - 1) / kThreads, kThreads, 0, stream, p);
    if (error == cudaSuccess)
        error =
            launch_dependent(order_units, 1, int64_t{p.num_kv_heads} * p.chunks, kOrderThreads, 0, stream, p);
    if (error == cudaSuccess && rows > 0)
        error =
            launch_dependent(fill_lists, 1, (rows * 32 + kThreads - 1) / kThreads, kThreads, 0, stream, p);
    return error;
}

}  // namespace pageweaver
