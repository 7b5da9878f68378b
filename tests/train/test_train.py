"""Training steps: the serial optax loop is the oracle."""

import functools
import gc
import random
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import synk
import synk.train

from ..helpers import (
    assert_close,
    assert_same,
    group_of,
    interrupted,
    numbers,
    slow,
    slow_but,
    unchanged,
    values,
)

START = {"w": np.array([0.5, -1.0], np.float32), "b": np.float32(0.25)}
W, B = np.array([1.0, 0.5], np.float32), 0.1


def mean_loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def look(x):
    if (np.asarray(x) > 1000).any():
        raise RuntimeError("too large")
    return np.float32(0)


def dying_loss(params, x, y):
    """A program that dies on the device where a number of its rows is above 1000."""
    zero = jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), x, vmap_method="sequential")
    return mean_loss(params, x, y) + jax.lax.stop_gradient(zero)


def rows_of(n, seed=0):
    x = numbers(n, seed=seed) / 16
    return x, np.tanh(x @ W + B).astype(np.float32)


def masked_loss(params, x, y):
    """Only rows with a positive first column count; a part may have none."""
    mask = (x[:, 0] > 0).astype(jnp.float32)
    off = (jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2
    return synk.Weighted((off * mask).sum() / mask.sum(), mask.sum())


def plain(loss):
    """Its value, whether weighted or not."""

    def value(*args):
        out = loss(*args)
        return out.value if isinstance(out, synk.Weighted) else out

    return value


def serial(loss, tx, batches, params=START):
    """The loop without synk: losses, parameters and optimizer state."""
    params = jax.tree.map(jnp.asarray, params)
    opt_state, losses = tx.init(params), []
    for batch in batches:
        value, params, opt_state = one_step(loss, tx, params, opt_state, batch)
        losses.append(value)
    return losses, params, opt_state


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_step(loss, tx, params, opt_state, batch):
    value, grads = jax.value_and_grad(plain(loss))(params, *batch)
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, params, value=value)
    return value, optax.apply_updates(params, updates), opt_state


def trained(step, batches, **options):
    """The same of a synk step."""
    return [step(*batch, **options) for batch in batches], step.params.value, step.opt_state.value


# Synchronous steps.


@pytest.mark.smoke
@pytest.mark.parametrize(("loss", "slices"), [(mean_loss, 1), (masked_loss, 2)])
def test_step_is_the_serial_loop(four, loss, slices):
    """Losses, parameters and Adam's state; for rows that divide, that do not, and fewer than replicas."""
    batches, tx = [rows_of(n, seed=1) for n in (8, 7, 3)], optax.adam(0.1)
    step = synk.train.step(loss, START, tx)
    assert_close(trained(step, batches, num_slices=slices), serial(loss, tx, batches))
    step.check(*rows_of(9), num_slices=slices)


def test_a_part_without_weight_counts_for_nothing(four):
    """Its own mean is 0 / 0, and so are its gradients; with no weight at all the loss is NaN, as serially."""
    x, y = rows_of(8)
    x[:, 0] = -1
    x[5, 0] = 1
    step = synk.train.step(masked_loss, START, optax.sgd(0.1))
    assert_close(trained(step, [(x, y)])[:2], serial(masked_loss, optax.sgd(0.1), [(x, y)])[:2])
    assert np.isnan(synk.train.step(masked_loss, START, optax.sgd(0.1))(x[:5], y[:5]))


@pytest.mark.parametrize("rows", [slow(8), 3])
def test_clipping_is_of_the_combined_gradient(four, rows):
    """Not of each replica's own, whose norms are larger."""
    batches = [rows_of(rows)] * 2
    norm = np.linalg.norm(np.hstack(jax.tree.leaves(jax.grad(mean_loss)(START, *batches[0]))))
    tx = optax.sgd(0.5, momentum=0.9)
    step = synk.train.step(mean_loss, START, tx, clip=float(norm) / 3)
    want = serial(mean_loss, optax.chain(optax.clip_by_global_norm(float(norm) / 3), tx), batches)
    assert_close(trained(step, batches)[:2], want[:2])
    loose = synk.train.step(mean_loss, START, tx, clip=float(norm) * 9)
    assert_close(trained(loose, batches), serial(mean_loss, tx, batches))


