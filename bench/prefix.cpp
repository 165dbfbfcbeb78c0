// What finding, storing and evicting prefixes costs when many tokens are cached: the tree alone, no rows in it.
// usage: prefix [--tokens 1000000] [--prompt 2000] [--block 256] [--sharing 20] [--repeat 2000]
// Prompts of --prompt tokens; of --sharing at a time the first half is the same. Microseconds for one call, median and
// 99th percentile; calls take the prompts in turn. A hit includes its lease, and its end.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/flags.h"
#include "bench/timing.h"
#include "reprise/prefix/prefix_tree.h"

namespace {

using namespace reprise;
using namespace reprise::bench;

struct Bytes final : Stored {
  std::size_t nbytes() const override { return 1; }
};

// New tokens never meet old ones by chance.
class Prompts {
 public:
  Prompts(int length, int sharing) : length_(length), sharing_(sharing) {}

  Tokens next() {
    if (made_++ % sharing_ == 0) shared_ = some(length_ / 2);
    Tokens tokens = shared_;
    const Tokens rest = some(length_ - length_ / 2);
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    return tokens;
  }
  Tokens some(int count) {
    Tokens tokens(static_cast<std::size_t>(count));
    for (TokenId& token : tokens) token = id_(random_);
    return tokens;
  }

 private:
  int length_;
  int sharing_;
  int made_ = 0;
  std::mt19937 random_{0};
  std::uniform_int_distribution<TokenId> id_{0, 128'000};
  Tokens shared_;
};

void report(const char* what, int repeat, const std::function<void(int)>& call) {
  std::vector<double> times;
  for (int i = 0; i < repeat; ++i) times.push_back(1e6 * seconds_of([&] { call(i); }));
  const double middle = median(times);
  std::sort(times.begin(), times.end());
  std::printf("%-40s %10.2f %10.2f\n", what, middle, times[times.size() * 99 / 100]);
}

int run(const Flags& flags) {
  const int length = flags.number("prompt");
  const int repeat = flags.number("repeat");
  PrefixTreeOptions options;
  options.block_size = flags.number("block");
  PrefixTree tree(options);
  Prompts prompts(length, flags.number("sharing"));
  const StoredRef content = std::make_shared<Bytes>();
  const auto make = [&](int, int) { return content; };

  std::vector<Tokens> stored;
  while (tree.stats().tokens < static_cast<std::size_t>(flags.number("tokens"))) {
    stored.push_back(prompts.next());
    tree.insert("", stored.back(), make);
  }
  std::shuffle(stored.begin(), stored.end(), std::mt19937(1));
  const auto one = [&](int i) -> const Tokens& { return stored[static_cast<std::size_t>(i) % stored.size()]; };
  std::vector<Tokens> unknown, branches;
  for (int i = 0; i < repeat; ++i) {
    unknown.push_back(prompts.some(length));
    // The first half of a prompt, by whole blocks, and a block of its own.
    Tokens branch(one(i).begin(), one(i).begin() + length / 2 / options.block_size * options.block_size);
    const Tokens block = prompts.some(options.block_size);
    branch.insert(branch.end(), block.begin(), block.end());
    branches.push_back(std::move(branch));
  }
  std::printf("%zu tokens in %zu blocks of %d, %zu prompts\n", tree.stats().tokens, tree.stats().blocks,
              options.block_size, stored.size());
  std::printf("%-40s %10s %10s\n", "", "median µs", "99 % µs");

  int found = 0;
  report("match, all of a prompt", repeat, [&](int i) { found += tree.match("", one(i), false).length; });
  report("match, nothing", repeat,
         [&](int i) { found += tree.match("", unknown[static_cast<std::size_t>(i)], false).length; });
  report("insert, one new block of a branch", repeat,
         [&](int i) { tree.insert("", branches[static_cast<std::size_t>(i)], make); });
  report("evict one", repeat, [&](int) { tree.evict_one(); });
  return found > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags({{"tokens", "1000000"}, {"prompt", "2000"}, {"block", "256"}, {"sharing", "20"}, {"repeat", "2000"}});
  if (!flags.read(argc, argv)) return 2;
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "prefix: %s\n", error.what());
    return 1;
  }
}
