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
// Where the call may choose (window_choices), three warps search a window of 128 and its two halves at once.
// A search that gains nothing in its first slots gives up, and that of the window half way too, unless what
// it gains is worth holding up the call. Unions are built in the window's own order as it is found; that of
// its halves or the original one takes its place where it gave up or has far more rounds (Eq. 4).
//
// Shared memory: overlaps 32 KiB (window 128, topk 16; up to 64), pages 10 KiB, table 16 bytes a page, reused
// as scratch of the unions. Pages beyond what the table holds are taken in further passes.

#include <algorithm>
#include <type_traits>

#include "prepare/build_union.cuh"
#include "primitives/launch.cuh"
#include "primitives/mbarrier.cuh"

namespace pageweaver {
namespace {

// A warp for every group that a window can have.
constexpr int kMinGroup = 8;
template <int kWindow>
constexpr int kWarps = kWindow / kMinGroup;
template <int kWindow>
constexpr int kThreads = kWarps<kWindow> * kWarp;
constexpr uint32_t kTaken = 0x80000000u;
// Places of a row of pages: four more than it has, so that neighbours start in other banks.
template <typename Mask>
constexpr int kPageStride = 8 * sizeof(Mask) + 4;

// Slots after which a search may give up, and the half of a window of 128, where the one of all of it may.
constexpr int kSample = kWarp, kHalf = 2 * kSample;
constexpr int kGivenUp = 1 << 20;  // rounds, more than any window has

// Orders of a window, as window_choices names them.
enum Choice { kOriginal, kHalves, kWhole, kChoices };

// A key is (new pages of the subgroup, new pages of the group, row), costs in 6 bits each. The row stands
// where it is the row's offset in overlaps, in bytes.
template <typename Mask, int kWindow>
struct Key {
    static constexpr uint32_t kRow = kWindow * sizeof(Mask), kRows = kRow * (kWindow - 1);
    static constexpr uint32_t kGroupCost = kRow * kWindow, kSubgroupCost = kGroupCost << 6;
    static_assert(kSubgroupCost << 6 <= kTaken);
};

template <int kWords>
__device__ __forceinline__ void load_words(const void* source, uint32_t (&words)[kWords]) {
    static_assert(kWords == 1 || kWords == 2 || kWords == 4);
    if constexpr (kWords == 1) {
        words[0] = *static_cast<const uint32_t*>(source);
    } else if constexpr (kWords == 2) {
        const uint2 pair = *static_cast<const uint2*>(source);
        words[0] = pair.x, words[1] = pair.y;
    } else {
        const uint4 four = *static_cast<const uint4*>(source);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    }
}

// Counts the bits of each Mask that a lane holds, by one product of bits: masks lie as the left operand wants
// them, and the right one picks a lane's own. POPC would take 8 cycles for each mask.
template <typename Mask, int kPerLane>
struct OnesOf {
    static constexpr int kWords = kPerLane * sizeof(Mask) / 4;
    static constexpr bool kNarrow = sizeof(Mask) == 2;
    uint32_t even,
        odd;  // columns of the right operand: a lane's first masks of 16 (32) bits, its second ones

    __device__ explicit OnesOf(int lane) {
        const bool is_own = lane / 8 == lane % 4, is_odd = lane / 4 % 2;
        even = !is_own || is_odd ? 0 : kNarrow ? 0x0000ffffu : kAllLanes;
        odd = !is_own || !is_odd ? 0 : kNarrow ? 0xffff0000u : kAllLanes;
    }

    __device__ __forceinline__ void operator()(const uint32_t (&words)[kWords],
                                               uint32_t (&ones)[kPerLane]) const {
        uint32_t d[4];
        if constexpr (kWords == 4)
            asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc"
                " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                : "r"(words[0]), "r"(words[2]), "r"(words[1]), "r"(words[3]), "r"(even), "r"(odd), "r"(0));
        else
            asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc"
                " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
                : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                : "r"(words[0]), "r"(kWords == 2 ? words[kWords - 1] : 0u), "r"(kNarrow ? even | odd : even),
                  "r"(0));
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) ones[q] = d[kPerLane == 2 && !kNarrow ? 2 * q : q];
    }
};

