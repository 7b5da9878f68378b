"""Report: what is known of a call, as data, text, JSON and pictures."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .._base.units import UNKNOWN, number_text, size_text
from .._call.auto_slices import ProgramMemory
from .hlo import Collective
from .picture import draw_png, draw_svg, page, scrolled


@dataclass(frozen=True)
class ProgramReport:
    """A program of a call, one of `Explanation.programs`; bytes are of one device. None: the backend does not tell.

    Attributes:
      role: what it does: "the call", or of slices "begin", "a slice" and "combine"; before these "exchange of x", which
        brings the rows of x that a batch picks from where they lie.
      launches: how often a call runs it.
      argument_bytes, temporary_bytes, result_bytes: what it takes, needs meanwhile, and gives.
      aliased_bytes: of results that take the place of arguments.
      resident_bytes: of shared variables and data of the call that it does not take.
      compile_seconds: how long it took to compile.
      collectives: what travels, in the order of the schedule.
      heavy: where in the schedule convolutions and matrix products run, from 0 to 1.

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
    compile_seconds: float
    collectives: tuple[Collective, ...]
    heavy: tuple[float, ...]

    @property
    def total_bytes(self) -> int | None:
        """What a device needs while it runs."""
        sizes = (self.argument_bytes, self.temporary_bytes, self.result_bytes, self.aliased_bytes)
        return ProgramMemory(*sizes, self.resident_bytes).total


@dataclass(frozen=True)
class InputReport:
    """How one argument comes, one of `Explanation.inputs`.

    Attributes:
      name: the argument's.
      how: in words.
      rows: how many it gives; None: it is broadcast.
      sent_bytes: from the host, by one call, to all replicas.

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
      name: the variable's.
      bytes: of one replica.
      is_written: whether the call updates it.
      is_equal: whether the call has replicas hold one value.

    Example:
      >>> import numpy as np, synk
      >>> w = synk.shared(np.float32(2), name="w")
      >>> used, = synk.function(lambda x: w.value * x).explain(np.ones(8, np.float32)).variables
      >>> used.name, used.bytes, used.is_written
      ('w', 4, False)
    """

    name: str
    bytes: int
    is_written: bool
    is_equal: bool


@dataclass(frozen=True)
class Measured:
    """What calls took, `Explanation.measured` of `f.explain(..., run=3)`; medians.

    Attributes:
      calls: how many were measured.
      seconds: from the call to the end on the devices.
      host_seconds: until the call came back.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> took = synk.function(jnp.sum).explain(np.ones(8, np.float32), run=3).measured
      >>> took.calls, took.host_seconds <= took.seconds
      (3, True)
    """

    calls: int
    seconds: float
    host_seconds: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a call would do; made by `f.explain`. Print it, or read its fields; what a backend does not tell is None
    there, and "unknown" in the text.

    Attributes:
      function: the function's name.
      group: the group, in words.
      platform: its platform.
      lengths: rows of each replica; () where there are none.
      num_slices: in how many parts each runs them.
      programs: what is launched, one `ProgramReport` a program.
      inputs, variables: arguments and shared variables.
      flops: multiplications and additions in matrix products and convolutions on the replica with the most rows; of
        branches those of the shortest, of a loop without a fixed number of rounds those of one.
      why: what made compiling necessary, one line each.
      was_compiled: whether that had been done before.
      memory_limit: bytes of a device that programs may use; None: unknown.
      rows_that_fit: where it does not fit, with about how many rows in all it would; None: it fits, or unknown.
      lower_bound_seconds: no device of this kind can be faster, unless programs read or write only a part of a variable
        or broadcast argument (a table whose rows are gathered or updated), which counts whole; None: unknown.
      measured: times of real calls, if asked for.

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
    programs: tuple[ProgramReport, ...]
    inputs: tuple[InputReport, ...]
    variables: tuple[VariableReport, ...]
    flops: int
    why: list[str]
    was_compiled: bool
    memory_limit: int | None
    lower_bound_seconds: float | None
    rows_that_fit: int | None = None
    measured: Measured | None = None

    @property
    def memory_bytes(self) -> int | None:
        """What a device needs for the largest of the programs."""
        sizes = [program.total_bytes for program in self.programs]
        return None if None in sizes else max(size or 0 for size in sizes)

    @property
    def fits(self) -> bool | None:
        """Does that fit in a device's memory? None: unknown."""
        if self.memory_bytes is None or self.memory_limit is None:
            return None
        return self.memory_bytes <= self.memory_limit

    @property
    def memory_text(self) -> str:
        """In words, what a device needs, and whether that fits."""
        if self.fits is None:
            return f"{size_text(self.memory_bytes)}; what a device has is unknown"
        fits = "fits in" if self.fits else "DOES NOT FIT in"
        return f"{size_text(self.memory_bytes)}, {fits} {size_text(self.memory_limit)}"

    @property
    def sent_bytes(self) -> int:
        """What one call sends from the host, to all replicas."""
        return sum(each.sent_bytes for each in self.inputs)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return scrolled(draw_svg(self))

    def json(self) -> str:
        """All of it as JSON text; what is unknown is null."""
        found = asdict(self)
        found |= {name: getattr(self, name) for name in ("memory_bytes", "fits", "sent_bytes")}
        return json.dumps(found, indent=1, default=int)  # of NumPy's

    def html(self, path: str | Path) -> None:
        """Write one HTML file with a picture, which needs no network."""
        Path(path).write_text(page(self, str(self)), encoding="utf-8")

    def png(self, path: str | Path) -> None:
        """Write the picture as PNG.

        Raises:
          ImportError: matplotlib is not installed.
        """
        draw_png(self, path)


