// Launches of kernels that follow one another in a call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pageweaver {

// Waits until the kernels before this one are done and what they wrote is visible.
__device__ __forceinline__ void grid_dependency_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the kernel after this one start once every CTA has got here or ended; what that one needs of this one
// it still waits for.
__device__ __forceinline__ void grid_dependency_launch() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Multiprocessors of the current device.
inline cudaError_t count_multiprocessors(int& count) {
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device)
                                : error;
}

// Asks for the division of L1 and shared memory that the attention kernels need: a multiprocessor may have to
// drain before it is divided anew, and kernels that follow one another are to overlap.
template <typename Kernel>
cudaError_t prefer_shared_memory(Kernel* kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

// Lets `kernel` be launched with up to `bytes` of dynamic shared memory. A constant of the kernel: what one
// call needs would take from another that is being launched by another thread.
template <typename Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, size_t bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Launches `kernel` in clusters of `cluster` CTAs so that it may start, up to its grid_dependency_wait, while
// the kernel before it drains.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), int cluster, int64_t blocks, int threads,
                             size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace pageweaver
