"""Statistics and Monoids: those of all rows, for any parts; against NumPy in float64, counts and rows exactly."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk import stats

from ..helpers import GROUPS, assert_close, group_of, slow, slow_but

FEW = GROUPS[1:]


@pytest.fixture
def few_replicas():
    with group_of(*FEW[1]) as group:
        yield group


ROWS = [1, 2, 5, 40, 257]


def rows_of(count, offset=0.0):
    """Rows of three columns; ties, where there are enough."""
    x = (np.random.default_rng(count).normal(size=(count, 3)) + offset).astype(np.float32)
    if count > 10:
        x[count // 2] = x[2]
        x[7, 0] = x[count - 2, 0] = x[:, 0].max() + 1
    return x


def everything(x, labels, guesses):
    """Nine of them at once."""
    first = x[:, 0]
    return {
        "moments": stats.moments(x), "std": stats.std(x, ddof=1), "cov": stats.cov(x), "lse": stats.logsumexp(x),
        "argmax": stats.argmax(x), "argmin": stats.argmin(x), "top": stats.top_k(first, 1),
        "histogram": stats.histogram(x, 16, (-4, 4)), "bincount": stats.bincount(labels, 6),
        "confusion": stats.confusion(labels, guesses, 6), "mean": stats.mean(x), "var": stats.var(x),
    }  # fmt: skip


F = synk.function(everything, outputs="merge")


def check_against_numpy(got, x, labels, guesses):
    wide, count = x.astype(np.float64), len(x)
    got = jax.tree.map(np.asarray, got)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    close(got["moments"][0], wide.mean(0), rtol=1e-6, atol=1e-6)
    close(got["moments"][1], wide.var(0))
    close(got["var"], wide.var(0))
    close(got["mean"], wide.mean(0), rtol=1e-6, atol=1e-6)
    if count > 1:
        close(got["std"], wide.std(0, ddof=1))
        close(got["cov"], np.cov(wide, rowvar=False), atol=1e-3 * wide.var())
    most = wide.max(0)
    close(got["lse"], np.log(np.exp(wide - most).sum(0)) + most, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got["argmax"], x.argmax(0))
    np.testing.assert_array_equal(got["argmin"], x.argmin(0))
    np.testing.assert_array_equal(got["top"][1], [x[:, 0].argmax()])
    np.testing.assert_array_equal(got["top"][0], [x[:, 0].max()])
    counts, edges = np.histogram(x, 16, (-4, 4))
    np.testing.assert_array_equal(got["histogram"][0], counts)
    np.testing.assert_array_equal(got["histogram"][1], edges.astype(np.float32))
    np.testing.assert_array_equal(got["bincount"], np.bincount(labels, minlength=6))
    want = np.zeros((6, 6), int)
    np.add.at(want, (labels, guesses), 1)
    np.testing.assert_array_equal(got["confusion"], want)


@pytest.mark.parametrize(
    ("kind", "n", "offset"),
    [slow("devices", 2, 1e4)],
)
def test_all_rows_as_numpy(kind, n, offset):
    """Any rows, replicas and slices; warm and fresh, one function for all."""
    with group_of(kind, n):
        for count in ROWS[1:4]:
            x = rows_of(count, offset)
            labels, guesses = np.random.default_rng(count).integers(0, 6, (2, count)).astype(np.int32)
            for slices in (1, 3) if count > 5 else (1, 2):
                check_against_numpy(F(x, labels, guesses, num_slices=slices), x, labels, guesses)
            check_against_numpy(F.serial(x, labels, guesses), x, labels, guesses)
        pick = np.random.default_rng(1).permutation(257)[:100]
        x, (labels, guesses) = rows_of(257), np.random.default_rng(2).integers(0, 6, (2, 257)).astype(np.int32)
        check_against_numpy(F(x, labels, guesses, batch=pick), x[pick], labels[pick], guesses[pick])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n"), FEW[:1])
def test_check(kind, n):
    """The law holds for them; a merge that is not associative breaks it."""
    with group_of(kind, n):
        x, labels = rows_of(41), np.arange(41, dtype=np.int32) % 6
        F.check(x, labels, labels, rtol=1e-4, atol=1e-4)
        F.check(x, labels, labels, num_slices=3, rtol=1e-4, atol=1e-4)
        wrong = synk.function(lambda x: synk.Monoid(x.sum(0), lambda a, b: a - b))
        with pytest.raises(synk.LawError, match="is merge associative, and the state that of all rows"):
            wrong.check(x)


def products(matrices):
    return synk.Monoid(jax.lax.associative_scan(jnp.matmul, matrices)[-1], jnp.matmul)


@pytest.mark.parametrize(("kind", "n"), slow_but(FEW[:1], [*FEW[:1], ("simulated", 8)]))
@pytest.mark.slow
def test_matrix_products_merge_right(kind, n):
    """Order counts, so it is that of the rows: integers, exactly."""
    f = synk.function(products)
    with group_of(kind, n):
        for count in (1, 2, 3, 7, 12, 23):
            matrices = np.random.default_rng(count).integers(-1, 2, (count, 3, 3)).astype(np.float32)
            want = np.eye(3)
            for matrix in matrices:
                want = want @ matrix
            for slices in (1, 2, 4):
                assert f(matrices, num_slices=slices).tolist() == want.tolist()
            assert f.serial(matrices).tolist() == want.tolist()


def test_in_trees_with_other_ops(few_replicas):
    """Beside arrays and Weighted, under keys; `then` and `output_subset` see answers."""
    spread = synk.shared(np.float32(0), name="spread")

    @synk.function(outputs={"loss": "mean", "rows": "concat", "s": "merge"})
    def f(x):
        return {
            "loss": synk.Weighted(x.mean(), len(x)),
            "rows": x[:, 0],
            "s": (stats.var(x[:, 0]), {"n": stats.top_k(x[:, 1], 2)}),
        }

    x = rows_of(23)
    got = f(x)
    assert_close(got["loss"], x.mean(), rtol=1e-5, atol=1e-6)
    assert_close(got["s"][0], x[:, 0].var(), rtol=1e-4, atol=1e-6)
    assert got["s"][1]["n"][1].tolist() == np.argsort(-x[:, 1], kind="stable")[:2].tolist()
    assert [leaf.shape for leaf in jax.tree.leaves(f(x, output_subset=["rows"]))] == [(23,)]
    for call in (f, lambda x, **options: jax.jit(lambda x: f(x, **options))(x)):
        assert call(x[:1], output_subset=["rows"])[0].shape == (1,)  # top_k needs two, but nobody asks for it
        with pytest.raises(ValueError, match="needs 2 rows"):
            call(x[:1], output_subset=["s", "rows"])

    @synk.function
    def g(x):
        return stats.std(x[:, 0])

    @g.then
    def doubled(std):
        spread.value = std
        return std * 2

    assert_close(g(x), 2 * x[:, 0].std(), rtol=1e-4, atol=1e-6)
    assert_close(spread.value, x[:, 0].std(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_under_transformations(few_replicas):
    """jit, grad and vmap: derivatives are those of the serial statistic, with uneven rows and slices."""
    f = synk.function(lambda x: stats.var(x))
    lse = synk.function(lambda x: stats.logsumexp(x))
    for count in (1, 7):
        x = jnp.asarray(rows_of(count)[:, 0])
        assert_close(jax.jit(f)(x), x.var(), rtol=1e-4, atol=1e-6)
        assert_close(jax.grad(lambda x: f(x))(x), jax.grad(jnp.var)(x), rtol=1e-4, atol=1e-5)
        assert_close(jax.grad(lambda x: lse(x, num_slices=2))(x), jax.nn.softmax(x), rtol=1e-4, atol=1e-5)
        assert_close(jax.vmap(f)(jnp.stack([x, 2 * x])), jnp.stack([x.var(), (2 * x).var()]), rtol=1e-4, atol=1e-6)


def test_quantiles(few_replicas):
    """As NumPy's; rows are gathered where parts differ, slices too, and programs of other lengths are made anew."""
    f = synk.function(lambda x: {"q": stats.quantile(x, [0.1, 0.5, 0.99]), "m": stats.mean(x)})
    for count in (7, 9, 7, 30):
        x = rows_of(count)
        for slices in (1, 3):
            got = f(x, num_slices=slices)
            assert_close(got["q"], np.quantile(x, [0.1, 0.5, 0.99], 0), rtol=1e-5, atol=1e-6)
            assert_close(got["m"], x.mean(0), rtol=1e-5, atol=1e-6)
    f.check(rows_of(11))


