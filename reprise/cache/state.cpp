#include "reprise/cache/state.h"

namespace reprise {

void State::collect_arrays(std::vector<mlx::core::array>& out) const {
  if (const auto* array = as_array()) {
    out.push_back(*array);
  } else if (const auto* list = as_list()) {
    for (const State& item : *list) item.collect_arrays(out);
  }
}

}  // namespace reprise
