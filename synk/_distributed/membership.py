"""Membership: the launcher's list of the processes of an elastic group, and who is told when it changes.

It lives in the launcher, so no process of the program is special. Each process keeps one TCP connection to it, and the
two send lines of JSON. A connection that closes, or brings no line for `heartbeat` seconds, means that its process is
gone. Those left then form the next *generation*: the launcher starts a coordination service of JAX's for as many
processes, and tells them its address and their new order.

A process that is started later, in place of a lost one, waits until the others come to a point where it may join
(`synk.join`). They all hear of it in the answer to one exchange, so they stop at the same point.

Processes exchange values by this connection too. The launcher answers an exchange when the values of all are there. So
it alone decides whether an exchange came before a loss: either all that are left get its answer, or none.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

# Lines from a process: {"hello": id, "heartbeat": s, "start": s}, {"ready": generation}, {"exchange": number, ...},
# {"beat": 1}, {"leave": why, "is_end": b}, {"wait": 1} of a process that waits to join, {"admit": generation} of one
# that lets it, {"can_join": 1} of one whose program has a point to join at.
# Lines to a process: {"generation": g, "members": [id, ...], "address": a, "lost": {id: why}, "new": [id, ...]},
# {"go": generation}, {"values": [...], "is_stopping": b, "is_awaited": b}, {"alone": 1} to one that
# is to join, {"end": why}.
MAX_LINE = 1 << 26
SEND_SECONDS = 5  # after which a process that takes no more of a line counts as dead
LOOK = 0.2  # seconds between two looks for silent processes


class Line:
    """One end of a connection that sends and receives lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lock = connection, threading.Lock()
        self._reader = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> bool:
        """Send a line. Return whether the connection took it."""
        try:
            with self._lock:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.close()
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """Wait for a line; None once the other side is gone."""
        try:
            line = self._reader.readline(MAX_LINE)
            return json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Close the connection, and wake whoever waits for a line of it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Process:
    """A process that has a connection.

    Attributes:
      line: its connection.
      heartbeat: seconds without a line after which it counts as dead.
      seen: when its last line came.
      ready: the newest generation that it is ready for.
      exchange: its part of the exchange that it waits in; None if it waits in none.
      admits: whether it waits for another process to join.
      waits: whether it waits to join.
    """

    def __init__(self, line: Line, heartbeat: float) -> None:
        self.line, self.heartbeat, self.seen = line, heartbeat, monotonic()
        self.ready, self.admits, self.waits = 0, False, False
        self.exchange: dict[str, Any] | None = None


