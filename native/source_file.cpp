#include "source_file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace huorn {
namespace {

#ifdef O_DIRECT
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

// O_NONBLOCK: opening a pipe without a writer would block.
int open_for_reading(const char* path, int more) { return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | more); }

// Some file systems take the flag and refuse the reads, and disks with sectors of more than 4 KiB refuse ours.
bool reads_directly(int descriptor) {
  alignas(kBlock) char block[kBlock];
  return pread(descriptor, block, kBlock, 0) >= 0 || errno != EINVAL;
}

int open_directly(const char* path) {
  int descriptor = open_for_reading(path, kDirect);
  if (descriptor < 0 || reads_directly(descriptor)) return descriptor;
  close(descriptor);
  return -1;
}

}  // namespace

SourceFile::SourceFile(int number, const char* path, bool direct)
    : number_(number), descriptor_(direct && kDirect != 0 ? open_directly(path) : -1), direct_(descriptor_ >= 0) {
  if (descriptor_ < 0) descriptor_ = open_for_reading(path, 0);
  if (descriptor_ < 0) throw std::system_error(errno, std::generic_category());
  struct stat now {};
  int error = fstat(descriptor_, &now) != 0 ? errno : S_ISDIR(now.st_mode) ? EISDIR : S_ISREG(now.st_mode) ? 0 : EINVAL;
  if (error != 0) {
    close(descriptor_);
    throw std::system_error(error, std::generic_category());
  }
  fcntl(descriptor_, F_SETFL, direct_ ? kDirect : 0);  // O_NONBLOCK has done its part; old io_uring ends such reads with EAGAIN
  size_ = now.st_size;
  changed_ = now.st_mtim;
}

SourceFile::~SourceFile() { close(descriptor_); }

Failure SourceFile::check(uint64_t begin, uint64_t end) const {
  struct stat now {};
  if (fstat(descriptor_, &now) != 0) return {errno, number_, begin};
  if (now.st_size == size_ && now.st_mtim.tv_sec == changed_.tv_sec && now.st_mtim.tv_nsec == changed_.tv_nsec) return {};
  uint64_t size = static_cast<uint64_t>(now.st_size);
  if (size < end) return {kTruncated, number_, size};
  return {kChanged, number_, begin};
}

Failure SourceFile::truncated_before(uint64_t offset) const {
  struct stat now {};
  if (fstat(descriptor_, &now) == 0) offset = std::min(offset, static_cast<uint64_t>(now.st_size));
  return {kTruncated, number_, offset};
}

}  // namespace huorn
