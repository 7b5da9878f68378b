"""synk.map: functions of one row, for any number of rows on any number of replicas."""

import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import SERIAL, assert_close, assert_same, numbers, slow, slow_but

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("on_group")]


def chain(key, start, scale):
    """A row with a loop of its own length, noise, a tree and a number."""

    def step(state):
        x, i = state
        return x + scale * jax.random.normal(jax.random.fold_in(key, i)), i + 1

    x, steps = lax.while_loop(lambda state: (state[0] < 2) & (state[1] < 50), step, (start, 0))
    return {"x": x, "steps": steps, "one": 1}


@pytest.mark.parametrize(
    ("on_group", "rows"),
    slow_but(
        [(("devices", 4), 3), (("devices", 4), 7)],
        [
            *[(("devices", 1), rows) for rows in (1, 3)],
            *[(("devices", 4), rows) for rows in (3, 4, 7)],
            *[(("simulated", 3), rows) for rows in (1, 7)],
        ],
    ),
    ids=str,
    indirect=["on_group"],
)
def test_rows(on_group, rows):
    """As jax.vmap of it on one device: eager, warm, serial, checked, sliced, picked, and under jit and vmap."""
    keys, starts = jax.random.split(jax.random.key(0), rows), np.linspace(-1, 1, rows, dtype=np.float32)
    f, want = synk.map(chain, {"scale": "broadcast"}), jax.vmap(chain, (0, 0, None))(keys, starts, np.float32(0.5))
    for _ in range(2):
        assert_close(f(keys, starts, 0.5), want)
        assert_close(f.serial(keys, starts, 0.5), want)
    f.check(keys, starts, 0.5)
    assert_close(f(keys, starts, 0.5, num_slices=2), want)
    back = np.arange(rows)[::-1].copy()
    assert_close(f(keys, starts, 0.5, batch=back), jax.tree.map(lambda leaf: leaf[back], want))
    assert_close(jax.jit(f)(keys, starts, 0.5), want)


def test_a_single_row_has_no_axis():
    """`fn` sees a row without axis 0; it runs as it is where a replica has one."""
    seen = []

    def fn(x, table, power):
        seen.append((x.shape, table.shape))
        return {"y": (x @ table) ** power}

    f = synk.map(fn, {"table": "broadcast", "power": "static"}, name="rows")
    x, table = numbers(4, 3), numbers(3, 2)
    assert_close(f(x, table, power=2), {"y": (x @ table) ** 2})
    assert set(seen) == {((3,), (3, 2))}
    assert f.name == "rows"


@pytest.mark.parametrize(
    ("on_group", "rows"),
    [*[(("devices", 4), rows) for rows in (4, 7, 2)], slow(("devices", 1), 2), slow(("simulated", 4), 7)],
    indirect=["on_group"],
    ids=str,
)
def test_ops_over_rows(rows):
    """Each combines over all rows, however they are dealt out and sliced."""
    x = numbers(rows, 3) + 1

    def fn(row):
        return {op: row > 1 if op in ("any", "all") else row for op in SERIAL}

    f = synk.map(fn, outputs={op: op for op in SERIAL})
    for slices in (1, 2):
        got = f(x, num_slices=slices)
        for op, of_numpy in SERIAL.items():
            assert_close(got[op], of_numpy(x > 1 if op in ("any", "all") else x))
    assert_close(f.over(x, batches=[1, slice(1, rows)])["mean"], x.mean(0))
    stays = synk.map(lambda row: 2 * row, outputs="scatter")(x)
    assert isinstance(stays, synk.typing.Data)
    assert_same(np.asarray(stays), 2 * x)
    for op in ("stack", "first", jnp.median):
        with pytest.raises(ValueError, match="do not combine by"):
            synk.map(fn, outputs=op)


