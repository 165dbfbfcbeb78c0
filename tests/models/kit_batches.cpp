// A batch's rows must give what each gives alone, in whatever way the batch came about.
#include <algorithm>
#include <stdexcept>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"
#include "tests/models/kit_checks.h"

namespace reprise::test {

namespace mx = mlx::core;

namespace {

using Rows = std::vector<std::vector<int>>;

constexpr int kFiller = 1;  // in padding columns; what it is must not matter

std::vector<int> range(int begin, int end) {
  std::vector<int> numbers;
  for (int i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

int length_of(const std::vector<int>& row) { return static_cast<int>(row.size()); }

Rows columns(const Rows& rows, int begin, int end) {
  Rows part;
  for (const auto& row : rows) part.emplace_back(row.begin() + begin, row.begin() + end);
  return part;
}

std::unique_ptr<LayerCache> left_padded_layer(const LayerCache& layer, const std::vector<int>& padding) {
  if (const auto* list = dynamic_cast<const CacheList*>(&layer)) {
    CacheList::Children children;
    for (std::size_t i = 0; i < list->num_children(); ++i) {
      children.push_back(left_padded_layer(list->child(i), padding));
    }
    return std::make_unique<CacheList>(std::move(children));
  }
  if (const auto* arrays = dynamic_cast<const ArraysCache*>(&layer)) {
    return std::make_unique<ArraysCache>(arrays->num_slots(), padding);
  }
  if (const auto* ring = dynamic_cast<const RotatingKVCache*>(&layer)) {
    return std::make_unique<BatchRotatingKVCache>(ring->max_size(), padding, ring->keep());
  }
  if (layer.class_name() == KVCache::kClassName) return std::make_unique<BatchKVCache>(padding);
  // Of other classes an empty batch that is prepared so is the only way.
  auto batch = merge_caches(std::vector<const LayerCache*>(padding.size(), &layer));
  batched(*batch)->prepare({.left_padding = padding});
  return batch;
}

// One batch on its way: which rows of the kit it holds, and what they have given.
class BatchRun {
 public:
  BatchRun(const LanguageModel& model, const KitModel& kit, const KitBatch& batch, double tolerance)
      : model_(model),
        last_logits_(kit.array(batch.last_logits)),
        decode_(kit.array(batch.decode)),
        batch_(batch),
        tolerance_(tolerance),
        steps_(batch.rows.size(), 0) {
    num_steps_ = static_cast<int>(batch.tokens.at(0).size()) - 1;
  }

  double error = 0;

  int num_steps() const { return num_steps_; }
  std::vector<int> all_rows() const { return range(0, static_cast<int>(batch_.rows.size())); }

  // Prompts after filler, in pieces of `piece` columns.
  PromptCache left_padded(const std::vector<int>& rows, int piece) {
    const int width = width_of(rows);
    std::vector<int> padding;
    Rows ids;
    for (const int row : rows) {
      padding.push_back(width - length_of(prompt(row)));
      ids.emplace_back(static_cast<std::size_t>(padding.back()), kFiller);
      ids.back().insert(ids.back().end(), prompt(row).begin(), prompt(row).end());
    }
    PromptCache cache;
    const PromptCache own = model_.make_cache();
    for (std::size_t i = 0; i < own.size(); ++i) cache.push_back(left_padded_layer(own[i], padding));
    for (int at = 0; at < width; at += piece) {
      const int end = std::min(width, at + piece);
      const mx::array logits = feed(model_, columns(ids, at, end), cache);
      if (end == width) expect_last(rows, std::vector<int>(rows.size(), end - at - 1), logits);
    }
    return cache;
  }

  // `parts` before filler, in pieces of `piece` columns, onto a batch of these rows; `is_end`: prompts end with them.
  void right_padded(const std::vector<int>& rows, PromptCache& cache, const Rows& parts, int piece, bool is_end) {
    int width = 0;
    for (const auto& part : parts) width = std::max(width, length_of(part));
    BatchPrompt padding;
    Rows ids = parts;
    for (auto& row : ids) {
      padding.lengths.push_back(length_of(row));
      padding.right_padding.push_back(width - length_of(row));
      row.resize(static_cast<std::size_t>(width), kFiller);
    }
    prepare_prompt_cache(cache, padding);
    for (int at = 0, end = 0; at < width; at = end) {
      end = width - at <= piece + 1 ? width : at + piece;  // a ring refuses a last column alone
      const mx::array logits = feed(model_, columns(ids, at, end), cache);
      for (std::size_t i = 0; i < rows.size() && is_end; ++i) {
        const int last = padding.lengths[i] - 1;
        if (last >= at && last < end) expect_last_of(rows[i], row_at(logits, static_cast<int>(i), last - at));
      }
    }
    finalize_prompt_cache(cache);
  }

  PromptCache right_padded(const std::vector<int>& rows, int piece) {
    PromptCache cache = empty_batch(rows.size());
    Rows parts;
    for (const int row : rows) parts.push_back(prompt(row));
    right_padded(rows, cache, parts, piece, true);
    return cache;
  }

  // Each prompt in two parts of other lengths than the others', so that the second meets rows of unequal length.
  PromptCache right_padded_twice(const std::vector<int>& rows) {
    PromptCache cache = empty_batch(rows.size());
    Rows first, second;
    for (const int row : rows) {
      const auto middle = prompt(row).begin() + (length_of(prompt(row)) * (row + 1) + 3) / 4;
      first.emplace_back(prompt(row).begin(), middle);
      second.emplace_back(middle, prompt(row).end());
      if (second.back().empty()) {
        second.back().push_back(first.back().back());
        first.back().pop_back();
      }
    }
    right_padded(rows, cache, first, width_of(rows), false);
    right_padded(rows, cache, second, 2, true);
    return cache;
  }

  // A sequence alone, its prompt in pieces.
  PromptCache alone(int row, int piece) {
    PromptCache cache = model_.make_cache();
    const int length = length_of(prompt(row));
    for (int at = 0; at < length; at += piece) {
      const int end = std::min(length, at + piece);
      const mx::array logits = feed(model_, columns({prompt(row)}, at, end), cache);
      if (end == length) expect_last({row}, {end - at - 1}, logits);
    }
    return cache;
  }

  // `steps` decode steps of these rows, each by its own count.
  void decode(const std::vector<int>& rows, PromptCache& cache, int steps) {
    for (int step = 0; step < steps; ++step) {
      Rows ids;
      for (const int row : rows) ids.push_back({token(row)});
      const mx::array logits = feed(model_, ids, cache);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        int& at = steps_[static_cast<std::size_t>(rows[i])];
        expect("row " + std::to_string(rows[i]) + " decode step " + std::to_string(at),
               row_at(logits, static_cast<int>(i), 0), mx::take(mx::take(decode_, at, 0), rows[i], 0));
        ++at;
      }
    }
  }

  // The rows' remaining steps, each alone.
  void finish_alone(int row, PromptCache& cache) {
    decode({row}, cache, num_steps_ - steps_[static_cast<std::size_t>(row)]);
  }

 private:
  const std::vector<int>& prompt(int row) const { return batch_.rows[static_cast<std::size_t>(row)]; }
  int token(int row) const {
    const auto index = static_cast<std::size_t>(row);
    return batch_.tokens[index].at(static_cast<std::size_t>(steps_[index]));
  }
  int width_of(const std::vector<int>& rows) const {
    int width = 0;
    for (const int row : rows) width = std::max(width, length_of(prompt(row)));
    return width;
  }
  PromptCache empty_batch(std::size_t rows) const {
    const PromptCache own = model_.make_cache();
    return merge_prompt_caches(std::vector<const PromptCache*>(rows, &own));
  }
  static mx::array row_at(const mx::array& logits, int row, int column) {
    return mx::take(mx::take(logits, row, 0), column, 0);
  }
  void expect(const std::string& what, const mx::array& got, const mx::array& want) {
    const std::string text = difference(what, got, want, tolerance_, &error);
    if (!text.empty()) throw std::runtime_error(text);
  }
  void expect_last_of(int row, const mx::array& got) {
    expect("row " + std::to_string(row) + " end of prompt", got, mx::take(last_logits_, row, 0));
  }
  void expect_last(const std::vector<int>& rows, const std::vector<int>& at, const mx::array& logits) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      expect_last_of(rows[i], row_at(logits, static_cast<int>(i), at[i]));
    }
  }

