// The safetensors header: any bytes give tensors that cover the data exactly, or an Error.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "reprise/base/error.h"
#include "reprise/storage/safetensors.h"

namespace {

void parse(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
  try {
    const reprise::SafetensorsHeader header = reprise::parse_safetensors_header(bytes, file_size_bytes, "fuzz");
    std::uint64_t total = 0;
    for (const reprise::TensorRecord& record : header.tensors) total += record.end - record.begin;
    if (header.data_offset + total != file_size_bytes) std::abort();
  } catch (const reprise::Error& error) {
    if (error.code() != reprise::ErrorCode::corrupt_data) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  parse(bytes, size);
  // With the size that the header asks for, whatever stands behind it.
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8 && i < size; ++i) length |= std::uint64_t{data[i]} << (8 * i);
  if (length < size) parse(bytes, 8 + length + 12);
  return 0;
}
