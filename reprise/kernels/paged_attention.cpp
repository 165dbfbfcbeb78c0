#include "reprise/kernels/paged_attention.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/attention_cpu.h"
#include "reprise/kernels/attention_views.h"
#include "reprise/kernels/flat_array.h"
#include "reprise/kernels/pages.h"
#include "reprise/kernels/reference.h"
#include "reprise/kernels/rows_cpu.h"
#include "reprise/kernels/store_cpu.h"
#include "reprise/kernels/weight_view.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

// All that an operation is told besides arrays; shared by its primitive and its work.
struct Plan {
  PageLayout layout;
  std::vector<PagedSequence> sequences;
  std::vector<std::vector<std::byte*>> pages;  // of each sequence
  int num_rows = 0;
  // Of attention; none: rows are only stored.
  int heads = 0;
  std::optional<RopeParams> rope;
  internal::HeldNorm query_norm, key_norm;
  float scale = 1.0f;
  float softcap = 0.0f;
  PagedVisibility visibility;
  std::optional<std::size_t> mask, sinks;  // places among the inputs

  int batch() const { return static_cast<int>(sequences.size()); }
};

// Keys (part 0) or values (1), as they are written and as they are read.
cpu::TargetRows target_of(const PageLayout& layout, std::size_t part) {
  const auto offsets = layout.offsets();
  cpu::TargetRows out;
  out.size = part == 0 ? layout.key_size : layout.value_size;
  out.element = *internal::element_of(layout.dtype);
  if (layout.quantization) {
    out.bits = layout.quantization->bits;
    out.group_size = layout.quantization->group_size;
    out.data_at = offsets[3 * part];
    out.scales_at = offsets[3 * part + 1];
    out.biases_at = offsets[3 * part + 2];
  } else {
    out.data_at = offsets[part];
  }
  return out;
}

cpu::StoredRows stored_of(const cpu::TargetRows& target) {
  cpu::StoredRows out;
  out.size = target.size;
  out.bits = target.bits;
  out.group_size = target.group_size;
  out.element = target.element;
  out.data_at = target.data_at;
  out.scales_at = target.scales_at;
  out.biases_at = target.biases_at;
  out.column_stride = target.bits == 0 ? target.size : target.size * target.bits / 32;
  out.head_stride = out.column_stride * kPageRows;
  if (target.bits != 0) out.group_column_stride = target.size / target.group_size;
  out.group_head_stride = out.group_column_stride * kPageRows;
  return out;
}

// One evaluation, all pointers: inputs are computed only by the time it runs.
struct Job {
  std::shared_ptr<const Plan> plan;
  cpu::StoreArgs store;
  cpu::AttentionArgs attention;  // of the first sequence, but for what its length says
  std::optional<internal::FlatArray<float>> sinks;
  std::int32_t* stored = nullptr;
  void* out = nullptr;
  cpu::Element out_element = cpu::Element::f32;

  void run() {
    ThreadPool& pool = ThreadPool::process();
    {
      const ProfileScope scope("rope+store");
      copy_shared_pages(pool);
      store_new_rows(pool);
      *stored = 1;
    }
    if (plan->heads == 0) return;
    const ProfileScope scope("attention");
    attend(pool);
  }

 private:
  void copy_shared_pages(ThreadPool& pool) const {
    std::vector<std::size_t> copies;
    for (std::size_t b = 0; b < plan->sequences.size(); ++b) {
      const PagedSequence& sequence = plan->sequences[b];
      if (sequence.copy_from && sequence.length % kPageRows != 0) copies.push_back(b);
    }
    pool.run(static_cast<int>(copies.size()), [&](int task) {
      const std::size_t b = copies[static_cast<std::size_t>(task)];
      const PagedSequence& sequence = plan->sequences[b];
      const auto page = static_cast<std::size_t>(sequence.length / kPageRows - sequence.first_page);
      internal::copy_page_rows(plan->layout, sequence.copy_from.get(), plan->pages[b][page],
                               sequence.length % kPageRows);
    });
  }

  void store_new_rows(ThreadPool& pool) {
    std::vector<cpu::TargetPages> to;
    std::vector<std::int32_t> positions;
    for (std::size_t b = 0; b < plan->sequences.size(); ++b) {
      const PagedSequence& sequence = plan->sequences[b];
      to.push_back({plan->pages[b], sequence.length - sequence.first_page * kPageRows});
      positions.push_back(sequence.length);
    }
    cpu::RopeView rope;
    if (plan->rope) {
      rope = {plan->rope->dims, plan->rope->traditional, plan->rope->scale, plan->rope->input_scale,
              plan->rope->frequencies->data()};
      store.rope = &rope;
    }
    store.pages = to;
    store.offsets = positions.data();
    cpu::store_rows(store, pool);
  }

