"""First calls: with `law` in SYNK_CHECK each kind of call is checked before it runs, or a line says why not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import assert_close, assert_same, first_of, group_of, needs_devices

KINDS = first_of(("devices", 4), ("devices", 1), ("simulated", 3))
ROWS = np.arange(13, dtype=np.float32)


@pytest.fixture(autouse=True)
def law(monkeypatch):
    monkeypatch.setenv("SYNK_CHECK", "law")


@pytest.fixture(params=KINDS, ids=str)
def each(request):
    with group_of(*request.param) as group:
        yield group


def squares(w, x):
    return jnp.mean((w - x) ** 2)


@pytest.mark.parametrize("rows", [12, 13])
def test_a_wrong_function_is_stopped_on_every_way(each, rows):
    """Before it runs, and at each call until it is right."""
    x, w = ROWS[:rows], synk.shared(np.float32(0))
    f = synk.function(jnp.mean, name="f", then=lambda mean: setattr(w, "value", mean))
    g = synk.function(jnp.mean, name="g")
    for call in (
        lambda: f(x), lambda: f(x, num_slices=2), lambda: list(f.iterate(x, batches=[4, 8])), lambda: list(f.stream([x])),
        lambda: f(x), lambda: f(synk.data(x, place="scatter"), batch=8),
        lambda: g.over(x, batches=[4, 8]), lambda: g.over(source=[x, x]),
    ):  # fmt: skip
        with pytest.raises(synk.LawError, match=r'(?s)[fg]: on .* combined by "sum": .*"mean" would have matched'):
            call()
    assert w.value == f.stats.calls == 0


def test_a_wrong_step_is_stopped(each):
    """And takes no step."""
    step = synk.train.step(lambda w, x: jnp.sum((w - x) ** 2), np.float32(0), optax.sgd(0.1))
    for _ in range(2):
        with pytest.raises(synk.LawError, match="the loss: it is"):
            list(step.iterate(ROWS, batches=[12]))
    assert step.params.value == step.stats.calls == 0


def test_what_is_right_runs_and_is_checked_once(each, capsys):
    """The first call of each kind is, and none after it; answers and variables are those without a check."""
    traces = []

    def fn(x, rate):
        traces.append(x.shape)
        return rate * x.mean() + (synk.row_numbers() * 0).sum().astype(x.dtype)

    f = synk.function(fn, inputs=["x"], reduce="mean")
    step, same = (synk.train.step(squares, np.float32(0), optax.sgd(0.1, momentum=0.9)) for _ in range(2))
    assert_close(f(ROWS, 2.0), np.float32(12))
    count = len(traces)
    assert (13,) in traces  # the serial run
    assert_close(f(ROWS, 3.0), np.float32(18))
    assert len(traces) == count
    f(ROWS[:9], 2.0)
    assert (9,) in traces
    losses = [step(ROWS[:rows]) for rows in (13, 13, 8)]
    assert_close(losses, [same.serial(ROWS[:rows], update=True) for rows in (13, 13, 8)])
    assert_close(synk.map(lambda x: x * x)(ROWS), ROWS**2)
    assert_close(f.over(ROWS, 2.0, batches=[4, slice(4, 13)]), np.float32(12))
    assert f.stats.calls == 4
    assert capsys.readouterr().err == ""


def test_rows_that_travel_inside_are_of_the_law(four, capsys):
    """A gradient through `all_gather` scatters a sum; it is checked."""

    def loss(x):
        return jax.lax.all_gather(x, "replica", tiled=True).sum() ** 2 / synk.size()

    assert_close(synk.function(jax.grad(loss), reduce="concat")(ROWS[:12]), np.full(12, 132, np.float32))
    with pytest.raises(synk.LawError):
        synk.function(lambda x: jax.grad(loss)(x) * 2 / synk.size(), reduce="concat")(ROWS[:12])
    assert capsys.readouterr().err == ""


def drawn(x, key):
    return (x + jax.random.normal(synk.part_key(key), x.shape)).sum()


W = np.zeros(3, np.float32)
# Functions that the law does not speak of, or that have no serial run; and the word for it.
UNCHECKED = {
    "rank": (lambda: synk.function(lambda x: x.sum() + synk.rank().astype(x.dtype), name="f"), "synk.rank"),
    "axis_index": (lambda: synk.function(lambda x: x.sum() + jax.lax.axis_index("replica") * W[0], name="f"), "axis_index"),
    "part_key": (lambda: synk.function(lambda x: drawn(x, jax.random.key(0)), name="f"), "synk.part_key"),
    "rank in then": (
        lambda: synk.function(lambda x: x.sum(), name="f", then=lambda total: total + synk.rank() * W[0]), "synk.rank",
    ),
    "first": (lambda: synk.function(lambda x: x.sum(), reduce="first", name="f"), "the op 'first'"),
    "stack": (lambda: synk.function(lambda x: x.sum(), reduce="stack", name="f"), "the op 'stack'"),
    "callable": (lambda: synk.function(lambda x: x.sum(), reduce=lambda parts: parts.max(), name="f"), "the op 'callable'"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
def test_what_the_law_does_not_speak_of_is_left_unchecked(name, capsys):
    """A line says so, once a function."""
    make, word = UNCHECKED[name]
    f = make()
    with jax.numpy_dtype_promotion("standard"), group_of("simulated", 3):
        for rows in (12, 12, 9):
            f(ROWS[:rows])
    assert capsys.readouterr().err.splitlines() == [
        f"synk: f is left unchecked by SYNK_CHECK=law: the law does not speak of {word}"
    ]


def test_calls_under_a_trace_are_left_unchecked(each, capsys):
    """They run, and a line says so."""
    f = synk.function(jnp.mean, reduce="mean", name="f")
    assert_close(jax.jit(f)(ROWS), np.float32(6))
    assert_close(jax.grad(lambda x: f(x))(ROWS), np.full(13, 1 / 13, np.float32))
    assert capsys.readouterr().err == "synk: f is left unchecked by SYNK_CHECK=law: it is called under a trace\n"


def test_a_serial_run_that_does_not_fit_is_left_out(capsys):
    """The call runs without it."""

    def fn(x):
        if len(x) == 12:
            raise MemoryError("no room for 12 rows")
        return x.mean()

    f = synk.function(fn, reduce="mean", name="f")
    with group_of("simulated", 3):
        assert [float(f(ROWS[:12])), float(f(ROWS[:12]))] == [5.5, 5.5]
    assert capsys.readouterr().err.splitlines() == ["synk: f is left unchecked by SYNK_CHECK=law: no room for 12 rows"]


@needs_devices(4)
def test_replicas_that_go_ways_of_their_own(four, capsys):
    """Updates on each replica, and calls that find unequal ones, are no serial program's."""
    w = synk.shared(np.float32(0), name="w")
    synk.function(lambda x: setattr(w, "value", x.sum()), name="f")(ROWS)
    synk.function(lambda x: x.sum() * w.value, name="g")(ROWS)
    step = synk.contrib.local_steps(squares, np.float32(0), optax.sgd(0.1), name="local")
    for _ in range(3):
        step(ROWS)
    said = capsys.readouterr().err.splitlines()
    assert "synk: f is left unchecked by SYNK_CHECK=law: the law does not speak of updates of w on each replica" in said
    assert any(
        line.startswith("synk: g is left unchecked by SYNK_CHECK=law: w: its replicas may hold") for line in said
    )
    assert sum(line.startswith("synk: local is left unchecked") for line in said) == 1


