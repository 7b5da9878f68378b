"""Ctrl-C in a training loop that donates its buffers: mostly, the model is gone.

    python examples/compare/interrupted_loop.py

Twenty times each: a loop of small steps is interrupted after a random time, and its parameters are read. By `jax.jit`
with `donate_argnums`, as loops are written, and by synk, whose updates take effect all or none.
"""

import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import synk

TIMES = 20
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell takes from what runs behind it
rows = np.random.default_rng(0).normal(size=(64, 50)).astype(np.float32)


def interrupted(step, after):
    """Steps until Ctrl-C."""
    timer = threading.Timer(after, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        while True:
            step()
    except KeyboardInterrupt:
        return


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def descend(params, gradient):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)


def initial():
    return {"w": jnp.ones((50, 20)), "b": jnp.zeros(20)}


plain = jax.jit(lambda params, x: descend(params, jax.grad(loss)(params, x)), donate_argnums=0)
synk.init(1)
held = synk.shared(initial(), name="params")
step = synk.function(lambda x: jax.grad(loss)(held.value, x), reduce="mean")


@step.then
def update(gradient):
    held.value = descend(held.value, gradient)


def lost_by_plain(after):
    params = initial()

    def one():
        nonlocal params
        params = plain(params, rows)

    interrupted(one, after)
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def lost_by_synk(after):
    held.value = initial()
    interrupted(lambda: step(rows), after)
    return not np.isfinite(jax.tree.leaves(held.value)[0]).all()  # raises if it is gone


plain(initial(), rows), step(rows)
found = {}
for name, lost in ((f"jax {jax.__version__}, jit with donate_argnums", lost_by_plain), ("synk", lost_by_synk)):
    waits = np.random.default_rng(1).uniform(0.02, 0.05, TIMES)
    found[name] = sum(lost(after) for after in waits)
    print(f"{name}: lost {found[name]} of {TIMES} models")
    time.sleep(0.1)
assert found["synk"] == 0