def test_rows_that_communicate(on_group):
    """Over an axis of their own, as under pmap: as many rows as replicas, and all rows on one device."""
    f = synk.map(lambda x: (x - lax.pmean(x, "i"), lax.psum(x, "i")), outputs=("concat", "same"), axis_name="i")
    x = numbers(on_group.size, 3)
    for _ in range(2):
        assert_close(f(x), (x - x.mean(0), x.sum(0)))
        assert_close(f.serial(x), (x - x.mean(0), x.sum(0)))
    if on_group.size > 1:
        f.check(x)
    many = numbers(2 * on_group.size, 3)
    if on_group.size == 1:
        assert_close(f(many), (many - many.mean(0), many.sum(0)))
        return
    for rows in (2 * on_group.size, on_group.size - 1, on_group.size + 1):
        with pytest.raises(ValueError, match=r'over "i", which takes one row on each replica'):
            f(numbers(rows, 3))
    assert_close(f(x), (x - x.mean(0), x.sum(0)))


def test_rows_that_communicate_do_it_at_once(on_group):
    """Slices and batches would cut them apart: on one replica too, where all rows are."""
    f = synk.map(lambda x: lax.psum(x, "i"), outputs="mean", axis_name="i")
    x = numbers(4 if on_group.size == 1 else on_group.size)
    calls = [lambda: f.over(x, batches=[slice(0, len(x))])]
    if on_group.size == 1:
        calls.append(lambda: f(x, num_slices=2))
    for call in calls:
        with pytest.raises(ValueError, match=r"one row on each replica .* and no slices or batches"):
            call()
    assert_close(f(x), x.sum(0))


def test_rows_that_communicate_take_the_places_of_replicas(on_group):
    """On one device as on many: rank, size, and what synk itself combines."""
    f = synk.map(lambda x: (synk.rank(), synk.size(), synk.all_reduce(x), synk.all_gather(x)), axis_name="i")
    n, x = on_group.size, numbers(on_group.size)
    want = np.arange(n), np.full(n, n), np.tile(x.mean(0), (n, 1)), np.tile(x.reshape(-1), (n, 1))
    assert_close(f(x), want)
    assert_close(f.serial(x), want)


def test_no_replica_waits_for_another(on_group):
    """Nothing is sent but the results, whatever the loops do."""
    f = synk.map(chain, {"scale": "broadcast"}, outputs="scatter")
    keys = jax.random.split(jax.random.key(0), 2 * on_group.size)
    text = f.compile(keys, np.zeros(2 * on_group.size, np.float32), 0.5).as_text()
    assert not re.search(r"all-(reduce|gather)|collective-permute", text)


def test_refusals():
    """Rows must come from somewhere, and ops must be synk's."""
    with pytest.raises(ValueError, match="none of them is scattered"):
        synk.map(lambda x: x, ["broadcast"], name="f")(np.ones(3, np.float32))
    with pytest.raises(TypeError, match=r"synk\.map\(\) got .*'in_axes', which jax\.pmap has\. Instead: name modes"):
        synk.map(lambda x: x, in_axes=(0, None))
    with pytest.raises(ValueError, match="none of synk's"):
        synk.map(lambda x: x, outputs="concatenate")


@pytest.mark.parametrize(
    ("on_group", "rows"),
    [(("devices", 3), 11), slow(("devices", 1), 11), slow(("devices", 8), 11), slow(("simulated", 3), 12)],
    indirect=["on_group"],
    ids=str,
)
def test_a_row_has_a_number_and_a_key_of_its_own(rows):
    """Those of `row_keys(key, rows)`, on any replicas and slices; with a batch those of the selection."""

    def fn(x, key):
        return {"draw": x + jax.random.normal(synk.row_keys(key)), "row": synk.row_numbers()}

    f, x, key = synk.map(fn, ["x"]), np.zeros(rows, np.float32), jax.random.key(3)
    want = {"draw": jax.vmap(jax.random.normal)(synk.row_keys(key, rows)), "row": np.arange(rows)}
    assert len(np.unique(want["draw"])) == rows
    for _ in range(2):
        assert_close(f(x, key), want)
    assert_close(f(x, jax.random.PRNGKey(3), num_slices=2), want)
    assert_close(f.serial(x, key), want)
    f.check(x, key)
    assert_close(jax.jit(f)(x, key), want)
    assert_close(f(x, key, batch=[7, 0, 7, 9, 1]), jax.tree.map(lambda leaf: leaf[:5], want))
    mean = synk.map(lambda x, key: fn(x, key)["draw"], ["x"], outputs="mean")
    assert_close(mean.over(x, key, batches=synk.minibatches(rows, 4)), want["draw"].mean())


