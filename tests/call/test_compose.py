"""Composition: under jit, grad, vmap and checkpoint a call is one traced operation with the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType

import synk

from ..helpers import (
    DIFFERENTIABLE,
    also_simulated,
    assert_close,
    chosen,
    group_of,
    needs_devices,
    numbers,
    slow,
    smoke,
)
from ..helpers import combined as by_op

W = np.array([0.5, -1.0], np.float32)
X = numbers(9)

ROWS = [1, 3, 8, 9]


def weigh(w, x):
    return by_op(x * w[None], DIFFERENTIABLE)


combined = synk.function(weigh, {"w": "broadcast"}, {op: op for op in DIFFERENTIABLE})


@pytest.mark.smoke
def test_jit(group):
    """A call is part of a larger program."""
    f = jax.jit(lambda w, x: jax.tree.map(lambda a: a + 1, combined(w * 2, x)))
    for rows in ROWS:
        want = {op: np.asarray(value) + 1 for op, value in weigh(2 * W, numbers(rows)).items()}
        assert_close(f(W, numbers(rows)), want)


@pytest.mark.smoke
@pytest.mark.parametrize("slices", [2, 3])
def test_slices_under_jit(group, slices):
    """`num_slices` is one loop, with the same result."""
    f = jax.jit(lambda w, x: combined(w, x, num_slices=slices))
    for rows in (3, 8, 31):
        assert_close(f(W, numbers(rows)), jax.tree.map(np.asarray, weigh(W, numbers(rows))))


CALLBACKS = {
    "debug": lambda see, x: jax.debug.callback(see, x),
    "io_callback": lambda see, x: io_callback(see, ONE, x, ordered=True),
    "pure_callback": lambda see, x: jax.pure_callback(see, ONE, x),
}
ONE = jax.ShapeDtypeStruct((), np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", CALLBACKS)
def test_callbacks_see_parts_alone(group, kind):
    """A callback runs once a part, with its rows and no others: eager, sliced, under jit and grad."""
    seen = []

    def see(x):
        seen.append(np.asarray(x).tolist())
        return np.float32(x.sum())

    def fn(x):
        found = CALLBACKS[kind](see, lax.stop_gradient(x))
        return x.sum() if kind == "debug" else found + 0 * x.sum()

    def run(call, x):
        seen.clear()
        jax.block_until_ready(call(x))
        jax.effects_barrier()
        return sorted(row for part in seen for row in part)

    f = synk.function(fn)
    calls = [f, jax.jit(lambda x: f(x)), jax.jit(lambda x: f(x, num_slices=2))]
    calls += [] if kind == "io_callback" else [jax.value_and_grad(lambda x: f(x))]
    for rows in (6, 7):
        x = np.arange(rows, dtype=np.float32)
        assert [run(call, x) for call in calls] == [x.tolist() for _ in calls]


def gradients(call, x):
    """By weights and rows, of the squared outputs of a call."""

    def loss(w, x):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(call(w, x)))

    return jax.grad(loss, (0, 1))(jnp.asarray(W), jnp.asarray(x))


@pytest.mark.parametrize(
    ("op", "rows"),
    [
        *[smoke(op, 9) for op in DIFFERENTIABLE],
        *[slow(op, 2) for op in DIFFERENTIABLE[::2]],
        *[slow(op, 8) for op in DIFFERENTIABLE[1::2]],
    ],
)
def test_gradient_of_every_op(op, rows):
    """As that of the serial function, over dividing rows, others and fewer than replicas."""
    x = numbers(rows)
    with group_of("simulated", 4):
        got = gradients(lambda w, x: combined(w, x)[op], x)
    assert_close(got, jax.tree.map(np.asarray, gradients(lambda w, x: weigh(w, x)[op], x)), rtol=1e-4)


@pytest.mark.parametrize("transform", [jax.checkpoint, jax.jit])
def test_gradient_through_transformations(four, transform):
    """Checkpointed or compiled on the way, it is the same."""
    got = gradients(transform(combined), X)
    assert_close(got, jax.tree.map(np.asarray, gradients(weigh, X)), rtol=1e-4)


@also_simulated("four")
def test_gradient_of_weighted(four):
    """Parts of weight 0 count for nothing in the gradient too, NaN included."""

    @synk.function(inputs={"w": "broadcast"}, reduce="mean")
    def masked(w, x, mask):
        count = mask.sum()
        mean = (x @ w * mask).sum() / jnp.maximum(count, 1)
        return synk.Weighted(jnp.where(count > 0, mean, jnp.nan), count)

    x = numbers(9)
    for mask in (np.ones(9, np.float32), np.array([0, 0, 0, 0, 0, 1, 1, 0, 1], np.float32)):
        got = jax.value_and_grad(masked)(jnp.asarray(W), x, mask)
        assert_close(got, ((x @ W)[mask > 0].mean(), x[mask > 0].mean(0)))


@pytest.mark.slow
def test_gradient_of_weighted_without_care(four):
    """A division by a weight of 0, whose gradient is NaN, is none of the answer's; what has no weight has its own."""

    def fn(w, x, mask, other):
        both = [synk.Weighted((w * x * m).sum() / m.sum(), m.sum()) for m in (mask, other)]
        return (*both, (w * x).sum())

    def serial(w, x):
        return w * ((x * mask).sum() / mask.sum() + 2 * x.mean() + x.sum())

    f = synk.function(fn, inputs={"w": "broadcast"}, outputs=("mean", "mean", "sum"))
    x, mask, ones = numbers(12)[:, 0], np.repeat(np.float32([1, 0]), [3, 9]), np.ones(12, np.float32)
    for slices in (1, 3, 1):
        f(np.float32(2), x, mask, ones, num_slices=slices)

        def parallel(w, x):
            return jnp.dot(jnp.stack(f(w, x, mask, ones, num_slices=slices)), jnp.array([1.0, 2.0, 1.0]))  # noqa: B023

        for transform in (jax.grad, lambda fn: jax.grad(fn, 1), lambda fn: jax.jit(jax.grad(fn, (0, 1))), jax.hessian):
            assert_close(transform(parallel)(2.0, x), transform(serial)(2.0, jnp.asarray(x)), rtol=1e-4)
        assert_close(jax.jvp(parallel, (2.0, x), (1.0, x)), jax.jvp(serial, (2.0, x), (1.0, x)), rtol=1e-4)


