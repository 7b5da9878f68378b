"""Traces: trace the user's function, or one of a row over all rows of a part, and `then` for one kind of call."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._base.pytree import PyTree, refuse_two_bits
from .._data.overlap import halo_of
from .._data.row_keys import refuse_rbg
from .._reductions.monoid import Monoid
from .._reductions.outputs import OutputRules, OutputSpec, is_whole, match_prefix, pack_outputs, pack_result
from .._reductions.reduction import ELEMENTWISE, WEIGHT, WEIGHTED, WEIGHTS_APART, Reduction, Weighted
from .._runtime.group import Group
from .._tracing.context import NoAxisError, TraceContext, current_trace
from .._tracing.fingerprint import ByIdentity, fingerprint
from .._tracing.names import named_objects
from .._tracing.tracer import TracedFunction, TraceRequest, trace
from .._variables.state import AbstractState, refuse_narrow
from .._variables.variable import Shared, state_in
from .._variables.views import View
from .binding import constant_of
from .spec import CallSpec, FunctionSpec

# What tells parts apart, and is of the law: numbers of rows are those of the serial run, and replicas may pass on rows.
TELLING_ROWS_APART = {"synk.row_numbers", "synk.row_keys", "reduce_scatter", "ppermute", "all_to_all"}
# Exchanges that mean another thing on one replica. The gradient of an all_gather is a reduce_scatter.
_EXCHANGES = {"ppermute", "all_to_all"}
# The leaves of each variable on one replica: arrays, or shards.
State = dict[Shared, list[Any]]


class NeedsAllRows(ValueError):
    """A function that communicates takes all rows of a call in one replica, since they do not divide.

    The message is for calls that cannot run so.
    """


class CallTraces:
    """Tracer of one function for one kind of call. It looks at variables and does not place them.

    Attributes:
      view: gives the states of variables that live in another group; None for those of their own.
      touched: the variables that the traces so far read or write.
      record: what identifies the traces so far: the numbers of their variables, in the order in which programs take
        and write them, and fingerprints.
    """

    def __init__(self, function: FunctionSpec, group: Group, call: CallSpec, view: View | None = None) -> None:
        self.function, self.group, self.call, self.view = function, group, call, view
        self.touched: dict[Shared, None] = {}
        self.record: tuple[Any, ...] = ()

    def abstract(self, variable: Shared) -> AbstractState:
        """Return shapes, layout and rows of a variable, outside any trace under way."""
        refuse_narrow(variable._state.abstract, variable.name)
        if self.view is None:
            return state_in(variable, self.group).abstract
        return self.view.abstract(variable)

    @property
    def accepts(self) -> dict[Shared, tuple[AbstractState]]:
        return {variable: (self.abstract(variable),) for variable in self.touched}

    def holds_rows(self, variable: Shared) -> bool:
        return self.abstract(variable).rows_per_replica is not None

    def _rows_held(self, variable: Shared) -> int | None:
        return max(self.abstract(variable).rows_per_replica or (), default=None)

    def are_in_shards(self, variables: Iterable[Shared]) -> bool:
        return self.group.size > 1 and any(v._spec.storage.is_sharded for v in variables)

    def leaves_of(self, variables: Iterable[Shared], values: Iterable[jax.Array]) -> State:
        rest = iter(values)
        return {variable: [next(rest) for _ in self.abstract(variable).shapes] for variable in variables}

    def _expected(self, fn: Any) -> list[Shared]:
        """Return the variables that `fn` will probably read. Guessing right saves a second trace."""
        # A view may copy each variable it looks at, also those that the function does not read.
        copies = self.view is not None and self.view.copies
        return [] if copies else list(filter(self._is_readable, shared_in(fn)))

    def _is_readable(self, variable: Shared) -> bool:
        # A variable that the function names and does not read must not fail the call.
        try:
            self.abstract(variable)
        except SynkError:
            return False
        return True

    def of_rows(self, rows: int | None, keeps_lines: bool = False) -> TracedFunction:
        function, call = self.function, self.call
        # A collective inside `fn` must see the rows of all replicas: not those of one slice or batch, nor branches.
        # Rows of a map know nothing of one another, unless they have an axis of their own.
        # In one replica each batch of `over` is all rows.
        is_sliced = call.num_slices > 1 if self.group._way.is_one else call.is_sliced
        is_whole = not (is_sliced or function.of_one_row == "alone")
        has_axis = is_whole and call.is_even and all(len(sizes) == 1 for sizes in call.part_sizes)
        seen = [(rows or 0) + halo_of(overlap) for overlap in call.arguments.overlaps]
        structs = [jax.ShapeDtypeStruct((n, *shape), dtype) for n, (shape, dtype) in zip(seen, call.rows, strict=True)]
        leaves = call.arguments.in_tree_order(structs, call.broadcast_shapes)
        for leaf, argument in zip(leaves, call.arguments.names, strict=True):
            refuse_two_bits(leaf, f"{function.name}: argument {argument}")
        call_once = partial(call.arguments.call, function.fn)
        request = TraceRequest(
            fn=function.fn,
            call=partial(map_rows, function, call, rows) if function.of_one_row else call_once,
            arguments=call.arguments.treedef.unflatten(leaves),
            keys=call.keys,
            pack=partial(pack_outputs, self._output_rules(rows)),
            sees=TraceContext(
                name=function.name,
                size=self.group.size,
                shapes_of=lambda variable: variable._spec.storage.traced_shapes(self.abstract(variable), rows),
                rows_held=self._rows_held,
                rows=rows,
                is_sliced=call.is_sliced and not call.is_over,
                has_axis=has_axis,
                axis_name=function.axis_name,
                instead=_instead_of_communicating(function, call, self.group.size),
                or_in_then=not call.is_over and not function.of_one_row,
                block=call.block,
            ),
            variables=[*self._expected(function.fn), *self.touched],
            merges_equal=call.block is not None,
            keeps_lines=keeps_lines,
            mesh=self.group._way.dividing_mesh,
        )
        traced = self._trace(request, zip(call.arguments.names, leaves, strict=True), seen)
        self._check_allowed(traced)
        if function.of_one_row == "alone" and traced.draws_by_rbg:
            refuse_rbg("rbg", function.name)
        return traced

    def _output_rules(self, rows: int | None) -> OutputRules:
        function, call = self.function, self.call
        overlaps = [overlap for overlap in call.arguments.overlaps if overlap]
        widest = max([(overlap.before, overlap.after) for overlap in overlaps], default=(0, 0), key=sum)
        return OutputRules(
            function.ops, function.name, rows, call.num_slices > 1, function.per_part, call.is_over, widest,
            function.wires, call.block,
        )  # fmt: skip

    def _trace(
        self, request: TraceRequest, arguments: Iterable[tuple[str, Any]] = (), seen: Sequence[int] = ()
    ) -> TracedFunction:
        """Trace a function; of one of rows also tell the arguments, and how many rows of each it sees."""
        try:
            traced = trace(request)
        except (NameError, NoAxisError) as error:
            refused, whole = _refused_axis(request, self.function, error)
            if not self._runs_as_one(whole):
                raise ValueError(refused + self._or_jit(whole)) from error
            if whole is not None:
                self._record(whole)
            raise NeedsAllRows(refused + self._or_jit(whole)) from error
        except (TypeError, ValueError) as error:
            _add_notes(error, arguments, seen)
            raise
        if missing := [name for name, rank in traced.named.items() if rank >= self.group.size]:
            size = self.group.size
            why = "so it has no serial run" if size == 1 else f"of which {size} run it"
            raise ValueError(f"{request.sees.name}: it names replicas ({', '.join(missing)}), {why}.")
        self._record(traced)
        return traced

    def _runs_as_one(self, traced: TracedFunction | None) -> bool:
        """Tell whether one replica that all devices make may run a function that communicates."""
        function, call = self.function, self.call
        if function.needs_parts or call.is_sliced or call.held_index is not None or any(call.arguments.overlaps):
            return False
        # Without a trace of a part it may: an error of the function's own then comes from all rows.
        if traced is None:
            return True
        # One replica has rank 0 and size 1.
        tells_size = bool(traced.uses_rank - (TELLING_ROWS_APART - _EXCHANGES)) or traced.uses_size
        return not (tells_size or any(v._spec.storage.is_sharded for v in traced.variables))

    @property
    def _is_cure(self) -> bool:
        """Tell whether one replica takes all rows since they do not divide, and not since the user asked for it."""
        return self.group._way.is_one and self.function.engine != "jit"

    def _or_jit(self, traced: TracedFunction | None) -> str:
        """Name engine="jit" as a cure, where it would run this call."""
        function, call = self.function, self.call
        if function.needs_parts or function.of_one_row or call.is_over or call.is_sliced or call.block is not None:
            return ""
        if call.held_index is not None or any(call.arguments.overlaps) or not call.has_rows:
            return ""
        if traced is not None and (
            any(traced.named.values())
            or any(v._spec.storage.is_sharded for v in traced.variables)
            or any(self.holds_rows(v) for v, _ in traced.writes)
        ):
            return ""
        return f' {function.made_by}(..., engine="jit") takes any number.'

    def _record(self, traced: TracedFunction) -> None:
        self.touched.update(dict.fromkeys((*traced.reads, *(variable for variable, _ in traced.writes))))
        # By number and not by object: records are kept, and must keep no variable alive.
        reads, writes = [v._number for v in traced.variables], [(v._number, slices) for v, slices in traced.writes]
        # Two traces may have the same equations and return different trees, or Monoids with other functions.
        outputs = traced.outputs
        returned = outputs.record(fingerprint) if isinstance(outputs, OutputSpec) else outputs
        # Ops that are functions are not traced here, so what they read tells them from earlier ones.
        ops = [ByIdentity(value) for _, value in named_objects(self.function.ops_by_user)]
        self.record += (*reads, *writes, traced.fingerprint, returned, *ops)

    def _check_allowed(self, traced: TracedFunction) -> None:
        """Refuse what this kind of call cannot do: ask for a rank in one replica of all, or update some variables."""
        function, call = self.function, self.call
        if self._is_cure and not self._runs_as_one(traced):
            raise ValueError(
                f"{function.name}: it communicates, and asks for its rank or the number of replicas, so rows must "
                f"divide. Give rows that do.{self._or_jit(traced)}"
            )
        for variable, slices in traced.writes:
            if variable._spec.storage.is_sharded:
                raise ValueError(
                    f"{function.name}: it updates {variable.name}, which lies in shards, so no replica has a value of "
                    f"its own. Return what is to combine, and update {variable.name} in then."
                )
            if call.block is not None:
                raise ValueError(
                    f"{function.name}: it updates {variable.name} on each replica, but with blocks={call.block} the "
                    f"answer depends on no replica. Return what is to combine, and update {variable.name} in then."
                )
            if call.is_over:
                raise ValueError(
                    f"{function.name}.over: it updates {variable.name}, and over has one answer for all its batches. "
                    f"Return what is to be added up, or call iterate."
                )
            if self.holds_rows(variable) and call.held_index is not None:
                raise cannot_update_rows(function.name, variable.name)
            if self.holds_rows(variable) and self.group._way.is_one:
                raise ValueError(
                    f"{function.name}: {variable.name} holds rows, which one replica of all devices reads and cannot "
                    f"update. Take the rows as an argument, and return the new ones."
                )
            if call.is_sliced:
                self._check_slices(variable, slices)

    def _check_slices(self, variable: Shared, slices: str | None) -> None:
        name, shapes = self.function.name, self.abstract(variable).shapes
        if slices == "add" and any(shape.dtype == np.bool_ for shape in shapes):
            raise ValueError(
                f'{name}: the update of {variable.name} combines slices by "add", but it holds booleans. '
                f'Use "max" for any, "min" for all.'
            )
        for shape in shapes if slices == "mean" else ():
            if not jnp.issubdtype(shape.dtype, jnp.inexact):
                raise ValueError(
                    f'{name}: the update of {variable.name} combines slices by "mean", but it holds '
                    f'{shape.dtype.name}. Use "add", "max", "min" or "last" for integers.'
                )

    def then(
        self,
        then: Callable[..., Any],
        outputs: OutputSpec,
        shapes: Sequence[jax.ShapeDtypeStruct],
        written: Collection[Shared],
    ) -> tuple[TracedFunction, list[int]]:
        """Trace `then` on combined outputs of these shapes, after a function that has written these variables; and
        which broadcast arguments follow them."""
        function, call, arguments = self.function, self.call, self.call.arguments
        numbers = outputs.treedef.unflatten(range(len(shapes)))
        given = numbers if type(numbers) is tuple else (numbers,)
        names = function.then_parameters(len(given))
        constants = {name: constant_of(arguments.constants[name]) for name in names if name in arguments.constants}
        trees = {name: arguments.parameters[name] for name in names if name in arguments.parameters}
        places = jax.tree.leaves(trees)
        request = TraceRequest(
            fn=then,
            call=lambda *args, **kwargs: then(*args, **{**kwargs, **constants}),
            arguments=(
                jax.tree.map(shapes.__getitem__, given),
                jax.tree.map(lambda place: call.broadcast_shapes[arguments.broadcast.index(place)], trees),
            ),
            keys=[*(leaf.key for leaf in outputs.results), *(call.keys[place] for place in places)],
            pack=pack_result,
            sees=TraceContext(
                f"{function.name}.then",
                self.group.size,
                self._whole_shapes,
                axis_name=function.axis_name,
                written_before=written,
            ),
            variables=[v for v in self._expected(then) if len(set(self.abstract(v).rows_per_replica or ())) <= 1],
            merges_equal=call.block is not None,
            mesh=self.group._way.dividing_mesh,
        )
        traced = self._trace(request)
        # What it combines is equal on all replicas, so a sum counts them.
        tells_size = bool(traced.uses_rank) or traced.uses_size or traced.communicates
        if tells_size and self._is_cure:
            raise ValueError(
                f"{function.name}.then: it communicates, or asks for its rank or the number of replicas, but rows that "
                f"do not divide run as one replica, since {function.name} communicates. Give rows that "
                f"divide.{self._or_jit(traced)}"
            )
        return traced, [arguments.broadcast.index(place) for place in places]

    def _whole_shapes(self, variable: Shared) -> Sequence[jax.ShapeDtypeStruct]:
        state = self.abstract(variable)
        lengths, name = state.rows_per_replica, self.function.name
        if lengths is not None and len(set(lengths)) > 1:
            raise ValueError(
                f"{name}.then: {variable.name} holds {list(lengths)} rows on the replicas; then runs one "
                f"program on all, so there they need as many. Use {variable.name} in {name} itself."
            )
        return variable._spec.storage.traced_shapes(state, None)


def _add_notes(error: Exception, arguments: Iterable[tuple[str, Any]], seen: Sequence[int]) -> None:
    """Add to an error how many rows arguments have, if it speaks of different ones, or what a Weighted is for."""
    said = {*re.findall(r"\w+", str(error))}
    rows = {name: leaf.shape[0] for name, leaf in arguments if leaf.shape and str(leaf.shape[0]) in said}
    if min(seen, default=0) in rows.values() and len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        error.add_note(f'Rows in this part: {counts}. One with an entry a row is "scatter": name it in inputs=.')
    if {"Gradient", "Weighted"} <= said:
        error.add_note(f"Take the gradient of the value. {WEIGHTS_APART}")


def _refused_axis(
    request: TraceRequest, function: FunctionSpec, error: NameError | NoAxisError
) -> tuple[str, TracedFunction | None]:
    """Say why a function may not communicate over its axis here; also return its trace with the axis, None where that
    raises. Raise ValueError where no other rows would help, and the error itself if it is about something else."""
    # JAX's message is all that tells an unbound axis from another NameError.
    sees, match = request.sees, re.search(r"unbound axis name: (\w+)", str(error))
    traced = None
    if isinstance(error, NoAxisError):
        with suppress(Exception):
            traced = trace(replace(request, sees=replace(sees, has_axis=True)))
        return str(error), traced
    if match is None:
        raise error
    if match[1] != sees.axis_name:
        raise ValueError(
            f'{sees.name}: it communicates over the axis "{match[1]}", but its replicas\' axis is "{sees.axis_name}": '
            f'{function.made_by}(..., axis_name="{match[1]}").'
        ) from error
    with suppress(Exception):
        # With the axis JAX traces all of it, and shows where it communicates.
        traced = trace(replace(request, sees=replace(sees, has_axis=True)))
    if traced is not None and traced.over_axis == {"axis_index"} and not function.of_one_row:
        raise ValueError(
            f"{sees.name}: it calls jax.lax.axis_index({match[1]!r}), which takes as many rows on every replica. Use "
            f"synk.rank(), which takes any number."
        ) from error
    if not (traced is None or traced.communicates or function.of_one_row):
        raise ValueError(
            f"{sees.name}: it counts the replicas, as jax.lax.psum(1, {match[1]!r}) does, which takes as many rows "
            f"on every replica. Use synk.size(), which takes any number."
        ) from error
    can_move = traced is None or traced.communicates_at_top
    return sees.without_axis(f"it communicates inside (over the axis {match[1]!r})", can_move), traced


def shared_in(fn: Any) -> list[Shared]:
    """Return the variables under a function's own names."""
    return list(dict.fromkeys(value for _, value in named_objects([fn]) if isinstance(value, Shared)))


