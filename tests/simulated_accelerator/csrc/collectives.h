// A communicator, as NCCL's: collectives of tensors of the device are work on a stream.
#pragma once

#include "streams.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// Collectives run in the order of their issue, whichever streams that is on: each waits for the one before. Issued with
// async_op they run on a stream of the communicator, otherwise on the current one; the host never waits, except in a
// barrier. One whose peer is missing keeps its stream for ever. What carries the bytes is a gloo group of its own, which
// only the streams' threads use.
//
// Sums are made in the order of the engine's own exchange on the CPU, this rank's part first and then the others' by
// rank, in fp32 or wider: results can be compared with the CPU's to the bit.
class Communicator final : public c10d::Backend {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);

  const std::string getBackendName() const override { return "simccl"; }
  c10d::ErrorType getError() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>&, const c10d::ReduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&, const c10d::GatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&, const c10d::ScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;

  // How many collectives have been issued, for messages and tests.
  int64_t num_issued() const { return num_issued_; }

  // Closes the connections, as the death of this rank would. Nothing may be issued any more.
  void close() { gloo_.reset(); }

 private:
  // Queues `run`, which may use gloo and wait for it, and answers the work.
  c10::intrusive_ptr<c10d::Work> launch(
      c10d::OpType type, std::vector<at::Tensor> tensors, bool is_async, std::function<void()> run);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex mutex_;
  std::optional<Marker> last_;
  Stream* own_stream_ = nullptr;
  std::atomic<int64_t> num_issued_{0};
  std::shared_ptr<std::atomic<bool>> has_failed_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace sim
