#include "reprise/prefix/tiers/disk_tier.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/base/log.h"
#include "reprise/base/sha256.h"
#include "reprise/prefix/tiers/background_writer.h"
#include "reprise/prefix/tiers/disk_folder.h"
#include "reprise/prefix/tiers/guarded_index.h"
#include "reprise/prefix/tiers/prompt_blocks.h"
#include "reprise/storage/safetensors.h"

namespace reprise {
namespace {

using internal::DiskFolder;
using internal::DiskIndex;
using internal::EntryKey;
using internal::EntryKind;
using internal::FoundFile;
using internal::GuardedIndex;
using Names = DiskIndex::Names;

// What a file says of itself, beside what its content says.
constexpr const char* kFormatEntry = "disk_tier.format";
constexpr const char* kKeyEntry = "disk_tier.key";
constexpr std::size_t kMaxTouched = 64;  // files used since the index was told

DiskTierOptions checked(DiskTierOptions options) {
  if (options.block_size < 1) {
    throw Error(ErrorCode::invalid_argument,
                "[DiskTier] block_size must be at least 1, but got " + std::to_string(options.block_size));
  }
  if (options.file_system == nullptr) options.file_system = &real_file_system();
  if (!options.to_tensors) options.to_tensors = [](const Stored& stored) { return to_tensors(stored); };
  return options;
}

}  // namespace

struct DiskTier::Impl {
  explicit Impl(const DiskTierOptions& given);
  ~Impl();

  void write(EntryKey key, StoredRef content);
  // On the writer thread.
  void write_now(const EntryKey& key, const Stored& content);
  void insert_now(const EntryKey& key, const std::string& file, const std::string& bytes);
  void write_touched();
  void remove_now(const std::string& file);
  void unlink(const Names& files);

  // Takes nothing over from a folder that others could write. Throws: invalid_argument when it cannot be emptied.
  void empty_exposed();
  // Files without rows, and rows beyond the budget.
  void sweep(bool alone);
  // Both: whether it went well; the failure is noted.
  bool look(const std::function<void(DiskIndex&)>& use);
  bool change(const std::function<void(DiskIndex&)>& use);
  void touch(const std::string& file);
  // None: damaged, or (with `damaged` false) it could not be read just now.
  std::optional<TensorFile> load(const FoundFile& found, bool& damaged, bool& missing);
  void fail(const std::string& reason, const std::string& message, bool of_write = true);
  void count(std::uint64_t DiskTierStats::*counter, std::uint64_t more = 1);
  bool is_gone(const std::string& file) const;
  std::unordered_set<std::string> gone_files() const;

  const DiskTierOptions options;
  const std::string owner;  // hash
  DiskFolder folder;
  GuardedIndex index;
  std::uint64_t swept_at = 0;  // the writer thread's: how often the index had been emptied

