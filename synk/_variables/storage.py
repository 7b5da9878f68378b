"""Storage: how the leaves of a variable's value lie on the replicas; a class for each way.

*Logical* leaves are those that the user sees, *stored* ones those that programs take. No other module depends on how
leaves are stored. To add a way, write a subclass of `Storage`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import SynkError
from .._reductions.collectives import all_gather as gather_arrays
from .._runtime.executable import (
    Executable,
    ProgramSpec,
    broadcast_from,
    copy_to_replicas,
    relayout,
    replica_to_host,
    run_collective,
)
from .._runtime.group import Group
from .._runtime.layout import layouts, local_replica_to_host, put, set_replica, shard_of_rank, sharding_of, stack_parts
from .._runtime.shards import Shard, filled, from_shards, keeps_layers, own_shard, shard_shape, to_shards, whole
from .._runtime.way import Body, Layout
from .._tracing.captured import without_places
from .._tracing.sharded import evaluate_sharded
from .state import AbstractState, VariableState, deal_out, state_of_leaves, state_of_rows

Shapes: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]
# Indexes of the leaves that lie one after another in each stored array.
Buffers: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Storage:
    """Storage of whole leaves: a replica has a copy of each, or where replicas differ, a value or rows of its own.

    Attributes:
      shapes: of the logical leaves of the first value. Rows may change axis 0.
      is_sharded: whether each replica stores a part, so that it has no value of its own, and reading communicates.
    """

    # Frozen and compared by identity: groups keep programs by the methods of a storage, as `storage_of` makes one a
    # kind.
    shapes: Shapes
    is_sharded: ClassVar[bool] = False

    @property
    def shapes_in_shards(self) -> list[tuple[int, ...]]:
        return []

    # Leaves of one replica.

    def pack(self, leaves: Sequence[Any], like: Group | Sequence[Any]) -> list[Any]:
        """Pack leaves, or their shapes, into stored ones: as a group has them, or into as many as `like` has."""
        return list(leaves)

    def unpack(self, *stored: Any) -> list[Any]:
        """Unpack stored leaves into logical ones, or parts into parts. Both may have more axes in front."""
        return list(stored)

    def comparable(self, *stored: jax.Array) -> list[jax.Array]:
        """Return logical leaves, which equal replicas have alike; empty ones where each replica stores a part."""
        return self.unpack(*stored)

    def seen(self, stored: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.ShapeDtypeStruct]:
        """Return shapes of the leaves that a function sees on one replica, by those of stored ones."""
        return stored

    def on_replica(self, stored: Sequence[jax.Array], layout: Layout) -> list[Any]:
        """Return what a program evaluates in the place of the leaves that it was traced with: arrays, or shards."""
        return list(stored)

    def to_store(self, values: Sequence[Any], layout: Layout) -> list[jax.Array]:
        """Return the leaves that a replica stores of new ones, which are arrays or shards."""
        return [*map(whole, values)]

    # Shapes.

    def traced_shapes(self, abstract: AbstractState, rows: int | None) -> Sequence[jax.ShapeDtypeStruct]:
        """Return shapes of the leaves with which a function is traced, for a replica with `rows` rows."""
        return abstract.part_shapes(rows)

    def abstract(self, abstract: AbstractState, group: Group) -> AbstractState:
        """Return the state of a variable that is placed in a group, by that of one elsewhere or nowhere."""
        return replace(abstract, shapes=tuple(self.pack(self.seen(abstract.shapes), group)))

    def logical_shapes(self, abstract: AbstractState, rows: int | None) -> Sequence[jax.ShapeDtypeStruct]:
        """Return shapes of the leaves that the user sees, on a replica with `rows` rows, or with the most for None."""
        return self.seen(abstract.part_shapes(rows))

    def rows_of(self, abstract: AbstractState, rank: int) -> int | None:
        """Return the length of axis 0 on one replica; None where the leaves share no axis 0."""
        rows = abstract.rows_of(rank)
        return _shared_rows(self.logical_shapes(abstract, None)) if rows is None else rows

    def takes_other_rows(self, abstract: AbstractState, is_assigned: bool) -> bool:
        """Check whether a new value may have another number of rows: given by a call, or assigned where rows lie."""
        return not is_assigned or abstract.rows_per_replica is not None

    # Reading. States are in the group.

    def asks_all(self, state: VariableState, rank: int | None) -> bool:
        """Check whether processes must read together: one replica's value, or for None the value that all share."""
        return rank is not None and state.layout == "stacked"

    def apart(self, group: Group, stored: Sequence[jax.Array], layout: Layout) -> Sequence[jax.Array]:
        """Return the leaves that a function sees on each replica, in the same layout; copies only where it must."""
        return stored

    def read(self, group: Group, stored: Sequence[jax.Array], layout: Layout, to: Layout) -> list[jax.Array]:
        """Return copies of the logical leaves in a layout; from stacked to replicated they must be equal."""
        return relayout(group, stored, layout, to)

    def of_rank(self, group: Group, state: VariableState, rank: int) -> list[jax.Array]:
        """Return copies of one replica's logical leaves on every replica."""
        if state.layout == "replicated":
            return self.read(group, state.leaves, "replicated", "replicated")
        leaves, rows = broadcast_from(group, state.leaves, rank, "replicated"), state.abstract.rows_of(rank)
        leaves = self.read(group, leaves, "replicated", "replicated")
        return leaves if rows is None else [leaf[:rows] for leaf in leaves]

    def to_host(self, group: Group, state: VariableState, rank: int) -> list[np.ndarray]:
        """Return one replica's logical leaves in host memory, views where that saves a copy. All processes must ask
        together."""
        rows = state.abstract.rows_of(rank)
        return self.unpack(*[replica_to_host(group, leaf, state.layout, rank, rows) for leaf in state.leaves])

    def common_on_host(self, group: Group, state: VariableState, is_reader: bool) -> Iterable[np.ndarray]:
        """Return the logical leaves that all replicas share in host memory, at least in processes that read. All
        processes must ask."""
        layout, rank = state.layout, group._local_ranks.start
        stored = state.leaves if is_reader else []
        return self.unpack(*[local_replica_to_host(group, leaf, layout, rank, None) for leaf in stored])

    def gather(self, group: Group, state: VariableState, nd_up: int, layout: Layout) -> list[jax.Array]:
        """Return the logical leaves of all replicas in a layout: with an axis of replicas in front, or for `nd_up` 0
        their rows one after another."""
        # Unpacked inside the program, so that packed leaves travel as few arrays.
        body = _gather_body(nd_up, state.rows_per_replica, self.unpack)
        ins, outs = layouts(state.layout, len(state.leaves)), layouts(layout, len(self.shapes))
        return run_collective(group, body, ins, outs, state.leaves)

    def each_on_host(self, group: Group, state: VariableState) -> list[list[np.ndarray]]:
        """Return the logical leaves of each replica in host memory; once if the replicas share them, or hold rows,
        which are those of all replicas then."""
        ranks = range(group.size if state.layout == "stacked" else 1)
        values = [self.to_host(group, state, rank) for rank in ranks]
        if state.rows_per_replica is None:
            return values
        return [[np.concatenate(leaves) for leaves in zip(*values, strict=True)]]

    # Placing.

    def in_group(self, home: Group, state: VariableState, group: Group) -> VariableState:
        """Return the value that replicas share in another group: its first device, in the same memory, or simulated
        replicas."""
        if group.size > 1:
            return self.state_of_copies(group, self.to_host(home, state, 0), "stacked")
        leaves: list[jax.Array] = []
        for leaf in state.leaves:
            shard = shard_of_rank(home, leaf, home._local_ranks.start)
            # Replicas that share a device share an array, where axis 0 of a stacked leaf counts them.
            shard = shard[:1] if home._way.shares_device and state.layout == "stacked" else shard
            leaves.append(jax.device_put(shard, sharding_of(group, state.layout)))
        return replace(state, leaves=leaves)

    def placed(self, group: Group, state: VariableState) -> VariableState:
        """Place the first leaves, which are the variable's own, so that no program has to copy them."""
        placed = [put(group, leaf, "replicated") for leaf in self.pack(state.leaves, group)]
        return state_of_leaves(placed, "replicated")

    def state_of_copies(self, group: Group, leaves: Sequence[Any], layout: Layout) -> VariableState:
        """Make the state in which replicas share these logical leaves."""
        return state_of_leaves(copy_to_replicas(group, self.pack(leaves, group), layout), layout)

    def state_like(self, group: Group, before: VariableState, leaves: Sequence[np.ndarray]) -> VariableState:
        """Make the state of logical leaves whose rows are dealt out as they were before, if replicas held rows."""
        if before.rows_per_replica is None:
            return self.state_of_copies(group, leaves, before.layout)
        return deal_out(group, leaves, before.rows_per_replica)

    def restored(self, group: Group, saved: Mapping[str, Any], leaves: Sequence[Any], layout: Layout) -> VariableState:
        """Make the state that a checkpoint describes.

        Args:
          group: where the variable lives, or will live.
          saved: its description.
          leaves: the logical leaves that replicas share; else for each a stacked array, or arrays of all replicas.
          layout: for leaves that replicas share.
        """
        if saved["is_equal"]:
            return self.state_of_copies(group, leaves, layout)
        # Another number of replicas has no place for the values of single ones, so all take the average.
        if saved["replicas"] != group.size:
            return self.state_of_copies(group, list(map(_mean_of, leaves)), layout)
        rows = saved["lengths"]
        if all(isinstance(leaf, jax.Array) for leaf in leaves):
            # In memory of its own, since programs may overwrite it.
            stacked = relayout(group, leaves, "stacked", "stacked")
        else:
            pack = partial(self.pack, like=group)
            # Rows are stored as they are, since only values of the first shapes are packed.
            entries = leaves if rows else zip(*map(pack, zip(*leaves, strict=True)), strict=True)
            stacked = [stack_parts(group, parts, max(rows) if rows else None) for parts in entries]
        return state_of_leaves(stacked, "stacked", rows, diverged_by="what was saved")

    def state_of_first(self, group: Group, state: VariableState) -> VariableState:
        """Make the state in which every replica has what the first one holds, also if all are said to be equal."""
        layout, rows = state.layout, state.abstract.rows_of(0)
        leaves = broadcast_from(group, _stacked(group, state), 0, layout)
        if rows is not None:
            leaves = [put(group, leaf[:, :rows], "stacked") for leaf in leaves]
        return state_of_leaves(leaves, layout)

    def state_with_rank(
        self, group: Group, state: VariableState, rank: int, leaves: Sequence[Any], name: str
    ) -> VariableState:
        """Make the state in which one replica has these logical leaves and the others keep theirs."""
        new, abstract = self.pack(leaves, state.leaves), state.abstract
        # With the same shapes one replica's shard is replaced in place; other rows need arrays of another length, and
        # all parts anew.
        if abstract.rows_per_replica is None and [leaf.shape for leaf in new] == [s.shape for s in abstract.shapes]:
            pairs = zip(_stacked(group, state), new, strict=True)
            stacked = [set_replica(group, old, leaf, rank) for old, leaf in pairs]
            by = f"set_value(rank={rank})" if group.size > 1 else ""
            return state_of_leaves(stacked, "stacked", diverged_by=by)
        if _shared_rows(leaves) is None or None in [self.rows_of(abstract, other) for other in range(group.size)]:
            raise ValueError(f"set_value: {name} changes its number of rows, so all leaves need as many.")
        parts = [leaves if other == rank else self.to_host(group, state, other) for other in range(group.size)]
        return state_of_rows(group, parts)

    def refuse(self, name: str, call: str) -> None:
        """Raise SynkError if replicas have no values of their own, which `call` is about."""


