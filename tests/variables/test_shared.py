"""Shared variables: each replica's own value, found through every transformation, never stale and never lost."""

import copy
import functools
import gc
import inspect
import operator
import weakref
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import also_simulated, assert_close, group_of, members, numbers, parts_of, slow, unchanged

# Reading: `w.value` inside a transformation is the value of this call. Each gives x times w.


def by_custom_vjp(w):
    @jax.custom_vjp
    def half_square(x):
        return (x**2).sum() / 2

    half_square.defvjp(lambda x: (half_square(x), x), lambda x, g: (g * x * w.value,))
    return jax.grad(half_square)


def by_custom_jvp(w):
    @jax.custom_jvp
    def times(x):
        return x * w.value

    times.defjvp(lambda primals, tangents: (times(*primals), tangents[0] * w.value))
    return jax.grad(lambda x: (times(x) * x).sum() / 2)


READERS = {
    "plainly": lambda w: lambda x: x * w.value,
    "jit": lambda w: jax.jit(lambda x: x * w.value),
    "jit in jit": lambda w: jax.jit(lambda x: jax.jit(lambda x: x * w.value)(x)),
    "scan": lambda w: lambda x: lax.scan(lambda c, row: (c, row * w.value), 0, x)[1],
    "fori_loop": lambda w: lambda x: lax.fori_loop(0, 1, lambda i, x: x * w.value, x),
    "while_loop": lambda w: lambda x: lax.while_loop(lambda c: c[1] < 1, lambda c: (c[0] * w.value, c[1] + 1), (x, 0))[0],
    "cond": lambda w: lambda x: lax.cond(x[0] > -1, lambda x: x * w.value, lambda x: x, x),
    "vmap": lambda w: jax.vmap(lambda row: row * w.value),
    "grad": lambda w: jax.grad(lambda x: (x**2 * w.value).sum() / 2),
    "checkpoint": lambda w: jax.checkpoint(lambda x: x * w.value),
    "grad of checkpoint": lambda w: jax.grad(jax.checkpoint(lambda x: (x**2 * w.value).sum() / 2)),
    "custom_vjp": by_custom_vjp,
    "custom_jvp": by_custom_jvp,
    "jit of vmap of grad": lambda w: jax.jit(jax.vmap(jax.grad(lambda row: row**2 * w.value / 2))),
}  # fmt: skip

# Outside of functions these keep nothing of what they read.
READ_AT_ONCE = ("plainly", "vmap", "grad", "custom_vjp", "custom_jvp")


@pytest.mark.smoke
@pytest.mark.parametrize("way", READERS)
def test_reads_see_the_current_value(group, way):
    """Whatever was traced or cached before, outside too: over several values and shapes, w is what it is now."""
    w = synk.shared(np.float32(2.0), name="w")
    times = READERS[way](w)
    # The inner transformation caches here.
    with nullcontext() if way in READ_AT_ONCE else pytest.warns(UserWarning, match="w: its value .* is a constant"):
        times(jnp.ones(2))
    f = synk.function(lambda x: times(x), reduce="concat")
    for value, rows in [(3, 8), (3, 2), (5, 8)]:
        w.value = np.float32(value)
        np.testing.assert_array_equal(f(np.arange(rows, dtype=np.float32)), value * np.arange(rows))
    assert f.shared == (w,)


@pytest.mark.parametrize("way", READERS)
def test_reads_see_what_was_assigned(way):
    """After an assignment in the same function each transformation reads the new value, though it has read the old."""
    with group_of("devices", 2):
        w = synk.shared(np.float32(2.0), name="w")
        times = READERS[way](w)

        @synk.function(reduce="concat")
        def f(x):
            before = times(x)
            w.value = w.value + 1
            between = times(x)
            w.value = w.value * 2
            return before, between, times(x)

        x = np.arange(5, dtype=np.float32)
        np.testing.assert_array_equal(f(x), [2 * x, 3 * x, 6 * x])


def test_get_value_under_the_users_jit():
    """It is a constant there too, which a warning says."""
    with group_of("devices", 2):
        w = synk.shared(np.float32(2.0), name="w")
        with pytest.warns(UserWarning, match="w: its value .* is a constant.*Pass w.value as an argument"):
            assert jax.jit(lambda: w.get_value(1))() == 2


def test_an_inner_jit_met_twice_in_one_call():
    """One cached inner jit serves two functions and then, each with its own trace."""
    with group_of("devices", 2):
        w = synk.shared(np.float32(2.0))
        read = jax.jit(lambda: w.value)
        f = synk.function(lambda x: (x * read()).sum(), then=lambda total: total + read())
        g = synk.function(lambda x: (x + read()).sum())
        got = [float(f(np.ones(4, np.float32))), float(g(np.ones(4, np.float32))), float(f(np.ones(5, np.float32)))]
    assert got == [10, 12, 12]


# Writing: only in the body, not inside a transformation, from where the value could not leave.


def writing_custom_vjp(set_):
    inner = jax.custom_vjp(set_)
    inner.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return inner


