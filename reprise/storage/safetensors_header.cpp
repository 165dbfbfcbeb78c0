#include "reprise/storage/safetensors_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "reprise/storage/system_error.h"

namespace reprise {
namespace {

static_assert(std::endian::native == std::endian::little, "the data is taken as it lies in the file");

namespace mx = mlx::core;
using internal::printable;
using json = nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr const char* kMetadataName = "__metadata__";

struct DtypeRow {
  std::string_view name;
  std::uint64_t bits;
  std::optional<mx::Dtype> dtype;
};

const std::array<DtypeRow, 21> kDtypes{{
    {"BOOL", 8, mx::bool_},
    {"U8", 8, mx::uint8},
    {"I8", 8, mx::int8},
    {"U16", 16, mx::uint16},
    {"I16", 16, mx::int16},
    {"F16", 16, mx::float16},
    {"BF16", 16, mx::bfloat16},
    {"U32", 32, mx::uint32},
    {"I32", 32, mx::int32},
    {"F32", 32, mx::float32},
    {"U64", 64, mx::uint64},
    {"I64", 64, mx::int64},
    {"F64", 64, mx::float64},
    {"C64", 64, mx::complex64},
    {"F8_E4M3", 8, mx::uint8},  // MLX has no such dtype, but operations on its bytes
    {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
}};

// Takes the JSON apart as it is read: no tree is built, and whatever the format has no place for ends the parse.
class HeaderParser final : public json::json_sax_t {
 public:
  std::vector<TensorRecord> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
  std::string failure;

  // MLX writes a null where there is no metadata.
  bool null() override {
    if (place_ != Place::root || key_ != kMetadataName) return unexpected("null");
    if (std::exchange(metadata_seen_, true)) return fail("two __metadata__ objects");
    return true;
  }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override { return unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { return unexpected(text.substr(0, 40)); }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::shape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return unexpected(std::to_string(value));
      }
      tensors.back().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::offsets && num_offsets_ < 2) {
      (num_offsets_++ == 0 ? tensors.back().begin : tensors.back().end) = value;
      return true;
    }
    return unexpected(std::to_string(value));
  }

  bool string(string_t& text) override {
    if (place_ == Place::metadata) {
      metadata.emplace_back(key_, std::move(text));
      return true;
    }
    if (place_ == Place::tensor && key_ == "dtype") {
      tensors.back().dtype = std::move(text);
      return true;
    }
    return unexpected("a string");
  }

  bool key(string_t& text) override {
    key_ = std::move(text);
    if (place_ != Place::tensor) return true;
    for (std::size_t i = 0; i < kMembers.size(); ++i) {
      if (key_ != kMembers[i]) continue;
      if (members_seen_[i])
        return fail("member " + printable(key_) + " twice in tensor " + printable(tensors.back().name));
      members_seen_[i] = true;
      return true;
    }
    return fail("unknown member " + printable(key_) + " in tensor " + printable(tensors.back().name));
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::root;
    } else if (place_ == Place::root && key_ == kMetadataName) {
      if (std::exchange(metadata_seen_, true)) return fail("two __metadata__ objects");
      place_ = Place::metadata;
    } else if (place_ == Place::root) {
      place_ = Place::tensor;
      members_seen_ = {};
      num_offsets_ = 0;
      tensors.emplace_back().name = std::move(key_);
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::root) {
      place_ = Place::outside;
      return true;
    }
    if (place_ == Place::tensor) {
      for (std::size_t i = 0; i < kMembers.size(); ++i) {
        if (!members_seen_[i]) {
          return fail("tensor " + printable(tensors.back().name) + " lacks " + std::string(kMembers[i]));
        }
      }
      if (num_offsets_ != 2) return fail("tensor " + printable(tensors.back().name) + " needs two data_offsets");
    }
    place_ = Place::root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::tensor && key_ == "shape") {
      place_ = Place::shape;
    } else if (place_ == Place::tensor && key_ == "data_offsets") {
      place_ = Place::offsets;
    } else {
      return unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    if (!failure.empty()) return false;
    return fail("no JSON from its byte " + std::to_string(position) + " on");
  }

