"""PowerSGD: gradients that travel as products of two thin matrices, with error feedback.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019
(https://arxiv.org/abs/1905.13727), algorithm 1. Here it adds up, since the parts are weighted already.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import checked_integer
from .._base.pytree import PyTree
from .._reductions.collectives import all_sum
from .._runtime.axis import replica_axis
from .._variables.variable import Shared, shared

# A column of length 1 of which less than this is left, in float32, is rounding.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class PowerSGD:
    """A value of `wire=`: gradients travel as the two thin factors of a matrix of low rank.

    Each training step makes one step of subspace iteration from the last factors. What the factors leave out stays on
    each replica and is added to its next gradient (error feedback), in a shared variable that is saved with the step.
    A leaf of two axes or more travels as a matrix with its last axis as columns, if its factors have fewer numbers;
    other leaves travel as they are.

    Attributes:
      rank: the number of columns of the factors, >= 1.

    Example:
      >>> import jax.numpy as jnp, numpy as np, optax, synk, synk.train
      >>> x = np.random.default_rng(0).normal(size=(90, 20)).astype(np.float32)
      >>> def loss(w, x):
      ...     return jnp.mean((x @ w - x[:, :10]) ** 2)
      >>> with synk.simulate(3):
      ...     wire = synk.train.PowerSGD(rank=2)
      ...     step = synk.train.step(loss, np.zeros((20, 10), np.float32), optax.sgd(0.5), wire=wire)
      ...     losses = [float(step(x)) for _ in range(40)]
      ...     losses[-1] < losses[0] / 2
      True
    """

    rank: int = 2

    def __post_init__(self) -> None:
        checked_integer(self.rank, "synk.train.PowerSGD: rank", 1)


class LowRankSum:
    """Sums over the replicas of gradients that travel as thin factors.

    Attributes:
      matrices: the shape as a matrix of each leaf that travels as factors, by the number of the leaf.
      feedback: a shared variable: for each matrix what was left out so far, times the number of replicas, so that the
        average over replicas means the same for any number of replicas.
      basis: a shared variable: the right factors of the last sums, equal on all replicas.
    """

    def __init__(self, wire: PowerSGD, params: Shared) -> None:
        self._shapes = params._spec.shapes
        shapes = {i: _matrix_shape(shape, wire.rank) for i, shape in enumerate(self._shapes)}
        self.matrices = {i: shape for i, shape in shapes.items() if shape is not None}
        rng = np.random.default_rng(0)
        basis = [rng.normal(size=(columns, wire.rank)).astype(np.float32) for _, columns in self.matrices.values()]
        left_out = [np.zeros(matrix, np.float32) for matrix in self.matrices.values()]
        self.basis, self.feedback = shared(basis, "basis"), shared(left_out, "feedback")
        self.feedback._may_differ = True

    def sum(self, parts: PyTree) -> PyTree:
        """Add up the replicas' parts of a gradient, inside `then`, and update both variables."""
        leaves, treedef = jax.tree.flatten(parts)
        size, before = lax.psum(1, replica_axis()), self.feedback.value
        pairs = zip(self.matrices.items(), before, strict=True)
        matrices = [leaves[i].reshape(matrix).astype(jnp.float32) + left / size for (i, matrix), left in pairs]
        whole = {i: leaf for i, leaf in enumerate(leaves) if i not in self.matrices}
        if size == 1:
            # A single replica's gradient travels nowhere. It only takes what was left out before, on several replicas.
            sums, left_out = matrices, [*map(jnp.zeros_like, matrices)]
            are_fine = [*map(_is_finite, matrices)]
        else:
            bases = [*map(_of_length_1, self.basis.value)]
            summed = all_sum([*map(_product, matrices, bases), *whole.values()])
            whole = dict(zip(whole, summed[len(matrices) :], strict=True))
            left = [*map(_orthonormal, summed[: len(matrices)])]
            right = [_product(matrix.T, factor) for matrix, factor in zip(matrices, left, strict=True)]
            whole_right = all_sum(right)
            sums = [_product(a, b.T) for a, b in zip(left, whole_right, strict=True)]
            left_out = [size * (matrix - _product(a, b.T)) for matrix, a, b in zip(matrices, left, right, strict=True)]
            are_fine = [_is_finite(*factors) for factors in zip(summed, whole_right, strict=False)]
            # A column of zeros would stay zero in all steps that follow, so the old column takes its place.
            self.basis.value = [
                jnp.where(is_fine & jnp.any(new != 0, axis=0), new, old)
                for is_fine, new, old in zip(are_fine, whole_right, bases, strict=True)
            ]
        # Numbers that are not finite go to the optimizer, which may skip them, and not into the steps that follow.
        self.feedback.value = [*map(jnp.where, are_fine, left_out, before)]
        whole |= zip(self.matrices, sums, strict=True)
        # Unreduced gradients come in their accumulation dtype.
        return treedef.unflatten([whole[i].reshape(s.shape).astype(s.dtype) for i, s in enumerate(self._shapes)])


def _matrix_shape(shape: jax.ShapeDtypeStruct, rank: int) -> tuple[int, int] | None:
    """Return the shape of a leaf as a matrix, None if thin factors have no fewer numbers than the leaf."""
    if len(shape.shape) < 2 or not jnp.issubdtype(shape.dtype, jnp.floating):
        return None
    matrix = shape.size // max(shape.shape[-1], 1), shape.shape[-1]
    return matrix if rank * sum(matrix) < shape.size else None


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply two matrices in full float32."""
    # In float32 on GPUs too: feedback would not know of what one product rounds away.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _is_finite(*sums: jax.Array) -> jax.Array:
    """Return whether all numbers are finite; equal on every replica if the sums are."""
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