def test_a_row_sees_its_own_row_of_a_variable():
    """Of a variable that holds rows."""
    held, x = synk.shared(np.zeros(1, np.float32)), np.arange(12, dtype=np.float32)
    synk.scatter(held, 10 * x)
    f = synk.map(lambda x: x + held.value)
    assert_close(f(x), 11 * x)
    f.check(x)


def weighted(loss, tokens):
    return {"a": synk.Weighted({"loss": loss, "first": loss[0], "three": 3}, tokens), "b": loss}


@pytest.mark.parametrize(
    ("on_group", "dtype", "rows"),
    [
        *[(("devices", 4), "int32", rows) for rows in (11, 1)],
        slow(("devices", 4), "float32", 12),
        slow(("devices", 1), "float32", 11),
        slow(("simulated", 4), "float16", 11),
        slow(("simulated", 4), "int32", 1),
    ],
    indirect=["on_group"],
    ids=str,
)
def test_weighted_rows(rows, dtype):
    """Their mean by weight; a row of weight 0 counts for nothing, NaN included, and no weight at all gives NaN."""
    loss = numbers(rows, 3)
    tokens = np.resize(np.array([1, 9, 1, 0, 5, 0]), rows).astype(dtype)
    mean = np.average(loss, axis=0, weights=tokens)
    want = {"loss": mean, "first": mean[0], "three": np.float32(3)}
    loss[tokens == 0] = np.nan
    f = synk.map(weighted, outputs={"a": "mean", "b": "concat"})
    for _ in range(2):
        assert_close(f(loss, tokens)["a"], want)
    for got in (f(loss, tokens, num_slices=2), f.serial(loss, tokens), jax.jit(f)(loss, tokens)):
        assert_close(got["a"], want)
    f.check(np.nan_to_num(loss), tokens)
    total = synk.map(lambda *args: weighted(*args)["a"], outputs="mean")
    assert_close(total.over(loss, tokens, batches=synk.minibatches(rows, 5)), want)
    assert np.isnan(f(loss, np.zeros_like(tokens))["a"]["first"])
    narrow = f(loss.astype(np.float16), tokens)["a"]["loss"]
    assert narrow.dtype == np.float16
    assert_close(narrow.astype(np.float32), want["loss"], rtol=1e-2)


@pytest.mark.parametrize("rows", [11])
def test_rows_of_weight_0_bring_no_nan_into_gradients(rows):
    """Where a row divides by its own weight too."""
    x, mask = numbers(rows, 4), np.random.default_rng(0).random((rows, 4)) < 0.6
    mask[[1, 2, rows - 1]] = False
    mask = mask.astype(np.float32)

    def fn(w, x, mask):
        return synk.Weighted((jnp.square(w * x) * mask).sum() / mask.sum(), mask.sum())

    f = synk.map(fn, ["x", "mask"], outputs="mean")

    def want(w, x):
        return (jnp.square(w * x) * mask).sum() / mask.sum()

    w = np.float32(1.5)
    for slices in (1, 2):
        got = jax.grad(lambda w, x, k=slices: f(w, x, mask, num_slices=k), (0, 1))(w, x)
        assert_close(got, jax.grad(want, (0, 1))(w, x))


