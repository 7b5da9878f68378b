"""Console: what the processes of a gang print, read at all times, whatever becomes of what is written."""

import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

MAX_WAITING = 1 << 23  # bytes
LONGEST_LINE = 1 << 16  # bytes; longer ones are cut
REDRAWN = 1.0  # seconds between lines of a progress bar, which are written one over the other
STALLED = 2.0  # seconds without progress after which the end does not wait any longer

_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")  # of lines; one with \r is gone as soon as the next is there


class Console:
    """Standard output, written by a thread of its own."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self._waiting = self._left_out = 0  # bytes, lines
        self._changed = threading.Condition()
        self._is_open = sys.stdout is not None
        self._progress = monotonic()
        threading.Thread(target=self._write_all, daemon=True).start()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self.write(f"synk: {text}\n".encode())

    def write(self, line: bytes) -> None:
        """Write a whole line, soon; what comes while too much waits and nobody reads is left out."""
        with self._changed:
            while self._waiting > MAX_WAITING and not self._has_stalled():
                self._changed.wait(0.1)
            if self._waiting > MAX_WAITING:
                self._left_out += 1
                return
            if self._left_out:
                line = f"synk: {self._left_out} lines are left out here; --logs keeps all\n".encode() + line
                self._left_out = 0
            if not self._waiting:
                self._progress = monotonic()
            self._lines.append(line)
            self._waiting += len(line)
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all is written, as long as somebody reads it."""
        with self._changed:
            while self._is_open and self._waiting and not self._has_stalled():
                self._changed.wait(0.05)

    def _has_stalled(self) -> bool:
        return monotonic() > self._progress + STALLED

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines, self._lines = b"".join(self._lines), deque[bytes]()
            at = 0
            while at < len(lines):
                count = self._write_some(lines[at : at + (1 << 16)])
                at += count
                with self._changed:
                    self._waiting -= count
                    self._progress = monotonic()
                    self._changed.notify_all()

    def _write_some(self, data: bytes) -> int:
        """How much is written; all, where it is closed. Past sys.stdout, which would try again at the end of Python."""
        try:
            return os.write(1, data) if self._is_open else len(data)
        except OSError:  # nobody will read it any more, or the disk is full
            self._is_open = False
            return len(data)


class Reader:
    """Reads what one process prints: each line to the console with its rank, and to a log."""

    def __init__(self, pipe: int, rank: int, console: Console, log: Path | None, on_line: Callable[[bytes], None]):
        self._pipe, self._prefix, self._console, self._on_line = pipe, f"[{rank}] ".encode(), console, on_line
        self._path, self._log, self._redrawn = log, None, 0.0
        try:
            self._log = None if log is None else open(log, "ab")  # of a job that starts again too; the thread closes it
        except OSError as error:
            console.say(f"{log} is not written: {error.strerror}")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the output, and say whether it came: a helper that has left the gang may hold it open."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._pipe, 1 << 16):
            *lines, rest = _ENDS.split(rest + chunk)
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest + b"\n"], b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest + b"\n")
        self._close_log()

    def _pass_on(self, line: bytes) -> None:
        self._on_line(line)
        text, is_redrawn = line.rstrip(b"\r\n"), line.endswith(b"\r")
        if not is_redrawn or (text and monotonic() > self._redrawn + REDRAWN):
            self._console.write(self._prefix + text + b"\n")
            self._redrawn = monotonic() if is_redrawn else self._redrawn
        if self._log is None:
            return
        try:
            self._log.write(line)
            self._log.flush()
        except OSError as error:
            self._console.say(f"{self._path} is not written any further: {error.strerror}")
            self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            with suppress(OSError):  # of what it has not written yet
                log.close()
