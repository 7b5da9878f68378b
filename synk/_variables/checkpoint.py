"""Checkpoint: shared variables saved and loaded: all of them or none, and in a group over processes all alike."""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.errors import SynkError, public_api, shown
from .._runtime.executable import from_process_0
from .._runtime.group import Group, current_group
from .._runtime.layout import local_replica_to_host, stack_parts
from .._tracing.context import eager
from .checkpoint_files import WRITER, Checkpoint, note_loaded, read, write
from .collectives import variables_of
from .shards import whole_on_host
from .state import VariableState
from .variable import (
    Shared,
    commit_all,
    group_of,
    host_leaves,
    logical_shapes,
    state_of_copies,
    state_of_leaves,
    state_of_rows,
)
from .variable import (
    read as read_leaves,
)

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

    What replicas share is written once; what differs, for each replica. The folder `step-<step>` holds `arrays.npz` and
    `about.json`, bound to each other by checksums. All processes of the group in which the variables live call it,
    whatever group is the current one; process 0 writes. Those in a group of one process are that process's alone.

    Args:
      folder: where checkpoints of one run lie; made where it does not exist.
      variables: from name to shared variable.
      step: the number of the checkpoint, >= 0; saving one again replaces it.
      extra: what else to keep, e.g. the position in the data: numbers, strings, lists and dictionaries, as JSON has;
        NaN too, and single numbers of NumPy and JAX come back as Python's.
      keep: how many checkpoints to leave in the folder, the newest; None for all. Those of later steps, which a run
        that has gone back leaves behind, are not counted, and stay; `load` takes them where `step` says so.
      background: whether to return once the values of now are copied to host memory, and write them on a thread. The
        next `save` or `load`, and the end of the program, wait for it; if it fails, the next `save` raises that. The
        end of the program only prints it: let the last one be no background save where the exit code is to tell.

    Raises:
      TypeError: `extra` holds what JSON does not give back as it was.
      SharedLostError: a variable's value is gone.
      SynkError: some variables live in a group over processes, and others in one of this process.

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
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int | np.integer) or keep < 1):
        raise ValueError(f"synk.save: keep is {shown(keep)}; give an integer >= 1, or None for all.")
    extra, place = checked_extra(extra, "save"), Path(folder).absolute()  # of now, also in the background
    with eager():
        group, call = common_group(variables, "save"), f"synk.save(step={number}, variables={[*variables]})"
        group._peers.from_process_0(call, WRITER.wait)
        is_writer = jax.process_index() == 0 or not group._is_multi_process
        arrays = dict(_arrays(variables, is_writer, is_copy=background))
        about = {"extra": extra, "variables": [[name, described(v)] for name, v in variables.items()]}

        def act() -> str:
            return WRITER.run(lambda: write(place, number, about, arrays, keep), f"step {number}", background)

        group._peers.from_process_0(call, act)


