// Union attention in split arithmetic: the warps that compute.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "primitives/fp8.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/row_sums.cuh"
#include "union_attention/split_pipeline.cuh"

namespace pageweaver {

constexpr int kConsumerBarrier = 1;

// Quantises the raw head-rows of a tile in shared memory where they lie, BF16 of 256 bytes a row, to two
// parts in E4M3 of 128 bytes with the 128-byte swizzle, low parts in a second tile behind. By the consumer
// warpgroup; a warp turns its own 16 rows, eight lanes a row. Returns the logit factors (base 2) of a
// thread's rows.
__device__ inline float2 quantize_rows(uint8_t* q, const int32_t* rows, float unit_factor, int warp,
                                       int lane) {
    constexpr int kRowsAtOnce = 4;
    const int part = lane % 8;
    uint4 raw[kRowsAtOnce][2];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = 16 * warp + kRowsAtOnce * i + lane / 8;
        const uint4* const source = reinterpret_cast<const uint4*>(q + row * (2 * kHeadDim) + part * 32);
        const bool exists = rows[row] >= 0;  // nobody has written the others
        raw[i][0] = exists ? source[0] : make_uint4(0, 0, 0, 0);
        raw[i][1] = exists ? source[1] : make_uint4(0, 0, 0, 0);
    }
    // What is written next lies where other warps' raw rows are.
    named_barrier_sync(kConsumerBarrier, kConsumerWarps * kWarp);
    float factors[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = 16 * warp + kRowsAtOnce * i + lane / 8;
        float values[16];
        unpack_part(raw[i], values);
        const QueryScale<true> scale(row_amax(values));
        uint32_t words[4], low_words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = values[4 * k + j] * scale.inverse;
            words[k] = cvt_e4m3x4(v[0], v[1], v[2], v[3]);
            low_words[k] = low_parts(words[k], v);
        }
        uint8_t* const target = q + row * kHeadDim + (part ^ (row % 8)) * 16;
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        *reinterpret_cast<uint4*>(target + kQBytes) =
            make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
        factors[i] = logit_factor(unit_factor, scale.value);
    }
    return own_factors(factors, lane);
}

