#include "collectives.h"

#include "device.h"
#include "operators.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

namespace sim {

namespace {

using c10::intrusive_ptr;
using c10d::OpType;
using c10d::ReduceOp;

class Work final : public c10d::Work {
 public:
  Work(int rank, OpType type, Marker end, std::vector<at::Tensor> tensors)
      : c10d::Work(rank, type), end_(end), tensors_(std::move(tensors)) {}

  // What the current stream does from here on comes after the collective. Only a barrier makes the host wait.
  bool wait(std::chrono::milliseconds) override {
    check_error();
    if (opType_ == OpType::BARRIER) {
      counters().add_sync(/*is_event=*/true);
      end_.wait();
      check_error();
    } else {
      Stream::current(end_.stream->device).wait_for(end_);
    }
    tensors_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return !has_error(); }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  const Marker end_;
  // As in NCCL's: what a collective works on is not given back to the allocator before somebody has waited for it.
  std::vector<at::Tensor> tensors_;
};

void finish(const intrusive_ptr<c10d::Work>& work) { work->wait(); }

at::Tensor only(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(tensors.size() == 1, "Expected one tensor, got ", tensors.size(), ".");
  TORCH_CHECK(is_on_device(tensors[0]), "Expected a tensor of the device, got one on ", tensors[0].device(), ".");
  TORCH_CHECK(tensors[0].is_contiguous(), "Expected a contiguous tensor, got strides ", tensors[0].strides(), ".");
  return tensors[0];
}

// gloo lacks some dtypes; where it only moves bytes they do not matter.
at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

std::vector<at::Tensor> gathered(c10d::Backend& gloo, const at::Tensor& own) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < gloo.getSize(); ++rank) all.push_back(at::empty_like(own));
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (const auto& tensor : all) outputs[0].push_back(bytes_of(tensor));
  std::vector<at::Tensor> inputs{bytes_of(own)};
  finish(gloo.allgather(outputs, inputs));
  return all;
}

void gather_parts(c10d::Backend& gloo, const at::Tensor& to, const at::Tensor& from) {
  const auto parts = gathered(gloo, from);
  const auto targets = to.reshape({-1}).chunk(gloo.getSize());
  for (size_t rank = 0; rank < targets.size(); ++rank) targets[rank].copy_(parts[rank].reshape({-1}));
}

at::ScalarType sum_dtype(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) ? at::promote_types(tensor.scalar_type(), at::kFloat)
                                                  : tensor.scalar_type();
}

void scatter_sums(c10d::Backend& gloo, const at::Tensor& to, const at::Tensor& from, bool is_average) {
  const int rank = gloo.getRank(), size = gloo.getSize();
  const auto all = gathered(gloo, from);
  auto part_of = [&](int peer) { return all[peer].reshape({-1}).chunk(size)[rank].to(sum_dtype(from)); };
  if (to.numel() == 0) return;

  auto total = part_of(rank).clone();
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank) total.add_(part_of(peer));
  if (is_average) total.div_(size);
  to.copy_(total.reshape(to.sizes()));
}

bool is_average_of(const ReduceOp& op) {
  TORCH_CHECK(op == ReduceOp::AVG || op == ReduceOp::SUM, "Expected a sum or an average, got another reduction.");
  return op == ReduceOp::AVG;
}

// A collective of several pairs of tensors, as one piece of work.
struct Pairs {
  std::vector<at::Tensor> tensors, targets, sources;

  Pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(outputs.size() == inputs.size(), "Expected as many outputs as inputs.");
    for (size_t i = 0; i < outputs.size(); ++i) {
      targets.push_back(kernel_view(only({outputs[i]})));
      sources.push_back(kernel_view(only({inputs[i]})));
      TORCH_CHECK(inputs[i].scalar_type() == inputs[0].scalar_type(), "Tensors must have identical type, as for NCCL.");
      tensors.insert(tensors.end(), {outputs[i], inputs[i]});
    }
  }
};

}  // namespace

