#include "reprise/cache/token_buffer.h"

#include <limits>
#include <sstream>
#include <vector>

#include "mlx/ops.h"
#include "reprise/base/error.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

// Bounds the graph of a buffer that nobody reads.
constexpr int kMaxUnevaluatedUpdates = 64;

mx::array on_device(std::span<const TokenId> tokens) {
  return mx::array(tokens.begin(), mx::Shape{static_cast<mx::ShapeElem>(tokens.size())}, mx::int32);
}

}  // namespace

TokenBuffer::TokenBuffer(std::span<const TokenId> tokens) : buffer_(mx::zeros({0}, mx::int32)) {
  if (!tokens.empty()) update_and_fetch(tokens);
}

mx::array TokenBuffer::update_and_fetch(std::span<const TokenId> tokens) {
  if (tokens.empty()) return this->tokens();
  return update_and_fetch(on_device(tokens));
}

mx::array TokenBuffer::update_and_fetch(const mx::array& tokens) {
  if (tokens.ndim() != 1 || !mx::issubdtype(tokens.dtype(), mx::integer)) {
    std::ostringstream got;
    got << tokens.dtype() << " " << tokens.shape();
    throw Error(ErrorCode::invalid_argument,
                "[TokenBuffer::update_and_fetch] tokens must be [n] of an integer dtype, but got " + got.str());
  }
  const int count = tokens.shape(0);
  if (count == 0) return this->tokens();
  if (count > std::numeric_limits<int>::max() - kStep - size_) {
    throw Error(ErrorCode::invalid_argument,
                "[TokenBuffer::update_and_fetch] tokens must be countable by int, but got " + std::to_string(count) +
                    " behind " + std::to_string(size_));
  }
  unevaluated_ = buffer_.status() == mx::array::Status::unscheduled ? unevaluated_ + 1 : 0;
  if (unevaluated_ > kMaxUnevaluatedUpdates) {
    buffer_.eval();
    unevaluated_ = 0;
  }
  const int next_size = size_ + count;
  const mx::array ids = mx::astype(tokens, mx::int32);
  const int capacity = (next_size + kStep - 1) / kStep * kStep;
  mx::array next = buffer_;
  if (capacity > buffer_.shape(0)) {
    std::vector<mx::array> parts;
    if (size_ > 0) parts.push_back(this->tokens());
    parts.push_back(ids);
    if (capacity > next_size) parts.push_back(mx::zeros({capacity - next_size}, mx::int32));
    next = mx::concatenate(std::move(parts), 0);
  } else {
    next = mx::slice_update(buffer_, ids, mx::Shape{size_}, mx::Shape{next_size});
  }
  mx::array all = mx::slice(next, mx::Shape{0}, mx::Shape{next_size});
  buffer_ = std::move(next);
  size_ = next_size;
  return all;
}

mx::array TokenBuffer::tokens() const { return mx::slice(buffer_, mx::Shape{0}, mx::Shape{size_}); }

}  // namespace reprise
