#include "tests/cache/cache_samples.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/batch_chunked_kv_cache.h"
#include "reprise/cache/batch_kv_cache.h"
#include "reprise/cache/batch_quantized_kv_cache.h"
#include "reprise/cache/batch_rotating_kv_cache.h"
#include "reprise/cache/cache_list.h"
#include "reprise/cache/chunked_kv_cache.h"
#include "reprise/cache/concatenate_kv_cache.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/quantized_kv_cache.h"
#include "reprise/cache/rotating_kv_cache.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

using CachePtr = std::unique_ptr<LayerCache>;
using Step = std::function<void(LayerCache&)>;
using Steps = std::vector<Step>;

constexpr RowShape kShape{.batch = 1, .heads = 2, .key_size = 32, .value_size = 64, .dtype = mx::float32};

mx::array numbers(const mx::Shape& shape, mx::Dtype dtype, std::uint64_t seed) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return mx::zeros(shape, dtype);
  return mx::astype(mx::random::normal(shape, mx::float32, mx::random::key(seed)), dtype);
}

KeysValues update(AttentionCache& cache, int count, const RowShape& shape, std::uint64_t seed) {
  return cache.update_and_fetch(
      numbers({shape.batch, shape.heads, count, shape.key_size}, shape.dtype, 2 * seed),
      numbers({shape.batch, shape.heads, count, shape.value_size}, shape.dtype, 2 * seed + 1));
}

// Updates of so many tokens each.
Step fill(std::vector<int> counts, RowShape shape = kShape) {
  return [=](LayerCache& cache) {
    for (std::size_t i = 0; i < counts.size(); ++i) update(dynamic_cast<AttentionCache&>(cache), counts[i], shape, i);
  };
}

Step trim(int n) {
  return [=](LayerCache& cache) { cache.trim(n); };
}

Step trim_front() {
  return [](LayerCache& cache) { dynamic_cast<FrontTrimmedCache&>(cache).maybe_trim_front(); };
}

Step prepare(BatchPrompt prompt) {
  return [=](LayerCache& cache) { batched(cache)->prepare(prompt); };
}

Step keep_rows(std::vector<int> rows) {
  return [=](LayerCache& cache) { batched(cache)->filter(rows); };
}

Step advance(int count) {
  return [=](LayerCache& cache) { batched(cache)->advance(count); };
}

Step put(int slot, int rows = 1) {
  return [=](LayerCache& cache) {
    dynamic_cast<ArraysCache&>(cache).set(slot, numbers({rows, 3, 5}, mx::bfloat16, static_cast<std::uint64_t>(slot)));
  };
}

std::vector<int> ones(int count) { return std::vector<int>(static_cast<std::size_t>(count), 1); }

template <typename Cache, typename... Args>
std::function<CachePtr()> made(Args... args) {
  return [=]() -> CachePtr { return std::make_unique<Cache>(args...); };
}

RowShape with(mx::Dtype dtype) {
  RowShape shape = kShape;
  shape.dtype = dtype;
  return shape;
}

RowShape with_rows(int batch) {
  RowShape shape = kShape;
  shape.batch = batch;
  return shape;
}

RowShape keys_only(int batch) {
  RowShape shape = with_rows(batch);
  shape.value_size = 0;
  return shape;
}

constexpr const char* kNull = "arrays only, but got null";
constexpr const char* kOwn = "a class that mlx-lm does not have";

class Samples {
 public:
  void add(const std::string& name, const std::function<CachePtr()>& make, const Steps& steps, std::string refusal = "",
           RowShape shape = kShape) {
    samples_.push_back({name, shape,
                        [=] {
                          CachePtr cache = make();
                          for (const Step& step : steps) step(*cache);
                          return cache;
                        },
                        std::move(refusal)});
  }

  // In all the states of a full history.
  void add_growing(const std::string& name, const std::function<CachePtr()>& make) {
    add(name + ", empty", make, {}, kNull);
    for (const int length : {1, 3, 255, 256, 257, 512})
      add(name + " of " + std::to_string(length), make, {fill({length})});
    add(name + ", trimmed", make, {fill({300, 1, 1}), trim(47)});
    add(name + ", trimmed to nothing", make, {fill({5}), trim(5)});
    add(name + " of float16", make, {fill({4, 1}, with(mx::float16))}, "", with(mx::float16));
    add(name + " of bfloat16", make, {fill({4, 1}, with(mx::bfloat16))}, "", with(mx::bfloat16));
    add(name + " of three rows in step", make, {fill({4, 1}, with_rows(3))}, "", with_rows(3));
  }

