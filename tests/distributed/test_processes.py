"""Groups over several processes: the law, the same bits, disagreement, failure, and the launcher."""

import contextlib
import fcntl
import os
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._command.launcher import reserve_port
from synk._distributed import preemption
from synk._distributed.liveness import EXIT_PEER_FAILED

from .. import harness
from ..harness import said
from ..helpers import group_of, smoke
from . import programs
from .disagreements import DISAGREEMENTS, disagree
from .law import CASES
from .law import law as law_of_a_process

pytestmark = pytest.mark.gang

SPLITS = ("2x2", "4x1", "2x1", "1x2", "1x4")  # processes x devices: each process compiles everything
SHORT = ("then", "checkpoint", "first_values", "errors")  # cases of the one short gang
COMPARED = ("coupled", "bits", "slices", "data", "then", "collectives", "keys", "halves", "pmap")
LAW_CASES = []  # of the first gang; none means all
LATE = 15  # seconds that nothing outlives a failure, with a heartbeat of 10


class Once:
    """Gangs that several tests share. A gang runs once, when a test asks for it or ahead of that."""

    pool = ThreadPoolExecutor(3)  # many of their seconds gangs wait

    def __init__(self, run):
        self.run, self.ends = run, {}

    def start(self, *what):
        if what not in self.ends:
            self.ends[what] = self.pool.submit(self.run, *what)

    def __call__(self, *what):
        self.start(*what)
        return self.ends[what].result()


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Run these tests once at a time on a machine: with other gangs on the cores, heartbeats come too late."""
    with open(Path(gettempdir()) / f"synk-gangs-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module", autouse=True)
def ahead(request, alone):
    """Start the gangs ahead if many tests are to run: first those that wait for the heartbeat, then the longest."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [(i.originalname, *(i.callspec.params.values() if hasattr(i, "callspec") else ())) for i in items]
    if "test_gangs_end_well" not in {name for name, *_ in asked}:  # which asks for all
        LAW_CASES[:] = [what[1] for what in asked if what[0] == "test_law"]
    if not {"test_law", "test_disagreement", "test_failure"} <= {name for name, *_ in asked}:
        return
    failures = [case for case in FAILURES if ("test_failure", *case) in asked]
    for case in failures[:2]:
        failed.start(*case)
    if ("test_restarts_end_with_the_same_bits",) in asked:
        restarted.start()
    for split in SPLITS:
        if ("test_gangs_end_well", split) in asked:
            law.start(split)
    for what in DISAGREEMENTS:
        if ("test_disagreement", what) in asked:
            disagreed.start(what)
    for case in failures[2:]:
        failed.start(*case)


# The law.


@Once
def law(split):
    """Run the law. Two processes with two devices run all cases of this session, other gangs those that are compared."""
    processes, devices = map(int, split.split("x"))
    folder = mkdtemp(prefix="law-")
    names = LAW_CASES if split == "2x2" else COMPARED
    ends = harness.run(law_of_a_process, folder, *names, processes=processes, devices=devices, deadline=600)
    return folder, ends, [{line["what"]: line for line in said(end.output)} for end in ends]


@Once
def short_law():
    """Run a few cases of the law."""
    return harness.run(law_of_a_process, mkdtemp(prefix="law-"), *SHORT, deadline=300)


@pytest.mark.smoke
def test_a_short_gang():
    """Every process gives the serial answer for a step, a checkpoint and errors that all raise, and ends well."""
    for end in short_law():
        lines = {line["what"]: line for line in said(end.output)}
        assert end.code == 0 and {*SHORT, "end"} <= lines.keys(), end.output
        assert not any("error" in line for line in lines.values()), end.output


@pytest.mark.parametrize("name", CASES)
def test_law(name):
    """In every process the parallel answer is the serial one."""
    _, ends, lines = law("2x2")
    for rank, line in enumerate(lines):
        assert name in line, f"process {rank} did not come so far:\n{ends[rank].output[-4000:]}"
        assert "error" not in line[name], f"process {rank}:\n{line[name]['error']}"


@pytest.mark.parametrize("split", SPLITS)
def test_gangs_end_well(split):
    """Every process comes to its end."""
    _, ends, lines = law(split)
    assert [end.code for end in ends] == [0] * len(ends)
    assert all("end" in line and not any("error" in one for one in line.values()) for line in lines)


