// What operations over pages share. Private to `kernels`.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "reprise/kernels/paged_attention.h"

namespace reprise::kernels::internal {

[[noreturn]] void refuse_pages(const char* function, const std::string& text);

// Throws: unsupported, where the default device is not the CPU.
void need_cpu_for_pages(const char* function);

// Its pages' memory. Throws: invalid_argument, where pages of rows `first` … `end` - 1 are missing.
std::vector<std::byte*> pages_of(const char* function, const PagedSequence& sequence, int first, int end);

// Of these `stored` arrays those that may not have run, each once.
std::vector<mlx::core::array> waits_of(const std::vector<mlx::core::array>& after);

// Bytes of each part of a page.
std::vector<std::size_t> part_sizes(const PageLayout& layout);

// The first `rows` rows of a page.
void copy_page_rows(const PageLayout& layout, const std::byte* from, std::byte* to, int rows);

}  // namespace reprise::kernels::internal
