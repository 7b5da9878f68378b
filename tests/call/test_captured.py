"""Arrays that a function captures do what NumPy arrays do there, wherever they lie."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import synk

from ..helpers import group_of, needs_devices, slow, smoke

V = np.linspace(-1.0, 1.0, 4, dtype=np.float32)
X = np.linspace(-2.0, 2.0, 28, dtype=np.float32).reshape(7, 4)


@pytest.fixture(autouse=True)
def as_users_have_it():
    """JAX's own rules for dtypes and shapes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@jax.custom_vjp
def halved(x, y):
    return x * y


halved.defvjp(lambda x, y: (x * y, (x, y)), lambda xy, g: (jnp.where(g > 0, g, g) * xy[1] / 2, g * xy[0]))


def kinds(c, x):
    """Every kind of operation that JAX treats by itself, on a captured array and rows."""

    def step(carry, row):
        return carry + jnp.sum(c * row), None

    return {
        "product": x @ c,
        "vmap": jax.vmap(lambda row: jnp.tanh(jnp.dot(c, row)))(x),
        "where": jnp.where(x > 0, c, x),
        "relu": jax.nn.relu(x * c) + jax.nn.relu(c),
        "inner jit": jax.jit(lambda x: jax.jit(lambda c, x: jnp.clip(c, -0.5, 0.5) * x)(c, x))(x),
        "sort": jnp.sort(c)[::-1] * x,
        "at": c.at[0].set(2.0) + x,
        "row at": jax.vmap(lambda row: c.at[0].add(row[0]).sum())(x),
        "like": jnp.zeros_like(c) + jnp.full_like(c, 2.0) + jnp.asarray(c) * x,
        "grad": jax.vmap(jax.grad(lambda row: jnp.sum(jax.nn.softplus(row * c))))(x),
        "custom": halved(x, jnp.broadcast_to(c, x.shape)),
        "scan": jax.vmap(lambda row: jax.lax.scan(step, row[0], jnp.stack([row, row]))[0])(x),
        "cond": jax.vmap(lambda row: jax.lax.cond(row[0] > 0, lambda: c, lambda: c * 2))(x),
        "checkpoint": jax.checkpoint(lambda x: jnp.sin(x * c))(x),
        "einsum": jnp.einsum("ij,j->i", x, c),
        "solve": jax.vmap(lambda row: jax.scipy.sparse.linalg.cg(lambda u: (4 + c**2) * u, row)[0])(x),
    }


def counted(c, x):
    """A loop that ends by a value, which has no gradient."""
    return jax.vmap(lambda row: jax.lax.while_loop(lambda z: z[0] < 3, lambda z: z + jnp.abs(c), row))(x)


def on_group():
    return NamedSharding(synk.group().mesh, PartitionSpec())


VALUES = {
    "value": lambda: synk.shared(V).value,
    "result": lambda: synk.function(lambda v: v * 1, ["broadcast"])(V) / synk.size(),
    "placed": lambda: jax.device_put(V, on_group()),
    "rows": lambda: jax.device_put(V, NamedSharding(synk.group().mesh, PartitionSpec("replica"))),
    "explicit": lambda: jax.device_put(
        V, NamedSharding(Mesh(np.array(jax.devices()[:2]), "a", axis_types=(AxisType.Explicit,)), PartitionSpec())
    ),
    "auto": lambda: jax.device_put(
        V, NamedSharding(Mesh(np.array(jax.devices()[:2]), "a", axis_types=(AxisType.Auto,)), PartitionSpec())
    ),
    "one device": lambda: jax.device_put(V, jax.devices()[:2][-1]),
}


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


@pytest.mark.parametrize(
    ("value", "replicas"), [smoke("value", 4), *[slow(value, 4) for value in [*VALUES][1:]], slow("rows", 1)]
)
def test_captured_arrays_do_what_numpy_arrays_do(value, replicas):
    """Called, serially, checked, in slices, and under jit; fresh and warm, whether rows divide or not."""
    with group_of("devices", replicas):
        c = VALUES[value]()
        f = synk.function(lambda x: {**kinds(c, x), "while": counted(c, x)}, reduce="concat")
        for rows in (7, 4, 7):
            x = X[:rows]
            wanted = jax.jit(lambda x: {**kinds(jnp.asarray(V), x), "while": counted(jnp.asarray(V), x)})(x)
            close(f(x), wanted)
            close(f(x, num_slices=2), wanted)
        close(f.serial(x), wanted)
        close(jax.jit(f)(x), wanted)
        f.check(x)
        assert f.blame(x) is None
        many = synk.function(f.fn, reduce="concat", engine="pmap")
        close(many(x), wanted)


