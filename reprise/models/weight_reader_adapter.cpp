// The adapter's part of WeightReader.
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/linalg.h"
#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/models/model_parts.h"
#include "reprise/models/weight_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

[[noreturn]] void unfit(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[make_model] the adapter does not fit the model: " + what);
}

mx::array unpacked(const Weight& weight) {
  if (const auto* q = std::get_if<QuantizedWeight>(&weight)) {
    return mx::dequantize(q->packed, mx::astype(q->scales, mx::float32), mx::astype(q->biases, mx::float32),
                          q->group_size, q->bits);
  }
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) {
    return mx::dequantize(m->packed, m->scales, std::nullopt, group_size_of(m->format), bits_of(m->format),
                          name_of(m->format));
  }
  return std::get<DenseWeight>(weight);
}

// DoRA's factor of each row: the learned magnitude over the adapted row's length. magnitude [out] → float32 [out].
mx::array row_scale(const Weight& weight, const mx::array& magnitude, const mx::array& a, const mx::array& b,
                    float scale) {
  const mx::array low_rank = mx::transpose(mx::matmul(mx::astype(a, mx::float32), mx::astype(b, mx::float32)));
  const mx::array rows = mx::add(mx::astype(unpacked(weight), mx::float32), mx::multiply(low_rank, mx::array(scale)));
  return mx::divide(mx::astype(magnitude, mx::float32), mx::linalg::norm(rows, 1));
}

}  // namespace

mx::array WeightReader::take_adapter(const std::string& name, const mx::Shape& shape) {
  const auto found = adapter_->weights.find(name);
  if (found == adapter_->weights.end()) unfit("'" + name + "' is missing");
  const mx::array& weight = found->second;
  if (weight.shape() != shape)
    unfit("'" + name + "' must have shape " + shape_text(shape) + ", but got " + shape_text(weight.shape()));
  if (!mx::issubdtype(weight.dtype(), mx::floating)) unfit("'" + name + "' must be of a float type");
  unused_adapter_weights_.erase(name);
  num_parameters_ += weight.size();
  return keep(mx::astype(weight, dtype_));
}

std::optional<WeightReader::LowRankPair> WeightReader::take_low_rank(const std::string& path,
                                                                     const std::function<mx::Shape(int)>& a,
                                                                     const std::function<mx::Shape(int)>& b,
                                                                     int rank_axis) {
  if (adapter_ == nullptr) return {};
  const auto found = adapter_->weights.find(path + ".lora_a");
  if (found == adapter_->weights.end()) return {};
  const mx::array& stored = found->second;
  if (static_cast<int>(stored.ndim()) <= rank_axis || stored.shape(rank_axis) < 1) {
    unfit("'" + path + ".lora_a' must have shape " + shape_text(a(8)) + " or another rank, but got " +
          shape_text(stored.shape()));
  }
  const int rank = stored.shape(rank_axis);
  mx::array first = take_adapter(path + ".lora_a", a(rank));
  return LowRankPair{std::move(first), take_adapter(path + ".lora_b", b(rank))};
}

Linear WeightReader::adapted_linear(const std::string& path, Weight weight, std::optional<mx::array> bias) {
  const int out = outputs_of(weight);
  const int in = inputs_of(weight);
  const auto pair = take_low_rank(
      path,
      [&](int rank) {
        return mx::Shape{in, rank};
      },
      [&](int rank) {
        return mx::Shape{rank, out};
      },
      1);
  if (!pair) return Linear(std::move(weight), std::move(bias));
  LowRank low_rank{pair->a, pair->b, adapter_->scale};
  if (adapter_->kind == Adapter::Kind::dora) {
    const mx::array magnitude = take_adapter(path + ".m", {out});
    low_rank.row_scale = keep(row_scale(weight, magnitude, pair->a, pair->b, adapter_->scale));
  }
  return Linear(std::move(weight), std::move(bias), std::move(low_rank));
}

void WeightReader::adapt_slices(const std::string& path, const Weight& weight, const std::vector<int>& outs,
                                std::vector<Linear>& layers) {
  const Linear whole = adapted_linear(path, weight, std::nullopt);
  if (!whole.is_adapted()) return;
  const LowRank& all = whole.low_rank();
  int first = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const int last = first + outs[i];
    LowRank own{all.a, keep(mx::slice(all.b, {0, first}, {all.b.shape(0), last})), all.scale};
    if (all.row_scale) own.row_scale = keep(mx::slice(*all.row_scale, {first}, {last}));
    layers[i] = Linear(layers[i].weight(), layers[i].map()->bias, std::move(own));
    first = last;
  }
}

void WeightReader::refuse_dora(const std::string& path) const {
  throw Error(ErrorCode::unsupported, "[make_model] DoRA for experts and embeddings ('" + path + "') is not supported");
}

void WeightReader::check_adapter_is_used() const {
  if (unused_adapter_weights_.empty()) return;
  unfit("'" + *unused_adapter_weights_.begin() + "' belongs to none of its layers (" +
        std::to_string(unused_adapter_weights_.size()) + " such)");
}

}  // namespace reprise::internal
