#include "reprise/cache/layer_cache.h"

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/batched_cache.h"
#include "reprise/cache/registry.h"
#include "reprise/nn/attention.h"
#include "reprise/nn/masks.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

struct StoredDtypes {
  mx::Dtype keys;
  mx::Dtype values;
};

StoredDtypes stored_dtypes(const KeysValues& keys_values) {
  if (const auto* dense = std::get_if<DenseKV>(&keys_values)) return {dense->keys.dtype(), dense->values.dtype()};
  const auto& quantized = std::get<QuantizedKV>(keys_values);
  return {quantized.keys.scales.dtype(), quantized.values.scales.dtype()};
}

mx::array cast(const mx::array& x, mx::Dtype dtype) { return x.dtype() == dtype ? x : mx::astype(x, dtype); }

// What float16 cannot hold becomes its largest number: an infinity in one key would make every later score NaN.
mx::array stored_as(const mx::array& x, mx::Dtype dtype) {
  if (dtype != mx::float16 || x.dtype() == dtype) return cast(x, dtype);
  const mx::array largest(65504.0f, x.dtype() == mx::float64 ? mx::float64 : mx::float32);
  return mx::astype(mx::clip(cast(x, largest.dtype()), mx::negative(largest), largest), dtype);
}

}  // namespace

std::vector<int> LayerCache::positions() const {
  const std::optional<int> one = position();
  return one ? std::vector<int>{*one} : std::vector<int>{};
}

void LayerCache::set_extra_state(const ExtraState& extra) {
  if (extra.empty()) return;
  throw Error(ErrorCode::corrupt_data, "[LayerCache::set_extra_state] " + class_name() +
                                           " must have no extra members, but got \"" + extra.begin()->first + "\"");
}

void LayerCache::check() const { cache_from_state(class_name(), state()); }

std::unique_ptr<LayerCache> LayerCache::to_quantized(int, int) const {
  throw Error(ErrorCode::unsupported,
              "[LayerCache::to_quantized] a class with a quantised counterpart is needed, but got " + class_name());
}

std::unique_ptr<LayerCache> LayerCache::to_dequantized() const {
  throw Error(ErrorCode::unsupported,
              "[LayerCache::to_dequantized] a quantised class is needed, but got " + class_name());
}

std::unique_ptr<LayerCache> LayerCache::merge(const std::vector<const LayerCache*>&) const {
  throw Error(ErrorCode::unsupported, "[merge_caches] a class with a batch class is needed, but got " + class_name());
}

std::unique_ptr<LayerCache> merge_caches(const std::vector<const LayerCache*>& caches) {
  if (caches.empty()) {
    throw Error(ErrorCode::invalid_argument, "[merge_caches] at least one cache is needed, but got none");
  }
  for (const LayerCache* cache : caches) {
    if (cache != nullptr && caches.front() != nullptr && cache->class_name() == caches.front()->class_name()) continue;
    throw Error(ErrorCode::invalid_argument,
                "[merge_caches] caches must be of one class, but got " +
                    (cache && caches.front() ? caches.front()->class_name() + " and " + cache->class_name() : "null"));
  }
  return caches.front()->merge(caches);
}

// The cache's own mask, less what lies in other chunks than the query.
Mask AttentionCache::make_chunk_mask(int N, int chunk_size) const {
  const int columns = length() + N;
  std::vector<int> first = positions();  // of column 0 in each row
  for (int& at : first) at -= length();
  if (position()) {
    const bool is_one_chunk = first[0] / chunk_size == (std::int64_t{first[0]} + columns - 1) / chunk_size;
    if (is_one_chunk) return make_mask(N);
  }
  const Offset start =
      position() ? Offset(first[0]) : Offset(mx::array(first.data(), {static_cast<int>(first.size())}, mx::int32));
  const Mask all = make_mask(N, {.window = {}, .return_array = true});
  const mx::array same = create_same_chunk_mask(N, columns, start, chunk_size);
  const auto* visible = std::get_if<mx::array>(&all);
  return visible != nullptr ? mx::logical_and(*visible, same) : same;
}

