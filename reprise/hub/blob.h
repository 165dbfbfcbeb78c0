// One file's way into the cache: resumed, checked, in place only when whole. Private to `hub`.
// Threads: free functions; several processes may fetch one blob, one of them does it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>

#include "reprise/hub/http.h"
#include "reprise/hub/listing.h"
#include "reprise/hub/pull.h"

namespace reprise::internal {

struct BlobSource {
  std::string url;
  std::optional<std::string> token = {};
  HubFile file;
};

// How often and when a transfer is tried again, told in PullOptions.
class Retries {
 public:
  Retries(const PullOptions& options, std::stop_token stop) : options_(options), stop_(std::move(stop)) {}

  // After a failure: waits, the longer the more there were. Throws: cancelled; `failure` as Error(not_found) when the
  // attempts are used up.
  void wait(const std::string& failure, std::optional<std::chrono::seconds> asked);
  // Something came through.
  void reset() { failures_ = 0; }

 private:
  const PullOptions& options_;
  std::stop_token stop_;
  int failures_ = 0;
};

// What an HTTP status means for `what`. Throws unless it may be tried again later (408, 429, 5xx).
void check_status(const HttpHead& head, const std::string& what, bool has_token);

// Fetches into `blobs`/<digest>.incomplete, going on where an earlier attempt ended, and renames it to
// `blobs`/<digest> when its size and digest are right. `locks`: the folder of lock files. `progress`: bytes that are
// there, after each piece. Throws: not_found, failed_precondition (access), corrupt_data (wrong twice),
// resource_exhausted (disk), cancelled.
void fetch_blob(HttpClient& client, const BlobSource& source, const std::filesystem::path& blobs,
                const std::filesystem::path& locks, const PullOptions& options,
                const std::function<void(std::uint64_t)>& progress);

}  // namespace reprise::internal
