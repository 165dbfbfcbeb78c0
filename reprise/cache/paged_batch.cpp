#include "reprise/cache/paged_batch.h"

#include <algorithm>
#include <set>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/fused_attention.h"
#include "reprise/cache/paged_checks.h"
#include "reprise/cache/row_numbers.h"

namespace reprise {

namespace mx = mlx::core;

using internal::fail_paged;

namespace {

[[noreturn]] void fail_rows(const char* function, const std::string& what, const std::string& got) {
  fail_paged(std::string("PagedBatch::") + function, what, got, ErrorCode::unsupported);
}

constexpr const char* kSaveRows = "each row must be saved by itself";
constexpr const char* kNoBlock = "a row by itself is needed, since rows of a batch lie apart";

}  // namespace

PagedBatch::PagedBatch(std::vector<PagedKVCache*> rows) : rows_(std::move(rows)) {
  if (rows_.empty()) fail_paged("PagedBatch", "at least one row is needed", "none");
  std::set<const PagedKVCache*> seen;
  for (const PagedKVCache* row : rows_) {
    if (row == nullptr) fail_paged("PagedBatch", "rows are needed", "null");
    if (!seen.insert(row).second) fail_paged("PagedBatch", "rows must be different caches", "one twice");
    if (row->visibility() != rows_.front()->visibility()) {
      const auto text = [](const kernels::PagedVisibility& visibility) {
        return "window " + std::to_string(visibility.window) + " and chunk " + std::to_string(visibility.chunk);
      };
      fail_paged("PagedBatch", "rows must see alike, " + text(rows_.front()->visibility()), text(row->visibility()));
    }
    if (row->quantization() != rows_.front()->quantization()) {
      const auto text = [](const std::optional<KVQuantization>& quantization) {
        return quantization ? std::to_string(quantization->bits) + " bits by groups of " +
                                  std::to_string(quantization->group_size)
                            : "none";
      };
      fail_paged("PagedBatch", "rows must be quantised alike, " + text(rows_.front()->quantization()),
                 text(row->quantization()));
    }
  }
}

std::vector<int> PagedBatch::positions() const {
  std::vector<int> positions;
  for (const PagedKVCache* row : rows_) positions.push_back(row->offset_);
  return positions;
}

int PagedBatch::length() const {
  int longest = 0;
  for (const PagedKVCache* row : rows_) longest = std::max(longest, row->length());
  return longest;
}

bool PagedBatch::empty() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const PagedKVCache* row) { return row->empty(); });
}

std::size_t PagedBatch::nbytes() const {
  std::size_t bytes = 0;
  for (const PagedKVCache* row : rows_) bytes += row->nbytes();
  return bytes;
}

int PagedBatch::max_trim() const {
  int most = rows_.front()->max_trim();
  for (const PagedKVCache* row : rows_) most = std::min(most, row->max_trim());
  return most;
}

int PagedBatch::trim(int n) {
  if (n < 0) fail_paged("PagedBatch::trim", "n must not be negative", std::to_string(n));
  const int trimmed = std::min(n, max_trim());
  for (PagedKVCache* row : rows_) row->trim(trimmed);
  return trimmed;
}

bool PagedBatch::keeps_all_rows() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const PagedKVCache* row) { return row->keeps_all_rows(); });
}

bool PagedBatch::serves_chunks(int chunk_size) const { return rows_.front()->visibility().chunk == chunk_size; }

State PagedBatch::state() const { fail_rows("state", kSaveRows, "a batch"); }
State PagedBatch::saved_state() const { fail_rows("saved_state", kSaveRows, "a batch"); }
State PagedBatch::legacy_state() const { fail_rows("legacy_state", kSaveRows, "a batch"); }
Meta PagedBatch::legacy_meta() const { fail_rows("legacy_meta", kSaveRows, "a batch"); }

void PagedBatch::collect_arrays(std::vector<mx::array>& out) const {
  for (const PagedKVCache* row : rows_) row->collect_arrays(out);
}

void PagedBatch::check() const {
  for (const PagedKVCache* row : rows_) row->check();
}

std::unique_ptr<LayerCache> PagedBatch::fork() const {
  std::vector<std::unique_ptr<PagedKVCache>> owned;
  std::vector<PagedKVCache*> rows;
  for (const PagedKVCache* row : rows_) rows.push_back(owned.emplace_back(std::make_unique<PagedKVCache>(*row)).get());
  auto batch = std::make_unique<PagedBatch>(std::move(rows));
  batch->owned_ = std::move(owned);
  return batch;
}

void PagedBatch::restore(LayerCache&& earlier) {
  auto& batch = dynamic_cast<PagedBatch&>(earlier);
  for (std::size_t b = 0; b < rows_.size(); ++b) *rows_[b] = std::move(*batch.rows_[b]);
}

Offset PagedBatch::offset() const { return internal::int_array(positions()); }

KeysValues PagedBatch::update_and_fetch(const mx::array&, const mx::array&) {
  fail_rows("update_and_fetch", kNoBlock, std::to_string(rows_.size()) + " rows");
}

KeysValues PagedBatch::keys_and_values() const {
  fail_rows("keys_and_values", kNoBlock, std::to_string(rows_.size()) + " rows");
}

Mask PagedBatch::make_mask(int N, const MaskOptions& options) const {
  const Mask mask = rows_.front()->make_mask(N, options);
  if (std::holds_alternative<mx::array>(mask)) {
    fail_rows("make_mask", "a batch sees what its rows see by themselves", "another window, or a mask as an array");
  }
  return mask;
}

Mask PagedBatch::make_chunk_mask(int N, int chunk_size) const {
  if (!serves_chunks(chunk_size)) {
    fail_rows("make_chunk_mask", "a batch sees what its rows see by themselves", "chunks of another size");
  }
  return make_mask(N);
}

mx::array PagedBatch::attend(const mx::array& queries, const mx::array& keys, const mx::array& values,
                             const AttentionOptions& options) {
  return internal::attend_by_projections(*this, queries, keys, values, options);
}

mx::array PagedBatch::attend_projections(const Projections& projections, const AttentionOptions& options) {
  if (std::holds_alternative<mx::array>(options.mask)) {
    fail_rows("attend_projections", "a batch sees what its rows see by themselves", "a mask");
  }
  return PagedKVCache::attend_rows("PagedBatch::attend_projections", rows_, projections, options);
}

}  // namespace reprise
