// A planned safetensors file, written piece by piece into an open file: no second copy of the data in memory.
// Threads: free functions.
#pragma once

#include "reprise/cache/file_layout.h"
#include "reprise/storage/file_system.h"
#include "reprise/storage/safetensors.h"

namespace reprise::internal {

// `header` is plan_safetensors' for these tensors; its metadata may since have changed, but not in length.
// Requires: the tensors are evaluated and row-contiguous. Throws: what the file throws.
void write_content(WritableFile& output, const SafetensorsHeader& header, const Tensors& tensors);

}  // namespace reprise::internal
