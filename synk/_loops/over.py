"""Over: one answer over the rows of many batches.

States add up on the replicas, and combine once, at the end. Entries of rows and parts are joined on the host.
"""

from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions
from .._call.compiler import Compiler
from .._call.execute import ReadyCall, check_variables, leaves_taken, rows_taken, run, values_of
from .._call.kinds import MOST_ROWS, check_row_count, start
from .._call.parts import split_into_launches, table_of_batch
from .._call.plan import CallPlan, Site
from .._call.rows import Rows
from .._data.transfer import PartRows
from .._runtime.dispatch import LOCK
from .._runtime.executable import translate_peer_errors
from .._runtime.layout import constant, put
from .._tracing.nan_origin import is_finite
from .._variables.state import VariableState
from .._variables.variable import Shared

# Arrays that one launch returns, with entries of rows or parts, and the number of rows of each replica.
_Launched = tuple[tuple[int, ...], list[jax.Array]]


class Accumulation:
    """The sums and rows of the batches of `f.over` so far."""

    def __init__(self, site: Site) -> None:
        function = site.function
        if function.then is not None:
            raise ValueError(
                f"{function.name}.over: the function has a then, which follows each call. Put over a function without "
                f"one, and do the rest with its answer."
            )
        self._function = replace(function, is_over=True)
        self._site = site._replace(function=self._function)
        # The first call gives the outputs of all, and the states of variables that all batches must find.
        self._first: ReadyCall | None = None
        self._states: dict[Shared, VariableState] = {}
        self._sums: list[jax.Array] = []
        # Launches of batches whose entries are on their way to the host, and entries that are there, by states.
        self._under_way: deque[list[_Launched]] = deque()
        self._entries: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._batches = self._rows = self._parts = 0
        self._has_rows = np.zeros(site.group.size, bool)

    def add(self, bound: BoundArguments, options: CallOptions) -> None:
        """Run one more batch."""
        if any(bound.spec.overlaps):
            raise ValueError(
                f"{self._function.name}.over: rows at the ends of batches have neighbours in others (synk.Overlap), "
                f"which over runs apart. Call the function on all rows."
            )
        with LOCK:
            start(self._site, bound, options, self._run)
        # The newest batch runs meanwhile.
        while len(self._under_way) > 1:
            self._fetch_oldest()

    def _run(self, ready: ReadyCall) -> None:
        """Launch the programs of a batch, which add to the sums."""
        plan, lengths = ready.plan, ready.rows.lengths
        assert lengths is not None and plan.start is not None
        states = {variable: ready.state(variable) for variable in plan.accepts}
        check_variables(ready, states)
        self._check(ready, states, sum(lengths))
        if self._first is None:
            self._sums = run(self._function.name, plan.start, [])
            # The rows of the first batch need not stay in memory.
            self._first, self._states = ready._replace(rows=Rows((), (), (), None), broadcast=[]), states
        read_leaves, rows = leaves_taken(ready, states, plan.reads[0]), rows_taken(ready)
        num_sums = len(_compiler(plan).carry)
        launched: list[_Launched] = []
        for parts in split_into_launches(lengths, ready.num_slices):
            values = [*values_of(ready, rows, parts), self._place_table(ready, parts)]
            results = run(self._function.name, plan.program_of(parts), [*read_leaves, self._sums, values])
            self._sums = results[:num_sums]
            # Host memory is where CPU devices have them.
            for array in results[num_sums:] if ready.group.platform != "cpu" else ():
                array.copy_to_host_async()
            launched.append((parts.counts, results[num_sums:]))
            self._has_rows |= np.array(parts.counts) > 0
            self._parts += len(parts.counts) - parts.counts.count(0)
        self._under_way.append(launched)
        self._rows += sum(lengths)
        self._batches += 1

    def _fetch_oldest(self) -> None:
        """Wait for the entries of the oldest batch under way, and list them in row order: by replica, then by slice."""
        assert self._first is not None
        launched, compiler, ranks = self._under_way.popleft(), _compiler(self._first.plan), range(self._site.group.size)
        with translate_peer_errors(self._site.group):
            for at, i in enumerate(compiler.kept):
                most = None if compiler.builder.reductions[i].has_row_entries else 1
                stacked = [(np.asarray(arrays[at]), counts) for counts, arrays in launched]
                self._entries[i] += [a[rank, : counts[rank]][:most] for rank in ranks for a, counts in stacked]

    def _place_table(self, ready: ReadyCall, parts: PartRows) -> jax.Array:
        """Bring every replica the table of one launch."""
        group, lengths = ready.group, ready.rows.lengths
        assert lengths is not None
        first_row = self._rows if _compiler(ready.plan).uses_rank else 0
        table = table_of_batch(parts, lengths, first_row, tuple(self._has_rows.tolist()))
        # Numbers of rows are others in each batch.
        if first_row:
            return put(group, np.array(table, np.int32), "replicated")
        return constant(group, "replicated", table, "int32")

    def _check(self, ready: ReadyCall, states: dict[Shared, VariableState], rows: int) -> None:
        """Check that a batch finds the values, and gives the shapes, that the first batch had."""
        name, new = ready.function.name, _compiler(ready.plan)
        if self._rows + rows > MOST_ROWS and (new.uses_rank or any(m.is_gathered for m in new.builder.outputs.merges)):
            raise ValueError(
                f"{name}.over: rows beyond {MOST_ROWS} have no number in int32. Do without row numbers, and without "
                f"statistics of all rows at once."
            )
        if self._first is None:
            return
        for variable, state in states.items():
            if self._states.get(variable) is not state:
                change = "was set" if variable in self._states else "came in place of another variable"
                raise SynkError(
                    f"{name}.over: {variable.name} {change} between two batches, but all of them make one answer. Do "
                    f"that before or after."
                )
        old = _compiler(self._first.plan)
        combined = [old.builder.outputs.leaves[i] for i in old.builder.combined]
        for leaf, a, b in zip(combined, old.states, new.states, strict=False):
            if (a.dtype, _entry_shape(leaf, a)) != (b.dtype, _entry_shape(leaf, b)):
                raise ValueError(
                    f"{name}.over: output{leaf.path} is {b.dtype}{list(b.shape)} on a replica in batch "
                    f"{self._batches}, but {a.dtype}{list(a.shape)} in the first: they do not combine. For a row an "
                    f'input row, use "concat".'
                )
        if old.builder.outputs.treedef != new.builder.outputs.treedef:
            raise ValueError(
                f"{name}.over: what it returns has another tree in batch {self._batches} than in the first one. Return "
                f"the same for any number of rows."
            )

    def result(self) -> PyTree:
        """Combine the replicas and return the answer."""
        ready, rows = self._first, self._rows
        if ready is None:
            raise ValueError(f"{self._function.name}.over: there was no batch. An answer needs at least one row.")
        plan, compiler, name = ready.plan, _compiler(ready.plan), self._function.name
        check_row_count(name, plan.least_rows, (rows,))
        outputs = self._joined(compiler)
        made = [i for i in plan.result.picked if outputs[i] is None]
        if made:
            for i, whole in zip(made, self._combined(ready, made), strict=True):
                outputs[i] = whole
        values = [outputs[i] for i in plan.result.picked]
        if self._function.refuses_nan and not all(map(is_finite, values)):
            raise FloatingPointError(f"{name}.over: its outputs are not finite.")
        self._function.stats.calls += 1
        keys = zip(values, plan.result.keys, strict=True)
        return plan.result.tree([put(ready.group, value, "replicated") if key else value for value, key in keys])

    def _joined(self, compiler: Compiler) -> list[Any]:
        """Make the outputs of the entries of all batches, in NumPy's arrays; None stands for all others."""
        while self._under_way:
            self._fetch_oldest()
        # States without elements have not travelled.
        shapes = compiler.builder.state_shapes({True: self._rows, False: self._parts})
        entries = {i: np.zeros(shapes[i].shape, shapes[i].dtype) for i in compiler.builder.kept}
        entries |= {i: np.concatenate(self._entries.pop(i)) for i in compiler.kept}
        wholes = compiler.epilogue.finish_joined(entries)
        return [None if whole is None else np.require(whole, requirements="W") for whole in wholes]

    def _combined(self, ready: ReadyCall, made: list[int]) -> list[jax.Array]:
        """Make these outputs of the sums of all replicas."""
        group, compiler = ready.group, _compiler(ready.plan)
        with LOCK:
            program = self._site.plans.kept(group, ("over", ready.plan), lambda: compiler.compile_over(made))
            rows = constant(group, "replicated", self._rows, jnp.result_type(float).name)
            present = constant(group, "replicated", tuple(self._has_rows.tolist()), "bool")
            return run(self._function.name, program, [self._sums, [rows, present]])


def _compiler(plan: CallPlan) -> Compiler:
    assert plan.compiler is not None
    return plan.compiler


def _entry_shape(leaf: Any, state: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the shape of a state, without the axis of rows if it has one."""
    return state.shape[1:] if leaf.reduction.has_row_entries else state.shape
