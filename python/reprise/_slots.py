"""The list that ArraysCache.cache hands out."""

from __future__ import annotations

from typing import Any, Callable, Optional

import mlx.core as mx


class Slots(list):
    """The slots of an ArraysCache, as a list. What is done to it is done to the cache too, or, when it cannot be, to
    neither.
    """

    def __init__(self, cache: Any, slots: list[Optional[mx.array]]):
        super().__init__(slots)
        self._cache = cache

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            self._change(list.__setitem__, index, value)
        else:
            self._cache[index] = value
            super().__setitem__(index, value)

    def __reduce__(self) -> tuple:
        return list, (list(self),)

    def _change(self, change: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        changed = list(self)
        result = change(changed, *args, **kwargs)
        self._cache.cache = changed
        super().__setitem__(slice(None), changed)
        return result


def _changing(name: str) -> Callable[..., Any]:
    change = getattr(list, name)

    def method(self: Slots, *args: Any, **kwargs: Any) -> Any:
        result = self._change(change, *args, **kwargs)
        return self if name in ("__iadd__", "__imul__") else result

    method.__name__ = name
    method.__doc__ = change.__doc__
    return method


for _name in ("__delitem__", "__iadd__", "__imul__", "append", "clear", "extend", "insert", "pop", "remove", "reverse"):
    setattr(Slots, _name, _changing(_name))
