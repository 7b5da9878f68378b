"""num_slices="auto": doubled until they fit into memory, the same answer, and nothing lost where memory does not do."""

import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._base.units import size_text

from .. import harness
from ..helpers import needs_plugin, slow, slow_but, tells_no_memory

RANDOM = np.random.default_rng(0)


def dense(params, x, y):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def attention(params, x, y):
    queries, keys, values = (x @ w for w in params)
    return jnp.mean((jax.nn.softmax(queries @ jnp.swapaxes(keys, 1, 2)) @ values - y) ** 2)


def convolutions(params, x, y):
    for kernel in params:
        x = jnp.tanh(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return jnp.mean((x - y) ** 2)


def recurrent(params, x, y):
    def cell(h, now):
        h = jnp.tanh(h @ params[0] + now)
        return h, h

    _, found = jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))
    return jnp.mean((jnp.swapaxes(found, 0, 1) - y) ** 2)


MODELS = {
    "dense": (dense, [(64, 64)] * 4, (512, 64)),
    "attention": (attention, [(16, 16)] * 3, (64, 32, 16)),
    "convolutions": (convolutions, [(3, 3, 4, 4)] * 3, (48, 16, 16, 4)),
    "recurrent": (recurrent, [(16, 16)], (96, 20, 16)),
}


def step_and_rows(model):
    loss, shapes, rows = MODELS[model]
    params = [RANDOM.normal(size=shape).astype(np.float32) * 0.1 for shape in shapes]
    return synk.train.step(loss, params, optax.sgd(0.125, momentum=0.5)), RANDOM.normal(size=rows).astype(np.float32)