  void attend(ThreadPool& pool) {
    if (sinks) attention.sinks = sinks->get();
    std::vector<cpu::AttentionArgs> several(plan->sequences.size(), attention);
    for (std::size_t b = 0; b < several.size(); ++b) {
      const PagedSequence& sequence = plan->sequences[b];
      cpu::AttentionArgs& args = several[b];
      args.position = sequence.first_page * kPageRows;
      args.columns = sequence.length + plan->num_rows - args.position;
      args.keys.pages = args.values.pages = plan->pages[b];
      args.queries.data += static_cast<std::ptrdiff_t>(b) * args.queries.batch_stride;
      args.output.data += static_cast<std::ptrdiff_t>(b) * args.output.batch_stride;
    }
    cpu::attend(several, pool);
    if (out_element == cpu::Element::f32) return;
    const int features = plan->heads * plan->layout.value_size;
    pool.run(plan->batch() * plan->num_rows, [&](int row) {
      const std::ptrdiff_t at = std::ptrdiff_t{row} * features;
      cpu::store_row(attention.output.data + at, out_element, features,
                     static_cast<std::byte*>(out) + at * static_cast<std::ptrdiff_t>(size_of(out_element)));
    });
  }
};

// Inputs: queries, where attention is wanted; keys, values; mask and sinks as there are; what must have run before.
// Outputs: attention's, where it is wanted; `stored`.
class PagedStoreAndAttend final : public mx::Primitive {
 public:
  PagedStoreAndAttend(mx::Stream stream, Plan plan)
      : Primitive(stream), plan_(std::make_shared<const Plan>(std::move(plan))) {}

  const char* name() const override { return "PagedStoreAndAttend"; }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw Error(ErrorCode::unsupported, "[paged_store_and_attend] a CPU operation was evaluated on a GPU");
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const Plan& plan = *plan_;
    const bool attends = plan.heads > 0;
    // MLX would otherwise allocate what a whole chunk of a prompt needs, all layers, before the first of them has run.
    if (inputs[0].nbytes() >= kManyBytes) mx::synchronize(stream());
    for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));

    Job job;
    job.plan = plan_;
    job.stored = outputs.back().data<std::int32_t>();
    cpu::StoreArgs& store = job.store;
    store.batch = plan.batch();
    store.num_rows = plan.num_rows;
    store.heads = plan.heads;
    store.kv_heads = plan.layout.kv_heads;
    store.keys = internal::projected(inputs[attends ? 1 : 0]);
    store.values = internal::projected(inputs[attends ? 2 : 1]);
    store.query_norm = plan.query_norm.view();
    store.key_norm = plan.key_norm.view();
    store.stored_keys = target_of(plan.layout, 0);
    store.stored_values = target_of(plan.layout, 1);
    if (attends) prepare_attention(inputs, outputs[0], job);
    mx::cpu::get_command_encoder(stream()).dispatch([job = std::move(job)]() mutable { job.run(); });
  }

 private:
  void prepare_attention(const std::vector<mx::array>& inputs, mx::array& out, Job& job) {
    const Plan& plan = *plan_;
    const mx::array& queries = inputs[0];
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
    cpu::AttentionArgs& attention = job.attention;
    attention.batch = 1;
    attention.heads = plan.heads;
    attention.kv_heads = plan.layout.kv_heads;
    attention.num_queries = plan.num_rows;
    attention.scale = plan.scale;
    attention.softcap = plan.softcap;
    attention.causal = true;
    attention.window = plan.visibility.window;
    attention.chunk = plan.visibility.chunk;
    attention.keys = stored_of(job.store.stored_keys);
    attention.values = stored_of(job.store.stored_values);
    if (plan.mask) {
      const mx::array& mask = inputs[*plan.mask];
      attention.mask = internal::mask_view(mask);
      const std::ptrdiff_t hidden = std::ptrdiff_t{plan.sequences[0].first_page} * kPageRows;
      attention.mask.data = static_cast<const std::byte*>(attention.mask.data) +
                            hidden * attention.mask.column_stride * static_cast<std::ptrdiff_t>(mask.itemsize());
    }
    if (plan.sinks) job.sinks.emplace(inputs[*plan.sinks]);

    const std::ptrdiff_t tokens = std::ptrdiff_t{plan.batch()} * plan.num_rows * plan.heads;
    if (plan.rope || plan.query_norm.weight || queries.dtype() != mx::float32 || !queries.flags().row_contiguous) {
      job.store.queries = internal::projected(queries);
      job.store.rotated_queries = floats(tokens * plan.layout.key_size);
      attention.queries = rows(static_cast<const float*>(job.store.rotated_queries), plan.layout.key_size);
    } else {
      attention.queries = rows(queries.data<float>(), plan.layout.key_size);
    }
    float* result = out.dtype() == mx::float32 ? out.data<float>() : floats(tokens * plan.layout.value_size);
    attention.output = rows(result, plan.layout.value_size);
    job.out = out.data<char>();
    job.out_element = *internal::element_of(out.dtype());
  }

  // Queries of one operation, beyond which waiting (some microseconds) is nothing beside its work.
  static constexpr std::size_t kManyBytes = std::size_t{128} << 10;

  std::shared_ptr<const Plan> plan_;
};

