"""JAX context: whether a transformation is under way, and what the user has set around a call."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest
from jax._src import core  # noqa: TID251  # to break what Ctrl-C breaks

from synk._base.jax_context import TRACE_OPTIONS, config, has_user_jax_context, is_traced, trace_options

from .. import harness

pytestmark = pytest.mark.smoke

TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "scan": lambda f: jax.lax.scan(lambda carry, x: (carry, f(x)), 0, jnp.ones(2)),
    "linearize": lambda f: jax.linearize(f, 1.0),
    "shard_map": lambda f: jax.shard_map(f, mesh=a_mesh(), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)(1.0),
}


def a_mesh():
    return jax.sharding.Mesh(jax.devices()[:1], ("d",))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name):
    """They are seen inside, on their own thread, and are over after."""
    seen = []

    def look(x):
        thread = threading.Thread(target=lambda: seen.append(is_traced()))
        thread.start()
        thread.join()
        seen.append(is_traced())
        return x

    assert not is_traced()
    TRANSFORMATIONS[name](look)
    assert seen[:2] == [False, True] and not is_traced()


def test_what_is_no_transformation():
    """Operations that run at once inside of one, and a thread that Ctrl-C has left without any trace."""
    seen = []

    def look(x):
        with jax.core.eval_context():
            seen.append(is_traced())
        return x

    jax.jit(look)(1.0)
    assert seen == [False]
    try:
        core.trace_ctx.set_trace(None)
        assert not is_traced()
        assert jnp.ones(2).sum() == 2
    finally:
        core.trace_ctx.set_trace(core.eval_trace)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: jax.disable_jit(),
        lambda: jax.transfer_guard("allow"),
        lambda: jax.transfer_guard_host_to_device("disallow"),
        lambda: jax.transfer_guard_device_to_device("log"),
        lambda: jax.transfer_guard_device_to_host("log"),
        lambda: jax.set_mesh(a_mesh()),
    ],
    ids=["disable_jit", "all guards", "to device", "between devices", "to host", "mesh"],
)
def test_what_users_set(setting):
    """Each is seen, until it is over."""
    assert not has_user_jax_context()
    with setting():
        assert has_user_jax_context()
    assert not has_user_jax_context()


OTHERS = [
    "strict",
    "standard",
    "allow",
    "warn",
    "raise",
    "float32",
    "highest",
    "rbg",
    "throw",
    "x",
    True,
    False,
    1,
    7,
    jax.devices()[-1],
]


def change(name):
    """Give an option the first other value that it takes."""
    before = getattr(config, name)
    for value in OTHERS:
        with contextlib.suppress(Exception):
            config.update(name, value)
        if getattr(config, name) != before:
            return
    pytest.fail(f"{name} takes none of these")


@pytest.mark.parametrize("name", TRACE_OPTIONS)
def test_every_option_is_noticed(name):
    """Also when it comes back, and after JAX has forgotten what it remembers."""
    value, before = getattr(config, name), trace_options()
    assert dict(zip(TRACE_OPTIONS, before, strict=True))[name] == value and trace_options() is before
    try:
        change(name)
        changed = trace_options()
        assert dict(zip(TRACE_OPTIONS, changed, strict=True))[name] == getattr(config, name) and changed != before
    finally:
        config.update(name, value)
    assert trace_options() == before


def test_options_of_a_thread():
    """A setting in a `with` block is that thread's alone; a cleared cache changes no option."""
    seen, before = [], trace_options()
    with jax.debug_nans(True), jax.numpy_rank_promotion("warn"):
        thread = threading.Thread(target=lambda: seen.append(trace_options()))
        thread.start()
        thread.join()
        assert seen == [before] and sum(a != b for a, b in zip(trace_options(), before, strict=True)) == 2
    jax.clear_caches()
    assert trace_options() == before


def test_imported_under_a_transformation():
    """That one is over when it is over."""
    program = """
import jax
@jax.jit
def f(x):
    from synk._base.jax_context import is_traced
    assert is_traced()
    return x
f(1.0)
from synk._base.jax_context import is_traced, leave_traces
assert not is_traced()
leave_traces()
assert jax.numpy.ones(2).sum() == 2
"""
    done = harness.python(program)
    assert done.returncode == 0, done.stderr
