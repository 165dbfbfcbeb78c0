// The masks of a layer from its cache, whatever its class: what a model asks before the layer's update.
// Threads: free functions; results are unevaluated arrays of the calling thread.
#pragma once

#include "reprise/cache/layer_cache.h"
#include "reprise/nn/masks.h"

namespace reprise {

// For N new tokens: the cache's make_mask, of a CacheList the first child's that stores keys. Without a cache (null):
// create_attention_mask_without_cache. Throws: invalid_argument for a cache that stores no keys; as make_mask.
Mask create_attention_mask(int N, const LayerCache* cache, const MaskOptions& options = {});

// Which of N new columns hold real tokens, for recurrent layers: the ArraysCache's make_mask, of a CacheList the first
// such child's; NoMask without a cache (null). Throws: invalid_argument for a cache that has no recurrent state; N < 1.
Mask create_ssm_mask(int N, const LayerCache* cache);

}  // namespace reprise
