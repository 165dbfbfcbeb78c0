// KVCache against a list of tokens: a random history must never show a token that the list does not have.
#include <gtest/gtest.h>

#include <random>

#include "mlx/transforms.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

using namespace cache_test;

struct Pair {
  std::unique_ptr<KVCache> cache = std::make_unique<KVCache>();
  std::vector<int> tokens;  // the model
};

struct Remembered {
  KeysValues seen;
  std::vector<int> tokens;
};

std::unique_ptr<KVCache> as_kv(std::unique_ptr<LayerCache> cache) {
  return std::unique_ptr<KVCache>(&dynamic_cast<KVCache&>(*cache.release()));
}

class RandomHistory {
 public:
  explicit RandomHistory(unsigned seed) : random_(seed) { pairs_.emplace_back(); }

  void step() {
    const auto at = static_cast<std::size_t>(pick(0, static_cast<int>(pairs_.size()) - 1));
    switch (pick(0, 9)) {
      case 0:
      case 1:
      case 2:
      case 3:
        add(pairs_[at], 1);
        break;
      case 4:
        add(pairs_[at], pick(1, 40));
        break;
      case 5:
        trim(pairs_[at]);
        break;
      case 6:
        fork(at);
        break;
      case 7:
        reload(pairs_[at]);
        break;
      case 8:
        check(pairs_[at]);
        break;
      default:
        recall();
        break;
    }
    if (pairs_[at].tokens.size() > 600) pairs_[at] = Pair();
  }

  void check_all() {
    for (const Pair& pair : pairs_) check(pair);
    for (const Remembered& old : remembered_) ASSERT_EQ(tokens_of(old.seen), old.tokens);
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  void add(Pair& pair, int count) {
    std::vector<int> added;
    for (int i = 0; i < count; ++i) added.push_back(pick(0, 4000));
    const KeysValues seen = append(*pair.cache, added);
    pair.tokens.insert(pair.tokens.end(), added.begin(), added.end());
    if (pick(0, 2) == 0) mlx::core::eval(std::get<DenseKV>(seen).keys, std::get<DenseKV>(seen).values);
    if (pick(0, 4) == 0) {
      if (remembered_.size() == 6) remembered_.erase(remembered_.begin());
      remembered_.push_back({seen, pair.tokens});
    }
  }

  void trim(Pair& pair) {
    const int n = pick(0, 3) == 0 ? pick(0, 700) : pick(0, 20);
    const int expected = std::min(n, static_cast<int>(pair.tokens.size()));
    ASSERT_EQ(pair.cache->trim(n), expected);
    pair.tokens.resize(pair.tokens.size() - static_cast<std::size_t>(expected));
  }

  void fork(std::size_t at) {
    Pair copy{as_kv(pairs_[at].cache->fork()), pairs_[at].tokens};
    if (pairs_.size() < 4) {
      pairs_.push_back(std::move(copy));
    } else {
      pairs_[static_cast<std::size_t>(pick(0, 3))] = std::move(copy);
    }
  }

  void reload(Pair& pair) {
    switch (pick(0, 2)) {
      case 0:
        pair.cache = KVCache::from_state(pair.cache->state());
        break;
      case 1:
        pair.cache = KVCache::from_state(pair.cache->saved_state());
        break;
      default:
        pair.cache = KVCache::from_legacy(pair.cache->legacy_state(), pair.cache->legacy_meta());
        break;
    }
  }

  void check(const Pair& pair) {
    ASSERT_EQ(pair.cache->length(), static_cast<int>(pair.tokens.size()));
    if (!pair.cache->empty()) {
      ASSERT_EQ(tokens_of(pair.cache->keys_and_values()), pair.tokens);
    }
  }

  void recall() {
    if (remembered_.empty()) return;
    const Remembered& old = remembered_[static_cast<std::size_t>(pick(0, static_cast<int>(remembered_.size()) - 1))];
    ASSERT_EQ(tokens_of(old.seen), old.tokens);
  }

  std::mt19937 random_;
  std::vector<Pair> pairs_;
  std::vector<Remembered> remembered_;
};

TEST(KVCache, TenThousandRandomOperationsAgreeWithAListOfTokens) {
  RandomHistory history(20240607);
  for (int i = 0; i < 10000 && !::testing::Test::HasFatalFailure(); ++i) {
    history.step();
    if (::testing::Test::HasFatalFailure()) FAIL() << "at operation " << i;
  }
  history.check_all();
}

}  // namespace
}  // namespace reprise
