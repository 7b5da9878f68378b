"""Integers of 64 bits: those that JAX's 32 hold arrive as they are, others raise before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import group_of, mapped, numbers, slow

GROUPS = [("devices", 3), slow("devices", 1), slow("simulated", 3)]
in_every_group = pytest.mark.parametrize(("kind", "n"), GROUPS)
REFUSED = r"2147483648 .* int32\. Give smaller numbers .* or set jax_enable_x64"
# Of eleven rows the last one is too large.
IDS = np.append(np.arange(10) * 2**27, 2**31)
X = numbers(11)


def rows_of_file(x):
    """An object that gives rows by position, as h5py's."""

    class File:
        shape, dtype = x.shape, x.dtype

        def __getitem__(self, index):
            return x[index]

    return File()


def of_jax(x):
    with jax.enable_x64(True):
        return jnp.asarray(x)


WIDE = of_jax(IDS)
WAYS = {
    "numpy": lambda x: x,
    "columns": lambda x: np.stack([x, x], 1)[:, 0],
    "big endian": lambda x: x.astype(">i8"),
    "of jax": of_jax,
    "list": lambda x: x.tolist(),
    "read in place": mapped,
    "by position": rows_of_file,
    "local": synk.local,
    **{place: lambda x, place=place: synk.data(x, place=place, name="x") for place in ("host", "scatter", "broadcast")},
}


@pytest.mark.parametrize(
    ("kind", "n", "way"),
    [
        *[("devices", 3, way) for way in WAYS],
        slow("devices", 1, "of jax"),
        slow("devices", 1, "scatter"),
        slow("simulated", 3, "numpy"),
        slow("simulated", 3, "broadcast"),
    ],
)
def test_rows(kind, n, way):
    """Refused in every call that takes them, by name, and never in one that leaves them out."""
    f, given = synk.function(lambda x: (x, x.max()), outputs=("concat", "max"), name="f"), WAYS[way](IDS)
    is_whole = way in ("scatter", "broadcast")
    with group_of(kind, n):
        for _ in range(2):
            for call in (f, f.serial):
                with pytest.raises(ValueError, match=f"(f: argument )?x: .*{REFUSED}"):
                    call(given)
                with pytest.raises(ValueError, match=REFUSED):
                    call(given, batch=[1, 10, 3])
                if not is_whole or call is f.serial:
                    for batch in (10, [7, 2, 2, 5, 0]):
                        want = IDS[:batch] if batch == 10 else IDS[batch]
                        got, most = call(given, batch=batch)
                        np.testing.assert_array_equal(got, want)
                        assert int(most) == want.max()


@in_every_group
def test_many_rows(kind, n):
    """Which threads copy: the extremes arrive, and one too large or too small among a million raises."""
    ids = np.random.default_rng(0).integers(-(2**31), 2**31, (700_003, 2))
    extremes, order = synk.function(lambda x: (x.min(), x.max()), outputs=("min", "max")), np.arange(700_003)[::-1]
    with group_of(kind, n):
        for batch in (None, order):
            assert [int(v) for v in extremes(ids, batch=batch)] == [ids.min(), ids.max()]
        for wrong in (2**31, -(2**31) - 1):
            bad = ids.copy()
            bad[345_678, 1] = wrong
            for batch in (None, order):
                with pytest.raises(ValueError, match=f"{wrong} out of bounds"):
                    extremes(bad, batch=batch)


@pytest.mark.parametrize(("kind", "n"), GROUPS[:1])
@pytest.mark.parametrize(
    "value",
    [2**31, np.int64(2**31), IDS, IDS.tolist(), of_jax(IDS), rows_of_file(IDS), synk.data(IDS), np.array(2**31)],
)
def test_broadcast_arguments(kind, n, value):
    """As arrays, numbers and lists."""
    f = synk.function(lambda x, k: x.max() + jnp.max(k), inputs=["x"], reduce="max", name="f")
    x = np.arange(11, dtype=np.int32)
    with group_of(kind, n):
        for call in (f, f.serial, jax.jit(lambda x: f(x, value))):
            for _ in range(2):
                with pytest.raises(ValueError, match=f"f: argument k: .*{REFUSED}"):
                    call(*[x, value][: 2 if call in (f, f.serial) else 1])
        assert int(f(x, np.int64(3))) == int(f(x, IDS[:1] + 3)) == int(f.serial(x, 3)) == 13


def test_dtypes(four):
    """Unsigned numbers keep their whole range, and nothing else is looked at."""
    f = synk.function(lambda x: x, reduce="concat")
    big = np.array([0, 2**31, 2**32 - 1], np.uint64)
    np.testing.assert_array_equal(f(big), big)
    with pytest.raises(ValueError, match="4294967296 out of bounds for uint32"):
        f(big + np.uint64(1))
    assert f(np.zeros((3, 0), np.int64)).shape == (3, 0)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(f(IDS), IDS)
        np.testing.assert_array_equal(synk.shared(IDS).value, IDS)
    with pytest.raises(ValueError, match="300 out of bounds for uint8"):
        f(synk.data(np.array([1, 300]), dtype=np.uint8))


