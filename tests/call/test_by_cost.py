"""`cost=` of maps: rows run in another order, and everything else is as it was."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import assert_close, assert_same, group_of, slow

ROWS = 13
STEPS = np.random.default_rng(0).lognormal(3, 1, ROWS).astype(np.int32)
START = np.linspace(-1, 1, ROWS, dtype=np.float32)


def loop(x, steps):
    """Run as many steps as the row says."""

    def step(state):
        i, x = state
        return i + 1, jnp.sin(x) + 1

    return lax.while_loop(lambda state: state[0] < steps, step, (jnp.int32(0), x))[1]


def numbered(x, steps, scale):
    """A loop and the row's number."""
    return {"x": loop(x * scale, steps), "number": synk.row_numbers()}


def summed(x, steps):
    y = loop(x, steps)
    return y, y, synk.Weighted(y, steps.astype(jnp.float32)), (y > 0,)


GROUPS = pytest.mark.parametrize(
    "on_group",
    [("simulated", 3), slow(("devices", 1)), slow(("devices", 3)), slow(("devices", 8))],
    indirect=True,
    ids=str,
)


@GROUPS
def test_rows_come_back_in_order_with_their_own_keys(on_group):
    """Row numbers and keys are the caller's, and bits are those of the call without costs: warm, picked, under jit."""
    keys = synk.map(lambda x: synk.row_keys(jax.random.PRNGKey(0)))
    assert_same(keys(START, cost=STEPS), synk.row_keys(jax.random.PRNGKey(0), ROWS))
    f = synk.map(numbered, {"scale": "broadcast"})
    want, picked = f(START, STEPS, 2.0), np.array([3, 12, 3, 0, 7, 7, 1])
    for _ in range(2):
        assert_same(f(START, STEPS, 2.0, cost=STEPS), want)
    assert_same(f(START, STEPS, 2.0, cost=STEPS, num_slices=2), want)
    assert_same(f(START, STEPS, 2.0, batch=picked, cost=STEPS), f(START, STEPS, 2.0, batch=picked))
    assert_same(jax.jit(lambda x: f(x, STEPS, 2.0, cost=STEPS))(START), want)


@GROUPS
def test_sums_and_means(on_group):
    """Ops over all rows, weights included, are equal to rounding; so is the gradient."""
    f = synk.map(summed, outputs=("sum", "max", "mean", "any"))
    assert_close(f(START, STEPS, cost=STEPS), f(START, STEPS))
    cubes, costs = synk.map(lambda x: x**3, outputs="sum"), np.arange(ROWS) ** 2
    assert_close(jax.grad(lambda x: cubes(x, cost=costs))(START), 3 * START**2)


@GROUPS
def test_loops_deal_each_batch(on_group):
    """Costs of all rows, from which batches pick: `iterate` numbers the rows of a batch, `over` those of all batches."""
    f = synk.map(numbered, {"scale": "broadcast"})
    batches, scales = [np.array([4, 4, 11, 0, 5]), slice(2, 7), 5], synk.each([1.0, 2.0, 3.0])
    want = list(f.iterate(START, STEPS, scales, batches=batches))
    assert_same(list(f.iterate(START, STEPS, scales, batches=batches, cost=STEPS)), want)
    lists = f.iterate(START, STEPS, scales, batches=batches, cost=STEPS, per_launch=2, num_slices=1)
    assert_same([out for some in lists for out in some], want)
    want = f.over(START, STEPS, scales, batches=batches)
    assert_same(f.over(START, STEPS, scales, batches=iter(batches), cost=STEPS), want)
    some = f.over(START, STEPS, scales, batches=batches, cost=STEPS, num_slices=1, output_subset=["number"])
    assert_same(some, (want["number"],))


