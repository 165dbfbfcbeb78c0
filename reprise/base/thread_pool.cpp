#include "reprise/base/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "reprise/base/error.h"

namespace reprise {

struct ThreadPool::State {
  std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  state_->workers.reserve(static_cast<std::size_t>(threads - 1));
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run_erased(int tasks, Call call, void* context) {
  for (int i = 0; i < tasks; ++i) call(context, i);
}

ThreadPool& ThreadPool::process() {
  static ThreadPool pool(1);
  return pool;
}

void ThreadPool::set_process_threads(int) {}

}  // namespace reprise