 private:
  enum class Place { outside, root, metadata, tensor, shape, offsets };
  static constexpr std::array<std::string_view, 3> kMembers{"dtype", "shape", "data_offsets"};

  bool fail(std::string text) {
    if (failure.empty()) failure = std::move(text);
    return false;
  }

  bool unexpected(const std::string& what) {
    std::string where;
    if (place_ == Place::tensor || place_ == Place::shape || place_ == Place::offsets) {
      where = " in tensor " + printable(tensors.back().name);
    }
    return fail("unexpected " + what + " for " + printable(key_) + where);
  }

  Place place_ = Place::outside;
  std::string key_;
  std::array<bool, 3> members_seen_{};
  int num_offsets_ = 0;
  bool metadata_seen_ = false;
};

[[noreturn]] void corrupt(std::string_view source, const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[read_safetensors] " + std::string(source) + ": " + what);
}

// What a shape of this dtype must occupy. Throws when the shape has no size in 64 bits or ends inside a byte.
std::uint64_t needed_bytes(const TensorRecord& record, std::string_view source) {
  const std::optional<std::uint64_t> item_bits = internal::safetensors_item_bits(record.dtype);
  if (!item_bits) corrupt(source, "tensor " + printable(record.name) + " has unknown dtype " + printable(record.dtype));
  // Zeros are left out of the check: strides are products without them.
  std::uint64_t bits = *item_bits;
  bool empty = false;
  for (const std::int64_t dim : record.shape) {
    if (dim == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(dim), &bits)) {
      corrupt(source, "the shape of tensor " + printable(record.name) + " overflows");
    }
  }
  if (empty) return 0;
  if (bits % 8 != 0) corrupt(source, "tensor " + printable(record.name) + " ends inside a byte");
  return bits / 8;
}

// The data section must be covered by the tensors exactly: no overlap, no gap, nothing behind the last one.
void check_layout(const std::vector<TensorRecord>& tensors, std::uint64_t data_bytes, std::string_view source) {
  std::vector<const TensorRecord*> order;
  order.reserve(tensors.size());
  for (const TensorRecord& record : tensors) order.push_back(&record);
  std::sort(order.begin(), order.end(), [](const TensorRecord* a, const TensorRecord* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t position = 0;
  for (const TensorRecord* record : order) {
    const std::string range = "[" + std::to_string(record->begin) + ", " + std::to_string(record->end) + ")";
    if (record->begin > record->end || record->end > data_bytes) {
      corrupt(source, "data_offsets " + range + " of tensor " + printable(record->name) + " lie outside the data of " +
                          std::to_string(data_bytes) + " bytes");
    }
    if (record->begin != position) {
      corrupt(source, "data_offsets " + range + " of tensor " + printable(record->name) +
                          (record->begin < position ? " overlap" : " leave a gap behind") + " what ends at byte " +
                          std::to_string(position));
    }
    const std::uint64_t needed = needed_bytes(*record, source);
    if (record->end - record->begin != needed) {
      corrupt(source, "tensor " + printable(record->name) + " needs " + std::to_string(needed) +
                          " bytes by its shape, but got data_offsets " + range);
    }
    position = record->end;
  }
  if (position != data_bytes) {
    corrupt(source, "the tensors end at byte " + std::to_string(position) + " of the data, but it has " +
                        std::to_string(data_bytes) + " bytes");
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size_bytes,
                                           std::string_view source) {
  if (file_size_bytes < kLengthBytes || head.size() < kLengthBytes) {
    corrupt(source, "no safetensors file: it has only " + std::to_string(file_size_bytes) + " bytes");
  }
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) length |= std::to_integer<std::uint64_t>(head[i]) << (8 * i);
  if (length > kMaxHeaderBytes || length > file_size_bytes - kLengthBytes || length > head.size() - kLengthBytes) {
    corrupt(source, "a header of " + std::to_string(length) + " bytes does not fit a file of " +
                        std::to_string(file_size_bytes) + " (cut off, or no safetensors file)");
  }
  const auto* text = reinterpret_cast<const char*>(head.data()) + kLengthBytes;
  if (length == 0 || text[0] != '{') corrupt(source, "the header does not begin with '{'");

  // The JSON parser would take a NUL for the end of the text.
  if (std::memchr(text, 0, length) != nullptr) corrupt(source, "header: no JSON: it holds a NUL");

  HeaderParser parser;
  if (!json::sax_parse(text, text + length, &parser)) corrupt(source, "header: " + parser.failure);

  SafetensorsHeader header;
  header.data_offset = kLengthBytes + length;
  header.tensors = std::move(parser.tensors);
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorRecord& a, const TensorRecord& b) { return a.name < b.name; });
  const auto twin = std::adjacent_find(header.tensors.begin(), header.tensors.end(),
                                       [](const TensorRecord& a, const TensorRecord& b) { return a.name == b.name; });
  if (twin != header.tensors.end()) corrupt(source, "two tensors named " + printable(twin->name));
  for (auto& [key, value] : parser.metadata) {
    if (!header.metadata.emplace(key, std::move(value)).second)
      corrupt(source, "metadata key " + printable(key) + " twice");
  }
  check_layout(header.tensors, file_size_bytes - header.data_offset, source);
  return header;
}

