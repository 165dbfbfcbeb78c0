#include "reprise/kernels/attention.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/attention_cpu.h"
#include "reprise/kernels/attention_views.h"
#include "reprise/kernels/choice.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/rows_cpu.h"
#include "reprise/kernels/store_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

// Requires: a dtype that kernels know.
cpu::Element element_of(mx::Dtype dtype) { return *internal::element_of(dtype); }

// What the operation is told besides arrays. Inputs: queries; keys' and values' tensors; mask, sinks and row_starts as
// there are.
struct Plan {
  float scale = 1.0f;
  float softcap = 0.0f;
  bool causal = false;
  bool mask = false;
  bool sinks = false;
  bool row_starts = false;
  std::optional<KVQuantization> quantization;
};

// Rows of features that are converted before or after attention: as [B, H, L] rows of `size`.
struct Conversion {
  const char* from = nullptr;
  char* to = nullptr;
  cpu::Element from_element = cpu::Element::f32;
  cpu::Element to_element = cpu::Element::f32;
  int batch = 0, heads = 0, rows = 0, size = 0;
  std::ptrdiff_t batch_stride = 0, head_stride = 0, row_stride = 0, feature_stride = 1;  // of `from`, in elements

  void run(ThreadPool& pool) const {
    pool.run(batch * heads, [&](int task) {
      const std::ptrdiff_t start = task / heads * batch_stride + task % heads * head_stride;
      for (int i = 0; i < rows; ++i) {
        const char* x = from + (start + i * row_stride) * static_cast<std::ptrdiff_t>(cpu::size_of(from_element));
        char* y = to + (std::ptrdiff_t{task} * rows + i) * size * static_cast<std::ptrdiff_t>(size_of(to_element));
        if (to_element == cpu::Element::f32) {
          cpu::load_row(x, from_element, feature_stride, size, reinterpret_cast<float*>(y));
        } else {
          cpu::store_row(reinterpret_cast<const float*>(x), to_element, size, y);
        }
      }
    });
  }
};

// A vector that may be strided, in memory that is not filled yet.
template <typename T>
struct Vector {
  const T* data = nullptr;
  std::ptrdiff_t stride = 1;
  int count = 0;

  Vector() = default;
  explicit Vector(const mx::array& x) : data(x.data<T>()), stride(x.strides(0)), count(x.shape(0)) {}

  std::vector<T> values() const {
    std::vector<T> out;
    for (int i = 0; i < count; ++i) out.push_back(data[i * stride]);
    return out;
  }
};

// One evaluation, all pointers: inputs are computed only by the time it runs.
struct Job {
  cpu::AttentionArgs args;
  std::vector<cpu::ColumnsCopy> copies;
  std::optional<Conversion> queries, output;
  Vector<float> sinks;
  Vector<std::int32_t> row_starts;

  void run() {
    const ProfileScope scope("attention");
    ThreadPool& pool = ThreadPool::process();
    for (const cpu::ColumnsCopy& copy : copies) cpu::copy_columns(copy, pool);
    if (queries) queries->run(pool);
    const std::vector<float> sink_of_head = sinks.values();
    const std::vector<std::int32_t> start_of_row = row_starts.values();
    if (sinks.count > 0) args.sinks = sink_of_head.data();
    if (row_starts.count > 0) args.row_starts = start_of_row.data();
    cpu::attend(args, pool);
    if (output) output->run(pool);
  }
};

class Attention final : public mx::UnaryPrimitive {
 public:
  Attention(mx::Stream stream, const Plan& plan) : UnaryPrimitive(stream), plan_(plan) {}

  const char* name() const override { return "Attention"; }
  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw Error(ErrorCode::unsupported, "[attention] a CPU operation was evaluated on a GPU");
  }
  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override;

 private:
  float* floats(std::size_t count) {
    return reinterpret_cast<float*>(temporary({static_cast<mx::ShapeElem>(count)}, mx::float32));
  }
  char* temporary(const mx::Shape& shape, mx::Dtype dtype);
  const char* contiguous(const mx::array& x, Job& job);
  cpu::StoredRows stored(const mx::array* tensors, Job& job);
  void take_queries(const mx::array& queries, Job& job);
  void take_output(mx::array& out, Job& job);

  Plan plan_;
};

