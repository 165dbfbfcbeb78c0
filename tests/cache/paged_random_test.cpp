// Paged caches through long random histories, against plain lists of tokens: alone and in batches, in pieces and token
// by token, trimmed, forked, cut into spans and put together again, given up in part; and no page is lost or copied
// without need. More of them: random_settings.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <ostream>
#include <random>
#include <set>

#include "mlx/transforms.h"
#include "reprise/cache/paged_batch.h"
#include "reprise/cache/prompt_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/paged_rows.h"
#include "tests/cache/random_settings.h"

namespace reprise {
namespace {

using namespace cache_test;
using kernels::kPageRows;
using kernels::PagedVisibility;

struct Kind {
  const char* name;
  PagedVisibility visibility;
  std::optional<KVQuantization> quantization = {};
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

struct Subject {
  std::unique_ptr<PagedKVCache> cache;
  std::vector<int> tokens;
};

// What a prefix cache would keep of a history.
struct Stored {
  std::vector<PageSpan> spans;
  std::vector<int> tokens;
};

// What a step must give, whenever it runs.
struct Expected {
  mlx::core::array output;
  std::vector<std::vector<float>> means;
};

class History {
 public:
  History(const Kind& kind, unsigned seed) : kind_(kind), random_(seed), pool_(PagePool::make(1 << 16)) { add_new(); }

  void step() {
    Subject& subject = subjects_[at_random(subjects_.size())];
    const int choice = pick(0, 99);
    if (choice < 25) {
      update({&subject}, pick(0, 2) == 0 ? pick(1, 150) : 1);
    } else if (choice < 50) {
      update_several();
    } else if (choice < 60) {
      trim(subject);
    } else if (choice < 68) {
      add({std::make_unique<PagedKVCache>(*subject.cache), subject.tokens});
    } else if (choice < 74) {
      subject.cache->drop_unseen();
    } else if (choice < 80) {
      store(subject);
    } else if (choice < 88) {
      if (!stored_.empty()) adopt(stored_[at_random(stored_.size())]);
    } else if (choice < 91) {
      add_new();
    } else if (choice < 96) {
      check(subject);
    } else {
      refuse(subject);
    }
    check_pages();
  }

  void check_all() {
    recall();
    for (Subject& subject : subjects_) check(subject);
  }

