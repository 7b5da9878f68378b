"""PowerSGD: gradients that travel as products of two thin matrices, with error feedback.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
(https://arxiv.org/abs/1905.13727), algorithm 1. Here it adds up, since the parts are weighted already.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import synk

from .._base.errors import checked_integer

# A column of length 1 of which less than this is left, in float32, is rounding.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class PowerSGD:
    """A value of `wire=` of `synk.train.step`: gradients travel as the two thin factors of a matrix of low rank.

    Each training step makes one step of subspace iteration from the last factors. What the factors leave out stays on
    each replica and is added to its next gradient (error feedback), in a shared variable that is saved with the step.
    A leaf of two axes or more travels as a matrix with its last axis as columns, if its factors have fewer numbers;
    other leaves travel as they are.

    Attributes:
      rank: the number of columns of the factors, >= 1.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk.contrib, synk.train
      >>> x = np.random.default_rng(0).normal(size=(90, 20)).astype(np.float32)
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w - x[:, :10]) ** 2)
      >>> with synk.simulate(3):
      ...     wire = synk.contrib.PowerSGD(rank=2)
      ...     step = synk.train.step(loss, np.zeros((20, 10), np.float32), optax.sgd(0.5), wire=wire)
      ...     losses = [float(step(x)) for _ in range(40)]
      ...     losses[-1] < losses[0] / 2
      True
    """

    rank: int = 2

    def __post_init__(self) -> None:
        checked_integer(self.rank, "synk.contrib.PowerSGD: rank", 1)

    def variables(self, params: Any) -> tuple[dict[str, synk.typing.Shared], dict[str, synk.typing.Shared]]:
        """Make the variables of a step, by name.

        Args:
          params: the tree of the parameters, of `jax.ShapeDtypeStruct`s.

        Returns:
          A variable that all replicas share: "basis", the right factors of the last sums. And one in which each replica
          keeps its own: "feedback", what each matrix left out so far, times the number of replicas, so that the average
          over replicas means the same for any number of replicas.
        """
        matrices = _matrices(jax.tree.leaves(params), self.rank).values()
        # A fixed seed: every replica and process must begin with the same basis.
        rng = np.random.default_rng(0)
        basis = [rng.normal(size=(columns, self.rank)).astype(np.float32) for _, columns in matrices]
        left_out = [np.zeros(matrix, np.float32) for matrix in matrices]
        return {"basis": synk.shared(basis, "basis")}, {"feedback": synk.shared(left_out, "feedback")}

    def sum(self, parts: Any, variables: Mapping[str, synk.typing.Shared]) -> Any:
        """Add up the replicas' parts of a gradient, inside `then`, and update both variables."""
        basis, feedback = variables["basis"], variables["feedback"]
        leaves, treedef = jax.tree.flatten(parts)
        shapes, size, before = _matrices(leaves, self.rank), synk.size(), feedback.value
        pairs = zip(shapes.items(), before, strict=True)
        matrices = [leaves[i].reshape(matrix).astype(jnp.float32) + left / size for (i, matrix), left in pairs]
        whole = {i: leaf for i, leaf in enumerate(leaves) if i not in shapes}
        if size == 1:
            # A single replica's gradient travels nowhere. It only takes what was left out before, on several replicas.
            sums, left_out = matrices, [*map(jnp.zeros_like, matrices)]
            are_fine = [*map(_is_finite, matrices)]
        else:
            bases = [*map(_of_length_1, basis.value)]
            summed = synk.all_reduce([*map(_product, matrices, bases), *whole.values()], "sum")
            whole = dict(zip(whole, summed[len(matrices) :], strict=True))
            left = [*map(_orthonormal, summed[: len(matrices)])]
            right = [_product(matrix.T, factor) for matrix, factor in zip(matrices, left, strict=True)]
            # The left factors are the same on all replicas, so the sum of products is the product with the sum of the
            # right ones.
            whole_right = synk.all_reduce(right, "sum")
            sums = [_product(a, b.T) for a, b in zip(left, whole_right, strict=True)]
            # Times the number of replicas, as it is kept: see `variables`.
            left_out = [size * (matrix - _product(a, b.T)) for matrix, a, b in zip(matrices, left, right, strict=True)]
            are_fine = [_is_finite(*factors) for factors in zip(summed, whole_right, strict=False)]
            # A column of zeros would stay zero in all steps that follow, so the old column takes its place.
            basis.value = [
                jnp.where(is_fine & jnp.any(new != 0, axis=0), new, old)
                for is_fine, new, old in zip(are_fine, whole_right, bases, strict=True)
            ]
        # Numbers that are not finite go to the optimizer, which may skip them, and not into the steps that follow.
        feedback.value = [*map(jnp.where, are_fine, left_out, before)]
        whole |= zip(shapes, sums, strict=True)
        return treedef.unflatten([whole[i].reshape(leaf.shape) for i, leaf in enumerate(leaves)])


def _matrices(leaves: Sequence[Any], rank: int) -> dict[int, tuple[int, int]]:
    shapes: dict[int, tuple[int, int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.ndim > 1 and jnp.issubdtype(leaf.dtype, jnp.floating):
            matrix = leaf.size // max(leaf.shape[-1], 1), leaf.shape[-1]
            # Factors with more numbers than the matrix would travel for longer.
            if rank * sum(matrix) < leaf.size:
                shapes[i] = matrix
    return shapes


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply two matrices in full float32."""
    # In float32 on GPUs too: feedback would not know of what one product rounds away.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _is_finite(*sums: jax.Array) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in sums]).all()


def _of_length_1(columns: jax.Array) -> jax.Array:
    """Divide each column by its length; zeros stay."""
    # First by its largest number, since squares may overflow or vanish.
    largest = jnp.abs(columns).max(0, keepdims=True)
    columns = columns / jnp.where(largest == 0, 1, largest)
    length = jnp.linalg.norm(columns, axis=0, keepdims=True)
    return columns / jnp.where(length == 0, 1, length)


def _orthonormal(columns: jax.Array) -> jax.Array:
    """Make each column orthogonal to the columns before, and of length 1 (Gram-Schmidt)."""
    done: list[jax.Array] = []
    for i in range(columns.shape[1]):
        column = _of_length_1(columns[:, i : i + 1])
        for _ in range(2):  # the second time for the last bits
            for before in done:
                column = column - before * (before * column).sum()
        # Nothing but rounding is left of a dependent column. Rounding may point anywhere, so zeros take its place.
        done.append(_of_length_1(jnp.where(jnp.linalg.norm(column) > _NEGLIGIBLE, column, 0)))
    return jnp.concatenate(done, 1)
