"""Replica check: compare the bits that replicas hold."""

from functools import lru_cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.errors import DivergedError, public_api
from .._runtime.executable import as_bits, run_collective, translate_peer_errors
from .._runtime.way import Body, Layout, replica_axis
from .._tracing.context import eager
from .._variables.collectives import variables_of
from .._variables.state import VariableState
from .._variables.variable import Shared, bind, divergence, group_of

# How many numbers are mixed at a time: it takes twice their memory where XLA does not fuse it.
AT_A_TIME = 1 << 20


@public_api
def check_replicas(*variables: Shared) -> None:
    """Check that all replicas hold the same bits, by one small collective over fingerprints.

    If they do, the value of a variable that functions updated on each replica can be read again.

    Args:
      *variables: shared variables. Those that differ by design (`synk.contrib.PowerSGD`'s) are not compared.

    Raises:
      DivergedError: a leaf differs; the message names variable, leaf and ranks.

    Example:
      >>> import numpy as np, synk
      >>> with synk.simulate(2):
      ...     synk.check_replicas(synk.shared(np.zeros(3)), synk.shared(np.ones(2)))
    """
    checked = [variable for variable in variables_of(list(variables), "check_replicas") if not variable._may_differ]
    if not checked:
        return
    with eager():
        for variable in checked:
            if variable._state.rows_per_replica is not None:
                raise DivergedError(divergence(variable))
        group = group_of(checked[0])
        states = [bind(variable, group) for variable in checked]
        kinds = tuple((len(v._state.leaves), v._spec.storage.comparable) for v in checked)
        leaves = [leaf for state in states for leaf in state.leaves]
        layouts: list[Layout] = [state.layout for state in states for _ in state.leaves]
        with translate_peer_errors(group):
            table = np.asarray(run_collective(group, _fingerprints(kinds), layouts, ["replicated"], leaves)[0])
    names = [f"{variable.name}{path}" for variable in checked for path in variable._spec.paths]
    for i, name in enumerate(names):
        wrong = [rank for rank in range(group.size) if (table[rank, i] != table[0, i]).any()]
        if wrong:
            ranks = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
            raise DivergedError(
                f"{name}: on {ranks} it differs from rank 0 in some bit. Make them equal with synk.broadcast or "
                f"synk.all_reduce; update shared variables in then, so that they stay so."
            )
    with eager():
        for variable, state in zip(checked, states, strict=True):
            # The bits were compared, so from now on the variable counts as one value, and any replica's may be read.
            if variable._state is state and not state.is_equal:
                variable._state = VariableState(state.leaves, state.abstract)


@lru_cache(maxsize=256)
def _fingerprints(variables: tuple[tuple[int, Body], ...]) -> Body:
    """Return a program that gives all replicas every replica's fingerprints."""

    # For each variable: the number of its stored leaves, and what makes of them the leaves to compare. Leaves in shards
    # differ by design, so they come without elements.
    def body(*leaves: jax.Array) -> list[jax.Array]:
        rest, prints = iter(leaves), list[jax.Array]()
        for count, comparable in variables:
            prints += map(_fingerprint, comparable(*islice(rest, count)))
        return [lax.all_gather(jnp.stack(prints) if prints else jnp.zeros((0, 2), jnp.uint32), replica_axis())]

    return body


def _fingerprint(leaf: jax.Array) -> jax.Array:
    """Return 64 bits that depend on every bit and its place: two sums of mixed numbers."""
    # A sum, since its terms may come in any order, as XLA likes. 64 bits in two halves, since JAX may have 64-bit
    # numbers switched off.
    flat = leaf.ravel()
    whole = flat.size // AT_A_TIME

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        start = i * np.uint32(AT_A_TIME)
        return total + _sums(lax.dynamic_slice(flat, (start,), (AT_A_TIME,)), start)

    rest = _sums(flat[whole * AT_A_TIME :], np.uint32(whole * AT_A_TIME))
    # A loop over pieces, since the mix of a whole leaf of gigabytes would not fit beside it.
    return lax.fori_loop(np.uint32(0), np.uint32(whole), add, rest) if whole else rest


def _sums(numbers: jax.Array, start: Any) -> jax.Array:
    """Return the two sums for numbers whose first has the place `start`."""
    bits = as_bits(numbers)
    if bits.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(bits, jnp.uint32)
    place = lax.iota(jnp.uint32, bits.size) + start * np.uint32(bits.size // max(1, numbers.size))
    bits = bits.ravel()
    return jnp.stack([_mixed(bits ^ _mixed(place * np.uint32(seed) + np.uint32(1))).sum(dtype=jnp.uint32)
                      for seed in (0x9E3779B1, 0x85EBCA77)])  # fmt: skip


# The finalizer of MurmurHash3: https://github.com/aappleby/smhasher/wiki/MurmurHash3
def _mixed(bits: jax.Array) -> jax.Array:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))
