// How many processors this process may use. Private to `base`.
// Threads: any.
#pragma once

#include <filesystem>
#include <string>

namespace reprise::internal {

// At least 1: the processors that the scheduler may put this process on, or fewer where a cgroup bounds its time.
int available_processors();

// The bound on processor time (in processors, rounded, at least 1) of the cgroups named by `memberships`, the text of
// /proc/self/cgroup, whose files lie under `root`; 0 where there is none.
int cgroup_processors(const std::filesystem::path& root, const std::string& memberships);

}  // namespace reprise::internal
