#include "copy_queue.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <thread>

namespace huorn {
namespace {

constexpr uint64_t kMostStripes = 16;      // of one copy, besides those of segments that are smaller than a stripe
constexpr uint64_t kLargestRead = 1 << 30;  // the kernel ends a read after 2 GiB less a page
constexpr auto kBusyDevice = std::chrono::milliseconds(1);  // until a read that got EAGAIN is tried again

uint64_t blocks(const Segment& segment) {
  return (round_up(segment.offset + segment.bytes) - round_down(segment.offset)) / kBlock;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void refuse_bad(const Segment& segment) {
  constexpr uint64_t kLargest = INT64_MAX - kBlock;
  if (segment.bytes == 0) refuse("a segment needs at least one byte");
  if (segment.offset > kLargest || segment.bytes > kLargest - segment.offset) refuse("a segment ends behind the largest offset");
  if (segment.address == 0 || segment.bytes > UINT64_MAX - kBlock - segment.address) refuse("a segment has no such address");
  if (segment.address % kBlock != segment.offset % kBlock)
    refuse("address " + std::to_string(segment.address) + " and offset " + std::to_string(segment.offset) +
           " differ modulo " + std::to_string(kBlock));
}

// Sorted by address; neighbours in the file that are neighbours in memory, or share a block, are one. Two others that share a
// block would overwrite each other's ends.
std::vector<Segment> merged(std::vector<Segment> segments) {
  std::sort(segments.begin(), segments.end(), [](const Segment& a, const Segment& b) { return a.address < b.address; });
  std::vector<Segment> result;
  for (const Segment& segment : segments) {
    if (!result.empty()) {
      Segment& last = result.back();
      uint64_t last_end = last.address + last.bytes;
      bool touch = round_down(segment.address) <= round_up(last_end);
      if (touch && segment.file == last.file && segment.address - segment.offset == last.address - last.offset) {
        last.bytes = std::max(last_end, segment.address + segment.bytes) - last.address;
        continue;
      }
      if (round_down(segment.address) < round_up(last_end))
        refuse("two segments share the block of memory at " + std::to_string(round_down(segment.address)));
    }
    result.push_back(segment);
  }
  return result;
}

// Whole blocks of the file each, at least stripe_blocks unless the segment has fewer.
std::vector<Segment> cut(const std::vector<Segment>& segments, uint64_t stripe_blocks) {
  uint64_t all = 0;
  for (const Segment& segment : segments) all += blocks(segment);
  uint64_t unit = std::max(stripe_blocks, (all + kMostStripes - 1) / kMostStripes);
  std::vector<Segment> stripes;
  for (const Segment& segment : segments) {
    uint64_t count = std::max<uint64_t>(1, blocks(segment) / unit);
    uint64_t begin = segment.offset;
    for (uint64_t i = 1; i <= count; ++i) {
      uint64_t end = round_down(segment.offset) + blocks(segment) * i / count * kBlock;
      if (i == count) end = segment.offset + segment.bytes;
      stripes.push_back({segment.file, begin, end - begin, segment.address + (begin - segment.offset)});
      begin = end;
    }
  }
  return stripes;
}

// Whether the files of a copy are still those that were opened.
Failure check_files(const Copy& copy) {
  const SourceFile* checked = nullptr;
  for (const Segment& stripe : copy.stripes) {
    if (stripe.file == checked) continue;
    checked = stripe.file;
    uint64_t begin = UINT64_MAX, end = 0;
    for (const Segment& other : copy.stripes) {
      if (other.file != checked) continue;
      begin = std::min(begin, other.offset);
      end = std::max(end, other.offset + other.bytes);
    }
    if (Failure failure = checked->check(begin, end); failure.error != 0) return failure;
  }
  return {};
}

}  // namespace

Request::Request(Copy& copy, const Segment& stripe)
    : copy_(&copy),
      ahead_(!copy.demand),
      file_(stripe.file),
      shift_(stripe.address - stripe.offset),
      reached_(stripe.offset),
      end_(stripe.offset + stripe.bytes) {}

uint32_t Request::bytes() const {
  uint64_t end = file_->direct() ? round_up(end_) : end_;
  return static_cast<uint32_t>(std::min(end - offset(), kLargestRead));
}

bool Request::advance(int64_t result) {
  if (result == -EINTR) return false;
  if (result == -EAGAIN) {
    std::this_thread::sleep_for(kBusyDevice);
    return false;
  }
  if (result < 0) {
    failure_ = {static_cast<int>(-result), file_->number(), reached_};
    return true;
  }
  bytes_read_ += static_cast<uint64_t>(result);
  uint64_t end = offset() + static_cast<uint64_t>(result);
  // A direct read that goes on inside a block reads its beginning again: no news is the end of the file.
  if (end <= reached_) {
    failure_ = file_->truncated_before(reached_);
    return true;
  }
  reached_ = end;
  return reached_ >= end_;
}

CopyQueue::CopyQueue(uint64_t stripe_bytes, size_t most_ahead, double link_bytes_s)
    : stripe_blocks_(round_up(stripe_bytes) / kBlock), most_ahead_(most_ahead), link_bytes_s_(link_bytes_s) {}

std::chrono::steady_clock::time_point CopyQueue::reserve(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  if (link_bytes_s_ <= 0) return {};
  std::chrono::duration<double> takes(static_cast<double>(bytes) / link_bytes_s_);
  link_free_ = std::max(link_free_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(takes);
  return link_free_;
}

void CopyQueue::submit(int64_t key, std::vector<Segment> segments, bool demand) {
  if (segments.empty()) refuse("a copy needs at least one segment");
  for (const Segment& segment : segments) refuse_bad(segment);
  std::list<Copy> one;
  one.push_back({.key = key, .demand = demand, .failure = {}, .file = segments[0].file, .offset = segments[0].offset,
                 .stripes = cut(merged(segments), stripe_blocks_)});
  size_t stripes = one.front().stripes.size();
  bool wake;
  {
    std::lock_guard lock(mutex_);
    if (!places_.try_emplace(key, one.begin()).second) refuse("the copy " + std::to_string(key) + " is already under way");
    std::list<Copy>& queue = demand ? demand_ : prefetch_;
    queue.splice(queue.end(), one);
    wake = starving_;
    starving_ = false;
    for (size_t i = std::min(stripes, sleepers_); i > 0; --i) work_.notify_one();
  }
  if (wake) wake_();
}

bool CopyQueue::promote(int64_t key) {
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    auto found = places_.find(key);
    if (found == places_.end()) return false;
    Copy& copy = *found->second;
    size_t left = copy.stripes.size() - copy.next;
    if (!copy.demand && left > 0) {
      demand_.splice(demand_.end(), prefetch_, found->second);
      // Lanes may lie idle that prefetches were not given.
      wake = starving_;
      starving_ = false;
      for (size_t i = std::min(left, sleepers_); i > 0; --i) work_.notify_one();
    }
    copy.demand = true;
  }
  if (wake) wake_();
  return true;
}

bool CopyQueue::cancel(int64_t key) {
  std::lock_guard lock(mutex_);
  auto found = places_.find(key);
  if (found == places_.end()) return false;
  Copy& copy = *found->second;
  if (copy.next == 0) {
    queue_of(copy).erase(found->second);
    places_.erase(found);
    return true;
  }
  copy.cancelled = true;  // a complete one never looks at it
  if (copy.next < copy.stripes.size()) {
    drop_rest(copy);
    if (copy.reading == 0) complete(copy);
  }
  return false;
}

std::vector<Completion> CopyQueue::wait(std::chrono::nanoseconds longest) {
  std::vector<Completion> completions;
  std::unique_lock lock(mutex_);
  landed_.wait_for(lock, longest, [this] { return !done_.empty(); });
  completions.reserve(done_.size());
  for (const Copy& copy : done_) {
    completions.push_back({copy.key, copy.failure});
    places_.erase(copy.key);
  }
  done_.clear();
  return completions;
}

double CopyQueue::busy_seconds() const {
  std::lock_guard lock(mutex_);
  Clock::duration busy = busy_;
  if (reading_stripes_ > 0) busy += Clock::now() - busy_since_;
  return std::chrono::duration<double>(busy).count();
}

size_t CopyQueue::in_flight() const {
  std::lock_guard lock(mutex_);
  return places_.size();
}

void CopyQueue::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    work_.notify_all();
  }
  wake_();
}

