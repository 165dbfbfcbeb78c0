// PagedBatch: rows of any lengths step together, and each gives bit for bit what it gives alone.
#include <gtest/gtest.h>

#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/paged_batch.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/nn/rope.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/paged_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using kernels::kPageRows;

constexpr int kHeads = 4, kKvHeads = 2, kSize = 32;

Projections random_projections(int rows, int length, std::uint64_t seed, mx::Dtype dtype = mx::float32) {
  const auto draw = [&](int features, std::uint64_t part) {
    return mx::astype(random_numbers({rows, length, features}, 3 * seed + part), dtype);
  };
  return {draw(kHeads * kSize, 0), draw(kKvHeads * kSize, 1), draw(kKvHeads * kSize, 2), kHeads, kKvHeads};
}

mx::array row(const mx::array& x, int b) { return mx::slice(x, {b, 0, 0}, {b + 1, x.shape(1), x.shape(2)}); }

Projections row_of(const Projections& all, int b) {
  return {row(all.queries, b), row(all.keys, b), row(all.values, b), all.heads, all.kv_heads};
}

struct Rows {
  std::vector<std::unique_ptr<PagedKVCache>> owned;
  std::vector<PagedKVCache*> all;
};

Rows forks_of(const std::vector<PagedKVCache*>& rows) {
  Rows forks;
  for (const PagedKVCache* one : rows) forks.owned.push_back(std::make_unique<PagedKVCache>(*one));
  for (const auto& one : forks.owned) forks.all.push_back(one.get());
  return forks;
}

Rows filled_rows(const std::shared_ptr<PagePool>& pool, const std::vector<int>& lengths, const Rope& rope,
                 kernels::PagedVisibility sees = {}, std::optional<KVQuantization> quantization = {}) {
  Rows rows;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    rows.owned.push_back(std::make_unique<PagedKVCache>(pool, sees, quantization));
    rows.all.push_back(rows.owned.back().get());
    if (lengths[b] == 0) continue;
    rows.all.back()->attend_projections(random_projections(1, lengths[b], 100 + b), {.rope = &rope, .mask = Causal{}});
  }
  return rows;
}

TEST(PagedBatch, EachRowGivesBitForBitWhatItGivesAlone) {
  RopeOptions rope_options{.dims = kSize};
  const Rope plain_rope(rope_options);
  rope_options.scaling = RopeScaling{.type = "dynamic", .factor = 2.0f};
  rope_options.max_position_embeddings = 4096;
  const Rope dynamic_rope(rope_options);  // no kernel knows it
  const std::vector<int> lengths = {0, 1, 63, 64, 65, 200, 700};
  for (const Rope* rope : {&plain_rope, &dynamic_rope}) {
    for (const kernels::PagedVisibility& sees : {kernels::PagedVisibility{}, {.window = 50}, {.chunk = 96}}) {
      for (const std::optional<KVQuantization>& bits : {std::optional<KVQuantization>(), {KVQuantization{32, 8}}}) {
        const auto pool = PagePool::make();
        Rows rows = filled_rows(pool, lengths, *rope, sees, bits);
        Rows alone = forks_of(rows.all);
        PagedBatch batch(rows.all);
        const auto B = static_cast<int>(lengths.size());
        int step = 0;
        for (const int width : {1, 1, 3, 70, 1}) {
          const Projections all = random_projections(B, width, static_cast<std::uint64_t>(step++));
          const AttentionOptions options{.rope = rope, .scale = 0.3f, .mask = batch.make_mask(width)};
          const mx::array together = batch.attend_projections(all, options);
          for (int b = 0; b < B; ++b) {
            const mx::array one = alone.all[static_cast<std::size_t>(b)]->attend_projections(row_of(all, b), options);
            // MLX's own rotation, by arrays of offsets, may round otherwise.
            if (rope == &plain_rope) {
              EXPECT_TRUE(identical(row(together, b), one)) << "row " << b << ", step " << step;
            } else {
              EXPECT_TRUE(mx::allclose(row(together, b), one, 1e-4, 1e-4).item<bool>()) << b;
            }
          }
        }
        for (std::size_t b = 0; b < lengths.size(); ++b) {
          EXPECT_EQ(*rows.all[b]->position(), lengths[b] + 76);
          EXPECT_EQ(rows.all[b]->layout(), rows.all[0]->layout());
          rows.all[b]->check();
        }
      }
    }
  }
}

