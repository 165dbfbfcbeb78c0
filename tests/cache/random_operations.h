// One random history of caches of a class: update, trim, mask, fork, reload, save and load, quantise, merge, extend,
// filter, extract, padded prompts, against plain lists of tokens.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/layer_cache.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/token_model.h"

namespace reprise::cache_test {

struct Family {
  const char* name;
  std::unique_ptr<LayerCache> (*make)();
  std::vector<CacheRules> parts;  // one, or one for each child of a CacheList
  bool batches = true;
};

// A cache under test and what its rows must be, part by part (outer) and batch row by batch row (inner).
struct Subject {
  std::unique_ptr<LayerCache> cache;
  bool is_batch = false;
  std::vector<std::vector<TokenModel>> parts;

  int num_rows() const { return static_cast<int>(parts.front().size()); }
};

template <typename Row>
std::vector<Row> chosen(const std::vector<Row>& all, const std::vector<int>& rows) {
  std::vector<Row> out;
  for (const int row : rows) out.push_back(all[static_cast<std::size_t>(row)]);
  return out;
}

// What a cache does otherwise than the lists say fails the test.
class RandomOperations {
 public:
  // `family` must outlive the object.
  RandomOperations(const Family& family, unsigned seed) : family_(family), random_(seed) { add_new(); }

  void step();
  void check_all();

 private:
  // An array handed out, and what it held then.
  struct Remembered {
    mlx::core::array array;
    mlx::core::array copy;
  };

  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  void add(Subject subject);
  void add_new();
  std::vector<int> new_tokens(int count);
  std::optional<int> random_window(const Subject& subject);
  // One update of all rows with these tokens (a row may have fewer than `width`: filler follows).
  void append(Subject& subject, const std::vector<std::vector<int>>& tokens, int width, std::optional<int> window,
              bool as_chunk);
  void update(Subject& subject, int width);
  void trim(Subject& subject);
  void reload(Subject& subject);
  void save_and_load(Subject& subject);
  void quantize(Subject& subject);
  void check_all(Subject& subject);
  // What must be refused leaves the cache as it was: the following operations show whether it did.
  void refuse(Subject& subject);
  void batch_operation(Subject& subject, int choice);
  // What a single cache holds, read back as it is.
  void check_retained(Subject& single);
  void merge();
  void extend(Subject& subject);
  void filter(Subject& subject);
  // A right-padded prompt in chunks, with something between them now and then.
  void padded_prompt(Subject& subject);
  // In the middle of one, of which `fed` columns have come. Returns: how many of them are to come again.
  int trim_prompt(Subject& subject, const std::vector<std::vector<int>>& prompts, int fed);
  // Arrays handed out are values: they are looked at again later.
  void remember(const KeysValues& seen);
  void recall();

  const Family& family_;
  std::mt19937 random_;
  std::vector<Subject> subjects_;
  std::vector<Remembered> remembered_;
  int next_token_ = 1;
  TemporaryFolder folder_;
};

}  // namespace reprise::cache_test
