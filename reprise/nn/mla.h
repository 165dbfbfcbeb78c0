// Multi-head latent attention (DeepSeek-AI, https://arxiv.org/abs/2405.04434): a cache holds, for all heads together,
// one latent vector a token and its rotated positional features; each head's keys and values are linear maps of the
// latent. Threads: immutable after construction; results are unevaluated arrays of the calling thread.
#pragma once

#include "mlx/array.h"
#include "reprise/kernels/weight.h"
#include "reprise/nn/keys_values.h"

namespace reprise {

// A linear map per head.
class MultiLinear {
 public:
  // Arrays as of one map with an axis of heads in front: dense [heads, out, in]. Throws: invalid_argument for another
  // rank.
  explicit MultiLinear(Weight stacked);

  // x [B, heads, L, in], or [B, 1, L, in] for all heads alike → [B, heads, L, out] in x's dtype.
  mlx::core::array operator()(const mlx::core::array& x) const;
  // With the same matrices the other way: x [B, heads or 1, L, out] → [B, heads, L, in].
  mlx::core::array transposed(const mlx::core::array& x) const;

  int heads() const { return heads_; }
  int out() const { return out_; }
  int in() const { return in_; }

 private:
  mlx::core::array product(const mlx::core::array& x, bool transpose) const;

  Weight weight_;
  int heads_;
  int out_;
  int in_;
};

struct LatentAttention {
  MultiLinear embed_q;      // content features of queries (and keys) → latent: [heads, R, Dn]
  MultiLinear unembed_out;  // latent → values: [heads, Dv, R]
  float scale = 1.0f;       // of the scores

  // content [B, heads, L, Dn] and rotated positions [B, heads, L, Dr] of the queries; `stored`: keys hold the latents
  // [B, 1, S, R], values the rotated positions of the keys [B, 1, S, Dr], dense or quantised. Returns: [B, heads, L,
  // Dv]. Few queries are brought into the latents' space; for many, each head's keys and values are made, which then
  // costs less. Both give the same up to rounding. Throws: invalid_argument for shapes that do not fit.
  mlx::core::array operator()(const mlx::core::array& content, const mlx::core::array& positions,
                              const KeysValues& stored, const Mask& mask) const;

  // Whether L queries are many.
  bool makes_keys_for(int L) const;
};

}  // namespace reprise