@dataclass(frozen=True, eq=False)
class Packed(Storage):
    """Storage of small leaves that share arrays. Leaves of other shapes than the first, with other rows, stay apart.

    The number of stored arrays tells which leaves share them.

    Attributes:
      on_cpus: the leaves in each stored array, in groups of CPUs.
      elsewhere: those in groups of other devices.
    """

    # LEAVES_A_BUFFER in value.py has the reason for two ways.
    on_cpus: Buffers
    elsewhere: Buffers

    def pack(self, leaves: Sequence[Any], like: Group | Sequence[Any]) -> list[Any]:
        buffers = self._buffers(like)
        if buffers is None or [leaf.shape for leaf in leaves] != [shape.shape for shape in self.shapes]:
            return list(leaves)
        return [leaves[which[0]] if len(which) == 1 else _join([leaves[i] for i in which]) for which in buffers]

    def unpack(self, *stored: Any) -> list[Any]:
        buffers = self._buffers(stored)
        if buffers is None:
            return list(stored)
        leaves: dict[int, Any] = {}
        for buffer, numbers in zip(stored, buffers, strict=True):
            if len(numbers) == 1:
                leaves[numbers[0]] = buffer
                continue
            sizes = [self.shapes[i].size for i in numbers]
            if isinstance(buffer, np.ndarray):
                parts: Sequence[Any] = np.split(buffer, np.cumsum(sizes[:-1]), axis=-1)
            else:
                parts = lax.split(buffer, sizes, buffer.ndim - 1)
            for i, part in zip(numbers, parts, strict=True):
                leaves[i] = part.reshape((*buffer.shape[:-1], *self.shapes[i].shape))
        return [leaves[i] for i in range(len(self.shapes))]

    def seen(self, stored: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.ShapeDtypeStruct]:
        return self.shapes if self._buffers(stored) else stored

    def apart(self, group: Group, stored: Sequence[jax.Array], layout: Layout) -> Sequence[jax.Array]:
        return self.read(group, stored, layout, layout) if self._buffers(stored) else stored

    def read(self, group: Group, stored: Sequence[jax.Array], layout: Layout, to: Layout) -> list[jax.Array]:
        if not self._buffers(stored):
            return super().read(group, stored, layout, to)
        # One program for all leaves: each slice outside of one would be a program to compile.
        ins, outs = layouts(layout, len(stored)), layouts(to, len(self.shapes))
        return run_collective(group, self._unpacked_copies, ins, outs, stored, is_local=True)

    def _buffers(self, like: Group | Sequence[Any]) -> Buffers | None:
        """Return the leaves in each array as a group has them, or in each of these; None if none is shared."""
        if isinstance(like, Group):
            return self.on_cpus if like.platform == "cpu" else self.elsewhere
        # Leaves of a value with other rows are not packed; then there are as many stored arrays as leaves, and none is
        # shared.
        return next((b for b in (self.on_cpus, self.elsewhere) if len(b) == len(like) < len(self.shapes)), None)

    def _unpacked_copies(self, *stored: jax.Array) -> list[jax.Array]:
        # Without jnp.copy, jit returns the argument's own buffer.
        return [jnp.copy(leaf) for leaf in self.unpack(*stored)]


