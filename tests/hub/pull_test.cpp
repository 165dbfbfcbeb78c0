// Fetching from a hub that misbehaves.
#include "reprise/hub/pull.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <thread>

#include "reprise/base/error.h"
#include "reprise/base/sha256.h"
#include "reprise/hub/blob_digest.h"
#include "tests/hub/test_server.h"

namespace reprise {
namespace {

namespace fs = std::filesystem;
using test::ServerRequest;
using test::ServerResponse;
using test::TestServer;

const std::string kCommit(40, 'a');

std::string read(const fs::path& file) {
  std::stringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

std::string git_id(const std::string& text) {
  internal::BlobDigest digest(internal::BlobDigest::Kind::git_blob, text.size());
  digest.update(text.data(), text.size());
  return digest.hex_digest();
}

class Pull : public testing::Test {
 protected:
  Pull() {
    for (std::size_t i = 0; i < 300'000; ++i) weights += static_cast<char>(i * i >> 3);
  }
  void SetUp() override {
    fs::remove_all(cache);
    for (const char* name : {"HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"}) unsetenv(name);
  }
  void TearDown() override {
    fs::remove_all(cache);
    unsetenv("HF_HUB_OFFLINE");
  }

  std::string listing() const {
    return R"({"sha":")" + kCommit + R"(","siblings":[{"rfilename":"config.json","size":)" +
           std::to_string(config.size()) + R"(,"blobId":")" + git_id(config) +
           R"("},{"rfilename":"model.safetensors","size":)" + std::to_string(weights.size()) + R"(,"blobId":")" +
           std::string(40, 'e') + R"(","lfs":{"sha256":")" + sha256_hex(weights) + R"(","size":)" +
           std::to_string(weights.size()) + "}}]}";
  }

  // What a hub should do.
  ServerResponse good(const ServerRequest& request) const {
    if (request.path.starts_with("/api/")) return {.body = listing()};
    const bool is_config = request.path.ends_with("/config.json");
    const std::string& whole = is_config ? config : weights;
    const std::size_t first = request.first_byte();
    if (first == 0) return {.body = whole};
    return {.status = 206,
            .headers = {"Content-Range: bytes " + std::to_string(first) + "-" + std::to_string(whole.size() - 1) + "/" +
                        std::to_string(whole.size())},
            .body = whole.substr(first)};
  }

  // A hub that does `wrong` for the n-th request (from 1) of the weights, if that gives something.
  TestServer::Handler hub(std::function<std::optional<ServerResponse>(int n, const ServerRequest&)> wrong) {
    return [this, wrong, n = 0](const ServerRequest& request) mutable {
      if (request.path.ends_with("/model.safetensors")) {
        if (auto response = wrong(++n, request)) return *response;
      }
      return good(request);
    };
  }

  PullOptions options(const TestServer& server) const {
    PullOptions options{.cache = cache};
    options.retry_delay = std::chrono::milliseconds(1);
    options.stall = std::chrono::seconds(2);
    options.endpoint = server.address();
    options.token = "";
    return options;
  }

  fs::path snapshot() const { return cache / "models--org--name" / "snapshots" / kCommit; }
  fs::path blob() const { return cache / "models--org--name" / "blobs" / sha256_hex(weights); }
  fs::path incomplete() const { return blob().string() + ".incomplete"; }

  void expect_whole(const fs::path& folder) const {
    EXPECT_EQ(folder, snapshot());
    EXPECT_EQ(read(folder / "config.json"), config);
    EXPECT_TRUE(read(folder / "model.safetensors") == weights);
    EXPECT_FALSE(fs::exists(incomplete()));
  }

  ErrorCode failure(const PullOptions& options, std::string* text = nullptr) const {
    try {
      pull(repository, options);
    } catch (const Error& error) {
      if (text != nullptr) *text = error.what();
      return error.code();
    }
    ADD_FAILURE() << "nothing was thrown";
    return ErrorCode::internal;
  }

  const HubRepository repository{"org", "name"};
  const std::string config = "{\"model_type\": \"llama\"}\n";
  std::string weights;
  const fs::path cache = fs::path(testing::TempDir()) / ("pull_test_" + std::to_string(getpid()));
};

TEST_F(Pull, CacheHasHuggingFacesLayoutAndASecondPullFetchesNothing) {
  TestServer server([this](const auto& request) { return good(request); });
  expect_whole(pull(repository, options(server)));
  EXPECT_EQ(read(cache / "models--org--name" / "refs" / "main"), kCommit);
  EXPECT_EQ(fs::read_symlink(snapshot() / "config.json"), fs::path("../../blobs") / git_id(config));
  EXPECT_EQ(fs::read_symlink(snapshot() / "model.safetensors"), fs::path("../../blobs") / sha256_hex(weights));
  EXPECT_EQ(find_snapshot(cache, repository), snapshot());
  const auto before = server.requests().size();
  expect_whole(pull(repository, options(server)));
  EXPECT_EQ(server.requests().size(), before + 1);  // the list alone
}

TEST_F(Pull, DroppedConnectionsAreGoneOnWithFromWhereTheyEnded) {
  TestServer server(hub([this](int n, const ServerRequest& request) -> std::optional<ServerResponse> {
    if (n > 4) return {};
    auto response = good(request);
    response.bytes_sent = 50'000;
    return response;
  }));
  std::uint64_t last = 0;
  auto chosen = options(server);
  chosen.attempts = 2;  // in a row without a byte: there are none
  chosen.progress = [&](const PullProgress& progress) {
    EXPECT_GE(progress.total_done, last);
    last = progress.total_done;
    EXPECT_EQ(progress.total_size, weights.size() + config.size());
  };
  expect_whole(pull(repository, chosen));
  EXPECT_EQ(last, weights.size() + config.size());
  const auto requests = server.requests();
  EXPECT_EQ(requests.back().first_byte(), 200'000u);
}

TEST_F(Pull, AnInterruptedPullGoesOnInTheNextOne) {
  std::stop_source stop;
  {
    TestServer server([this](const auto& request) { return good(request); });
    auto chosen = options(server);
    chosen.stop = stop.get_token();
    chosen.progress = [&](const PullProgress& progress) {
      if (progress.file == "model.safetensors" && progress.file_done > 0) stop.request_stop();
    };
    EXPECT_EQ(failure(chosen), ErrorCode::cancelled);
    EXPECT_FALSE(fs::exists(cache / "models--org--name" / "refs" / "main"));
  }
  ASSERT_TRUE(fs::exists(incomplete()));
  const auto kept = fs::file_size(incomplete());
  ASSERT_GT(kept, 0u);
  TestServer server([this](const auto& request) { return good(request); });
  expect_whole(pull(repository, options(server)));
  EXPECT_EQ(server.requests().back().first_byte(), kept < weights.size() ? kept : 0);
}

TEST_F(Pull, AServerWithoutRangesSendsAllAgainAndNothingIsDoubled) {
  TestServer server(hub([this](int n, const ServerRequest&) -> std::optional<ServerResponse> {
    ServerResponse response{.body = weights};
    if (n == 1) response.bytes_sent = 70'000;
    return response;
  }));
  expect_whole(pull(repository, options(server)));
}

TEST_F(Pull, AnotherRangeThanAskedForIsNotTaken) {
  TestServer server(hub([this](int n, const ServerRequest& request) -> std::optional<ServerResponse> {
    auto response = good(request);
    if (n == 1) response.bytes_sent = 70'000;
    if (n == 2)
      response = {.status = 206, .headers = {"Content-Range: bytes 5-299999/300000"}, .body = weights.substr(5)};
    if (n == 3) response = {.status = 206, .body = weights};  // no range at all
    return response;
  }));
  expect_whole(pull(repository, options(server)));
}

TEST_F(Pull, MoreOrLessThanTheHubSaysIsNotTaken) {
  TestServer server(hub([this](int n, const ServerRequest& request) -> std::optional<ServerResponse> {
    if (n == 1) return ServerResponse{.body = weights + "more"};
    if (n == 2)
      return ServerResponse{.headers = {"Transfer-Encoding: chunked", "Content-Length: 9"},
                            .body = "5\r\nhello\r\n0\r\n\r\n"};
    if (n == 3) return ServerResponse{.status = 416};
    return good(request);
  }));
  expect_whole(pull(repository, options(server)));
}

TEST_F(Pull, DamageIsFetchedOnceMoreAndThenGivenUp) {
  std::string damaged = weights;
  damaged[1234] = static_cast<char>(damaged[1234] ^ 1);
  {
    TestServer server(hub([&](int n, const ServerRequest&) -> std::optional<ServerResponse> {
      if (n == 1) return ServerResponse{.body = damaged};
      return {};
    }));
    expect_whole(pull(repository, options(server)));
  }
  fs::remove_all(cache);
  TestServer server(
      hub([&](int, const ServerRequest&) -> std::optional<ServerResponse> { return ServerResponse{.body = damaged}; }));
  std::string text;
  EXPECT_EQ(failure(options(server), &text), ErrorCode::corrupt_data);
  EXPECT_NE(text.find("model.safetensors"), std::string::npos);
  EXPECT_FALSE(fs::exists(blob()));
  EXPECT_EQ(fs::file_size(incomplete()), 0u);
}

TEST_F(Pull, AnIncompleteFileWithWrongBytesIsFoundOut) {
  fs::create_directories(blob().parent_path());
  std::ofstream(incomplete(), std::ios::binary) << std::string(100'000, 'x');
  TestServer server([this](const auto& request) { return good(request); });
  expect_whole(pull(repository, options(server)));
}

TEST_F(Pull, AccessAndNamesAreExplained) {
  const auto answering = [this](int status, bool at_list) {
    return [this, status, at_list](const ServerRequest& request) {
      return request.path.starts_with("/api/") == at_list ? ServerResponse{.status = status} : good(request);
    };
  };
  for (const bool at_list : {true, false}) {
    for (const int status : {401, 403}) {
      TestServer server(answering(status, at_list));
      std::string text;
      EXPECT_EQ(failure(options(server), &text), ErrorCode::failed_precondition);
      EXPECT_NE(text.find("HF_TOKEN"), std::string::npos) << text;
      auto with_token = options(server);
      with_token.token = "secret";
      EXPECT_EQ(failure(with_token, &text), ErrorCode::failed_precondition);
      EXPECT_NE(text.find("terms"), std::string::npos) << text;
      EXPECT_EQ(text.find("secret"), std::string::npos) << text;
    }
    TestServer server(answering(404, at_list));
    std::string text;
    EXPECT_EQ(failure(options(server), &text), ErrorCode::not_found);
    EXPECT_NE(text.find(at_list ? "org/name" : "config.json"), std::string::npos) << text;
  }
}

TEST_F(Pull, TokenIsSentToTheHubAndToNobodyElse) {
  TestServer elsewhere([this](const auto&) { return ServerResponse{.body = weights}; });
  TestServer server(hub([&](int, const ServerRequest&) -> std::optional<ServerResponse> {
    // Another host name for the same machine.
    std::string to = elsewhere.address();
    to.replace(to.find("127.0.0.1"), 9, "localhost");
    return ServerResponse{.status = 302, .headers = {"Location: " + to + "/blob"}};
  }));
  auto chosen = options(server);
  chosen.token = "secret";
  expect_whole(pull(repository, chosen));
  for (const auto& request : server.requests()) EXPECT_EQ(request.headers.at("authorization"), "Bearer secret");
  ASSERT_EQ(elsewhere.requests().size(), 1u);
  EXPECT_EQ(elsewhere.requests()[0].headers.count("authorization"), 0u);
}

TEST_F(Pull, ABusyServerIsAskedAgainAndABrokenOneGivenUp) {
  {
    TestServer server(hub([](int n, const ServerRequest&) -> std::optional<ServerResponse> {
      if (n == 1) return ServerResponse{.status = 503};
      if (n == 2) return ServerResponse{.status = 429, .headers = {"Retry-After: 0"}};
      return {};
    }));
    expect_whole(pull(repository, options(server)));
  }
  fs::remove_all(cache);
  TestServer server([](const auto&) { return ServerResponse{.status = 500}; });
  auto chosen = options(server);
  chosen.attempts = 3;
  std::string text;
  EXPECT_EQ(failure(chosen, &text), ErrorCode::not_found);
  EXPECT_NE(text.find("500"), std::string::npos) << text;
  EXPECT_EQ(server.requests().size(), 3u);
}

TEST_F(Pull, AServerThatStallsIsLeftAndAskedAgain) {
  TestServer server(hub([this](int n, const ServerRequest& request) -> std::optional<ServerResponse> {
    if (n > 1) return {};
    auto response = good(request);
    response.stall_ms = 20'000;
    return response;
  }));
  auto chosen = options(server);
  chosen.stall = std::chrono::seconds(1);
  std::vector<std::string> notes;
  chosen.note = [&](const std::string& text) { notes.push_back(text); };
  expect_whole(pull(repository, chosen));
  ASSERT_FALSE(notes.empty());
}

TEST_F(Pull, NobodyThereIsToldWithTheAddress) {
  std::string address;
  {
    TestServer server([](const auto&) { return ServerResponse{}; });
    address = server.address();
  }
  PullOptions chosen{.cache = cache};
  chosen.endpoint = address;
  chosen.token = "";
  chosen.retry_delay = std::chrono::milliseconds(1);
  chosen.attempts = 2;
  std::string text;
  EXPECT_EQ(failure(chosen, &text), ErrorCode::not_found);
  EXPECT_NE(text.find(address), std::string::npos) << text;
  setenv("HF_HUB_OFFLINE", "1", 1);
  EXPECT_EQ(failure(chosen), ErrorCode::failed_precondition);
}

TEST_F(Pull, AListThatIsNoneIsRefused) {
  TestServer server([](const auto&) { return ServerResponse{.body = "<html>Sign in to the network</html>"}; });
  EXPECT_EQ(failure(options(server)), ErrorCode::corrupt_data);
  EXPECT_FALSE(fs::exists(snapshot()));
}

TEST_F(Pull, TwoAtOnceGetTheSameFilesOnce) {
  std::atomic<int> downloads = 0;
  TestServer server(hub([&](int, const ServerRequest&) -> std::optional<ServerResponse> {
    ++downloads;
    return {};
  }));
  const auto chosen = options(server);
  std::thread other([&] { EXPECT_NO_THROW(pull(repository, chosen)); });
  expect_whole(pull(repository, chosen));
  other.join();
  EXPECT_EQ(downloads, 1);
}

TEST_F(Pull, BranchesWithSlashesAndCommitsHaveTheirPlaces) {
  TestServer server([this](const auto& request) { return good(request); });
  pull({"org", "name", "refs/pr/1"}, options(server));
  EXPECT_EQ(server.requests()[0].path, "/api/models/org/name/revision/refs%2Fpr%2F1?blobs=true");
  EXPECT_EQ(read(cache / "models--org--name" / "refs" / "refs/pr/1"), kCommit);
  pull({"org", "name", kCommit}, options(server));
  EXPECT_FALSE(fs::exists(cache / "models--org--name" / "refs" / kCommit));
  EXPECT_EQ(find_snapshot(cache, {"org", "name", "refs/pr/1"}), snapshot());
}

}  // namespace
}  // namespace reprise
