#include "reprise/kernels/attention_cpu.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <vector>

namespace reprise::kernels::cpu {

namespace {

constexpr float kMasked = -FLT_MAX / 2;

float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 0x1f, fraction = h & 0x3ffu;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -value : value;
  }
  const std::uint32_t e = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | (e << 23) | (fraction << 13));
}

float load(const void* data, Element element, std::ptrdiff_t i) {
  if (element == Element::f32) return static_cast<const float*>(data)[i];
  const std::uint16_t x = static_cast<const std::uint16_t*>(data)[i];
  return element == Element::f16 ? half_to_float(x) : std::bit_cast<float>(std::uint32_t{x} << 16);
}

void unpack(const StoredRows& rows, int b, int h, int column, float* out) {
  const std::ptrdiff_t at = b * rows.batch_stride + h * rows.head_stride + column * rows.column_stride;
  if (rows.bits == 0) {
    for (int i = 0; i < rows.size; ++i) out[i] = load(rows.data, rows.element, at + i);
    return;
  }
  const auto* words = static_cast<const std::uint32_t*>(rows.data) + at;
  const std::ptrdiff_t groups =
      b * rows.group_batch_stride + h * rows.group_head_stride + column * rows.group_column_stride;
  for (int i = 0; i < rows.size; ++i) {
    const int bit = i * rows.bits;
    std::uint64_t word = words[bit / 32];
    if (bit % 32 + rows.bits > 32) word |= std::uint64_t{words[bit / 32 + 1]} << 32;
    const auto q = static_cast<std::uint32_t>(word >> (bit % 32)) & ((1u << rows.bits) - 1);
    const std::ptrdiff_t group = groups + i / rows.group_size;
    out[i] = load(rows.scales, rows.element, group) * static_cast<float>(q) + load(rows.biases, rows.element, group);
  }
}

void attend_one(const AttentionArgs& args, int b, int h, int i) {
  const int kv_head = h / (args.heads / args.kv_heads);
  int begin = args.row_starts ? args.row_starts[b] : 0;
  int end = args.columns;
  if (args.causal) {
    end = args.columns - args.num_queries + i + 1;
    if (args.window > 0) begin = std::max(begin, end - args.window);
  }
  const float* q =
      args.queries.data + b * args.queries.batch_stride + h * args.queries.head_stride + i * args.queries.row_stride;
  float* out =
      args.output.data + b * args.output.batch_stride + h * args.output.head_stride + i * args.output.row_stride;
  std::fill(out, out + args.values.size, 0.0f);
  if (begin >= end) return;
  std::vector<float> scores, row(static_cast<std::size_t>(std::max(args.keys.size, args.values.size)));
  for (int column = begin; column < end; ++column) {
    unpack(args.keys, b, kv_head, column, row.data());
    float dot = 0.0f;
    for (int d = 0; d < args.keys.size; ++d) dot += q[d] * row[static_cast<std::size_t>(d)];
    dot *= args.scale;
    const MaskView& mask = args.mask;
    const std::ptrdiff_t at =
        b * mask.batch_stride + h * mask.head_stride + i * mask.row_stride + column * mask.column_stride;
    if (mask.kind == MaskKind::boolean && !static_cast<const std::uint8_t*>(mask.data)[at]) dot = kMasked;
    if (mask.kind == MaskKind::additive) dot += std::max(load(mask.data, mask.element, at), kMasked);
    scores.push_back(dot);
  }
  float top = *std::max_element(scores.begin(), scores.end());
  if (args.sinks) top = std::max(top, args.sinks[h]);
  float total = args.sinks ? std::exp(args.sinks[h] - top) : 0.0f;
  for (int column = begin; column < end; ++column) {
    const float weight = std::exp(scores[static_cast<std::size_t>(column - begin)] - top);
    total += weight;
    unpack(args.values, b, kv_head, column, row.data());
    for (int d = 0; d < args.values.size; ++d) out[d] += weight * row[static_cast<std::size_t>(d)];
  }
  for (int d = 0; d < args.values.size; ++d) out[d] /= total;
}

}  // namespace

void attend(const AttentionArgs& args, ThreadPool& pool) {
  pool.run(args.batch * args.heads, [&](int task) {
    for (int i = 0; i < args.num_queries; ++i) attend_one(args, task / args.heads, task % args.heads, i);
  });
}

}  // namespace reprise::kernels::cpu
