#include "reprise/storage/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "reprise/base/error.h"
#include "reprise/storage/array_bytes.h"
#include "reprise/storage/array_memory.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/mapped_file.h"
#include "reprise/storage/safetensors_header.h"
#include "reprise/storage/system_error.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using internal::InputFile;
using internal::MappedFile;
using internal::printable;

constexpr const char* kRead = "read_safetensors";
using Tensors = std::map<std::string, mx::array>;
using Metadata = std::map<std::string, std::string>;

SafetensorsHeader read_header(const InputFile& input, const std::filesystem::path& file) {
  std::vector<std::byte> head(std::min<std::uint64_t>(input.size_bytes(), 8));
  input.read(0, head);
  if (head.size() == 8) {
    std::uint64_t length = 0;
    for (std::size_t i = 0; i < 8; ++i) length |= std::to_integer<std::uint64_t>(head[i]) << (8 * i);
    // A length that the file cannot hold is left to the parser to refuse: no memory is asked for by it.
    if (length <= input.size_bytes() - 8 && length <= 100'000'000) {
      head.resize(8 + length);
      input.read(8, std::span(head).subspan(8));
    }
  }
  return parse_safetensors_header(head, input.size_bytes(), file.string());
}

mx::Dtype dtype_of(const TensorRecord& record, const std::filesystem::path& file) {
  const std::optional<mx::Dtype> dtype = internal::mlx_dtype(record.dtype);
  if (!dtype) {
    throw Error(ErrorCode::unsupported, "[read_safetensors] " + file.string() + ": MLX has no dtype " + record.dtype +
                                            ", which tensor " + printable(record.name) + " has");
  }
  return *dtype;
}

mx::Shape shape_of(const TensorRecord& record, const std::filesystem::path& file) {
  mx::Shape shape;
  for (const std::int64_t dim : record.shape) {
    if (dim > std::numeric_limits<mx::ShapeElem>::max()) {
      throw Error(ErrorCode::unsupported, "[read_safetensors] " + file.string() + ": tensor " + printable(record.name) +
                                              " has an extent of " + std::to_string(dim) + ", beyond MLX's int32");
    }
    shape.push_back(static_cast<mx::ShapeElem>(dim));
  }
  return shape;
}

// Any other byte in a bool is undefined behaviour for whoever reads it.
void check_bools(const mx::array& array, const TensorRecord& record, const std::filesystem::path& file) {
  if (array.dtype() != mx::bool_) return;
  const auto* bytes = array.data<unsigned char>();
  if (std::any_of(bytes, bytes + array.nbytes(), [](unsigned char byte) { return byte > 1; })) {
    throw Error(ErrorCode::corrupt_data, "[read_safetensors] " + file.string() + ": tensor " + printable(record.name) +
                                             " is BOOL, but holds bytes other than 0 and 1");
  }
}

mx::array read_tensor(const InputFile& input, const SafetensorsHeader& header, const TensorRecord& record,
                      const std::filesystem::path& file) {
  mx::array array = internal::allocate_array(shape_of(record, file), dtype_of(record, file));
  if (array.nbytes() > 0) {
    input.read(header.data_offset + record.begin, {reinterpret_cast<std::byte*>(array.data<char>()), array.nbytes()});
  }
  return array;
}

// `data`: the tensor's, in memory that `owner` keeps.
mx::array view_tensor(std::byte* data, std::shared_ptr<const void> owner, const TensorRecord& record,
                      const std::filesystem::path& file) {
  const mx::Dtype dtype = dtype_of(record, file);
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % dtype.size() == 0;
  if (record.begin == record.end || !aligned) return internal::copy_memory(data, shape_of(record, file), dtype);
  return internal::view_memory(data, shape_of(record, file), dtype, std::move(owner));
}

std::string encode_planned(const SafetensorsHeader& header) {
  std::string head = internal::encode_safetensors_header(header);
  if (head.size() == header.data_offset) return head;
  throw Error(ErrorCode::internal, "[append_safetensors] the header must have " + std::to_string(header.data_offset) +
                                       " bytes as planned, but got " + std::to_string(head.size()));
}

class StringFile final : public WritableFile {
 public:
  void append(std::span<const std::byte> bytes) override {
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  void overwrite(std::uint64_t offset, std::span<const std::byte> bytes) override {
    std::copy(bytes.begin(), bytes.end(),
              std::as_writable_bytes(std::span(text)).begin() + static_cast<std::ptrdiff_t>(offset));
  }
  void sync() override {}
  void close() override {}

  std::string text;
};

}  // namespace