WRITERS = {
    "jit": lambda set_: lambda x: jax.jit(lambda x: set_(x))(x),
    "scan": lambda set_: lambda x: lax.scan(lambda c, row: (c, set_(row)), 0, x)[1],
    "fori_loop": lambda set_: lambda x: lax.fori_loop(0, 1, lambda i, x: set_(x), x),
    "cond": lambda set_: lambda x: lax.cond(x[0] > -1, set_, lambda x: x, x),
    "vmap": lambda set_: jax.vmap(set_),
    "grad": lambda set_: jax.grad(lambda x: set_(x).sum()),
    "checkpoint": lambda set_: jax.checkpoint(set_),
    "custom_vjp": lambda set_: writing_custom_vjp(set_),
}


@pytest.mark.parametrize("new", ["constant", "traced"])
@pytest.mark.parametrize("way", WRITERS)
def test_writes_inside_a_transformation_raise(way, new):
    """The message names function and variable and says to return the value; the variable is as it was."""
    with group_of("devices", 2):
        w = synk.shared(np.float32(2.0), name="w")

        def set_(x):
            w.value = np.float32(1.0) if new == "constant" else x.sum()
            return x

        def wrong(x):
            return WRITERS[way](set_)(x)

        with pytest.raises(synk.SynkError, match=r"wrong: w is assigned inside .*\n?.*Return it from there"):
            synk.function(wrong, reduce="concat")(np.ones(4, np.float32))
        assert float(w.value) == 2


# Per-replica values.


def test_an_update_in_fn_is_local(four):
    """Each replica keeps what its own rows gave, also where rows do not divide; without rows the old value."""
    w = synk.shared(np.float32(0.5), name="w")

    @synk.function
    def local(x):
        w.value = w.value + x.sum()
        return x.sum()

    for rows, sums in [(8, [1, 5, 9, 13]), (6, [1, 5, 4, 5]), (2, [0, 1, 0, 0])]:
        w.value = np.float32(0.5)
        local(np.arange(rows, dtype=np.float32))
        assert [float(w.get_value(rank)) for rank in range(4)] == [0.5 + s for s in sums]


@also_simulated("four")
def test_unequal_variables_do_not_read_as_one(four):
    """Reading outside names the function, then, all_reduce and get_value(rank); each way out heals."""
    w = synk.shared(np.zeros(2, np.float32), name="w")

    @synk.function
    def local(x):
        w.value = w.value + x.sum()
        return x.sum()

    local(np.arange(8, dtype=np.float32))
    with pytest.raises(
        synk.errors.DivergedError, match=r"w: .*since local.* in then.*synk.all_reduce\(w\).*w.get_value\(rank\)"
    ):
        w.value
    synk.all_reduce(w)
    np.testing.assert_array_equal(w.value, [7, 7])


@pytest.mark.parametrize("heal", ["broadcast", "all_reduce", "set_value", "assign"])
def test_what_makes_equal_again(four, heal):
    """Broadcast, all-reduced or set, it is one value again."""
    w = synk.shared(np.float32(1.0))
    w.set_value(np.float32(5.0), rank=1)
    {
        "broadcast": lambda: synk.broadcast(w),
        "all_reduce": lambda: synk.all_reduce(w, "min"),
        "set_value": lambda: w.set_value(np.float32(1.0)),
        "assign": lambda: setattr(w, "value", np.float32(1.0)),
    }[heal]()
    assert float(w.value) == 1
    synk.check_replicas(w)


def test_an_update_in_then_from_an_unequal_one_is_unequal(four):
    """What then computes from a replica's own value is the replica's own."""
    own, total = synk.shared(np.float32(1.0)), synk.shared(np.float32(0.0), name="total")
    own.set_value(np.float32(5.0), rank=1)
    f = synk.function(lambda x: x.sum(), then=lambda s: setattr(total, "value", s + own.value))
    f(np.ones(4, np.float32))
    with pytest.raises(synk.errors.DivergedError, match="total: "):
        total.value
    assert [float(total.get_value(rank)) for rank in range(4)] == [5, 9, 5, 5]


@also_simulated("four")
def test_a_call_without_rows_keeps_replicas_equal(four):
    """Nothing is scattered, so every replica computes the same update."""
    w = synk.shared(np.float32(1.0))
    synk.function(lambda: setattr(w, "value", w.value * 2), reduce="first")()
    assert float(w.value) == 2


