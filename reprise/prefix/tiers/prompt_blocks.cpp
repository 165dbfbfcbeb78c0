#include "reprise/prefix/tiers/prompt_blocks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "reprise/base/error.h"
#include "reprise/cache/arrays_cache.h"
#include "reprise/prefix/tiers/cache_leaves.h"

namespace reprise {

namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::corrupt_data, "[rebuild_prompt_cache] " + what);
}

// The first `end - span.begin` rows of it.
PageSpan cut_span(const PageSpan& span, int end) {
  PageSpan cut = span;
  cut.end = end;
  const auto pages = static_cast<std::size_t>((end - span.begin + kernels::kPageRows - 1) / kernels::kPageRows);
  cut.pages.resize(std::min(pages, cut.pages.size()));
  return cut;
}

// Spans of every attention layer, in the order of the blocks.
std::vector<std::vector<PageSpan>> spans_by_layer(const std::vector<PrefixTree::Block>& blocks, int length,
                                                  std::size_t layers) {
  std::vector<std::vector<PageSpan>> spans(layers);
  int reached = 0;
  for (const PrefixTree::Block& block : blocks) {
    const auto* content = dynamic_cast<const PromptBlock*>(block.content.get());
    const std::string name = "block [" + std::to_string(block.begin) + ", " + std::to_string(block.end) + ")";
    if (content == nullptr) refuse(name + " must hold rows, but got something else");
    if (block.begin != reached || block.end <= block.begin || content->begin != block.begin ||
        content->end < block.end) {
      refuse(name + " must go on at " + std::to_string(reached) + ", but got rows [" + std::to_string(content->begin) +
             ", " + std::to_string(content->end) + ")");
    }
    if (content->layers.size() != layers) {
      refuse(name + " must have " + std::to_string(layers) + " layers, but got " +
             std::to_string(content->layers.size()));
    }
    for (std::size_t layer = 0; layer < layers; ++layer) {
      const PageSpan& span = content->layers[layer];
      if (span.begin != content->begin || span.end != content->end) {
        refuse(name + ", layer " + std::to_string(layer) + " must have the block's rows, but got [" +
               std::to_string(span.begin) + ", " + std::to_string(span.end) + ")");
      }
      spans[layer].push_back(cut_span(span, block.end));
    }
    reached = block.end;
  }
  if (reached != length) {
    refuse("blocks must reach " + std::to_string(length) + ", but got " + std::to_string(reached));
  }
  return spans;
}

// `form`'s recurrent layers become those of the checkpoint.
void restore_recurrent(const std::vector<ArraysCache*>& recurrent, int length, const StoredRef& checkpoint) {
  const auto* content = dynamic_cast<const PromptCheckpoint*>(checkpoint.get());
  if (content == nullptr) refuse("a checkpoint is needed, but got none");
  if (content->position != length || content->layers.size() != recurrent.size()) {
    refuse("the checkpoint must be of " + std::to_string(recurrent.size()) + " layers after " + std::to_string(length) +
           " tokens, but got " + std::to_string(content->layers.size()) + " after " +
           std::to_string(content->position));
  }
  for (std::size_t i = 0; i < recurrent.size(); ++i) {
    const auto* state = dynamic_cast<const ArraysCache*>(content->layers[i].get());
    if (state == nullptr || state->num_slots() != recurrent[i]->num_slots() || state->batch_size() != 1) {
      refuse("recurrent layer " + std::to_string(i) + " must have one row of " +
             std::to_string(recurrent[i]->num_slots()) + " slots, but got another layer's state");
    }
    *recurrent[i] = *state;
  }
}

}  // namespace

bool needs_checkpoint(const PromptCache& cache) { return paged_leaves(cache).size() != leaves_of(cache).size(); }

std::size_t PromptBlock::nbytes() const {
  std::size_t bytes = 0;
  for (const PageSpan& span : layers) bytes += span.nbytes();
  return bytes;
}

std::size_t PromptCheckpoint::nbytes() const {
  std::size_t bytes = 0;
  for (const auto& layer : layers) bytes += layer->nbytes();
  return bytes;
}

std::shared_ptr<const PromptBlock> cut_block(const PromptCache& cache, int begin, int end) {
  auto block = std::make_shared<PromptBlock>();
  block->begin = begin;
  block->end = end;
  for (const PagedKVCache* layer : paged_leaves(cache)) block->layers.push_back(layer->span(begin, end));
  return block;
}

std::shared_ptr<const PromptBlock> cut_block(const PromptBlock& block, int end) {
  if (end <= block.begin || end > block.end) {
    throw Error(ErrorCode::invalid_argument, "[cut_block] the end must lie in (" + std::to_string(block.begin) + ", " +
                                                 std::to_string(block.end) + "], but got " + std::to_string(end));
  }
  auto cut = std::make_shared<PromptBlock>();
  cut->begin = block.begin;
  cut->end = end;
  for (const PageSpan& span : block.layers) cut->layers.push_back(cut_span(span, end));
  return cut;
}

std::shared_ptr<const PromptCheckpoint> take_checkpoint(const PromptCache& cache, int position) {
  auto checkpoint = std::make_shared<PromptCheckpoint>();
  checkpoint->position = position;
  for (const ArraysCache* layer : recurrent_leaves(cache)) {
    checkpoint->layers.push_back(std::make_shared<const ArraysCache>(*layer));
  }
  return checkpoint->layers.empty() ? nullptr : checkpoint;
}

PromptCache rebuild_prompt_cache(const PromptCache& form, const std::vector<PrefixTree::Block>& blocks, int length,
                                 const StoredRef& checkpoint) {
  PromptCache cache = form.fork();
  const std::vector<PagedKVCache*> paged = paged_leaves(cache);
  const auto spans = spans_by_layer(blocks, length, paged.size());
  for (std::size_t layer = 0; layer < paged.size(); ++layer) {
    try {
      paged[layer]->adopt(spans[layer], length);
    } catch (const Error& error) {
      refuse("attention layer " + std::to_string(layer) + ": " + error.what());
    }
  }
  if (needs_checkpoint(cache)) restore_recurrent(recurrent_leaves(cache), length, checkpoint);
  try {
    check_prompt_cache(cache, length);
  } catch (const Error& error) {
    refuse(error.what());
  }
  return cache;
}

}  // namespace reprise
