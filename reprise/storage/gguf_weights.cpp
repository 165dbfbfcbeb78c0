#include "reprise/storage/gguf_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/storage/array_memory.h"
#include "reprise/storage/gguf_blocks.h"
#include "reprise/storage/system_error.h"

namespace reprise::internal {
namespace {

namespace mx = mlx::core;
using NamedArrays = std::vector<std::pair<std::string, mx::array>>;

constexpr const char* kWeightSuffix = ".weight";

std::optional<mx::Dtype> float_dtype(std::uint32_t type) {
  switch (type) {
    case gguf_type::f32:
      return mx::float32;
    case gguf_type::f16:
      return mx::float16;
    case gguf_type::bf16:
      return mx::bfloat16;
    default:
      return std::nullopt;
  }
}

// GGUF keeps the two halves of each head's rows interleaved (2i, 2i + 1), Hugging Face one after the other.
class RowOrder {
 public:
  RowOrder(const GgufConversion& conversion, std::int64_t num_rows) {
    if (!conversion.heads) return;
    if (*conversion.heads <= 0 || num_rows % (2 * *conversion.heads) != 0) {
      throw Error(ErrorCode::corrupt_data, "[read_model_files] " + std::to_string(num_rows) + " rows of tensor " +
                                               printable(conversion.tensor->name) + " do not divide into " +
                                               std::to_string(*conversion.heads) + " heads");
    }
    half_ = num_rows / *conversion.heads / 2;
  }

  bool is_identity() const { return half_ == 0; }

  // The file's row that becomes row `row`.
  std::int64_t source(std::int64_t row) const {
    if (half_ == 0) return row;
    const std::int64_t in_head = row % (2 * half_);
    return row - in_head + 2 * (in_head % half_) + in_head / half_;
  }

 private:
  std::int64_t half_ = 0;
};

mx::Shape mlx_shape(const GgufTensor& tensor) {
  mx::Shape shape;
  for (const std::int64_t dim : tensor.shape) {
    if (dim > std::numeric_limits<mx::ShapeElem>::max()) {
      throw Error(ErrorCode::unsupported, "[read_model_files] tensor " + printable(tensor.name) + " has an extent of " +
                                              std::to_string(dim) + ", beyond MLX's int32");
    }
    shape.push_back(static_cast<mx::ShapeElem>(dim));
  }
  return shape;
}

std::byte* raw_bytes(mx::array& array) { return reinterpret_cast<std::byte*>(array.data<char>()); }

mx::array convert_float(const GgufConversion& conversion, mx::Dtype dtype, std::byte* data,
                        const std::shared_ptr<MappedFile>& file) {
  const GgufTensor& tensor = *conversion.tensor;
  mx::Shape shape = mlx_shape(tensor);
  if (tensor.size_bytes == 0) return allocate_array(std::move(shape), dtype);
  const std::int64_t num_rows = shape.empty() ? 1 : shape[0];
  const RowOrder order(conversion, num_rows);
  if (order.is_identity()) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % dtype.size() == 0;
    return aligned ? view_memory(data, std::move(shape), dtype, file) : copy_memory(data, std::move(shape), dtype);
  }
  const std::size_t row_bytes = tensor.size_bytes / static_cast<std::size_t>(num_rows);
  mx::array result = allocate_array(std::move(shape), dtype);
  std::byte* out = raw_bytes(result);
  for (std::int64_t row = 0; row < num_rows; ++row, out += row_bytes) {
    std::memcpy(out, data + row_bytes * static_cast<std::size_t>(order.source(row)), row_bytes);
  }
  return result;
}

NamedArrays convert_quantized(const GgufConversion& conversion, const BlockFormat& format, const std::byte* data) {
  const GgufTensor& tensor = *conversion.tensor;
  const mx::Shape shape = mlx_shape(tensor);
  if (shape.empty() || !conversion.name.ends_with(kWeightSuffix)) {
    throw Error(ErrorCode::unsupported, "[read_model_files] tensor " + printable(tensor.name) + " cannot be " +
                                            gguf_type_name(tensor.type) + ": only weight matrices can");
  }
  const std::int64_t num_columns = shape.back();
  std::int64_t num_rows = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) num_rows *= shape[i];
  const RowOrder order(conversion, num_rows);