def test_gradients_of_stack_and_callables(four):
    """Those ops differentiate as well."""
    f = synk.function(lambda w, x: (x @ w).sum(), {"w": "broadcast"}, "stack")
    g = synk.function(lambda w, x: (x @ w).sum(), {"w": "broadcast"}, lambda parts: (parts**2).sum())
    for rows in (8, 9):
        sums = np.stack([part.sum(0) for part in np.array_split(numbers(rows), 4)])
        want = 2 * (sums @ W) @ sums
        assert_close(jax.grad(lambda w: (f(w, numbers(rows)) ** 2).sum())(jnp.asarray(W)), want, rtol=1e-4)  # noqa: B023
        assert_close(jax.grad(lambda w: g(w, numbers(rows)))(jnp.asarray(W)), want, rtol=1e-4)  # noqa: B023


@pytest.mark.smoke
@also_simulated("four")
def test_second_derivatives(four):
    """Forward over reverse, over rows that do not divide."""
    f = synk.function(lambda w, x: jnp.mean((x @ w) ** 2), {"w": "broadcast"}, "mean")
    assert_close(jax.hessian(lambda w: f(w, X))(jnp.asarray(W)), 2 * X.T @ X / 9, rtol=1e-4)


@pytest.mark.smoke
@also_simulated("four")
def test_jvp(four):
    """A derivative in one direction."""
    f = synk.function(lambda w, x: jnp.mean(x @ w), {"w": "broadcast"}, "mean")
    got = jax.jvp(lambda w: f(w, X), (jnp.asarray(W),), (jnp.ones(2),))
    assert_close(got, ((X @ W).mean(), X.mean(0).sum()))


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [8, 9])
def test_vmap(four, rows):
    """Over a broadcast argument, over rows' columns, over both."""
    ws, x = np.stack([W, 2 * W, 3 * W]), numbers(rows)
    f = synk.function(lambda w, x: (x @ w).mean(), {"w": "broadcast"}, "mean")
    assert_close(jax.vmap(f, (0, None))(ws, x), (x @ ws.T).mean(0))
    xs = np.stack([x, x + 1, x * 2])
    assert_close(jax.vmap(f)(ws, xs), np.stack([(a @ w).mean() for w, a in zip(ws, xs, strict=True)]))


