#include "apps/reprise/bench_replay.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace reprise::app {
namespace {

using Time = std::chrono::steady_clock;

double seconds_between(Time::time_point from, Time::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

class Replay {
 public:
  Replay(Engine& engine, const Trace& trace, const ReplayOptions& options)
      : engine_(engine), trace_(trace), options_(options), figures_(trace.conversations.size()) {}

  ReplayFigures run() {
    const auto most = static_cast<std::size_t>(std::max(1, options_.at_a_time));
    {
      std::vector<std::jthread> clients;
      const std::size_t count = std::min(most, trace_.conversations.size());
      for (std::size_t i = 0; i < count; ++i) clients.emplace_back([this] { talk(); });
    }
    ReplayFigures result;
    result.seconds = seconds_between(started_, Time::now());
    for (auto& conversation : figures_) {
      std::move(conversation.begin(), conversation.end(), std::back_inserter(result.requests));
    }
    return result;
  }

 private:
  // Takes one conversation after the other.
  void talk() {
    for (;;) {
      const std::size_t place = next_.fetch_add(1);
      if (place >= trace_.conversations.size()) return;
      const auto& conversation = trace_.conversations[place];
      std::vector<Tokens> said;
      for (const auto& turn : conversation.turns) {
        if (!wait_until(turn.at_ms)) return;
        RequestFigures figures;
        figures.conversation = conversation.id;
        figures.turn = static_cast<int>(said.size());
        said.push_back(prompt_of(turn, said));
        request(turn, said.back(), figures);
        figures_[place].push_back(std::move(figures));
        if (options_.cancel.stop_requested()) return;
        if (!figures_[place].back().error.empty()) break;
      }
    }
  }

  // Asks, and puts the answer behind the prompt.
  void request(const TraceTurn& turn, Tokens& prompt, RequestFigures& figures) {
    const auto begun = Time::now();
    figures.begun = seconds_between(started_, begun);
    try {
      Request request;
      request.prompt = prompt;
      request.max_tokens = turn.max_tokens;
      request.sampling = options_.sampling;
      request.ignore_eos = true;
      request.keep = options_.keep;
      auto generation = engine_.submit(std::move(request));
      const std::stop_callback cancel(options_.cancel, [&generation] { generation.cancel(); });
      std::optional<Time::time_point> last;
      while (const auto event = generation.next()) {
        const auto now = Time::now();
        if (event->kind == GenerationEvent::Kind::token) {
          last ? figures.gaps.push_back(seconds_between(*last, now))
               : static_cast<void>(figures.first_token = seconds_between(begun, now));
          last = now;
          prompt.push_back(event->token);
        } else if (event->kind == GenerationEvent::Kind::end) {
          figures.stats = event->stats;
        }
      }
    } catch (const std::exception& error) {
      figures.error = error.what();
    }
    figures.ended = seconds_between(begun, Time::now());
  }

  // Returns: false when cancelled.
  bool wait_until(double at_ms) {
    const auto until =
        started_ + std::chrono::duration_cast<Time::duration>(std::chrono::duration<double, std::milli>(at_ms));
    std::unique_lock lock(mutex_);
    wake_.wait_until(lock, options_.cancel, until, [] { return false; });
    return !options_.cancel.stop_requested();
  }

  Engine& engine_;
  const Trace& trace_;
  const ReplayOptions& options_;
  std::vector<std::vector<RequestFigures>> figures_;  // of each conversation, written by the thread that has it
  const Time::time_point started_ = Time::now();
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  std::condition_variable_any wake_;
};

}  // namespace

Tokens prompt_of(const TraceTurn& turn, const std::vector<Tokens>& said) {
  Tokens prompt;
  if (turn.after >= 0) prompt = said.at(static_cast<std::size_t>(turn.after));
  prompt.insert(prompt.end(), turn.tokens.begin(), turn.tokens.end());
  return prompt;
}

ReplayFigures replay(Engine& engine, const Trace& trace, const ReplayOptions& options) {
  return Replay(engine, trace, options).run();
}

}  // namespace reprise::app