def rows_not_in_blocks(name: str, variable: str, block: int | None) -> ValueError:
    return ValueError(
        f"{name}: {variable} holds rows, which lie where they are, but blocks={block} deals rows out. Pass them as an "
        f"argument: x = synk.gather({variable}, nd_up=0)."
    )


def _instead_of_communicating(function: FunctionSpec, call: CallSpec, replicas: int) -> str:
    """Say what to do instead of communicating inside a function in such a call, beside communicating in `then`."""
    if function.of_one_row:
        return 'rows of synk.map know nothing of one another: combine them by outputs=, or give it axis_name="...".'
    if call.is_over:
        return "call it on all rows at once, without over."
    if call.is_sliced or call.block is not None:
        return f"leave out {'num_slices' if call.is_sliced else 'blocks'}."
    sizes = sorted({rows or 0 for part_sizes in call.part_sizes for rows in part_sizes})
    if sizes[-1] - sizes[0] > 1:  # rows that lie on the replicas already
        return "give a number of rows that divides."
    counts = " or ".join(str(replicas * rows) for rows in sizes if rows)
    return f"give {counts} rows, which divide."


def cannot_update_rows(name: str, variable: str) -> ValueError:
    return ValueError(
        f"{name}: {variable} holds rows, so it cannot be updated in a call with batch_s, which sees some of them."
    )


