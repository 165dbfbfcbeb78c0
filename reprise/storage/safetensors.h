// Safetensors files: our own bounds-checked reader (MLX's is lazy and trusts the header) and a writer whose bytes
// depend on the content alone: names sorted in the header; data without gaps, from an 8-aligned byte on, wide items
// first and then by name, so that each tensor is aligned to its item.
// Format: https://huggingface.co/docs/safetensors
// Threads: free functions; arrays come back evaluated, so they may go to any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mlx/array.h"

namespace reprise {

class WritableFile;

// One tensor as the header describes it.
struct TensorRecord {
  std::string name;
  std::string dtype;  // safetensors' word: "F32", "F16", "BF16", "I32", "U32", "BOOL", …
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  // bytes, from the start of the data section
  std::uint64_t end = 0;

  bool operator==(const TensorRecord&) const = default;
};

struct SafetensorsHeader {
  std::vector<TensorRecord> tensors;            // sorted by name
  std::map<std::string, std::string> metadata;  // the `__metadata__` object
  std::uint64_t data_offset = 0;                // bytes, from the start of the file
};

struct Safetensors {
  SafetensorsHeader header;
  std::map<std::string, mlx::core::array> tensors;
};

// Parses the head of a file of `file_size_bytes` of which `head` is the first part (at least the header). Never reads
// outside `head`. `source` names the file in messages.
// Throws: corrupt_data (header size, JSON, duplicate or unknown members, unknown dtype, shape against bytes; data that
// overlaps, leaves a gap, or does not end where the file ends).
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, std::uint64_t file_size_bytes,
                                           std::string_view source = "the data");

// Reads and checks a header only. Throws: not_found, and as parse_safetensors_header.
SafetensorsHeader read_safetensors_header(const std::filesystem::path& file);

enum class ReadMode {
  copy,  // every byte is read now: the file may vanish afterwards
  // Arrays look into a private mapping that lives as long as they do (a tensor that is not aligned to its item is
  // copied): for weights. The file may be replaced or removed, but must not be rewritten or cut in place.
  memory_map,
};

// Called with the header and each tensor as soon as it is there, in the order of the data.
using OnTensor = std::function<void(const SafetensorsHeader& header, const mlx::core::array& tensor)>;

// Throws: as read_safetensors_header; unsupported for a dtype MLX has not (F8_E5M2, named with its tensor) or an extent
// beyond its int32; corrupt_data for a BOOL that is neither 0 nor 1.
Safetensors read_safetensors(const std::filesystem::path& file, ReadMode mode = ReadMode::copy,
                             const OnTensor& on_tensor = {});

// A whole file that is in memory. Arrays look into `bytes`, which live as long as they do, where MLX's arrays lie in
// plain memory and items are aligned; else they are copies. `source` names the file in messages. Throws: corrupt_data
// and unsupported as read_safetensors.
Safetensors parse_safetensors(std::string bytes, std::string_view source = "the data");

// The bytes a file of this content has. Arrays are evaluated, and made contiguous where they must be, one at a time.
// Throws: invalid_argument (a name or metadata text that is not UTF-8, a tensor named "__metadata__").
std::string serialize_safetensors(const std::map<std::string, mlx::core::array>& tensors,
                                  const std::map<std::string, std::string>& metadata);

// The header such a file has (`data_offset` included), without its data; evaluates nothing. Records are sorted by name:
// sort by `begin` for the order of the data.
SafetensorsHeader plan_safetensors(const std::map<std::string, mlx::core::array>& tensors,
                                   const std::map<std::string, std::string>& metadata);

// Writes a planned file piece by piece into an open one: no second copy of the data in memory. `header` is
// plan_safetensors' for these tensors; its metadata may since have changed, but not in length.
// Throws: internal when the header no longer has the planned size; what the file throws.
void append_safetensors(WritableFile& output, const SafetensorsHeader& header,
                        const std::map<std::string, mlx::core::array>& tensors);

// Puts a header of the same size in the place of the one that append_safetensors wrote. Throws: as append_safetensors.
void overwrite_safetensors_header(WritableFile& output, const SafetensorsHeader& header);

// The header's records in the order of the data.
std::vector<const TensorRecord*> in_data_order(const SafetensorsHeader& header);

// Writes atomically (file_system.h) without a second copy of the data in memory.
// Throws: what replace_file throws; nothing is left behind and the old file is untouched.
void write_safetensors(const std::filesystem::path& file, const std::map<std::string, mlx::core::array>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace reprise
