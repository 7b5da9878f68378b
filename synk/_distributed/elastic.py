"""Elastic: a group that goes on when it loses a process, and makes again the call that was under way.

A call of synk's that other processes take part in ends by an exchange, in which all say that their results are there.
Only then does it return. If a process is lost before, nobody returns: all take their variables back to where they were
when the call began, start JAX's backend again with one process fewer, and make the call again. The launcher decides by
the order of its messages which of the two it was, so all that are left do the same.
"""

import atexit
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import DisagreementError, DivergedError, LawError, PeerError, SynkError
from .._base.jax_context import config
from .._base.pytree import as_data, as_keys, key_of
from .._base.retry import RETRY, MembersChanged
from .._runtime.dispatch import IN_FLIGHT, LOCK
from .._runtime.group import CURRENT, GROUPS, Loss
from .._runtime.renewal import KEEPERS
from . import coordinator
from .agreement import GONE, SHARED_ERRORS, JaxPeers, sides
from .gang import Gang, Generation
from .liveness import EXIT_PEER_FAILED

# Errors that follow from values which all processes have, so that all raise them, and may go on.
OF_ALL = (FloatingPointError, DivergedError, LawError)
THREAD_SECONDS = 2.0  # for threads to come back that were left alone
TOGETHER_SECONDS = 0.3  # in which the launcher hears of a SIGTERM that goes to all, as SLURM sends it
PATIENCE = 5.0  # seconds in which the launcher tells of the loss that a program has died of, unless it is of silence


