"""Flat shared variables: one buffer a dtype behind the tree, which is what users see all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk

from ..helpers import assert_same, group_of, numbers

KINDS = pytest.mark.parametrize(("kind", "n"), [("devices", 4), ("simulated", 3)])


def mixed():
    """A tree of several dtypes, scalars and a typed PRNG key."""
    return {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.float32(2), np.int32(3), np.zeros((0, 2), np.int32)],
        "k": jax.random.key(1),
        "h": jnp.full((2, 2), 0.1, jnp.bfloat16),
    }


def plain(tree):
    """Keys as raw data."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


@KINDS
def test_the_tree_is_seen(kind, n):
    """Reading, a replica's value, all values, shapes: as without flat."""
    with group_of(kind, n):
        flat, usual = synk.shared(mixed(), flat=True), synk.shared(mixed())
        for of in (lambda w: w.value, lambda w: w.get_value(n - 1), lambda w: w.get_value(0, borrow=True), synk.gather):
            assert_same(plain(of(flat)), plain(of(usual)))
        assert synk.get_shapes(flat) == synk.get_shapes(usual)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n"), [("devices", 4), ("simulated", 3)])
@pytest.mark.parametrize("slices", [1, 2])
def test_training_is_the_same(kind, n, slices):
    """A step with momentum, parameters and its state flat or not, gives the same values, and keeps the law."""
    rows = numbers(4 * n + 1)
    weights = {f"layer {i}": np.full(2, i, np.float32) for i in range(5)}
    momentum = optax.sgd(0.1, momentum=0.9)

    def trained(flat):
        params, state = (synk.shared(tree, flat=flat) for tree in (weights, momentum.init(weights)))

        @synk.function(inputs=["x"], reduce="mean")
        def step(x):
            return jax.value_and_grad(lambda p: sum(jnp.mean((x - w[None]) ** 2) for w in p.values()))(params.value)

        @step.then
        def step(loss, grads):
            updates, state.value = momentum.update(grads, state.value, params.value)
            params.value = optax.apply_updates(params.value, updates)
            return loss

        losses = [step(rows, num_slices=slices) for _ in range(3)]
        step.check(rows, num_slices=slices)
        synk.check_replicas(params, state)
        return losses, params.value, state.value

    with group_of(kind, n):
        one, other = trained(True), trained(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@KINDS
def test_updates_of_slices_and_collectives(kind, n):
    """What combines elementwise combines in the buffers."""
    with group_of(kind, n):
        w = synk.shared({"sum": np.float32(0), "most": np.zeros(2, np.float32)}, flat=True)

        @synk.function
        def add(x):
            w.update(jax.tree.map(lambda old: old + x.sum(), w.value), slices="add")

        x = np.arange(2 * n, dtype=np.float32)
        add(x, num_slices=2)
        parts = x.reshape(n, -1).sum(1)
        assert [float(w.get_value(rank)["sum"]) for rank in range(n)] == parts.tolist()
        synk.all_reduce(w, "max")
        assert_same(w.value, {"sum": parts.max(), "most": np.full(2, parts.max(), np.float32)})
        w.set_value({"sum": np.float32(7), "most": np.zeros(2, np.float32)}, rank=1)
        with pytest.raises(synk.DivergedError, match=r"w\['most'\]|\['most'\]"):
            synk.check_replicas(w)
        synk.broadcast(w)
        assert float(w.value["sum"]) == parts.max()


def test_saved_as_the_tree(tmp_path):
    """A flat variable loads what a usual one saved, and the reverse."""
    with group_of("devices", 2):
        flat, usual = synk.shared(mixed(), flat=True), synk.shared(jax.tree.map(lambda x: x, mixed()))
        before = plain(flat.value)
        synk.save(tmp_path, {"w": flat}, step=1)
        usual.value = jax.tree.map(lambda x: x if x.dtype == jax.random.key(0).dtype else x * 0, usual.value)
        synk.load(tmp_path, {"w": usual})
        assert_same(plain(usual.value), before)
        synk.save(tmp_path, {"w": usual}, step=2)
        flat.value = jax.tree.map(lambda x: x if x.dtype == jax.random.key(0).dtype else x * 0, flat.value)
        synk.load(tmp_path, {"w": flat})
        assert_same(plain(flat.value), before)


def test_fewer_arrays_go_in_and_out():
    """A program takes one array a dtype."""
    with group_of("devices", 2):
        w = synk.shared([np.full(3, i, np.float32) for i in range(50)], flat=True)
        f = synk.function(lambda x: x.sum() + sum(jnp.sum(v) for v in w.value))
        assert len(jax.tree.leaves(f.compile(np.zeros(4, np.float32)).args_info)) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: synk.scatter(w, {"a": np.zeros((4, 3), np.float32)}), r"synk\.scatter: w is flat"),
        (synk.all_gather, r"synk\.all_gather: w is flat"),
        (lambda w: synk.gather(w, nd_up=0), r"synk\.gather: w is flat"),
        (lambda w: w.set_value({"b": np.zeros(3, np.float32)}), r"set_value: the new value of w has the tree"),
        (
            lambda w: w.set_value({"a": np.zeros(4, np.float32)}),
            r"set_value: the new value of w\['a'\] has shape \(4,\)",
        ),
        (synk.get_lengths, "has no rows"),
    ],
)
def test_messages(call, message):
    """What it cannot do it says, by the user's own leaves."""
    with group_of("devices", 2):
        w = synk.shared({"a": np.zeros(3, np.float32)}, name="w", flat=True)
        with pytest.raises(ValueError, match=message):
            call(w)


def test_the_users_array_is_not_shared():
    """Nor is it changed by updates."""
    with group_of("devices", 2):
        value = np.zeros(64, np.float32)
        w = synk.shared([value], flat=True)
        value[:] = 7
        f = synk.function(lambda: w.update([w.value[0] + 1]))
        f()
        assert_same(w.value, [np.ones(64, np.float32)])
