"""Prefetch: the source is asked on the loop's own thread, right after a launch, and at most so many items early."""

import itertools
import signal
import threading
from contextlib import nullcontext as nothing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk

of_every_size = pytest.mark.parametrize("size", [0, 1, 2, 5])
PLACES = ["host", "scatter", "broadcast"]
total = synk.function(jnp.sum, name="total")
scaled = synk.function(lambda x, by: by[0] * jnp.sum(x), inputs=["x"], name="scaled")


def counted(items, count, asked):
    """Items, with how many calls had been launched when each was asked for."""
    for item in items:
        asked.append(count())
        yield item


def calls_before(i, size):
    """How many calls are launched before item `i` is asked for."""
    return max(min(i, 1), i - size + 1) if size else i


@of_every_size
def test_the_source_is_asked_right_after_a_launch(group, size):
    """And at most `prefetch` items early: batches, values of each, and items of a stream."""
    calls = [calls_before(i, size) for i in range(8)]
    ones = np.ones(4, np.float32)
    for make in (
        lambda f, asked: f.iterate(ones, 1.0, batches=counted([[0]] * 8, lambda: f.stats.calls, asked), prefetch=size),
        lambda f, asked: f.iterate(
            ones, synk.each(counted([1.0] * 8, lambda: f.stats.calls, asked)), batches=[[0]] * 8, prefetch=size
        ),
        lambda f, asked: f.stream(counted([(ones, 1.0)] * 8, lambda: f.stats.calls, asked), prefetch=size),
    ):
        asked, f = [], synk.function(lambda x, by: by * jnp.sum(x), inputs=["x"])
        assert len(list(make(f, asked))) == 8
        assert asked == calls


@pytest.mark.smoke
@of_every_size
def test_batches_are_sent_before_they_are_handed_out(group, size):
    """`synk.prefetch` launches nothing, and has so many more ready when it gives one."""
    asked, got = [], []
    for batch in synk.prefetch(counted([np.ones(8)] * 6, lambda: len(got), asked), size):
        got.append(batch)
    assert asked == [max(0, i - size) for i in range(6)]


@of_every_size
def test_no_code_of_the_user_runs_on_another_thread(group, size):
    """Neither what gives items nor `transform`."""
    seen = set()

    def here(value):
        seen.add(threading.get_ident())
        return value

    ones = np.ones(4, np.float32)
    list(total.iterate(ones, batches=map(here, [[0]] * 5), prefetch=size))
    list(scaled.iterate(ones, synk.each(map(here, np.ones((5, 1)))), batches=[[0]] * 5, prefetch=size))
    list(total.stream(map(here, [ones] * 5), prefetch=size))
    list(synk.prefetch([ones] * 5, size, transform=here))
    total.over(source=map(here, [ones] * 5), prefetch=size)
    assert seen == {threading.get_ident()}


@of_every_size
@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3), None])
def test_an_error_comes_when_the_loop_comes_to_its_item(group, size, error):
    """After the results of all items before it; the source is not asked again."""

    class Source:
        asked = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.asked += 1
            if self.asked > 3:
                raise error or StopIteration
            return np.full(2, self.asked, np.float32)

    for make in (lambda source: total.stream(source, prefetch=size), lambda source: synk.prefetch(source, size)):
        source = Source()
        results = make(source)
        assert [float(jnp.sum(next(results))) for _ in range(3)] == [2, 4, 6]
        with pytest.raises(type(error) if error else StopIteration):
            next(results)
        assert list(results) == [] and source.asked == 4


@of_every_size
def test_leaving_drops_the_items_taken_early(group, size):
    """Another loop over the same iterator goes on behind them; with `islice` none is taken that is not used."""
    for leave in (lambda loop: loop.close(), lambda loop: None):
        source = (np.full(2, number, np.float32) for number in itertools.count())
        loop = total.stream(source, prefetch=size)
        assert next(loop) == 0
        leave(loop)
        assert float(next(total.stream(source, prefetch=size))) == 2 * (1 + size)
    source, got = (np.full(2, number, np.float32) for number in itertools.count()), []
    for _ in range(3):
        got += [float(value) / 2 for value in total.stream(itertools.islice(source, 3), prefetch=size)]
    assert got == list(range(9))


