"""Feed: the first half of a call: recognise it, select its rows, and send them. It reads no value of a variable."""

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import jax

from .._base.errors import SynkError
from .._base.partition import lengths_of
from .._data.process_rows import ProcessLocalRows
from .._data.selection import Selection
from .._data.sources import copied_on_device
from .._data.transfer import PartRows, copied_rows
from .._runtime.executable import translate_error
from .._runtime.group import Group
from .._runtime.layout import constant
from .._variables.state import VariableState
from .._variables.variable import Shared, bind
from .auto_slices import choose_slices
from .binding import AUTO, BoundArguments, CallOptions
from .kinds import Kind, recognise
from .parts import part_table, split_into_launches
from .plan import CallPlan, Form, Instead, Site, SliceChoice, plan_key, trace_plan
from .rows import Rows, exchanged, feed_rows, index_on_replicas
from .spec import CallSpec, FunctionSpec
from .traces import NeedsAllRows

# Arguments and options of a call.
Given = tuple[BoundArguments, CallOptions]


class Fed:
    """A call that is fed: arguments are recognised and rows selected. No value of a variable has been read for it, and
    nothing has been committed.

    Attributes:
      site: where it runs.
      given: its arguments and options, from which it can be fed again; None if they hold other rows by now.
      kind: what it has in common with calls that differ in values alone.
      leaves: the leaves of its arguments.
      form: what it has in common with calls that pick as many rows.
      rows: the rows that it takes: the user's, or copies.
      num_slices: in how many slices replicas run.
      choice: if synk has chosen the number of slices, the choice.
      broadcast: the broadcast arguments on the replicas; None until they are brought there.
      seen: the version of each broadcast argument that is data, by number.
      sent: the values of its only launch; None until they are sent.
      plan: how it runs, which the launch finds.
      states: the states of the variables in which the launch has found them; None if some are to be brought there.
    """

    # Each attribute is set in place: to copy such a record would take a tenth of a warm call.
    __slots__ = (
        "broadcast", "choice", "form", "given", "kind", "leaves", "num_slices", "plan", "rows", "seen", "sent",
        "site", "states",
    )  # fmt: skip
    broadcast: list[Any] | None
    given: Given | None
    sent: list[Any] | None
    plan: CallPlan
    states: dict[Shared, VariableState] | None

    def __init__(
        self,
        site: Site,
        given: Given,
        kind: Kind,
        leaves: Sequence[Any],
        selected: tuple[Form, Rows],
        slices: tuple[int, SliceChoice | None],
    ) -> None:
        self.site, self.given, self.kind, self.leaves = site, given, kind, leaves
        self.form, self.rows = selected
        self.num_slices, self.choice = slices
        self.seen = {n: leaves[i]._version for n, i in kind.broadcast_data} if kind.broadcast_data else {}
        self.broadcast = self.sent = self.states = None

    @property
    def function(self) -> FunctionSpec:
        return self.site.function

    @property
    def group(self) -> Group:
        return self.site.group

    @property
    def call(self) -> CallSpec:
        return self.form.call

    def state(self, variable: Shared) -> VariableState:
        return bind(variable, self.site.group) if self.site.view is None else self.site.view(variable)

    def placed(self) -> list[Any]:
        """Return the broadcast arguments on the replicas."""
        if self.broadcast is None:
            self.broadcast = self.kind.place_broadcast(self.site.group, self.leaves)
        return self.broadcast

    def send(self) -> list[Any]:
        """Send the values of the only launch, unless they are sent already."""
        if self.sent is None:
            lengths, form = self.rows.lengths, self.form
            parts = split_into_launches(lengths, 1)[0] if lengths else None
            self.sent = values_of(self, rows_taken(self) if form.exchanges else self.rows, parts)
            if parts is not None and not form.is_plain:
                self.sent.append(place_table(self, parts))
        return self.sent

    def send_early(self) -> None:
        """Send the values of the only launch before its turn, and none of the user's own arrays."""
        of_jax = list[jax.Array]()
        for spec, source in zip(self.rows.inputs, self.rows.sources, strict=True):
            if spec.feed.layout == "rows" and isinstance(source, jax.Array):
                of_jax.append(source)
        if of_jax and self.site.group._has_one_device:
            self.keep()
        values = self.send()
        # The owner of an array of JAX may donate it before the launch.
        for i, value in enumerate(values if of_jax else ()):
            if any(value is source for source in of_jax):
                values[i] = copied_on_device(value)

    def keep(self) -> None:
        """Copy the rows that come from the host, to which their owner may write before the launch."""
        sources, selections, group = [*self.rows.sources], [*self.rows.selections], self.site.group
        for i, source in self._from_host():
            spec = self.rows.inputs[i]
            if spec.is_whole:
                sources[i] = copied_on_device(source)
                continue
            sources[i] = copied_rows(group, source, selections[i], spec.dtype)
            selections[i] = Selection(None, 0, selections[i].rows)
        self.rows = self.rows._replace(sources=sources, selections=selections)

    def _from_host(self) -> list[tuple[int, Any]]:
        """Return the rows that are not data on the devices, and the number of the argument of each."""
        inputs = self.rows.inputs
        return [(i, source) for i, source in enumerate(self.rows.sources) if inputs[i].feed.layout == "rows"]


