"""Data: whatever its place, a call sees the rows that NumPy picks, and devices follow what is written."""

import copy
import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synk
from synk._data.dataset import resident
from synk._runtime.dispatch import LOCK, drain

from ..helpers import assert_same, calls, chosen, few, group_of, mapped, members, numbers, slow

PLACES = ("host", "scatter", "broadcast")
X = numbers(11)

in_every_place = pytest.mark.parametrize("place", PLACES)
rows = synk.function(lambda x: x, reduce="concat", name="rows")
pairs = synk.function(lambda x, y: (x, y), reduce="concat", name="pairs")


@pytest.fixture(autouse=True)
def unchanged():
    """No call writes to what it is given."""
    before = X.copy()
    yield
    assert_same(X, before)


# Which rows.


@pytest.mark.parametrize(("kind", "n"), [("devices", 2), slow("simulated", 3), slow("devices", 8)])
@given(data=st.data())
@few(5)
@pytest.mark.slow
def test_rows_are_numpys(kind, n, data):
    """For any rows, batch and slices, in any two places together, and serially."""
    count, batch, slices = data.draw(calls(n))
    one, other = data.draw(st.sampled_from(PLACES)), data.draw(st.sampled_from(PLACES))
    x, y = numbers(count), numbers(count, 1, seed=1)[:, 0]
    with group_of(kind, n):
        args = synk.data(mapped(x), place=one), synk.data(y, place=other)
        got, serial = pairs(*args, batch=batch, num_slices=slices), pairs.serial(*args, batch=batch)
    want = chosen(x, batch), chosen(y, batch)
    assert_same(got, want)
    assert_same(serial, want)


BATCHES = {
    "all": None,
    "first": 5,
    "first as NumPy's": np.int16(5),
    "first as an array": np.array(5),
    "slice": slice(3, 8),
    "slice beyond": slice(6, 99),
    "slice from the end": slice(-5, None),
    "backwards": slice(None, None, -1),
    "every second back": slice(8, None, -2),
    "mask": X[:, 0] > 0,
    "mask as a list": (X[:, 1] > 0).tolist(),
    "indexes": np.array([7, 0, 0, 10, 3]),
    "negative": np.array([-1, 4, -11, 4, -2]),
    "list": [2, 9, 9, -3, 0],
    "consecutive": np.arange(4, 9),
    "one": [10],
    "uint8": np.array([10, 1, 7, 1, 2], np.uint8),
    "int8": np.array([-11, 1, -7, 1, 2], np.int8),
    "big-endian": np.array([10, 1, 7, 1, 2], ">i8"),
    "uint64": np.array([10, 1, 7, 1, 2], np.uint64),
    "more than there are": np.arange(33) % 11,
}


@in_every_place
@pytest.mark.parametrize("form", BATCHES)
def test_forms_of_batch(four, place, form):
    """Every form that a batch takes."""
    batch = BATCHES[form]
    is_count = isinstance(batch, int | np.integer | np.ndarray) and np.ndim(batch) == 0
    assert_same(rows(synk.data(X, place=place), batch=batch), X[:batch] if is_count else chosen(X, batch))


@in_every_place
def test_indexes_of_jax(four, place):
    """Indexes and numbers that come from a computation."""
    data = synk.data(X, place=place)
    assert_same(rows(data, batch=jnp.array([7, 0, -1, 10, 3])), X[[7, 0, -1, 10, 3]])
    assert_same(rows(data, batch=jnp.argmax(jnp.arange(6))), X[:5])


@in_every_place
def test_small_integer_types_index_many_rows(four, place):
    """Neither uint8 nor int8 overflows on the way."""
    data, x = synk.data(numbers(300), place=place), numbers(300)
    assert_same(rows(data, batch=np.array([255, 0, 200, 128], np.uint8)), x[[255, 0, 200, 128]])
    assert_same(rows(data, batch=np.array([-128, 127, -1, 0], np.int8)), x[[-128, 127, -1, 0]])


