// Telling messages from commands in what the user of a chat types.
// Threads: free functions over plain values.
#pragma once

#include <string>

namespace reprise::app {

enum class ChatCommand { message, nothing, help, reset, undo, system, save, load, stats, quit, unknown };

struct ChatInput {
  ChatCommand command = ChatCommand::nothing;
  std::string text = {};  // the message, the command's argument, or the unknown command
};

// `/name argument`, mlx-lm's `h`, `r` and `q`, or a message; `//x` is the message `/x`; blank input is nothing.
ChatInput parse_chat_input(const std::string& line);

// What /help prints.
std::string chat_help();

}  // namespace reprise::app
