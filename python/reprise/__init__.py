"""Reprise: prompt caches that can be forked, trimmed, saved and trusted.

`reprise.cache` has the caches of mlx-lm under their names; `reprise.mlx_lm.install()` makes mlx-lm run on them.
"""

from __future__ import annotations

import importlib.metadata

# libmlx is C++: what was built against one version cannot run on another.
_MLX_VERSION = "0.32.4"


def _check_mlx() -> None:
    try:
        found = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"reprise needs mlx {_MLX_VERSION}: pip install 'mlx[cpu]=={_MLX_VERSION}' (Linux without a GPU), or mlx alone on macOS"
        ) from None
    if found != _MLX_VERSION:
        raise ImportError(
            f"reprise was built for mlx {_MLX_VERSION}, but mlx {found} is installed: pip install mlx=={_MLX_VERSION}"
        )


_check_mlx()

import mlx.core  # noqa: E402,F401  loads libmlx, which the native module shares

from ._core import __version__  # noqa: E402
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
