"""mlx-lm on the caches of this package.

    import reprise.mlx_lm
    reprise.mlx_lm.install()

From then on mlx-lm's models, generation, batches, chat and server use them, and our attention. From the command line:
`python -m reprise.mlx_lm COMMAND …` is `python -m mlx_lm COMMAND …` on our caches.

What is replaced: in `mlx_lm.models.cache` every name that `reprise.cache` has too, in `mlx_lm.models.base` the
attention functions, in `mlx_lm.generate` the quantising of caches; and the same objects wherever a loaded module of
mlx-lm holds them as a global. Modules loaded later find them in place. The server's --prompt-cache-bytes becomes a
limit of the store. Caches that exist already, and classes derived from mlx-lm's own, stay what they are.

Threads: the functions here take a lock. A generation that is running while another thread installs or uninstalls may
see both kinds of caches: do it between requests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import re
import sys
import threading
from types import ModuleType
from typing import Any, Callable, Iterator

from . import __version__, _core
from ._base import _BaseCache
from ._functions import maybe_quantize_kv_cache
from ._prompt_store import LRUPromptCache
from .errors import UnsupportedError

__all__ = ["install", "uninstall", "installed", "is_installed", "main"]

_logger = logging.getLogger("reprise")
_OLDEST = (0, 32)
_SOURCES = ("mlx_lm.models.cache", "mlx_lm.models.base", "mlx_lm.generate")
_ATTENTION = ("scaled_dot_product_attention", "quantized_scaled_dot_product_attention")


class _Exchange:
    """Objects of mlx-lm, each with what takes its place; puts them in and out of mlx-lm's modules."""

    def __init__(self) -> None:
        # Both sides are kept alive, so that an id stays that object's.
        self._pairs: list[tuple[Any, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._done: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, ours

    def add(self, original: Any, ours: Any) -> None:
        """Wherever a module holds `original` as a global."""
        self._pairs.append((original, ours))

    def add_attribute(self, owner: Any, name: str, ours: Any) -> None:
        self._attributes.append((owner, name, ours))

    def put_in(self) -> None:
        replacements = {id(original): ours for original, ours in self._pairs}
        for module in _modules_of_mlx_lm():
            for name, value in list(vars(module).items()):
                if id(value) in replacements:
                    self._set(module, name, replacements[id(value)])
        for owner, name, ours in self._attributes:
            self._set(owner, name, ours)

    def take_out(self) -> None:
        # What somebody else has put in the place of ours meanwhile stays.
        for owner, name, original, ours in reversed(self._done):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._done.clear()
        # Modules loaded in between have ours by import.
        originals = {id(ours): original for original, ours in self._pairs}
        for module in _modules_of_mlx_lm():
            for name, value in list(vars(module).items()):
                if id(value) in originals:
                    setattr(module, name, originals[id(value)])

    def _set(self, owner: Any, name: str, ours: Any) -> None:
        self._done.append((owner, name, vars(owner)[name], ours))
        setattr(owner, name, ours)


_lock = threading.RLock()
_exchange: _Exchange | None = None  # while installed
_wanted = False  # by install(), which holds beyond every installed()
_contexts = 0


def install() -> None:
    """Puts our caches and attention into mlx-lm. A second call changes nothing.

    Raises ModuleNotFoundError without mlx-lm; UnsupportedError for one older than 0.32.
    """
    global _wanted
    with _lock:
        _put_in()
        _wanted = True


def uninstall() -> None:
    """Gives mlx-lm back what is its own, also in modules loaded since. Without install() nothing happens."""
    global _wanted
    with _lock:
        _wanted = False
        _take_out()


def is_installed() -> bool:
    return _exchange is not None


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """install() for the length of a `with`, unless it was installed already. Nests, also over threads: the last one
    that leaves uninstalls."""
    global _contexts
    with _lock:
        _put_in()
        _contexts += 1
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if _contexts == 0 and not _wanted:
                _take_out()


def main() -> None:
    """The command line of mlx-lm on our caches."""
    try:
        install()
    except (ModuleNotFoundError, UnsupportedError) as error:
        sys.exit(str(error))
    importlib.import_module("mlx_lm.cli").main()


def _put_in() -> None:
    global _exchange
    if _exchange is not None:
        return
    _check_mlx_lm()
    exchange = _make_exchange()
    try:
        exchange.put_in()
    except BaseException:
        exchange.take_out()
        raise
    _exchange = exchange


def _take_out() -> None:
    global _exchange
    if _exchange is not None:
        _exchange.take_out()
        _exchange = None


def _check_mlx_lm() -> None:
    try:
        version = importlib.import_module("mlx_lm").__version__
    except ModuleNotFoundError as error:
        if error.name != "mlx_lm":
            raise
        raise ModuleNotFoundError(
            "[reprise.mlx_lm.install] mlx-lm must be installed (pip install mlx-lm), but got none", name="mlx_lm"
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise UnsupportedError(f"[reprise.mlx_lm.install] mlx-lm must be 0.32 or newer, but got {version}")


def _make_exchange() -> _Exchange:
    from . import cache as ours

    theirs, base, generate, server = (
        importlib.import_module(f"mlx_lm.{name}") for name in ("models.cache", "models.base", "generate", "server")
    )
    exchange = _Exchange()
    for name, original in vars(theirs).items():
        # What the module only imports (mlx, typing) is not its own.
        if getattr(original, "__module__", None) == theirs.__name__ and hasattr(ours, name):
            exchange.add(original, getattr(ours, name))
    exchange.add(theirs._BaseCache, _BaseCache)
    for name in _ATTENTION:
        exchange.add(getattr(base, name), getattr(_core, name))
    exchange.add(generate.maybe_quantize_kv_cache, maybe_quantize_kv_cache)
    exchange.add_attribute(server.ResponseGenerator, "__init__", _bounded_by_bytes(server.ResponseGenerator.__init__))
    return exchange


def _bounded_by_bytes(init: Callable[..., None]) -> Callable[..., None]:
    """The server's --prompt-cache-bytes as a limit of the store itself, which then holds after each insert. The server
    alone looks at it only when a request comes in, and not at all for requests outside a batch."""

    @functools.wraps(init)
    def __init__(self: Any, model_provider: Any, prompt_cache: Any, *args: Any, **kwargs: Any) -> None:
        max_bytes = getattr(getattr(model_provider, "cli_args", None), "prompt_cache_bytes", None)
        if isinstance(max_bytes, int) and isinstance(prompt_cache, LRUPromptCache):
            prompt_cache.max_bytes = min(prompt_cache.max_bytes, max_bytes)
        # Not by install(): that is before the server has set up its log.
        _logger.info("mlx-lm %s on the caches of reprise %s", sys.modules["mlx_lm"].__version__, __version__)
        init(self, model_provider, prompt_cache, *args, **kwargs)

    return __init__


def _modules_of_mlx_lm() -> list[ModuleType]:
    """Those that others import from come first: a module that is just being loaded has our objects or is still to be
    visited."""
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == "mlx_lm" or name.startswith("mlx_lm."))
    }
    return sorted(modules.values(), key=lambda module: module.__name__ not in _SOURCES)


if __name__ == "__main__":
    # The module by its own name, so that whoever imports it sees the same state.
    from reprise.mlx_lm import main as _main

    _main()
