"""Agreement: processes compare what they are about to run, before it runs, and learn why one of them is gone."""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from time import sleep

import jax

from .._base.errors import DisagreementError, PeerError, SynkError
from .._runtime.group import Peers
from . import kv_store

PATIENCE = 1.0  # seconds between looks at what keeps another process

# What JAX and its communication say when the other side is gone.
_GONE = re.compile(
    r"gloo|nccl|closed by peer|connection (reset|refused|closed)|heartbeat|coordination serv|unavailable", re.IGNORECASE
)
_SAME_CALLS = "Every process must make the same calls, of equal shapes, in the same order."
_START_AGAIN = "This group cannot go on: start all its processes again, from the last checkpoint."


class JaxPeers(Peers):
    """The processes of `jax.distributed`. There is one, since programs of all groups are counted in one order."""

    def __init__(self) -> None:
        self.launches = (0, "")  # how many programs all processes have launched, and what messages call the last one
        self.ended: SynkError | None = None  # why the group has come to an end, as far as this process knows
        self._agreements = 0  # since the last launch
        self._acts = 0  # of process 0, for all

    def before_launch(self, what: str) -> None:
        if self.ended is not None:
            raise self.ended
        if os.environ.get("SYNK_CHECK", "0") not in ("", "0"):
            self.agree(what, what)
        self.launches, self._agreements = (self.launches[0] + 1, what), 0

    def agree(self, what: str, text: str) -> None:
        me, number = jax.process_index(), self.launches[0] + 1
        self._agreements += 1
        key = f"synk/agree/{number}.{self._agreements}"
        # Numbers this long are addresses in one process's memory.
        digest = hashlib.sha256(re.sub(r"\d{9,}", "#", text).encode()).hexdigest()[:16]
        kv_store.put(f"{key}/{me}", f"{digest} {what}")
        published = [self._published(key, rank, what) for rank in range(jax.process_count())]
        if len(set(published)) > 1:
            self._disagree(_differences(published))
        if self._agreements == 1 and number > 2:  # which all have read, as they have come to this number
            kv_store.delete(f"synk/agree/{number - 2}.1/{me}")

    def run_on_process_0(self, act: Callable[[], str], what: str) -> str:
        self._acts += 1
        key = f"synk/act/{self._acts}"
        if jax.process_index() == 0:
            try:
                result = act()
            except Exception as error:
                kv_store.put(key, f"!{type(error).__name__}: {error}")
                raise
            kv_store.put(key, f"={result}")
            return result
        while (published := kv_store.wait(key, PATIENCE)) is None:
            self._raise_if_ended()
        if published[0] == "!":
            kind, message = published[1:].split(": ", 1)
            if kind == "FileNotFoundError":
                raise FileNotFoundError(message)
            raise OSError(f"{what}: process 0 failed: {published[1:]}")
        return published[1:]

    def explain(self, error: BaseException) -> SynkError | None:
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
        """Note that the group has come to its end, and let process 0 know that this process knows."""
        if self.ended is None:
            self.ended = error
            with contextlib.suppress(Exception):  # the store may be gone as well
                kv_store.put(f"synk/notified/{jax.process_index()}", "")
        return self.ended

    def _published(self, key: str, rank: int, what: str) -> str:
        """What another process is about to run, once it has published it."""
        while True:
            if (value := kv_store.wait(f"{key}/{rank}", PATIENCE)) is not None:
                return value
            self._raise_if_ended()
            at = kv_store.get(f"synk/at/{rank}")
            number, other = (at or "0 ").split(" ", 1)
            if int(number) > self.launches[0] and kv_store.get(f"{key}/{rank}") is None:
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


def failure_notice(published: Mapping[str, str]) -> SynkError | None:
    """What other processes have published of their end (by rank) as an error; None where there is nothing."""
    if (message := kv_store.get("synk/disagreed")) is not None:
        return DisagreementError(message)
    whys = {rank: why for rank, why in published.items() if rank != str(jax.process_index())}
    return _peer_failed(whys) if whys else None


def _peer_failed(whys: Mapping[str, str]) -> PeerError:
    reasons = "; ".join(f"process {rank}: {why}" for rank, why in sorted(whys.items()))
    return PeerError(f"another process of the group has failed. {reasons}. {_START_AGAIN}")


def _differences(published: Sequence[str]) -> str:
    """Who is about to run what; each has published a digest and a name."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for rank, value in enumerate(published):
        digest, _, name = value.partition(" ")
        ranks.setdefault((digest, name), []).append(str(rank))
    have_names = len({name for _, name in ranks}) > 1
    sides = "; ".join(
        f"process {', '.join(who)}: {name}{'' if have_names else f' [{digest[:8]}]'}"
        for (digest, name), who in ranks.items()
    )
    more = "" if have_names else " Their programs differ in what they compute (constants, operations)."
    return f"processes are about to run different programs. {sides}.{more} {_SAME_CALLS}"
