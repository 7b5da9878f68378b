"""Sharded: evaluation of a traced function whose arguments lie in shards, of which each replica holds one."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._runtime.shards import Shard, filled, gather_shard, keeps_layers, own_shard, sum_to_shards
from .._runtime.way import replica_axis
from .equations import ELEMENTWISE, bind, called_by, fold, number

# The user has differentiated the function already. So each equation that reads a large leaf gathers it there, apart in
# the forward and the backward pass; a loop over stacked layers gathers a layer in each round. Elementwise equations
# stay in shards, and sums over a whole leaf add up over the replicas. So memory is that of the third stage of
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
# (https://arxiv.org/abs/1910.02054).

# Reductions of floats and of booleans, and the number that changes nothing in each.
_REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "reduce_sum": (jnp.sum, 0),
    "reduce_max": (jnp.max, -np.inf),
    "reduce_min": (jnp.min, np.inf),
    "reduce_and": (jnp.all, True),
    "reduce_or": (jnp.any, False),
}
# Equations that change where the numbers of a leaf stand. They wait until it is gathered: else what they return, the
# whole, would live from the forward to the backward pass.
_MOVES = frozenset(("transpose", "reshape", "squeeze"))
# How many uses of gathered leaves before its own a gather may start.
_AHEAD = 2


class ShardedSum(NamedTuple):
    """A result of which replicas want shards of the sum.

    Attributes:
      prepare: turns the result of one replica, and its weight, into what is added up. It treats each number alone.
      weight: the index of the result that is its weight; None for no weight.
    """

    prepare: Callable[[jax.Array, Any], jax.Array]
    weight: int | None


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape", "moves"])
@dataclass(frozen=True)
class _Moved(Shard):
    """A shard whose numbers stand elsewhere once these equations have moved the gathered array."""

    moves: tuple[Any, ...] = ()


NO_SUMS: Mapping[int, ShardedSum] = MappingProxyType({})


@dataclass(eq=False)
class _Place:
    """A value of an evaluation. Variables do not name values: an inner function that is called twice has the same ones
    twice."""

    value: Any = None
    is_literal: bool = False


@dataclass(eq=False)
class _Step:
    """An equation, with the places that it reads, and those of its results."""

    equation: Any
    ins: list[_Place]
    outs: list[_Place]

    @property
    def name(self) -> str:
        return self.equation.primitive.name


def evaluate_sharded(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], sums: Mapping[int, ShardedSum], are_equal: bool
) -> list[Any]:
    """Evaluate a jaxpr on each replica.

    Args:
      jaxpr, consts: the function.
      args: its arguments, arrays or shards.
      sums: the results of which replicas want shards of the sum, by index.
      are_equal: whether all arrays are equal on all replicas: those among the arguments are, and nothing asks for the
        rank.

    Returns:
      The results: arrays, or shards.
    """
    evaluation = _Evaluation(are_equal)
    results = evaluation.run(jaxpr, consts, args, sums)
    return [evaluation.whole(result) if isinstance(result, _Moved) else result for result in results]


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation under way. Arrays of the body of a loop or a branch are tracers of a trace of its own, so it has an
    evaluation of its own: no gather outside may wait for one, or take it for a leaf that is gathered already.

    Attributes:
      are_equal: see `evaluate_sharded`.
      gathered: leaves that are gathered already, by ids, with their shards; None outside loops and `jax.checkpoint`,
        where they would live for too long.
      recent: results of the latest equations that used gathered leaves.
    """

    are_equal: bool
    gathered: dict[Any, tuple[Shard, jax.Array]] | None = None
    recent: deque[jax.Array] = field(default_factory=lambda: deque(maxlen=_AHEAD))

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], sums: Mapping[int, ShardedSum] = NO_SUMS
    ) -> list[Any]:
        steps, outs = _opened(jaxpr, consts, args)

        def add_up(wanted: ShardedSum, has_layers: bool | None, value: Any) -> Shard:
            weight = None if wanted.weight is None else self.whole(outs[wanted.weight].value)
            return sum_to_shards(wanted.prepare(jnp.asarray(self.whole(value)), weight), has_layers)

        # Weights come first, since loops add up what they weigh.
        first = _needed([outs[each.weight] for each in sums.values() if each.weight is not None], steps)
        stacked = _add_in_loops(steps, outs, sums, first)
        for step in sorted(steps, key=lambda step: step not in first):
            wanted = [partial(add_up, stacked[out], False) if out in stacked else None for out in step.outs]
            results = self._evaluate(step, [place.value for place in step.ins], wanted)
            for out, result in zip(step.outs, results, strict=True):
                out.value = result
        is_apart = [i in sums and out not in stacked for i, out in enumerate(outs)]
        return [add_up(sums[i], None, out.value) if is_apart[i] else out.value for i, out in enumerate(outs)]

    def whole(self, value: Any) -> Any:
        if not isinstance(value, Shard):
            return value
        key = (id(value.array), *map(id, _moves(value)))
        if self.gathered is not None and key in self.gathered:
            return self.gathered[key][1]
        # XLA makes one gather of two equal ones, so that the leaf would live from the forward to the backward pass. It
        # keeps gathers apart that wait for different values of the computation; a barrier on the shard alone does not
        # do. So they do not all start at the beginning, either.
        array, *_ = lax.optimization_barrier((value.array, *[*self.recent][:1]))
        array = gather_shard(Shard(array, value.shape))
        for equation in _moves(value):
            [array] = bind(equation, [array])
        if self.gathered is not None:
            self.gathered[key] = value, array
        return array

    def _evaluate(self, step: _Step, values: list[Any], wanted: Sequence[Any]) -> Sequence[Any]:
        """Evaluate an equation; `wanted` are functions that add up what a loop stacks, None for other results."""
        shards = [value for value in values if isinstance(value, Shard)]
        if step.name == "scan" and (shards or any(wanted)):
            return self._scan(step.equation, values, wanted)
        if not shards:
            return bind(step.equation, values)
        if step.name == "remat2":
            return self._checkpoint(step.equation.params, values)
        if step.name == "cond" and self.are_equal:
            return self._cond(step.equation, values)
        for rule in (self._elementwise, self._reduced, self._moved):
            if (result := rule(step, values, shards[0])) is not None:
                return [result]
        results = bind(step.equation, [*map(self.whole, values)])
        self._note(results)
        return results

    def _note(self, results: Sequence[Any]) -> None:
        """Note a result for which later gathers wait."""
        arrays = [result for result in results if isinstance(getattr(result, "dtype", None), np.dtype)]
        self.recent.extend(arrays[:1])

    def _elementwise(self, step: _Step, values: list[Any], like: Shard) -> Shard | None:
        """Evaluate an elementwise equation on shards that lie alike.

        Arrays of `fn` differ on the replicas, so with them each replica needs the whole. Equal arrays are cut.
        """
        if step.name not in ELEMENTWISE:
            return None
        operands: list[Any] = []
        for place, value in zip(step.ins, values, strict=True):
            is_equal = self.are_equal or place.is_literal
            if isinstance(value, Shard):
                if (value.shape, value.array.shape) != (like.shape, like.array.shape) or _moves(value) != _moves(like):
                    return None
                operands.append(value.array)
            elif is_equal and not np.ndim(value):
                operands.append(value)
            elif is_equal and np.shape(value) == like.shape and not _moves(like):
                operands.append(own_shard(jnp.asarray(value), like.has_layers).array)
            else:
                return None
        return replace(like, array=bind(step.equation, operands)[0])

    def _reduced(self, step: _Step, values: list[Any], shard: Shard) -> jax.Array | None:
        """Reduce all numbers of a leaf: each replica its own, and then those of all replicas."""
        equation = step.equation
        if step.name not in _REDUCTIONS or len(equation.params["axes"]) != len(equation.invars[0].aval.shape):
            return None
        reduce, neutral = _REDUCTIONS[step.name]
        # Some floats of 8 bits have no infinity.
        is_wide = jnp.issubdtype(shard.dtype, jnp.inexact) and shard.dtype.itemsize > 1
        if not (shard.dtype == bool if isinstance(neutral, bool) else is_wide):
            return None
        # A shard of a leaf that n does not divide has padding behind its last number, which must not count.
        numbers, out = filled(shard, neutral), equation.outvars[0].aval.dtype
        # Gathered and reduced again, since all-reduces of floats may lose NaN in extremes:
        # https://github.com/openxla/xla/issues/21461
        if step.name != "reduce_sum":
            return reduce(lax.all_gather(reduce(numbers), replica_axis())).astype(out)
        # Sums of half floats would round once a replica more than the whole sum does.
        wide = jnp.float32 if out.itemsize < 4 else out
        return lax.psum(reduce(numbers, dtype=wide), replica_axis()).astype(out)

    def _moved(self, step: _Step, values: list[Any], shard: Shard) -> Shard | None:
        """Leave a leaf in shards that only moves; of stacked layers, one that is picked."""
        shape, params = step.equation.outvars[0].aval.shape, step.equation.params
        if shard.has_layers and not _moves(shard):
            starts, stops = params.get("start_indices", ()), params.get("limit_indices", ())
            if step.name == "slice" and stops[0] - starts[0] == 1 and shape[1:] == shard.shape[1:]:
                return Shard(shard.array[starts[0] : stops[0]], shape)
            if step.name in ("squeeze", "reshape") and shard.shape == (1, *shape):
                return Shard(shard.array[0], shape)
        return _Moved(shard.array, shard.shape, (*_moves(shard), step.equation)) if step.name in _MOVES else None

    def _checkpoint(self, params: Mapping[str, Any], values: list[Any]) -> list[Any]:
        """Evaluate a function under `jax.checkpoint`, which computes again."""
        if params["prevent_cse"] and params["differentiated"]:
            # Else XLA makes one of what is computed again and what the forward pass has computed.
            values = lax.optimization_barrier([v if isinstance(v, Shard) else jnp.asarray(v) for v in values])
        # Inside, a leaf is gathered once and goes with the function's other intermediate values, which jax.checkpoint
        # drops.
        return replace(self, gathered={}).run(params["jaxpr"], (), values)

    def _scan(self, equation: Any, values: list[Any], wanted: Sequence[Any]) -> list[Any]:
        """Evaluate a loop, which gathers a layer of stacked leaves in each round, and adds up a layer of gradients."""
        params, body = equation.params, equation.params["jaxpr"]
        # Counted by axes, since names of parameters differ between JAX 0.10 and 0.12.
        pairs = zip(equation.invars, body.jaxpr.invars, strict=True)
        stop = sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)
        pairs = zip(equation.outvars, body.jaxpr.outvars, strict=True)
        count = sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)
        # What all rounds read is gathered once.
        constants = [*map(self.whole, values[: stop - count])]
        carry = [
            jnp.asarray(self.whole(value), out.aval.dtype) if isinstance(out.aval.dtype, np.dtype) else value
            for value, out in zip(values[stop - count : stop], equation.outvars, strict=False)
        ]
        stacks = [
            v if isinstance(v, Shard) and v.has_layers and not _moves(v) else self.whole(v) for v in values[stop:]
        ]

        # A loop takes shards apart, and stacks them, as it does their arrays; shapes of the whole are set here.
        def round_of(carry: list[Any], entries: list[Any]) -> tuple[list[Any], list[Any]]:
            inside = _Evaluation(self.are_equal, {})
            layers = [Shard(v.array, v.shape[1:]) if isinstance(v, Shard) else v for v in entries]
            results = inside.run(body.jaxpr, body.consts, [*constants, *carry, *layers])
            sums = zip(map(inside.whole, results[count:]), wanted[count:], strict=True)
            new = [result if add_up is None else add_up(result) for result, add_up in sums]
            return [*map(inside.whole, results[:count])], new

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, new = lax.scan(round_of, carry, stacks, **options)
        self._note(carry)
        outs = zip(equation.outvars[count:], new, strict=True)
        return [*carry, *(Shard(v.array, out.aval.shape) if isinstance(v, Shard) else v for out, v in outs)]

    def _cond(self, equation: Any, values: list[Any]) -> list[Any]:
        """Evaluate a branch that all replicas take, so that they meet in what it communicates."""
        # They would wait for each other in vain if an output that is to be the same on all of them were not.
        index, operands = lax.pmax(self.whole(values[0]), replica_axis()), values[1:]
        # Branches of a switch must return one structure: a result is a shard where an operand of that shape is one.
        has_layers = {v.shape: v.has_layers for v in operands if isinstance(v, Shard) and not _moves(v)}

        def branch(closed: Any, operands: list[Any]) -> list[Any]:
            # A leaf gathered in one branch does not exist in the other.
            inside = _Evaluation(self.are_equal)
            results = inside.run(closed.jaxpr, closed.consts, operands)
            for i, (result, out) in enumerate(zip(results, equation.outvars, strict=True)):
                result = result if isinstance(result, Shard) else jnp.asarray(result, out.aval.dtype)
                layered = has_layers.get(out.aval.shape)
                if layered is None:
                    results[i] = inside.whole(result)
                elif not isinstance(result, Shard) or _moves(result) or result.has_layers != layered:
                    results[i] = own_shard(inside.whole(result), layered)
            return results

        return lax.switch(index, [partial(branch, closed) for closed in equation.params["branches"]], operands)


