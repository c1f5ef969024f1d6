// Copies from files into memory: how one is cut into stripes, which stripe comes next, when a copy is complete.
//
// One thread calls submit, promote, cancel and wait; any number of engine threads take stripes, read them and finish them. The order
// is decided anew for every stripe: demand before prefetch, among each first come first served.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "source_file.h"

namespace huorn {

struct Segment {
  const SourceFile* file;
  uint64_t offset;
  uint64_t bytes;
  uint64_t address;  // byte `offset` of the file goes there; both have the same remainder of kBlock
};

struct Completion {
  int64_t key;
  Failure failure;  // error 0: file and offset of the first segment
};

struct Copy {
  int64_t key;
  bool demand;
  bool cancelled = false;
  Failure failure;                // the first one
  const SourceFile* file;         // of the first segment as it was submitted
  uint64_t offset;
  std::vector<Segment> stripes;   // by address
  size_t next = 0;                // the first stripe that no lane has taken
  size_t reading = 0;             // stripes taken and not finished
};

// A stripe on its way: what is left to read of it.
class Request {
 public:
  Request() = default;
  Request(Copy& copy, const Segment& stripe);  // ahead if the copy is a prefetch now

  // The next read: with O_DIRECT whole blocks, else exactly the bytes needed.
  int descriptor() const { return file_->descriptor(); }
  uint64_t offset() const { return file_->direct() ? round_down(reached_) : reached_; }
  void* address() const { return reinterpret_cast<void*>(offset() + shift_); }
  uint32_t bytes() const;

  // Takes the result of that read: its bytes or a negative errno. True when the stripe has ended, well or not.
  bool advance(int64_t result);

  Copy& copy() const { return *copy_; }
  bool ahead() const { return ahead_; }
  const Failure& failure() const { return failure_; }
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  Copy* copy_ = nullptr;
  bool ahead_ = false;
  const SourceFile* file_ = nullptr;
  uint64_t shift_ = 0;    // address less offset, modulo 2^64
  uint64_t reached_ = 0;  // offset behind the bytes that have landed
  uint64_t end_ = 0;      // offset behind the bytes needed
  uint64_t bytes_read_ = 0;
  Failure failure_;
};

class CopyQueue {
 public:
  // Of prefetches at most `most_ahead` stripes are read at once, so that a demand copy finds lanes free and the device not full.
  // With a `link_bytes_s` above 0 stripes end as if they came one after the other over a link of that speed.
  CopyQueue(uint64_t stripe_bytes, size_t most_ahead, double link_bytes_s);

  // ---- the caller ----
  void submit(int64_t key, std::vector<Segment> segments, bool demand);  // throws std::invalid_argument
  bool promote(int64_t key);
  bool cancel(int64_t key);
  // All completions there are; sleeps for `longest` at most until there is one.
  std::vector<Completion> wait(std::chrono::nanoseconds longest);
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }
  double busy_seconds() const;  // during which at least one stripe was being read
  size_t in_flight() const;
  void stop();  // nothing more starts; what has started goes on

  // ---- the engine ----
  bool take(Request& request);           // the next stripe to read; false when there is none now
  bool wait_and_take(Request& request);  // sleeps until there is one; false when stopped
  void finish(const Request& request);
  bool stopped() const;
  // When the link will have brought so many bytes more: called before a stripe is read, which must not end sooner.
  std::chrono::steady_clock::time_point reserve(uint64_t bytes);
  // Called when there is work, or the end, after `take` gave none.
  void on_work(std::function<void()> wake) { wake_ = std::move(wake); }

 private:
  using Clock = std::chrono::steady_clock;

  bool take_locked(Request& request, std::unique_lock<std::mutex>& lock);
  void stripe_begins(bool ahead);
  void stripe_leaves(bool ahead);
  void stripe_ended(Copy& copy, const Failure& failure, std::unique_lock<std::mutex>& lock);
  std::list<Copy>& queue_of(const Copy& copy);  // of one with stripes to take
  void drop_rest(Copy& copy);
  void complete(Copy& copy);

  const uint64_t stripe_blocks_;
  const size_t most_ahead_;
  const double link_bytes_s_;
  std::atomic<uint64_t> bytes_read_{0};
  std::function<void()> wake_ = [] {};

  mutable std::mutex mutex_;  // everything below, and all copies
  std::condition_variable work_, landed_;
  size_t reading_stripes_ = 0, reading_ahead_ = 0;
  Clock::duration busy_{0};     // without the time since busy_since_ while something is being read
  Clock::time_point busy_since_, link_free_;
  size_t sleepers_ = 0;     // threads in wait_and_take
  bool starving_ = false;   // `take` gave none
  bool stopped_ = false;
  std::list<Copy> demand_, prefetch_;  // with stripes to take
  std::list<Copy> reading_;            // all stripes taken
  std::list<Copy> done_;               // complete, not yet returned by `wait`
  std::unordered_map<int64_t, std::list<Copy>::iterator> places_;
};

}  // namespace huorn
