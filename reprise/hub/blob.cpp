#include "reprise/hub/blob.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "reprise/base/error.h"
#include "reprise/hub/blob_digest.h"

namespace reprise::internal {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail_system(const std::string& what, const fs::path& file) {
  const int code = errno;
  const bool full = code == ENOSPC || code == EDQUOT || code == EFBIG;
  throw Error(full ? ErrorCode::resource_exhausted : ErrorCode::internal,
              "[pull] cannot " + what + " " + file.string() + ": " + std::strerror(code));
}

class Descriptor {
 public:
  Descriptor(const fs::path& file, int flags) : file_(file), number_(::open(file.c_str(), flags | O_CLOEXEC, 0666)) {
    if (number_ < 0) fail_system("open", file);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }
  const fs::path& file() const { return file_; }

 private:
  fs::path file_;
  int number_;
};

// Held by one process at a time; goes with the process.
class Lock {
 public:
  Lock(const fs::path& file, const PullOptions& options) : descriptor_(file, O_RDWR | O_CREAT) {
    bool told = false;
    while (::flock(descriptor_.number(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) fail_system("lock", file);
      if (options.stop.stop_requested()) throw Error(ErrorCode::cancelled, "[pull] stopped");
      if (!std::exchange(told, true) && options.note) options.note("another process fetches the same file; waiting");
      ::usleep(200'000);
    }
  }

 private:
  Descriptor descriptor_;
};

// The file so far, and the digest of what it holds.
class Incomplete {
 public:
  Incomplete(const fs::path& file, const HubFile& wanted)
      : wanted_(wanted), descriptor_(file, O_RDWR | O_CREAT), digest_(wanted.digest_kind, wanted.size) {
    take_what_is_there();
  }

  std::uint64_t size() const { return size_; }
  bool is_complete() const { return size_ == wanted_.size; }
  bool has_room_for(std::size_t bytes) const { return bytes <= wanted_.size - size_; }

  void append(std::string_view bytes) {
    digest_.update(bytes.data(), bytes.size());
    while (!bytes.empty()) {
      const auto written = ::pwrite(descriptor_.number(), bytes.data(), bytes.size(), static_cast<off_t>(size_));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) fail_system("write", descriptor_.file());
      size_ += static_cast<std::uint64_t>(written);
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }

  void clear() {
    if (::ftruncate(descriptor_.number(), 0) != 0) fail_system("empty", descriptor_.file());
    size_ = 0;
    digest_ = BlobDigest(wanted_.digest_kind, wanted_.size);
  }

  // Once, of the complete file; the bytes are on the device when it returns true.
  bool is_right() {
    if (digest_.hex_digest() != wanted_.digest) return false;
    if (::fsync(descriptor_.number()) != 0) fail_system("sync", descriptor_.file());
    return true;
  }

 private:
  void take_what_is_there() {
    struct stat status = {};
    if (::fstat(descriptor_.number(), &status) != 0) fail_system("look at", descriptor_.file());
    if (static_cast<std::uint64_t>(status.st_size) > wanted_.size) return clear();
    std::vector<char> buffer(1 << 20);
    for (;;) {
      const auto got = ::pread(descriptor_.number(), buffer.data(), buffer.size(), static_cast<off_t>(size_));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_system("read", descriptor_.file());
      if (got == 0) return;
      digest_.update(buffer.data(), static_cast<std::size_t>(got));
      size_ += static_cast<std::uint64_t>(got);
    }
  }

  const HubFile& wanted_;
  Descriptor descriptor_;
  BlobDigest digest_;
  std::uint64_t size_ = 0;
};

// Whether the response to a request for all from `file.size()` on is that; a whole file in its place empties ours.
enum class Fit { yes, another_range, another_size };
Fit fit_response(const HttpHead& head, const HubFile& wanted, Incomplete& file) {
  if (head.status == 206) {
    const auto range = head.content_range;
    if (!range || range->first != file.size()) return Fit::another_range;
    return range->total && *range->total != wanted.size ? Fit::another_size : Fit::yes;
  }
  if (file.size() > 0) file.clear();
  return head.content_length && *head.content_length != wanted.size ? Fit::another_size : Fit::yes;
}

// One request. Returns: what went wrong, if it may be tried again; empty: nothing did.
struct Attempt {
  std::string failure = {};
  std::optional<std::chrono::seconds> retry_after = {};
};
Attempt fetch_rest(HttpClient& client, const BlobSource& source, Incomplete& file, Retries& retries,
                   const PullOptions& options, const std::function<void(std::uint64_t)>& progress) {
  Fit fit = Fit::yes;
  bool too_much = false;
  const auto on_head = [&](const HttpHead& head) {
    if (head.status != 200 && head.status != 206) return false;
    fit = fit_response(head, source.file, file);
    return fit == Fit::yes;
  };
  const auto on_body = [&](std::string_view bytes) {
    too_much = !file.has_room_for(bytes.size());
    if (too_much) return false;
    file.append(bytes);
    retries.reset();
    progress(file.size());
    return true;
  };
  const HttpResult result = client.get({source.url, source.token, file.size()}, {on_head, on_body}, options.stop);
  const HttpHead& head = result.head;
  if (too_much || fit != Fit::yes || head.status == 416) {
    file.clear();
    if (fit == Fit::another_size) return {"the server has another size of it than the hub says"};
    return {too_much ? "the server sent more than the file has" : "the server sent another part than it was asked for"};
  }
  if (head.status != 0 && head.status != 200 && head.status != 206) {
    check_status(head, source.file.name, source.token.has_value());
    return {"the server answered with status " + std::to_string(head.status), head.retry_after};
  }
  if (!result.failure.empty()) {
    if (!result.can_be_tried_again) throw Error(ErrorCode::not_found, "[pull] " + source.url + ": " + result.failure);
    return {result.failure};
  }
  return {file.is_complete() ? "" : "the connection was closed before the end"};
}

}  // namespace

void Retries::wait(const std::string& failure, std::optional<std::chrono::seconds> asked) {
  if (++failures_ >= options_.attempts) {
    throw Error(ErrorCode::not_found, "[pull] gave up after " + std::to_string(failures_) + " attempts: " + failure +
                                          "; the same command goes on from what has come");
  }
  auto delay = options_.retry_delay * (1 << std::min(failures_ - 1, 4));
  if (asked) delay = std::max<std::chrono::milliseconds>(delay, *asked);
  if (options_.note) options_.note(failure + "; trying again");
  std::mutex mutex;
  std::unique_lock lock(mutex);
  std::condition_variable_any asleep;
  asleep.wait_for(lock, stop_, delay, [] { return false; });
  if (stop_.stop_requested()) throw Error(ErrorCode::cancelled, "[pull] stopped");
}

void check_status(const HttpHead& head, const std::string& what, bool has_token) {
  const int status = head.status;
  if (status == 200 || status == 206 || status == 408 || status == 429 || status >= 500) return;
  const std::string got = " (status " + std::to_string(status) + ")";
  if (status == 401 || status == 403) {
    throw Error(ErrorCode::failed_precondition,
                "[pull] access to " + what + " is denied" + got +
                    (has_token ? ": the token in use may not read it; the model's page tells whether its terms must "
                                 "be accepted first"
                               : ": it is private, gated or not there; set HF_TOKEN to a token that may read it"));
  }
  if (status == 404 || status == 410) {
    throw Error(ErrorCode::not_found, "[pull] the hub has no " + what + got + ": look at spelling and revision");
  }
  throw Error(ErrorCode::not_found, "[pull] the hub does not give " + what + got);
}

void fetch_blob(HttpClient& client, const BlobSource& source, const fs::path& blobs, const fs::path& locks,
                const PullOptions& options, const std::function<void(std::uint64_t)>& progress) {
  const HubFile& wanted = source.file;
  const fs::path blob = blobs / wanted.digest;
  const fs::path incomplete = blobs / (wanted.digest + ".incomplete");
  const Lock lock(locks / (wanted.digest + ".lock"), options);
  std::error_code ignored;
  if (fs::is_regular_file(blob, ignored) && fs::file_size(blob, ignored) == wanted.size) return;
  Retries retries(options, options.stop);
  for (bool was_wrong = false;;) {
    Incomplete file(incomplete, wanted);
    progress(file.size());
    while (!file.is_complete()) {
      const Attempt attempt = fetch_rest(client, source, file, retries, options, progress);
      if (!attempt.failure.empty()) retries.wait(wanted.name + ": " + attempt.failure, attempt.retry_after);
    }
    if (file.is_right()) break;
    file.clear();
    if (std::exchange(was_wrong, true)) {
      throw Error(ErrorCode::corrupt_data, "[pull] " + wanted.name +
                                               " came twice with another digest than the hub "
                                               "says (" +
                                               wanted.digest + "): nothing of it was kept");
    }
    if (options.note) options.note(wanted.name + " came damaged (its digest is wrong); fetching it once more");
  }
  if (std::rename(incomplete.c_str(), blob.c_str()) != 0) fail_system("rename", incomplete);
}

}  // namespace reprise::internal
