"""Checkpoints by orbax: asynchronous saves, object stores. Not imported by `synk` itself; needs the extra `orbax`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from . import _engine, _flight, _trace
from ._checkpoint import check_variables, compare, described
from ._errors import entry
from ._shared import Shared

__all__ = ["load", "save"]


@entry
def save(manager: Any, variables: Mapping[str, Shared], *, step: int, extra: Any = None) -> bool:
    """Save shared variables by an orbax `CheckpointManager`, as `synk.save` does into a folder.

    The values are those of now, even where the manager writes in the background; functions may run on at once.

    Args:
      manager: an `orbax.checkpoint.CheckpointManager`; its options say where, how many, how often, and whether to wait.
      variables: from name to shared variable.
      step: the number of the checkpoint.
      extra: what else to keep, as JSON has it.

    Returns:
      Whether it was saved: the manager may skip steps.

    Example:
      >>> import numpy as np, orbax.checkpoint as ocp, synk, tempfile  # doctest: +SKIP
      >>> import synk.orbax  # doctest: +SKIP
      >>> w = synk.shared(np.arange(3.0))  # doctest: +SKIP
      >>> with ocp.CheckpointManager("/tmp/run") as manager:  # doctest: +SKIP
      ...     synk.orbax.save(manager, {"w": w}, step=1)
      ...     synk.orbax.load(manager, {"w": w})
      True
      (1, None)
    """
    ocp = _orbax()
    check_variables(variables, "orbax.save")
    for name, variable in variables.items():
        if variable.is_flat and not variable.is_equal:
            raise ValueError(f"synk.orbax.save: {name} is flat and differs on the replicas. Use synk.save.")
    with _flight.LOCK, _trace.eager():
        about = {"extra": extra, "variables": described(variables)}
        state = {name: _copies(variable) for name, variable in variables.items()}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        return bool(manager.save(int(step), args=args))


@entry
def load(manager: Any, variables: Mapping[str, Shared], *, step: int | None = None) -> tuple[int, Any]:
    """Set shared variables to what `synk.orbax.save` has saved: all of them, or on any error none.

    Args:
      manager: an `orbax.checkpoint.CheckpointManager`.
      variables: from name to shared variable, the same names as were saved.
      step: which checkpoint; None for the newest.

    Returns:
      The step, and what was saved as `extra`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: names, trees, shapes, dtypes or the number of replicas differ; the message names the first difference.
    """
    ocp = _orbax()
    check_variables(variables, "orbax.load")
    with _flight.LOCK, _trace.eager():
        step = manager.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"synk.orbax.load: {manager.directory} has none; synk.orbax.save makes one.")
        about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        compare(variables, about["variables"], f"synk.orbax.load: {manager.directory} step {step}")
        wanted = {name: _wanted(variable, about["variables"][name]) for name, variable in variables.items()}
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        state = manager.restore(step, args=args)["state"]
        kept = about["variables"]
        ready = [(v, kept[name], _own(v, kept[name], state[name])) for name, v in variables.items()]
        with _flight.uninterrupted():
            for variable, said, leaves in ready:
                variable.take(leaves, said["lengths"], said["is_equal"], "what was saved")
    return int(step), about["extra"]


def _copies(variable: Shared) -> list[jax.Array]:
    """Its leaves as the user sees them, in memory of their own; stacked where replicas differ."""
    to: _engine.Lies = "everywhere" if variable.is_equal else "stacked"
    kept = variable.read(lambda leaves: _engine.laid(variable.home, leaves, variable.lies, to))
    return jax.block_until_ready(variable.seen_leaves(kept))


def _wanted(variable: Shared, said: Any) -> list[jax.ShapeDtypeStruct]:
    """What orbax restores, and where to."""
    home = variable.home
    shapes = [(tuple(leaf["shape"]), np.dtype(leaf["dtype"])) for leaf in said["leaves"]]
    if said["is_equal"]:
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=home.everywhere) for shape, dtype in shapes]
    tall = max(said["lengths"]) if said["lengths"] else None
    return [
        jax.ShapeDtypeStruct(
            (home.size, *(shape if tall is None else (tall, *shape[1:]))), dtype, sharding=home.stacked
        )
        for shape, dtype in shapes
    ]


def _own(variable: Shared, said: Any, leaves: list[jax.Array]) -> list[jax.Array]:
    """Restored leaves as the variable keeps them; programs may overwrite them."""
    home = variable.home
    if not said["is_equal"]:
        return _engine.laid(home, leaves, "stacked", "stacked")
    if variable.is_flat:
        leaves = [_engine.sent(home, leaf, "everywhere") for leaf in variable.kept_leaves(leaves)]
    return _engine.laid(home, leaves, "everywhere", variable.lies)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # the extra may be missing
    except ImportError as error:
        raise ImportError("synk.orbax: orbax is not installed. Get it by: pip install 'synk-jax[orbax]'") from error
    return ocp
