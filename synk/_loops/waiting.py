"""Waiting: the calls of a loop before their turn."""

from collections.abc import Sequence, Set
from copy import deepcopy
from typing import Any

import jax
import numpy as np

from .._base.errors import SynkError
from .._base.jax_context import is_checked, trace_options
from .._base.pytree import as_keys, key_of
from .._call.binding import AUTO, BoundArguments, CallOptions
from .._call.feed import Fed, feed
from .._call.plan import Instead, Site
from .._call.rows import Rows
from .._data.dataset import Data
from .._data.process_rows import ProcessLocalRows
from .._data.selection import Selection
from .._data.sources import copied
from .._data.transfer import can_go_ahead
from .._runtime.dispatch import LOCK
from .._runtime.group import Group
from .._variables.variable import Shared

# Batches that a call keeps as they are.
_NEVER_CHANGE = (slice, int, range, type(None))


class Waiting:
    """A call before its turn, of which the loop gives what a call at its turn would give.

    Attributes:
      bound: its arguments. Arrays among them that a source has lent are copied where they may be read again.
      data: the data among its arguments.
      written: the data, by id, to which the source has written while it made this call early.
    """

    __slots__ = (
        "_error", "_fed", "_group", "_is_kept", "_is_lost", "_lent", "_options", "_passed", "_versions", "bound",
        "data", "written",
    )  # fmt: skip

    def __init__(
        self, bound: BoundArguments, options: CallOptions, lent: Sequence[int], data: Sequence[Data] | None = None
    ) -> None:
        """Make a call of these arguments, of which the source of the loop has lent some leaves, by number."""
        self.bound, self._options, self._lent = bound, options, lent
        self.data = data_among(bound) if data is None else data
        # The call as it is fed, for this group, the versions of the data then, and whether it has copies of rows.
        self._fed: Fed | None = None
        self._is_kept = False
        self._group: Group | None = None
        self._versions: list[int] = []
        # Data to which the source has written since, and whether the call was not fed then: nobody has its rows. If an
        # error was why, it is raised at the call's turn.
        self._passed: set[int] = set()
        self._is_lost, self.written = False, set[int]()
        self._error: Exception | None = None

    def takes_from_devices(self) -> bool:
        """Tell whether all rows lie on devices, so that there is nothing to send early."""
        leaves = self.bound.leaves
        for i in self.bound.spec.scattered:
            leaf = leaves[i]
            if not isinstance(leaf, Data) or leaf._place == "host":
                return False
        return True

    def keep_batch(self) -> None:
        """Copy the batch, unless it never changes: the source may write the next one there."""
        batch = self._options.batch
        if isinstance(batch, np.ndarray):
            self._options = CallOptions(batch.copy(), *self._options[1:])
        elif type(batch) not in _NEVER_CHANGE:
            self._options = self._options._replace(batch=deepcopy(batch))

    def wait(self, site: Site, in_list: bool) -> None:
        """Feed the call, and keep what its owners may change before its turn.

        Args:
          site: where it will run.
          in_list: whether a program may run several such calls, to which rows go together.
        """
        if type(self._options.batch) not in _NEVER_CHANGE:
            self.keep_batch()
        # Lists of calls without data are recognised when they are due, since only then it is told which go together.
        is_fed = not (in_list and len(self._lent) == len(self.bound.leaves) and not self.data)
        is_fed = is_fed and _can_wait_fed(site.group, self.bound, self._options)
        is_read_again = bool(self.data or in_list or any(self.bound.spec.overlaps) or not is_fed)
        if self.data:
            self._versions = [data._version for data in self.data]
        if is_read_again:
            self._copy_lent()
        elif self._lent:
            self._copy_lent(self.bound.spec.broadcast, jax.Array)
        try:
            if is_fed:
                self._feed(site, in_list, bool(self._lent) and not is_read_again)
        # The call raises it at its turn, if it is still so.
        except Exception as error:
            self._error = error.with_traceback(None)
            self._copy_lent()

    def _copy_lent(self, which: Sequence[int] | None = None, of: type = object) -> None:
        """Copy leaves that the source has lent: it may write there, or donate them."""
        leaves = list(self.bound.leaves)
        for i in self._lent:
            if (which is None or i in which) and isinstance(leaves[i], of):
                leaves[i] = _copied(leaves[i])
        self.bound = self.bound._replace(leaves=leaves)

    def _feed(self, site: Site, in_list: bool, gives_back: bool) -> None:
        with LOCK:
            fed = self._fed_now(site)
            is_known = fed.form.is_plain or fed.form.newest is not None
            # A function that communicates runs on all devices as one, if rows do not divide. Its trace tells, which
            # processes make together.
            if not is_known and not site.group._is_multi_process:
                is_known = True
                if isinstance(fed.form.with_plan(site)[1], Instead):
                    fed = self._fed_now(site.as_one())
            form, lengths = fed.form, fed.rows.lengths or ()
            is_sent = fed.num_slices == 1 and is_known and not (in_list or form.exchanges)
            # Rows of synk's own stand for the user's: to let go of what a source has lent, to name a row that makes a
            # result not finite, and to be fed again as they were.
            is_plain = not (self.data or any(self.bound.spec.overlaps))
            owns = gives_back or (is_plain and (site.function.refuses_nan or not is_known))
            # Sent without filler they are the rows themselves.
            is_exact = owns and form.is_plain and fed.group._way.rows_sent(max(lengths)) == sum(lengths)
            # Rows of several data are kept: if the source writes to one and the loop to another, both are needed.
            self._is_kept = not is_sent or (owns and not is_exact) or len(self.data) > 1
            numbers = next(iter(fed.rows.selections), None)
            if self._is_kept:
                fed.keep()
            if is_sent:
                fed.send_early()
            else:
                fed.placed()
            if owns:
                if not self._is_kept:
                    fed.rows = _rows_of(fed.rows, fed.sent or ())
                bound = _with_own_arrays(self.bound, fed.rows.sources, fed.placed())
                self.bound, self._options = bound._replace(numbers=numbers), self._options._replace(batch=None)
                fed.given, fed.leaves = (self.bound, self._options), self.bound.leaves
        self._fed, self._group = fed, site.group

    def _fed_now(self, site: Site) -> Fed:
        """Feed the call from what its arguments hold now, but from what it has of data that the source has passed."""
        old = self._fed
        if not self._passed or old is None:
            self._versions = [data._version for data in self.data] if self.data else []
            return feed(site, self.bound, self._options)
        stale, self._versions = self._stale(), [data._version for data in self.data]
        # Its kind and its rows are those of before: the source may have given its data another length since.
        if old.site.group is not site.group:
            site = site.as_one()
        kind, leaves, spec = old.kind, self.bound.leaves, self.bound.spec
        sources, selections, broadcast = [*old.rows.sources], [*old.rows.selections], [*old.placed()]
        rows = kind.select(site, leaves, self._options, sources)[1]
        self._is_lost |= old.site.group is not site.group or not kind.fits(leaves, stale)
        for i, at in enumerate(spec.scattered):
            if id(leaves[at]) in stale and not self._is_lost:
                read = rows.inputs[i].read
                sources[i] = leaves[at] if read is None else read(leaves[at], site.group)
                selections[i] = rows.selections[i]
            elif old.rows.inputs[i].feed.layout == "rows":
                self._is_lost |= not self._is_kept
        for i, at in enumerate(spec.broadcast):
            if id(leaves[at]) in stale and not self._is_lost:
                broadcast[i] = kind.placers[i][1](site.group, leaves[at])
        selected = old.form, old.rows._replace(sources=sources, selections=selections)
        fed = Fed(site, (self.bound, self._options), kind, leaves, selected, (old.num_slices, old.choice))
        fed.seen |= {n: old.seen[n] for n in old.seen if id(leaves[spec.broadcast[n]]) not in stale}
        fed.broadcast, fed.given = broadcast, None
        return fed

    def pass_by(self, since: int) -> None:
        """Note that the source was asked after so many writes. What it has written comes after this call."""
        for i, data in enumerate(self.data):
            if data._version > since:
                self._is_lost |= self._fed is None
                self._passed.add(id(data))
                self._versions[i] = data._version
                if self._fed is not None:
                    self._fed.given = None

    def _stale(self) -> set[int]:
        """Return the data, by id, to which others than the source have written since."""
        pairs = zip(self.data, self._versions, strict=False)
        return {id(data) for data, version in pairs if data._version != version}

    def _is_stale(self, swapped: Set[int]) -> bool:
        """Tell whether others than the source have written to the data since."""
        stale = self._stale()
        # Calls in turn would have written in another order.
        self._is_lost |= not stale.isdisjoint(self._passed | swapped)
        return bool(stale)

    def refresh(self, site: Site, in_list: bool, swapped: Set[int]) -> bool:
        """Feed the call again if others than the source have written to its data, and tell whether they have.

        The source has written to the data `swapped` for calls that are not due yet.
        """
        is_stale = self._is_stale(swapped)
        if is_stale and self._fed is not None and not self._is_lost:
            try:
                self._feed(site, in_list, gives_back=False)
            # The call raises it at its turn, if it is still so.
            except Exception as error:
                self._fed, self._error = None, error.with_traceback(None)
        return is_stale

    def due(self, site: Site, swapped: Set[int] = frozenset()) -> Fed:
        """Return the fed call at its turn. Callers hold the lock."""
        fed = self._fed
        is_stale = bool(self.data) and self._is_stale(swapped)
        is_same = fed is not None and self._group is site.group and fed.kind.base.options == trace_options()
        if fed is None or is_stale or not is_same or fed.site.function is not site.function:
            if not self._is_lost:
                self._fed = fed = self._fed_now(site)
                self._group = site.group
        if self._is_lost or fed is None:
            if self._error is not None:
                raise self._error
            by_source = [data.name for data in self.data if id(data) in self._passed | swapped]
            names = ", ".join(dict.fromkeys(by_source or [data.name for data in self.data]))
            raise SynkError(
                f"{site.function.name}: both the source of the loop and others have written to {names} since this "
                f"item was taken early, so the rows that it should read are gone. Write from one place, or give "
                f"prefetch=0 and per_launch=1, which take an item when the loop comes to it."
            )
        # The view of a site keeps states of variables for one call.
        fed.site = site if fed.site.group is site.group else site.as_one()
        return fed


