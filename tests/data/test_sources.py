"""Sources: whatever holds the rows, in whatever layout and dtype, they arrive exactly, and no file is read whole."""

import warnings
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import synk
from synk._data import sources

from ..helpers import assert_same, chosen, group_of, numbers, slow

pytestmark = pytest.mark.usefixtures("group")

PLACES = ("raw", "host", "scatter", "broadcast")
BATCHES = {"all": None, "slice": slice(2, 6), "backwards": slice(7, 3, -1), "indexes": [5, 0, 5, -1]}

in_every_place = pytest.mark.parametrize("place", PLACES)
rows = synk.function(lambda x: x, reduce="concat", name="rows")


def at(place, x, **options):
    """An argument: the array itself, or as data."""
    return x if place == "raw" else synk.data(x, place=place, **options)


def unaligned(x):
    """The same numbers one byte off any alignment."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


class OnlyArray:
    """What can be made an array, and nothing else."""

    def __init__(self, x):
        self.x = x

    def __array__(self, dtype=None, copy=None):
        return self.x


def saved(x, path):
    np.save(path / "x.npy", x)
    return np.load(path / "x.npy", mmap_mode="r")


def mapped(x, path):
    array = np.memmap(path / "x", x.dtype, "w+", shape=x.shape)
    array[:] = x
    return array


LAYOUTS = {
    "every second row": lambda x, path: np.repeat(x, 2, 0)[::2],
    "every second column": lambda x, path: np.repeat(x, 2, 1)[:, ::2],
    "reversed": lambda x, path: x[::-1].copy()[::-1],
    "Fortran order": lambda x, path: np.asfortranarray(x),
    "one row many times": lambda x, path: np.broadcast_to(x[:1], x.shape),
    "unaligned": lambda x, path: unaligned(x),
    "read-only": lambda x, path: frozen(x),
    "saved": saved,
    "memory-mapped": mapped,
    "big-endian": lambda x, path: x.astype(">f4"),
    "only __array__": lambda x, path: OnlyArray(x),
    "of jax": lambda x, path: jnp.asarray(x),
}


@in_every_place
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout, place):
    """However its numbers lie in memory or on disk."""
    x = LAYOUTS[layout](numbers(8), tmp_path)
    want = np.asarray(x).astype(np.float32)
    given = at(place, x)
    for batch in BATCHES.values():
        assert_same(rows(given, batch=batch), want if batch is None else want[batch])


@in_every_place
@pytest.mark.parametrize("shape", [(8,), (8, 0), (8, 1, 3), (8, 2, 0, 2)], ids=str)
def test_shapes_of_rows(shape, place):
    """Rows of any shape, of no size too."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    given = at(place, x)
    for batch in (None, [5, 0, 5, -1]):
        assert_same(rows(given, batch=batch), x if batch is None else x[batch])


def bits(dtype):
    """Eight rows whose bits are any."""
    random = np.random.default_rng(0).integers(0, 256, (8, 4, np.dtype(dtype).itemsize), np.uint8)
    return (random % 2).astype(bool)[..., 0] if dtype is bool else random.view(dtype)[..., 0]


@in_every_place
@pytest.mark.parametrize("dtype", [bool, np.uint8, ml_dtypes.bfloat16])
def test_dtypes_stay(dtype, place):
    """What JAX has is seen as it is inside the function, to the last bit; uint8 images stay uint8."""
    x = bits(dtype)
    given = at(place, x)
    for batch in (None, [5, 0, 5, -1]):
        assert_same(rows(given, batch=batch), x if batch is None else x[batch])


@in_every_place
@pytest.mark.parametrize("dtype", [np.float64, ">i8", ">f2"], ids=str)
def test_dtypes_narrow_as_in_jax(dtype, place):
    """64 bits become 32, in the machine's order."""
    x = (numbers(8) * 4).astype(dtype)
    want = np.asarray(jnp.asarray(x.astype(x.dtype.newbyteorder("="))))
    assert_same(rows(at(place, x), batch=[5, 0, 5, -1]), want[[5, 0, 5, -1]])


