"""Eight virtual CPU devices for every test and docstring, or JAX_NUM_CPU_DEVICES; with JAX_PLATFORMS=cuda,cpu, GPUs."""

import doctest
import gc
import os
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", "8")))
# JAX looks for its plugins once: whoever needs the one that compiles for GPUs comes after tests that do not.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

# PyTensor sets JAX's 64-bit mode by it, for the whole process.
os.environ.setdefault("PYTENSOR_FLAGS", "floatX=float32")
collect_ignore = [] if find_spec("pytensor") else ["synk/contrib/pytensor"]

# Compiling is most of what tests do. These leave XLA's own passes and collectives as they are, and turn LLVM's off;
# XLA_FLAGS= has all of them.
if jax.config.jax_platforms == "cpu" and "XLA_FLAGS" not in os.environ:
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    flags.append("--xla_cpu_parallel_codegen_split_count=1")  # small programs, and two workers that compile at a time
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")  # a third of the time; later jaxlibs do not have it
    os.environ["XLA_FLAGS"] = " ".join(flags)

# Nobody reads in a test's programs where each operation comes from; what synk itself names in errors is not from there.
jax.config.update("jax_traceback_in_locations_limit", 0)

# JAX keeps so many objects that looking through them for cycles, as often as Python does, is an eighth of the time.
gc.set_threshold(100_000, 20, 50)

# What has been compiled once, in this run or an earlier one, is kept beside the interpreter. Tests that count
# compilations count those that come from there too.
if jax.config.jax_compilation_cache_dir is None and sys.prefix != sys.base_prefix:
    jax.config.update("jax_compilation_cache_dir", str(Path(sys.prefix) / "jax-cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test or a docstring that asks for more devices than there are, as on a machine with one GPU."""
    try:
        return (yield)
    except Exception as error:
        cause = error.exc_info[1] if isinstance(error, doctest.UnexpectedException) else error
        if jax.device_count() < 8 and re.match(r"synk.init: \d+ replicas", str(cause)):
            pytest.skip(str(cause))
        raise
