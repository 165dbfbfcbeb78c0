// A tier's two connections to its index, which outlive what happens to the index: they are opened when they are needed,
// and the index is emptied when it is damaged. That is the writer's work: a reader never waits for it, and finds
// nothing meanwhile.
// Private to tiers.
// Threads: any, internally locked: one use of each connection at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "reprise/prefix/tiers/disk_folder.h"
#include "reprise/prefix/tiers/disk_index.h"

namespace reprise::internal {

class GuardedIndex {
 public:
  explicit GuardedIndex(DiskFolder& folder);
  ~GuardedIndex();
  GuardedIndex(const GuardedIndex&) = delete;
  GuardedIndex& operator=(const GuardedIndex&) = delete;

  // For the first time, within an Opening of the folder: an index of another version is emptied as well.
  // `as_damaged`: whatever it is.
  // Returns, as the others: what went wrong; none: nothing.
  std::optional<std::string> open_first(bool as_damaged = false);
  // Empties it uncounted, within an Opening as well.
  std::optional<std::string> empty();
  // Calls use(index) once, of a connection that only reads. What `use` throws but SqliteError passes.
  std::optional<std::string> read(const std::function<void(DiskIndex&)>& use);
  // Calls use(index), and again after each repair.
  std::optional<std::string> write(const std::function<void(DiskIndex&)>& use);

  // A reader has found damage: somebody who may wait must call mend().
  bool is_suspect() const { return suspect_.load(); }
  std::optional<std::string> mend();

  // How often the index was damaged or of another version.
  std::uint64_t emptied() const { return emptied_.load(); }

 private:
  void open_reader();
  void open_writer();
  // Requires: the writer's mutex.
  void repair();

  DiskFolder& folder_;
  std::atomic<bool> suspect_{false};
  std::atomic<std::uint64_t> emptied_{0};
  std::mutex writing_;  // taken before reading_
  std::optional<DiskIndex> writer_;
  std::chrono::steady_clock::time_point sound_until_{};  // no fault was found; one that comes back is one all the same
  std::mutex reading_;
  std::optional<DiskIndex> reader_;
};

}  // namespace reprise::internal