def feed(site: Site, bound: BoundArguments, options: CallOptions) -> Fed:
    """Recognise a call and select its rows."""
    stats = site.function.stats
    begun, compiling = perf_counter(), stats.dispatching
    given, choice = (bound, options), None
    if site.function.blocks is not None:
        # Blocks run one at a time anyway.
        options = options._replace(num_slices=1)
    elif options.num_slices == AUTO:
        choice = SliceChoice(1, 1) if site.group._way.is_one else _choose(site, bound, options)
        options = options._replace(num_slices=choice.slices)
    kind, leaves = recognise(site, bound, options)
    selected = kind.select(site, leaves, options)
    stats.selecting += perf_counter() - begun - (stats.dispatching - compiling)
    return Fed(site, given, kind, leaves, selected, (options.num_slices, choice))


def planned(fed: Fed, *, may_check: bool = False) -> Fed:
    """Find or make the plan of a call. Return the call that has it: another one, if all devices make one replica."""
    site, function, rows = fed.site, fed.site.function, fed.rows
    # Compared before a plan is made: a process with other arguments would wait in another program.
    if site.group._is_multi_process and site.purpose != "absent":
        remedy = "Give each process the same arguments and batch; synk.local marks rows of its own."
        values = partial(fed.kind.values_on_host, rows, fed.leaves)
        site.group._peers.compare_values(f"the arguments of {function.name}", values, remedy)
    if fed.broadcast is None:
        fed.broadcast = fed.kind.place_broadcast(site.group, fed.leaves)
    if (newest := fed.form.newest) is not None and site.purpose == "live" and site.view is None:
        # A warm call: nothing has changed since the call before, whose checks hold for this one.
        kept = newest[0]()
        fed.states = None if kept is None else kept.states_now(site)
        if kept is not None and fed.states is not None:
            fed.plan, fed.form = kept.plan, newest[1]
            return fed
    form, plan = fed.form.with_plan(site)
    if isinstance(plan, Instead):
        if any(isinstance(leaf, ProcessLocalRows) for leaf in fed.leaves):
            raise ValueError(
                f"{function.name}: it communicates inside, and its synk.local rows do not divide over the replicas. "
                f"Give each replica as many, or all processes the same rows."
            )
        if fed.given is None:
            raise SynkError(f"{function.name}: it has begun to communicate, and the rows of this item are gone.")
        return planned(feed(site.as_one(), *fed.given), may_check=may_check)
    if plan.least_rows > 1 and not function.is_over:
        check_row_count(function.name, plan.least_rows, rows.lengths)
    if plan.scattered:
        _check_dealt_out(function.name, rows.lengths or (), site.group.size)
    # SYNK_CHECK=law checks the first call of each kind, before it runs.
    if may_check and fed.kind.is_new and fed.given is not None:
        function.on_first_call(site, *fed.given, plan)
        fed.kind.is_new = False
    if not fed.kind.is_new:
        fed.form.note_plan(site, form)
    fed.form, fed.plan = form, plan
    return fed