def test_nan_and_infinity(few_replicas):
    """As NumPy's argmax has them: the first NaN wins; infinite rows stay what they are."""
    f = synk.function(lambda x: (stats.argmax(x), stats.argmin(x), stats.top_k(x, np.int64(3)), stats.logsumexp(x)))
    for bad in (np.nan, np.inf, -np.inf):
        x = rows_of(17)[:, 0].copy()
        x[[5, 13]] = bad
        most, least, (values, rows), lse = f(x)
        assert (int(most), int(least)) == (x.argmax(), x.argmin())
        best, where = jax.lax.top_k(jnp.asarray(x), 3)
        np.testing.assert_array_equal(values, best)
        np.testing.assert_array_equal(rows, where)
        np.testing.assert_allclose(lse, jax.nn.logsumexp(jnp.asarray(x)), rtol=1e-5)


INF = np.inf
MEANS = synk.function(lambda x: (stats.mean(x), stats.moments(x)))
LOG_SUM = synk.function(stats.logsumexp)


@pytest.mark.parametrize("first", [[INF, 1], [-INF, 1], [INF, -INF], [INF, np.nan], slow([INF, *range(9)])])
def test_infinite_means(few_replicas, first):
    """As NumPy has them, wherever the infinities lie, whatever the cut; their variance is NaN, as there."""
    for x in (np.array(first, np.float32), np.array([*first, *range(7), *first], np.float32)):
        with np.errstate(invalid="ignore"):
            want = np.mean(x)
        for slices in (1, 2):
            mean, (again, var) = MEANS(x, num_slices=slices)
            np.testing.assert_array_equal([mean, again], [want, want])
            assert np.isnan(var)
        np.testing.assert_array_equal(MEANS.over(x, batches=[1, slice(1, None)])[0], want)


