// SHA-256 over all that a prompt-cache file holds, made on a thread of its own while the file is read or written.
// Threads: one object belongs to one thread at a time.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "mlx/array.h"
#include "reprise/base/sha256.h"
#include "reprise/storage/safetensors.h"

namespace reprise::internal {

// Of header, metadata and data; the digits that `metadata["2.0"]` states count as zeros.
class FileDigest {
 public:
  explicit FileDigest(const SafetensorsHeader& header);
  ~FileDigest();
  FileDigest(const FileDigest&) = delete;
  FileDigest& operator=(const FileDigest&) = delete;

  // The next tensor in the order of the data, evaluated. It is read until finish() returns.
  void add(const mlx::core::array& tensor);

  // In hex. Requires: called once, after all tensors. Throws: what hashing threw.
  std::string finish();

 private:
  void hash(const mlx::core::array& tensor);
  void work();
  void end();

  Sha256 sha_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<mlx::core::array> waiting_;
  bool complete_ = false;
  std::exception_ptr failure_;
  std::thread thread_;  // none could be had: add() hashes
};

}  // namespace reprise::internal
