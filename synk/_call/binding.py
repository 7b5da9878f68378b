"""Binding: deal the arguments of a call out as scattered, broadcast or static, and check their leaves."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple
from weakref import ref

import jax
import jax.core
import numpy as np
from jax.tree_util import keystr

from .._base.bounded_cache import BoundedCache
from .._base.errors import checked_integer, shown
from .._base.pytree import SCALARS, PyTree, array_of_list, as_data, check_fits, is_number, key_of
from .._data.dataset import Data
from .._data.overlap import Overlap, halo_of
from .._data.process_rows import ProcessLocalRows
from .._data.sources import Source, as_source
from .._runtime.group import Group
from .._tracing.names import links
from .._variables.collectives import rows_held
from .._variables.variable import Shared

MODES = ("scatter", "broadcast", "static")
KEEP_OUTSIDE = "keep the rest outside, e.g. with equinox.partition(model, equinox.is_array)"
# Stands in the place of a spec for trees that contain lists.
_LISTED = object()
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallOptions(NamedTuple):
    """Options of a call, as its user gave them.

    Attributes:
      batch: the rows of the whole input to take.
      batch_s: the rows to take on each replica.
      num_slices: in how many slices a replica runs its rows, or "auto".
      output_subset: the outputs to return.
      turn: which item of a loop the call runs, counted from 0.
    """

    batch: Any = None
    batch_s: Any = None
    num_slices: Any = 1
    output_subset: Any = None
    turn: int | None = None


# A parameter may have one of these names, and then comes by position.
OPTIONS = frozenset([*CallOptions._fields[:-1], "batches", "prefetch", "rtol", "atol", "update"])


class VariableReference(ref[Shared]):
    """A weak reference to a shared variable that is an argument. Specs outlive calls, and keep no variable alive."""


def constant_of(value: Any) -> Any:
    """Return the value of a constant: a referenced variable itself, anything else unchanged."""
    return value() if isinstance(value, VariableReference) else value


@dataclass(frozen=True, eq=False)
class ArgumentSpec:
    """Layout of a call's arguments: which leaf is scattered or broadcast. A binder makes one object a tree, so the
    object is its own key.

    Attributes:
      treedef: the tree of (args, kwargs), with None in the place of static arguments.
      scattered: numbers of the scattered leaves.
      broadcast: numbers of the broadcast leaves.
      names: the name of each leaf in messages.
      parameters: for each given parameter that is not static, its tree of leaf numbers.
      statics: the value of each static argument, by parameter.
      constants: `statics`, and the default of each parameter that is not given.
      positions: the parameters that may be given by position.
      overlaps: for each scattered leaf, the neighbours that its rows bring, or None.
    """

    treedef: Any
    scattered: tuple[int, ...]
    broadcast: tuple[int, ...]
    names: tuple[str, ...]
    parameters: Mapping[str, Any]
    statics: Mapping[str, Any]
    constants: Mapping[str, Any]
    positions: Sequence[str]
    overlaps: tuple[Overlap | None, ...] = ()

    @cached_property
    def scattered_names(self) -> list[str]:
        """Names of the scattered leaves."""
        return [self.names[i] for i in self.scattered]

    @cached_property
    def _order(self) -> list[int]:
        places = (*self.scattered, *self.broadcast)
        return [places.index(i) for i in range(len(places))]

    def in_tree_order(self, scattered: Sequence[Any], broadcast: Sequence[Any]) -> tuple[Any, ...]:
        """Merge values of the scattered leaves and of the broadcast leaves into the order of the tree."""
        both = (*scattered, *broadcast)
        return tuple([both[i] for i in self._order])

    def call(self, fn: Callable[..., PyTree], args: Sequence[Any], kwargs: Mapping[str, Any]) -> PyTree:
        """Call `fn` with the static arguments put back in."""
        statics = {name: constant_of(value) for name, value in self.statics.items()}
        placed = map(statics.get, chain(self.positions, repeat("")), args)
        return fn(*placed, **{name: statics.get(name, value) for name, value in kwargs.items()})


class BoundArguments(NamedTuple):
    """Arguments of one call.

    Attributes:
      spec: which leaf goes where.
      leaves: the leaves as the user passed them.
      numbers: if a loop picked the rows ahead of the call, the `Selection` of their numbers in the loop's input.
    """

    spec: ArgumentSpec
    leaves: list[Any]
    numbers: Any = None

    @property
    def has_tracers(self) -> bool:
        """Tell whether a leaf is a tracer. Nothing else of a leaf may be looked at before."""
        return any([isinstance(leaf, jax.core.Tracer) for leaf in self.leaves])


class ArgumentBinder:
    """Binder of one function's arguments: knows the mode of each parameter, and keeps the specs that it has made."""

    def __init__(self, fn: Callable[..., PyTree], inputs: Any, name: str) -> None:
        self.name = name
        self.signature = _signature(fn)
        self.parameters = dict(self.signature.parameters)
        clash = [p for p, q in self.parameters.items() if p in OPTIONS and q.kind == q.KEYWORD_ONLY]
        if clash:
            raise ValueError(
                f"{name}: its parameter {clash[0]!r} comes by keyword alone, but has the name of an option of every "
                f"synk function. Rename it, or let it come by position."
            )
        self.modes = self._modes(inputs)
        self.static_names = {p for p, mode in self.modes.items() if isinstance(mode, str) and mode == "static"}
        self.positions = [
            p for p, q in self.parameters.items() if q.kind in (q.POSITIONAL_ONLY, q.POSITIONAL_OR_KEYWORD)
        ]
        # A default that contains arrays is dealt out like a given argument. Two kinds of arrays stay constants: those
        # that a functools.partial has bound, and defaults behind a wrapper such as jax.vmap, which may not accept
        # them as arguments.
        self._arrays = {
            p: q.default
            for p, q in self.parameters.items()
            if _is_dealt_out(q.default)
            and p not in self.static_names
            and q.kind != q.POSITIONAL_ONLY
            and not _is_behind_wrapper(fn)
            and p not in _bound_by_partials(fn)
        }
        self._only_by_position = {
            p for p in self.static_names if self.parameters[p].kind == inspect.Parameter.POSITIONAL_ONLY
        }
        self._specs = BoundedCache()

    def mode(self, parameter: str) -> PyTree:
        """Return the mode, or the tree of modes, of a parameter."""
        return self.modes.get(parameter, "scatter")

    def _modes(self, inputs: Any) -> dict[str, PyTree]:
        if inputs is None:
            return {}
        if isinstance(inputs, str):
            raise TypeError(f"{self.name}: inputs={inputs!r} is one string; give a sequence, e.g. [{inputs!r}].")
        if isinstance(inputs, Mapping):
            unknown = [p for p in inputs if p not in self.parameters]
            if unknown:
                raise ValueError(f"{self.name}: inputs names {unknown[0]!r}, but {self._has()}.")
            return {p: self._checked(mode, p) for p, mode in inputs.items()}
        if not isinstance(inputs, Sequence):
            raise TypeError(f"{self.name}: inputs is {shown(inputs)}; give a sequence of modes or names, or a mapping.")
        if not inputs and self.parameters:
            raise ValueError(
                f"{self.name}: inputs={inputs!r} names none of its parameters, and gives none a mode. To scatter none, "
                f'say so of each: inputs={{"{next(iter(self.parameters))}": "broadcast"}}; leave it out to scatter all.'
            )
        if inputs and all(isinstance(i, str) and i in self.parameters and i not in MODES for i in inputs):
            return {p: "scatter" if p in inputs else "broadcast" for p in self.parameters}
        wrong = [i for i in inputs if isinstance(i, str) and i not in MODES]
        if wrong:
            raise ValueError(
                f"{self.name}: inputs holds {wrong[0]!r}, which is neither a mode ({', '.join(MODES)}) nor the name of "
                f"a parameter; {self._has()}."
            )
        named = [p for p, q in self.parameters.items() if q.kind not in _VARIADIC]
        if len(inputs) > len(named) and not any(q.kind == q.VAR_POSITIONAL for q in self.parameters.values()):
            raise ValueError(f"{self.name}: inputs has {len(inputs)} modes, but {self._has()}.")
        extra = [p for p, q in self.parameters.items() if q.kind == q.VAR_POSITIONAL]
        modes = {p: self._checked(mode, p) for p, mode in zip(named, inputs, strict=False)}
        if len(inputs) > len(named):
            rest = inputs[len(named) :]
            if any(mode != rest[0] for mode in rest):
                raise ValueError(f"{self.name}: the values of *{extra[0]} share one mode, but inputs has {rest!r}.")
            modes[extra[0]] = self._checked(rest[0], extra[0])
        return modes

    def _has(self) -> str:
        return f"its parameters are {', '.join(self.parameters)}" if self.parameters else "it has no parameters"

    def _checked(self, mode: PyTree, parameter: str) -> PyTree:
        for leaf in jax.tree.leaves(mode):
            is_one = leaf in MODES or isinstance(leaf, Overlap)
            if not is_one or (leaf == "static" and mode != "static"):
                raise ValueError(
                    f'{self.name}: the mode of {parameter} is {mode!r}; use "scatter", "broadcast", synk.Overlap, or a '
                    f'tree of these, or "static" for the whole of it.'
                )
        if mode == "static" and self.parameters[parameter].kind in _VARIADIC:
            raise ValueError(f"{self.name}: *{parameter} cannot be static; name its parameters one by one.")
        return mode

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        """Flatten a call's arguments, and find the spec of their tree."""
        if self._arrays:
            kwargs = {**{p: a for p, a in self._arrays.items() if p not in self.positions[: len(args)]}, **kwargs}
        statics: dict[str, Any] = {}
        if self.static_names or Shared in map(type, args) or Shared in map(type, kwargs.values()):
            for name in self._only_by_position & kwargs.keys():
                raise TypeError(f"{self.name}: {name!r} names a static parameter given by position, and a keyword.")
            given = {**dict(zip(self.positions, args, strict=False)), **kwargs}
            statics = {
                name: self._hashable(name, given[name]) for name in sorted(given) if self._is_static(name, given)
            }
            named = zip(args, chain(self.positions, repeat("")), strict=False)
            args = tuple([None if name in statics else argument for argument, name in named])
            kwargs = {name: None if name in statics else argument for name, argument in kwargs.items()}
        if list in map(type, args) or list in map(type, kwargs.values()):
            named = zip(args, chain(self.positions, repeat("")), strict=False)
            args = tuple([_array_of_numbers(argument, f"{self.name}: argument {name}") for argument, name in named])
            kwargs = {name: _array_of_numbers(value, f"{self.name}: argument {name}") for name, value in kwargs.items()}
        leaves, treedef = jax.tree.flatten((args, kwargs))
        # Static values stand beside the treedef in the key, not in it: a treedef's hash ignores the data of its nodes.
        told = [(name, told_apart(value)) for name, value in statics.items()]
        spec = self._specs.get((treedef, *told), lambda: self._spec_unless_listed(treedef, statics))
        # A list of numbers is one array, but its treedef is that of a list of arrays: such trees need a second look.
        if spec is _LISTED:
            leaves, listed = jax.tree.flatten(_with_arrays((args, kwargs), f"{self.name}: an argument"))
            key = (listed, *told, *[_LISTED] * _has_list(listed))
            spec = self._specs.get(key, lambda: self._spec(listed, statics))
        return BoundArguments(spec, leaves)

    def _is_static(self, parameter: str, given: Mapping[str, Any]) -> bool:
        """Tell whether an argument is a constant of programs: by its mode, or as a variable, bound by identity."""
        # Under synk.Overlap a variable stands for the rows that it holds.
        is_data = isinstance(self.mode(parameter), Overlap)
        return parameter in self.static_names or (type(given[parameter]) is Shared and not is_data)

    def _hashable(self, parameter: str, argument: Any) -> Any:
        if type(argument) is Shared:
            return VariableReference(argument)
        try:
            hash(argument)
        except TypeError:
            is_tree = not jax.tree_util.all_leaves([argument])
            cure = f'pass its arrays as "broadcast", and {KEEP_OUTSIDE}' if is_tree else 'pass arrays as "broadcast"'
            raise TypeError(
                f"{self.name}: the static argument {parameter} is a {type(argument).__name__}, which has no hash. "
                f"Static ones are compile-time constants; {cure}."
            ) from None
        return argument

    def _spec_unless_listed(self, treedef: Any, statics: Mapping[str, Any]) -> Any:
        """Make the spec of a tree without lists; return `_LISTED` for one with lists."""
        return _LISTED if _has_list(treedef) else self._spec(treedef, statics)

    def _spec(self, treedef: Any, statics: Mapping[str, Any]) -> ArgumentSpec:
        places = range(treedef.num_leaves)
        args, kwargs = treedef.unflatten(places)
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            hint = next((f" {p} comes by position; {p}= is an option." for p in OPTIONS if repr(p) in str(error)), "")
            raise TypeError(f"{self.name}: {error}; {self._has()}.{hint}") from None
        modes: dict[int, Any] = {}
        names: dict[int, str] = {}
        for parameter, tree in given.items():
            for path, place in jax.tree_util.tree_leaves_with_path(tree):
                names[place] = f"{parameter}{keystr(path)}"
            if parameter not in statics:
                self._assign(parameter, tree, modes)
        parameters = {p: tree for p, tree in given.items() if p not in statics}
        defaults = {p: q.default for p, q in self.parameters.items() if q.default is not q.empty}
        scattered = tuple(i for i in places if modes[i] != "broadcast")
        overlaps = [mode if isinstance(mode, Overlap) else None for mode in map(modes.get, scattered)]
        return ArgumentSpec(
            treedef=treedef,
            scattered=scattered,
            broadcast=tuple(i for i in places if modes[i] == "broadcast"),
            names=tuple(names[i] for i in places),
            parameters=parameters,
            statics=statics,
            constants={p: value for p, value in {**defaults, **statics}.items() if p not in parameters},
            positions=self.positions,
            overlaps=tuple(overlap if halo_of(overlap) else None for overlap in overlaps),
        )

    def _assign(self, parameter: str, tree: PyTree, modes: dict[int, Any]) -> None:
        mode = self.mode(parameter)
        kind = self.parameters[parameter].kind
        trees = [tree]
        # The mode of *args or **kwargs is the mode of each value.
        if kind in _VARIADIC:
            trees = list(tree.values() if isinstance(tree, dict) else tree)
        for value in trees:
            try:
                jax.tree.map(lambda m, sub: modes.update(dict.fromkeys(jax.tree.leaves(sub), m)), mode, value)
            except ValueError as error:
                raise ValueError(
                    f"{self.name}: the modes {mode!r} of {parameter} are no prefix of the argument, whose tree is "
                    f"{jax.tree.structure(value)}; a list of numbers is one array."
                ) from error


