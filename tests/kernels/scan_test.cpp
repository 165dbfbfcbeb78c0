// Scans against a plain loop in double precision: the kernels on every instruction set, and the reference.
#include "reprise/kernels/scan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "reprise/base/error.h"
#include "reprise/base/thread_pool.h"
#include "reprise/kernels/reference.h"
#include "tests/kernels/each_target.h"

namespace reprise::kernels {
namespace {

namespace mx = mlx::core;

struct Case {
  int B, L, heads, P, groups, N;  // a selective scan: P = groups = 1
  bool selective = false;
  bool gate = false;
  bool state = false;
  bool mask = false;
  bool bias = true;
  float low = 0.0f;
  float high = std::numeric_limits<float>::infinity();

  std::string text() const {
    std::string out = selective ? "selective" : "heads";
    for (const int n : {B, L, heads, P, groups, N}) out += " " + std::to_string(n);
    return out + (gate ? " gate" : "") + (state ? " state" : "") + (mask ? " mask" : "") + (bias ? " bias" : "");
  }
};

mx::array normal(const mx::Shape& shape, std::uint64_t seed, float scale = 1.0f) {
  auto x = mx::multiply(mx::random::normal(shape, mx::float32, mx::random::key(seed)), mx::array(scale));
  x.eval();
  return x;
}

mx::array mask_of(int B, int L) {
  std::vector<bool> real;
  for (int i = 0; i < B * L; ++i) real.push_back((i * 7 + i / 5) % 3 != 0);
  auto mask = mx::zeros({B, L}, mx::bool_);
  std::vector<std::uint8_t> bytes(real.begin(), real.end());
  mask = mx::astype(mx::array(bytes.begin(), {B, L}, mx::uint8), mx::bool_);
  mask.eval();
  return mask;
}

struct Arrays {
  ScanInputs inputs;
  mx::array a;
  mx::array d;
  StepSizes steps;
};

Arrays arrays_of(const Case& one) {
  const int C = one.heads * one.P;
  Arrays arrays{{.x = normal({one.B, one.L, C}, 1),
                 .delta = normal({one.B, one.L, one.heads}, 2),
                 .b = normal({one.B, one.L, one.groups * one.N}, 3),
                 .c = normal({one.B, one.L, one.groups * one.N}, 4)},
                mx::negative(mx::abs(normal(one.selective ? mx::Shape{one.heads, one.N} : mx::Shape{one.heads}, 5))),
                normal({one.heads}, 6),
                {.low = one.low, .high = one.high}};
  if (one.bias) arrays.steps.bias = normal({one.heads}, 7);
  if (one.gate) arrays.inputs.gate = normal({one.B, one.L, C}, 8, 3.0f);
  if (one.mask) arrays.inputs.mask = mask_of(one.B, one.L);
  if (one.state) {
    arrays.inputs.state =
        normal(one.selective ? mx::Shape{one.B, C, one.N} : mx::Shape{one.B, one.heads, one.P, one.N}, 9);
  }
  arrays.a.eval();
  return arrays;
}

ScanResult scan(const Case& one, const ScanInputs& inputs, const Arrays& arrays) {
  if (one.selective) {
    return selective_scan(inputs,
                          std::make_shared<const SelectiveScan>(SelectiveScan{arrays.a, arrays.d, arrays.steps}));
  }
  return head_scan(inputs, std::make_shared<const HeadScan>(HeadScan{arrays.a, arrays.d, one.groups, arrays.steps}));
}

std::vector<float> floats(const mx::array& array) {
  auto x = mx::contiguous(mx::astype(array, mx::float32));
  x.eval();
  return {x.data<float>(), x.data<float>() + x.size()};
}

struct Expected {
  std::vector<double> y;
  std::vector<double> state;
  std::vector<bool> real;  // of y's columns
};

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

Expected loop(const Case& one, const Arrays& arrays) {
  const auto C = static_cast<std::size_t>(one.heads * one.P);
  const auto N = static_cast<std::size_t>(one.N);
  const auto P = static_cast<std::size_t>(one.P);
  const auto L = static_cast<std::size_t>(one.L);
  const auto B = static_cast<std::size_t>(one.B);
  const auto maps = static_cast<std::size_t>(one.groups) * N;
  const std::size_t heads = C / P;
  const auto x = floats(arrays.inputs.x), delta = floats(arrays.inputs.delta), b = floats(arrays.inputs.b),
             c = floats(arrays.inputs.c), a = floats(arrays.a), d = floats(arrays.d);
  const auto bias = arrays.steps.bias ? floats(*arrays.steps.bias) : std::vector<float>(heads, 0.0f);
  const auto gate = arrays.inputs.gate ? floats(*arrays.inputs.gate) : std::vector<float>();
  const auto mask = arrays.inputs.mask ? floats(*arrays.inputs.mask) : std::vector<float>(B * L, 1.0f);
  Expected out;
  out.y.assign(B * L * C, 0.0);
  out.state.assign(B * C * N, 0.0);
  if (arrays.inputs.state) {
    const auto state = floats(*arrays.inputs.state);
    out.state.assign(state.begin(), state.end());
  }
  for (const float m : mask) out.real.push_back(m != 0.0f);
  for (std::size_t row = 0; row < B; ++row) {
    for (std::size_t t = 0; t < L; ++t) {
      const std::size_t cell = row * L + t;
      if (!out.real[cell]) continue;
      for (std::size_t channel = 0; channel < C; ++channel) {
        const std::size_t head = channel / P;
        const std::size_t group = head / (heads / static_cast<std::size_t>(one.groups));
        const double raw = softplus(static_cast<double>(delta[cell * heads + head]) + static_cast<double>(bias[head]));
        const double step = std::clamp(raw, static_cast<double>(one.low), static_cast<double>(one.high));
        const double in = static_cast<double>(x[cell * C + channel]);
        double sum = static_cast<double>(d[head]) * in;
        for (std::size_t n = 0; n < N; ++n) {
          double& h = out.state[(row * C + channel) * N + n];
          const double rate = static_cast<double>(one.selective ? a[head * N + n] : a[head]);
          const std::size_t map = cell * maps + group * N + n;
          h = std::exp(step * rate) * h + step * in * static_cast<double>(b[map]);
          sum += static_cast<double>(c[map]) * h;
        }
        if (!gate.empty()) {
          const double g = static_cast<double>(gate[cell * C + channel]);
          sum *= g / (1.0 + std::exp(-g));
        }
        out.y[cell * C + channel] = sum;
      }
    }
  }
  return out;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0.0;
  double error = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    const double distance = std::abs(static_cast<double>(got[i]) - want[i]);
    error = distance <= error ? error : distance;  // a NaN is an error
  }
  EXPECT_LE(error, 3e-6 * largest) << what;
}

struct Sample {
  Case one;
  Arrays arrays;
  Expected want;
};

void expect_loop(const Sample& sample) {
  const auto& [one, arrays, want] = sample;
  SCOPED_TRACE(one.text());
  const ScanResult got = scan(one, arrays.inputs, arrays);
  std::vector<float> y = floats(got.y);
  const std::size_t C = y.size() / want.real.size();
  for (std::size_t i = 0; i < y.size(); ++i) {
    ASSERT_TRUE(std::isfinite(y[i]));
    if (!want.real[i / C]) y[i] = 0.0f;  // means nothing
  }
  expect_near(y, want.y, "y");
  expect_near(floats(got.state), want.state, "state");
  EXPECT_EQ(got.state.dtype(), mx::float32);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  int i = 0;
  for (const int N : {1, 3, 8, 16, 20, 128}) {
    for (const int channels : {1, 7, 16, 33}) {
      for (const int L : {1, 5, 70}) {
        if (L == 70 && N > 20) continue;
        ++i;
        all.push_back({.B = 1 + i % 2,
                       .L = L,
                       .heads = channels,
                       .P = 1,
                       .groups = 1,
                       .N = N,
                       .selective = true,
                       .gate = i % 3 == 0,
                       .state = i % 2 == 0,
                       .mask = i % 5 < 2,
                       .bias = i % 4 != 0});
      }
    }
  }
  for (const int N : {1, 10, 16, 128}) {
    for (const int P : {1, 3, 12, 16, 21, 64}) {
      for (const int L : {1, 3, 65, 150}) {
        if (L > 65 && N * P > 1000) continue;
        ++i;
        const int groups = 1 + i % 3;
        all.push_back({.B = 1 + i % 2,
                       .L = L,
                       .heads = groups * (1 + i % 2),
                       .P = P,
                       .groups = groups,
                       .N = N,
                       .gate = i % 3 == 0,
                       .state = i % 2 == 0,
                       .mask = i % 5 < 2,
                       .bias = i % 4 != 0,
                       .low = i % 7 == 0 ? 0.3f : 0.0f,
                       .high = i % 11 == 0 ? 0.9f : std::numeric_limits<float>::infinity()});
      }
    }
  }
  return all;
}

const std::vector<Sample>& samples() {
  static const std::vector<Sample> all = [] {
    std::vector<Sample> made;
    for (const Case& one : cases()) {
      Arrays arrays = arrays_of(one);
      Expected want = loop(one, arrays);
      made.push_back({one, std::move(arrays), std::move(want)});
    }
    return made;
  }();
  return all;
}

TEST(Scan, KernelsEqualALoopOnEveryTarget) {
  on_each_target([] {
    for (const Sample& sample : samples()) expect_loop(sample);
  });
}

TEST(Scan, TheReferenceEqualsALoop) {
  const reference::Scope scope;
  for (const Sample& sample : samples()) expect_loop(sample);
}

mx::array columns(const mx::array& x, int first, int last) {
  mx::Shape start(x.ndim(), 0);
  mx::Shape stop = x.shape();
  start[1] = first;
  stop[1] = last;
  return mx::slice(x, start, stop);
}

const Case kSelectiveCase = {
    .B = 2, .L = 150, .heads = 21, .P = 1, .groups = 1, .N = 12, .selective = true, .gate = true, .mask = true};
const Case kHeadCase = {.B = 2, .L = 150, .heads = 4, .P = 20, .groups = 2, .N = 12, .gate = true, .mask = true};

TEST(Scan, ChunksGiveBitForBitWhatOneCallGives) {
  for (const Case& one : {kSelectiveCase, kHeadCase}) {
    const Arrays arrays = arrays_of(one);
    const ScanResult whole = scan(one, arrays.inputs, arrays);
    ScanInputs inputs = arrays.inputs;
    std::vector<mx::array> ys;
    int at = 0;
    for (const int length : {1, 66, 3, 80}) {
      const auto part = [&](const mx::array& x) { return columns(x, at, at + length); };
      ScanInputs chunk{part(inputs.x), part(inputs.delta), part(inputs.b), part(inputs.c)};
      chunk.gate = part(*inputs.gate);
      chunk.mask = part(*inputs.mask);
      chunk.state = inputs.state;
      const ScanResult result = scan(one, chunk, arrays);
      ys.push_back(result.y);
      inputs.state = result.state;
      at += length;
    }
    EXPECT_EQ(floats(mx::concatenate(ys, 1)), floats(whole.y));
    EXPECT_EQ(floats(*inputs.state), floats(whole.state));
  }
}

TEST(Scan, ResultsDoNotDependOnTheNumberOfThreads) {
  const int before = ThreadPool::process().threads();
  for (const Case& one : {kSelectiveCase, kHeadCase}) {
    const Arrays arrays = arrays_of(one);
    std::vector<std::vector<float>> results;
    for (const int threads : {1, 3}) {
      ThreadPool::set_process_threads(threads);
      const ScanResult result = scan(one, arrays.inputs, arrays);
      results.push_back(floats(result.y));
      results.push_back(floats(result.state));
    }
    EXPECT_EQ(results[0], results[2]);
    EXPECT_EQ(results[1], results[3]);
  }
  ThreadPool::set_process_threads(before);
}

// Rows that are parts of wider ones, features that are not beside each other, and narrow floats.
TEST(Scan, TakesAnyLayoutAndDtype) {
  for (const Case& one : {kSelectiveCase, kHeadCase}) {
    Arrays arrays = arrays_of(one);
    const auto want = floats(scan(one, arrays.inputs, arrays).y);
    const auto in_wider = [](const mx::array& x) {
      const mx::array wide = mx::concatenate({x, mx::ones_like(x), x}, 2);
      return mx::slice(wide, {0, 0, 2 * x.shape(2)}, wide.shape());
    };
    const auto turned = [](const mx::array& x) { return mx::swapaxes(mx::contiguous(mx::swapaxes(x, 1, 2)), 1, 2); };
    for (const auto& layout : std::vector<std::function<mx::array(const mx::array&)>>{in_wider, turned}) {
      ScanInputs inputs = arrays.inputs;
      for (mx::array* part : {&inputs.x, &inputs.delta, &inputs.b, &inputs.c, &*inputs.gate}) *part = layout(*part);
      inputs.mask = mx::swapaxes(mx::contiguous(mx::swapaxes(*inputs.mask, 0, 1)), 0, 1);
      EXPECT_EQ(floats(scan(one, inputs, arrays).y), want);
    }
    ScanInputs narrow = arrays.inputs;
    narrow.x = mx::astype(narrow.x, mx::bfloat16);
    narrow.b = mx::astype(narrow.b, mx::float16);
    const ScanResult result = scan(one, narrow, arrays);
    EXPECT_EQ(result.y.dtype(), mx::bfloat16);
    EXPECT_EQ(result.state.dtype(), mx::float32);
    const auto got = floats(result.y);
    const float largest = *std::max_element(want.begin(), want.end());
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 0.02f * largest);
  }
}