// The consumer warpgroup.
template <bool kIsCluster>
__device__ void consume_split(const UnionParams& p, SplitMemory& shared) {
    const int warp = threadIdx.x / 32 % kConsumerWarps, lane = threadIdx.x % 32;
    const int quad = lane % 4, row_low = lane / 4;
    const float unit_factor = unit_logit_factor(p);
    const float v_scale = p.v_scale_pointer ? *p.v_scale_pointer : p.v_scale;
    // (Shuffled, or the compiler would compute it again and again to save a register.)
    const uint32_t all_members = __shfl_sync(kAllLanes, all_half_queries(p.group_shift), 0);
    // Where the rings begin, in units of 16 bytes.
    const uint32_t keys = smem_address(shared.keys[0]) >> 4,
                   values = smem_address(shared.values[0].page) >> 4;
    bool key_ready = false, value_ready = false;
    KeyRing key_ring;
    ValueRing value_ring;
    uint32_t q_phase = 0;

    for (TileRing tiles;; tiles.advance()) {
        mbarrier_wait(smem_address(&shared.full_tile[tiles.stage]), tiles.phase);
        const Tile& tile = shared.tiles[tiles.stage];
        if (tile.unit < 0) break;
        const int32_t* const rows = shared.rows[tiles.stage];

        mbarrier_wait(smem_address(&shared.full_q), q_phase);
        q_phase ^= 1;
        // A thread has two rows, one in each half of its warp's: [0] is row_low, [1] row_low + 8.
        const float2 factors = quantize_rows(shared.q, rows, unit_factor, warp, lane);
        const float factor[2] = {factors.x, factors.y};
        fence_proxy_async();
        named_barrier_sync(kConsumerBarrier, kConsumerWarps * kWarp);
        // Lets the next tile's queries come. These were multiplied.
        const auto release_q = [&] {
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_address(&shared.empty_q));
        };
        const int low_position[2] = {lowest_position(rows, tile, warp, 0, lane),
                                     lowest_position(rows, tile, warp, 1, lane)};
        // Bits of a maximum from which on it is not plainly positive and small: negative, huge, NaN. The
        // lowest of a warp's rows, which needs no register of every thread.
        const uint32_t limit_bits =
            __reduce_min_sync(kAllLanes, min(__float_as_uint(kLargeLogit * 0.999f / factor[0]),
                                             __float_as_uint(kLargeLogit * 0.999f / factor[1])));
        // A total for each of a thread's registers of row sums.
        constexpr int kParts = 2, kTotals = 4;
        // Output columns 0 to 63 and 64 to 127; one half of a page's PV.
        float acc_low[32], acc_high[32], product[32], sums[4], scores[64];
        uint32_t probabilities[kParts][16] = {};  // high parts, then low parts
        float maximum[2] = {-INFINITY, -INFINITY}, total[kTotals] = {}, rescale[2];
        bool is_member[2] = {};

        // Scores of the next page, and who selected it.
        uint32_t members = 0;
        int page_start = 0;
        // What follows from that is worked out while the scores are on their way: which halves are members, a
        // bit each, and whether some of these has columns that it may not see.
        uint32_t next_members = 0, has_hidden = 0;
        const auto look_up = [&] {
            next_members = has_hidden = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t half = members >> 8 * h & 0xff;
                if (half == 0) continue;
                next_members |= 1u << h;
                if (page_start + kPageSize - 1 > low_position[h] || half != all_members) has_hidden = 1;
            }
            // Else the compiler leaves it for behind the wait.
            asm volatile("" : "+r"(next_members), "+r"(has_hidden));
        };
        const auto issue_qk = [&] {
            if (!key_ready) mbarrier_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
            const uint64_t operand = wgmma_descriptor_at(keys + key_ring.stage * (kPageBytes >> 4));
            discard_registers(scores);
            wgmma_fence();
            // Low parts first: what the accumulator truncates is then relative to them.
#pragma unroll
            for (int k = 0; k < 2 * kHeadDim / 32; ++k) {
                const uint64_t part =
                    wgmma_descriptor(smem_address(shared.q + (k < kHeadDim / 32 ? kQBytes : 0)));
                wgmma_m64n128k32_ss(scores, part + 2 * (k % 4), operand + 2 * (k % 4), k > 0);
            }
            wgmma_commit_group();
            const PageMeta& meta = shared.meta[key_ring.stage];
            members = reinterpret_cast<const uint16_t*>(&meta.members)[warp];
            page_start = meta.start;
        };
        // One half of a page's PV, output columns 64 to 127 first: below these lie the ones, and their
        // product is the row sums of the rounded probabilities.
        const auto issue_pv = [&](auto is_first) {
            constexpr bool kIsFirst = decltype(is_first)::value;
            const uint64_t operand = wgmma_descriptor_at(
                values + value_ring.stage * (sizeof(ValueSlot) >> 4) + kIsFirst * (kPageBytes >> 5));
            discard_registers(product);
            if constexpr (kIsFirst) discard_registers(sums);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kParts * kPageSize / 32; ++k) {
                const Fragment& part = fragment(probabilities[kParts - 1 - k / 4], k % 4);
                if constexpr (kIsFirst)
                    wgmma_m64n72k32_rs(product, sums, part, operand + 2 * (k % 4), k > 0);
                else
                    wgmma_m64n64k32_rs(product, part, operand + 2 * (k % 4), k > 0);
            }
            wgmma_commit_group();
        };
        const auto wait_value = [&] {
            if (!value_ready)
                mbarrier_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
        };
        // O = O * rescale + PV. A half without a member has PV = 0 and leaves O alone.
        const auto add_product = [&](float (&acc)[32]) {
            fence_registers(product);
            for_members(is_member, [&](auto... has) {
                constexpr bool kHas[2] = {decltype(has)::value...};
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    if (kHas[i / 2 % 2]) acc[i] = fmaf(acc[i], rescale[i / 2 % 2], product[i]);
            });
        };
        const auto add_high = [&] {
            fence_registers(sums);
            add_product(acc_high);
#pragma unroll
            for (int i = 0; i < kTotals; ++i) {
                const int h = i / kParts;
                if (is_member[h]) total[i] = fmaf(total[i], rescale[h], sums[i]);
            }
        };
        const auto release_value = [&] {
            __syncwarp();
            if (lane == 0) release<kIsCluster>(shared.empty_value[value_ring.stage]);
            value_ring.advance();
        };

        // Scores to probabilities for one page; `before_exp` runs between the maxima and the exponentials.
        const auto softmax = [&](auto before_exp) {
            fence_registers(scores);
            const bool will_be_member[2] = {(next_members & 1) != 0, (next_members & 2) != 0};
            if (__builtin_expect(has_hidden, false)) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (!will_be_member[h]) continue;
                    // The last visible column of the row, -1 where the row's query is no member.
                    const int row = 16 * warp + row_low + 8 * h;
                    const bool selected = members >> (8 * h + (row_low >> p.group_shift)) & 1;
                    const int limit = selected ? rows[row] + tile.shift - page_start : -1;
                    const int own_limit = limit - 2 * quad;
#pragma unroll
                    for (int k = 0; k < 16; ++k) {
                        if (8 * k > own_limit) scores[4 * k + 2 * h] = -INFINITY;
                        if (8 * k + 1 > own_limit) scores[4 * k + 2 * h + 1] = -INFINITY;
                    }
                }
            }
            float base[2], next_rescale[2];
            // Positive floats are in the order of their bits, and any of them is above all negative ones:
            // the maximum of three integers is one instruction. Two chains a row keep its latency short.
            const auto extreme = [&](int h, auto of_three) {
                int chains[2] = {__float_as_int(maximum[h]), __float_as_int(scores[2 * h])};
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    const float* const pair = &scores[4 * k + 2 * h];
                    chains[k % 2] = of_three(chains[k % 2], __float_as_int(pair[0]), __float_as_int(pair[1]));
                }
                return of_three(chains[0], chains[1], chains[1]);
            };
            const auto over_quad = [&](int value, auto of_three) {
                const int other = __shfl_xor_sync(kAllLanes, value, 1);
                value = of_three(value, other, other);
                const int last = __shfl_xor_sync(kAllLanes, value, 2);
                return of_three(value, last, last);
            };
            const auto max3 = [](int a, int b, int c) { return __vimax3_s32(a, b, c); };
            const auto min3 = [](int a, int b, int c) { return __vimin3_s32(a, b, c); };
            float before[2];
            int bits[2];
            bool has_rare = false;
            for_members(will_be_member, [&](auto... has) {
                constexpr bool kHas[2] = {decltype(has)::value...};
                bool is_rare = false;
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (kHas[h]) bits[h] = extreme(h, max3);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (!kHas[h]) continue;
                    bits[h] = over_quad(bits[h], max3);
                    is_rare |= static_cast<uint32_t>(bits[h]) >= limit_bits;
                }
                // Made beside the vote, not behind it.
                has_rare = __any_sync(kAllLanes, is_rare);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (!kHas[h]) continue;
                    before[h] = maximum[h];
                    maximum[h] = __int_as_float(bits[h]);
                    next_rescale[h] = ex2_approx((before[h] - maximum[h]) * factor[h]);
                    base[h] = fmaf(-maximum[h], factor[h], kPScaleLog2);
                }
            });
            if (__builtin_expect(has_rare, false)) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (!will_be_member[h]) continue;
                    // Nothing but negative floats: the highest is the lowest integer.
                    maximum[h] = before[h];
                    const int lowest = over_quad(extreme(h, min3), min3);
                    maximum[h] = __int_as_float(bits[h] < 0 ? lowest : bits[h]);
                    // A row that has seen nothing yet subtracts 0: -inf - -inf would be NaN.
                    const float subtracted = maximum[h] == -INFINITY ? 0.0f : maximum[h];
                    // Logits so large that a maximum's rounding shows in an exponential: subtract before
                    // multiplying.
                    const bool is_large = fabsf(subtracted) * factor[h] > kLargeLogit;
