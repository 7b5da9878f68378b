"""Per launch: several batches in one program give the results, values, errors and counts of single calls, bit for bit.

Each program here is run one by one first.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._runtime.executable import Program

from ..helpers import Bar, assert_same, group_of, needs_devices, raised_by, slow, slow_but

pytestmark = pytest.mark.usefixtures("group")

GROUPS = [("devices", 1), ("devices", 2), ("simulated", 3)]
X = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
in_groups = pytest.mark.parametrize("group", GROUPS, indirect=True, ids=str)
on_two_or_one = pytest.mark.parametrize("group", GROUPS[:2], indirect=True, ids=str)
of_k = pytest.mark.parametrize("k", [3, 16])


@pytest.fixture
def group(request):
    """Make a group of two replicas, or of those that a test names."""
    with group_of(*getattr(request, "param", ("devices", 2))) as group:
        yield group


def noise(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def flat(lists):
    """The results of lists, one after the other."""
    return [result for results in lists for result in results]


def seen(function, variables, results):
    """All that a loop has done: its results, the values of variables and what is counted."""
    values = [jax.tree.map(np.asarray, w.get_value(rank)) for w in variables for rank in range(synk.size())]
    return [jax.tree.map(np.asarray, results), values, function.stats.calls, function.stats.rows]


def momentum(**options):
    """A step with momentum, a count, a dict of results, and a rate that each batch may bring."""
    w, m, n = (
        synk.shared({"a": noise(4, 4), "b": noise(4)}),
        synk.shared({"a": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float32)}),
        synk.shared(0),
    )

    def loss(params, x):
        return jnp.mean(jnp.tanh(x[:, :4] @ params["a"] + params["b"][None]) ** 2)

    @synk.function(inputs=["x"], reduce="mean", **options)
    def step(x, rate):
        return jax.value_and_grad(loss)(w.value, x)

    @step.then
    def step(value, grads, rate):
        m.value = jax.tree.map(lambda a, b: 0.9 * a + b, m.value, grads)
        w.value = jax.tree.map(lambda a, b: a - rate * b, w.value, m.value)
        n.value = n.value + 1
        return {"loss": value, "count": n.value}

    return step, (w, m, n)


def local(**options):
    """An update in `fn`, by which replicas diverge, and which XLA would compute by other fused operations in a loop."""
    w = synk.shared(noise(4))

    @synk.function(inputs=["x"], outputs="first", **options)
    def step(x, rate):
        w.value = 0.9 * w.value + rate * jnp.mean(x, 0) * (1.0 + synk.rank().astype(jnp.float32))
        return w.value.sum()

    return step, (w,)


def gathered(**options):
    """Outputs with an entry a row, an update of an equal value, and one that nobody reads."""
    w, last = synk.shared(noise(4)), synk.shared(np.zeros(4, np.float32))

    @synk.function(inputs=["x"], outputs=("concat", "max"), **options)
    def step(x, rate):
        return x[:, :4] * w.value[None] * rate, jnp.max(x)

    @step.then
    def step(rows, most, rate):
        w.value = 0.5 * w.value + 0.25 * rows.mean(0)
        last.value = rows[0]
        return rows, most

    return step, (w, last)


def plain(**options):
    """No variable at all, and statistics."""

    @synk.function(inputs=["x"], outputs={"std": "merge", "mean": "mean"}, **options)
    def stats(x, rate):
        return {"std": synk.stats.std(x), "mean": jnp.mean(x) * rate}

    return stats, ()


PROGRAMS = [momentum, local, gathered, plain]


def run(make, k, batches, x=X, rates=None, **options):
    step, variables = make(**options)
    rate = 0.5 if rates is None else synk.each(rates)
    results = [*step.iterate(x, rate, batches=batches, per_launch=k)]
    return seen(step, variables, results if k is None else flat(results))


@pytest.mark.parametrize(
    ("make", "group", "size", "k"),
    [
        *[(make, group, 16, k) for make in PROGRAMS for group in GROUPS for k in (3, 16)],
        *[
            slow(make, GROUPS[-1], size, k)
            for make, size, k in zip(PROGRAMS, (7, 7, 2, 2), (3, 16, 3, 16), strict=True)
        ],
        slow(momentum, GROUPS[1], 2, 16),
        slow(local, GROUPS[1], 7, 3),
    ],
    indirect=["group"],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_same_bits(make, size, k):
    """Results, values on each replica, calls and rows of single calls: even and uneven rows, and shorter last ones."""
    batches = synk.minibatches(50, size, epochs=2)
    rates = np.linspace(0.1, 1, len(batches))
    assert_same(run(make, k, batches, rates=rates), run(make, None, batches, rates=rates))


@in_groups
@pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_place(place, shuffle):
    """Rows from the host and on the devices, by runs and by index, with prefetch and without."""
    batches = synk.minibatches(50, 6, shuffle=shuffle)
    wanted = run(momentum, None, batches)
    assert_same(run(momentum, 4, batches, synk.data(X, place=place)), wanted)


SIZES = [4, 4, 4, 2, 4, 4, 4, 2, 2, 4, 4, 4, 4, 4, 2, 2, 2]


@pytest.mark.parametrize(
    ("batches", "k", "lengths"),
    [
        (synk.minibatches(50, 8, epochs=2), 4, [4, 3, 4, 3]),
        (Bar(synk.minibatches(50, 8, epochs=2, start=3)), 3, [3, 1, 3, 3, 1]),
        (SIZES, 9, [9, 8]),
        (iter(SIZES), 9, [9, 8]),
        ([4, 2], 1, [1, 1]),
        ([], 3, []),
    ],
)
def test_a_list_is_k_items(batches, k, lengths):
    """Of whatever sizes, and fewer at the end of an epoch or of the source; `len` is known if that of the source is."""
    step, _ = plain()
    lists = step.iterate(X, 1.0, batches=batches, per_launch=k)
    if isinstance(batches, Iterator):
        with pytest.raises(TypeError, match="number of items is not known"):
            len(lists)
    else:
        assert len(lists) == len(lengths)
    assert [len(results) for results in lists] == lengths


@pytest.mark.parametrize(
    ("make", "group"),
    [*[(momentum, group) for group in GROUPS], *[slow(*case) for case in zip(PROGRAMS[1:], GROUPS, strict=True)]],
    indirect=["group"],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_same_bits_of_lists_of_several_sizes(make):
    batches = [np.random.default_rng(i).permutation(50)[:size] for i, size in enumerate(SIZES)]
    wanted = run(make, None, batches, rates=range(len(SIZES)))
    for k in (5, 9):
        assert_same(run(make, k, batches, rates=range(len(SIZES))), wanted)


@on_two_or_one
def test_three_items_of_one_size_or_more_are_one_launch(monkeypatch):
    """Fewer run alone. So there are at most two programs a size."""
    launched, launch = [], Program.launch
    monkeypatch.setattr(Program, "launch", lambda self, *args: launched.append(self.name) or launch(self, *args))
    step, _ = plain()
    flat(step.iterate(X, 1.0, batches=SIZES, per_launch=9))
    assert len(launched) == 5 + 2  # 444 2 444 2 2, 44444 222
    assert step.stats.compilations == 3


def test_nothing_is_asked_for_early_but_the_items_of_a_list():
    """So the state of a loader is that of the calls."""
    asked = []

    def loader():
        for size in SIZES:
            asked.append(size)
            yield X[:size], 1.0

    step, _ = plain()
    for _ in step.stream(loader(), prefetch=0, per_launch=4):
        assert len(asked) == step.stats.calls
    assert asked == SIZES


@pytest.mark.parametrize("start", range(15))
def test_length_from_any_start(start):
    """Also behind a progress bar."""
    step, _ = plain()
    batches = synk.minibatches(50, 8, epochs=2, start=start)
    lists = step.iterate(X, 1.0, batches=Bar(batches), per_launch=4) if start < 14 else ()
    assert len(lists) == len([*lists])


@in_groups
def test_one_program_for_full_and_short_lists():
    """It is compiled once."""
    step, _ = momentum()
    flat(step.iterate(X, 0.1, batches=synk.minibatches(48, 6, epochs=2), per_launch=5))
    assert step.stats.compilations == 1


@in_groups
@pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
def test_a_list_is_one_launch(monkeypatch, place):
    """Of any values of its own and any rows; small batches of `over` are launched together too."""
    launched, launch = [], Program.launch
    monkeypatch.setattr(Program, "launch", lambda self, *args: launched.append(self.name) or launch(self, *args))
    step, _ = momentum()
    loop = step.iterate(synk.data(X, place=place), synk.each(np.ones(6)), batches=synk.minibatches(48, 8), per_launch=3)
    flat(loop)
    flat(step.stream(((X[i : i + 5], 0.5) for i in range(9)), per_launch=3))
    assert launched == ["step"] * 5
    launched.clear()
    synk.function(lambda x: x.sum(), name="sum").over(X, batches=synk.minibatches(48, 8))
    assert launched == ["sum"] * 3  # the first sums, six batches, and the end


@in_groups
def test_body_runs_once_a_list_and_nothing_is_ahead():
    """What the body reads and writes is that of the serial program there; leaving it drops what follows."""
    w, x = synk.shared(0.0), synk.data(np.ones(12, np.float32))

    @synk.function
    def add(x):
        return jnp.sum(x)

    @add.then
    def add(part):
        w.value = w.value + part
        return w.value

    read = []
    for sums in add.iterate(x, batches=synk.minibatches(12, 2), prefetch=0, per_launch=2):
        read.append((float(w.value), [float(s) for s in sums], add.stats.calls))
        w.value = 10.0
        x[:] = 2.0
        if len(read) == 2:
            break
    assert read == [(4.0, [2.0, 4.0], 2), (18.0, [14.0, 18.0], 4)]
    assert float(w.value) == 10.0


@in_groups
@of_k
def test_keys_of_each_batch(k):
    """Typed and raw keys, and trees of values."""

    @synk.function(inputs=["x"], reduce="concat")
    def noisy(x, key, raw, add):
        return x + jax.random.normal(key) + jax.random.uniform(raw) + add["a"].astype(jnp.float32) * add["b"]

    keys = jax.random.split(jax.random.key(1), 9)
    raw = jax.random.split(jax.random.PRNGKey(2), 9)
    values = {"a": synk.each(range(9)), "b": np.float32(3)}

    def results(k):
        return [
            *noisy.iterate(X, synk.each(keys), synk.each(raw), values, batches=synk.minibatches(50, 6), per_launch=k)
        ]

    assert_same(flat(results(k)), results(None))


@in_groups
@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_nan_stops_at_its_batch(at):
    """Batches before it count; the body sees their results; the error is that of the single call."""
    x = np.array(X)
    x[5 * at + 2, 1] = np.inf

    def until(k):
        step, variables = momentum(nan="raise")
        results, loop = [], step.iterate(x, 0.1, batches=synk.minibatches(50, 5, shuffle=False), per_launch=k)
        with pytest.raises(FloatingPointError) as raised:
            for result in loop:
                results += [result] if k is None else result
        assert next(loop, None) is None
        return [*seen(step, variables, results), str(raised.value)]

    assert_same(until(4), until(None))


@in_groups
@pytest.mark.parametrize("batches", [[4, 4, 60, 4], [4, 4, 4, [99, 1, 2, 3], 4], [4, 4, np.array([0.5] * 4)]])
def test_errors_come_at_their_batch(batches):
    """A batch that is refused, and a source that raises."""

    def until(k):
        step, variables = momentum()
        results, loop = [], step.iterate(X, 0.1, batches=batches, per_launch=k)
        with pytest.raises((IndexError, TypeError)) as raised:
            for result in loop:
                results += [result] if k is None else result
        return [*seen(step, variables, results), str(raised.value)]

    assert_same(until(4), until(None))


@in_groups
def test_source_that_raises():
    def batches():
        yield from [4, 4, 4]
        raise OSError("the disk is gone")

    step, variables = momentum()
    results = []
    with pytest.raises(OSError, match="disk"):
        for part in step.iterate(X, 0.1, batches=batches(), per_launch=2):
            results += part
    assert len(results) == step.stats.calls == int(variables[2].value) == 3


@in_groups
@of_k
def test_stream(k):
    """Items of any loader, which may use its memory again: arrays, mappings, other sizes, other trees of arguments."""
    memory = np.empty((6, 3), np.float32)

    def loader():
        for i in range(11):
            memory[:] = X[i : i + 6, :3]
            yield (memory[: 6 if i != 7 else 4], np.float32(i))
        yield {"x": X[:6, :3], "rate": 2.0}

    @synk.function(inputs=["x"], reduce="mean")
    def f(x, rate):
        return jnp.mean(x) * rate

    assert_same(flat(f.stream(loader(), per_launch=k)), [*f.stream(loader())])


@needs_devices(2)
def test_stream_of_arrays_and_data():
    """Rows that lie on devices already, and data of which each item has its own."""
    sum_ = synk.function(jnp.sum)
    for items in (
        [jnp.asarray(X[i : i + 6]) for i in range(7)],
        [synk.data(X[i : i + 6], place="broadcast") for i in range(7)],
    ):
        assert_same(flat(sum_.stream(iter(items), per_launch=3)), [sum_(item) for item in items])


@in_groups
@pytest.mark.parametrize(
    "options",
    [
        {"num_slices": 2},
        {"blocks": 3},
        {"conv": True},
        {"callback": True},
        {"engine": "jit"},
        {"scatter": True},
    ],
)
def test_what_does_not_repeat_runs_one_by_one(options, group):
    """Slices, blocks, convolutions on CPUs, callbacks: the same lists of the same results."""
    heard, slices = [], options.get("num_slices", 1)
    made = {name: value for name, value in options.items() if name in ("blocks", "engine")}

    @synk.function(inputs=["x"], outputs="scatter" if "scatter" in options else "sum", **made)
    def f(x):
        if "callback" in options:
            jax.debug.callback(heard.append, x[0, 0])
        if "conv" in options:
            x = jax.lax.conv_general_dilated(x[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0]
        return x if "scatter" in options else jnp.sum(x)

    batches = synk.minibatches(50, 6)
    lists = [*f.iterate(X, batches=batches, per_launch=4, num_slices=slices)]
    assert [len(results) for results in lists] == [4, 4, 1]
    got = [np.asarray(r[:] if isinstance(r, synk.typing.Data) else r) for r in flat(lists)]
    one = [
        np.asarray(r[:] if isinstance(r, synk.typing.Data) else r)
        for r in f.iterate(X, batches=batches, num_slices=slices)
    ]
    assert_same(got, one)
    assert f.stats.calls == 18


@in_groups
@pytest.mark.parametrize("size", [6, 7])
def test_communication_inside(size):
    """Rows that do not divide are run as those of one replica, batch by batch."""
    f = synk.function(lambda x: jnp.sum((x - synk.all_reduce(jnp.mean(x, 0), "mean")[None]) ** 2))
    batches = synk.minibatches(50, size)
    assert_same(flat(f.iterate(X, batches=batches, per_launch=4)), [*f.iterate(X, batches=batches)])


@in_groups
@pytest.mark.parametrize("place", ["host", "scatter"])
def test_updates_of_one_replica_of_all_devices(place):
    """Each list reads the variables as the list before has left them, where their group is seen by another."""

    def trained(**loop):
        w = synk.shared(np.ones(X.shape[1], np.float32))

        def f(x):
            w.value = 0.9 * w.value + x.mean(0)
            return x @ w.value

        f = synk.function(f, engine="jit", reduce="concat")
        data = synk.data(X, place=place)
        results = [*f.iterate(data, batches=[[3, 1, 2, 7]] * 4 + [[5, 2]] * 5, **loop)]
        return [flat(results) if loop else results, w.value]

    assert_same(trained(per_launch=4), trained())


@in_groups
def test_map_of_rows():
    f = synk.map(lambda x, a: jnp.sum(x) * a, inputs=["x"])
    batches = synk.minibatches(50, 6)
    assert_same(flat(f.iterate(X, 2.0, batches=batches, per_launch=4)), [*f.iterate(X, 2.0, batches=batches)])


@in_groups
@pytest.mark.parametrize(
    "options", [{}, {"ema": 0.9, "clip": 1.0}, {"wire": "bf16"}, {"shard_optimizer": True}, {"shard_params": True}]
)
def test_training_steps(options):
    """Steps of optax's, with all that they keep."""

    def trained(k):
        step = synk.train.step(
            lambda p, x: (jnp.mean((x[:, :3] @ p) ** 2), x[:, 0]),
            noise(3, 5500 if any("shard" in name for name in options) else 3),
            optax.sgd(0.1, momentum=0.9),
            aux="concat",
            **options,
        )
        results = [*step.iterate(X, batches=synk.minibatches(50, 8, epochs=2), per_launch=k)]
        return seen(step, step.variables.values(), results if k is None else flat(results))

    assert_same(trained(5), trained(None))


