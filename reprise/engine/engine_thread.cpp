#include "reprise/engine/engine_thread.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/base/log.h"

namespace reprise::internal {
namespace {

// How often what is cached is looked at for time-outs while nothing runs.
constexpr std::chrono::milliseconds kIdle = std::chrono::seconds(1);

}  // namespace

// What the thread has done for another one that waits. The error is handed over whole: only one of them lets go of it.
class EngineThread::Outcome {
 public:
  void set(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    is_set_ = true;
    changed_.notify_one();
  }

  // Throws: the error.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return is_set_; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool is_set_ = false;
};

EngineThread::EngineThread(const SchedulerOptions& options, const Engine::MakeRunner& make_runner) {
  const auto ready = std::make_shared<Outcome>();
  thread_ = std::thread([this, &options, &make_runner, ready] { live(options, make_runner, *ready); });
  try {
    ready->wait();
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
  // Shared: who waits may be gone while the thread is still on its way out of set.
  const auto outcome = std::make_shared<Outcome>();
  const auto command = [this, &work, outcome](Scheduler& scheduler) {
    std::exception_ptr error;
    try {
      work(scheduler, *runner_);
    } catch (...) {
      error = std::current_exception();
    }
    outcome->set(std::move(error));
  };
  if (!inbox_->post(command)) throw Error(ErrorCode::failed_precondition, "[Engine] it is going away");
  outcome->wait();
}

// `options` and `make_runner` are gone once `ready` is set.
void EngineThread::live(const SchedulerOptions& options, const Engine::MakeRunner& make_runner, Outcome& ready) {
  std::unique_ptr<BatchRunner> runner;
  std::unique_ptr<Scheduler> scheduler;
  std::exception_ptr error;
  try {
    runner = make_runner();
    runner_ = runner.get();
    scheduler = std::make_unique<Scheduler>(*runner, options);
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    runner.reset();
    return ready.set(std::move(error));
  }
  ready.set({});
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
