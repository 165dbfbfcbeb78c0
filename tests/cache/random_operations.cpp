#include "tests/cache/random_operations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "mlx/ops.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/quantized_rotating_kv_cache.h"
#include "reprise/cache/registry.h"
#include "tests/cache/token_columns.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

constexpr int kHeadSize = 32;
constexpr std::size_t kMaxSubjects = 6;
constexpr int kMaxRows = 5;

AttentionCache& part(LayerCache& cache, std::size_t index) {
  if (auto* list = dynamic_cast<CacheList*>(&cache)) return dynamic_cast<AttentionCache&>((*list)[index]);
  return dynamic_cast<AttentionCache&>(cache);
}

Subject fork(const Subject& subject) { return {subject.cache->fork(), subject.is_batch, subject.parts}; }

std::string form(const LayerCache& cache) {
  std::string text = cache.class_name();
  if (cache.class_name().find("Quantized") != std::string::npos) {
    const State state = cache.state();
    text += std::to_string(*state.as_list()->back().as_int());  // bits come last
    if (const auto* rotating = dynamic_cast<const QuantizedRotatingKVCache*>(&cache)) {
      text += std::to_string(rotating->keep());
    }
  }
  return text;
}

Subject extracted(const Subject& subject, int row) {
  Subject single{batched(*subject.cache)->extract(row), false, {}};
  for (const auto& rows : subject.parts) single.parts.push_back({rows[static_cast<std::size_t>(row)]});
  return single;
}

}  // namespace

void RandomOperations::step() {
  const auto at = static_cast<std::size_t>(pick(0, static_cast<int>(subjects_.size()) - 1));
  Subject& subject = subjects_[at];
  const int choice = pick(0, 99);
  if (choice < 45) {
    update(subject, choice < 30 ? 1 : pick(1, 24));
  } else if (choice < 55) {
    trim(subject);
  } else if (choice < 60) {
    add(fork(subject));
  } else if (choice < 65) {
    reload(subject);
  } else if (choice < 66) {
    save_and_load(subject);
  } else if (choice < 70) {
    quantize(subject);
  } else if (choice < 74) {
    check_all(subject);
  } else if (choice < 78) {
    recall();
  } else if (choice < 80) {
    add_new();
  } else if (choice < 82) {
    refuse(subject);
  } else {
    batch_operation(subject, choice);
  }
}

void RandomOperations::check_all() {
  for (Subject& subject : subjects_) check_all(subject);
  recall();
}

void RandomOperations::add(Subject subject) {
  if (subjects_.size() < kMaxSubjects) {
    subjects_.push_back(std::move(subject));
  } else {
    subjects_[static_cast<std::size_t>(pick(0, kMaxSubjects - 1))] = std::move(subject);
  }
}

void RandomOperations::add_new() {
  Subject subject{family_.make(), false, {}};
  for (const CacheRules& rules : family_.parts) subject.parts.push_back({TokenModel(rules)});
  add(std::move(subject));
}

std::vector<int> RandomOperations::new_tokens(int count) {
  std::vector<int> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), next_token_);
  next_token_ += count;
  return tokens;
}

std::optional<int> RandomOperations::random_window(const Subject& subject) {
  const bool chunks = family_.parts.front().kind == CacheKind::chunked;
  if (subject.cache == nullptr || chunks || pick(0, 3) != 0) return std::nullopt;
  int most = 20;
  for (const CacheRules& rules : family_.parts) {
    if (rules.kind == CacheKind::ring) most = std::min(most, rules.max_size);
  }
  return pick(1, most);
}

void RandomOperations::append(Subject& subject, const std::vector<std::vector<int>>& tokens, int width,
                              std::optional<int> window, bool as_chunk) {
  for (std::size_t p = 0; p < subject.parts.size(); ++p) {
    AttentionCache& cache = part(*subject.cache, p);
    const Mask mask = cache.make_mask(width, {window, pick(0, 3) == 0});
    const KeysValues seen = cache.update_and_fetch(token_columns(tokens, width, kHeadSize, 1),
                                                   token_columns(tokens, width, 2 * kHeadSize, -1));
    const auto keys = shown_keys(seen);
    const auto values = shown_values(seen);
    ASSERT_EQ(keys.size(), tokens.size());
    const auto may_see = visibility(mask, width, static_cast<int>(keys.empty() ? 0 : keys.front().size()));
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      const auto wanted = subject.parts[p][b].append(tokens[b], window, as_chunk || width > 1);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        std::vector<int> got;
        for (std::size_t c = 0; c < keys[b].size(); ++c) {
          if (!may_see(static_cast<int>(b), static_cast<int>(i), static_cast<int>(c))) continue;
          got.push_back(static_cast<int>(keys[b][c]));
          ASSERT_EQ(values[b][c], -keys[b][c]);
        }
        std::vector<int> sorted = wanted[i];
        std::sort(sorted.begin(), sorted.end());
        std::sort(got.begin(), got.end());
        ASSERT_EQ(got, sorted) << cache.class_name() << " row " << b << ", query " << i << " of " << width;
      }
    }
    if (pick(0, 9) == 0) remember(seen);
  }
}

