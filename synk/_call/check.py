"""Check: the serial answer, and whether the parallel one is equal to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from .._base.errors import LawError
from .._base.pytree import PyTree
from .._runtime.dispatch import LOCK
from .._runtime.executable import copy_to_replicas, replica_to_host
from .._runtime.group import Group, current_group
from .._runtime.layout import put
from .._variables.access import commit_all, state_of_leaves, state_of_rows
from .binding import BoundArguments
from .compare import Parts, Tolerance, difference, differing_results, matching_ops
from .execute import Outcome, evaluate
from .feeding import launches
from .inputs import RowRequest
from .plan import PlanCache
from .prepare import Where, prepare
from .spec import FunctionSpec
from .traces import View, cannot_update_rows, shared_in
from .views import one_device, split_at, view_of_one, view_of_simulated


@dataclass(frozen=True)
class Runner:
    """Runs one call of a function without committing or donating anything.

    Attributes:
      function: what is run.
      plans: of it.
      bound: its arguments.
      request: which rows.
      home: the group that shared variables and data live in.
    """

    function: FunctionSpec
    plans: PlanCache
    bound: BoundArguments
    request: RowRequest
    home: Group

    def run(self, group: Group, view: View | None, function: FunctionSpec | None = None) -> Outcome:
        """The outcome in a group, with a view of the variables there."""
        function = function or self.function
        if self.home.is_multi_process and view is not None:  # replicas give each other rows now, and not in a trace
            for fn in (function.fn, function.then):
                for variable in shared_in(fn):
                    if variable._state.rows_per_replica is not None:
                        view(variable)
        where = Where(group, view, None if view is None else self.home, may_donate=False)
        request = self.request if group is not one_device(self.home) else self.request._replace(num_slices=1)
        # Plans are kept by what a call depends on, so those of views serve where an equal state is met again.
        outcome = evaluate(prepare(function, self.plans, self.bound, request, None, where), view)
        for variable, state in outcome.updates.items():
            if self.request.batch_s is not None and state.rows_per_replica:
                raise cannot_update_rows(function.name, variable.name)
        return outcome

    def serial(self, function: FunctionSpec | None = None) -> Outcome:
        """The outcome on one device, over all rows."""
        return self.run(one_device(self.home), view_of_one(self.home, self.request.batch_s), function)


def run_serial(runner: Runner, update: bool) -> PyTree:
    """Run once on one device; commit on request."""
    with LOCK:
        outcome, home = runner.serial(), runner.home
        states = []
        for variable, state in outcome.updates.items() if update else ():
            held = variable._state.rows_per_replica
            one = [leaf[0] for leaf in state.leaves] if state.layout == "stacked" else state.leaves
            if held is None:
                layout = variable._state.layout
                states.append((variable, state_of_leaves(variable, copy_to_replicas(home, one, layout), layout)))
            else:
                states.append((variable, state_of_rows(variable, split_at([np.asarray(leaf) for leaf in one], held))))
        commit_all(states)
        # Replicated, as a call's results are: what lies on one device cannot meet those in one jnp operation.
        leaves = [put(home, leaf, "replicated") for leaf in outcome.leaves]
    return outcome.plan.result.tree(leaves)


def check(runner: Runner, mapping: FunctionSpec, tolerance: Tolerance) -> None:
    """Compare both ways from one state; LawError names what differs."""
    with LOCK:
        home = current_group()
        parallel, view = home, None
        if home.size == 1:  # one replica is the serial program itself; two simulated ones are not
            parallel = home.simulated(2)
            view = view_of_simulated(home, parallel, runner.request.batch_s)
        found = list(_differing_outputs(runner, mapping, parallel, view, tolerance))
        if runner.function.then is not None or not found:
            one, many = runner.serial(), runner.run(parallel, view)
            if runner.function.then is not None:
                treedef = one.plan.result.treedef
                paths = tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
                found += differing_results([keystr(path) for path, _ in paths], one.leaves, many.leaves, tolerance)
            found += _differing_updates(one, many, tolerance, parallel)
    if found:
        lines = "\n  ".join(dict.fromkeys(found))
        raise LawError(
            f"{runner.function.name}: on {parallel.size} replicas the answer is not the serial one.\n  {lines}\n"
            f"  Name ops with outputs= or reduce=, and update shared variables in then."
        )


def _differing_outputs(
    runner: Runner, mapping: FunctionSpec, parallel: Group, view: View | None, tolerance: Tolerance
) -> Iterator[str]:
    """Combined outputs, before any then; each that differs, with the ops that would have matched."""
    many, one = runner.run(parallel, view, mapping), runner.serial(mapping)
    leaves = [many.plan.outputs.leaves[i] for i in many.plan.outputs.keep]
    differing = [
        i
        for i, leaf in enumerate(leaves)
        if leaf.reduced.reduction.is_lawful and not tolerance.admits(one.leaves[i], many.leaves[i], leaf.reduced.dtype)
    ]
    parts = _parts(runner, mapping, parallel, view) if differing else None
    for i in differing:
        hint = matching_ops(parts, i, one.leaves[i], tolerance) if parts else ['"concat"'] * (leaves[i].op != "concat")
        fits = f"{' or '.join(hint)} would have matched" if hint else "no op would have matched"
        op = '"mean" of Weighted' if leaves[i].reduced.weight is not None else f'"{leaves[i].op}"'
        yield f"output{leaves[i].path} combined by {op}: {difference(one.leaves[i], many.leaves[i])}; {fits}."


def _parts(runner: Runner, mapping: FunctionSpec, parallel: Group, view: View | None) -> Parts | None:
    """Every output's parts as they come; None where their shapes differ."""
    raw = replace(mapping, per_part=True)
    where = Where(parallel, view, None if view is None else runner.home, may_donate=False)
    try:
        ready = prepare(raw, runner.plans, runner.bound, runner.request, None, where)
        outcome = evaluate(ready, view)
    except ValueError:
        return None
    rows = [1] * parallel.size
    if ready.rows.lengths is not None:
        by_launch = launches(ready.rows.lengths, runner.request.num_slices)
        rows = [each.counts[r] for r in range(parallel.size) for each in by_launch if each.counts[r]]
    return Parts([np.asarray(leaf) for leaf in outcome.leaves], np.array(rows, np.float64))


def _differing_updates(one: Outcome, many: Outcome, tolerance: Tolerance, parallel: Group) -> Iterator[str]:
    for update in many.plan.updates:
        variable, new, want = update.variable, many.updates[update.variable], one.updates[update.variable]
        whole = [np.asarray(leaf)[0] if want.layout == "stacked" else np.asarray(leaf) for leaf in want.leaves]
        ranks = range(parallel.size if new.layout == "stacked" else 1)
        held = new.rows_per_replica or [None] * parallel.size
        by_rank = [[replica_to_host(parallel, leaf, new.layout, r, held[r]) for leaf in new.leaves] for r in ranks]
        if new.rows_per_replica is not None:
            by_rank = [[np.concatenate(leaves) for leaves in zip(*by_rank, strict=True)]]
        unpack = variable._spec.unpack
        for i, path in enumerate(variable._spec.paths):
            a, got = unpack(whole)[i], [unpack(leaves)[i] for leaves in by_rank]
            wrong = [rank for rank, value in enumerate(got) if not tolerance.admits(a, value)]
            if wrong:
                hint = "; update it in then, from combined outputs." if update.depends_on is None else "."
                yield f"{variable.name}{path} updated on replica {wrong[0]}: {difference(a, got[wrong[0]])}{hint}"
