#include "reprise/kernels/weight.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/kernels/affine_format.h"
#include "reprise/kernels/rows_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise {

namespace mx = mlx::core;

int group_size_of(MicroscalingFormat format) { return format == MicroscalingFormat::nvfp4 ? 16 : 32; }

int bits_of(MicroscalingFormat format) { return format == MicroscalingFormat::mxfp8 ? 8 : 4; }

const char* name_of(MicroscalingFormat format) {
  switch (format) {
    case MicroscalingFormat::mxfp4:
      return "mxfp4";
    case MicroscalingFormat::mxfp8:
      return "mxfp8";
    case MicroscalingFormat::nvfp4:
      return "nvfp4";
  }
  return "";
}

bool is_affine_format(int bits, int group_size, int in) {
  if (!((bits >= 2 && bits <= 6) || bits == 8)) return false;
  if (group_size == 16) return bits != 4 && in % 32 == 0;
  return (group_size == 32 || group_size == 64 || group_size == 128) && in % group_size == 0;
}

std::optional<MicroscalingFormat> find_microscaling_format(std::string_view name) {
  for (const MicroscalingFormat format : kMicroscalingFormats) {
    if (name == name_of(format)) return format;
  }
  return {};
}

int inputs_of(const Weight& weight) {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return dense->shape(-1);
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) return m->scales.shape(-1) * group_size_of(m->format);
  const auto& w = std::get<QuantizedWeight>(weight);
  return w.scales.shape(-1) * w.group_size;
}

int outputs_of(const Weight& weight) {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) return dense->shape(-2);
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) return m->packed.shape(-2);
  return std::get<QuantizedWeight>(weight).packed.shape(-2);
}

namespace kernels::internal {

std::string text(const mx::Shape& shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

void refuse(const char* function, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "[" + std::string(function) + "] " + what);
}

namespace {

bool is_readable(const mx::array& x) {
  if (!x.is_available()) {
    mx::array same = x;
    same.eval();
  }
  return x.flags().row_contiguous;
}

bool same_but_last(const mx::Shape& a, const mx::Shape& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end() - 1, b.begin());
}

int rows_of(const mx::array& matrices) {
  int rows = 1;
  for (std::size_t axis = 0; axis + 1 < matrices.ndim(); ++axis) rows *= matrices.shape(static_cast<int>(axis));
  return rows;
}

}  // namespace

std::optional<cpu::Element> element_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return cpu::Element::f32;
  if (dtype == mx::float16) return cpu::Element::f16;
  if (dtype == mx::bfloat16) return cpu::Element::bf16;
  return {};
}

void check_weight(const char* function, const Weight& weight, std::size_t axes) {
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) {
    if (dense->ndim() != axes || !mx::issubdtype(dense->dtype(), mx::floating)) {
      refuse(function, std::string("a dense weight must be floating ") + (axes == 2 ? "" : "and stacked ") +
                           "[out, in], but got " + text(dense->shape()));
    }
    return;
  }
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) {
    const auto& [packed, scales, format] = *m;
    const bool fits =
        packed.ndim() == axes && same_but_last(packed.shape(), scales.shape()) && packed.dtype() == mx::uint32 &&
        scales.dtype() == mx::uint8 &&
        std::int64_t{packed.shape(-1)} * 32 == std::int64_t{scales.shape(-1)} * group_size_of(format) * bits_of(format);
    if (fits) return;
    refuse(function, std::string("a weight of format ") + name_of(format) +
                         " must be packed uint32 with uint8 scales, but got " + text(packed.shape()) + " and " +
                         text(scales.shape()));
  }
  const auto& [packed, scales, biases, group_size, bits, centred] = std::get<QuantizedWeight>(weight);
  const int in = scales.ndim() == 0 ? 0 : scales.shape(-1) * group_size;
  if (!is_affine_format(bits, group_size, in) || (group_size == 16 && axes != 2)) {
    refuse(function,
           "a weight must have 2 to 6 or 8 bits in groups of 32, 64 or 128 (one matrix also of 16, but for 4 "
           "bits), but got " +
               std::to_string(bits) + " in groups of " + std::to_string(group_size));
  }
  const bool fits = packed.ndim() == axes && packed.dtype() == mx::uint32 && scales.shape() == biases.shape() &&
                    scales.dtype() == biases.dtype() && mx::issubdtype(scales.dtype(), mx::floating) &&
                    same_but_last(packed.shape(), scales.shape()) &&
                    std::int64_t{packed.shape(-1)} * 32 == std::int64_t{scales.shape(-1)} * group_size * bits;
  if (!fits) {
    refuse(function, "a weight must be packed uint32 with scales and biases of one floating dtype, but got " +
                         text(packed.shape()) + ", " + text(scales.shape()) + " and " + text(biases.shape()));
  }
}

