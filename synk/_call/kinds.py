"""Kinds: recognise a call by what does not depend on values, and prepare it: select its rows and find its plan."""

from collections.abc import Sequence, Set
from typing import Any
from weakref import ref

import numpy as np

from .._base.bounded_cache import BoundedCache
from .._base.errors import shown
from .._base.jax_context import checks_floats, trace_options
from .._base.partition import lengths_of
from .._base.pytree import most_of, named, narrow, too_large
from .._data.dataset import abstract_rows, resident
from .._data.feed import SENT
from .._data.places import PLACES, Picks
from .._data.process_rows import rows_of_processes, rows_of_replicas
from .._data.selection import (
    IndexKind,
    ReplicaSelection,
    Selection,
    index_kind,
    merge_replicas,
    select,
    select_on_replicas,
)
from .._data.transfer import gather_rows
from .._runtime.group import Group
from .binding import ArgumentSpec, BoundArguments, CallOptions
from .leaves import (
    LeafSpec,
    broadcast_aval,
    check_leaves,
    keys_of_data,
    placer_of,
    recognise_leaves,
    spec_of_data,
    spec_of_part,
)
from .parts import with_parts
from .plan import Form, Site
from .rows import (
    InputSpec,
    Rows,
    check_equal_counts,
    common_rows,
    read_array,
    read_source,
    refuse_together,
    values_on_host,
    with_overlap,
)
from .spec import CallSpec
from .traces import rows_not_in_blocks

_NO_ROWS = Selection(None, 0, 0)