@pytest.mark.parametrize("value", [smoke("value"), *map(slow, ("rows", "explicit", "one device"))])
def test_gradients_go_through_what_meets_captured_arrays(value):
    """Inside, in then, and under an outer grad, where JAX asks custom rules late."""
    with group_of("devices", 4):
        c = VALUES[value]()

        def loss(c, w, x):
            return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(kinds(c, x * w)))

        f = synk.function(lambda w, x: loss(c, w, x), ["broadcast", "scatter"])
        wanted = jax.jit(jax.grad(lambda w: loss(jnp.asarray(V), w, X)))(0.5)
        close(jax.grad(f)(0.5, X), wanted)
        close(jax.jit(jax.grad(lambda w: f(w, X, num_slices=2)))(0.5), wanted)
        inside = synk.function(jax.grad(lambda w, x: loss(c, w, x)), ["broadcast", "scatter"])
        close(inside(0.5, X), wanted)
        ended = synk.function(lambda x: x.sum(0), then=lambda total: kinds(c, total[None]))
        close(ended(X), kinds(jnp.asarray(V), X.sum(0)[None]))


@pytest.mark.smoke
def test_losses_of_training_steps_capture_values():
    """As in distillation, where the teacher is a value that synk trained."""
    with group_of("devices", 4):
        teacher = synk.shared({"w": V}).value

        def loss(params, x):
            wanted = jax.vmap(lambda row: jax.nn.relu(jnp.dot(row, teacher["w"])))(x)
            return jnp.mean((x @ params["w"] - wanted) ** 2)

        step = synk.train.step(loss, {"w": np.zeros(4, np.float32)}, optax.sgd(0.1))
        got = step(X)
        np.testing.assert_allclose(got, loss({"w": np.zeros(4)}, X), rtol=1e-5)
        step.check(X)


@pytest.mark.parametrize("place", ["mesh", "one device", "nowhere"])
def test_captured_keys_are_keys(place):
    """Typed ones too."""
    with group_of("devices", 4):
        key = jax.random.key(3)
        if place == "mesh":
            key = jax.device_put(key, on_group())
        elif place == "one device":
            key = jax.device_put(key, jax.devices()[:2][-1])

        def noisy(x):
            rows = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(synk.row_numbers())
            return x[:, 0] + rows + jax.jit(lambda: jax.random.uniform(key))()

        f = synk.function(noisy, reduce="concat")
        close(f(X), f.serial(X))
        close(jax.jit(f)(X), f.serial(X))


def test_small_numbers_of_half_a_byte_may_be_captured():
    """int4 among them."""
    with group_of("devices", 4):
        table = synk.shared(np.arange(-4, 4).astype(jnp.int4)).value
        f = synk.function(lambda i: jax.vmap(lambda i: table[i].astype(jnp.int32))(i), reduce="concat")
        assert f(np.arange(7)).tolist() == [-4, -3, -2, -1, 0, 1, 2]


@pytest.mark.parametrize("value", [*map(smoke, ("value", "explicit")), *map(slow, ("rows", "one device"))])
def test_backward_rules_may_capture_values(value):
    """JAX traces the backward rule of a custom_vjp only when it is asked for a gradient; None is a gradient of it too."""
    with group_of("devices", 4):
        c = VALUES[value]()

        @jax.custom_vjp
        def doubled(x, unused):
            return 2 * x

        doubled.defvjp(lambda x, unused: (2 * x, x), lambda x, g: (g * jax.jit(jnp.cos)(c) * x, None))
        f = synk.function(lambda w, x: jnp.sum(doubled(w * x, x)), inputs=["x"])
        wanted = (np.cos(V) * 0.5 * X * X).sum()
        for _ in range(2):
            close(jax.grad(f)(0.5, X), wanted)
        close(jax.jit(jax.vmap(jax.grad(lambda w: f(w, X, num_slices=2))))(jnp.full(2, 0.5)), [wanted] * 2)


