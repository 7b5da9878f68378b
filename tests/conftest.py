"""Every test runs on eight virtual CPU devices; with JAX_PLATFORMS=cuda, on what GPUs there are."""

import os
import signal

import jax
import pytest

import synk

from .helpers import group_of

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

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