class Kind:
    """Calls that differ in values alone: trees of arguments, shapes, types, places of data and options are the same.

    Attributes:
      is_new: whether no call of the kind has run.
      base: the key of their plans, as far as it does not depend on the rows that are picked.
    """

    # A kind outlives its calls in a cache, so it refers to no leaf and no function, and never reads an argument.
    is_new = True

    def __init__(self, site: Site, spec: ArgumentSpec, specs: Sequence[LeafSpec], options: CallOptions) -> None:
        function, slices = site.function, options.num_slices
        self.name, self._spec, self._specs, self._slices = function.name, spec, specs, slices
        self._has_batch, self._has_batch_s = options.batch is not None, options.batch_s is not None
        self._block = function.blocks
        if self._block is not None and (self._has_batch_s or any(spec.overlaps) or function.is_over):
            raise ValueError(
                f"{self.name}: blocks={self._block} are blocks of one call, and deal its rows out anew. So it does not "
                f"go with over, batch_s or synk.Overlap."
            )
        check_leaves(spec, specs, self.name)
        self._scattered = [specs[i] for i in spec.scattered]
        self._is_local = any(leaf.kind == "local" for leaf in self._scattered)
        of_parts = {"batch_s": self._has_batch_s, "synk.local": self._is_local}
        site.group._way.refuse_parts(self.name, {**parts_asked(spec, slices), **of_parts})
        self._sort_by_rows()
        self.base = self._base_call(site, options)
        at_home = site.home is None or site.group is site.home._as_one
        self.placers = [
            (i, placer_of(specs[i], site.group, slices == 1, site.purpose == "absent", at_home)) for i in spec.broadcast
        ]
        # The broadcast arguments that are data, by number, with their leaves.
        self.broadcast_data = [(n, i) for n, i in enumerate(spec.broadcast) if specs[i].kind == "data"]
        self._forms = BoundedCache()
        # Whether `batch` picks the same rows of all scattered arguments.
        is_plain = not (self._minibatch or self._on_replicas or any(spec.overlaps) or self._has_batch_s)
        self._has_one_selection = self._has_batch and is_plain
        # The rows of a call without a batch do not depend on values, unless variables bring them.
        self._whole: tuple[Form, Sequence[Selection]] | None = None
        if not (self._has_batch or self._has_batch_s or self._is_local) and spec.scattered:
            self._whole = self._select(site, Selection(None, 0, self._rows), None, "slice")

    def _sort_by_rows(self) -> None:
        """Tell apart arguments that bring the rows of the batch, and those from which `batch_s` and `batch` pick."""
        self._minibatch: list[int] = []
        self._on_replicas: list[int] = []
        self._picked: list[int] = []
        for i, leaf in enumerate(self._scattered):
            if leaf.is_minibatch:
                self._minibatch.append(i)
            elif leaf.kind == "data" and self._has_batch_s and PLACES[leaf.place].layout == "stacked":
                self._on_replicas.append(i)
            else:
                self._picked.append(i)
        self._rows = self._held_rows = self._minibatch_rows = 0
        if self._is_local:
            self._check_local()
            return
        self._held_rows = self._common_rows(self._on_replicas)
        self._rows = self._common_rows(self._picked)
        if self._has_batch and not self._picked:
            raise ValueError(
                f"{self.name}: batch picks rows of scattered arguments, but this call has none to pick from. Minibatch "
                f"data is taken whole, and batch_s picks from data on the replicas."
            )
        self._minibatch_rows = self._common_rows(self._minibatch)

    def _what(self, leaf: int) -> str:
        return f"{self.name}: argument {self._spec.names[leaf]}"

    def _common_rows(self, which: Sequence[int]) -> int:
        return common_rows(self.name, self._spec.scattered_names, self._scattered, which)

    def _check_local(self) -> None:
        if self._block is not None or self._has_batch_s or any(self._spec.overlaps):
            raise ValueError(
                f"{self.name}: synk.local rows stay in their process, so they do not go with blocks=, batch_s or "
                f"synk.Overlap."
            )
        if any(leaf.kind != "local" for leaf in self._scattered):
            raise ValueError(
                f"{self.name}: some scattered arguments are synk.local rows, and others are the same in all processes. "
                f"Mark all of a call, or none."
            )

    def _base_call(self, site: Site, options: CallOptions) -> CallSpec:
        """Return the key of the plans of all these calls, as far as it does not depend on the rows that are picked."""
        function, spec, specs = site.function, self._spec, self._specs
        # jax_debug_nans runs a program again to find where NaN came from, so its arguments must be there still. So must
        # the rows of a variable that is an argument of its own update, as one with neighbours is.
        may_donate = site.purpose in ("live", "absent") and function.donate
        may_donate = may_donate and not function.refuses_nan and not checks_floats()
        passes_variables = any(spec.overlaps) and any(leaf.is_variable for leaf in specs)
        has_batch_s = self._has_batch_s and site.home is None
        return CallSpec(
            arguments=spec,
            options=trace_options(),
            rows=(),
            feeds=(),
            broadcast=tuple([broadcast_aval(specs[i]) for i in spec.broadcast]),
            keys=keys_of_data(spec, specs),
            held_index=index_kind(options.batch_s) if has_batch_s else None,
            # Rows and parts stand for these four. Programs may depend on any other option.
            asked=options._replace(batch=None, batch_s=None, num_slices=1, turn=None),
            donate=may_donate and not passes_variables,
            is_over=function.is_over,
        )

    def _form(self, site: Site, picks: tuple[bool, int, IndexKind], lengths: tuple[int, ...] | None) -> Form:
        """Return the form of calls that pick so many rows by such an index; replicas get rows of these lengths."""

        def make() -> Form:
            inputs = tuple([self._input(site, i, picks, lengths) for i in range(len(self._scattered))])
            rows = tuple([(spec.shape, spec.dtype) for spec in inputs])
            base = self.base._replace(rows=rows, feeds=tuple([spec.feed for spec in inputs]))
            call = with_parts(site.function, base, lengths, self._slices)
            return Form(base, call, inputs, lengths, self._slices)

        # Minibatches of one size are one form, whatever rows they pick.
        return self._forms.get((picks, lengths), make)

    def _input(
        self, site: Site, i: int, picks: tuple[bool, int, IndexKind], lengths: tuple[int, ...] | None
    ) -> InputSpec:
        """Choose how the rows of one argument come: sent from the host, or taken from where data lies."""
        leaf, overlap, place = self._scattered[i], self._spec.overlaps[i], self._spec.scattered[i]
        is_run, count, index = picks
        if leaf.kind == "data" and site.home is None:
            picks_of = Picks(count, is_run, index, False, self._has_batch_s, self._slices > 1, overlap, self._block)
            if i in self._minibatch:
                # Minibatch data is taken whole, whatever the batch picks of the others.
                picks_of = picks_of._replace(rows=leaf.shape[0], is_run=True, index="slice")
            elif i in self._on_replicas:
                kind = self.base.held_index or "slice"
                picks_of = picks_of._replace(
                    rows=leaf.shape[0], is_run=True, index=kind, is_on_replicas=overlap is None
                )
            choice = PLACES[leaf.place].choose_feed(site.group, leaf.shape[0], leaf.is_in_memory, picks_of)
            if choice is not None:
                feed, is_exchanged = choice
                read = abstract_rows if site.purpose == "absent" else resident
                held = leaf.shape[0] if is_exchanged else None
                return InputSpec(place, self._what(place), read, feed, leaf.shape[1:], narrow(leaf.dtype), held)
        feed = SENT if overlap is None else SENT._replace(overlap=overlap)
        raw = leaf.raw
        dtype = narrow(raw.dtype)
        read = read_source if leaf.kind in ("data", "local") else None if leaf.key is None else read_array
        # Arrays of JAX may lie where the only launch takes them.
        is_whole = (
            (leaf.kind, leaf.key, raw.dtype, overlap) == ("array", None, dtype, None)
            and lengths is not None and is_run and count == leaf.shape[0]
            and site.group._way.rows_sent(max(lengths)) == count and self._slices == 1 and self._block is None
        )  # fmt: skip
        return InputSpec(place, self._what(place), read, feed, raw.shape[1:], dtype, None, is_whole)

    # What depends on values.

    def select(
        self, site: Site, leaves: Sequence[Any], options: CallOptions, sources: Sequence[Any] | None = None
    ) -> tuple[Form, Rows]:
        """Select the rows of a call by `batch` and `batch_s`, and find its form; `sources` are its rows, if known."""
        rows_before, on_replicas = None, None
        if self._whole is not None:
            # A call of all rows selects none anew: nothing here depends on values.
            form, selections = self._whole
            lengths = form.lengths
        elif self._is_local:
            form, selections, sources, lengths, rows_before = self._select_local(site, leaves, options)
        else:
            form, selections, lengths, on_replicas = self._select_picked(site, options)
        if sources is None:
            sources = []
            for leaf, _, read, *_ in form.inputs:
                sources.append(leaves[leaf] if read is None else read(leaves[leaf], site.group))
        return form, Rows(form.inputs, sources, selections, lengths, on_replicas, rows_before)

    def _select_picked(
        self, site: Site, options: CallOptions
    ) -> tuple[Form, Sequence[Selection], tuple[int, ...] | None, ReplicaSelection | None]:
        """Select rows by `batch`, and by `batch_s` from what data or a variable holds on the replicas."""
        batch, batch_s, names = options.batch, options.batch_s, self._spec.scattered_names
        if self._has_one_selection:
            selection, index = select(batch, self._rows, self.name, names[0]), index_kind(batch)
            picks = selection.indexes is None, selection.rows, index
            form = self._forms.get(picks, lambda: self._select(site, selection, None, index)[0])
            return form, [selection] * len(names), form.lengths, None
        selection, chosen = _NO_ROWS, None
        if self._on_replicas:
            held = lengths_of(self._held_rows, (site.home or site.group).size)
            chosen = select_on_replicas(batch_s, held, self.name, names[self._on_replicas[0]])
        if self._picked:
            selection = select(batch, self._rows, self.name, names[self._picked[0]])
        form, selections = self._select(site, selection, chosen, index_kind(batch))
        stay = chosen if site.home is None else None
        if form.lengths is not None and (self.base.held_index is None or stay is not None):
            return form, selections, form.lengths, stay
        # A variable may bring rows.
        lengths, stay = self._rows_of_variable(site, form, batch_s)
        form = self._form(site, (selection.indexes is None, selection.rows, index_kind(batch)), lengths)
        return form, selections, lengths, stay

    def _select(
        self, site: Site, selection: Selection, chosen: ReplicaSelection | None, index: IndexKind
    ) -> tuple[Form, Sequence[Selection]]:
        """Return the form of calls that take these rows, and the rows that each argument brings."""
        names = self._spec.scattered_names
        counts = {names[which[0]]: rows for which, rows in (
            (self._on_replicas, sum(chosen.lengths) if chosen else 0),
            (self._picked, selection.rows),
            (self._minibatch, self._minibatch_rows),
        ) if which}  # fmt: skip
        check_equal_counts(self.name, counts)
        count = next(iter(counts.values()), None)
        lengths = None if count is None else lengths_of(count, site.group.size, self._block)
        if chosen is not None and site.home is None:
            lengths = chosen.lengths
        form = self._form(site, (selection.indexes is None, selection.rows, index), lengths)
        selections: list[Selection] = []
        for i, spec in enumerate(form.inputs):
            of_argument = selection
            if i in self._minibatch:
                of_argument = Selection(None, 0, count or 0)
            elif chosen is not None and i in self._on_replicas:
                # Another group, and a program that exchanges neighbours, take all rows that batch_s picks, in rank
                # order.
                takes_all = site.home is not None or self._spec.overlaps[i] is not None
                of_argument = merge_replicas(chosen) if takes_all else Selection(None, 0, self._held_rows)
            selections.append(with_overlap(of_argument, spec.feed))
        return form, selections

    def _select_local(
        self, site: Site, leaves: Sequence[Any], options: CallOptions
    ) -> tuple[Form, Sequence[Selection], Sequence[Any], tuple[int, ...], int | None]:
        """Select rows that this process alone holds; the processes tell one another how many they have."""
        name, names = self.name, self._spec.scattered_names
        home = site.home or site.group
        is_multi_process = home._is_multi_process
        sources = [leaves[i].source for i in self._spec.scattered]
        # The other processes wait for this one's number of rows: an error here must reach them, or they would hang.
        try:
            rows = common_rows(name, names, sources, range(len(sources)), may_be_empty=is_multi_process)
            selection = select(options.batch, rows, name, names[0], is_part=is_multi_process) if rows else _NO_ROWS
            # Rows that do not fit raise here, where the other processes are told.
            for i, source in zip(self._spec.scattered, sources, strict=True):
                if is_multi_process and most_of(source.dtype, narrow(source.dtype)):
                    with named(self._what(i)):
                        gather_rows(source, selection, narrow(source.dtype))
        except Exception:
            if is_multi_process:
                refuse_together(home, name)
            raise
        lengths, rows_before = None, None
        if is_multi_process:
            # The other processes must describe their calls alike.
            shapes = ", ".join(f"{narrow(leaf.dtype)}{list(leaf.shape[1:])}" for leaf in self._scattered)
            turn = "" if options.turn is None else f", item {options.turn} of a loop"
            call = f"{name}(synk.local rows of {shapes}), num_slices={options.num_slices}{turn}"
            lengths = rows_of_replicas(home, selection.rows, name, call)
            if not any(lengths):
                raise ValueError(f"{name}: argument {names[0]} has 0 rows in every process; a call needs at least one.")
            # A call on one device takes all rows, so each process brings it those of the others.
            if site.home is not None:
                sources = [rows_of_processes(home, gather_rows(source, selection, source.dtype)) for source in sources]
                selection, lengths = Selection(None, 0, len(sources[0])), None
        if lengths is None:
            lengths = lengths_of(selection.rows, site.group.size)
        else:
            rows_before = sum(lengths[: site.group._local_ranks.start])
        form = self._form(site, (True, 0, "slice"), lengths)
        return form, [selection] * len(sources), sources, lengths, rows_before

    def _rows_of_variable(
        self, site: Site, form: Form, batch_s: Any
    ) -> tuple[tuple[int, ...] | None, ReplicaSelection | None]:
        """Return the rows of each replica that a variable brings, and those that `batch_s` picks from it."""
        # Which variable a function reads is known by a trace alone.
        holder = form.holder(site)
        lengths = None if holder is None else site.state(holder).rows_per_replica
        if holder is not None and self._block is not None:
            raise rows_not_in_blocks(self.name, holder.name, self._block)
        if self.base.held_index is None:
            if lengths is None and self._slices > 1:
                raise ValueError(
                    f"{self.name}: num_slices={self._slices} cuts rows, but this call has no scattered input, so no "
                    f"rows."
                )
            return lengths, None
        if holder is None or lengths is None:
            raise ValueError(
                f"{self.name}: batch_s picks rows that live on the replicas, but none of its inputs do. Use batch for "
                f"rows in host memory."
            )
        chosen = select_on_replicas(batch_s, lengths, self.name, holder.name)
        if form.lengths is not None:
            counts = {holder.name: sum(chosen.lengths), "the scattered arguments": sum(form.lengths)}
            check_equal_counts(self.name, counts)
        return chosen.lengths, chosen

    def fits(self, leaves: Sequence[Any], which: Set[int]) -> bool:
        """Tell whether data among the leaves, given by id, is what it was for this kind."""
        pairs = zip(leaves, self._specs, strict=True)
        return all(spec_of_data(leaf) == spec for leaf, spec in pairs if id(leaf) in which)

    def place_broadcast(self, group: Group, leaves: Sequence[Any]) -> list[Any]:
        """Bring the broadcast arguments to every replica; of a call that does not run, return their shapes."""
        if not self.placers:
            return []
        at = 0
        try:
            # `at` tells the error below which argument was on its way.
            return [place(group, leaves[at := i]) for i, place in self.placers]
        except OverflowError as error:
            raise too_large(self._what(at), error) from None

    def values_on_host(self, rows: Rows, leaves: Sequence[Any]) -> list[Any]:
        return values_on_host(rows, leaves, self._spec.broadcast)