void RandomOperations::update(Subject& subject, int width) {
  if (subject.num_rows() == 0) return;
  if (family_.parts.front().kind == CacheKind::chunked && pick(0, 1) == 0) {
    dynamic_cast<ChunkedKVCache&>(*subject.cache).maybe_trim_front();
    if (!subject.cache->empty()) subject.parts[0][0].trim_front();
  }
  std::vector<std::vector<int>> tokens;
  for (int b = 0; b < subject.num_rows(); ++b) tokens.push_back(new_tokens(width));
  append(subject, tokens, width, random_window(subject), false);
}

void RandomOperations::trim(Subject& subject) {
  const int n = pick(0, 9) == 0 ? pick(0, 500) : pick(0, 6);
  if (!subject.is_batch) {
    int wanted = n;
    for (const auto& rows : subject.parts) {
      TokenModel model = rows[0];
      wanted = std::min(wanted, model.trim(n));
    }
    ASSERT_EQ(subject.cache->trim(n), wanted);
    for (auto& rows : subject.parts) rows[0].forget(wanted);
    return;
  }
  const bool trimmable = subject.cache->is_trimmable();
  const int trimmed = subject.cache->trim(n);
  if (!trimmable) {
    ASSERT_EQ(trimmed, 0);
  }
  ASSERT_LE(trimmed, n);
  // Columns go from every row; there are at least as many as the longest row has tokens.
  for (auto& rows : subject.parts) {
    for (TokenModel& row : rows) {
      if (trimmable) {
        ASSERT_TRUE(row.is_trimmable());
        ASSERT_GE(trimmed, std::min(n, row.offset()));
      }
      row.forget(trimmed);
    }
  }
}

void RandomOperations::reload(Subject& subject) {
  auto restored = cache_from_state(subject.cache->class_name(),
                                   pick(0, 1) == 0 ? subject.cache->state() : subject.cache->saved_state());
  restored->set_extra_state(subject.cache->extra_state());
  subject.cache = std::move(restored);
}

void RandomOperations::save_and_load(Subject& subject) {
  PromptCache list;
  list.push_back(subject.cache->fork());
  const std::string file = save_prompt_cache(folder_.file("cache"), list);
  PromptCache loaded = load_prompt_cache(file);
  ASSERT_EQ(loaded[0].class_name(), subject.cache->class_name());
  subject.cache = loaded[0].fork();
}

void RandomOperations::quantize(Subject& subject) {
  const bool dense = subject.cache->class_name().find("Quantized") == std::string::npos;
  if (!family_.batches || subject.parts.size() > 1) return;
  const int bits[] = {2, 3, 4, 5, 6, 8};
  subject.cache = dense ? subject.cache->to_quantized(32, bits[pick(0, 5)]) : subject.cache->to_dequantized();
}

void RandomOperations::check_all(Subject& subject) {
  std::vector<int> positions = subject.cache->positions();
  const auto& rows = subject.parts.front();
  if (subject.parts.size() == 1) {
    ASSERT_EQ(positions.size(), rows.size());
    for (std::size_t b = 0; b < rows.size(); ++b) ASSERT_EQ(positions[b], rows[b].offset());
  }
  if (!subject.is_batch) {
    int length = 0, most = 1 << 30;
    bool trimmable = true;
    for (const auto& part_rows : subject.parts) {
      length = std::max(length, part_rows[0].length());
      most = std::min(most, part_rows[0].max_trim());
      trimmable = trimmable && part_rows[0].is_trimmable();
    }
    ASSERT_EQ(subject.cache->length(), length);
    ASSERT_EQ(subject.cache->max_trim(), trimmable ? most : 0);
    ASSERT_EQ(subject.cache->is_trimmable(), trimmable);
  }
  PromptCache list;
  list.push_back(subject.cache->fork());
  ASSERT_NO_THROW(check_prompt_cache(list));
  for (int row = 0; subject.is_batch && row < subject.num_rows(); ++row) {
    Subject single = extracted(subject, row);
    ASSERT_NO_FATAL_FAILURE(check_retained(single));
  }
}

