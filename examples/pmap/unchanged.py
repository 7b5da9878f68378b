"""The programs of this folder as they are, with `jax.pmap` replaced by a few lines over `synk.function`.

    python examples/pmap/unchanged.py    # needs optax; DEVICES=8 for other than 4

A first step for a large program: all of it runs on synk at once, one row a replica, and is then ported function by
function. Prints the largest difference of each program, and how many run.
"""

import functools
import os
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import synk

synk.init(int(os.environ.get("DEVICES", "4")))
real = jax.pmap


def pmap(f, axis_name="replica", *, in_axes=0, static_broadcasted_argnums=(), donate_argnums=()):
    """Map as `jax.pmap` does, with 0 or None for each argument in `in_axes`."""
    static = tuple(np.atleast_1d(static_broadcasted_argnums).astype(int))

    @functools.cache  # by the modes of arguments, and the values of static ones
    def mapped(modes, constants):
        def on_row(args):
            args = [
                jax.tree.map(lambda a: a[0], arg) if m == "scatter" else arg for m, arg in zip(modes, args, strict=True)
            ]
            for i, value in zip(static, constants, strict=True):
                args.insert(i, value)
            return jax.tree.map(lambda a: jnp.asarray(a)[None], f(*args))

        return synk.function(on_row, (modes,), "scatter", axis_name=axis_name)

    def call(*args):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        modes = ["broadcast" if axis is None else "scatter" for axis in axes]
        given = [(mode, arg) for i, (mode, arg) in enumerate(zip(modes, args, strict=True)) if i not in static]
        modes, dealt = zip(*given, strict=True)
        return jax.tree.map(lambda rows: rows.array, mapped(modes, tuple(args[i] for i in static))(dealt))

    return call


def numbers(path, pmap):
    jax.pmap = pmap
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(runpy.run_path(str(path))["with_pmap"]())]


paths = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name != Path(__file__).name)
for path in paths:
    gap = max(np.abs(a - b).max() for a, b in zip(numbers(path, real), numbers(path, pmap), strict=True))
    print(f"{path.stem}: largest difference {gap:.1e}")
    assert gap < 1e-6
print(f"{len(paths)} of {len(paths)} run unchanged")
