"""Theano's `function` on several devices, after its tutorial: prints `Final model: 100.0 % right`.

`updates`, `givens`, `borrow` and `output_subset` one by one, then the logistic regression. Expressions of symbols are
functions of arrays here, so `T.grad` is `jax.grad`, and what is called is compiled when it is called.

    python examples/ports/theano_functions.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import synk

N, FEATURES, STEPS = 401, 784, 1000  # on three replicas: 134 134 133 rows


def logistic_regression():
    """Two classes at random, and weights enough to tell them apart."""
    rng = np.random.default_rng(0)
    D = rng.standard_normal((N, FEATURES), np.float32), rng.integers(0, 2, N).astype(np.float32)

    # Shared variables: theano.shared(value, name) is synk.shared(value, name).
    w = synk.shared(rng.standard_normal(FEATURES, np.float32), name="w")
    b = synk.shared(np.float32(0), name="b")

    def p_1(x, w, b):
        return jax.nn.sigmoid(x @ w + b)  # the probability that the target is 1

    def cost(params, x, y):
        w, b = params
        xent = jax.nn.softplus(x @ w + b) - y * (x @ w + b)  # cross-entropy
        return xent.mean() + 0.01 * (w**2).sum()

    # train = theano.function([x, y], [prediction, xent], updates=[(w, w - 0.1 * gw), (b, b - 0.1 * gb)])
    @synk.function(outputs=["concat", "mean", "mean"])
    def train(x, y):
        value, grads = jax.value_and_grad(cost)((w.value, b.value), x, y)
        return [p_1(x, w.value, b.value) > 0.5, value, grads]

    @train.then
    def train(outputs):
        prediction, value, (gw, gb) = outputs
        w.value -= 0.1 * gw
        b.value -= 0.1 * gb
        return prediction, value

    # predict = theano.function([x], prediction)
    predict = synk.function(lambda x: p_1(x, w.value, b.value) > 0.5, outputs="concat")

    train.check(*D)  # on one device and on all
    for _ in range(STEPS):
        prediction, value = train(*D)
    right = float(np.mean(predict(D[0]) == D[1]))
    print(f"cost {value:.3f}, b = {b.get_value():.3f}, |w| = {np.linalg.norm(w.get_value()):.3f}")
    assert prediction.shape == (N,)
    return right


def updates():
    """An accumulator: updates in the function are each replica's own, those of `then` are of all rows."""
    state = synk.shared(np.int32(0), name="state")

    @synk.function(reduce="sum")
    def accumulator(inc):
        return jnp.sum(inc)

    @accumulator.then
    def accumulator(inc):
        old = state.value
        state.value = old + inc
        return old  # as there: the value before the update

    assert [int(accumulator(np.array(inc, np.int32))) for inc in ([1], [300, 0])] == [0, 1]
    assert state.get_value() == 301
    state.set_value(np.int32(-1))
    assert accumulator(np.array([3], np.int32)) == -1 and state.get_value() == 2
    # function.copy(swap={state: other}) there: here, a function of the variable makes both.


def givens():
    """`givens` put something in place of an input: here an argument with a default, or a function around a function."""
    state, data = synk.shared(np.float32(2), name="state"), np.arange(6, dtype=np.float32)

    def fn(inc, foo):
        return inc.sum() * 2 + foo

    skip_shared = synk.function(lambda inc, foo: fn(inc, foo), ["inc"], reduce="mean")  # foo given by the caller
    assert skip_shared(data[:1], 3.0) == 3
    from_state = synk.function(lambda inc: fn(inc, state.value), reduce="mean")  # givens=[(foo, state)]
    assert from_state(data[:1]) == 2
    rows = synk.data(data, place="scatter")  # givens={x: train_x[index * n:(index + 1) * n]}: rows by batch
    assert synk.function(jnp.sum)(rows, batch=slice(2, 4)) == 5


def borrow():
    """Without `borrow` values are copied, both ways; with it memory may be shared, where that saves a copy."""
    np_array, lent = np.ones(2, np.float32), np.ones(2, np.float32)
    s_default, s_true = synk.shared(np_array), synk.shared(lent, borrow=True)
    np_array += 1  # as for `lent`, it is the variable's now: what a write to it would do, nobody says
    assert s_default.get_value().tolist() == s_true.get_value().tolist() == [1, 1]
    view = s_default.get_value(borrow=True)  # of NumPy's, and without a copy where that can be
    assert isinstance(view, np.ndarray)
    s_default.set_value(np_array, borrow=True)
    assert s_default.get_value(rank=1).tolist() == [2, 2]


def output_subset():
    """Some outputs, by place or by name; updates happen all the same."""
    x = np.arange(7, dtype=np.float32)
    f = synk.function(lambda x: [jnp.sum(x), jnp.max(x), x + 1], outputs=["sum", "max", "concat"])
    assert [float(value) for value in f(x, output_subset=[1, 0])] == [6, 21]
    g = synk.function(lambda x: {"sum": x.sum(), "max": x.max()}, outputs={"sum": "sum", "max": "max"})
    assert [float(value) for value in g(x, output_subset=["max"])] == [6]


if __name__ == "__main__":
    synk.init(3)
    for section in (updates, givens, borrow, output_subset):
        section()
    right = logistic_regression()
    print(f"Final model: {100 * right:.1f} % right")
    assert right == 1
