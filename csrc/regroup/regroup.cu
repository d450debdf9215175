// Online grouping: the bounded greedy of Eq. 6 inside windows of 64 or 128 consecutive queries, and the
// unions of the groups that it makes. Ids are those of csrc/search/greedy.cpp, exactly, for any context
// length.
//
// Grid: a CTA a window of one KV head, a warp for each group of 8 queries in it.
//
// What keeps a step short: nothing in it refers to pages. A query's row is a word of up to 32 bits, one for
// each of its columns; overlaps[j][i] has those bits of row i whose page row j selected too. The pages of row
// i that the open group has not read are then whole[i] & ~overlaps[j][i] & ..., over the rows j taken so far,
// and its cost is a population count:
//
//   REDUX of (cost, row)  ->  a row of overlaps, 1 to 4 words a lane  ->  AND, BMMA, minimum  ->  REDUX
//
// One warp takes the steps of a window, 2 or 4 queries a lane. Setting up, by all warps: pages of the window
// in a table of row masks (bit = row), then 16 x 32 bit transposes of it into overlaps. It needs nothing of
// plan_groups and runs beside it; marking pages for packing, which does, is for the warps that do not search.
//
// Where the call may choose (window_choices), a window whose rounds no order could make much fewer keeps its
// order; in the others three warps search a window of 128 and its two halves at once. A search that gains
// nothing in its first slots gives up, and that of the window half way too, unless what
// it gains is worth holding up the call. Unions are built in the order of the halves as it is found, then in
// the window's own where that goes on, and again where another has far fewer rounds (Eq. 4).
//
// Shared memory: overlaps 32 KiB (window 128, topk 16; up to 64), pages 10 KiB, table 16 bytes a page, reused
// as scratch of the unions. Pages beyond what the table holds are taken in further passes.

#include <algorithm>
#include <type_traits>

#include "prepare/build_union.cuh"
#include "primitives/launch.cuh"
#include "primitives/mbarrier.cuh"
#include "regroup/search.cuh"

namespace pageweaver {
namespace {

// A warp for every group that a window can have.
constexpr int kMinGroup = 8;
template <int kWindow>
constexpr int kWarps = kWindow / kMinGroup;
template <int kWindow>
constexpr int kThreads = kWarps<kWindow> * kWarp;
// Places of a row of pages: four more than it has, so that neighbours start in other banks.
template <typename Mask>
constexpr int kPageStride = 8 * sizeof(Mask) + 4;

constexpr int kGivenUp = 1 << 20;  // rounds, more than any window has

// Orders of a window, as window_choices names them.
enum Choice { kOriginal, kHalves, kWhole, kChoices };

// The rows below `rows` that are not among the first `taken` of `order`, ascending. By a warp.
__device__ inline void find_rest(const uint8_t* order, int taken, int rows, uint8_t* is_taken,
                                 uint8_t* rest) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int row = lane; row < rows; row += kWarp) is_taken[row] = 0;
    __syncwarp();
#pragma unroll 1
    for (int slot = lane; slot < taken; slot += kWarp) is_taken[order[slot]] = 1;
    __syncwarp();
    int found = 0;
#pragma unroll 1
    for (int base = 0; base < rows; base += kWarp) {
        const int row = base + lane;
        const bool is_free = row < rows && is_taken[row] == 0;
        const uint32_t free = __ballot_sync(kAllLanes, is_free);
        if (is_free) rest[found + __popc(free & ((1u << lane) - 1))] = static_cast<uint8_t>(row);
        found += __popc(free);
    }
    __syncwarp();
}

// Bit k of transposed[r] is bit r of rows[k], in the lower and the upper 16 bits each.
__device__ __forceinline__ void transpose_16x32(uint32_t (&rows)[16]) {
    const auto exchange = [&](auto distance, uint32_t mask) {
        constexpr int kDistance = decltype(distance)::value;
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            if (r & kDistance) continue;
            const uint32_t low = rows[r], high = rows[r + kDistance];
            rows[r] = (low & mask) | (high << kDistance & ~mask);
            rows[r + kDistance] = (low >> kDistance & mask) | (high & ~mask);
        }
    };
    exchange(std::integral_constant<int, 8>{}, 0x00ff00ffu);
    exchange(std::integral_constant<int, 4>{}, 0x0f0f0f0fu);
    exchange(std::integral_constant<int, 2>{}, 0x33333333u);
    exchange(std::integral_constant<int, 1>{}, 0x55555555u);
}

