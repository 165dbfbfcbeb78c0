// `reprise inspect FILE`: says what a model or a prompt-cache file holds.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>

#include "apps/reprise/command.h"
#include "apps/reprise/inspect_report.h"
#include "apps/reprise/model_path.h"
#include "apps/reprise/output.h"
#include "reprise/base/error.h"
#include "reprise/storage/safetensors.h"

namespace reprise::app {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kExcerptBytes = 72;

bool begins_with(const fs::path& file, const std::string& magic) {
  std::string begin(magic.size(), '\0');
  std::ifstream stream(file, std::ios::binary);
  stream.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  return stream.gcount() == static_cast<std::streamsize>(begin.size()) && begin == magic;
}

// A prompt cache's metadata keys are paths that begin with a number; those of weights are words.
bool is_prompt_cache(const SafetensorsHeader& header) {
  for (const auto& [key, value] : header.metadata) {
    const auto dot = key.find('.');
    if (dot == 1 && key[0] >= '0' && key[0] <= '2') return true;
  }
  return false;
}

// A cache may be named as `/save` and `--prompt-cache-file` take it: they add the suffix.
fs::path resolve(const std::string& name) {
  const fs::path saved = name + ".safetensors";
  std::error_code ignored;
  return !fs::exists(name, ignored) && fs::is_regular_file(saved, ignored) ? saved : fs::path(resolve_model(name));
}

Report inspect(const std::string& name) {
  const auto path = resolve(name);
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return inspect_model_folder(path);
  require_regular(path);
  if (path.extension() == ".gguf" || begins_with(path, "GGUF")) return inspect_gguf(path);
  if (path.extension() != ".safetensors") {
    throw Error(ErrorCode::unsupported,
                path.string() + " is no model folder, .gguf file or .safetensors file: nothing is known about it");
  }
  if (is_prompt_cache(read_safetensors_header(path))) return inspect_prompt_cache(path);
  return inspect_safetensors(path);
}

}  // namespace

std::string Report::text() const {
  std::string out;
  for (const auto& [label, text] : lines_) {
    std::string padded = label;
    padded.resize(std::max<std::size_t>(15, padded.size() + 1), ' ');
    out += padded + one_line(text) + "\n";
  }
  return out;
}

void require_regular(const fs::path& file) {
  std::error_code error;
  const auto status = fs::status(file, error);
  if (status.type() == fs::file_type::not_found) {
    throw Error(ErrorCode::not_found, "there is no file " + file.string());
  }
  if (status.type() == fs::file_type::none) {
    throw Error(ErrorCode::internal, "cannot look at " + file.string() + ": " + error.message());
  }
  if (!fs::is_regular_file(status)) {
    throw Error(ErrorCode::invalid_argument, "needs a regular file, but got " + file.string());
  }
}

std::string format_bytes(std::uint64_t bytes) {
  if (bytes < 1000) return std::to_string(bytes) + " bytes";
  constexpr const char* kUnits[] = {"kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes) / 1000;
  std::size_t unit = 0;
  while (value >= 999.95 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

std::string format_count(std::uint64_t count) {
  char text[32];
  if (count < 1000000) return std::to_string(count);
  const bool billions = count >= 1000000000;
  std::snprintf(text, sizeof text, "%.1f %s", static_cast<double>(count) / (billions ? 1e9 : 1e6),
                billions ? "billion" : "million");
  return text;
}

std::string excerpt(const std::string& text) {
  auto line = one_line(text);
  if (line.size() > kExcerptBytes) {
    std::size_t end = kExcerptBytes;
    while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80) --end;  // no half characters
    line = line.substr(0, end) + "…";
  }
  return "\"" + line + "\"";
}

void add_inspect(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("inspect", "Says what a model or a prompt-cache file holds");
  auto file = std::make_shared<std::string>();
  command->add_option("FILE", *file, "A model (folder, .gguf, hub id in the local cache) or a .safetensors file")
      ->required()
      ->type_name("");
  command->callback([file, &chosen] {
    chosen = [file] {
      write_answer(inspect(*file).text());
      return kDone;
    };
  });
}

}  // namespace reprise::app
