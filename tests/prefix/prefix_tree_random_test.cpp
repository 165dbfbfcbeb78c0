// The tree beside the naive one, after every operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/prefix/naive_prefix_tree.h"

namespace reprise {
namespace {

struct Refused : std::exception {};

class Pair {
 public:
  Pair(int block_size, unsigned seed) : random_(seed), block_size_(block_size) { start(); }

  void step() {
    if (chance(0.3)) clock_.time += std::chrono::milliseconds(below(40));
    const int what = below(16);
    if (what < 4) {
      insert();
    } else if (what < 7) {
      match();
    } else if (what < 10) {
      insert_checkpoint();
    } else if (what < 12) {
      pin_or_unpin();
    } else if (what == 12) {
      ASSERT_EQ(tree_->evict_one(), naive_->evict_one());
    } else if (what == 13) {
      ASSERT_EQ(tree_->expire(), naive_->expire());
    } else if (what == 14) {
      if (chance(0.02)) clear();
    } else {
      if (!leases_.empty()) drop_lease(static_cast<std::size_t>(below(static_cast<int>(leases_.size()))));
      if (chance(0.001)) start();
    }
  }

  void check() {
    const PrefixTreeStats& is = tree_->stats();
    const PrefixTreeStats be = naive_->stats();
    ASSERT_EQ(is.blocks, be.blocks);
    ASSERT_EQ(is.checkpoints, be.checkpoints);
    ASSERT_EQ(is.tokens, be.tokens);
    ASSERT_EQ(is.nbytes, be.nbytes);
    ASSERT_LE(is.nbytes, options_.max_bytes);
    ASSERT_EQ(is.checkpoint_nbytes, be.checkpoint_nbytes);
    ASSERT_EQ(is.pinned_nbytes, be.pinned_nbytes);
    ASSERT_EQ(is.evicted_blocks, be.evicted_blocks);
    ASSERT_EQ(is.evicted_checkpoints, be.evicted_checkpoints);
    ASSERT_EQ(is.expired_blocks, be.expired_blocks);
    check_nodes();
    if (testing::Test::HasFatalFailure()) return;
    const std::string space = any_space();
    const Tokens tokens = any_tokens();
    for (const bool needs_checkpoint : {false, true}) {
      ASSERT_EQ(tree_->matched_length(space, tokens, needs_checkpoint),
                naive_->find(space, tokens, needs_checkpoint).length);
    }
  }

  // Everything goes, in the order that the naive tree says.
  void drain() {
    while (!leases_.empty()) drop_lease(0);
    for (const auto& [space, tokens] : pinned_) ASSERT_EQ(tree_->unpin(space, tokens), naive_->unpin(space, tokens));
    for (;;) {
      const auto nbytes = tree_->evict_one();
      ASSERT_EQ(nbytes, naive_->evict_one());
      check_nodes();
      if (!nbytes || testing::Test::HasFatalFailure()) break;
    }
    ASSERT_EQ(tree_->stats().nbytes, 0U);
    ASSERT_EQ(tree_->stats().pinned_nbytes, 0U);
    ASSERT_EQ(tree_->stats().blocks, 0U);
  }

  std::uint64_t hits = 0;

 private:
  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(random_); }
  bool chance(double part) { return std::uniform_real_distribution<double>(0, 1)(random_) < part; }
  std::string any_space() { return chance(0.8) ? "a" : "b"; }

  // An earlier prompt, cut somewhere, and something new; sometimes with a token changed.
  Tokens any_tokens() {
    Tokens tokens;
    if (!prompts_.empty() && chance(0.9)) {
      tokens = prompts_[static_cast<std::size_t>(below(static_cast<int>(prompts_.size())))];
      if (chance(0.5)) tokens.resize(static_cast<std::size_t>(below(static_cast<int>(tokens.size()) + 1)));
      if (!tokens.empty() && chance(0.1)) tokens[static_cast<std::size_t>(below(static_cast<int>(tokens.size())))] ^= 1;
    }
    const int longest = 4 * block_size_ + 5;
    for (int left = chance(0.6) ? below(2 * block_size_ + 1) : 0; left > 0; --left) tokens.push_back(below(3));
    if (static_cast<int>(tokens.size()) > longest) tokens.resize(static_cast<std::size_t>(longest));
    if (prompts_.size() < 12) {
      prompts_.push_back(tokens);
    } else if (chance(0.05)) {
      prompts_[static_cast<std::size_t>(below(12))] = tokens;
    }
    return tokens;
  }

