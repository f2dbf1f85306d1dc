// Devices, streams and events as torch asks for them, and the random generators of the devices.
#include "device.h"

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace sim {

namespace {

// An event as a program has it: where it was recorded last, and, if it keeps the time, when that was reached.
struct Event {
  std::optional<Marker> marker;
  std::shared_ptr<std::atomic<double>> milliseconds;
};

Event& event_of(void* handle) { return *static_cast<Event*>(handle); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
Stream& stream_of(const c10::Stream& stream) { return Stream::get(stream.device_index(), stream.id()); }

c10::Stream torch_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)), id);
}

double now_milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Device getDevice() const override { return {kDeviceType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return torch_stream(index_of(device), Stream::current_id(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return torch_stream(index_of(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return torch_stream(index_of(device), Stream::next_id(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    Stream::set_current(stream.device_index(), stream.id());
    return before;
  }

  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    stream_of(stream).synchronize();
    check_error();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** handle, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag)
      const override {
    touch(current_device());
    if (*handle == nullptr) *handle = new Event;
    Event& event = event_of(*handle);
    Stream& recorded = stream_of(stream);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      auto milliseconds = std::make_shared<std::atomic<double>>(0.0);
      recorded.push([milliseconds] { *milliseconds = now_milliseconds(); });
      event.milliseconds = milliseconds;
    }
    event.marker = recorded.mark();
  }
  void block(void* handle, const c10::Stream& stream) const override {
    if (handle != nullptr && event_of(handle).marker) stream_of(stream).wait_for(*event_of(handle).marker);
  }
  bool queryEvent(void* handle) const override {
    check_error();
    return handle == nullptr || !event_of(handle).marker || event_of(handle).marker->query();
  }
  void synchronizeEvent(void* handle) const override {
    touch(current_device());
    counters().add_sync(/*is_event=*/true);
    if (handle != nullptr && event_of(handle).marker) event_of(handle).marker->wait();
    check_error();
  }
  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(handle);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto begun = event_of(begin).milliseconds, ended = event_of(end).milliseconds;
    TORCH_CHECK(begun && ended, "Expected events with enable_timing, got others.");
    return *ended - *begun;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream_of(stream));
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override {
    return {kDeviceType, static_cast<c10::DeviceIndex>(current_device())};
  }

  // As CUDA's does it: whatever the size was, new memory, and a copy of what was there.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr data(nullptr, impl->device());
    if (bytes > 0) {
      c10::DeviceGuard guard(impl->device());
      data = device_allocator().allocate(bytes);
      const size_t kept = std::min<size_t>(impl->nbytes(), bytes);
      if (impl->data_ptr()) device_allocator().copy_data(data.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

at::Generator& generator(int device) {
  static auto* const all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kNumDevices; ++i) made->push_back(at::detail::createCPUGenerator(1234 + i));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

void register_device() {
  c10::SetAllocator(kDeviceType, &device_allocator(), /*priority=*/1);
  at::setHostAllocator(kDeviceType, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace sim