@pytest.mark.smoke
@of_every_size
def test_ctrl_c_in_the_source_ends_the_loop(group, size):
    """At once: a loop that went on would miss an item."""

    class Source:
        numbers = itertools.count()

        def __iter__(self):
            return self

        def __next__(self):
            number = next(self.numbers)
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            return np.full(2, number, np.float32)

    results, got = total.stream(Source(), prefetch=size), []
    with pytest.raises(KeyboardInterrupt):
        for value in results:
            got.append(float(value))
    assert got == [0, 2, 4][: max(0, 3 - size) if size else 3] and list(results) == []


@of_every_size
def test_a_source_reads_variables_of_so_many_items_before(group, size):
    """It sees what the calls launched so far have written, by `value` and by calls of its own."""
    w = synk.shared(np.float32(0), name="w")
    read = synk.function(lambda: w.value, reduce="max", name="read")

    @synk.function
    def step(x):
        return jnp.sum(x)

    @step.then
    def step(sum):
        w.value += 1
        return sum

    def source():
        for number in range(6):
            seen = float(w.value if number % 2 else read())
            yield np.full(1, seen, np.float32)

    want = [calls_before(i, size) for i in range(6)]
    assert [float(value) for value in step.stream(source(), prefetch=size)] == want
    assert float(w.value) == 6


@of_every_size
def test_a_source_that_sets_a_variable(group, size):
    """A call sees what the source has set for the last item that it was asked for."""
    w = synk.shared(np.float32(0), name="w")
    add = synk.function(lambda x: jnp.sum(x) + w.value, reduce="max", name="add")

    def source():
        for number in range(6):
            w.value = np.float32(number)
            yield np.zeros(1, np.float32)

    assert [float(value) for value in add.stream(source(), prefetch=size)] == [
        0,
        *(min(i + max(size - 1, 0), 5) for i in range(1, 6)),
    ]


def test_a_loop_within_a_source(group):
    """Each has its own items."""

    def outer(size):
        for value in total.stream((np.full(2, i, np.float32) for i in range(5)), prefetch=size):
            yield np.full(2, float(value), np.float32)

    for size in (0, 2):
        assert [float(value) for value in total.stream(outer(size), prefetch=size)] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("place", PLACES)
def test_batches_that_load_their_data(group, place):
    """Chunks of a dataset larger than memory: each batch has the rows of its chunk."""
    data = synk.data(np.zeros(4, np.float32), place=place, name="rows")

    def chunks():
        for number, rows in [(1, 4), (2, 2), (3, 5)]:
            data.set_value(np.full(rows, number, np.float32))
            yield range(rows)
            yield [0, 1]
        data.set_value(np.zeros(2, np.float32))

    for size in (0, 1, 3, 9):
        assert [float(y) for y in total.iterate(data, batches=chunks(), prefetch=size)] == [4, 2, 4, 4, 15, 6]
        assert float(total.over(data, batches=chunks(), prefetch=size)) == 35
        lists = total.iterate(data, batches=chunks(), prefetch=size, per_launch=4)
        assert [[float(y) for y in results] for results in lists] == [[4, 2, 4, 4], [15, 6]]


def test_data_that_the_source_and_the_loop_write(group):
    """Where both write, the rows that an item should see exist nowhere, so it raises at its turn."""
    data = synk.data(np.zeros(4, np.float32))

    def batches():
        for number in range(6):
            data[0] = number
            yield [0, 1]

    for size in (0, 2):
        data[:] = 0
        got, results = [], total.iterate(data, batches=batches(), prefetch=size)
        with (
            pytest.raises(synk.SynkError, match=r"total: both .* have written to data_.*prefetch=0")
            if size
            else nothing()
        ):
            for value in results:
                got.append(float(value))
                data[1] = len(got)
        assert got == ([0] if size else [0, 2, 4, 6, 8, 10])


@pytest.mark.parametrize("place", PLACES)
def test_a_source_that_gives_the_same_data(group, place):
    """As an item of a stream, scattered or broadcast, and as a value of `synk.each`."""
    data = synk.data(np.zeros(3, np.float32), place=place)

    def fills(item):
        for number in range(5):
            data[:] = number
            yield item(data)

    ones = np.ones(3, np.float32)
    makes = [lambda size: total.stream(fills(lambda d: d), prefetch=size)]
    if place != "scatter":
        values = lambda: synk.each(fills(lambda d: d))  # noqa: E731
        makes.append(lambda size: scaled.stream(fills(lambda d: (ones, d)), prefetch=size))
        makes.append(lambda size: scaled.iterate(ones, values(), batches=[None] * 5, prefetch=size))
    for make in makes:
        for size in (0, 1, 2, 3):
            assert [float(y) for y in make(size)] == [3 * number for number in range(5)]


