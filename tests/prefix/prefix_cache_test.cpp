#include "reprise/prefix/tiers/prefix_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "tests/prefix/filled_cache.h"

namespace reprise::test {
namespace {

constexpr int kBlock = 64;

// A folder that is gone afterwards.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "reprise_prefix_XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

void flip_a_bit(const std::filesystem::path& path, std::mt19937& random) {
  const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  const auto at = std::uniform_int_distribution<std::streamoff>(0, size - 1)(random);
  file.seekg(at);
  const char byte = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 0x10));
}

class Cache : public testing::TestWithParam<bool> {
 protected:
  bool recurrent() const { return GetParam(); }
  PrefixCache make(std::size_t max_bytes = std::size_t{64} << 20, const Folder* folder = nullptr,
                   const std::string& space = "space") {
    PrefixCacheOptions options{.block_size = kBlock, .max_bytes = max_bytes};
    if (folder) options.disk = DiskTierOptions{.folder = folder->path};
    return PrefixCache(make_form(pool, {.recurrent = recurrent()}), space, pool, options);
  }
  PromptCache filled(const PrefixCache& cache, std::span<const TokenId> tokens) {
    PromptCache prompt = cache.form().fork();
    fill(prompt, tokens);
    return prompt;
  }
  // Stores a prompt with checkpoints every block and at its end.
  void store(PrefixCache& cache, const Tokens& tokens, const std::string& salt = "", bool finished = true) {
    PromptCache prompt = cache.form().fork();
    std::shared_ptr<PrefixTree::Lease> lease;
    for (std::size_t end = kBlock;; end += kBlock) {
      const auto known = std::span(tokens).first(std::min(end, tokens.size()));
      fill(prompt, known);
      const bool last = known.size() == tokens.size();
      cache.store(salt, known, prompt, &lease, {.checkpoint = true, .finished = finished && last});
      if (last) return;
    }
  }

  std::shared_ptr<PagePool> pool = PagePool::make();
};

TEST_P(Cache, GivesTheLongestPrefixButOneToken) {
  PrefixCache cache = make();
  const Tokens tokens = counted_tokens(200);
  store(cache, tokens);
  FetchedPrefix all = cache.fetch("", tokens);
  EXPECT_EQ(all.length, recurrent() ? 192 : 199);
  EXPECT_EQ(difference(all.cache, filled(cache, std::span(tokens).first(static_cast<std::size_t>(all.length)))), "");

  Tokens longer = tokens;
  longer.push_back(7);
  EXPECT_EQ(cache.cached_length("", longer), 200);
  EXPECT_EQ(cache.fetch("", longer).length, 200);

  Tokens edited = tokens;
  edited[150] = 9999;
  FetchedPrefix part = cache.fetch("", edited);
  EXPECT_EQ(part.length, recurrent() ? 128 : 150);
  EXPECT_EQ(difference(part.cache, filled(cache, std::span(tokens).first(static_cast<std::size_t>(part.length)))), "");
  EXPECT_EQ(cache.fetch("other", tokens).length, 0);
  EXPECT_EQ(cache.fetch("", Tokens{5}).length, 0);
  EXPECT_EQ(cache.fetch("", Tokens{}).length, 0);
  const PrefixCacheStats stats = cache.stats();
  EXPECT_EQ(stats.hits, 3u);
  EXPECT_EQ(stats.fetches, 6u);
  EXPECT_EQ(stats.refused, 0u);
}

TEST_P(Cache, SharesPagesWithWhoFetches) {
  PrefixCache cache = make();
  const Tokens tokens = counted_tokens(200);
  store(cache, tokens);
  EXPECT_EQ(cache.nbytes(), cache.stats().tree.nbytes);
  const std::size_t before = cache.nbytes();
  const FetchedPrefix fetched = cache.fetch("", tokens);
  EXPECT_EQ(cache.nbytes(), before);
  cache.tree().clear();
  EXPECT_GT(cache.nbytes(), 0u) << "a lease keeps it";
}

TEST_P(Cache, RefusesRowsOfAnotherLength) {
  PrefixCache cache = make();
  const Tokens tokens = counted_tokens(100);
  PromptCache prompt = filled(cache, tokens);
  EXPECT_EQ(cache.store("", std::span(tokens).first(99), prompt, nullptr, {}), 0);
  paged_leaves(prompt)[1]->trim(1);
  EXPECT_EQ(cache.store("", tokens, prompt, nullptr, {}), 0) << "one layer is shorter";
  EXPECT_EQ(cache.stats().refused, 2u);
  EXPECT_EQ(cache.stats().tree.blocks, 0u);
}

