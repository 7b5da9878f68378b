"""Disasters: programs in `synk.resume` that lose processes, launchers and disks at points which a seed draws.

`python -m tests.distributed.disasters --seeds A:B` runs seeds and prints a line for each; `-v` adds their output. Real
processes run under the real launcher, forks of it. Faults come by wrapping functions of synk. Each run ends with the
numbers of the same loops without `synk.resume` in one process, all rows counted by their numbers, or with an error that
the seed explains.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train
from synk._distributed import agreement, coordinator, liveness
from synk._saving import checkpoint, checkpoint_files, resume

from .. import harness
from ..harness import said, say

ROWS, BATCH = 40, 7
EPOCHS = 7, 4  # of the first loop and of the second
SMALL = 4 << 20  # bytes of a file system with room for some checkpoints
DEADLINE = 120  # seconds for a launch, which takes five
FROZEN = 60  # seconds more where a process freezes
LAUNCHES = 8

KINDS = {
    "kill": 40, "term": 10, "raise": 12, "exit": 10, "freeze": 3, "kill launcher": 10, "term launcher": 12, "full": 10,
    "fill": 6,
}  # fmt: skip
# Where faults come, and how often a process passes there in most programs.
PLACES = {
    "starts": 1, "meets": 1, "has met": 1, "loads": 1, "compiles": 2, "launches": 60, "steps": 40, "meets again": 9,
    "saves": 3, "finishes": 1, "ends": 1, "exits": 1, "has waited": 1,
}  # fmt: skip
# Where process 0 alone passes, and all where a run goes on.
OF_PROCESS_0 = {"locks": 1, "writes": 8, "puts": 3, "removes": 3}
GOING_ON = {"reads": 1, "sets": 1}
# Places in a thread, or behind the end of the program, where an error would be no user's.
NO_ERRORS = ("exits", "has waited")
LOOPS = "range minibatches enumerate zip list generator iterate stream function loader loader".split()
# What may be the last word of a run whose program was edited, or is shorter in one process.
WORDS = {
    "fewer": r"items are done, but now there are|batches are left out|no batch is left|start is \d+",
    "name": r"has no other and has w besides",
    "shorter": r"DisagreementError|PeerError|has ended its program",
}


@dataclass
class Fault:
    """One fault: what happens, in which processes, where, at which visit, how many ms later, and in which stage."""

    kind: str
    processes: list[int]
    place: str
    visit: int
    after: int
    stage: int


@dataclass
class Case:
    """What a seed draws. Faults of a stage wait until one of the stage before has come, and the processes start again."""

    seed: int
    sizes: list[list[int]]  # processes and devices of each launch
    trainer: str
    blocks: int | None
    loops: list[str]
    save_every: float | None
    is_small: bool  # whether the folder is a file system of its own, with room for some checkpoints
    sleep: float
    evaluates: bool
    stop_at: int | None
    edit: str | None
    helper: bool
    cache: bool
    at: str = ""
    faults: list[Fault] = field(default_factory=list)

    def program(self, is_edited):
        """Return what the end values depend on."""
        replicas = self.sizes[0][0] * self.sizes[0][1] if self.trainer == "local" else 2
        edit = self.edit if is_edited and self.edit in ("more", "fewer") else None
        return self.trainer, self.blocks, tuple(self.loops), self.evaluates, self.stop_at, edit, replicas


def drawn(seed):
    """Draw the case of a seed."""
    draw = random.Random(seed)
    chance = lambda part: draw.random() < part  # noqa: E731
    trainer = draw.choice(("plain", "step", "step", "sharded", "local"))
    size = lambda: draw.choice(([2, 1], [2, 2], [3, 1]))  # noqa: E731
    sizes = [size()] + ([size(), size()] if trainer != "local" and chance(0.6) else [])
    case = Case(
        seed, sizes, trainer, draw.choice((None, 2)) if trainer in ("plain", "step") else None,
        [draw.choice(LOOPS) for _ in range(draw.choice((1, 2, 2)))],
        draw.choice((None, 0.5, 0.2, 0.1, 0.05)), False, draw.choice((0.003, 0.01, 0.02)), chance(0.3),
        draw.choice((None, None, None, 17)), draw.choice((None,) * 15 + ("more", "fewer", "name") * 2 + ("shorter",)), chance(0.3), chance(0.9),
    )  # fmt: skip
    if case.edit == "shorter":
        case.stop_at = None
        return case
    last = None
    for stage in range(draw.choice((1, 1, 2, 2, 3))):
        if last is None or not chance(0.3):
            places = PLACES | OF_PROCESS_0 | (GOING_ON if stage else {})
            # Mostly in the loop, where there is something to go on from.
            is_any = chance(0.4)
            place = draw.choice([at for at in places if is_any or places[at] > 1 or at in GOING_ON])
            victims = draw.choice(([0], [1], [2], [0], [1], [0, 1], [0, 1, 2]))
            victims = [0] if place in (*OF_PROCESS_0, "reads") else victims
            after = draw.choice((0, 0, draw.randint(1, 30), draw.randint(1, 1000)))
            last = place, draw.randint(1, places[place]), after, victims
        place, visit, after, victims = last
        kind = draw.choices([*KINDS], [*KINDS.values()])[0]
        if kind == "raise" and (after or place in NO_ERRORS):
            kind = "kill"
        victims = [0] if kind in ("full", "fill") else victims[:1] if "launcher" in kind else victims
        case.faults.append(Fault(kind, victims, place, visit, after, stage))
        case.is_small |= kind == "fill"
    return case


# Programs.


def make(case, name):
    """Return a function of rows, the variables that it updates, and what to do with each of its results."""
    dtype = np.float32 if case.blocks else np.float64
    seen = synk.shared(np.zeros((2, ROWS), np.int32), "seen")

    def counts(n):
        return jnp.zeros(ROWS, jnp.int32).at[n].add(1)

    if case.trainer == "plain":
        w = synk.shared(np.ones(3, dtype), "w")

        @synk.function(outputs=("mean", "sum"), blocks=case.blocks)
        def fn(x, y, n):
            return (jnp.tanh(x * w.value) * y[:, None]).mean(0), counts(n)

        @fn.then
        def fn(mean, rows):
            w.value = 0.9 * w.value + mean
            return mean, rows

        variables = {name: w}
    else:

        def loss(params, x, y, n):
            return (((x @ params["a"]).mean(-1) + params["b"] - y) ** 2).mean(), counts(n)

        # Large enough to lie in shards.
        params = {"a": np.zeros((3, 2740 if case.trainer == "sharded" else 1), dtype), "b": np.zeros((), dtype)}
        if case.trainer == "local":
            trained = synk.contrib.local_steps(loss, params, optax.sgd(0.02, 0.9), aux="sum", optimizer_state=False)
        else:
            more = {"shard_params": case.trainer == "sharded", "blocks": case.blocks}
            trained = synk.train.step(loss, params, optax.adam(0.02), aux="sum", **more)
        variables = {name if key == "params" else key: v for key, v in trained.variables.items()}
        return trained, variables, seen
    return fn, variables, seen


def data(case):
    """Return rows: x, y and their numbers."""
    x = np.random.default_rng(7).normal(size=(ROWS, 3)).astype(np.float32 if case.blocks else np.float64)
    return x, np.tanh(x.sum(-1)), np.arange(ROWS)


class Loader:
    """A loader whose state is how many items it has given."""

    def __init__(self, items):
        self.items, self.taken = items, 0

    def __iter__(self):
        while self.taken < len(self.items):
            self.taken += 1
            yield self.items[self.taken - 1]


def items_of(kind, fn, rows, epochs):
    """Return what a loop of a kind goes through, what to do with an item of it, and the state of its loader or None."""
    batches = synk.minibatches(ROWS, BATCH, epochs=epochs)
    by_hand = [*batches]

    def step(batch):
        return fn(*rows, batch=batch)

    def left(done, extra):
        loader.taken = 0 if extra is None else extra["taken"]
        assert loader.taken == done, (done, extra)
        if done > len(by_hand):
            raise ValueError(f"{done} items are done, but now there are {len(by_hand)}")
        return fn.stream(loader, prefetch=0) if kind == "loader" else iter(loader)

    def state():
        return {"taken": loader.taken}

    loader = Loader([[part[batch] for part in rows] for batch in by_hand] if kind == "loader" else by_hand)
    match kind:
        case "range":
            return range(len(by_hand)), lambda i: step(by_hand[i]), None
        case "enumerate":
            return enumerate(batches), lambda item: step(by_hand[item[0]]), None
        case "zip":
            return zip(count(), batches, strict=False), lambda item: step(by_hand[item[0]]), None
        case "iterate":
            return fn.iterate(*rows, batches=batches), lambda result: result, None
        case "stream":
            return fn.stream([part[batch] for part in rows] for batch in by_hand), lambda result: result, None
        case "loader":
            return left, lambda result: result, state
        case "function":
            return left, step, state
        case _:
            of = {"minibatches": batches, "list": by_hand, "generator": (batch for batch in by_hand)}
            return of[kind], step, None


def train(case, is_edited, is_resumed, faults):
    """Run the loops of a case, and return its end values."""
    name = "other" if is_edited and case.edit == "name" else "w"
    fn, variables, seen = make(case, name)
    rows, total = data(case), synk.shared(np.zeros((), rows_dtype(case)), "total")
    everything = variables | {"seen": seen, "total": total}
    loops, error = [], synk.function(lambda x, y: ((x.sum(-1) - y) ** 2).mean(), outputs="mean")
    for number, kind in enumerate(case.loops):
        epochs, stop_at = EPOCHS[number], case.stop_at
        if number == len(case.loops) - 1 and is_edited:
            epochs += {"more": 2, "fewer": -2}.get(case.edit, 0)
        if case.edit == "shorter" and is_resumed:
            epochs -= jax.process_index() == 1
        items, body, state = items_of(kind, fn, rows, epochs)
        if is_resumed:
            folder = Path(case.at) / "saves" / f"loop-{number}"
            items = synk.resume(items, everything, folder=folder, save_every=case.save_every, extra=state)
            loops.append(items)
        elif state is not None:
            items = items(0, None)
        for i, item in enumerate(items, loops[-1].done if is_resumed else 0):
            result = body(item)
            seen.value = seen.value.at[number].add(result[1])
            if case.evaluates and i % 10 == 9:
                total.value = total.value + i * error.over(*rows[:2], batches=synk.minibatches(ROWS, 11))
            if is_resumed:
                log(case, number, i)
                faults.at("steps")
                time.sleep(case.sleep)
            if i == stop_at:
                break
        if case.trainer == "local":
            fn.finish()
    kept = ("seen", "total", name) if case.trainer == "local" else everything
    return {"w" if key == name else key: everything[key].value for key in kept}


def rows_dtype(case):
    """Return the dtype of a program's numbers."""
    return np.float32 if case.blocks else np.float64