@also_simulated("four")
def test_rank_makes_unequal(four):
    """A value that depends on the rank is each replica's own."""
    w = synk.shared(np.int32(0), name="w")
    synk.function(lambda: setattr(w, "value", synk.rank()), reduce="first")()
    assert [int(w.get_value(rank)) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(synk.errors.DivergedError, match="w: "):
        w.value


def test_what_a_branch_does_not_read_need_not_be_there(four):
    """A static branch without the variable runs in another group too."""
    w = synk.shared(np.float32(1))
    f = synk.function(lambda x, on: x.sum() * w.value if on else x.sum(), {"on": "static"})
    f(np.ones(8, np.float32), True)
    with group_of("devices", 2):
        assert float(f(np.ones(9, np.float32), False)) == 9


# Variables that hold rows.


@pytest.mark.parametrize("rows", [2, 8, 9])
@also_simulated("four")
def test_rows_beside_an_input(four, rows):
    """A function sees its replica's rows of the variable beside those of its input."""
    held = synk.shared(np.zeros((1, 2), np.float32))
    x = numbers(rows)
    synk.scatter(held, x)
    got = synk.function(lambda y: (held.value * y, (held.value * y).mean(0)), outputs=("concat", "mean"))(x)
    assert_close(got, (x * x, (x * x).mean(0)))


@pytest.mark.parametrize("slices", [1, 2, 3])
@pytest.mark.parametrize("rows", [2, 8, 9])
def test_rows_alone_count_as_input(four, rows, slices):
    """Without other inputs they weigh the mean and are what slices cut."""
    held = synk.shared(np.zeros((1, 2), np.float32))
    x = numbers(rows)
    synk.scatter(held, x)
    got = synk.function(lambda: (held.value.mean(0), held.value), outputs=("mean", "concat"))(num_slices=slices)
    assert_close(got, (x.mean(0), x))


@pytest.mark.parametrize("rows", [8, 9, 3])
@also_simulated("four")
def test_rows_are_updated_in_place(four, rows):
    """A function may assign as many rows as its replica holds."""
    held = synk.shared(np.zeros(1, np.float32))
    x = np.arange(rows, dtype=np.float32)
    synk.scatter(held, x)
    double = synk.function(lambda: setattr(held, "value", held.value * 2), reduce="first")
    double(), double()
    np.testing.assert_array_equal(synk.gather(held, nd_up=0), 4 * x)
    np.testing.assert_array_equal(
        synk.contrib.synkhronos.get_lengths(held), [len(part) for part in np.array_split(x, 4)]
    )


@also_simulated("four")
def test_rows_differ_from_the_inputs(four):
    """As many rows on each replica, or nothing runs."""
    held = synk.shared(np.zeros(1, np.float32), name="held")
    synk.scatter(held, np.arange(9, dtype=np.float32))
    with pytest.raises(ValueError, match=r"held holds \[3, 2, 2, 2\] rows .* this call gives them \[2, 2, 2, 2\]"):
        synk.function(lambda x: (x * held.value).sum())(np.ones(8, np.float32))


@also_simulated("four")
def test_rows_end_with_an_assignment(four):
    """Broadcast, it is one value again, of any number of rows."""
    held = synk.shared(np.zeros(1, np.float32))
    synk.scatter(held, np.arange(9, dtype=np.float32))
    synk.broadcast(held, np.ones(3, np.float32))
    np.testing.assert_array_equal(held.value, [1, 1, 1])
    assert float(synk.function(lambda x: x.sum() + held.value.sum(), reduce="mean")(np.ones(4, np.float32))) == 4


# Updates in then.


@pytest.mark.parametrize("donate", [True, False])
@also_simulated("group")
def test_swap(group, donate):
    """Two variables change places, call after call, donated or not."""
    a, b = synk.shared(np.zeros(3, np.float32)), synk.shared(np.ones(3, np.float32))

    @functools.partial(synk.function, donate=donate)
    def swap(x):
        return x.sum()

    @swap.then
    def swap(total):
        a.value, b.value = b.value, a.value

    for call in range(1, 4):
        swap(np.ones(8, np.float32))
        assert (float(a.value[0]), float(b.value[0])) == (call % 2, 1 - call % 2)


@also_simulated("group")
def test_moving_average(group):
    """An average of a variable reads the value that has just been assigned, as in Python."""
    w, mean = synk.shared(np.float32(1.0)), synk.shared(np.float32(0.0))

    @synk.function(reduce="mean")
    def step(x):
        return x.mean()

    @step.then
    def step(x):
        w.value = w.value + x
        mean.value = 0.5 * mean.value + 0.5 * w.value

    for _ in range(3):
        step(np.ones(9, np.float32))
    assert (float(w.value), float(mean.value)) == (4, 0.5 * (0.5 * 1 + 1.5) + 2)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in shards"])
def test_reads_after_writes_everywhere(group, sharded):
    """Calls, slices, the serial run, the check and loops with lists give what Python gives."""
    rows, start = numbers(7), np.ones((130, 130), np.float32)
    w, mean = (synk.shared({"a": start, "b": np.float32(0)}, sharded=sharded) for _ in range(2))
    step = synk.function(lambda x: x.mean(), reduce="mean")

    @step.then
    def then(x):
        w.value = jax.tree.map(lambda leaf: leaf * 2 + x, w.value)
        mean.value = jax.tree.map(lambda old, new: old + new, mean.value, w.value)
        w.value = jax.tree.map(lambda leaf: leaf / 2, w.value)
        return w.value["b"], (w.value["a"] ** 2).sum()

    a, b, mean_a, results = 1.0, 0.0, 1.0, list[tuple[float, float]]()
    for _ in range(5):
        a, b, mean_a = a + rows.mean() / 2, b + rows.mean() / 2, mean_a + 2 * a + rows.mean()
        results.append((b, a**2 * start.size))
    step.check(rows)
    assert_close(step.serial(rows), results[0])
    assert_close(step(rows), results[0])
    assert_close(step(rows, num_slices=2), results[1])
    (*others,) = step.iterate(rows, batches=[slice(0, 7)] * 3, per_launch=3)
    assert_close(others[0], results[2:])
    assert_close(mean.value["a"][0, 0], mean_a)


@also_simulated("group")
def test_slices_read_what_they_assigned(group):
    """Each from the value before the call; "add" still adds to that, also where a slice assigns twice."""
    w, x = synk.shared(np.float32(10)), numbers(5)

    @synk.function(reduce="sum")
    def f(x):
        w.update(w.value + x.sum(), slices="add")
        once = w.value
        w.update(w.value + 1, slices="add")
        return once, w.value

    size = synk.size()
    parts = min(2 * size, len(x))
    assert_close(f(x, num_slices=2), (parts * 10 + x.sum(), parts * 11 + x.sum()))
    assert_close(sum(float(w.get_value(rank)) for rank in range(size)), size * 10 + x.sum() + parts)


@also_simulated("group")
def test_a_variable_assigned_before_it_is_read(group):
    """It is no input: replicas that differ in it become equal, and nobody complains."""
    w = synk.shared(np.float32(0), name="w")
    synk.function(lambda x: setattr(w, "value", x.sum()))(numbers(5))
    with pytest.raises(synk.errors.DivergedError):
        _ = w.value
    f = synk.function(lambda x: x.mean(), reduce="mean")

    @f.then
    def _(x):
        w.value = x
        return w.value * 2

    f(np.ones(5, np.float32))
    assert w.value == 1


@also_simulated("group")
def test_then_reads_what_its_function_assigned(group):
    """That raises, and says to return it, unless `then` has assigned the variable itself."""
    w, x = synk.shared(np.float32(0), name="w"), numbers(5)

    def fn(x):
        w.value = x.sum()
        return x.mean()

    refused = synk.function(fn, reduce="mean", then=lambda x: x + w.value, name="step")
    for call in (refused, refused.serial, refused.check):
        with pytest.raises(synk.SynkError, match=r"step\.then: it reads w, which step has .* an output of step"):
            call(x)
    assert w.value == 0

    def then(x):
        w.value = x
        return w.value + 1

    assert_close(synk.function(fn, reduce="mean", then=then)(x), x.mean() + 1)
    assert_close(w.value, x.mean())


def test_one_array_given_to_two_variables(group):
    """Each has a copy of its own, which can be donated."""
    array = jnp.ones(3)
    a, b = synk.shared(array), synk.shared(array)

    @synk.function
    def step(x):
        return x.sum()

    @step.then
    def step(total):
        a.value, b.value = a.value + total, b.value - total

    for _ in range(3):
        step(np.ones(8, np.float32))
    assert (float(a.value[0]), float(b.value[0]), float(array[0])) == (25, -23, 1)


def test_one_new_value_for_two_variables(group):
    """Assigned to both in then, each can be donated by the next call."""
    a, b = synk.shared(np.float32(0.0)), synk.shared(np.float32(0.0))

    @synk.function
    def step(x):
        return x.sum()

    @step.then
    def step(total):
        a.value = b.value = a.value + b.value + total

    for _ in range(3):
        step(np.ones(8, np.float32))
    assert float(a.value) == float(b.value) == 8 + 24 + 56 - 32


def adding(w):
    """A function that donates and updates w."""
    return synk.function(lambda x: x.sum(), then=lambda total: setattr(w, "value", w.value + total))


# Numbers of an array that shares no array with other leaves.
LARGE = 24_000
GIVERS = {
    "shared": lambda w, array: synk.shared(array),
    "set_value": lambda w, array: w.set_value(array) or w,
    "set_value of a rank": lambda w, array: w.set_value(array, rank=0) or w,
    "assignment": lambda w, array: setattr(w, "value", array) or w,
    "broadcast": lambda w, array: synk.broadcast(w, array) or w,
    "scatter": lambda w, array: synk.scatter(w, array) or w,
}


@pytest.mark.parametrize("way", GIVERS)
@pytest.mark.parametrize("kind", ["jax", "numpy"])
@pytest.mark.parametrize("columns", [1, LARGE // 24])
def test_arrays_of_the_user_stay_alive(group, way, kind, columns):
    """Whatever is given to a variable is copied: updates and donations do not reach it, nor its changes the variable."""
    array = (jnp if kind == "jax" else np).ones((24, columns), np.float32)
    w = GIVERS[way](synk.shared(np.zeros((24, columns), np.float32)), array)
    step = adding(w)
    step(np.ones(24, np.float32)), step(np.ones(24, np.float32))
    assert float(array.sum()) == 24 * columns
    if kind == "numpy":
        array[:] = 100
    assert float(w.get_value(0)[0, 0]) == 49


@pytest.mark.parametrize("size", [24, LARGE])
@also_simulated("group")
def test_borrowed_arrays_of_jax_stay_alive(group, size):
    """A program that overwrites the variable leaves the user's array."""
    array = jax.device_put(np.ones(size, np.float32), group.replicated)
    w = synk.shared(array, borrow=True)
    adding(w)(np.ones(24, np.float32))
    assert float(array.sum()) == size and float(w.value[0]) == 25


def test_a_first_value_takes_one_program(four, caplog):
    """Large arrays of JAX are copied together; arrays of NumPy and small ones need no program, nor does placing them."""
    value = [jnp.ones(LARGE + i) for i in range(3)], [np.ones(LARGE, np.float32), jnp.ones(3), jnp.int32(0)]
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        w = synk.shared(value)
        step = synk.function(lambda x: x.sum() + w.value[1][1].sum(), name="read")
        assert float(step(np.ones(4, np.float32))) == 16
    programs = [text.split()[4] for text in caplog.messages if text.startswith("Finished XLA compilation of ")]
    assert programs == ["jit(_copied)", "jit(read)"]


def test_a_variable_made_in_a_trace(four):
    """It holds copies of arrays, and no tracer of theirs."""
    arrays = jnp.ones(LARGE), jnp.ones(3)
    made = []
    jax.jit(lambda x: made.append(synk.shared(arrays)) or x)(1.0)
    assert [float(leaf.sum()) for leaf in made[0].value] == [LARGE, 3]


@pytest.mark.parametrize("way", ["value", "get_value", "gather", "argument"])
@also_simulated("group")
def test_what_was_read_stays_alive(group, way):
    """A value read before an update is as it was after it."""
    w = synk.shared(np.ones(8, np.float32))
    read = {
        "value": lambda: w.value,
        "get_value": lambda: w.get_value(0),
        "gather": lambda: synk.gather(w)[0],
        "argument": lambda: w.value,
    }[way]()
    step = adding(w)
    for _ in range(3):
        step(read if way == "argument" else np.ones(8, np.float32))
    np.testing.assert_array_equal(read, np.ones(8))
    assert float(w.value[0]) == 25


def test_borrowed_view(group):
    """`borrow=True` gives NumPy arrays of the value."""
    w = synk.shared({"a": np.arange(3)})
    np.testing.assert_array_equal(w.get_value(0, borrow=True)["a"], [0, 1, 2])
    assert isinstance(w.get_value(0, borrow=True)["a"], np.ndarray)


# Kinds of values.


@pytest.mark.smoke
@also_simulated("four")
def test_typed_keys(four):
    """A typed PRNG key is a value as any: split in then, set, gathered and scattered."""
    w = synk.shared({"key": jax.random.key(0), "drawn": np.float32(0)})

    def draw(_):
        key, sub = jax.random.split(w.value["key"])
        w.value = {"key": key, "drawn": jax.random.uniform(sub)}

    step = synk.function(lambda x: x.sum(), then=draw)
    key = jax.random.key(0)
    for _ in range(2):
        step(np.ones(4, np.float32))
        key, sub = jax.random.split(key)
    assert (w.value["key"] == key) & (w.value["drawn"] == jax.random.uniform(sub))
    held = synk.shared(jax.random.split(jax.random.key(0), 1))
    synk.scatter(held, jax.random.split(key, 5))
    assert (synk.gather(held, nd_up=0) == jax.random.split(key, 5)).all()
    synk.check_replicas(w)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, slow(jnp.float16), np.int8, np.bool_, slow(np.complex64), slow(np.uint32)]
)
def test_dtypes_survive(four, dtype):
    """Every collective hands back the bits and the dtype that went in."""
    x = jnp.array([0, 1, 1, 0, 1], dtype)
    w = synk.shared(x[:2])
    synk.broadcast(w, x)
    for read in (w.value, w.get_value(3), synk.gather(w)[2], w.get_value(1, borrow=True)):
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, x)
    synk.check_replicas(w)
    synk.scatter(w, x)
    np.testing.assert_array_equal(synk.gather(w, nd_up=0), x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@also_simulated("group")
def test_16_bit_updates(group, dtype):
    """A 16-bit variable is updated in then without changing its dtype."""
    w = synk.shared(jnp.zeros(3, dtype))
    step = synk.function(lambda x: x.mean(0), reduce="mean", then=lambda mean: setattr(w, "value", w.value + mean))
    step(jnp.full((9, 3), 0.5, dtype)), step(jnp.full((9, 3), 0.25, dtype))
    assert w.value.dtype == dtype
    np.testing.assert_array_equal(np.asarray(w.value, np.float32), np.full(3, 0.75))


@also_simulated("four")
def test_trees(four):
    """A value is any tree; None and empty ones too."""
    w = synk.shared({"a": (np.zeros(2, np.float32), None), "b": []})
    step = synk.function(lambda x: x.sum(), then=lambda s: setattr(w, "value", jax.tree.map(lambda a: a + s, w.value)))
    step(np.ones(4, np.float32))
    assert_close(w.value, {"a": (np.full(2, 4.0), None), "b": []})


def test_float64_narrows():
    """As JAX does: a NumPy float64 becomes float32."""
    with group_of("devices", 2):
        assert synk.shared(np.zeros(3)).value.dtype == np.float32


def test_python_numbers_take_the_dtype():
    """A Python number assigned keeps the variable's dtype."""
    with group_of("devices", 2):
        w = synk.shared(jnp.zeros((), jnp.bfloat16))
        w.value = 3
        assert (w.value.dtype, float(w.value)) == (jnp.bfloat16, 3)


@also_simulated("four")
def test_results_lie_on_every_replica(four):
    """A value read outside lies whole on each device of the group."""
    value = synk.shared(np.arange(3)).value
    assert {shard.device for shard in value.addressable_shards} == set(four.devices)
    assert all(shard.data.shape == (3,) for shard in value.addressable_shards)


# Slices.


@also_simulated("four")
def test_slices_see_the_value_from_before(four):
    """Every part of a sliced call sees the variables as they were before it, and what it assigns itself."""
    w = synk.shared(np.float32(1.0), name="w")

    @synk.function
    def f(x):
        w.update(w.value + 1, slices="max")
        return w.value * len(x)

    assert float(f(np.ones(17, np.float32), num_slices=3)) == 2 * 17
    assert [float(w.get_value(rank)) for rank in range(4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("rows", [8, 9])
@also_simulated("four")
def test_add_without_reading(four, rows, slices):
    """The difference from the old value is added, though the function does not read it."""
    w = synk.shared(np.float32(10))
    f = synk.function(lambda x: w.update(x.sum(), slices="add"))
    for _ in range(2):
        w.value = np.float32(10)
        f(np.ones(rows, np.float32), num_slices=slices)
        parts = parts_of(np.ones(rows), 4, slices)
        assert [float(w.get_value(r)) for r in range(4)] == [10 + sum(p.sum() - 10 for p in parts[r]) for r in range(4)]


@pytest.mark.parametrize(
    ("slices", "want"), [("add", [5, 4, 4, 4]), ("last", [2, 2, 2, 2]), ("max", [3, 2, 2, 2]), ("min", [2, 2, 2, 2])]
)
def test_integer_updates(four, slices, want):
    """Integers combine over slices too, but for the mean."""
    seen = synk.shared(np.int32(0))
    synk.function(lambda x: seen.update(seen.value + len(x), slices=slices))(np.ones(17), num_slices=2)
    assert [int(seen.get_value(rank)) for rank in range(4)] == want


def test_64_bits_that_are_only_mentioned(four):
    """What names such a variable and does not read it is none of its business."""
    with jax.enable_x64(True):
        wide = synk.shared(np.float64(3), name="wide")
    scale, reads = synk.shared(np.float32(2)), False
    f = synk.function(lambda x: x.sum() * (wide.value if reads else scale.value))
    for turn in range(2):
        x = np.ones(5 + turn, np.float32)
        assert float(f(x)) == 2 * len(x) == float(f.serial(x))
    reads = True
    with pytest.raises(synk.SynkError, match="wide: it holds float64, made while jax_enable_x64 was on"):
        f(np.ones(7, np.float32), num_slices=2)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, slow(np.complex128), slow(np.uint64)])
def test_64_bits_that_are_switched_off(four, tmp_path, dtype):
    """Nothing makes 32 of them: what would raises, placed before or not; reading works, and so does all once on again."""
    value = np.array([2**40 + 1, 2, 3], dtype)
    with jax.enable_x64(True):
        placed, new = synk.shared(value, name="w"), synk.shared(value, name="w")
        f = synk.function(lambda x: x.sum() * (placed.value == 2).sum().astype(x.dtype), name="f")
        want = f(np.ones(5, np.float32))
        synk.save(tmp_path, {"w": placed}, step=1)
    for call in (
        lambda: f(np.ones(5, np.float32)), lambda: f.serial(np.ones(5, np.float32)), lambda: synk.broadcast(placed),
        lambda: synk.all_reduce(placed, "sum"), lambda: synk.gather(placed), lambda: synk.load(tmp_path, {"w": placed}),
        lambda: synk.check_replicas(placed), lambda: synk.broadcast(new), lambda: new.value,
    ):  # fmt: skip
        with pytest.raises(synk.SynkError, match=f"w: it holds {np.dtype(dtype)}, made while jax_enable_x64 was on"):
            call()
    with pytest.raises((TypeError, ValueError), match="jax_enable_x64"):
        placed.value = value
    np.testing.assert_array_equal(placed.get_value(), value)
    with jax.enable_x64(True):
        synk.scatter(placed, value)
    for rank, rows in enumerate(np.array_split(value, 4)):
        for got in (placed.get_value(rank), placed.get_value(rank, borrow=True)):
            assert got.dtype == value.dtype
            np.testing.assert_array_equal(got, rows)
    with jax.enable_x64(True):
        for w in (placed, new):
            w.set_value(value)
            np.testing.assert_array_equal(w.value, value)
        assert f(np.ones(5, np.float32)) == want


def test_values_of_64_bits_that_are_switched_off(four):
    """First and new values, and outputs, are narrowed as arguments are."""
    with jax.enable_x64(True):
        wide = jnp.arange(3.0) / 3
    w = synk.shared(wide, name="w")
    assert synk.function(lambda x: w.value * x.sum(), reduce="sum")(np.ones(5, np.float32)).dtype == jnp.float32
    w.value = wide
    synk.function(lambda x: setattr(w, "value", wide) or x.sum())(np.ones(5, np.float32))
    assert w.get_value(1).dtype == jnp.float32
    for op in ("sum", "max", "stack", "mean"):
        f = synk.function(lambda x: wide, reduce=op)
        assert {f(np.ones(5, np.float32)).dtype, jax.jit(f)(np.ones(5, np.float32)).dtype} == {jnp.dtype("float32")}


def test_arguments_of_64_bits_that_are_switched_off(four):
    """Broadcast ones are narrowed as scattered ones are, and as by jit; in traced calls too."""
    with jax.enable_x64(True):
        rate, x = jnp.float64(1.5), jnp.arange(5.0)
    f = synk.function(lambda x, rate: (x * rate).sum(0), inputs=["x"])
    assert [float(jax.grad(f, 1)(x, rate)), float(jax.jit(lambda x: f(x, rate))(x))] == [10, 15]
    for _ in range(2):
        for got in (
            f(x, rate),
            jax.jit(f)(x, rate),
            f.serial(x, rate),
            *f.iterate(x, synk.each([rate]), batches=[None]),
        ):
            assert (got.dtype, float(got)) == (jnp.float32, 15)
        f.check(x, rate)


# A variable used as its value.

FORGOTTEN = {
    "x * w": lambda w, x: x * w,
    "w * x": lambda w, x: w * x,
    "number * w": lambda w, x: 2.0 * w,
    "w + 1": lambda w, x: w + 1,
    "w += 1": lambda w, x: operator.iadd(w, 1),
    "-w": lambda w, x: -w,
    "w @ x": lambda w, x: w @ x,
    "w | 1": lambda w, x: w | 1,
    "int(w)": lambda w, x: int(w),
    "x[w]": lambda w, x: x[w],
    "w['a']": lambda w, x: w["a"],
    "w['a'] = x": lambda w, x: operator.setitem(w, "a", x),
    "len(w)": lambda w, x: len(w),
    "np.asarray(w)": lambda w, x: np.asarray(w),
    "np.sum(w)": lambda w, x: np.sum(w),
    "np.float32 * w": lambda w, x: np.float32(2) * w,
    "jnp.asarray(w)": lambda w, x: jnp.asarray(w),
    "jnp.sum(w)": lambda w, x: jnp.sum(w),
    "jnp.where": lambda w, x: jnp.where(x > 0, w, x),
    "jit": lambda w, x: jax.jit(lambda w: w)(w),
    "grad": lambda w, x: jax.grad(lambda w: w)(w),
    "scan": lambda w, x: lax.scan(lambda carry, x: (carry, x), w, x),
    "w.shape": lambda w, x: w.shape,
    "w.at": lambda w, x: w.at[0].set(1),
}


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("name", FORGOTTEN)
def test_forgotten_value(name, where):
    """A variable used as an array or a tree says that `.value` was forgotten, outside and in a function."""
    use = FORGOTTEN[name]
    w, x = synk.shared(np.ones(2, np.float32), name="weights"), numbers(2)
    with group_of("devices", 2):
        for each in (x, jnp.asarray(x)):
            f = synk.function(lambda x: use(w, x))
            with pytest.raises((TypeError, AttributeError, synk.SynkError), match=r"weights is .* weights\.value"):
                f(each) if where == "inside" else use(w, each)


def test_what_says_of_itself_what_it_is_like():
    """Whoever asks whether a variable has an attribute, can be called or iterated is told that it does not."""
    w = synk.shared(np.ones(2, np.float32))
    assert not any(hasattr(w, name) for name in ("shape", "dtype", "items", "tree_flatten", "__array_interface__"))
    assert not callable(w)
    assert inspect.signature(type(w)) and copy.copy([w]) == [w]


def test_repr_of_rows(four):
    """It says how many rows there are in all, and on how many replicas."""
    w = synk.shared({"a": np.zeros((1, 3), np.float32), "b": np.zeros((1,), np.int32)}, name="w")
    assert repr(w) == "Shared(w: float32[1, 3], int32[1])"
    synk.scatter(w, {"a": numbers(22, 3), "b": np.arange(22, dtype=np.int32)})
    assert repr(w) == "Shared(w: float32[22, 3], int32[22]; 22 rows on 4 replicas)"
    synk.all_gather(w)
    assert repr(w) == "Shared(w: float32[22, 3], int32[22])"


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [8, 7])
def test_a_variable_is_an_argument_by_identity(rows):
    """The function reads and writes the one that it is given; taking turns compiles each once."""
    x = np.ones(rows, np.float32)
    with group_of("devices", 2):
        a, b = synk.shared(np.float32(1), "a"), synk.shared(np.float32(10), "b")
        read = synk.function(lambda w, x: w.value * x.sum())

        @synk.function(inputs={"w": "broadcast"})
        def add(x, w, scale=1.0):
            return x.sum() * scale

        @add.then
        def add(total, w):
            w.value = w.value + total
            return w.value

        counts = []
        for _ in range(3):
            for w in (a, b):
                before = float(w.value)
                assert float(read(w, x)) == float(read(x=x, w=w)) == float(read.serial(w, x)) == before * rows
                read.check(w, x)
                assert [float(got) for got in read.iterate(w, x, batches=[[0], [1, 2]])] == [before, 2 * before]
                assert float(add(x, w)) == float(w.value) == before + rows
                add.check(x, w)
            counts.append((read.stats.compilations, add.stats.compilations))
        assert len(set(counts)) == 1
        assert set(read.shared) == set(add.shared) == {a, b}
        with pytest.raises(synk.SynkError, match=r"b is a shared variable, used as .*: its value is b\.value"):
            synk.function(lambda w, x: x * w)(b, x)
        with pytest.raises(synk.SynkError, match="shared variable"):
            jax.jit(lambda x: read(a, x))(x)