TEST_P(Cache, EvictsWhatHelpsAndNothingWhereItDoesNot) {
  PrefixCache cache = make();
  const Tokens tokens = counted_tokens(256);
  store(cache, tokens);
  const std::size_t all = cache.nbytes();
  cache.tree().clear();

  PrefixCache small = make(all + all / 8);
  store(small, tokens);
  EXPECT_EQ(small.nbytes(), all);
  EXPECT_FALSE(small.make_room(2 * all)) << "more than the budget";
  EXPECT_EQ(small.nbytes(), all) << "in vain nothing goes";
  EXPECT_TRUE(small.make_room(all / 2));
  EXPECT_LE(small.nbytes(), all + all / 8 - all / 2);
  EXPECT_GT(small.nbytes(), 0u);
  {
    const FetchedPrefix held = small.fetch("", tokens);
    EXPECT_GT(held.length, 0);
    EXPECT_FALSE(small.make_room(all + all / 8)) << "what runs stays";
    EXPECT_GE(small.cached_length("", tokens), held.length);
  }
  small.set_live_state_nbytes(all);
  small.make_room(0);
  EXPECT_LE(small.nbytes(), all + all / 8) << "the caller's state counts";
}

TEST_P(Cache, StoresNothingBeyondAGap) {
  PrefixCache cache = make();
  const Tokens tokens = counted_tokens(300);
  PromptCache prompt = filled(cache, tokens);
  for (PagedKVCache* layer : paged_leaves(prompt)) layer->drop_unseen();
  EXPECT_EQ(cache.store("", tokens, prompt, nullptr, {.checkpoint = true, .finished = true}), 0);
  EXPECT_EQ(cache.stats().tree.blocks, 0u);
  EXPECT_EQ(cache.stats().refused, 0u);

  // While the rows are in the tree, they may go from the live cache.
  const auto known = std::span(tokens).first(200);
  store(cache, Tokens(known.begin(), known.end()));
  PromptCache going_on = filled(cache, known);
  for (PagedKVCache* layer : paged_leaves(going_on)) layer->drop_unseen();
  fill(going_on, tokens);
  std::shared_ptr<PrefixTree::Lease> lease;
  EXPECT_EQ(cache.store("", tokens, going_on, &lease, {.checkpoint = true, .finished = true}), 300);
  Tokens longer = tokens;
  longer.push_back(1);
  FetchedPrefix fetched = cache.fetch("", longer);
  EXPECT_EQ(fetched.length, 300);
  EXPECT_EQ(difference(fetched.cache, prompt), "");
}

TEST_P(Cache, ComesBackFromDisk) {
  const Folder folder;
  const Tokens tokens = counted_tokens(200);
  Tokens longer = tokens;
  longer.push_back(1);
  {
    PrefixCache first = make(std::size_t{64} << 20, &folder);
    store(first, tokens);
    first.flush();
    EXPECT_EQ(first.stats().disk->failed_writes, 0u);
  }
  EXPECT_EQ(pool->nbytes(), 0u);
  PrefixCache second = make(std::size_t{64} << 20, &folder);
  EXPECT_EQ(second.cached_length("", longer), 0);
  FetchedPrefix fetched = second.fetch("", longer);
  EXPECT_EQ(fetched.length, 200);
  EXPECT_EQ(difference(fetched.cache, filled(second, tokens)), "");
  EXPECT_EQ(second.stats().disk_hit_tokens, 200u);
  EXPECT_EQ(second.cached_length("", longer), 200) << "it is in memory now";

  Tokens edited = tokens;
  edited[150] = 9999;
  PrefixCache third = make(std::size_t{64} << 20, &folder);
  FetchedPrefix part = third.fetch("", edited);
  EXPECT_EQ(part.length, recurrent() ? 128 : 150);
  EXPECT_EQ(difference(part.cache, filled(third, std::span(edited).first(static_cast<std::size_t>(part.length)))), "");
  EXPECT_EQ(third.fetch("other", longer).length, 0);
}

TEST_P(Cache, WritesTheLastShortBlockOnlyAtTheEnd) {
  const Folder folder;
  PrefixCache cache = make(std::size_t{64} << 20, &folder);
  const Tokens tokens = counted_tokens(200);
  store(cache, tokens, "", false);
  cache.flush();
  EXPECT_EQ(cache.stats().disk->blocks, 3u);
  cache.store("", tokens, filled(cache, tokens), nullptr, {.checkpoint = true, .finished = true});
  cache.flush();
  EXPECT_EQ(cache.stats().disk->blocks, 4u);
  EXPECT_EQ(cache.stats().disk->writes, recurrent() ? 8u : 4u) << "what is there is not written again";
}