bool CopyQueue::stopped() const {
  std::lock_guard lock(mutex_);
  return stopped_;
}

bool CopyQueue::take(Request& request) {
  std::unique_lock lock(mutex_);
  if (take_locked(request, lock)) return true;
  starving_ = true;
  return false;
}

bool CopyQueue::wait_and_take(Request& request) {
  std::unique_lock lock(mutex_);
  while (!take_locked(request, lock)) {
    if (stopped_) return false;
    ++sleepers_;
    work_.wait(lock);
    --sleepers_;
  }
  return true;
}

void CopyQueue::finish(const Request& request) {
  bytes_read_.fetch_add(request.bytes_read(), std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  stripe_leaves(request.ahead());
  stripe_ended(request.copy(), request.failure(), lock);
}

void CopyQueue::stripe_begins(bool ahead) {
  if (ahead) ++reading_ahead_;
  if (reading_stripes_++ == 0) busy_since_ = Clock::now();
}

void CopyQueue::stripe_leaves(bool ahead) {
  if (ahead) --reading_ahead_;
  if (--reading_stripes_ == 0) busy_ += Clock::now() - busy_since_;
}

bool CopyQueue::take_locked(Request& request, std::unique_lock<std::mutex>& lock) {
  while (!stopped_) {
    std::list<Copy>& queue = demand_.empty() ? prefetch_ : demand_;
    if (queue.empty() || (&queue == &prefetch_ && reading_ahead_ >= most_ahead_)) return false;
    Copy& copy = queue.front();
    bool first = copy.next == 0;
    request = Request(copy, copy.stripes[copy.next++]);
    ++copy.reading;
    stripe_begins(request.ahead());
    if (copy.next == copy.stripes.size()) reading_.splice(reading_.end(), queue, queue.begin());
    if (!first) return true;
    lock.unlock();  // fstat may wait for a server
    Failure failure = check_files(copy);
    lock.lock();
    if (failure.error == 0) return true;
    stripe_leaves(request.ahead());
    stripe_ended(copy, failure, lock);
  }
  return false;
}

void CopyQueue::stripe_ended(Copy& copy, const Failure& failure, std::unique_lock<std::mutex>& lock) {
  --copy.reading;
  if (failure.error != 0) {
    if (copy.failure.error == 0) copy.failure = failure;
    drop_rest(copy);
  }
  if (copy.reading > 0 || copy.next < copy.stripes.size()) return;
  if (copy.failure.error == 0 && !copy.cancelled) {
    lock.unlock();  // nobody else completes it or takes it away meanwhile
    Failure changed = check_files(copy);
    lock.lock();
    copy.failure = changed;
  }
  complete(copy);
}

std::list<Copy>& CopyQueue::queue_of(const Copy& copy) { return copy.demand ? demand_ : prefetch_; }

void CopyQueue::drop_rest(Copy& copy) {
  if (copy.next == copy.stripes.size()) return;
  copy.next = copy.stripes.size();
  reading_.splice(reading_.end(), queue_of(copy), places_.at(copy.key));
}

void CopyQueue::complete(Copy& copy) {
  if (copy.cancelled || copy.failure.error == 0)
    copy.failure = {copy.cancelled ? ECANCELED : 0, copy.file->number(), copy.offset};
  done_.splice(done_.end(), reading_, places_.at(copy.key));
  landed_.notify_one();
}

}  // namespace huorn
