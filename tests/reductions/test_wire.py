"""wire=: sums that travel narrowly: bytes, bits, rounding, and what travels as it is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import synk
import synk.train
from synk._reductions.wire import BLOCK, WIRES, all_sum_narrowly, largest_error
from synk._runtime.way import AXIS

from ..helpers import group_of, needs_devices, slow

RANDOM = np.random.default_rng(3)
WIDE = RANDOM.normal(size=(29, 1000)).astype(np.float32) * np.logspace(-6, 3, 1000, dtype=np.float32)


def outputs(x):
    """A sum, a mean, a weighted mean, integers, few numbers, and other ops."""
    return {
        "sum": x.sum(0),
        "mean": x.mean(0),
        "weighted": synk.Weighted(x.mean(0), 3.0 * len(x)),
        "count": jnp.zeros(1000, jnp.int32) + len(x),
        "few": x[:, : BLOCK - 1].sum(0),
        "half": jnp.abs(x).astype(jnp.bfloat16).mean(0),
        "max": x.max(0),
        "rows": x[:, :300],
    }


OPS = {"sum": "sum", "mean": "mean", "weighted": "mean", "count": "sum", "few": "sum", "half": "mean", "max": "max", "rows": "concat"}  # fmt: skip
NARROW = ("sum", "mean", "weighted", "half")


def function_of(wire):
    return synk.function(outputs, outputs=OPS, wire=wire, name="outputs")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "wire"),
    [
        *((("devices", 2), "bf16"), (("simulated", 3), "int8"), (("devices", 1), "int8")),
        # Simulated, these are so many that XLA may add up in another order what does not travel narrowly.
        pytest.param(("devices", 8), "int8", marks=needs_devices(8)),
    ],
)
def test_what_arrives(group, wire):
    """As near as the rounding of each part and of their sum; all else exactly; alone nothing travels."""
    kind, n = group
    f, exact = function_of(wire), function_of(None)
    with group_of(kind, n):
        for rows, num_slices in ((29, 1), (13, 3), (1, 1)):
            x = WIDE[:rows]
            got, want = f(x, num_slices=num_slices), exact(x, num_slices=num_slices)
            parts = np.stack([part.sum(0) for part in np.array_split(x, n)])
            for name in OPS:
                if name in NARROW and n > 1:
                    assert name == "half" or (got[name] != want[name]).any()
                else:
                    np.testing.assert_array_equal(got[name], want[name])
            if n > 1:
                allowed = largest_error(wire, "sum", parts) + 1e-5 * np.abs(parts).sum(0)
                assert (np.abs(got["sum"] - want["sum"]) <= allowed).all()
            again = f(x, num_slices=num_slices)
            assert all((again[name] == got[name]).all() for name in OPS)
        f.check(WIDE[:13], num_slices=3)


@needs_devices(4)
@pytest.mark.parametrize("per_process", [1, 2, 4])
@pytest.mark.parametrize("wire", WIRES)
def test_those_of_a_process_add_up_first(wire, per_process):
    """Exactly, and what travels further is rounded as ever; all get the same bits."""
    with group_of("devices", 4) as group:
        parts = np.stack([WIDE[i] for i in range(4)])

        def body(part):
            return [value[None] for value in all_sum_narrowly([part[0], part[0, :300]], wire, per_process)]

        mapped = jax.shard_map(
            body, mesh=group.mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS), check_vma=False
        )
        whole, few = map(np.asarray, jax.jit(mapped)(parts))
    hosts = parts.reshape(4 // per_process if per_process < 4 else 4, -1, 1000).sum(1)
    assert (np.abs(whole[0] - parts.sum(0)) <= largest_error(wire, "sum", hosts) + 1e-6 * np.abs(parts).sum(0)).all()
    assert (np.abs(few[0] - parts.sum(0)[:300]) <= largest_error(wire, "sum", parts[:, :300]) + 1e-5).all()
    assert (whole == whole[0]).all() and (few == few[0]).all()


@pytest.mark.parametrize("bad", [np.nan, slow(np.inf), -np.inf])
@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite(wire, bad):
    """It stays so, where it was."""
    x = np.ones((5, 1000), np.float32)
    x[3, 700] = bad
    with synk.simulate(2):
        got = np.asarray(function_of(wire)(x)["sum"])
    assert not np.isfinite(got[700])
    assert np.isfinite(got[:512]).all() and np.isfinite(got[768:]).all()
    with synk.simulate(2):
        synk.function(lambda x: x.sum(0), wire=wire).check(x)  # which knows what a wire does to it


def test_float64_travels_as_it_is():
    """Its range is not float32's."""
    with jax.enable_x64(True), synk.simulate(2):
        f, exact = (synk.function(lambda x: x.sum(0), wire=wire) for wire in ("bf16", None))
        np.testing.assert_array_equal(f(WIDE.astype(np.float64) * 1e200), exact(WIDE.astype(np.float64) * 1e200))


@pytest.mark.slow
def test_a_tree_of_wires():
    """A prefix of the outputs; what it does not name travels as it is."""
    x = WIDE[:7]
    wires = dict.fromkeys(OPS) | {"mean": "bf16", "weighted": "int8"}
    with synk.simulate(3):
        got, exact = function_of(wires)(x), function_of(None)(x)
        differ = {name for name in OPS if (np.asarray(got[name]) != exact[name]).any()}
        assert differ == {"mean", "weighted"}
        for name, wire in (("mean", "bf16"), ("weighted", "int8")):
            np.testing.assert_array_equal(got[name], function_of(wire)(x)[name])
        with pytest.raises(ValueError, match=r"outputs: wire=.* is no prefix of what it returned"):
            function_of({"sum": "bf16"})(x)


