"""Serial and check: the serial answer, and a message that names the op that was meant."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import assert_close, group_of, numbers, slow, slow_but

X = numbers(9)


def fails(f, *args, **options):
    """What the LawError of a check says."""
    with pytest.raises(synk.LawError) as caught:
        f.check(*args, **options)
    return str(caught.value)


# serial.


@pytest.mark.parametrize("batch", [None, 5, [8, -9, 3]])
def test_serial_runs_all_selected_rows_at_once(four, batch):
    """On one replica, whatever the ops; then follows."""
    seen = []

    def fn(x):
        seen.append(x.shape)
        return x.mean(0)

    f = synk.function(fn, reduce="sum", then=lambda m: m * 2)
    x = X if batch is None else X[:5] if batch == 5 else X[batch]
    assert_close(f.serial(X, batch=batch), x.mean(0) * 2)
    assert set(seen) == {x.shape}


def test_serial_results_lie_as_a_calls(four):
    """On every replica."""
    got = synk.function(lambda x: x.sum(0)).serial(X)
    assert got.devices() == set(four.devices)


@pytest.mark.parametrize("update", [False, True])
def test_serial_updates(four, update):
    """Variables take their new values where asked, those of `fn` and of `then`."""
    w, own = synk.shared(np.float32(1)), synk.shared(np.float32(1))

    @synk.function
    def f(x):
        own.value = own.value + x.sum()
        return x.sum() * w.value

    @f.then
    def f(total):
        w.value = w.value + total
        return w.value

    for _ in range(2):
        f.serial(X, update=update)
    assert float(w.value) == ((1 + X.sum()) ** 2 if update else 1)
    assert float(own.value) == (1 + 2 * X.sum() if update else 1)


@pytest.mark.parametrize("rows", [9, 8, 2])
def test_serial_with_rows_of_variables(four, rows):
    """All of them in rank order; updated, they go back to where they were."""
    held = synk.shared(np.zeros((1, 2), np.float32))
    synk.scatter(held, numbers(rows))

    @synk.function(reduce="concat")
    def f():
        held.value = held.value * 2
        return held.value

    assert_close(f.serial(update=True), 2 * numbers(rows))
    assert synk.contrib.synkhronos.get_lengths(held) == [len(part) for part in np.array_split(numbers(rows), 4)]
    assert_close(synk.gather(held, nd_up=0), 2 * numbers(rows))


def test_serial_of_unequal_replicas(four):
    """There is no one value to run with."""
    w = synk.shared(np.float32(1), name="w")
    w.set_value(np.float32(2), rank=1)
    with pytest.raises(synk.errors.DivergedError, match="w: its replicas may hold different values"):
        synk.function(lambda x: x * w.value).serial(X[:, 0])


# check.

LAWFUL = {
    "sum": lambda x: x.sum(0), "mean": lambda x: x.mean(0), "max": lambda x: x.max(), "min": lambda x: x.min(0),
    "prod": lambda x: (1 + x / 64).prod(), "concat": lambda x: x + 1, "any": lambda x: (x > 3).any(),
    "all": lambda x: (x > -3).all(0),
}  # fmt: skip


@pytest.mark.parametrize("op", slow_but(["sum", "mean", "concat"], LAWFUL))
def test_the_right_op_passes(four, op):
    """Over rows that do not divide, in slices too."""
    synk.function(LAWFUL[op], reduce=op).check(X)
    synk.function(LAWFUL[op], reduce=op).check(X, batch=[3, 4, 4, 0, 1], num_slices=2)


@pytest.mark.parametrize("place", ["broadcast", "scatter"])
@pytest.mark.parametrize("size", [1, 4])
def test_an_array_written_behind_its_data(size, place):
    """Rows on the devices that are not those of the array are named, and no op; a write through the data is right."""
    a = np.ones(8, np.float32)
    f = synk.function(lambda x: x.sum(), name="f")
    with group_of("devices", size):
        d = synk.data(a, place=place, name="d")
        f(d)
        f.check(d)
        a[3] = 2
        message = fails(f, d)
        assert "Argument x: the rows of d on the devices are not those of its array" in message
        assert "matched" not in message
        d[:] = 2
        f.check(d)


def test_nan_both_ways(four):
    """What is NaN both ways is named in a warning, since it was not compared; one NaN among numbers is not."""
    w = synk.shared(np.float32(1), name="w")

    @synk.function(outputs=("sum", "mean", "sum"), name="f")
    def f(x):
        w.update(jnp.sqrt(-w.value))
        return jnp.log(-x).sum(), x.mean(), jnp.log(x).sum(0)

    with pytest.warns(UserWarning, match=r"f.check: output\[0\], w: all NaN, .* nothing was compared there") as caught:
        f.check(np.array([[1, 1], [2, -1], [3, 3], [1, 1]]))
    assert len(caught) == 1


@pytest.mark.parametrize("num_slices", [1, 2])
def test_an_op_matches_in_any_order_of_the_rows(four, num_slices):
    """A masked mean of rows on one replica is the sum of parts by chance, which is not named: Weighted is."""
    x, mask = numbers(20)[:, 0], (np.arange(20) < 2).astype(np.float32)
    mean = synk.function(lambda x, mask: (x * mask).sum() / jnp.maximum(mask.sum(), 1), reduce="mean")
    message = fails(mean, x, mask, num_slices=num_slices)
    assert "no op would have matched. Likely cause: synk.Weighted is missing" in message


@pytest.mark.parametrize(
    ("wrong", "right"), [("sum", "mean"), ("mean", "sum"), ("sum", "max"), ("max", "min"), ("mean", "prod")]
)
def test_the_message_names_the_right_op(four, wrong, right):
    """The output, what it is and should be, and the op that would have matched."""
    message = fails(synk.function(LAWFUL[right], reduce=wrong, name="f"), X)
    assert f'f: on 4 replicas the answer is not the serial one.\n  output combined by "{wrong}": it is ' in message
    assert f'"{right}" would have matched' in message


def test_the_newcomers_mean(four):
    """The default sum of a mean loss is as many times too big as there are replicas."""
    f = synk.function(lambda x: jnp.mean(x**2), name="loss")
    message = fails(f, numbers(8))
    assert f"it is {4 * (numbers(8) ** 2).mean():.6g}, serially {(numbers(8) ** 2).mean():.6g}" in message
    assert '"mean" would have matched' in message


@pytest.mark.parametrize("kind", ["devices", slow("simulated")])
def test_one_replica_is_checked_as_two(kind):
    """So a laptop finds what eight devices would."""
    with group_of(kind, 1):
        assert '"mean" would have matched' in fails(synk.function(jnp.mean), X)
        synk.function(jnp.mean, reduce="mean").check(X)
    with group_of(kind, 1):
        w = synk.shared(np.float32(1), name="w")
        held = synk.shared(np.zeros((1, 2), np.float32))
        synk.scatter(held, X)
        synk.function(lambda: (held.value * w.value).mean(), reduce="mean").check()
        assert "mean" in fails(synk.function(lambda: (held.value * w.value).mean()))


def test_each_output_is_named(four):
    """By its path; those that are right are not."""
    f = synk.function(lambda x: {"loss": x.mean(), "top": x.max(), "sum": x.sum()}, name="f")
    message = fails(f, X)
    assert "output['loss']" in message
    assert "output['top']" in message
    assert "output['sum']" not in message


def test_no_op_would_have_matched(four):
    """A standard deviation is none of any parts."""
    assert "no op would have matched" in fails(synk.function(lambda x: x.std(), reduce="mean"), X)


@pytest.mark.parametrize("rows", [12, 13])
def test_the_right_op_beside_rows(four, rows):
    """An output with an entry a row hides the parts of no other, whether rows divide or not."""
    f = synk.function(lambda x: {"loss": x.mean(), "rows": x}, outputs={"loss": "sum", "rows": "concat"})
    assert '"mean" would have matched' in fails(f, numbers(rows))


def test_any_and_all(four):
    """Booleans name booleans' ops."""
    x = np.array([[0, 0], [0, 0], [0, 0], [1, 0]], np.float32)
    assert '"any" would have matched' in fails(synk.function(lambda x: (x > 0).any(), reduce="all"), x)


