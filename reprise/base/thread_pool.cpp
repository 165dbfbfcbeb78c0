// A run is published by storing its number of tasks in `unclaimed`. Whoever takes that counter from n > 0 to n - 1 owns
// one task of the run that is current at that moment, so the run cannot end, and what `current` points to stays, until
// the owner has taken its tasks off `unfinished`. A worker that comes late claims from a later run, which is as good.
//
// An idle worker first watches `unclaimed` for a bounded time and then sleeps; the caller watches `unfinished`
// likewise. Both sides of each sleep use sequentially consistent operations: the sleeper says that it sleeps and then
// looks at the counter, the other changes the counter and then looks for sleepers, so one of the two sees the other.
#include "reprise/base/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/base/processors.h"

namespace reprise {
namespace {

constexpr int kMaxThreads = 1024;
// Kernels of one token follow each other within a few microseconds; what comes between tokens takes longer, and there
// a worker that sleeps costs one wake-up.
constexpr std::chrono::microseconds kSpin{50};
// A straggler that runs ends its task soon; one that lost its processor does not.
constexpr int kLooksBetweenClocks = 16;

thread_local bool in_task = false;

// Counts forks: threads do not live on in a child.
std::atomic<int> forks{0};

void count_forks() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(once);
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Looks at `ready` for at most `bound`, giving way to other threads from time to time. Returns what it saw last.
template <typename Ready>
bool spin_until(std::chrono::nanoseconds bound, Ready ready) {
  if (ready()) return true;
  if (bound.count() == 0) return false;
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    for (int look = 0; look < kLooksBetweenClocks; ++look) {
      pause();
      if (ready()) return true;
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > bound) return ready();
    if (2 * waited > bound) std::this_thread::yield();
  }
}

// Signals go to the threads of whoever uses the library.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

int check_threads(const char* function, int threads) {
  if (threads >= 1 && threads <= kMaxThreads) return threads;
  throw Error(ErrorCode::invalid_argument, std::string("[") + function + "] threads must be from 1 to " +
                                               std::to_string(kMaxThreads) + ", but got " + std::to_string(threads));
}

int default_threads() {
  const int processors = std::min(internal::available_processors(), kMaxThreads);
  const char* text = std::getenv("REPRISE_NUM_THREADS");
  if (!text) return processors;
  int threads = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, threads);
  if (error == std::errc() && stop == end && threads >= 1 && threads <= kMaxThreads) return threads;
  log(LogLevel::warning, "[ThreadPool::process] $REPRISE_NUM_THREADS must be a number from 1 to " +
                             std::to_string(kMaxThreads) + ", but got \"" + text + "\": using " +
                             std::to_string(processors));
  return processors;
}

// One call of run, on its caller's stack.
class Run {
 public:
  using Call = void (*)(void* context, int task);
  Run(int tasks, Call call, void* context) : tasks_(tasks), call_(call), context_(context) {}

  int tasks() const { return tasks_; }

  void perform(int task) noexcept {
    try {
      call_(context_, task);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_ || task < failed_task_) {
        failure_ = std::current_exception();
        failed_task_ = task;
      }
    }
  }

  // Requires: all tasks have ended.
  void rethrow() {
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  const int tasks_;
  const Call call_;
  void* const context_;
  std::mutex mutex_;
  std::exception_ptr failure_;  // guarded by mutex_, as is failed_task_
  int failed_task_ = 0;
};

}  // namespace

struct ThreadPool::State {
  explicit State(int threads) : wanted(threads), forks_at_start(forks.load(std::memory_order_relaxed)) {}

  std::atomic<int> wanted;   // threads to have, the caller among them
  const int forks_at_start;  // in a forked child there are no workers
  std::mutex turn;           // whose run is the current one
  int have = 1;              // guarded by turn, as are workers and spin
  std::vector<std::thread> workers;
  std::atomic<std::int64_t> spin{0};  // nanoseconds

  alignas(64) std::atomic<int> unclaimed{0};
  Run* current = nullptr;
  alignas(64) std::atomic<int> unfinished{0};
  alignas(64) std::atomic<int> sleepers{0};  // changed under mutex
  std::atomic<bool> caller_sleeps{false};
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable done;
  int wake_ups = 0;       // guarded by mutex: workers to wake
  bool stopping = false;  // guarded by mutex

  bool forked() const { return forks.load(std::memory_order_relaxed) != forks_at_start; }
  std::chrono::nanoseconds spin_time() const { return std::chrono::nanoseconds(spin.load(std::memory_order_relaxed)); }

  int perform_tasks();
  void finish(int tasks);
  bool wait_for_work();
  void serve();
  void wake(int workers_needed);
  void run_together(Run& run, int tasks);
  void stop();
  void resize(int threads);
};

// Claims tasks while there are any, and says how many it has performed.
int ThreadPool::State::perform_tasks() {
  int performed = 0;
  while (unclaimed.load(std::memory_order_relaxed) > 0) {
    const int left = unclaimed.fetch_sub(1, std::memory_order_acquire);
    if (left <= 0) break;
    current->perform(left - 1);
    ++performed;
  }
  return performed;
}

