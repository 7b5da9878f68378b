"""Check: whether the parallel answer of a call is equal to the serial one."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._base.errors import LawError, SynkError, in_a_line, listed, warn
from .._call.binding import BoundArguments, CallOptions
from .._call.execute import Outcome, evaluate
from .._call.feed import is_stale, prepare
from .._call.parts import split_into_launches
from .._call.plan import CallPlan, PlanCache, Site, site_of
from .._call.spec import FunctionSpec
from .._data.dataset import Data, is_written_behind
from .._data.process_rows import ProcessLocalRows
from .._reductions.reduction import REDUCTIONS
from .._reductions.wire import largest_error
from .._runtime.dispatch import LOCK
from .compare import Tolerance, difference, widened
from .diagnosis import COLLECTIVE, UnequalOutput, finding, likely_cause
from .serial import CallRows, Runner


def check(function: FunctionSpec, runner: Runner, tolerance: Tolerance) -> None:
    """Run a call on the replicas and on one device from the same state; raise LawError naming what differs."""
    with LOCK:
        # `function` is the function of calls, whose plans a change of a global would leave stale. The runner's gathers
        # all outputs.
        if is_stale(site_of(function, runner.plans, runner.home), runner.bound, runner.options):
            raise LawError(
                f"{function.name}: something that it reads from outside has changed since it was traced, as under "
                f"jax.jit: a number, an array, a flag, or which variable it uses. Pass what changes as an argument."
            )
        # Outputs are compared before any `then`: what `then` makes of a wrong sum would name another culprit.
        mapping = replace(runner.function, then=None)
        # Without wires and blocks, which round in their own way. Both have a check of their own below.
        runner = replace(runner, function=runner.function.exact())
        one, many = runner.run_both(mapping.exact())
        _check_same(runner, mapping, many)
        # If an output differs, what follows from it differs as well, and needs no line.
        lines = list(_unequal_outputs(runner, one, many, tolerance)) or _unequal_after(runner, one, many, tolerance)
        # Reading rows back from the devices takes long. A difference calls for it; so does one replica, whose check
        # may show none.
        if lines or runner.home.size == 1:
            _check_data(runner)
        if lines:
            text = "\n  ".join(dict.fromkeys(lines))
            raise LawError(
                f"{function.name}: on {runner.parallel.group.size} replicas the answer is not the serial one.\n"
                f"  {text}\n  {function.advice}"
            )
        if mapping.blocks is not None:
            _check_blocks(runner, mapping)
        if mapping.wires is not None:
            check_wires(runner, mapping, tolerance)
        _warn_of_nan(runner, mapping, one)


def check_first_call(site: Site, bound: BoundArguments, options: CallOptions, plan: CallPlan | None) -> None:
    """Check a call, of which there is no plan under a trace, or say once why it is left unchecked."""
    # The law of a batch of `over` is that of a call.
    function = replace(site.function, is_over=False)
    try:
        if plan is None:
            raise SynkError("it is called under a trace")
        # "first", "stack" and callables depend on how rows are divided, and so do ranks, by design.
        leaves = [leaf for leaf in plan.outputs.results if not leaf.reduction.is_lawful]
        ops = {f"the op {leaf.reduction.name!r}" for leaf in leaves if function.name_of_output(leaf.path)[1]}
        alone = [update.variable for update in plan.updates if update.depends_on is None]
        kept = {f"updates of {variable.name} on each replica" for variable in alone if variable not in plan.held}
        if apart := ops | plan.uses_rank | kept:
            raise SynkError(f"the law does not speak of {', '.join(sorted(apart))}")
        check(function, Runner(function.gathering(), site.plans, bound, options, site.home or site.group), Tolerance())
    except LawError:
        raise
    except Exception as error:
        line = f"synk: {function.name} is left unchecked by SYNK_CHECK=law: {in_a_line(error)}"
        # Once a function and group: a loop would print the line at every call.
        site.plans.kept(site.group, line, lambda: print(line, file=sys.stderr, flush=True) or line)


def _check_data(runner: Runner) -> None:
    for name, leaf in zip(runner.bound.spec.names, runner.bound.leaves, strict=True):
        if isinstance(leaf, Data) and is_written_behind(leaf, runner.home):
            raise LawError(
                f"{runner.function.name}: a call has other rows than the serial run.\n"
                f"  Argument {name}: the rows of {leaf.name} on the devices are not those of its array, which was "
                f"written to after they were sent. Write through the synk.data (data[:] = rows), or call its "
                f"set_value(array) after a write."
            )


def _warn_of_nan(runner: Runner, mapping: FunctionSpec, one: Outcome) -> None:
    """Warn of outputs, and updates of `fn`, that are NaN on one device and so, after a comparison, on the replicas."""
    names = [mapping.name_of_output(leaf.path)[0] for leaf in one.plan.outputs.results]
    values = list(one.leaves)
    for update in one.plan.updates:
        names += [f"{update.variable.name}{path}" for path in update.variable._spec.paths]
        values += update.variable._spec.storage.each_on_host(runner.serial.group, one.updates[update.variable])[0]
    nan = [name for name, value in zip(names, values, strict=True) if _is_nan(np.asarray(value))]
    if nan:
        warn(
            f"{mapping.name}.check: {listed(nan)}: all NaN, serially and on the replicas, so nothing was "
            f"compared there. Check from finite values, such as those before the first step; {mapping.name}.blame "
            f"finds what makes the NaN."
        )


def _is_nan(value: np.ndarray) -> bool:
    return value.size > 0 and jnp.issubdtype(value.dtype, jnp.inexact) and bool(np.isnan(value).all())


def _check_same(runner: Runner, mapping: FunctionSpec, many: Outcome) -> None:
    """Raise LawError unless outputs of the op "same" agree on all replicas bit for bit."""
    leaves = many.plan.outputs.results
    same = [i for i, leaf in enumerate(leaves) if leaf.reduction == REDUCTIONS["same"]]
    parts = _parts(runner, replace(mapping, per_part="all"))[0] if same else []
    for i in same:
        if len({part.tobytes() for part in parts[i]}) > 1:
            raise LawError(
                f'{mapping.name}: {mapping.name_of_output(leaves[i].path)[0]} combined by "same" differs between '
                f'replicas. Combine it by "mean", "sum" or another op, or communicate before {mapping.name} returns.'
            )


def _unequal_outputs(runner: Runner, one: Outcome, many: Outcome, tolerance: Tolerance) -> Iterator[str]:
    """Describe combined outputs that differ, before any `then`."""
    mapping, leaves = replace(runner.function, then=None), many.plan.outputs.results
    differing = [
        i
        for i, (leaf, a, b) in enumerate(zip(leaves, one.leaves, many.leaves, strict=True))
        if leaf.reduction.is_lawful and not tolerance.admits(a, b)
    ]
    parts, rows = _parts(runner, replace(mapping, per_part="all")) if differing else ([], np.zeros(0))
    # An op may match by chance, as "max" of parts that happen to be equal. In another order of the rows it seldom does
    # again.
    moved = _in_another_order(runner, mapping, many.plan, len(rows)) if differing else None
    seen = {""}
    for i in differing:
        name = mapping.name_of_output(leaves[i].path)
        serial, got = np.asarray(one.leaves[i]), np.asarray(many.leaves[i])
        values = [(parts[i], rows, serial)] + ([] if moved is None else [(moved[1][i], moved[2], moved[0][i])])
        output = UnequalOutput(leaves[i], name, serial, got, values, many.plan.narrowest)
        # What a step computes beside its loss, as the gradient, differs for the same cause.
        is_asked = name[1] or len(seen) == 1
        cause = partial(_cause, runner, mapping, (many.plan, i)) if is_asked else lambda tolerance: None
        line, _, why = finding(output, tolerance, cause).partition(" Likely cause: ")
        yield line if why in seen else f"{line} Likely cause: {why}"
        seen.add(why)


def _parts(runner: Runner, raw: FunctionSpec) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the parts of every output, those with an entry a row joined, and how many rows each part has."""
    ready = runner.ready(runner.parallel, raw)
    outcome = evaluate(ready)
    size, lengths = ready.group.size, ready.rows.lengths
    rows = [1] * size
    if lengths is not None:
        by_launch = split_into_launches(lengths, ready.num_slices)
        rows = [parts.counts[rank] for rank in range(size) for parts in by_launch if parts.counts[rank]]
    return [np.asarray(leaf) for leaf in outcome.leaves], np.array(rows, np.float64)


