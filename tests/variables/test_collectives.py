"""Collectives: shared variables across replicas, from the serial program and inside a function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk
from synk._runtime.executable import run_collective

from ..helpers import (
    DIFFERENTIABLE,
    ELEMENTWISE,
    SERIAL,
    also_simulated,
    assert_close,
    chosen,
    group_of,
    numbers,
    parts_of,
    raised_by,
    slow,
    unchanged,
)

VALUES = numbers(4, 3)  # one row a replica
KEEP_THE_DTYPE = [op for op in ELEMENTWISE if op in DIFFERENTIABLE]


def unequal(values=VALUES, name=None):
    """A variable with a value of its own on each replica."""
    w = synk.shared(values[0], name=name)
    for rank, value in enumerate(values):
        w.set_value(value, rank=rank)
    return w


def holding(rows, name=None):
    """A variable that holds rows."""
    w = synk.shared(np.zeros((1, 2), np.float32), name=name)
    synk.scatter(w, numbers(rows))
    return w


def values_of(w):
    """What each replica holds."""
    return [np.asarray(w.get_value(rank)) for rank in range(4)]


# Broadcast.


def test_broadcast_a_value(four):
    """Every replica gets it; its number of rows may be another."""
    w = unequal()
    synk.broadcast(w, np.arange(5, dtype=np.float32))
    assert_close([w.value, *values_of(w)], [np.arange(5.0)] * 5)


def test_broadcast_rank_0(four):
    """Without a value every replica gets the first one's."""
    w = unequal()
    synk.broadcast(w)
    assert_close([w.value, *values_of(w)], [VALUES[0]] * 5)


@pytest.mark.parametrize("rows", [8, 9, 2])
@also_simulated("four")
def test_broadcast_rank_0_of_rows(four, rows):
    """Where replicas hold rows, the first one's rows."""
    w = holding(rows)
    synk.broadcast(w)
    assert_close(w.value, parts_of(numbers(rows), 4)[0][0])


@also_simulated("four")
def test_broadcast_several(four):
    """A list of variables takes a list of values."""
    a, b = unequal(), unequal()
    synk.broadcast([a, b], [VALUES[1], VALUES[2]])
    assert_close([a.value, b.value], [VALUES[1], VALUES[2]])
    a.set_value(VALUES[3], rank=0), b.set_value(VALUES[0], rank=0)
    synk.broadcast([a, b])
    assert_close([a.value, b.value], [VALUES[3], VALUES[0]])


# Scatter and gather.


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 31])
def test_scatter_and_gather(four, rows):
    """Rows are dealt out in order, sizes differing by at most one; gathered, they are as they were."""
    w, x = holding(rows), numbers(rows)
    want = np.array_split(x, 4)
    assert synk.contrib.synkhronos.get_lengths(w) == [len(part) for part in want]
    assert synk.contrib.synkhronos.get_shapes(w) == [part.shape for part in want]
    assert_close(values_of(w), want)
    assert_close(synk.gather(w, nd_up=0), x)


@pytest.mark.parametrize("batch", [5, slice(1, None, 2), np.arange(9) % 3 > 0, [8, 0, -2, 3, 3, 1]])
def test_scatter_a_batch(four, batch):
    """A batch picks rows as in a call."""
    w, x = synk.shared(np.zeros((1, 2), np.float32)), numbers(9)
    synk.scatter(w, x, batch=batch)
    assert_close(synk.gather(w, nd_up=0), chosen(x, batch))


@also_simulated("four")
def test_gather_adds_an_axis(four):
    """By default one entry a replica, in rank order; the variable stays as it is."""
    w = unequal()
    assert_close(synk.gather(w), VALUES)
    assert_close(synk.gather(holding(8)), numbers(8).reshape(4, 2, 2))
    assert_close(values_of(w), list(VALUES))


@pytest.mark.parametrize("rows", [8, 9, 2])
def test_all_gather(four, rows):
    """Every replica gets all rows, and the variable is one value again."""
    w = holding(rows)
    synk.all_gather(w)
    assert_close([w.value, *values_of(w)], [numbers(rows)] * 5)


