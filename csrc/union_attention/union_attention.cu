// Union attention, FP8: each 64-row tile of head-rows (4 queries x 16 heads) traverses the pages that any
// of its queries selected, in ascending order, with one online softmax a row. A query meets only pages it
// selected: in all others its probabilities are 0 and its maximum stands, so no bit of its result depends
// on which queries run with it.
//
// Grid: one CTA an SM for the whole launch. It has three workers, of a tile each; a worker takes the next
// tile, those of the largest unions first, until there is none. In calls of few tiles two CTAs an SM have one
// worker each (kAlone). kIndependent: tiles share nothing. kCluster, one worker a CTA and one CTA a tile: the
// two tiles of a group are a cluster; each CTA copies half of every page of the union to both, and passes
// over pages that its own queries did not select.
//
// Threads: 512 (one worker: 256). Warpgroup 0 produces: warps 0 to 2 copy K and V^T, one for each worker;
// warp 3 draws tiles, one ahead of those at work. Warpgroups 1 to 3 are the workers: warp w of one holds rows
// 16 w to 16 w + 15 of its tile, at group size 16 half of the heads of two queries (head_row_of).
//
// Shared memory, 224 KiB: for each worker a K ring 2 x 16 KiB, a V^T ring 2 x 17 KiB (8 rows of ones below
// each page), Q 8 KiB, two tiles' queries, page metadata, barriers. One worker: 75 KiB.
//
// Registers: 56 producing, 152 consuming (output 64, scores in FP16 or half of a page's PV 32, row sums 4,
// probabilities 16, Q fragments 16). One worker: 40 and 216, for scores and a page's whole PV at once.
//
// A worker goes through a page step by step, and the other two through theirs meanwhile:
//
//   tensor cores  QK(j)     |                   | PV(j) high |           | PV(j) low |
//   the rest      who wants | maxima, P(j)      |            | O high += | Q(j+1)    | O low +=
//
// kAlone has fewer others to wait for: PV(j), in one product, runs beside QK(j+1).
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

template <Layout kLayout>
constexpr int kThreads = 128 * (1 + kWorkers<kLayout>);
// Registers of a producing and of a consuming thread.
template <Layout kLayout>
constexpr int kProducerRegisters = kLayout == Layout::kWorkers ? 56 : 40;
template <Layout kLayout>
constexpr int kConsumerRegisters = kLayout == Layout::kWorkers ? 152 : 216;
template <Layout kLayout>
constexpr int kCtasPerSm = kLayout == Layout::kWorkers ? 1 : 2;

// Shared memory that one CTA of a multiprocessor can have, but not two.
constexpr size_t kSharedOfOne = 116 * 1024;

template <Layout kLayout>
__global__ void __launch_bounds__(kThreads<kLayout>, kCtasPerSm<kLayout>)
    union_attention(const UnionParams p, const __grid_constant__ CUtensorMap key_map) {
    constexpr bool kIsCluster = kLayout == Layout::kCluster;
    extern __shared__ __align__(1024) uint8_t raw_shared[];
    auto& shared = *reinterpret_cast<SharedMemory<kLayout>*>(raw_shared);

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
        setmaxnreg_dec<kProducerRegisters<kLayout>>();
        if (warp < kWorkers<kLayout>)
            produce_tiles<kIsCluster>(p, key_map, shared.slots[warp], shared.states[warp]);
        else if (warp == 3)
            draw_tiles<kLayout>(p, shared);
    } else {
        setmaxnreg_inc<kConsumerRegisters<kLayout>>();
        // (Shuffled, so that the compiler knows that a warp's threads agree.)
        consume<kLayout>(p, shared, __shfl_sync(kAllLanes, warp / kConsumerWarps - 1, 0));
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
    const bool is_cluster = mapping == Mapping::kCluster;
    if (is_cluster && p.tiles_per_group != 2) return cudaErrorInvalidValue;
    int multiprocessors = 0;
    if (const cudaError_t error = count_multiprocessors(multiprocessors)) return error;
    // One cluster at least: a call without a tile still zeroes its padding rows.
    const int64_t tiles =
        std::max<int64_t>(is_cluster ? 2 : 1, int64_t{p.num_kv_heads} * p.max_groups * p.tiles_per_group);
    const auto launch = [&](auto layout) {
        constexpr Layout kLayout = decltype(layout)::value;
        // With a tile an SM at most, none takes two while others have none.
        constexpr size_t kShared = sizeof(SharedMemory<kLayout>);
        constexpr size_t kMost = kLayout == Layout::kAlone ? kSharedOfOne : kShared;
        const size_t shared = tiles <= multiprocessors ? kMost : kShared;
        auto* const kernel = union_attention<kLayout>;
        cudaError_t error = prefer_shared_memory(kernel);
        if (error == cudaSuccess) error = allow_shared_memory(kernel, kMost);
        if (error != cudaSuccess) return error;
        const int64_t ctas = kLayout == Layout::kCluster
                                 ? tiles
                                 : std::min<int64_t>(tiles, int64_t{kCtasPerSm<kLayout>} * multiprocessors);
        return launch_dependent(kernel, kLayout == Layout::kCluster ? 2 : 1, ctas, kThreads<kLayout>, shared,
                                stream, p, key_map);
    };
    if (is_cluster) return launch(std::integral_constant<Layout, Layout::kCluster>{});
    // Up to two tiles an SM a third worker would have nothing to do; up to six, three of them would take a
    // second turn with less to do, and two CTAs are through sooner.
    const int64_t tiles_per_sm = (tiles + multiprocessors - 1) / multiprocessors;
    if (tiles_per_sm <= 2 || (tiles_per_sm > 3 && tiles_per_sm <= 6))
        return launch(std::integral_constant<Layout, Layout::kAlone>{});
    return launch(std::integral_constant<Layout, Layout::kWorkers>{});
}

}  // namespace pageweaver
