"""Prompt caches kept for reuse under the tokens that they hold: mlx-lm's classes of these names.

Any hashable object serves as a model's key, any hashable objects as tokens, and any objects as caches: what is asked
of those that are not this package's is what mlx-lm asks of them (`nbytes`, `is_trimmable`, `trim`, `copy.deepcopy`).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, Hashable, Optional, Sequence, TypeVar

import mlx.core as mx

from . import _core
from ._base import _BaseCache
from ._functions import can_trim_prompt_cache, fork_prompt_cache, prompt_cache_nbytes, trim_prompt_cache
from .errors import InvalidArgumentError

Value = TypeVar("Value")

_UNLIMITED = 1 << 63
_logger = logging.getLogger("reprise")


@dataclass
class PromptTrieResult:
    model: Any
    exact: Optional[Sequence[Any]]  # the tokens themselves are stored; the others are then not looked for
    shorter: Optional[Sequence[Any]]  # longest stored proper prefix
    # Shortest stored sequence that begins with the first `common_prefix` tokens, when those are at least one.
    longer: Optional[Sequence[Any]]
    common_prefix: int  # tokens shared with any stored sequence; 0 for an exact match


class PromptTrie(Generic[Value]):
    """Values under (model, tokens). The empty sequence is a key like any other, and a prefix of every other.

    Threads: one object belongs to one thread at a time.
    """

    def __init__(self) -> None:
        self._tries: dict[Hashable, _core.TokenTrie] = {}
        self._values: dict[int, Value] = {}  # by the numbers that the tries store
        self._next = 0

    def add(self, model: Hashable, tokens: Sequence[Hashable], value: Value) -> Optional[Value]:
        """Stores the value. Returns the one that it replaces, or None."""
        trie = self._tries.get(model)
        if trie is None:
            trie = _core.TokenTrie()
        number = self._next
        replaced = trie.add(tokens, number)
        self._next += 1
        self._tries[model] = trie
        self._values[number] = value
        return None if replaced is None else self._values.pop(replaced)

    def get(self, model: Hashable, tokens: Sequence[Hashable]) -> Value:
        """Raises KeyError when nothing is stored under exactly these tokens."""
        return self._values[self._number(model, self._tries[model].get(tokens))]

    def pop(self, model: Hashable, tokens: Sequence[Hashable]) -> Value:
        """Takes the value out. Raises KeyError when nothing is stored under exactly these tokens."""
        trie = self._tries[model]
        number = self._number(model, trie.pop(tokens))
        self._forget_if_empty(model, trie)
        return self._values.pop(number)

    def pop_prefixes(
        self, model: Hashable, tokens: Sequence[Hashable], min_length: int = 0
    ) -> list[tuple[int, Value]]:
        """Takes out the values at proper prefixes of at least `min_length` tokens.

        Returns (length, value) pairs, shortest first. Raises KeyError for a model that has none.
        """
        trie = self._tries[model]
        popped = trie.pop_prefixes(tokens, min_length)
        self._forget_if_empty(model, trie)
        return [(length, self._values.pop(number)) for length, number in popped]

    def search(self, model: Hashable, tokens: Sequence[Hashable]) -> PromptTrieResult:
        trie = self._tries.get(model)
        if trie is None:
            return PromptTrieResult(model, None, None, None, 0)
        exact, shorter, longer, common_prefix = trie.search(tokens)
        if exact:
            return PromptTrieResult(model, tokens, None, None, 0)
        return PromptTrieResult(model, None, None if shorter is None else tokens[:shorter], longer, common_prefix)

    @staticmethod
    def _number(model: Hashable, number: Optional[int]) -> int:
        if number is None:
            raise KeyError(model)
        return number

    def _forget_if_empty(self, model: Hashable, trie: _core.TokenTrie) -> None:
        if len(trie) == 0:
            del self._tries[model]


class LRUPromptCache:
    """Prompt caches for reuse, bounded in number and bytes; the least recently used leave first.

    A hit gives a private `copy.deepcopy`, which for the caches of this package is a fork: no row is copied, and the
    stored entry stays as it is. What is stored is as long as its key says: layers that know a position are at it.

    Threads: safe; a lock is held during each call. What is stored has been evaluated.
    """

    @dataclass
    class CacheEntry:
        prompt_cache: list
        nbytes: int
        cache_type: str

    def __init__(self, max_size: int = 10, max_bytes: int = _UNLIMITED) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._trie: PromptTrie[LRUPromptCache.CacheEntry] = PromptTrie()
        # Least recently used first: id of the entry → (model, tokens, entry). Types in the order of eviction.
        self._orders: dict[str, OrderedDict[int, tuple]] = {k: OrderedDict() for k in ("assistant", "user", "system")}
        self._n_bytes_by_type = dict.fromkeys(self._orders, 0)

    def __len__(self) -> int:
        return sum(len(order) for order in self._orders.values())

    @property
    def nbytes(self) -> int:
        """Sum of the entries' bytes."""
        return sum(self._n_bytes_by_type.values())

    def fetch_nearest_cache(self, model: Hashable, tokens: list) -> tuple[Optional[list], list]:
        """The entry that leaves the fewest tokens: the tokens' own, one that goes on beyond what they share with it
        and can be trimmed to that, else the longest stored prefix. It becomes the most recently used of its type.

        Returns (private copy, or None when nothing helps; tokens that it does not hold). At least one token is left
        when there was one, since a model must be given one to answer; only caches of other packages are given out
        whole, as mlx-lm does.
        """
        with self._lock:
            result = self._trie.search(model, tokens)
            if result.exact is not None:
                entry = self._trie.get(model, tokens)
                if not tokens or not _is_ours(entry.prompt_cache):
                    return self._hit(entry, 0), tokens[len(tokens) :]
                if can_trim_prompt_cache(entry.prompt_cache, 1):
                    return self._hit(entry, 1), tokens[-1:]
                result = self._trie.search(model, tokens[:-1])
                if result.exact:
                    return self._hit(self._trie.get(model, result.exact), 0), tokens[-1:]

            shorter_length = len(result.shorter) if result.shorter is not None else 0
            if result.longer is not None and result.common_prefix > shorter_length:
                entry = self._trie.get(model, result.longer)
                reused = min(len(tokens) - 1, result.common_prefix)
                surplus = len(result.longer) - reused
                if can_trim_prompt_cache(entry.prompt_cache, surplus):
                    return self._hit(entry, surplus), tokens[reused:]
            if result.shorter is not None and shorter_length > 0:
                return self._hit(self._trie.get(model, result.shorter), 0), tokens[shorter_length:]
            return None, tokens

    def insert_cache(
        self, model: Hashable, tokens: list, prompt_cache: list, *, cache_type: str = "assistant"
    ) -> bool:
        """Stores a cache that holds these tokens, in place of an entry of the same key, and removes the entries of
        proper prefixes that it can be trimmed to. Then entries are evicted until both limits hold.

        One that alone exceeds a limit is not stored and evicts nothing. When layers hold fewer tokens than the key
        (the last one sampled has not been fed), what all of them hold is stored under its own tokens; what cannot be
        made to fit is not stored. Returns: it is stored now.
        Raises InvalidArgumentError for another `cache_type`.
        """
        if cache_type not in self._orders:
            raise InvalidArgumentError(
                f"[LRUPromptCache.insert_cache] cache_type must be one of {list(self._orders)}, but got {cache_type!r}"
            )
        # The lock from here: who asks right after an answer waits for its cache instead of missing it.
        with self._lock:
            fitted, length = _fitted(prompt_cache, len(tokens))
            if fitted is None:
                return False
            prompt_cache = fitted
            tokens = tokens[:length]
            mx.eval([c.state for c in prompt_cache if hasattr(c, "state")])
            entry = LRUPromptCache.CacheEntry(prompt_cache, prompt_cache_nbytes(prompt_cache), cache_type)
            if entry.nbytes > self.max_bytes or self.max_size < 1:
                return False
            replaced = self._trie.add(model, tokens, entry)
            if replaced is not None:
                self._forget(replaced)
            self._orders[cache_type][id(entry)] = (model, tokens, entry)
            self._n_bytes_by_type[cache_type] += entry.nbytes
            if can_trim_prompt_cache(prompt_cache):
                # Prefixes that trimming gives exactly add nothing.
                covered = min((c.max_trim() for c in prompt_cache if hasattr(c, "max_trim")), default=length)
                for _, prefix in self._trie.pop_prefixes(model, tokens, max(0, length - covered)):
                    self._forget(prefix)
            self._evict(self.max_size, self.max_bytes)
            return id(entry) in self._orders[cache_type]

    def trim_to(self, *, n_sequences: Optional[int] = None, n_bytes: Optional[int] = None) -> None:
        """Evicts until there are at most this many entries and bytes."""
        with self._lock:
            self._evict(
                _UNLIMITED if n_sequences is None else max(0, n_sequences),
                _UNLIMITED if n_bytes is None else max(0, n_bytes),
            )

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        with self._lock:
            return {
                cache_type: {"n_sequences": len(order), "n_bytes": self._n_bytes_by_type[cache_type]}
                for cache_type, order in self._orders.items()
            }

    def _hit(self, entry: CacheEntry, surplus: int) -> list:
        prompt_cache = copy.deepcopy(entry.prompt_cache)
        if surplus > 0:
            trim_prompt_cache(prompt_cache, surplus)
        self._orders[entry.cache_type].move_to_end(id(entry))
        return prompt_cache

    def _evict(self, n_sequences: int, n_bytes: int) -> None:
        while len(self) > n_sequences or (self.nbytes > n_bytes and len(self) > 0):
            model, tokens, entry = next(iter(self._type_to_evict().values()))
            self._trie.pop(model, tokens)
            self._forget(entry)

    def _type_to_evict(self) -> OrderedDict[int, tuple]:
        """The first type that has at least as many entries as the next one."""
        orders = list(self._orders.values())
        for order, next_order in zip(orders, orders[1:]):
            if order and len(order) >= len(next_order):
                return order
        return orders[-1]

    def _forget(self, entry: CacheEntry) -> None:
        """The books, not the trie."""
        del self._orders[entry.cache_type][id(entry)]
        self._n_bytes_by_type[entry.cache_type] -= entry.nbytes


def _is_ours(prompt_cache: list) -> bool:
    return len(prompt_cache) > 0 and all(isinstance(c, _BaseCache) for c in prompt_cache)


def _fitted(prompt_cache: list, length: int) -> tuple[Optional[list], int]:
    """A private fork of our caches that holds as many tokens as all layers and the key have, and that number. Other
    packages' caches as they are. None when the layers cannot be brought to one length."""
    if not _is_ours(prompt_cache):
        return prompt_cache, length
    layers = fork_prompt_cache(prompt_cache)
    surplus = {}
    common = min([length, *(p for c in layers if (p := getattr(c, "position", None)) is not None)])
    for layer in layers:
        position = getattr(layer, "position", None)
        surplus[id(layer)] = 0 if position is None else position - common
        # A layer that counts nothing is as long as it is said to be.
        possible = common == length if position is None else layer.max_trim() >= position - common
        if not possible:
            _logger.warning(
                "[LRUPromptCache.insert_cache] not stored: a layer (%s) cannot be brought to the %d tokens that the "
                "others hold of the key's %d",
                type(layer).__name__,
                common,
                length,
            )
            return None, 0
    for layer in layers:
        if surplus[id(layer)] > 0:
            layer.trim(surplus[id(layer)])
    return layers, common
