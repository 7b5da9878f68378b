"""Agreement: processes compare what they are about to do, before they do it, and learn why one of them is gone."""

import contextlib
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from time import sleep
from typing import Any

import jax
import numpy as np

from .._base.errors import CheckpointError, DisagreementError, PeerError, SynkError
from .._runtime.dispatch import retire_finished
from .._runtime.group import Peers
from .._runtime.layout import describe_shapes
from . import kv_store

PATIENCE = 1.0  # seconds between looks at what keeps another process
_BLOCK = 1 << 16  # bytes

# What JAX and its communication say when the other side is gone.
_GONE = re.compile(
    r"gloo|nccl|closed by peer|connection (reset|refused|closed)|heartbeat|coordination serv|unavailable", re.IGNORECASE
)
# What process 0 meets at the files, and all raise.
_OF_FILES = (OSError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_KNOWN: dict[str, type[Exception]] = {e.__name__: e for e in (*_OF_FILES, CheckpointError, TypeError, ValueError)}
_WAS_ENDED = "ended"  # by Ctrl-C or sys.exit, in place of the name of an error that all may catch
_SAME_CALLS = "Every process must make the same calls, of equal shapes, in the same order."
_START_AGAIN = "This group cannot go on: start all its processes again, from the last checkpoint."


class JaxPeers(Peers):
    """The processes of `jax.distributed`. There is one, since programs of all groups are counted in one order.

    What all processes must do together is an *exchange*: each publishes what it is about to do, after how many
    launches, and reads what the others have published. Exchanges are numbered, so a process that does something else
    is found by all.
    """

    def __init__(self) -> None:
        self.launches = (0, "nothing")  # how many programs all processes have launched, and what the last one is called
        self.ended: SynkError | None = None  # why the group has come to an end, as far as this process knows
        self._exchanges = 0
        self._told = 0  # the last exchange in which process 0 told the others something

    def before_launch(self, what: str) -> None:
        if self.ended is not None:
            raise self.ended
        if _checks_all():
            self._exchange(what, "")
        self.launches = self.launches[0] + 1, what

    def agree(self, what: str, text: str) -> None:
        digests = self._exchange(what, hashlib.sha256(text.encode()).hexdigest()[:8])
        if len(set(digests)) > 1:
            sides = _sides([f"{what} [{digest}]" for digest in digests])
            self._disagree(
                f"processes are about to run different programs. {sides}. Their programs differ in what they compute "
                f"(constants, operations). {_SAME_CALLS}"
            )

    def compare_values(self, what: str, arrays: Callable[[], Sequence[Any]], remedy: str, always: bool = False) -> None:
        if not (always or _checks_all()):
            return
        values = self._exchange(what, _described(arrays()))
        if len(set(values)) > 1:  # which all see, so all go on
            raise DisagreementError(f"processes differ in {what}. {_sides(values)}. {remedy}")

    def from_process_0(self, what: str, act: Callable[[], str]) -> str:
        self._exchange(what, "")
        before, self._told = self._told, self._exchanges
        number = self._told
        if jax.process_index() == 0:
            kv_store.delete(f"synk/told/{before}")  # which all have read, as they have come to this exchange
            try:
                result = act()
            except BaseException as error:
                kind = type(error).__name__ if isinstance(error, Exception) else _WAS_ENDED
                why = str(error) if isinstance(error, Exception) else f"{type(error).__name__}({error})"
                kv_store.put(f"synk/told/{number}", json.dumps([kind, why]))
                raise
            kv_store.put(f"synk/told/{number}", json.dumps([None, result]))
            return result
        while (told := kv_store.wait(f"synk/told/{number}", PATIENCE)) is None:
            self._raise_if_ended()
        kind, result = json.loads(told)
        if kind is None:
            return result
        if kind == _WAS_ENDED:
            raise self.end(_peer_failed({"0": f"{what}: {result}"}))
        raise _KNOWN[kind](result) if kind in _KNOWN else OSError(f"{what}: process 0 failed: {kind}: {result}")

    def after_failure(self, what: str, error: Exception) -> Exception:
        gone = self.translate_error(error)
        if gone is None:  # it is this process that has failed, and the others wait, or take its next sum for this one
            why = f"{what}: its program died ({str(error).strip().splitlines()[-1][:200]})"
            me = jax.process_index()
            publish_failure(why)
            gone = self.end(_peer_failed({str(me): why}))
        return gone

    def translate_error(self, error: BaseException) -> SynkError | None:
        if isinstance(error, PeerError | DisagreementError):
            return error
        if not kv_store.is_running() or not _GONE.search(str(error)):
            return None
        for _ in range(10):  # who fails publishes why just before it goes
            if (end := self._find_end()) is not None:
                return end
            sleep(0.05)
        first = re.sub(r"(Error dispatching computation: )+", "", str(error).strip().splitlines()[0])[:200]
        return self.end(PeerError(f"another process of the group is gone ({first}). {_START_AGAIN}"))

    def end(self, error: SynkError) -> SynkError:
        """Note that the group has come to its end."""
        self.ended = self.ended or error
        return self.ended

    def _exchange(self, what: str, value: str) -> list[str]:
        """What all processes publish, by rank; DisagreementError where they are not about to do the same."""
        retire_finished()  # of a program that died here the others must learn before they go on
        if self.ended is not None:
            raise self.ended
        me = jax.process_index()
        self._exchanges += 1
        kv_store.put(_key(self._exchanges, me), json.dumps([*self.launches, what, value]))
        published = [json.loads(self._published(rank, what)) for rank in range(jax.process_count())]
        kv_store.delete(_key(self._exchanges - 1, me))  # which all have read, as they have come to this one
        doing = [each[2] for each in published]
        if len(set(doing)) > 1:
            self._disagree(f"processes are about to run different programs. {_sides(doing)}. {_SAME_CALLS}")
        if len({each[0] for each in published}) > 1:
            sides = _sides([f"{doing} as its program {count + 1}, after {last}" for count, last, doing, _ in published])
            self._disagree(f"processes have run different programs. {sides}. {_SAME_CALLS}")
        return [each[3] for each in published]

    def _published(self, rank: int, what: str) -> str:
        """What another process is about to do, once it has published it."""
        key = _key(self._exchanges, rank)
        while True:
            if (value := kv_store.wait(key, PATIENCE)) is not None:
                return value
            self._raise_if_ended()
            at = kv_store.get(f"synk/at/{rank}")
            number, other = (at or "0 ").split(" ", 1)
            if int(number) > self.launches[0] and kv_store.get(key) is None:
                self._disagree(
                    f"processes run different programs. process {jax.process_index()}: {what}; process {rank} has gone "
                    f"on with: {other}. {_SAME_CALLS}"
                )

    def _disagree(self, message: str) -> None:
        kv_store.put("synk/disagreed", message)
        raise self.end(DisagreementError(message))

    def _raise_if_ended(self) -> None:
        if (error := self._find_end()) is not None:
            raise error

    def _find_end(self) -> SynkError | None:
        """Look for what other processes have published of their end; None where all go on."""
        try:
            error = failure_notice(kv_store.list("synk/ended/") | kv_store.list("synk/failed/"))
        except Exception:  # the store lives in process 0
            error = _peer_failed({"0": "it is gone"})
        return None if error is None else self.end(error)


PEERS = JaxPeers()


def publish_failure(why: str) -> None:
    """Let the others know why this process cannot go on."""
    with contextlib.suppress(Exception):  # nobody may be there to read it
        kv_store.put(f"synk/failed/{jax.process_index()}", why[:300])


def failure_notice(published: Mapping[str, str]) -> SynkError | None:
    """What other processes have published of their end (by rank) as an error; None where there is nothing."""
    if (message := kv_store.get("synk/disagreed")) is not None:
        return DisagreementError(message)
    whys = {rank: why for rank, why in published.items() if rank != str(jax.process_index())}
    return _peer_failed(whys) if whys else None


def _peer_failed(whys: Mapping[str, str]) -> PeerError:
    reasons = "; ".join(f"process {rank}: {why}" for rank, why in sorted(whys.items()))
    return PeerError(f"another process of the group has failed. {reasons}. {_START_AGAIN}")


def _sides(values: Sequence[str]) -> str:
    """Which processes have what."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"process {', '.join(who)}: {value}" for value, who in ranks.items())


def _key(number: int, rank: int) -> str:
    """Where a process publishes what it is about to do."""
    return f"synk/exchange/{number}/{rank}"


def _checks_all() -> bool:
    """Shall every call be compared, its values too?"""
    return os.environ.get("SYNK_CHECK", "0") not in ("", "0")


def _described(values: Sequence[Any]) -> str:
    """Shapes, dtypes and a digest of values: of the checksums of small blocks, which miss no change of 32 bits in a row
    and one in four billion others, and take a third of the time of a digest of all."""
    arrays, sums = [np.asarray(value) for value in values], hashlib.sha256()
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for at in range(0, len(data), _BLOCK):
            sums.update(zlib.crc32(data[at : at + _BLOCK]).to_bytes(4, "little"))
    return f"{describe_shapes(arrays)} [{sums.hexdigest()[:8]}]"