def test_a_moving_average(four, tmp_path):
    """Of the parameters after each step; saved and loaded with the step, and left alone by a step that is refused."""
    batches, tx = [rows_of(n, seed=1) for n in (8, 7, 3, 8)], optax.sgd(0.1)
    step = synk.train.step(mean_loss, START, tx, ema=0.75)
    assert_close(step.ema.value, START)
    want = START
    for i, batch in enumerate(batches):
        step(*batch, num_slices=1 + i % 2)
        want = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, want, step.params.value)
        assert_close(step.ema.value, want)
        with pytest.raises(ValueError, match="rows"):
            step(batch[0], batch[1][:1])
    assert list(step.variables) == ["params", "opt_state", "ema"]
    synk.save(tmp_path, step.variables, step=4)
    other = synk.train.step(mean_loss, START, tx, ema=0.75)
    assert synk.load(tmp_path, other.variables)[0] == 4
    assert_close(trained(other, batches[:1]), trained(step, batches[:1]))
    assert_close(other.ema.value, step.ema.value)
    assert synk.train.step(mean_loss, START, tx).ema is None


def with_aux(params, x, y):
    scores = jnp.tanh(x @ params["w"] + params["b"])
    off = {"largest": jnp.abs(scores - y).max(), "scores": scores, "count": len(x)}
    return jnp.mean((scores - y) ** 2), (off, synk.Weighted(scores.mean(), float(len(x))))


@pytest.mark.parametrize("slices", [1, 2])
def test_aux_outputs_combine_by_their_ops(four, slices):
    """Beside the loss, in any tree; they go out from the parameters before the step."""
    x, y = rows_of(7)
    ops = ({"largest": "max", "scores": "concat", "count": "sum"}, "mean")
    step = synk.train.step(with_aux, START, optax.sgd(0.1), aux=ops)
    loss, (off, mean) = step(x, y, num_slices=slices)
    value, (want, weighted) = with_aux(START, x, y)
    assert_close((loss, off, mean), (value, want, weighted.value))


def test_inputs_batch_and_iterate(four):
    """What is broadcast goes whole to each replica; batches pick rows; results come in order."""

    def loss(params, x, y, *, scale):
        return mean_loss(params, x, y) * scale

    x, y = rows_of(21)
    batches = list(synk.minibatches(21, 8, epochs=2))
    want = serial(functools.partial(loss, scale=2.0), optax.sgd(0.1), [(x[i], y[i]) for i in batches])
    step = synk.train.step(loss, START, optax.sgd(0.1), inputs=["x", "y"])
    one = step(x, y, scale=2.0, batch=batches[0])
    results = step.iterate(x, y, scale=2.0, batches=batches[1:])
    assert len(results) == 5
    assert_close(([one, *results], step.params.value), want[:2])
    assert step.function.stats.calls == 6


def test_strict_promotion(four):
    """Nothing of synk's own mixes dtypes."""
    with jax.numpy_dtype_promotion("strict"):
        synk.train.step(masked_loss, START, optax.sgd(0.1), clip=1.0)(*rows_of(7), num_slices=2)
        synk.contrib.local_steps(masked_loss, START, optax.sgd(0.1), every=1)(*rows_of(7))


def test_a_bound_keyword_is_a_constant(four):
    """A partial's array is neither scattered nor broadcast."""
    loss = functools.partial(lambda params, x, y, weights: mean_loss(params, x * weights, y), weights=W[None])
    step = synk.train.step(loss, START, optax.sgd(0.1), name="scaled")
    assert_close(step(*rows_of(7)), loss(START, *rows_of(7)))


@pytest.mark.parametrize("make", [synk.train.step, synk.contrib.local_steps])
def test_given_arrays_need_not_stay(make):
    """Variables take the place of the parameters and the state, of which a step keeps no second copy."""
    given = np.ones(3, np.float32), np.zeros(3, np.float32)
    left = [*map(weakref.ref, given)]
    step = make(lambda w, s, x: ((w * x).mean(), s), given[0], optax.sgd(0.1), state=given[1])
    del given
    gc.collect()
    assert [reference() for reference in left] == [None, None] and step.state is not None


