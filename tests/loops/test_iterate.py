"""Iterate and prefetch: the results of plain calls, in order, of batches that are taken early."""

import itertools
import signal
import sys
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import Bar, assert_close, assert_same, group_of, numbers, raised_by, unchanged

pytestmark = pytest.mark.usefixtures("group")

X = numbers(11)
PLACES = ("raw", "host", "scatter", "broadcast")
BATCHES = [[3, 1, 0, 9], slice(4), [10, -1, 5], None, X[:, 0] > 0, 4, np.array([7])]

in_every_place = pytest.mark.parametrize("place", PLACES)
of_every_size = pytest.mark.parametrize("size", [0, 1, 3])
rows = synk.function(lambda x: x, reduce="concat", name="rows")


def at(place, x, **options):
    """An argument: the array itself, or as data."""
    return x if place == "raw" else synk.data(x, place=place, **options)


def plain(x, batches=BATCHES):
    return [x[:batch] if isinstance(batch, int) else x if batch is None else x[batch] for batch in batches]


def ones(count=6):
    return (np.ones((4, 2), np.float32) for _ in range(count))


def endless():
    while True:
        yield slice(4)


# What comes.


@of_every_size
@in_every_place
def test_results_in_order(place, size):
    """One for each batch of any form, even and uneven, as calls give them."""
    assert_same(list(rows.iterate(at(place, X), batches=BATCHES, prefetch=size)), plain(X))


@pytest.mark.smoke
@pytest.mark.parametrize("group", [("devices", 1), ("devices", 2), ("simulated", 2)])
@pytest.mark.parametrize("make", [jnp.asarray, lambda x: synk.data(jnp.asarray(x))], ids=["array", "data"])
def test_rows_of_jax(group, make):
    """Batches of arrays of JAX, in groups of one device too."""
    with group_of(*group):
        assert_same(list(rows.iterate(make(X), batches=BATCHES)), plain(X))
        assert_same(rows.over(make(X), batches=BATCHES), np.concatenate(plain(X)))


@pytest.mark.parametrize(("size", "slices"), [(0, 1), (3, 1), (3, 2)])
def test_several_inputs(size, slices):
    """Of every place together, minibatch rows and a broadcast number among them."""
    f = synk.function(lambda w, *xs: jnp.stack(xs, 1) * w, {"w": "broadcast"}, reduce="concat")
    xs = [numbers(11, seed=i) for i in range(5)]
    batches = [[3, 1, 0, 9, 9], slice(9, 4, -1)]
    more = synk.data(xs[4][:5], minibatch=True)
    given = [at(place, x) for place, x in zip(PLACES, xs, strict=False)]
    got = list(f.iterate(2.0, *given, more, batches=batches, prefetch=size, num_slices=slices))
    want = [np.stack([*(x[batch] for x in xs[:4]), xs[4][:5]], 1) * np.float32(2) for batch in batches]
    assert_same(got, want)


@pytest.mark.parametrize("place", ["raw", "host", "scatter", "broadcast"])
def test_keys_go_with_their_rows(place):
    """Typed keys are picked once, whatever they go with."""
    keys, batch = jax.random.split(jax.random.key(0), 11), np.random.default_rng(0).permutation(11)
    f = synk.function(lambda keys, x: (keys, x), reduce="concat")
    ((got, x),) = f.iterate(keys, at(place, X), batches=[batch])
    assert_same((jax.random.key_data(got), x), (jax.random.key_data(keys[batch]), X[batch]))


@of_every_size
@in_every_place
@pytest.mark.parametrize("kind", [int, bool])
def test_batches_in_one_array(kind, place, size):
    """Batches may be written into the same memory one after another: each is taken as it was when it came."""
    wanted = [[3, 1, 0, 9], [0, 1, 5, 2], [9, 8, 7, 6], [4, 4, 10, -1]]
    memory = np.zeros(4 if kind is int else 11, kind)

    def batches():
        for batch in wanted:
            memory[:] = batch if kind is int else np.isin(np.arange(11), batch[:3])
            yield memory

    want = [X[batch] if kind is int else X[sorted({*batch[:3]})] for batch in wanted]
    assert_same(list(rows.iterate(at(place, X), batches=batches(), prefetch=size)), want)


