#include "reprise/prefix/tiers/background_writer.h"

#include <utility>

namespace reprise::internal {

BackgroundWriter::BackgroundWriter(std::size_t max_queued_bytes)
    : max_queued_bytes_(max_queued_bytes), thread_([this] { work(); }) {}

BackgroundWriter::~BackgroundWriter() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool BackgroundWriter::push(std::function<void()> job, std::size_t nbytes) {
  {
    const std::lock_guard lock(mutex_);
    if (nbytes > max_queued_bytes_ - queued_bytes_) return false;
    jobs_.push_back({std::move(job), nbytes});
    queued_bytes_ += nbytes;
    ++pushed_;
  }
  changed_.notify_all();
  return true;
}

void BackgroundWriter::flush() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, until = pushed_] { return done_ >= until; });
}

void BackgroundWriter::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job.run();
      job.run = nullptr;  // and what it held is let go before it counts as done
      lock.lock();
      queued_bytes_ -= job.nbytes;
    }
    ++done_;
    changed_.notify_all();
  }
}

}  // namespace reprise::internal