def noted(split, name, rank=0):
    """Return the values that a process noted in a case."""
    with np.load(Path(law(split)[0]) / f"{name}.{rank}.npz") as kept:
        return dict(kept)


@pytest.mark.parametrize("name", COMPARED)
def test_every_process_has_the_same(name):
    """Results are readable in every process, the same bits in all."""
    np.testing.assert_equal(noted("2x2", name, 1), noted("2x2", name))


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize(("one", "other"), [("1x2", "2x1"), ("2x2", "4x1")])
def test_bits(one, other, name):
    """Two replicas give the same bits in one process and in two, four in two processes and in four."""
    assert noted(one, name).keys() == noted(other, name).keys() != set()
    np.testing.assert_equal(noted(one, name), noted(other, name))


@pytest.mark.parametrize("name", COMPARED)
def test_rounding(name):
    """Four replicas in one process: the processes add in another order, so to rounding."""
    here, there = noted("1x4", name), noted("2x2", name)
    assert here.keys() == there.keys()
    for key, value in here.items():
        if value.dtype != np.uint16:  # the bits of 16-bit floats
            np.testing.assert_allclose(value, there[key], rtol=1e-5, atol=1e-5)


# Disagreement.

SIDES = {
    "op": ["process 0: h(float32[12, 3]) [", "process 1: h(float32[12, 3]) [", "differ in what they compute"],
    "constant": ["process 0: h(float32[12, 3]) [", "process 1: h(float32[12, 3]) [", "differ in what they compute"],
    "order": ["process 0: g(float32[12, 3])", "process 1: f(float32[12, 3])"],
    "known_order": ["process 0: the arguments of g", "process 1: the arguments of f"],
    "dtype": ["process 0: f(float32[12, 3])", "process 1: f(int32[12, 3])"],
    "rows": ["process 0: f(float32[12, 3])", "process 1: f(float32[6, 3])"],
    "uneven_rows": ["process 0: f(float32[12, 3])", "process 1: f(float32[12, 3], int32["],
    "known_rows": ["differ in the arguments of f", "process 0: float32[12, 3]", "process 1: float32[6, 3]"],
    "shape_of_variable": ["differ in the value of w", "process 0: float32[3]", "process 1: float32[4]"],
    "collective": ["process 0: ", "process 1: ", "the value of w"],
    "new_beside_known": ["process 0: g(float32[12, 3])", "process 1 has gone on with: f(float32[12, 3])"],
    "fewer_calls": ["process 1: g(float32[12, 3])", "process 0 has gone on with: f(float32[12, 3])"],
    "local_rows": ["process 0: ", "(int32[2, 2])", "process 1: f(float32[12, 3])"],
    "read_alone": ["process 1: a read of own", "process 0"],
    "local_function": ["process 0: f(synk.local rows of float32[3]), num_slices=1", "process 1: g(synk.local rows of "],
    "local_dtype": ["process 0: f(synk.local rows of float32[3])", "process 1: f(synk.local rows of int32[3])"],
    "local_slices": ["num_slices=1; process 1: f(synk.local rows of float32[3]), num_slices=2"],
    "local_items": ["item 2 of a loop; process 1: ", "item 0 of a loop"],
    "save": ["process 0: ", "process 1 has gone on with: f(float32[12, 3])"],
}


BRIEF = ["order", "initial_values"]


@Once
def disagreed(what):
    """Run a case of disagreement, and return how both processes end."""
    environment = {"SYNK_CHECK": "1"} if what.startswith("known") else {}
    return harness.run(disagree, what, deadline=60, **environment)


@pytest.mark.parametrize("what", [smoke(w) if w in BRIEF else w for w in DISAGREEMENTS])
def test_disagreement(what):
    """Both processes raise DisagreementError with both sides, or print it in a program that cannot end, and leave."""
    for rank, end in enumerate(disagreed(what)):
        is_ignored = what == "exchange_caught" and rank == 1  # so JAX's runtime ends it, once process 0 is gone
        assert (end.code == 1 or is_ignored) and end.code and end.seconds < 15, end.output
        told = next((f"{line['kind']}: {line['message']}" for line in said(end.output) if line["what"] == "raised"), "")
        message = told or end.output.rpartition("synk.errors.DisagreementError: ")[2]
        assert told.startswith("DisagreementError: ") or not told
        assert all(side in message for side in SIDES.get(what, ["process 0", "process 1"])), end.output


