"""Programs of Synkhronos, with one import changed and functions of JAX for Theano's graphs."""

import numpy as np
import pytest

import synk.contrib.synkhronos as synk

RNG = np.random.default_rng(0)


def randn(*shape):
    return RNG.standard_normal(shape, np.float32)


@pytest.fixture(params=[1, 3])
def n_gpus(request):
    return synk.fork(request.param)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_functions(n_gpus):
    """Its demo 1: "avg" unless an output names an op, whole and in slices; rows that do not divide."""
    f = synk.function(lambda x, y: [(x @ y).mean(0), (x @ y).sum(0), (x @ y).max(0)], ["x"], ["avg", "sum", "max"])
    average = synk.function(lambda x, y: (x @ y).mean(0), inputs=["x"])
    synk.distribute()
    x, y = 0.01 * randn(100, 10), randn(10, 5)
    x_synk, y_synk = synk.build_inputs(x, y)
    for slices in (1, 4):
        for found, serial in zip(f(x_synk, y_synk, num_slices=slices), f.serial(x, y), strict=True):
            close(found, serial)
        close(average(x_synk, y_synk, num_slices=slices), (x @ y).mean(0))


def test_a_decorator_averages():
    """Bare or with options."""
    assert float(synk.function(lambda x: x.mean())(np.arange(5.0))) == 2

    @synk.function(inputs=["x"])
    def f(x, y):
        return x.mean() + y

    assert float(f(np.arange(5.0), 1.0)) == 3


def test_data():
    """Its demo 2: read and written as an array, of any length, whatever is said of memory."""
    x = synk.data(randn(5, 4))
    x[3] = 0
    assert x.data.shape == x.shape == (5, 4) and len(x) == 5 and not x[2:4][1].any()
    x.set_value(randn(2100, 4), oversize=1.1)
    x.set_length(2000)
    x[:] = np.ones((2000, 4), np.float32)
    assert x.size == x.alloc_size == 8000 and x.data.all()
    x.free_memory()
    x.set_value(np.zeros((100, 4)), force_cast=True)
    assert (x.shape, x.dtype, x.data.dtype) == ((100, 4), np.float32, np.float32)


def test_shared_variables(n_gpus):
    """Its demo 3: collectives by the names that their arguments have there, "avg" by default."""
    s_x, s_y = synk.shared(np.ones((100, 4), np.float32), name="s_x"), synk.shared(np.zeros((4, 5), np.float32))
    f = synk.function(lambda: (s_x.value @ s_y.value).mean(0))
    assert synk.get_lengths(s_x) == [100] * n_gpus and synk.get_shapes(s_x) == [(100, 4)] * n_gpus
    x, y = randn(8 * n_gpus, 4), randn(4, 5)
    synk.scatter(s_x, values=synk.data(x))
    synk.broadcast(shared_vars=s_y, values=y)
    close(synk.gather(s_x, nd_up=0), x)
    close(synk.get_value(n_gpus - 1, s_x), x[-8:])
    close(f(), (x @ y).mean(0))
    close(f(num_slices=2), (x @ y).mean(0))
    parts = synk.gather(s_x, nd_up=1)
    synk.all_reduce(s_x)
    for part in synk.gather(s_x, nd_up=1):
        close(part, parts.mean(0))
    synk.set_value(rank=n_gpus - 1, shared_vars=s_x, values=parts[0], batch=slice(2, 6))
    assert synk.get_shapes((s_x, s_y)) == ([(8, 4)] * (n_gpus - 1) + [(4, 4)], [(4, 5)] * n_gpus)
    synk.all_gather(s_x)
    assert synk.get_lengths(s_x) == [8 * n_gpus - 4] * n_gpus


def test_several_variables(n_gpus):
    """One value for each, a tuple of results; all change, or none."""
    pair = synk.shared(np.zeros(2, np.float32)), synk.shared(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="2 variables need a list of as many values"):
        synk.set_value(0, pair, [np.zeros(2, np.float32)])
    with pytest.raises(TypeError, match="float32"):
        synk.set_value(0, pair, [np.ones(2, np.float32), np.ones(3, np.float32)])
    synk.set_value(0, pair, [np.full(2, 2, np.float32), np.arange(3, dtype=np.int32)])
    first, second = synk.get_value(0, pair, borrow=True)
    assert (first.tolist(), second.tolist()) == ([2, 2], [0, 1, 2])
    sums, lengths = synk.reduce(pair, op="sum", in_place=False), synk.get_lengths(pair)
    assert (sums[0].tolist(), sums[1].tolist(), lengths) == ([2, 2], [0, 1, 2], ([2] * n_gpus, [3] * n_gpus))


def test_fork_counts():
    """It returns the number of replicas; members are the group's."""
    n = synk.fork(2)
    assert (n, 8 * n, n.size, n.platform, synk.size(), synk.group().size) == (2, 16, 2, synk.group().platform, 2, 2)
