// BatchKVCache against one list of tokens a row: no random history may show a row a token that its list does not have,
// or hide one.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "mlx/transforms.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/batch_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

using Batch = internal::BatchGrowingCache;

std::unique_ptr<Batch> as_batch(std::unique_ptr<LayerCache> cache) {
  return std::unique_ptr<Batch>(&dynamic_cast<Batch&>(*cache.release()));
}

struct Subject {
  std::unique_ptr<Batch> cache;
  TokenRows tokens;  // the model
};

struct Remembered {
  KeysValues seen;
  std::vector<int> left_padding;
  TokenRows tokens;
};

class RandomBatches {
 public:
  RandomBatches(unsigned seed, bool quantized) : random_(seed), quantized_(quantized) {
    shape_ = quantized ? RowShape{.key_size = 32, .value_size = 64} : RowShape{};
    subjects_.push_back(fresh(2));
    subjects_.push_back(fresh(3));
  }

  void step() {
    const auto at = static_cast<std::size_t>(pick(0, 1));
    Subject& subject = subjects_[at];
    switch (pick(0, 13)) {
      case 0:
      case 1:
      case 2:
        update(subject, 1);
        break;
      case 3:
        update(subject, pick(1, 30));
        break;
      case 4:
      case 5:
        prompt(subject);
        break;
      case 6:
        trim(subject);
        break;
      case 7:
      case 8:
        filter(subject);
        break;
      case 9:
        subject.cache->extend(*subjects_[1 - at].cache);
        subject.tokens.insert(subject.tokens.end(), subjects_[1 - at].tokens.begin(), subjects_[1 - at].tokens.end());
        break;
      case 10:
        extract_and_merge(subject);
        break;
      case 11:
        subjects_[1 - at] = {as_batch(subject.cache->fork()), subject.tokens};
        break;
      case 12:
        reload(subject);
        break;
      default:
        recall();
        break;
    }
    check(subject);
    if (subject.cache->idx() > 500 || subject.tokens.size() > 7 || (subject.tokens.empty() && pick(0, 3) == 0)) {
      subject = fresh(pick(1, 4));
    }
  }

  void check_all() {
    for (const Subject& subject : subjects_) check(subject);
    while (!remembered_.empty()) {
      recall();
      remembered_.pop_back();
    }
  }

  std::size_t shown() const { return shown_; }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  std::vector<int> some_tokens(int count) {
    std::vector<int> tokens;
    for (int i = 0; i < count; ++i) tokens.push_back(pick(0, 4000));
    return tokens;
  }

  TokenRows prompts(std::size_t rows) {
    TokenRows result;
    for (std::size_t row = 0; row < rows; ++row) result.push_back(some_tokens(pick(0, 12)));
    if (rows > 0) result[0].push_back(1);
    return result;
  }

  Subject fresh(int rows) {
    auto count = static_cast<std::size_t>(rows);
    if (pick(0, 2) > 0) return {make(std::vector<int>(count, 0)), TokenRows(count)};
    Subject subject{nullptr, prompts(count)};
    subject.cache = make(paddings(subject.tokens));
    append_batch(*subject.cache, left_padded(subject.tokens), shape_);
    return subject;
  }

  std::unique_ptr<Batch> make(std::vector<int> left_padding) const {
    if (quantized_) return std::make_unique<BatchQuantizedKVCache>(std::move(left_padding), 32, 4);
    return std::make_unique<BatchKVCache>(std::move(left_padding));
  }

  void give(Batch& cache, const TokenRows& columns) {
    const Rows added = batch_rows(columns, shape_);
    const KeysValues seen = cache.update_and_fetch(added.keys, added.values);
    if (pick(0, 2) == 0) mx::eval(std::vector<mx::array>{row_of(seen, 0).keys});
  }

  void update(Subject& subject, int count) {
    if (subject.tokens.empty()) return;
    TokenRows added;
    for (std::size_t row = 0; row < subject.tokens.size(); ++row) added.push_back(some_tokens(count));
    give(*subject.cache, added);
    join(subject.tokens, added);
    if (pick(0, 4) > 0) return;
    if (remembered_.size() == 6) remembered_.erase(remembered_.begin());
    remembered_.push_back({subject.cache->keys_and_values(), subject.cache->left_padding(), subject.tokens});
  }