TEST(PagedBatch, AttendTakesHeadsApartToo) {
  const Rope rope(RopeOptions{.dims = kSize});
  const auto pool = PagePool::make();
  Rows rows = filled_rows(pool, {10, 100}, rope);
  Rows same = forks_of(rows.all);
  const auto draw = [](int heads, std::uint64_t seed) { return random_numbers({2, heads, 1, kSize}, seed); };
  const mx::array queries = draw(kHeads, 1), keys = draw(kKvHeads, 2), values = draw(kKvHeads, 3);
  const mx::array got = PagedBatch(rows.all).attend(queries, keys, values, {.rope = &rope});
  EXPECT_EQ(got.shape(), (mx::Shape{2, kHeads, 1, kSize}));
  for (int b = 0; b < 2; ++b) {
    const auto cut = [&](const mx::array& x) { return mx::slice(x, {b, 0, 0, 0}, {b + 1, x.shape(1), 1, kSize}); };
    const mx::array one =
        same.all[static_cast<std::size_t>(b)]->attend(cut(queries), cut(keys), cut(values), {.rope = &rope});
    EXPECT_TRUE(identical(cut(got), one));
  }
}

// Forks that go on together: one in place, the others in copies of the page.
TEST(PagedBatch, RowsThatShareTheirLastPagePartWays) {
  const auto pool = PagePool::make();
  PagedKVCache one(pool);
  means_of_step(one, {range(0, 100)});
  PagedKVCache two = one, three = one;
  three.trim(10);
  PagedBatch batch({&two, &one, &three});
  means_of_step(batch, {{1000}, {2000}, {3000}});
  means_of_step(batch, {{1001}, {2001}, {3001}});
  const auto wanted = [](int length, int first) {
    std::vector<int> tokens = range(0, length);
    tokens.push_back(first);
    tokens.push_back(first + 1);
    return tokens;
  };
  EXPECT_EQ(tokens_of_rows(two), wanted(100, 1000));
  EXPECT_EQ(tokens_of_rows(one), wanted(100, 2000));
  EXPECT_EQ(tokens_of_rows(three), wanted(90, 3000));
  EXPECT_EQ(pool->nbytes(), 4 * one.layout()->nbytes());
}

TEST(PagedBatch, StepsMayBeBuiltOnOnesThatHaveNotRunAndRowsMayLeaveBetween) {
  const Rope rope(RopeOptions{.dims = kSize});
  const auto pool = PagePool::make();
  Rows rows = filled_rows(pool, {5, 64, 130}, rope);
  Rows alone = forks_of(rows.all);
  const AttentionOptions options{.rope = &rope};
  std::vector<mx::array> steps, got, want;
  const auto step = [&](const std::vector<std::size_t>& members, std::uint64_t seed) {
    const auto all = random_projections(static_cast<int>(members.size()), 1, seed);
    std::vector<PagedKVCache*> chosen;
    for (const std::size_t b : members) chosen.push_back(rows.all[b]);
    const mx::array out = steps.emplace_back(PagedBatch(chosen).attend_projections(all, options));
    for (std::size_t i = 0; i < members.size(); ++i) {
      got.push_back(row(out, static_cast<int>(i)));
      want.push_back(alone.all[members[i]]->attend_projections(row_of(all, static_cast<int>(i)), options));
    }
  };
  step({0, 1, 2}, 1);
  step({2, 0}, 2);
  step({1}, 3);
  step({1, 2, 0}, 4);
  PromptCache list;
  list.push_back(std::make_unique<PagedBatch>(rows.all));
  list.eval();
  for (const mx::array& out : steps) EXPECT_TRUE(out.is_available());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(identical(got[i], want[i])) << i;
}

