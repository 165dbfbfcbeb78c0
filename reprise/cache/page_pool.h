// The memory of paged caches: pages of one pool are counted to the byte, shared by whoever holds them, and appended to
// by one holder at a time.
// Threads: any. Owns: freed pages, for reuse.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "reprise/kernels/paged_attention.h"

namespace reprise {

class PagePool;

// Rows 0 … claimed() - 1 are somebody's, and written once; whoever has as many rows in it as are claimed may claim the
// next ones and write them in place, since no other holder can see them. Anyone else copies the page first.
class Page {
 public:
  ~Page();
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;

  std::byte* data() const { return memory_.get(); }
  std::size_t nbytes() const { return nbytes_; }
  int claimed() const { return claimed_.load(std::memory_order_relaxed); }
  // Rows `from` … `to` - 1 become the caller's. Returns: false, and nothing changes, when `from` is not claimed().
  bool claim(int from, int to);
  // All of it as read from elsewhere: `rows` of it are filled.
  void set_claimed(int rows) { claimed_.store(rows, std::memory_order_relaxed); }

 private:
  friend class PagePool;
  struct Free {
    void operator()(std::byte* memory) const;
  };
  using Memory = std::unique_ptr<std::byte, Free>;

  Page(std::shared_ptr<PagePool> pool, Memory memory, std::size_t nbytes)
      : pool_(std::move(pool)), memory_(std::move(memory)), nbytes_(nbytes) {}

  std::shared_ptr<PagePool> pool_;
  Memory memory_;
  std::size_t nbytes_;
  std::atomic<int> claimed_{0};
};

using PageRef = std::shared_ptr<Page>;

// The kernels' form of a page: keeps it alive.
kernels::PageMemory memory_of(const PageRef& page);

class PagePool : public std::enable_shared_from_this<PagePool> {
 public:
  // Freed pages up to `max_free_bytes` are kept for the next ones.
  static std::shared_ptr<PagePool> make(std::size_t max_free_bytes = std::size_t{64} << 20);

  // With anything in it. Throws: bad_alloc.
  PageRef allocate(std::size_t nbytes);

  // Of all pages that are held.
  std::size_t nbytes() const { return nbytes_.load(std::memory_order_relaxed); }
  std::size_t free_nbytes() const;
  // Gives freed pages back to the system.
  void release_free();

 private:
  friend class Page;
  explicit PagePool(std::size_t max_free_bytes) : max_free_bytes_(max_free_bytes) {}
  void take_back(Page::Memory memory, std::size_t nbytes);

  std::size_t max_free_bytes_;
  std::atomic<std::size_t> nbytes_{0};
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<Page::Memory>> free_;  // by size
  std::size_t free_nbytes_ = 0;
};

}  // namespace reprise