def data_among(bound: BoundArguments) -> list[Data]:
    return [leaf for leaf in bound.leaves if isinstance(leaf, Data)]


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Data | Shared):
        return leaf
    return ProcessLocalRows(copied(leaf.source)) if isinstance(leaf, ProcessLocalRows) else copied(leaf)


def _rows_of(rows: Rows, sent: Sequence[Any]) -> Rows:
    """Return the same rows where they were sent to, so that what they came from can go."""
    whole = [Selection(None, 0, selection.rows) for selection in rows.selections]
    return rows._replace(sources=sent[: len(whole)], selections=whole)


def _with_own_arrays(bound: BoundArguments, rows: Sequence[Any], broadcast: Sequence[Any]) -> BoundArguments:
    """Put arrays of synk's own in the place of those that a source has lent."""
    leaves, spec = list(bound.leaves), bound.spec
    for i, array in zip(spec.scattered, rows, strict=False):
        key = key_of(leaves[i])
        leaves[i] = array if key is None else as_keys(array, key)
    for i, array in zip(spec.broadcast, broadcast, strict=False):
        if hasattr(leaves[i], "__array__") and not isinstance(leaves[i], jax.Array):
            leaves[i] = array
    return bound._replace(leaves=leaves)


def _can_wait_fed(group: Group, bound: BoundArguments, options: CallOptions) -> bool:
    """Tell whether a call can be fed before its turn: it needs no other process, and no value of a variable."""
    if not bound.spec.scattered or options.num_slices == AUTO:
        # Its rows are those that a variable holds, or its slices those that fit once its program is compiled.
        return False
    if Shared in map(type, bound.leaves):
        return False
    if not group._is_multi_process:
        return True
    for leaf in bound.leaves:
        # Processes exchange their numbers of rows, and rows of data, which all of them would have to reach.
        if isinstance(leaf, Data | ProcessLocalRows) or not can_go_ahead(group, leaf):
            return False
    return not is_checked("calls")