@also_simulated("four")
def test_all_gather_of_one_value(four):
    """Replicas that hold no rows of a whole give their own value's."""
    w = unequal()
    synk.all_gather(w)
    assert_close(w.value, VALUES.ravel())


@also_simulated("four")
def test_trees_and_lists(four):
    """Trees of leaves with common rows, and lists of variables."""
    w = synk.shared({"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.int32)})
    x = {"x": numbers(9), "y": np.arange(9, dtype=np.int32)}
    v = holding(6)
    synk.scatter([w, v], [x, numbers(7)])
    assert_close(synk.gather([w, v], nd_up=0), [x, numbers(7)])
    assert synk.contrib.synkhronos.get_lengths([w, v]) == ([3, 2, 2, 2], [2, 2, 2, 1])
    assert synk.contrib.synkhronos.get_shapes(w)[1] == {"x": (2, 2), "y": (2,)}
    assert_close([w.get_value(1), v.get_value(1)], [{"x": x["x"][3:5], "y": x["y"][3:5]}, numbers(7)[2:4]])
    synk.all_gather([w, v])
    assert_close([w.value, v.value], [x, numbers(7)])


# Reduce.


@pytest.mark.parametrize("op", KEEP_THE_DTYPE)
@also_simulated("four")
def test_all_reduce(four, op):
    """Every replica gets the combination."""
    w = unequal()
    synk.all_reduce(w, op)
    assert_close([w.value, *values_of(w)], [SERIAL[op](VALUES)] * 5)


@pytest.mark.parametrize("op", KEEP_THE_DTYPE)
def test_reduce(four, op):
    """In place, the first replica gets it and the others keep theirs."""
    w = unequal()
    synk.reduce(w, op)
    assert_close(values_of(w), [SERIAL[op](VALUES), *VALUES[1:]])


@also_simulated("four")
def test_reduce_returns(four):
    """Not in place, the call returns the combination and changes nothing."""
    w, v = unequal(), unequal(2 * VALUES)
    got = synk.reduce([w, v], "sum", in_place=False)
    assert_close(got, [VALUES.sum(0), 2 * VALUES.sum(0)])
    assert_close(values_of(w), list(VALUES))


def test_reduce_is_a_mean_by_default(four):
    """As all_reduce is."""
    w = unequal()
    assert_close(synk.reduce(w, in_place=False), VALUES.mean(0))
    synk.all_reduce([w])
    assert_close(w.value, VALUES.mean(0))


@also_simulated("four")
def test_weights(four):
    """A weighted mean, e.g. by the rows that each replica has seen."""
    w = unequal()
    synk.all_reduce(w, weights=[1, 0, 2, 5])
    assert_close(w.value, np.average(VALUES, axis=0, weights=[1, 0, 2, 5]))


@pytest.mark.parametrize(("op", "want"), [("any", [True, True, False]), ("all", [True, False, False])])
def test_all_reduce_booleans(four, op, want):
    """Logical ops on booleans."""
    w = unequal(np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0]], bool))
    synk.all_reduce(w, op)
    assert_close(w.value, np.array(want))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@also_simulated("four")
def test_16_bit_floats_are_combined_in_32(four, dtype):
    """A sum of parts beyond their precision, returned in their dtype."""
    w = unequal([jnp.asarray(value, dtype) for value in (2048.0, 1.0, 1.0, 1.0)])
    synk.all_reduce(w, "mean")
    assert (w.value.dtype, float(w.value)) == (dtype, float(jnp.asarray(2051 / 4, dtype)))


def test_integer_means_need_another_place(four):
    """An integer variable cannot keep a mean; reduce returns it."""
    w = unequal(np.arange(4, dtype=np.int32), name="w")
    with pytest.raises(TypeError, match=r'w holds int32, which "mean" does not keep'):
        synk.all_reduce(w)
    assert float(synk.reduce(w, in_place=False)) == 1.5


# All or none.


