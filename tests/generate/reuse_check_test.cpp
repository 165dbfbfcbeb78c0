// Warm answers are compared with cold ones, and a fault in reuse is found.
#include "reprise/generate/reuse_check.h"

#include <gtest/gtest.h>

#include "reprise/base/error.h"
#include "reprise/generate/chat_session.h"
#include "tests/generate/fake_model.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

// A KVCache that trims one row beside the mark: it drops its first row and keeps one of those that should go.
class OffByOneCache final : public AttentionCache {
 public:
  std::string class_name() const override { return inner_->class_name(); }
  std::optional<int> position() const override { return inner_->position(); }
  int length() const override { return inner_->length(); }
  int size() const override { return inner_->size(); }
  bool empty() const override { return inner_->empty(); }
  std::size_t nbytes() const override { return inner_->nbytes(); }
  bool is_trimmable() const override { return true; }
  int max_trim() const override { return inner_->max_trim(); }
  bool keeps_all_rows() const override { return true; }
  int trim(int n) override {
    const auto rows = std::get<DenseKV>(inner_->keys_and_values()).keys;
    const int left = rows.shape(2) - n;
    auto fresh = std::make_shared<KVCache>();
    const auto shifted = mx::slice(rows, {0, 0, 1, 0}, {1, 1, left + 1, rows.shape(3)});
    if (n > 0) fresh->update_and_fetch(shifted, shifted);
    if (n > 0) inner_ = fresh;
    return n;
  }
  State state() const override { return inner_->state(); }
  State saved_state() const override { return inner_->saved_state(); }
  State legacy_state() const override { return inner_->legacy_state(); }
  Meta legacy_meta() const override { return inner_->legacy_meta(); }
  std::unique_ptr<LayerCache> fork() const override {
    auto copy = std::make_unique<OffByOneCache>();
    copy->inner_ = std::make_shared<KVCache>(*inner_);
    return copy;
  }
  Offset offset() const override { return inner_->offset(); }
  KeysValues update_and_fetch(const mx::array& keys, const mx::array& values) override {
    return inner_->update_and_fetch(keys, values);
  }
  KeysValues keys_and_values() const override { return inner_->keys_and_values(); }
  Mask make_mask(int N, const MaskOptions& options) const override { return inner_->make_mask(N, options); }

 protected:
  void restore(LayerCache&& earlier) override { *this = std::move(dynamic_cast<OffByOneCache&>(earlier)); }

 private:
  std::shared_ptr<KVCache> inner_ = std::make_shared<KVCache>();
};

struct ReuseCheckTest : testing::Test {
  test::Fake fake = test::make_fake();

  void SetUp() override {
    fake.model->head_size = 64;
    fake.model->row_weight = 12.0f;  // the rows decide, not the last token
  }
  ChatOptions options(double rate, const KVCacheOptions& kv = {}) const {
    return {.generate = {.max_tokens = 6, .kv_cache = kv, .verify_reuse = rate}};
  }
};

TEST_F(ReuseCheckTest, X8FindsNothingWhereReuseIsRightOverEveryKindOfCache) {
  for (const KVCacheOptions& kv :
       {KVCacheOptions{}, KVCacheOptions{.max_kv_size = 16}, KVCacheOptions{.kv_bits = 8, .quantized_kv_start = 0},
        KVCacheOptions{.max_kv_size = 16, .kv_bits = 4, .quantized_kv_start = 25},
        KVCacheOptions{.kv_bits = 4, .quantized_kv_start = 30}}) {
    ChatSession session(fake.loaded, options(1.0, kv));
    EXPECT_EQ(session.say("hello").stats.reuse_checks, 0) << "nothing was reused";
    const auto check = [&](const char* text) {
      const auto stats = session.say(text).stats;
      EXPECT_EQ(stats.reuse_checks, 1);
      EXPECT_EQ(stats.reuse_mismatches, 0) << text << " " << stats.reuse_error;
    };
    check("how are you");
    check("a long message that goes past the window of the ring");
    session.undo();
    check("another");
    session.undo();
    check("and again another");
    check("bye");
  }
}

