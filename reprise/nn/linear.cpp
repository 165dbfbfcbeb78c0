#include "reprise/nn/linear.h"

#include <memory>
#include <utility>
#include <variant>

#include "reprise/kernels/linear.h"

namespace reprise {

namespace mx = mlx::core;

Linear::Linear(Weight weight, std::optional<mx::array> bias)
    : map_(std::make_shared<const AffineMap>(AffineMap{std::move(weight), std::move(bias)})) {}

mx::array Linear::operator()(const mx::array& x) const { return kernels::linear(x, {map_})[0]; }

mx::array Linear::add_to(const mx::array& residual, const mx::array& x) const {
  return kernels::linear_add(x, map_, residual);
}

mx::array Linear::add_normed_to(const mx::array& residual, const mx::array& x, const RmsNorm& norm) const {
  return kernels::linear_add(x, map_, residual, norm.params());
}

namespace {

std::vector<AffineMapPtr> maps_of(const LinearRefs& layers) {
  std::vector<AffineMapPtr> maps;
  maps.reserve(layers.size());
  for (const Linear& layer : layers) maps.push_back(layer.map());
  return maps;
}

}  // namespace

std::vector<mx::array> project(const mx::array& x, const LinearRefs& layers) {
  return kernels::linear(x, maps_of(layers));
}

std::vector<mx::array> project(const mx::array& x, const Norm& norm, const LinearRefs& layers) {
  if (const auto* rms = std::get_if<RmsNorm>(&norm)) return kernels::linear(x, maps_of(layers), rms->params());
  return project(apply(norm, x), layers);
}

Embedding::Embedding(Weight weight, mx::Dtype dtype) : head_(std::move(weight)), dtype_(dtype) {}

mx::array Embedding::operator()(const mx::array& ids) const { return kernels::embedding(ids, head_.weight(), dtype_); }

}  // namespace reprise