def test_vmap_of_grad(four):
    """One gradient for each set of weights."""
    ws = np.stack([W, 2 * W])
    f = synk.function(lambda w, x: ((x @ w) ** 2).mean(), {"w": "broadcast"}, "mean")
    want = np.stack([2 * X.T @ (X @ w) / 9 for w in ws])
    assert_close(jax.jit(jax.vmap(jax.grad(f), (0, None)))(ws, X), want, rtol=1e-4)


@pytest.mark.parametrize("batch", [5, slice(1, None, 2), np.arange(9) > 2, [8, 0, -2, 3, 3]], ids=str)
def test_concrete_batch(four, batch):
    """Rows are picked as in a call."""
    f = synk.function(lambda x: (x.mean(0), x), outputs=("mean", "concat"))
    assert_close(jax.jit(lambda x: f(x, batch=batch))(X), (chosen(X, batch).mean(0), chosen(X, batch)))


@pytest.mark.smoke
@also_simulated("four")
def test_traced_batch(four):
    """An integer array may be traced, negative indexes as in NumPy; other values need no other program."""
    traces = []
    f = synk.function(lambda x: x, reduce="concat")

    @jax.jit
    def pick(x, batch):
        traces.append(1)
        return f(x, batch=batch)

    for batch in (np.array([8, 0, -2, 3, 3]), np.array([-9, 1, 2, 5, -1])):
        assert_close(pick(X, batch), X[batch])
    assert len(traces) == 1
    for dtype in (np.int8, np.uint8, np.int16):  # in which the number of rows has no room
        batch = np.array([100, 5, 0], dtype)
        assert_close(jax.jit(lambda batch: f(numbers(300), batch=batch))(batch), numbers(300)[batch])


def test_concrete_batch_is_checked(four):
    """Out of range, it raises under jit as well."""
    f = synk.function(lambda x: x, reduce="concat", name="f")
    with pytest.raises(IndexError, match="f: batch holds the index 9, but x has 9 rows"):
        jax.jit(lambda x: f(x, batch=[9]))(X)


@also_simulated("four")
def test_then_and_statics(four):
    """What follows the combined outputs is part of the operation."""

    @synk.function(inputs={"x": "scatter", "w": "broadcast", "n": "static"}, outputs=("mean", "concat"))
    def f(x, w, n):
        return x.mean(0) * n, x

    @f.then
    def f(mean, x, w, n):
        return (x - mean[None]) * w[None] / n

    assert_close(jax.jit(lambda x, w: f(x, w, n=2))(X, W), (X - 2 * X.mean(0)) * W / 2)
    assert_close(jax.jit(lambda x, w: f(x, w, 3))(X, W), (X - 3 * X.mean(0)) * W / 3)


def test_output_subset(four):
    """Outputs are picked under jit as outside."""
    f = synk.function(lambda x: (x.sum(), x.max()), outputs=("sum", "max"))
    assert_close(jax.jit(lambda x: f(x, output_subset=[1]))(X), (X.max(),))


