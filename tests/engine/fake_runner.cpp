#include "tests/engine/fake_runner.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace reprise::test {

TokenId fake_token(std::span<const TokenId> tokens, const SamplingParams& sampling, std::uint64_t draw) {
  std::uint64_t hash = 1469598103934665603u + sampling.seed.value_or(0) * 31 + draw;
  for (const TokenId token : tokens) hash = (hash ^ static_cast<std::uint64_t>(token)) * 1099511628211u;
  return static_cast<TokenId>((hash >> 20) % 1000);
}

Tokens fake_answer(Tokens prompt, const SamplingParams& sampling, int max_tokens) {
  Tokens answer;
  for (int n = 0; n < max_tokens; ++n) {
    answer.push_back(fake_token(prompt, sampling, static_cast<std::uint64_t>(n)));
    prompt.push_back(answer.back());
  }
  return answer;
}

FakeRunner::~FakeRunner() { EXPECT_TRUE(sequences_.empty()) << "sequences were never finished"; }

int FakeRunner::usable(const Entry& entry, std::span<const TokenId> tokens) const {
  const auto most = std::min(entry.tokens.size(), tokens.size() - 1);
  const auto end = entry.tokens.begin() + static_cast<std::ptrdiff_t>(most);
  int length = static_cast<int>(std::mismatch(entry.tokens.begin(), end, tokens.begin()).first - entry.tokens.begin());
  if (!needs_checkpoints()) return length;
  const auto after = entry.checkpoints.upper_bound(length);
  return after == entry.checkpoints.begin() ? 0 : std::prev(after)->first;
}

int FakeRunner::reusable(const std::string& salt, std::span<const TokenId> tokens) const {
  int longest = 0;
  for (const Entry& entry : entries_) {
    if (entry.salt == salt) longest = std::max(longest, usable(entry, tokens));
  }
  return longest;
}

void FakeRunner::lease(Sequence& sequence, Entry* entry) {
  if (sequence.lease) --sequence.lease->leases;
  sequence.lease = entry;
  if (entry) ++entry->leases;
}

int FakeRunner::start(const SequenceStart& start) {
  EXPECT_GT(start.id, last_id_) << "a name was used twice";
  last_id_ = start.id;
  EXPECT_FALSE(start.tokens.empty());
  Sequence& sequence = sequences_[start.id];
  sequence.start = start;
  sequence.draws = start.num_draws;
  sequence.all.assign(start.tokens.begin(), start.tokens.end());
  before_start(start);
  const int length = reusable(start.salt, start.tokens);
  for (auto entry = entries_.begin(); length > 0 && entry != entries_.end(); ++entry) {
    if (entry->salt != start.salt || usable(*entry, start.tokens) != length) continue;
    sequence.tokens.assign(start.tokens.begin(), start.tokens.begin() + length);
    sequence.pages.assign(entry->pages.begin(), entry->pages.begin() + (length + kPageRows - 1) / kPageRows);
    sequence.checkpoints.insert(entry->checkpoints.begin(), entry->checkpoints.upper_bound(length));
    entries_.splice(entries_.end(), entries_, entry);
    lease(sequence, &entries_.back());
    break;
  }
  return length;
}

// Whoever has as many rows of the last page as are claimed goes on in it, the others copy it.
void FakeRunner::append(Sequence& sequence, int rows) {
  int length = static_cast<int>(sequence.tokens.size());
  for (; rows > 0; --rows, ++length) {
    const int row = length % kPageRows;
    if (row == 0) {
      sequence.pages.push_back(std::make_shared<Counted>(page_count_));
    } else if (sequence.pages.back()->claimed != row) {
      sequence.pages.back() = std::make_shared<Counted>(page_count_);
    }
    sequence.pages.back()->claimed = row + 1;
  }
}

void FakeRunner::trim(Sequence& sequence) {
  sequence.ahead = false;
  sequence.pages.resize((sequence.tokens.size() + kPageRows - 1) / kPageRows);
  const int row = static_cast<int>(sequence.tokens.size() % kPageRows);
  // Nobody else can have claimed the row that was computed ahead.
  if (row > 0) sequence.pages.back()->claimed = row;
}

void FakeRunner::store(Sequence& sequence) {
  if (!sequence.start.keep || sequence.tokens.empty()) return;
  const auto covers = [&](const Entry& entry) {
    return entry.salt == sequence.start.salt && entry.tokens.size() >= sequence.tokens.size() &&
           std::equal(sequence.tokens.begin(), sequence.tokens.end(), entry.tokens.begin());
  };
  auto found = std::find_if(entries_.begin(), entries_.end(), covers);
  if (found == entries_.end()) {
    entries_.push_back({sequence.start.salt, sequence.tokens, sequence.pages, sequence.checkpoints, 0});
    found = std::prev(entries_.end());
    found->pages.resize((sequence.tokens.size() + kPageRows - 1) / kPageRows);
  }
  lease(sequence, &*found);
  // Shorter ones that it covers are of no use any more.
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const bool covered = entry != found && entry->leases == 0 && entry->salt == found->salt &&
                         entry->tokens.size() <= found->tokens.size() &&
                         std::equal(entry->tokens.begin(), entry->tokens.end(), found->tokens.begin());
    if (covered) found->checkpoints.insert(entry->checkpoints.begin(), entry->checkpoints.end());
    entry = covered ? entries_.erase(entry) : std::next(entry);
  }
}

