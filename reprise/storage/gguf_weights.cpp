#include "reprise/storage/gguf_weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "mlx/ops.h"
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
  RowOrder() = default;
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
  if (conversion.holds_one_more) {
    mx::array less = mx::subtract(mx::astype(copy_memory(data, std::move(shape), dtype), mx::float32), mx::array(1.0f));
    less.eval();
    return less;
  }
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

// A quantised tensor: where its rows come from and go to.
class QuantizedTensor {
 public:
  QuantizedTensor(const GgufConversion& conversion, std::span<const std::byte> data)
      : conversion_(conversion), format_(block_format(conversion.tensor->type).value()), data_(data) {
    const GgufTensor& tensor = *conversion.tensor;
    packed_shape_ = mlx_shape(tensor);
    if (packed_shape_.empty() || !conversion.name.ends_with(kWeightSuffix)) {
      throw Error(ErrorCode::unsupported, "[read_model_files] tensor " + printable(tensor.name) + " cannot be " +
                                              gguf_type_name(tensor.type) + ": only weight matrices can");
    }
    for (std::size_t i = 0; i + 1 < packed_shape_.size(); ++i) num_rows_ *= packed_shape_[i];
    num_columns_ = packed_shape_.back();
    order_ = RowOrder(conversion, num_rows_);
    scales_shape_ = packed_shape_;
    packed_shape_.back() = static_cast<mx::ShapeElem>(row_words());
    scales_shape_.back() = static_cast<mx::ShapeElem>(groups());
  }

  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t row_bytes() const { return num_columns_ / format_.block_items * format_.block_bytes; }

  std::size_t size_bytes() const { return packed_bytes() + 2 * scales_bytes() + 3 * kBefore; }

  // Takes the next size_bytes() of `block`, or memory of MLX's own.
  void place(const std::shared_ptr<MemoryBlock>& block, std::size_t& offset) {
    const auto make = [&](const mx::Shape& shape, mx::Dtype dtype, std::size_t size_bytes) {
      if (!block || size_bytes == 0) return allocate_array(shape, dtype);
      std::byte* data = block->data() + offset + kBefore;
      offset += kBefore + size_bytes;
      // MLX asks there for the size of a buffer, and copies what seems to be a small part of a large one.
      std::memcpy(data - sizeof(size_bytes), &size_bytes, sizeof(size_bytes));
      return view_memory(data, shape, dtype, block);
    };
    const mx::Dtype scales_dtype = mx::float16;
    packed_.emplace(make(packed_shape_, mx::uint32, packed_bytes()));
    scales_.emplace(make(scales_shape_, scales_dtype, scales_bytes()));
    biases_.emplace(make(scales_shape_, scales_dtype, scales_bytes()));
  }

  // Rows [begin, end), on any thread. Gives the file's memory back.
  void convert(std::int64_t begin, std::int64_t end, const MappedFile& file) {
    const bool float_scales = scales_->dtype() == mx::float32;
    const auto scale_row_bytes = static_cast<std::size_t>(groups()) * scales_->itemsize();
    for (std::int64_t row = begin; row < end && groups() > 0; ++row) {
      const auto at = static_cast<std::size_t>(row);
      const AffineRow out{packed_->data<std::uint32_t>() + row * row_words(),
                          raw_bytes(*scales_) + at * scale_row_bytes, raw_bytes(*biases_) + at * scale_row_bytes,
                          float_scales};
      const std::byte* from = data_.data() + order_.source(row) * row_bytes();
      if (!format_.convert_row(from, num_columns_ / format_.block_items, out)) {
        fits_ = false;
        return;
      }
    }
    if (order_.is_identity()) {
      file.release(data_.subspan(static_cast<std::size_t>(begin * row_bytes()),
                                 static_cast<std::size_t>((end - begin) * row_bytes())));
    }
  }

  // After all rows: once more, with float32 scales, where float16 does not hold them.
  NamedArrays finish(const MappedFile& file) {
    if (!fits_) {
      fits_ = true;
      scales_.emplace(allocate_array(scales_shape_, mx::float32));
      biases_.emplace(allocate_array(scales_shape_, mx::float32));
      convert(0, num_rows_, file);
    }
    if (!fits_) {
      throw Error(ErrorCode::internal,
                  "[read_model_files] tensor " + printable(conversion_.tensor->name) + " was not converted");
    }
    file.release(data_);
    const std::string stem = conversion_.name.substr(0, conversion_.name.size() - std::strlen(kWeightSuffix));
    return {{conversion_.name, std::move(*packed_)},
            {stem + ".scales", std::move(*scales_)},
            {stem + ".biases", std::move(*biases_)}};
  }

 private:
  static constexpr std::size_t kBefore = 64;  // each array's, and keeps them aligned

