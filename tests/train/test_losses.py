"""Losses and optimizers of every form: what weighs nothing says nothing, states are the loss's own, and words name causes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from ..helpers import assert_close, numbers, slow

X = numbers(11, 3)
W = np.ones(3, np.float32)


def squares(params, x):
    return ((x @ params) ** 2).mean()


def masked(params, state, x, mask):
    """The mean over the rows that the mask leaves, and what is kept of these."""
    weight = mask.sum()
    mean = (x.sum(1) * mask).sum() / weight
    new = {"mean": mean, "steps": state["steps"] + 1, "key": jax.random.split(state["key"])[0]}
    return synk.Weighted((((x @ params) ** 2) * mask).sum() / weight, weight), new


def model_state():
    return {"mean": np.float32(7), "steps": np.int32(0), "key": jax.random.key(0)}


@pytest.mark.parametrize("slices", [slow(1), 2])
def test_the_state_of_parts_of_weight_0(group, slices):
    """Has no say, NaN included; where the whole batch weighs nothing the old one stays."""
    mask = np.array([1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0], np.float32)
    one, other = [synk.train.step(masked, W, optax.sgd(0.01), state=model_state()) for _ in range(2)]
    for _ in range(2):
        one(X, mask, num_slices=slices)
        other.serial(X, mask, update=True)
        assert np.isfinite(one.state.value["mean"]) and int(one.state.value["steps"]) == int(other.state.value["steps"])
    assert_close(one.params.value, other.params.value)
    if group.size == 1 and slices == 1:
        assert_close(one.state.value["mean"], other.state.value["mean"])
    kept = float(one.state.value["mean"])
    one(X, np.zeros(11, np.float32), num_slices=slices)
    assert float(one.state.value["mean"]) == kept
    alone = np.array([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], np.float32)
    refusing = synk.train.step(masked, W, optax.sgd(0.01), state=model_state(), nan="raise")
    refusing(X, alone, num_slices=slices)
    assert_close(refusing.state.value["mean"], X[3].sum())


@pytest.mark.parametrize("make", [synk.train.step, lambda *args, **kw: synk.contrib.local_steps(*args, every=1, **kw)])
def test_a_state_that_the_loss_changes_in_place(group, make):
    """It is the loss's own tree, as under `jax.value_and_grad`."""

    def counting(params, state, x):
        state["n"] = state["n"] + 1
        return squares(params, x), state

    step = make(counting, W, optax.sgd(0.01), state={"n": np.float32(0)})
    for _ in range(3):
        step(X)
    assert float(step.state.value["n"]) == pytest.approx(3)


@pytest.mark.parametrize("shard", [False, slow(True)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), 2),
        lambda: optax.MultiSteps(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), 2),
        lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
        lambda: optax.adam(0.1),
    ],
)
def test_optimizers_that_take_the_loss_or_do_not(group, make, shard):
    """Whatever their class says of it: those steps that optax takes by hand."""
    optimizer = make()
    step = synk.train.step(squares, W, optimizer, shard_optimizer=shard)
    params = jnp.asarray(W)
    state = optimizer.init(params)
    for _ in range(5):
        loss, grads = jax.value_and_grad(squares)(params, X)
        try:
            updates, state = optimizer.update(grads, state, params, value=loss)
        except TypeError:
            updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        step(X)
    assert_close(step.params.value, params)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        optax.lbfgs,
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
        lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
    ],
)
def test_optimizers_that_evaluate_the_loss(group, make, shard):
    """They are told how: a step has only gradients for them."""
    with pytest.raises(
        TypeError, match=r"synk.train: .* evaluates the loss itself .* value_fn=lambda .* grad_fn=jax.grad"
    ):
        synk.train.step(squares, W, make(), shard_optimizer=shard)(X)
    with pytest.raises(TypeError, match="required positional argument"):  # an error of its own comes as it is
        synk.train.step(squares, W, optax.GradientTransformation(lambda w: (), lambda u, s, p, more: (u, s)))(X)


