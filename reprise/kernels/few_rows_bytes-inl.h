// Values of 2, 3, 5 and 6 bits → bytes. Compiled once for each instruction set, see few_rows_quantized.cpp. Private to
// `kernels`.
#if defined(REPRISE_KERNELS_FEW_ROWS_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef REPRISE_KERNELS_FEW_ROWS_BYTES_INL_H_
#undef REPRISE_KERNELS_FEW_ROWS_BYTES_INL_H_
#else
#define REPRISE_KERNELS_FEW_ROWS_BYTES_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "reprise/kernels/few_rows_layout.h"
#include "reprise/kernels/few_rows_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Each 128-bit block of a vector takes 16 values from 2 · bits bytes. These are brought to the block as whole 32-bit
// words; then each 16-bit lane takes the two bytes that hold its value, once for even and once for odd values, and a
// multiplication moves the value to the lane's upper byte.
struct ByteTables {
  std::int32_t words[kMaxLanes];
  std::uint8_t even[kMaxVectorBytes];
  std::uint8_t odd[kMaxVectorBytes];
  std::uint16_t even_factors[kMaxVectorBytes / 2];
  std::uint16_t odd_factors[kMaxVectorBytes / 2];

  explicit ByteTables(int width) {
    const auto bits = static_cast<std::size_t>(width);
    for (std::size_t block = 0; block < kMaxVectorBytes / 16; ++block) {
      const std::size_t byte = block * 2 * bits;
      for (std::size_t i = 0; i < 4; ++i) words[block * 4 + i] = static_cast<std::int32_t>(byte / 4 + i);
      for (std::size_t lane = 0; lane < 8; ++lane) {
        const std::size_t bit = byte % 4 * 8 + 2 * lane * bits;
        fill(bit, block * 8 + lane, even, even_factors);
        fill(bit + bits, block * 8 + lane, odd, odd_factors);
      }
    }
  }

 private:
  static void fill(std::size_t bit, std::size_t lane, std::uint8_t* bytes, std::uint16_t* factors) {
    bytes[2 * lane] = static_cast<std::uint8_t>(bit / 8);
    // The last value of a block may end with the block; what comes instead of a byte behind it is masked away.
    bytes[2 * lane + 1] = static_cast<std::uint8_t>(bit / 8 == 15 ? 15 : bit / 8 + 1);
    factors[lane] = static_cast<std::uint16_t>(1U << (8 - bit % 8));
  }
};

// `from` holds `size` bytes; `count` values go to `to`, zeros where there are no more. count: a multiple of
// kMaxVectorBytes.
inline void unpack_bytes(int bits, const ByteTables& tables, const std::uint8_t* HWY_RESTRICT from, std::size_t size,
                         std::size_t count, std::uint8_t* HWY_RESTRICT to) {
  const Bytes d;
  const hn::Repartition<std::uint16_t, Bytes> d16;
  const hn::Repartition<std::uint32_t, Bytes> d32;
  const std::size_t lanes = hn::Lanes(d);
  const auto words = hn::SetTableIndices(d32, tables.words);
  const auto even = hn::LoadU(d, tables.even);
  const auto odd = hn::LoadU(d, tables.odd);
  const auto even_factors = hn::LoadU(d16, tables.even_factors);
  const auto odd_factors = hn::LoadU(d16, tables.odd_factors);
  const auto even_mask = hn::Set(d16, static_cast<std::uint16_t>((1U << bits) - 1));
  const auto odd_mask = hn::Set(d16, static_cast<std::uint16_t>(((1U << bits) - 1) << 8));
  const std::size_t step = lanes * static_cast<std::size_t>(bits) / 8;
  constexpr std::size_t kAhead = 2048;  // bytes: a processor's own looking ahead ends where a page does
  for (std::size_t k = 0, byte = 0; k < count; k += lanes, byte += step) {
    hwy::Prefetch(from + byte + kAhead);
    hn::Vec<Bytes> packed = hn::Zero(d);
    if (byte + lanes <= size) {
      packed = hn::LoadU(d, from + byte);
    } else if (byte < size) {
      packed = load_first(from + byte, size - byte);
    }
    if constexpr (HWY_LANES(std::uint8_t) > 16)
      packed = hn::BitCast(d, hn::TableLookupLanes(hn::BitCast(d32, packed), words));
    const auto evens = hn::Mul(hn::BitCast(d16, hn::TableLookupBytes(packed, even)), even_factors);
    const auto odds = hn::Mul(hn::BitCast(d16, hn::TableLookupBytes(packed, odd)), odd_factors);
    const auto values = hn::Or(hn::And(hn::ShiftRight<8>(evens), even_mask), hn::And(odds, odd_mask));
    hn::Store(hn::BitCast(d, values), d, to + k);
  }
}

}  // namespace reprise::kernels::cpu::few_rows::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
