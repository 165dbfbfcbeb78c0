"""The list that ArraysCache.cache hands out."""

from __future__ import annotations

from typing import Any, Optional

import mlx.core as mx


class Slots(list):
    """The slots of an ArraysCache, as a list; what is assigned to an item goes into the cache too."""

    def __init__(self, cache: Any, slots: list[Optional[mx.array]]):
        super().__init__(slots)
        self._cache = cache

    def __setitem__(self, index: Any, value: Any) -> None:
        changed = list(self)
        changed[index] = value
        if isinstance(index, slice):
            self._cache.cache = changed
        else:
            self._cache[index] = value
        super().__setitem__(index, value)

    def __reduce__(self) -> tuple:
        return list, (list(self),)
