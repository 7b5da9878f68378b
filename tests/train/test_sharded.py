"""shard_params=True and shard_optimizer=True: the plain step, and everything that is done with variables in shards."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.orbax
import synk.train

from ..helpers import assert_close, assert_same, group_of, needs_devices, slow, slow_but, unchanged

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(47, 131)).astype(np.float32)
# Leaves of more than 16,384 numbers lie in shards. None of them divides.
START = {
    "in": RANDOM.normal(size=(131, 127)).astype(np.float32) / 11,
    "up": RANDOM.normal(size=(3, 127, 47)).astype(np.float32) / 11,
    "down": RANDOM.normal(size=(3, 47, 127)).astype(np.float32) / 7,
    "bias": np.zeros(127, np.float32),
    "scale": np.float32(1),
}
IN_SHARDS = ("in", "up", "down")
SHARDED = [{"shard_params": True}, {"shard_optimizer": True}]
MATRICES = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, 0.9),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 10, 100), mask=MATRICES),
    "several": optax.MultiSteps(optax.lion(1e-3), 2),
    "injected": optax.inject_hyperparams(optax.adam)(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "adagrad": optax.adagrad(1e-3),
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "clip": optax.chain(optax.clip(0.01), optax.adam(1e-3)),
    "averaged": optax.contrib.schedule_free_adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "lars": optax.lars(1e-2),
    "rows and columns": optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "orthogonal": optax.contrib.muon(1e-3),
    "noise": optax.noisy_sgd(0.01, 0.01, key=0),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "sign": optax.sign_sgd(1e-3),
    "halves": optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "radam": optax.radam(1e-3),
    "adan": optax.adan(1e-3),
    "unit": optax.chain(optax.adaptive_grad_clip(0.1), optax.centralize(), optax.sgd(0.1)),
    "prodigy": optax.contrib.prodigy(1e-1),
}


@pytest.fixture(autouse=True)
def promotion():
    """Adam of optax multiplies floats with integers, and biases are added to rows."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def outputs(params, x, wrap=lambda layer: layer, scan=jax.lax.scan):
    """The last numbers of a small network, with one leaf that is used twice."""
    layer = wrap(lambda h, leaves: (h + jnp.tanh(h @ leaves[0]) @ leaves[1], None))
    h, _ = scan(layer, jnp.tanh(x @ params["in"] + params["bias"]), (params["up"], params["down"]))
    return (h * params["scale"]) @ params["in"].T


def by_loop(layer, h, leaves):
    for i in range(3):
        h, _ = layer(h, jax.tree.map(lambda leaf: leaf[i], leaves))  # noqa: B023  # called here
    return h, None


def mean_loss(params, x):
    """Layers in a loop of Python's, and weight decay."""
    decay = 1e-3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return jnp.mean((outputs(params, x, scan=by_loop) - x[:, ::-1]) ** 2) + decay


def scanned_loss(params, x):
    return jnp.mean((outputs(params, x) - x[:, ::-1]) ** 2)


def checkpointed_loss(params, x):
    return jnp.mean((outputs(params, x, jax.checkpoint).astype(jnp.bfloat16).astype(np.float32) - x) ** 2)


def masked_loss(params, x):
    """Some rows count; a part may have none of them, and then a loss and a gradient of NaN."""
    mask = (x[:, 0] > 0.3).astype(jnp.float32)
    return synk.Weighted(((outputs(params, x) ** 2).mean(1) * mask).sum() / mask.sum(), mask.sum())


def steps(loss=mean_loss, optimizer=OPTIMIZERS["adamw"], start=START, **options):  # it has no state
    """The plain step, one with parameters in shards, and one with its optimizer's state alone."""
    return [synk.train.step(loss, start, optimizer, **options, **more) for more in ({}, *SHARDED)]


def floats(value):
    """The leaves as float64; keys as numbers."""
    leaves = jax.tree.leaves(value)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(a) if k else a, np.float64) for a, k in zip(leaves, is_key, strict=True)]


