// Copies bytes of files straight into memory, several requests at the device at once, demand before prefetch. Knows nothing of experts.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "read_engine.h"

namespace huorn {

class Reader {
 public:
  // `lanes` requests at the device at most; a copy is cut into up to 16 stripes of at least `stripe_bytes`. Throws
  // std::invalid_argument.
  Reader(int lanes, int64_t stripe_bytes, bool direct, bool uring);
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
