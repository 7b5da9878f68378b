"""Launcher: its processes get what they need, and nothing is left of them however they, it or its output end."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from synk._command.launcher import main, reserve_port

from .. import harness

pytestmark = pytest.mark.gang


def launch(tmp_path, script, *options, arguments=(), signal_after=None, **environment):
    """Run the launcher on a script without JAX. Return its exit code and output."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    with harness.Launcher(tmp_path, *options, file, *arguments, **environment) as launcher:
        if signal_after is not None:
            launcher.await_line("ready", times=2)
            launcher.signal(0, signal_after)
        end = launcher.wait(30)[0]
    return end.code, end.output


def test_launch_tells_each_process_who_it_is(tmp_path):
    """Processes get ranks, arguments, devices and the attempt. Lines have a prefix, and logs are appended to."""
    script = """
        import os, sys
        names = ("SYNK_PROCESS_ID", "SYNK_NUM_PROCESSES", "SYNK_ATTEMPT", "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS")
        print(*(os.environ[name] for name in names), *sys.argv[1:])
        assert os.environ["SYNK_COORDINATOR"].startswith("127.0.0.1:")
    """
    options = ["-n", 3, "--devices-per-process", 2, "--logs", tmp_path / "logs"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-2.0.log").write_text("before\n")
    code, output = launch(tmp_path, script, *options, arguments=["-n", "x y"])
    assert code == 0, output
    assert sorted(output.splitlines()[1:]) == [
        f"[{rank}] {rank} 3 0 2 {2 * rank},{2 * rank + 1} -n x y" for rank in range(3)
    ]
    assert (tmp_path / "logs" / "rank-2.0.log").read_text() == "before\n2 3 0 2 4,5 -n x y\n"


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (["-n", 1], ["None"]),
        (["-n", 2], ["0", "1"]),
        (["-n", 1, "--devices-per-process", 2], ["0,1"]),
        (["-n", 2, "--nodes", 2, "--node-rank", 1, "--coordinator", "127.0.0.1:1"], ["0", "1"]),
    ],
)
def test_launch_deals_out_the_gpus_of_a_machine(tmp_path, options, gpus):
    """A process gets one GPU, K of them, or all if it is alone."""
    code, output = launch(tmp_path, "import os; print('has', os.environ.get('JAX_LOCAL_DEVICE_IDS'))", *options)
    assert code == 0 and sorted(line.split("has ")[1] for line in output.splitlines()[1:]) == gpus, output


def test_launch_fails_as_the_first_failure(tmp_path):
    """The exit code is that of the first process that failed, and the others are ended."""
    script = """
        import os, sys, time
        time.sleep(0.2 if os.environ["SYNK_PROCESS_ID"] == "1" else 100)
        sys.exit(7)
    """
    start = time.monotonic()
    code, output = launch(tmp_path, script, "-n", 3)
    assert (code, time.monotonic() - start < 60) == (7, True)
    assert "process 1 failed first: it exited with 7" in output


def test_launch_restarts_up_to_a_number(tmp_path):
    """An attempt sees its number and has its own log. The code of the last attempt stands."""
    script = "import os, sys; sys.exit(10 + int(os.environ['SYNK_ATTEMPT']))"
    code, output = launch(tmp_path, script, "-n", 2, "--restarts", 2, "--logs", tmp_path / "logs")
    said = [re.sub(r"process \d|\d+\.\d s", "_", line) for line in output.splitlines()[1:]]
    assert code == 12 and said == [
        "synk: _ exited with 10 after _; all start again; 1 restart left",
        "synk: _ exited with 11 after _; all start again; 0 restarts left",
        "synk: _ failed first: it exited with 12 after _",
    ]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        f"rank-{r}.{a}.log" for r in range(2) for a in range(3)
    }


WAITS = """
    import os, signal, sys, time
    def leave(number, frame):
        time.sleep(1.5 * int(os.environ["SYNK_PROCESS_ID"]))  # to save, longer than others
        print("leaves", flush=True)
        sys.exit({code})
    if {listens}:
        signal.signal(signal.SIGTERM, leave)
    print("ready", flush=True)
    time.sleep(100)
"""
RESTARTS = "-n", 2, "--restarts", 3