// What the row of each lane's slot adds to the pages of its tile, over the warp's slots: rounds (Eq. 4).
template <typename Mask, int kWindow>
__device__ int count_rounds(const Mask* overlaps, const uint32_t* whole_rows, const uint8_t* order, int slot,
                            int slots, int tile) {
    uint32_t left = 0;
    if (slot < slots) {
        const int row = order[slot];
        left = whole_rows[row];
#pragma unroll 1
        for (int before = slot - slot % tile; before < slot; ++before)
            left &= ~uint32_t{overlaps[order[before] * kWindow + row]};
    }
    return __reduce_add_sync(kAllLanes, __popc(left));
}

// One warp orders `rows` rows of the window from `first_row` on; kPerLane * 32 rows at most, neighbours in a
// lane. Steps have no branch that lanes could take apart, and what does not lie between one minimum and the
// next stands behind the load and the product, in whose shadows it runs.
// original: where the search may give up; it does, and returns false, if its first slots need no fewer rounds
// than those of this order, or if goes_on(), asked after half a window, is false. found: barriers or null;
// arrives at one for every group that is filled, from `held` slots on.
template <typename Mask, int kWindow, int kPerLane, typename GoesOn>
__device__ bool search(const Mask* overlaps, const uint32_t* whole_rows, int first_row, int rows, int group,
                       int subgroup, bool by_rounds, const uint8_t* original, uint8_t* order, uint64_t* found,
                       int held, const GoesOn& goes_on) {
    using Keys = Key<Mask, kWindow>;
    constexpr int kWords = kPerLane * sizeof(Mask) / 4;
    const int lane = threadIdx.x % kWarp, own_row = first_row + lane * kPerLane;
    const uint8_t* const lane_overlaps = reinterpret_cast<const uint8_t*>(overlaps + own_row);
    const OnesOf<Mask, kPerLane> ones_of(lane);
    uint32_t whole[kWords] = {}, whole_costs[kPerLane], base[kPerLane], words[kWords], left[kWords];
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) {
        const bool exists = lane * kPerLane + q < rows;
        const uint32_t row = exists ? whole_rows[own_row + q] : 0;
        whole[q * kWords / kPerLane] |= row << (q * 32 * kWords / kPerLane % 32);
        base[q] = (exists ? 0 : kTaken) | (own_row + q) * Keys::kRow;
        whole_costs[q] = __popc(row) * Keys::kGroupCost;
    }
    int slot = 0, announced = 0;
    uint32_t row = kTaken;
    // Fills a slot with the row of the smallest key, and fetches what the rows share with that one.
    const auto take = [&](uint32_t key) {
        row = __reduce_min_sync(kAllLanes, key) & Keys::kRows;
        load_words(lane_overlaps + row, words);
        order[slot++] = static_cast<uint8_t>(row / Keys::kRow);
    };
    // The row just taken is no candidate any more.
    const auto retire = [&] {
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) {
            if (base[q] == row) base[q] |= kTaken;
        }
    };
    rows = __reduce_max_sync(kAllLanes, rows);  // the compiler then knows that lanes agree
    for (int last = 0; last < rows;) {
        const int first = last;
        last = min(first + group, rows);
        retire();
        uint32_t key = 0xffffffffu;
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) key = min(key, whole_costs[q] + base[q]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) left[w] = whole[w];
        take(key);
        // In a group's first subgroup both costs are one; a subgroup's first row goes by the group alone.
        const int by_group = by_rounds ? min(last, first + subgroup + 1) : last;
#pragma unroll 1
        while (slot < by_group) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) left[w] &= ~words[w];
            uint32_t ones[kPerLane];
            ones_of(left, ones);
            retire();
            key = 0xffffffffu;