@also_simulated("four")
def test_two_calls_in_one_program(four):
    """The rows of one call feed the next: a data-parallel part of a larger network."""
    double = synk.function(lambda x: x * 2, reduce="concat")
    mean = synk.function(lambda x: x.mean(0), reduce="mean")
    assert_close(jax.jit(lambda x: mean(double(x) + 1))(X), (2 * X + 1).mean(0))


@pytest.mark.smoke
@also_simulated("four")
def test_inside_scan(four):
    """A call may be the body of a loop."""
    f = synk.function(lambda w, x: (x * w[None]).mean(0), {"w": "broadcast"}, "mean")
    last, _ = jax.jit(lambda w: lax.scan(lambda w, _: (f(w, X), None), w, None, length=3))(W)
    assert_close(last, W * X.mean(0) ** 3)


@pytest.mark.smoke
@also_simulated("four")
def test_typed_keys(four):
    """Keys are traced as values are."""
    f = synk.function(lambda keys: jax.vmap(jax.random.normal)(keys), reduce="concat")
    keys = synk.row_keys(jax.random.key(0), 9)
    assert_close(jax.jit(f)(keys), np.asarray(jax.vmap(jax.random.normal)(keys)))


@pytest.mark.smoke
def test_values_of_variables_are_passed(four):
    """A variable's value enters as a broadcast argument, and is the current one at every call."""
    w = synk.shared(W)
    f = synk.function(lambda w, x: x @ w, {"w": "broadcast"}, "concat")
    outer = jax.jit(lambda w, x: f(w, x))
    for factor in (1, 2):
        w.value = factor * W
        assert_close(outer(w.value, X), factor * X @ W)


def test_reading_a_variable_raises_also_when_it_was_called_before(four):
    """A function with variables does not become part of a traced program, whatever was cached."""
    w = synk.shared(W, name="w")
    f = synk.function(lambda x: x @ w.value, reduce="concat", name="f")
    f(X)
    for transform in (jax.jit, jax.vmap, jax.checkpoint):
        with pytest.raises(synk.SynkError, match="f: it uses the shared variable w"):
            transform(f)(X[None] if transform is jax.vmap else X)


def test_the_answer_is_that_of_the_plain_call(four):
    """And one replica's is that of eight."""
    got = [combined(W, X), jax.jit(combined)(W, X)]
    with group_of("devices", 8):
        got.append(jax.jit(lambda w, x: combined(w, x))(W, X))
    for each in got:
        assert_close(each, jax.tree.map(np.asarray, weigh(W, X)))


@pytest.mark.smoke
def test_large_extremes_of_what_depends_on_no_row(group):
    """Each replica folds a piece of them; the memory is that of a few copies, and not of their square."""
    f = synk.function(
        lambda x, w: {"sum": x.sum(), "most": jnp.abs(w)}, inputs=["x"], outputs={"sum": "sum", "most": "max"}
    )
    x, w = np.ones(4, np.float32), np.linspace(-2, 1, 20_000, dtype=np.float32)
    for _ in range(2):
        compiled = jax.jit(f).lower(x, w).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 20 * w.nbytes
        np.testing.assert_array_equal(jax.jit(f)(x, w)["most"], np.abs(w))
        f(x, w)
    np.testing.assert_array_equal(jax.grad(lambda w: f(x, w)["most"].sum())(jnp.asarray(w)), np.sign(w))


def test_a_traced_batch_of_nothing(group):
    """As a batch of nothing is."""
    f = synk.function(jnp.sum, name="f")
    for _ in range(2):
        with pytest.raises(ValueError, match="f: the batch selects no rows"):
            jax.jit(lambda batch: f(np.ones(4), batch=batch))(jnp.zeros(0, int))
        assert float(jax.jit(lambda batch: f(np.ones(4), batch=batch))(jnp.zeros(3, int))) == 3


