// PagedKVCache: rows in pages that forks and spans share; what is appended, trimmed or given up on one side is nobody
// else's.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/paged_kv_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/paged_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using kernels::kPageRows;

std::shared_ptr<PagePool> make_pool() { return PagePool::make(); }

TEST(PagedKVCache, UpdatesInPiecesShowAllRows) {
  for (const auto& lengths : {std::vector<int>{1, 1, 1}, {64}, {63, 1, 1}, {64, 64}, {200}, {5, 130, 1, 60}}) {
    PagedKVCache cache(make_pool());
    int length = 0;
    for (const int count : lengths) {
      const KeysValues all = append(cache, range(length, length + count), {.key_size = 8, .value_size = 24});
      length += count;
      EXPECT_EQ(tokens_of(all), range(0, length));
    }
    EXPECT_EQ(cache.position(), length);
    EXPECT_EQ(cache.length(), length);
    EXPECT_EQ(cache.nbytes(),
              static_cast<std::size_t>((length + kPageRows - 1) / kPageRows) * cache.layout()->nbytes());
    cache.check();
  }
}

TEST(PagedKVCache, ArraysHandedOutAreValues) {
  const auto pool = make_pool();
  PagedKVCache cache(pool);
  const KeysValues before = append(cache, range(0, 70));
  cache.trim(60);
  append(cache, range(500, 560));
  EXPECT_EQ(tokens_of(before), range(0, 70)) << "although it is evaluated only now";
}

TEST(PagedKVCache, AForkSharesAllPagesAndOneSideCopiesOnePage) {
  const auto pool = make_pool();
  PagedKVCache cache = filled_pages(pool, 3 * kPageRows + 10);
  const std::size_t page = cache.layout()->nbytes();
  EXPECT_EQ(pool->nbytes(), 4 * page);
  const auto copy = cache.fork();
  auto& fork = dynamic_cast<PagedKVCache&>(*copy);
  EXPECT_EQ(pool->nbytes(), 4 * page);
  EXPECT_EQ(page_addresses(fork), page_addresses(cache));

  const auto before = page_addresses(cache);
  feed_pages(fork, {1000});
  EXPECT_EQ(page_addresses(fork), before) << "whoever goes on first does so in place";
  feed_pages(cache, {2000, 2001});
  const auto after = page_addresses(cache);
  EXPECT_EQ(pool->nbytes(), 5 * page);
  EXPECT_TRUE(std::equal(before.begin(), before.end() - 1, after.begin()));
  EXPECT_NE(before.back(), after.back());

  std::vector<int> wanted = range(0, 3 * kPageRows + 10);
  wanted.push_back(1000);
  EXPECT_EQ(tokens_of_rows(fork), wanted);
  wanted.back() = 2000;
  wanted.push_back(2001);
  EXPECT_EQ(tokens_of_rows(cache), wanted);
}

TEST(PagedKVCache, AForkOfWholePagesCopiesNothing) {
  const auto pool = make_pool();
  PagedKVCache cache = filled_pages(pool, 2 * kPageRows);
  PagedKVCache fork = cache;
  feed_pages(cache, {1000});
  feed_pages(fork, {2000});
  EXPECT_EQ(pool->nbytes(), 4 * cache.layout()->nbytes());
  EXPECT_EQ(tokens_of_rows(cache).back(), 1000);
  EXPECT_EQ(tokens_of_rows(fork).back(), 2000);
}

TEST(PagedKVCache, WhatIsTrimmedStaysWithTheFork) {
  const auto pool = make_pool();
  PagedKVCache cache = filled_pages(pool, 150);
  const PagedKVCache fork = cache;
  EXPECT_EQ(cache.trim(100), 100);
  EXPECT_EQ(page_addresses(cache).size(), 1u);
  feed_pages(cache, range(900, 980));
  EXPECT_EQ(tokens_of_rows(fork), range(0, 150));
  std::vector<int> wanted = range(0, 50);
  for (const int token : range(900, 980)) wanted.push_back(token);
  EXPECT_EQ(tokens_of_rows(cache), wanted);
  EXPECT_EQ(cache.trim(1000), 130);
  EXPECT_FALSE(cache.empty()) << "a cache trimmed to 0 rows is not empty";
  EXPECT_TRUE(tokens_of_rows(cache).empty());
  feed_pages(cache, {7});
  EXPECT_EQ(tokens_of_rows(cache), std::vector<int>{7});
}