everything = synk.function(lambda *xs: jnp.stack(xs, 1), reduce="concat", name="everything")


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("batch", [None, slice(9, 1, -1), [3, 3, -1, 0, 5]], ids=str)
def test_places_mix(four, batch, slices):
    """NumPy's, jax's and data in each place go together in one call, each row with its own."""
    xs = [numbers(11, seed=i) for i in range(5)]
    given = [xs[0], jnp.asarray(xs[1]), *(synk.data(x, place=place) for x, place in zip(xs[2:], PLACES, strict=True))]
    assert_same(everything(*given, batch=batch, num_slices=slices), np.stack([chosen(x, batch) for x in xs], 1))


@in_every_place
@pytest.mark.parametrize("batch", [slice(4), [8, 1, -1, 1, 0]], ids=str)
def test_minibatch_rows_go_with_those_selected(four, place, batch):
    """Row j of minibatch data meets the j-th row picked, of host and of resident data."""
    want = X[batch], numbers(len(X[batch]), seed=5)
    noise = synk.data(want[1], place=place, minibatch=True)
    for other in PLACES:
        assert_same(pairs(synk.data(X, place=other), noise, batch=batch), want)
    assert_same(pairs.serial(X, noise, batch=batch), want)


@in_every_place
def test_data_as_a_broadcast_argument(four, place):
    """Every replica sees all rows."""
    f = synk.function(lambda x, w: x + w[3:4], ["x"], reduce="concat")
    w = synk.data(X, place=place)
    assert_same((f(X, w), f.serial(X, w)), (X + X[3], X + X[3]))


@in_every_place
def test_under_jit(four, place):
    """A traced call picks rows of data likewise, by a batch that is known or not."""
    data = synk.data(X, place=place)
    index = np.array([7, 0, 10, 3])
    assert_same(jax.jit(lambda: rows(data, batch=index))(), X[index])
    assert_same(jax.jit(lambda index: rows(data, batch=index))(index), X[index])


# On each replica.

# Replicas hold rows 0 to 2, 3 to 5, 6 to 8, 9 and 10: what each picks of its own, and which these are of all.
BATCHES_S = {
    "first": (2, [0, 1, 3, 4, 6, 7, 9, 10]),
    "slice": (slice(1, 9), [1, 2, 4, 5, 7, 8, 10]),
    "backwards": (slice(None, None, -1), [2, 1, 0, 5, 4, 3, 8, 7, 6, 10, 9]),
    "indexes": (np.array([1, 0, 1], np.uint8), [1, 0, 1, 4, 3, 4, 7, 6, 7, 10, 9, 10]),
    "negative": ([-1, 0], [2, 0, 5, 3, 8, 6, 10, 9]),
    "slices": ([slice(0, 1), slice(1, 3), slice(0, 0), slice(None)], [0, 4, 5, 9, 10]),
    "lists": ([[2, 0], [1], [], [0, 1, 1, 0]], [2, 0, 4, 9, 10, 10, 9]),
    "arrays": ([np.array([2, -1]), np.array([0]), np.array([1]), np.array([1])], [2, 2, 3, 7, 10]),
    "of every kind": ([slice(0, 2), [0], np.array([2]), np.array([False, True])], [0, 1, 3, 8, 10]),
    "one each as an array": (np.array([[2], [1], [-1], [0]]), [2, 4, 8, 9]),
}

in_every_form = pytest.mark.parametrize("form", BATCHES_S)


@pytest.mark.parametrize(
    ("kind", "slices", "form"), [slow("devices", 1, "indexes"), *[("simulated", 2, form) for form in BATCHES_S]]
)
def test_batch_s_of_scattered_data(kind, slices, form):
    """Each replica picks of its own rows; host and minibatch rows go with what all pick; serial does the same."""
    batch_s, index = BATCHES_S[form]
    x, more = synk.data(X, place="scatter"), synk.data(numbers(len(index), seed=4), minibatch=True)
    want = X[index], numbers(len(index), seed=4)
    with group_of(kind, 4):
        assert_same(pairs(x, more, batch_s=batch_s, num_slices=slices), want)
        assert_same(pairs(x, want[1], batch_s=batch_s, num_slices=slices), want)
        assert_same(pairs.serial(x, more, batch_s=batch_s), want)


