#include "read_engine.h"

#if __has_include(<linux/io_uring.h>)

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>

#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace huorn {
namespace {

class Descriptor {
 public:
  explicit Descriptor(long number) : number_(static_cast<int>(number)) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }

 private:
  int number_;
};

class Mapping {
 public:
  Mapping(int descriptor, size_t bytes, off_t offset) : bytes_(bytes) {
    if (descriptor >= 0)
      data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, offset);
  }
  ~Mapping() {
    if (valid()) munmap(data_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  bool valid() const { return data_ != MAP_FAILED; }
  template <typename T>
  T* at(uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  size_t bytes_;
  void* data_ = MAP_FAILED;
};

// The two rings shared with the kernel, used by one thread.
class Ring {
 public:
  explicit Ring(unsigned entries)
      : descriptor_(syscall(__NR_io_uring_setup, entries, &params_)),
        // One mapping holds both rings since Linux 5.4.
        rings_(descriptor_.get(), rings_bytes(), IORING_OFF_SQ_RING),
        entries_(descriptor_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {}

  // IORING_FEAT_FAST_POLL (Linux 5.7) implies the read operation and the single mapping.
  bool valid() const { return rings_.valid() && entries_.valid() && (params_.features & IORING_FEAT_FAST_POLL) != 0; }

  // Room is there: never more requests than entries.
  void read(int descriptor, void* address, uint32_t bytes, uint64_t offset, uint64_t name) {
    unsigned tail = *submitted_tail();
    unsigned index = tail & (params_.sq_entries - 1);
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
    entry = {};
    entry.opcode = IORING_OP_READ;
    entry.fd = descriptor;
    entry.addr = reinterpret_cast<uint64_t>(address);
    entry.len = bytes;
    entry.off = offset;
    entry.user_data = name;
    rings_.at<unsigned>(params_.sq_off.array)[index] = index;
    std::atomic_ref(*submitted_tail()).store(tail + 1, std::memory_order_release);
    ++unsubmitted_;
  }

  // Hands what `read` has added to the kernel and sleeps until there is a result.
  void submit_and_wait() {
    long taken = syscall(__NR_io_uring_enter, descriptor_.get(), unsubmitted_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken > 0) unsubmitted_ -= static_cast<unsigned>(taken);
    // EINTR: once more. EAGAIN, EBUSY: the kernel lacks memory for a request until others have ended.
    if (taken < 0 && errno != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // The next result there is: its name and the bytes read or a negative errno.
  bool result(uint64_t& name, int64_t& result) {
    unsigned& head = *rings_.at<unsigned>(params_.cq_off.head);
    unsigned tail = std::atomic_ref(*rings_.at<unsigned>(params_.cq_off.tail)).load(std::memory_order_acquire);
    if (head == tail) return false;
    const io_uring_cqe& entry = rings_.at<io_uring_cqe>(params_.cq_off.cqes)[head & (params_.cq_entries - 1)];
    name = entry.user_data;
    result = entry.res;
    std::atomic_ref(head).store(head + 1, std::memory_order_release);
    return true;
  }

 private:
  size_t rings_bytes() const {
    return std::max<size_t>(params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
                            params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe));
  }
  unsigned* submitted_tail() const { return rings_.at<unsigned>(params_.sq_off.tail); }

  io_uring_params params_{};
  Descriptor descriptor_;
  Mapping rings_, entries_;
  unsigned unsubmitted_ = 0;
};

class UringEngine : public ReadEngine {
 public:
  UringEngine(CopyQueue& queue, int lanes)
      : queue_(queue), requests_(lanes), ring_(lanes + 1), bell_(eventfd(0, EFD_CLOEXEC)) {
    for (int i = 0; i < lanes; ++i) free_.push_back(i);
  }

  bool valid() const { return ring_.valid() && bell_.get() >= 0; }

  void start() {
    queue_.on_work([this] { ring_bell(); });
    thread_ = std::jthread([this] { run(); });
  }

  const char* name() const override { return "io_uring"; }

 private:
  static constexpr uint64_t kBell = UINT64_MAX;  // the name of the read that ends when the bell is rung

  void ring_bell() {
    uint64_t one = 1;
    while (write(bell_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  void run() {
    listen();
    while (true) {
      while (!free_.empty() && queue_.take(requests_[free_.back()])) {
        read(free_.back());
        free_.pop_back();
      }
      if (free_.size() == requests_.size() && !listening_) return;
      ring_.submit_and_wait();
      uint64_t name;
      int64_t result;
      while (ring_.result(name, result)) take_result(name, result);
    }
  }

  void take_result(uint64_t name, int64_t result) {
    if (name == kBell) {
      listening_ = false;
      if (!queue_.stopped()) listen();
    } else if (requests_[name].advance(result)) {
      queue_.finish(requests_[name]);
      free_.push_back(name);
    } else {
      read(name);
    }
  }

  void listen() {
    ring_.read(bell_.get(), &rung_, sizeof rung_, 0, kBell);
    listening_ = true;
  }

  void read(size_t lane) {
    const Request& request = requests_[lane];
    ring_.read(request.descriptor(), request.address(), request.bytes(), request.offset(), lane);
  }

  CopyQueue& queue_;
  std::vector<Request> requests_;  // by lane
  std::vector<size_t> free_;       // lanes without a request
  Ring ring_;
  Descriptor bell_;
  uint64_t rung_ = 0;
  bool listening_ = false;
  std::jthread thread_;
};

}  // namespace

std::unique_ptr<ReadEngine> uring_engine(CopyQueue& queue, int lanes) {
  auto engine = std::make_unique<UringEngine>(queue, lanes);
  if (!engine->valid()) return nullptr;
  engine->start();
  return engine;
}

}  // namespace huorn

#else

namespace huorn {

std::unique_ptr<ReadEngine> uring_engine(CopyQueue&, int) { return nullptr; }

}  // namespace huorn

#endif
