// What reads the stripes of a queue: `lanes` requests at the device at most. Destroying one waits for them, since they write into the
// caller's memory; the queue must have been stopped.
#pragma once

#include <memory>

#include "copy_queue.h"

namespace huorn {

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;
  virtual const char* name() const = 0;
};

std::unique_ptr<ReadEngine> thread_engine(CopyQueue& queue, int lanes);  // one thread per lane, with pread
std::unique_ptr<ReadEngine> uring_engine(CopyQueue& queue, int lanes);   // one thread and a ring; null where the system has none

}  // namespace huorn
