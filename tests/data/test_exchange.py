"""Exchange: a global batch of scattered rows brings just those rows, bit for bit, and new rows compile nothing."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest

import synk
from synk._data import exchange
from synk._data.dataset import resident
from synk._runtime.executable import Executable, ProgramSpec

from ..helpers import assert_same, group_of, mapped, needs_devices, numbers, slow_but

built = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: built.append(event) if "backend_compile" in event else None
)

rows = synk.function(lambda x: x, reduce="concat", name="rows")

# Of 40 rows on four replicas, ten each: which rows each of them wants.
OWNERS = {
    "in order": np.arange(8),
    "spread": np.array([0, 10, 20, 30, 1, 11, 21, 31]),
    "of one replica": np.arange(30, 38),
    "one row": np.full(8, 17),
    "across": np.array([39, 38, 29, 28, 19, 18, 9, 8]),
    "of one's own": np.array([0, 9, 10, 19, 20, 29, 30, 39]),
}
MANY = {
    "of one replica": np.arange(400) % 10 + 30,
    "of two": np.arange(400) % 20 + 5,
    "any": np.random.default_rng(0).integers(0, 40, 400),
}


@pytest.mark.parametrize("owners", OWNERS)
def test_whoever_owns_the_rows(four, owners):
    """They come in order."""
    assert_same(
        rows(synk.data(mapped(numbers(40)), place="scatter"), batch=OWNERS[owners]), numbers(40)[OWNERS[owners]]
    )


@pytest.mark.parametrize("owners", MANY)
def test_more_rows_than_a_round_brings(four, owners):
    """Rounds follow until each replica has its own, however uneven the owners."""
    assert_same(rows(synk.data(mapped(numbers(40)), place="scatter"), batch=MANY[owners]), numbers(40)[MANY[owners]])


@pytest.mark.parametrize(
    ("kind", "n", "count", "wanted"),
    [("devices", 1, 9, 17), ("devices", 8, 3, 2), ("devices", 8, 9, 17), ("simulated", 3, 2, 5)],
)
def test_fewer_rows_than_replicas(kind, n, count, wanted):
    """Replicas may hold no row, or want none."""
    index = np.random.default_rng(count).integers(-count, count, wanted)
    with group_of(kind, n):
        assert_same(rows(synk.data(mapped(numbers(count)), place="scatter"), batch=index), numbers(count)[index])


DTYPES = [bool, np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, np.float32, ml_dtypes.float8_e5m2, np.complex64]


def any_bits(dtype, rows):
    """Every bit pattern of an 8-bit or 16-bit dtype, and many of a wider one, NaNs with their payloads among them."""
    size = np.dtype(dtype).itemsize
    if size <= 2:
        patterns = np.arange(256**size).astype(f"u{size}")
        return (
            (patterns % 2).astype(bool).reshape(rows, -1) if dtype is bool else patterns.view(dtype).reshape(rows, -1)
        )
    words = np.random.default_rng(0).integers(0, 2**32, (rows, 64), np.uint32)
    words[:, :6] = [0x7F800001, 0xFFC12345, 0x80000000, 0x7FFFFFFF, 1, 0x807FFFFF]
    return words.view(dtype)


OF_EACH = [
    (kind, dtype)
    for kind, dtypes in (("devices", DTYPES), ("simulated", [bool, ml_dtypes.bfloat16]))
    for dtype in dtypes
]


@pytest.mark.parametrize(("kind", "dtype"), slow_but(OF_EACH[::3], OF_EACH))
def test_bits_are_as_they_were(kind, dtype):
    """NaNs keep their payload and zeros their sign, in every dtype."""
    x = any_bits(dtype, 16)
    index = np.random.default_rng(0).permutation(16)
    with group_of(kind, 4) as group:
        got = exchange.exchange(group, resident(synk.data(x, place="scatter"), group), 16, index.reshape(4, 4))
    assert_same(np.asarray(got).reshape(x.shape), x[index])


def test_ranks_are_promoted_by_hand():
    """A user may have JAX refuse to do it."""
    with group_of("devices", 4), jax.numpy_rank_promotion("raise"):
        assert_same(
            rows(synk.data(mapped(numbers(37)), place="scatter"), batch=[5, 3, 36, 0]), numbers(37)[[5, 3, 36, 0]]
        )


FEEDS = ("host", "scatter", "broadcast")


@pytest.mark.parametrize("place", FEEDS)
def test_a_new_batch_compiles_nothing(four, place):
    """Indexes are data: other rows of as many, whoever owns them, find every program there."""
    f = synk.function(lambda x: x.sum(0))
    data = synk.data(mapped(numbers(40)), place=place)
    forms = [*OWNERS.values(), *(index.astype(np.uint8) for index in OWNERS.values()), np.arange(40) > 31, [-1] * 8]
    f(data, batch=forms[0]), f(data, batch=slice(8))
    before = len(built), f.stats.compilations
    for batch in [*forms, 8, slice(3, 11), slice(32, None)]:
        f(data, batch=batch)
    assert (len(built), f.stats.compilations) == before
    assert f.stats.compilations <= 2


def test_a_new_uneven_batch_compiles_nothing(four):
    """Nor where parts differ in rows."""
    f = synk.function(lambda x: x.sum(0))
    data = [synk.data(mapped(numbers(40)), place=place) for place in FEEDS]
    batches = [np.random.default_rng(seed).integers(0, 40, 7) for seed in range(4)] + [np.arange(7) + 20]
    [f(x, batch=batches[0]) for x in data]
    before = len(built), f.stats.compilations
    for batch in batches:
        [f(x, batch=batch) for x in data]
    assert (len(built), f.stats.compilations) == before


def test_a_new_batch_s_compiles_nothing(four):
    """Rows that replicas pick of their own are data too."""
    f = synk.function(lambda x: x.sum(0))
    data = synk.data(mapped(numbers(40)), place="scatter")
    f(data, batch_s=[0, 1, 2]), f(data, batch_s=slice(3))
    before = len(built), f.stats.compilations
    for batch_s in (
        [9, -1, 9],
        [[5, 1, 2], [0, 1, 2], [7, 7, 7], [3, 2, 1]],
        slice(7, None),
        3,
        [slice(i, i + 3) for i in range(4)],
    ):
        f(data, batch_s=batch_s)
    assert (len(built), f.stats.compilations) == before


def test_a_write_compiles_nothing(four):
    """Sending what was written needs a program a size at most."""
    f = synk.function(lambda x: x.sum(0))
    data = [synk.data(mapped(numbers(40)), place=place) for place in FEEDS]

    def written(index):
        for x in data:
            x[index] = 1
            f(x, batch=[1, 2, 3, 4])

    written(0), written(0)
    before = len(built)
    for i in (0, 39, 17):
        written(i)
    assert len(built) == before


COLLECTIVE = re.compile(r"= .*?\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


@needs_devices(4)
def test_only_the_rows_picked_travel():
    """The program of the exchange has all-to-alls of the batch, and no collective of the data; its memory is the batch's."""
    with group_of("devices", 4) as group:
        data = jax.ShapeDtypeStruct((4, 2000, 64), np.float32)
        index = jax.ShapeDtypeStruct((64,), np.int32)
        body = exchange._body(4, 8000, 16)
        spec = ProgramSpec(body, [["stacked", "replicated"]], [[data, index]], ["stacked"])
        compiled = Executable(group, spec).compiled
    assert set(COLLECTIVE.findall(compiled.as_text())) == {"all-to-all"}
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 40 * index.size * 64 * 4 < data.size * 4


@needs_devices(4)
def test_the_function_itself_communicates_no_rows():
    """What runs after the exchange, and on rows that are local, has only the collective of its outputs."""
    f = synk.function(lambda x: x.sum(0))
    with group_of("devices", 4):
        for place, picks in [
            ("scatter", {"batch": [9, 0, 3, 5]}),
            ("scatter", {"batch_s": [0, 1]}),
            ("broadcast", {"batch": [9, 0, 3, 5]}),
        ]:
            text = f.compile(synk.data(mapped(numbers(40)), place=place), **picks).as_text()
            assert COLLECTIVE.findall(text) == ["all-reduce"]
