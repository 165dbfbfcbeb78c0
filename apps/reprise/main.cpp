// The program `reprise`: finds the subcommand, runs it, and turns what went wrong into one line and an exit code.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "apps/reprise/command.h"
#include "apps/reprise/output.h"
#include "apps/reprise/version.h"

namespace {

using namespace reprise::app;

// The arguments as CLI11 wants them, last first. `--flag=` becomes `--flag` and an empty text: CLI11 would take the
// next argument as the value.
std::vector<std::string> arguments_of(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool is_empty_flag = argument.starts_with("--") && argument.find_first_of("= ") == argument.size() - 1;
    if (is_empty_flag && argument.ends_with('=')) {
      arguments.push_back(argument.substr(0, argument.size() - 1));
      arguments.emplace_back();
    } else {
      arguments.push_back(argument);
    }
  }
  std::reverse(arguments.begin(), arguments.end());
  return arguments;
}

// Our options have no type names, which leaves a hole in CLI11's sentence.
std::string usage_text(const CLI::ParseError& error) {
  const std::string text = error.what();
  const auto hole = text.find(": 1 required  missing");
  return hole == std::string::npos ? text : text.substr(0, hole) + " needs a value";
}

// "bench engine", as far as the command line was understood.
std::string command_of(const CLI::App& app) {
  for (const auto* found : app.get_subcommands()) {
    const auto deeper = command_of(*found);
    return found->get_name() + (deeper.empty() ? "" : " " + deeper);
  }
  return "";
}

int parse_and_run(CLI::App& app, Action& chosen, int argc, char** argv, std::string& command) {
  try {
    app.parse(arguments_of(argc, argv));
  } catch (const CLI::CallForHelp& help) {
    std::ostringstream text;
    app.exit(help, text, text);
    write_answer(text.str());
    return kDone;
  } catch (const CLI::CallForVersion&) {
    write_answer(version_text() + "\n");
    return kDone;
  } catch (...) {
    command = command_of(app);
    throw;
  }
  command = command_of(app);
  if (!chosen) throw UsageError("a command is needed: chat, generate, cache-prompt, inspect, bench, pull or quantize");
  return chosen();
}

}  // namespace

int main(int argc, char** argv) {
  prepare_standard_streams();
  show_log();
  CLI::App app("Talks with language models and never computes the same prompt twice.", "reprise");
  app.set_version_flag("--version", std::string("?"), "Prints versions and the BLAS in use");
  app.require_subcommand(0, 1);
  Action chosen;
  add_chat(app, chosen);
  add_generate(app, chosen);
  add_cache_prompt(app, chosen);
  add_inspect(app, chosen);
  add_bench(app, chosen);
  add_pull(app, chosen);
  add_quantize(app, chosen);
  std::string command;
  try {
    return parse_and_run(app, chosen, argc, argv, command);
  } catch (const OutputClosed&) {
    return kDone;
  } catch (const CLI::ParseError& error) {
    print_error(command, usage_text(error) + " (--help lists the flags)");
    return kWrongUsage;
  } catch (const UsageError& error) {
    print_error(command, error.what());
    return kWrongUsage;
  } catch (const std::exception& error) {
    print_error(command, error.what());
    return kFailed;
  }
}
