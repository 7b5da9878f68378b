"""Ops: how parts combine, dtype by dtype, and what is no law's but one part's a replica."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._reductions.reduction import REDUCTIONS, ElementwiseOp, RowsOp  # no public name lists all ops

from ..helpers import SERIAL, also_simulated, assert_close, first_of, group_of, numbers, parts_of, slow

ROWS = [1, 3, 4, 9]


def test_the_law_is_tried_for_every_op():
    """All ops that mean the same for any parts are in the table from which tests draw, but three with tests of their own."""
    lawful = {name for name, op in REDUCTIONS.items() if op.is_lawful}
    assert lawful - SERIAL.keys() == {"scatter", "merge", "same"}
    assert {*get_args(ElementwiseOp), *get_args(RowsOp), "same"} == REDUCTIONS.keys() | SERIAL.keys()


@pytest.mark.parametrize("rows", ROWS)
@also_simulated("four")
def test_stack(four, rows):
    """One entry a replica that had rows, in rank order."""
    got = synk.function(lambda x: x.sum(0), reduce="stack")(numbers(rows))
    assert_close(got, np.stack([part[0].sum(0) for part in parts_of(numbers(rows), 4) if part]))


@pytest.mark.parametrize("op", ["first", None])
@pytest.mark.parametrize("rows", ROWS)
def test_first(four, rows, op):
    """The first replica's own."""
    got = synk.function(lambda x: x.sum(0), outputs=op, reduce="first")(numbers(rows))
    assert_close(got, parts_of(numbers(rows), 4)[0][0].sum(0))


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("rows", [*ROWS, 31])
def test_callable(four, rows, slices):
    """It gets the parts of every replica and slice that had rows, in row order."""
    weights = np.arange(1, 33, dtype=np.float32)
    f = synk.function(lambda x: x.sum(0), reduce=lambda parts: (parts, weights[: len(parts)] @ parts)[1])
    parts = np.stack([part.sum(0) for mine in parts_of(numbers(rows), 4, slices) for part in mine])
    assert_close(f(numbers(rows), num_slices=slices), weights[: len(parts)] @ parts)


def test_callable_of_another_shape(four):
    """A callable may return fewer axes: a median."""
    f = synk.function(lambda x: x.mean(0), reduce=lambda parts: jnp.median(parts, 0))
    assert_close(f(numbers(9)), np.median([part[0].mean(0) for part in parts_of(numbers(9), 4)], 0))


@pytest.mark.parametrize("rows", [8, 9, 2])
def test_integer_means(four, rows):
    """Integers and booleans give floats, as jnp.mean, weighted by rows."""
    x = np.arange(rows, dtype=np.int32)
    got = synk.function(lambda x: (x.max(), x.max() > 1), reduce="mean")(x)
    parts = [part[0] for part in parts_of(x, 4) if part]
    weights = [len(part) for part in parts]
    assert [value.dtype for value in got] == [jnp.float32] * 2
    tops = np.array([part.max() for part in parts])
    assert_close(got, (np.average(tops, weights=weights), np.average(tops > 1, weights=weights)))


INTEGERS = [np.int8, np.uint8, np.int32, np.uint32]


@pytest.mark.parametrize("rows", [8, 9, 2])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_keep_their_dtype(dtype, rows):
    """Sum, max, min and prod of integers, extremes included."""
    x = np.arange(rows).astype(dtype)
    x[-1] = np.iinfo(dtype).max // 2
    ops = ("max", "sum", "min", "prod", "concat")
    f = synk.function(lambda x: (x.max(), x.max(), x.min(), x.min() + jnp.ones((), dtype), x), outputs=ops)
    parts = [part[0] for part in parts_of(x.astype(np.int64), 4) if part]
    with group_of("simulated", 4):
        got = f(x)
    assert all(value.dtype == dtype for value in got)
    want = x.max(), sum(p.max() for p in parts), x.min(), np.prod([p.min() + 1 for p in parts]), x
    assert_close(got, tuple(np.asarray(value).astype(dtype) for value in want))


@pytest.mark.parametrize("rows", [8, 9, 2])
@also_simulated("four")
def test_booleans(four, rows):
    """Booleans under every op that has a meaning for them."""
    x = np.arange(rows) % 3 == 0
    ops = ("any", "all", "max", "min", "prod", "sum", "concat")
    got = synk.function(lambda x: (x.any(), x.all(), x.any(), x.all(), x.all(), x.any(), x), outputs=ops)(x)
    counted = sum(part[0].any() for part in parts_of(x, 4) if part)
    assert_close(got, (x.any(), x.all(), x.any(), x.all(), x.all(), counted, x))
    assert [value.dtype.name for value in got] == ["bool"] * 5 + ["int32", "bool"]