TEST_F(ReuseCheckTest, X8APlantedOffByOneIsCountedAndTheAnswerComesFromTheColdRun) {
  fake.model->make_layer = [](int) { return std::make_unique<OffByOneCache>(); };
  const auto after_undo = [&](double rate) {
    ChatSession session(fake.loaded, options(rate));
    session.say("hello");
    session.say("first");
    session.undo();
    auto turn = session.say("second");
    const auto next = session.say("third");
    EXPECT_EQ(next.stats.reuse_mismatches, 0) << "the cold cache stays";
    return turn;
  };
  ChatSession straight(fake.loaded, options(0));
  straight.say("hello");
  const auto want = straight.say("second");
  EXPECT_NE(after_undo(0).tokens, want.tokens) << "the fault must show, or this test shows nothing";
  const auto checked = after_undo(1);
  EXPECT_EQ(checked.stats.reuse_checks, 1);
  EXPECT_EQ(checked.stats.reuse_mismatches, 1);
  EXPECT_GT(checked.stats.reuse_error, 1e-3);
  EXPECT_EQ(checked.tokens, want.tokens);
}

TEST_F(ReuseCheckTest, X8ARecordThatTheRowsDoNotHoldIsFoundByGenerate) {
  RecordedCache cache{fake.loaded.model->make_cache(), {}};
  generate(fake.loaded, Tokens{1, 2, 4}, cache, {.max_tokens = 0});
  cache.tokens = {1, 2, 3};
  const auto result = generate(fake.loaded, Tokens{5, 6}, cache, {.max_tokens = 2, .verify_reuse = 1.0});
  EXPECT_EQ(result.stats.reuse_mismatches, 1);
  EXPECT_EQ(test::stored_ids(cache), cache.tokens);
  RecordedCache cold{fake.loaded.model->make_cache(), {}};
  EXPECT_EQ(generate(fake.loaded, Tokens{1, 2, 3, 5, 6}, cold, {.max_tokens = 2}).tokens, result.tokens);
}

TEST_F(ReuseCheckTest, X8TheRateChoosesAPartAndTheSameOneEachTime) {
  int chosen = 0;
  for (int i = 0; i < 400; ++i) {
    RecordedCache cache{{}, {i, i % 7, 3}};
    chosen += internal::is_chosen_for_check(cache, 0.25);
    EXPECT_EQ(internal::is_chosen_for_check(cache, 0.25), internal::is_chosen_for_check(cache, 0.25));
    EXPECT_TRUE(internal::is_chosen_for_check(cache, 1.0));
    EXPECT_FALSE(internal::is_chosen_for_check(cache, 0.0));
  }
  EXPECT_GT(chosen, 50);
  EXPECT_LT(chosen, 150);
  RecordedCache cache{fake.loaded.model->make_cache(), {}};
  for (double rate : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW(generate(fake.loaded, Tokens{1}, cache, {.verify_reuse = rate}), Error);
  }
}

TEST_F(ReuseCheckTest, X8ACancelDuringTheColdRunEndsTheTurn) {
  RecordedCache cache{fake.loaded.model->make_cache(), {}};
  generate(fake.loaded, Tokens{1, 2, 3, 4}, cache, {.max_tokens = 0});
  std::stop_source stop;
  int processed = 0;
  fake.model->before_layer = [&](int, int) {
    if (++processed == 3) stop.request_stop();
  };
  const auto result =
      generate(fake.loaded, Tokens{5, 6}, cache,
               {.max_tokens = 2, .prefill_step_size = 1, .verify_reuse = 1.0, .cancel = stop.get_token()});
  EXPECT_EQ(result.finish_reason, FinishReason::cancelled);
  EXPECT_TRUE(result.tokens.empty());
  EXPECT_EQ(test::stored_ids(cache), cache.tokens);
}

}  // namespace
}  // namespace reprise
