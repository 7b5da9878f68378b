"""Over: one answer over the rows of many batches.

States add up on the replicas, and combine once, at the end. Entries of rows and parts are joined on the host.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.errors import SynkError
from .._base.pytree import PyTree
from .._call.compiler import Compiler, RunsAlone
from .._call.execute import check_variables, flags_of, launch, leaves_taken, run, run_parts, values_of_calls
from .._call.feed import Fed, check_row_count
from .._call.parts import MOST_ROWS, split_into_launches, table_of_batch
from .._call.plan import CallPlan, Site
from .._call.spec import Repeat
from .._data.transfer import PartRows
from .._runtime.dispatch import LOCK
from .._runtime.executable import translate_peer_errors
from .._runtime.layout import constant, put
from .._tracing.nan_origin import is_finite
from .._variables.state import VariableState
from .._variables.variable import Shared
from .per_launch import launch_several
from .waiting import Waiting

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
        self._first: CallPlan | None = None
        self._states: dict[Shared, VariableState] = {}
        self._sums: list[jax.Array] = []
        # Launches of batches whose entries are on their way to the host, and entries that are there, by states.
        self._under_way: deque[list[_Launched]] = deque()
        self._entries: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._batches = self._rows = self._parts = 0
        self._has_rows = np.zeros(site.group.size, bool)

    def add(self, calls: Sequence[Waiting], repeat: Repeat) -> None:
        """Run more batches, all by one program if that can be."""
        if any(calls[0].bound.spec.overlaps):
            raise ValueError(
                f"{self._function.name}.over: rows at the ends of batches have neighbours in others (synk.Overlap), "
                f"which over runs apart. Call the function on all rows."
            )
        while calls:
            with LOCK:
                calls = calls[self._start(calls, repeat) :]
            # The newest batches run meanwhile.
            while len(self._under_way) > repeat.most:
                self._fetch_oldest()

    def _start(self, calls: Sequence[Waiting], repeat: Repeat) -> int:
        """Start the programs of the first batch, or a program of several. Return of how many."""
        if repeat.most > 1:
            with suppress(RunsAlone):
                feds = (call.due(self._site) for call in calls)
                return len(launch_several(feds, len(calls), repeat, self._run_several)[0])
        launch(calls[0].due(self._site), self._run)
        return 1

    def _run(self, ready: Fed) -> None:
        reads, launched = self._begin(ready), list[_Launched]()

        def table(parts: PartRows) -> jax.Array:
            return self._place_table(ready, self._table(ready, parts, self._rows))

        for parts, sums, entries in run_parts(ready, reads, self._sums, table):
            self._sums = sums
            self._fetch_early(entries)
            launched.append((parts.counts, entries))
            self._note(parts)
        self._count(launched, ready.rows.lengths or ())

    def _run_several(self, calls: Sequence[Fed], repeat: Repeat) -> list[None]:
        """Launch a program of several batches, which adds to the sums."""
        ready = calls[0]
        lengths, reads = ready.rows.lengths or (), self._begin(ready, len(calls))
        parts, rows = split_into_launches(lengths, 1)[0], sum(lengths)
        values, tables = values_of_calls(calls, repeat), [self._table(ready, parts, self._rows)]
        self._note(parts)
        # After the first batch is noted: replicas that have rows in it have rows in all batches of the list.
        tables += [self._table(ready, parts, self._rows + i * rows) for i in range(1, repeat.most)]
        table = self._place_table(ready, tuple(tables))
        arguments: list[Sequence[Any]] = [*reads, self._sums, [*values, table, flags_of(ready, len(calls), repeat)]]
        results, size = run(self._function.name, ready.plan.last, arguments), len(self._sums)
        # The program may have overwritten the old sums, which it was given to donate.
        self._sums, entries = results[:size], results[size:]
        self._fetch_early(entries)
        count = len(entries) // repeat.most
        for i in range(len(calls)):
            self._count([(parts.counts, entries[i * count : (i + 1) * count])], lengths)
        return [None for _ in calls]

    def _begin(self, ready: Fed, batches: int = 1) -> list[list[jax.Array]]:
        """Check that batches go with those before. Return the leaves of variables that their programs take."""
        plan, lengths = ready.plan, ready.rows.lengths
        assert lengths is not None and plan.start is not None
        states = {variable: ready.state(variable) for variable in plan.accepts}
        check_variables(ready, states)
        self._check(ready, states, batches * sum(lengths))
        if self._first is None:
            self._sums = run(self._function.name, plan.start, [])
            self._first, self._states = ready.plan, states
        return leaves_taken(ready, states, plan.reads[0])

    def _note(self, parts: PartRows) -> None:
        self._has_rows |= np.array(parts.counts) > 0

    def _fetch_early(self, entries: list[jax.Array]) -> None:
        # Host memory is where CPU devices have them.
        for array in entries if self._site.group.platform != "cpu" else ():
            array.copy_to_host_async()

    def _count(self, launched: list[_Launched], lengths: tuple[int, ...]) -> None:
        self._under_way.append(launched)
        self._rows += sum(lengths)
        self._batches += 1
        self._parts += sum(len(counts) - counts.count(0) for counts, _ in launched)

    def _fetch_oldest(self) -> None:
        """Wait for the entries of the oldest batch under way, and list them in row order: by replica, then by slice."""
        assert self._first is not None
        launched, compiler, ranks = self._under_way.popleft(), _compiler(self._first), range(self._site.group.size)
        with translate_peer_errors(self._site.group):
            for at, i in enumerate(compiler.kept):
                most = None if compiler.states.reductions[i].has_row_entries else 1
                stacked = [(np.asarray(arrays[at]), counts) for counts, arrays in launched]
                self._entries[i] += [a[rank, : counts[rank]][:most] for rank in ranks for a, counts in stacked]

    def _table(self, ready: Fed, parts: PartRows, first_row: int) -> tuple[Any, ...]:
        """Return the table of parts for one launch of a batch whose first row has this number."""
        first_row = first_row if _compiler(ready.plan).uses_rank else 0
        return table_of_batch(parts, ready.rows.lengths or (), first_row, tuple(self._has_rows.tolist()))

    def _place_table(self, ready: Fed, table: tuple[Any, ...]) -> jax.Array:
        # Numbers of rows are others in each launch but the first of one batch.
        if (self._rows or ready.call.repeat) and _compiler(ready.plan).uses_rank:
            return put(ready.group, np.array(table, np.int32), "replicated")
        return constant(ready.group, "replicated", table, "int32")

    def _check(self, ready: Fed, states: dict[Shared, VariableState], rows: int) -> None:
        """Check that a batch finds the values, and gives the shapes, that the first batch had."""
        name, new = ready.function.name, _compiler(ready.plan)
        if self._rows + rows > MOST_ROWS and (new.uses_rank or any(m.is_gathered for m in new.traced.outputs.merges)):
            raise ValueError(
                f"{name}.over: rows beyond {MOST_ROWS} have no number in int32. Do without row numbers, and without "
                f"statistics of all rows at once."
            )
        if self._first is None:
            return
        for variable, state in states.items():
            # By identity, since any write makes a new state: to compare values would read them back.
            if self._states.get(variable) is not state:
                change = "was set" if variable in self._states else "came in place of another variable"
                raise SynkError(
                    f"{name}.over: {variable.name} {change} between two batches, but all of them make one answer. Do "
                    f"that before or after."
                )
        old = _compiler(self._first)
        combined = [old.traced.outputs.leaves[i] for i in old.traced.combined]
        for leaf, a, b in zip(combined, old.shapes, new.shapes, strict=False):
            if (a.dtype, _entry_shape(leaf, a)) != (b.dtype, _entry_shape(leaf, b)):
                raise ValueError(
                    f"{name}.over: output{leaf.path} is {b.dtype}{list(b.shape)} on a replica in batch "
                    f"{self._batches}, but {a.dtype}{list(a.shape)} in the first: they do not combine. For a row an "
                    f'input row, use "concat".'
                )
        if old.traced.outputs.treedef != new.traced.outputs.treedef:
            raise ValueError(
                f"{name}.over: what it returns has another tree in batch {self._batches} than in the first one. Return "
                f"the same for any number of rows."
            )

    def result(self) -> PyTree:
        plan, rows, name, group = self._first, self._rows, self._function.name, self._site.group
        if plan is None:
            raise ValueError(f"{name}.over: there was no batch. An answer needs at least one row.")
        compiler = _compiler(plan)
        # Of all rows together: a single batch may have fewer than a statistic such as top_k needs.
        check_row_count(name, plan.least_rows, (rows,))
        outputs = self._joined(compiler)
        made = [i for i in plan.result.picked if outputs[i] is None]
        if made:
            for i, whole in zip(made, self._combined(plan, made), strict=True):
                outputs[i] = whole
        values = [outputs[i] for i in plan.result.picked]
        if self._function.refuses_nan and not all(map(is_finite, values)):
            raise FloatingPointError(f"{name}.over: its outputs are not finite.")
        self._function.stats.calls += 1
        keys = zip(values, plan.result.keys, strict=True)
        return plan.result.tree([put(group, value, "replicated") if key else value for value, key in keys])

    def _joined(self, compiler: Compiler) -> list[Any]:
        """Make the outputs of the entries of all batches, in NumPy's arrays; None stands for all others."""
        while self._under_way:
            self._fetch_oldest()
        # States without elements have not travelled.
        kept, slots = compiler.states.kept, {True: self._rows, False: self._parts}
        shapes = compiler.states.shapes(slots) if kept else []
        entries = {i: np.zeros(shapes[i].shape, shapes[i].dtype) for i in kept}
        entries |= {i: np.concatenate(self._entries.pop(i)) for i in compiler.kept}
        wholes = compiler.epilogue.combination.finish_joined(entries)
        # A view of a part that came from a device is read-only, and results of a call are the user's to change.
        return [None if whole is None else np.require(whole, requirements="W") for whole in wholes]

    def _combined(self, plan: CallPlan, made: list[int]) -> list[jax.Array]:
        group, compiler = self._site.group, _compiler(plan)
        with LOCK:
            program = self._site.plans.kept(group, ("over", plan), lambda: compiler.compile_over(made))
            rows = constant(group, "replicated", self._rows, jnp.result_type(float).name)
            # A replica without any row has sums of nothing, which "max" or a mean must not count.
            present = constant(group, "replicated", tuple(self._has_rows.tolist()), "bool")
            return run(self._function.name, program, [self._sums, [rows, present]])


def _compiler(plan: CallPlan) -> Compiler:
    assert plan.compiler is not None
    return plan.compiler


def _entry_shape(leaf: Any, state: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the shape of a state, without the axis of rows if it has one."""
    return state.shape[1:] if leaf.reduction.has_row_entries else state.shape