// Memory that lives until what is dispatched has run.
char* Attention::temporary(const mx::Shape& shape, mx::Dtype dtype) {
  mx::array memory(shape, dtype, nullptr, {});
  memory.set_data(mx::allocator::malloc(memory.nbytes()));
  char* data = memory.data<char>();
  mx::cpu::get_command_encoder(stream()).add_temporary(std::move(memory));
  return data;
}

// Where a row-contiguous copy of keys or values [B, Hkv, S, features] will be.
const char* Attention::contiguous(const mx::array& x, Job& job) {
  char* data = temporary(x.shape(), x.dtype());
  const auto bytes = [&](int axis) { return x.strides(axis) * static_cast<std::ptrdiff_t>(x.itemsize()); };
  cpu::ColumnsCopy copy;
  copy.from = reinterpret_cast<const std::byte*>(x.data<char>());
  copy.to = reinterpret_cast<std::byte*>(data);
  copy.batch = x.shape(0);
  copy.kv_heads = x.shape(1);
  copy.kept = copy.to_columns = x.shape(2);
  copy.features = x.shape(3);
  copy.item_size = x.itemsize();
  copy.batch_stride = bytes(0);
  copy.head_stride = bytes(1);
  copy.column_stride = bytes(2);
  copy.feature_stride = bytes(3);
  job.copies.push_back(copy);
  return data;
}

bool has_whole_rows(const mx::array& x) { return x.shape(3) == 1 || x.strides(3) == 1; }

bool has_strides_of(const mx::array& x, const mx::array& y) {
  for (int axis = 0; axis < 3; ++axis) {
    if (x.strides(axis) != y.strides(axis) && x.shape(axis) > 1) return false;
  }
  return true;
}

cpu::StoredRows Attention::stored(const mx::array* tensors, Job& job) {
  cpu::StoredRows out;
  const mx::array& rows = tensors[0];
  const auto row_contiguous = [](const mx::array& x, auto& batch, auto& head, auto& column) {
    column = x.shape(3);
    head = column * x.shape(2);
    batch = head * x.shape(1);
  };
  out.size = rows.shape(3);
  out.data = rows.data<char>();
  out.batch_stride = rows.strides(0);
  out.head_stride = rows.strides(1);
  out.column_stride = rows.strides(2);
  if (!has_whole_rows(rows)) {
    out.data = contiguous(rows, job);
    row_contiguous(rows, out.batch_stride, out.head_stride, out.column_stride);
  }
  if (!plan_.quantization) {
    out.element = element_of(rows.dtype());
    return out;
  }
  const mx::array& scales = tensors[1];
  const mx::array& biases = tensors[2];
  out.bits = plan_.quantization->bits;
  out.group_size = plan_.quantization->group_size;
  out.size = scales.shape(3) * out.group_size;
  out.element = element_of(scales.dtype());
  out.scales = scales.data<char>();
  out.biases = biases.data<char>();
  out.group_batch_stride = scales.strides(0);
  out.group_head_stride = scales.strides(1);
  out.group_column_stride = scales.strides(2);
  if (!has_whole_rows(scales) || !has_whole_rows(biases) || !has_strides_of(scales, biases)) {
    out.scales = contiguous(scales, job);
    out.biases = contiguous(biases, job);
    row_contiguous(scales, out.group_batch_stride, out.group_head_stride, out.group_column_stride);
  }
  return out;
}

void Attention::take_queries(const mx::array& queries, Job& job) {
  cpu::AttentionArgs& args = job.args;
  if (queries.dtype() == mx::float32 && has_whole_rows(queries)) {
    args.queries = {queries.data<float>(), queries.strides(0), queries.strides(1), queries.strides(2)};
    return;
  }
  float* data = floats(queries.size());
  const std::ptrdiff_t row = queries.shape(3);
  args.queries = {data, row * args.num_queries * args.heads, row * args.num_queries, row};
  job.queries = Conversion{queries.data<char>(),
                           reinterpret_cast<char*>(data),
                           element_of(queries.dtype()),
                           cpu::Element::f32,
                           args.batch,
                           args.heads,
                           args.num_queries,
                           queries.shape(3),
                           queries.strides(0),
                           queries.strides(1),
                           queries.strides(2),
                           queries.strides(3)};
}

