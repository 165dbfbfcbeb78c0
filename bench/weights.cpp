#include "bench/weights.h"

#include "mlx/ops.h"
#include "mlx/random.h"
#include "mlx/transforms.h"

namespace reprise::bench {

namespace mx = mlx::core;

namespace {

mx::array evaluated(mx::array x) {
  x.eval();
  return x;
}

}  // namespace

AffineMapPtr random_map(int out, int in, int bits, int group_size) {
  const mx::Shape groups = {out, in / group_size};
  return std::make_shared<const AffineMap>(
      AffineMap{.weight = QuantizedWeight{
                    .packed = evaluated(mx::random::bits({out, in * bits / 32})),
                    .scales = evaluated(mx::random::uniform(mx::array(0.001f), mx::array(0.01f), groups, mx::float16)),
                    .biases = evaluated(mx::random::uniform(mx::array(-0.05f), mx::array(-0.01f), groups, mx::float16)),
                    .group_size = group_size,
                    .bits = bits}});
}

std::size_t weight_bytes(const AffineMap& map) {
  if (const auto* dense = std::get_if<DenseWeight>(&map.weight)) return dense->nbytes();
  const auto& weight = std::get<QuantizedWeight>(map.weight);
  return weight.packed.nbytes() + weight.scales.nbytes() + weight.biases.nbytes();
}

mx::array random_rows(int rows, int cols) {
  return evaluated(mx::random::uniform(mx::array(-1.0f), mx::array(1.0f), {rows, cols}, mx::float32));
}

Block random_block(const Shapes& shapes, int bits, int group_size) {
  const auto map = [&](int out, int in) { return random_map(out, in, bits, group_size); };
  const int q = shapes.heads * shapes.head_dim;
  const int kv = shapes.kv_heads * shapes.head_dim;
  return {.qkv = {map(q, shapes.hidden), map(kv, shapes.hidden), map(kv, shapes.hidden)},
          .o = map(shapes.hidden, q),
          .gate = map(shapes.mlp, shapes.hidden),
          .up = map(shapes.mlp, shapes.hidden),
          .down = map(shapes.hidden, shapes.mlp),
          .norm = {evaluated(mx::ones({shapes.hidden})), 1e-5f}};
}

double block_size(const Shapes& shapes) {
  const double attention = 2.0 * shapes.head_dim * (shapes.heads + shapes.kv_heads);
  return shapes.hidden * (attention + 3.0 * shapes.mlp);
}

}  // namespace reprise::bench
