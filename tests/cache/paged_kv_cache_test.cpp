// PagedKVCache: rows in pages that forks and spans share; what is appended, trimmed or given up on one side is nobody
// else's.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/nn/norms.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/paged_rows.h"
#include "tests/cache/token_columns.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using kernels::kPageRows;

std::shared_ptr<PagePool> make_pool() { return PagePool::make(); }

// `tokens` in steps of `width`, attended to.
void feed(PagedKVCache& cache, const std::vector<int>& tokens, int width = 50) {
  for (std::size_t at = 0; at < tokens.size(); at += static_cast<std::size_t>(width)) {
    const auto end = std::min(tokens.size(), at + static_cast<std::size_t>(width));
    means_of_step(cache, {std::vector<int>(tokens.begin() + static_cast<std::ptrdiff_t>(at),
                                           tokens.begin() + static_cast<std::ptrdiff_t>(end))});
  }
}

PagedKVCache filled(const std::shared_ptr<PagePool>& pool, int length, kernels::PagedVisibility visibility = {}) {
  PagedKVCache cache(pool, visibility);
  feed(cache, range(0, length));
  return cache;
}

struct Inputs {
  mx::array queries, keys, values;
};

Inputs random_inputs(int length, int heads = 4, int kv_heads = 2, int size = 32) {
  const auto draw = [&](int count, std::uint64_t seed) {
    return mx::random::normal({1, count, length, size}, mx::float32, 0.0f, 1.0f, mx::random::key(seed));
  };
  return {draw(heads, 1), draw(kv_heads, 2), draw(kv_heads, 3)};
}

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
  PagedKVCache cache = filled(pool, 3 * kPageRows + 10);
  const std::size_t page = cache.layout()->nbytes();
  EXPECT_EQ(pool->nbytes(), 4 * page);
  const auto copy = cache.fork();
  auto& fork = dynamic_cast<PagedKVCache&>(*copy);
  EXPECT_EQ(pool->nbytes(), 4 * page);
  EXPECT_EQ(page_addresses(fork), page_addresses(cache));

  const auto before = page_addresses(cache);
  feed(fork, {1000});
  EXPECT_EQ(page_addresses(fork), before) << "whoever goes on first does so in place";
  feed(cache, {2000, 2001});
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
  PagedKVCache cache = filled(pool, 2 * kPageRows);
  PagedKVCache fork = cache;
  feed(cache, {1000});
  feed(fork, {2000});
  EXPECT_EQ(pool->nbytes(), 4 * cache.layout()->nbytes());
  EXPECT_EQ(tokens_of_rows(cache).back(), 1000);
  EXPECT_EQ(tokens_of_rows(fork).back(), 2000);
}

TEST(PagedKVCache, WhatIsTrimmedStaysWithTheFork) {
  const auto pool = make_pool();
  PagedKVCache cache = filled(pool, 150);
  const PagedKVCache fork = cache;
  EXPECT_EQ(cache.trim(100), 100);
  EXPECT_EQ(page_addresses(cache).size(), 1u);
  feed(cache, range(900, 980));
  EXPECT_EQ(tokens_of_rows(fork), range(0, 150));
  std::vector<int> wanted = range(0, 50);
  for (const int token : range(900, 980)) wanted.push_back(token);
  EXPECT_EQ(tokens_of_rows(cache), wanted);
  EXPECT_EQ(cache.trim(1000), 130);
  EXPECT_FALSE(cache.empty()) << "a cache trimmed to 0 rows is not empty";
  EXPECT_TRUE(tokens_of_rows(cache).empty());
  feed(cache, {7});
  EXPECT_EQ(tokens_of_rows(cache), std::vector<int>{7});
}

TEST(PagedKVCache, PagesGoBackWhenNobodyHoldsThem) {
  const auto pool = make_pool();
  {
    PagedKVCache cache = filled(pool, 500);
    const PagedKVCache fork = cache;
    feed(cache, range(0, 100));
    const PageSpan span = fork.span(kPageRows, 300);
    EXPECT_GT(pool->nbytes(), 0u);
  }
  EXPECT_EQ(pool->nbytes(), 0u);
}

