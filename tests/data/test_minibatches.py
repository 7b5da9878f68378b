"""Minibatches: every row once an epoch, the same for a seed anywhere, resumable."""

import numpy as np
import pytest

import synk


def flat(batches):
    return np.concatenate(list(batches)).tolist()


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
def test_every_row_once_an_epoch(rows):
    """No row is dropped and none comes twice in an epoch; the last batch is as short as it comes."""
    batches = list(synk.minibatches(rows, 4, epochs=2))
    half = len(batches) // 2
    assert sorted(flat(batches[:half])) == sorted(flat(batches[half:])) == list(range(rows))
    assert [len(batch) for batch in batches[:half]] == [4] * (rows // 4) + [rows % 4] * (rows % 4 > 0)


def test_order_is_fixed_by_the_seed():
    """These very numbers come on every platform."""
    assert flat(synk.minibatches(6, 4, seed=3)) == [1, 4, 2, 0, 3, 5]
    assert flat(synk.minibatches(100, 10, seed=3)) != flat(synk.minibatches(100, 10, seed=4))


def test_epochs_differ():
    """Each epoch has an order of its own."""
    batches = list(synk.minibatches(100, 100, epochs=2))
    assert batches[0].tolist() != batches[1].tolist()


def test_without_shuffle_rows_come_in_order():
    """Evaluation sees rows as they are."""
    assert flat(synk.minibatches(7, 3, shuffle=False)) == list(range(7))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 8])
def test_start_resumes(start):
    """A resumed run sees the batches that the first would have seen."""
    whole = list(synk.minibatches(10, 3, epochs=2, seed=5))
    resumed = synk.minibatches(10, 3, epochs=2, seed=5, start=start)
    assert len(resumed) == 8 - start
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in whole[start:]]


def test_drop_last():
    """Every batch is whole."""
    batches = synk.minibatches(10, 4, drop_last=True)
    assert len(batches) == 2 and all(len(batch) == 4 for batch in batches)


def test_a_call_takes_them():
    """What comes is a `batch=`: the mean of means by rows is the mean of all."""
    x = np.arange(11, dtype=np.float32)
    total = synk.function(lambda x: x.sum())
    assert sum(float(total(x, batch=batch)) for batch in synk.minibatches(11, 4)) == 55


COST = np.array([3, 60, 8, 7, 61, 4, 8, 33, 0, 5])


def test_batches_of_like_cost():
    """Rows of a batch share a bucket, a power of two; rows and batches are shuffled, by seed and epoch."""
    order = synk.minibatches(10, 3, cost=COST, epochs=2, seed=1)
    epochs = [list(order)[:5], list(order)[5:]]
    for batches in epochs:
        assert sorted(flat(batches)) == list(range(10))
        for batch in batches:
            assert order.longest(batch) // 2 <= COST[batch].min() <= COST[batch].max() <= order.longest(batch)
    assert flat(epochs[0]) != flat(epochs[1])
    assert [order.longest(batch) for batch in synk.minibatches(10, 3, cost=COST, shuffle=False)] == [1, 4, 8, 8, 64]


def test_batches_under_a_budget():
    """As many rows as rows x bucket allow, of each bucket as many but for its rest; `stats` counts an epoch."""
    order = synk.minibatches(10, cost=COST, budget=128, shuffle=False)
    assert [batch.tolist() for batch in order] == [[8], [0, 5], [2, 3, 6, 9], [1, 4], [7]]
    assert tuple(order.stats) == (5, 5, 189, 1 + 8 + 32 + 192)
    assert tuple(synk.minibatches(10, 3, cost=COST, drop_last=True).stats) == (2, 2, 189, 3 * 8 + 3 * 64)
    assert tuple(synk.minibatches(10, 4).stats) == (3, 2, 10, 10)


def test_buckets():
    """Those that are given, and the budget where a bucket is above it; numbers that are not whole too."""
    order = synk.minibatches(10, cost=COST, budget=100, buckets=[10, 40, 1000], shuffle=False)
    assert [(order.longest(batch), len(batch)) for batch in order] == [(10, 7), (40, 1), (100, 1), (100, 1)]
    halves = synk.minibatches(3, 2, cost=[0.3, 0.5, 1.5], shuffle=False)
    assert [halves.longest(batch) for batch in halves] == [0.5, 2]


@pytest.mark.parametrize("start", [0, 3, 10])
def test_an_order_by_cost_resumes(start):
    """A resumed run sees the batches that the first would have seen."""
    options = {"cost": COST, "budget": 64, "epochs": 2, "seed": 5}
    whole = [batch.tolist() for batch in synk.minibatches(10, **options)]
    assert [batch.tolist() for batch in synk.minibatches(10, **options, start=start)] == whole[start:]
    assert synk.minibatches(10, **options) == synk.minibatches(10, **options) and hash(synk.minibatches(10, **options))


