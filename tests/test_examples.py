"""Every example runs as its docstring says, in a process of its own."""

import importlib
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import harness
from .helpers import slow

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TABLES = EXAMPLES.parent / "docs" / "coming_from.md"
INDEX = TABLES.with_stem("examples")

# How the last line begins; each asserts its own numbers, and most need the extra `examples`.
LAST = {
    "mnist.py": "Test accuracy 9",
    "resume.py": "Largest difference of the final weights: 0.0",
    "ports/synkhronos_demos.py": "6 of 6 passed",
    "ports/mnist_cpu_data.py": "Test accuracy 9",
    "ports/mnist_gpu_data.py": "Test accuracy 9",
    "ports/mxnet_lenet.py": "Test accuracy 9",
    "ports/dl4j_parallel_wrapper.py": "Test accuracy 9",
    "ports/torch_data_parallel.py": "Test accuracy 9",
    "ports/theano_alexnet.py": "Validation error ",
    "ports/theano_functions.py": "Final model: 100.0 % right",
    "evaluate_exactly.py": "largest gap 0.00%",
    "ports/skepu_skeletons.py": "11 of 11 right",
    "exact_statistics.py": "largest gap 0.00%",
    "batch_norm.py": "largest difference ",
    "simclr.py": "largest difference ",
    "flax_nnx.py": "Test accuracy 9",
    "equinox_mlp.py": "Test accuracy 9",
    "keras_model.py": "Test accuracy 9",
    "imagenet_style.py": "Test accuracy 9",
    "char_lm.py": "Perplexity 9.",
    "gpt_in_shards.py": "largest difference of parameters",
    "numpyro_chains.py": "8 chains: r_hat 1.0",
    "blackjax_chains.py": "8 chains: r_hat 1.0",
    "diffrax_ensemble.py": "10 orbits: 0.00",
    "ports/pytensor_demos.py": "5 of 5 passed",
    "ports/pytensor_tutorials.py": "4 of 4 as on one device",
}


COMPUTING = ("mnist.py", "ports/mxnet_lenet.py", "char_lm.py", "ports/dl4j_parallel_wrapper.py")


