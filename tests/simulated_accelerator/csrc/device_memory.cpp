#include "memory.h"

#include "device.h"

#include <sys/mman.h>
#include <cstring>
#include <map>
#include <set>

namespace sim {

namespace {

constexpr size_t kRegionBytes = size_t{64} << 30;  // of address space, for all devices
constexpr size_t kBlockMultiple = 512;
constexpr size_t kPageBytes = 4096;

size_t rounded(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

char* map(int protection) {
  void* address = mmap(nullptr, kRegionBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "Expected ", kRegionBytes, " bytes of address space, got none.");
  return static_cast<char*>(address);
}

struct Block {
  char* address;
  size_t bytes;
  Stream* stream;           // whose allocation it was
  std::set<Stream*> users;  // other streams that were recorded
};

// Freed, but still in use on other streams.
struct Pending {
  Block* block;
  std::vector<Marker> uses;
};

struct Heap {
  char* const seen = map(PROT_NONE);  // see [Note: two mappings]
  char* const real = map(PROT_READ | PROT_WRITE);

  std::mutex mutex;
  size_t used = kPageBytes;
  std::map<std::pair<Stream*, size_t>, std::vector<Block*>> free;
  std::map<const char*, Block*> live;
  std::vector<Pending> pending;
  DeviceMemory statistics[kNumDevices];
};

Heap& heap() {
  static Heap* const made = new Heap;
  return *made;
}

void poison(const Block& block) {
  void* address = real_address(block.address);
  block.stream->push([address, bytes = block.bytes] { std::memset(address, 0xFF, bytes); });
}

void put_back(Heap& heap, Block* block) {
  if (settings().poison == Poison::kWhenFreed) poison(*block);
  heap.free[{block->stream, block->bytes}].push_back(block);
}

void collect_pending(Heap& heap) {
  auto is_free = [&heap](const Pending& pending) {
    for (const Marker& use : pending.uses)
      if (!use.is_done()) return false;
    put_back(heap, pending.block);
    return true;
  };
  heap.pending.erase(std::remove_if(heap.pending.begin(), heap.pending.end(), is_free), heap.pending.end());
}

Block* fresh_block(Heap& heap, size_t bytes, Stream* stream) {
  TORCH_CHECK(heap.used + bytes < kRegionBytes, "sim out of memory: expected room for ", bytes, " bytes.");
  auto* block = new Block{heap.seen + heap.used, bytes, stream, {}};
  // A page of its own, so that whoever goes beyond the end of one block is not in the next.
  const size_t taken = rounded(bytes, kPageBytes);
  heap.used += taken;
  heap.statistics[stream->device].reserved += taken;
  ++counters().fresh_blocks;
  if (settings().poison != Poison::kNever) poison(*block);
  return block;
}

Block* take(size_t bytes) {
  Stream* stream = &Stream::current();
  touch(stream->device);
  Heap& all = heap();
  std::lock_guard<std::mutex> lock(all.mutex);
  collect_pending(all);

  Block* block;
  auto& free = all.free[{stream, bytes}];
  if (free.empty()) {
    block = fresh_block(all, bytes, stream);
  } else {
    block = free.back();
    free.pop_back();
    if (settings().poison == Poison::kWhenReused) poison(*block);
  }

  all.live[block->address] = block;
  auto& statistics = all.statistics[stream->device];
  statistics.allocated += bytes;
  statistics.peak = std::max(statistics.peak, statistics.allocated);
  return block;
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  Heap& all = heap();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.live.erase(block->address);
  all.statistics[block->stream->device].allocated -= block->bytes;

  std::vector<Marker> uses;
  for (Stream* user : block->users) uses.push_back(user->mark());
  block->users.clear();
  if (uses.empty()) {
    put_back(all, block);
  } else {
    all.pending.push_back({block, std::move(uses)});
  }
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(current_device()));
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    Block* block = take(rounded(bytes, kBlockMultiple));
    return {block->address, block, &give_back, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    Stream::current().push([to = real_address(to), from = real_address(from), bytes] { std::memcpy(to, from, bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), Stream::get(stream.device_index(), stream.id()));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const DeviceMemory memory = device_memory(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](auto& statistic, size_t current, size_t peak) {
      auto& all = statistic[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = static_cast<int64_t>(current);
      all.peak = static_cast<int64_t>(peak);
    };
    fill(stats.allocated_bytes, memory.allocated, memory.peak);
    fill(stats.reserved_bytes, memory.reserved, memory.reserved);
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

Allocator& allocator() {
  static Allocator* const made = new Allocator;
  return *made;
}

}  // namespace

c10::DeviceAllocator& device_allocator() { return allocator(); }

void* real_address(const void* address) {
  Heap& all = heap();
  auto* at = static_cast<const char*>(address);
  if (all.seen <= at && at < all.seen + kRegionBytes) return all.real + (at - all.seen);
  return const_cast<char*>(at);
}

void record_use(const void* address, Stream& stream) {
  Heap& all = heap();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto* at = static_cast<const char*>(address);
  auto found = all.live.upper_bound(at);
  if (found == all.live.begin()) return;

  Block* block = std::prev(found)->second;
  if (at < block->address + block->bytes && block->stream != &stream) {
    block->users.insert(&stream);
    ++counters().recorded_streams;
  }
}

DeviceMemory device_memory(int device) {
  Heap& all = heap();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.statistics[device];
}

void reset_peak(int device) {
  Heap& all = heap();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.statistics[device].peak = all.statistics[device].allocated;
}

}  // namespace sim
