"""Scan and pairs: prefix combinations by any associative op, and all pairs by a ring, for any rows and replicas."""

import dataclasses
import gc
import itertools
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import (
    DIFFERENTIABLE,
    ELEMENTWISE,
    GROUPS,
    SERIAL,
    assert_same,
    group_of,
    needs_devices,
    numbers,
    slow,
    slow_but,
)

EVERY = [*GROUPS[1:], ("devices", 8)]


def then(f, g):
    """Of affine maps: f, then g."""
    return g[0] * f[0], g[0] * f[1] + g[1]


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [slow(1), 17])
@pytest.mark.parametrize(("kind", "n"), slow_but(GROUPS[1:2], EVERY))
def test_scan(kind, n, rows):
    """Sums and maxima of integers, bit for bit, both ways, with and without a row's own; and what does not commute."""
    with group_of(kind, n):
        x = np.random.default_rng(rows).integers(-9, 9, (rows, 2)).astype(np.int32)
        for reverse, exclusive in itertools.product((False, True), repeat=2):
            want = np.cumsum(x[::-1], 0)[::-1] if reverse else np.cumsum(x, 0)
            got = synk.contrib.scan(jnp.add, x, identity=0, reverse=reverse, exclusive=exclusive)
            assert_same(got, (want - x if exclusive else want).astype(np.int32))
        held = synk.shared(x, name="held")
        synk.scatter(held, x)
        for given in (synk.data(x, place="scatter"), synk.data(x), jnp.asarray(x), held):
            assert_same(synk.contrib.scan(jnp.maximum, given), np.maximum.accumulate(x))
        assert_same(jax.jit(lambda x: synk.contrib.scan(jnp.add, x))(x), np.cumsum(x, 0).astype(np.int32))
        maps = np.random.default_rng(rows).uniform(0.5, 1, (2, rows)).astype(np.float32)
        for reverse in (False, True):
            want = jax.lax.associative_scan(then, tuple(maps), reverse=reverse)
            got = synk.contrib.scan(then, tuple(maps), reverse=reverse)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


