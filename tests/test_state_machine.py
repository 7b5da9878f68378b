"""Warm as fresh: whatever went before, a call answers as one of functions, variables and data that are made anew.

Steps are drawn first and then taken, each in a world with a history and by a twin made for it alone; the two must tell
the same: bits, errors, messages, values of variables. For longer:
`STEPS=20000 SEED=7 pytest -m slow tests/test_state_machine.py`.
"""

import gc
import os
import random
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from .helpers import slow, smoke
from .worlds import ON_VARIABLES, PLACES, TEMPLATES, USES, Act, Call, World

NAMES = (
    "sums many stacked firsts weighted ordered known stays median whole scaled power pair talks picky noisy engine "
    "trained trained scanned descended descended local local either either counted reads reads holds moves"
).split()
FORMS = (
    ["numpy"] * 8 + "float64 int32 strided list jax jax one-device group".split()
    + ["data-host", "data-scatter", "data-broadcast"] * 2 + ["fails-0", "fails-1"]
)  # fmt: skip
VIAS = (
    "serial check compile iterate iterate over over jit grad vmap eval_shape "
    "interrupted interrupted threads elsewhere promoted x64"
).split()
UNSLICED = ("moves", "stacked", "firsts", "talks")


def drawn(seed, count):
    """So many steps, about a few things each, so that they meet."""
    rng, steps = random.Random(seed), []
    few = {
        "name": rng.sample(NAMES, rng.randint(1, 2 + count // 20)), "group": rng.sample(range(3), rng.choice([1, 1, 2])),
        "form": rng.sample(FORMS, 3), "via": ["call"] * 3 + rng.sample(VIAS, 3), "rows": [6, *rng.sample(range(1, 14), 2)],
    }  # fmt: skip
    while len(steps) < count:
        calls = [step for step in steps[-20:] if isinstance(step, Call)]
        if calls and rng.random() < 0.5:  # again, with other values, and perhaps in another way
            call, key = (
                rng.choice(calls),
                rng.choice(["seed", "slices", "via", "via", "group", "form", "rows", "scale"]),
            )
            new = {
                "slices": 1 if call.name in UNSLICED else rng.randint(1, 4),
                "scale": rng.choice([3, 0.5]),
                "seed": 0,
            }
            change = {key: rng.choice(few[key]) if key in few else new[key]}
            steps.append(call._replace(**change | {"seed": rng.randrange(99)}))
        else:
            is_open = any(step.via == "iterate" for step in calls)
            steps.append(_call(rng, few) if rng.random() < 0.7 else _act(rng, few, is_open))
    return steps


def _call(rng, few):
    name, rows, form = (rng.choice(few[key]) for key in ("name", "rows", "form"))
    batch, batch_s = _batch(rng, 13 if form.startswith("data") else rows), None
    slices = rng.choice([*[1, 1, 2, 3, 4] * 8, rng.choice([0, 2.0, "2"])])
    if form == "data-scatter" and rng.random() < 0.5:
        batch, batch_s = None, rng.choice([[0], [1, 0], slice(0, 1), [[0], [1], [0]], [[0], [1]]])
    if name in (*UNSLICED, "holds") and rng.random() < 0.9:
        rows, batch, slices = 6, None, slices if name == "holds" else 1
    wrong = rng.choice(["fn", "then", "fn, Ctrl-C", "then, Ctrl-C"]) if rng.random() < 0.1 else None
    subset = rng.choice([None, ["max"], ["rows", "mean"], ["none"]]) if name == "many" else None
    scale = rng.choice([2.0, 0.5, np.float32(0.5), jnp.float32(2), 2, True, "text"])
    group, seed, via, more = rng.choice(few["group"]), rng.randrange(99), rng.choice(few["via"]), rng.randrange(4)
    return Call(group, name, rows, seed, form, batch, batch_s, slices, subset, scale, wrong, via, more)


def _batch(rng, rows):
    kind = rng.choice(["all"] * 9 + ["first", "slice", "mask", "list", "array", "int32"] * 2 + ["wrong"])
    index = [rng.randrange(-rows, rows) for _ in range(rng.randint(1, 9))]
    return {
        "all": None, "first": rng.randint(1, rows), "slice": slice(rng.randrange(rows), None, rng.choice([1, 2])),
        "mask": ("bool", [rng.random() < 0.7 for _ in range(rows)]), "list": index, "array": ("int64", index),
        "int32": ("int32", index),
        "wrong": rng.choice([[rows], [-rows - 1], [], ("bool", [True] * (rows + 1)), [0.5], rows + 1, 0, "all", [[0]]]),
    }[kind]  # fmt: skip


def _act(rng, few, is_open):
    group, seed = rng.choice(few["group"]), rng.randrange(99)
    what = rng.choice(["variable"] * 6 + ["data changes", "close"] + ["next", "next", "next", "next inside"] * is_open)
    if what == "variable":
        name = rng.choice([*(name for each in few["name"] for name in USES.get(each, ())), *TEMPLATES])
        act = rng.choice(
            list(ON_VARIABLES) if name != "held" else ["scatter", "scatter", "all_gather", "set rank", "gather"]
        )
        return Act(group, act, name, seed, rng.choice([0, 1, 2, 6, 6, 7]))
    return Act(
        group, what, rng.choice(PLACES), seed, rng.choice(["write", "write", "set_value", "set_length", *PLACES])
    )


def difference(steps, until=None):
    """The first difference between warm and fresh, as (number of the step, what); None where there is none."""
    world = World()
    try:
        for i, step in enumerate(steps):
            if until is not None and time.monotonic() > until:
                return None
            try:
                world.take(step)
            except AssertionError as error:
                return i, str(error)
            except Exception:  # where no user's line is at fault
                return i, traceback.format_exc()
    finally:
        world.end()
    return None


def fewest(steps, seconds=60):
    """Fewer steps that still end in a difference."""
    until, i = time.monotonic() + seconds, len(steps) - 2
    while i >= 0 and time.monotonic() < until:
        fewer = steps[:i] + steps[i + 1 :]
        found = difference(fewer, until)
        if found is not None:
            steps = fewer[: found[0] + 1]
        i = min(i, len(steps) - 1) - 1
    return steps


def check(seed, count):
    """Take so many steps, and show the fewest that tell warm from fresh."""
    steps = drawn(seed, count)
    found = difference(steps)
    if found is not None:
        steps = fewest(steps[: found[0] + 1])
        lines = "\n  ".join(map(str, steps))
        pytest.fail(f"seed {seed}, step {found[0]}: {found[1]}\nThe fewest steps:\n  {lines}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """What is made anew traces anew, and gets from a file what was compiled before."""
    if jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax-cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1,
    }  # fmt: skip
    before = {name: getattr(jax.config, name) for name in options}
    set_cache(options)
    yield
    set_cache(before)


def set_cache(options):
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


interruptible = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@interruptible  # where the garbage collector swallows one
@pytest.mark.parametrize("seed", [smoke(seed) if seed < 5 else seed if seed < 24 else slow(seed) for seed in range(34)])
def test_warm_as_fresh(seed):
    """In short histories every step tells what it tells in a new world."""
    check(seed, 5)


@interruptible
@pytest.mark.slow
def test_warm_as_fresh_for_long():
    """In long ones too; caches are full of each other's programs."""
    seed, steps = int(os.environ.get("SEED", 1000)), int(os.environ.get("STEPS", 200))
    for start in range(0, steps, 100):
        check(seed + start, min(100, steps - start))
        gc.collect()
        if start % 500 == 0:
            jax.clear_caches()
        if start % 1000 == 0:
            print(f"{start + 100} steps without a difference", flush=True)
