"""Resume: a run that is started again ends with the numbers of a run that was never broken off."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import synk
from synk._saving import checkpoint_files, folder_lock, meetings, resume

from ..helpers import Bar, numbers, slow_but

ROWS, BATCH, EPOCHS = 23, 4, 3
X, BATCHES = numbers(ROWS), [*synk.minibatches(ROWS, BATCH, epochs=EPOCHS)]
RATES = np.linspace(0.1, 0.9, len(BATCHES) + 9).astype(np.float32)


class Run:
    """A small training, made anew at each start. The order of its items shows in `w`, and `counts` counts rows."""

    def __init__(self):
        self.w, self.counts = synk.shared(np.zeros(2, np.float32), "w"), synk.shared(np.zeros(ROWS, np.int32), "counts")
        self.variables = {"w": self.w, "counts": self.counts}

        def on_part(x, rows, rate):
            return jnp.mean(x, 0), self.counts.value.at[rows].add(1) - self.counts.value

        def then(mean, more, rate):
            self.w.value = (1 - rate) * self.w.value + rate * mean
            self.counts.value = self.counts.value + more
            return self.w.value.sum()

        ops = ("mean", "sum")
        self.step = synk.function(on_part, {"x": "scatter", "rows": "scatter", "rate": "broadcast"}, ops, then=then)

    def take(self, batch, number=0):
        """Take a step by a plain call."""
        return float(self.step(X, np.arange(ROWS, dtype=np.int32), RATES[number], batch=batch))

    def iterate(self, **options):
        rates = synk.each(RATES)
        return self.step.iterate(X, np.arange(ROWS, dtype=np.int32), rates, batches=minibatches(), **options)


def minibatches(**options):
    return synk.minibatches(ROWS, BATCH, **{"epochs": EPOCHS} | options)


def items(run):
    return [(X[b], b.astype(np.int32), rate) for b, rate in zip(BATCHES, RATES, strict=False)]


# Of each kind: what is gone through, and how an item is done. Items are numbered by the loop itself.
KINDS = {
    "minibatches": (lambda run: minibatches(), lambda run, at, item: run.take(item, at)),
    "enumerate": (lambda run: enumerate(minibatches()), lambda run, at, item: run.take(item[1], item[0])),
    "zip": (lambda run: zip(range(99), minibatches(), strict=False), lambda run, at, item: run.take(item[1], item[0])),
    "both": (lambda run: enumerate(zip(BATCHES, RATES, strict=False), 5), lambda run, at, item: run.take(item[1][0], item[0] - 5)),
    "range": (lambda run: range(len(BATCHES)), lambda run, at, item: run.take(BATCHES[item], item)),
    "array": (lambda run: np.arange(len(BATCHES)), lambda run, at, item: run.take(BATCHES[item], item)),
    "list": (lambda run: BATCHES, lambda run, at, item: run.take(item, at)),
    "generator": (lambda run: (b for b in BATCHES), lambda run, at, item: run.take(item, at)),
    "bar": (lambda run: Bar(minibatches()), lambda run, at, item: run.take(item, at)),
    "begun": (lambda run: itertools.islice(iter([None, *BATCHES]), 1, None), lambda run, at, item: run.take(item, at)),
    "function": (lambda run: lambda done, extra: BATCHES[done:], lambda run, at, item: run.take(item, at)),
    "iterate": (lambda run: run.iterate(), lambda run, at, item: float(item)),
    "numbered iterate": (lambda run: enumerate(run.iterate(prefetch=0)), lambda run, at, item: float(item[1])),
    "stream": (lambda run: run.step.stream(items(run)), lambda run, at, item: float(item)),
}  # fmt: skip


of_kinds = pytest.mark.parametrize("kind", slow_but(("both", "generator", "iterate", "function"), KINDS))


def start(n, folder, kind="minibatches", stop=None, save_every=1e-9, make=None, **options):
    """Start the program on n replicas, break it off after `stop` items, and return the run, its loop and its losses."""
    synk.close()
    steps, do = KINDS[kind]
    with synk.simulate(n) if n > 1 else synk.init(1):
        run, losses = Run(), {}
        loop = synk.resume((make or steps)(run), run.variables, folder=folder, save_every=save_every, **options)
        for item in loop:
            losses[loop.done] = do(run, loop.done, item)
            checkpoint_files.WRITER.wait_quietly()
            if loop.done == stop:
                break
        run.values = {name: np.asarray(variable.value) for name, variable in run.variables.items()}
    return run, loop, losses


@pytest.fixture(scope="module")
def undisturbed():
    """Return the losses and the last weights of a run that is never broken off, on one device."""
    with synk.init(1):
        run = Run()
        return [run.take(batch, i) for i, batch in enumerate(BATCHES)], np.asarray(run.w.value)


@of_kinds
def test_a_run_in_pieces(kind, undisturbed, tmp_path):
    """Started on 4, 3, 8 and 1 replicas, it ends with the numbers of one run; each row is counted once an epoch."""
    losses = {}
    for n, stop in ((4, 5), (3, 9), (8, 14), (1, None)):
        run, loop, more = start(n, tmp_path / "run", kind, stop)
        assert loop.done == (len(BATCHES) if stop is None else stop)
        losses |= more
    np.testing.assert_allclose([losses[i] for i in range(len(BATCHES))], undisturbed[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run.values["w"], undisturbed[1], rtol=1e-6, atol=1e-6)
    assert run.values["counts"].tolist() == [EPOCHS] * ROWS


def test_what_is_left(tmp_path):
    """A start goes on after the items of the newest save. The loop says how many are done and left."""
    start(2, tmp_path, stop=7)
    synk.close()
    with synk.simulate(2):
        loop = synk.resume(minibatches(), Run().variables, folder=tmp_path)
        assert (loop.done, len(loop)) == (7, len(BATCHES) - 7)
        assert next(loop).tolist() == BATCHES[7].tolist()
        for make in (lambda run: (b for b in BATCHES), lambda run: lambda done, extra: (b for b in BATCHES)):
            with pytest.raises(TypeError, match=r"has no len"):
                len(start(2, tmp_path / "new", make=make, stop=1)[1])


@pytest.mark.parametrize("how", ["break", "error", "Ctrl-C"])
def test_a_loop_that_is_left_saves_nothing(tmp_path, how):
    """Then the next start goes on from the last save."""
    raised = {"error": ZeroDivisionError, "Ctrl-C": KeyboardInterrupt, "break": StopIteration}[how]
    with synk.simulate(2), pytest.raises(raised):
        run = Run()
        for at, batch in enumerate(synk.resume(minibatches(), run.variables, folder=tmp_path)):
            run.take(batch, at)
            if at == 4:
                raise raised
    assert not [*tmp_path.glob("step-*")]
    assert start(2, tmp_path)[1].done == len(BATCHES)


@of_kinds
def test_a_finished_loop_yields_nothing(tmp_path, kind):
    """It is not saved again, and its variables have their last values."""
    run, *_ = start(2, tmp_path, kind, save_every=None)
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("step-*/*"))]
    again, loop, losses = start(3, tmp_path, kind, save_every=None)
    assert (losses, loop.done, before) == (
        {},
        len(BATCHES),
        [p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("step-*/*"))],
    )
    assert run.values["w"].tolist() == again.values["w"].tolist()


def test_more_epochs_go_on(tmp_path):
    """Items that were added to a finished loop are done, and saved at their end."""
    start(2, tmp_path)
    for _ in range(2):
        run, loop, _ = start(2, tmp_path, make=lambda run: minibatches(epochs=EPOCHS + 1, seed=0), kind="minibatches")
        assert loop.done == 4 * len(BATCHES) // 3 and run.values["counts"].tolist() == [EPOCHS + 1] * ROWS


def test_a_generator_that_sets_variables(tmp_path):
    """While its items are left out it sets them again; then the saved values are loaded."""

    def made(run):
        for i, batch in enumerate(BATCHES):
            if i % 6 == 0:
                run.w.value = np.full(2, i, np.float32)
            yield batch

    whole, *_ = start(2, tmp_path / "whole", make=made)
    start(2, tmp_path / "parts", make=made, stop=8)
    parts, *_ = start(3, tmp_path / "parts", make=made)
    np.testing.assert_allclose(parts.values["w"], whole.values["w"], rtol=1e-6)


def test_a_list_that_grows(tmp_path):
    """Items that the loop appends are done too."""
    with synk.simulate(2):
        work, done = [1, 2, 3], []
        for item in synk.resume(work, Run().variables, folder=tmp_path):
            done.append(item)
            if len(work) < 6:
                work.append(9)
    assert done == [1, 2, 3, 9, 9, 9]


@pytest.mark.parametrize("kind", ["minibatches", "list", "generator", "zip", "iterate"])
def test_fewer_items_than_are_done(tmp_path, kind, monkeypatch):
    """It raises in words, as the program was changed."""
    start(2, tmp_path, kind)
    monkeypatch.setitem(globals(), "EPOCHS", 1)
    monkeypatch.setitem(globals(), "BATCHES", BATCHES[:6])
    with pytest.raises(ValueError, match="18 items are done, but now there are 6"):
        start(2, tmp_path, kind)


@pytest.mark.parametrize("done", [0, 6])
def test_items_that_train(tmp_path, done):
    """A start after a fault would train on them twice, in silence: calls raise, at a first start too."""

    def trained(run):
        for at, batch in enumerate(minibatches()):
            yield run.take(batch, at)

    def iterated(run):
        yield from run.iterate()

    kinds = {
        "generator": trained,
        "generator over a loop": iterated,
        "bar": lambda run: Bar(run.iterate()),
        "bar of items": lambda run: enumerate(Bar(run.step.stream(items(run)))),
        "map": lambda run: map(run.take, BATCHES),
        "zip": lambda run: zip(range(99), trained(run), strict=False),
        "lists": lambda run: Bar(run.iterate(per_launch=3)),
    }
    if done:
        start(2, tmp_path, stop=done)
    for name, make in kinds.items():
        place = tmp_path if done else tmp_path / name
        with pytest.raises(synk.SynkError, match=r"on_part: .* while synk.resume asks .*Put synk.resume inside: `for"):
            start(2, place, make=make)
        assert done or not saved_in(place)
    assert len(start(2, tmp_path, make=lambda run: minibatches())[2]) == len(BATCHES) - done


@pytest.mark.filterwarnings("ignore:.*this loop has the batches of an earlier one")
def test_a_bar_around_the_loop(tmp_path):
    """It trains on all items, as a function of what is left may do itself."""
    with synk.simulate(2):
        run = Run()
        bar = Bar(synk.resume(minibatches(), run.variables, folder=tmp_path / "a", save_every=1e-9))
        assert len([run.take(batch, at) for at, batch in enumerate(bar)]) == len(BATCHES)
        left = lambda done, extra: Bar(run.iterate())  # noqa: E731
        assert len([*synk.resume(left, run.variables, folder=tmp_path / "b")]) == len(BATCHES)
        assert run.counts.value.tolist() == [2 * EPOCHS] * ROWS


def test_a_loop_that_has_begun(tmp_path):
    """Its first items cannot be left out any more."""

    def begun(run):
        results = run.iterate()
        next(results)
        return results

    start(2, tmp_path, stop=6)
    with pytest.raises(synk.SynkError, match="this loop has begun"):
        start(2, tmp_path, make=begun)


def test_extra(tmp_path):
    """What `extra` returns at a save comes back with it; a function of both makes what is left."""
    taken, given = [0], []

    def left(done, extra):
        given.append((done, extra))
        taken[0] = (extra or {"taken": 0})["taken"]
        for batch in BATCHES[taken[0] :]:
            taken[0] += 1
            yield batch

    def made(run):
        return left

    _, first, _ = start(2, tmp_path, make=made, stop=7, extra=lambda: {"taken": np.int64(taken[0])})
    run, loop, _ = start(3, tmp_path, make=made, extra=lambda: {"taken": taken[0]})
    assert (first.extra, loop.extra, given) == (None, {"taken": 7}, [(0, None), (7, {"taken": 7})])
    assert run.values["counts"].tolist() == [EPOCHS] * ROWS


@pytest.mark.filterwarnings("ignore:.*this loop has the batches of an earlier one")
def test_two_loops(tmp_path):
    """Loops in a row go on each by itself; two in one folder raise, and so do nested ones."""
    for stop in (5, None):
        synk.close()
        with synk.simulate(2):
            run = Run()
            for part in ("a", "b"):
                for at, batch in enumerate(
                    synk.resume(minibatches(), run.variables, folder=tmp_path / part, save_every=1e-9)
                ):
                    run.take(batch, at)
                    checkpoint_files.WRITER.wait_quietly()
                    if part == "b" and at == stop:
                        break
            if stop is None:
                assert run.counts.value.tolist() == [2 * EPOCHS] * ROWS
            with pytest.raises(synk.SynkError, match="a loop before saves in"):
                synk.resume(minibatches(), run.variables, folder=tmp_path / "a")
    with synk.simulate(2), pytest.raises(synk.SynkError, match=r"another loop of synk.resume ran inside"):
        run = Run()
        for i in synk.resume(range(3), run.variables, folder=tmp_path / "outer"):
            for _ in synk.resume(range(3), run.variables, folder=tmp_path / f"inner{i}"):
                pass


def test_a_folder_of_save(tmp_path):
    """It does not say which items are done; no variable is touched."""
    with synk.simulate(2):
        run = Run()
        synk.save(tmp_path, run.variables, step=3, extra={"epoch": 2})
        run.w.value = np.ones(2, np.float32)
        with pytest.raises(ValueError, match=r"made by synk\.save"):
            synk.resume(minibatches(), run.variables, folder=tmp_path)
        assert run.w.value.tolist() == [1, 1]


def test_other_variables(tmp_path):
    """A variable that was renamed raises what synk.load says, nothing is overwritten, and the right ones still load."""
    start(2, tmp_path, stop=4)
    with synk.simulate(2):
        with pytest.raises(ValueError, match="has no other"):
            synk.resume(minibatches(), {"other": Run().w}, folder=tmp_path)
        assert synk.resume(minibatches(), Run().variables, folder=tmp_path).done == 4


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "steps is 3", {"steps": 3}),
        (TypeError, "variables is", {"variables": [1]}),
        (ValueError, "save_every is 0", {"save_every": 0}),
        (ValueError, "save_every is '1'", {"save_every": "1"}),
        (ValueError, "keep is 0", {"keep": 0}),
        (TypeError, "extra is", {"extra": {"a": 1}}),
        (NotADirectoryError, "give a folder", {"folder": __file__}),
        (TypeError, "what steps returned", {"steps": lambda done, extra: 3}),
    ],
)
def test_wrong_arguments(tmp_path, error, match, arguments):
    """They raise before anything is loaded."""
    with synk.simulate(2), pytest.raises(error, match=match):
        synk.resume(**{"steps": range(3), "variables": Run().variables, "folder": tmp_path} | arguments)


def test_extra_that_json_changes(tmp_path):
    """It raises at the save."""
    with pytest.raises(TypeError, match=r"synk.resume: extra holds"):
        start(2, tmp_path, extra=lambda: (1, 2))


def test_extra_that_ends_an_iterator(tmp_path):
    """The loop does not seem to have ended."""
    with pytest.raises(RuntimeError, match=r"synk.resume: extra raised StopIteration"):
        start(2, tmp_path, extra=lambda: next(iter([])))


def test_sigterm(tmp_path):
    """All is saved at the next item, the program ends with 143, and the signal has its handler of before again."""
    before, seen = signal.getsignal(signal.SIGTERM), []
    with synk.simulate(2), pytest.raises(synk.errors.Preempted) as stopped:
        run = Run()
        for at, batch in enumerate(synk.resume(minibatches(), run.variables, folder=tmp_path)):
            seen.append(run.take(batch, at))
            if at == 6:
                os.kill(os.getpid(), signal.SIGTERM)
    assert (stopped.value.code, len(seen), saved_in(tmp_path)) == (143, 7, [7])
    assert signal.getsignal(signal.SIGTERM) == before
    run, _loop, losses = start(3, tmp_path)
    assert min(losses) == 7 and run.values["counts"].tolist() == [EPOCHS] * ROWS


def test_sigterm_has_its_handler_again(tmp_path):
    """After a loop that ended or was left."""
    before = signal.getsignal(signal.SIGTERM)
    for stop in (3, None):
        start(2, tmp_path, stop=stop)
        assert signal.getsignal(signal.SIGTERM) == before


def test_local_steps(tmp_path):
    """A save in time waits for the average, so it loads into any number of replicas."""

    def loss(w, x):
        return jnp.mean((w[None] - x) ** 2)

    for n, stop in ((2, 8), (3, None)):
        synk.close()
        with synk.simulate(n):
            train = synk.contrib.local_steps(loss, np.zeros(2, np.float32), optax.sgd(0.1), every=4)
            loop = synk.resume(
                train.iterate(X, batches=minibatches()), train.variables, folder=tmp_path, save_every=1e-9
            )
            assert (loop.done, train.steps) == ((0, 0) if n == 2 else (8, 8))
            for _ in loop:
                checkpoint_files.WRITER.wait_quietly()
                if loop.done == stop:
                    break
            assert stop or (train.steps == len(BATCHES) and train.params.value.shape == (2,))
        assert all(int(path.name[5:]) % 4 == 0 or not stop for path in tmp_path.glob("step-*"))


# Saves that fail, and folders of others.


def saved_in(folder):
    return [int(path.name[5:]) for path in sorted(folder.glob("step-*"))]


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full for as long as the dictionary says so."""
    state, wrote = {"full": False, "failed": 0}, checkpoint_files._write_arrays

    def write(*arguments):
        if state["full"]:
            state["failed"] += 1
            raise OSError(28, "No space left on device")
        return wrote(*arguments)

    monkeypatch.setattr(checkpoint_files, "_write_arrays", write)
    return state


