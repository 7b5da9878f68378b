"""Overlap: parts see their neighbours, so that a stencil gives the serial answer at every seam and edge."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk

from ..helpers import GROUPS, assert_same, group_of, needs_devices, numbers, slow, slow_but

MODES = {"nearest": "edge", "cyclic": "wrap", "reflect": "reflect", "fill": "constant"}
FILL = 7


def stencil(before, after):
    """A weighted sum of neighbours, of integers, so that nothing is rounded; and another input beside it."""
    weights = [3 * i % 7 - 3 for i in range(before + after + 1)]

    def fn(x, y):
        return sum(w * x[i : x.shape[0] - before - after + i] for i, w in enumerate(weights)) + y

    return fn


def padded(x, before, after, edge):
    options = {"constant_values": FILL} if edge == "fill" else {}
    return np.pad(x, ((before, after), (0, 0)), mode=MODES[edge], **options)


def example(before, after, edge, rows):
    """A function with such neighbours, its arguments, and what it must give for rows of these."""
    fn, rng = stencil(before, after), np.random.default_rng(rows)
    f = synk.function(fn, inputs={"x": synk.Overlap(before, after, edge=edge, fill=FILL)}, reduce="concat", name="f")
    x, y = rng.integers(-9, 9, (2, rows, 2)).astype(np.int32)
    return f, x, y, lambda index=slice(None): fn(padded(x[index], before, after, edge), y[index])


def places(x):
    """The same rows wherever rows can be."""
    held = synk.shared(x, name="held")
    synk.scatter(held, x)
    return {
        "numpy": x, "jax": jnp.asarray(x), "scatter": synk.data(x, place="scatter"), "held": held,
        "broadcast": synk.data(x, place="broadcast"), "made": synk.function(lambda x: x, reduce="scatter")(x),
    }  # fmt: skip


CASES = [  # each edge and group; widths beyond a neighbour's part, and beyond all rows
    (GROUPS[0], (9, 0), 13, "fill"), (("simulated", 3), (0, 4), 1, "reflect"), (("devices", 8), (9, 0), 13, "nearest"),
]  # fmt: skip
QUICK = [(("devices", 2), (3, 2), 5, "cyclic")]


@pytest.mark.smoke
@pytest.mark.parametrize(("group", "widths", "rows", "edge"), slow_but(QUICK, [*QUICK, *CASES]))
def test_the_serial_answer(group, widths, rows, edge):
    """Of any width and rows, in each place, in slices and batches, serially and under jit: that of np.pad."""
    with group_of(*group):
        f, x, y, want = example(*widths, edge, rows)
        batch = np.random.default_rng(0).integers(0, rows, 6)
        for (place, given), slices in itertools.product(places(x).items(), (1, 3)):
            assert_same(f(given, y, num_slices=slices), want())
            if place != "held":
                assert_same(f(given, y, num_slices=slices, batch=batch), want(batch))
        assert_same(f.serial(x, y), want())
        f.check(x, y, num_slices=2)
        assert_same(jax.jit(lambda x, y: f(x, y, num_slices=2))(x, y), want())
        assert_same(jax.jit(f)(x, y), want())


@pytest.mark.parametrize("rows", [slow(rows) for rows in (1, 13, 49)])
def test_any_rows(rows):
    """1 to 50 rows on 1 to 8 replicas in 1 to 4 slices."""
    rng = np.random.default_rng(rows)
    for edge in MODES:
        with group_of("devices", int(rng.integers(1, 9))):
            f, x, y, want = example(*rng.integers(0, 6, 2).tolist(), edge, rows)
            made = synk.function(lambda x: x, reduce="scatter")(x)
            for given in (x, made):
                assert_same(f(given, y, num_slices=int(rng.integers(1, 5))), want())


def test_replicas_pick(kind="devices"):
    """batch_s picks on each replica, and neighbours are those in what it picks of all."""
    with group_of(kind, 2):
        f, x, y, _ = example(1, 1, "nearest", 9)
        data = synk.data(x, place="scatter")
        for batch_s, slices in (([[0, 2], [3]], 1), (slice(1, 3), 1), ([[4, 4, 1], [0, 1]], 2)):
            each = batch_s if isinstance(batch_s, list) else [batch_s] * 2
            index = np.concatenate([np.arange(5)[each[0]], np.arange(5, 9)[each[1]]])
            got = f(data, y[: len(index)], batch_s=batch_s, num_slices=slices)
            assert_same(got, stencil(1, 1)(padded(x[index], 1, 1, "nearest"), y[: len(index)]))


@needs_devices(8)
def test_only_neighbours_travel():
    """A Gaussian filter of rows that lie on 8 replicas: at most two permutations, and nothing is gathered."""
    kernel = np.exp(-(np.arange(-3, 4) ** 2) / 4.0).astype(np.float32) / np.float32(3.5)

    def blur(x):
        return sum(k * x[i : x.shape[0] - 6 + i] for i, k in enumerate(kernel))

    with group_of("devices", 8):
        image = numbers(203, 16)
        f = synk.function(blur, inputs={"x": synk.Overlap(3)}, reduce="scatter")
        given = places(image)
        for place in ("scatter", "held", "made"):
            text = f.compile(given[place]).as_text() or ""
            assert 1 <= len(re.findall(r" collective-permute(?:-start)?\(", text)) <= 2
            assert "all-gather" not in text
            assert "all-to-all" not in text
        assert "collective-permute" not in (f.compile(image).as_text() or "")
        found = image
        for _ in range(5):  # steps that go on where the last has left its rows
            found = f(found)
        want = image
        for _ in range(5):
            want = blur(np.pad(want, ((3, 3), (0, 0)), mode="edge"))
        np.testing.assert_allclose(found[:], want, rtol=1e-5, atol=1e-5)


def test_beside_other_ops_and_variables():
    """Weights and row numbers count own rows; a variable may be passed and assigned, also where its old value is seen."""
    x = numbers(9, 2)
    with group_of("devices", 2):
        held = synk.shared(x, name="held")
        synk.scatter(held, x)

        @synk.function(inputs=[synk.Overlap(1, edge="cyclic")], outputs=("mean", "max", "concat"))
        def f(u):
            held.value = u[2:] - u[:-2]
            return jnp.mean(u[1:-1]), u.max(), synk.row_numbers()

        mean, most, rows = f(held)
        np.testing.assert_allclose(mean, x.mean(), rtol=1e-6)
        assert_same(most, x.max())
        assert rows.tolist() == list(range(9))
        want = np.roll(x, -1, 0) - np.roll(x, 1, 0)
        assert_same(synk.gather(held, nd_up=0), want)
        assert_same(f(held)[1], want.max())


def test_iterate():
    """Batches picked ahead bring their neighbours."""
    with group_of("devices", 2):
        f, x, y, want = example(2, 1, "reflect", 11)
        batches = [slice(0, 7), [5, 3, 9, 0], [2]]
        for place, given in places(x).items():
            if place != "held":
                for got, batch in zip(f.iterate(given, y, batches=batches), batches, strict=True):
                    assert_same(got, want(batch))


def test_modes_in_trees():
    """A mode may stand for one leaf of a tree, or by position; widths of 0 are plain scatter."""
    x = numbers(5, 2)
    with group_of("devices", 2):
        f = synk.function(
            lambda t: t["a"][:-1] + t["b"], inputs=[{"a": synk.Overlap(1, 0), "b": "scatter"}], reduce="concat"
        )
        assert_same(f({"a": x, "b": x}), np.pad(x, ((1, 0), (0, 0)), mode="edge")[:-1] + x)
        assert_same(synk.function(lambda x: x.sum(0), inputs={"x": synk.Overlap(0)}).over(x, batches=[2]), x[:2].sum(0))


REFUSED = {
    "none": (lambda: synk.Overlap(1, edge="spiral"), ValueError, "use 'nearest', 'cyclic', 'reflect', 'fill'"),
    "negative": (lambda: synk.Overlap(-1), ValueError, "before is -1; give an integer >= 0"),
    "float": (lambda: synk.Overlap(1, 2.0), TypeError, "after is 2.0; give an integer >= 0"),
    "fill": (lambda: synk.Overlap(1, edge="fill", fill=[1, 2]), ValueError, "give one number"),
    "text": (lambda: synk.Overlap(1, edge="fill", fill="a"), ValueError, "give one number"),
    "fraction": (
        lambda: synk.function(lambda x: x[1:-1], [synk.Overlap(1, edge="fill", fill=0.5)], "concat")(np.arange(4)),
        ValueError,
        "fill is 0.5, which is no int32",
    ),
    "mode": (
        lambda: synk.function(lambda x: x, inputs=["overlap"]),
        ValueError,
        "inputs names 'overlap', but .* Modes: scatter, broadcast",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which):
    """A wrong width or edge says which is right."""
    act, error, message = REFUSED[which]
    with pytest.raises(error, match=message):
        act()


def test_refused_calls():
    """Neighbours returned too, rows without neighbours, variables without rows; and then a right call is right."""
    x = numbers(8, 2)
    with group_of("devices", 2):
        whole = synk.function(lambda x: x * 2, inputs=[synk.Overlap(2, 1)], reduce="concat", name="whole")
        f = synk.function(lambda x: x[2:-1] * 2, inputs=[synk.Overlap(2, 1)], reduce="concat", name="f")
        w, uneven = synk.shared(x, name="w"), synk.shared(x, name="uneven")
        synk.scatter(uneven, x)
        uneven.set_value(x[:1], rank=1)
        tree = synk.shared({"a": x, "b": x}, name="tree")
        synk.scatter(tree, {"a": x, "b": x})
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"whole: output has 7 rows, but only 4 .* are its own. .*: out\[2:-1\]"
            ):
                whole(x)
            with pytest.raises(ValueError, match="f.over: rows at the ends of batches"):  # noqa: RUF043
                f.over(x, batches=[4])
            with pytest.raises(ValueError, match=r"argument x is the shared variable w, which holds no rows"):
                f(w)
            with pytest.raises(ValueError, match=r"holds \[4, 1\] rows, and not as synk.scatter deals them out"):
                f(uneven)
            with pytest.raises(TypeError, match="is the shared variable tree, a tree"):
                f(tree)
            with pytest.raises(TypeError, match=r"read w.value inside the function"):
                jax.jit(lambda: f(w))()
            assert_same(f(x), x * 2)