class ElasticPeers(JaxPeers):
    """The other processes of an elastic group.

    Attributes:
      losses: the processes that were lost.
    """

    keeps_values = True

    def __init__(self, address: tuple[str, int], me: int, heartbeat: float, start: float, exit_hook: bool) -> None:
        super().__init__()
        self.losses: Sequence[Loss] = ()
        self._heartbeat, self._exit_hook, self._start = heartbeat, exit_hook, monotonic()
        self._depth, self._leaves_at, self._starting = 0, float("inf"), threading.Lock()
        # The generation whose new processes have been given the values.
        self._gives_state, self._given = False, 0
        self.gang = Gang(address, me, heartbeat, start, self._left_behind)

    # What the rest of synk asks of its peers.

    def before_launch(self, what: str) -> None:
        _check_thread()
        if self.gang.has_changed:
            raise MembersChanged
        super().before_launch(what)

    def run(self, program: Callable[..., Any], *args: Any) -> Any:
        has_64_bits = config.jax_enable_x64

        def work() -> Any:
            # An option of the thread that calls.
            with jax.enable_x64(has_64_bits):
                return jax.block_until_ready(program(*args))

        return self._run_together(work)

    def _run_together(self, work: Callable[[], Any], patience: float = 0.0) -> Any:
        """Run something that waits for the others on a thread. Raise MembersChanged for what a loss makes it raise."""
        try:
            return self.gang.run(work)
        except Exception as error:
            # The launcher tells of the loss as soon as it sees it. A process that is frozen it sees after a heartbeat.
            self.gang.wait(lambda: False, self._heartbeat + PATIENCE if GONE.search(str(error)) else patience)
            raise

    def after_failure(self, what: str, error: Exception) -> Exception:
        # The others wait in the program for this process, which has left it.
        why = f"{what}: its program died ({str(error).strip().splitlines()[-1][:200]})"
        self.gang.leave(why)
        return self.end(PeerError(f"this process has left the elastic group. {why}."))

    def translate_error(self, error: BaseException) -> SynkError | None:
        return error if isinstance(error, PeerError | DisagreementError) else None

    def from_process_0(self, what: str, act: Callable[[], str]) -> str:
        self._exchange(what, "")
        told, error = "", None
        if self.rank == 0:
            try:
                told = json.dumps([None, act()])
            except Exception as raised:
                told, error = json.dumps([type(raised).__name__, str(raised)]), raised
        kind, text = json.loads(self._exchange(f"{what}, done by process 0", told)[0])
        if error is not None:
            raise error
        if kind is None:
            return text
        raise SHARED_ERRORS.get(kind, OSError)(text)

    def is_told_to_stop(self, what: str) -> bool:
        self._exchange(what, "")
        # The next answer cannot come before this process asks again.
        return self.gang.is_stopping

    def _exchange(self, what: str, value: str) -> list[str]:
        _check_thread()
        if self.ended is not None:
            raise self.ended
        self.exchanges += 1
        if self.is_waiting:
            return [value]
        parts = self.gang.exchange(f"{what} as its program {self.progress[0] + 1}", value, self._gives_state)
        doing = [what for what, _ in parts]
        if len(set(doing)) > 1:
            raise self.end(
                DisagreementError(
                    f"processes are about to run different programs. {sides(doing)}. Every process must make the same "
                    f"calls, of equal shapes, in the same order."
                )
            )
        return [value for _, value in parts]

    @property
    def rank(self) -> int:
        """Return the place of this process among those of its generation."""
        return self._members.index(self.gang.me)

    @property
    def _members(self) -> Sequence[int]:
        """Return the processes of the generation, by the launcher's numbers."""
        return [self.gang.me] if self.gang.generation is None else self.gang.generation.members

    # How a process joins.

    @property
    def is_waiting(self) -> bool:
        return self.gang.generation is None

    def meet_new(self, give_state: Callable[[], None]) -> None:
        if self.is_waiting:
            self.gang.wait_to_join()
        if len(self._members) == 1:
            # A process that is left alone has no other exchange, whose answer tells that somebody waits.
            self._exchange("synk.join", "")
        generation = self.gang.generation
        assert generation is not None
        self.gang.can_join()
        if generation.new and generation.number != self._given:
            give_state()
            self._gives_state = True
        elif self.gang.is_awaited and all(keeper.can_move() for keeper in KEEPERS):
            self.gang.admit()

    # How calls are made again.

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a public call; make it again each time that a process is lost before all have its result."""
        if self._depth or threading.current_thread() is not threading.main_thread():
            return fn(*args, **kwargs)
        with LOCK:
            while True:
                restores, before = [keeper.snapshot() for keeper in KEEPERS], self.progress[0]
                self._depth += 1
                try:
                    result = self._call_together(fn, args, kwargs)
                    break
                except MembersChanged:
                    self._gives_state = False
                    self.progress = before, "a call that is made again"
                    for restore in restores:
                        restore()
                    self.renew()
                finally:
                    self._depth -= 1
        if monotonic() > self._leaves_at and not self.gang.is_stopping:
            self.gang.leave("it was told to stop (SIGTERM)")
            raise SystemExit(128 + signal.SIGTERM)
        return jax.tree.map(_local, result)

    def _call_together(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, and return its result, or raise its error, when all have it."""
        before = self.progress[0], self.exchanges
        try:
            result = fn(*args, **kwargs)
        except OF_ALL:
            self._end_call(before)
            raise
        self._end_call(before)
        return result

    def _end_call(self, before: tuple[int, int]) -> None:
        """Wait until all have come to the end of a call, unless nothing was launched or exchanged since `before`."""
        if (self.progress[0], self.exchanges) != before:
            self._exchange("the end of a call", "")
        if self._gives_state and self.gang.generation is not None:
            self._gives_state, self._given = False, self.gang.generation.number

    def enter(self) -> None:
        """Join the processes that start. All return with the same generation, or wait to join one."""
        while True:
            try:
                self.join()
                self._exchange("the end of synk.init", "")
                return
            except MembersChanged:
                pass

    def join(self) -> None:
        """Join the processes of the newest generation."""
        # Losses come while others are followed up: the newest generation counts.
        while True:
            generation = self.gang.follow()
            if generation is None:
                return
            rank, count = generation.members.index(self.gang.me), len(generation.members)
            coordinator.forget_devices()
            try:
                self._run_together(partial(self._start_backend, generation, rank, count), PATIENCE)
                return
            except MembersChanged:
                # The thread may be about to wait.
                while not self._starting.acquire(timeout=0.05):
                    coordinator.wake_start(count)
                self._starting.release()

    def _start_backend(self, generation: Generation, rank: int, count: int) -> None:
        """Start JAX's backend with the processes of a generation, unless it is over before all have come."""
        client = coordinator.connect(generation.address, rank, count)
        # A thread that was left alone here must not come between the next one.
        with self._starting:
            if generation is not self.gang.generation or self.gang.has_changed:
                raise MembersChanged
            coordinator.use(client, generation.address, rank, count)

    def renew(self) -> None:
        """Go on with the processes that are left."""
        begun, before, everywhere = monotonic(), self._members, set(jax.devices())
        devices = {group: _places(group.devices, before) for group in list(GROUPS)}
        whole = [group for group in devices if group._peers is self and everywhere <= {*group.devices}]
        IN_FLIGHT.clear()
        places = [keeper.to_host() for keeper in KEEPERS]
        self.join()
        # Processes that join have launched other programs than those that go on.
        self.progress = 0, "nothing"
        for group, at in devices.items():
            group._take_devices(tuple(jax.devices()) if group in whole else _devices_at(at, self._members))
        for place in places:
            place()
        lost = {} if self.gang.generation is None else self.gang.generation.lost
        gone = {int(number): why for number, why in lost.items() if int(number) in before}
        self.losses = [*self.losses, *(Loss(number, begun - self._start, why) for number, why in gone.items())]
        if self.rank == 0:
            news = [f"process {number} is lost: {why}" for number, why in gone.items()]
            news += [f"process {number} has joined" for number in self._members if number not in before]
            after = f"{len(self._members)} go on after {monotonic() - begun:.2f} s"
            print(f"synk: {'; '.join([*news, after])}.", file=sys.stderr, flush=True)

    # How this process ends.

    def attend(self) -> None:
        """Make the public calls of this process, and tell the launcher when it ends."""
        RETRY.run = self.call
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=partial(self._leave_alone, sys.excepthook))
        if self._exit_hook:
            sys.excepthook = self._at_error(sys.excepthook)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._stop)

    def _at_exit(self) -> None:
        """Tell the launcher that the program has ended."""
        self.gang.leave("it has ended its program", is_end=True)
        # A thread that comes back from the runtime when Python has ended aborts the process.
        coordinator.hang_up()
        self.gang.wait_for_threads(THREAD_SECONDS)

    def _leave_alone(self, excepthook: Any) -> None:
        """Make a forked helper end as any program does: it is no process of the group, and has none of its threads."""
        RETRY.run = None
        atexit.unregister(self._at_exit)
        sys.excepthook = excepthook
        if signal.getsignal(signal.SIGTERM) == self._stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _stop(self, number: int, frame: Any) -> None:
        self._leaves_at = min(self._leaves_at, monotonic() + TOGETHER_SECONDS)

    def _at_error(self, before: Callable[..., Any]) -> Callable[..., None]:
        def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
            before(kind, error, traceback)
            self.gang.leave(f"{kind.__name__}: {str(error)[:300]}")
            _leave(EXIT_PEER_FAILED if isinstance(error, PeerError) else 130 if kind is KeyboardInterrupt else 1)

        return hook

    def _left_behind(self, why: str) -> None:
        """End this process: the others go on without it, and it must write nothing any more."""
        if self._exit_hook and "left behind" in why:
            print(f"synk.PeerError: {why}.", file=sys.stderr, flush=True)
            os._exit(EXIT_PEER_FAILED)


