// Pages: counted to the byte, reused, and appended to by one holder at a time.
#include <gtest/gtest.h>

#include <cstdint>
#include <thread>
#include <vector>

#include "reprise/cache/page_pool.h"

namespace reprise {
namespace {

constexpr std::size_t kBytes = 4096;

TEST(PagePool, CountsThePagesThatAreHeld) {
  const auto pool = PagePool::make();
  EXPECT_EQ(pool->nbytes(), 0u);
  PageRef one = pool->allocate(kBytes), other = pool->allocate(2 * kBytes);
  EXPECT_EQ(pool->nbytes(), 3 * kBytes);
  EXPECT_EQ(other->nbytes(), 2 * kBytes);
  const kernels::PageMemory memory = memory_of(one);
  EXPECT_EQ(memory.get(), one->data());
  one.reset();
  EXPECT_EQ(pool->nbytes(), 3 * kBytes) << "an operation that holds a page's memory keeps it";
  other.reset();
  EXPECT_EQ(pool->nbytes(), kBytes);
}

TEST(PagePool, PagesAreAligned) {
  const auto pool = PagePool::make();
  std::vector<PageRef> pages;
  for (std::size_t bytes : {64u, 192u, 4160u}) {
    pages.push_back(pool->allocate(bytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages.back()->data()) % 64, 0u);
  }
}

TEST(PagePool, AFreedPageIsUsedAgainForItsSizeAndComesUnclaimed) {
  const auto pool = PagePool::make();
  PageRef page = pool->allocate(kBytes);
  const std::byte* data = page->data();
  EXPECT_TRUE(page->claim(0, 5));
  page.reset();
  EXPECT_EQ(pool->nbytes(), 0u);
  EXPECT_EQ(pool->free_nbytes(), kBytes);
  const PageRef larger = pool->allocate(2 * kBytes);
  EXPECT_EQ(pool->free_nbytes(), kBytes);
  const PageRef again = pool->allocate(kBytes);
  EXPECT_EQ(again->data(), data);
  EXPECT_EQ(again->claimed(), 0);
  EXPECT_EQ(pool->free_nbytes(), 0u);
}

TEST(PagePool, KeepsNoMoreFreedBytesThanAllowed) {
  const auto pool = PagePool::make(3 * kBytes);
  std::vector<PageRef> pages;
  for (int i = 0; i < 8; ++i) pages.push_back(pool->allocate(kBytes));
  pages.clear();
  EXPECT_EQ(pool->free_nbytes(), 3 * kBytes);
  pages.push_back(pool->allocate(4 * kBytes));
  pages.clear();
  EXPECT_EQ(pool->free_nbytes(), 3 * kBytes);
  pool->release_free();
  EXPECT_EQ(pool->free_nbytes(), 0u);
  pages.push_back(pool->allocate(kBytes));
  EXPECT_EQ(pool->nbytes(), kBytes);
}

TEST(PagePool, PagesKeepTheirPool) {
  auto pool = PagePool::make();
  PageRef page = pool->allocate(kBytes);
  pool.reset();
  page->data()[kBytes - 1] = std::byte{1};
  page.reset();
}

TEST(PagePool, PagesComeAndGoOnAnyThread) {
  const auto pool = PagePool::make(4 * kBytes);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<PageRef> mine;
      for (int i = 0; i < 200; ++i) {
        mine.push_back(pool->allocate(i % 3 == 0 ? kBytes : 2 * kBytes));
        if (i % 5 == 0) mine.erase(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(mine.size() / 2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->nbytes(), 0u);
  EXPECT_LE(pool->free_nbytes(), 4 * kBytes);
}

TEST(Page, OnlyWhoeverHasAllClaimedRowsClaimsTheNext) {
  const auto pool = PagePool::make();
  const PageRef page = pool->allocate(kBytes);
  EXPECT_TRUE(page->claim(0, 3));
  EXPECT_FALSE(page->claim(0, 2));
  EXPECT_FALSE(page->claim(2, 4));
  EXPECT_FALSE(page->claim(4, 5));
  EXPECT_EQ(page->claimed(), 3);
  EXPECT_TRUE(page->claim(3, 64));
  EXPECT_EQ(page->claimed(), 64);
  page->set_claimed(7);
  EXPECT_TRUE(page->claim(7, 8));
}

}  // namespace
}  // namespace reprise
