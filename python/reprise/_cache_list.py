"""Several caches of one layer (a layer that attends twice, or attends and recurs): mlx-lm's CacheList."""

from __future__ import annotations

import copy
from typing import Any, Callable, Optional, Sequence

from ._base import _BaseCache
from ._restore import change_all
from .errors import CorruptDataError, InvalidArgumentError, UnsupportedError


class CacheList(_BaseCache):
    """Caches of any kind, in order; nests. What is asked of it is asked of every child: all of them do it, or none
    has. A child stays the same object, whatever becomes of its contents.
    """

    caches: Sequence[Any]

    def __init__(self, *caches: Any) -> None:
        self.caches = caches

    def __getitem__(self, index: int) -> Any:
        return self.caches[index]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, getattr(self, 'caches', ())))})"

    @property
    def state(self) -> list[tuple[Any, str]]:
        """The state and the class' name of each child."""
        return [(c.state, type(c).__name__) for c in self.caches]

    @state.setter
    def state(self, value: Sequence[tuple[Any, str]]) -> None:
        self.caches = [_class_named(name).from_state(state) for state, name in value]

    def size(self) -> int:
        return max((c.size() for c in self.caches), default=0)

    def length(self) -> int:
        """Most rows that a child's attention can see."""
        return max((length_of(c) for c in self.caches), default=0)

    @property
    def position(self) -> Optional[int]:
        """Tokens consumed, by the first child that counts them."""
        return next((p for c in self.caches if (p := getattr(c, "position", None)) is not None), None)

    def empty(self) -> bool:
        """The first child is."""
        return len(self.caches) == 0 or self.caches[0].empty()

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.caches)

    def is_trimmable(self) -> bool:
        return all(c.is_trimmable() for c in self.caches)

    def max_trim(self) -> int:
        """How many tokens trim can take away so that what remains is all that a shorter history needs."""
        if not self.is_trimmable():
            return 0
        return min((_max_trim(c) for c in self.caches), default=0)

    def trim(self, n: int) -> int:
        """Takes the last n tokens, or as many as every child has, from all children.

        Returns how many; 0, and nothing changes, when a child is not trimmable. Raises InvalidArgumentError for n < 0.
        """
        if n < 0:
            raise InvalidArgumentError(f"[CacheList.trim] n must not be negative, but got {n}")
        if not self.is_trimmable() or len(self.caches) == 0:
            return 0
        common = min(_available(c, n) for c in self.caches)
        if common == 0:
            return 0
        return min(self._each("trim", lambda child, _: child.trim(common)))

    def fork(self) -> CacheList:
        """An independent list of forks of the children: no row is copied."""
        return copy.deepcopy(self)

    def __copy__(self) -> CacheList:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> CacheList:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def prepare(self, **kwargs: Any) -> None:
        self._each("prepare", lambda child, _: child.prepare(**kwargs))

    def finalize(self) -> None:
        self._each("finalize", lambda child, _: child.finalize())

    def filter(self, batch_indices: Any) -> None:
        """Keeps just these rows of the batch, in this order."""
        self._each("filter", lambda child, _: child.filter(batch_indices))

    def extend(self, other: CacheList) -> None:
        """Appends the rows of another list of as many children. Raises InvalidArgumentError for another number."""
        _check_children("extend", [self, other])
        self._each("extend", lambda child, index: child.extend(other.caches[index]))

    def extract(self, idx: int) -> CacheList:
        """One row of the batch."""
        self._check_each("extract")
        return CacheList(*(c.extract(idx) for c in self.caches))

    @classmethod
    def merge(cls, caches: Sequence[CacheList]) -> CacheList:
        """A batch of lists, child by child.

        Raises InvalidArgumentError for no lists or another number of children, UnsupportedError for a child without
        `merge`.
        """
        if len(caches) == 0:
            raise InvalidArgumentError("[CacheList.merge] at least one list is needed, but got none")
        _check_children("merge", caches)
        caches[0]._check_each("merge")
        merged = cls()
        merged.caches = tuple(first.merge([c.caches[i] for c in caches]) for i, first in enumerate(caches[0].caches))
        return merged

    def _check_each(self, operation: str) -> None:
        for index, child in enumerate(self.caches):
            if not hasattr(child, operation):
                raise UnsupportedError(
                    f"[CacheList.{operation}] child {index} must have {operation}, but got a {type(child).__name__}"
                )

    def _each(self, operation: str, change: Callable[[Any, int], Any]) -> list[Any]:
        self._check_each(operation)
        return change_all(self.caches, change)


def _check_children(operation: str, lists: Sequence[Any]) -> None:
    count = len(lists[0].caches)
    for other in lists:
        if not hasattr(other, "caches") or len(other.caches) != count:
            got = len(other.caches) if hasattr(other, "caches") else f"a {type(other).__name__}"
            raise InvalidArgumentError(f"[CacheList.{operation}] lists must have {count} children, but got {got}")


def _class_named(name: str) -> Any:
    from . import cache

    found = getattr(cache, name, None) if isinstance(name, str) else None
    if not (isinstance(found, type) and issubclass(found, _BaseCache)):
        raise CorruptDataError(f"[CacheList.state] a child's class must be one of reprise.cache, but got {name!r}")
    return found


def length_of(cache: Any) -> int:
    """Rows that attention can see; of an object of another package, its size."""
    return cache.length() if hasattr(cache, "length") else cache.size()


def _available(cache: Any, n: int) -> int:
    """How many of n tokens trim would take away, as far as it can be told without doing it."""
    if hasattr(cache, "fork"):
        return cache.fork().trim(n)
    offset = getattr(cache, "offset", None)
    return min(n, offset) if isinstance(offset, int) else n


def _max_trim(cache: Any) -> int:
    if hasattr(cache, "max_trim"):
        return cache.max_trim()
    offset = getattr(cache, "offset", None)
    return offset if isinstance(offset, int) else length_of(cache)