#pragma unroll
            for (int q = 0; q < kPerLane; ++q) key = min(key, ones[q] * Keys::kGroupCost + base[q]);
            take(key);
        }
        uint32_t left_subgroup[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w) left_subgroup[w] = whole[w];
#pragma unroll 1
        while (slot < last) {
#pragma unroll
            for (int w = 0; w < kWords; ++w) left[w] &= ~words[w], left_subgroup[w] &= ~words[w];
            uint32_t ones[kPerLane], ones_subgroup[kPerLane];
            ones_of(left_subgroup, ones_subgroup);
            ones_of(left, ones);
            retire();
            key = 0xffffffffu;
#pragma unroll
            for (int q = 0; q < kPerLane; ++q)
                key =
                    min(key, ones_subgroup[q] * Keys::kSubgroupCost + (ones[q] * Keys::kGroupCost + base[q]));
            take(key);
        }
        if (original && first < kSample && last >= kSample) {
            __syncwarp();
            const auto count = [&](const uint8_t* rows_of) {
                return count_rounds<Mask, kWindow>(overlaps, whole_rows, rows_of, lane, kSample, subgroup);
            };
            if (count(order) >= count(original)) return false;
        }
        if (original && first < kHalf && last >= kHalf) {
            __syncwarp();
            if (!goes_on()) return false;
        }
        if (found && lane == 0 && (last >= held || last == rows))
            for (; announced * group < last; ++announced) mbarrier_arrive(smem_address(found + announced));
    }
    return true;
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

