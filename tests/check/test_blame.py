"""Who makes a call's numbers not finite: the row, where it ran, and the line; never a row that is not to blame."""

from math import ceil, log2

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._check.probe import find_first

from ..helpers import assert_close, first_of, group_of, mapped, parts_of, raised_by, slow, unchanged


class TestSearch:
    """The search by itself, of sets that a made-up function finds bad."""

    @pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 1000])
    def test_one_row(self, rows):
        """Found wherever it is, by few questions, and the first of several."""
        for bad in {0, rows // 3, rows // 2, rows - 1}:
            asked = []

            def is_bad(subset, bad=bad, asked=asked):
                asked.append(len(subset))
                return bad in subset

            assert find_first(rows, is_bad) == (bad, bad)
            assert len(asked) <= 2 * log2(rows) + 4
            both = {bad, rows - 1}
            if rows > 2 and bad < rows - 2:
                assert find_first(rows, lambda subset, both=both: bool(both & set(subset))) == (bad, bad)

    @pytest.mark.parametrize("rows", [2, 7, 64, 1000])
    def test_rows_together(self, rows):
        """A pair that is bad only together, what is bad of any row alone, and nothing."""
        for one, two in {(0, rows - 1), (rows // 3, rows // 3 + 1)}:
            asked = []

            def is_bad(subset, one=one, two=two, asked=asked):
                asked.append(1)
                return {one, two} <= set(subset)

            assert find_first(rows, is_bad) == (one, two)
            assert len(asked) <= 2 * ceil(log2(rows)) + 4
        assert find_first(rows, lambda subset: len(set(subset)) < 2 or len(subset) == rows) == (0, rows - 1)
        assert find_first(rows, lambda subset: True) == (0, rows - 1)
        assert find_first(rows, lambda subset: False) is None


def log_loss(x, w):
    h = jnp.log(x)  # this line
    return ((h @ w) ** 2).mean()


def root_gradient(x, w):
    def loss(w):
        y = x @ w
        return jnp.where(y > 0, jnp.sqrt(y), 0.0).sum()  # whose gradient is NaN at 0, where its value is not

    return loss(w), jax.grad(loss)(w)


GROUPS = [("devices", 2), ("simulated", 3)]


@pytest.mark.parametrize("slices", [slow(1), 3])
@pytest.mark.parametrize("kind", first_of(*GROUPS), ids=str)
def test_rows_are_found(kind, slices):
    """At many positions, warm, with one program for all of it; row, replica, slice and line are right."""
    f = synk.function(log_loss, inputs=["x"], reduce="mean")
    rows, w = 103, np.ones(4, np.float32)
    clean = np.random.default_rng(0).uniform(1, 2, (rows, 4)).astype(np.float32)
    with group_of(*kind) as group:
        assert f.blame(clean, w, num_slices=slices) is None
        compilations = None
        for bad in [0, 1, 17, 34, 35, 51, 52, 68, 69, 70, 77, 101, 102]:
            x = clean.copy()
            x[bad, 2] = -1
            found = f.blame(x, w, num_slices=slices)
            split = parts_of(np.arange(rows), group.size, slices)
            [(replica, part)] = [(r, s) for r, parts in enumerate(split) for s, part in enumerate(parts) if bad in part]
            assert (found.row, found.replica, found.slice) == (bad, replica, part)
            assert found.line.endswith(": h = jnp.log(x)  # this line")
            assert found.line.startswith("test_blame.py:")
            assert found.probes <= 2 * log2(rows) + 4
            now = f._probe_plans.compiled
            assert compilations in (None, len(now))
            compilations = len(now)
        assert f.stats.calls == 0


def test_gradients_that_are_not_finite(group):
    """Where values are; and the line that they come from."""
    f = synk.function(root_gradient, inputs=["x"])
    x, w = np.random.default_rng(0).uniform(1, 2, (41, 3)).astype(np.float32), np.ones(3, np.float32)
    x[29] = 0
    assert np.isfinite(f(x, w)[0])
    found = f.blame(x, w)
    assert found.row == 29
    assert "jnp.sqrt(y)" in str(found)


@pytest.mark.parametrize("place", ["memory", slow("disk"), slow("host"), "scatter", slow("broadcast")])
def test_rows_of_batches(place, group):
    """The number is that of the dataset's row, wherever the data lies."""
    x = np.ones((50, 4), np.float32)
    x[31, 1] = -1
    given = {"memory": lambda: x, "disk": lambda: mapped(x)}.get(place, lambda: synk.data(x, place=place))()
    f, w = synk.function(log_loss, inputs=["x"], reduce="mean"), np.ones(4, np.float32)
    for _ in range(2):
        assert f.blame(given, w).row == 31
        found = f.blame(given, w, batch=[49, 30, 31, 2, 31], num_slices=2)
        assert (found.row, found.replica, found.slice) == (31, 0, 1)
        assert f.blame(given, w, batch=slice(0, 31)) is None


def test_coupled_rows_are_not_blamed(group):
    """Statistics across rows, whose badness is no row's own."""
    same = np.ones((64, 2), np.float32)
    divided = synk.function(lambda x: x / x.std(0, keepdims=True), reduce="concat")
    if group.size == 1 or divided.blame(same) is not None:
        found = divided.blame(same)
        assert (found.row, found.rows) == (None, (0, 63))
    pair = synk.function(lambda x: jnp.where((x == 3).any() & (x == 4).any(), jnp.nan, x.sum()))
    x = np.zeros(12, np.float32)
    x[0], x[1] = 3, 4  # on one replica, whatever the group
    found = pair.blame(x)
    assert (found.row, found.rows) == (None, (0, 1))
    assert "taken together" in str(found)


def test_the_gradient_of_coupled_rows(four):
    """Under engine="jit" the gradient that is NaN is named, and the line, though the mask is infinite on purpose."""

    def loss(p, x):
        scores = jnp.where(jnp.tri(len(x), k=-1, dtype=bool), -jnp.inf, x @ x.T)
        scores = scores / p["t"]  # this line
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(scores)))

    step = synk.train.step(loss, {"t": np.float32(0.1)}, optax.sgd(0.1), engine="jit", nan="raise")
    with pytest.raises(FloatingPointError) as caught:
        step(np.ones((7, 2), np.float32))
    said = str(caught.value)
    assert said.startswith(
        "loss: the gradient of params['t'] is not finite, but no row by itself is to blame: rows 0 to 6"
    )
    assert "scores = scores / p" in said and step.blame(np.ones((7, 2), np.float32)).line.endswith("# this line")


@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
def test_rows_that_overflow_together(group, op):
    """A row that is fine once, and not as often as the call has rows, is not to blame."""
    fn = {"sum": jnp.sum, "prod": lambda x: jnp.log(jnp.prod(x)), "mean": lambda x: (x**2).mean()}[op]
    f = synk.function(fn, reduce="mean", name="f")
    rows = 48 * group.size
    x = {"sum": np.zeros, "prod": np.ones, "mean": np.zeros}[op](rows, np.float32)
    x[1::2] = {"sum": 3e37, "prod": 0.01, "mean": 1e19}[op]
    found = f.blame(x)
    assert found.row is None
    assert np.isfinite(f.serial(x[1:2]))


def test_the_first_replicas_own_output(group):
    """What other replicas have there counts for nothing."""
    f = synk.function(lambda x: jnp.log(x).sum(), reduce="first", nan="raise")
    x = np.ones(24, np.float32)
    x[-1] = -1
    if group.size > 1:
        assert float(f(x)) == 0
    with pytest.raises(FloatingPointError, match="row 0 "):
        f(x[::-1].copy())


def test_weights_of_nothing(group):
    """A part of weight 0 is NaN by itself, and counts for nothing."""

    @synk.function(reduce="mean")
    def masked(x, mask):
        weight = mask.sum()
        return synk.Weighted((jnp.where(mask > 0, jnp.log(x), 0.0)).sum() / weight, weight)

    x, mask = np.ones(40, np.float32), np.tile(np.float32([0, 0, 0, 1]), 10)
    assert masked.blame(x, mask) is None
    x[27] = -1
    assert masked.blame(x, mask).row == 27


def test_what_is_bad_before(group):
    """Shared variables and broadcast arguments come first; then what combines, and then."""
    w = synk.shared({"a": np.ones(3, np.float32)}, name="w")

    @synk.function(inputs=["x"], reduce="sum")
    def f(x, scale):
        return (x * w.value["a"][None] * scale).sum()

    @f.then
    def f(total):
        w.value = {"a": w.value["a"] / (total - 12)}

    x = np.ones((5, 3), np.float32)
    assert f.blame(x, 1.0) is None
    assert "argument scale is not finite" in str(f.blame(x, np.nan))
    found = f.blame(x[:4], 1.0)
    assert "every row is fine; then makes w['a'] not finite" in str(found)
    assert w.value["a"].tolist() == [1, 1, 1]  # nothing is kept
    f(x[:4], 1.0)
    assert "w['a'] holds numbers that are not finite, before the call" in str(f.blame(x, 1.0))
    big = synk.function(lambda x: x.sum().astype(jnp.float32) * 1e38)
    if group.size > 1:
        assert "combining its parts" in str(big.blame(np.full(2 * group.size, 1.5, np.float32)))


@pytest.mark.parametrize("slices", [slow(1), 2])
def test_what_is_infinite_already_is_not_of_the_call(group, slices):
    """An optimizer's best loss so far begins as infinity; a row that is bad is still named."""
    w = synk.shared(
        {"best": np.float32(np.inf), "last": np.float32(0), "never": np.full(2, np.nan, np.float32)}, name="w"
    )

    @synk.function(reduce="mean", nan="raise")
    def step(x):
        return jnp.log(x).mean()

    @step.then
    def step(loss):
        old = w.value
        best = jnp.where(old["last"] > 1, jnp.minimum(old["best"], loss), old["best"])
        w.value = {"best": best, "last": old["last"] + 1, "never": old["never"] * 2}
        return loss

    x = np.full(7, np.e, np.float32)
    bad = x.copy()
    bad[5] = -1
    for turn in range(1, 5):
        assert float(step(x, num_slices=slices)) == pytest.approx(1)
        assert float(w.value["last"]) == turn and np.isinf(w.value["best"]) == (turn < 3)
        with pytest.raises(FloatingPointError, match="row 5 makes it not finite"):
            step(bad, num_slices=slices)
        assert "row 5 " in str(step.blame(bad, num_slices=slices))
    worse = synk.function(
        lambda x: x.sum(),
        then=lambda total: setattr(w, "value", {**w.value, "best": -w.value["best"] * jnp.inf}),
        nan="raise",
    )
    w.value = {"best": np.float32(np.inf), "last": np.float32(3), "never": np.zeros(2, np.float32)}
    with pytest.raises(FloatingPointError):
        worse(x)  # another infinity than before
    assert w.value["best"] == np.inf
    w.value = {"best": np.float32(np.inf), "last": np.float32(np.nan), "never": np.zeros(2, np.float32)}
    step(x, num_slices=slices)  # NaN was there
    assert "w['last'] holds numbers that are not finite, before the call" in str(step.blame(x, num_slices=slices))


@pytest.mark.parametrize(("slices", "donate"), [slow(1, False), (3, True)])
def test_a_mask_in_the_state(group, slices, donate):
    """-inf that stays is not of the call, in slices too and unread by then; rows are found beside it, and nothing where
    all is fine."""
    x, mask = np.linspace(-1, 1, 11, dtype=np.float32), np.array([0, -np.inf], np.float32)
    bad = x.copy()
    bad[7] = -5
    step = synk.train.step(
        lambda p, s, x: (jnp.log(x + 2).mean() * p, s), np.float32(1), optax.sgd(0.1), state=mask, nan="raise",
        donate=donate,
    )  # fmt: skip
    for _ in range(2):
        step(x, num_slices=slices)
        assert step.blame(x, num_slices=slices) is None
        with pytest.raises(FloatingPointError, match="row 7 makes it not finite"):
            step(bad, num_slices=slices)
        assert step.state.value.tolist() == mask.tolist()
    w = synk.shared(mask, "w")
    local = synk.function(
        lambda x: (jnp.log(x + 2).sum(), w.update(w.value, slices="last")), outputs="sum", nan="raise", donate=donate
    )
    assert local.blame(x, num_slices=slices) is None and local.blame(bad, num_slices=slices).row == 7
    spoilt = synk.function(lambda x: (w.value[1] * x).sum(), name="spoilt")
    assert str(spoilt.blame(x)) == "spoilt: w holds numbers that are not finite, before the call."
    masked = synk.function(lambda x, m: (jnp.log(x + 2).sum() + jnp.exp(m)).sum(), ["x"], name="masked")
    assert masked.blame(x, mask) is None and masked.blame(bad, mask).row == 7


def test_updates_of_replicas(group):
    """What the function writes on each replica is looked at too."""
    w = synk.shared(np.float32(1), name="w")

    @synk.function
    def f(x):
        w.value = w.value + jnp.log(x).sum()
        return x.sum()

    x = np.ones(9, np.float32)
    x[7] = -1
    assert f.blame(x).row == 7
    assert float(w.value) == 1


def test_training_steps(group):
    """`synk.train.step` has it, and takes no step."""
    step = synk.train.step(lambda w, x: jnp.mean(jnp.sqrt(x @ w)), np.ones(3, np.float32), optax.sgd(0.5))
    x = np.ones((20, 3), np.float32)
    x[13] = -1
    found = step.blame(x)
    assert found.row == 13
    assert "jnp.sqrt" in str(found)
    assert step.params.value.tolist() == [1, 1, 1]


def test_a_gradient_that_clipping_spoils(group):
    """The row is named whose gradient is infinite, though all that a step returns and updates is NaN."""
    step = synk.train.step(lambda w, x: jnp.sqrt(x - w).mean(), np.float32(1), optax.sgd(0.1), clip=1.0)
    x = np.full(24, 2, np.float32)
    x[17] = 1
    found = step.blame(x)
    assert found is not None and found.row == 17


def test_training_steps_refuse(group):
    """`nan="raise"` of `synk.train.step`: parameters and optimizer stay, and training goes on."""
    step = synk.train.step(
        lambda w, x: jnp.mean(jnp.sqrt(x @ w)), np.ones(3, np.float32), optax.sgd(0.5, momentum=0.5), nan="raise"
    )
    x = np.ones((20, 3), np.float32)
    bad = x.copy()
    bad[13] = -1
    first = step(x)
    before = jax.device_get((step.params.value, step.opt_state.value))
    with pytest.raises(FloatingPointError, match="row 13 "):
        step(bad)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((step.params.value, step.opt_state.value)))
    assert step(x) < first


