"""Exit: however a program ends, synk adds nothing to what it prints."""

from textwrap import dedent

import pytest

from . import harness
from .helpers import slow_but

# JAX's registry keeps what Tree registers, and so the program's globals. Python clears them after synk's modules, which
# they hold too: what dies then finds None in the place of synk's globals.
PREPARED = """
import sys, threading
import jax, jax.numpy as jnp, numpy as np, synk
w = synk.shared(np.zeros(3, np.float32), name="w")
@synk.function(reduce="mean")
def f(x):
    return jnp.mean(x * w.value[0])
@f.then
def f(mean):
    w.value = w.value + mean
x = np.arange(70000, dtype=np.float32)
class Tree: pass
jax.tree_util.register_pytree_node(Tree, lambda tree: ((), x), lambda about, children: about)
modules = [module for name, module in sys.modules.items() if name.startswith("synk")]
"""

PROGRAMS = {
    "many kinds of objects": """
        d = synk.data(x, place="scatter")
        r = synk.function(lambda x: 2 * x, reduce="scatter")(x)
        f(x), f(d), f(r)
        left = f.iterate(x, batches=[2, 3, 4])
        next(left)
        others = synk.prefetch([x, x]), synk.group(), synk.each([1]), synk.stats.mean(x), f.stats
    """,
    "left half-way": """
        loops = [f.iterate(x, batches=synk.minibatches(len(x), 100)), f.stream([x] * 9), synk.prefetch([x] * 9)]
        results = [next(loop) for loop in loops]
        try:
            f(np.zeros(0))
        except ValueError as error:
            kept = error
        sys.exit()
    """,
    "cycles and containers": """
        class Node: pass
        node = Node()
        node.itself, node.shared = node, {"a": [w, synk.shared(1.0)]}
        sys.kept = threading.kept = node
        jax.jit(lambda y: f(y) if False else y)(x)
        f(x)
    """,
    "read at the end": """
        import atexit
        atexit.register(lambda: (f(x), w.value))
    """,
    "a call that failed": """
        @synk.function
        def bad(x):
            raise RuntimeError("of the user")
        try:
            bad(x)
        except RuntimeError as error:
            kept = error
        f.serial(x), f.check(x)
    """,
    "a group closed": """
        f(x)
        loop = f.iterate(x, batches=[3, 4])
        next(loop)
        synk.close()
        with synk.simulate(3) as three:
            total = synk.function(jnp.sum)(x)
    """,
    "saved in the background": """
        f(x)
        synk.save(sys.argv[1], {"w": w}, step=1, background=True)
        synk.load(sys.argv[1], {"w": w})
        synk.save(sys.argv[1], {"w": w}, step=2, background=True)
    """,
    "on threads": """
        threads = [threading.Thread(target=f, args=(x,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        source = iter(lambda: threading.Event().wait(0.05), None)
        slow = synk.prefetch(np.zeros(4) for _ in source)
        next(slow)
    """,
    "a program under way": """
        long = synk.function(lambda x: jax.lax.fori_loop(0, 3000, lambda i, y: jnp.sin(y), x), reduce="concat")
        results = [long(x) for _ in range(3)]
        raise SystemExit
    """,
    "a training step": """
        import optax
        step = synk.train.step(lambda w, x: jnp.mean((w - x) ** 2), np.float32(0), optax.adam(0.1))
        for loss in step.iterate(x, batches=synk.minibatches(len(x), 30000)):
            break
    """,
}


@pytest.mark.parametrize("name", slow_but(["many kinds of objects", "left half-way"], PROGRAMS))
def test_nothing_is_said_at_the_end(name, tmp_path):
    """synk prints nothing at the end of a program, however it ends and whatever it keeps."""
    program = PREPARED + dedent(PROGRAMS[name])
    ended = harness.python("-W", "error", "-c", program, tmp_path, JAX_NUM_CPU_DEVICES="4")
    assert (ended.stderr, ended.returncode) == ("", 0)
