#include "reprise/kernels/experts_cpu.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "reprise/kernels/buffers.h"
#include "reprise/kernels/elementwise.h"
#include "reprise/kernels/products.h"

namespace reprise::kernels::cpu {

namespace {

std::size_t size_of_rows(int rows, int cols) { return static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols); }

// One expert's slots: sorted[first, first + rows).
struct Group {
  int expert;
  int first;
  int rows;
};

// Slots in order of their experts, and by number within one.
struct Grouped {
  std::vector<int> sorted;
  std::vector<Group> groups;  // of experts that anyone chose

  Grouped(const Choices& choices, int experts) {
    const int slots = choices.tokens * choices.per_token;
    std::vector<int> next(static_cast<std::size_t>(experts) + 1, 0);
    for (int slot = 0; slot < slots; ++slot) ++next[static_cast<std::size_t>(choices.experts[slot]) + 1];
    for (std::size_t e = 0; e < static_cast<std::size_t>(experts); ++e) {
      if (next[e + 1] > 0) groups.push_back({static_cast<int>(e), next[e], next[e + 1]});
      next[e + 1] += next[e];
    }
    sorted.resize(static_cast<std::size_t>(slots));
    for (int slot = 0; slot < slots; ++slot) {
      sorted[static_cast<std::size_t>(next[static_cast<std::size_t>(choices.experts[slot])]++)] = slot;
    }
  }
};

// Each group's rows in the form that a map's products want. One at a time in a thread.
class GroupedRows {
 public:
  // `row_of`: which row of x a place among the sorted slots has.
  template <typename RowOf>
  GroupedRows(const Rows& x, const Grouped& grouped, RowOf row_of) : x_(x), groups_(grouped.groups) {
    rows_.resize(grouped.sorted.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i] = row_of(static_cast<int>(i));
    // One token's experts all take its row.
    is_one_row_ = std::all_of(rows_.begin(), rows_.end(), [&](int row) { return row == rows_[0]; }) &&
                  std::all_of(groups_.begin(), groups_.end(), [](const Group& group) { return group.rows == 1; });
  }

  // Before run. Returns: the number of what is prepared for such a map.
  std::size_t add(const ExpertMap& map) {
    const auto form_of = [&](const Group& group) { return input_form(map.of(0).weight, group.rows); };
    for (std::size_t i = 0; i < first_forms_.size(); ++i) {
      if (first_forms_[i] == form_of(groups_[0])) return i;
    }
    first_forms_.push_back(form_of(groups_[0]));
    for (std::size_t g = 0; g < prepared_groups(); ++g) {
      parts_.push_back({form_of(groups_[g]), bytes_});
      bytes_ += prepared_bytes(parts_.back().form, groups_[g].rows);
    }
    return first_forms_.size() - 1;
  }

  void run(ThreadPool& pool) {
    memory_ = static_cast<std::byte*>(buffer(Buffer::prepared, bytes_));
    pool.run(static_cast<int>(parts_.size()), [&](int i) {
      const Part& part = parts_[static_cast<std::size_t>(i)];
      const Group& group = groups_[static_cast<std::size_t>(i) % prepared_groups()];
      prepare(part.form, group.rows, rows_of_group(group), static_cast<std::size_t>(x_.cols), 0, group.rows,
              memory_ + part.offset);
    });
  }

  const void* get(std::size_t number, std::size_t group) const {
    return memory_ + parts_[number * prepared_groups() + (is_one_row_ ? 0 : group)].offset;
  }

 private:
  struct Part {
    InputForm form;
    std::size_t offset;
  };

  std::size_t prepared_groups() const { return is_one_row_ ? 1 : groups_.size(); }

  // In memory one after the other.
  const float* rows_of_group(const Group& group) const {
    const auto cols = static_cast<std::size_t>(x_.cols);
    const int* rows = rows_.data() + group.first;
    const auto at = [&](int i) { return x_.data + static_cast<std::size_t>(rows[i]) * cols; };
    const auto follows = [](int a, int b) { return b == a + 1; };
    if (std::adjacent_find(rows, rows + group.rows, std::not_fn(follows)) == rows + group.rows) return at(0);
    float* const together = float_buffer(Buffer::gate, size_of_rows(group.rows, x_.cols));
    for (int i = 0; i < group.rows; ++i) std::copy_n(at(i), cols, together + static_cast<std::size_t>(i) * cols);
    return together;
  }