@in_groups
def test_collectives_inside(group):
    """By a name of the user's; the last batch does not divide."""
    w = synk.shared(noise(4, 4))

    @synk.function(reduce="mean", axis_name="batch")
    def step(x):
        y = x @ w.value
        return jnp.mean(jnp.tanh(y - jax.lax.pmean(y.mean(0), "batch")[None]) ** 2)

    rows = 6 * group.size
    batches = [slice(i, i + rows) for i in range(9)] + [5]
    assert_same(flat(step.iterate(X, batches=batches, per_launch=4)), [*step.iterate(X, batches=batches)])


@in_groups
@pytest.mark.parametrize("every", [1, 3, lambda steps: 1 + steps])
def test_local_steps(every):
    """Averages come after as many steps, also within a list."""

    def trained(k):
        told = []
        steps = synk.contrib.local_steps(
            lambda p, x: jnp.mean((x[:, :3] @ p) ** 2), noise(3, 3), optax.sgd(0.1), every=every,
            report=lambda step, loss: told.append((step, float(loss))),
        )  # fmt: skip
        results = [*steps.iterate(X, batches=synk.minibatches(50, 8, epochs=2), per_launch=k)]
        return [
            *seen(steps.function, steps.variables.values(), results if k is None else flat(results)),
            told,
            steps.steps,
        ]

    assert_same(trained(4), trained(None))