std::vector<const TensorRecord*> in_data_order(const SafetensorsHeader& header) {
  std::vector<const TensorRecord*> order;
  for (const TensorRecord& record : header.tensors) order.push_back(&record);
  std::sort(order.begin(), order.end(), [](const TensorRecord* a, const TensorRecord* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  return order;
}

SafetensorsHeader read_safetensors_header(const std::filesystem::path& file) {
  return read_header(InputFile(file, kRead), file);
}

Safetensors read_safetensors(const std::filesystem::path& file, ReadMode mode, const OnTensor& on_tensor) {
  Safetensors result;
  if (mode == ReadMode::copy) {
    const InputFile input(file, kRead);
    result.header = read_header(input, file);
    for (const TensorRecord* record : in_data_order(result.header)) {
      const auto& added = *result.tensors.emplace(record->name, read_tensor(input, result.header, *record, file)).first;
      check_bools(added.second, *record, file);
      if (on_tensor) on_tensor(result.header, added.second);
    }
  } else {
    const std::shared_ptr<MappedFile> mapping = MappedFile::open(file, kRead);
    result.header = parse_safetensors_header(mapping->bytes(), mapping->bytes().size(), file.string());
    for (const TensorRecord* record : in_data_order(result.header)) {
      std::byte* data = mapping->bytes().data() + result.header.data_offset + record->begin;
      const auto& added = *result.tensors.emplace(record->name, view_tensor(data, mapping, *record, file)).first;
      check_bools(added.second, *record, file);
      if (on_tensor) on_tensor(result.header, added.second);
    }
  }
  return result;
}

Safetensors parse_safetensors(std::string bytes, std::string_view source) {
  const auto owner = std::make_shared<std::string>(std::move(bytes));
  const std::span<std::byte> file = std::as_writable_bytes(std::span(*owner));
  Safetensors result;
  result.header = parse_safetensors_header(file, file.size(), source);
  for (const TensorRecord& record : result.header.tensors) {
    std::byte* data = file.data() + result.header.data_offset + record.begin;
    const auto& added = *result.tensors.emplace(record.name, view_tensor(data, owner, record, source)).first;
    check_bools(added.second, record, source);
  }
  return result;
}

SafetensorsHeader plan_safetensors(const Tensors& tensors, const Metadata& metadata) {
  SafetensorsHeader header;
  header.metadata = metadata;
  std::vector<std::pair<const mx::array*, std::size_t>> order;  // the array and where its record stands
  for (const auto& [name, array] : tensors) {
    TensorRecord& record = header.tensors.emplace_back();
    record.name = name;
    record.dtype = internal::safetensors_dtype(array.dtype());
    record.shape.assign(array.shape().begin(), array.shape().end());
    order.emplace_back(&array, order.size());
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first->itemsize() > b.first->itemsize(); });
  std::uint64_t position = 0;
  for (const auto& [array, index] : order) {
    header.tensors[index].begin = position;
    position += array->nbytes();
    header.tensors[index].end = position;
  }
  header.data_offset = internal::encode_safetensors_header(header).size();
  return header;
}

void append_safetensors(WritableFile& output, const SafetensorsHeader& header, const Tensors& tensors) {
  const std::string head = encode_planned(header);
  output.append(std::as_bytes(std::span(head)));
  for (const TensorRecord* record : in_data_order(header)) {
    for_each_run(with_long_runs(tensors.at(record->name)), [&](std::span<const std::byte> run) { output.append(run); });
  }
}

void overwrite_safetensors_header(WritableFile& output, const SafetensorsHeader& header) {
  const std::string head = encode_planned(header);
  output.overwrite(0, std::as_bytes(std::span(head)));
}

std::string serialize_safetensors(const Tensors& tensors, const Metadata& metadata) {
  const SafetensorsHeader header = plan_safetensors(tensors, metadata);
  StringFile output;
  std::uint64_t data_bytes = 0;
  for (const TensorRecord& record : header.tensors) data_bytes += record.end - record.begin;
  output.text.reserve(header.data_offset + data_bytes);
  append_safetensors(output, header, tensors);
  return std::move(output.text);
}

void write_safetensors(const std::filesystem::path& file, const Tensors& tensors, const Metadata& metadata) {
  const SafetensorsHeader header = plan_safetensors(tensors, metadata);
  replace_file(file, [&](WritableFile& output) { append_safetensors(output, header, tensors); });
}

}  // namespace reprise
