"""Graphs of PyTensor: the serial answer by any replicas, beside PyTensor's own functions; variables that both see."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .. import harness
from ..helpers import slow

pytensor = pytest.importorskip("pytensor", reason='install the extra "pytensor"')
pytensor.config.floatX = "float32"

import pytensor.tensor as pt  # noqa: E402

import synk  # noqa: E402
import synk.contrib.pytensor  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(101, 6)).astype(np.float32)
Y = RNG.integers(0, 4, 101).astype(np.int32)
MODE = "FAST_COMPILE"


def variable(name, *shape):
    return pytensor.shared(np.random.default_rng(len(name)).normal(size=shape).astype(np.float32) / 2, name)


def perceptron():
    """Inputs, cost, parameters, gradients, updates with momentum."""
    x, y, rate = pt.matrix("x"), pt.ivector("y"), pt.scalar("rate")
    params = [variable("W1", 6, 8), variable("b1", 8), variable("W_2", 8, 4), variable("b_2", 4)]
    W1, b1, W2, b2 = params
    p = pt.special.softmax(pt.tanh(x @ W1 + b1) @ W2 + b2, axis=1)
    cost = -pt.mean(pt.log(p)[pt.arange(y.shape[0]), y])
    grads = pt.grad(cost, params)
    updates = []
    for w, g in zip(params, grads, strict=True):
        velocity = pytensor.shared(np.zeros_like(w.get_value()), f"{w.name}_velocity")
        new = np.float32(0.9) * velocity - rate * g
        updates += [(velocity, new), (w, w + new)]
    return [x, y, rate], cost, params, grads, updates


def step_of(made):
    inputs, cost, _, grads, updates = made
    return synk.contrib.pytensor.function(
        inputs, cost, broadcast=inputs[-1:], updates=updates, combine=[(g, "mean") for g in grads], name="step"
    )


@pytest.fixture(scope="module")
def trained():
    """Batches, and of PyTensor's own function the costs and the parameters after them."""
    inputs, cost, params, _, updates = perceptron()
    own = pytensor.function(inputs, cost, updates=updates, mode=MODE)
    rng = np.random.default_rng(1)
    batches = [rng.permutation(101)[: 29 + i % 3] for i in range(12)]
    costs = [float(own(X[rows], Y[rows], np.float32(0.1))) for rows in batches]
    return batches, costs, [w.get_value() for w in params]


@pytest.mark.parametrize(("n", "num_slices"), [slow(1, 3), (2, 3), slow(4, 1)])
def test_training_is_that_of_one_device(trained, n, num_slices):
    """Cold, warm, uneven and sliced; the law by `check` as well."""
    batches, costs, params = trained
    with synk.simulate(n):
        made = perceptron()
        step = step_of(made)
        step.check(X, Y, 0.1, num_slices=num_slices)
        found = [float(step(X, Y, 0.1, batch=rows, num_slices=num_slices)) for rows in batches]
        step.check(X, Y, 0.1, num_slices=num_slices)
        np.testing.assert_allclose(found, costs, atol=1e-5)
        for ours, theirs in zip(made[2], params, strict=True):
            np.testing.assert_allclose(ours.get_value(), theirs, atol=1e-5)


def test_devices_and_other_calls(trained):
    """As other functions of synk's: `iterate`, by name, not in another group, under `jit` and `grad`."""
    batches, costs, _ = trained
    made = perceptron()
    step = step_of(made)
    with synk.init(3):
        first = [float(cost) for cost in step.iterate(X, Y, 0.1, batches=batches[:6])]
        rest = [float(step(rate=0.1, x=X[rows], y=Y[rows])) for rows in batches[6:]]
        np.testing.assert_allclose(first + rest, costs, atol=1e-5)
        assert "all-reduce" in str(step.explain(X, Y, 0.1))
        with pytest.raises(synk.SynkError, match="lives in Group"), synk.simulate(2):
            step(X, Y, 0.1)
        x = made[0][0]
        norm = synk.contrib.pytensor.function([x], pt.tanh(x).sum(1).mean())
        np.testing.assert_allclose(jax.jit(norm)(X), norm(X), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(norm)(jnp.asarray(X)), (1 - np.tanh(X) ** 2) / len(X), atol=1e-6)