def assert_like(step, other, tolerance=2e-6):
    """Equal to so much of the largest number of each leaf."""
    assert step.variables.keys() == other.variables.keys()
    for name in {*other.variables} - {"feedback"}:  # which is each replica's own
        for got, want in zip(floats(step.variables[name].value), floats(other.variables[name].value), strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(initial=1e-6), err_msg=name)


def bits_of(step):
    return {name: jax.tree.map(np.asarray, variable.value) for name, variable in step.variables.items()}


# In float64, where a difference tells of a mistake, and not of rounding.
WIDE = 1e-11
LOSSES = [mean_loss, scanned_loss, checkpointed_loss, masked_loss]


@pytest.mark.parametrize(
    ("group", "loss", "rows"),
    [
        (("devices", 3), masked_loss, [(41, 1), (41, 2)]),
        (("simulated", 2), mean_loss, [(40, 1), (1, 1)]),
        *[slow(("devices", 5), loss, [(40, 1), (41, 1), (41, 3), (10, 4)]) for loss in LOSSES],
        slow(("devices", 1), masked_loss, [(40, 1), (41, 1), (41, 3), (10, 4)]),
        *[slow(("simulated", 3), loss, [(40, 1), (41, 1), (41, 3)]) for loss in LOSSES[::2]],
        slow(("devices", 8), mean_loss, [(n, 1 + n % 3) for n in range(1, 42, 5)]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_law(group, loss, rows):
    """The same losses, parameters, state and average as of the plain step, for any rows, replicas and slices."""
    with group_of(*group), jax.enable_x64(True):
        x, start = jax.tree.map(np.float64, (X, START))
        plain, *sharded = steps(loss, OPTIMIZERS["sgd"], start, ema=0.9, clip=0.5)
        for count, slices in rows * 2:
            want = plain(x, batch=count, num_slices=slices)
            for step in sharded:
                np.testing.assert_allclose(step(x, batch=count, num_slices=slices), want, rtol=WIDE)
                assert_like(step, plain, WIDE)
        synk.check_replicas(*sharded[0].variables.values())


@pytest.mark.parametrize("name", slow_but(["adamw", "global norm", "rows and columns"], OPTIMIZERS))
def test_optimizers(name):
    """Every optimizer makes of shards what it makes of the whole; of its state each replica keeps one n-th."""
    with group_of("devices", 3), jax.enable_x64(True):
        x, start = jax.tree.map(np.float64, (X, START))
        plain, *sharded = steps(scanned_loss, OPTIMIZERS[name], start)
        for step in (plain, *sharded):
            for _ in range(3):
                step(x)
        for step in sharded:
            assert_like(step, plain, WIDE)
            for variable in (step.opt_state, *[step.params] * (step is sharded[0])):
                stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in variable._state.leaves)
                large = [leaf for leaf in jax.tree.leaves(variable.value) if leaf.nbytes > 1 << 16]
                whole = sum(leaf.nbytes for leaf in jax.tree.leaves(variable.value))
                assert stored <= whole - sum(leaf.nbytes for leaf in large) * 2 / 3 + 24 * len(large)


def log(grads, updates, params):
    return optax.tree.norm(grads), jax.tree.map(lambda a, b: (a * b).sum(), updates, params), params["in"]


OPTIONS = {
    "log": {"log": log},
    "nan": {"nan": "raise"},
    "kept": {"donate": False},
    "wire": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "low rank": {"wire": synk.contrib.PowerSGD(2)},
    "clip, ema, log": {"clip": 0.1, "ema": 0.5, "log": log},
    "slices": {"num_slices": 3},
}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *[(name, ("devices", 2)) for name in ("clip, ema, log", "low rank")],
        *[slow(name, ("devices", 2)) for name in OPTIONS if name not in ("clip, ema, log", "low rank")],
        *[slow(name, ("simulated", 3)) for name in ("int8", "low rank", "slices")],
    ],
    ids=str,
)
def test_options(name, group):
    """They do what they do in the plain step."""
    with group_of(*group):
        num_slices = OPTIONS[name].get("num_slices", 1)
        options = {key: value for key, value in OPTIONS[name].items() if key != "num_slices"}
        plain, *sharded = steps(optimizer=OPTIMIZERS["sgd"], **options)
        for _ in range(2):
            want = plain(X, num_slices=num_slices)
            for step in sharded:
                assert_close(step(X, num_slices=num_slices), want, rtol=1e-3 if "wire" in options else 1e-5)
        for step in sharded:
            assert_like(step, plain, 1e-3 if "wire" in options else 5e-6)


