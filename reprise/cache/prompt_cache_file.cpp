#include "reprise/cache/prompt_cache_file.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/file_digest.h"
#include "reprise/cache/file_extension.h"
#include "reprise/cache/file_layout.h"
#include "reprise/cache/layer_codec.h"
#include "reprise/storage/array_bytes.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"

namespace reprise {

namespace mx = mlx::core;
using internal::FileContent;
using internal::ParsedFile;
using internal::Tensors;

namespace {

constexpr std::string_view kSuffix = ".safetensors";

// Evaluated, in runs that are worth hashing and writing one by one.
void make_readable(Tensors& tensors) {
  std::vector<mx::array> arrays;
  for (const auto& [name, tensor] : tensors) arrays.push_back(tensor);
  mx::eval(std::move(arrays));
  for (auto& [name, tensor] : tensors) tensor = with_long_runs(tensor);
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

// Everything but the evaluation. `actual_digest` is asked where the file states one; none: it is right.
LoadedPromptCache decode(const Safetensors& file, const std::function<std::string()>& actual_digest) {
  ParsedFile parsed = internal::parse_file(file.tensors, file.header.metadata);
  const std::optional<std::string> stated = internal::stated_digest(parsed.sentinel);
  if (stated && actual_digest) {
    const std::string actual = actual_digest();
    if (actual != *stated) {
      throw Error(ErrorCode::corrupt_data, "the content's digest must be " + *stated + ", but got " + actual);
    }
  }
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

// With errors that name the file.
template <typename Work>
auto naming(const std::filesystem::path& file, Work work) {
  try {
    return work();
  } catch (const Error& error) {
    constexpr std::string_view kOrigin = "[load_prompt_cache] ";
    std::string_view what = error.what();
    if (what.starts_with(kOrigin)) what.remove_prefix(kOrigin.size());
    throw Error(error.code(), std::string(kOrigin) + file.string() + ": " + std::string(what));
  }
}

// Whether two evaluated arrays of one shape hold the same bytes. `whole` lies in one run.
bool same_bytes(const mx::array& array, const mx::array& whole) {
  bool same = true;
  const char* at = whole.nbytes() > 0 ? whole.data<char>() : nullptr;
  for_each_run(array, [&](std::span<const std::byte> run) {
    same = same && std::memcmp(run.data(), at, run.size()) == 0;
    at += run.size();
  });
  return same;
}

// Reads back what was written: it must load, and be `header` and `tensors` byte for byte.
void verify(const std::filesystem::path& file, const SafetensorsHeader& header, const Tensors& tensors) {
  const Safetensors written = read_safetensors(file, ReadMode::memory_map);
  naming(file, [&] {
    bool same = written.header.tensors == header.tensors && written.header.metadata == header.metadata;
    for (auto it = tensors.begin(); it != tensors.end() && same; ++it) {
      same = same_bytes(it->second, written.tensors.at(it->first));
    }
    if (!same) throw Error(ErrorCode::corrupt_data, "the file must read back as it was written, but got other bytes");
    decode(written, nullptr);
  });
}

}  // namespace

std::string save_prompt_cache(const std::string& file, const PromptCache& cache,
                              const std::map<std::string, std::string>& metadata, const SaveOptions& options) {
  const std::string target = file.ends_with(kSuffix) ? file : file + std::string(kSuffix);
  const auto& tokens = options.extension.tokens;
  check_prompt_cache(cache, tokens ? std::optional(static_cast<int>(tokens->size())) : std::nullopt);

  FileContent content = encode(cache, metadata, options);
  make_readable(content.tensors);
  SafetensorsHeader header = plan_safetensors(content.tensors, content.metadata);

  ReplaceOptions replace;
  replace.file_system = options.file_system;
  if (options.verify) {
    replace.verify = [&](const std::filesystem::path& temporary) { verify(temporary, header, content.tensors); };
  }
  const auto write = [&](WritableFile& output) {
    if (options.layout != PromptCacheLayout::current) {
      append_safetensors(output, header, content.tensors);
      return;
    }
    // The digest stands before what it is of: its place is filled in when the rest is written.
    internal::FileDigest digest(header);
    for (const TensorRecord* record : in_data_order(header)) digest.add(content.tensors.at(record->name));
    append_safetensors(output, header, content.tensors);
    internal::fill_digest(header.metadata, digest.finish());
    overwrite_safetensors_header(output, header);
  };
  replace_file(target, write, replace);
  return target;
}

LoadedPromptCache load_prompt_cache_file(const std::string& file) {
  if (!file.ends_with(kSuffix)) {
    throw Error(ErrorCode::invalid_argument,
                "[load_prompt_cache] the name must end in .safetensors, but got \"" + file + "\"");
  }
  std::optional<internal::FileDigest> digest;
  bool fails = false;  // what is wrong is found again when the file is decoded
  const Safetensors content =
      read_safetensors(file, ReadMode::copy, [&](const SafetensorsHeader& header, const mx::array& tensor) {
        if (fails) return;
        try {
          if (!digest) digest.emplace(header);
        } catch (const Error&) {
          fails = true;
          return;
        }
        digest->add(tensor);
      });
  return naming(file, [&] {
    LoadedPromptCache loaded = decode(content, [&] {
      if (!digest) digest.emplace(content.header);
      return digest->finish();
    });
    loaded.cache.eval();
    return loaded;
  });
}

PromptCache load_prompt_cache(const std::string& file, std::map<std::string, std::string>* metadata) {
  LoadedPromptCache loaded = load_prompt_cache_file(file);
  if (metadata) *metadata = std::move(loaded.metadata);
  return std::move(loaded.cache);
}

}  // namespace reprise