def test_an_op_that_is_left_out():
    """A scalar of floats is a mean, and any other output that depends on rows must be named."""
    x, i = pt.matrix("x"), pt.ivector("i")
    with synk.simulate(3):
        named = [(x * 2, "concat"), (x.sum(), "sum"), (x.mean(0), "mean"), (x.argmax(1), "concat"), (x[0, 0], "first")]
        f = synk.contrib.pytensor.function([x], [x.mean(), *named])
        mean, doubled, total, means, largest, first = f(X)
        np.testing.assert_allclose(mean, X.mean(), atol=1e-6)
        np.testing.assert_allclose(doubled, X * 2)
        np.testing.assert_allclose(total, X.sum(), rtol=1e-4)
        np.testing.assert_allclose(means, X.mean(0), atol=1e-6)
        np.testing.assert_array_equal(largest, X.argmax(1))
        assert first == X[0, 0]
        means = synk.contrib.pytensor.function([x], x.mean(0), combine=[(x.mean(0), "mean")])
        np.testing.assert_allclose(means(X), X.mean(0), atol=1e-6)
    for inputs, expression, is_a in (
        ([x], x * 2, r"its output Mul, a Matrix\(float32, shape=\(\?, \?\)\), needs an op"),
        ([x], x.mean(0), r"a Vector\(float32, shape=\(\?,\)\), needs an op"),
        ([i], pt.eq(i, 2).sum(), r"a Scalar\(int64, shape=\(\)\), needs an op"),
    ):
        with pytest.raises(ValueError, match=is_a):
            synk.contrib.pytensor.function(inputs, expression)
    with pytest.raises(ValueError, match=r'the op of .* is None; name one, e.g. "mean" or "sum"'):
        synk.contrib.pytensor.function([x], (x.mean(), None))


def test_what_may_not_follow():
    """What a sequence of outputs would change: each is as it is alone, or raises."""
    x, s = pt.matrix("x"), pytensor.shared(np.float32(0), "s")
    total, mean = x.sum(), x.mean(0)
    with synk.simulate(3):
        found = synk.contrib.pytensor.function([x], [(total, "sum"), (total * 2, "stack"), total * 2, x.mean()])(X)
        np.testing.assert_allclose([found[0] * 2, found[1].sum()], [found[2]] * 2, rtol=1e-5)
        assert found[1].shape == (3,)
        for outputs in ([(total, "sum"), (total, "max")], [(total, "max"), (total, "sum")]):
            synk.contrib.pytensor.function([x], outputs)(X)
            with pytest.raises(ValueError, match="the update of s depends on the rows of x by another way"):
                synk.contrib.pytensor.function([x], outputs, updates=[(s, total)])
        for follower in (x - mean, ((x - mean) ** 2).mean(0)):
            with pytest.raises(ValueError, match=r"depends on .* of all rows, and on rows beside"):
                synk.contrib.pytensor.function([x], follower, combine=[(mean, "mean")])
            with pytest.raises(ValueError, match="needs an op"):
                synk.contrib.pytensor.function([x], [(mean, "mean"), follower])
        with pytest.raises(ValueError, match="follows from what combine names"):
            synk.contrib.pytensor.function([x], [(pt.tanh(mean), "sum")], combine=[(mean, "mean")])
        with pytest.raises(ValueError, match="the update of s depends on the rows of x by another way"):
            synk.contrib.pytensor.function([x], [(total, "stack")], updates=[(s, total)])
        with pytest.raises(ValueError, match="the update of s depends on the rows of x by another way"):
            synk.contrib.pytensor.function([x], total, updates=[(s, total)])
        std = synk.contrib.pytensor.function([x], x.std(0), combine=[(x, "concat")])
        np.testing.assert_allclose(std(X), X.std(0), rtol=1e-5)