@pytest.mark.parametrize("place", ["raw", "host", "scatter", "broadcast"])
def test_64_bits_stay_where_they_are_enabled(place):
    """Each call sees what its own setting says, of data that was read under another too."""
    x = numbers(8).astype(np.float64) + 1e-12
    given = at(place, x)
    for is_x64, dtype in [(True, np.float64), (False, np.float32), (True, np.float64)]:
        with jax.enable_x64(is_x64):
            assert_same(rows(given), x.astype(dtype))


CONVERSIONS = [
    (np.uint8, np.float32),
    (np.float32, np.int8),
    (np.float64, ml_dtypes.bfloat16),
    (ml_dtypes.bfloat16, np.float32),
    (np.int32, bool),
]


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize(("held", "seen"), CONVERSIONS)
def test_dtype_of_data(held, seen, place):
    """`dtype=` converts rows as NumPy does when they are read, from old and from new arrays; serial sees the same."""
    x = np.abs(numbers(8) * 4).astype(held)
    data = synk.data(x, place=place, dtype=seen)
    assert data.dtype == seen
    for batch in (None, [5, 0, 5, -1]):
        want = (x if batch is None else x[batch]).astype(seen)
        assert_same((rows(data, batch=batch), rows.serial(data, batch=batch)), (want, want))
    data.set_value(x[::-1])
    assert_same(rows(data), x[::-1].astype(seen))


@pytest.mark.parametrize("place", ["host", "scatter"])
def test_dtype_of_data_as_a_broadcast_argument(place):
    """It is seen as its dtype there too."""
    whole = synk.function(lambda w: w, ["broadcast"], reduce="first")
    data = synk.data(numbers(8).astype(np.int32), place=place, dtype=np.float32)
    assert (whole(data).dtype, whole.serial(data).dtype) == (np.float32, np.float32)


def test_dtype_of_resident_data_as_a_broadcast_argument():
    """Serially it is what it is in a call."""
    whole = synk.function(lambda w: w, ["broadcast"], reduce="first")
    data = synk.data(numbers(8).astype(np.int32), place="broadcast", dtype=np.float32)
    assert (whole(data).dtype, whole.serial(data).dtype) == (np.float32, np.float32)


# Files.


class Recorder:
    """Rows read by position, as files give them: slices and ascending indexes; notes how many rows each read gave."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.reads = x, x.shape, x.dtype, []

    def __getitem__(self, index):
        if isinstance(index, np.ndarray):
            assert index.ndim == 1 and (np.diff(index) > 0).all()
        else:
            assert isinstance(index, slice) and (index.step or 1) > 0
        self.reads.append(len(self.x[index]))
        return self.x[index]


READS = {
    "first": (6, 6),
    "slice": (slice(400, 404), 4),
    "consecutive": (np.arange(400, 404), 4),
    "spread": ([900, 3, 500, 901], 4),
    "duplicate": ([900, 3, 900, 900], 3),
    "close": ([405, 400, 402, 404], 6),
    "backwards": (slice(404, 400, -1), 4),
    "every tenth": (slice(0, 80, 10), 8),
}


@pytest.mark.parametrize("place", ["raw", "host"])
@pytest.mark.parametrize("form", READS)
def test_a_file_is_not_read_whole(form, place):
    """No more than twice the rows picked are read, those of all replicas by one read; the same serially."""
    batch, most = READS[form]
    source = Recorder(numbers(1000))
    want = source.x[:6] if form == "first" else source.x[batch]
    given = at(place, source)
    assert_same(rows(given, batch=batch), want)
    assert len(source.reads) == 1 and sum(source.reads) <= most
    source.reads.clear()
    assert_same(rows.serial(given, batch=batch), want)
    assert len(source.reads) == 1 and sum(source.reads) <= most


def test_a_file_of_many_bytes():
    """Where several threads would copy from memory, a file is read by one."""
    source = Recorder(np.arange(1 << 20, dtype=np.float32).reshape(-1, 64))
    index = np.random.default_rng(0).permutation(len(source.x))[:8192]
    assert_same(rows(source, batch=index), source.x[index])
    assert len(source.reads) == 1


SPREADS = {
    "uneven": (slice(100, 105), [5]),
    "one row": (1, [1]),
    "one row again": ([7, 7, 7], [1]),
    "indexes": ([0, 900, 450, 3, 901], [5]),
}


@pytest.mark.parametrize("form", SPREADS)
def test_replicas_share_a_read(form):
    """Also where some have fewer rows than others, or none."""
    batch, reads = SPREADS[form]
    source = Recorder(numbers(1000))
    with group_of("devices", 4):
        assert_same(rows(source, batch=batch), chosen(source.x, batch))
    assert source.reads == reads


def test_slices_read_no_rows_of_others():
    """Replicas' rows of one launch lie apart: each run of them is a read."""
    source = Recorder(numbers(12))
    assert_same(rows(source, num_slices=3), source.x)
    assert source.reads == [2] * 6


