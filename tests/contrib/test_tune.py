"""Step.with_options and synk.contrib.tune: other programs over the same variables, and which of them is fastest here."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import (
    GROUPS,
    assert_close,
    assert_same,
    first_of,
    group_of,
    interrupted,
    needs_plugin,
    slow,
    slow_but,
    unchanged,
)

RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(23, 4)).astype(np.float32)  # which neither 2 nor 3 divides
Y = RANDOM.normal(size=(23, 300)).astype(np.float32)
START = {"w": RANDOM.normal(size=(4, 300)).astype(np.float32), "b": np.zeros(300, np.float32)}
# Of which a leaf lies in shards.
WIDE = START | {"w": RANDOM.normal(size=(4, 4200)).astype(np.float32)}


@pytest.fixture(params=first_of(*GROUPS[1:], GROUPS[0]), ids=str)
def replicas(request):
    with group_of(*request.param) as group:
        yield group


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"][:, :300]) + params["b"][None] - y) ** 2)


def made(fn=loss, start=START, optimizer=None, **options):
    start = WIDE if options.keys() & {"shard_optimizer", "shard_params"} else start
    return synk.train.step(fn, start, optimizer or optax.sgd(0.1, momentum=0.9), **options)


def rows_of(text):
    """Return the rows of the table by the names of settings: the rest of each line."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
    return {line.split("  ")[0]: line for line in lines}


def waits(seconds_of):
    """Make a loss whose parts take as long as `seconds_of` their rows."""

    def wait(x):
        time.sleep(seconds_of(len(x)))
        return np.float32(0)

    def slow_loss(params, x, y):
        zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), x, vmap_method="sequential")
        return loss(params, x, y) + jax.lax.stop_gradient(zero)

    return slow_loss


# with_options


def test_steps_by_turns_are_one_training(replicas):
    """Steps with other options go on from the same variables, and give the same training."""
    step, alone = made(), made()
    others = [step.with_options(num_slices=2), step.with_options(barrier=False), step.with_options(num_slices="auto")]
    for other in (step, *others[:2], step):
        assert_close(other(X, Y), alone(X, Y))
    assert_close(step.params.value, alone.params.value)
    assert all(other.variables is step.variables for other in others)


def test_number_of_slices(group):
    """The number becomes the default of all kinds of calls, and a call's own number wins."""
    step = made()
    sliced = step.with_options(num_slices=3)
    step(X, Y)
    assert step.stats.calls == 1 and sliced.stats.calls == 0
    want = step.serial(X, Y)
    assert_close(next(iter(sliced.stream([(X, Y)]))), want)
    assert sliced.compile(X, Y).as_text() and sliced.blame(X, Y) is None
    assert (sliced.explain(X, Y).num_slices, sliced.explain(X, Y, num_slices=1).num_slices) == (3, 1)
    assert len(list(sliced.with_options(barrier=True).iterate(X, Y, batches=[23]))) == 1


def test_compiler_options(group):
    """Those of `step` and of `with_options` reach XLA together."""
    option = {"xla_cpu_enable_fast_math": False}
    step = made(compiler_options=option)
    assert_close(step(X, Y), made()(X, Y))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        made(compiler_options={"no_such_option": 1})(X, Y)
    more = step.with_options(compiler_options={"xla_cpu_prefer_vector_width": 256})
    assert dict(more.function._spec.compiler_options) == {**option, "xla_cpu_prefer_vector_width": 256}
    assert_close(more(X, Y), step.with_options(barrier=False).serial(X, Y), rtol=1)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"shard_params": True}])
def test_wire_and_back(group, options):
    """A step by another wire is what `synk.train.step` makes with it."""
    step, narrow = made(**options), made(wire="int8", **options)
    assert_same(step.with_options(wire="int8")(X, Y), narrow(X, Y))
    assert_same(step.params.value, narrow.params.value)
    back, exact = narrow.with_options(wire=None), made(**options)
    exact.params.value, exact.opt_state.value = narrow.params.value, narrow.opt_state.value
    assert_same(back(X, Y), exact(X, Y))
    assert_same(narrow.params.value, exact.params.value)


def test_wrong_options(group):
    """Messages name the option."""
    step = made()
    for options, kind, text in [
        ({"num_slices": 0}, ValueError, "with_options: num_slices is 0"),
        ({"barrier": 1}, TypeError, "with_options: barrier is .*1.*give True or False"),
        ({"wire": "bf8"}, ValueError, "with_options: wire 'bf8'"),
        ({"wire": synk.contrib.PowerSGD(1)}, ValueError, "with_options: wire=.*make another step by synk.train.step"),
        ({"compiler_options": 3}, TypeError, "with_options: compiler_options is"),
    ]:
        with pytest.raises(kind, match=text):
            step.with_options(**options)
    with pytest.raises(ValueError, match="blocks=4"):
        made(blocks=4).with_options(wire="bf16")
    with pytest.raises(ValueError, match="PowerSGD"):
        made(wire=synk.contrib.PowerSGD(1)).with_options(wire=None)
    with pytest.raises(ValueError, match="PowerSGD"):
        synk.contrib.tune(made(wire=synk.contrib.PowerSGD(1)), X, Y, wires="bf16")
    with pytest.raises(ValueError, match="num_slices is 0"):
        synk.contrib.tune(step, X, Y, num_slices=0)
    with pytest.raises(ValueError, match=r"tune\(\w+\): seconds"):
        synk.contrib.tune(step, X, Y, seconds=0)
    with pytest.raises(ValueError, match=r"tune\(\w+\): seconds"):
        synk.contrib.tune(step, X, Y, seconds=float("inf"))


