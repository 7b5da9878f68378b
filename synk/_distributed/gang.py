"""Gang: a process of an elastic group: what it hears from the launcher, and how it waits for others without hanging.

Nothing in a process waits for another process but by `Gang.wait`, which raises MembersChanged as soon as the launcher
tells of a loss. Programs and JAX's own start run on a thread. If they wait for a dead process, as gloo does for up to
half a minute, the thread is left alone with its work, and the process goes on with another thread.
"""

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple, NoReturn

from .._base.errors import PeerError
from .._base.retry import MembersChanged
from .membership import Line

BEATS = 10  # lines in the time after which a silent process counts as dead


class Generation(NamedTuple):
    """The processes of a group from one loss to the next.

    Attributes:
      number: counts generations, from 1.
      members: the processes, by the numbers that the launcher gave them; their places are their ranks.
      address: where the coordination service of this generation listens.
      lost: why each process that is not there any more is gone.
      new: the processes that have joined, and have no values yet.
    """

    number: int
    members: Sequence[int]
    address: str
    lost: dict[str, str]
    new: Sequence[int]


class Gang:
    """The connection of this process to the launcher's `Membership`.

    Attributes:
      me: the number that the launcher gave this process.
      generation: the generation that this process has joined; None before the first.
      is_stopping: whether the whole run has been asked to end.
      is_awaited: whether a process waits to join; all processes of a generation read the same.
      is_alone: whether this process is yet to join the others.
    """

    def __init__(
        self, address: tuple[str, int], me: int, heartbeat: float, start: float, on_end: Callable[[str], None]
    ) -> None:
        """Connect to the launcher. `on_end` is called, on another thread, if this process is left behind."""
        self.me, self.is_stopping, self.is_awaited, self.is_alone = me, False, False, False
        self.generation: Generation | None = None
        self._changed, self._has_left, self._is_told = threading.Condition(), False, False
        self._next: Generation | None = None
        self._go, self._end, self._values = 0, "", list[Any]()
        self._exchanges, self._worker, self._on_end = 0, _Worker(self._changed), on_end
        self._left_alone: list[_Worker] = []
        self._line = Line(socket.create_connection(address))
        self._line.send({"hello": me, "heartbeat": heartbeat, "start": start})
        for work, *arguments in ((self._hear,), (self._beat, heartbeat / BEATS)):
            threading.Thread(target=work, args=arguments, name="synk-gang", daemon=True).start()

    @property
    def has_changed(self) -> bool:
        """Tell whether the launcher has told of a loss that this process has not followed yet."""
        return self._next is not self.generation

    def leave(self, why: str, is_end: bool = False) -> None:
        """Tell the launcher that this process goes; `is_end` says that its program has ended well."""
        self._has_left = True
        self._line.send({"leave": why, "is_end": is_end})

    def can_join(self) -> None:
        """Tell the launcher, once, that processes may join this program."""
        if not self._is_told:
            self._is_told = self._line.send({"can_join": 1})

    def wait_to_join(self) -> NoReturn:
        """Wait until the others let this process join, which MembersChanged tells."""
        self._line.send({"wait": 1})
        self.wait(lambda: False)
        raise AssertionError

    def admit(self) -> NoReturn:
        """Let those join who wait, once all processes have come here, which MembersChanged tells."""
        assert self.generation is not None
        self._line.send({"admit": self.generation.number})
        self.wait(lambda: False)
        raise AssertionError

    def exchange(self, what: str, value: str, gives_state: bool = False) -> list[tuple[str, str]]:
        """Wait until all processes are about to do something; return what each does, and its value, by rank.

        `gives_state` says that processes which are new have the values of the others now.

        Raises:
          MembersChanged: a process was lost before all had come.
        """
        assert self.generation is not None
        self._exchanges += 1
        number, place = self._exchanges, self.generation.members.index(self.me)
        about = {"generation": self.generation.number, "gives_state": gives_state}
        self._line.send({"exchange": number, "what": f"{what}, exchange {number}", "value": value, **about})
        # An earlier one may have been left by an error, as of Ctrl-C, before its answer came.
        self.wait(lambda: bool(self._values) and self._values[place]["exchange"] == number)
        values, self._values = self._values, []
        return [(part["what"], part["value"]) for part in values]

    def run(self, work: Callable[[], Any]) -> Any:
        """Run something that waits for other processes on a thread, and return its result, or raise its error.

        Raises:
          MembersChanged: a process was lost before it had ended. The thread is left with it.
        """
        worker = self._worker
        job = worker.give(work)
        try:
            self.wait(lambda: job.is_done)
        except MembersChanged:
            if not job.is_done:
                # Another thread for the next program: nobody knows when this one comes back.
                self._left_alone.append(worker)
                worker.end()
                self._worker = _Worker(self._changed)
            raise
        if job.error is not None:
            raise job.error
        return job.result

    def wait(self, is_there: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something is there; return False if that takes longer than `seconds`.

        Raises:
          MembersChanged: the launcher tells of a loss first.
          PeerError: the group has come to its end.
        """
        until = None if seconds is None else monotonic() + seconds
        with self._changed:
            # What came before a loss counts: the others have it too.
            while not is_there():
                if self._end:
                    raise PeerError(f"the elastic group has come to its end: {self._end}.")
                if self.has_changed:
                    raise MembersChanged
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def wait_for_threads(self, seconds: float) -> None:
        """Wait until threads that were left alone have come back."""
        until = monotonic() + seconds
        for worker in self._left_alone:
            worker.thread.join(max(0.0, until - monotonic()))

    def follow(self) -> Generation | None:
        """Wait until all that are left are ready for the newest generation, and return it; None if this process is yet
        to join one.

        Raises:
          PeerError: too few are left, or the launcher is gone.
        """
        while True:
            with self._changed:
                while self._next is None and not self._end and not self.is_alone:
                    self._changed.wait()
                newest = self._next
            if newest is None and self.is_alone:
                return None
            self.generation, self.is_alone, self.is_awaited = newest, False, False
            self._exchanges, self._values = 0, []
            try:
                self._line.send({"ready": newest.number if newest else 0})
                self.wait(lambda newest=newest: newest is not None and self._go == newest.number)
            except MembersChanged:
                continue
            assert newest is not None
            return newest

    def _hear(self) -> None:
        """Note what the launcher says."""
        while (message := self._line.receive()) is not None:
            with self._changed:
                if "generation" in message:
                    about = (message[name] for name in ("generation", "members", "address", "lost", "new"))
                    self._next = Generation(*about)
                self._go = message.get("go", self._go)
                self._values = message.get("values", self._values)
                self.is_stopping = message.get("is_stopping", self.is_stopping)
                # Answers come to all or none, so all read the same.
                self.is_awaited = message.get("is_awaited", self.is_awaited)
                self.is_alone |= "alone" in message
                self._end = self._end or message.get("end", "")
                self._changed.notify_all()
            if self._end:
                break
        with self._changed:
            self._end = self._end or "the launcher is gone"
            self._changed.notify_all()
        if not self._has_left:
            self._on_end(self._end)

    def _beat(self, seconds: float) -> None:
        """Send a sign of life again and again."""
        while not threading.Event().wait(seconds) and self._line.send({"beat": 1}):
            pass


class _Job:
    """Work that a thread does.

    Attributes:
      result: what it has returned.
      error: what it has raised.
      is_done: whether it has ended.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False


class _Worker:
    """A thread that does one piece of work after another."""

    def __init__(self, changed: threading.Condition) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = changed
        self.thread = threading.Thread(target=self._work, name="synk-programs", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Let the thread end, once it has done what it was given."""
        self._jobs.put(None)

    def give(self, work: Callable[[], Any]) -> _Job:
        """Let the thread do something."""
        job = _Job(work)
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            assert job.work is not None
            try:
                job.result = job.work()
            except BaseException as error:
                # Frames of the traceback would keep arrays of the group that is gone.
                job.error = error.with_traceback(None)
            job.work = None
            with self._changed:
                job.is_done = True
                self._changed.notify_all()
            del job
