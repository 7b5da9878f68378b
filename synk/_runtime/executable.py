"""Executable: the programs of a group: lower, agree on, compile and launch them."""

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation

from .._base.errors import SynkError
from .._base.jax_context import checks_floats
from .._base.pytree import bits_of
from .constants import Constant
from .dispatch import (
    IN_FLIGHT,
    JAXLIB,
    LOCK,
    MAX_IN_FLIGHT,
    InFlight,
    OnFailure,
    drain,
    ignore_failure,
    retire_finished,
    wait_for_capacity,
)
from .group import Group
from .layout import constant, describe_shapes, layouts, local_replica_to_host, put, sharding_of, stack_parts
from .watchdog import WATCHDOG
from .way import Body, Layout, Layouts, axis_named, replica_axis

# The bytes that XLA may pack into one all-reduce on GPUs. Under XLA's own limit (30 MB) most gradients wait for the
# last ones. See bench/gpu_programs.py, and https://docs.jax.dev/en/latest/gpu_performance_tips.html
COMBINE_BYTES = 8 * 2**20
_REFUSES_SUB_BYTES = JAXLIB < (0, 12)


@dataclass(frozen=True)
class ProgramSpec:
    """A program to compile. Its arguments come in lists.

    Attributes:
      body: takes one replica's arrays, list after list, and returns its results.
      ins: the layouts of each list.
      shapes: the global shapes of each list; empty to compile for the arguments of a call.
      outs: the layouts of the results.
      donate: the lists that may be overwritten, by number.
      engine: how `body` is mapped, `engine=` of its function.
      name: the program's name in messages, logs and profiles.
      variables: names of the variables that it reads and writes, which processes compare too.
      options: options of the compiler, in addition to those of the group's platform.
      takes_all_replicas: whether `body` takes the arrays of all replicas, and is not mapped.
      has_fixed_kernels: whether its bits are the same in every process and run, on one kind of device.
      constants: captured arrays, a last list of arguments, which callers do not pass.
    """

    body: Body
    ins: Sequence[Layouts]
    shapes: Sequence[Sequence[jax.ShapeDtypeStruct]]
    outs: Layouts
    donate: tuple[int, ...] = ()
    engine: str = "shard_map"
    name: str = ""
    variables: Sequence[str] = ()
    options: tuple[tuple[str, Any], ...] = ()
    takes_all_replicas: bool = False
    has_fixed_kernels: bool = False
    constants: Sequence[Constant] = ()


class Program:
    """A program of a group. `launch` starts it and returns at once."""

    # True for a program with a host callback, which may raise in one process while the other processes go on.
    may_fail_alone = False

    def __init__(self, group: Group, name: str, run: Callable[..., list[jax.Array]], is_local: bool = False) -> None:
        """Make a program of a function of its lists of arguments, whose last output is a token.

        A local program communicates nothing: one process may run it.
        """
        # The last output of `run` is a token. A local program communicates nothing, so one process may run it alone.
        self.group, self.name, self._run = group, name, run
        self._peers, self._is_local, self._limits_in_flight = group._peers, is_local, group._limits_in_flight
        # In one process, on devices that are here, nothing has to be asked before a launch.
        self._is_checked = group.accelerator is not None or group._is_multi_process

    def launch(self, args: Sequence[Sequence[Any]], on_failure: OnFailure = ignore_failure) -> list[jax.Array]:
        """Start the program on its lists of arguments. If it dies later, `on_failure` is called."""
        if len(IN_FLIGHT) >= MAX_IN_FLIGHT:
            wait_for_capacity(self._limits_in_flight)
        if WATCHDOG.seconds is not None:
            WATCHDOG.rearm()
        if self._is_checked:
            self._check()
        try:
            with TraceAnnotation(self.name):
                results = self._run(*args)
        except Exception as error:
            translated = self._translate(error)
            if translated is error:
                raise
            raise translated from error
        IN_FLIGHT[InFlight(results.pop(), on_failure, self._peers, self.name)] = None
        # If this program dies here alone, the next program's collectives would meet those of this one elsewhere.
        if self.may_fail_alone:
            drain()
        return results

    def _check(self) -> None:
        """Check that the devices are here, and that the other processes are about to launch the same program."""
        self.group._refuse_if_absent(self.name)
        # If an earlier program died, this raises here, and not inside a collective that others wait in.
        retire_finished()
        if not self._is_local:
            self._peers.before_launch(self.name)

    def _translate(self, error: Exception) -> Exception:
        """Return the error to raise in place of one of a launch, and tell the other processes if they need to know."""
        # On CPUs a launch may find that another process is gone.
        gone = self._peers.translate_error(error)
        # Any other runtime error, but one of bad arguments, comes from a program that has begun, and goes on elsewhere.
        if gone is None and isinstance(error, jax.errors.JaxRuntimeError) and "INVALID_ARGUMENT" not in str(error):
            self._peers.after_failure(self.name, error)
        return gone or error


