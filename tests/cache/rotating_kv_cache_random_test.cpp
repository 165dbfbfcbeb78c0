// RotatingKVCache against a list of tokens: whatever the history, it shows the kept and the most recent ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "mlx/transforms.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/ring_model.h"
#include "tests/cache/ring_samples.h"

namespace reprise {
namespace {

using namespace cache_test;

struct Pair {
  std::unique_ptr<RotatingKVCache> cache;
  RingModel model;
};

struct Remembered {
  KeysValues seen;
  std::vector<int> tokens;  // sorted
};

class RandomHistory {
 public:
  RandomHistory(unsigned seed, int max_size, int keep) : random_(seed), max_size_(max_size), keep_(keep) {
    pairs_.push_back(fresh());
  }

  void step() {
    const auto at = static_cast<std::size_t>(pick(0, static_cast<int>(pairs_.size()) - 1));
    switch (pick(0, 11)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        add(pairs_[at], 1);
        break;
      case 5:
        add(pairs_[at], pick(2, 2 * max_size_ + 3));
        break;
      case 6:
        trim(pairs_[at]);
        break;
      case 7:
        fork(at);
        break;
      case 8:
        reload(pairs_[at]);
        break;
      case 9:
        check(pairs_[at]);
        break;
      case 10:
        if (pick(0, 3) == 0) pairs_[at] = fresh();
        break;
      default:
        recall();
        break;
    }
  }

  void check_all() {
    for (const Pair& pair : pairs_) check(pair);
    for (const Remembered& old : remembered_) ASSERT_EQ(sorted(tokens_of(old.seen)), old.tokens);
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  Pair fresh() const { return {std::make_unique<RotatingKVCache>(max_size_, keep_), {max_size_, keep_}}; }

  void add(Pair& pair, int count) {
    std::vector<int> added;
    for (int i = 0; i < count; ++i) added.push_back(pick(0, 4000));
    const KeysValues seen = append(*pair.cache, added);
    const std::vector<int> wanted = pair.model.append(added);
    if (pick(0, 3) == 0) {
      const std::vector<int> tokens = tokens_of(seen);
      ASSERT_EQ(count > 1 ? tokens : sorted(tokens), count > 1 ? wanted : sorted(wanted));
    } else if (pick(0, 2) == 0) {
      mlx::core::eval(std::get<DenseKV>(seen).keys, std::get<DenseKV>(seen).values);
    }
    if (pick(0, 4) == 0) {
      if (remembered_.size() == 6) remembered_.erase(remembered_.begin());
      remembered_.push_back({seen, sorted(wanted)});
    }
  }

  void trim(Pair& pair) {
    const int n = pick(0, 3) == 0 ? pick(0, 3 * max_size_) : pick(0, 4);
    ASSERT_EQ(pair.cache->trim(n), pair.model.trim(n));
  }

  void fork(std::size_t at) {
    Pair copy{RotatingKVCache::from_columns(max_size_, keep_, pairs_[at].cache->buffer(), *pairs_[at].cache->position(),
                                            pairs_[at].cache->idx()),
              pairs_[at].model};
    if (pairs_.size() < 4) {
      pairs_.push_back(std::move(copy));
    } else {
      pairs_[static_cast<std::size_t>(pick(0, 3))] = std::move(copy);
    }
  }

  void reload(Pair& pair) {
    switch (pick(0, 2)) {
      case 0:
        pair.cache = RotatingKVCache::from_state(pair.cache->state());
        break;
      case 1:
        pair.cache = RotatingKVCache::from_state(pair.cache->saved_state());
        break;
      default:
        pair.cache = RotatingKVCache::from_legacy(pair.cache->legacy_state(), pair.cache->legacy_meta());
        break;
    }
  }

  // A decode step on a fork sees what a decode step must see.
  void check(const Pair& pair) {
    ASSERT_EQ(pair.cache->position(), pair.model.offset());
    ASSERT_EQ(pair.cache->length(), std::min(pair.model.offset(), max_size_));
    ASSERT_EQ(pair.cache->max_trim(), pair.model.offset() < max_size_ ? pair.model.offset() : 0);
    const auto fork = pair.cache->fork();
    RingModel model = pair.model;
    const std::vector<int> wanted = model.append({7});
    ASSERT_EQ(sorted(tokens_of(append(dynamic_cast<RotatingKVCache&>(*fork), {7}))), sorted(wanted));
  }

  void recall() {
    if (remembered_.empty()) return;
    const Remembered& old = remembered_[static_cast<std::size_t>(pick(0, static_cast<int>(remembered_.size()) - 1))];
    ASSERT_EQ(sorted(tokens_of(old.seen)), old.tokens);
  }

  std::mt19937 random_;
  int max_size_;
  int keep_;
  std::vector<Pair> pairs_;
  std::vector<Remembered> remembered_;
};

TEST(RotatingKVCache, R3RandomMixShowsKeptAndMostRecent) {
  struct Ring {
    int max_size;
    int keep;
  };
  for (const auto& [max_size, keep] : {Ring{8, 0}, {8, 4}, {5, 4}, {1, 0}, {13, 1}, {300, 4}}) {
    RandomHistory history(20240611, max_size, keep);
    for (int i = 0; i < 1500; ++i) {
      history.step();
      if (::testing::Test::HasFatalFailure()) FAIL() << "max_size " << max_size << " operation " << i;
    }
    history.check_all();
  }
}

}  // namespace
}  // namespace reprise
