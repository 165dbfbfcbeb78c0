#include "reprise/hub/pull.h"

#include <algorithm>
#include <span>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/hub/blob.h"
#include "reprise/hub/environment.h"
#include "reprise/hub/http.h"
#include "reprise/hub/listing.h"
#include "reprise/storage/file_system.h"

namespace reprise {

namespace fs = std::filesystem;

namespace {

using internal::HttpClient;
using internal::HttpHead;
using internal::HubFile;
using internal::HubListing;

constexpr std::size_t kMaxListingBytes = 64u << 20;

// For a path of a URL; `kept`: what stays besides letters, digits and "-_.".
std::string percent_encoded(const std::string& text, std::string_view kept) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
                       c == '_' || c == '.' || kept.find(c) != std::string_view::npos;
    const auto byte = static_cast<unsigned char>(c);
    out += plain ? std::string(1, c) : std::string{'%', kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return out;
}

struct Hub {
  std::string endpoint;
  std::optional<std::string> token;
};

Hub hub_of(const PullOptions& options) {
  Hub hub{options.endpoint.value_or(internal::hub_endpoint()), options.token ? options.token : internal::hub_token()};
  if (hub.token && hub.token->empty()) hub.token.reset();
  return hub;
}

HubListing fetch_listing(HttpClient& client, const Hub& hub, const HubRepository& repository,
                         const PullOptions& options) {
  const std::string url = hub.endpoint + "/api/models/" + repository.id() + "/revision/" +
                          percent_encoded(repository.revision, "") + "?blobs=true";
  const std::string what = "model " + repository.id() + " at revision '" + repository.revision + "'";
  internal::Retries retries(options, options.stop);
  for (;;) {
    std::string body;
    const auto on_body = [&](std::string_view bytes) {
      if (body.size() + bytes.size() > kMaxListingBytes) {
        throw Error(ErrorCode::corrupt_data, "[pull] the hub's list of files has no end");
      }
      body += bytes;
      return true;
    };
    const auto result = client.get({url, hub.token}, {{}, on_body}, options.stop);
    if (result.head.status != 0) check_status(result.head, what, hub.token.has_value());
    if (result.complete && result.head.status == 200) return internal::parse_listing(body);
    const std::string failure = result.head.status >= 400
                                    ? hub.endpoint + " answered with status " + std::to_string(result.head.status)
                                    : hub.endpoint + ": " + result.failure;
    if (result.head.status < 400 && !result.can_be_tried_again) throw Error(ErrorCode::not_found, "[pull] " + failure);
    retries.wait(failure, result.head.retry_after);
  }
}

void check_disk(const fs::path& folder, std::uint64_t needed) {
  std::error_code error;
  const auto space = fs::space(folder, error);
  if (!error && space.available < needed) {
    throw Error(ErrorCode::resource_exhausted, "[pull] " + std::to_string(needed >> 20) + " MiB are needed in " +
                                                   folder.string() + ", but only " +
                                                   std::to_string(space.available >> 20) + " are free");
  }
}

std::uint64_t bytes_of(const fs::path& file) {
  std::error_code ignored;
  return fs::is_regular_file(file, ignored) ? static_cast<std::uint64_t>(fs::file_size(file, ignored)) : 0;
}

// snapshot/name → blob, relative as huggingface_hub makes it, so that the cache can be moved.
void link_blob(const fs::path& snapshot, const HubFile& file, const fs::path& blob) {
  const fs::path link = snapshot / file.name;
  fs::create_directories(link.parent_path());
  const fs::path target = fs::relative(blob, link.parent_path());
  std::error_code ignored;
  if (fs::is_symlink(link) && fs::read_symlink(link) == target) return;
  const fs::path fresh = link.string() + ".new";
  fs::remove(fresh, ignored);
  fs::create_symlink(target, fresh);
  fs::rename(fresh, link);
}

void write_ref(const fs::path& folder, const std::string& revision, const std::string& commit) {
  if (revision == commit) return;
  const fs::path ref = folder / "refs" / revision;
  fs::create_directories(ref.parent_path());
  if (fs::exists(ref) && read_file(ref) == commit) return;
  replace_file(ref, [&](WritableFile& file) { file.append(std::as_bytes(std::span(commit))); });
}

fs::path pull_into_cache(const HubRepository& repository, const PullOptions& options) {
  const Hub hub = hub_of(options);
  HttpClient client(options.stall);
  const HubListing listing = fetch_listing(client, hub, repository, options);
  const auto files = internal::select_files(listing, options.include);

  const fs::path folder = repository_folder(options.cache, repository);
  const fs::path blobs = folder / "blobs";
  const fs::path snapshot = folder / "snapshots" / listing.commit;
  const fs::path locks = options.cache / ".locks" / folder.filename();
  for (const fs::path& each : {blobs, snapshot, locks}) fs::create_directories(each);

  PullProgress progress;
  std::uint64_t missing = 0;
  for (const HubFile& file : files) {
    progress.total_size += file.size;
    if (bytes_of(blobs / file.digest) == file.size) continue;
    missing += file.size - std::min(file.size, bytes_of(blobs / (file.digest + ".incomplete")));
  }
  check_disk(blobs, missing);
  std::uint64_t before = 0;
  for (const HubFile& file : files) {
    const auto report = [&](std::uint64_t done) {
      progress.file = file.name;
      progress.file_done = done;
      progress.file_size = file.size;
      progress.total_done = before + done;
      if (options.progress) options.progress(progress);
    };
    const std::string url =
        hub.endpoint + "/" + repository.id() + "/resolve/" + listing.commit + "/" + percent_encoded(file.name, "/");
    internal::fetch_blob(client, {url, hub.token, file}, blobs, locks, options, report);
    report(file.size);
    link_blob(snapshot, file, blobs / file.digest);
    before += file.size;
  }
  write_ref(folder, repository.revision, listing.commit);
  return snapshot;
}

}  // namespace

fs::path pull(const HubRepository& repository, const PullOptions& options) {
  if (internal::hub_is_offline()) {
    throw Error(ErrorCode::failed_precondition, "[pull] HF_HUB_OFFLINE is set: nothing can be fetched");
  }
  try {
    return pull_into_cache(repository, options);
  } catch (const fs::filesystem_error& error) {
    const bool full = error.code() == std::errc::no_space_on_device;
    throw Error(full ? ErrorCode::resource_exhausted : ErrorCode::internal, std::string("[pull] ") + error.what());
  }
}

}  // namespace reprise
