// The replay must fail where a cache differs from what a trace says: each test plants one difference.
#include "tests/conformance/replay.h"

#include <gtest/gtest.h>

#include "mlx/ops.h"
#include "tests/conformance/compare_arrays.h"
#include "tests/conformance/selection.h"

namespace reprise::conformance {
namespace {

namespace mx = mlx::core;

Family family() {
  Family result;
  result.name = "kv";
  result.arrays.emplace("a", mx::reshape(mx::arange(0.0, 16.0), {1, 1, 4, 4}));
  result.arrays.emplace("b", mx::reshape(mx::arange(1.0, 17.0), {1, 1, 4, 4}));
  return result;
}

Json update_case() {
  return Json::parse(R"({"name": "one", "cache": {"type": "KVCache", "args": {}}, "steps": [
    {"op": "update", "keys": "a", "values": "b", "keep": "k", "expect": {"keys": "a", "values": "b",
     "after": {"type": "KVCache", "offset": 4, "size": 4, "empty": false, "is_trimmable": true, "nbytes": 8192}}},
    {"op": "trim", "n": 1, "expect": {"result": 1}},
    {"op": "make_mask", "N": 2, "expect": {"mask": {"kind": "causal"}}},
    {"op": "save_load", "list": ["c"], "metadata": {"a.b": "c"}, "expect": {"metadata": {"a.b": "c"}, "result": 1}},
    {"op": "recheck", "name": "k", "expect": {"keys": "a", "in_values": "b"}},
    {"op": "trim", "n": -1, "expect": {"error": true, "after": {"offset": 3}}}]})");
}

std::string failure_text(const Json& test_case) {
  const auto failure = replay(test_case, family());
  return failure ? failure->what : "";
}

TEST(Replay, ARightCasePasses) { EXPECT_EQ(failure_text(update_case()), ""); }

TEST(Replay, AWrongNumberInAnArrayIsFoundWithItsPlace) {
  Json test_case = update_case();
  test_case["steps"][0]["expect"]["keys"] = "b";
  EXPECT_EQ(failure_text(test_case), "update: keys: at [0,0,0,0] got 0, want 1");
}

TEST(Replay, AWrongScalarIsFound) {
  Json test_case = update_case();
  test_case["steps"][0]["expect"]["after"]["nbytes"] = 8191;
  EXPECT_EQ(failure_text(test_case), "update: after.nbytes: got 8192, want 8191");
}

TEST(Replay, TheFailingStepIsNamed) {
  Json test_case = update_case();
  test_case["steps"][2]["expect"]["mask"]["kind"] = "null";
  const auto failure = replay(test_case, family());
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->step, 2u);
}

TEST(Replay, ARefusalThatDoesNotHappenIsFound) {
  Json test_case = update_case();
  test_case["steps"][5]["n"] = 0;
  EXPECT_EQ(failure_text(test_case), "trim: got success, want an error");
}

TEST(Replay, AnUnexpectedRefusalIsFound) {
  Json test_case = update_case();
  test_case["steps"][5].erase("expect");
  EXPECT_NE(failure_text(test_case).find("unexpected error"), std::string::npos);
}

TEST(Replay, AnUnknownExpectationIsNotPassedOver) {
  Json test_case = update_case();
  test_case["steps"][1]["expect"]["speed"] = 1;
  EXPECT_NE(failure_text(test_case).find("unknown expectation"), std::string::npos);
}

TEST(Replay, AnUnknownOperationFailsAlsoWhereAnErrorIsExpected) {
  Json test_case = update_case();
  test_case["steps"][5]["op"] = "leap";
  EXPECT_NE(failure_text(test_case).find("unknown operation leap"), std::string::npos);
}

TEST(Replay, ACaseWithoutStepsProvesNothing) {
  Json test_case = update_case();
  test_case.erase("steps");
  EXPECT_EQ(failure_text(test_case), "a case without steps");
}

