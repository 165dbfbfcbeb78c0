// What every layer's cache can answer (LayerCache), and what those that store keys and values add (AttentionCache).
// Names and numbers follow mlx-lm's caches. Arrays handed out are values: later calls never change them. A call that
// throws leaves the object exactly as it was.
// Threads: one object belongs to one thread at a time; evaluate (PromptCache::eval) before handing it on.
// Owns: its key/value buffers, which forks share until one side writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "mlx/array.h"
#include "mlx/dtype.h"
#include "reprise/cache/state.h"
#include "reprise/nn/keys_values.h"
#include "reprise/nn/norms.h"
#include "reprise/nn/rope.h"

namespace reprise {

// What a class must remember but the items of its state cannot hold; files keep it where mlx-lm does not look. Names
// are stored on disk: never rename.
using ExtraState = std::map<std::string, std::variant<std::int64_t, std::vector<int>>>;

class LayerCache {
 public:
  virtual ~LayerCache() = default;

  // mlx-lm's class name. Stored on disk: never rename.
  virtual std::string class_name() const = 0;

  // Tokens consumed since the start = position of the next token; none for caches that do not count and for batches.
  virtual std::optional<int> position() const = 0;
  // position() per row for batches; otherwise one, or none.
  virtual std::vector<int> positions() const;
  // Stored rows that attention can see; 0 for recurrent state.
  virtual int length() const = 0;
  // mlx-lm's number of the same name, which some classes answer with 0; kept for compatibility, use length().
  virtual int size() const = 0;
  // No buffer yet. A cache trimmed to 0 rows is not empty.
  virtual bool empty() const = 0;
  // Bytes of allocated buffers, slack included.
  virtual std::size_t nbytes() const = 0;

  virtual bool is_trimmable() const = 0;
  // Largest n for which what remains is all that a fresh run of the shorter history would need; 0 when not trimmable.
  virtual int max_trim() const = 0;
  // Forgets the last min(n, available) tokens. Returns: how many; 0, and nothing changes, when not trimmable.
  // Throws: invalid_argument for n < 0.
  virtual int trim(int n) = 0;
  // The class never drops a row by itself, so that any shorter history is a trim away.
  virtual bool keeps_all_rows() const { return false; }

  // Whole buffers with their capacity. The item order per class is the file format's (docs/prompt_cache_format.md).
  virtual State state() const = 0;
  // As state(), buffers cut to the rows that hold tokens: what files hold.
  virtual State saved_state() const = 0;
  // The pair of the older layout (mlx-lm ≤ 0.31): arrays cut to valid rows, and text.
  virtual State legacy_state() const = 0;
  virtual Meta legacy_meta() const = 0;
  virtual ExtraState extra_state() const { return {}; }
  // After from_state. Throws: corrupt_data for a member that is not known or does not fit; the object is then
  // unchanged.
  virtual void set_extra_state(const ExtraState& extra);

  // Appends what must be evaluated before the object may go to another thread.
  virtual void collect_arrays(std::vector<mlx::core::array>& out) const { state().collect_arrays(out); }
  // Throws: what the class refuses to build from, where the object breaks its own invariants.
  virtual void check() const;

  // An independent cache that shares the buffers: O(1) in the length, no copy of rows.
  virtual std::unique_ptr<LayerCache> fork() const = 0;