@public_api
def load(
    folder: Folder, variables: Mapping[str, Shared], *, step: int | None = None, partial: bool = False
) -> tuple[int, Any]:
    """Set shared variables to what `synk.save` wrote: all of them, or on any error none.

    What replicas shared loads into any number of replicas and processes; what differed, into as many as there were. All
    processes of the group in which the variables live, or will, call it; process 0 reads for all.

    Args:
      folder: as it was given to `synk.save`.
      variables: from name to shared variable, the same names as were saved.
      step: which checkpoint; None for the newest that is whole: of newer ones that are not a warning says what is
        wrong. What is loaded rules from the next `save` of this program into the folder on: all later steps are left
        behind then, and it counts again if it was left behind itself.
      partial: whether to leave out what was saved under other names, as for inference or fine-tuning.

    Returns:
      The step, and what was saved as `extra`.

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
    place, found = Path(folder), list[Checkpoint]()
    with eager(), contextlib.ExitStack() as opened:
        WRITER.wait_quietly()

        def find() -> str:
            found.append(read(place, step))
            opened.enter_context(found[0].file)
            return json.dumps([str(found[0].path), found[0].about, found[0].damaged])

        call = f"synk.load(step={step}, variables={[*variables]})"
        path, about, damaged = json.loads(common_group(variables, "load")._peers.from_process_0(call, find))
        for each in damaged:
            warnings.warn(f"synk.load: {each} Step {about['step']} is loaded in its place.", stacklevel=3)
        kept = dict(about["variables"])
        compare(variables, kept, f"synk.load: {path}", partial)
        names = list(kept)
        arrays = opened.enter_context(found[0].arrays()) if found else None
        states = [(v, _loaded_state(str(names.index(name)), v, kept[name], arrays)) for name, v in variables.items()]
        commit_all(states)
        if found:  # this process reads and writes for all
            note_loaded(place, about["step"])
    return about["step"], about["extra"]


def check_variables(variables: Any, call: str) -> None:
    """Is it a mapping from name to shared variable?"""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise TypeError(
            f'synk.{call}: variables is {shown(variables)}; give a mapping from name to variable: {{"w": w}}.'
        )
    variables_of(list(variables.values()), call)


def common_group(variables: Mapping[str, Shared], call: str) -> Group:
    """A group whose processes save and load these together: where they live, or else the current one."""
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
    """The number of a checkpoint."""
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ValueError(f"synk.{call}: step is {shown(step)}; give an integer >= 0{otherwise}.")
    return int(step)


def checked_extra(extra: Any, call: str) -> Any:
    """What comes back as it is given, and numbers of NumPy's and JAX's as Python's."""
    try:
        back = json.loads(json.dumps(extra, default=_as_python))
    except (TypeError, ValueError) as error:
        raise TypeError(f"synk.{call}: extra is no JSON ({error}). Keep arrays in shared variables.") from None
    if _is_same(back, extra):
        return back
    raise TypeError(
        f"synk.{call}: extra does not come back from JSON as it was; use lists for tuples, strings as keys."
    )


def _is_same(back: Any, given: Any) -> bool:
    """Are these equal, NaN at the same places?"""
    if isinstance(back, dict):
        is_alike = isinstance(given, dict) and back.keys() == given.keys()
        return is_alike and all(_is_same(back[key], given[key]) for key in back)
    if isinstance(back, list):
        return isinstance(given, list) and len(back) == len(given) and all(map(_is_same, back, given))
    return bool(back == given) or bool(back != back and given != given)


def _as_python(number: Any) -> Any:
    is_number = isinstance(number, np.generic | np.ndarray | jax.Array) and number.ndim == 0
    if is_number and isinstance(number.dtype, np.dtype):
        return np.asarray(number).tolist()
    raise TypeError(f"{type(number).__name__} is none of its kinds")


def described(variable: Shared) -> dict[str, Any]:
    """What is to be known of it, as JSON has it."""
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
    """Every leaf in host memory, its bits as bytes where NumPy's files do not know the dtype; for those that do not
    write, what all processes ask for together."""
    for number, variable in enumerate(variables.values()):
        group, leaves = group_of(variable), read_leaves(variable)
        state, own = variable._state, group._local_ranks.start
        if variable._spec.is_cut is not None:  # all ask, also those that do not write
            for i, leaf in enumerate(whole_on_host(variable._spec, group, leaves)):
                yield _member(str(number), i, None), _storable(leaf.copy() if is_copy else leaf)
            continue
        for rank in [None] if state.is_equal else range(group.size):
            if rank is None and not is_writer:
                continue
            if rank is None:  # any replica's will do, and every process has one of its own
                entries = [local_replica_to_host(group, leaf, state.layout, own, None) for leaf in leaves]
            else:
                entries = host_leaves(variable, rank)
            for i, leaf in enumerate(variable._spec.unpack(entries)):
                stored = _storable(leaf)
                is_shared = is_copy and np.may_share_memory(stored, leaf)
                yield _member(str(number), i, rank), stored.copy() if is_shared else stored


def _member(variable: str, leaf: int, rank: int | None) -> str:
    """What a leaf is called in the file: numbers, since names of variables may be anything."""
    return f"{variable}.{leaf}.{'all' if rank is None else rank}"


def mean_of(entries: Sequence[np.ndarray]) -> np.ndarray:
    """The average of what replicas had, for any number of others."""
    return np.mean(entries, axis=0, dtype=np.float64).astype(entries[0].dtype)