  mx::Shape packed_shape = shape;
  packed_shape.back() = static_cast<mx::ShapeElem>(num_columns / kGroupSize * format.bits);
  mx::Shape scales_shape = shape;
  scales_shape.back() = static_cast<mx::ShapeElem>(num_columns / kGroupSize);
  mx::array packed = allocate_array(packed_shape, mx::uint32);

  const std::int64_t row_blocks = num_columns / format.block_items;
  const std::int64_t groups = num_columns / kGroupSize;
  for (const bool float_scales : {format.needs_float_scales, true}) {
    mx::array scales = allocate_array(scales_shape, float_scales ? mx::float32 : mx::float16);
    mx::array biases = allocate_array(scales_shape, scales.dtype());
    const auto scale_row_bytes = static_cast<std::size_t>(groups) * scales.itemsize();
    bool fits = true;
    for (std::int64_t row = 0; row < num_rows && fits && groups > 0; ++row) {
      const auto at = static_cast<std::size_t>(row);
      const AffineRow out{packed.data<std::uint32_t>() + row * groups * format.bits,
                          raw_bytes(scales) + at * scale_row_bytes, raw_bytes(biases) + at * scale_row_bytes,
                          float_scales};
      fits = format.convert_row(data + order.source(row) * row_blocks * format.block_bytes, row_blocks, out);
    }
    if (!fits) continue;  // once more, with float32 scales
    const std::string stem = conversion.name.substr(0, conversion.name.size() - std::strlen(kWeightSuffix));
    return {{conversion.name, std::move(packed)},
            {stem + ".scales", std::move(scales)},
            {stem + ".biases", std::move(biases)}};
  }
  throw Error(ErrorCode::internal, "[read_model_files] tensor " + printable(tensor.name) + " was not converted");
}

NamedArrays convert(const GgufConversion& conversion, std::uint64_t data_offset,
                    const std::shared_ptr<MappedFile>& file) {
  std::byte* data = file->bytes().data() + data_offset + conversion.tensor->offset;
  if (const auto dtype = float_dtype(conversion.tensor->type)) {
    return {{conversion.name, convert_float(conversion, *dtype, data, file)}};
  }
  return convert_quantized(conversion, block_format(conversion.tensor->type).value(), data);
}

}  // namespace

WeightMap convert_gguf_tensors(const std::vector<GgufConversion>& conversions, std::uint64_t data_offset,
                               const std::shared_ptr<MappedFile>& file) {
  for (const GgufConversion& conversion : conversions) {
    const GgufTensor& tensor = *conversion.tensor;
    if (!float_dtype(tensor.type) && !block_format(tensor.type)) {
      throw Error(ErrorCode::unsupported,
                  "[read_model_files] tensor " + printable(tensor.name) + " is " + gguf_type_name(tensor.type) +
                      "; types with an exact form in MLX are F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K");
    }
  }

  std::vector<NamedArrays> results(conversions.size());
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::atomic<bool> failed{false};
  const auto work = [&] {
    for (std::size_t i = next++; i < conversions.size() && !failed; i = next++) {
      try {
        results[i] = convert(conversions[i], data_offset, file);
      } catch (...) {
        if (!failed.exchange(true)) failure = std::current_exception();
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    const unsigned int num_threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
    try {
      for (unsigned int i = 1; i < num_threads; ++i) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads to be had: fewer do the same work
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);

  WeightMap weights;
  for (NamedArrays& arrays : results) {
    for (auto& [name, array] : arrays) {
      if (!weights.emplace(name, std::move(array)).second) {
        throw Error(ErrorCode::corrupt_data, "[read_model_files] two tensors become " + printable(name));
      }
    }
  }
  return weights;
}

}  // namespace reprise::internal