@pytest.mark.parametrize("place", ["scatter", "broadcast"])
def test_batches_in_one_list(place):
    """Lists may be used again like arrays."""
    memory = [0, 0]

    def batches():
        for i in range(6):
            memory[:] = i, i + 1
            yield memory

    got = list(rows.iterate(at(place, X), batches=batches()))
    assert_same(got, [X[i : i + 2] for i in range(6)])


def test_output_subset():
    """As in a call."""
    f = synk.function(lambda x: (x.sum(), x, x.max()), outputs=("sum", "concat", "max"))
    assert_same(list(f.iterate(X, batches=[[2, 1]], output_subset=[2, 1])), [(X[[2, 1]].max(), X[[2, 1]])])


def test_length():
    """As many as there are batches, so that a progress bar shows; none where batches do not say."""
    tqdm = pytest.importorskip("tqdm")
    batches = synk.minibatches(11, 4, epochs=2)
    results = rows.iterate(X, batches=batches)
    with tqdm.tqdm(results, disable=True) as bar:
        assert (len(results), bar.total, len(list(bar))) == (6, 6, 6)
    with rows.iterate(X, batches=iter(batches)) as results, pytest.raises(TypeError, match="len"):
        len(results)


def test_statistics_count_every_call():
    """Calls and rows, as they run."""
    f = synk.function(lambda x: x.sum(0))
    list(f.iterate(X, batches=[slice(4), [1, 2, 3]]))
    assert (f.stats.calls, f.stats.rows) == (2, 7)


def trained(loop, place):
    """The weights and losses of a training run."""
    w = synk.shared(np.zeros(2, np.float32), name="w")

    @synk.function(outputs=("mean", "mean"))
    def step(x):
        return jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w.value)

    @step.then
    def step(loss, gradient):
        w.value = w.value - 0.01 * gradient
        return loss

    losses = loop(step, at(place, X / 8), synk.minibatches(11, 4, epochs=3))
    return [np.asarray(loss) for loss in losses], np.asarray(w.value)


@pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
def test_training_is_that_of_plain_calls(place):
    """Bit for bit: each call sees the variables as the call before left them."""
    got = trained(lambda step, x, batches: list(step.iterate(x, batches=batches)), place)
    assert_same(got, trained(lambda step, x, batches: [step(x, batch=batch) for batch in batches], place))


# Errors.


@of_every_size
@in_every_place
def test_an_error_comes_at_its_own_batch(place, size):
    """Results before it all come, nothing after it."""
    results = rows.iterate(at(place, X), batches=[*BATCHES[:3], [0, 11], slice(4)], prefetch=size)
    assert_same([next(results) for _ in range(3)], plain(X, BATCHES[:3]))
    with pytest.raises(IndexError, match=r"rows: batch holds the index 11, but x has 11 rows"):
        next(results)
    assert list(results) == []


@of_every_size
def test_an_error_of_the_batches_comes_as_it_is(size):
    """After the results of those that came before it."""

    def batches():
        yield slice(4)
        raise OSError("the disk is gone")

    results = rows.iterate(X, batches=batches(), prefetch=size)
    assert_same(next(results), X[:4])
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