def log(case, loop, item):
    """Note an item, as programs do: in process 0."""
    if jax.process_index() == 0 and all(fault.kind != "full" for fault in case.faults):
        with open(Path(case.at) / "log", "a") as file:
            file.write(f"{loop} {item} {os.environ['SYNK_PROCESS_ID']}\n")


# Faults.


class Faults:
    """The faults of this process; each comes once in a run."""

    def __init__(self, case):
        self.folder, self.visits = Path(case.at) / "fired", Counter()
        stages = {int(path.name.split("-")[0]) for path in self.folder.iterdir()}
        me, n = int(os.environ["SYNK_PROCESS_ID"]), int(os.environ["SYNK_NUM_PROCESSES"])
        self.junk = Path(case.at) / "saves" / "junk"
        # A process that has filled the disk may have died.
        if me == 0:
            self.junk.unlink(missing_ok=True)
        due = [f for f in case.faults if not f.stage or f.stage - 1 in stages]
        self.due = [f for f in due if me in [victim % n for victim in f.processes]]

    def at(self, place):
        """Let come what is due at a place."""
        self.visits[place] += 1
        for fault in self.due:
            if (fault.place, fault.visit) == (place, self.visits[place]):
                if fault.after:
                    timer = threading.Timer(fault.after / 1000, self.strike, [fault])
                    timer.daemon = True
                    timer.start()
                else:
                    self.strike(fault)

    def strike(self, fault):
        """Let a fault happen."""
        me = os.environ["SYNK_PROCESS_ID"]
        with contextlib.suppress(FileExistsError), open(self.folder / f"{fault.stage}-{me}-{fault.kind}", "x") as file:
            file.write(os.environ["DISASTER_LAUNCH"])
            file.close()
            say("fault", kind=fault.kind, place=fault.place)
            self.make(fault)

    def make(self, fault):
        """Let a fault happen now."""
        match fault.kind:
            case "raise":
                raise RuntimeError("a disaster")
            case "exit":
                os._exit(3)
            case "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
                back = resource.RLIM_INFINITY, resource.RLIM_INFINITY
                threading.Timer(0.6, resource.setrlimit, [resource.RLIMIT_FSIZE, back]).start()
            case "fill":
                fill(self.junk)
                threading.Timer(0.6, self.junk.unlink, [True]).start()
            case _:
                number = {"kill": "KILL", "freeze": "STOP", "term": "TERM"}[fault.kind.split()[0]]
                os.kill(os.getppid() if "launcher" in fault.kind else os.getpid(), getattr(signal, f"SIG{number}"))

    def put_in(self):
        """Wrap functions of synk and JAX: a place lies before each, or behind it."""
        for owner, name, place, *behind in (
            (coordinator, "initialize", "meets", "has met"),
            (resume.Resumed, "load", "loads"),
            (checkpoint_files, "_read_whole", "reads"),
            (checkpoint, "commit_all", "sets"),
            (jax.stages.Lowered, "compile", "compiles"),
            (agreement.JaxPeers, "before_launch", "launches"),
            (resume, "FolderLock", "locks"),
            (resume.Resumed, "_meet", "meets again"),
            (resume.Resumed, "_save", "saves"),
            (checkpoint_files, "_write_arrays", "writes"),
            (checkpoint_files, "_to_disk", "writes"),
            (checkpoint_files, "_put", "puts"),
            (checkpoint_files, "_remove_old", "removes"),
            (resume.Resumed, "_finish", "finishes"),
            (liveness, "_wait_until_all_end", "exits", "has waited"),
        ):
            self.wrap(owner, name, place, *behind)

    def wrap(self, owner, name, place, behind=None):
        """Wrap a function."""
        plain = getattr(owner, name)

        def wrapped(*args, **kwargs):
            self.at(place)
            result = plain(*args, **kwargs)
            self.at(behind)
            return result

        setattr(owner, name, wrapped)


