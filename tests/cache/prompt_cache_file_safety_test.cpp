// [P6]: no failure in saving hurts the file that was there; no damage in a file becomes a cache.
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "mlx/ops.h"
#include "reprise/cache/kv_cache.h"
#include "reprise/cache/prompt_cache_file.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"
#include "tests/cache/cache_rows.h"

namespace reprise {
namespace {

namespace mx = mlx::core;
using namespace cache_test;
using Tensors = std::map<std::string, mx::array>;
using Metadata = std::map<std::string, std::string>;

enum class Fault { none, create, append, damage, overwrite, sync, close, rename };

// The real file system, but one thing goes wrong.
class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(Fault fault) : fault_(fault) {}

  std::pair<std::unique_ptr<WritableFile>, std::filesystem::path> create_temporary(
      const std::filesystem::path& target) override {
    fail_on(Fault::create);
    auto [file, path] = real_file_system().create_temporary(target);
    return {std::make_unique<File>(*this, std::move(file)), path};
  }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override {
    fail_on(Fault::rename);
    real_file_system().rename(from, to);
  }
  void sync_folder(const std::filesystem::path& folder) override { real_file_system().sync_folder(folder); }
  void remove(const std::filesystem::path& file) noexcept override { real_file_system().remove(file); }

 private:
  class File final : public WritableFile {
   public:
    File(FaultyFileSystem& owner, std::unique_ptr<WritableFile> file) : owner_(owner), file_(std::move(file)) {}
    void append(std::span<const std::byte> bytes) override {
      const bool later = appends_++ > 0;
      if (later) owner_.fail_on(Fault::append);
      if (later && owner_.fault_ == Fault::damage && !bytes.empty()) {
        std::vector<std::byte> damaged(bytes.begin(), bytes.end());
        damaged.back() ^= std::byte{1};
        file_->append(damaged);
      } else {
        file_->append(bytes);
      }
    }
    void overwrite(std::uint64_t offset, std::span<const std::byte> bytes) override {
      owner_.fail_on(Fault::overwrite);
      file_->overwrite(offset, bytes);
    }
    void sync() override {
      owner_.fail_on(Fault::sync);
      file_->sync();
    }
    void close() override {
      owner_.fail_on(Fault::close);
      file_->close();
    }

   private:
    FaultyFileSystem& owner_;
    std::unique_ptr<WritableFile> file_;
    int appends_ = 0;
  };

  void fail_on(Fault fault) const {
    if (fault == fault_) throw Error(ErrorCode::resource_exhausted, "[FaultyFileSystem] planted");
  }

  Fault fault_;
};

PromptCache filled(int layers, int length) {
  PromptCache cache = make_kv_prompt_cache(layers);
  append(cache, range(0, length));
  return cache;
}

TEST(PromptCacheFile, P6AFailedSaveLeavesTheOldFileAndNoTemporary) {
  for (const Fault fault :
       {Fault::create, Fault::append, Fault::damage, Fault::overwrite, Fault::sync, Fault::close, Fault::rename}) {
    for (const PromptCacheLayout layout : {PromptCacheLayout::current, PromptCacheLayout::legacy}) {
      // Only a digest is written afterwards.
      if (fault == Fault::overwrite && layout == PromptCacheLayout::legacy) continue;
      const TemporaryFolder folder;
      const std::string file = save_prompt_cache(folder.file("cache"), filled(1, 3));
      const std::string before = read_bytes(file);
      FaultyFileSystem faulty(fault);
      SaveOptions options;
      options.layout = layout;
      options.file_system = &faulty;
      const std::string error = error_of([&] { save_prompt_cache(file, filled(2, 5), {}, options); });
      EXPECT_NE(error, "nothing") << static_cast<int>(fault);
      EXPECT_EQ(read_bytes(file), before);
      EXPECT_EQ(folder.names(), std::vector<std::string>{"cache.safetensors"});
      EXPECT_EQ(load_prompt_cache(file)[0].length(), 3);
    }
  }
}

TEST(PromptCacheFile, P6WithoutVerifyingDamageIsFoundOnLoad) {
  const TemporaryFolder folder;
  FaultyFileSystem faulty(Fault::damage);
  SaveOptions options;
  options.file_system = &faulty;
  options.verify = false;
  const std::string file = save_prompt_cache(folder.file("cache"), filled(2, 5), {}, options);
  EXPECT_EQ(error_of([&] { load_prompt_cache(file); }).substr(0, 12), "corrupt_data");
}

TEST(PromptCacheFile, P6TheOldFileIsReplacedAndOthersStay) {
  const TemporaryFolder folder;
  const std::string file = save_prompt_cache(folder.file("cache"), filled(1, 3));
  write_bytes(folder.file("other"), "x");
  FaultyFileSystem sound(Fault::none);
  SaveOptions options;
  options.file_system = &sound;
  save_prompt_cache(file, filled(2, 5), {}, options);
  EXPECT_EQ(load_prompt_cache(file).size(), 2u);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"cache.safetensors", "other"}));
}