@pytest.mark.parametrize("rest", [[-200.0, -100.0], [-np.inf, -150.0], [-np.inf, 90.0]])
def test_log_sum_exp_beside_nothing(few_replicas, rest):
    """Parts that are all -inf add nothing, and their gradients are 0."""
    for x in (np.float32([-np.inf, *rest]), np.float32([*rest, -np.inf, -np.inf])):
        want = jax.nn.logsumexp(jnp.asarray(x))
        for slices in (1, 2):
            np.testing.assert_allclose(LOG_SUM(x, num_slices=slices), want, rtol=1e-6)
        np.testing.assert_allclose(LOG_SUM.over(x, batches=[1, slice(1, None)]), want, rtol=1e-6)
        if np.isfinite(want):
            np.testing.assert_allclose(jax.grad(LOG_SUM)(jnp.asarray(x)), jax.nn.softmax(jnp.asarray(x)), atol=1e-6)


def test_means_far_apart(few_replicas):
    """Their difference would overflow, they do not."""
    f = synk.function(stats.mean)
    for x in (np.float32([3e38, -3e38]), np.float32([3e38, -3e38, 3e38])):
        np.testing.assert_allclose(f(x), x.astype(np.float64).mean(), rtol=1e-6, atol=1e31)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.int32, np.uint8, np.bool_, np.complex64])