  void add_ring(const std::string& name, const std::function<CachePtr()>& make, const std::string& own) {
    const auto refused = [&](const char* otherwise) { return own.empty() ? otherwise : own; };
    add(name + ", empty", make, {}, refused(kNull));
    for (const int length : {1, 3, 7, 8, 9, 13}) {
      add(name + " of a chunk of " + std::to_string(length), make, {fill({length})}, own);
      add(name + " of " + std::to_string(length) + " one by one", make, {fill(ones(length))}, own);
    }
    add(name + ", oversize and on", make, {fill({13, 1, 1})}, own);
    add(name + ", mixed", make, {fill({6, 1, 1, 1, 5, 1})}, own);
    add(name + ", trimmed", make, {fill({5, 1}), trim(2)}, own);
    add(name + ", trimmed to nothing", make, {fill({5}), trim(5)}, own);
    add(name + " of float16", make, {fill({4, 1, 5}, with(mx::float16))}, own, with(mx::float16));
    add(name + " of bfloat16", make, {fill({4, 1, 5}, with(mx::bfloat16))}, own, with(mx::bfloat16));
  }

  void add_batch(const std::string& name, const std::function<CachePtr()>& make, const std::string& own,
                 const std::string& pending) {
    const auto refused = [&](const std::string& otherwise) { return own.empty() ? otherwise : own; };
    const RowShape three = with_rows(3);
    add(name + ", empty", make, {}, refused(kNull), three);
    for (const int more : {0, 1, 4, 9})
      add(name + " and " + std::to_string(more), make, {fill({4}, three), fill(ones(more), three)}, own, three);
    add(name + ", oversize", make, {fill({13}, three)}, own, three);
    add(name + ", filtered", make, {fill({4, 1}, three), keep_rows({2, 0})}, own, with_rows(2));
    add(name + " without rows", make, {fill({4, 1}, three), keep_rows({})}, own, with_rows(0));
    add(name + ", announced", make, {prepare({.lengths = {2, 4, 1}, .right_padding = {2, 0, 3}})}, refused(pending),
        three);
    add(name + " with right padding", make,
        {prepare({.lengths = {2, 4, 1}, .right_padding = {2, 0, 3}}), fill({4}, three)}, refused(pending), three);
    add(name + " with right padding after more", make,
        {fill({5, 1, 1, 1, 1}, three), prepare({.lengths = {2, 4, 1}, .right_padding = {2, 0, 3}}), fill({4}, three)},
        refused(pending), three);
    add(name + ", trimmed", make, {fill({4, 1}, three), trim(3)}, own, three);
    add(name + ", trimmed to nothing", make, {fill({4}, three), trim(4)}, own, three);
  }

  // Models that pick what to attend to by keys alone store values without features.
  void add_keys_only() {
    const RowShape one = keys_only(1), three = keys_only(3);
    add("KVCache of keys only", made<KVCache>(), {fill({5, 1}, one)}, "", one);
    add("ConcatenateKVCache of keys only", made<ConcatenateKVCache>(), {fill({5, 1}, one)}, "", one);
    add("ChunkedKVCache of keys only", made<ChunkedKVCache>(4), {fill({5, 1}, one), trim_front()}, "", one);
    add("RotatingKVCache of keys only", made<RotatingKVCache>(8), {fill({6, 1, 1, 1, 5, 1}, one)}, "", one);
    const std::vector<int> padding = {1, 0, 3};
    add("BatchKVCache of keys only", made<BatchKVCache>(padding), {fill({4, 1}, three), keep_rows({2, 0, 1})}, "",
        three);
    add("BatchRotatingKVCache of keys only", made<BatchRotatingKVCache>(8, padding), {fill({4, 9, 1}, three)}, "",
        three);
  }

