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
//   REDUX of (cost, row)  ->  a row of overlaps, 2 to 4 words a lane  ->  AND, POPC, minimum  ->  REDUX
//
// One warp takes the steps of a window, 2 or 4 queries a lane. Setting up, by all warps: pages of the window
// in a table of row masks (bit = row), then 16 x 32 bit transposes of it into overlaps.
//
// Where the call may choose (window_choices), three warps search a window of 128 and its two halves at once,
// and the window takes the order with the fewest rounds (Eq. 4) of these and the original one.
//
// Shared memory: overlaps 32 KiB (window 128, topk 16; up to 64), pages 8 KiB, table 16 bytes a page, reused
// as scratch of the unions. Pages beyond what the table holds are taken in further passes.

#include <algorithm>
#include <type_traits>

#include "prepare/build_union.cuh"
#include "primitives/launch.cuh"

namespace pageweaver {
namespace {

// A warp for every group that a window can have.
constexpr int kMinGroup = 8;
template <int kWindow>
constexpr int kWarps = kWindow / kMinGroup;
template <int kWindow>
constexpr int kThreads = kWarps<kWindow> * kWarp;
constexpr uint32_t kTaken = 0x80000000u;
// A key is (new pages of the subgroup, new pages of the group, row); a cost takes 6 bits, a row 7.
constexpr uint32_t kGroupCost = 1u << 7, kSubgroupCost = 1u << 13, kRowMask = kGroupCost - 1;

// Orders of a window, as window_choices names them.
enum Choice { kOriginal, kHalves, kWhole, kChoices };

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

// Place of row i in a row of overlaps: a lane holds rows lane, lane + 32, ... next to one another.
template <int kWindow>
__device__ __forceinline__ int place_of(int row) {
    return row % kWarp * (kWindow / kWarp) + row / kWarp;
}

// One warp orders `rows` rows of the window from `first_row` on; kPerLane * 32 rows at most.
template <typename Mask, int kWindow, int kPerLane>
__device__ void search(const Mask* overlaps, const uint32_t* whole_rows, int first_row, int rows, int group,
                       int subgroup, bool by_rounds, uint8_t* order) {
    const int lane = threadIdx.x % kWarp;
    const Mask* const lane_overlaps = overlaps + first_row * kWindow + place_of<kWindow>(first_row + lane);
    uint32_t whole[kPerLane], whole_costs[kPerLane], base[kPerLane];
    uint32_t left[kPerLane], left_subgroup[kPerLane], taken_pages[kPerLane];
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) {
        const int row = q * kWarp + lane;
        whole[q] = row < rows ? whole_rows[first_row + row] : 0;
        whole_costs[q] = __popc(whole[q]) * kGroupCost;
        base[q] = row < rows ? row : kTaken | row;
    }
    for (int first_slot = 0; first_slot < rows; first_slot += group) {
        const int slots = min(group, rows - first_slot);
        int slot = 0, row = 0, own_row = 0;
        // Fills a slot with the row of the smallest key.
        const auto take = [&](uint32_t key) {
            row = __reduce_min_sync(kAllLanes, key) & kRowMask;
            if (lane == slot % kWarp) own_row = row;
#pragma unroll
            for (int q = 0; q < kPerLane; ++q)
                if (row == q * kWarp + lane) base[q] |= kTaken;
            // Lanes keep the rows of up to 32 slots.
            if (++slot % kWarp == 0 || slot == slots)
                if (const int written = (slot - 1) % kWarp; lane <= written)
                    order[first_slot + slot - 1 - written + lane] = static_cast<uint8_t>(first_row + own_row);
        };
        // The pages of the row just taken are now read.
        const auto read = [&] {
            uint32_t words[kPerLane * sizeof(Mask) / 4];
            load_words(lane_overlaps + row * kWindow, words);
#pragma unroll
            for (int q = 0; q < kPerLane; ++q) {
                // Upper bits of what is left are 0, so that a mask of 16 bits needs no clearing there.
                taken_pages[q] =
                    sizeof(Mask) == 4 ? words[q % (sizeof(words) / 4)] : words[q / 2] >> (q % 2 * 16);
                left[q] &= ~taken_pages[q];
            }
        };

        uint32_t key = 0xffffffffu;
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) {
            left[q] = whole[q];
            key = min(key, whole_costs[q] + base[q]);
        }
        take(key);
        // In a group's first subgroup both costs are one; a subgroup's first row goes by the group alone.
        const int by_group = by_rounds ? min(slots, subgroup + 1) : slots;
        while (slot < by_group) {
            read();
            key = 0xffffffffu;
#pragma unroll
            for (int q = 0; q < kPerLane; ++q) key = min(key, __popc(left[q]) * kGroupCost + base[q]);
            take(key);
        }
        if (slot == slots) continue;
        read();
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) left_subgroup[q] = whole[q] & ~taken_pages[q];
        while (true) {
            key = 0xffffffffu;
#pragma unroll
            for (int q = 0; q < kPerLane; ++q)
                key = min(key,
                          __popc(left_subgroup[q]) * kSubgroupCost + __popc(left[q]) * kGroupCost + base[q]);
            take(key);
            if (slot == slots) break;
            read();
#pragma unroll
            for (int q = 0; q < kPerLane; ++q) left_subgroup[q] &= ~taken_pages[q];
        }
    }
}