def test_ops_without_law_are_not_compared(four):
    """`"first"`, `"stack"` and callables mean what their parts are."""
    synk.function(lambda x: (x.sum(),) * 3, outputs=("first", "stack", lambda parts: parts.max())).check(X)


def test_nan_on_both_sides_is_no_difference(four):
    """Where they differ most is another entry."""
    f = synk.function(lambda x: jnp.stack([jnp.nan * x.sum(), x[:, 0].sum()]), reduce="mean", name="f")
    assert f"serially {X[:, 0].sum():.6g} where they differ most" in fails(f, X)


def test_an_update_in_fn_is_named(four):
    """`p.value -= rate * gradient` in fn is each replica's own."""
    p = synk.shared(np.zeros(2, np.float32), name="p")

    @synk.function(reduce="mean")
    def f(x):
        p.value = p.value - 0.5 * x.mean(0)
        return x.mean()

    message = fails(f, X)
    assert "p updated on replica 0: it is" in message
    assert "update it in then" in message
    np.testing.assert_array_equal(p.value, [0, 0])


def test_a_result_of_then_is_named(four):
    """A result that depends on the replica's rank is not the serial one."""
    f = synk.function(lambda x: x.sum(), then=lambda s: {"s": s * synk.size()})
    assert "result['s'] of then: it is" in fails(f, X)