@dataclass(frozen=True, eq=False)
class Shards(Packed):
    """Storage of one n-th of each large leaf on each of n replicas, which together hold one value.

    A single replica has the leaves of a whole variable, in the layout "replicated"; several have "stacked" ones.

    Attributes:
      sharded: for each leaf whether it lies in shards; other leaves are whole on every replica.
    """

    # The shard of a single replica would be the whole leaf, so its value is stored as a packed one is.
    sharded: tuple[bool, ...]
    is_sharded: ClassVar[bool] = True

    @property
    def shapes_in_shards(self) -> list[tuple[int, ...]]:
        return [shape.shape for shape, is_sharded in zip(self.shapes, self.sharded, strict=True) if is_sharded]

    def pack(self, leaves: Sequence[Any], like: Group | Sequence[Any]) -> list[Any]:
        return list(leaves) if isinstance(like, Group) and like.size > 1 else super().pack(leaves, like)

    def comparable(self, *stored: jax.Array) -> list[jax.Array]:
        leaves = zip(self.unpack(*stored), self.sharded, strict=True)
        return [leaf[:0] if is_sharded else leaf for leaf, is_sharded in leaves]

    def on_replica(self, stored: Sequence[jax.Array], layout: Layout) -> list[Any]:
        if layout == "replicated":
            return super().on_replica(stored, layout)
        rows = zip(stored, self.shapes, self.sharded, strict=True)
        return [Shard(leaf, shape.shape) if is_sharded else leaf for leaf, shape, is_sharded in rows]

    def to_store(self, values: Sequence[Any], layout: Layout) -> list[jax.Array]:
        if layout == "replicated":
            return super().to_store(values, layout)
        leaves: list[jax.Array] = []
        for value, shape, is_sharded in zip(values, self.shapes, self.sharded, strict=True):
            # A shard that a loop over layers has made may be cut along another axis than the stored one: gathered, it
            # is cut anew.
            is_in_place = isinstance(value, Shard) and value.has_layers == keeps_layers(shape.shape)
            shard = value if is_in_place or not is_sharded else own_shard(whole(value))
            # Zeros lie behind the last number, whatever an update makes of them.
            leaves.append(filled(shard, 0) if is_sharded else whole(value))
        return leaves

    def traced_shapes(self, abstract: AbstractState, rows: int | None) -> Sequence[jax.ShapeDtypeStruct]:
        return self.shapes if abstract.layout == "stacked" else super().traced_shapes(abstract, rows)

    def abstract(self, abstract: AbstractState, group: Group) -> AbstractState:
        if group.size == 1:
            return super().abstract(AbstractState(self.shapes), group)
        pairs = zip(self.shapes, self.sharded, strict=True)
        shapes = tuple(shard_shape(s, group.size) if is_sharded else s for s, is_sharded in pairs)
        return AbstractState(shapes, "stacked")

    def logical_shapes(self, abstract: AbstractState, rows: int | None) -> Sequence[jax.ShapeDtypeStruct]:
        return self.shapes

    def takes_other_rows(self, abstract: AbstractState, is_assigned: bool) -> bool:
        return False

    def asks_all(self, state: VariableState, rank: int | None) -> bool:
        return state.layout == "stacked"

    def read(self, group: Group, stored: Sequence[jax.Array], layout: Layout, to: Layout) -> list[jax.Array]:
        if layout == "replicated":
            return super().read(group, stored, layout, to)
        return run_collective(group, self._gathered, layouts(layout, len(stored)), layouts(to, len(stored)), stored)

    def of_rank(self, group: Group, state: VariableState, rank: int) -> list[jax.Array]:
        return self.read(group, state.leaves, state.layout, "replicated")

    def to_host(self, group: Group, state: VariableState, rank: int) -> list[np.ndarray]:
        return [*self.common_on_host(group, state, True)]

    def common_on_host(self, group: Group, state: VariableState, is_reader: bool) -> Iterable[np.ndarray]:
        if state.layout == "replicated":
            return super().common_on_host(group, state, is_reader)
        return self._leaf_by_leaf(group, state.leaves, is_reader)

    def _leaf_by_leaf(self, group: Group, leaves: Sequence[jax.Array], is_reader: bool) -> Iterator[np.ndarray]:
        # One leaf after the other is gathered, so that no device needs memory for all of them.
        rank = group._local_ranks.start
        for leaf, is_sharded, shape in zip(leaves, self.sharded, self.shapes, strict=True):
            layout: Layout = "stacked"
            if is_sharded and group._is_multi_process:
                # Other processes hold the other shards: gather this leaf by a program of a storage of it alone.
                leaf_alone = storage_of(Shards, (shape,), ((0,),), ((0,),), (True,))
                (leaf,), layout = leaf_alone.read(group, [leaf], "stacked", "replicated"), "replicated"
            if is_reader:
                is_cut = is_sharded and layout == "stacked"
                yield (
                    from_shards(np.asarray(leaf), shape)
                    if is_cut
                    else local_replica_to_host(group, leaf, layout, rank, None)
                )

    def each_on_host(self, group: Group, state: VariableState) -> list[list[np.ndarray]]:
        return [self.to_host(group, state, 0)]

    def in_group(self, home: Group, state: VariableState, group: Group) -> VariableState:
        return self.state_of_copies(group, self.to_host(home, state, 0), "stacked")

    def placed(self, group: Group, state: VariableState) -> VariableState:
        if group.size == 1:
            return super().placed(group, state)
        return self.state_of_copies(group, state.leaves, "stacked")

    def state_of_copies(self, group: Group, leaves: Sequence[Any], layout: Layout) -> VariableState:
        if group.size == 1:
            return super().state_of_copies(group, leaves, "replicated")
        stored = [
            put(group, np.array(to_shards(np.asarray(leaf), group.size)), "stacked")
            if is_sharded
            else copy_to_replicas(group, [leaf], "stacked")[0]
            for leaf, is_sharded in zip(leaves, self.sharded, strict=True)
        ]
        return state_of_leaves(stored, "stacked")

    def state_of_first(self, group: Group, state: VariableState) -> VariableState:
        return self.state_of_copies(group, self.to_host(group, state, 0), "stacked")

    def made(self, group: Group, make: Any, given: Sequence[tuple[Storage, VariableState]], name: str) -> VariableState:
        """Make the state of what a function returns, given values of variables, with nothing whole but a leaf."""
        shapes = [shape for storage, state in given for shape in storage.traced_shapes(state.abstract, None)]
        # Evaluated like a user's function: a leaf that the function reads is gathered where it is read.
        closed, _ = without_places(jax.make_jaxpr(make)(*shapes), name)
        layout: Layout = "stacked" if group.size > 1 else "replicated"

        def body(*stored: jax.Array) -> list[jax.Array]:
            rest, values = iter(stored), list[Any]()
            for storage, state in given:
                values += storage.on_replica([next(rest) for _ in state.leaves], state.layout)
            results = evaluate_sharded(closed.jaxpr, closed.consts, values, {}, True)
            # Without jnp.copy, jit returns an argument's own buffer.
            return self.pack(self.to_store([jax.tree.map(jnp.copy, result) for result in results], layout), group)

        ins: list[Layout] = [state.layout for _, state in given for _ in state.leaves]
        leaves = [leaf for _, state in given for leaf in state.leaves]
        outs = layouts(layout, len(self.abstract(AbstractState(self.shapes), group).shapes))
        stored = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        # It runs once. Kept, `body` would keep the values that it is given.
        program = Executable(group, ProgramSpec(body, [ins], [stored], outs, name="synk.storage.made"))
        return state_of_leaves(program.launch([leaves]), layout)

    def refuse(self, name: str, call: str) -> None:
        raise SynkError(
            f"{call}: {name} lies in shards, of which each replica holds one, so none has a value of its own. Read and "
            f"assign the whole, {name}.value."
        )

    def _gathered(self, *stored: jax.Array) -> list[jax.Array]:
        # Without jnp.copy, jit returns the argument's own buffer.
        values = self.on_replica(stored, "stacked")
        return [whole(value) if isinstance(value, Shard) else jnp.copy(value) for value in values]


