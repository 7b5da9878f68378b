"""Programs that gangs run: they fail, are told to stop, wait, and go on from their checkpoints."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import synk
from synk._distributed import coordinator
from synk._runtime.group import make_group
from synk._saving import checkpoint_files

from ..harness import say
from ..helpers import assert_same

PATIENCE = {"heartbeat": 10, "shutdown": 10, "start": 60}


def join(**options):
    """Return the group of all processes or, in one process, of all its devices."""
    if "SYNK_NUM_PROCESSES" in os.environ:
        return synk.init(distributed=True, **PATIENCE | options)
    return synk.init()


def raises(kind, text, call):
    """Check that a call raises in every process, and that the group goes on."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"{kind.__name__} about {text!r} was not raised")


def stepper(w):
    @synk.function(inputs=["x"], reduce="mean", name="step")
    def step(x):
        return x.mean() * w.value

    @step.then
    def step(mean):
        w.value = w.value + mean + 1
        return mean

    return step


def fail(mode, who, **options):
    """Fail in one process at step 20, as `mode` says. The others print their errors."""
    if mode == "hang":
        options["watchdog"] = 3
    group = join(exit_hook=mode != "raise without hook", **options)
    me, x = jax.process_index(), np.ones((2 * group.size, 3), np.float32)
    w = synk.shared(np.zeros(3, np.float32), name="w")
    step = stepper(w)
    for i in range(100000):
        if i == 20 and me == int(who):
            say("fails")
            fail_by(mode)
            if mode == "leave":
                break
        try:
            float(step(x)[0])
        except Exception as error:
            say("raised", kind=type(error).__name__, message=str(error))
            raises(type(error), str(error)[:60], lambda: step(x))
            raises(type(error), str(error)[:60], lambda: w.value)
            raise
        time.sleep(0.002)


def wait_for_a_dead_one(how, folder):
    """Fail in process 1 while process 0 waits in a call, or interrupt a save of process 0 for which process 1 waits."""
    group = join()
    x, me = np.arange(4 * group.size, dtype=np.float32), jax.process_index()
    w = synk.shared(np.zeros(3, np.float32), name="w")
    mean, checked = synk.function(lambda x: x.mean(), reduce="mean"), synk.function(lambda x: x.sum(), nan="raise")
    acts = {
        "local": lambda: mean(synk.local(x)), "nan": lambda: checked(x), "check": lambda: mean.check(x),
        "replicas": lambda: synk.check_replicas(w), "save": lambda: synk.save(folder, {"w": w}, step=1),
    }  # fmt: skip
    dies = 0 if how == "save" else 1
    synk.broadcast(w)
    if how != "save":
        acts[how]()
    if me == dies and how == "save":
        os.fsync = lambda descriptor: signal.raise_signal(signal.SIGINT)
    elif me == dies:
        time.sleep(0.5)
        raise RuntimeError("a bug of the user's")
    try:
        acts[how]()
    except Exception as error:
        say("raised", kind=type(error).__name__, message=str(error))
        raise


def fail_by(mode):
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode.startswith("raise"):
        raise RuntimeError("a bug of the user's")
    if mode == "exit":
        sys.exit(3)
    if mode == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if mode == "hang":
        hang_here()


def hang_here():
    time.sleep(1000)


def callbacks(when):
    """Let a callback fail in process 1 alone, which catches the error and goes on with known or new programs."""
    group = join()
    me, x = jax.process_index(), np.ones((4 * group.size, 3), np.float32)

    def note(value):
        if is_over and me == 1:
            raise OSError("cannot write the log")
        return np.asarray(value)

    shape, is_over = jax.ShapeDtypeStruct((3,), np.float32), False
    noted = synk.function(lambda x: jax.pure_callback(note, shape, x.sum(0)), name="noted")
    known, new = (synk.function(lambda x, k=k: k * x.sum(0), name="sums") for k in (100, 200))
    noted(x), known(x), jax.effects_barrier()
    is_over = True
    for call in (noted, known if when == "known" else new, known, noted):
        try:
            found = np.asarray(call(x)).tolist()
        except Exception as error:
            say("raised", kind=type(error).__name__, message=str(error))
        else:
            say("found", value=found)
    noted(x)


