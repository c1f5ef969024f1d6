#include "reader.h"

#include <stdexcept>

namespace huorn {
namespace {

constexpr int kMostLanes = 128;

uint64_t checked(int lanes, int64_t stripe_bytes) {
  if (lanes < 1 || lanes > kMostLanes) throw std::invalid_argument("lanes must be 1 to " + std::to_string(kMostLanes));
  if (stripe_bytes < 1 || stripe_bytes > INT64_MAX / 2) throw std::invalid_argument("stripe_bytes must be 1 or more");
  return static_cast<uint64_t>(stripe_bytes);
}

size_t checked_ahead(int lanes, int ahead_lanes) {
  checked(lanes, 1);
  if (ahead_lanes < 0 || ahead_lanes > lanes) throw std::invalid_argument("ahead_lanes must be 0 to lanes");
  return static_cast<size_t>(ahead_lanes == 0 ? lanes : ahead_lanes);
}

}  // namespace

Reader::Reader(int lanes, int64_t stripe_bytes, bool direct, bool uring, int ahead_lanes, double link_bytes_s)
    : direct_(direct), queue_(checked(lanes, stripe_bytes), checked_ahead(lanes, ahead_lanes), link_bytes_s) {
  if (uring && link_bytes_s <= 0) engine_ = uring_engine(queue_, lanes);
  if (engine_ == nullptr) engine_ = thread_engine(queue_, lanes);
}

Reader::~Reader() { queue_.stop(); }

int Reader::add_file(const char* path) {
  int number = static_cast<int>(files_.size());
  files_.emplace_back(number, path, direct_);
  return number;
}

const SourceFile& Reader::file(int number) const {
  if (number < 0 || static_cast<size_t>(number) >= files_.size())
    throw std::invalid_argument("no file has the number " + std::to_string(number));
  return files_[static_cast<size_t>(number)];
}

}  // namespace huorn