def _signature(fn: Callable[..., PyTree]) -> inspect.Signature:
    """Return the signature of `fn`; of what it wraps, only if `fn` itself takes *args or **kwargs."""
    # A jitted function has no signature of its own.
    with suppress(TypeError, ValueError):
        signature = inspect.signature(fn, follow_wrapped=False)
        if not any(parameter.kind in _VARIADIC for parameter in signature.parameters.values()):
            return signature
    return inspect.signature(fn)


def _is_behind_wrapper(fn: Callable[..., PyTree]) -> bool:
    """Tell whether the signature is that of a wrapped function. jax.jit does not count: it passes all arguments on."""
    outermost = next(link for link in links(fn) if not isinstance(link, jax.stages.Wrapped))
    with suppress(TypeError, ValueError):
        return inspect.signature(outermost, follow_wrapped=False) != _signature(outermost)
    return False


def _bound_by_partials(fn: Callable[..., PyTree]) -> set[str]:
    """Return the names of parameters that a functools.partial between `fn` and the innermost function has bound."""
    return {name for link in links(fn) if isinstance(link, functools.partial) for name in link.keywords}


def _is_dealt_out(default: Any) -> bool:
    """Tell whether a default holds arrays or is a list of numbers, which are dealt out like arguments."""
    if type(default) is list and default and _is_numbers(default):
        return True
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(default))


