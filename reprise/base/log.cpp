#include "reprise/base/log.h"

#include <memory>
#include <mutex>
#include <utility>

namespace reprise {
namespace {

struct Hook {
  std::mutex mutex;
  std::shared_ptr<const LogHook> call;  // guarded by mutex
};

Hook& hook() {
  static Hook instance;
  return instance;
}

}  // namespace

void set_log_hook(LogHook call) {
  auto next = call ? std::make_shared<const LogHook>(std::move(call)) : nullptr;
  std::lock_guard lock(hook().mutex);
  hook().call = std::move(next);
}

// The hook runs outside the lock, so that a hook may itself log or replace the hook.
void log(LogLevel level, const std::string& message) {
  std::shared_ptr<const LogHook> call;
  {
    std::lock_guard lock(hook().mutex);
    call = hook().call;
  }
  if (call) (*call)(level, message);
}

}  // namespace reprise
