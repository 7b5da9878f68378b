"""Task: what a function is asked to do, and the small pieces that its programs are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from ._engine import Lies, Program
from ._group import PyTree
from ._ops import Leaf
from ._outputs import Outputs, Result
from ._shared import Shared
from ._trace import Traced

State: TypeAlias = dict[Shared, list[jax.Array]]


class Stats:
    """What a function has done so far.

    Attributes:
      calls: how often it was called.
      compilations: how many programs were compiled for it.
      rows: how many rows it was given in all.
      selecting: seconds spent checking arguments and batches.
      sending: seconds spent picking rows and starting to bring them to the devices.
      dispatching: seconds spent starting programs, compilation included.

    Example:
      >>> import jax.numpy as jnp, numpy as np, synk
      >>> f = synk.function(jnp.sum)
      >>> _ = f(np.ones(8)), f(np.ones(8))
      >>> f.stats.calls, f.stats.compilations, f.stats.rows
      (2, 1, 16)
    """

    __slots__ = ("calls", "compilations", "dispatching", "rows", "selecting", "sending")

    def __init__(self) -> None:
        self.calls = self.compilations = self.rows = 0
        self.selecting = self.sending = self.dispatching = 0.0

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={getattr(self, name):.6g}' for name in self.__slots__)})"


class View(NamedTuple):
    """A shared variable as one call finds it."""

    leaves: list[jax.Array]
    lies: Lies
    lengths: tuple[int, ...] | None
    is_equal: bool


@dataclass(frozen=True, eq=False)
class Task:
    """What the user asked for: a function, how its outputs combine, what follows, and how to run it."""

    name: str
    fn: Callable[..., PyTree]
    ops: PyTree
    then: Callable[..., PyTree] | None
    then_extra: Callable[[int], Sequence[str]]
    engine: str
    stats: Stats
    is_raw: bool = False  # give every part as it is


class Built(NamedTuple):
    """The program that ends a call, and what goes in and comes out."""

    program: Program
    variables: tuple[Shared, ...]  # whose leaves it takes first
    updates: tuple[Shared, ...]  # whose new leaves it returns last
    unread: tuple[Shared, ...]  # those of them that it does not take
    ends: tuple[tuple[Shared, int, int, tuple[Shared, ...] | None], ...]  # and from where to where; see `dependencies`
    result: Result
    firsts: tuple[int, ...]  # which leaves of the result are the first replica's own
    outputs: Outputs


def built(
    program: Program,
    variables: tuple[Shared, ...],
    needs: dict[Shared, tuple[Shared, ...] | None],
    result: Result,
    firsts: tuple[int, ...],
    outputs: Outputs,
) -> Built:
    """A program that takes `variables` and updates those that `needs` names."""
    ends: list[Any] = []
    at = len(result.picked)
    for variable, needed in needs.items():
        ends.append((variable, at, at + count(variable), needed))
        at += count(variable)
    unread = tuple(variable for variable in needs if variable not in variables)
    return Built(program, variables, tuple(needs), unread, tuple(ends), result, firsts, outputs)


def run(traced: Traced, state: State, rest: Sequence[jax.Array]) -> tuple[list[jax.Array], State]:
    """Run a traced function; its outputs, and the new leaves of each variable it updates."""
    outs = list(traced.run(*packed(state, traced.variables), *rest))
    written = sum(count(variable) for variable, _ in traced.writes)
    outs, updates = outs[: len(outs) - written], outs[len(outs) - written :]
    return outs, unpacked([variable for variable, _ in traced.writes], updates)[0]


def count(variable: Shared) -> int:
    """How many leaves it has."""
    return variable.treedef.num_leaves


def packed(state: State, variables: Sequence[Shared]) -> list[jax.Array]:
    """The leaves of these variables, one after another."""
    return [leaf for variable in variables for leaf in state[variable]]


def unpacked(variables: Sequence[Shared], values: Sequence[Any]) -> tuple[State, list[Any]]:
    """The reverse; and what is left over."""
    state: State = {}
    rest = list(values)
    for variable in variables:
        state[variable], rest = rest[: count(variable)], rest[count(variable) :]
    return state, rest


def dependencies(traced: Traced, then: Traced | None, has_no_rows: bool) -> dict[Shared, tuple[Shared, ...] | None]:
    """For each updated variable, those that must be equal everywhere for its new value to be; None where it is not."""
    needs: dict[Shared, tuple[Shared, ...] | None] = {}
    for variable, _ in traced.writes:
        needs[variable] = traced.reads if has_no_rows and not traced.uses_rank else None
    for variable, _ in then.writes if then else ():
        needs[variable] = None if then is None or then.uses_rank else then.reads
    return needs


def split_kinds(leaves: Sequence[Leaf]) -> tuple[list[int], list[int]]:
    """Which leaves merge slice by slice, and which are gathered part by part."""
    gather = [i for i, leaf in enumerate(leaves) if leaf.kind in ("rows", "parts")]
    return [i for i in range(len(leaves)) if i not in gather], gather


def reindexed(leaves: Sequence[Leaf], kept: Sequence[int]) -> list[Leaf]:
    """Some of the leaves, each Weighted still pointing to its weight."""
    at = {old: new for new, old in enumerate(kept)}
    chosen = [leaves[i] for i in kept]
    return [leaf if leaf.weight is None else leaf._replace(weight=at[leaf.weight]) for leaf in chosen]
