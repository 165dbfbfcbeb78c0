// Why an answer ended. Free of MLX. Threads: values.
#pragma once

#include <string_view>

namespace reprise {

enum class FinishReason { stop, length, cancelled };
std::string_view to_string(FinishReason reason);

}  // namespace reprise