def test_a_loop_by_cost_goes_on_with_on_other_replicas(tmp_path):
    """`synk.resume` around the order, and the padding inside: a run that stopped goes on with other replicas."""
    x = np.where(np.arange(64) < COST[:, None], 1.0, 0.0).astype(np.float32)
    seen = []

    def run(replicas, stop):
        order = synk.minibatches(10, cost=COST, budget=128, epochs=2, seed=2)
        with synk.simulate(replicas):
            total = synk.shared(np.float32(0), name="total")

            @synk.function
            def add(x):
                return x.sum()

            @add.then
            def add(part):
                total.value = total.value + part

            for rows in synk.resume(order, {"total": total}, folder=tmp_path, save_every=1e-9):
                seen.append(rows.tolist())
                add(x[rows, : order.longest(rows)])
                if len(seen) == stop:
                    raise InterruptedError
            return float(total.value)

    with pytest.raises(InterruptedError):
        run(2, stop=4)
    assert run(3, stop=None) == 2 * COST.sum()
    whole = [rows.tolist() for rows in synk.minibatches(10, cost=COST, budget=128, epochs=2, seed=2)]
    assert seen[:4] == whole[:4] and 4 < len(seen) < len(whole) + 4 and seen[4:] == whole[4 - len(seen) :]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_by_cost(seed):
    """Each row comes once an epoch, no batch is above its budget or bucket, and `stats` counts rightly."""
    rng = np.random.default_rng(seed)
    rows, epochs = int(rng.integers(1, 300)), int(rng.integers(1, 4))
    cost = [rng.integers(0, 600, rows), rng.lognormal(4, 1, rows), np.full(rows, 7)][seed % 3]
    budget = float(max(cost.max(), 1) * rng.uniform(1, 20))
    options = {"budget": budget} if rng.integers(2) else {"batch_size": int(rng.integers(1, 40))}
    order = synk.minibatches(rows, cost=cost, epochs=epochs, seed=seed, **options)
    batches = list(order)
    assert len(batches) == len(order) == epochs * order.stats.batches
    shapes = {(len(batch), order.longest(batch)) for batch in batches}
    assert len(shapes) == order.stats.shapes
    assert all(n * longest <= budget for n, longest in shapes) or "batch_size" in options
    assert sorted(flat(batches)) == sorted([*range(rows)] * epochs)
    assert sum(len(batch) * order.longest(batch) for batch in batches) == pytest.approx(
        epochs * order.stats.padded_cost
    )


@pytest.mark.parametrize("rows", [[0, 1], [-1], [99], [], [0.0], [[0]], [0, 3, 9, 2, 6, 3], True])
def test_rows_that_are_no_batch(rows):
    """Rows of two buckets, none, or more than a batch has."""
    order = synk.minibatches(10, 4, cost=COST)
    with pytest.raises(ValueError, match="these rows are no batch of an order with cost="):
        order.longest(rows)
    with pytest.raises(ValueError, match="no batch of an order with cost="):
        synk.minibatches(10, 4).longest([0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows": 0, "batch_size": 4}, ValueError, "rows is 0"),
        ({"rows": 4, "batch_size": 0}, ValueError, "batch_size is 0"),
        ({"rows": 4, "batch_size": 2.0}, TypeError, "batch_size is 2.0"),
        ({"rows": 4, "batch_size": 2, "seed": 2**32}, ValueError, "seed is 4294967296"),
        ({"rows": 4, "batch_size": 2, "epochs": 0}, ValueError, "epochs is 0"),
        ({"rows": 4, "batch_size": 2, "start": 3}, ValueError, "start=3 is beyond the 2 batches"),
        ({"rows": 3, "batch_size": 4, "drop_last": True}, ValueError, "3 rows make no batch of 4"),
        ({"rows": 3}, TypeError, "batch_size is None"),
        ({"rows": 3, "batch_size": 1, "cost": [1, 2]}, ValueError, "cost has shape .2., but there are 3 rows"),
        ({"rows": 2, "batch_size": 1, "cost": [1, np.nan]}, ValueError, "cost.1. is nan"),
        ({"rows": 2, "batch_size": 1, "cost": [-1, 2]}, ValueError, "cost.0. is -1"),
        ({"rows": 2, "budget": 9}, TypeError, "batch_size is None"),
        ({"rows": 2, "batch_size": 2, "buckets": [4]}, TypeError, "goes with cost="),
        ({"rows": 2, "batch_size": 2, "budget": 9, "cost": [1, 2]}, TypeError, "in place of batch_size"),
        ({"rows": 2, "cost": [1, 2]}, ValueError, "budget is None"),
        ({"rows": 2, "cost": [1, 2], "budget": 0}, ValueError, "budget is 0"),
        (
            {"rows": 2, "cost": [1, 9], "budget": 8},
            ValueError,
            "cost.1. is 9, above budget=8: no batch has room for row 1",
        ),
        (
            {"rows": 2, "batch_size": 1, "cost": [1, 9], "buckets": [4, 8]},
            ValueError,
            "above the largest of buckets, 8",
        ),
        ({"rows": 2, "batch_size": 1, "cost": [1, 9], "buckets": [0, 8]}, ValueError, "buckets is .0, 8."),
    ],
)
def test_messages(options, error, message):
    """What is out of range is named."""
    with pytest.raises(error, match=message.replace("*", r"\*")):
        synk.minibatches(**options)
