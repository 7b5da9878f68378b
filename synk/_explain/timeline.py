"""Timeline: where the time of calls goes on each device, read from a profile of JAX."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from .._runtime.way import Device
from .report import Spent

# Marks of a profile: a call until it comes back, and from there until the devices are done.
CALL, END = "synk: call", "synk: end"
_LINES = "computing", "waiting for other devices", "sending rows", "Python before a launch", "the rest"


def profile_of(act: Callable[[], None]) -> Any:
    """Act, and return a `jax.profiler.ProfileData` of it."""
    options = jax.profiler.ProfileOptions()
    # To note each call of Python would slow down what is measured.
    options.python_tracer_level = 0
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            act()
        return jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))


def split(profile: Any, devices: Sequence[Device], names: Sequence[Collection[str]], sending: np.ndarray) -> np.ndarray:
    """Split the seconds of each call on each device: (devices, calls, 5 + 2 * collectives)."""
    # The columns: seconds of each of `_LINES`, then of each collective while nothing computes, and while something
    # does. `names` are the collectives, and the instructions that only run others, whose time is that of what they run.
    last = 1 + len(names[0])
    marks, work = _read(profile, dict.fromkeys(names[1], last) | {name: i for i, name in enumerate(names[0], 1)}, last)
    table = np.zeros((len(devices), len(sending), 3 + 2 * last))
    for i, ((start, back), (_, end)) in enumerate(zip(marks[::2], marks[1::2], strict=True)):
        spans = [[span for span in work.get(_place(d), ()) if span[1] < end and span[2] > start] for d in devices]
        # While another device computes, an idle device waits for it.
        others = [(last + 1, *span[1:]) for span in chain(*spans) if span[0] == 0]
        for j, own in enumerate(spans):
            # Python keeps a device waiting only before its last operation.
            launched = max([span[1] for span in own if span[0] <= last], default=back)
            host = (last + 3, start, min(back, launched)), (last + 4, start, end)
            table[j, i] = _shares(np.array([*own, *others, *host]), last, start, end) / 1e9
    # Devices wait for Python that picks rows as for other Python.
    moved = np.minimum(table[..., 3], sending)
    table[..., 2] += moved
    table[..., 3] -= moved
    return table


def _place(device: Device) -> Any:
    return device.id if device.platform == "cpu" else f"/device:{device.platform.upper()}:{device.local_hardware_id}"


def _read(profile: Any, ranks: Mapping[str, int], last: int) -> tuple[list[Any], dict[Any, list[Any]]]:
    """Return the marks of a profile in order, and the rank (see `_shares`), start and end of what each device did."""
    marks, work = list[tuple[float, float]](), dict[Any, list[Any]]()
    for plane in profile.planes:
        for event in chain.from_iterable(line.events for line in plane.lines):
            span, stats = (event.start_ns, event.start_ns + event.duration_ns), dict(event.stats)
            place = plane.name if plane.name.startswith("/device:") else stats.get("device_ordinal")
            if event.name in (CALL, END):
                marks.append(span)
            elif "hlo_op" in stats:
                work.setdefault(place, []).append((ranks.get(stats["hlo_op"], 0), *span))
            elif event.name.startswith("MemcpyH2D"):
                work.setdefault(place, []).append((last + 2, *span))
    return sorted(marks), work


def _shares(spans: np.ndarray, last: int, start: float, end: float) -> np.ndarray:
    """Split the time between `start` and `end`; at each moment the span of the least rank counts."""
    # Ranks are 0 for computing, one for each collective, `last` for instructions that only run others, and then the
    # lines after computing: others compute, copies from the host, Python, and all the time.
    ranks, (starts, ends) = spans[:, 0].astype(int), spans[:, 1:].clip(start, end).T
    edges = np.unique((starts, ends))
    # +1 where a span begins and -1 where it ends: the running sum counts the spans of a rank that are active between
    # edges.
    begun = np.zeros((last + 5, len(edges)), int)
    np.add.at(begun, (ranks, np.searchsorted(edges, starts)), 1)
    np.add.at(begun, (ranks, np.searchsorted(edges, ends)), -1)
    is_active, lengths = begun.cumsum(1)[:, :-1] > 0, np.diff(edges)
    # argmax gives the first rank that is active. The last one, all the time, always is.
    seconds = np.bincount(is_active.argmax(0), lengths, last + 5)
    hidden = (is_active[1:last] & is_active[0]) @ lengths
    return np.concatenate([[seconds[0] + seconds[last]], seconds[last + 1 :], seconds[1:last], hidden])


def spent(table: np.ndarray, mine: Sequence[int], travels: Sequence[str]) -> tuple[tuple[Spent, ...], np.ndarray]:
    """Describe where the time of a call went, in this process, and how long each device has waited for others."""
    # A collective ends on all devices together. The device that comes last spends the least time in it, and the others
    # have waited for as long as they spend more.
    exposed, hidden = np.split(table[:, 5:], 2, axis=1)
    least, behind, names = exposed.min(0), hidden[mine].mean(0), np.array(travels)
    waited = table[:, 1] + (exposed - least).sum(1)
    lines = [(_LINES[0], table[mine, 0].mean()), (_LINES[1], waited[mine].mean())]
    lines += zip(_LINES[2:], table[mine, 2:5].mean(0), strict=True)
    lines[1:1] = [(kind, *(part[names == kind].sum() for part in (least, behind))) for kind in dict.fromkeys(travels)]
    return tuple([Spent(on, *map(float, seconds)) for on, *seconds in lines]), waited