def map_rows(function: FunctionSpec, call: CallSpec, rows: int | None, /, *args: Any, **kwargs: Any) -> PyTree:
    """Run `fn` on each of so many rows, and return its outputs with an entry a row, or combined over rows by their
    ops."""
    if rows is None:
        raise ValueError(f"{function.name}: it maps the rows of its arguments, but none of them is scattered.")
    context = current_trace()
    assert context is not None
    is_axis = function.of_one_row == "axis"
    if is_axis and not (context.has_axis and 1 in (rows, context.size)):
        raise ValueError(
            f'{function.name}: its rows communicate over "{function.axis_name}", which takes one row on each replica '
            f"(here {context.size}), and no slices or batches. Give as many rows at once, or leave out axis_name."
        )
    # On a single replica rows that communicate take the places of replicas.
    context.size *= rows if is_axis else 1
    rank = context.rank
    arguments, treedef = jax.tree.flatten((args, kwargs))
    # The number of each row goes through the map with it, for synk.row_numbers and synk.row_keys.
    leaves = [jnp.arange(rows, dtype=jnp.int32), *arguments]
    axes = [0, *(0 if i in call.arguments.scattered else None for i in range(len(arguments)))]

    def run(row: Any, *leaves: Any) -> PyTree:
        args, kwargs = treedef.unflatten(leaves)
        # Set while the function of one row is traced, and reset for outputs, which belong to the part.
        context.row, context.rank = row, context.first_row + row if is_axis else rank
        try:
            return jax.tree.map(jnp.asarray, call.arguments.call(function.fn, *args, **kwargs))
        finally:
            context.row, context.rank = None, rank

    def rows_at(index: Any) -> list[Any]:
        return [leaf if axis is None else leaf[index] for leaf, axis in zip(leaves, axes, strict=True)]

    if rows == 1:
        # Without jax.vmap, loops and branches are those of a single row, and all bits are those of jax.pmap. Rows that
        # communicate do so over the replicas' axis.
        mapped = jax.tree.map(lambda output: output[None], run(*rows_at(0)))
    else:
        run_all = jax.vmap(run, tuple(axes), axis_name=function.axis_name if is_axis else None, axis_size=rows)
        mapped = _without_weightless(run_all, leaves, rows_at) if call.is_composed else run_all(*leaves)
    matches = match_prefix(function.ops, mapped, function.name, "outputs")
    outputs = [_combined_rows(op, output, f"{function.name}: output{path}") for path, op, output in matches]
    return jax.tree.structure(mapped, is_leaf=is_whole).unflatten(outputs)