def test_checkpoints_of_gangs(n=4):
    """A checkpoint of several processes loads into as many replicas of one process, unequal values too."""
    with group_of("devices", n):
        w = synk.shared({"a": np.float32(0), "b": np.zeros(4, jnp.bfloat16)})
        k, own = synk.shared(jax.random.key(0)), synk.shared(np.zeros(2, np.int8))
        rows = synk.shared(np.zeros((1, 2), np.float32))
        kept = synk.load(Path(law("2x2")[0]) / "saved", {"w": w, "k": k, "own": own, "rows": rows})
        assert kept == (1, {"n": n})
        assert w.value["a"] == 3 and synk.contrib.synkhronos.get_lengths(rows) == [3, *[2] * (n - 1)]
        assert [int(own.get_value(rank)[0]) for rank in range(n)] == list(range(1, n + 1))


# Failure.

FAILURES = [  # those that wait for the heartbeat go first
    ("stop", 1), ("stop", 0), ("raise without hook", 1), ("hang", 1), ("kill", 2), ("kill", 0), ("raise", 2),
    ("raise", 0), ("exit", 1), ("exit", 0), ("leave", 1), ("leave", 0), ("interrupt", 1),
]  # fmt: skip


QUICK = [("kill", 2), ("raise", 0)]


@Once
def failed(mode, who):
    """Let a process fail. Return the output of each process that is not frozen, and its seconds from failure to end."""
    processes = 3 if mode == "stop" or who == 2 else 2
    with harness.Gang(programs.fail, mode, who, processes=processes) as some:
        began = time.time()
        frozen = [who] if mode == "stop" else []
        ends = some.wait(60, besides=frozen)
        at = next(line["time"] for line in said(some.output(who)) if line["what"] == "fails")
    ranks = [rank for rank in range(processes) if rank not in frozen]
    return {rank: (end, began + end.seconds - at) for rank, end in zip(ranks, ends, strict=True)}


@pytest.mark.parametrize(("mode", "who"), [smoke(*f) if f in QUICK else f for f in FAILURES], ids=str)
def test_failure(mode, who):
    """The end of one process ends all, in time and with a failure."""
    for rank, (end, seconds) in failed(mode, who).items():
        assert seconds < LATE
        assert end.code != 0, f"process {rank}:\n{end.output}"
        if rank != who and mode in ("raise", "exit", "leave"):
            assert end.code == EXIT_PEER_FAILED
        if rank == who and mode != "raise without hook":
            assert end.code == {"interrupt": 130, "kill": -9}.get(mode, 1)


@pytest.mark.parametrize("how", ["local", "nan", "check", "replicas", "save"])
def test_calls_that_wait_say_why(how, tmp_path):
    """PeerError names the dead process, whatever call waits for it. Some processes end where they wait."""
    dies, why = (0, "KeyboardInterrupt") if how == "save" else (1, "process 1: RuntimeError: a bug of the user's")
    with harness.Gang(programs.wait_for_a_dead_one, how, tmp_path, devices=2) as some:
        ends = some.wait(60)
    other = ends[1 - dies].output
    assert {line["kind"] for line in said(other) if line["what"] == "raised"} <= {"PeerError"}
    assert "PeerError" in other and why in other
    assert ends[1 - dies].code == EXIT_PEER_FAILED and ends[dies].code == (130 if how == "save" else 1)


@pytest.mark.parametrize(
    ("mode", "who", "text"),
    [
        ("kill", 2, "another process of the group is gone"),
        ("raise", 2, "process 2: RuntimeError: a bug of the user's"),
        ("raise", 0, "process 0: RuntimeError: a bug of the user's"),
        ("exit", 1, "process 1: it has ended its program"),
        ("exit", 0, "process 0: it has ended its program"),
        ("leave", 1, "process 1: it has ended its program"),
    ],
)
def test_the_others_say_why(mode, who, text):
    """The other processes raise PeerError, or print it while they hang in a program with process 0."""
    for rank, (end, _) in failed(mode, who).items():
        if rank != who:
            told = [line for line in said(end.output) if line["what"] == "raised"]
            assert [line["kind"] for line in told] == ["PeerError"] * len(told)
            assert told or who == 0
            assert f"PeerError: {text}" in end.output.replace("another process of the group has failed. ", ""), (
                end.output
            )


