"""Histories: what earlier calls left behind changes no later call, and what fails leaves nothing half done."""

import dataclasses
import gc
import random
import threading
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import synk
import synk.train

from . import harness
from .helpers import (
    assert_close,
    assert_same,
    group_of,
    numbers,
    slow,
    values,
)

# Histories give other numbers to names on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*it compiles for the third time")

X = numbers(8)
W = np.array([0.5, -1.0], np.float32)


# Traces after calls.

TRANSFORMED = {
    "grad": lambda f, x: jax.grad(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x + 1])),
    "checkpoint": lambda f, x: jax.grad(jax.checkpoint(f))(x),
    "eval_shape": lambda f, x: np.zeros(jax.eval_shape(f, x).shape),
    "make_jaxpr": lambda f, x: [np.zeros(aval.shape) for aval in jax.make_jaxpr(f)(x).out_avals],
    "scan": lambda f, x: lax.scan(lambda sum_, x: (sum_ + f(x), f(x)), jnp.float32(0), jnp.stack([x, x + 1])),
    "grad of closed over": lambda f, x: jax.grad(lambda scale: f(scale * x))(jnp.float32(2)),
}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "rows"), [*[(name, 7) for name in TRANSFORMED], *[slow(n, 6) for n in [*TRANSFORMED][::2]]]
)
def test_transformations_after_a_call(group, name, rows):
    """A function composes whether it was called before or not."""
    x, transformed = jnp.asarray(numbers(rows)), TRANSFORMED[name]
    f = synk.function(lambda x: (x**2).sum())
    f(x)
    assert_close(transformed(f, x), jax.tree.map(np.asarray, transformed(f.fn, x)))


@pytest.mark.smoke
def test_calls_after_transformations(group):
    """A trace leaves nothing behind: the next call gives the bits of a fresh function's."""
    f, g = [synk.function(lambda x: jnp.tanh(x @ W).mean(), reduce="mean") for _ in range(2)]
    for transform in (jax.grad(f), jax.jit(f), jax.checkpoint(f)):
        transform(X)
    assert_same(f(X), g(X))


def test_a_traced_keyword_after_a_call(group):
    """A number that is traced may stand where a number stood."""
    f = synk.function(lambda x, scale: (x * scale).sum(), ["x"])
    f(X, scale=2.0)
    assert_close(jax.grad(lambda scale: f(X, scale=scale))(2.0), X.sum())


# Keys that hold all that a program depends on.


@pytest.mark.parametrize("slices", [1, 2])
def test_lengths_of_unsliced_outputs(group, slices):
    """Outputs that grow with the parts: programs of 8 rows in slices do not serve 16."""
    f = synk.function(lambda x: jnp.concatenate([x, -x]), reduce="max")
    for rows, slices_ in ((8, slices), (16, 2), (8, 1), (16, slices)):
        x = numbers(rows, 3)
        parts = np.array_split(x, 2 * slices_)
        assert_close(f(x, num_slices=slices_), np.max([np.concatenate([part, -part]) for part in parts], 0))


@pytest.mark.parametrize("slices", [1, 2])
def test_another_variable_at_another_length(group, slices):
    """A function that writes one variable over few rows and another over many: each call updates its own."""
    few, many = [synk.shared(np.float32(0), name=name) for name in ("few", "many")]

    @synk.function
    def f(x):
        variable = many if len(x) > 2 else few
        variable.update(variable.value + x.sum(), slices="add")

    for count in (2, 4, 2, 4, 4, 2):
        f(np.ones(count * slices * synk.size(), np.float32), num_slices=slices)
    assert_close(values(few, many), [[6 * slices] * synk.size(), [12 * slices] * synk.size()])


# Compilations.

CALLS = [(8, 1), (7, 1), (9, 1), (7, 3)]


def compilations(f, rows, slices, calls=3):
    """How many programs there were after each call."""
    counts = []
    for _ in range(calls):
        f(numbers(rows), num_slices=slices)
        counts.append(f.stats.compilations)
    return counts


@pytest.mark.parametrize(("rows", "slices"), CALLS)
def test_a_variable_met_in_then_alone(group, rows, slices):
    """The second call compiles nothing, dividing rows or not, sliced or not."""
    total = synk.shared(np.float32(0))
    f = synk.function(lambda x: x.sum(), then=lambda part: setattr(total, "value", total.value + part))
    counts = compilations(f, rows, slices)
    assert counts == counts[:1] * 3


