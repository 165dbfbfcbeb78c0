"""What pickle and copy do with a native cache, beyond its contents.

pickle finds functions of Python files by name, native ones not; and what others gave an object (attributes, the slots
of a derived class, whatever a derived class says with `__getstate__` and `__setstate__`) is the same for any object.
"""

from __future__ import annotations

import copyreg
from typing import Any

from . import _core


def restored(cls: type, state: Any, extra: dict[str, Any]) -> Any:
    """A cache of `cls` from its state and what the state cannot tell."""
    return _core._unpickled(cls, state, extra)  # type: ignore[attr-defined]  # private: not in the stub


def given_to(cache: Any) -> Any:
    """What others gave the object, in the form in which pickle takes it; None for nothing."""
    if hasattr(cache, "__getstate__"):  # every object from Python 3.11 on
        return cache.__getstate__()
    attributes = cache.__dict__ or None
    slots = {name: getattr(cache, name) for name in copyreg._slotnames(type(cache)) if hasattr(cache, name)}  # type: ignore[attr-defined]
    return (attributes, slots) if slots else attributes


def give(cache: Any, given: Any) -> None:
    """Gives what another object of the same class was given. The dict itself is not shared."""
    if given is None:
        return
    if hasattr(cache, "__setstate__"):
        cache.__setstate__(given)
        return
    attributes, slots = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if attributes:
        cache.__dict__.update(attributes)
    for name, value in (slots or {}).items():
        setattr(cache, name, value)
