#include "reprise/generate/restore_checks.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"
#include "reprise/base/error.h"
#include "reprise/generate/transcript.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

std::string name_of(mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

bool all_known(const LoadedModel& model, const Tokens& ids) {
  const int vocab_size = model.model->info().vocab_size;
  return std::all_of(ids.begin(), ids.end(), [&](TokenId id) { return id >= 0 && id < vocab_size; });
}

// The first layer that is neither what the options make nor its quantised counterpart.
std::optional<CacheMisfit> unexpected_layer(const LanguageModel& model, const PromptCache& cache,
                                            const KVCacheOptions& options) {
  const PromptCache expected = make_prompt_cache(model, options.max_kv_size);
  if (cache.size() != expected.size()) return CacheMisfit{"has another number of layers than its model"};
  PromptCache quantized = expected.fork();
  if (options.kv_bits) maybe_quantize_kv_cache(quantized, 0, options.kv_group_size, *options.kv_bits);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::string got = describe_cache(cache[i]);
    if (got == describe_cache(expected[i]) || got == describe_cache(quantized[i])) continue;
    return CacheMisfit{"has a " + got + " in layer " + std::to_string(i)};
  }
  return {};
}

std::vector<mx::Dtype> dtypes_of_numbers(const LayerCache& layer) {
  std::vector<mx::array> arrays;
  layer.state().collect_arrays(arrays);
  std::vector<mx::Dtype> dtypes;
  for (const mx::array& array : arrays) {
    if (mx::issubdtype(array.dtype(), mx::floating)) dtypes.push_back(array.dtype());
  }
  return dtypes;
}

// The first layer that holds numbers of another dtype than this run's.
std::optional<CacheMisfit> other_dtype(const LanguageModel& model, const PromptCache& cache,
                                       const KVCacheOptions& options) {
  // Nothing is evaluated: the graph of one step knows what is stored.
  PromptCache fresh = make_prompt_cache(model, options.max_kv_size);
  model.forward(mx::array({0}, {1, 1}, mx::int32), fresh);
  for (std::size_t i = 0; i < cache.size(); ++i) {
    const auto own = dtypes_of_numbers(fresh[i]);
    for (const mx::Dtype held : dtypes_of_numbers(cache[i])) {
      if (own.empty() || std::find(own.begin(), own.end(), held) != own.end()) continue;
      return CacheMisfit{"holds " + name_of(held) + ", but this run keeps " + name_of(own.front()) + " (kv_dtype " +
                             name_of(held) + " fits)",
                         true};
    }
  }
  return {};
}

}  // namespace

std::optional<CacheMisfit> misfit(const LoadedModel& model, const RecordedCache& cache, const KVCacheOptions& options) {
  try {
    if (auto problem = unexpected_layer(*model.model, cache.cache, options)) return problem;
  } catch (const std::exception& error) {
    return CacheMisfit{std::string("has a cache of a kind that its model cannot have: ") + error.what()};
  }
  if (!all_known(model, cache.tokens)) return CacheMisfit{"has token ids that its model does not know"};
  try {
    check_prompt_cache(cache.cache, static_cast<int>(cache.tokens.size()));
    // A step on a fork finds shapes that are another model's while its graph is built.
    PromptCache probe = cache.cache.fork();
    model.model->forward(mx::array({0}, {1, 1}, mx::int32), probe);
    if (auto problem = other_dtype(*model.model, cache.cache, options)) return problem;
    plan_kv_cache(*model.model, cache.cache, options);
  } catch (const std::exception& error) {
    return CacheMisfit{std::string("does not fit its model: ") + error.what()};
  }
  return {};
}

std::optional<std::string> misfit(const LoadedModel& model, const SavedChat& chat) {
  try {
    check_sampling_params(chat.sampling);
    for (const auto& [id, bias] : chat.sampling.logit_bias) {
      if (!all_known(model, {id})) return "has a logit bias for a token that its model does not know";
    }
    auto answer = chat.answers.begin();
    for (const ChatMessage& message : chat.messages) {
      if (message.role != "assistant") continue;
      if (!all_known(model, *answer)) return "has token ids that its model does not know";
      if (answer_text(model.tokenizer, *answer) != message.content)
        return "shows another answer than the one it recorded";
      ++answer;
    }
    // What the next turn will do: a template that refuses it then would leave a chat that cannot go on.
    std::vector<ChatMessage> next = chat.messages;
    next.push_back({"user", "x"});
    transcript_ids(model.tokenizer, *model.chat_template, next, chat.answers,
                   {.add_generation_prompt = true, .tools_json = chat.tools_json, .kwargs_json = chat.kwargs_json});
  } catch (const std::exception& error) {
    return std::string("has a transcript that its model refuses: ") + error.what();
  }
  return {};
}

}  // namespace reprise::internal
