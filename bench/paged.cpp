#include "bench/paged.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/random.h"
#include "reprise/kernels/paged_attention.h"

namespace reprise::bench {

namespace {

namespace mx = mlx::core;
using namespace reprise;

mx::array random_numbers(const mx::Shape& shape, mx::Dtype dtype = mx::float32) {
  auto x = mx::astype(mx::random::uniform(mx::array(-1.0f), mx::array(1.0f), shape, mx::float32), dtype);
  x.eval();
  return x;
}

kernels::PageLayout layout_of(const Shapes& shapes, const std::string& kind) {
  kernels::PageLayout layout{shapes.kv_heads, shapes.head_dim, shapes.head_dim, mx::float16, {}};
  if (kind == "f32") layout.dtype = mx::float32;
  if (kind == "8 bits") layout.quantization = KVQuantization{64, 8};
  if (kind == "4 bits") layout.quantization = KVQuantization{64, 4};
  return layout;
}

kernels::PageMemory page_of(const kernels::PageLayout& layout) {
  const std::align_val_t alignment{64};
  auto* memory = static_cast<std::byte*>(::operator new(layout.nbytes(), alignment));
  return {memory, [alignment](std::byte* data) { ::operator delete(data, alignment); }};
}

struct Step {
  mx::array queries, keys, values;
  kernels::RopeParams rope;
};

Step random_step(const Shapes& shapes, int batch, int rows) {
  auto frequencies = std::make_shared<std::vector<float>>(static_cast<std::size_t>(shapes.head_dim / 2), 0.01f);
  const int kv_features = shapes.kv_heads * shapes.head_dim;
  return {random_numbers({batch, rows, shapes.heads * shapes.head_dim}),
          random_numbers({batch, rows, kv_features}),
          random_numbers({batch, rows, kv_features}),
          {shapes.head_dim, false, 1.0f, 1.0f, std::move(frequencies)}};
}

// Keys and values of all sequences: what they are changes nothing.
struct Rows {
  mx::array keys, values;
  Rows part(int columns) const {
    const auto cut = [&](const mx::array& x) {
      return mx::slice(x, mx::Shape(4, 0), {1, x.shape(1), columns, x.shape(3)});
    };
    return {cut(keys), cut(values)};
  }
};

int pages_of(int columns) { return (columns + kernels::kPageRows - 1) / kernels::kPageRows; }

kernels::PagedSequence paged_sequence(const kernels::PageLayout& layout, const Rows& rows, int length, int more) {
  kernels::PagedSequence out;
  for (int i = 0; i < pages_of(length + more); ++i) out.pages.push_back(page_of(layout));
  const Rows stored = rows.part(length);
  kernels::paged_store(stored.keys, stored.values, layout, out, {}).eval();
  out.length = length;
  return out;
}

std::vector<mx::array> buffers(const kernels::PageLayout& layout, const Rows& rows, int length, int more) {
  const Rows stored = rows.part(pages_of(length + more) * kernels::kPageRows);
  std::vector<mx::array> out;
  for (const auto& x : {stored.keys, stored.values}) {
    if (!layout.quantization) {
      out.push_back(mx::add(x, mx::array(0.0f, x.dtype())));
      continue;
    }
    for (auto& tensor : mx::quantize(x, layout.quantization->group_size, layout.quantization->bits)) {
      out.push_back(std::move(tensor));
    }
  }
  mx::eval(out);
  for (auto& x : out) x.detach();
  return out;
}

// `lengths`: of the sequences of one batch; several are held against the same one by one.
void measure_batch(Runner& runner, const Shapes& shapes, const std::string& kind, const std::vector<int>& lengths,
                   int num_rows, const std::string& text) {
  const auto layout = layout_of(shapes, kind);
  double seen = 0.0, columns = 0.0;
  for (const int length : lengths) {
    columns += length + num_rows;
    seen += (length + (num_rows + 1) / 2.0) * num_rows;
  }
  const double bytes = columns * static_cast<double>(layout.nbytes()) / kernels::kPageRows;
  const double operations = 4.0 * shapes.heads * seen * shapes.head_dim;
  const std::string what = text + ", " + kind;
  const bool is_batch = lengths.size() > 1;
  std::vector<Case> cases;
  cases.push_back({name_of(is_batch ? "one by one" : "buffer", shapes, what), bytes, operations, {}});
  cases.push_back({name_of("pages", shapes, what), bytes, operations, {}});
  std::erase_if(cases, [&](const Case& one) { return !runner.wants(one.name); });
  if (cases.empty()) return;

  const int longest = *std::max_element(lengths.begin(), lengths.end()) + num_rows + kernels::kPageRows;
  const mx::Shape shape{1, layout.kv_heads, longest, layout.key_size};
  const Rows rows{random_numbers(shape, layout.dtype), random_numbers(shape, layout.dtype)};
  const auto step = random_step(shapes, static_cast<int>(lengths.size()), num_rows);
  const auto alone = random_step(shapes, 1, num_rows);
  const auto pages = [&](const Step& inputs, std::vector<kernels::PagedSequence> sequences) {
    return [=, &shapes, sequences = std::move(sequences)] {
      return kernels::paged_store_and_attend(inputs.queries, inputs.keys, inputs.values, shapes.heads, &inputs.rope,
                                             layout, sequences, {.scale = 0.125f}, {})
          .output;
    };
  };
  const std::size_t number = num_rows > 1 ? 1 : copies(bytes);
  for (Case& one : cases) {
    for (std::size_t i = 0; i < number; ++i) {
      if (!is_batch && one.name.find("buffer") != std::string::npos) {
        auto tensors = std::make_shared<std::vector<mx::array>>(buffers(layout, rows, lengths[0], num_rows));
        one.run.emplace_back([=, &shapes, at = lengths[0]] {
          kernels::StoreTarget target{std::exchange(*tensors, {}), layout.quantization, at, at + num_rows, 0, {}};
          auto result = kernels::store_and_attend(step.queries, step.keys, step.values, shapes.heads, &step.rope, at,
                                                  std::move(target), {.scale = 0.125f, .mask = Causal{}});
          *tensors = std::move(result.tensors);
          return std::vector{result.output};
        });
        continue;
      }
      std::vector<kernels::PagedSequence> sequences;
      for (const int length : lengths) sequences.push_back(paged_sequence(layout, rows, length, num_rows));
      if (one.name.find("pages") != std::string::npos) {
        one.run.emplace_back([run = pages(step, std::move(sequences))] { return std::vector{run()}; });
        continue;
      }
      std::vector<std::function<mx::array()>> each;
      for (auto& sequence : sequences) each.emplace_back(pages(alone, {std::move(sequence)}));
      one.run.emplace_back([each = std::move(each)] {
        std::vector<mx::array> outputs;
        for (const auto& run : each) outputs.push_back(run());
        return outputs;
      });
    }
  }
  runner.measure(cases);
}

}  // namespace

void measure_paged_attention(Runner& runner, const Shapes& shapes) {
  for (const char* kind : {"f16", "f32", "8 bits", "4 bits"}) {
    for (const int length : {128, 1500, 8192}) {
      measure_batch(runner, shapes, kind, {length}, 1, "1 row over " + std::to_string(length));
    }
    measure_batch(runner, shapes, kind, std::vector<int>(7, 128), 1, "7 rows over 128");
    measure_batch(runner, shapes, kind, {8192, 128, 128, 128, 128, 128, 128, 128}, 1, "8192 and 7 of 128");
    for (const int length : {0, 4096}) {
      measure_batch(runner, shapes, kind, {length}, 256, "256 rows at " + std::to_string(length));
    }
  }
}

}  // namespace reprise::bench
