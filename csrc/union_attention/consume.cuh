// Union attention over FP8 caches: the warps that compute.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "primitives/fp16.cuh"
#include "primitives/fp8.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/load_queries.cuh"
#include "union_attention/pipeline.cuh"

namespace pageweaver {

constexpr uint32_t kNegativeInfinities = 0xfc00fc00u, kLowestIntegers = 0x80008000u,
                   kNegativeZeros = kLowestIntegers, kOnes = 0x3c003c00u;  // in both halves
// Exponents are in steps of E4M3's codes, eight an octave: code 120 is 2^8. A code is linear inside its
// octave, so a power of two is too large there by up to 6%: 3/8 of a code less it is 3% too small to 3% too
// large. Codes under 8 are subnormal and end in a straight line where powers of two go on: a second line,
// 4 + 3/16 of the exponent, stands for them, or what is far below an attention sink would be lost.
constexpr float kTopCode = 119.625f, kTopOffset = 120.0f - kTopCode;
constexpr uint32_t kTopCodes = 0x577a577au, kCodeUnits = 0x64006400u;        // kTopCode and 1024, twice
constexpr uint32_t kTailSlopes = 0x32003200u, kTailCodeUnits = 0x64046404u;  // 3/16 and 1028, twice
// Logits (base 2) from which on FP16 rounds a maximum by more than probabilities have room below 448.
constexpr float kLargeHalfLogit = 960.0f;

// A worker's warps.
template <Layout kLayout>
__device__ void consume(const UnionParams& p, SharedMemory<kLayout>& shared, int worker) {
    constexpr bool kIsCluster = kLayout == Layout::kCluster;
    // Output columns that are multiplied at once. More of them need less power, and more registers.
    constexpr int kPvColumns = kLayout == Layout::kWorkers ? 64 : 128;
    PageSlots& slots = shared.slots[worker];
    WorkerState& state = shared.states[worker];
    const int warp = threadIdx.x / kWarp % kConsumerWarps, lane = threadIdx.x % kWarp;
    const int quad = lane % 4, row_low = lane / 4;
    const float unit_factor = unit_logit_factor(p);
    const float v_scale = p.v_scale_pointer ? *p.v_scale_pointer : p.v_scale;
    // (Shuffled, or the compiler would compute it again and again to save a register.)
    const uint32_t all_members = __shfl_sync(kAllLanes, all_half_queries(p.group_shift), 0);
    // Where the rings begin, in units of 16 bytes.
    const uint32_t keys = smem_address(slots.keys[0]) >> 4, values = smem_address(slots.values[0].page) >> 4;
    // A lane's part of a load of Q fragments: 16 bytes of one of its warp's rows, the lower eight rows in the
    // first and third eight lanes.
    const int q_row = 16 * warp + lane % 16, q_half = lane / 8 % 2;
    const uint32_t q_address = smem_address(slots.q) + q_row * kHeadDim + ((lane / 16 ^ q_row % 8) << 4),
                   zeros = smem_address(shared.zeros);
    bool key_ready = false;
    PageRing key_ring, value_ring;

    for (TileRing tiles;; tiles.advance()) {
        mbarrier_wait(smem_address(&state.full_tile[tiles.stage]), tiles.phase);
        const Tile& tile = state.tiles[tiles.stage];
        if (tile.unit < 0) break;
        const int32_t* const rows = state.rows[tiles.stage];

        // A warp reads its own rows alone, and has multiplied those of the tile before.
        // A thread has two rows, one in each half of its warp's: [0] is row_low, [1] row_low + 8.
        const float2 factors = load_queries(p, tile, rows, slots.q, unit_factor, warp, lane);
        __syncwarp();
        const float factor[2] = {factors.x, factors.y};
        // In codes. 0 would make NaN of -inf. A larger one than FP16 holds chooses the maximum, but among
        // scores closer than 2^-9.
        const auto in_range = [](float x) { return x > kHalfMax ? kHalfMax : x < kHalfMin ? kHalfMin : x; };
        const uint32_t factor_pair = pack_f16x2(in_range(8.0f * factor[0]), in_range(8.0f * factor[1]));
        // What is added to a scaled score: the top code less the maximum's, in FP16. That rounded number is
        // what counts, so that its rounding is no error. Of a pair of maxima; where their logits are not
        // large.
        const auto bases_of = [&](uint32_t pair) {
            return fma_f16x2(neg_f16x2(pair), factor_pair, kTopCodes);
        };
        const auto is_large = [&](int h, float highest) {
            return fabsf(highest) * factor[h] > kLargeHalfLogit || factor[h] > kHalfMax / 8;
        };
        // Bits of a maximum from which on it is not plainly positive and small: negative, large, NaN. The
        // lowest of a warp's rows, which needs no register of every thread.
        const auto limit_of = [&](int h) {
            const float limit = fminf(kLargeHalfLogit / factor[h], kHalfMax);
            return factor[h] > kHalfMax / 8 ? 0u : uint32_t{__half_as_ushort(__float2half_rz(limit))};
        };
        const uint32_t limit_bits = __reduce_min_sync(kAllLanes, min(limit_of(0), limit_of(1)));
        const int low_position[2] = {lowest_position(rows, tile, warp, 0, lane),
                                     lowest_position(rows, tile, warp, 1, lane)};
        // Output; as much of a page's PV as is multiplied at once, and its row sums. Scores in pairs of
        // columns, then exponents.
        float acc[64], product[kPvColumns / 2], sums[4];
        uint32_t scores[32], probabilities[16], q_fragments[16];
        uint32_t maxima = kNegativeInfinities;  // of both rows, as scores are
        float total[2] = {}, rescale[2] = {};
        bool is_member[2] = {};
        // Who selected the page, and what follows from that: which halves are members, a bit each, and
        // whether some of these has columns that it may not see.
        uint32_t members = 0, member_halves = 0, has_hidden = 0;
        int page_start = 0;

        // A half of rows that did not select the page takes zeros: products of zeros need less power.
        const auto fetch_queries = [&] {
            if (!key_ready) mbarrier_wait(smem_address(&state.full_key[key_ring.stage]), key_ring.phase);
            const PageMeta& meta = state.meta[key_ring.stage];
            members = reinterpret_cast<const uint16_t*>(&meta.members)[warp];
            page_start = meta.start;
            const uint32_t source = members >> 8 * q_half & 0xff ? q_address : zeros;
#pragma unroll
            for (int k = 0; k < kHeadDim / 32; ++k)
                load_matrices(reinterpret_cast<Fragment&>(q_fragments[4 * k]), source ^ k << 5);
        };
        const auto issue_qk = [&] {
            const uint64_t operand = wgmma_descriptor_at(keys + key_ring.stage * (kPageBytes >> 4));
            discard_registers(scores);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kHeadDim / 32; ++k)
                wgmma_m64n128k32_rs(scores, fragment(q_fragments, k), operand + 2 * k, k > 0);
            wgmma_commit_group();
        };
        const auto look_up = [&] {
            member_halves = has_hidden = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t half = members >> 8 * h & 0xff;
                if (half == 0) continue;
                member_halves |= 1u << h;
                if (page_start + kPageSize - 1 > low_position[h] || half != all_members) has_hidden = 1;
            }
            // Else the compiler leaves it for behind the wait.
            asm volatile("" : "+r"(member_halves), "+r"(has_hidden));
        };
        // PV of a page from an output column on. Below column 127 lie the ones, and their product is the row
        // sums of the rounded probabilities.
        const auto issue_pv = [&](auto first_column) {
            constexpr int kFirst = decltype(first_column)::value;
            constexpr bool kHasSums = kFirst + kPvColumns == kHeadDim;
            const uint64_t operand = wgmma_descriptor_at(
                values + value_ring.stage * (sizeof(ValueSlot) >> 4) + kFirst * (kPageSize >> 4));
            discard_registers(product);
            if constexpr (kHasSums) discard_registers(sums);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kPageSize / 32; ++k) {
                if constexpr (kPvColumns == kHeadDim)
                    wgmma_m64n136k32_rs(product, sums, fragment(probabilities, k), operand + 2 * k, k > 0);
                else if constexpr (kHasSums)
                    wgmma_m64n72k32_rs(product, sums, fragment(probabilities, k), operand + 2 * k, k > 0);
                else
                    wgmma_m64n64k32_rs(product, fragment(probabilities, k), operand + 2 * k, k > 0);
            }
            wgmma_commit_group();
        };
        // O = O * rescale + PV, by who selected the page and what its rows were rescaled by. A half without a
        // member has PV = 0 and leaves O alone.
        const auto add_pv = [&](auto first_column) {
            constexpr int kFirst = decltype(first_column)::value;
            constexpr bool kHasSums = kFirst + kPvColumns == kHeadDim;
            fence_registers(product);
            if constexpr (kHasSums) fence_registers(sums);
            for_members(is_member, [&](auto... has) {
                constexpr bool kHas[2] = {decltype(has)::value...};
#pragma unroll
                for (int i = 0; i < kPvColumns / 2; ++i)
                    if (kHas[i / 2 % 2])
                        acc[kFirst / 2 + i] = fmaf(acc[kFirst / 2 + i], rescale[i / 2 % 2], product[i]);
            });
            if constexpr (kHasSums) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (is_member[h]) total[h] = fmaf(total[h], rescale[h], sums[2 * h]);
            }
        };
        const auto wait_value = [&] {
            mbarrier_wait(smem_address(&state.full_value[value_ring.stage]), value_ring.phase);
        };
        const auto release_value = [&] {
            __syncwarp();
            if (lane == 0) release<kIsCluster>(state.empty_value[value_ring.stage]);
            value_ring.advance();
        };

        // Scores of a page to exponents of its probabilities.
        const auto take_scores = [&] {
            fence_registers(scores);
            is_member[0] = (member_halves & 1) != 0, is_member[1] = (member_halves & 2) != 0;
            if (__builtin_expect(has_hidden, false)) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (!is_member[h]) continue;
                    // The last visible column of the row, -1 where the row's query is no member.
                    const int row = 16 * warp + row_low + 8 * h;
                    const bool selected = members >> (8 * h + (row_low >> p.group_shift)) & 1;
                    const int limit = selected ? rows[row] + tile.shift - page_start : -1;
                    const int own_limit = limit - 2 * quad;
#pragma unroll
                    for (int k = 0; k < 16; ++k) {
                        uint32_t& pair = scores[2 * k + h];
                        if (8 * k + 1 > own_limit) pair = (pair & 0xffffu) | (kNegativeInfinities & ~0xffffu);
                        if (8 * k > own_limit) pair = kNegativeInfinities;
                    }
                }
            }
            // Positive numbers are in the order of their bits, and any of them is above all negative ones:
            // the maxima of three pairs of integers are one instruction. Two chains a row keep its latency
            // short.
            const auto extremes = [&](int h, auto of_three) {
                uint32_t chains[2] = {scores[h], scores[2 + h]};
#pragma unroll
                for (int k = 2; k < 16; k += 2)
                    chains[k / 2 % 2] = of_three(chains[k / 2 % 2], scores[2 * k + h], scores[2 * k + 2 + h]);
                return of_three(chains[0], chains[1], chains[1]);
            };
            const auto over_quad = [&](uint32_t pair, auto of_three) {
                const uint32_t other = __shfl_xor_sync(kAllLanes, pair, 1);
                pair = of_three(pair, other, other);
                const uint32_t last = __shfl_xor_sync(kAllLanes, pair, 2);
                return of_three(pair, last, last);
            };
            const auto max3 = [](uint32_t a, uint32_t b, uint32_t c) { return __vimax3_s16x2(a, b, c); };
            const auto min3 = [](uint32_t a, uint32_t b, uint32_t c) { return __vimin3_s16x2(a, b, c); };
            const uint32_t before = maxima;
            bool has_rare = false;
            for_members(is_member, [&](auto... has) {
                constexpr bool kHas[2] = {decltype(has)::value...};
                uint32_t found[2] = {kLowestIntegers, kLowestIntegers};
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (kHas[h]) found[h] = extremes(h, max3);
                // From a pair a row to a pair of rows
                maxima = max3(before, __byte_perm(found[0], found[1], 0x5410),
                              __byte_perm(found[0], found[1], 0x7632));
                maxima = over_quad(maxima, max3);
                has_rare = __any_sync(kAllLanes, (kHas[0] && (maxima & 0xffff) >= limit_bits) ||
                                                     (kHas[1] && maxima >> 16 >= limit_bits));
                // Made beside the vote, not behind it.
                const uint32_t bases = bases_of(maxima), last_bases = bases_of(before);
                if (kHas[0]) rescale[0] = ex2_approx(0.125f * (half_of<0>(bases) - half_of<0>(last_bases)));
                if (kHas[1]) rescale[1] = ex2_approx(0.125f * (half_of<1>(bases) - half_of<1>(last_bases)));
                if (__builtin_expect(has_rare, false)) return;
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    if (kHas[0])
                        scores[2 * k] = fma_f16x2(scores[2 * k], twice<0>(factor_pair), twice<0>(bases));
                    if (kHas[1])
                        scores[2 * k + 1] =
                            fma_f16x2(scores[2 * k + 1], twice<1>(factor_pair), twice<1>(bases));
                }
            });
            if (__builtin_expect(has_rare, false)) {
                // A row's bits are the same here and there, or they would depend on who shares its warp.
                const uint32_t low[2] = {extremes(0, min3), extremes(1, min3)};
                const uint32_t lows = over_quad(
                    min3(before, __byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632)),
                    min3);
                // Where a row has seen nothing but negative numbers, the highest is the lowest integer.
                uint32_t found = 0;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const uint32_t half = 0xffffu << 16 * h;
                    found |= half & (!is_member[h]                     ? before
                                     : maxima & half & kLowestIntegers ? lows
                                                                       : maxima);
                }
                maxima = found;
                const auto take_row = [&](auto which) {
                    constexpr int h = decltype(which)::value;
                    const float highest = half_of<h>(maxima), last = half_of<h>(before);
                    const bool has_large = is_large(h, highest), had_large = is_large(h, last);
                    // Of rows that have seen nothing yet: -inf - -inf would be NaN.
                    const bool is_empty = highest == -INFINITY, was_empty = last == -INFINITY;
                    const float base = is_empty ? kTopCode : half_of<h>(bases_of(maxima));
                    const float own_factor = half_of<h>(factor_pair);
                    const float fall =
                        has_large && had_large
                            ? (last - highest) * own_factor
                            : (had_large ? last * own_factor : kTopCode - half_of<h>(bases_of(before))) -
                                  (has_large ? highest * own_factor : kTopCode - base);
                    rescale[h] = was_empty ? 0.0f : ex2_approx(0.125f * fall);
                    // Large: the maximum is subtracted before the product, which is exact where it matters.
                    const bool is_first = has_large && !is_empty;
                    const uint32_t subtracted = is_first ? twice<h>(neg_f16x2(maxima)) : kNegativeZeros,
                                   added = is_first ? kTopCodes : pack_f16x2(base, base),
                                   // Whatever the factor is, also NaN: it has nothing to show.
                        scale = is_empty ? kOnes : twice<h>(factor_pair);
#pragma unroll
                    for (int k = 0; k < 16; ++k)
                        scores[2 * k + h] = fma_f16x2(add_f16x2(scores[2 * k + h], subtracted), scale, added);
                };
                if (is_member[0]) take_row(std::integral_constant<int, 0>{});
                if (is_member[1]) take_row(std::integral_constant<int, 1>{});
            }
            __syncwarp();
            if (lane == 0) release<kIsCluster>(state.empty_key[key_ring.stage]);
            key_ring.advance();
            // Asked now, answered when the next page's keys are wanted.
            key_ready = mbarrier_test_wait(smem_address(&state.full_key[key_ring.stage]), key_ring.phase);
        };
        const auto take_exponents = [&] {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (is_member[h]) continue;
#pragma unroll
                for (int k = 0; k < 8; ++k) probabilities[2 * k + h] = 0;
            }
            for_members(is_member, [&](auto... has) {
                constexpr bool kHas[2] = {decltype(has)::value...};
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (!kHas[i % 2]) continue;
                    const uint32_t low = scores[4 * (i / 2) + i % 2], high = scores[4 * (i / 2) + 2 + i % 2];
                    // Beside 1024 a code is the lowest byte, and integers are in the order of numbers.
                    const auto codes_of = [](uint32_t places) {
                        return __vimax3_s16x2(add_f16x2(places, kCodeUnits),
                                              fma_f16x2(places, kTailSlopes, kTailCodeUnits), kCodeUnits);
                    };
                    probabilities[i] = __byte_perm(codes_of(low), codes_of(high), 0x6420);
                }
            });
        };

        // `meanwhile` runs beside the last product.
        const auto multiply_values = [&](auto meanwhile) {
            wait_value();
            if constexpr (kPvColumns < kHeadDim) {
                issue_pv(std::integral_constant<int, kPvColumns>{});
                wgmma_wait_group<0>();
                add_pv(std::integral_constant<int, kPvColumns>{});
            }
            issue_pv(std::integral_constant<int, 0>{});
            meanwhile();
            wgmma_wait_group<0>();
            add_pv(std::integral_constant<int, 0>{});
            release_value();
        };
        // One page. In a cluster a CTA that waits for a page holds no slot, or the two could wait for each
        // other: it has done with this page before it looks at the next.
        const auto visit = [&](bool has_next) {
            issue_qk();
            look_up();
            wgmma_wait_group<0>();
            take_scores();
            take_exponents();
            multiply_values([&] {
                if (has_next) fetch_queries();
            });
        };
