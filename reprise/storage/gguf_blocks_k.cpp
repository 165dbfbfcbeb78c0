// The blocks, as ggml-common.h lays them out (all little-endian, d and dmin float16), each of 256 weights:
//   Q2_K  16 bytes of scale (low nibble) and minimum for groups of 16, 64 bytes of q, d, dmin;  w = d·sc·q − dmin·m
//   Q3_K  32 bytes of third bits, 64 bytes of q's lower two, 12 bytes of 16 6-bit scales, d;    w = d·(sc − 32)·(q − 4)
//   Q4_K  d, dmin, 12 bytes of 6-bit (sc, m) for 8 groups of 32, 128 bytes: 32 bytes hold two groups, low nibbles
//         first;                                                                               w = d·sc·q − dmin·m
//   Q5_K  the same with 32 bytes of fifth bits before the nibbles: bit g of byte l belongs to q[l] of group g
//   Q6_K  128 bytes of lower nibbles, 64 bytes of upper pairs, 16 signed scales, d;            w = d·sc·(q − 32)
// Pairs of bits: 32 bytes hold 128 numbers, those of byte l being l, l + 32, l + 64, l + 96, lowest bits first.
#include "reprise/storage/gguf_blocks_k.h"

#include <algorithm>
#include <cmath>

#include "reprise/storage/gguf_numbers.h"

namespace reprise::internal {
namespace {

constexpr int kItems = 256;

unsigned int byte_at(const std::byte* from, int i) { return std::to_integer<unsigned int>(from[i]); }

// A block's `count` scales and biases, from `first` of the row on. False for one beyond float16's range.
bool put_scales(const AffineRow& row, std::int64_t first, int count, const float* scales, const float* biases) {
  if (row.float_scales) {
    std::copy_n(scales, count, static_cast<float*>(row.scales) + first);
    std::copy_n(biases, count, static_cast<float*>(row.biases) + first);
    return true;
  }
  const auto put = [&](const float* from, std::uint16_t* to) {
    bool fits = true;
    for (int i = 0; i < count; ++i) {
      to[i] = float_to_half(from[i]);
      fits = fits && std::isfinite(from[i]) == std::isfinite(half_to_float(to[i]));
    }
    return fits;
  };
  return put(scales, static_cast<std::uint16_t*>(row.scales) + first) &&
         put(biases, static_cast<std::uint16_t*>(row.biases) + first);
}

// Pairs of bits of 256 numbers, to be added to `q` at `shift`.
void add_pairs(const std::byte* from, int shift, std::uint8_t* q) {
  for (int half = 0; half < 2; ++half, from += 32) {
    for (int part = 0; part < 4; ++part) {
      for (int l = 0; l < 32; ++l, ++q)
        *q = static_cast<std::uint8_t>(*q | ((byte_at(from, l) >> (2 * part)) & 3u) << shift);
    }
  }
}

// Bit g of byte l belongs to number l of the block's group g of 32.
void add_bits(const std::byte* from, int shift, std::uint8_t* q) {
  for (int group = 0; group < 8; ++group) {
    for (int l = 0; l < 32; ++l, ++q) *q = static_cast<std::uint8_t>(*q | ((byte_at(from, l) >> group) & 1u) << shift);
  }
}

// 32 bytes hold 64 numbers, the first 32 in the lower nibbles.
void add_nibbles(const std::byte* from, std::uint8_t* q) {
  for (int pair = 0; pair < 4; ++pair, from += 32, q += 64) {
    for (int l = 0; l < 32; ++l) {
      q[l] = static_cast<std::uint8_t>(byte_at(from, l) & 15u);
      q[32 + l] = static_cast<std::uint8_t>(byte_at(from, l) >> 4);
    }
  }
}

// Of w = scale·(q − centre): 16 groups of 16.
bool put_centred(const AffineRow& row, std::int64_t block, const float* scales, float centre) {
  float biases[16];
  for (int g = 0; g < 16; ++g) biases[g] = -centre * scales[g];
  return put_scales(row, 16 * block, 16, scales, biases);
}

void put_numbers(const AffineRow& row, std::int64_t block, const std::uint8_t* q, int bits) {
  pack_bits(q, kItems, bits, reinterpret_cast<unsigned char*>(row.packed) + block * kItems / 8 * bits);
}

// The 6-bit scale and minimum of each group of 32 of a Q4_K or Q5_K block, times the block's d and dmin.
bool put_k_scales(const std::byte* from, std::int64_t block, const AffineRow& row) {
  const float d = half_to_float(load_half(from));
  const float dmin = half_to_float(load_half(from + 2));
  const auto s = [&](int i) { return byte_at(from, 4 + i); };
  float scales[8];
  float biases[8];
  for (int g = 0; g < 8; ++g) {
    const unsigned int scale = g < 4 ? s(g) & 63u : (s(g + 4) & 15u) | ((s(g - 4) >> 6) << 4);
    const unsigned int minimum = g < 4 ? s(g + 4) & 63u : (s(g + 4) >> 4) | ((s(g) >> 6) << 4);
    scales[g] = d * static_cast<float>(scale);
    biases[g] = -(dmin * static_cast<float>(minimum));
  }
  return put_scales(row, 8 * block, 8, scales, biases);
}

}  // namespace

bool convert_q2_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 84) {
    const float d = half_to_float(load_half(blocks + 80));
    const float dmin = half_to_float(load_half(blocks + 82));
    float scales[16];
    float biases[16];
    for (int g = 0; g < 16; ++g) {
      scales[g] = d * static_cast<float>(byte_at(blocks, g) & 15u);
      biases[g] = -(dmin * static_cast<float>(byte_at(blocks, g) >> 4));
    }
    if (!put_scales(row, 16 * i, 16, scales, biases)) return false;
    std::uint8_t q[kItems] = {};
    add_pairs(blocks + 16, 0, q);
    put_numbers(row, i, q, 2);
  }
  return true;
}

