"""Every benchmark but that of processes runs, with the smallest settings there are; what it counts and predicts is
right."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import synk

BENCH = Path(__file__).resolve().parent.parent / "bench"
# What conftest.py and CI set for tests is not for these processes.
PLAIN = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}

pytest.importorskip("flax", reason="the benchmarks train with it: install the extra `bench`")
pytest.importorskip("matplotlib", reason="the benchmarks draw with it: install the extra `bench`")


def run(script, *arguments):
    """What a benchmark prints, from a process of its own."""
    done = subprocess.run(
        [sys.executable, BENCH / script, *map(str, arguments)],
        env=PLAIN | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """All benchmarks but the GPU's, once: the folder of results and what they found."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("weak scaling is measured on two cores of Linux")
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
    assert set(found) == set(module("run").TRIAL) == set(module("run").SHORT) - {"processes"}
    for name, result in found.items():
        assert result["command"].startswith(f"python bench/{name}.py")
        assert name == "model" or len(result["load before"]) == 3


@pytest.mark.slow
def test_pictures_and_table(trial):
    """The pictures are drawn; the table takes the place of what was between the marks, and of nothing else."""
    folder, _ = trial
    assert {path.stem for path in folder.glob("*.png")} == {"scaling", "overhead", "selection", "slices"}
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
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("nan.py", ["--replicas", 1, "--rounds", 2]),
        ("blocks.py", ["--replicas", 2, "--rounds", 2]),
        ("wire.py", ["--replicas", 2, "--seeds", 1, "--models", "perceptron"]),
        (
            "sharded.py",
            ["--replicas", 2, "--rounds", 2, "--models", "perceptron", "--optimizers", "AdamW, clipped", "--steps", 9],
        ),
        ("stream.py", ["--rounds", 2, "--steps", 4]),
        ("pytensor_graphs.py", ["--rounds", 2, "--steps", 12, "--models", "perceptron"]),
        ("model.py", ["--step-ms", 29.4, "--bytes", 1e6, "--wires", BENCH / "results" / "wires-16-h100.json"]),
    ],
)
def test_the_others_run(script, arguments):
    """Those that stand by themselves."""
    if script == "pytensor_graphs.py":
        pytest.importorskip("pytensor", reason='install the extra "pytensor"')
    assert run(script, *arguments).count("\n") > 1


@pytest.mark.slow
def test_gpu_runs(tmp_path):
    """The command for GPUs runs on CPUs too, in small."""
    run("gpu.py", "--small", "--json", tmp_path / "gpu.json")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["overhead"]["results"] and found["selection"][0]["GB/s"]["raw copy"] > 0
    assert {"synk", "serial jit"} <= set(found["resnet50"][0]["against"])


def test_collective_bytes(module):
    """Bytes are read from the program: here 3 x 4 numbers summed, and 5 gathered by each of four."""
    mesh = synk.init(4).mesh

    def body(x, y):
        return jax.lax.psum(x, "replica"), jax.lax.all_gather(y, "replica", tiled=True)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("replica"), out_specs=P(), check_vma=False)
    compiled = jax.jit(mapped).lower(np.ones((12, 4), np.float32), np.ones(20, np.int32)).compile()
    assert sorted(module("resnet").collectives(compiled)) == [("all-gather", 80), ("all-reduce", 48)]


def test_predictions_of_published_runs(module, capsys):
    """From one GPU's step time the model tells those of 2, 4 and 8 to 6 %, and to 2 % mostly."""
    errors = [abs(row["error"]) for row in module("model").check()]
    assert max(errors) < 0.06 and np.median(errors) < 0.02
    assert "error: median" in capsys.readouterr().out


def test_predictions_follow_the_link_model(module):
    """One replica communicates nothing; what overlaps costs less; more bytes cost more."""
    model = module("model")
    predict = partial(model.predict, model.P100, step_ms=100)
    small, large = [("all-reduce", 1e6)] * 4, [("all-reduce", 1e8)] * 4
    assert predict(1, talk=large, overlap=False)["ms"] == 100
    plain, hidden = (predict(8, talk=large, overlap=overlap)["ms"] for overlap in (False, True))
    assert 100 < hidden < plain and predict(8, talk=small, overlap=False)["ms"] < plain


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


def test_a_peer_that_is_not_there(module, monkeypatch, tmp_path):
    """A library that is not installed is named, and left out."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    elsewhere = module("turns").Elsewhere(
        [sys.executable, BENCH / "peers.py", "torch", "--blocks", "1"], PYTHONPATH=str(tmp_path)
    )
    assert not elsewhere.is_ready() and elsewhere.about == {"missing": "torch"}
    elsewhere.close()