def _in_another_order(
    runner: Runner, mapping: FunctionSpec, plan: CallPlan, count: int
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray] | None:
    rows = _rows_to_choose(runner, mapping, plan)
    if rows is None:
        return None
    every = np.arange(len(rows.positions))
    # Every count-th row, so that each part gets rows of all parts.
    bound, options = rows.call_of(np.concatenate([every[start::count] for start in range(count)]))
    moved = replace(runner, bound=bound, options=options._replace(num_slices=runner.options.num_slices))
    serial = [np.asarray(leaf) for leaf in moved.run(moved.serial, mapping).leaves]
    return serial, *_parts(moved, replace(mapping, per_part="all"))


def _rows_to_choose(runner: Runner, mapping: FunctionSpec, plan: CallPlan) -> CallRows | None:
    """Return the rows of a call if the function may be run on any of them, in any order."""
    bound = runner.bound
    is_local = any(isinstance(leaf, ProcessLocalRows) for leaf in bound.leaves)
    if is_local or any(bound.spec.overlaps) or plan.held or not bound.spec.scattered:
        return None
    return None if runner.options.batch_s is not None else CallRows(bound, runner.ready(runner.serial, mapping).rows)


def _cause(runner: Runner, mapping: FunctionSpec, where: tuple[CallPlan, int], tolerance: Tolerance) -> str | None:
    """Find what rows do to each other in an output of a plan, in words; None if that cannot be told."""
    plan, output = where
    if plan.communicates:
        return COLLECTIVE
    rows = _rows_to_choose(runner, mapping, plan)
    if rows is None:
        return None

    def run(index: np.ndarray) -> np.ndarray:
        ready = prepare(runner.serial._replace(function=mapping), *rows.call_of(index))
        return np.asarray(evaluate(ready).leaves[output])

    try:
        return likely_cause(run, len(rows.positions), tolerance)
    except Exception:
        # The function may refuse other numbers of rows.
        return None


