// Process a long prompt once, keep it in a file, and ask about it as often as you like: each question starts from a
// fork, which copies nothing. usage: example_prompt_cache MODEL FILE.safetensors
#include <filesystem>
#include <iostream>

#include "reprise/cache/prompt_cache_file.h"
#include "reprise/generate/generate.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: example_prompt_cache MODEL FILE.safetensors\n";
    return 2;
  }
  try {
    const reprise::LoadedModel model = reprise::load(argv[1]);
    const std::string file = argv[2];
    if (!std::filesystem::exists(file)) {
      const auto prompt = model.tokenizer.encode("The lighthouse keeper is called Ada. She has two cats, Ink and Fog.");
      reprise::RecordedCache document{reprise::make_prompt_cache(*model.model), {}};
      reprise::generate(model, prompt, document, {.max_tokens = 0});
      reprise::SaveOptions options;
      options.extension.tokens = document.tokens;
      options.extension.model_fingerprint = model.fingerprint;
      reprise::save_prompt_cache(file, document.cache, {{"model", model.path}}, options);
      std::cerr << "processed " << prompt.size() << " tokens and saved them\n";
    }

    auto loaded = reprise::load_prompt_cache_file(file);
    const reprise::RecordedCache document{std::move(loaded.cache), loaded.extension.tokens.value()};
    for (const char* question : {" The keeper's name is", " The cats are called"}) {
      reprise::RecordedCache fork = document.fork();
      const auto answer = reprise::generate(model, model.tokenizer.encode(question), fork, {.max_tokens = 8});
      std::cout << question << answer.text << "\n";
      std::cerr << "(" << answer.stats.cached_tokens << " tokens reused)\n";
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
