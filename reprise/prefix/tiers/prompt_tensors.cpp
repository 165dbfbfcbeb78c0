// Blocks and checkpoints as tensors. Of a block: for each attention layer and each part of its pages, rows
// [kv_heads, end - begin, features]; of a checkpoint: the slots that are set.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "mlx/allocator.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/prefix/tiers/prompt_blocks.h"

namespace reprise {

namespace mx = mlx::core;

namespace {

using kernels::kPageRows;
using kernels::PageLayout;

constexpr const char* kVersion = "1";
constexpr int kMaxLayers = 1 << 16;

const std::vector<std::string>& part_names(bool quantized) {
  static const std::vector<std::string> dense = {"keys", "values"};
  static const std::vector<std::string> packed = {"keys",   "keys.scales",   "keys.biases",
                                                  "values", "values.scales", "values.biases"};
  return quantized ? packed : dense;
}

std::string layer_name(int layer) { return "layer." + std::to_string(layer); }
std::string slot_name(int layer, int slot) { return layer_name(layer) + ".slot." + std::to_string(slot); }

[[noreturn]] void refuse(const std::string& what, const std::string& got) {
  throw Error(ErrorCode::corrupt_data, "[prompt_blocks] " + what + ", but got " + got);
}

mx::array allocate(mx::Shape shape, mx::Dtype dtype) {
  std::size_t nbytes = dtype.size();
  for (const auto dim : shape) nbytes *= static_cast<std::size_t>(dim);
  mx::allocator::Data data = mx::allocator::malloc(nbytes);
  if (data.buffer().ptr() == nullptr && nbytes > 0) throw std::bad_alloc();
  return mx::array(std::move(data), std::move(shape), dtype);
}

mx::array row_major(const mx::array& array) {
  mx::array rows = mx::contiguous(array);
  mx::eval(rows);
  return rows;
}

// In memory of its own: the file's tensors may look at the file.
mx::array copied(const mx::array& array) {
  const mx::array rows = row_major(array);
  mx::array copy = allocate(array.shape(), array.dtype());
  if (copy.nbytes() > 0) std::memcpy(copy.data<char>(), rows.data<char>(), copy.nbytes());
  return copy;
}

// Calls copy(row of the page, row of the tensor, bytes) for the rows of each page and head: they lie together in both.
template <typename Copy>
void for_each_piece(const PageLayout& layout, std::size_t part, int rows, int features, const Copy& copy) {
  const std::size_t row_bytes = static_cast<std::size_t>(features) * layout.dtypes()[part].size();
  const std::size_t offset = layout.offsets()[part];
  for (int first = 0; first < rows; first += kPageRows) {
    const auto count = static_cast<std::size_t>(std::min(kPageRows, rows - first));
    const auto page = static_cast<std::size_t>(first / kPageRows);
    for (std::size_t head = 0; head < static_cast<std::size_t>(layout.kv_heads); ++head) {
      copy(page, offset + head * kPageRows * row_bytes,
           (head * static_cast<std::size_t>(rows) + static_cast<std::size_t>(first)) * row_bytes, count * row_bytes);
    }
  }
}

mx::array rows_of(const PageSpan& span, std::size_t part) {
  const int rows = span.end - span.begin;
  const int features = span.layout.shapes()[part][3];
  mx::array tensor = allocate({span.layout.kv_heads, rows, features}, span.layout.dtypes()[part]);
  char* to = tensor.data<char>();
  for_each_piece(span.layout, part, rows, features,
                 [&](std::size_t page, std::size_t at, std::size_t tensor_at, std::size_t bytes) {
                   std::memcpy(to + tensor_at, span.pages[page]->data() + at, bytes);
                 });
  return tensor;
}

TensorFile block_tensors(const PromptBlock& block) {
  TensorFile file;
  file.metadata = {{"format", "reprise_prefix_block"},
                   {"version", kVersion},
                   {"begin", std::to_string(block.begin)},
                   {"end", std::to_string(block.end)},
                   {"layers", std::to_string(block.layers.size())}};
  for (std::size_t i = 0; i < block.layers.size(); ++i) {
    const PageSpan& span = block.layers[i];
    const std::string name = layer_name(static_cast<int>(i));
    const auto& quantization = span.layout.quantization;
    if (quantization) {
      file.metadata[name + ".group_size"] = std::to_string(quantization->group_size);
      file.metadata[name + ".bits"] = std::to_string(quantization->bits);
    }
    const auto& parts = part_names(quantization.has_value());
    for (std::size_t part = 0; part < parts.size(); ++part) {
      file.tensors.emplace(name + "." + parts[part], rows_of(span, part));
    }
  }
  return file;
}

TensorFile checkpoint_tensors(const PromptCheckpoint& checkpoint) {
  TensorFile file;
  file.metadata = {{"format", "reprise_prefix_checkpoint"},
                   {"version", kVersion},
                   {"position", std::to_string(checkpoint.position)},
                   {"layers", std::to_string(checkpoint.layers.size())}};
  for (std::size_t i = 0; i < checkpoint.layers.size(); ++i) {
    const int layer = static_cast<int>(i);
    const auto& state = dynamic_cast<const ArraysCache&>(*checkpoint.layers[i]);
    file.metadata[layer_name(layer) + ".slots"] = std::to_string(state.num_slots());
    for (int slot = 0; slot < state.num_slots(); ++slot) {
      if (auto value = state.get(slot)) file.tensors.emplace(slot_name(layer, slot), *std::move(value));
    }
  }
  return file;
}

// A file's metadata and tensors, by name.
class Reader {
 public:
  Reader(const TensorFile& file, const std::string& format) : file_(file) {
    if (text("format") != format) refuse("the format must be " + format, "\"" + text("format") + "\"");
    if (text("version") != kVersion) refuse(std::string("the version must be ") + kVersion, text("version"));
  }

