"""HLO: what a compiled program's text says of its collectives and of what runs while they travel."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d\w*)?)\[([\d,<= ]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARIES = re.compile(r"cublas|cudnn|gemm|matmul|conv|dot|fmha|attention", re.IGNORECASE)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[str]:
        return [name.strip("% ") for names in _CALLED.findall(self.rest) for name in names.split(",")]


@dataclass(frozen=True)
class Collective:
    """One collective of a program, of `ProgramReport.collectives`. None: it is not known what runs while it travels.

    Attributes:
      kind: as XLA names it, such as "all-reduce".
      ranks: the first of the sets of replicas among which it goes; None: all.
      operand_bytes, result_bytes: what a replica gives, and gets.
      begin: where in the schedule it starts, from 0 to 1.
      end: where it is waited for; as `begin` where nothing runs meanwhile.
      behind: whether a convolution or matrix product runs meanwhile.
      after_last: whether none of these is left to run.
      in_loop: whether it runs as often as a loop, or as one branch.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> with synk.init(2):
      ...     e = synk.function(jnp.sum).explain(np.ones(8, np.float32))
      >>> [(each.kind, each.operand_bytes) for program in e.programs for each in program.collectives]
      [('all-reduce', 4)]
    """

    kind: str
    ranks: tuple[int, ...] | None
    operand_bytes: int
    result_bytes: int
    begin: float | None
    end: float | None
    behind: bool | None
    after_last: bool | None
    in_loop: bool


class Schedule(NamedTuple):
    """What a program's text tells."""

    collectives: tuple[Collective, ...]
    heavy: tuple[float, ...]  # where in the schedule convolutions and matrix products run, from 0 to 1


def size_in_bytes(shape: str) -> int:
    """Bytes of an array or a tuple of arrays, as HLO writes its shape."""
    bits = 0
    for dtype, dims in _ARRAY.findall(shape):
        count = prod(int(re.sub(r"\D", "", dim)) for dim in dims.split(",") if dim.strip())
        digits = re.search(r"\d+", dtype)
        bits += count * (8 if dtype == "pred" else int(digits.group()) if digits else 0)
    return -(-bits // 8)


def read_schedule(text: str, is_in_order: bool) -> Schedule:
    """Collectives of a compiled program, and where its convolutions and matrix products run.

    `is_in_order` says whether devices run it in the order of the text, as accelerators do, and XLA's CPU threads not.
    """
    program = _Program(text)
    knows = is_in_order and "is_scheduled=true" in text[: text.find("\n") + 1]
    found: list[Collective] = []
    for name in program.computations:
        if name != program.entry and name not in program.async_bodies:
            found += _collectives(program, name, False)
    steps = program.steps(program.entry)
    heavy = tuple(i / len(steps) for i, each in enumerate(steps) if program.is_heavy(each))
    return Schedule((*_collectives(program, program.entry, knows), *found), heavy)


def _collectives(program: "_Program", name: str, knows: bool) -> Iterator[Collective]:
    """Those of one computation."""
    steps = program.steps(name)
    places = [i for i, each in enumerate(steps) if program.is_heavy(each)] if knows else []
    done = {operand: i for i, each in enumerate(steps) if each.opcode.endswith("-done") for operand in each.operands}
    for begin, each in enumerate(steps):
        kind = program.kind(each)
        if kind is None:
            continue
        end = done.get(each.name, begin)
        yield Collective(
            kind=kind,
            ranks=_ranks(each.rest),
            operand_bytes=sum(size_in_bytes(program.shapes.get(operand, "")) for operand in each.operands),
            result_bytes=size_in_bytes(steps[end].shape),
            begin=begin / len(steps) if knows else None,
            end=end / len(steps) if knows else None,
            behind=any(begin < i < end for i in places) if knows else None,
            after_last=not any(i > begin for i in places) if knows else None,
            in_loop=name != program.entry,
        )


def _ranks(attributes: str) -> tuple[int, ...] | None:
    """The first of its replica groups; None where there is one of all, or none is named."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}(,?)", attributes)
    if listed:
        return tuple(map(int, listed.group(1).split(","))) if listed.group(2) else None
    # As rows of a table of all ranks, whose axes were moved.
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if counted is None or counted.group(1) == "1":
        return None
    sizes, order = ([int(n) for n in (counted.group(i) or "").split(",") if n] for i in (3, 4))
    table = np.arange(prod(sizes)).reshape(sizes).transpose(order or None)
    return tuple(table.reshape(int(counted.group(1)), -1)[0].tolist())


class _Program:
    """The instructions of a program's text."""

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
        every = [*chain(*self.computations.values())]
        self.shapes = {each.name: each.shape for each in every}
        # Computations that an async-start wraps: their collective is counted there.
        self.async_bodies = {name for each in every if each.opcode == "async-start" for name in each.called}
        self._heavy: dict[str, bool] = {}

    def steps(self, name: str) -> list[_Instruction]:
        """What takes time in a computation."""
        return [each for each in self.computations.get(name, ()) if each.opcode not in _FREE]

    def kind(self, each: _Instruction) -> str | None:
        """Which collective an instruction starts, if any."""
        opcodes = [each.opcode.removesuffix("-start")]
        if each.opcode == "async-start":
            opcodes = [one.opcode for name in each.called for one in self.computations.get(name, ())]
        return next((opcode for opcode in opcodes if opcode in COLLECTIVES), None)

    def is_heavy(self, each: _Instruction) -> bool:
        """Is it a convolution or a matrix product, or does it hold one?"""
        if each.opcode in ("dot", "convolution"):
            return True
        if each.opcode == "custom-call":
            target = _TARGET.search(each.rest)
            return target is not None and _LIBRARIES.search(target.group(1)) is not None
        return self.kind(each) is None and any(map(self._holds_heavy, each.called))

    def _holds_heavy(self, name: str) -> bool:
        if name not in self._heavy:
            self._heavy[name] = any(map(self.is_heavy, self.computations.get(name, ())))
        return self._heavy[name]


_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast")