// Mask: as many bits as topk needs. `capacity`: pages that the table holds; `builders`: warps with scratch.
template <typename Mask, int kWindow>
__global__ void __launch_bounds__(kThreads<kWindow>, sizeof(Mask) == 2 ? 2 : 1)
    regroup(PrepareParams p, int capacity, int builders) {
    constexpr int kColumns = 8 * sizeof(Mask), kRowWords = kWindow / 32, kParts = kColumns / 16;
    constexpr int kLoads = kWindow * kColumns / kThreads<kWindow>;
    constexpr int kStride = kPageStride<Mask>;
    static_assert(kLoads * kThreads<kWindow> == kWindow * kColumns);
    extern __shared__ __align__(16) uint8_t raw_shared[];
    Mask* const overlaps = reinterpret_cast<Mask*>(raw_shared);
    int32_t* const pages = reinterpret_cast<int32_t*>(overlaps + kWindow * kWindow);
    uint32_t* const table = reinterpret_cast<uint32_t*>(pages + kWindow * kStride);
    const int table_stride = capacity + 1;  // the last page stands for all that are not in the table
    __shared__ uint32_t whole_rows[kWindow];
    __shared__ uint8_t orders[kChoices][kWindow];
    __shared__ uint64_t found[kWarps<kWindow>];  // barriers: the window's own order has this group
    __shared__ int rounds[kChoices], group_rounds[kWarps<kWindow>], sampled_rounds;
    __shared__ uint64_t halves_found;  // barrier: both are, and their rounds are counted
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

    const auto clear_table = [&] {
        for (int i = threadIdx.x; i < table_stride * kRowWords / 2; i += kThreads<kWindow>)
            reinterpret_cast<uint2*>(table)[i] = {0, 0};
    };
    clear_table();
    if (threadIdx.x < kWindow) orders[kOriginal][threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
    if (threadIdx.x < kChoices) rounds[threadIdx.x] = 0;
    if (threadIdx.x < kWarps<kWindow>) mbarrier_init(smem_address(&found[threadIdx.x]), 1);
    if (threadIdx.x == 0) {
        sampled_rounds = 0;
        mbarrier_init(smem_address(&halves_found), 2);
    }

    // Window. This kernel runs beside plan_groups until it needs what that one writes: of few requests it
    // counts the windows itself.
    const int head = blockIdx.x / p.max_windows, window = blockIdx.x % p.max_windows;
    int request = 0, first_window = 0, live_windows = 0;
    if (p.batch_size <= kWarp) {
        int queries = 0;
        if (lane < p.batch_size) queries = p.cu_seqlens_q[lane + 1] - p.cu_seqlens_q[lane];
        const int windows = (max(queries, 0) + kWindow - 1) / kWindow;
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
    int32_t* const choice_out = p.window_choices ? p.window_choices + blockIdx.x : nullptr;
    const Span span = is_live ? span_of(p, request, window - first_window, kWindow) : Span{0, 0};
    const int rows = span.last - span.first;

    // Pages
    if (is_live) {
        int own_pages[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>, row = edge / kColumns;
            const bool exists = row < rows && edge % kColumns < p.topk;
            own_pages[i] = exists ? visible_page(p, head, request, span.first + row, edge % kColumns) : -1;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>;
            pages[edge / kColumns * kStride + edge % kColumns] = own_pages[i];
        }
    }

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
    int first_page = 0;
    for (; is_live; first_page += capacity) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int edge = threadIdx.x + i * kThreads<kWindow>, row = edge / kColumns;
            const uint32_t page = pages[row * kStride + edge % kColumns] - first_page;
            bool is_new = false;
            if (page < capacity) {
                // A page that the row has named already counts once.
                const uint32_t bit = 1u << (row % 32);
                is_new = !(atomicOr(&table[row / 32 * table_stride + page], bit) & bit);
            }
            const uint32_t ballot = __ballot_sync(kAllLanes, is_new);
            if (edge % kColumns == 0) {
                const uint32_t bits = kColumns == 32 ? ballot : ballot >> (lane & 16) & 0xffffu;
                whole_rows[row] = first_page > 0 ? whole_rows[row] | bits : bits;
            }
        }
        __syncthreads();
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
    // Costs are those of full tiles, two a group, also where a small call runs smaller ones.
    const int group_length = p.queries_per_tile * p.tiles_per_group, tile = group_length / 2;
    const int groups = (rows + group_length - 1) / group_length;
    const bool chooses = choice_out, has_halves = kWindow > kHalf && chooses && kHalf >= group_length;
    const int searchers = !is_live ? 0 : has_halves ? 3 : 1, builder = warp - searchers;
    const uint8_t* const original = chooses ? orders[kOriginal] : nullptr;
    int live_groups = 0, first_group = 0;
    const auto find_groups = [&] {
        live_groups = p.counters[kLiveGroups];
        first_group = p.group_starts[request] + (window - first_window) * (kWindow / group_length);
    };
    if (builder >= 0) {
        // Mark pages for packing
        grid_dependency_wait();
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
            if (choice_out && threadIdx.x == 0) *choice_out = kOriginal;
            return;
        }
        for (int slot = thread; chooses && slot < kWindow; slot += threads) {
            const int part = count_rounds<Mask, kWindow>(overlaps, whole_rows, original, slot, rows, tile);
            if (lane == 0) atomicAdd(&rounds[kOriginal], part);
        }
    } else if (warp == 0) {
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
        const int held = has_halves ? kHalf : chooses ? kSample : 0;
        if (!search<Mask, kWindow, kWindow / kWarp>(overlaps, whole_rows, 0, rows, group_length, tile,
                                                    p.by_rounds, original, orders[kWhole], found, held,
                                                    goes_on) &&
            lane == 0) {
            atomicAdd(&rounds[kWhole], kGivenUp);
            for (int g = 0; g < groups; ++g) mbarrier_arrive(smem_address(&found[g]));
        }
    } else {
        const int first_row = (warp - 1) * kHalf, slots = min(rows - first_row, kHalf);
        uint8_t* const order = orders[kHalves] + first_row;
        if (!search<Mask, kWindow, kHalf / kWarp>(overlaps, whole_rows, first_row, slots, group_length, tile,
                                                  p.by_rounds, original + first_row, order, nullptr, 0,
                                                  [] { return true; }))
            for (int slot = lane; slot < slots; slot += kWarp) order[slot] = original[first_row + slot];
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
    int own_place = builder, step = min(builders, kWarps<kWindow> - searchers), choice = kWhole;
    for (bool is_chosen = !chooses;; is_chosen = true) {
#pragma unroll 1
        for (int g = own_place < 0 || own_place >= step ? groups : own_place; g < groups; g += step) {
            const int first_slot = g * group_length, slots = min(rows - first_slot, group_length);
            const int group = first_group + g;
            if (group >= live_groups) break;  // only where boundaries pass total_q
            if (choice == kWhole) mbarrier_wait(smem_address(&found[g]), 0);
            // Lanes must agree: what they read may change meanwhile.
            if (__any_sync(kAllLanes, !is_chosen && rounds[kWhole] >= kGivenUp)) break;
            const uint8_t* const order = orders[choice] + first_slot;
            if (head == 0 && lane == 0)
                note_group(p, group, request, {span.first + first_slot, span.first + first_slot + slots});
            for (int slot = lane; slot < slots; slot += kWarp)
                p.written_ids[int64_t{head} * p.total_q + span.first + first_slot + slot] =
                    span.first + order[slot];
            uint32_t* const scratch = table + own_place * union_words(p);
            collect_pages(p, slots, scratch,
                          [&](int slot, int column) { return pages[order[slot] * kStride + column]; });
            const int found_rounds = write_union(p, head, group, slots, scratch);
            if (lane == 0 && is_chosen) count_size(p, found_rounds);
            if (is_chosen) continue;
            if (lane == 0) group_rounds[g] = found_rounds;
            for (int slot = first_slot; slot < first_slot + slots; slot += kWarp) {
                const int part = count_rounds<Mask, kWindow>(overlaps, whole_rows, orders[choice],
                                                             slot + lane, first_slot + slots, tile);
                if (lane == 0) atomicAdd(&rounds[kWhole], part);
            }
        }
        if (is_chosen) return;
        __syncthreads();
        // Building again holds up the whole call: it has to be worth it.
        const int other = has_halves && rounds[kHalves] < rounds[kOriginal] ? kHalves : kOriginal;
        if (16 * rounds[other] < 15 * rounds[kWhole]) choice = other;
        if (threadIdx.x == 0) *choice_out = choice;
        if (choice == kWhole) {
            for (int g = builder < 0 ? groups : builder; g < groups && first_group + g < live_groups;
                 g += kWarps<kWindow> - searchers)
                if (lane == 0) count_size(p, group_rounds[g]);
            return;
        }
        // Those that searched build too.
        own_place = warp, step = min(builders, kWarps<kWindow>);
        if (builder < 0) {
            grid_dependency_wait();
            find_groups();
        }
    }
}

template <typename Mask, int kWindow>
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
    cudaError_t error = prefer_shared_memory(regroup<Mask, kWindow>);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(regroup<Mask, kWindow>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(shared));
    if (error != cudaSuccess) return error;
    return launch_dependent(regroup<Mask, kWindow>, 1, int64_t{p.num_kv_heads} * p.max_windows,
                            kThreads<kWindow>, shared, stream, p, static_cast<int>(capacity),
                            static_cast<int>(builders));
}

}  // namespace

cudaError_t launch_regroup(const PrepareParams& p, cudaStream_t stream) {
    const bool is_narrow = p.topk <= 16;
    if (p.window == 128)
        return is_narrow ? launch<uint16_t, 128>(p, stream) : launch<uint32_t, 128>(p, stream);
    if (p.window == 64) return is_narrow ? launch<uint16_t, 64>(p, stream) : launch<uint32_t, 64>(p, stream);
    return cudaErrorInvalidValue;  // supported windows: 64 and 128
}

}  // namespace pageweaver
