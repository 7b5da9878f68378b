"""Shadow: under this plugin (`-p tests.shadow`) each call of a known kind is also worked out in full, and compared.

A kind is made from the key of a call, so what the key leaves out cannot matter, as long as the key says all that a leaf
is. Here each leaf is described from its own attributes, a new kind is made of that, and it selects the rows of the call
once more. All that programs depend on must be equal.
"""

import threading
from collections import Counter

import jax
import numpy as np

import synk._call.feed as feed
import synk._call.kinds as kinds
from synk._base.pytree import SCALARS, key_of, number_dtype
from synk._call.leaves import LeafSpec
from synk._call.plan import Form
from synk._data.dataset import Data
from synk._data.process_rows import ProcessLocalRows
from synk._data.sources import is_in_memory

_recognise, _select = kinds.recognise, kinds.Kind.select
_compared = Counter()
_last = threading.local()


def described(leaf, was_variable):
    """Describe a leaf from its own attributes."""
    if isinstance(leaf, Data):
        in_memory = is_in_memory(leaf._source)
        of_data = leaf.is_minibatch, in_memory, was_variable
        return LeafSpec("data", leaf.shape, leaf.dtype, False, leaf._key, leaf.place, *of_data)
    if isinstance(leaf, ProcessLocalRows):
        return LeafSpec("local", leaf.shape, leaf.dtype)
    if isinstance(leaf, jax.Array):
        return LeafSpec("array", leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), key_of(leaf))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return LeafSpec("shape", leaf.shape, leaf.dtype, bool(leaf.weak_type), key_of(leaf))
    if isinstance(leaf, np.generic):
        return LeafSpec("number", (), leaf.dtype)
    if isinstance(leaf, SCALARS):
        return LeafSpec("number", (), number_dtype(leaf), not isinstance(leaf, bool))
    return LeafSpec("host", tuple(leaf.shape), leaf.dtype)


def recognise(site, bound, options):
    kind, leaves = _recognise(site, bound, options)
    specs = [described(leaf, spec.is_variable) for leaf, spec in zip(leaves, kind._specs, strict=True)]
    assert specs == list(kind._specs), (specs, kind._specs)
    if options.output_subset is not None:
        options = options._replace(output_subset=tuple(options.output_subset))
    full = kinds.Kind(site, bound.spec, specs, options)
    assert kind.base == full.base, (kind.base, full.base)
    assert [(i, place.__qualname__) for i, place in kind.placers] == [
        (i, place.__qualname__) for i, place in full.placers
    ]
    _last.kinds = kind, full
    _compared["kinds"] += 1
    return kind, leaves


def select(kind, site, leaves, options, sources=None):
    form, rows = _select(kind, site, leaves, options, sources)
    known, full = getattr(_last, "kinds", (None, None))
    # Tests look that nothing keeps functions and groups alive.
    _last.kinds = None, None
    if known is not kind or (kind._is_local and site.group._is_multi_process):
        return form, rows
    other, again = _select(full, site, leaves, options)
    assert form.call == other.call, (form.call, other.call)
    assert list(form.inputs) == list(other.inputs), (form.inputs, other.inputs)
    assert (rows.lengths, rows.rows_before) == (again.lengths, again.rows_before)
    for one, two in zip(rows.selections, again.selections, strict=True):
        assert one[1:] == two[1:]
        assert (one.indexes is None) == (two.indexes is None)
        assert one.indexes is None or np.array_equal(one.indexes, two.indexes)
    _compared["rows"] += 1
    return form, rows


def with_plan(form, site, with_plan=Form.with_plan):
    form, plan = with_plan(form, site)
    if site.purpose != "afresh":
        assert with_plan(form.with_call(form.call), site)[1] is plan
        _compared["plans"] += 1
    return form, plan


def pytest_configure(config):
    for fn in (recognise, select, with_plan):
        # Tracebacks of errors show no frame of synk's own files, so no frame of these either.
        fn.__code__ = fn.__code__.replace(co_filename=kinds.__file__)
    feed.recognise, kinds.Kind.select, Form.with_plan = recognise, select, with_plan


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"shadow: compared {dict(_compared)}")