def test_resume_counts_batches(tmp_path):
    """It saves between lists, and leaves out batches that are done, with their values."""

    def until(stop, k):
        synk.close()
        synk.simulate(2)
        step, variables = momentum()
        names = dict(zip("wmn", variables, strict=True))
        loop = step.iterate(
            X, synk.each(np.linspace(0.1, 1, 14)), batches=synk.minibatches(50, 8, epochs=2), per_launch=k
        )
        items = synk.resume(loop, names, folder=tmp_path / str(k), save_every=1e-9)
        for i, _ in enumerate(items):
            if i == stop:
                break
        return items.done, [jax.tree.map(np.asarray, w.value) for w in variables]

    assert until(2, 4)[0] == 4 + 3  # the first list of the second epoch had begun
    done, values = until(None, 4)
    assert done == 14
    assert_same(values, until(None, None)[1])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_resume_with_a_loader_that_has_a_state(tmp_path, k):
    """The state that a save keeps is that of the items done, whatever sizes they have: no row is lost."""

    def until(stop):
        synk.close()
        synk.simulate(2)
        taken, count = 0, synk.shared(np.zeros(20, np.int32))

        def items():
            nonlocal taken
            for rows in synk.minibatches(20, 6, epochs=4, start=taken):
                taken += 1
                yield (rows,)

        f = synk.function(lambda rows: jnp.zeros(20, jnp.int32).at[rows].add(1))
        f.then(lambda new: setattr(count, "value", count.value + new))

        def left(done, extra):
            nonlocal taken
            taken = extra or 0
            assert taken == done
            return f.stream(items(), prefetch=0, per_launch=k)

        loop = synk.resume(left, {"count": count}, folder=tmp_path, save_every=1e-9, extra=lambda: taken)
        for i, results in enumerate(loop):
            assert len(results) == min(k, 16 - loop.done)
            if i == stop:
                break
        return loop.done, np.asarray(count.value)

    until(1)
    done, count = until(None)
    assert (done, count.tolist()) == (16, [4] * 20)


