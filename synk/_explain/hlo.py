"""HLO: the collectives of a compiled program, and what runs while they travel, read from the program's text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

# Operations as https://openxla.org/xla/operation_semantics names them.
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Instructions that take long over many rows.
_LONG = ("dot", "convolution", "sort", "cholesky", "triangular-solve", "fft", "while", "custom-call")
# Instructions that take no time.
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d\w*)?)\[([\d,<= ]*)\]")
_CALLED = re.compile(r"(?:calls|condition|body|to_apply|\w+_computations?)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Instructions that run what they call in its own order. A fusion is one kernel, and what is asynchronous has no place.
_IN_ORDER = ("while", "conditional", "call")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARIES = re.compile(r"cublas|cudnn|gemm|matmul|conv|dot|fmha|attention", re.IGNORECASE)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[str]:
        return [name[1:] for names in _CALLED.findall(self.rest) for name in names.split(", ")]


@dataclass(frozen=True)
class Collective:
    """A collective of a program, of `ProgramReport.collectives`. None: nobody knows.

    Attributes:
      kind: XLA's name, such as "all-reduce".
      ranks: the first set of replicas that communicate; None: all replicas.
      operand_bytes, result_bytes: bytes that a replica gives, and gets.
      behind: whether a convolution or matrix product runs meanwhile.
      after_last: whether no convolution or matrix product is left to run, nor runs in a later round of a loop.
      times: how often the program runs it: once outside loops. A branch counts as if it always ran.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> with synk.init(2):
      ...     e = synk.function(jnp.sum).explain(np.ones(8, np.float32))
      >>> [(c.kind, c.operand_bytes, c.times) for program in e.programs for c in program.collectives]
      [('all-reduce', 4, 1)]
    """

    kind: str
    ranks: tuple[int, ...] | None
    operand_bytes: int
    result_bytes: int
    behind: bool | None
    after_last: bool | None
    times: int | None


def read_collectives(text: str, is_in_order: bool) -> tuple[Collective, ...]:
    """Read the collectives of a compiled program."""
    program = _Program(text)
    # The order of the text is the order in time on accelerators, if XLA has scheduled the program, and never on the
    # threads of a CPU.
    knows = is_in_order and "is_scheduled=true" in text[: text.find("\n") + 1]
    return tuple(program.collectives(program.entry, knows))


def not_computing(text: str) -> dict[str, str]:
    """Return the instructions of a program that do not compute: collectives by their kind, and "" for those that only
    run others."""
    program = _Program(text)
    kinds: dict[str, str] = {}
    for name, step in program.steps.items():
        ended = step.opcode.removesuffix("-done")
        kind = "" if ended in _IN_ORDER else ended if ended in _COLLECTIVES else program._kind(step)
        kinds |= {} if kind is None else {name: kind}
    return kinds


def whole_operations(text: str, rows: int, devices: int) -> dict[str, int | None]:
    """Find operations that run over all rows of a call on every device, in a program whose rows XLA divides.

    Returns:
      The flops of matrix products by the operation's name in JAX; None for others.
    """
    program, most = _Program(text), -(-rows // devices)
    whole: dict[str, int | None] = {}
    for step in [step for steps in program.computations.values() for step in steps if step.opcode in _LONG]:
        operands = [_dims(program.shapes.get(operand, "")) for operand in step.operands]
        dims = {*chain(_dims(step.shape), *operands)}
        # XLA cuts rows to one n-th, rounded up. An operation that has both lengths is divided.
        if rows not in dims or most in dims:
            continue
        named = re.search(r'op_name="([^"]*)"', step.rest)
        name = step.opcode if named is None else named.group(1).split("/")[-1]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", step.rest)
        flops = None
        if step.opcode == "dot" and contracted is not None:
            inner = [operands[0][int(axis)] for axis in contracted.group(1).split(",") if axis]
            flops = (whole.get(name) or 0) + 2 * prod(_dims(step.shape)) * prod(inner)
        whole[name] = flops
    return whole


def _dims(shape: str) -> list[int]:
    """Return the lengths of the axes of an array, or of all arrays of a tuple, from its shape as HLO writes it."""
    return [int(re.sub(r"\D", "", dim)) for _, dims in _ARRAY.findall(shape) for dim in dims.split(",") if dim.strip()]


def size_in_bytes(shape: str) -> int:
    """Return the bytes of an array or a tuple of arrays, from its shape as HLO writes it."""
    # Some numbers have less than a byte: s4[3] has 12 bits.
    bits = 0
    for dtype, dims in _ARRAY.findall(shape):
        count = prod(int(re.sub(r"\D", "", dim)) for dim in dims.split(",") if dim.strip())
        digits = re.search(r"\d+", dtype)
        bits += count * (8 if dtype == "pred" else int(digits.group()) if digits else 0)
    return -(-bits // 8)


def _ranks(attributes: str) -> tuple[int, ...] | None:
    """Return the first replica group; None where one group has all replicas, or none is named."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}(,?)", attributes)
    if listed:
        return tuple(map(int, listed.group(1).split(","))) if listed.group(2) else None
    # [4,2]<=[2,4]T(1,0): number replicas in a table of 2 x 4, transpose it, and cut it into 4 groups of 2.
    table = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if table is None or table.group(1) == "1":
        return None
    sizes, order = ([int(n) for n in (table.group(i) or "").split(",") if n] for i in (3, 4))
    ranks = np.arange(prod(sizes)).reshape(sizes).transpose(order or None)
    return tuple(ranks.reshape(int(table.group(1)), -1)[0].tolist())


