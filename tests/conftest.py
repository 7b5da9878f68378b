"""Groups for tests, none of which is left current; JAX is asked to refuse what it would promote by itself."""

import signal

import jax
import pytest

import synk

from .helpers import first_of, group_of

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell makes its background jobs ignore Ctrl-C, and the programs that they start inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_group_is_left():
    """Close the group after each test, so that the next test does not find it."""
    yield
    synk.close()


@pytest.fixture
def group():
    """Make a group of two replicas on two devices."""
    with group_of("devices", 2) as group:
        yield group


@pytest.fixture(params=first_of(("devices", 4), ("devices", 1), ("simulated", 4)), ids=str)
def on_group(request):
    """Make a group of four replicas on four devices; among the slow tests, of one, and of some on one device."""
    with group_of(*request.param) as group:
        yield group


@pytest.fixture
def four():
    """Make a group of four replicas on four devices."""
    with group_of("devices", 4) as group:
        yield group
