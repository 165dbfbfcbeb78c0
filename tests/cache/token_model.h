// Attention caches as plain lists of tokens: what each query must see, written from the rules alone (no buffers, no
// columns). The random tests compare real caches with it.
#pragma once

#include <optional>
#include <vector>

namespace reprise::cache_test {

enum class CacheKind { full, ring, chunked };

struct CacheRules {
  CacheKind kind = CacheKind::full;
  int max_size = 0;    // ring
  int keep = 0;        // ring
  int chunk_size = 0;  // chunked
};

// One sequence's history in one cache.
class TokenModel {
 public:
  explicit TokenModel(CacheRules rules) : rules_(rules) {}

  // The tokens that each new one sees, itself included, in order of position, when they come in one update.
  // `window`: as asked of make_mask. `as_chunk`: one token of a batch's longer chunk.
  std::vector<std::vector<int>> append(const std::vector<int>& tokens, std::optional<int> window,
                                       bool as_chunk = false);

  // Tokens a trim(n) of a single cache must report, and forget.
  int trim(int n);
  // Forgets the last min(n, length) tokens: a row of a batch.
  void forget(int n);
  // Chunked: drops what the next forward must not see.
  void trim_front();

  bool is_trimmable() const;
  int max_trim() const;
  int offset() const { return static_cast<int>(history_.size()); }
  int start() const { return start_; }
  // Rows that attention can see.
  int length() const;
  // Tokens that the cache must hold: what the next one sees besides itself.
  std::vector<int> retained() const;

 private:
  std::vector<int> seen_before(int count) const;

  CacheRules rules_;
  std::vector<int> history_;
  int start_ = 0;  // chunked: tokens dropped at the front
};

}  // namespace reprise::cache_test