def test_keys_of_rows(group):
    """Typed keys are rows as others are."""
    f = synk.function(lambda x, keys: jnp.log(x + 0 * jax.vmap(jax.random.uniform)(keys)).sum())
    x = np.ones(9, np.float32)
    x[4] = -1
    assert f.blame(x, synk.row_keys(jax.random.key(0), 9)).row == 4


def test_what_it_refuses(group):
    """Rows that cannot be tried one by one, by name; and traces."""
    x = np.ones(8, np.float32)
    near = synk.function(lambda x: x[1:-1], inputs={"x": synk.Overlap(1)}, reduce="concat")
    with pytest.raises(ValueError, match="neighbours"):
        near.blame(x)
    held = synk.shared(np.ones(8, np.float32), name="held")
    synk.scatter(held, x)
    with pytest.raises(ValueError, match="held holds rows"):
        synk.function(lambda: held.value.sum()).blame()
    with pytest.raises(ValueError, match=r"synk\.local"):
        synk.function(jnp.sum).blame(synk.local(x))
    f = synk.function(jnp.sum)
    with pytest.raises(synk.SynkError, match="not inside jit"):
        jax.jit(f.blame)(x)
    assert f.blame(x) is None


def test_a_function_that_refuses_one_row(group):
    """Its row is blamed all the same, without a line."""

    def by_fours(x):
        assert x.shape[0] % 4 == 0
        return jnp.log(x).sum()

    x = np.ones(16, np.float32)
    x[5] = -1
    found = synk.function(by_fours).blame(x)
    assert (found.row, found.line) == (5, None)