  // Whether the class has a quantised one, which to_quantized makes.
  virtual bool has_quantized_counterpart() const { return false; }
  // A new cache of the quantised class with the same rows.
  // Throws: unsupported where the class has no quantised counterpart; invalid_argument for a group size or bits that
  // MLX does not know, or that do not divide the head size.
  virtual std::unique_ptr<LayerCache> to_quantized(int group_size = 64, int bits = 4) const;
  // The other way: the class of the same name without "Quantized". Throws: unsupported where there is none.
  virtual std::unique_ptr<LayerCache> to_dequantized() const;
  // A batch of `caches`, of which this is one; see merge_caches, which calls it.
  virtual std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const;
};

struct AttentionOptions {
  const Rope* rope = nullptr;  // null: keys and queries come rotated, or the layer has no positions
  float scale = 1.0f;
  Mask mask = NoMask{};
  std::optional<mlx::core::array> sinks = {};  // [H]
  // In which dtype a cache that is still empty stores the rows; none: as they come.
  std::optional<mlx::core::Dtype> stored_dtype = {};
  std::optional<float> softcap = {};  // of the scores, as in AttentionScoreOptions
  // Of each head's query and key, before the rotation; null: none, or they come normed.
  const RmsNorm* query_norm = nullptr;
  const RmsNorm* key_norm = nullptr;
};

// New rows as linear layers give them.
struct Projections {
  mlx::core::array queries;  // [B, L, heads * D]
  mlx::core::array keys;     // [B, L, kv_heads * D]
  mlx::core::array values;   // [B, L, kv_heads * Dv]
  int heads;
  int kv_heads;
};

struct MaskOptions {
  std::optional<int> window = {};
  bool return_array = false;
};

class AttentionCache : public LayerCache {
 public:
  // Position of the next token, read before an update: int, or int32 [B] for batches.
  virtual Offset offset() const = 0;

  // Appends L rows: keys [B, Hkv, L, D], values [B, Hkv, L, Dv].
  // Returns: everything attention must see, the new rows included. L = 0 returns the stored rows and changes nothing.
  // Throws: invalid_argument when B, Hkv, D, Dv or dtype differ from the first update's, or L = 0 on an empty cache.
  virtual KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) = 0;

  // As update_and_fetch, of rows of any floating dtype: they are stored in the dtype of those that are there, else in
  // `stored_dtype` (none: as they come). What float16 cannot hold becomes its largest number.
  KeysValues store(const mlx::core::array& keys, const mlx::core::array& values,
                   const std::optional<mlx::core::Dtype>& stored_dtype = {});

  // What update_and_fetch would return with L = 0. Throws: failed_precondition when empty.
  virtual KeysValues keys_and_values() const = 0;

  // Mask for N new tokens, asked before their update. Throws: invalid_argument for N < 1 or window < 1.
  virtual Mask make_mask(int N, const MaskOptions& options = {}) const = 0;

  // The same for attention within chunks of the sequence: the query at position q sees keys from ⌊q / chunk_size⌋ ·
  // chunk_size on.
  virtual Mask make_chunk_mask(int N, int chunk_size) const;
  // Whether the rows that such attention needs are always there.
  virtual bool serves_chunks(int /*chunk_size*/) const { return keeps_all_rows(); }

  // Norms and rotates q and k at offset(), stores k and v (in the stored rows' dtype), returns attention over all of
  // it. A call that throws has stored nothing. q [B, H, L, D], k [B, Hkv, L, D], v [B, Hkv, L, Dv]. Returns: [B, H, L,
  // Dv] in q's dtype. The default is made of the parts; a class overrides it where a fused kernel exists, with equal
  // results.
  virtual mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys,
                                  const mlx::core::array& values, const AttentionOptions& options);

  // As attend, from projections to what the output projection takes: [B, L, heads * Dv] in the queries' dtype. A class
  // overrides it where one kernel does all of it.
  virtual mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options);

 protected:
  // What both are by default: an update, then attention over all that it returns.
  mlx::core::array attend_in_parts(const mlx::core::array& queries, const mlx::core::array& keys,
                                   const mlx::core::array& values, const AttentionOptions& options);
  mlx::core::array attend_projections_in_parts(const Projections& projections, const AttentionOptions& options);

  // Becomes `earlier`, which is a fork of this object: how attend undoes an update when what follows throws.
  virtual void restore(LayerCache&& earlier) = 0;
};

}  // namespace reprise
