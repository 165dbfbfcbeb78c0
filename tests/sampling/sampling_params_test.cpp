#include "reprise/sampling/sampling_params.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "reprise/base/error.h"

namespace reprise {
namespace {

struct BadParams {
  const char* field;
  std::function<void(SamplingParams&)> spoil;
};

TEST(CheckSamplingParams, EveryBadValueIsRefusedWithTheFieldsName) {
  const float nan = std::nanf("");
  const float infinity = std::numeric_limits<float>::infinity();
  const BadParams cases[] = {
      {"temperature", [](auto& p) { p.temperature = -0.1f; }},
      {"temperature", [=](auto& p) { p.temperature = nan; }},
      {"temperature", [=](auto& p) { p.temperature = infinity; }},
      {"top_p", [](auto& p) { p.top_p = -0.01f; }},
      {"top_p", [](auto& p) { p.top_p = 1.01f; }},
      {"top_p", [=](auto& p) { p.top_p = nan; }},
      {"top_k", [](auto& p) { p.top_k = -1; }},
      {"min_p", [](auto& p) { p.min_p = -0.01f; }},
      {"min_p", [](auto& p) { p.min_p = 1.01f; }},
      {"min_p", [=](auto& p) { p.min_p = nan; }},
      {"min_tokens_to_keep", [](auto& p) { p.min_tokens_to_keep = 0; }},
      {"xtc_probability", [](auto& p) { p.xtc_probability = 1.5f; }},
      {"xtc_probability", [=](auto& p) { p.xtc_probability = nan; }},
      {"xtc_threshold", [](auto& p) { p.xtc_threshold = 0.6f; }},
      {"xtc_threshold", [=](auto& p) { p.xtc_threshold = nan; }},
      {"xtc_special_tokens",
       [](auto& p) {
         p.xtc_special_tokens = {2, -2};
       }},
      {"repetition_penalty", [](auto& p) { p.repetition_penalty = -1.0f; }},
      {"repetition_penalty", [=](auto& p) { p.repetition_penalty = nan; }},
      {"repetition_penalty", [=](auto& p) { p.repetition_penalty = infinity; }},
      {"presence_penalty", [=](auto& p) { p.presence_penalty = nan; }},
      {"frequency_penalty", [=](auto& p) { p.frequency_penalty = infinity; }},
      {"repetition_context_size", [](auto& p) { p.repetition_context_size = -1; }},
      {"presence_context_size", [](auto& p) { p.presence_context_size = -1; }},
      {"frequency_context_size", [](auto& p) { p.frequency_context_size = -1; }},
      {"logit_bias", [](auto& p) { p.logit_bias[-1] = 1.0f; }},
      {"logit_bias", [=](auto& p) { p.logit_bias[1] = nan; }},
      {"logit_bias", [=](auto& p) { p.logit_bias[1] = infinity; }},
  };
  for (const auto& bad : cases) {
    SamplingParams params;
    bad.spoil(params);
    try {
      check_sampling_params(params);
      ADD_FAILURE() << bad.field << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(bad.field), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("but got"), std::string::npos) << error.what();
    }
  }
}

TEST(CheckSamplingParams, DefaultsAndTheEdgesOfEveryRangePass) {
  EXPECT_NO_THROW(check_sampling_params({}));
  EXPECT_NO_THROW(check_sampling_params({.temperature = 1e-40f, .top_p = 0.0f, .min_p = 1.0f, .xtc_threshold = 0.5f}));
  EXPECT_NO_THROW(check_sampling_params({.presence_penalty = -2.0f, .frequency_penalty = -2.0f}));
  EXPECT_NO_THROW(check_sampling_params({.logit_bias = {{5, -std::numeric_limits<float>::infinity()}}}));
}

}  // namespace
}  // namespace reprise
