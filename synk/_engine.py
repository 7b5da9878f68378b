"""Engine: the one place that knows how JAX maps a program over replicas, and where their arrays lie.

Between programs an array is *stacked* (one entry a replica on axis 0), *rows* (axis 0 cut over the replicas) or
*everywhere* (one value that all share). A program's body sees one replica's part of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from . import _agree, _flight, _processes
from ._group import AXIS, Group

Lies: TypeAlias = Literal["stacked", "rows", "everywhere"]
Body: TypeAlias = Callable[..., Sequence[jax.Array]]
Lists: TypeAlias = Sequence[Sequence[Any]]  # of arguments: a list that is there already is handed on untouched
EngineName: TypeAlias = Literal["shard_map", "pmap"]


def spmd(group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies], engine: str = "shard_map") -> Body:
    """Map `body` over the replicas of a group: arrays in, a list of arrays out; for use under `jax.jit`.

    Args:
      body: takes and returns one replica's arrays.
      ins: how each argument lies.
      outs: how each result lies, "stacked" or "everywhere".
    """
    if group.is_simulated:
        return _by_vmap(group, body, ins, outs)
    # Under jit in one of several processes jax.pmap knows this process's devices only, and maps over those.
    is_pmap = engine == "pmap" and jax.process_count() == 1
    return (_by_pmap if is_pmap else _by_shard_map)(group, body, ins, outs)


def _by_shard_map(group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies]) -> Body:
    def block(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = body(*(a[0] if lies == "stacked" else a for a, lies in zip(args, ins, strict=True)))
        return tuple(r[None] if lies == "stacked" else r for r, lies in zip(results, outs, strict=True))

    specs = {"stacked": P(AXIS), "rows": P(AXIS), "everywhere": P()}
    # check_vma=True would sum gradients of values it takes to be the same everywhere; pmap does not, nor does synk.
    return jax.shard_map(
        block,
        mesh=group.mesh,
        in_specs=tuple(specs[lies] for lies in ins),
        out_specs=tuple(specs[lies] for lies in outs),
        check_vma=False,
    )


def _by_pmap(group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies]) -> Body:
    mapped = jax.pmap(
        lambda _, *args: tuple(body(*args)),  # pmap wants at least one mapped argument
        axis_name=AXIS,
        devices=group.devices,
        in_axes=(0, *(None if lies == "everywhere" else 0 for lies in ins)),
        out_axes=tuple(None if lies == "everywhere" else 0 for lies in outs),
    )
    ranks = np.arange(group.size, dtype=np.int32)
    return lambda *args: mapped(ranks, *(_per_replica(group, a, lies) for a, lies in zip(args, ins, strict=True)))


def _by_vmap(group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies]) -> Body:
    mapped = jax.vmap(
        lambda *args: tuple(body(*args)),
        in_axes=tuple(None if lies == "everywhere" else 0 for lies in ins),
        axis_name=AXIS,
        axis_size=group.size,
    )

    def call(*args: jax.Array) -> tuple[jax.Array, ...]:
        results = mapped(*(_per_replica(group, a, lies) for a, lies in zip(args, ins, strict=True)))
        return tuple(r if lies == "stacked" else r[0] for r, lies in zip(results, outs, strict=True))

    return call


def _per_replica(group: Group, array: jax.Array, lies: Lies) -> jax.Array:
    return array.reshape(group.size, len(array) // group.size, *array.shape[1:]) if lies == "rows" else array


def lie(lies: Lies, count: int) -> list[Lies]:
    """So many arrays that lie so."""
    return [lies] * count


def sharding(group: Group, lies: Lies) -> jax.sharding.NamedSharding:
    """Where an array that lies so is."""
    return group.everywhere if lies == "everywhere" else group.stacked


class Program:
    """A compiled program over a group: called with arrays that lie as it was built for, it starts and returns.

    Its arguments come in lists, which `body` sees as one; `donate` names lists.
    """

    def __init__(
        self,
        group: Group,
        body: Body,
        ins: Sequence[Lies],
        outs: Sequence[Lies],
        args: Lists,
        *,
        donate: Sequence[int] = (),
        engine: str = "shard_map",
        name: str = "",
    ) -> None:
        lowered = _jit(group, body, ins, outs, engine, tuple(donate)).lower(*args)
        self.name = f"{name}({_shapes([*chain(*args)])})" if group.spans else name
        if group.spans:
            _agree.compare(self.name, lowered.as_text())
        self.compiled = lowered.compile()
        self.group = group

    def __call__(
        self, args: Lists, failed: Callable[[Exception], None], loans: Sequence[_flight.Loan] = ()
    ) -> list[jax.Array]:
        """Start the program; `failed` is told should it die later, and `loans` once it has ended."""
        _flight.admit(self.group.is_bounded)
        _processes.alive()
        if self.group.spans:
            results = _over_processes(self.name, lambda: self.compiled(*args))
        else:
            results = self.compiled(*args)
        _flight.launched(results.pop(), failed, loans)
        return results


def _jit(
    group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies], engine: str, donate: tuple[int, ...]
) -> Any:
    """Under `jax.jit`, with one more output that nobody can donate or delete: it tells when the program has ended."""

    def with_token(*values: jax.Array) -> list[jax.Array]:
        return [*body(*values), jnp.zeros((), jnp.int32)]

    lies: list[Lies] = [*outs, "stacked"]
    mapped = spmd(group, with_token, ins, lies, engine)

    def of_lists(*args: Sequence[jax.Array]) -> list[jax.Array]:
        return list(mapped(*chain(*args)))

    return jax.jit(of_lists, donate_argnums=donate, out_shardings=[sharding(group, each) for each in lies])


def once(group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies], args: Sequence[Any]) -> list[jax.Array]:
    """Run a small program of synk's own; JAX caches what is compiled by `body`, so give one that lasts."""
    args = list(args)
    with _flight.LOCK:
        _flight.admit(group.is_bounded)
        _processes.alive()
        run = _jitted(group, body, tuple(ins), tuple(outs))
        if group.spans:
            results = _over_processes(_agreed_on(group, body, ins, outs, args), lambda: run(args))
        else:
            results = run(args)
        _flight.launched(results.pop(), lambda error: None)
        return results


