// Many answers over one model, computed together: one is streamed, a long one is cancelled from another thread, and a
// question that was asked before finds its prompt computed.
// usage: example_engine MODEL
#include <iostream>
#include <string>
#include <thread>

#include "reprise/engine/engine.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: example_engine MODEL (a model folder or a .gguf file)\n";
    return 2;
  }
  try {
    const reprise::LoadedModel model = reprise::load(argv[1]);
    reprise::Engine engine(model);
    const auto ask = [&](const std::string& text, int max_tokens) {
      return engine.submit({.prompt = model.tokenizer.encode(text), .max_tokens = max_tokens, .ignore_eos = true});
    };
    const std::string question = "Question: What is the capital of Norway?\nAnswer:";
    reprise::Generation story = ask("Once upon a time", 1000);
    reprise::Generation answer = ask(question, 24);
    while (const auto event = answer.next()) std::cout << event->text << std::flush;

    std::thread([&] { story.cancel(); }).join();
    const reprise::GenerationResult cut = story.wait();
    std::cout << "\nThe story: " << to_string(cut.reason) << " after " << cut.tokens.size() << " tokens.\n";

    const reprise::SequenceStats stats = ask(question, 1).wait().stats;
    std::cout << stats.cached_tokens << " of " << stats.prompt_tokens << " prompt tokens came from the cache.\n";
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
