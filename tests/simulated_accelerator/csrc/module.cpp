// What Python sees of the simulator, as the module `_sim`.
#include "collectives.h"
#include "device.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace {

using sim::Stream;

std::map<std::string, int64_t> counted() {
  auto& all = sim::counters();
  return {
      {"kernels", all.kernels},
      {"stream_syncs", all.stream_syncs},
      {"event_syncs", all.event_syncs},
      {"full_queues", all.full_queues},
      {"pageable_copies", all.pageable_copies},
      {"fresh_blocks", all.fresh_blocks},
      {"recorded_streams", all.recorded_streams},
      {"sync_operators", all.sync_operators},
  };
}

void configure(int schedule, int poison, int64_t max_pause_us, uint64_t seed, int64_t queue_depth, int64_t patience) {
  auto& all = sim::settings();
  all.schedule = static_cast<sim::Schedule>(schedule);
  all.poison = static_cast<sim::Poison>(poison);
  all.max_pause_us = max_pause_us;
  all.seed = seed;
  all.queue_depth = queue_depth;
  all.patience_ms = patience;
}

// A kernel on the current stream that fails.
void fail(const std::string& message) {
  Stream::current().push([message] { TORCH_CHECK(false, message); });
}

}  // namespace

PYBIND11_MODULE(_sim, module) {
  sim::register_device();

  module.attr("NUM_DEVICES") = sim::kNumDevices;
  module.def("configure", &configure);
  module.def("counted", &counted);
  module.def("syncs_by_thread", [] { return sim::counters().syncs_by_thread(); });
  module.def("sync_operator_names", [] { return sim::counters().sync_operator_names(); });
  module.def("touched", &sim::touched);
  module.def("reset_touched", &sim::reset_touched);

  module.def("current_device", &sim::current_device);
  module.def("set_current_device", &sim::set_current_device);
  module.def("synchronize", &sim::synchronize_device);
  module.def("generator", &sim::generator);
  module.def("stop_streams", &sim::stop_streams);

  module.def("fail", &fail);
  module.def("has_error", &sim::has_error);
  module.def("reset_error", &sim::reset_error);

  module.def("peak_bytes", [](int device) { return sim::device_memory(device).peak; });
  module.def("allocated_bytes", [](int device) { return sim::device_memory(device).allocated; });
  module.def("reserved_bytes", [](int device) { return sim::device_memory(device).reserved; });
  module.def("reset_peak", &sim::reset_peak);
  module.def("kernel_view", &sim::kernel_view);

  module.def("register_host_memory", [](int64_t address, size_t nbytes) {
    sim::register_host_memory(reinterpret_cast<void*>(address), nbytes);
  });
  module.def("unregister_host_memory", [](int64_t address) {
    sim::unregister_host_memory(reinterpret_cast<void*>(address));
  });

  py::class_<sim::Gate>(module, "Gate").def("open", &sim::Gate::open);
  module.def("hold", [](int device, int64_t stream_id) { return Stream::get(device, stream_id).hold(); });

  py::class_<sim::Communicator, c10d::Backend, c10::intrusive_ptr<sim::Communicator>>(module, "Communicator")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
        return c10::make_intrusive<sim::Communicator>(std::move(gloo), rank, size);
      }))
      .def_property_readonly("num_issued", &sim::Communicator::num_issued)
      .def("close", &sim::Communicator::close);
}
