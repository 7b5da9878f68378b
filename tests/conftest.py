"""Every test runs on eight virtual CPU devices; with JAX_PLATFORMS=cuda, on what GPUs there are."""

import os
import signal
import sys
from pathlib import Path

import jax
import pytest

import synk

from .helpers import group_of

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling is most of what tests do: what has been compiled once, in this run or an earlier one, is kept beside the
# interpreter. Tests that count compilations count those that come from there too.
if jax.config.jax_compilation_cache_dir is None and sys.prefix != sys.base_prefix:
    jax.config.update("jax_compilation_cache_dir", str(Path(sys.prefix) / "jax-cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# A shell has what runs in the background ignore Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_group_is_left():
    """What one test makes current, the next one does not find."""
    yield
    synk.close()


@pytest.fixture(params=[1, 2, 8], ids="replicas={}".format)
def group(request):
    """Groups of one, two and eight devices."""
    with group_of("devices", request.param) as group:
        yield group


@pytest.fixture(params=["devices", "simulated"])
def four(request):
    """Four replicas, on as many devices and on one."""
    with group_of(request.param, 4) as group:
        yield group
