"""Executable: a body mapped over a group, lowered from shapes, agreed on, compiled, launched."""

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._base.pytree import bits_of
from .dispatch import (
    IN_FLIGHT,
    JAXLIB,
    LOCK,
    InFlight,
    OnFailure,
    drain,
    ignore_failure,
    retire_finished,
    wait_for_capacity,
)
from .engine import Body, spmd
from .group import AXIS, Group
from .layout import Layout, Layouts, constant, describe_shapes, layouts, local_replica_to_host, put, sharding_of
from .watchdog import WATCHDOG

# What XLA may pack into one sum on GPUs. By its own limit (30 MB) most gradients wait for those that come last.
# bench/gpu_programs.py has the figures, also of others.
COMBINE_BYTES = 8 * 2**20
# What process 0 sends the others at a time of what it has read. Less would wait more often, more need not fit.
CHUNK_BYTES = 2**24
_REFUSES_SUB_BYTES = JAXLIB < (0, 12)
_COMBINE = "xla_gpu_{}_combine_threshold_bytes"


@dataclass(frozen=True)
class ProgramSpec:
    """What is compiled; arguments come in lists."""

    body: Body  # takes one replica's arrays, all lists one after another, and returns its results
    ins: Sequence[Layouts]
    shapes: Sequence[Sequence[jax.ShapeDtypeStruct]]  # global ones; none where it is compiled for what comes
    outs: Layouts
    donate: tuple[int, ...] = ()  # which lists may be overwritten
    engine: str = "shard_map"
    name: str = ""  # what messages, logs and profiles call it
    variables: Sequence[str] = ()  # the names of what it reads and writes, on which processes agree as well
    options: tuple[tuple[str, Any], ...] = ()  # for the compiler, beside those of the group's platform
    takes_all_replicas: bool = False  # whether `body` takes the arrays of all replicas instead


class Executable:
    """A compiled program over a group: called with arrays of the layouts it was built for, it starts and returns."""

    def __init__(self, group: Group, spec: ProgramSpec) -> None:
        structs = [
            [s.update(sharding=sharding_of(group, layout)) for s, layout in zip(*each, strict=True)]
            for each in zip(spec.shapes, spec.ins, strict=True)
        ]
        options = compiler_options(group) | dict(spec.options)
        lowered = _jit(group, spec).lower(*structs)
        self.group, self.name, self.may_fail_alone = group, spec.name, False
        if group._is_multi_process:
            self.name += f"({describe_shapes([*chain(*structs)])})"
            text = lowered.as_text()
            group._peers.agree(self.name, "\n".join([*spec.variables, text]))
            self.may_fail_alone = "callback" in text  # which may raise in one process
        start = perf_counter()
        self.compiled = lowered.compile(compiler_options=options)
        self.seconds = perf_counter() - start
        # Compiled programs refuse arrays of less than a byte a number, which jax.jit takes, at the price of compiling
        # once more ("input layouts that disagree"); drop this when we require jaxlib>=0.12.
        is_refused = _REFUSES_SUB_BYTES and any([bits_of(s.dtype) < 8 for s in chain(*structs)])
        self._run = _jit(group, spec, options) if is_refused else self.compiled

    def launch(self, args: Sequence[Sequence[Any]], on_failure: OnFailure = ignore_failure) -> list[jax.Array]:
        """Start the program on its lists of arguments; `on_failure` is told should it die later."""
        results = _launch(self.group, self.name, self._run, args, on_failure)
        if self.may_fail_alone:  # the next program's collectives would meet those of this one in other processes
            drain()
        return results


