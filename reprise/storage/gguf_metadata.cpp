#include "reprise/storage/gguf_metadata.h"

#include <algorithm>
#include <limits>

#include "reprise/base/error.h"

namespace reprise::internal {
namespace {

[[noreturn]] void wrong_type(const std::string& key, const char* wanted) {
  throw Error(ErrorCode::corrupt_data, "[read_model_files] metadata key " + key + " must be " + wanted);
}

template <typename T>
std::optional<T> value_of(const std::map<std::string, GgufValue>& metadata, const std::string& key,
                          const char* wanted) {
  const auto entry = metadata.find(key);
  if (entry == metadata.end()) return std::nullopt;
  const T* value = std::get_if<T>(&entry->second);
  if (value == nullptr) wrong_type(key, wanted);
  return *value;
}

template <typename T>
std::vector<T> array_of(const std::map<std::string, GgufValue>& metadata, const std::string& key, const char* wanted) {
  const auto entry = metadata.find(key);
  if (entry == metadata.end()) return {};
  const auto* array = std::get_if<GgufArray>(&entry->second);
  const auto* values = array == nullptr ? nullptr : std::get_if<std::vector<T>>(array);
  if (values == nullptr) wrong_type(key, wanted);
  return *values;
}

std::int64_t same_item(const std::string& key, const GgufArray& array) {
  const auto* values = std::get_if<std::vector<std::int64_t>>(&array);
  if (values == nullptr || values->empty()) wrong_type(key, "a whole number");
  if (std::adjacent_find(values->begin(), values->end(), std::not_equal_to<>()) != values->end()) {
    throw Error(ErrorCode::unsupported, "[read_model_files] metadata key " + key + " differs between layers");
  }
  return values->front();
}

}  // namespace

std::optional<std::string> GgufMetadata::string(const std::string& key) const {
  return value_of<std::string>(metadata_, key, "a string");
}

std::optional<bool> GgufMetadata::boolean(const std::string& key) const {
  return value_of<bool>(metadata_, key, "a boolean");
}

std::optional<double> GgufMetadata::number(const std::string& key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return std::nullopt;
  if (const auto* value = std::get_if<double>(&entry->second)) return *value;
  if (const auto* value = std::get_if<std::uint64_t>(&entry->second)) return static_cast<double>(*value);
  if (const auto* value = std::get_if<std::int64_t>(&entry->second)) return static_cast<double>(*value);
  wrong_type(key, "a number");
}

std::optional<int> GgufMetadata::count(const std::string& key) const {
  const auto entry = metadata_.find(key);
  if (entry == metadata_.end()) return std::nullopt;
  constexpr std::int64_t kMax = std::numeric_limits<int>::max();
  std::int64_t value = -1;
  if (const auto* plain = std::get_if<std::uint64_t>(&entry->second)) {
    value = *plain > static_cast<std::uint64_t>(kMax) ? -1 : static_cast<std::int64_t>(*plain);
  } else if (const auto* negatable = std::get_if<std::int64_t>(&entry->second)) {
    value = *negatable;
  } else if (const auto* array = std::get_if<GgufArray>(&entry->second)) {
    value = same_item(key, *array);
  }
  if (value < 0 || value > kMax) wrong_type(key, "a whole number from 0 to 2147483647");
  return static_cast<int>(value);
}

int GgufMetadata::required_count(const std::string& key) const {
  const std::optional<int> value = count(key);
  if (!value || *value == 0) {
    throw Error(ErrorCode::corrupt_data, "[read_model_files] metadata key " + key + " is missing or 0");
  }
  return *value;
}

std::vector<std::string> GgufMetadata::strings(const std::string& key) const {
  return array_of<std::string>(metadata_, key, "a list of strings");
}

std::vector<std::int64_t> GgufMetadata::integers(const std::string& key) const {
  return array_of<std::int64_t>(metadata_, key, "a list of whole numbers");
}

std::vector<double> GgufMetadata::numbers(const std::string& key) const {
  return array_of<double>(metadata_, key, "a list of numbers");
}

}  // namespace reprise::internal