def square(w, x):
    return ((w - x) ** 2).mean()


@pytest.mark.parametrize(("rows", "slices"), CALLS)
def test_a_training_step_compiles_once(group, rows, slices):
    """The second step compiles nothing."""
    step = synk.train.step(square, np.float32(1), optax.sgd(0.1))
    compiled = []
    for _ in range(3):
        step(numbers(rows), num_slices=slices)
        compiled.append(step.function.stats.compilations)
    assert compiled == compiled[:1] * 3


def test_totals_share_a_program():
    """Rows that do not divide, with equal longest parts, run one program."""
    with group_of("devices", 4):
        f = synk.function(lambda x: x.sum(0))
        counts = [(f(numbers(rows)), f.stats.compilations)[1] for rows in (65, 66, 67, 65)]
    assert counts == [1] * 4


# What JAX is asked for, and what is kept.


@pytest.mark.smoke
def test_rank_promotion_after_a_call(group):
    """Under `numpy_rank_promotion("raise")` a call raises as JAX does, whatever was called before."""
    f = synk.function(lambda x, w: x + w, ["x"], "concat")
    with jax.numpy_rank_promotion("allow"):
        f(X, W)
    with pytest.raises(ValueError, match="jax_numpy_rank_promotion='raise'"):
        f(X, W)
    with jax.numpy_rank_promotion("allow"):
        assert_close(f(X, W), X + W)


@pytest.mark.smoke
def test_dtype_promotion_after_a_call(group):
    """And under `numpy_dtype_promotion("strict")`."""
    f = synk.function(lambda x, w: (x * w).sum(), ["x"])
    with jax.numpy_dtype_promotion("standard"):
        f(X, np.int32(2))
    with pytest.raises(ValueError, match="jax_numpy_dtype_promotion=strict"):
        f(X, np.int32(2))


@pytest.mark.smoke
@pytest.mark.parametrize("make", [synk.init, slow(synk.simulate)])
def test_a_closed_group_is_forgotten(make):
    """A function that lives on keeps no group alive, nor what was compiled for it."""
    f, group = synk.function(lambda x: x.sum()), make(2)
    for rows, slices in ((8, 1), (7, 1), (8, 2)):
        f(numbers(rows), num_slices=slices)
    closed = weakref.ref(group)
    synk.close()
    del group
    gc.collect()
    assert closed() is None
    assert float(f(X)) == X.sum()


def by_closure(w):
    f = synk.function(lambda x: (x * w.value).sum())

    def again(value):
        nonlocal w
        w = synk.shared(value)

    return f, again


def by_helper(w):
    names = {"w": w, "synk": synk}
    exec("def scaled(x):\n    return x * w.value\ndef f(x):\n    return scaled(x).sum()", names)
    return synk.function(names["f"]), lambda value: names.update(w=synk.shared(value))


def by_attribute(w):
    class Model:
        def __init__(self):
            self.state = Inner()
            self.state.w = w
            self.total = synk.function(self._total)

        def _total(self, x):
            return (x * self.scale()).sum()

        def scale(self):
            return self.state.w.value

    class Inner:
        pass

    model = Model()
    return model.total, lambda value: setattr(model.state, "w", synk.shared(value))


def by_then(w):
    f = synk.function(lambda x: x.sum(), then=lambda total: total * w.value)

    def again(value):
        nonlocal w
        w = synk.shared(value)

    return f, again


def by_what_names_do_not_show(w):
    """A partial, a compiled helper, an object deep in others, with slots, and a table."""

    class Slots:
        __slots__ = ("w",)

    holder = Slots()
    holder.w = w
    table = {"deep": {"holder": [holder]}}
    helper = jax.jit(lambda x: x * table["deep"]["holder"][0].w.value)
    f = synk.function(partial(lambda scale, x: scale(x).sum(), helper))
    return f, lambda value: setattr(holder, "w", synk.shared(value))