def _moves(shard: Shard) -> tuple[Any, ...]:
    return shard.moves if isinstance(shard, _Moved) else ()


def _opened(jaxpr: Any, consts: Iterable[Any], args: Iterable[Any]) -> tuple[list[_Step], list[_Place]]:
    """Return the steps of a jaxpr, among them those of functions that it calls, and the places of its results."""
    steps: list[_Step] = []

    def places(given: Iterable[Any]) -> list[_Place]:
        return [each if isinstance(each, _Place) else _Place(number(each), is_literal=True) for each in given]

    # Called functions are opened, so that a gather stands beside the equation that reads the leaf. jax.checkpoint is
    # not: it would lose what it recomputes.
    def opened(equation: Any, ins: list[Any]) -> list[Any]:
        if equation.primitive.name != "remat2" and (inner := called_by(equation)) is not None:
            return fold(inner[0], map(_Place, inner[1]), ins, opened)
        steps.append(_Step(equation, places(ins), [_Place() for _ in equation.outvars]))
        return steps[-1].outs

    return steps, places(fold(jaxpr, map(_Place, consts), map(_Place, args), opened))


def _needed(places: Iterable[_Place], steps: Sequence[_Step]) -> set[_Step]:
    """Return the steps that make these places."""
    wanted, needed = {*places}, set[_Step]()
    for step in reversed(steps):
        if not wanted.isdisjoint(step.outs):
            needed.add(step)
            wanted.update(step.ins)
    return needed


