#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
#include "reprise/kernels/attention.h"
#include "reprise/kernels/attention_cpu.h"
#include "reprise/kernels/attention_views.h"
#include "reprise/kernels/choice.h"
#include "reprise/kernels/cpu_target.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/rows_cpu.h"
#include "reprise/kernels/store_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

// Requires: a dtype that kernels know, or uint32, which is not asked for.
cpu::Element element_of(mx::Dtype dtype) { return internal::element_of(dtype).value_or(cpu::Element::f32); }

// All that the operation is told besides arrays.
struct Plan {
  int batch = 0, num_rows = 0, heads = 0, kv_heads = 0;
  int key_size = 0, value_size = 0;
  std::optional<RopeParams> rope;
  internal::HeldNorm query_norm, key_norm;
  std::optional<KVQuantization> quantization;
  int offset = 0;
  int at = 0, visible = 0, capacity = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  bool causal = false;
  std::size_t num_tensors = 0;  // given ones: 0, 2 or 6
  // Places among the inputs.
  std::optional<std::size_t> offsets, mask, sinks, row_starts;
};

// A buffer as it is read and as it is written.
struct Buffers {
  cpu::TargetRows target;
  cpu::StoredRows stored;
};

Buffers buffers_of(const Plan& plan, int size, mx::array* tensors) {
  Buffers out;
  cpu::TargetRows& target = out.target;
  target.size = size;
  target.data = tensors[0].data<char>();
  target.element = element_of(tensors[0].dtype());
  if (plan.quantization) {
    target.bits = plan.quantization->bits;
    target.group_size = plan.quantization->group_size;
    target.element = element_of(tensors[1].dtype());
    target.scales = tensors[1].data<char>();
    target.biases = tensors[2].data<char>();
  }
  cpu::StoredRows& stored = out.stored;
  stored.size = size;
  stored.bits = target.bits;
  stored.group_size = target.group_size;
  stored.element = target.element;
  stored.data = target.data;
  stored.scales = target.scales;
  stored.biases = target.biases;
  stored.column_stride = tensors[0].shape(3);
  stored.head_stride = stored.column_stride * plan.capacity;
  stored.batch_stride = stored.head_stride * plan.kv_heads;
  if (plan.quantization) {
    stored.group_column_stride = tensors[1].shape(3);
    stored.group_head_stride = stored.group_column_stride * plan.capacity;
    stored.group_batch_stride = stored.group_head_stride * plan.kv_heads;
  }
  return out;
}

class StoreAndAttend final : public mx::Primitive {
 public:
  StoreAndAttend(mx::Stream stream, Plan plan) : Primitive(stream), plan_(std::move(plan)) {}