TEST(Scan, StepsOfAnySizeStayFinite) {
  for (const Case& one : {kSelectiveCase, kHeadCase}) {
    Arrays arrays = arrays_of(one);
    arrays.inputs.delta = mx::multiply(arrays.inputs.delta, mx::array(1e4f));
    arrays.inputs.gate = mx::multiply(*arrays.inputs.gate, mx::array(1e4f));
    const ScanResult result = scan(one, arrays.inputs, arrays);
    EXPECT_TRUE(mx::all(mx::isfinite(result.y)).item<bool>());
    EXPECT_TRUE(mx::all(mx::isfinite(result.state)).item<bool>());
  }
}

TEST(Scan, RefusesWhatDoesNotFit) {
  for (const Case& one : {kSelectiveCase, kHeadCase}) {
    const Arrays arrays = arrays_of(one);
    const auto refused = [&](const std::function<void(ScanInputs&)>& change) {
      ScanInputs inputs = arrays.inputs;
      change(inputs);
      EXPECT_THROW(scan(one, inputs, arrays), Error);
    };
    refused([](ScanInputs& in) { in.x = mx::zeros({2, 150, 5}); });
    refused([](ScanInputs& in) { in.x = mx::zeros({2, 150}); });
    refused([](ScanInputs& in) { in.delta = mx::zeros({2, 150, 2}); });
    refused([](ScanInputs& in) { in.b = mx::zeros({2, 149, in.b.shape(2)}); });
    refused([](ScanInputs& in) { in.c = mx::zeros({2, 150, in.b.shape(2) + 1}); });
    refused([](ScanInputs& in) { in.gate = mx::zeros({2, 150, 1}); });
    refused([](ScanInputs& in) { in.mask = mx::zeros({2, 149}, mx::bool_); });
    refused([](ScanInputs& in) { in.state = mx::zeros({2, 1, 1}); });
  }
}

}  // namespace
}  // namespace reprise::kernels