def test_what_follows_from_a_wrong_output_is_not_named(four):
    """The first thing to repair is the op; what then makes of it differs anyway."""
    w = synk.shared(np.float32(0), name="w")
    f = synk.function(lambda x: x.mean(), then=lambda mean: setattr(w, "value", mean))
    message = fails(f, X)
    assert '"mean" would have matched' in message
    assert "w updated" not in message


def test_check_changes_nothing(group):
    """Variables and stats of calls are as before; a right step passes."""
    w, held = synk.shared(np.zeros(2, np.float32)), synk.shared(np.zeros((1, 2), np.float32))
    synk.scatter(held, X)

    @synk.function(inputs=["x"], outputs="mean")
    def f(x, rate):
        return jax.grad(lambda w: jnp.mean((x @ w - held.value[:, 0]) ** 2))(w.value)

    @f.then
    def f(gradient, rate):
        w.value = w.value - rate * gradient

    f(X, 0.25)
    before = np.asarray(w.value)
    f.check(X, 0.25)
    f.check(X, 0.25, num_slices=2)
    np.testing.assert_array_equal(w.value, before)
    assert_close(synk.gather(held, nd_up=0), X)
    assert f.stats.calls == 1
    f(X, 0.25)
    assert not np.array_equal(w.value, before)


def test_tolerances(four):
    """By dtype, or as given."""
    off = synk.function(lambda x: x.mean() + 1e-3 * int(synk.size() > 1), reduce="mean")
    off.check(X, atol=1e-2)
    assert "no op would have matched" in fails(off, X)
    off.check(X, rtol=1, atol=1e-3)
    half = synk.function(lambda x: x.mean() + jnp.float16(1e-3 * (synk.size() > 1)), reduce="mean")
    half.check(jnp.asarray(X, jnp.float16))


def test_calls_after_serial_see_the_state_of_now():
    """One replica, nothing donated, rows that lie in place: a call after `serial` does not read what that one read."""
    with synk.init(1) as group:
        w = synk.shared(np.float32(0))

        def keep(largest):
            w.value = w.value + largest
            return w.value

        f = synk.function(jnp.max, donate=False, reduce="max", then=keep)
        x = jax.device_put(np.ones(4, np.float32), group.stacked)
        assert [float(f(x)), float(f(x)), float(f.serial(x)), float(f(x)), float(f(x))] == [1, 2, 3, 3, 4]


@pytest.mark.slow
@pytest.mark.smoke
def test_optimizers_that_make_steps_of_rounding(four):
    """A gradient that should be 0 is a whole step of Adam's, up or down by how rows are cut: that breaks no law. Typed
    keys go through then, fresh and warm; what breaks it is still found."""
    half = np.random.default_rng(0).normal(size=17).astype(np.float32)
    x = np.random.default_rng(1).permutation([*half, *-half])  # their mean is 0, but for rounding
    b, key = synk.shared(np.float32(0), name="b"), synk.shared(jax.random.key(0), name="key")

    def made(is_wrong):
        @synk.function(inputs=["x"], outputs=("mean", "first"))
        def step(x, noise):
            return jax.grad(lambda b: (b * x).mean())(b.value), noise

        @step.then
        def step(gradient, noise):
            move = 0.05 * gradient / (jnp.abs(gradient) + 1e-12)  # the first step of Adam's
            b.value = b.value - move + (0.3 * synk.rank().astype(np.float32) if is_wrong else 0)
            key.value = jax.random.fold_in(key.value, jax.random.bits(noise))
            return move

        return step

    step = made(False)
    for batch in (None, 20):
        step.check(x, jax.random.key(1), batch=batch)
    step(x, jax.random.key(1))
    b.value = np.float32(0)
    step.check(x, jax.random.key(2))
    assert b.value == 0
    assert "b updated on replica 1: it is" in fails(made(True), x, jax.random.key(3))


