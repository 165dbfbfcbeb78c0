#include "reprise/storage/model_writer.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"

namespace reprise {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::ordered_json;

std::vector<WeightMap> make_shards(const WeightMap& weights, std::uint64_t most) {
  std::vector<WeightMap> shards(1);
  std::uint64_t bytes = 0;
  for (const auto& [name, weight] : weights) {
    if (bytes > 0 && bytes + weight.nbytes() > most) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().emplace(name, weight);
    bytes += weight.nbytes();
  }
  return shards;
}

std::string shard_name(std::size_t index, std::size_t count) {
  if (count == 1) return "model.safetensors";
  std::array<char, 64> name;
  std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name.data();
}

void write_text(const fs::path& file, const std::string& text) {
  replace_file(file, [&](WritableFile& output) { output.append(std::as_bytes(std::span(text))); });
}

bool is_companion(const fs::path& file) {
  constexpr std::array<std::string_view, 8> kEndings = {".json",  ".jinja", ".txt",      ".model",
                                                        ".jsonl", ".md",    ".tiktoken", ".py"};
  const std::string name = file.filename().string();
  if (name == "config.json" || name.ends_with(".safetensors.index.json") || name.starts_with(".")) return false;
  for (const std::string_view ending : kEndings) {
    if (file.extension() == ending) return true;
  }
  return name == "LICENSE" || name == "NOTICE";
}

void write_all(const fs::path& folder, const ModelFolderContents& contents, const WriteModelOptions& options) {
  std::uint64_t total = 0;
  for (const auto& [name, weight] : contents.weights) total += weight.nbytes();
  const auto shards = make_shards(contents.weights, options.max_shard_bytes);
  Json map = Json::object();
  std::uint64_t done = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_safetensors(folder / name, shards[i], {{"format", "mlx"}});
    for (const auto& [tensor, weight] : shards[i]) {
      map[tensor] = name;
      done += weight.nbytes();
    }
    if (options.progress) options.progress(done, total);
  }
  write_text(folder / "model.safetensors.index.json",
             Json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(4) + "\n");
  write_text(folder / "config.json", contents.config_json);
  for (const auto& entry : fs::directory_iterator(contents.companions)) {
    if (entry.is_regular_file() && is_companion(entry.path())) {
      fs::copy_file(entry.path(), folder / entry.path().filename());
    }
  }
}

}  // namespace

void write_model_folder(const fs::path& folder, const ModelFolderContents& contents, const WriteModelOptions& options) {
  // "out/" names the same folder as "out".
  const fs::path target = folder.has_filename() ? folder : folder.parent_path();
  std::error_code error;
  if (fs::exists(target, error) && !(fs::is_directory(target, error) && fs::is_empty(target, error))) {
    throw Error(ErrorCode::failed_precondition,
                "[write_model_folder] " + target.string() + " exists and is not an empty folder");
  }
  const fs::path parent = target.has_parent_path() ? target.parent_path() : fs::path(".");
  if (!fs::is_directory(parent, error)) {
    throw Error(ErrorCode::not_found, "[write_model_folder] there is no folder " + parent.string());
  }
  std::string pattern = (parent / (target.filename().string() + ".XXXXXX")).string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw Error(ErrorCode::internal, "[write_model_folder] cannot make a folder in " + parent.string());
  }
  const fs::path temporary = pattern;
  try {
    fs::permissions(temporary, fs::perms(0755));
    write_all(temporary, contents, options);
    fs::remove(target);  // an empty one, if any
    fs::rename(temporary, target);
  } catch (const fs::filesystem_error& failure) {
    fs::remove_all(temporary, error);
    const bool full = failure.code() == std::errc::no_space_on_device;
    throw Error(full ? ErrorCode::resource_exhausted : ErrorCode::internal,
                std::string("[write_model_folder] ") + failure.what());
  } catch (...) {
    fs::remove_all(temporary, error);
    throw;
  }
}

}  // namespace reprise