def join_elastic(is_distributed: bool, heartbeat: int, start: int, exit_hook: bool) -> None:
    """Join the elastic group whose launcher has started this process. Arguments are those of `synk.init`."""
    if CURRENT.peers is not None:
        return
    address = re.fullmatch(r"(\S+):(\d+)", os.environ.get("SYNK_MEMBERSHIP", ""))
    if not is_distributed or address is None:
        raise ValueError(
            "synk.init: elastic=True goes with distributed=True, in a program that `python -m synk launch --elastic` "
            "has started; with -n 1 it is one process, as to debug."
        )
    jax.config.update("jax_enable_preemption_service", False)
    if devices := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        jax.config.update("jax_cuda_visible_devices", devices)
    me = int(os.environ["SYNK_PROCESS_ID"])
    peers = ElasticPeers((address[1], int(address[2])), me, heartbeat, start, exit_hook)
    peers.enter()
    CURRENT.peers = peers
    peers.attend()


def _check_thread() -> None:
    """Raise SynkError on another thread than the main one: calls of two threads cannot be made again in one order."""
    if threading.current_thread() is not threading.main_thread():
        raise SynkError(
            "synk: in an elastic group, call what all processes take part in from the main thread, which alone makes "
            "calls again after a loss."
        )


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _places(devices: Sequence[Any], members: Sequence[int]) -> list[tuple[int, int]]:
    """Return where devices are: the process, by its number at the launcher, and which of its devices."""
    counts: dict[int, list[int]] = {}
    for device in jax.devices():
        counts.setdefault(device.process_index, []).append(device.id)
    return [(members[device.process_index], counts[device.process_index].index(device.id)) for device in devices]


def _devices_at(places: Sequence[tuple[int, int]], members: Sequence[int]) -> tuple[Any, ...]:
    """Return the devices of now at places, without those of processes that are gone."""
    devices: dict[int, list[Any]] = {}
    for device in jax.devices():
        devices.setdefault(members[device.process_index], []).append(device)
    return tuple([devices[process][i] for process, i in places if process in devices])


def _local(leaf: Any) -> Any:
    """Return an array that lies over the processes as one of this process's own, which outlives them."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or not leaf.is_fully_replicated:
        return leaf
    return as_keys(jnp.asarray(np.asarray(as_data(leaf))), key_of(leaf))
