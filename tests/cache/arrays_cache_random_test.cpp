// ArraysCache through a long random history, against plain numbers per row and slot.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "mlx/ops.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/cache/registry.h"
#include "tests/cache/cache_rows.h"
#include "tests/cache/random_settings.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;

constexpr int kSlots = 3;
constexpr std::size_t kMaxSubjects = 5;
constexpr int kMaxRows = 5;

// What a slot must hold: a number per row, or nothing. A row that was merged or extended without it has 0.
using SlotModel = std::optional<std::vector<float>>;

struct Subject {
  std::unique_ptr<ArraysCache> cache;
  int rows = 1;
  std::vector<SlotModel> slots = std::vector<SlotModel>(kSlots);
  std::vector<int> lengths = {};  // of the prompt under way; empty for none
};

std::unique_ptr<ArraysCache> as_arrays(std::unique_ptr<LayerCache> cache) {
  return std::unique_ptr<ArraysCache>(&dynamic_cast<ArraysCache&>(*cache.release()));
}

class RandomHistory {
 public:
  explicit RandomHistory(unsigned seed) : random_(seed) { add_new(); }

  void step() {
    Subject& subject = subjects_[static_cast<std::size_t>(pick(0, static_cast<int>(subjects_.size()) - 1))];
    switch (pick(0, 13)) {
      case 0:
      case 1:
      case 2:
        set(subject);
        break;
      case 3:
        add({as_arrays(subject.cache->fork()), subject.rows, subject.slots, subject.lengths});
        break;
      case 4:
        reload(subject);
        break;
      case 5:
        filter(subject);
        break;
      case 6:
        extend(subject);
        break;
      case 7:
        extract(subject);
        break;
      case 8:
        merge();
        break;
      case 9:
        prompt(subject);
        break;
      case 10:
        advance(subject);
        break;
      case 11:
        add_new();
        break;
      default:
        check(subject);
        break;
    }
  }

  void check_all() {
    for (Subject& subject : subjects_) check(subject);
  }

 private:
  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

  void add(Subject subject) {
    if (subjects_.size() < kMaxSubjects) {
      subjects_.push_back(std::move(subject));
    } else {
      subjects_[static_cast<std::size_t>(pick(0, kMaxSubjects - 1))] = std::move(subject);
    }
  }

  void add_new() { add({std::make_unique<ArraysCache>(kSlots)}); }

  void set(Subject& subject) {
    if (subject.rows == 0) return;
    const int slot = pick(0, kSlots - 1);
    std::vector<float> values(static_cast<std::size_t>(subject.rows));
    for (float& value : values) value = static_cast<float>(next_value_++);
    // Each slot has its own shape behind the rows.
    mx::array state = mx::reshape(mx::array(values.begin(), mx::Shape{subject.rows}, mx::float32), {subject.rows, 1});
    state = mx::broadcast_to(state, {subject.rows, 2 + slot});
    subject.cache->set(slot, state);
    subject.slots[static_cast<std::size_t>(slot)] = values;
  }

  void reload(Subject& subject) {
    if (pick(0, 9) > 0) {
      auto restored = cache_from_state(subject.cache->class_name(), subject.cache->state());
      restored->set_extra_state(subject.cache->extra_state());
      subject.cache = as_arrays(std::move(restored));
      return;
    }
    PromptCache list;
    list.push_back(subject.cache->fork());
    PromptCache loaded = load_prompt_cache(save_prompt_cache(folder_.file("cache"), list));
    subject.cache = as_arrays(loaded[0].fork());
  }

  template <typename Values>
  static Values chosen(const Values& values, const std::vector<int>& rows) {
    Values result;
    for (const int row : rows) result.push_back(values[static_cast<std::size_t>(row)]);
    return result;
  }

  void filter(Subject& subject) {
    if (subject.rows == 0) return;
    std::vector<int> rows(
        static_cast<std::size_t>(pick(0, 9) == 0 ? 0 : pick(1, std::min(subject.rows + 1, kMaxRows))));
    for (int& row : rows) row = pick(0, subject.rows - 1);
    subject.cache->filter(rows);
    for (SlotModel& slot : subject.slots) {
      if (slot) slot = chosen(*slot, rows);
    }
    if (!subject.lengths.empty()) subject.lengths = chosen(subject.lengths, rows);
    subject.rows = static_cast<int>(rows.size());
  }