  void start() {
    leases_.swap(outliving_);  // those of the last tree go after it
    pinned_.clear();
    options_.block_size = block_size_;
    options_.max_bytes = static_cast<std::size_t>(100 + below(600));
    options_.ttl = std::chrono::milliseconds(100 + below(400));
    tree_ = std::make_unique<PrefixTree>(options_, clock_);
    naive_ = std::make_unique<NaivePrefixTree>(options_, clock_);
    leases_.clear();
    outliving_.clear();
  }

  void insert() {
    const std::string space = any_space();
    const Tokens tokens = any_tokens();
    // What make does with each block: the same for both.
    std::map<int, std::pair<int, StoredRef>> script;
    for (int begin = 0; begin < static_cast<int>(tokens.size()); begin += block_size_) {
      const int what = below(60);
      const int size = chance(0.02) ? 5000 : below(40);
      script[begin] = {what, what == 0 ? nullptr : numbered(++number_, static_cast<std::size_t>(size))};
    }
    const auto make = [&](auto& tree) {
      return [&](int begin, int end) {
        EXPECT_EQ(begin % block_size_, 0);
        EXPECT_EQ(end, std::min(begin + block_size_, static_cast<int>(tokens.size())));
        const auto& [what, content] = script.at(begin);
        if (what == 1) throw Refused();
        if (what == 2) tree.evict_one();
        return content;
      };
    };
    std::shared_ptr<PrefixTree::Lease> new_lease;
    int new_last = 0;
    const bool old = !leases_.empty() && chance(0.4);
    const bool with_lease = old || chance(0.3);
    auto& [lease, last] = old ? leases_.front() : leases_.emplace_back(new_lease, new_last);
    int is = -1, be = -1;
    try {
      is = tree_->insert(space, tokens, make(*tree_), with_lease ? &lease : nullptr);
    } catch (const Refused&) {
    }
    try {
      be = naive_->insert(space, tokens, make(*naive_), with_lease ? &last : nullptr);
    } catch (const Refused&) {
    }
    ASSERT_EQ(is, be);
    ASSERT_EQ(!with_lease || is < 0, !lease || (old && is < 0));
    if (is >= 0) {
      ASSERT_EQ(is, tree_->matched_length(space, tokens, false));
    }
    if (!old && !lease) leases_.pop_back();
    if (leases_.size() > 3) drop_lease(0);
  }

  void match() {
    const std::string space = any_space();
    const Tokens tokens = any_tokens();
    const bool needs_checkpoint = chance(0.5);
    PrefixTree::Match is = tree_->match(space, tokens, needs_checkpoint);
    const NaivePrefixTree::Match be = naive_->match(space, tokens, needs_checkpoint);
    ASSERT_EQ(is.length, be.length);
    ASSERT_EQ(is.checkpoint, be.checkpoint);
    ASSERT_EQ(is.lease == nullptr, be.length == 0);
    ASSERT_EQ(is.blocks.size(), be.blocks.size());
    for (std::size_t i = 0; i < is.blocks.size(); ++i) {
      ASSERT_EQ(is.blocks[i].begin, be.blocks[i].begin);
      ASSERT_EQ(is.blocks[i].end, be.blocks[i].end);
      ASSERT_EQ(is.blocks[i].content, be.blocks[i].content);
    }
    if (is.length > 0) ++hits;
    if (is.lease == nullptr) return;
    leases_.emplace_back(std::move(is.lease), be.last);
    if (chance(0.6)) drop_lease(leases_.size() - 1);
    if (leases_.size() > 3) drop_lease(0);
  }

  void insert_checkpoint() {
    const std::string space = any_space();
    Tokens tokens = any_tokens();
    if (chance(0.8)) tokens.resize(static_cast<std::size_t>(tree_->matched_length(space, tokens, false)));
    if (chance(0.3) && block_size_ <= static_cast<int>(tokens.size())) {
      tokens.resize(tokens.size() - tokens.size() % static_cast<std::size_t>(block_size_));
    }
    const StoredRef content = numbered(++number_, static_cast<std::size_t>(chance(0.02) ? 5000 : below(60)));
    ASSERT_EQ(tree_->insert_checkpoint(space, tokens, content), naive_->insert_checkpoint(space, tokens, content));
  }