def test_variables_are_taken_and_shared(four):
    """Parameters may be a shared variable already; the optimizer's state starts from its value."""
    params = synk.shared(START, name="mine")
    step = synk.train.step(mean_loss, params, optax.adam(0.1))
    step(*rows_of(7))
    assert step.params is params and step.opt_state.value[0].count == 1 and step.state is None
    assert {*step.function.shared} == {params, step.opt_state}


def test_the_optimizer_sees_the_combined_loss(four):
    """Optimizers that ask for `value` get it."""
    batches = [rows_of(7)] * 6
    tx = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=0, factor=0.5))
    assert_close(trained(synk.train.step(mean_loss, START, tx), batches), serial(mean_loss, tx, batches))


given = None


@pytest.mark.parametrize("make", [synk.train.step, synk.contrib.local_steps])
def test_a_variable_that_is_made_again(four, monkeypatch, make):
    """A step that trains the old one says so, as where a notebook's cell ran twice; not if the new one has a step too."""

    def made():
        monkeypatch.setitem(globals(), "given", synk.shared(START, name="given"))
        return lambda: make(mean_loss, given, optax.sgd(0.1))

    step, rows = made()(), rows_of(8)
    step(*rows)
    again = made()
    with pytest.raises(synk.SynkError, match=f"it trains the variable given .* by {make.__module__}.{make.__name__};"):
        step(*rows)
    again()
    step(*rows)
    assert given.value["b"] == START["b"]


def test_one_trace(four):
    """The loss is traced once a shape, also at the first call."""
    traces = []

    def loss(params, x, y):
        traces.append(x.shape)
        return mean_loss(params, x, y)

    step = synk.train.step(loss, START, optax.adam(0.1))
    for _ in range(3):
        step(*rows_of(8))
    assert traces == [(2, 2)]


# Model state.


class Net(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(3)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, axis_name=self.axis_name)(x)
        return nn.Dense(1)(x)[:, 0]


def batch_norm(axis_name=None):
    """A network with BatchNorm: its loss, parameters and running averages."""
    net = Net(axis_name)
    start = net.init(jax.random.key(0), numbers(2), train=True)

    def loss(params, stats, x, y, net=net):
        out, new = net.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new["batch_stats"]

    return loss, start["params"], start["batch_stats"]


def mean_by(weights, trees):
    return jax.tree.map(lambda *leaves: np.average(leaves, 0, weights), *trees)


def serial_norm(loss, params, stats, batches, parts=1):
    """One step a batch, gradients and running averages weighted by the rows of each part."""
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for x, y in batches:
        each = [(p, q) for p, q in zip(np.array_split(x, parts), np.array_split(y, parts), strict=True) if len(p)]
        grads, news = [], []
        for p, q in each:
            (_, new), grad = gradient(params, stats, p, q)
            grads.append(grad), news.append(new)
        grad, stats = (mean_by([len(p) for p, _ in each], trees) for trees in (grads, news))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grad)
    return params, stats


@pytest.mark.slow
def test_batch_norm_is_normalised_per_replica(four):
    """Running averages are combined weighted by rows; that this is not the serial step, check says."""
    loss, params, stats = batch_norm()
    batches = [rows_of(n, seed) for seed, n in enumerate((7,))]
    step = synk.train.step(lambda p, s, x, y: loss(p, s, x, y), params, optax.sgd(0.1), state=stats, name="norm")
    with pytest.raises(synk.LawError, match=r"state.*BatchNorm_0"):
        step.check(*batches[0])
    for batch in batches:
        step(*batch)
    want = serial_norm(loss, params, stats, batches, parts=4)
    assert_close((step.params.value, step.state.value), want, rtol=1e-4)


