"""Disasters: elastic groups that lose processes at points which a seed draws. `python disasters.py SEED` replays one.

`--seeds A:B` runs many and prints a table. Each seed draws a program, the number of its processes, and one or two faults
out of a closed list. Real processes run under the real launcher. They are forks of a process that has imported JAX and
started nothing of it, since that import would be most of their time. Faults are put in by wrapping functions of synk.
The survivors must end with exit code 0 and the values of the same program in one process without faults.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import queue
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train
from synk._distributed import coordinator, elastic, gang, launcher, membership
from synk._runtime.renewal import KEEPERS
from synk._variables import checkpoint_files

STEPS = 25
DEADLINE = 90  # seconds for a run, which takes three
HEARTBEAT = 30
SHORT_HEARTBEAT = 3  # where a process freezes

# Programs. Each calls `done` after each step, and returns its end values: integers count rows, floats are values.

PROGRAMS = {}


def program(fn):
    """Register a program."""
    PROGRAMS[fn.__name__] = fn
    return fn


def rows_of(case, steps=STEPS):
    """Return rows (steps, rows, 4), targets and their numbers; all differ, so that no two rows are alike."""
    drawn, count = np.random.default_rng(7), steps * case.rows
    x = drawn.normal(size=(steps, case.rows, 4)).astype(np.float32 if case.blocks else np.float64)
    return x, np.tanh(x.sum(-1)), np.arange(count).reshape(steps, case.rows)


def squared(w, x, y, n):
    """Return the loss, and as aux how many rows were seen and the sum of their numbers."""
    return ((x @ w["a"] + w["b"] - y) ** 2).mean(), jnp.stack([n.sum(), jnp.asarray(n.size, n.dtype)])


def adam(case):
    """Make a training step."""
    dtype = np.float32 if case.blocks else np.float64
    params = {"a": np.zeros(4, dtype), "b": np.zeros((), dtype)}
    return synk.train.step(squared, params, optax.adam(0.02), aux="sum", blocks=case.blocks)


@program
def steps(case, done):
    """Train on rows of arrays, by calls."""
    (x, y, n), step, seen, losses = rows_of(case), adam(case), np.zeros(2, int), 0.0
    for i in range(STEPS):
        loss, rows = step(x[i], y[i], n[i], num_slices=case.slices)
        seen, losses = seen + np.asarray(rows), losses + loss
        done()
    return {"seen": seen, "losses": losses, "params": step.params.value, "opt": step.opt_state.value}


@program
def iterate(case, done):
    """Train by `step.iterate` over shuffled minibatches of data, the last of an epoch short."""
    (x, y, n), step, seen = rows_of(case), adam(case), np.zeros(2, int)
    flat = [synk.data(x.reshape(-1, 4)), y.reshape(-1), n.reshape(-1)]
    batches = synk.minibatches(y.size, 2 * case.rows - 1, epochs=2)
    for _, rows in step.iterate(*flat, batches=batches, num_slices=case.slices):
        seen = seen + np.asarray(rows)
        done()
    return {"seen": seen, "params": step.params.value}


def counting(case):
    """Return a function that updates variables in `then`, and the variables."""
    dtype = np.float32 if case.blocks else np.float64
    w, seen = synk.shared(np.ones(4, dtype), "w"), synk.shared(np.zeros(2, np.int64), "seen")

    @synk.function(outputs=("mean", "sum"), blocks=case.blocks)
    def gain(x, n):
        return jnp.tanh(x * w.value).mean(0), jnp.stack([n.sum(), jnp.asarray(n.size, n.dtype)])

    @gain.then
    def gain(mean, rows):
        w.value, seen.value = 0.9 * w.value + mean, seen.value + rows
        return mean

    return gain, w, seen


@program
def stream(case, done):
    """Stream from a generator that uses its memory again."""
    (x, _, n), (gain, w, seen), total = rows_of(case), counting(case), 0.0
    memory = np.empty_like(x[0])

    def loader():
        for i in range(STEPS):
            memory[...] = x[i]
            yield memory, n[i]

    for mean in gain.stream(loader(), num_slices=case.slices):
        total = total + mean
        done()
    return {"seen": seen.value, "w": w.value, "total": total}


@program
def over(case, done):
    """Evaluate over minibatches and over a generator, and set a variable by the answer."""
    (x, y, n), w, seen = rows_of(case), synk.shared(np.zeros(4, x_dtype(case)), "w"), np.zeros(2, int)

    @synk.function(outputs=("mean", "sum"), blocks=case.blocks)
    def error(x, y, n):
        slope = -2 * (y - x @ w.value)[:, None] * x
        return slope.mean(0), jnp.stack([n.sum(), jnp.asarray(n.size, n.dtype)])

    for i in range(STEPS):
        if i % 2:
            gradient, rows = error.over(x[i], y[i], n[i], batches=synk.minibatches(case.rows, 5, seed=i))
        else:
            parts = ((x[i, j : j + 4], y[i, j : j + 4], n[i, j : j + 4]) for j in range(0, case.rows, 4))
            gradient, rows = error.over(source=parts)
        w.value = w.value - 0.1 * gradient
        seen = seen + np.asarray(rows)
        done()
    return {"seen": seen, "w": w.value}


def x_dtype(case):
    """Return the dtype of a program's numbers."""
    return np.float32 if case.blocks else np.float64