def test_counts_beside_gradients():
    """How many rows there are, which the gradient is made of by its shape alone."""
    x, y = pt.matrix("x"), pt.ivector("y")
    w, count = variable("w", 6, 4), pytensor.shared(np.int32(0), "count")
    cost = -pt.mean(pt.log(pt.special.softmax(x @ w, axis=1))[pt.arange(y.shape[0]), y])
    g = pt.grad(cost, w)
    updates = [(w, w - g), (count, count + y.shape[0].astype("int32"))]
    wanted = w.get_value() - pytensor.function([x, y], g, mode=MODE)(X, Y)
    with synk.simulate(3):
        step = synk.contrib.pytensor.function([x, y], cost, updates=updates, combine=[(g, "mean"), (y.shape[0], "sum")])
        step(X, Y)
        np.testing.assert_allclose(w.get_value(), wanted, atol=1e-6)
        step(X, Y, batch=10)
    assert count.get_value() == 111


def test_what_follows_from_what_is_combined():
    """Outputs of combined values are computed after them; gradients taken twice are cut in both places."""
    x, w = pt.matrix("x"), variable("w", 6)
    mean = x.mean(0)
    spread = pt.sqrt(pt.mean(x**2, axis=0))
    with synk.simulate(3):
        f = synk.contrib.pytensor.function(
            [x], {"mean": (mean, "mean"), "norm": pt.sqrt((mean**2).sum()), "w": w.sum()}
        )
        found = f(X)
        assert list(found) == ["mean", "norm", "w"]
        np.testing.assert_allclose(found["norm"], np.sqrt((X.mean(0) ** 2).sum()), rtol=1e-5)
        np.testing.assert_allclose(found["w"], w.get_value().sum(), rtol=1e-6)
        square = pt.mean(x**2, axis=0)
        f = synk.contrib.pytensor.function([x], [pt.sqrt(square), spread], combine=[(square, "mean")])
        np.testing.assert_allclose(f(X), [np.sqrt((X**2).mean(0))] * 2, rtol=1e-5)

        cost = ((x @ w) ** 2).mean()
        step = synk.contrib.pytensor.function(
            [x], updates={w: w - np.float32(0.1) * pt.grad(cost, w)}, combine=[(pt.grad(cost, w), "mean")]
        )
        old = w.get_value()
        assert step(X) is None
        np.testing.assert_allclose(w.get_value(), old - 0.2 * X.T @ (X @ old) / 101, atol=1e-5)


def test_weighted_means():
    """By a weight for each part, or from two sums: the mean over what counts, not over rows."""
    x, mask = pt.matrix("x"), pt.matrix("mask")
    counts = (np.random.default_rng(2).random(X.shape) < 0.3).astype(np.float32)
    total, count = (x * mask).sum(), mask.sum()
    wanted = (X * counts).sum() / counts.sum()
    weighted = synk.Weighted(total / count, count)
    with synk.simulate(4):
        for outputs, combine in (
            ((weighted, "mean"), ()),
            (total / count, [(weighted, "mean")]),
            (total / count, [(total, "sum"), (count, "sum")]),
        ):
            f = synk.contrib.pytensor.function([x, mask], outputs, combine=combine)
            np.testing.assert_allclose(f(X, counts), wanted, atol=1e-6)
            f.check(X, counts, num_slices=2)
    with pytest.raises(ValueError, match='is for op "mean", and a scalar'):
        synk.contrib.pytensor.function([x, mask], (weighted, "sum"))