def test_batch_norm_over_the_whole_batch(four):
    """With the axis named it is the serial step, for any rows; slices raise."""
    loss, params, stats = batch_norm("replica")
    alone, _, _ = batch_norm()
    batches = [rows_of(n, seed) for seed, n in enumerate((8, 7, 12))]
    step = synk.train.step(lambda p, s, x, y: loss(p, s, x, y), params, optax.sgd(0.1), state=stats, name="norm")
    for batch in batches:
        step(*batch)
    assert_close((step.params.value, step.state.value), serial_norm(alone, params, stats, batches), rtol=1e-4)
    with pytest.raises(ValueError, match=r"norm: it communicates inside.*without slices, as many on every replica"):
        step(*rows_of(8), num_slices=2)


def counting(params, state, x, y):
    return mean_loss(params, x, y), {"calls": state["calls"] + 1, "mean": x.mean(0)}, x.max()


def test_state_holds_counts_too(four):
    """Integers take the largest, floats the mean by rows; aux outputs follow the state."""
    x, y = rows_of(7)
    state = {"calls": np.int32(5), "mean": np.zeros(2, np.float32)}
    step = synk.train.step(counting, START, optax.sgd(0.1), state=state, aux="max")
    loss, largest = step(x, y, num_slices=2)
    assert_close((loss, largest), (mean_loss(START, x, y), x.max()))
    assert_close(step.state.value, {"calls": np.int32(6), "mean": x.mean(0)})


def noisy(params, state, x, y):
    """A model that draws noise; its keys advance, and its count does."""
    typed, noise = jax.random.split(state["typed"])
    raw, _ = jax.random.split(state["raw"])
    scale = 1 + jax.random.uniform(noise) / 8
    return mean_loss(params, x, y) * scale, {"typed": typed, "raw": raw, "calls": state["calls"] + 1}


def noisy_state(calls):
    """After so many calls."""
    typed, raw = jax.random.key(1), jax.random.PRNGKey(2)
    for _ in range(calls):
        typed, raw = jax.random.split(typed)[0], jax.random.split(raw)[0]
    return {"typed": typed, "raw": raw, "calls": np.int32(calls)}


def assert_state(state, calls):
    want = noisy_state(calls)
    assert_close([jax.random.key_data(state["typed"]), state["raw"], state["calls"]],
                 [jax.random.key_data(want["typed"]), want["raw"], want["calls"]])  # fmt: skip


@pytest.mark.slow
@pytest.mark.smoke
def test_keys_in_the_state_advance(four):
    """Typed ones and raw ones alike, once a step; also in slices, and where some replicas have no rows."""
    step = synk.train.step(noisy, START, optax.sgd(0.1), state=noisy_state(0))
    for calls, (rows, slices) in enumerate([(8, 1), (3, 1), (7, 2), (9, 3)], 1):
        step(*rows_of(rows), num_slices=slices)
        assert_state(step.state.value, calls)
    synk.check_replicas(step.state)
    step.check(*rows_of(7))


def test_step_shows_its_function(four):
    """Its stats, its serial answer, its program."""
    step = synk.train.step(mean_loss, START, optax.sgd(0.1))
    assert "HloModule" in str(step.compile(*rows_of(8)).as_text())
    assert_close(step.serial(*rows_of(8)), mean_loss(START, *rows_of(8)))
    step(*rows_of(8), batch=7)
    assert (step.stats.calls, step.stats.rows, step.stats is step.function.stats) == (1, 7, True)


def test_a_check_speaks_of_loss_and_gradient(four):
    """It names no op that a step does not take, nor what differs because these do; of aux outputs it names the op."""

    def said(loss, **options):
        step = synk.train.step(loss, {"w": np.float32(1)}, optax.sgd(0.1), **options)
        with pytest.raises(synk.LawError) as caught:
            step.check(np.arange(9, dtype=np.float32))
        return str(caught.value).splitlines()[1:]

    summed = said(lambda p, x: jnp.sum((p["w"] * x - 1) ** 2))
    assert [line.split(":")[0].strip() for line in summed[:-1]] == ["the loss", "the gradient of params['w']"]
    assert "would have matched" not in "".join(summed) and summed[-1].startswith("  A loss is that of its rows")
    spread = said(lambda p, x: jnp.std(p["w"] * x))
    assert "serially 2.58199. Likely cause: a statistic across rows" in spread[0]
    of_aux = said(lambda p, x: (jnp.mean(p["w"] * x), {"total": x.sum()}), aux="mean")
    assert of_aux[0].startswith("  aux['total'] combined by") and '"sum" would have matched' in of_aux[0]
    of_state = said(lambda p, s, x: (jnp.mean(p["w"] * x), {"m": x.mean() ** 2}), state={"m": np.float32(0)})
    assert of_state[0].startswith("  state['m']: it is") and len(of_state) == 2