def averaged(w, **options):
    """A step that adds the mean logarithm of rows."""

    @synk.function(reduce="mean", name="averaged", nan="raise", **options)
    def step(x):
        return jnp.log(x).mean()

    @step.then
    def step(mean):
        w.value = {"sum": w.value["sum"] + mean, "calls": w.value["calls"] + 1}
        return mean

    return step


@pytest.mark.smoke
@pytest.mark.parametrize(("slices", "donate"), [(1, True), slow(2, True), slow(2, False)])
def test_nan_raises(group, slices, donate):
    """It names the row, updates nothing, and the next call goes on; no collective is added."""
    w = synk.shared({"sum": np.float32(0), "calls": np.int32(0)}, name="w")
    step, good = averaged(w, donate=donate), np.full(11, np.e, np.float32)
    bad = good.copy()
    bad[7] = -1
    for calls in (1, 2):
        step(good, num_slices=slices)
        with pytest.raises(FloatingPointError, match=r"row 7 makes it not finite.*jnp\.log"):
            step(bad, num_slices=slices)
        with pytest.raises(FloatingPointError, match="row 7 "):
            list(step.iterate(bad, batches=[slice(0, 7), slice(7, 9)], num_slices=slices))
        assert int(w.value["calls"]) == 2 * calls
        np.testing.assert_allclose(float(w.value["sum"]), 2 * calls, rtol=1e-6)
        w.get_value(group.size - 1)
    with pytest.raises(FloatingPointError, match="not finite"):
        step.serial(bad, update=True)
    step.check(good, num_slices=slices)
    plain = synk.function(lambda x: jnp.log(x).mean(), reduce="mean")
    refusing = synk.function(lambda x: jnp.log(x).mean(), reduce="mean", nan="raise")
    counts = [sum(len(p.collectives) for p in f.explain(good, num_slices=slices).programs) for f in (plain, refusing)]
    assert counts[0] == counts[1]
    with pytest.raises(FloatingPointError, match="not finite"):
        refusing.over(bad, batches=[4, slice(4, 11)])
    assert float(refusing.over(good, batches=[4, slice(4, 11)])) == pytest.approx(1)


