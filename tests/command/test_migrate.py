"""`python -m synk migrate`: what it sees in programs with pmap, how sure it is, and the traps that it avoids."""

import json
import sys
from textwrap import dedent

import pytest

from synk._command.migrate import migrate

from .. import harness

IMPORTS = """
import functools
import flax
import jax
import jax.numpy as jnp
from flax import jax_utils
from flax.training import common_utils
from jax import lax
"""
STEP = """
def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean(state.apply_fn(params, batch))
    grads = jax.grad(loss_fn)(state.params)
    grads = lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads)
"""


@pytest.fixture
def report(tmp_path, capsys):
    """Return reports on programs, one of each text."""

    def reports(*texts):
        paths = []
        for number, text in enumerate(texts):
            paths.append(tmp_path / f"program{number}.py")
            paths[-1].write_text(IMPORTS + dedent(text))
        status = migrate([*map(str, paths), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert status == any(each["sure"] == "certain" for one in found for each in one["findings"])
        return found[0]

    limit = sys.getrecursionlimit()
    yield reports
    sys.setrecursionlimit(limit)


def lines(report):
    return [(each["sure"], each["saw"], each["advice"]) for each in report["findings"]]


def test_a_training_step(report):
    """Its gradients' pmean is where it is cut; its rows need not divide."""
    found = report(STEP + 'p_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)')
    assert (found["kind"], found["mapped"], found["understood"]) == ("training step", 1, 1)
    assert found["rows"].startswith("need not divide")
    [(sure, saw, advice)] = lines(found)
    cut = IMPORTS.count("\n") + STEP[: STEP.index("lax.pmean")].count("\n") + 1
    assert sure == "certain" and saw == "pmap of train_step, axis 'batch': training step"
    assert "synk.train.step" in advice and f"returns what line {cut} combines" in advice and "donate_argnums" in advice


def test_a_sum_of_gradients(report):
    """Is no mean, which is what synk.train.step takes."""
    [(sure, _, advice)] = lines(report(STEP.replace("pmean", "psum") + 'p = jax.pmap(train_step, axis_name="batch")'))
    assert sure == "certain" and 'by op "sum"' in advice and "synk.train.step" not in advice


@pytest.mark.parametrize(
    "mapping",
    [
        'p = jax.pmap(train_step, "batch")',
        'p = functools.partial(jax.pmap, axis_name="batch")(train_step)',
        'pmap = functools.partial(jax.pmap, axis_name="batch")\np = pmap(train_step)',
        'from jax import pmap as parallel\np = parallel(functools.partial(train_step), axis_name="batch")',
        'from flax import nnx\np = nnx.pmap(train_step, axis_name="batch")',
        'NAME = "batch"\np = jax.pmap(jax.checkpoint(train_step), axis_name=NAME)',
        'p = jax.pmap(fun=train_step, axis_name="batch")',
        'p = jax.pmap(axis_name="batch", fun=train_step)',
    ],
)
def test_spellings_of_pmap(report, mapping):
    """Names are followed through imports, assignments and partials."""
    found = report(STEP + mapping)
    assert (found["kind"], found["understood"], found["mapped"]) == ("training step", 1, 1)


@pytest.mark.parametrize("deep", [" + x", " if x else x", ".step(x)", "[0]"])
def test_deep_expressions(report, deep):
    """A chain of 300 operators, as programs that write programs make, is read like a short one."""
    text = "def f(x):\n    y = x{0}\n    return lax.pmean(y, 'i')\nx = f\np = jax.pmap(f, 'i')\nq = jax.pmap(x{0}, 'i')"
    found, short = (report(text.format(deep * times)) for times in (300, 1))
    assert [each["sure"] for each in found["findings"]] == [each["sure"] for each in short["findings"]]
    assert found["mapped"] == 2 and found["kind"] == "combines results"


def test_too_deep_for_python(tmp_path, capsys):
    """A file that Python cannot compile is named, and the others are read."""
    path, other = tmp_path / "deep.py", tmp_path / "other.py"
    path.write_text("x = " + " + ".join("x" * 100_000))
    other.write_text("import jax\np = jax.pmap(lambda x: x)")
    assert migrate([str(path), str(other)]) == 2
    told = capsys.readouterr()
    assert f"{path}: it cannot be read" in told.err and "pmap of lambda" in told.out


def test_functions_given_by_keyword(report):
    """What communicates in the body of a loop is seen there too."""
    found = report(
        """
        def f(x):
            def body(carry, _):
                return lax.psum(carry, "i"), None
            return lax.scan(f=body, init=x, length=3)
        p = jax.pmap(f, axis_name="i")
        """
    )
    assert found["kind"] == "communicates in loops"


def test_decorators(report):
    """Methods too, which synk.function does not decorate."""
    found = report(
        """
        @functools.partial(jax.pmap, axis_name="i")
        def f(x):
            return lax.psum(x, "i")

        class Model:
            @jax.pmap
            def g(self, x):
                return x
        """
    )
    assert [(sure, saw) for sure, saw, _ in lines(found)] == [
        ("perhaps", "pmap of f, axis 'i': combines results"),
        ("certain", "pmap of g, no axis_name: independent items"),
    ]
    assert 'psum: op "sum"' in lines(found)[0][2]
    assert "make it in __init__, of self.g" in lines(found)[1][2]


def test_communication_in_a_loop(report):
    """Nothing can be cut there, also where the loop or the function comes from a factory."""
    found = report(
        """
        def get_learner(update):
            def one(state, _):
                def epoch(state, _):
                    grads = lax.pmean(state, axis_name="batch")
                    return update(lax.pmean(grads, axis_name="device")), None
                return lax.scan(epoch, state, None, 4)
            def learner(state):
                return lax.scan(jax.vmap(one, axis_name="batch"), state, None, 8)
            return learner

        learn = get_learner(lambda g: g)
        learn = jax.pmap(learn, axis_name="device")
        scanned = jax.pmap(functools.partial(lax.scan, lambda c, x: (lax.pmean(c, "device"), x)), axis_name="device")
        """
    )
    assert found["kind"] == "communicates in loops" and found["rows"].startswith("must divide")
    for sure, saw, advice in lines(found):
        assert sure == "certain" and saw.endswith("communicates in loops")
        assert "where nothing can be cut" in advice and "axis_name='device'" in advice
    # The axis of the vmap is another.
    assert "line 14," in lines(found)[0][2]


def test_communication_under_a_gradient(report):
    """Nor in the loss."""
    found = report(
        """
        def step(w, x):
            return jax.grad(lambda w: lax.pmean(jnp.sum(w * x), "i"))(w)
        p = jax.pmap(step, axis_name="i")
        """
    )
    assert found["kind"] == "communicates inside" and lines(found)[0][0] == "certain"


def test_independent_items_and_modes(report):
    """Without a name of the axis nothing can communicate, whatever the function is."""
    found = report(
        """
        import elsewhere
        def f(params, x, n, m):
            return elsewhere.run(params, x, n, m)
        a = jax.pmap(f, in_axes=(None, 0, 0, 0), out_axes=None, static_broadcasted_argnums=(2, 3))
        b = jax.pmap(elsewhere.model.apply)
        """
    )
    assert (found["kind"], found["rows"], found["understood"]) == ("independent items", "need not divide", 2)
    (sure_a, _, advice_a), (sure_b, _, advice_b) = lines(found)
    assert sure_a == sure_b == "certain"
    keywords = 'inputs={"params": "broadcast", "n": "static", "m": "static"}, outputs="same"'
    assert advice_a.startswith(f"synk.map(f, {keywords})") and advice_b.startswith("synk.map(elsewhere.model.apply)")


def test_what_was_not_seen_is_said(report):
    """Functions of other files, and calls of them where an axis is named."""
    found = report(
        """
        import trainer
        p = jax.pmap(trainer.step, axis_name="batch")
        def evaluate(x):
            return trainer.metrics(x)
        q = jax.pmap(evaluate, axis_name="batch")
        from constants import pmap
        r = pmap(evaluate)
        """
    )
    assert (found["mapped"], found["understood"], found["rows"]) == (3, 1, "may have to divide")
    assert {sure for sure, _, _ in lines(found)} == {"perhaps"}
    advice = [advice for _, _, advice in lines(found)]
    assert "trainer.step is defined elsewhere: give that file too" in advice[0]
    assert "Not seen: trainer.metrics" in advice[1] and "another file" in advice[2]


def test_files_given_together(report):
    """What one imports from another is followed."""
    found = report(
        'import program1\nfrom program1 import pmap\np = jax.pmap(program1.train_step, axis_name="batch")\nq = pmap(id)',
        STEP + "pmap = functools.partial(jax.pmap, axis_name='batch')",
    )
    assert (found["mapped"], found["kind"]) == (2, "training step")
    assert "program1.py" in lines(found)[0][2]


def test_a_branch_that_is_not_known(report):
    """A name that is bound in either of two branches is not guessed."""
    found = report(
        """
        def f(x):
            return lax.pmean(x, "i")
        if jax.device_count() > 1:
            g = f
        else:
            g = sorted
        p = jax.pmap(g, axis_name="i")
        """
    )
    assert lines(found)[0][:2] == ("perhaps", "pmap of g, axis 'i': not seen")


def test_helpers_of_flax(report):
    """By their imports."""
    found = report(
        """
        p = jax.pmap(lambda s: s)
        s = jax_utils.replicate(1)
        s = flax.jax_utils.unreplicate(s)
        for batch in jax_utils.prefetch_to_device(iter([]), 2):
            p(common_utils.shard(batch))
        keys = jax.random.split(jax.random.key(0), jax.local_device_count())
        """
    )
    saw = {saw for sure, saw, _ in lines(found) if sure == "certain"}
    assert {"jax_utils.replicate", "flax.jax_utils.unreplicate", "jax_utils.prefetch_to_device"} < saw
    assert "common_utils.shard" in saw and any(each.startswith("jax.random.split") for each in saw)


def test_some_devices_and_other_programs(report):
    """What goes to a few devices is not certain; nor are keys in a file that maps nothing."""
    found = report(
        """
        a = jax.device_put_replicated(1, jax.local_devices())
        b = jax.device_put_sharded([1], jax.devices()[:1])
        c = jax.random.split(jax.random.key(0), jax.device_count())
        """
    )
    assert [sure for sure, _, _ in lines(found)] == ["certain", "perhaps", "perhaps"]


def test_everyday_code_is_no_finding(report):
    """x[0], reshape, stacks, splits, names and strings that only look like pmap's."""
    found = report(
        """
        import tensorflow as tf
        def local(x, n, data, dataset, shard, replicate):
            first = jax.tree.map(lambda a: a[0], x)
            blocks = x.reshape((n, -1))
            many = jnp.stack([x] * n)
            wide = jnp.broadcast_to(x, (n, 3))
            keys = jax.random.split(x, n)
            name = data["batch"]
            half = x % n
            dataset = dataset.batch(8, drop_remainder=True).apply(tf.data.experimental.prefetch_to_device("gpu"))
            norm = flax.linen.BatchNorm(axis_name="batch")
            return shard(first), replicate(blocks), many, wide, keys, name, half, dataset, norm
        class Grid:
            def pmap(self, x):
                return x
        Grid().pmap(1)
        """
    )
    assert found["kind"] == "no pmap" and lines(found) == []


def test_x0_of_a_mapped_call(report):
    """Only there; and reshapes only by the number of devices."""
    found = report(
        """
        p = jax.pmap(lambda x: x)
        def main(x, other):
            n = jax.device_count()
            rows = x.reshape((n, -1) + x.shape[1:])
            dataset = other.batch(8, drop_remainder=True)
            state, _ = p(rows, dataset)
            return jax.tree.map(lambda a: a[0], state), jax.tree.map(lambda a: a[0], other), x.shape[0] % n
        """
    )
    assert [(sure, saw.split("(")[0]) for sure, saw, _ in lines(found)] == [
        ("certain", "pmap of lambda x: x, no axis_name: independent items"),
        ("perhaps", "x.reshape"),
        ("perhaps", "drop_remainder=True"),
        ("certain", "jax.tree.map"),
        ("perhaps", "x.shape[0] % n"),
    ]


def test_names_of_the_axis(report):
    """Norms keep theirs where it is that of a mapped function; axis_index and psum(1) have names in synk."""
    found = report(
        """
        from flax.linen import BatchNorm
        def f(x):
            x = BatchNorm(axis_name="batch")(x) + BatchNorm(axis_name="model")(x)
            return x * lax.axis_index("batch") / lax.psum(1, "batch")
        p = jax.pmap(f, axis_name="batch")
        """
    )
    saw = [saw for sure, saw, _ in lines(found) if sure == "certain"]
    assert saw == ["BatchNorm(axis_name='batch')", "lax.axis_index('batch')", "lax.psum(1, 'batch')"]
    assert found["findings"][-1]["sure"] == "perhaps"  # the norm may communicate


def test_a_library(report):
    """Collectives and no pmap: whoever maps it names the axis."""
    found = report("def norm(x, axis_name):\n    return lax.pmean(x, axis_name)")
    assert found["kind"] == "a library with an axis inside" and found["mapped"] == 0
    assert [sure for sure, _, _ in lines(found)] == ["perhaps"]


def test_what_is_not_synks(report):
    """Is said plainly."""
    found = report(
        """
        import kfac_jax
        optimizer = kfac_jax.Optimizer(jax.grad(abs), multi_device=True)
        p = jax.pmap(abs, devices=jax.devices()[:2])
        """
    )
    assert "not synk's" in lines(found)[0][2]
    assert lines(found)[1][0] == "perhaps" and "devices=: by hand" in lines(found)[1][2]


def test_maps_inside_maps(report):
    """Have no counterpart; a map whose result another takes has."""
    found = report(
        """
        p = jax.pmap(jax.pmap(lambda x: x))
        def main(x):
            return jax.pmap(jnp.sin)(jax.pmap(jnp.cos)(x))
        """
    )
    assert [(sure, "no counterpart" in advice) for sure, _, advice in lines(found)] == [
        ("certain", False), ("perhaps", True), ("certain", False), ("certain", False),
    ]  # fmt: skip


def test_odd_programs(report):
    """Names that lead back to themselves, and arguments by keyword."""
    found = report(
        """
        def f():
            return f()
        def g(x):
            return jax.tree.map(f=f, tree=lax.psum(x=x, axis_name="i"))
        jax.pmap(fun=g, axis_name="i")
        from program0 import h
        jax.pmap(h, axis_name="i")
        jax.pmap(g, axis_name="i")
        class A:
            def __init__(self, x):
                self.x = x
                x = self.x
                self.step = jax.pmap(self.step, axis_name="i")
        p = jax.pmap(f(), axis_name="i")
        """
    )
    assert found["mapped"] == 5


def test_the_command(tmp_path):
    """Prints text; statuses are 0 for nothing, 1 for something certain, 2 for what cannot be read."""
    good, none, broken = tmp_path / "good.py", tmp_path / "none.py", tmp_path / "broken.py"
    good.write_text("import jax\np = jax.pmap(abs)\n")
    none.write_text("raise SystemExit('it must not run')\n")
    broken.write_text("def f(:\n")

    def run(*paths):
        return harness.python("-m", "synk", "migrate", *paths)

    done = run(good, none)
    assert (done.returncode, done.stderr) == (1, "")
    first, *_, last = done.stdout.splitlines()
    assert first == f"{good}: independent items; 1 of 1 mapped functions understood; rows need not divide"
    assert last == f"{none}: no pmap" and "2: certain: pmap of abs" in done.stdout
    assert run(none).returncode == 0
    failed = run(good, broken, tmp_path / "absent.py")
    assert failed.returncode == 2 and failed.stdout.startswith(str(good))
    assert failed.stderr.count("it cannot be read") == 2
