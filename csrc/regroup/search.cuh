// The greedy of Eq. 6 over one window's rows, by one warp; what it reads is in shared memory.
#pragma once

#include <cstdint>

#include "prepare/device.cuh"
#include "primitives/mbarrier.cuh"

namespace pageweaver {

constexpr uint32_t kTaken = 0x80000000u;
// Slots after which a search may give up, and the half of a window of 128, where the one of all of it may.
constexpr int kSample = kWarp, kHalf = 2 * kSample;

// A key is (new pages of the subgroup, new pages of the group, row), costs in 6 bits each. The row is the
// address of its overlaps, which begin at a multiple of a row's bytes: one instruction makes a lane's address
// of the smallest key.
template <typename Mask, int kWindow>
struct Key {
    static constexpr uint32_t kRow = kWindow * sizeof(Mask);
    static constexpr uint32_t kGroupCost = 1u << 17, kSubgroupCost = kGroupCost << 6;
    static constexpr uint32_t kRows = kGroupCost - kRow;
    static_assert((kRow & (kRow - 1)) == 0 && kSubgroupCost << 6 <= kTaken);
    static_assert(kRow * kWindow + 2048 + kRow <= kGroupCost, "static arrays lie before the overlaps");
};

// Of shared memory. Addresses of 32 bits, which nothing has to be read for again: a chain waits for each of
// its instructions.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t address, uint32_t (&words)[kWords]) {
    static_assert(kWords == 1 || kWords == 2 || kWords == 4);
    if constexpr (kWords == 1)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address));
    else if constexpr (kWords == 2)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address));
    else
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(address));
}
__device__ __forceinline__ uint32_t load_byte(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}
__device__ __forceinline__ int load_page(uint32_t address) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}
__device__ __forceinline__ uint32_t atomic_or_shared(uint32_t address, uint32_t bits) {
    uint32_t before;
    asm volatile("atom.shared.or.b32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(bits) : "memory");
    return before;
}
__device__ __forceinline__ void store_byte(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// (a & b) | c as one instruction, also where the compiler has a & b anyway.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t value;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(value) : "r"(a), "r"(b), "r"(c));
    return value;
}

// Keeps a value in its register: the compiler may not work it out again.
__device__ __forceinline__ void keep(uint32_t& value) {
    asm volatile("" : "+r"(value));
}
__device__ __forceinline__ void keep(int& value) {
    asm volatile("" : "+r"(value));
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
__device__ inline int count_rounds(const Mask* overlaps, const uint32_t* whole_rows, const uint8_t* order,
                                   int slot, int slots, int tile) {
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
// next stands behind the load and the product, in whose shadows it runs; what stands between two groups is as
// short.
// kMayGiveUp: it does, and returns false, if its first slots need no fewer rounds than those of the order
// `original`, or if goes_on(), asked after half a window, is false. found: barriers; arrives at one for
// every group that is filled, where it may give up from `held` slots on.
template <typename Mask, int kWindow, int kPerLane, bool kMayGiveUp, typename GoesOn>
__device__ __forceinline__ bool search(const Mask* overlaps, const uint32_t* whole_rows, int first_row,
                                       int rows, int group, int subgroup, bool by_rounds,
                                       const uint8_t* original, uint8_t* order, uint64_t* found, int held,
                                       const GoesOn& goes_on) {
    using Keys = Key<Mask, kWindow>;
    constexpr int kWords = kPerLane * sizeof(Mask) / 4;
    const int lane = threadIdx.x % kWarp, own_row = first_row + lane * kPerLane;
    const OnesOf<Mask, kPerLane> ones_of(lane);
    const uint32_t first_overlaps = smem_address(overlaps);
    uint32_t lane_offset = own_row * sizeof(Mask), next_slot = smem_address(order);
    uint32_t next_found = smem_address(found);
    uint32_t whole[kWords] = {}, whole_costs[kPerLane], base[kPerLane], words[kWords], left[kWords];
#pragma unroll
    for (int q = 0; q < kPerLane; ++q) {
        const bool exists = lane * kPerLane + q < rows;
        const uint32_t row = exists ? whole_rows[own_row + q] : 0;
        whole[q * kWords / kPerLane] |= row << (q * 32 * kWords / kPerLane % 32);
        base[q] = (exists ? 0 : kTaken) | (first_overlaps + (own_row + q) * Keys::kRow);
        whole_costs[q] = __popc(row) * Keys::kGroupCost;
    }
    rows = __reduce_max_sync(kAllLanes, rows);  // the compiler then knows that lanes agree
    const uint32_t first_slot = next_slot, end = first_slot + rows;
    uint32_t row = kTaken;
    // Fills a slot with the row of the smallest key, and fetches what the rows share with that one. (The
    // slots are counted first: behind the store, which holds its address for a while, the loop would wait for
    // it.)
    const auto take = [&](uint32_t key) {
        keep(++next_slot);
        row = __reduce_min_sync(kAllLanes, key);
        load_words(and_or(row, Keys::kRows, lane_offset), words);
        keep(row);  // nothing of what follows is done in front of the load
        row &= Keys::kRows;
        store_byte(next_slot - 1, (row - first_overlaps) / Keys::kRow);
    };
    // The row just taken is no candidate any more.
    const auto retire = [&] {
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) {
            if (base[q] == row) base[q] |= kTaken;
        }
    };
    // In a group's first subgroup both costs are one; a subgroup's first row goes by the group alone.
    int by_group = by_rounds ? min(group, subgroup + 1) : group;
    keep(group), keep(by_group), keep(lane_offset), keep(next_found);
    // Groups that nobody was told of.
    int kept_back = 0;
    while (next_slot < end) {
        const uint32_t first = next_slot, last = min(first + group, end),
                       last_by_group = min(first + by_group, end);
        retire();
        uint32_t key = 0xffffffffu;
#pragma unroll
        for (int q = 0; q < kPerLane; ++q) key = min(key, whole_costs[q] + base[q]);
#pragma unroll
        for (int w = 0; w < kWords; ++w) left[w] = whole[w];
        take(key);
#pragma unroll 1
        while (next_slot < last_by_group) {
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
        while (next_slot < last) {
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
        if constexpr (kMayGiveUp) {
            if (first < first_slot + kSample && last >= first_slot + kSample) {
                __syncwarp();
                const auto count = [&](const uint8_t* rows_of) {
                    return count_rounds<Mask, kWindow>(overlaps, whole_rows, rows_of, lane, kSample,
                                                       subgroup);
                };
                if (count(order) >= count(original)) return false;
            }
            if (first < first_slot + kHalf && last >= first_slot + kHalf) {
                __syncwarp();
                if (!goes_on()) return false;
            }
            ++kept_back;
            if (last >= first_slot + held || last == end)
                for (; kept_back > 0; --kept_back, next_found += sizeof(uint64_t))
                    mbarrier_arrive_if(next_found, lane == 0);
        } else {
            mbarrier_arrive_if(next_found, lane == 0);
            next_found += sizeof(uint64_t);
        }
    }
    return true;
}

}  // namespace pageweaver