Communicator::Communicator(intrusive_ptr<c10d::Backend> gloo, int rank, int size)
    : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}

c10d::ErrorType Communicator::getError() {
  return *has_failed_ ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::SUCCESS;
}

intrusive_ptr<c10d::Work> Communicator::launch(
    OpType type, std::vector<at::Tensor> tensors, bool is_async, std::function<void()> run) {
  check_error();
  const int device = tensors.empty() ? current_device() : tensors[0].device().index();
  c10::DeviceGuard guard(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)));
  Stream& current = Stream::current();
  const int64_t number = ++num_issued_;

  std::optional<Marker> before;
  Stream* stream = &current;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_async) {
      if (own_stream_ == nullptr) own_stream_ = &Stream::get(device, Stream::next_id(device));
      stream = own_stream_;
    }
    before = last_;
  }
  if (is_async) stream->wait_for(current.mark());
  if (before) stream->wait_for(*before);

  const std::string name = c10d::opTypeToString(type);
  stream->push([run = std::move(run), failed = has_failed_, gloo = gloo_, name, number] {
    try {
      run();
    } catch (const std::exception& error) {
      *failed = true;
      TORCH_CHECK(false, "simccl: collective ", number, " of its group, ", name, ", failed: ", error.what());
    }
  });

  const Marker end = stream->mark();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    last_ = end;
  }
  ++counters().kernels;
  return c10::make_intrusive<Work>(getRank(), type, end, std::move(tensors));
}

intrusive_ptr<c10d::Work> Communicator::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  const auto tensor = only(tensors);
  return launch(OpType::BROADCAST, tensors, options.asyncOp, [gloo = gloo_, to = kernel_view(tensor), options] {
    std::vector<at::Tensor> bytes{bytes_of(to)};
    finish(gloo->broadcast(bytes, options));
  });
}

intrusive_ptr<c10d::Work> Communicator::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const auto tensor = only(tensors);
  return launch(OpType::ALLREDUCE, tensors, options.asyncOp, [gloo = gloo_, to = kernel_view(tensor), options] {
    const bool is_average = options.reduceOp == ReduceOp::AVG;
    c10d::AllreduceOptions own;
    own.reduceOp = is_average ? ReduceOp(ReduceOp::SUM) : options.reduceOp;
    std::vector<at::Tensor> wide{to.to(sum_dtype(to))};
    finish(gloo->allreduce(wide, own));
    if (is_average) wide[0].div_(gloo->getSize());
    if (!wide[0].is_same(to)) to.copy_(wide[0]);
  });
}

intrusive_ptr<c10d::Work> Communicator::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  // The others' tensors are left in any state, as the sum is here.
  c10d::AllreduceOptions all;
  all.reduceOp = options.reduceOp;
  all.asyncOp = options.asyncOp;
  return allreduce(tensors, all);
}

intrusive_ptr<c10d::Work> Communicator::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  const auto own = only(inputs);
  std::vector<at::Tensor> tensors(outputs.at(0)), targets;
  for (const auto& output : tensors) targets.push_back(kernel_view(output));
  tensors.push_back(own);
  return launch(OpType::ALLGATHER, tensors, options.asyncOp, [gloo = gloo_, targets, from = kernel_view(own)] {
    const auto parts = gathered(*gloo, from);
    for (size_t rank = 0; rank < parts.size(); ++rank) targets[rank].copy_(parts[rank]);
  });
}

intrusive_ptr<c10d::Work> Communicator::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  only({output}), only({input});
  auto run = [gloo = gloo_, to = kernel_view(output), from = kernel_view(input)] { gather_parts(*gloo, to, from); };
  return launch(OpType::_ALLGATHER_BASE, {output, input}, options.asyncOp, run);
}

intrusive_ptr<c10d::Work> Communicator::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  only({output}), only({input});
  const bool is_average = is_average_of(options.reduceOp);
  auto run = [gloo = gloo_, to = kernel_view(output), from = kernel_view(input), is_average] {
    scatter_sums(*gloo, to, from, is_average);
  };
  return launch(OpType::_REDUCE_SCATTER_BASE, {output, input}, options.asyncOp, run);
}