void RandomOperations::refuse(Subject& subject) {
  if (subject.num_rows() == 0) return;
  EXPECT_THROW(subject.cache->trim(-1), Error);
  AttentionCache& cache = part(*subject.cache, 0);
  const mx::array wrong = mx::zeros({subject.num_rows(), 1, 1, kHeadSize + 1});
  EXPECT_THROW(cache.update_and_fetch(wrong, mx::zeros({subject.num_rows(), 1, 2, 2 * kHeadSize})), Error);
  if (BatchedCache* batch = batched(*subject.cache); batch && subject.is_batch) {
    EXPECT_THROW(batch->filter({subject.num_rows()}), Error);
    EXPECT_THROW(batch->extract(-1), Error);
    EXPECT_THROW(batch->extend(KVCache()), Error);
  }
}

void RandomOperations::batch_operation(Subject& subject, int choice) {
  if (!family_.batches) return;
  if (!subject.is_batch) {
    if (choice < 90) merge();
    return;
  }
  BatchedCache& batch = *batched(*subject.cache);
  ASSERT_EQ(batch.batch_size(), subject.num_rows());
  if (choice < 85) {
    extend(subject);
  } else if (choice < 89) {
    filter(subject);
  } else if (choice < 94) {
    if (subject.num_rows() == 0) return;
    Subject single = extracted(subject, pick(0, subject.num_rows() - 1));
    check_retained(single);
    add(std::move(single));
  } else {
    padded_prompt(subject);
  }
}

void RandomOperations::check_retained(Subject& single) {
  for (std::size_t p = 0; p < single.parts.size(); ++p) {
    AttentionCache& cache = part(*single.cache, p);
    const std::vector<int> wanted = single.parts[p][0].retained();
    if (cache.empty()) {
      ASSERT_TRUE(wanted.empty());
      continue;
    }
    std::vector<int> got;
    const auto keys = shown_keys(cache.keys_and_values());
    for (const float token : keys.at(0)) got.push_back(static_cast<int>(token));
    std::sort(got.begin(), got.end());
    // A ring may hold more: the oldest column, which the next token takes, and a long chunk until the next update.
    const bool is_ring = family_.parts[p].kind == CacheKind::ring;
    ASSERT_TRUE(is_ring ? std::includes(got.begin(), got.end(), wanted.begin(), wanted.end()) : got == wanted)
        << cache.class_name();
  }
}

void RandomOperations::merge() {
  std::map<std::string, std::vector<const Subject*>> singles;
  for (const Subject& subject : subjects_) {
    if (!subject.is_batch) singles[form(*subject.cache)].push_back(&subject);
  }
  if (singles.empty()) return;
  auto group = singles.begin();
  std::advance(group, pick(0, static_cast<int>(singles.size()) - 1));
  std::vector<const LayerCache*> caches;
  Subject batch{nullptr, true, std::vector<std::vector<TokenModel>>(family_.parts.size())};
  for (int i = pick(1, 3); i > 0; --i) {
    const auto at = static_cast<std::size_t>(pick(0, static_cast<int>(group->second.size()) - 1));
    const Subject& source = *group->second[at];
    caches.push_back(source.cache.get());
    for (std::size_t p = 0; p < batch.parts.size(); ++p) batch.parts[p].push_back(source.parts[p][0]);
  }
  batch.cache = merge_caches(caches);
  add(std::move(batch));
}

void RandomOperations::extend(Subject& subject) {
  for (const Subject& other : subjects_) {
    if (!other.is_batch || form(*other.cache) != form(*subject.cache)) continue;
    if (other.num_rows() + subject.num_rows() > kMaxRows || pick(0, 1) == 0) continue;
    const auto parts = other.parts;  // `other` may be `subject`
    const auto cache = other.cache->fork();
    batched(*subject.cache)->extend(*cache);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      subject.parts[p].insert(subject.parts[p].end(), parts[p].begin(), parts[p].end());
    }
    return;
  }
}

void RandomOperations::filter(Subject& subject) {
  std::vector<int> rows;
  const int count =
      pick(0, 9) == 0 || subject.num_rows() == 0 ? 0 : pick(1, std::min(kMaxRows, subject.num_rows() + 1));
  for (int i = 0; i < count; ++i) rows.push_back(pick(0, subject.num_rows() - 1));
  batched(*subject.cache)->filter(rows);
  for (auto& part_rows : subject.parts) part_rows = chosen(part_rows, rows);
}

void RandomOperations::remember(const KeysValues& seen) {
  const mx::array& array =
      std::holds_alternative<DenseKV>(seen) ? std::get<DenseKV>(seen).keys : std::get<QuantizedKV>(seen).keys.packed;
  mx::array copy = mx::copy(mx::contiguous(array));
  copy.eval();
  remembered_.push_back({array, copy});
  if (remembered_.size() > 4) recall();
}

void RandomOperations::recall() {
  for (const Remembered& memory : remembered_) ASSERT_TRUE(identical(mx::contiguous(memory.array), memory.copy));
  remembered_.clear();
}

}  // namespace reprise::cache_test
