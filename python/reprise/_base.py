"""The common base of all cache classes. The native classes are registered with it; others may derive from it."""

from __future__ import annotations

import abc
from typing import Any, TypeVar

from . import _core

Cache = TypeVar("Cache", bound="_BaseCache")


class _BaseCache(abc.ABC):
    """What a cache class of one's own starts from: the answers of a cache that stores nothing, as in mlx-lm.

    `isinstance(cache, _BaseCache)` holds for every class of this package.
    """

    @property
    def state(self) -> Any:
        """Arrays, numbers, text, None, and lists of such, from which `from_state` makes an equal cache."""
        return []

    @state.setter
    def state(self, value: Any) -> None:
        if value is not None and value:
            raise ValueError("[_BaseCache.state] a cache without state can be given none, but got " + repr(value))

    @classmethod
    def from_state(cls: type[Cache], state: Any) -> Cache:
        """A cache made from a state alone; `__init__` is not called."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def is_trimmable(self) -> bool:
        return False

    def size(self) -> int:
        """Stored tokens, as far as the class counts them; 0 does not mean empty."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        raise NotImplementedError(f"[{type(self).__name__}.nbytes] the class must implement it")

    def empty(self) -> bool:
        """No buffer yet."""
        raise NotImplementedError(f"[{type(self).__name__}.empty] the class must implement it")


_BaseCache.register(_core.LayerCache)
