#include "reprise/text/textkit_call.h"

#include "reprise/base/error.h"

namespace reprise::internal {

namespace {

ErrorCode error_code(textkit_status status) {
  switch (status) {
    case textkit_invalid_argument:
      return ErrorCode::invalid_argument;
    case textkit_corrupt_data:
      return ErrorCode::corrupt_data;
    case textkit_unsupported:
      return ErrorCode::unsupported;
    case textkit_resource_exhausted:
      return ErrorCode::resource_exhausted;
    case textkit_ok:
    case textkit_internal:
      break;
  }
  return ErrorCode::internal;
}

}  // namespace

void check_textkit(textkit_status status, std::string_view function, const TextkitText& message) {
  if (status != textkit_ok) {
    throw Error(error_code(status), "[" + std::string(function) + "] " + std::string(message.view()));
  }
}

}  // namespace reprise::internal