@pytest.mark.parametrize("when", [smoke("known"), "new"])
def test_a_program_that_dies_in_one_process(when):
    """All processes raise, before the next program meets sums of the one that died."""
    for rank, end in enumerate(harness.run(programs.callbacks, when, deadline=60)):
        lines = [line for line in said(end.output) if line["what"] in ("found", "raised")]
        assert [line["what"] for line in lines] == ["raised"] * 4, end.output
        first, *others = lines
        assert ("cannot write the log" if rank else "process 1: noted") in first["message"]
        assert all(line["kind"] == "PeerError" and "process 1: noted" in line["message"] for line in others)
        assert end.code == EXIT_PEER_FAILED


@pytest.mark.parametrize("who", ["0", "1", "saves"])
def test_who_works_on_is_waited_for(who, tmp_path):
    """Processes that have ended wait for one that is alive, however long. A checkpoint on its way is whole."""
    for end in harness.run(programs.works_on, who, tmp_path / "saved", deadline=60):
        assert end.code == 0, end.output
        assert [line["what"] for line in said(end.output)] == ["done"]
    if who == "saves":
        assert (tmp_path / "saved" / "step-00000001").is_dir()


def test_forked_helpers_end():
    """Forked helpers end like those of any program."""
    for end in harness.run(programs.forks, deadline=60):
        assert end.code == 0, end.output


def test_a_helper_does_not_join(monkeypatch):
    """A helper that imports the program again is told where the call belongs."""
    monkeypatch.setenv("SYNK_JOINED", "127.0.0.1:4 1 1")
    with pytest.raises(synk.SynkError, match=r"process 1 has joined already, .* `if __name__ == \"__main__\":`"):
        synk.init(distributed=True, coordinator="127.0.0.1:4", num_processes=2, process_id=1)


def test_the_watchdog_shows_where():
    """A process that is alive but stuck is ended with the stacks of its threads."""
    shown = failed("hang", 1)[1][0].output
    assert "most recent call first" in shown and "hang_here" in shown


@pytest.mark.smoke
def test_a_group_without_peers_waits_for_nobody():
    """Before its first collective runs: so one GPU compiles and places for others that JAX makes up (bench/gpu_parts.py)."""
    with harness.Gang(programs.without_peers) as running:
        running.await_line('"what": "done"')
        (done,) = said(running.output())
    assert "of 2 processes" in done["group"]
    assert (done["collectives"], done["value"]) == (1, [0, 1, 2])


def test_preemption():
    """After a SIGTERM to one process all stop at the same step, and end well."""
    with harness.Gang(programs.preempt, processes=3) as three:
        three.await_line('"goes"', rank=1)
        three.signal(1, signal.SIGTERM)
        ends = three.wait(30)
    assert [end.code for end in ends] == [0, 0, 0]
    stops = [line for end in ends for line in said(end.output) if line["what"] == "stops"]
    assert len(stops) == 3 and len({line["step"] for line in stops}) == 1
    assert all(line["stays"] == [True] * 3 for line in stops)


def test_preemption_asked_now_and_then(monkeypatch):
    """JAX says yes to one number alone, so synk counts questions, and asks about a step once."""
    asked = []
    monkeypatch.setattr(preemption, "_answer", (None, False))
    monkeypatch.setattr(preemption, "_is_told", False)
    monkeypatch.setattr(preemption, "_questions", 0)
    monkeypatch.setattr(preemption.coordinator, "is_running", lambda: True)
    reached = "jax.experimental.multihost_utils.reached_preemption_sync_point"
    monkeypatch.setattr(reached, lambda number: asked.append(number) or number == 3)
    assert [synk.preempted(step) for step in (1000, 1010, 1010, 1020, 1020, 1030)] == [False] * 3 + [True] * 3
    assert asked == [1, 2, 3]


def test_a_loop_goes_on_over_processes(tmp_path):
    """All save at one item, whatever their clocks say, and go on from it in another number of processes."""
    first = harness.run(programs.goes_on, tmp_path, "breaks", processes=3)
    assert [end.code for end in first] == [0] * 3, first
    saved = said(first[0].output)[-1]["saved"]
    assert len(saved) >= 2 and [said(end.output)[-1]["done"] for end in first] == [23] * 3
    ends = harness.run(programs.goes_on, tmp_path, processes=2)
    lines = [said(end.output) for end in ends]
    assert [(start["done"], end["done"], end["counts"]) for start, end in lines] == [(saved[-1], 60, [20] * 7)] * 2