TEST_P(Cache, MakesRoomOfWhatWaitsToBeWritten) {
  const Folder folder;
  const Tokens tokens = counted_tokens(256);
  std::size_t all = 0;
  {
    PrefixCache first = make();
    store(first, tokens);
    all = first.nbytes();
  }
  PrefixCache cache = make(2 * all, &folder);
  for (int round = 0; round < 5; ++round) {
    const Tokens others = counted_tokens(256, 1000 * round);
    store(cache, others);
    EXPECT_TRUE(cache.make_room(2 * all)) << "round " << round;
    EXPECT_EQ(cache.nbytes(), 0u) << "round " << round;
    EXPECT_GT(cache.fetch("", others).length, 0) << "from disk, round " << round;
  }
}

TEST_P(Cache, ForgetsOneSaltOrAll) {
  const Folder folder;
  PrefixCache cache = make(std::size_t{64} << 20, &folder);
  const Tokens tokens = counted_tokens(200);
  for (const char* salt : {"a", "b", "c"}) store(cache, tokens, salt);
  cache.clear("a");
  EXPECT_EQ(cache.fetch("a", tokens).length, 0);
  EXPECT_GT(cache.fetch("b", tokens).length, 0);
  cache.clear();
  EXPECT_EQ(cache.nbytes(), 0u);
  EXPECT_EQ(cache.fetch("b", tokens).length, 0);
  EXPECT_EQ(cache.stats().disk->blocks, 0u);
}

TEST_P(Cache, ForgetsNothingOfAnotherModel) {
  const Folder folder;
  const Tokens tokens = counted_tokens(200);
  {
    PrefixCache other = make(std::size_t{64} << 20, &folder, "space|2");
    for (const char* salt : {"", "a"}) store(other, tokens, salt);
    PrefixCache cache = make(std::size_t{64} << 20, &folder);
    for (const char* salt : {"", "a"}) store(cache, tokens, salt);
    other.flush();
    cache.clear();
    EXPECT_EQ(cache.fetch("a", tokens).length, 0);
    EXPECT_EQ(cache.fetch("", tokens).length, 0);
  }
  PrefixCache other = make(std::size_t{64} << 20, &folder, "space|2");
  for (const char* salt : {"", "a"}) EXPECT_GT(other.fetch(salt, tokens).length, 0) << salt;
  other.clear();
  EXPECT_EQ(other.stats().disk->blocks, 0u);
}

TEST_P(Cache, ReadsFromDiskOnlyWhatFits) {
  const Folder folder;
  const Tokens tokens = counted_tokens(256);
  std::size_t all = 0;
  {
    PrefixCache first = make(std::size_t{64} << 20, &folder);
    store(first, tokens);
    first.flush();
    all = first.nbytes();
  }
  PrefixCache second = make(all / 2, &folder);
  const FetchedPrefix fetched = second.fetch("", tokens);
  EXPECT_LE(second.nbytes(), all / 2);
  if (!recurrent()) {
    EXPECT_EQ(fetched.length, 128);
  }
}

TEST_P(Cache, ADamagedFileShortensWhatIsFound) {
  const Folder folder;
  const Tokens tokens = counted_tokens(200);
  Tokens longer = tokens;
  longer.push_back(1);
  {
    PrefixCache first = make(std::size_t{64} << 20, &folder);
    store(first, tokens);
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path().lexically_relative(folder.path));
  }
  EXPECT_GE(files.size(), 4u);
  std::mt19937 random(1);
  int lost = 0;
  for (const auto& name : files) {
    const Folder damaged;
    std::filesystem::copy(folder.path, damaged.path, std::filesystem::copy_options::recursive);
    flip_a_bit(damaged.path / name, random);
    PrefixCache cache = make(std::size_t{64} << 20, &damaged);
    const FetchedPrefix fetched = cache.fetch("", longer);
    if (fetched.length < 200) ++lost;
    EXPECT_EQ(cache.stats().disk->damaged, fetched.length < 200 ? 1u : 0u) << name;
    if (fetched.length > 0) {
      EXPECT_EQ(
          difference(fetched.cache, filled(cache, std::span(tokens).first(static_cast<std::size_t>(fetched.length)))),
          "");
    }
  }
  EXPECT_GE(lost, 4) << "each of the blocks is needed";
}

INSTANTIATE_TEST_SUITE_P(Forms, Cache, testing::Bool(),
                         [](const auto& param) { return param.param ? "recurrent" : "attention"; });

TEST(PrefixCache, RefusesBlocksThatAreNoPages) {
  const auto pool = PagePool::make();
  EXPECT_THROW(PrefixCache(make_form(pool), "s", pool, {.block_size = 100}), Error);
  EXPECT_THROW(PrefixCache(make_form(pool), "s", pool, {.block_size = 0}), Error);
}

}  // namespace
}  // namespace reprise::test
