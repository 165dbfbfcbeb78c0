#include "reprise/storage/model_files.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/storage/gguf_model.h"
#include "reprise/storage/mapped_file.h"
#include "reprise/storage/model_folder.h"
#include "reprise/storage/safetensors_header.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;

// Feeds values with their lengths, so that different lists of values never give the same bytes. Gathers small ones.
class FieldHash {
 public:
  void add(std::string_view text) {
    add(text.size());
    add_raw(text.data(), text.size());
  }
  void add(std::uint64_t number) { add_raw(&number, sizeof(number)); }
  void add_strings(const std::vector<std::string>& texts) {
    add(texts.size());
    for (const std::string& text : texts) add(text);
  }
  template <typename T>
  void add_numbers(const std::vector<T>& numbers) {
    add(numbers.size());
    add_raw(numbers.data(), numbers.size() * sizeof(T));
  }
  void add_raw(const void* data, std::size_t size_bytes) {
    if (gathered_.size() + size_bytes > kGatheredBytes) flush();
    if (size_bytes > kGatheredBytes) {
      hash_.update(data, size_bytes);
    } else {
      gathered_.append(static_cast<const char*>(data), size_bytes);
    }
  }
  std::string hex_digest() {
    flush();
    return hash_.hex_digest();
  }

 private:
  static constexpr std::size_t kGatheredBytes = 1U << 16U;

  void flush() {
    hash_.update(gathered_);
    gathered_.clear();
  }

  Sha256 hash_;
  std::string gathered_;
};

void add_tokenizer(FieldHash& hash, const TokenizerData& tokenizer) {
  hash.add(tokenizer.tokenizer_json);
  hash.add(tokenizer.chat_template);
  hash.add_strings({tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token});
  hash.add_numbers(tokenizer.eos_token_ids);
  if (!tokenizer.gguf) return;
  hash.add(tokenizer.gguf->model);
  hash.add(tokenizer.gguf->pre);
  hash.add_strings(tokenizer.gguf->tokens);
  hash.add_strings(tokenizer.gguf->merges);
  hash.add_numbers(tokenizer.gguf->scores);
  hash.add_numbers(tokenizer.gguf->token_types);
}

// First, last and two pieces between: enough to tell fine-tunes apart, few enough to leave most pages unread.
void add_sample(FieldHash& hash, const char* data, std::size_t size_bytes) {
  constexpr std::size_t kPieceBytes = 256;
  constexpr std::size_t kPieces = 4;
  if (size_bytes <= kPieces * kPieceBytes) {
    hash.add_raw(data, size_bytes);
    return;
  }
  for (std::size_t i = 0; i < kPieces; ++i) {
    hash.add_raw(data + (size_bytes - kPieceBytes) / (kPieces - 1) * i, kPieceBytes);
  }
}

using AddBytes = void (*)(FieldHash& hash, const char* data, std::size_t size_bytes);

void add_all(FieldHash& hash, const char* data, std::size_t size_bytes) { hash.add_raw(data, size_bytes); }

std::string fingerprint_of(const ModelFiles& files, AddBytes add_bytes) {
  FieldHash hash;
  hash.add(files.config_json);
  add_tokenizer(hash, files.tokenizer);
  hash.add(files.weights.size());
  for (const auto& [name, array] : files.weights) {
    hash.add(name);
    hash.add(internal::safetensors_dtype(array.dtype()));
    hash.add(array.ndim());
    for (const auto dim : array.shape()) hash.add(static_cast<std::uint64_t>(dim));
    add_bytes(hash, array.data<char>(), array.nbytes());
  }
  return hash.hex_digest();
}

bool is_gguf(const fs::path& file) {
  const internal::InputFile input(file, "read_model_files");
  char magic[4] = {};
  if (input.size_bytes() >= sizeof(magic)) input.read(0, std::as_writable_bytes(std::span(magic)));
  return std::memcmp(magic, "GGUF", sizeof(magic)) == 0;
}

}  // namespace

ModelFiles read_model_files(const fs::path& path, const std::function<void(const TokenizerData&)>& beside_weights) {
  std::error_code failure;
  const fs::file_status status = fs::status(path, failure);
  if (!fs::exists(status)) {
    throw Error(ErrorCode::not_found, "[read_model_files] there is no model at " + path.string());
  }
  if (!fs::is_directory(status) && !is_gguf(path)) {
    const bool named_gguf = path.extension() == ".gguf";
    throw Error(named_gguf ? ErrorCode::corrupt_data : ErrorCode::unsupported,
                "[read_model_files] a model is a folder or a GGUF file, but got " + path.string() +
                    (named_gguf ? ", which does not begin with \"GGUF\"" : ""));
  }
  ModelFiles files;
  if (fs::is_directory(status)) {
    files = internal::read_model_folder(path);
    if (beside_weights) beside_weights(files.tokenizer);
  } else {
    files = internal::read_gguf_model(path, beside_weights);
  }
  files.fingerprint = fingerprint_of(files, add_sample);
  return files;
}

std::string full_fingerprint(const ModelFiles& files) { return fingerprint_of(files, add_all); }

}  // namespace reprise
