"""Histories of loops: what random loops give, and leave behind, is to the bit what a Python loop of single calls gives.

A history is drawn from a seed and runs twice, by loops and by calls, each time in a world of its own. For more of them:
`HISTORIES=1000 SEED=7 KINDS="stream,body writes data" pytest -s -m slow tests/loops/test_histories.py`.
"""

import itertools
import os
import signal
import traceback
from collections import Counter
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import synk

from ..helpers import assert_same, group_of, smoke, values
from .histories import World, drawn, given, kinds

# What messages of loops say besides.
OF_ITEMS = " An item that is a mapping gives arguments by name; one that is the only argument comes as (item,)."

# Numbers of other types, and an order that comes once more, are on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*it compiles for the third time"),
    pytest.mark.filterwarnings("ignore:.*it has compiled for"),
    pytest.mark.filterwarnings("ignore:.*the same order"),
]

# The two ways to run it.


def by_loops(world, tape):
    """Begin loops, and note on the tape how many results each list had, or what came instead."""
    h = world.h

    def begin(loop, log):
        items, each = given(world, loop)
        options = {"prefetch": loop.prefetch, "num_slices": h.slices, "per_launch": loop.k}
        x, y, rate = world.args.values()
        rate = rate if each is None else synk.each(each)
        if h.is_stream:
            results = world.f.stream(items, **options)
        else:
            results = world.f.iterate(x, y, rate, batches=items, **options)

        def take():
            try:
                got = next(results)
            except BaseException as error:
                log.append(error)
                assert next(results, "the end") == "the end"
                raise
            log.append(1 if loop.k is None else len(got))
            return [got] if loop.k is None else got

        return take, results.close

    return begin


def by_calls(world, tape):
    """The same by single calls, as many a turn as the tape says."""
    h = world.h

    def begin(loop, log):
        items, each = given(world, loop)
        items, entries = iter(items), iter(log)

        def call():
            item = next(items)
            return jax.tree.map(np.array, world.call(loop, item, None if each is None else next(each)))

        def take():
            entry = next(entries)
            if isinstance(entry, int):
                return [call() for _ in range(entry)]
            if isinstance(entry, synk.SynkError) and is_refusal(h, loop):
                raise entry
            # Ctrl-C comes at once, when the source is asked early, after one of these calls.
            world.states = [values(*world.variables)]
            for _ in range(loop.k or 1 if isinstance(entry, KeyboardInterrupt) else 1):
                # It comes before the error of a call in the list that is being made.
                with suppress(Exception) if isinstance(entry, KeyboardInterrupt) else nullcontext():
                    call()
                world.states.append(values(*world.variables))
            if isinstance(entry, KeyboardInterrupt):
                raise KeyboardInterrupt
            raise AssertionError(f"{entry!r} came in place of a result")

        return take, lambda: None

    return begin


def is_refusal(h, loop):
    """Whether a SynkError may come: what is taken early, and written by both, is nowhere when it is due."""
    return h.kind == "both" and loop.prefetch > 0


def told(world, begin, tape):
    """Yield what the program of a history is told: what happened, and values."""
    h = world.h
    for number, loops in enumerate(h.phases):
        rng, running = np.random.default_rng([h.seed, number]), []
        for i, loop in enumerate(loops):
            running.append((loop, 1, *begin(loop, tape.setdefault((number, i), []))))
        while running:
            loop, turn, take, leave = running.pop(0)
            try:
                results = take()
            except StopIteration:
                yield "the loop ends", None
                continue
            except KeyboardInterrupt:
                yield "Ctrl-C", values(*world.variables)
                for variable in world.variables:
                    world.write_variable(variable, rng)
                continue
            except Exception as error:
                # Rows to which the source has written since are not there to name one of them.
                is_named = not (isinstance(error, FloatingPointError) and h.by_source)
                said = f"{type(error).__name__}: {error if is_named else ''}"
                yield said.removesuffix(OF_ITEMS), values(*world.variables)
                if isinstance(error, synk.SynkError) and h.kind == "both":
                    return
                continue
            yield f"{len(results)} results", results
            is_left = turn == loop.turns and loop.stop is not None
            try:
                yield from body(world, loop, rng, len(results))
                if is_left and loop.stop == "Ctrl-C in the body":
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass
            if not is_left:
                running.append((loop, turn + 1, take, leave))
            elif loop.stop == "leave":
                leave()
            take = leave = results = None
        # The source may have written early.
        for name in h.by_source:
            world.write(name, rng, h.length if h.is_stream else None, whole=True)
    yield "variables", values(*world.variables)
    yield "data", [np.array(world.args[name]) for name in h.by_body]