SECOND_FAILS = {
    "broadcast": lambda a, b: synk.broadcast([a, b], [np.zeros(3, np.float32), np.zeros((2, 2), np.float32)]),
    "scatter": lambda a, b: synk.scatter([a, b], [np.zeros(9, np.float32), np.zeros((9, 2), np.float32)]),
    "set_value": lambda a, b: synk.contrib.synkhronos.set_value(
        1, [a, b], [np.zeros(3, np.float32), np.zeros(3, np.int64)]
    ),
    "a batch": lambda a, b: synk.contrib.synkhronos.set_value(
        1, [a, b], [np.zeros(5, np.float32), np.zeros(3, np.float32)], batch=[0, 1, 4]
    ),
    "all_reduce": lambda a, b: synk.all_reduce([a, b]),
    "reduce": lambda a, b: synk.reduce([a, b], "sum"),
    "all_gather": lambda a, b: synk.all_gather([a, synk.shared(np.float32(0))]),
    "gather": lambda a, b: synk.gather([a, synk.shared(np.float32(0))], nd_up=0),
}


@pytest.mark.parametrize("call", SECOND_FAILS)
def test_a_mistake_in_the_second_leaves_the_first(four, call):
    """All variables of a call change, or none."""
    a, b = unequal(), holding(7) if "reduce" in call else unequal()
    before = values_of(a), values_of(b)
    with pytest.raises((ValueError, TypeError, IndexError)):
        SECOND_FAILS[call](a, b)
    assert_close((values_of(a), values_of(b)), before)


def test_keys_do_not_reduce(four):
    """Nor do keys that share an array."""
    for value in ({"k": jax.random.key(0)}, {"j": jax.random.key(1), "k": jax.random.key(0)}):
        w = synk.shared(value, name="w")
        with pytest.raises(TypeError, match=r'w\[\'[jk]\'\] holds PRNG keys, which "max" does not keep'):
            synk.all_reduce(w, "max")


# Values of one replica.


def test_get_and_set_value(four):
    """By rank; the others keep theirs; a value may have another number of rows."""
    w = unequal()
    w.set_value(np.zeros(3, np.float32), rank=2)
    assert_close(w.get_value(2), np.zeros(3))
    assert_close(w.get_value(1), VALUES[1])
    synk.contrib.synkhronos.set_value(1, w, np.arange(5, dtype=np.float32), batch=slice(1, None))
    assert synk.contrib.synkhronos.get_lengths(w) == [3, 4, 3, 3]
    assert_close(values_of(w), [VALUES[0], np.arange(1.0, 5), np.zeros(3), VALUES[3]])


@also_simulated("four")
def test_set_value_of_a_tree(four):
    """A model's parameters, whose leaves have no common rows, are set on one replica as they are."""
    w = synk.shared({"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32), "n": np.int32(0)})
    new = {"w": numbers(3), "b": numbers(1)[0], "n": np.int32(5)}
    w.set_value(new, rank=2)
    assert_close([w.get_value(2), w.get_value(1)["n"]], [new, 0])


@also_simulated("four")
def test_set_value_of_a_rank_of_rows(four):
    """A replica's rows may become more."""
    w = holding(9)
    w.set_value(numbers(5), rank=3)
    want = [*np.array_split(numbers(9), 4)[:3], numbers(5)]
    assert synk.contrib.synkhronos.get_lengths(w) == [3, 2, 2, 5]
    assert_close(synk.gather(w, nd_up=0), np.concatenate(want))


@also_simulated("four")
def test_rows_set_by_hand_are_those_a_function_sees(four):
    """A function without other inputs takes the lengths as they are."""
    w = holding(9)
    w.set_value(numbers(5), rank=3)
    x = np.concatenate([*np.array_split(numbers(9), 4)[:3], numbers(5)])
    got = synk.function(lambda: (w.value.mean(0), w.value), outputs=("mean", "concat"))(num_slices=2)
    assert_close(got, (x.mean(0), x))


# Unequal lengths.


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "gather"])
def test_elementwise_ones_need_equal_lengths(four, call):
    """The message names the call, the variable and the lengths."""
    with pytest.raises(ValueError, match=rf"synk.{call}: held holds \[3, 2, 2, 2\] rows"):
        getattr(synk, call)(holding(9, name="held"))


