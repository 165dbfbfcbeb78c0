// The blocks, as ggml-common.h lays them out (all little-endian, d, m, dmin float16):
//   Q4_0  d, 16 bytes: byte j holds q[j] (low nibble) and q[j + 16];  w = d·(q − 8)
//   Q4_1  d, m, 16 bytes likewise;                                    w = d·q + m
//   Q5_0  d, 32 fifth bits (bit j of a 32-bit number belongs to q[j]), 16 bytes as Q4_0's;  w = d·(q − 16)
//   Q5_1  d, m, 32 fifth bits, 16 bytes likewise;                     w = d·q + m
//   Q8_0  d, 32 signed bytes;                                         w = d·q
//   Q4_K  d, dmin, 12 bytes of 6-bit (sc, m) for 8 groups of 32, 128 bytes: 32 bytes hold two groups, low nibbles
//   first;
//         w = d·sc·q − dmin·m
//   Q5_K  the same with 32 bytes of fifth bits before the nibbles: bit g of byte l belongs to q[l] of group g
#include "reprise/storage/gguf_blocks.h"

#include <bit>
#include <cstring>

#include "reprise/storage/gguf.h"

namespace reprise::internal {
namespace {

std::uint16_t load_half(const std::byte* from) {
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

std::uint64_t load_u64(const std::byte* from) {
  std::uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  std::uint32_t exponent = (half >> 10) & 31u;
  std::uint32_t fraction = half & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

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

constexpr std::uint64_t kLowNibbles = 0x0f0f0f0f0f0f0f0full;

// Eight bytes below 16 → eight nibbles, the first lowest.
std::uint32_t squeeze_nibbles(std::uint64_t bytes) {
  bytes = (bytes | (bytes >> 4)) & 0x00ff00ff00ff00ffull;
  bytes = (bytes | (bytes >> 8)) & 0x0000ffff0000ffffull;
  return static_cast<std::uint32_t>(bytes | (bytes >> 16));
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
  auto* out = reinterpret_cast<unsigned char*>(packed);
  for (int eight = 0; eight < 4; ++eight, out += 5) {  // eight 5-bit numbers fill five bytes
    std::uint64_t stream = 0;
    for (int k = 0; k < 8; ++k) {
      const int i = 8 * eight + k;
      const auto byte = std::to_integer<std::uint64_t>(nibbles[i % 16]);
      const std::uint64_t q = ((byte >> (i < 16 ? 0 : 4)) & 15u) | (std::uint64_t{(fifths >> i) & 1u} << 4);
      stream |= q << (5 * k);
    }
    for (int k = 0; k < 5; ++k) out[k] = static_cast<unsigned char>(stream >> (8 * k));
  }
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

// The 6-bit scale and minimum of group g of a K block, times the block's d and dmin.
void put_k_scales(const std::byte* block, std::int64_t first_group, const AffineRow& row) {
  const float d = half_to_float(load_half(block));
  const float dmin = half_to_float(load_half(block + 2));
  std::uint32_t s[12];
  for (int i = 0; i < 12; ++i) s[i] = std::to_integer<std::uint32_t>(block[4 + i]);
  for (int g = 0; g < 8; ++g) {
    const std::uint32_t scale = g < 4 ? s[g] & 63u : (s[g + 4] & 15u) | ((s[g - 4] >> 6) << 4);
    const std::uint32_t minimum = g < 4 ? s[g + 4] & 63u : (s[g + 4] >> 4) | ((s[g] >> 6) << 4);
    static_cast<float*>(row.scales)[first_group + g] = d * static_cast<float>(scale);
    static_cast<float*>(row.biases)[first_group + g] = -(dmin * static_cast<float>(minimum));
  }
}

bool convert_q4_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 144) {
    put_k_scales(blocks, 8 * i, row);
    std::uint32_t* packed = row.packed + 32 * i;
    for (int pair = 0; pair < 4; ++pair, packed += 8) {
      for (int k = 0; k < 4; ++k) {
        const std::uint64_t bytes = load_u64(blocks + 16 + 32 * pair + 8 * k);
        packed[k] = squeeze_nibbles(bytes & kLowNibbles);
        packed[4 + k] = squeeze_nibbles((bytes >> 4) & kLowNibbles);
      }
    }
  }
  return true;
}

bool convert_q5_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  auto* out = reinterpret_cast<unsigned char*>(row.packed);
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 176) {
    put_k_scales(blocks, 8 * i, row);
    const std::byte* high = blocks + 16;
    for (int g = 0; g < 8; ++g) {
      const std::byte* low = blocks + 48 + 32 * (g / 2);
      for (int eight = 0; eight < 4; ++eight, out += 5) {  // eight 5-bit numbers fill five bytes
        std::uint64_t stream = 0;
        for (int k = 0; k < 8; ++k) {
          const auto nibbles = std::to_integer<std::uint64_t>(low[8 * eight + k]);
          const auto fifths = std::to_integer<std::uint64_t>(high[8 * eight + k]);
          const std::uint64_t q = ((nibbles >> (4 * (g % 2))) & 15u) | (((fifths >> g) & 1u) << 4);
          stream |= q << (5 * k);
        }
        for (int k = 0; k < 5; ++k) out[k] = static_cast<unsigned char>(stream >> (8 * k));
      }
    }
  }
  return true;
}

// 128 bytes of lower nibbles, 64 bytes of upper pairs of bits, 16 signed scales, d: w = d·sc·(q − 32)
void unpack_q6_k(const std::byte* blocks, std::int64_t num_blocks, float* out) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 210) {
    const float d = half_to_float(load_half(blocks + 208));
    for (int k = 0; k < 256; ++k, ++out) {
      const int half = k / 128;
      const int quarter = k % 128 / 32;
      const int l = k % 32;
      const int low = std::to_integer<int>(blocks[64 * half + 32 * (quarter % 2) + l]) >> (4 * (quarter / 2)) & 15;
      const int high = std::to_integer<int>(blocks[128 + 32 * half + l]) >> (2 * quarter) & 3;
      const auto scale = static_cast<std::int8_t>(blocks[192 + k / 16]);
      *out = d * static_cast<float>(scale) * static_cast<float>((low | (high << 4)) - 32);
    }
  }
}

}  // namespace

std::optional<FloatFormat> float_format(std::uint32_t type) {
  if (type == gguf_type::q6_k) return FloatFormat{256, 210, unpack_q6_k};
  return std::nullopt;
}

std::optional<BlockFormat> block_format(std::uint32_t type) {
  switch (type) {
    case gguf_type::q4_0:
      return BlockFormat{32, 18, 4, false, convert_q4_0};
    case gguf_type::q4_1:
      return BlockFormat{32, 20, 4, false, convert_q4_1};
    case gguf_type::q5_0:
      return BlockFormat{32, 22, 5, false, convert_q5_0};
    case gguf_type::q5_1:
      return BlockFormat{32, 24, 5, false, convert_q5_1};
    case gguf_type::q8_0:
      return BlockFormat{32, 34, 8, false, convert_q8_0};
    case gguf_type::q4_k:
      return BlockFormat{256, 144, 4, true, convert_q4_k};
    case gguf_type::q5_k:
      return BlockFormat{256, 176, 5, true, convert_q5_k};
    default:
      return std::nullopt;
  }
}

}  // namespace reprise::internal