// Mask: as many bits as topk needs. kChooses: the call has window_choices. `capacity`: pages that the table
// holds; `builders`: warps with scratch.
template <typename Mask, int kWindow, bool kChooses>
__global__ void __launch_bounds__(kThreads<kWindow>, sizeof(Mask) == 2 ? 2 : 1)
    regroup(PrepareParams p, int capacity, int builders) {
    constexpr int kColumns = 8 * sizeof(Mask), kRowWords = kWindow / 32, kParts = kColumns / 16;
    constexpr int kLoads = kWindow * kColumns / kThreads<kWindow>;
    constexpr int kStride = kPageStride<Mask>;
    static_assert(kLoads * kThreads<kWindow> == kWindow * kColumns);
    extern __shared__ __align__(512) uint8_t raw_shared[];
    static_assert(Key<Mask, kWindow>::kRow <= 512);
    Mask* const overlaps = reinterpret_cast<Mask*>(raw_shared);
    int32_t* const pages = reinterpret_cast<int32_t*>(overlaps + kWindow * kWindow);
    uint32_t* const table = reinterpret_cast<uint32_t*>(pages + kWindow * kStride);
    const int table_stride = capacity + 1;  // the last page stands for all that are not in the table
    __shared__ uint32_t whole_rows[kWindow];
    __shared__ uint8_t orders[kChoices][kWindow];
    // Barriers: the order of the halves, or (first where there is but that) the window's own, has this group.
    __shared__ uint64_t found[1 + kChooses][kWarps<kWindow>];
    __shared__ int rounds[kChoices], group_rounds[1 + kChooses][kWarps<kWindow>], sampled_rounds,
        original_halves, least_rounds;
    __shared__ uint64_t halves_found;  // barrier: both are, and their rounds are counted
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

    const int head = blockIdx.x / p.max_windows, window = blockIdx.x % p.max_windows;
    if (threadIdx.x < kWindow) prefetch_ids(p, head, int64_t{window} * kWindow + threadIdx.x);
    const auto clear_table = [&] {
        for (int i = threadIdx.x; i < table_stride * kRowWords / 2; i += kThreads<kWindow>)
            reinterpret_cast<uint2*>(table)[i] = {0, 0};
    };
    clear_table();
    if (threadIdx.x < kWindow) orders[kOriginal][threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
    if (threadIdx.x < kChoices) rounds[threadIdx.x] = 0;
    if (threadIdx.x < (1 + kChooses) * kWarps<kWindow>)
        mbarrier_init(smem_address(&found[0][threadIdx.x]), 1);
    if (threadIdx.x == 0) {
        sampled_rounds = original_halves = least_rounds = 0;
        mbarrier_init(smem_address(&halves_found), 2);
    }

    // Window. This kernel runs beside plan_groups until it needs what that one writes: of few requests it
    // counts the windows itself.
    int request = 0, first_window = 0, live_windows = 0;
    if (p.batch_size <= kWarp) {
        const int queries = lane < p.batch_size ? query_count(p, lane) : 0;
        const int windows = (queries + kWindow - 1) / kWindow;
        const int end = warp_inclusive_sum(windows, lane);
        request = __popc(__ballot_sync(kAllLanes, end <= window));
        first_window = __shfl_sync(kAllLanes, end - windows, request % kWarp);
        live_windows = __shfl_sync(kAllLanes, end, kWarp - 1);
    } else {
        grid_dependency_wait();
        request = request_of(p.window_starts, p.batch_size, window);
        first_window = p.window_starts[request];
        live_windows = p.counters[kLiveWindows];
    }
    const bool is_live = window < live_windows;
    int32_t* const choice_out = kChooses ? p.window_choices + blockIdx.x : nullptr;
    static_assert(!kChooses || kWindow == 2 * kHalf);
    const Span span = is_live ? span_of(p, request, window - first_window, kWindow) : Span{0, 0};
    const int rows = span.last - span.first;

    // Pages
    if (rows > 0) {
        int own_pages[kLoads];
        const int64_t shift = position_shift(p, request);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>, row = edge / kColumns;
            // Without a branch, as visible_page is.
            const int page = visible_page(p, head, shift, span.first + min(row, rows - 1),
                                          min(edge % kColumns, p.topk - 1));
            own_pages[i] = (row < rows) & (edge % kColumns < p.topk) ? page : -1;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>;
            pages[edge / kColumns * kStride + edge % kColumns] = own_pages[i];
        }
    }

    // Costs are those of full tiles, two a group, also where a small call runs smaller ones.
    const int group_length = p.queries_per_tile * p.tiles_per_group, tile = group_length / 2;

    // Rounds of the original order, by the pages in the table, and a bound below which no order gets: that of
    // one in which the rows of each page stand together.
    const auto count_pages = [&] {
        const int shift = __ffs(tile) - 1;
        const uint32_t first_rows = 0xffffffffu / (0xffffffffu >> (32 - min(tile, 32)));  // of the tiles
        int own_rounds = 0, own_least = 0;
#pragma unroll 1
        for (int page = threadIdx.x; page < capacity; page += kThreads<kWindow>) {
            int selecting = 0;
            bool is_read = false;
#pragma unroll
            for (int word = 0; word < kRowWords; ++word) {
                uint32_t tiles = table[word * table_stride + page];
                selecting += __popc(tiles);
                for (int step = 1; step < min(tile, 32); step *= 2) tiles |= tiles >> step;
                tiles &= first_rows;
                // A tile of 64 rows is two words.
                const bool counts = tile <= 32 || word % 2 == 0 || !is_read;
                is_read = tiles != 0;
                if (counts) own_rounds += __popc(tiles);
            }
            own_least += (selecting + tile - 1) >> shift;
        }
        own_rounds = __reduce_add_sync(kAllLanes, own_rounds);
        own_least = __reduce_add_sync(kAllLanes, own_least);
        if (lane == 0) {
            atomicAdd(&rounds[kOriginal], own_rounds);
            atomicAdd(&least_rounds, own_least);
        }
    };

    // Overlaps
    // By whole warps, 32 pages each; a pass begins with a word of marks.
    const auto mark = [&](int first_page, int thread, int threads) {
#pragma unroll 1
        for (int base = thread - lane; base < min(capacity, p.max_pages - first_page); base += threads) {
            const int page = base + lane;
            uint32_t selecting = 0;
            if (page < min(capacity, p.max_pages - first_page))
#pragma unroll
                for (int word = 0; word < kRowWords; ++word) selecting |= table[word * table_stride + page];
            const uint32_t selected = __ballot_sync(kAllLanes, selecting != 0);
            if (lane == 0)
                mark_pages(p, int64_t{head} * p.batch_size + request, (first_page + base) / 32, selected);
        }
    };
    const uint32_t table_at = smem_address(table);
    int first_page = 0;
    for (; is_live; first_page += capacity) {
        __syncthreads();
        uint32_t bits_of[kLoads], named[kLoads];  // all of them under way together
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>, row = edge / kColumns;
            const uint32_t page = pages[row * kStride + edge % kColumns] - first_page;
            // The last place stays 0.
            bits_of[i] = page < capacity ? 1u << (row % 32) : 0;
            named[i] = atomic_or_shared(
                table_at + (row / 32 * table_stride + min(page, uint32_t(capacity))) * 4, bits_of[i]);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>, row = edge / kColumns;
            // A page that the row has named already counts once.
            const uint32_t ballot = __ballot_sync(kAllLanes, (bits_of[i] & ~named[i]) != 0);
            if (edge % kColumns == 0) {
                const uint32_t bits = kColumns == 32 ? ballot : ballot >> (lane & 16) & 0xffffu;
                whole_rows[row] = first_page > 0 ? whole_rows[row] | bits : bits;
            }
        }
        __syncthreads();
        if constexpr (kChooses) count_pages();
#pragma unroll 1
        for (int task = threadIdx.x; task < kWindow * kRowWords * kParts; task += kThreads<kWindow>) {
            const int row = task % kWindow, word = task / kWindow % kRowWords,
                      part = task / kWindow / kRowWords;
            uint32_t bits[16];
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const uint32_t page = pages[row * kStride + part * 16 + k] - first_page;
                bits[k] = table[word * table_stride + min(page, uint32_t(capacity))];
            }
            transpose_16x32(bits);
            uint16_t* const target =
                reinterpret_cast<uint16_t*>(overlaps) + (word * 32 * kWindow + row) * kParts + part;
            const auto write = [&](auto is_first) {
#pragma unroll
                for (int r = 0; r < 32; ++r) {
                    uint16_t& value = target[r * kWindow * kParts];
                    const auto found = static_cast<uint16_t>(r < 16 ? bits[r] : bits[r - 16] >> 16);
                    value = decltype(is_first)::value ? found : value | found;
                }
            };
            if (first_page == 0)
                write(std::true_type{});
            else
                write(std::false_type{});
        }
        __syncthreads();
        if (first_page + capacity >= p.max_pages) break;
        grid_dependency_wait();
        mark(first_page, threadIdx.x, kThreads<kWindow>);
        __syncthreads();
        clear_table();
    }

    // Search
    const int groups = (rows + group_length - 1) / group_length;
    const bool has_halves = kChooses && kHalf >= group_length;
    // A bound far below the rounds of the original order leaves room for what a search costs.
    const bool is_sought = !kChooses || (is_live && 256 * least_rounds < p.sought_below * rounds[kOriginal]);
    const int searchers = !is_live || !is_sought ? 0 : has_halves ? 3 : 1, builder = warp - searchers;
    const uint8_t* const original = orders[kOriginal];
    int live_groups = 0, first_group = 0;
    const auto find_groups = [&] {
        live_groups = p.counters[kLiveGroups];
        first_group = p.group_starts[request] + (window - first_window) * (kWindow / group_length);
    };
    if (kChooses || builder >= 0) grid_dependency_wait();
    if (builder >= 0) {
        // Mark pages for packing
        const int thread = threadIdx.x - searchers * kWarp, threads = kThreads<kWindow> - searchers * kWarp;
        if (is_live) mark(first_page, thread, threads);
        named_barrier_sync(1, threads);
        pages_are_marked(p, thread == 0);
        find_groups();
        constexpr int kClearing = kWarps<kWindow> / 2;  // never among those that search
        for (int group = live_groups + window * kClearing + warp - kClearing;
             warp >= kClearing && group < p.max_groups; group += p.max_windows * kClearing)
            clear_group(p, head, group, lane);
        if (!is_live) {
            if (kChooses && threadIdx.x == 0) *choice_out = kOriginal;
            return;
        }
        if (kChooses && !is_sought && thread == 0) *choice_out = kOriginal;
    } else if (warp == 0) {
        if constexpr (kChooses) find_groups();
        // The second half of this search holds up the call. It pays where the first half has far fewer rounds
        // than the best first slots of the halves, or where rounds are so many that a few per cent do.
        const auto goes_on = [&] {
            if (!has_halves || rows < kHalf + kSample) return true;
            int own = 0, edges = 0;
#pragma unroll
            for (int slot = lane; slot < kHalf; slot += kWarp)
                own += count_rounds<Mask, kWindow>(overlaps, whole_rows, orders[kWhole], slot, kHalf, tile);
            for (int row = lane; row < rows; row += kWarp) edges += __popc(whole_rows[row]);
            edges = __reduce_add_sync(kAllLanes, edges);
            mbarrier_wait(smem_address(&halves_found), 0);
            return 6 * own < 5 * sampled_rounds || 16 * rounds[kHalves] > 9 * edges;
        };
        // No group is built of a search that may be given up.
        const int held = has_halves ? kHalf : kSample;
        if (!search<Mask, kWindow, kWindow / kWarp, kChooses>(overlaps, whole_rows, 0, rows, group_length,
                                                              tile, p.by_rounds, original, orders[kWhole],
                                                              found[kChooses], held, goes_on) &&
            lane == 0) {
            atomicAdd(&rounds[kWhole], kGivenUp);
            for (int g = 0; g < groups; ++g) mbarrier_arrive(smem_address(&found[kChooses][g]));
        }
    } else if constexpr (kChooses) {
        find_groups();
        const int first_row = (warp - 1) * kHalf, slots = min(rows - first_row, kHalf);
        uint8_t* const order = orders[kHalves] + first_row;
        uint64_t* const own_found = found[0] + first_row / group_length;
        if (!search<Mask, kWindow, kHalf / kWarp, true>(overlaps, whole_rows, first_row, slots, group_length,
                                                        tile, p.by_rounds, original + first_row, order,
                                                        own_found, kSample, [] { return true; })) {
            for (int slot = lane; slot < slots; slot += kWarp) order[slot] = original[first_row + slot];
            __syncwarp();
            for (int g = lane; g * group_length < slots; g += kWarp)
                mbarrier_arrive(smem_address(&own_found[g]));
            if (lane == 0) atomicAdd(&original_halves, 1);
        } else if (slots <= 0 && lane == 0) {
            atomicAdd(&original_halves, 1);
        }
        __syncwarp();
#pragma unroll 1
        for (int slot = lane; slot < kHalf; slot += kWarp) {
            const int part = count_rounds<Mask, kWindow>(overlaps, whole_rows, order, slot, slots, tile);
            if (lane == 0) atomicAdd(&rounds[kHalves], part);
            if (lane == 0 && slot < kSample) atomicAdd(&sampled_rounds, part);
        }
        if (lane == 0) mbarrier_arrive(smem_address(&halves_found));
    }

    // Unions, of groups as they are found; again, where another order turns out to be better
    const SlotOf slot_of(p.topk);
    const uint32_t pages_at = smem_address(pages);
    int own_place = builder, step = min(builders, kWarps<kWindow> - searchers);
    int choice = !is_sought ? kOriginal : has_halves ? kHalves : kWhole;
    bool is_chosen = !kChooses || !is_sought;
    while (true) {
        const bool is_whole = choice == kWhole;
        // Unions of the halves stand until it is known that the window's own search goes on.
        const bool clears_late = has_halves && is_whole;
#pragma unroll 1
        for (int g = own_place < 0 || own_place >= step ? groups : own_place; g < groups; g += step) {
            const int first_slot = g * group_length, slots = min(rows - first_slot, group_length);
            const int group = first_group + g;
            if (group >= live_groups) break;  // only where boundaries pass total_q
            uint32_t* const scratch = table + own_place * union_words(p);
            if (!clears_late) clear_union(p, head, group, scratch);
            // Which rows are in a window's last group is known before their order is: their pages are read
            // then. Nothing else uses these two arrays where the call does not choose.
            const bool is_rest = !kChooses && g > 0 && g == groups - 1;
            uint8_t *const places = orders[kHalves], *const rest = orders[kOriginal];
            const int waited_for = is_rest ? g - 1 : g;
            if (!kChooses || !is_chosen)
                mbarrier_wait(smem_address(&found[kChooses && is_whole][waited_for]), 0);
            // Lanes must agree: what they read may change meanwhile.
            if (kChooses && __any_sync(kAllLanes, is_whole && rounds[kWhole] >= kGivenUp)) break;
            if (clears_late) clear_union(p, head, group, scratch);
            if (is_rest) find_rest(orders[kWhole], first_slot, rows, places, rest);
            const uint8_t* const order = orders[choice] + first_slot;
            const uint32_t order_at = smem_address(is_rest ? rest : order);
            const int count = collect_pages(p, slot_of, slots, scratch, [&](int slot, int column) {
                return load_page(pages_at +
                                 (load_byte(order_at + slot) * kStride + column) * sizeof(int32_t));
            });
            if (is_rest) {
                mbarrier_wait(smem_address(&found[0][g]), 0);
                for (int slot = lane; slot < slots; slot += kWarp)
                    places[order[slot]] = static_cast<uint8_t>(slot);
                __syncwarp();
            }
            const int found_rounds =
                write_union(p, slot_of, head, group, slots, count, scratch,
                            [&](int slot) { return is_rest ? int{places[rest[slot]]} : slot; });
            if (head == 0 && lane == 0)
                note_group(p, group, request, {span.first + first_slot, span.first + first_slot + slots});
#pragma unroll 1
            for (int slot = lane; slot < slots; slot += kWarp)
                p.written_ids[int64_t{head} * p.total_q + span.first + first_slot + slot] =
                    span.first + order[slot];
            if (lane == 0 && is_chosen) count_size(p, found_rounds);
            if (is_chosen) continue;
            if (lane == 0) group_rounds[kChooses && is_whole][g] = found_rounds;
            for (int slot = is_whole ? first_slot : rows; slot < first_slot + slots; slot += kWarp) {
                const int part = count_rounds<Mask, kWindow>(overlaps, whole_rows, orders[kWhole],
                                                             slot + lane, first_slot + slots, tile);
                if (lane == 0) atomicAdd(&rounds[kWhole], part);
            }
        }
        if (!kChooses || is_chosen) return;
        if (!is_whole) {
            choice = kWhole;
            continue;
        }
        __syncthreads();
        // Building again holds up the whole call: it has to be worth it.
        const int other = has_halves && rounds[kHalves] < rounds[kOriginal] ? kHalves : kOriginal;
        if (16 * rounds[other] < 15 * rounds[kWhole]) choice = other;
        if (threadIdx.x == 0) *choice_out = choice;
        const bool has_whole = rounds[kWhole] < kGivenUp;
        const bool is_built =
            has_whole ? choice == kWhole : has_halves && (choice == kHalves || original_halves == 2);
        if (is_built) {
            for (int g = builder < 0 ? groups : builder; g < groups && first_group + g < live_groups;
                 g += kWarps<kWindow> - searchers)
                if (lane == 0) count_size(p, group_rounds[kChooses && has_whole][g]);
            return;
        }
        // Those that searched build too.
        own_place = warp, step = min(builders, kWarps<kWindow>);
        is_chosen = true;
    }
}

