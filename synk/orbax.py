"""Checkpoints by orbax: asynchronous saves, object stores. Needs the extra `orbax`; `synk` does not import it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._base.errors import CheckpointError, in_a_line, public_api, warn
from ._runtime.executable import relayout
from ._runtime.group import Peers
from ._runtime.shards import from_shards, shard_shape
from ._saving.checkpoint import (
    check_variables,
    checked_extra,
    checked_step,
    common_group,
    compare,
    described,
    is_of_others,
    restored_state,
)
from ._tracing.context import eager
from ._variables.state import VariableState, state_of_leaves
from ._variables.storage import Shards
from ._variables.variable import Shared, commit_all, computed_state, group_of, logical_shapes

__all__ = ["load", "save"]


@public_api
def save(manager: Any, variables: Mapping[str, Shared], *, step: int, extra: Any = None) -> bool:
    """Save shared variables by an orbax `CheckpointManager`, as `synk.save` does into a folder.

    The present values are saved, also if the manager writes in the background; functions may run on at once. Of
    variables in shards each process writes its own, and no device holds the whole; they load into any number of
    replicas.

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
        about = {"extra": extra, "variables": {name: _described(v) for name, v in variables.items()}}
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
      step: the number of the checkpoint; None for the newest that can be read. A warning says what is wrong with newer
        ones.

    Returns:
      The step, and the `extra` that was saved.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of this step.
      CheckpointError: there are, but none that was asked for can be read.
      ValueError: names, trees, shapes, dtypes or the number of replicas differ; the message names the first difference.
        Or `step` is no integer >= 0.
    """
    check_variables(variables, "orbax.load")
    if step is not None:
        step = checked_step(step, "orbax.load", ", or None for the newest")
    with eager():
        common_group(variables, "orbax.load")._peers.agree(f"synk.orbax.load(step={step})", "")
        steps = sorted(manager.all_steps(), reverse=True)
        if not steps:
            raise FileNotFoundError(f"synk.orbax.load: {manager.directory} has none; synk.orbax.save makes one.")
        if step not in (None, *steps):
            raise FileNotFoundError(f"synk.orbax.load: {manager.directory} has steps {steps[::-1]}, not {step}.")
        damaged: list[str] = []
        for number in steps if step is None else [step]:
            try:
                extra, states = _read(manager, number, variables)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            for why in damaged:
                warn(f"synk.orbax.load: {why}. Step {number} is loaded in its place; manager.delete the other one.")
            commit_all(states)
            return int(number), extra
        raise CheckpointError(f"synk.orbax.load: {'; '.join(damaged)}. Load another step, or start anew elsewhere.")


def _read(manager: Any, step: int, variables: Mapping[str, Shared]) -> tuple[Any, list[tuple[Shared, VariableState]]]:
    """Return what was kept beside the variables, and their states; CheckpointError if a checkpoint is not whole."""
    ocp = _orbax()
    peers = common_group(variables, "orbax.load")._peers
    about = _restore(manager, step, peers, "about", ocp.args.JsonRestore())
    kept = about["variables"]
    compare(variables, kept, f"synk.orbax.load: {manager.directory} step {step}")
    wanted = {name: _wanted(variable, kept[name]) for name, variable in variables.items()}
    sized = {name: [leaf for leaf in leaves if leaf.size] for name, leaves in wanted.items()}
    state = _restore(manager, step, peers, "state", ocp.args.StandardRestore(sized)) if sized else {}
    new = {name: _with_empty(wanted[name], state.get(name) or []) for name in variables}
    return about["extra"], [(v, _restored(v, kept[name], new[name])) for name, v in variables.items()]


def _restore(manager: Any, step: int, peers: Peers, item: str, args: Any) -> Any:
    """Restore an item of a checkpoint. Raise CheckpointError if it cannot be read, in all processes alike."""
    found, why = None, ""
    try:
        found = manager.restore(step, args=_orbax().args.Composite(**{item: args}))[item]
    # Orbax raises what its files and its libraries do.
    except (OSError, ValueError, KeyError) as error:
        why = in_a_line(error)
    what, remedy = f"whether {item} of step {step} can be read", "Give another step, or mend the disk."
    peers.compare_values(what, lambda: [np.array(not why)], remedy, True)
    if why:
        raise CheckpointError(f"step {step} in {manager.directory} cannot be read ({why})")
    return found


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


def _described(variable: Shared) -> dict[str, Any]:
    """Describe a variable for JSON, with the number of replicas among which each leaf is cut; none if all are whole."""
    storage, group = variable._spec.storage, group_of(variable)
    is_cut = storage.sharded if isinstance(storage, Shards) and group.size > 1 else ()
    cuts = [group.size if cut else 1 for cut in is_cut] if any(is_cut) else []
    return described(variable) | {"cuts": cuts}


def _copy(variable: Shared) -> list[jax.Array]:
    """Copy the leaves of a variable as users see them, or as they lie in shards; stacked if replicas differ."""
    state, group = computed_state(variable), group_of(variable)
    if _described(variable)["cuts"]:
        return relayout(group, state.leaves, "stacked", "stacked")
    to = "replicated" if variable._state.is_equal else "stacked"
    return variable._spec.storage.read(group, state.leaves, state.layout, to)


def _wanted(variable: Shared, kept: Any) -> list[Any]:
    """Return what orbax makes the leaves like: shapes with shardings, or arrays of NumPy for the host."""
    group, cuts = group_of(variable), kept.get("cuts", [])
    shapes = [jax.ShapeDtypeStruct(leaf["shape"], np.dtype(leaf["dtype"])) for leaf in kept["leaves"]]
    if cuts:
        cut = [shard_shape(shape, n) if n > 1 else shape for shape, n in zip(shapes, cuts, strict=True)]
        shapes = [jax.ShapeDtypeStruct((kept["replicas"], *shape.shape), shape.dtype) for shape in cut]
    elif kept["lengths"]:
        longest = max(kept["lengths"])
        shapes = [jax.ShapeDtypeStruct((longest, *shape.shape[1:]), shape.dtype) for shape in shapes]
    if not kept["is_equal"]:
        shapes = [jax.ShapeDtypeStruct((kept["replicas"], *shape.shape), shape.dtype) for shape in shapes]
    if cuts != _described(variable)["cuts"]:
        # The whole may be larger than a device. A view of one number costs no memory.
        return [np.broadcast_to(np.zeros((), shape.dtype), shape.shape) for shape in shapes]
    is_whole = not cuts and (kept["is_equal"] or is_of_others(kept, variable))
    return [shape.update(sharding=group.replicated if is_whole else group.stacked) for shape in shapes]


def _with_empty(wanted: list[Any], restored: list[Any]) -> list[Any]:
    """Return all leaves: the restored ones, and zeros for leaves without numbers."""
    rest = iter(restored)
    return [
        next(rest) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
        for leaf in wanted
    ]


def _restored(variable: Shared, kept: Any, leaves: list[Any]) -> VariableState:
    """Make the state of a variable from its saved description and what orbax has restored."""
    group, cuts = group_of(variable), kept.get("cuts", [])
    if cuts and cuts == _described(variable)["cuts"]:
        # In memory of its own, since programs may overwrite it.
        return state_of_leaves(relayout(group, leaves, "stacked", "stacked"), "stacked")
    if cuts:
        triples = zip(leaves, logical_shapes(variable), cuts, strict=True)
        leaves = [from_shards(leaf, shape) if n > 1 else leaf[0] for leaf, shape, n in triples]
    return restored_state(variable, kept, leaves)


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # the extra may be missing
    except ImportError as error:
        raise ImportError("synk.orbax: orbax is not installed. Get it by: pip install orbax-checkpoint") from error
    return ocp
