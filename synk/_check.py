"""Check: the serial answer, and whether the parallel one is equal to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _engine, _flight
from ._errors import DivergedError, LawError
from ._group import Group, PyTree, group
from ._plan import Call, Plan, plan
from ._program import Signature, holds_rows
from ._rows import select_local, taken_together
from ._run import Outcome, outcome_of, prepare
from ._shared import Shared
from ._split import cut
from ._task import View

if TYPE_CHECKING:
    from ._function import Function

# By bits of the dtype: rounding differs with the order of sums.
TOLERANCES = {8: (0.2, 0.1), 16: (2e-2, 2e-2), 32: (2e-4, 2e-5), 64: (1e-9, 1e-11)}


def serial(
    f: Function, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, batch_s: Any, update: bool
) -> PyTree:
    """Run once on one device, over all rows."""
    with _flight.LOCK:
        current = group()
        outcome = _outcome(f, _one(current), _one_device(current, batch_s), args, kwargs, batch, batch_s, 1)
        for variable, new in outcome.updates.items() if update else ():
            if new.lengths is None:
                one = [leaf[0] for leaf in new.leaves] if new.lies == "stacked" else new.leaves
                variable.commit_copies(current, one)
            else:
                rows = [np.asarray(leaf)[0] for leaf in new.leaves]
                parts = _recut(rows, variable.lengths or ())
                variable.place_rows(parts)
        # Everywhere, as a call's results are: what lies on one device cannot meet those in one jnp operation.
        leaves = [_engine.sent(current, leaf, "everywhere") for leaf in outcome.leaves]
    return outcome.built.result.tree(leaves)


def compiled(signature: Signature, call: Call, the_plan: Plan) -> jax.stages.Compiled:
    """The compiled program that ends such a call."""
    return prepare(signature, call, the_plan).built.program.compiled


def check(
    f: Function, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, batch_s: Any, num_slices: int,
    rtol: float | None, atol: float | None,
) -> None:  # fmt: skip
    """Compare both ways from one state; LawError names what differs."""
    with _flight.LOCK:
        current = group()
        parallel: Group = current
        view: Callable[[Shared], View] | None = None
        if current.size == 1:  # one replica is the serial program itself; two simulated ones are not
            parallel = current.simulated(2)
            view = _simulated(current, parallel, batch_s)
        close = _Close(rtol, atol)
        found = list(
            _compare_outputs(f.mapping(), parallel, view, current, args, kwargs, batch, batch_s, num_slices, close)
        )
        if f.has_then or not found:
            one = _outcome(f, _one(current), _one_device(current, batch_s), args, kwargs, batch, batch_s, 1)
            many = _outcome(f, parallel, view, args, kwargs, batch, batch_s, num_slices)
            if f.has_then:
                found += _differing_results(one, many, close)
            found += _differing_updates(one, many, close, parallel)
    if found:
        lines = "\n  ".join(dict.fromkeys(found))
        raise LawError(
            f"{f.name}: on {parallel.size} replicas the answer is not the serial one.\n  {lines}\n"
            f"  Name ops with outputs= or reduce=, and update shared variables in then."
        )


class _Close:
    def __init__(self, rtol: float | None, atol: float | None) -> None:
        self.rtol, self.atol = rtol, atol

    def __call__(self, one: Any, other: Any, dtype: Any = None) -> bool:
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape:
            return False
        bits = jnp.finfo(dtype or one.dtype).bits if jnp.issubdtype(dtype or one.dtype, jnp.inexact) else 64
        rtol, atol = TOLERANCES[bits]
        rtol = rtol if self.rtol is None else self.rtol
        atol = atol if self.atol is None else self.atol
        wide = np.complex128 if np.iscomplexobj(one) or np.iscomplexobj(other) else np.float64
        return np.allclose(one.astype(wide), other.astype(wide), rtol=rtol, atol=atol, equal_nan=True)


def _off(one: Any, other: Any) -> str:
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return f"its shape is {other.shape}, serially {one.shape}"
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    off = np.abs(one.astype(wide) - other.astype(wide))
    at = np.unravel_index(int(np.argmax(np.nan_to_num(off, nan=np.inf))), off.shape)
    return f"it is {other[at]:.6g}, serially {one[at]:.6g}" + (" where they differ most" if one.ndim else "")


def _outcome(
    f: Function, on: Group, view: Callable[[Shared], View] | None, args: tuple[Any, ...], kwargs: dict[str, Any],
    batch: Any, batch_s: Any, num_slices: int,
) -> Outcome:  # fmt: skip
    """Run without committing or donating anything."""
    home = None if view is None else group()  # whose data has other parts than the view's variables
    if home is not None and view is not None and home.spans:  # replicas give each other rows now, and not in a trace
        for variable in dict.fromkeys((*f.shared, *f.variables_named())):
            if variable.lengths is not None:
                view(variable)
    call, signature = f.bind(on, args, kwargs, batch, batch_s, num_slices > 1, None, view, donate=False, home=home)
    try:
        outcome = outcome_of(signature, prepare(signature, call, plan(signature, call, num_slices)))
    finally:
        signature.view = None  # calls see variables as they are; and the copies are freed
    held = next((variable for variable in outcome.updates if batch_s is not None and variable.lengths), None)
    if held is not None:
        raise holds_rows(f.name, held.name)
    f.remember(signature)
    return outcome


# Shared variables, as seen by other groups than their own.


def _one(current: Group) -> Group:
    """One device, of this process: the first."""
    return current.span(current.mine.start, current.mine.start + 1)


def _one_device(current: Group, batch_s: Any) -> Callable[[Shared], View]:
    """Variables for one replica: the value that all share, or the rows picked of all, in rank order."""
    views: dict[Shared, View] = {}

    def view(variable: Shared) -> View:
        if variable not in views:
            leaves = variable.bind(current)
            one = _one(current)
            if variable.lengths is not None:
                rows, count = _all_rows(variable, batch_s)
                stacked = [jax.device_put(leaf[None], one.stacked) for leaf in rows]
                views[variable] = View(stacked, "stacked", (count,), True)
            elif not variable.is_equal:
                raise DivergedError(variable.divergence())
            else:
                lies = variable.lies
                mine = current.mine.start
                first = [_engine.restrict(current, mine, mine + 1, leaf, lies) for leaf in leaves]
                views[variable] = View(first, lies, None, True)
        return views[variable]

    return view


def _all_rows(variable: Shared, batch_s: Any) -> tuple[list[np.ndarray], int]:
    """The rows that a variable holds on all replicas, those picked alone; and how many."""
    rows, lengths = variable.all_rows(), variable.lengths or ()
    if batch_s is not None:
        local = select_local(batch_s, lengths, "batch_s", variable.name)
        together = taken_together(local)
        index = together.positions(0, together.rows)
        rows, lengths = [leaf[index] for leaf in rows], local.lengths
    return rows, sum(lengths)


def _simulated(current: Group, parallel: Group, batch_s: Any) -> Callable[[Shared], View]:
    """Variables of a group of one replica, for several simulated ones."""
    views: dict[Shared, View] = {}

    def view(variable: Shared) -> View:
        if variable not in views:
            leaves = variable.stacked(current)
            if variable.lengths is None:
                stacked = _engine.copies(parallel, [leaf[0] for leaf in leaves], "stacked")
                views[variable] = View(stacked, "stacked", None, variable.is_equal)
            else:
                rows, count = _all_rows(variable, batch_s)
                lengths = tuple(part.rows for part in cut(count, parallel.size))
                parts = _recut(rows, lengths)
                stacked = [
                    _engine.stack_parts(parallel, [part[i] for part in parts], max(lengths)) for i in range(len(leaves))
                ]
                views[variable] = View(stacked, "stacked", lengths, False)
        return views[variable]

    return view


def _recut(rows: Sequence[np.ndarray], lengths: Sequence[int]) -> list[list[np.ndarray]]:
    stops = np.cumsum(lengths).tolist()
    return [[leaf[stop - length : stop] for leaf in rows] for stop, length in zip(stops, lengths, strict=True)]


# What differs.


def _compare_outputs(
    f: Function, parallel: Group, view: Any, current: Group, args: Any, kwargs: Any, batch: Any, batch_s: Any,
    num_slices: int, close: _Close,
) -> Iterator[str]:  # fmt: skip
    """Combined outputs, before any then; each that differs, with the ops that would have matched."""
    run = (args, kwargs, batch, batch_s)
    many = _outcome(f, parallel, view, *run, num_slices)
    one = _outcome(f, _one(current), _one_device(current, run[3]), *run, 1)
    leaves = [many.outputs.leaves[i] for i in many.outputs.keep]
    lawful = [leaf.kind in ("sum", "fold", "rows") for leaf in leaves]
    differing = [
        i for i, leaf in enumerate(leaves) if lawful[i] and not close(one.leaves[i], many.leaves[i], leaf.dtype)
    ]
    parts: _Parts | None = _parts(f, parallel, view, run, num_slices) if differing else None
    for i in differing:
        hint = _matching(parts, i, one.leaves[i], close) if parts else ['"concat"'] * (leaves[i].op != "concat")
        fits = f"{' or '.join(hint)} would have matched" if hint else "no op would have matched"
        op = '"mean" of Weighted' if leaves[i].op == "weighted" else f'"{leaves[i].op}"'
        yield f"output{leaves[i].path} combined by {op}: {_off(one.leaves[i], many.leaves[i])}; {fits}."


class _Parts(NamedTuple):
    values: list[np.ndarray]
    weights: np.ndarray


def _parts(f: Function, parallel: Group, view: Any, run: Any, num_slices: int) -> _Parts | None:
    """Every output's parts as they come; None where their shapes differ."""
    args, kwargs, batch, batch_s = run
    raw = f.mapping(raw=True)
    home = None if view is None else group()
    call, signature = raw.bind(
        parallel, args, kwargs, batch, batch_s, num_slices > 1, None, view, donate=False, home=home
    )
    the_plan = plan(signature, call, num_slices)
    try:
        outcome = outcome_of(signature, prepare(signature, call, the_plan))
    except ValueError:
        return None
    finally:
        signature.view = None
    sizes = [w[r].rows for r in range(parallel.size) for w in the_plan.waves if w[r].rows]
    return _Parts([np.asarray(leaf) for leaf in outcome.leaves], np.array(sizes or [1] * parallel.size, np.float64))


