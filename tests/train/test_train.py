"""Training steps: the serial optax loop is the oracle; for local steps, one loop a replica and their weighted mean."""

import contextlib
import functools
import gc
import itertools
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
from synk._runtime.dispatch import drain

from ..helpers import (
    assert_close,
    assert_same,
    group_of,
    interrupted,
    needs_devices,
    numbers,
    parts_of,
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


def test_keys_of_local_steps(four):
    """Those of a replica that has trained are kept, even if the first one had no rows."""
    rows = [synk.data(each, place="scatter") for each in rows_of(8)]
    step = synk.contrib.local_steps(noisy, START, optax.sgd(0.1), every=2, state=noisy_state(0))
    for calls in range(1, 5):
        step(*rows, batch_s=[[], [0], [0, 1], []])
        assert_state(step.state.get_value(1), calls)
    assert_state(step.state.value, 4)


def test_step_shows_its_function(four):
    """Its stats, its serial answer, its program."""
    step = synk.train.step(mean_loss, START, optax.sgd(0.1))
    assert "HloModule" in str(step.compile(*rows_of(8)).as_text())
    assert_close(step.serial(*rows_of(8)), mean_loss(START, *rows_of(8)))
    step(*rows_of(8), batch=7)
    assert (step.stats.calls, step.stats.rows, step.stats is step.function.stats) == (1, 7, True)


# Local steps.


def local_oracle(loss, tx, batches, every, replicas=4, start=START, optimizer_state=True):
    """A loop a replica; the mean of their parameters, weighted by the rows trained on since the last one."""
    copies = [[start, tx.init(start)] for _ in range(replicas)]
    weights = np.zeros(replicas)
    for i, batch in enumerate(batches):
        for r, part in enumerate(zip(*[parts_of(each, replicas) for each in batch], strict=True)):
            if not part[0]:
                continue
            rows = [each[0] for each in part]
            out = loss(start, *rows)
            weight = float(out.weight) if isinstance(out, synk.Weighted) else len(rows[0])
            if weight:
                _, *copies[r] = one_step(loss, tx, *copies[r], rows)
                weights[r] += weight
        if (i + 1) % every == 0 or i + 1 == len(batches):
            mean = functools.partial(jax.tree.map, lambda *leaves: weighted_mean(leaves, weights))
            params = mean(*[params for params, _ in copies])
            opt_state = mean(*[opt_state for _, opt_state in copies])
            copies = [[params, opt_state if optimizer_state else own] for _, own in copies]
            weights[:] = 0
    return copies


def weighted_mean(leaves, weights):
    is_float = np.asarray(leaves[0]).dtype.kind == "f"
    return np.average(leaves, 0, weights).astype(np.float32) if is_float else np.max(leaves, 0)


@pytest.mark.smoke
@pytest.mark.parametrize("loss", [slow(mean_loss), masked_loss])
def test_averaging_each_step_is_the_synchronous_step(four, loss):
    """With plain SGD, to rounding; for rows that do not divide, fewer than replicas, and weights."""
    batches = [rows_of(n, seed=1) for n in (8, 7, 3)]
    step = synk.contrib.local_steps(loss, START, optax.sgd(0.3), every=1)
    want = serial(loss, optax.sgd(0.3), batches)
    assert_close(([step(*b) for b in batches], step.params.value), want[:2])


@pytest.mark.parametrize("tx", [slow(optax.sgd(0.2, momentum=0.9)), optax.adam(0.1)], ids=["momentum", "adam"])
def test_replicas_train_on_their_own(four, tx):
    """Every third step parameters and optimizer state are averaged by rows, counts kept; and once more at the end."""
    batches = [rows_of(n, seed) for seed, n in enumerate((8, 7, 3, 7, 8))]
    with synk.contrib.local_steps(mean_loss, START, tx, every=3) as step:
        for batch in batches:
            step(*batch)
    want, opt_state = local_oracle(mean_loss, tx, batches, 3)[0]
    assert_close((step.params.value, step.opt_state.value), (want, opt_state), rtol=1e-4)
    assert step.steps == 5


def test_optimizer_state_may_stay_each_replicas_own(four):
    """Then only the parameters are averaged."""
    batches, tx = [rows_of(n, seed) for seed, n in enumerate((8, 7, 8))], optax.sgd(0.2, momentum=0.9)
    step = synk.contrib.local_steps(mean_loss, START, tx, every=2, optimizer_state=False)
    for batch in batches:
        step(*batch)
    step.finish()
    want = local_oracle(mean_loss, tx, batches, 2, optimizer_state=False)
    assert_close(step.params.value, want[0][0])
    for rank in range(4):
        assert_close(step.opt_state.get_value(rank), want[rank][1])
    with pytest.raises(synk.errors.DivergedError, match=r"opt_state.*, unless optimizer_state=True"):
        step.opt_state.value


def test_iterate_averages_the_last_round(four):
    """The results come one by one, with their number; at the end the parameters are one value."""
    x, y = rows_of(34)
    batches = list(synk.minibatches(34, 8))
    step = synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1), every=3)
    steps = step.iterate(x, y, batches=batches, prefetch=4)
    assert len(steps) == 5 and len(list(steps)) == 5
    want = local_oracle(mean_loss, optax.sgd(0.1), [(x[i], y[i]) for i in batches], 3)
    assert_close(step.params.value, want[0][0])


