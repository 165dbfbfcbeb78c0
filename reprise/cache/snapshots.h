// Points of one live prompt cache that it can go back to although some of its layers cannot trim: recurrent state,
// wrapped rings, slid chunks. A layer that keeps all its rows costs nothing here, because a trim of the live one gets
// there; of any other a fork is kept.
// Threads: one object belongs to one thread at a time; what it holds is evaluated.
// Owns: the forks, which share buffers with the live cache until that writes.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/prompt_cache.h"

namespace reprise {

struct SnapshotLimits {
  std::size_t max_count = 8;
  std::size_t max_bytes = std::numeric_limits<std::size_t>::max();  // of nbytes()
};

// Every call must be given the same live cache, a sequence and not a batch. Whoever trims that cache by other means
// than rewind, or empties it, calls forget_after with the position reached, before anything else is fed.
class Snapshots {
 public:
  explicit Snapshots(const SnapshotLimits& limits = {}) : limits_(limits) {}
  Snapshots(Snapshots&&) noexcept = default;
  Snapshots& operator=(Snapshots&&) noexcept = default;

  // Remembers where `cache` stands, in place of a snapshot of the same position; those beyond are forgotten. When the
  // limits ask for it, others go: first those whose neighbours are nearest to each other, last the earliest one.
  // Returns: false when nothing had to be kept, every layer keeping its rows, or when it alone exceeds the limits; no
  // other one then gives way. Throws: failed_precondition when no layer knows its position, or layers disagree.
  bool take(const PromptCache& cache);
  // For caches in which no layer knows its position. Throws: invalid_argument for a position < 0 or one that a layer
  // contradicts.
  bool take(const PromptCache& cache, int position);

  // Takes `cache` back to position `to`, or to the newest snapshot before it, as if later tokens had never been fed: by
  // a trim of all layers if they can, else from a snapshot, which stays. Snapshots beyond the position reached are
  // forgotten; one that no longer fits the layers is passed over. References to layers other than those that keep
  // all their rows are void afterwards.
  // Returns: the position reached, from which the caller feeds again; none, and the cache has not changed, when neither
  // way leads there. Throws: invalid_argument for to < 0; the cache has not changed.
  std::optional<int> rewind(PromptCache& cache, int to);

  // Snapshots beyond `position`.
  void forget_after(int position);
  void clear() { snapshots_.clear(); }

  // The same points for a fork of the live cache: O(layers) for each of them, no row is copied.
  Snapshots fork() const;

  // Ascending.
  std::vector<int> positions() const;
  // Bytes of the layers held. Those not written since are shared with the live cache and counted all the same.
  std::size_t nbytes() const;

 private:
  // A layer, or a child of a CacheList.
  struct Kept {
    std::string class_name;
    std::unique_ptr<LayerCache> fork;  // null: the live layer keeps its rows, or see children
    std::vector<Kept> children;        // of a CacheList of which some child is forked

    Kept copy() const;
  };
  struct Snapshot {
    int position;
    std::vector<Kept> layers;
    std::size_t nbytes;
  };

  static Kept kept(const LayerCache& layer, std::vector<const LayerCache*>& forks);
  static bool fits(const Kept& kept, const LayerCache& live, int position);
  // What takes the live layer's place. Requires: fits.
  static std::unique_ptr<LayerCache> replacement(const Kept& kept, const LayerCache& live, int position);
  static bool fits(const Snapshot& snapshot, const PromptCache& cache);
  static void restore(const Snapshot& snapshot, PromptCache& cache);
  void evict();

  SnapshotLimits limits_;
  std::vector<Snapshot> snapshots_;  // by position, each once
};

}  // namespace reprise
