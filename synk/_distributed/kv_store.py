"""KV store: the key-value store of JAX's runtime, which all processes share. Nothing else reaches into private JAX."""

from collections.abc import Callable
from typing import Any

from jax._src import distributed, xla_bridge  # noqa: TID251  # the runtime's client has no public name

NOTICE_SECONDS = 1.5  # that process 0 gives the others to read why it goes, and to say so: it takes the store along


def is_running() -> bool:
    """Has `jax.distributed` been started?"""
    return _client() is not None


def is_too_late() -> bool:
    """Has JAX made its devices, so that `jax.distributed` cannot be started any more?"""
    return xla_bridge.backends_are_initialized()


def put(key: str, value: str) -> None:
    """Write, over what was there before."""
    _client().key_value_set(key, value, allow_overwrite=True)


def get(key: str) -> str | None:
    """Read; None where nothing has been written yet."""
    return _unless("NOT_FOUND", lambda: _client().key_value_try_get(key))


def wait(key: str, seconds: float) -> str | None:
    """Read as soon as it is written; None where that takes longer."""
    return _unless("DEADLINE_EXCEEDED", lambda: _client().blocking_key_value_get(key, int(seconds * 1000)))


def list(folder: str) -> dict[str, str]:
    """All that is written under a folder, by the rest of its key."""
    return {key.rsplit("/", 1)[1]: value for key, value in _client().key_value_dir_get(folder)}


def delete(key: str) -> None:
    _client().key_value_delete(key)


def _unless(status: str, read: Callable[[], str]) -> str | None:
    try:
        return read()
    except Exception as error:
        if status in str(error):
            return None
        raise


def _client() -> Any:
    return distributed.global_state.client