@pytest.mark.parametrize("batch", [slice(2, 8), [9, 3, 2, 0], 7])
@pytest.mark.parametrize("group", [("devices", 1), ("devices", 2), ("simulated", 2)])
def test_a_bad_row_is_named_as_by_a_call(group, batch):
    """Rows that were picked early are tried one by one like those of a call, in iterate and in stream."""
    x = numbers(11)
    x[3] = np.inf
    f = synk.function(lambda x: x.sum(0), nan="raise", name="f")
    with group_of(*group):
        for _ in range(2):
            errors = [
                raised_by(run)
                for run in (
                    lambda: f(x, batch=batch),
                    lambda: list(f.iterate(x, batches=[slice(0, 2), slice(0, 2), batch])),
                    lambda: list(f.stream([x[:2], x[:2], x[:batch] if type(batch) is int else x[batch]])),
                )
            ]
            assert str(errors[0]) == str(errors[1]) and "row 3" in str(errors[0])
            assert isinstance(errors[2], FloatingPointError) and "row" in str(errors[2])


@pytest.mark.parametrize("per_launch", [None, 3])
def test_a_bad_row_beside_values_of_each_batch(group, per_launch):
    """Rows and values are those of the call, whatever has come into their places."""
    x, rates = numbers(11), np.ones(1, np.float32)
    x[3] = np.inf
    f = synk.function(lambda x, rate: (x * rate[0]).sum(0), ["x"], nan="raise", name="f")

    def values():
        for number in range(4):
            rates[:] = number
            yield rates

    wanted = raised_by(lambda: f(x, np.array([2], np.float32), batch=[9, 3, 2, 0]))
    batches = [slice(0, 2), [5, 4, 1, 0], [9, 3, 2, 0], [1]]
    error = raised_by(lambda: [*f.iterate(x, synk.each(values()), batches=batches, per_launch=per_launch)])
    assert str(error) == str(wanted) and "row 3" in str(error)


def entered(run):
    """How many functions and methods of Python a run enters."""
    count = [0]

    def note(frame, event, argument):
        count[0] += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count[0]


@pytest.mark.parametrize("group", [("devices", 1), ("devices", 2)])
@pytest.mark.parametrize("place", ["raw", "scatter", "broadcast"])
@pytest.mark.parametrize("kind", ["slices", "indexes"])
def test_a_loop_enters_little_more_than_its_calls(group, place, kind):
    """Batches that are taken early cost what their calls would do for them."""
    x, batches = numbers(128), [slice(4 * i, 4 * i + 4) for i in range(32)]
    batches = batches if kind == "slices" else [np.arange(128)[batch][::-1] for batch in batches]
    with group_of(*group):
        given, f = at(place, x), synk.function(lambda x: x.sum(0), name="f")

        def calls():
            for batch in batches:
                jax.block_until_ready(f(given, batch=batch))

        def loop():
            for result in f.iterate(given, batches=batches):
                jax.block_until_ready(result)

        calls(), loop()
        assert entered(loop) <= 1.3 * entered(calls)


def by_break(results):
    for _ in results:
        break


def by_an_error(results):
    with pytest.raises(ZeroDivisionError):
        for _ in results:
            1 / 0


def by_close(results):
    next(results)
    results.close()
    assert list(results) == []


def by_with(results):
    with results as each:
        next(each)
    assert list(results) == []


def by_an_interrupt(results):
    with pytest.raises(KeyboardInterrupt):
        for _ in results:
            signal.raise_signal(signal.SIGINT)


LEAVING = [by_break, by_an_error, by_close, by_with, by_an_interrupt]


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("size", [0, 2])
def test_leaving_closes_the_batches(leave, size):
    """However a loop is left, and for both kinds of loops."""
    for make in (
        lambda source: rows.iterate(X, batches=source, prefetch=size),
        lambda source: synk.prefetch(source, size),
    ):
        noted = []

        def source(noted=noted):
            try:
                yield from itertools.repeat(X[:, 0] > 0)
            finally:
                noted.append("closed")

        leave(make(source()))
        assert noted == ["closed"]


