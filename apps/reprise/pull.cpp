// `reprise pull ORG/NAME[@REV]`: fetches a model into the local Hugging Face cache and prints where it lies.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "apps/reprise/command.h"
#include "apps/reprise/interrupts.h"
#include "apps/reprise/output.h"
#include "apps/reprise/pull_progress.h"
#include "reprise/base/error.h"
#include "reprise/hub/pull.h"

namespace reprise::app {
namespace {

struct PullCommand {
  std::string model;
  std::vector<std::string> include;
};

int run(const PullCommand& command) {
  const auto repository = parse_hub_repository(command.model);
  if (!repository) {
    throw UsageError("a model's name has the form ORG/NAME or ORG/NAME@REVISION, but got \"" + command.model + "\"");
  }
  Interrupts interrupts;
  PullProgressLine line;
  PullOptions options{.include = command.include};
  options.progress = [&](const PullProgress& progress) { line.update(progress); };
  options.note = [&](const std::string& text) { line.note(text); };
  options.stop = interrupts.begin_work();
  try {
    const auto folder = pull(*repository, options);
    line.finish();
    write_answer(folder.string() + "\n");
    return kDone;
  } catch (const Error& error) {
    line.finish();
    if (error.code() != ErrorCode::cancelled) throw;
    print_note("stopped; the same command goes on from here");
    return kInterrupted;
  }
}

}  // namespace

void add_pull(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("pull", "Fetches a model from the Hugging Face hub into the local cache");
  auto flags = std::make_shared<PullCommand>();
  command->add_option("MODEL", flags->model, "ORG/NAME, or ORG/NAME@REVISION (a branch, tag or commit)")
      ->required()
      ->type_name("");
  command
      ->add_option("--include", flags->include,
                   "Only files of these names, with * and ?; may be given several times [configs, tokenizer and "
                   "safetensors; or the one .gguf file]")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("");
  command->footer("Access to private and gated models: $HF_TOKEN. Another server: $HF_ENDPOINT. The cache: $HF_HOME.");
  command->callback([flags, &chosen] { chosen = [flags] { return run(*flags); }; });
}

}  // namespace reprise::app
