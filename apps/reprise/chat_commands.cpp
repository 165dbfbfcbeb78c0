#include "apps/reprise/chat_commands.h"

#include <string_view>

namespace reprise::app {
namespace {

struct CommandName {
  std::string_view name;
  ChatCommand command;
  std::string_view argument;  // what stands after it in the help; empty: takes none
  std::string_view help;
};

constexpr CommandName kCommands[] = {
    {"/help", ChatCommand::help, "", "this list (also h)"},
    {"/reset", ChatCommand::reset, "", "begins a new conversation (also r)"},
    {"/undo", ChatCommand::undo, "", "takes back the last message and its answer"},
    {"/system", ChatCommand::system, "TEXT", "sets the system prompt and begins anew; without TEXT: none"},
    {"/save", ChatCommand::save, "FILE", "writes the conversation and all that was computed for it"},
    {"/load", ChatCommand::load, "FILE", "goes on with a saved conversation"},
    {"/stats", ChatCommand::stats, "", "what is cached, and the last answer's figures"},
    {"/quit", ChatCommand::quit, "", "leaves (also q, Ctrl-D, or Ctrl-C twice)"},
};

constexpr std::string_view kBlank = " \t\r\n";

std::string trim(std::string_view text) {
  const auto first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return std::string(text.substr(first, text.find_last_not_of(kBlank) - first + 1));
}

}  // namespace

ChatInput parse_chat_input(const std::string& line) {
  const auto trimmed = trim(line);
  if (trimmed.empty()) return {};
  if (trimmed == "h") return {ChatCommand::help};
  if (trimmed == "r") return {ChatCommand::reset};
  if (trimmed == "q") return {ChatCommand::quit};
  if (trimmed[0] != '/') return {ChatCommand::message, line};
  if (trimmed.starts_with("//")) return {ChatCommand::message, line.substr(line.find('/') + 1)};
  const auto end = trimmed.find_first_of(kBlank);
  const auto name = trimmed.substr(0, end);
  const auto argument = end == std::string::npos ? "" : trim(trimmed.substr(end));
  for (const auto& known : kCommands) {
    if (name != known.name) continue;
    if (known.argument.empty() && !argument.empty()) break;
    return {known.command, argument};
  }
  return {ChatCommand::unknown, trimmed};
}

std::string chat_help() {
  std::string text;
  for (const auto& command : kCommands) {
    std::string left = "  " + std::string(command.name);
    if (!command.argument.empty()) left += " " + std::string(command.argument);
    left.resize(16, ' ');
    text += left + std::string(command.help) + "\n";
  }
  return text +
         "  //TEXT        sends /TEXT to the model\n"
         "On a terminal, Alt-Enter begins a new line; pasted text may have several. Ctrl-C stops an answer.\n";
}

}  // namespace reprise::app
