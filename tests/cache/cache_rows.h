// Keys and values whose rows carry token numbers, so that a test can read back which tokens a cache shows.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/nn/keys_values.h"

namespace reprise::cache_test {

struct RowShape {
  int batch = 1;
  int heads = 2;
  int key_size = 4;
  int value_size = 4;
  mlx::core::Dtype dtype = mlx::core::float32;
};

struct Rows {
  mlx::core::array keys;
  mlx::core::array values;
};

// Row i carries tokens[i]: in the keys as token + 0.25 · head (exact in every floating dtype up to 256), in the values
// as its negative.
Rows rows(const std::vector<int>& tokens, const RowShape& shape = {});

// first, first + 1, …, last - 1.
std::vector<int> range(int first, int last);

// The tokens that `keys_values` shows. Fails the test when keys and values, heads or batch rows disagree.
std::vector<int> tokens_of(const KeysValues& keys_values);
std::vector<int> tokens_of(const mlx::core::array& keys);

// Appends rows of these tokens to a cache.
KeysValues append(AttentionCache& cache, const std::vector<int>& tokens, const RowShape& shape = {});
void append(PromptCache& cache, const std::vector<int>& tokens, const RowShape& shape = {});

// Equal dtype, shape and bytes.
bool identical(const mlx::core::array& a, const mlx::core::array& b);
bool identical(const State& a, const State& b);

// A folder of this test's own that goes away with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  // Names of the files in it, sorted.
  std::vector<std::string> names() const;

 private:
  std::filesystem::path path_;
};

std::string read_bytes(const std::string& file);
void write_bytes(const std::string& file, const std::string& bytes);

// "code: message" of the Error that `call` throws; "nothing" when it throws none.
template <typename Call>
std::string error_of(const Call& call);

}  // namespace reprise::cache_test

#include "reprise/base/error.h"

template <typename Call>
std::string reprise::cache_test::error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(to_string(error.code())) + ": " + error.what();
  }
  return "nothing";
}