# check_replicas.


@also_simulated("four")
def test_equal_replicas_pass(four):
    """Variables of any dtype, NaN included: bits are compared."""
    synk.check_replicas(
        synk.shared({"a": np.full(3, np.nan), "b": np.ones(2, bool)}), synk.shared(jnp.ones(3, jnp.bfloat16))
    )
    synk.check_replicas()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (np.float32, 0.0, -0.0), (np.float32, 1.0, np.nextafter(np.float32(1), np.float32(2))), (np.int8, 1, 2),
        (jnp.bfloat16, 1.0, 1.0078125), (np.bool_, True, False), (np.complex64, 1j, -1j),
    ],
)  # fmt: skip
def test_one_bit_is_found(four, dtype, one, other):
    """The message names variable, leaf and ranks."""
    w = synk.shared({"a": np.zeros(2), "b": jnp.full(50, one, dtype)}, name="w")
    for rank in (1, 3):
        w.set_value({"a": np.zeros(2), "b": jnp.full(50, one, dtype).at[rank].set(other)}, rank=rank)
    with pytest.raises(synk.errors.DivergedError, match=r"w\['b'\]: on ranks 1, 3 it differs from rank 0"):
        synk.check_replicas(synk.shared(np.zeros(2)), w)


@pytest.mark.parametrize("dtype", [np.float32, slow(jnp.bfloat16), slow(np.complex64)])
def test_what_is_large_is_compared_in_pieces(four, dtype):
    """Each number counts, and its place in the whole: in the first piece, in the second, and in what is left."""
    one = np.arange((2 << 20) + 3).astype(dtype).reshape(-1, 5)
    w = synk.shared(one, name="w")
    synk.check_replicas(w)
    for place in (0, 1 << 20, one.size - 1):
        other = one.copy()
        other.flat[place] += 8192 * (1 + place)
        w.set_value(other, rank=1)
        with pytest.raises(synk.errors.DivergedError, match=r"w: on rank 1 it differs"):
            synk.check_replicas(w)
    w.set_value(np.concatenate([one[-1:], one[1:-1], one[:1]]), rank=1)
    with pytest.raises(synk.errors.DivergedError, match=r"w: on rank 1 it differs"):
        synk.check_replicas(w)


@also_simulated("four")
def test_order_is_found(four):
    """The same numbers in other places are others."""
    w = synk.shared(np.array([1, 2], np.float32), name="w")
    w.set_value(np.array([2, 1], np.float32), rank=2)
    with pytest.raises(synk.errors.DivergedError, match=r"w: on rank 2 it differs"):
        synk.check_replicas(w)


def test_rows_are_no_equal_replicas(four):
    """A variable that holds rows differs by design."""
    with pytest.raises(synk.errors.DivergedError, match=r"held: its replicas hold different rows, \[3, 2, 2, 2\]"):
        synk.check_replicas(holding(9, name="held"))


# Inside a function.


@pytest.mark.parametrize("op", KEEP_THE_DTYPE)
def test_all_reduce_inside(four, op):
    """On traced values, the same on every replica."""
    x = numbers(8)
    got = synk.function(lambda x: synk.all_reduce({"a": x.sum(0)}, op)["a"], reduce="stack")(x)
    assert_close(got, np.stack([SERIAL[op](x.reshape(4, 2, 2).sum(1))] * 4))


@also_simulated("four")
def test_weighted_all_reduce_inside(four):
    """With weights, one a replica."""
    got = synk.function(lambda x: synk.all_reduce(x[0], weights=[1, 2, 3, 4]), reduce="first")(VALUES)
    assert_close(got, np.average(VALUES, axis=0, weights=[1, 2, 3, 4]))