#pragma unroll
        for (int k = 0; k < 64; ++k) acc[k] = 0.0f;
        if constexpr (kIsCluster) {
            const int count = p.union_counts[tile.unit];
            for (int place = 0; place < count; ++place) {
                mbarrier_wait(smem_address(&state.full_key[key_ring.stage]), key_ring.phase);
                if (state.meta[key_ring.stage].members != 0) {
                    key_ready = true;
                    fetch_queries();
                    visit(false);
                } else {
                    mbarrier_wait(smem_address(&state.full_value[value_ring.stage]), value_ring.phase);
                    __syncwarp();
                    if (lane == 0) {
                        release<kIsCluster>(state.empty_key[key_ring.stage]);
                        release<kIsCluster>(state.empty_value[value_ring.stage]);
                    }
                    key_ring.advance();
                    value_ring.advance();
                }
            }
        } else if constexpr (kLayout == Layout::kAlone) {
            // PV of a page runs beside QK of the next.
            const int rounds = tile.rounds;
            if (rounds > 0) {
                fetch_queries();
                issue_qk();
                look_up();
                wgmma_wait_group<0>();
                take_scores();
                take_exponents();
                for (int j = 1; j < rounds; ++j) {
                    fetch_queries();
                    wait_value();
                    issue_pv(std::integral_constant<int, 0>{});
                    issue_qk();
                    look_up();
                    wgmma_wait_group<1>();
                    add_pv(std::integral_constant<int, 0>{});
                    release_value();
                    wgmma_wait_group<0>();
                    take_scores();
                    take_exponents();
                }
                multiply_values([] {});
            }
        } else {
            const int rounds = tile.rounds;
            if (rounds > 0) fetch_queries();
            for (int j = 0; j < rounds; ++j) visit(j + 1 < rounds);
        }

        // Normalise and store to the original rows. An LSE is relative to the maximum, of whose exponent what
        // base added to it is known.
        const uint32_t highest_exponents = fma_f16x2(maxima, factor_pair, bases_of(maxima));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = 16 * warp + row_low + 8 * h, head_row = head_row_of(row);
            const int64_t query = rows[row], qo_head = qo_head_of(p, tile, head_row);
            if (query < 0) continue;
            const float scale = total[h] == 0.0f ? 0.0f : v_scale / total[h];
            // Eight neighbouring columns each (packed_row_of).
            uint4* const target =
                reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + query * p.out_stride_row +
                                         qo_head * p.out_stride_head) +
                quad;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int i = 16 * g + 4 * k + 2 * h;
                    words[k] = cvt_bf16x2(acc[i] * scale, acc[i + 1] * scale);
                }
                target[4 * g] = make_uint4(words[0], words[1], words[2], words[3]);
            }
            if (p.lse && quad == 0) {
                const float highest = h == 0 ? half_of<0>(maxima) : half_of<1>(maxima);
                const float top = is_large(h, highest) ? kTopCode
                                  : h == 0             ? half_of<0>(highest_exponents)
                                                       : half_of<1>(highest_exponents);
                const float exponent = 0.125f * (top + kTopOffset) - 7.0f;
                p.lse[query * p.lse_stride_row + qo_head * p.lse_stride_head] =
                    total[h] == 0.0f ? -INFINITY
                                     : (highest * factor[h] + (log2f(total[h]) - exponent)) * kLn2;
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&state.empty_tile[tiles.stage]));
    }
}

}  // namespace pageweaver