template <typename Mask, int kWindow, bool kChooses = false>
cudaError_t launch(const PrepareParams& p, cudaStream_t stream) {
    constexpr int64_t kMaxShared = 227 * 1024 - 2048;  // what static arrays take stays free
    constexpr int64_t kFixed = kWindow * (kWindow * sizeof(Mask) + kPageStride<Mask> * sizeof(int32_t));
    constexpr int64_t kPageBytes = kWindow / 8;
    const int64_t free = kMaxShared - kFixed;
    const int64_t scratch = std::max<int64_t>(1, sizeof(uint32_t) * union_words(p));
    if (scratch > free) return cudaErrorInvalidValue;
    // In passes of whole words of marks.
    const int64_t most = free / kPageBytes - 1,
                  capacity = std::max(1, p.max_pages) <= most ? std::max(1, p.max_pages) : most / 32 * 32;
    const int64_t builders = std::min<int64_t>(
        {kWindow / (p.queries_per_tile * p.tiles_per_group), kWarps<kWindow>, free / scratch});
    const int64_t shared = kFixed + std::max((capacity + 1) * kPageBytes, builders * scratch);
    cudaError_t error = prefer_shared_memory(regroup<Mask, kWindow, kChooses>);
    if (error == cudaSuccess) error = allow_shared_memory(regroup<Mask, kWindow, kChooses>, kMaxShared);
    if (error != cudaSuccess) return error;
    return launch_dependent(regroup<Mask, kWindow, kChooses>, 1, int64_t{p.num_kv_heads} * p.max_windows,
                            kThreads<kWindow>, shared, stream, p, static_cast<int>(capacity),
                            static_cast<int>(builders));
}

}  // namespace

cudaError_t launch_regroup(const PrepareParams& p, cudaStream_t stream) {
    const auto with_mask = [&](auto mask) {
        using Mask = decltype(mask);
        if (p.window == 128)
            return p.window_choices ? launch<Mask, 128, true>(p, stream) : launch<Mask, 128>(p, stream);
        if (p.window == 64 && !p.window_choices) return launch<Mask, 64>(p, stream);
        return cudaErrorInvalidValue;  // supported windows: 64 and 128, the latter to choose
    };
    return p.topk <= 16 ? with_mask(uint16_t{}) : with_mask(uint32_t{});
}

}  // namespace pageweaver