  void add_arrays() {
    const auto two = made<ArraysCache>(2);
    add("ArraysCache, unset", two, {}, kNull);
    add("ArraysCache", two, {put(0), put(1)});
    add("ArraysCache, first unset", two, {put(1)}, kNull);
    add("MambaCache", made<MambaCache>(), {put(0), put(1)});
    add("ArraysCache with left padding", made<ArraysCache>(2, std::vector<int>{1, 0}), {put(0, 2), put(1, 2)}, "item 1",
        with_rows(2));
    add("ArraysCache with lengths", two, {put(0, 2), put(1, 2), prepare({.lengths = {3, 1}}), advance(2)}, "item 2",
        with_rows(2));
    add("ArraysCache with both, unset", made<ArraysCache>(3, std::vector<int>{1, 0}), {prepare({.lengths = {3, 1}})},
        kNull, with_rows(2));
    add("ArraysCache without rows", two, {put(0, 2), put(1, 2), keep_rows({})}, "", with_rows(0));
    add("ArraysCache of unset rows", made<ArraysCache>(2, std::vector<int>{1, 0}),
        {[](LayerCache& cache) { batched(cache)->finalize(); }}, "rows", with_rows(2));
  }

  void add_lists() {
    add("CacheList",
        [] {
          auto list = std::make_unique<CacheList>(std::make_unique<KVCache>(), std::make_unique<RotatingKVCache>(8, 4));
          fill({5, 1})(list->child(0)), fill({5, 1})(list->child(1));
          return list;
        },
        {});
    add(
        "CacheList, nested",
        [] {
          auto inner = std::make_unique<CacheList>(std::make_unique<ArraysCache>(2), std::make_unique<KVCache>());
          put(0)(inner->child(0)), put(1)(inner->child(0)), fill({3})(inner->child(1));
          return std::make_unique<CacheList>(std::move(inner), std::make_unique<MambaCache>());
        },
        {}, kNull);
    add(
        "CacheList of what leaves no trace",
        [] {
          return std::make_unique<CacheList>(
              std::make_unique<CacheList>(), std::make_unique<ArraysCache>(0), std::make_unique<ConcatenateKVCache>(),
              std::make_unique<CacheList>(std::make_unique<ConcatenateKVCache>(), std::make_unique<CacheList>()));
        },
        {}, "a list without children");
    add(
        "CacheList of own classes",
        [] {
          auto inner = std::make_unique<CacheList>(RotatingKVCache(8, 4).to_quantized(32, 4));
          fill({5, 1})(inner->child(0));
          return std::make_unique<CacheList>(std::make_unique<ArraysCache>(1), std::move(inner));
        },
        {}, kOwn);
    add(
        "CacheList of batches",
        [] {
          const std::vector<int> padding = {1, 0, 3};
          auto inner = std::make_unique<CacheList>(std::make_unique<BatchKVCache>(padding));
          auto list = std::make_unique<CacheList>(std::move(inner), std::make_unique<ArraysCache>(1, padding));
          list->prepare({.lengths = {2, 4, 1}, .right_padding = {2, 0, 3}});
          fill({4}, with_rows(3))(dynamic_cast<CacheList&>(list->child(0)).child(0));
          return list;
        },
        {}, "right_padding", with_rows(3));
  }

  // Rows of rings that keep, merged: the sinks' layout is the batch's own.
  void add_merged_rings(const std::string& name, const std::vector<int>& lengths, const std::string& refusal,
                        const std::function<CachePtr()>& ring) {
    const int rows = static_cast<int>(lengths.size());
    const auto merged = [=]() -> CachePtr {
      std::vector<CachePtr> rings;
      std::vector<const LayerCache*> pointers;
      for (const int length : lengths) {
        rings.push_back(ring());
        if (length > 0) fill(length > 8 ? ones(length) : std::vector<int>{length})(*rings.back());
        pointers.push_back(rings.back().get());
      }
      return merge_caches(pointers);
    };
    add(name, merged, {}, refusal, with_rows(rows));
    add(name + " and on", merged, {fill({3, 1, 1}, with_rows(rows))}, refusal, with_rows(rows));
    add(name + ", filtered", merged, {fill({1}, with_rows(rows)), keep_rows({rows - 1, 0})}, refusal, with_rows(2));
  }

