// GGUF files (versions 2 and 3, little-endian) by a reader that checks every length against the file before it uses it.
// Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
// Threads: free functions over plain values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace reprise {

// Integers keep their sign as the file types them; an array holds int64 whatever its integers were.
using GgufArray =
    std::variant<std::vector<std::int64_t>, std::vector<double>, std::vector<bool>, std::vector<std::string>>;
using GgufValue = std::variant<std::int64_t, std::uint64_t, double, bool, std::string, GgufArray>;

struct GgufTensor {
  std::string name;
  std::vector<std::int64_t> shape;  // outermost first (the reverse of the file's order)
  std::uint32_t type = 0;           // ggml type number
  std::uint64_t offset = 0;         // bytes, from the start of the data section
  std::uint64_t size_bytes = 0;
};

struct GgufHeader {
  std::uint32_t version = 0;
  std::map<std::string, GgufValue> metadata;
  std::vector<GgufTensor> tensors;
  std::uint64_t data_offset = 0;  // bytes, from the start of the file
};

// Parses the head of a file of which `bytes` is the whole (or at least all before the data section, with
// `file_size_bytes` the true size). Never reads outside `bytes`. Every tensor of the result lies inside the file,
// aligned and apart from the others.
// Throws: corrupt_data (says at which byte), unsupported (version, big-endian, an unknown tensor type, arrays of
// arrays).
GgufHeader parse_gguf(std::span<const std::byte> bytes, std::uint64_t file_size_bytes);

// "Q4_1", "F16", …; "type 99" for a number not known.
std::string gguf_type_name(std::uint32_t type);

// ggml's numbers of the types that model_files turns into MLX arrays.
namespace gguf_type {
inline constexpr std::uint32_t f32 = 0;
inline constexpr std::uint32_t f16 = 1;
inline constexpr std::uint32_t q4_0 = 2;
inline constexpr std::uint32_t q4_1 = 3;
inline constexpr std::uint32_t q5_0 = 6;
inline constexpr std::uint32_t q5_1 = 7;
inline constexpr std::uint32_t q8_0 = 8;
inline constexpr std::uint32_t q2_k = 10;
inline constexpr std::uint32_t q3_k = 11;
inline constexpr std::uint32_t q4_k = 12;
inline constexpr std::uint32_t q5_k = 13;
inline constexpr std::uint32_t q6_k = 14;
inline constexpr std::uint32_t iq4_nl = 20;
inline constexpr std::uint32_t bf16 = 30;
}  // namespace gguf_type

}  // namespace reprise