def test_state_and_aux(four):
    """They combine as ever."""

    def loss(params, state, x):
        return mean_loss(params, x), state + x.mean(0), x.max()

    plain, *sharded = steps(loss, state=np.zeros(131, np.float32), aux="max")
    for step in (plain, *sharded):
        step(X)
        assert float(step(X)[1]) == X.max()
        assert_like(step, plain)


def test_what_runs_steps(tmp_path):
    """Lists of calls, many batches, serial runs, checks and diagnosis take steps in shards as others."""
    with group_of("devices", 2):
        plain, step, _ = steps()
        batches = [slice(0, 8), slice(8, 16), slice(3, 20), slice(20, 28)]
        want = [plain(X, batch=batch) for batch in batches]
        got = [*step.iterate(X, batches=batches, per_launch=2)]
        assert_close(np.concatenate([np.ravel(each) for each in got]), np.stack(want))
        assert_like(step, plain, 5e-6)
        np.testing.assert_allclose(step.serial(X), plain.serial(X), rtol=1e-6)
        step.check(X)
        assert step.blame(X) is None
        with unchanged(*step.variables.values()):
            synk.contrib.tune(step, X, seconds=0.2)
        step.compile(X)
        assert {c.kind for p in step.explain(X).programs for c in p.collectives} >= {"all-gather", "reduce-scatter"}
        f = synk.function(lambda x: jnp.tanh(x @ step.params.value["in"]).sum(0))
        assert_close(f.over(X, batches=batches[:2]), np.tanh(X[:16] @ np.asarray(step.params.value["in"])).sum(0), 1e-5)
        assert_close(f.serial(X), f(X), rtol=1e-5)


def test_groups_of_blocks():
    """The bits of a step in blocks depend on no replica, in shards neither; simulated replicas refuse them."""
    bits = []
    for n in (1, 2, 3):
        with group_of("devices", n):
            step = synk.train.step(mean_loss, START, OPTIMIZERS["sgd"], shard_params=True, blocks=8)
            bits.append([float(step(X, batch=rows)) for rows in (40, 21)] + [bits_of(step)])
    assert_same(bits[1], bits[0])
    assert_same(bits[2], bits[0])
    with synk.simulate(2), pytest.raises(ValueError, match=r"blocks=8 runs simulated replicas one by one"):
        synk.train.step(mean_loss, START, OPTIMIZERS["sgd"], shard_params=True, blocks=8)(X)


@pytest.mark.parametrize("group", [("devices", 3), slow(("devices", 1)), slow(("simulated", 3))], ids=str)
def test_the_variable(group):
    """Read and assigned as a whole, before it is placed and after."""
    with group_of(*group):
        w = synk.shared(START, "w", sharded=True)
        for value in (START, jax.tree.map(lambda leaf: leaf + 1, START)):
            w.value = value
            assert_same(w.value, jax.tree.map(jnp.asarray, value))
            for rank in (0, group[1] - 1):
                assert_same(w.get_value(rank), value)
                assert_same(w.get_value(rank, borrow=True), value)
            total = synk.function(lambda x: w.value["in"].sum(0) + x.sum(), reduce="mean")(X[:9, :3])
            assert_close(
                total, value["in"].sum(0) + sum(p.sum() for p in np.array_split(X[:9, :3], group[1])) / group[1]
            )
            synk.check_replicas(w)
            assert synk.contrib.synkhronos.get_shapes(w)[0]["up"] == (3, 127, 47)
            w.set_value(START)
            synk.broadcast(w)
            assert_same(w.value, jax.tree.map(jnp.asarray, START))
            synk.broadcast(w, value)
            assert_same(w.value, jax.tree.map(jnp.asarray, value))
        assert repr(w).startswith("Shared(w: float32[127], float32[3, 47, 127], float32[131, 127]")
        with pytest.raises(ValueError, match=r"w.*shape"):
            w.value = jax.tree.map(lambda leaf: np.zeros((2, *np.shape(leaf)), leaf.dtype), START)


