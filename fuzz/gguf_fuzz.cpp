// The GGUF parser: any bytes give a header whose tensors lie inside the file, or an Error.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "reprise/base/error.h"
#include "reprise/storage/gguf.h"

namespace {

void parse(std::span<const std::byte> bytes, std::uint64_t file_size_bytes) {
  try {
    const reprise::GgufHeader header = reprise::parse_gguf(bytes, file_size_bytes);
    if (header.data_offset > file_size_bytes) std::abort();
    for (const reprise::GgufTensor& tensor : header.tensors) {
      if (tensor.offset + tensor.size_bytes > file_size_bytes - header.data_offset) std::abort();
    }
  } catch (const reprise::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  parse(bytes, size);
  parse(bytes, size + 1'000'000);  // as if a data section followed
  return 0;
}