def test_errors_of_a_call_come_as_without(each, capsys):
    """An error in the function is the user's own, and no line speaks of a check."""
    f = synk.function(lambda x: x.reshape(5), reduce="mean")
    with pytest.raises(TypeError, match="reshape"):
        f(ROWS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", ["law", "law,calls"])
def test_loops_of_lists(each, words, monkeypatch, capsys):
    """A wrong function is stopped at the first list, before it runs; a right one gives what it gives unchecked."""
    batches, w = synk.minibatches(13, 4, epochs=2), synk.shared(np.float32(0))
    wrong = synk.function(jnp.mean, name="f", then=lambda mean: setattr(w, "value", mean))

    def trained():
        step = synk.train.step(squares, np.float32(0), optax.sgd(0.1, momentum=0.9))
        lists = [*step.iterate(ROWS, batches=batches, per_launch=3)]
        return lists, step.params.value, step.stats.calls, step.stats.rows

    monkeypatch.setenv("SYNK_CHECK", words)
    for loop in (
        lambda: wrong.iterate(ROWS, batches=batches, per_launch=3),
        lambda: wrong.stream([ROWS] * 3, per_launch=3),
    ):
        with pytest.raises(synk.LawError, match=r'(?s)f: on .* combined by "sum": .*"mean" would have matched'):
            next(loop())
    assert w.value == wrong.stats.calls == 0
    checked = trained()
    assert [len(losses) for losses in checked[0]] == [3, 1] * 2
    monkeypatch.delenv("SYNK_CHECK")
    assert_same(checked, trained())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", ["", "0", "1", "calls"])
def test_only_law_checks_first_calls(words, monkeypatch):
    """Nothing is checked without it."""
    monkeypatch.setenv("SYNK_CHECK", words)
    with group_of("simulated", 3):
        assert_close(synk.function(jnp.mean)(ROWS[:12]), np.float32(16.5))


def test_the_list_of_checks(monkeypatch):
    """It has commas, and a word that is none of them is refused."""
    with group_of("simulated", 3):
        monkeypatch.setenv("SYNK_CHECK", "1, law")
        with pytest.raises(synk.LawError):
            synk.function(jnp.mean)(ROWS)
        monkeypatch.setenv("SYNK_CHECK", "laws")
        with pytest.raises(ValueError, match="SYNK_CHECK is 'laws' in the environment; give law, calls, or both"):
            synk.function(jnp.mean)(ROWS)
