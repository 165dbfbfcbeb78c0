#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/buffers.h"
#include "reprise/kernels/choice.h"
#include "reprise/kernels/linear.h"
#include "reprise/kernels/products.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/rows_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

constexpr const char* kName = "embedding";

// One row is not worth handing to a thread.
constexpr int kRowsPerTask = 16;

struct Rows {
  cpu::WeightView weight;
  const std::int32_t* ids;
  int count;
  cpu::Element element;
  std::byte* out;
};

void unpack_rows(const Rows& rows, int begin, int end) {
  const auto& [weight, ids, count, element, out] = rows;
  const std::size_t row_bytes = static_cast<std::size_t>(weight.cols) * cpu::size_of(element);
  float* const wide = element == cpu::Element::f32
                          ? nullptr
                          : cpu::float_buffer(cpu::Buffer::output, static_cast<std::size_t>(weight.cols));
  for (int i = begin; i < end; ++i) {
    std::byte* const to = out + static_cast<std::size_t>(i) * row_bytes;
    cpu::unpack_row(weight, ids[i], wide ? wide : reinterpret_cast<float*>(to));
    if (wide) cpu::store_row(wide, element, weight.cols, to);
  }
}

class EmbeddingPrimitive final : public mx::UnaryPrimitive {
 public:
  EmbeddingPrimitive(mx::Stream stream, const Weight& weight, const cpu::WeightView& view)
      : UnaryPrimitive(stream), weight_(std::make_shared<const Weight>(weight)), view_(view) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const Rows rows{view_, inputs[0].data<std::int32_t>(), static_cast<int>(inputs[0].size()),
                    *internal::element_of(out.dtype()), out.data<std::byte>()};
    mx::cpu::get_command_encoder(stream()).dispatch([rows, weight = weight_] {
      const ProfileScope scope(kName);
      const auto is_row = [&](std::int32_t id) { return id >= 0 && id < rows.weight.rows; };
      if (!std::all_of(rows.ids, rows.ids + rows.count, is_row)) {
        throw Error(ErrorCode::invalid_argument,
                    "[embedding] ids must lie in [0, " + std::to_string(rows.weight.rows) + ")");
      }
      if (rows.count <= kRowsPerTask) return unpack_rows(rows, 0, rows.count);
      ThreadPool::process().run((rows.count + kRowsPerTask - 1) / kRowsPerTask, [&](int task) {
        unpack_rows(rows, task * kRowsPerTask, std::min((task + 1) * kRowsPerTask, rows.count));
      });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw Error(ErrorCode::internal, "[embedding] a CPU operation was sent to a GPU");
  }

  const char* name() const override { return kName; }

 private:
  std::shared_ptr<const Weight> weight_;
  cpu::WeightView view_;
};

}  // namespace

mx::array embedding(const mx::array& ids, const Weight& weight, mx::Dtype dtype) {
  internal::check_weight("embedding", weight);
  if (!mx::issubdtype(ids.dtype(), mx::integer)) {
    throw Error(ErrorCode::invalid_argument, "[embedding] ids must be integers, but got another dtype");
  }
  const auto view = internal::use_kernels() && internal::element_of(dtype) ? internal::view_of(weight) : std::nullopt;
  if (!view) return reference::embedding(ids, weight, dtype);
  mx::Shape shape = ids.shape();
  shape.push_back(view->cols);
  if (ids.size() == 0) return mx::zeros(shape, dtype);
  const auto stream = mx::default_stream(mx::Device(mx::Device::cpu));
  return mx::array(std::move(shape), dtype, std::make_shared<EmbeddingPrimitive>(stream, weight, *view),
                   {mx::contiguous(mx::astype(ids, mx::int32))});
}

}  // namespace reprise::kernels
