"""Agreement: processes compare what they are about to do before they do it, and learn why one of them is gone."""

import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from time import sleep
from typing import Any, NoReturn

import jax
import numpy as np

from .._base.errors import (
    CheckpointError,
    DisagreementError,
    PeerError,
    SynkError,
)
from .._base.jax_context import is_checked
from .._runtime.dispatch import retire_finished
from .._runtime.group import Peers
from .._runtime.layout import describe_shapes
from . import coordinator as store

PATIENCE = 1.0  # seconds to wait for another process before looking why it keeps this one waiting

# Words of JAX, gloo, NCCL and gRPC when the other side of a connection is gone.
_GONE = re.compile(
    r"gloo|nccl|closed by peer|connection (reset|refused|closed)|heartbeat|coordination serv|unavailable", re.IGNORECASE
)
# Errors of process 0 that all processes raise alike, beside those with an errno. Any other error arrives as OSError.
_OF_FILES = (OSError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_SHARED_ERRORS = {e.__name__: e for e in (*_OF_FILES, SynkError, CheckpointError, TypeError, ValueError)}
_START_AGAIN = "This group cannot go on: start all its processes again, from the last checkpoint."


class JaxPeers(Peers):
    """The other processes of `jax.distributed`. All groups share one instance, since their programs run in one order.

    Before a step that all processes take together, they make an exchange: each process publishes what it is about to
    do and how many programs it has launched, and reads what the others publish. Exchanges are numbered, so every
    process notices when another one does something else.

    Attributes:
      progress: how many programs that all processes share this one has launched, and the name of the last one.
      ended: why the group has come to its end, as far as this process knows; None while it goes on.
    """

    def __init__(self) -> None:
        self.progress = (0, "nothing")
        self.ended: SynkError | None = None
        self._exchanges = 0

    def before_launch(self, what: str) -> None:
        if self.ended is not None:
            raise self.ended
        # The one part of the protocol that costs a round trip a call, so it can be switched off; programs are counted
        # always.
        if is_checked("calls"):
            self._exchange(what, "")
        self.progress = self.progress[0] + 1, what

    def agree(self, what: str, text: str) -> None:
        digests = self._exchange(what, hashlib.sha256(text.encode()).hexdigest()[:8])
        if len(set(digests)) > 1:
            sides = _sides(f"{what} [{digest}]" for digest in digests)
            self._disagree(f"{sides}. Their programs differ in what they compute (constants, operations)")

    def compare_values(self, what: str, arrays: Callable[[], Sequence[Any]], remedy: str, always: bool = False) -> None:
        if not (always or is_checked("calls")):
            return
        values = self._exchange(what, _describe(arrays()))
        if len(set(values)) > 1:  # the group goes on, since every process sees this
            raise DisagreementError(f"processes differ in {what}. {_sides(values)}. {remedy}")

    def from_process_0(self, what: str, act: Callable[[], str]) -> str:
        self._exchange(what, "")
        # The answer is deleted with what this process has published in the exchange.
        folder = f"synk/exchange/{self._exchanges}/0/answer/"
        if jax.process_index() == 0:
            try:
                result = act()
            except BaseException as error:
                has_number = isinstance(error, OSError) and error.errno is not None
                # Its errno, text and file names, from which Python makes an error of the same type.
                args = error.__reduce__()[1] if has_number else [str(error)]
                store.put(f"{folder}0", json.dumps([type(error).__name__, args], default=str))
                raise
            store.put(f"{folder}0", json.dumps([None, result]))
            return result
        kind, answer = json.loads(self._wait(folder, 0, what))
        if kind is None:
            return answer
        if kind in ("KeyboardInterrupt", "SystemExit"):
            raise self.end(_peer_failed({"0": f"{what}: {kind}({answer[0]})"}))
        if kind in _SHARED_ERRORS or len(answer) > 1:
            raise _SHARED_ERRORS.get(kind, OSError)(*answer)
        raise OSError(f"{what}: process 0 failed: {kind}: {answer[0]}")

    def after_failure(self, what: str, error: Exception) -> Exception:
        if (gone := self.translate_error(error)) is not None:
            return gone
        # The other processes wait for this one, or would take its next sum for this one.
        why = f"{what}: its program died ({str(error).strip().splitlines()[-1][:200]})"
        publish_failure(why)
        return self.end(_peer_failed({str(jax.process_index()): why}))

    def translate_error(self, error: BaseException) -> SynkError | None:
        if isinstance(error, PeerError | DisagreementError):
            return error
        if not store.is_running() or not _GONE.search(str(error)):
            return None
        for _ in range(10):  # a process that fails publishes why just before it goes
            if (end := self.find_end()) is not None:
                return end
            sleep(0.05)
        first = re.sub(r"(Error dispatching computation: )+", "", str(error).strip().splitlines()[0])[:200]
        return self.end(PeerError(f"another process of the group is gone ({first}). {_START_AGAIN}"))

    def end(self, error: SynkError) -> SynkError:
        """Note that the group has come to its end. Return the first reason that was noted."""
        self.ended = self.ended or error
        return self.ended

    def _exchange(self, what: str, value: str) -> list[str]:
        """Publish a value, and return the values of all processes by rank.

        Raises:
          DisagreementError: another process is about to do something else, or has launched other programs.
        """
        retire_finished()  # the others must learn of a program that died here before they go on
        if self.ended is not None:
            raise self.ended
        me = jax.process_index()
        self._exchanges += 1
        folder = f"synk/exchange/{self._exchanges}/"
        store.put(f"{folder}{me}", json.dumps([*self.progress, what, value]))
        # In one order in all processes, so that all raise the same difference.
        published = [json.loads(self._wait(folder, rank, what)) for rank in range(jax.process_count())]
        # All processes have come to this exchange, so they have read the one before.
        store.delete(f"synk/exchange/{self._exchanges - 1}/{me}")
        doing = [what for _, _, what, _ in published]
        if len(set(doing)) > 1:
            self._disagree(_sides(doing))
        if len({number for number, *_ in published}) > 1:
            self._disagree(_sides(f"{doing} as its program {n + 1}, after {last}" for n, last, doing, _ in published))
        return [value for *_, value in published]

    def _wait(self, folder: str, rank: int, what: str) -> str:
        """Wait until a process has written a value. Raise if it has failed, or goes on without it."""
        while (value := store.wait(f"{folder}{rank}", PATIENCE)) is None:
            if (end := self.find_end()) is not None:
                raise end
            # A process that has launched more programs has passed this exchange, unless its value has come meanwhile:
            # its heartbeat thread publishes the number apart from the exchange.
            number, other = store.get_all("synk/at/").get(str(rank), "0 ").split(" ", 1)
            if int(number) > self.progress[0] and str(rank) not in store.get_all(folder):
                me = jax.process_index()
                self._disagree(f"process {me}: {what}; process {rank} has gone on with: {other}")
        return value

    def _disagree(self, difference: str) -> NoReturn:
        """Tell all processes that they differ, and raise DisagreementError."""
        message = (
            f"processes are about to run different programs. {difference}. Every process must make the same calls, of "
            f"equal shapes, in the same order."
        )
        store.put(f"synk/disagreed/{jax.process_index()}", message)
        raise self.end(DisagreementError(message))

    def find_end(self) -> SynkError | None:
        try:
            error = failure_notice(store.get_all("synk/ended/") | store.get_all("synk/failed/"))
        except Exception:  # the store lives in process 0
            error = _peer_failed({"0": "it is gone"})
        return None if error is None else self.end(error)


# The other processes are those of the one JAX runtime that a process has.
PEERS = JaxPeers()


def publish_failure(why: str) -> None:
    """Tell the other processes why this one cannot go on."""
    with contextlib.suppress(Exception):  # the store may be gone
        store.put(f"synk/failed/{jax.process_index()}", why[:300])


def failure_notice(published: Mapping[str, str]) -> SynkError | None:
    """Return the error for what other processes have published of their end, by rank; None if there is nothing."""
    # The least text, since several processes may have found the difference: all then raise the same.
    if messages := store.get_all("synk/disagreed/"):
        return DisagreementError(min(messages.values()))
    whys = {rank: why for rank, why in published.items() if rank != str(jax.process_index())}
    return _peer_failed(whys) if whys else None


def _peer_failed(whys: Mapping[str, str]) -> PeerError:
    reasons = "; ".join(f"process {rank}: {why}" for rank, why in sorted(whys.items()))
    return PeerError(f"another process of the group has failed. {reasons}. {_START_AGAIN}")


def _sides(values: Iterable[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"process {', '.join(who)}: {value}" for value, who in ranks.items())


def _describe(values: Sequence[Any]) -> str:
    """Describe arrays by shapes, dtypes and a checksum, which finds each change within 32 bits in a row."""
    # CRC-32 finds each change within 32 bits in a row, and is fast. Nobody forges values, so no stronger digest is
    # needed.
    arrays, checksum = [np.asarray(value) for value in values], 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, checksum)
    return f"{describe_shapes(arrays)} [{checksum:08x}]"
