"""Synkhronos's demos, their graphs in PyTensor as they were in Theano: prints `5 of 5 passed`.

    python examples/ports/pytensor_demos.py    # needs the extra `pytensor`

`theano.tensor as T` is `pytensor.tensor as T`, and `synk.function` is `synk.contrib.pytensor.function`: what
`bcast_inputs=` held is among the inputs, and named by `broadcast=`; results reduce by the op that they name. Updates
are those of one device: what depends on rows is named in `combine=`, where they were each replica's own until a
collective put them right. The demo of data objects has no graph; it is in synkhronos_demos.py.
"""

import os

os.environ.setdefault("PYTENSOR_FLAGS", "floatX=float32")

import numpy as np
import pytensor
import pytensor.tensor as T

import synk
import synk.contrib.pytensor
from synk.contrib import synkhronos

N = synk.init(2).size  # or as many devices as there are: synk.init()
rng = np.random.default_rng(0)


def randn(*shape):
    return rng.standard_normal(shape, np.float32)


def close(*pairs):
    assert all(np.allclose(a, b, atol=1e-4) for a, b in pairs)


def demo_1():
    """Functions: reduce operations, and slices for less memory. (1000 rows; here 1001, on two replicas.)"""
    x, y = T.matrix("x"), T.matrix("y")
    z = x.dot(y)
    outputs = [z.mean(axis=0), z.sum(axis=0), z.max(axis=0)]
    f = synk.contrib.pytensor.function([x, y], list(zip(outputs, ("avg", "sum", "max"), strict=True)), broadcast=[y])
    x_dat, y_dat = 0.01 * randn(1001, 10), randn(10, 5)
    alone = pytensor.function([x, y], outputs)(x_dat, y_dat)  # was f.as_theano
    close(*zip(f(x_dat, y_dat), alone, strict=True))
    close(*zip(f(x_dat, y_dat, num_slices=4), alone, strict=True))


def demo_3():
    """Shared variables: each replica has its own copy, of any length; collectives move them."""
    s_x = pytensor.shared(np.ones((100, 4), np.float32), "s_x")
    s_y = pytensor.shared(np.zeros((4, 5), np.float32), "s_y")
    f = synk.contrib.pytensor.function([], (s_x.dot(s_y).mean(axis=0), "avg"))
    held_x, held_y = synk.contrib.pytensor.shared(s_x), synk.contrib.pytensor.shared(s_y)
    assert synkhronos.get_lengths(held_x) == [100] * N and synkhronos.get_shapes(held_x) == [(100, 4)] * N
    x, y = randn(8 * N, 4), randn(4, 5)
    synk.scatter(held_x, x)
    synk.broadcast(held_y, y)
    close((synk.gather(held_x, nd_up=0), x), (held_x.get_value(1), x[8:16]), (s_y.get_value(), y))
    close((f(), (x @ y).mean(0)), (f(num_slices=2), (x @ y).mean(0)))
    parts = synk.gather(held_x, nd_up=1)
    synk.all_reduce(held_x, op="avg")
    close((synk.gather(held_x, nd_up=1), [parts.mean(0)] * N), (s_x.get_value(), parts.mean(0)))


def demo_4():
    """`batch` picks rows before they are scattered; minibatch data has one row for each."""
    x, w, y = T.matrices("x", "w", "y")
    f = synk.contrib.pytensor.function([x, w, y], ((x + w).dot(y).sum(axis=0), "sum"), broadcast=[y])
    x_dat, w_dat, y_dat = 0.01 * randn(1000, 10), 0.01 * randn(101, 10), randn(10, 5)
    x_data, w_data = synk.data(x_dat), synk.data(w_dat, minibatch=True)
    for batch in (101, slice(100, 201), rng.integers(0, 999, 101)):
        rows = x_dat[:batch] if isinstance(batch, int) else x_dat[batch]
        wanted = ((rows + w_dat) @ y_dat).sum(0)
        close((f(x_data, w_data, y_dat, batch=batch), wanted))
        close((f(x_data, w_data, y_dat, batch=batch, num_slices=4), wanted))


def demo_5():
    """`batch_s` picks rows of what is scattered already: the same on each replica, or each its own."""
    s_x, s_y = (pytensor.shared(np.zeros(shape, np.float32)) for shape in ((200, 10), (10, 5)))
    f = synk.contrib.pytensor.function([], (s_x.dot(s_y).sum(axis=0), "sum"))
    x, y = 0.01 * randn(200 * N, 10), randn(10, 5)
    synk.scatter(synk.contrib.pytensor.shared(s_x), x)
    s_y.set_value(y)  # on every replica, as synk.broadcast
    one, some = slice(100, 200), rng.integers(0, 200, 100)
    each = [slice(i, 100 + i) for i in range(N)], [rng.integers(0, 200, 100) for _ in range(N)]
    for batch_s in (one, some, *each):
        picks = batch_s if isinstance(batch_s, list) else [batch_s] * N
        rows = np.concatenate([part[pick] for part, pick in zip(np.split(x, N), picks, strict=True)])
        close((f(batch_s=batch_s), (rows @ y).sum(0)), (f(batch_s=batch_s, num_slices=4), (rows @ y).sum(0)))


def documented():
    """An update that depends on rows: combined over all of them, where a reduce had to follow."""
    s, x = pytensor.shared(np.ones(2, np.float32), "s"), T.matrix("x")
    new = (x * s).sum(axis=0)
    f = synk.contrib.pytensor.function([x], updates=[(s, new)], combine=[(new, "sum")])
    f(np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.float32))
    close((s.get_value(), [10, 10]), (synk.gather(synk.contrib.pytensor.shared(s), nd_up=1), [[10, 10]] * N))
    try:
        synk.contrib.pytensor.function([x], updates=[(s, new)])
    except ValueError as error:
        assert "depends on the rows of x by another way than combine" in str(error)


if __name__ == "__main__":
    passed = [demo() or demo.__name__ for demo in (demo_1, demo_3, demo_4, demo_5, documented)]
    print(f"{len(passed)} of 5 passed on {synk.group()}: {', '.join(passed)}")
    assert len(passed) == 5