  const LanguageModel& model_;
  const mx::array last_logits_;
  const mx::array decode_;
  const KitBatch& batch_;
  double tolerance_;
  std::vector<int> steps_;  // decoded, by row
  int num_steps_;
};

// Rows come and go: one alone, then two more whose prompts were filled together, then the first leaves.
void join_and_leave(BatchRun& run, int piece) {
  PromptCache live = run.right_padded({1}, piece);
  run.decode({1}, live, 2);
  extend_prompt_cache(live, run.right_padded({2, 0}, piece));
  run.decode({1, 2, 0}, live, run.num_steps() - 2);
  filter_prompt_cache(live, {2, 1});  // the first is done; the others change places
  run.decode({0, 2}, live, 1);
  PromptCache back = extract_prompt_cache(live, 0);
  PromptCache other = extract_prompt_cache(live, 1);
  run.finish_alone(0, back);
  run.finish_alone(2, other);
}

// Sequences that ran alone are merged, taken apart, and merged again with another that comes late.
void merge_and_extract(BatchRun& run, int piece) {
  PromptCache first = run.alone(0, piece);
  PromptCache second = run.alone(1, piece);
  run.decode({1}, second, 1);
  PromptCache live = merge_prompt_caches({&first, &second});
  run.decode({0, 1}, live, 2);
  PromptCache left = extract_prompt_cache(live, 1);
  PromptCache third = run.alone(2, piece);
  first = extract_prompt_cache(live, 0);
  live = merge_prompt_caches({&third, &first});
  run.decode({2, 0}, live, 1);
  run.finish_alone(1, left);
  filter_prompt_cache(live, {0});
  run.decode({2}, live, run.num_steps() - 1);
}

struct Way {
  const char* name;
  std::function<void(BatchRun&)> run;
};

std::vector<Way> ways() {
  constexpr int kWhole = 1 << 20;
  const auto then_decode = [](auto prefill) {
    return [prefill](BatchRun& run) {
      PromptCache cache = prefill(run);
      run.decode(run.all_rows(), cache, run.num_steps());
    };
  };
  const auto merged = [](BatchRun& run, int piece) {
    std::vector<PromptCache> caches;
    std::vector<const PromptCache*> rows;
    for (const int row : run.all_rows()) caches.push_back(run.alone(row, piece));
    for (const auto& cache : caches) rows.push_back(&cache);
    return merge_prompt_caches(rows);
  };
  return {
      {"left", then_decode([](BatchRun& run) { return run.left_padded(run.all_rows(), kWhole); })},
      {"left_two_chunks", then_decode([](BatchRun& run) { return run.left_padded(run.all_rows(), 7); })},
      {"right", then_decode([](BatchRun& run) { return run.right_padded(run.all_rows(), kWhole); })},
      {"right_step3", then_decode([](BatchRun& run) { return run.right_padded(run.all_rows(), 3); })},
      {"right_step2", then_decode([](BatchRun& run) { return run.right_padded(run.all_rows(), 2); })},
      {"right_twice", then_decode([](BatchRun& run) { return run.right_padded_twice(run.all_rows()); })},
      {"merge", then_decode([merged](BatchRun& run) { return merged(run, kWhole); })},
      {"merge_step3", then_decode([merged](BatchRun& run) { return merged(run, 3); })},
      {"join", [](BatchRun& run) { join_and_leave(run, kWhole); }},
      {"join_step3", [](BatchRun& run) { join_and_leave(run, 3); }},
      {"extract", [](BatchRun& run) { merge_and_extract(run, kWhole); }},
      {"extract_step3", [](BatchRun& run) { merge_and_extract(run, 3); }},
  };
}

}  // namespace

void check_batches(const LanguageModel& model, const KitModel& kit, const KitMode& mode, const ReportOutcome& report) {
  for (const KitBatch& batch : kit.batches) {
    for (const Way& way : ways()) {
      KitOutcome outcome{batch.id + "/" + way.name, "", 0};
      try {
        BatchRun run(model, kit, batch, allowed(batch.tolerance, mode, model));
        way.run(run);
        outcome.error = run.error;
      } catch (const std::exception& error) {
        outcome.failure = error.what();
      }
      report(outcome);
    }
  }
}

}  // namespace reprise::test