void ThreadPool::State::finish(int tasks) {
  if (tasks == 0 || unfinished.fetch_sub(tasks) != tasks || !caller_sleeps.load()) return;
  { const std::lock_guard lock(mutex); }
  done.notify_one();
}

// False: the worker's end.
bool ThreadPool::State::wait_for_work() {
  if (spin_until(spin_time(), [this] { return unclaimed.load(std::memory_order_relaxed) > 0; })) return true;
  std::unique_lock lock(mutex);
  if (stopping) return false;
  sleepers.fetch_add(1);
  if (unclaimed.load() > 0) {
    sleepers.fetch_sub(1);
    return true;
  }
  work.wait(lock, [this] { return wake_ups > 0 || stopping; });
  if (wake_ups > 0) --wake_ups;
  return !stopping;
}

void ThreadPool::State::serve() {
  in_task = true;
  while (wait_for_work()) finish(perform_tasks());
}

// A worker that is told to wake is no sleeper any more, so that the next runs do not tell it again.
void ThreadPool::State::wake(int workers_needed) {
  const int asleep = sleepers.load();
  if (asleep == 0 || workers_needed <= static_cast<int>(workers.size()) - asleep) return;
  int told = 0;
  {
    const std::lock_guard lock(mutex);
    told = std::min(sleepers.load(), workers_needed);
    sleepers.fetch_sub(told);
    wake_ups += told;
  }
  for (int i = 0; i < told; ++i) work.notify_one();
}

// Requires: the turn, and no task claimed.
void ThreadPool::State::run_together(Run& run, int tasks) {
  current = &run;
  unfinished.store(tasks, std::memory_order_relaxed);
  unclaimed.store(tasks);
  wake(std::min(tasks - 1, have - 1));
  in_task = true;
  finish(perform_tasks());
  in_task = false;
  const auto all_done = [this] { return unfinished.load() == 0; };
  if (spin_until(spin_time(), all_done)) return;
  std::unique_lock lock(mutex);
  caller_sleeps.store(true);
  done.wait(lock, all_done);
  caller_sleeps.store(false);
}

void ThreadPool::State::stop() {
  {
    const std::lock_guard lock(mutex);
    stopping = true;
  }
  work.notify_all();
  for (std::thread& worker : workers) worker.join();
  workers.clear();
  sleepers.store(0);
  wake_ups = 0;
  stopping = false;
  have = 1;
}

// Where the system refuses more threads, the pool goes on with those that it has.
void ThreadPool::State::resize(int threads) {
  stop();
  const bool enough_processors = threads <= internal::available_processors();
  spin.store(enough_processors ? std::chrono::nanoseconds(kSpin).count() : 0, std::memory_order_relaxed);
  const BlockSignals no_signals;
  try {
    for (; have < threads; ++have) workers.emplace_back([this] { serve(); });
  } catch (const std::system_error& error) {
    log(LogLevel::warning, "[ThreadPool] cannot start more than " + std::to_string(have) + " of " +
                               std::to_string(threads) + " threads: " + error.what());
    wanted.compare_exchange_strong(threads, have);
  }
}

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>(check_threads("ThreadPool", threads))) {
  count_forks();
}

ThreadPool::~ThreadPool() {
  if (state_->forked()) {
    static_cast<void>(state_.release());  // its threads' handles can neither be joined nor destroyed
  } else {
    state_->stop();
  }
}

int ThreadPool::threads() const { return state_->forked() ? 1 : state_->wanted.load(std::memory_order_relaxed); }

void ThreadPool::run_erased(int tasks, Call call, void* context) {
  State& state = *state_;
  Run run(tasks, call, context);
  const bool alone = in_task || state.forked() || (tasks <= 1) || state.wanted.load(std::memory_order_relaxed) == 1;
  // While another thread has the turn, this one does its tasks itself, and looks after each whether the turn is free.
  int left = tasks;
  std::unique_lock turn(state.turn, std::defer_lock);
  while (left > 0 && (alone || !turn.try_lock())) run.perform(--left);
  if (left > 0) {
    const int wanted = state.wanted.load(std::memory_order_relaxed);
    if (wanted != state.have) state.resize(wanted);
    state.run_together(run, left);
  }
  run.rethrow();
}

namespace {

std::atomic<int> process_threads{0};  // 0: nobody has said

}  // namespace

// Never destroyed: other threads may still run kernels while the process exits.
ThreadPool& ThreadPool::process() {
  static ThreadPool& pool = *new ThreadPool(process_threads != 0 ? process_threads.load() : default_threads());
  return pool;
}

void ThreadPool::set_process_threads(int threads) {
  process_threads = check_threads("ThreadPool::set_process_threads", threads);
  process().state_->wanted.store(threads);
}

}  // namespace reprise
