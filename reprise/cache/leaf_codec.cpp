#include "reprise/cache/leaf_codec.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/state_reader.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

constexpr const char* kScalar = "scalar";
constexpr const char* kString = "string";
constexpr const char* kNone = "none";

constexpr char32_t kMaxCodePoint = 0x10FFFF;

bool is_surrogate(char32_t c) { return c >= 0xD800 && c <= 0xDFFF; }

// Code points of UTF-8 text, none when it is malformed (overlong forms and surrogates included).
std::optional<std::vector<std::int32_t>> code_points(const std::string& text) {
  std::vector<std::int32_t> points;
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const int length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
    if (length == 0 || i + static_cast<std::size_t>(length) > text.size()) return std::nullopt;
    char32_t point = length == 1 ? lead : lead & (0x7Fu >> length);
    for (int k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + static_cast<std::size_t>(k)]);
      if (next >> 6 != 2) return std::nullopt;
      point = (point << 6) | (next & 0x3Fu);
    }
    constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < kSmallest[length] || point > kMaxCodePoint || is_surrogate(point)) return std::nullopt;
    points.push_back(static_cast<std::int32_t>(point));
    i += static_cast<std::size_t>(length);
  }
  return points;
}

void append_utf8(std::string& text, char32_t point) {
  const auto put = [&](char32_t byte) { text.push_back(static_cast<char>(static_cast<unsigned char>(byte))); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6);
    put(0x80 | (point & 0x3F));
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12);
    put(0x80 | (point >> 6 & 0x3F));
    put(0x80 | (point & 0x3F));
  } else {
    put(0xF0 | point >> 18);
    put(0x80 | (point >> 12 & 0x3F));
    put(0x80 | (point >> 6 & 0x3F));
    put(0x80 | (point & 0x3F));
  }
}

mx::array encode_integer(std::int64_t value) {
  const bool fits =
      value >= std::numeric_limits<std::int32_t>::min() && value <= std::numeric_limits<std::int32_t>::max();
  return fits ? mx::array(static_cast<std::int32_t>(value), mx::int32) : mx::array(value, mx::int64);
}

mx::array encode_string(const std::string& text) {
  const auto points = code_points(text);
  if (!points)
    throw Error(ErrorCode::invalid_argument,
                "[save_prompt_cache] a string in a state must be UTF-8, but got other bytes");
  return mx::array(points->begin(), mx::Shape{static_cast<mx::ShapeElem>(points->size())}, mx::int32);
}

[[noreturn]] void fail(const std::string& name, const std::string& what, const mx::array& tensor) {
  throw Error(ErrorCode::corrupt_data,
              "[load_prompt_cache] tensor \"" + name + "\" must be " + what + ", but got " + describe(State(tensor)));
}

State decode_scalar(const std::string& name, const mx::array& tensor) {
  if (tensor.ndim() == 0) {
    if (tensor.dtype() == mx::int32) return State(std::int64_t{tensor.item<std::int32_t>()});
    if (tensor.dtype() == mx::int64) return State(tensor.item<std::int64_t>());
    if (tensor.dtype() == mx::bool_) return State(tensor.item<bool>());
    if (tensor.dtype() == mx::float32) return State(double{tensor.item<float>()});
  }
  fail(name, "a scalar (I32, I64, BOOL or F32 of no axes)", tensor);
}

State decode_string(const std::string& name, const mx::array& tensor) {
  // mlx-lm writes "" as an empty float array.
  if (tensor.ndim() != 1 || (tensor.size() > 0 && tensor.dtype() != mx::int32)) {
    fail(name, "a string's code points (I32 of one axis)", tensor);
  }
  std::string text;
  for (std::size_t i = 0; i < tensor.size(); ++i) {
    const std::int32_t point = tensor.data<std::int32_t>()[i];
    if (point < 0 || static_cast<char32_t>(point) > kMaxCodePoint || is_surrogate(static_cast<char32_t>(point))) {
      fail(name, "code points of Unicode", tensor);
    }
    append_utf8(text, static_cast<char32_t>(point));
  }
  return State(std::move(text));
}

}  // namespace

EncodedLeaf encode_leaf(const State& leaf) {
  if (const auto* array = leaf.as_array()) return {*array, nullptr};
  if (const auto* integer = leaf.as_int()) return {encode_integer(*integer), kScalar};
  if (const auto* boolean = leaf.as_bool()) return {mx::array(*boolean), kScalar};
  if (const auto* string = leaf.as_string()) return {encode_string(*string), kString};
  if (leaf.is_null()) return {mx::zeros({0}, mx::float32), kNone};
  return {mx::array(static_cast<float>(std::get<double>(leaf.value()))), kScalar};
}

State decode_leaf(const std::string& name, const std::string& kind, const mx::array& tensor) {
  if (kind == kScalar) return decode_scalar(name, tensor);
  if (kind == kString) return decode_string(name, tensor);
  if (kind == kNone) {
    if (tensor.ndim() != 1 || tensor.size() != 0) fail(name, "a placeholder of shape [0]", tensor);
    return State();
  }
  throw Error(ErrorCode::corrupt_data, "[load_prompt_cache] the kind of tensor \"" + name +
                                           "\" must be scalar, string or none, but got \"" + kind + "\"");
}

}  // namespace reprise::internal
