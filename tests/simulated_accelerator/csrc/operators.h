// Operators on tensors of the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

bool is_on_device(const at::Tensor& tensor);

// A CPU tensor over the same elements, where kernels find them: for work on a stream. It keeps no memory alive, as a
// kernel's pointers do not. A tensor of the host is returned as it is.
at::Tensor kernel_view(const at::Tensor& tensor);

}  // namespace sim
