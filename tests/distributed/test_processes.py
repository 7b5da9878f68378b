"""Groups over several processes: the law, the same bits, disagreement, failure, and the launcher."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir, mkdtemp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import synk
from synk._distributed import preemption
from synk._distributed.launcher import main
from synk._distributed.liveness import EXIT_PEER_FAILED

from ..helpers import group_of, slow, slow_but
from . import gang
from .gang_programs import CASES, DISAGREEMENTS, said

SPLITS = ("2x1", slow("2x2"), slow("4x1"))  # processes x devices: each process compiles everything
COMPARED = ("bits", "slices", "data", "then", "collectives", "keys", "halves", "pmap")
LATE = 15  # seconds that nothing outlives a failure, with a heartbeat of 10


class Once:
    """Gangs at whose end several tests look: each is run once, when first asked for or ahead of that."""

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
    """One run of these tests at a time on a machine: where other gangs take the cores, heartbeats come too late."""
    with open(Path(gettempdir()) / f"synk-gangs-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module", autouse=True)
def ahead(request, alone):
    """Where many tests are to run, their gangs start: those that wait for the heartbeat first, then the longest."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = [(i.originalname, *(i.callspec.params.values() if hasattr(i, "callspec") else ())) for i in items]
    if not {"test_law", "test_disagreement", "test_failure"} <= {name for name, *_ in asked}:
        return
    failures = [case for case in FAILURES if ("test_failure", *case) in asked]
    for case in failures[:2]:
        failed.start(*case)
    if ("test_restarts_end_with_the_same_bits",) in asked:
        restarted.start()
    for split in ("2x1", "2x2", "4x1", "1x2", "1x4"):
        if ("test_gangs_end_well", split) in asked:
            law.start(split)
    for what in DISAGREEMENTS:
        if ("test_disagreement", what) in asked:
            disagreed.start(what)
    beginnings.start()
    for case in failures[2:]:
        failed.start(*case)


# The law.


@Once
def law(split):
    """One gang runs all cases; those of one process, what is compared."""
    processes, devices = map(int, split.split("x"))
    folder = mkdtemp(prefix="law-")
    names = COMPARED if processes == 1 else ()
    ends = gang.run("law", folder, *names, processes=processes, devices=devices, deadline=180)
    return folder, ends, [{line["what"]: line for line in said(end.output)} for end in ends]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_law(split, name):
    """In every process the parallel answer is the serial one."""
    _, ends, lines = law(split)
    for rank, line in enumerate(lines):
        assert name in line, f"process {rank} did not come so far:\n{ends[rank].output[-4000:]}"
        assert "error" not in line[name], f"process {rank}:\n{line[name]['error']}"


@pytest.mark.parametrize("split", ["1x2", slow("1x4"), *SPLITS])
def test_gangs_end_well(split):
    """Every process comes to its end."""
    _, ends, lines = law(split)
    assert [end.code for end in ends] == [0] * len(ends)
    assert all("end" in line and not any("error" in one for one in line.values()) for line in lines)


def noted(split, name, rank=0):
    """What one process noted of a case."""
    with np.load(Path(law(split)[0]) / f"{name}.{rank}.npz") as kept:
        return dict(kept)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("split", SPLITS)
def test_every_process_has_the_same(split, name):
    """Results are readable in every process, the same bits in all."""
    for rank in range(1, int(split[0])):
        np.testing.assert_equal(noted(split, name, rank), noted(split, name))


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize(("one", "other"), [("1x2", "2x1"), slow("2x2", "4x1")])
def test_bits(one, other, name):
    """Two replicas give the same bits in one process and in two, four in two processes and in four."""
    assert noted(one, name).keys() == noted(other, name).keys() != set()
    np.testing.assert_equal(noted(one, name), noted(other, name))


@pytest.mark.slow
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
    "known_order": ["process 0: g(float32[12, 3])", "process 1: f(float32[12, 3])"],
    "dtype": ["process 0: f(float32[12, 3])", "process 1: f(int32[12, 3])"],
    "rows": ["process 0: f(float32[12, 3])", "process 1: f(float32[6, 3])"],
    "uneven_rows": ["process 0: f(float32[12, 3])", "process 1: f(float32[12, 3], int32["],
    "known_rows": ["process 0: f(float32[12, 3])", "process 1: f(float32[6, 3])"],
    "shape_of_variable": ["process 0: ", "(float32[3])", "process 1: ", "(float32[4])"],
    "collective": ["process 0: ", "process 1: ", "(float32[3])"],
    "new_beside_known": ["process 0: g(float32[12, 3])", "process 1 has gone on with: f(float32[12, 3])"],
    "fewer_calls": ["process 1: g(float32[12, 3])", "process 0 has gone on with: f(float32[12, 3])"],
    "local_rows": ["process 0: ", "(int32[2])", "process 1: f(float32[12, 3])"],
    "save": ["process 0: ", "process 1 has gone on with: f(float32[12, 3])"],
}