@pytest.mark.parametrize(
    ("listens", "code", "wanted"), [("True", 0, 0), ("True", 143, 143), ("rank == '1'", 143, 143), ("False", 0, 143)]
)
def test_launch_passes_sigterm_on(tmp_path, listens, code, wanted):
    """All processes get SIGTERM and may save, however long. Who does not listen yet ends, and nobody has failed."""
    script = WAITS.format(code=code, listens=listens.replace("rank", "os.environ['SYNK_PROCESS_ID']"))
    ended, output = launch(tmp_path, script, *RESTARTS, signal_after=signal.SIGTERM)
    assert ended == wanted and "start again" not in output and "failed" not in output
    assert output.count("leaves") == {"True": 2, "False": 0}.get(listens, 1)


def test_a_failure_after_sigterm_is_one(tmp_path):
    """A program that fails while it saves has failed, and is not started again."""
    script = WAITS.format(code=4, listens=True)
    ended, output = launch(tmp_path, script, *RESTARTS, signal_after=signal.SIGTERM)
    assert ended == 4 and "start again" not in output and "process 0 failed first: it exited with 4" in output


@pytest.mark.parametrize("end", ["sys.exit(143)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_all_told_to_stop_by_somebody_else(tmp_path, end):
    """All processes leave since they got SIGTERM, not through the launcher: nobody has failed."""
    wait = "1.5 * int(os.environ['SYNK_PROCESS_ID'])" if "exit" in end else "0.1"
    script = f"import os, signal, sys, time; time.sleep({wait}); {end}"
    code, output = launch(tmp_path, script, *RESTARTS)
    assert code == 143 and output == "synk: 2 processes\n"


def test_one_ended_by_sigterm(tmp_path):
    """Somebody ends one process by SIGTERM before it listens. The others cannot go on, so that is a failure."""
    script = """
        import os, signal, time
        if os.environ["SYNK_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGTERM) if os.environ["SYNK_PROCESS_ID"] == "1" else time.sleep(100)
    """
    code, output = launch(tmp_path, script, *RESTARTS)
    assert code == 0 and "process 1 was ended by SIGTERM after" in output


def test_launch_ends_all_on_ctrl_c(tmp_path):
    """No process is left, and none is started again."""
    script = WAITS.format(code=0, listens=True)
    ended, output = launch(tmp_path, script, *RESTARTS, signal_after=signal.SIGINT)
    assert ended == 128 + signal.SIGINT and "start again" not in output


def test_exit_codes_are_kept_whoever_starts_the_launcher(tmp_path):
    """A program that ignores the ends of its children starts the launcher, which inherits that."""
    ignores = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-m", "synk", "launch", "-n", "2", write(tmp_path, "import sys; sys.exit(7)")]
    done = subprocess.run([sys.executable, "-c", ignores, *command], env=harness.plain_environment(), timeout=30)
    assert done.returncode == 7


def test_launch_ends_at_whatever_moment_ctrl_c_comes(tmp_path):
    """Ctrl-C comes while the launcher asks how a process has ended."""
    file = tmp_path / "script.py"
    file.write_text("import time; time.sleep(100)")
    with harness.Launcher(tmp_path, "-n", 2, file, program=harness.interrupted_launch) as launcher:
        assert launcher.wait(30)[0].code == 128 + signal.SIGINT


@pytest.mark.parametrize("options", [["-n", "0", "script.py"], ["--restarts", "-1", "script.py"], []])
def test_launch_refuses(capsys, options):
    """Senseless numbers and a missing script are refused."""
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *options])
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices-per-process", "-2", "script.py"], "--devices-per-process is -2; give at least 1"),
        (["--devices-per-process", "0", "script.py"], "give at least 1"),
        (["--nodes", "2", "--node-rank", "2", "--coordinator", "a:1", "script.py"], "give 0 to 1"),
        (["--nodes", "2", "script.py"], "--nodes needs --coordinator HOST:PORT"),
        (["--coordinator", "here", "script.py"], "--coordinator is 'here'; give HOST:PORT"),
        (["--logz", "here", "script.py"], "unrecognized arguments: --logz\n"),
        (
            ["--elastic", "--min", "2", "script.py"],
            "--elastic --min, which synk no longer has. Instead: when a process",
        ),
        (["--min", "2", "script.py"], "start all again from a checkpoint: `python -m synk launch --restarts R`"),
    ],
)
def test_launch_says_what_it_wants(capsys, options, message):
    """The message names the option and what to give, before anything is started."""
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *options])
    assert message in capsys.readouterr().err


