#include "tests/generate/reuse_checks.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <stdexcept>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/cache/prompt_cache_file.h"

namespace reprise::test {

namespace mx = mlx::core;
namespace fs = std::filesystem;

namespace {

constexpr int kHistory = 40;  // tokens; more than three windows of any model of the kit
const std::vector<int> kPieces = {13, 1, 8, 1, 1, 1, 9, 6};

// Ids that look random, the same at every run.
Tokens ids_for(const LanguageModel& model, int count, unsigned seed) {
  Tokens ids;
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525U + 1013904223U;
    ids.push_back(static_cast<TokenId>((seed >> 8U) % static_cast<unsigned>(model.info().vocab_size)));
  }
  return ids;
}

std::span<const TokenId> part(const Tokens& ids, int begin, int end) {
  return std::span(ids).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
}

// All that a cache holds, copied out of MLX: what a later write into a shared buffer would change.
std::vector<std::string> bits_of(const State& state) {
  std::vector<std::string> bits;
  if (const auto* array = state.as_array()) {
    const mx::array plain = mx::contiguous(*array);
    mx::eval(plain);
    std::ostringstream text;
    text << plain.dtype() << plain.shape();
    bits.push_back(text.str() + std::string(plain.data<char>(), plain.nbytes()));
  } else if (const auto* list = state.as_list()) {
    for (const State& item : *list) {
      for (auto& text : bits_of(item)) bits.push_back(std::move(text));
    }
  } else if (const auto* number = state.as_int()) {
    bits.push_back(std::to_string(*number));
  } else if (const auto* name = state.as_string()) {
    bits.push_back(*name);
  }
  return bits;
}

std::vector<std::string> bits_of(const PromptCache& cache) {
  std::vector<std::string> bits;
  for (std::size_t i = 0; i < cache.size(); ++i) {
    bits.push_back(cache[i].class_name());
    for (auto& text : bits_of(cache[i].saved_state())) bits.push_back(std::move(text));
  }
  return bits;
}

std::vector<int> columns_first_pieces(int left) { return {3, left}; }

mx::array row(std::span<const TokenId> ids) {
  return mx::array(ids.data(), {1, static_cast<int>(ids.size())}, mx::int32);
}

// Answers to one token, and to two more.
mx::array probe(const LanguageModel& model, const PromptCache& cache) {
  const Tokens ids = ids_for(model, 3, 99);
  PromptCache fork = cache.fork();
  const mx::array first = model.forward(row(part(ids, 0, 1)), fork);
  const mx::array logits = mx::concatenate({first, model.forward(row(part(ids, 1, 3)), fork)}, 1);
  mx::eval(logits);
  return mx::astype(logits, mx::float32);
}

void quantize(PromptCache& cache, const KVCacheOptions& kv) {
  if (kv.kv_bits) maybe_quantize_kv_cache(cache, kv.quantized_kv_start, kv.kv_group_size, *kv.kv_bits);
}

bool depends_on_pieces(const KVCacheOptions& kv) { return kv.kv_bits || kv.max_kv_size; }

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

class CacheChecks {
 public:
  CacheChecks(const LanguageModel& model, const ReuseSetting& setting, const ReportOutcome& report)
      : model_(model),
        setting_(setting),
        report_(report),
        history_(ids_for(model, kHistory, 7)),
        tail_(ids_for(model, 7, 1234)),
        other_tail_(ids_for(model, 9, 4321)) {
    if (tail_[0] == other_tail_[0]) tail_[0] = (tail_[0] + 1) % model.info().vocab_size;
  }

  void run() {
    check("whole", [this] { expect_cold(after_history(), "the history"); });
    check("fork", [this] { fork(); });
    check("file", [this] { file(); });
    for (const int n : {1, 2, 5, 11, 26, 39}) check("trim " + std::to_string(n), [this, n] { trim(n); });
    for (const int at : {5, 30, 39}) check("edit at " + std::to_string(at), [this, at] { edit(at, nullptr); });
    for (const int at : {0, 1, 12, 13, 14, 21, 23, 30, 33, 40}) {
      check("edit at " + std::to_string(at) + " with snapshots", [this, at] { edit(at, &snapshots_); });
    }
    check("edit twice", [this] { edit_twice(); });
    // Rows of a batch are all quantised or none.
    if (!setting_.kv.kv_bits || setting_.kv.quantized_kv_start == 0) check("rows", [this] { rows(); });
  }

