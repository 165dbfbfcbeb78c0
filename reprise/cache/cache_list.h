// Several caches of one layer (a layer that attends twice, or attends and recurs), in order; nests. What is asked of it
// is asked of every child: all of them do it or none has.
// Threads, Owns: see layer_cache.h; owns its children. A reference to a child is void after replace, and after a call
// that threw.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reprise/cache/batched_cache.h"
#include "reprise/cache/layer_cache.h"

namespace reprise {

class CacheList final : public LayerCache, public BatchedCache {
 public:
  static constexpr const char* kClassName = "CacheList";

  using Children = std::vector<std::unique_ptr<LayerCache>>;

  // Throws: invalid_argument for null.
  explicit CacheList(Children children);
  // CacheList(std::make_unique<KVCache>(), …).
  template <typename... Caches>
  explicit CacheList(std::unique_ptr<Caches>... children) : CacheList(children_of(std::move(children)...)) {}

  // `state` = [[state of the child, its class name], …]. Throws: corrupt_data, naming child and item; unsupported for a
  // class that is not known.
  static std::unique_ptr<CacheList> from_state(const State& state);
  // `state` = [state of the child, …], `meta` = [[class name, …], [meta of the child, …]]. Throws: as from_state;
  // unsupported for the oldest form, which ran the children's items together and lost their class names.
  static std::unique_ptr<CacheList> from_legacy(const State& state, const Meta& meta);
  // Child by child. Throws: invalid_argument for lists whose children differ in number or class.
  static std::unique_ptr<LayerCache> merge_rows(const std::vector<const LayerCache*>& caches);

  std::size_t num_children() const { return children_.size(); }
  // Throws: invalid_argument for a child that is not there.
  LayerCache& child(std::size_t index);
  const LayerCache& child(std::size_t index) const;
  LayerCache& operator[](std::size_t index) { return child(index); }
  const LayerCache& operator[](std::size_t index) const { return child(index); }
  // Puts another cache in the child's place. Throws: invalid_argument for null or a child that is not there.
  void replace(std::size_t index, std::unique_ptr<LayerCache> cache);

  // The child as the class a model needs. Throws: invalid_argument when there is no such child or it is of another
  // class.
  template <typename Cache>
  Cache& at(std::size_t index) {
    if (auto* cache = dynamic_cast<Cache*>(&child(index))) return *cache;
    fail_class(index);
  }

  std::string class_name() const override { return kClassName; }
  // The first child's that knows one; check_prompt_cache tells whether the others agree.
  std::optional<int> position() const override;
  std::vector<int> positions() const override;
  int length() const override;
  int size() const override;
  // The first child is.
  bool empty() const override { return children_.empty() || children_.front()->empty(); }
  std::size_t nbytes() const override;
  bool is_trimmable() const override;
  int max_trim() const override;
  // All children by what each of them can.
  int trim(int n) override;
  bool keeps_all_rows() const override;
  State state() const override;
  State saved_state() const override;
  State legacy_state() const override;
  Meta legacy_meta() const override;
  // The children's, each name after the child's index and a dot.
  ExtraState extra_state() const override;
  void set_extra_state(const ExtraState& extra) override;
  void collect_arrays(std::vector<mlx::core::array>& out) const override;
  void check() const override;
  std::unique_ptr<LayerCache> fork() const override { return std::make_unique<CacheList>(forks()); }
  std::unique_ptr<LayerCache> merge(const std::vector<const LayerCache*>& caches) const override {
    return merge_rows(caches);
  }

  // Throw unsupported, besides, for a child without batch operations; only advance passes over it.
  int batch_size() const override;
  bool is_in_padded_prompt() const override;  // any child
  void prepare(const BatchPrompt& prompt) override;
  void finalize() override;
  void advance(int N) override;
  void filter(const std::vector<int>& rows) override;
  void extend(const LayerCache& other) override;
  std::unique_ptr<LayerCache> extract(int row) const override;

 private:
  template <typename... Caches>
  static Children children_of(std::unique_ptr<Caches>... children) {
    Children all;
    (all.push_back(std::move(children)), ...);
    return all;
  }

  [[noreturn]] void fail_class(std::size_t index) const;
  Children forks() const;
  // Calls `change` with each child and its index. When one throws, all children are what they were before.
  void change_all(const char* function, const std::function<void(LayerCache&, std::size_t)>& change);
  // As change_all, for batch operations.
  void change_batches(const char* function, const std::function<void(BatchedCache&, std::size_t)>& change);

  Children children_;
};

}  // namespace reprise
