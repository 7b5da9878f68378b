"""Staging: rows by way of memory that transfers read after a call has returned. Of this memory CPUs have a kind too,
from which JAX copies later, as it does on GPUs."""

import gc
import os
import signal
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._data import sources, staging

from ..helpers import assert_same, first_of, group_of, slow

ROWS, COLUMNS = 4096, 256  # 4 MiB
GROUPS = first_of(("devices", 2), ("simulated", 3))

rows_of = synk.function(lambda x: x, reduce="concat", name="rows_of")


@pytest.fixture(autouse=True)
def staged_on_cpu(monkeypatch):
    monkeypatch.setattr(staging, "MEMORY_KINDS", {"cpu": "unpinned_host", "gpu": "pinned_host"})
    monkeypatch.setattr(staging, "SMALL", 1 << 12)


@pytest.fixture(params=GROUPS, ids=str)
def on_group(request):
    with group_of(*request.param) as group:
        yield group


def kept_by(group):
    """The buffers that a group keeps."""
    return [buffer for kept in staging._pool(group)._kept.values() for buffer in kept]


def distinct(dtype=np.float32):
    """Rows that differ, and batches of them, some of which do not divide."""
    x = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(dtype)
    rng = np.random.default_rng(0)
    return x, [rng.integers(0, ROWS, rows) for rows in (1024, 1023, 1024, 1024, 500, 1024, 1024, 1024, 1023, 7)]


@pytest.mark.parametrize(
    ("on_group", "dtype"),
    [
        *[(GROUPS[0], dtype) for dtype in (np.float32, np.uint8, np.int64, jnp.bfloat16, bool, np.complex64)],
        slow(("simulated", 3), np.float32),
        slow(("devices", 1), np.uint8),
    ],
    indirect=["on_group"],
    ids=str,
)
def test_rows(on_group, dtype):
    """All calls are launched before a result is read, so that transfers wait for one another."""
    x, batches = distinct(dtype)
    for source in (x, synk.data(x)):
        results = [rows_of(source, batch=batch) for batch in [*batches, *batches]]
        narrow = jnp.asarray(x[:1]).dtype
        assert_same(results, [x[batch].astype(narrow) for batch in [*batches, *batches]])
    assert kept_by(on_group)


@pytest.mark.parametrize("slices", [2, 3])
def test_slices(on_group, slices):
    """Each slice is sent by itself."""
    x, batches = distinct()
    results = [rows_of(x, batch=batch, num_slices=slices) for batch in batches]
    assert_same(results, [x[batch] for batch in batches])
    assert kept_by(on_group)


def test_loops(on_group):
    """Rows that are sent early, in order, by each kind of loop; also from an array that is written after each item."""
    x, batches = distinct()
    wanted = [x[batch] for batch in batches]
    assert_same(list(rows_of.iterate(x, batches=batches, prefetch=3)), wanted)
    memory = np.empty_like(x)

    def source():
        for batch in batches:
            memory[: len(batch)] = x[batch]
            yield memory[: len(batch)]

    assert_same(list(rows_of.stream(source())), wanted)
    assert_same(list(synk.prefetch(source())), wanted)
    assert float(synk.function(jnp.sum).over(x.astype(bool), batches=batches)) == sum(map(np.count_nonzero, wanted))
    assert kept_by(on_group)


def test_broadcast_arguments(on_group):
    """They are as they were when the call was made."""
    f = synk.function(lambda x, table: table.sum(0) + 0 * x.sum(), inputs=["x"], reduce="mean")
    table, results = np.ones((512, 64), np.float32), []
    for value in range(6):
        table[...] = value
        results.append(f(np.ones(5, np.float32), table))
    table[...] = -1
    assert_same(results, [np.full(64, 512 * value, np.float32) for value in range(6)])
    assert kept_by(on_group)


def test_transfers_that_read_late(on_group, monkeypatch):
    """Nothing is written while it is read."""
    work, late = jnp.full((200, 200), 1e-3), []

    @jax.jit
    def read_late(x, m):
        m = jax.lax.fori_loop(0, 50, lambda _, m: jnp.tanh(m @ m), m)
        return jnp.where(m[0, 0] > 1, jnp.zeros_like(x), x)  # x is read when the work is done

    def send(buffer):
        buffer._sent = read_late(buffer._array, jax.device_put(work, buffer.device))
        late.append(not buffer._sent.is_ready())
        return buffer._sent

    monkeypatch.setattr(staging.StagingBuffer, "send", send)
    x, batches = distinct()
    results = [rows_of(x, batch=batch) for batch in batches]
    assert_same(results, [x[batch] for batch in batches])
    assert any(late)
    # The test would see it.
    monkeypatch.setattr(staging.StagingBuffer, "wait", lambda buffer: True)
    results = [rows_of(x, batch=batch) for batch in batches]
    assert any((np.asarray(result) != x[batch]).any() for result, batch in zip(results, batches, strict=True))


