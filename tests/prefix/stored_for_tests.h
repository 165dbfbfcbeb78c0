// Contents with a number and a size, counted while they live, and a clock that stands still. Threads: one.
#pragma once

#include <memory>

#include "reprise/prefix/prefix_tree.h"

namespace reprise {

struct Numbered final : Stored {
  Numbered(int the_number, std::size_t the_size) : number(the_number), size(the_size) { ++alive; }
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;
  ~Numbered() override { --alive; }
  std::size_t nbytes() const override { return size; }

  int number;
  std::size_t size;
  static inline int alive = 0;
};

inline StoredRef numbered(int number, std::size_t size) { return std::make_shared<Numbered>(number, size); }
inline int number_of(const StoredRef& content) { return content ? static_cast<const Numbered&>(*content).number : -1; }

struct StillClock final : Clock {
  TimePoint now() const override { return time; }
  TimePoint time{};
};

}  // namespace reprise