def parts_asked(spec: ArgumentSpec, slices: int) -> dict[str, bool]:
    """Tell for each word of the user's that speaks of parts whether a call has it."""
    return {"num_slices": slices > 1, "synk.Overlap": any(spec.overlaps)}


def recognise(site: Site, bound: BoundArguments, options: CallOptions) -> tuple[Kind, Sequence[Any]]:
    """Return the kind of a call, and its leaves. The kind is made if no such call was met before."""
    function, group = site.function, site.group
    leaves, parts = recognise_leaves(bound, function.name, site.home or group, site.purpose == "absent")
    if options.output_subset is not None:
        options = options._replace(output_subset=checked_subset(options.output_subset, function.name))
    home_size = None if site.home is None else site.home.size
    # Only the kind of an index is in the key, not its values.
    batch_s = None if options.batch_s is None else index_kind(options.batch_s)
    asked = (
        ref(group), bound.spec, function.flags, trace_options(), options.batch is None, batch_s, options[2:-1],
        home_size, site.purpose,
    )  # fmt: skip
    known, of_leaves, kept = site.plans.newest
    # To compare is quicker than to make a hash: shapes are mostly the same objects.
    kind = kept() if parts == of_leaves and asked == known else None
    if kind is None:

        def make() -> Kind:
            return Kind(site, bound.spec, [spec_of_part(part) for part in parts], options)

        kind = site.plans.kept(group, (*asked, *parts), make, function.is_over)
        # By weak reference: the cache, and not the newest call, decides how long a kind lives.
        site.plans.newest = asked, parts, ref(kind)
    return kind, leaves


def checked_subset(subset: Any, name: str) -> tuple[Any, ...]:
    is_list = isinstance(subset, Sequence) and not isinstance(subset, str)
    if not is_list or not all(isinstance(entry, int | str | np.integer) for entry in subset):
        raise TypeError(f"{name}: output_subset is {shown(subset)}; give a list of indexes or keys.")
    return tuple(subset)