def _unequal_after(runner: Runner, one: Outcome, many: Outcome, tolerance: Tolerance) -> list[str]:
    """Describe results of `then`, and updates, that differ although outputs are equal."""
    function = runner.function
    if function.then is None:
        return list(_unequal_results(runner, one, many, tolerance))
    lines = list(_unequal_results(runner, *runner.run_both(function), tolerance))
    if not lines:
        return lines
    # Gradients that should be 0 differ by rounding. An optimizer that divides by their size, as Adam does
    # (https://arxiv.org/abs/1412.6980), makes whole steps of that. So `then` runs again, after the same outputs.
    # As results of a `then`, all outputs lie on every replica.
    passing = replace(function, then=lambda *outputs, **others: outputs)
    many = replace(runner, plans=PlanCache()).run(runner.parallel, passing)
    outputs = many.plan.result.tree([jnp.asarray(np.asarray(leaf)) for leaf in many.leaves])

    def with_equal_outputs(*args: Any, **kwargs: Any) -> Any:
        function.fn(*args, **kwargs)  # for the variables that it updates
        return outputs

    # Every replica returns the outputs whole, so "first" hands them on to `then` bit for bit.
    equal = replace(function, fn=with_equal_outputs, ops=REDUCTIONS["first"])
    again = replace(runner, plans=PlanCache(), options=runner.options._replace(num_slices=1))
    return list(_unequal_results(again, *again.run_both(equal), tolerance))


def _unequal_results(runner: Runner, one: Outcome, many: Outcome, tolerance: Tolerance) -> Iterator[str]:
    """Describe results of `then`, and updates, that differ."""
    if runner.function.then is not None:
        for path, a, b in zip(one.plan.result.paths, one.leaves, many.leaves, strict=True):
            if not tolerance.admits(a, b):
                yield f"result{path} of then: {difference(a, b)}."
    for update in many.plan.updates:
        variable = update.variable
        storage = variable._spec.storage
        (whole,) = storage.each_on_host(runner.serial.group, one.updates[variable])
        by_rank = storage.each_on_host(runner.parallel.group, many.updates[variable])
        for i, path in enumerate(variable._spec.paths):
            a, got = whole[i], [leaves[i] for leaves in by_rank]
            wrong = [rank for rank, value in enumerate(got) if not tolerance.admits(a, value)]
            if wrong:
                hint = "; update it in then, from combined outputs." if update.depends_on is None else "."
                yield f"{variable.name}{path} updated on replica {wrong[0]}: {difference(a, got[wrong[0]])}{hint}"


def _check_blocks(runner: Runner, mapping: FunctionSpec) -> None:
    """Raise LawError unless the outputs of a function with `blocks=` agree bit for bit with those on one device."""
    one, many = runner.run_both(mapping)
    for leaf, a, b in zip(many.plan.outputs.results, one.leaves, many.leaves, strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            name = mapping.name_of_output(leaf.path)[0]
            raise LawError(f"{mapping.name}: {name} has other bits on one device, in spite of blocks=.")


def check_wires(runner: Runner, mapping: FunctionSpec, tolerance: Tolerance) -> None:
    """Compare sums that travel narrowly with sums that do not; raise LawError if rounding explains no such gap."""
    exact = replace(mapping, wires=None)
    one, many = runner.run(runner.parallel, exact), runner.run(runner.parallel, mapping)
    parts, _ = _parts(runner, replace(exact, per_part="sums"))
    for i, (leaf, a, b) in enumerate(zip(many.plan.outputs.results, one.leaves, many.leaves, strict=True)):
        wire = leaf.wire
        if wire is None or tolerance.admits(a, b):
            continue
        # The exact sum rounds as well: leave a few units in the last place for the order of its terms.
        units, allowed = 4 * jnp.finfo(leaf.dtype).eps, largest_error(wire, leaf.reduction.name, parts[i])
        exactly, got = widened(a, b)
        is_near = np.isclose(got, exactly, rtol=units, atol=allowed)
        # A number that is not finite turns those with which it shares a scale to NaN.
        is_lost = np.isnan(got) & (not np.isfinite(parts[i]).all())
        if not (is_near | is_lost).all():
            raise LawError(
                f"{mapping.name}: {mapping.name_of_output(leaf.path)[0]} travels as {wire!r}, and is further off than "
                f"that explains: {difference(a, b).replace('serially', 'travelling as it is')}."
            )
