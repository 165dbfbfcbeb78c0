#include <algorithm>
#include <cstring>
#include <utility>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/paged_attention.h"
#include "reprise/kernels/pages.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

struct Plan {
  PageLayout layout;
  PagedSequence sequence;
  std::vector<std::byte*> pages;
  int begin = 0;
  int end = 0;
};

// Rows of one part of the pages into an array [1, Hkv, end - begin, features].
void copy_part(const Plan& plan, std::size_t offset, std::size_t row_bytes, std::byte* out, ThreadPool& pool) {
  const auto rows = static_cast<std::size_t>(plan.end - plan.begin);
  pool.run(plan.layout.kv_heads, [&](int head) {
    const std::size_t of_page = offset + static_cast<std::size_t>(head) * kPageRows * row_bytes;
    std::byte* to = out + static_cast<std::size_t>(head) * rows * row_bytes;
    for (int row = plan.begin; row < plan.end;) {
      const int in_page = row % kPageRows;
      const int count = std::min(plan.end - row, kPageRows - in_page);
      const std::byte* page = plan.pages[static_cast<std::size_t>(row / kPageRows - plan.sequence.first_page)];
      const std::size_t bytes = static_cast<std::size_t>(count) * row_bytes;
      std::memcpy(to, page + of_page + static_cast<std::size_t>(in_page) * row_bytes, bytes);
      to += bytes;
      row += count;
    }
  });
}

// Inputs: what must have run before. Outputs: the parts.
class PagedRows final : public mx::Primitive {
 public:
  PagedRows(mx::Stream stream, Plan plan) : Primitive(stream), plan_(std::make_shared<const Plan>(std::move(plan))) {}

  const char* name() const override { return "PagedRows"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::unsupported, "[paged_rows] a CPU operation was evaluated on a GPU");
  }

  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>& outputs) override {
    std::vector<std::byte*> to;
    for (mx::array& output : outputs) {
      output.set_data(mx::allocator::malloc(output.nbytes()));
      to.push_back(reinterpret_cast<std::byte*>(output.data<char>()));
    }
    mx::cpu::get_command_encoder(stream()).dispatch([plan = plan_, to = std::move(to)] {
      const ProfileScope scope("rows of pages");
      const auto offsets = plan->layout.offsets();
      const auto sizes = internal::part_sizes(plan->layout);
      const auto rows = static_cast<std::size_t>(plan->layout.kv_heads) * kPageRows;
      for (std::size_t i = 0; i < to.size(); ++i) {
        copy_part(*plan, offsets[i], sizes[i] / rows, to[i], ThreadPool::process());
      }
    });
  }

 private:
  std::shared_ptr<const Plan> plan_;
};

}  // namespace

std::vector<mx::array> paged_rows(const PageLayout& layout, const PagedSequence& sequence, int begin, int end,
                                  const std::vector<mx::array>& after) {
  constexpr const char* kFunction = "paged_rows";
  internal::need_cpu_for_pages(kFunction);
  Plan plan{layout, sequence, internal::pages_of(kFunction, sequence, begin, end), begin, end};
  const int shared = sequence.length / kPageRows - sequence.first_page;
  if (sequence.copy_from && shared >= 0 && shared < static_cast<int>(plan.pages.size())) {
    plan.pages[static_cast<std::size_t>(shared)] = sequence.copy_from.get();
  }
  std::vector<mx::Shape> shapes = layout.shapes();
  for (mx::Shape& shape : shapes) shape[2] = end - begin;
  return mx::array::make_arrays(std::move(shapes), layout.dtypes(),
                                std::make_shared<PagedRows>(mx::default_stream(mx::default_device()), std::move(plan)),
                                internal::waits_of(after));
}

}  // namespace reprise::kernels