TEST(PagedBatch, AnswersForItsRows) {
  const Rope rope(RopeOptions{.dims = kSize});
  const auto pool = PagePool::make();
  Rows rows = filled_rows(pool, {5, 0, 130}, rope, {.window = 20});
  PagedBatch batch(rows.all);
  EXPECT_EQ(batch.positions(), (std::vector<int>{5, 0, 130}));
  EXPECT_FALSE(batch.position());
  EXPECT_TRUE(identical(std::get<mx::array>(batch.offset()), mx::array({5, 0, 130})));
  EXPECT_EQ(batch.length(), 130);
  EXPECT_EQ(batch.nbytes(), rows.all[0]->nbytes() + rows.all[2]->nbytes());
  EXPECT_EQ(batch.max_trim(), 0);
  EXPECT_TRUE(batch.keeps_all_rows());
  rows.all[2]->drop_unseen();
  EXPECT_FALSE(batch.keeps_all_rows());
  EXPECT_TRUE(std::holds_alternative<NoMask>(batch.make_mask(1, {.window = 20})));
  EXPECT_TRUE(std::holds_alternative<Causal>(batch.make_mask(2)));
  for (const auto& refused : {MaskOptions{.window = 10}, MaskOptions{.window = {}, .return_array = true}}) {
    EXPECT_THROW(batch.make_mask(1, refused), Error);
  }
  EXPECT_THROW(batch.make_chunk_mask(1, 64), Error);
  EXPECT_THROW(batch.update_and_fetch(mx::zeros({3, 2, 1, 32}), mx::zeros({3, 2, 1, 32})), Error);
  EXPECT_THROW(batch.keys_and_values(), Error);
  EXPECT_THROW(batch.state(), Error);
  PromptCache list;
  list.push_back(std::make_unique<PagedBatch>(rows.all));
  list.push_back(std::make_unique<PagedBatch>(rows.all));
  check_prompt_cache(list);
  rows.all[0]->trim(1);
  check_prompt_cache(list);
  list.push_back(std::make_unique<PagedBatch>(std::vector<PagedKVCache*>{rows.all[0]}));
  EXPECT_THROW(check_prompt_cache(list), Error);
}

TEST(PagedBatch, TrimsAllRowsByTheSame) {
  const auto pool = PagePool::make();
  PagedKVCache one(pool), two(pool);
  means_of_step(one, {range(0, 100)});
  means_of_step(two, {range(0, 7)});
  PagedBatch batch({&one, &two});
  EXPECT_EQ(batch.trim(3), 3);
  EXPECT_EQ(batch.positions(), (std::vector<int>{97, 4}));
  EXPECT_EQ(batch.trim(50), 4);
  EXPECT_EQ(batch.positions(), (std::vector<int>{93, 0}));
  EXPECT_THROW(batch.trim(-1), Error);
}

TEST(PagedBatch, AForkIsOfForksOfItsRows) {
  const auto pool = PagePool::make();
  PagedKVCache one(pool), two(pool);
  means_of_step(one, {range(0, 100)});
  means_of_step(two, {range(0, 7)});
  PagedBatch batch({&one, &two});
  const auto fork = batch.fork();
  EXPECT_EQ(pool->nbytes(), 3 * one.layout()->nbytes());
  means_of_step(dynamic_cast<AttentionCache&>(*fork), {{1}, {2}});
  EXPECT_EQ(batch.positions(), (std::vector<int>{100, 7}));
  EXPECT_EQ(fork->positions(), (std::vector<int>{101, 8}));
  means_of_step(batch, {{3}, {4}});
  EXPECT_EQ(tokens_of_rows(one).back(), 3);
  EXPECT_EQ(tokens_of_rows(two).back(), 4);
}

TEST(PagedBatch, RowsThatDoNotFitEachOtherAreRefused) {
  const auto pool = PagePool::make();
  PagedKVCache full(pool), window(pool, {.window = 5}), quantised(pool, {}, KVQuantization{32, 8}), other(pool);
  EXPECT_THROW(PagedBatch({}), Error);
  EXPECT_THROW(PagedBatch({&full, nullptr}), Error);
  EXPECT_THROW(PagedBatch({&full, &full}), Error);
  EXPECT_THROW(PagedBatch({&full, &window}), Error);
  EXPECT_THROW(PagedBatch({&full, &quantised}), Error);

  const auto step = [](AttentionCache& cache, int rows, mx::Dtype dtype) {
    cache.attend_projections(random_projections(rows, 1, 1, dtype), {});
  };
  step(full, 1, mx::float32);
  step(other, 1, mx::float16);
  PagedKVCache empty(pool);
  PagedBatch batch({&empty, &full, &other});
  EXPECT_THROW(step(batch, 3, mx::float32), Error) << "stored in other dtypes";
  PagedBatch fitting({&empty, &other});
  EXPECT_THROW(step(fitting, 3, mx::float32), Error) << "another number of rows";
  EXPECT_THROW(fitting.attend_projections(random_projections(2, 1, 1), {.mask = mx::zeros({1, 2}, mx::bool_)}), Error);
  EXPECT_THROW(fitting.attend_projections(random_projections(2, 2, 1), {}), Error) << "no mask for several tokens";
  EXPECT_TRUE(empty.empty());
  EXPECT_EQ(fitting.positions(), (std::vector<int>{0, 1}));
  step(fitting, 2, mx::float32);
  EXPECT_EQ(empty.layout()->dtype, mx::float16) << "as the rows that were there";
  EXPECT_EQ(fitting.positions(), (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace reprise
