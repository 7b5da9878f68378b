"""Agree: processes compare what they are about to run, before it runs, and learn why one of them is gone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Callable, Mapping
from time import monotonic, sleep

import jax

from . import _store
from ._errors import DisagreementError, PeerError, SynkError

PATIENCE = 1.0  # seconds between looks at what keeps another process

# What JAX and its communication say when the other side is gone.
_GONE = re.compile(
    r"gloo|nccl|closed by peer|connection (reset|refused|closed)|heartbeat|coordination serv|unavailable", re.IGNORECASE
)

_number = 0  # of the program launched last, the same in all processes
_acts = 0  # that process 0 has done for all
_asked = 0  # agreements before the next one
_last = ""
_ended: SynkError | None = None


def launching(what: str) -> None:
    """Count one more program of a group that spans processes; `SYNK_CHECK=1` compares each."""
    global _number, _asked, _last
    if _ended is not None:
        raise _ended
    if os.environ.get("SYNK_CHECK", "0") not in ("", "0"):
        compare(what, what)
    _number, _asked, _last = _number + 1, 0, what


def compare(what: str, text: str) -> None:
    """Wait until every process is about to run this; DisagreementError where one is not.

    Args:
      what: what messages say of it.
      text: all that must be equal.
    """
    global _asked
    me, count = jax.process_index(), jax.process_count()
    _asked += 1
    key = f"synk/agree/{_number + 1}.{_asked}"
    # Numbers this long are addresses in one process's memory.
    digest = hashlib.sha256(re.sub(r"\d{9,}", "#", text).encode()).hexdigest()[:16]
    _store.put(f"{key}/{me}", f"{digest} {what}")
    said = {other: _said(key, other, what) for other in range(count)}
    if len(set(said.values())) > 1:
        by_text: dict[str, list[int]] = {}
        for other, value in said.items():
            by_text.setdefault(value, []).append(other)
        is_told = len({value.split(" ", 1)[1] for value in by_text}) > 1
        sides = "; ".join(
            f"process {', '.join(map(str, who))}: {value.split(' ', 1)[1]}{'' if is_told else f' [{value[:8]}]'}"
            for value, who in by_text.items()
        )
        more = "" if is_told else " Their programs differ in what they compute (constants, operations)."
        _disagree(
            f"processes are about to run different programs. {sides}.{more} "
            f"Every process must make the same calls, of equal shapes, in the same order."
        )
    if _asked == 1 and _number > 1:
        _store.drop(f"synk/agree/{_number - 1}.1/{me}")


def from_first(act: Callable[[], str], what: str) -> str:
    """What process 0 alone does, and every process learns of: its result, or its error."""
    global _acts
    _acts += 1
    key = f"synk/act/{_acts}"
    if jax.process_index() == 0:
        try:
            result = act()
        except Exception as error:
            _store.put(key, f"!{type(error).__name__}: {error}")
            raise
        _store.put(key, f"={result}")
        return result
    said = None
    while said is None:
        said = _store.wait(key, PATIENCE)
        if said is None:
            _raise_if_gone()
    if said[0] == "!":
        kind, message = said[1:].split(": ", 1)
        if kind == "FileNotFoundError":
            raise FileNotFoundError(message)
        raise OSError(f"{what}: process 0 failed: {said[1:]}")
    return said[1:]


def _said(key: str, other: int, what: str) -> str:
    """What another process is about to run, once it says so."""
    while True:
        value = _store.wait(f"{key}/{other}", PATIENCE)
        if value is not None:
            return value
        _raise_if_gone()
        at = _store.look(f"synk/at/{other}")
        if at is not None and int(at.split(" ", 1)[0]) > _number and _store.look(f"{key}/{other}") is None:
            _disagree(
                f"processes run different programs. process {jax.process_index()}: {what}; process {other} has gone "
                f"on with: {at.split(' ', 1)[1]}. Every process must make the same calls, of equal shapes, in the same "
                f"order."
            )


def _disagree(message: str) -> None:
    _store.put("synk/disagreed", message)
    raise _end(DisagreementError(message))


def _end(error: SynkError) -> SynkError:
    """Note that the group has come to its end, and that this process knows."""
    global _ended
    if _ended is None:
        _ended = error
        with contextlib.suppress(Exception):  # the store may be gone as well
            _store.put(f"synk/told/{jax.process_index()}", "")
    return _ended


def await_told(seconds: float) -> None:
    """Process 0 takes the store, and with it all others, along: let them learn first why."""
    until = monotonic() + seconds
    with contextlib.suppress(Exception):
        while jax.process_index() == 0 and monotonic() < until:
            if len({*_store.under("synk/told/"), *_store.under("synk/failed/")} - {"0"}) == jax.process_count() - 1:
                return
            sleep(0.05)


def await_ends(seconds: float) -> str | None:
    """Wait until all processes have ended their programs; if one goes on with what needs this one, or has failed, what
    it says."""
    until = monotonic() + seconds
    with contextlib.suppress(Exception):  # the store may be gone
        _store.put(f"synk/ended/{jax.process_index()}", "it has ended its program")
        while monotonic() < until and len(_store.under("synk/ended/")) < jax.process_count():
            for other, at in _store.under("synk/at/").items():
                number, what = at.split(" ", 1)
                if int(number) > _number:
                    return f"process {other} goes on with {what}"
            for other, why in _store.under("synk/failed/").items():
                return f"process {other} has failed: {why}"
            sleep(0.02)
    return None


def _raise_if_gone() -> None:
    error = _why_gone()
    if error is not None:
        raise error


def _why_gone() -> SynkError | None:
    """What other processes have said of their end."""
    me = str(jax.process_index())
    try:
        message = _store.look("synk/disagreed")
        if message is not None:
            return _end(DisagreementError(message))
        gone = _store.under("synk/ended/") | _store.under("synk/failed/")
        failed = {who: why for who, why in gone.items() if who != me}
    except Exception:  # the store lives in process 0
        failed = {"0": "it is gone"}
    return _end(_failed(failed)) if failed else None


def _failed(whys: Mapping[str, str]) -> PeerError:
    told = "; ".join(f"process {who}: {why}" for who, why in sorted(whys.items()))
    return PeerError(f"another process of the group has failed. {told}. {_ADVICE}")


_ADVICE = "This group cannot go on: start all its processes again, from the last checkpoint."


def as_peer_error(error: BaseException) -> SynkError | None:
    """An error of the communication between processes as synk's; None where it is another, or there is one process."""
    if isinstance(error, PeerError | DisagreementError):
        return error
    if not _store.is_running() or jax.process_count() == 1 or not _GONE.search(str(error)):
        return None
    for _ in range(10):  # who fails says why just before it goes
        told = _why_gone()
        if told is not None:
            return told
        sleep(0.05)
    first = re.sub(r"(Error dispatching computation: )+", "", str(error).strip().splitlines()[0])[:200]
    return _end(PeerError(f"another process of the group is gone ({first}). {_ADVICE}"))


def ended() -> SynkError | None:
    """Why the group has come to an end, as far as this process knows; None while it goes on."""
    return _ended


def say_failed(why: str) -> None:
    """Tell the others why this process goes."""
    with contextlib.suppress(Exception):  # nobody may be there to be told
        _store.put(f"synk/failed/{jax.process_index()}", why[:300])


def attend(stop: threading.Event, leave: Callable[[SynkError], None], every: float = 0.5) -> Callable[[], None]:
    """What a thread does: let the others see how far this process is, and leave when process 0 does.

    A program under way with the others does not come back to say so.
    """

    def run() -> None:
        said = -1
        while not stop.wait(every):
            try:
                if _number != said:
                    said = _number
                    _store.put(f"synk/at/{jax.process_index()}", f"{said} {_last}")
                error = _why_first_goes()
            except Exception:  # the store is gone: the runtime ends this process
                return
            if error is not None and not stop.wait(every / 2) and _ended is None:
                leave(_end(error))

    return run


def _why_first_goes() -> SynkError | None:
    if jax.process_index() == 0:
        return None
    message, why = _store.look("synk/disagreed"), _store.look("synk/failed/0")
    if message is not None:
        return DisagreementError(message)
    return None if why is None else _failed({"0": why})