# Errors.


def stepping(loss, **options):
    return lambda: synk.train.step(loss, START, optax.sgd(0.1), **options)(*rows_of(4))


def local(**options):
    return lambda: synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1), **options)(*rows_of(4))


WRONG = {
    "no loss": (lambda: synk.train.step(3, START, optax.sgd(0.1)), TypeError, "train.step: loss is 3; give a function"),
    "no optimizer": (lambda: synk.train.step(mean_loss, START, 0.1), TypeError, r"optimizer is 0.1; .*optax.sgd\(0.1\)"),
    "clip": (stepping(mean_loss, clip=0), ValueError, "clip is 0; give the largest global norm"),
    "no parameters": (stepping(lambda: 0.0, name="f"), TypeError, r"the loss f\(\) must take the parameters first"),
    "no state": (stepping(lambda p, *x: 0.0, state=1.0, name="f"), TypeError, "the parameters and the state first"),
    "a loss a row": (stepping(lambda p, x, y: x[:, 0]), TypeError, r"returned a loss of float32\[1\]; return the mean"),
    "an integer": (stepping(lambda p, x, y: x.shape[0]), TypeError, r"a loss of int32\[\]; .*one floating number"),
    "aux unannounced": (stepping(with_aux), TypeError, r"it returned 2 values; return the loss alone\..*aux outputs by aux="),
    "aux missing": (stepping(mean_loss, aux="sum"), TypeError, "one value; return the loss and aux outputs, as a tuple"),
    "aux op": (stepping(with_aux, aux="average"), ValueError, 'mean_loss|with_aux: op "?\'?average.*"mean"'),
    "aux tree": (stepping(with_aux, aux=("sum",)), ValueError, "with_aux: outputs=.* is no prefix"),
    "state's tree": (
        stepping(lambda p, s, x, y: (x.mean(), {"a": s}), state=1.0, name="f"), ValueError, "new value of state",
    ),
    "every 0": (local(every=0), ValueError, "every is 0; give an integer >= 1, or a function"),
    "every none": (local(every=lambda steps: 0), ValueError, r"mean_loss: every\(0\): every is 0"),
    "no decay": (stepping(mean_loss, ema=1.0), ValueError, r"ema is 1\.0; give its decay, a number >= 0 and < 1"),
    "a decay": (stepping(mean_loss, ema="0.9"), TypeError, "ema is '0.9'; give its decay, a number"),
    "every half": (local(every=0.5), TypeError, "every is 0.5; give an integer"),
    "no rows": (local(inputs=["broadcast", "broadcast"]), ValueError, "mean_loss: averages are weighted by rows"),
    "slices": (lambda: synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1))(*rows_of(4), num_slices=0),
               ValueError, "num_slices is 0"),
    "local slices": (
        lambda: synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1))(*rows_of(8), num_slices=2), ValueError,
        "mean_loss: num_slices goes with synk.train.step; local steps take each replica's rows at once",
    ),
    "an integer parameter": (
        lambda: synk.train.step(mean_loss, {**START, "n": [np.int32(1)]}, optax.sgd(0.1)), TypeError,
        r"synk.train.step: params\['n'\]\[0\] is int32, which has no gradient. Keep it in state=",
    ),
    "a key among parameters": (
        lambda: synk.contrib.local_steps(mean_loss, jax.random.key(0), optax.sgd(0.1)), TypeError,
        "local_steps: params is a PRNG key, which has no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_messages(case):
    """Each says which call, what was given, and what to do."""
    call, error, text = WRONG[case]
    with group_of("devices", 4), pytest.raises(error, match=text):
        call()


def test_without_optax(monkeypatch):
    """Importing needs none; using it says how to get it."""
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"synk.train: optax is not installed. .*pip install optax"):
        synk.train.step(mean_loss, START, None)


