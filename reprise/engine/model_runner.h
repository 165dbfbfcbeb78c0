// The BatchRunner that a model is run by: one paged prompt cache a sequence, a shared batch for decoding, samplers of
// each sequence's own, and the prefix cache.
// Decoding keeps one step ahead: while a step runs, the graph of the next is built on its result.
// Threads: one, which evaluates.
#pragma once

#include <memory>

#include "reprise/base/clock.h"
#include "reprise/engine/batch_runner.h"
#include "reprise/models/language_model.h"
#include "reprise/prefix/tiers/prefix_cache.h"

namespace reprise {

struct ModelRunnerOptions {
  PrefixCacheOptions prefix = {};
  std::optional<KVQuantization> kv_quantization = {};
  int checkpoint_every = 512;  // also while decoding
  double verify_reuse = 0.0;
};

class ModelRunner final : public BatchRunner {
 public:
  // `fingerprint`: of the model. Throws: unsupported on a GPU, or for caches that cannot be paged; invalid_argument for
  // a quantisation that the head sizes do not allow.
  ModelRunner(const LanguageModel& model, const std::string& fingerprint, const ModelRunnerOptions& options,
              const Clock& clock = steady_clock());
  ~ModelRunner() override;

  int reusable(const std::string& salt, std::span<const TokenId> tokens) const override;
  int start(const SequenceStart& sequence) override;
  void prefill(SequenceId id, int count, bool checkpoint) override;
  std::vector<DecodedToken> decode(std::span<const SequenceId> rows, bool look_ahead) override;
  int finish(SequenceId id) noexcept override;
  bool needs_checkpoints() const override;
  std::size_t bytes_of(int tokens) const override;
  std::size_t nbytes() const override;
  bool make_room(std::size_t bytes) override;
  std::size_t max_bytes() const override;
  void tick() override;

  PrefixCache& prefix();
  std::uint64_t reuse_checks() const;
  std::uint64_t reuse_mismatches() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace reprise
