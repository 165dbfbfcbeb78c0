"""Several caches changed together: all of them, or none."""

from __future__ import annotations

import copy
from typing import Any, Callable, Sequence, TypeVar

import mlx.core as mx
from mlx.utils import tree_map

Result = TypeVar("Result")


def change_all(caches: Sequence[Any], change: Callable[[Any, int], Result]) -> list[Result]:
    """Calls `change(cache, index)` with each cache. When one raises, all are what they were before.

    Returns: the results in order.
    """
    if len(caches) == 1:  # which is all or nothing by itself
        return [change(caches[0], 0)]
    restore_each = [restorer(cache) for cache in caches]
    try:
        return [change(cache, index) for index, cache in enumerate(caches)]
    except BaseException:
        for restore in restore_each:
            restore()
        raise


def restorer(cache: Any) -> Callable[[], None]:
    """What puts a cache's contents of now back into it. No row is copied.

    An object of another package is taken to be a plain one whose attributes are its contents.
    """
    if hasattr(cache, "_assign"):
        before = cache.fork()
        return lambda: cache._assign(before)
    if hasattr(cache, "caches"):
        children = cache.caches
        restore_each = [restorer(child) for child in children]

        def restore_children() -> None:
            cache.caches = children
            for restore in restore_each:
                restore()

        return restore_children
    attributes = getattr(cache, "__dict__", None)
    if attributes is None:
        return lambda: None
    # In-place operators change the array object itself, hence handles of our own; containers are copied on the way.
    saved = {name: tree_map(_handle, value) for name, value in attributes.items()}

    def restore_attributes() -> None:
        attributes.clear()
        attributes.update(saved)

    return restore_attributes


def _handle(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, mx.array) else value
