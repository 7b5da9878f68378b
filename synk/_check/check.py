"""Check: the serial answer, and whether the parallel one is equal to it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import LawError
from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions
from .._call.execute import Outcome, ReadyCall, evaluate
from .._call.plan import PlanCache, Site
from .._call.prepare import is_stale, prepare
from .._call.rows import launches
from .._call.spec import FunctionSpec
from .._call.traces import View, cannot_update_rows, shared_in
from .._data.process_rows import ProcessLocalRows
from .._reductions.reduction import REDUCTIONS
from .._reductions.wire import largest_error, may_be_nan
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import replica_to_host
from .._runtime.group import Group
from .._runtime.layout import put
from .._variables.access import commit_all, state_of_copies, state_of_rows
from .._variables.pieces import whole_on_host
from .._variables.state import VariableState
from .._variables.variable import Shared
from .compare import Tolerance, difference
from .diagnosis import Finding, UnequalOutput, finding, likely_cause
from .host_rows import HostRows
from .views import one_device, split_at, view_of_one, view_of_simulated


@dataclass(frozen=True)
class Runner:
    """Runs one call of a function without committing or donating anything."""

    function: FunctionSpec  # what is run
    plans: PlanCache  # the function's own, also for views: a plan serves wherever an equal state is met
    bound: BoundArguments  # its arguments
    options: CallOptions  # which rows
    home: Group  # the group that shared variables and data live in

    @cached_property
    def serial(self) -> Site:
        """One device, for all rows."""
        view = view_of_one(self.home, self.options.batch_s)
        if self.home._is_multi_process:  # replicas give each other rows now, and not in a trace
            for variable in (*shared_in(self.function.fn), *shared_in(self.function.then)):
                if variable._state.rows_per_replica is not None:
                    view(variable)
        return self._site(one_device(self.home), view)

    @cached_property
    def parallel(self) -> Site:
        """The replicas; one is the serial program itself, but two simulated ones are not."""
        if self.home.size > 1:
            return self._site(self.home)
        group = self.home._simulated(2)
        view = view_of_simulated(self.home, group, self.options.batch_s)
        return self._site(group, view)

    def _site(self, group: Group, view: View | None = None) -> Site:
        data_group = None if view is None else self.home
        return Site(self.function, self.plans, group, view, data_group, may_donate=False, retraces=True)

    def ready(self, site: Site, function: FunctionSpec) -> ReadyCall:
        """Prepare a call of the function, or of a function made of it."""
        options = self.options._replace(num_slices=1) if site is self.serial else self.options
        return prepare(replace(site, function=function), self.bound, options)

    def run(self, site: Site, function: FunctionSpec) -> Outcome:
        """Its outcome."""
        drain()
        outcome = evaluate(self.ready(site, function), site.view)
        for variable, state in outcome.updates.items():
            if self.options.batch_s is not None and state.rows_per_replica:
                raise cannot_update_rows(function.name, variable.name)
        return outcome


def run_serial(runner: Runner, update: bool) -> PyTree:
    """Run once on one device; commit on request."""
    with LOCK:
        outcome, home = runner.run(runner.serial, runner.function), runner.home
        if outcome.is_refused:
            raise FloatingPointError(f"{runner.function.name}: its outputs or updates are not finite.")
        states = []
        for variable, state in outcome.updates.items() if update else ():
            held = variable._state.rows_per_replica
            one = _on_host(variable, state, runner.serial.group)[0]
            if held is None:
                states.append((variable, state_of_copies(variable, one)))
            else:
                states.append((variable, state_of_rows(variable, split_at([np.asarray(leaf) for leaf in one], held))))
        commit_all(states)
        # Replicated, as a call's results are: what lies on one device cannot meet those in one jnp operation.
        leaves = [put(home, leaf, "replicated") for leaf in outcome.leaves]
    return outcome.plan.result.tree(leaves)


def refuse_stale(function: FunctionSpec, runner: Runner) -> None:
    """LawError where calls of a function go on with what it captured when it was traced, and that has changed."""
    with LOCK:
        if is_stale(Site(function, runner.plans, runner.home), runner.bound, runner.options):
            raise LawError(
                f"{function.name}: something that it reads from outside has changed since it was traced, as under "
                f"jax.jit: a number, an array, a flag, or which variable it uses. Pass what changes as an argument."
            )


def check(runner: Runner, mapping: FunctionSpec, tolerance: Tolerance) -> None:
    """Compare both ways from one state; LawError names what differs."""
    with LOCK:
        function, serial, parallel = runner.function, runner.serial, runner.parallel
        many, one = runner.run(parallel, mapping), runner.run(serial, mapping)
        outputs = list(_differing_outputs(runner, mapping, one, many, tolerance))
        found = [each.words for each in outputs]
        if function.then is not None and not (outputs and function.output_names):  # else what follows differs too
            one, many = runner.run(serial, function), runner.run(parallel, function)
            after = list(_differing_results(runner, one, many, tolerance))
            if after and all(each.is_rounding for each in outputs):
                after = list(_differing_results(runner, *_of_the_same_outputs(runner, one), tolerance))
            found += after
        elif function.then is None and not outputs:
            found += _differing_updates(one, many, tolerance, serial.group, parallel.group)
    if found:
        lines = "\n  ".join(dict.fromkeys(found))
        raise LawError(
            f"{function.name}: on {parallel.group.size} replicas the answer is not the serial one.\n  {lines}\n"
            f"  {function.advice}"
        )


def check_blocks(runner: Runner, mapping: FunctionSpec, exact: FunctionSpec, tolerance: Tolerance) -> None:
    """Compare outputs of blocks on all replicas with those of one, bit for bit, and with the same without blocks."""
    with LOCK:
        many, one = runner.run(runner.parallel, mapping), runner.run(runner.serial, mapping)
        plain = runner.run(runner.serial, exact)
    for leaf, a, b, c in zip(many.plan.outputs.results, many.leaves, one.leaves, plain.leaves, strict=True):
        name = mapping.name_of_output(leaf.path)[0]
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise LawError(f"{mapping.name}: {name} has other bits on one device, in spite of blocks=.")
        if not tolerance.admits(c, b, leaf.reduced.dtype):
            raise LawError(f"{mapping.name}: {name} of blocks={mapping.blocks}: {difference(c, b)}.")


def check_wires(runner: Runner, mapping: FunctionSpec, tolerance: Tolerance) -> None:
    """Compare outputs whose sums travel narrowly with the same that do not; LawError names what is further off than
    that explains."""
    exact = replace(mapping, wires=None)
    with LOCK:
        one, many = runner.run(runner.parallel, exact), runner.run(runner.parallel, mapping)
        parts = _parts(runner, replace(exact, per_part="sums"))
    for i, (leaf, a, b) in enumerate(zip(many.plan.outputs.results, one.leaves, many.leaves, strict=True)):
        wire = leaf.reduced.wire
        if wire is None or parts is None or tolerance.admits(a, b, leaf.reduced.dtype):
            continue
        rounding = 4 * float(jnp.finfo(leaf.reduced.dtype).eps)
        exactly, got = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):
            allowed = largest_error(wire, leaf.op, parts[0][i]) + rounding * np.abs(exactly)
            is_near = (got == exactly) | (np.abs(got - exactly) <= allowed)
        if not (is_near | (np.isnan(got) & may_be_nan(wire, parts[0][i]))).all():
            raise LawError(
                f"{mapping.name}: {mapping.name_of_output(leaf.path)[0]} travels as {wire!r}, and is further off than "
                f"that explains: {difference(a, b).replace('serially', 'travelling as it is')}."
            )


def _differing_outputs(
    runner: Runner, mapping: FunctionSpec, one: Outcome, many: Outcome, tolerance: Tolerance
) -> Iterator[Finding]:
    """Combined outputs, before any then; each that differs, with the ops that would have matched."""
    leaves = many.plan.outputs.results
    differing = [
        i
        for i, (leaf, a, b) in enumerate(zip(leaves, one.leaves, many.leaves, strict=True))
        if leaf.reduced.reduction.is_lawful and not tolerance.admits(a, b, leaf.reduced.dtype)
    ]
    parts = _parts(runner, replace(mapping, per_part="all")) if differing else None
    for i in differing:
        own = None if parts is None else (parts[0][i], parts[1])
        a, b = np.asarray(one.leaves[i]), np.asarray(many.leaves[i])
        output = UnequalOutput(leaves[i], mapping.name_of_output(leaves[i].path), a, b, own, many.plan.narrowest)
        yield finding(output, tolerance, partial(_cause, runner, mapping, i))


def _differing_results(runner: Runner, one: Outcome, many: Outcome, tolerance: Tolerance) -> Iterator[str]:
    """What differs of a function with then: what that returns, and updates."""
    treedef = one.plan.result.treedef
    paths = tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
    for (path, _), a, b in zip(paths, one.leaves, many.leaves, strict=True):
        if not tolerance.admits(a, b):
            yield f"result{keystr(path)} of then: {difference(a, b)}."
    yield from _differing_updates(one, many, tolerance, runner.serial.group, runner.parallel.group)


def _of_the_same_outputs(runner: Runner, before: Outcome) -> tuple[Outcome, Outcome]:
    """Both ways again, then on one device after the very outputs of the replicas: of what rounding alone makes, as
    gradients that should be 0 do, some optimizers make whole steps. The outcomes are of the plan that was before."""
    function, then = runner.function, runner.function.then
    assert then is not None

    def beside(*outputs: Any, **others: Any) -> tuple[Any, Any]:
        outputs = jax.lax.optimization_barrier(outputs)
        return outputs, then(*outputs, **others)

    again = replace(runner, function=replace(function, then=beside), plans=PlanCache())
    many = again.run(again.parallel, again.function)
    outputs, _ = many.plan.result.tree([jnp.asarray(np.asarray(leaf)) for leaf in many.leaves])

    def given(*args: Any, **kwargs: Any) -> Any:
        function.fn(*args, **kwargs)  # for what it updates
        return outputs

    same = replace(again.function, fn=given, ops=REDUCTIONS["first"])
    again = replace(again, function=same, plans=PlanCache())
    count = len(jax.tree.leaves(outputs))
    one = again.run(again.serial, same)
    one, many = [each._replace(leaves=each.leaves[count:], plan=before.plan) for each in (one, many)]
    return one, many


def _cause(runner: Runner, mapping: FunctionSpec, output: int, tolerance: Tolerance) -> str | None:
    """What rows do to each other in an output; None where it cannot be told."""
    bound, name, home = runner.bound, mapping.name, runner.home
    if any(bound.spec.overlaps) or runner.options.batch_s is not None or not bound.spec.scattered:
        return None
    if any(isinstance(leaf, ProcessLocalRows) for leaf in bound.leaves):
        return None
    rows = HostRows(bound, name, runner.options, home)

    def run(index: np.ndarray) -> np.ndarray:
        ready = prepare(replace(runner.serial, function=mapping), rows.take(index), CallOptions())
        return np.asarray(evaluate(ready, runner.serial.view).leaves[output])

    try:
        return likely_cause(run, len(rows), tolerance)
    except Exception:  # of other numbers of rows it has no answer, or another one
        return None


def _parts(runner: Runner, raw: FunctionSpec) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Every output's parts as they come, and the rows of each; None where their shapes differ."""
    try:
        ready = runner.ready(runner.parallel, raw)
        outcome = evaluate(ready, runner.parallel.view)
    except ValueError:
        return None
    size, lengths = runner.parallel.group.size, ready.rows.lengths
    rows = [1] * size
    if lengths is not None:
        by_launch = launches(lengths, ready.num_slices)
        rows = [each.counts[rank] for rank in range(size) for each in by_launch if each.counts[rank]]
    return [np.asarray(leaf) for leaf in outcome.leaves], np.array(rows, np.float64)


