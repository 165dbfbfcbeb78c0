// Tensors of a GGUF file as MLX arrays. Private to storage.
// Threads: free functions; the arrays come back evaluated.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reprise/storage/gguf.h"
#include "reprise/storage/mapped_file.h"
#include "reprise/storage/model_files.h"

namespace reprise::internal {

// One tensor to convert and what becomes of it.
struct GgufConversion {
  const GgufTensor* tensor;
  std::string name;                        // the array's; a quantised one ends in ".weight"
  std::optional<std::int64_t> heads = {};  // set: rows lie interleaved for rotation, in this many heads
  bool holds_one_more = false;             // a float tensor: 1 is subtracted
};

// Float tensors look into `file`, quantised ones are repacked: ".weight" (packed), ".scales", ".biases"; of these the
// file's pages are given back. `leaves_a_processor`: somebody else works meanwhile.
// Throws: unsupported (a type without an exact form in MLX, named), corrupt_data (rows that the heads do not divide).
WeightMap convert_gguf_tensors(const std::vector<GgufConversion>& conversions, std::uint64_t data_offset,
                               const std::shared_ptr<MappedFile>& file, bool leaves_a_processor);

}  // namespace reprise::internal
