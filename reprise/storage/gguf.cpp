#include "reprise/storage/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <type_traits>

#include "reprise/base/error.h"
#include "reprise/storage/system_error.h"

namespace reprise {
namespace {

using internal::printable;

static_assert(std::endian::native == std::endian::little, "the file's numbers are taken as they lie");

struct TypeRow {
  std::uint32_t number;
  const char* name;
  std::uint64_t block_items;
  std::uint64_t block_bytes;
};

// ggml.h's enum ggml_type and the sizes of its blocks. Numbers are stored on disk.
constexpr std::array<TypeRow, 34> kTypes{{
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},
    {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},    {41, "Q1_0", 128, 18},
}};

const TypeRow* find_type(std::uint32_t number) {
  const auto row = std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeRow& r) { return r.number == number; });
  return row == kTypes.end() ? nullptr : &*row;
}

// Types of metadata values. Numbers are stored on disk.
enum class ValueType : std::uint32_t {
  uint8 = 0,
  int8 = 1,
  uint16 = 2,
  int16 = 3,
  uint32 = 4,
  int32 = 5,
  float32 = 6,
  boolean = 7,
  string = 8,
  array = 9,
  uint64 = 10,
  int64 = 11,
  float64 = 12,
};

constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint32_t kMaxDims = 4;

class Parser {
 public:
  Parser(std::span<const std::byte> bytes, std::uint64_t file_size_bytes)
      : bytes_(bytes), file_size_(file_size_bytes) {}

