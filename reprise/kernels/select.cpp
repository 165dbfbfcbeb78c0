#include "reprise/kernels/select.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "reprise/base/error.h"
#include "reprise/base/profile.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/cpu_target.h"
#include "reprise/kernels/draw_cpu.h"
#include "reprise/kernels/logits_cpu.h"

namespace reprise::kernels {

namespace mx = mlx::core;

namespace {

bool on_cpu() {
  if (mx::default_device() != mx::Device::cpu) return false;
  cpu_target();  // chosen before the first kernel runs
  return true;
}

void check_shape(const mx::array& logits, const char* function) {
  if (logits.ndim() >= 1 && logits.shape(-1) > 0) return;
  std::string shape;
  for (const auto n : logits.shape()) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
  throw Error(ErrorCode::invalid_argument,
              std::string("[") + function + "] logits must be [..., V] with V > 0, but got [" + shape + "]");
}

// Rows of floats, whatever the strides of the array that holds them.
class Rows {
 public:
  explicit Rows(const mx::array& array)
      : n_(array.shape(-1)),
        count_(static_cast<int>(array.size() / static_cast<std::size_t>(n_))),
        data_(array.data<float>()) {
    if (array.flags().row_contiguous) return;
    shape_ = array.shape();
    strides_ = array.strides();
  }

  int n() const { return n_; }
  int count() const { return count_; }

  // Requires: called once, before row(). Not in the constructor, since the array is then not yet computed.
  void gather() {
    if (strides_.empty()) return;
    gathered_ = std::make_shared<std::vector<float>>();
    gathered_->reserve(static_cast<std::size_t>(n_) * static_cast<std::size_t>(count_));
    for (int row = 0; row < count_; ++row) {
      std::int64_t offset = 0;
      std::int64_t rest = row;
      for (std::size_t axis = shape_.size() - 1; axis-- > 0;) {
        offset += rest % shape_[axis] * strides_[axis];
        rest /= shape_[axis];
      }
      for (int i = 0; i < n_; ++i) gathered_->push_back(data_[offset + i * strides_.back()]);
    }
    data_ = gathered_->data();
  }

  const float* row(int b) const { return data_ + static_cast<std::ptrdiff_t>(b) * n_; }