  void pin_or_unpin() {
    if (pinned_.size() < 2 && chance(0.5)) {
      pinned_.emplace_back(any_space(), any_tokens());
      const auto& [space, tokens] = pinned_.back();
      ASSERT_EQ(tree_->pin(space, tokens), naive_->pin(space, tokens));
    } else if (!pinned_.empty() && chance(0.5)) {
      const auto [space, tokens] = pinned_.front();
      pinned_.erase(pinned_.begin());
      ASSERT_EQ(tree_->unpin(space, tokens), naive_->unpin(space, tokens));
    } else {
      const std::string space = any_space();
      const Tokens tokens = any_tokens();
      ASSERT_EQ(tree_->unpin(space, tokens), naive_->unpin(space, tokens));
      const auto unpinned = std::find(pinned_.begin(), pinned_.end(), std::pair(space, tokens));
      if (unpinned != pinned_.end()) pinned_.erase(unpinned);
    }
  }

  void clear() {
    const auto space = chance(0.5) ? std::optional(any_space()) : std::nullopt;
    ASSERT_EQ(tree_->clear(space), naive_->clear(space));
  }

  void drop_lease(std::size_t index) {
    naive_->release_lease(leases_[index].second);
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void check_nodes() {
    std::map<std::pair<std::string, Tokens>, const NaivePrefixTree::Block*> wanted;
    for (const auto& block : naive_->blocks()) wanted[{block.space, block.path}] = &block;
    std::map<std::uint64_t, Tokens> paths = {{0, {}}};
    tree_->for_each([&](const PrefixTree::NodeView& view) {
      const auto parent = paths.find(view.parent);
      ASSERT_NE(parent, paths.end()) << "a node before its parent";
      Tokens path = parent->second;
      ASSERT_EQ(view.begin, static_cast<int>(path.size()));
      path.insert(path.end(), view.tokens.begin(), view.tokens.end());
      const auto found = wanted.find({*view.space, path});
      ASSERT_NE(found, wanted.end()) << "a block that should not be there";
      const NaivePrefixTree::Block& block = *found->second;
      ASSERT_EQ(view.nbytes, block.nbytes());
      ASSERT_EQ(view.checkpoints, block.checkpoints.size());
      ASSERT_EQ(view.pins, block.pins);
      ASSERT_EQ(view.leases, block.leases);
      ASSERT_EQ(view.hits, block.hits);
      ASSERT_EQ(view.last_used, block.last_used);
      ASSERT_TRUE(paths.emplace(view.id, path).second) << "two nodes of one id";
      wanted.erase(found);
    });
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_TRUE(wanted.empty()) << "a block is missing";
  }

  using Lease = std::shared_ptr<PrefixTree::Lease>;
  std::mt19937 random_;
  int block_size_;
  int number_ = 0;
  StillClock clock_;
  PrefixTreeOptions options_;
  std::unique_ptr<PrefixTree> tree_;
  std::unique_ptr<NaivePrefixTree> naive_;
  std::vector<std::pair<Lease, int>> leases_, outliving_;
  std::vector<std::pair<std::string, Tokens>> pinned_;
  std::vector<Tokens> prompts_;
};

class RandomOperations : public testing::TestWithParam<int> {};

TEST_P(RandomOperations, DoWhatANaiveTreeDoes) {
  constexpr int operations = 25'000;
  for (const unsigned seed : {1U, 2U, 3U, 4U}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    {
      Pair both(GetParam(), seed);
      for (int i = 0; i < operations; ++i) {
        SCOPED_TRACE("operation " + std::to_string(i));
        both.step();
        if (HasFatalFailure()) return;
        both.check();
        if (HasFatalFailure()) return;
      }
      both.drain();
      if (HasFatalFailure()) return;
      EXPECT_GT(both.hits, 100U) << "the prompts are too unlike each other";
    }
    EXPECT_EQ(Numbered::alive, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(BlockSizes, RandomOperations, testing::Values(1, 2, 3, 8, 256),
                         [](const auto& tested) { return std::to_string(tested.param); });

}  // namespace
}  // namespace reprise
