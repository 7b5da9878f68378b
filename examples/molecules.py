"""Molecules as padded graphs: a message-passing network with segment sums, four devices as on one.

    python examples/molecules.py    # needs the extra `examples`

A row is a graph: atoms and bonds, padded to the largest, with how many there are of each. Padding bonds lead to an atom
that no molecule has, so segment sums drop them. The loss is a mean over atoms, not over molecules: `synk.Weighted`.
Prints the error of predicted charges, and the largest difference of any weight from one device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import synk
import synk.train

ROWS, BATCH, EPOCHS, ATOMS, BONDS, KINDS, SIZE = 603, 67, 12, 12, 24, 4, 32
rng = np.random.default_rng(0)
count = rng.integers(3, ATOMS + 1, ROWS)
kind = rng.integers(0, KINDS, (ROWS, ATOMS)).astype(np.int32)
start, end = (rng.random((2, ROWS, BONDS)) * count[:, None]).astype(np.int32)
end[np.arange(BONDS) >= 2 * count[:, None]] = ATOMS
pull = rng.normal(size=(KINDS, KINDS))  # of one kind of atom on another
charge = np.zeros((ROWS, ATOMS + 1), np.float32)
for row in range(ROWS):
    np.add.at(charge[row], end[row], pull[kind[row, start[row]], kind[row, end[row] % ATOMS]])


def network(params, kind, start, end):
    """Return a charge for each atom of one molecule."""
    atoms = params["kinds"][kind]
    pairs = jnp.concatenate([atoms[start], atoms[end % ATOMS]], 1)
    messages = jax.nn.silu(pairs @ params["message"])
    return jax.ops.segment_sum(messages, end, ATOMS) @ params["last"]


def loss(params, kind, start, end, charge, count):
    error = (jax.vmap(network, (None, 0, 0, 0))(params, kind, start, end) - charge) ** 2
    is_atom = jnp.arange(ATOMS) < count[:, None]
    return synk.Weighted((error * is_atom).sum() / count.sum(), count.sum())


def train(replicas):
    """Return the weights and the loss of each batch."""
    shapes = {"kinds": (KINDS, SIZE), "message": (2 * SIZE, SIZE), "last": (SIZE,)}
    params = {name: np.random.default_rng(1).normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    with synk.init(replicas):
        step = synk.train.step(loss, params, optax.adam(0.01))
        rows, batches = (kind, start, end, charge[:, :ATOMS], count), synk.minibatches(ROWS, BATCH, epochs=EPOCHS)
        losses = [float(value) for value in step.iterate(*rows, batches=batches)]
        return jax.device_get(step.params.value), losses


(four, losses), (one, _) = train(4), train(1)
largest = max(np.abs(four[name] - one[name]).max() for name in four)
print(f"mean squared error of a charge {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0] / 10 and largest < 1e-3
print(f"largest difference {largest:.0e}")
