// Rotating batches against one ring a row: no random history may show a row a token that it would not see alone, hide
// one, or lose one.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "reprise/base/error.h"
#include "reprise/cache/batch_quantized_rotating_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/cache/ring_batch.h"

namespace reprise {
namespace {

using namespace cache_test;

struct Form {
  int max_size;
  int keep;
  bool quantized = false;
};

class RandomRings {
 public:
  RandomRings(unsigned seed, const Form& form) : random_(seed), form_(form) {
    pair_ = one_in(2) ? left_padded_pair() : fresh(pick(1, 3));
  }

  void step() {
    switch (pick(0, 13)) {
      case 0:
      case 1:
      case 2:
      case 3:
        for (int i = pick(1, 4); i > 0; --i) update(std::vector<int>(rows(), 1), 1);
        break;
      case 4: {
        const int columns = pick(2, pick(2, 2 * form_.max_size));
        update(std::vector<int>(rows(), columns), columns);
        break;
      }
      case 5:
      case 6:
      case 7:
        padded_prompt();
        break;
      case 8:
        filter();
        break;
      case 9:
        extend();
        break;
      case 10:
        trim();
        break;
      case 11:
        reload();
        break;
      case 12:
        merge_again();
        break;
      default:
        fork();
    }
    EXPECT_NO_FATAL_FAILURE(expect_extracts(pair_));
    expect_positions();
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool one_in(int n) { return pick(1, n) == 1; }
  std::size_t rows() const { return pair_.solos.size(); }
  RowShape shape() const { return form_.quantized ? kQuantizedRingShape : kRingShape; }
  std::vector<int> tokens(int count) {
    next_ += count;
    return range(next_ - count, next_);
  }
  std::optional<int> window() { return one_in(3) ? std::optional(pick(1, form_.max_size + 2)) : std::nullopt; }

  std::unique_ptr<internal::RingCache> solo() {
    if (form_.quantized) return std::make_unique<QuantizedRotatingKVCache>(form_.max_size, form_.keep, 32, 8);
    return std::make_unique<RotatingKVCache>(form_.max_size, form_.keep);
  }

  // Rows of every fill state: empty, short, full, wrapped, after an oversize chunk.
  RingPair fresh(int count) {
    std::vector<std::unique_ptr<internal::RingCache>> solos;
    for (int i = 0; i < count; ++i) {
      solos.push_back(solo());
      for (int updates = pick(0, 4); updates > 0; --updates) {
        append(*solos.back(), tokens(one_in(2) ? 1 : pick(1, 2 * form_.max_size)), shape());
      }
    }
    return merged(std::move(solos));
  }

  RingPair left_padded_pair() {
    const std::vector<int> padding = {pick(0, 5), pick(0, 5), 0};
    RingPair pair;
    if (form_.quantized) {
      pair.batch = std::make_unique<BatchQuantizedRotatingKVCache>(form_.max_size, padding, form_.keep, 32, 8);
    } else {
      pair.batch = std::make_unique<BatchRotatingKVCache>(form_.max_size, padding, form_.keep);
    }
    const int columns = pick(6, 2 * form_.max_size + 6);
    TokenRows added;
    for (const int count : padding) {
      pair.solos.push_back(solo());
      added.push_back(tokens(columns - count));
    }
    EXPECT_NO_FATAL_FAILURE(update_and_compare(pair, added, columns, window(), shape(), padding));
    return pair;
  }

  void update(const std::vector<int>& lengths, int columns) {
    TokenRows added;
    for (const int length : lengths) added.push_back(tokens(length));
    EXPECT_NO_FATAL_FAILURE(update_and_compare(pair_, added, columns, window(), shape()));
  }

  void padded_prompt() {
    const int columns = pick(2, 2 * form_.max_size);
    std::vector<int> left;
    BatchPrompt prompt;
    for (std::size_t row = 0; row < rows(); ++row) left.push_back(pick(0, columns));
    if (!left.empty()) left[static_cast<std::size_t>(pick(0, static_cast<int>(rows()) - 1))] = columns;
    prompt.lengths = left;
    for (const int length : left) prompt.right_padding.push_back(columns - length);
    pair_.batch->prepare(prompt);
    // Chunks of at least two columns.
    for (int done = 0; done < columns;) {
      const int chunk = columns - done < 4 || one_in(2) ? columns - done : pick(2, columns - done - 2);
      std::vector<int> now;
      for (std::size_t row = 0; row < rows(); ++row) now.push_back(std::clamp(pair_left(row, left, done), 0, chunk));
      update(now, chunk);
      done += chunk;
      if (one_in(4)) reload();
      if (one_in(4)) {
        EXPECT_NO_FATAL_FAILURE(expect_extracts(pair_));
      }
      if (one_in(5)) {
        const std::vector<int> chosen = filter();
        std::vector<int> lengths;
        for (const int row : chosen) lengths.push_back(left[static_cast<std::size_t>(row)]);
        left = lengths;
      }
    }
    pair_.batch->finalize();
  }

  static int pair_left(std::size_t row, const std::vector<int>& lengths, int done) { return lengths[row] - done; }

  std::vector<int> filter() {
    std::vector<int> chosen;
    for (int i = pick(1, 4); i > 0; --i) chosen.push_back(pick(0, static_cast<int>(rows()) - 1));
    pair_.batch->filter(chosen);
    std::vector<std::unique_ptr<internal::RingCache>> solos;
    for (const int row : chosen) solos.push_back(as_ring(pair_.solos[static_cast<std::size_t>(row)]->fork()));
    pair_.solos = std::move(solos);
    return chosen;
  }

  void extend() {
    if (one_in(8)) {
      pair_.batch->filter({});
      pair_.solos.clear();
    }
    RingPair other = one_in(3) ? left_padded_pair() : rows() > 0 && one_in(3) ? pair_.fork() : fresh(pick(1, 2));
    if (one_in(2)) std::swap(pair_, other);
    const State before = other.batch->state();
    pair_.batch->extend(*other.batch);
    EXPECT_TRUE(identical(other.batch->state(), before));
    for (auto& solo : other.solos) pair_.solos.push_back(std::move(solo));
    if (rows() > 6) filter();
  }

  void trim() {
    const bool trimmable = pair_.batch->is_trimmable();
    const State before = pair_.batch->state();
    const int most = pair_.batch->max_trim();
    const int n = pick(0, form_.max_size);
    const int trimmed = pair_.batch->trim(n);
    EXPECT_EQ(trimmed, trimmable ? std::min(n, most) : 0);
    if (!trimmable) {
      EXPECT_TRUE(identical(pair_.batch->state(), before));
    }
    for (const auto& solo : pair_.solos) {
      if (!trimmable) continue;
      EXPECT_TRUE(solo->is_trimmable());
      solo->trim(trimmed);
    }
  }

  void reload() {
    const State state = one_in(2) ? pair_.batch->state() : pair_.batch->saved_state();
    const ExtraState extra = pair_.batch->extra_state();
    pair_.batch = as_ring_batch(cache_from_state(pair_.batch->class_name(), state));
    pair_.batch->set_extra_state(extra);
    EXPECT_TRUE(identical(pair_.batch->state(), state));
    EXPECT_EQ(pair_.batch->extra_state(), extra);
  }

  void merge_again() {
    std::vector<std::unique_ptr<LayerCache>> singles;
    std::vector<const LayerCache*> caches;
    for (std::size_t row = 0; row < rows(); ++row) {
      singles.push_back(pair_.batch->extract(static_cast<int>(row)));
      caches.push_back(singles.back().get());
    }
    pair_.batch = as_ring_batch(merge_caches(caches));
  }

  void fork() {
    RingPair other = pair_.fork();
    const State before = other.batch->state();
    update(std::vector<int>(rows(), 1), 1);
    EXPECT_TRUE(identical(other.batch->state(), before));
    if (one_in(2)) pair_ = std::move(other);
  }

  void expect_positions() {
    for (std::size_t row = 0; row < rows(); ++row) {
      EXPECT_EQ(pair_.batch->positions()[row], *pair_.solos[row]->position());
    }
  }

  std::mt19937 random_;
  Form form_;
  int next_ = kFirstToken;
  RingPair pair_;
};

void run(const Form& form, int scripts, int steps) {
  for (int seed = 0; seed < scripts; ++seed) {
    RandomRings rings(static_cast<unsigned>(seed), form);
    for (int step = 0; step < steps; ++step) {
      rings.step();
      if (testing::Test::HasFailure()) {
        FAIL() << "max_size " << form.max_size << " keep " << form.keep << " seed " << seed << " step " << step;
      }
    }
  }
}

TEST(BatchRotatingKVCacheRandom, W1RowsSeeWhatTheySeeAlone) {
  for (const int max_size : {1, 2, 5, 8}) run({max_size, 0}, 8, 25);
}

TEST(BatchRotatingKVCacheRandom, W9RowsWithSinksSeeWhatTheySeeAlone) {
  for (const auto& [max_size, keep] : {std::pair(8, 4), std::pair(5, 4), std::pair(9, 1), std::pair(2, 1)}) {
    run({max_size, keep}, 8, 25);
  }
}

TEST(BatchRotatingKVCacheRandom, X7QuantisedRowsSeeWhatTheySeeAlone) {
  for (const int keep : {0, 3}) run({8, keep, true}, 6, 20);
}

}  // namespace
}  // namespace reprise