TEST(PromptCacheFile, P6TruncationAtAnyByteIsAnError) {
  for (const PromptCacheLayout layout : {PromptCacheLayout::current, PromptCacheLayout::legacy}) {
    const TemporaryFolder folder;
    SaveOptions options;
    options.layout = layout;
    if (layout == PromptCacheLayout::current) options.extension.tokens = Tokens{7, 8, 9};
    const std::string whole = read_bytes(save_prompt_cache(folder.file("cache"), filled(2, 3), {{"k", "v"}}, options));
    const std::string file = folder.file("cut.safetensors");
    for (std::size_t size = 0; size < whole.size(); ++size) {
      write_bytes(file, whole.substr(0, size));
      ASSERT_EQ(error_of([&] { load_prompt_cache(file); }).substr(0, 12), "corrupt_data") << "cut to " << size;
    }
    write_bytes(file, whole + "x");
    EXPECT_EQ(error_of([&] { load_prompt_cache(file); }).substr(0, 12), "corrupt_data");
    write_bytes(file, whole);
    EXPECT_EQ(error_of([&] { load_prompt_cache(file); }), "nothing");
  }
}

// Every bit of the first 16 bytes, then two of each byte.
std::vector<int> bits_to_flip(std::size_t byte) {
  if (byte < 16) return {0, 1, 2, 3, 4, 5, 6, 7};
  return {static_cast<int>(byte % 8), static_cast<int>((byte + 5) % 8)};
}

TEST(PromptCacheFile, P6AnyFlippedBitIsAnError) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.extension.tokens = Tokens{7, 8, 9};
  options.extension.model_fingerprint = std::string(64, 'a');
  const std::string whole = read_bytes(save_prompt_cache(folder.file("cache"), filled(1, 3), {{"k", "v"}}, options));
  const std::string file = folder.file("flipped.safetensors");
  for (std::size_t byte = 0; byte < whole.size(); ++byte) {
    for (const int bit : bits_to_flip(byte)) {
      std::string bytes = whole;
      bytes[byte] = static_cast<char>(bytes[byte] ^ (1 << bit));
      write_bytes(file, bytes);
      const std::string error = error_of([&] { load_prompt_cache(file); });
      ASSERT_NE(error, "nothing") << "byte " << byte << " bit " << bit << ": "
                                  << whole.substr(byte - std::min<std::size_t>(byte, 20), 40);
    }
  }
}

// The legacy layout has no digest: damage in the data may pass, but nothing may crash or be half right.
TEST(PromptCacheFile, P6AFlippedBitInALegacyFileIsAnErrorOrOnlyChangesData) {
  const TemporaryFolder folder;
  SaveOptions options;
  options.layout = PromptCacheLayout::legacy;
  const std::string whole = read_bytes(save_prompt_cache(folder.file("cache"), filled(1, 3), {{"k", "v"}}, options));
  const std::string file = folder.file("flipped.safetensors");
  for (std::size_t byte = 0; byte < whole.size(); ++byte) {
    for (const int bit : bits_to_flip(byte)) {
      std::string bytes = whole;
      bytes[byte] = static_cast<char>(bytes[byte] ^ (1 << bit));
      write_bytes(file, bytes);
      try {
        const PromptCache cache = load_prompt_cache(file);
        check_prompt_cache(cache);
      } catch (const Error&) {
      }
    }
  }
}

struct Damage {
  const char* what;
  std::string code;
  std::string names;  // a part of the message
  std::function<void(Tensors&, Metadata&)> apply;
};

void expect_refused(const std::vector<Damage>& damages, const Tensors& tensors, const Metadata& metadata) {
  const TemporaryFolder folder;
  const std::string file = folder.file("f.safetensors");
  PromptCache live = filled(1, 4);
  const State before = live[0].state();
  for (const Damage& damage : damages) {
    Tensors t = tensors;
    Metadata m = metadata;
    damage.apply(t, m);
    write_safetensors(file, t, m);
    const std::string error = error_of([&] { live = load_prompt_cache(file); });
    EXPECT_EQ(error.substr(0, damage.code.size() + 1), damage.code + ":") << damage.what << ": " << error;
    EXPECT_NE(error.find(damage.names), std::string::npos) << damage.what << ": " << error;
    EXPECT_NE(error.find(file), std::string::npos) << damage.what << ": " << error;
    EXPECT_TRUE(identical(live[0].state(), before));
  }
  write_safetensors(file, tensors, metadata);
  EXPECT_EQ(error_of([&] { load_prompt_cache(file); }), "nothing");
}