def body(world, loop, rng, results):
    """What is done between two results, or lists of them."""
    h = world.h
    # A list that is short ends before an error, of which a write might make a result.
    for name in h.by_body if results == (loop.k or 1) and not h.grows else ():
        if rng.random() < 0.7:
            world.write(name, rng)
    if h.grows and results == (loop.k or 1) and rng.random() < 0.5:
        rows = h.length + int(rng.choice([0, 3]))
        for name in h.by_body:
            world.write(name, rng, rows if name != "rate" else None)
    if h.writes_variables and world.variables and rng.random() < 0.5:
        world.write_variable(world.variables[rng.integers(len(world.variables))], rng)
    if h.looks:
        yield "variables", values(*world.variables)
    if h.calls_between and rng.random() < 0.3:
        items, each = given(world, SimpleNamespace(**vars(loop) | {"error": None}))
        yield "a call", world.call(loop, next(iter(items)), None if each is None else next(each))


def difference(h):
    """The first difference between loops and calls; None where there is none."""
    tape, got = {}, []
    with group_of(*h.group):
        world = World(h)
        try:
            for what, value in told(world, by_loops(world, tape), tape):
                got.append((what, jax.tree.map(np.array, value) if h.awaits else value))
        except Exception:
            got.append((traceback.format_exc(), None))
        world = World(h)
        wanted = told(world, by_calls(world, tape), tape)
        for number, (what, value) in enumerate(got):
            try:
                other = next(wanted)
            except Exception:
                other = traceback.format_exc(), None
            if what != other[0]:
                return f"event {number}: by loops {what}, by calls {other[0]}"
            error = None
            for state in world.states if what == "Ctrl-C" else [other[1]]:
                try:
                    assert_same(value, state)
                    break
                except AssertionError as found:
                    error = found
            else:
                return f"event {number}, {what}: {error}\nby loops {value}\nby calls {other[1]}"
    return short_lists(h, tape)


def short_lists(h, tape):
    """A list that has too few results, though neither an epoch, nor the source, nor an error ended it."""
    for (phase, i), entries in tape.items():
        loop, at = h.phases[phase][i], 0
        epoch = -(-h.length // h.sizes[0]) - (h.is_minibatch and h.length % h.sizes[0] > 0)
        for entry, after in itertools.pairwise(entries):
            if isinstance(entry, int) and isinstance(after, int):
                room = epoch - at % epoch if loop.source == "minibatches" else entry + 1
                if entry != min(loop.k or 1, room):
                    return f"loop {phase, i}: lists of {entries} results"
                at += entry
    return None


def check(h):
    found = difference(h)
    if found is not None:
        loops = "\n".join(str(loop) for phase in h.phases for loop in phase)
        pytest.fail(f"{found}\n{h}\n{loops}", pytrace=False)


@pytest.mark.parametrize("seed", [smoke(seed) if seed < 3 else seed for seed in range(30)])
def test_loops_as_calls(seed):
    check(drawn(seed))


@pytest.mark.slow
def test_many_loops_as_calls():
    """Tell how many of each kind there were, and all that differ."""
    start, count = int(os.environ.get("SEED", 1000)), int(os.environ.get("HISTORIES", 100))
    wanted = {*filter(None, os.environ.get("KINDS", "").split(","))}
    counts, failed = Counter(), Counter()
    for h in itertools.islice((h for h in map(drawn, itertools.count(start)) if wanted <= kinds(h)), count):
        found = difference(h)
        counts.update(kinds(h))
        if found is not None:
            failed.update(kinds(h))
            print(f"seed {h.seed}: {found[:2000]}", flush=True)
    print("\n".join(f"{name}: {n}, of which {failed[name]} differ" for name, n in sorted(counts.items())))
    assert not failed
