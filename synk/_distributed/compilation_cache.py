"""Compilation cache: keep compiled programs in a folder, JAX's persistent cache."""

import os
import tempfile
from pathlib import Path
from typing import Any

from jax.experimental.compilation_cache import compilation_cache

from .._base.errors import shown
from .._base.jax_context import config


def checked_folder(cache: Any, call: str) -> str | None:
    """Make the folder of an argument `cache`, or that of SYNK_CACHE, and check that files can be written there."""
    name = "cache"
    if cache is None:
        name, cache = "SYNK_CACHE", os.environ.get("SYNK_CACHE") or None
    if cache is None:
        return None
    if not isinstance(cache, str | os.PathLike) or not isinstance(os.fspath(cache), str):
        raise TypeError(f"{call}: {name} is {shown(cache)}; give the path of a folder, or None.")
    text = os.fspath(cache)
    if not text or "://" in text:
        raise ValueError(
            f"{call}: {name} is {text!r}; give the path of a folder. For a bucket, set JAX_COMPILATION_CACHE_DIR."
        )
    try:
        # Tried now: JAX would warn at each program and go on without a cache.
        folder = Path(text).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home is known
        raise ValueError(
            f"{call}: {name} is {text!r}, but files cannot be written there ({error}). Give another folder."
        ) from error
    return str(folder)


def use_folder(folder: str | None) -> None:
    """Keep every program that JAX compiles from now on in a folder; None leaves JAX's options as they are."""
    if folder is None:
        return
    is_changed = config.jax_compilation_cache_dir != folder
    config.update("jax_compilation_cache_dir", folder)
    # JAX leaves out programs that compile within a second. A step's small ones make up a part of its start.
    config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if is_changed:
        # JAX reads the option once, when it first compiles.
        compilation_cache.reset_cache()