namespace internal {

std::optional<std::uint64_t> safetensors_item_bits(std::string_view dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == dtype) return row.bits;
  }
  return std::nullopt;
}

std::optional<mx::Dtype> mlx_dtype(std::string_view safetensors_dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.name == safetensors_dtype) return row.dtype;
  }
  return std::nullopt;
}

std::string safetensors_dtype(mx::Dtype dtype) {
  for (const DtypeRow& row : kDtypes) {
    if (row.dtype && *row.dtype == dtype) return std::string(row.name);
  }
  throw Error(ErrorCode::internal, "[safetensors] an MLX dtype without a name");
}

std::string encode_safetensors_header(const SafetensorsHeader& header) {
  try {
    std::string text(kLengthBytes, '\0');
    text += '{';
    bool first = true;
    const auto open_member = [&](const std::string& name) {
      if (!std::exchange(first, false)) text += ',';
      text += json(name).dump() + ":{";
    };
    const auto add_metadata = [&] {
      open_member(kMetadataName);
      for (const auto& [key, value] : header.metadata) {
        if (text.back() != '{') text += ',';
        text += json(key).dump() + ':' + json(value).dump();
      }
      text += '}';
    };
    bool metadata_due = !header.metadata.empty();
    for (const TensorRecord& record : header.tensors) {
      if (record.name == kMetadataName) {
        throw Error(ErrorCode::invalid_argument, "[safetensors] a tensor cannot be named \"__metadata__\"");
      }
      if (metadata_due && record.name > kMetadataName) {
        add_metadata();
        metadata_due = false;
      }
      open_member(record.name);
      text += "\"data_offsets\":[" + std::to_string(record.begin) + ',' + std::to_string(record.end) +
              "],\"dtype\":\"" + record.dtype + "\",\"shape\":[";
      for (std::size_t i = 0; i < record.shape.size(); ++i) {
        text += (i == 0 ? "" : ",") + std::to_string(record.shape[i]);
      }
      text += "]}";
    }
    if (metadata_due) add_metadata();
    text += '}';
    while (text.size() % 8 != 0) text += ' ';
    const std::uint64_t length = text.size() - kLengthBytes;
    if (length > kMaxHeaderBytes) {
      throw Error(ErrorCode::unsupported,
                  "[safetensors] a header must stay below 100 MB, but got " + std::to_string(length) + " bytes");
    }
    for (std::size_t i = 0; i < kLengthBytes; ++i) text[i] = static_cast<char>((length >> (8 * i)) & 0xff);
    return text;
  } catch (const json::exception&) {
    throw Error(ErrorCode::invalid_argument, "[safetensors] names and metadata must be UTF-8 text");
  }
}

}  // namespace internal
}  // namespace reprise