  Rows x_;
  const std::vector<Group>& groups_;
  std::vector<int> rows_;
  bool is_one_row_;
  std::vector<InputForm> first_forms_;
  std::vector<Part> parts_;
  std::size_t bytes_ = 0;
  std::byte* memory_ = nullptr;
};

// Calls task(group, begin, end) for column ranges of every group's map.
template <typename Task>
void for_columns(const Grouped& grouped, const ExpertMap& map, int products, ThreadPool& pool, const Task& task) {
  struct Cut {
    int columns;
    int first_task;
  };
  const int out = map.out();
  // Groups are tasks themselves, where there are several for each thread; else each is cut finer, so that the threads'
  // shares are even.
  const int groups = static_cast<int>(grouped.groups.size());
  constexpr int kGroupsPerThread = 4;
  const int share = pool.threads() == 1 || groups >= kGroupsPerThread * pool.threads()
                        ? 1
                        : std::max(2, (pool.threads() + groups - 1) / groups);
  std::vector<Cut> cuts;
  cuts.reserve(grouped.groups.size());
  int tasks = 0;
  for (const Group& group : grouped.groups) {
    const int columns = columns_per_task(map.of(0).weight, products * group.rows, share);
    cuts.push_back({columns, tasks});
    tasks += (out + columns - 1) / columns;
  }
  pool.run(tasks, [&](int i) {
    const auto after = std::find_if(cuts.begin(), cuts.end(), [&](const Cut& cut) { return cut.first_task > i; });
    const auto group = static_cast<std::size_t>(after - cuts.begin()) - 1;
    const int begin = (i - cuts[group].first_task) * cuts[group].columns;
    task(group, begin, std::min(begin + cuts[group].columns, out));
  });
}

// One range of a map's columns for one group: [rows, end - begin], with the bias.
void multiply_group(const ExpertMap& map, const Group& group, const void* prepared, int begin, int end, float* out) {
  const Map one = map.of(group.expert);
  const auto width = static_cast<std::size_t>(end - begin);
  multiply(one.weight, group.rows, prepared, begin, end, out, width);
  add(one.bias ? one.bias + begin : nullptr, nullptr, 0, group.rows, end - begin, out, width);
}

// out[slot] = the map of x's row for that slot.
template <typename RowOf>
void multiply_slots(const Rows& x, const Grouped& grouped, RowOf row_of, const ExpertMap& map, float* out,
                    ThreadPool& pool) {
  GroupedRows input(x, grouped, row_of);
  const std::size_t form = input.add(map);
  input.run(pool);
  const auto ldo = static_cast<std::size_t>(map.out());
  for_columns(grouped, map, 1, pool, [&](std::size_t g, int begin, int end) {
    const Group& group = grouped.groups[g];
    const auto width = static_cast<std::size_t>(end - begin);
    float* const product = float_buffer(Buffer::gate, size_of_rows(group.rows, end - begin));
    multiply_group(map, group, input.get(form, g), begin, end, product);
    for (int i = 0; i < group.rows; ++i) {
      const auto slot = static_cast<std::size_t>(grouped.sorted[static_cast<std::size_t>(group.first + i)]);
      std::copy_n(product + static_cast<std::size_t>(i) * width, width,
                  out + slot * ldo + static_cast<std::size_t>(begin));
    }
  });
}

void activate(const std::variant<Activation, ClippedSwiglu>& activation, float* gate, const float* up, std::size_t n) {
  if (const auto* clip = std::get_if<ClippedSwiglu>(&activation)) {
    clipped_swiglu(gate, up, n, clip->alpha, clip->limit);
  } else if (std::get<Activation>(activation) == Activation::silu) {
    silu_times(gate, up, n);
  } else {
    gelu_tanh_times(gate, up, n);
  }
}

// Calls pass(first token, their choices) until all have been taken; a pass has so many tokens that memory of its own
// stays bounded, and so many that experts get several rows each.
template <typename Pass>
void in_passes(const Choices& choices, std::size_t floats_per_slot, const Pass& pass) {
  constexpr std::size_t kMaxFloats = std::size_t{8} << 20;
  const std::size_t per_token = floats_per_slot * static_cast<std::size_t>(choices.per_token);
  const int most =
      static_cast<int>(std::clamp<std::size_t>(kMaxFloats / std::max<std::size_t>(per_token, 1), 32, 2048));
  const int passes = (choices.tokens + most - 1) / most;
  const int step = (choices.tokens + passes - 1) / passes;
  for (int begin = 0; begin < choices.tokens; begin += step) {
    pass(static_cast<std::size_t>(begin),
         Choices{choices.experts + static_cast<std::ptrdiff_t>(begin) * choices.per_token,
                 std::min(step, choices.tokens - begin), choices.per_token});
  }
}

void sum_slots(const float* slots, const float* weights, const Choices& choices, int cols, float* out,
               ThreadPool& pool) {
  const auto width = static_cast<std::size_t>(cols);
  constexpr int kTokensPerTask = 16;
  pool.run((choices.tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int task) {
    const int end = std::min((task + 1) * kTokensPerTask, choices.tokens);
    for (int token = task * kTokensPerTask; token < end; ++token) {
      float* const sum = out + static_cast<std::size_t>(token) * width;
      std::fill_n(sum, width, 0.0f);
      for (int i = 0; i < choices.per_token; ++i) {
        const auto slot = static_cast<std::size_t>(token * choices.per_token + i);
        add_times(weights[slot], slots + slot * width, width, sum);
      }
    }
  });
}

}  // namespace

