// Rows of a rotating batch beside the same sequences alone: what each may see, token by token.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reprise/cache/batch_ring_cache.h"
#include "reprise/cache/ring_cache.h"
#include "tests/cache/batch_rows.h"

namespace reprise::cache_test {

// One head: columns of zeros, and filler, are told from tokens.
inline constexpr RowShape kRingShape{.heads = 1};
inline constexpr RowShape kQuantizedRingShape{.heads = 1, .key_size = 32, .value_size = 64};

// The first token that tests give to rows: no padding looks like one.
inline constexpr int kFirstToken = 5000;

// Of each of N queries, the tokens that row `row` sees, sorted; zeros and filler too.
TokenRows seen(const KeysValues& keys_values, const Mask& mask, int N, int row);

// The columns of a row as tokens, in storage order.
std::vector<int> columns_of(const KeysValues& keys_values, int row);

// What `cache` holds in temporal order: kept tokens, then the latest ones.
std::vector<int> retained(const internal::RingCache& cache);

// A batch and each of its rows alone. A row without tokens is given none alone.
struct RingPair {
  std::unique_ptr<internal::BatchRingCache> batch;
  std::vector<std::unique_ptr<internal::RingCache>> solos;

  RingPair fork() const;
};

std::unique_ptr<internal::BatchRingCache> as_ring_batch(std::unique_ptr<LayerCache> cache);
std::unique_ptr<internal::RingCache> as_ring(std::unique_ptr<LayerCache> cache);

// The batch that `solos` merge to, and they.
RingPair merged(std::vector<std::unique_ptr<internal::RingCache>> solos);

// One update of both, `columns` wide: tokens[b] behind left[b] columns of filler, filler after them. Every real query
// must see in the batch what it sees alone.
void update_and_compare(RingPair& pair, const TokenRows& tokens, int columns, std::optional<int> window = {},
                        const RowShape& shape = kRingShape, const std::vector<int>& left = {});

// Tokens begin … end - 1 of row `row`, whose first is kFirstToken + 1000 · row.
std::vector<int> of_row(int row, int begin, int end);

// RotatingKVCaches, each after updates of these lengths.
std::vector<std::unique_ptr<internal::RingCache>> ring_singles(int max_size, int keep,
                                                               const std::vector<std::vector<int>>& lengths);
// A BatchRotatingKVCache after its first update.
RingPair left_padded_pair(int max_size, const std::vector<int>& padding, int columns, int keep = 0);

// update_and_compare with the next counts[b] tokens of each row; with one of each row, `steps` times.
void go_on(RingPair& pair, const std::vector<int>& counts, int columns);
void decode(RingPair& pair, int steps);

// "invalid_argument" of what error_of gives.
std::string code_of(const std::string& error);

// Each row taken out has the offset and, but for tokens that no later one can see, the content of the row alone.
void expect_extracts(const RingPair& pair);

}  // namespace reprise::cache_test
