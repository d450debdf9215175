// mbarrier and cluster wrappers, named as the PTX they emit. Addresses are shared::cta
// offsets in 32 bits.
#pragma once

#include <cstdint>

namespace pageweaver {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the asynchronous proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same in threads where `arrives` is true, without a branch.
__device__ __forceinline__ void mbarrier_arrive_if(uint32_t barrier, bool arrives) {
    asm volatile(
        "{\n.reg .pred arrives;\n"
        "setp.ne.u32 arrives, %1, 0;\n"
        "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(barrier),
        "r"(static_cast<uint32_t>(arrives))
        : "memory");
}

// Arrives at the barrier of the same offset in a CTA of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t cta_rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(cta_rank)
        : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Whether the phase of the given parity has completed; returns at once.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits until the phase of the given parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "wait_again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait_again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// The same where arrivals come from another CTA of the cluster.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "wait_again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra wait_again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// mbarrier_wait, asleep between looks: where nothing hangs on a fraction of a microsecond, polling would take
// power and issue slots from those that compute.
__device__ __forceinline__ void mbarrier_wait_asleep(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_test_wait(barrier, parity)) __nanosleep(100);
}

__device__ __forceinline__ uint32_t cluster_cta_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Stores to the same offset of a CTA of the cluster, visible there after the next cluster_sync.
__device__ __forceinline__ void store_cluster(uint32_t address, uint32_t cta_rank, int32_t value) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.s32 [remote], %2;\n}" ::"r"(address),
        "r"(cta_rank), "r"(value)
        : "memory");
}

// Synchronises all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// Synchronises `threads` threads of the CTA, whole warps. Barrier 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace pageweaver