def test_a_save_that_fails_is_tried_again(tmp_path, disk, capsys):
    """At the next save; lines say which have failed, and all items are done."""
    with synk.simulate(2):
        run = Run()
        loop = synk.resume(minibatches(), run.variables, folder=tmp_path, save_every=1e-9, keep=None)
        for at, batch in enumerate(loop):
            run.take(batch, at)
            checkpoint_files.WRITER.wait_quietly()
            disk["full"] = at in (4, 5)
    assert saved_in(tmp_path) == [i for i in range(1, len(BATCHES) + 1) if i not in (5, 6)]
    said = capsys.readouterr().err
    assert re.findall(r"the save after (\d+) items has failed \(No space left on device", said) == ["5", "6"]


@pytest.mark.parametrize("how", ["end", "SIGTERM"])
def test_the_last_save_comes_whatever_failed_before(tmp_path, disk, how):
    """The end of a loop and a SIGTERM save, though all saves before have failed."""
    disk["full"] = True
    with synk.simulate(2), suppress(synk.errors.Preempted):
        run = Run()
        for at, batch in enumerate(synk.resume(minibatches(), run.variables, folder=tmp_path, save_every=1e-9)):
            run.take(batch, at)
            if at == 7 and how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoint_files.WRITER.wait_quietly()
            disk["full"] = at < (7 if how == "SIGTERM" else len(BATCHES) - 1)
    assert disk["failed"] >= 6 and saved_in(tmp_path) == [8 if how == "SIGTERM" else len(BATCHES)]