def test_bad_numbers():
    step, _ = plain()
    for bad in (0, -1, 1.5, "4", True):
        assert "per_launch" in str(raised_by(partial(step.iterate, X, 1.0, batches=[4], per_launch=bad)))
        assert "per_launch" in str(raised_by(partial(step.stream, [], per_launch=bad)))


def test_changes_between_lists(group):
    """A new variable, another object under a name, another group and single calls between them are all noticed."""
    factor = 2.0
    w = synk.shared(1.0)

    @synk.function
    def f(x):
        return jnp.sum(x) * factor * w.value

    x, batches = np.ones(12, np.float32), [4, 4]
    assert [float(y) for y in flat(f.iterate(x, batches=batches, per_launch=2))] == [8.0, 8.0]
    factor = 3.0
    assert [float(y) for y in flat(f.iterate(x, batches=batches, per_launch=2))] == [12.0, 12.0]
    w = synk.shared(10.0)
    assert [float(y) for y in flat(f.iterate(x, batches=batches, per_launch=2))] == [120.0, 120.0]
    assert float(f(x, batch=4)) == 120.0
    with group_of("simulated", 3):
        w = synk.shared(1.0)
        assert [float(y) for y in flat(f.iterate(x, batches=batches, per_launch=2))] == [12.0, 12.0]