def test_steps_are_told_of_their_loss(four):
    """They have no ops to name, and no then."""
    step = synk.train.step(lambda w, x: jnp.sum((w - x) ** 2), np.float32(0), optax.sgd(0.1))
    assert "return the mean over them, or synk.Weighted" in fails(step, X)


EIGHT = np.arange(8, dtype=np.float32)


def test_check_of_a_scalar_weighted_raises_the_law_error(four):
    """The message comes, whatever the leaf's shape."""
    f = synk.function(lambda x: synk.Weighted(x.max(), len(x)), reduce="mean")
    with pytest.raises(synk.LawError, match='"mean" of Weighted'):
        f.check(np.arange(7, dtype=np.float32))


def test_check_frees_what_it_copied():
    """After a check of one replica there are as many live bytes as before."""
    with synk.init(1):
        w = synk.shared(np.zeros(100_000, np.float32))
        f = synk.function(lambda x: x.mean() + w.value[0], reduce="mean")
        f(EIGHT)

        def bytes_alive():
            # JAX keeps an array for each shard beside the whole, in the same memory.
            return sum({a.unsafe_buffer_pointer(): a.nbytes for a in jax.live_arrays() if a.nbytes >= 400_000}.values())

        before = bytes_alive()
        f.check(EIGHT)
        assert bytes_alive() == before


def test_check_of_integers_is_exact(four):
    """However large they are; and what it prints shows them apart."""
    counts = synk.function(lambda x: x.sum() + jnp.int32(1), name="counts")
    with pytest.raises(synk.LawError, match="it is 128000004, serially 128000001"):
        counts.check(np.full(32, 4_000_000, np.int32))
    counts.check(np.full(32, 4_000_000, np.int32), rtol=1e-6)
    with jax.enable_x64(True):
        stamps = synk.function(lambda x: x.max() + x.sum() // 10**15, reduce="max", name="stamps")
        with pytest.raises(synk.LawError, match="serially 1000000000000032"):
            stamps.check(np.full(32, 10**15))
    synk.function(lambda x: (x.max(), x.sum()), outputs=("max", "sum")).check(np.arange(9))


def test_check_says_what_it_finds(four):
    """Where the function refuses other numbers of rows, and without warnings that would come up instead."""

    def by_fives(x):
        assert x.shape[0] % 5 == 0
        return x.std()

    with pytest.raises(synk.LawError, match="on 4 replicas the answer is not the serial one"):
        synk.function(by_fives, reduce="mean").check(np.arange(60, dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(synk.LawError, match='"mean" would have matched'):
            synk.function(lambda x: jnp.stack([x.mean(), jnp.inf])).check(EIGHT)
        with pytest.raises(synk.LawError, match='"mean" would have matched'):
            synk.function(lambda x: x.mean() * 1e37).check(EIGHT + 20, num_slices=2)


def test_what_differs_is_shown_where_it_does(four):
    """And not where numbers are large."""
    f = synk.function(
        lambda x: (
            jnp.array([4000001.0, 0.1], np.float32) + (jnp.array([1.0, 0.1], np.float32) if synk.size() > 1 else 0)
        ),
        reduce="max",
    )
    with pytest.raises(synk.LawError, match=r"it is 0\.2, serially 0\.1"):
        f.check(np.ones(4, np.float32))


def test_a_check_without_rows(group):
    """Of arguments that are all broadcast, of none, and of variables alone."""
    w = synk.shared(np.float32(2))
    synk.function(lambda a: a * 2, inputs=["broadcast"], reduce="max").check(np.float32(1))
    synk.function(lambda: jnp.float32(1), reduce="max").check()
    synk.function(lambda: w.value * 2, reduce="max").check()
