"""Programs: how many are built, and how often they communicate."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import synk

from ..helpers import assert_close, group_of, needs_devices, numbers, slow

pytestmark = [pytest.mark.usefixtures("four"), pytest.mark.smoke, needs_devices(4)]

COLLECTIVE = re.compile(r"= \S+ (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
TUPLE = re.compile(r"= \(.*?\) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")

built = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: built.append(event) if "backend_compile" in event else None
)


def collectives(f, *args, **options):
    """The kinds of collectives in the program that ends such a call, one entry for each."""
    text = f.compile(*args, **options).as_text()
    return sorted([*COLLECTIVE.findall(text), *TUPLE.findall(text)])


def test_the_count_sees_collectives():
    """Two that depend on each other are two."""
    f = synk.function(lambda x: synk.all_reduce(synk.all_reduce(x.sum(), "sum") * x.sum(), "sum"), reduce="same")
    assert collectives(f, numbers(8)) == ["all-reduce"] * 2


@pytest.mark.parametrize("rows", [8, 9])
def test_one_all_reduce_for_all_sums(rows):
    """Loss, metrics and every gradient, small and large, travel together."""
    f = synk.function(
        lambda x: [x.sum(), x.mean(0), jnp.ones((200, 200)) * x.sum(), x.any(), *[x.sum() * i for i in range(50)]],
        outputs=["sum", "mean", "sum"] + ["sum"] * 51,
    )
    found = collectives(f, numbers(rows))
    assert found.count("all-reduce") <= 2  # one a dtype: floats, and the boolean's count
    assert len(found) == found.count("all-reduce") > 0


@pytest.mark.parametrize(("rows", "slices"), [(8, 1), (9, 1), (9, 2)])
def test_each_new_value_takes_the_memory_of_its_old_one(rows, slices):
    """Else XLA copies values that change places: variables of one shape, written in another order than read."""
    a, b, c = (synk.shared(np.full((64, 512), i, np.float32)) for i in range(3))
    f = synk.function(lambda x: jnp.ones((64, 512)) * x.mean() * a.value, reduce="mean")

    @f.then
    def update(mean):
        c.value, b.value, a.value = c.value + mean, 0.5 * b.value - mean, a.value + b.value
        return mean  # of that shape too

    def memory():
        leaves = [variable._state.leaves[0] for variable in (a, b, c)]
        return [[shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards] for leaf in leaves]

    x = numbers(rows)
    f(x, num_slices=slices)
    before = memory()
    jax.block_until_ready(f(x, num_slices=slices))
    assert memory() == before


@pytest.mark.parametrize("rows", [8, 9])
def test_one_collective_a_kind_and_dtype(rows):
    """Sums in an all-reduce, extremes in another, small products and rows in an all-gather."""
    f = synk.function(
        lambda x: (x.sum(), x.mean(), x.max(), x.min(0), x.prod(), x, x[:, 0]),
        outputs=("sum", "mean", "max", "min", "prod", "concat", "concat"),
    )
    assert collectives(f, numbers(rows)) == ["all-gather", "all-reduce", "all-reduce"]


@pytest.mark.parametrize(("op", "count"), [("first", 1), (None, 1), ("same", 0)])
def test_what_the_first_replica_has_goes_to_all_at_once(op, count):
    """Values travel together; equal ones do not travel."""
    f = synk.function(lambda x: (0 * x.sum(), len(x)), outputs=op, reduce=op)
    assert collectives(f, numbers(8)) == ["all-reduce"] * count


def test_no_communication_of_an_update_in_fn():
    """A local update is local."""
    w = synk.shared(np.float32(0))
    assert collectives(synk.function(lambda x: setattr(w, "value", x.sum())), numbers(8)) == []


def test_then_adds_none():
    """The optimiser runs on every replica, on what is there already."""
    w = synk.shared(np.zeros(2, np.float32))
    f = synk.function(lambda x: x.mean(0), reduce="mean", then=lambda g: setattr(w, "value", w.value - g))
    assert collectives(f, numbers(8)) == ["all-reduce"]


@pytest.mark.parametrize(
    "call", [lambda f, x: f.over(x, batches=[8, slice(8, 16)]), lambda f, x: f(x, num_slices=2)], ids=["over", "slices"]
)
def test_sums_grow_in_place(monkeypatch, call):
    """The programs that add batches or slices up copy no sum: they write it where it was."""
    texts, compile = [], jax.stages.Lowered.compile

    def noted(lowered, *args, **kwargs):
        compiled = compile(lowered, *args, **kwargs)
        texts.append(compiled.as_text())
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    f = synk.function(lambda x: (x.sum(0), x.mean(), x.max(0), x.any()), outputs=("sum", "mean", "max", "any"))
    call(f, numbers(16, 3))
    adding = [text for text in texts if text.count("may-alias") == 4]
    assert len(adding) == 1
    # What a program copies is its token, a number that depends on nothing, and the count of a loop.
    assert {*re.findall(r"= (\S+) copy\(", adding[0].partition("ENTRY")[2])} - {"s32[]"} == {"s32[1]{0}"}


def test_one_replica_does_not_communicate():
    """There is nobody to talk to."""
    with group_of("devices", 1):
        assert collectives(synk.function(lambda x: (x.sum(), x.max()), outputs=("sum", "max")), numbers(8)) == []


def test_subset_spares_no_update():
    """What is not asked for is not communicated; what updates need is."""
    w = synk.shared(np.float32(0))
    f = synk.function(lambda x: (x.sum(), x.max()), outputs=("sum", "max"), name="f")
    assert collectives(f, numbers(8), output_subset=[1]) == ["all-reduce"]
    g = synk.function(lambda x: (x.sum(), x.max()), outputs=("sum", "max"))
    g.then(lambda s, m: (setattr(w, "value", w.value + s), m))
    assert collectives(g, numbers(8), output_subset=[1]) == ["all-reduce", "all-reduce"]


@pytest.mark.parametrize("rows", [8, 9])
def test_subset_spares_what_would_travel_together(four, rows):
    """What is not asked for is not computed either, whatever else its collective would bring."""
    weighted = lambda x: synk.Weighted((x @ x.T).sum(), x.shape[0])  # noqa: E731
    f = synk.function(lambda x: (x.sum(), (x @ x.T).sum(), weighted(x)), outputs=("sum", "sum", "mean"))
    programs = [f.compile(numbers(rows), output_subset=subset).as_text() for subset in (None, [0])]
    assert ["dot(" in (text or "") for text in programs] == [True, False]
    assert f(numbers(rows), output_subset=[1, 2, 0]) == tuple(f(numbers(rows))[i] for i in (1, 2, 0))


@pytest.mark.parametrize("slices", [1, slow(2)])
@pytest.mark.slow
def test_every_batch_length_with_few_programs(slices):
    """Lengths 1 to 64 on four replicas build at most 28 programs a slice and one more lot; a second pass none."""
    x, y = numbers(64), numbers(64)[:, 0]
    w = np.ones(2, np.float32)
    f = synk.function(lambda x, y, w: jnp.mean((x @ w - y) ** 2), ["x", "y"], reduce="mean")
    f(x, y, w, batch=4), f(x, y, w, batch=5)  # what JAX itself builds once, to place and to copy
    before, of_its_own = len(built), f.stats.compilations
    for length in range(1, 65):
        f(x, y, w, batch=length, num_slices=slices)
    assert 16 <= f.stats.compilations <= 28 * (slices + 1)
    assert len(built) - before == f.stats.compilations - of_its_own
    before = len(built)
    for length in range(1, 65):
        f(x, y, w, batch=np.arange(length), num_slices=slices)
    assert len(built) == before


def test_no_hidden_compilation_in_a_training_loop(group):
    """From the second call on, nothing at all is built, reading the loss and the variable included."""
    w = synk.shared(np.zeros(2, np.float32))
    f = synk.function(
        lambda x: jnp.mean((x @ w.value) ** 2), reduce="mean", then=lambda m: setattr(w, "value", w.value + m) or m
    )

    def loop():
        for batch in ([0, 1, 2, 3, 4, 5, 6, 7], [3, -1, 2, 5, 4, 4, 4, 0]):
            float(f(numbers(9), batch=batch)), w.value

    loop()
    before = len(built)
    loop(), loop()
    assert len(built) == before


def test_programs_serve_every_split():
    """Uneven batches of many lengths with one variable of state: still few programs, whatever the order."""
    w = synk.shared(np.float32(0))
    f = synk.function(lambda x: x.sum(), then=lambda s: setattr(w, "value", w.value + s))
    lengths = [int(n) for n in np.random.default_rng(0).permutation(np.arange(1, 33))]
    for length in lengths:
        f(np.ones(32, np.float32), batch=length)
    assert f.stats.compilations <= 24
    assert float(w.value) == sum(lengths)


half = synk.shared(np.float32(0.5))


def test_a_function_that_names_its_variables_is_traced_once():
    """Those of its globals and its closure; what it does not read is not its own."""
    w, other, traces = synk.shared(np.float32(1)), synk.shared(np.float32(5)), []

    @synk.function
    def step(x):
        traces.append("step")
        return (w.value * half.value * x).sum() if traces else other.value

    @step.then
    def step(total):
        traces.append("then")
        w.value = w.value + total

    for _ in range(2):
        step(np.ones(8, np.float32))
    assert float(w.value) == 25
    assert (traces, step.shared) == (["step", "then"], (w, half))


def test_profiles_show_names(tmp_path):
    """Programs are called by their functions, those of collectives by what they do; launches are ranges of these names."""
    total, w = synk.function(lambda x: x.sum(), name="total"), synk.shared(numbers(4))
    total(numbers(8)), synk.all_reduce(w)
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(total(numbers(8)))
        synk.all_reduce(w)
    (path,) = tmp_path.rglob("*.xplane.pb")
    names = path.read_bytes()
    for name in (b"total", b"jit(total)", b"synk.collectives.reduce_body", b"jit(synk.collectives.reduce_body)"):
        assert re.search(rb"[^\w.(]" + re.escape(name) + rb"[^\w.)]", names), name


@pytest.mark.parametrize("call", ["debug", "io", "pure"])
@pytest.mark.parametrize("rows", [6, 7])
def test_a_branch_of_one_replica_calls_the_host_once(call, rows):
    """In the function and in then, on devices and on simulated replicas."""
    told = []

    def note(value):
        told.append(float(value))
        return np.float32(0)

    def tell(value):
        if call == "debug":
            jax.debug.callback(note, value)
        elif call == "io":
            io_callback(note, jax.ShapeDtypeStruct((), np.float32), value)
        else:
            return jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), value, vmap_method="sequential")
        return jnp.float32(0)

    def part(x):
        total = x.sum()
        return total + lax.cond(synk.rank() == 0, tell, lambda value: jnp.float32(0), total)

    def then(total):
        return total + lax.cond(synk.rank() == 0, tell, lambda value: jnp.float32(0), total)

    for kind in ("devices", "simulated"):
        with group_of(kind, 3):
            f = synk.function(part, then=then)
            for _ in range(2):
                told.clear()
                assert float(f(np.ones(rows, np.float32))) == rows
                jax.effects_barrier()
                assert sorted(told) == [float(-(-rows // 3)), float(rows)]


EIGHT = np.arange(8, dtype=np.float32)


def test_options_of_jax_are_part_of_a_program(four):
    """Under other options the function is traced anew, as by jax.jit."""
    f = synk.function(lambda x: x.sum(), name="f")
    assert f(EIGHT.astype(np.float64)).dtype == np.float32
    jax.config.update("jax_enable_x64", True)
    try:
        assert f(EIGHT.astype(np.float64)).dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)


def test_dtypes_that_narrow_to_one_share_a_program(four):
    """float64 rows are float32 rows."""
    f = synk.function(jnp.sum)
    f(EIGHT), f(EIGHT.astype(np.float64))
    assert f.stats.compilations == 1


@pytest.mark.parametrize("slices", ["mean", "max", "last", "add"])
def test_programs_of_slices_know_what_they_take(slices):
    """A variable that is written but not read is taken by the programs of some totals only."""
    with group_of("devices", 2):
        c = synk.shared(np.float32(0))
        f = synk.function(lambda x: c.update(jnp.sum(x), slices=slices) or jnp.sum(x))
        for k in (2, 3, 2):
            assert float(f(np.arange(5, dtype=np.float32), num_slices=k)) == 10


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_gather_nothing(op):
    """No replica takes the whole arrays of all."""
    f = synk.function(lambda x: tuple(y[:4] for y in (x, x.astype(jnp.int32), x > 0)), outputs=(op, op, op))
    x = numbers(8)
    with group_of("devices", 2):
        assert "all-gather" not in str(f.compile(x).as_text())
        assert_close(f(x)[0], getattr(np, op)([x[:4], x[4:]], 0))