@pytest.mark.parametrize("rows", [1000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_recurrence(rows):
    """y = a y + b, one row after another."""
    rng, y, want = np.random.default_rng(0), 0.0, []
    a, b = rng.uniform(0.5, 1, rows).astype(np.float32), rng.normal(size=rows).astype(np.float32)
    for u, v in zip(a.tolist(), b.tolist(), strict=True):
        y = u * y + v
        want.append(y)
    with group_of("devices", 2):
        np.testing.assert_allclose(synk.contrib.scan(then, (a, b))[1], want, rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
@pytest.mark.parametrize(("rows", "others"), [slow(1, 1), (7, 20)])
@pytest.mark.parametrize(("kind", "n"), slow_but(GROUPS[1:2], GROUPS[1:]))
def test_pairs(kind, n, rows, others):
    """Every op, trees, rows with themselves, all pairs as they are, and gradients."""
    x, y = numbers(rows, 3), numbers(others, 3) + 0.5
    far = np.abs(x[:, None] - y[None])

    def distance(a, b):
        return jnp.abs(a - b)

    with group_of(kind, n):
        for op in DIFFERENTIABLE:
            want = SERIAL[op](far.swapaxes(0, 1)) if op in ELEMENTWISE else far
            np.testing.assert_allclose(synk.contrib.pairs(distance, x, y, reduce=op), want, rtol=1e-5)
        any_and_all = (
            synk.contrib.pairs(lambda a, b: {"more": a > b}, x, y, reduce="any"),
            synk.contrib.pairs(jnp.greater, x, y, reduce="all"),
        )
        assert_same(any_and_all[0]["more"], (x[:, None] > y[None]).any(1))
        assert_same(any_and_all[1], (x[:, None] > y[None]).all(1))
        tree = {"x": x, "m": np.abs(x[:, 0])}
        got = synk.contrib.pairs(lambda a, b: b["m"] * (b["x"] - a["x"]), tree)
        np.testing.assert_allclose(
            got, (tree["m"][None, :, None] * (x[None] - x[:, None])).sum(1), rtol=1e-5, atol=1e-4
        )
        slope = jax.grad(lambda x: synk.contrib.pairs(lambda a, b: (a - b) ** 2, x, y).sum())(x)
        np.testing.assert_allclose(slope, 2 * (others * x - y.sum(0)), rtol=1e-4, atol=1e-4)


@needs_devices(8)
def test_results_stay(monkeypatch):
    """By "scatter" nothing is gathered, and no replica needs more than its rows, those that visit, and a block of pairs."""
    programs, compile = [], jax.stages.Lowered.compile

    def noted(lowered, *args, **kwargs):
        programs.append(compile(lowered, *args, **kwargs))
        return programs[-1]

    def pull(a, b):
        return (b - a) / (((b - a) ** 2).sum() + 1e-2) ** 1.5

    with group_of("devices", 8), monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", noted)
        x = np.random.default_rng(0).normal(size=(4003, 3)).astype(np.float32)
        forces = synk.contrib.pairs(pull, x, outputs="scatter")
        sums = synk.contrib.scan(jnp.add, forces, reduce="scatter")
        assert isinstance(sums, synk.typing.Data)
        assert sums.place == "scatter"
        text = programs[0].as_text()
        assert re.search(r" collective-permute(-start)?\(", text)
        assert "all-gather" not in text
        assert programs[0].memory_analysis().temp_size_in_bytes < 2e6  # of 501 x 4003 pairs of 12 bytes: 24e6
    wide = x.astype(np.float64)
    apart = wide[None] - wide[:200, None]
    want = (apart / ((apart**2).sum(-1, keepdims=True) + 1e-2) ** 1.5).sum(1)
    np.testing.assert_allclose(forces[:200], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    np.testing.assert_allclose(sums[:], np.cumsum(forces[:].astype(np.float64), 0), rtol=1e-4, atol=1e-2)


def test_warm(monkeypatch):
    """The same op compiles once for as many rows, in each group; closed ones take theirs along."""
    count, compile = [0], jax.stages.Lowered.compile

    def counted(lowered, *args, **kwargs):
        count[0] += 1
        return compile(lowered, *args, **kwargs)

    def add(a, b):
        return a + b

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", counted)
        for kind, n in (("devices", 2), ("simulated", 3)) * 2:
            with group_of(kind, n):
                for seed in range(3):
                    x = np.random.default_rng(seed).integers(0, 9, 7).astype(np.int32)
                    assert_same(synk.contrib.scan(add, x), np.cumsum(x).astype(np.int32))
                    assert_same(synk.contrib.pairs(add, x), 7 * x + x.sum().astype(np.int32))
    assert count[0] == 4


X = np.arange(6.0, dtype=np.float32)
REFUSED = {
    "identity": (lambda: synk.contrib.scan(jnp.add, X, exclusive=True), ValueError, "exclusive leaves the first row"),
    "identity's tree": (lambda: synk.contrib.scan(jnp.add, X, identity=(0, 0)), ValueError, "identity has the tree"),
    "dtype": (lambda: synk.contrib.scan(lambda a, b: a > b, X), ValueError, r"op changes x from float32\[2\] to bool\[2\]"),
    "shape": (lambda: synk.contrib.scan(lambda a, b: a.sum(), X), ValueError, r"to float32\[\]"),
    "tree": (lambda: synk.contrib.scan(lambda a, b: (a, b), X), ValueError, "op changes the tree"),
    "rows": (lambda: synk.contrib.scan(then, (X, X[:3])), ValueError, r"x\[1\] has 3 rows, x\[0\] 6"),
    "no rows": (lambda: synk.contrib.pairs(jnp.add, X[:0]), ValueError, "0 rows"),
    "scalar": (lambda: synk.contrib.pairs(jnp.add, X, 3.0), ValueError, "y is a scalar and has no rows"),
    "nothing": (lambda: synk.contrib.scan(jnp.add, ()), ValueError, "which has no array"),
    "text": (lambda: synk.contrib.scan(jnp.add, np.array(["a"])), TypeError, "give numbers"),
    "op": (lambda: synk.contrib.pairs(jnp.add, X, reduce="stack"), ValueError, "reduce is 'stack'; use one of sum, mean"),
    "results": (lambda: synk.contrib.scan(jnp.add, X, reduce="sum"), ValueError, 'use "concat" or "scatter"'),
    "keys": (lambda: synk.contrib.scan(jnp.add, jax.random.split(jax.random.key(0))), TypeError, "holds typed PRNG keys"),
    "no function": (lambda: synk.contrib.scan(3, X), TypeError, "it is given 3; give a function of rows"),
    "fraction": (lambda: synk.contrib.scan(jnp.add, np.arange(3), identity=0.5, exclusive=True), ValueError, "is 0.5, which is no"),
    "monoid": (lambda: synk.contrib.pairs(lambda a, b: synk.Monoid(a, jnp.add), X), ValueError, "returns a Monoid or Weighted"),
    "rank": (lambda: synk.contrib.pairs(lambda a, b: a * synk.rank(), X), synk.SynkError, "only inside a synk function"),
    "inside": (lambda: synk.function(lambda x: synk.contrib.scan(jnp.add, x))(X), synk.SynkError, "not inside a synk function"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    """What cannot be combined says why; and right calls are right after it."""
    act, error, message = REFUSED[which]
    with group_of("devices", 2):
        for _ in range(2):
            with pytest.raises(error, match=message):
                act()
        assert_same(synk.contrib.scan(jnp.add, X), np.cumsum(X))


@pytest.mark.parametrize("device", [0, 5])
def test_of_an_array_on_one_device(device):
    """Eager transformations of what lies on one device alone, of the group or not."""
    with group_of("devices", 2):
        x = jax.device_put(X, jax.devices()[: device + 1][-1])
        assert_same(jax.grad(lambda x: synk.contrib.scan(jnp.add, x).sum())(x), np.arange(6, 0, -1, dtype=np.float32))
        assert_same(jax.grad(lambda x: synk.contrib.pairs(jnp.add, x).sum())(x), np.full(6, 12, np.float32))
        assert_same(jax.vmap(lambda x: synk.contrib.scan(jnp.add, x))(x[None]), np.cumsum(X)[None])


def test_a_variable_under_a_trace():
    """Its value of now would be kept, so it raises, as a function does; warm too."""
    with group_of("devices", 2):
        held = synk.shared(X, name="held")
        synk.scatter(held, X)
        for _ in range(2):
            with pytest.raises(synk.SynkError, match=r"shared variable held, of which jit"):
                jax.jit(lambda: synk.contrib.scan(jnp.add, held))()
            assert_same(synk.contrib.scan(jnp.add, held), np.cumsum(X))


@pytest.mark.parametrize(("kind", "n"), GROUPS)
def test_state_is_refused(kind, n):
    """A program is kept by its function alone, so that may not depend on a variable; each time, in any group."""
    with group_of(kind, n):
        w = synk.shared(np.float32(1), name="w")
        for _ in range(2):
            for act in (
                lambda: synk.contrib.pairs(lambda a, b: a * b * w.value, X),
                lambda: synk.contrib.scan(lambda a, b: a + b * w.value, X),
                lambda: synk.contrib.pairs(lambda a, b: setattr(w, "value", a) or a, X),
            ):
                with pytest.raises(synk.SynkError, match="its function uses the shared variable w"):
                    act()
        assert float(w.value) == 1


def test_gradients_of_uneven_rows():
    """Rows that fill a part up have none, also where they would overflow."""
    with group_of("devices", 2):
        x = np.array([1, 1, 1e20], np.float32)
        got = jax.grad(lambda x: synk.contrib.scan(jnp.multiply, x).sum())(x)
        np.testing.assert_allclose(
            got, jax.grad(lambda x: jax.lax.associative_scan(jnp.multiply, x).sum())(x), rtol=1e-6
        )


@dataclasses.dataclass(frozen=True)
class Scaled:
    by: float

    def __call__(self, a, b):
        return (a + b) * self.by


def test_equal_functions():
    """Equal as Python has it, they compile to other programs."""
    x = np.arange(4, dtype=np.int32)
    with synk.simulate(3), jax.numpy_dtype_promotion("standard"):
        for by in (2, 2.0, True, 2, -0.0, 0.0):
            got = synk.contrib.pairs(Scaled(by), x, reduce="max")
            want = ((jnp.asarray(x)[:, None] + jnp.asarray(x)[None]) * by).max(1)
            assert_same(got, want)


def test_functions_are_forgotten():
    """With all that they close over."""
    with synk.simulate(2):
        gone = []
        for _ in range(2):
            table = jnp.ones(3)
            synk.contrib.pairs(lambda a, b, table=table: a * b * table.sum(), np.ones(4, np.float32))
            synk.contrib.scan(lambda a, b, table=table: a + b + 0 * table.sum(), np.ones(4, np.float32))
            gone.append(weakref.ref(table))
            del table
        gc.collect()
        assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize(("kind", "n"), [("devices", 4), slow("simulated", 4)])
def test_only_real_rows_are_seen(kind, n):
    """Whatever lies behind a replica's own, of results that stay there and of variables; also where some have none."""
    seen = []

    def add(a, b):
        jax.debug.callback(lambda *values: seen.extend(np.concatenate(list(map(np.ravel, values)))), a, b)
        return a + b

    with group_of(kind, n):
        for rows in (5, 3):
            x = np.arange(1, rows + 1, dtype=np.float32)
            held = synk.shared(x, name="held")
            synk.scatter(held, x)
            for given in (synk.function(lambda x: 1 * x, reduce="scatter")(x), held):
                assert_same(synk.contrib.pairs(add, given), rows * x + x.sum())
                assert_same(synk.contrib.scan(add, given), np.cumsum(x))
            jax.effects_barrier()
            assert min(seen) > 0


EIGHT = np.arange(8, dtype=np.float32)


@needs_devices(4)
@pytest.mark.slow
def test_skeletons_meet_the_users_options_and_dtypes(four):
    """Debugging options raise what users catch; sums of small integers are as wide as `jnp.sum` makes them."""
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"synk\.contrib\.scan\(add\): a result holds NaN"),
    ):
        synk.contrib.scan(jnp.add, np.array([1, np.nan], np.float32))
    for dtype in (np.uint8, np.int8, np.int16, np.bool_):
        x = np.array([100, 100, 50], np.int64).astype(dtype)
        for reduce, op in (("sum", jnp.sum), ("prod", jnp.prod), ("max", jnp.max)):
            got, want = (
                synk.contrib.pairs(jnp.maximum, x, reduce=reduce),
                op(jnp.asarray(np.maximum.outer(x, x)), axis=1),
            )
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    total = jax.jit(lambda x: synk.contrib.scan(jnp.add, x)[-1])
    if not synk.group().is_simulated:
        with (
            jax.set_mesh(mesh),
            pytest.raises(synk.SynkError, match=r"synk\.contrib\.scan\(add\): it is traced inside jax"),
        ):
            total(jnp.asarray(EIGHT))
    with jax.set_mesh(synk.group().mesh):
        assert float(total(jnp.asarray(EIGHT))) == EIGHT.sum()


def test_functions_of_rows_do_not_communicate(four):
    """Those of `synk.contrib.scan` and `synk.contrib.pairs` see rows alone."""
    with pytest.raises(ValueError, match=r"synk\.all_reduce communicates inside.* Do it outside"):
        synk.contrib.scan(lambda a, b: synk.all_reduce(a, "sum") + b, np.ones(8, np.float32))


CAP = 10


def capped(a, b):
    """Add, up to a number under a global name."""
    return jnp.minimum(a + b, CAP)


@pytest.mark.parametrize("op", [capped, jax.jit(capped)], ids=["plain", "jit"])
@pytest.mark.parametrize(("kind", "n"), [("devices", 3), slow("simulated", 2)])
def test_programs_follow_the_names_of_their_functions(monkeypatch, op, kind, n):
    """Another object under a global name or in a cell is noticed, as by `synk.function`, and the first one again."""
    x = np.array([1, 1, 1, 5], np.int32)
    with group_of(kind, n):
        for cap in (10, 2, 10, 2):
            monkeypatch.setitem(globals(), "CAP", cap)
            assert synk.contrib.scan(op, x).tolist() == np.minimum(np.cumsum(x), cap).tolist()
            wanted = np.minimum(x[:, None] + x, cap).max(1)
            assert synk.contrib.pairs(op, x, reduce="max").tolist() == wanted.tolist()
            assert jax.jit(lambda x: synk.contrib.scan(op, x))(x).tolist() == np.minimum(np.cumsum(x), cap).tolist()
