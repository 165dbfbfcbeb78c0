// How paged caches take new rows and attend: one sequence, or several by one operation.
#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/fused_attention.h"
#include "reprise/cache/paged_checks.h"
#include "reprise/cache/paged_kv_cache.h"
#include "reprise/cache/row_numbers.h"

namespace reprise {

namespace mx = mlx::core;

using kernels::kPageRows;
using kernels::PageLayout;

namespace internal {

void fail_paged(const std::string& function, const std::string& what, const std::string& got, ErrorCode code) {
  throw Error(code, "[" + function + "] " + what + ", but got " + got);
}

void check_device_of_pages(const std::string& function) {
  if (mx::default_device() == mx::Device::cpu) return;
  fail_paged(function, "pages are for the CPU", "a GPU", ErrorCode::unsupported);
}

std::string text_of(const PageLayout& layout) {
  std::ostringstream out;
  out << layout.dtype << " keys of " << layout.kv_heads << " x " << layout.key_size << " and values of "
      << layout.kv_heads << " x " << layout.value_size;
  if (const auto& quantization = layout.quantization) {
    out << " in " << quantization->bits << " bits by groups of " << quantization->group_size;
  }
  return out.str();
}

}  // namespace internal

using internal::fail_paged;
using internal::text_of;

namespace {

// As internal::PendingUpdates counts them.
constexpr int kMaxUnevaluatedUpdates = 64;

bool is_stored_dtype(mx::Dtype dtype) { return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16; }

mx::Dtype dtype_of_first_rows(const std::string& function, const Projections& rows, const AttentionOptions& options) {
  if (options.stored_dtype) return *options.stored_dtype;
  if (rows.keys.dtype() == rows.values.dtype()) return rows.keys.dtype();
  std::ostringstream got;
  got << rows.keys.dtype() << " and " << rows.values.dtype();
  fail_paged(function, "keys and values must be of one dtype", got.str());
}

}  // namespace

PageLayout PagedKVCache::layout_for(const std::string& function, const PageLayout& rows) const {
  if (rows.quantization != quantization_) {
    fail_paged(function, quantization_ ? "rows must be quantised as the cache's are" : "rows must be dense",
               text_of(rows));
  }
  if (layout_) {
    const bool fits = rows.kv_heads == layout_->kv_heads && rows.key_size == layout_->key_size &&
                      rows.value_size == layout_->value_size;
    if (!fits) fail_paged(function, "rows must agree with the stored " + text_of(*layout_), text_of(rows));
    return *layout_;
  }
  if (!is_stored_dtype(rows.dtype)) fail_paged(function, "rows must be float32, float16 or bfloat16", text_of(rows));
  if (rows.kv_heads < 1 || rows.key_size < 1 || rows.value_size < 1) {
    fail_paged(function, "keys and values must have features", text_of(rows));
  }
  if (quantization_ &&
      (rows.key_size % quantization_->group_size != 0 || rows.value_size % quantization_->group_size != 0)) {
    fail_paged(function, "head sizes must be multiples of the group size", text_of(rows));
  }
  return rows;
}

void PagedKVCache::add_pending(std::vector<mx::array>& after) {
  if (stored_ && stored_->is_available()) stored_.reset();
  unevaluated_ = stored_ && stored_->status() == mx::array::Status::unscheduled ? unevaluated_ + 1 : 0;
  if (unevaluated_ > kMaxUnevaluatedUpdates) {
    stored_->eval();
    stored_.reset();
    unevaluated_ = 0;
  }
  if (!stored_) return;
  const auto is_there = [&](const mx::array& other) { return other.id() == stored_->id(); };
  if (std::none_of(after.begin(), after.end(), is_there)) after.push_back(*stored_);
}

PagedKVCache::Append PagedKVCache::begin_append(const PageLayout& layout, int rows) {
  Append append;
  append.rows = rows;
  kernels::PagedSequence& sequence = append.sequence;
  const int end = offset_ + rows;
  const int used = offset_ % kPageRows;
  const auto add_page = [&](int filled) {
    append.pages.push_back(pool_->allocate(layout.nbytes()));
    append.pages.back()->claim(0, filled);
  };
  int next = offset_;  // position of the first row that no page is there for
  if (used > 0) {
    const int filled = std::min(kPageRows, used + rows);
    if (!pages_.back()->claim(used, filled)) {
      sequence.copy_from = memory_of(pages_.back());
      append.replaces_last = true;
      add_page(filled);
    }
    next += kPageRows - used;
  }
  for (; next < end; next += kPageRows) add_page(std::min(kPageRows, end - next));

  sequence.first_page = std::max(first_page_, visibility_.first_visible(offset_) / kPageRows);
  sequence.length = offset_;
  const auto kept = pages_.end() - (append.replaces_last ? 1 : 0);
  for (auto page = pages_.begin() + (sequence.first_page - first_page_); page < kept; ++page) {
    sequence.pages.push_back(memory_of(*page));
  }
  for (const PageRef& page : append.pages) sequence.pages.push_back(memory_of(page));
  // So that commit cannot fail.
  if (const std::size_t count = pages_.size() + append.pages.size(); count > pages_.capacity()) {
    pages_.reserve(std::max(count, 2 * pages_.capacity()));
  }
  return append;
}

void PagedKVCache::commit(Append append, const PageLayout& layout, const mx::array& stored) noexcept {
  if (append.replaces_last) pages_.pop_back();
  for (PageRef& page : append.pages) pages_.push_back(std::move(page));
  layout_ = layout;
  offset_ += append.rows;
  stored_ = stored;
}

std::optional<mx::array> PagedKVCache::whole_mask(const Mask& mask, int rows) const {
  const auto* visible = std::get_if<mx::array>(&mask);
  if (visible == nullptr) return std::nullopt;
  const int heads = visible->ndim() >= 3 ? visible->shape(-3) : 1;
  const mx::array whole = mx::broadcast_to(*visible, {1, heads, rows, length() + rows});
  if (first_page_ == 0) return whole;
  // What is gone is hidden by what the cache sees.
  return mx::pad(whole, std::vector<int>{3}, {first_row()}, {0}, mx::zeros({}, whole.dtype()));
}

mx::array PagedKVCache::attend_rows(const std::string& function, const std::vector<PagedKVCache*>& rows,
                                    const Projections& projections, const AttentionOptions& options) {
  internal::check_device_of_pages(function);
  PagedKVCache& first = *rows.front();
  if (!internal::FusedStep::takes(projections, std::nullopt)) {
    std::ostringstream got;
    got << projections.queries.dtype() << " " << projections.queries.shape() << ", " << projections.keys.dtype() << " "
        << projections.keys.shape() << ", " << projections.values.dtype() << " " << projections.values.shape();
    fail_paged(function, "projections must be [B, L, features] of float32, float16 or bfloat16", got.str());
  }
  const internal::FusedStep step(function, projections, options, std::nullopt, first.quantization_);
  if (step.batch_size() != static_cast<int>(rows.size())) {
    fail_paged(function, "projections must have " + std::to_string(rows.size()) + " rows",
               std::to_string(step.batch_size()));
  }
  const int count = step.width();
  if (count > 1 && std::holds_alternative<NoMask>(options.mask)) {
    fail_paged(function, "several tokens need a mask", "none");
  }
  // An empty row takes the layout of those that are filled.
  const auto filled = std::find_if(rows.begin(), rows.end(), [](const PagedKVCache* row) { return !row->empty(); });
  const mx::Dtype dtype =
      filled != rows.end() ? (*filled)->layout_->dtype : dtype_of_first_rows(function, projections, options);
  const PageLayout layout = first.layout_for(
      function, {projections.kv_heads, step.key_size(), step.value_size(), dtype, first.quantization_});
  for (const PagedKVCache* row : rows) {
    internal::check_countable(function, row->offset_, count);
    if (row->layout_ && *row->layout_ != layout) {
      fail_paged(function, "rows must be stored alike: " + text_of(layout), text_of(*row->layout_));
    }
  }
  step.check_scores(first.length() + count);

  std::vector<mx::array> after;
  std::vector<int> offsets;
  for (PagedKVCache* row : rows) {
    row->add_pending(after);
    offsets.push_back(row->offset_);
  }
  const internal::StepInputs in =
      step.inputs(rows.size() == 1 ? Offset(offsets.front()) : Offset(internal::int_array(offsets)));
  const kernels::PagedAttentionOptions attention{.scale = options.scale,
                                                 .visibility = first.visibility_,
                                                 .mask = first.whole_mask(options.mask, count),
                                                 .sinks = options.sinks,
                                                 .softcap = options.softcap,
                                                 .norms = in.norms};
  std::vector<Append> appends;
  std::vector<kernels::PagedSequence> sequences;
  for (PagedKVCache* row : rows) {
    appends.push_back(row->begin_append(layout, count));
    sequences.push_back(std::move(appends.back().sequence));
  }
  kernels::PagedResult result =
      kernels::paged_store_and_attend(in.queries, in.keys, projections.values, projections.heads, in.rope, layout,
                                      std::move(sequences), attention, after);
  for (std::size_t b = 0; b < rows.size(); ++b) rows[b]->commit(std::move(appends[b]), layout, result.stored);
  return std::move(result.output);
}

mx::array PagedKVCache::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                               const AttentionOptions& options) {
  return internal::attend_by_projections(*this, queries, keys, values, options);
}

mx::array PagedKVCache::attend_projections(const Projections& projections, const AttentionOptions& options) {
  return attend_rows("PagedKVCache::attend_projections", {this}, projections, options);
}

}  // namespace reprise