  static std::size_t rounded(std::size_t size_bytes) { return (size_bytes + 63) / 64 * 64; }

  std::int64_t groups() const { return num_columns_ / format_.group_size; }
  std::int64_t row_words() const { return num_columns_ * format_.bits / 32; }
  std::size_t packed_bytes() const { return rounded(static_cast<std::size_t>(num_rows_ * row_words()) * 4); }
  std::size_t scales_bytes() const { return rounded(static_cast<std::size_t>(num_rows_ * groups()) * 2); }

  GgufConversion conversion_;
  BlockFormat format_;
  std::span<const std::byte> data_;
  mx::Shape packed_shape_;
  mx::Shape scales_shape_;
  std::int64_t num_rows_ = 1;
  std::int64_t num_columns_ = 0;
  RowOrder order_;
  std::optional<mx::array> packed_;
  std::optional<mx::array> scales_;
  std::optional<mx::array> biases_;
  std::atomic<bool> fits_ = true;
};

// Some rows of one tensor, worth handing to a thread.
struct Piece {
  QuantizedTensor* tensor;
  std::int64_t begin;
  std::int64_t end;
};

// work(i) for each i in [0, count), on up to `num_threads` threads. The kernels' pool would not do: its threads spin,
// and the tokenizer, which is built meanwhile, needs a processor too.
template <typename Work>
void run_on_threads(unsigned int num_threads, std::size_t count, const Work& work) {
  std::atomic<std::size_t> next{0};
  const auto take = [&] {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::jthread> helpers;
  try {
    for (unsigned int i = 1; i < num_threads; ++i) helpers.emplace_back(take);
  } catch (const std::system_error&) {  // no more threads to be had: fewer do the same work
  }
  take();
}

void convert_quantized(std::deque<QuantizedTensor>& tensors, const MappedFile& file, unsigned int num_threads) {
  std::shared_ptr<MemoryBlock> block;
  if (can_view_memory() && !tensors.empty()) {
    std::size_t size_bytes = 0;
    for (const QuantizedTensor& tensor : tensors) size_bytes += tensor.size_bytes();
    block = MemoryBlock::allocate(size_bytes);
  }
  constexpr std::int64_t kPieceBytes = 1 << 19;
  std::size_t offset = 0;
  std::vector<Piece> pieces;
  for (QuantizedTensor& tensor : tensors) {
    tensor.place(block, offset);
    const std::int64_t rows = std::max<std::int64_t>(1, kPieceBytes / std::max<std::int64_t>(1, tensor.row_bytes()));
    for (std::int64_t row = 0; row < tensor.num_rows(); row += rows) {
      pieces.push_back({&tensor, row, std::min(row + rows, tensor.num_rows())});
    }
  }
  run_on_threads(num_threads, pieces.size(), [&](std::size_t i) {
    const Piece& piece = pieces[i];
    piece.tensor->convert(piece.begin, piece.end, file);
  });
}

}  // namespace

WeightMap convert_gguf_tensors(const std::vector<GgufConversion>& conversions, std::uint64_t data_offset,
                               const std::shared_ptr<MappedFile>& file, bool leaves_a_processor) {
  for (const GgufConversion& conversion : conversions) {
    const GgufTensor& tensor = *conversion.tensor;
    if (!float_dtype(tensor.type) && !block_format(tensor.type)) {
      throw Error(ErrorCode::unsupported,
                  "[read_model_files] tensor " + printable(tensor.name) + " is " + gguf_type_name(tensor.type) +
                      "; types that are read are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL");
    }
  }

  std::deque<QuantizedTensor> quantized;  // neither moved nor copied
  NamedArrays arrays;
  for (const GgufConversion& conversion : conversions) {
    const std::span<std::byte> data =
        file->bytes().subspan(data_offset + conversion.tensor->offset, conversion.tensor->size_bytes);
    if (const auto dtype = float_dtype(conversion.tensor->type)) {
      arrays.emplace_back(conversion.name, convert_float(conversion, *dtype, data.data(), file));
    } else {
      quantized.emplace_back(conversion, data);
    }
  }
  const unsigned int processors = std::thread::hardware_concurrency();
  convert_quantized(quantized, *file,
                    std::clamp(processors > 1 && leaves_a_processor ? processors - 1 : processors, 1U, 4U));
  for (QuantizedTensor& tensor : quantized) {
    for (auto& array : tensor.finish(*file)) arrays.push_back(std::move(array));
  }

  WeightMap weights;
  for (auto& [name, array] : arrays) {
    if (!weights.emplace(name, std::move(array)).second) {
      throw Error(ErrorCode::corrupt_data, "[read_model_files] two tensors become " + printable(name));
    }
  }
  return weights;
}

}  // namespace reprise::internal