def test_a_loop_that_raised_raises_again(tmp_path, disk):
    """It never seems to have ended, be it at its last save or at an item."""

    def broken():
        yield from BATCHES[:2]
        raise ZeroDivisionError("no more")

    with synk.simulate(2):
        run, disk["full"] = Run(), True
        for steps, error in ((minibatches(), OSError), (broken(), ZeroDivisionError)):
            loop = synk.resume(steps, run.variables, folder=tmp_path / error.__name__, save_every=None)
            with pytest.raises(error):
                [run.take(batch) for batch in loop]
            for _ in range(2):
                with pytest.raises(synk.SynkError, match=rf"this loop has raised {error.__name__}\("):
                    next(loop)


def test_a_folder_that_cannot_be_written_to():
    """It raises before the loop."""
    with synk.simulate(2), pytest.raises(OSError, match=r"synk.resume: nothing can be written to its folder"):
        synk.resume(range(3), Run().variables, folder="/proc/run")


def test_the_newest_whole_checkpoint(tmp_path):
    """A warning names the damaged one, and items after the one before it are done again."""
    start(2, tmp_path, stop=7, keep=3)
    (tmp_path / "step-00000007" / "arrays.npz").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"step-00000007: arrays.npz is not what was written.* Step 6 is loaded"):
        run, _, losses = start(3, tmp_path)
    assert min(losses) == 6 and run.values["counts"].tolist() == [EPOCHS] * ROWS


