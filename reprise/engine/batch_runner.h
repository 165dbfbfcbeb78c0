// What computes, as the scheduler sees it: sequences that are prefilled in pieces and decoded together. The seam that
// keeps the scheduler free of MLX.
// Threads: all calls from one thread, but bytes_of and max_bytes from any. A call that throws has ended nothing: the
// caller finishes the sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reprise/base/tokens.h"
#include "reprise/sampling/sampling_params.h"

namespace reprise {

using SequenceId = std::uint64_t;  // never used twice: a sequence that was set aside starts again with another

struct SequenceStart {
  SequenceId id = 0;
  std::span<const TokenId> tokens;           // not empty; valid until finish
  const SamplingParams* sampling = nullptr;  // valid until finish
  std::uint64_t num_draws = 0;               // of its sampler so far: a sequence that was set aside goes on as it was
  std::string salt;
  bool keep = true;  // what is computed goes to the prefix cache
};

struct DecodedToken {
  SequenceId id = 0;
  TokenId token = 0;
  float logprob = 0.0f;
  std::exception_ptr error;  // instead of a token: this sequence failed, the others did not
};

class BatchRunner {
 public:
  virtual ~BatchRunner() = default;

  // Tokens that start would not leave to compute, without looking at slow places; changes nothing.
  virtual int reusable(const std::string& salt, std::span<const TokenId> tokens) const = 0;

  // Takes a sequence up, from the longest stored prefix. Returns: its length, less than tokens.size().
  virtual int start(const SequenceStart& sequence) = 0;

  // Computes the next `count` tokens of a sequence, never its last one, and keeps what is computed in the prefix cache;
  // `checkpoint`: also the state there, where the model needs one to come back.
  virtual void prefill(SequenceId id, int count, bool checkpoint) = 0;

  // The next token of each of `rows`, which have been prefilled up to their last token. With look_ahead it may begin
  // the step after this one for the same rows before it returns. Results in the order of `rows`. May throw only when no
  // row has moved: several rows are then tried one by one.
  virtual std::vector<DecodedToken> decode(std::span<const SequenceId> rows, bool look_ahead) = 0;

  // Ends a sequence in any state, also one whose start threw: what it computed is kept, the rest is forgotten.
  // Returns: tokens computed or reused when it ended.
  virtual int finish(SequenceId id) noexcept = 0;

  // Whether coming back to a prefix needs a checkpoint.
  virtual bool needs_checkpoints() const = 0;
  // An upper bound of what a live sequence of so many tokens holds, nothing shared.
  virtual std::size_t bytes_of(int tokens) const = 0;
  // Keys and values, live and cached, exactly; recurrent state that is stored, and what live sequences may come to
  // hold of it.
  virtual std::size_t nbytes() const = 0;
  // Forgets what is cached and not in use until `bytes` more fit the budget. Returns: whether they do.
  virtual bool make_room(std::size_t bytes) = 0;
  virtual std::size_t max_bytes() const = 0;
  // Housekeeping between steps: time-outs of what is cached.
  virtual void tick() {}
};

}  // namespace reprise
