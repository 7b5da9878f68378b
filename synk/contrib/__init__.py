"""Contrib: works and is tested, and may change between versions. Each name is loaded at first use."""

import importlib as _importlib
import typing as _typing

__all__ = ["LocalSteps", "PowerSGD", "local_steps", "pairs", "scan", "tune", "unstack"]

# A file named as its function would hide the function, as soon as anybody imports the file.
_FILES = {
    "LocalSteps": "_local_steps",
    "PowerSGD": "_power_sgd",
    "local_steps": "_local_steps",
    "pairs": "_pairs",
    "scan": "_scan",
    "tune": "_tune",
    "unstack": "_unstack",
}
if _typing.TYPE_CHECKING:  # what a checker of the user's program reads beside `__getattr__`
    from ._local_steps import LocalSteps, local_steps
    from ._pairs import pairs
    from ._power_sgd import PowerSGD
    from ._scan import scan
    from ._tune import tune
    from ._unstack import unstack


def __getattr__(name: str) -> _typing.Any:
    """Load what is loaded at first use."""
    if name == "synkhronos":
        return _importlib.import_module("synk.contrib.synkhronos")
    if name == "pytensor":  # whoever looks through all members must not switch JAX's 64-bit mode by that
        raise AttributeError(
            "synk.contrib.pytensor is not loaded yet: import synk.contrib.pytensor, which sets JAX's 64-bit mode."
        )
    if name not in _FILES:
        raise AttributeError(f"module 'synk.contrib' has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"synk.contrib.{_FILES[name]}"), name)
    value.__module__ = "synk.contrib"
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*__all__, "pytensor", "synkhronos", *(name for name in globals() if name.startswith("__"))])
