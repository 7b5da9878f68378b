"""Serial: run one call on one device, with its rows and variables as that device sees them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .._base.pytree import PyTree, as_keys
from .._call.binding import BoundArguments, CallOptions, check_leaves
from .._call.execute import Outcome, ReadyCall, evaluate
from .._call.plan import PlanCache, Site
from .._call.prepare import prepare
from .._call.rows import select_rows
from .._call.spec import FunctionSpec
from .._call.traces import View, cannot_update_rows, shared_in
from .._data.transfer import gather_rows, to_host
from .._runtime.dispatch import LOCK, drain
from .._runtime.executable import replica_to_host
from .._runtime.group import Group
from .._runtime.layout import everywhere, put
from .._variables.shards import whole_on_host
from .._variables.state import VariableState
from .._variables.variable import Shared, commit_all, state_of_copies, state_of_rows
from .views import one_device, split_at, view_of_one, view_of_simulated


@dataclass(frozen=True)
class Runner:
    """A call of a function, to be run without committing or donating anything.

    Attributes:
      function: the function.
      plans: the function's own plans, which serve views of variables as well: a plan fits wherever states are equal.
      bound: the call's arguments.
      options: the call's options.
      home: the group in which shared variables and data live.
    """

    function: FunctionSpec
    plans: PlanCache
    bound: BoundArguments
    options: CallOptions
    home: Group

    @cached_property
    def serial(self) -> Site:
        """Return the site of one device, which runs all rows."""
        view = view_of_one(self.home, self.options.batch_s)
        # Over processes, replicas exchange the rows of variables here, since they cannot while a function is traced.
        if self.home._is_multi_process:
            for variable in (*shared_in(self.function.fn), *shared_in(self.function.then)):
                if variable._state.rows_per_replica is not None:
                    view(variable)
        return self._site(one_device(self.home), view)

    @cached_property
    def parallel(self) -> Site:
        """Return the site of the replicas; two simulated ones for a group of one, which runs the serial program."""
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
        # Slices divide the rows of a replica; the serial run takes all rows at once.
        options = self.options._replace(num_slices=1) if site is self.serial else self.options
        return prepare(replace(site, function=function), self.bound, options)

    def run(self, site: Site, function: FunctionSpec) -> Outcome:
        """Run a call of the function, or of a function made of it."""
        # A variable that a dead program was to write must raise now, as in a call.
        drain()
        outcome = evaluate(self.ready(site, function), site.view)
        for variable, state in outcome.updates.items():
            if self.options.batch_s is not None and state.rows_per_replica:
                raise cannot_update_rows(function.name, variable.name)
        return outcome


def run_serial(runner: Runner, update: bool) -> PyTree:
    """Run a call once on one device, and return its result on every replica; with `update`, commit its updates."""
    with LOCK:
        outcome, home = runner.run(runner.serial, runner.function), runner.home
        if outcome.is_refused:
            raise FloatingPointError(f"{runner.function.name}: its outputs or updates are not finite.")
        states = []
        for variable, state in outcome.updates.items() if update else ():
            held = variable._state.rows_per_replica
            leaves = stored_on_host(variable, state, runner.serial.group)[0]
            if held is None:
                states.append((variable, state_of_copies(variable, leaves)))
            else:
                rows = split_at([np.asarray(leaf) for leaf in leaves], held)
                states.append((variable, state_of_rows(variable, rows)))
        commit_all(states)
        # JAX refuses to combine an array on one device with results of calls, which lie on all devices:
        # https://docs.jax.dev/en/latest/faq.html#controlling-data-and-computation-placement-on-devices
        results = [put(home, leaf, "replicated") for leaf in outcome.leaves]
    return outcome.plan.result.tree(results)


def stored_on_host(variable: Shared, state: VariableState, group: Group) -> list[list[np.ndarray]]:
    """Return a variable's stored leaves on each replica; only once if the replicas share them."""
    if variable._spec.is_cut is not None:
        return [[*whole_on_host(variable._spec, group, state.leaves)]]
    held = state.rows_per_replica or [None] * group.size
    ranks = range(group.size if state.layout == "stacked" else 1)
    by_rank = [[replica_to_host(group, leaf, state.layout, r, held[r]) for leaf in state.leaves] for r in ranks]
    if state.rows_per_replica is None:
        return by_rank
    return [[np.concatenate(leaves) for leaves in zip(*by_rank, strict=True)]]


class HostRows:
    """The rows of one call in host memory, from which calls with any of them can be made."""

    def __init__(self, site: Site, bound: BoundArguments, options: CallOptions) -> None:
        group, spec = site.group, bound.spec
        arguments = check_leaves(bound, site.function.name, group)
        self._bound, self._keys = bound, [arguments.keys[place] for place in spec.scattered]
        site = replace(site, group=one_device(group), data_group=group)
        rows = select_rows(site, spec, arguments.scattered, options)
        self._arrays = [self._gathered(group, row) for row in rows.each]

    def _gathered(self, group: Group, picked: Any) -> np.ndarray:
        host = to_host(group, picked.source)
        return gather_rows(everywhere(picked.source) if host is None else host, picked.selection, picked.dtype)

    def __len__(self) -> int:
        return len(self._arrays[0])

    def take(self, rows: Any) -> BoundArguments:
        """Make the call's arguments with some of its rows, by their numbers in the call."""
        leaves, index = list(self._bound.leaves), np.asarray(rows)
        for place, array, key in zip(self._bound.spec.scattered, self._arrays, self._keys, strict=True):
            leaves[place] = as_keys(array[index], key)
        return self._bound._replace(leaves=leaves)