 private:
  void check(const std::string& name, const std::function<void()>& what) {
    KitOutcome outcome{setting_.name + ": " + name, "", 0};
    error_ = 0;
    try {
      what();
    } catch (const std::exception& error) {
      outcome.failure = error.what();
    }
    outcome.error = error_;
    report_(outcome);
  }

  RecordedCache empty() const { return {make_prompt_cache(model_, setting_.kv.max_kv_size), {}, {}}; }

  void feed(RecordedCache& cache, std::span<const TokenId> ids, const std::vector<int>& pieces) const {
    feed_recorded(model_, cache, ids, pieces, setting_.kv);
  }

  // The history in its pieces, with a snapshot after each.
  const RecordedCache& after_history() {
    if (history_cache_.tokens.empty()) {
      RecordedCache cache = empty();
      int at = 0;
      for (const int piece : kPieces) {
        feed(cache, part(history_, at, at + piece), {piece});
        at += piece;
        snapshots_.take(cache.cache, at);
        bits_at_[at] = bits_of(cache.cache);
      }
      history_cache_ = std::move(cache);
    }
    return history_cache_;
  }

  void expect_cold(const RecordedCache& warm, const std::string& what) {
    check_positions(warm);
    const double error = distance_from_cold(model_, warm, setting_.kv);
    const double tolerance = reuse_tolerance(model_, setting_.kv);
    error_ = std::max(error_, error);
    if (!(error <= tolerance)) {
      std::ostringstream text;
      text << what << " (" << warm.tokens.size() << " tokens) is off by " << error << ", allowed " << tolerance;
      throw std::runtime_error(text.str());
    }
  }

  static void check_positions(const RecordedCache& warm) {
    const bool known = [&] {
      for (std::size_t i = 0; i < warm.cache.size(); ++i) {
        if (warm.cache[i].position()) return true;
      }
      return false;
    }();
    if (known) check_prompt_cache(warm.cache, static_cast<int>(warm.tokens.size()));
  }

  void fork() {
    const auto before = bits_of(after_history().cache);
    RecordedCache first = after_history().fork();
    RecordedCache second = after_history().fork();
    require(bits_of(first.cache) == before, "a fork holds something else than what it was made of");
    feed(first, tail_, {1, 1, 5});
    feed(second, other_tail_, {4, 1, 4});
    require(bits_of(after_history().cache) == before, "a fork's writes came to what it was made of");
    expect_cold(first, "a fork");
    expect_cold(second, "the other fork");
    expect_cold(after_history(), "what was forked");
  }

  void file() {
    const fs::path path = fs::temp_directory_path() / ("reuse_" + std::to_string(::getpid()) + ".safetensors");
    save_prompt_cache(path.string(), after_history().cache);
    RecordedCache loaded{load_prompt_cache(path.string()), history_, after_history().pieces};
    fs::remove(path);
    require(bits_of(loaded.cache) == bits_of(after_history().cache),
            "a loaded cache is not bit for bit what was saved");
    RecordedCache kept = after_history().fork();
    feed(loaded, tail_, {2, 1, 4});
    feed(kept, tail_, {2, 1, 4});
    require(bits_of(loaded.cache) == bits_of(kept.cache), "a loaded cache goes on with other bits than the live one");
    expect_cold(loaded, "a loaded cache");
  }

  // As far as the layers allow; what remains must be all that the shorter history needs.
  void trim(int n) {
    RecordedCache cache = after_history().fork();
    const bool can = can_trim_prompt_cache(cache.cache, n);
    const int trimmed = trim_prompt_cache(cache.cache, n);
    require(!can || trimmed == n, "trimmed " + std::to_string(trimmed) + " of " + std::to_string(n) + " tokens");
    if (keeps_all_rows(cache.cache)) require(trimmed == n, "layers that keep all rows do not trim");
    cache.tokens.resize(history_.size() - static_cast<std::size_t>(trimmed));
    cache.pieces = pieces_up_to(static_cast<int>(cache.tokens.size()));
    expect_cold(cache, "a trimmed cache");
    feed(cache, tail_, {5, 2});
    expect_cold(cache, "a trimmed cache that went on");
  }

