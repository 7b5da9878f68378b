"""Checkpoints: what was saved is what is loaded, whole or not at all, whatever dies when."""

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._saving import checkpoint, checkpoint_files

from .. import harness
from ..helpers import assert_same, group_of, interrupted, slow, slow_but

DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64",
    "float8_e4m3fn", "float8_e5m2", "int4", "uint4",
]  # fmt: skip


def some(dtype, shape=(3, 2)):
    """Bits of every kind, NaNs of floats included."""
    numbers = np.random.default_rng(0).integers(-8, 8, shape)
    found = numbers % 8 if dtype.startswith("uint") else numbers > 0 if dtype == "bool" else numbers
    array = np.asarray(found).astype(jnp.dtype(dtype))
    if dtype.startswith(("float", "bfloat", "complex")):
        array[0, 0] = np.nan
    return array


def seen(variable):
    """The value of each replica, or the one that all share; keys as raw data."""
    try:
        values = [variable.value]
    except synk.errors.DivergedError:
        values = [variable.get_value(rank) for rank in range(synk.size())]
    leaves = [leaf for value in values for leaf in jax.tree.leaves(value)]
    return [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves]


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", slow_but(DTYPES[::2], DTYPES))
def test_dtypes(tmp_path, dtype):
    """Every dtype comes back with its bits, equal on the replicas or not."""
    with group_of("devices", 2):
        w, own = synk.shared(some(dtype), name="w"), synk.shared(some(dtype)[0], name="own")
        own.set_value(some(dtype)[1], rank=1)
        before = [seen(w), seen(own)]
        synk.save(tmp_path, {"w": w, "own": own}, step=1)
        w.value = np.zeros((3, 2), jnp.dtype(dtype))
        synk.broadcast(own, np.zeros(2, jnp.dtype(dtype)))
        assert synk.load(tmp_path, {"w": w, "own": own}) == (1, None)
        assert_same([seen(w), seen(own)], before)
        with pytest.raises(synk.errors.DivergedError, match="since what was saved updated it"):
            own.value


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys(tmp_path, impl):
    """Typed PRNG keys of each implementation, alone and in arrays, equal and not."""
    with group_of("devices", 2):
        k = synk.shared(
            {"one": jax.random.key(3, impl=impl), "many": jax.random.split(jax.random.key(4, impl=impl), 3)}
        )
        own = synk.shared(jax.random.key(5, impl=impl))
        own.set_value(jax.random.key(6, impl=impl), rank=1)
        before = [seen(k), seen(own)]
        synk.save(tmp_path, {"k": k, "own": own}, step=1)
        other = synk.shared(
            {"one": jax.random.key(0, impl=impl), "many": jax.random.split(jax.random.key(0, impl=impl), 3)}
        )
        synk.broadcast(own)
        synk.load(tmp_path, {"k": other, "own": own})
        assert_same([seen(other), seen(own)], before)


def everything():
    """Equal, unequal and rows-holding variables of the current group, and a tree."""
    n = synk.size()
    tree = synk.shared(
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [jnp.bfloat16(1.5), np.int8(3)]}, name="tree"
    )
    own, rows = synk.shared(np.zeros(2, np.float32), name="own"), synk.shared(np.zeros((1, 2), np.float32), name="rows")
    synk.function(lambda: own.update(own.value + synk.rank().astype(np.float32)), name="differ")()
    synk.scatter(rows, np.arange(4.0 * n + 2, dtype=np.float32).reshape(-1, 2))
    empty = synk.shared(np.zeros((0, 3), np.float32), name="empty")
    return {"tree": tree, "own": own, "rows": rows, "empty": empty}


def test_kinds_of_variables(four, tmp_path):
    """Also lengths, and what is equal, are as they were."""
    variables = everything()
    before = {name: seen(v) for name, v in variables.items()}
    synk.save(tmp_path, variables, step=3, extra={"at": [1, 2.5, None, "x"]})
    fresh = everything()
    fresh["rows"].set_value(np.zeros((1, 2), np.float32))
    synk.broadcast(fresh["own"], np.zeros(2, np.float32))
    assert synk.load(tmp_path, fresh) == (3, {"at": [1, 2.5, None, "x"]})
    assert_same({name: seen(v) for name, v in fresh.items()}, before)
    assert synk.contrib.synkhronos.get_lengths(fresh["rows"]) == [3, 2, 2, 2]
    step = synk.function(lambda: fresh["rows"].value.sum(), name="step")
    assert float(step()) == sum(range(18))


@pytest.mark.parametrize("to", [("devices", 1), ("devices", 3), ("devices", 8), ("simulated", 5)])
@pytest.mark.parametrize("was", [("devices", 2), ("simulated", 4)])
def test_other_numbers_of_replicas(tmp_path, was, to):
    """Equal values load into any number; unequal ones raise, and nothing is changed."""
    with group_of(*was):
        w, own = synk.shared(np.arange(3.0), name="w"), synk.shared(np.float32(0), name="own")
        own.set_value(np.float32(1), rank=1)
        synk.save(tmp_path / "equal", {"w": w}, step=1)
        synk.save(tmp_path / "both", {"w": w, "own": own}, step=1)
    with group_of(*to):
        w, own = synk.shared(np.zeros(3), name="w"), synk.shared(np.float32(5), name="own")
        with pytest.raises(ValueError, match=f"own differed on {was[1]} replicas, but there are {to[1]} now"):
            synk.load(tmp_path / "both", {"w": w, "own": own})
        assert_same([w.value, own.value], [jnp.zeros(3), jnp.float32(5)])
        synk.load(tmp_path / "equal", {"w": w})
        assert_same(w.value, jnp.arange(3.0))
        synk.function(lambda x: None, then=lambda nothing: setattr(w, "value", w.value + 1))(np.zeros(8))
        assert_same(w.value, jnp.arange(3.0) + 1)