@pytest.mark.parametrize(("wire", "error"), [("bf8", ValueError), (8, TypeError), ({"a": "fp16"}, ValueError)])
def test_wrong_wires(wire, error):
    """When the function is made, or the step."""
    with pytest.raises(error, match=r'is none of synk\'s; use "bf16", .* or None'):
        function_of(wire)
    with pytest.raises(error, match=r'synk\.train\.step: .*use "bf16", .*None'):
        synk.train.step(lambda p, x: (p * x).sum(), np.ones(3, np.float32), optax.sgd(0.1), wire=wire)


@pytest.mark.slow
@pytest.mark.smoke
def test_other_ways_to_call():
    """Over, iterate, the serial run, under jit and grad, and by another engine: warm and in turns."""
    x = WIDE[:23]
    f, exact = function_of("int8"), function_of(None)
    by_pmap = synk.function(outputs, outputs=OPS, wire="int8", engine="pmap")
    halves = [np.arange(12), np.arange(12, 23)]
    with group_of("devices", 2):
        for _ in range(2):
            whole = f(x)
            np.testing.assert_array_equal(by_pmap(x)["sum"], whole["sum"])
            [first, _] = f.iterate(x, batches=halves)
            np.testing.assert_array_equal(first["sum"], f(x[:12])["sum"])
            over = synk.function(lambda x: x.sum(0), wire="int8").over(x, batches=halves)
            allowed = largest_error("int8", "sum", np.abs(x)) + 1e-5 * np.abs(x).sum(0)
            assert (np.abs(np.asarray(over) - x.sum(0)) <= allowed).all()
            np.testing.assert_allclose(f.serial(x)["sum"], exact.serial(x)["sum"], rtol=1e-6)
            np.testing.assert_array_equal(jax.jit(f)(x)["sum"], jax.jit(exact)(x)["sum"])  # exactly there
            gradient = jax.grad(lambda x: f(x)["mean"].sum())(jnp.asarray(x))
            np.testing.assert_allclose(gradient, np.full(x.shape, 1 / 23), rtol=1e-6)


def test_check_finds_what_no_rounding_explains(monkeypatch):
    """A wire that decodes wrongly."""
    wire = WIRES["bf16"]
    monkeypatch.setitem(WIRES, "bf16", wire._replace(decode=lambda bits: wire.decode(bits) * jnp.float32(1.01)))
    with (
        synk.simulate(2),
        pytest.raises(synk.LawError, match=r"output\['mean'\] travels as 'bf16', and is further off"),
    ):
        function_of("bf16").check(np.ones((5, 1000), np.float32))


def test_check_finds_wrong_ops():
    """As without a wire; outputs before and after it are as they were."""
    f = synk.function(lambda x: x.sum(0), reduce="mean", wire="bf16")
    with synk.simulate(2):
        before = f(WIDE)
        with pytest.raises(synk.LawError, match=r'combined by "mean".*"sum" would have matched'):
            f.check(WIDE)
        np.testing.assert_array_equal(f(WIDE), before)


def sent_bytes(e, n):
    """What a replica sends in a call, by rings."""
    share = {"all-reduce": 2 * (n - 1) / n, "all-to-all": (n - 1) / n, "all-gather": n - 1}
    return sum(share[c.kind] * c.operand_bytes for program in e.programs for c in program.collectives)


def mlp(params, x, y):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b[None])
    w, b = params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ w + b[None], y).mean()


def mlp_params(seed=0):
    rng = np.random.default_rng(seed)
    sizes = [64, 256, 128, 10]
    return [
        ((rng.normal(size=(a, b)) * np.sqrt(2 / a)).astype(np.float32), np.zeros(b, np.float32))
        for a, b in itertools.pairwise(sizes)
    ]


@needs_devices(4)
@pytest.mark.parametrize(("wire", "most"), [("bf16", 0.52), ("int8", 0.28)])
@pytest.mark.parametrize("num_slices", [slow(1), 2])
def test_bytes(wire, most, num_slices):
    """Of the gradients of a perceptron of 50,000 parameters, as compiled."""
    x, y = np.ones((16, 64), np.float32), np.zeros(16, np.int32)
    with group_of("devices", 4):
        plain, narrow = (
            sent_bytes(synk.train.step(mlp, mlp_params(), optax.sgd(0.125), wire=w).explain(x, y, num_slices=num_slices), 4)
            for w in (None, wire)
        )  # fmt: skip
    assert plain == 1.5 * 4 * (sum(leaf.size for leaf in jax.tree.leaves(mlp_params())) + 1)
    assert narrow / plain <= most


@pytest.mark.parametrize(("wire", "steps"), [slow("int8", 60), slow("bf16", 120)])
def test_replicas_stay_equal(wire, steps):
    """Over steps of uneven rows and slices, and they learn."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 64)).astype(np.float32)
    y = (x[:, :10].argmax(1)).astype(np.int32)
    step = synk.train.step(mlp, mlp_params(), optax.sgd(0.0625, momentum=0.5), wire=wire)
    with group_of("devices", 4):
        losses = []
        for i in range(steps):
            rows = rng.integers(0, len(x), (31, 32, 3)[i % 3])
            losses.append(step(x, y, batch=rows, num_slices=1 + i % 2))
        synk.check_replicas(step.params, step.opt_state)
        assert np.mean([float(each) for each in losses[-9:]]) < 0.9 * np.mean([float(each) for each in losses[:9]])
        step.check(x, y, batch=13)
