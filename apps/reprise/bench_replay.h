// Replays a trace through an engine, several conversations at a time, and notes how each request went.
// Threads: replay starts one for each conversation at a time, and returns when they have ended.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "apps/reprise/bench_trace.h"
#include "reprise/engine/engine.h"

namespace reprise::app {

struct ReplayOptions {
  int at_a_time = 4;
  bool keep = true;  // false: nothing is stored, each prompt is computed from nothing
  SamplingParams sampling = {};
  std::stop_token cancel = {};
};

struct RequestFigures {
  std::string conversation;
  int turn = 0;
  SequenceStats stats;
  double begun = 0.0;             // seconds since the replay began
  double first_token = 0.0;       // seconds after that; 0: there was none
  double ended = 0.0;             // seconds after `begun`
  std::vector<double> gaps = {};  // seconds between tokens
  std::string error = {};         // it failed, and its conversation ended
};

struct ReplayFigures {
  std::vector<RequestFigures> requests;  // in the trace's order; those after a failure are not there
  double seconds = 0.0;
};

// Stops early when cancelled.
ReplayFigures replay(Engine& engine, const Trace& trace, const ReplayOptions& options);

// The prompt of a turn after what was said: its tokens behind the prompt and the answer of the turn it comes after.
// `said`: prompt and answer of each turn so far.
Tokens prompt_of(const TraceTurn& turn, const std::vector<Tokens>& said);

}  // namespace reprise::app