def _add_in_loops(
    steps: list[_Step], outs: list[_Place], sums: Mapping[int, ShardedSum], first: set[_Step]
) -> dict[_Place, ShardedSum]:
    """Find sums of what a loop stacks a layer a round, and return them by its place. Conversions behind the loop leave
    the steps and become part of the sum."""
    # A gradient of stacked layers leaves its loop whole on each replica. Added up in each round, only a layer of it is
    # ever whole.
    makers = {place: step for step in steps for place in step.outs}
    uses = Counter(chain(outs, *(step.ins for step in steps)))
    stacked: dict[_Place, ShardedSum] = {}
    for i, wanted in sums.items():
        way, conversions = [outs[i]], list[_Step]()
        while (step := makers.get(way[-1])) is not None and step.name == "convert_element_type":
            conversions.append(step)
            way.append(step.ins[0])
        # A loop whose weights come later, or whose stack others read too, stacks the whole.
        if step is None or step.name != "scan" or step in first or any(uses[place] > 1 for place in way):
            continue
        body, index = step.equation.params["jaxpr"], step.outs.index(way[-1])
        shape = step.equation.outvars[index].aval.shape
        if keeps_layers(shape) and len(shape) > len(body.out_avals[index].shape):
            dtypes = [step.equation.params["new_dtype"] for step in reversed(conversions)]
            steps[:], outs[i] = [step for step in steps if step not in conversions], way[-1]
            stacked[outs[i]] = wanted._replace(prepare=partial(_convert_first, dtypes, wanted.prepare))
    return stacked


def _convert_first(
    dtypes: Sequence[Any], prepare: Callable[..., jax.Array], value: jax.Array, weight: Any
) -> jax.Array:
    for dtype in dtypes:
        value = value.astype(dtype)
    return prepare(value, weight)