TEST(Replay, AMissingAnswerIsADifference) {
  Json test_case = update_case();
  test_case["steps"][1]["expect"]["mask"] = {{"kind", "null"}};
  EXPECT_NE(failure_text(test_case), "");
}

TEST(Replay, AStateIsComparedWithItsCapacity) {
  Json test_case = update_case();
  test_case["steps"] = {test_case["steps"][0], Json::parse(R"({"op": "state", "expect": {"state_v2": [
                          {"array": "a", "capacity": 256}, {"array": "b", "capacity": 256}, 4],
                          "state_v1": {"state": [{"array": "a"}, {"array": "b"}], "meta_state": ""}}})")};
  EXPECT_EQ(failure_text(test_case), "");
  test_case["steps"][1]["expect"]["state_v2"][0]["capacity"] = 255;
  EXPECT_NE(failure_text(test_case).find("capacity"), std::string::npos);
  test_case["steps"][1]["expect"].erase("state_v2");
  test_case["steps"][1]["expect"]["state_v1"]["meta_state"] = "4";
  EXPECT_NE(failure_text(test_case).find("meta_state"), std::string::npos);
}

TEST(CompareArrays, RulesAreKept) {
  const mx::array a = mx::reshape(mx::arange(0.0, 16.0), {1, 1, 4, 4});
  const mx::array shifted = mx::roll(a, 1, 2);
  EXPECT_EQ(compare_arrays(a, a), "");
  EXPECT_NE(compare_arrays(a, mx::astype(a, mx::float16)), "");
  EXPECT_NE(compare_arrays(a, mx::reshape(a, {1, 2, 2, 4})), "");
  EXPECT_NE(compare_arrays(a, shifted), "");
  ArrayRules set;
  set.token_set = true;
  EXPECT_EQ(compare_arrays(a, shifted, set), "");
  EXPECT_NE(compare_arrays(a, a + 1.0f, set), "");
  ArrayRules valid;
  valid.valid = mx::array({true, true, false, true}, {1, 4});
  const mx::array padded = mx::where(mx::reshape(*valid.valid, {1, 1, 4, 1}), a, mx::array(99.0f));
  EXPECT_EQ(compare_arrays(padded, a, valid), "");
  EXPECT_NE(compare_arrays(padded, a), "");
  ArrayRules loose;
  loose.tolerance = 0.1;
  EXPECT_EQ(compare_arrays(a + 0.05f, a, loose), "");
  EXPECT_NE(compare_arrays(a + 0.5f, a, loose), "");
}

TEST(Selection, EveryClassOfACaseIsNeeded) {
  using Names = std::set<std::string>;
  EXPECT_EQ(needs(update_case()), Names{"KVCache"});
  EXPECT_EQ(needs(Json::parse(R"({"cache": {"type": "KVCache"}, "others": {"d": {"type": "RotatingKVCache"}},
      "steps": [{"op": "merge", "class": "KVCache", "from": ["c"], "into": "m"}]})")),
            (Names{"BatchKVCache", "KVCache", "RotatingKVCache"}));
  EXPECT_EQ(needs(Json::parse(R"({"cache": {"type": "CacheList", "args": {"caches": [{"type": "ArraysCache"}]}},
      "steps": []})")),
            (Names{"ArraysCache", "CacheList"}));
  EXPECT_EQ(needs(Json::parse(R"({"file": "x", "expect": {"classes": ["ChunkedKVCache"]}, "steps": []})")),
            Names{"ChunkedKVCache"});
  EXPECT_EQ(needs(Json::parse(R"({"fn": "rope", "args": {"scaling_config": {"rope_type": "yarn"}}})")), Names{"yarn"});
  EXPECT_EQ(needs(Json::parse(R"({"fn": "rope", "args": {}})")), Names{"default"});
  EXPECT_EQ(needs(Json::parse(R"({"fn": "create_causal_mask", "args": {}})")), Names{});
}

}  // namespace
}  // namespace reprise::conformance
