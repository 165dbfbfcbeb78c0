#include "reprise/cache/file_digest.h"

#include <exception>
#include <span>
#include <system_error>
#include <utility>

#include "reprise/cache/file_extension.h"
#include "reprise/storage/array_bytes.h"

namespace reprise::internal {

namespace mx = mlx::core;

namespace {

// Fixed-width and length-prefixed, so that no two different files feed the same bytes.
class DigestInput {
 public:
  explicit DigestInput(Sha256& sha) : sha_(sha) {}

  void number(std::uint64_t value) {
    unsigned char bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(value >> (8 * i));
    sha_.update(bytes, sizeof bytes);
  }
  void text(const std::string& value) {
    number(value.size());
    sha_.update(value);
  }

 private:
  Sha256& sha_;
};

}  // namespace

FileDigest::FileDigest(const SafetensorsHeader& header) {
  DigestInput input(sha_);
  input.number(header.tensors.size());
  for (const TensorRecord& record : header.tensors) {
    input.text(record.name);
    input.text(record.dtype);
    input.number(record.shape.size());
    for (const std::int64_t extent : record.shape) input.number(static_cast<std::uint64_t>(extent));
    input.number(record.begin);
    input.number(record.end);
  }
  TextMap metadata = header.metadata;
  if (const auto sentinel = metadata.find(kSentinelKey);
      sentinel != metadata.end() && sentinel->second.starts_with('{')) {
    if (const auto digest = stated_digest(sentinel->second)) {
      sentinel->second.replace(sentinel->second.find(*digest), kDigestDigits, kNoDigest);
    }
  }
  input.number(metadata.size());
  for (const auto& [key, value] : metadata) {
    input.text(key);
    input.text(value);
  }
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error&) {
  }
}

FileDigest::~FileDigest() { end(); }

void FileDigest::add(const mx::array& tensor) {
  if (!thread_.joinable()) {
    hash(tensor);
    return;
  }
  const std::lock_guard lock(mutex_);
  waiting_.push_back(tensor);
  changed_.notify_one();
}

std::string FileDigest::finish() {
  end();
  if (failure_) std::rethrow_exception(failure_);
  return sha_.hex_digest();
}

void FileDigest::hash(const mx::array& tensor) {
  for_each_run(tensor, [&](std::span<const std::byte> run) { sha_.update(run.data(), run.size()); });
}

void FileDigest::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return complete_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    {
      const mx::array tensor = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      try {
        hash(tensor);
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
    lock.lock();
  }
}

void FileDigest::end() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    complete_ = true;
    changed_.notify_one();
  }
  thread_.join();
}

}  // namespace reprise::internal