TEST(PagedKVCache, PagesGoBackWhenNobodyHoldsThem) {
  const auto pool = make_pool();
  {
    PagedKVCache cache = filled_pages(pool, 500);
    const PagedKVCache fork = cache;
    feed_pages(cache, range(0, 100));
    const PageSpan span = fork.span(kPageRows, 300);
    EXPECT_GT(pool->nbytes(), 0u);
  }
  EXPECT_EQ(pool->nbytes(), 0u);
}

TEST(PagedKVCache, UpdatesThatNobodyEvaluatesDoNotPileUp) {
  PagedKVCache cache(make_pool());
  std::vector<mx::array> first;
  for (int i = 0; i < 200; ++i) {
    append(cache, {i});
    if (i == 0) cache.collect_arrays(first);
  }
  ASSERT_EQ(first.size(), 1u);
  EXPECT_TRUE(first.front().is_available());
  EXPECT_EQ(tokens_of_rows(cache), range(0, 200));
}

TEST(PagedKVCache, ASpanIsThePagesThemselvesAndMakesTheSameCache) {
  const auto pool = make_pool();
  PagedKVCache cache = filled_pages(pool, 300);
  const std::size_t bytes = pool->nbytes();
  const std::vector<PageSpan> spans = {cache.span(0, 2 * kPageRows), cache.span(2 * kPageRows, 300)};
  EXPECT_EQ(spans[0].nbytes() + spans[1].nbytes(), cache.nbytes());
  for (const int length : {1, kPageRows, 2 * kPageRows, 2 * kPageRows + 1, 290, 300}) {
    PagedKVCache other(pool);
    other.adopt(spans, length);
    EXPECT_EQ(pool->nbytes(), bytes);
    EXPECT_EQ(other.position(), length);
    EXPECT_EQ(tokens_of_rows(other), range(0, length));
    EXPECT_EQ(other.layout(), cache.layout());
    const auto pages = page_addresses(other), all = page_addresses(cache);
    EXPECT_TRUE(std::equal(pages.begin(), pages.end(), all.begin()));
    other.check();
    // The one whose history ends with the page's rows goes on in place, any other copies.
    PagedKVCache again = other;
    feed_pages(again, {5000});
    EXPECT_EQ(page_addresses(again).back() == pages.back(), length == 300) << length;
    std::vector<int> wanted = range(0, length);
    wanted.push_back(5000);
    EXPECT_EQ(tokens_of_rows(again), wanted);
    EXPECT_EQ(tokens_of_rows(cache), range(0, 300));
  }
}

TEST(PagedKVCache, SpansThatDoNotFitAreRefused) {
  const auto pool = make_pool();
  PagedKVCache cache = filled_pages(pool, 300);
  EXPECT_EQ(
      error_of([&] { cache.span(10, 100); }),
      "invalid_argument: [PagedKVCache::span] rows must be there (rows 0 to 300) and begin with a page of 64, but "
      "got rows 10 to 100");
  EXPECT_THROW(cache.span(0, 301), Error);
  EXPECT_THROW(cache.span(64, 64), Error);
  EXPECT_THROW(PagedKVCache(pool).span(0, 1), Error);

  const PageSpan head = cache.span(0, 128), tail = cache.span(128, 300);
  PagedKVCache filled_one = cache;
  EXPECT_THROW(filled_one.adopt({head}, 100), Error);
  PagedKVCache other(pool);
  const auto refused = [&](const std::vector<PageSpan>& spans, int length) {
    EXPECT_THROW(other.adopt(spans, length), Error);
    EXPECT_TRUE(other.empty());
    EXPECT_EQ(other.position(), 0);
  };
  refused({}, 0);
  refused({head}, 0);
  refused({head, tail}, 301);
  refused({tail}, 300);  // full attention needs the rows before
  refused({head, head}, 200);
  refused({tail, head}, 128);
  PageSpan short_one = head, null_page = tail, unfilled = tail, other_layout = tail;
  short_one.pages.pop_back();
  refused({short_one}, 100);
  null_page.pages[1] = nullptr;
  refused({head, null_page}, 300);
  unfilled.pages[0] = pool->allocate(head.layout.nbytes());
  refused({head, unfilled}, 200);
  other_layout.layout.dtype = mx::float16;
  refused({head, other_layout}, 300);
  PagedKVCache quantised(pool, {}, KVQuantization{32, 8});
  EXPECT_THROW(quantised.adopt({head}, 100), Error);
  other.adopt({head, null_page}, 190);  // what lies behind the length does not matter
  EXPECT_EQ(tokens_of_rows(other), range(0, 190));
}