def run(name, **environment):
    """What an example prints; it asserts its own numbers. Those that compute for longer than they compile have XLA
    optimise their programs, unlike what conftest.py asks for."""
    if name in COMPUTING:
        flags = os.environ.get("XLA_FLAGS", "").split()
        environment["XLA_FLAGS"] = " ".join(flag for flag in flags if "emitters" in flag)
    done = harness.python(EXAMPLES / name, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("replicas", [slow(1), 8])
def test_mean(replicas):
    """The same mean on one device and on eight."""
    assert "mean 4.5, serially 4.5" in run("mean.py", JAX_NUM_CPU_DEVICES=str(replicas))


PAIRS = (
    "imagenet.py",
    "classification.py",
    "contrastive.py",
    "nerf.py",
    "ppo.py",
    "stoix.py",
    "score_sde.py",
    "ferminet.py",
    "chains.py",
    "evolution.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_from_pmap_on_eight(name):
    """Each compares a program by pmap with its port, and asserts equal numbers, on eight devices too."""
    pytest.importorskip("optax", reason="install the extra `examples`")
    assert run(f"pmap/{name}", DEVICES="8").splitlines()[-1].startswith("largest difference")


# Examples that are right, and have no serial answer to rounding.
NO_LAW = {
    "blackjax_chains.py": "chains of NUTS magnify the rounding of a vectorised step",
    "numpyro_chains.py": "chains of NUTS magnify the rounding of a vectorised step",
    "imagenet_style.py": "its batch norm has the statistics of each replica's rows",
}
ON_RAY = {"ray_elastic.py", "ray_train.py"}  # which tests/distributed/test_ray.py runs


# Programs of at most 60 lines, by what people look for; each prints last how far it is from one device.
COMPARED = (
    "vision_transformer.py",
    "lora.py",
    "vae.py",
    "ddpm.py",
    "gan.py",
    "distillation.py",
    "clip.py",
    "dqn.py",
    "sweep.py",
    "population.py",
    "maml.py",
    "federated.py",
    "kmeans.py",
    "gaussian_mixture.py",
    "gaussian_process.py",
    "pinn.py",
    "hessian.py",
    "kalman_filter.py",
    "hmm.py",
    "molecules.py",
    "unequal_texts.py",
    "unequal_odes.py",
    "unequal_graphs.py",
    "calibration.py",
    "training_loop.py",
    "torch_dataloader.py",
    "huggingface_dataset.py",
    "grain_loader.py",
)


def announced(name):
    """How the last line of an example begins."""
    if name == "pmap/unchanged.py":
        return f"{len(PAIRS)} of {len(PAIRS)} run unchanged"
    if name in COMPARED or name.startswith("pmap/"):
        return "largest difference"
    return "synk" if name.startswith("compare/") else LAST.get(name, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")} - ON_RAY))
def test_examples(name):
    """Each prints what it announces; under the law each first call is the serial one, and none that is right is stopped."""
    for needed in re.findall(r"^\s*(?:import|from) (\w+)", (EXAMPLES / name).read_text(), re.MULTILINE):
        if find_spec(needed) is None and not (EXAMPLES / name).with_name(f"{needed}.py").is_file():
            pytest.skip(f"{needed} is not installed")
    printed = run(name, **{} if name in NO_LAW else {"SYNK_CHECK": "law"})
    assert printed.splitlines()[-1].startswith(announced(name))


def test_programs_are_short():
    """Whoever finds one reads all of it."""
    lengths = {name: len((EXAMPLES / name).read_text().splitlines()) for name in COMPARED}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


# What people type who look for a program.
WORDS = (
    "language model, transformer, ResNet, vision transformer, LoRA, fine-tuning, frozen layers, VAE, diffusion, DDPM, "
    "score matching, GAN, distillation, contrastive, SimCLR, CLIP, DQN, PPO, replay buffer, MCMC, NUTS, ensembles, "
    "hyperparameter sweep, k-means, EM, Gaussian process, kernel ridge, PINN, second derivatives, Hessian, "
    "Kalman filter, HMM, molecules, graphs, segment sums, padded graphs, MAML, population-based training, "
    "federated averaging, unequal length, budget of tokens, group by length, local SGD, AUC, top-k, calibration, confusion, validation, logging, TensorBoard, wandb, "
    "tqdm, Hugging Face datasets, grain, torch DataLoader"
).split(", ")


@pytest.mark.skipif(not INDEX.is_file(), reason="the documentation is not in this copy")
def test_the_page_names_every_program():
    """Each has a line, with a word in bold that stands in the first line of the program too."""
    text = INDEX.read_text()
    named = re.findall(r"\(\.\./examples/([\w/]+\.py)\)", text)
    assert sorted(named) == sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py"))
    for name in COMPARED:
        ((word,),) = [re.findall(r"\*\*(.+?)\*\*", line) for line in text.splitlines() if f"examples/{name})" in line]
        assert word.lower() in (EXAMPLES / name).read_text().splitlines()[0].lower(), name


@pytest.mark.skipif(not INDEX.is_file(), reason="the documentation is not in this copy")
def test_the_page_has_the_words_that_people_type():
    """Those of a search are on the page of examples, most of them in a heading."""
    text = INDEX.read_text().lower()
    assert [word for word in WORDS if word.lower() not in text] == []


@pytest.mark.skipif(not TABLES.is_file(), reason="the documentation is not in this copy")
def test_tables_name_what_there_is():
    """Each of synk's names in the tables exists, and each example."""
    text = TABLES.read_text() + TABLES.with_stem("coming_from_pmap").read_text()
    for name in set(re.findall(r"\bsynk((?:\.(?:train|contrib|errors|typing|stats))*)\.(\w+)", text)):
        assert name[1] == "pytensor" or getattr(importlib.import_module(f"synk{name[0]}"), name[1])
    named = set(re.findall(r"\(\.\./examples/((?:ports/)?\w+\.py)\)", text))
    assert named == {name for name in LAST if name.startswith("ports/")} | {
        "evaluate_exactly.py",
        "exact_statistics.py",
    }