_agreed: set[Any] = set()


def _over_processes(what: str, run: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    """Start a program that all processes start; on CPU it may be there that another one is found gone."""
    _agree.launching(what)
    try:
        return run()
    except Exception as error:
        gone = _agree.as_peer_error(error)
        if gone is None or gone is error:
            raise
        raise gone from error


def _agreed_on(group: Group, body: Body, ins: Sequence[Lies], outs: Sequence[Lies], args: Sequence[Any]) -> str:
    """What it is called; agreed, once for each kind of arguments, with all processes that are about to run it."""
    shapes = tuple((a.shape, a.dtype) for a in args)
    what = f"{body.__module__.rsplit('.', 1)[-1].strip('_')}.{body.__qualname__.split('.')[0].strip('_')}"
    what = f"{what}({_shapes(args)})"
    if (group, body, tuple(ins), tuple(outs), shapes) not in _agreed:
        _agree.compare(what, _jitted(group, body, tuple(ins), tuple(outs)).lower(args).as_text())
        _agreed.add((group, body, tuple(ins), tuple(outs), shapes))
    return what


def _shapes(args: Sequence[Any]) -> str:
    """Shapes and dtypes of arguments, for messages."""
    shapes = [f"{a.dtype.name}{list(a.shape)}" for a in args[-6:]]
    return ", ".join([f"{len(args) - 6} more", *shapes] if len(args) > 6 else shapes)


@lru_cache(maxsize=1024)
def _jitted(group: Group, body: Body, ins: tuple[Lies, ...], outs: tuple[Lies, ...]) -> Any:
    return _jit(group, body, ins, outs, "shard_map", ())


def _same(*values: jax.Array) -> Sequence[jax.Array]:
    # A product that is no forwarded input: what comes back is a copy.
    return [jnp.copy(v) for v in values]


def everywhere(group: Group, leaf: Any) -> jax.Array:
    """Put a value on every replica; memory of the user's NumPy arrays is not shared."""
    if isinstance(leaf, jax.Array):
        return leaf if leaf.sharding == group.everywhere else sent(group, leaf, "everywhere")
    return sent(group, np.array(leaf, leaf.dtype.newbyteorder("=")), "everywhere")


def sent(group: Group, value: Any, lies: Lies) -> jax.Array:
    """A value as an array of the group's that lies so: `jax.device_put`, over processes too.

    There it would compare the value of all processes each time. NumPy's memory may be shared.
    """
    where = sharding(group, lies)
    if not group.spans:
        return jax.device_put(value, where)
    if isinstance(value, jax.Array) and not value.is_fully_addressable and not value.is_fully_replicated:
        what = f"an argument ({_shapes([value])}) brought where it belongs"
        with _flight.LOCK:  # awaited, so it needs not be counted among those in flight
            return _over_processes(what, lambda: [jax.block_until_ready(_moved(where)(value))])[0]
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, where, host.__getitem__)