def test_any_and_all_of_numbers(four):
    """As jnp's: what is not zero is true; NaN is."""
    x = np.array([0, 0, 0, 0, np.nan, 0, 2, 0, 0], np.float32)
    f = synk.function(lambda x: (x.sum(), x.sum()), outputs=("any", "all"))
    assert_close(f(x), (True, False))
    assert_close(f(x[:4]), (False, False))
    assert_close(f(x[4:5]), (True, True))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("rows", [8, 9])
def test_16_bit_floats(four, rows, dtype):
    """Combined in float32 and returned in their dtype: small parts are not lost beside large ones."""
    x = np.where(np.arange(rows) == 0, 2048, 1).astype(np.float32)
    f = synk.function(lambda x: (x[0], x[0], x[0], x), outputs=("sum", "mean", "max", "concat"))
    got = f(jnp.asarray(x, dtype))
    firsts = np.array([part[0][0] for part in parts_of(x, 4)])
    weights = [len(part[0]) for part in parts_of(x, 4)]
    want = firsts.sum(), np.average(firsts, weights=weights), 2048, x
    assert all(value.dtype == dtype for value in got)
    assert_close(got, tuple(np.asarray(jnp.asarray(np.float32(value), dtype), np.float32) for value in want), rtol=0)


@pytest.mark.parametrize("slices", [1, 3])
@also_simulated("four")
def test_float16_means_do_not_overflow(four, slices):
    """Parts weigh by fraction: a mean near the largest float16 over many rows."""
    x = jnp.full(3001, 60000, jnp.float16)
    got = synk.function(lambda x: x.max(), reduce="mean")(x, num_slices=slices)
    assert (got.dtype, float(got)) == (jnp.float16, 60000)


@also_simulated("four")
def test_complex(four):
    """Complex numbers sum, average and multiply."""
    x = (np.arange(1, 10) / 4 + 1j).astype(np.complex64)
    got = synk.function(lambda x: (x.sum(), x.mean(), x.prod(), x), outputs=("sum", "mean", "prod", "concat"))(x)
    for value, want in zip(got, (x.sum(), x.mean(), x.prod(), x), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5)


@pytest.mark.parametrize("op", ["max", "min", "sum", "mean"])
def test_nan_and_infinity_arrive(four, op):
    """What a replica's rows give is not hidden, and what it has no rows for is not seen."""
    by_numpy = {"max": np.max, "min": np.min, "sum": np.sum, "mean": np.mean}[op]
    f = synk.function(lambda x: getattr(x, op)(), reduce=op)
    for value in (np.nan, np.inf, -np.inf):
        for x in (np.array([1, value, 2], np.float32), np.array([1, 2, 3, 4, 5, 6, 7, 8, value], np.float32)):
            np.testing.assert_array_equal(f(x), by_numpy(x))


@also_simulated("four")
def test_infinite_rows_do_not_meet_fillers(four):
    """Where rows do not divide nothing is multiplied by zero: no NaN comes from infinities."""
    f = synk.function(lambda x: (x.sum(), x.mean()), outputs=("sum", "mean"))
    for rows in (9, 10, 11, 13, 14, 5, 6, 7):  # beyond the first few splits, all devices run every part size
        np.testing.assert_array_equal(f(np.full(rows, np.inf, np.float32)), [np.inf, np.inf])


# Weighted.


def masked_mean(x, mask):
    return synk.Weighted((x * mask).sum() / mask.sum(), mask.sum())


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 8, 9, 31])
def test_parts_of_weight_0(four, rows, slices):
    """They count for nothing though their value is NaN: the mean over what the mask keeps."""
    x, mask = numbers(rows)[:, 0], (np.arange(rows) >= rows - 2).astype(np.float32)
    got = synk.function(masked_mean, reduce="mean")(x, mask, num_slices=slices)
    assert_close(got, x[mask > 0].mean())


@also_simulated("four")
def test_total_weight_of_0(four):
    """Gives NaN."""
    f = synk.function(masked_mean, reduce="mean")
    for rows in (8, 9):
        assert np.isnan(f(np.ones(rows, np.float32), np.zeros(rows, np.float32)))


def test_integer_and_boolean_weights(four):
    """Counts of tokens are weights as they are."""
    f = synk.function(lambda x: synk.Weighted(x.mean(0), len(x)), reduce="mean")
    assert_close(f(numbers(9)), numbers(9).mean(0))
    one = synk.function(lambda x: synk.Weighted(x[0], x[0, 0] == numbers(9)[0, 0]), reduce="mean")
    assert_close(one(numbers(9)), numbers(9)[0])