@pytest.mark.smoke
def test_inner_jits_may_name_shardings():
    """Inside a replica a sharding has nothing to place."""
    with group_of("devices", 4) as group:
        where = NamedSharding(group.mesh, PartitionSpec())
        for options in ({"in_shardings": where}, {"out_shardings": where}):
            inner = jax.jit(lambda x: 2 * x, **options)
            f = synk.function(lambda x, inner=inner: inner(x), reduce="concat", inputs={"inner": "static"})
            for x in (X, X[:4]):
                close(f(x), 2 * x)
            close(f.serial(X), 2 * X)
            close(jax.jit(f)(X), 2 * X)


@needs_devices(4)
@pytest.mark.parametrize(
    ("capture", "kind", "replicas"),
    [
        smoke("inner jit", "devices", 4),
        slow("array", "devices", 4),
        slow("NumPy", "devices", 1),
        slow("inner jit", "simulated", 3),
    ],
)
def test_large_captured_arrays_are_arguments_of_programs(capture, kind, replicas):
    """XLA folds nothing that they make, copies none of them in branches, and compiles without their numbers."""
    table = np.random.default_rng(0).random((4000, 10), np.float32)
    taken = jnp.asarray(table) if capture != "NumPy" else table

    def scaled(i):
        rows = (jnp.asarray(taken) / jnp.max(jnp.asarray(taken)))[i].sum(1)
        return {"rows": rows, "last": jnp.asarray(taken)[i]}

    fn = jax.jit(scaled) if capture == "inner jit" else scaled
    i = np.arange(4000 - 8, 4000)
    with group_of(kind, replicas):
        f = synk.function(lambda i: fn(i), reduce="concat")
        for rows in (8, 7, 8):
            wanted = scaled(i[:rows])
            for options in ({}, {"num_slices": 2}):
                close(f(i[:rows], **options), wanted)
            close(f.serial(i[:rows]), wanted)
        close(f.over(i, batches=synk.minibatches(8, 3, shuffle=False)), scaled(i))
        close(jax.jit(f)(i), scaled(i))
        f.check(i[:7])
        text = f.compile(i[:7]).as_text() or ""
        assert "divide" not in text and "f32[4000,10]{1,0} constant" not in text
        blocks = synk.function(lambda i: fn(i)["rows"].sum(), blocks=2)
        np.testing.assert_allclose(blocks(i), scaled(i)["rows"].sum(), rtol=1e-5)
        ended = synk.function(lambda i: i, reduce="concat", then=fn)
        close(ended(i), scaled(i))


def test_a_captured_array_that_is_written_keeps_its_old_numbers():
    """As under jax.jit; the serial run has the new ones, and check says so. A donated array stays readable."""
    with group_of("devices", 2):
        table = np.ones((300, 100), np.float32)
        f = synk.function(lambda x: (x * jnp.asarray(table).sum()).sum())
        x = np.ones(3, np.float32)
        assert f(x) == 90_000
        table[:] = 2
        assert (f(x), f.serial(x)) == (90_000, 180_000)
        with pytest.raises(synk.LawError, match="has changed since it was traced"):
            f.check(x)
        array = jnp.asarray(table)
        g = synk.function(lambda x: (x * array.sum()).sum())
        assert g(x) == 180_000
        jax.jit(lambda a: a + 1, donate_argnums=0)(array)
        assert g(x) == 180_000


def test_equal_captured_arrays_lie_on_the_devices_once(group):
    """Two functions, and programs of other numbers of rows, share them; they go with the functions."""
    table = np.ones((100_000,), np.float32)
    functions = [synk.function(lambda i: jnp.asarray(table)[i].sum()) for _ in range(2)]

    def count():
        gc.collect()
        return sum(array.shape == table.shape for array in jax.live_arrays())

    before = count()
    for f in functions:
        for rows in (4, 5):
            f(np.arange(rows))
    assert count() == before + 1
    del functions, f
    assert count() == before
