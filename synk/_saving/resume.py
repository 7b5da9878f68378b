"""Resume: continue a loop where the last run stopped."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import numpy as np

from .._base.errors import Preempted, SynkError, public_api, shown
from .._distributed.preemption import ask_from, is_told_to_stop, listen_no_more, questions_asked
from .._loops.prefetch import check_iterable, length
from .._variables.variable import Shared
from .checkpoint import Folder, check_keep, check_variables, checked_extra, common_group, load_together, save_together
from .checkpoint_files import WRITER, Checkpoint, read, write
from .folder_lock import FolderLock, made
from .left_out import counter_of, leave_out
from .meetings import Meetings

_END = object()


class Resumed(Iterator[Any]):
    """An iterator over the items of a loop that are left to do; made by `synk.resume`.

    Attributes:
      done: how many items are done, by runs before too.
      extra: what `extra` returned at the save from which this run continues; None at a first start.
      saving: the seconds for which the loop has waited for saves of this run.
    """

    # How many loops this program has made, and the number of the one whose item was asked for last.
    _count = _last = 0
    _is_over = True
    _lock: FolderLock | None = None

    def __init__(
        self, variables: Mapping[str, Shared], extra: Callable[[], Any] | None, folder: Path, keep: int | None
    ) -> None:
        self._variables, self._made_extra, self._group = variables, extra, common_group(variables, "resume")
        self.done, self.extra, self.saving, self._is_finished = 0, None, 0.0, False
        # How many results the item has in which the loop is; 0 between two items.
        self._in_item = 0
        # What ended the loop before its last item.
        self._failure = ""
        self._number, Resumed._count = Resumed._count, Resumed._count + 1
        self._folder, self._keep = folder, keep
        # The folders of the loops of this group, in process 0.
        self._used: set[Path] = self._group._cached(Resumed, None, set)
        self._is_writer = jax.process_index() == 0 or not self._group._is_multi_process

    def take_folder(self, save_every: float | None) -> None:
        """Keep other loops out of the folder, once for all processes. Raise where nothing can be written to it."""

        def take() -> str:
            key = made(self._folder)
            if self._folder.resolve() in self._used:
                raise SynkError(
                    f"synk.resume: a loop before saves in {self._folder}. Give each loop a folder of its own. To go on "
                    f"with a loop that was left, as in a notebook, call synk.close() and make the variables again."
                )
            self._lock = FolderLock(self._folder, key)
            if self._lock.lacks:
                self._say(f"{self._folder} has no locks ({self._lock.lacks}), so a second run in it goes unnoticed")
            return str(questions_asked())

        # Processes that differ in these would meet at different items.
        call = f"synk.resume(save_every={save_every}, variables={[*self._variables]})"
        ask_from(int(self._group._peers.from_process_0(call, take)))

    def load(self) -> None:

        def find() -> Checkpoint:
            found = read(self._folder, None)
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

    def begin(self, steps: Any, save_every: float | None) -> None:
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
        self._meetings = Meetings(self.done, save_every)
        self._is_due = self._is_over = False
        if self._lock is not None:
            self._used.add(self._folder.resolve())

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of items is not known: what gives them has no len().")
        return self._length

    # A global may be gone when Python ends; a default value is not.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Locks and other modules may be gone when Python ends, and the system frees the lock itself.
        if not is_finalizing():
            self._end()

    def __next__(self) -> Any:
        if self._is_over:
            raise SynkError(self._failure) if self._failure else StopIteration()
        if self._in_item and Resumed._last != self._number:
            raise SynkError(
                "synk.resume: another loop of synk.resume ran inside an item of this one. Give one of both to "
                "synk.resume: the outer loop, or in its place one loop over all inner items."
            )
        Resumed._last, self.done, self._in_item = self._number, self.done + self._in_item, 0
        try:
            if self._lock is not None and not self._lock.is_held:
                raise SynkError(f"synk.resume: a later loop saves in {self._folder}. Give each a folder of its own.")
            if is_told_to_stop():
                self._stop()
            if self.done >= self._meetings.at:
                self._meet()
            # Local steps are to take the average first: then all processes come here again at the next item.
            if self._is_due and not any(v._is_averaged and not v._state.is_equal for v in self._variables.values()):
                self._save()
            if (item := next(self._items, _END)) is _END:
                self._finish()
        except BaseException as error:
            self._end(f"synk.resume: this loop has raised {error!r:.200}. A new start goes on from the last save.")
            if isinstance(error, StopIteration):
                # It would end the loop without a word.
                raise RuntimeError("synk.resume: extra raised StopIteration: an iterator in it has ended.") from error
            raise
        if item is _END:
            raise StopIteration
        self._in_item, self._is_finished = self._results_of(item), False
        return item

    @public_api
    def _meet(self) -> None:
        """Learn from process 0, with all others, whether to save, and when to meet again."""
        # Meetings make a process wait for the slowest one, so they are few: see `Meetings`.
        call = f"synk.resume: a meeting after {self.done} items"
        plan = self._group._peers.from_process_0(call, lambda: json.dumps(self._meetings.plan(self.done)))
        is_due, ahead = json.loads(plan)
        self._is_due, self._meetings.at = self._is_due or is_due, self.done + ahead

    @public_api
    def _save(self, is_last: bool = False, is_finished: bool = False) -> None:
        start = monotonic()
        extra = None if self._made_extra is None else checked_extra(self._made_extra(), "resume")
        # What is saved are finished items alone: the loop asks for the next item when its body has ended.
        extra = {"done": self.done, "extra": extra, "is_finished": is_finished}

        # The thread that writes does not keep a loop that is left.
        folder, done, keep = self._folder, self.done, self._keep

        def begin(about: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
            # The last save must raise, since nothing comes after it. Any other may fail, and the next one tries again.
            act = write if is_last else _try_to_write
            return WRITER.run(lambda: act(folder, done, about, arrays, keep), f"item {done}", not is_last)

        call = f"synk.resume(item={self.done})"
        save_together(call, self._variables, extra, not is_last, begin, WRITER.wait_quietly)
        self._is_due = False
        self.saving += monotonic() - start

    @public_api
    def _stop(self) -> None:
        """Save after a SIGTERM, and leave in all processes."""
        self._save(is_last=True)
        self._say(f"told to stop: {self.done:,} items are saved in {self._folder}")
        raise Preempted

    def _finish(self) -> None:
        if not self._is_finished:
            self._save(is_last=True, is_finished=True)
        self._end()

    def _end(self, failure: str = "") -> None:
        if self._lock is not None:
            self._lock.free()
        if not self._is_over:
            self._is_over, self._failure = True, failure
            listen_no_more()

    def _say(self, text: str) -> None:
        if self._is_writer:
            _print(text)


def _try_to_write(folder: Path, done: int, *more: Any) -> None:
    """Write, or say why not: the disk may have room again at the next save."""
    try:
        write(folder, done, *more)
    except OSError as error:
        why = f"{error.strerror or error}: {folder}"
        _print(f"the save after {done:,} items has failed ({why}). The next save tries again")


def _print(text: str) -> None:
    print(f"synk.resume: {text}", file=sys.stderr, flush=True)


@public_api
def resume(
    steps: Iterable[Any] | Callable[[int, Any], Iterable[Any]],
    variables: Mapping[str, Shared],
    *,
    folder: Folder,
    save_every: float | None = 600.0,
    extra: Callable[[], Any] | None = None,
    keep: int | None = 3,
) -> Resumed:
    """Continue a loop where the last run stopped: load variables, leave out the items that are done, save in the loop.

    Call it in a program that is started again after a fault, with the same arguments. The first start yields all
    items. A later start loads the newest whole checkpoint, and yields the items that are left. The numbers are
    those of a run without a fault, to rounding (bit for bit with `blocks=`), on any number of replicas: items after
    the checkpoint are computed again, and none is left out or counted twice.

    Ranges, sequences and `synk.minibatches` are cut by index, also inside `enumerate` and `zip`, whose numbers go
    on. Loops of `f.iterate` and `f.stream` leave out their first batches, with their values of `synk.each`. Items
    of any other iterable are asked for and dropped. If such an item calls a synk function, it raises, at a first
    start too: put `synk.resume` inside, as in `tqdm(synk.resume(batches, ...))`.

    While the loop runs, all processes save in the background before the same item, and at its end. A line says
    which save has failed; the next one tries again. After a SIGTERM they save and raise `synk.errors.Preempted`,
    which ends the program with code 143. After `break`, an error or Ctrl-C nothing is saved, so the next start
    continues from the last save. A finished loop yields nothing when it is started again. On one machine,
    `folder="/dev/shm/run"` with a short `save_every` restarts from memory.

    Args:
      steps: what the loop goes through; or a function that takes `done` and `extra` and returns the items that are
        left, for loaders that keep a position of their own.
      variables: from name to shared variable: all that the loop updates, e.g. `training.variables`.
      folder: where checkpoints lie, as those of `synk.save`; one for each loop. A lock keeps other runs out of it.
      save_every: seconds between two saves there, by the clock of process 0, which at each meeting of the processes
        says after how many items they meet again, by the pace so far; None for one save, at the end.
      extra: called at each save in all processes; process 0's value is kept beside the variables, as that of
        `synk.save`.
      keep: how many checkpoints to leave in `folder`; None for all.

    Returns:
      An iterator over the items that are left. It has `done`, the number of items that are done, `extra`, the value
      that was kept, `saving`, the seconds for which it waited for saves, and a `len`, if `steps` has one.

    Raises:
      TypeError: `steps` is neither an iterable nor a function.
      ValueError: there are fewer items than are done, a number is out of range, or what `synk.load` says of other
        variables.
      OSError: nothing can be written to the folder; or the last save, at the end or after a SIGTERM, has failed.
      SynkError: two loops or two runs save in one folder (a run waits 5 seconds for one that ends), one loop runs
        inside an item of another, or a loop that has raised is asked for an item.
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
    if save_every is not None and (
        isinstance(save_every, bool) or not isinstance(save_every, int | float) or save_every <= 0
    ):
        raise ValueError(f"synk.resume: save_every is {shown(save_every)}; give seconds > 0, or None.")
    check_keep(keep, "resume")
    if extra is not None and not callable(extra):
        raise TypeError(
            f"synk.resume: extra is {shown(extra)}; give a function that returns what to keep at each save."
        )
    loop = Resumed(variables, extra, Path(folder).absolute(), keep)
    try:
        loop.take_folder(save_every)
        loop.load()
        loop.begin(steps, save_every)
    except BaseException:
        # A traceback would keep the loop, and the loop the folder.
        loop._end()
        raise
    return loop
