"""Compose: a call under an outer jit, grad, vmap or checkpoint, as one traced operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _ops
from ._engine import Lies, lie, sent, spmd
from ._errors import SynkError
from ._group import AXIS, Group, PyTree, group
from ._ops import Gathered
from ._outputs import Outputs, Result
from ._program import Signature
from ._split import cut
from ._task import reindexed, run
from ._trace import Traced, as_keys, settings

if TYPE_CHECKING:
    from ._bind import Layout
    from ._function import Function


def call(
    f: Function, layout: Layout, leaves: Sequence[Any], batch: Any, batch_s: Any, num_slices: int, subset: Any
) -> PyTree:
    """Trace the call into whatever transformation is under way."""
    current = group()
    sources, broadcast, keys = f.traced_arrays(layout, leaves, batch, batch_s)
    rows = len(sources[0]) if sources else None
    if rows is None and num_slices > 1:
        raise ValueError(f"{f.name}: num_slices cuts rows, but no argument is scattered.")
    key = (
        current, settings(), layout, tuple((s.shape, s.dtype) for s in sources),
        tuple((b.shape, b.dtype, b.weak_type) for b in broadcast), keys, num_slices,
        None if subset is None else tuple(subset),
    )  # fmt: skip
    if key not in f.composed:
        signature = f.signature(current, layout, sources, broadcast, keys, num_slices > 1, subset)
        f.composed[key] = _build(signature, rows, num_slices)
    mapped, result = f.composed[key]
    index = _block_index(rows, current.size)
    if index is not None:
        sources = [source.at[index].get(mode="promise_in_bounds") for source in sources]
    lies: list[Lies] = [*lie("rows", len(sources)), *lie("everywhere", len(broadcast))]
    placed = [_placed(current, a, lie) for a, lie in zip([*sources, *broadcast], lies, strict=True)]
    values = mapped(*placed)
    return result.treedef.unflatten(map(as_keys, values, result.keys))


def _placed(current: Group, array: jax.Array, lie: Lies) -> jax.Array:
    """What one device holds cannot enter a program over several; a traced value has no place yet."""
    if isinstance(array, jax.core.Tracer) or not array.committed:
        return array
    return sent(current, array, "everywhere" if lie == "everywhere" else "stacked")


def _block_index(rows: int | None, size: int) -> np.ndarray | None:
    """Rows of equal blocks, one a replica, filled up with copies of real rows; None where they are equal as it is."""
    if rows is None or rows % size == 0:
        return None
    parts = cut(rows, size)
    tall = parts[0].rows
    return np.concatenate([np.minimum(part.start + np.arange(tall), rows - 1) for part in parts])


def _build(signature: Signature, rows: int | None, slices: int) -> tuple[Callable[..., Any], Result]:
    size = signature.group.size
    parts = None if rows is None else cut(rows, size)
    lengths = sorted({part.rows for part in parts}, reverse=True) if parts else [None]
    is_even = len(lengths) == 1
    traces = {m: _traces(signature, m, slices, is_even) for m in lengths if m != 0}
    first = next(iter(traces.values()))[0][1]
    outputs: Outputs = first.outputs
    own: list[int] = []  # what follows may need "first" on every replica
    shared = list(range(len(outputs.leaves)))
    leaves = reindexed(outputs.leaves, shared)
    long = lengths[0]

    def local(m: int | None, values: Sequence[jax.Array], rank: jax.Array) -> list[Any]:
        return _local(
            signature, traces[m], m, 1 / size if rows is None else 1 / rows, leaves, shared, own, values, rank
        )

    def combine(rank: jax.Array, *values: jax.Array) -> list[Any]:
        if is_even:
            mine = local(long, values, rank)
        else:
            shapes = jax.eval_shape(lambda *v: local(long, v, rank), *values)

            def short(*v: jax.Array) -> list[Any]:
                few = lengths[1]
                return [_pad(a, s) for a, s in zip(local(few, v, rank), shapes, strict=True)] if few else _zeros(shapes)

            longer = sum(part.rows == long for part in parts or ())
            mine = lax.cond(rank < longer, lambda *v: local(long, v, rank), short, *values)
        gathered = {
            i: Gathered(mine[len(own) + i], _keep(leaf.kind, parts, slices, mine[len(own) + i].shape[0]))
            for i, leaf in enumerate(leaves)
            if leaf.kind in ("rows", "parts")
        }
        ready = [gathered[i] if i in gathered else mine[len(own) + i] for i in range(len(leaves))]
        present = None if is_even else np.array([part.rows > 0 for part in parts or ()])
        whole = dict(zip(shared, _ops.across(ready, leaves, present), strict=True))
        whole |= dict(zip(own, mine[: len(own)], strict=True))
        return [whole[i] for i in outputs.keep]

    block = [jax.ShapeDtypeStruct(((long or 0), *s.shape), s.dtype) for s in signature.row_shapes]
    shapes = signature.shapes(combine, [*block, *signature.broadcast_shapes])
    then = signature.then(outputs, shapes)
    if then is not None and (then.reads or then.writes):
        raise _has_shared(signature, then)
    result = signature.result(outputs, then)

    def body(*values: jax.Array) -> list[jax.Array]:
        rank = lax.axis_index(AXIS)
        combined = combine(rank, *values)
        if then is not None:
            combined = run(then, {}, [*combined, *values[len(block) :], rank])[0]
        return [combined[i] for i in result.picked]

    ins: list[Lies] = [*lie("rows", len(block)), *lie("everywhere", len(signature.broadcast_shapes))]
    return jax.jit(spmd(signature.group, body, ins, lie("everywhere", len(result.picked)))), result


def _has_shared(signature: Signature, traced: Traced) -> SynkError:
    name = next(v.name for v in (*traced.reads, *(v for v, _ in traced.writes)))
    return SynkError(
        f"{signature.task.name}: it uses the shared variable {name}, so it cannot run inside jit, grad or vmap: "
        f'they would keep the value of now. Make it a "broadcast" argument and pass {name}.value.'
    )


def _traces(signature: Signature, m: int | None, slices: int, is_even: bool) -> list[tuple[int, Traced]]:
    """The slices of m rows: how many of each size, longer first, and the traced function for each."""
    sizes: list[int | None] = [None]
    if m is not None:
        sizes = [part.rows for part in cut(m, min(slices, m))]
    found = [(len([s for s in sizes if s == size]), signature.traced(size, is_even)) for size in dict.fromkeys(sizes)]
    for _, traced in found:
        if traced.reads or traced.writes:
            raise _has_shared(signature, traced)
    return found


def _local(
    signature: Signature, traces: list[tuple[int, Traced]], m: int | None, share: float, leaves: Any, shared: Any,
    own: Any, values: Sequence[jax.Array], rank: jax.Array,
) -> list[Any]:  # fmt: skip
    """One replica's own outputs, and its lifted ones merged over slices."""
    n = len(signature.row_shapes)
    rows, broadcast = values[:n], list(values[n:])
    sizes = None if m is None else [part.rows for part in cut(m, sum(times for times, _ in traces))]
    gather = [i for i, leaf in enumerate(leaves) if leaf.kind in ("rows", "parts")]
    merge = [i for i in range(len(leaves)) if i not in gather]
    merged: list[Any] | None = None
    entries: dict[int, list[Any]] = {i: [] for i in gather}
    at = 0
    mine: list[Any] = []
    for times, traced in traces:
        size = None if sizes is None else sizes[0 if not at else -1]
        weight = share * (size or 1)

        def part(chunk: Sequence[jax.Array], traced: Traced = traced, weight: float = weight) -> list[Any]:
            outs, _ = run(traced, {}, [*chunk, *broadcast, rank])
            return [*(outs[i] for i in own), *_ops.lift([outs[i] for i in shared], leaves, weight, rank)]

        if times == 1:
            outs = part([row if size is None else row[at : at + size] for row in rows])
            mine, lifted = outs[: len(own)], outs[len(own) :]
        else:
            assert size is not None
            chunks = [row[at : at + size * times].reshape(times, size, *row.shape[1:]) for row in rows]
            lifted = _loop(part, chunks, leaves, merge)
        for i in gather:
            entries[i].append(lifted[i])
        new = [lifted[i] for i in merge]
        merged = new if merged is None else _ops.merge(merged, new, [leaves[i] for i in merge], True)
        at += (size or 0) * times
    whole = dict(zip(merge, merged or [], strict=True)) | {i: jnp.concatenate(each) for i, each in entries.items()}
    return [*mine, *(whole[i] for i in range(len(leaves)))]