  mutable std::mutex mutex;  // of what follows
  DiskTierStats stats;
  std::unordered_set<std::string> reasons;                 // that were logged
  std::unordered_set<std::string> gone;                    // files whose rows are still to be removed
  std::unordered_map<std::string, std::uint64_t> touched;  // files, and which use it was; the index is told later
  std::uint64_t uses = 0;
  std::atomic<bool> mending{false};
  std::optional<internal::BackgroundWriter> thread;  // ends before all else
};

DiskTier::Impl::Impl(const DiskTierOptions& given)
    : options(checked(given)),
      owner(internal::space_hash(options.owner)),
      folder(options.folder, *options.file_system),
      index(folder) {
  {
    const DiskFolder::Opening opening(folder);
    if (folder.is_exposed()) {
      empty_exposed();
      sweep(opening.is_alone());
    } else if (folder.is_writable()) {
      if (const auto failure = index.open_first()) fail("index", *failure);
      sweep(opening.is_alone());
    } else {
      fail("folder", "[DiskTier] needs a folder that can be written, but " + options.folder.string() +
                         " can only be read: " + folder.why_not());
    }
  }
  thread.emplace(options.max_queued_bytes);
}

DiskTier::Impl::~Impl() {
  thread.reset();
  write_touched();
}

// Emptied before, so that it stays exposed if we are killed, and after, when nobody else can write any more.
void DiskTier::Impl::empty_exposed() {
  std::optional<std::string> failure;
  if (!folder.is_writable()) failure = folder.why_not();
  if (!failure) failure = index.empty();
  if (!failure) folder.restrict_permissions();
  if (!failure) failure = index.open_first(true);
  if (!failure) return;
  throw Error(ErrorCode::invalid_argument, "[DiskTier] needs a folder that others cannot write, but got " +
                                               options.folder.string() + ", which cannot be emptied: " + *failure);
}

void DiskTier::Impl::sweep(bool alone) {
  swept_at = index.emptied();
  const Names names = folder.names(alone);
  Names evicted;
  change([&](DiskIndex& entries) {
    entries.unlink_unused(names, [&](const std::string& name) { folder.remove(name); });
    entries.make_room(0, options.max_bytes, nullptr, evicted);
  });
  count(&DiskTierStats::evictions, evicted.size());
  unlink(evicted);
}

bool DiskTier::Impl::look(const std::function<void(DiskIndex&)>& use) {
  const std::optional<std::string> failure = index.read(use);
  if (!failure) return true;
  if (!index.is_suspect()) {
    fail("reading", *failure, false);
  } else if (!mending.exchange(true)) {
    thread->push(
        [this] {
          if (const auto why_not = index.mend()) fail("index", *why_not, false);
          if (swept_at != index.emptied()) sweep(false);
          mending = false;
        },
        0);
  }
  return false;
}

bool DiskTier::Impl::change(const std::function<void(DiskIndex&)>& use) {
  const std::optional<std::string> failure = index.write(use);
  if (failure) fail("index", *failure);
  return !failure;
}

void DiskTier::Impl::unlink(const Names& files) {
  if (files.empty()) return;
  change(
      [&](DiskIndex& entries) { entries.unlink_unused(files, [&](const std::string& name) { folder.remove(name); }); });
}

void DiskTier::Impl::fail(const std::string& reason, const std::string& message, bool of_write) {
  {
    const std::lock_guard lock(mutex);
    if (of_write) ++stats.failed_writes;
    stats.last_error = message;
    if (!reasons.insert(reason).second) return;
  }
  log(LogLevel::warning, message);
}

void DiskTier::Impl::count(std::uint64_t DiskTierStats::*counter, std::uint64_t more) {
  const std::lock_guard lock(mutex);
  stats.*counter += more;
}

bool DiskTier::Impl::is_gone(const std::string& file) const {
  const std::lock_guard lock(mutex);
  return gone.contains(file);
}

std::unordered_set<std::string> DiskTier::Impl::gone_files() const {
  const std::lock_guard lock(mutex);
  return gone;
}

void DiskTier::Impl::touch(const std::string& file) {
  {
    const std::lock_guard lock(mutex);
    touched[file] = ++uses;
    if (touched.size() != kMaxTouched) return;
  }
  if (folder.is_writable()) thread->push([this] { write_touched(); }, 0);
}

void DiskTier::Impl::write_touched() {
  std::vector<std::pair<std::uint64_t, std::string>> used;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [file, use] : touched) used.emplace_back(use, file);
    touched.clear();
  }
  if (used.empty() || !folder.is_writable()) return;
  std::sort(used.begin(), used.end());
  Names files;
  for (auto& [use, file] : used) files.push_back(std::move(file));
  change([&](DiskIndex& entries) { entries.touch(files); });
}

void DiskTier::Impl::write(EntryKey key, StoredRef content) {
  if (!content) throw Error(ErrorCode::invalid_argument, "[DiskTier::write] needs content, but got none");
  if (!folder.is_writable()) return count(&DiskTierStats::failed_writes);
  const auto gone_before = gone_files();
  std::optional<std::string> there;
  look([&](DiskIndex& entries) { there = entries.covering(key); });
  if (there && !gone_before.contains(*there) && !is_gone(*there)) return touch(*there);
  const std::size_t nbytes = content->nbytes() + key.tokens.size();
  auto job = [this, key = std::move(key), content = std::move(content)] {
    try {
      write_now(key, *content);
    } catch (const Error& error) {
      fail(std::string(to_string(error.code())), error.what());
    } catch (const std::exception& error) {
      fail("other", error.what());
    }
  };
  if (!thread->push(std::move(job), nbytes)) count(&DiskTierStats::dropped_writes);
}

void DiskTier::Impl::write_now(const EntryKey& key, const Stored& content) {
  write_touched();
  if (swept_at != index.emptied()) sweep(false);
  std::optional<std::string> there;
  bool has_parent = false;
  const bool known = change([&](DiskIndex& entries) {
    there = entries.covering(key);
    has_parent = entries.has_parent(key);
  });
  if (!known) return;
  if (there) return touch(*there);
  if (!has_parent) return count(&DiskTierStats::dropped_writes);  // nothing would ever lead to it

  TensorFile tensors = options.to_tensors(content);
  tensors.metadata[kFormatEntry] = std::to_string(internal::kDiskFormat);
  tensors.metadata[kKeyEntry] = key.hash;
  const std::string bytes = serialize_safetensors(tensors.tensors, tensors.metadata);

  bool has_room = false;
  Names evicted;
  const bool asked =
      change([&](DiskIndex& entries) { has_room = entries.make_room(bytes.size(), options.max_bytes, &key, evicted); });
  count(&DiskTierStats::evictions, evicted.size());
  unlink(evicted);
  if (!asked) return;
  if (!has_room) return count(&DiskTierStats::dropped_writes);
  insert_now(key, sha256_hex(bytes), bytes);
}