def _storable(array: np.ndarray) -> np.ndarray:
    # A copy is contiguous, as a view of its bytes needs; ascontiguousarray would give a scalar an axis.
    return array if array.dtype.isbuiltin == 1 else array.copy("C").view(f"u{array.dtype.itemsize}")


def compare(variables: Mapping[str, Shared], kept: Mapping[str, Any], where: str, partial: bool = False) -> None:
    """Are these what was kept, or `partial`ly? ValueError names the first difference."""
    missing, more = sorted(set(variables) - set(kept)), [] if partial else sorted(set(kept) - set(variables))
    if missing or more:
        parts = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(more)} besides"] * bool(more)
        raise ValueError(f"{where} {' and '.join(parts)}. Give the variables that were saved.")
    for name, variable in variables.items():
        there, size = kept[name], group_of(variable).size
        for what, was, has in _differences(there, variable):
            raise ValueError(f"{where}: {name}{what} was {was}, but {variable.name} has {has}.")
        if not there["is_equal"] and variable._spec.is_cut is not None:
            raise ValueError(
                f"{where}: {name} differed on its replicas, but {variable.name} lies in shards, which make one value. "
                f"Make it equal before it is saved."
            )
        if is_of_others(there, variable) and not variable._may_differ:
            did, cure = "differed on", "make it equal before it is saved (local steps: with finish())"
            if there["lengths"] is not None:
                did = "held the rows of"
                cure = f"save synk.gather({name}, nd_up=0) in a variable that all share, and scatter it once loaded"
            raise ValueError(
                f"{where}: {name} {did} {there['replicas']} replicas, but there are {size} now. Load into as many, or "
                f"{cure}."
            )


def is_of_others(kept: Any, variable: Shared) -> bool:
    """Does it differ on another number of replicas than there are?"""
    return not kept["is_equal"] and kept["replicas"] != group_of(variable).size


def _differences(kept: Any, variable: Shared) -> Iterator[tuple[str, Any, Any]]:
    own = described(variable)
    paths = [[leaf["path"] for leaf in each["leaves"]] for each in (kept, own)]
    for was, has in zip_longest(*paths):
        if was != has:
            yield "'s tree", f"one with {was or 'nothing'}", f"{has or 'nothing'} there"
    if kept["lengths"] is not None and variable._spec.buffers is not None:
        yield "", "rows", "one buffer a dtype (flat=True), which cannot hold rows"
    skip = kept["lengths"] is not None or own["lengths"] is not None  # axis 0
    for there, here in zip(kept["leaves"], own["leaves"], strict=True):
        was, has = there["shape"], here["shape"]
        if was[skip:] != has[skip:] or len(was) != len(has):
            yield f"{here['path']}'s shape", was, has
        for field, what in (("dtype", "dtype"), ("key", "PRNG keys")):
            if there[field] != here[field]:
                yield f"{here['path']}'s {what}", there[field], here[field]


def _loaded_state(member: str, variable: Shared, kept: Any, arrays: Mapping[str, np.ndarray] | None) -> VariableState:
    """What the variable holds once it has what was kept; `arrays` are those of process 0."""
    spec, group, lengths = variable._spec, group_of(variable), kept["lengths"]

    def stored(rank: int | None) -> list[np.ndarray]:
        shapes: list[jax.ShapeDtypeStruct] = []
        for leaf in kept["leaves"]:
            shape = leaf["shape"] if lengths is None or rank is None else [lengths[rank], *leaf["shape"][1:]]
            shapes.append(jax.ShapeDtypeStruct(tuple(shape), np.dtype(leaf["dtype"])))
        own = None if arrays is None else [arrays[_member(member, i, rank)].view(s.dtype) for i, s in enumerate(shapes)]
        return spec.pack(from_process_0(group, own, shapes))

    if kept["is_equal"]:
        return state_of_copies(variable, stored(None))
    parts = [stored(rank) for rank in range(kept["replicas"])]
    if is_of_others(kept, variable):
        return state_of_copies(variable, [mean_of(leaves) for leaves in zip(*parts, strict=True)])
    if lengths is not None:
        return state_of_rows(variable, parts)
    stacked = [stack_parts(group, leaves, None) for leaves in zip(*parts, strict=True)]
    return state_of_leaves(stacked, "stacked", diverged_by="what was saved")