  const char* name() const override { return "StoreAndAttend"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::unsupported, "[store_and_attend] a CPU operation was evaluated on a GPU");
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    // Each output holds the inputs, so that no buffer would ever seem free.
    const auto holds_them_too = [&](mx::array& output) { return &output.inputs() != &inputs; };
    for (mx::array& output : outputs) {
      if (holds_them_too(output)) output.inputs().clear();
    }
    try {
      dispatch(inputs, outputs);
    } catch (...) {
      for (mx::array& output : outputs) {
        if (holds_them_too(output)) output.inputs() = inputs;
      }
      throw;
    }
  }

 private:
  void dispatch(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    wait_for_buffers(inputs);
    Job job;
    job.plan = plan_;
    for (std::size_t i = 1; i < outputs.size(); ++i) place(inputs, i, outputs[i], job.copies);
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));

    const Plan& plan = plan_;
    cpu::StoreArgs& store = job.store;
    store.batch = plan.batch;
    store.num_rows = plan.num_rows;
    store.heads = plan.heads;
    store.kv_heads = plan.kv_heads;
    store.capacity = plan.capacity;
    store.at = plan.at;
    store.queries = internal::projected(inputs[0]);
    store.keys = internal::projected(inputs[1]);
    store.values = internal::projected(inputs[2]);
    store.offset = plan.offset;
    store.query_norm = plan.query_norm.view();
    store.key_norm = plan.key_norm.view();
    const Buffers keys = buffers_of(plan, plan.key_size, &outputs[1]);
    const Buffers values = buffers_of(plan, plan.value_size, &outputs[outputs.size() / 2 + 1]);
    store.stored_keys = keys.target;
    store.stored_values = values.target;

    cpu::AttentionArgs& attention = job.attention;
    attention.batch = plan.batch;
    attention.heads = plan.heads;
    attention.kv_heads = plan.kv_heads;
    attention.num_queries = plan.num_rows;
    attention.columns = plan.visible;
    attention.scale = plan.scale;
    attention.softcap = plan.softcap;
    attention.keys = keys.stored;
    attention.values = values.stored;
    attention.causal = plan.causal;
    if (plan.mask) attention.mask = internal::mask_view(inputs[*plan.mask]);

    auto& encoder = mx::cpu::get_command_encoder(stream());
    const auto floats = [&](std::ptrdiff_t count) {
      mx::array scratch({static_cast<mx::ShapeElem>(count)}, mx::float32, nullptr, {});
      scratch.set_data(mx::allocator::malloc(scratch.nbytes()));
      float* data = scratch.data<float>();
      encoder.add_temporary(std::move(scratch));
      return data;
    };
    const auto rows = [&](auto* data, int size) {
      const std::ptrdiff_t row_stride = std::ptrdiff_t{plan.heads} * size;
      return cpu::HeadRows<std::remove_pointer_t<decltype(data)>>{data, row_stride * plan.num_rows, size, row_stride};
    };
    const std::ptrdiff_t tokens = std::ptrdiff_t{plan.batch} * plan.num_rows * plan.heads;
    const mx::array& queries = inputs[0];
    if (plan.rope || plan.query_norm.weight || queries.dtype() != mx::float32 || !queries.flags().row_contiguous) {
      store.rotated_queries = floats(tokens * plan.key_size);
      attention.queries = rows(static_cast<const float*>(store.rotated_queries), plan.key_size);
    } else {
      attention.queries = rows(queries.data<float>(), plan.key_size);
    }
    float* result = out.dtype() == mx::float32 ? out.data<float>() : floats(tokens * plan.value_size);
    attention.output = rows(result, plan.value_size);
    job.out = out.data<char>();
    job.out_element = element_of(out.dtype());

    const auto vector_of = [&](const std::optional<std::size_t>& input) -> Vector {
      if (!input) return {};
      const mx::array& x = inputs[*input];
      return {x.data<char>(), element_of(x.dtype()), x.strides(0)};
    };
    job.offsets = vector_of(plan.offsets);
    job.sinks = vector_of(plan.sinks);
    job.row_starts = vector_of(plan.row_starts);
    encoder.dispatch([job = std::move(job)]() mutable { job.run(); });
  }

  // Numbers that may be strided; the kernels want them side by side.
  struct Vector {
    const void* data = nullptr;
    cpu::Element element = cpu::Element::f32;
    std::ptrdiff_t stride = 1;

    std::vector<std::int32_t> integers(int count) const {
      std::vector<std::int32_t> out;
      for (int i = 0; data && i < count; ++i) out.push_back(static_cast<const std::int32_t*>(data)[i * stride]);
      return out;
    }
    std::vector<float> floats(int count) const {
      std::vector<float> out;
      if (!data) return out;
      out.resize(static_cast<std::size_t>(count));
      cpu::load_row(data, element, stride, count, out.data());
      return out;
    }
  };

  struct Job {
    Plan plan;
    std::vector<cpu::ColumnsCopy> copies;
    cpu::StoreArgs store;
    cpu::AttentionArgs attention;
    Vector offsets, sinks, row_starts;
    void* out = nullptr;
    cpu::Element out_element = cpu::Element::f32;

    void run() {
      cpu_target();
      ThreadPool& pool = ThreadPool::process();
      const std::vector<std::int32_t> offset_of_row = offsets.integers(plan.batch);
      const std::vector<std::int32_t> start_of_row = row_starts.integers(plan.batch);
      const std::vector<float> sink_of_head = sinks.floats(plan.heads);
      {
        const ProfileScope scope("rope+store");
        for (const cpu::ColumnsCopy& copy : copies) cpu::copy_columns(copy, pool);
        cpu::RopeView rope;
        if (plan.rope) {
          rope = {plan.rope->dims, plan.rope->traditional, plan.rope->scale, plan.rope->input_scale,
                  plan.rope->frequencies->data()};
          store.rope = &rope;
        }
        if (!offset_of_row.empty()) store.offsets = offset_of_row.data();
        cpu::store_rows(store, pool);
      }
      const ProfileScope scope("attention");
      if (!start_of_row.empty()) attention.row_starts = start_of_row.data();
      if (!sink_of_head.empty()) attention.sinks = sink_of_head.data();
      cpu::attend(attention, pool);
      if (out_element != cpu::Element::f32) {
        const int features = plan.batch * plan.num_rows * plan.heads * plan.value_size;
        cpu::store_row(attention.output.data, out_element, features, out);
      }
    }
  };

  bool grows(const mx::array& buffer) const { return buffer.shape(2) < plan_.capacity; }

  static bool is_free(const mx::array& buffer) {
    return buffer.is_donatable() && buffer.flags().row_contiguous && buffer.size() == buffer.data_size();
  }

  // Operations under way hold the memory that they use. So a buffer that seems shared may be free once they have
  // ended: waiting for them costs less than copying it. And MLX would otherwise allocate what a whole chunk of a prompt
  // needs, all layers, before the first of them has run; with one layer at a time each reuses the memory of the last.
  void wait_for_buffers(const std::vector<mx::array>& inputs) {
    if (inputs[0].nbytes() >= kManyBytes) {
      mx::synchronize(stream());
      return;
    }
    for (std::size_t i = 3; i < 3 + plan_.num_tensors; ++i) {
      if (grows(inputs[i]) || is_free(inputs[i])) continue;
      mx::synchronize(stream());
      return;
    }
  }

  // Memory of output i: its input's own where nobody else holds it and it is large enough, else a copy to be made.
  void place(const std::vector<mx::array>& inputs, std::size_t i, mx::array& out,
             std::vector<cpu::ColumnsCopy>& copies) const {
    const mx::array* in = plan_.num_tensors > 0 ? &inputs[2 + i] : nullptr;
    if (in != nullptr && !grows(*in) && is_free(*in)) {
      out.copy_shared_buffer(*in);
      return;
    }
    out.set_data(mx::allocator::malloc(out.nbytes()));
    cpu::ColumnsCopy copy;
    copy.to = reinterpret_cast<std::byte*>(out.data<char>());
    copy.batch = out.shape(0);
    copy.kv_heads = out.shape(1);
    copy.to_columns = out.shape(2);
    copy.features = out.shape(3);
    copy.item_size = out.itemsize();
    if (in != nullptr) {
      const auto bytes = [&](int axis) { return in->strides(axis) * static_cast<std::ptrdiff_t>(in->itemsize()); };
      copy.from = reinterpret_cast<const std::byte*>(in->data<char>());
      copy.kept = grows(*in) ? plan_.at : in->shape(2);
      copy.batch_stride = bytes(0);
      copy.head_stride = bytes(1);
      copy.column_stride = bytes(2);
      copy.feature_stride = bytes(3);
    }
    copies.push_back(copy);
  }

  // Queries of one operation, beyond which waiting (some microseconds) is nothing beside its work.
  static constexpr std::size_t kManyBytes = std::size_t{128} << 10;

  Plan plan_;
};

}  // namespace

