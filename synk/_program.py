"""Program: compile what a call runs, from one trace of the user's function a shape.

Rows that divide evenly run one *plain* program: map, combine, then. Others run *map* programs, one a part size, whose
results are *merged* slice by slice, and one *combine* program with `then`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _ops
from ._bind import Layout
from ._engine import Lies, Lists, Program, lie
from ._feed import Feed, fed, rows_of
from ._group import AXIS, Group, PyTree
from ._ops import Gathered, Leaf
from ._outputs import Outputs, Result, pack_outputs, pack_result, pick, result_of
from ._rows import How
from ._shared import Shared, named_in
from ._task import (
    Built,
    State,
    Task,
    View,
    built,
    count,
    dependencies,
    packed,
    reindexed,
    run,
    split_kinds,
    unpacked,
)
from ._trace import Traced, Value, as_keys, trace


@dataclass(eq=False)
class Signature:
    """All programs of one task, for arguments of one tree and of one shape but for the rows, in one group."""

    key: Any
    task: Task
    group: Group
    layout: Layout
    row_shapes: tuple[jax.ShapeDtypeStruct, ...]  # without axis 0
    feeds: tuple[Feed, ...]
    local: How | None  # how batch_s picks from the rows that variables hold
    broadcast_shapes: tuple[jax.ShapeDtypeStruct, ...]
    keys: tuple[Any, ...]  # PRNG implementation of each argument leaf
    is_sliced: bool
    view: Callable[[Shared], View] | None  # None: as they are
    known: dict[Shared, None]  # the variables that earlier traces found; more are added
    subset: tuple[Any, ...] | None
    donate: bool
    splits: set[Any]  # the uneven splits that have programs of their own
    cache: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        """Build once."""
        if key not in self.cache:
            self.cache[key] = build()
        return self.cache[key]

    # Traces.

    def _expected(self, fn: Any) -> tuple[Shared, ...]:
        """Variables that earlier traces found or `fn` names, so that one trace is enough; none where asking for one
        that is not read could raise."""
        return tuple(dict.fromkeys((*self.known, *named_in(fn)))) if self.view is None else ()

    def lengths(self, variable: Shared) -> tuple[int, ...] | None:
        """Rows that a variable holds on each replica; it is placed, if need be, outside any trace under way."""
        if self.view is None:
            return variable.lengths
        with jax.ensure_compile_time_eval():
            return self.view(variable).lengths

    def leaves(self, variable: Shared) -> list[jax.Array]:
        """The stacked leaves of a variable."""
        return variable.bind(self.group) if self.view is None else self.view(variable).leaves

    def lies(self, variable: Shared) -> Lies:
        """How its leaves lie."""
        return variable.lies if self.view is None else self.view(variable).lies

    def settle(self, needs: Mapping[Shared, Sequence[Shared] | None]) -> None:
        """Give each replica a value of its own of the variables that a call may make differ: those that need some that
        differ already, or (None) that it updates on each replica from its own rows."""
        before = -1
        apart = {v for v, needed in needs.items() if needed is None}
        while self.view is None and self.group.size > 1 and len(apart) > before:
            before = len(apart)
            for variable in apart:
                variable.stack(self.group)
            apart |= {v for v, needed in needs.items() if any(u.lies == "stacked" for u in needed or ())}

    def compiled(self, key: Any, build: Callable[[], Any]) -> Any:
        """Build once for each way that the variables lie; what is built may change it."""
        found = self.cache.get((key, self._layouts()))
        if found is None:
            found = build()
            self.cache[key, self._layouts()] = found
        return found

    def _layouts(self) -> tuple[Lies, ...]:
        return tuple([variable.lies for variable in self.known]) if self.view is None else ()

    def is_equal(self, variable: Shared) -> bool:
        """Do all replicas hold one value of it?"""
        return variable.is_equal if self.view is None else self.view(variable).is_equal

    def traced(self, rows: int | None, communicates: bool) -> Traced:
        """`fn` over so many rows of one replica."""
        return self.cached(("trace", rows, communicates), lambda: self._trace(rows, communicates))

    def _trace(self, rows: int | None, communicates: bool) -> Traced:
        shapes = [jax.ShapeDtypeStruct((rows, *s.shape), s.dtype) for s in self.row_shapes]
        try:
            traced = trace(
                lambda *leaves: self.layout.call(self.task.fn, leaves, self.keys),
                [*shapes, *self.broadcast_shapes],
                name=self.task.name,
                size=self.group.size,
                describe=lambda v: v.describe(rows if self.lengths(v) is not None else None),
                known=self._expected(self.task.fn),
                pack=partial(pack_outputs, self.task.ops, self.task.name, rows, self.is_sliced, self.task.is_raw),
                slices=2 if self.is_sliced else 1,
                communicates=communicates,
            )
        except NameError as error:
            if communicates or "unbound axis" not in str(error):
                raise
            raise ValueError(
                f"{self.task.name}: it communicates inside (over the axis {AXIS!r}), so every replica and slice needs "
                f"as many rows. Communicate in then, or give a number of rows that divides."
            ) from error
        self.known.update(dict.fromkeys((*traced.reads, *(v for v, _ in traced.writes))))
        for variable, slices in traced.writes if self.is_sliced else ():
            self._check_slices(variable, slices)
        for variable, _ in traced.writes if self.local else ():
            if self.lengths(variable) is not None:
                raise holds_rows(self.task.name, variable.name)
        return traced

    def _check_slices(self, variable: Shared, slices: str | None) -> None:
        if self.lengths(variable) is not None:
            raise ValueError(
                f"{self.task.name}: {variable.name} holds rows, so it cannot be updated with num_slices > 1."
            )
        if slices == "add" and any(shape.dtype == np.bool_ for shape in variable.describe().shapes):
            raise ValueError(
                f'{self.task.name}: the update of {variable.name} combines slices by "add", but it holds booleans. '
                f'Use "max" for any, "min" for all.'
            )
        for shape in variable.describe().shapes if slices == "mean" else ():
            if not jnp.issubdtype(shape.dtype, jnp.inexact):
                raise ValueError(
                    f'{self.task.name}: the update of {variable.name} combines slices by "mean", but it holds '
                    f'{shape.dtype.name}. Use "add", "max", "min" or "last" for integers.'
                )

    def then(self, outputs: Outputs, shapes: Sequence[jax.ShapeDtypeStruct]) -> Traced | None:
        """`then` on combined outputs of these shapes."""
        if self.task.then is None:
            return None
        key = ("then", outputs.treedef, tuple((s.shape, s.dtype) for s in shapes))
        return self.cached(key, lambda: self._then(outputs, shapes))

    def _then(self, outputs: Outputs, shapes: Sequence[jax.ShapeDtypeStruct]) -> Traced:
        def call(*leaves: jax.Array) -> PyTree:
            keys = [outputs.leaves[i].key for i in outputs.keep]
            combined = outputs.treedef.unflatten(map(as_keys, leaves[: len(shapes)], keys))
            arguments = combined if type(combined) is tuple else (combined,)
            names = self.task.then_extra(len(arguments))
            extra = self.layout.named(names, leaves[len(shapes) :], self.keys)
            return self.task.then(*arguments, **extra)  # type: ignore[misc]  # there is one: then() looked

        traced = trace(
            call,
            [*shapes, *self.broadcast_shapes],
            name=f"{self.task.name}.then",
            size=self.group.size,
            describe=self._describe_whole,
            known=tuple(v for v in self._expected(self.task.then) if len(set(self.lengths(v) or ())) <= 1),
            pack=pack_result,
            is_then=True,
        )
        self.known.update(dict.fromkeys((*traced.reads, *(v for v, _ in traced.writes))))
        return traced

    def _describe_whole(self, variable: Shared) -> Value:
        lengths = self.lengths(variable)
        if lengths is not None and len(set(lengths)) > 1:
            raise ValueError(
                f"{self.task.name}.then: {variable.name} holds {list(lengths)} rows on the replicas; then runs one "
                f"program on all, so there they need as many. Use {variable.name} in {self.task.name} itself."
            )
        return variable.describe(None if lengths is None else lengths[0])

    def result(self, outputs: Outputs, then: Traced | None) -> Result:
        """The structure of the call's result."""
        if then is None:
            treedef, keys = outputs.treedef, tuple(outputs.leaves[i].key for i in outputs.keep)
        else:
            treedef, keys = then.outputs
        if self.subset is None:
            return result_of(treedef, keys, range(treedef.num_leaves))
        tree = pick(treedef.unflatten(range(treedef.num_leaves)), self.subset, self.task.name)
        picked, treedef = jax.tree.flatten(tree)
        return result_of(treedef, [keys[i] for i in picked], picked)

    def own(self, outputs: Outputs) -> list[int]:
        """Output leaves that are the first replica's own: neither `then` nor another process needs them."""
        if self.task.then is not None or self.group.spans:
            return []
        return [i for i, leaf in enumerate(outputs.leaves) if leaf.kind == "first"]

    # The plain program: every replica has as many rows.

    def plain(self, rows: int | None, arguments: Callable[[Sequence[Shared]], Lists]) -> Built:
        """Map, combine and then in one. Arguments: variables, rows, broadcast ones."""
        traced = self.traced(rows, True)
        outputs: Outputs = traced.outputs
        own = self.own(outputs)
        shared = [i for i in range(len(outputs.leaves)) if i not in own]
        leaves = reindexed(outputs.leaves, shared)

        def combine(rank: jax.Array, *values: jax.Array) -> list[jax.Array]:
            lifted = _ops.lift([values[i] for i in shared], leaves, 1.0 / self.group.size, rank)
            whole = dict(zip(shared, _ops.across(lifted, leaves, None), strict=True)) | {i: values[i] for i in own}
            return [whole[i] for i in outputs.keep]

        then = self.then(outputs, self.shapes(combine, traced.shapes[: len(outputs.leaves)]))
        variables = tuple(dict.fromkeys((*traced.variables, *(then.variables if then else ()))))
        needs = dependencies(traced, then, rows is None)
        self.settle(needs)
        updates = tuple(needs)
        result = self.result(outputs, then)
        picked = result.picked

        def body(*values: jax.Array) -> list[jax.Array]:
            rank = lax.axis_index(AXIS)
            state, rest = unpacked(variables, values)
            given, rest = fed(self.feeds, rest, rows)
            seen = state
            if self.local:
                where = rest.pop(0)
                seen = {v: self._seen(v, leaves, where, rows) for v, leaves in state.items()}
            outs, new = run(traced, seen, [*given, *rest, rank])
            combined, later = self._run_then(then, state, combine(rank, *outs), rest, rank)
            return [*(combined[i] for i in picked), *packed(new | later, updates)]

        ins: list[Lies] = [*self._lie(variables), *self._inputs_lie(), *self._broadcast_lie()]
        outs: list[Lies] = [*lie("everywhere", len(picked)), *self._lie(updates)]
        program = self._compile(body, ins, outs, arguments(variables), variables, updates)
        firsts = tuple(j for j, i in enumerate(picked) if outputs.keep[i] in own) if own else ()
        return built(program, variables, needs, result, firsts, outputs)

    def _run_then(
        self, then: Traced | None, state: State, combined: list[jax.Array], broadcast: Sequence[jax.Array], rank: Any
    ) -> tuple[list[jax.Array], State]:
        return (combined, {}) if then is None else run(then, state, [*combined, *broadcast, rank])

    def shapes(self, combine: Callable[..., list[jax.Array]], values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The shapes of combined outputs."""
        rank = jax.ShapeDtypeStruct((), np.int32)
        axes = [(AXIS, self.group.size)]
        return jax.make_jaxpr(combine, axis_env=axes, return_shape=True)(rank, *values)[1]

    def _lie(self, variables: Sequence[Shared]) -> list[Lies]:
        return [self.lies(variable) for variable in variables for _ in range(count(variable))]

    def _inputs_lie(self) -> list[Lies]:
        """Of what brings rows: those of each argument, and what picks a variable's."""
        of_inputs: list[Lies] = [lies for feed in self.feeds for lies in feed.ins]
        return [*of_inputs, *lie("stacked", int(self.local is not None))]

    def _broadcast_lie(self) -> list[Lies]:
        return lie("everywhere", len(self.broadcast_shapes))

    def _compile(
        self,
        body: Any,
        ins: Sequence[Lies],
        outs: Sequence[Lies],
        arguments: Lists,
        variables: Sequence[Shared] = (),
        updates: Sequence[Shared] = (),
        *,
        donate: Sequence[int] = (),
        group: Group | None = None,
    ) -> Program:
        """Compile; old values of variables that are updated are donated, unless the user said not to."""
        self.task.stats.compilations += 1
        old = [i for i, v in enumerate(variables) if v in updates] if self.donate else []
        group = group or self.group
        return Program(
            group, body, ins, outs, arguments, donate=[*old, *donate], engine=self.task.engine, name=self.task.name
        )

    # Map, merge and combine: replicas or slices differ.

    def mapped(self, span: tuple[int, int], traced: Traced, rows: int, arguments: Lists) -> Program:
        """`fn` over so many rows on a span of ranks. Arguments: variables, rows, broadcast ones, then the rank, the
        weight and the first row of each. Results: the first's own outputs, lifted outputs, lifted updates."""
        outputs: Outputs = traced.outputs
        own = self.own(outputs)
        shared = [i for i in range(len(outputs.leaves)) if i not in own]
        leaves, changes = reindexed(outputs.leaves, shared), self.changes(traced)

        def body(*values: jax.Array) -> list[jax.Array]:
            *values, rank, weight, start = values  # type: ignore[assignment]  # a list from here on
            whole, rest = unpacked(traced.variables, values)
            given, rest = fed(self.feeds, rest, rows)
            where = rest.pop(0) if self.local else start
            state = {v: self._seen(v, old, where, rows) for v, old in whole.items()}
            outs, new = run(traced, state, [*given, *rest, rank])
            change = [
                a - b if self.is_sliced and slices == "add" else a
                for variable, slices in traced.writes
                for a, b in zip(self._padded(variable, new[variable]), whole.get(variable, new[variable]), strict=True)
            ]
            lifted = _ops.lift([outs[i] for i in shared], leaves, weight, rank)
            return [*(outs[i] for i in own), *lifted, *_ops.lift(change, changes, weight, rank)]

        ins: list[Lies] = [*self._lie(traced.variables), *self._inputs_lie(), *self._broadcast_lie()]
        outs: list[Lies] = [*lie("everywhere", len(own)), *lie("stacked", len(leaves) + len(changes))]
        return self._compile(body, [*ins, *lie("stacked", 3)], outs, arguments, group=self.group.span(*span))

    def changes(self, traced: Traced) -> list[Leaf]:
        """How the updates of slices combine on one replica, as leaves; without slices the one there is, is the last."""
        kinds: dict[str, tuple[str, _ops.Kind]] = {
            "mean": ("mean", "sum"), "add": ("sum", "sum"), "max": ("max", "fold"), "min": ("min", "fold"),
        }  # fmt: skip
        return [
            Leaf(variable.name, *kinds.get(str(slices) if self.is_sliced else "", ("last", "last")), shape.dtype)
            for variable, slices in traced.writes
            for shape in variable.describe().shapes
        ]

    def _seen(self, variable: Shared, leaves: list[jax.Array], where: jax.Array, rows: int | None) -> list[jax.Array]:
        """This part's rows of a variable that holds rows, or the whole value."""
        if self.lengths(variable) is None:
            return leaves
        return [rows_of(leaf, where, self.local or "window", rows or 0) for leaf in leaves]

    def _padded(self, variable: Shared, leaves: list[jax.Array]) -> list[jax.Array]:
        lengths = self.lengths(variable)
        if lengths is None:
            return leaves
        full = max(lengths)
        return [jnp.pad(leaf, [(0, full - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)) for leaf in leaves]

    def merged(self, leaves: Sequence[Leaf], arguments: Lists) -> Program:
        """One slice's lifted values added to those before. Arguments: those before; these and their weight."""
        n = len(leaves)

        def body(*values: jax.Array) -> list[jax.Array]:
            return _ops.merge(values[:n], values[n : 2 * n], leaves, values[-1] > 0)

        ins: list[Lies] = lie("stacked", 2 * n + 1)
        return self._compile(body, ins, lie("stacked", n), arguments, donate=[0])

    def combined(
        self,
        traced: Traced,
        shapes: Sequence[Any],
        entries: Sequence[int],
        arguments: Callable[[Sequence[Shared]], Lists],
    ) -> Built:
        """Lifted values of all slices across the replicas, and then.

        Arguments: variables; merged outputs (in the order of `merge_order`) and updates; the entries of each gathered
        output, so many each; the index of those to keep of each; every replica's weight; broadcast ones.
        """
        outputs: Outputs = traced.outputs
        own = self.own(outputs)
        shared = [i for i in range(len(outputs.leaves)) if i not in own]
        leaves, changes = reindexed(outputs.leaves, shared), self.changes(traced)
        merge, gather = split_kinds(leaves)

        def combine(rank: jax.Array, *values: jax.Array) -> list[jax.Array]:
            rest = list(values)
            ready: dict[int, Any] = {i: rest.pop(0) for i in merge}
            parts = {i: [rest.pop(0) for _ in range(n)] for i, n in zip(gather, entries, strict=True)}
            ready |= {i: Gathered(jnp.concatenate(parts[i]), rest.pop(0)) for i in gather}
            whole = _ops.across([ready[i] for i in range(len(leaves))], leaves, rest.pop(0) > 0)
            return [whole[shared.index(i)] for i in outputs.keep if i not in own]

        then = self.then(outputs, self.shapes(combine, shapes)) if self.task.then else None
        needs = dependencies(traced, then, False)
        self.settle(needs)
        updates = tuple(needs)
        variables = tuple(dict.fromkeys((*(then.variables if then else ()), *(v for v, _ in traced.writes))))
        result = self.result(outputs, then)
        firsts = tuple(j for j, i in enumerate(result.picked) if outputs.keep[i] in own) if own else ()
        picked = [i for j, i in enumerate(result.picked) if j not in firsts]
        kept = [i for i, leaf in enumerate(outputs.keep) if leaf not in own]

        def body(*values: jax.Array) -> list[jax.Array]:
            rank = lax.axis_index(AXIS)
            state, rest = unpacked(variables, values)
            last = len(rest) - len(self.broadcast_shapes)
            lifted, change = rest[: len(merge)], rest[len(merge) : len(merge) + len(changes)]
            whole = combine(rank, *lifted, *rest[len(merge) + len(changes) : last])
            new = self._finished(traced, state, change, rest[last - 1][rank])
            results, later = self._run_then(then, state, whole, rest[last:], rank)
            results = results if then else dict(zip(kept, results, strict=True))  # type: ignore[assignment]
            return [*(results[i] for i in picked), *packed(new | later, updates)]

        n = len(merge) + len(changes)
        ins: list[Lies] = [*self._lie(variables), *lie("stacked", n + sum(entries))]
        ins += lie("everywhere", len(gather) + 1) + self._broadcast_lie()
        outs: list[Lies] = [*lie("everywhere", len(picked)), *self._lie(updates)]
        program = self._compile(body, ins, outs, arguments(variables), variables, updates)
        return built(program, variables, needs, result, firsts, outputs)

    def _finished(self, traced: Traced, state: State, change: Sequence[jax.Array], weight: jax.Array) -> State:
        """New values of what `fn` updated on this replica; the old ones where it had no rows."""
        new: State = {}
        rest = list(change)
        for variable, slices in traced.writes:
            new[variable] = []
            for old in state[variable]:
                value = rest.pop(0)
                if self.is_sliced and slices == "mean":
                    value = value / weight.astype(value.dtype)
                if self.is_sliced and slices == "add":
                    value = old.astype(value.dtype) + value
                new[variable].append(jnp.where(weight > 0, value.astype(old.dtype), old))
        return new


def holds_rows(name: str, variable: str) -> ValueError:
    """Of a call that sees some of the rows it would assign."""
    return ValueError(
        f"{name}: {variable} holds rows, so it cannot be updated in a call with batch_s, which sees some of them."
    )
