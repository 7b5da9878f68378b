"""Groups for tests, none of which is left current; JAX is asked to refuse what it would promote by itself."""

import signal

import jax
import pytest

import synk

from .helpers import GROUPS, group_of, slow

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


@pytest.fixture(params=[GROUPS[1], slow(GROUPS[2])], ids="{0[1]} {0[0]}".format)
def group(request):
    """A group of two devices; in the slow tests of three replicas on one."""
    with group_of(*request.param) as group:
        yield group


@pytest.fixture(params=["devices", slow("simulated")])
def four(request):
    """Four replicas, on as many devices and on one."""
    with group_of(request.param, 4) as group:
        yield group
