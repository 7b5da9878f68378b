"""Iterate: a function over many batches, the next ones picked and sent while the current one runs."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from time import perf_counter
from typing import Any, NamedTuple

from .._base.pytree import PyTree, as_keys, narrow
from .._data.dataset import Data, source_of
from .._data.prefetch import Prefetch
from .._data.process_rows import ProcessLocalRows
from .._data.selection import Selection, select
from .._data.transfer import gather_rows, place_rows_ahead
from .._runtime.group import Group
from .binding import BoundArguments
from .inputs import check_leaves, common_rows
from .row_input import RowRequest
from .spec import FunctionSpec


class _Ahead(NamedTuple):
    """A call made ready: its arguments, the batch where there is data to pick from, and versions of that."""

    bound: BoundArguments
    versions: list[int]
    kept: Any
    seconds: float


class Batches:
    """The arguments of a call, of which it picks the rows of each batch."""

    def __init__(
        self, function: FunctionSpec, bound: BoundArguments, request: RowRequest, group: Group, call: str = "iterate"
    ) -> None:
        self.function, self.bound, self.request, self.group = function, bound, request, group
        self.name = f"{function.name}.{call}"
        looked = check_leaves(bound, function.name, group)
        self.sources, self.keys = looked.scattered, [looked.keys[i] for i in bound.spec.scattered]
        self.names = bound.spec.scattered_names
        sources = self.sources
        self.picked = [i for i, s in enumerate(sources) if not (isinstance(s, Data) and s.is_minibatch)]
        self.resident = [i for i in self.picked if isinstance(sources[i], Data) and sources[i].place != "host"]
        self.followed = [source for source in sources if isinstance(source, Data)]
        self.rows()
        if not self.picked:
            raise ValueError(f"{self.name}: batches pick rows of scattered inputs, but this call has none.")

    def rows(self) -> int:
        """How many there are to pick from."""
        is_local = any(isinstance(source, ProcessLocalRows) for source in self.sources)
        may_be_empty = is_local and self.group._is_multi_process
        return common_rows(self.function.name, self.names, self.sources, self.picked, may_be_empty) or 0

    def _select(self, batch: Any, rows: int, i: int) -> Selection:
        return select(batch, rows, self.function.name, self.names[i]) if rows else Selection(None, 0, 0)

    def versions(self) -> list[int]:
        """Of the data picked from."""
        return [source._version for source in self.followed]

    def ahead(self, batch: Any) -> _Ahead:
        """Pick the rows of what is on the host; what is resident is picked from where it is."""
        start, versions = perf_counter(), self.versions()
        selection = self._select(batch, self.rows(), self.picked[0])
        given: list[Any] = list(self.bound.leaves)
        for i in self.picked:
            if i not in self.resident:
                given[self.bound.spec.scattered[i]] = self._picked(i, batch, selection)
        kept = deepcopy(batch) if self.followed else None  # whoever made it may use it again for the next one
        numbers = None if self.resident else selection
        return _Ahead(self.bound._replace(leaves=given, numbers=numbers), versions, kept, perf_counter() - start)

    def _picked(self, i: int, batch: Any, selection: Selection) -> Any:
        leaf = self.sources[i]
        if isinstance(leaf, ProcessLocalRows):  # of which each process picks its own
            own = self._select(batch, leaf.shape[0], i)
            return ProcessLocalRows(gather_rows(leaf.source, own, narrow(leaf.dtype)))
        source = source_of(leaf) if isinstance(leaf, Data) else leaf
        is_cut = self.request.num_slices == 1 and self.bound.spec.overlaps[i] is None
        there = place_rows_ahead(self.group, source, selection, narrow(leaf.dtype), is_cut=is_cut)
        if self.resident:  # to which the batch still applies
            return Data(there, self.names[i], minibatch=True, key=self.keys[i])
        return as_keys(there, self.keys[i])


def iterate(
    rows: Batches,
    batches: Iterable[Any],
    size: int,
    call: Callable[[BoundArguments, RowRequest], PyTree],
    refuse: Callable[[], None],
) -> Prefetch[Any, PyTree]:
    """Call a function for each batch; `refuse` raises where nothing may be launched."""
    name = rows.name
    if not isinstance(batches, Iterable):
        raise TypeError(f"{name}: batches is {batches!r}; give an iterable of batches, e.g. synk.minibatches.")

    def arrive(item: _Ahead) -> PyTree:
        seconds = item.seconds
        if item.versions != rows.versions():  # written since: pick again
            item = rows.ahead(item.kept)
            seconds += item.seconds
        rows.function.stats.sending += seconds
        return call(item.bound, rows.request._replace(batch=item.kept if rows.resident else None))

    return Prefetch(batches, size, rows.ahead, arrive, f"{name}: prefetch", refuse)
