// Bulk and tensor copies from global to shared memory, completing on an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace pageweaver {

// Orders ordinary stores to shared memory before later reads by wgmma and the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies `bytes` contiguous bytes (a multiple of 16) to this CTA.
__device__ __forceinline__ void cp_async_bulk(uint32_t target, const void* source, uint32_t bytes,
                                              uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Copies one box of a 4-D tensor map.
__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t target, const CUtensorMap* map,
                                                     uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The same of a 5-D tensor map.
__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t target, const CUtensorMap* map,
                                                     uint32_t barrier, int x, int y, int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

// Both to the same offset of every CTA in `cta_mask`, signalling each one's barrier.
__device__ __forceinline__ void cp_async_bulk_multicast(uint32_t target, const void* source, uint32_t bytes,
                                                        uint32_t barrier, uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], "
        "%2, "
        "[%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "h"(cta_mask)
        : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_multicast(uint32_t target, const CUtensorMap* map,
                                                               uint32_t barrier, uint16_t cta_mask, int x,
                                                               int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], "
        "[%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
        "l"(map), "r"(barrier), "h"(cta_mask), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

}  // namespace pageweaver
