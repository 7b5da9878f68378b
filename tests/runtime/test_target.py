"""Groups of devices that are not here: what they take, what they refuse, and what compiles for them."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
import synk.train
from synk._explain.target import known_accelerator

from .. import harness
from ..helpers import HAS_PLUGIN, needs_plugin

SHAPE = jax.ShapeDtypeStruct


def mean_square(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - y) ** 2)


def step_of(make):
    return synk.train.step(mean_square, {"in": make((6, 8)), "out": make((8, 2))}, optax.sgd(0.125, momentum=0.5))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("h1000", 8), ValueError, "known are a100, h100, h200, b200, v5e, v6e"),
        (("h100", 0), ValueError, "give 1 to 64"),
        (("h100", 65), ValueError, "give 1 to 64"),
        (("h100", 8, 3), ValueError, "do not divide over 3 hosts"),
        (("h100", 8.0), TypeError, "replicas is 8.0"),
        (("h100", 8, True), TypeError, "hosts is True"),
        (("v5e", 3), ValueError, "1, 4, 8, 16, 32, 64"),
        (("v5e", 8, 2), ValueError, "spans its hosts by itself"),
    ],
)
def test_wrong_arguments(arguments, error, words):
    """Each names what there is, and the current group stays."""
    with synk.simulate(2) as group:
        with pytest.raises(error, match=words):
            synk.target(*arguments)
        assert synk.group() is group


@pytest.mark.skipif(HAS_PLUGIN, reason="the plugin is here")
def test_without_the_plugin():
    """Two lines say what to install; nothing else changes."""
    with synk.simulate(2) as group:
        with pytest.raises(synk.SynkError, match=r"pip install '\.\[target\]' in a clone of synk") as caught:
            synk.target("h100", 8)
        assert len(str(caught.value).splitlines()) == 2
        assert synk.group() is group


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H200 141GB HBM3e", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA B200", "b200"), ("NVIDIA B200 192GB HBM3e", "b200"),
        ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v6 lite", "v6e"), ("TPU v6e", "v6e"),
        # Others, some of which are faster: a lower bound of the time would not be one.
        ("NVIDIA H100 NVL", None), ("NVIDIA A100-SXM4-40GB", None), ("NVIDIA GH200 480GB", None), ("TPU v5", None),
        ("TPU v5p", None), ("NVIDIA", None), ("cpu", None), ("", None),
    ],
)  # fmt: skip
def test_kinds_of_devices_that_are_here(kind, name):
    """Drivers call one kind by several names."""
    found = known_accelerator(SimpleNamespace(device_kind=kind))
    assert (found and found.name) == name


class TestShapes:
    """Shapes in the place of arrays, in a group that is here."""

    def test_compile_takes_them(self):
        """And what they compile is what a call then runs."""
        f = synk.function(lambda x, w: x @ w, inputs=["x"], reduce="concat")
        with synk.simulate(2):
            text = f.compile(SHAPE((5, 3), np.float32), SHAPE((3, 2), np.float32)).as_text()
            count = f.stats.compilations
            x, w = np.ones((5, 3), np.float32), np.ones((3, 2), np.float32)
            np.testing.assert_array_equal(f(x, w), x @ w)
            assert f.stats.compilations == count
            assert f.compile(x, w).as_text() == text

    @pytest.mark.parametrize("place", ["host", "scatter", "broadcast"])
    def test_data_stays_where_it_is(self, place):
        """Compiling brings no rows to devices, and compiles what a call runs."""
        f = synk.function(jnp.sum)
        with synk.simulate(3):
            x = synk.data(np.arange(14, dtype=np.float32).reshape(7, 2), place=place)
            for batch in (None, 5, [6, 0, 3]):
                f.compile(x, batch=batch)
                assert x._copy is None
            count = f.stats.compilations
            for batch, total in ((None, 91), (5, 45), ([6, 0, 3], 25 + 1 + 13)):
                assert float(f(x, batch=batch)) == total
            assert f.stats.compilations == count

    def test_typed_keys(self):
        """A shape of PRNG keys is one."""
        f = synk.function(lambda x, key: x + jax.random.normal(key), inputs=["x"], reduce="concat")
        key = jax.random.key(3)
        with synk.simulate(2):
            f.compile(SHAPE((4,), np.float32), SHAPE((), key.dtype))
            count = f.stats.compilations
            f(np.zeros(4, np.float32), key)
            assert f.stats.compilations == count

    def test_a_call_refuses_them(self):
        """It names the argument; calls before and after are as they were."""
        f = synk.function(jnp.sum)
        with synk.simulate(2):
            for _ in range(2):
                assert float(f(np.ones(3))) == 3
                for call in (
                    f,
                    f.serial,
                    f.check,
                    lambda x: f.over(x, batches=[1]),
                    lambda x: f.iterate(x, batches=[1]),
                ):
                    with pytest.raises(TypeError, match=r"argument (x|a) is a ShapeDtypeStruct"):
                        call(SHAPE((3,), np.float32))

    def test_variables_of_shapes(self):
        """They compile, say that they have no value, and take one."""
        step, rows = step_of(lambda shape: SHAPE(shape, np.float32)), np.ones((5, 6), np.float32)
        with synk.simulate(2):
            step.compile(rows, np.zeros((5, 2), np.float32))
            with pytest.raises(synk.SynkError, match=r"params: it was made of shapes alone.*params\.value = "):
                step(rows, np.zeros((5, 2), np.float32))
            with pytest.raises(synk.SynkError, match="made of shapes alone"):
                step.params.value
            other = step_of(lambda shape: np.full(shape, 0.5, np.float32))
            step.params.value, step.opt_state.value = other.params.value, other.opt_state.value
            count = step.stats.compilations
            np.testing.assert_array_equal(step(rows, rows[:, :2]), other(rows, rows[:, :2]))
            assert step.stats.compilations == count

    def test_a_tree_of_shapes(self):
        """Its buffers have the sizes of its leaves."""
        w = synk.shared({"a": SHAPE((3, 2), np.float32), "b": SHAPE((4,), np.float64), "n": SHAPE((), np.int32)})
        f = synk.function(lambda x: x.sum() + w.value["a"].sum() + w.value["b"].sum() + w.value["n"].astype(np.float32))
        with synk.simulate(2):
            f.compile(np.ones(4, np.float32))
            w.value = {"a": np.ones((3, 2), np.float32), "b": np.ones(4, np.float32), "n": np.int32(1)}
            assert float(f(np.ones(4, np.float32))) == 4 + 2 * 11

    def test_no_value_of_shapes(self):
        """A variable that has a value takes no shapes."""
        w = synk.shared(np.ones(3, np.float32), name="w")
        with synk.simulate(2), pytest.raises(TypeError, match="w: a shared variable holds arrays"):
            w.value = SHAPE((3,), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (["xla"], TypeError, "compiler_options is"), ({1: 2}, TypeError, "names of XLA's options"),
        ({"xla": [1]}, TypeError, "give a string, a boolean or a number"),
    ],
)  # fmt: skip
def test_wrong_compiler_options(options, error, words):
    """When the function is built."""
    with pytest.raises(error, match=words):
        synk.function(jnp.sum, compiler_options=options)


def test_compiler_options(group):
    """They reach XLA, which refuses what it does not know, and loses nothing; answers stay."""
    x = np.ones((5, 2), np.float32)
    f = synk.function(jnp.sum, compiler_options={"xla_cpu_enable_fast_min_max": True})
    wrong = synk.function(jnp.sum, compiler_options={"xla_no_such_option": 1})
    for slices in (1, 2):
        assert float(f(x, num_slices=slices)) == 10
        with pytest.raises(Exception, match="xla_no_such_option"):
            wrong(x, num_slices=slices)


def all_of(step, rows):
    """What a group runs for its users, none of which a target has."""
    x, y = np.ones((rows, 6), np.float32), np.zeros((rows, 2), np.float32)
    f, w = synk.function(jnp.sum), synk.shared(np.ones(3))
    return [
        lambda: step(x, y), lambda: next(step.iterate(x, y, batches=[2])), lambda: step.serial(x, y),
        lambda: step.check(x, y), lambda: f.over(x, batches=[2]), lambda: f.explain(x, run=1),
        lambda: synk.prefetch([x]),
        lambda: w.value, lambda: w.get_value(1), lambda: synk.all_reduce(w), lambda: synk.gather(w),
        lambda: setattr(w, "value", np.zeros(3)), lambda: synk.contrib.scan(jnp.add, x), lambda: synk.contrib.pairs(jnp.dot, x), lambda: synk.scatter(w, x[:, :1].ravel()),
        lambda: synk.check_replicas(w),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "device", [pytest.param(name, marks=needs_plugin) for name in ("a100", "h100", "h200", "b200")]
)
def test_it_compiles_and_runs_nothing(device):
    """Each call raises at once, what compiles does, and groups that are here go on as they were, warm."""
    step, x, y = step_of(lambda shape: np.full(shape, 0.5, np.float32)), np.ones((7, 6), np.float32), np.zeros((7, 2))
    with synk.simulate(2) as here:
        step(x, y)
        count = step.stats.compilations
    with synk.target(device, 8) as group:
        assert (group.size, group.platform, group.accelerator.name) == (8, "gpu", device)
        assert repr(group) == f"Group(target of 8 {device})"
        for call in all_of(step, 7):
            with pytest.raises(synk.SynkError, match=r"devices are not here|lives in"):
                call()
        for slices in (1, 2):
            e = step.explain(x, y, num_slices=slices)
            assert e.fits
            assert sum(each.operand_bytes for program in e.programs for each in program.collectives) == 4 * (
                6 * 8 + 8 * 2 + 1
            )
        assert step.explain(x[:1], y[:1]).lengths == (1, 0, 0, 0, 0, 0, 0, 0)
        assert step.params.value["in"].shape == (6, 8)  # which lies where it lay
    compiled = step.stats.compilations
    with here:
        step(x, y)
    assert step.stats.compilations == compiled > count


@pytest.mark.parametrize("hosts", [pytest.param(hosts, marks=needs_plugin) for hosts in (1, 2, 8)])
def test_rows_that_variables_and_data_hold(hosts):
    """They are described for the replicas of the target, wherever they are here."""
    with synk.simulate(3):
        held = synk.shared(np.ones((12, 2), np.float32), name="held")
        synk.scatter(held, np.ones((10, 2), np.float32))
        f = synk.function(lambda: held.value.sum())
        assert float(f()) == 20
    with synk.target("h100", 16, hosts) as group:
        assert ("hosts" in repr(group)) == (hosts > 1)
        assert f.explain().lengths == (1,) * 10 + (0,) * 6
        for place in ("host", "scatter", "broadcast"):
            x = synk.data(np.ones((33, 2), np.float32), place=place)
            g = synk.function(jnp.sum)
            for batch in (None, 17, [1, 5]):
                e = g.explain(x, batch=batch)
                assert sum(e.lengths) == len(
                    np.ones(33)[slice(None) if batch is None else slice(17) if batch == 17 else batch]
                )
            assert x._copy is None


@needs_plugin
class TestGpuPrograms:
    """What synk asks of XLA so that gradients travel while others are computed."""

    def loss(self, params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def explained(self, num_slices=1, **options):
        params, batch = [SHAPE((1024, 1024), np.float32)] * 6, SHAPE((8 * 512, 1024), np.float32)
        with synk.target("h100", 8):
            w = synk.shared(params, name="w")
            f = synk.function(lambda x: jax.grad(self.loss)(w.value, x), reduce="mean", **options)

            @f.then
            def update(grads):
                w.value = jax.tree.map(lambda w, g: w - 0.5 * g, w.value, grads)

            return f.explain(batch, num_slices=num_slices)

    def test_sums_hide(self):
        """All but those of the last layer, which nothing is left to hide."""
        [program] = self.explained().programs
        sizes = [c.operand_bytes for c in program.collectives]
        assert sum(sizes) == 6 * 4 * 1024**2
        assert max(sizes) <= 8 * 2**20
        behind = sum(c.operand_bytes for c in program.collectives if c.behind)
        assert behind >= 4 * 4 * 1024**2
        assert program.aliased_bytes == 6 * 4 * 1024**2

    def test_loops_are_scheduled(self):
        """What travels in each round is known, and whether a product runs meanwhile."""

        def looped(x, w):
            def layer(h, w):
                # Nothing waits for the sum before the product has run.
                return jnp.tanh(h @ w), jax.lax.psum(w.sum(0) * h.sum(), "r")

            h, sums = jax.lax.scan(layer, x, w)
            return h.sum() + sums.sum()

        f = synk.function(looped, inputs=["x"], axis_name="r")
        with synk.target("h100", 8):
            [program] = f.explain(SHAPE((8 * 64, 256), np.float32), SHAPE((12, 256, 256), np.float32)).programs
        assert [(c.operand_bytes, c.times, c.after_last) for c in program.collectives] == [
            (1024, 12, False),
            (4, 1, True),
        ]
        assert program.collective_bytes == 12 * 1024 + 4
        assert program.behind_bytes == 12 * 1024

    def test_slices_communicate_once(self):
        """In the program that ends the call."""
        *slices, last = self.explained(num_slices=2).programs
        assert [program.collectives for program in slices] == [()] * len(slices)
        assert sum(c.operand_bytes for c in last.collectives) == 6 * 4 * 1024**2

    @pytest.mark.parametrize(("wire", "share"), [("bf16", 1 / 2), ("int8", 260 / 1024)])
    def test_between_machines_sums_of_machines_travel(self, wire, share):
        """Narrowly, and each replica's eighth of them alone."""
        params, rows = [SHAPE((1024, 1024), np.float32)] * 2, SHAPE((16 * 64, 1024), np.float32)
        with synk.target("h100", 16, hosts=2):
            [program] = synk.train.step(self.loss, params, optax.sgd(0.1), wire=wire).explain(rows).programs
        wide = {
            kind: [c for c in program.collectives if c.kind == kind and c.ranks == tuple(range(8))]
            for kind in ("reduce-scatter", "all-gather")
        }
        assert sum(c.operand_bytes for c in wide["reduce-scatter"]) == 8 * 1024**2
        assert sum(c.result_bytes for c in wide["all-gather"]) == 8 * 1024**2 * share
        between = [c for c in program.collectives if c.ranks == (0, 8)]
        # An eighth of 8 MB, and of its sums half from each machine.
        assert sum(c.operand_bytes for c in between) == pytest.approx(1.5 * 1024**2 * share)

    def test_pieces(self):
        """Each replica keeps and updates an eighth; sums to pieces hide as others do."""
        params, rows = [SHAPE((1024, 1024), np.float32)] * 6, SHAPE((8 * 512, 1024), np.float32)
        with synk.target("h100", 8):
            plain, sharded = [
                synk.train.step(self.loss, params, optax.sgd(0.1, 0.9), shard_optimizer=shard).explain(rows).programs[0]
                for shard in (False, True)
            ]
        assert (plain.argument_bytes or 0) - (sharded.argument_bytes or 0) == pytest.approx(
            7 / 8 * 6 * 4 * 1024**2, rel=1e-3
        )
        sums = [c for c in sharded.collectives if c.kind == "reduce-scatter"]
        assert sum(c.operand_bytes for c in sums) == 6 * 4 * 1024**2
        assert sum(c.operand_bytes for c in sums if c.behind) >= 4 * 4 * 1024**2

    def kernels(self, replicas):
        """What blocks of 32 rows run that has a matrix product in it, names left out: fused computations, library calls."""
        params, rows = [SHAPE((256, 512), np.float32), SHAPE((512, 512), np.float32)], SHAPE((256, 256), np.float32)
        with synk.target("h100", replicas):
            text = synk.train.step(self.loss, params, optax.sgd(0.1, 0.9), blocks=32).compile(rows).as_text()
        found = set(re.findall(r"custom_call_target=\"([^\"]*(?:gemm|cublas|cudnn)[^\"]*)\"", text))
        for body in re.findall(r"^%?[\w.\-]+ \(.*\) -> .*\{$\n((?:  .*\n)+)", text, re.MULTILINE):
            if " dot(" in body:
                plain = re.sub(r", (?:metadata=\{[^}]*\}|backend_config=.*)", "", body)
                names = dict.fromkeys(re.findall(r"%[\w.\-]+", plain))
                numbers = {name: str(i) for i, name in enumerate(names)}
                found.add(re.sub(r"%[\w.\-]+", lambda match, numbers=numbers: numbers[match.group()], plain))
        return found

    def test_blocks_run_the_same_kernels(self):
        """On any number of GPUs: so their bits are the same there too, once the choice of kernels is fixed."""
        alone = self.kernels(1)
        assert alone
        for replicas in (2, 4, 8):
            assert self.kernels(replicas) == alone

    def test_one_replica_is_jit(self):
        """Its program needs the memory and the kernels of one that jax.jit makes, and copies nothing more."""
        tx, params = optax.adam(0.1), [SHAPE((1024, 1024), np.float32)] * 4
        rows = SHAPE((512, 1024), np.float32)

        def step(params, state, x):
            loss, grads = jax.value_and_grad(self.loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        with synk.target("h100", 1) as group:
            where = jax.sharding.SingleDeviceSharding(group.devices[0])
            args = (params, jax.eval_shape(tx.init, params), rows)
            args = jax.tree.map(lambda leaf: SHAPE(leaf.shape, leaf.dtype, sharding=where), args)
            options = {"xla_gpu_autotune_level": 0}
            with jax.numpy_dtype_promotion("standard"):  # optax mixes numbers of several dtypes
                by_hand = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile(compiler_options=options)
                ours = synk.train.step(self.loss, params, tx).compile(rows)
        sizes = [compiled.memory_analysis().temp_size_in_bytes for compiled in (ours, by_hand)]
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)
        kinds = ("fusion", "custom-call")
        counts = [[compiled.as_text().count(f" {kind}(") for kind in kinds] for compiled in (ours, by_hand)]
        assert counts[0] == counts[1]
        copied = [re.findall(r"= f32\[[\d,]+\]\S* copy\(", compiled.as_text()) for compiled in (ours, by_hand)]
        assert copied[0] == copied[1]

    def test_blocks_have_fixed_kernels(self):
        """Sums whose order depends on timing are sorted first, and another process compiles the same program."""
        program = """if True:
            import hashlib, jax, jax.numpy as jnp, numpy as np, synk

            def count(x, numbers):
                return jnp.zeros(10).at[numbers].add(x)

            rows = jax.ShapeDtypeStruct((64,), np.float32), jax.ShapeDtypeStruct((64,), np.int32)
            with synk.target("h100", 2):
                plain, blocks = [synk.function(count, blocks=b).compile(*rows).as_text() for b in (None, 16)]
            print(" sort(" in plain, " sort(" in blocks, hashlib.sha256(blocks.encode()).hexdigest())
        """
        one, two = [harness.python("-c", program) for _ in range(2)]
        assert one.stdout == two.stdout
        assert one.stdout.startswith("False True ")

    def test_options_of_the_user_go_first(self):
        """They bound what is packed."""
        bound = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**30}
        assert len(self.explained(compiler_options=bound).programs[0].collectives) == 1
