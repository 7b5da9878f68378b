"""A program that dies: the variables it was to write are lost, and say so."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._runtime.dispatch import drain

from ..helpers import group_of


@synk.function
def quiet(x):
    jax.debug.callback(lambda: None)
    return x.sum()


@pytest.fixture(autouse=True, scope="module")
def no_error_stays():
    """JAX keeps a token of each device's last program with effects, and raises its error at `jax.effects_barrier()`."""
    yield
    with group_of("devices", jax.device_count()):
        quiet(np.ones(jax.device_count(), np.float32))
    jax.effects_barrier()


def make(donate):
    """A function that dies on the device when its rows hold a negative number, and the variable it updates."""
    w = synk.shared(np.zeros(3, np.float32), name="w")

    def look(x):
        if (np.asarray(x) < 0).any():
            raise RuntimeError("a negative row")
        return np.float32(0)

    @synk.function(reduce="mean", donate=donate)
    def step(x):
        return jnp.mean(x) + jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), x, vmap_method="sequential")

    @step.then
    def step(mean):
        w.value = w.value + mean

    return step, w


def run_until_dead(step, x):
    """Return whether the error comes later, with the value, and not with the call."""
    try:
        step(x)
    except Exception as error:  # JAX's own, whose class differs between versions
        assert "a negative row" in str(error)
        return False
    return True


@pytest.mark.smoke
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_died_is_lost_and_healed(group, donate):
    """Reading names the function and the cause; setting heals. Only where JAX raised at once is an old value there."""
    step, w = make(donate)
    x = np.ones(8, np.float32)
    step(x)
    is_lost = run_until_dead(step, -x) or donate
    if is_lost:
        for read in (lambda: w.value, lambda: w.get_value(0), lambda: step(x)):
            with pytest.raises(
                synk.errors.SharedLostError, match=r"w: a program of step .* died .*Set or load it again"
            ):
                read()
        w.value = np.ones(3, np.float32)
    np.testing.assert_array_equal(w.value, [1, 1, 1])
    step(x)
    np.testing.assert_array_equal(w.value, [2, 2, 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", ["serial", "check", "blame", "explain", "check_replicas", "save", "all_reduce"])
def test_what_looks_at_a_lost_variable_says_so(call, tmp_path):
    """All that read it raise, not the call that died alone."""
    with group_of("devices", 2):
        step, w = make(donate=True)
        reads, x = synk.function(lambda x: x.sum() * w.value), np.ones(8, np.float32)
        acts = {
            "serial": lambda: reads.serial(x), "check": lambda: reads.check(x), "blame": lambda: reads.blame(x),
            "explain": lambda: reads.explain(x, run=1), "check_replicas": lambda: synk.check_replicas(w),
            "save": lambda: synk.save(tmp_path, {"w": w}, step=1), "all_reduce": lambda: synk.all_reduce(w),
        }  # fmt: skip
        step(x)
        run_until_dead(step, -x)
        drain()
        with pytest.raises(synk.errors.SharedLostError, match="w: a program of step"):
            acts[call]()
        synk.broadcast(w, np.ones(3, np.float32))
        acts[call]()
        np.testing.assert_array_equal(reads(x), np.full(3, 8))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("donate", [True, False])
def test_calls_that_follow_what_died_are_lost_too(group, donate):
    """However soon they come, none gives a value made of what died; a value that is set is no dead program's to take."""
    step, w = make(donate)
    x = np.ones(8, np.float32)
    for _ in range(3):
        is_lost = run_until_dead(step, -x)
        for _ in range(3):
            run_until_dead(step, x)
        if is_lost:
            with pytest.raises(synk.errors.SharedLostError):
                w.value
        run_until_dead(step, -x)
        w.value = np.ones(3, np.float32)
        drain()
        np.testing.assert_array_equal(w.value, [1, 1, 1])


def test_an_error_while_tracing_changes_nothing(group):
    """An error in `fn` arrives as it is and leaves every variable as it was."""
    w = synk.shared(np.zeros(3, np.float32), name="w")

    @synk.function
    def broken(x):
        w.value = w.value + 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        broken(np.ones(8, np.float32))
    np.testing.assert_array_equal(w.value, [0, 0, 0])


@pytest.mark.smoke
@pytest.mark.parametrize("donate", [True, False])
def test_old_values_are_let_go(four, donate):
    """Notes of programs in flight keep no values alive."""
    step, _ = make(donate)

    def values():
        """Arrays of the variable's shape that are alive."""
        arrays = [array for array in jax.live_arrays() if array.shape[-1:] == (3,) and array.dtype == np.float32]
        return sum(not array.is_deleted() for array in arrays)

    gc.collect()
    before = values()
    for _ in range(9):
        jax.block_until_ready(step(np.ones(8, np.float32)))
    assert values() == before + 1


@pytest.mark.parametrize("donate", [True, False])
def test_variables_are_let_go(four, donate):
    """Notes of programs in flight keep no variables alive."""
    step, w = make(donate)
    jax.block_until_ready(step(np.ones(8, np.float32)))
    left = weakref.ref(w)
    del step, w
    gc.collect()
    assert left() is None
