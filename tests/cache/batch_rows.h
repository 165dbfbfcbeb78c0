// Batches whose rows carry tokens of their own (see cache_rows.h), and what a batch cache must show of them.
#pragma once

#include <vector>

#include "reprise/cache/batch_growing_cache.h"
#include "tests/cache/cache_rows.h"

namespace reprise::cache_test {

using TokenRows = std::vector<std::vector<int>>;

// What stands in padding columns: a token that no test gives to a row.
inline constexpr int kFiller = 4999;

// Keys and values of a batch, one list of tokens a row, all of one length. No rows: `columns` columns of none.
Rows batch_rows(const TokenRows& tokens, const RowShape& shape = {}, int columns = 1);
KeysValues append_batch(AttentionCache& cache, const TokenRows& tokens, const RowShape& shape = {});

// The rows after (before) filler, up to the longest.
TokenRows left_padded(const TokenRows& tokens);
TokenRows right_padded(const TokenRows& tokens);
// Columns that padding the rows adds to each.
std::vector<int> paddings(const TokenRows& tokens);

// Dense keys and values of one row from column `begin` on, dequantised where need be.
DenseKV row_of(const KeysValues& keys_values, int row, int begin = 0);

// Every way of reading the cache agrees with the rows' real tokens.
void expect_holds(const internal::BatchGrowingCache& cache, const TokenRows& tokens);

// make_mask(N) against the rule, column by column.
void expect_mask(const internal::BatchGrowingCache& cache, int N, std::optional<int> window);

}  // namespace reprise::cache_test