def test_launch_runs_a_module(tmp_path, monkeypatch):
    """A module runs as by python -m, its arguments untouched."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text("import sys; print(__spec__.name, *sys.argv[1:])")
    with harness.Launcher(tmp_path, "-n", 2, "-m", "package.program", "-m", "x", PYTHONPATH=str(tmp_path)) as launcher:
        end = launcher.wait(30)[0]
    assert end.code == 0 and sorted(end.output.splitlines()[1:]) == [f"[{i}] package.program -m x" for i in (0, 1)]


def test_several_machines(tmp_path):
    """Launchers on two machines start their own ranks, which meet at one address."""
    script = tmp_path / "script.py"
    script.write_text(
        "import synk, jax, numpy as np\n"
        "group = synk.init(distributed=True, heartbeat=10)\n"
        "total = synk.function(lambda x: x.sum())(np.arange(9.0))\n"
        "print('=', jax.process_index(), jax.process_count(), group.size, float(total))\n"
    )
    with (
        reserve_port() as reserved,
        harness.Launcher(make(tmp_path / "a"), *meeting(reserved), "--node-rank", 1, script) as second,
        harness.Launcher(make(tmp_path / "b"), *meeting(reserved), "--node-rank", 0, script) as first,
    ):
        ends = [first.wait(60)[0], second.wait(60)[0]]
    assert [end.code for end in ends] == [0, 0], ends
    assert ["[0] = 0 2 4 36.0" in ends[0].output, "[1] = 1 2 4 36.0" in ends[1].output] == [True, True]


DIES = """
import os, signal, sys, time
import synk, jax, numpy as np
synk.init(distributed=True, heartbeat=10, start=10)
add = synk.function(lambda x: x.sum(), reduce="sum")
for step in range(30):
    total = float(add(np.arange(9.0)))
    for rank, at in (death.split(":") for death in sys.argv[2:]):
        done = f"{sys.argv[1]}/{rank}-{at}"
        if (jax.process_index(), step) == (int(rank), int(at)) and not os.path.exists(done):
            open(done, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
print("=", jax.process_index(), total)
"""


def on_two_machines(tmp_path, *deaths, restarts=(3, 3)):
    """Run two launchers with two processes each, of which some die at a step, as 2:10. Return how the launchers end."""
    script, made = write(tmp_path, DIES), [make(tmp_path / name) for name in ("a", "b", "deaths")]
    with reserve_port() as reserved, ThreadPoolExecutor(2) as pool:
        address = "{}:{}".format(*reserved.getsockname())

        def run(node):
            options = ["-n", 2, "--nodes", 2, "--node-rank", node, "--coordinator", address]
            options += ["--restarts", restarts[node], "--devices-per-process", 1]
            with harness.Launcher(made[node], *options, script, made[2], *deaths) as launcher:
                return launcher.wait(100)[0]

        return list(pool.map(run, range(2)))


def test_a_death_counts_once_on_all_machines(tmp_path):
    """Whichever process dies, all launchers start theirs again, and they meet. Each death takes one restart of each."""
    ends = on_two_machines(tmp_path, "0:5", "2:9", "1:13")
    for node, end in enumerate(ends):
        assert end.code == 0, ends
        assert [line.split("again; ")[1] for line in end.output.splitlines() if "again; " in line] == [
            "2 restarts left", "1 restart left", "0 restarts left"
        ]  # fmt: skip
        assert all(f"= {rank} 36.0" in end.output for rank in (2 * node, 2 * node + 1))


def test_all_launchers_end_once_one_has_given_up(tmp_path):
    """A launcher whose processes wait in vain for those of another machine ends, though it has restarts left."""
    ends = on_two_machines(tmp_path, "1:5", restarts=(0, 9))
    assert [end.code for end in ends] == [137, 69], ends
    assert ends[1].output.count("start again; ") == 1 and "failed first: it exited with 69" in ends[1].output


def test_a_port_is_no_one_elses():
    """A reserved port stays free until process 0 listens: two that listen there would take each other's processes."""
    with reserve_port() as reserved, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(reserved.getsockname())
        with pytest.raises(ConnectionRefusedError):  # nor does anyone listen there yet
            socket.create_connection(reserved.getsockname())


def meeting(reserved):
    """Return options of a launcher whose processes meet those of another launcher at a port."""
    return "-n", 1, "--devices-per-process", 2, "--nodes", 2, "--coordinator", "{}:{}".format(*reserved.getsockname())


def make(folder):
    folder.mkdir()
    return folder


def test_lines_are_whole(tmp_path):
    """Lines of several processes are not mixed. Bytes stay as they came, and a last line needs no end."""
    script = """
        import sys
        for i in range(300):
            sys.stdout.write("x" * 1000 + " é\\n")
        sys.stdout.buffer.write(b"\\xff the end")
    """
    with harness.Launcher(make(tmp_path / "a"), "-n", 3, write(tmp_path, script), PYTHONIOENCODING="utf-8") as launcher:
        assert launcher.wait(30)[0].code == 0
        lines = launcher.logs[0].read_bytes().splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(b"[%d] " % rank)]
        assert mine == [b"[%d] " % rank + b"x" * 1000 + " é".encode()] * 300 + [b"[%d] \xff the end" % rank]
    assert len(lines) == 1 + 3 * 301