@pytest.mark.parametrize(
    ("place", "size"), [("raw", 0), ("raw", 2), slow("host", 2), slow("scatter", 0), slow("broadcast", 2)]
)
def test_rows_of_batches_in_one_array(group, place, size):
    """It names the row that the batch had picked, though its array has been filled anew for batches ahead."""
    x, memory = np.ones(12, np.float32), np.zeros(3, int)
    x[7] = -1
    f = synk.function(lambda x: jnp.log(x), reduce="concat", nan="raise")

    def batches():
        for picked in ([0, 4, 2], [9, 7, 5], [1, 11, 3], [6, 8, 10]):
            memory[:] = picked
            yield memory

    for _ in range(2):
        rows = x if place == "raw" else synk.data(x, place=place)
        with pytest.raises(FloatingPointError, match="row 7 makes it not finite"):
            list(f.iterate(rows, batches=batches(), prefetch=size))


@pytest.mark.parametrize("donate", [slow(True), False])
def test_nan_in_updates(group, donate):
    """Of then and of replicas, where outputs are finite; equal replicas stay so."""
    w = synk.shared(np.float32(1), name="w")

    @synk.function(nan="raise")
    def local(x):
        w.value = w.value + jnp.log(x).sum()
        return x.sum()

    x = np.ones(5, np.float32)
    x[4] = -1
    with pytest.raises(FloatingPointError, match="row 4 "):
        local(x)
    assert float(w.value) == 1

    @synk.function(nan="raise", donate=donate)
    def after(x):
        return x.sum()

    @after.then
    def after(total):
        w.value = w.value / (total - 3)

    for slices in (1, 2):
        with pytest.raises(FloatingPointError, match="every row is fine; then makes w not finite"):
            after(x, num_slices=slices)
    assert float(w.value) == 1
    after(x[:4])
    assert float(w.value) == 1