@pytest.mark.parametrize("rows", [8, 9, 2])
def test_weighted_trees(four, rows):
    """One weight for a whole tree, beside outputs of other ops; gradients by the same weights."""

    @synk.function(inputs=["x", "mask"], outputs={"step": "mean", "count": "sum", "x": "concat"})
    def f(x, mask, w):
        def loss(w):
            return ((x @ w) ** 2 * mask).sum() / jnp.maximum(mask.sum(), 1)

        value, gradient = jax.value_and_grad(loss)(w)
        return {"step": synk.Weighted({"loss": value, "g": gradient}, mask.sum()), "count": mask.sum(), "x": x}

    x, mask, w = numbers(rows), (np.arange(rows) % 3 != 1).astype(np.float32), np.array([0.5, -1], np.float32)
    kept = x[mask > 0]
    want = {"loss": ((kept @ w) ** 2).mean(), "g": 2 * (kept @ w) @ kept / len(kept)}
    assert_close(f(x, mask, w), {"step": want, "count": mask.sum(), "x": x})


@also_simulated("four")
def test_weighted_as_then_sees_it(four):
    """`then` gets the combined value, no weight."""
    f = synk.function(
        lambda x: (synk.Weighted(x.mean(), len(x)), x.sum()), outputs=("mean", "sum"), then=lambda m, s: m + s
    )
    assert_close(f(numbers(9)), numbers(9).mean() + numbers(9).sum())


# Sizes.


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: synk.Weighted(x.mean(), 1.0) + synk.Weighted(x.sum(), 2.0),
        lambda w, x: sum([synk.Weighted(x.mean(), 1.0), synk.Weighted(x.sum(), 2.0)]),
        lambda w, x: 0.5 * synk.Weighted(x.mean(), 1.0) - x.sum(),
        lambda w, x: x.sum() * synk.Weighted(x.mean(), 1.0) / 2,
        lambda w, x: (synk.Weighted(w * x.mean(), 1.0), synk.Weighted(w * x.sum(), 2.0)),
    ],
)
def test_means_by_different_weights_meet_in_then(four, loss):
    """Where they are added up, or come as a pair from a loss of which a gradient is taken, words say so."""
    runs = [synk.train.step(loss, np.float32(1), optax.sgd(0.1))]
    runs.append(synk.function(lambda x: jax.grad(loss)(np.float32(1), x), reduce="mean"))
    for run in runs:
        with pytest.raises(TypeError) as caught:
            run(numbers(9, 1))
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "return them, with their gradients, as outputs of a synk.function" in said
        assert "add them up in its then" in said


@pytest.mark.parametrize("rows", [12, 13])
@also_simulated("group")
def test_two_means_added_up_in_then(group, rows):
    """Each by its own weights, and the gradient of their sum."""

    def losses(w, x):
        return ((w * x[:, 0] - 1) ** 2 * (x[:, 1] > 0).astype(x.dtype)).sum(), (w * x[:, 1] ** 2).sum()

    def both(x, w):
        (a, b), (grad_a, grad_b) = losses(w, x), jax.jacrev(losses)(w, x)
        count = (x[:, 1] > 0).sum().astype(x.dtype)
        return synk.Weighted((a / count, grad_a / count), count), synk.Weighted((b / len(x), grad_b / len(x)), len(x))

    f = synk.function(both, inputs=["x"], reduce="mean", then=lambda a, b: (a[0] + 2 * b[0], a[1] + 2 * b[1]))
    x, w = numbers(rows), np.float32(0.5)
    mask = x[:, 1] > 0
    want = lambda w: ((w * x[:, 0] - 1) ** 2)[mask].mean() + 2 * (w * x[:, 1] ** 2).mean()  # noqa: E731
    assert_close(f(x, w), jax.value_and_grad(want)(w))
    f.check(x, w)


@also_simulated("group")
def test_small_and_large_leaves_together(group):
    """Whatever is packed and whatever is not, each comes back as it is."""
    shapes = [(), (3,), (2, 5), (200, 200), (0,), (7,), (1, 1, 1), (129, 128)]
    base = [np.random.default_rng(i).normal(size=s).astype(np.float32) for i, s in enumerate(shapes)]
    ops = ["sum", "max", "mean", "min", "sum", "sum", "prod", "mean"]
    f = synk.function(lambda x: [b * x.mean() for b in base], outputs=ops)
    got = f(np.ones(8, np.float32))
    by_op = {"sum": group.size, "max": 1, "mean": 1, "min": 1}
    want = [b * by_op[op] if op != "prod" else b**group.size for b, op in zip(base, ops, strict=True)]
    assert_close(got, want, rtol=1e-4)


