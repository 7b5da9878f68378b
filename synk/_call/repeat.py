"""Repeat: make one program of several calls in a row, each of which takes variables as the one before has left them."""

from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.pytree import bits_of
from .._runtime.group import Group
from .._runtime.way import Layout
from .program import Epilogue

# Why calls run alone, as far as that is known before they are traced.
SLICES = "its rows run in slices"
LOCAL = "its rows are those of one process (synk.local)"
EXCHANGES = "replicas exchange rows of scattered data before the call"
COMMUNICATES = "it communicates inside"
NANS = "jax_debug_nans looks at single calls"
# Bytes of entries of rows that a program returns for each of several batches of `f.over`.
LARGE = 1 << 18
Body = Callable[..., list[jax.Array]]
# Arguments of a program: layout and global shape of each.
Placed = list[tuple[Layout, jax.ShapeDtypeStruct]]


class RunsAlone(ValueError):
    """Calls do not run in a row, by one program. The message says why."""


class NotTogether(RunsAlone):
    """Calls do not run in a row, but others of the loop may."""


class Repetition(NamedTuple):
    """Rule by which the calls of a program share arguments, hand them on or have their own, told by number.

    Attributes:
      most: how many calls there may be.
      carried: for each result that the next call takes, in the order of the results, the argument that it becomes.
      own: the arguments of which each call has its own.
      lists: how many lists of arguments there are before captured arrays. Behind them comes an argument that tells for
        each call whether it is there.
      refuses_nan: whether the last result is a flag, by which a call and all that follow it change nothing.
    """

    most: int
    carried: Sequence[int]
    own: Sequence[int]
    lists: int
    refuses_nan: bool


def repeated(
    group: Group, engine: str, single: Body, arguments: list[Placed], outs: list[Layout], rule: Repetition
) -> tuple[Body, list[Placed], list[Layout]]:
    """Return body, arguments and layouts of results of a program that runs the calls of another one in a row.

    Its body takes the arrays of all replicas. Its results are what the last call hands on, and then the results of one
    call after the other.
    """
    given_layouts: list[Layout] = [layout for layout, _ in chain(*arguments)]
    flags = sum(map(len, arguments[: rule.lists]))

    def of_each(i: int, value: jax.Array) -> jax.Array:
        """Return what the calls have of an argument, in the shapes that programs of one call take."""
        if given_layouts[i] == "replicated":
            return value
        # Sent with the axis of replicas in front, as all arrays are; the loop divides along the axis of calls.
        value = jnp.moveaxis(value, 1, 0)
        return value.reshape(rule.most, -1, *value.shape[3:]) if given_layouts[i] == "rows" else value

    def body(*values: jax.Array) -> list[jax.Array]:
        # The axis of the replicas has its name while the program is traced.
        mapped = group._way.map(single, given_layouts, outs, engine)
        is_there, given = values[flags], [*values[:flags], *values[flags + 1 :]]
        own = [of_each(i, given[i]) for i in rule.own]

        def run(state: list[jax.Array], own: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            now = dict(zip((*rule.carried, *rule.own), (*state, *own), strict=True))
            results = list(mapped(*(now.get(i, value) for i, value in enumerate(given))))
            return results[: len(state)], results[len(state) :]

        state = [given[i] for i in rule.carried]
        # The branch of a call that is not there returns results of the same shapes, which nobody reads.
        shapes = jax.eval_shape(run, state, [leaf[0] for leaf in own])[1]

        def keep(state: list[jax.Array], own: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            return state, [*map(_ones, shapes)]

        def step(carry: Any, call: Any) -> tuple[Any, list[jax.Array]]:
            (state, goes_on), (is_there, own) = carry, call
            # Inside a branch XLA computes the bits of a program of one call. In the body of a loop alone it does not.
            new, results = lax.cond(_both(group, is_there, goes_on), run, keep, state, own)
            if rule.refuses_nan:
                # Inside the branch XLA would compute the new values by other kernels.
                new = [jnp.where(results[-1], old, leaf) for old, leaf in zip(state, new, strict=True)]
                goes_on &= ~results[-1]
            return (new, goes_on), results

        (state, _), results = lax.scan(step, (state, jnp.ones((), bool)), (is_there, own), length=rule.most)
        return [*state, *(leaf[call] for call in range(rule.most) for leaf in results)]

    placed = iter(
        [_of_each(*each, rule.most, group.size) if i in rule.own else each for i, each in enumerate(chain(*arguments))]
    )
    of_all: list[Placed] = [[next(placed) for _ in each] for each in arguments]
    of_all[rule.lists - 1].append(("replicated", jax.ShapeDtypeStruct((rule.most,), np.bool_)))
    return body, of_all, [*outs[: len(rule.carried)], *outs[len(rule.carried) :] * rule.most]


def _ones(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return ones that are as weak as what they stand for, which a branch would lose otherwise."""
    return lax.full(like.shape, like.dtype.type(1).item()) if like.weak_type else jnp.ones(like.shape, like.dtype)


def _both(group: Group, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return `a & b`, in a way that keeps a loop around it from being compiled as one kernel."""
    if group.platform != "cpu":
        return a & b
    # XLA's CPU compiler makes one kernel of a small loop, unless it sorts (small_while_loop_hoisting_pass.cc). That
    # kernel computes other bits.
    return lax.sort(jnp.stack([a, b]).astype(jnp.int32))[0] > 0


def _of_each(layout: Layout, shape: jax.ShapeDtypeStruct, most: int, size: int) -> tuple[Layout, jax.ShapeDtypeStruct]:
    """Return layout and global shape of an argument of which each call has its own."""
    if layout == "replicated":
        return layout, shape.update(shape=(most, *shape.shape))
    each = shape.shape[1:] if layout == "stacked" else (shape.shape[0] // size, *shape.shape[1:])
    return "stacked", shape.update(shape=(size, most, *each))


def why_alone(epilogue: Epilogue) -> str:
    """Say why a program cannot run several calls in a row; "" if it can."""
    group, call, entries = epilogue.group, epilogue.call, epilogue.states
    states = entries.shapes(entries.slots) if entries.kept else []
    kept = sum(prod(states[i].shape) * bits_of(states[i].dtype) // 8 for i in entries.kept)
    traced = [*epilogue.traced.by_size.values(), *([epilogue.then[0]] if epilogue.then else [])]
    reasons = {
        'engine="jit" runs it': group._way.is_one,
        SLICES: call.num_slices > 1,
        "its rows run in blocks": call.block is not None,
        "neighbours of its rows lie on other replicas": any(feed.held_rows for feed in call.feeds),
        "its entries of rows are large": kept > LARGE,
        'an output is "scatter"': bool(epilogue.scattered),
        "it has callbacks": any(each.has_callbacks for each in traced),
        "XLA's CPU backend compiles convolutions inside a loop to slow ones": group.platform == "cpu"
        and any(each.has_convolution for each in traced),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
