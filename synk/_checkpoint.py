"""Checkpoint: shared variables on disk, whole or absent, whatever dies when."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import _agree, _engine, _flight, _trace
from ._collectives import each_of
from ._errors import entry
from ._flight import uninterrupted
from ._group import group
from ._shared import Shared

FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})(~?)")

Folder = str | os.PathLike[str]


@entry
def save(
    folder: Folder,
    variables: Mapping[str, Shared],
    *,
    step: int,
    extra: Any = None,
    keep: int | None = 3,
) -> None:
    """Save shared variables, so that `synk.load` finds all of them or, if anything dies before the end, none.

    In a group over processes all of them call it; process 0 writes. What replicas share is written once; what differs,
    for each replica. The folder `step-<step>` holds `arrays.npz` and `about.json`.

    Args:
      folder: where checkpoints of one run lie; made where it does not exist.
      variables: from name to shared variable.
      step: the number of the checkpoint, >= 0; saving one again replaces it.
      extra: what else to keep, e.g. the position in the data: numbers, strings, lists and dictionaries, as JSON has.
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
    _check_extra(extra)
    with _flight.LOCK, _trace.eager():
        about = {"format": FORMAT, "step": int(step), "extra": extra, "variables": described(variables)}
        arrays = dict(_arrays(variables))
        spans = group().spans

        def write() -> str:
            _write(Path(folder), int(step), arrays, about, keep)
            return ""

        _agree.from_first(write, "synk.save") if spans else write()


@entry
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
      See `synk.save`.

      >>> import synk, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     try:
      ...         synk.load(folder, {})
      ...     except FileNotFoundError as error:
      ...         print(str(error).split(":")[0])
      synk.load
    """
    check_variables(variables, "load")
    place = Path(folder)
    with _flight.LOCK, _trace.eager():
        spans = group().spans

        def choose() -> str:
            return _chosen(place, step)

        found = _agree.from_first(choose, "synk.load") if spans else choose()
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
            ready = [(v, kept[name], _placed(name, v, kept[name], arrays)) for name, v in variables.items()]
        with _flight.uninterrupted():
            for variable, said, leaves in ready:
                variable.take(leaves, said["lengths"], said["is_equal"], "what was saved")
    return about["step"], about["extra"]


def check_variables(variables: Any, call: str) -> None:
    """Is it a mapping from name to shared variable?"""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise TypeError(f'synk.{call}: variables is {variables!r}; give a mapping from name to variable: {{"w": w}}.')
    each_of(list(variables.values()), call)


def _check_extra(extra: Any) -> None:
    try:
        is_same = json.loads(json.dumps(extra)) == extra
    except (TypeError, ValueError) as error:
        raise TypeError(f"synk.save: extra is no JSON ({error}). Keep arrays in shared variables.") from None
    if not is_same:
        raise TypeError(
            "synk.save: extra does not come back from JSON as it was; use lists for tuples, strings as keys."
        )


def described(variables: Mapping[str, Shared]) -> dict[str, Any]:
    """What is to be known of each, as JSON has it."""
    return {
        name: {
            "leaves": [
                {"path": path, "shape": list(s.shape), "dtype": s.dtype.name, "key": None if key is None else str(key)}
                for path, s, key in zip(v.seen_paths, v.seen.shapes, v.seen.keys, strict=True)
            ],
            "is_equal": v.is_equal,
            "lengths": v.lengths and list(v.lengths),
            "replicas": v.home.size,
        }
        for name, v in variables.items()
    }


def _arrays(variables: Mapping[str, Shared]) -> Iterator[tuple[str, np.ndarray]]:
    """Every leaf in host memory, its bits as bytes where NumPy's files do not know the dtype."""
    for name, variable in variables.items():
        home, is_equal, lengths = variable.home, variable.is_equal, variable.lengths
        leaves = variable.read(list)
        for rank in range(1 if is_equal else home.size):
            rows = None if lengths is None else lengths[rank]
            # Where all are equal any replica's will do, and every process has one of its own.
            which = home.mine.start if is_equal else rank
            read = _engine.own_entry if is_equal else _engine.host_entry
            entries = [read(home, leaf, variable.lies, which, rows) for leaf in leaves]
            for i, leaf in enumerate(variable.seen_leaves(entries)):
                yield _member(name, i, None if is_equal else rank), _storable(leaf)


def _member(name: str, leaf: int, rank: int | None) -> str:
    """What a leaf is called in the file; names may have dots themselves, so always with both numbers."""
    return f"{name}.{leaf}.{'all' if rank is None else rank}"