def fill(junk):
    """Fill a small file system."""
    if shutil.disk_usage(junk.parent).total == SMALL:
        with contextlib.suppress(OSError), open(junk, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


# One process.


def play(case, is_resumed=True):
    """Run the program of a case, and print its end values."""
    jax.config.update("jax_enable_x64", True)
    is_edited, faults = case.edit is not None, None
    if not is_resumed:
        synk.init(cache=os.environ["DISASTER_CACHE"])
    else:
        is_edited = os.environ["SYNK_ATTEMPT"] != "0" or os.environ["DISASTER_LAUNCH"] != "0"
        helper = [subprocess.Popen(["sleep", "600"]).pid] if case.helper else []
        say("start", pids=[os.getpid(), *helper])
        faults = Faults(case)
        faults.put_in()
        faults.at("starts")
        has_frozen = any(fault.kind == "freeze" for fault in case.faults)
        synk.init(
            distributed=True, heartbeat=10 if has_frozen else 40, start=20,
            cache=os.environ["DISASTER_CACHE"] if case.cache else None,
        )  # fmt: skip
    values = train(case, is_edited, is_resumed, faults)
    arrays = {key: [*map(np.asarray, jax.tree.leaves(value))] for key, value in values.items()}
    # A line holds some numbers of a large leaf, among them one of each replica.
    leaves = {
        key: [(leaf if leaf.size < 1000 else leaf[..., ::1000]).tolist() for leaf in each]
        for key, each in arrays.items()
    }
    say("end", values=leaves, is_edited=is_edited)
    if faults is not None:
        faults.at("ends")


# The driver.


def case_of(text):
    """Return a case from JSON."""
    about = json.loads(text)
    return Case(**about | {"faults": [Fault(**fault) for fault in about["faults"]]})


def play_text(text, is_resumed="yes"):
    """Run the program of a case from JSON."""
    play(case_of(text), is_resumed == "yes")


def text_of(case):
    """Return JSON from a case."""
    return json.dumps(asdict(case))


def options_of(case, number):
    """Return the launcher's options."""
    n, devices = case.sizes[min(number, len(case.sizes) - 1)]
    # An edited program may end in words each time.
    restarts = {None: 6, "more": 6, "shorter": 1}.get(case.edit, len(case.faults) + 1)
    return "-n", n, "--devices-per-process", devices, "--restarts", restarts


class Wrong(Exception):
    """Raised where a run has not gone as it must."""


def run(case):
    """Run a case. Raise Wrong."""
    at, saves = Path(case.at), Path(case.at) / "saves"
    for folder in (at / "fired", saves):
        folder.mkdir()
    is_small = case.is_small and os.geteuid() == 0
    if is_small:
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(saves)]
        is_small = subprocess.run(mounting, stderr=subprocess.DEVNULL).returncode == 0
    try:
        for number in range(LAUNCHES):
            code = one_launch(case, number)
            output = (at / f"launch-{number}").read_text(errors="replace")
            if code == 0:
                break
            fired = {path.name.split("-")[2] for path in (at / "fired").iterdir() if path.read_text() == str(number)}
            expected = {-signal.SIGKILL: {"kill launcher"}, 143: {"term", "term launcher"}}.get(code, set())
            # A process may also fail while all stop.
            if not fired & expected and not ("term launcher" in fired and len(fired) > 1):
                if case.edit in WORDS and re.search(WORDS[case.edit], output):
                    return
                raise Wrong(f"the launcher has ended with {code}")
        else:
            raise Wrong(f"not at its end after {LAUNCHES} launches")
        if case.edit == "shorter":
            raise Wrong("nobody has noticed a shorter loop")
        compare(case, output)
        check_files(case)
    finally:
        if is_small:
            subprocess.run(["umount", "-l", str(saves)], check=True)