@lru_cache(maxsize=1024)
def storage_of(kind: Any, *how: Any) -> Any:
    """Return the storage of a class with these attributes: one object, since programs are kept by its methods."""
    return kind(*how)


@lru_cache(maxsize=256)
def _gather_body(nd_up: int, rows: tuple[int, ...] | None, unpack: Body) -> Body:
    def body(*stored: jax.Array) -> list[jax.Array]:
        gathered = list(unpack(*gather_arrays(stored)))
        if nd_up:
            return gathered
        if rows is None or len(set(rows)) == 1:
            return [lax.collapse(entries, 0, 2) for entries in gathered]
        return [jnp.concatenate([entries[rank, :n] for rank, n in enumerate(rows)]) for entries in gathered]

    return body


def _stacked(group: Group, state: VariableState) -> list[jax.Array]:
    return state.leaves if state.layout == "stacked" else relayout(group, state.leaves, "replicated", "stacked")


def _mean_of(entries: Any) -> np.ndarray:
    """Return the average of replicas' values, for another number of replicas."""
    values = np.asarray(entries)
    return np.mean(values, axis=0, dtype=np.float64).astype(values.dtype)


def _join(leaves: Sequence[Any]) -> Any:
    """Join leaves, or shapes, of one dtype in one array."""
    if isinstance(leaves[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((sum(leaf.size for leaf in leaves),), leaves[0].dtype)
    # Outside a trace JAX would start a program for each leaf, on a device that may not be the variable's.
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in leaves])
    # Functions of lax take a fifth of the time to trace that those of jnp take.
    return lax.concatenate([lax.reshape(leaf, (leaf.size,)) for leaf in leaves], 0)


def _shared_rows(arrays: Sequence[Any]) -> int | None:
    """Return the number of rows of all arrays; None where they share no axis 0."""
    rows = {array.shape[0] if array.shape else None for array in arrays}
    return rows.pop() if len(rows) == 1 else None