def test_updates_see_old_values_and_givens():
    """All at once; default updates and givens as PyTensor has them; integers of 64 bits as 32 on the devices."""
    a, b, count = variable("a", 3), variable("bb", 3), pytensor.shared(0, "count")
    old_a, old_b = a.get_value(), b.get_value()
    with synk.simulate(2):
        swap = synk.contrib.pytensor.function([], [a, count], updates=[(a, b), (b, a), (count, count + 1)])
        for i in range(3):
            before, counted = swap()
            assert counted == i
            np.testing.assert_array_equal(before, (old_a, old_b)[i % 2])
    np.testing.assert_array_equal(a.get_value(), old_b)
    assert count.get_value() == 3 and count.get_value().dtype == np.int64
    x, z = pt.matrix("x"), pt.matrix("z")
    with synk.simulate(2):
        f = synk.contrib.pytensor.function([z], (x.sum(), "sum"), givens={x: z * np.float32(2)})
        np.testing.assert_allclose(f(X), 2 * X.sum(), rtol=1e-4)
        with pytest.raises(ValueError, match="givens replaces x, which is one of its inputs"):
            synk.contrib.pytensor.function([x], x.mean(), givens=[(x, x * 2)])


@pytest.mark.smoke
def test_a_scan_and_its_gradient():
    """Under shapes that are known, which PyTensor's own JAX mode does not have."""
    x, w = pt.matrix("x"), pytensor.shared(np.float32(0.5), "w")
    h = pytensor.scan(
        lambda now, before: pt.tanh(before + w * now),
        sequences=[x.T],
        outputs_info=[pt.zeros_like(x[:, 0])],
        return_updates=False,
    )
    cost = (h[-1] ** 2).mean()
    both = [cost, pt.grad(cost, w)]
    wanted = pytensor.function([x], both, mode=MODE)(X)
    with synk.simulate(3):
        f = synk.contrib.pytensor.function([x], [(each, "mean") for each in both])
        for num_slices in (1, 2):
            np.testing.assert_allclose(f(X, num_slices=num_slices), wanted, atol=1e-5)


def test_more_rows_than_int8_counts():
    """`arange` of a constant number of rows (pytensor#2296)."""
    x = pt.vector("x")
    with synk.simulate(2):
        f = synk.contrib.pytensor.function([x], (pt.arange(x.shape[0]).max(), "max"))
        assert f(np.zeros(700, np.float32)) == 349


def test_rows_that_variables_hold():
    """Without inputs, an op says that replicas compute; rows are those that a variable holds."""
    s, w = variable("s", 1, 6), variable("w", 6, 2)
    with synk.simulate(3):
        f = synk.contrib.pytensor.function([], ((s @ w).mean(0), "mean"))
        synk.scatter(synk.contrib.pytensor.shared(s), X)
        np.testing.assert_allclose(f(), (X @ w.get_value()).mean(0), atol=1e-5)


@pytest.mark.smoke
def test_variables_are_pytensors_own():
    """Functions that PyTensor compiles later, `get_value`, `set_value`, copies and checkpoints see them."""
    with synk.simulate(3):
        w = variable("w", 3)
        x = pt.vector("x")
        before = [pytensor.function([x], x * w, mode=mode) for mode in ("NUMBA", "JAX")]
        f = synk.contrib.pytensor.function([], updates=[(w, w + 1)])
        old = w.get_value()
        f()
        after = pytensor.function([x], x * w, updates=[(w, w * 2)])
        np.testing.assert_allclose(after(np.ones(3, np.float32)), old + 1, rtol=1e-6)
        f()
        np.testing.assert_allclose(w.get_value(), (old + 1) * 2 + 1, rtol=1e-6)
        for f_before in before:
            with pytest.raises(Exception, match="synk holds a shared variable"):
                f_before(np.ones(3, np.float32))
        for copied in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w)):
            np.testing.assert_array_equal(copied.get_value(), w.get_value())
            copied.set_value(np.zeros(3, np.float32))
        assert w.get_value().all()
        w.set_value(np.arange(3, dtype=np.float32))
        f()
        assert w.get_value().tolist() == [1, 2, 3]
        got = w.get_value(borrow=True)
        got[:] = 0
        assert w.get_value().all()
        with pytest.raises(ValueError, match=r"w has shape \(4,\), but its old one has \(3,\)"):
            w.set_value(np.zeros(4, np.float32))
        with pytest.raises(TypeError, match="loss of precision"):
            w.set_value(np.zeros(3))


