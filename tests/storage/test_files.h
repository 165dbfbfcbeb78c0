// Folders and files for the tests of storage.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "reprise/base/error.h"

namespace reprise::testing {

// A new empty folder that goes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() /
            ("reprise_storage_" + std::to_string(::getpid()) + "_" + std::to_string(counter++));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) names.push_back(entry.path().filename());
    return names;
  }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::filesystem::path& file, const std::string& text) {
  // A new file: some file systems write one that was cut and filled again to the disk at once, which takes
  // milliseconds.
  std::filesystem::remove(file);
  std::ofstream(file, std::ios::binary) << text;
}

inline std::string read_text(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The Error that `call` throws; none when it throws none.
template <typename Call>
std::optional<Error> error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// `call` throws an Error of `code` whose text has `part`.
template <typename Call>
void expect_error(ErrorCode code, const std::string& part, const Call& call) {
  const std::optional<Error> error = error_of(call);
  ASSERT_TRUE(error) << "nothing was thrown; wanted " << to_string(code) << " with \"" << part << "\"";
  EXPECT_EQ(to_string(error->code()), to_string(code)) << error->what();
  EXPECT_NE(std::string(error->what()).find(part), std::string::npos) << error->what() << "\nlacks \"" << part << "\"";
}

// The large test data, or none: then the test skips aloud.
inline std::optional<std::filesystem::path> shared_data() {
  const char* named = std::getenv("REPRISE_TEST_DATA");
  const std::filesystem::path path = named != nullptr ? named : REPRISE_SOURCE_DIR "/../shared";
  return std::filesystem::exists(path / "models") ? std::optional(path) : std::nullopt;
}

}  // namespace reprise::testing
