#include "reprise/base/processors.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

namespace reprise::internal {
namespace {

std::optional<std::string> read_text(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// "max 100000", "150000 100000", or for version 1 the two files' texts one after the other, with -1 for no bound.
std::optional<double> quota(const std::string& text) {
  std::istringstream words(text);
  double time = 0.0;
  double period = 0.0;
  if (!(words >> time >> period) || time <= 0.0 || period <= 0.0) return std::nullopt;
  return time / period;
}

std::optional<double> quota_in(const std::filesystem::path& folder) {
  if (const auto both = read_text(folder / "cpu.max")) return quota(*both);
  const auto time = read_text(folder / "cpu.cfs_quota_us");
  const auto period = read_text(folder / "cpu.cfs_period_us");
  return time && period ? quota(*time + " " + *period) : std::nullopt;
}

int scheduled_processors() {
#ifdef __linux__
  // The kernel refuses a set that is smaller than its own.
  for (std::size_t sets = 1; sets <= 64; sets *= 2) {
    std::vector<cpu_set_t> mask(sets);
    const std::size_t size = sets * sizeof(cpu_set_t);
    if (sched_getaffinity(0, size, mask.data()) == 0) return std::max(1, CPU_COUNT_S(size, mask.data()));
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

// A line is "0::/path" (version 2) or "3:cpu,cpuacct:/path" (version 1). A bound on a group bounds those below it. In a
// container the path may be the host's, which is not there: then the root's files are the container's own.
int cgroup_processors(const std::filesystem::path& root, const std::string& memberships) {
  std::optional<double> least;
  std::istringstream lines(memberships);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool has_cpu = ("," + controllers + ",").find(",cpu,") != std::string::npos;
    if (!controllers.empty() && !has_cpu) continue;
    const std::filesystem::path base = controllers.empty() ? root : root / controllers;
    std::filesystem::path group = std::filesystem::path(line.substr(second + 1)).relative_path();
    while (true) {
      if (const auto bound = quota_in(base / group)) least = std::min(least.value_or(*bound), *bound);
      if (group.empty()) break;
      group = group.parent_path();
    }
  }
  if (!least) return 0;
  return static_cast<int>(std::clamp(std::round(*least), 1.0, 1e6));
}

int available_processors() {
  const int scheduled = scheduled_processors();
#ifdef __linux__
  if (const auto memberships = read_text("/proc/self/cgroup")) {
    const int bound = cgroup_processors("/sys/fs/cgroup", *memberships);
    if (bound > 0) return std::min(scheduled, bound);
  }
#endif
  return scheduled;
}

}  // namespace reprise::internal
