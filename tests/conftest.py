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
def group(request):
    """Make a group of two replicas on two devices, or of three on one if the test asks for simulated ones."""
    kind = getattr(request, "param", "devices")
    with group_of(kind, 3 if kind == "simulated" else 2) as group:
        yield group


@pytest.fixture(params=first_of(("devices", 4), ("simulated", 4)), ids=str)
def on_group(request):
    """Make a group of four replicas on four devices; among the slow tests, on one device."""
    with group_of(*request.param) as group:
        yield group


@pytest.fixture
def four(request):
    """Make a group of four replicas on four devices, or on one if the test asks for simulated ones."""
    with group_of(getattr(request, "param", "devices"), 4) as group:
        yield group