void switch_linear(const Rows& x, const Choices& choices, const ExpertMap& map, float* out, ThreadPool& pool) {
  const bool is_per_slot = x.rows != choices.tokens;
  const auto cols = static_cast<std::size_t>(x.cols);
  in_passes(choices, cols, [&](std::size_t first, const Choices& some) {
    const std::size_t first_slot = first * static_cast<std::size_t>(choices.per_token);
    const int rows = is_per_slot ? some.tokens * some.per_token : some.tokens;
    const Rows own{x.data + (is_per_slot ? first_slot : first) * cols, rows, x.cols};
    const Grouped grouped(some, map.experts);
    const auto row_of = [&](int place) {
      const int slot = grouped.sorted[static_cast<std::size_t>(place)];
      return is_per_slot ? slot : slot / some.per_token;
    };
    multiply_slots(own, grouped, row_of, map, out + first_slot * static_cast<std::size_t>(map.out()), pool);
  });
}

void switch_glu(const Rows& x, const Choices& choices, const ExpertGlu& glu, const float* weights, float* out,
                ThreadPool& pool) {
  const auto& [gate, up, down, activation] = glu;
  const int F = gate.out();
  const auto ldh = static_cast<std::size_t>(F);
  const auto ldo = static_cast<std::size_t>(down.out());
  const auto floats_per_slot = static_cast<std::size_t>(std::max({x.cols, F, down.out()}));
  in_passes(choices, floats_per_slot, [&](std::size_t first, const Choices& some) {
    const Rows own{x.data + first * static_cast<std::size_t>(x.cols), some.tokens, x.cols};
    const Grouped grouped(some, gate.experts);
    const int slots = some.tokens * some.per_token;
    // Rows as the slots are sorted.
    float* const hidden = float_buffer(Buffer::hidden, size_of_rows(slots, F));
    GroupedRows input(own, grouped,
                      [&](int place) { return grouped.sorted[static_cast<std::size_t>(place)] / some.per_token; });
    const std::size_t gate_form = input.add(gate);
    const std::size_t up_form = input.add(up);
    input.run(pool);
    for_columns(grouped, gate, 2, pool, [&](std::size_t g, int begin, int end) {
      const Group& group = grouped.groups[g];
      const auto width = static_cast<std::size_t>(end - begin);
      const std::size_t size = size_of_rows(group.rows, end - begin);
      float* const gates = float_buffer(Buffer::gate, size);
      float* const ups = float_buffer(Buffer::up, size);
      multiply_group(gate, group, input.get(gate_form, g), begin, end, gates);
      multiply_group(up, group, input.get(up_form, g), begin, end, ups);
      activate(activation, gates, ups, size);
      for (int i = 0; i < group.rows; ++i) {
        std::copy_n(gates + static_cast<std::size_t>(i) * width, width,
                    hidden + static_cast<std::size_t>(group.first + i) * ldh + static_cast<std::size_t>(begin));
      }
    });
    const std::size_t first_slot = first * static_cast<std::size_t>(choices.per_token);
    const auto in_order = [](int place) { return place; };
    if (weights == nullptr) {
      return multiply_slots({hidden, slots, F}, grouped, in_order, down, out + first_slot * ldo, pool);
    }
    float* const outputs = float_buffer(Buffer::experts, size_of_rows(slots, down.out()));
    multiply_slots({hidden, slots, F}, grouped, in_order, down, outputs, pool);
    sum_slots(outputs, weights + first_slot, some, down.out(), out + first * ldo, pool);
  });
}

}  // namespace reprise::kernels::cpu
