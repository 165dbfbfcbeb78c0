// The subcommands of `reprise`: each adds its flags to the command line and, when chosen, leaves what is to be run.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace reprise::app {

// Returns: the program's exit code. Throws: UsageError (exit code 2), OutputClosed (a clean end), others (exit code 1).
using Action = std::function<int()>;

void add_chat(CLI::App& app, Action& chosen);
void add_generate(CLI::App& app, Action& chosen);
void add_cache_prompt(CLI::App& app, Action& chosen);
void add_inspect(CLI::App& app, Action& chosen);
void add_bench(CLI::App& app, Action& chosen);
void add_bench_engine(CLI::App& bench, Action& chosen);  // a subcommand of bench
void add_pull(CLI::App& app, Action& chosen);
void add_quantize(CLI::App& app, Action& chosen);

}  // namespace reprise::app
