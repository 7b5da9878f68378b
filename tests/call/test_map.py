"""synk.map: functions of one row, for any number of rows on any number of replicas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import synk

from ..helpers import assert_close, assert_same, group_of, numbers

pytestmark = pytest.mark.smoke

GROUPS = [("devices", 1), ("devices", 4), ("simulated", 3)]


@pytest.fixture(params=GROUPS, ids=str, autouse=True)
def on_group(request):
    with group_of(*request.param) as group:
        yield group


def chain(key, start, scale):
    """A row with a loop of its own length, noise, a tree and a number."""

    def step(state):
        x, i = state
        return x + scale * jax.random.normal(jax.random.fold_in(key, i)), i + 1

    x, steps = lax.while_loop(lambda state: (state[0] < 2) & (state[1] < 50), step, (start, 0))
    return {"x": x, "steps": steps, "one": 1}


@pytest.mark.parametrize(
    ("on_group", "rows"),
    [
        *[(("devices", 1), rows) for rows in (1, 3)],
        *[(("devices", 4), rows) for rows in (3, 4, 7)],
        *[(("simulated", 3), rows) for rows in (1, 7)],
    ],
    ids=str,
    indirect=["on_group"],
)
def test_rows(on_group, rows):
    """As jax.vmap of it on one device: eager, warm, serial, checked, sliced, picked, and under jit and vmap."""
    keys, starts = jax.random.split(jax.random.key(0), rows), np.linspace(-1, 1, rows, dtype=np.float32)
    f, want = synk.map(chain, {"scale": "broadcast"}), jax.vmap(chain, (0, 0, None))(keys, starts, np.float32(0.5))
    for _ in range(2):
        assert_close(f(keys, starts, 0.5), want)
        assert_close(f.serial(keys, starts, 0.5), want)
    f.check(keys, starts, 0.5)
    assert_close(f(keys, starts, 0.5, num_slices=2), want)
    back = np.arange(rows)[::-1].copy()
    assert_close(f(keys, starts, 0.5, batch=back), jax.tree.map(lambda leaf: leaf[back], want))
    assert_close(jax.jit(f)(keys, starts, 0.5), want)


def test_a_single_row_has_no_axis():
    """`fn` sees a row without axis 0; it runs as it is where a replica has one."""
    seen = []

    def fn(x, table, power):
        seen.append((x.shape, table.shape))
        return {"y": (x @ table) ** power}

    f = synk.map(fn, {"table": "broadcast", "power": "static"}, name="rows")
    x, table = numbers(4, 3), numbers(3, 2)
    assert_close(f(x, table, power=2), {"y": (x @ table) ** 2})
    assert set(seen) == {((3,), (3, 2))}
    assert f.name == "rows"


OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod, "any": np.any, "all": np.all}


@pytest.mark.parametrize("rows", [4, 7, 2])
def test_ops_over_rows(rows):
    """Each combines over all rows, however they are dealt out and sliced."""
    x = numbers(rows, 3) + 1

    def fn(row):
        return {op: row > 1 if op in ("any", "all") else row for op in OPS}

    f = synk.map(fn, outputs={op: op for op in OPS})
    for slices in (1, 2):
        got = f(x, num_slices=slices)
        for op, of_numpy in OPS.items():
            assert_close(got[op], of_numpy(x > 1 if op in ("any", "all") else x, axis=0))
    assert_close(f.over(x, batches=[1, slice(1, rows)])["mean"], x.mean(0))
    stays = synk.map(lambda row: 2 * row, outputs="scatter")(x)
    assert isinstance(stays, synk.Data)
    assert_same(np.asarray(stays), 2 * x)
    for op in ("stack", "first", jnp.median):
        with pytest.raises(ValueError, match="do not combine by"):
            synk.map(fn, outputs=op)


def test_rows_that_communicate(on_group):
    """Over an axis of their own, as under pmap: as many rows as replicas, and all rows on one device."""
    f = synk.map(lambda x: (x - lax.pmean(x, "i"), lax.psum(x, "i")), outputs=("concat", "same"), axis_name="i")
    x = numbers(on_group.size, 3)
    for _ in range(2):
        assert_close(f(x), (x - x.mean(0), x.sum(0)))
        assert_close(f.serial(x), (x - x.mean(0), x.sum(0)))
    if on_group.size > 1:
        f.check(x)
    many = numbers(2 * on_group.size, 3)
    if on_group.size == 1:
        assert_close(f(many), (many - many.mean(0), many.sum(0)))
        return
    for rows in (2 * on_group.size, on_group.size - 1, on_group.size + 1):
        with pytest.raises(ValueError, match=r'over "i", which takes one row on each replica'):
            f(numbers(rows, 3))
    assert_close(f(x), (x - x.mean(0), x.sum(0)))


def test_no_replica_waits_for_another(on_group):
    """Nothing is sent but the results, whatever the loops do."""
    f = synk.map(chain, {"scale": "broadcast"}, outputs="scatter")
    keys = jax.random.split(jax.random.key(0), 2 * on_group.size)
    text = f.compile(keys, np.zeros(2 * on_group.size, np.float32), 0.5).as_text()
    assert not re.search(r"all-(reduce|gather)|collective-permute", text)


def test_refusals():
    """Rows must come from somewhere, and ops must be synk's."""
    with pytest.raises(ValueError, match="none of them is scattered"):
        synk.map(lambda x: x, ["broadcast"], name="f")(np.ones(3, np.float32))
    with pytest.raises(TypeError, match=r"synk\.map\(\) got .*'in_axes', which jax\.pmap has\. Instead: name modes"):
        synk.map(lambda x: x, in_axes=(0, None))
    with pytest.raises(ValueError, match="none of synk's"):
        synk.map(lambda x: x, outputs="concatenate")


def test_variables_are_read():
    """As in any function."""
    w = synk.shared(np.float32(3))
    f = synk.map(lambda x: x * w.value)
    assert_close(f(numbers(5)), 3 * numbers(5))
    w.value = np.float32(2)
    assert_close(f(numbers(5)), 2 * numbers(5))
