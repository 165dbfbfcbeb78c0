// Safetensors files: our own bounds-checked reader (MLX's is lazy and trusts the header) and a writer whose bytes depend
// on the content alone (sorted names, no gaps, data 8-aligned).
// Threads: free functions; arrays come back evaluated, so they may go to any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "mlx/array.h"

namespace reprise {

// One tensor as the header describes it.
struct TensorRecord {
  std::string name;
  std::string dtype;                 // safetensors' word: "F32", "F16", "BF16", "I32", "U32", "BOOL", …
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;           // bytes, from the start of the data section
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

// Reads and checks a header only. Throws: not_found, corrupt_data (header size, JSON, unknown dtype, shape against
// bytes, offsets outside the file, overlaps, duplicate names), each naming the file.
SafetensorsHeader read_safetensors_header(const std::filesystem::path& file);

enum class ReadMode {
  copy,        // every byte read now: the file may vanish afterwards
  memory_map,  // arrays look into a private mapping that lives as long as they do; for weights
};

// Throws: as read_safetensors_header; unsupported for a dtype MLX has not (F8_*, named with its tensor).
Safetensors read_safetensors(const std::filesystem::path& file, ReadMode mode = ReadMode::copy);

// The bytes a file of this content has. Keys sorted; header padded with spaces so that data starts 8-aligned.
// Arrays are evaluated and made contiguous. Throws: unsupported for a dtype safetensors has not (complex64).
std::string serialize_safetensors(const std::map<std::string, mlx::core::array>& tensors,
                                  const std::map<std::string, std::string>& metadata);

// The header such a file has, without its data (`data_offset` included), and the data section's bytes in file order.
SafetensorsHeader plan_safetensors(const std::map<std::string, mlx::core::array>& tensors,
                                   const std::map<std::string, std::string>& metadata);

// Writes atomically (file_system.h) without a second copy of the data in memory.
// Throws: what replace_file throws; nothing is left behind and the old file is untouched.
void write_safetensors(const std::filesystem::path& file, const std::map<std::string, mlx::core::array>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace reprise