#pragma unroll
                    for (int i = 0; i < 64; ++i)
                        if (i / 2 % 2 == h && is_large) scores[i] -= subtracted;
                    next_rescale[h] = ex2_approx((before[h] - subtracted) * factor[h]);
                    base[h] = fmaf(is_large ? 0.0f : -subtracted, factor[h], kPScaleLog2);
                }
            }
            __syncwarp();
            if (lane == 0) release<kIsCluster>(shared.empty_key[key_ring.stage]);
            key_ring.advance();

            before_exp();
            // Asked now, answered when the exponentials are done.
            key_ready = mbarrier_test_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
            value_ready =
                mbarrier_test_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
            // The lower half of PV of the page before, an eighth at a time: where both halves have
            // exponentials to do, between these, which leave issue slots free.
            const bool was_member[2] = {is_member[0], is_member[1]};
            const float last_rescale[2] = {rescale[0], rescale[1]};
            const auto add_eighth = [&](int part) {
#pragma unroll
                for (int i = 4 * part; i < 4 * part + 4; ++i)
                    if (was_member[i / 2 % 2])
                        acc_low[i] = fmaf(acc_low[i], last_rescale[i / 2 % 2], product[i]);
            };
            if (!(will_be_member[0] && will_be_member[1])) {
#pragma unroll
                for (int k = 0; k < 8; ++k) add_eighth(k);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                is_member[h] = will_be_member[h];
                if (is_member[h]) continue;
#pragma unroll
                for (int part = 0; part < kParts; ++part)
#pragma unroll
                    for (int k = 0; k < 8; ++k) probabilities[part][2 * k + h] = 0;
            }
            for_members(is_member, [&](auto... has) {
                constexpr bool kHas[2] = {decltype(has)::value...};
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (kHas[h]) rescale[h] = next_rescale[h];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    if (kHas[0] && kHas[1]) add_eighth(k);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (!kHas[h]) continue;
                        float e[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j)
                            e[j] = ex2_approx(
                                fmaf(scores[8 * k + j / 2 * 4 + 2 * h + j % 2], factor[h], base[h]));
                        float high[4];
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            high[j] = round_to_e4m3(e[j]);
                            e[j] -= high[j];
                        }
                        probabilities[0][2 * k + h] = cvt_e4m3x4(high[0], high[1], high[2], high[3]);
                        probabilities[1][2 * k + h] = cvt_e4m3x4(e[0], e[1], e[2], e[3]);
                    }
                }
            });
        };

        const int rounds = tile.rounds;
