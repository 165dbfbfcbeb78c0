// TokenBuffer, PromptTrie and LRUPromptCache answer as mlx-lm's do where those are right: tests/data/stored_prompts.
#include <gtest/gtest.h>

#include <fstream>

#include "mlx/ops.h"
#include "nlohmann/json.hpp"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/lru_prompt_cache.h"
#include "reprise/cache/token_buffer.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using Json = nlohmann::json;

const Json& traces() {
  static const Json data = Json::parse(std::ifstream(REPRISE_SOURCE_DIR "/tests/data/stored_prompts/traces.json"));
  return data;
}

Json or_null(const std::optional<Tokens>& tokens) { return tokens ? Json(*tokens) : Json(); }

TEST(StoredPromptsGolden, T1TokenBuffersHaveMlxLmsSizesAndCapacities) {
  ASSERT_FALSE(traces()["token_buffers"].empty());
  for (const Json& wanted : traces()["token_buffers"]) {
    TokenBuffer buffer;
    Json got = Json::array();
    for (const int count : wanted["steps"]) {
      got.push_back(buffer.update_and_fetch(mx::arange(count)).size());
      got.push_back(buffer.state().size());
    }
    EXPECT_EQ(got, wanted["sizes_and_capacities"]);
  }
}

TEST(StoredPromptsGolden, T2TriesAnswerAsMlxLms) {
  int steps = 0;
  for (const Json& history : traces()["tries"]) {
    PromptTrie<int> trie;
    for (const Json& step : history) {
      SCOPED_TRACE(step.dump());
      const Tokens tokens = step["tokens"];
      const std::string op = step["op"];
      ++steps;
      if (op == "add") {
        const auto replaced = trie.add("m", tokens, step["value"]);
        EXPECT_EQ(replaced ? Json(*replaced) : Json(), step["replaced"]);
      } else if (op == "pop") {
        EXPECT_EQ(Json(trie.pop("m", tokens).value()), step["value"]);
      } else if (op == "pop_prefixes") {
        EXPECT_EQ(Json(trie.pop_prefixes("m", tokens)), step["popped"]);
      } else {
        const PromptTrieResult found = trie.search("m", tokens);
        EXPECT_EQ(or_null(found.exact), step["exact"]);
        EXPECT_EQ(or_null(found.shorter), step["shorter"]);
        EXPECT_EQ(found.longer ? Json(found.longer->size()) : Json(), step["longer_length"]);
        EXPECT_EQ(Json(found.common_prefix), step["common_prefix"]);
      }
    }
  }
  EXPECT_GT(steps, 300);
}

PromptCache filled(const Tokens& tokens, int size) {
  PromptCache cache = make_kv_prompt_cache(1);
  const mx::array rows = mx::zeros({1, 1, static_cast<int>(tokens.size()), size});
  cache.at<KVCache>(0).update_and_fetch(rows, rows);
  return cache;
}

TEST(StoredPromptsGolden, T3StoresHoldEvictAndFindAsMlxLms) {
  const std::map<std::string, CacheType> types = {
      {"assistant", CacheType::assistant}, {"user", CacheType::user}, {"system", CacheType::system}};
  int hits = 0;
  for (const Json& history : traces()["stores"]) {
    LRUPromptCache store(history["max_size"], history["max_bytes"]);
    for (const Json& step : history["inserts"]) {
      SCOPED_TRACE(step.dump());
      const Tokens tokens = step["tokens"];
      store.insert_cache(step["model"], tokens, filled(tokens, step["size"]), types.at(step["type"]));
      EXPECT_EQ(Json(store.size()), step["sequences"]);
      EXPECT_EQ(Json(store.nbytes()), step["bytes"]);
      for (const auto& [name, type] : types) {
        const CacheTypeStats stats = store.stats_by_type().at(type);
        EXPECT_EQ(Json({{"n_sequences", stats.sequences}, {"n_bytes", stats.bytes}}), step["stats"][name]);
      }
    }
    for (const Json& step : history["fetches"]) {
      SCOPED_TRACE(step.dump());
      const Tokens tokens = step["tokens"];
      const FetchedPromptCache fetched = store.fetch_nearest_cache(step["model"], tokens);
      EXPECT_EQ(fetched.cache ? Json(tokens.size() - fetched.remaining.size()) : Json(), step["reused"]);
      if (fetched.cache) ++hits;
    }
  }
  EXPECT_GT(hits, 50);
}

}  // namespace
}  // namespace reprise