def _on_host(variable: Shared, state: VariableState, group: Group) -> list[list[np.ndarray]]:
    """The stored leaves of each replica; of what is equal, or lies in pieces, or holds rows, those of all."""
    if variable._spec.is_cut is not None:
        return [[*whole_on_host(variable._spec, group, state.leaves)]]
    held = state.rows_per_replica or [None] * group.size
    ranks = range(group.size if state.layout == "stacked" else 1)
    by_rank = [[replica_to_host(group, leaf, state.layout, r, held[r]) for leaf in state.leaves] for r in ranks]
    if state.rows_per_replica is None:
        return by_rank
    return [[np.concatenate(leaves) for leaves in zip(*by_rank, strict=True)]]


def _differing_updates(
    one: Outcome, many: Outcome, tolerance: Tolerance, serial: Group, parallel: Group
) -> Iterator[str]:
    for update in many.plan.updates:
        variable, new, want = update.variable, many.updates[update.variable], one.updates[update.variable]
        whole, by_rank = _on_host(variable, want, serial)[0], _on_host(variable, new, parallel)
        unpack = variable._spec.unpack
        for i, path in enumerate(variable._spec.paths):
            a, got = unpack(whole)[i], [unpack(leaves)[i] for leaves in by_rank]
            wrong = [rank for rank, value in enumerate(got) if not tolerance.admits(a, value)]
            if wrong:
                hint = "; update it in then, from combined outputs." if update.depends_on is None else "."
                yield f"{variable.name}{path} updated on replica {wrong[0]}: {difference(a, got[wrong[0]])}{hint}"
