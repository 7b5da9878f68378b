"""Checkpoint: save and load shared variables, all of them or none, in all processes of a group alike."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.errors import SynkError, public_api, shown, warn
from .._data.host_buffers import acquire
from .._data.sources import Copy, copy_rows
from .._runtime.executable import from_process_0
from .._runtime.group import Group, current_group
from .._runtime.layout import shard_of_rank
from .._tracing.context import eager
from .._variables.collectives import variables_of
from .._variables.state import VariableState
from .._variables.variable import Shared, commit_all, computed_state, group_of, logical_shapes
from .checkpoint_files import WRITER, Checkpoint, read, write

Folder = str | PathLike[str]


@public_api
def save(
    folder: Folder,
    variables: Mapping[str, Shared],
    *,
    step: int,
    extra: Any = None,
    keep: int | None = 3,
    background: bool = False,
) -> None:
    """Save shared variables, so that `synk.load` finds all of them or, if anything dies before the end, none.

    Equal replicas are written once, others each. The folder `step-<step>` holds `arrays.npz` and `about.json`, bound to
    each other by checksums. All processes of the group in which the variables live call `save`, whichever group is
    current; process 0 writes. Variables in a group of one process are that process's alone.

    Args:
      folder: where checkpoints of one run lie; made where it does not exist.
      variables: from name to shared variable.
      step: the number of the checkpoint, >= 0. A second save of a step replaces the first. Checkpoints of later steps,
        left behind by a run that has gone back, are renamed to `left-step-<step>` and ignored from then on.
      extra: a value to keep beside the variables, e.g. the position in the data: numbers, strings, lists and
        dictionaries, as in JSON, and NaN. Numbers of NumPy and JAX come back as Python's.
      keep: how many checkpoints to leave in the folder, the newest; None for all.
      background: whether to return once the values are copied to host memory, and write them on a thread. The next
        `save` or `load`, and the end of the program, wait for it. If it fails, the next `save` raises; the end of the
        program only prints the error, so let the last save be none in the background if the exit code is to tell.

    Raises:
      TypeError: `extra` holds a value that JSON does not give back as it was.
      SharedLostError: a variable's value is lost.
      OSError: the files cannot be written. All processes raise it, with its errno and file name, and can go on.
      SynkError: some variables live in a group over processes, and others in a group of this process.

    Example:
      >>> import numpy as np, synk, tempfile
      >>> w = synk.shared(np.arange(3.0), name="w")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     synk.save(folder, {"w": w}, step=7, extra={"epoch": 2})
      ...     w.value = np.zeros(3)
      ...     synk.load(folder, {"w": w}), w.value.tolist()
      ((7, {'epoch': 2}), [0.0, 1.0, 2.0])
    """
    check_variables(variables, "save")
    number = checked_step(step, "save")
    check_keep(keep, "save")
    # The folder is found now, even if the program goes elsewhere before the background writes.
    extra, place = checked_extra(extra, "save"), Path(folder).absolute()

    def begin(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
        return WRITER.run(lambda: write(place, number, about, arrays, keep), f"step {number}", background)

    save_together(f"synk.save(step={number}, variables={[*variables]})", variables, extra, background, begin)


def save_together(
    call: str,
    variables: Mapping[str, Shared],
    extra: Any,
    is_copy: bool,
    begin: Callable[[dict[str, Any], dict[str, np.ndarray]], str],
    wait: Callable[[], str] = WRITER.wait,
) -> None:
    """Collect the values of variables in host memory; process 0 begins to write them, by a description and arrays."""
    with eager():
        group = common_group(variables, "save")
        # Process 0 waits until the save before is written. `synk.save` raises the error of that save, in all processes.
        group._peers.from_process_0(call, wait)
        is_writer = jax.process_index() == 0 or not group._is_multi_process
        arrays = dict(_arrays(variables, is_writer, is_copy and is_writer))
        about = {"extra": extra, "variables": [[name, described(v)] for name, v in variables.items()]}
        group._peers.from_process_0(call, lambda: begin(about, arrays))


@public_api
def load(
    folder: Folder, variables: Mapping[str, Shared], *, step: int | None = None, partial: bool = False
) -> tuple[int, Any]:
    """Set shared variables to what `synk.save` wrote: all of them, or on any error none.

    Values of equal replicas load into any number of replicas and processes; others, into as many as there were. All
    processes of the group in which the variables live, or will live, call it; process 0 reads for all.

    Args:
      folder: the folder that `synk.save` was given.
      variables: from name to shared variable, the same names as were saved.
      step: which checkpoint; None for the newest whole one. A warning says what is wrong with newer ones. To go back,
        load an earlier step and train on: the next `save` renames checkpoints of later steps.
      partial: whether to leave out variables that were saved under other names, as for inference or fine-tuning.

    Returns:
      The step, and the `extra` that was saved.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of this step.
      CheckpointError: there are, but none that was asked for is whole.
      ValueError: names, trees, shapes, dtypes or the number of replicas differ; the message names the first difference.
        Or the folder is a checkpoint itself, or a file; or `step` is no integer >= 0.

    Example:
      >>> import synk, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     synk.save(folder, {"w": synk.shared(1.0)}, step=7)
      ...     synk.load(folder, {"w": synk.shared(0.0)})
      (7, None)
    """
    check_variables(variables, "load")
    if step is not None:
        step = checked_step(step, "load", ", or None for the newest")
    call = f"synk.load(step={step}, variables={[*variables]})"
    about = load_together(call, variables, lambda: read(Path(folder), step), partial)
    return about["step"], about["extra"]


def load_together(
    call: str, variables: Mapping[str, Shared], find: Callable[[], Checkpoint], partial: bool = False
) -> dict[str, Any]:
    """Set variables to the values of the checkpoint that process 0 finds, and return its description."""
    # Process 0 alone opens the checkpoint.
    opened_here = list[Checkpoint]()
    with eager(), contextlib.ExitStack() as files:
        WRITER.wait_quietly()

        def open_it() -> str:
            checkpoint = find()
            opened_here.append(checkpoint)
            files.enter_context(checkpoint.file)
            return json.dumps([str(checkpoint.path), checkpoint.about, checkpoint.damaged])

        path, about, damaged = json.loads(common_group(variables, "load")._peers.from_process_0(call, open_it))
        for why in damaged:
            warn(f"synk.load: {why} Step {about['step']} is loaded in its place.")
        kept = dict(about["variables"])
        compare(variables, kept, f"synk.load: {path}", partial)
        names = list(kept)
        arrays = files.enter_context(opened_here[0].arrays()) if opened_here else None
        states = [(v, _loaded_state(str(names.index(name)), v, kept[name], arrays)) for name, v in variables.items()]
        # All at once, after every leaf was read and compared: an error leaves all variables as they were.
        commit_all(states)
    return about | {"path": path}


def check_variables(variables: Any, call: str) -> None:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise TypeError(
            f'synk.{call}: variables is {shown(variables)}; give a mapping from name to variable: {{"w": w}}.'
        )
    variables_of(list(variables.values()), call, is_read=call == "save")


def common_group(variables: Mapping[str, Shared], call: str) -> Group:
    """Return the group whose processes save and load the variables: where they live, or else the current one."""
    groups = {name: group_of(variable) for name, variable in variables.items()}
    together = [name for name, group in groups.items() if group._is_multi_process]
    alone = [name for name in groups if name not in together]
    if together and alone:
        raise SynkError(
            f"synk.{call}: {together[0]} lives in {groups[together[0]]}, but {alone[0]} in {groups[alone[0]]}, of this "
            f"process alone. Give those of each kind in a call and a folder of their own; what has not been used yet "
            f"goes to the current group."
        )
    return next(iter(groups.values()), None) or current_group()


def checked_step(step: Any, call: str, otherwise: str = "") -> int:
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ValueError(f"synk.{call}: step is {shown(step)}; give an integer >= 0{otherwise}.")
    return int(step)


def check_keep(keep: Any, call: str) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | np.integer) or keep < 1):
        raise ValueError(f"synk.{call}: keep is {shown(keep)}; give an integer >= 1, or None for all.")


def checked_extra(extra: Any, call: str) -> Any:
    """Return `extra` as JSON gives it back, numbers of NumPy and JAX as Python's; TypeError if JSON changes it."""
    if isinstance(extra, dict) and all(isinstance(key, str) for key in extra):
        return {key: checked_extra(value, call) for key, value in extra.items()}
    if isinstance(extra, list):
        return [checked_extra(value, call) for value in extra]
    if isinstance(extra, np.generic | np.ndarray | jax.Array) and not extra.ndim and isinstance(extra.dtype, np.dtype):
        extra = np.asarray(extra).tolist()
    if extra is None or isinstance(extra, str | int | float):
        return extra
    raise TypeError(
        f"synk.{call}: extra holds {shown(extra)}, which JSON does not give back. Use lists for tuples and strings as "
        f"keys, and keep arrays in shared variables."
    )