def test_many_bytes_are_not_held_twice(monkeypatch):
    """Of consecutive rows no more are read at a time than memory should hold twice."""
    monkeypatch.setattr("synk._data.sources.AT_ONCE", 2 * 100 * 8)
    source = Recorder(numbers(800))
    with group_of("devices", 8):
        assert_same(rows(synk.data(source, place="scatter")), source.x)
    assert source.reads == [200] * 4


class NeverBegins(Executor):
    """Threads that find no core."""

    def submit(self, fn, /, *args, **kwargs):
        return Future()


class BeginsAtOnce(Executor):
    """Threads that have copied all before the thread that calls comes to it."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


FORMS = {
    "in order": lambda x: x,
    "fortran": np.asfortranarray,
    "byte-swapped": lambda x: x.astype(">f4"),
    "unaligned": unaligned,
    "backwards": lambda x: x[::-1],
    "wide": lambda x: x.astype(np.float64),
}


@pytest.mark.parametrize("threads", [NeverBegins, BeginsAtOnce, lambda: ThreadPoolExecutor(3)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [None, slice(1, 1000), np.random.default_rng(0).permutation(1023)])
def test_threads_share_a_copy(monkeypatch, threads, form, batch):
    """By pieces of a few rows, whichever of them copy how many."""
    sizes = {"SHARED": 1 << 12, "PIECE": 1 << 10, "BLOCK": 1 << 9, "_cores": lambda: 4, "_threads": cache(threads)}
    for name, value in sizes.items():
        monkeypatch.setattr(f"synk._data.sources.{name}", value)
    x = FORMS[form](numbers(1023, 5))
    with group_of("devices", 3):
        assert_same(rows(x, batch=batch), chosen(x, batch).astype(np.float32))


def test_an_error_of_a_thread_arrives(monkeypatch):
    """Once the others have come to their end."""
    pool, x = ThreadPoolExecutor(3), np.zeros((64, 64))
    for name, value in {"SHARED": 1, "PIECE": 1, "_cores": lambda: 4, "_threads": lambda: pool}.items():
        monkeypatch.setattr(sources, name, value)
    with pytest.raises(ValueError, match="could not broadcast"):
        sources.copy_rows(x, None, [sources.Copy(np.empty((64, 63)), 0)])
    assert pool.submit(len, x).result() == 64


@pytest.mark.parametrize("place", ["scatter", "broadcast"])
def test_a_file_is_read_once(place):
    """Where its rows are resident."""
    source = Recorder(numbers(8))
    data = synk.data(source, place=place)
    assert_same((rows(data), rows(data, batch=[5, 0, 5, -1])), (source.x, source.x[[5, 0, 5, -1]]))
    assert sum(source.reads) == 8


def test_an_error_of_a_file_arrives():
    """As it is; the next call is none the worse."""
    source = Recorder(numbers(8))
    x, source.x = source.x, None
    with pytest.raises(TypeError, match="not subscriptable"):
        rows(source, batch=[5, 0, 5, -1])
    source.x = x
    assert_same(rows(source, batch=[5, 0, 5, -1]), x[[5, 0, 5, -1]])


class Gives:
    """Rows by position that are not what its dtype and shape say, as files give that unpack, mask, or have shrunk."""

    def __init__(self, given, dtype=np.float32, shape=(8, 2)):
        self.given, self.dtype, self.shape = given, np.dtype(dtype), shape

    def __getitem__(self, index):
        return self.given[index]


UNFIT = {
    "unpacked": (Gives(numbers(8), np.int16), TypeError, "rows of dtype float32, but its own is int16; read it into"),
    "wider": (Gives(numbers(8).astype(np.float64)), TypeError, "rows of dtype float64, but its own is float32"),
    "masked": (Gives(np.ma.masked_less(numbers(8), 0)), TypeError, r"masked rows.* give \.filled"),
    "shrunk": (Gives(numbers(1)), IndexError, "1 rows where 8 were: it no longer has the 8 that it had"),
    "shrunk to none": (Gives(numbers(0)), IndexError, "0 rows where 8 were"),
}


@in_every_place
@pytest.mark.parametrize("kind", UNFIT)
def test_rows_that_do_not_fit_are_refused(kind, place):
    """NumPy would round them, lose their mask, or repeat them."""
    source, error, match = UNFIT[kind]
    given, what = at(place, source), "argument [xw]" if place == "raw" else "data_.*: its value"
    for act in (rows, rows.serial, synk.function(lambda w: w, ["broadcast"], reduce="first")):
        with pytest.raises(error, match=f"{what} gave {match}"):
            act(given)


FIT = {
    "big-endian": Gives(numbers(8).astype(">f4")),
    "a mask that masks nothing": Gives(np.ma.array(numbers(8))),
    "lists": Gives(numbers(8).tolist()),
}


@in_every_place
@pytest.mark.parametrize("kind", FIT)
def test_rows_that_fit_are_read(kind, place):
    """In another byte order, with a mask that hides none, or as lists."""
    source = FIT[kind]
    assert_same(rows(at(place, source)), np.asarray(source.given, np.float32))


def hdf5(x, path):
    file = pytest.importorskip("h5py").File(path / "x.h5", "w")
    return file.create_dataset("x", data=x, chunks=(3, *x.shape[1:]))


def zarr(x, path):
    module = pytest.importorskip("zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        array = module.create_array(str(path / "x.zarr"), shape=x.shape, chunks=(3, *x.shape[1:]), dtype=x.dtype)
    array[:] = x
    return array


FILES = {"h5py": hdf5, "zarr": zarr}


@in_every_place
@pytest.mark.parametrize("shape", [(8,), (8, 2), (8, 2, 3)], ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path, kind, shape, place):
    """Rows of any shape by every kind of batch, as they are and as data."""
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    given = at(place, FILES[kind](x, tmp_path))
    for batch in (*BATCHES.values(), np.arange(8) % 2 == 0):
        want = x if batch is None else x[batch]
        assert_same((rows(given, batch=batch), rows.serial(given, batch=batch)), (want, want))


@pytest.mark.parametrize("kind", FILES)
def test_files_are_written(tmp_path, kind):
    """A write goes to the file and is seen in every place; so is a length."""
    x = numbers(8)
    file = FILES[kind](x, tmp_path)
    data = synk.data(file)
    for i, place in enumerate(PLACES[1:]):
        rows(data.to(place))
        data[i + 2], x[i + 2] = 7, 7
        assert_same((rows(data), np.asarray(file[:]), data[:]), (x, x, x))
    data.set_length(4)
    assert_same((rows(data), data[-2:]), (x[:4], x[2:4]))


@in_every_place
def test_a_file_that_has_shrunk(tmp_path, place):
    """Its last row is not repeated for those that are gone."""
    file = pytest.importorskip("h5py").File(tmp_path / "x.h5", "w")
    x = file.create_dataset("x", data=numbers(8), maxshape=(None, 2), chunks=(2, 2))
    given = synk.data(x, place="host" if place == "raw" else place)
    x.resize(5, axis=0)
    with pytest.raises(IndexError, match="it no longer has the 8 that it had"):
        rows(given)
    with pytest.raises(IndexError, match="gave 2 rows where 4 were"):
        given[3:7]
    assert_same(rows(x), numbers(8)[:5])


# Indexes of rows, and how many rows are read for them.
INDEXES = {
    "a row": (3, 1),
    "the last": (-1, 1),
    "a number of NumPy's": (np.int16(3), 1),
    "an element": ((3, 1), 1),
    "a slice": (slice(2, 4), 2),
    "a slice beyond": (slice(3, 99), 2),
    "nothing": (slice(4, 2), 0),
    "nothing backwards": (slice(0, 3, -1), 0),
    "every second backwards": (slice(3, None, -2), 2),
    "columns backwards": ((slice(1, None, -1), [1, 0]), 2),
    "columns": ((slice(0, 2), [1, 0, 1]), 2),
    "backwards": (slice(None, None, -1), 5),
    "indexes": ([4, 0, 4], 2),
    "elements": (([4, 0], [1, 0]), 2),
    "a mask": (np.arange(5) == 2, 1),
    "all": (..., 5),
    "a column": ((..., 1), 5),
    "no axis": ((), 5),
    "a new axis": ((None, 3), 5),
    "a mask of elements": (numbers(8)[:5] > 0, 5),
}


@pytest.mark.parametrize("form", INDEXES)
def test_what_an_index_reads_after_set_length(form):
    """No rows but those that it names, where it names them."""
    index, most = INDEXES[form]
    source = Recorder(numbers(8))
    data = synk.data(source)
    data.set_length(5)
    assert_same(np.asarray(data[index]), np.asarray(source.x[:5][index]))
    assert sum(source.reads) <= most
    for beyond in (5, [0, 5]):
        with pytest.raises(IndexError, match="out of"):
            data[beyond]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *[("h5py", form) for form in INDEXES],
        *[slow("zarr", form) for form in ("an element", "a slice beyond", "backwards", "indexes", "a mask", "no axis")],
    ],
)
def test_files_are_indexed_as_numpy_after_set_length(tmp_path, kind, form):
    """Whatever they allow themselves."""
    x, (index, _) = numbers(8), INDEXES[form]
    data = synk.data(FILES[kind](x, tmp_path))
    data.set_length(5)
    assert_same(np.asarray(data[index]), np.asarray(x[:5][index]))


WRITTEN = [-1, 2, slice(None), slice(-2, None), slice(1, 20, 2), ..., (-1, 1), (..., 0), [0, 3], np.arange(5) < 2]


@pytest.mark.parametrize(
    ("kind", "index"),
    [*[(kind, index) for kind in ("numpy", "h5py") for index in WRITTEN], *[slow("zarr", i) for i in WRITTEN[::4]]],
)
def test_rows_beyond_the_length_stay(tmp_path, kind, index):
    """A write counts from the rows that there are, in files as in memory."""
    x = numbers(8)
    want, file = x.copy(), x if kind == "numpy" else FILES[kind](x, tmp_path)
    data = synk.data(file)
    data.set_length(5)
    rows(data.to("scatter"))
    want[:5][index] = 70
    data[index] = 70
    assert_same((rows(data), np.asarray(file[:])), (want[:5], want))
    with pytest.raises(IndexError):
        data[6] = 1
    assert_same(np.asarray(file[:]), want)


def test_a_write_is_seen_by_another_object_of_the_file(tmp_path, four):
    """Which h5py makes at each look."""
    x = numbers(8)
    file = hdf5(x, tmp_path).file
    one, other = (synk.data(file["x"], place="scatter") for _ in range(2))
    assert_same((rows(one), rows(other)), (x, x))
    one[5] = x[5] = 70
    assert_same((rows(one), rows(other)), (x, x))


@pytest.mark.parametrize("kind", FILES)
def test_files_as_broadcast_arguments_and_under_jit(tmp_path, kind):
    """Every replica sees all rows; a traced call picks them."""
    x = numbers(8)
    file = FILES[kind](x, tmp_path)
    whole = synk.function(lambda w: w, ["broadcast"], reduce="first")
    assert_same((whole(file), whole(synk.data(file))), (x, x))
    index = np.array([5, 0, 5, 7])
    assert_same(jax.jit(lambda index: rows(synk.data(file), batch=index))(index), x[index])
    assert_same(jax.jit(lambda: rows(file, batch=index))(), x[index])