void Attention::take_output(mx::array& out, Job& job) {
  cpu::AttentionArgs& args = job.args;
  out.set_data(mx::allocator::malloc(out.nbytes()));
  const bool is_float = out.dtype() == mx::float32;
  float* data = is_float ? out.data<float>() : floats(out.size());
  const std::ptrdiff_t row = out.shape(3);
  args.output = {data, row * args.num_queries * args.heads, row * args.num_queries, row};
  if (is_float) return;
  job.output = Conversion{reinterpret_cast<const char*>(data),
                          out.data<char>(),
                          cpu::Element::f32,
                          element_of(out.dtype()),
                          args.batch,
                          args.heads,
                          args.num_queries,
                          out.shape(3),
                          args.output.batch_stride,
                          args.output.head_stride,
                          args.output.row_stride,
                          1};
}

void Attention::eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) {
  const mx::array& queries = inputs[0];
  const mx::array* keys = &inputs[1];
  const std::size_t tensors = plan_.quantization ? 3 : 1;
  const mx::array* values = keys + tensors;
  const mx::array* next = values + tensors;

  Job job;
  cpu::AttentionArgs& args = job.args;
  args.batch = queries.shape(0);
  args.heads = queries.shape(1);
  args.num_queries = queries.shape(2);
  args.kv_heads = keys[0].shape(1);
  args.columns = keys[0].shape(2);
  args.scale = plan_.scale;
  args.softcap = plan_.softcap;
  args.causal = plan_.causal;
  take_queries(queries, job);
  args.keys = stored(keys, job);
  args.values = stored(values, job);
  take_output(out, job);
  if (plan_.mask) args.mask = internal::mask_view(*next++);
  if (plan_.sinks) job.sinks = Vector<float>(*next++);
  if (plan_.row_starts) job.row_starts = Vector<std::int32_t>(*next);
  mx::cpu::get_command_encoder(stream()).dispatch([job = std::move(job)]() mutable { job.run(); });
}

mx::array as(const mx::array& x, mx::Dtype dtype) { return x.dtype() == dtype ? x : mx::astype(x, dtype); }

mx::array as_element(const mx::array& x) { return internal::element_of(x.dtype()) ? x : mx::astype(x, mx::float32); }

}  // namespace

mx::array attention(const mx::array& queries, const KeysValues& keys_values, const AttentionParams& params) {
  const auto* dense = std::get_if<DenseKV>(&keys_values);
  const bool wide = queries.dtype() == mx::float64 ||
                    (dense && (dense->keys.dtype() == mx::float64 || dense->values.dtype() == mx::float64));
  if (!internal::use_kernels() || wide) return reference::attention(queries, keys_values, params);
  Plan plan;
  plan.scale = params.scale;
  plan.softcap = params.softcap.value_or(0.0f);
  plan.causal = std::holds_alternative<Causal>(params.mask);
  std::vector<mx::array> inputs = {queries};
  int size = 0;
  if (dense) {
    inputs.push_back(as_element(dense->keys));
    inputs.push_back(as_element(dense->values));
    size = dense->values.shape(3);
  } else {
    const auto& quantized = std::get<QuantizedKV>(keys_values);
    plan.quantization = quantized.quantization;
    for (const QuantizedTensor* tensor : {&quantized.keys, &quantized.values}) {
      inputs.push_back(tensor->packed);
      const bool same =
          tensor->scales.dtype() == tensor->biases.dtype() && internal::element_of(tensor->scales.dtype());
      inputs.push_back(same ? tensor->scales : as(tensor->scales, mx::float32));
      inputs.push_back(same ? tensor->biases : as(tensor->biases, mx::float32));
    }
    size = quantized.values.scales.shape(3) * quantized.quantization.group_size;
  }
  if (const auto* mask = std::get_if<mx::array>(&params.mask)) {
    plan.mask = true;
    inputs.push_back(mask->dtype() == mx::bool_ ? *mask : as_element(*mask));
  }
  if (params.sinks) {
    plan.sinks = true;
    inputs.push_back(as(*params.sinks, mx::float32));
  }
  if (params.row_starts) {
    plan.row_starts = true;
    inputs.push_back(as(*params.row_starts, mx::int32));
  }
  const mx::Shape shape{queries.shape(0), queries.shape(1), queries.shape(2), size};
  if (queries.shape(0) == 0 || queries.shape(1) == 0 || queries.shape(2) == 0 || size == 0) {
    return mx::zeros(shape, queries.dtype());
  }
  const mx::Stream stream = mx::default_stream(mx::default_device());
  return mx::array(shape, queries.dtype(), std::make_shared<Attention>(stream, plan), std::move(inputs));
}

}  // namespace reprise::kernels