// Two steps ahead without evaluating, as decoding does it one step ahead.
TEST(PagedKVCache, AStepMayBeBuiltOnOneThatHasNotRun) {
  const auto pool = make_pool();
  const Inputs inputs = random_inputs(80);
  const auto step = [&](AttentionCache& cache, int begin, int end) {
    const auto cut = [&](const mx::array& x) {
      const mx::array rows =
          mx::transpose(mx::slice(x, {0, 0, begin, 0}, {1, x.shape(1), end, x.shape(3)}), {0, 2, 1, 3});
      return mx::reshape(rows, {1, end - begin, -1});
    };
    return cache.attend_projections({cut(inputs.queries), cut(inputs.keys), cut(inputs.values), 4, 2},
                                    {.mask = cache.make_mask(end - begin)});
  };
  PagedKVCache cache(pool);
  KVCache plain;
  std::vector<mx::array> got, want;
  for (const auto& [begin, end] : {std::pair(0, 62), {62, 63}, {63, 64}, {64, 65}, {65, 66}, {66, 80}}) {
    got.push_back(step(cache, begin, end));
    want.push_back(step(plain, begin, end));
  }
  // Neither side has run when it is forked; the fork copies the page that the other side went on in.
  PagedKVCache fork = cache;
  PromptCache before;
  before.push_back(cache.fork());
  got.push_back(step(cache, 10, 20));
  const mx::array other = step(fork, 20, 30);
  EXPECT_FALSE(got.front().is_available());
  before.eval();
  EXPECT_TRUE(got[0].is_available() && got[5].is_available()) << "what evaluates the rows has evaluated their steps";
  EXPECT_FALSE(got[6].is_available());
  const auto plain_fork = plain.fork();
  want.push_back(step(plain, 10, 20));
  const mx::array plain_other = step(dynamic_cast<AttentionCache&>(*plain_fork), 20, 30);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(mx::allclose(got[i], want[i], 1e-5, 1e-6).item<bool>()) << i;
  EXPECT_TRUE(mx::allclose(other, plain_other, 1e-5, 1e-6).item<bool>());
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
  PagedKVCache cache = filled(pool, 300);
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
    feed(again, {5000});
    EXPECT_EQ(page_addresses(again).back() == pages.back(), length == 300) << length;
    std::vector<int> wanted = range(0, length);
    wanted.push_back(5000);
    EXPECT_EQ(tokens_of_rows(again), wanted);
    EXPECT_EQ(tokens_of_rows(cache), range(0, 300));
  }
}

TEST(PagedKVCache, SpansThatDoNotFitAreRefused) {
  const auto pool = make_pool();
  PagedKVCache cache = filled(pool, 300);
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
    PagedKVCache cache = filled(pool, c.length, c.visibility);
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
  const PagedKVCache whole = filled(pool, 300, {.window = 50});
  PagedKVCache cache(pool, {.window = 50});
  EXPECT_THROW(cache.adopt({whole.span(256, 300)}, 300), Error);
  cache.adopt({whole.span(192, 300)}, 300);
  EXPECT_EQ(cache.first_row(), 192);
  EXPECT_EQ(cache.max_trim(), 300 - (192 + 49));
  EXPECT_EQ(tokens_of_rows(cache), range(192, 300));
}

TEST(PagedKVCache, MasksAsArraysAreOverTheRowsThatAreThere) {
  const auto pool = make_pool();
  PagedKVCache cache = filled(pool, 200, {.window = 50});
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1)));
  EXPECT_TRUE(std::holds_alternative<NoMask>(cache.make_mask(1, {.window = 50})));
  EXPECT_TRUE(std::holds_alternative<Causal>(cache.make_mask(5, {.window = 60})));
  EXPECT_TRUE(std::holds_alternative<mx::array>(cache.make_mask(1, {.window = 49})));
  EXPECT_THROW(cache.make_mask(0), Error);
  EXPECT_THROW(cache.make_mask(1, {.window = 0}), Error);
  for (const bool dropped : {false, true}) {
    if (dropped) cache.drop_unseen();
    const auto sees = visibility(cache.make_mask(3, {.window = {}, .return_array = true}), 3, cache.length() + 3);
    for (int i = 0; i < 3; ++i) {
      for (int c = 0; c < cache.length() + 3; ++c) {
        const int position = cache.first_row() + c, query = 200 + i;
        EXPECT_EQ(sees(0, i, c), position <= query && position > query - 50);
      }
    }
  }
  PagedKVCache chunks = filled(pool, 130, {.chunk = 100});
  EXPECT_TRUE(std::holds_alternative<Causal>(chunks.make_chunk_mask(5, 100)));
  EXPECT_TRUE(chunks.serves_chunks(100));
  EXPECT_TRUE(chunks.serves_chunks(40)) << "all rows are there";
  chunks.drop_unseen();
  EXPECT_TRUE(chunks.serves_chunks(100));
  EXPECT_FALSE(chunks.serves_chunks(40));
  const auto sees = visibility(chunks.make_mask(1, {.window = {}, .return_array = true}), 1, chunks.length() + 1);
  for (int c = 0; c <= chunks.length(); ++c) EXPECT_EQ(sees(0, 0, c), chunks.first_row() + c >= 100);
}