#pragma unroll
        for (int k = 0; k < 32; ++k) acc_low[k] = acc_high[k] = 0.0f;
        // PV of the page before beside QK of the next, all but the last half of that PV.
        const auto multiply_and_score = [&] {
            wait_value();
            issue_pv(std::true_type{});
            issue_qk();
            wgmma_wait_group<1>();
            add_high();
            issue_pv(std::false_type{});
            look_up();
            wgmma_wait_group<1>();
        };
        // The first page has none before it, and no half is a member yet: nothing will be added.
        const auto finish_product = [&](bool has_product) {
            wgmma_wait_group<0>();
            fence_registers(product);
            if (has_product) release_value();
        };
        const auto multiply_values = [&] {
            wait_value();
            issue_pv(std::true_type{});
            wgmma_wait_group<0>();
            add_high();
            issue_pv(std::false_type{});
            wgmma_wait_group<0>();
            add_product(acc_low);
            release_value();
        };
        if constexpr (kIsCluster) {
            // A CTA that waits for a page holds no slot, or the two could wait for each other: PV ends before
            // the next page.
            const int count = p.union_counts[tile.unit];
            for (int place = 0; place < count; ++place) {
                mbarrier_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
                if (shared.meta[key_ring.stage].members != 0) {
                    key_ready = true;
                    issue_qk();
                    look_up();
                    wgmma_wait_group<0>();
                    is_member[0] = is_member[1] = false;
                    softmax([] {});
                    multiply_values();
                } else {
                    mbarrier_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
                    __syncwarp();
                    if (lane == 0) {
                        release<kIsCluster>(shared.empty_key[key_ring.stage]);
                        release<kIsCluster>(shared.empty_value[value_ring.stage]);
                    }
                    key_ring.advance();
                    value_ring.advance();
                }
            }
            release_q();
        } else if (rounds > 0) {
            issue_qk();
            look_up();
            wgmma_wait_group<0>();
            // One copy of the softmax for all pages: with another for the first, instruction caches do not
            // hold this loop.
            for (int j = 1;; ++j) {
                if (j == rounds) release_q();
                softmax([&] { finish_product(j > 1); });
                if (j == rounds) break;
                multiply_and_score();
            }
            multiply_values();
        } else {
            release_q();
        }

        // Normalise and store to the original rows. What normalises, and the sum that an LSE takes, are two;
        // the latter is in the lanes that store it.
        const float lse_sum = row_sum(total, quad);
        const float normaliser[2] = {row_normaliser(total, 0), row_normaliser(total, 1)};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int head_row = head_row_of(16 * warp + row_low + 8 * h);
            const int64_t query = rows[16 * warp + row_low + 8 * h], qo_head = qo_head_of(p, tile, head_row);
            if (query < 0) continue;
            // It saw nothing; where its factor is NaN its sums are that too.
            const bool is_empty = maximum[h] == -INFINITY;
            const float scale = v_scale / normaliser[h];
            // Eight neighbouring columns each (packed_row_of).
            uint4* const target =
                reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.out) + query * p.out_stride_row +
                                         qo_head * p.out_stride_head) +
                quad;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const float (&acc)[32] = g < 2 ? acc_low : acc_high;
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int i = 16 * (g % 2) + 4 * k + 2 * h;
                    words[k] = is_empty ? 0 : cvt_bf16x2(acc[i] * scale, acc[i + 1] * scale);
                }
                target[4 * g] = make_uint4(words[0], words[1], words[2], words[3]);
            }
            if (p.lse && quad == h)
                p.lse[query * p.lse_stride_row + qo_head * p.lse_stride_head] =
                    is_empty ? -INFINITY : (maximum[h] * factor[h] + log2f(lse_sum) - kPScaleLog2) * kLn2;
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(smem_address(&shared.empty_tile[tiles.stage]));
    }
}

}  // namespace pageweaver