class Executable(Program):
    """A program that is compiled for the shapes of its arguments."""

    def __init__(self, group: Group, spec: ProgramSpec) -> None:
        structs = [
            [s.update(sharding=sharding_of(group, layout)) for s, layout in zip(shapes, layouts_of_list, strict=True)]
            for shapes, layouts_of_list in zip(spec.shapes, spec.ins, strict=True)
        ]
        options = compiler_options(group, spec.has_fixed_kernels) | dict(spec.options)
        lowered = _jit(group, spec).lower(*structs)
        name = spec.name
        if group._is_multi_process:
            name += f"({describe_shapes([*chain(*structs)])})"
            text = lowered.as_text()
            captured = [str(constant.key) for constant in spec.constants]
            group._peers.agree(name, "\n".join([*spec.variables, *captured, text]))
            # A callback may raise in one process, while the others go on.
            self.may_fail_alone = "callback" in text
        start = perf_counter()
        with noticed_hits() as hits:
            self.compiled = lowered.compile(compiler_options=options)
        # The time of a compilation, or of reading the program from the compilation cache.
        self.seconds, self.is_from_cache = perf_counter() - start, bool(hits)
        # Compiled programs refuse arrays of numbers below a byte ("input layouts that disagree"). jax.jit takes them,
        # but compiles once more. Drop this when we require jaxlib>=0.12.
        is_refused = _REFUSES_SUB_BYTES and any([bits_of(s.dtype) < 8 for s in chain(*structs)])
        run = _jit(group, spec, options) if is_refused else self.compiled
        super().__init__(group, name, partial(_with_constants, group, spec.constants, run) if spec.constants else run)


def _with_constants(group: Group, constants: Sequence[Constant], run: Any, *args: Sequence[Any]) -> list[jax.Array]:
    return run(*args, [constant.on(group) for constant in constants])