// By an array what is visible can only become less.
TEST(PagedKVCache, AMaskAsAnArrayHidesMore) {
  for (const kernels::PagedVisibility& sees : {kernels::PagedVisibility{}, {.window = 70}, {.chunk = 64}}) {
    for (const bool additive : {false, true}) {
      const auto pool = make_pool();
      const Inputs inputs = random_inputs(200);
      const auto cut = [&](const mx::array& x, int begin, int end) {
        return mx::slice(x, {0, 0, begin, 0}, {1, x.shape(1), end, x.shape(3)});
      };
      PagedKVCache cache(pool, sees);
      KVCache plain;
      for (AttentionCache* one : {static_cast<AttentionCache*>(&cache), static_cast<AttentionCache*>(&plain)}) {
        one->attend(cut(inputs.queries, 0, 190), cut(inputs.keys, 0, 190), cut(inputs.values, 0, 190),
                    {.mask = one->make_mask(190)});
      }
      cache.drop_unseen();
      // Something is left for every query.
      const mx::array itself = mx::eye(10, 200, 190, mx::bool_);
      const mx::array hidden =
          mx::logical_or(itself, mx::random::bernoulli(0.3f, mx::Shape{10, 200}, mx::random::key(5)));
      const auto as_mask = [&](const mx::array& seen) {
        return additive ? mx::where(seen, mx::array(0.0f), mx::array(-1e9f)) : seen;
      };
      const mx::array seen = std::get<mx::array>(cache.make_mask(10, {.window = {}, .return_array = true}));
      const int first = cache.first_row();
      const mx::array own = mx::logical_and(seen, mx::slice(hidden, {0, first}, {10, 200}));
      const mx::array padded = mx::pad(own, std::vector<int>{1}, {first}, {0}, mx::array(false));
      const auto attend = [&](AttentionCache& one, const mx::array& mask) {
        return one.attend(cut(inputs.queries, 190, 200), cut(inputs.keys, 190, 200), cut(inputs.values, 190, 200),
                          {.scale = 0.3f, .mask = as_mask(mask)});
      };
      EXPECT_TRUE(mx::allclose(attend(cache, own), attend(plain, padded), 1e-5, 1e-5).item<bool>());
    }
  }
}

TEST(PagedKVCache, RowsAreStoredInTheDtypeThatIsAskedForOrTheirOwn) {
  const Inputs inputs = random_inputs(4);
  for (const mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    PagedKVCache cache(make_pool());
    for (const mx::Dtype asked : {dtype, mx::float32}) {
      const AttentionOptions options{.mask = Causal{}, .stored_dtype = asked};
      EXPECT_EQ(cache.attend(inputs.queries, inputs.keys, inputs.values, options).dtype(), mx::float32);
    }
    EXPECT_EQ(cache.layout()->dtype, dtype);
    EXPECT_TRUE(identical(std::get<DenseKV>(cache.keys_and_values()).keys,
                          mx::concatenate({mx::astype(inputs.keys, dtype), mx::astype(inputs.keys, dtype)}, 2)));
    PagedKVCache as_they_come(make_pool());
    const auto cast = [&](const mx::array& x) { return mx::astype(x, dtype); };
    EXPECT_EQ(
        as_they_come.attend(cast(inputs.queries), cast(inputs.keys), cast(inputs.values), {.mask = Causal{}}).dtype(),
        dtype);
    EXPECT_EQ(as_they_come.layout()->dtype, dtype);
  }
}

TEST(PagedKVCache, StoreTakesRowsOfAnyDtype) {
  const Inputs inputs = random_inputs(3);
  PagedKVCache cache(make_pool());
  cache.store(inputs.keys, mx::multiply(inputs.values, mx::array(1e6f)), mx::float16);
  cache.store(mx::astype(inputs.keys, mx::bfloat16), inputs.values);
  EXPECT_EQ(cache.length(), 6);
  const auto stored = std::get<DenseKV>(cache.keys_and_values());
  EXPECT_EQ(stored.values.dtype(), mx::float16);
  EXPECT_TRUE(mx::all(mx::isfinite(stored.values)).item<bool>());
}