def told_apart(value: Any) -> Any:
    """Return a key that tells static values apart which are equal and compile to different programs: 1, 1.0 and True,
    0.0 and -0.0."""
    if isinstance(value, VariableReference):
        variable = value()
        return VariableReference, None if variable is None else variable._number
    if isinstance(value, tuple | frozenset):
        return type(value), value, (frozenset if isinstance(value, frozenset) else tuple)(map(told_apart, value))
    if is_dataclass(value) and not isinstance(value, type):
        parts = tuple([told_apart(getattr(value, field.name)) for field in fields(value) if field.compare])
        # A field may have no hash where the dataclass defines its own.
        with suppress(TypeError):
            hash(parts)
            return type(value), value, parts
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    return type(value), value


def _array_of_numbers(argument: Any, what: str) -> Any:
    """Convert a list of numbers, nested or not, to an array; return anything else unchanged."""
    is_array = type(argument) is list and argument and _is_numbers(argument)
    return array_of_list(argument, what) if is_array else argument


def _with_arrays(tree: PyTree, what: str) -> PyTree:
    """Make an array of every list of numbers in a tree."""

    def of_leaf(leaf: Any) -> Any:
        value = _array_of_numbers(leaf, what)
        return [_with_arrays(item, what) for item in value] if type(value) is list else value

    return jax.tree.map(of_leaf, tree, is_leaf=lambda leaf: type(leaf) is list)


