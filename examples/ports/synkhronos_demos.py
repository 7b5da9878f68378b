"""Synkhronos's demos 1 to 5, and the shared-variable example of its documentation: prints `6 of 6 passed`.

Every call has the name it had there. What was a Theano expression is a function of arrays; results reduce by "avg"
there and by "sum" here unless a call names an op, so each one is named.

    python examples/ports/synkhronos_demos.py
"""

import jax.numpy as jnp
import numpy as np

import synk.contrib.synkhronos as synk

N = synk.fork(2)  # or as many devices as there are: synk.fork()
rng = np.random.default_rng(0)


def randn(*shape):
    return rng.standard_normal(shape, np.float32)


def close(*pairs):
    assert all(np.allclose(a, b, atol=1e-4) for a, b in pairs)


def demo_1():
    """Functions: reduce operations, and slices for less memory. (1000 rows; here 1001, on two replicas.)"""

    @synk.function(inputs=["x"], outputs=["avg", "sum", "max"])  # y is broadcast, as by bcast_inputs=[y]
    def f(x, y):
        z = x @ y
        return [z.mean(0), z.sum(0), z.max(0)]

    x, y = 0.01 * randn(1001, 10), randn(10, 5)
    serial = f.serial(x, y)  # was f.as_theano
    x_synk, y_synk = synk.build_inputs(x, y)  # or synk.data(x); or nothing: functions take arrays
    close(*zip(f(x_synk, y_synk), serial, strict=True))
    close(*zip(f(x, y, num_slices=4), serial, strict=True))


def demo_2():
    """Data objects: read and written as arrays, of any length."""
    x = synk.data(randn(5, 4))
    x[3] = 0
    assert x.shape == (5, 4) and len(x) == 5 and not x[2:4][1].any()
    x[:] = randn(5, 4)
    x.set_value(randn(2100, 4))  # holds that array, without a copy: nothing to allocate, or to allocate in excess
    x.set_length(2000)
    assert x.size == 8000
    x.free()  # was free_memory
    x.set_value(np.zeros((100, 4)))  # float64: converted to the dtype it has, as with force_cast=True
    assert (x.shape, x.dtype) == ((100, 4), np.float32)


def demo_3():
    """Shared variables: each replica has its own copy, of any length; collectives move them."""
    s_x, s_y = synk.shared(np.ones((100, 4), np.float32), name="s_x"), synk.shared(np.zeros((4, 5), np.float32))
    f = synk.function(lambda: (s_x.value @ s_y.value).mean(0), outputs="avg")  # found, also as sliceable_shareds
    assert synk.get_lengths(s_x) == [100] * N and synk.get_shapes(s_x) == [(100, 4)] * N
    x, y = randn(8 * N, 4), randn(4, 5)
    synk.scatter(s_x, x)
    synk.broadcast(s_y, y)
    close((synk.gather(s_x, nd_up=0), x), (synk.get_value(1, s_x), x[8:16]), (synk.gather(s_y)[1], y))
    close((f(), (x @ y).mean(0)), (f(num_slices=2), (x @ y).mean(0)))
    parts = synk.gather(s_x, nd_up=1)
    synk.all_reduce(s_x, op="avg")
    close(*[(part, parts.mean(0)) for part in synk.gather(s_x, nd_up=1)])
    synk.set_value(1, s_x, parts[1])  # on that replica alone
    close((synk.get_value(1, s_x), parts[1]), (synk.get_value(0, s_x), parts.mean(0)))
    synk.all_gather(s_x)
    assert synk.get_shapes(s_x) == [(8 * N, 4)] * N
    synk.get_lengths(synk.shared(np.zeros((5, 5))))  # one that no function uses: raised an error there


def demo_4():
    """`batch` picks rows before they are scattered; minibatch data has one row for each."""

    @synk.function(inputs=["x", "w"], outputs="sum")
    def f(x, w, y):
        return ((x + w) @ y).sum(0)

    x, w, y = 0.01 * randn(1000, 10), 0.01 * randn(101, 10), randn(10, 5)
    x_data, w_data = synk.data(x), synk.data(w, minibatch=True)
    for batch in (101, slice(100, 201), rng.integers(0, 999, 101)):
        rows = x[:batch] if isinstance(batch, int) else x[batch]
        close((f(x_data, w_data, y, batch=batch), f.serial(rows, w, y)))
        close((f(x_data, w_data, y, batch=batch, num_slices=4), f.serial(rows, w, y)))


def demo_5():
    """`batch_s` picks rows of what is scattered already: the same on each replica, or each its own."""
    s_x, s_y = synk.shared(np.empty((200, 10), np.float32)), synk.shared(np.empty((10, 5), np.float32))
    f = synk.function(lambda: (s_x.value @ s_y.value).sum(0), outputs="sum")
    x, y = 0.01 * randn(200 * N, 10), randn(10, 5)
    synk.scatter(s_x, x)
    synk.broadcast(s_y, y)
    one, some = slice(100, 200), rng.integers(0, 200, 100)
    each = [slice(i, 100 + i) for i in range(N)], [rng.integers(0, 200, 100) for _ in range(N)]
    for batch_s in (one, some, *each):
        picks = batch_s if isinstance(batch_s, list) else [batch_s] * N
        rows = np.concatenate([part[pick] for part, pick in zip(np.split(x, N), picks, strict=True)])
        close((f(batch_s=batch_s), (rows @ y).sum(0)), (f(batch_s=batch_s, num_slices=4), (rows @ y).sum(0)))


def documented():
    """Updates of a shared variable: each replica's own, until they are combined."""
    s = synk.shared(np.ones(2, np.float32), name="s")

    @synk.function
    def f(x):
        s.value = jnp.sum(x * s.value, 0)  # was updates=[(s, ...)]

    x = np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.float32)
    f.serial(x, update=True)  # on one device: all rows
    close((s.value, [10, 10]))
    s.set_value(np.ones(2, np.float32))
    f(x)
    close((s.get_value(), [3, 3]), (synk.gather(s, nd_up=1), [[3, 3], [7, 7]]))
    synk.reduce(s, op="sum")  # to rank 0, in place
    close((s.get_value(), [10, 10]), (synk.gather(s, nd_up=1), [[10, 10], [7, 7]]))
    synk.broadcast(s, np.ones(2, np.float32))
    f(x)
    synk.all_reduce(s, op="sum")
    close((synk.gather(s, nd_up=1), [[10, 10], [10, 10]]))


if __name__ == "__main__":
    passed = [demo() or demo.__name__ for demo in (demo_1, demo_2, demo_3, demo_4, demo_5, documented)]
    print(f"{len(passed)} of 6 passed on {synk.group()}: {', '.join(passed)}")
    assert len(passed) == 6