def compiler_options(group: Group, has_fixed_kernels: bool = False) -> dict[str, Any]:
    if group.platform != "gpu":
        return {}
    options: dict[str, Any] = {}
    if not group._has_one_device:
        # XLA counts the bytes of one replica's result: of a reduce-scatter that is a fraction.
        options["xla_gpu_all_reduce_combine_threshold_bytes"] = COMBINE_BYTES
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = max(COMBINE_BYTES // group.size, 1)
    if has_fixed_kernels:
        # Sums by atomic additions, and kernels chosen by their times, may differ from one run to the next.
        options["xla_gpu_deterministic_ops"] = True
    if has_fixed_kernels or group.accelerator is not None:
        # Autotuning times kernels on the device, which a target does not have.
        options["xla_gpu_autotune_level"] = 0
    # What the user has set in XLA_FLAGS wins: options of a compilation would override the flags.
    flags = os.environ.get("XLA_FLAGS", "")
    return {option: value for option, value in options.items() if option not in flags}


@contextmanager
def translate_peer_errors(group: Group) -> Generator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        gone = group._peers.translate_error(error)
        if gone is None:
            raise
        raise gone from error


def _jit(group: Group, spec: ProgramSpec, options: dict[str, Any] | None = None) -> Any:

    # The token, an extra output, tells when the program has ended. Other outputs may be donated or deleted by then.
    def with_token(*values: jax.Array) -> list[jax.Array]:
        token = jnp.zeros((group.size,) if spec.takes_all_replicas else (), jnp.int32)
        return [*spec.body(*values), token]

    ins: list[Layout] = [*chain(*spec.ins)]
    layouts: list[Layout] = [*spec.outs, "stacked"]
    mapped = with_token if spec.takes_all_replicas else group._way.map(with_token, ins, layouts, spec.engine)
    axis = replica_axis()

    def of_lists(*args: Sequence[jax.Array]) -> list[jax.Array]:
        with axis_named(axis):
            return list(mapped(*chain(*args)))

    of_lists.__name__ = of_lists.__qualname__ = spec.name
    shardings = [sharding_of(group, layout) for layout in layouts]
    return jax.jit(of_lists, donate_argnums=spec.donate, out_shardings=shardings, compiler_options=options)


def run_collective(
    group: Group, body: Body, ins: Layouts, outs: Layouts, args: Sequence[Any], is_local: bool = False
) -> list[jax.Array]:
    """Run a small program of synk's."""
    # `body` is a part of the key, so it must be a lasting object: a closure made for each call would compile each time.
    args, key = list(args), (body, tuple(ins), tuple(outs))
    module, function = body.__module__.split(".")[-1], body.__qualname__.split(".")[0]
    name = f"synk.{module.strip('_')}.{function.strip('_')}"
    with LOCK:
        spec = ProgramSpec(body, [ins], [], outs, name=name)
        jitted = group._cached(run_collective, key, partial(_jit, group, spec))
        if group._is_multi_process:
            name = f"{name}({describe_shapes(args)})"
        # Processes compare the text once for each shape. Different programs would wait for each other inside a
        # collective.
        if group._is_multi_process and not is_local:
            shapes = tuple((a.shape, a.dtype) for a in args)

            def agree() -> bool:
                group._peers.agree(name, jitted.lower(args).as_text())
                return True

            group._cached(group._peers, (*key, shapes), agree)
        return Program(group, name, jitted, is_local).launch([args])


def relayout(group: Group, leaves: Sequence[jax.Array], layout: Layout, to: Layout) -> list[jax.Array]:
    """Copy leaves to another layout without communication. From stacked to replicated, the entries must be equal."""
    return run_collective(group, _copy, layouts(layout, len(leaves)), layouts(to, len(leaves)), leaves, is_local=True)


def _copy(*values: jax.Array) -> Sequence[jax.Array]:
    # Without jnp.copy, jit returns the argument's own buffer.
    return [jnp.copy(v) for v in values]


def copy_to_replicas(group: Group, leaves: Sequence[Any], layout: Layout) -> list[jax.Array]:
    """Copy each leaf to all replicas, and return the copies in a layout. Copies may share memory with NumPy leaves."""
    return relayout(group, [put(group, leaf, "replicated") for leaf in leaves], "replicated", layout)


def broadcast_from(group: Group, leaves: Sequence[jax.Array], rank: int, layout: Layout) -> list[jax.Array]:
    """Copy one replica's entries of stacked leaves to all replicas, bit for bit."""
    root = constant(group, "replicated", (rank,), "int32")
    ins: list[Layout] = [*layouts("stacked", len(leaves)), "replicated"]
    # Leaves may have 64 bits from a time when those were enabled.
    with jax.enable_x64(True):
        return run_collective(group, _broadcast, ins, layouts(layout, len(leaves)), [*leaves, root])


def _broadcast(*values: jax.Array) -> Sequence[jax.Array]:
    *leaves, root = values
    is_root = jax.lax.axis_index(replica_axis()) == root[0]
    bits = [as_bits(leaf) for leaf in leaves]
    # All replicas but the root add zeros, in integers: a sum of floats would turn -0 to 0 and may change the bits of
    # NaN.
    sums = jax.lax.psum([jnp.where(is_root, b, jnp.zeros((), b.dtype)) for b in bits], replica_axis()) if bits else []
    return [from_bits(b, leaf.dtype) for b, leaf in zip(sums, leaves, strict=True)]


def from_process_0(
    group: Group, arrays: Sequence[np.ndarray] | None, shapes: Sequence[jax.ShapeDtypeStruct]
) -> list[np.ndarray]:
    """Send host arrays of process 0 to all processes, bit for bit. Other processes pass None."""
    if not group._is_multi_process:
        assert arrays is not None
        return list(arrays)
    root = next(rank for rank, device in enumerate(group.devices) if device.process_index == 0)
    copies: list[np.ndarray] = []
    for i, shape in enumerate(shapes):
        array = np.zeros(shape.shape, shape.dtype) if arrays is None else np.ascontiguousarray(arrays[i])
        # Powers of two, since each length needs a program.
        words = np.zeros(max(256, 1 << ((array.nbytes + 3) // 4 - 1).bit_length()), np.uint32)
        words.view(np.uint8)[: array.nbytes] = array.reshape(-1).view(np.uint8)
        # 32-bit words, since a dtype of 64 bits would be narrowed where JAX has those switched off.
        stacked = stack_parts(group, [words] * group.size, None)
        sent = replica_to_host(group, stacked, "stacked", root, None).view(np.uint8)
        copies.append(sent[: array.nbytes].view(shape.dtype).reshape(shape.shape))
    return copies


def replica_to_host(group: Group, array: jax.Array, layout: Layout, rank: int, rows: int | None) -> np.ndarray:
    """Return one replica's entry, cut to `rows` rows; on CPUs a view. Several processes call this together."""
    if group._is_multi_process:
        if layout == "stacked":
            array, layout = broadcast_from(group, [array], rank, "replicated")[0], "replicated"
        rank = group._local_ranks.start
    return local_replica_to_host(group, array, layout, rank, rows)


def as_bits(array: jax.Array) -> jax.Array:
    """Return the bits of an array as unsigned integers of at least 32 bits. Complex numbers become pairs."""
    if array.dtype == np.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return as_bits(jnp.stack([array.real, array.imag], -1))
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits_of(array.dtype)}"))
    return bits.astype(jnp.uint32) if array.dtype.itemsize < 4 else bits


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if dtype == np.bool_:
        return bits.astype(bool)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_bits(bits, jnp.finfo(dtype).dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{bits_of(dtype)}"), dtype)


@contextmanager
def noticed_hits() -> Generator[list[str]]:
    """Collect an entry for each program that this thread takes from the cache, and does not compile."""
    hits: list[str] = []
    thread = threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        # Recorded in the thread that compiles: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


FEWER_ROWS = "Run it with num_slices=2 or more, which needs the memory of one slice."


class NotFinite(FloatingPointError):
    """Error of a call whose numbers are not finite, which its function or the user's options refuse."""


def translate_error(error: Exception, name: str, advice: str = FEWER_ROWS) -> Exception:
    """Return JAX's error about a launch in words that name the function; other errors unchanged."""
    if isinstance(error, SynkError):
        return error
    if checks_floats() and type(error).__name__ == "InternalFloatingPointError":
        return NotFinite(f"{name}: a result holds NaN or infinity, which jax_debug_nans or _infs forbids.")
    # XLA says "Out of memory" where the host has no more.
    if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        first = str(error).splitlines()[0]
        return MemoryError(f"{name}: {first} {advice}")
    return error