@pytest.mark.parametrize("make", [by_closure, by_helper, by_attribute, by_then, by_what_names_do_not_show])
@pytest.mark.parametrize("slices", [1, slow(2)])
def test_a_name_that_is_given_to_another_variable(group, make, slices):
    """As where a cell of a notebook is run again: the next call, of a kind seen before, reads the new one, and keeps
    nothing of the old one."""
    old = synk.shared(np.float32(1))
    f, again = make(old)
    for _ in range(2):
        assert f(X, num_slices=slices) == X.sum() and f(X[:7], num_slices=slices) == X[:7].sum()
    gone, old = weakref.ref(old), None
    again(np.float32(3))
    for _ in range(2):
        for run in (partial(f, num_slices=slices), f.serial):
            assert run(X) == 3 * X.sum() and run(X[:7]) == 3 * X[:7].sum()
        f.check(X, num_slices=slices)
        assert list(f.iterate(X, batches=[7, 8], num_slices=slices)) == [3 * X[:7].sum(), 3 * X.sum()]
    assert f.shared != () and gone() not in f.shared
    count = f.stats.compilations
    again(np.float32(5))
    with pytest.raises(IndexError):
        f(X, batch=[99], num_slices=slices)
    assert f(X, num_slices=slices) == 5 * X.sum() and f.stats.compilations > count