// Rounds (Eq. 4) of an order: what each slot's row adds to the pages of its tile.
template <typename Mask, int kWindow>
__device__ int count_rounds(const Mask* overlaps, const uint32_t* whole_rows, const uint8_t* order, int rows,
                            int tile) {
    int rounds = 0;
    if (const int slot = threadIdx.x % kWindow; slot < rows) {
        uint32_t left = whole_rows[order[slot]];
        const int place = place_of<kWindow>(order[slot]);
        for (int before = slot - slot % tile; before < slot; ++before)
            left &= ~uint32_t{overlaps[order[before] * kWindow + place]};
        rounds = __popc(left);
    }
    return __reduce_add_sync(kAllLanes, rounds);
}

// Bit k of transposed[r] is bit r of rows[k], in the lower and the upper 16 bits each.
__device__ __forceinline__ void transpose_16x32(uint32_t (&rows)[16]) {
    const auto exchange = [&](auto distance, uint32_t mask) {
        constexpr int kDistance = decltype(distance)::value;
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            if (r & kDistance) continue;
            const uint32_t other = ((rows[r] >> kDistance) ^ rows[r + kDistance]) & mask;
            rows[r + kDistance] ^= other;
            rows[r] ^= other << kDistance;
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
    constexpr int kLoads = (kWindow * kColumns + kThreads<kWindow> - 1) / kThreads<kWindow>;
    extern __shared__ __align__(16) uint8_t raw_shared[];
    Mask* const overlaps = reinterpret_cast<Mask*>(raw_shared);
    int32_t* const pages = reinterpret_cast<int32_t*>(overlaps + kWindow * kWindow);
    uint32_t* const table = reinterpret_cast<uint32_t*>(pages + kWindow * kColumns);
    __shared__ uint32_t whole_rows[kWindow];
    __shared__ uint8_t orders[kChoices][kWindow];
    __shared__ int rounds[kChoices];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

    const auto clear_table = [&] {
        for (int i = threadIdx.x; i < capacity * kRowWords / 2; i += kThreads<kWindow>)
            reinterpret_cast<uint2*>(table)[i] = {0, 0};
    };
    clear_table();
    if (threadIdx.x < kWindow) orders[kOriginal][threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
    if (threadIdx.x < kChoices) rounds[threadIdx.x] = 0;
    grid_dependency_wait();

    // Window
    const int head = blockIdx.x / p.max_windows, window = blockIdx.x % p.max_windows;
    const int live_groups = p.counters[kLiveGroups];
    for (int group = live_groups + window * kWarps<kWindow> + warp; group < p.max_groups;
         group += p.max_windows * kWarps<kWindow>)
        clear_group(p, head, group, lane);
    int32_t* const choice_out = p.window_choices ? p.window_choices + blockIdx.x : nullptr;
    if (window >= p.counters[kLiveWindows]) {
        if (choice_out && threadIdx.x == 0) *choice_out = kOriginal;
        return;
    }
    const int request = request_of(p.window_starts, p.batch_size, window);
    const Span span = span_of(p, p.window_starts, request, window, kWindow);
    const int rows = span.last - span.first;

    // Pages
    int own_pages[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int edge = threadIdx.x + i * kThreads<kWindow>, row = edge / kColumns, column = edge % kColumns;
        const bool exists = row < rows && column < p.topk;
        own_pages[i] = exists ? visible_page(p, head, request, span.first + row, column) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int edge = threadIdx.x + i * kThreads<kWindow>;
        if (edge < kWindow * kColumns) pages[edge] = own_pages[i];
    }

    // Overlaps
    for (int first_page = 0; first_page == 0 || first_page < p.max_pages; first_page += capacity) {
        if (first_page > 0) {
            __syncthreads();
            clear_table();
        }
        __syncthreads();
#pragma unroll 1
        for (int edge = threadIdx.x; edge < kWindow * kColumns; edge += kThreads<kWindow>) {
            const int row = edge / kColumns, page = pages[edge] - first_page;
            bool is_new = false;
            if (page >= 0 && page < capacity) {
                // A page that the row has named already counts once.
                const uint32_t bit = 1u << (row % 32);
                is_new = !(atomicOr(&table[page * kRowWords + row / 32], bit) & bit);
            }
            const uint32_t ballot = __ballot_sync(kAllLanes, is_new);
            if (edge % kColumns == 0) {
                const uint32_t bits = kColumns == 32 ? ballot : ballot >> (lane & 16) & 0xffffu;
                whole_rows[row] = first_page > 0 ? whole_rows[row] | bits : bits;
            }
        }
        __syncthreads();
        const int64_t first_place = (int64_t{head} * p.batch_size + request) * p.max_pages + first_page;
#pragma unroll 1
        for (int page = threadIdx.x; page < min(capacity, p.max_pages - first_page);
             page += kThreads<kWindow>) {
            uint32_t selected = 0;
#pragma unroll
            for (int word = 0; word < kRowWords; ++word) selected |= table[page * kRowWords + word];
            if (selected) claim_place(p, first_place + page);
        }
#pragma unroll 1
        for (int task = threadIdx.x; task < kWindow * kRowWords * kParts; task += kThreads<kWindow>) {
            const int row = task % kWindow, word = task / kWindow % kRowWords,
                      part = task / kWindow / kRowWords;
            uint32_t bits[16];
#pragma unroll
            for (int k = 0; k < 16; ++k) {
                const int page = pages[row * kColumns + part * 16 + k] - first_page;
                bits[k] = page >= 0 && page < capacity ? table[page * kRowWords + word] : 0;
            }
            transpose_16x32(bits);
            uint16_t* const target = reinterpret_cast<uint16_t*>(overlaps) +
                                     (word * 32 * kWindow + place_of<kWindow>(row)) * kParts + part;
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
    }
    pages_are_claimed();

    // Search
    // Costs are those of full tiles, two a group, also where a small call runs smaller ones.
    const int group_length = p.queries_per_tile * p.tiles_per_group, tile = group_length / 2;
    constexpr int kHalf = 64;
    const bool has_halves = kWindow > kHalf && choice_out && kHalf >= group_length;
    if (warp == 0) {
        search<Mask, kWindow, kWindow / kWarp>(overlaps, whole_rows, 0, rows, group_length, tile, p.by_rounds,
                                               orders[kWhole]);
    } else if (warp <= 2 && has_halves) {
        const int first_row = (warp - 1) * kHalf;
        search<Mask, kWindow, kHalf / kWarp>(overlaps, whole_rows, first_row, min(rows - first_row, kHalf),
                                             group_length, tile, p.by_rounds, orders[kHalves] + first_row);
    }
    __syncthreads();

    // Choice
    int choice = kWhole;
    if (choice_out) {
        for (int c = threadIdx.x / kWindow; c < kChoices; c += kThreads<kWindow> / kWindow) {
            if (c == kHalves && !has_halves) continue;
            const int part = count_rounds<Mask, kWindow>(overlaps, whole_rows, orders[c], rows, tile);
            if (lane == 0) atomicAdd(&rounds[c], part);
        }
        __syncthreads();
        choice = kOriginal;
        if (has_halves && rounds[kHalves] < rounds[choice]) choice = kHalves;
        if (rounds[kWhole] < rounds[choice]) choice = kWhole;
        if (threadIdx.x == 0) *choice_out = choice;
    }
    const uint8_t* const order = orders[choice];
    if (threadIdx.x < rows)
        p.written_ids[int64_t{head} * p.total_q + span.first + threadIdx.x] = span.first + order[threadIdx.x];

    // Unions
    if (warp >= builders) return;
    const int first_group =
        p.group_starts[request] + (window - p.window_starts[request]) * (kWindow / group_length);
    for (int g = warp; g * group_length < rows; g += builders) {
        const int first_slot = g * group_length, slots = min(rows - first_slot, group_length);
        const int group = first_group + g;
        if (group >= live_groups) break;  // only where boundaries pass total_q
        if (head == 0 && lane == 0)
            note_group(p, group, request, {span.first + first_slot, span.first + first_slot + slots});
        uint32_t* const scratch = table + warp * union_words(p);
        collect_pages(p, slots, scratch, [&](int slot, int column) {
            return pages[order[first_slot + slot] * kColumns + column];
        });
        write_union(p, head, group, slots, scratch);
    }
}

template <typename Mask, int kWindow>
cudaError_t launch(const PrepareParams& p, cudaStream_t stream) {
    constexpr int64_t kMaxShared = 227 * 1024 - 2048;  // what static arrays take stays free
    constexpr int64_t kFixed = kWindow * (kWindow * sizeof(Mask) + 8 * sizeof(Mask) * sizeof(int32_t));
    constexpr int64_t kPageBytes = kWindow / 8;
    const int64_t free = kMaxShared - kFixed;
    const int64_t scratch = std::max<int64_t>(1, sizeof(uint32_t) * union_words(p));
    if (scratch > free) return cudaErrorInvalidValue;
    const int64_t capacity = std::clamp<int64_t>(p.max_pages, 1, free / kPageBytes);
    const int64_t builders = std::min<int64_t>(
        {kWindow / (p.queries_per_tile * p.tiles_per_group), kWarps<kWindow>, free / scratch});
    const int64_t shared = kFixed + std::max(capacity * kPageBytes, builders * scratch);
    const cudaError_t error = cudaFuncSetAttribute(
        regroup<Mask, kWindow>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
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
