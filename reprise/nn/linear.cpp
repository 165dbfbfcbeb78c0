#include "reprise/nn/linear.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

#include "mlx/ops.h"
#include "reprise/kernels/linear.h"

namespace reprise {

namespace mx = mlx::core;

Linear::Linear(Weight weight, std::optional<mx::array> bias)
    : map_(std::make_shared<const AffineMap>(AffineMap{std::move(weight), std::move(bias)})) {}

Linear::Linear(Weight weight, std::optional<mx::array> bias, LowRank low_rank)
    : low_rank_(std::make_shared<const LowRank>(std::move(low_rank))) {
  if (low_rank_->row_scale) last_bias_.swap(bias);
  map_ = std::make_shared<const AffineMap>(AffineMap{std::move(weight), std::move(bias)});
}

mx::array Linear::adapted(const mx::array& y, const mx::array& x) const {
  if (low_rank_ == nullptr) return y;
  const mx::array product = mx::matmul(mx::matmul(x, low_rank_->a), low_rank_->b);
  mx::array sum = mx::add(y, mx::astype(mx::multiply(product, mx::array(low_rank_->scale)), y.dtype()));
  if (low_rank_->row_scale) sum = mx::multiply(sum, mx::astype(*low_rank_->row_scale, y.dtype()));
  return last_bias_ ? mx::add(sum, *last_bias_) : sum;
}

mx::array Linear::operator()(const mx::array& x) const { return adapted(kernels::linear(x, {map_})[0], x); }

mx::array Linear::add_to(const mx::array& residual, const mx::array& x) const {
  return is_adapted() ? mx::add(residual, (*this)(x)) : kernels::linear_add(x, map_, residual);
}

mx::array Linear::add_normed_to(const mx::array& residual, const mx::array& x, const RmsNorm& norm) const {
  if (is_adapted()) return mx::add(residual, norm((*this)(x)));
  return kernels::linear_add(x, map_, residual, norm.params());
}

namespace {

std::vector<AffineMapPtr> maps_of(const LinearRefs& layers) {
  std::vector<AffineMapPtr> maps;
  maps.reserve(layers.size());
  for (const Linear& layer : layers) maps.push_back(layer.map());
  return maps;
}

bool any_is_adapted(const LinearRefs& layers) {
  return std::any_of(layers.begin(), layers.end(), [](const Linear& layer) { return layer.is_adapted(); });
}

}  // namespace

std::vector<mx::array> project(const mx::array& x, const LinearRefs& layers) {
  auto projected = kernels::linear(x, maps_of(layers));
  for (std::size_t i = 0; i < layers.size(); ++i) projected[i] = layers[i].get().adapted(projected[i], x);
  return projected;
}

std::vector<mx::array> project(const mx::array& x, const Norm& norm, const LinearRefs& layers) {
  const auto* rms = std::get_if<RmsNorm>(&norm);
  if (rms != nullptr && !any_is_adapted(layers)) return kernels::linear(x, maps_of(layers), rms->params());
  return project(apply(norm, x), layers);
}

Embedding::Embedding(Weight weight, mx::Dtype dtype) : head_(std::move(weight)), dtype_(dtype) {}

Embedding::Embedding(Weight weight, mx::Dtype dtype, const LowRank& low_rank)
    : head_(std::move(weight), std::nullopt, low_rank),
      dtype_(dtype),
      rows_(LowRank{mx::transpose(low_rank.b), mx::transpose(low_rank.a), low_rank.scale}) {}

mx::array Embedding::operator()(const mx::array& ids) const {
  const mx::array rows = kernels::embedding(ids, head_.weight(), dtype_);
  if (!rows_) return rows;
  const mx::array product = mx::matmul(mx::take(rows_->a, ids, 0), rows_->b);
  return mx::add(rows, mx::astype(mx::multiply(product, mx::array(rows_->scale)), dtype_));
}

}  // namespace reprise
