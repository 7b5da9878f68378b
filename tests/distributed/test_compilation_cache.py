"""Compilation cache: programs in a folder, whose second start compiles nothing, and answers that it does not change."""

import json
import os
from textwrap import dedent

import jax
import pytest

import synk

from .. import harness
from ..harness import said
from . import programs

# A process says how many programs JAX asked the folder for, and how many it found there.
BEFORE = """
import collections, json, os, sys
import jax, jax.numpy as jnp, numpy as np, optax, synk, synk.train
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[1]]))
x = np.arange(24, dtype=np.float32).reshape(8, 3)

def told(**more):
    return {"requests": events["compile_requests_use_cache"], "hits": events["cache_hits"], **more}
"""


def start(code, processes=1, **environment):
    """Run lines in new processes with four devices in all. Return what each says."""
    options = {"processes": processes, "devices": 4 // processes, **environment}
    ends = harness.run(programs.execute, BEFORE + dedent(code), **options)
    assert not any(end.code for end in ends), ends
    said_by_each = [said(end.output)[-1] for end in ends]
    return said_by_each if processes > 1 else said_by_each[0]


TRAIN = """
params = {"w": np.ones(3, np.float32), "b": np.float32(0)}
step = synk.train.step(lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2), params, optax.adam(0.1))
losses = [float(step(x)) for _ in range(3)]
explanation = step.explain(x)
program, = explanation.programs
found = told(losses=losses, from_cache=program.is_from_cache, collectives=len(program.collectives),
             memory=explanation.memory_bytes, compilations=step.stats.compilations, misses=events["cache_misses"])
"""


@pytest.mark.smoke
def test_a_second_start_compiles_nothing(tmp_path):
    """The folder is made, `~` is the home, SYNK_CACHE means the same; bits and reports are those of the first start."""

    def fresh(cache, **environment):
        code = f"{BEFORE}synk.init(4, cache={cache!r})\n{TRAIN}print(json.dumps(found))"
        done = harness.python(code, **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    folder = tmp_path / "of" / "programs"
    first = fresh("~/of/programs", HOME=str(tmp_path))
    assert first["hits"] == 0 and first["misses"] == first["requests"] == len([*folder.iterdir()]) > 1
    again = fresh(None, SYNK_CACHE=str(folder))
    assert again["hits"] == again["requests"] == first["requests"] and again["misses"] == 0
    assert (first["from_cache"], again["from_cache"]) == (False, True)
    for name in ("losses", "collectives", "memory", "compilations"):
        assert again[name] == first[name]


@pytest.mark.gang
def test_a_second_start_of_a_gang(tmp_path):
    """Process 0 compiles nothing. On CPUs JAX names the programs of each other process in its own way, and they compile."""
    code = f"join(cache={str(tmp_path)!r}){TRAIN}say('ends', **found)"
    first, again = start(code, 2), start(code, 2)
    assert first[0]["misses"] == first[0]["requests"] > 1 and again[0]["hits"] == again[0]["requests"]
    assert [each["misses"] for each in (first[1], *again)] == [0, 0, 0] and again[0]["from_cache"]
    assert {str(each["losses"]) for each in (*first, *again)} == {str(first[0]["losses"])}


def test_what_is_asked_counts(tmp_path):
    """`cache=` counts before SYNK_CACHE, and that before JAX's own option, which is left as it is if neither is given."""
    code = """
        synk.init(2, cache={})
        synk.function(jnp.sum)(x)
        say("ends", folder=jax.config.jax_compilation_cache_dir)
    """
    asked, synks, jaxs = (str(tmp_path / name) for name in ("asked", "synks", "jaxs"))
    settings = {"SYNK_CACHE": synks, "JAX_COMPILATION_CACHE_DIR": jaxs}
    for cache, environment, folder in (
        (asked, settings, asked), (None, settings, synks), (None, {**settings, "SYNK_CACHE": ""}, jaxs), (None, {}, None),
    ):  # fmt: skip
        assert start(code.format(repr(cache)), **environment)["folder"] == folder
    assert os.listdir(asked) and os.listdir(synks)


def test_one_folder_after_the_other(tmp_path):
    """Another folder is used from there on. A folder stays in use after `close`, and for groups made without one."""
    code = f"""
        one, two = {[str(tmp_path / name) for name in ("one", "two")]}

        def entries():
            told.append([len(os.listdir(folder)) for folder in (one, two) if os.path.isdir(folder)])

        told, f = [], synk.function(jnp.sum)
        synk.init(2, cache=one)
        f(x)
        entries()
        synk.init(2, cache=two)
        f(x[:, :2])
        entries()
        synk.close()
        synk.init(1)
        f(x)
        entries()
        with synk.simulate(3):
            f(x)
        entries()
        say("ends", entries=told)
    """
    (one,), (same, two), (still, more), (_, most) = start(code)["entries"]
    assert one == same == still and 0 < two < more < most


def test_simulate_reads_the_environment(tmp_path):
    """Programs of simulated replicas come from the folder of SYNK_CACHE too."""
    code = """
        synk.simulate(3)
        f = synk.function(jnp.sum)
        f(x)
        say("ends", from_cache=f.explain(x).programs[0].is_from_cache)
    """
    assert [start(code, SYNK_CACHE=str(tmp_path))["from_cache"] for _ in range(2)] == [False, True]


def test_callbacks_are_those_of_this_run(tmp_path):
    """A program with a host callback calls the callback of the run that it is in, whether JAX keeps it or not."""
    code = f"""
        synk.init(2, cache={str(tmp_path)!r})

        def add(value):
            def plus(x):
                return (x + jax.pure_callback(lambda: np.float32(value), jax.ShapeDtypeStruct((), jnp.float32))).sum()

            return float(synk.function(plus)(np.zeros(2, np.float32)))
    """
    assert start(f"{dedent(code)}say('ends', got=[*map(add, [1, 2])])")["got"] == [2, 4]
    assert start(f"{dedent(code)}say('ends', got=[*map(add, [2, 1, 3])])")["got"] == [4, 2, 6]


def test_a_damaged_entry_is_compiled_again(tmp_path):
    """A file that a killed process has left half is no error: JAX warns, and compiles."""
    code = f"synk.init(4, cache={str(tmp_path)!r}){TRAIN}say('ends', **found)"
    first = start(code)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    again = start(code)
    assert again["losses"] == first["losses"] and not again["from_cache"] and again["hits"] == 0


@pytest.mark.parametrize(
    ("cache", "kind", "message"),
    [
        ("file/inside", ValueError, "cache is '.*file/inside', but files cannot be written there"),
        ("file", ValueError, "cache is '.*file', but files cannot be written there"),
        ("~nobody-of-this-name/cache", ValueError, ".*, but files cannot be written there"),
        ("", ValueError, "cache is ''; give the path of a folder"),
        ("gs://bucket/cache", ValueError, ".*JAX_COMPILATION_CACHE_DIR"),
        (3, TypeError, "cache is 3; give the path of a folder"),
        (b"bytes", TypeError, "cache is b'bytes'; give the path"),
    ],
)
def test_folders_that_are_none(tmp_path, cache, kind, message):
    """Nothing changes: the group and JAX's options are as before."""
    (tmp_path / "file").touch()
    if str(cache).startswith("file"):
        cache = tmp_path / cache if cache == "file" else str(tmp_path / cache)
    group, folder = synk.group(), jax.config.jax_compilation_cache_dir
    with pytest.raises(kind, match=f"synk.init: {message}"):
        synk.init(1, cache=cache)
    assert synk.group() is group and jax.config.jax_compilation_cache_dir == folder


def test_folders_of_the_environment(tmp_path, monkeypatch):
    """The message names the variable, and the call that reads it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SYNK_CACHE", str(tmp_path / "file"))
    for call, name in ((synk.init, "synk.init"), (synk.simulate, "synk.simulate")):
        with pytest.raises(ValueError, match=f"{name}: SYNK_CACHE is '.*file', but"):
            call(1)