def test_what_never_begins_says_so():
    """On the line that let go of it; what was begun or closed, and batches that are prefetched alone, say nothing."""
    for make in (lambda: rows.iterate(X, batches=[2]), lambda: rows.stream([X])):
        with pytest.warns(RuntimeWarning, match="rows.*: no loop asked for its results, so it ran nothing") as caught:
            make()
        assert caught[0].filename == __file__
        for use in (next, list, lambda loop: loop.close(), lambda loop: loop.__exit__()):
            use(make())
    synk.prefetch([X])
    with pytest.raises(ValueError, match="prefetch is -1"):
        rows.iterate(X, batches=[2], prefetch=-1)


@of_every_size
@pytest.mark.parametrize("place", ["host", "broadcast"])
def test_batches_are_taken_early(place, size):
    """Of the result in hand by as many batches as asked for, and by no more."""
    asked = []

    def batches():
        for i in range(8):
            asked.append(i)
            yield [i, i + 1]

    results = rows.iterate(at(place, X), batches=batches(), prefetch=size)
    for i, result in enumerate(results):
        assert_same(result, X[[i, i + 1]])
        assert len(asked) == min(i + 1 + size, 8)


def test_rows_are_picked_ahead():
    """Not only batches are asked for: their rows are read before the result in hand is left."""

    class Noted:
        shape, dtype, reads = X.shape, X.dtype, 0

        def __getitem__(self, index):
            Noted.reads += 1
            return X[index]

    results = rows.iterate(Noted(), batches=[[i, i + 1] for i in range(6)], prefetch=2)
    next(results)
    assert Noted.reads == 3  # for all replicas at once
    results.close()


# Any iterator.


@of_every_size
@pytest.mark.parametrize("count", [4, 5])
def test_prefetch_of_trees(size, count):
    """Trees come as trees, with what is no array of rows as it was; rows lie on the replicas where they divide."""
    key = jax.random.key(0)
    trees = [
        {"x": numbers(count, seed=i), "y": (np.arange(count, dtype=np.uint8), i, None), "k": key} for i in range(3)
    ]
    got = list(synk.prefetch(iter(trees), size))
    assert all(tree.pop("k") is key for tree in [*got, *trees])
    assert_same(got, trees)
    assert isinstance(got[0]["x"], jax.Array if count == 4 else np.ndarray)
    if count == 4:
        assert got[0]["x"].sharding == synk.group().stacked


@of_every_size
def test_transform(size):
    """Its results are what comes."""
    got = list(synk.prefetch(ones(3), size, lambda tree: {"x": tree * 2}))
    assert_same(got, [{"x": np.full((4, 2), 2, np.float32)}] * 3)


WRONG = {
    "other rows": ({"x": X, "y": [X[:5]]}, ValueError, r"batch\['y'\]\[0\] has 5 rows, batch\['x'\] has 11"),
    "no rows": ({"x": X[:0]}, ValueError, r"batch\['x'\] has 0 rows"),
    "a string": ({"x": "a"}, TypeError, r"batch\['x'\] is a str; give arrays and numbers"),
    "objects": ([np.array([None])], TypeError, r"batch\[0\] has dtype object"),
}


@of_every_size
@pytest.mark.parametrize("case", WRONG)
def test_prefetch_checks_each_tree(case, size):
    """An error names the leaf, comes at its own batch and ends the iteration."""
    tree, error, match = WRONG[case]
    trees = synk.prefetch(iter([{"x": X}, tree, {"x": X}]), size)
    assert_same(next(trees), {"x": X})
    with pytest.raises(error, match=r"synk\.prefetch: " + match):
        next(trees)
    assert list(trees) == []