@also_simulated("four")
def test_all_gather_inside(four):
    """All replicas' rows, in rank order."""
    x = numbers(8)
    got = synk.function(lambda x: (x, synk.all_gather(x)), outputs=("concat", "stack"))(x)
    assert_close(got, (x, np.stack([x] * 4)))


@also_simulated("four")
def test_communication_in_then(four):
    """In then any number of rows will do."""
    f = synk.function(lambda x: x.sum(0), then=lambda s: (s, synk.all_reduce(synk.rank() + 0, "sum")))
    assert_close(f(numbers(9)), (numbers(9).sum(0), 6))


@pytest.mark.parametrize(
    "call", [lambda x: synk.all_reduce(x.sum(), "sum"), synk.all_gather, lambda x: lax.psum(x.sum(), "replica")]
)
@also_simulated("four")
def test_communication_takes_any_rows(four, call):
    """Where they do not divide, one replica that all devices make has them all."""
    f = synk.function(lambda x: call(x).sum(), reduce="max")
    for rows in (8, 9, 1):
        assert_close(f(numbers(rows, 1)), numbers(rows, 1).sum())


@pytest.mark.parametrize("call", [lambda x: synk.all_reduce(x.sum()), synk.all_gather])
def test_communication_beside_the_rank_needs_equal_rows(four, call):
    """Else the call raises and points to then."""
    f = synk.function(lambda x: call(x).sum() + jnp.float32(synk.rank()), name="meets")
    with pytest.raises(ValueError, match=r"meets: .* communicates inside.*\n?.*[Cc]ommunicate in then") as caught:
        f(np.ones(9, np.float32))
    assert ("synk.contrib.pairs" in str(caught.value)) == (call is synk.all_gather)
    assert 'engine="jit"' in str(caught.value)


@pytest.mark.parametrize("call", [lambda v: synk.all_reduce(v, "mean"), lambda v: lax.pmean(v, "replica")])
@pytest.mark.parametrize("where", ["jit", "scan", "while", "cond"])
def test_advice_that_can_be_followed(four, call, where):
    """Communication in a loop or a branch cannot move to then: only the nearest numbers of rows that divide help."""
    runs = {
        "jit": lambda v: jax.jit(lambda v: lax.pmean(v, "replica"))(v),
        "scan": lambda v: lax.scan(lambda v, _: (call(v), None), v, None, 2)[0],
        "while": lambda v: lax.while_loop(lambda v: v < 0, call, v),
        "cond": lambda v: lax.cond(v > 0, call, lambda v: v, v),
    }
    f = synk.function(lambda x: runs[where](x.sum() + jnp.float32(synk.rank())), reduce="max", name="meets")
    instead = "Communicate in then, or give 8 or 12 rows" if where == "jit" else "Give 8 or 12 rows"
    with pytest.raises(ValueError, match=rf"meets: .* communicates inside.* on every replica\. {instead}"):
        f(np.ones(9, np.float32))
    with pytest.raises(ValueError, match=r"on every replica\. .*ive 4 rows"):
        f(np.ones(3, np.float32))
    f(np.ones(8, np.float32))


@pytest.mark.parametrize(
    "inside", [lambda x: synk.all_reduce(x, "sum"), lambda x: lax.pmean(x, "replica"), synk.all_gather]
)
def test_communication_needs_all_rows_at_once(four, inside):
    """In slices and batches replicas would meet with some of the rows: that raises, warm too, and loses nothing."""
    w = synk.shared(np.float32(0))
    f = synk.function(
        lambda x: (inside(x.sum(keepdims=True)).sum(), w.update(w.value + 1))[0], reduce="max", name="meets"
    )
    x = np.arange(8, dtype=np.float32)
    for _ in range(2):
        want = float(f(x))
        with pytest.raises(
            ValueError,
            match=r"meets: .* communicates inside.* all rows in one call without slices.* leave out num_slices",
        ):
            f(x, num_slices=2)
    quiet = synk.function(lambda x: inside(x.sum(keepdims=True)).sum(), reduce="max", name="meets")
    for _ in range(2):
        assert float(quiet(x)) == want
        with pytest.raises(ValueError, match=r"meets: .* communicates inside.* on all rows at once, without over"):
            quiet.over(x, batches=[4, slice(4, 8)])
    assert [float(w.get_value(rank)) for rank in range(4)] == [2] * 4