class Membership:
    """The processes of an elastic group, and their generation.

    Attributes:
      lost: why each process that was left behind is gone.
      hanging: processes that were left behind since they sent nothing, and that may still be there.
      can_join: whether the program has a point at which a process may join.
    """

    def __init__(
        self, address: tuple[str, int], count: int, least: int, serve: Callable[[int], str], say: Callable[[str], None]
    ) -> None:
        """Listen for processes.

        Args:
          address: host and port to listen at.
          count: how many processes the first generation has.
          least: how few may be left before all end.
          serve: starts a coordination service for so many processes, and returns its address.
          say: prints a line of the launcher's.
        """
        self._least, self._serve, self._say = least, serve, say
        self._lock = threading.RLock()
        # Members in the order of their ranks, those that are to join, and members that have no values yet.
        self._generation, self._members, self._joining = 0, dict[int, _Process](), dict[int, _Process]()
        self._new: set[int] = set()
        self.can_join = False
        # Processes that have not come yet, and until when they are awaited: for so long after the first has come.
        self._missing, self._until = set(range(count)), float("inf")
        self.lost, self.hanging, self._ended_well = dict[int, str](), set[int](), set[int]()
        self._is_stopping, self._ended = False, ""
        self._socket = socket.create_server(address)
        for work in (self._accept, self._watch):
            threading.Thread(target=work, name="synk-membership", daemon=True).start()

    @property
    def port(self) -> int:
        """Return the port at which it listens."""
        return self._socket.getsockname()[1]

    def stop(self) -> None:
        """Let `synk.preempted` say yes: the whole run has been asked to end."""
        self._is_stopping = True

    def close(self) -> None:
        """Listen no longer."""
        # Which wakes the thread that waits for connections; else the port stays taken.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def is_ending(self) -> bool:
        """Tell whether a program has ended well, so that all are about to."""
        return bool(self._ended_well)

    def fail(self, process: int) -> None:
        """Note that a process has ended with a code. It may have told of a good end, as with `sys.exit(1)`."""
        with self._lock:
            if process in self._ended_well:
                self._ended_well.discard(process)
                self._end_too_few()

    def lose(self, process: int, why: str) -> None:
        """Leave a process behind, and tell the others."""
        with self._lock:
            if joining := self._joining.pop(process, None):
                joining.line.close()
            gone = self._members.pop(process, None)
            if gone is not None:
                gone.line.send({"end": f"this process was left behind: {why}"})
                gone.line.close()
            elif process not in self._missing:
                return
            self._missing.discard(process)
            self._new.discard(process)
            self.lost[process] = why
            if not self._missing:
                self._next_generation()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            # A process that is frozen takes nothing any more, and the others must not wait for it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
            threading.Thread(target=self._follow, args=(Line(connection),), daemon=True).start()

    def _follow(self, line: Line) -> None:
        """Read the lines of one connection until it closes."""
        hello = line.receive()
        if hello is None or "hello" not in hello:
            line.close()
            return
        number, process = int(hello["hello"]), _Process(line, float(hello["heartbeat"]))
        with self._lock:
            if self._ended or number in self._members or number in self._joining:
                line.send({"end": self._ended or f"there is a process {number} already"})
                line.close()
                return
            self._until = min(self._until, monotonic() + float(hello["start"]))
            if number not in self._missing:
                self._joining[number] = process
                line.send({"alone": 1})
            else:
                self._missing.discard(number)
                self._members[number] = process
                if not self._missing:
                    self._next_generation()
        while (message := line.receive()) is not None:
            with self._lock:
                process.seen = monotonic()
                if self._members.get(number) is process:
                    self._take(number, process, message)
                elif self._joining.get(number) is process and "wait" in message:
                    process.waits = True
        with self._lock:
            if process in (self._members.get(number), self._joining.get(number)):
                self.hanging.add(number)  # if it is still there
                self.lose(number, "its connection has closed")

    def _take(self, number: int, process: _Process, message: dict[str, Any]) -> None:
        """Act on a line of a process that belongs to the group."""
        if "leave" in message:
            if message["is_end"]:
                self._ended_well.add(number)
            self.lose(number, message["leave"])
        elif "can_join" in message:
            self.can_join = True
        elif "admit" in message and message["admit"] == self._generation:
            process.admits = True
            if all(other.admits for other in self._members.values()):
                self._next_generation()
        elif "ready" in message:
            process.ready = message["ready"]
            if all(other.ready == self._generation for other in self._members.values()):
                self._tell({"go": self._generation})
        elif "exchange" in message and message["generation"] == self._generation:
            process.exchange = message
            parts = [other.exchange for other in self._members.values()]
            if None not in parts:
                for other in self._members.values():
                    other.exchange = None
                if message["gives_state"]:
                    self._new.clear()
                about = {"is_stopping": self._is_stopping, "is_awaited": self._is_awaited}
                self._tell({"values": parts, **about})

    @property
    def _is_awaited(self) -> bool:
        """Tell whether a process waits to join."""
        return any(process.waits for process in self._joining.values())

    def _tell(self, message: dict[str, Any]) -> None:
        for process in self._members.values():
            process.line.send(message)

    @property
    def _whys(self) -> str:
        return "; ".join(f"process {number}: {why}" for number, why in self.lost.items())

    def _end_too_few(self) -> bool:
        """End the processes that are left if they are too few. Return whether they are."""
        if self.is_ending or len(self._members) >= self._least:
            return False
        self._ended = f"{len(self._members)} left of the {self._least} processes that the group needs. {self._whys}"
        self._tell({"end": self._ended})
        return True

    def _next_generation(self) -> None:
        """Tell all processes that are left who they are now. End them if they are too few."""
        if not self._members:
            self._ended = "the others have ended their programs"
            for process in self._joining.values():
                process.line.send({"end": self._ended})
            return
        if not self._generation:
            self._members = dict(sorted(self._members.items()))
        elif all(process.admits for process in self._members.values()):
            waiting = [number for number, process in self._joining.items() if process.waits]
            for number in waiting:
                self._members[number] = self._joining.pop(number)
                self.lost.pop(number, None)
                self._new.add(number)
        members = list(self._members)
        if self._end_too_few():
            return
        if self._new.issuperset(members):
            self._ended = f"no process is left that has the values. {self._whys}"
            self._tell({"end": self._ended})
            return
        self._generation += 1
        for process in self._members.values():
            process.exchange, process.admits = None, False
        try:
            address = self._serve(len(members))
        except Exception as error:  # no descriptors are left, say
            self._ended = f"the launcher cannot start JAX's coordination service: {error}"
            self._tell({"end": self._ended})
            return
        lost = {str(number): why for number, why in self.lost.items()}
        about = {"lost": lost, "new": sorted(self._new)}
        self._tell({"generation": self._generation, "members": members, "address": address, **about})

    def _watch(self) -> None:
        """Leave behind processes that send nothing any more, or have not come in time."""
        last = monotonic()
        while not threading.Event().wait(LOOK):
            with self._lock:
                now = monotonic()
                # While this process slept, as a whole machine may, it has heard nobody.
                slept, last = max(0.0, now - last - 2 * LOOK), now
                self._until += slept
                processes = [*self._members.items(), *self._joining.items()]
                for _, process in processes:
                    process.seen += slept
                for number, process in processes:
                    if now - process.seen > process.heartbeat:
                        self.hanging.add(number)
                        self.lose(number, f"it has sent nothing for {process.heartbeat:g} s")
                if now > self._until:
                    for number in list(self._missing):
                        self.hanging.add(number)
                        self.lose(number, "it has not come in time to the start")