OTHER_RUN = """
import sys, time, numpy as np, synk
w = synk.shared(np.zeros(2, np.float32), name="w")
for name in ("left", "run"):
    for _ in synk.resume(range(9), {"w": w}, folder=sys.argv[1] + name):
        if name == "left":
            break
        print("begun", flush=True)
        time.sleep(60)
"""


def test_two_runs_in_one_folder(tmp_path, monkeypatch):
    """The second raises and names the first, by any path to it. It waits for one that ends, not for one that has left."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    command = [sys.executable, "-c", OTHER_RUN, f"{tmp_path}/"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other, synk.simulate(2):
        try:
            assert other.stdout.readline() == "begun\n"
            monkeypatch.setattr(folder_lock, "PATIENCE", 0.0)
            for name in ("run", "link"):
                with pytest.raises(synk.SynkError, match=rf"run saves in .*{name}: process {other.pid} on .*, since"):
                    synk.resume(range(3), Run().variables, folder=tmp_path / name)
            assert len([*synk.resume(range(3), Run().variables, folder=tmp_path / "left")]) == 3
            monkeypatch.setattr(folder_lock, "PATIENCE", 60.0)
            threading.Timer(0.3, other.kill).start()
            assert len([*synk.resume(range(3), Run().variables, folder=tmp_path / "run")]) == 3
        finally:
            other.kill()


def test_one_folder_by_another_path(tmp_path):
    """Two loops of one group raise, and a loop loses its folder to a later one of another group."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with synk.simulate(2):
        first = synk.resume(range(3), Run().variables, folder=tmp_path / "run")
        with pytest.raises(synk.SynkError, match="a loop before saves in"):
            synk.resume(range(3), Run().variables, folder=tmp_path / "link")
    with synk.simulate(3):
        assert len([*synk.resume(range(3), Run().variables, folder=tmp_path / "link")]) == 3
    for _ in range(2):
        with pytest.raises(synk.SynkError, match=r"a later loop saves in .*/run\."):
            next(first)