def test_values_that_are_set_past_the_devices():
    """By functions made before, or by C linkers: what reads next raises, until a value is set."""
    ones = np.ones(3, np.float32)
    with synk.simulate(2):
        w = variable("w", 3)
        reset = pytensor.function([], [], updates=[(w, pt.ones((3,), dtype="float32"))], mode="FAST_COMPILE")
        f = synk.contrib.pytensor.function([], updates=[(w, w + 1)])
        f()
        by_c = pytensor.function([], [], updates=[(w, pt.ones((3,), dtype="float32"))], mode="CVM")
        for function, what in ((reset, "was made before synk held it"), (by_c, "runs by PyTensor's C linker")):
            function()
            with pytest.raises(RuntimeError, match=f"w: a function that {what} has set it"):
                w.get_value()
            with pytest.raises(ValueError, match="but its old one has"):
                w.set_value(np.ones(4, np.float32))
            with pytest.raises(RuntimeError, match="set the value again"):
                synk.contrib.pytensor.shared(w)
            w.set_value(ones)
            f()
            np.testing.assert_array_equal(w.get_value(), 2 * ones)


def test_a_function_that_is_refused_takes_nothing():
    """Functions that PyTensor made before go on."""
    x, w = pt.matrix("x"), variable("w", 6)
    before = pytensor.function([x], x @ w, mode=MODE)
    with pytest.raises(ValueError, match='did you mean "mean"'):
        synk.contrib.pytensor.function([x], ((x @ w).mean(), "men"))
    assert before(X).shape == (101,)


def test_checkpoints(tmp_path):
    """`synk.contrib.pytensor.shared` is what `synk.save` and `synk.load` take."""
    w = variable("w", 3)
    held = synk.contrib.pytensor.shared(w)
    assert synk.contrib.pytensor.shared(w) is held and repr(held) == "Shared(w: float32[3])"
    old = w.get_value()
    synk.save(tmp_path, {"w": held}, step=1)
    w.set_value(np.zeros(3, np.float32))
    synk.load(tmp_path, {"w": held})
    np.testing.assert_array_equal(w.get_value(), old)


def test_a_lost_value_is_set_again():
    """`set_value` asks nothing of the old value."""
    w = variable("w", 3)
    held = synk.contrib.pytensor.shared(w)
    f = synk.contrib.pytensor.function([], updates=[(w, w + 1)])
    with synk.init(2):
        f()
        for leaf in held._state.leaves:
            leaf.delete()
        with pytest.raises((synk.errors.SharedLostError, RuntimeError)):
            w.get_value()
        w.set_value(np.ones(3, np.float32))
        f()
    assert w.get_value().tolist() == [2, 2, 2]


x, y, rate, w = pt.matrix("x"), pt.vector("y"), pt.scalar("rate"), pytensor.shared(np.zeros(6, np.float32), "w")
m = x.mean()
squares = ((x - m) ** 2).mean()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([x, y], m), {}, "nothing that it computes depends on its input y"),
        (([x], (x.sum(1) * y).sum()), {}, "depends on y, which is none of its inputs"),
        (([x, rate], m * rate), {}, r"its input rate is a scalar, which has no rows: broadcast=\[rate\]"),
        (([x], m), {"broadcast": [y]}, "broadcast names y, which is none of its inputs"),
        (([x, x], m), {}, "its inputs name x twice"),
        (([x, w], m), {}, "inputs holds w; give symbolic variables"),
        ((x, m), {}, "inputs is x; give a list"),
        (([x], m), {"updates": [(w, w + x.max())], "combine": [(m, "mean")]}, r"the update of w depends on the rows of x by another way"),
        (([x], squares), {"combine": [(m, "mean")]}, "depends on mean of all rows, and on rows beside"),
        (([x],), {"combine": [(m, "mean"), (squares, "mean")]}, "combine names mean, and mean of which it is made"),
        (([x],), {"combine": [(m, "mean"), (m, "sum")]}, "names mean twice, as 'mean' and 'sum'"),
        (([x],), {"combine": [m]}, "combine holds mean; give pairs"),
        (([x], [m, 3]), {}, "3 is no expression of an array"),
        (([x], (m, "men")), {}, 'did you mean "mean"'),
        (([x], pt.random.shared_rng(np.random.default_rng(1)).normal(size=x.shape)[1].sum()), {}, "it draws random numbers"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, options, message):
    """When the function is built, before anything runs."""
    with pytest.raises((TypeError, ValueError), match=message):
        synk.contrib.pytensor.function(*arguments, **options)