def _loop(part: Any, chunks: Sequence[jax.Array], leaves: Any, merge: Sequence[int]) -> list[Any]:
    """One slice after the other, in one loop."""
    gather = [i for i in range(len(leaves)) if i not in merge]
    shapes = jax.eval_shape(part, [chunk[0] for chunk in chunks])

    def start(i: int) -> jax.Array:
        fill = _ops.neutral(str(leaves[i].op), shapes[i].dtype) if leaves[i].kind == "fold" else 0
        return jnp.full(shapes[i].shape, fill, shapes[i].dtype)

    def step(carry: list[Any], chunk: Any) -> tuple[list[Any], list[Any]]:
        new = part(chunk)
        return _ops.merge(carry, [new[i] for i in merge], [leaves[i] for i in merge], True), [new[i] for i in gather]

    done, stacked = lax.scan(step, [start(i) for i in merge], list(chunks))
    flat = {i: _ops.joined(a) for i, a in zip(gather, stacked, strict=True)}
    whole = dict(zip(merge, done, strict=True)) | flat
    return [whole[i] for i in range(len(leaves))]


def _pad(array: jax.Array, like: Any) -> jax.Array:
    return (
        array
        if array.shape == like.shape
        else jnp.pad(array, [(0, want - have) for have, want in zip(array.shape, like.shape, strict=True)])
    )


def _zeros(shapes: Sequence[Any]) -> list[jax.Array]:
    return [jnp.zeros(s.shape, s.dtype) for s in shapes]


def _keep(kind: str, parts: Any, slices: int, tall: int) -> np.ndarray | None:
    """Which gathered entries are real, of blocks of `tall` entries a replica."""
    if parts is None:
        return None
    counts = [part.rows if kind == "rows" else min(slices, part.rows) for part in parts]
    return np.concatenate([rank * tall + np.arange(n) for rank, n in enumerate(counts)])