def _has_list(treedef: Any) -> bool:
    node = treedef.node_data()
    return node is not None and (node[0] is list or any(map(_has_list, treedef.children())))


def _is_numbers(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_numbers, value))
    return isinstance(value, bool | int | float | complex | np.generic)


# The value of num_slices that asks for the fewest slices that fit into memory.
AUTO = "auto"


class Arguments(NamedTuple):
    """Checked leaves of a call: arrays, numbers, `Data` or rows of this process.

    Attributes:
      scattered: the scattered leaves, typed PRNG keys as raw data.
      broadcast: the broadcast leaves, likewise.
      keys: the PRNG implementation of each leaf, or None, in the order of the tree.
    """

    scattered: list[Any]
    broadcast: list[Any]
    keys: tuple[Any, ...]


def check_leaves(bound: BoundArguments, name: str, group: Group | None = None, is_abstract: bool = False) -> Arguments:
    """Check the leaves that a user has passed; `group` is where shared variables live, None under a trace."""
    spec, values = bound.spec, list(bound.leaves)
    overlapping = [i for i, overlap in zip(spec.scattered, spec.overlaps, strict=True) if overlap is not None]
    keys: list[Any] = [None] * len(values)
    for i, leaf in enumerate(values):
        if isinstance(leaf, jax.Array):
            if not isinstance(leaf.dtype, np.dtype):
                keys[i], values[i] = key_of(leaf), as_data(leaf)
                if leaf.ndim == 0 and i in spec.scattered:
                    raise no_rows(name, spec.names[i])
        elif (type(leaf) is np.ndarray or isinstance(leaf, np.generic)) and is_number(leaf.dtype):
            pass
        elif isinstance(leaf, Data):
            keys[i] = leaf._key
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            if not is_abstract:
                raise TypeError(
                    f"{name}: argument {spec.names[i]} is a shape alone, which compile and explain take; a call needs "
                    f"an array."
                )
            keys[i], values[i] = key_of(leaf), as_data(leaf)
        elif isinstance(leaf, Shared) and i in overlapping and group is not None:
            values[i] = rows_held(leaf, group, f"{name}: argument {spec.names[i]}")
            keys[i] = values[i]._key
        elif isinstance(leaf, ProcessLocalRows):
            if i in spec.broadcast:
                raise TypeError(f"{name}: argument {spec.names[i]} is synk.local rows, but it is broadcast.")
        elif not isinstance(leaf, SCALARS):
            values[i] = _as_array(leaf, f"{name}: argument {spec.names[i]}", spec.names[i] not in spec.parameters)
        elif isinstance(leaf, int):
            check_fits(leaf, f"{name}: argument {spec.names[i]}")
    return Arguments([values[i] for i in spec.scattered], [values[i] for i in spec.broadcast], tuple(keys))


