#include "reprise/prefix/tiers/prompt_blocks.h"

#include <gtest/gtest.h>

#include <functional>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "tests/prefix/filled_cache.h"

namespace reprise::test {
namespace {

namespace mx = mlx::core;

constexpr int kBlock = 64;

PromptCache filled(const PromptCache& form, const Tokens& tokens, int length) {
  PromptCache cache = form.fork();
  fill(cache, std::span(tokens).first(static_cast<std::size_t>(length)));
  return cache;
}

// Of [0, length), each block passed through `change`.
std::vector<PrefixTree::Block> blocks_of(
    const PromptCache& cache, int all, int length,
    const std::function<StoredRef(StoredRef)>& change = [](StoredRef block) { return block; }) {
  std::vector<PrefixTree::Block> blocks;
  for (int begin = 0; begin < length; begin += kBlock) {
    blocks.push_back(
        {begin, std::min(begin + kBlock, length), change(cut_block(cache, begin, std::min(begin + kBlock, all)))});
  }
  return blocks;
}

struct Kind {
  std::string name;
  FormOptions options;
};

class Blocks : public testing::TestWithParam<Kind> {
 protected:
  std::shared_ptr<PagePool> pool = PagePool::make();
  PromptCache form = make_form(pool, GetParam().options);
  Tokens tokens = counted_tokens(200, 5);
  PromptCache cache = filled(form, tokens, 200);
};

TEST_P(Blocks, GiveBackAnyNumberOfTheirRows) {
  for (const int length : {1, 63, 64, 65, 150, 192, 200}) {
    const PromptCache want = filled(form, tokens, length);
    const auto checkpoint = take_checkpoint(want, length);
    const PromptCache got = rebuild_prompt_cache(form, blocks_of(cache, 200, length), length, checkpoint);
    EXPECT_EQ(difference(got, want), "") << length;
  }
}

TEST_P(Blocks, AreWrittenOnByTwoWithoutDisturbingEachOther) {
  const auto checkpoint = take_checkpoint(filled(form, tokens, 100), 100);
  const auto blocks = blocks_of(cache, 200, 100);
  PromptCache one = rebuild_prompt_cache(form, blocks, 100, checkpoint);
  PromptCache two = rebuild_prompt_cache(form, blocks, 100, checkpoint);
  Tokens other = tokens;
  for (std::size_t i = 100; i < other.size(); ++i) other[i] += 1000;
  fill(one, other);
  fill(two, tokens);
  EXPECT_EQ(difference(one, filled(form, other, 200)), "");
  EXPECT_EQ(difference(two, cache), "");
  EXPECT_EQ(difference(rebuild_prompt_cache(form, blocks_of(cache, 200, 200), 200, take_checkpoint(cache, 200)), cache),
            "");
}

TEST_P(Blocks, PassThroughTensors) {
  const auto through_tensors = [&](StoredRef block) -> StoredRef {
    const TensorFile file = to_tensors(*block);
    EXPECT_EQ(pages_nbytes(file), block->nbytes());
    const auto again = block_from_tensors(file, pool);
    EXPECT_EQ(again->nbytes(), block->nbytes());
    return again;
  };
  const PromptCache want = filled(form, tokens, 150);
  StoredRef checkpoint = take_checkpoint(want, 150);
  if (checkpoint) checkpoint = checkpoint_from_tensors(to_tensors(*checkpoint));
  EXPECT_EQ(checkpoint != nullptr, GetParam().options.recurrent);
  PromptCache got = rebuild_prompt_cache(form, blocks_of(cache, 200, 150, through_tensors), 150, checkpoint);
  EXPECT_EQ(difference(got, want), "");
  fill(got, tokens);
  EXPECT_EQ(difference(got, cache), "");
}

TEST_P(Blocks, AreTheSameTensorsForTheSameRows) {
  const auto first = to_tensors(*cut_block(cache, 64, 128));
  const auto second = to_tensors(*cut_block(filled(form, tokens, 130), 64, 128));
  EXPECT_EQ(first.metadata, second.metadata);
  for (const auto& [name, tensor] : first.tensors) {
    EXPECT_TRUE(mx::array_equal(tensor, second.tensors.at(name)).item<bool>()) << name;
  }
}

TEST_P(Blocks, CountTheirPages) {
  std::size_t page = 0;
  for (const PagedKVCache* layer : paged_leaves(cache)) page += layer->layout()->nbytes();
  EXPECT_EQ(cut_block(cache, 0, 64)->nbytes(), page);
  EXPECT_EQ(cut_block(cache, 64, 200)->nbytes(), 3 * page);
  EXPECT_EQ(cut_block(*cut_block(cache, 64, 200), 128)->nbytes(), page);
  const std::size_t before = pool->nbytes();
  const auto block = cut_block(cache, 0, 200);
  EXPECT_EQ(pool->nbytes(), before);
}

TEST_P(Blocks, OfAnotherLengthOrFormAreRefused) {
  const auto checkpoint = take_checkpoint(filled(form, tokens, 100), 100);
  const auto blocks = blocks_of(cache, 200, 100);
  const auto refused = [&](std::vector<PrefixTree::Block> given, int length, const StoredRef& state) {
    try {
      rebuild_prompt_cache(form, given, length, state);
    } catch (const Error& error) {
      return error.code() == ErrorCode::corrupt_data;
    }
    return false;
  };
  EXPECT_FALSE(refused(blocks, 100, checkpoint));
  EXPECT_TRUE(refused(blocks, 101, checkpoint)) << "too short";
  EXPECT_TRUE(refused({blocks[0]}, 100, checkpoint)) << "a block is missing";
  EXPECT_TRUE(refused({blocks[1]}, 100, checkpoint)) << "the first is missing";
  EXPECT_TRUE(refused({blocks[0], blocks[0]}, 100, checkpoint)) << "twice";
  EXPECT_TRUE(refused({blocks[0], {64, 100, nullptr}}, 100, checkpoint)) << "nothing in it";
  auto fewer = std::make_shared<PromptBlock>(dynamic_cast<const PromptBlock&>(*blocks[1].content));
  fewer->layers.pop_back();
  EXPECT_TRUE(refused({blocks[0], {64, 100, fewer}}, 100, checkpoint)) << "a layer is missing";
  if (!GetParam().options.recurrent) return;
  EXPECT_TRUE(refused(blocks, 100, nullptr)) << "no checkpoint";
  EXPECT_TRUE(refused(blocks, 100, take_checkpoint(filled(form, tokens, 99), 99))) << "of another position";
  auto other = std::make_shared<PromptCheckpoint>(dynamic_cast<const PromptCheckpoint&>(*checkpoint));
  other->layers = {std::make_shared<ArraysCache>(2)};
  EXPECT_TRUE(refused(blocks, 100, other)) << "of other slots";
}

TEST_P(Blocks, DamagedTensorsAreRefused) {
  const TensorFile sound = to_tensors(*cut_block(cache, 64, 128));
  const auto refused = [&](const TensorFile& file) {
    try {
      block_from_tensors(file, pool);
    } catch (const Error& error) {
      return error.code() == ErrorCode::corrupt_data;
    }
    return false;
  };
  EXPECT_FALSE(refused(sound));
  for (const auto& [name, value] : sound.metadata) {
    TensorFile file = sound;
    file.metadata.erase(name);
    EXPECT_TRUE(refused(file)) << "without " << name;
    file.metadata[name] = "-1";
    EXPECT_TRUE(refused(file)) << name;
  }
  for (const auto& [name, value] : sound.tensors) {
    TensorFile file = sound;
    file.tensors.erase(name);
    EXPECT_TRUE(refused(file)) << "without " << name;
    file.tensors.emplace(name, mx::zeros({1, 64, 32}));
    EXPECT_TRUE(refused(file)) << "another shape of " << name;
    file.tensors.insert_or_assign(name, mx::zeros(value.shape(), mx::int8));
    EXPECT_TRUE(refused(file)) << "another dtype of " << name;
  }
  TensorFile more = sound;
  more.tensors.emplace("stray", mx::zeros({1}));
  EXPECT_TRUE(refused(more));
  EXPECT_TRUE(refused({}));
}

INSTANTIATE_TEST_SUITE_P(Kinds, Blocks,
                         testing::Values(Kind{"dense", {.recurrent = false}}, Kind{"recurrent", {.recurrent = true}},
                                         Kind{"quantised", {.recurrent = true, .quantization = KVQuantization{32, 4}}}),
                         [](const auto& param) { return param.param.name; });

TEST(Checkpoint, IsNotChangedByTheSequenceThatGoesOn) {
  const auto pool = PagePool::make();
  const Tokens tokens = counted_tokens(20);
  PromptCache cache = filled(make_form(pool), tokens, 10);
  const auto checkpoint = take_checkpoint(cache, 10);
  const PromptCache before = cache.fork();
  fill(cache, tokens);
  const auto& kept = dynamic_cast<const ArraysCache&>(*checkpoint->layers.at(0));
  EXPECT_TRUE(mx::array_equal(*kept.get(0), *recurrent_leaves(before)[0]->get(0)).item<bool>());
  EXPECT_FALSE(kept.get(2)) << "unset stays unset";
}

}  // namespace
}  // namespace reprise::test