  static std::vector<int> pieces_up_to(int size) {
    std::vector<int> pieces;
    for (const int piece : kPieces) {
      if (size == 0) break;
      pieces.push_back(std::min(size, piece));
      size -= pieces.back();
    }
    return pieces;
  }

  // Another continuation from `at` on: what undo and edit do.
  void edit(int at, const Snapshots* snapshots) {
    RecordedCache cache = after_history().fork();
    Snapshots points = snapshots_.fork();
    Tokens ids(history_.begin(), history_.begin() + at);
    ids.insert(ids.end(), other_tail_.begin(), other_tail_.end());
    if (at < kHistory && ids[static_cast<std::size_t>(at)] == history_[static_cast<std::size_t>(at)]) {
      ids[static_cast<std::size_t>(at)] = (ids[static_cast<std::size_t>(at)] + 1) % model_.info().vocab_size;
    }
    const auto positions = points.positions();
    keep_common_prefix(model_, cache, ids, setting_.kv, snapshots != nullptr ? &points : nullptr);
    const auto kept = static_cast<int>(cache.tokens.size());
    require(kept <= at, "more is kept than is shared");
    require(std::equal(cache.tokens.begin(), cache.tokens.end(), ids.begin()), "the record is no prefix of the ids");
    if (keeps_all_rows(after_history().cache)) require(kept == at, "kept " + std::to_string(kept) + " rows");
    if (snapshots != nullptr) {
      for (const int position : positions) require(position > at || position <= kept, "a snapshot was passed over");
      if (kept > 0 && kept < kHistory && bits_at_.contains(kept) && !keeps_all_rows(cache.cache) &&
          !setting_.kv.kv_bits) {
        require(bits_of(cache.cache) == bits_at_[kept], "a snapshot came back with other bits");
      }
    }
    check_positions(cache);
    feed(cache, std::span(ids).subspan(cache.tokens.size()), columns_first_pieces(static_cast<int>(ids.size())));
    expect_cold(cache, "an edited history, " + std::to_string(kept) + " kept");
    require(bits_of(after_history().cache) == bits_at_[kHistory], "the edit came to what it was forked from");
  }

  void edit_twice() {
    RecordedCache cache = after_history().fork();
    Snapshots points = snapshots_.fork();
    for (const int at : {23, 14, 30}) {
      Tokens ids(cache.tokens.begin(), cache.tokens.begin() + std::min<int>(at, static_cast<int>(cache.tokens.size())));
      const Tokens& tail = at == 14 ? tail_ : other_tail_;
      ids.insert(ids.end(), tail.begin(), tail.end());
      keep_common_prefix(model_, cache, ids, setting_.kv, &points);
      feed(cache, std::span(ids).subspan(cache.tokens.size()), {2, 1, kHistory});
      points.take(cache.cache, static_cast<int>(cache.tokens.size()));
      expect_cold(cache, "a history edited at " + std::to_string(at));
    }
  }

  // Sequences that become rows of a batch and come back out.
  void rows() {
    std::vector<RecordedCache> alone;
    std::vector<const PromptCache*> members;
    for (const auto& [begin, end] : {std::pair{0, 9}, {3, 7}, {10, 33}}) {
      alone.push_back(empty());
      feed(alone.back(), part(history_, begin, end), {6, 1, kHistory});
    }
    for (const auto& cache : alone) members.push_back(&cache.cache);
    PromptCache batch = merge_prompt_caches(members);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      const PromptCache back = extract_prompt_cache(batch, static_cast<int>(i));
      const auto want = probe(model_, alone[i].cache);
      const auto text = difference("row " + std::to_string(i), probe(model_, back), want, 1e-6, &error_);
      require(text.empty(), "merged and extracted, " + text);
    }
    for (int step = 0; step < 3; ++step) {
      Tokens ids;
      for (std::size_t i = 0; i < alone.size(); ++i) {
        ids.push_back(tail_[static_cast<std::size_t>(step) + i]);
        alone[i].tokens.push_back(ids.back());
        alone[i].pieces.push_back(1);
      }
      mx::eval(model_.forward(mx::reshape(row(ids), {static_cast<int>(ids.size()), 1}), batch));
      quantize(batch, setting_.kv);
    }
    for (std::size_t i = 0; i < alone.size(); ++i) {
      alone[i].cache = extract_prompt_cache(batch, static_cast<int>(i));
      expect_cold(alone[i], "row " + std::to_string(i) + ", extracted");
      feed(alone[i], other_tail_, {1, 4, 4});
      expect_cold(alone[i], "row " + std::to_string(i) + ", extracted and gone on");
    }
  }