def test_weights_that_add_up_to_nothing(group):
    """A mean over no token at all is 0 / 0: it says that weights may be to blame, and only where there are any."""

    def masked(x, mask):
        return synk.Weighted((x * mask).sum() / mask.sum(), mask.sum())

    f = synk.function(masked, reduce="mean", nan="raise")
    x, mask = np.ones(6, np.float32), np.zeros(6, np.float32)
    assert f(x, mask + 1) == 1
    with pytest.raises(
        FloatingPointError, match=r"every row is fine; combining its parts .* weights of all rows add up"
    ):
        f(x, mask)
    plain = synk.function(lambda x: x.sum(), then=lambda total: 1 / (total - 6))
    assert "weights" not in str(plain.blame(x))


def test_debug_nans_blame_too(group):
    """The same error where JAX's own option finds it."""
    f = synk.function(lambda x: jnp.log(x).sum(), name="f")
    x = np.ones(9, np.float32)
    x[5] = -1
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="f: row 5 makes it not finite"):
        f(x)
    assert np.isnan(f(x))


@pytest.mark.parametrize("place", ["raw", slow("host"), "scatter", slow("broadcast")])
def test_rows_beside_minibatches(group, place):
    """The row of the dataset, whichever argument comes first and wherever the others lie."""
    x, ones = np.ones(10, np.float32), np.ones(10, np.float32)
    x[7] = -1
    beside = ones if place == "raw" else synk.data(ones, place=place)
    few = synk.data(np.ones(2, np.float32), minibatch=True)
    f = synk.function(lambda x, y: (jnp.log(x) * y).sum(), nan="raise", name="f")
    assert f.blame(x, few, batch=[2, 7]).row == 7
    assert synk.function(lambda y, x: (jnp.log(x) * y).sum()).blame(few, x, batch=[2, 7]).row == 7
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="f: row 7 makes it not finite"):
            list(f.iterate(x, beside, batches=[[0, 1], [2, 7]]))


