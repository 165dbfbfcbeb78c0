#include "tests/cache/cache_rows.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>

#include "mlx/ops.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

mx::array numbered(const std::vector<int>& tokens, const RowShape& shape, int size, float sign) {
  const auto count = static_cast<int>(tokens.size());
  std::vector<float> data;
  for (int b = 0; b < shape.batch; ++b) {
    for (int h = 0; h < shape.heads; ++h) {
      for (int token : tokens) {
        data.insert(data.end(), static_cast<std::size_t>(size),
                    sign * (static_cast<float>(token) + 0.25f * static_cast<float>(h)));
      }
    }
  }
  return mx::astype(mx::array(data.begin(), mx::Shape{shape.batch, shape.heads, count, size}, mx::float32),
                    shape.dtype);
}

}  // namespace

Rows rows(const std::vector<int>& tokens, const RowShape& shape) {
  return {numbered(tokens, shape, shape.key_size, 1.0f), numbered(tokens, shape, shape.value_size, -1.0f)};
}

std::vector<int> range(int first, int last) {
  std::vector<int> tokens(static_cast<std::size_t>(last - first));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<int> tokens_of(const mx::array& keys) {
  mx::array dense = mx::contiguous(mx::astype(keys, mx::float32));
  dense.eval();
  const int batch = dense.shape(0), heads = dense.shape(1), count = dense.shape(2), size = dense.shape(3);
  std::vector<int> tokens(static_cast<std::size_t>(count));
  const float* data = dense.size() > 0 ? dense.data<float>() : nullptr;
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < count; ++t) {
        for (int d = 0; d < size; ++d) {
          const float token = std::abs(data[((b * heads + h) * count + t) * size + d]) - 0.25f * static_cast<float>(h);
          if (b == 0 && h == 0 && d == 0) tokens[static_cast<std::size_t>(t)] = static_cast<int>(std::lround(token));
          EXPECT_EQ(token, static_cast<float>(tokens[static_cast<std::size_t>(t)]));
        }
      }
    }
  }
  return tokens;
}

std::vector<int> tokens_of(const KeysValues& keys_values) {
  const auto& dense = std::get<DenseKV>(keys_values);
  const std::vector<int> tokens = tokens_of(dense.keys);
  EXPECT_EQ(tokens_of(dense.values), tokens);
  return tokens;
}

KeysValues append(AttentionCache& cache, const std::vector<int>& tokens, const RowShape& shape) {
  const Rows added = rows(tokens, shape);
  return cache.update_and_fetch(added.keys, added.values);
}

void append(PromptCache& cache, const std::vector<int>& tokens, const RowShape& shape) {
  for (std::size_t layer = 0; layer < cache.size(); ++layer) append(cache.at<AttentionCache>(layer), tokens, shape);
}

bool identical(const mx::array& a, const mx::array& b) {
  if (a.dtype() != b.dtype() || a.shape() != b.shape()) return false;
  mx::array left = mx::contiguous(a), right = mx::contiguous(b);
  left.eval();
  right.eval();
  return left.nbytes() == 0 || std::memcmp(left.data<char>(), right.data<char>(), left.nbytes()) == 0;
}

bool identical(const State& a, const State& b) {
  if (a.value().index() != b.value().index()) return false;
  if (const auto* list = a.as_list()) {
    const State::List& other = *b.as_list();
    if (list->size() != other.size()) return false;
    for (std::size_t i = 0; i < other.size(); ++i) {
      if (!identical((*list)[i], other[i])) return false;
    }
    return true;
  }
  if (a.as_array()) return identical(*a.as_array(), *b.as_array());
  if (a.as_int()) return *a.as_int() == *b.as_int();
  if (a.as_bool()) return *a.as_bool() == *b.as_bool();
  if (a.as_string()) return *a.as_string() == *b.as_string();
  return a.is_null();
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "reprise_cache_test.XXXXXX").string();
  if (!::mkdtemp(pattern.data())) throw std::runtime_error("cannot create " + pattern);
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TemporaryFolder::names() const {
  std::vector<std::string> result;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) result.push_back(entry.path().filename());
  std::sort(result.begin(), result.end());
  return result;
}

std::string read_bytes(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream bytes;
  bytes << stream.rdbuf();
  return bytes.str();
}

void write_bytes(const std::string& file, const std::string& bytes) {
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace reprise::cache_test