@pytest.mark.parametrize("form", ["first", "negative", "slices", "lists", "arrays"])
def test_batch_s_of_variables(four, form):
    """Rows that a variable holds are picked likewise, alone and together with data."""
    batch_s, index = BATCHES_S[form]
    w, x = synk.shared(X[:1], name="w"), synk.data(numbers(11, seed=3), place="scatter")
    alone, both = (
        synk.function(lambda: w.value, reduce="concat"),
        synk.function(lambda x: (x, w.value), reduce="concat"),
    )
    want = numbers(11, seed=3)[index], X[index]
    synk.scatter(w, X)
    assert_same((alone(batch_s=batch_s), alone.serial(batch_s=batch_s)), (X[index], X[index]))
    assert_same((both(x, batch_s=batch_s), both.serial(x, batch_s=batch_s)), (want, want))


def test_check_with_batch_s(four):
    """The law is checked over the very rows that replicas pick, and a wrong op is found there."""
    batch_s, _ = BATCHES_S["lists"]
    w, x = synk.shared(X[:1], name="w"), synk.data(X, place="scatter")
    synk.scatter(w, X)
    synk.function(lambda x: (x * w.value).mean(0), reduce="mean").check(x, batch_s=batch_s)
    with pytest.raises(synk.LawError, match="mean"):
        synk.function(lambda x: x.mean(0), reduce="sum").check(x, batch_s=batch_s, num_slices=2)


def test_batch_and_batch_s(four):
    """`batch_s` picks on the replicas and `batch` of the rest, as many rows."""
    x, y = synk.data(X, place="scatter"), numbers(20, seed=2)
    for other in (y, synk.data(y), synk.data(y, place="broadcast")):
        got = pairs(x, other, batch_s=[-1, 0], batch=slice(19, 3, -2))
        assert_same(got, (X[[2, 0, 5, 3, 8, 6, 10, 9]], y[19:3:-2]))


# What is written.

WRITES = {
    "a row": 4,
    "from the end": -1,
    "a slice": slice(2, 6),
    "a slice backwards": slice(9, None, -4),
    "nothing": slice(3, 3),
    "all": ...,
    "a mask": X[:, 0] > 0,
    "a mask of elements": X > 0,
    "indexes": [0, -1, 5],
    "a column": (slice(None), 1),
    "an element": (7, 0),
    "elements": ([1, 8], [0, 1]),
    "a new axis": (None, 3),
}


@in_every_place
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_seen(four, place, write):
    """By the next call, in the array given, and not in results of earlier calls."""
    x, want = X.copy(), X.copy()
    data = synk.data(x, place=place)
    before = rows(data)
    data[WRITES[write]] = want[WRITES[write]] = 100
    assert_same((rows(data), rows.serial(data), before, x), (want, want, X, want))
    data[0], want[0] = 5, 5
    data[10], want[10] = 6, 6
    assert_same((rows(data), rows(data, batch=[10, 0, 3, 7, 5])), (want, want[[10, 0, 3, 7, 5]]))


# Each gives two ways to hold rows of one memory, and the array that both see.
SHARED = {
    "one array": lambda x: (x, x),
    "views": lambda x: (x[:], x[2:]),
    "backwards": lambda x: (x, x[::-1]),
    "columns that overlap": lambda x: (x[:, :1], x),
    "one mapped file": lambda x: ((file := mapped(x)), file[1:]),
    "by position": lambda x: ((file := File(x)), file),
    "a data": lambda x: ((data := synk.data(x)), data),
}