@program
def collectives(case, done):
    """Call collectives over shared variables beside a function."""
    (x, _, n), (gain, w, seen) = rows_of(case), counting(case)
    other, gathered = synk.shared(np.arange(4, dtype=x_dtype(case)), "other"), 0.0
    for i in range(STEPS):
        gain(x[i], n[i], num_slices=case.slices)
        synk.broadcast(other, w.value + i)
        synk.all_reduce(w, "max")
        gathered = gathered + synk.gather(other)[0].sum()
        done()
    return {"seen": seen.value, "w": w.value, "gathered": gathered}


@program
def checkpoints(case, done):
    """Save every few steps, now and then in the background, and go back once."""
    (x, y, n), step, seen = rows_of(case), adam(case), np.zeros(2, int)
    folder, has_gone_back, i = Path(case.folder) / "saved", False, 0
    while i < STEPS:
        if i == 14 and not has_gone_back:
            i, extra = synk.load(folder, step.variables, step=9)
            seen, has_gone_back = np.array(extra["seen"]), True
        _, rows = step(x[i], y[i], n[i], num_slices=case.slices)
        seen = seen + np.asarray(rows)
        i += 1
        if i % 3 == 0:
            synk.save(folder, step.variables, step=i, extra={"seen": seen.tolist()}, keep=3, background=i % 2 == 1)
        done()
    synk.save(folder, step.variables, step=STEPS, extra={"seen": seen.tolist()})
    number, extra = synk.load(folder, step.variables)
    left = sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))
    assert number == STEPS and len(left) == 3, (number, left)
    return {"seen": np.array(extra["seen"]), "params": step.params.value}


@program
def resident(case, done):
    """Train on rows of data that live on the replicas, by indexes, and gather outputs of all rows."""
    (x, y, n), w, total = rows_of(case), synk.shared(np.zeros(4, x_dtype(case)), "w"), 0.0
    data = [synk.data(part.reshape(-1, *part.shape[2:])) for part in (x, y, n)]

    @synk.function(outputs=("mean", "sum", "concat"), blocks=case.blocks)
    def error(x, y, n):
        slope = -2 * (y - x @ w.value)[:, None] * x
        return slope.mean(0), jnp.stack([n.sum(), jnp.asarray(n.size, n.dtype)]), 2 * n

    seen = np.zeros(2, int)
    for i, batch in enumerate(synk.minibatches(y.size, case.rows, seed=3)):
        gradient, rows, doubled = error(*data, batch=batch, num_slices=case.slices)
        np.testing.assert_array_equal(np.asarray(doubled), 2 * batch)
        w.value = w.value - 0.1 * gradient
        seen, total = seen + np.asarray(rows), total + float(gradient.sum()) * (i + 1)
        done()
    return {"seen": seen, "w": w.value, "total": total}


@program
def skips(case, done):
    """Train on rows of which some are NaN, and leave out the batches that raise."""
    (x, _, n), w, seen = rows_of(case), synk.shared(np.ones(4, x_dtype(case)), "w"), np.zeros(2, int)
    x[::3, 1] = np.nan

    @synk.function(outputs=("mean", "sum"), blocks=case.blocks, nan="raise")
    def gain(x, n):
        return jnp.tanh(x * w.value).mean(0), jnp.stack([n.sum(), jnp.asarray(n.size, n.dtype)])

    for i in range(STEPS):
        try:
            mean, rows = gain(x[i], n[i], num_slices=case.slices)
        except FloatingPointError:
            mean, rows = 0.0, [0, 1000]
        w.value = 0.9 * w.value + mean
        seen = seen + np.asarray(rows)
        done()
    return {"seen": seen, "w": w.value}


