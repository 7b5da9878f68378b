"""Where the time of a measured call goes: delays are found in their line, and the lines add up to the clock."""

import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._explain.hlo import not_computing
from synk._explain.timeline import split

from ..helpers import group_of, needs_devices

DELAY = 0.03
WAITING, SENDING, PYTHON = "waiting for other devices", "sending rows", "Python before a launch"


def late(x, first=None):
    """Sleep on the device whose part begins with such a row; on all if None."""

    def sleep(row):
        if first is None or float(row) == first:
            time.sleep(DELAY)
        return row

    return x + 0 * jax.pure_callback(sleep, jax.ShapeDtypeStruct((), x.dtype), x[0])


class SlowSource:
    """Rows of a store that takes its time."""

    shape, dtype = (64, 2), np.dtype(np.float32)

    def __len__(self):
        return 64

    def __getitem__(self, rows):
        time.sleep(DELAY)
        return np.ones(self.shape, self.dtype)[rows]


class SlowArray:
    """An array that Python computes when it is asked for."""

    def __array__(self, dtype=None, copy=None):
        time.sleep(DELAY)
        return np.ones(8, np.float32)


def seconds_of(measured):
    """Return the seconds of each line, after a look at their sum."""
    found = {spent.on: spent.seconds for spent in measured.spent}
    assert sum(found.values()) == pytest.approx(measured.seconds, rel=0.03)
    assert min(found.values()) >= 0
    return found


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(("kind", "n"), [("devices", 1), ("devices", 3), ("devices", 8), ("simulated", 4)])
def test_lines_add_up_to_the_clock(kind, n, num_slices):
    """Fresh and warm, for rows that do not divide, the lines are all of the time, and a long computation is computing."""
    f = synk.function(lambda x: late(x).sum())
    with group_of(kind, n):
        for _ in range(2):
            measured = f.explain(np.arange(19, dtype=np.float32), num_slices=num_slices, run=2).measured
            found = seconds_of(measured)
            assert found["computing"] > 0.7 * DELAY
            assert (measured.slowest is None) == (kind == "simulated" or n == 1)


@pytest.mark.parametrize("n", [1, 4])
def test_a_slow_source_is_sending(n):
    """Rows that a source reads slowly count as sent slowly."""
    f, data = synk.function(lambda x: x.sum(0)), synk.data(SlowSource())
    with group_of("devices", n):
        found = seconds_of(f.explain(data, batch=np.arange(30), run=3).measured)
    assert found[SENDING] > 0.9 * DELAY
    assert found[PYTHON] < DELAY / 2


@pytest.mark.parametrize("n", [1, 4])
def test_slow_python_is_python(n):
    """An argument that Python makes slowly keeps devices waiting before the launch."""
    with group_of("devices", n):
        found = seconds_of(synk.function(lambda x: x.sum()).explain(SlowArray(), run=3).measured)
    assert found[PYTHON] > 0.9 * DELAY
    assert found[SENDING] < DELAY / 2