class File:
    """Rows that are read and written by position, as h5py's are."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __getitem__(self, index):
        return self.x[index]

    def __setitem__(self, index, rows):
        self.x[index] = rows


@pytest.mark.parametrize(
    ("kind", "n", "held"),
    [
        *[("devices", 3, held) for held in SHARED],
        slow("devices", 1, "views"),
        slow("simulated", 3, "columns that overlap"),
    ],
)
@in_every_place
def test_a_write_is_seen_by_all_that_hold_the_rows(kind, n, held, place):
    """Whoever of them writes, and also by copies, which Python makes without asking."""
    one, other = (synk.data(x, place=place) for x in SHARED[held](X.copy()))
    every = [one, other, copy.copy(one), copy.copy(other)]
    with group_of(kind, n):
        for turn, writer in enumerate([every[0], *every]):
            writer[3], writer[7:9] = turn, -turn
            for data in every:
                assert_same((rows(data), rows(data, batch=[0, -1, 3, 5, 4])), (data[:], data[[0, -1, 3, 5, 4]]))


@pytest.mark.parametrize("place", ["scatter", "broadcast"])
def test_a_write_beside_the_rows_moves_nothing(four, place):
    """Other columns of one array, other rows, and a deep copy stay where they are."""
    x = X.copy()
    writer = synk.data(x[:4, :1])
    others = [synk.data(x[:, 1:], place=place), synk.data(x[4:], place=place)]
    others.append(copy.deepcopy(others[0]))
    before = [resident(data, four) for data in others]
    writer[2] = 7
    assert all(resident(data, four) is array for data, array in zip(others, before, strict=True))
    assert x[2, 0] == 7 and others[2][2] == X[2, 1]
    others[2][2], others[0][3] = 8, 9
    assert_same((rows(others[2]), rows(others[0])), (others[2][:], x[:, 1:]))


@in_every_place
def test_a_loop_sees_writes_by_another_data(four, place):
    """Between two of its batches, as it sees those by its own data."""
    x = X.copy()
    data, writer = synk.data(x, place=place), synk.data(x)
    batches = [[0, 1, 2], [3, 4], [5, 6, 7, 8]]
    for batch, got in zip(batches, rows.iterate(data, batches=batches, prefetch=0), strict=True):
        assert_same(got, x[batch])
        writer[:] = x + 1


def test_threads_that_make_and_write_data(four):
    """Data is made and dropped while another thread writes: no write is lost, and none fails."""
    x, ends = np.zeros((64, 2), np.float32), threading.Event()

    def make():
        while not ends.is_set():
            synk.data(x), copy.copy(synk.data(x[1:]))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        data, writer = synk.data(x, place="broadcast"), synk.data(x)
        for turn in range(60):
            writer[turn] = turn
            assert_same(rows(data), x)
    finally:
        ends.set()


def test_threads_that_begin_loops_while_data_is_written(four):
    """No write fails."""
    data, ends, interval, loops = synk.data(np.zeros(8)), threading.Event(), sys.getswitchinterval(), []

    def begin():
        while not ends.is_set():
            loops.append(rows.iterate(data, batches=[4]))

    thread = threading.Thread(target=begin)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        while len(loops) < 200:
            data[0] = len(loops)
    finally:
        sys.setswitchinterval(interval)
        ends.set()
        thread.join()
        for loop in loops:
            loop.close()


def test_what_profiles_call_a_program_of_synks_own(monkeypatch):
    """A range that begins with `synk.`."""
    ranges, annotation = [], jax.profiler.TraceAnnotation
    monkeypatch.setattr(
        "synk._runtime.executable.TraceAnnotation", lambda name: ranges.append(name) or annotation(name)
    )
    data = synk.data(numbers(100), place="broadcast")
    with group_of("devices", 1):
        rows(data)
        data.array.block_until_ready()
    assert ranges == ["rows", "synk.executable.copy"]


@pytest.mark.parametrize("place", ["scatter", "broadcast"])
def test_nothing_moves_twice(four, place):
    """What is on the devices stays there until it is written."""
    data = synk.data(X.copy(), place=place)
    rows(data), rows(data, batch=[1, 2])
    before = resident(data, four)
    rows(data, batch=[3]), rows.serial(data), data.to(place), data.set_length(11), len(data), data[3], np.asarray(data)
    assert resident(data, four) is before
    data[3] = 0
    assert resident(data, four) is not before


@in_every_place
def test_a_write_that_fails_changes_nothing(four, place):
    """NumPy's error arrives, and the rows are as they were."""
    data = synk.data(X.copy(), place=place)
    rows(data)
    with pytest.raises(ValueError, match="broadcast"):
        data[2] = np.zeros(7)
    with pytest.raises(IndexError, match="out of bounds"):
        data[11] = 0
    assert_same(rows(data), X)


READ_ONLY = {
    "a NumPy array": lambda path: np.broadcast_to(X[:1], X.shape),
    "an array of jax's": lambda path: jnp.asarray(X),
    "a file": lambda path: np.load(path, mmap_mode="r"),
}


