// The thread that evaluates: runs the scheduler step after step, and between two steps what others ask for. Private to
// `engine`. Threads: any.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "reprise/engine/engine.h"
#include "reprise/engine/inbox.h"

namespace reprise::internal {

class EngineThread {
 public:
  // `make_runner` is called, and the runner lives and dies, on the thread. Throws: what it throws, and what Scheduler
  // does.
  EngineThread(const SchedulerOptions& options, const Engine::MakeRunner& make_runner);
  // Cancels what runs.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  const std::shared_ptr<Inbox>& inbox() const { return inbox_; }
  // For the calls that any thread may make.
  const BatchRunner& runner() const { return *runner_; }

  // Does `work` on the thread, between two steps, and waits for it. Throws: what it throws.
  void run(const std::function<void(Scheduler&, BatchRunner&)>& work);

 private:
  class Outcome;

  void live(const SchedulerOptions& options, const Engine::MakeRunner& make_runner, Outcome& ready);
  void serve(Scheduler& scheduler, BatchRunner& runner);

  std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  BatchRunner* runner_ = nullptr;  // constant once the thread is ready
  std::thread thread_;
};

}  // namespace reprise::internal