def test_loops_that_begin_later():
    """Values of `synk.each` for all batches, or for those that are left, go with `start`."""
    f, x = synk.map(lambda x, scale: x * scale, ["x"]), np.arange(8, dtype=np.float32)
    order = synk.minibatches(8, 4, epochs=2, start=1)
    with synk.simulate(2):
        for scales in ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0]):
            found = list(f.iterate(x, synk.each(scales), batches=order, cost=x))
            assert_same(found, [x[rows] * np.float32(scale) for rows, scale in zip(order, [2, 3, 4], strict=True)])


def test_what_is_chosen():
    """The fewest slices within a tenth of the least work; the rows as they are where that is so already."""
    f, costs = synk.map(lambda x: x), np.repeat([1.0, 100.0], 32)[np.random.default_rng(1).permutation(64)]
    x = np.zeros(64, np.float32)
    with synk.simulate(2):
        f(x, cost=costs)
        assert (f.stats.slices, f.stats.replica_imbalance, f.stats.slice_imbalance) == (2, 1.0, 1.0)
        f(x, cost=np.ones(64))
        assert f.stats.slices == 1
        f(x, cost=np.zeros(64))
        f(x, cost=costs, num_slices=1)
        assert f.stats.slices == 1 and f.stats.slice_imbalance == pytest.approx(100 / 50.5)
        f(x, cost=np.arange(64) ** 4, num_slices=32)
        assert f.stats.slices == 32 and f.stats.replica_imbalance == pytest.approx(1, abs=1e-3)


def test_explain_says_the_imbalance():
    """By cost, and None without; the stats of calls stay as they are."""
    f, costs = synk.map(lambda x: x), np.arange(1, 65)
    with synk.simulate(2):
        told = f.explain(np.zeros(64, np.float32), cost=costs, num_slices=1)
        assert told.slice_imbalance == pytest.approx(1.45, abs=0.05) and "slice imbalance: 1.4" in str(told)
        assert f.explain(np.zeros(64, np.float32)).replica_imbalance is None and f.stats.slice_imbalance == 1


def test_members_take_costs():
    """The check compares the call as it is dealt."""
    f = synk.map(loop)
    with synk.simulate(3):
        f.check(START, STEPS, cost=STEPS)


def test_then_gets_outputs_in_order():
    """And its broadcast parameters, and may assign; a tuple of one output is one."""
    seen = synk.shared(np.zeros(5, np.float32))
    f = synk.map(lambda x, scale: (x * scale,), ["x"])

    @f.then
    def then(y, scale, unused=1):
        seen.value = y + scale * unused
        return (y,)

    x, costs = np.arange(5, dtype=np.float32), [1, 9, 1, 5, 3]
    with synk.simulate(2):
        assert_same(f(x, 2.0, cost=costs), (2 * x,))
        assert_same(seen.value, 2 * x + 2)
        assert_same(synk.map(lambda x: (x,))(x, cost=costs), (x,))
        assert f.shared == (seen,)


def test_costs_after_a_failure_and_in_another_group():
    """A call that raised leaves nothing behind, and a group that comes back runs its programs again."""
    f, costs = synk.map(lambda x: 1 / x), np.arange(7)
    x = np.arange(1, 8, dtype=np.float32)
    with group_of("simulated", 2):
        f(x, cost=costs)
        with pytest.raises(ValueError, match="cost"):
            f(x, cost=costs[1:])
        with group_of("simulated", 3):
            assert_same(f(x, cost=costs), 1 / x)
        before = f.stats.compilations
        assert_same(f(x, cost=costs[::-1]), 1 / x)
        assert f.stats.compilations == before


