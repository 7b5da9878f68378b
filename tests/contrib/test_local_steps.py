"""Local steps: one loop a replica and their weighted mean are the oracle."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._runtime.dispatch import drain

from ..helpers import (
    assert_close,
    interrupted,
    needs_devices,
    parts_of,
    slow,
)
from ..train.test_train import (
    START,
    assert_state,
    batch_norm,
    dying_loss,
    masked_loss,
    mean_loss,
    noisy,
    noisy_state,
    one_step,
    rows_of,
    serial,
    serial_norm,
)


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


def test_keys_of_local_steps(four):
    """Those of a replica that has trained are kept, even if the first one had no rows."""
    rows = [synk.data(each, place="scatter") for each in rows_of(8)]
    step = synk.contrib.local_steps(noisy, START, optax.sgd(0.1), every=2, state=noisy_state(0))
    for calls in range(1, 5):
        step(*rows, batch_s=[[], [0], [0, 1], []])
        assert_state(step.state.get_value(1), calls)
    assert_state(step.state.value, 4)


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