  // Everything goes.
  void end() {
    subjects_.clear();
    stored_.clear();
    EXPECT_EQ(pool_->nbytes(), 0u);
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  std::size_t at_random(std::size_t size) { return static_cast<std::size_t>(pick(0, static_cast<int>(size) - 1)); }

  std::unique_ptr<PagedKVCache> empty_cache() const {
    return std::make_unique<PagedKVCache>(pool_, kind_.visibility, kind_.quantization);
  }

  void add(Subject subject) {
    if (subjects_.size() < 6) {
      subjects_.push_back(std::move(subject));
    } else {
      subjects_[at_random(subjects_.size())] = std::move(subject);
    }
  }
  void add_new() { add({empty_cache(), {}}); }

  std::vector<int> new_tokens(int count) {
    std::vector<int> tokens = range(next_token_, next_token_ + count);
    next_token_ += count;
    return tokens;
  }

  void update(const std::vector<Subject*>& subjects, int width) {
    std::vector<std::vector<int>> added;
    std::vector<PagedKVCache*> rows;
    for (Subject* subject : subjects) {
      added.push_back(new_tokens(width));
      rows.push_back(subject->cache.get());
    }
    PagedBatch batch(rows);
    AttentionCache& cache = rows.size() == 1 && pick(0, 2) > 0 ? static_cast<AttentionCache&>(*rows.front()) : batch;
    Expected expected{step_of_tokens(cache, added), {}};
    for (std::size_t b = 0; b < subjects.size(); ++b) {
      std::vector<int>& tokens = subjects[b]->tokens;
      tokens.insert(tokens.end(), added[b].begin(), added[b].end());
      expected.means.emplace_back();
      for (int i = 0; i < width; ++i) {
        const int position = static_cast<int>(tokens.size()) - width + i;
        expected.means.back().push_back(mean_seen(tokens, position, kind_.visibility));
      }
      page_bytes_ = subjects[b]->cache->layout()->nbytes();
    }
    expected_.push_back(std::move(expected));
    if (pick(0, 2) > 0) return;  // some steps run only when much else has been built on them
    std::shuffle(expected_.begin(), expected_.end(), random_);
    recall();
  }

  void recall() {
    for (const Expected& expected : expected_) {
      const auto got = means_of(expected.output);
      for (std::size_t b = 0; b < got.size(); ++b) {
        for (std::size_t i = 0; i < got[b].size(); ++i) {
          const float want = expected.means[b][i];
          ASSERT_NEAR(got[b][i], want, 1e-5f * want) << "row " << b << " of " << got.size() << ", query " << i;
        }
      }
    }
    expected_.clear();
  }

  void update_several() {
    std::vector<Subject*> chosen;
    for (Subject& subject : subjects_) {
      if (pick(0, 1) == 0) chosen.push_back(&subject);
    }
    std::shuffle(chosen.begin(), chosen.end(), random_);
    if (!chosen.empty()) update(chosen, pick(0, 4) == 0 ? pick(2, 70) : 1);
  }

  int max_trim(const Subject& subject) const {
    const auto length = static_cast<int>(subject.tokens.size());
    int most = 0;
    for (int n = 0; n <= length; ++n) {
      if (kind_.visibility.first_visible(length - n) >= subject.cache->first_row()) most = n;
    }
    return most;
  }

  void trim(Subject& subject) {
    const int n = pick(0, 3) == 0 ? pick(0, 400) : pick(0, 6);
    const int wanted = std::min(n, max_trim(subject));
    ASSERT_EQ(subject.cache->trim(n), wanted);
    subject.tokens.resize(subject.tokens.size() - static_cast<std::size_t>(wanted));
  }

  // All its rows from one page on, in spans of some pages each.
  void store(const Subject& subject) {
    const int length = static_cast<int>(subject.tokens.size());
    if (subject.cache->length() == 0) return;
    recall();  // spans are of rows that are there
    const int first_page = subject.cache->first_row() / kPageRows;
    int begin = pick(first_page, (length - 1) / kPageRows) * kPageRows;
    Stored stored{{}, subject.tokens};
    while (begin < length) {
      const int end = std::min(length, begin + pick(1, 3) * kPageRows);
      stored.spans.push_back(subject.cache->span(begin, end));
      begin = end;
    }
    if (stored_.size() < 4) {
      stored_.push_back(std::move(stored));
    } else {
      stored_[at_random(stored_.size())] = std::move(stored);
    }
  }

  void adopt(const Stored& stored) {
    const int begin = stored.spans.front().begin;
    const int length = pick(begin, static_cast<int>(stored.tokens.size()));
    Subject subject{empty_cache(), std::vector<int>(stored.tokens.begin(), stored.tokens.begin() + length)};
    if (length == begin || kind_.visibility.first_visible(length) < begin) {
      EXPECT_THROW(subject.cache->adopt(stored.spans, length), Error);
      EXPECT_TRUE(subject.cache->empty());
      return;
    }
    subject.cache->adopt(stored.spans, length);
    add(std::move(subject));
  }

  void refuse(Subject& subject) {
    const std::vector<std::vector<int>> two(2, {1, 2});
    EXPECT_THROW(means_of_step(*subject.cache, two), Error);
    EXPECT_THROW(subject.cache->trim(-1), Error);
    EXPECT_THROW(subject.cache->span(subject.cache->first_row(), *subject.cache->position() + 1), Error);
  }

  void check(const Subject& subject) {
    const PagedKVCache& cache = *subject.cache;
    cache.check();
    const auto length = static_cast<int>(subject.tokens.size());
    ASSERT_EQ(cache.position(), length);
    ASSERT_EQ(cache.length(), length - cache.first_row());
    ASSERT_EQ(cache.max_trim(), max_trim(subject));
    ASSERT_EQ(cache.keeps_all_rows(), cache.first_row() == 0);
    ASSERT_LE(cache.first_row(), kind_.visibility.first_visible(length));
    if (cache.empty()) return;
    const std::vector<int> there(subject.tokens.begin() + cache.first_row(), subject.tokens.end());
    ASSERT_EQ(tokens_of_rows(cache), there);
    if (kind_.visibility.chunk > 0 && (kind_.quantization || kind_.visibility.window > 0)) return;
    // In mlx-lm's class: no more than it sees, and at least that.
    const auto plain = cache.plain();
    ASSERT_EQ(plain->position(), length);
    const auto shown = tokens_of_rows(dynamic_cast<AttentionCache&>(*plain));
    const int seen = length - kind_.visibility.first_visible(length);
    ASSERT_GE(static_cast<int>(shown.size()), seen);
    ASSERT_TRUE(std::equal(shown.rbegin(), shown.rend(), there.rbegin()));
  }

  // What is held is exactly what somebody's rows lie in, besides what has not run.
  void check_pages() {
    std::set<const std::byte*> held;
    for (const Subject& subject : subjects_) {
      const auto pages = page_addresses(*subject.cache);
      held.insert(pages.begin(), pages.end());
      ASSERT_EQ(subject.cache->nbytes(), pages.size() * page_bytes_);
    }
    for (const Stored& stored : stored_) {
      for (const PageSpan& span : stored.spans) {
        for (const PageRef& page : span.pages) held.insert(page->data());
      }
    }
    ASSERT_GE(pool_->nbytes(), held.size() * page_bytes_);
    if (expected_.empty()) {
      ASSERT_EQ(pool_->nbytes(), held.size() * page_bytes_);
    }
  }

  const Kind& kind_;
  std::mt19937 random_;
  std::shared_ptr<PagePool> pool_;
  std::vector<Subject> subjects_;
  std::vector<Stored> stored_;
  std::vector<Expected> expected_;
  std::size_t page_bytes_ = 0;
  int next_token_ = 1;
};

const Kind kKinds[] = {{"Full", {}},
                       {"Quantised", {}, KVQuantization{32, 8}},
                       {"WindowOfOne", {.window = 1}},
                       {"Window", {.window = 7}},
                       {"WindowOfAPage", {.window = kPageRows}},
                       {"LongWindow", {.window = 150}},
                       {"QuantisedWindow", {.window = 100}, KVQuantization{32, 4}},
                       {"ShortChunks", {.chunk = 10}},
                       {"ChunksOfAPage", {.chunk = kPageRows}},
                       {"LongChunks", {.chunk = 150}},
                       {"QuantisedChunks", {.chunk = 48}, KVQuantization{32, 8}},
                       {"WindowInChunks", {.window = 20, .chunk = 70}}};

class PagedRandomTest : public testing::TestWithParam<Kind> {};

TEST_P(PagedRandomTest, EveryTokenOfEveryHistorySeesWhatTheListsSayAndNoPageIsLost) {
  History history(GetParam(), random_seed());
  run_random_history(history);
  if (!testing::Test::HasFatalFailure()) history.end();
}

INSTANTIATE_TEST_SUITE_P(Kinds, PagedRandomTest, testing::ValuesIn(kKinds),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace reprise