@pytest.mark.parametrize("kind", READ_ONLY)
def test_read_only_arrays(four, kind, tmp_path):
    """They are read in every place; a write raises and says what to do."""
    np.save(tmp_path / "x.npy", X)
    x = READ_ONLY[kind](tmp_path / "x.npy")
    data = synk.data(x, name="frozen")
    for place in PLACES:
        assert_same(rows(data.to(place), batch=[3, 3, -1, 0]), np.asarray(x)[[3, 3, -1, 0]])
        with pytest.raises(ValueError, match=r"frozen: the array it holds is read-only.* copy"):
            data[0] = 1


@in_every_place
def test_set_value(four, place):
    """Another array, of more or of fewer rows, also after freeing; the old one is left alone."""
    data = synk.data(X, place=place, name="x")
    for count in (11, 5, 14, 5):
        assert_same(rows(data), np.asarray(data))
        data.set_value(numbers(count, seed=count))
        assert_same(rows(data), numbers(count, seed=count))
    data.free()
    with pytest.raises(synk.SynkError, match=r"x: it was freed.* x\.set_value"):
        data[0]
    data.set_value(X)
    assert_same((rows(data), rows(data, batch=[-1])), (X, X[-1:]))


@in_every_place
def test_set_length(four, place):
    """Rows beyond do not count, until they do."""
    data = synk.data(X.copy(), place=place)
    for count in (5, 11):
        data.set_length(count)
        assert (data.shape, len(data)) == ((count, 2), count)
        assert_same(
            (rows(data), rows.serial(data), rows(data, batch=[-1])), (X[:count], X[:count], X[count - 1 : count])
        )
    data.set_length(3)
    data[-1] = 0
    with pytest.raises(IndexError, match="index 3, but x has 3 rows"):
        rows(data, batch=[3])
    data.set_length(11)
    assert_same(rows(data, batch=slice(2, 4)), np.stack([np.zeros(2, np.float32), X[3]]))


def test_moving(four):
    """From each place to each other, written or not."""
    x = X.copy()
    data = synk.data(x)
    for place in ("scatter", "broadcast", "scatter", "host", "broadcast", "host", "scatter"):
        assert data.to(place) is data
        assert_same((data.place, rows(data)), (place, x))
        data[4] += 1
    assert_same((rows(data), x[4]), (x, X[4] + 7))


@in_every_place
def test_another_group(place):
    """Data follows the group that runs the function."""
    x = X.copy()
    data = synk.data(x, place=place)
    for kind, n in [("devices", 2), ("devices", 4), ("simulated", 4), ("devices", 2)]:
        with group_of(kind, n):
            assert_same((rows(data), rows(data, batch=[10, 0, 3])), (x, x[[10, 0, 3]]))
        data[n] += 1


RELEASES = {
    "free": lambda data: data.free(),
    "to": lambda data: data.to("host"),
    "set_value": lambda data: data.set_value(X),
    "set_length": lambda data: data.set_length(3),
}


@pytest.mark.parametrize("place", ["scatter", "broadcast"])
def test_what_is_freed_is_freed_on_devices(four, place):
    """As many buffers live as before the data was sent."""

    def used():
        data = synk.data(mapped(X), place=place)
        rows(data, batch=[1, 2, 3, 4])
        drain()
        return data

    RELEASES["free"](used())  # which places constants too
    for release in RELEASES.values():
        before = len(jax.live_arrays())
        data = used()
        assert len(jax.live_arrays()) > before
        release(data)
        assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
def test_typed_keys(four, place):
    """Functions see keys, of any place and selection, as of the array itself; NumPy sees raw data."""
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 10)

    def seen(keys):
        assert str(jax.random.key_impl(keys)) == "rbg" and keys.ndim == 1
        return jax.random.key_data(keys)

    f = synk.function(seen, reduce="concat")
    data, want = synk.data(keys, place=place, name="keys"), f(keys)
    for _ in range(2):
        assert_same((f(data), f(data, batch=[3, 1, 9]), f.serial(data)), (want, want[np.array([3, 1, 9])], want))
        assert_same(list(f.iterate(data, batches=[[4, 2, 3], [1]])), [want[np.array([4, 2, 3])], want[1:2]])
    assert_same((f(synk.data(data)), f(data.to("host")), np.asarray(data)), (want, want, jax.random.key_data(keys)))
    data.set_value(keys[:4])
    assert_same(f(data), want[:4])
    for act in (
        lambda: data.set_value(jax.random.split(jax.random.key(0), 4)),
        lambda: synk.data(np.zeros((4, 4), np.uint32)).set_value(keys), lambda: synk.local(keys),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="PRNG keys"):
            act()