@pytest.mark.parametrize("was", [1, 3])
def test_rows_of_other_numbers_of_replicas(tmp_path, was):
    """They raise, and say how; what that says works."""
    rows = np.arange(8, dtype=np.float32)
    with synk.simulate(was):
        held, whole = synk.shared(np.zeros(8, np.float32), name="held"), synk.shared(np.zeros(8, np.float32))
        synk.scatter(held, rows)
        synk.save(tmp_path / "held", {"held": held}, step=1)
        whole.value = synk.gather(held, nd_up=0)
        synk.save(tmp_path / "whole", {"whole": whole}, step=1)
    with synk.simulate(2):
        held, whole = synk.shared(np.zeros(8, np.float32), name="held"), synk.shared(np.zeros(8, np.float32))
        words = rf"held held the rows of {was} replicas, but there are 2 now.* save synk.gather\(held, nd_up=0\)"
        with pytest.raises(ValueError, match=words):
            synk.load(tmp_path / "held", {"held": held})
        synk.load(tmp_path / "whole", {"whole": whole})
        synk.scatter(held, whole.get_value())
        assert synk.contrib.synkhronos.get_lengths(held) == [4, 4]
        assert_same(synk.gather(held, nd_up=0), rows)


def test_rows_load_into_a_tree_that_holds_none(tmp_path):
    """Its leaves share an array before, and lie apart afterwards."""
    zeros = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(3, np.float32)}
    value = {"a": np.arange(10, dtype=np.float32).reshape(5, 2), "b": np.arange(5, dtype=np.float32)}
    with group_of("devices", 2):
        rows = synk.shared(zeros, name="rows")
        synk.scatter(rows, value)
        synk.save(tmp_path, {"w": rows}, step=1)
        w = synk.shared(zeros)
        synk.load(tmp_path, {"w": w})
        assert_same(synk.gather(w, nd_up=0), value)
        w.value = zeros
        assert_same(w.value, zeros)
        with pytest.raises(ValueError, match="w's tree"):
            synk.load(tmp_path, {"w": synk.shared({"c": np.zeros(7)})})


