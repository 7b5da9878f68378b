"""Joining: a process that is started in the place of a lost one takes values and place in the loop from the others."""

import re
import textwrap

import jax
import numpy as np
import pytest

import synk

from . import gang

PROGRAM = """
    import os, signal, sys, time
    import numpy as np
    import synk

    synk.init(distributed=True, elastic=True)
    is_first, total = os.environ["SYNK_ATTEMPT"] == "0", synk.shared(np.float64(0), name="total")
    names = {"total": total, "key": synk.shared(np.arange(int(os.environ.get("KEYS", "2")) if not is_first else 2))}
    add = synk.function(lambda x: x.sum(), inputs=["x"])

    @add.then
    def add(sum):
        total.value = total.value / 2 + sum

    rest = 5
    count, is_odd = int(os.environ["SYNK_NUM_PROCESSES"]), "KEYS" in os.environ or "BEGIN" in os.environ
    for step in synk.join(range(0 if is_first else int(os.environ.get("BEGIN", "0")), 10**6), names):
        add(np.arange(13, dtype=np.float64) + step)
        if is_first and step == 10 and os.environ["SYNK_PROCESS_ID"] == os.environ["VICTIM"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        # The others go on alone until it has come, and is gone again where it brings other variables or items.
        rest -= len(add.stats.lost) == 2 if is_odd else step > 10 and synk.group().size == count
        if not rest:
            break
    print("ends at", step, "with", float(total.value), "of", synk.group().size, flush=True)
"""


def launch(tmp_path, count=3, **environment):
    """Run the program on processes. Return the exit code, the output, and what each process that ends says."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    options = ["-n", count, "--elastic", "--restarts", 1]
    with gang.Launcher(tmp_path, *options, file, JAX_ENABLE_X64="1", **environment) as launcher:
        end = launcher.wait(120)[0]
    ends = re.findall(r"\[(\d)\] ends at (\d+) with (\S+) of (\d)", end.output)
    return end.code, end.output, {int(rank): (int(step), float(value), int(size)) for rank, step, value, size in ends}


@pytest.mark.gang
@pytest.mark.parametrize(("count", "victim"), [(3, 0), (3, 2), (2, 1)])
def test_a_process_joins(tmp_path, count, victim):
    """Whichever process was lost, all end with the values of a run in which none was."""
    code, output, ends = launch(tmp_path, count, VICTIM=str(victim))
    assert code == 0 and {*ends} == {*range(count)}, output
    ((last, value, size),) = {*ends.values()}
    want = 0.0
    for step in range(last + 1):
        want = want / 2 + (np.arange(13) + step).sum()
    assert size == count
    np.testing.assert_allclose(value, want, rtol=1e-12)


@pytest.mark.gang
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"KEYS": "3"}, "shape was [2]"),
        ({"BEGIN": "4"}, "begin with (4); the others, at its synk.join number 1, whose items begin"),
    ],
)
def test_a_process_of_another_program_does_not_join(tmp_path, odd, message):
    """Its variables have other shapes, or its items begin elsewhere: it alone raises; the others go on without it."""
    code, output, ends = launch(tmp_path, VICTIM="1", **odd)
    assert code == 0 and {*ends} == {0, 2}, output
    assert message in output and "ValueError" in output


def test_elsewhere_it_is_a_loop(group):
    """In other groups all items come, and nothing else happens."""
    w = synk.shared(np.float32(0), name="w")
    assert [*synk.join("abc", {"w": w})] == ["a", "b", "c"]
    assert [*synk.join("abcde", {"w": w}, start=3)] == ["d", "e"]
    assert [*synk.join(synk.minibatches(5, 2, shuffle=False), {})] != []


@pytest.mark.parametrize(
    ("items", "variables", "start", "error"),
    [(3, {}, 0, "iterable"), ([], [], 0, "mapping"), ([], {}, 0.5, "start is 0.5"), ([], {}, -1, "start is -1")],
)
def test_wrong_arguments(items, variables, start, error):
    """Raise at once."""
    with pytest.raises((TypeError, ValueError), match=error):
        synk.join(items, variables, start=start)


def test_a_waiting_process_saves_nothing(tmp_path, monkeypatch):
    """The others have saved later steps, which a save would put aside."""
    w, group = synk.shared(np.float32(0), name="w"), synk.group()
    monkeypatch.setattr(type(group._peers), "is_waiting", True)
    synk.save(tmp_path / "run", {"w": w}, step=0)
    assert not (tmp_path / "run").exists() and jax.process_index() == 0