@needs_devices(4)
@pytest.mark.parametrize("reduce", ["sum", "concat"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_slow_replica_is_waited_for(rank, reduce):
    """One of four computes for long, three wait as long, and it is named."""
    x = np.arange(8, dtype=np.float32)
    f = synk.function(lambda x: late(x, 2 * rank) if reduce == "concat" else late(x, 2 * rank).sum(), reduce=reduce)
    with group_of("devices", 4):
        measured = f.explain(x, run=3).measured
    found = seconds_of(measured)
    assert found[WAITING] > 0.7 * 3 / 4 * DELAY
    assert 0.9 * DELAY / 4 < found["computing"] < DELAY / 2
    assert measured.slowest.startswith(f"device {rank} of process 0: ")


@needs_devices(2)
def test_collectives_have_lines():
    """Each kind is there with what is hidden, as text, in JSON and in the drawing, also where all devices make one
    replica; the step is not taken."""
    with group_of("devices", 2):
        w = np.ones((256, 256), np.float32)
        for options, kind in [
            ({}, "all-reduce"),
            ({"shard_params": True}, "all-gather"),
            ({"engine": "jit"}, "all-reduce"),
        ]:
            step = synk.train.step(lambda w, x: jnp.tanh(x @ w).mean(), w, optax.sgd(0.1), **options)
            e = step.explain(np.ones((16, 256), np.float32), run=2)
            assert kind in [spent.on for spent in e.measured.spent if spent.hidden_seconds is not None]
            assert f"\n  {kind} " in str(e.measured)
            assert json.loads(e.json())["measured"]["spent"][0]["on"] == "computing"
            assert "where the time goes" in e._repr_html_()
            np.testing.assert_array_equal(step.params.value, w)


def test_two_profiles_do_not_go_together(tmp_path):
    """JAX takes one profile at a time, and says so; the next call measures again."""
    f = synk.function(jnp.sum)
    with jax.profiler.trace(tmp_path), pytest.raises(RuntimeError, match="Only one profile"):
        f.explain(np.ones(4, np.float32), run=1)
    assert f.explain(np.ones(4, np.float32), run=1).measured.calls == 1


HLO = """HloModule step, is_scheduled=true

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %mul.1 = f32[4]{0} multiply(%p, %p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %psum.1 = f32[4]{0} all-reduce-start(%x), to_apply=%add
  %while.1 = f32[4]{0} while(%x), condition=%test, body=%body
  ROOT %psum.2 = f32[4]{0} all-reduce-done(%psum.1)
}
"""


def plane(name, *events):
    """A plane of a profile: events of a name, an instruction or None, and a start and an end in milliseconds."""
    made = [
        SimpleNamespace(
            name=event, start_ns=1e6 * start, duration_ns=1e6 * (end - start), stats=[("hlo_op", op)] if op else []
        )
        for event, op, start, end in events
    ]
    return SimpleNamespace(name=name, lines=[SimpleNamespace(events=made)])


def test_a_profile_of_a_gpu():
    """Kernels lie on planes of devices: copies from the host, a collective beside a loop and alone, and gaps."""
    assert not_computing(HLO) == {"psum.1": "all-reduce", "while.1": "", "psum.2": "all-reduce"}
    kernels = [
        ("MemcpyH2D", None, 2, 3),
        ("gemm", "mul.1", 4, 6),
        ("loop", "while.1", 4, 7),
        ("ncclDevKernel", "psum.1", 5, 9),
    ]
    host = ("synk: call", None, 0, 3.5), ("thunk", "mul.1", 0, 3), ("synk: end", None, 3.5, 10)
    profile = SimpleNamespace(planes=[plane("/host:CPU", *host), plane("/device:GPU:1", *kernels)])
    device = SimpleNamespace(platform="gpu", local_hardware_id=1, id=5)
    table = split(profile, [device], (["psum.1", "psum.2"], ["while.1"]), np.array([0.0005]))
    # Computing, waiting, sending, Python and the rest; then each collective exposed, and hidden.
    np.testing.assert_allclose(1e3 * table[0, 0], [2, 0, 1.5, 2, 1.5, 3, 0, 1, 0], atol=1e-9)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("loop", ["iterate", "stream", "over"])
def test_a_slow_loader_is_loading(loop, prefetch):
    """The time for which a loop waits for its loader is counted, and no time of a call made alone."""
    f, x, delay = synk.function(lambda x: x.sum()), np.arange(12, dtype=np.float32), 0.01

    def loader(batches):
        for batch in batches:
            time.sleep(delay)
            yield batch

    f(x)
    assert f.stats.loading == 0
    rows = [slice(0, 4), slice(4, 8), slice(8, 12)]
    if loop == "stream":
        [*f.stream(loader([x[batch] for batch in rows]), prefetch=prefetch)]
    elif loop == "iterate":
        [*f.iterate(x, batches=loader(rows), prefetch=prefetch)]
    else:
        f.over(x, batches=loader(rows), prefetch=prefetch)
    assert 3 * delay <= f.stats.loading < 3 * delay + DELAY


def test_slow_saves_are_saving(tmp_path):
    """The time for which a loop waits for its saves is counted, and no other."""

    def extra():
        time.sleep(DELAY)

    total = synk.shared(0.0, name="total")
    loop = synk.resume(range(3), {"total": total}, folder=tmp_path, extra=extra)
    for _ in loop:
        time.sleep(DELAY)
        assert loop.saving == 0
    assert DELAY <= loop.saving