void DiskTier::Impl::insert_now(const EntryKey& key, const std::string& file, const std::string& bytes) {
  constexpr int kAttempts = 3;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto is_there = [&] { return folder.has(file, bytes.size()); };
    const bool was_there = is_there();
    if (!was_there) folder.write(file, bytes);
    bool inserted = false;
    Names dropped;
    const bool changed = change(
        [&](DiskIndex& entries) { inserted = entries.insert(key, owner, file, bytes.size(), is_there, dropped); });
    if (!changed && !was_there) folder.remove(file);
    if (inserted) count(&DiskTierStats::writes);
    unlink(dropped);
    if (!changed || inserted) return;
  }
  throw Error(ErrorCode::internal, "[DiskTier] somebody removes what is written to " + options.folder.string());
}

void DiskTier::Impl::remove_now(const std::string& file) {
  Names dropped;
  if (!change([&](DiskIndex& entries) { entries.remove(file, dropped); })) return;
  unlink(dropped);
  const std::lock_guard lock(mutex);
  gone.erase(file);
}

std::optional<TensorFile> DiskTier::Impl::load(const FoundFile& found, bool& damaged, bool& missing) {
  std::optional<std::uint64_t> nbytes;
  look([&](DiskIndex& entries) { nbytes = entries.nbytes(found.file); });
  if (!nbytes) return std::nullopt;
  DiskFolder::Read read = folder.read(found.file, *nbytes);
  damaged = read.damaged;
  missing = read.missing;
  if (!read.bytes) return std::nullopt;
  try {
    Safetensors content = parse_safetensors(std::move(*read.bytes), found.file);
    auto& metadata = content.header.metadata;
    damaged = metadata[kFormatEntry] != std::to_string(internal::kDiskFormat) || metadata[kKeyEntry] != found.key;
    if (damaged) return std::nullopt;
    metadata.erase(kFormatEntry);
    metadata.erase(kKeyEntry);
    return TensorFile{std::move(content.tensors), std::move(metadata)};
  } catch (const Error& error) {
    damaged = error.code() != ErrorCode::resource_exhausted;
    return std::nullopt;
  }
}

DiskTier::DiskTier(const DiskTierOptions& options) : impl_(std::make_unique<Impl>(options)) {}
DiskTier::~DiskTier() = default;

DiskTier::Found DiskTier::find(const std::string& space, std::span<const TokenId> tokens, bool needs_checkpoint) {
  Found found;
  // What was gone before stays so: its row may go, and be forgotten, while the index is read as it was.
  const auto ignore = [this, gone = impl_->gone_files()](const std::string& file) {
    return gone.contains(file) || impl_->is_gone(file);
  };
  impl_->look([&](DiskIndex& index) {
    found = index.find(space, tokens, impl_->options.block_size, needs_checkpoint, ignore);
  });
  return found;
}

std::optional<TensorFile> DiskTier::read(const std::string& file) {
  const std::optional<FoundFile> found = FoundFile::parse(file);
  bool damaged = false;
  bool missing = false;
  std::optional<TensorFile> tensors;
  if (found && !impl_->is_gone(found->file)) tensors = impl_->load(*found, damaged, missing);
  impl_->count(tensors ? &DiskTierStats::hits : &DiskTierStats::misses);
  if (tensors) impl_->touch(found->file);
  if (damaged) impl_->count(&DiskTierStats::damaged);
  if (damaged || missing) {
    {
      const std::lock_guard lock(impl_->mutex);
      impl_->gone.insert(found->file);
    }
    if (impl_->folder.is_writable()) {
      impl_->thread->push([impl = impl_.get(), name = found->file] { impl->remove_now(name); }, 0);
    }
  }
  return tensors;
}

void DiskTier::write_block(const std::string& space, std::span<const TokenId> tokens, int begin, StoredRef content) {
  write_blocks(space, tokens, {{begin, static_cast<int>(tokens.size()), std::move(content)}});
}

void DiskTier::write_blocks(const std::string& space, std::span<const TokenId> tokens, std::vector<Block> blocks) {
  internal::KeyChain keys(space, tokens, impl_->options.block_size);
  for (Block& block : blocks) impl_->write(keys.block(block.begin, block.end), std::move(block.content));
}

void DiskTier::write_checkpoint(const std::string& space, std::span<const TokenId> tokens, StoredRef content) {
  impl_->write(internal::KeyChain(space, tokens, impl_->options.block_size).checkpoint(), std::move(content));
}

void DiskTier::flush() { impl_->thread->flush(); }

void DiskTier::clear(const std::optional<std::string>& space) {
  flush();
  if (!impl_->folder.is_writable()) return;
  Names dropped;
  impl_->change([&](DiskIndex& index) {
    if (space) return index.clear_space(internal::space_hash(*space), dropped);
    index.clear_owner(impl_->owner, dropped);
  });
  impl_->unlink(dropped);
}

DiskTierStats DiskTier::stats() const {
  internal::DiskTotals totals;
  impl_->look([&](DiskIndex& index) { totals = index.totals(); });
  const std::lock_guard lock(impl_->mutex);
  DiskTierStats stats = impl_->stats;
  stats.blocks = totals.blocks;
  stats.checkpoints = totals.checkpoints;
  stats.nbytes = totals.nbytes;
  stats.damaged += impl_->index.emptied();
  return stats;
}

}  // namespace reprise
