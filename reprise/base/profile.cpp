#include "reprise/base/profile.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace reprise {

namespace {

struct Totals {
  std::mutex mutex;
  std::map<std::string, ProfileEntry> by_operation;
};

Totals& totals() {
  static Totals all;
  return all;
}

}  // namespace

std::atomic<bool> Profile::on_{false};

void Profile::enable(bool on) { on_.store(on, std::memory_order_relaxed); }

void Profile::reset() {
  const std::lock_guard lock(totals().mutex);
  totals().by_operation.clear();
}

void Profile::add(const char* operation, std::chrono::nanoseconds time) {
  const std::lock_guard lock(totals().mutex);
  ProfileEntry& entry = totals().by_operation[operation];
  entry.operation = operation;
  ++entry.calls;
  entry.seconds += std::chrono::duration<double>(time).count();
}

std::vector<ProfileEntry> Profile::entries() {
  std::vector<ProfileEntry> all;
  {
    const std::lock_guard lock(totals().mutex);
    for (const auto& [operation, entry] : totals().by_operation) all.push_back(entry);
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const ProfileEntry& a, const ProfileEntry& b) { return a.seconds > b.seconds; });
  return all;
}

}  // namespace reprise