def test_output_waits_for_its_reader(tmp_path):
    """Nobody reads 80 MB until the program has ended: 64 MB wait, the newest, behind a line that counts the others."""
    ended = tmp_path / "ended"
    script = f"""
        for i in range(80_000):
            print(f"{{i:05}}" * 200)
        open({str(ended)!r}, "w").close()
    """
    command = [sys.executable, "-m", "synk", "launch", "-n", "1", write(tmp_path, script)]
    plain = harness.plain_environment(PYTHONUNBUFFERED="")
    with subprocess.Popen(command, env=plain, stdout=subprocess.PIPE) as launcher:
        while not ended.exists():
            assert launcher.poll() is None
            time.sleep(0.02)
        lines = launcher.communicate(timeout=60)[0].splitlines()
    gaps = [i for i, line in enumerate(lines) if b" left out here" in line]
    number = 0
    for i, line in enumerate(lines[1:], 1):
        if i in gaps:
            match = re.fullmatch(rb"synk: (\d+) lines left out here, .*", line)
            assert match
            number += int(match[1])
        else:
            assert int(line[4:9]) == number
            number += 1
    assert number == 80_000 and launcher.returncode == 0
    # On a slow machine the launcher has not got all lines when the program ends, so there may be another gap.
    assert 60e6 < sum(map(len, lines[gaps[0] :])) and sum(map(len, lines[gaps[-1] :])) < 64 << 20


def write(tmp_path, script):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    return file


# However it ends.

BEGIN = """
    import os, signal, subprocess, sys, threading, time
    me = int(os.environ["SYNK_PROCESS_ID"])
    note = lambda pid: open(os.path.join({pids!r}, str(pid)), "w").close()
    note(os.getpid())
    helper = lambda **how: note(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"], **how).pid)
    print("ready", flush=True)
    time.sleep(0.1)
"""
SIGNALS = "KILL TERM SEGV ABRT BUS FPE ILL HUP QUIT ALRM SYS USR1 XCPU VTALRM".split()
ENDINGS = {
    **{f"SIG{name}": (f"os.kill(os.getpid(), signal.SIG{name})", 128 + getattr(signal, f"SIG{name}")) for name in SIGNALS},
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT)", 128 + signal.SIGINT),
    "signal 35": ("os.kill(os.getpid(), 35)", 128 + 35),
    **{f"exit {code}": (f"sys.exit({code})", code) for code in (1, 3, 77, 255)},
    "a text": ("sys.exit('no')", 1),
    "_exit": ("os._exit(9)", 9),
    "SystemExit": ("raise SystemExit(4)", 4),
    "an exception": ("1 / 0", 1),
    "out of memory": ("raise MemoryError", 1),
    "recursion": ("f = lambda: f(); f()", 1),
    "while a thread runs": ("threading.Thread(target=time.sleep, args=(100,), daemon=True).start(); sys.exit(5)", 5),
    "with helpers": ("helper(); helper(); sys.exit(6)", 6),
    "killed with helpers": ("helper(); os.kill(os.getpid(), 9)", 137),
    "all well, helpers left": ("helper(); other = False", 0),
}  # fmt: skip


