// The ids of a growing sequence as one int32 array, for what needs them on the device at every step (a logits
// processor that looks back). The buffer's capacity grows in steps of 256. Arrays handed out are values.
// Threads: one object belongs to one thread at a time. Owns: its buffer.
#pragma once

#include <span>

#include "mlx/array.h"
#include "reprise/base/tokens.h"

namespace reprise {

class TokenBuffer {
 public:
  static constexpr int kStep = 256;

  explicit TokenBuffer(std::span<const TokenId> tokens = {});

  // Appends. Returns: all tokens so far, int32 [size()].
  mlx::core::array update_and_fetch(std::span<const TokenId> tokens);
  // The same for ids that are on the device, not read here: [n] of an integer dtype. Throws: invalid_argument.
  mlx::core::array update_and_fetch(const mlx::core::array& tokens);

  // int32 [size()].
  mlx::core::array tokens() const;
  int size() const { return size_; }
  // The whole buffer, int32 [capacity]: what a generation loop evaluates.
  const mlx::core::array& state() const { return buffer_; }

 private:
  mlx::core::array buffer_;
  int size_ = 0;         // ≤ buffer_.size()
  int unevaluated_ = 0;  // updates since the buffer was last seen evaluated
};

}  // namespace reprise
