#include "reprise/cache/file_writer.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"
#include "reprise/base/error.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

constexpr std::size_t kLengthBytes = 8;

// Length, JSON and padding: `data_offset` bytes.
std::string encode_head(const SafetensorsHeader& header) {
  nlohmann::json json = nlohmann::json::object();  // sorts its keys
  for (const TensorRecord& record : header.tensors) {
    json[record.name] = {
        {"dtype", record.dtype}, {"shape", record.shape}, {"data_offsets", {record.begin, record.end}}};
  }
  json["__metadata__"] = header.metadata;
  std::string text = json.dump();
  if (kLengthBytes + text.size() > header.data_offset) {
    throw Error(ErrorCode::internal, "[save_prompt_cache] the header must have " + std::to_string(header.data_offset) +
                                         " bytes as planned, but got " + std::to_string(kLengthBytes + text.size()));
  }
  text.resize(header.data_offset - kLengthBytes, ' ');
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 0xFF);
  return length + text;
}

}  // namespace

void write_content(WritableFile& output, const SafetensorsHeader& header, const Tensors& tensors) {
  const std::string head = encode_head(header);
  output.append(std::as_bytes(std::span(head)));
  std::vector<const TensorRecord*> order;
  for (const TensorRecord& record : header.tensors) order.push_back(&record);
  std::sort(order.begin(), order.end(), [](const TensorRecord* a, const TensorRecord* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  for (const TensorRecord* record : order) {
    const mx::array& tensor = tensors.at(record->name);
    if (tensor.nbytes() > 0) output.append(std::as_bytes(std::span(tensor.data<char>(), tensor.nbytes())));
  }
}

}  // namespace reprise::internal