def test_dtypes(few_replicas, dtype):
    """Answers have NumPy's kind; what is narrow is added up in float32."""
    x = (np.arange(21) % 5).astype(dtype)
    f = synk.function(lambda x: (stats.mean(x), stats.var(x)))
    mean, var = f(x)
    wide = x.astype(np.complex128 if dtype == np.complex64 else np.float64)
    np.testing.assert_allclose(np.asarray(mean, wide.dtype), wide.mean(), rtol=1e-2)
    np.testing.assert_allclose(np.asarray(var, np.float64), wide.var(), rtol=1e-2)
    is_inexact = jnp.issubdtype(dtype, jnp.inexact)
    assert mean.dtype == (dtype if is_inexact else np.float32)


def test_two_collectives_a_dtype():
    """However many statistics there are; none that none needs."""
    with group_of("devices", 2):
        x, labels = rows_of(40), np.zeros(40, np.int32)
        text = F.compile(x, labels, labels).as_text()
    found = re.findall(r"= \(?(\w+)\[.*? (all-\w+)(?:-start)?\(", text)
    assert all(found.count(each) <= 1 for each in found), found


def test_programs_serve_all_counts():
    """Which part has how many rows is data: totals that cut alike share a program."""
    with group_of("simulated", 3):
        f = synk.function(lambda x: (stats.var(x), stats.argmax(x)))
        for count in (10, 11, 10, 11):
            f(rows_of(count))
        assert f.stats.compilations == 1


def test_row_numbers(few_replicas):
    """Those of the selection, in each slice."""
    f = synk.function(lambda x: synk.row_numbers() + 0 * x.astype(np.int32), reduce="concat")
    for count in (5, 6, 7):
        for slices in (1, 2):
            assert f(np.zeros(count), num_slices=slices).tolist() == list(range(count))
    assert f(np.zeros(9), batch=[3, 1, 8]).tolist() == [0, 1, 2]
    assert f.serial(np.zeros(4)).tolist() == [0, 1, 2, 3]
    assert jax.jit(f)(np.zeros(5)).tolist() == [0, 1, 2, 3, 4]
    w = synk.shared(np.zeros(1, np.float32))
    synk.scatter(w, np.float32([3, 1, 4, 1, 5, 9, 2]))
    held = synk.function(
        lambda: (w.value.astype(int) * 0 + synk.row_numbers(), stats.argmax(w.value)), outputs=("concat", "merge")
    )
    for slices in (1, 2):
        numbers, most = held(num_slices=slices)
        assert numbers.tolist() == list(range(7)) and int(most) == 5
    assert held.serial()[0].tolist() == list(range(7))
    with pytest.raises(synk.SynkError, match="If a variable brings them, read its value first"):
        synk.function(lambda: synk.row_numbers() + w.value.astype(int), reduce="concat")()
    with pytest.raises(synk.SynkError, match="there are rows only inside a synk function"):
        synk.row_numbers()
    with pytest.raises(synk.SynkError, match="it has no scattered input, so no rows"):
        synk.function(lambda x: synk.row_numbers(), inputs=["broadcast"])(np.zeros(3))