def one_launch(case, number):
    """Launch once, wait for the end, and return its code. Nothing may be left of it."""
    log, deadline = Path(case.at) / f"launch-{number}", DEADLINE + FROZEN * any(f.kind == "freeze" for f in case.faults)
    with harness.Launcher(
        case.at, *options_of(case, number), *harness.of_forks(play_text), text_of(case), log=log,
        program=harness.launch_forks, DISASTER_LAUNCH=str(number), DISASTER_CACHE=os.environ["DISASTER_CACHE"],
    ) as launcher:  # fmt: skip
        try:
            (ended,) = launcher.wait(deadline)
        except AssertionError as error:
            pids = living(log)
            end(pids)
            raise Wrong(f"launch {number} hangs, with processes {pids}") from error
    # Behind a launcher that was killed the guard needs a moment.
    until = time.monotonic() + 5
    while pids := living(log):
        if time.monotonic() > until:
            end(pids)
            raise Wrong(f"launch {number} has left processes {pids}")
        time.sleep(0.02)
    return ended.code


def living(log):
    """Return the processes that have started there and are alive."""
    pids = [pid for line in said(log.read_text(errors="replace"), "start") for pid in line["pids"]]
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid):
    """Check whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end(pids):
    """Let processes print the stacks of their threads, and end them."""
    for number, seconds in ((signal.SIGUSR1, 1.0), (signal.SIGKILL, 0)):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        time.sleep(seconds)


_undisturbed = {}


def undisturbed(case, is_edited):
    """Return the end values of the same loops in one process, without `synk.resume`."""
    program = case.program(is_edited)
    if program not in _undisturbed:
        alone = Case(**vars(case) | {"edit": program[-2], "faults": []})
        options = {"processes": 1, "devices": program[-1], "DISASTER_CACHE": os.environ["DISASTER_CACHE"]}
        (ended,) = harness.run(play_text, text_of(alone), "no", **options)
        _undisturbed[program] = said(ended.output, "end")[0]["values"]
    return _undisturbed[program]


def compare(case, output):
    """Raise Wrong if end values differ: counts and, with blocks, all bits; else numbers beyond 1e-6."""
    ends = said(output, "end")
    if not ends:
        raise Wrong("no process has come to its end")
    wanted = [undisturbed(case, ends[0]["is_edited"])]
    # Where items are asked for and dropped, or made by a function, nobody asks for more of a loop that has ended.
    if case.edit == "more" and case.loops[-1] in ("generator", "function", "loader"):
        wanted.append(undisturbed(case, False))
    for line in ends:
        differences = [difference(case, one, line["values"]) for one in wanted]
        if all(differences):
            raise Wrong(differences[0])


def difference(case, wanted, got):
    """Return the first difference between end values; None if there is none."""
    for name, leaves in wanted.items():
        for a, b in zip(leaves, got[name], strict=True):
            is_exact = case.blocks is not None or name == "seen"
            if a != b if is_exact else not np.allclose(a, b, rtol=1e-6, atol=1e-9):
                return f"{name} is {b} in place of {a}"
    return None


def check_files(case):
    """Raise Wrong if a checkpoint is half, or lines of the log are missing or another process's."""
    for path in Path(case.at).glob("saves/loop-*/*step-*"):
        if path.name.startswith("step-"):
            checkpoint_files._read_whole(path)[1].close()
    if all(fault.kind != "full" for fault in case.faults):
        lines = (Path(case.at) / "log").read_text().splitlines()
        noted = {tuple(map(int, line.split())) for line in lines}
        for number in range(len(case.loops)):
            items = sorted(item for loop, item, _ in noted if loop == number)
            if items != [*range(len(items))] or {rank for *_, rank in noted} != {0}:
                raise Wrong(f"the log of loop {number} has items {items}")


