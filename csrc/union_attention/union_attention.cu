// Union attention, FP8: each 64-row tile of head-rows (4 queries x 16 heads) traverses the pages that any
// of its queries selected, in ascending order, with one online softmax a row. A query meets only pages it
// selected: in all others its probabilities are 0 and its maximum stands, so no bit of its result depends
// on which queries run with it.
//
// Grid: one CTA a tile, two resident on an SM, the largest unions first. kIndependent: the tiles of a group
// share nothing. kCluster: the two tiles of a group are a cluster; each CTA copies half of every page of the
// union to both, and passes over pages that its own queries did not select.
//
// Threads: 256. Warpgroup 0 produces: warp 0 copies K, warp 1 copies V^T. Warpgroup 1 consumes: its warp w
// holds rows 16 w to 16 w + 15, which is one query at group size 16.
//
// Shared memory, 106 KiB: K ring 3 x 16 KiB, V^T ring 3 x 16 KiB, Q 8 KiB (e4m3, until its fragments are in
// registers), ones 1 KiB, positions, page metadata, barriers.
//
// Registers: 32 producing, 224 consuming (output 64, scores 64, half of a page's PV 32, Q and probabilities
// 16 each).
//
// Pipeline, round j of the consumers (kIndependent; kCluster runs the same steps one after another):
//
//   tensor cores     PV(j-1) low | QK(j)    | PV(j-1) high
//   everything else              | O low += | max S(j)      | O high +=; exp, pack P(j)
//
// Invariants: full_* take one arrival of the producer and the bytes of the slot; empty_* one arrival of each
// consumer warp of the CTA or cluster, each for itself: an elected thread could release what a slower warp
// still reads. The tensor core keeps 13 bits of an accumulator's mantissa, so PV starts from zero in every
// page and is added to O in FP32: O = O * a + PV. Measurements behind each choice: docs/union_attention.md.

#include <cuda_bf16.h>

