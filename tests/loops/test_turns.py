"""Turns: what loaders do to data and variables of a loop comes when the loop has come so far, however far they work ahead."""

import contextlib
import gc
import itertools
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import slow_but

pytestmark = pytest.mark.smoke
PLACES = ["host", "scatter", "broadcast"]
total = synk.function(jnp.sum, name="total")
scaled = synk.function(lambda x, by: by[0] * jnp.sum(x), inputs=["x"], name="scaled")


def slowly(make):
    """Calls that end after the thread has had the time to work ahead."""

    def each(*args, **kwargs):
        for value in make(*args, **kwargs):
            time.sleep(0.005)
            yield float(value)

    return lambda *args, **kwargs: list(each(*args, **kwargs))


@pytest.mark.parametrize("place", slow_but(["host"], PLACES))
def test_a_source_of_batches_that_loads_data(group, place):
    """Chunks of a dataset larger than memory: a batch has the rows that were there when it was made."""
    data = synk.data(np.zeros(4, np.float32), place=place)

    def chunks():
        for number, rows in [(1, 4), (2, 2), (3, 5)]:
            data.set_value(np.full(rows, number, np.float32))
            yield range(rows)
            yield [0, 1]

    for size in (0, 2, 5):
        assert slowly(total.iterate)(data, batches=chunks(), prefetch=size) == [4, 2, 4, 4, 15, 6]
        assert float(total.over(data, batches=chunks(), prefetch=size)) == 35

    def writes():
        for number in range(6):
            data[0] = number
            yield [0]

    assert slowly(total.iterate)(data, batches=writes()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", PLACES)
def test_a_loader_that_gives_the_same_data(group, place):
    """As an item of a stream, scattered or broadcast, and as a value of `synk.each`."""
    data = synk.data(np.zeros(3, np.float32), place=place)

    def fills(item):
        for number in range(5):
            data[:] = number
            yield item(data)

    ones = np.ones(4, np.float32)
    assert slowly(total.stream)(fills(lambda d: d)) == [0, 3, 6, 9, 12]
    if place != "scatter":
        assert slowly(scaled.stream)(fills(lambda d: (ones, d))) == [0, 4, 8, 12, 16]
        assert slowly(scaled.iterate)(ones, synk.each(fills(lambda d: d)), batches=[[0, 1]] * 5) == [0, 2, 4, 6, 8]


def test_a_loader_around_variables(group):
    """Those that it sets, those that the loop sets, and calls of functions that do either."""
    w = synk.shared(np.float32(0), name="w")

    @synk.function
    def step(x):
        return jnp.sum(x) * (w.value + 1)

    @step.then
    def grow(sum):
        w.value += 1
        return sum

    def reads():
        for _ in range(5):
            yield np.full(2, float(w.value), np.float32)

    def sets():
        for number in range(5):
            w.value = np.float32(10 * number)
            yield np.ones(2, np.float32)

    def calls():
        for number in range(4):
            yield np.full(2, float(step(np.ones(2, np.float32))) + number, np.float32)

    for loader in (reads, sets, calls):
        got = []
        for size in (0, 1, 3):
            w.value = np.float32(0)
            got.append(slowly(step.stream)(loader(), prefetch=size))
            w.value = np.float32(0)
            got.append([float(total(x)) * 0 + float(step(x)) for x in synk.prefetch(loader(), size)])
        assert all(each == got[0] for each in got), loader.__name__


def test_a_loop_within_a_loader(group):
    """Whose own loader takes its turn in both."""
    w = synk.shared(np.float32(0), name="w")

    @synk.function
    def step(x):
        return jnp.sum(x) + 100 * w.value

    def inner():
        for number in range(4):
            w.value = np.float32(number)
            yield np.full(2, number, np.float32)

    def outer(size):
        for sum in total.stream(inner(), prefetch=size):
            yield np.full(2, float(sum) + float(w.value), np.float32)

    assert slowly(step.stream)(outer(2)) == [float(step_) for step_ in step.stream(outer(0), prefetch=0)]
    assert float(w.value) == 3


def test_a_loop_that_is_left(group):
    """Nothing is written for what it never came to; its source says why it gives no more."""
    data = synk.data(np.zeros(3, np.float32))

    def fills():
        for number in range(50):
            data[:] = number
            yield np.ones(2, np.float32)

    def threads():
        return [each for each in threading.enumerate() if each.name == "synk-prefetch"]

    for leave in (lambda loop: loop.close(), lambda loop: None):
        source = fills()
        loop = total.stream(source)
        assert next(loop) == next(loop) == 2
        time.sleep(0.02)
        leave(loop)
        del loop
        gc.collect()
        for _ in range(1000):
            if not threads():
                break
            time.sleep(0.01)
        assert not threads()
        assert data[0] == 1
        for size in (0, 2):
            with pytest.raises(synk.SynkError, match=r"what gives the items ends here\. Make it anew"):
                next(total.stream(source, prefetch=size))


def test_one_generator_for_several_loops(group):
    """The thread of the last loop may be in it still; with `islice` nothing is taken that the loop does not use."""

    def slow_source():
        for number in itertools.count():
            time.sleep(0.03)
            yield np.full(2, number, np.float32)

    source = slow_source()
    for _ in range(2):
        assert len([value for _, value in zip(range(3), total.stream(source), strict=False)]) == 3
    source, got = slow_source(), []
    for _ in range(3):
        got += [float(value) / 2 for value in total.stream(itertools.islice(source, 3))]
    assert got == list(range(9))


def test_one_iterator_that_is_no_generator_for_several_loops(group):
    """Pairs stay pairs where a loop is left in the middle of one, and another goes on."""

    class Records:
        def __init__(self, seconds):
            self.numbers, self.seconds = itertools.count(), seconds

        def __iter__(self):
            return self

        def __next__(self):
            number = next(self.numbers)
            time.sleep(self.seconds)
            return np.full(2, number, np.float32)

    pairs = zip(Records(0.05), Records(0.0), strict=True)
    both = synk.function(lambda x, y: (x[:1], y[:1]), reduce="concat")
    found = []
    for _ in range(3):
        for x, y in both.stream(pairs):
            found.append((float(x[0]), float(y[0])))
            if len(found) % 2 == 0:
                break
    assert found == [(x, x) for x in sorted(x for x, _ in found)] and len(set(found)) == 6


@pytest.mark.parametrize(
    "make", [lambda items: (x for x in items), lambda items: map(np.copy, items)], ids=["yield", "map"]
)
def test_two_loops_at_once_over_one_iterator(group, make):
    """What the first has taken ahead would be missing from the second; nothing is, where none works ahead."""
    rows = [np.full(2, number, np.float32) for number in range(8)]
    source = make(rows)
    first = total.stream(source)
    assert next(first) == 0
    for size in (0, 2):
        with pytest.raises(synk.SynkError, match="Another loop over this iterator has not ended"):
            next(total.stream(source, prefetch=size))
    assert [float(value) for value in first] == [2, 4, 6, 8, 10, 12, 14]
    assert list(total.stream(source)) == []
    source = make(rows)
    both = zip(total.stream(source, prefetch=0), total.stream(source, prefetch=0), strict=True)
    assert [(float(a), float(b)) for a, b in both] == [(0, 2), (4, 6), (8, 10), (12, 14)]
    source = make(rows)
    with total.stream(source) as first:
        next(first)
    assert len(list(total.stream(source))) >= 4


def test_a_loader_that_donates(group):
    """Its arrays of JAX's are its own: it may give their memory to the next one."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def loader(x):
        for _ in range(5):
            yield x
            x = add(x)

    def placed():
        return jax.device_put(jnp.zeros(2 * group.size), group.stacked)

    ones = np.ones(4, np.float32)
    for make in (placed, lambda: jnp.zeros(2 * group.size), lambda: jnp.zeros(2 * group.size + 1)):
        rows = make().size
        assert slowly(total.stream)(loader(make())) == [rows * number for number in range(5)]
        got = [float(total(x)) for x in synk.prefetch(loader(make()))]
        assert got == [rows * number for number in range(5)]
    assert slowly(scaled.stream)((ones, by) for by in loader(jnp.zeros(1))) == [0, 4, 8, 12, 16]
    each = synk.each(loader(jnp.zeros(1)))
    assert slowly(scaled.iterate)(ones, each, batches=[[0, 1]] * 5) == [0, 2, 4, 6, 8]


def test_one_loop_of_several_threads():
    """One of them starts the thread that works ahead, however they meet."""
    interval = sys.getswitchinterval()
    with synk.simulate(2), contextlib.ExitStack() as undo:
        undo.callback(sys.setswitchinterval, interval)
        sys.setswitchinterval(1e-6)
        x = np.arange(7.0, dtype=np.float32)
        for _ in range(20):
            loop, got, together = total.iterate(x, batches=[[i % 7] for i in range(8)]), [], threading.Barrier(4)

            def work(loop=loop, got=got, together=together):
                together.wait()
                got.extend(float(value) for value in loop)

            threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert sorted(got) == [0, 0, 1, 2, 3, 4, 5, 6]


def test_a_loader_that_reads_what_the_loop_writes(group):
    """A replay buffer, and how many rows a variable holds."""
    data, held = synk.data(np.zeros(4, np.float32), name="data"), synk.shared(np.zeros(2, np.float32))

    def batches():
        for _ in range(5):
            yield np.concatenate([data[:2], np.asarray(data)[2:], [len(synk.get_lengths(held))]]).astype(np.float32)

    def lengths():
        for _ in range(5):
            yield np.array(synk.get_lengths(held), np.float32)
            yield np.array(synk.get_shapes(held), np.float32)

    def seen(source, size, then):
        found = []
        for value in total.stream(source, prefetch=size):
            time.sleep(0.005)
            found.append(float(value))
            then(len(found))
        return found

    for size in (0, 3):
        data[:] = 0
        wrote = seen(batches(), size, lambda number: data.__setitem__(slice(None), number))
        assert wrote == [group.size + 4 * number for number in range(5)]
        synk.scatter(held, np.zeros(group.size, np.float32))
        scattered = seen(lengths(), size, lambda n: synk.scatter(held, np.zeros(group.size * (n + 1), np.float32)))
        assert scattered == [group.size * number for number in range(1, 11)]


def test_a_loader_that_enters_another_group(group):
    """The loop's own calls stay in its own."""
    with synk.simulate(5) as other:
        pass
    state = synk.shared(np.float32(0), name="state")

    @synk.function
    def count(x):
        return jnp.sum(x) + state.value

    @count.then
    def count(value):
        state.value = state.value + 1
        return value + synk.size()

    def loader():
        for number in range(5):
            with other:
                size = float(synk.function(lambda x: jnp.sum(x))(np.ones(synk.size(), np.float32)))
            time.sleep(0.002)
            yield np.full(2, number + size, np.float32)

    def counted(size):
        state.value = np.float32(0)
        return slowly(count.stream)(loader(), prefetch=size)

    assert counted(3) == counted(0)
    assert synk.size() == group.size


def test_a_loader_that_asks_local_steps(four):
    """How many there were, and for an average."""
    x = np.arange(48, dtype=np.float32).reshape(24, 2) / 48

    def trained(size):
        steps = synk.train.local_steps(
            lambda p, x, rate: rate * jnp.mean((x @ p - 1) ** 2), np.zeros(2, np.float32), optax.sgd(0.5), every=3,
            inputs=["x"],
        )  # fmt: skip
        seen = []

        def loader():
            for number in range(9):
                seen.append(steps.steps)
                if number == 4:
                    steps.finish()
                yield x, np.float32(1 / (1 + steps.steps))

        losses = slowly(steps.stream)(loader(), prefetch=size)
        return seen, losses, np.asarray(steps.params.value).tolist()

    assert trained(0)[0] == list(range(9))
    assert trained(3) == trained(0)


def test_a_loader_that_ends_the_program(four):
    """By sys.exit, which the main thread's own hook hears of."""
    codes = []

    def noted(status=None, exit_=sys.exit):
        codes.append((status, threading.current_thread() is threading.main_thread()))
        exit_(status)

    def loader():
        yield np.ones(3, np.float32)
        raise SystemExit(3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "exit", noted)
        with pytest.raises(SystemExit) as caught:
            list(total.stream(loader()))
    assert caught.value.code == 3 and codes == [(3, True)]
