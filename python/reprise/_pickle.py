"""What pickle calls to make a cache again: pickle finds functions of Python files by name, native ones not."""

from __future__ import annotations

from typing import Any

from . import _core


def restored(cls: type, state: Any, extra: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """A cache of `cls` from its state, what the state cannot tell, and the attributes that others gave it."""
    return _core._unpickled(cls, state, extra, attributes)
