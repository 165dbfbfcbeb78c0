// A process that uses a disk tier until it is killed, or for a while: what the tests of several processes start.
// disk_tier_victim write FOLDER SEED            random prefixes, for ever; one line when the tier is open
// disk_tier_victim share FOLDER SEED ROUNDS     random prefixes written, asked for and read; fails on a wrong answer
// disk_tier_victim read_only FOLDER SEED        as a user who may not write there; fails unless it is as it must be
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/prefix/disk_tier_support.h"

namespace reprise {
namespace {

using testing::Answer;
using testing::ask;
using testing::disk_options;
using testing::random_tokens;
using testing::write_prefix;

int complain(const std::string& what) {
  std::fprintf(stderr, "disk_tier_victim: %s\n", what.c_str());
  return 1;
}

int write(const std::string& folder, std::mt19937& random) {
  // Evicts all the time.
  DiskTierOptions options = disk_options(folder, nullptr);
  options.max_bytes = 60'000;
  DiskTier tier(options);
  std::puts("open");
  std::fflush(stdout);
  while (true) {
    const Tokens tokens = random_tokens(random, 14, 2);
    write_prefix(tier, "space", tokens, 4, random() % 2 == 0, random() % 200);
    if (random() % 8 == 0) tier.flush();
    if (ask(tier, "space", random_tokens(random, 14, 2), random() % 2 == 0) == Answer::wrong) return 1;
  }
}

int share(const std::string& folder, std::mt19937& random, int rounds) {
  testing::HastyFileSystem files;
  DiskTierOptions options = disk_options(folder, &files);
  options.max_bytes = 30'000;
  DiskTier tier(options);
  int right = 0;
  for (int round = 0; round < rounds; ++round) {
    write_prefix(tier, "space", random_tokens(random, 14, 2), 4, random() % 2 == 0);
    const Tokens tokens = random_tokens(random, 14, 2);
    const Answer answer = ask(tier, "space", tokens, random() % 2 == 0);
    if (answer == Answer::wrong) return complain("a wrong answer in round " + std::to_string(round));
    right += answer == Answer::right ? 1 : 0;
    if (round % 8 == 0) tier.flush();
  }
  tier.flush();
  const DiskTierStats stats = tier.stats();
  if (!stats.last_error.empty() || stats.failed_writes != 0 || stats.damaged != 0) {
    return complain("it failed: " + stats.last_error + ", damaged " + std::to_string(stats.damaged));
  }
  if (stats.nbytes > options.max_bytes) return complain("beyond its budget");
  return right > rounds / 4 ? 0 : complain("only " + std::to_string(right) + " right answers");
}

int read_only(const std::string& folder) {
  if (::geteuid() == 0) {
    constexpr uid_t kNobody = 65534;
    if (::chown(folder.c_str(), kNobody, kNobody) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) {
      return complain("cannot be another user");
    }
  }
  DiskTier tier(disk_options(folder, nullptr));
  const std::uint64_t failed = tier.stats().failed_writes;
  if (failed == 0) return complain("that nothing can be written is not counted");
  const Tokens known{1, 2, 3, 4, 5, 6};
  const DiskTier::Found found = tier.find("space", known, true);
  if (found.length != 6 || testing::read_all(tier, "space", known, found) != Answer::right) {
    return complain("what is there is not read: " + tier.stats().last_error);
  }
  const Tokens other{7, 8};
  write_prefix(tier, "space", other, 4);
  tier.flush();
  const DiskTierStats stats = tier.stats();
  if (stats.failed_writes != failed + 1 || stats.last_error.empty())
    return complain("a write is not counted as failed");
  return tier.find("space", other, false).length == 0 ? 0 : complain("something was written");
}

int run(int count, char** words) {
  if (count < 4) return complain("write|share|read_only FOLDER SEED [ROUNDS]");
  const std::string mode = words[1];
  std::mt19937 random(static_cast<unsigned>(std::atoi(words[3])));
  if (mode == "write") return write(words[2], random);
  if (mode == "share") return share(words[2], random, count > 4 ? std::atoi(words[4]) : 100);
  return read_only(words[2]);
}

}  // namespace
}  // namespace reprise

int main(int count, char** words) { return reprise::run(count, words); }