def test_a_step_inside_a_loss(four):
    """The message says how to read what another step trains."""
    teacher = synk.train.step(mean_loss, START, optax.sgd(0.1))
    student = synk.train.step(lambda p, x, y: teacher(x, y) * 0 + mean_loss(p, x, y), START, optax.sgd(0.1))
    with pytest.raises(synk.SynkError, match=r"calls the synk function mean_loss inside.*Read params\.value there"):
        student(*rows_of(8))


X8 = numbers(8)


def square(w, x):
    return ((w - x) ** 2).mean()


EIGHT = np.arange(8, dtype=np.float32)


STEPS = [("local_steps", 1), ("step", 1), ("step", 2), ("step", 3)]


def held_after(step, slices, calls):
    """What each replica holds before and after so many steps on constant rows."""
    states = [values(step.params, step.opt_state)]
    for _ in range(calls):
        step(EIGHT, num_slices=slices)
        states.append(values(step.params, step.opt_state))
    return states


def made(kind, loss, optimizer):
    """A training step; a local one that averages never."""
    options = {"every": 10**9} if kind == "local_steps" else {}
    make = synk.contrib.local_steps if kind == "local_steps" else synk.train.step
    return make(loss, np.float32(0), optimizer, **options)


def failing_once(error):
    """An optimizer whose first update raises."""
    plain, errors = optax.sgd(0.1, momentum=0.5), [error]

    def update(*args, **kwargs):
        if errors:
            raise errors.pop()
        return plain.update(*args, **kwargs)

    return optax.GradientTransformation(plain.init, update)


@pytest.mark.smoke
@pytest.mark.parametrize(("kind", "slices"), STEPS[:-1])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_step_leaves_nothing(group, error, kind, slices):
    """After an error, or Ctrl-C, while the optimizer is traced, the next step is the first."""
    step = made(kind, square, failing_once(error("once")))
    with pytest.raises(error, match="once"):
        step(EIGHT, num_slices=slices)
    assert_same(held_after(step, slices, 3), held_after(made(kind, square, optax.sgd(0.1, momentum=0.5)), slices, 3))


def test_slices_of_local_steps_are_refused(group):
    """Local steps take each replica's rows at once: slices raise, and nothing is half done."""
    step = made("local_steps", square, optax.sgd(0.1))
    with unchanged(step.params, step.opt_state), pytest.raises(ValueError, match="num_slices"):
        step(EIGHT, num_slices=2)
    assert_same(held_after(step, 1, 2), held_after(made("local_steps", square, optax.sgd(0.1)), 1, 2))


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where the collector swallows one
@pytest.mark.parametrize(("kind", "slices"), slow_but(STEPS[:2], STEPS))
def test_interrupted_steps(group, kind, slices):
    """Ctrl-C at any moment: a step is taken whole or not at all, and so are those after it."""
    step = made(kind, lambda w, x: (w * x).mean(), optax.sgd(0.5))
    means = [0.75, 2.75] if kind == "local_steps" else [1.75, 1.75]  # half the mean row of each replica, or of all
    moments, scale, before, after = random.Random(slices), 1, 0, 0

    def act():
        nonlocal scale, before, after
        before, after, scale = after, after + scale, 3 - scale
        step(EIGHT * (after - before), num_slices=slices)

    act()
    for _ in range(100):
        interrupted(act, moments.uniform(0.0005, 0.01))
        held = [float(step.params.get_value(rank)) for rank in range(2)]
        after = before if held[0] == -means[0] * before else after
        assert held == [-mean * after for mean in means]


KINDS_OF_KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}


def raw(key):
    return np.asarray(jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key)


def noisy_loss(w, key, x):
    key, use = jax.random.split(key)
    return ((w - x + jax.random.normal(use, ())) ** 2).mean(), key


@pytest.mark.parametrize("kind", KINDS_OF_KEYS)
@pytest.mark.parametrize("slices", [1, 3])
def test_keys_in_state_advance_alike(group, kind, slices):
    """Each step splits the key once, on every replica the same, in slices or not."""
    start = KINDS_OF_KEYS[kind](0)
    step = synk.train.step(noisy_loss, np.float32(0), optax.sgd(0.1), state=start)
    for rows in (9, 7):
        step(numbers(rows), num_slices=slices)
    want = jax.random.split(jax.random.split(start)[0])[0]
    assert raw(step.state.value).tolist() == raw(want).tolist()
    synk.check_replicas(step.params, step.state)


