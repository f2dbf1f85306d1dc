#include "streams.h"

#include "gil.h"

#include <c10/util/Exception.h>

#include <pthread.h>
#include <chrono>
#include <map>
#include <random>
#include <thread>

namespace sim {

namespace {

// As many as CUDA's pool has: whoever makes more shares streams.
constexpr int64_t kPoolSize = 32;

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, Stream*> streams;
  int64_t num_taken[kNumDevices] = {};
};

Registry& registry() {
  static Registry* const made = new Registry;
  return *made;
}

// The hardware queue that all streams of a device share in `Schedule::kOneQueue`, as with
// CUDA_DEVICE_MAX_CONNECTIONS=1: work whose turn has come keeps all later work waiting, of any stream.
struct OneQueue {
  std::mutex mutex;
  std::condition_variable advanced;
  uint64_t num_issued = 0, num_done = 0;
};

OneQueue& one_queue(int device) {
  static auto* const made = new OneQueue[kNumDevices];
  return made[device];
}

thread_local int64_t t_current[kNumDevices] = {};
std::atomic<bool> g_is_stopping{false};
std::atomic<int> g_num_running{0};

}  // namespace

bool Marker::is_done() const {
  std::lock_guard<std::mutex> lock(stream->mutex_);
  return stream->done_ >= position;
}

bool Marker::query() const {
  std::lock_guard<std::mutex> lock(stream->mutex_);
  if (stream->done_ >= position) return true;
  stream->demand(position);
  return false;
}

void Marker::wait() const {
  WithoutGil released;
  std::unique_lock<std::mutex> lock(stream->mutex_);
  stream->demand(position);
  stream->advanced_.wait(lock, [this] { return stream->done_ >= position; });
}

void Gate::open() {
  if (state_ == nullptr) return;  // moved from
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->is_open = true;
  }
  state_->opened.notify_all();
}

Stream::Stream(int device, int64_t id) : device(device), id(id) {
  std::thread([this] { run(); }).detach();
}

Stream& Stream::get(int device, int64_t id) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  Stream*& found = all.streams[{device, id}];
  if (found == nullptr) found = new Stream(device, id);
  return *found;
}

Stream& Stream::current() { return current(current_device()); }
Stream& Stream::current(int device) { return get(device, t_current[device]); }
int64_t Stream::current_id(int device) { return t_current[device]; }
void Stream::set_current(int device, int64_t id) { t_current[device] = id; }

int64_t Stream::next_id(int device) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  return 1 + all.num_taken[device]++ % kPoolSize;
}

std::vector<Stream*> Stream::all(int device) {
  auto& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Stream*> found;
  for (auto& [key, stream] : all.streams)
    if (key.first == device) found.push_back(stream);
  return found;
}

void Stream::push(std::function<void()> work) {
  touch(device);
  std::unique_lock<std::mutex> lock(mutex_);
  auto has_room = [this] { return static_cast<int64_t>(queue_.size()) < settings().queue_depth; };

  if (!has_room()) {
    ++counters().full_queues;
    // Python's lock is never taken back with the stream's in hand.
    lock.unlock();
    WithoutGil released;
    lock.lock();
    demand(issued_);
    advanced_.wait(lock, has_room);
    add(std::move(work));
    lock.unlock();
  } else {
    add(std::move(work));
    lock.unlock();
  }
  queued_.notify_one();
}

void Stream::add(std::function<void()> work) {
  uint64_t turn = 0;
  if (settings().schedule == Schedule::kOneQueue) {
    auto& shared = one_queue(device);
    std::lock_guard<std::mutex> lock(shared.mutex);
    turn = ++shared.num_issued;
  }
  queue_.push_back({std::move(work), turn});
  ++issued_;
}

void Stream::wait_for(Marker marker) {
  if (marker.stream == this) return;
  push([marker] { marker.wait(); });
}

Marker Stream::mark() {
  std::lock_guard<std::mutex> lock(mutex_);
  return {this, issued_};
}

Gate Stream::hold() {
  Gate gate;
  push([state = gate.state_] {
    std::unique_lock<std::mutex> lock(state->mutex);
    state->opened.wait(lock, [&state] { return state->is_open; });
  });
  return gate;
}

void Stream::synchronize() {
  touch(device);
  counters().add_sync(/*is_event=*/false);
  mark().wait();
}

bool Stream::is_idle() { return mark().query(); }

void Stream::demand(uint64_t position) {
  demanded_ = std::max(demanded_, position);
  queued_.notify_one();
}

bool Stream::is_lazy() const {
  switch (settings().schedule) {
    case Schedule::kLanesLast:
      return id != 0;
    case Schedule::kDefaultLast:
      return id == 0;
    default:
      return false;
  }
}

Stream::Work Stream::next() {
  std::unique_lock<std::mutex> lock(mutex_);
  queued_.wait(lock, [this] { return !queue_.empty(); });
  if (is_lazy()) {
    // A device gets to everything at some time: another rank may wait for what nothing here waits for.
    const auto patience = std::chrono::milliseconds(settings().patience_ms);
    if (!queued_.wait_for(lock, patience, [this] { return demanded_ > done_ || !is_lazy(); })) demanded_ = issued_;
  }
  auto work = std::move(queue_.front());
  queue_.pop_front();
  return work;
}

void Stream::run() {
  const std::string name = "sim:" + std::to_string(device) + " stream " + std::to_string(id);
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  std::mt19937_64 random;
  uint64_t seed = ~settings().seed;

  while (true) {
    auto [work, turn] = next();
    auto& shared = one_queue(device);
    if (turn > 0) {
      std::unique_lock<std::mutex> lock(shared.mutex);
      shared.advanced.wait(lock, [&shared, own = turn] { return shared.num_done == own - 1; });
    }
    if (const int64_t most = settings().max_pause_us; most > 0 && settings().schedule == Schedule::kPauses) {
      if (seed != settings().seed) random.seed((seed = settings().seed) + 7919 * id + 31 * device);
      // Mostly short, sometimes long: a stream must get far ahead of another now and then.
      const int64_t us = random() % 16 == 0 ? random() % (8 * most) : random() % (most / 4 + 1);
      if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
    }

    ++g_num_running;
    try {
      if (!has_error() && !g_is_stopping) work();
    } catch (const c10::Error& error) {
      set_error(error.what_without_backtrace());
    } catch (const std::exception& error) {
      set_error(error.what());
    }
    work = nullptr;  // what it holds is let go of before anybody hears that it is done
    --g_num_running;

    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++done_;
    }
    advanced_.notify_all();
    if (turn > 0) {
      {
        std::lock_guard<std::mutex> lock(shared.mutex);
        shared.num_done = turn;
      }
      shared.advanced.notify_all();
    }
  }
}

void synchronize_device(int device) {
  for (Stream* stream : Stream::all(device)) stream->mark().wait();
  counters().add_sync(/*is_event=*/false);
  touch(device);
  check_error();
}

void stop_streams() {
  WithoutGil released;
  g_is_stopping = true;
  for (int i = 0; i < 100 && g_num_running > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

}  // namespace sim
