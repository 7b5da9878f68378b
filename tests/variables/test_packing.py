"""Packing: small leaves of one dtype share stored arrays; only programs see it, which take fewer arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk

from ..helpers import assert_same, group_of, numbers, slow

KINDS = pytest.mark.parametrize(("kind", "n"), [("devices", 4), slow("simulated", 3)])


def mixed():
    """A tree of several dtypes, scalars and a typed PRNG key."""
    return {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.float32(2), np.int32(3), np.zeros((0, 2), np.int32), np.ones((2, 3), np.float32), np.float32(5)],
        "k": jax.random.key(1),
        "h": jnp.full((2, 2), 0.1, jnp.bfloat16),
    }


def plain(tree):
    """Keys as raw data."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


def apart(tree):
    """A variable for each leaf, none of which shares an array."""
    return jax.tree.map(synk.shared, tree)


def read(variables, of):
    return jax.tree.map(of, variables, is_leaf=lambda leaf: isinstance(leaf, synk.typing.Shared))


def stored(w):
    return len(w._state.leaves)


@KINDS
def test_the_tree_is_seen(kind, n):
    """Reading, a replica's value, all values, shapes: as of leaves that are variables by themselves."""
    with group_of(kind, n):
        w, leaves = synk.shared(mixed()), apart(mixed())
        for of in (lambda w: w.value, lambda w: w.get_value(n - 1), lambda w: w.get_value(0, borrow=True), synk.gather):
            assert_same(plain(of(w)), plain(read(leaves, of)))
        assert synk.contrib.synkhronos.get_shapes(w) == [jax.tree.map(lambda leaf: leaf.shape, plain(w.value))] * n


def test_which_leaves_share():
    """Small ones of a dtype, on GPUs of a shape too; not large ones, ones without numbers, or ones below a byte."""
    large = np.zeros(2**14 + 1, np.float32)
    for tree, arrays in [
        ([np.zeros(2**14, np.float32), np.ones(2**14, np.float32), large], 2),
        ([np.float32(1), large, large], 3),
        ([np.float32(i) for i in range(33)], 3),
        ([np.zeros((3, 2), np.float32), np.zeros(5, np.float32), np.float32(1)], 1),
        ([np.full(3, i, jnp.bfloat16 if i % 2 else np.float32) for i in range(6)], 2),
        ([np.int32(1), np.float32(1)], 2),
        ([np.zeros(3, bool), np.ones(3, bool), np.zeros(0, bool), np.zeros(0, bool)], 3),
        ([np.zeros(2, jnp.int4), np.zeros(3, jnp.int4)], 2),
        ([jax.random.key(1), jax.random.key(2), np.zeros(3, np.uint32)], 1),
        ([np.zeros((2, 2), jnp.bfloat16), jnp.ones((2, 2), jnp.bfloat16)], 1),
    ]:
        with synk.simulate(2):
            w = synk.shared(tree)
            assert_same(plain(w.value), plain(jax.tree.map(jnp.asarray, tree)))
            assert stored(w) == arrays


def layers(count=17):
    """A tree of equal layers, of numbers that differ."""
    leaf = lambda i: np.arange(i, i + 4, dtype=np.float32)  # noqa: E731
    return [{"scale": leaf(3 * i), "shift": leaf(3 * i + 1), "w": leaf(3 * i + 2).reshape(2, 2)} for i in range(count)]