def passes_variables(bound: BoundArguments) -> bool:
    """Tell whether a shared variable is a scattered argument, so that the call reads its rows in place."""
    return any([isinstance(leaf, Shared) for leaf in bound.leaves])


def _as_array(leaf: Any, what: str, is_in_tree: bool) -> Source:
    if isinstance(leaf, Shared):
        raise TypeError(
            f"{what} is the shared variable {leaf.name}; read {leaf.name}.value inside the function instead."
        )
    if isinstance(leaf, Mapping):
        raise TypeError(f"{what} is a {type(leaf).__name__}, whose items JAX does not see: pass dict(...) of it.")
    other = f"and {KEEP_OUTSIDE}" if is_in_tree else 'or pass it as "static"'
    return as_source(leaf, what, f"give arrays, numbers, {other}")


def check_slices(num_slices: Any, name: str) -> None:
    """Check that `num_slices` is an integer >= 1 or "auto"."""
    if not (isinstance(num_slices, str) and num_slices == AUTO):
        checked_integer(num_slices, f"{name}: num_slices", 1, 'give an integer >= 1, or "auto"')


def no_rows(name: str, argument: str) -> ValueError:
    said = f"{name}: argument {argument} is a scalar and has no rows to scatter."
    parameter = re.split(r"[.\[]", argument)[0]
    if parameter == argument:
        return ValueError(f'{said} Pass it as "broadcast": inputs={{"{parameter}": "broadcast"}}.')
    return ValueError(f'{said} Make it a parameter of its own, or give {parameter} a tree of modes, "broadcast" there.')