@in_groups
@pytest.mark.parametrize("columns", [1, 3])
def test_same_bits_of_small_programs(columns):
    """XLA would compile the whole loop of a small program as one kernel."""
    x = noise(37, columns)

    def results(k):
        w, square = synk.shared(np.float32(0.5)), synk.function(lambda x: x.T @ x)
        step = synk.function(lambda x: x.sum())
        step.then(lambda s: setattr(w, "value", w.value * 0.9 + s * 0.1))
        loops = [f.iterate(x, batches=synk.minibatches(37, 5), per_launch=k) for f in (step, square)]
        values = [result for loop in loops for result in (loop if k is None else flat(loop))]
        return [np.asarray(value) for value in [*filter(lambda v: v is not None, values), w.value]]

    for k in (3, 16):
        assert_same(results(k), results(None))


@on_two_or_one
def test_a_refused_first_batch_changes_nothing():
    """Nothing of its list has run, so a variable that each replica updates is as it was."""
    w = synk.shared(np.float32(0.5))

    @synk.function(nan="raise")
    def f(x):
        w.value = w.value + 1
        return jnp.log(x).sum()

    x = np.ones(8, np.float32)
    x[1] = -1
    messages = []
    for k in (None, 4):
        with pytest.raises(FloatingPointError) as raised:
            flat(f.iterate(x, batches=[4, 4], per_launch=k))
        messages.append(str(raised.value))
        assert float(w.value) == 0.5
    assert messages[0] == messages[1]


