"""Failures: errors of JAX about programs, in words that name the function."""

from .._base.errors import SynkError
from .._base.jax_context import checks_floats

FEWER_ROWS = "Run it with num_slices=2 or more, which needs the memory of one slice."


class NotFinite(FloatingPointError):
    """Error of a call whose numbers are not finite, which its function or the user's options refuse."""


def translate_error(error: Exception, name: str, advice: str = FEWER_ROWS) -> Exception:
    """Return JAX's error about a launch in words that name the function; other errors unchanged."""
    if isinstance(error, SynkError):
        return error
    if checks_floats() and type(error).__name__ == "InternalFloatingPointError":
        return NotFinite(f"{name}: a result holds NaN or infinity, which jax_debug_nans or _infs forbids.")
    # XLA says "Out of memory" where the host has no more.
    if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        first = str(error).splitlines()[0]
        return MemoryError(f"{name}: {first} {advice}")
    return error