def _lines(e: Explanation) -> Iterator[str]:
    sizes = ", ".join(map(str, e.lengths[:8])) + (", ..." if len(e.lengths) > 8 else "")
    rows = f"{sum(e.lengths)} rows ({sizes})" if e.lengths else "no rows"
    slices = f", in {e.num_slices} slices" if e.num_slices > 1 else ""
    yield f"{e.function}: {rows} on {e.group}{slices}"
    state = "compiled before" if e.was_compiled else "compiled now"
    yield f"  why compiled ({state}): {'; '.join(e.why)}"
    for each in e.inputs:
        yield f"  {each.name}: {each.how}" + (f", {size_text(each.sent_bytes)} sent" if each.sent_bytes else "")
    for each in e.variables:
        written = ", written" if each.is_written else ""
        yield f"  {each.name}: shared, {size_text(each.bytes)} a replica{written}" + (
            "" if each.is_equal else ", a value each"
        )
    for program in e.programs:
        yield from _program_lines(program)
    yield f"  work: {number_text(e.flops)}flop in matrix products and convolutions on the replica with the most rows"
    would = "" if e.rows_that_fit is None else f"; {e.rows_that_fit} rows would"
    yield f"  memory of a device: {e.memory_text}{would}"
    bound = UNKNOWN if e.lower_bound_seconds is None else f"{e.lower_bound_seconds * 1e3:.3g} ms"
    yield f"  lower bound of the time, by flops and bytes against the device's figures: {bound}"
    if e.measured is not None:
        took = f"{e.measured.seconds * 1e3:.3g} ms, of which {e.measured.host_seconds * 1e3:.3g} before it came back"
        yield f"  measured, median of {e.measured.calls} calls: {took}"


def _program_lines(program: ProgramReport) -> Iterator[str]:
    times = f" x {program.launches}" if program.launches > 1 else ""
    beside = f", beside {size_text(program.resident_bytes)} that stay there" if program.resident_bytes else ""
    yield (
        f"  program of {program.role}{times}: arguments {size_text(program.argument_bytes)}, temporary "
        f"{size_text(program.temporary_bytes)}, results {size_text(program.result_bytes)} "
        f"({size_text(program.aliased_bytes)} in place){beside}, compiled in {program.compile_seconds:.2f} s"
    )
    if not program.collectives:
        yield "    no collective"
    for kind in dict.fromkeys(each.kind for each in program.collectives):
        same = [each for each in program.collectives if each.kind == kind]
        total = sum(each.operand_bytes for each in same)
        inner = sum(each.in_loop for each in same)
        loop = f" ({inner} in a loop or branch, counted once)" if inner else ""
        yield f"    {len(same)} {kind}{loop}, {size_text(total)} given by each replica{_behind_text(same)}"


def _behind_text(same: list[Collective]) -> str:
    if any(each.behind is None for each in same):
        return "; behind computation: unknown"
    behind = sum(each.operand_bytes for each in same if each.behind)
    last = sum(each.operand_bytes for each in same if each.after_last and not each.behind)
    return f"; {size_text(behind)} behind computation, {size_text(last)} after the last of it"