def test_buffers_are_few_and_go_with_the_group():
    """Two of a shape on a device, and none of the group's once it is gone."""
    x, batches = distinct()
    with synk.init(2) as group:
        for _ in range(3):
            for batch in batches:
                rows_of(x, batch=batch)
        kept = kept_by(group)
        shapes = {(buffer.device, buffer.memory.shape) for buffer in kept}
        assert len(kept) <= staging.KEPT_OF_A_SHAPE * len(shapes)
        assert {rows for _, (rows, _) in shapes} == {512, 250, 4}
        gone = [weakref.ref(buffer) for buffer in kept]
    del group, kept
    synk.close()
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def test_the_limit(monkeypatch):
    """Kinds that were used least recently go first; larger arrays are not staged."""
    with synk.init(1) as group:
        monkeypatch.setattr(staging, "LIMIT", 3 * 1024 * COLUMNS * 4)
        x, _ = distinct()
        for rows in (512, 1024, 1024, 700, 3000, 3073, 700):
            assert_same(rows_of(x, batch=rows), x[:rows])
        sizes = [len(buffer.memory) for buffer in kept_by(group)]
        assert sum(sizes) <= 3 * 1024
        assert sizes[-1] == 700 and 512 not in sizes and 3073 not in sizes


def test_an_array_on_the_device_that_the_user_deletes(on_group):
    """Nothing tells when its transfer ends, so its buffer is not used again."""
    x, _ = distinct()
    size = on_group.size
    for _ in range(5):
        for batch in synk.prefetch(iter([x[: 64 * size], 2 * x[: 64 * size]])):
            batch.delete()
    results = [rows_of(x, batch=64 * size), rows_of(2 * x, batch=64 * size)]
    assert_same(results, [x[: 64 * size], 2 * x[: 64 * size]])


def test_failures(on_group):
    """A source that fails while rows are picked loses its buffer, and calls go on."""

    class Failing:
        shape, dtype, fails = (ROWS, COLUMNS), np.dtype(np.float32), True

        def __len__(self):
            return ROWS

        def __getitem__(self, index):
            if self.fails:
                raise OSError("the disk is gone")
            return x[index]

    x, batches = distinct()
    source = Failing()
    for _ in range(3):
        Failing.fails = True
        with pytest.raises(OSError, match="the disk"):
            rows_of(synk.data(source), batch=batches[0])
        Failing.fails = False
        assert_same([rows_of(synk.data(source), batch=batch) for batch in batches], [x[batch] for batch in batches])


def test_no_memory_to_lock(on_group, monkeypatch):
    """Rows then go from any other memory."""

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate host memory")

    monkeypatch.setattr(staging, "StagingBuffer", full)
    staging._pool(on_group)._kept.clear()
    x, batches = distinct()
    assert_same([rows_of(x, batch=batch) for batch in batches], [x[batch] for batch in batches])
    assert not kept_by(on_group)


def test_no_memory_on_the_device(on_group, monkeypatch):
    """This is MemoryError, as in the program itself."""

    def full(buffer):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4194304 bytes.")

    x, _ = distinct()
    with monkeypatch.context() as patch:
        patch.setattr(staging.StagingBuffer, "send", full)
        with pytest.raises(MemoryError, match=r"rows_of: RESOURCE_EXHAUSTED.*num_slices=2"):
            rows_of(x)
    assert_same(rows_of(x), x)


def test_ctrl_c_while_threads_write(monkeypatch):
    """They write to memory that is theirs as long as they do, though the buffer is gone."""

    def slowly(source, indexes, copies):
        if threading.current_thread() is threading.main_thread():
            return copy(source, indexes, copies)
        for one in copies:
            time.sleep(0.3)
            copy(source, indexes, iter([one]))

    copy, x, y = sources._copy_all, np.full((20 << 10, 256), 7, np.float32), np.full((20 << 10, 256), 1, np.float32)
    monkeypatch.setattr(sources, "_cores", lambda: 4)
    with synk.init(1) as group:
        rows_of(x)
        staging._pool(group)._kept.clear()
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(sources, "_copy_all", slowly)
                presser = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
                presser.start()
                with pytest.raises(KeyboardInterrupt):
                    rows_of(x)
                    time.sleep(1)
                presser.join()
            result = rows_of(y)
            time.sleep(0.4)
            assert float(result.max()) == 1
            # The interrupt may have come after the rows of x were sent, whose buffer is then kept.
            assert all(buffer.memory.min() == buffer.memory.max() for buffer in kept_by(group))


def test_a_signal_handler_that_calls(on_group):
    """At any moment of a call, also of one that takes or keeps a buffer."""
    arrays, wrong = [np.full((n, 64), n, np.float32) for n in range(20, 40)], []
    for x in arrays:
        rows_of(x)

    def call(*_):
        x = arrays[len(wrong) % 7]
        wrong.append(bool((np.asarray(rows_of(x)) != x).any()))

    before = signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.005)
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert_same([rows_of(x) for x in arrays[:7]], arrays[:7])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert wrong and not any(wrong)
