// Class names in files to constructors: one explicit table.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reprise/cache/layer_cache.h"

namespace reprise {

// Builds a complete cache; transient fields have their defaults.
// Throws: unsupported for a class not known (named); corrupt_data, naming the item that is wrong.
std::unique_ptr<LayerCache> cache_from_state(const std::string& class_name, const State& state);
std::unique_ptr<LayerCache> cache_from_legacy(const std::string& class_name, const State& state, const Meta& meta);

bool is_known_cache_class(const std::string& class_name);
// Each name that a file may use, aliases too.
std::vector<std::string> known_cache_classes();

}  // namespace reprise
