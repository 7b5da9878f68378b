"""Resume: go on with a loop from its last save, in the folder of the run or in the memory of the machine."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from errno import ENOTDIR
from pathlib import Path
from shutil import rmtree
from time import monotonic
from typing import Any

import jax
import numpy as np

from .._base.errors import Preempted, SynkError, public_api, shown
from .._data.prefetch import check_iterable, length
from .._distributed.preemption import is_told_to_stop, listen_no_more
from .._distributed.save_point import SavePoint
from .._variables.checkpoint import (
    Folder,
    check_keep,
    check_variables,
    checked_extra,
    common_group,
    load_together,
    save_together,
)
from .._variables.checkpoint_files import WRITER, Checkpoint, newest_step, read, write
from .._variables.variable import Shared
from .left_out import counter_of, leave_out
from .machine_memory import free_bytes, memory_folder


class Place:
    """A place where a loop saves: the folder of the run, or the memory of the machine.

    Attributes:
      folder: where checkpoints lie.
      every: seconds between two saves; infinite for none but at the end.
      keep: how many checkpoints to leave there; None for all.
      is_memory: whether the loop goes on where a save fails.
      due: when the next save is due, by the clock of this process.
    """

    def __init__(self, folder: Path, every: float | None, keep: int | None, is_memory: bool) -> None:
        self.folder, self.every, self.keep, self.is_memory = folder, every or np.inf, keep, is_memory
        self.due = monotonic() + self.every


class Resumed(Iterator[Any]):
    """An iterator over the items of a loop that are left to do; made by `synk.resume`.

    Attributes:
      done: how many items are done, by runs before too.
      extra: what `extra` returned at the save from which this run goes on; None at a first start.
      saving: the seconds for which the loop has waited for saves of this run.
    """

    # How many loops this program has made, and the number of the one whose item was asked for last.
    _count = _last = 0
    _is_over = True

    def __init__(self, variables: Mapping[str, Shared], extra: Callable[[], Any] | None) -> None:
        self._variables, self._made_extra, self._group = variables, extra, common_group(variables, "resume")
        self.done, self.extra, self.saving, self._is_finished = 0, None, 0.0, False
        # How many results the item has in which the loop is; 0 between two items.
        self._in_item = 0
        self._warned: set[str] = set()
        self._number, Resumed._count = Resumed._count, Resumed._count + 1
        self._is_writer = jax.process_index() == 0 or not self._group._is_multi_process

    def add_places(self, folder: Path | None, save_every: float | None, memory_every: float | None, keep: Any) -> None:
        """Set where to save."""
        self._places: list[Place] = []
        if folder is not None:
            used = self._group._cached(Resumed, None, set)
            if folder in used:
                raise SynkError(
                    f"synk.resume: a loop before saves in {folder}. Give each loop a folder of its own. To go on with "
                    f"a loop that was left, as in a notebook, call synk.close() and make the variables again."
                )
            used.add(folder)
            self._places.append(Place(folder, save_every, keep, False))
        memory = memory_folder(self._number, folder, self._group._is_multi_process)
        if memory is not None and memory_every is not None:
            self._places.append(Place(memory, memory_every, 1, True))
        elif memory_every is not None:
            self._say("memory_every needs the folder that `python -m synk launch` makes; going on without")

    def load(self) -> None:
        """Load the newest checkpoint, if there is one."""

        def find() -> Checkpoint:
            for place in self._places:
                if place.folder.exists() and not place.folder.is_dir():
                    raise NotADirectoryError(ENOTDIR, "synk.resume: give a folder for checkpoints", str(place.folder))
            newest = max([place.folder for place in self._places], key=newest_step, default=None)
            if newest is None or newest_step(newest) < 0:
                raise FileNotFoundError
            found = read(newest, None)
            if not isinstance(found.about["extra"], dict) or "is_finished" not in found.about["extra"]:
                found.file.close()
                raise ValueError(
                    f"synk.resume: {found.path} was made by synk.save, and does not say which items are done. Give "
                    f"another folder; to begin with its values, call synk.load before."
                )
            return found

        with suppress(FileNotFoundError):
            about = load_together("synk.resume", self._variables, find)
            self.done, self.extra, self._is_finished = map(about["extra"].get, ("done", "extra", "is_finished"))
            self._say(f"going on after {self.done:,} items, from {about['path']}")

    def begin(self, steps: Any) -> None:
        """Leave out the items of `steps` that are done."""
        if isinstance(steps, Iterable):
            count, states = length(steps), [variable._state for variable in self._variables.values()]
            self._items, dropped, out = leave_out(steps, self.done)
            self._length = None if count is None else count - out
            # What makes the items may have set variables meanwhile, as when it made them first.
            if any(v._state is not state for v, state in zip(self._variables.values(), states, strict=True)):
                self.load()
            if dropped:
                self._say(f"{dropped:,} items of {type(steps).__name__} were asked for and dropped")
        else:
            left = () if self._is_finished else steps(self.done, self.extra)
            check_iterable(left, "synk.resume: what steps returned", "items")
            self._items, self._length = iter(left), length(left)
        self._results_of = counter_of(self._items)
        self._point = SavePoint(self._number, self._group._is_multi_process)
        self._set_due()
        self._is_over = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of items is not known: what gives them has no len().")
        return self._length

    # A global may be gone when Python ends; a default value is not.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._end()

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._in_item and Resumed._last != self._number:
            raise SynkError(
                "synk.resume: another loop of synk.resume ran inside an item of this one. Give one of both to "
                "synk.resume: the outer loop, or in its place one loop over all inner items."
            )
        Resumed._last, self.done, self._in_item = self._number, self.done + self._in_item, 0
        try:
            if is_told_to_stop():
                self._stop()
            if monotonic() > self._due:
                self._call()
            agreed = self._point.reached(self.done)
            if agreed is not None:
                self._save_if_equal(self._places[int(agreed)])
            item = next(self._items)
        except StopIteration:
            self._finish()
            raise
        except BaseException:
            self._end()
            raise
        self._in_item, self._is_finished = self._results_of(item), False
        return item

    def _call(self) -> None:
        """Call for the save that is due."""
        number, place = min(enumerate(self._places), key=lambda numbered: numbered[1].due)
        if WRITER.is_idle:
            self._point.call(str(number))
            self._due = np.inf
        elif place.is_memory:
            place.due = monotonic() + place.every
            self._set_due()
            self._warn("a save in memory was due while another one was written; it is left out")

    def _set_due(self) -> None:
        """Set when this process looks for a save that is due. The clock of process 0 counts."""
        self._due = min([place.due for place in self._places], default=np.inf) if self._is_writer else np.inf

    def _save_if_equal(self, place: Place) -> None:
        """Save, unless local steps are to take the average: then all processes come here again at the next item."""
        if not any(v._is_averaged and not v._state.is_equal for v in self._variables.values()):
            self._save(place)
            self._point.answered(self.done)

    @public_api
    def _save(self, place: Place, is_last: bool = False, is_finished: bool = False) -> None:
        """Save all variables at this item; wait until they are written if it is the last save."""
        start = monotonic()
        extra = None if self._made_extra is None else checked_extra(self._made_extra(), "resume")
        extra = {"done": self.done, "extra": extra, "is_finished": is_finished}

        def begin(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
            # While the next checkpoint is written there are two, and one copy of it.
            need = 3 * sum(array.nbytes for array in arrays.values()) if place.is_memory else 0
            if need and need > free_bytes(place.folder):
                self._warn("memory lacks room for memory_every; going on without", f" ({need:,} B, {place.folder})")
                place.every = np.inf
                return ""
            return WRITER.run(lambda: self._write(place, about, arrays), f"item {about['extra']['done']}", not is_last)

        save_together(f"synk.resume(item={self.done})", self._variables, extra, not is_last, begin)
        # A save on disk serves in memory's place.
        for saved in self._places if not place.is_memory else [place]:
            saved.due = start + saved.every
        self.saving += monotonic() - start
        self._set_due()

    def _write(self, place: Place, about: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        try:
            write(place.folder, about["extra"]["done"], about, arrays, place.keep)
        except OSError as error:
            if not place.is_memory:
                raise
            self._warn("a save in memory has failed, and the one before stays", f": {error}")

    @public_api
    def _stop(self) -> None:
        """Save after a SIGTERM, and leave in all processes."""
        for place in self._places[:1]:
            if not place.is_memory:
                self._save(place, is_last=True)
                self._say(f"told to stop: {self.done:,} items are saved in {place.folder}")
        raise Preempted

    def _finish(self) -> None:
        """Save at the end, unless a run before has."""
        if not self._is_finished and self._places:
            self._save(self._places[0], is_last=True, is_finished=True)
        for place in self._places[1:] if self._is_writer else []:
            rmtree(place.folder, ignore_errors=True)
        self._point.end()
        self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            listen_no_more()

    def _say(self, text: str) -> None:
        if self._is_writer:
            print(f"synk.resume: {text}", file=sys.stderr, flush=True)

    def _warn(self, what: str, why: str = "") -> None:
        """Say what goes wrong, once."""
        if what not in self._warned:
            self._say(what + why)
        self._warned.add(what)


@public_api
def resume(
    steps: Iterable[Any] | Callable[[int, Any], Iterable[Any]],
    variables: Mapping[str, Shared],
    *,
    folder: Folder | None = None,
    save_every: float | None = 600.0,
    memory_every: float | None = None,
    extra: Callable[[], Any] | None = None,
    keep: int | None = 3,
) -> Resumed:
    """Go on with a loop from its last save: load variables, leave out the items that are done, and save in the loop.

    Call it in a program that is started again after a fault, with the same arguments. The first time it yields all
    items. Later it loads the newest whole checkpoint, and yields the items that are left. The numbers are those of a
    run without a fault, to rounding (bit for bit with `blocks=`), on any number of replicas: items after the checkpoint
    are computed again, and none is left out or counted twice.

    Ranges, sequences and `synk.minibatches` are cut by index, also inside `enumerate` and `zip`, whose numbers go on.
    Loops of `f.iterate` and `f.stream` leave out their first batches, with their values of `synk.each`. Items of any
    other iterable are asked for and dropped; a call of a synk function meanwhile raises, so write
    `tqdm(synk.resume(batches, ...))` and not the reverse.

    While the loop runs, all processes save in the background before the same item, and at its end. After a SIGTERM they
    save and raise `synk.errors.Preempted`, which ends the program with code 143. After `break`, an error or Ctrl-C
    nothing is saved, so the next start goes on from the last save. A finished loop yields nothing when it is started
    again.

    Args:
      steps: what the loop goes through; or a function that takes `done` and `extra` and returns the items that are
        left, for loaders that keep a position of their own.
      variables: from name to shared variable: all that the loop updates, e.g. `training.variables`.
      folder: where checkpoints lie, as those of `synk.save`; one for each loop. None: in memory alone.
      save_every: seconds between two saves there, counted by process 0; None for one at the end alone.
      memory_every: seconds between two saves in the memory of the machine, where they outlive a process. The folder is
        one that `python -m synk launch` makes and removes. Without one, or without room in it for three times the
        variables, a line says that the loop goes on without. None for no such saves.
      extra: called at each save in all processes; process 0's value is kept beside the variables, as that of
        `synk.save`.
      keep: how many checkpoints to leave in `folder`; None for all.

    Returns:
      An iterator over the items that are left. It has `done`, the number of items that are done, `extra`, the value
      that was kept, `saving`, the seconds for which it waited for saves, and a `len`, if `steps` has one.

    Raises:
      TypeError: `steps` is neither an iterable nor a function.
      ValueError: there are fewer items than are done, a number is out of range, nowhere to save is given, or what
        `synk.load` says of other variables.
      SynkError: two loops save in one folder, or one loop runs inside an item of another.
      CheckpointError: there are checkpoints, but none is whole.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk, tempfile
      >>> x, total = np.arange(6.0), synk.shared(0.0, name="total")
      >>> @synk.function
      ... def add(x):
      ...     return jnp.sum(x)
      >>> @add.then
      ... def add(part):
      ...     total.value = total.value + part
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     batches = synk.resume(synk.minibatches(6, 2), {"total": total}, folder=folder)
      ...     for batch in batches:
      ...         add(x, batch=batch)
      >>> batches.done, float(total.value)
      (3, 15.0)
    """
    if not (isinstance(steps, Iterable) or callable(steps)):
        raise TypeError(f"synk.resume: steps is {shown(steps)}; give an iterable, or a function of `done` and `extra`.")
    check_variables(variables, "resume")
    for name, seconds in {"save_every": save_every, "memory_every": memory_every}.items():
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0):
            raise ValueError(f"synk.resume: {name} is {shown(seconds)}; give seconds > 0, or None.")
    if folder is None and memory_every is None:
        raise ValueError("synk.resume: there is nowhere to save; give folder=, memory_every= or both.")
    check_keep(keep, "resume")
    if extra is not None and not callable(extra):
        raise TypeError(
            f"synk.resume: extra is {shown(extra)}; give a function that returns what to keep at each save."
        )
    loop = Resumed(variables, extra)
    place = None if folder is None else Path(folder).absolute()
    loop.add_places(place, save_every, memory_every, keep)
    loop.load()
    loop.begin(steps)
    return loop