def test_a_disk_without_locks(tmp_path, monkeypatch, capsys):
    """A line says so, and the loop goes on."""

    def lockf(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    assert len(start(2, tmp_path)[2]) == len(BATCHES)
    assert capsys.readouterr().err.count("has no locks (No locks available), so a second run in it goes unnoticed") == 1


def test_times_of_saves(tmp_path, monkeypatch):
    """Saves come at their times, though items take more and more time, and few meetings plan them."""
    # By a clock of the test: there is no other way to pass hours.
    clock, met = [0.0], []
    monkeypatch.setattr(meetings, "monotonic", lambda: clock[0])
    plan = meetings.Meetings.plan
    monkeypatch.setattr(meetings.Meetings, "plan", lambda self, done: met.append(done) or plan(self, done))
    times, wrote = [], resume.write
    monkeypatch.setattr(resume, "write", lambda *args: times.append(clock[0]) or wrote(*args))
    with synk.simulate(2):
        variables = {"w": synk.shared(0.0, "w")}
        for i in synk.resume(range(3000), variables, folder=tmp_path, save_every=60.0):
            checkpoint_files.WRITER.wait_quietly()
            clock[0] += 5.0 if i == 0 else 0.05 + i * 1e-4
    *timed, _ = times
    assert len(timed) == int(clock[0] / 60)
    np.testing.assert_allclose(np.diff([0, *timed]), 60, atol=3)
    assert len(met) < 16 * len(times)


def test_loops_in_threads_leave_no_mark(tmp_path):
    """While one thread leaves items out, another one may call functions."""
    start(2, tmp_path, stop=6)
    synk.close()
    with synk.simulate(2):
        other, run, may_go, losses = Run(), Run(), threading.Event(), []

        def slowly():
            for batch in BATCHES:
                may_go.wait(5)
                yield batch

        def call():
            losses.append(other.take(BATCHES[0]))
            may_go.set()

        thread = threading.Thread(target=call)
        thread.start()
        assert synk.resume(slowly(), run.variables, folder=tmp_path).done == 6
        thread.join()
    assert len(losses) == 1