def private():
    """An optimizer that clips the gradient of each example, without noise."""
    clipped = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=jax.random.key(0))
    return optax.chain(clipped, optax.sgd(0.1))


@pytest.mark.parametrize(
    "make",
    [
        synk.train.step,
        lambda *args: synk.train.step(*args, shard_optimizer=True),
        lambda *args: synk.train.step(*args, wire=synk.contrib.PowerSGD(1)),
        lambda *args: synk.contrib.local_steps(*args, every=1),
    ],
)
def test_updates_have_the_shapes_of_parameters(group, make):
    """Else one that takes the rows of a mean gradient for examples would train something, stretched over the whole."""

    def loss(params, x):
        return squares(params["w"], x)

    with pytest.raises(
        ValueError, match=r"update of params\['w'\] has shape \(\), but that has shape \(3,\).* reduce=\"concat\""
    ):
        make(loss, {"w": W}, private())(X)
    with pytest.raises(ValueError, match=r"Unlike other transforms.*batch dimension"):  # optax's own words
        make(lambda params, x: loss(params, x) + params["z"], {"w": W, "z": np.float32(0)}, private())(X)


def test_a_state_whose_dtype_an_update_changes(group):
    """As optax.inject_hyperparams of parameters of two dtypes; what the message names works."""

    def loss(params, x):
        return (x @ params["a"] + x @ params["half"].astype(jnp.float32)).mean()

    params = {"a": np.ones(3, np.float32), "half": jnp.ones(3, jnp.bfloat16)}
    names = ("b1", "b2", "eps", "eps_root")
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(TypeError, match=r"an update makes float32 of .*mu\['half'\].*static_args=\('b1'"):
            synk.train.step(loss, params, optax.inject_hyperparams(optax.adam)(learning_rate=0.1))(X)
        for right in (
            optax.inject_hyperparams(optax.adam, static_args=names)(learning_rate=0.1),
            optax.inject_hyperparams(optax.adam, static_args=("mu_dtype",))(learning_rate=0.1, mu_dtype=jnp.float32),
        ):
            step = synk.train.step(loss, params, right)
            for _ in range(2):
                step(X)
            assert step.params.value["half"].dtype == jnp.bfloat16


def test_updates_from_the_gradient_of_each_example(group):
    """What those messages tell to do: the step that optax takes by hand, in slices too."""
    optimizer, gradients = private(), jax.vmap(jax.grad(lambda w, row: squares(w, row[None])), (None, 0))
    updates, _ = optimizer.update(gradients(jnp.asarray(W), X), optimizer.init(W), W)
    for slices in (1, 2):
        w, state = synk.shared(W), synk.shared(optimizer.init(W))

        def then(grads, w=w, state=state):
            updates, state.value = optimizer.update(grads, state.value, w.value)
            w.value = optax.apply_updates(w.value, updates)

        synk.function(lambda x, w=w: gradients(w.value, x), ["x"], "concat", then=then)(X, num_slices=slices)
        assert_close(w.value, optax.apply_updates(W, updates))


def test_local_steps_compare_states_and_weights(group):
    """As synchronous ones: a shape is not stretched, and what is wrong is named."""
    with pytest.raises(ValueError, match=r"the new value of state has shape \(\), but its old one has \(2,\)"):
        synk.contrib.local_steps(
            lambda p, s, x: (squares(p, x), jnp.float32(2)), W, optax.sgd(0.1), state=np.zeros(2, np.float32), every=1
        )(X)
    with pytest.raises(ValueError, match="the new value of state has the tree"):
        synk.contrib.local_steps(
            lambda p, s, x: (squares(p, x), {"a": s}), W, optax.sgd(0.1), state=np.zeros(2, np.float32), every=1
        )(X)
    for make in (synk.train.step, lambda *args: synk.contrib.local_steps(*args, every=1)):
        with pytest.raises(ValueError, match=r"the weight of its loss has shape .*; a part has one scalar weight"):
            make(lambda p, x: synk.Weighted(squares(p, x), jnp.ones(len(x))), W, optax.sgd(0.1))(X)
        for loss in (
            lambda p, x: {"l": squares(p, x)},
            lambda p, x: synk.Weighted((squares(p, x), squares(p, x)), 2.0),
            lambda p, x: None,
        ):
            with pytest.raises(TypeError, match=r"it returned a loss of (dict|tuple|NoneType); return the mean over"):
                make(loss, W, optax.sgd(0.1))(X)


