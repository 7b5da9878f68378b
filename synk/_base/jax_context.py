"""JAX context: options and transformations of JAX around a call, and how synk's programs keep clear of them."""

import os
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import jax
import jax.core
import jax.extend
import numpy as np
from jax.extend import linear_util
from jax.sharding import Mesh, get_abstract_mesh

# Public since JAX 0.10 in jax.extend.core, and before that in jax.core.
trace_state = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
_innermost_trace: Callable[[Any], Any] = getattr(jax.extend.core, "find_top_trace", None) or jax.core.find_top_trace
_DebugInfo: Any = getattr(jax.extend.core, "DebugInfo", None) or jax.core.DebugInfo
_NAMED_AXES = "unsafe_get_axis_names_DO_NOT_USE"
named_axes: Callable[[], list[Any]] = getattr(jax.extend.core, _NAMED_AXES, None) or getattr(jax.core, _NAMED_AXES)
# JAX 0.8.2 has these in jax.core alone, and warns. Drop this when we require jax>=0.10.
with warnings.catch_warnings(action="ignore"):
    _traces: Any = jax.extend.core if hasattr(jax.extend.core, "set_current_trace") else jax.core
    _enter_trace, _take_trace = _traces.set_current_trace, _traces.take_current_trace
# The trace in which operations run at once, also where synk is imported under another one.
with jax.core.eval_context(), _take_trace() as _EVALUATION:
    pass
_NO_MESH = Mesh(np.empty((), object), ())
# Without the types, since JAX's options have none.
config: Any = jax.config

# All options that change a trace, by a list that JAX keeps privately (a test compares), and three that change a program
# besides: https://docs.jax.dev/en/latest/config_options.html
_NAMES = """
    accurate_erf_inv allow_f16_reductions auto_pcast check_static_indices custom_jvp3 custom_vjp3 debug_key_reuse
    default_device raise_on_ppermute_sort_diff remat_barrier_no_cotangents use_hlo_logistic_lowering
    default_matmul_precision embedded_constants_max_bytes enable_pgle enable_x64 error_checking_behavior_divide
    error_checking_behavior_nan error_checking_behavior_oob explicit_x64_dtypes high_dynamic_range_gumbel
    hlo_source_file_canonicalization_regex mutable_array_checks no_execution numpy_dtype_promotion numpy_rank_promotion
    pallas_enable_debug_checks pallas_use_mosaic_gpu pgle_profiling_runs ragged_dot_use_gpu_pallas_triton_lowering
    random_seed_offset remat3 remove_size_one_mesh_axis_from_type scan3 softmax_custom_jvp
    threefry_gpu_kernel_lowering threefry_partitionable use_direct_linearize use_emit_pipeline_primitive
    use_shardy_partitioner use_simplified_jaxpr_constants xla_profile_version
    default_prng_impl debug_nans debug_infs
""".split()
TRACE_OPTIONS = tuple(f"jax_{name}" for name in _NAMES if hasattr(config, f"jax_{name}"))
_values_of = attrgetter(*TRACE_OPTIONS)


def _read_options(*_: Any) -> tuple[Any, ...]:
    return _values_of(config)


# Reading the options one by one takes 3 us. JAX remembers traces by one key of all that changes a trace, in 1 us:
# https://docs.jax.dev/en/latest/jax.extend.linear_util.html
_remembered_options: Callable[..., tuple[Any, ...]] = linear_util.cache(_read_options)
_READING = linear_util.wrap_init(_read_options, debug_info=_DebugInfo("synk", "trace_options", (), None))
# The three that change a program alone are not in that key.
_PRNG, _NANS, _INFS = jax.default_prng_impl, jax.debug_nans, jax.debug_infs


def trace_options() -> tuple[Any, ...]:
    """Return the values of JAX's options that change a trace or a program. Programs are cached by them."""
    return _remembered_options(_READING, _PRNG.value, _NANS.value, _INFS.value)


def trace_surroundings() -> tuple[Any, ...]:
    """Return the mesh and the named axes, with sizes, of a trace around this line."""
    # Inside vmap or shard_map a size of an axis is part of the trace, so a program that was inlined under one size must
    # not serve another.
    return get_abstract_mesh(), *[(name, jax.lax.axis_size(name)) for name in named_axes()]


def checks_floats() -> bool:
    return config.jax_debug_nans or config.jax_debug_infs


def is_traced() -> bool:
    """Check whether a transformation of JAX is under way around this line."""
    trace = _innermost_trace(None)
    if trace is None:
        # JAX 0.12 has no trace at all where Ctrl-C came inside an operation.
        leave_traces()
        return False
    return trace is not _EVALUATION


def is_staged() -> bool:
    """Check whether what runs here is traced, to run later: by `jit`, `scan` or the like, not by `grad` or `vmap`."""
    # Only a staging trace turns an operation on a constant into a tracer; under grad and vmap it runs at once. One
    # operation of a NumPy scalar asks without a private type of JAX's.
    return is_traced() and isinstance(jax.lax.neg(np.float32(0)), jax.core.Tracer)


def leave_traces() -> None:
    """End all transformations of this thread. Ctrl-C while JAX leaves one would keep the thread in it for good."""
    _enter_trace(_EVALUATION).__enter__()


# Guards against implicit transfers: https://docs.jax.dev/en/latest/transfer_guard.html
_GUARDS: tuple[Any, ...] = (
    jax.transfer_guard_host_to_device,
    jax.transfer_guard_device_to_device,
    jax.transfer_guard_device_to_host,
)
_TO_DEVICE, _BETWEEN_DEVICES, _TO_HOST = _GUARDS


def has_user_jax_context() -> bool:
    return (
        config.jax_disable_jit
        or _TO_DEVICE.value is not None
        or _BETWEEN_DEVICES.value is not None
        or _TO_HOST.value is not None
        or not get_abstract_mesh().empty
    )


@contextmanager
def default_jax_context() -> Generator[None]:
    """Run synk's programs with JAX's defaults: jit enabled, no ambient mesh, no guards against their transfers."""
    mesh = nullcontext() if get_abstract_mesh().empty else jax.set_mesh(_NO_MESH)
    with jax.disable_jit(False), mesh, transfers_on_purpose():
        yield


@contextmanager
def transfers_on_purpose() -> Generator[None]:
    """Allow implicit transfers: users who pass rows want them on devices. Guards of explicit transfers still hold."""
    with ExitStack() as stack:
        for guard in _GUARDS:
            if guard.value in ("log", "disallow"):
                stack.enter_context(guard("allow"))
        yield


def is_checked(check: str) -> bool:
    """Tell whether `SYNK_CHECK`, a list with commas, names a check.

    "law" compares the first call of each kind with the serial one; "calls", or "1", compares the calls of processes.
    """
    text = os.environ.get("SYNK_CHECK", "")
    named = {word.strip().replace("1", "calls") for word in text.split(",")} - {"", "0"}
    if not named <= {"law", "calls"}:
        raise ValueError(f"SYNK_CHECK is {text!r} in the environment; give law, calls, or both with a comma.")
    return check in named
