// Against mlx-lm 0.32.2: tests/data/sampling, made by make_goldens.py there.
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>

#include "mlx/io.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/sampling/filters.h"
#include "reprise/sampling/sampler.h"

namespace reprise {
namespace {

namespace mx = mlx::core;

struct Golden {
  std::unordered_map<std::string, mx::array> tensors;
  std::unordered_map<std::string, std::string> metadata;
};

const Golden& golden() {
  static const Golden data = [] {
    auto [tensors, metadata] = mx::load_safetensors(REPRISE_SOURCE_DIR "/tests/data/sampling/golden.safetensors");
    return Golden{std::move(tensors), std::move(metadata)};
  }();
  return data;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

struct Case {
  SamplingParams params;
  std::vector<TokenId> context;
};

void set(Case& out, const std::string& name, const std::string& value) {
  SamplingParams& params = out.params;
  const std::map<std::string, float*> floats = {
      {"top_p", &params.top_p},
      {"min_p", &params.min_p},
      {"xtc_probability", &params.xtc_probability},
      {"xtc_threshold", &params.xtc_threshold},
      {"repetition_penalty", &params.repetition_penalty},
      {"presence_penalty", &params.presence_penalty},
      {"frequency_penalty", &params.frequency_penalty},
  };
  const std::map<std::string, int*> ints = {
      {"top_k", &params.top_k},
      {"min_tokens_to_keep", &params.min_tokens_to_keep},
      {"repetition_context_size", &params.repetition_context_size},
      {"presence_context_size", &params.presence_context_size},
      {"frequency_context_size", &params.frequency_context_size},
  };
  if (const auto it = floats.find(name); it != floats.end()) {
    *it->second = std::stof(value);
  } else if (const auto number = ints.find(name); number != ints.end()) {
    *number->second = std::stoi(value);
  } else if (name == "xtc_special_tokens" || name == "context") {
    for (const auto& id : split(value, ',')) {
      (name == "context" ? out.context : params.xtc_special_tokens).push_back(std::stoi(id));
    }
  } else if (name == "logit_bias") {
    for (const auto& pair : split(value, ',')) {
      params.logit_bias[std::stoi(pair)] = std::stof(pair.substr(pair.find(':') + 1));
    }
  } else {
    FAIL() << "the golden file has a parameter this test does not know: " << name;
  }
}

Case parse(const std::string& words) {
  Case out;
  for (const auto& word : split(words, ' ')) set(out, word.substr(0, word.find('=')), word.substr(word.find('=') + 1));
  return out;
}

int count_of(const std::string& kind) {
  int count = 0;
  while (golden().tensors.contains(kind + "." + std::to_string(count))) ++count;
  return count;
}

TEST(ApplyFilters, TokensKeptEqualMlxLm) {
  const int cases = count_of("kept");
  ASSERT_EQ(cases, 24);
  for (int number = 0; number < cases; ++number) {
    const std::string name = "kept." + std::to_string(number);
    SCOPED_TRACE(golden().metadata.at(name));
    const Case given = parse(golden().metadata.at(name));
    const auto& logprobs = golden().tensors.at("logprobs");
    const bool xtc = given.params.xtc_probability > 0;
    const auto kept = apply_filters(logprobs, given.params, std::vector<bool>(xtc ? 3 : 0, true));
    const auto expected = golden().tensors.at(name);
    EXPECT_TRUE(mx::array_equal(mx::greater(kept, mx::array(-INFINITY)), expected).item<bool>());
    EXPECT_TRUE(mx::array_equal(mx::where(expected, kept, logprobs), logprobs).item<bool>()) << "a kept value changed";
  }
}

TEST(MakeLogitsProcessors, LogitsEqualMlxLm) {
  const int cases = count_of("processed");
  ASSERT_EQ(cases, 11);
  for (int number = 0; number < cases; ++number) {
    const std::string name = "processed." + std::to_string(number);
    SCOPED_TRACE(golden().metadata.at(name));
    const Case given = parse(golden().metadata.at(name));
    auto logits = golden().tensors.at("logits");
    const mx::array context(given.context.data(), {static_cast<int>(given.context.size())}, mx::int32);
    for (const auto& processor : make_logits_processors(given.params)) logits = processor.apply(context, logits);
    EXPECT_TRUE(mx::allclose(logits, golden().tensors.at(name), 1e-6, 1e-6).item<bool>());
  }
}

}  // namespace
}  // namespace reprise
