#include "runtime.h"

#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sim {

namespace {

// These, and all that streams use, are never destroyed: their threads run until the process ends.
template <class T>
T& immortal() {
  static T* const object = new T;
  return *object;
}

struct ErrorState {
  std::mutex mutex;
  std::atomic<bool> is_set{false};
  std::string message;
};

struct Touched {
  std::mutex mutex;
  std::set<std::pair<int, int64_t>> pairs;
};

thread_local int t_device = 0;

}  // namespace

Settings& settings() { return immortal<Settings>(); }
Counters& counters() { return immortal<Counters>(); }

void Counters::add_sync(bool is_event) {
  ++(is_event ? event_syncs : stream_syncs);
  std::lock_guard<std::mutex> lock(mutex_);
  ++syncs_by_thread_[thread_id()];
}

std::map<int64_t, int64_t> Counters::syncs_by_thread() {
  std::lock_guard<std::mutex> lock(mutex_);
  return syncs_by_thread_;
}

void Counters::add_sync_operator(const std::string& name) {
  ++sync_operators;
  std::lock_guard<std::mutex> lock(mutex_);
  sync_operator_names_.insert(name);
}

std::set<std::string> Counters::sync_operator_names() {
  std::lock_guard<std::mutex> lock(mutex_);
  return sync_operator_names_;
}

void set_error(const std::string& message) {
  auto& error = immortal<ErrorState>();
  std::lock_guard<std::mutex> lock(error.mutex);
  if (!error.is_set) error.message = message;
  error.is_set = true;
}

bool has_error() { return immortal<ErrorState>().is_set; }

void check_error() {
  auto& error = immortal<ErrorState>();
  if (!error.is_set) return;
  std::lock_guard<std::mutex> lock(error.mutex);
  TORCH_CHECK(false, "sim error: a kernel failed some time before this call: ", error.message);
}

void reset_error() {
  auto& error = immortal<ErrorState>();
  std::lock_guard<std::mutex> lock(error.mutex);
  error.message.clear();
  error.is_set = false;
}

int current_device() { return t_device; }

void set_current_device(int device) {
  TORCH_CHECK(0 <= device && device < kNumDevices, "Expected a device below ", kNumDevices, ", got ", device, ".");
  t_device = device;
}

void touch(int device) {
  auto& all = immortal<Touched>();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.pairs.insert({device, thread_id()});
}

std::set<std::pair<int, int64_t>> touched() {
  auto& all = immortal<Touched>();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.pairs;
}

void reset_touched() {
  auto& all = immortal<Touched>();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.pairs.clear();
}

int64_t thread_id() {
  thread_local const int64_t id = syscall(SYS_gettid);
  return id;
}

}  // namespace sim
