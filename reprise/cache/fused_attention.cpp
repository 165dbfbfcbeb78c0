#include "reprise/cache/fused_attention.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/row_numbers.h"
#include "reprise/kernels/attention.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

[[noreturn]] void fail(const std::string& function, const std::string& what, const std::string& got) {
  throw Error(ErrorCode::invalid_argument, "[" + function + "] " + what + ", but got " + got);
}

std::string describe(const mx::array& x) {
  std::ostringstream text;
  text << x.dtype() << " " << x.shape();
  return text.str();
}

bool is_kernel_float(mx::Dtype dtype) { return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16; }

mx::array joined(const mx::array& x) {
  const mx::array rows = mx::transpose(x, {0, 2, 1, 3});
  return mx::reshape(rows, {x.shape(0), x.shape(2), x.shape(1) * x.shape(3)});
}

mx::array by_heads(const mx::array& x, int heads, int size) {
  return mx::transpose(mx::reshape(x, {x.shape(0), x.shape(1), heads, size}), {0, 2, 1, 3});
}

}  // namespace

bool FusedStep::takes(const Projections& projections, const std::optional<KVColumns>& buffer) {
  if (mx::default_device() != mx::Device::cpu) return false;
  for (const mx::array* x : {&projections.queries, &projections.keys, &projections.values}) {
    if (x->ndim() != 3 || x->size() == 0 || !is_kernel_float(x->dtype())) return false;
  }
  if (!buffer) return true;
  const std::vector<mx::array>& tensors = buffer->tensors();
  return std::all_of(tensors.begin(), tensors.end(), [](const mx::array& tensor) {
    return tensor.dtype() == mx::uint32 || is_kernel_float(tensor.dtype());
  });
}

FusedStep::FusedStep(const std::string& function, const Projections& projections, const AttentionOptions& options,
                     const std::optional<KVColumns>& buffer, const std::optional<KVQuantization>& quantization)
    : function_(function), projections_(projections), options_(options), quantization_(quantization), key_size_(0) {
  const auto& [queries, keys, values, heads, kv_heads] = projections_;
  const bool fits = heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && queries.shape(2) % heads == 0 &&
                    values.shape(2) % kv_heads == 0 && keys.shape(2) == queries.shape(2) / heads * kv_heads &&
                    keys.shape(0) == queries.shape(0) && keys.shape(1) == queries.shape(1) &&
                    values.shape(0) == queries.shape(0) && values.shape(1) == queries.shape(1);
  if (!fits) {
    fail(
        function_,
        "queries [B, L, heads * D], keys [B, L, kv_heads * D] and values [B, L, kv_heads * Dv] must agree, heads being "
        "a multiple of kv_heads",
        describe(queries) + ", " + describe(keys) + ", " + describe(values) + " for " + std::to_string(heads) +
            " and " + std::to_string(kv_heads) + " heads");
  }
  key_size_ = queries.shape(2) / heads;
  const int value_size = values.shape(2) / kv_heads;
  if (quantization_) {
    check_quantization(function_, *quantization_);
    if (key_size_ % quantization_->group_size != 0 || value_size % quantization_->group_size != 0) {
      fail(function_, "head sizes must be multiples of the group size " + std::to_string(quantization_->group_size),
           std::to_string(key_size_) + " and " + std::to_string(value_size));
    }
  }
  if (options.rope != nullptr && options.rope->kernel_params() != nullptr &&
      options.rope->kernel_params()->dims > key_size_) {
    fail(function_,
         "heads must have the " + std::to_string(options.rope->kernel_params()->dims) +
             " features that rope "
             "rotates",
         std::to_string(key_size_));
  }
  for (const RmsNorm* norm : {options.query_norm, options.key_norm}) {
    if (norm == nullptr || norm->params().weight.shape() == mx::Shape{key_size_}) continue;
    fail(function_, "norms of heads must have weights of " + std::to_string(key_size_),
         describe(norm->params().weight));
  }
  if (!buffer) return;
  const auto check = [&](const char* name, const mx::array& stored, int features) {
    if (stored.shape(0) == queries.shape(0) && stored.shape(1) == kv_heads && stored.shape(3) == features) return;
    fail(function_, std::string(name) + " must agree with the stored " + describe(stored),
         describe(keys) + ", " + describe(values));
  };
  const auto packed = [&](int size) { return quantization_ ? size * quantization_->bits / 32 : size; };
  check("keys", buffer->tensors().front(), packed(key_size_));
  check("values", buffer->tensors()[buffer->tensors().size() / 2], packed(value_size));
}

