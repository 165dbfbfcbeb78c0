// What the paged caches say of rows and pages that do not fit. Threads: free functions.
#pragma once

#include <string>

#include "reprise/base/error.h"
#include "reprise/kernels/paged_attention.h"

namespace reprise::internal {

[[noreturn]] void fail_paged(const std::string& function, const std::string& what, const std::string& got,
                             ErrorCode code = ErrorCode::invalid_argument);

// Throws: unsupported unless MLX's default device is the CPU.
void check_device_of_pages(const std::string& function);

std::string text_of(const kernels::PageLayout& layout);

}  // namespace reprise::internal
