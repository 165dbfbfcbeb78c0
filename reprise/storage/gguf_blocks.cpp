// The blocks, as ggml-common.h lays them out (all little-endian, d, m, dmin float16):
//   Q4_0  d, 16 bytes: byte j holds q[j] (low nibble) and q[j + 16];  w = d·(q − 8)
//   Q4_1  d, m, 16 bytes likewise;                                    w = d·q + m
//   Q5_0  d, 32 fifth bits (bit j of a 32-bit number belongs to q[j]), 16 bytes as Q4_0's;  w = d·(q − 16)
//   Q5_1  d, m, 32 fifth bits, 16 bytes likewise;                     w = d·q + m
//   Q8_0  d, 32 signed bytes;                                         w = d·q
//   IQ4_NL  as Q4_0, q naming one of 16 numbers from −127 to 113;     w = d·number, which 8 bits hold
#include "reprise/storage/gguf_blocks.h"

#include <bit>
#include <cstring>

#include "reprise/storage/gguf.h"
#include "reprise/storage/gguf_blocks_k.h"
#include "reprise/storage/gguf_numbers.h"

namespace reprise::internal {
namespace {

// −half·2^power, which is exact unless it overflows: then none.
std::optional<std::uint16_t> negated_times_power(std::uint16_t half, int power) {
  const std::uint32_t sign = (half & 0x8000u) ^ 0x8000u;
  std::uint32_t exponent = (half >> 10) & 31u;
  std::uint32_t fraction = half & 1023u;
  if (exponent == 31) return static_cast<std::uint16_t>(sign | (half & 0x7fffu));
  while (exponent == 0 && power > 0 && fraction != 0) {  // a subnormal grows by its fraction until it is normal
    fraction <<= 1;
    --power;
    if ((fraction & 1024u) != 0) {
      exponent = 1;
      fraction &= 1023u;
    }
  }
  if (exponent != 0) exponent += static_cast<std::uint32_t>(power);
  if (exponent >= 31) return std::nullopt;
  return static_cast<std::uint16_t>(sign | (exponent << 10) | fraction);
}

using Pairs = std::uint16_t __attribute__((vector_size(16)));
using Bytes = std::uint8_t __attribute__((vector_size(16)));

// 16 bytes of nibbles of one group in Q4_0's and Q4_1's order. Two neighbours lie in a 16-bit number.
void pack_nibbles(const std::byte* from, std::uint32_t* packed) {
  Pairs pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  const Pairs first = (pairs & 0x0f) | ((pairs >> 4) & 0xf0);
  const Pairs second = ((pairs >> 4) & 0x0f) | ((pairs >> 8) & 0xf0);
  const Bytes low =
      __builtin_shufflevector(reinterpret_cast<const Bytes&>(first), reinterpret_cast<const Bytes&>(second), 0, 2, 4, 6,
                              8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  std::memcpy(packed, &low, sizeof(low));
}

// bias = −d·2^power beside scale = d. Returns: false when float16 cannot hold it.
bool put_centred_scale(const AffineRow& row, std::int64_t group, std::uint16_t d, int power) {
  if (row.float_scales) {
    const float scale = half_to_float(d);
    static_cast<float*>(row.scales)[group] = scale;
    static_cast<float*>(row.biases)[group] = -scale * static_cast<float>(1 << power);
    return true;
  }
  const std::optional<std::uint16_t> bias = negated_times_power(d, power);
  if (!bias) return false;
  static_cast<std::uint16_t*>(row.scales)[group] = d;
  static_cast<std::uint16_t*>(row.biases)[group] = *bias;
  return true;
}

bool convert_q4_0(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 18) {
    if (!put_centred_scale(row, i, load_half(blocks), 3)) return false;
    pack_nibbles(blocks + 2, row.packed + 4 * i);
  }
  return true;
}

bool convert_q4_1(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  auto* scales = static_cast<std::uint16_t*>(row.scales);
  auto* biases = static_cast<std::uint16_t*>(row.biases);
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 20) {
    scales[i] = load_half(blocks);
    biases[i] = load_half(blocks + 2);
    pack_nibbles(blocks + 4, row.packed + 4 * i);
  }
  return true;
}

// 32 numbers of 5 bits, as Q5_0 and Q5_1 have them, as a stream of bits.
void pack_fives(const std::byte* fifth_bits, const std::byte* nibbles, std::uint32_t* packed) {
  std::uint32_t fifths;
  std::memcpy(&fifths, fifth_bits, sizeof(fifths));
  std::uint8_t q[32];
  for (int k = 0; k < 16; ++k) {
    const auto byte = std::to_integer<unsigned int>(nibbles[k]);
    q[k] = static_cast<std::uint8_t>((byte & 15u) | ((fifths >> k) & 1u) << 4);
    q[16 + k] = static_cast<std::uint8_t>((byte >> 4) | ((fifths >> (16 + k)) & 1u) << 4);
  }
  pack_bits(q, 32, 5, reinterpret_cast<unsigned char*>(packed));
}

bool convert_q5_0(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 22) {
    if (!put_centred_scale(row, i, load_half(blocks), 4)) return false;
    pack_fives(blocks + 2, blocks + 6, row.packed + 5 * i);
  }
  return true;
}