  void extend(Subject& subject) {
    const Subject& other = subjects_[static_cast<std::size_t>(pick(0, static_cast<int>(subjects_.size()) - 1))];
    if (&other == &subject || subject.rows + other.rows > kMaxRows) return;
    if (!subject.lengths.empty() || !other.lengths.empty()) return;
    subject.cache->extend(*other.cache);
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      const SlotModel& more = other.slots[slot];
      if (!subject.slots[slot] && !more) continue;
      std::vector<float> all = subject.slots[slot].value_or(std::vector<float>(static_cast<std::size_t>(subject.rows)));
      const std::vector<float> added = more.value_or(std::vector<float>(static_cast<std::size_t>(other.rows)));
      all.insert(all.end(), added.begin(), added.end());
      subject.slots[slot] = std::move(all);
    }
    subject.rows += other.rows;
  }

  void extract(Subject& subject) {
    if (subject.rows == 0) return;
    const int row = pick(0, subject.rows - 1);
    Subject single{as_arrays(subject.cache->extract(row))};
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      if (subject.slots[slot]) single.slots[slot] = chosen(*subject.slots[slot], {row});
    }
    check(single);
    add(std::move(single));
  }

  void merge() {
    std::vector<const LayerCache*> caches;
    std::vector<const Subject*> sources;
    for (const Subject& subject : subjects_) {
      if (subject.rows != 1 || !subject.lengths.empty()) continue;
      caches.push_back(subject.cache.get());
      sources.push_back(&subject);
    }
    if (caches.empty()) return;
    Subject batch{as_arrays(merge_caches(caches)), static_cast<int>(caches.size())};
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
      const bool any = std::any_of(sources.begin(), sources.end(), [&](const auto* s) { return s->slots[slot]; });
      if (!any) continue;
      batch.slots[slot].emplace();
      for (const Subject* source : sources) {
        batch.slots[slot]->push_back(source->slots[slot] ? source->slots[slot]->front() : 0.0f);
      }
    }
    add(std::move(batch));
  }

  void prompt(Subject& subject) {
    if (subject.rows == 0) return;
    subject.lengths.resize(static_cast<std::size_t>(subject.rows));
    for (int& length : subject.lengths) length = pick(1, 12);
    subject.cache->prepare({.lengths = subject.lengths});
  }

  void advance(Subject& subject) {
    if (pick(0, 2) == 0) {
      subject.cache->finalize();
      subject.lengths.clear();
      return;
    }
    const int count = pick(1, 5);
    subject.cache->advance(count);
    for (int& length : subject.lengths) length -= count;
  }

  void check(Subject& subject) {
    ASSERT_EQ(subject.cache->trim(3), 0);
    for (int slot = 0; slot < kSlots; ++slot) {
      const auto got = subject.cache->get(slot);
      const SlotModel& wanted = subject.slots[static_cast<std::size_t>(slot)];
      ASSERT_EQ(got.has_value(), wanted.has_value()) << "slot " << slot;
      if (!got) continue;
      ASSERT_EQ(got->shape(), (mx::Shape{subject.rows, 2 + slot}));
      mx::array dense = mx::contiguous(*got);
      dense.eval();
      for (int i = 0; i < static_cast<int>(dense.size()); ++i) {
        ASSERT_EQ(dense.data<float>()[i], (*wanted)[static_cast<std::size_t>(i / (2 + slot))]) << "slot " << slot;
      }
    }
    if (subject.rows > 0) check_mask(subject);
  }

  void check_mask(Subject& subject) {
    const int N = pick(1, 6);
    const Mask mask = subject.cache->make_mask(N);
    if (std::holds_alternative<NoMask>(mask)) {
      ASSERT_TRUE(subject.lengths.empty());
      return;
    }
    mx::array dense = mx::contiguous(std::get<mx::array>(mask));
    dense.eval();
    ASSERT_EQ(dense.shape(), (mx::Shape{subject.rows, N}));
    for (int b = 0; b < subject.rows; ++b) {
      for (int i = 0; i < N; ++i) {
        const bool is_real = subject.lengths.empty() || i < subject.lengths[static_cast<std::size_t>(b)];
        ASSERT_EQ(dense.data<bool>()[b * N + i], is_real);
      }
    }
  }

  std::mt19937 random_;
  std::vector<Subject> subjects_;
  int next_value_ = 1;
  TemporaryFolder folder_;
};

TEST(ArraysCacheRandom, A4A5A6A7EveryRowKeepsItsStateThroughAnyHistory) {
  RandomHistory history(random_seed());
  run_random_history(history);
}

}  // namespace
}  // namespace reprise
