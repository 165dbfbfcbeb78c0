// Runs the steps of a stateful case on real caches.
// Threads: one object belongs to one thread.
// Owns: the caches in its slots and the arrays that steps asked to keep.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "reprise/cache/prompt_cache.h"
#include "tests/conformance/cache_classes.h"
#include "tests/conformance/observation.h"
#include "tests/conformance/trace.h"

namespace reprise::conformance {

class Driver {
 public:
  explicit Driver(const Family& family) : family_(family) {}

  // Slots "c" and the case's others. Throws: std::runtime_error for a class that is not built.
  void start(const Json& test_case);
  // Loads `file`; its layers become the slots l0, l1, … Returns: what `expect` of such a case is compared with.
  Observation load(const std::filesystem::path& file);

  // Never throws: what a step threw is in the observation.
  Observation step(const Json& step);

  // The slot's scalars.
  Json observe_slot(const std::string& slot) const;

 private:
  struct Slot {
    std::unique_ptr<LayerCache> cache;
    bool own_capacity = false;  // see Observation
  };
  struct Kept {
    Arrays keys, values, in_keys, in_values;
  };

  void run(const std::string& op, const Json& step, Observation& out);
  bool run_attention(const std::string& op, const Json& step, Observation& out);
  bool run_state(const std::string& op, const Json& step, Observation& out);
  bool run_list(const std::string& op, const Json& step, Observation& out);
  bool run_batch(const std::string& op, const Json& step);

  void update(const Json& step, Observation& out);
  void recheck(const Json& step, Observation& out);
  void make_mask(const Json& step, Observation& out);
  void read_state(const Json& step, Observation& out);
  void reload(const Json& step, Observation& out);
  void save_load(const Json& step, Observation& out);
  void trim_list(const Json& step, Observation& out);

  Slot& slot(const std::string& name);
  Slot& slot_of(const Json& step) { return slot(step.value("on", "c")); }
  // The cache a step acts on: its slot, then the children along its path.
  LayerCache& target(const Json& step);
  AttentionCache& attention_target(const Json& step);
  PromptCache fork_slots(const Json& names);

  const Family& family_;
  std::map<std::string, Slot> slots_;
  std::map<std::string, Kept> kept_;
};

}  // namespace reprise::conformance
