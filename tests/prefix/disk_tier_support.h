// What the tests of the disk tier keep in it: content that says for which prefix it was made, so that whatever is read
// back can be judged by the question alone.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "mlx/mlx.h"
#include "reprise/base/sha256.h"
#include "reprise/prefix/tiers/disk_tier.h"

namespace reprise::testing {

inline std::string prefix_text(const std::string& space, std::span<const TokenId> tokens) {
  std::string text = space + ":";
  for (const TokenId token : tokens) text += " " + std::to_string(token);
  return sha256_hex(text);
}

// A block of tokens [begin, tokens.size()), or a checkpoint (begin == tokens.size()).
struct FakeContent final : Stored {
  std::string before;       // of the tokens before it
  Tokens own;               // behind them
  std::size_t numbers = 0;  // that it carries besides
  std::size_t nbytes() const override { return 4 * (own.size() + numbers); }
};

inline StoredRef fake_content(const std::string& space, std::span<const TokenId> tokens, int begin,
                              std::size_t numbers = 8) {
  auto content = std::make_shared<FakeContent>();
  const auto at = static_cast<std::size_t>(begin);
  content->before = prefix_text(space, tokens.first(at));
  content->own.assign(tokens.begin() + begin, tokens.end());
  content->numbers = numbers;
  return content;
}

inline TensorFile fake_tensors(const Stored& stored) {
  const auto& content = static_cast<const FakeContent&>(stored);
  TensorFile file;
  const auto size = static_cast<int>(content.own.size());
  file.tensors.emplace("own", mlx::core::array(content.own.data(), {size}, mlx::core::int32));
  mlx::core::array numbers = mlx::core::arange(static_cast<int>(content.numbers));  // evaluated on this thread
  numbers.eval();
  file.tensors.emplace("numbers", numbers);
  file.metadata["before"] = content.before;
  return file;
}

// Whether `file` is what was made for some tokens that begin with `tokens`, from `begin` on.
inline bool fits(const TensorFile& file, const std::string& space, std::span<const TokenId> tokens, int begin) {
  const auto own = tokens.subspan(static_cast<std::size_t>(begin));
  const auto before = file.metadata.find("before");
  const auto stored = file.tensors.find("own");
  if (before == file.metadata.end() || stored == file.tensors.end()) return false;
  if (before->second != prefix_text(space, tokens.first(static_cast<std::size_t>(begin)))) return false;
  if (stored->second.size() < own.size()) return false;
  return own.empty() || std::memcmp(stored->second.data<TokenId>(), own.data(), own.size() * sizeof(TokenId)) == 0;
}

enum class Answer { right, missed, wrong };

// Reads everything that find() names.
inline Answer read_all(DiskTier& tier, const std::string& space, std::span<const TokenId> tokens,
                       const DiskTier::Found& found) {
  Answer answer = Answer::right;
  int at = 0;
  for (const auto& piece : found.blocks) {
    if (piece.begin != at || piece.end <= piece.begin || piece.size < piece.end - piece.begin) return Answer::wrong;
    at = piece.end;
    const auto file = tier.read(piece.file);
    if (!file) answer = Answer::missed;
    if (file && !fits(*file, space, tokens.first(static_cast<std::size_t>(piece.end)), piece.begin)) {
      return Answer::wrong;
    }
  }
  if (at != found.length) return Answer::wrong;
  if (found.checkpoint) {
    const auto file = tier.read(*found.checkpoint);
    if (!file) return Answer::missed;
    const auto prefix = tokens.first(static_cast<std::size_t>(found.length));
    if (!fits(*file, space, prefix, found.length) || file->tensors.at("own").size() != 0) return Answer::wrong;
  }
  return answer;
}

inline Answer ask(DiskTier& tier, const std::string& space, std::span<const TokenId> tokens,
                  bool needs_checkpoint = false) {
  return read_all(tier, space, tokens, tier.find(space, tokens, needs_checkpoint));
}

// All blocks of `tokens`, and with `checkpoint` the state after them.
inline void write_prefix(DiskTier& tier, const std::string& space, std::span<const TokenId> tokens, int block_size,
                         bool checkpoint = false, std::size_t numbers = 8) {
  const auto size = static_cast<int>(tokens.size());
  for (int begin = 0; begin < size; begin += block_size) {
    const auto prefix = tokens.first(static_cast<std::size_t>(std::min(size, begin + block_size)));
    tier.write_block(space, prefix, begin, fake_content(space, prefix, begin, numbers));
  }
  if (checkpoint && size > 0) tier.write_checkpoint(space, tokens, fake_content(space, tokens, size, numbers));
}

// Few different ones, so that prefixes meet.
inline Tokens random_tokens(std::mt19937& random, int max_size, int words) {
  Tokens tokens(std::uniform_int_distribution<std::size_t>(0, static_cast<std::size_t>(max_size))(random));
  for (TokenId& token : tokens) token = std::uniform_int_distribution<TokenId>(0, words - 1)(random);
  return tokens;
}

// The real one, without waiting for the device.
class HastyFileSystem : public FileSystem {
 public:
  std::pair<std::unique_ptr<WritableFile>, std::filesystem::path> create_temporary(
      const std::filesystem::path& target) override {
    auto made = real_file_system().create_temporary(target);
    made.first = std::make_unique<File>(std::move(made.first));
    return made;
  }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    real_file_system().rename(from, to);
  }
  void sync_folder(const std::filesystem::path&) override {}
  void remove(const std::filesystem::path& file) noexcept override { real_file_system().remove(file); }

 private:
  class File final : public WritableFile {
   public:
    explicit File(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}
    void append(std::span<const std::byte> bytes) override { file_->append(bytes); }
    void overwrite(std::uint64_t offset, std::span<const std::byte> bytes) override { file_->overwrite(offset, bytes); }
    void sync() override {}
    void close() override { file_->close(); }

   private:
    std::unique_ptr<WritableFile> file_;
  };
};

inline DiskTierOptions disk_options(const std::filesystem::path& folder, FileSystem* file_system, int block_size = 4) {
  DiskTierOptions options;
  options.folder = folder;
  options.block_size = block_size;
  options.file_system = file_system;
  options.to_tensors = fake_tensors;
  return options;
}

}  // namespace reprise::testing
