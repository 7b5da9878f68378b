"""The digits on two machines of Ray's; one is lost in the midst, and the training goes on with the worker that is left.

Checkpoints load into any number of replicas, and every step is the serial one for any number, so nothing else changes.
The machines are Ray's own simulation of two on this one. Prints from which step the second attempt went on, with how
many replicas (1), and the test accuracy, 90 % or more. Needs the extra `ray`.

    python examples/ray_elastic.py
"""

import os

import ray_train  # type: ignore[import]  # the example beside this one

# Ray asks for two workers once more before it knows that a machine is lost, and would wait a minute for them.
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "10"

import ray  # type: ignore[import]  # isort: skip  # the extra may be missing
from ray.cluster_utils import Cluster  # type: ignore[import]  # isort: skip


def main():
    """A training that asks for two workers, and goes on with one."""
    machine = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=machine)
    other = cluster.add_node(num_cpus=1, object_store_memory=200 << 20)
    ray.init(address=cluster.address)
    found = ray_train.fit((1, 2), lost=other.node_id)  # from one worker to two, as many as there are machines for
    ray.shutdown()
    cluster.shutdown()
    assert found["replicas"] == 1


if __name__ == "__main__":
    main()