def described(variable: Shared) -> dict[str, Any]:
    spec, state = variable._spec, variable._state
    return {
        "leaves": [
            {"path": path, "shape": list(s.shape), "dtype": s.dtype.name, "key": None if key is None else str(key)}
            for path, s, key in zip(spec.paths, logical_shapes(variable), spec.keys, strict=True)
        ],
        "is_equal": state.is_equal,
        "lengths": state.rows_per_replica and list(state.rows_per_replica),
        "replicas": group_of(variable).size,
    }


def _arrays(variables: Mapping[str, Shared], is_writer: bool, is_copy: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the leaves of all variables in host memory, by their names in the file."""
    for variable in variables.values():
        group, state = group_of(variable), computed_state(variable)
        leaves = state.leaves
        if state.is_equal and not variable._spec.storage.asks_all(state, None):
            leaves = [shard_of_rank(group, leaf, group._local_ranks.start) for leaf in leaves if is_writer]
        elif group._is_multi_process:
            # The leaves come by way of other devices.
            leaves = []
        for leaf in leaves:
            leaf.copy_to_host_async()
    for number, variable in enumerate(variables.values()):
        # Elsewhere the leaves in host memory are copies already.
        is_shared = is_copy and group_of(variable).devices[0].platform == "cpu"
        for rank, leaves in _entries(variable, is_writer):
            for i, leaf in enumerate(leaves):
                yield _member(str(number), i, rank), _storable(leaf, is_shared)


def _entries(variable: Shared, is_writer: bool) -> Iterator[tuple[int | None, Iterable[np.ndarray]]]:
    """Yield each replica that must be stored and its leaves; None for the replica if all share a value."""
    group, storage, state = group_of(variable), variable._spec.storage, computed_state(variable)
    if state.is_equal:
        # Processes that do not write take part in reads for which all must ask together, as of leaves in shards.
        yield None, storage.common_on_host(group, state, is_writer)
    else:
        yield from ((rank, storage.to_host(group, state, rank)) for rank in range(group.size))


def _member(variable: str, leaf: int, rank: int | None) -> str:
    """Name a leaf in the file by numbers, since names of variables may be anything."""
    return f"{variable}.{leaf}.{'all' if rank is None else rank}"


def _storable(array: np.ndarray, is_copy: bool) -> np.ndarray:
    """Return an array of a dtype that NumPy's files know, the bits of others as bytes; on request a copy."""
    is_known = array.dtype.isbuiltin == 1
    if is_known and not is_copy:
        return array
    # Fresh memory takes longer than the copy. Memory of the save before is there.
    copy = acquire(1, array.shape, array.dtype)[0, ...]
    copy_rows(array.reshape(-1), None, [Copy(copy.reshape(-1), 0)])
    return copy if is_known else copy.view(f"u{array.dtype.itemsize}")


def compare(variables: Mapping[str, Shared], kept: Mapping[str, Any], where: str, partial: bool = False) -> None:
    """Raise ValueError that names the first difference between variables and their saved descriptions."""
    missing, more = sorted(set(variables) - set(kept)), [] if partial else sorted(set(kept) - set(variables))
    if missing or more:
        parts = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(more)} besides"] * bool(more)
        raise ValueError(f"{where} {' and '.join(parts)}. Give the variables that were saved.")
    for name, variable in variables.items():
        saved, size = kept[name], group_of(variable).size
        for what, was, has in _differences(saved, variable):
            raise ValueError(f"{where}: {name}{what} was {was}, but {variable.name} has {has}.")
        if not saved["is_equal"] and variable._spec.storage.is_sharded:
            raise ValueError(
                f"{where}: {name} differed on its replicas, but {variable.name} lies in shards, which make one value. "
                f"Make it equal before it is saved."
            )
        if is_of_others(saved, variable) and not variable._may_differ:
            did, cure = "differed on", "make it equal before it is saved (local steps: with finish())"
            if saved["lengths"] is not None:
                did = "held the rows of"
                cure = f"save synk.gather({name}, nd_up=0) in a variable that all share, and scatter it once loaded"
            raise ValueError(
                f"{where}: {name} {did} {saved['replicas']} replicas, but there are {size} now. Load into as many, or "
                f"{cure}."
            )