def test_a_variable_that_was_an_argument_is_not_kept():
    """Of many that take turns and go, as in folds, the last one is left."""
    with group_of("devices", 2):
        f = synk.function(lambda w, x: w.value * x.sum())
        gone = []
        for fold in range(4):
            w = synk.shared(np.float32(fold))
            assert float(f(w, np.ones(3, np.float32))) == 3 * fold
            gone.append(weakref.ref(w))
        gc.collect()
        assert [each() is None for each in gone] == [True, True, True, False]


EIGHT = np.arange(8, dtype=np.float32)


def test_shared_keys_are_copies(four):
    """The user's key may be donated elsewhere."""
    key = jax.random.key(0)
    w = synk.shared(key)
    jax.jit(lambda k: jax.random.split(k)[0], donate_argnums=0)(key)
    np.testing.assert_array_equal(jax.random.key_data(w.value), jax.random.key_data(jax.random.key(0)))


def test_serial_asks_only_for_what_it_reads(four):
    """A variable of another branch may be unequal."""
    v = synk.shared(np.float32(0))

    def fn(x, flag):
        if flag:
            v.value = v.value + x.sum()
        return x.sum()

    f = synk.function(fn, inputs={"flag": "static"})
    f(EIGHT, True), f(EIGHT, False)
    assert float(f.serial(EIGHT, False)) == EIGHT.sum()