@program
def joins(case, done):
    """Train, and let a process that was started again join between two steps."""
    (x, y, n), step = rows_of(case), adam(case)
    seen = synk.shared(np.zeros(2, int), "seen")
    for i in synk.join(range(4 * STEPS), step.variables | {"seen": seen}):
        _, rows = step(x[i % STEPS], y[i % STEPS], n[i % STEPS], num_slices=case.slices)
        seen.value = seen.value + rows
        done()
    return {"seen": seen.value, "params": step.params.value, "opt": step.opt_state.value}


# Programs of tests alone.


def until_stopped(case, done):
    """Train until all are told to stop."""
    (gain, w, seen), (x, _, n), i = counting(case), rows_of(case), 0
    while not synk.preempted(i):
        gain(x[i % STEPS], n[i % STEPS])
        i += 1
        done()
    return {"steps": np.array(i), "seen": seen.value, "w": w.value}


def local_rows(case, done):
    """Train on rows that each process alone holds."""
    (gain, w, seen), (x, _, n) = counting(case), rows_of(case)
    for i in range(STEPS):
        gain(synk.local(x[i]), synk.local(n[i]))
        done()
    return {"seen": seen.value, "w": w.value}


def forks(case, done):
    """Train beside a helper that is forked, told to stop, and ends as programs do."""
    helper = os.fork()
    if helper == 0:
        signal.pause()
    time.sleep(0.1)
    os.kill(helper, signal.SIGTERM)
    assert os.waitpid(helper, 0)[1] == signal.SIGTERM
    if os.fork() == 0:
        sys.exit()
    os.wait()
    return steps(case, done)


def exits(case, done):
    """Train; process 1 exits with a code."""

    def done_or_exit():
        done()
        if jax.process_index() == 1:
            sys.exit(1)

    return steps(case, done_or_exit)