  static void join(TokenRows& tokens, const TokenRows& added) {
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      tokens[row].insert(tokens[row].end(), added[row].begin(), added[row].end());
    }
  }

  // Right-padded, in one to three chunks; rows may come and go before it is finalized.
  void prompt(Subject& subject) {
    if (subject.tokens.empty()) return;
    const TokenRows added = prompts(subject.tokens.size());
    const TokenRows padded = right_padded(added);
    const int width = static_cast<int>(padded[0].size());
    subject.cache->prepare({.right_padding = paddings(added)});
    for (int begin = 0; begin < width;) {
      const int end = std::min(width, begin + pick(1, width));
      TokenRows chunk;
      for (const auto& row : padded) chunk.emplace_back(row.begin() + begin, row.begin() + end);
      give(*subject.cache, chunk);
      begin = end;
    }
    join(subject.tokens, added);
    if (pick(0, 3) == 0) filter(subject);
    if (pick(0, 3) == 0) {
      const ExtraState pending = subject.cache->extra_state();
      reload(subject);
      subject.cache->set_extra_state(pending);
    }
    subject.cache->finalize();
  }

  void trim(Subject& subject) {
    const int n = pick(0, 5) == 0 ? pick(0, 600) : pick(0, 8);
    const int expected = std::min(n, subject.cache->idx());
    ASSERT_EQ(subject.cache->trim(n), expected);
    for (auto& row : subject.tokens) row.resize(row.size() - std::min(row.size(), static_cast<std::size_t>(n)));
  }

  void filter(Subject& subject) {
    std::vector<int> rows;
    TokenRows tokens;
    const int last = static_cast<int>(subject.tokens.size()) - 1;
    for (int i = pick(0, 5) == 0 || last < 0 ? 0 : pick(1, last + 2); i > 0; --i) {
      rows.push_back(pick(0, last));
      tokens.push_back(subject.tokens[static_cast<std::size_t>(rows.back())]);
    }
    subject.cache->filter(rows);
    subject.tokens = std::move(tokens);
  }

  void extract_and_merge(Subject& subject) {
    std::vector<std::unique_ptr<LayerCache>> singles;
    std::vector<const LayerCache*> pointers;
    for (std::size_t row = 0; row < subject.tokens.size(); ++row) {
      singles.push_back(subject.cache->extract(static_cast<int>(row)));
      pointers.push_back(singles.back().get());
      ASSERT_EQ(singles.back()->position(), static_cast<int>(subject.tokens[row].size()));
    }
    if (!pointers.empty()) subject.cache = as_batch(merge_caches(pointers));
  }

  void reload(Subject& subject) {
    const Batch& cache = *subject.cache;
    switch (pick(0, 2)) {
      case 0:
        subject.cache = as_batch(cache_from_state(cache.class_name(), cache.state()));
        break;
      case 1:
        subject.cache = as_batch(cache_from_state(cache.class_name(), cache.saved_state()));
        break;
      default:
        subject.cache = as_batch(cache_from_legacy(cache.class_name(), cache.legacy_state(), cache.legacy_meta()));
        break;
    }
  }

  void check(const Subject& subject) {
    if (pick(0, 1) == 0) {
      expect_holds(*subject.cache, subject.tokens);
      for (const auto& row : subject.tokens) shown_ += row.size();
    }
    if (!subject.tokens.empty() && pick(0, 9) == 0) {
      expect_mask(*subject.cache, pick(1, 4), pick(0, 1) == 0 ? std::nullopt : std::optional(pick(1, 9)));
    }
  }

  void recall() {
    if (remembered_.empty()) return;
    const Remembered& old = remembered_.back();
    for (std::size_t row = 0; row < old.tokens.size(); ++row) {
      const DenseKV seen = row_of(old.seen, static_cast<int>(row), old.left_padding[row]);
      ASSERT_EQ(tokens_of(KeysValues(seen)), old.tokens[row]);
    }
  }

  std::mt19937 random_;
  bool quantized_;
  RowShape shape_;
  std::vector<Subject> subjects_;
  std::vector<Remembered> remembered_;
  std::size_t shown_ = 0;
};

void run(unsigned seed, bool quantized, int operations) {
  RandomBatches batches(seed, quantized);
  for (int i = 0; i < operations; ++i) {
    batches.step();
    if (::testing::Test::HasFailure()) FAIL() << "seed " << seed << ", operation " << i;
  }
  batches.check_all();
  EXPECT_GT(batches.shown(), 1000u);
}

TEST(BatchKVCache, B1B3B4B5B6B7B8RandomOperationsAgreeWithAListForEachRow) {
  for (const unsigned seed : {1u, 2u, 3u, 4u}) run(seed, false, 500);
}

TEST(BatchQuantizedKVCache, X7RandomOperationsAgreeWithAListForEachRow) {
  for (const unsigned seed : {5u, 6u}) run(seed, true, 500);
}

}  // namespace
}  // namespace reprise