const float* floats_of(const mx::array& vector, std::vector<float>& storage) {
  const auto element = element_of(vector.dtype());
  if (!element || !is_readable(vector)) return nullptr;
  if (*element == cpu::Element::f32) return vector.data<float>();
  storage.resize(vector.size());
  cpu::load_row(vector.data<std::byte>(), *element, 1, static_cast<int>(vector.size()), storage.data());
  return storage.data();
}

std::optional<HeldNorm> held(const std::optional<RmsNormParams>& norm) {
  if (!norm) return HeldNorm{};
  std::vector<float> wide;
  const float* weight = floats_of(norm->weight, wide);
  if (weight == nullptr) return std::nullopt;
  if (wide.empty()) return HeldNorm{norm, nullptr, weight};
  auto kept = std::make_shared<const std::vector<float>>(std::move(wide));
  weight = kept->data();
  return HeldNorm{norm, std::move(kept), weight};
}

std::optional<cpu::WeightView> view_of(const Weight& weight) {
  cpu::WeightView view;
  if (const auto* dense = std::get_if<DenseWeight>(&weight)) {
    const auto element = element_of(dense->dtype());
    if (!element || !is_readable(*dense)) return {};
    view.rows = rows_of(*dense);
    view.cols = dense->shape(-1);
    view.element = *element;
    view.data = dense->data<std::byte>();
    return view;
  }
  if (const auto* m = std::get_if<MicroscaledWeight>(&weight)) {
    if (m->format != MicroscalingFormat::mxfp4 || !is_readable(m->packed) || !is_readable(m->scales)) return {};
    view.rows = rows_of(m->packed);
    view.cols = m->scales.shape(-1) * group_size_of(m->format);
    view.bits = bits_of(m->format);
    view.group_size = group_size_of(m->format);
    view.element = cpu::Element::e8m0;
    view.data = m->packed.data<std::byte>();
    view.scales = m->scales.data<std::byte>();
    return view;
  }
  const auto& [packed, scales, biases, group_size, bits, centred] = std::get<QuantizedWeight>(weight);
  const auto element = element_of(scales.dtype());
  if (!element || !is_readable(packed) || !is_readable(scales) || !is_readable(biases)) return {};
  view.rows = rows_of(packed);
  view.cols = scales.shape(-1) * group_size;
  view.bits = bits;
  view.group_size = group_size;
  view.element = *element;
  view.data = packed.data<std::byte>();
  view.scales = scales.data<std::byte>();
  view.biases = biases.data<std::byte>();
  view.centred = centred;
  return view;
}

}  // namespace kernels::internal

namespace {

// Of floats with these many bits of fraction: bias = -2^power · scale, bit for bit. Zeros may have any sign; numbers
// that have lost bits are not looked at.
template <typename Bits, int kFraction>
bool all_centred(const Bits* scales, const Bits* biases, std::size_t count, int power) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr Bits kFractionMask = static_cast<Bits>((Bits{1} << kFraction) - 1);
  constexpr Bits kExponents = static_cast<Bits>(~(kSign | kFractionMask));
  const auto up = static_cast<Bits>(static_cast<Bits>(power) << kFraction);
  const auto most = static_cast<Bits>(kExponents - up);  // larger ones would overflow
  const auto none_differs = [&](std::size_t begin, std::size_t end) {
    bool differs = false;
    for (std::size_t i = begin; i < end; ++i) {
      const auto exponent = static_cast<Bits>(scales[i] & kExponents);
      const bool is_scaled =
          exponent != 0 && exponent < most && biases[i] == static_cast<Bits>((scales[i] ^ kSign) + up);
      const bool are_zero = static_cast<Bits>((scales[i] | biases[i]) & ~kSign) == 0;
      differs |= !(is_scaled | are_zero);
    }
    return !differs;
  };
  // Most weights are told by their first groups.
  const std::size_t first = std::min<std::size_t>(count, 64);
  return none_differs(0, first) && none_differs(first, count);
}

}  // namespace

bool is_centred(const QuantizedWeight& weight) {
  const auto& [packed, scales, biases, group_size, bits, centred] = weight;
  if (mx::default_device() != mx::Device::cpu || scales.dtype() != biases.dtype() || scales.shape() != biases.shape() ||
      scales.size() == 0) {
    return false;
  }
  mx::eval(scales, biases);
  if (!scales.flags().row_contiguous || !biases.flags().row_contiguous) return false;
  const int power = bits - 1;
  if (scales.dtype() == mx::float32) {
    return all_centred<std::uint32_t, 23>(scales.data<std::uint32_t>(), biases.data<std::uint32_t>(), scales.size(),
                                          power);
  }
  const auto* s = scales.data<std::uint16_t>();
  const auto* b = biases.data<std::uint16_t>();
  if (scales.dtype() == mx::float16) return all_centred<std::uint16_t, 10>(s, b, scales.size(), power);
  return scales.dtype() == mx::bfloat16 && all_centred<std::uint16_t, 7>(s, b, scales.size(), power);
}

}  // namespace reprise
