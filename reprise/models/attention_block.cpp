#include "reprise/models/attention_block.h"

#include <cmath>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// x [B, L, heads * D] → the same shape.
mx::array normed(const mx::array& x, const RmsNorm& norm) {
  const int size = static_cast<int>(norm.params().weight.size());
  if (size == x.shape(-1)) return norm(x);
  return mx::reshape(norm(mx::reshape(x, {x.shape(0), x.shape(1), -1, size})), x.shape());
}

}  // namespace

AttentionSizes AttentionSizes::from(const Config& config) {
  AttentionSizes sizes{.hidden_size = config.require_positive_int("hidden_size"),
                       .heads = config.require_positive_int("num_attention_heads"),
                       .kv_heads = 0,
                       .head_dim = 0};
  sizes.kv_heads = config.get_int("num_key_value_heads").value_or(sizes.heads);
  sizes.head_dim = config.get_int("head_dim").value_or(sizes.hidden_size / sizes.heads);
  if (sizes.kv_heads <= 0 || sizes.head_dim <= 0 || sizes.heads % sizes.kv_heads != 0) {
    throw Error(ErrorCode::corrupt_data,
                "[make_model] num_attention_heads must be a multiple of num_key_value_heads, but got " +
                    std::to_string(sizes.heads) + " and " + std::to_string(sizes.kv_heads));
  }
  return sizes;
}

Projections AttentionBlock::unnormed(const mx::array& x, const std::optional<Norm>& norm) const {
  const LinearRefs layers = {q_proj, k_proj, v_proj};
  auto projected = norm ? reprise::project(x, *norm, layers) : reprise::project(x, layers);
  return {std::move(projected[0]), std::move(projected[1]), std::move(projected[2]), sizes.heads, sizes.kv_heads};
}

Projections AttentionBlock::project(const mx::array& x, const std::optional<Norm>& norm) const {
  Projections projections = unnormed(x, norm);
  if (q_norm) projections.queries = normed(projections.queries, *q_norm);
  if (k_norm) projections.keys = normed(projections.keys, *k_norm);
  return projections;
}

mx::array AttentionBlock::attend(const Projections& projections, AttentionCache& cache, const Mask& mask) const {
  return cache.attend_projections(projections, options(mask));
}

AttentionOptions AttentionBlock::options(const Mask& mask) const {
  return {.rope = rope.get(),
          .scale = scale,
          .mask = mask,
          .sinks = sinks,
          .stored_dtype = stored_dtype,
          .softcap = softcap};
}

mx::array AttentionBlock::attended(const mx::array& x, const std::optional<Norm>& norm, AttentionCache& cache,
                                   const Mask& mask) const {
  const auto is_of_heads = [&](const std::optional<RmsNorm>& one) {
    return one && static_cast<int>(one->params().weight.size()) == sizes.head_dim;
  };
  if (!is_of_heads(q_norm) || !is_of_heads(k_norm)) return attend(project(x, norm), cache, mask);
  AttentionOptions with_norms = options(mask);
  with_norms.query_norm = &*q_norm;
  with_norms.key_norm = &*k_norm;
  return cache.attend_projections(unnormed(x, norm), with_norms);
}

mx::array AttentionBlock::operator()(const mx::array& x, const std::optional<Norm>& norm, AttentionCache& cache,
                                     const Mask& mask) const {
  return o_proj(attended(x, norm, cache, mask));
}

mx::array AttentionBlock::add_to(const mx::array& residual, const mx::array& x, const std::optional<Norm>& norm,
                                 AttentionCache& cache, const Mask& mask) const {
  return o_proj.add_to(residual, attended(x, norm, cache, mask));
}

mx::array AttentionBlock::add_normed_to(const mx::array& residual, const mx::array& x, const std::optional<Norm>& norm,
                                        AttentionCache& cache, const Mask& mask, const RmsNorm& output_norm) const {
  return o_proj.add_normed_to(residual, attended(x, norm, cache, mask), output_norm);
}

AttentionBlock take_attention(WeightReader& weights, const std::string& path, const AttentionSizes& sizes,
                              const AttentionBiases& biases) {
  const int E = sizes.hidden_size;
  const int q = sizes.heads * sizes.head_dim;
  const int kv = sizes.kv_heads * sizes.head_dim;
  return {.sizes = sizes,
          .q_proj = weights.take_linear(path + ".q_proj", q, E, biases.qkv),
          .k_proj = weights.take_linear(path + ".k_proj", kv, E, biases.qkv),
          .v_proj = weights.take_linear(path + ".v_proj", kv, E, biases.qkv),
          .o_proj = weights.take_linear(path + ".o_proj", E, q, biases.output),
          .scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim))};
}

}  // namespace reprise::internal