@of_every_size
def test_an_error_of_a_transform_comes_as_it_is(size):
    """At the batch that it was given."""
    trees = synk.prefetch(iter([1, 0]), size, lambda number: np.ones((2, 2 // number), np.float32))
    assert_same(next(trees), np.ones((2, 2), np.float32))
    with pytest.raises(ZeroDivisionError):
        next(trees)


def closing(noted):
    try:
        yield from ones()
    finally:
        noted.append("closed")


@of_every_size
def test_leaving_closes_a_generator(size):
    """A loop that is left lets go of it."""
    noted = []
    for _ in synk.prefetch(closing(noted), size):
        break
    assert noted == ["closed"]


@of_every_size
def test_close_closes_a_generator(size):
    """So does close, though the iterator itself still has a name."""
    noted = []
    with synk.prefetch(closing(noted), size) as trees:
        next(trees)
    assert noted == ["closed"]


@of_every_size
def test_64_bits_ahead(size):
    """Items are taken with the options that hold where the loop asks for them."""
    x = numbers(4).astype(np.float64) + 1e-12
    with jax.enable_x64(True):
        assert_same(list(synk.prefetch([x], size)), [x])
        assert_same(list(rows.iterate(x, batches=[[3, 0]], prefetch=size)), [x[[3, 0]]])
    assert_same(list(synk.prefetch([x], size)), [x.astype(np.float32)])


@pytest.mark.smoke
@pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
def test_a_write_between_two_items(place):
    """The next result sees it, whatever was taken early."""
    array = np.arange(8, dtype=np.float32)
    data, other = at(place, array), synk.data(array[4:])
    total = synk.function(jnp.sum, name="total")
    writes = [
        lambda: data.__setitem__(..., 1), lambda: other.__setitem__(..., 2), lambda: data.set_length(7),
        lambda: data.set_value(array + 1), lambda: data.to("host" if place != "host" else "scatter"), lambda: None,
        lambda: data.__setitem__(0, 5), lambda: data.to(place), lambda: data.set_value(np.arange(8, dtype=np.float32)),
    ]  # fmt: skip
    for options in [{"prefetch": size} for size in (0, 1, 2, 9)] + [
        {"per_launch": 1},
        {"per_launch": 1, "prefetch": 0},
    ]:
        data.set_value(array)
        data[...] = np.arange(8)
        got, wanted = [], [28]
        for result in total.iterate(data, batches=[slice(0, 8)] * 10, **options):
            got.append(float(np.sum(result)))
            if len(got) < 10:
                writes[len(got) - 1]()
                wanted.append(float(np.asarray(data).sum()))
        assert got == wanted
    # What is gone raises at its turn.
    for _ in total.iterate(data, batches=[slice(0, 8)] * 3):
        break
    results = total.iterate(data, batches=[slice(0, 8)] * 3)
    next(results)
    data.free()
    with pytest.raises(synk.SynkError, match=r"data_.*: it was freed"):
        next(results)


@pytest.mark.parametrize("size", [0, 2])
def test_an_iterator_that_ends_inside_is_an_error(size):
    """`transform` may not end the loop in silence."""
    few = iter([1])
    trees = synk.prefetch([np.zeros(4)] * 3, size, transform=lambda tree: tree + next(few))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(trees)


def test_arguments_are_let_go_of():
    """An iterator that has ended keeps nothing alive."""
    x = np.zeros((8, 2), np.float32)
    kept = weakref.ref(x)
    results = synk.function(jnp.sum).iterate(x, batches=[slice(0, 8)])
    list(results)
    del x
    assert kept() is None


@pytest.mark.parametrize("place", ["host", "broadcast", "scatter"])
def test_what_was_wrong_may_be_right_at_its_turn(group, place):
    """With prefetch=0 a batch is of the data as it is when its turn comes, and so is an error."""
    x, f = np.arange(9, dtype=np.float32), synk.function(jnp.sum, name="f")
    for _ in range(2):
        data, found = synk.data(x[:4].copy(), place=place), []
        for total in f.iterate(data, batches=[[0], [1], [8], [2]], prefetch=0):
            found.append(float(total))
            if len(found) == 1:
                data.set_value(x)
        assert found == [0, 1, 8, 2]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("place", ["host", "broadcast", "scatter"])
def test_what_is_wrong_ahead_raises_at_its_turn(group, place, prefetch):
    """Results of earlier batches come first; nothing comes after it."""
    x, f = np.arange(9, dtype=np.float32), synk.function(jnp.sum, name="f")
    for _ in range(2):
        results = f.iterate(synk.data(x[:4], place=place), batches=[[0], [8], [1]], prefetch=prefetch)
        assert float(next(results)) == 0
        with pytest.raises(IndexError, match=r"f: batch holds the index 8, but .* has 4 rows"):
            next(results)
        assert list(results) == []


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_one_key_for_all_batches_warns(key):
    """It draws the same noise in each; synk.each gives each batch its own, and over each row."""
    with group_of("devices", 2):
        f = synk.function(
            lambda x, key: x + jax.vmap(jax.random.normal)(synk.row_keys(key)), ["x"], reduce="concat", name="f"
        )
        x, batches = np.zeros(8, np.float32), [[0, 1], [2, 3], [4, 5]]
        with pytest.warns(UserWarning, match=r"f\.iterate: key is one PRNG key for all batches.* synk\.each") as caught:
            same = list(f.iterate(x, key(0), batches=batches))
        assert len(caught) == 1 and caught[0].filename == __file__
        assert len(set(np.ravel(same).tolist())) == 2
        own = list(f.iterate(x, synk.each(jax.random.split(key(0), 3)), batches=batches))
        assert len(set(np.ravel(own).tolist())) == 6
        assert len(set(f.over(x, key(0), batches=batches).tolist())) == 6
        one = key(0)
        with pytest.warns(UserWarning, match=r"f\.stream: key is one PRNG key"):
            list(f.stream([(x, one), (x, one)]))
        assert len(list(f.stream([(x, one), (x, key(1)), (x[:2], key(2))]))) == 3


def loops_of(make, by="iterate"):
    """Make what goes through batches of 8 rows, and updates variables or not; its name in messages is f."""
    x, w = numbers(8), synk.shared(np.float32(2))
    if make == "function":
        f = synk.function(lambda x: x.sum(), name="f").then(lambda total: setattr(w, "value", w.value + total))
    elif make == "update in fn":
        f = synk.function(lambda x: setattr(w, "value", w.value + x.sum()), name="f")
    elif make == "reads":
        f = synk.function(lambda x: x.sum() * w.value, name="f")
    else:
        kind = {"step": synk.train.step, "local": synk.contrib.local_steps}[make]
        f = kind(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1), name="f")
    if by == "calls":
        return lambda batches: [f(x, batch=batch) for batch in batches]
    return lambda batches: list(f.iterate(x, batches=batches))


by_loops_or_calls = pytest.mark.parametrize("by", ["iterate", "calls"])


def orders(bar=lambda batches: batches, **options):
    """Three epochs of batches."""
    return [bar(synk.minibatches(8, 3, **options)) for _ in range(3)]


@pytest.mark.parametrize("bar", [lambda batches: batches, Bar])
@pytest.mark.parametrize("make", ["function", "update in fn", "step", "local"])
@by_loops_or_calls
def test_an_epoch_that_repeats_the_last_one_warns(make, bar, by):
    """It has the batches of the epoch before in the same order; a warning says so at the loop, once a place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        loop = loops_of(make, by)
        for batches in [*orders(bar), *orders(bar, seed=1)]:
            loop(batches)
    [warning] = caught
    assert warning.filename == __file__ and warning.category is UserWarning
    assert str(warning.message).startswith("f: this loop has the batches") and "seed=epoch" in str(warning.message)
    assert "epochs=" in str(warning.message)


@pytest.mark.parametrize("make", ["function", "step", "local", "reads"])
@by_loops_or_calls
def test_other_epochs_do_not_warn(make, by):
    """Other seeds, no shuffling, one loop of all epochs, what goes on after a start, what updates nothing, and what
    has not begun."""
    loop = loops_of(make, by)
    for batches in [*(synk.minibatches(8, 3, seed=epoch) for epoch in range(3)), *orders(shuffle=False)]:
        loop(batches)
    loop(synk.minibatches(8, 3, seed=7, epochs=3))
    loop(synk.minibatches(8, 3, seed=7, epochs=3, start=4))
    loops_of(make, by)(synk.minibatches(8, 3))
    if make == "reads":
        for batches in orders():
            loop(batches)


def test_several_calls_for_a_batch_repeat_nothing():
    """Two of one step, of a generator and its judge, and of one loop's batches that are kept."""
    x, (one, other) = numbers(8), (synk.shared(np.float32(0)) for _ in range(2))
    steps = [
        synk.function(lambda x, w=w: setattr(w, "value", w.value + x.sum()), inputs=["x"]) for w in (one, one, other)
    ]
    batches = [*synk.minibatches(8, 3)]
    for batch in 2 * batches:
        for step in [*steps, *steps]:
            step(x, batch=batch)


def test_a_loop_that_has_not_begun_repeats_nothing():
    """`len` of a loop, and one that is made and dropped, deal out no batch."""
    step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1))
    step(X)
    with pytest.warns(RuntimeWarning, match="ran nothing"):
        assert len(step.iterate(X, batches=synk.minibatches(11, 3))) == 4
    assert len(list(step.iterate(X, batches=synk.minibatches(11, 3)))) == 4


