"""Ways: which of the variables that were there before a function comes to, whatever holds them, is asked at each call."""

import gc
import sys
import weakref
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import group_of

X = np.ones(6, np.float32)


@pytest.fixture(autouse=True)
def two():
    with group_of("devices", 2) as group:
        yield group


def shared(*values):
    return [synk.shared(np.float32(value), name=f"w{value}") for value in values]


def mean(fn):
    return synk.function(lambda x: jnp.mean(x * fn()), reduce="mean")


def plus(*variables):
    """What they add up to."""
    return sum(variable.value for variable in variables if variable is not None)


def test_places_that_come_to_hold_one():
    """A tuple that grows, what is attached and detached, an empty list, None in a list, and a layer with one more."""
    a, b = shared(2, 3)
    net = SimpleNamespace(pair=(a,), adapter=None, layers=[], slots=[a, None], layer=SimpleNamespace(w=a, bias=None))
    of_tuple, of_adapter = mean(lambda: plus(*net.pair)), mean(lambda: plus(a, net.adapter))
    of_list, of_slots = mean(lambda: plus(a, *net.layers)), mean(lambda: plus(*net.slots))
    of_layer = mean(lambda: plus(net.layer.w, net.layer.bias))
    every = (of_tuple, of_adapter, of_list, of_slots, of_layer)
    for _ in range(2):
        assert [float(f(X)) for f in every] == [2] * 5
    net.pair, net.adapter, net.layer = (*net.pair, b), b, SimpleNamespace(w=a, bias=b)
    net.layers.append(b)
    net.slots[1] = b
    for _ in range(2):
        assert [float(f(X)) for f in every] == [5] * 5
    net.adapter = None
    assert float(of_adapter(X)) == 2


def test_lines_of_what_is_reached(monkeypatch):
    """Parts of packages, functions that an object has, default arguments, properties and static methods."""
    a, b = shared(2, 3)
    package, part = ModuleType("package"), ModuleType("package.part")
    monkeypatch.setitem(sys.modules, "package", package)
    package.part, part.w = part, a  # type: ignore[attr-defined]
    exec("def scale():\n    return w.value", vars(part))
    net = SimpleNamespace(w=a)

    class Trainer:
        def __init__(self, loss):
            self.loss = loss

        def of_loss(self):
            return self.loss()

        @property
        def scale(self):
            return net.w.value

        @staticmethod
        def fixed():
            return net.w.value

    def of_default(net=net):
        return net.w.value

    trainer = Trainer(lambda: net.w.value)
    every = [
        mean(lambda: package.part.w.value), mean(lambda: package.part.scale()), mean(trainer.of_loss),  # type: ignore[attr-defined]
        mean(lambda: trainer.scale), mean(lambda: Trainer.fixed()), mean(lambda: of_default()),
    ]  # fmt: skip
    for value, w in [(2, a), (3, b), (2, a)]:
        part.w = net.w = w  # type: ignore[attr-defined]
        assert [float(f(X)) for f in every] == [value] * 6


def test_many_numbers_beside():
    """What is near is looked at first."""
    a, b = shared(2, 3)
    net = SimpleNamespace(table=[[float(i) for i in range(60)] for _ in range(60)], nested=[[[0] * 30] * 30] * 30, w=a)
    f = mean(lambda: net.w.value)
    assert float(f(X)) == 2
    net.w = b
    assert float(f(X)) == 3


def refuse(self, *args):
    raise OSError("it is not downloaded")


class Lazy(dict):
    """Does what it wants."""

    __getitem__: Any = refuse
    __len__: Any = refuse
    __iter__: Any = refuse
    items: Any = refuse
    values: Any = refuse
    get: Any = refuse


class Refuses:
    """Of an object that is not there."""

    __slots__ = ("__dict__", "__weakref__", "connection")

    def __getattribute__(self, name):
        raise RuntimeError("not connected")


def test_objects_do_as_they_like():
    """None of their code runs, and nothing is put into them."""
    a, b = shared(2, 3)
    gone = weakref.proxy(type("Gone", (), {})())
    net = SimpleNamespace(lazy=Lazy(x=1), refuses=Refuses(), gone=gone, w=a, made=defaultdict(lambda: a, {"b": b}))
    own: Any = lambda: 0  # noqa: E731
    own.__wrapped__ = net.own = own
    f = mean(lambda: net.w.value + 0 * len([net.lazy, net.refuses, net.gone, net.own]) + own())
    g = mean(lambda: plus(*net.made.values()))
    assert [float(f(X)), float(g(X))] == [2, 3]
    del net.made["b"]
    net.w = b
    assert [float(f(X)), float(g(X)), dict(net.made)] == [3, 0, {}]


def test_what_changes_beside_compiles_nothing():
    """Numbers in the same dictionary, a pool that is turned, and heads that are made one after the other."""
    a, b, c = shared(2, 3, 4)
    state, net, traced = {"w": a}, SimpleNamespace(pool=[a, b, c], current=a), []
    f = mean(lambda: (traced.append(None), state["w"].value)[1])
    g = mean(lambda: net.current.value)
    heads = {}
    h = synk.function(lambda x, task: jnp.mean(x * heads[task].value), reduce="mean", inputs={"task": "static"})
    f(X), g(X)
    counts, traces = (f.stats.compilations, g.stats.compilations), len(traced)
    for i in range(3):
        state[f"loss {i}"] = 0.5
        net.pool.append(net.pool.pop(0))
        assert [float(f(X)), float(g(X))] == [2, 2]
    assert (f.stats.compilations, g.stats.compilations, len(traced)) == (*counts, traces)
    for made in range(4):
        heads[made] = synk.shared(np.float32(made))
        for task in range(made, -1, -1):
            assert float(h(X, task=task)) == task
        assert h.stats.compilations == made + 1


def test_an_object_is_not_kept():
    """A name that has let go of it lets it go."""
    (a,) = shared(2)

    class Net:
        def __init__(self):
            self.w = a

        def scale(self):
            return self.w.value

    net = Net()
    f = mean(lambda: net.scale() if net is not None else 1)
    assert float(f(X)) == 2
    gone, net = weakref.ref(net), None
    gc.collect()
    assert gone() is None
    assert float(f(X)) == 1


def test_another_program_over_the_same_variables():
    """In slices and in `over` too: what is compiled goes by what is computed."""
    (a,) = shared(2)
    net = SimpleNamespace(scale=lambda: a.value)
    f = mean(lambda: net.scale())

    def all_ways():
        return [float(f(X)), float(f(X, num_slices=2)), float(f.over(X, batches=[4, 2])), float(f(X[:5], num_slices=2))]

    assert all_ways() == [2] * 4
    inner, net.scale = net.scale, lambda: 10 * inner()
    new = shared(0)  # so that it is traced once more
    assert all_ways() == [20] * 4 and len(new) == 1