  std::vector<CacheSample> take() { return std::move(samples_); }

 private:
  std::vector<CacheSample> samples_;
};

State mask_state(const Mask& mask) {
  if (const auto* array = std::get_if<mx::array>(&mask)) return State(*array);
  return State(std::holds_alternative<Causal>(mask) ? "causal" : "none");
}

State rows_state(const KeysValues& rows) {
  if (const auto* dense = std::get_if<DenseKV>(&rows)) return State(State::List{dense->keys, dense->values});
  State::List tensors;
  for (const auto* triple : {&std::get<QuantizedKV>(rows).keys, &std::get<QuantizedKV>(rows).values}) {
    for (const mx::array& tensor : {triple->packed, triple->scales, triple->biases}) tensors.push_back(State(tensor));
  }
  return State(std::move(tensors));
}

State answer_of(const std::function<State()>& call) {
  try {
    return call();
  } catch (const Error& error) {
    return State(std::string(error.what()));
  }
}

State extra_of(const LayerCache& cache) {
  State::List members;
  for (const auto& [name, value] : cache.extra_state()) {
    members.push_back(State(name));
    if (const auto* number = std::get_if<std::int64_t>(&value)) {
      members.push_back(State(*number));
    } else {
      for (const int item : std::get<std::vector<int>>(value)) members.push_back(State(item));
    }
  }
  return State(std::move(members));
}

State answers(const LayerCache& cache) {
  State::List out = {State(cache.class_name()),     State(cache.length()),   State(cache.size()),
                     State(cache.empty()),          State(cache.max_trim()), State(cache.is_trimmable()),
                     State(cache.keeps_all_rows()), cache.saved_state(),     extra_of(cache)};
  for (const int position : cache.positions()) out.push_back(State(position));
  return State(std::move(out));
}

// Parts of a batch, or a batch of the single cache.
void split_or_join(const LayerCache& cache, const RowShape& shape, State::List& out) {
  if (const auto* batch = batched(cache)) {
    out.push_back(State(batch->batch_size()));
    for (int row = 0; row < batch->batch_size(); ++row) {
      out.push_back(answer_of([&] { return answers(*batch->extract(row)); }));
    }
  }
  if (shape.batch == 1) out.push_back(answer_of([&] { return answers(*merge_caches({&cache, &cache})); }));
}

void go_on_attention(AttentionCache& cache, const RowShape& shape, State::List& out) {
  std::uint64_t seed = 100;
  for (const int count : {3, 1, 1}) {
    if (auto* chunked = dynamic_cast<FrontTrimmedCache*>(&cache)) chunked->maybe_trim_front();
    const MaskOptions asked[] = {{}, {.window = 4}, {.return_array = true}};
    for (const MaskOptions& options : asked) {
      out.push_back(answer_of([&] { return mask_state(cache.make_mask(count, options)); }));
    }
    out.push_back(answer_of([&] { return rows_state(update(cache, count, shape, ++seed)); }));
    if (auto* batch = batched(cache)) batch->finalize();
    out.push_back(answers(cache));
  }
}

void go_on_arrays(ArraysCache& cache, const RowShape& shape, State::List& out) {
  for (const int count : {2, 1}) {
    out.push_back(answer_of([&] { return mask_state(cache.make_mask(count)); }));
    cache.advance(count);
    out.push_back(answer_of([&] {
      cache.set(0, numbers({shape.batch, 3, 5}, mx::bfloat16, 7));
      return answers(cache);
    }));
  }
}

}  // namespace

