#include "tests/cache/sample_rows.h"

#include <vector>

#include "mlx/ops.h"
#include "reprise/cache/layer_cache.h"

namespace reprise::cache_test {

namespace mx = mlx::core;

namespace {

mx::array sample(int layer, int begin, int end, int size, int sign, mx::Dtype dtype) {
  std::vector<float> data;
  for (int head = 0; head < kSampleHeads; ++head) {
    for (int row = begin; row < end; ++row) {
      for (int feature = 0; feature < size; ++feature) {
        data.push_back(static_cast<float>(sign * ((31 * layer + 7 * row + 3 * head + feature) % 251)) / 8.0f);
      }
    }
  }
  return mx::astype(mx::array(data.begin(), mx::Shape{1, kSampleHeads, end - begin, size}, mx::float32), dtype);
}

}  // namespace

SampleRows sample_rows(int layer, int begin, int end, mx::Dtype dtype) {
  return {sample(layer, begin, end, kSampleKeySize, 1, dtype), sample(layer, begin, end, kSampleValueSize, -1, dtype)};
}

std::vector<SampleRows> append_sample(PromptCache& cache, int count, mx::Dtype dtype) {
  std::vector<SampleRows> shown;
  for (std::size_t layer = 0; layer < cache.size(); ++layer) {
    auto& attention = cache.at<AttentionCache>(layer);
    const int at = attention.position().value_or(0);
    const SampleRows rows = sample_rows(static_cast<int>(layer), at, at + count, dtype);
    const auto all = std::get<DenseKV>(attention.update_and_fetch(rows.keys, rows.values));
    shown.push_back({all.keys, all.values});
  }
  return shown;
}

}  // namespace reprise::cache_test
