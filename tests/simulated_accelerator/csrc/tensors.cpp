// The operators that torch asks of a device itself: allocation, copies, views, and those whose kernels need a hand.
#include "operators.h"

#include "device.h"
#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace sim {

namespace {

// Memory

c10::Device own_device(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return {kDeviceType, static_cast<c10::DeviceIndex>(current_device())};
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(own_device(device));
  return at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(own_device(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), Stream::get(stream.device_index(), stream.id()));
}

// Copies

// Host memory as a copy engine sees it: an address, which keeps nothing alive.
at::Tensor by_address(const at::Tensor& host) {
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides(), at::TensorOptions().dtype(host.dtype()));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  check_error();
  if (target.numel() == 0) return target;
  const bool crosses = is_on_device(source) != is_on_device(target);
  const at::Tensor& on_device = is_on_device(target) ? target : source;
  const at::Tensor& on_host = is_on_device(target) ? source : target;
  TORCH_CHECK(crosses || source.device() == target.device(), "Expected one simulated device, got two.");

  c10::DeviceGuard guard(on_device.device());
  Stream& stream = Stream::current();
  at::Tensor from = kernel_view(source), to = kernel_view(target);
  if (!crosses) {
    stream.push([to, from] { to.copy_(from); });
    return target;
  }

  const bool pinned = is_pinned(on_host.storage().data());
  if (non_blocking && pinned) {
    (is_on_device(source) ? to : from) = by_address(on_host);
    stream.push([to, from] { to.copy_(from); });
    record_copy(on_host.storage().data(), stream.mark());
    return target;
  }
  if (non_blocking) ++counters().pageable_copies;
  stream.push([to, from] { to.copy_(from); });
  stream.synchronize();
  check_error();
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  check_error();
  c10::DeviceGuard guard(self.device());
  Stream& stream = Stream::current();
  auto result = std::make_shared<at::Scalar>();
  stream.push([from = kernel_view(self), result] { *result = from.item(); });
  stream.synchronize();
  check_error();
  return *result;
}

// Random numbers

// Its schema has no generator, and the CPU's kernel would take the CPU's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Normalisation

// The statistics have the dtype that the CPU's backward expects; shapes from meta tensors have CUDA's.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_layer_norm(
    const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps) {
  check_error();
  const at::IntArrayRef shape = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  auto dtype = input.scalar_type();
  for (const auto& parameter : {weight, bias})
    if (parameter && parameter->defined() && parameter->scalar_type() != dtype) dtype = at::kFloat;
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(shape.size()), sizes.end(), 1);

  c10::DeviceGuard guard(input.device());
  auto out = at::empty_like(input, at::MemoryFormat::Contiguous);
  auto mean = at::empty(sizes, input.options().dtype(dtype)), rstd = at::empty_like(mean);
  auto viewed = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? std::optional<at::Tensor>(kernel_view(*tensor)) : std::nullopt;
  };
  ++counters().kernels;
  Stream::current().push([input = kernel_view(input), shape = shape.vec(), weight = viewed(weight), bias = viewed(bias),
                          eps, out = kernel_view(out), mean = kernel_view(mean), rstd = kernel_view(rstd)] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [own, own_mean, own_rstd] = at::native_layer_norm(input, shape, weight, bias, eps);
    out.copy_(own), mean.copy_(own_mean), rstd.copy_(own_rstd);
  });
  return {out, mean, rstd};
}

// Views

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("record_stream", record_stream);

  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);

  library.impl("native_dropout", native_dropout);
  library.impl("native_layer_norm", native_layer_norm);

  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("set_.source_Tensor", set_tensor);
}

}  // namespace

}  // namespace sim