REFUSED = [
    (lambda x: synk.Monoid({"a": x.sum()}, lambda a, b: [a["a"]]), ValueError, "merge changes the tree of state"),
    (lambda x: synk.Monoid(x.sum(0), lambda a, b: jnp.stack([a, b])), ValueError, r"from float32\[3\] to float32\[2, 3\]"),
    (lambda x: synk.Monoid({"n": jnp.int32(3)}, lambda a, b: {"n": a["n"].astype(np.float32)}), ValueError, r"state\['n'\] from int32"),
    (lambda x: stats.top_k(x[:, 0], 10), ValueError, "needs 10 rows, as top_k does, but this call has 7 in all"),
    (lambda x: stats.top_k(x, 2), ValueError, "give one number a row"),
    (lambda x: stats.top_k(x[:, 0], 0), ValueError, "k is 0; give an integer >= 1"),
    (lambda x: stats.histogram(x, 5), ValueError, "needs range="),
    (lambda x: stats.quantile(x, jnp.array([0.5])), TypeError, "quantile: q is an argument, or made by jax.numpy in a trace"),
    (lambda x: stats.quantile(x, x[0]), TypeError, 'quantile: q is an argument, .* pass it as "static"'),
    (lambda x: stats.bincount(x.astype(int), jnp.array(3)), TypeError, "bincount: length is an argument"),
    (lambda x: stats.confusion(x.astype(int), x.astype(int), jnp.array(3)), TypeError, "confusion: classes is an argument"),
    (lambda x: stats.histogram(x, jnp.linspace(0, 1, 3)), TypeError, "bins is an argument, or made by jax.numpy in a trace. Make it by NumPy"),
    (lambda x: stats.bincount(x, 5), TypeError, "it counts integers, but this array has dtype float32"),
    (lambda x: stats.cov(x[:, 0]), ValueError, "give rows of columns"),
    *[(of, ValueError, "entry a row; reshape the array before the call") for of in (
        lambda x: stats.quantile(x.reshape(-1), 0.5), lambda x: stats.top_k(x.reshape(-1), 1),
        lambda x: stats.argmax(x.reshape(-1)), lambda x: stats.argmin(x[:1]), lambda x: stats.quantile(x.sum(0), [0.1]),
    )],
    (lambda x: stats.quantile(x, 1.5), ValueError, "give numbers from 0 to 1"),
    (lambda x: stats.std(x.sum()), ValueError, "stats.std: a scalar has no rows"),
    (lambda x: stats.confusion(x[:, 0].astype(int), jnp.zeros(99, int), 3), ValueError, "labels have shape"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "error", "message"), REFUSED, ids=[f"{i} {message}" for i, (*_, message) in enumerate(REFUSED)]
)
def test_refuses(few_replicas, fn, error, message):
    """Before anything runs, and a good call after it works."""
    f = synk.function(fn)
    with pytest.raises(error, match=message):
        f(rows_of(7))
    with pytest.raises(error, match=message):
        jax.jit(f)(rows_of(7))
    if "top_k" in message:
        assert jax.tree.leaves(f(rows_of(11)))[0].shape == (10,)


def test_refuses_other_ops(few_replicas):
    """A Monoid says itself how it combines."""
    with pytest.raises(ValueError, match=r'is a Monoid, which goes with "merge", but its op is .mean.'):
        synk.function(lambda x: stats.var(x), reduce="mean")(rows_of(7))
    with pytest.raises(TypeError, match=r"Return a synk.Monoid, as synk.stats makes"):
        synk.function(lambda x: x.sum(), outputs="merge")(rows_of(7))


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m[0], lambda m: [*m], lambda m: m + 1, lambda m: 1 - m, lambda m: np.ones(2) * m, lambda m: float(m),
        lambda m: m > 1, lambda m: m == 1, lambda m: np.asarray(m), lambda m: np.sqrt(m), lambda m: jnp.asarray(m),
        lambda m: m.shape, lambda m: len(m), lambda m: bool(m),
    ],
)  # fmt: skip
def test_a_monoid_is_no_array(few_replicas, use):
    """Used as one, outside or in a function, it says where its value is."""
    with pytest.raises(
        (TypeError, AttributeError, synk.SynkError), match=r"its value is `\.value`; returned .* finished"
    ):
        use(stats.histogram(rows_of(7), 3, (0, 1)))
    with pytest.raises(
        (TypeError, AttributeError, synk.SynkError), match=r"its value is `\.value`; returned .* finished"
    ):
        synk.function(lambda x: use(stats.moments(x)))(rows_of(7))


