"""Report: records that describe a call, as data, text, JSON and a page."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .._base.units import counted, seconds_text, size_text
from .hlo import Collective
from .page import Bar, chart, fragment, page, text


@dataclass(frozen=True)
class ProgramReport:
    """A program of a call, one of `Explanation.programs`. Bytes are of one device; None: the backend does not tell.

    Attributes:
      role: "the call" for a call in one launch; "begin", "a slice" and "combine" for slices; "exchange of x" for the
        program that brings the rows of x that a batch picks.
      launches: how often a call runs the program.
      argument_bytes, temporary_bytes, result_bytes: arguments, temporary memory and results.
      aliased_bytes: results that take the place of arguments.
      resident_bytes: shared variables and data of the call that the program does not take.
      total_bytes: the memory that a device needs while the program runs.
      compile_seconds: how long compiling took, or reading a program that was compiled before.
      is_from_cache: whether it was compiled before, and read from the folder of `synk.init(cache=...)`.
      collective_bytes: bytes that a replica gives to collectives, in all rounds of loops. Of a loop that may run any
        number of rounds one counts.
      behind_bytes: the part of `collective_bytes` that travels while a convolution or matrix product runs.
      collectives: one `Collective` each, in the order of the schedule.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> program, = synk.function(jnp.sum).explain(np.ones(8, np.float32)).programs
      >>> program.role, program.launches
      ('the call', 1)
    """

    role: str
    launches: int
    argument_bytes: int | None
    temporary_bytes: int | None
    result_bytes: int | None
    aliased_bytes: int | None
    resident_bytes: int
    total_bytes: int | None
    compile_seconds: float
    is_from_cache: bool
    collective_bytes: int
    behind_bytes: int | None
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class InputReport:
    """An argument of a call, one of `Explanation.inputs`.

    Attributes:
      name: the argument's name.
      how: how the argument reaches the replicas, in words.
      rows: the number of rows; None: it is broadcast.
      sent_bytes: bytes that one call sends from the host, to all replicas.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> x, = synk.function(jnp.sum).explain(np.ones(8, np.float32)).inputs
      >>> x.how, x.rows, x.sent_bytes
      ('rows from the host', 8, 32)
    """

    name: str
    how: str
    rows: int | None
    sent_bytes: int


@dataclass(frozen=True)
class VariableReport:
    """A shared variable of a call, one of `Explanation.variables`.

    Attributes:
      name: the variable's name.
      bytes: bytes of one replica.
      is_written: whether the call updates it.
      is_equal: whether all replicas hold one value.

    Example:
      >>> import numpy as np, synk
      >>> w = synk.shared(np.float32(2), name="w")
      >>> used, = synk.function(lambda x: (w.value * x).sum()).explain(np.ones(8, np.float32)).variables
      >>> used.name, used.bytes, used.is_written
      ('w', 4, False)
    """

    name: str
    bytes: int
    is_written: bool
    is_equal: bool


@dataclass(frozen=True)
class Spent:
    """A share of a call's time, of `Measured.spent`. Seconds are those of a device, the mean of those in this process.

    Attributes:
      on: what the time went to: "computing"; a collective such as "all-reduce"; "waiting for other devices"; "sending
        rows", which is picking them and starting to send them; "Python before a launch"; "the rest", which is nearly
        all where JAX's profile names no operations of the devices.
      seconds: the time; of a collective that part in which nothing computes.
      hidden_seconds: the part of a collective that runs while something computes, and costs nothing; else None.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> took = synk.function(jnp.sum).explain(np.ones(8, np.float32), run=3).measured
      >>> [spent.on for spent in took.spent][-2:]
      ['Python before a launch', 'the rest']
    """

    on: str
    seconds: float
    hidden_seconds: float | None = None


@dataclass(frozen=True, repr=False)
class Measured:
    """A real call, measured: `Explanation.measured` of `f.explain(..., run=10)`. Print it, or read its fields.

    Attributes:
      calls: how many calls were measured. The other fields tell of the one whose time is the median.
      seconds: from the call to the end on the devices.
      host_seconds: until the call came back.
      spent: where the time went, in this process; the seconds add up to `seconds`.
      slowest: the device, by its rank in the group, for which the others wait, in words; None with one device.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> took = synk.function(jnp.sum).explain(np.ones(8, np.float32), run=3).measured
      >>> took.calls, took.host_seconds <= took.seconds
      (3, True)
    """

    calls: int
    seconds: float
    host_seconds: float
    spent: tuple[Spent, ...]
    slowest: str | None

    def __repr__(self) -> str:
        return text(asdict(self))


@dataclass(frozen=True, repr=False)
class Explanation:
    """A description of a call, made by `f.explain`. Print it, or read its fields. A field is None, and "unknown" in
    print, where a backend does not tell.

    Attributes:
      function: the function's name.
      group: the group, in words.
      platform: the group's platform.
      lengths: rows of each replica; () for a call without rows.
      num_slices: the number of slices in which each replica runs its rows.
      way: whether replicas run their rows, or one replica of all devices runs all rows.
      whole: the operations that XLA does not divide there, so that each device runs them over all rows.
      per_launch: how many calls a program can run in loops with `per_launch`, and why one.
      was_compiled: whether the programs were compiled before.
      why: what made compiling necessary: the parts of the call that differ from the most similar call before.
      flops: multiplications and additions in matrix products and convolutions, on the replica with the most rows. A
        `cond` counts its shortest branch; a loop without a fixed number of rounds counts one.
      sent_bytes: bytes that one call sends from the host, to all replicas.
      memory_bytes: the memory that a device needs for the largest program.
      memory_limit: the memory that programs may use on a device.
      fits: whether `memory_bytes` is within `memory_limit`.
      lower_bound_seconds: a time below which no call on such devices gets: the flops at the device's peak, or the rows,
        broadcast arguments and variables once through its memory. A call that touches a few rows of a large table can
        be faster, since the table counts whole.
      programs: one `ProgramReport` for each program that is launched.
      inputs, variables: arguments and shared variables.
      replica_imbalance: by `cost=`, the most work of a replica over the mean of all; None without costs.
      slice_imbalance: likewise the largest cost of a slice, for which its rows wait, over the mean of its rows.
      measured: a real call's time and where it goes, if asked for.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum, name="total")
      >>> e = f.explain(np.ones((8, 2), np.float32))
      >>> e.function, sum(e.lengths), e.why, len(e.programs)
      ('total', 8, ['the first call'], 1)
    """

    function: str
    group: str
    platform: str
    lengths: tuple[int, ...]
    num_slices: int
    way: str
    whole: list[str]
    per_launch: str
    was_compiled: bool
    why: list[str]
    flops: int
    sent_bytes: int
    memory_bytes: int | None
    memory_limit: int | None
    fits: bool | None
    lower_bound_seconds: float | None
    programs: tuple[ProgramReport, ...]
    inputs: tuple[InputReport, ...]
    variables: tuple[VariableReport, ...]
    replica_imbalance: float | None = None
    slice_imbalance: float | None = None
    measured: Measured | None = None

    def __repr__(self) -> str:
        return text(asdict(self))

    def _repr_html_(self) -> str:
        """Return the drawing and the tables, which a notebook shows for a cell."""
        return fragment(asdict(self), self._drawing())

    def json(self) -> str:
        """Return all fields as JSON text; unknown values are null."""
        # `default` converts NumPy's integers.
        return json.dumps(asdict(self), indent=1, default=int)

    def html(self, path: str | Path) -> None:
        """Write one HTML page with a drawing. The page loads nothing from the network."""
        Path(path).write_text(page(f"A call of {self.function}", asdict(self), self._drawing()), encoding="utf-8")

    def _drawing(self) -> str:
        memory: list[Bar] = [
            (program.role, list(_memory_parts(program)), size_text(program.total_bytes))
            for program in self.programs
            if program.total_bytes is not None
        ]
        if self.memory_limit is not None:
            limit = [("memory that programs may use", self.memory_limit)]
            memory.append(("a device", limit, size_text(self.memory_limit)))
        counts = [sum(collective.times or 1 for collective in program.collectives) for program in self.programs]
        travels: list[Bar] = [
            (program.role, list(_travel_parts(program)), counted(count, "collective"))
            for program, count in zip(self.programs, counts, strict=True)
        ]
        sections = [("memory of a device", memory), ("bytes in collectives", travels)]
        if self.measured is not None:
            parts = [(spent.on, spent.seconds) for spent in self.measured.spent]
            sections.append(("where the time goes", [("a call", parts, seconds_text(self.measured.seconds))]))
        return chart(f"a call of {self.function}", sections)


def _memory_parts(program: ProgramReport) -> Iterator[tuple[str, int]]:
    yield "arguments", program.argument_bytes or 0
    yield "temporary", program.temporary_bytes or 0
    yield "results in memory of their own", (program.result_bytes or 0) - (program.aliased_bytes or 0)
    yield "variables and data beside it", program.resident_bytes


def _travel_parts(program: ProgramReport) -> Iterator[tuple[str, int]]:
    if program.behind_bytes is None:
        yield "travels; whether while computing, is unknown", program.collective_bytes
        return
    yield "travels while computing", program.behind_bytes
    yield "travels while nothing computes", program.collective_bytes - program.behind_bytes