@lru_cache(maxsize=256)
def _moved(where: jax.sharding.NamedSharding) -> Any:
    return jax.jit(lambda value: value, out_shardings=where)


def copies(group: Group, leaves: Sequence[Any], lies: Lies) -> list[jax.Array]:
    """Give every replica a copy of each leaf. NumPy leaves must be synk's own, since their memory may be shared."""
    return laid(group, [sent(group, leaf, "everywhere") for leaf in leaves], "everywhere", lies)


def laid(group: Group, leaves: Sequence[jax.Array], lies: Lies, to: Lies) -> list[jax.Array]:
    """Copy leaves that lie so into ones that lie otherwise; nothing is communicated.

    What goes from stacked to everywhere has equal entries.
    """
    return once(group, _same, lie(lies, len(leaves)), lie(to, len(leaves)), leaves)


def host_entry(group: Group, array: jax.Array, lies: Lies, rank: int, rows: int | None) -> np.ndarray:
    """One replica's entry of an array in host memory, cut to so many rows; a view on CPU.

    Over processes all of them ask for it together.
    """
    if group.spans and lies == "stacked":
        array, lies = from_rank(group, [array], rank, "everywhere")[0], "everywhere"
    return own_entry(group, array, lies, group.mine.start if group.spans else rank, rows)


def own_entry(group: Group, array: jax.Array, lies: Lies, rank: int, rows: int | None = None) -> np.ndarray:
    """The same of a replica of this process."""
    if group.is_simulated:
        entry = np.asarray(array) if lies == "everywhere" else np.asarray(array)[rank, ...]
    else:
        entry = np.asarray(shards(group, array)[rank - group.mine.start])
        entry = entry if lies == "everywhere" else entry[0, ...]
    return entry if rows is None else entry[:rows]


def from_rank(group: Group, leaves: Sequence[jax.Array], rank: int, lies: Lies) -> list[jax.Array]:
    """Copy one replica's entries of stacked leaves to all replicas, bit for bit."""
    source = constant(group, "everywhere", (rank,), "int32")
    n = len(leaves)
    return once(group, _picked, [*lie("stacked", n), "everywhere"], lie(lies, n), [*leaves, source])


