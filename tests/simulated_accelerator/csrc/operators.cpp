// Kernels are those of the CPU, queued on the current stream of their tensors' device. What they return must be known
// when they are queued: shapes come from running the operator on meta tensors, which have no data. An operator that
// cannot say, like nonzero, makes the host wait, as it does on CUDA.
#include "operators.h"

#include "device.h"
#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {

namespace {

using torch::jit::Stack;

// Running an operator without the device

template <class Map>
c10::IValue mapped(const c10::IValue& value, Map map, c10::Device device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDeviceType) return device;
  return value;
}

template <class Map>
std::shared_ptr<Stack> mapped_stack(const std::vector<c10::IValue>& values, Map map, c10::Device device) {
  auto stack = std::make_shared<Stack>();
  for (const auto& value : values) stack->push_back(mapped(value, map, device));
  return stack;
}

void keep_wrapped_number(const at::Tensor& from, const at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

at::Tensor meta_like(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta);
  auto out = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  keep_wrapped_number(tensor, out);
  return out;
}

// What a kernel is handed. Scalars of the host are values at the time of the launch.
at::Tensor kernel_argument(const at::Tensor& tensor) {
  if (tensor.defined() && !is_on_device(tensor) && tensor.dim() == 0) return tensor.clone();
  return kernel_view(tensor);
}

void run_with(const c10::OperatorHandle& op, Stack& stack, c10::DispatchKey key) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

at::Tensor empty_like_on(const at::Tensor& like, int device) {
  const c10::Device own(kDeviceType, static_cast<c10::DeviceIndex>(device));
  return at::empty_strided(like.sizes(), like.strides(), at::TensorOptions().dtype(like.dtype()).device(own));
}