def test_before_the_average_replicas_differ(four):
    """Reading says so; finish averages once, and an error on the way out does not."""
    step = synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1), every=9)
    with pytest.raises(KeyError), step:
        step(*rows_of(7))
        raise KeyError
    with pytest.raises(synk.errors.DivergedError, match=r"params: its .* since mean_loss .* finish\(\)"):
        step.params.value
    step.finish()
    own = synk.function(
        lambda x: setattr(step.params, "value", jax.tree.map(lambda p: p + x.sum(), step.params.value)), name="own"
    )
    own(np.arange(7, dtype=np.float32))
    with pytest.raises(synk.errors.DivergedError, match=r"since own .* synk.all_reduce"):
        step.params.value
    synk.broadcast(step.params)
    before = step.params.value
    step.finish()
    assert_close(step.params.value, before)


# Ctrl-C may fall before `next` begins, and then the loop warns that nobody asked for its results.
@pytest.mark.filterwarnings("ignore:.*no loop asked for its results:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.smoke
@pytest.mark.parametrize("every", [slow(1), 3])
def test_ctrl_c_of_local_steps(four, every):
    """However it falls: no step is counted that was not taken or taken that was not counted, and finish averages."""
    step = synk.contrib.local_steps(mean_loss, START, optax.adam(0.01), every=every)
    rows = rows_of(7)
    for turn in range(12):
        with step:
            step(*rows)
        act = (
            functools.partial(next, step.iterate(*rows, batches=itertools.repeat(None)))
            if turn % 2
            else lambda: step(*rows)
        )
        interrupted(act, 0.03)
        step.finish()
        counts = [leaf for leaf in jax.tree.leaves((step.params.value, step.opt_state.value)) if leaf.dtype == np.int32]
        assert [int(count) for count in counts] == [step.steps]


@needs_devices(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("donate", [True, False])
def test_local_steps_after_a_program_died(four, donate):
    """Values are set anew; then training goes on as a fresh one does."""

    def made():
        return synk.contrib.local_steps(dying_loss, START, optax.sgd(0.1), every=2, donate=donate)

    x, y = rows_of(8)
    step = made()
    step(x, y), step(x, y)
    with contextlib.suppress(Exception):  # JAX's own, whose class differs between versions
        jax.block_until_ready(step(x + 2000, y))
    drain()
    with pytest.raises(synk.errors.SharedLostError):
        step(x, y)
    step.params.value, step.opt_state.value = START, optax.sgd(0.1).init(START)
    fresh = made()
    for each in (step, fresh):
        each(x, y), each(x, y)
    assert_close(step.params.value, fresh.params.value)


def test_local_steps_of_replicas_without_rows(four, tmp_path):
    """Counts are those of all; a replica of weight 0 brings no NaN of its state into the average."""

    def made():
        return synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1), every=5)

    x, y = (synk.data(rows, place="scatter") for rows in rows_of(8))
    step, again = made(), made()
    step(x, y, batch_s=[[], [0], [], [0, 1]])
    synk.save(tmp_path, step.variables, step=step.steps)
    synk.load(tmp_path, again.variables)
    for each in (step, again):
        each.finish()
        assert each.steps == 1
    assert_close(again.params.value, step.params.value, rtol=0)

    def masked(params, state, x, mask):
        mean = (x * mask).sum() / mask.sum()
        return synk.Weighted((((params - x) ** 2) * mask).sum() / mask.sum(), mask.sum()), {"mean": mean}

    x, mask = np.float32([1, 2, 3, 4]), np.float32([1, 1, 0, 0])
    step = synk.contrib.local_steps(masked, np.float32(0), optax.sgd(0.1), state={"mean": np.float32(0)}, every=1)
    step(x, mask)
    assert_close((step.params.value, step.state.value["mean"]), (np.float32(0.3), np.float32(1.5)))


