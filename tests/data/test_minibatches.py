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
    ],
)
def test_messages(options, error, message):
    """What is out of range is named."""
    with pytest.raises(error, match=message.replace("*", r"\*")):
        synk.minibatches(**options)
