"""Prompt-cache files: mlx-lm's, and for the same cache the same bytes as the C++ program's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, Optional, Sequence, Union, overload

from . import _core
from ._base import _BaseCache

FileName = Union[str, "os.PathLike[str]"]


@dataclass
class LoadedPromptCache:
    """All that a prompt-cache file holds."""

    cache: list[_BaseCache]
    metadata: dict[str, str]
    """The user's."""
    tokens: Optional[list[int]]
    """Ids of the rows stored, where the file has them."""
    model_fingerprint: str
    app_json: str
    """What a program (a chat's transcript) stored beside the cache, a JSON object; empty for none."""
    layout: Literal["current", "legacy"]


def save_prompt_cache(
    file_name: FileName,
    cache: Sequence[Any],
    metadata: Optional[dict[str, str]] = None,
    *,
    tokens: Optional[Sequence[int]] = None,
    model_fingerprint: str = "",
    app_json: str = "",
    layout: Literal["current", "legacy"] = "current",
    portable: bool = False,
) -> str:
    """Saves the caches of all layers to a safetensors file that mlx-lm reads too; only rows that hold tokens.

    The file takes its name only when it is complete and was read back: a failure leaves an old file untouched.
    `.safetensors` is appended to a name without it. The same cache and arguments give the same bytes.

    metadata: text by name. tokens: ids of the rows stored. layout: "legacy" is what mlx-lm ≤ 0.31 reads. portable:
    writes quantised classes that mlx-lm does not have as the nearest one that it has; loading them here gives the
    quantised class back.
    Returns: the path written.
    Raises: TypeError for a layer that is none of this package's caches; ValueError for an empty metadata name, layers
    out of step, or what the layout cannot hold; OSError and MemoryError of the file system.
    """
    return _core.save_prompt_cache(
        file_name,
        cache,
        metadata,
        tokens=tokens,
        model_fingerprint=model_fingerprint,
        app_json=app_json,
        layout=layout,
        portable=portable,
    )


def load_prompt_cache_file(file_name: FileName) -> LoadedPromptCache:
    """Everything in a prompt-cache file. All of it is read, checked and evaluated before this returns.

    Raises: FileNotFoundError; ValueError for a name without `.safetensors` and for what is damaged or no prompt cache,
    naming layer and item; NotImplementedError for a class that is not known.
    """
    return LoadedPromptCache(**_core.load_prompt_cache_file(file_name))


@overload
def load_prompt_cache(file_name: FileName, return_metadata: Literal[False] = False) -> list[_BaseCache]: ...
@overload
def load_prompt_cache(file_name: FileName, return_metadata: Literal[True]) -> tuple[list[_BaseCache], dict[str, str]]: ...
def load_prompt_cache(file_name: FileName, return_metadata: bool = False) -> Any:
    """The caches in a file, of this package or of any mlx-lm; with `return_metadata` also the user's metadata.

    Raises: as load_prompt_cache_file.
    """
    loaded = load_prompt_cache_file(file_name)
    return (loaded.cache, loaded.metadata) if return_metadata else loaded.cache
