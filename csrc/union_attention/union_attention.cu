// Union attention, FP8: each 64-row tile of head-rows (4 queries x 16 heads) traverses the pages that any
// of its queries selected, in ascending order, with one online softmax a row. A query meets only pages it
// selected: in all others its probabilities are 0 and its maximum stands, so no bit of its result depends
// on which queries run with it.
//
// Grid: one CTA an SM for the whole launch, or one a tile where there are fewer. It has three workers, of a
// tile each; a worker takes the next tile, those of the largest unions first, until there is none.
// kIndependent: tiles share nothing. kCluster, one worker a CTA and one CTA a tile: the two tiles of a group
// are a cluster; each CTA copies half of every page of the union to both, and passes over pages that its own
// queries did not select.
//
// Threads: 512 (kCluster: 256). Warpgroup 0 produces: warps 0 to 2 copy K and V^T, one for each worker; warp
// 3 draws tiles, one ahead of those at work. Warpgroups 1 to 3 are the workers: warp w of one holds rows 16 w
// to 16 w + 15 of its tile, at group size 16 half of the heads of two queries (head_row_of).
//
// Shared memory, 224 KiB: for each worker a K ring 2 x 16 KiB, a V^T ring 2 x 17 KiB (8 rows of ones below
// each page), Q 8 KiB, two tiles' queries, page metadata, barriers. kCluster: 75 KiB.
//
// Registers: 56 producing, 152 consuming (output 64, scores in FP16 or half of a page's PV 32, row sums 4,
// probabilities 16, Q fragments 16). kCluster: 40 and 216.
//
// A worker goes through a page step by step, and the other two through theirs meanwhile:
//
//   tensor cores  QK(j)     |                   | PV(j) high |           | PV(j) low |
//   the rest      who wants | maxima, exp, P(j) |            | O high += | Q(j+1)    | O low +=
//
// Invariants: full_* take one arrival of the producer and the bytes of the slot; empty_* one arrival of each
// warp of the worker, or of both workers of a cluster, each for itself: an elected thread could release what
// a slower warp still reads. Scores are FP16, which holds them to 11 bits, of which E4M3 numbers would fill
// 4; queries are scaled so that none overflows. The tensor core keeps 13 bits of an FP32 accumulator's
// mantissa, so PV starts from zero in every page and is added to O in FP32: O = O * a + PV. Measurements
// behind each choice: docs/union_attention.md.

#include <algorithm>
#include <type_traits>

#include "primitives/launch.cuh"
#include "union_attention/consume.cuh"
#include "union_attention/pipeline.cuh"
#include "union_attention/row_sums.cuh"
#include "union_attention/union_attention.hpp"

namespace pageweaver {
namespace {

template <bool kIsCluster>
constexpr int kThreads = 128 * (1 + kWorkers<kIsCluster>);
// Registers of a producing and of a consuming thread. Copies in a cluster need a few more.
template <bool kIsCluster>
constexpr int kProducerRegisters = kIsCluster ? 40 : 56;
template <bool kIsCluster>
constexpr int kConsumerRegisters = kIsCluster ? 216 : 152;

template <bool kIsCluster>
__global__ void __launch_bounds__(kThreads<kIsCluster>, kIsCluster ? 2 : 1)
    union_attention(const UnionParams p, const __grid_constant__ CUtensorMap key_map) {
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    auto& shared = *reinterpret_cast<SharedMemory<kIsCluster>*>(raw_shared);

    // Barriers
    if (threadIdx.x == 0) {
        prefetch_tensormap(&key_map);
        constexpr int kReleases = kConsumerWarps * (kIsCluster ? 2 : 1);
        for (WorkerState& state : shared.states) {
            for (int s = 0; s < kStages; ++s) {
                mbarrier_init(smem_address(&state.full_key[s]), 1);
                mbarrier_init(smem_address(&state.empty_key[s]), kReleases);
                mbarrier_init(smem_address(&state.full_value[s]), 1);
                mbarrier_init(smem_address(&state.empty_value[s]), kReleases);
            }
            for (int s = 0; s < kTileSlots; ++s) {
                mbarrier_init(smem_address(&state.full_tile[s]), 1);
                mbarrier_init(smem_address(&state.empty_tile[s]), kConsumerWarps + 1);  // and who copies
            }
        }
        fence_mbarrier_init();
    }
    for (PageSlots& slots : shared.slots)
        for (ValueSlot& slot : slots.values)
            if (threadIdx.x < sizeof(slot.ones) / sizeof(slot.ones[0])) slot.ones[threadIdx.x] = kE4m3Ones;
    if (threadIdx.x < sizeof(shared.zeros)) shared.zeros[threadIdx.x] = 0;
    fence_proxy_async();
    __syncthreads();
    grid_dependency_wait();

    zero_padding_rows(p);
    if (kIsCluster && static_cast<int>(blockIdx.x) >= tile_count(p)) return;
    if constexpr (kIsCluster) cluster_sync();  // the other CTA's barriers are ready

    // Roles
    const int warp = threadIdx.x / kWarp;
    if (warp < kConsumerWarps) {
        setmaxnreg_dec<kProducerRegisters<kIsCluster>>();
        if (warp < kWorkers<kIsCluster>)
            produce_tiles<kIsCluster>(p, key_map, shared.slots[warp], shared.states[warp]);
        else if (warp == 3)
            draw_tiles<kIsCluster>(p, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters<kIsCluster>>();
        // (Shuffled, so that the compiler knows that a warp's threads agree.)
        consume<kIsCluster>(p, shared, __shfl_sync(kAllLanes, warp / kConsumerWarps - 1, 0));
    }
    // Neither CTA may end while the other still copies to it or releases its slots.
    if constexpr (kIsCluster) {
        __syncwarp();
        cluster_sync();
    }
}

}  // namespace

cudaError_t launch_union_attention(const UnionParams& p, const CUtensorMap& key_map, Mapping mapping,
                                   Arithmetic arithmetic, cudaStream_t stream) {
    if (arithmetic == Arithmetic::kSplit) return launch_split_attention(p, key_map, mapping, stream);
    const auto launch = [&](auto is_cluster) {
        constexpr bool kIsCluster = decltype(is_cluster)::value;
        constexpr int kCluster = kIsCluster ? 2 : 1;
        constexpr size_t kShared = sizeof(SharedMemory<kIsCluster>);
        if (kIsCluster && p.tiles_per_group != 2) return cudaErrorInvalidValue;
        auto* const kernel = union_attention<kIsCluster>;
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(kShared));
        int multiprocessors = 0;
        if (error == cudaSuccess) error = count_multiprocessors(multiprocessors);
        if (error != cudaSuccess) return error;
        // One cluster at least: a call without a tile still zeroes its padding rows.
        const int64_t tiles =
            std::max<int64_t>(kCluster, int64_t{p.num_kv_heads} * p.max_groups * p.tiles_per_group);
        const int64_t ctas = kIsCluster ? tiles : std::min<int64_t>(tiles, multiprocessors);
        return launch_dependent(kernel, kCluster, ctas, kThreads<kIsCluster>, kShared, stream, p, key_map);
    };
    return mapping == Mapping::kCluster ? launch(std::true_type{}) : launch(std::false_type{});
}

}  // namespace pageweaver