def test_a_function_makes_it():
    """Its value is that of the function; one that is a leaf of no tree stays a value."""
    make = lambda: {"a": jax.random.normal(jax.random.key(0), (131, 127)), "b": jnp.arange(3)}  # noqa: E731
    for group in (("devices", 3), ("simulated", 2), ("devices", 1)):
        with group_of(*group):
            w = synk.shared(make, "w", sharded=True)
            assert "float32[131, 127]" in repr(w)
            assert_close(w.value, make(), rtol=1e-6)
            step = synk.train.step(
                lambda p, x: (p["a"] ** 2).mean() * x.mean(),
                lambda: {"a": jnp.ones((131, 127))},
                optax.sgd(1.0),
                shard_params=True,
            )
            step(X)
            assert step.params._state.leaves[0].shape[0] == group[1] or group[1] == 1
    with pytest.raises(TypeError, match="sharded is 1"):
        synk.shared(START, sharded=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["shard_params", "shard_optimizer", "ema"])
def test_a_function_makes_parameters(four, option):
    """A step and a variable take one, whether the value lies in shards or is whole."""
    make = lambda: {"w": jnp.full(5, 2.0)}  # noqa: E731
    assert_close(synk.shared(make).value["w"], np.full(5, 2.0))
    value = 0.5 if option == "ema" else True
    step = synk.train.step(lambda p, x: x.mean() * p["w"].mean(), make, optax.sgd(1.0), **{option: value})
    assert step(np.ones(5, np.float32)) == 2
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        synk.shared(lambda x: x)


def test_what_raises(four):
    """No replica has a value of its own; the message says so, and nothing changes."""
    w = synk.shared(START, "w", sharded=True)
    words = "w lies in shards"
    for refused in (
        lambda: w.set_value(START, rank=0),
        lambda: synk.all_reduce(w),
        lambda: synk.reduce(w),
        lambda: synk.gather(w),
        lambda: synk.all_gather(w),
        lambda: synk.scatter(w, START),
        lambda: w.set_value(START, rank=0),
    ):
        with pytest.raises(synk.SynkError, match=words):
            refused()

    def update(x):
        w.value = jax.tree.map(lambda leaf: leaf + x.sum(), w.value)

    with pytest.raises(ValueError, match=r"update: it updates w, which lies in shards.*in then"):
        synk.function(update)(X)
    with pytest.raises(ValueError, match='shard_params=True is for parts of a batch, but engine="jit"'):
        synk.train.step(mean_loss, START, optax.sgd(0.1), shard_params=True, engine="jit")
    with pytest.raises(ValueError, match="shard_params=True, but v is whole on every replica"):
        synk.train.step(mean_loss, synk.shared(START, "v"), optax.sgd(0.1), shard_params=True)
    with pytest.raises(synk.SynkError, match="shards"):
        synk.contrib.local_steps(mean_loss, w, optax.sgd(0.1), every=2)
    with pytest.raises((ValueError, synk.SynkError), match="shards"):
        synk.function(lambda x: x @ w.value["in"], reduce="concat", engine="jit")(X)
    called = synk.function(lambda x: jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), np.float32), x) * w.value["in"])
    with pytest.raises(ValueError, match=r"it has callbacks and reads a variable in shards.*Give rows that divide"):
        called(X[:7])
    assert_close(called(X[:8]), X[:8].sum() * START["in"], rtol=1e-4, atol=1e-3)
    assert_same(w.value, jax.tree.map(jnp.asarray, START))