 private:
  int n_;
  int count_;
  const float* data_;
  mx::Shape shape_;
  mx::Strides strides_;  // empty: rows lie end to end
  std::shared_ptr<std::vector<float>> gathered_;
};

// Summaries of all rows, made in pieces by the pool's threads.
std::vector<cpu::RowSummary> summarize(const Rows& rows) {
  const int n = rows.n();
  const int num_pieces = (n + cpu::kPieceLength - 1) / cpu::kPieceLength;
  std::vector<cpu::PieceSummary> pieces(static_cast<std::size_t>(rows.count()) * static_cast<std::size_t>(num_pieces));
  ThreadPool::process().run(rows.count() * num_pieces, [&](int task) {
    const int begin = task % num_pieces * cpu::kPieceLength;
    pieces[static_cast<std::size_t>(task)] =
        cpu::summarize_piece(rows.row(task / num_pieces) + begin, std::min(cpu::kPieceLength, n - begin));
  });
  std::vector<cpu::RowSummary> summaries;
  for (int b = 0; b < rows.count(); ++b) {
    summaries.push_back(cpu::join(pieces.data() + static_cast<std::ptrdiff_t>(b) * num_pieces, num_pieces));
  }
  return summaries;
}

struct Draw {
  DrawParams params;
  std::vector<float> uniforms;
  std::vector<bool> xtc_rows;
};

int draw_token(const Rows& rows, int b, const cpu::RowSummary& summary, const Draw& draw) {
  const DrawParams& params = draw.params;
  const cpu::DrawSettings settings{.temperature = params.temperature,
                                   .top_p = params.top_p,
                                   .min_p = params.min_p,
                                   .min_tokens_to_keep = params.min_tokens_to_keep,
                                   .top_k = params.top_k,
                                   .xtc_threshold = params.xtc_threshold,
                                   .special_tokens = params.xtc_special_tokens.data(),
                                   .num_special_tokens = static_cast<int>(params.xtc_special_tokens.size())};
  const auto row = static_cast<std::size_t>(b);
  const bool xtc = !draw.xtc_rows.empty() && draw.xtc_rows[row];
  return cpu::draw_token(rows.row(b), rows.n(), summary, settings, draw.uniforms[row], xtc);
}

[[noreturn]] void refuse_gpu(const char* function) {
  throw Error(ErrorCode::internal, std::string("[") + function + "] must run on a CPU, but got a GPU's stream");
}

// argmax, or a draw from each row.
class SelectToken : public mx::Primitive {
 public:
  SelectToken(mx::Stream stream, std::shared_ptr<const Draw> draw) : Primitive(stream), draw_(std::move(draw)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& output : outputs) output.set_data(mx::allocator::malloc(output.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch([rows = Rows(inputs[0]), tokens = outputs[0].data<std::int32_t>(),
                                                     logprobs = outputs[1].data<float>(), draw = draw_]() mutable {
      const ProfileScope scope("select");
      rows.gather();
      const auto summaries = summarize(rows);
      ThreadPool::process().run(draw ? rows.count() : 0, [&](int b) {
        tokens[b] = draw_token(rows, b, summaries[static_cast<std::size_t>(b)], *draw);
      });
      for (int b = 0; b < rows.count(); ++b) {
        const cpu::RowSummary& summary = summaries[static_cast<std::size_t>(b)];
        if (!draw) tokens[b] = summary.argmax;
        logprobs[b] = rows.row(b)[tokens[b]] - summary.log_sum;
      }
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override { refuse_gpu("kernels::draw"); }
  const char* name() const override { return "SelectToken"; }

 private:
  std::shared_ptr<const Draw> draw_;
};

class LogSoftmax : public mx::UnaryPrimitive {
 public:
  using UnaryPrimitive::UnaryPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override {
    output.set_data(mx::allocator::malloc(output.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch([rows = Rows(inputs[0]), out = output.data<float>()]() mutable {
      const ProfileScope scope("log_softmax");
      rows.gather();
      const auto summaries = summarize(rows);
      ThreadPool::process().run(rows.count(), [&](int b) {
        cpu::subtract(rows.row(b), rows.n(), summaries[static_cast<std::size_t>(b)].log_sum,
                      out + static_cast<std::ptrdiff_t>(b) * rows.n());
      });
    });
  }
  void eval_gpu(const std::vector<mx::array>&, mx::array&) override { refuse_gpu("kernels::log_softmax"); }
  const char* name() const override { return "LogSoftmax"; }
};

mx::Stream cpu_stream() { return mx::default_stream(mx::default_device()); }

Selection select(const mx::array& logits, std::shared_ptr<const Draw> draw) {
  const mx::Shape shape = {static_cast<int>(logits.size() / static_cast<std::size_t>(logits.shape(-1)))};
  auto outputs = mx::array::make_arrays({shape, shape}, {mx::int32, mx::float32},
                                        std::make_shared<SelectToken>(cpu_stream(), std::move(draw)),
                                        {mx::astype(logits, mx::float32)});
  return {std::move(outputs[0]), std::move(outputs[1])};
}

}  // namespace

bool can_draw() { return on_cpu(); }

Selection likeliest(const mx::array& logits) {
  check_shape(logits, "kernels::likeliest");
  if (on_cpu()) return select(logits, nullptr);
  const auto logprobs = log_softmax(mx::reshape(logits, {-1, logits.shape(-1)}));
  const auto tokens = mx::astype(mx::argmax(logprobs, -1), mx::int32);
  return {tokens, mx::reshape(mx::take_along_axis(logprobs, mx::reshape(tokens, {-1, 1}), -1), {-1})};
}

mx::array log_softmax(const mx::array& logits) {
  check_shape(logits, "kernels::log_softmax");
  const auto x = mx::astype(logits, mx::float32);
  if (on_cpu()) return mx::array(x.shape(), mx::float32, std::make_shared<LogSoftmax>(cpu_stream()), {x});
  return mx::subtract(x, mx::logsumexp(x, -1, /*keepdims=*/true));
}

Selection draw(const mx::array& logits, const DrawParams& params, std::vector<float> uniforms,
               std::vector<bool> xtc_rows) {
  check_shape(logits, "kernels::draw");
  auto draw = std::make_shared<Draw>(Draw{params, std::move(uniforms), std::move(xtc_rows)});
  std::sort(draw->params.xtc_special_tokens.begin(), draw->params.xtc_special_tokens.end());
  return select(logits, std::move(draw));
}

}  // namespace reprise::kernels
