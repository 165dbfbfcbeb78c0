// A conversation in thirty lines: each turn computes only its new tokens.
// usage: example_chat MODEL
#include <iostream>
#include <string>

#include "reprise/generate/chat_session.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: example_chat MODEL (a model folder or a .gguf file)\n";
    return 2;
  }
  try {
    const reprise::LoadedModel model = reprise::load(argv[1]);
    reprise::ChatSession session(model, {.generate = {.max_tokens = 48}});
    for (std::string line; std::getline(std::cin, line);) {
      const auto answer =
          session.say(line, {.on_text = [](std::string_view text) { std::cout << text << std::flush; }});
      std::cout << "\n";
      std::cerr << "(" << answer.stats.cached_tokens << " of " << answer.stats.prompt_tokens
                << " prompt tokens came from the cache)\n";
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