@pytest.mark.smoke
@also_simulated("four")
def test_named_axes_around(four):
    """A function may ask for the axis of a vmap around it; the next one, of another size or without, has its own."""
    f = synk.function(lambda x: x.sum() * lax.axis_size("i"), name="f")
    mean = synk.function(lambda x: x.sum() / lax.psum(1, "i"))
    after = synk.function(jnp.sum).then(lambda total: total * lax.axis_size("i"))
    for size in (2, 5, 2):
        x = numbers(7 * size).reshape(size, 14)
        for each, want in ((f, x.sum(1) * size), (mean, x.sum(1) / size), (after, x.sum(1) * size)):
            assert_close(jax.vmap(each, axis_name="i")(x), want, rtol=1e-4)
            assert_close(jax.jit(jax.vmap(each, axis_name="i"))(x), want, rtol=1e-4)
        for call in (f, jax.jit(f)):
            with pytest.raises(ValueError, match='communicates over the axis "i"'):
                call(x[0])


@needs_devices(2)
@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes_around(four, kind):
    """Under a mesh of other devices a traced call raises in words, or is right; what follows elsewhere is right."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(getattr(AxisType, kind),))
    x = numbers(8)[:, 0]
    for _ in range(2):
        f = synk.function(lambda x: (x * x).sum(), name="f")
        for _ in range(2):
            for call in (lambda: jax.jit(f)(x), lambda: jax.grad(lambda x: f(x) / 2)(x).sum()):  # noqa: B023
                with jax.set_mesh(mesh):
                    if four.is_simulated and kind == "Auto":
                        call()
                    else:
                        with pytest.raises(
                            synk.SynkError, match=r"f: it is traced inside .* with the mesh {'model': 2}"
                        ):
                            call()
                    assert_close(f(x), (x * x).sum(), rtol=1e-4)
            assert_close(jax.jit(lambda x: f(x))(x), (x * x).sum(), rtol=1e-4)  # noqa: B023
            assert_close(jax.grad(lambda x: f(x))(jnp.asarray(x)), 2 * x)  # noqa: B023
            with jax.set_mesh(four.mesh):
                assert_close(jax.jit(lambda x: f(x))(x), (x * x).sum(), rtol=1e-4)  # noqa: B023


@also_simulated("four")
def test_nan_in_wide_extremes(four):
    """XLA's CPU backend loses NaN in them."""
    x = np.stack([numbers(1001)[:, 0]] * 4)
    x[2, ::500] = np.nan
    f = synk.function(lambda x: (x.max(0), x.min(0)), outputs=("max", "min"))
    for call in (f, jax.jit(f), f):
        for found in call(x):
            np.testing.assert_array_equal(np.isnan(found), np.isnan(x[2]))
    for reduce in ("max", "min"):
        found = synk.contrib.pairs(lambda a, b: a + b, np.zeros((3, 1001), np.float32), x, reduce=reduce)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(np.stack([x[2]] * 3)))


EIGHT = np.arange(8, dtype=np.float32)


def test_functions_refuse_to_run_inside_functions(four):
    """A call, serial, check and compile see all rows, which a replica has not."""
    inner = synk.function(jnp.sum)
    for call in (inner, inner.serial, inner.check, inner.compile):
        with pytest.raises(synk.SynkError, match="it calls the synk function sum inside"):
            synk.function(lambda x, call=call: call(EIGHT))(EIGHT)


def test_serial_refuses_to_run_under_a_transformation(four):
    """What runs at once cannot be traced."""
    with pytest.raises(synk.SynkError, match="serial: it runs when called"):
        jax.jit(synk.function(jnp.sum).serial)(EIGHT)


@pytest.mark.smoke
@also_simulated("four")
def test_first_under_jit_is_the_first_replicas_everywhere(four):
    """Under a transformation the value is the first replica's for all that follows, and so is its gradient."""
    first = synk.function(lambda x: x[0], reduce="first")
    total = synk.function(jnp.sum)
    assert float(jax.jit(lambda x: total(x * first(x + 1)))(EIGHT)) == EIGHT.sum()
    np.testing.assert_array_equal(jax.grad(first)(EIGHT), [1, 0, 0, 0, 0, 0, 0, 0])