bool convert_q3_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 110) {
    const float d = half_to_float(load_half(blocks + 108));
    const std::byte* packed = blocks + 96;  // eight bytes of lower nibbles, four of upper pairs
    float scales[16];
    for (int g = 0; g < 16; ++g) {
      const unsigned int low = (byte_at(packed, g % 8) >> (g < 8 ? 0 : 4)) & 15u;
      const unsigned int high = (byte_at(packed, 8 + g % 4) >> (2 * (g / 4))) & 3u;
      scales[g] = d * (static_cast<float>(low | (high << 4)) - 32.0f);
    }
    if (!put_centred(row, i, scales, 4.0f)) return false;
    std::uint8_t q[kItems] = {};
    add_pairs(blocks + 32, 0, q);
    add_bits(blocks, 2, q);
    put_numbers(row, i, q, 3);
  }
  return true;
}

bool convert_q4_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 144) {
    if (!put_k_scales(blocks, i, row)) return false;
    std::uint8_t q[kItems];
    add_nibbles(blocks + 16, q);
    put_numbers(row, i, q, 4);
  }
  return true;
}

bool convert_q5_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 176) {
    if (!put_k_scales(blocks, i, row)) return false;
    std::uint8_t q[kItems];
    add_nibbles(blocks + 48, q);
    add_bits(blocks + 16, 4, q);
    put_numbers(row, i, q, 5);
  }
  return true;
}

bool convert_q6_k(const std::byte* blocks, std::int64_t num_blocks, const AffineRow& row) {
  for (std::int64_t i = 0; i < num_blocks; ++i, blocks += 210) {
    const float d = half_to_float(load_half(blocks + 208));
    float scales[16];
    for (int g = 0; g < 16; ++g) scales[g] = d * static_cast<float>(static_cast<std::int8_t>(blocks[192 + g]));
    if (!put_centred(row, i, scales, 32.0f)) return false;
    std::uint8_t q[kItems];
    for (int half = 0; half < 2; ++half) {  // 64 bytes hold 128 numbers, the first 64 in the lower nibbles
      for (int l = 0; l < 64; ++l) {
        const unsigned int byte = byte_at(blocks, 64 * half + l);
        q[128 * half + l] = static_cast<std::uint8_t>(byte & 15u);
        q[128 * half + 64 + l] = static_cast<std::uint8_t>(byte >> 4);
      }
    }
    add_pairs(blocks + 128, 4, q);
    put_numbers(row, i, q, 6);
  }
  return true;
}

}  // namespace reprise::internal
