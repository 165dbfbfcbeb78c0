#include "reprise/engine/engine_thread.h"

#include <chrono>
#include <string>

#include "reprise/base/error.h"
#include "reprise/base/log.h"

namespace reprise::internal {
namespace {

// How often what is cached is looked at for time-outs while nothing runs.
constexpr std::chrono::milliseconds kIdle = std::chrono::seconds(1);

}  // namespace

EngineThread::EngineThread(const SchedulerOptions& options, const Engine::MakeRunner& make_runner) {
  const auto ready = std::make_shared<std::promise<void>>();
  auto is_ready = ready->get_future();
  thread_ = std::thread([this, &options, &make_runner, ready] { live(options, make_runner, *ready); });
  try {
    is_ready.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

EngineThread::~EngineThread() {
  inbox_->close();
  thread_.join();
}

void EngineThread::run(const std::function<void(Scheduler&, BatchRunner&)>& work) {
  // Shared: the waiting thread may go on while set_value is still on its way out.
  const auto done = std::make_shared<std::promise<void>>();
  auto is_done = done->get_future();
  const auto command = [this, &work, done](Scheduler& scheduler) {
    try {
      work(scheduler, *runner_);
      done->set_value();
    } catch (...) {
      done->set_exception(std::current_exception());
    }
  };
  if (!inbox_->post(command)) throw Error(ErrorCode::failed_precondition, "[Engine] it is going away");
  is_done.get();
}

// `options` and `make_runner` are gone once `ready` is set.
void EngineThread::live(const SchedulerOptions& options, const Engine::MakeRunner& make_runner,
                        std::promise<void>& ready) {
  std::unique_ptr<BatchRunner> runner;
  std::unique_ptr<Scheduler> scheduler;
  try {
    runner = make_runner();
    runner_ = runner.get();
    scheduler = std::make_unique<Scheduler>(*runner, options);
  } catch (...) {
    scheduler.reset();
    runner.reset();
    ready.set_exception(std::current_exception());
    return;
  }
  ready.set_value();
  serve(*scheduler, *runner);
  scheduler.reset();  // what is there ends as cancelled
}

void EngineThread::serve(Scheduler& scheduler, BatchRunner& runner) {
  const auto obey = [&](std::chrono::milliseconds patience) {
    for (const Inbox::Command& command : inbox_->take(patience)) command(scheduler);
  };
  while (!inbox_->closed()) {
    try {
      obey(scheduler.idle() ? kIdle : std::chrono::milliseconds(0));
      if (scheduler.idle()) {
        runner.tick();
      } else {
        scheduler.step();
      }
    } catch (...) {
      // No request and no runner may bring this thread down: a step throws only where memory is out, or by a defect.
      log(LogLevel::error, "[Engine] a step failed; its requests end with the error");
      scheduler.fail(std::current_exception());
    }
    inbox_->num_waiting = scheduler.stats().waiting;
  }
  obey(std::chrono::milliseconds(0));
}

}  // namespace reprise::internal