def works_on(who, folder):
    """Work on alone in one process, or write a checkpoint, for longer than the runtime would wait."""
    join(shutdown=2)
    w, f = synk.shared(np.zeros(3, np.float32), name="w"), synk.function(lambda x: x.sum(0))
    f(np.ones((4, 3), np.float32))
    if who == "saves":
        write = checkpoint_files._to_disk
        checkpoint_files._to_disk = lambda path: (time.sleep(6), write(path))
        synk.save(folder, {"w": w}, step=1, background=True)
    elif jax.process_index() == int(who):
        time.sleep(6)
    say("done")


def forks():
    """Fork a helper, which works on and is ended by SIGTERM."""
    join()
    f, x = synk.function(lambda x: x.sum(0)), np.ones((4, 3), np.float32)
    f(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has threads, and the helper uses nothing of it
        queue = multiprocessing.get_context("fork").Queue(2)
        multiprocessing.get_context("fork").Process(target=puts, args=(queue,), daemon=True).start()
    for _ in range(3):
        queue.get()
        f(x)
    say("done")


def forks_in_a_loop(folder):
    """Fork a daemon inside a loop of synk.resume; Python ends it by SIGTERM at the end, and waits for it."""
    join()
    w = synk.shared(np.zeros(2), name="w")
    for _ in synk.resume(range(1), {"w": w}, folder=folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX has threads, and the helper uses nothing of it
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True).start()
    say("done")


def forks_while_it_saves(folder):
    """Fork a helper, which ends by sys.exit, while a save is written in the background."""
    join()
    is_forked = threading.Event()
    write = checkpoint_files._to_disk
    checkpoint_files._to_disk = lambda path: (is_forked.wait(), write(path))
    synk.save(folder, {"w": synk.shared(np.zeros(2), name="w")}, step=1, background=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX has threads, and the helper uses nothing of it
        helper = os.fork()
    if helper == 0:
        signal.alarm(30)
        sys.exit(3)
    is_forked.set()
    say("helper", code=os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1]))


def puts(queue):
    while True:
        queue.put(1)