class Holder:
    """Holds variables in every way that objects have."""

    __slots__ = ("__dict__", "slot")
    of_the_class: Any = None

    def __init__(self, w):
        self.put(w)

    def put(self, w):
        self.slot = self.attribute = type(self).of_the_class = w
        self.deep = SimpleNamespace(deeper=SimpleNamespace(w=w))
        self.items, self.table = [w], {"layers": ({"w": w},)}

    def __call__(self, x):
        return x * self.attribute.value

    def of_a_method(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * self.deep.deeper.w.value


KINDS_OF_HOLDING = {
    "callable": lambda holder: holder,
    "method": lambda holder: holder.of_a_method,
    "method of a name": lambda holder: lambda x: holder.of_a_method(x),
    "slot": lambda holder: lambda x: x * holder.slot.value,
    "class": lambda holder: lambda x: x * Holder.of_the_class.value,
    "list": lambda holder: lambda x: x * holder.items[0].value,
    "table": lambda holder: lambda x: x * holder.table["layers"][0]["w"].value,
    "partial": lambda holder: partial(lambda holder, x: x * holder.attribute.value, holder),
    "jit": lambda holder: jax.jit(partial(lambda holder, x: x * holder.attribute.value, holder)),
    "deeper helpers": lambda holder: helped(helped(helped(helped(lambda x: x * holder.attribute.value)))),
    "inner lambda": lambda holder: lambda x: sum((lambda: x * holder.attribute.value)() for _ in range(1)),
}


def helped(fn):
    return lambda x: fn(x)


@pytest.mark.smoke
@pytest.mark.parametrize("how", KINDS_OF_HOLDING)
def test_what_a_function_captures_is_fixed_when_it_is_traced(group, how):
    """Calls go on with it, the serial run has it as it is now, and check says so and blames no op; until another
    variable is made, which has every function look again."""
    one, hundred = synk.shared(np.float32(1)), synk.shared(np.float32(100))
    holder = Holder(one)
    f = synk.function(KINDS_OF_HOLDING[how](holder), reduce="concat")
    for _ in range(2):
        np.testing.assert_array_equal(f(X), X)
    f.check(X)
    holder.put(hundred)
    for _ in range(2):
        np.testing.assert_array_equal(f(X), X)
        np.testing.assert_array_equal(f.serial(X), 100 * X)
        with pytest.raises(synk.LawError, match="something that it reads from outside has changed") as caught:
            f.check(X)
        assert "matched" not in str(caught.value)
    made = synk.shared(np.float32(7))
    np.testing.assert_array_equal(f(X), 100 * X)
    f.check(X)
    assert made not in f.shared


def numbers_by_names():
    """What changes under a function's own names, how, and what it gives then."""
    scale, table, which = 2.0, np.ones(8, np.float32), [synk.shared(np.float32(1)), synk.shared(np.float32(100))]
    w = which[0]

    def helper(x):
        return x

    def change(number):
        nonlocal scale, table, w, helper
        scale, table, w = 2.0 * number, np.full(8, number, np.float32), which[number - 1]

        def helper(x):
            return x * number

    return {
        "number": lambda x: x * scale / 2,
        "array": lambda x: x * jnp.take(jnp.asarray(table), jnp.int32(3)),
        "variable": lambda x: x * jnp.where(w.value > 1, 2, w.value),
        "function": lambda x: helper(x),
        "partial": partial(lambda number, x: x * number() / 2, lambda: scale),
    }, change


@pytest.mark.smoke
@pytest.mark.parametrize("what", ["number", "array", "variable", "function"])
@pytest.mark.parametrize("slices", [1, slow(2)])
def test_another_object_under_a_name_of_its_own(group, what, slices):
    """It is seen at the next call, also in slices; and back again."""
    functions, change = numbers_by_names()
    f = synk.function(functions[what], reduce="concat")
    for number in (1, 2, 2, 1, 2):
        change(number)
        for rows in (7, 16):
            np.testing.assert_array_equal(f(X[:rows], num_slices=slices), number * X[:rows])
        f.check(X, num_slices=slices)
    count = f.stats.compilations
    change(2)
    f(X, num_slices=slices)
    assert f.stats.compilations == count  # an equal program


@pytest.mark.smoke
def test_a_function_that_counts_its_traces(group):
    """Under a name of its own, as one does with jax.jit: calls of a kind seen before trace nothing."""
    traces = 0

    def count(x):
        nonlocal traces
        traces += 1
        return x.sum()

    f = synk.function(count)
    f(X)
    before = traces  # one for each number of rows that replicas have
    for _ in range(2):
        f(X)
    assert traces == before


@pytest.mark.smoke
def test_what_is_done_to_a_number_deeper_down_is_told_by_check(group):
    """As any mutable object that a function reads."""
    settings = {"scale": 1.0}
    f = synk.function(lambda x: jnp.mean(x * settings["scale"]), reduce="mean")
    f.check(X)
    assert float(f(X)) == pytest.approx(X.mean())
    settings["scale"] = 3.0
    assert float(f(X)) == pytest.approx(X.mean()) and float(f.serial(X)) == pytest.approx(3 * X.mean())
    with pytest.raises(synk.LawError, match="reads from outside has changed since it was traced"):
        f.check(X)
    with pytest.raises(synk.LawError, match="reads from outside has changed since it was traced"):
        f.check(X, num_slices=2) if f(X, num_slices=2) is None else f.check(X)
    settings["scale"] = 1.0
    f.check(X)


@pytest.mark.slow
def test_variables_come_in_one_order():
    """In every process, however it hashes names: programs of a group are compared."""
    code = """if True:
        import numpy as np, synk
        a, b, c, d, e = [synk.shared(np.float32(1), name=n) for n in "abcde"]
        def helper(x): return x * d.value * e.value
        f = synk.function(lambda x: (helper(x) * c.value * a.value * b.value).sum())
        f(np.ones(2))
        print([each.name for each in f.shared])
        """
    said = [harness.python(code, PYTHONHASHSEED=seed).stdout for seed in "123"]
    assert said == ["['d', 'e', 'c', 'a', 'b']\n"] * 3


def test_roles_that_change_where_no_name_tells(group):
    """Variables were made since, so it is traced once more: the same ones in another order are another program."""
    roles = {n: synk.shared(np.float32(n)) for n in range(100)}  # more than are looked into
    f = synk.function(lambda x: x.mean() * roles[7].value + 2 * roles[3].value, reduce="mean")
    ones = np.ones(7, np.float32)
    assert float(f(ones)) == pytest.approx(13)
    roles[3], roles[7] = roles[7], roles[3]
    new = synk.shared(np.float32(0))
    assert float(f(ones)) == pytest.approx(17) and new is not None


@pytest.mark.parametrize("slices", [slow(1), 2])
def test_another_object_takes_over_the_variable(group, slices):
    """Wrapped once more, it is what it is now, for every kind of call."""

    class Net:
        def __init__(self, w):
            self.w = w

        def __call__(self, x):
            return x * self.w.value

    class Scaled:
        def __init__(self, net):
            self.net = net

        def __call__(self, x):
            return 10 * self.net(x)

    net = Net(synk.shared(np.float32(2)))
    f = synk.function(lambda x: net(x).sum())
    for factor in (2, 20, 200):
        for _ in range(2):
            assert f(X, num_slices=slices) == f.serial(X) == factor * X.sum()
            assert f.over(X, batches=[7, 8], num_slices=slices) == factor * (X.sum() + X[:7].sum())
        net = Scaled(net)


def test_no_variable_takes_the_place_of_another_between_batches(group):
    """All batches of one answer have the same."""
    w = synk.shared(np.float32(1), name="w")
    f = synk.function(lambda x: (x * w.value).sum(), name="f")

    def batches():
        nonlocal w
        yield 7
        w = synk.shared(np.float32(2), name="new")
        yield 8

    with pytest.raises(synk.SynkError, match=r"f\.over: new came in place of another variable"):
        f.over(X, batches=batches(), prefetch=0)
    assert f.over(X, batches=[7, 8]) == 2 * (X.sum() + X[:7].sum())


@pytest.mark.parametrize("options", [slow({"num_slices": 2}), {"batches": [7, 8]}, {}], ids=str)
def test_variables_that_have_lost_their_places_go(group, options):
    """However often, and with other rows each time, none of them is kept."""
    w, gone = None, []
    f = synk.function(lambda x: (x * w.value).sum())
    run = f.over if "batches" in options else f
    for rows in range(4, 9):
        w = synk.shared(np.float32(1))
        gone.append(weakref.ref(w))
        run(X[:rows] if len(options) == 0 else X, **options)
    synk.close()
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 4 + [False] and f.shared == (w,)


def test_a_variable_that_is_made_compiles_nothing(group):
    """Functions look again which ones they use, by a trace alone."""
    w, traces = synk.shared(np.float32(1)), []
    f = synk.function(lambda x: (traces.append(None), (x * w.value).sum())[1])
    f(X)
    count, before = f.stats.compilations, len(traces)
    other = synk.shared(np.float32(5))
    for _ in range(2):
        f(X)
        assert (f.stats.compilations, len(traces) - before) == (count, before)
    del other


def test_a_variable_that_is_gone_has_nobodys_place(group):
    """Functions do not look again for its sake, and find one that was made before it."""
    w, traces = [synk.shared(np.float32(1))], []
    f = synk.function(lambda x: (traces.append(None), (x * w[0].value).sum())[1])
    f(X)
    before = len(traces)
    for _ in range(3):
        synk.shared(np.float32(5))
        assert f(X) == X.sum() and len(traces) == before
    w[0] = synk.shared(np.float32(2))
    synk.shared(np.float32(5))
    assert f(X) == 2 * X.sum() and len(traces) > before


@pytest.mark.parametrize("end", [synk.close, lambda: None], ids=["closed", "going on"])
def test_variables_that_have_left_a_container_go(group, end):
    """Fold by fold, each with other rows: none but the last one's is kept."""
    model, gone = [], []
    f = synk.function(lambda x: (x * model[0].value).sum())
    for rows in range(4, 9):
        model[:] = [synk.shared(np.float32(rows))]
        gone.append(weakref.ref(model[0]))
        for _ in range(2):
            assert f(X[:rows]) == f(X[:rows], num_slices=2) == rows * X[:rows].sum()
    end()
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 4 + [False] and f.shared == tuple(model)


@pytest.mark.parametrize("keeps", [True, False])
def test_variables_in_a_container_go_with_their_group(keeps):
    """What nobody else has is in no function either."""
    model = []
    f = synk.function(lambda x: (x * model[0].value).sum())
    with synk.simulate(2):
        model.append(synk.shared(np.float32(2)))
        assert f(X) == 2 * X.sum()
    gone, kept = weakref.ref(model[0]), model[0] if keeps else None
    model.clear()
    gc.collect()
    assert (gone() is None, f.shared) == ((False, (kept,)) if keeps else (True, ()))


def test_kinds_of_calls_that_touch_variables_of_their_own(group):
    """Made one after the other, each is compiled twice at most."""
    models = []
    f = synk.function(lambda x: (x * models[x.shape[1] - 1].value).sum())
    for number in range(4):
        models.append(synk.shared(np.float32(number)))
        for each in range(number + 1):
            x = np.ones((8, each + 1), np.float32)
            assert f(x) == 8 * each * (each + 1)
    count = f.stats.compilations
    for each in range(4):
        assert f(np.ones((8, each + 1), np.float32)) == 8 * each * (each + 1)
    assert f.stats.compilations == count


def test_a_first_variable_in_a_container(group):
    """A function that had none has it from the next call on."""
    layers = []
    f = synk.function(lambda x: x.mean() + sum(w.value for w in layers), reduce="mean")
    x = np.ones(7, np.float32)
    for number in range(3):
        assert [float(f(x)), float(f.serial(x))] == pytest.approx([1 + 10 * number] * 2)
        layers.append(synk.shared(np.float32(10)))


@pytest.mark.parametrize("make", [synk.train.step, partial(synk.contrib.local_steps, every=1)])
def test_a_name_of_the_loss_that_is_given_to_another_variable(group, make):
    """The next step takes that one, which was there before."""
    teacher = one = synk.shared(np.float32(1))
    hundred = synk.shared(np.float32(100))
    step = make(lambda p, x: (x * teacher.value).mean() + 0 * p, np.float32(0), optax.sgd(0.1))
    x = np.ones(6, np.float32)
    for teacher, want in [(one, 1), (hundred, 100), (one, 1)]:  # noqa: B007, the loss names it
        for _ in range(2):
            assert float(step(x)) == pytest.approx(want)


def test_variables_that_a_shape_decides_on(group):
    """A program is for one state of its variables, and keeps its place while they are in another."""
    window, bias = synk.shared(np.ones(3, np.float32)), synk.shared(np.float32(10))
    f = synk.function(
        lambda x: x.mean() * window.value.sum() + (bias.value if len(window.value) > 3 else 0), reduce="mean"
    )
    x, counts = np.ones(6, np.float32), []
    for n in (3, 5) * 3:
        window.set_value(np.ones(n, np.float32))
        assert float(f(x)) == pytest.approx(3 if n == 3 else 15)
        counts.append(f.stats.compilations)
    assert len(set(counts[1:])) == 1


def test_an_update_goes_to_the_variable_of_that_name(group):
    """It trains the new one, and the old one stays as it was."""
    w = old = synk.shared(np.float32(0))
    step = synk.function(lambda x: x.mean(), reduce="mean", then=lambda m: setattr(w, "value", w.value + m))
    x = np.ones(7, np.float32)
    for _ in range(2):
        step(x)
    w = synk.shared(np.float32(10))
    for _ in range(2):
        step(x)
    assert (float(old.value), float(w.value), step.shared) == (2, 12, (w,))
    w = old
    step(x)
    assert float(old.value) == 3


def test_a_function_is_forgotten(group):
    """A group that lives on keeps no function alive, nor its variables."""
    total = synk.shared(np.float32(0))
    f = synk.function(lambda x: x.sum(), then=lambda part: setattr(total, "value", total.value + part))
    f(X)
    gone = [weakref.ref(f), weakref.ref(total)]
    f = total = None
    synk.close()  # which waits for what is under way
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_model_is_forgotten(group):
    """Whose methods are its functions, in whatever way they were called."""

    class Model:
        def __init__(self):
            self.table = jnp.ones(3)
            self.total = synk.function(self._total)

        def _total(self, x):
            return (x * self.table.sum()).sum()

    def used():
        model = Model()
        model.total(X, num_slices=2)
        model.total.over(X, batches=[slice(0, 3), slice(3, 8)])
        jax.grad(model.total)(X)
        jax.jit(lambda x: model.total(x))(X)
        return weakref.ref(model)

    gone = [used(), used()]
    jax.clear_caches()
    gc.collect()
    assert [model() for model in gone] == [None, None]


# Bits.


@pytest.mark.parametrize("rows", [7, 11, 14])
def test_bits_do_not_depend_on_other_splits(group, rows):
    """Uneven calls of other lengths leave the bits of this one as they are."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(5, 4)).astype(np.float32)
    warm, fresh = [synk.function(lambda x: jnp.tanh(x @ weights).mean(0), reduce="mean") for _ in range(2)]
    for other in (5, 8, 10, 11, 13):
        warm(rng.normal(size=(other, 5)).astype(np.float32))
    x = rng.normal(size=(rows, 5)).astype(np.float32)
    assert_same(warm(x), fresh(x))


def made(kind, loss, optimizer):
    """A training step; a local one that averages never."""
    options = {"every": 10**9} if kind == "local_steps" else {}
    return getattr(synk.train, kind)(loss, np.float32(0), optimizer, **options)


# What is used stays cached, and what a trace captured stays fixed.


class Model:
    @synk.function
    def loss(self, x):
        return x.sum()


def test_what_is_used_stays_cached():
    """Of many static values those that each call has compile once."""
    with group_of("devices", 1):
        f = synk.function(lambda x, k: x.sum() + k, inputs={"k": "static"})
        f.fn(np.ones(2), 0)
        binder = f._binder
        spec = binder.bind((np.ones(2), 0), {}).spec
        for k in range(1, 3000):
            binder.bind((np.ones(2), k), {})
            assert binder.bind((np.ones(2), 0), {}).spec is spec
        assert len(binder._specs._kept) <= 1024


def test_a_traced_call_holds_the_rows_it_picks():
    """And no others of what lies on the host."""
    x = np.arange(40_000, dtype=np.float32).reshape(-1, 4)
    with group_of("devices", 2):
        f = synk.function(lambda x: x.sum(0))
        jaxpr = jax.make_jaxpr(lambda s: s * f(x, batch=[3, 1, 5, 5]))(2.0)
        assert sum(np.size(each) for each in jaxpr.consts) <= 64
        assert jax.jit(lambda s: s * f(x, batch=slice(2, 5)))(2.0).tolist() == (2 * x[2:5].sum(0)).tolist()


def test_compiling_is_dispatching():
    """And no time of choosing rows."""
    with group_of("devices", 2):
        f = synk.function(lambda x: time.sleep(0.2) or x.sum())  # as it is traced
        f(np.ones(8, np.float32))
        assert f.stats.dispatching >= 0.2 > f.stats.selecting


@pytest.mark.slow
def test_static_values_are_looked_up_by_their_hash():
    """Values that cannot be compared are never compared where their hashes differ; 1, True and 1.0 are three."""

    class Config:
        def __init__(self, value):
            self.value = value

        def __hash__(self):
            return hash(self.value)

        def __eq__(self, other):
            if self.value != other.value:
                raise AssertionError("compared")
            return True

    with group_of("devices", 1):
        f = synk.function(lambda x, how: x.sum() + jnp.float32(getattr(how, "value", how)), inputs={"how": "static"})
        x = np.ones(4, np.float32)
        for i in (*range(40), *range(40)):
            assert float(f(x, Config(i))) == float(f(x, how=Config(i))) == 4 + i
        assert f.stats.compilations == 80  # by position and by keyword are two trees
        for how in (1, True, 1.0):
            f(x, how)
        assert f.stats.compilations == 83


def test_threads_with_many_static_values():
    """Whose comparisons let the other threads in, as old ones are let go."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        value: int

    binder = synk.function(lambda x, how: x, inputs={"how": "static"})._binder
    wrong = []

    def bind(seed):
        rng = random.Random(seed)
        try:
            for _ in range(3000):
                i = rng.randrange(1500)
                if binder.bind((1.0, Config(i)), {}).spec.statics["how"].value != i:
                    wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=bind, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.smoke
def test_what_equations_do_not_show_tells_programs_apart(group):
    """Numbers of NumPy's among their parameters, callbacks, and which constant is used where."""
    pad, power, host = np.int64(0), np.int64(1), [lambda v: np.asarray(v * 2), lambda v: np.asarray(v * 3)]
    one, ten = np.ones(3, np.float32), np.full(3, 10, np.float32)
    call, third = host[0], one
    x = np.arange(1, 8, dtype=np.float32)

    def padded(x):
        return jnp.sum(x) * 0 + jnp.sum(jnp.pad(jnp.float32([5, 6]), (pad, 2 - pad))[0]) * x.shape[0]

    def raised(x):
        return jnp.sum(lax.integer_pow(x, power))

    def called(x):
        return jnp.sum(jax.pure_callback(call, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"))

    def inner(x):
        parts = jax.jit(lambda t: t[:, None] + one[None])(x) + jax.jit(lambda t: t[:, None] * ten[None])(x)
        return jnp.sum(parts - jax.jit(lambda t: t[:, None] - third[None])(x))

    for fn in (padded, raised, called, inner):
        f = synk.function(fn)
        for _ in range(2):
            for number in (0, 1):
                pad, power, call = np.int64(number), np.int64(number + 1), host[number]
                third = (one, ten)[number]
                np.testing.assert_allclose(f(x), fn(x), rtol=1e-6)
                np.testing.assert_allclose(f.serial(x), fn(x), rtol=1e-6)
                np.testing.assert_allclose(f(x, num_slices=2), fn(x), rtol=1e-6)
                f.check(x)


@pytest.mark.smoke
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_serial_run_leaves_calls_as_they_are(replicas):
    """Also on one replica, where both would run one program."""
    with synk.simulate(replicas):
        box = {"k": 2.0}
        f = synk.function(lambda x: jnp.sum(x) * box["k"])
        assert float(f.serial(X)) == float(f(X)) == float(2 * X.sum())
        f.check(X)
        box["k"] = 3.0
        assert float(f.serial(X)) == pytest.approx(3 * X.sum()) and float(f(X)) == pytest.approx(2 * X.sum())
        box["k"] = 2.0
        f.check(X)
        assert float(f.serial(X)) == float(f(X)) == pytest.approx(2 * X.sum())


@pytest.mark.parametrize("kind", [("simulated", 1), slow(("devices", 1)), slow(("devices", 3))], ids=str)
def test_serial_runs_have_plans_of_their_own(kind):
    """Calls neither take nor lose one; a call that traces the same as a serial run on its devices compiles nothing."""
    with group_of(*kind) as group:
        box = {"k": 2.0}
        f = synk.function(lambda x: jnp.sum(x) * box["k"], donate=False)
        for k in (2.0, 3.0, 3.0):
            box["k"] = k
            assert (float(f.serial(X)), float(f(X))) == pytest.approx((k * X.sum(), 2 * X.sum()))
            counts = f.stats.compilations
        assert counts == 2 + (group.size > 1)
        made = synk.shared(np.float32(0))
        assert float(f(X)) == float(f.serial(X)) == pytest.approx(3 * X.sum()) and made is not None
        assert f.stats.compilations == counts + (group.size > 1)


def test_variables_that_were_arguments_go(group):
    """Those of serial runs and checks too."""
    f, gone = synk.function(lambda x, w: jnp.sum(x) * w.value[0]), []
    for _ in range(4):
        w = synk.shared(np.ones(100, np.float32))
        f(X, w), f.serial(X, w), f.check(X, w)
        gone.append(weakref.ref(w))
    w = None
    gc.collect()
    assert sum(each() is not None for each in gone) <= 1


def test_a_captured_array_that_is_changed_in_place(group):
    """It is as it was traced, under a new jit too."""
    table = np.ones(3, np.float32)
    f = synk.function(lambda x: jnp.sum(x) * jnp.asarray(table).sum())
    wanted = float(f(X))
    assert float(jax.jit(lambda x: f(x))(X)) == pytest.approx(wanted)
    table *= 2
    assert float(f(X)) == float(jax.jit(lambda x: f(x) * 1)(X)) == pytest.approx(wanted)


@pytest.mark.smoke
def test_what_a_callback_writes_is_no_change(group):
    """It reads when it runs; the calls before do not make another program."""
    told, table = [], {"scale": 1.0}

    def f(x):
        jax.debug.callback(lambda total: told.append((float(total), table["scale"])), x.sum())
        return x.sum()

    f = synk.function(f)
    counts = []
    for _ in range(3):
        f(X), f.serial(X), f.check(X)
        jax.effects_barrier()
        table["scale"] += 1
        counts.append(f.stats.compilations)
    assert len(set(counts)) == 1 and told


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, x), lambda x, g: (g * 2,))

TRACED_ANEW = {
    "solve": lambda x: jax.vmap(lambda row: jax.scipy.sparse.linalg.cg(lambda u: 4 * u, row)[0])(x),
    "checkpoint": lambda x: jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.save_only_these_names("a"))(x),
    "print": lambda x: jax.debug.print("{}", x.sum()) or x,
    "activations": lambda x: jax.nn.relu(x) + jax.nn.gelu(x) + jax.random.normal(jax.random.key(0), (2,)),
    "callback": lambda x: jax.debug.callback(lambda total: None, x.sum()) or x,
    "root": lambda x: x + lax.custom_root(lambda y: y - 1.0, jnp.float32(1), lambda f, y: y, lambda g, y: y / g(1.0)),
    "custom": lambda x: doubled(x) + jax.grad(lambda x: doubled(x).sum())(x),
    "loops": lambda x: lax.fori_loop(0, 3, lambda i, z: z * 2, x) + lax.associative_scan(jnp.add, x, axis=1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", TRACED_ANEW)
def test_traces_of_one_function_are_one_program(group, kind):
    """Whatever new objects JAX makes in each: nothing is compiled again, and check finds nothing stale."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        f, counts = synk.function(TRACED_ANEW[kind], reduce="concat"), []
        for _ in range(2):
            f(X), f.serial(X), synk.shared(np.float32(0))
            if kind != "activations":  # noise by shape is no serial answer
                f.check(X)
            counts.append(f.stats.compilations)
        made = synk.shared(np.float32(0))
        f(X), f.serial(X)
        assert counts[0] == counts[1] == f.stats.compilations and made is not None