@pytest.mark.smoke
def test_a_source_that_donates(group):
    """Its arrays of JAX's are its own: it may give their memory to the next one."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def source(x):
        for _ in range(5):
            yield x
            x = add(x)

    def placed():
        return jax.device_put(jnp.zeros(2 * group.size), group.stacked)

    ones = np.ones(4, np.float32)
    for make in (placed, lambda: jnp.zeros(2 * group.size), lambda: jnp.zeros(2 * group.size + 1)):
        rows = make().size
        assert [float(y) for y in total.stream(source(make()))] == [rows * number for number in range(5)]
        got = [float(total(x)) for x in synk.prefetch(source(make()))]
        assert got == [rows * number for number in range(5)]
    assert [float(y) for y in scaled.stream((ones, by) for by in source(jnp.zeros(1)))] == [0, 4, 8, 12, 16]
    each = synk.each(source(jnp.zeros(1)))
    assert [float(y) for y in scaled.iterate(ones, each, batches=[[0, 1]] * 5)] == [0, 2, 4, 6, 8]


def test_a_source_that_enters_another_group(group):
    """The calls of the loop stay in its own."""
    with synk.simulate(5) as other:
        pass

    def source():
        for number in range(5):
            with other:
                size = float(total(np.ones(synk.size(), np.float32)))
            yield np.full(2, number + size, np.float32)

    for size in (0, 3):
        assert [float(value) for value in total.stream(source(), prefetch=size)] == [10 + 2 * i for i in range(5)]
    assert synk.size() == group.size


@of_every_size
def test_a_source_that_asks_local_steps(four, size):
    """How many there were, and for an average: each step is counted once."""
    x = np.arange(48, dtype=np.float32).reshape(24, 2) / 48
    steps = synk.contrib.local_steps(
        lambda p, x: jnp.mean((x @ p - 1) ** 2), np.zeros(2, np.float32), optax.sgd(0.5), every=3
    )
    seen = []

    def source():
        for number in range(9):
            seen.append(steps.steps)
            if number == 4:
                steps.finish()
            yield (x,)

    assert len(list(steps.stream(source(), prefetch=size))) == 9
    assert seen == [calls_before(i, size) for i in range(9)]
    assert steps.steps == 9
    float(steps.params.value[0])


@pytest.mark.parametrize("place", ["host", "broadcast"])
@pytest.mark.parametrize("options", [{}, {"per_launch": 3}, {"per_launch": 6, "prefetch": 0}])
def test_a_source_that_writes_broadcast_data(group, place, options):
    """Each call of a list has the data that its item had."""
    by = synk.data(np.zeros(1, np.float32), place=place)

    def numbers():
        for number in range(1, 7):
            by[:] = number
            yield number

    def flat(results):
        return [float(y) for y in jax.tree.leaves([*results])]

    rows = np.ones(12, np.float32)
    batches = (slice(2 * i - 2, 2 * i) for i in numbers())
    assert flat(scaled.iterate(rows, by, batches=batches, **options)) == [2, 4, 6, 8, 10, 12]
    assert flat(scaled.stream(((rows[:2], by) for _ in numbers()), **options)) == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_lengths_that_change_while_the_loop_writes_other_data(group, place, size):
    rows = synk.data(np.ones(8, np.float32), place=place)
    by = synk.data(np.ones(1, np.float32), place="broadcast")

    def chunks():
        for count in (8, 8, 6, 4):
            rows.set_value(np.ones(count, np.float32))
            yield slice(None)

    got = []
    for value in scaled.iterate(rows, by, batches=chunks(), prefetch=size):
        got.append(float(value))
        by[:] = 10.0 ** len(got)
    assert got == [8, 80, 600, 4000]


def test_a_list_that_writes_when_it_is_asked(group):
    """A class of the user's may do anything when it is asked for its next item."""
    data = synk.data(np.zeros(4, np.float32))

    class Chunks(list):
        def __iter__(self):
            for number in super().__iter__():
                data[:] = number
                yield slice(0, 4)

    class Loader:
        iterable = (1, 2, 3)

        def __iter__(self):
            return iter(Chunks(self.iterable))

    for source in (Chunks([1, 2, 3]), Loader()):
        assert [float(value) for value in total.iterate(data, batches=source)] == [4, 8, 12]
        assert [float(value) for value in next(total.iterate(data, batches=source, per_launch=3))] == [4, 8, 12]
        assert float(total.over(data, batches=source)) == 24
