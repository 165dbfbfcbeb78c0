#include "tests/cache/token_model.h"

#include <algorithm>

namespace reprise::cache_test {

namespace {

std::vector<int> last(const std::vector<int>& tokens, int count) {
  const auto size = static_cast<int>(tokens.size());
  return std::vector<int>(tokens.begin() + std::max(0, size - count), tokens.end());
}

}  // namespace

// The kept tokens and the most recent others, `count` in all.
std::vector<int> TokenModel::seen_before(int count) const {
  const auto size = static_cast<int>(history_.size());
  if (size <= count) return history_;
  std::vector<int> seen(history_.begin(), history_.begin() + std::min(rules_.keep, count));
  const std::vector<int> recent = last(history_, count - static_cast<int>(seen.size()));
  seen.insert(seen.end(), recent.begin(), recent.end());
  return seen;
}

std::vector<std::vector<int>> TokenModel::append(const std::vector<int>& tokens, std::optional<int> window,
                                                 bool as_chunk) {
  std::vector<std::vector<int>> seen;
  const bool is_ring = rules_.kind == CacheKind::ring;
  if (is_ring && tokens.size() == 1 && !as_chunk) {
    history_.push_back(tokens.front());
    std::vector<int> all = seen_before(rules_.max_size);
    seen.push_back(window ? last(all, *window) : all);
    return seen;
  }
  // Inside a chunk the window counts columns: the sinks are columns like others.
  std::vector<int> columns =
      is_ring ? seen_before(rules_.max_size - 1) : std::vector<int>(history_.begin() + start_, history_.end());
  const std::optional<int> width = is_ring ? std::optional(window.value_or(rules_.max_size)) : window;
  for (const int token : tokens) {
    columns.push_back(token);
    history_.push_back(token);
    seen.push_back(width ? last(columns, *width) : columns);
  }
  return seen;
}

bool TokenModel::is_trimmable() const { return rules_.kind != CacheKind::ring || offset() < rules_.max_size; }

int TokenModel::max_trim() const {
  if (rules_.kind == CacheKind::ring) return is_trimmable() ? offset() : 0;
  if (rules_.kind == CacheKind::full || start_ == 0) return offset();
  int largest = 0;
  for (int n = 0; n <= offset() - start_; ++n) {
    if (start_ <= (offset() - n) / rules_.chunk_size * rules_.chunk_size) largest = n;
  }
  return largest;
}

int TokenModel::length() const {
  return rules_.kind == CacheKind::ring ? std::min(offset(), rules_.max_size) : offset() - start_;
}

int TokenModel::trim(int n) {
  if (!is_trimmable()) return 0;
  const int trimmed = std::min(n, offset() - start_);
  forget(trimmed);
  return trimmed;
}

void TokenModel::forget(int n) { history_.resize(history_.size() - static_cast<std::size_t>(std::min(n, offset()))); }

void TokenModel::trim_front() { start_ = std::max(start_, offset() - rules_.chunk_size); }

std::vector<int> TokenModel::retained() const {
  if (rules_.kind == CacheKind::ring) return seen_before(rules_.max_size - 1);
  return std::vector<int>(history_.begin() + start_, history_.end());
}

}  // namespace reprise::cache_test