@pytest.mark.parametrize(("platform", "arrays"), [("cpu", 17), ("gpu", 5)])
def test_leaves_of_a_node_share_on_cpus(monkeypatch, platform, arrays):
    """Elsewhere all leaves do, whatever their nodes; reading, writing, rows of replicas are as on CPUs."""
    with synk.simulate(2) as group:
        monkeypatch.setattr(type(group), "platform", platform)
        w, twice = synk.shared(layers()), jax.tree.map(lambda v: 2 * v, layers())
        f = synk.function(lambda: None, then=lambda _: w.update(jax.tree.map(lambda v: 2 * v, w.value)))
        assert len(jax.tree.leaves(f.compile().args_info)) == arrays
        f()
        assert stored(w) == arrays
        assert_same(w.value, twice)
        w.set_value(layers(), rank=1)
        assert [len(jax.tree.leaves(v)) for v in (w.get_value(0), w.get_value(1))] == [51, 51]
        assert_same([w.get_value(0), w.get_value(1)], [twice, layers()])
        w.value = layers()
        assert stored(w) == arrays


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_as_many_shapes_as_nodes(monkeypatch, platform):
    """Leaves come back where they were, though leaves of a node and leaves of a shape would be as many arrays."""
    with synk.simulate(2) as group:
        monkeypatch.setattr(type(group), "platform", platform)
        value = [{"b": np.full(4, i, np.float32), "w": np.full((2, 2), -i, np.float32)} for i in range(2)]
        w = synk.shared(value)
        assert_same(w.value, value)
        assert stored(w) == 2
        synk.function(lambda: None, then=lambda _: w.update(jax.tree.map(lambda v: 2 * v, w.value)))()
        assert_same(w.value, jax.tree.map(lambda v: 2 * v, value))


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(("before", "after"), [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_checkpoint_of_another_platform(monkeypatch, tmp_path, before, after, differ):
    """A checkpoint has whole leaves: it loads where others share arrays."""
    for platform, value in ((before, layers()), (after, jax.tree.map(np.zeros_like, layers()))):
        with synk.simulate(2) as group:
            monkeypatch.setattr(type(group), "platform", platform)
            w = synk.shared(value)
            if platform == before:
                w.set_value(value, rank=1 if differ else None)
                synk.save(tmp_path, {"w": w}, step=1)
            else:
                synk.load(tmp_path, {"w": w})
            assert_same(w.get_value(1), layers())
            assert stored(w) == {"cpu": 17, "gpu": 5}[platform]


@pytest.mark.smoke
@KINDS
def test_rows_come_and_go(kind, n):
    """Leaves that hold rows, or others than the first, lie apart, and share an array again when they are as at first."""
    zeros = {"a": np.zeros((2 * n, 2), np.float32), "b": np.zeros((2 * n, 2), np.float32)}

    def of_rows(rows):
        numbers = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        return {"a": np.ones((rows, 2), np.float32), "b": numbers}

    with group_of(kind, n):
        w = synk.shared(zeros)
        f = synk.function(lambda: None, then=lambda _: w.update(jax.tree.map(lambda v: v + 1, w.value)))
        g = synk.function(lambda: w.update(jax.tree.map(lambda v: v * 2, w.value)))
        for rows in (2 * n, 2 * n * n, 3 * n, 1, 2 * n):
            f()
            synk.scatter(w, of_rows(rows))
            g()
            assert_same(synk.gather(w, nd_up=0), jax.tree.map(lambda v: 2 * v, of_rows(rows)))
            synk.all_gather(w)
            f()
            assert_same(w.value, jax.tree.map(lambda v: 2 * v + 1, of_rows(rows)))
            w.set_value(of_rows(rows + 1))
            f()
            assert_same(w.value, jax.tree.map(lambda v: v + 1, of_rows(rows + 1)))
            w.set_value(of_rows(3), rank=n - 1)
            assert_same(w.get_value(n - 1), of_rows(3))
            w.set_value(zeros)
            assert stored(w) == 1
            f()
            assert_same(w.value, jax.tree.map(lambda v: v + 1, zeros))


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("slices", [1, 2])
def test_training_is_the_same(kind, n, slices):
    """A step with momentum gives the same values with a variable a leaf, and keeps the law."""
    rows = numbers(4 * n + 1)
    weights = {f"layer {i}": np.full(2, i, np.float32) for i in range(5)}
    momentum = optax.sgd(0.1, momentum=0.9)

    def trained(make, get, put):
        params, state = make(weights), make(momentum.init(weights))

        @synk.function(inputs=["x"], reduce="mean")
        def step(x):
            return jax.value_and_grad(lambda p: sum(jnp.mean((x - w[None]) ** 2) for w in p.values()))(get(params))

        @step.then
        def step(loss, grads):
            updates, new_state = momentum.update(grads, get(state), get(params))
            put(state, new_state)
            put(params, optax.apply_updates(get(params), updates))
            return loss

        losses = [step(rows, num_slices=slices) for _ in range(3)]
        step.check(rows, num_slices=slices)
        return losses, get(params), get(state)

    def put_apart(variables, tree):
        leaves = jax.tree.leaves(variables, is_leaf=lambda leaf: isinstance(leaf, synk.typing.Shared))
        for variable, leaf in zip(leaves, jax.tree.leaves(tree), strict=True):
            variable.value = leaf

    with group_of(kind, n):
        one = trained(synk.shared, lambda w: w.value, lambda w, new: setattr(w, "value", new))
        other = trained(apart, lambda ws: read(ws, lambda w: w.value), put_apart)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@KINDS
def test_updates_of_slices_and_collectives(kind, n):
    """What combines elementwise combines in the buffers."""
    with group_of(kind, n):
        w = synk.shared({"sum": np.float32(0), "most": np.zeros(2, np.float32)})

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
        with pytest.raises(synk.errors.DivergedError, match=r"w\['most'\]|\['most'\]"):
            synk.check_replicas(w)
        synk.broadcast(w)
        assert float(w.value["sum"]) == parts.max()


@KINDS
def test_one_replica_differs(kind, n, tmp_path):
    """Replicas' own values are read, saved, loaded, blamed and reduced leaf by leaf."""
    with group_of(kind, n):
        w = synk.shared({"a": np.zeros((2, 2), np.float32), "b": np.zeros((2, 2), np.float32)}, name="w")
        new = {"a": np.arange(4, dtype=np.float32).reshape(2, 2), "b": np.full((2, 2), np.inf, np.float32)}
        w.set_value(new, rank=1)
        assert_same(w.get_value(1), new)
        assert_same(synk.reduce(w, "max", in_place=False), new)
        synk.save(tmp_path, {"w": w}, step=1)
        w.set_value(jax.tree.map(np.zeros_like, new))
        synk.load(tmp_path, {"w": w})
        assert_same(w.get_value(1), new)
        assert_same(w.get_value(0), jax.tree.map(np.zeros_like, new))
        f = synk.function(lambda x: (x * w.value["b"][0, 0]).sum(), name="f")
        assert "w['b'] holds numbers that are not finite" in str(f.blame(np.ones(2 * n, np.float32)))


def test_fewer_arrays_go_in_and_out():
    """A program takes one array for sixteen leaves."""
    with group_of("devices", 2):
        w = synk.shared([np.full(3, i, np.float32) for i in range(50)])
        f = synk.function(lambda x: x.sum() + sum(jnp.sum(v) for v in w.value))
        assert len(jax.tree.leaves(f.compile(np.zeros(4, np.float32)).args_info)) == 1 + 4


def test_other_variables_of_a_tree_compile_nothing():
    """What reads a value is a program for its shapes, and keeps no variable."""
    with group_of("devices", 2) as group:
        reads = [
            lambda w: w.value,
            lambda w: w.get_value(1),
            synk.gather,
            lambda w: synk.reduce(w, "max", in_place=False),
        ]
        make = lambda: synk.shared({"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})  # noqa: E731
        for read in reads:
            read(make())
        synk.check_replicas(make())
        before = sum(len(cache._kept) for cache in group._caches.values())
        for _ in range(3):
            w = make()
            for read in reads:
                assert_same(jax.tree.leaves(read(w))[0].ravel()[:3], jnp.ones(3))
            synk.check_replicas(w)
        assert sum(len(cache._kept) for cache in group._caches.values()) == before


def test_messages():
    """What does not fit is named by the user's own leaves."""
    with group_of("devices", 2):
        w = synk.shared({"a": np.zeros(3, np.float32), "b": np.zeros((3, 2), np.float32)}, name="w")
        with pytest.raises(ValueError, match="set_value: the new value of w has the tree"):
            w.set_value({"b": np.zeros(3, np.float32)})
        with pytest.raises(ValueError, match=r"w.value: the new value of w\['b'\] has shape \(3, 1\)"):
            w.value = {"a": np.zeros(3, np.float32), "b": np.zeros((3, 1), np.float32)}
        f = synk.function(lambda: w.update({"a": jnp.zeros(4), "b": jnp.zeros((3, 2))}), name="f")
        with pytest.raises(ValueError, match=r"f: the new value of w\['a'\] has shape \(4,\)"):
            f()


def test_the_users_array_is_not_shared():
    """Nor is it changed by updates."""
    with group_of("devices", 2):
        value = np.zeros(64, np.float32)
        w = synk.shared([value, value])
        value[:] = 7
        before = w.value
        f = synk.function(lambda: w.update([w.value[0] + 1, w.value[1] + 2]))
        f()
        assert_same(before, [np.zeros(64, np.float32)] * 2)
        assert_same(w.value, [np.full(64, i, np.float32) for i in (1, 2)])