def gone(pid):
    """Return whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def check_gone(pids, deadline=15):
    until = time.monotonic() + deadline
    noted = os.listdir(pids)
    assert noted
    while left := [pid for pid in noted if not gone(pid)]:
        assert time.monotonic() < until, left
        time.sleep(0.02)


@pytest.fixture
def place(tmp_path):
    return place_in(tmp_path)


def place_in(folder):
    """Make a launcher's folder, its temporary folder, and a folder in which processes note themselves."""
    for name in ("pids", "temporary", "log"):
        (folder / name).mkdir(parents=True)
    return folder


def program(place, ending):
    """Write a program in which process 1 of 2 ends in a way."""
    lines = [
        *textwrap.dedent(BEGIN.format(pids=str(place / "pids"))).splitlines(),
        "other = True",
        "if me:",
        f"    {ending}",
    ]
    lines += [
        "    other = False" if "other" in ending else "",
        "if other: time.sleep(0 if 'other' in " + repr(ending) + " else 100)",
    ]
    file = place / "script.py"
    file.write_text("\n".join(lines))
    return file


def test_one_ends(tmp_path):
    """All processes and helpers are gone soon, with the code of the first failure and no temporary file."""

    def ends(ending):
        place, (how, wanted) = place_in(tmp_path / ending.replace(" ", "_")), ENDINGS[ending]
        with harness.Launcher(place / "log", "-n", 2, program(place, how), TMPDIR=str(place / "temporary")) as launcher:
            end = launcher.wait(15)[0]
        assert end.code == wanted, (ending, end)
        assert wanted == 0 or "process 1 failed first" in end.output
        assert "signal" not in ending or f"was ended by {ending} after" in end.output
        check_gone(place / "pids")
        assert not os.listdir(place / "temporary")

    with ThreadPoolExecutor(6) as pool:  # most of the time they wait
        list(pool.map(ends, ENDINGS))


LAUNCHER_ENDS = {
    "SIGKILL": ([signal.SIGKILL], -9), "SIGHUP": ([signal.SIGHUP], -1), "SIGQUIT": ([signal.SIGQUIT], -3),
    "SIGINT": ([signal.SIGINT], 130), "SIGTERM twice": ([signal.SIGTERM, signal.SIGTERM], 130),
    "SIGTERM": ([signal.SIGTERM], 128 + 15), "SIGSEGV": ([signal.SIGSEGV], -11),
    "SIGINT twice": ([signal.SIGINT, signal.SIGINT], 130),
}  # fmt: skip


@pytest.mark.parametrize("ending", LAUNCHER_ENDS)
def test_the_launcher_ends(place, ending):
    """Processes, helpers and temporary files are gone with the launcher, though it had no time to end them."""
    numbers, code = LAUNCHER_ENDS[ending]
    ignores = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)]"
    waits = f"pass\nhelper()\n{ignores if 'twice' in ending else 'pass'}\n"
    waits += "print('set', flush=True)\ntime.sleep(100)"
    options = "-n", 2, program(place, waits)
    with harness.Launcher(place / "log", *options, TMPDIR=str(place / "temporary")) as launcher:
        launcher.await_line("set", times=2)
        assert len(os.listdir(place / "temporary")) == 1 and len(os.listdir(place / "pids")) == 4
        for number in numbers:
            launcher.signal(0, number)
            time.sleep(0.1)
        check_gone(place / "pids")
        assert launcher.wait(15)[0].code == code
    until = time.monotonic() + 5
    while os.listdir(place / "temporary"):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_restarts_leave_nothing_in_the_launcher(tmp_path):
    """Its threads, open files and processes stay as many, though helpers that made sessions of their own live on."""
    script = """
        import os, subprocess, sys, time
        subprocess.Popen(["sleep", "15"], start_new_session=True)
        time.sleep(0.5)
        of = f"/proc/{os.getppid()}"
        tasks = os.listdir(f"{of}/task")
        children = [open(f"{of}/task/{task}/children").read().split() for task in tasks]
        if os.environ["SYNK_PROCESS_ID"] == "1":
            print("=", len(tasks), len(os.listdir(f"{of}/fd")), len(sum(children, [])), flush=True)
            sys.exit(1)
        time.sleep(100)
    """
    code, output = launch(tmp_path, script, "-n", 2, "--restarts", 5)
    counts = [line for line in output.splitlines() if "] = " in line]
    assert code == 1 and len(counts) == 6 and len(set(counts)) == 1, output


