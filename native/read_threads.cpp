#include <cerrno>
#include <system_error>
#include <thread>

#include <unistd.h>

#include "read_engine.h"

namespace huorn {
namespace {

class ThreadEngine : public ReadEngine {
 public:
  ThreadEngine(CopyQueue& queue, int lanes) {
    try {
      for (int i = 0; i < lanes; ++i) lanes_.emplace_back([&queue] { run(queue); });
    } catch (const std::system_error&) {
      if (lanes_.empty()) throw;  // else: as many lanes as the system gives threads
    }
  }
  const char* name() const override { return "threads"; }

 private:
  static void run(CopyQueue& queue) {
    Request request;
    while (queue.wait_and_take(request)) {
      int64_t result;
      auto earliest = queue.reserve(request.bytes());
      do {
        result = pread(request.descriptor(), request.address(), request.bytes(), static_cast<off_t>(request.offset()));
        if (result < 0) result = -errno;
      } while (!request.advance(result));
      std::this_thread::sleep_until(earliest);
      queue.finish(request);
    }
  }

  std::vector<std::jthread> lanes_;
};

}  // namespace

std::unique_ptr<ReadEngine> thread_engine(CopyQueue& queue, int lanes) { return std::make_unique<ThreadEngine>(queue, lanes); }

}  // namespace huorn