void FakeRunner::prefill(SequenceId id, int count, bool checkpoint) {
  ASSERT_TRUE(sequences_.contains(id));
  Sequence& sequence = sequences_[id];
  const int begin = static_cast<int>(sequence.tokens.size());
  ASSERT_GT(count, 0);
  ASSERT_LT(begin + count, static_cast<int>(sequence.all.size())) << "the last token was prefilled";
  ASSERT_TRUE(std::equal(sequence.all.begin(), sequence.all.end(), sequence.start.tokens.begin()))
      << "the tokens changed under the runner's eyes";
  before_prefill(sequence.all);
  append(sequence, count);
  sequence.tokens.insert(sequence.tokens.end(), sequence.all.begin() + begin, sequence.all.begin() + begin + count);
  computed_tokens += count;
  pieces.push_back({sequence.all.front(), begin, begin + count, checkpoint});
  store(sequence);
  if (checkpoint && needs_checkpoints() && sequence.lease && make_room(state_bytes_)) {
    sequence.lease->checkpoints.try_emplace(begin + count, std::make_shared<Counted>(checkpoint_count_));
    sequence.checkpoints = sequence.lease->checkpoints;
  }
}

std::vector<DecodedToken> FakeRunner::decode(std::span<const SequenceId> rows, bool look_ahead) {
  EXPECT_FALSE(rows.empty());
  EXPECT_EQ(std::set<SequenceId>(rows.begin(), rows.end()).size(), rows.size());
  if (!std::equal(rows.begin(), rows.end(), ahead_rows_.begin(), ahead_rows_.end())) {
    wasted_look_aheads += ahead_rows_.empty() ? 0 : 1;
    for (auto& [id, sequence] : sequences_) {
      if (sequence.ahead) trim(sequence);
    }
  }
  ahead_rows_.clear();
  for (const SequenceId id : rows) {
    EXPECT_TRUE(sequences_.contains(id));
    EXPECT_EQ(sequences_[id].tokens.size() + 1, sequences_[id].all.size()) << "it is not prefilled";
    if (whole_batch_throws) before_row(sequences_[id].all);
  }
  std::vector<DecodedToken> results;
  std::vector<TokenId> firsts;
  for (const SequenceId id : rows) {
    Sequence& sequence = sequences_[id];
    DecodedToken& result = results.emplace_back();
    result.id = id;
    try {
      before_row(sequence.all);
    } catch (...) {
      result.error = std::current_exception();
      continue;
    }
    firsts.push_back(sequence.all.front());
    if (sequence.ahead) trim(sequence);
    append(sequence, 1);
    sequence.tokens.push_back(sequence.all.back());
    ++computed_tokens;
    result.token = model(sequence.all, *sequence.start.sampling, sequence.draws++);
    result.logprob = -1.0f;
    sequence.all.push_back(result.token);
    if (look_ahead) {
      append(sequence, 1);
      sequence.ahead = true;
    }
  }
  if (look_ahead) {
    ++look_aheads;
    ahead_rows_.assign(rows.begin(), rows.end());
  }
  batches.push_back(firsts);
  return results;
}

int FakeRunner::finish(SequenceId id) noexcept {
  const auto found = sequences_.find(id);
  EXPECT_NE(found, sequences_.end()) << "finished twice, or never started";
  if (found == sequences_.end()) return 0;
  Sequence& sequence = found->second;
  if (sequence.ahead) trim(sequence);
  store(sequence);
  lease(sequence, nullptr);
  const int length = static_cast<int>(sequence.tokens.size());
  sequences_.erase(found);
  return length;
}

std::size_t FakeRunner::bytes_of(int tokens) const {
  return static_cast<std::size_t>((tokens + kPageRows - 1) / kPageRows) * kPageBytes + state_bytes_;
}

std::size_t FakeRunner::nbytes() const {
  const std::size_t states = sequences_.size() + static_cast<std::size_t>(*checkpoint_count_);
  return static_cast<std::size_t>(*page_count_) * kPageBytes + states * state_bytes_;
}

bool FakeRunner::make_room(std::size_t bytes) {
  while (nbytes() + bytes > max_bytes_) {
    const auto entry = std::find_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.leases == 0; });
    if (pinned || entry == entries_.end()) return false;
    // The last page first, with the checkpoints in it.
    entry->pages.pop_back();
    entry->tokens.resize(std::min(entry->tokens.size(), entry->pages.size() * kPageRows));
    entry->checkpoints.erase(entry->checkpoints.upper_bound(static_cast<int>(entry->tokens.size())),
                             entry->checkpoints.end());
    if (entry->pages.empty()) entries_.erase(entry);
  }
  return true;
}

}  // namespace reprise::test
