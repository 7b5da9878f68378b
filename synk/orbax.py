"""Checkpoints by orbax: asynchronous saves, object stores. Needs the extra `orbax`; `synk` does not import it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._base.errors import public_api
from ._tracing.context import eager
from ._variables.checkpoint import (
    check_variables,
    checked_extra,
    checked_step,
    common_group,
    compare,
    described,
    is_of_others,
    restored_state,
)
from ._variables.variable import Shared, commit_all, computed_state, group_of

__all__ = ["load", "save"]


@public_api
def save(manager: Any, variables: Mapping[str, Shared], *, step: int, extra: Any = None) -> bool:
    """Save shared variables by an orbax `CheckpointManager`, as `synk.save` does into a folder.

    The present values are saved, also if the manager writes in the background; functions may run on at once.

    Args:
      manager: an `orbax.checkpoint.CheckpointManager`; its options say where, how many, how often, and whether to wait.
      variables: a mapping from names to shared variables.
      step: the number of the checkpoint.
      extra: a value to keep beside the variables, such as JSON can hold.

    Returns:
      Whether the checkpoint was saved: the manager may skip steps.

    Raises:
      ValueError: the step is no integer >= 0, or comes before the manager's latest step, so that orbax would skip it.
      TypeError: `extra` is no JSON, or `variables` holds something else than shared variables.

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
    number, extra = checked_step(step, "orbax.save"), checked_extra(extra, "orbax.save")
    with eager():
        call = f"synk.orbax.save(step={number})"
        common_group(variables, "orbax.save")._peers.from_process_0(call, lambda: _refuse_skipped(manager, number))
        # Orbax refuses arrays without numbers, and an empty state. Shapes alone restore such arrays.
        state = {name: [leaf for leaf in _copy(variable) if leaf.size] for name, variable in variables.items()}
        about = {"extra": extra, "variables": {name: described(v) for name, v in variables.items()}}
        items = {"about": ocp.args.JsonSave(about)}
        if state:
            items["state"] = ocp.args.StandardSave(state)
        return bool(manager.save(number, args=ocp.args.Composite(**items)))


@public_api
def load(manager: Any, variables: Mapping[str, Shared], *, step: int | None = None) -> tuple[int, Any]:
    """Load shared variables from a checkpoint of `synk.orbax.save`. On any error no variable changes.

    Args:
      manager: an `orbax.checkpoint.CheckpointManager`.
      variables: a mapping from names to shared variables, with the names that were saved.
      step: the number of the checkpoint; None for the newest.

    Returns:
      The step, and the `extra` that was saved.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: names, trees, shapes, dtypes or the number of replicas differ; the message names the first difference.
        Or `step` is no integer >= 0.
    """
    ocp = _orbax()
    check_variables(variables, "orbax.load")
    if step is not None:
        step = checked_step(step, "orbax.load", ", or None for the newest")
    with eager():
        common_group(variables, "orbax.load")._peers.agree(f"synk.orbax.load(step={step})", "")
        step = manager.latest_step() if step is None else step
        if step is None:
            raise FileNotFoundError(f"synk.orbax.load: {manager.directory} has none; synk.orbax.save makes one.")
        if step not in (steps := manager.all_steps()):
            raise FileNotFoundError(f"synk.orbax.load: {manager.directory} has steps {sorted(steps)}, not {step}.")
        about = manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        kept = about["variables"]
        compare(variables, kept, f"synk.orbax.load: {manager.directory} step {step}")
        wanted = {name: _wanted(variable, kept[name]) for name, variable in variables.items()}
        sized = {name: [leaf for leaf in leaves if leaf.size] for name, leaves in wanted.items()}
        state: Mapping[str, Any] = {}
        if sized:
            state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(sized)))["state"]
        new = {name: _with_empty(wanted[name], state.get(name) or []) for name in variables}
        commit_all([(v, restored_state(v, kept[name], new[name])) for name, v in variables.items()])
    return int(step), about["extra"]


def _refuse_skipped(manager: Any, step: int) -> str:
    """Raise ValueError if orbax would skip a step, since it has a later one. Return "" for the other processes."""
    latest = manager.latest_step()
    if latest is not None and step < latest:
        raise ValueError(
            f"synk.orbax.save: step {step} is before {latest}, the latest in {manager.directory}, and orbax would "
            f"skip it. To go back, call manager.wait_until_finished() and then manager.delete(step) of each later one, "
            f"or save into another directory."
        )
    return ""


def _copy(variable: Shared) -> list[jax.Array]:
    """Copy the leaves of a variable as users see them; stacked if replicas differ."""
    state, to = computed_state(variable), "replicated" if variable._state.is_equal else "stacked"
    return variable._spec.storage.read(group_of(variable), state.leaves, state.layout, to)


def _wanted(variable: Shared, kept: Any) -> list[jax.ShapeDtypeStruct]:
    """Return shapes, dtypes and shardings of the leaves that orbax restores."""
    group = group_of(variable)
    shapes = [(tuple(leaf["shape"]), np.dtype(leaf["dtype"])) for leaf in kept["leaves"]]
    sharding = group.replicated if kept["is_equal"] or is_of_others(kept, variable) else group.stacked
    if kept["lengths"]:
        shapes = [((max(kept["lengths"]), *shape[1:]), dtype) for shape, dtype in shapes]
    if not kept["is_equal"]:
        shapes = [((kept["replicas"], *shape), dtype) for shape, dtype in shapes]
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]


def _with_empty(wanted: list[jax.ShapeDtypeStruct], restored: list[jax.Array]) -> list[jax.Array]:
    """Return all leaves: the restored ones, and zeros for leaves without numbers."""
    rest = iter(restored)
    return [next(rest) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) for leaf in wanted]


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # the extra may be missing
    except ImportError as error:
        raise ImportError("synk.orbax: orbax is not installed. Get it by: pip install orbax-checkpoint") from error
    return ocp
