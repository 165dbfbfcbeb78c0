#include <algorithm>
#include <string>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/sampling/sampler.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

// The last `context_size` ids as an index for `rows` rows, [B, T].
mx::array context_index(const mx::array& context, int context_size, int rows) {
  const int size = context.shape(0);
  const auto recent = mx::slice(context, {std::max(0, size - context_size)}, {size});
  return mx::broadcast_to(mx::reshape(recent, {1, -1}), {rows, recent.shape(0)});
}

// Wraps `change(logits, index)`, which is not called for an empty context.
template <typename Change>
LogitsProcessor over_context(int context_size, Change change) {
  return {context_size, [context_size, change](const mx::array& context, const mx::array& logits) {
            if (context.size() == 0) return logits;
            return change(logits, context_index(context, context_size, logits.shape(0)));
          }};
}

LogitsProcessor make_repetition_penalty(float penalty, int context_size) {
  return over_context(context_size, [penalty](const mx::array& logits, const mx::array& index) {
    const auto factor = mx::array(penalty, logits.dtype());
    const auto seen = mx::take_along_axis(logits, index, -1);
    const auto less_likely = mx::where(mx::less(seen, mx::array(0.0f, logits.dtype())), mx::multiply(seen, factor),
                                       mx::divide(seen, factor));
    // An id that occurs twice is written twice with one value.
    return mx::put_along_axis(logits, index, less_likely, -1);
  });
}

LogitsProcessor make_presence_penalty(float penalty, int context_size) {
  return over_context(context_size, [penalty](const mx::array& logits, const mx::array& index) {
    const auto seen = mx::take_along_axis(logits, index, -1);
    return mx::put_along_axis(logits, index, mx::subtract(seen, mx::array(penalty, logits.dtype())), -1);
  });
}

LogitsProcessor make_frequency_penalty(float penalty, int context_size) {
  return over_context(context_size, [penalty](const mx::array& logits, const mx::array& index) {
    return mx::scatter_add_axis(logits, index, mx::full(index.shape(), -penalty, logits.dtype()), -1);
  });
}

LogitsProcessor make_logit_bias(const std::map<TokenId, float>& bias) {
  std::vector<TokenId> ids;
  std::vector<float> values;
  for (const auto& [id, value] : bias) {
    ids.push_back(id);
    values.push_back(value);
  }
  return {0, [ids, values](const mx::array&, const mx::array& logits) {
            const int vocab_size = logits.shape(-1);
            if (ids.back() >= vocab_size) {  // ids are sorted
              throw Error(ErrorCode::invalid_argument,
                          "[make_logits_processors] logit_bias must be given for ids below the vocabulary size " +
                              std::to_string(vocab_size) + ", but got " + std::to_string(ids.back()));
            }
            const auto count = static_cast<int>(ids.size());
            const mx::Shape shape = {logits.shape(0), count};
            const auto index = mx::broadcast_to(mx::array(ids.data(), {1, count}, mx::int32), shape);
            const auto added = mx::astype(mx::array(values.data(), {1, count}, mx::float32), logits.dtype());
            return mx::scatter_add_axis(logits, index, mx::broadcast_to(added, shape), -1);
          }};
}

}  // namespace

std::vector<LogitsProcessor> make_logits_processors(const SamplingParams& params) {
  check_sampling_params(params);
  std::vector<LogitsProcessor> processors;
  if (!params.logit_bias.empty()) processors.push_back(make_logit_bias(params.logit_bias));
  const bool repetition_on = params.repetition_penalty != 0.0f && params.repetition_penalty != 1.0f;
  if (repetition_on && params.repetition_context_size > 0) {
    processors.push_back(make_repetition_penalty(params.repetition_penalty, params.repetition_context_size));
  }
  if (params.presence_penalty != 0.0f && params.presence_context_size > 0) {
    processors.push_back(make_presence_penalty(params.presence_penalty, params.presence_context_size));
  }
  if (params.frequency_penalty != 0.0f && params.frequency_context_size > 0) {
    processors.push_back(make_frequency_penalty(params.frequency_penalty, params.frequency_context_size));
  }
  return processors;
}

}  // namespace reprise