@in_every_group
def test_nothing_is_lost(kind, n):
    """A call that is refused in its last slice leaves every variable as it was, and so the next call."""
    with group_of(kind, n):
        w = synk.shared(np.float32(1), name="w")
        f = synk.function(
            lambda x: x.sum().astype(jnp.float32), then=lambda total: setattr(w, "value", w.value + total)
        )
        for slices in (1, 3):
            before = float(w.value)
            with pytest.raises(ValueError, match=REFUSED):
                f(IDS, num_slices=slices)
            assert float(w.value) == before
            f(np.arange(11), num_slices=slices)
            assert float(w.value) == before + 55


def ways_to_set(w):
    """Each way to give a variable of ten rows another value."""
    synk.function(lambda x: x.sum())(X)
    inside = synk.function(lambda x: setattr(w, "value", IDS) or x.sum())
    return {
        "value": lambda: setattr(w, "value", IDS),
        "set_value": lambda: w.set_value(IDS),
        "borrowed": lambda: w.set_value(IDS, borrow=True),
        "of jax": lambda: w.set_value(of_jax(IDS)),
        "rank": lambda: w.set_value(IDS, rank=0),
        "broadcast": lambda: synk.broadcast(w, IDS),
        "scatter": lambda: synk.scatter(w, IDS),
        "inside": lambda: inside(X),
    }


@in_every_group
def test_variables(kind, n):
    """First values and every way to set another one; the variable keeps what it has."""
    old = np.arange(11)
    with group_of(kind, n):
        w = synk.shared(old, name="w")
        for act in ways_to_set(w).values():
            with pytest.raises(ValueError, match=f"w: .*{REFUSED}"):
                act()
            np.testing.assert_array_equal(w.value, old)
        for value in (IDS, of_jax(IDS), 2**31, {"a": [IDS]}):
            with pytest.raises(ValueError, match=f"ids.*{REFUSED}"):
                synk.shared(value, name="ids")
        for value in (2**63, -(2**70)):
            with pytest.raises(ValueError, match=r"ids: Python int.* Give smaller"):
                synk.shared(value, name="ids")


@in_every_group
def test_loops(kind, n):
    """Batches come until the one that is refused, however early it was taken."""
    f = synk.function(lambda x: x.max(), reduce="max", name="f")
    batches = [[0, 1, 2, 3, 4], [9, 8, 7], [10, 1]]
    want = [int(IDS[batch].max()) for batch in batches[:2]]
    with group_of(kind, n):
        for prefetch in (0, 2):
            for loop in (
                f.iterate(IDS, batches=batches, prefetch=prefetch),
                f.iterate(synk.data(IDS), batches=batches, prefetch=prefetch),
                f.stream((IDS[batch] for batch in batches), prefetch=prefetch),
                map(f, synk.prefetch((IDS[batch] for batch in batches), prefetch)),
            ):
                got = []
                with pytest.raises(ValueError, match=rf"(f: argument x|synk\.prefetch: batch): .*{REFUSED}"):
                    got.extend(int(value) for value in loop)
                assert got == [] or got == want
        assert int(f.over(IDS, batches=batches[:2])) == max(want)
        with pytest.raises(ValueError, match=f"f: argument x: .*{REFUSED}"):
            f.over(IDS, batches=batches)


@pytest.mark.parametrize(("kind", "n"), GROUPS[:1])
@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit])
def test_under_jit_and_in_skeletons(kind, n, wrap):
    """Where a call is traced into another one, and in programs over all rows."""
    f = synk.function(lambda x: x, reduce="concat", name="f")
    with group_of(kind, n):
        for _ in range(2):
            for call, name in (
                (lambda: f(IDS), "f: argument x"),
                (lambda: f(IDS, batch=[1, 10]), "f: argument x"),
                (lambda: f(WIDE), "f: argument x"),
                (lambda: synk.contrib.scan(jnp.add, IDS), r"synk.contrib.scan\(add\): x"),
                (lambda: synk.contrib.pairs(lambda a, b: a * b, IDS), r"synk.contrib.pairs\(<lambda>\): x"),
            ):
                with pytest.raises(ValueError, match=f"{name}: .*{REFUSED}"):
                    wrap(call)()
        np.testing.assert_array_equal(wrap(lambda: f(IDS, batch=10))(), IDS[:10])
        np.testing.assert_array_equal(wrap(lambda: synk.contrib.scan(jnp.maximum, IDS[:10]))(), IDS[:10])


def test_outputs(four):
    """What a function returns of NumPy, and of Python."""
    for value in (IDS, np.int64(2**31), 2**31):

        def fn(x, value=(value,).__getitem__):
            return {"a": value(0)}

        with pytest.raises(ValueError, match=f"f: output.*{REFUSED}"):
            synk.function(fn, inputs={"value": "static"}, reduce="max", name="f")(X)
