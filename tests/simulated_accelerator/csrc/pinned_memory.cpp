#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace sim {

namespace {

struct Pinned {
  char* address;
  size_t bytes;
  std::vector<Marker> copies;  // that may be under way

  bool is_in_use() {
    auto is_done = [](const Marker& copy) { return copy.is_done(); };
    copies.erase(std::remove_if(copies.begin(), copies.end(), is_done), copies.end());
    return !copies.empty();
  }
};

struct PinnedMemory {
  std::mutex mutex;
  std::map<const char*, Pinned*> all;  // registered, or handed out by the allocator
  std::vector<Pinned*> freed;          // the allocator's, to be handed out again

  Pinned* find(const void* address) {
    auto* at = static_cast<const char*>(address);
    auto found = all.upper_bound(at);
    if (found == all.begin()) return nullptr;
    Pinned* pinned = std::prev(found)->second;
    return at < pinned->address + pinned->bytes ? pinned : nullptr;
  }
};

PinnedMemory& memory() {
  static PinnedMemory* const made = new PinnedMemory;
  return *made;
}

Pinned* make(size_t bytes) {
  constexpr size_t kPageBytes = 4096;
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, kPageBytes, bytes) == 0, "Expected ", bytes, " bytes of memory, got none.");
  return new Pinned{static_cast<char*>(address), bytes, {}};
}

void free_pinned(void* context) {
  auto& mine = memory();
  std::lock_guard<std::mutex> lock(mine.mutex);
  auto* pinned = static_cast<Pinned*>(context);
  mine.all.erase(pinned->address);
  mine.freed.push_back(pinned);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    bytes = std::max<size_t>(bytes, 1);
    auto& mine = memory();
    std::lock_guard<std::mutex> lock(mine.mutex);
    auto fits = [bytes](Pinned* pinned) { return pinned->bytes == bytes && !pinned->is_in_use(); };
    auto found = std::find_if(mine.freed.begin(), mine.freed.end(), fits);

    Pinned* pinned;
    if (found == mine.freed.end()) {
      pinned = make(bytes);
    } else {
      pinned = *found;
      mine.freed.erase(found);
    }
    if (settings().poison != Poison::kNever) std::memset(pinned->address, 0xFF, bytes);
    mine.all[pinned->address] = pinned;
    return {pinned->address, pinned, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool record_event(void* address, void*, c10::Stream stream) override {
    record_copy(address, Stream::get(stream.device_index(), stream.id()).mark());
    return true;
  }

  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static PinnedAllocator* const made = new PinnedAllocator;
  return *made;
}

bool is_pinned(const void* address) {
  auto& mine = memory();
  std::lock_guard<std::mutex> lock(mine.mutex);
  return mine.find(address) != nullptr;
}

void record_copy(const void* address, Marker marker) {
  auto& mine = memory();
  std::lock_guard<std::mutex> lock(mine.mutex);
  if (Pinned* pinned = mine.find(address)) {
    pinned->is_in_use();  // forgets what is done
    pinned->copies.push_back(marker);
  }
}

void register_host_memory(void* address, size_t bytes) {
  auto& mine = memory();
  std::lock_guard<std::mutex> lock(mine.mutex);
  auto* begin = static_cast<char*>(address);
  auto after = mine.all.lower_bound(begin);
  const bool overlaps =
      mine.find(begin) != nullptr || (after != mine.all.end() && after->first < begin + bytes);
  TORCH_CHECK(bytes > 0 && !overlaps, "part or all of the requested memory range is already mapped");
  mine.all[begin] = new Pinned{begin, bytes, {}};
  touch(current_device());
}

void unregister_host_memory(void* address) {
  auto& mine = memory();
  std::lock_guard<std::mutex> lock(mine.mutex);
  auto found = mine.all.find(static_cast<char*>(address));
  TORCH_CHECK(found != mine.all.end(), "pointer does not correspond to a registered memory region");
  TORCH_CHECK(!found->second->is_in_use(), "Expected pinned memory without copies under way, got some.");
  delete found->second;
  mine.all.erase(found);
  touch(current_device());
}

}  // namespace sim