#include "prepare/device.cuh"
#include "primitives/bulk_copy.cuh"
#include "primitives/fp8.cuh"
#include "primitives/launch.cuh"
#include "primitives/mbarrier.cuh"
#include "primitives/wgmma.cuh"
#include "union_attention/queries.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {
namespace {

constexpr int kStages = 3;
constexpr int kThreads = 256, kCtasPerSm = 2;
constexpr int kProducerRegisters = 32, kConsumerRegisters = 224;
constexpr int kConsumerWarps = 4;
constexpr int kPageBytes = kPageSize * kHeadDim, kOnesBytes = 8 * 128;
constexpr uint32_t kE4m3Ones = 0x38383838u;

constexpr float kPScaleLog2 = 8.0f;     // as in common/arithmetic.py
constexpr float kLargeLogit = 8192.0f;  // base 2; above, FP32 rounds a logit by 2^-11 and more

struct alignas(16) PageMeta {
    uint64_t mask;  // queries of the tile that selected the page
    int32_t page;   // logical page
};

struct SharedMemory {
    uint8_t keys[kStages][kPageBytes];
    uint8_t values[kStages][kPageBytes];
    uint8_t q[kTileRows * kHeadDim];
    uint32_t ones[kOnesBytes / 4];  // 8 rows of 1.0 in e4m3
    int32_t positions[kTileRows];   // of each row's query; -1 where the tile has none
    PageMeta meta[kStages];
    uint64_t full_key[kStages], empty_key[kStages], full_value[kStages], empty_value[kStages];
};
static_assert(kCtasPerSm * (sizeof(SharedMemory) + 1024) <= 228 * 1024, "two CTAs must fit on an SM");

// A ring position that several roles keep each on its own.
struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Gives a slot back to the producers that fill it.
template <bool kIsCluster>
__device__ __forceinline__ void release(uint64_t& barrier) {
    if constexpr (kIsCluster) {
        mbarrier_arrive_cluster(smem_address(&barrier), 0);
        mbarrier_arrive_cluster(smem_address(&barrier), 1);
    } else {
        mbarrier_arrive(smem_address(&barrier));
    }
}

// Copies K (kIsKey) or V^T of every page that the tile's queries selected, ascending; in a cluster this CTA's
// half of every page of the union, to both.
template <bool kIsCluster, bool kIsKey>
__device__ void produce(const UnionParams& p, const CUtensorMap& key_map, SharedMemory& shared,
                        const Tile& tile) {
    const int lane = threadIdx.x % 32;
    const int count = p.union_counts[tile.unit];
    const int32_t* pages = p.union_pages + tile.unit * p.max_union;
    const uint32_t* masks = p.union_masks + tile.unit * p.max_union * p.mask_words;
    const int32_t* sources =
        kIsKey ? p.page_table + tile.request * p.page_table_stride
               : p.packed_slots + (int64_t{tile.head} * p.batch_size + tile.request) * p.max_pages;
    Ring ring;
    for (int base = 0; base < count; base += 32) {
        const int place = base + lane;
        int page = 0, source = 0;
        uint64_t mask = 0;
        if (place < count) {
            page = pages[place];
            mask = tile_mask(masks + int64_t{place} * p.mask_words, tile.index, p.queries_per_tile);
            source = sources[page];
        }
        for (uint32_t wanted = __ballot_sync(kAllLanes, kIsCluster ? place < count : mask != 0); wanted;
             wanted &= wanted - 1) {
            // The lane that holds the entry issues its copy.
            if (lane == __ffs(wanted) - 1) {
                const int s = ring.stage;
                const uint32_t full = smem_address(kIsKey ? &shared.full_key[s] : &shared.full_value[s]);
                const uint32_t empty = smem_address(kIsKey ? &shared.empty_key[s] : &shared.empty_value[s]);
                if constexpr (kIsCluster)
                    mbarrier_wait_cluster(empty, ring.phase ^ 1);
                else
                    mbarrier_wait(empty, ring.phase ^ 1);
                if constexpr (kIsKey) {
                    shared.meta[s].mask = mask;
                    shared.meta[s].page = page;
                }
                mbarrier_arrive_expect_tx(full, kPageBytes);
                const int half = kIsCluster ? tile.index : 0;  // a tile's place in its group is its rank
                const uint32_t target =
                    smem_address(kIsKey ? shared.keys[s] : shared.values[s]) + half * (kPageBytes / 2);
                const uint8_t* from =
                    p.packed_v + int64_t{source} * kPackedPageBytes + half * (kPageBytes / 2);
                if constexpr (kIsCluster && kIsKey)
                    cp_async_bulk_tensor_multicast(target, &key_map, full, 3, 0, half * (kPageSize / 2),
                                                   tile.head, source);
                else if constexpr (kIsCluster)
                    cp_async_bulk_multicast(target, from, kPageBytes / 2, full, 3);
                else if constexpr (kIsKey)
                    cp_async_bulk_tensor(target, &key_map, full, 0, 0, tile.head, source);
                else
                    cp_async_bulk(target, from, kPageBytes, full);
            }
            __syncwarp();
            ring.advance();
        }
    }
}

using Fragment = uint32_t[4];

// Registers of the k-th 32 columns of an A operand.
__device__ __forceinline__ const Fragment& fragment(const uint32_t (&registers)[16], int k) {
    return *reinterpret_cast<const Fragment*>(&registers[4 * k]);
}

// The consumer warpgroup: the whole life of one tile.
template <bool kIsCluster>
__device__ void consume(const UnionParams& p, SharedMemory& shared, const Tile& tile) {
    const int warp = threadIdx.x / 32 % kConsumerWarps, lane = threadIdx.x % 32;
    const int quad = lane % 4, row_low = lane / 4;

    // Rows of a warp are read by that warp alone, here and in the tensor core.
    const float row_factor = quantize_rows(p, shared.q, shared.positions, tile, warp, lane);
    const float factor0 = __shfl_sync(kAllLanes, row_factor, 2 * row_low);
    const float factor1 = __shfl_sync(kAllLanes, row_factor, 2 * (row_low + 8));
    __syncwarp();
    // Q as A fragments: it stays in registers for the whole tile and costs no shared-memory bandwidth.
    uint32_t q_fragments[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const int row = 16 * warp + row_low + 8 * (k % 2), chunk = (k / 4 * 2 + k % 4 / 2) ^ (row % 8);
        q_fragments[k] =
            *reinterpret_cast<const uint32_t*>(shared.q + row * kHeadDim + chunk * 16 + 4 * quad);
    }
    const int warp_slot = 16 * warp >> p.group_shift;
    const uint32_t all_members = (1u << (16 >> p.group_shift)) - 1;
    // Pages that end before the warp's lowest position need no mask.
    const int low_position = __reduce_min_sync(kAllLanes, shared.positions[16 * warp + lane % 16]);

    // Output columns 0 to 63 and 64 to 127; one half of a page's PV.
    float acc_low[32], acc_high[32], product[32], sums[4], scores[64];
    uint32_t probabilities[16];
    float max0 = -INFINITY, max1 = -INFINITY, total0 = 0.0f, total1 = 0.0f;
    float rescale0 = 1.0f, rescale1 = 1.0f;
    bool member = false, key_ready = false, value_ready = false;
    Ring key_ring, value_ring;

    const auto issue_qk = [&] {
        if (!key_ready) mbarrier_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
        const uint64_t operand = wgmma_descriptor(smem_address(shared.keys[key_ring.stage]));
        discard_registers(scores);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 32; ++k)
            wgmma_m64n128k32_rs(scores, fragment(q_fragments, k), operand + 2 * k, k > 0);
        wgmma_commit_group();
    };
    const auto issue_pv = [&](int first_row) {
        const uint64_t operand =
            wgmma_descriptor(smem_address(shared.values[value_ring.stage] + first_row * kPageSize));
        discard_registers(product);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPageSize / 32; ++k)
            wgmma_m64n64k32_rs(product, fragment(probabilities, k), operand + 2 * k, k > 0);
        wgmma_commit_group();
    };
    // The low half brings the row sums of the rounded probabilities along, as their product with a column of
    // ones.
    const auto issue_pv_low = [&] {
        if (!value_ready) mbarrier_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
        const uint64_t ones = wgmma_descriptor(smem_address(shared.ones));
        discard_registers(sums);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kPageSize / 32; ++k)
            wgmma_m64n8k32_rs(sums, fragment(probabilities, k), ones, k > 0);
        issue_pv(0);
    };
    // O = O * rescale + PV. A warp without a member has PV = 0 and leaves O alone.
    const auto add_product = [&](float (&acc)[32]) {
        fence_registers(product);
        if (!member) return;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            acc[4 * k] = fmaf(acc[4 * k], rescale0, product[4 * k]);
            acc[4 * k + 1] = fmaf(acc[4 * k + 1], rescale0, product[4 * k + 1]);
            acc[4 * k + 2] = fmaf(acc[4 * k + 2], rescale1, product[4 * k + 2]);
            acc[4 * k + 3] = fmaf(acc[4 * k + 3], rescale1, product[4 * k + 3]);
        }
    };
    const auto add_low = [&] {
        fence_registers(sums);
        add_product(acc_low);
        if (member) {
            total0 = fmaf(total0, rescale0, sums[0]);
            total1 = fmaf(total1, rescale1, sums[2]);
        }
    };
    const auto finish_pv = [&] {
        wgmma_wait_group<0>();
        add_product(acc_high);
        __syncwarp();
        if (lane == 0) release<kIsCluster>(shared.empty_value[value_ring.stage]);
        value_ring.advance();
    };

    // Scores to probabilities for one page; `before_exp` runs between the maximum and the exponentials.
    const auto softmax = [&](auto before_exp) {
        fence_registers(scores);
        const uint32_t members =
            static_cast<uint32_t>(shared.meta[key_ring.stage].mask >> warp_slot) & all_members;
        const int page_start = shared.meta[key_ring.stage].page * kPageSize;
        __syncwarp();
        if (lane == 0) release<kIsCluster>(shared.empty_key[key_ring.stage]);
        key_ring.advance();

        float high0 = max0, high1 = max1;
        if (members) {
            if (page_start + kPageSize - 1 > low_position || members != all_members) {
                // The last visible column of each row, -1 where the row's query is no member.
                const auto limit = [&](int row) {
                    const bool selected = members >> (row >> p.group_shift) & 1;
                    return selected ? shared.positions[16 * warp + row] - page_start : -1;
                };
                const int limit0 = limit(row_low), limit1 = limit(row_low + 8);
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    const int column = 8 * k + 2 * quad;
                    if (column > limit0) scores[4 * k] = -INFINITY;
                    if (column + 1 > limit0) scores[4 * k + 1] = -INFINITY;
                    if (column > limit1) scores[4 * k + 2] = -INFINITY;
                    if (column + 1 > limit1) scores[4 * k + 3] = -INFINITY;
                }
            }
            // Two chains a row keep the maximum's latency short.
            float low0 = scores[1], low1 = scores[3];
            high0 = fmaxf(high0, scores[0]), high1 = fmaxf(high1, scores[2]);
#pragma unroll
            for (int k = 1; k < 16; ++k) {
                high0 = fmaxf(high0, scores[4 * k]);
                low0 = fmaxf(low0, scores[4 * k + 1]);
                high1 = fmaxf(high1, scores[4 * k + 2]);
                low1 = fmaxf(low1, scores[4 * k + 3]);
            }
            high0 = fmaxf(high0, low0);
            high1 = fmaxf(high1, low1);
            high0 = fmaxf(high0, __shfl_xor_sync(kAllLanes, high0, 1));
            high1 = fmaxf(high1, __shfl_xor_sync(kAllLanes, high1, 1));
            high0 = fmaxf(high0, __shfl_xor_sync(kAllLanes, high0, 2));
            high1 = fmaxf(high1, __shfl_xor_sync(kAllLanes, high1, 2));
        }

        before_exp();
        // Asked now, answered when the exponentials are done.
        key_ready = mbarrier_test_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
        value_ready =
            mbarrier_test_wait(smem_address(&shared.full_value[value_ring.stage]), value_ring.phase);
        member = members != 0;
        if (member) {
            // A row that has seen nothing yet subtracts 0: -inf - -inf would be NaN.
            const float top0 = high0 == -INFINITY ? 0.0f : high0, top1 = high1 == -INFINITY ? 0.0f : high1;
            rescale0 = ex2_approx((max0 - top0) * factor0);
            rescale1 = ex2_approx((max1 - top1) * factor1);
            max0 = high0;
            max1 = high1;
            // Logits so large that a maximum's rounding shows in an exponential: subtract before multiplying.
            const bool large0 = fabsf(top0) * factor0 > kLargeLogit,
                       large1 = fabsf(top1) * factor1 > kLargeLogit;
            if (__any_sync(kAllLanes, large0 || large1)) {
#pragma unroll
                for (int k = 0; k < 16; ++k) {
                    scores[4 * k] -= large0 ? top0 : 0.0f;
                    scores[4 * k + 1] -= large0 ? top0 : 0.0f;
                    scores[4 * k + 2] -= large1 ? top1 : 0.0f;
                    scores[4 * k + 3] -= large1 ? top1 : 0.0f;
                }
            }
            const float base0 = large0 ? kPScaleLog2 : fmaf(-top0, factor0, kPScaleLog2);
            const float base1 = large1 ? kPScaleLog2 : fmaf(-top1, factor1, kPScaleLog2);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                float e[8];
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    e[j] = ex2_approx(j % 4 < 2 ? fmaf(scores[8 * k + j], factor0, base0)
                                                : fmaf(scores[8 * k + j], factor1, base1));
                probabilities[2 * k] = cvt_e4m3x4(e[0], e[1], e[4], e[5]);
                probabilities[2 * k + 1] = cvt_e4m3x4(e[2], e[3], e[6], e[7]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < 16; ++k) probabilities[k] = 0;
        }
    };

    const int rounds = p.tile_counts[tile.unit * p.tiles_per_group + tile.index];