  GgufHeader parse() {
    GgufHeader header;
    if (bytes_.size() < 4 || std::memcmp(bytes_.data(), "GGUF", 4) != 0) fail("the file does not begin with \"GGUF\"");
    position_ = 4;
    header.version = number<std::uint32_t>("the version");
    if (header.version != 2 && header.version != 3) {
      const bool swapped = (header.version & 0xffff) == 0 && header.version != 0;
      throw Error(ErrorCode::unsupported, swapped ? "[parse_gguf] big-endian files are not supported"
                                                  : "[parse_gguf] versions 2 and 3 are supported, but got version " +
                                                        std::to_string(header.version));
    }
    const auto num_tensors = number<std::uint64_t>("the number of tensors");
    const auto num_entries = number<std::uint64_t>("the number of metadata entries");
    for (std::uint64_t i = 0; i < num_entries; ++i) read_entry(header);
    for (std::uint64_t i = 0; i < num_tensors; ++i) read_tensor(header);
    place_tensors(header);
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::corrupt_data, "[parse_gguf] byte " + std::to_string(position_) + ": " + what);
  }

  std::uint64_t remaining() const { return bytes_.size() - position_; }

  void need(std::uint64_t size, const char* what) const {
    if (size > remaining()) fail(std::string("the file ends inside ") + what);
  }

  template <typename T>
  T number(const char* what) {
    need(sizeof(T), what);
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }

  std::string string(const char* what) {
    const auto length = number<std::uint64_t>(what);
    need(length, what);
    std::string text(reinterpret_cast<const char*>(bytes_.data()) + position_, length);
    position_ += length;
    return text;
  }

  bool boolean() {
    const auto value = number<std::uint8_t>("a boolean");
    if (value > 1) fail("a boolean must be 0 or 1, but got " + std::to_string(value));
    return value == 1;
  }

  // No more room is asked for than the file has bytes to fill it.
  std::uint64_t checked_count(std::uint64_t count, std::uint64_t item_bytes) const {
    if (count > remaining() / item_bytes) fail("an array of " + std::to_string(count) + " items does not fit the file");
    return count;
  }

  template <typename Stored, typename Kept>
  GgufArray numbers(std::uint64_t count) {
    std::vector<Kept> values(checked_count(count, sizeof(Stored)));
    for (Kept& value : values) {
      const auto stored = number<Stored>("an array");
      if constexpr (std::is_same_v<Stored, std::uint64_t>) {
        if (stored > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
          fail("an array's item " + std::to_string(stored) + " is too large");
        }
      }
      value = static_cast<Kept>(+stored);  // promoted first: a sign is meant to be kept
    }
    return values;
  }

  GgufArray array() {
    const auto type = number<std::uint32_t>("an array's type");
    const auto count = number<std::uint64_t>("an array's length");
    switch (static_cast<ValueType>(type)) {
      case ValueType::uint8:
        return numbers<std::uint8_t, std::int64_t>(count);
      case ValueType::int8:
        return numbers<std::int8_t, std::int64_t>(count);
      case ValueType::uint16:
        return numbers<std::uint16_t, std::int64_t>(count);
      case ValueType::int16:
        return numbers<std::int16_t, std::int64_t>(count);
      case ValueType::uint32:
        return numbers<std::uint32_t, std::int64_t>(count);
      case ValueType::int32:
        return numbers<std::int32_t, std::int64_t>(count);
      case ValueType::uint64:
        return numbers<std::uint64_t, std::int64_t>(count);
      case ValueType::int64:
        return numbers<std::int64_t, std::int64_t>(count);
      case ValueType::float32:
        return numbers<float, double>(count);
      case ValueType::float64:
        return numbers<double, double>(count);
      case ValueType::boolean: {
        std::vector<bool> values(checked_count(count, 1));
        for (std::uint64_t i = 0; i < count; ++i) values[i] = boolean();
        return values;
      }
      case ValueType::string: {
        std::vector<std::string> values(checked_count(count, 8));
        for (std::string& value : values) value = string("an array of strings");
        return values;
      }
      case ValueType::array:
        throw Error(ErrorCode::unsupported, "[parse_gguf] arrays of arrays are not supported");
      default:
        fail("unknown type " + std::to_string(type) + " of an array");
    }
  }

  GgufValue value() {
    const auto type = number<std::uint32_t>("a value's type");
    switch (static_cast<ValueType>(type)) {
      case ValueType::uint8:
        return std::uint64_t{number<std::uint8_t>("a value")};
      case ValueType::int8:
        return std::int64_t{number<std::int8_t>("a value")};
      case ValueType::uint16:
        return std::uint64_t{number<std::uint16_t>("a value")};
      case ValueType::int16:
        return std::int64_t{number<std::int16_t>("a value")};
      case ValueType::uint32:
        return std::uint64_t{number<std::uint32_t>("a value")};
      case ValueType::int32:
        return std::int64_t{number<std::int32_t>("a value")};
      case ValueType::uint64:
        return number<std::uint64_t>("a value");
      case ValueType::int64:
        return number<std::int64_t>("a value");
      case ValueType::float32:
        return double{number<float>("a value")};
      case ValueType::float64:
        return number<double>("a value");
      case ValueType::boolean:
        return boolean();
      case ValueType::string:
        return string("a string");
      case ValueType::array:
        return array();
      default:
        fail("unknown type " + std::to_string(type) + " of a value");
    }
  }

  void read_entry(GgufHeader& header) {
    std::string key = string("a metadata key");
    if (key.empty()) fail("an empty metadata key");
    if (header.metadata.contains(key)) fail("metadata key " + printable(key) + " twice");
    header.metadata.emplace(std::move(key), value());
  }

  void read_tensor(GgufHeader& header) {
    GgufTensor tensor;
    tensor.name = string("a tensor's name");
    if (tensor.name.empty()) fail("a tensor without a name");
    if (!names_.insert(tensor.name).second) fail("two tensors named " + printable(tensor.name));
    const auto num_dims = number<std::uint32_t>("a tensor's shape");
    if (num_dims > kMaxDims) fail(printable(tensor.name) + " has " + std::to_string(num_dims) + " dimensions");
    tensor.shape.resize(num_dims);
    std::uint64_t items = 1;
    for (std::uint32_t i = 0; i < num_dims; ++i) {
      const auto dim = number<std::uint64_t>("a tensor's shape");
      if (dim == 0) fail(printable(tensor.name) + " has an extent of 0");
      if (dim > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) ||
          __builtin_mul_overflow(items, dim, &items)) {
        fail("the shape of " + printable(tensor.name) + " overflows");
      }
      tensor.shape[num_dims - 1 - i] = static_cast<std::int64_t>(dim);
    }
    tensor.type = number<std::uint32_t>("a tensor's type");
    const TypeRow* type = find_type(tensor.type);
    if (type == nullptr) {
      throw Error(ErrorCode::unsupported,
                  "[parse_gguf] tensor " + printable(tensor.name) + " has unknown type " + std::to_string(tensor.type));
    }
    const std::uint64_t row_items = num_dims == 0 ? 1 : static_cast<std::uint64_t>(tensor.shape.back());
    if (row_items % type->block_items != 0) {
      fail("rows of " + printable(tensor.name) + " must be a multiple of " + std::to_string(type->block_items) +
           " for " + type->name + ", but got " + std::to_string(row_items));
    }
    if (__builtin_mul_overflow(items / type->block_items, type->block_bytes, &tensor.size_bytes)) {
      fail("the size of " + printable(tensor.name) + " overflows");
    }
    tensor.offset = number<std::uint64_t>("a tensor's offset");
    header.tensors.push_back(std::move(tensor));
  }

  std::uint64_t alignment_of(const GgufHeader& header) const {
    const auto entry = header.metadata.find("general.alignment");
    if (entry == header.metadata.end()) return kDefaultAlignment;
    const auto* value = std::get_if<std::uint64_t>(&entry->second);
    if (value == nullptr || !std::has_single_bit(*value) || *value > (std::uint64_t{1} << 31)) {
      fail("general.alignment must be a power of two in 32 bits");
    }
    return *value;
  }

  // Sets data_offset and checks where the tensors lie.
  void place_tensors(GgufHeader& header) const {
    const std::uint64_t alignment = alignment_of(header);
    header.data_offset = (position_ + alignment - 1) / alignment * alignment;
    if (header.tensors.empty()) {
      header.data_offset = std::min(header.data_offset, file_size_);
      return;
    }
    if (header.data_offset > file_size_) fail("the file ends before its data section");
    const std::uint64_t data_bytes = file_size_ - header.data_offset;
    std::vector<const GgufTensor*> order;
    for (const GgufTensor& tensor : header.tensors) {
      if (tensor.offset % alignment != 0) fail("the offset of " + printable(tensor.name) + " is not aligned");
      if (tensor.offset > data_bytes || tensor.size_bytes > data_bytes - tensor.offset) {
        fail(printable(tensor.name) + " lies outside the file (cut off?)");
      }
      order.push_back(&tensor);
    }
    std::sort(order.begin(), order.end(), [](const GgufTensor* a, const GgufTensor* b) {
      return std::pair(a->offset, a->size_bytes) < std::pair(b->offset, b->size_bytes);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
      if (order[i]->offset < order[i - 1]->offset + order[i - 1]->size_bytes) {
        fail(printable(order[i]->name) + " overlaps " + printable(order[i - 1]->name));
      }
    }
  }

  std::span<const std::byte> bytes_;
  std::uint64_t file_size_;
  std::uint64_t position_ = 0;
  std::set<std::string> names_;
};

}  // namespace

GgufHeader parse_gguf(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
  return Parser(bytes, file_size_bytes).parse();
}

std::string gguf_type_name(std::uint32_t type) {
  const TypeRow* row = find_type(type);
  return row != nullptr ? row->name : "type " + std::to_string(type);
}

}  // namespace reprise