def _picked(*values: jax.Array) -> Sequence[jax.Array]:
    *leaves, source = values
    mine = jax.lax.axis_index(AXIS) == source[0]
    bits = [as_bits(leaf) for leaf in leaves]
    sums = jax.lax.psum([jnp.where(mine, b, jnp.zeros((), b.dtype)) for b in bits], AXIS) if bits else []
    return [from_bits(b, leaf.dtype) for b, leaf in zip(sums, leaves, strict=True)]


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def as_bits(array: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers of at least 32 bits; complex ones as pairs."""
    if array.dtype == np.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return as_bits(jnp.stack([array.real, array.imag], -1))
    bits = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize])
    return bits.astype(jnp.uint32) if array.dtype.itemsize < 4 else bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The reverse of `as_bits`."""
    if dtype == np.bool_:
        return bits.astype(bool)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_bits(bits, jnp.finfo(dtype).dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    narrow = bits.astype(_UNSIGNED[np.dtype(dtype).itemsize])
    return jax.lax.bitcast_convert_type(narrow, dtype)


def replace_entry(group: Group, array: jax.Array, new: Any, rank: int) -> jax.Array:
    """A stacked array with one replica's entry replaced; the others' memory is shared with the old one."""
    if group.is_simulated:
        return array.at[rank].set(new)
    parts = list(shards(group, array))
    if rank in group.mine:
        parts[rank - group.mine.start] = jax.device_put(np.array(new)[None], group.devices[rank])
    return jax.make_array_from_single_device_arrays(array.shape, group.stacked, parts)


def stack_parts(group: Group, parts: Sequence[Any], rows: int | None) -> jax.Array:
    """Stack one array a replica, each padded to `rows` rows (None: they have one shape)."""
    shape = (group.size, *parts[0].shape) if rows is None else (group.size, rows, *parts[0].shape[1:])

    def padded(part: Any) -> np.ndarray:
        host = np.asarray(part)
        full = np.zeros((1, *shape[1:]), host.dtype)
        full[0, ... if rows is None else slice(len(host))] = host
        return full

    if group.is_simulated:
        return jax.device_put(np.concatenate([padded(part) for part in parts]), group.stacked)
    placed = [jax.device_put(padded(parts[rank]), group.devices[rank]) for rank in group.mine]
    return jax.make_array_from_single_device_arrays(shape, group.stacked, placed)


def restrict(group: Group, start: int, stop: int, array: jax.Array, lies: Lies) -> jax.Array:
    """An array of the group as one of ranks `start` to `stop` alone; nothing is copied on real devices.

    Over processes these are ranks of this one.
    """
    part = group.span(start, stop)
    if part is group:
        return array
    if group.is_simulated:
        return array if lies == "everywhere" else jax.device_put(array[start:stop], part.stacked)
    kept = _here(group, array, start, stop)
    shape = array.shape if lies == "everywhere" else (stop - start, *array.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, sharding(part, lies), kept)


def _here(group: Group, array: jax.Array, start: int, stop: int) -> list[jax.Array]:
    """The single-device arrays of ranks `start` to `stop` that belong to this process."""
    first = group.mine.start
    return shards(group, array)[max(start - first, 0) : max(stop - first, 0)]


class Piece(NamedTuple):
    """Ranks `start` to `stop` of a stacked array that spans `span`; no array stands for zeros."""

    start: int
    stop: int
    span: tuple[int, int]
    array: jax.Array | None


def assemble(group: Group, pieces: Sequence[Piece], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Join pieces, in rank order, into one stacked array of the group with entries of `shape`.

    Over processes pieces with an array are of this one's ranks; each process gives its own.
    """
    everyone = (0, group.size)
    if len(pieces) == 1 and pieces[0].span == everyone and pieces[0].array is not None:
        return pieces[0].array
    if group.is_simulated:
        blocks = [
            jnp.zeros((stop - start, *shape), dtype) if array is None else array[start - span[0] : stop - span[0]]
            for start, stop, span, array in pieces
        ]
        return jax.device_put(jnp.concatenate(blocks), group.stacked)
    placed: list[jax.Array] = []
    for start, stop, span, array in pieces:
        if array is None:
            missing = [rank for rank in range(start, stop) if rank in group.mine]
            placed += [jax.device_put(np.zeros((1, *shape), dtype), group.devices[rank]) for rank in missing]
        else:
            placed += _here(group.span(*span), array, start - span[0], stop - span[0])
    return jax.make_array_from_single_device_arrays((group.size, *shape), group.stacked, placed)


@lru_cache(maxsize=4096)
def constant(group: Group, lies: Lies, values: tuple[Any, ...], dtype: str) -> jax.Array:
    """A small array of numbers, placed once."""
    return sent(group, np.array(values, dtype), lies)


def shards(group: Group, array: jax.Array) -> list[jax.Array]:
    """The single-device arrays behind a global one, in rank order; those of this process."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[group.devices[rank]] for rank in group.mine]


def of_first(group: Group, array: jax.Array) -> jax.Array:
    """The first replica's own value of a result that claims to lie everywhere."""
    return array if group.is_simulated else shards(group, array)[0]