def compiler_options(group: Group) -> dict[str, Any]:
    """What programs of a group are compiled with."""
    if group.platform != "gpu":
        return {}
    flags = os.environ.get("XLA_FLAGS", "")
    # Of a reduce-scatter XLA counts the bytes of a replica's piece.
    limits = {"all_reduce": COMBINE_BYTES, "reduce_scatter": max(COMBINE_BYTES // group.size, 1)}
    options: dict[str, Any] = {_COMBINE.format(kind): limit for kind, limit in limits.items()}
    options = {option: limit for option, limit in options.items() if option not in flags}
    if group.accelerator is not None:
        options["xla_gpu_autotune_level"] = 0  # which would time kernels on the device
    return options


def _launch(
    group: Group, name: str, run: Any, args: Sequence[Any], on_failure: OnFailure, is_local: bool = False
) -> list[jax.Array]:
    """Start a compiled program, of a call or of synk's own, and note it among those in flight. One that is local
    communicates nothing, so that a process may run it alone."""
    wait_for_capacity(group._limits_in_flight)
    group._refuse_if_absent(name)
    WATCHDOG.rearm()
    if group._is_multi_process:
        retire_finished()  # where one has died this process has nothing to do with the others any more
    if not is_local:
        group._peers.before_launch(name)
    try:
        with jax.profiler.TraceAnnotation(name):
            results = run(*args)
    except Exception as error:  # on CPU it may be here that another process is found gone
        gone = group._peers.translate_error(error)
        if gone is None and isinstance(error, jax.errors.JaxRuntimeError) and "INVALID_ARGUMENT" not in str(error):
            group._peers.after_failure(name, error)  # which has begun, and others go on
        if gone is None or gone is error:
            raise
        raise gone from error
    IN_FLIGHT.append(InFlight(results.pop(), on_failure, group._peers, name))
    return results


@contextmanager
def translate_peer_errors(group: Group) -> Generator[None]:
    """Where what is waited for died since another process is gone, say so by PeerError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        gone = group._peers.translate_error(error)
        if gone is None:
            raise
        raise gone from error


def _jit(group: Group, spec: ProgramSpec, options: dict[str, Any] | None = None) -> Any:
    """Under `jax.jit`, by the name that logs and profiles show, with an extra scalar output per replica. We wait on it
    to know that the program has finished; real outputs may be donated or deleted by then."""

    def with_token(*values: jax.Array) -> list[jax.Array]:
        token = jnp.zeros((group.size,) if spec.takes_all_replicas else (), jnp.int32)
        return [*spec.body(*values), token]

    ins: list[Layout] = [*chain(*spec.ins)]
    layouts: list[Layout] = [*spec.outs, "stacked"]
    mapped = with_token if spec.takes_all_replicas else spmd(group, with_token, ins, layouts, spec.engine)

    def of_lists(*args: Sequence[jax.Array]) -> list[jax.Array]:
        return list(mapped(*chain(*args)))

    of_lists.__name__ = of_lists.__qualname__ = spec.name
    shardings = [sharding_of(group, each) for each in layouts]
    return jax.jit(of_lists, donate_argnums=spec.donate, out_shardings=shardings, compiler_options=options)


def run_collective(
    group: Group, body: Body, ins: Layouts, outs: Layouts, args: Sequence[Any], is_local: bool = False
) -> list[jax.Array]:
    """Run a small program of synk's own; it is kept by `body`, so give one that lasts. A local one is not agreed on."""
    args, key = list(args), (body, tuple(ins), tuple(outs))
    module, function = body.__module__.split(".")[-1], body.__qualname__.split(".")[0]
    name = f"synk.{module.strip('_')}.{function.strip('_')}"
    with LOCK:
        spec = ProgramSpec(body, [ins], [], outs, name=name)
        jitted = group._cached(run_collective, key, partial(_jit, group, spec))
        if group._is_multi_process:
            name = f"{name}({describe_shapes(args)})"
            if not is_local:
                key = ("agreed", *key, tuple((a.shape, a.dtype) for a in args))

                def agree() -> str:
                    group._peers.agree(name, jitted.lower(args).as_text())
                    return "agreed"

                group._cached(run_collective, key, agree)
        return _launch(group, name, jitted, [args], ignore_failure, is_local)


def relayout(group: Group, leaves: Sequence[jax.Array], layout: Layout, to: Layout) -> list[jax.Array]:
    """Copy leaves of one layout into another; nothing is communicated. From stacked to replicated entries are equal."""
    return run_collective(group, _copy, layouts(layout, len(leaves)), layouts(to, len(leaves)), leaves, is_local=True)


def _copy(*values: jax.Array) -> Sequence[jax.Array]:
    # jnp.copy keeps jit from returning the input buffer itself, so the result owns its memory.
    return [jnp.copy(v) for v in values]


def copy_to_replicas(group: Group, leaves: Sequence[Any], layout: Layout) -> list[jax.Array]:
    """Give every replica a copy of each leaf. NumPy leaves must be synk's own, since their memory may be shared."""
    return relayout(group, [put(group, leaf, "replicated") for leaf in leaves], "replicated", layout)


def broadcast_from(group: Group, leaves: Sequence[jax.Array], rank: int, layout: Layout) -> list[jax.Array]:
    """Copy one replica's entries of stacked leaves to all replicas, bit for bit."""
    root = constant(group, "replicated", (rank,), "int32")
    ins: list[Layout] = [*layouts("stacked", len(leaves)), "replicated"]
    with jax.enable_x64(True):  # or there were no 64 bits to take what was made with it
        return run_collective(group, _broadcast, ins, layouts(layout, len(leaves)), [*leaves, root])


def _broadcast(*values: jax.Array) -> Sequence[jax.Array]:
    *leaves, root = values
    is_root = jax.lax.axis_index(AXIS) == root[0]
    bits = [as_bits(leaf) for leaf in leaves]
    sums = jax.lax.psum([jnp.where(is_root, b, jnp.zeros((), b.dtype)) for b in bits], AXIS) if bits else []
    return [from_bits(b, leaf.dtype) for b, leaf in zip(sums, leaves, strict=True)]


def from_process_0(
    group: Group, arrays: Sequence[np.ndarray] | None, shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[np.ndarray]:
    """Host arrays of process 0 in every process of the group, bit for bit; others give None.

    Their bytes travel one after another, a chunk at a time, so that no device needs memory for more than a few chunks.
    """
    if not group._is_multi_process:
        assert arrays is not None
        return list(arrays)
    root = next(rank for rank, device in enumerate(group.devices) if device.process_index == 0)
    found = [np.empty(s.shape, s.dtype) for s in shapes] if arrays is None else list(arrays)
    flat = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in found]
    total = sum(map(len, flat))
    size = min(CHUNK_BYTES, max(1024, 1 << (total - 1).bit_length()))  # few sizes: each is a program
    for start in range(0, total, size):
        chunk = np.zeros(size, np.uint8)
        if arrays is not None:
            for bytes_, there in _between(flat, start, start + size):
                chunk[there] = bytes_
        came = _words_of_root(group, root, chunk.view(np.uint32)).view(np.uint8)
        if arrays is None:
            for bytes_, there in _between(flat, start, start + size):
                bytes_[:] = came[there]
    return found


def _between(flat: Sequence[np.ndarray], start: int, stop: int) -> Iterator[tuple[np.ndarray, slice]]:
    """What lies between two places of flat arrays in a row: pieces of these, and where they are from `start` on."""
    place = 0
    for each in flat:
        low, high = max(start, place), min(stop, place + len(each))
        if low < high:
            yield each[low - place : high - place], slice(low - start, high - start)
        place += len(each)


def _words_of_root(group: Group, root: int, words: np.ndarray) -> np.ndarray:
    """The words of the process that has the root, of as many in each, in host memory."""

    def entry(index: Any) -> np.ndarray:
        return (words if index[0].start == root else np.zeros_like(words))[None]

    stacked = jax.make_array_from_callback((group.size, *words.shape), group.stacked, entry)
    copy = broadcast_from(group, [stacked], root, "replicated")[0]
    return local_replica_to_host(group, copy, "replicated", group._local_ranks.start, None)


def replica_to_host(group: Group, array: jax.Array, layout: Layout, rank: int, rows: int | None) -> np.ndarray:
    """One replica's entry in host memory, cut to so many rows; a view on CPU. Over processes all ask together."""
    if group._is_multi_process:
        if layout == "stacked":
            array, layout = broadcast_from(group, [array], rank, "replicated")[0], "replicated"
        rank = group._local_ranks.start
    return local_replica_to_host(group, array, layout, rank, rows)


def as_bits(array: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers of at least 32 bits; complex ones as pairs."""
    if array.dtype == np.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return as_bits(jnp.stack([array.real, array.imag], -1))
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits_of(array.dtype)}"))
    return bits.astype(jnp.uint32) if array.dtype.itemsize < 4 else bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The reverse of `as_bits`."""
    if dtype == np.bool_:
        return bits.astype(bool)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_bits(bits, jnp.finfo(dtype).dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{bits_of(dtype)}"), dtype)