// One call of an operator.

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), results_(stack), arguments_(stack->end() - num_arguments(), stack->end()) {
    torch::jit::drop(*stack, num_arguments());
    device_ = find_device();
    for (size_t i = 0; i < num_arguments(); ++i)
      if (schema_.arguments()[i].type()->str().find("Generator") != std::string::npos) generator_index_ = i;
  }

  void launch() {
    c10::DeviceGuard guard(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device_)));
    stream_ = &Stream::current(device_);
    ++counters().kernels;

    if (generator_index_ && fills_at_random()) {
      fill_at_random();
      return;
    }
    if (generator_index_) use_generator_of_its_own();
    if (writes_only()) {
      launch_in_place();
    } else if (auto shapes = result_shapes()) {
      launch_into(*shapes);
    } else {
      run_and_wait();
    }
  }

 private:
  size_t num_arguments() const { return schema_.arguments().size(); }

  int find_device() const {
    std::optional<int> found;
    auto look = [&found](const at::Tensor& tensor) {
      if (!found && is_on_device(tensor)) found = tensor.device().index();
      return tensor;
    };
    for (const auto& argument : arguments_) {
      mapped(argument, look, at::kCPU);
      if (!found && argument.isDevice() && argument.toDevice().has_index()) found = argument.toDevice().index();
    }
    return found.value_or(current_device());
  }

  // Random numbers
  //
  // They are drawn when the operator is launched, as CUDA takes a piece of its generator's sequence there: the order of
  // the program decides, not that of the streams.

  at::Generator own_generator() const {
    const auto& given = arguments_[*generator_index_];
    return given.isGenerator() ? given.toGenerator() : generator(device_);
  }

  // Whether the operator does nothing but to fill its one tensor, whatever is in it.
  bool fills_at_random() const {
    size_t num_tensors = 0;
    for (const auto& argument : arguments_) num_tensors += argument.isTensor() || argument.isTensorList();
    return num_tensors == 1 && writes_only();
  }

  // The numbers are the CPU's for the same seed, so that models begin alike on both.
  void fill_at_random() {
    size_t index = 0;
    while (!arguments_[index].isTensor()) ++index;
    const at::Tensor target = arguments_[index].toTensor();
    const at::Tensor drawn = at::empty(target.sizes(), target.options().device(at::kCPU));
    Stack stack(arguments_.begin(), arguments_.end());
    stack[index] = drawn;
    stack[*generator_index_] = own_generator();
    run_with(op_, stack, c10::DispatchKey::CPU);

    if (target.sizes() != drawn.sizes()) at::native::resize_(target, drawn.sizes());
    stream_->push([to = kernel_view(target), drawn] { to.copy_(drawn); });
    results_->push_back(target);
  }

  // An operator whose result depends on its arguments, too, draws from a generator that was seeded from the device's.
  void use_generator_of_its_own() {
    at::Generator source = own_generator();
    std::lock_guard<std::mutex> lock(source.mutex());
    const uint64_t seed = at::check_generator<at::CPUGeneratorImpl>(source)->random64();
    arguments_[*generator_index_] = c10::IValue(at::detail::createCPUGenerator(seed));
  }

  // Whether all results are tensors, that is known when the operator is launched.
  bool returns_tensors() const {
    for (const auto& result : schema_.returns()) {
      const auto type = result.type()->str();
      if (type != "Tensor" && type != "Tensor[]") return false;
    }
    return true;
  }

  // Whether everything that the operator answers are arguments which it has written to.
  bool writes_only() const {
    if (!returns_tensors()) return false;
    if (schema_.returns().empty()) {
      for (const auto& argument : schema_.arguments())
        if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return true;
      return false;
    }
    for (const auto& result : schema_.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK(
          alias == nullptr || alias->isWrite(), "Expected views to be made by operators of their own, got ",
          toString(schema_.operator_name()), ".");
      if (alias == nullptr) return false;
    }
    return true;
  }

  std::shared_ptr<Stack> kernel_arguments() const { return mapped_stack(arguments_, kernel_argument, at::kCPU); }

  // The results, as meta tensors; none if they depend on values.
  std::shared_ptr<Stack> result_shapes() const {
    if (!returns_tensors()) return nullptr;
    auto stack = mapped_stack(arguments_, meta_like, at::kMeta);
    try {
      run_with(op_, *stack, c10::DispatchKey::Meta);
    } catch (const c10::NotImplementedError&) {
      return nullptr;
    } catch (const std::exception&) {
      // An operator without shapes of its own, or arguments that it refuses: running it tells which.
      return nullptr;
    }
    return stack;
  }

  void resize_outputs() const {
    auto metas = mapped_stack(arguments_, meta_like, at::kMeta);
    const std::vector<c10::IValue> wanted(*metas);
    try {
      run_with(op_, *metas, c10::DispatchKey::Meta);
    } catch (const std::exception&) {
      return;  // the kernel will say what is wrong
    }
    for (size_t i = 0; i < num_arguments(); ++i) {
      if (!schema_.arguments()[i].is_out() || !arguments_[i].isTensor()) continue;
      const auto& out = arguments_[i].toTensor();
      const auto sizes = wanted[i].toTensor().sizes();
      if (out.sizes() != sizes) at::native::resize_(out, sizes);
    }
  }

  void launch_in_place() {
    for (const auto& argument : schema_.arguments())
      if (argument.is_out()) {
        resize_outputs();
        break;
      }
    stream_->push([op = op_, stack = kernel_arguments()] { run_with(op, *stack, c10::DispatchKey::CPU); });
    for (const auto& result : schema_.returns()) push_argument_for(*result.alias_info());
  }

  void push_argument_for(const c10::AliasInfo& alias) {
    for (size_t i = 0; i < num_arguments(); ++i) {
      const auto* own = schema_.arguments()[i].alias_info();
      if (own != nullptr && own->isWrite() && *own == alias) {
        results_->push_back(arguments_[i]);
        return;
      }
    }
  }

  void launch_into(const Stack& shapes) {
    auto make = [this](const at::Tensor& shape) { return shape.defined() ? empty_like_on(shape, device_) : shape; };
    auto targets = std::make_shared<Stack>();
    for (const auto& shape : shapes) {
      results_->push_back(mapped(shape, make, at::kCPU));
      targets->push_back(mapped(results_->back(), kernel_view, at::kCPU));
    }
    stream_->push([op = op_, stack = kernel_arguments(), targets] {
      run_with(op, *stack, c10::DispatchKey::CPU);
      for (size_t i = 0; i < targets->size(); ++i) copy_results((*stack)[i], (*targets)[i]);
    });
  }

  static void copy_results(const c10::IValue& from, const c10::IValue& to) {
    if (to.isTensorList()) {
      const auto sources = from.toTensorVector(), targets = to.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(sources[i]);
    } else if (to.toTensor().defined() && from.toTensor().defined()) {
      to.toTensor().copy_(from.toTensor());
    }
  }

  void run_and_wait() {
    counters().add_sync_operator(toString(schema_.operator_name()));
    auto stack = kernel_arguments();
    auto failure = std::make_shared<std::exception_ptr>();
    stream_->push([op = op_, stack, failure] {
      // What is wrong with the arguments is told to the caller, who waits, and is no failure of the device.
      try {
        run_with(op, *stack, c10::DispatchKey::CPU);
      } catch (...) {
        *failure = std::current_exception();
      }
    });
    stream_->synchronize();
    check_error();
    if (*failure) std::rethrow_exception(*failure);

    auto to_device = [this](const at::Tensor& computed) {
      if (!computed.defined()) return computed;
      auto out = empty_like_on(computed, device_);
      stream_->push([to = kernel_view(out), computed] { to.copy_(computed); });
      return out;
    };
    for (const auto& result : *stack) results_->push_back(mapped(result, to_device, at::kCPU));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack* results_;
  std::vector<c10::IValue> arguments_;
  std::optional<size_t> generator_index_;
  int device_ = 0;
  Stream* stream_ = nullptr;
};

void launch(const c10::OperatorHandle& op, Stack* stack) {
  check_error();
  Call(op, stack).launch();
}

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

  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_offset);
  library.impl("set_.source_Tensor", set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>());
}

}  // namespace

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }

at::Tensor kernel_view(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);

  const size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK(
      needed <= tensor.storage().nbytes(), "sim error: an illegal memory access: a tensor of ", needed,
      " bytes over a storage of ", tensor.storage().nbytes(), ".");
  char* address = static_cast<char*>(real_address(tensor.storage().data()));
  auto out = at::from_blob(
      address + tensor.storage_offset() * tensor.itemsize(), tensor.sizes(), tensor.strides(), options);
  keep_wrapped_number(tensor, out);
  return out;
}

}  // namespace sim