def test_values_that_do_not_fit():
    """Other axes, lengths and dtypes than the graph's raise, and change nothing."""
    x, i, fixed = pt.matrix("x"), pt.ivector("i"), pt.tensor("fixed", shape=(None, 6), dtype="float32")
    count = pytensor.shared(np.float32(0), "count")
    f = synk.contrib.pytensor.function([x, i], updates=[(count, count + 1)], combine=[(x.sum() + i.sum(), "sum")])
    f(X, Y)
    with pytest.raises(ValueError, match=r"its input x has shape \(\d+,\) on a replica; expected \(any, any\)"):
        f(Y.astype(np.float32), Y)
    with pytest.raises(TypeError, match=r"its input i is of float32; the graph says int32"):
        f(X, X[:, 0])
    f(X.astype(np.float16), Y.astype(np.int8))
    assert count.get_value() == 2
    with pytest.raises(ValueError, match=r"expected \(any, 6\)"):
        synk.contrib.pytensor.function([fixed], fixed.mean())(X[:, :5])
    with pytest.raises(ValueError, match=r"wide: it is of float64, but JAX has 64 bits switched off"):
        synk.contrib.pytensor.shared(pytensor.shared(np.zeros(3), "wide"))
    with pytest.raises(ValueError, match="is of int64, but JAX has 64 bits switched off"):
        synk.contrib.pytensor.shared(pytensor.shared(2**40, "wide"))
    with pytest.raises(TypeError, match="is no shared variable of PyTensor's"):
        synk.contrib.pytensor.shared(count.get_value())


def test_names_that_python_or_synk_has():
    """Inputs without a name, of one name, or of an option's, go by position."""
    inputs = [pt.vector(), pt.vector("batch"), pt.vector("x"), pt.vector("x"), pt.vector("lambda")]
    f = synk.contrib.pytensor.function(inputs, (sum(v.sum() * i for i, v in enumerate(inputs)), "sum"))
    rows = np.ones(5, np.float32)
    assert f(rows, rows, rows, rows, rows) == 50
    assert f(rows, rows, rows, rows, rows, batch=2) == 20


@pytest.mark.smoke
def test_graphs_of_64_bits():
    """Importing the module switches JAX to 64 bits where PyTensor's own numbers have them, its default."""
    program = """
import numpy as np, pytensor, pytensor.tensor as pt, synk, synk.contrib.pytensor
import jax; assert jax.config.jax_enable_x64
x, y, w = pt.vector("x"), pt.vector("y"), pytensor.shared(0.0, "w")
cost = ((w * x - y) ** 2).mean()
small = pt.fvector("small")
g = pt.grad(cost, w)
synk.init(3)
step = synk.contrib.pytensor.function([x, y], cost, updates=[(w, w - 0.01 * g)], combine=[(g, "mean")])
rows = np.arange(7.0)
for _ in range(200): found = step(rows, 3 * rows)
assert found.dtype == np.float64 and abs(w.get_value() - 3) < 1e-14, w.get_value()
f = synk.contrib.pytensor.function([small], [(small * 2, "concat"), small.mean()])
assert [v.dtype for v in f(np.ones(5, np.float32))] == [np.float32] * 2
"""
    done = harness.python("-c", program, JAX_NUM_CPU_DEVICES="3", PYTENSOR_FLAGS="")
    assert done.returncode == 0, done.stderr
