"""A program that dies after donation: its variables say so, or keep their old values where nothing was donated."""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._runtime.dispatch import drain

from ..helpers import group_of, slow, slow_but


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
    """The error may come with the call or later, with the value."""
    try:
        step(x)
    except Exception as error:  # JAX's own, whose class differs between versions
        assert "a negative row" in str(error)


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_donated_value_is_lost_and_healed(group):
    """Reading names the function and the cause; setting heals."""
    step, w = make(donate=True)
    step(np.ones(8, np.float32))
    run_until_dead(step, -np.ones(8, np.float32))
    with pytest.raises(synk.SharedLostError, match=r"w: .* program of step that died"):
        w.value  # reading is what raises
    with pytest.raises(synk.SharedLostError, match="w: "):
        step(np.ones(8, np.float32))
    w.value = np.ones(3, np.float32)
    step(np.ones(8, np.float32))
    np.testing.assert_array_equal(w.value, [2, 2, 2])


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_donation_nothing_is_lost(group):
    """With donate=False the old value is back, however many calls had followed."""
    step, w = make(donate=False)
    step(np.ones(8, np.float32))
    run_until_dead(step, -np.ones(8, np.float32))
    np.testing.assert_array_equal(w.value, [1, 1, 1])
    step(np.ones(8, np.float32))
    np.testing.assert_array_equal(w.value, [2, 2, 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("settles", [True, False])
def test_without_donation_calls_go_on(group, settles):
    """Calls that follow those that died, however soon, lose nothing."""
    step, w = make(donate=False)
    rows = np.ones(8, np.float32)
    step(rows)
    for turn in range(1, 4):
        for _ in range(turn):
            run_until_dead(step, -rows)
            if settles:
                time.sleep(0.1)
        if not settles:
            for _ in range(3):  # of which those that find what is dead, and not known to be, die with it
                run_until_dead(step, rows)
        before = np.asarray(w.value)
        assert (before == turn).all() or (not settles and (before >= turn).all())
        step(rows)
        np.testing.assert_array_equal(w.value, before + 1)


COLLECTIVES = {
    "all_reduce": synk.all_reduce, "all_gather": synk.all_gather, "reduce": lambda w: synk.reduce(w, "mean"), "broadcast": synk.broadcast,
    "set_value": lambda w: synk.set_value(0, w, np.ones(3, np.float32)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("call", slow_but(["all_reduce", "set_value"], COLLECTIVES))
def test_without_donation_collectives_go_on(call, settles):
    """They find the value that is back."""
    with group_of("devices", 2):
        step, w = make(donate=False)
        step(np.ones(8, np.float32))
        run_until_dead(step, -np.ones(8, np.float32))
        if settles:
            time.sleep(0.1)
        COLLECTIVES[call](w)
        np.testing.assert_array_equal(w.get_value(0), np.ones(6 if call == "all_gather" else 3, np.float32))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("call", ["serial", slow("check"), slow("blame"), "check_replicas", slow("explain")])
def test_without_donation_nothing_raises_again(group, call, settles):
    """What looks at variables finds the value that is back, and does not raise what was another call's."""
    step, w = make(donate=False)
    reads, x = synk.function(lambda x: x.sum() * w.value), np.ones(8, np.float32)
    acts = {
        "serial": lambda: reads.serial(x), "check": lambda: reads.check(x), "blame": lambda: reads.blame(x),
        "check_replicas": lambda: synk.check_replicas(w), "explain": lambda: reads.explain(x, run=1),
    }  # fmt: skip
    for _ in range(2):
        step(x)
        run_until_dead(step, -x)
        if settles:
            time.sleep(0.1)
        acts[call]()
    np.testing.assert_array_equal(reads(x), np.full(3, 16))


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
    """Notes of steps keep no values alive, but where nothing is donated those that may have to come back."""
    step, _ = make(donate)

    def values():
        """Arrays of the variable's shape that are alive."""
        arrays = [array for array in jax.live_arrays() if array.shape[-1:] == (3,) and array.dtype == np.float32]
        return sum(not array.is_deleted() for array in arrays)

    gc.collect()
    before = values()
    for _ in range(9):
        jax.block_until_ready(step(np.ones(8, np.float32)))
    if not donate:
        drain()
    assert values() == before + 1
