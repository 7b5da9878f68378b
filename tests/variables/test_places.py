"""Places: a variable lies everywhere while replicas are equal, and has a value on each from when they may differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import also_simulated

X = np.arange(9, dtype=np.float32)


@pytest.mark.parametrize(("rows", "slices"), [(9, 1), (8, 2), (8, 1)])
@also_simulated("four")
def test_a_variable_that_reads_one_that_differs(four, rows, slices):
    """What then computes from it differs too; programs for either place are kept apart."""
    u, v = synk.shared(np.float32(0)), synk.shared(np.float32(1))
    update = synk.function(lambda x: u.update(u.value + x.sum(), slices="add"))
    f = synk.function(lambda x: x.sum() * v.value)

    @f.then
    def then(total):
        v.value = v.value + 0 * u.value
        return total

    for _ in range(3):
        assert float(f(X[:rows], num_slices=slices)) == X[:rows].sum()
        update(X[:rows], num_slices=slices)
    compiled = f.stats.compilations
    f(X[:rows], num_slices=slices)
    assert f.stats.compilations == compiled
    with pytest.raises(synk.errors.DivergedError):
        v.value


@also_simulated("four")
def test_a_branch_that_updates_on_each_replica(four):
    """Programs built before a variable differed are not run after."""
    w = synk.shared(np.float32(2))

    @synk.function(outputs="sum")
    def f(x):
        if len(x) > 2:
            w.value = w.value + 0
        return x.sum() * w.value

    assert [float(f(np.ones(rows, np.float32))) for rows in (8, 16, 8, 16)] == [16, 32, 16, 32]


def test_local_steps_compile_once(four):
    """Updates on each replica and all-reduces in turn settle in one place."""
    w = synk.shared(np.float32(0))

    @synk.function(reduce="mean")
    def step(x):
        w.value = w.value + x.mean()

    for _ in range(3):
        step(X[:8])
        synk.all_reduce(w)
    assert (step.stats.compilations, float(w.value)) == (1, 3 * X[:8].mean())


@also_simulated("four")
def test_equal_leaves_are_whole_and_shared_by_none(four):
    """Everywhere is one value; asked for, each replica's is a copy; a step updates it where it is."""
    w = synk.shared(np.zeros((2, 3), np.float32))
    step = synk.function(jnp.sum, then=lambda total: setattr(w, "value", w.value + total))
    step(X[:8])
    assert w.value.shape == (2, 3) and w.value.is_fully_replicated
    assert (np.asarray(w.get_value(3)) == X[:8].sum()).all()
    w.set_value(np.ones((2, 3), np.float32), rank=1)
    assert (w.get_value(1) == 1).all() and (w.get_value(2) == X[:8].sum()).all()


def test_broadcast_heals_what_the_host_made_differ():
    """Replicas that an impure callback made differ unnoticed are as rank 0 again."""
    with synk.init(2):
        w, answers = synk.shared(np.float32(0)), iter(range(100))

        def ask(total):
            return np.float32(next(answers))

        @synk.function
        def f(x):
            return x.sum()

        @f.then
        def f(total):
            w.value = jax.pure_callback(ask, jax.ShapeDtypeStruct((), np.float32), total)

        f(X[:8])
        synk.broadcast(w)
        synk.check_replicas(w)


@also_simulated("four")
def test_what_the_host_answers_may_differ(four):
    """A variable that an `io_callback` gave its value is unequal until it is broadcast."""
    w = synk.shared(np.float32(0))

    @synk.function
    def f(x):
        return x.sum()

    @f.then
    def f(total):
        w.value = jax.experimental.io_callback(np.float32, jax.ShapeDtypeStruct((), np.float32), total)

    f(X[:8])
    with pytest.raises(synk.errors.DivergedError):
        w.value
    synk.broadcast(w)
    assert float(w.value) == X[:8].sum()


EIGHT = np.arange(8, dtype=np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["axis_index", "inner jit", "ppermute", "cond"])
@also_simulated("four")
def test_what_tells_ranks_apart_makes_a_variable_unequal(four, how):
    """JAX's own ways to see the rank count as much as `synk.rank`."""
    ways = {
        "axis_index": lambda: lax.axis_index("replica"),
        "inner jit": lambda: jax.jit(lambda: lax.axis_index("replica"))(),
        "ppermute": lambda: lax.ppermute(jnp.int32(1), "replica", [(i, (i + 1) % 4) for i in range(4)]),
        "cond": lambda: lax.cond(True, lambda: lax.axis_index("replica"), lambda: jnp.int32(0)),
    }
    w = synk.shared(np.int32(0))
    f = synk.function(jnp.sum)

    @f.then
    def after(total):
        w.value = w.value + ways[how]()

    after(EIGHT)
    with pytest.raises(synk.errors.DivergedError):
        w.value


@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod"])
def test_what_is_combined_inside_stays_equal(four, op):
    """`synk.all_reduce` and `synk.all_gather` in then give all replicas one value."""
    w = synk.shared(np.float32(0))
    f = synk.function(jnp.sum)

    @f.then
    def after(total):
        w.value = synk.all_reduce(total, op) + synk.all_gather(total[None]).sum()

    after(EIGHT)
    assert np.isfinite(w.value)
