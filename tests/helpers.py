"""What several test files need: groups, the oracle's split of rows, and strategies that draw calls."""

import contextlib
import functools
import mmap
import os
import signal
import threading
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from jax._src import core  # noqa: TID251  # to mend what only JAX can break

import synk

# JAX's plugin, for CUDA 12 or 13, compiles for GPUs that are not here.
HAS_PLUGIN = find_spec("jax_plugins") is not None and any(find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))
needs_plugin = pytest.mark.skipif(not HAS_PLUGIN, reason="needs the extra: pip install '.[target]'")


def needs_devices(n):
    """Mark a test of what lies on several devices, or travels between them: where there are fewer it is skipped."""
    return pytest.mark.skipif(jax.device_count() < n, reason=f"needs {n} devices")


tells_no_memory = pytest.mark.skipif(jax.config.jax_platforms != "cpu", reason="a GPU tells how much memory it has")

# Replicas on as many devices, or on one.
GROUPS = [("devices", 1), ("devices", 2), ("simulated", 3)]


def slow(*values):
    """Mark parameters that only `-m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def smoke(*values):
    """Mark parameters that the oldest and the newest JAX run too."""
    return pytest.param(*values, marks=pytest.mark.smoke)


def slow_but(quick, values):
    """All these values, of which only `-m slow` hears of those that are not quick."""
    return [value if value in quick else slow(*(value if isinstance(value, tuple) else (value,))) for value in values]


def first_of(quick, *others):
    """These parameters, of which only `-m slow` hears of all but the first."""
    return [quick, *map(slow, others)]


def also_simulated(fixture):
    """The replicas of `group` or `four` on devices, and for slow tests on one: they hold and combine by programs of their own."""
    return pytest.mark.parametrize(fixture, first_of("devices", "simulated"), indirect=True)


def few(examples):
    """So many hypothesis examples: each may compile, so none has a deadline, and every run draws the same."""
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None)


@functools.cache
def group_of(kind, n):
    """A group, made once, so that functions keep what they compiled for it.

    Where there are fewer devices than replicas, as on a machine with one GPU, the replicas are simulated.
    """
    is_simulated = kind == "simulated" or n > jax.device_count()
    with synk.simulate(n) if is_simulated else synk.init(n) as group:
        return group


def interrupted(act, seconds, number=signal.SIGINT, error=KeyboardInterrupt):
    """Act again and again until a signal that comes after so many seconds has been raised; how often that returned."""
    is_over, returned = threading.Event(), 0

    def press(wait=seconds):
        while not is_over.wait(wait):
            os.kill(os.getpid(), number)
            wait = 1.0  # then once more: JAX's own callback of the garbage collector swallows one in thousands

    presser = threading.Thread(target=press)
    try:
        presser.start()
        while True:
            act()
            returned += 1
    except error:
        return returned
    except SystemError as other:  # as Python 3.11 tells of a Ctrl-C in ast.parse (python/cpython#106905)
        if "AST constructor" not in str(other):
            raise
        return returned
    finally:
        is_over.set()
        presser.join()
        heal_jax()


def heal_jax():
    """Between two lines of JAX's `Primitive.bind` Ctrl-C leaves it without a trace, and nothing of JAX runs any more."""
    if core.trace_ctx.trace is None:
        core.trace_ctx.set_trace(core.eval_trace)


class Bar:
    """A progress bar, as tqdm's."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __iter__(self):
        yield from self.iterable


def parts_of(x, replicas, slices=1):
    """The oracle's split: for each replica the list of its slices, longer first; none where it has no rows."""
    return [
        [part for part in np.array_split(mine, min(slices, max(len(mine), 1))) if len(part)]
        for mine in np.array_split(x, replicas)
    ]


def numbers(rows, columns=2, seed=0):
    """Rows of distinct quarters, some negative, whose sums float32 holds exactly."""
    count = rows * columns
    order = np.random.default_rng([seed, rows]).permutation(count)
    return ((order - count // 2) / 4).reshape(rows, columns).astype(np.float32)


# How all rows combine by each op that means the same for any parts: by methods that arrays of NumPy and of JAX have.
SERIAL = {
    "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "avg": lambda x: x.mean(0), "max": lambda x: x.max(0),
    "min": lambda x: x.min(0), "prod": lambda x: x.prod(0), "any": lambda x: x.any(0), "all": lambda x: x.all(0),
    "concat": lambda x: x, "gather": lambda x: x,
}  # fmt: skip
ELEMENTWISE = [op for op in SERIAL if op not in ("concat", "gather")]
DIFFERENTIABLE = [op for op in SERIAL if op not in ("any", "all")]


def combined(x, ops=SERIAL):
    """The rows combined by each op, of numbers for which the op says something: products near 1, and conditions."""
    of_op = {"prod": 1 + x / 64, "any": x > 4, "all": x > -4}
    return {op: SERIAL[op](of_op.get(op, x)) for op in ops}


def mapped(x):
    """A copy as of a file that is mapped: no memory to take rows from as they are wanted."""
    copy = np.frombuffer(mmap.mmap(-1, max(x.nbytes, 1)), np.uint8)[: x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def rows_for(n):
    """Numbers of rows around the boundaries of `n` replicas: few of small groups, all of those in slow tests."""
    rows = {1, n - 1, 2 * n, 2 * n + 1}
    return sorted((rows if n <= 3 else rows | {n, n + 1, 2 * n - 1, 5 * n - 1, 5 * n + 1, 31}) - {0})


@st.composite
def batches(draw, count):
    """A number of rows, and a batch that selects `count` of them."""
    extra = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["all", "first", "slice", "mask", "indexes"]))
    if kind == "all":
        return count, None
    if kind == "first":
        return count + extra, count
    if kind == "slice":
        step = draw(st.sampled_from([1, 2, -1, -2]))
        last = extra + (count - 1) * abs(step)
        if step > 0:
            return last + 1 + extra, slice(extra, last + 1, step)
        return last + 1, slice(last, extra - 1 if extra else None, step)
    if kind == "mask":
        mask = np.arange(count + extra) < count
        return len(mask), np.random.default_rng(draw(st.integers(0, 9))).permutation(mask)
    rows = max(1, count - 2 + extra)
    index = np.random.default_rng(draw(st.integers(0, 9))).integers(-rows, rows, count)
    return rows, draw(st.sampled_from([index, index.astype(np.int32), index.tolist()]))


@st.composite
def calls(draw, n):
    """Rows of the input, a batch, and a number of slices."""
    rows, batch = draw(batches(draw(st.sampled_from(rows_for(n)))))
    return rows, batch, draw(st.sampled_from([1, 3] if n <= 3 else [1, 2, 3, 5]))


def chosen(x, batch):
    """The rows that a batch picks, as NumPy picks them."""
    return x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]


def assert_close(got, want, rtol=1e-5, atol=1e-5):
    """Equal trees of equal shapes, to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol)


def assert_same(got, want):
    """Equal trees of equal shapes and dtypes, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(map(np.asarray, jax.tree.leaves(got)), map(np.asarray, jax.tree.leaves(want)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()


def values(*variables):
    """What each replica holds of each variable."""
    return [[v.get_value(rank) for rank in range(synk.size())] for v in variables]


@contextlib.contextmanager
def unchanged(*variables):
    """Whatever happens inside, the variables hold the same after it."""
    before = values(*variables)
    yield
    assert_same(values(*variables), before)


def raised_by(act):
    """What a call raises."""
    try:
        act()
    except Exception as error:
        return error
    pytest.fail("it did not raise")


def members(value):
    return {name for name in dir(value) if not name.startswith("_")}
