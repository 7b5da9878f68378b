"""Waiting: the calls of a loop before their turn."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import jax
import numpy as np

from .._base.errors import SynkError
from .._base.jax_context import is_checked, trace_options
from .._base.pytree import as_keys, key_of
from .._call.binding import AUTO, BoundArguments, CallOptions
from .._call.feed import Fed, feed
from .._call.plan import Site
from .._data.dataset import Data
from .._data.process_rows import ProcessLocalRows
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
    """

    __slots__ = ("_fed", "_is_passed", "_lent", "_options", "_versions", "bound", "data")

    def __init__(
        self, bound: BoundArguments, options: CallOptions, lent: Sequence[int], data: Sequence[Data] | None = None
    ) -> None:
        """Make a call of these arguments, of which the source of the loop has lent some leaves, by number."""
        self.bound, self._options, self._lent = bound, options, lent
        self.data = data_among(bound) if data is None else data
        self._fed: Fed | None = None
        self._versions: list[int] = []
        # Whether the source has written to the data since, so that nobody has the rows any more that the call reads.
        self._is_passed = False

    def takes_from_devices(self) -> bool:
        """Tell whether all rows lie on devices, so that there is nothing to send early."""
        leaves = self.bound.leaves
        for i in self.bound.spec.scattered:
            leaf = leaves[i]
            if not isinstance(leaf, Data) or leaf._place == "host":
                return False
        return True

    def versions(self) -> list[int]:
        return [data._version for data in self.data]

    def keep_batch(self) -> None:
        """Copy the batch, unless it never changes: the source may write the next one there."""
        batch = self._options.batch
        if type(batch) not in _NEVER_CHANGE:
            kept = batch.copy() if isinstance(batch, np.ndarray) else deepcopy(batch)
            self._options = self._options._replace(batch=kept)

    def wait(self, site: Site, in_list: bool, by_turn: set[int]) -> None:
        """Feed the call, and keep what its owners may change before its turn.

        Args:
          site: where it will run.
          in_list: whether a program may run several such calls, to which rows go together.
          by_turn: data by id, of which the calls that read it are fed at their turn.
        """
        self.keep_batch()
        bound, options = self.bound, self._options
        is_fed = _can_wait_fed(site.group, bound, options) and by_turn.isdisjoint(map(id, self.data))
        # Lists of calls without data are recognised when they are due, since only then it is told which go together.
        is_fed = is_fed and not (in_list and len(self._lent) == len(bound.leaves) and not self.data)
        is_read_again = bool(self.data or in_list or any(bound.spec.overlaps) or not is_fed)
        if self.data:
            self._versions = self.versions()
        if is_read_again:
            self._copy_lent()
        elif self._lent:
            self._copy_lent(self.bound.spec.broadcast, jax.Array)
        try:
            if is_fed:
                self._feed(site, in_list, bool(self._lent) and not is_read_again)
        # The call raises it at its turn, if it is still so.
        except Exception:
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
            if self.data:
                self._versions = self.versions()
            fed = feed(site, self.bound, self._options)
            form, lengths = fed.form, fed.rows.lengths or ()
            # Uneven rows of a function that communicates go to all devices as one. Its first trace tells.
            is_sent = (
                fed.num_slices == 1 and (form.is_plain or form.newest is not None) and not (in_list or form.exchanges)
            )
            # Arrays that were sent without filler stand for those that the source has lent.
            is_exact = gives_back and form.is_plain and fed.group._way.rows_sent(max(lengths)) == sum(lengths)
            if not is_sent or (gives_back and not is_exact):
                fed.keep()
            if is_sent:
                fed.send_early()
            if gives_back:
                rows = fed.sent if is_sent and is_exact else fed.rows.sources
                self.bound = _with_own_arrays(self.bound, rows or (), fed.placed())
                fed.given = self.bound, self._options
        self._fed = fed

    def pass_by(self, before: list[int]) -> None:
        """Note that the source was asked. What it has written to data since then comes after this call."""
        now = self.versions()
        if now != before:
            self._is_passed, self._versions = True, now if before == self._versions else self._versions
            if self._fed is None:
                self._versions = []

    def refresh(self, site: Site, in_list: bool, by_turn: set[int]) -> None:
        """Feed the call again if anybody but the source has written to its data since."""
        if self.data and self._fed is not None and not self._is_passed:
            pairs = zip(self.data, self._versions, strict=True)
            if written := [data for data, version in pairs if data._version != version]:
                by_turn.update(map(id, written))
                self._fed = None
                self.wait(site, in_list, set())

    def due(self, site: Site) -> Fed:
        """Return the fed call at its turn. Callers hold the lock."""
        fed = self._fed
        if self.data and self._is_passed and self._versions != self.versions():
            names = ", ".join(dict.fromkeys(data.name for data in self.data))
            raise SynkError(
                f"{site.function.name}: both the source of the loop and others have written to {names} since this "
                f"item was taken early, so the rows that it reads are gone. Write from one place, or give prefetch=0 "
                f"and per_launch=1, which take an item when the loop comes to it."
            )
        is_as_fed = (
            fed is not None
            and fed.site.group is site.group
            and fed.site.function is site.function
            and fed.kind.base.options == trace_options()
            and (not self.data or self._versions == self.versions())
        )
        if not is_as_fed:
            self._versions = self.versions()
            self._fed = fed = feed(site, self.bound, self._options)
        assert fed is not None
        return fed


def data_among(bound: BoundArguments) -> list[Data]:
    return [leaf for leaf in bound.leaves if isinstance(leaf, Data)]


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Data | Shared):
        return leaf
    return ProcessLocalRows(copied(leaf.source)) if isinstance(leaf, ProcessLocalRows) else copied(leaf)


def _with_own_arrays(bound: BoundArguments, rows: Sequence[Any], broadcast: Sequence[Any]) -> BoundArguments:
    """Put arrays of synk's own in the place of those that a source has lent."""
    leaves, spec = list(bound.leaves), bound.spec
    for i, array in zip(spec.scattered, rows, strict=False):
        key = key_of(leaves[i])
        leaves[i] = array if key is None else as_keys(array, key)
    for i, array in zip(spec.broadcast, broadcast, strict=True):
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
