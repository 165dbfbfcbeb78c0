// `reprise quantize IN OUT`: a dense model folder becomes a quantised one, which mlx-lm reads as well.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "apps/reprise/command.h"
#include "apps/reprise/flags.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/numbers.h"
#include "apps/reprise/output.h"
#include "reprise/base/error.h"
#include "reprise/models/quantize.h"
#include "reprise/storage/model_writer.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

struct QuantizeCommand {
  std::string from;
  std::string to;
  QuantizeOptions options;
  bool numbers_given = false;
};

MicroscalingFormat format_of(const std::string& text) {
  if (const auto format = find_microscaling_format(text)) return *format;
  throw UsageError("--mode must be affine, mxfp4, mxfp8 or nvfp4, but got \"" + text + "\"");
}

int run(const QuantizeCommand& command) {
  if (command.options.format && command.numbers_given) {
    throw UsageError(std::string("--bits and --group-size are fixed by --mode ") + name_of(*command.options.format));
  }
  const fs::path from = resolve_model(command.from);
  std::error_code error;
  if (!fs::is_directory(from, error)) {
    throw Error(ErrorCode::unsupported, command.from + " is no model folder: a .gguf file is quantised as it is");
  }
  // Said before the long work, not after it.
  if (fs::exists(command.to, error) && !(fs::is_directory(command.to, error) && fs::is_empty(command.to, error))) {
    throw Error(ErrorCode::failed_precondition, command.to + " exists: name a folder that does not");
  }
  const auto quantized = quantize_model(read_model_files(from), command.options);
  write_model_folder(command.to, {quantized.config_json, quantized.weights, from});
  char text[96];
  std::snprintf(text, sizeof text, "%.2f bits per weight, %zu parameters", quantized.bits_per_weight,
                quantized.num_parameters);
  print_note(text);
  write_answer(command.to + "\n");
  return kDone;
}

}  // namespace

void add_quantize(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("quantize", "Makes a quantised model folder of a dense one");
  auto flags = std::make_shared<QuantizeCommand>();
  command->add_option("IN", flags->from, "A model folder, or a hub id in the local cache")->required()->type_name("");
  command->add_option("OUT", flags->to, "The folder to make")->required()->type_name("");
  add_flag_with_value(*command, {"--bits,--q-bits", "2, 3, 4, 5, 6 or 8 [4]"}, [flags](const std::string& text) {
    flags->options.bits = parse_choice("--bits", text, {2, 3, 4, 5, 6, 8});
    flags->numbers_given = true;
  });
  add_flag_with_value(*command, {"--group-size,--q-group-size", "Numbers that share a scale: 32, 64 or 128 [64]"},
                      [flags](const std::string& text) {
                        flags->options.group_size = parse_choice("--group-size", text, {32, 64, 128});
                        flags->numbers_given = true;
                      });
  add_flag_with_value(*command, {"--mode,--q-mode", "affine, mxfp4, mxfp8 or nvfp4 [affine]"},
                      [flags](const std::string& text) {
                        flags->options.format.reset();
                        if (text != "affine") flags->options.format = format_of(text);
                      });
  add_flag_with_value(*command, {"--dtype", "Of scales and of what stays dense [as stored]"},
                      [flags](const std::string& text) { flags->options.dtype = parse_dtype("--dtype", text); });
  command->callback([flags, &chosen] { chosen = [flags] { return run(*flags); }; });
}

}  // namespace reprise::app
