// Device memory, which the host cannot touch, and pinned host memory, which the device copies from and to directly.
//
// [Note: two mappings] Device memory is mapped twice. Tensors have addresses in the first mapping, where every access is
// a segmentation fault; kernels run on the second. So a host that reads device memory dies, as it would with a GPU.
//
// [Note: reuse] A freed block is at once free for the next allocation of its own stream, before the stream has done what
// uses it: the order of the stream keeps the two apart. Whoever uses it on another stream must have waited, or have
// called record_stream. The block freed last is taken first: the worst case for whoever still reads it.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace sim {

// Allocations for `current_device()`, on its current stream.
c10::DeviceAllocator& device_allocator();

// Where kernels find what has this address; the address itself if it is the host's.
void* real_address(const void* address);

// The memory is used on this stream, too: it is not used again before what is queued there now is done.
void record_use(const void* address, Stream& stream);

struct DeviceMemory {
  size_t allocated = 0;
  size_t peak = 0;
  size_t reserved = 0;
};
DeviceMemory device_memory(int device);
void reset_peak(int device);

// What tensor.pin_memory() allocates from. As torch's for CUDA: memory is used again when the copies that were issued
// while it was alive are done.
at::HostAllocator& pinned_allocator();

bool is_pinned(const void* address);

// The marker is of a copy from or to the pinned memory with this address.
void record_copy(const void* address, Marker marker);

// As cudaHostRegister and cudaHostUnregister. c10::Error for memory that overlaps other pinned memory, or that is let go
// of while a copy is under way.
void register_host_memory(void* address, size_t nbytes);
void unregister_host_memory(void* address);

}  // namespace sim