@pytest.mark.parametrize(
    ("model", "replicas", "share"),
    [
        ("dense", 2, 0.3),
        slow("attention", 3, 0.1),
        slow("convolutions", 1, 0.02),
        slow("recurrent", 1, 0.6),
    ],
)
def test_doubled_until_they_fit(model, replicas, share):
    """They fit, half as many do not; a second call compiles nothing."""
    step, x = step_and_rows(model)
    tall = -(-len(x) // replicas)
    with synk.simulate(replicas):
        whole, least = (step.explain(x, x, num_slices=k).memory_bytes or 0 for k in (1, tall))
    memory = int(least + share * (whole - least))
    with synk.simulate(replicas, memory=memory):
        step, _ = step_and_rows(model)
        e = step.explain(x, x, num_slices="auto")
        count = step.stats.compilations
        assert e.fits and not step.explain(x, x, num_slices=e.num_slices // 2).fits
        step(x, x, num_slices="auto")
        assert (step.stats.slices, step.stats.compilations) == (e.num_slices, count)


def wide(rows):
    """A function that needs 40 kB a row, and rows of 4 numbers."""
    f = synk.function(
        lambda x: jnp.sort(x[:, :1] * jnp.arange(10_000, dtype=x.dtype)[None], 1)[:, -4:].sum(0), name="wide"
    )
    return f, (np.arange(rows * 4) % 7).reshape(rows, 4).astype(np.float32)


class TestCalls:
    """Every way to call, warm and fresh, in groups with and without the memory."""

    def test_the_answer_is_the_same(self):
        """In any group, for any batch; what is chosen goes with the rows and with the group."""
        f, x = wide(64)
        asked = {}
        for memory in ("1GB", "1.5MB", "500kB", "1GB"):
            with synk.simulate(2, memory=memory):
                for batch in (None, slice(3, 64, 2), 1):
                    got = f(x, batch=batch, num_slices="auto")
                    np.testing.assert_array_equal(got, f.serial(x, batch=batch))
                    assert asked.setdefault((memory, str(batch)), f.stats.slices) == f.stats.slices
        assert [asked[memory, "None"] for memory in ("1GB", "1.5MB", "500kB")] == sorted(
            asked[memory, "None"] for memory in ("1GB", "1.5MB", "500kB")
        )
        assert asked["1GB", "None"] == 1 and asked["500kB", "None"] > 1 and asked["500kB", "1"] == 1

    @pytest.mark.parametrize("place", slow_but(["scatter"], ["host", "scatter", "broadcast"]))
    def test_every_way_to_call(self, place):
        """Iterate, over, check, compile, blame and the serial run; of data in any place."""
        f, x = wide(48)
        with synk.simulate(2, memory="900kB"):
            data, batches = synk.data(x, place=place), [np.arange(32), np.arange(32, 48)]
            for _ in range(2):
                assert [np.asarray(each).tolist() for each in f.iterate(data, batches=batches, num_slices="auto")] == [
                    f.serial(x[batch]).tolist() for batch in batches
                ]
                np.testing.assert_array_equal(f.over(data, batches=batches, num_slices="auto"), f.serial(x))
                f.check(data, num_slices="auto")
                assert f.blame(data, num_slices="auto") is None
                f.compile(data, num_slices="auto")
                assert f.explain(data, num_slices="auto").num_slices > 1

    def test_variables_that_change(self):
        """A variable that comes to differ between replicas, and one that holds rows: as with a number of slices."""
        total = synk.shared(np.zeros(4, np.float32))
        rows = synk.shared(np.zeros((20, 4), np.float32))
        f, x = wide(20)

        @synk.function
        def count(y):
            total.update(total.value + y.sum(0), slices="add")
            return f.fn(y + rows.value)

        with synk.simulate(2, memory="500kB"):
            synk.scatter(rows, x)
            for turn in range(1, 4):
                np.testing.assert_array_equal(count(x, num_slices="auto"), f.serial(2 * x))
                assert count.stats.slices > 1
                np.testing.assert_array_equal(total.get_value(0), turn * x[:10].sum(0))

    @tells_no_memory
    def test_what_is_refused(self):
        """Each names the function and what to give, before anything runs."""
        f, x = wide(8)
        with synk.simulate(2):
            for call in (f, f.compile, f.explain, f.check, f.blame):
                with pytest.raises(
                    ValueError, match=r"^wide: num_slices=\"auto\".*a cpu does not tell.*memory=\"14GB\""
                ):
                    call(x, num_slices="auto")
            with pytest.raises(ValueError, match='integer >= 1, or "auto"'):
                f(x, num_slices=0)
            with pytest.raises(TypeError, match="num_slices is 'Auto'"):
                f(x, num_slices="Auto")
        with synk.simulate(2, memory="400kB"):
            with pytest.raises(MemoryError, match=r"^wide: in slices of one row it still needs .* may use 1 kB"), synk.simulate(1, memory=1000):  # fmt: skip
                f(x, num_slices="auto")
            with pytest.raises(ValueError, match="cannot enter jit"):
                jax.jit(lambda x: f(x, num_slices="auto"))(x)
            np.testing.assert_array_equal(f(x, num_slices="auto"), f.serial(x))
            assert float(synk.function(lambda a: a, inputs={"a": "broadcast"})(2.0, num_slices="auto")) == 4  # no rows


@pytest.mark.parametrize(
    ("memory", "error"),
    [("14", ValueError), ("much", ValueError), (0, ValueError), (-1, ValueError), (1.5, ValueError), (0.0, ValueError),
     (float("nan"), ValueError), (True, TypeError), (b"1GB", TypeError), ("1..5GB", ValueError), ("0GB", ValueError)],
)  # fmt: skip
def test_wrong_memory(memory, error):
    """The group stays as it was."""
    with synk.simulate(3) as group:
        for make in (lambda: synk.init(1, memory=memory), lambda: synk.simulate(2, memory=memory)):
            with pytest.raises(error, match=r"memory is .*give bytes"):
                make()
        assert synk.group() is group


@pytest.mark.parametrize(
    ("memory", "size"),
    [("14GB", 14 * 10**9), ("1.5 GiB", 3 * 2**29), ("20kB", 20_000), ("2TB", 2 * 10**12), (12345, 12345), ("7B", 7), pytest.param(0.5, None, marks=tells_no_memory), pytest.param(None, None, marks=tells_no_memory)],
)  # fmt: skip
def test_memory(memory, size):
    """In bytes; a CPU has no fraction, since it tells nothing."""
    with synk.simulate(2, memory=memory) as group:
        assert group.memory == size
        assert synk.function(jnp.sum).explain(np.ones(4)).memory_limit == size


def test_explain_says_what_fits():
    """A call is compared with the group's memory."""
    f, x = wide(200)
    with synk.simulate(2, memory="1GB"):
        # How much a program needs depends on the device.
        whole, sliced = f.explain(x).memory_bytes, f.explain(x, num_slices=8).memory_bytes
    assert whole is not None and sliced is not None
    limit = (whole + sliced) // 2
    assert sliced < limit
    with synk.simulate(2, memory=limit):
        e = f.explain(x)
        assert e.fits is False and f"memory limit: {size_text(limit)}\nfits: no\n" in str(e)
        assert f.explain(x, num_slices=8).fits


OUT_OF_MEMORY = """
    import resource
    import jax, jax.numpy as jnp, numpy as np, synk
    # More than there is. Of two devices XLA ends the process where one alone has no memory, and the other waits for it.
    synk.simulate(2, memory="1TB")
    w = synk.shared(np.ones(2, np.float32), name="w")
    local = synk.shared(np.zeros(2, np.float32), name="local")

    @synk.function(donate={donate})
    def f(x):
        local.update(local.value + len(x), slices="add")
        # The square of the rows, 20 MB each: XLA reserves memory for slices before their turn, which counts here:
        # 680 MB for the whole call, 400 for two slices, 320 for four.
        pairs = jnp.repeat(x, len(x))
        many = jnp.stack([pairs, pairs], 1) @ jnp.full((2, 5_000_000), 0.5)
        many = many.reshape(len(x), -1)
        return jnp.stack([many.max(1), many.min(1)]).sum(1) * w.value

    @f.then
    def f(total):
        w.value = w.value + 1
        return total

    x = np.arange(8, dtype=np.float32)
    e = f.explain(x, num_slices="auto")
    assert e.num_slices == 1
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + int(0.8 * e.memory_bytes), -1))
    for turn in range(1, 4):
        got = np.asarray(f(x, num_slices="auto"))
        assert (got == 28 * turn).all(), got
        assert (np.asarray(w.value) == turn + 1).all()
        assert (np.asarray(local.get_value(1)) == 4 * turn).all()
        count = count if turn > 1 else f.stats.compilations
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))  # only the first is waited for; what it found is remembered
        assert f.stats.slices > 1 and f.stats.compilations == count, (f.stats, count)
    print("slices", f.stats.slices)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("donate", [slow(True), slow(False)])
def test_out_of_memory(donate):
    """A device that has less than was said: twice the slices until it does, and no variable is lost or updated twice."""
    program = textwrap.dedent(OUT_OF_MEMORY.format(donate=donate))
    done = harness.python(program, MALLOC_ARENA_MAX="1")  # or each thread reserves 64 MB of what there is
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("slices ")


@pytest.mark.parametrize("limit", [3, 7])
def test_out_of_memory_while_compiling(monkeypatch, limit):
    """As where XLA's autotuner tries kernels on a GPU: MemoryError, and in more slices by itself. No machine without a
    GPU does so, so the compiler is made to say what it said there."""
    compiled = jax.stages.Lowered.compile
    said = (
        "NOT_FOUND: Failed to get configs for: 2 out of 3 instructions\n  HLO: %dot.1\n  RESOURCE_EXHAUSTED: Failed to "
        "allocate request for 2.00GiB on device ordinal 0"
    )

    def compile(lowered, *args, **options):
        rows = [int(each) for each in re.findall(r"tensor<(\d+)x5xf32>", lowered.as_text())]
        if max(rows, default=0) > limit:
            raise jax.errors.JaxRuntimeError(said)
        return compiled(lowered, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
    w, x = synk.shared(np.float32(0)), np.ones((16, 5), np.float32)
    f = synk.function(lambda x: jnp.tanh(x).sum(), name="f", then=lambda s: setattr(w, "value", w.value + s))
    with synk.init(1, memory="1GB"):
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"f: NOT_FOUND: Failed to get configs.*num_slices=2 or more"):
                f(x)
        assert float(w.value) == 0
        for turn in (1, 2, 3):
            f(x, num_slices="auto")
            assert f.stats.slices == {3: 8, 7: 4}[limit]
            np.testing.assert_allclose(w.value, turn * np.tanh(x).sum(), rtol=1e-5)


@needs_plugin
def test_a_target():
    """The memory of GPUs that are not here: the slices of what does not fit are doubled until it does."""
    shape, params = (131_072, 8192), [jax.ShapeDtypeStruct((8192, 8192), np.float32)] * 4
    x = jax.ShapeDtypeStruct(shape, np.float32)
    step = synk.train.step(dense, params, optax.sgd(0.1))
    with synk.target("h100", 2, memory="8GB"):
        e = step.explain(x, x, num_slices="auto")
        assert e.fits and e.num_slices > 1
        assert not step.explain(x, x, num_slices=e.num_slices // 2).fits
        assert step.explain(x, x).fits is False
    with synk.target("h100", 2) as group:
        assert group.memory == group.accelerator.usable_memory
    with synk.target("h100", 2, memory=0.5) as group:
        assert group.memory == group.accelerator.usable_memory // 2
