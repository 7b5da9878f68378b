"""The op "same": values that all replicas have made equal."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import assert_close, assert_same, numbers

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("on_group")]


def learn(state, x):
    """A learner that communicates in a loop; its state is equal on all replicas."""

    def one(state, row):
        w = state["w"] - 0.1 * lax.pmean(row.mean(), "i")
        return {"w": w, "count": state["count"] + 1, "key": jax.random.split(state["key"])[0]}, w

    return lax.scan(one, state, x.T)


def start():
    return {"w": jnp.float32(1), "count": jnp.int32(0), "key": jax.random.key(3)}


@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_a_state_of_any_dtype(engine):
    """Keys and counters too, from call to call, eager and traced; nothing is sent but what the function sends."""
    f = synk.function(learn, ["x"], ("same", "same"), axis_name="i", engine=engine)
    x, state = numbers(8, 5), start()
    want, w = np.float32(1), []
    for _ in range(2):
        state, path = f(state, x)
        for column in x.T:
            want = want - np.float32(0.1) * column.mean()
            w.append(want)
        assert_close(path, np.array(w[-5:]))
    assert state["count"].dtype == np.int32 and int(state["count"]) == 10
    assert jax.random.key_data(state["key"]).shape == (2,)
    f.check(start(), x)
    assert_same(jax.tree.map(jnp.shape, f(start(), x)), jax.tree.map(jnp.shape, f.serial(start(), x)))
    again = jax.jit(lambda x: f(start(), x)[1])(x)
    assert_close(again, f(start(), x)[1])


def test_gradients():
    """They are those of the serial function."""
    f = synk.function(lambda x: lax.pmean((x**2).mean(), "replica"), reduce="same")
    x = numbers(8)
    assert_close(jax.grad(f)(x), 2 * x / x.size)


def test_nothing_is_sent(on_group):
    """But by the function itself."""
    f = synk.function(lambda x, w: (w * 2, w.astype(jnp.int32)), inputs=["x"], reduce="same")
    text = f.compile(numbers(8), np.ones(1000, np.float32)).as_text()
    assert not re.search(r"all-(reduce|gather)", text)
    two, one = f(numbers(8), np.ones(1000, np.float32))
    assert_same((two, one), (np.full(1000, 2, np.float32), np.ones(1000, np.int32)))
    assert two.is_fully_replicated and len(two.devices()) == len(set(on_group.devices))


def test_then_gets_it():
    """As any other output."""
    w = synk.shared(np.float32(0))
    f = synk.function(lambda x: (lax.psum(x.sum(), "replica"), x.mean()), outputs=("same", "mean"))

    @f.then
    def then(total, mean):
        w.value = w.value + total
        return total - mean

    x = numbers(8)
    assert_close(f(x), x.sum() - x.mean())
    assert_close(w.value, x.sum())


def test_replicas_that_differ(on_group):
    """Check tells; the call cannot know."""
    f = synk.function(lambda x: x.sum(), reduce="same", name="f")
    if on_group.size > 1:
        with pytest.raises(synk.LawError, match=r'f: output combined by "same" differs between replicas'):
            f.check(numbers(8))
    f = synk.function(lambda x: lax.pmax(x.max(), "replica"), reduce="same")
    f.check(numbers(8))


def test_refusals(on_group):
    """Slices, blocks, batches of over and replicas without rows."""
    f = synk.function(lambda x, w: 2 * w, inputs=["x"], reduce="same", name="f")
    g = synk.function(lambda x, w: 2 * w, inputs=["x"], reduce="same", blocks=2, name="f")
    w = np.float32(1)
    for call, words in (
        (lambda: f(numbers(8), w, num_slices=2), "num_slices > 1"),
        (lambda: f.over(numbers(8), w, batches=[4, 4]), "over"),
        (lambda: g(numbers(8), w), "blocks=2"),
    ):
        with pytest.raises(ValueError, match=f'f: output: "same" .* does not go with {words}'):
            call()
    if on_group.size > 1:
        with pytest.raises(ValueError, match=r"f: output is to be equal on all replicas.*at least 4 rows"):
            f(numbers(3), w)
    assert float(f(numbers(7), w)) == 2


# Variables that functions update on each replica alike.


def learner(axis="replica"):
    w = synk.shared(np.zeros(3, np.float32), name="w")

    @synk.function(reduce="mean", axis_name=axis)
    def learn(x):
        new = w.value + lax.pmean(x.mean(0), axis)
        w.value = new
        return new.sum()

    return w, learn


def test_a_check_of_replicas_takes_the_mark_away(on_group):
    """Of variables that are equal, until the next update; of others it raises, and the mark stays."""
    w, learn = learner()
    x = numbers(8, 3)
    for i in range(1, 4):
        learn(x)
        if on_group.size > 1:
            with pytest.raises(
                synk.errors.DivergedError, match=r"may hold different.*If they are equal.*check_replicas\(w\)"
            ):
                w.value
        synk.check_replicas(w)
        assert_close(w.value, i * x.mean(0))
    own = synk.shared(np.zeros(3, np.float32), name="own")

    def spoil(x):
        own.value = own.value + x.mean(0)

    synk.function(spoil)(x)
    if on_group.size > 1:
        for act in (lambda: synk.check_replicas(w, own), lambda: own.value):
            with pytest.raises(synk.errors.DivergedError):
                act()
    assert_close(w.value, 3 * x.mean(0))