StoreAndAttendResult store_and_attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                      int heads, const RopeParams* rope, const Offset& offset, StoreTarget target,
                                      const AttentionParams& params, const HeadNorms& norms) {
  const auto query_norm = internal::held(norms.queries);
  const auto key_norm = internal::held(norms.keys);
  if (!internal::use_kernels() || !query_norm || !key_norm) {
    return reference::store_and_attend(queries, keys, values, heads, rope, offset, std::move(target), params, norms);
  }
  Plan plan;
  plan.query_norm = *query_norm;
  plan.key_norm = *key_norm;
  plan.batch = queries.shape(0);
  plan.num_rows = queries.shape(1);
  plan.heads = heads;
  plan.key_size = queries.shape(2) / heads;
  plan.kv_heads = keys.shape(2) / plan.key_size;
  plan.value_size = values.shape(2) / plan.kv_heads;
  if (rope) plan.rope = *rope;
  plan.quantization = target.quantization;
  plan.at = target.at;
  plan.visible = target.visible;
  plan.capacity = std::max(target.capacity, target.tensors.empty() ? 0 : target.tensors[0].shape(2));
  plan.scale = params.scale;
  plan.softcap = params.softcap.value_or(0.0f);
  plan.causal = std::holds_alternative<Causal>(params.mask);
  plan.num_tensors = target.tensors.size();

  std::vector<mx::Shape> shapes = {{plan.batch, plan.num_rows, heads * plan.value_size}};
  std::vector<mx::Dtype> dtypes = {queries.dtype()};
  for (const int part : {0, 1}) {
    const int size = part == 0 ? plan.key_size : plan.value_size;
    const auto add = [&](int features, mx::Dtype dtype) {
      const std::size_t i = shapes.size() - 1;
      shapes.push_back({plan.batch, plan.kv_heads, plan.capacity, features});
      dtypes.push_back(target.tensors.empty() ? dtype : target.tensors[i].dtype());
    };
    const mx::Dtype dtype = target.dtype.value_or(part == 0 ? keys.dtype() : values.dtype());
    if (target.quantization) {
      add(size * target.quantization->bits / 32, mx::uint32);
      for (int i = 0; i < 2; ++i) add(size / target.quantization->group_size, dtype);
    } else {
      add(size, dtype);
    }
  }

  std::vector<mx::array> inputs = {queries, keys, values};
  for (mx::array& tensor : target.tensors) inputs.push_back(std::move(tensor));
  const auto add_input = [&](const mx::array& x) {
    inputs.push_back(x);
    return inputs.size() - 1;
  };
  const auto integers = [](const mx::array& x) { return x.dtype() == mx::int32 ? x : mx::astype(x, mx::int32); };
  const auto is_small_float = [](mx::Dtype dtype) {
    return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
  };
  if (const int* position = std::get_if<int>(&offset)) {
    plan.offset = *position;
  } else if (rope) {
    plan.offsets = add_input(integers(std::get<mx::array>(offset)));
  }
  if (const auto* mask = std::get_if<mx::array>(&params.mask)) {
    const bool fits = mask->dtype() == mx::bool_ || is_small_float(mask->dtype());
    plan.mask = add_input(fits ? *mask : mx::astype(*mask, mx::float32));
  }
  if (params.sinks) {
    plan.sinks =
        add_input(is_small_float(params.sinks->dtype()) ? *params.sinks : mx::astype(*params.sinks, mx::float32));
  }
  if (params.row_starts) plan.row_starts = add_input(integers(*params.row_starts));

  const mx::Stream stream = mx::default_stream(mx::default_device());
  std::vector<mx::array> made = mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<StoreAndAttend>(stream, std::move(plan)), std::move(inputs));
  StoreAndAttendResult result{std::move(made[0]), {}};
  for (std::size_t i = 1; i < made.size(); ++i) result.tensors.push_back(std::move(made[i]));
  return result;
}

}  // namespace reprise::kernels