  const LanguageModel& model_;
  const ReuseSetting& setting_;
  const ReportOutcome& report_;
  Tokens history_;
  Tokens tail_;
  Tokens other_tail_;
  RecordedCache history_cache_;
  Snapshots snapshots_;
  std::map<int, std::vector<std::string>> bits_at_;
  double error_ = 0;
};

}  // namespace

std::vector<ReuseSetting> reuse_settings() {
  return {
      {"own caches", {}},
      {"max_kv_size 16", {.max_kv_size = 16}},
      {"8 bits", {.kv_bits = 8, .kv_group_size = 32, .quantized_kv_start = 0}},
      {"4 bits", {.kv_bits = 4, .kv_group_size = 32, .quantized_kv_start = 0}},
      {"8 bits from 10", {.kv_bits = 8, .kv_group_size = 32, .quantized_kv_start = 10}},
      {"max_kv_size 16, 8 bits", {.max_kv_size = 16, .kv_bits = 8, .kv_group_size = 32, .quantized_kv_start = 0}},
  };
}

double reuse_tolerance(const LanguageModel& model, const KVCacheOptions& kv) {
  // Rows whose first piece was attended to before it was quantised, beside rows that were always quantised: the kit's
  // models are off by up to 2.3e-2 there at 8 bits.
  const double stored = !kv.kv_bits ? 0 : *kv.kv_bits >= 8 ? 4e-2 : 0.25;
  return std::max(stored, model.info().quantization == "none" ? 1e-4 : 2e-3);
}

void feed_recorded(const LanguageModel& model, RecordedCache& cache, std::span<const TokenId> ids,
                   const std::vector<int>& pieces, const KVCacheOptions& kv) {
  for (const int piece : pieces) {
    const auto now = ids.first(std::min(static_cast<std::size_t>(piece), ids.size()));
    if (now.empty()) return;
    model.forward(row(now), cache.cache);
    quantize(cache.cache, kv);
    cache.cache.eval();
    cache.tokens.insert(cache.tokens.end(), now.begin(), now.end());
    cache.pieces.push_back(static_cast<int>(now.size()));
    ids = ids.subspan(now.size());
  }
  require(ids.empty(), "pieces are fewer than ids");
}

double distance_from_cold(const LanguageModel& model, const RecordedCache& warm, const KVCacheOptions& kv) {
  RecordedCache cold{make_prompt_cache(model, kv.max_kv_size), {}, {}};
  const std::vector<int> whole = {static_cast<int>(warm.tokens.size())};
  feed_recorded(model, cold, warm.tokens, depends_on_pieces(kv) ? warm.pieces : whole, kv);
  // A history that was longer once may have been quantised where this one is not yet.
  if (kv.kv_bits) {
    PromptCache quantized = cold.cache.fork();
    maybe_quantize_kv_cache(quantized, 0, kv.kv_group_size, *kv.kv_bits);
    for (std::size_t i = 0; i < quantized.size(); ++i) {
      if (describe_cache(quantized[i]) == describe_cache(warm.cache[i])) cold.cache.replace(i, quantized[i].fork());
    }
  }
  for (std::size_t i = 0; i < cold.cache.size(); ++i) {
    require(describe_cache(cold.cache[i]) == describe_cache(warm.cache[i]),
            "layer " + std::to_string(i) + " is a " + describe_cache(warm.cache[i]) + ", cold a " +
                describe_cache(cold.cache[i]));
  }
  const mx::array got = probe(model, warm.cache);
  const mx::array want = probe(model, cold.cache);
  return relative_error(got, want);
}

void check_reuse_of_caches(const LanguageModel& model, const ReuseSetting& setting, const ReportOutcome& report) {
  CacheChecks(model, setting, report).run();
}

}  // namespace reprise::test