def test_clip_is_a_number(group):
    """Of any kind, which leaves the dtype of gradients alone."""
    for clip in (np.float32(0.5), np.float64(0.5), jnp.float32(0.5), 1):
        for dtype in (np.float32, jnp.bfloat16):
            step = synk.train.step(squares, jnp.ones(3, dtype), optax.sgd(0.1), clip=clip)
            step(X)
            assert step.params.value.dtype == dtype
    for clip in ("1", True, np.ones(2)):
        with pytest.raises(TypeError, match=r"clip is .*; give the largest global norm of a gradient, a number > 0"):
            synk.train.step(squares, W, optax.sgd(0.1), clip=clip)
    for clip in (0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"clip is .*; give the largest global norm of a gradient, a number > 0"):
            synk.train.step(squares, W, optax.sgd(0.1), clip=clip)


@pytest.mark.parametrize("params", [None, {}, ()])
def test_no_parameters(group, params):
    """A loss may have none, whatever the optimizer counts."""
    step = synk.train.step(lambda p, x: x.mean(), params, optax.adam(0.1))
    for _ in range(2):
        assert_close(step(X), X.mean())


@pytest.mark.slow
def test_blocks_of_large_integer_weights():
    """Weights are added up as floats, so they too combine by the tree."""

    def loss(params, y, tokens):
        return synk.Weighted((params * y * (tokens / tokens.sum())).sum(), tokens.sum())

    rng = np.random.default_rng(6)
    tokens, y = rng.integers(2**22, 2**25, size=16).astype(np.int32), rng.normal(size=16).astype(np.float32)
    found = set()
    for size in (1, 2, 3, 5):
        with synk.simulate(size):
            step = synk.train.step(loss, np.float32(1), optax.sgd(1.0), blocks=1)
            step.check(y, tokens)
            step(y, tokens)
            found.add(step.params.value.tobytes())
    assert len(found) == 1


def test_what_is_owed_comes_on_one_replica_too(tmp_path):
    """PowerSGD's leftovers of two replicas, loaded into one: added once."""
    slopes = np.random.default_rng(1).normal(size=(8, 12, 7)).astype(np.float32)

    def made():
        return synk.train.step(
            lambda w, slopes: (w[None] * slopes).sum((1, 2)).mean(),
            np.zeros((12, 7), np.float32),
            optax.sgd(1.0),
            wire=synk.contrib.PowerSGD(1),
        )

    with synk.simulate(2):
        step = made()
        for _ in range(3):
            step(slopes)
        step.check(slopes)
        synk.save(tmp_path, step.variables, step=3)
    with synk.simulate(1):
        step = made()
        synk.load(tmp_path, step.variables)
        step.check(slopes)
        for _ in range(4):
            step(slopes)
        step.check(slopes)
        np.testing.assert_allclose(step.params.value, -7 * slopes.mean(0), atol=1e-4)
        assert not np.any(step.variables["feedback"].value[0])


def test_shards_refuse_what_differed(tmp_path):
    """A checkpoint whose replicas differed makes no state that lies in shards; nothing is loaded."""
    with synk.simulate(3):
        local = synk.contrib.local_steps(squares, W, optax.sgd(0.1, 0.9), every=2, optimizer_state=False)
        local(X)
        local.finish()
        synk.save(tmp_path, local.variables, step=1)
        step = synk.train.step(squares, W, optax.sgd(0.1, 0.9), shard_optimizer=True)
        with pytest.raises(ValueError, match="opt_state differed on its replicas, but opt_state lies in shards"):
            synk.load(tmp_path, step.variables, partial=True)
        assert_close(step.params.value, W)
        step(X)