@pytest.mark.smoke
def test_a_callback_that_asks_for_a_variable_is_told():
    """The thread of a device would wait for itself, so it gets an error, whatever it does, and never a deadlock."""
    with synk.init(2):
        v, told = synk.shared(np.float32(2), name="v"), []
        asks = [
            lambda: v.value, lambda: v.get_value(1), lambda: v.get_value(1, borrow=True),
            lambda: setattr(v, "value", np.float32(0)), lambda: synk.broadcast(v),
        ]  # fmt: skip

        # Each catches its error: where one device fails, XLA's CPU collectives end the process.
        def look(total):
            for ask in asks:
                with pytest.raises(synk.SynkError, match=r"host callback .* pass its value to the callback"):
                    ask()
                told.append(ask)
            return total

        f = synk.function(lambda x: jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), x.sum()))
        for _ in range(3):
            total = f(EIGHT)
        assert v.value == 2
        assert total == EIGHT.sum() and len(told) == 3 * 2 * len(asks)


X8 = numbers(8)


W = np.array([0.5, -1.0], np.float32)


def change_key(w):
    w.value["a"] = w.value["a"] + 1


def change_nested(w):
    w.value["list"][0] = w.value["list"][0] + 1


def add_key(w):
    w.value["c"] = w.value["a"]


