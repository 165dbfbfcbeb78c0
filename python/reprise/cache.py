"""mlx-lm's caches, under its names and with its signatures, and what only these have.

    from reprise.cache import make_prompt_cache, fork_prompt_cache, save_prompt_cache

All of `mlx_lm.models.cache` is here. Beyond it: `fork_prompt_cache` and `Snapshots`, quantised caches with a window and
for batches, `check_prompt_cache`, and on each cache `fork()`, `length()`, `position` and `max_trim()`.
"""

from __future__ import annotations

from ._base import _BaseCache as _BaseCache
from ._cache_list import CacheList
from ._core import (
    ArraysCache,
    BatchChunkedKVCache,
    BatchKVCache,
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    BatchRotatingKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    LayerCache,
    QuantizedKVCache,
    QuantizedRotatingKVCache,
    RotatingKVCache,
    Snapshots,
    TokenBuffer,
    create_attention_mask,
    create_causal_mask,
    dynamic_roll,
    merge_caches,
    to_dequantized,
    to_quantized,
)
from ._files import LoadedPromptCache, load_prompt_cache, load_prompt_cache_file, save_prompt_cache
from ._functions import (
    cache_length,
    can_trim_prompt_cache,
    check_prompt_cache,
    fork_prompt_cache,
    make_prompt_cache,
    maybe_quantize_kv_cache,
    prompt_cache_nbytes,
    trim_prompt_cache,
)
from ._prompt_store import LRUPromptCache, PromptTrie, PromptTrieResult

__all__ = [
    "ArraysCache",
    "BatchChunkedKVCache",
    "BatchKVCache",
    "BatchQuantizedKVCache",
    "BatchQuantizedRotatingKVCache",
    "BatchRotatingKVCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "LRUPromptCache",
    "LayerCache",
    "LoadedPromptCache",
    "PromptTrie",
    "PromptTrieResult",
    "QuantizedKVCache",
    "QuantizedRotatingKVCache",
    "RotatingKVCache",
    "Snapshots",
    "TokenBuffer",
    "cache_length",
    "can_trim_prompt_cache",
    "check_prompt_cache",
    "create_attention_mask",
    "create_causal_mask",
    "dynamic_roll",
    "fork_prompt_cache",
    "load_prompt_cache",
    "load_prompt_cache_file",
    "make_prompt_cache",
    "maybe_quantize_kv_cache",
    "merge_caches",
    "prompt_cache_nbytes",
    "save_prompt_cache",
    "to_dequantized",
    "to_quantized",
    "trim_prompt_cache",
]
