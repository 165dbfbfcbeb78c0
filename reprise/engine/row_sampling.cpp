#include "reprise/engine/row_sampling.h"

#include <algorithm>

#include "mlx/ops.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

mx::array row_of(const mx::array& array, int row) {
  mx::Shape start(array.ndim(), 0);
  mx::Shape stop = array.shape();
  start[0] = row;
  stop[0] = row + 1;
  return mx::slice(array, std::move(start), std::move(stop));
}

// The row's most recent tokens but the last, as many as its processors may look at.
std::vector<TokenId> known_tokens(const RowToSample& row) {
  const int wanted = row.sampler->context_size() - 1;
  if (wanted <= 0) return {};
  const std::size_t from_record = static_cast<std::size_t>(wanted) - (row.pending ? 1 : 0);
  const std::size_t count = std::min(row.record->size(), from_record);
  std::vector<TokenId> known(row.record->end() - static_cast<std::ptrdiff_t>(count), row.record->end());
  if (row.pending) known.push_back(*row.pending);
  return known;
}

}  // namespace

RowSampler::RowSampler(const SamplingParams& params, std::uint64_t num_draws)
    : greedy_(params.temperature == 0.0f),
      sampler_(make_logits_sampler(params, num_draws)),
      processors_(make_logits_processors(params)) {
  for (const LogitsProcessor& processor : processors_) context_size_ = std::max(context_size_, processor.context_size);
}

SampledTokens RowSampler::operator()(const mx::array& logits, const std::vector<TokenId>& known,
                                     const mx::array& last) {
  if (processors_.empty()) return sampler_(logits);
  auto changed = mx::astype(mx::reshape(logits, {1, -1}), mx::float32);
  for (const LogitsProcessor& processor : processors_) {
    mx::array context = mx::zeros({0}, mx::int32);
    if (processor.context_size > 0) {
      const auto count = std::min(known.size(), static_cast<std::size_t>(processor.context_size - 1));
      context = last;
      if (count > 0) {
        const mx::array before(known.data() + (known.size() - count), {static_cast<int>(count)}, mx::int32);
        context = mx::concatenate({before, last}, 0);
      }
    }
    changed = processor.apply(context, changed);
  }
  return sampler_(changed);
}

SampledTokens sample_rows(const mx::array& logits, const mx::array& fed, const std::vector<RowToSample>& rows) {
  const auto is_plain = [](const RowToSample& row) { return row.sampler->is_plain(); };
  if (std::all_of(rows.begin(), rows.end(), is_plain)) return (*rows.front().sampler)(logits, {}, fed);
  if (rows.size() == 1) return (*rows.front().sampler)(logits, known_tokens(rows.front()), fed);

  std::optional<SampledTokens> likeliest;
  std::vector<mx::array> tokens;
  std::vector<mx::array> logprobs;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const int row = static_cast<int>(i);
    if (is_plain(rows[i])) {
      if (!likeliest) likeliest = (*rows[i].sampler)(logits, {}, fed);
      tokens.push_back(row_of(likeliest->tokens, row));
      logprobs.push_back(row_of(likeliest->logprobs, row));
    } else {
      const auto sampled = (*rows[i].sampler)(row_of(logits, row), known_tokens(rows[i]), row_of(fed, row));
      tokens.push_back(sampled.tokens);
      logprobs.push_back(sampled.logprobs);
    }
  }
  return {mx::concatenate(std::move(tokens), 0), mx::concatenate(std::move(logprobs), 0)};
}

}  // namespace reprise::internal
