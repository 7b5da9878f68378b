"""No call hangs: thousands of calls that nobody waits for end, in a child process with a time limit."""

import pytest

from .. import harness
from ..helpers import slow_but

CHILD = """
import jax, threading
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np, synk

total = synk.shared(np.float32(0.0))

@synk.function(inputs=["x"], reduce="mean")
def step(x):
    return jnp.mean(x) + 0.0 * total.value

@step.then
def step(mean):
    total.value = total.value + mean

def train(calls, rows, **options):
    x = np.ones((rows, 4), np.float32)
    for _ in range(calls):
        step(x, **options)

{body}
print("sum", float(total.value))
"""

BODIES = {
    "plain": ("train(3000, 8)", 3000.0),
    "uneven": ("train(300, 13)", 300.0),
    "slices": ("train(200, 32, num_slices=4)", 200.0),
    "threads": (
        "threads = [threading.Thread(target=train, args=(500, 8)) for _ in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()",
        2000.0,
    ),
    "threads that iterate": (
        "def go():\n    for _ in step.iterate(np.ones((8, 4), np.float32), batches=[8] * 100, prefetch=1): pass\n"
        "threads = [threading.Thread(target=go) for _ in range(4)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join()",
        400.0,
    ),
    "collectives": (
        "train(1, 8)\nfor _ in range(1000):\n    synk.all_reduce(total)\n    synk.gather(total)",
        1.0,
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", slow_but(["threads"], BODIES))
def test_unwaited_calls_end(name):
    """Calls return at once, and the runtime never has more programs than it can finish."""
    body, total = BODIES[name]
    code = CHILD.replace("{body}", body)
    done = harness.python(code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["sum", str(total)]
