// Streams: each is a thread that does what is queued, in order, apart from the host and from other streams.
#pragma once

#include "runtime.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace sim {

class Stream;

// A moment in a stream's work: done when everything that was queued before it is.
struct Marker {
  Stream* stream;
  uint64_t position;

  bool is_done() const;
  bool query() const;  // as `is_done`, by a program that may go on asking until it is: even a lazy stream gets there
  void wait() const;   // blocks this thread: the host's, or another stream's
};

// Keeps a stream where it is until it is opened, or nobody has it any more.
class Gate {
 public:
  Gate() : state_(std::make_shared<State>()) {}
  ~Gate() { open(); }
  Gate(Gate&&) = default;
  void open();

 private:
  friend class Stream;

  struct State {
    std::mutex mutex;
    std::condition_variable opened;
    bool is_open = false;
  };
  std::shared_ptr<State> state_;
};

class Stream {
 public:
  Stream(int device, int64_t id);

  // Streams are made when they are first asked for, and never destroyed.
  static Stream& get(int device, int64_t id);
  static Stream& current();
  static Stream& current(int device);
  static int64_t current_id(int device);
  static void set_current(int device, int64_t id);
  static int64_t next_id(int device);  // of the pool's streams, in turn
  static std::vector<Stream*> all(int device);

  // Queues work. Waits, as a launch on CUDA does, while the queue is full.
  void push(std::function<void()> work);
  void wait_for(Marker marker);  // this stream's later work comes after the marker
  Marker mark();
  Gate hold();  // whatever is queued from here on begins when the gate has been opened

  // The host waits for what is queued; counted.
  void synchronize();
  bool is_idle();

  const int device;
  const int64_t id;

 private:
  friend struct Marker;

  struct Work {
    std::function<void()> run;
    uint64_t turn;  // in the device's one queue, from 1; 0: of no such queue
  };

  void run();
  void add(std::function<void()> work);  // with the mutex
  Work next();
  bool is_lazy() const;
  void demand(uint64_t position);  // with the mutex

  std::mutex mutex_;
  std::condition_variable queued_, advanced_;
  std::deque<Work> queue_;
  uint64_t issued_ = 0;    // pieces of work that were queued
  uint64_t done_ = 0;      // of these
  uint64_t demanded_ = 0;  // of these, what something has waited for
};

void synchronize_device(int device);

// Before the interpreter ends: lets no stream begin anything more, and gives what runs a moment to end.
void stop_streams();

}  // namespace sim