def test_finished_by_hand():
    """`.value` is the answer for one part's rows."""
    x = rows_of(9)
    assert_close(stats.var(x).value, x.var(0), rtol=1e-4, atol=1e-6)
    leaves, treedef = jax.tree.flatten(stats.var(x))
    assert_close(jax.tree.unflatten(treedef, leaves).value, x.var(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "x", [np.array([-0.5, 0.5, 1.5, 2.0, -1.0, 3.0], np.float32), np.array([-3, 0, 1, 2, 16777217])]
)
@pytest.mark.parametrize(
    "bins", [[0, 1, 2], slow(np.array([0.0, 0.5, 2])), slow(np.array([-1, 0, 2], np.float32)), np.array([0, 16777217])]
)
def test_edges_of_a_histogram(bins, x):
    """Of any dtype: integers are compared as they are, all else as floats, and nothing is cut off on the way."""
    counts, edges = synk.function(lambda x: stats.histogram(x, bins))(x)
    wanted = np.histogram(x, bins)
    assert counts.tolist() == wanted[0].tolist()
    np.testing.assert_allclose(edges, wanted[1], rtol=1e-6)


EDGES = [
    (np.uint8, [0, 128, 256]), (np.uint8, [-1, 10, 300]), (np.uint8, np.arange(257)), (np.uint8, [300, 400]),
    (np.uint8, [-5, -2]), (np.uint8, [-5, 0]), (np.uint8, [255, 256]), (np.int8, [-200, 0, 200]), (np.int8, [-128, 127]),
    (np.uint32, [0, 2**31, 2**32]), (np.int32, [-(2.0**40), 16777216.5, 2.0**40]), (np.int32, [-np.inf, 0.5, np.inf]),
    (np.int32, [16777216.5, 2**31 - 1]), (np.uint8, np.linspace(0, 255, 11)), (np.uint32, [-1, 2**31, 2**32 - 1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "bins"), [slow(*edges) if i % 3 else edges for i, edges in enumerate(EDGES)], ids=str
)
def test_edges_beyond_a_dtype(few_replicas, dtype, bins):
    """Integers fall into bins as NumPy's, whatever edges their dtype has, fractions and infinities too."""
    limits = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(limits.min, limits.max, 50, dtype, endpoint=True)
    x = np.concatenate([x, np.array([limits.min, limits.max, 0, 1, 16777217 % (limits.max + 1)], dtype)])
    assert synk.function(lambda x: stats.histogram(x, bins))(x)[0].tolist() == np.histogram(x, bins)[0].tolist()


def test_edges_in_64_bits(few_replicas):
    """Compared exactly, where NumPy compares floats; counts are int64 too."""
    with jax.enable_x64(True):
        for dtype, edges in ((np.uint64, [0, 2**63, 2**64 - 1]), (np.int64, [-(2**63), 2**53, 2**63 - 1])):
            x = np.array([edges[0], edges[1] - 1, edges[1], edges[2] - 1, edges[2]], dtype)
            counts, _ = synk.function(partial(stats.histogram, bins=edges))(x)
            assert (counts.tolist(), counts.dtype) == ([2, 3], np.int64)


def merged(statistic, x, doublings):
    """The answer of so many copies of these rows that only states can tell."""
    monoid = statistic(x)
    for _ in range(doublings):
        monoid.state = monoid.merge(monoid.state, monoid.state)
    return monoid.value


@pytest.mark.parametrize("doublings", [slow(30), 31, 40])
def test_rows_beyond_int32(doublings):
    """Their number is one for which there is room; no count of a bin goes past the largest and on from the least."""
    x = np.array([0.0, 1.0, 5.0], np.float32)
    mean, var = merged(stats.moments, x, doublings)
    np.testing.assert_allclose([mean, var], [2, x.var()], rtol=1e-5)
    np.testing.assert_allclose(merged(partial(stats.std, ddof=1), x, doublings), x.std(), rtol=1e-5)
    np.testing.assert_allclose(merged(stats.cov, x[:, None], doublings), [[x.var()]], rtol=1e-5)
    most = 2**31 - 1
    want = [min(2**doublings, most), min(2 * 2**doublings, most), 0]
    digits = np.array([0, 1, 1])
    assert merged(partial(stats.bincount, length=3), digits, doublings).tolist() == want
    assert merged(partial(stats.histogram, bins=3, range=(0, 3)), digits, doublings)[0].tolist() == want
    confusion = merged(lambda x: stats.confusion(x, x, 2), digits, doublings)
    assert confusion.tolist() == [[want[0], 0], [0, want[1]]]
    with jax.enable_x64(True):
        assert merged(partial(stats.bincount, length=2), digits, doublings).tolist() == [2**doublings, 2 * 2**doublings]


def test_what_is_no_class_in_64_bits(few_replicas):
    """It does not become one where it is narrowed."""
    for dtype in (np.int64, np.uint64, np.uint32):
        with jax.enable_x64(True):
            x = np.array([2**32 + 1 if dtype != np.uint32 else 2**31 + 1, 1, 2**31], dtype)
            assert synk.function(lambda x: stats.bincount(x, 3))(x).tolist() == [0, 1, 0]
            assert synk.function(lambda x: stats.confusion(x, x, 3))(x).tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_covariance_of_complex_rows(few_replicas):
    """As NumPy conjugates."""
    parts = np.random.default_rng(0).normal(size=(2, 11, 3))
    x = (parts[0] + 1j * parts[1]).astype(np.complex64)
    got = synk.function(lambda x: stats.cov(x))(x)
    np.testing.assert_allclose(got, np.cov(x.astype(np.complex128), rowvar=False), rtol=1e-4, atol=1e-5)


WAYS = {
    "call": lambda f, *args: f(*args),
    "slices": lambda f, *args: f(*args, num_slices=2),
    "serial": lambda f, *args: f.serial(*args),
    "jit": lambda f, *args: jax.jit(f)(*args),
    "over": lambda f, *args: f.over(*args, batches=[2, slice(2, 5)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_states_are_all_that_meets(few_replicas, way):
    """What merge and finish take from the function besides would be of another trace, or of another call."""
    x, w = np.arange(5, dtype=np.float32), synk.shared(np.float32(2), name="w")
    by_variable = synk.function(lambda x: synk.Monoid(x.sum(), lambda a, b: a + b + w.value), name="f")
    by_argument = synk.function(lambda x, t: synk.Monoid(x.sum(), jnp.add, lambda s: s * t), inputs=["x"], name="g")
    for _ in range(2):
        with pytest.raises(ValueError, match="f: output: merge of its Monoid uses an argument, a shared variable, or"):
            WAYS[way](by_variable, x)
        with pytest.raises(ValueError, match="g: output: finish of its Monoid uses an argument"):
            WAYS[way](by_argument, x, 2.0)
    kept = synk.function(
        lambda x: synk.Monoid((x.sum(), w.value), lambda a, b: (a[0] + b[0], a[1]), lambda s: s[0] * s[1])
    )
    if way != "jit":  # under which no variable is read
        for value in (2, 5):
            w.value = np.float32(value)
            assert float(WAYS[way](kept, x)) == 10 * value


@pytest.mark.parametrize(("offset", "dtype"), [slow(0, np.int32), slow(5e6, np.uint32), (1.7e9, np.int32)])
def test_integers_far_from_zero(few_replicas, offset, dtype):
    """Timestamps, say: float32 has no room for them, and what is between them is exact."""
    x = (offset + np.random.default_rng(0).normal(size=(101, 3)) * 5).clip(0).astype(dtype)
    wide = x.astype(np.float64)
    var, mean, cov = map(synk.function, (stats.var, stats.mean, stats.cov))
    for _ in range(2):
        np.testing.assert_allclose(var(x, num_slices=2), wide.var(0), rtol=1e-5)
        np.testing.assert_allclose(mean(x), wide.mean(0), rtol=1e-6)
        np.testing.assert_allclose(cov(x), np.cov(wide, rowvar=False), rtol=1e-4, atol=1e-4)