TEST(PagedKVCache, PagesThatNoQuerySeesAnyMoreAreGivenUp) {
  struct Case {
    kernels::PagedVisibility visibility;
    int length, first_row, max_trim;
  };
  for (const Case& c : {Case{{}, 300, 0, 300}, Case{{.window = 10}, 300, 256, 35}, Case{{.window = 150}, 300, 128, 23},
                        Case{{.window = 400}, 300, 0, 300}, Case{{.chunk = 100}, 300, 256, 0},
                        Case{{.chunk = 100}, 299, 192, 99}, Case{{.chunk = 64}, 300, 256, 44},
                        Case{{.window = 1}, 256, 256, 0}, Case{{.window = 20, .chunk = 100}, 299, 256, 24}}) {
    SCOPED_TRACE(std::to_string(c.visibility.window) + " " + std::to_string(c.visibility.chunk));
    const auto pool = make_pool();
    PagedKVCache cache = filled_pages(pool, c.length, c.visibility);
    const PagedKVCache whole = cache;
    EXPECT_EQ(cache.max_trim(), c.length);
    cache.drop_unseen();
    EXPECT_EQ(cache.first_row(), c.first_row);
    EXPECT_EQ(cache.length(), c.length - c.first_row);
    EXPECT_EQ(cache.position(), c.length);
    EXPECT_EQ(cache.max_trim(), c.max_trim);
    EXPECT_EQ(cache.keeps_all_rows(), c.first_row == 0);
    EXPECT_EQ(tokens_of_rows(cache), range(c.first_row, c.length));
    cache.check();
    EXPECT_EQ(cache.trim(1000), c.max_trim);
    std::vector<int> tokens = range(0, c.length - c.max_trim);
    for (int i = 0; i < 70; ++i) {
      tokens.push_back(1000 + i);
      const float want = mean_seen(tokens, static_cast<int>(tokens.size()) - 1, c.visibility);
      EXPECT_NEAR(means_of_step(cache, {{1000 + i}})[0][0], want, 1e-5f * want) << i;
    }
    EXPECT_EQ(tokens_of_rows(whole), range(0, c.length));
  }
}

TEST(PagedKVCache, AWindowNeedsOnlyTheSpansThatItSees) {
  const auto pool = make_pool();
  const PagedKVCache whole = filled_pages(pool, 300, {.window = 50});
  PagedKVCache cache(pool, {.window = 50});
  EXPECT_THROW(cache.adopt({whole.span(256, 300)}, 300), Error);
  cache.adopt({whole.span(192, 300)}, 300);
  EXPECT_EQ(cache.first_row(), 192);
  EXPECT_EQ(cache.max_trim(), 300 - (192 + 49));
  EXPECT_EQ(tokens_of_rows(cache), range(192, 300));
}

TEST(PagedKVCache, FilesHoldThePlainClass) {
  const auto pool = make_pool();
  const PagedKVCache cache = filled_pages(pool, 3);
  EXPECT_EQ(error_of([&] { cache.state(); }),
            "unsupported: [PagedKVCache::state] files hold the class that plain() gives, but got pages");
  EXPECT_THROW(cache.saved_state(), Error);
  EXPECT_THROW(cache.legacy_state(), Error);
  EXPECT_THROW(cache.legacy_meta(), Error);
  EXPECT_THROW(PagedKVCache(pool).keys_and_values(), Error);
  EXPECT_FALSE(cache.has_quantized_counterpart());
}

TEST(PagedKVCache, CheckTellsOfLostRows) {
  const auto pool = make_pool();
  const PagedKVCache cache = filled_pages(pool, 70);
  PromptCache list;
  list.push_back(cache.fork());
  check_prompt_cache(list, 70);
  EXPECT_THROW(check_prompt_cache(list, 69), Error);
  cache.span(0, 70).pages[1]->set_claimed(3);
  EXPECT_THROW(check_prompt_cache(list), Error);
}

}  // namespace
}  // namespace reprise