def prepare(site: Site, bound: BoundArguments, options: CallOptions) -> Fed:
    """Feed a call, and find or make its plan."""
    return planned(feed(site, bound, options))


def _check_dealt_out(name: str, lengths: tuple[int, ...], size: int) -> None:
    """Refuse to keep rows on the replicas that are not dealt out as those of scattered data."""
    if lengths != (dealt_out := lengths_of(sum(lengths), size)):
        raise ValueError(
            f'{name}: an output of it is "scatter", for rows dealt out as {list(dealt_out)}, but this call gives the '
            f'replicas {list(lengths)}. Use "concat".'
        )


def _choose(site: Site, bound: BoundArguments, options: CallOptions) -> SliceChoice:
    # Nothing runs while slices are chosen, so shapes are enough and no argument is placed.
    site = site._replace(purpose="absent")

    def form_of(slices: int) -> tuple[Form, Rows]:
        of_slices = options._replace(num_slices=slices)
        kind, leaves = recognise(site, bound, of_slices)
        return kind.select(site, leaves, of_slices)

    def plan_of(slices: int) -> CallPlan:
        plan = form_of(slices)[0].with_plan(site)[1]
        if isinstance(plan, Instead):
            raise NeedsAllRows(plan.why)
        return plan

    form, rows = form_of(1)
    try:
        return choose_slices(site, plan_key(site.function, form.call), rows, plan_of)
    # One replica of all devices takes the rows, which has no slices.
    except NeedsAllRows:
        return SliceChoice(1, 1)


def check_row_count(name: str, least: int, lengths: tuple[int, ...] | None) -> None:
    count = sum(lengths or ())
    if count < least:
        raise ValueError(
            f"{name}: an output of it needs {least} rows, as top_k does, but this call has {count} in all."
        )


def is_stale(site: Site, bound: BoundArguments, options: CallOptions) -> bool:
    """Tell whether calls run another program than the function would make now, since what it captures has changed."""
    if options.num_slices == AUTO:
        options = options._replace(num_slices=_choose(site, bound, options).slices)
    kind, leaves = recognise(site, bound, options)
    form, rows = kind.select(site, leaves, options)
    # A plan may be kept under the key with all lengths, if its programs depend on these.
    calls = [form.call] if rows.lengths is None else [form.call, form.of_lengths().call]
    return any(
        site.plans.is_stale(site, plan_key(site.function, call), partial(trace_plan, site, call)) for call in calls
    )


def rows_taken(ready: Fed) -> Rows:
    start = perf_counter()
    rows = exchanged(ready.group, ready.rows)
    ready.function.stats.sending += perf_counter() - start
    return rows


def values_of(ready: Fed, rows: Rows, parts: PartRows | None) -> list[Any]:
    """Return the arguments of a launch beside variables and states: rows, indexes of rows, and broadcast arguments."""
    if ready.broadcast is None:
        ready.broadcast = ready.kind.place_broadcast(ready.site.group, ready.leaves)
    if parts is None:
        return [*ready.broadcast]
    group, stats, start = ready.site.group, ready.site.function.stats, perf_counter()
    try:
        values = feed_rows(group, rows, parts)
    except jax.errors.JaxRuntimeError as error:
        # A device may have no memory for the rows.
        translated = translate_error(error, ready.function.name)
        if translated is error:
            raise
        raise translated from error
    held_index = ready.form.call.held_index
    if held_index is not None:
        values.append(index_on_replicas(group, held_index, rows.on_replicas, parts))
    stats.sending += perf_counter() - start
    values += ready.broadcast
    return values


def place_table(ready: Fed, parts: PartRows, row_slot: int = 0, part_slot: int = 0) -> jax.Array:
    """Bring every replica `part_table`: the numbers by which a program finds each replica's part in a launch."""
    assert ready.rows.lengths is not None
    table = part_table(parts, ready.rows.lengths, row_slot, part_slot)
    return constant(ready.group, "replicated", table, "int32")
