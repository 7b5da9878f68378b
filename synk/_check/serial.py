"""Serial: run one call on one device, with its rows and variables as that device sees them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .._base.errors import DivergedError
from .._base.pytree import PyTree
from .._call.binding import BoundArguments, CallOptions
from .._call.execute import Outcome, evaluate
from .._call.feed import Fed, prepare
from .._call.plan import PlanCache, Site, site_of
from .._call.rows import Rows
from .._call.spec import FunctionSpec
from .._call.traces import cannot_update_rows, shared_in
from .._data.dataset import Data
from .._runtime.dispatch import LOCK, drain
from .._runtime.group import Group
from .._runtime.layout import put
from .._variables.variable import commit_all
from .._variables.views import View, one_device, view_from


@dataclass(frozen=True)
class Runner:
    """A call of a function, to be run without committing or donating anything."""

    function: FunctionSpec
    # The function's own plans, which serve views of variables as well: a plan fits wherever states are equal.
    plans: PlanCache
    bound: BoundArguments
    options: CallOptions
    # The group in which shared variables and data live.
    home: Group

    @cached_property
    def serial(self) -> Site:
        """Return the site of one device, which runs all rows."""
        group = one_device(self.home)
        view = view_from(self.home, group, self.options.batch_s)
        # Processes exchange what each has of a variable before a function is traced, since they cannot meanwhile.
        if self.home._is_multi_process:
            for variable in (*shared_in(self.function.fn), *shared_in(self.function.then)):
                if variable._spec.storage.asks_all(variable._state, 0):
                    with suppress(DivergedError):
                        view(variable)
        return self._site(group, view)

    @cached_property
    def parallel(self) -> Site:
        """Return the site of the replicas; two simulated ones for a group of one, which runs the serial program."""
        if self.home.size > 1 or self.function.engine == "jit":
            return site_of(self.function, self.plans, self.home, "afresh")
        # A group of one would compare the serial program with itself. Two simulated replicas show what depends on
        # parts.
        group = self.home._derived(self.home.devices[:1] * 2, True)
        return self._site(group, view_from(self.home, group, self.options.batch_s))

    def _site(self, group: Group, view: View) -> Site:
        return Site(self.function, self.plans, group, "afresh", self.home, view)

    def ready(self, site: Site, function: FunctionSpec) -> Fed:
        """Prepare a call of the function, or of a function made of it."""
        # Slices divide the rows of a replica; the serial run takes all rows at once.
        options = self.options._replace(num_slices=1) if site is self.serial else self.options
        return prepare(site._replace(function=function), self.bound, options)

    def run(self, site: Site, function: FunctionSpec) -> Outcome:
        """Run a call of the function, or of a function made of it."""
        # A variable that a dead program was to write must raise now, as in a call.
        drain()
        outcome = evaluate(self.ready(site, function))
        for variable, state in outcome.updates.items():
            if self.options.batch_s is not None and state.rows_per_replica:
                raise cannot_update_rows(function.name, variable.name)
        return outcome

    def run_both(self, function: FunctionSpec) -> tuple[Outcome, Outcome]:
        many = self.run(self.parallel, function)
        return self.run(self.serial, function), many


def run_serial(runner: Runner, update: bool) -> PyTree:
    with LOCK:
        outcome, home = runner.run(runner.serial, runner.function), runner.home
        if outcome.is_refused:
            raise FloatingPointError(f"{runner.function.name}: its outputs or updates are not finite.")
        states = []
        for variable, state in outcome.updates.items() if update else ():
            storage = variable._spec.storage
            (leaves,) = storage.each_on_host(runner.serial.group, state)
            states.append((variable, storage.state_like(home, variable._state, leaves)))
        commit_all(states)
        # JAX refuses to combine an array on one device with results of calls, which lie on all devices:
        # https://docs.jax.dev/en/latest/faq.html#controlling-data-and-computation-placement-on-devices
        results = [put(home, leaf, "replicated") for leaf in outcome.leaves]
    return outcome.plan.result.tree(results)


class CallRows:
    """The rows of one call, from which calls with any of them can be made.

    Attributes:
      positions: the place of each row in the arguments, or in minibatch data where all arguments are such.
      numbers: the numbers of the rows for users: a loop may have kept the rows of a batch.
    """

    def __init__(self, bound: BoundArguments, rows: Rows) -> None:
        self._bound = bound
        picked = [i for i, place in enumerate(bound.spec.scattered) if not _is_minibatch(bound.leaves[place])]
        self._has_batch = bool(picked)
        selection = rows.selections[picked[0] if picked else 0]
        self.positions = self.numbers = selection.positions(0, sum(rows.lengths or ()))
        if bound.numbers is not None:
            self.numbers = bound.numbers.positions(0, bound.numbers.rows)[self.positions]

    def call_of(self, rows: Sequence[int] | np.ndarray) -> tuple[BoundArguments, CallOptions]:
        """Make arguments and options for a call with some of the rows, by their numbers in this call."""
        index = np.asarray(rows)
        leaves = [
            # Data without a row for each row selected is picked by the batch; minibatch data has to be cut here.
            Data(leaf[index], leaf.name, minibatch=True, key=leaf._key) if _is_minibatch(leaf) else leaf
            for leaf in self._bound.leaves
        ]
        return self._bound._replace(leaves=leaves), CallOptions(self.positions[index] if self._has_batch else None)


def _is_minibatch(leaf: Any) -> bool:
    return isinstance(leaf, Data) and leaf.is_minibatch