def test_the_line_under_debug_nans(group):
    """As without it."""
    f, x = synk.function(lambda x: jnp.log(x).sum()), np.ones(9, np.float32)
    x[5] = -1
    with jax.debug_nans(True):
        found = f.blame(x)
    assert found == f.blame(x) and found.row == 5 and found.line


@pytest.mark.smoke
@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, jax.remat])
def test_the_line_in_a_function_inside(group, wrap):
    """Where the number is made, and not where the function around it is called."""

    def inner(x):
        return jnp.log(x).sum()  # this one

    x = np.ones(9, np.float32)
    x[5] = -1
    assert "jnp.log(x).sum()  # this one" in str(synk.function(lambda x: wrap(inner)(x)).blame(x).line)


def test_wrong_nan():
    """Refused when the function is built."""
    with pytest.raises(ValueError, match='use "raise", or None'):
        synk.function(jnp.sum, nan="warn")


@pytest.mark.slow
def test_infinity_that_is_meant(group):
    """What some rows are before a maximum or a log-sum-exp is to blame for nothing while the answer is finite, and not
    where it is NaN by another row."""
    x, mask = np.arange(1, 34, dtype=np.float32), np.ones(33, bool)
    mask[4:8] = False
    bad = x.copy()
    bad[20] = -1
    masked = [
        synk.function(lambda x, m: jnp.max(jnp.where(m, jnp.log(x), -jnp.inf)), reduce="max", nan="raise"),
        synk.function(lambda x, m: jnp.min(jnp.where(m, jnp.log(x), jnp.inf)), reduce="min", nan="raise"),
        synk.function(lambda x, m: synk.stats.logsumexp(jnp.where(m, jnp.log(x), -jnp.inf)), nan="raise"),
    ]
    for f, slices in zip(masked, (1, 2, 2), strict=True):
        assert np.isfinite(f(x, mask, num_slices=slices)) and f.blame(x, mask, num_slices=slices) is None
        with pytest.raises(FloatingPointError, match="row 20 makes it not finite"):
            f(bad, mask, num_slices=slices)
        assert f.blame(bad, mask, num_slices=slices).row == 20
    plain = synk.function(lambda x: jnp.log(x).sum())
    assert plain.blame(bad, batch=[20, 20]).row == 20
    assert plain.blame(np.where(x == 9, 0, x)).row == 8  # -inf, of which the answer is made
    both = np.where(x == 9, np.inf, np.where(x == 14, -np.inf, x)).astype(np.float32)
    found = synk.function(jnp.sum).blame(both)
    assert found.row == 8 or found.rows == (8, 13)  # where one replica adds them up, neither alone makes NaN


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [6, 7])
def test_debug_nans(group, rows):
    """Under `jax_debug_nans` a NaN raises what users catch, naming the function, and no variable changes."""
    total = synk.shared(np.float32(1), name="total")

    @synk.function(name="logarithm", reduce="mean")
    def logarithm(x):
        return jnp.log(x).mean()

    @logarithm.then
    def logarithm(mean):
        total.value = total.value + mean
        return mean

    logarithm(np.ones(rows, np.float32))
    with unchanged(total), jax.debug_nans(True):
        error = raised_by(lambda: logarithm(-np.ones(rows, np.float32)))
        assert type(error) is FloatingPointError and "logarithm" in str(error)
        logarithm(np.ones(rows, np.float32))
    logarithm(np.full(rows, np.e, np.float32))
    assert_close(total.value, 2.0)


@pytest.mark.filterwarnings("ignore:.*it compiles for the third time")
def test_probes_follow_the_names_of_the_function(group):
    """A probe runs the function as calls do now: another bad row under a name is found, and none where all are fine."""
    bad = 2.0
    f = synk.function(lambda x: jnp.where(x == bad, np.nan, x).sum())
    raising = synk.function(lambda x: jnp.where(x == bad, np.nan, x).sum(), nan="raise")
    x = np.arange(8, dtype=np.float32)
    for bad in (2.0, 5.0, 9.0, 2.0):
        found = f.blame(x)
        assert (found and found.row) == (None if bad == 9.0 else int(bad))
        if bad == 9.0:
            assert raising(x) == x.sum()
        else:
            with pytest.raises(FloatingPointError, match=f"row {int(bad)} makes it not finite"):
                raising(x)