class _Program:
    """The instructions of a program's text, by the computation that they stand in."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = ""
        current: list[_Instruction] = []
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header:
                current = self.computations.setdefault(header.group(2), [])
                self.entry = header.group(2) if header.group(1) else self.entry
            elif match := _INSTRUCTION.match(line):
                current.append(_Instruction(*match.groups()))
        instructions = [instruction for body in self.computations.values() for instruction in body]
        self.steps = {instruction.name: instruction for instruction in instructions}
        self.shapes = {instruction.name: instruction.shape for instruction in instructions}
        self._heavy: dict[str, bool] = {}

    def collectives(self, name: str, knows: bool, times: int | None = 1, goes_on: bool = False) -> Iterator[Collective]:
        """Yield the collectives of a computation and of those that it calls, in the order of the text."""
        # `knows` says that the order of the text is that in time; `times` is None where nobody knows how often the
        # computation runs; `goes_on` says that a convolution or matrix product is left to run after it.
        steps = [step for step in self.computations.get(name, ()) if step.opcode not in _FREE]
        # What stands between the start of a collective and its end runs while it travels.
        heavy = [i for i, step in enumerate(steps) if self._is_heavy(step)] if knows else []
        last = max(heavy, default=-1)
        ends = {
            operand: i for i, step in enumerate(steps) if step.opcode.endswith("-done") for operand in step.operands
        }
        for begin, step in enumerate(steps):
            kind = self._kind(step)
            # After a round of a loop comes its next round.
            left = goes_on or last > begin or (last == begin and step.opcode == "while")
            if kind is None:
                rounds = self._rounds(step) if step.opcode == "while" else 1
                inside = None if times is None or rounds is None else times * rounds
                for called in step.called:
                    yield from self.collectives(called, knows and step.opcode in _IN_ORDER, inside, left)
                continue
            end = ends.get(step.name, begin)
            yield Collective(
                kind=kind,
                ranks=_ranks(step.rest),
                operand_bytes=sum(size_in_bytes(self.shapes.get(operand, "")) for operand in step.operands),
                result_bytes=size_in_bytes(steps[end].shape),
                behind=any(begin < i < end for i in heavy) if knows else None,
                after_last=not left if knows else None,
                times=times,
            )

    def _rounds(self, loop: _Instruction) -> int | None:
        """Count the rounds of a loop; None: nobody knows."""
        known = _ROUNDS.search(loop.rest)
        if known is not None:
            return int(known.group(1))
        # XLA for TPUs does not tell the count. It is the bound of a number that grows from 0 in steps of 1.
        start, (test, new) = self.steps[loop.operands[0]], [self.computations[name][-1] for name in loop.called]
        if (start.opcode, test.opcode, new.opcode) != ("tuple", "compare", "tuple") or "direction=LT" not in test.rest:
            return None
        number, bound = map(self._number, test.operands)
        if not number.startswith("entry") or not bound.isdigit():
            return None
        place = int(number.removeprefix("entry"))
        grown = self.steps[new.operands[place]]
        steps = self._number(start.operands[place]), grown.opcode, *map(self._number, grown.operands)
        return int(bound) if steps == ("0", "add", number, "1") else None

    def _number(self, name: str) -> str:
        """Return an instruction's number as text: "entry2" is number 2 of what a loop hands on, "" another number."""
        step = self.steps[name]
        if step.opcode == "copy":
            return self._number(step.operands[0])
        if step.opcode == "get-tuple-element" and self.steps[step.operands[0]].opcode == "parameter":
            return "entry" + step.rest.split("index=")[1].split(",")[0]
        return step.rest.split(")")[0] if step.opcode == "constant" else ""

    def _kind(self, step: _Instruction) -> str | None:
        """Return the kind of collective that an instruction starts, if any."""
        opcodes = [step.opcode.removesuffix("-start")]
        # An async-start names the collective in a computation of its own: https://openxla.org/xla/async_ops
        if step.opcode == "async-start":
            opcodes = [inner.opcode for name in step.called for inner in self.computations.get(name, ())]
        return next((opcode for opcode in opcodes if opcode in _COLLECTIVES), None)

    def _is_heavy(self, step: _Instruction) -> bool:
        """Check whether an instruction is, or contains, a convolution or a matrix product."""
        if step.opcode in ("dot", "convolution"):
            return True
        if step.opcode == "custom-call":
            target = _TARGET.search(step.rest)
            return target is not None and _LIBRARIES.search(target.group(1)) is not None
        return self._kind(step) is None and any(map(self._holds_heavy, step.called))

    def _holds_heavy(self, name: str) -> bool:
        if name not in self._heavy:
            self._heavy[name] = any(map(self._is_heavy, self.computations.get(name, ())))
        return self._heavy[name]
