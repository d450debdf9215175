// Union attention in split arithmetic, FP8 caches: a high and a low E4M3 part of Q and of the probabilities,
// whose products go into one accumulator, low parts first. What it computes is as in union_attention.cu, and
// so is why PV starts from zero in every page.
//
// Grid: two CTAs an SM for the whole launch, or one a tile where there are fewer; a CTA takes the next tile,
// those of the largest unions first, until there is none. kCluster: one CTA a tile.
//
// Threads: 256. Warpgroup 0 produces: warp 0 copies K, warp 1 copies V^T, warp 2 draws tiles and copies their
// queries, one tile ahead. Warpgroup 1 consumes.
//
// Shared memory, 99 KiB: K ring 3 x 16 KiB, V^T ring 2 x 17 KiB (8 rows of zeros and ones below each page,
// row_sums.cuh), Q 16 KiB (raw, then both parts in place), two tiles' queries, page metadata, barriers.
//
// Registers: 32 producing, 224 consuming (output 64, scores 64, half of a page's PV and the row sums 36,
// probabilities 32).
//
// Pipeline, round j of the consumers (kIndependent; kCluster runs the same steps one after another):
//
//   tensor cores     PV(j-1) high, sums | QK(j)     | PV(j-1) low
//   everything else                     | O high += | max S(j)      | O low +=; exp, pack P(j)
//
// Invariants: full_* take one arrival of the producer and the bytes of the slot; empty_* one arrival of each
// consumer warp of the CTA or cluster, each for itself: an elected thread could release what a slower warp
// still reads. Queries are read by ordinary loads, so a proxy fence stands before their place is given back.
// Measurements behind each choice: docs/union_attention.md.

#include <algorithm>
#include <type_traits>

#include "primitives/launch.cuh"
#include "union_attention/row_sums.cuh"
#include "union_attention/split_consume.cuh"
#include "union_attention/split_pipeline.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {
namespace {

constexpr int kThreads = 256;
// Registers of a producing and of a consuming thread, 256 together. Copies in a cluster need a few more.
template <bool kIsCluster>
constexpr int kProducerRegisters = kIsCluster ? 40 : 32;

template <bool kIsCluster>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    split_attention(const UnionParams p, const __grid_constant__ CUtensorMap key_map) {
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    auto& shared = *reinterpret_cast<SplitMemory*>(raw_shared);

    // Barriers
    constexpr int kReleases = kConsumerWarps * (kIsCluster ? 2 : 1);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        for (int s = 0; s < kSplitStages; ++s) {
            mbarrier_init(smem_address(&shared.full_key[s]), 1);
            mbarrier_init(smem_address(&shared.empty_key[s]), kReleases);
        }
        for (int s = 0; s < kSplitValueStages; ++s) {
            mbarrier_init(smem_address(&shared.full_value[s]), 1);
            mbarrier_init(smem_address(&shared.empty_value[s]), kReleases);
        }
        for (int s = 0; s < kTileSlots; ++s) {
            mbarrier_init(smem_address(&shared.full_tile[s]), 1);
            mbarrier_init(smem_address(&shared.empty_tile[s]), kConsumerWarps + 2);  // and those that copy
        }
        mbarrier_init(smem_address(&shared.full_q), 1);
        mbarrier_init(smem_address(&shared.empty_q), kConsumerWarps);
        fence_mbarrier_init();
    }
    {
        // With the swizzle: the 16-byte chunk that stands at c in a row n holds chunk c ^ n.
        const int column = threadIdx.x / 32, chunk = threadIdx.x / 4 % 8 ^ column;
        for (ValueSlot& slot : shared.values)
            slot.ones[threadIdx.x] = row_sum_ones<8>(column, 16 * chunk + 4 * (threadIdx.x % 4));
    }
    static_assert(sizeof(ValueSlot::ones) == kThreads * sizeof(uint32_t));
    fence_proxy_async();
    __syncthreads();
    grid_dependency_wait();

    zero_padding_rows(p);
    if (kIsCluster && static_cast<int>(blockIdx.x) >= tile_count(p)) return;
    if constexpr (kIsCluster) cluster_sync();  // the other CTA's barriers are ready

    // Roles
    const int warp = threadIdx.x / 32;
    if (warp < kThreads / 32 - kConsumerWarps) {
        setmaxnreg_dec<kProducerRegisters<kIsCluster>>();
        if (warp == 0) produce_tiles<kIsCluster, true>(p, key_map, shared);
        if (warp == 1) produce_tiles<kIsCluster, false>(p, key_map, shared);
        if (warp == 2) draw_tiles<kIsCluster>(p, shared);
    } else {
        setmaxnreg_inc<256 - kProducerRegisters<kIsCluster>>();
        consume_split<kIsCluster>(p, shared);
    }
    // Neither CTA may end while the other still copies to it or releases its slots.
    if constexpr (kIsCluster) {
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace

cudaError_t launch_split_attention(const UnionParams& p, const CUtensorMap& key_map, Mapping mapping,
                                   cudaStream_t stream) {
    const auto launch = [&](auto is_cluster) {
        constexpr bool kIsCluster = decltype(is_cluster)::value;
        constexpr int kCluster = kIsCluster ? 2 : 1;
        constexpr size_t kShared = sizeof(SplitMemory);
        if (kIsCluster && p.tiles_per_group != 2) return cudaErrorInvalidValue;
        auto* const kernel = split_attention<kIsCluster>;
        cudaError_t error = allow_shared_memory(kernel, kShared);
        int multiprocessors = 0;
        if (error == cudaSuccess) error = count_multiprocessors(multiprocessors);
        if (error != cudaSuccess) return error;
        // One cluster at least: a call without a tile still zeroes its padding rows.
        const int64_t tiles =
            std::max<int64_t>(kCluster, int64_t{p.num_kv_heads} * p.max_groups * p.tiles_per_group);
        const int64_t ctas =
            kIsCluster ? tiles : std::min<int64_t>(tiles, int64_t{kCtasPerSm} * multiprocessors);
        return launch_dependent(kernel, kCluster, ctas, kThreads, kShared, stream, p, key_map);
    };
    return mapping == Mapping::kCluster ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace pageweaver