def test_local_steps_of_rows_with_neighbours(four):
    """Weights count own rows."""
    loss, kinds = lambda w, x: ((w - x[1:-1]) ** 2).mean(), {"x": synk.Overlap(1)}
    x = np.float32([0, 0, 10, 2, 5, 7])
    local = synk.contrib.local_steps(loss, np.float32(0), optax.sgd(0.1), inputs=kinds, every=1)
    plain = synk.train.step(loss, np.float32(0), optax.sgd(0.1), inputs=kinds)
    for _ in range(2):
        assert_close(local(x), plain(x))
    assert_close(local.params.value, plain.params.value)


@pytest.mark.slow
def test_a_checkpoint_between_averages(four, tmp_path):
    """It holds the round that is under way: fresh or warm steps go on as if nothing had been."""

    def made():
        return synk.contrib.local_steps(mean_loss, START, optax.adam(0.1), every=3, state=None)

    batches = [rows_of(n, seed) for seed, n in enumerate((8, 7, 5, 8))]
    step, warm = made(), made()
    warm(*rows_of(7, 9)), warm(*rows_of(5, 9))
    step(*batches[0])
    synk.save(tmp_path, step.variables, step=step.steps)
    fresh = made()
    for again in (fresh, warm):
        assert synk.load(tmp_path, again.variables)[0] == 1
    for batch in batches[1:]:
        for each in (step, fresh, warm):
            each(*batch)
    for each in (step, fresh, warm):
        assert each.steps == 4
        each.finish()
        assert_close(each.params.value, step.params.value, rtol=0)


def test_a_schedule_of_averages(four):
    """It is asked at the beginning and after each average, with the steps taken so far."""
    asked, reports = [], []

    def every(steps):
        asked.append(steps)
        return 1 if steps < 2 else 3

    step = synk.contrib.local_steps(
        mean_loss, START, optax.sgd(0.1), every=every, report=lambda n, _: reports.append(n)
    )
    list(step.iterate(*rows_of(8), batches=[slice(0, 8)] * 9))
    assert asked == [0, 1, 2, 5, 8, 9]
    assert reports == [1, 2, 5, 8, 9]


def test_scores_are_reported_after_averaging(four):
    """How many steps, and the mean loss of all rows since the last report."""
    reports = []
    batches = [rows_of(n, seed) for seed, n in enumerate((8, 7, 3))]
    step = synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1), every=2, report=lambda *r: reports.append(r))
    losses = [float(step(*batch)) for batch in batches]
    step.finish()
    assert [steps for steps, _ in reports] == [2, 3]
    assert_close([score for _, score in reports], [np.average(losses[:2], weights=[8, 7]), losses[2]])


