"""Molecules of unequal size: graphs under a budget of atoms, message passing, four devices as on one.

    python examples/unequal_graphs.py    # needs the extra `examples`

A batch has molecules of like size, padded to their bucket, and as many as a budget of atoms allows. The loss is a mean
over atoms. Prints the real atoms a second beside those of padded batches, and the difference from one device.
"""

from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

ROWS, KINDS, SIZE, BUDGET, MOST = 300, 4, 32, 1024, 64
rng = np.random.default_rng(0)
atoms = np.clip(rng.lognormal(2.5, 0.8, ROWS), 3, MOST).astype(np.int32)
kind = rng.integers(0, KINDS, (ROWS, MOST)).astype(np.int32)
bonds = (rng.random((2, ROWS, 2 * MOST)) * atoms[:, None]).astype(np.int32)  # two an atom
pull, charge, bonds = rng.normal(size=(KINDS, KINDS)), np.zeros((ROWS, MOST), np.float32), bonds.swapaxes(0, 1)
for row, count in enumerate(2 * atoms):
    start, end = bonds[row, :, :count]
    np.add.at(charge[row], end, pull[kind[row, start], kind[row, end]])


def network(params, kind, bonds, atoms):  # bonds of padding lead to an atom that there is not
    hidden, (start, end) = params["kinds"][kind], bonds
    messages = jax.nn.silu(jnp.concatenate([hidden[start], hidden[end]], 1) @ params["message"])
    end = jnp.where(jnp.arange(len(end)) < 2 * atoms, end, len(kind))
    return jax.ops.segment_sum(messages, end, len(kind)) @ params["last"]


def loss(params, kind, bonds, charge, atoms):
    error = (jax.vmap(network, (None, 0, 0, 0))(params, kind, bonds, atoms) - charge) ** 2
    return synk.Weighted((error * (jnp.arange(kind.shape[1]) < atoms[:, None])).sum() / atoms.sum(), atoms.sum())


def train(replicas, order, padded_to):
    shapes = {"kinds": (KINDS, SIZE), "message": (2 * SIZE, SIZE), "last": (SIZE,)}
    params = {name: np.random.default_rng(1).normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    with synk.init(replicas):
        step, losses = synk.train.step(loss, params, optax.adam(0.01)), []
        for _ in range(4):
            begin = perf_counter()
            batches = ((kind[r, : (n := padded_to(r))], bonds[r, :, : 2 * n], charge[r, :n], atoms[r]) for r in order)
            losses += [float(value) for value in step.stream(batches)]
        return jax.device_get(step.params.value), losses, perf_counter() - begin


order = synk.minibatches(ROWS, cost=atoms, budget=BUDGET, buckets=[24, MOST], drop_last=True)
(four, losses, seconds), (one, _, _) = train(4, order, order.longest), train(1, order, order.longest)
_, _, fixed = train(4, synk.minibatches(ROWS, BUDGET // MOST), lambda rows: MOST)
largest = max(np.abs(four[name] - one[name]).max() for name in four)
print(f"real atoms a second: {atoms.sum() / seconds:,.0f}; padded to the largest {atoms.sum() / fixed:,.0f}")
assert losses[-1] < losses[0] / 2 and largest < 1e-3
print(f"largest difference {largest:.0e}")
