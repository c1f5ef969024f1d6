// Copies bytes of files straight into memory, several requests at the device at once, demand before prefetch. Knows nothing of experts.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "read_engine.h"

namespace huorn {

class Reader {
 public:
  // `lanes` requests at the device at most, `ahead_lanes` of them for prefetches (0: all); a copy is cut into up to 16 stripes of
  // at least `stripe_bytes`. `link_bytes_s` above 0 slows reading down to that, for measurements. Throws std::invalid_argument.
  Reader(int lanes, int64_t stripe_bytes, bool direct, bool uring, int ahead_lanes, double link_bytes_s);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  int add_file(const char* path);             // throws std::system_error
  const SourceFile& file(int number) const;   // throws std::invalid_argument
  CopyQueue& queue() { return queue_; }
  const char* engine() const { return engine_->name(); }

 private:
  bool direct_;
  std::deque<SourceFile> files_;  // copies point into it: nothing in it moves
  CopyQueue queue_;
  std::unique_ptr<ReadEngine> engine_;
};

}  // namespace huorn
