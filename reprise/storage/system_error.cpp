#include "reprise/storage/system_error.h"

#include <cerrno>
#include <system_error>

namespace reprise::internal {

Error system_error(std::string_view function, std::string_view action, const std::filesystem::path& file,
                   int errno_value) {
  ErrorCode code = ErrorCode::internal;
  switch (errno_value) {
    case ENOENT:
    case ENOTDIR:
      code = ErrorCode::not_found;
      break;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      code = ErrorCode::resource_exhausted;
      break;
    default:
      break;
  }
  return Error(code, "[" + std::string(function) + "] cannot " + std::string(action) + " " + file.string() + ": " +
                         std::generic_category().message(errno_value));
}

std::string printable(std::string_view text) {
  constexpr std::size_t kMaxBytes = 120;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text.substr(0, kMaxBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      out += "\\x";
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    } else {
      out += c;
    }
  }
  out += text.size() > kMaxBytes ? "…\"" : "\"";
  return out;
}

}  // namespace reprise::internal