def threads(case, done):
    """Call from another thread, and train."""
    errors = queue.SimpleQueue()

    def call():
        try:
            counting(case)[0](np.ones((case.rows, 4)), np.ones(case.rows, int))
        except synk.SynkError as error:
            errors.put(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(errors.get_nowait())
    return steps(case, done)


TEST_PROGRAMS = PROGRAMS | {fn.__name__: fn for fn in (until_stopped, local_rows, forks, exits, threads)}


# Faults.

# Where faults come, and how often a process passes there at most, in most programs.
POINTS = {
    "before a launch": 20,
    "inside a program": 20,
    "before an exchange": 30,
    "inside an exchange": 30,
    "after an exchange": 30,
    "while compiling": 3,
    "in the user's code": STEPS // 2,
    "as it meets the launcher": 1,
    "before it connects": 1,
    "after it has connected": 1,
    "at its end": 1,
}
# Where they come besides in a program that saves.
OF_FILES = {"before it acts for all": 7, "after it has acted for all": 7, "between the writes of a file": 10}
# Where a second process fails while the others go on without the first.
AGAIN = (
    "as its values are copied",
    "before it follows",
    "before it connects",
    "after it has connected",
    "before a launch",
    "while compiling",
)
# Where a process fails that was started again, to join.
AS_IT_JOINS = {
    "as it meets the launcher": 1,
    "before it waits to join": 1,
    "as it waits to join": 1,
    "before it follows": 1,
    "before it connects": 1,
    "after it has connected": 1,
    "before an exchange": 12,
    "after an exchange": 12,
    "before a launch": 3,
    "while compiling": 2,
}
# What happens, and how often of a hundred; besides, in tests, that all are told to stop,
# by the launcher or each.
KINDS = {"kill": 66, "freeze": 10, "pause": 8, "delay": 8, "terminate": 8}


@dataclass
class Fault:
    """One fault.

    Attributes:
      process: where it happens, by the launcher's number.
      kind: what happens.
      point: where in the program it happens.
      visit: how many times the process passes there before it does.
      after: milliseconds later, on another thread; 0 for at once.
      life: 0 for one of the first processes; k for the process that the launcher starts again as its k-th.
    """

    process: int
    kind: str
    point: str
    visit: int
    after: int
    life: int = 0


@dataclass
class Case:
    """What a seed draws.

    Attributes:
      processes: the number of processes.
      program: what they run.
      rows: rows of a step.
      slices: the number of slices.
      blocks: rows of a block; None without blocks.
      least: how few processes may be left.
      restarts: how often a lost process is started again.
      is_cached: whether programs come from JAX's cache of compiled programs, once it has them.
      faults: what happens.
      folder: where the run may write.
    """

    seed: int
    processes: int
    program: str
    rows: int
    slices: int
    blocks: int | None
    is_cached: bool = False
    least: int = 1
    restarts: int = 0
    faults: list[Fault] = field(default_factory=list)
    folder: str = ""

    @property
    def values(self):
        """Return what the end values depend on."""
        return self.program, self.rows, self.slices, self.blocks


def drawn(seed):
    """Draw the case of a seed."""
    draw = random.Random(seed)
    program = draw.choice([*PROGRAMS, "steps", "checkpoints"])
    case = Case(
        seed, draw.choice((3, 3, 4)), program, draw.choice((13, 12, 14)), draw.choice((1, 1, 2)),
        draw.choice((None, None, 2)), is_cached=draw.random() < 0.6,
    )  # fmt: skip
    case.blocks = None if program == "over" else case.blocks  # which has none
    victims = draw.sample(range(case.processes), draw.choice((1, 1, 2)))
    points = [*POINTS, *OF_FILES, *OF_FILES] if program == "checkpoints" else [*POINTS]
    for i, process in enumerate(victims):
        kind = draw.choices([*KINDS], [*KINDS.values()])[0]
        point = draw.choice(AGAIN if i and draw.random() < 0.7 else points)
        visit = draw.randint(1, (POINTS | OF_FILES).get(point, 1))
        if i and point in AGAIN:
            # After the first loss: the second time that it starts JAX's backend; of others the count begins then.
            visit = 1
            point += ", again"
        after = draw.choice((0, draw.randint(1, 30))) * (8 if "compil" in point else 1)
        case.faults.append(Fault(process, kind, point, visit, after))
    if program == "joins":
        case.restarts = 3
        if draw.random() < 0.5:
            point = draw.choice([*AS_IT_JOINS])
            visit, after = draw.randint(1, AS_IT_JOINS[point]), draw.choice((0, draw.randint(1, 30)))
            kind = draw.choices([*KINDS], [*KINDS.values()])[0]
            case.faults.append(Fault(victims[0], kind, point, visit, after, life=1))
    return case


class Faults:
    """The faults of this process."""

    def __init__(self, faults):
        self.waiting, self.is_again, self.alarm = list(faults), False, -1
        if any(fault.kind == "pause" for fault in self.waiting):
            # Somebody else must wake a process that sleeps. Started later, beside JAX's threads, the helper may hang.
            waits, self.alarm = os.pipe()
            subprocess.Popen(["sh", "-c", f"read line && sleep 0.8 && kill -CONT {os.getpid()}"], stdin=waits)
            os.close(waits)

    def at(self, point):
        """Let come what is due at a point."""
        for fault in list(self.waiting):
            again = fault.point.endswith(", again")
            if fault.point.removesuffix(", again") != point or (again and not self.is_again):
                continue
            fault.visit -= 1
            if not fault.visit:
                self.waiting.remove(fault)
                if fault.after:
                    threading.Timer(fault.after / 1000, self.strike, [fault]).start()
                else:
                    self.strike(fault)

    def strike(self, fault):
        """Let a fault happen."""
        me = os.getpid()
        if fault.kind == "pause":
            os.write(self.alarm, b"\n")
        say("fault", kind=fault.kind)
        if fault.kind == "delay":
            time.sleep(0.7)
        elif fault.kind.startswith("stop"):
            launcher = os.getppid()
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            for process in (launcher, *(map(int, children) if fault.kind == "stop each" else ())):
                os.kill(process, signal.SIGTERM)
        else:
            number = {"kill": "KILL", "freeze": "STOP", "pause": "STOP", "terminate": "TERM"}[fault.kind]
            os.kill(me, getattr(signal, f"SIG{number}"))

    def before(self, owner, name, point):
        """Wrap a function: a point lies before it."""
        plain = getattr(owner, name)

        def wrapped(*args, **kwargs):
            self.at(point)
            return plain(*args, **kwargs)

        setattr(owner, name, wrapped)

    def after(self, owner, name, point):
        """Wrap a function: a point lies after it."""
        plain = getattr(owner, name)

        def wrapped(*args, **kwargs):
            result = plain(*args, **kwargs)
            self.at(point)
            return result

        setattr(owner, name, wrapped)

    def put_in(self):
        """Wrap functions of synk and JAX."""
        self.before(elastic.ElasticPeers, "before_launch", "before a launch")
        self.before(elastic.ElasticPeers, "run", "inside a program")
        self.before(gang.Gang, "exchange", "before an exchange")
        self.after(gang.Gang, "exchange", "after an exchange")
        self.before(jax.stages.Lowered, "compile", "while compiling")
        for name in ("_write_arrays", "_to_disk", "_put", "_remove_old"):
            self.before(checkpoint_files, name, "between the writes of a file")
        self.before(gang.Gang, "__init__", "as it meets the launcher")
        self.before(gang.Gang, "follow", "before it follows")
        self.before(gang.Gang, "wait_to_join", "before it waits to join")
        self.before(coordinator, "connect", "before it connects")
        self.before(coordinator, "use", "after it has connected")
        for keeper in KEEPERS:
            self.before(keeper, "to_host", "as its values are copied")
        agree = elastic.ElasticPeers.agree

        def agreeing(peers, what, text):
            try:
                agree(peers, what, text)
            except synk.DisagreementError:
                say("disagrees", about=what, text=text)
                raise

        elastic.ElasticPeers.agree = agreeing
        send, renew, told = membership.Line.send, elastic.ElasticPeers.renew, elastic.ElasticPeers.from_process_0

        def sent(line, message):
            result = send(line, message)
            if "exchange" in message:
                self.at("inside an exchange")
            if "wait" in message:
                self.at("as it waits to join")
            return result

        def renewed(peers):
            self.is_again = True
            renew(peers)

        def telling(peers, what, act):
            def acting():
                self.at("before it acts for all")
                result = act()
                self.at("after it has acted for all")
                return result

            return told(peers, what, acting)

        membership.Line.send = sent
        elastic.ElasticPeers.renew, elastic.ElasticPeers.from_process_0 = renewed, telling


# One process.


def say(what, **more):
    """Print a line for the driver."""
    os.write(1, f"=> {json.dumps({'what': what, 'at': time.monotonic(), **more})}\n".encode())


def described(value):
    """Return the leaves of a value as text: their bits, and 9 digits."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    return {
        "bits": [leaf.tobytes().hex() for leaf in leaves],
        "digits": [[f"{number:.9g}" for number in leaf.ravel().tolist()] for leaf in leaves],
        "is_count": [leaf.dtype.kind in "iu" for leaf in leaves],
    }


def play(case):
    """Run the program of a case, and print its end values."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    if case.is_cached:
        jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / f"disasters-{os.getuid()}"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    faults, times = Faults([]), []
    if "SYNK_MEMBERSHIP" in os.environ:
        me, life = int(os.environ["SYNK_PROCESS_ID"]), int(os.environ["SYNK_ATTEMPT"])
        # The k-th that is started again may be started in the place of any.
        faults = Faults(fault for fault in case.faults if fault.life == life and (life or fault.process == me))
        faults.put_in()
        if any(fault.kind == "terminate" for fault in case.faults):
            elastic.TOGETHER_SECONDS = 0.02  # the programs take a third of a second
        heartbeat = SHORT_HEARTBEAT if any(fault.kind == "freeze" for fault in case.faults) else HEARTBEAT
        synk.init(distributed=True, elastic=True, heartbeat=heartbeat, start=10)

    def done():
        times.append(time.monotonic())
        faults.at("in the user's code")
        time.sleep(0.005)

    values = TEST_PROGRAMS[case.program](case, done)
    stuck = [thread for thread in threading.enumerate() if thread.name == "synk-programs"][1:]
    say("end", values={name: described(v) for name, v in values.items()}, times=times, stuck=len(stuck))
    faults.at("at its end")


# The driver.


class Forked(subprocess.Popen):
    """A process that is a fork of this one in place of a new Python. The rest is `subprocess.Popen`."""

    made, spares = (), []

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        if args[1] != __file__:  # the launcher's guard
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            return
        c2pwrite = more[6]
        if env["SYNK_ATTEMPT"] == "0":
            self.pid = os.fork()
            if self.pid == 0:
                take_over(args[2], env, c2pwrite)
        else:
            self.pid, line = self.spares.pop()
            socket.send_fds(line, [json.dumps(env).encode()], [c2pwrite])
        self._child_created = True
        os.close(c2pwrite)
        Forked.made = (*Forked.made, self)


def spare(case):
    """Fork a process that waits to be started. Later the launcher runs JAX's services, which outlive no fork."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        environment, descriptors, *_ = socket.recv_fds(there, 1 << 20, 1)
        if not environment:  # the launcher has ended
            os._exit(0)
        take_over(case, json.loads(environment), *descriptors)
    there.close()
    return pid, here


def take_over(case, environment, stdout):
    """Run a case in this fork, and end."""
    become(environment, os.open(os.devnull, os.O_RDONLY), stdout)
    end_as_python(lambda: play(case_of(case)))


def become(environment, stdin, stdout):
    """Make this fork a process of its own, with an environment and descriptors."""
    os.setsid()
    for old, new in ((stdin, 0), (stdout, 1), (stdout, 2)):
        os.dup2(old, new)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def end_as_python(main):
    """Run a function as Python runs a program, and end as it does: threads, handlers of the end, and all."""
    # The frames below are those of the process that was forked; an error must not come to them.
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    # Python's own end: threads, handlers of the end, and the interpreter.
    ctypes.pythonapi.Py_Exit(code)


def case_of(text):
    """Return a case from JSON."""
    about = json.loads(text)
    return Case(**about | {"faults": [Fault(**fault) for fault in about["faults"]]})


def launch(case):
    """Run the launcher with a case, in this fork."""
    about = json.dumps(asdict(case))
    numbers = {"-n": case.processes, "--min": case.least, "--restarts": case.restarts}
    options = ["launch", "--elastic", *(str(part) for pair in numbers.items() for part in pair), __file__, about]
    Forked.spares = [spare(about) for _ in range(case.restarts)]
    with mock.patch.object(launcher, "Popen", Forked):
        code = launcher.main(options)
    say("codes", launcher=code, codes=[process.returncode for process in Forked.made])


class Ended(Exception):
    """Raised where a run has not ended as it must."""


class Run:
    """A case that runs under the launcher."""

    def __init__(self, case):
        self.case, self.until, self.why, self.seconds = case, time.monotonic() + DEADLINE, "", []
        self.case.folder = tempfile.mkdtemp(prefix="disaster-")
        self.log = Path(self.case.folder) / "log"
        self.log.touch()
        self.pid = fork(lambda: launch(self.case), self.log)

    def has_ended(self):
        """Return whether the run has ended; then say how."""
        is_late = time.monotonic() > self.until
        if is_late:
            dump(self.pid)
        elif os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            return False
        self.output = self.log.read_text(errors="replace")
        shutil.rmtree(self.case.folder, ignore_errors=True)
        try:
            if is_late:
                raise Ended("it hangs")
            self.seconds = verdict(self.case, self.output)
        except Ended as error:
            self.why = str(error)
        return True


def runs(cases, jobs=1):
    """Run cases, so many at a time, and yield each run as it ends."""
    waiting, under_way = list(cases), []
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            under_way.append(Run(waiting.pop(0)))
        for one in list(under_way):
            if one.has_ended():
                under_way.remove(one)
                yield one
        time.sleep(0.02)


def fork(main, log):
    """Fork a process that runs a function and writes to a file."""
    pid = os.fork()
    if pid == 0:
        become(dict(os.environ), os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND))
        try:
            main()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def dump(pid):
    """Let the processes of a launcher print the stacks of their threads, and end all."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):
            os.kill(int(child), signal.SIGUSR1)
    time.sleep(1)
    for process in [*children, pid]:
        with contextlib.suppress(OSError):
            os.kill(int(process), signal.SIGKILL)
    os.waitpid(pid, 0)


_undisturbed = {}


def undisturbed(case):
    """Return the end values of the same program in one process."""
    if case.values not in _undisturbed:
        # A folder of `tempfile.TemporaryDirectory` would go with the first fork that ends.
        folder = Path(tempfile.mkdtemp(prefix="law-"))
        log = folder / "log"
        log.touch()
        alone = Case(**asdict(case) | {"folder": str(folder), "faults": [], "is_cached": False})
        os.waitpid(fork(lambda: play(alone), log), 0)
        lines = [line for line in said(log.read_text()) if line["what"] == "end"]
        assert lines, log.read_text()
        _undisturbed[case.values] = lines[0]["values"]
        shutil.rmtree(folder)
    return _undisturbed[case.values]


def said(output, process=None):
    """Return the lines that processes, or one of them, have printed for the driver."""
    begin = "=> {" if process is None else f"[{process}] => {{"
    return [json.loads(line[line.index("=> {") + 3 :]) for line in output.splitlines() if line.startswith(begin)]


def verdict(case, output):
    """Return seconds from each loss to the next finished step. Raise Ended if the run is not as it must be."""
    wanted = undisturbed(case) if case.program in PROGRAMS else {}
    codes = next((line for line in said(output) if line["what"] == "codes"), None)
    if codes is None or codes["launcher"]:
        raise Ended(f"the launcher has ended with {codes}")
    lost, ends = [], {}
    for process in range(case.processes):
        lines = {line["what"]: line for line in said(output, process)}
        losses = [line for line in said(output, process) if line.get("kind") in ("kill", "freeze", "terminate")]
        lost += losses
        if losses and "end" not in lines:
            continue
        if "end" not in lines or (codes["codes"][process] and not losses):
            raise Ended(f"process {process} has ended with {codes['codes'][process]}")
        if not losses:
            ends[process] = lines["end"]
        compare(process, wanted, lines["end"]["values"], case.blocks is not None)
    seconds = []
    for fault in lost:
        after = [min((t for t in end["times"] if t > fault["at"]), default=None) for end in ends.values()]
        if None not in after and after:
            seconds.append((fault["kind"], max(after) - fault["at"]))
    return seconds


def compare(process, wanted, got, is_exact):
    """Raise Ended if end values differ: counts and, with blocks, all bits; else numbers beyond 1e-6."""
    for name, value in wanted.items():
        for i, digits in enumerate(value["digits"]):
            has = got[name]["digits"][i]
            a, b = np.array(digits, float), np.array(has, float)
            if is_exact or value["is_count"][i]:
                is_equal = value["bits"][i] == got[name]["bits"][i]
            else:
                is_equal = np.allclose(a, b, rtol=1e-6, atol=1e-9)
            if not is_equal:
                raise Ended(f"process {process}: {name} is {has} in place of {digits}")


def told(case):
    """Describe a case."""
    faults = "; ".join(
        ("its successor" if f.life else f"{f.process}")
        + f" {f.kind} {f.point} #{f.visit}"
        + (f" +{f.after} ms" if f.after else "")
        for f in case.faults
    )
    how = f"{case.program} rows={case.rows} slices={case.slices} blocks={case.blocks}"
    return f"seed {case.seed}: {case.processes} processes, {how}{', cached' if case.is_cached else ''}: {faults}"


def main():
    """Run seeds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?")
    parser.add_argument("--seeds", help="A:B, from A to B - 1")
    parser.add_argument("--program", help="only seeds that draw this program")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--case", help="a case, as JSON, in place of a seed's")
    options = parser.parse_args()
    if options.seed or options.case:
        (one,) = runs([case_of(options.case) if options.case else drawn(int(options.seed))])
        print(one.output, told(one.case), one.why or f"ended well {one.seconds}", sep="\n")
        sys.exit(bool(one.why))
    first, end = map(int, options.seeds.split(":"))
    times, failures, fired, stuck, start = [], [], 0, 0, time.monotonic()
    cases = [case for case in map(drawn, range(first, end)) if options.program in (None, case.program)]
    for one in runs(cases, options.jobs):
        times += one.seconds
        fired += '"what": "fault"' in one.output
        stuck += sum(line.get("stuck", 0) for line in said(re.sub(r"(?m)^\[\d+\] ", "", one.output)))
        seconds = [round(pair[1], 2) for pair in one.seconds]
        print(f"{'FAILED' if one.why else 'ok'} {told(one.case)} {seconds}", flush=True)
        if one.why:
            failures.append(one.case.seed)
            print(one.why[-3000:], one.output[-6000:], sep="\n", flush=True)
    spent = time.monotonic() - start
    print(
        f"{len(cases)} seeds in {spent:.0f} s, {fired} with a fault, {stuck} threads stuck; failed: {failures or 'none'}"
    )
    for what in ("kill", "terminate", "freeze"):
        some = [s for kind, s in times if kind == what]
        if some:
            print(
                f"{what}, {len(some)} times: to the next finished step in the median "
                f"{statistics.median(some):.2f} s, at worst {max(some):.2f} s"
            )
    sys.exit(bool(failures))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        play(case_of(sys.argv[1]))
    else:
        main()