def used_up(make=lambda: iter(())):
    generator = (batch for batch in make())
    list(generator)
    return generator


@pytest.mark.parametrize("bar", [lambda batches: batches, Bar])
def test_a_used_up_generator_raises(bar):
    """It gives its batches once, so a second loop would run nothing in silence."""
    step = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1))
    batches = (slice(4 * i, 4 * i + 4) for i in range(2))
    assert len(list(step.iterate(X, batches=bar(batches)))) == 2
    for call in (step.iterate, rows.iterate, rows.over):
        with pytest.raises(ValueError, match=r"batches is a generator that is used up.* Make another"):
            call(X, batches=bar(batches))
    for call in (rows.stream, step.stream, lambda source: rows.over(source=source)):
        with pytest.raises(ValueError, match="source is a generator that is used up"):
            call(bar(used_up()))
    with pytest.raises(ValueError, match=r"synk\.prefetch: iterator is a generator that is used up"):
        synk.prefetch(bar(used_up()))
    assert list(rows.iterate(X, batches=[])) == []


X8 = numbers(8)


def counting(calls):
    """A function that adds to a variable, the variable, and an iterator that has given so many results."""
    total = synk.shared(np.float32(0), name="total")

    @synk.function(name="counted")
    def counted(x):
        return x.sum()

    @counted.then
    def counted(part):
        total.value = total.value + part
        return part

    results = counted.iterate(X8, batches=[4, 3, 2][1 - calls :])
    for _ in range(calls):
        next(results)
    return counted, total, results


INSIDE = {
    "jit": lambda results: jax.jit(lambda x: x + next(results))(1.0),
    "grad": lambda results: jax.grad(lambda x: x * next(results))(1.0),
    "a function": lambda results: synk.function(lambda x: x.sum() + next(results))(X8),
}


@pytest.mark.smoke
@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("name", INSIDE)
def test_next_inside_raises_and_changes_nothing(group, name, calls):
    """`next` of an iterator under a trace raises; the variable is as it was, and the iterator goes on."""
    counted, total, results = counting(calls)
    with unchanged(total):
        assert isinstance(raised_by(lambda: INSIDE[name](results)), synk.SynkError)
    assert counted.stats.calls == calls
    assert_close(list(results), [X8[:3].sum(), X8[:2].sum()])
    assert_close(counted(X8), X8.sum())


@pytest.mark.parametrize("name", INSIDE)
def test_iterate_inside_raises(group, name):
    """So does making one."""
    counted, total, _ = counting(1)
    with unchanged(total), pytest.raises(synk.SynkError, match="counted"):
        INSIDE[name](iter(lambda: counted.iterate(X8, batches=[4]), None))
