// A file that copies are read from: open for as long as its reader lives, and known by its size and time of change.
#pragma once

#include <cstdint>
#include <ctime>

namespace huorn {

// What O_DIRECT asks of offsets, lengths and addresses on every disk with sectors of up to 4 KiB.
constexpr uint64_t kBlock = 4096;

constexpr uint64_t round_down(uint64_t value) { return value / kBlock * kBlock; }
constexpr uint64_t round_up(uint64_t value) { return round_down(value + kBlock - 1); }

// Errors of a copy that are no errno.
constexpr int kTruncated = -1;
constexpr int kChanged = -2;

// Where and why a copy failed; error 0 says that it did not.
struct Failure {
  int error = 0;
  int file = 0;
  uint64_t offset = 0;
};

class SourceFile {
 public:
  // Opens a regular file, with O_DIRECT if `direct` and if a first read works that way. Throws std::system_error.
  SourceFile(int number, const char* path, bool direct);
  ~SourceFile();
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;

  int number() const { return number_; }
  int descriptor() const { return descriptor_; }
  bool direct() const { return direct_; }

  // Whether bytes [begin, end) can still be trusted: kTruncated when the file now ends before `end`, kChanged when it has another
  // size or time of change than at first, an errno when the system does not tell.
  Failure check(uint64_t begin, uint64_t end) const;

  // After a read that found nothing at `offset`: where the file ends, which may be far before.
  Failure truncated_before(uint64_t offset) const;

 private:
  int number_;
  int descriptor_;
  bool direct_;
  int64_t size_ = 0;
  timespec changed_{};
};

}  // namespace huorn
