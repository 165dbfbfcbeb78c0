// What `reprise bench` measures: prompts of fixed random ids processed and continued, one sequence or several together.
// Threads: one; evaluates on the calling thread.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "reprise/base/profile.h"
#include "reprise/generate/generate.h"

namespace reprise::app {

struct BenchPlan {
  int prompt = 512;  // ≥ 1: tokens of each sequence that are processed
  int depth = 0;     // tokens of each sequence that are cached before
  int decode = 64;   // tokens of each sequence that are sampled after the first
  int batch = 1;     // ≥ 1: sequences; prompts are processed one by one, then all sequences take each step together
  int repeat = 3;    // ≥ 1
  GenerateOptions options = {};  // sampling, caches, prefill_step_size, cancel
};

// A part of one repetition, all sequences together.
struct BenchPhase {
  int tokens = 0;
  double seconds = 0.0;

  double tokens_per_second() const { return seconds > 0.0 ? tokens / seconds : 0.0; }
};

struct BenchRepetition {
  BenchPhase prefill;  // up to the first sampled token of each sequence
  BenchPhase decode;
};

// Where the time of a phase went.
struct BenchProfile {
  BenchPhase phase;
  std::vector<ProfileEntry> operations;
};

struct BenchProfiles {
  BenchProfile prefill;
  BenchProfile decode;
};

class BenchCancelled : public std::exception {
 public:
  const char* what() const noexcept override { return "cancelled"; }
};

class Bench {
 public:
  // Fills the caches to `depth` and runs once unmeasured. Throws: BenchCancelled, as do all here; as generate;
  // unsupported for several sequences over caches that have no batch class.
  Bench(const LoadedModel& model, BenchPlan plan);

  std::vector<BenchRepetition> measure();
  // `repeat` repetitions more, their phases added up.
  BenchProfiles profile();

 private:
  class Run;
  class SingleRun;
  class BatchRun;

  std::unique_ptr<Run> start() const;
  BenchRepetition run_once(int decode) const;

  const LoadedModel& model_;
  BenchPlan plan_;
  std::vector<Tokens> prompts_;        // of each sequence
  std::vector<RecordedCache> filled_;  // of each sequence
};

// Of the phase that `part` names; the median of what the repetitions reached.
double median_seconds(const std::vector<BenchRepetition>& repetitions, BenchPhase BenchRepetition::*part);
double median_tps(const std::vector<BenchRepetition>& repetitions, BenchPhase BenchRepetition::*part);

}  // namespace reprise::app