def _without_weightless(run: Callable[..., PyTree], leaves: list[Any], rows_at: Callable[[Any], list[Any]]) -> PyTree:
    """Run all rows so that none of weight 0 brings NaN into gradients: for values, a row with a weight replaces it."""
    outputs, treedef = jax.tree.flatten(run(*leaves), is_leaf=is_whole)
    for i, output in enumerate(outputs):
        # What has effects runs once.
        if isinstance(output, Weighted) and output.weight.ndim == 1 and not jax.make_jaxpr(run)(*leaves).effects:
            counts = output.weight != 0
            again = run(*rows_at(jnp.where(counts, leaves[0], counts.argmax())))
            outputs[i] = Weighted(jax.tree.leaves(again, is_leaf=is_whole)[i].value, output.weight)
    return treedef.unflatten(outputs)


def _combined_rows(op: Reduction, output: Any, where: str) -> Any:
    """Combine an output over the rows of a part, on axis 0, if its op does so."""
    if isinstance(output, Monoid):
        raise ValueError(f"{where} is a Monoid, a statistic of many rows, but synk.map runs one: use synk.function.")
    if isinstance(output, Weighted):
        # What does not go with its op, or has no scalar for its weight, is refused with the other outputs of parts.
        if op.name != "mean" or output.weight.ndim != 1:
            return output
        weights = WEIGHT.prepare(output.weight, None)
        return Weighted(jax.tree.map(lambda leaf: _over_rows(WEIGHTED, leaf, weights), output.value), weights.sum())
    if op.name in ELEMENTWISE:
        return _over_rows(WEIGHTED if op.name == "mean" else op, output, jnp.ones(len(output)))
    # Other ops take one row's value: "same", and "first", which a check puts in place of the user's.
    return output if op.has_row_entries else output[0]


def _over_rows(op: Reduction, rows: jax.Array, weights: jax.Array) -> jax.Array:
    """Combine the rows of a part to the part's value. Integers may become wider, as those of `jnp.sum` do."""
    states = jax.vmap(op.prepare)(rows, weights)
    whole = op.finalize(getattr(jnp, op.collective)(states, axis=0), weights.sum())
    return whole.astype(rows.dtype) if jnp.issubdtype(rows.dtype, jnp.inexact) else whole
