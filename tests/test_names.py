"""Names: the modules and names that synk exports, and its words for names that it does not have."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train

from . import harness


def test_train_after_import_synk_alone():
    """`import synk` is enough for `synk.train.step`, and for what is in `synk.contrib`."""
    names = "synk.train.step synk.contrib.local_steps synk.contrib.synkhronos.fork synk.errors.PeerError".split()
    done = harness.python(f"import synk; print({', '.join(f'{name}.__name__' for name in names)})")
    assert done.stdout.split() == [name.rpartition(".")[2] for name in names], done.stderr


def test_import_leaves_out_what_most_programs_never_use():
    """Checks, reports, checkpoints and other processes are loaded when they are first used."""
    code = """
import sys, synk, synk.train
rare = ("_check", "_explain", "contrib", "_loops.over", "_saving", "_distributed.agreement")
print([name for name in sys.modules if name.startswith(tuple(f"synk.{module}" for module in rare))])
from synk import save
from synk.contrib import scan
print(save.__module__, scan.__module__, "synk.contrib._scan" in sys.modules, "synk.contrib._tune" in sys.modules)
"""
    done = harness.python(code)
    assert done.stdout.splitlines() == ["[]", "synk synk.contrib True False"], done.stderr


OLD_NAMES = {
    "updates=": (lambda: synk.function(jnp.sum, updates=[]), TypeError, r"\.value|then"),
    "givens=": (lambda: synk.function(jnp.sum, givens=[]), TypeError, "arguments|broadcast"),
    "bcast_inputs=": (lambda: synk.function(jnp.sum, bcast_inputs=[]), TypeError, "broadcast"),
    "f.build_inputs": (
        lambda: synk.function(jnp.sum).build_inputs,
        AttributeError,
        r"synk\.contrib\.synkhronos\.build_inputs.*synk\.data",
    ),
    "f.as_theano": (lambda: synk.function(jnp.sum).as_theano, AttributeError, "serial"),
    "synk.free_memory": (lambda: synk.free_memory, AttributeError, r"\.free\b|synk\.close"),
    "in_axes=": (lambda: synk.function(jnp.sum, in_axes=(None, 0)), TypeError, 'jax.pmap has. .*"broadcast"'),
    "out_axes=": (lambda: synk.function(jnp.sum, out_axes=None), TypeError, 'jax.pmap has. .*"same"'),
    "donate_argnums=": (lambda: synk.function(jnp.sum, donate_argnums=0), TypeError, "never overwritten"),
    "static_broadcasted_argnums=": (
        lambda: synk.function(jnp.sum, static_broadcasted_argnums=1),
        TypeError,
        'jax.pmap has. .*"static"',
    ),
    "axis_size=": (lambda: synk.function(jnp.sum, axis_size=4), TypeError, "rows are counted"),
    "devices=": (lambda: synk.function(jnp.sum, devices=[]), TypeError, r"synk\.init\(devices\)"),
    "backend=": (lambda: synk.function(jnp.sum, backend="cpu"), TypeError, r"synk\.init\(jax\.devices"),
    "axis_name=": (lambda: synk.init(axis_name="batch"), TypeError, "jax.pmap has. .*axis_name"),
    "has_aux=": (
        lambda: synk.train.step(jnp.mean, X, optax.sgd(0.1), has_aux=True),
        TypeError,
        r"train\.step\(\) got .*jax\.grad has\. .*aux=",
    ),
    "reduction=": (lambda: synk.function(jnp.sum, reduction="mean"), TypeError, 'torch have. .*reduce="mean"'),
    "num_slices=": (lambda: synk.function(jnp.sum, num_slices=2), TypeError, r"calls have\. .*f\(x, num_slices=2\)"),
    "batch_size=": (lambda: synk.function(jnp.sum, batch_size=64), TypeError, r"loaders have\. .*synk\.minibatches"),
    "synk.pmap": (lambda: synk.pmap, AttributeError, r"JAX has. .*synk\.map"),
    "synk.pmean": (lambda: synk.pmean, AttributeError, 'jax.lax has. .*"mean"'),
    "synk.psum": (lambda: synk.psum, AttributeError, 'jax.lax has. .*"sum"'),
    "synk.replicate": (lambda: synk.replicate, AttributeError, r"Flax has. .*synk\.shared"),
    "synk.unreplicate": (lambda: synk.unreplicate, AttributeError, r"Flax has. .*\.value"),
    "synk.shard": (lambda: synk.shard, AttributeError, "rows as they are"),
    "synk.prefetch_to_device": (lambda: synk.prefetch_to_device, AttributeError, "stream"),
    "synk.pad_shard_unpad": (lambda: synk.pad_shard_unpad, AttributeError, "any number of rows"),
    "elastic=": (
        lambda: synk.init(distributed=True, elastic=True),
        TypeError,
        r"no longer has. .*--restarts R.*synk\.save",
    ),
    "synk.join": (lambda: synk.join, AttributeError, r"no longer has. .*--restarts R.*synk\.load"),
    "synk.scan": (lambda: synk.scan, AttributeError, r"synk\.contrib\.scan\.$"),
    "synk.unstack": (lambda: synk.unstack, AttributeError, r"synk\.contrib\.unstack\.$"),
    "synk.pytensor": (lambda: synk.pytensor, AttributeError, r"import synk\.contrib\.pytensor\.$"),
    "synk.fork": (lambda: synk.fork, AttributeError, r"synk\.init\(n\).*import synk\.contrib\.synkhronos as synk"),
    "synk.set_value": (lambda: synk.set_value, AttributeError, r"w\.set_value\(value, rank=rank\)"),
    "synk.get_lengths": (lambda: synk.get_lengths, AttributeError, r"synk\.contrib\.synkhronos\.get_lengths"),
    "synk.Shared": (lambda: synk.Shared, AttributeError, r"synk\.typing\.Shared\.$"),
    "synk.PeerError": (lambda: synk.PeerError, AttributeError, r"synk\.errors\.PeerError\.$"),
    "synk.train.PowerSGD": (lambda: synk.train.PowerSGD, AttributeError, r"synk\.contrib\.PowerSGD\.$"),
    "step.tune": (lambda: STEP.tune, AttributeError, r"synk\.contrib\.tune\(step, \.\.\.\)"),
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_point_to_new_ones(name):
    """What others call otherwise, a call has, or synk no longer has, says what to use here."""
    act, kind, replacement = OLD_NAMES[name]
    with pytest.raises(kind, match=replacement) as raised:
        act()
    assert name.strip("=").split(".")[-1] in str(raised.value) and type(raised.value) is kind


@pytest.mark.parametrize("make", [synk.train.step, synk.contrib.local_steps])
@pytest.mark.parametrize(
    ("keyword", "answer"),
    {
        "in_axes": '"broadcast"',
        "out_axes": "training step aux=",
        "donate_argnums": "never overwritten",
        "static_broadcasted_argnums": '"static"',
        "axis_size": "rows are counted",
    }.items(),
)
def test_training_answers_pmap(make, keyword, answer):
    """Training steps answer the keywords of `jax.pmap` too, and know no others."""
    start = partial(make, lambda w, x: (w * x).mean(), 0.0, optax.sgd(0.1))
    with pytest.raises(
        TypeError, match=rf"synk\.\w+\.{make.__name__}\(\) got .*'{keyword}', which jax.pmap has. .*{answer}"
    ):
        start(**{keyword: 0})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such'$"):
        start(no_such=0)


F = synk.function(lambda x, rate: rate * x.sum(), inputs=["x"], name="f")
X, BATCHES = np.ones(4, np.float32), [2]
STEP = synk.train.step(lambda w, x: ((w - x) ** 2).mean(), np.float32(0), optax.sgd(0.1), name="train")
MISTYPED = {
    "call": (lambda: F(X, 1.0, num_slice=2), "f: .*'num_slice'", "num_slices"),
    "iterate": (lambda: F.iterate(X, 1.0, batchs=BATCHES, batches=BATCHES), "f: .*'batchs'", "batches"),
    "stream": (lambda: F.stream([], prefech=2), r"Function\.stream\(\) .*'prefech'", "prefetch"),
    "over": (lambda: F.over(X, 1.0, batches=BATCHES, slices=2), "f: .*'slices'", "num_slices"),
    "check": (lambda: F.check(X, 1.0, rtl=2), "f: .*'rtl'", "rtol"),
    "serial": (lambda: F.serial(X, 1.0, updates=True), "f: .*'updates'", "update"),
    "a step": (lambda: STEP(X, batchs=2), "train: .*'batchs'", "batch"),
    "iterate of a step": (lambda: STEP.iterate(X, batches=BATCHES, pre_fetch=2), "train: .*'pre_fetch'", "prefetch"),
    "tune": (lambda: synk.contrib.tune(STEP, X, second=2), "train: .*'second'", "seconds"),
    "with_options": (lambda: STEP.with_options(slices=2), r"Step\.with_options\(\) .*'slices'", "num_slices"),
    "synk.function": (lambda: synk.function(jnp.sum, output="mean"), r"synk\.function\(\) .*'output'", "outputs"),
    "a decorator": (lambda: synk.function(reduces="mean"), r"synk\.function\(\) .*'reduces'", "reduce"),
    "synk.map": (lambda: synk.map(jnp.sin, input=["x"]), r"synk\.map\(\) .*'input'", "inputs"),
    "synk.init": (lambda: synk.init(caches="x"), r"synk\.init\(\) .*'caches'", "cache"),
    "synk.data": (lambda: synk.data(X, plase="scatter"), r"synk\.data\(\) .*'plase'", "place"),
    "synk.minibatches": (lambda: synk.minibatches(4, 2, epoch=3), r"synk\.minibatches\(\) .*'epoch'", "epochs"),
    "synk.train.step": (
        lambda: synk.train.step(jnp.mean, X, optax.sgd(0.1), shard_optimiser=True),
        r"synk\.train\.step\(\) .*'shard_optimiser'",
        "shard_optimizer",
    ),
    "synk.contrib.local_steps": (
        lambda: synk.contrib.local_steps(jnp.mean, X, optax.sgd(0.1), evry=2),
        r"synk\.contrib\.local_steps\(\) .*'evry'",
        "every",
    ),
}


@pytest.mark.parametrize("call", MISTYPED)
def test_mistyped_options(call):
    """A keyword that is nearly an option of the call names that option, once."""
    act, told, meant = MISTYPED[call]
    with pytest.raises(TypeError, match=rf"{told}.*did you mean '{meant}\w*'\?") as raised:
        act()
    assert str(raised.value).lower().count("did you mean") == 1


def test_a_keyword_that_a_function_inside_does_not_know_is_its_own():
    """What the user's code raises arrives as it is."""

    def inner(x, batch_size):
        return x

    with pytest.raises(TypeError, match=r"inner\(\) got an unexpected keyword argument 'num_slice'") as raised:
        synk.function(lambda x: inner(x, 3, num_slice=2))(X)
    assert "num_slices" not in str(raised.value)


def test_unknown_names_are_unknown():
    """Other names that are not there raise as everywhere."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'updated'"):
        synk.function(jnp.sum, updated=[])
    for owner in (synk, synk.function(jnp.sum)):
        assert not hasattr(owner, "no_such_name")