def _matching(parts: _Parts, i: int, want: jax.Array, close: _Close) -> list[str]:
    value, weights = parts.values[i], parts.weights
    if value.ndim == 0 or len(value) != len(weights):
        return []
    number = value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)
    combined: dict[str, Any] = {
        "mean": np.tensordot(weights / weights.sum(), number, 1),
        "sum": number.sum(0), "max": number.max(0) if not np.iscomplexobj(value) else np.nan,
        "min": number.min(0) if not np.iscomplexobj(value) else np.nan, "prod": number.prod(0),
    }  # fmt: skip
    if value.ndim > 1:
        combined["concat"] = number.reshape(-1, *number.shape[2:])
    if value.dtype == bool:
        combined = {"any": value.any(0), "all": value.all(0)}
    return [f'"{op}"' for op, result in combined.items() if close(want, np.asarray(result), want.dtype)]


def _differing_results(one: Outcome, many: Outcome, close: _Close) -> Iterator[str]:
    treedef = one.built.result.treedef
    paths = jax.tree_util.tree_leaves_with_path(treedef.unflatten(range(treedef.num_leaves)))
    for (path, _), a, b in zip(paths, one.leaves, many.leaves, strict=True):
        if not close(a, b):
            yield f"result{jax.tree_util.keystr(path)} of then: {_off(a, b)}."


def _differing_updates(one: Outcome, many: Outcome, close: _Close, parallel: Group) -> Iterator[str]:
    for variable, new in many.updates.items():
        want = one.updates[variable]
        for path, a, b in zip(variable.paths, want.leaves, new.leaves, strict=True):
            whole = np.asarray(a)[0] if want.lies == "stacked" else np.asarray(a)
            ranks = range(parallel.size if new.lies == "stacked" else 1)
            lengths = new.lengths or [None] * parallel.size
            got = [_engine.host_entry(parallel, b, new.lies, rank, lengths[rank]) for rank in ranks]
            if new.lengths is not None:
                got = [np.concatenate(got)]
            wrong = [rank for rank, value in enumerate(got) if not close(whole, value)]
            if wrong:
                is_local = any(other is variable and needs is None for other, _, _, needs in many.built.ends)
                hint = "; update it in then, from combined outputs." if is_local else "."
                yield f"{variable.name}{path} updated on replica {wrong[0]}: {_off(whole, got[wrong[0]])}{hint}"