bool convert_q5_1(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  auto* scales = static_cast<std::uint16_t*>(row.scales);
  auto* biases = static_cast<std::uint16_t*>(row.biases);
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 24) {
    scales[i] = load_half(blocks);
    biases[i] = load_half(blocks + 2);
    pack_fives(blocks + 4, blocks + 8, row.packed + 5 * i);
  }
  return true;
}

bool convert_q8_0(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  constexpr std::uint64_t kSignBits = 0x8080808080808080ull;
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 34) {
    if (!put_centred_scale(row, i, load_half(blocks), 7)) return false;
    for (int k = 0; k < 4; ++k) {  // q + 128 of a signed byte is the byte with its sign bit flipped
      const std::uint64_t bytes = load_u64(blocks + 2 + 8 * k) ^ kSignBits;
      std::memcpy(row.packed + 8 * i + 2 * k, &bytes, sizeof(bytes));
    }
  }
  return true;
}

bool convert_iq4_nl(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  // ggml's kvalues_iq4nl, and 128.
  constexpr std::uint8_t kNumbers[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 18) {
    if (!put_centred_scale(row, i, load_half(blocks), 7)) return false;
    auto* out = reinterpret_cast<std::uint8_t*>(row.packed + 8 * i);
    for (int k = 0; k < 16; ++k) {
      const auto byte = std::to_integer<unsigned int>(blocks[2 + k]);
      out[k] = kNumbers[byte & 15u];
      out[16 + k] = kNumbers[byte >> 4];
    }
  }
  return true;
}

}  // namespace

std::optional<BlockFormat> block_format(std::uint32_t type) {
  switch (type) {
    case gguf_type::q4_0:
      return BlockFormat{32, 18, 4, 32, convert_q4_0};
    case gguf_type::q4_1:
      return BlockFormat{32, 20, 4, 32, convert_q4_1};
    case gguf_type::q5_0:
      return BlockFormat{32, 22, 5, 32, convert_q5_0};
    case gguf_type::q5_1:
      return BlockFormat{32, 24, 5, 32, convert_q5_1};
    case gguf_type::q8_0:
      return BlockFormat{32, 34, 8, 32, convert_q8_0};
    case gguf_type::q2_k:
      return BlockFormat{256, 84, 2, 16, convert_q2_k};
    case gguf_type::q3_k:
      return BlockFormat{256, 110, 3, 16, convert_q3_k};
    case gguf_type::q4_k:
      return BlockFormat{256, 144, 4, 32, convert_q4_k};
    case gguf_type::q5_k:
      return BlockFormat{256, 176, 5, 32, convert_q5_k};
    case gguf_type::q6_k:
      return BlockFormat{256, 210, 6, 16, convert_q6_k};
    case gguf_type::iq4_nl:
      return BlockFormat{32, 18, 8, 32, convert_iq4_nl};
    default:
      return std::nullopt;
  }
}

}  // namespace reprise::internal
