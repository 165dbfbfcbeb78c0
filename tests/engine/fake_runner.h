// A runner without a model: rows in pages of 16 tokens that are counted and copied as the real ones, a naive list of
// stored prefixes, and as "model" a hash of all tokens so far. Complains of every call that breaks BatchRunner's
// contract.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "reprise/base/clock.h"
#include "reprise/engine/batch_runner.h"

namespace reprise::test {

class FakeClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(std::chrono::milliseconds time) { now_ += time; }

 private:
  TimePoint now_{std::chrono::hours(1)};
};

// What the "model" says after `tokens`, as its `draw`-th draw.
TokenId fake_token(std::span<const TokenId> tokens, const SamplingParams& sampling, std::uint64_t draw);
// A whole answer, as nobody disturbs it.
Tokens fake_answer(Tokens prompt, const SamplingParams& sampling, int max_tokens);

class FakeRunner final : public BatchRunner {
 public:
  static constexpr int kPageRows = 16;
  static constexpr std::size_t kPageBytes = 100;

  explicit FakeRunner(std::size_t budget = std::size_t{1} << 40, std::size_t state = 0)
      : max_bytes_(budget), state_bytes_(state) {}
  ~FakeRunner() override;

  int reusable(const std::string& salt, std::span<const TokenId> tokens) const override;
  int start(const SequenceStart& sequence) override;
  void prefill(SequenceId id, int count, bool checkpoint) override;
  std::vector<DecodedToken> decode(std::span<const SequenceId> rows, bool look_ahead) override;
  int finish(SequenceId id) noexcept override;
  bool needs_checkpoints() const override { return state_bytes_ > 0; }
  std::size_t bytes_of(int tokens) const override;
  std::size_t nbytes() const override;
  bool make_room(std::size_t bytes) override;
  std::size_t max_bytes() const override { return max_bytes_; }
  void tick() override { before_tick(); }

  // What is cached stays, as if pinned.
  bool pinned = false;
  // May throw.
  std::function<void(const SequenceStart&)> before_start = [](const SequenceStart&) {};
  std::function<void(std::span<const TokenId> tokens)> before_prefill = [](std::span<const TokenId>) {};
  // Throw for one row: with `whole_batch_throws` out of decode, else as the row's result.
  std::function<void(std::span<const TokenId> tokens)> before_row = [](std::span<const TokenId>) {};
  bool whole_batch_throws = false;
  std::function<void()> before_tick = [] {};
  std::function<TokenId(std::span<const TokenId> tokens, const SamplingParams& sampling, std::uint64_t draw)> model =
      fake_token;

  struct Piece {
    TokenId first = 0;  // of the sequence: tests give each its own
    int begin = 0, end = 0;
    bool checkpoint = false;
    bool operator==(const Piece&) const = default;
  };
  std::vector<Piece> pieces;
  std::vector<std::vector<TokenId>> batches;  // first tokens of the rows of each step
  int computed_tokens = 0;                    // rows, look-ahead not counted
  int look_aheads = 0, wasted_look_aheads = 0;
  std::size_t live() const { return sequences_.size(); }

 private:
  struct Counted {
    explicit Counted(std::shared_ptr<int> counter) : count(std::move(counter)) { ++*count; }
    ~Counted() { --*count; }
    std::shared_ptr<int> count;
    int claimed = 0;  // rows of a page
  };
  using Pages = std::vector<std::shared_ptr<Counted>>;
  using Checkpoints = std::map<int, std::shared_ptr<Counted>>;
  struct Entry {
    std::string salt;
    Tokens tokens;
    Pages pages;
    Checkpoints checkpoints;
    int leases = 0;
  };
  struct Sequence {
    SequenceStart start;
    Tokens tokens;  // computed, look-ahead not counted
    Tokens all;     // and those to be computed
    Pages pages;
    std::uint64_t draws = 0;
    bool ahead = false;
    Entry* lease = nullptr;
    Checkpoints checkpoints;
  };

  void append(Sequence& sequence, int rows);
  static void trim(Sequence& sequence);
  void store(Sequence& sequence);
  int usable(const Entry& entry, std::span<const TokenId> tokens) const;
  void lease(Sequence& sequence, Entry* entry);

  std::size_t max_bytes_;
  std::size_t state_bytes_;
  std::shared_ptr<int> page_count_ = std::make_shared<int>(0);
  std::shared_ptr<int> checkpoint_count_ = std::make_shared<int>(0);
  std::list<Entry> entries_;  // the least recently used first
  std::map<SequenceId, Sequence> sequences_;
  SequenceId last_id_ = 0;
  std::vector<SequenceId> ahead_rows_;
};

}  // namespace reprise::test