@on_two_or_one
@pytest.mark.parametrize("form", ["rows", "data", "each"])
def test_integers_that_do_not_fit(form):
    """The results before them come, and then the error of the single call."""
    xi = np.arange(40)
    rates: list[object] = list(range(10))
    if form == "each":
        rates[5] = 2**40
    else:
        xi[22] = 2**40
    f = synk.function(lambda x, rate: x.sum() + rate, ["x"], name="f")
    x = synk.data(xi) if form == "data" else xi

    def until(k):
        results = []
        with pytest.raises(ValueError, match=r"f: argument") as raised:
            for result in f.iterate(x, synk.each(rates), batches=synk.minibatches(40, 4, shuffle=False), per_launch=k):
                results += [result] if k is None else result
        return [[int(r) for r in results], str(raised.value)]

    one = until(None)
    assert len(one[0]) == 5
    for k in (3, 16):
        assert until(k) == one


@on_two_or_one
def test_weak_results_stay_weak():
    """A number that is handed through takes the dtype of what it meets, as that of a single call does."""
    f = synk.function(lambda x, rate: (x.sum(), rate), ["x"], ("sum", "same"))
    for k in (None, 3):
        loop = f.stream([(X[:4], 0.5)] * 3, per_launch=k)
        assert all(rate.weak_type for _, rate in (loop if k is None else flat(loop)))


