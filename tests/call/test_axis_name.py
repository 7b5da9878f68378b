"""The name of the replicas' axis: functions that were written for pmap run as they are, in each kind of call."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import synk
import synk.train

from ..helpers import SERIAL, assert_close, assert_same, combined, numbers, slow

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("on_group")]


def centred(x):
    return x - lax.pmean(x.mean(0, keepdims=True), "batch")


def made(fn, *args, **options) -> Any:
    """The same function over an axis of another name, and over the usual one."""
    return synk.function(fn("batch"), *args, axis_name="batch", **options), synk.function(
        fn("replica"), *args, **options
    )


@pytest.mark.parametrize("engine", ["shard_map", "pmap"])
def test_calls(engine):
    """Eager, serial and checked, warm as well as fresh, under jit, vmap and grad."""
    f, x = synk.function(centred, reduce="concat", axis_name="batch", engine=engine), numbers(8, 3)
    for _ in range(2):
        assert_close(f(x), x - x.mean(0))
        assert_close(f(x, batch=slice(4, 8)), x[4:] - x[4:].mean(0))
        assert_close(f.serial(x), x - x.mean(0))
        f.check(x)
        assert_close(jax.jit(f)(x), x - x.mean(0))
        assert_close(jax.vmap(f)(np.stack([x, 2 * x])), np.stack([x - x.mean(0), 2 * (x - x.mean(0))]))
        assert_close(jax.grad(lambda x: (f(x) * numbers(8, 3)).sum())(x), numbers(8, 3) - numbers(8, 3).mean(0))
    assert f.explain(x).programs


def test_inside_scan_and_custom_derivatives():
    """The axis has its name in loops, branches and rules of derivatives too."""

    @jax.custom_jvp
    def mean(x):
        return lax.pmean(x.mean(), "batch")

    @mean.defjvp
    def derivative(primals, tangents):
        return mean(*primals), 3 * lax.pmean(tangents[0].mean(), "batch")

    def learn(x):
        def one(w, _):
            return w - 0.1 * lax.pmean(jax.grad(lambda w: mean((w - x) ** 2))(w), "batch"), w

        return lax.scan(one, jnp.float32(0), None, 5)

    f, x = synk.function(learn, reduce="max", axis_name="batch"), numbers(8)
    wanted = [0.0]
    for _ in range(5):
        wanted.append(wanted[-1] - 0.1 * 3 * 2 * (wanted[-1] - x).mean())
    for _ in range(2):
        last, path = f(x)
        assert_close(last, np.float32(wanted[-1]))
        assert_close(path, np.float32(wanted[:-1]))


def test_then_and_variables(on_group):
    """Updates of each kind, and `then`, which may communicate as well."""

    def step(axis):
        w, seen = synk.shared(np.float32(1)), synk.shared(np.zeros(3, np.float32))

        def fn(x):
            seen.value = seen.value + lax.psum(x.sum(0), axis)
            return w.value * x.mean()

        f = synk.function(fn, reduce="mean", axis_name=axis)

        @f.then
        def update(mean):
            w.value = w.value + lax.pmean(mean, axis)
            return w.value

        return f, w, seen

    x, answers = numbers(8, 3), []
    for axis in ("batch", "replica"):
        f, w, seen = step(axis)
        answers.append([f(x), f(x), w.value, seen.get_value(0)])
    assert_same(*answers)


@pytest.mark.parametrize(
    ("on_group", "options"),
    [
        slow(("devices", 4), {}),
        (("devices", 4), {"batch": 7, "num_slices": 3}),
        slow(("simulated", 4), {"batch": [6, 0, 1, 5, 2]}),
    ],
    ids=str,
    indirect=["on_group"],
)
def test_what_synk_itself_sends(on_group, options):
    """Collectives of synk's own, of each kind, go over the same axis, for any rows and slices."""
    x = numbers(11, 3)

    def all_ops(x):
        others = {"stats": synk.stats.std(x), "top": synk.stats.top_k(x[:, 0], 2)}
        return {**combined(x), **others, "weight": synk.Weighted(x.sum(), jnp.float32(x.shape[0]))}

    ops = {**{op: op for op in SERIAL}, "stats": "merge", "top": "merge", "weight": "mean"}
    f, usual = made(lambda axis: all_ops, None, ops)
    assert_same(f(x, **options), usual(x, **options))
    held = synk.data(x, place="scatter")
    assert_same(f(held, **options), usual(held, **options))
    stays, wide = synk.function(lambda x: x + 1, reduce="scatter", axis_name="rows"), numbers(11, 40)
    assert_same(np.asarray(stays(x, **options)), np.asarray(usual(x, **options)["concat"] + 1))
    around = {"x": synk.Overlap(2, 1)}
    blur, usual = made(lambda axis: lambda x: x[:-3] + x[1:-2] + x[2:-1] + x[3:], around, reduce="concat")
    assert_same(blur(held, **options), usual(held, **options))
    for more in ({"wire": "bf16"}, {"wire": "int8"}, {"blocks": 3}):
        f, usual = made(lambda axis: lambda x: x.T @ x, reduce="sum", **more)
        assert_same(f(wide, **options), usual(wide, **options))
    f, usual = made(lambda axis: lambda x: x.sum(0), reduce="sum")
    assert_same(f.over(x, batches=[4, [7, 8, 0], slice(9, 11)]), usual.over(x, batches=[4, [7, 8, 0], slice(9, 11)]))


