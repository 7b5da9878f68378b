"""Every benchmark runs with the smallest settings, and counts collectives, bytes and flops rightly."""

import importlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import synk

from . import harness

BENCH = Path(__file__).resolve().parent.parent / "bench"

pytest.importorskip("flax", reason="the benchmarks train with it: install the extra `bench`")

STEP = """
import numpy as np, synk

def bench():
    return synk.function(lambda x: x.sum()), np.ones((60, 4), np.float32)
"""


def run(script, *arguments):
    """What a benchmark prints, from a process of its own."""
    done = harness.python(BENCH / script, *arguments, deadline=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """Run all benchmarks but the GPU's once; return the folder and the results."""
    folder = tmp_path_factory.mktemp("bench")
    readme = folder / "README.md"
    readme.write_text("before\n<!-- make bench: begin -->\nold\n<!-- make bench: end -->\nafter\n")
    run("run.py", "--trial", "--results", folder, "--readme", readme)
    (path,) = folder.glob("*.json")
    return folder, json.loads(path.read_text())


@pytest.fixture
def module(monkeypatch):
    """A module beside the benchmarks, imported as they import it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


@pytest.mark.slow
def test_every_bench_is_run(trial, module):
    """None fails, and each says what ran, where, and how busy the machine was."""
    _, found = trial
    assert set(found) == set(module("run").TRIAL) == set(module("run").SHORT)
    for name, result in found.items():
        assert result["command"].startswith(f"python bench/{name}.py")
        assert len(result["load before"]) == 3


@pytest.mark.slow
def test_table(trial):
    """The table replaces the text between the marks, and no other text."""
    folder, _ = trial
    lines = (folder / "README.md").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    assert "| programs compiled after the first step | 0 | 0 | resnet50 |" in lines


@pytest.mark.slow
def test_state_stays_where_it_lies(trial):
    """After the first step nothing is compiled, and no byte of the state copied."""
    figures = trial[1]["resnet50"]["figures"]
    assert figures["recompiled after the first step"] == 0
    assert figures["live bytes grown after the first step"] <= 0  # a few fewer where notes of programs have gone
    assert figures["state donated"] == 1
    assert figures["peak memory / least by hand"] <= 1.02


@pytest.mark.slow
def test_gradients_are_reduced_once(trial):
    """The program of eight replicas communicates gradient bytes once, and under 1 % more."""
    figures = trial[1]["resnet50"]["figures"]
    assert figures["collectives of 8 replicas"] == 1
    assert 1 <= figures["reduced by 8 replicas / gradients"] < 1.01


@pytest.mark.slow
def test_calls_enter_few_functions(trial):
    """What a step enters of synk is counted, and so are the programs that a first step compiles."""
    entered = {row["figure"]: row["synk"] for row in trial[1]["calls"]["results"] if row["unit"] == ""}
    assert 1 <= entered["files of synk entered in it"] <= entered["functions of synk entered in it"] <= 100
    first, again = [row for row in trial[1]["start"]["results"] if "compiled" in row["figure"]]
    assert first["synk"] == again["hand"] >= 1 and first["hand"] >= 1
    # A second start finds all of them in its folder.
    assert again["synk"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("strong", [[], ["--strong"]])
def test_scaling_of_a_step(tmp_path, strong):
    """Each replica has the same number of rows, or all rows are divided."""
    (tmp_path / "train.py").write_text(STEP)
    short = "--replicas=1,3", "--rounds=1", "--steps=2", "--json", tmp_path / "out"
    run("scaling.py", f"{tmp_path / 'train.py'}:bench", *short, *strong)
    results = json.loads((tmp_path / "out").read_text())["results"]
    assert [(case["replicas"], case["rows"]) for case in results] == [(1, 60 if strong else 20), (3, 60)]
    assert results[0]["efficiency"] == 1


@pytest.mark.slow
def test_gpu_runs(tmp_path):
    """The command for GPUs runs on CPUs too, in small: here what no other benchmark has, and the table."""
    parts = ["law", "resnet50", "rows", "resume", "suite", "mock", "blocks"]
    printed = run("gpu.py", "--small", "--parts", ",".join(parts), "--json", tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert {name: found[name]["status"] for name in parts} == dict.fromkeys(parts, 0)
    (gang,) = found["law"]["result"]["gangs"]
    assert gang["processes"] == gang["with a result"] == 2
    assert gang["wrong"] == [] and gang["bits are equal"] and max(gang["differences"].values()) < 1e-5
    assert len(found["law"]["result"]["hashes of blocks"]) == 1
    assert {"synk", "serial jit"} == set(found["resnet50"]["result"]["against"])
    (picked,) = found["rows"]["result"]["picked"]
    assert picked["GB/s"]["raw copy"] > 0 and picked["wrong"] == 0
    again = found["resume"]["result"]
    assert [(0 < member["first"] < 24, member["counts"]) for member in again["members"]] == [(True, [4])] * 2
    assert again["processes ended by the kill"] == 2 and again["furthest from one device"] < 1e-5
    assert found["suite"]["result"]["tests"] > 50
    sizes = {way: [each["replicas"] for each in both] for way, both in found["mock"]["result"]["ways"].items()}
    assert sizes == {"synk": [2, 1], "by hand": [2, 1]}
    table = printed[printed.index("| part |") :]
    assert "no figures" not in table and "ended with" not in table
    assert {line.split(" | ")[0] for line in table.splitlines()[2:]} == {f"| {name}" for name in parts}


def test_gpu_says_what_failed(module, tmp_path, capsys):
    """A part that was stopped, or whose result is cut short, has a line in the table; so has each test that failed."""
    gpu = module("gpu")
    (tmp_path / "out").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase classname="tests.a" name="b">'
        '<failure/></testcase><testcase classname="tests.a" name="c"/></testsuite></testsuites>'
    )
    found = module("record").about("gpu") | {
        "suite": {"status": 1, "seconds": 3, "result": gpu.tests_of(tmp_path / "out")},
        "mock": {"status": "out of time", "seconds": 90, "result": {}},
    }
    gpu.show(found, ["suite", "mock"])
    lines = capsys.readouterr().out.splitlines()
    assert "| suite | tests: passed, failed, skipped | 1, 1, 1 | 0 failed |" in lines
    assert "| mock | ended with | out of time after 90 s | 0 |" in lines
    assert "| mock | has no figures, or not all of them | | |" in lines
    assert lines[-1] == "failed: tests.a.b"


def test_collective_bytes(module):
    """Bytes are read from the program: here 3 x 4 numbers summed, and 5 gathered by each of four."""
    mesh = synk.init(4).mesh

    def body(x, y):
        return jax.lax.psum(x, "replica"), jax.lax.all_gather(y, "replica", tiled=True)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("replica"), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(np.ones((12, 4), np.float32), np.ones(20, np.int32)).compile()
    assert sorted(module("resnet").collectives(compiled)) == [("all-gather", 80), ("all-reduce", 48)]


def test_flops_of_resnet50(module):
    """4.09 thousand million multiplications forward, as the literature has it; thrice that to train."""
    assert module("imagenet").flops(224) == pytest.approx(6 * 4.09e9, rel=1e-2)


def test_a_folder_of_images(module, tmp_path):
    """x.npy and y.npy are mapped, not read; other shapes are refused."""
    imagenet = module("imagenet")
    x, y = imagenet.images(3, 8)
    np.save(tmp_path / "x.npy", x), np.save(tmp_path / "y.npy", y)
    mapped, labels = imagenet.from_folder(tmp_path)
    assert isinstance(mapped, np.memmap) and (mapped == x).all() and (labels == y).all()
    np.save(tmp_path / "y.npy", y[:2])
    with pytest.raises(SystemExit, match=r"x.npy has shape \(3, 8, 8, 3\), y.npy \(2,\)"):
        imagenet.from_folder(tmp_path)