def test_no_program_of_more_calls_than_there_are():
    """So a large number costs nothing."""
    f = synk.function(lambda x: x.sum())
    assert len(flat(f.iterate(X, batches=synk.minibatches(50, 10), per_launch=10**9))) == 5


# Histories.


def batch_of(rng, rows):
    """A batch of any form, most of them of a few sizes."""
    size = int(rng.choice([6, 6, 6, 4, 1, 13]))
    return [
        lambda: size,
        lambda: slice(start := int(rng.integers(rows - size)), start + size),
        lambda: rng.permutation(rows)[:size],
        lambda: rng.integers(-rows, rows, size).tolist(),
        lambda: np.isin(np.arange(rows), rng.permutation(rows)[:size]),
        lambda: np.array([rows + 3] * size) if rng.random() < 0.2 else size,
    ][rng.integers(6)]()


def history(seed, k):
    """What a program of random loops, calls and writes does, with its errors."""
    rng = np.random.default_rng(seed)
    kind, n = [("devices", 1), ("devices", 2), ("devices", 4), ("simulated", 3)][rng.integers(4)]
    with group_of(kind, n):
        make = PROGRAMS[rng.integers(len(PROGRAMS))]
        nan = {"nan": "raise"} if rng.random() < 0.3 else {}
        step, variables = make(**nan)
        x = np.array(X)
        if nan:
            x[rng.integers(50, size=2)] = np.nan
        done = []
        for _ in range(4):
            batches = [batch_of(rng, 50) for _ in range(rng.integers(1, 20))]
            if rng.random() < 0.3:
                batches = synk.minibatches(50, int(rng.integers(3, 20)), epochs=2, seed=int(rng.integers(1000)))
            place = [None, "host", "scatter", "broadcast"][rng.integers(4)]
            rows = x if place is None else synk.data(x, place=place)
            rate = synk.each(rng.random(100).tolist()) if rng.random() < 0.5 else 0.25
            results = []
            try:
                loop = step.iterate(rows, rate, batches=batches, prefetch=int(rng.integers(3)), per_launch=k)
                for result in loop:
                    results += [result] if k is None else result
            except (IndexError, FloatingPointError) as error:
                done.append(str(error))
            done.append(seen(step, variables, results))
            if rng.random() < 0.5 and not nan:
                done.append(jax.tree.map(np.asarray, step(rows, 0.5, batch=6)))
            for w in variables if rng.random() < 0.3 else ():
                w.value = jax.tree.map(np.asarray, w.get_value(0))
        return done


@pytest.mark.parametrize("seed", slow_but([0, 22], [*range(5), 22, 26]))
def test_histories(seed):
    """Random loops, calls and writes, warm and after errors, leave the same behind."""
    wanted = history(seed, None)
    for k in (3, 16):
        assert_same(history(seed, k), wanted)


def test_explain_says_how_many_calls_a_launch_has(group):
    """And why one."""
    f = synk.function(lambda x: jnp.sum(x))
    assert f.explain(X).per_launch == "several calls, if a loop asks for them"
    assert f.explain(X, num_slices=2).per_launch == "one call: its rows run in slices"
    noisy = synk.function(lambda x: jax.debug.print("{}", jnp.sum(x)))
    assert noisy.explain(X).per_launch == "one call: it has callbacks"
    linked = synk.function(lambda x: synk.all_reduce(jnp.sum(x), "sum"), outputs="first")
    assert linked.explain(X).per_launch == "several calls, if a loop asks for them"
    with jax.debug_nans(True):
        assert f.explain(X).per_launch == "one call: jax_debug_nans looks at single calls"