def remove_key(w):
    del w.value["a"]


def change_update(w):
    w.value.update(a=w.value["a"] + 1)


@pytest.mark.parametrize("change", [change_key, change_nested, add_key, remove_key, change_update])
@pytest.mark.parametrize("where", ["fn", "then"])
def test_a_changed_tree_raises(group, change, where):
    """What is put into the tree that `w.value` gave would be lost, so the call raises, the first and the second."""
    w = synk.shared({"a": np.float32(0), "list": [np.float32(1)]}, name="w")
    f = synk.function(lambda x: (change(w) if where == "fn" else None, x.sum())[1], name="f")
    f.then(lambda total: (change(w) if where == "then" else None, total)[1])
    for call in (f, f.check, f):
        with unchanged(w), pytest.raises(synk.SynkError, match=r"w.*value|value.*w"):
            call(X8)


def test_a_read_tree_does_not_raise(group):
    """Reading it, and copies of it, are no changes."""
    w = synk.shared({"a": np.float32(1), "list": [np.float32(2)]})
    f = synk.function(lambda x: jax.tree.map(lambda leaf: leaf * x.sum(), {**w.value}), reduce="sum")
    assert_close(f(X8), {"a": X8.sum(), "list": [2 * X8.sum()]})


def test_a_variable_is_compared_and_hashed_as_an_object():
    """As a key of a dictionary, in `==` and `in`."""
    w, other = synk.shared(W), synk.shared(W)
    assert w == w and w != other and w in [other, w] and {w: 1}[w] == 1