@pytest.mark.parametrize("kind", KINDS_OF_KEYS)
def test_keys_of_parts_are_not_mixed(group, kind):
    """Where replicas make keys of their own, the state is one of them, and no mixture of their bits."""
    start = KINDS_OF_KEYS[kind](0)

    def loss(w, key, x):
        return ((w - x) ** 2).mean(), jax.random.fold_in(key, synk.rank())

    step = synk.train.step(loss, np.float32(0), optax.sgd(0.1), state=start)
    step(numbers(9))
    made = [raw(jax.random.fold_in(start, rank)).tolist() for rank in range(synk.size())]
    assert raw(step.state.value).tolist() in made
    synk.check_replicas(step.state)


@pytest.mark.parametrize("make", [synk.train.step, synk.contrib.local_steps])
def test_an_integer_parameter_is_named(make):
    """When the step is made: no gradient is taken by integers."""
    with pytest.raises(TypeError, match=r"\['count'\].*int32|int32.*\['count'\]"):
        make(lambda p, x: (p["w"] * x).mean(), {"w": np.float32(1), "count": np.int32(3)}, optax.sgd(0.1))


def test_a_step_has_the_members_of_its_function(group):
    """`stats`, `compile` and `serial`, without a detour."""
    step = synk.train.step(square, np.float32(1), optax.sgd(0.1))
    want = step.serial(X8)
    assert "HloModule" in str(step.compile(X8).as_text())
    assert_close(step(X8), want)
    assert (step.stats.calls, step.stats.rows) == (1, 8)


# Wires that add up gradients themselves.


class Sums:
    """Sums as they are; each replica counts in a variable of its own."""

    def __init__(self, name="own"):
        self.name = name

    def variables(self, params):
        assert [leaf.dtype.name for leaf in jax.tree.leaves(params)] == ["float32"] * len(jax.tree.leaves(params))
        return {"steps": synk.shared(np.int32(0))}, {self.name: synk.shared(np.float32(0))}

    def sum(self, parts, variables):
        variables["steps"].value = variables["steps"].value + 1
        variables["own"].value = variables["own"].value + parts["b"]
        return synk.all_reduce(parts, "sum")


def test_a_wire_of_ones_own(four, tmp_path):
    """The plain step, to rounding; what the wire keeps is saved with the step, and each replica has its own."""
    step, plain = (synk.train.step(mean_loss, START, optax.adam(0.1), wire=wire) for wire in (Sums(), None))
    for rows in (7, 3, 8):
        assert_close(step(*rows_of(rows)), plain(*rows_of(rows)))
    assert_close(step.params.value, plain.params.value, rtol=1e-4)
    step.check(*rows_of(7))
    assert int(step.variables["steps"].value) == 3
    synk.save(tmp_path, step.variables, step=1)
    expected = float(plain(*rows_of(7)))
    own = step.variables["own"]
    assert len({float(own.get_value(rank)) for rank in range(4)}) == 4
    synk.check_replicas(*step.variables.values())
    with synk.simulate(3):
        again = synk.train.step(mean_loss, START, optax.adam(0.1), wire=Sums())
        synk.load(tmp_path, again.variables)
        assert_close(again(*rows_of(7)), expected, rtol=1e-4)


def test_a_wire_keeps_its_step(four):
    """Its variables have names of their own; another program of the step cannot change it; anything else is no wire."""
    with pytest.raises(ValueError, match="names a variable params, as the step does"):
        synk.train.step(mean_loss, START, optax.sgd(0.1), wire=Sums("params"))
    step = synk.train.step(mean_loss, START, optax.sgd(0.1), wire=Sums())
    with pytest.raises(ValueError, match=r"has variables of its step; make another step"):
        step.with_options(wire="bf16")
    with pytest.raises(TypeError, match=r"wire 3 is none of synk's"):
        synk.train.step(mean_loss, START, optax.sgd(0.1), wire=3)