def made(optimizer=optax.adam(0.01), **options):  # noqa: B008  # it has no state
    return synk.train.step(mean_loss, START, optimizer, **options)


@pytest.mark.parametrize("module", [synk, slow(synk.orbax)], ids=["synk", "orbax"])
def test_checkpoints_go_anywhere(tmp_path, module):
    """From eight in shards to three whole, five in shards and one: the same bits; and the next step is the same."""

    def folder(name):
        if module is synk:
            return tmp_path / name
        return pytest.importorskip("orbax.checkpoint").CheckpointManager(tmp_path / name)

    with group_of("devices", 8):
        step = made(shard_params=True, ema=0.9)
        step(X)
        module.save(place := folder("8"), step.variables, step=1)
        bits = bits_of(step)
        want = float(step(X))
    for n, options in [
        (3, {}),
        (5, {"shard_params": True}),
        (2, {"shard_optimizer": True}),
        (1, {"shard_params": True}),
    ]:
        with synk.simulate(n) if n == 2 else group_of("devices", n):
            other = made(ema=0.9, **options)
            module.load(place, other.variables)
            assert_same(bits_of(other), bits)
            module.save(place := folder(f"{n}"), other.variables, step=1)
            np.testing.assert_allclose(other(X), want, rtol=1e-6)
            module.load(place, other.variables)
            assert_same(bits_of(other), bits)


@pytest.mark.slow
def test_loaded_before_it_is_placed_and_after(tmp_path):
    """A variable of shapes alone takes a checkpoint too; background saves copy; and a loop is resumed."""
    with synk.simulate(3):
        step = made(shard_params=True)
        step(X)
        synk.save(tmp_path / "a", step.variables, step=1, background=True)
        step(X)
        after = bits_of(step)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype), START)
        other = synk.train.step(mean_loss, shapes, optax.adam(0.01), shard_params=True)
        synk.load(tmp_path / "a", other.variables)
        other(X)
        assert_same(bits_of(other), after)


def test_a_run_in_pieces(tmp_path):
    """Broken off on three replicas, and resumed on two from shards, it ends as one run."""
    for n, stop in ((3, 2), (2, 5)):
        with group_of("devices", n):
            step, plain = made(shard_params=True), made()
            for i in synk.resume(range(4), step.variables, folder=tmp_path / "run", save_every=1e-9):
                if i == stop:
                    break
                assert n == 3 or i >= 1
                step(X, batch=slice(9 * i, 9 * i + 9))
    with group_of("devices", 2):
        for i in range(4):
            plain(X, batch=slice(9 * i, 9 * i + 9))
        assert_like(step, plain, 1e-5)


@pytest.mark.parametrize("options", [{"shard_params": True}, slow({"shard_optimizer": True})])
def test_what_is_not_finite_is_not_taken(four, options):
    """nan="raise": neither parameters nor shards change."""
    step = made(nan="raise", **options)
    step(X)
    bad = X.copy()
    bad[-1] = np.nan
    with unchanged(*step.variables.values()):
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="row 46"):
                step(bad)
    step(X)


def test_padding_is_not_looked_at(four):
    """What an optimizer makes of the zeros behind the last number is nobody's, not even NaN."""
    step = synk.train.step(
        lambda w, x: ((w - x.mean()) ** 2).mean(), START["in"], optax.rmsprop(1e-3, eps=0.0, momentum=0.9),
        shard_params=True, nan="raise",
    )  # fmt: skip
    for _ in range(2):
        step(X)
    assert np.isfinite(step.params.value).all()