KeysValues AttentionCache::store(const mx::array& keys, const mx::array& values,
                                 const std::optional<mx::Dtype>& stored_dtype) {
  if (!empty()) {
    const StoredDtypes stored = stored_dtypes(keys_and_values());
    return update_and_fetch(stored_as(keys, stored.keys), stored_as(values, stored.values));
  }
  if (!stored_dtype) return update_and_fetch(keys, values);
  return update_and_fetch(stored_as(keys, *stored_dtype), stored_as(values, *stored_dtype));
}

mx::array AttentionCache::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                 const AttentionOptions& options) {
  return attend_in_parts(queries, keys, values, options);
}

mx::array AttentionCache::attend_projections(const Projections& projections, const AttentionOptions& options) {
  return attend_projections_in_parts(projections, options);
}

mx::array AttentionCache::attend_in_parts(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                          const AttentionOptions& options) {
  if (queries.ndim() != 4 || keys.ndim() != 4 || queries.shape(2) != keys.shape(2) ||
      !mx::issubdtype(queries.dtype(), mx::floating)) {
    throw Error(
        ErrorCode::invalid_argument,
        "[AttentionCache::attend] queries [B, H, L, D], of a floating dtype, and keys [B, Hkv, L, D] must agree "
        "in L");
  }
  for (const RmsNorm* norm : {options.query_norm, options.key_norm}) {
    if (norm == nullptr || norm->params().weight.shape() == mx::Shape{queries.shape(3)}) continue;
    throw Error(ErrorCode::invalid_argument, "[AttentionCache::attend] norms of heads must have weights [D]");
  }
  const Offset position = offset();
  const mx::array normed_queries = options.query_norm ? (*options.query_norm)(queries) : queries;
  const mx::array normed_keys = options.key_norm ? (*options.key_norm)(keys) : keys;
  const mx::array rotated_queries = options.rope ? (*options.rope)(normed_queries, position) : normed_queries;
  const mx::array new_keys = options.rope ? (*options.rope)(normed_keys, position) : normed_keys;

  // The fork is gone before anything is evaluated, so it does not keep MLX from writing in place.
  const std::unique_ptr<LayerCache> before = fork();
  const KeysValues stored = store(new_keys, values, options.stored_dtype);
  try {
    const AttentionScoreOptions score_options{
        .scale = options.scale, .mask = options.mask, .sinks = options.sinks, .softcap = options.softcap};
    return cast(scaled_dot_product_attention(rotated_queries, stored, score_options), queries.dtype());
  } catch (...) {
    restore(std::move(*before));
    throw;
  }
}

mx::array AttentionCache::attend_projections_in_parts(const Projections& projections, const AttentionOptions& options) {
  const auto& [queries, keys, values, heads, kv_heads] = projections;
  const auto is_split = [](const mx::array& x, int parts) {
    return x.ndim() == 3 && parts > 0 && x.shape(2) % parts == 0;
  };
  if (!is_split(queries, heads) || !is_split(keys, kv_heads) || !is_split(values, kv_heads)) {
    throw Error(ErrorCode::invalid_argument,
                "[AttentionCache::attend_projections] queries [B, L, heads * D], keys [B, L, kv_heads * D] and values "
                "[B, L, kv_heads * Dv] must be whole heads");
  }
  const auto split = [](const mx::array& x, int parts) {
    return mx::transpose(mx::reshape(x, {x.shape(0), x.shape(1), parts, -1}), {0, 2, 1, 3});
  };
  const mx::array out = attend_in_parts(split(queries, heads), split(keys, kv_heads), split(values, kv_heads), options);
  return mx::reshape(mx::transpose(out, {0, 2, 1, 3}), {out.shape(0), out.shape(2), -1});
}

}  // namespace reprise
