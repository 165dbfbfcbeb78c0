// Errors of the operating system in this library's terms. Private to storage.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "reprise/base/error.h"

namespace reprise::internal {

// The Error for `errno_value` after `action` ("write", "open") on `file`: not_found for ENOENT and ENOTDIR,
// resource_exhausted for a full disk, a used-up quota or a lack of memory or descriptors, else internal.
Error system_error(std::string_view function, std::string_view action, const std::filesystem::path& file,
                   int errno_value);

// `text` in double quotes, cut to a readable length, with everything but printable ASCII escaped: names from damaged
// files go into messages through it.
std::string printable(std::string_view text);

}  // namespace reprise::internal
