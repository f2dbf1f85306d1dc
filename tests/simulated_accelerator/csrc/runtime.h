// What the whole simulated machine shares: its settings, what it counts, and its one error.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace sim {

constexpr int kNumDevices = 4;

// In which order streams get ahead of each other. Every one of these is an order that a real device may choose.
enum class Schedule : int {
  kPauses = 0,       // each piece of work begins after a random pause
  kLanesLast = 1,    // all but the default stream do nothing until something waits for them
  kDefaultLast = 2,  // the default stream does nothing until something waits for it
  kOneQueue = 3,     // all streams of a device run one piece of work at a time, in the order of their launches
};

// When memory that was let go of is overwritten, with 0xFF: NaN in every floating-point dtype.
enum class Poison : int {
  kNever = 0,
  kWhenFreed = 1,   // stricter than CUDA, where the bytes stay until somebody else writes them
  kWhenReused = 2,  // as CUDA's allocator lets it happen
};

struct Settings {
  std::atomic<Schedule> schedule{Schedule::kPauses};
  std::atomic<Poison> poison{Poison::kWhenReused};
  std::atomic<int64_t> max_pause_us{0};
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> queue_depth{1024};
  std::atomic<int64_t> patience_ms{1000};
};
Settings& settings();

struct Counters {
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> stream_syncs{0};      // a thread waited for a stream: a copy that blocks, item(), synchronize()
  std::atomic<int64_t> event_syncs{0};       // a thread waited for an event
  std::atomic<int64_t> full_queues{0};       // a thread waited for room in a launch queue
  std::atomic<int64_t> pageable_copies{0};   // non_blocking copies that blocked, since the host's memory is not pinned
  std::atomic<int64_t> fresh_blocks{0};      // device memory that no earlier block could serve
  std::atomic<int64_t> recorded_streams{0};  // record_stream
  std::atomic<int64_t> sync_operators{0};    // operators whose result's shape is known only when they have run

  // By the kernel's thread id: pieces of `stream_syncs` and `event_syncs`.
  void add_sync(bool is_event);
  std::map<int64_t, int64_t> syncs_by_thread();
  void add_sync_operator(const std::string& name);
  std::set<std::string> sync_operator_names();

 private:
  std::mutex mutex_;
  std::map<int64_t, int64_t> syncs_by_thread_;
  std::set<std::string> sync_operator_names_;
};
Counters& counters();

// The first failure of a kernel. As on CUDA it stays: every later call raises it, and nothing runs on any stream.
void set_error(const std::string& message);
bool has_error();
void check_error();
void reset_error();

// The thread's current device. Nothing is opened by choosing it, only by using it.
int current_device();
void set_current_device(int device);

// Says that this thread uses a device: a real one would have a context there from now on, of half a gigabyte.
void touch(int device);
std::set<std::pair<int, int64_t>> touched();  // (device, thread id)
void reset_touched();

int64_t thread_id();

}  // namespace sim