TEST(PromptCacheFile, P6WhatIsWrongInAFileIsNamed) {
  const Rows three = rows(range(0, 3));
  const auto put = [](const char* name, mx::array array) {
    return [name, array](Tensors& t, Metadata&) { t.insert_or_assign(name, array); };
  };
  const auto drop = [](const char* name) { return [name](Tensors& t, Metadata&) { t.erase(name); }; };
  const auto say = [](const char* key, const char* value) {
    return [key, value](Tensors&, Metadata& m) { m[key] = value; };
  };
  const auto forget = [](const char* key) { return [key](Tensors&, Metadata& m) { m.erase(key); }; };
  const std::vector<Damage> damages = {
      {"no sentinel", "corrupt_data", "2.0", forget("2.0")},
      {"a class not known", "unsupported", "\"PagedKVCache\"", say("1.1", "PagedKVCache")},
      {"a class name missing", "corrupt_data", "1.0", forget("1.0")},
      {"a class name too many", "corrupt_data", "layer 2", say("1.2", "KVCache")},
      {"a class name's index", "corrupt_data", "1.01", say("1.01", "KVCache")},
      {"a fourth part", "corrupt_data", "3.0", say("3.0", "x")},
      {"a key without a part", "corrupt_data", "format", say("format", "mlx")},
      {"half a kind", "corrupt_data", "2.1", forget("2.1.0")},
      {"a kind of three", "corrupt_data", "2.1", say("2.1.2", "x")},
      {"a kind for no tensor", "corrupt_data", "0.9", say("2.1.0", "0.9")},
      {"a kind not known", "corrupt_data", "\"vector\"", say("2.1.1", "vector")},
      {"two kinds for one tensor", "corrupt_data", "0.2", say("2.2.0", "0.2")},
      {"no kind for the offset", "corrupt_data", "item 2 (offset)",
       [](Tensors&, Metadata& m) { m.erase("2.1.0"), m.erase("2.1.1"); }},
      {"keys missing", "corrupt_data", "item 0 (keys)", drop("0.0")},
      {"values missing", "corrupt_data", "layer 1", drop("1.1")},
      {"offset missing", "corrupt_data", "3 items",
       [](Tensors& t, Metadata& m) { t.erase("0.2"), m.erase("2.1.0"), m.erase("2.1.1"); }},
      {"an item too many", "corrupt_data", "layer 0", put("0.3", mx::array(1.0f))},
      {"an item below an item", "corrupt_data", "0.0.1", put("0.0.1", mx::array(1.0f))},
      {"a name that is no index", "corrupt_data", "0.keys", put("0.keys", three.keys)},
      {"a tensor of no layer", "corrupt_data", "weight", put("weight", three.keys)},
      {"a layer alone", "corrupt_data", "\"0\"", put("0", three.keys)},
      {"an index far away", "corrupt_data", "holes", put("0.3.4000000000", mx::array(1.0f))},
      {"a rank", "corrupt_data", "item 0 (keys)", put("0.0", mx::zeros({2, 3, 4}))},
      {"a dtype", "corrupt_data", "item 0 (keys)", put("0.0", mx::zeros({1, 2, 3, 4}, mx::int32))},
      {"heads", "corrupt_data", "agree", put("1.1", mx::zeros({1, 1, 3, 4}))},
      {"columns", "corrupt_data", "agree", put("1.1", mx::zeros({1, 2, 4, 4}))},
      {"an offset beyond the columns", "corrupt_data", "[0, 3]", put("0.2", mx::array(4, mx::int32))},
      {"a negative offset", "corrupt_data", "offset", put("0.2", mx::array(-1, mx::int32))},
      {"an offset that is an array", "corrupt_data", "0.2", put("0.2", mx::array({3}))},
      {"an offset that is real", "corrupt_data", "offset", put("0.2", mx::array(3.0f))},
      {"an offset that is a bool", "corrupt_data", "offset", put("0.2", mx::array(true))},
      {"null keys beside values", "corrupt_data", "keys",
       [](Tensors& t, Metadata& m) {
         t.insert_or_assign("0.0", mx::zeros({0}));
         m["2.3.0"] = "0.0", m["2.3.1"] = "none";
       }},
  };
  expect_refused(damages,
                 {{"0.0", three.keys},
                  {"0.1", three.values},
                  {"0.2", mx::array(3, mx::int32)},
                  {"1.0", three.keys},
                  {"1.1", three.values},
                  {"1.2", mx::array(std::int64_t{3}, mx::int64)}},
                 {{"0.user", "x"},
                  {"1.0", "KVCache"},
                  {"1.1", "KVCache"},
                  {"2.0", ""},
                  {"2.1.0", "0.2"},
                  {"2.1.1", "scalar"},
                  {"2.2.0", "1.2"},
                  {"2.2.1", "scalar"}});
}

