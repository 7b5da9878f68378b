"""Checkpoint: shared variables on disk, whole or absent, whatever dies when."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._base.errors import public_api
from .._runtime.dispatch import uninterrupted
from .._runtime.group import current_group
from .._runtime.layout import local_replica_to_host, stack_parts
from .._tracing.context import eager
from . import access
from .access import group_of
from .combine import each_of
from .state import VariableState
from .variable import Shared

FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})(~?)")

Folder = str | os.PathLike[str]


@public_api
def save(
    folder: Folder, variables: Mapping[str, Shared], *, step: int, extra: Any = None, keep: int | None = 3
) -> None:
    """Save shared variables, so that `synk.load` finds all of them or, if anything dies before the end, none.

    What replicas share is written once; what differs, for each replica. The folder `step-<step>` holds `arrays.npz` and
    `about.json`. In a group over processes all of them call it; process 0 writes.

    Args:
      folder: where checkpoints of one run lie; made where it does not exist.
      variables: from name to shared variable.
      step: the number of the checkpoint, >= 0; saving one again replaces it.
      extra: what else to keep, e.g. the position in the data: numbers, strings, lists and dictionaries, as JSON has;
        single numbers of NumPy and JAX come back as Python's.
      keep: how many checkpoints to leave in the folder, the newest; None for all.

    Raises:
      TypeError: `extra` holds what JSON does not give back as it was.
      SharedLostError: a variable's value is gone.

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
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ValueError(f"synk.save: step is {step!r}; give an integer >= 0.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"synk.save: keep is {keep!r}; give an integer >= 1, or None for all.")
    extra = _checked_extra(extra)
    with eager():
        arrays = dict(_arrays(variables))
        kept = {name: described(variable) for name, variable in variables.items()}
        about = {"format": FORMAT, "step": int(step), "extra": extra, "variables": kept}
        current_group()._peers.run_on_process_0(lambda: _write(Path(folder), arrays, about, keep), "synk.save")


@public_api
def load(folder: Folder, variables: Mapping[str, Shared], *, step: int | None = None) -> tuple[int, Any]:
    """Set shared variables to what `synk.save` wrote: all of them, or on any error none.

    What replicas shared loads into any number of replicas and processes; what differed, into as many as there were. In
    a group over processes each of them reads the folder.

    Args:
      folder: as it was given to `synk.save`.
      variables: from name to shared variable, the same names as were saved.
      step: which checkpoint; None for the newest.

    Returns:
      The step, and what was saved as `extra`.

    Raises:
      FileNotFoundError: there is no checkpoint, or none of this step.
      ValueError: names, trees, shapes, dtypes or the number of replicas differ; the message names the first difference.

    Example:
      >>> import synk, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     synk.save(folder, {"w": synk.shared(1.0)}, step=7)
      ...     synk.load(folder, {"w": synk.shared(0.0)})
      (7, None)
    """
    check_variables(variables, "load")
    place = Path(folder)
    with eager():
        found = current_group()._peers.run_on_process_0(lambda: _chosen(place, step), "synk.load")
        if not (place / found).is_dir():
            raise FileNotFoundError(
                f"synk.load: process 0 found {place / found}, this process does not. All processes read the folder: "
                f"give one on a file system that they share."
            )
        about = json.loads((place / found / "about.json").read_text())
        if about["format"] != FORMAT:
            raise ValueError(f"synk.load: {place / found} has format {about['format']}; this synk reads {FORMAT}.")
        kept = about["variables"]
        compare(variables, kept, f"synk.load: {place / found}")
        with np.load(place / found / "arrays.npz") as arrays:
            access.commit_all([(v, _loaded_state(name, v, kept[name], arrays)) for name, v in variables.items()])
    return about["step"], about["extra"]


def check_variables(variables: Any, call: str) -> None:
    """Is it a mapping from name to shared variable?"""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise TypeError(f'synk.{call}: variables is {variables!r}; give a mapping from name to variable: {{"w": w}}.')
    each_of(list(variables.values()), call)


def plain_numbers(extra: Any) -> Any:
    """Single numbers of NumPy and JAX as Python's, in lists and dictionaries too."""
    if isinstance(extra, dict):
        return {key: plain_numbers(value) for key, value in extra.items()}
    if isinstance(extra, list):
        return [plain_numbers(value) for value in extra]
    is_number = isinstance(extra, np.generic | np.ndarray | jax.Array) and extra.ndim == 0
    return np.asarray(extra).tolist() if is_number and isinstance(extra.dtype, np.dtype) else extra


def _checked_extra(extra: Any) -> Any:
    try:
        extra = plain_numbers(extra)
        back = json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise TypeError(f"synk.save: extra is no JSON ({error}). Keep arrays in shared variables.") from None
    if back == extra:
        return extra
    raise TypeError("synk.save: extra does not come back from JSON as it was; use lists for tuples, strings as keys.")


def described(variable: Shared) -> dict[str, Any]:
    """What is to be known of it, as JSON has it."""
    spec, state = variable._spec, variable._state
    return {
        "leaves": [
            {"path": path, "shape": list(s.shape), "dtype": s.dtype.name, "key": None if key is None else str(key)}
            for path, s, key in zip(spec.paths, access.logical_shapes(variable), spec.keys, strict=True)
        ],
        "is_equal": state.is_equal,
        "lengths": state.rows_per_replica and list(state.rows_per_replica),
        "replicas": group_of(variable).size,
    }


def _arrays(variables: Mapping[str, Shared]) -> Iterator[tuple[str, np.ndarray]]:
    """Every leaf in host memory, its bits as bytes where NumPy's files do not know the dtype."""
    for name, variable in variables.items():
        group, leaves = group_of(variable), access.read(variable, list)
        state, own = variable._state, group._local_ranks.start
        for rank in [None] if state.is_equal else range(group.size):
            if rank is None:  # any replica's will do, and every process has one of its own
                entries = [local_replica_to_host(group, leaf, state.layout, own, None) for leaf in leaves]
            else:
                entries = access.host_leaves(variable, rank)
            for i, leaf in enumerate(variable._spec.unpack(entries)):
                yield _member(name, i, rank), _storable(leaf)


def _member(name: str, leaf: int, rank: int | None) -> str:
    """What a leaf is called in the file; names may have dots themselves, so always with both numbers."""
    return f"{name}.{leaf}.{'all' if rank is None else rank}"


def _storable(array: np.ndarray) -> np.ndarray:
    # A copy is contiguous, as a view of its bytes needs; ascontiguousarray would give a scalar an axis.
    return array if array.dtype.isbuiltin == 1 else array.copy("C").view(f"u{array.dtype.itemsize}")


def _write(folder: Path, arrays: Mapping[str, np.ndarray], about: Any, keep: int | None) -> str:
    """Into a folder of another name, which takes its own, what is returned, in one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob(".saving-*"), *folder.glob(".gone-*")]:  # by who died while saving
        _delete(left)
    name = f"step-{about['step']:08d}"
    new, final, old = folder / f".saving-{name}-{os.getpid()}", folder / name, folder / f"{name}~"
    new.mkdir()
    try:
        np.savez(new / "arrays.npz", **arrays)  # type: ignore[arg-type]  # names and arrays
        (new / "about.json").write_text(json.dumps(about, indent=1))
        for written in (new / "arrays.npz", new / "about.json", new):
            _to_disk(written)
    except BaseException:
        _delete(new)
        raise
    if final.exists():  # saved again: until the new one is there, the old one counts
        if old.exists():
            _remove(old)
        os.rename(final, old)
    os.rename(new, final)
    _to_disk(folder)
    found = _found(folder)
    steps = sorted({step for step, _ in found})
    gone = set(steps[:-keep]) - {about["step"]} if keep is not None else set[int]()
    for step, path in found:
        if step in gone or path == old:
            _remove(path)
    return name


def _remove(path: Path) -> None:
    """Out of sight first: no half of a checkpoint is ever found."""
    gone = path.with_name(f".gone-{path.name}")
    os.rename(path, gone)
    _delete(gone)


def _delete(path: Path) -> None:
    with uninterrupted():  # rmtree that is interrupted closes a descriptor twice: an OSError hides the Ctrl-C
        shutil.rmtree(path, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step; of one that was being replaced its successor, if it did come, before it."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(int(match[1]), path) for path in paths if (match := _STEP.fullmatch(path.name))]


def _chosen(folder: Path, step: int | None) -> str:
    found = {number: path.name for number, path in reversed(_found(folder))}  # without ~ comes first, so wins
    if not found:
        raise FileNotFoundError(f"synk.load: {folder} has no checkpoint; synk.save makes one.")
    if step is None:
        return found[max(found)]
    if step not in found:
        raise FileNotFoundError(f"synk.load: {folder} has no step {step}; it has {', '.join(map(str, sorted(found)))}.")
    return found[step]


def compare(variables: Mapping[str, Shared], kept: Mapping[str, Any], where: str) -> None:
    """Are these what was kept? ValueError names the first difference."""
    if set(kept) != set(variables):
        missing, more = sorted(set(variables) - set(kept)), sorted(set(kept) - set(variables))
        parts = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(more)} besides"] * bool(more)
        raise ValueError(f"{where} {' and '.join(parts)}. Give the variables that were saved.")
    for name, variable in variables.items():
        there, size = kept[name], group_of(variable).size
        for what, was, has in _differences(there, variable):
            raise ValueError(f"{where}: {name}{what} was {was}, but {variable.name} has {has}.")
        if not there["is_equal"] and there["replicas"] != size:
            raise ValueError(
                f"{where}: {name} differed on {there['replicas']} replicas, but there are {size} now. "
                f"Load into as many, or make it equal before it is saved."
            )


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


def _loaded_state(name: str, variable: Shared, kept: Any, arrays: Any) -> VariableState:
    """What the variable holds once it has what was kept."""
    spec = variable._spec

    def stored(rank: int | None) -> list[np.ndarray]:
        found = [arrays[_member(name, i, rank)] for i in range(len(spec.shapes))]
        return spec.pack([a.view(s.dtype) for a, s in zip(found, spec.shapes, strict=True)])

    if kept["is_equal"]:
        return access.state_of_copies(variable, stored(None))
    parts = [stored(rank) for rank in range(kept["replicas"])]
    if kept["lengths"] is not None:
        return access.state_of_rows(variable, parts)
    stacked = [stack_parts(group_of(variable), leaves, None) for leaves in zip(*parts, strict=True)]
    return access.state_of_leaves(variable, stacked, "stacked", diverged_by="what was saved")
