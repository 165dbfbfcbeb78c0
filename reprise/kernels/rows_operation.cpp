#include "reprise/kernels/rows_operation.h"

#include <utility>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/kernels/buffers.h"
#include "reprise/kernels/rows_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels::internal {

namespace mx = mlx::core;

namespace {

// What an evaluated array holds, as rows of float32: itself, or a copy in memory of its own.
class FloatRows {
 public:
  explicit FloatRows(const mx::array& x)
      : data_(x.data<std::byte>()),
        element_(*element_of(x.dtype())),
        is_itself_(element_ == cpu::Element::f32 && x.flags().row_contiguous),
        shape_(x.shape()),
        strides_(x.strides()) {}

  const float* get(cpu::Buffer which) const {
    if (is_itself_) return reinterpret_cast<const float*>(data_);
    const int size = shape_.back();
    std::size_t rows = 1;
    for (std::size_t axis = 0; axis + 1 < shape_.size(); ++axis) rows *= static_cast<std::size_t>(shape_[axis]);
    float* const out = cpu::float_buffer(which, rows * static_cast<std::size_t>(size));
    std::vector<int> index(shape_.size(), 0);
    for (std::size_t row = 0; row < rows; ++row) {
      std::int64_t at = 0;
      for (std::size_t axis = 0; axis + 1 < shape_.size(); ++axis) at += index[axis] * strides_[axis];
      cpu::load_row(data_ + at * static_cast<std::int64_t>(cpu::size_of(element_)), element_, strides_.back(), size,
                    out + row * static_cast<std::size_t>(size));
      for (std::size_t axis = shape_.size() - 1; axis-- > 0;) {
        if (++index[axis] < shape_[axis]) break;
        index[axis] = 0;
      }
    }
    return out;
  }

 private:
  const std::byte* data_;
  cpu::Element element_;
  bool is_itself_;
  mx::Shape shape_;
  mx::Strides strides_;
};

struct Output {
  std::byte* data;
  cpu::Element element;
  int size;  // of a row
};

class RowsPrimitive final : public mx::Primitive {
 public:
  RowsPrimitive(mx::Stream stream, std::shared_ptr<const RowsOperation> operation)
      : Primitive(stream), operation_(std::move(operation)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const int cols = inputs[0].shape(-1);
    const int rows = static_cast<int>(inputs[0].size() / static_cast<std::size_t>(cols));
    std::optional<FloatRows> residual;
    if (inputs.size() > 1) residual.emplace(inputs[1]);
    std::vector<Output> results;
    results.reserve(outputs.size());
    for (mx::array& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
      results.push_back({out.data<std::byte>(), *element_of(out.dtype()), out.shape(-1)});
    }
    // MLX keeps the inputs until the task is done; the operation keeps its weights.
    mx::cpu::get_command_encoder(stream()).dispatch([operation = operation_, x = FloatRows(inputs[0]),
                                                     residual = std::move(residual), results = std::move(results), rows,
                                                     cols] {
      const ProfileScope scope(operation->name());
      run(*operation, {x.get(cpu::Buffer::input), rows, cols},
          residual ? residual->get(cpu::Buffer::residual) : nullptr, results);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::internal, std::string("[") + operation_->name() + "] a CPU operation was sent to a GPU");
  }

  const char* name() const override { return operation_->name(); }

 private:
  static void run(const RowsOperation& operation, const cpu::Rows& x, const float* residual,
                  const std::vector<Output>& results) {
    const auto rows = static_cast<std::size_t>(x.rows);
    std::size_t floats = 0;
    for (const Output& result : results) {
      if (result.element != cpu::Element::f32) floats += rows * static_cast<std::size_t>(result.size);
    }
    float* wide = floats > 0 ? cpu::float_buffer(cpu::Buffer::output, floats) : nullptr;
    std::vector<float*> outputs;
    outputs.reserve(results.size());
    for (const Output& result : results) {
      const bool is_float = result.element == cpu::Element::f32;
      outputs.push_back(is_float ? reinterpret_cast<float*>(result.data) : wide);
      if (!is_float) wide += rows * static_cast<std::size_t>(result.size);
    }
    operation.run(x, residual, outputs, ThreadPool::process());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto& [data, element, size] = results[i];
      if (element == cpu::Element::f32) continue;
      const auto width = static_cast<std::size_t>(size);
      for (std::size_t row = 0; row < rows; ++row) {
        cpu::store_row(outputs[i] + row * width, element, size, data + row * width * cpu::size_of(element));
      }
    }
  }

  std::shared_ptr<const RowsOperation> operation_;
};

}  // namespace

std::vector<mx::array> apply(std::shared_ptr<const RowsOperation> operation, const mx::array& x,
                             const std::optional<mx::array>& residual, const std::vector<int>& sizes) {
  const auto primitive =
      std::make_shared<RowsPrimitive>(mx::default_stream(mx::Device(mx::Device::cpu)), std::move(operation));
  std::vector<mx::array> inputs = {x};
  if (residual) inputs.push_back(*residual);
  std::vector<mx::Shape> shapes;
  for (const int size : sizes) {
    shapes.push_back(x.shape());
    shapes.back().back() = size;
  }
  return mx::array::make_arrays(std::move(shapes), std::vector<mx::Dtype>(sizes.size(), x.dtype()), primitive, inputs);
}

}  // namespace reprise::kernels::internal
