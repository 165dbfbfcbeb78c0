#include "reprise/cache/paged_kv_cache.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <utility>

#include "mlx/ops.h"
#include "reprise/base/error.h"
#include "reprise/cache/paged_checks.h"
#include "reprise/nn/masks.h"

namespace reprise {

namespace mx = mlx::core;

using kernels::kPageRows;
using kernels::PageLayout;

using internal::fail_paged;
using internal::text_of;

namespace {

[[noreturn]] void fail_state(const char* function) {
  fail_paged(std::string("PagedKVCache::") + function, "files hold the class that plain() gives", "pages",
             ErrorCode::unsupported);
}

int pages_for(int rows) { return rows / kPageRows + (rows % kPageRows > 0 ? 1 : 0); }

std::string rows_text(int begin, int end) { return "rows " + std::to_string(begin) + " to " + std::to_string(end); }

}  // namespace

std::size_t PageSpan::nbytes() const { return pages.size() * layout.nbytes(); }

PagedKVCache::PagedKVCache(std::shared_ptr<PagePool> pool, kernels::PagedVisibility visibility,
                           std::optional<KVQuantization> quantization)
    : pool_(std::move(pool)), visibility_(visibility), quantization_(quantization) {
  if (pool_ == nullptr) fail_paged("PagedKVCache", "a pool is needed", "null");
  if (visibility_.window < 0 || visibility_.chunk < 0) {
    fail_paged("PagedKVCache", "window and chunk must not be negative",
               std::to_string(visibility_.window) + " and " + std::to_string(visibility_.chunk));
  }
  if (quantization_) internal::check_quantization("PagedKVCache", *quantization_);
}

std::size_t PagedKVCache::nbytes() const { return layout_ ? pages_.size() * layout_->nbytes() : 0; }

void PagedKVCache::drop_unseen() {
  const int unseen = visibility_.first_visible(offset_) / kPageRows - first_page_;
  if (unseen <= 0) return;
  pages_.erase(pages_.begin(), pages_.begin() + unseen);
  first_page_ += unseen;
}

PagedKVCache::Mark PagedKVCache::mark() const {
  return {.length = offset_, .last_page = pages_.empty() ? nullptr : pages_.back(), .stored = stored_};
}

void PagedKVCache::go_back(const Mark& mark) {
  offset_ = mark.length;
  pages_.resize(static_cast<std::size_t>(pages_for(offset_) - first_page_));
  if (!pages_.empty()) pages_.back() = mark.last_page;
  stored_ = mark.stored;
}

PageSpan PagedKVCache::span(int begin, int end) const {
  if (!layout_ || begin % kPageRows != 0 || begin < first_row() || begin >= end || end > offset_) {
    fail_paged("PagedKVCache::span",
               "rows must be there (" + rows_text(first_row(), offset_) + ") and begin with a page of " +
                   std::to_string(kPageRows),
               rows_text(begin, end));
  }
  const auto at = [&](int page) { return pages_.begin() + (page - first_page_); };
  return {*layout_, begin, end, std::vector<PageRef>(at(begin / kPageRows), at(pages_for(end)))};
}

void PagedKVCache::adopt(const std::vector<PageSpan>& spans, int length) {
  const std::string function = "PagedKVCache::adopt";
  if (layout_) fail_paged(function, "an empty cache is needed", std::to_string(offset_) + " rows");
  if (spans.empty() || length < 1 || spans.back().end < length) {
    fail_paged(function, "spans must reach the " + std::to_string(length) + " rows, at least one",
               spans.empty() ? "none" : std::to_string(spans.back().end));
  }
  std::vector<PageRef> pages;
  int end = spans.front().begin;
  if (end > visibility_.first_visible(length) || end >= length) {
    fail_paged(function, "the rows from " + std::to_string(visibility_.first_visible(length)) + " on are needed",
               "those from " + std::to_string(end) + " on");
  }
  for (const PageSpan& span : spans) {
    layout_for(function, span.layout);
    if (span.layout != spans.front().layout) {
      fail_paged(function, "spans must be stored alike: " + text_of(spans.front().layout), text_of(span.layout));
    }
    if (span.begin != end || span.begin < 0 || span.begin % kPageRows != 0 || span.end <= span.begin ||
        static_cast<int>(span.pages.size()) != pages_for(span.end) - span.begin / kPageRows) {
      fail_paged(function, "spans must be whole and follow each other, next from row " + std::to_string(end) + " on",
                 rows_text(span.begin, span.end) + " in " + std::to_string(span.pages.size()) + " pages");
    }
    for (const PageRef& page : span.pages) {
      const int at = spans.front().begin + static_cast<int>(pages.size()) * kPageRows;
      const int rows = std::min({kPageRows, length - at, span.end - at});
      if (rows <= 0) break;  // of later tokens
      if (page == nullptr || page->nbytes() != span.layout.nbytes() || page->claimed() < rows) {
        fail_paged(
            function, "pages must be of this layout and hold their rows",
            page == nullptr ? "null" : std::to_string(page->claimed()) + " of " + std::to_string(rows) + " rows");
      }
      pages.push_back(page);
    }
    end = span.end;
  }
  pages_ = std::move(pages);
  layout_ = spans.front().layout;
  first_page_ = spans.front().begin / kPageRows;
  offset_ = length;
}

int PagedKVCache::max_trim() const {
  if (first_page_ == 0) return offset_;
  // The shortest history whose next query sees nothing that is gone.
  const std::int64_t first = first_row();
  std::optional<std::int64_t> shortest;
  if (visibility_.window > 0) shortest = first + visibility_.window - 1;
  if (const std::int64_t chunk = visibility_.chunk; chunk > 0) {
    const std::int64_t next_chunk = (first + chunk - 1) / chunk * chunk;
    shortest = std::min(shortest.value_or(next_chunk), next_chunk);
  }
  return static_cast<int>(std::max<std::int64_t>(0, offset_ - shortest.value_or(offset_)));
}

int PagedKVCache::trim(int n) {
  if (n < 0) fail_paged("PagedKVCache::trim", "n must not be negative", std::to_string(n));
  const int trimmed = std::min(n, max_trim());
  offset_ -= trimmed;
  pages_.resize(static_cast<std::size_t>(pages_for(offset_) - first_page_));
  return trimmed;
}

State PagedKVCache::state() const { fail_state("state"); }
State PagedKVCache::saved_state() const { fail_state("saved_state"); }
State PagedKVCache::legacy_state() const { fail_state("legacy_state"); }
Meta PagedKVCache::legacy_meta() const { fail_state("legacy_meta"); }

void PagedKVCache::collect_arrays(std::vector<mx::array>& out) const {
  if (stored_) out.push_back(*stored_);
}

void PagedKVCache::check() const {
  const auto check_that = [](bool holds, const char* what, int got) {
    if (!holds) fail_paged("PagedKVCache::check", what, std::to_string(got), ErrorCode::failed_precondition);
  };
  const auto count = static_cast<int>(pages_.size());
  check_that(offset_ >= 0 && first_page_ >= 0, "offset and first page must not be negative", offset_);
  check_that(layout_ || offset_ == 0, "an empty cache must be at position 0", offset_);
  check_that(count == pages_for(offset_) - first_page_, "pages must be those of its rows", count);
  check_that(first_row() <= visibility_.first_visible(offset_), "what is visible must be there", first_row());
  for (int i = 0; i < count; ++i) {
    const PageRef& page = pages_[static_cast<std::size_t>(i)];
    const int rows = std::min(kPageRows, offset_ - first_row() - i * kPageRows);
    check_that(page != nullptr && page->nbytes() == layout_->nbytes(), "pages must be of its layout", i);
    check_that(page->claimed() >= rows, "a page must have its rows", page->claimed());
  }
}

std::unique_ptr<LayerCache> PagedKVCache::fork() const { return std::make_unique<PagedKVCache>(*this); }

void PagedKVCache::restore(LayerCache&& earlier) { *this = std::move(dynamic_cast<PagedKVCache&>(earlier)); }

internal::KVColumns PagedKVCache::columns(int begin, int end) const {
  if (begin == end) {
    std::vector<mx::array> none;
    const auto dtypes = layout_->dtypes();
    for (std::size_t i = 0; i < dtypes.size(); ++i) {
      mx::Shape shape = layout_->shapes()[i];
      shape[2] = 0;
      none.push_back(mx::zeros(shape, dtypes[i]));
    }
    return internal::KVColumns(std::move(none), quantization_);
  }
  kernels::PagedSequence sequence;
  for (const PageRef& page : pages_) sequence.pages.push_back(memory_of(page));
  sequence.first_page = first_page_;
  sequence.length = offset_;
  std::vector<mx::array> after;
  if (stored_) after.push_back(*stored_);
  return internal::KVColumns(kernels::paged_rows(*layout_, sequence, begin, end, after), quantization_);
}

KeysValues PagedKVCache::keys_and_values() const {
  if (empty()) {
    fail_paged("PagedKVCache::keys_and_values", "a filled cache is needed", "an empty one",
               ErrorCode::failed_precondition);
  }
  return columns(first_row(), offset_).keys_values();
}

KeysValues PagedKVCache::update_and_fetch(const mx::array& keys, const mx::array& values) {
  const std::string function = "PagedKVCache::update_and_fetch";
  internal::check_device_of_pages(function);
  const auto rows = internal::KVColumns::encode(function, keys, values, std::nullopt);
  if (keys.dtype() != values.dtype() || (layout_ && keys.dtype() != layout_->dtype)) {
    std::ostringstream got;
    got << keys.dtype() << " and " << values.dtype();
    fail_paged(function,
               "keys and values must be of one dtype" + (layout_ ? ", that of the stored " + text_of(*layout_) : ""),
               got.str());
  }
  if (rows.batch_size() != 1) fail_paged(function, "one sequence is needed", std::to_string(rows.batch_size()));
  const PageLayout layout =
      layout_for(function, {keys.shape(1), keys.shape(3), values.shape(3), keys.dtype(), quantization_});
  if (rows.width() == 0) {
    if (empty()) fail_paged(function, "an empty cache needs at least one column", "none");
    return keys_and_values();
  }
  internal::check_countable(function, offset_, rows.width());
  std::vector<mx::array> after;
  add_pending(after);
  Append append = begin_append(layout, rows.width());
  const mx::array stored = kernels::paged_store(keys, values, layout, append.sequence, after);
  commit(std::move(append), layout, stored);
  return keys_and_values();
}

Mask PagedKVCache::make_mask(int N, const MaskOptions& options) const {
  const std::string function = "PagedKVCache::make_mask";
  if (N < 1) fail_paged(function, "N must be at least 1", std::to_string(N));
  if (options.window && *options.window < 1) {
    fail_paged(function, "window must be at least 1", std::to_string(*options.window));
  }
  std::optional<int> window = options.window;
  if (const int own = visibility_.window; own > 0) window = std::min(window.value_or(own), own);
  if (!options.return_array && window.value_or(0) == visibility_.window) {
    return N == 1 ? Mask(NoMask{}) : Mask(Causal{});
  }
  const mx::array mask = create_causal_mask(N, length(), {.window = window});
  if (visibility_.chunk == 0) return mask;
  return mx::logical_and(mask, create_same_chunk_mask(N, length() + N, first_row(), visibility_.chunk));
}

Mask PagedKVCache::make_chunk_mask(int N, int chunk_size) const {
  return chunk_size == visibility_.chunk ? make_mask(N) : AttentionCache::make_chunk_mask(N, chunk_size);
}

}  // namespace reprise