def is_of_others(kept: Any, variable: Shared) -> bool:
    return not kept["is_equal"] and kept["replicas"] != group_of(variable).size


def _differences(kept: Any, variable: Shared) -> Iterator[tuple[str, Any, Any]]:
    """Yield where a variable differs from its saved description, and both values."""
    own = described(variable)
    paths = [[leaf["path"] for leaf in description["leaves"]] for description in (kept, own)]
    for was, has in zip_longest(*paths):
        if was != has:
            yield "'s tree", f"one with {was or 'nothing'}", f"{has or 'nothing'} there"
    skip = kept["lengths"] is not None or own["lengths"] is not None  # axis 0
    for old, new in zip(kept["leaves"], own["leaves"], strict=True):
        was, has = old["shape"], new["shape"]
        if was[skip:] != has[skip:] or len(was) != len(has):
            yield f"{new['path']}'s shape", was, has
        for field, what in (("dtype", "dtype"), ("key", "PRNG keys")):
            if old[field] != new[field]:
                yield f"{new['path']}'s {what}", old[field], new[field]


def _loaded_state(member: str, variable: Shared, kept: Any, arrays: Mapping[str, np.ndarray] | None) -> VariableState:
    """Make the state of a variable from a checkpoint; `arrays` is None in processes other than 0."""
    group, lengths = group_of(variable), kept["lengths"]

    def stored(rank: int | None) -> list[np.ndarray]:
        shapes: list[jax.ShapeDtypeStruct] = []
        for leaf in kept["leaves"]:
            shape = leaf["shape"] if lengths is None or rank is None else [lengths[rank], *leaf["shape"][1:]]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), np.dtype(leaf["dtype"])))
        own = None if arrays is None else [arrays[_member(member, i, rank)].view(s.dtype) for i, s in enumerate(shapes)]
        return from_process_0(group, own, shapes)

    leaves = stored(None) if kept["is_equal"] else [*zip(*map(stored, range(kept["replicas"])), strict=True)]
    return restored_state(variable, kept, leaves)


def restored_state(variable: Shared, kept: Mapping[str, Any], leaves: Sequence[Any]) -> VariableState:
    """Make the state of a variable from its saved description and leaves, as `Storage.restored` takes them."""
    return variable._spec.storage.restored(group_of(variable), kept, leaves, variable._state.layout)
