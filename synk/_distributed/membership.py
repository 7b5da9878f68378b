"""Membership: the launcher's list of the processes of an elastic group, and who is told when it changes.

It lives in the launcher, so no process of the program is special. Each process keeps one TCP connection to it, and the
two send lines of JSON. A connection that closes, or brings no line for `heartbeat` seconds, means that its process is
gone. Those left then form the next *generation*: the launcher starts a coordination service of JAX's for as many
processes, and tells them its address and their new order.

Processes exchange values by this connection too. The launcher answers an exchange when the values of all are there. So
it alone decides whether an exchange came before a loss: either all that are left get its answer, or none.
"""

import json
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

# Lines from a process: {"hello": id, "heartbeat": s, "start": s}, {"ready": generation}, {"exchange": number, ...},
# {"beat": 1}, {"leave": why, "is_end": b}.
# Lines to a process: {"generation": g, "members": [id, ...], "address": a, "lost": {id: why}}, {"go": generation},
# {"values": [...], "number": n, "is_stopping": b}, {"end": why}.
MAX_LINE = 1 << 26
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
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._connection.close()


class _Process:
    """A process that has a connection.

    Attributes:
      line: its connection.
      heartbeat: seconds without a line after which it counts as dead.
      seen: when its last line came.
      ready: the newest generation that it is ready for.
      exchange: its part of the exchange that it waits in; None if it waits in none.
    """

    def __init__(self, line: Line, heartbeat: float) -> None:
        self.line, self.heartbeat, self.seen = line, heartbeat, monotonic()
        self.ready = 0
        self.exchange: dict[str, Any] | None = None


class Membership:
    """The processes of an elastic group, and their generation.

    Attributes:
      lost: why each process that was left behind is gone.
      hanging: processes that were left behind since they sent nothing, and that may still be there.
      is_ending: whether a program has ended well, so that all are about to.
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
        self._generation, self._members = 0, dict[int, _Process]()
        # Processes that have not come yet, and until when they are awaited: for so long after the first has come.
        self._missing, self._until = set(range(count)), float("inf")
        self.lost, self.hanging, self.is_ending = dict[int, str](), set[int](), False
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
        self._socket.close()

    def lose(self, process: int, why: str) -> None:
        """Leave a process behind, and tell the others."""
        with self._lock:
            gone = self._members.pop(process, None)
            if gone is not None:
                gone.line.send({"end": f"this process was left behind: {why}"})
                gone.line.close()
            elif process not in self._missing:
                return
            self._missing.discard(process)
            self.lost[process] = why
            if not self._missing:
                self._next_generation()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._follow, args=(Line(connection),), daemon=True).start()

    def _follow(self, line: Line) -> None:
        """Read the lines of one connection until it closes."""
        hello = line.receive()
        if hello is None or "hello" not in hello:
            line.close()
            return
        number, process = int(hello["hello"]), _Process(line, float(hello["heartbeat"]))
        with self._lock:
            if self._ended or number not in self._missing:
                line.send({"end": self._ended or f"process {number} cannot join a group that has started"})
                line.close()
                return
            self._missing.discard(number)
            self._members[number] = process
            self._until = min(self._until, monotonic() + float(hello["start"]))
            if not self._missing:
                self._next_generation()
        while (message := line.receive()) is not None:
            with self._lock:
                process.seen = monotonic()
                if self._members.get(number) is process:
                    self._take(number, process, message)
        self.lose(number, "its connection has closed")

    def _take(self, number: int, process: _Process, message: dict[str, Any]) -> None:
        """Act on a line of a process that belongs to the group."""
        if "leave" in message:
            self.is_ending |= message["is_end"]
            self.lose(number, message["leave"])
        elif "ready" in message:
            process.ready = message["ready"]
            if all(other.ready == self._generation for other in self._members.values()):
                self._tell({"go": self._generation})
        elif "exchange" in message and message["generation"] == self._generation:
            process.exchange = message
            parts = [self._members[other].exchange for other in sorted(self._members)]
            if None not in parts:
                for other in self._members.values():
                    other.exchange = None
                self._tell({"values": parts, "number": message["exchange"], "is_stopping": self._is_stopping})

    def _tell(self, message: dict[str, Any]) -> None:
        for process in self._members.values():
            process.line.send(message)

    def _next_generation(self) -> None:
        """Tell all processes that are left who they are now. End them if they are too few."""
        members = sorted(self._members)
        if not members:
            return
        whys = "; ".join(f"process {number}: {why}" for number, why in self.lost.items())
        if len(members) < self._least and not self.is_ending:
            self._ended = f"{len(members)} processes are left, and the group needs {self._least}. {whys}"
            self._tell({"end": self._ended})
            return
        self._generation += 1
        for process in self._members.values():
            process.exchange = None
        address = self._serve(len(members))
        lost = {str(number): why for number, why in self.lost.items()}
        self._tell({"generation": self._generation, "members": members, "address": address, "lost": lost})

    def _watch(self) -> None:
        """Leave behind processes that send nothing any more, or have not come in time."""
        last = monotonic()
        while not threading.Event().wait(LOOK):
            with self._lock:
                now = monotonic()
                # While this process slept, as a whole machine may, it has heard nobody.
                slept, last = max(0.0, now - last - 2 * LOOK), now
                self._until += slept
                for process in self._members.values():
                    process.seen += slept
                for number, process in list(self._members.items()):
                    if now - process.seen > process.heartbeat:
                        self.hanging.add(number)
                        self.lose(number, f"it has sent nothing for {process.heartbeat:g} s")
                if now > self._until:
                    for number in list(self._missing):
                        self.hanging.add(number)
                        self.lose(number, "it has not come in time to the start")