  int number(const std::string& name, int least, int most) const {
    const std::string& digits = text(name);
    int value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < least || value > most) {
      refuse(name + " must be a number from " + std::to_string(least) + " to " + std::to_string(most),
             "\"" + digits + "\"");
    }
    return value;
  }
  bool has(const std::string& name) const { return file_.metadata.contains(name); }

  const mx::array* find(const std::string& name) {
    const auto found = file_.tensors.find(name);
    if (found == file_.tensors.end()) return nullptr;
    ++used_;
    return &found->second;
  }
  const mx::array& tensor(const std::string& name, std::size_t dims) {
    const mx::array* found = find(name);
    if (found == nullptr) refuse("a tensor \"" + name + "\" is needed", "none");
    if (found->ndim() != dims || found->size() == 0) {
      refuse(name + " must have " + std::to_string(dims) + " axes and not be empty", "another shape");
    }
    return *found;
  }
  void finish() const {
    if (used_ != file_.tensors.size()) {
      refuse("there must be " + std::to_string(used_) + " tensors", std::to_string(file_.tensors.size()));
    }
  }

 private:
  const std::string& text(const std::string& name) const {
    const auto found = file_.metadata.find(name);
    if (found == file_.metadata.end()) refuse("metadata must have \"" + name + "\"", "none");
    return found->second;
  }

  const TensorFile& file_;
  std::size_t used_ = 0;
};

// What the tensors of a layer say of its pages; that all of them fit it is checked by the caller.
PageLayout read_layout(Reader& reader, const std::string& name) {
  PageLayout layout;
  const mx::array& keys = reader.tensor(name + ".keys", 3);
  layout.kv_heads = keys.shape(0);
  if (!reader.has(name + ".bits")) {
    layout.key_size = keys.shape(2);
    layout.value_size = reader.tensor(name + ".values", 3).shape(2);
    layout.dtype = keys.dtype();
  } else {
    const KVQuantization quantization{reader.number(name + ".group_size", 32, 128),
                                      reader.number(name + ".bits", 2, 8)};
    const mx::array& scales = reader.tensor(name + ".keys.scales", 3);
    layout.quantization = quantization;
    layout.key_size = scales.shape(2) * quantization.group_size;
    layout.value_size = reader.tensor(name + ".values.scales", 3).shape(2) * quantization.group_size;
    layout.dtype = scales.dtype();
  }
  if (!mx::issubdtype(layout.dtype, mx::floating)) refuse(name + " must hold floating numbers", "another dtype");
  return layout;
}

PageSpan read_span(const TensorFile& file, const PageLayout& layout, const std::string& name, int begin, int end,
                   const std::shared_ptr<PagePool>& pool) {
  PageSpan span{.layout = layout, .begin = begin, .end = end, .pages = {}};
  const int rows = end - begin;
  const auto& parts = part_names(layout.quantization.has_value());
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const auto found = file.tensors.find(name + "." + parts[part]);
    const mx::Shape shape = {layout.kv_heads, rows, layout.shapes()[part][3]};
    if (found == file.tensors.end() || found->second.shape() != shape ||
        found->second.dtype() != layout.dtypes()[part]) {
      refuse(name + "." + parts[part] + " must have the layer's heads, rows, features and dtype",
             found == file.tensors.end() ? "none" : "another shape or dtype");
    }
  }
  for (int first = 0; first < rows; first += kPageRows) {
    span.pages.push_back(pool->allocate(layout.nbytes()));
    span.pages.back()->set_claimed(std::min(kPageRows, rows - first));
  }
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const mx::array tensor = row_major(file.tensors.at(name + "." + parts[part]));
    const char* from = tensor.data<char>();
    for_each_piece(layout, part, rows, tensor.shape(2),
                   [&](std::size_t page, std::size_t at, std::size_t tensor_at, std::size_t bytes) {
                     std::memcpy(span.pages[page]->data() + at, from + tensor_at, bytes);
                   });
  }
  return span;
}

