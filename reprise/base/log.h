// The library never prints: it calls this hook. The default hook drops everything.
// Threads: set_log_hook and log may be called from any thread.
#pragma once

#include <functional>
#include <string>

namespace reprise {

enum class LogLevel { debug, info, warning, error };

using LogHook = std::function<void(LogLevel, const std::string& message)>;

// Replaces the process-wide hook; an empty function drops messages again.
void set_log_hook(LogHook hook);

// Hands one line, without a newline at its end, to the hook.
void log(LogLevel level, const std::string& message);

}  // namespace reprise