KEPT = {"a": np.zeros(3, np.float32), "b": (np.zeros((2, 2), np.int32), np.float32(1))}
MISMATCHES = {
    "a name is missing": ({"v": KEPT}, r"has no v and has w besides"),
    "a leaf is missing": ({"w": {"a": KEPT["a"], "b": (KEPT["b"][0],)}}, r"w's tree was one with \['b'\]\[1\], but .* has nothing"),
    "a leaf is more": ({"w": KEPT | {"c": KEPT["a"]}}, r"w's tree was one with nothing, but .* has \['c'\] there"),
    "a leaf is called otherwise": ({"w": {"a": KEPT["a"], "c": KEPT["b"]}}, r"w's tree was one with \['b'\]\[0\], but .* has \['c'\]\[0\]"),
    "a shape": ({"w": KEPT | {"a": np.zeros(4, np.float32)}}, r"w\['a'\]'s shape was \[3\], but .* has \[4\]"),
    "another number of axes": ({"w": KEPT | {"a": np.zeros((3, 1), np.float32)}}, r"w\['a'\]'s shape was \[3\], but .* has \[3, 1\]"),
    "a dtype": ({"w": KEPT | {"a": np.zeros(3, np.int32)}}, r"w\['a'\]'s dtype was float32, but .* has int32"),
    "keys": ({"w": KEPT | {"a": jax.random.key(0)}}, r"w\['a'\]'s shape was \[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch(tmp_path, what):
    """What does not fit raises, naming the first difference, and nothing is changed."""
    values, message = MISMATCHES[what]
    with group_of("devices", 2):
        synk.save(tmp_path, {"w": synk.shared(KEPT), "x": synk.shared(np.ones(2))}, step=1)
        variables = {name: synk.shared(value, name=f"now_{name}") for name, value in values.items()}
        variables = {"x": synk.shared(np.zeros(2), name="x"), **variables}
        before = [seen(variable) for variable in variables.values()]
        with pytest.raises(ValueError, match=message):
            synk.load(tmp_path, variables)
        assert_same([seen(variable) for variable in variables.values()], before)


def test_keys_of_another_implementation(tmp_path):
    """The bits would fit, but mean something else."""
    synk.save(tmp_path, {"k": synk.shared(jax.random.key(0, impl="rbg"))}, step=1)
    with pytest.raises(ValueError, match=r"k's PRNG keys was .*rbg.*, but .* has .*unsafe"):
        synk.load(tmp_path, {"k": synk.shared(jax.random.key(0, impl="unsafe_rbg"))})
    with pytest.raises(ValueError, match=r"k's PRNG keys was .*rbg.*, but .* has None"):
        synk.load(tmp_path, {"k": synk.shared(np.zeros(4, np.uint32))})


def test_names_do_not_meet(tmp_path):
    """Names with dots, slashes and digits keep to themselves."""
    with group_of("devices", 2):
        own = synk.shared(np.zeros(2, np.float32))
        own.set_value(np.ones(2, np.float32), rank=1)
        names = ["w.0", "w.0.1", "0.w", "../x", "a/b", "", "file", "ä ü", "arrays.npz"]
        variables = {"w": own} | {name: synk.shared([np.float32(i), np.float32(-i)]) for i, name in enumerate(names, 2)}
        before = {name: seen(variable) for name, variable in variables.items()}
        synk.save(tmp_path / "run", variables, step=1)
        for variable in variables.values():
            synk.broadcast(variable, jax.tree.map(jnp.zeros_like, variable.get_value()))
        synk.load(tmp_path / "run", variables)
        assert_same({name: seen(variable) for name, variable in variables.items()}, before)
    assert os.listdir(tmp_path) == ["run"]


def numbered():
    return synk.shared(np.zeros(2, np.int32), name="w")


def test_keep(tmp_path):
    """The newest are left, all with None; folders of others are left alone."""
    w = numbered()
    (tmp_path / "step-of-mine").mkdir()
    for step in range(6):
        w.value = np.full(2, step, np.int32)
        synk.save(tmp_path, {"w": w}, step=step, keep=None if step < 4 else np.int64(2))
        if step == 3:
            assert len(list(tmp_path.glob("step-0*"))) == 4
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005", "step-of-mine"]
    assert synk.load(tmp_path, {"w": w}, step=4)[0] == 4 and w.value[0] == 4
    with pytest.raises(FileNotFoundError, match="has no step 3; it has 4, 5"):
        synk.load(tmp_path, {"w": w}, step=3)


def test_an_earlier_step_is_not_removed_by_its_own_save(tmp_path):
    """A run that began again before the newest checkpoint keeps what it saves."""
    w = numbered()
    for step in (10, 20, 5, 6, 123456789):
        w.value = np.full(2, step, np.int32)
        synk.save(tmp_path, {"w": w}, step=step, keep=1)
        assert synk.load(tmp_path, {"w": w}, step=step)[0] == step
    assert synk.load(tmp_path, {"w": w})[0] == 123456789


def saved(folder, *steps):
    """A run of these steps, whose variable holds them."""
    w = numbered()
    for step in steps:
        w.value = np.full(2, step, np.int32)
        synk.save(folder, {"w": w}, step=step, keep=None)
    return w


def left_behind(folder):
    return sorted(int(path.name[10:]) for path in folder.glob("left-step-*"))


def test_a_run_that_goes_back(tmp_path):
    """What it saves from then on is the newest; later steps are left behind, and come back by their name."""
    w = saved(tmp_path, 50, 80, 90, 100)
    assert synk.load(tmp_path, {"w": w}, step=50)[0] == 50
    assert left_behind(tmp_path) == []  # another program may look
    for step in (60, 70, 80):
        w.value = np.full(2, -step, np.int32)
        synk.save(tmp_path, {"w": w}, step=step, keep=2)
        w.value = np.zeros(2, np.int32)
        assert synk.load(tmp_path, {"w": w})[0] == step and w.value[0] == -step
        assert left_behind(tmp_path) == [80, 90, 100]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000070", "step-00000080"]
    with pytest.raises(FileNotFoundError, match="has no step 90; it has 70, 80"):
        synk.load(tmp_path, {"w": w}, step=90)
    (tmp_path / "left-step-00000090").rename(tmp_path / "step-00000090")
    assert synk.load(tmp_path, {"w": w})[0] == 90 and w.value[0] == 90
    synk.save(tmp_path, {"w": w}, step=70)
    w.value = np.full(2, 91, np.int32)
    synk.save(tmp_path, {"w": w}, step=80)
    synk.save(tmp_path, {"w": w}, step=75)  # of two that are left behind by one name the later is kept
    assert left_behind(tmp_path) == [80, 90, 100] and synk.load(tmp_path, {"w": w}) == (75, None)
    (tmp_path / "left-step-00000080").rename(tmp_path / "step-00000080")
    assert synk.load(tmp_path, {"w": w})[0] == 80 and w.value[0] == 91


@contextlib.contextmanager
def dying(monkeypatch, at):
    """Let each of the disk's own functions raise from call `at` of any of them on; the calls."""
    calls = []

    def dies(real):
        def call(*args, **options):
            calls.append(real)
            if len(calls) >= at:
                raise KeyboardInterrupt
            return real(*args, **options)

        return call

    with monkeypatch.context() as patched:
        for owner, name in ((os, "rename"), (os, "fsync"), (shutil, "rmtree")):
            patched.setattr(owner, name, dies(getattr(owner, name)))
        yield calls


@pytest.mark.parametrize("at", range(1, 13))
def test_dying_while_a_run_leaves_others_behind(tmp_path, monkeypatch, at):
    """At each thing it does to the disk: what is loaded is as before, or what the run has just saved."""
    w = saved(tmp_path, 100, 200, 300, 400)
    synk.load(tmp_path, {"w": w}, step=100)
    with dying(monkeypatch, at) as calls, contextlib.suppress(KeyboardInterrupt):
        synk.save(tmp_path, {"w": w}, step=210, keep=None)
    step = synk.load(tmp_path, {"w": w})[0]
    assert step in (210, 300, 400) and (step == 210 or len(calls) >= at)
    synk.save(tmp_path, {"w": w}, step=220, keep=None)
    assert synk.load(tmp_path, {"w": w})[0] == 220 and left_behind(tmp_path) == [300, 400]


@pytest.mark.parametrize("step", [6, 7])
def test_another_program_saves_while_it_is_read(tmp_path, monkeypatch, step):
    """As an evaluator reads, its checkpoint goes for a newer one, or is replaced: that is no damage."""
    w, late = numbered(), synk.shared(np.full(2, 9, np.int32), name="late")
    synk.save(tmp_path, {"w": w}, step=6)
    digest, reads = checkpoint_files._digest, []

    def save_and_digest(about):
        reads.append(about)
        if len(reads) == 1:  # of what lay in the first about.json
            synk.save(tmp_path, {"w": late}, step=step, keep=1)
        return digest(about)

    monkeypatch.setattr(checkpoint_files, "_digest", save_and_digest)
    assert synk.load(tmp_path, {"w": w}) == (step, None) and w.value[0] == 9


def test_a_step_saved_again(tmp_path):
    """The second save is what counts, and nothing else is left."""
    w = numbered()
    for value in (1, 2, 3):
        w.value = np.full(2, value, np.int32)
        synk.save(tmp_path, {"w": w}, step=7, extra=value)
    w.value = np.zeros(2, np.int32)
    assert synk.load(tmp_path, {"w": w}) == (7, 3) and w.value[1] == 3
    assert os.listdir(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("at", range(1, 9))
def test_dying_while_a_step_is_replaced(tmp_path, monkeypatch, at):
    """At each rename or removal of a second save: one of the two is there, and the next save clears up."""
    w = numbered()
    w.value = np.full(2, 1, np.int32)
    synk.save(tmp_path, {"w": w}, step=7)
    w.value = np.full(2, 2, np.int32)
    with dying(monkeypatch, at), pytest.raises(KeyboardInterrupt):
        synk.save(tmp_path, {"w": w}, step=7)
    w.value = np.zeros(2, np.int32)
    assert synk.load(tmp_path, {"w": w})[0] == 7 and w.value[0] in (1, 2)
    synk.save(tmp_path, {"w": w}, step=7)
    assert os.listdir(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("at", ["_write_arrays", "rename"])
def test_a_handler_that_saves_while_a_save_is_under_way(tmp_path, monkeypatch, at, step):
    """The same step or a later one: both are written, and the later one is the newest."""
    w, late = numbered(), synk.shared(np.full(2, 9, np.int32))
    synk.save(tmp_path, {"w": w}, step=2)
    owner, came = {"_write_arrays": checkpoint_files, "rename": os}[at], []
    real = getattr(owner, at)

    def act(*args, **options):
        done = real(*args, **options)
        if not came:
            came.append(at)
            signal.raise_signal(signal.SIGTERM)
        return done

    monkeypatch.setattr(owner, at, act)
    before = signal.signal(signal.SIGTERM, lambda *_: synk.save(tmp_path, {"w": late}, step=step))
    try:
        synk.save(tmp_path, {"w": w}, step=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came and sorted(os.listdir(tmp_path)) == [f"step-0000000{each}" for each in sorted({2, step})]
    for each in (2, step, None):
        assert synk.load(tmp_path, {"w": w}, step=each)[0] == (each or step)


def test_what_others_are_writing_stays(tmp_path):
    """A save clears up after those that have died: of processes here that are gone, and elsewhere after a day."""
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    here, name = socket.gethostname(), ".saving-step-00000001"
    dead = [f"{name}-{here}-{gone.pid}-0", f"{name}-{here}-{os.getpid()}-999999"]
    old = [f"{name}-other-machine-{gone.pid}-1", f"{name}-{here}-{os.getppid()}-1"]
    alive = [f"{name}-{here}-{os.getppid()}-0", f"{name}-other-machine-{gone.pid}-0"]
    for each in dead + old + alive:
        (tmp_path / each).mkdir()
    for each in old:
        os.utime(tmp_path / each, (time.time() - 2 * 86400,) * 2)
    synk.save(tmp_path, {}, step=1)
    assert sorted(os.listdir(tmp_path)) == sorted([*alive, "step-00000001"])


@pytest.mark.parametrize("extra", [None, 1, 2.5, "x", True, [1, [2]], {"a": {"b": None}}, 10**30, float("inf")])
def test_extra(tmp_path, extra):
    """What JSON has comes back."""
    synk.save(tmp_path, {}, step=0, extra=extra)
    assert synk.load(tmp_path, {}) == (0, extra)


def test_numbers_of_numpy_and_jax_come_back_as_pythons(tmp_path):
    """Also in lists and dictionaries."""
    extra = {"loss": np.float32(1), "at": [np.int64(3), np.array(True)], "jax": jnp.bfloat16(2.5), "none": None}
    nans = {"nan": [float("nan"), np.float32("nan"), jnp.bfloat16(np.nan)]}
    synk.save(tmp_path, {}, step=0, extra=extra | nans)
    _, loaded = synk.load(tmp_path, {})
    assert repr(loaded) == "{'loss': 1.0, 'at': [3, True], 'jax': 2.5, 'none': None, 'nan': [nan, nan, nan]}"


@pytest.mark.parametrize(
    "extra",
    [
        (1, 2),
        {1: 2},
        {"a": (1,)},
        np.arange(2),
        {"x": jnp.ones(1)},
        np.complex64(1),
        jax.random.key(0),
        object(),
        {1},
        b"x",
        {"loss": [float("nan"), (1,)]},
    ],
)
def test_extra_refused(tmp_path, extra):
    """What JSON changes or does not have raises before anything is written."""
    with pytest.raises(TypeError, match=r"synk.save: extra"):
        synk.save(tmp_path, {}, step=0, extra=extra)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": -1}, ValueError, "step is -1; give an integer >= 0"),
        ({"step": 1.0}, ValueError, "step is 1.0"),
        ({"step": True}, ValueError, "step is True"),
        ({"step": 1, "keep": 0}, ValueError, "keep is 0; give an integer >= 1"),
        ({"step": 1, "variables": [1]}, TypeError, "give a mapping from name to variable"),
        ({"step": 1, "variables": {1: None}}, TypeError, "give a mapping from name to variable"),
        ({"step": 1, "variables": {"w": np.ones(1)}}, TypeError, "is no shared variable"),
    ],
)
def test_save_refuses(tmp_path, arguments, error, message):
    """Wrong arguments raise before anything is written."""
    with pytest.raises(error, match=message):
        synk.save(tmp_path, **({"variables": {}} | arguments))
    assert not os.listdir(tmp_path)


def test_nothing_to_load(tmp_path):
    """No folder, an empty one, and one in which a save has died."""
    (tmp_path / f".saving-step-00000001-{socket.gethostname()}-{os.getpid()}-999999").mkdir()
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"has no checkpoint; synk.save makes one"):
            synk.load(folder, {})
    synk.save(str(tmp_path), {}, step=2)
    assert os.listdir(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("step", ["3", 3.0, True, -1])
def test_no_number_of_a_step(tmp_path, step):
    """It is no missing checkpoint, which a loop that restarts takes for a new run."""
    synk.save(tmp_path, {}, step=3)
    with pytest.raises(ValueError, match=f"synk.load: step is {step!r}; give an integer >= 0, or None for the newest"):
        synk.load(tmp_path, {}, step=step)
    assert synk.load(tmp_path, {}, step=np.int64(3)) == (3, None)


def test_no_folder_of_checkpoints(tmp_path):
    """One checkpoint, a damaged one too, or a file: what was meant lies beside, and is no new run."""
    synk.save(tmp_path, {}, step=3)
    for damaged in (False, True):
        with pytest.raises(ValueError, match=r"step-00000003 is a checkpoint itself\. Give the folder in which"):
            synk.load(tmp_path / "step-00000003", {})
        if not damaged:
            (tmp_path / "step-00000003" / "about.json").unlink()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file is a file\. Give the folder"):
        synk.load(tmp_path / "file", {})


def flips(path, moments):
    """One bit of a file turned over."""
    content = bytearray(path.read_bytes())
    at = moments.randrange(8 * len(content))
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def cut(path, moments):
    """The end of a file is gone."""
    os.truncate(path, moments.randrange(path.stat().st_size))


def missing(path, moments):
    path.unlink()


def emptied(path, moments):
    path.write_bytes(b"")


def of_another_step(path, moments):
    """A file is that of the step before."""
    shutil.copy(path.parent.with_name("step-00000001") / path.name, path)


DAMAGE = [flips, cut, missing, emptied, of_another_step]


@pytest.mark.parametrize("count", [60, slow(300)])
def test_damage_is_noticed_or_harmless(tmp_path, count):
    """Whatever happens to a file: what was saved, or the step before with a warning that names file and step; never more."""
    w, key = numbered(), synk.shared(jax.random.key(3), name="key")
    for step in (1, 2):
        w.value = np.full(2, step, np.int32)
        synk.save(tmp_path / "whole", {"w": w, "key": key}, step=step, extra={"at": [step, 0.5], "é": None})
    moments, noticed = random.Random(0), 0
    for i in range(count):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        damage = DAMAGE[i % 20 if i % 20 < len(DAMAGE) else 0]  # most of it flips
        damage(tmp_path / "run" / "step-00000002" / ("about.json", "arrays.npz")[i // 20 % 2], moments)
        w.value = np.zeros(2, np.int32)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            step, extra = synk.load(tmp_path / "run", {"w": w, "key": key})
        assert extra == {"at": [step, 0.5], "é": None} and w.value.tolist() == [step] * 2
        assert (step == 1) == bool(warned)
        if warned:
            assert warned[0].filename == __file__
            message = str(warned[0].message)
            assert re.search(r"step-00000002: (about.json|arrays.npz) (is|has|cannot|holds)", message)
            assert "Step 1 is loaded in its place." in message
            with pytest.raises(synk.errors.CheckpointError, match="step-00000002: "):
                synk.load(tmp_path / "run", {"w": w, "key": key}, step=2)
            noticed += 1
    assert noticed > count / 2


def test_none_is_whole(tmp_path):
    """It is no fresh start: CheckpointError names each, and nothing changes."""
    w = numbered()
    before = np.asarray(w.value).tolist()
    for step in (3, 4):
        synk.save(tmp_path, {"w": w}, step=step)
        (tmp_path / f"step-0000000{step}" / "arrays.npz").unlink()
    w.value = np.full(2, 9, np.int32)
    with pytest.raises(
        synk.errors.CheckpointError, match=r"no checkpoint .*step-00000004: arrays.npz is missing.*00003: arr"
    ):
        synk.load(tmp_path, {"w": w})
    assert w.value.tolist() == [9, 9] != before


def test_a_damaged_second_save_leaves_the_first(tmp_path):
    """One that died between two renames: what it was to replace still counts, also where its own files are damaged."""
    w = numbered()
    w.value = np.full(2, 1, np.int32)
    synk.save(tmp_path, {"w": w}, step=7)
    shutil.copytree(tmp_path / "step-00000007", tmp_path / "step-00000007~")
    (tmp_path / "step-00000007" / "about.json").unlink()
    w.value = np.zeros(2, np.int32)
    with pytest.warns(UserWarning, match="step-00000007: about.json is missing"):
        assert synk.load(tmp_path, {"w": w}) == (7, None)
    assert w.value.tolist() == [1, 1]


def test_any_name(tmp_path):
    """Names are not those of files."""
    names = ["", "a\0b", "x" * 70000, "../w", "é.1.all", "w"]
    variables = {name: synk.shared(np.full(2, i)) for i, name in enumerate(names)}
    synk.save(tmp_path, variables, step=1)
    loaded = {name: synk.shared(np.zeros(2, np.int64)) for name in reversed(names)}
    synk.load(tmp_path, loaded)
    assert [int(loaded[name].value[0]) for name in names] == list(range(len(names)))


def test_a_part_of_what_was_saved(tmp_path):
    """Asked for, others are left out; without asking they are missed, and so is what was never saved."""
    w, m = numbered(), synk.shared(np.ones(3), name="m")
    w.value = np.full(2, 5, np.int32)
    synk.save(tmp_path, {"m": m, "w": w}, step=1)
    w.value = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=r"has m besides\. Give the variables that were saved"):
        synk.load(tmp_path, {"w": w})
    assert synk.load(tmp_path, {"w": w}, partial=True) == (1, None)
    assert w.value.tolist() == [5, 5]
    with pytest.raises(ValueError, match="has no q"):
        synk.load(tmp_path, {"w": w, "q": m}, partial=True)


# Saving in the background.


def test_the_values_of_now_are_saved_in_the_background(tmp_path):
    """Whatever is done to the variables while it writes; load and the next save wait for it."""
    with group_of("devices", 2):
        w = synk.shared(np.zeros(200_000, np.float32), name="w")
        step = synk.function(lambda x: x.sum(), then=lambda total: setattr(w, "value", w.value + 1))
        for number in range(1, 8):
            step(np.ones(4, np.float32))
            synk.save(tmp_path, {"w": w}, step=number, extra=number, background=True)
        for _ in range(3):
            step(np.ones(4, np.float32))
        assert synk.load(tmp_path, {"w": w}) == (7, 7) and set(np.asarray(w.value).tolist()) == {7.0}
        assert sorted(os.listdir(tmp_path)) == [f"step-0000000{number}" for number in (5, 6, 7)]


@pytest.mark.parametrize(("kind", "n"), [("devices", 1), ("devices", 3), ("simulated", 4)])
def test_large_values_of_the_call_are_saved(tmp_path, monkeypatch, kind, n):
    """Saves in a row, during which the variables are donated, and one of which fails half way."""

    def write_late(path, arrays):
        number = int(path.parent.name.split("-")[2])
        is_updated[number].wait(10)
        if number == 3:
            path.write_bytes(next(iter(arrays.values())).data)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_arrays(path, arrays)

    def add(tree):
        return jax.tree.map(lambda leaf: leaf + np.ones((), leaf.dtype), tree)

    write_arrays, is_updated = checkpoint_files._write_arrays, [threading.Event() for _ in range(6)]
    monkeypatch.setattr(checkpoint_files, "_write_arrays", write_late)
    with group_of(kind, n):
        value = {"a": np.zeros((500, 3000), np.float32), "b": jnp.zeros(70_001, jnp.bfloat16), "c": np.int32(0)}
        w, own = synk.shared(value, name="w"), synk.shared(np.zeros((4, 20_000)), name="own")
        more = synk.function(
            lambda x: setattr(own, "value", add(own.value)) or x.sum(),
            then=lambda total: setattr(w, "value", add(w.value)),
        )
        for step in range(6):
            with pytest.raises(OSError, match="step 3 was not") if step == 4 else contextlib.nullcontext():
                synk.save(tmp_path, {"w": w, "own": own}, step=step, keep=None, background=True)
            more(np.ones(12, np.float32))
            is_updated[step].set()
        for step in (0, 1, 2, 5):
            synk.load(tmp_path, {"w": w, "own": own}, step=step)
            assert_same(seen(w) + seen(own), [np.full_like(leaf, step) for leaf in seen(w) + seen(own)])
    assert len(os.listdir(tmp_path)) == 4


def test_copies_take_the_memory_of_the_save_before(tmp_path, monkeypatch):
    """Fresh memory would hold the loop longer than the copy, and two copies are never there."""
    places, write = [], checkpoint.write

    def note(folder, step, about, arrays, keep):
        places.append({array.ctypes.data for array in arrays.values()})
        write(folder, step, about, arrays, keep)

    monkeypatch.setattr(checkpoint, "write", note)
    w = synk.shared({name: np.zeros(10_000_000, np.float32) for name in "ab"}, name="w")
    for step in range(4):
        synk.save(tmp_path, {"w": w}, step=step, keep=1, background=True)
    checkpoint_files.WRITER.wait()
    assert checkpoint_files.WRITER.is_idle and places == places[:1] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_the_background_gives_way(tmp_path, monkeypatch):
    """The thread that writes has the lowest priority, all others keep theirs."""
    found = []
    monkeypatch.setattr(checkpoint, "write", lambda *args: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
    for in_background in (True, False):
        synk.save(tmp_path, {"w": numbered()}, step=1, background=in_background)
    assert found == [19, os.getpriority(os.PRIO_PROCESS, 0)] and found[1] < 19


def test_a_failure_in_the_background_keeps_its_number(tmp_path):
    """Type, errno and file name are those of the write; other errors have none."""
    w = numbered()
    (tmp_path / "run").write_text("no folder")
    synk.save(tmp_path / "run", {"w": w}, step=1, background=True)
    with pytest.raises(FileExistsError, match="step 1 was not written in the background") as raised:
        synk.save(tmp_path, {"w": w}, step=2)
    assert (raised.value.errno, raised.value.filename) == (errno.EEXIST, str(tmp_path / "run"))


def test_a_folder_is_that_of_the_call(tmp_path, monkeypatch):
    """Wherever the program stands by the time that it is written."""
    begins, write = threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (begins.wait(10), write(*args)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    w = synk.shared(np.ones(3, np.float32))
    synk.save("run", {"w": w}, step=1, background=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    begins.set()
    assert synk.load(tmp_path / "run", {"w": w}) == (1, None) and not os.listdir()


def test_ctrl_c_in_a_file_is_no_other_error(tmp_path, monkeypatch):
    """Of zipfile, which cannot end a file while an array is written."""
    opened = zipfile.ZipFile.open

    def press(self, name, *args, **options):
        file = opened(self, name, *args, **options)
        if getattr(name, "filename", name) == "1.0.all.npy":
            raise KeyboardInterrupt
        return file

    with monkeypatch.context() as patched:
        patched.setattr(zipfile.ZipFile, "open", press)
        with pytest.raises(KeyboardInterrupt):
            synk.save(tmp_path, {"a": synk.shared(1.0), "b": synk.shared(2.0)}, step=1)
    assert not os.listdir(tmp_path)


SAVES_AT_THE_END = """
import signal, sys, threading, numpy as np, synk
w, folder = synk.shared(np.zeros(1000, np.float32)), sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: synk.save(folder, {"w": w}, step=1000))

def at(frame, event, arg):
    if frame.f_code is threading.Event.wait.__code__:
        return line

def line(frame, event, arg):
    if event == "line" and "signaled" in frame.f_locals:  # it has the lock
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
    return line

synk.save(folder, {"w": w}, step=1, background=True)
sys.settrace(at)
synk.save(folder, {"w": w}, step=2, background=True)
"""


@pytest.mark.slow
def test_a_handler_that_saves_while_a_save_waits(tmp_path):
    """It does not wait for the lock of that wait."""
    assert harness.python("-c", SAVES_AT_THE_END, tmp_path).returncode == 0
    # The wait ends after the handler, whose step is later than the one that is saved then.
    assert sorted(os.listdir(tmp_path)) == ["left-step-00001000", "step-00000001", "step-00000002"]


@pytest.mark.slow
def test_ctrl_c_while_a_save_waits_for_the_background(tmp_path, monkeypatch):
    """What is being written goes on; the next save waits for it as well."""

    def slow_write(*args):
        time.sleep(0.6)
        checkpoint_files.write(*args)

    monkeypatch.setattr(checkpoint, "write", slow_write)
    w = synk.shared(np.zeros(3, np.float32), name="w")
    with group_of("devices", 2):
        synk.save(tmp_path, {"w": w}, step=1, background=True)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            synk.save(tmp_path, {"w": w}, step=2, background=True)
        timer.join()
        for step in (2, 3):
            synk.save(tmp_path, {"w": w}, step=step)
        assert sorted(os.listdir(tmp_path)) == [f"step-0000000{number}" for number in (1, 2, 3)]


def test_a_failure_in_the_background_is_raised_by_the_next_save(tmp_path):
    """Once; the one after is written."""
    w = numbered()
    (tmp_path / "run").write_text("no folder")
    synk.save(tmp_path / "run", {"w": w}, step=1, background=True)
    with pytest.raises(OSError, match=r"synk.save: step 1 was not written in the background \(FileExistsError"):
        synk.save(tmp_path / "run", {"w": w}, step=2)
    (tmp_path / "run").unlink()
    synk.save(tmp_path / "run", {"w": w}, step=3, background=True)
    assert synk.load(tmp_path / "run", {"w": w})[0] == 3


@pytest.mark.parametrize("folder", [slow("run"), "run/file"])
def test_the_end_waits_for_the_background(tmp_path, folder):
    """What was begun is there when the program has ended; what failed is said."""
    script = f"""
        import numpy as np, synk
        synk.save({folder!r}, {{"w": synk.shared(np.zeros(3_000_000), name="w")}}, step=1, background=True)
    """
    if folder != "run":
        (tmp_path / "run").write_text("no folder")
    done = harness.python(textwrap.dedent(script), cwd=tmp_path)
    if folder == "run":
        assert (done.returncode, done.stderr) == (0, "") and os.listdir(tmp_path / "run") == ["step-00000001"]
    else:
        assert "step 1 was not written in the background (NotADirectoryError" in done.stderr


def test_another_format(tmp_path):
    """A checkpoint of a later version says so."""
    synk.save(tmp_path, {}, step=2)
    file = tmp_path / "step-00000002" / "about.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(synk.errors.CheckpointError, match="has format 99, and this synk reads 2"):
        synk.load(tmp_path, {})


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_changes_nothing(tmp_path, in_background):
    """An error while writing leaves the old checkpoints, and no rubbish. It names the folder."""
    w, large = numbered(), synk.shared(np.zeros(1 << 20, np.float32))
    synk.save(tmp_path, {"w": w}, step=1)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            synk.save(tmp_path, {"w": large}, step=2, background=in_background)
            synk.save(tmp_path, {"w": w}, step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path))
    assert os.listdir(tmp_path) == ["step-00000001"]
    synk.save(tmp_path, {"w": w}, step=3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lost_variable_is_healed(tmp_path):
    """Its value went with a program that died; loading brings it back, and saving it in between raises."""
    with group_of("devices", 2):
        w = synk.shared(np.ones(3, np.float32), name="w")

        def look(x):
            if (np.asarray(x) < 0).any():
                raise RuntimeError("a negative row")
            return np.float32(0)

        @synk.function(reduce="mean")
        def step(x):
            return jnp.mean(x) + jax.pure_callback(look, jax.ShapeDtypeStruct((), np.float32), x)

        @step.then
        def step(mean):
            w.value = w.value + mean

        synk.save(tmp_path, {"w": w}, step=1)
        try:
            step(-np.ones(8, np.float32))
        except Exception as error:
            assert "a negative row" in str(error)
        with pytest.raises(synk.errors.SharedLostError):
            synk.save(tmp_path, {"w": w}, step=2)
        assert synk.load(tmp_path, {"w": w}) == (1, None)
        step(np.ones(8, np.float32))
        assert_same(w.value, jnp.full(3, 2, jnp.float32))


def test_saved_inside_jit_is_refused(tmp_path):
    """It would run once, while tracing."""
    w = numbered()
    with pytest.raises(synk.SynkError, match=r"synk.save: it runs when called"):
        jax.jit(lambda x: synk.save(tmp_path, {"w": w}, step=1) or x)(1.0)
    with pytest.raises(synk.SynkError, match="is for the serial program"):
        synk.function(lambda x: synk.save(tmp_path, {"w": w}, step=1))(np.ones(2))


SAVER = """
import os, random, select, signal, sys, time
import jax, numpy as np, synk
folder, kills, in_background = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "background"
moments = random.Random(0)

def save_on(pipe):
    jax.config.update("jax_num_cpu_devices", 2)
    w, own = synk.shared(np.zeros(3000, np.int32), name="w"), synk.shared(np.zeros(1000, np.int32), name="own")
    try:
        step, extra = synk.load(folder, {"w": w, "own": own})
        values = [np.asarray(w.value), *(np.asarray(own.get_value(rank)) for rank in (0, 1))]
        assert extra == [step] and all((value == step).all() for value in values), (step, extra, values)
    except FileNotFoundError:
        step = 0
    while True:
        before = step
        step += moments.choice((0, 1)) or (step == 0)
        w.value = np.full(3000, step, np.int32)
        for rank in (0, 1):
            own.set_value(np.full(1000, step, np.int32), rank=rank)
        synk.save(folder, {"w": w, "own": own}, step=step, extra=[step], keep=2, background=in_background)
        saved = before if in_background else step  # for certain
        if pipe and saved:
            pipe = os.write(pipe, b"%8d" % saved) - 8

for _ in range(kills):
    moments.random()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_on(write)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(write)
    if not select.select([read], [], [], 60)[0]:
        os.kill(child, 9)
        sys.exit("a child has not begun")
    begun = os.read(read, 8)
    time.sleep(moments.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not begun or os.WIFEXITED(status):
        sys.exit("a child has failed")
    os.close(read)
    print("begun at", int(begun), sorted(os.listdir(folder)) if os.path.isdir(folder) else [], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "how"), [(15, "now"), (15, "background")])
def test_kill_while_saving(tmp_path, kills, how):
    """After each kill -9 the newest checkpoint, or the one before, loads and is of one piece."""
    done = harness.python("-W", "ignore", "-c", SAVER, tmp_path / "run", kills, how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    steps = [int(line.split()[2]) for line in done.stdout.splitlines()]
    assert len(steps) == kills and steps == sorted(steps) and steps[-1] > 0
    if kills > 50:  # some of them came while it saved
        assert any(mark in done.stdout for mark in (".saving-", ".gone-", "~"))
    with group_of("devices", 2):
        w, own = synk.shared(np.zeros(3000, np.int32), name="w"), synk.shared(np.zeros(1000, np.int32), name="own")
        step, extra = synk.load(tmp_path / "run", {"w": w, "own": own})
        assert extra == [step] and step >= steps[-1] and np.all(np.asarray(w.value) == step)


def test_ctrl_c_while_an_old_checkpoint_is_deleted(tmp_path, monkeypatch):
    """As a folder has been closed, which shutil would close again: an OSError in the place of the Ctrl-C."""
    close, presses = os.close, []

    def close_and_press(descriptor):
        close(descriptor)
        if sys._getframe(1).f_code.co_filename == shutil.__file__:
            presses.append(descriptor)
            signal.raise_signal(signal.SIGINT)

    with group_of("devices", 2):
        w = synk.shared(np.arange(3), name="w")
        synk.save(tmp_path, {"w": w}, step=1)
        monkeypatch.setattr(os, "close", close_and_press)
        with pytest.raises(KeyboardInterrupt):
            synk.save(tmp_path, {"w": w}, step=2, keep=1)
        assert presses
        assert synk.load(tmp_path, {"w": w}) == (2, None)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


PRESSES = 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # between open and with
@pytest.mark.slow
def test_ctrl_c_while_training_saving_and_loading(tmp_path):
    """At any moment: both variables have had the same updates, and what is saved is of one piece."""
    moments = random.Random(0)
    with group_of("devices", 2):
        one, two = synk.shared(np.int32(0), name="one"), synk.shared(np.zeros(1000, np.int32), name="two")
        both = {"one": one, "two": two}

        @synk.function(reduce="max", then=lambda seen: update())
        def step(x):
            return jnp.max(x)

        def update():
            one.value = one.value + 1
            two.value = two.value + 1

        x = np.ones(8, np.float32)
        step(x)
        synk.save(tmp_path, both, step=1, extra=1)
        at = 1

        def loop():
            nonlocal at
            step(x)
            synk.save(tmp_path, both, step=at + 1, extra=int(one.value))
            at += 1
            if at % 5 == 0:
                synk.load(tmp_path, both)

        for _ in range(PRESSES):
            interrupted(loop, moments.uniform(0.0, 0.02))
            count = int(one.value)
            assert np.all(np.asarray(two.value) == count)
        saved, extra = synk.load(tmp_path, both)
        assert saved in (at, at + 1)
        assert int(one.value) == extra and np.all(np.asarray(two.value) == extra)


def test_ctrl_c_before_the_background_begins(tmp_path, monkeypatch):
    """Nobody waits for a thread that was not made."""
    w = synk.shared(np.float32(1))
    made = threading.Thread.__init__

    def press(self, *args, **options):
        made(self, *args, **options)
        if options.get("name") == "synk-save":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "__init__", press)
    with pytest.raises(KeyboardInterrupt):
        synk.save(tmp_path, {"w": w}, step=1, background=True)
    monkeypatch.undo()
    assert checkpoint_files.WRITER._is_idle.wait(60)
    synk.save(tmp_path, {"w": w}, step=2)
    assert synk.load(tmp_path, {"w": w})[0] == 2


W = np.array([0.5, -1.0], np.float32)


def test_numbers_of_numpy_in_extra(group, tmp_path):
    """`extra` takes what `loss.item()` would have given."""
    extra = {"loss": np.float32(1), "step": np.int64(3), "best": np.bool_(True), "rates": [np.float32(0.5)]}
    synk.save(tmp_path, {"w": synk.shared(W)}, step=1, extra=extra)
    assert synk.load(tmp_path, {"w": synk.shared(W)}) == (1, {"loss": 1.0, "step": 3, "best": True, "rates": [0.5]})