void FusedStep::check_mask(int columns) const {
  const auto* mask = std::get_if<mx::array>(&options_.mask);
  if (mask == nullptr) return;
  const mx::Shape scores{batch_size(), projections_.heads, width(), columns};
  bool fits =
      mask->ndim() <= scores.size() && (mask->dtype() == mx::bool_ || mx::issubdtype(mask->dtype(), mx::floating));
  for (std::size_t i = 1; fits && i <= mask->ndim(); ++i) {
    const int size = mask->shape(-static_cast<int>(i));
    fits = size == 1 || size == scores[scores.size() - i];
  }
  if (fits) return;
  std::ostringstream text;
  text << scores;
  fail(function_, "the mask must be bool or floating, and broadcastable to " + text.str(), describe(*mask));
}

void FusedStep::check_scores(int columns) const {
  check_mask(columns);
  const int heads = projections_.heads;
  if (options_.sinks && options_.sinks->shape() != mx::Shape{heads}) {
    fail(function_, "sinks must be [" + std::to_string(heads) + "]", describe(*options_.sinks));
  }
  if (options_.softcap && !(*options_.softcap > 0.0f && std::isfinite(*options_.softcap))) {
    fail(function_, "softcap must be positive", std::to_string(*options_.softcap));
  }
}

StepInputs FusedStep::inputs(const Offset& offset) const {
  const auto& [queries, keys, values, heads, kv_heads] = projections_;
  const Rope* rope = options_.rope;
  const kernels::RopeParams* params = rope ? rope->kernel_params() : nullptr;
  if (rope != nullptr && params == nullptr) {  // no fixed frequencies
    const auto rotated = [&](const mx::array& x, int parts, const RmsNorm* norm) {
      const mx::array rows = by_heads(x, parts, key_size_);
      return joined((*rope)(norm ? (*norm)(rows) : rows, offset));
    };
    return {rotated(queries, heads, options_.query_norm), rotated(keys, kv_heads, options_.key_norm)};
  }
  StepInputs inputs{queries, keys, params};
  if (options_.query_norm) inputs.norms.queries = options_.query_norm->params();
  if (options_.key_norm) inputs.norms.keys = options_.key_norm->params();
  return inputs;
}

StepResult FusedStep::run(const std::optional<KVColumns>& stored, const StepColumns& columns, const Offset& offset,
                          const std::vector<int>& row_starts) const {
  check_scores(columns.visible);
  const StepInputs in = inputs(offset);

  kernels::StoreTarget target;
  if (stored) target.tensors = stored->tensors();
  target.quantization = quantization_;
  target.at = columns.at;
  target.visible = columns.visible;
  target.capacity = columns.capacity;
  target.dtype = options_.stored_dtype;
  kernels::AttentionParams attention{
      .scale = options_.scale, .mask = options_.mask, .sinks = options_.sinks, .softcap = options_.softcap};
  if (!row_starts.empty()) attention.row_starts = int_array(row_starts);
  kernels::StoreAndAttendResult result =
      kernels::store_and_attend(in.queries, in.keys, projections_.values, projections_.heads, in.rope, offset,
                                std::move(target), attention, in.norms);
  return {std::move(result.output), KVColumns(std::move(result.tensors), quantization_)};
}

mx::array attend_by_projections(AttentionCache& cache, const mx::array& queries, const mx::array& keys,
                                const mx::array& values, const AttentionOptions& options) {
  const bool fits = queries.ndim() == 4 && keys.ndim() == 4 && values.ndim() == 4 &&
                    queries.shape(2) == keys.shape(2) && keys.shape(1) == values.shape(1) && keys.shape(1) > 0 &&
                    queries.shape(1) > 0 && mx::issubdtype(queries.dtype(), mx::floating);
  if (!fits) {
    fail(cache.class_name() + "::attend",
         "queries [B, H, L, D], of a floating dtype, keys [B, Hkv, L, D] and values [B, Hkv, L, Dv] must agree",
         describe(queries) + ", " + describe(keys) + ", " + describe(values));
  }
  const Projections rows{joined(queries), joined(keys), joined(values), queries.shape(1), keys.shape(1)};
  const mx::array out = cache.attend_projections(rows, options);
  return by_heads(out, queries.shape(1), out.shape(2) / queries.shape(1));
}

}  // namespace reprise::internal