def without_peers():
    """Compile and place in a group of all processes that agrees with nobody, in process 0 alone."""
    who = [os.environ[f"SYNK_{name}"] for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")]
    jax.distributed.initialize(who[0], int(who[1]), int(who[2]))
    devices = tuple(jax.devices())
    if jax.process_index():
        time.sleep(120)
    with make_group(devices, False) as group:
        w = synk.shared(np.arange(3, dtype=np.float32), name="w")
        step = synk.function(lambda x: (x * w.value).sum(0), then=lambda s: setattr(w, "value", w.value + s))
        x = np.ones((4, 3), np.float32)
        rows = jax.make_array_from_callback(x.shape, group.stacked, x.__getitem__)
        collectives = str(step.compile(rows).as_text()).count(" all-reduce(")
        say("done", group=repr(group), collectives=collectives, value=w.value.tolist())
    time.sleep(120)


def preempt():
    """Run until SIGTERM, as after a checkpoint of step 1000; not asked about every fifth step, which is saved anyway."""
    signal.signal(signal.SIGTERM, print)  # over which the runtime puts its own
    group = join(heartbeat=100)
    step = stepper(synk.shared(np.zeros(3, np.float32), name="w"))
    x = np.ones((2 * group.size, 3), np.float32)
    for i in range(1000, 100000):
        float(step(x)[0])
        if i % 5 and synk.preempted(i):
            say("stops", step=i, stays=[synk.preempted(i), synk.preempted(i + 1), synk.preempted(i + 9)])
            return
        if i == 1010:
            say("goes")
        time.sleep(0.002)


def goes_on(folder, how="", items="60"):
    """A loop of `synk.resume` that counts rows. One process is slow in turn, breaks off, ends early or is told to stop."""
    group = join()
    me, items, counts = jax.process_index(), int(items), synk.shared(np.zeros(7, np.int32), name="counts")
    count = synk.function(lambda rows: counts.value.at[rows].add(1) - counts.value)
    count.then(lambda more: setattr(counts, "value", counts.value + more))
    saved, write = [], checkpoint_files.write
    resume = sys.modules["synk._saving.resume"] if synk.resume else None
    resume.write = lambda folder, step, *more: (saved.append(step), write(folder, step, *more))[1]
    items -= 20 * (how == "shorter" and me == 1)
    if "alone" in how and me == 0:
        with synk.init(jax.local_devices()):
            for _ in synk.resume(range(9), {"own": synk.shared(0.0, name="own")}, folder=f"{folder}/own"):
                pass
    loop = synk.resume(
        enumerate(synk.minibatches(7, 3, epochs=items // 3)), {"counts": counts}, folder=folder, save_every=0.1
    )
    say("starts", done=loop.done)
    for i, rows in loop:
        count(np.arange(7, dtype=np.int32), batch=rows)
        # Processes are at different items when a save is due, and one waits for the other within an item.
        time.sleep(0.03 if i % 5 == me else 0.001)
        if "stopped" in how and me == 1 and i == 23:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "breaks" and i == 23:
            break
        if how == "breaks alone" and me == 1 and i == 23:
            break
    say("ends", done=loop.done, counts=np.asarray(counts.value).tolist(), saved=saved, size=group.size)


def in_lists(folder, stop="-1"):
    """Train by lists of calls in `synk.resume`, up to a list; then by single calls from the same values: the same bits."""
    group = join()
    rng = np.random.default_rng(0)
    x, start = rng.normal(size=(50, 5)).astype(np.float32), rng.normal(size=(5, 5)).astype(np.float32)
    rates = synk.each(np.linspace(0.1, 1, 24).astype(np.float32))

    def made():
        w, m = synk.shared(start, name="w"), synk.shared(0 * start, name="m")

        @synk.function(inputs=["x"], reduce="mean")
        def step(x, rate):
            return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w.value)

        @step.then
        def step(loss, grad, rate):
            m.value = 0.9 * m.value + grad
            w.value = w.value - rate * m.value
            return loss

        return step, {"w": w, "m": m}

    (step, variables), (alone, others) = made(), made()
    assert step.explain(x, np.float32(1), batch=7).per_launch.startswith("several")
    batches = synk.minibatches(50, 7, epochs=3)
    loop = step.iterate(x, rates, batches=batches, per_launch=4)
    lists = synk.resume(loop, variables, folder=folder, save_every=1e-9)
    say("starts", done=lists.done)
    left = synk.minibatches(50, 7, epochs=3, start=lists.done)
    for name, w in others.items():
        w.value = np.asarray(variables[name].value)
    losses, sizes = [], []
    for i, results in enumerate(lists):
        losses, sizes = [*losses, *results], [*sizes, len(results)]
        if i == int(stop):
            break
    assert step.stats.calls == len(losses)
    single = itertools.islice(alone.iterate(x, rates, batches=left, prefetch=0), len(losses))
    assert_same([*losses, *(w.value for w in variables.values())], [*single, *(w.value for w in others.values())])
    synk.check_replicas(*variables.values())
    say("ends", done=lists.done, sizes=sizes, w=np.asarray(variables["w"].value).tobytes().hex(), size=group.size)


def measures():
    """Measure calls of which process 1 delays one kind on its last device, and one kind in Python."""
    group = join()

    class Slow:
        def __array__(self, dtype=None, copy=None):
            time.sleep(0.05 * jax.process_index())
            return x

    def late(x):
        x = x + 0 * jax.pure_callback(sleep, jax.ShapeDtypeStruct((), x.dtype), x[0])
        return x.sum()

    def sleep(row):
        time.sleep(0.05 * (float(row) == x[-1]))
        return row

    x = np.arange(group.size, dtype=np.float32)
    for what, call in {
        "device": lambda: synk.function(late).explain(x, run=3),
        "python": lambda: synk.function(jnp.sum).explain(Slow(), run=3),
    }.items():
        took = call().measured
        say(what, slowest=took.slowest, seconds=took.seconds, spent={line.on: line.seconds for line in took.spent})


def leaves_a_loop(folder):
    """Break off a loop of `synk.resume`, run a short one, and end."""
    join()
    w = synk.shared(0.0, name="w")
    for n in range(2):
        for i in synk.resume(range(5), {"w": w}, folder=f"{folder}/{n}"):
            w.value = w.value + 1.0
            if n == 0 and i == 2:
                break


def saves_often(folder):
    """Meet and save at nearly every item, and tell of the threads and of what is left in the store."""
    join()
    w, threads = synk.shared(0.0, name="w"), set()
    for _ in synk.resume(range(200), {"w": w}, folder=folder, save_every=0.01):
        w.value = w.value + 1.0
        time.sleep(0.002)
        threads |= {thread.name for thread in threading.enumerate()}
    left = len(coordinator._client().key_value_dir_get("synk/"))
    say("ends", w=float(w.value), threads=sorted(threads), left=left)


def ends():
    """End while the thread that attends to the others is inside the runtime."""
    join(heartbeat=100)
    get_all, is_inside = coordinator.get_all, threading.Event()

    def slowly(folder):
        is_inside.set()
        coordinator.wait("never", 1.0)
        return get_all(folder)

    coordinator.get_all = slowly
    is_inside.wait()


def train(folder, *failures):
    """A small training loop that saves every 5 steps; the attempts that `failures` name (as kill:1) end at step 12, 22..."""
    group = join()
    attempt, folder = int(os.environ.get("SYNK_ATTEMPT", 0)), Path(folder)
    if "apart" in os.environ:  # machines that share no disk
        folder /= str(jax.process_index())
    in_background = "background" in os.environ
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(101, 5)).astype(np.float32), rng.normal(size=101).astype(np.float32)
    w, m = synk.shared(np.zeros(5, np.float32), name="w"), synk.shared(np.zeros(5, np.float32), name="m")
    key = synk.shared(jax.random.key(0), name="key")

    @synk.function(inputs=["x", "y"], reduce="mean")
    def step(x, y):
        return jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w.value)

    @step.then
    def step(loss, grad):
        new, noise = jax.random.split(key.value)
        key.value = new
        m.value = 0.9 * m.value + grad + 0.01 * jax.random.uniform(noise, (5,))
        w.value = w.value - 0.05 * m.value
        return loss

    variables = {"w": w, "m": m, "key": key}
    try:
        done, extra = synk.load(folder, variables)
        assert extra == {"at": done}
    except FileNotFoundError:
        done = 0
    say("starts", step=done, attempt=attempt)
    for pick in synk.minibatches(len(x), 16, epochs=10, start=done, seed=3):
        if attempt < len(failures) and done == 12 + 10 * attempt:
            mode, who = failures[attempt].split(":")
            if jax.process_index() == int(who):
                say("fails")
                fail_by(mode)
        step(x, y, batch=pick)
        done += 1
        if done % 5 == 0:
            synk.save(folder, variables, step=done, extra={"at": done}, keep=2, background=in_background)
    say(
        "ends",
        step=done,
        w=np.asarray(w.value).tobytes().hex(),
        m=np.asarray(m.value).tobytes().hex(),
        rank=jax.process_index(),
    )
    assert group.size == 2


def save_on(folder, how):
    """Save again and again, in the background or not, until something ends it."""
    join()
    w, step = synk.shared(np.zeros(3000, np.int32), name="w"), 0
    with contextlib.suppress(FileNotFoundError):
        step, extra = synk.load(folder, {"w": w})
        assert extra == [step] and set(np.asarray(w.value).tolist()) == {step}
    say("starts", step=step)
    while True:
        step += 1
        w.value = np.full(3000, step, np.int32)
        synk.save(folder, {"w": w}, step=step, extra=[step], keep=2, background=how == "background")
        say("saved", step=step - (how == "background"))


def execute(code):
    """Run some lines of Python."""
    exec(code, globals())