def test_empty_rows_of_columns(four):
    """Rows without columns have shapes and sums as any."""
    got = synk.function(lambda x: (x, x.sum(0)), outputs=("concat", "sum"))(np.zeros((9, 0), np.float32))
    assert [value.shape for value in got] == [(9, 0), (0,)]


def test_arrays_of_the_other_byte_order(four):
    """Big-endian arrays are taken as NumPy takes them, under a transformation too."""
    x = np.arange(7, dtype=">f4")
    assert float(synk.function(jnp.sum)(x)) == 21
    np.testing.assert_array_equal(synk.shared(x).value, x)
    f = synk.function(lambda x, w: x.sum() + w.sum(), inputs=["x"])
    for given in (x, synk.data(x), synk.data(x, place="broadcast")):
        assert float(f(given, given)) == float(jax.jit(lambda given=given: f(given, given))()) == 21 + 4 * 21
        index = np.array([3, 1])
        assert float(jax.jit(lambda index, given=given: f(given, 0 * x, batch=index))(index)) == 4
        np.testing.assert_array_equal(jax.jit(lambda given=given: synk.contrib.scan(jnp.add, given))(), np.cumsum(x))


@pytest.mark.parametrize(("given", "returned"), [(list, tuple), (tuple, list)])
def test_a_list_of_ops_goes_with_a_tuple(group, given, returned):
    """And the other way round, of wires too; what comes back is what the function returned."""
    x = numbers(7)
    f = synk.function(
        lambda x: returned((x.sum(0), x.max())), outputs=given(("sum", "max")), wire=given(("bf16", None)), name="f"
    )
    for slices in (1, 2, 1):
        got = f(x, num_slices=slices)
        assert type(got) is returned
        assert_close(got, returned((x.sum(0), x.max())))
    f.check(x)
    assert type(f.serial(x)) is type(f.over(x, batches=[3, slice(3, 7)])) is type(jax.jit(f)(x)) is returned
    with pytest.raises(ValueError, match=r"outputs=.* is no prefix of what it returned"):
        synk.function(lambda x: returned((x.sum(0), x.max())), outputs=given(("sum",)))(x)


@pytest.mark.parametrize("slices", [1, 2])
@also_simulated("group")
def test_ops_see_parts_alone(group, slices):
    """A shared variable that an op reads would be that of the first call for good."""
    w = synk.shared(np.float32(2), name="w")
    f = synk.function(lambda x: x.sum(), outputs=lambda parts: w.value * parts.sum(0), name="f")
    for call in (lambda x: f(x, num_slices=slices), jax.jit(lambda x: f(x, num_slices=slices)), f.serial):
        with pytest.raises(synk.SynkError, match=r"f: an op, .*uses the shared variable w. It combines parts alone"):
            call(numbers(5))
    sized = synk.function(lambda x: x.sum(), outputs=lambda parts: parts.sum(0) * synk.size())
    assert float(sized(np.ones(4, np.float32), num_slices=slices)) == 4 * group.size


EIGHT = np.arange(8, dtype=np.float32)


@pytest.mark.smoke
@also_simulated("four")
def test_max_without_infinity(four):
    """Types of 8 bits that have no infinity have a maximum all the same, on fewer rows than replicas."""
    x = jnp.array([1, 2], jnp.float8_e4m3fn)
    assert float(synk.function(jnp.max, reduce="max")(x)) == 2


@also_simulated("four")
def test_arrays_of_no_size_in_slices(four):
    """They add up to arrays of no size."""
    assert synk.function(lambda x: x.sum(0))(np.zeros((8, 0), np.float32), num_slices=2).shape == (0,)


@also_simulated("four")
def test_whole_outputs_inside_others(four):
    """A Monoid's state or a weighted mean has no mean of its own."""
    for nested in (
        lambda x: synk.Weighted({"loss": x.mean(), "std": synk.stats.std(x)}, len(x)),
        lambda x: synk.Weighted(synk.Weighted(x.mean(), 1.0), len(x)),
    ):
        for run in (synk.function(nested, reduce="mean"), synk.function(nested, reduce="mean").serial):
            with pytest.raises(ValueError, match="output holds a Weighted or Monoid inside another one"):
                run(EIGHT)