def test_attributes():
    """It looks like the array that it holds, and shares its memory."""
    x = np.zeros((5, 2, 3), np.int16)
    data = synk.data(x, name="x", place="scatter", minibatch=True)
    assert (data.name, data.place, data.is_minibatch) == ("x", "scatter", True)
    assert (data.shape, data.dtype, data.ndim, data.size, len(data)) == (x.shape, x.dtype, 3, 30, 5)
    assert repr(data) == 'Data(x: int16[5, 2, 3], place="scatter")'
    assert np.shares_memory(data[1:], x) and np.shares_memory(np.asarray(data), x)
    assert synk.data(x).name != synk.data(x).name


@pytest.mark.parametrize("place", ["host", "broadcast", "scatter"])
def test_a_write_that_fails_midway(group, place):
    """What it has written is seen on the devices as on the host."""
    x = synk.data(np.zeros(6, np.float32), place=place)
    f = synk.function(jnp.sum)
    assert float(f(x)) == 0
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        x[0:2] = np.array([5.0, 1e300])
    assert float(f(x)) == float(np.asarray(x).sum()) == np.inf


@pytest.mark.parametrize("place", ["scatter", "broadcast"])
def test_ctrl_c_while_rows_are_written(four, place):
    """It comes when NumPy is done: devices hear of what was written."""
    total, ones = synk.function(jnp.sum), np.ones((40_000, 200), np.float32)
    for _ in range(3):
        x = synk.data(np.zeros_like(ones), place=place)
        total(x)
        begin = threading.Event()
        presser = threading.Thread(target=lambda begin=begin: (begin.wait(), os.kill(os.getpid(), signal.SIGINT)))
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            begin.set()
            x[:] = ones
            presser.join()
            time.sleep(1)
        presser.join()
        assert float(total(x)) == x[:].sum()


CHANGES = {
    "set_value": lambda x: x.set_value(np.ones(7, np.float32)),
    "set_length": lambda x: x.set_length(4),
    "to": lambda x: x.to("scatter" if x.place == "broadcast" else "broadcast"),
    "free": lambda x: x.free(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["scatter", slow("broadcast")])
def test_ctrl_c_while_another_thread_calls(four, place, change):
    """What waits for a call changes the data whole or not at all."""
    total = synk.function(jnp.sum)
    x = synk.data(np.arange(8, dtype=np.float32), place=place)
    total(x)
    holds, is_over = threading.Event(), threading.Event()

    def call():
        with LOCK:
            holds.set()
            is_over.wait()

    threads = [threading.Thread(target=call)]
    threads.append(threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)))
    for thread in threads:
        thread.start()
    holds.wait()
    with pytest.raises(KeyboardInterrupt):
        CHANGES[change](x)
    is_over.set()
    for thread in threads:
        thread.join()
    assert (x.place, float(total(x)), float(total(x, batch=5))) == (place, 28, 10)


EIGHT = np.arange(8, dtype=np.float32)


def test_large_unsigned_indexes(four):
    """They are out of range, not negative."""
    with pytest.raises(IndexError, match="18446744073709551615"):
        synk.function(jnp.sum)(EIGHT, batch=np.array([2**64 - 1], np.uint64))


def test_a_boolean_is_no_batch(four):
    """Not as an array either, as `jnp.any(mask)` without its axis gives one."""
    for batch in (True, np.array(True), jnp.array(False)):
        with pytest.raises(TypeError, match=r"batch is (True|False), a single boolean; give a number of rows, a slice"):
            synk.function(jnp.sum)(EIGHT, batch=batch)


