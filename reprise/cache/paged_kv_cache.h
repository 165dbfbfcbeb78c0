// The cache of attention layers in an engine: rows in pages that sequences, forks and the prefix cache share. One class
// for full attention, sliding windows and chunks, dense and quantised: all rows are kept until drop_unseen, so any
// shorter history is a trim away. mlx-lm has no such class; plain() gives the one that it has.
// Threads: see layer_cache.h. Pages that are full, or rows below the length, may be read by any thread once evaluated.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/cache/kv_columns.h"
#include "reprise/cache/layer_cache.h"
#include "reprise/cache/page_pool.h"
#include "reprise/cache/prompt_cache.h"
#include "reprise/kernels/paged_attention.h"

namespace reprise {

// Rows [begin, end) of one layer as pages: what the prefix cache keeps of it. begin is a multiple of kPageRows.
struct PageSpan {
  kernels::PageLayout layout;
  int begin = 0;
  int end = 0;
  std::vector<PageRef> pages;

  std::size_t nbytes() const;
};

class PagedKVCache final : public AttentionCache {
 public:
  static constexpr const char* kClassName = "PagedKVCache";

  explicit PagedKVCache(std::shared_ptr<PagePool> pool, kernels::PagedVisibility visibility = {},
                        std::optional<KVQuantization> quantization = {});

  const kernels::PagedVisibility& visibility() const { return visibility_; }
  const std::optional<KVQuantization>& quantization() const { return quantization_; }
  // None before the first rows.
  const std::optional<kernels::PageLayout>& layout() const { return layout_; }
  // Position of the first row that is still there; a multiple of kPageRows.
  int first_row() const { return first_page_ * kernels::kPageRows; }

  // Pages whose rows no later query can see are given up.
  void drop_unseen();

  // Where it stands: the way back from updates that may never have run, which a trim is not, since the page that holds
  // the last rows may be a copy that they were to make.
  struct Mark {
    int length = 0;
    PageRef last_page = {};
    std::optional<mlx::core::array> stored = {};
  };
  Mark mark() const;
  // Requires: since `mark`, it has only been appended to.
  void go_back(const Mark& mark);

  // Rows [begin, end), which must be there, as shared pages; whoever takes them to another cache or thread evaluates
  // this one first. Throws: invalid_argument.
  PageSpan span(int begin, int end) const;
  // Becomes a cache of `length` rows made of spans that follow each other and reach that far; of them only what the
  // next query can see must be there. Throws: invalid_argument when they do not fit this cache or each other, or it is
  // not empty.
  void adopt(const std::vector<PageSpan>& spans, int length);

  // The same rows in mlx-lm's class: KVCache, RotatingKVCache, ChunkedKVCache or the quantised one. Throws: unsupported
  // for quantised chunks, or chunks with a window, which have none.
  std::unique_ptr<LayerCache> plain() const;

  std::string class_name() const override { return kClassName; }
  std::optional<int> position() const override { return offset_; }
  int length() const override { return offset_ - first_row(); }
  int size() const override { return length(); }
  bool empty() const override { return !layout_.has_value(); }
  std::size_t nbytes() const override;
  bool is_trimmable() const override { return true; }
  // As far as all that the shorter history's next query sees is still there.
  int max_trim() const override;
  int trim(int n) override;
  bool keeps_all_rows() const override { return first_page_ == 0; }

  // Files hold the plain class: these throw unsupported.
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  void collect_arrays(std::vector<mlx::core::array>& out) const override;
  void check() const override;

  // Shares all pages; who appends first goes on in place, the other copies one page.
  std::unique_ptr<LayerCache> fork() const override;

  Offset offset() const override { return offset_; }
  // Copies all rows that are there, also those that only earlier queries saw: its masks are those of return_array.
  KeysValues update_and_fetch(const mlx::core::array& keys, const mlx::core::array& values) override;
  KeysValues keys_and_values() const override;
  // NoMask for one token, else Causal: what is visible is applied by attend itself. `return_array`, or a window
  // narrower than the cache's own: an array over the columns of keys_and_values, visibility included.
  Mask make_mask(int N, const MaskOptions& options = {}) const override;
  Mask make_chunk_mask(int N, int chunk_size) const override;
  bool serves_chunks(int chunk_size) const override { return keeps_all_rows() || chunk_size == visibility_.chunk; }
  mlx::core::array attend(const mlx::core::array& queries, const mlx::core::array& keys, const mlx::core::array& values,
                          const AttentionOptions& options) override;
  mlx::core::array attend_projections(const Projections& projections, const AttentionOptions& options) override;

 protected:
  void restore(LayerCache&& earlier) override;

 private:
  friend class PagedBatch;

  // New rows on their way: where the kernel puts them, and the pages that the cache has then.
  struct Append {
    kernels::PagedSequence sequence;
    std::vector<PageRef> pages;  // new ones
    bool replaces_last = false;  // the first of them takes the last page's place
    int rows = 0;
  };
  // Claims the rows; they are lost if nobody commits them. Throws: bad_alloc.
  Append begin_append(const kernels::PageLayout& layout, int rows);
  void commit(Append append, const kernels::PageLayout& layout, const mlx::core::array& stored) noexcept;
  // What operations over these pages wait for. After many of them that nobody evaluated it evaluates.
  void add_pending(std::vector<mlx::core::array>& after);

  // attend_projections of rows that are stored and see alike, each a sequence of its own.
  static mlx::core::array attend_rows(const std::string& function, const std::vector<PagedKVCache*>& rows,
                                      const Projections& projections, const AttentionOptions& options);
  // Throws: invalid_argument for rows that this layout, where there is one, or the quantisation does not take.
  kernels::PageLayout layout_for(const std::string& function, const kernels::PageLayout& rows) const;
  // Over the columns from position 0 on, of one over those that are there.
  std::optional<mlx::core::array> whole_mask(const Mask& mask, int columns) const;
  // Rows [begin, end) as arrays.
  internal::KVColumns columns(int begin, int end) const;

  std::shared_ptr<PagePool> pool_;
  kernels::PagedVisibility visibility_;
  std::optional<KVQuantization> quantization_;
  std::optional<kernels::PageLayout> layout_;
  std::vector<PageRef> pages_;  // of positions from first_page_ · kPageRows up to offset_, no further
  int first_page_ = 0;
  int offset_ = 0;
  std::optional<mlx::core::array> stored_;  // of the last update, while it may not have run
  int unevaluated_ = 0;                     // updates in a row
};

// The layers of `cache`, which must be empty, with every attention cache as a PagedKVCache that sees the same;
// recurrent ones stay, a CacheList stays one. `quantization`: of all rows from the first on, in layers whose class has
// a quantised one. Throws: invalid_argument for a filled cache; unsupported for a class that pages cannot stand for (a
// ring that keeps first tokens).
PromptCache make_paged_prompt_cache(const PromptCache& cache, const std::shared_ptr<PagePool>& pool,
                                    const std::optional<KVQuantization>& quantization = {});
// The other way: every paged layer in mlx-lm's class.
PromptCache make_plain_prompt_cache(const PromptCache& cache);

}  // namespace reprise