def test_rows_know_nothing_of_one_another():
    """What communicates says so and names `axis_name=`; what parts have, and rows do not, names what rows have."""
    w, x = synk.shared(np.float32(1), "w"), np.arange(7, dtype=np.float32)

    def assign(x):
        w.value = x

    refused = {
        lambda x: lax.psum(x, "replica"): "know nothing of one another.*axis_name=",
        lambda x: x * lax.axis_index("replica"): "know nothing of one another.*axis_name=",
        lambda x: x / lax.psum(1, "replica"): "know nothing of one another.*axis_name=",
        lambda x: synk.all_reduce(x): "know nothing of one another.*axis_name=",
        lambda x: synk.all_gather(x[None]): "know nothing of one another.*axis_name=",
        lambda x: synk.part_key(jax.random.key(0)): r"Use synk\.row_keys",
        lambda x: synk.row_keys(jax.random.key(0), 7): "Leave the number out",
        lambda x: w.update(x, "mean"): "w is assigned .* assign it in then",
        assign: "w is assigned .* assign it in then",
        lambda x: synk.Weighted(x, 1): "Weighted, which goes with \"mean\", but its op is 'concat'",
        lambda x: synk.stats.mean(x[None]): "Monoid, a statistic of many rows",
        lambda x: synk.stats.argmax(x[None]): "x has shape",
    }
    for fn, words in refused.items():
        for rows in (x, x[:1]):
            with pytest.raises((ValueError, synk.SynkError), match=words):
                synk.map(fn)(rows)
    for outputs, words in (("sum", 'goes with "mean"'), ("mean", "weight has shape .* scalar")):
        with pytest.raises(ValueError, match=words):
            synk.map(lambda x: synk.Weighted(x.sum(), x), outputs=outputs)(numbers(4))


def test_then_assigns():
    """What rows may not."""
    w, x = synk.shared(np.float32(1)), np.arange(7, dtype=np.float32)

    def then(total):
        w.value = w.value + total
        return total

    f = synk.map(lambda x: x * w.value, outputs="sum", name="f").then(then)
    f.check(x)
    assert_close((f(x), f(x), w.value), (21, 462, 484))


@pytest.mark.parametrize("on_group", [("devices", 4)], ids=str, indirect=True)
def test_check_forgives_what_then_makes_of_rounding():
    """A `then` that turns the last bit of a sum into a whole step runs again after equal outputs."""
    w, total = synk.shared(np.float32(0)), synk.map(lambda x: x, outputs="sum")
    tries = (np.random.default_rng(seed).normal(size=101).astype(np.float32) for seed in range(50))
    x, serial = next((x, serial) for x in tries if total(x) != (serial := total.serial(x)))

    def then(total):
        w.value = jnp.sign(total - jnp.asarray(serial))

    f = synk.map(lambda x: x, outputs="sum").then(then)
    f(x)
    assert w.value != 0
    f.check(x)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_draws_that_depend_on_other_rows(impl):
    """Refused for any number of rows: of typed and raw keys, and of one key folded with numbers of rows."""
    refused = (
        nullcontext()
        if impl.startswith("three")
        else pytest.raises(ValueError, match=r"an rbg key draws under jax.vmap depends on the other rows")
    )
    key, i = jax.random.key(0, impl=impl), np.arange(7, dtype=np.int32)
    for rows in (7, 1):
        keys = jax.random.split(key, rows)
        assert_same(synk.map(lambda key, i: i)(keys, i[:rows]), i[:rows])
        with refused:
            assert_close(synk.map(jax.random.normal)(keys), jax.vmap(jax.random.normal)(keys))
        with refused:
            synk.map(lambda i, key: jax.random.gamma(jax.random.fold_in(key, i), 2.0), ["i"])(i[:rows], key)
        with jax.default_prng_impl(impl), refused:
            raw = jax.random.split(jax.random.PRNGKey(0), rows)
            assert_close(synk.map(jax.random.normal)(raw), jax.vmap(jax.random.normal)(raw))


def test_no_tracer_of_a_row_is_left():
    """JAX's own check finds none, after an error neither."""
    x = np.arange(7, dtype=np.int32)
    with jax.checking_leaks():
        assert_same(synk.map(lambda x: x + synk.row_numbers())(x), 2 * x)
        with pytest.raises(ZeroDivisionError):
            synk.map(lambda x: synk.row_numbers() + 1 // 0)(x)


def test_parameters_may_have_any_name():
    """Those of synk's own functions too."""
    f = synk.map(lambda x, *, rows, call, function: x + rows + call + function)
    x = np.arange(5, dtype=np.int32)
    assert_same(f(x, rows=x, call=x, function=x), 4 * x)


def test_variables_are_read():
    """As in any function."""
    w = synk.shared(np.float32(3))
    f = synk.map(lambda x: x * w.value)
    assert_close(f(numbers(5)), 3 * numbers(5))
    w.value = np.float32(2)
    assert_close(f(numbers(5)), 2 * numbers(5))
