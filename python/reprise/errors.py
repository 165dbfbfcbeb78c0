"""What this package raises. Each class is also the builtin exception that callers of mlx-lm catch."""

__all__ = [
    "Error",
    "InvalidArgumentError",
    "FailedPreconditionError",
    "NotFoundError",
    "UnsupportedError",
    "CorruptDataError",
    "ResourceExhaustedError",
    "CancelledError",
    "InternalError",
]


class Error(Exception):
    """Base of all of them. Texts read `[function] what, but got <value>`."""


class InvalidArgumentError(Error, ValueError):
    """A bad argument, shape or flag: the caller can mend it."""


class FailedPreconditionError(Error, RuntimeError, ValueError):
    """The right call at the wrong time."""


class NotFoundError(Error, FileNotFoundError):
    """A file, tensor or name that is not there."""


class UnsupportedError(Error, NotImplementedError, ValueError):
    """Understood, but not implemented."""


class CorruptDataError(Error, ValueError):
    """A file that is damaged or not what it claims to be."""


class ResourceExhaustedError(Error, MemoryError):
    """Memory, disk or a stated budget."""


class CancelledError(Error):
    """The caller asked for the end."""


class InternalError(Error, RuntimeError):
    """A defect of this package."""