STOPS = """
import atexit, os, signal, sys, time
def stop():
    if os.environ["SYNK_PROCESS_ID"] == sys.argv[1]:
        print("stops", flush=True)
        time.sleep(100) if sys.argv[3] == "hangs" else os.kill(os.getpid(), signal.SIGSTOP)
if sys.argv[2] == "late":
    atexit.register(stop)  # after the runtime has shut down
import jax, synk
if sys.argv[2] == "soon":
    atexit.register(stop)
synk.init(distributed=True, shutdown=3, heartbeat=10)
"""


def test_stuck_in_its_exit(tmp_path):
    """A process that is stuck once all programs have ended is killed after a limit. All have ended well."""

    def ends(how):
        folder = make(tmp_path / "-".join(how))
        with harness.Launcher(folder, *RESTARTS, write(folder, STOPS), *how) as launcher:
            return launcher.wait(40)[0]

    cases = [("0", "late", "hangs"), ("1", "late", "stopped"), ("1", "soon", "stopped"), ("0", "soon", "hangs")]
    with ThreadPoolExecutor(len(cases)) as pool:
        for how, end in zip(cases, pool.map(ends, cases), strict=True):
            assert end.code == 0 and end.output.count("stops") == 1, (how, end)
            assert how[1] == "soon" or f"process {how[0]} was stuck in its exit" in end.output


MUCH = "print('\\n'.join(['é' * 100] * 50000) if me else '', flush=True); other = False"
OUTPUTS = {
    "closed by its reader": "| head -3 >/dev/null; exit ${PIPESTATUS[0]}",
    "nobody reads": "| (sleep 8 & exec >&-; wait); exit ${PIPESTATUS[0]}",
    "a full disk": "> /dev/full",
    "no console": ">&- 2>&-",
    "not UTF-8": "> out.txt",
    "full logs": "--logs",
}


@pytest.mark.parametrize("how", OUTPUTS)
def test_output_goes_nowhere(place, how):
    """The launcher goes on reading, and ends as its processes do."""
    script, logs = program(place, MUCH), ""
    if how == "full logs":
        (place / "logs").mkdir()
        (place / "logs" / "rank-1.0.log").symlink_to("/dev/full")
        logs = f"--logs {place / 'logs'}"
    line = f"{sys.executable} -m synk launch -n 2 {logs} {script} {OUTPUTS[how] if how != 'full logs' else '> out.txt'}"
    plain = harness.plain_environment(
        TMPDIR=str(place / "temporary"), PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0"
    )
    plain.pop("PYTHONIOENCODING") if how == "not UTF-8" else None
    ranks = plain | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(["bash", "-c", line], env=ranks, cwd=place, timeout=60, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    check_gone(place / "pids")
    if how == "full logs":
        assert b"rank-1.0.log is not written any further: No space left on device" in (place / "out.txt").read_bytes()
    if how in ("not UTF-8", "full logs"):
        assert (place / "out.txt").read_bytes().count("é".encode() * 100) == 50000


def test_a_helper_that_left_holds_the_output(place):
    """A helper in a session of its own stays, and the launcher does not wait for it."""
    how = "helper(start_new_session=True); other = False"
    with harness.Launcher(place / "log", "-n", 2, program(place, how)) as launcher:
        end = launcher.wait(15)[0]
    assert end.code == 0
    for pid in os.listdir(place / "pids"):
        if not gone(pid):
            os.kill(int(pid), signal.SIGKILL)