def test_a_parameter_of_that_name_comes_by_position():
    """As for the other options of a call."""
    f = synk.map(lambda x, cost: x + cost)
    x = np.arange(4, dtype=np.float32)
    assert_same(f(x, x, cost=[4, 1, 2, 3]), 2 * x)
    with pytest.raises(TypeError, match="cost comes by position"):
        f(x, cost=x)
    with pytest.raises(ValueError, match="its parameter 'cost' comes by keyword alone"):
        synk.map(lambda x, *, cost: x)
    assert float(synk.function(lambda x, cost: x.sum() * cost, inputs=["x"])(x, cost=2.0)) == 12


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cost": [1, 2, 3]}, ValueError, "cost has shape [3], but there are 4 rows"),
        ({"cost": [1, 2, np.nan, 3]}, ValueError, "cost[2] is nan"),
        ({"cost": [1, -2, 1, 3]}, ValueError, "cost[1] is -2"),
        ({"cost": ["a", "b", "c", "d"]}, TypeError, "cost is ['a', 'b', 'c', 'd']"),
        ({"cost": [1, 2, 3, 4], "batch_s": 1}, ValueError, "batch_s ties rows to their places"),
        ({"cost": [1, 2, 3, 4], "num_slices": 0}, ValueError, "num_slices is 0"),
    ],
)
def test_wrong_costs(change, error, message):
    """What is wrong is named before anything runs."""
    with pytest.raises(error, match=re.escape(message)):
        synk.map(lambda x: x)(np.zeros(4, np.float32), **change)


@pytest.mark.parametrize(
    ("f", "arguments", "message"),
    [
        (synk.map(lambda x: x, outputs="scatter"), (np.zeros(4),), 'outputs="scatter" ties rows'),
        (synk.map(lambda x: lax.psum(x, "i"), axis_name="i"), (np.zeros(4),), "axis_name ties rows"),
        (synk.map(lambda x: x), (synk.data(np.zeros(4), minibatch=True),), "minibatch=True ties rows"),
        (synk.map(lambda x: x), (synk.local(np.zeros(4)),), "synk.local ties rows"),
        (synk.map(lambda x: x, [synk.Overlap(1)]), (np.zeros(4),), "synk.Overlap ties rows"),
    ],
)
def test_rows_that_stay_in_their_places(f, arguments, message):
    """What ties rows to their replicas does not go with costs."""
    with synk.simulate(2), pytest.raises(ValueError, match=message):
        f(*arguments, cost=[1, 9, 1, 1])


def test_variables_that_hold_rows_refuse():
    """Their rows stay on the replicas."""
    with synk.simulate(2):
        held = synk.shared(np.zeros(4, np.float32), name="held")
        synk.scatter(held, np.arange(4, dtype=np.float32))
        f = synk.map(lambda x: x + held.value)
        with pytest.raises(ValueError, match="held, which holds rows, ties rows"):
            f(np.zeros(4, np.float32), cost=[1, 9, 1, 1])


@pytest.mark.parametrize("op", ["stack", "first", lambda parts: parts, "merge"])
def test_ops_of_parts_are_none_of_a_map(op):
    """Ops that show parts, and so the dealing, are refused when a map is made."""
    with pytest.raises((ValueError, TypeError), match="outputs of a row do not combine"):
        synk.map(lambda x: x, outputs=op)


def test_other_functions_refuse_costs():
    """A plain function, traced costs, and `over` of a source."""
    x = np.zeros(4, np.float32)
    with pytest.raises(TypeError, match=r"cost= is an option of synk\.map"):
        synk.function(jnp.sum)(x, cost=[1, 2, 3, 4])
    with pytest.raises(TypeError, match="cost is a traced value"):
        jax.jit(lambda cost: synk.map(lambda x: x)(x, cost=cost))(x)
    with pytest.raises(ValueError, match="Leave it out with source="):
        synk.map(lambda x: x).over(source=[x], cost=x)


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 20))])
def test_any_map(seed):
    """Random rows, costs and groups give the bits of the call without costs."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 40))
    steps, x = rng.lognormal(2, 1, rows).astype(np.int32), rng.normal(size=rows).astype(np.float32)
    f, costs = synk.map(numbered, {"scale": "broadcast"}), steps * rng.uniform(0.5, 1.5, rows)
    with group_of("simulated", int(rng.choice([1, 3, 8]))):
        picked = rng.integers(0, rows, int(rng.integers(1, rows + 1)))
        assert_same(f(x, steps, 1.5, batch=picked, cost=costs), f(x, steps, 1.5, batch=picked))