std::vector<CacheSample> cache_samples() {
  Samples samples;
  samples.add_growing("KVCache", made<KVCache>());
  samples.add_keys_only();
  samples.add_growing("QuantizedKVCache(32, 8)", made<QuantizedKVCache>(32, 8));
  samples.add_growing("QuantizedKVCache(32, 5)", made<QuantizedKVCache>(32, 5));
  samples.add_growing("ConcatenateKVCache", made<ConcatenateKVCache>());
  samples.add_growing("ChunkedKVCache(1000)", made<ChunkedKVCache>(1000));
  const auto chunked = made<ChunkedKVCache>(4);
  samples.add("ChunkedKVCache, slid", chunked, {fill({3, 7}), trim_front(), fill({1})});
  samples.add("ChunkedKVCache, slid and trimmed", chunked, {fill({10}), trim_front(), fill({3}), trim(2)});
  samples.add("ChunkedKVCache, slid and trimmed to nothing", chunked, {fill({10}), trim_front(), trim(9)});
  for (const int keep : {0, 4}) {
    const std::string kept = keep == 0 ? "" : " that keeps";
    samples.add_ring("RotatingKVCache" + kept, made<RotatingKVCache>(8, keep), "");
    samples.add_ring(
        "QuantizedRotatingKVCache" + kept, [=] { return RotatingKVCache(8, keep).to_quantized(32, 4); }, kOwn);
  }
  const std::vector<int> padding = {1, 0, 3};
  samples.add_batch("BatchKVCache", made<BatchKVCache>(padding), "", "right_padding");
  samples.add_batch("BatchChunkedKVCache", made<BatchChunkedKVCache>(4, padding), kOwn, "");
  const RowShape three = with_rows(3);
  samples.add("BatchChunkedKVCache, slid", made<BatchChunkedKVCache>(4, padding),
              {fill({3, 7}, three), trim_front(), fill({1}, three)}, kOwn, three);
  samples.add("BatchChunkedKVCache, slid, with right padding", made<BatchChunkedKVCache>(4, padding),
              {fill({3, 7}, three), trim_front(), prepare({.lengths = {2, 4, 1}, .right_padding = {2, 0, 3}}),
               fill({4}, three)},
              kOwn, three);
  samples.add_batch("BatchQuantizedKVCache", made<BatchQuantizedKVCache>(padding, 32, 4), kOwn, "");
  samples.add_batch("BatchRotatingKVCache", made<BatchRotatingKVCache>(8, padding), "", "l");
  samples.add_batch(
      "BatchQuantizedRotatingKVCache",
      [padding]() -> CachePtr { return BatchRotatingKVCache(8, padding).to_quantized(32, 4); }, kOwn, "");
  samples.add_merged_rings("Merged rings that keep", {3, 13, 8}, "keep",
                           []() -> CachePtr { return std::make_unique<RotatingKVCache>(8, 4); });
  samples.add_merged_rings("Merged quantised rings that keep", {3, 13, 8}, kOwn,
                           [] { return RotatingKVCache(8, 4).to_quantized(32, 4); });
  samples.add_arrays();
  samples.add_lists();
  return samples.take();
}

State::List go_on(LayerCache& cache, const RowShape& shape) {
  State::List out = {answers(cache)};
  split_or_join(cache, shape, out);
  if (auto* list = dynamic_cast<CacheList*>(&cache)) {
    for (std::size_t i = 0; i < list->num_children(); ++i) out.push_back(State(go_on(list->child(i), shape)));
    return out;
  }
  if (auto* attention = dynamic_cast<AttentionCache*>(&cache)) go_on_attention(*attention, shape, out);
  if (auto* arrays = dynamic_cast<ArraysCache*>(&cache)) go_on_arrays(*arrays, shape, out);
  split_or_join(cache, shape, out);
  out.push_back(State(cache.trim(2)));
  out.push_back(answers(cache));
  if (auto* attention = dynamic_cast<AttentionCache*>(&cache)) {
    out.push_back(answer_of([&] { return rows_state(attention->keys_and_values()); }));
  }
  return out;
}

std::string first_difference(const State& a, const State& b, const std::string& where) {
  if (const auto* left = a.as_list(), *right = b.as_list(); left && right) {
    for (std::size_t i = 0; i < std::min(left->size(), right->size()); ++i) {
      const std::string place = where + "." + std::to_string(i);
      if (std::string found = first_difference((*left)[i], (*right)[i], place); !found.empty()) return found;
    }
    return left->size() == right->size() ? "" : where + " differs in length";
  }
  if (identical(a, b)) return "";
  const auto text = [](const State& state) {
    if (const auto* words = state.as_string()) return " \"" + *words + "\"";
    if (const auto* number = state.as_int()) return " " + std::to_string(*number);
    return std::string(" something");
  };
  return where + text(a) + " is not" + text(b);
}

}  // namespace reprise::cache_test
