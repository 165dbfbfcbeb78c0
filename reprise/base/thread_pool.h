// One process-wide pool of threads for kernels: cheap to enter (workers spin for a short, bounded time before they
// sleep), and results never depend on how many threads there are.
// Threads: run may be called from any thread; calls from several threads take turns, calls from within a task run
// inline.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace reprise {

class ThreadPool {
 public:
  // The pool that all kernels share, made at first use: as many threads as set_process_threads said, else
  // $REPRISE_NUM_THREADS, else the processors that this process may run on.
  static ThreadPool& process();
  // Takes effect at the next run. Throws: invalid_argument unless 1 ≤ threads ≤ 1024.
  static void set_process_threads(int threads);

  explicit ThreadPool(int threads);  // the calling thread is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // task(i) once for each i in [0, tasks), in any order and on any thread; returns when all are done, and all their
  // writes are visible. Tasks are handed out one by one, so uneven ones balance. The first exception is rethrown after
  // the others have ended. With one task or one thread it runs here.
  template <typename Task>
  void run(int tasks, Task&& task) {
    run_erased(
        tasks, [](void* context, int i) { (*static_cast<std::remove_reference_t<Task>*>(context))(i); },
        const_cast<void*>(static_cast<const void*>(&task)));
  }

 private:
  using Call = void (*)(void* context, int task);
  void run_erased(int tasks, Call call, void* context);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace reprise
