"""Names: whether a function's own names still have the objects that they had."""

import gc
from functools import partial, wraps
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._tracing.names import Names

found = None


class Thing:
    pass


def reads_globals():
    return [found for _ in range(1)], len


def over(value):
    """Make a function with one cell, and one that sets it or, without a value, empties it."""

    def put(*new):
        nonlocal value
        if new:
            (value,) = new
        else:
            del value

    return lambda: value, put


@pytest.mark.parametrize("old", [Thing(), 3.5, None, [1], ref(Thing), "text"], ids=lambda old: type(old).__name__)
@pytest.mark.parametrize("new", [Thing(), 7.5, None, [1]], ids=lambda new: type(new).__name__)
def test_another_object(monkeypatch, old, new):
    """It counts whether it is the same object, not whether it is equal; what comes back is the same again."""
    cell, put = over(old)
    monkeypatch.setitem(globals(), "found", old)
    for change in (put, lambda value: monkeypatch.setitem(globals(), "found", value)):
        names = Names([reads_globals, cell])
        assert names.are_same()
        change(new)
        assert names.are_same() == (old is new)
        change(old)
        assert names.are_same()


def test_names_that_are_gone(monkeypatch):
    """An empty cell and a global that is not there are places without an object; so is a built-in, until it is shadowed."""
    thing = Thing()
    cell, put = over(thing)
    names = Names([reads_globals, cell])
    put()
    assert not names.are_same()
    names = Names([reads_globals, cell])
    assert names.are_same()
    put(Thing())
    assert not names.are_same()
    put()
    monkeypatch.setitem(globals(), "len", lambda value: 0)
    assert not names.are_same()
    monkeypatch.undo()
    assert names.are_same()
    monkeypatch.delitem(globals(), "found")
    assert names.are_same()


def test_nothing_is_kept_alive():
    """An object that is gone is no longer there, although its place has None now; numbers are kept, and few bytes."""
    thing = Thing()
    weak = ref(thing)
    cell, put = over(thing)
    names = Names([cell])
    put(None)
    del thing
    gc.collect()
    assert weak() is None and not names.are_same()


def test_functions_inside_and_behind():
    """Names of functions inside of one, and of what a wrapper calls, are looked at too."""
    inner, put = over(Thing())

    def outer():
        return (lambda: found)(), inner

    @wraps(inner)
    def wrapper():
        return None

    names, wrapped = Names([outer]), Names([wrapper])
    put(Thing())
    assert names.are_same() and not wrapped.are_same()
    globals()["found"] = names
    try:
        assert not names.are_same()
    finally:
        globals()["found"] = None
    assert Names([len, None]).are_same()


FACTOR = 1.0


class Model:
    def __call__(self, x):
        return (x * FACTOR).sum()


class Jitted:
    @partial(jax.jit, static_argnums=0)
    def __call__(self, x):
        return (x * FACTOR).sum()


@pytest.mark.parametrize("make", [
    lambda: synk.function(Model()), lambda: synk.function(Model().__call__), lambda: synk.function(partial(Model())),
    lambda: synk.function(jax.jit(Model())), lambda: synk.function(Jitted()), lambda: synk.map(Model(), outputs="sum"),
], ids=["object", "method", "partial", "jit", "jitted call", "map"])  # fmt: skip
def test_objects_that_are_called(four, monkeypatch, make):
    """The global names of `__call__` are those of the object."""
    f, x = make(), np.ones(8, np.float32)
    assert f(x) == 8
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert f(x) == 24


def test_ops_and_logs_follow_their_names(four):
    """They are functions of the user's too."""
    by, factor = 0.5, 1.0
    f = synk.function(lambda x: x.sum(), reduce=lambda parts: jnp.quantile(parts, by))
    step = synk.train.step(
        lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1), log=lambda grads, updates, params: factor
    )
    x = np.arange(8, dtype=np.float32)
    parts = x.reshape(4, 2).sum(1)
    for by, factor in ((0.5, 1.0), (1.0, 2.0)):
        assert f(x) == np.quantile(parts, by)
        assert step(x)[1] == factor
    assert f.stats.compilations <= 2


@pytest.mark.parametrize("make", [float, lambda value: np.full(2, value / 2.0)], ids=["number", "array"])
def test_a_number_that_changes_in_each_call(four, make):
    """The third program for another value of a captured number or array gives a warning, once, which names it."""
    x = np.arange(4.0)
    f = synk.function(lambda x: (x * np.sum(beta)).sum(), name="f")
    for value in range(2):
        beta = make(value)
        f(x), f(x)
    beta = make(2)
    with pytest.warns(UserWarning, match="f: it compiles for the third time since the value of 'beta' has changed"):
        f(x)
    beta = make(3)
    assert f(x) == 18
