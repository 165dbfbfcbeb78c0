#include "reprise/kernels/pages.h"

#include <algorithm>
#include <cstring>

#include "mlx/device.h"
#include "reprise/base/error.h"
#include "reprise/kernels/cpu.h"
#include "reprise/kernels/cpu_target.h"

namespace reprise::kernels {

namespace mx = mlx::core;

static_assert(kPageRows == cpu::kPageColumns);

namespace {

constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::vector<mx::Shape> PageLayout::shapes() const {
  std::vector<mx::Shape> out;
  for (const int size : {key_size, value_size}) {
    if (!quantization) {
      out.push_back({1, kv_heads, kPageRows, size});
      continue;
    }
    out.push_back({1, kv_heads, kPageRows, size * quantization->bits / 32});
    for (int i = 0; i < 2; ++i) out.push_back({1, kv_heads, kPageRows, size / quantization->group_size});
  }
  return out;
}

std::vector<mx::Dtype> PageLayout::dtypes() const {
  if (!quantization) return {dtype, dtype};
  return {mx::uint32, dtype, dtype, mx::uint32, dtype, dtype};
}

std::vector<std::size_t> PageLayout::offsets() const {
  std::vector<std::size_t> out;
  std::size_t at = 0;
  for (const std::size_t bytes : internal::part_sizes(*this)) {
    out.push_back(at);
    at += aligned(bytes);
  }
  return out;
}

std::size_t PageLayout::nbytes() const {
  std::size_t out = 0;
  for (const std::size_t bytes : internal::part_sizes(*this)) out += aligned(bytes);
  return out;
}

bool PageLayout::operator==(const PageLayout& other) const {
  return kv_heads == other.kv_heads && key_size == other.key_size && value_size == other.value_size &&
         dtype == other.dtype && quantization == other.quantization;
}

int PagedVisibility::first_visible(int position) const {
  int first = 0;
  if (window > 0) first = std::max(first, position - window + 1);
  if (chunk > 0) first = std::max(first, position / chunk * chunk);
  return first;
}

namespace internal {

std::vector<std::size_t> part_sizes(const PageLayout& layout) {
  std::vector<std::size_t> out;
  const auto shapes = layout.shapes();
  const auto dtypes = layout.dtypes();
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    std::size_t bytes = dtypes[i].size();
    for (const int n : shapes[i]) bytes *= static_cast<std::size_t>(n);
    out.push_back(bytes);
  }
  return out;
}

void refuse_pages(const char* function, const std::string& text) {
  throw Error(ErrorCode::invalid_argument, "[" + std::string(function) + "] " + text);
}

void need_cpu_for_pages(const char* function) {
  if (mx::default_device() != mx::Device::cpu) {
    throw Error(ErrorCode::unsupported, "[" + std::string(function) + "] pages are for the CPU, but got a GPU");
  }
  cpu_target();  // chosen before the first kernel runs
}

std::vector<std::byte*> pages_of(const char* function, const PagedSequence& sequence, int first, int end) {
  const int last_page = (end + kPageRows - 1) / kPageRows - sequence.first_page;
  if (first < sequence.first_page * kPageRows || last_page > static_cast<int>(sequence.pages.size())) {
    refuse_pages(function, "a sequence must have the pages of rows " + std::to_string(first) + " to " +
                               std::to_string(end) + ", but got " + std::to_string(sequence.pages.size()) +
                               " from page " + std::to_string(sequence.first_page) + " on");
  }
  std::vector<std::byte*> out;
  out.reserve(sequence.pages.size());
  for (const PageMemory& page : sequence.pages) out.push_back(page.get());
  return out;
}

void copy_page_rows(const PageLayout& layout, const std::byte* from, std::byte* to, int rows) {
  const auto sizes = part_sizes(layout);
  const auto offsets = layout.offsets();
  const auto heads = static_cast<std::size_t>(layout.kv_heads);
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    const std::size_t of_head = sizes[part] / heads;
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t at = offsets[part] + h * of_head;
      std::memcpy(to + at, from + at, of_head / kPageRows * static_cast<std::size_t>(rows));
    }
  }
}

std::vector<mx::array> waits_of(const std::vector<mx::array>& after) {
  std::vector<mx::array> out;
  for (const mx::array& x : after) {
    const auto is_same = [&](const mx::array& other) { return other.id() == x.id(); };
    if (!x.is_available() && std::none_of(out.begin(), out.end(), is_same)) out.push_back(x);
  }
  return out;
}

}  // namespace internal

}  // namespace reprise::kernels
