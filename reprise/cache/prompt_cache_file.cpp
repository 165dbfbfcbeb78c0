#include "reprise/cache/prompt_cache_file.h"

#include <filesystem>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/file_extension.h"
#include "reprise/cache/file_layout.h"
#include "reprise/cache/layer_codec.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"

namespace reprise {

namespace mx = mlx::core;
using internal::FileContent;
using internal::ParsedFile;
using internal::Tensors;

namespace {

constexpr std::string_view kSuffix = ".safetensors";

// Evaluated, and bytes in row-major order: what the digest and the writer need.
void make_dense(Tensors& tensors) {
  std::vector<mx::array> arrays;
  for (auto& [name, tensor] : tensors) {
    tensor = mx::contiguous(tensor);
    arrays.push_back(tensor);
  }
  mx::eval(std::move(arrays));
}

FileContent encode(const PromptCache& cache, const std::map<std::string, std::string>& metadata,
                   const SaveOptions& options) {
  if (options.layout == PromptCacheLayout::current) {
    internal::FileExtension extension{options.extension, {}};
    FileContent content =
        internal::encode_current(internal::encode_layers(cache, options.portable, extension.layers), metadata);
    internal::add_extension(extension, cache.size(), content);
    return content;
  }
  const PromptCacheExtension& extension = options.extension;
  if (extension.tokens || !extension.model_fingerprint.empty() || !extension.app_json.empty()) {
    throw Error(ErrorCode::unsupported,
                "[save_prompt_cache] the legacy layout must be without an extension, but got one");
  }
  return internal::encode_legacy(internal::encode_legacy_layers(cache, options.portable), metadata);
}

void check_digest(const std::string& actual, const std::optional<std::string>& expected,
                  const std::optional<std::string>& stated) {
  for (const auto* wanted : {&expected, &stated}) {
    if (!*wanted || actual == **wanted) continue;
    throw Error(ErrorCode::corrupt_data,
                "[load_prompt_cache] the content's digest must be " + **wanted + ", but got " + actual);
  }
}

// Everything but the evaluation. `expected_digest`: what the file was written with, when that is known.
LoadedPromptCache decode(const Safetensors& file, const std::optional<std::string>& expected_digest) {
  ParsedFile parsed = internal::parse_file(file.tensors, file.header.metadata);
  const std::optional<std::string> stated = internal::stated_digest(parsed.sentinel);
  if (expected_digest || stated)
    check_digest(internal::compute_digest(file.header, file.tensors), expected_digest, stated);
  LoadedPromptCache loaded;
  loaded.layout = parsed.layout;
  internal::FileExtension extension = internal::read_extension(parsed);
  loaded.cache = parsed.layout == PromptCacheLayout::current ? internal::decode_layers(parsed.layers, extension.layers)
                                                             : internal::decode_legacy_layers(parsed.layers);
  loaded.extension = std::move(extension.callers);
  if (loaded.extension.tokens) {
    try {
      check_prompt_cache(loaded.cache, static_cast<int>(loaded.extension.tokens->size()));
    } catch (const Error& error) {
      throw Error(ErrorCode::corrupt_data, std::string("the token record does not fit: ") + error.what());
    }
  }
  loaded.metadata = std::move(parsed.user_metadata);
  return loaded;
}

LoadedPromptCache read(const std::filesystem::path& file, ReadMode mode,
                       const std::optional<std::string>& expected_digest) {
  const Safetensors content = read_safetensors(file, mode);
  try {
    return decode(content, expected_digest);
  } catch (const Error& error) {
    constexpr std::string_view kOrigin = "[load_prompt_cache] ";
    std::string_view what = error.what();
    if (what.starts_with(kOrigin)) what.remove_prefix(kOrigin.size());
    throw Error(error.code(), std::string(kOrigin) + file.string() + ": " + std::string(what));
  }
}

}  // namespace

std::string save_prompt_cache(const std::string& file, const PromptCache& cache,
                              const std::map<std::string, std::string>& metadata, const SaveOptions& options) {
  const std::string target = file.ends_with(kSuffix) ? file : file + std::string(kSuffix);
  const auto& tokens = options.extension.tokens;
  check_prompt_cache(cache, tokens ? std::optional(static_cast<int>(tokens->size())) : std::nullopt);

  FileContent content = encode(cache, metadata, options);
  make_dense(content.tensors);
  SafetensorsHeader header = plan_safetensors(content.tensors, content.metadata);
  const std::string digest = internal::compute_digest(header, content.tensors);
  if (options.layout == PromptCacheLayout::current) internal::fill_digest(header.metadata, digest);

  ReplaceOptions replace;
  replace.file_system = options.file_system;
  if (options.verify) {
    replace.verify = [&](const std::filesystem::path& temporary) { read(temporary, ReadMode::memory_map, digest); };
  }
  replace_file(
      target, [&](WritableFile& output) { append_safetensors(output, header, content.tensors); }, replace);
  return target;
}

LoadedPromptCache load_prompt_cache_file(const std::string& file) {
  if (!file.ends_with(kSuffix)) {
    throw Error(ErrorCode::invalid_argument,
                "[load_prompt_cache] the name must end in .safetensors, but got \"" + file + "\"");
  }
  LoadedPromptCache loaded = read(file, ReadMode::copy, std::nullopt);
  loaded.cache.eval();
  return loaded;
}

PromptCache load_prompt_cache(const std::string& file, std::map<std::string, std::string>* metadata) {
  LoadedPromptCache loaded = load_prompt_cache_file(file);
  if (metadata) *metadata = std::move(loaded.metadata);
  return std::move(loaded.cache);
}

}  // namespace reprise