def test_a_replica_without_rows_keeps_its_values(four):
    """Three rows on four replicas: the last one's copy is as it was, and has no part in the average."""
    step = synk.contrib.local_steps(mean_loss, START, optax.sgd(0.1), every=2)
    step(*rows_of(3))
    assert_close(step.params.get_value(3), jax.tree.map(jnp.asarray, START))
    step(*rows_of(3))
    assert_close(step.params.value, local_oracle(mean_loss, optax.sgd(0.1), [rows_of(3)] * 2, 2)[0][0])


def test_where_all_is_masked_nothing_is_trained(four):
    """The loss is NaN; parameters stay."""
    x, y = rows_of(7)
    step = synk.contrib.local_steps(masked_loss, START, optax.sgd(0.1), every=1)
    assert np.isnan(step(-np.abs(x), y))
    assert_close(step.params.value, jax.tree.map(jnp.asarray, START))


def test_model_state_is_averaged_with_the_parameters(four):
    """BatchNorm's statistics, each replica's own between averages; aux outputs too."""
    loss, params, stats = batch_norm()

    def fn(params, stats, x, y):
        value, new = loss(params, stats, x, y)
        return value, new, x.max()

    x, y = rows_of(7)
    step = synk.contrib.local_steps(fn, params, optax.sgd(0.1), every=1, state=stats, aux="max")
    _, largest = step(x, y)
    assert_close(largest, x.max())
    want = serial_norm(loss, params, stats, [(x, y)], parts=4)
    assert_close((step.params.value, step.state.value), want, rtol=1e-4)


def test_local_rows_of_resident_data(four):
    """`batch_s` picks each replica's own; weights are the rows that each took."""
    x, y = rows_of(20)
    there = [synk.data(each, place="scatter") for each in (x, y)]
    picks = [[0, 1, 2], [4], [0, 3], [1, 2]]
    rows = np.concatenate([5 * r + np.array(pick) for r, pick in enumerate(picks)])
    step = synk.contrib.local_steps(mean_loss, START, optax.sgd(0.3), every=1)
    step(*there, batch_s=picks)
    assert_close(step.params.value, serial(mean_loss, optax.sgd(0.3), [(x[rows], y[rows])])[1])


def test_half_precision(four):
    """The loss is reported in float32."""
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), START)

    def loss(params, x, y):
        return mean_loss(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), x, y)

    step = synk.contrib.local_steps(loss, params, optax.sgd(0.5), every=1)
    step(*rows_of(9), num_slices=1)
    want = serial(loss, optax.sgd(0.5), [rows_of(9)], params)[1]
    assert_close(jax.tree.map(lambda v: v.astype(jnp.float32), step.params.value),
                 jax.tree.map(lambda v: v.astype(jnp.float32), want), rtol=2e-2)  # fmt: skip


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


def test_a_batch_of_no_weight_leaves_small_numbers(four):
    """Where no replica trained, their average is what they hold, however small."""

    def loss(w, x, mask):
        return synk.Weighted((mask * (w * x) ** 2).sum() / jnp.maximum(mask.sum(), 1), mask.sum())

    x = np.ones(9, np.float32)
    train = synk.contrib.local_steps(loss, np.float32(1e-5), optax.adam(1e-9), every=1)
    train(x, x)
    before = jax.tree.map(np.asarray, (train.params.value, train.opt_state.value[0].mu, train.opt_state.value[0].nu))
    assert 0 < before[2] < 1e-12
    for _ in range(2):
        train(x, 0 * x)
        after = train.params.value, train.opt_state.value[0].mu, train.opt_state.value[0].nu
        jax.tree.map(np.testing.assert_array_equal, before, after)


def test_steps_of_a_checkpoint(four, tmp_path):
    """Loaded between averages or right after one, it is known how many were taken."""
    made = [
        synk.contrib.local_steps(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1), every=2)
        for _ in "ab"
    ]
    for taken in (3, 1):
        for _ in range(taken):
            made[0](np.ones(9))
        synk.save(tmp_path, made[0].variables, step=made[0].steps)
        synk.load(tmp_path, made[1].variables)
        assert made[1].steps == made[0].steps
    assert made[1].steps == 4


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
    return getattr(synk.train, kind)(loss, np.float32(0), optimizer, **options)


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
