// Small GGUF files, right or wrong, made by hand.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace reprise::testing {

class GgufBuilder {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;  // of the file made; add the entry general.alignment yourself
  std::uint64_t extra_entries = 0;
  std::uint64_t extra_tensors = 0;

  template <typename T>
  static std::string bytes_of(T value) {
    std::string bytes(sizeof(T), '\0');
    std::memcpy(bytes.data(), &value, sizeof(T));
    return bytes;
  }
  static std::string string_bytes(const std::string& text) { return bytes_of<std::uint64_t>(text.size()) + text; }

  // `value` as it stands in the file.
  void add_raw(const std::string& key, std::uint32_t type, const std::string& value) {
    entries_ += string_bytes(key) + bytes_of(type) + value;
    ++num_entries_;
  }
  void add_uint(const std::string& key, std::uint32_t value) { add_raw(key, 4, bytes_of(value)); }
  void add_float(const std::string& key, float value) { add_raw(key, 6, bytes_of(value)); }
  void add_bool(const std::string& key, bool value) { add_raw(key, 7, std::string(1, value ? 1 : 0)); }
  void add_string(const std::string& key, const std::string& value) { add_raw(key, 8, string_bytes(value)); }
  void add_array(const std::string& key, std::uint32_t item_type, std::uint64_t count, const std::string& items) {
    add_raw(key, 9, bytes_of(item_type) + bytes_of(count) + items);
  }
  void add_strings(const std::string& key, const std::vector<std::string>& values) {
    std::string items;
    for (const std::string& value : values) items += string_bytes(value);
    add_array(key, 8, values.size(), items);
  }

  // `dims` in the file's order, innermost first; placed behind the tensors before it unless `offset` says where.
  static constexpr std::uint64_t kNext = ~std::uint64_t{0};
  void add_tensor(const std::string& name, const std::vector<std::uint64_t>& dims, std::uint32_t type,
                  const std::string& data, std::uint64_t offset = kNext) {
    tensors_ += string_bytes(name) + bytes_of(static_cast<std::uint32_t>(dims.size()));
    for (const std::uint64_t dim : dims) tensors_ += bytes_of(dim);
    pad(data_);
    tensors_ += bytes_of(type) + bytes_of<std::uint64_t>(offset == kNext ? data_.size() : offset);
    data_ += data;
    ++num_tensors_;
  }

  std::string build() const {
    std::string file = "GGUF" + bytes_of(version) + bytes_of(num_tensors_ + extra_tensors) +
                       bytes_of(num_entries_ + extra_entries) + entries_ + tensors_;
    pad(file);
    return file + data_;
  }

 private:
  void pad(std::string& text) const {
    while (text.size() % alignment != 0) text += '\0';
  }

  std::string entries_;
  std::string tensors_;
  std::string data_;
  std::uint64_t num_entries_ = 0;
  std::uint64_t num_tensors_ = 0;
};

}  // namespace reprise::testing