TEST(PromptCacheFile, P6WhatIsWrongInALegacyFileIsNamed) {
  const Rows three = rows(range(0, 3));
  const std::vector<Damage> damages = {
      {"no class names", "corrupt_data", "2.0", [](Tensors&, Metadata& m) { m.erase("2.0"); }},
      {"a class name missing", "corrupt_data", "2.1",
       [](Tensors&, Metadata& m) { m.erase("2.1"), m["2.2"] = "KVCache"; }},
      {"a class not known", "unsupported", "\"PagedKVCache\"",
       [](Tensors&, Metadata& m) { m["2.1"] = "PagedKVCache"; }},
      {"a meta", "corrupt_data", "layer 1", [](Tensors&, Metadata& m) { m["0.1"] = "7"; }},
      {"a meta list", "corrupt_data", "layer 1", [](Tensors&, Metadata& m) { m.erase("0.1"), m["0.1.0"] = "7"; }},
      {"a meta of no layer", "corrupt_data", "2", [](Tensors&, Metadata& m) { m["0.2"] = ""; }},
      {"a tensor of no layer", "corrupt_data", "2.0", [&](Tensors& t, Metadata&) { t.emplace("2.0", three.keys); }},
      {"keys missing", "corrupt_data", "item 0 (keys)", [](Tensors& t, Metadata&) { t.erase("0.0"); }},
      {"a tensor too many", "corrupt_data", "layer 0", [&](Tensors& t, Metadata&) { t.emplace("0.2", three.keys); }},
      {"columns", "corrupt_data", "agree",
       [](Tensors& t, Metadata&) {
         t.insert_or_assign("1.0", mx::zeros({1, 2, 5, 4}));
       }},
  };
  expect_refused(damages, {{"0.0", three.keys}, {"0.1", three.values}, {"1.0", three.keys}, {"1.1", three.values}},
                 {{"0.0", ""}, {"0.1", ""}, {"1.user", "x"}, {"2.0", "KVCache"}, {"2.1", "KVCache"}});
}

TEST(PromptCacheFile, P6OtherFilesAreNoPromptCaches) {
  const TemporaryFolder folder;
  const std::string file = folder.file("f.safetensors");
  write_safetensors(file, {{"model.embed_tokens.weight", mx::zeros({4, 4})}}, {{"format", "mlx"}});
  EXPECT_EQ(error_of([&] { load_prompt_cache(file); }).substr(0, 12), "corrupt_data");
  write_bytes(file, "");
  EXPECT_EQ(error_of([&] { load_prompt_cache(file); }).substr(0, 12), "corrupt_data");
  write_bytes(file, std::string(4096, '\0'));
  EXPECT_EQ(error_of([&] { load_prompt_cache(file); }).substr(0, 12), "corrupt_data");
}

TEST(PromptCacheFile, P6OfSeveralSaversOneWins) {
  const TemporaryFolder folder;
  const std::string file = folder.file("cache.safetensors");
  std::vector<std::jthread> savers;
  for (int length = 1; length <= 4; ++length) {
    savers.emplace_back([&, length] {
      PromptCache cache = filled(2, length);
      cache.eval();
      for (int i = 0; i < 10; ++i) save_prompt_cache(file, cache, {{"length", std::to_string(length)}});
    });
  }
  savers.clear();
  Metadata metadata;
  const PromptCache loaded = load_prompt_cache(file, &metadata);
  EXPECT_EQ(std::to_string(loaded[1].length()), metadata["length"]);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"cache.safetensors"});
}

TEST(PromptCacheFile, X9ACacheIsFilledSavedLoadedAndContinuedOnFourThreads) {
  const TemporaryFolder folder;
  PromptCache cache;
  std::string file;
  const auto on_a_thread = [](const auto& work) { std::jthread thread(work); };
  on_a_thread([&] {
    cache = filled(2, 300);
    cache.eval();
  });
  on_a_thread([&] { file = save_prompt_cache(folder.file("cache"), cache); });
  PromptCache loaded;
  on_a_thread([&] { loaded = load_prompt_cache(file); });
  std::vector<int> seen;
  on_a_thread([&] {
    append(loaded, {300});
    append(cache, {300});
    seen = tokens_of(loaded.at<KVCache>(1).keys_and_values());
    EXPECT_EQ(tokens_of(cache.at<KVCache>(0).keys_and_values()), seen);
    loaded.eval();
  });
  EXPECT_EQ(seen, range(0, 301));
  on_a_thread([&] { EXPECT_EQ(load_prompt_cache(save_prompt_cache(file, loaded))[0].length(), 301); });
}

}  // namespace
}  // namespace reprise