@needs_plugin
def test_settings_for_gpus():
    """XLA makes another program of each setting: more bytes in one all-reduce, and no barrier."""
    weights = [jax.ShapeDtypeStruct((1024, 1024), np.float32)] * 6

    def deep(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    with synk.target("h100", 4):
        step, x = made(deep, weights, optax.sgd(0.1)), jax.ShapeDtypeStruct((512, 1024), np.float32)
        bound = "xla_gpu_all_reduce_combine_threshold_bytes"
        by_bytes = [step.with_options(compiler_options={bound: mib << 20}) for mib in (1, 32)]
        few, many = (option.compile(x).as_text().count("all-reduce-start(") for option in reversed(by_bytes))
        assert few == 1 < many
        assert step.compile(x).as_text() != step.with_options(barrier=False).compile(x).as_text()
        with pytest.raises(synk.SynkError, match="tune"):
            synk.contrib.tune(step, x)


# tune

STEPS = {
    "plain": {},
    "kept": {"donate": False},
    "adam": {"optimizer": optax.adam(0.1), "ema": 0.9, "clip": 1.0},
    "state in shards": {"shard_optimizer": True},
    "in shards": {"shard_params": True},
    "low rank": {"wire": synk.contrib.PowerSGD(2)},
    "narrow": {"wire": "bf16"},
    "blocks": {"blocks": 4},
    "checked": {"nan": "raise"},
}


@pytest.mark.parametrize(
    ("replicas", "name"),
    slow_but(
        [(GROUPS[1], "plain")],
        [*((group, "plain") for group in GROUPS), *((GROUPS[1], name) for name in STEPS if name != "plain")],
    ),
    ids=str,
    indirect=["replicas"],
)
def test_changes_nothing(replicas, name, capsys):
    """Before the first step and after some: variables, stats and all later steps are as without tune."""
    step, untouched = made(**STEPS[name]), made(**STEPS[name])
    for calls in range(2):
        with unchanged(*step.variables.values()):
            options = synk.contrib.tune(step, X, Y, seconds=0.1 if calls else 30)
        assert step.stats.calls == calls
        assert_same(step(X, Y), untouched(X, Y))
        fast = step.with_options(**options)
        assert_close(fast(X, Y), untouched(X, Y), rtol=1e-2)
        for mine, other in zip(step.variables.values(), untouched.variables.values(), strict=True):
            other.set_value(mine.get_value()) if mine._state.is_equal else None
        if not all(variable._state.is_equal for variable in step.variables.values()):
            return
    text = capsys.readouterr().out
    assert "as it is" in text and "wire=" not in text and "more than rounding" not in text
    # With blocks slices change nothing.
    assert ("num_slices=4" in text) == (name != "blocks")


def test_what_is_compiled_serves_later(group, capsys):
    """The step's own program is compiled once; a warm step goes on without another compilation."""
    step = made()
    synk.contrib.tune(step, X, Y, seconds=0.01)
    step(X, Y)
    assert step.stats.compilations == 0
    assert "not tried: no time is left" in capsys.readouterr().out


def test_chooses_what_is_faster(group, capsys):
    """Parts that take long if they have many rows run in slices."""
    step = made(waits(lambda rows: 0.04 * (rows > 8)))
    options = synk.contrib.tune(step, X, Y, seconds=3)
    table = rows_of(capsys.readouterr().out)
    assert options in ({"num_slices": 2}, {"num_slices": 4})
    assert "differs by" in table["num_slices=2"] and table["num_slices=2"].endswith("chosen")
    assert f"=> step.with_options(num_slices={options['num_slices']})" in table


@pytest.mark.slow
def test_stays_with_what_is_fastest(group, capsys):
    """Parts that take equally long run in one, whatever the step has been told."""
    step = made(waits(lambda rows: 0.003))
    assert synk.contrib.tune(step, X, Y, seconds=30) == {} and "=> as it is" in rows_of(capsys.readouterr().out)
    assert synk.contrib.tune(step, X, Y, seconds=30, num_slices=2) == {} and "num_slices" not in capsys.readouterr().out
    assert synk.contrib.tune(step.with_options(num_slices=4), X, Y, batch=22, seconds=30) == {"num_slices": 1}


@pytest.mark.parametrize("blocks", [4, None])
def test_slices_are_tried_where_they_matter(group, blocks, capsys):
    """With blocks a program is the same in any number of slices, so there is nothing to race."""
    assert synk.contrib.tune(made(blocks=blocks), X, Y, seconds=0.01) == {}
    assert ("num_slices" in capsys.readouterr().out) == (blocks is None)


def test_steps_in_a_row_are_timed(group, capsys):
    """They are told and not chosen, since loops ask for them; a step that runs in slices has none."""
    step = made()
    options = synk.contrib.tune(step, X, Y, batch=22, seconds=30, num_slices=1)
    row = rows_of(capsys.readouterr().out)["per_launch=4"]
    assert " ms " in row and row.endswith("for iterate and stream")
    assert "per_launch" not in options
    synk.contrib.tune(step, X, Y, batch=22, seconds=30, num_slices=2)
    assert rows_of(capsys.readouterr().out)["per_launch=4"].endswith("not tried: its rows run in slices")


def test_other_threads_go_on(group, capsys):
    """A thread that trains meanwhile waits for one step at a time, and makes no answer another one."""
    step, is_over, times = made(waits(lambda rows: 0.01 * (rows > 8))), threading.Event(), []

    def train():
        while not is_over.wait(0.01):
            start = time.perf_counter()
            step(X, Y)
            times.append(time.perf_counter() - start)

    step(X, Y)
    thread = threading.Thread(target=train)
    thread.start()
    try:
        synk.contrib.tune(step, X, Y, seconds=4)
    finally:
        is_over.set()
        thread.join()
    assert len(times) > 10 and sorted(times)[len(times) // 2] < 1
    assert "more than rounding" not in capsys.readouterr().out


def test_refuses_another_answer(group, capsys):
    """A loss across rows has another answer in slices, which is not chosen however fast."""
    wait = waits(lambda rows: 0.02 * (rows > 8))

    def across(params, x, y):
        return wait(params, x, y) + jnp.std(x @ params["w"])

    assert synk.contrib.tune(made(across), X, Y, seconds=3) == {}
    assert rows_of(capsys.readouterr().out)["num_slices=2"].endswith("more than rounding")


def test_rounding_that_an_optimizer_makes_large(group, capsys):
    """Adam makes whole steps of gradients that should be 0; gradients tell that it is rounding."""

    def shifted(params, x):
        return jnp.mean(x @ params) - jnp.dot(x.mean(0), params) + 0 * params.sum()

    step = synk.train.step(shifted, np.ones(4, np.float32), optax.adam(0.5, eps=1e-30))
    synk.contrib.tune(step, X * 100 + 1 / 3, seconds=30)
    row = rows_of(capsys.readouterr().out)["num_slices=2"]
    assert float(row.split("differs by ")[1].split(",")[0]) > 0.01 and "more than rounding" not in row


@pytest.mark.parametrize(("kind", "size"), [("devices", 2), slow("simulated", 3), ("devices", 1)])
def test_wires_are_tried_if_asked(kind, size, capsys):
    """What a wire rounds is within its tolerance; one replica sends nothing."""
    with group_of(kind, size):
        synk.contrib.tune(made(), X, Y, seconds=30, num_slices=1, wires=["bf16", "int8"])
    table = rows_of(capsys.readouterr().out)
    if size == 1:
        assert not any(name.startswith("wire") for name in table)
    else:
        assert "differs by" in table["wire='bf16'"] and "differs by" in table["wire='int8'"]
        assert not any("more than rounding" in row for row in table.values())


def test_what_does_not_run_is_a_row(group, capsys):
    """A function that communicates inside refuses slices; a program that dies in slices leaves all as it was."""

    def sums(params, x, y):
        return loss(params, x, y) + 0 * jax.lax.psum(x.sum(), "replica")

    synk.contrib.tune(made(sums), X[:22], Y[:22], seconds=30)
    assert "does not run: ValueError" in rows_of(capsys.readouterr().out)["num_slices=2"]

    def die(rows):
        if rows < 8:
            raise RuntimeError("too few rows")
        return 0

    step = made(waits(die))
    with unchanged(*step.variables.values()):
        assert synk.contrib.tune(step, X, Y, seconds=30) == {}
    assert "does not run" in rows_of(capsys.readouterr().out)["num_slices=2"]
    step(X, Y)
    with unchanged(*step.variables.values()), pytest.raises(Exception, match="too few rows"):
        synk.contrib.tune(step, X, Y, batch=8)
    assert np.isfinite(step(X, Y))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where the collector swallows one
def test_interrupts_change_nothing(group, capsys):
    """Ctrl-C in the middle leaves the variables of a step that donates, and the step goes on."""
    step = made(ema=0.5)
    before = step(X, Y)
    with unchanged(*step.variables.values()):
        interrupted(lambda: synk.contrib.tune(step, X, Y, seconds=20), 0.7)
    assert step.serial(X, Y) < before and np.isfinite(step(X, Y))


def test_under_a_trace(group):
    """It runs when called."""
    step = made()
    with pytest.raises(synk.SynkError, match="tune"):
        jax.jit(lambda x: synk.contrib.tune(step, x, Y))(X)


def test_refuses_a_step_that_is_not_finite(group):
    """With nan="raise" it raises as a step does."""
    step = made(nan="raise")
    with unchanged(*step.variables.values()), pytest.raises(FloatingPointError, match="tune"):
        synk.contrib.tune(step, X * np.nan, Y)
