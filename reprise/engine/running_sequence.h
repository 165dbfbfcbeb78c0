// One live sequence of a ModelRunner. Private to `engine`.
// Threads: see ModelRunner.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reprise/engine/batch_runner.h"
#include "reprise/engine/row_sampling.h"
#include "reprise/prefix/tiers/cache_leaves.h"
#include "reprise/prefix/tiers/prefix_cache.h"

namespace reprise::internal {

// Invariant between calls of ModelRunner, while no step runs: every layer holds exactly the tokens of `record`. A step
// that runs is ahead of it by one token.
struct RunningSequence {
  RunningSequence(const SequenceStart& start, PromptCache form)
      : id(start.id),
        tokens(start.tokens),
        salt(start.salt),
        keep(start.keep),
        cache(std::move(form)),
        sampler(*start.sampling, start.num_draws) {}

  // Takes the sequence up where `fetched` ends.
  void go_on_from(FetchedPrefix fetched) {
    take_cache(std::move(fetched.cache));
    lease = std::move(fetched.lease);
    record.assign(tokens.begin(), tokens.begin() + fetched.length);
    stored_length = checkpoint_length = fetched.length;
  }
  void take_cache(PromptCache filled) {
    cache = std::move(filled);
    paged = paged_leaves(cache);
    recurrent = recurrent_leaves(cache);
  }
  int length() const { return static_cast<int>(record.size()); }
  int prompt_length() const { return static_cast<int>(tokens.size()); }

  SequenceId id;
  std::span<const TokenId> tokens;
  std::string salt;
  bool keep;
  PromptCache cache;  // its recurrent layers are unset while a DecodeBatch holds their state
  std::vector<PagedKVCache*> paged;
  std::vector<ArraysCache*> recurrent;
  Tokens record;
  TokenId next = 0;  // what the next step to be recorded feeds
  std::shared_ptr<PrefixTree::Lease> lease;
  RowSampler sampler;
  std::optional<DecodedToken> ready;  // computed, and not yet asked for
  int stored_length = 0;              // of the last time that it went to the prefix cache
  int checkpoint_length = 0;          // of the last checkpoint
  bool damaged = false;               // its logits are no numbers: nothing more of it is kept
};

}  // namespace reprise::internal
