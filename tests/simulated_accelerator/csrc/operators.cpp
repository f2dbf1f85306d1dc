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

// Every operator that has no implementation of its own.
void launch(const c10::OperatorHandle& op, Stack* stack) {
  check_error();
  Call(op, stack).launch();
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