def test_the_norm_is_not_narrowed(four):
    """Of halves beside floats, as the plain step has it."""
    start = {"a": jnp.ones((264, 133), jnp.bfloat16), "b": np.ones(50, np.float32)}

    def loss(params, x):
        return (params["a"].astype(jnp.float32) * x.mean()).sum() + (params["b"] * jnp.arange(50.0)).sum()

    plain, *sharded = steps(loss, optax.sgd(0.1, 0.9), start, clip=0.5)
    for step in (plain, *sharded):
        for _ in range(3):
            step(X)
        np.testing.assert_allclose(step.params.value["b"], plain.params.value["b"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_what_a_failure_took_is_set_again(four, tmp_path, options):
    """Parameters and shards that were donated to a step that died: assigned, loaded, given to all."""

    def callback(x):
        if fails:
            raise RuntimeError("no")
        return x

    def loss(params, x):
        noise = jax.pure_callback(callback, jax.ShapeDtypeStruct((), np.float32), jax.lax.stop_gradient(x.mean()))
        return jnp.mean((x @ params) ** 2) + noise

    fails = False
    step = synk.train.step(loss, START["in"], optax.adam(0.01), **options)
    step(X[:40])
    synk.save(tmp_path, step.variables, step=1)
    kept = jax.tree.map(np.asarray, (step.params.value, step.opt_state.value))

    def load():
        synk.load(tmp_path, step.variables)

    def assign():
        step.params.value, step.opt_state.value = kept

    def give():
        synk.broadcast([step.params, step.opt_state], [*kept])

    wanted = []
    for heal in (load, assign, give):
        fails = True
        with pytest.raises(Exception):  # noqa: B017  # of JAX's own, now or when it is read
            step(X[:40])
            step.opt_state.value
        fails = False
        heal()
        jax.tree.map(np.testing.assert_array_equal, kept, (step.params.value, step.opt_state.value))
        wanted.append(float(step(X[:40])))
    assert len(set(wanted)) == 1


def test_replicas_must_share_their_parameters(four):
    """A state made from different ones would be a patchwork; nothing runs, and the state is that of equal ones."""
    steps = [synk.train.step(mean_loss, START, OPTIMIZERS["averaged"], shard_optimizer=s) for s in (True, False)]
    for step in steps:
        step.params.set_value(jax.tree.map(lambda leaf: leaf * 2, START), rank=1)
    with pytest.raises(synk.errors.DivergedError, match="params"):
        steps[0](X)
    for step in steps:
        step.params.value = START
        step(X)
    assert_like(*steps)


@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_state_is_made_with_the_step(four, options):
    """Of the parameters as they are then, whatever they become before the first step."""
    plain, step = (made(ema=0.9, optimizer=OPTIMIZERS["averaged"], **more) for more in ({}, options))
    for each in (plain, step):
        each.params.value = jax.tree.map(lambda leaf: leaf + 1, START)
    assert_same(bits_of(step), bits_of(plain))


def large_arrays():
    """The arrays that live and have as many numbers as a leaf that lies in shards."""
    gc.collect()
    return sum(array.size > 1 << 14 for array in jax.live_arrays())


@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_a_step_is_let_go(four, options):
    """What made its state keeps neither the parameters nor the state."""
    before = large_arrays()
    step = made(**options)
    assert jax.tree.leaves(step.opt_state.value)
    assert large_arrays() > before
    del step
    assert large_arrays() == before


@pytest.mark.parametrize("options", SHARDED, ids=str)
def test_one_group(four, options):
    """It lives in the group of its first use."""
    step = made(**options)
    step(X)
    with synk.simulate(2), pytest.raises(synk.SynkError, match="lives in"):
        step(X)
    step(X)
    assert step.stats.compilations == 1


@needs_devices(4)
def test_what_travels(four):
    """The state in shards as much as an all-reduce; parameters too, half as much again."""
    sent = []
    for step in steps(lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.01), START["in"]):
        explained = step.explain(X[:40])
        by_ring = {"all-reduce": 2 * 3 / 4, "reduce-scatter": 3 / 4, "all-gather": 3}
        sent.append(sum(by_ring[c.kind] * c.operand_bytes for p in explained.programs for c in p.collectives))
    assert 0.95 < sent[2] / sent[0] < 1.05
    assert sent[1] / sent[0] < 1.55