@Once
def disagreed(what):
    """How both processes end."""
    environment = {"SYNK_CHECK": "1"} if what.startswith("known") else {}
    return gang.run("disagree", what, deadline=90, **environment)


@pytest.mark.parametrize("what", slow_but(["order", "dtype", "save"], DISAGREEMENTS))
def test_disagreement(what):
    """Every process raises DisagreementError (or, in a program that cannot end, prints it) with both sides, and leaves."""
    for rank, end in enumerate(disagreed(what)):
        assert end.code == 1, end.output
        told = next((line for line in said(end.output) if line["what"] == "raised"), None)
        message = end.output.rsplit("synk.", 1)[1] if told is None else f"{told['kind']}: {told['message']}"
        assert message.startswith("DisagreementError: processes "), message
        assert all(side in message for side in SIDES[what]), message
        assert told is not None or (rank == 1 and what in ("new_beside_known", "save"))


@pytest.mark.parametrize("was", SPLITS)
def test_checkpoints_of_gangs(was):
    """What several processes have saved loads into as many replicas of one process, unequal values too."""
    n = int(was[0]) * int(was[2])
    with group_of("devices", n):
        w = synk.shared({"a": np.float32(0), "b": np.zeros(4, jnp.bfloat16)})
        k, own = synk.shared(jax.random.key(0)), synk.shared(np.zeros(2, np.int8))
        rows = synk.shared(np.zeros((1, 2), np.float32))
        kept = synk.load(Path(law(was)[0]) / "saved", {"w": w, "k": k, "own": own, "rows": rows})
        assert kept == (2, {"n": n})
        assert w.value["a"] == 3 and synk.get_lengths(rows) == [3, *[2] * (n - 1)]
        assert [int(own.get_value(rank)[0]) for rank in range(n)] == list(range(1, n + 1))


# Failure.

FAILURES = [  # those that wait for the heartbeat go first
    ("stop", 1), ("stop", 0), ("raise without hook", 1), ("hang", 1), ("kill", 2), ("kill", 0), ("raise", 2),
    ("raise", 0), ("exit", 1), ("exit", 0), ("leave", 1), ("leave", 0),
]  # fmt: skip


QUICK = [("stop", 1), ("kill", 2), ("raise", 0)]


@Once
def failed(mode, who):
    """What each process that is not frozen said, and how many seconds after the failure it ended."""
    processes = 3 if mode == "stop" or who == 2 else 2
    with gang.Gang("fail", mode, who, processes=processes) as some:
        began = time.time()
        frozen = [who] if mode == "stop" else []
        ends = some.wait(60, besides=frozen)
        at = next(line["time"] for line in said(some.output(who)) if line["what"] == "fails")
    ranks = [rank for rank in range(processes) if rank not in frozen]
    return {rank: (end, began + end.seconds - at) for rank, end in zip(ranks, ends, strict=True)}


@pytest.mark.parametrize(("mode", "who"), slow_but(QUICK, FAILURES), ids=str)
def test_failure(mode, who):
    """Whatever ends one process ends all, in time and with a failure."""
    for rank, (end, seconds) in failed(mode, who).items():
        assert seconds < LATE
        assert end.code != 0, f"process {rank}:\n{end.output}"
        if rank != who and mode in ("raise", "exit", "leave"):
            assert end.code == EXIT_PEER_FAILED


@pytest.mark.parametrize(
    ("mode", "who", "text"),
    [
        ("kill", 2, "another process of the group is gone"),
        slow("raise", 2, "process 2: RuntimeError: a bug of the user's"),
        ("raise", 0, "process 0: RuntimeError: a bug of the user's"),
        slow("exit", 1, "process 1: it has ended its program"),
        slow("exit", 0, "process 0: it has ended its program"),
        slow("leave", 1, "process 1: it has ended its program"),
    ],
)
def test_the_others_say_why(mode, who, text):
    """Those that are left raise PeerError, or print it where they hang in a program with process 0."""
    for rank, (end, _) in failed(mode, who).items():
        if rank != who:
            told = [line for line in said(end.output) if line["what"] == "raised"]
            assert [line["kind"] for line in told] == ["PeerError"] * len(told)
            assert told or who == 0
            assert f"PeerError: {text}" in end.output.replace("another process of the group has failed. ", ""), (
                end.output
            )


@pytest.mark.slow
def test_the_watchdog_shows_where():
    """A process that is alive but stuck is ended with the stacks of its threads."""
    shown = failed("hang", 1)[1][0].output
    assert "most recent call first" in shown and "hang_here" in shown