@pytest.mark.parametrize(
    "options", [{}, {"shard_optimizer": True}, {"wire": synk.contrib.PowerSGD(2)}, {"wire": "bf16"}], ids=str
)
def test_training(options):
    """Batch norm over the axis, and what steps send themselves."""
    x, y = numbers(8, 12), numbers(8, 6)

    def loss(axis, w, x, y):
        x = (x - lax.pmean(x.mean(0, keepdims=True), axis)) / (1 + lax.pmean((x**2).mean(0, keepdims=True), axis))
        return jnp.mean((x @ w - y) ** 2)

    answers = []
    for axis in ("batch", "replica"):
        step = synk.train.step(
            partial(loss, axis), numbers(12, 6), optax.sgd(0.1, 0.9), axis_name=axis, name="step", **options
        )
        answers.append([step(x, y), step(x, y), step.params.value])
    assert_same(*answers)


def test_what_is_logged():
    """The mean gradient before clipping, the updates, and the new parameters, on all rows; with slices too."""
    x = numbers(7, 3)

    def log(grads, updates, params):
        return {"grads": grads, "norm": jnp.linalg.norm(updates), "params": params}

    for aux, slices in ((False, 1), (False, 2), (True, 1)):
        step = synk.train.step(
            lambda w, x, aux=aux: (((x @ w) ** 2).mean(), x.sum()) if aux else ((x @ w) ** 2).mean(),
            np.ones(3, np.float32), optax.sgd(0.5), clip=0.1, aux="sum" if aux else None, log=log, axis_name="batch",
        )  # fmt: skip
        for _ in range(2):
            w = np.asarray(step.params.value)
            loss, *rest, logged = step(x, num_slices=slices)
            assert_close(loss, ((x @ w) ** 2).mean())
            assert_close(logged["grads"], 2 * (x * (x @ w)[:, None]).mean(0))
            assert_close(logged["norm"], np.float32(0.05))
            assert_same(logged["params"], step.params.value)
            assert len(rest) == aux
    with pytest.raises(TypeError, match="log is 3; give a function"):
        synk.train.step(lambda w, x: x.mean(), 1.0, optax.sgd(1.0), log=3)


def test_another_axis():
    """The error names both, and the cure; functions go on."""
    f = synk.function(centred, reduce="concat")
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r'centred: it communicates over the axis "batch".* "replica": synk\.function\(\.\.\., axis_name="batch"\)',
        ):
            f(numbers(8, 3))
    g = synk.function(lambda x: lax.pmean(x.mean(), "replica"), reduce="max", axis_name="batch")
    with pytest.raises(ValueError, match=r'over the axis "replica", but its replicas\' axis is "batch"'):
        g(numbers(8))
    h = synk.function(jnp.sum, axis_name="batch")

    @h.then
    def then(total):
        return lax.pmean(total, "replica")

    with pytest.raises(ValueError, match=r'h?.*"replica", but its replicas\' axis is "batch"'):
        h(numbers(8))


def test_rows_that_do_not_divide(on_group):
    """One replica that all devices make takes them, with the same axis."""
    f = synk.function(centred, reduce="concat", axis_name="batch")
    for rows in (7, 8, 1):
        assert_close(f(numbers(rows, 3)), numbers(rows, 3) - numbers(rows, 3).mean(0))


def test_index_of_rows_that_do_not_divide(on_group):
    """JAX's index needs the axis, `synk.rank` does not, and the message says so."""
    by_axis = synk.function(lambda x: x + jnp.float32(lax.axis_index("batch")), reduce="concat", axis_name="batch")
    by_rank = synk.function(lambda x: x + jnp.float32(synk.rank()), reduce="concat", axis_name="batch")
    if on_group.size > 1:
        with pytest.raises(ValueError, match=r"calls jax\.lax\.axis_index\('batch'\).*Use synk\.rank\(\)"):
            by_axis(numbers(7))
        assert_close(by_rank(numbers(7))[-1], numbers(7)[-1] + on_group.size - 1)
    assert_close(by_axis(numbers(8)), by_rank(numbers(8)))


def test_number_of_replicas_for_rows_that_do_not_divide(on_group):
    """A count of the replicas needs the axis too, `synk.size` does not; one beside other collectives is not the point."""
    by_axis = synk.function(lambda x: x / lax.psum(1, "i"), reduce="concat", axis_name="i")
    by_size = synk.function(lambda x: x / synk.size(), reduce="concat")
    mean = synk.function(lambda x: lax.psum(x.mean(), "i") / lax.psum(1, "i"), reduce="max", axis_name="i")
    if on_group.size > 1:
        with pytest.raises(ValueError, match=r"as jax\.lax\.psum\(1, 'i'\) does.*Use synk\.size\(\)"):
            by_axis(numbers(7))
        assert_close(mean(numbers(7)), numbers(7).mean())
        assert_close(by_size(numbers(7)), numbers(7) / on_group.size)
    assert_same(by_axis(numbers(8)), by_size(numbers(8)))


def test_another_axis_of_maps_and_training():
    """The error names the call that has the axis."""
    f = synk.map(lambda x: lax.psum(x, "i"), axis_name="j")
    with pytest.raises(ValueError, match=r'axis is "j": synk\.map\(\.\.\., axis_name="i"\)'):
        f(numbers(synk.size()))
    for make in (synk.train.step, synk.contrib.local_steps):
        step = make(lambda w, x: lax.pmean((w * x).mean(), "i"), np.float32(0), optax.sgd(0.1))
        with pytest.raises(
            ValueError, match=rf'"replica": {make.__module__}\.{make.__name__}\(\.\.\., axis_name="i"\)'
        ):
            step(numbers(8))


@pytest.mark.parametrize("on_group", [("devices", 4)], ids=str, indirect=True)
@pytest.mark.parametrize("name", [None, 3, "", ("a", "b")])
def test_names(name):
    """A name is a string."""
    with pytest.raises(TypeError, match=r"axis_name is .*give a string"):
        synk.function(jnp.sum, axis_name=name)
