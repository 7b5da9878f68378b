"""Iterate: a function over many batches, the next ones picked and sent while the current one runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ._arguments import arrays, check_slices
from ._data import Data
from ._group import PyTree, group
from ._inputs import common_rows
from ._local import Local
from ._prefetch import Prefetch, sent
from ._rows import gather_rows, select
from ._sources import narrow
from ._trace import as_keys

if TYPE_CHECKING:
    from ._bind import Layout
    from ._function import Function


def iterate(
    f: Function, leaves: Sequence[Any], layout: Layout, batches: Iterable[Any], size: int, slices: int, subset: Any
) -> Prefetch[Any, PyTree]:
    """Call `f` for each batch."""
    current = group()
    check_slices(slices, f.name)
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"{f.name}.iterate: batches is {batches!r}; give an iterable of batches, e.g. synk.minibatches."
        )
    sources, keys = arrays(f.name, layout, leaves, layout.scattered)
    names = layout.scattered_names
    picked = [i for i, source in enumerate(sources) if not (isinstance(source, Data) and source.is_minibatch)]
    resident = [i for i in picked if isinstance(sources[i], Data) and sources[i].place != "host"]
    common_rows(f.name, names, sources, picked)
    if not picked:
        raise ValueError(f"{f.name}.iterate: batches pick rows of scattered inputs, but this call has none.")

    followed = [source for source in sources if isinstance(source, Data)]

    def ahead(batch: Any) -> tuple[list[Any], Any, list[int], Any, float]:
        """Pick the rows of what is on the host; what is resident is picked from where it is."""
        time = perf_counter()
        versions = [source.version for source in followed]
        rows = common_rows(f.name, names, sources, picked)
        selection = select(batch, rows or 0, f.name, names[picked[0]])
        given = list(leaves)
        for i in picked:
            if i in resident:
                continue
            leaf = sources[i]
            source = leaf.source if isinstance(leaf, Data) else leaf
            if isinstance(leaf, Local):  # of which each process picks its own
                mine = select(batch, leaf.shape[0], f.name, names[i])
                given[layout.scattered[i]] = Local(gather_rows(leaf.source, mine, narrow(leaf.dtype)))
                continue
            there = sent(current, source, selection, narrow(leaf.dtype), is_cut=slices == 1)
            if resident:  # to which the batch still applies
                there = Data(there, "host", True, None, names[i], key=keys[i])
            elif keys[i] is not None:
                there = as_keys(there, keys[i])
            given[layout.scattered[i]] = there
        kept = deepcopy(batch) if followed else None  # whoever made it may use it again for the next one
        return given, kept if resident else None, versions, kept, perf_counter() - time

    def arrive(item: tuple[list[Any], Any, list[int], Any, float]) -> PyTree:
        given, batch, versions, kept, seconds = item
        if versions != [source.version for source in followed]:  # written since: pick again
            given, batch, _, _, more = ahead(kept)
            seconds += more
        f.stats.sending += seconds
        return f.launch(given, layout, batch, None, slices, subset)

    return Prefetch(batches, size, ahead, arrive, f"{f.name}.iterate: prefetch")
