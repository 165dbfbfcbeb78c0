#include "reprise/generate/finish_reason.h"

namespace reprise {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
  }
  return "stop";
}

}  // namespace reprise