def outcome(case):
    """Run a case. Return it, what is wrong, which faults have come, and its output."""
    in_memory, why = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None, None
    with tempfile.TemporaryDirectory(
        prefix=f"disaster-{case.seed}-", dir=in_memory, ignore_cleanup_errors=True
    ) as case.at:
        try:
            run(case)
        except (Wrong, synk.errors.CheckpointError) as error:
            why = str(error)
        except Exception:
            why = traceback.format_exc()
        logs = sorted(Path(case.at).glob("launch-*"))
        output = "".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in logs)
        return case, why, sorted(path.name for path in (Path(case.at) / "fired").iterdir()), output


def told(case):
    """Describe a case."""
    faults = "; ".join(
        f"{f.kind} {','.join(map(str, f.processes))} {f.place} #{f.visit}" + f" +{f.after} ms" * bool(f.after)
        for f in case.faults
    )
    sizes = " ".join(f"{n}x{devices}" for n, devices in case.sizes)
    saves = f"each {case.save_every} s" if case.save_every else "at the end"
    more = [f"blocks={case.blocks}"] * bool(case.blocks) + [f"until {case.stop_at}"] * bool(case.stop_at)
    more += [word for word in ("evaluates", "helper") if getattr(case, word)] + [case.edit] * bool(case.edit)
    return f"seed {case.seed}: {sizes}, {case.trainer} {'+'.join(case.loops)} {' '.join(more)}, saves {saves}: {faults}"


def main():
    """Run seeds of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:60", help="A:B, from A to B - 1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    failures, fired, start = [], Counter(), time.monotonic()
    cache = os.environ.setdefault("DISASTER_CACHE", tempfile.mkdtemp(prefix="disasters-"))
    pool = ThreadPoolExecutor(options.jobs)  # which waits
    for ended in as_completed(pool.submit(outcome, drawn(seed)) for seed in range(first, last)):
        case, why, names, output = ended.result()
        kinds = [name.split("-")[2] for name in names]
        fired.update(kinds)
        attempts, launches = output.count('"start"'), output.count("--- launch-")
        how = f"{', '.join(kinds)} in {launches} launches, {attempts} starts, {time.monotonic() - start:.0f} s"
        print(f"{'FAILED' if why else 'ok'} {told(case)}: {how}", flush=True)
        if why:
            failures.append(case.seed)
            print(why[-3000:], flush=True)
        if why or options.verbose:
            print(output[-20000:], flush=True)
    shutil.rmtree(cache)
    spent = time.monotonic() - start
    print(f"{last - first} seeds in {spent:.0f} s; faults: {dict(fired)}; failed: {failures or 'none'}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    # Other processes find functions by the name of their module.
    importlib.import_module("tests.distributed.disasters").main()