TEST(PagedKVCache, ACallThatThrowsHasStoredNothing) {
  const auto pool = make_pool();
  const Inputs inputs = random_inputs(4);
  PagedKVCache cache(pool);
  AttentionOptions causal, bad_mask, bad_sinks, bad_cap, bad_norm, bad_dtype;
  causal.mask = bad_mask.mask = bad_sinks.mask = bad_cap.mask = bad_norm.mask = bad_dtype.mask = Causal{};
  bad_mask.mask = mx::zeros({5, 7}, mx::bool_);
  bad_sinks.sinks = mx::zeros({5});
  bad_cap.softcap = 0.0f;
  const RmsNorm narrow(mx::ones({16}), 1e-6f);
  bad_norm.key_norm = &narrow;
  bad_dtype.stored_dtype = mx::int32;
  const auto attend = [&](const mx::array& queries, const mx::array& keys, const mx::array& values,
                          const AttentionOptions& options) { cache.attend(queries, keys, values, options); };
  const auto refuse_all = [&] {
    const int length = cache.length();
    for (const AttentionOptions& bad : {bad_mask, bad_sinks, bad_cap, bad_norm, AttentionOptions{}}) {
      EXPECT_THROW(attend(inputs.queries, inputs.keys, inputs.values, bad), Error);
    }
    EXPECT_THROW(attend(mx::zeros({1, 3, 4, 32}), inputs.keys, inputs.values, causal), Error);
    EXPECT_THROW(attend(mx::astype(inputs.queries, mx::int32), inputs.keys, inputs.values, causal), Error);
    EXPECT_THROW(attend(inputs.queries, mx::zeros({1, 2, 3, 32}), inputs.values, causal), Error);
    EXPECT_THROW(attend(inputs.queries, mx::zeros({1, 2, 4, 16}), inputs.values, causal), Error);
    EXPECT_THROW(attend(mx::zeros({2, 4, 4, 32}), mx::zeros({2, 2, 4, 32}), mx::zeros({2, 2, 4, 32}), causal), Error);
    EXPECT_THROW(cache.update_and_fetch(mx::zeros({2, 2, 4, 32}), mx::zeros({2, 2, 4, 32})), Error);
    EXPECT_THROW(cache.update_and_fetch(inputs.keys, mx::astype(inputs.values, mx::float16)), Error);
    EXPECT_THROW(cache.update_and_fetch(mx::astype(inputs.keys, mx::int32), mx::astype(inputs.values, mx::int32)),
                 Error);
    EXPECT_EQ(cache.length(), length);
  };
  refuse_all();
  EXPECT_THROW(attend(inputs.queries, inputs.keys, inputs.values, bad_dtype), Error);
  EXPECT_THROW(cache.update_and_fetch(mx::zeros({1, 2, 0, 32}), mx::zeros({1, 2, 0, 32})), Error);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(pool->nbytes(), 0u);

  attend(inputs.queries, inputs.keys, inputs.values, causal);
  refuse_all();
  EXPECT_THROW(cache.update_and_fetch(mx::zeros({1, 2, 1, 16}), mx::zeros({1, 2, 1, 32})), Error);
  EXPECT_THROW(cache.update_and_fetch(mx::zeros({1, 2, 1, 32}, mx::float16), mx::zeros({1, 2, 1, 32}, mx::float16)),
               Error);
  EXPECT_THROW(attend(mx::zeros({1, 4, 1, 64}), mx::zeros({1, 2, 1, 64}), mx::zeros({1, 2, 1, 64}), causal), Error);
  EXPECT_TRUE(identical(std::get<DenseKV>(cache.keys_and_values()).keys, inputs.keys));
  const KeysValues same = cache.update_and_fetch(mx::zeros({1, 2, 0, 32}), mx::zeros({1, 2, 0, 32}));
  EXPECT_TRUE(identical(std::get<DenseKV>(same).values, inputs.values));
}

TEST(PagedKVCache, IsMadeOnlyOfWhatFits) {
  EXPECT_THROW(PagedKVCache(nullptr), Error);
  EXPECT_THROW(PagedKVCache(make_pool(), {.window = -1}), Error);
  EXPECT_THROW(PagedKVCache(make_pool(), {.chunk = -1}), Error);
  EXPECT_THROW(PagedKVCache(make_pool(), {}, KVQuantization{64, 7}), Error);
  PagedKVCache quantised(make_pool(), {}, KVQuantization{64, 8});
  const Inputs inputs = random_inputs(2);  // heads of 32
  EXPECT_THROW(quantised.attend(inputs.queries, inputs.keys, inputs.values, {.mask = Causal{}}), Error);
  EXPECT_THROW(quantised.update_and_fetch(inputs.keys, inputs.values), Error);
  EXPECT_TRUE(quantised.empty());
}

TEST(PagedKVCache, FilesHoldThePlainClass) {
  const auto pool = make_pool();
  const PagedKVCache cache = filled(pool, 3);
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
  const PagedKVCache cache = filled(pool, 70);
  PromptCache list;
  list.push_back(cache.fork());
  check_prompt_cache(list, 70);
  EXPECT_THROW(check_prompt_cache(list, 69), Error);
  cache.span(0, 70).pages[1]->set_claimed(3);
  EXPECT_THROW(check_prompt_cache(list), Error);
}

}  // namespace
}  // namespace reprise