def test_lists_of_calls_over_processes(tmp_path):
    """They have the bits of single calls in the same gang, and go on from a save between two lists in another one."""
    first = harness.run(programs.in_lists, tmp_path, 4, processes=3)
    assert [end.code for end in first] == [0] * 3, first
    # 7 batches of 7 rows and one of 1 an epoch; the list that is broken off is not done.
    lines = [said(end.output)[-1] for end in first]
    assert [(line["done"], line["sizes"], line["w"]) for line in lines] == [(16, [4] * 5, lines[0]["w"])] * 3
    ends = harness.run(programs.in_lists, tmp_path, processes=2, devices=2)
    assert [end.code for end in ends] == [0] * 2, ends
    (start, end), (also, same) = [said(end.output) for end in ends]
    assert start["done"] == also["done"] and start["done"] in (4, 8, 12, 16)
    assert (end["done"], end["w"]) == (24, same["w"])


def test_measured_calls_name_the_slowest_process():
    """Each process tells where its own time goes, the one that is waited for is named, and clocks need not agree."""
    ends = harness.run(programs.measures, processes=2, devices=2)
    assert [end.code for end in ends] == [0] * 2, ends
    (device, python), (late_device, late_python) = [said(end.output) for end in ends]
    for line in (device, python, late_device, late_python):
        assert sum(line["spent"].values()) == pytest.approx(line["seconds"], rel=0.03)
        assert " of process 1: " in line["slowest"]
    waiting, computing, before = "waiting for other devices", "computing", "Python before a launch"
    assert device["slowest"] == late_device["slowest"] and device["slowest"].startswith("device 3 ")
    assert device["spent"][waiting] > 0.03 > device["spent"][computing]
    assert late_device["spent"][computing] > 0.02
    assert python["spent"][waiting] > 0.03 > python["spent"][before]
    assert late_python["spent"][before] > 0.03 > late_python["spent"][waiting]


@pytest.mark.parametrize("how", ["stopped", "stopped, after process 0 alone"])
def test_a_loop_that_is_told_to_stop(tmp_path, how):
    """After a SIGTERM to one process all save at one item, end with 143, and go on, whatever one has resumed before."""
    first = harness.run(programs.goes_on, tmp_path, how, 900, processes=2)
    assert [end.code for end in first] == [143] * 2, first
    ends = harness.run(programs.goes_on, tmp_path, "", 900, processes=2, devices=2)
    (start, end), _ = [said(end.output) for end in ends]
    assert 23 < start["done"] < 900 and (end["done"], end["counts"]) == (900, [300] * 7)


@pytest.mark.parametrize("how", ["shorter", "breaks alone"])
def test_a_loop_that_ends_alone(tmp_path, how):
    """All processes end soon, in words: by an error of synk's, or by JAX's runtime, if it is the first to notice."""
    for end in harness.run(programs.goes_on, tmp_path, how, processes=2, deadline=60):
        said_so = "DisagreementError|PeerError|has ended its program|service detected fatal errors"
        assert end.code in (1, 75, -signal.SIGABRT) and re.search(said_so, end.output), end


def test_saves_need_no_thread_but_the_one_that_writes(tmp_path):
    """And what processes tell each other at meetings does not pile up."""
    for rank, end in enumerate(harness.run(programs.saves_often, tmp_path, processes=2)):
        assert end.code == 0 and said(end.output)[0]["w"] == 200 and said(end.output)[0]["left"] < 20, end
        ours = [name for name in said(end.output)[0]["threads"] if name.startswith("synk")]
        assert ours == ["synk-heartbeat", "synk-save"][: 2 - rank]


def test_two_runs_in_one_folder(tmp_path):
    """All processes of the second end with an error that names the first: their own, or that of the other one."""
    with group_of("simulated", 2):
        first = synk.resume(range(3), {"w": synk.shared(0.0)}, folder=tmp_path)
        for end in harness.run(programs.goes_on, tmp_path, processes=2, deadline=60):
            named = f"another run saves in {tmp_path}: process {os.getpid()} on" in end.output
            assert end.code in (1, EXIT_PEER_FAILED) and named, end
        next(first)


@pytest.mark.parametrize("program", ["ends", "leaves_a_loop"])
def test_the_end_comes_after_its_own_threads(tmp_path, program):
    """Python waits for a thread that is inside the runtime, which would abort the process."""
    ends = harness.run(getattr(programs, program), *[tmp_path] * (program != "ends"), processes=2)
    assert [(end.code, "FATAL" in end.output) for end in ends] == [(0, False)] * 2


