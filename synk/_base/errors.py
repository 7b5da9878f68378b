"""Errors: the exceptions of synk, texts of messages, and the frames that a traceback shows."""

import functools
import inspect
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import (
    Any,
    NoReturn,
    ParamSpec,
    TypeVar,
)

import jax
import numpy as np

from .jax_context import (
    default_jax_context,
    has_user_jax_context,
    is_traced,
    leave_traces,
)
from .old_names import instead_of

P = ParamSpec("P")
R = TypeVar("R")

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep


LONGEST_SHOWN = 100  # characters
_UNKNOWN_KEYWORD = re.compile(r"(\S+)( got an unexpected keyword argument '(\w+)')(.*)", re.DOTALL)


def shown(value: Any) -> str:
    """Return the text of a value in messages: its `repr` or, if that is long, its type and the shape of its arrays."""
    text = repr(value)
    if len(text) <= LONGEST_SHOWN and "\n" not in text:
        return text
    leaves = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array | np.ndarray)]
    arrays = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]
    of_what = f" of {arrays[0]}" + (f" and {len(arrays) - 1} more" if arrays[1:] else "") if arrays else ""
    return f"a {type(value).__name__}{of_what}"


def listed(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def in_a_line(error: Exception) -> str:
    """Return the line of an error of JAX's that tells most: the first or, after a traceback, the last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0].strip()[:200]


def checked_integer(value: Any, what: str, least: int = 0, wanted: str = "") -> int:
    """Return a user's integer as a Python one. Raise TypeError if it is none, ValueError if it is below `least`."""
    wanted = wanted or f"give an integer >= {least}"
    # bool is a subclass of int: True would count as 1.
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{what} is {shown(value)}; {wanted}.")
    if value < least:
        raise ValueError(f"{what} is {value}; {wanted}.")
    return int(value)


class SynkError(Exception):
    """Base class of the errors that only synk raises."""


class LawError(SynkError):
    """Error of `f.check` where the parallel answer is not the serial one.

    The message names every output and shared variable that differs, and the ops that would have matched.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> with synk.simulate(4):
      ...     try:
      ...         synk.function(jnp.mean).check(np.arange(8.0))  # a sum of four means
      ...     except synk.LawError as error:
      ...         print('"mean"' in str(error))
      True
    """

    def __repr__(self) -> str:
        return f"LawError: {self}"


class DivergedError(SynkError):
    """Error where replicas hold different values and one value was asked for.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     w = synk.shared(np.zeros(3, np.float32), name="w")
      ...     w.set_value(np.ones(3, np.float32), rank=1)
      ...     try:
      ...         w.value
      ...     except synk.errors.DivergedError as error:
      ...         print(str(error).splitlines()[0][:29])
      w: its replicas may hold diff
    """


class SharedLostError(SynkError):
    """Error of reading a shared variable if a program that was to write it died on a device.

    Setting the variable (`w.value = ...`, `w.set_value`, `synk.broadcast`, `synk.scatter`) or `synk.load` heals it.
    """


class PeerError(SynkError):
    """Error where another process of the group has failed or is gone.

    The group cannot go on: end this process, and start all again from the last checkpoint (`python -m synk launch
    --restarts` does).
    """


class DisagreementError(SynkError):
    """Error in every process of a group where they are about to run different programs."""


class Preempted(SystemExit):
    """Exit that a loop of `synk.resume` raises in every process, once it has saved after a SIGTERM.

    It ends the program with exit code 143, which tells a launcher that the program was told to stop.
    """

    def __init__(self) -> None:
        super().__init__(143)


class CheckpointError(SynkError):
    """Error of `synk.load` where there are checkpoints, but none that was asked for is whole.

    The message names the file, the step and what is wrong with it.
    """


def public_api(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a public call: run it with JAX's defaults, and hide synk's frames in tracebacks of the user's mistakes."""

    @functools.wraps(fn)
    def synk_call(*args: P.args, **kwargs: P.kwargs) -> R:
        is_inside = is_traced()
        try:
            # Inside a transformation its own settings hold.
            if not is_inside and has_user_jax_context():
                with default_jax_context():
                    return fn(*args, **kwargs)
            return fn(*args, **kwargs)
        except BaseException as error:
            # An interrupt inside JAX may leave its trace set for this thread, and each later call would be traced. A
            # call inside a user's transformation must leave that one alone.
            if not is_inside:
                leave_traces()
            if not isinstance(error, Exception):
                raise
            if _hides_interrupt(error):
                raise KeyboardInterrupt from error
            hide_internal_frames(error, synk_call)
            raise

    return synk_call


def _hides_interrupt(error: Exception) -> bool:
    """Tell whether an error is a Ctrl-C that something below JAX has turned into it."""
    # A Ctrl-C that comes while JAX hashes or compares keys of its caches becomes a ValueError, whose text alone may
    # name it (https://github.com/jax-ml/jax/issues/9082). One in a callback of MLIR, by which JAX walks a program that
    # it looks up in its persistent cache, becomes a RuntimeError, whose text ends with the callback's traceback.
    text, begin = str(error), ("Cache keys should be comparable", "Exception raised in callback")
    is_of_text = isinstance(error, ValueError | RuntimeError) and text.startswith(begin)
    return isinstance(error.__cause__, KeyboardInterrupt) or (is_of_text and "KeyboardInterrupt" in text)


def warn(message: str) -> None:
    """Warn, and point at the innermost line outside synk."""
    warnings.warn(message, stacklevel=_users_frame()[1])


def users_names() -> dict[str, Any]:
    """Return the global names of the innermost function outside synk."""
    return _users_frame()[0].f_globals


def _users_frame() -> tuple[FrameType, int]:
    """Return the frame of the innermost function outside synk, and its level as the caller's caller counts."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return frame, level


def hide_internal_frames(error: Exception, call: Callable[..., Any]) -> None:
    """Cut the traceback of an error to the frames that help."""
    # An error that synk raises on purpose shows the public call alone, one in the user's function the user's frames, a
    # defect of synk everything: a bug report needs it.
    frames: list[TracebackType] = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    # The first frame is the public call itself. If all that follow are synk's, JAX's or Python's, no line of the user's
    # is to be shown.
    first = next((i for i, frame in enumerate(frames) if i and not _is_internal(frame)), None)
    if first is None:
        if frames and (_explain_keyword(error, call) or _is_deliberate(frames[-1])):
            # Raised again, the error shows the public call alone.
            error.__traceback__ = None
        return
    # A traceback points to the one of the next inner frame, so the list is built from the innermost frame.
    linked: TracebackType | None = None
    for frame in reversed([frame for frame in frames[first:] if not _is_ours(frame)]):
        linked = TracebackType(linked, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = linked


def _explain_keyword(error: Exception, call: Callable[..., Any]) -> bool:
    """Say what an unknown keyword of a public call is meant for; return whether Python has raised the error."""
    found = _UNKNOWN_KEYWORD.fullmatch(str(error))
    if found is None or not isinstance(error, TypeError):
        return False
    from difflib import get_close_matches

    who, what, keyword, rest = found.groups()
    is_of_python = who == f"{call.__qualname__}()"
    # Python names the function without its module, so the name of a plain function is completed to synk.name; a
    # method's stands behind its class.
    is_of_module = is_of_python and "." not in who
    if "(did you mean" not in rest:
        named = inspect.getfullargspec(inspect.unwrap(call))
        close = get_close_matches(keyword, named.args + named.kwonlyargs, 1, 0.7)
        what += f" (did you mean {close[0]!r}?)" if close else ""
    # Python 3.13 has a proposal of its own in the rest.
    rest = instead_of(keyword) if is_of_module else "" if is_of_python else rest
    error.args = (f"{call.__module__}." * is_of_module + who + what + rest,)
    return is_of_python


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_OURS)


def _is_internal(frame: TracebackType) -> bool:
    """Check whether a frame belongs to synk, or to JAX or Python's library, which synk calls."""
    file = frame.tb_frame.f_code.co_filename
    # Packages of the user's lie in site-packages, below the folder of Python's library.
    is_python = file.startswith(_PYTHON) and "-packages" not in file
    return is_python or file.startswith((_OURS, _JAX, "<frozen", "<string"))


def _is_deliberate(frame: TracebackType) -> bool:
    """Check whether a `raise` statement of synk's ended here, and not a KeyError or the like that nobody meant."""
    line = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    # The source line tells: no attribute of a frame says by which statement it ended.
    return _is_ours(frame) and line.lstrip().startswith("raise")


_BINARY = "add sub mul truediv floordiv mod pow matmul divmod and or xor".split()
_ORDER = "lt le gt ge".split()
_UNARY = "neg pos abs invert int float complex index round".split()
_INDEXED = "getitem setitem delitem contains len bool".split()
_NUMBERS = (bool, int, float, complex, jax.Array)


def refuse_use(cls: type, say: Callable[[Any, str], str]) -> None:
    """Make a class raise TypeError for operations of arrays and trees that it does not define.

    Args:
      cls: the class.
      say: returns the message for an object and an attempt ("used as a number").
    """

    def refusal(how: str, allows_numpy: bool = False) -> Any:
        def refuse(self: Any, *others: Any, **options: Any) -> Any:
            if allows_numpy and isinstance(others[0], np.ndarray | np.generic):
                # Then NumPy asks `__array_ufunc__`, or takes the object as an array.
                return NotImplemented
            raise TypeError(say(self, how))

        return refuse

    def equal(self: Any, other: Any) -> Any:
        # np.float64 is a float too, but belongs to NumPy.
        if not isinstance(other, _NUMBERS) or isinstance(other, np.generic):
            return self is other or NotImplemented
        raise TypeError(say(self, "compared with a number"))

    # JAX looks up one of these attributes, and replaces a TypeError by a message that names no object. jnp.asarray
    # converts objects that NumPy can convert, and does not look up "sharding".
    of_jax = "sharding" if hasattr(cls, "__array__") else "__jax_array__"

    def no_member(self: Any, member: str) -> NoReturn:
        if member == of_jax:
            raise SynkError(say(self, "used as an array of JAX's"))
        # Names with an underscore are looked up by copy, pickle and IPython, which expect a plain AttributeError.
        raise AttributeError(member if member.startswith("_") else say(self, f"without .{member}"))

    operators = [*_BINARY, *(f"r{name}" for name in _BINARY), *_ORDER]
    members: dict[str, Any] = {"eq": equal, "hash": object.__hash__, "getattr": no_member}
    members |= dict.fromkeys(operators, refusal("used as a number", allows_numpy=True))
    members |= dict.fromkeys(_UNARY, refusal("used as a number"))
    if not hasattr(cls, "__getitem__"):
        members |= dict.fromkeys(_INDEXED, refusal("used as a tree or an array"))
    if not hasattr(cls, "__array__"):
        members |= dict.fromkeys(("array", "array_ufunc"), refusal("used as an array"))
    for name, refuse in members.items():
        setattr(cls, f"__{name}__", refuse)
