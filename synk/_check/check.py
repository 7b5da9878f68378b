"""Check: whether the parallel answer of a call is equal to the serial one."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import LawError
from .._call.binding import CallOptions
from .._call.execute import Outcome, evaluate
from .._call.parts import split_into_launches
from .._call.plan import PlanCache, Site
from .._call.prepare import is_stale, prepare
from .._call.spec import FunctionSpec
from .._data.process_rows import ProcessLocalRows
from .._reductions.reduction import REDUCTIONS
from .._reductions.wire import largest_error, may_be_nan
from .._runtime.dispatch import LOCK
from .._runtime.group import Group
from .compare import Tolerance, difference
from .diagnosis import UnequalOutput, finding, likely_cause
from .serial import HostRows, Runner, stored_on_host


def refuse_stale(function: FunctionSpec, runner: Runner) -> None:
    """Raise LawError if calls go on with something that the function captured when it was traced, and that changed."""
    with LOCK:
        if is_stale(Site(function, runner.plans, runner.home), runner.bound, runner.options):
            raise LawError(
                f"{function.name}: something that it reads from outside has changed since it was traced, as under "
                f"jax.jit: a number, an array, a flag, or which variable it uses. Pass what changes as an argument."
            )


def check(runner: Runner, mapping: FunctionSpec, tolerance: Tolerance) -> None:
    """Run a call on the replicas and on one device from the same state; raise LawError naming what differs.

    `mapping` is the function without its `then`.
    """
    with LOCK:
        function, serial, parallel = runner.function, runner.serial, runner.parallel
        many, one = runner.run(parallel, mapping), runner.run(serial, mapping)
        outputs = list(_differing_outputs(runner, mapping, one, many, tolerance))
        lines = [words for words, _ in outputs]
        # If an output with a name of its own differs, what follows from it differs as well, and needs no line.
        if function.then is not None and not (outputs and function.output_names):
            one, many = runner.run(serial, function), runner.run(parallel, function)
            after = list(_differing_results(runner, one, many, tolerance))
            if after and all(is_rounding for _, is_rounding in outputs):
                one, many = _run_after_equal_outputs(runner, one)
                after = list(_differing_results(runner, one, many, tolerance))
            lines += after
        elif function.then is None and not outputs:
            lines += _differing_updates(one, many, tolerance, serial.group, parallel.group)
    if lines:
        text = "\n  ".join(dict.fromkeys(lines))
        raise LawError(
            f"{function.name}: on {parallel.group.size} replicas the answer is not the serial one.\n  {text}\n"
            f"  {function.advice}"
        )


def check_blocks(runner: Runner, mapping: FunctionSpec, exact: FunctionSpec, tolerance: Tolerance) -> None:
    """Compare outputs of blocks with those on one device, bit for bit, and with those of `exact`, without blocks."""
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
    """Compare sums that travel narrowly with sums that do not; raise LawError if rounding explains no such gap."""
    exact = replace(mapping, wires=None)
    with LOCK:
        one, many = runner.run(runner.parallel, exact), runner.run(runner.parallel, mapping)
        parts = _parts(runner, replace(exact, per_part="sums"))
    for i, (leaf, a, b) in enumerate(zip(many.plan.outputs.results, one.leaves, many.leaves, strict=True)):
        wire = leaf.reduced.wire
        if wire is None or parts is None or tolerance.admits(a, b, leaf.reduced.dtype):
            continue
        # The exact sum rounds as well: leave a few units in the last place for the order of its terms.
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
) -> Iterator[tuple[str, bool]]:
    """Describe combined outputs that differ, before any `then`, and tell whether rounding explains each."""
    leaves = many.plan.outputs.results
    differing = [
        i
        for i, (leaf, a, b) in enumerate(zip(leaves, one.leaves, many.leaves, strict=True))
        if leaf.reduced.reduction.is_lawful and not tolerance.admits(a, b, leaf.reduced.dtype)
    ]
    parts = _parts(runner, replace(mapping, per_part="all")) if differing else None
    for i in differing:
        output = UnequalOutput(
            leaves[i],
            mapping.name_of_output(leaves[i].path),
            np.asarray(one.leaves[i]),
            np.asarray(many.leaves[i]),
            None if parts is None else (parts[0][i], parts[1]),
            many.plan.narrowest,
        )
        yield finding(output, tolerance, partial(_cause, runner, mapping, i))


def _differing_results(runner: Runner, one: Outcome, many: Outcome, tolerance: Tolerance) -> Iterator[str]:
    """Describe results of `then`, and updates, that differ."""
    treedef = one.plan.result.treedef
    paths = tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
    for (path, _), a, b in zip(paths, one.leaves, many.leaves, strict=True):
        if not tolerance.admits(a, b):
            yield f"result{keystr(path)} of then: {difference(a, b)}."
    yield from _differing_updates(one, many, tolerance, runner.serial.group, runner.parallel.group)


def _run_after_equal_outputs(runner: Runner, before: Outcome) -> tuple[Outcome, Outcome]:
    """Run `then` both ways again, both times after the outputs of the replicas; the outcomes have the plan of `before`.

    Gradients that should be 0 differ by rounding. An optimizer that divides by their size, as Adam does
    (https://arxiv.org/abs/1412.6980), makes whole steps of that.
    """
    function, then = runner.function, runner.function.then
    assert then is not None

    def beside(*outputs: Any, **others: Any) -> tuple[Any, Any]:
        # Keeps XLA from fusing `then` into `fn`, which would round the outputs in another way.
        outputs = jax.lax.optimization_barrier(outputs)
        return outputs, then(*outputs, **others)

    again = replace(runner, function=replace(function, then=beside), plans=PlanCache())
    many = again.run(again.parallel, again.function)
    outputs, _ = many.plan.result.tree([jnp.asarray(np.asarray(leaf)) for leaf in many.leaves])

    def with_equal_outputs(*args: Any, **kwargs: Any) -> Any:
        function.fn(*args, **kwargs)  # for the variables that it updates
        return outputs

    same = replace(again.function, fn=with_equal_outputs, ops=REDUCTIONS["first"])
    again = replace(again, function=same, plans=PlanCache())
    count = len(jax.tree.leaves(outputs))
    one = again.run(again.serial, same)
    one, many = (outcome._replace(leaves=outcome.leaves[count:], plan=before.plan) for outcome in (one, many))
    return one, many


def _cause(runner: Runner, mapping: FunctionSpec, output: int, tolerance: Tolerance) -> str | None:
    """Find what rows do to each other in an output, in words; None if that cannot be told."""
    bound, home = runner.bound, runner.home
    if any(bound.spec.overlaps) or runner.options.batch_s is not None or not bound.spec.scattered:
        return None
    if any(isinstance(leaf, ProcessLocalRows) for leaf in bound.leaves):
        return None
    rows = HostRows(Site(runner.function, runner.plans, home), bound, runner.options)

    def run(index: np.ndarray) -> np.ndarray:
        ready = prepare(replace(runner.serial, function=mapping), rows.take(index), CallOptions())
        return np.asarray(evaluate(ready, runner.serial.view).leaves[output])

    try:
        return likely_cause(run, len(rows), tolerance)
    except Exception:
        # The function may refuse other numbers of rows.
        return None


def _parts(runner: Runner, raw: FunctionSpec) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Return the parts of every output, and how many rows each part has; None if the parts' shapes differ."""
    try:
        ready = runner.ready(runner.parallel, raw)
        outcome = evaluate(ready, runner.parallel.view)
    except ValueError:
        return None
    size, lengths = runner.parallel.group.size, ready.rows.lengths
    rows = [1] * size
    if lengths is not None:
        by_launch = split_into_launches(lengths, ready.num_slices)
        rows = [parts.counts[rank] for rank in range(size) for parts in by_launch if parts.counts[rank]]
    return [np.asarray(leaf) for leaf in outcome.leaves], np.array(rows, np.float64)


def _differing_updates(
    one: Outcome, many: Outcome, tolerance: Tolerance, serial: Group, parallel: Group
) -> Iterator[str]:
    """Describe updates of variables that differ."""
    for update in many.plan.updates:
        variable, new, want = update.variable, many.updates[update.variable], one.updates[update.variable]
        whole, by_rank = stored_on_host(variable, want, serial)[0], stored_on_host(variable, new, parallel)
        unpack = variable._spec.unpack
        for i, path in enumerate(variable._spec.paths):
            a, got = unpack(*whole)[i], [unpack(*leaves)[i] for leaves in by_rank]
            wrong = [rank for rank, value in enumerate(got) if not tolerance.admits(a, value)]
            if wrong:
                hint = "; update it in then, from combined outputs." if update.depends_on is None else "."
                yield f"{variable.name}{path} updated on replica {wrong[0]}: {difference(a, got[wrong[0]])}{hint}"