def test_synkhronos_spellings():
    """`fork` is init; what has nothing to do any more says so."""
    with synk.init(2) as group:
        assert group.size == 2
    with pytest.raises(AttributeError, match="Instead: nothing; functions and shared variables reach"):
        synk.distribute


@also_simulated("four")
def test_replicas_of_one(four):
    """With one replica every collective is the identity."""
    with group_of("devices", 1):
        w = synk.shared(VALUES)
        synk.all_reduce(w), synk.broadcast(w), synk.reduce(w, "sum"), synk.all_gather(w)
        assert_close((w.value, synk.gather(w)), (VALUES, VALUES[None]))


def test_other_weights_take_the_same_program():
    """They are arguments."""
    with synk.simulate(2) as group:
        w, kept = synk.shared(np.float32([0, 0])), set[int]()
        for weights in ([1, 3], [2, 2], [5, 1]):
            w.set_value(np.float32([1, 2]), rank=0)
            w.set_value(np.float32([3, 6]), rank=1)
            synk.all_reduce(w, "mean", weights=weights)
            np.testing.assert_allclose(w.value, np.average([[1, 2], [3, 6]], axis=0, weights=weights), rtol=1e-6)
            kept.add(len(group._caches[run_collective]._kept))
        assert len(kept) == 1


EIGHT = np.arange(8, dtype=np.float32)


@also_simulated("four")
def test_collectives_inside_on_scalars_and_keys(four):
    """Keys gather as rows; a scalar has none."""
    keys = jax.random.split(jax.random.key(0), 8)
    got = synk.function(lambda k: synk.all_gather(k), reduce="first")(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))
    with pytest.raises(ValueError, match="a scalar has no rows"):
        synk.function(lambda x: synk.all_gather(x.sum()))(EIGHT)


def good_and_bad():
    """Two variables that hold rows, and one that no rows fit."""
    good, bad = synk.shared(np.zeros((2, 2), np.float32), name="good"), synk.shared(np.int32(7), name="bad")
    synk.scatter(good, numbers(6))
    return good, bad


ALL_OR_NONE = {
    "broadcast": lambda vs: synk.broadcast(vs, [np.ones((2, 2), np.float32), np.float32(1)]),
    "broadcast to few": lambda vs: synk.broadcast(vs, [np.ones((2, 2), np.float32), np.ones((1, 1), np.int32)]),
    "scatter": lambda vs: synk.scatter(vs, [numbers(9), np.ones(9, np.float32)]),
    "set_value": lambda vs: synk.contrib.synkhronos.set_value(1, vs, [numbers(3), np.float32(1)]),
    "all_gather": lambda vs: synk.all_gather(vs),
    "all_reduce": lambda vs: synk.all_reduce(vs, "mean"),
    "reduce": lambda vs: synk.reduce(vs, "mean"),
}


@pytest.mark.parametrize("name", ALL_OR_NONE)
def test_collectives_change_all_or_none(group, name):
    """Where the second variable's value is wrong, the first keeps its own."""
    good, bad = good_and_bad()
    lengths = synk.contrib.synkhronos.get_lengths(good)
    with unchanged(good, bad):
        error = raised_by(lambda: ALL_OR_NONE[name]([good, bad]))
    assert isinstance(error, TypeError | ValueError) and "bad" in str(error)
    assert synk.contrib.synkhronos.get_lengths(good) == lengths


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("x", [[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0]])
def test_extremes_of_booleans_inside(op, x):
    """Under a transformation as outside."""
    with group_of("devices", 2):
        f = synk.function(lambda x: x.max() > 0 if op == "max" else x.min() > 0, reduce=op)
        x = jnp.array(x, jnp.float32)
        want = bool(getattr(np.asarray(x), op)() > 0)
        assert bool(f(x)) == bool(jax.jit(f)(x)) == want
