"""mlx-lm's functions over the caches of all layers, and those that only this package has.

They take caches of any kind, mixed as one likes: what is to be done is asked of each cache by its methods, so that
those of a derived class count.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Optional

from . import _core
from ._base import _BaseCache
from ._cache_list import CacheList, length_of
from ._restore import change_all
from .errors import FailedPreconditionError, InvalidArgumentError, UnsupportedError

# First tokens that a bounded cache never drops; mlx-lm's number.
_KEEP = 4

_logger = logging.getLogger("reprise")


def make_prompt_cache(model: Any, max_kv_size: Optional[int] = None) -> list[Any]:
    """A cache for each layer of the model, of the kinds that its `make_cache` decides, else KVCache.

    `max_kv_size` bounds each layer that would grow: a KVCache becomes RotatingKVCache(max_kv_size, keep=4), also where
    the model's own `make_cache` made it (mlx-lm ignores the bound there) and inside a CacheList; layers that are
    bounded or recurrent already stay as they are. Caches of mlx-lm's own classes become ours of the same name.
    Raises InvalidArgumentError for max_kv_size ≤ 4, in which nothing but the kept tokens would fit.
    """
    if max_kv_size is not None and max_kv_size <= _KEEP:
        raise InvalidArgumentError(
            f"[make_prompt_cache] max_kv_size must be larger than the {_KEEP} tokens that are always kept, but got "
            f"{max_kv_size}"
        )
    if hasattr(model, "make_cache"):
        caches = [adopt(cache) for cache in model.make_cache()]
    else:
        caches = [_core.KVCache() for _ in range(len(model.layers))]
    if max_kv_size is None:
        return caches
    bounded = [_bounded(cache, max_kv_size) for cache in caches]
    _logger.debug(
        "[make_prompt_cache] max_kv_size=%d applied to %d of %d layers",
        max_kv_size,
        sum(after is not before for before, after in zip(caches, bounded)),
        len(caches),
    )
    return bounded


def adopt(cache: Any) -> Any:
    """Our cache of the same class and contents for one of mlx-lm's own classes; anything else as it is."""
    if type(cache).__module__ != "mlx_lm.models.cache":
        return cache
    from . import cache as ours

    name = type(cache).__name__
    if name == "CacheList":
        return CacheList(*map(adopt, cache.caches))
    found = getattr(ours, name, None)
    return cache if found is None else found.from_state(cache.state)


def _bounded(cache: Any, max_kv_size: int) -> Any:
    if type(cache) is _core.KVCache and cache.empty():
        return _core.RotatingKVCache(max_size=max_kv_size, keep=_KEEP)
    if type(cache) is CacheList:
        children = [_bounded(child, max_kv_size) for child in cache.caches]
        if any(after is not before for before, after in zip(cache.caches, children)):
            return CacheList(*children)
    return cache


def can_trim_prompt_cache(cache: list[Any], num_tokens: Optional[int] = None) -> bool:
    """Whether every layer is trimmable; with `num_tokens`, whether every layer can give up that many and still has all
    that the shorter history needs. True for no layers.

    Raises InvalidArgumentError for num_tokens < 0.
    """
    if num_tokens is not None and num_tokens < 0:
        raise InvalidArgumentError(f"[can_trim_prompt_cache] num_tokens must not be negative, but got {num_tokens}")
    if not all(c.is_trimmable() for c in cache):
        return False
    return num_tokens is None or all(c.max_trim() >= num_tokens for c in cache if hasattr(c, "max_trim"))


def trim_prompt_cache(cache: list[Any], num_tokens: int) -> int:
    """Takes the last m = min(num_tokens, smallest `max_trim`) tokens from every layer: all of them, or none.

    Returns m; 0 for no layers or a layer that cannot trim. Raises InvalidArgumentError for num_tokens < 0.
    """
    if num_tokens < 0:
        raise InvalidArgumentError(f"[trim_prompt_cache] num_tokens must not be negative, but got {num_tokens}")
    if len(cache) == 0 or not can_trim_prompt_cache(cache):
        return 0
    common = min([num_tokens, *(c.max_trim() for c in cache if hasattr(c, "max_trim"))])
    return change_all(cache, lambda layer, _: layer.trim(common))[0]


def cache_length(cache: list[Any]) -> int:
    """Most rows that a layer's attention can see; 0 for no layers."""
    return max(map(length_of, cache), default=0)


def prompt_cache_nbytes(cache: list[Any]) -> int:
    """Bytes of the buffers of all layers, slack included."""
    return sum(c.nbytes for c in cache)


def fork_prompt_cache(cache: list[Any]) -> list[Any]:
    """An independent prompt cache. Our layers share their buffers until one side writes: no row is copied, whatever
    the length. Other objects are deep copies."""
    return copy.deepcopy(list(cache))


def check_prompt_cache(cache: list[Any], expected: Optional[int] = None) -> None:
    """Raises FailedPreconditionError, naming the layer, when layers that know their position disagree or differ from
    `expected`, or when a native layer breaks what its class promises."""
    if _core.is_native(cache):
        _core.check_prompt_cache(cache, expected)
        return
    for index, layer in enumerate(cache):
        position = position_of(layer)
        if position is None:
            continue
        if expected is None:
            expected = position
        elif position != expected:
            raise FailedPreconditionError(
                f"[check_prompt_cache] layer {index} ({type(layer).__name__}) must be at position {expected}, but got "
                f"{position}"
            )


def position_of(cache: Any) -> Optional[int]:
    """Tokens that a cache has consumed; None where it does not count them, or has a count for each row."""
    if isinstance(cache, _BaseCache):
        return getattr(cache, "position", None)
    offset = getattr(cache, "offset", None)
    return offset if isinstance(offset, int) else None


def maybe_quantize_kv_cache(
    prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: Optional[int]
) -> None:
    """Puts its quantised counterpart in the place of every layer that has one and has come to `quantized_kv_start`.
    All of them, or none. The children of a CacheList stay: not every model that has one can attend to quantised rows.

    Whether it can be done is told by the first call, also when nothing is to be done yet: a request that starts goes
    through. Nothing happens for kv_bits = None.
    Raises InvalidArgumentError for a group size or bits that MLX does not know, or that do not fit a layer's head size.
    """
    if kv_bits is None:
        return
    _core.QuantizedKVCache(group_size=kv_group_size, bits=kv_bits)  # refuses what MLX does not know
    candidates = [(index, c) for index, c in enumerate(prompt_cache) if hasattr(c, "to_quantized")]
    for index, layer in candidates:
        _check_head_size(index, layer, kv_group_size)
    replacements = []
    for index, layer in candidates:
        position = position_of(layer)
        if position is None or position < quantized_kv_start:
            continue
        try:
            replacements.append((index, adopt(layer).to_quantized(group_size=kv_group_size, bits=kv_bits)))
        except NotImplementedError as error:
            raise UnsupportedError(
                f"[maybe_quantize_kv_cache] layer {index} must have a quantised counterpart, but got a "
                f"{type(layer).__name__}"
            ) from error
    for index, quantized in replacements:
        prompt_cache[index] = quantized


def _check_head_size(index: int, layer: Any, group_size: int) -> None:
    for name in ("keys", "values"):
        rows = getattr(layer, name, None)
        if rows is not None and rows.shape[-1] % group_size != 0:
            raise InvalidArgumentError(
                f"[maybe_quantize_kv_cache] kv_group_size must divide the head size of layer {index}'s {name}, but got "
                f"{group_size} for {rows.shape[-1]}"
            )