#pragma unroll
    for (int k = 0; k < 32; ++k) acc_low[k] = acc_high[k] = 0.0f;
    const auto multiply_values = [&] {
        issue_pv_low();
        wgmma_wait_group<0>();
        add_low();
        issue_pv(kHeadDim / 2);
        finish_pv();
    };
    if constexpr (kIsCluster) {
        // A CTA that waits for a page holds no slot, or the two could wait for each other: PV ends before the
        // next page.
        const int count = p.union_counts[tile.unit];
        for (int place = 0; place < count; ++place) {
            mbarrier_wait(smem_address(&shared.full_key[key_ring.stage]), key_ring.phase);
            if (shared.meta[key_ring.stage].mask != 0) {
                key_ready = true;
                issue_qk();
                wgmma_wait_group<0>();
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
    } else if (rounds > 0) {
        issue_qk();
        wgmma_wait_group<0>();
        softmax([] {});
        for (int j = 1; j < rounds; ++j) {
            issue_pv_low();
            issue_qk();
            wgmma_wait_group<1>();
            add_low();
            issue_pv(kHeadDim / 2);
            wgmma_wait_group<1>();
            softmax(finish_pv);
        }
        multiply_values();
    }

    // Normalise and store to the original rows.
    const float v_scale = p.v_scale_pointer ? *p.v_scale_pointer : p.v_scale;
    const auto store_row = [&](int row, float total, float high, float factor, int offset) {
        const int slot = row >> p.group_shift;
        if (slot >= tile.live_queries) return;
        const int64_t query = query_of(p, tile, slot);
        const int64_t qo_head = qo_head_of(p, tile, row);
        const float scale = total == 0.0f ? 0.0f : v_scale / total;
        __nv_bfloat16* target = static_cast<__nv_bfloat16*>(p.out) + query * p.out_stride_row +
                                qo_head * p.out_stride_head + 2 * quad;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            *reinterpret_cast<__nv_bfloat162*>(target + 8 * k) =
                __floats2bfloat162_rn(acc_low[4 * k + offset] * scale, acc_low[4 * k + offset + 1] * scale);
            *reinterpret_cast<__nv_bfloat162*>(target + kHeadDim / 2 + 8 * k) =
                __floats2bfloat162_rn(acc_high[4 * k + offset] * scale, acc_high[4 * k + offset + 1] * scale);
        }
        if (p.lse && quad == 0)
            p.lse[query * p.lse_stride_row + qo_head * p.lse_stride_head] =
                total == 0.0f ? -INFINITY : (high * factor + log2f(total) - kPScaleLog2) * kLn2;
    };
    store_row(16 * warp + row_low, total0, max0, factor0, 0);
    store_row(16 * warp + row_low + 8, total1, max1, factor1, 2);
}