def test_preemption():
    """After a SIGTERM to one process all stop at the same step, and end well."""
    with gang.Gang("preempt", processes=3) as three:
        three.await_line('"goes"', rank=1)
        three.signal(1, signal.SIGTERM)
        ends = three.wait(30)
    assert [end.code for end in ends] == [0, 0, 0]
    assert len({line["step"] for end in ends for line in said(end.output) if line["what"] == "stops"}) == 1


def test_the_end_comes_after_its_own_thread():
    """Python ends under no thread that is inside the runtime, which would abort the process."""
    ends = gang.run("ends", processes=2)
    assert [(end.code, "FATAL" in end.output) for end in ends] == [(0, False)] * 2


# The launcher.

ATTEMPTS = [("kill", 1, "was ended by SIGKILL"), ("kill", 0, "was ended by SIGKILL"), ("raise", 1, "exited with 1"),
            ("raise", 0, "exited with 1"), ("stop", 1, "was stuck")]  # fmt: skip


@Once
def restarted():
    """How the launcher of one run ends that fails in a new way at each attempt."""
    folder = Path(mkdtemp(prefix="restarts-"))
    failures = [f"{mode}:{who}" for mode, who, _ in ATTEMPTS]
    options = ["--restarts", len(failures)]
    with gang.Gang("train", folder / "saved", *failures, folder=folder / "logs", launch=options) as two:
        return two.wait(150)[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The last line of the same run without failures, on two devices of one process."""
    end = gang.run("train", tmp_path_factory.mktemp("undisturbed"), processes=1, devices=2)[0]
    assert end.code == 0, end.output
    return said(end.output)[-1]


@pytest.mark.slow
def test_restarts_end_with_the_same_bits(undisturbed):
    """Killed, failed and frozen, and started again from its last checkpoint each time: as if nothing had been."""
    assert restarted().code == 0, restarted().output
    ends = [line for line in said(restarted().output) if line["what"] == "ends"]
    assert sorted(line["rank"] for line in ends) == [0, 1]
    for line in ends:
        assert (line["step"], line["w"], line["m"]) == (70, undisturbed["w"], undisturbed["m"])
    starts = [line["step"] for line in said(restarted().output) if line["what"] == "starts"]
    assert starts == [step for step in (0, 10, 20, 30, 40, 50) for _ in range(2)]


@pytest.mark.slow
def test_the_launcher_names_who_failed_first():
    """And how, at each attempt."""
    named = [line for line in restarted().output.splitlines() if line.startswith("synk: process ")]
    assert len(named) == len(ATTEMPTS), restarted().output
    for line, (_, who, how) in zip(named, ATTEMPTS, strict=True):
        assert line.startswith(f"synk: process {who} failed first: it {how} after "), line


@pytest.mark.slow
def test_nothing_outlives_a_failure():
    """From each failure to the next attempt's first step: the others have left, and all have started again."""
    lines = said(restarted().output)
    failures = [line["time"] for line in lines if line["what"] == "fails"]
    starts = [line["time"] for line in lines if line["what"] == "starts"][2::2]
    assert len(failures) == len(starts) == len(ATTEMPTS)
    for failure, start in zip(failures, starts, strict=True):
        assert 0 < start - failure < LATE + 10


def launch(tmp_path, script, *options, arguments=(), signal_after=None, **environment):
    """Run the launcher on a script of no JAX; its exit code and output."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "synk", "launch", *options, "--logs", tmp_path / "logs", file, *arguments]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=gang.ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        if signal_after is not None:
            assert process.stdout is not None
            read = ""
            while read.count("ready") < 2:
                read += process.stdout.readline()
            process.send_signal(signal_after)
        output = process.communicate(timeout=30)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output


def test_launch_tells_each_process_who_it_is(tmp_path):
    """Ranks, arguments, devices, the attempt; a prefix on the console, and one log a rank."""
    script = """
        import os, sys
        names = ("SYNK_PROCESS_ID", "SYNK_NUM_PROCESSES", "SYNK_ATTEMPT", "JAX_NUM_CPU_DEVICES")
        print(*(os.environ[name] for name in names), *sys.argv[1:])
        assert os.environ["SYNK_COORDINATOR"].startswith("127.0.0.1:")
    """
    code, output = launch(tmp_path, script, "-n", 3, "--devices-per-process", 2, arguments=["-n", "x y"])
    assert code == 0, output
    assert sorted(output.splitlines()[1:]) == [f"[{rank}] {rank} 3 0 2 -n x y" for rank in range(3)]
    assert (tmp_path / "logs" / "rank-2.0.log").read_text() == "2 3 0 2 -n x y\n"


def test_launch_fails_as_the_first_failure(tmp_path):
    """Its code is that of the first process that failed; the others are ended."""
    script = """
        import os, sys, time
        time.sleep(0.2 if os.environ["SYNK_PROCESS_ID"] == "1" else 100)
        sys.exit(7)
    """
    start = time.monotonic()
    code, output = launch(tmp_path, script, "-n", 3)
    assert (code, time.monotonic() - start < 10) == (7, True)
    assert "process 1 failed first: it exited with 7" in output


def test_launch_restarts_up_to_a_number(tmp_path):
    """Each attempt sees its number, and its own log; when none is left the last code stands."""
    script = "import os, sys; sys.exit(10 + int(os.environ['SYNK_ATTEMPT']))"
    code, output = launch(tmp_path, script, "-n", 2, "--restarts", 2)
    assert code == 12 and "starting all again (2 of 2)" in output
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        f"rank-{r}.{a}.log" for r in range(2) for a in range(3)
    }


WAITS = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit({code}))
    print("ready", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("code", [0, 4])
def test_launch_passes_sigterm_on(tmp_path, code):
    """All processes get it; they may save and leave, and are not started again."""
    ended, output = launch(tmp_path, WAITS.format(code=code), "-n", 2, "--restarts", 3, signal_after=signal.SIGTERM)
    assert ended == code and "starting all again" not in output


def test_launch_ends_all_on_ctrl_c(tmp_path):
    """No process is left, and none is started again."""
    ended, output = launch(tmp_path, WAITS.format(code=0), "-n", 2, "--restarts", 3, signal_after=signal.SIGINT)
    assert ended == 128 + signal.SIGINT and "starting all again" not in output


@pytest.mark.parametrize("options", [["-n", "0", "script.py"], ["--restarts", "-1", "script.py"], []])
def test_launch_refuses(capsys, options):
    """Numbers that mean nothing, and no script."""
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *options])
    assert "usage" in capsys.readouterr().err


# Starting.

BEGINNINGS = [
    ({}, "synk.init(distributed=True)", "ValueError: synk.init(distributed=True): no launcher was found"),
    ({"SYNK_COORDINATOR": "127.0.0.1:1"}, "synk.init(distributed=True)", "given without num_processes and process_id"),
    ({}, "synk.init(distributed=True, process_id=1)", "process_id given without coordinator and num_processes"),
    ({"SYNK_NUM_PROCESSES": "two"}, "synk.init(distributed=True)", "SYNK_NUM_PROCESSES is 'two'"),
    ({}, "synk.init(distributed=True, num_processes='2')", "TypeError: synk.init: num_processes is '2'"),
    ({}, "synk.init(distributed=True, num_processes=True)", "TypeError: synk.init: num_processes is True"),
    ({}, "synk.init(coordinator='127.0.0.1:1')", "go with distributed=True"),
    ({}, "synk.init(watchdog=0)", "watchdog is 0; give seconds > 0"),
    ({}, "synk.init(distributed=True, coordinator='127.0.0.1:1', num_processes=2, process_id=2)", "process_id"),
    ({}, "synk.init(distributed=True, coordinator='127.0.0.1:1', num_processes=2, process_id=1, watchdog=-1)", "watchdog"),
    ({}, "jax.devices(); synk.init(distributed=True, coordinator='127.0.0.1:1', num_processes=2, process_id=1)", "before"),
]  # fmt: skip


@Once
def beginnings():
    """What one process after the other is told by `synk.init`; those that a fork of one Python can."""
    script = "\n".join(
        [
            "import os, sys, time, jax, synk",
            "cases = " + repr([(environment, code) for environment, code, _ in BEGINNINGS]),
            "for environment, code in cases:",
            "    sys.stdout.flush()",
            "    if (child := os.fork()) == 0:",
            "        os.environ.update(environment)",
            "        try:",
            "            exec(code)",
            "            print('=> nothing', flush=True)",
            "        except BaseException as error:",
            "            print('=>', type(error).__name__ + ':', str(error).replace(chr(10), ' '), flush=True)",
            "        os._exit(0)",
            "    until = time.monotonic() + 10",
            "    while os.waitpid(child, os.WNOHANG)[0] == 0:",
            "        time.sleep(0.01)",
            "        if time.monotonic() > until:",
            "            os.kill(child, 9)",
            "            print('=> waits', flush=True)",
            "            until += 100",
        ]
    )
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SYNK_", "JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=plain | {"JAX_PLATFORMS": "cpu"},
        cwd=gang.ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("=> ")]
    assert len(found) == len(BEGINNINGS), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("i", range(len(BEGINNINGS)), ids=[code for _, code, _ in BEGINNINGS])
def test_init_refuses(i):
    """What is missing or wrong is named before anything is waited for."""
    assert BEGINNINGS[i][2] in beginnings()[i]


def test_preempted_in_one_process(monkeypatch):
    """Without other processes SIGTERM is noted just so."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(preemption, "_terminated", None)
    try:
        assert not synk.preempted(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert synk.preempted(2) and synk.preempted(3)
    finally:
        signal.signal(signal.SIGTERM, before)