def _storable(array: np.ndarray) -> np.ndarray:
    # A copy is contiguous, as a view of its bytes needs; ascontiguousarray would give a scalar an axis.
    return array if array.dtype.isbuiltin == 1 else array.copy("C").view(f"u{array.dtype.itemsize}")


def _write(folder: Path, step: int, arrays: Mapping[str, np.ndarray], about: Any, keep: int | None) -> None:
    """Into a folder of another name, which takes its own in one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob(".saving-*"), *folder.glob(".gone-*")]:  # by who died while saving
        _delete(left)
    name = f"step-{step:08d}"
    new, final, old = folder / f".saving-{name}-{os.getpid()}", folder / name, folder / f"{name}~"
    new.mkdir()
    try:
        with open(new / "arrays.npz", "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # names and arrays
            _to_disk(file)
        with open(new / "about.json", "w") as file:
            json.dump(about, file, indent=1)
            _to_disk(file)
        _folder_to_disk(new)
    except BaseException:
        _delete(new)
        raise
    if final.exists():  # saved again: until the new one is there, the old one counts
        if old.exists():
            _remove(old)
        os.rename(final, old)
    os.rename(new, final)
    _folder_to_disk(folder)
    steps = sorted({number for number, _ in _found(folder)})
    gone = steps[:-keep] if keep is not None else []
    for number, path in list(_found(folder)):
        if (number in gone and number != step) or path == old:
            _remove(path)


def _remove(path: Path) -> None:
    """Out of sight first: no half of a checkpoint is ever found."""
    gone = path.with_name(f".gone-{path.name}")
    os.rename(path, gone)
    _delete(gone)


def _delete(path: Path) -> None:
    with uninterrupted():  # rmtree that is interrupted closes a descriptor twice: an OSError hides the Ctrl-C
        shutil.rmtree(path, ignore_errors=True)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _found(folder: Path) -> Iterator[tuple[int, Path]]:
    """Checkpoints by step; one that was being replaced only where its successor did not come."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match:
            yield int(match[1]), path


def _chosen(folder: Path, step: int | None) -> str:
    found = {number: path.name for number, path in reversed(list(_found(folder)))}  # without ~ comes first, so wins
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
        _compare(name, variable, kept[name], where)


def _compare(name: str, variable: Shared, kept: Any, where: str) -> None:
    value = variable.seen

    def differ(what: str, there: Any, here: Any) -> ValueError:
        return ValueError(f"{where}: {name}{what} was {there}, but {variable.name} has {here}.")

    paths = [leaf["path"] for leaf in kept["leaves"]]
    for there, here in zip_longest(paths, variable.seen_paths):
        if there != here:
            raise differ("'s tree", f"one with {there or 'nothing'}", f"{here or 'nothing'} there")
    if kept["lengths"] is not None and variable.is_flat:
        raise differ("", "rows", "one buffer a dtype (flat=True), which cannot hold rows")
    has_rows = kept["lengths"] is not None or variable.lengths is not None
    for path, shape, key, leaf in zip(variable.seen_paths, value.shapes, value.keys, kept["leaves"], strict=True):
        there, here = leaf["shape"], list(shape.shape)
        if there[has_rows:] != here[has_rows:] or len(there) != len(here):
            raise differ(f"{path}'s shape", there, here)
        if leaf["dtype"] != shape.dtype.name:
            raise differ(f"{path}'s dtype", leaf["dtype"], shape.dtype.name)
        if leaf["key"] != (None if key is None else str(key)):
            raise differ(f"{path}'s PRNG keys", leaf["key"], key)
    if not kept["is_equal"] and kept["replicas"] != variable.home.size:
        raise ValueError(
            f"{where}: {name} differed on {kept['replicas']} replicas, but there are {variable.home.size} "
            f"now. Load into as many, or make it equal before it is saved."
        )


def _placed(name: str, variable: Shared, kept: Any, arrays: Any) -> list[jax.Array]:
    home = variable.home
    dtypes = [np.dtype(shape.dtype) for shape in variable.seen.shapes]

    def stored(rank: int | None) -> list[np.ndarray]:
        found = [arrays[_member(name, i, rank)] for i in range(len(dtypes))]
        return variable.kept_leaves([a if a.dtype == d else a.view(d) for a, d in zip(found, dtypes, strict=True)])

    if kept["is_equal"]:
        return _engine.copies(home, stored(None), variable.lies)
    lengths: Sequence[int] | None = kept["lengths"]
    parts = [stored(rank) for rank in range(home.size)]
    return [
        _engine.stack_parts(home, [part[i] for part in parts], max(lengths) if lengths else None)
        for i in range(len(parts[0]))
    ]
