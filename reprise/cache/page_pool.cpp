#include "reprise/cache/page_pool.h"

#include <new>
#include <utility>

namespace reprise {

namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void Page::Free::operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }

Page::~Page() { pool_->take_back(std::move(memory_), nbytes_); }

bool Page::claim(int from, int to) { return claimed_.compare_exchange_strong(from, to, std::memory_order_relaxed); }

kernels::PageMemory memory_of(const PageRef& page) { return kernels::PageMemory(page, page->data()); }

std::shared_ptr<PagePool> PagePool::make(std::size_t max_free_bytes) {
  return std::shared_ptr<PagePool>(new PagePool(max_free_bytes));
}

PageRef PagePool::allocate(std::size_t nbytes) {
  Page::Memory memory;
  {
    const std::lock_guard lock(mutex_);
    const auto same_size = free_.find(nbytes);
    if (same_size != free_.end() && !same_size->second.empty()) {
      memory = std::move(same_size->second.back());
      same_size->second.pop_back();
      free_nbytes_ -= nbytes;
    }
  }
  if (!memory) memory.reset(static_cast<std::byte*>(::operator new(nbytes, kAlignment)));
  std::unique_ptr<Page> page(new Page(shared_from_this(), std::move(memory), nbytes));
  nbytes_.fetch_add(nbytes, std::memory_order_relaxed);  // a page that goes takes it off again
  return PageRef(std::move(page));
}

std::size_t PagePool::free_nbytes() const {
  const std::lock_guard lock(mutex_);
  return free_nbytes_;
}

void PagePool::release_free() {
  std::map<std::size_t, std::vector<Page::Memory>> freed;
  const std::lock_guard lock(mutex_);
  freed.swap(free_);
  free_nbytes_ = 0;
}

void PagePool::take_back(Page::Memory memory, std::size_t nbytes) {
  nbytes_.fetch_sub(nbytes, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  if (nbytes > max_free_bytes_ || free_nbytes_ > max_free_bytes_ - nbytes) return;
  try {
    free_[nbytes].push_back(std::move(memory));
  } catch (const std::bad_alloc&) {
    return;  // it goes back to the system
  }
  free_nbytes_ += nbytes;
}

}  // namespace reprise