struct BlockHead {
  int begin;
  int end;
  std::vector<PageLayout> layouts;

  std::size_t nbytes() const {
    const auto pages = static_cast<std::size_t>((end - begin + kPageRows - 1) / kPageRows);
    std::size_t bytes = 0;
    for (const PageLayout& layout : layouts) bytes += pages * layout.nbytes();
    return bytes;
  }
};

BlockHead read_head(const TensorFile& file) {
  Reader reader(file, "reprise_prefix_block");
  constexpr int kMost = 1 << 30;
  BlockHead head;
  head.begin = reader.number("begin", 0, kMost);
  head.end = reader.number("end", head.begin + 1, kMost);
  if (head.begin % kPageRows != 0) {
    refuse("begin must be a multiple of " + std::to_string(kPageRows), std::to_string(head.begin));
  }
  const int layers = reader.number("layers", 0, kMaxLayers);
  std::size_t tensors = 0;
  for (int i = 0; i < layers; ++i) {
    head.layouts.push_back(read_layout(reader, layer_name(i)));
    tensors += part_names(head.layouts.back().quantization.has_value()).size();
  }
  if (tensors != file.tensors.size()) {
    refuse("there must be " + std::to_string(tensors) + " tensors", std::to_string(file.tensors.size()));
  }
  return head;
}

}  // namespace

TensorFile to_tensors(const Stored& block_or_checkpoint) {
  if (const auto* block = dynamic_cast<const PromptBlock*>(&block_or_checkpoint)) return block_tensors(*block);
  if (const auto* checkpoint = dynamic_cast<const PromptCheckpoint*>(&block_or_checkpoint)) {
    return checkpoint_tensors(*checkpoint);
  }
  throw Error(ErrorCode::invalid_argument, "[to_tensors] a block or a checkpoint is needed, but got something else");
}

std::size_t pages_nbytes(const TensorFile& block) { return read_head(block).nbytes(); }

std::shared_ptr<const PromptBlock> block_from_tensors(const TensorFile& file, const std::shared_ptr<PagePool>& pool) {
  const BlockHead head = read_head(file);
  auto block = std::make_shared<PromptBlock>();
  block->begin = head.begin;
  block->end = head.end;
  for (std::size_t i = 0; i < head.layouts.size(); ++i) {
    block->layers.push_back(
        read_span(file, head.layouts[i], layer_name(static_cast<int>(i)), head.begin, head.end, pool));
  }
  return block;
}

std::shared_ptr<const PromptCheckpoint> checkpoint_from_tensors(const TensorFile& file) {
  Reader reader(file, "reprise_prefix_checkpoint");
  auto checkpoint = std::make_shared<PromptCheckpoint>();
  checkpoint->position = reader.number("position", 0, 1 << 30);
  const int layers = reader.number("layers", 0, kMaxLayers);
  for (int i = 0; i < layers; ++i) {
    State::List slots;
    const int count = reader.number(layer_name(i) + ".slots", 0, kMaxLayers);
    for (int slot = 0; slot < count; ++slot) {
      const mx::array* value = reader.find(slot_name(i, slot));
      slots.push_back(value == nullptr ? State() : State(copied(*value)));
    }
    checkpoint->layers.push_back(ArraysCache::from_state(State::List{std::move(slots), State(), State()}));
  }
  reader.finish();
  return checkpoint;
}

}  // namespace reprise