def test_members_of_a_variable(group):
    """Tab completion shows what users may use, before and after its first use."""
    w = synk.shared(W)
    for _ in range(2):
        assert members(w) == {"name", "value", "update", "get_value", "set_value"}
        w.value = 2 * W


def test_a_number_that_does_not_fit():
    """Is named with the variable and its leaf."""
    w = synk.shared({"i": np.int32(0)}, name="w")
    with pytest.raises(ValueError, match=r"w\['i'\]: .* 1099511627776 out of bounds for int32"):
        w.set_value({"i": 2**40})


@pytest.mark.parametrize("way", ["fn", "then", "check", "over", "scan"])
def test_variables_are_made_outside_functions(group, way):
    """Made inside, there would be another one in each trace, and no trace would ever serve a call."""

    def reads(x):
        return synk.shared(np.float32(1), name="w").value * x

    f = synk.function(reads) if way != "then" else synk.function(lambda x: x.sum(), then=reads)
    x = np.ones(3, np.float32)
    call = {
        "check": f.check,
        "over": lambda x: f.over(x, batches=[2]),
        "scan": lambda x: synk.contrib.scan(lambda a, b: reads(a), x),
    }
    with pytest.raises(synk.SynkError, match="makes the shared variable w inside"):
        call.get(way, f)(x)