# The launcher.

ATTEMPTS = [("kill", 1, "was ended by SIGKILL"), ("kill", 0, "was ended by SIGKILL"), ("raise", 1, "exited with 1"),
            ("raise", 0, "exited with 1"), ("stop", 1, "was stuck")]  # fmt: skip


@Once
def restarted():
    """Run a training that fails in a new way at each attempt, and return how its launcher ends."""
    folder = Path(mkdtemp(prefix="restarts-"))
    failures = [f"{mode}:{who}" for mode, who, _ in ATTEMPTS]
    options = ["-n", 2, "--devices-per-process", 1, "--restarts", len(failures)]
    train = harness.of_forks(programs.train)
    with harness.Launcher(folder, *options, *train, folder / "saved", *failures, program=harness.launch_forks) as two:
        return two.wait(150)[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the last line of the same run without failures, on two devices of one process."""
    end = harness.run(programs.train, tmp_path_factory.mktemp("undisturbed"), processes=1, devices=2)[0]
    assert end.code == 0, end.output
    return said(end.output)[-1]


def test_restarts_end_with_the_same_bits(undisturbed):
    """A training that is killed, fails and freezes, and goes on from its checkpoints, ends like an undisturbed one."""
    assert restarted().code == 0, restarted().output
    ends = [line for line in said(restarted().output) if line["what"] == "ends"]
    assert sorted(line["rank"] for line in ends) == [0, 1]
    for line in ends:
        assert (line["step"], line["w"], line["m"]) == (70, undisturbed["w"], undisturbed["m"])
    starts = [line["step"] for line in said(restarted().output) if line["what"] == "starts"]
    assert starts == [step for step in (0, 10, 20, 30, 40, 50) for _ in range(2)]


@pytest.mark.parametrize("how", ["shared", "apart", "damaged", "background", "damaged in all"])
def test_going_on(tmp_path, undisturbed, how):
    """After a kill all processes go on right, without shared files or from a damaged checkpoint, or all raise."""
    environment = {how: "1"} if how in ("apart", "background") else {}
    harness.run(programs.train, tmp_path, "kill:1", deadline=60, **environment)
    steps = sorted(tmp_path.rglob("step-*"))
    if "damaged" in how:
        for step in steps if "all" in how else steps[-1:]:
            (step / "about.json").write_text((step / "about.json").read_text()[:-1])
    ends = harness.run(programs.train, tmp_path, deadline=60, **environment, SYNK_ATTEMPT="1")
    if "all" in how:
        for end in ends:
            assert end.code == 1 and "synk.errors.CheckpointError: synk.load: no checkpoint" in end.output
        return
    for end in ends:
        assert end.code == 0, end.output
        start, *_, last = said(end.output)
        assert start["step"] == int(steps[-2 if how == "damaged" else -1].name[5:])
        assert [last[name] for name in ("step", "w", "m")] == [undisturbed[name] for name in ("step", "w", "m")]
        assert ("Step 5 is loaded in its place" in end.output) == (how == "damaged")


@pytest.mark.parametrize("how", ["now", "background"])
def test_kills_while_a_gang_saves(tmp_path, how, kills=10):
    """Whenever a process dies, the newest checkpoint is whole, and no older than one that was saved for certain."""
    moments = random.Random(len(how))
    for _ in range(kills):
        with harness.Gang(programs.save_on, tmp_path / "run", how) as two:
            two.await_line('"saved"', deadline=30)
            time.sleep(moments.uniform(0, 0.1))
            two.signal(moments.choice([0, 1]), signal.SIGKILL)
            time.sleep(moments.uniform(0, 0.3))  # and then the other one
            certain = [line["step"] for line in said(two.output(0)) if line["what"] == "saved"][-1]
            begun = [line["step"] for line in said(two.output(0)) if line["what"] == "starts"]
        w = synk.shared(np.zeros(3000, np.int32), name="w")
        with group_of("devices", 2):
            step, extra = synk.load(tmp_path / "run", {"w": w})
            assert step >= certain >= begun[0] and extra == [step] and set(np.asarray(w.value).tolist()) == {step}


def test_the_launcher_names_who_failed_first():
    """The launcher says at each attempt which process failed first, and how."""
    named = [line for line in restarted().output.splitlines() if line.startswith("synk: process ")]
    assert len(named) == len(ATTEMPTS), restarted().output
    for i, (line, (_, who, how)) in enumerate(zip(named, ATTEMPTS, strict=True), 1):
        assert line.startswith(f"synk: process {who} {how} "), line
        assert line.endswith(f"; all start again; {len(ATTEMPTS) - i} restart{'s' * (i != len(ATTEMPTS) - 1)} left")


def test_nothing_outlives_a_failure():
    """Soon after a failure the others have left, and all have started again."""
    lines = said(restarted().output)
    failures = [line["time"] for line in lines if line["what"] == "fails"]
    starts = [line["time"] for line in lines if line["what"] == "starts"][2::2]
    assert len(failures) == len(starts) == len(ATTEMPTS)
    for failure, start in zip(failures, starts, strict=True):
        assert 0 < start - failure < LATE + 10


# Starting.

BEGINNINGS = [
    ({}, "synk.init(distributed=True)", "ValueError: synk.init(distributed=True): coordinator_address should be defined. Start with"),
    ({"SYNK_COORDINATOR": "127.0.0.1:1"}, "synk.init(distributed=True)", "Number of processes must be defined. Start with"),
    ({}, "synk.init(distributed=True, process_id=1)", "coordinator_address should be defined. Start with"),
    ({"SYNK_NUM_PROCESSES": "two"}, "synk.init(distributed=True)", "SYNK_NUM_PROCESSES is 'two'"),
    ({}, "synk.init(distributed=True, num_processes='2')", "TypeError: synk.init: num_processes is '2'"),
    ({}, "synk.init(distributed=True, num_processes=True)", "TypeError: synk.init: num_processes is True"),
    ({}, "synk.init(coordinator='127.0.0.1:1')", "go with distributed=True"),
    ({}, "synk.init(watchdog=0)", "watchdog is 0; give seconds > 0"),
    ({}, "synk.init(distributed=True, coordinator='127.0.0.1:1', num_processes=2, process_id=2)", "process_id"),
    ({}, "synk.init(distributed=True, coordinator='127.0.0.1:1', num_processes=2, process_id=1, watchdog=-1)", "watchdog"),
    ({}, "jax.devices(); synk.init(distributed=True, coordinator='127.0.0.1:1', num_processes=2, process_id=1)", "before"),
]  # fmt: skip


def test_init_refuses():
    """Missing and wrong arguments are named before anything is waited for."""
    for environment, code, message in BEGINNINGS:
        end = harness.run(programs.execute, code, processes=1, deadline=60, **environment)[0]
        assert message in end.output and end.code == 1, (code, end)


START = "synk.init(distributed=True, start=3, heartbeat=10, shutdown=5); say('met', n=jax.process_count())"


def met(*processes, serve=None):
    """Start processes with (coordinator, number of processes, id) and more environment. Return how they end."""
    with reserve_port() as own, harness.Running("meets") as some:
        address = "{}:{}".format(*own.getsockname())
        if serve is not None:
            own.listen()
            threading.Thread(target=serve, args=(own,), daemon=True).start()
        for coordinator, count, number, *more in processes:
            names = ("SYNK_COORDINATOR", "SYNK_NUM_PROCESSES", "SYNK_PROCESS_ID")
            environment = dict(
                zip(names, (coordinator or address, str(count), str(number)), strict=True), **dict(*more)
            )
            some.start(programs.execute, START, log=Path(mkdtemp()) / "log", **environment)
        return address, some.wait(20)


def silent(listener):
    """Take connections, and say nothing."""
    kept = []
    with contextlib.suppress(OSError):
        while True:
            kept.append(listener.accept())


def another_server(listener):
    """Answer as a server of another protocol."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()


WRONG = {  # processes, who listens there, what the last one says, beside the variable
    "nobody there": ([("", 2, 1)], None, "process 1 of 2 has met the others"),
    "silence": ([("", 2, 1)], silent, "process 1 of 2 has met the others"),
    "another server": ([("", 2, 1)], another_server, "process 1 of 2 has met the others"),
    "a port in use": ([("", 2, 0)], silent, "Address already in use. Give a port of this machine that nobody uses"),
    "no such host": ([("no-such-host.invalid:1234", 2, 1)], None, "no-such-host.invalid:1234"),
    "no port": ([("127.0.0.1", 2, 1)], None, "is '127.0.0.1'"),
    "no number": ([("127.0.0.1:http", 2, 0)], None, "give host:port"),
    "too high": ([("127.0.0.1:70000", 2, 0)], None, "give host:port"),
    "a URL": ([("http://127.0.0.1:1234", 2, 1)], None, "give host:port"),
    "alone": ([("", 2, 0)], None, "3 s have passed before process 0 of 2 has met the others"),
    "one too few": ([("", 3, 0), ("", 3, 1)], None, "process 1 of 3 has met the others"),
    "counts differ": ([("", 2, 0), ("", 3, 1)], None, "is 3 in process 1, but 2 in process 0"),
    "no such process": ([("", 2, 5)], None, "Got process_id=5, num_processes=2"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_environments(what):
    """Within the start time a process names the address or variable, and what to do."""
    processes, serve, message = WRONG[what]
    address, ends = met(*processes, serve=serve)
    codes = (1, 69) if "3 s have passed" in ends[-1].output else (1,)
    assert all(end.code in codes and end.seconds < 6 for end in ends), ends
    assert message in ends[-1].output
    names = (
        ("SYNK_COORDINATOR", "SYNK_NUM_PROCESSES", "process_id") if processes[-1][0] == "" else ("SYNK_COORDINATOR",)
    )
    assert any(name in ends[-1].output for name in names)
    assert processes[-1][0] or "counts" in what or "no such" in what or address in ends[-1].output


LISTENS = """
synk.init(distributed=True, **PATIENCE)
synk.function(lambda x: x.sum())(np.ones(4, np.float32))
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
targets = [os.readlink(link) for link in links if os.path.lexists(link)]
sockets = {target[8:-1] for target in targets if target.startswith("socket:")}
for name in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in sockets and fields[3] == "0A":
            say("listens", address=fields[1].split(":")[0])
"""


def test_who_listens():
    """On one machine the coordinator listens on the loopback, and gloo at the address of the machine's name."""
    own = socket.inet_aton(socket.gethostbyname(socket.gethostname()))[::-1].hex().upper()
    found = {line["address"] for end in harness.run(programs.execute, LISTENS) for line in said(end.output)}
    assert found <= {"0100007F", "0000000000000000FFFF00000100007F", own} and found


def test_a_proxy_is_not_asked():
    """A proxy of the environment is not used for the coordinator."""
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    _, ends = met(("", 2, 0, proxy), ("", 2, 1, proxy))
    assert [end.code for end in ends] == [0, 0] and '"n": 2' in ends[0].output


SLURM = {f"SLURM_{name}": "0" for name in ("JOB_ID", "NTASKS", "STEP_NUM_TASKS", "STEP_NUM_NODES", "PROCID", "LOCALID")}


def test_no_other_launcher_is_asked():
    """Inside an allocation SLURM has one task. JAX would give its GPU to each process."""
    nodes = {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
    code = "from jax._src import xla_bridge; join(); say('sees', gpus=xla_bridge.CUDA_VISIBLE_DEVICES.value)"
    ends = harness.run(programs.execute, code, **SLURM, **nodes)
    assert [(end.code, line["gpus"]) for end in ends for line in said(end.output)] == [(0, "all")] * 2


def test_preempted_as_soon_as_it_listens(monkeypatch):
    """A signal that comes as soon as the handler is set is noted."""
    before, listen = signal.getsignal(signal.SIGTERM), signal.signal
    monkeypatch.setattr(preemption, "_terminated", None)
    monkeypatch.setattr(preemption, "_answer", (None, False))
    monkeypatch.setattr(preemption, "_is_told", False)
    monkeypatch.setattr(preemption.signal, "signal", lambda *to: (listen(*to), signal.raise_signal(signal.SIGTERM)))
    try:
        assert synk.preempted(1)
    finally:
        listen(signal.SIGTERM, before)


def test_preempted_in_one_process(monkeypatch):
    """One process notes SIGTERM by itself. The answer about a step stays."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(preemption, "_terminated", None)
    monkeypatch.setattr(preemption, "_answer", (None, False))
    monkeypatch.setattr(preemption, "_is_told", False)
    try:
        assert not synk.preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not synk.preempted(1)  # what was not saved for it is not left for it
        assert synk.preempted(2) and synk.preempted(2) and synk.preempted(3)
    finally:
        signal.signal(signal.SIGTERM, before)
