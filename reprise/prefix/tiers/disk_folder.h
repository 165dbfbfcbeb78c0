// The folder of a disk tier, but for what is in its index: permissions, locks between processes, and files that are
// named by the hash of their bytes. Private to tiers.
// Threads: any, after construction.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reprise/storage/file_system.h"

namespace reprise::internal {

class DiskFolder {
 public:
  // Makes the folder (mode 0700) and what is always in it, or takes one that is empty or a disk tier's with nothing
  // else in it; permissions of others are taken away, unless it is exposed. Throws: as DiskTier.
  DiskFolder(const std::filesystem::path& folder, FileSystem& file_system);
  ~DiskFolder();
  DiskFolder(const DiskFolder&) = delete;
  DiskFolder& operator=(const DiskFolder&) = delete;

  // Others could write in it: it must be emptied, before and after restrict_permissions().
  bool is_exposed() const { return exposed_; }
  // Throws: invalid_argument when others can still write.
  void restrict_permissions();
  // False: the system lets us read only.
  bool is_writable() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  std::filesystem::path index_file() const;
  // Makes an empty one where there is none. Throws: what the system says.
  void create_index_file() const;

  // As long as it lives no other process opens, empties or sweeps the folder; after a few seconds it goes without.
  class Opening {
   public:
    explicit Opening(DiskFolder& folder);
    ~Opening();
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;
    // No other process uses the folder.
    bool is_alone() const { return alone_; }

   private:
    DiskFolder& folder_;
    bool alone_ = false;
  };

  // `name`: the hash of `bytes`. Throws: as replace_file.
  void write(const std::string& name, const std::string& bytes);
  bool has(const std::string& name, std::uint64_t nbytes) const;
  struct Read {
    std::optional<std::string> bytes;
    bool damaged = false;  // it is there, but not what its name says
    bool missing = false;  // neither: it cannot be read just now
  };
  Read read(const std::string& name, std::uint64_t nbytes) const;
  void remove(const std::string& name);

  // Names of all files. Temporaries that killed writers have left are removed: those of some minutes' age, or all if
  // `alone`.
  std::vector<std::string> names(bool alone);

 private:
  std::filesystem::path path_of(const std::string& name) const;
  void make();

  const std::filesystem::path folder_;
  FileSystem& file_system_;
  bool exposed_ = false;
  std::string why_not_;
  int opening_lock_ = -1;
  int users_lock_ = -1;
};

}  // namespace reprise::internal
