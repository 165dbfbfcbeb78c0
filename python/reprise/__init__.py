"""Reprise: prompt caches that can be forked, trimmed, saved and trusted.

`reprise.cache` has the caches of mlx-lm under their names; `reprise.mlx_lm.install()` makes mlx-lm run on them.
"""

from __future__ import annotations

import importlib.metadata
import sys

# libmlx is C++: what was built against one version cannot run on another.
_MLX_VERSION = "0.32.4"
_MLX_COMMAND = f"pip install 'mlx[cpu]=={_MLX_VERSION}' (Linux without a GPU) or 'mlx=={_MLX_VERSION}' (macOS)"


def _check_mlx() -> None:
    try:
        found = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"reprise needs mlx {_MLX_VERSION}, but none is installed: {_MLX_COMMAND}") from None
    if found != _MLX_VERSION:
        raise ImportError(f"reprise was built for mlx {_MLX_VERSION}, but mlx {found} is installed: {_MLX_COMMAND}")


_check_mlx()

import mlx.core  # noqa: E402,F401  loads libmlx, which the native module shares

try:
    from ._core import __version__ as _version  # type: ignore[attr-defined]  # not in the generated stub
except ModuleNotFoundError as error:
    if error.name != f"{__name__}._core":
        raise
    # A source folder that shadows the installed package, or a build for another version of Python.
    raise ImportError(
        f"reprise in {__path__[0]} has no native module for Python {sys.version_info[0]}.{sys.version_info[1]}: "
        "install it with this Python (pip install './python[cpu]' in a checkout; on macOS ./python) and start outside "
        "the folder python/ of the checkout"
    ) from None

__version__: str = _version

from .errors import (  # noqa: E402
    CancelledError,
    CorruptDataError,
    Error,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)

__all__ = [
    "__version__",
    "CancelledError",
    "CorruptDataError",
    "Error",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "ResourceExhaustedError",
    "UnsupportedError",
]