// A dtype that the kernels read.
mx::array readable(const mx::array& x) { return internal::element_of(x.dtype()) ? x : mx::astype(x, mx::float32); }

// Weights that the kernels cannot read are applied before them.
mx::array normed(const mx::array& x, int size, const RmsNormParams& norm) {
  const mx::array heads = mx::reshape(x, {x.shape(0), x.shape(1), -1, size});
  return mx::reshape(reference::rms_norm(heads, norm), x.shape());
}

mx::Stream stream_of_cpu() { return mx::default_stream(mx::default_device()); }

}  // namespace

PagedResult paged_store_and_attend(const mx::array& queries, const mx::array& keys, const mx::array& values, int heads,
                                   const RopeParams* rope, const PageLayout& layout,
                                   std::vector<PagedSequence> sequences, const PagedAttentionOptions& options,
                                   const std::vector<mx::array>& after) {
  constexpr const char* kFunction = "paged_store_and_attend";
  internal::need_cpu_for_pages(kFunction);
  Plan plan;
  plan.layout = layout;
  plan.num_rows = queries.shape(1);
  plan.heads = heads;
  if (rope) plan.rope = *rope;
  plan.scale = options.scale;
  plan.softcap = options.softcap.value_or(0.0f);
  plan.visibility = options.visibility;
  plan.sequences = std::move(sequences);
  if (plan.batch() != queries.shape(0)) {
    internal::refuse_pages(kFunction, "a batch of " + std::to_string(queries.shape(0)) +
                                          " must be of so many sequences, but got " + std::to_string(plan.batch()));
  }
  if (options.mask && plan.batch() != 1) {
    internal::refuse_pages(kFunction, "a mask is for one sequence, but got " + std::to_string(plan.batch()));
  }
  for (const PagedSequence& sequence : plan.sequences) {
    const int first = plan.visibility.first_visible(sequence.length);
    plan.pages.push_back(internal::pages_of(kFunction, sequence, first, sequence.length + plan.num_rows));
  }

  std::vector<mx::array> inputs = {readable(queries), readable(keys), readable(values)};
  const auto hold = [](const std::optional<RmsNormParams>& norm, int size, mx::array& x, internal::HeldNorm& held) {
    if (auto one = internal::held(norm)) {
      held = *std::move(one);
    } else {
      x = readable(normed(x, size, *norm));
    }
  };
  hold(options.norms.queries, layout.key_size, inputs[0], plan.query_norm);
  hold(options.norms.keys, layout.key_size, inputs[1], plan.key_norm);
  const auto add_input = [&](mx::array x) {
    inputs.push_back(std::move(x));
    return inputs.size() - 1;
  };
  if (options.mask) plan.mask = add_input(options.mask->dtype() == mx::bool_ ? *options.mask : readable(*options.mask));
  if (options.sinks) plan.sinks = add_input(mx::astype(*options.sinks, mx::float32));
  for (mx::array& x : internal::waits_of(after)) inputs.push_back(std::move(x));
  std::vector<mx::array> made = mx::array::make_arrays(
      {{queries.shape(0), queries.shape(1), heads * layout.value_size}, {1}}, {inputs[0].dtype(), mx::int32},
      std::make_shared<PagedStoreAndAttend>(stream_of_cpu(), std::move(plan)), inputs);
  mx::array output = made[0].dtype() == queries.dtype() ? made[0] : mx::astype(made[0], queries.dtype());
  return {std::move(output), std::move(made[1])};
}

mx::array paged_store(const mx::array& keys, const mx::array& values, const PageLayout& layout, PagedSequence sequence,
                      const std::vector<mx::array>& after) {
  constexpr const char* kFunction = "paged_store";
  internal::need_cpu_for_pages(kFunction);
  Plan plan;
  plan.layout = layout;
  plan.num_rows = keys.shape(2);
  plan.sequences.push_back(std::move(sequence));
  const int length = plan.sequences[0].length;
  plan.pages.push_back(internal::pages_of(kFunction, plan.sequences[0], length, length + plan.num_rows));
  std::vector<mx::array> inputs;
  for (const mx::array& x : {keys, values}) {
    inputs.push_back(readable(mx::flatten(mx::swapaxes(x, 1, 2), 2, 3)));
  }
  for (mx::array& x : internal::waits_of(after)) inputs.push_back(std::move(x));
  return mx::array({1}, mx::int32, std::make_shared<PagedStoreAndAttend>(stream_of_cpu(), std::move(plan)),
                   std::move(inputs));
}

}  // namespace reprise::kernels