intrusive_ptr<c10d::Work> Communicator::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  const Pairs pairs(outputs, inputs);
  return launch(OpType::COALESCED, pairs.tensors, options.asyncOp, [gloo = gloo_, pairs] {
    for (size_t i = 0; i < pairs.targets.size(); ++i) gather_parts(*gloo, pairs.targets[i], pairs.sources[i]);
  });
}

intrusive_ptr<c10d::Work> Communicator::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  const Pairs pairs(outputs, inputs);
  const bool is_average = is_average_of(options.reduceOp);
  return launch(OpType::COALESCED, pairs.tensors, options.asyncOp, [gloo = gloo_, pairs, is_average] {
    for (size_t i = 0; i < pairs.targets.size(); ++i)
      scatter_sums(*gloo, pairs.targets[i], pairs.sources[i], is_average);
  });
}

intrusive_ptr<c10d::Work> Communicator::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  only({output}), only({input});
  auto run = [gloo = gloo_, to = kernel_view(output), from = kernel_view(input), output_sizes, input_sizes]() mutable {
    finish(gloo->alltoall_base(to, from, output_sizes, input_sizes));
  };
  return launch(OpType::ALLTOALL_BASE, {output, input}, options.asyncOp, run);
}

intrusive_ptr<c10d::Work> Communicator::gather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& options) {
  const auto own = only(inputs);
  std::vector<at::Tensor> tensors{own}, targets;
  for (const auto& output : outputs.empty() ? std::vector<at::Tensor>() : outputs[0]) {
    tensors.push_back(output);
    targets.push_back(kernel_view(output));
  }
  return launch(OpType::GATHER, tensors, options.asyncOp, [gloo = gloo_, targets, from = kernel_view(own)] {
    const auto parts = gathered(*gloo, from);
    for (size_t rank = 0; rank < targets.size(); ++rank) targets[rank].copy_(parts[rank]);
  });
}

intrusive_ptr<c10d::Work> Communicator::scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& options) {
  const auto own = only(outputs);
  std::vector<at::Tensor> tensors{own}, sources;
  for (const auto& input : inputs.empty() ? std::vector<at::Tensor>() : inputs[0]) {
    tensors.push_back(input);
    sources.push_back(kernel_view(input));
  }
  return launch(OpType::SCATTER, tensors, options.asyncOp, [gloo = gloo_, sources, to = kernel_view(own), options] {
    std::vector<at::Tensor> target{bytes_of(to)};
    std::vector<std::vector<at::Tensor>> parts;
    if (!sources.empty()) parts.emplace_back();
    for (const auto& source : sources) parts[0].push_back(bytes_of(source));
    finish(gloo->scatter(target, parts, options));
  });
}

intrusive_ptr<c10d::Work> Communicator::send(std::vector<at::Tensor>& tensors, int peer, int tag) {
  const auto tensor = only(tensors);
  return launch(OpType::SEND, tensors, /*is_async=*/false, [gloo = gloo_, from = kernel_view(tensor), peer, tag] {
    std::vector<at::Tensor> bytes{bytes_of(from)};
    finish(gloo->send(bytes, peer, tag));
  });
}

intrusive_ptr<c10d::Work> Communicator::recv(std::vector<at::Tensor>& tensors, int peer, int tag) {
  const auto tensor = only(tensors);
  return launch(OpType::RECV, tensors, /*is_async=*/false, [gloo = gloo_, to = kernel_view(tensor), peer, tag] {
    std::vector<at::Tensor> bytes{bytes_of(to)};
    finish(gloo->recv(bytes, peer, tag));
  });
}

intrusive_ptr<c10d::Work> Communicator::barrier(const c10d::BarrierOptions&) {
  return launch(OpType::BARRIER, {}, /*is_async=*/false, [gloo = gloo_] { finish(gloo->barrier()); });
}

}  // namespace sim