@also_simulated("four")
def test_many_more_slices_than_rows(four):
    """Each has a row; the others are none."""
    f = synk.function(jnp.sum)
    for slices in (10**6, 10**12):
        assert f(np.arange(5.0, dtype=np.float32), num_slices=slices) == 10


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        *[(("devices", 4), op) for op in ("sum", "mean", "max", "min", "prod", "any", "all", "Weighted")],
        slow(("simulated", 1), "mean"),
        slow(("simulated", 3), "Weighted"),
        slow(("devices", 8), "max"),
    ],
)
def test_an_entry_a_row_does_not_combine_entry_by_entry(kind, op):
    """A forgotten mean over the rows is refused on every way of calling, whether rows divide or not."""
    is_weighted = op == "Weighted"
    op = "mean" if is_weighted else op
    fn = (lambda x: synk.Weighted(x, x.sum())) if is_weighted else lambda x: x
    f, blocks = (synk.function(fn, reduce=op, name="f", blocks=blocks) for blocks in (None, 2))
    with group_of(*kind):
        for rows in (12, 13, 12):
            x = np.arange(rows, dtype=np.float32)
            for call in (
                lambda x: f(x), f.serial, f.check, jax.jit(f), blocks, lambda x: f(x, num_slices=2),
                lambda x: f.over(x, batches=[4, slice(4, None)]), lambda x: next(f.iterate(x, batches=[len(x)])),
            ):  # fmt: skip
                said = rf"f: output has shape \((\d+),\) in a part of length \1, .* parts under '{op}' need equal shapes\. Comb"
                with pytest.raises(ValueError, match=said):
                    call(x)


def test_an_entry_a_row_that_then_would_reduce(four):
    """Nor before a `then`, on another axis, or of rows that a variable holds, or with their neighbours."""
    x, w = np.arange(12, dtype=np.float32), synk.shared(np.zeros(12, np.float32))
    synk.scatter(w, x)
    for f, args in (
        (synk.function(lambda x: x, then=lambda x: x.sum(), name="f"), (x,)),
        (synk.function(lambda x: jnp.stack([x, x]), name="f"), (x,)),
        (synk.function(lambda: w.value, name="f"), ()),
        (synk.function(lambda x: x[1:-1], {"x": synk.Overlap(1)}, name="f"), (x,)),
    ):
        with pytest.raises(ValueError, match=r"f: output has shape .* in a part of length 3, .*concat"):
            f(*args)


@pytest.mark.parametrize("kind", first_of(("devices", 4), ("simulated", 3)))
def test_as_many_entries_as_rows(kind):
    """A gradient may have as many entries as a part has rows; a function that takes no other rows is believed."""
    traces, g = [], group_of(*kind)
    x, w = numbers(3 * g.size, 3), np.ones(3, np.float32)

    def fn(w, x):
        traces.append(len(x))
        return jax.value_and_grad(lambda w: ((x @ w) ** 2).sum())(w)

    f = synk.function(fn, inputs=["x"])
    with g:
        for _ in range(3):
            assert_close(f(w, x), fn(w, x))
            count = len(traces)
        f(w, x)
        assert len(traces) == count
        assert_close(jax.jit(f)(w, x), fn(w, x))
        only = synk.function(lambda x: x.reshape(3, 3).sum(0))
        assert_close(only(x), x.sum(0))
        assert_close(synk.map(lambda x: x * x, outputs="sum")(x), (x * x).sum(0))


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("slices", [1, 2])
def test_extremes_of_what_is_no_number(group, op, rows, slices):
    """NaN anywhere gives NaN, infinities and the smallest integers stay, and replicas without rows count for nothing."""
    f = synk.function(lambda x, i: (getattr(x, op)(0), getattr(i, op)(0)), reduce=op)
    by_numpy = getattr(np, op)
    for at in range(rows):
        for special in (np.nan, np.inf, -np.inf):
            x = np.stack([np.full(rows, special), np.full(rows, -special), numbers(rows, 1)[:, 0]], 1).astype(
                np.float32
            )
            x[at, 2] = special
            i = np.full(rows, np.iinfo(np.int32).max if op == "min" else np.iinfo(np.int32).min, np.int32)
            assert_close(f(x, i, num_slices=slices), (by_numpy(x, 0), by_numpy(i, 0)))


def test_first_of_booleans_inside():
    """Its dtype is that of a call outside."""
    with group_of("devices", 2):
        f = synk.function(lambda x: x[0] > 0, reduce="first")
        x = jnp.array([1.0, -1.0])
        assert jax.jit(lambda x: f(x))(x).dtype == f(x).dtype == bool
        assert bool(jax.jit(lambda x: f(x))(x))