// Rows that belong to no request: zeros and an LSE of -inf.
__device__ void zero_padding_rows(const UnionParams& p) {
    for (int64_t row = max(p.cu_seqlens_q[p.batch_size], 0) + int64_t{blockIdx.x}; row < p.total_q;
         row += gridDim.x) {
        for (int i = threadIdx.x; i < p.num_qo_heads * kHeadDim; i += kThreads)
            static_cast<__nv_bfloat16*>(
                p.out)[row * p.out_stride_row + i / kHeadDim * p.out_stride_head + i % kHeadDim] =
                __nv_bfloat16(0.0f);
        if (p.lse)
            for (int head = threadIdx.x; head < p.num_qo_heads; head += kThreads)
                p.lse[row * p.lse_stride_row + head * p.lse_stride_head] = -INFINITY;
    }
}

template <bool kIsCluster>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    union_attention(const UnionParams p, const __grid_constant__ CUtensorMap key_map) {
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(raw_shared);

    // Barriers
    constexpr int kReleases = kConsumerWarps * (kIsCluster ? 2 : 1);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        for (int s = 0; s < kStages; ++s) {
            mbarrier_init(smem_address(&shared.full_key[s]), 1);
            mbarrier_init(smem_address(&shared.empty_key[s]), kReleases);
            mbarrier_init(smem_address(&shared.full_value[s]), 1);
            mbarrier_init(smem_address(&shared.empty_value[s]), kReleases);
        }
        fence_mbarrier_init();
    }
    for (int i = threadIdx.x; i < kOnesBytes / 4; i += kThreads) shared.ones[i] = kE4m3Ones;
    fence_proxy_async();
    __syncthreads();
    grid_dependency_wait();

    // Schedule
    zero_padding_rows(p);
    const int ticket = blockIdx.x / p.tiles_per_group;
    if (p.max_groups == 0 || ticket >= p.num_kv_heads * p.counters[kLiveGroups]) return;
    Tile tile;
    tile.unit = p.unit_order[ticket];
    tile.index = blockIdx.x % p.tiles_per_group;
    tile.head = static_cast<int>(tile.unit / p.max_groups);
    const int group = static_cast<int>(tile.unit % p.max_groups);
    tile.request = p.group_requests[group];
    tile.first_slot = p.group_offsets[group] + tile.index * p.queries_per_tile;
    tile.live_queries = min(p.group_offsets[group + 1] - tile.first_slot, p.queries_per_tile);
    if (!kIsCluster && tile.live_queries <= 0) return;
    if constexpr (kIsCluster) cluster_sync();  // the other CTA's barriers are ready

    // Roles
    const int warp = threadIdx.x / 32;
    if (warp < kThreads / 32 - kConsumerWarps) {
        setmaxnreg_dec<kProducerRegisters>();
        if (warp == 0) produce<kIsCluster, true>(p, key_map, shared, tile);
        if (warp == 1) produce<kIsCluster, false>(p, key_map, shared, tile);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume<kIsCluster>(p, shared, tile);
    }
    // Neither CTA may end while the other still copies to it or releases its slots.
    if constexpr (kIsCluster) {
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace

cudaError_t launch_union_attention(const UnionParams& p, const CUtensorMap& key_map, Mapping mapping,
                                   cudaStream_t stream) {
    const bool is_cluster = mapping == Mapping::kCluster;
    if (is_cluster && p.tiles_per_group != 2) return cudaErrorInvalidValue;
    auto* const kernel = is_cluster ? union_attention<true> : union_attention<false>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(sizeof(SharedMemory)));
    if (error != cudaSuccess) return error;
    // One cluster at least: a call without a tile still zeroes its padding rows.
    const int cluster = is_cluster ? 2 : 1;
    const int64_t tiles = int64_t{p.num_kv_heads} * p.max_groups * p.tiles_per_group;
    return launch_dependent(kernel, cluster, tiles < 1 ? cluster : tiles, kThreads, sizeof(SharedMemory),
                            stream, p, key_map);
}

}  // namespace pageweaver