@pytest.mark.parametrize("batch", [2**70, -(2**70), [2**70], [1, -(2**70)], [2**63]], ids=str)
def test_a_row_that_no_array_has(four, batch):
    """Whatever integers it takes to say so."""
    with pytest.raises(IndexError, match=r"batch.* but x has 8 rows\. |batch=.* but x has 8\. "):
        synk.function(lambda x: x.sum())(EIGHT, batch=batch)


def test_a_batch_of_lists(four):
    """Ragged ones too; and objects are no indexes, whatever they hold."""
    total = synk.function(lambda x: x.sum(), name="total")
    with pytest.raises(ValueError, match="total: batch is a list of lists; give indexes"):
        total(EIGHT, batch=[[1, 2], [3]])
    with pytest.raises(TypeError, match="total: batch has dtype object"):
        total(EIGHT, batch=np.array([1, 2], object))


X8 = numbers(8)


@pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
def test_members_of_data(group, place):
    """Before and after a call."""
    given, f = synk.data(X8, place=place), synk.function(lambda x: x.sum())
    wanted = "name is_minibatch place shape dtype ndim size array block_until_ready set_value set_length to free"
    for _ in range(2):
        assert members(given) == set(wanted.split())
        f(given)


def test_waits_as_an_array_does(four):
    """jax.block_until_ready waits for results that stay on the replicas."""
    done = []

    def late(x):
        time.sleep(0.2)
        done.append(1)
        return np.asarray(x)

    f = synk.function(lambda x: jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), x), reduce="scatter")
    made = f(numbers(4))
    assert jax.block_until_ready(made) is made and len(done) == 4
    on_host = synk.data(numbers(4))
    assert jax.block_until_ready(on_host) is on_host


class TestArray:
    """Data.array: rows on the devices as one array of JAX."""

    @pytest.mark.parametrize("kind", [("devices", 1), ("devices", 4), ("simulated", 3)], ids=str)
    def test_results_of_scatter(self, kind):
        """They are there already, cut over the replicas; a copy, which may go."""
        with group_of(*kind) as group:
            x = numbers(2 * group.size, 3)
            made = synk.function(lambda x: x + 1, reduce="scatter")(x)
            array = made.array
            assert_same(array, x + 1)
            assert array.sharding.is_equivalent_to(group.stacked, 2)
            array.delete()
            assert_same(made.array, np.asarray(made))
            assert float(jnp.mean(made.array)) == pytest.approx(float((x + 1).mean()))
            keys = synk.function(lambda x: jax.random.split(jax.random.key(0), len(x)), reduce="scatter")(x)
            assert keys.array.shape == (2 * group.size,) and jnp.issubdtype(keys.array.dtype, jax.dtypes.prng_key)
            if group.size > 1:
                odd = synk.function(lambda x: x + 1, reduce="scatter")(numbers(group.size + 1, 3))
                with pytest.raises(ValueError, match=r"rows do not divide over \d replicas"):
                    odd.array

    def test_other_places(self):
        """Rows are sent if they are not there yet; those on the host have no such array."""
        with group_of("devices", 2):
            x = synk.data(numbers(4, 3), place="scatter", name="x")
            assert_same(x.array, numbers(4, 3))
            x[1] = 7
            assert float(x.array[1, 0]) == 7
            assert_same(x.to("broadcast").array, np.asarray(x))
            with pytest.raises(ValueError, match=r'x\.array: its rows live on the host.*to\("scatter"\)'):
                x.to("host").array
            with pytest.raises(
                synk.SynkError, match=r"x is a synk\.typing\.Data, used as an array of JAX's.*its \.array"
            ):
                jnp.mean(x)


@pytest.mark.parametrize("is_committed", [False, True])
def test_small_arrays_on_one_cpu_device(four, is_committed):
    """The host cuts them; what the user does with the array afterwards changes nothing."""
    x = numbers(8, 3)
    array = jax.device_put(x, jax.devices()[1] if is_committed else None)
    keys = jax.random.split(jax.random.key(0), 8)
    made = synk.function(lambda x, keys: (x, keys), reduce="scatter")(jax.block_until_ready(array), keys)
    array.delete()
    assert_same([np.asarray(made[0]), jax.random.key_data(made[1].array)], [x, jax.random.key_data(keys)])