def test_traced_indexes_out_of_range_give_no_other_row(four):
    """A traced batch cannot be checked; what is not there is NaN."""
    rows = synk.function(lambda x: x, reduce="concat")
    got = jax.jit(lambda x, batch: rows(x, batch=batch))(EIGHT, np.array([7, -1, 9, -9]))
    np.testing.assert_array_equal(got, [7, 7, np.nan, np.nan])


def test_batch_s_under_jit_raises(four):
    """As outside it."""
    with pytest.raises(ValueError, match="batch_s"):
        jax.jit(lambda x: synk.function(jnp.sum)(x, batch_s=2))(EIGHT)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"nan": "raise"}, 'nan="raise"'), ({"compiler_options": {"xla_backend_optimization_level": 0}}, "compiler_opt"),
        ({"blocks": 2}, "blocks="),
    ],
)  # fmt: skip
def test_options_that_a_traced_call_cannot_heed_raise(four, transform, option, words):
    """Such an option of a function is not dropped in silence; without a transformation it holds."""
    f = synk.function(lambda x: x.sum(0), name="f", **option)
    with pytest.raises(ValueError, match=f"f: {words}.* cannot enter jit"):
        transform(f)(np.ones((4, 3), np.float32))
    assert_close(f(np.ones((4, 3), np.float32)), np.full(3, 4, np.float32))


@pytest.mark.smoke
@pytest.mark.parametrize("call", ["function", "scan", "pairs"])
def test_an_outer_axis_of_the_name_of_the_replicas(group, call):
    """Collectives would meet over that one; with another name it is right."""
    calls = {
        "function": synk.function(jnp.sum, name="total"),
        "scan": lambda x: synk.contrib.scan(jnp.add, x)[-1],
        "pairs": lambda x: synk.contrib.pairs(lambda a, b: b, jnp.zeros(1), x)[0],
    }
    x = jnp.stack([jnp.linspace(0.5, 1.5, 7), jnp.ones(7)])
    with pytest.raises(synk.SynkError, match='has an axis named "replica", as that of the replicas is called'):
        jax.vmap(calls[call], axis_name="replica")(x)
    np.testing.assert_allclose(jax.vmap(calls[call], axis_name="batch")(x), [7, 7], rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(calls[call])(x), [7, 7], rtol=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("axis", [{}, {"axis_name": "i"}])
def test_pmap_around_a_function(group, axis):
    """Is named as such; the axis of a pmap without a name is JAX's own business."""
    f = synk.function(jnp.sum, name="total")
    with pytest.raises(synk.SynkError, match=r"total: it is traced inside .*jax\.pmap") as raised:
        jax.pmap(f, **axis)(np.ones((1, 7)))
    assert "axis_name" not in str(raised.value) and "<axis" not in str(raised.value)


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [8, 7])
def test_committed_arrays_under_grad(group, rows):
    """Arrays that lie on one device work under `grad` as they do in a call."""
    x, w = numbers(rows), np.float32(2)
    here, there = jax.devices()[0], jax.devices()[:2][-1]
    for devices in ((here, here), (there, there), (here, there)):
        f = synk.function(lambda w, x: ((w * x) ** 2).sum(), {"w": "broadcast"})
        given = [jax.device_put(a, device) for a, device in zip((w, x), devices, strict=True)]
        assert_close(jax.value_and_grad(f)(*given), (((w * x) ** 2).sum(), 2 * w * (x**2).sum()))
        assert_close(f(*given), ((w * x) ** 2).sum())


def test_then_after_a_trace():
    """What followed the outputs of a traced call is no other call's."""
    with group_of("devices", 2):
        f = synk.function(lambda x: x.sum())
        x = jnp.arange(4.0)
        assert float(jax.jit(lambda x: f(x))(x)) == 6
        f.then(lambda total: 2 * total)
        assert float(jax.jit(lambda x: f(x))(x)) == float(f(x)) == 12
