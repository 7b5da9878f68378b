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
import numpy as np
from jax.tree_util import keystr, tree_flatten

from .._base.bounded_cache import BoundedCache
from .._base.errors import checked_integer, shown
from .._base.pytree import PyTree, array_of_list, refuse_sparse
from .._data.overlap import Overlap, halo_of
from .._tracing.names import links
from .._variables.variable import Shared

MODES = ("scatter", "broadcast", "static")
KEEP_OUTSIDE = "keep the rest outside, e.g. with equinox.partition(model, equinox.is_array)"
# Stands in the place of a spec for trees that contain lists.
_LISTED = object()
_PMAP_AXES = ' Of the in_axes of jax.pmap, 0 is "scatter" and None is "broadcast".'
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class CallOptions(NamedTuple):
    """Options of a call, as its user gave them. Each but the batches and the turn is in the key of a kind.

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
_HINTS = {name: f" {name} comes by position; {name}= is an option." for name in OPTIONS}
_HINTS["cost"] = " cost= is an option of synk.map; a parameter cost comes by position."


# Specs outlive calls in caches: a strong reference would keep a variable's memory on the devices.
class VariableReference(ref[Shared]):
    """A weak reference to a shared variable that is an argument."""


def constant_of(value: Any) -> Any:
    return value() if isinstance(value, VariableReference) else value


# Compared by identity: a binder makes one object a tree, so the object is its own key, and warm calls hash no treedef
# twice.
@dataclass(frozen=True, eq=False)
class ArgumentSpec:
    """Layout of a call's arguments: which leaf is scattered or broadcast.

    Attributes:
      treedef: the tree of (args, kwargs), with None in the place of static arguments.
      names: the name of each leaf in messages.
      parameters: for each given parameter that is not static, its tree of leaf indexes.
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
    overlaps: tuple[Overlap | None, ...]

    @cached_property
    def scattered_names(self) -> list[str]:
        return [self.names[i] for i in self.scattered]

    def in_tree_order(self, scattered: Sequence[Any], broadcast: Sequence[Any]) -> tuple[Any, ...]:
        """Merge values of the scattered leaves and of the broadcast leaves into the order of the tree."""
        places = (*self.scattered, *self.broadcast)
        values = dict(zip(places, (*scattered, *broadcast), strict=True))
        return tuple([values[i] for i in range(len(places))])

    def call(self, fn: Callable[..., PyTree], /, *args: Any, **kwargs: Any) -> PyTree:
        statics = {name: constant_of(value) for name, value in self.statics.items()}
        placed = map(statics.get, chain(self.positions, repeat("")), args)
        return fn(*placed, **{name: statics.get(name, value) for name, value in kwargs.items()})


class BoundArguments(NamedTuple):
    """Arguments of one call.

    Attributes:
      leaves: the leaves as the user passed them.
      numbers: if a loop has kept the rows of a batch, the `Selection` of their numbers in the loop's input.
    """

    spec: ArgumentSpec
    leaves: list[Any]
    numbers: Any = None


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
        # A default array has a mode, like a given one: as a constant it would be whole on each replica.
        self._array_defaults = {p: a for p, a in _array_defaults(fn).items() if p not in self.static_names}
        self._specs = BoundedCache()
        # The newest tree without static arguments, and its spec: warm calls hash no tree.
        self._newest: tuple[Any, Any] = (jax.tree.structure(0), None)

    def mode(self, parameter: str) -> PyTree:
        """Return a parameter's mode ("scatter", "broadcast", "static", an Overlap) or its tree of modes."""
        return self.modes.get(parameter, "scatter")

    def _modes(self, inputs: Any) -> dict[str, PyTree]:
        if inputs is None:
            return {}
        is_mapping = isinstance(inputs, Mapping)
        is_sequence = isinstance(inputs, Sequence) and not isinstance(inputs, str)
        # An empty sequence of names would scatter nothing, one of modes everything.
        if not is_mapping and (not is_sequence or (not inputs and self.parameters)):
            raise TypeError(
                f'{self.name}: inputs is {shown(inputs)}; give a sequence of modes or names, as ["x"], or a mapping of '
                f'modes, as {{"x": "broadcast"}}.'
            )
        names = [name for name in inputs if isinstance(name, str) and (is_mapping or name not in MODES)]
        for name in names:
            if name not in self.parameters:
                raise ValueError(f"{self.name}: inputs names {name!r}, but {self._has()}. Modes: {', '.join(MODES)}.")
        if is_mapping:
            modes = dict(inputs)
        elif names and len(names) == len(inputs):
            modes = {p: "scatter" if p in names else "broadcast" for p in self.parameters}
        else:
            modes = self._modes_by_position(inputs)
        return {p: self._checked(mode, p) for p, mode in modes.items()}

    def _modes_by_position(self, inputs: Sequence[PyTree]) -> dict[str, PyTree]:
        """Match a sequence of modes with the parameters; it may go on for the values of *args."""
        named = [p for p, q in self.parameters.items() if q.kind not in _VARIADIC]
        extra = [p for p, q in self.parameters.items() if q.kind == q.VAR_POSITIONAL] * (len(inputs) - len(named))
        if len(inputs) > len(named) + len(extra):
            raise ValueError(f"{self.name}: inputs has {len(inputs)} modes, but {self._has()}.")
        modes: dict[str, PyTree] = {}
        for parameter, mode in zip([*named, *extra], inputs, strict=False):
            if modes.setdefault(parameter, mode) != mode:
                raise ValueError(f"{self.name}: the values of *{parameter} share one mode, but inputs is {inputs!r}.")
        return modes

    def _has(self) -> str:
        return f"its parameters are {', '.join(self.parameters)}" if self.parameters else "it has no parameters"

    def _checked(self, mode: PyTree, parameter: str) -> PyTree:
        for leaf in jax.tree.leaves(mode):
            # "static" inside a tree would make a part of an argument a constant, for which a spec has no place.
            is_one = leaf in MODES or isinstance(leaf, Overlap)
            if not is_one or (leaf == "static" and mode != "static"):
                raise ValueError(
                    f'{self.name}: the mode of {parameter} is {mode!r}; use "scatter", "broadcast", synk.Overlap, or a '
                    f'tree of these, or "static" for the whole of it.{_PMAP_AXES * (type(leaf) is int)}'
                )
        if mode == "static" and self.parameters[parameter].kind in _VARIADIC:
            raise ValueError(f"{self.name}: *{parameter} cannot be static; name its parameters one by one.")
        return mode

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundArguments:
        """Add array defaults, set static arguments aside, flatten the rest, and find the spec of its tree."""
        if self._array_defaults:
            # A default whose parameter is given by position must not come again by keyword.
            defaults = {p: a for p, a in self._array_defaults.items() if p not in self.positions[: len(args)]}
            kwargs = {**defaults, **kwargs}
        static_keys: list[Any] = []
        statics: dict[str, Any] = {}
        # Static arguments may be no trees.
        leaves, treedef = tree_flatten(() if self.static_names else (args, kwargs))
        newest, spec = self._newest
        # A variable is bound by identity, so that the function can read and assign it.
        if self.static_names or Shared in map(type, leaves):
            statics = self._statics(args, kwargs)
            # Static values stand beside the treedef in the key, not in it: a treedef's hash ignores its nodes' data.
            static_keys = [(name, told_apart(value)) for name, value in statics.items()]
            args, kwargs = self._map(lambda name, value: None if name in statics else value, args, kwargs)
            leaves, treedef = tree_flatten((args, kwargs))
        elif newest == treedef:
            return BoundArguments(spec, leaves)
        spec = self._specs.get(
            (treedef, *static_keys), lambda: _LISTED if _has_list(treedef) else self._spec(treedef, statics)
        )
        # A list of numbers is one array, but its treedef is that of a list of arrays: such trees need a second look.
        if spec is _LISTED:
            leaves, listed = tree_flatten(self._map(self._with_arrays, args, kwargs))
            key = (listed, *static_keys, *[_LISTED] * _has_list(listed))
            spec = self._specs.get(key, lambda: self._spec(listed, statics))
        elif not static_keys:
            self._newest = treedef, spec
        return BoundArguments(spec, leaves)

    def _map(
        self, change: Callable[[str, Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change each argument; `change` gets the name of its parameter too, empty for a value of *args."""
        changed = tuple(map(change, chain(self.positions, repeat("")), args))
        return changed, {name: change(name, value) for name, value in kwargs.items()}

    def _with_arrays(self, parameter: str, argument: Any) -> Any:
        def of_leaf(leaf: Any) -> Any:
            if type(leaf) is not list:
                return leaf
            if leaf and _is_numbers(leaf):
                return array_of_list(leaf, f"{self.name}: argument {parameter}")
            # Lists of arrays remain trees; only lists of numbers, nested or not, are arrays.
            return [self._with_arrays(parameter, item) for item in leaf]

        return jax.tree.map(of_leaf, argument, is_leaf=lambda leaf: type(leaf) is list)

    def _statics(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that are constants of programs: static ones, and variables, bound by identity."""
        for name in self.static_names.intersection(self.positions[: len(args)], kwargs):
            raise TypeError(f"{self.name}: {name!r} names a static parameter given by position, and a keyword.")
        statics: dict[str, Any] = {}
        given = {**dict(zip(self.positions, args, strict=False)), **kwargs}
        # Sorted, so that keywords in another order make the same key.
        for name in sorted(given):
            argument = given[name]
            if type(argument) is Shared:
                # Under synk.Overlap a variable stands for the rows that it holds.
                if not isinstance(self.mode(name), Overlap):
                    statics[name] = VariableReference(argument)
            elif name in self.static_names:
                try:
                    hash(argument)
                except TypeError as error:
                    raise TypeError(
                        f"{self.name}: the static argument {name} is a {type(argument).__name__}, which has no hash: "
                        f"{error}. Static ones are compile-time constants; pass arrays as "
                        f'"broadcast", and {KEEP_OUTSIDE}.'
                    ) from None
                statics[name] = argument
        return statics

    def _spec(self, treedef: Any, statics: Mapping[str, Any]) -> ArgumentSpec:
        places = range(treedef.num_leaves)
        # Numbers in the place of leaves: binding them to parameters tells which leaf each parameter has.
        args, kwargs = treedef.unflatten(places)
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            hint = next((hint for name, hint in _HINTS.items() if repr(name) in str(error)), "")
            raise TypeError(f"{self.name}: {error}; {self._has()}.{hint}") from None
        modes: dict[int, Any] = {}
        names: dict[int, str] = {}
        for parameter, tree in given.items():
            for path, place in jax.tree_util.tree_leaves_with_path(tree):
                names[place] = f"{parameter}{keystr(path)}"
            if parameter in statics:
                continue
            mode, trees = self.mode(parameter), [tree]
            # The mode of *args or **kwargs is the mode of each value.
            if self.parameters[parameter].kind in _VARIADIC:
                trees = list(tree.values() if isinstance(tree, dict) else tree)
            for value in trees:
                try:
                    jax.tree.map(lambda m, sub: modes.update(dict.fromkeys(jax.tree.leaves(sub), m)), mode, value)
                except ValueError as error:
                    raise ValueError(
                        f"{self.name}: the modes {mode!r} of {parameter} are no prefix of the argument, whose tree is "
                        f"{jax.tree.structure(value)}; a list of numbers is one array.{_PMAP_AXES * (mode is None)}"
                    ) from error
            refuse_sparse(f"{self.name}: argument {parameter}", tree, [i for i in modes if modes[i] == "broadcast"])
        parameters = {p: tree for p, tree in given.items() if p not in statics}
        defaults = {p: q.default for p, q in self.parameters.items() if q.default is not q.empty}
        scattered = tuple(i for i in places if modes[i] != "broadcast")
        return ArgumentSpec(
            treedef=treedef,
            scattered=scattered,
            broadcast=tuple(i for i in places if modes[i] == "broadcast"),
            names=tuple(names[i] for i in places),
            parameters=parameters,
            statics=statics,
            constants={p: value for p, value in {**defaults, **statics}.items() if p not in parameters},
            positions=self.positions,
            overlaps=tuple(m if isinstance(m, Overlap) and halo_of(m) else None for m in map(modes.get, scattered)),
        )


def _signature(fn: Callable[..., PyTree]) -> inspect.Signature:
    """Return the signature of `fn`; of what it wraps, only if `fn` itself takes *args or **kwargs."""
    # A jitted function has no signature of its own.
    with suppress(TypeError, ValueError):
        signature = inspect.signature(fn, follow_wrapped=False)
        if not any(parameter.kind in _VARIADIC for parameter in signature.parameters.values()):
            return signature
    return inspect.signature(fn)


def _array_defaults(fn: Callable[..., PyTree]) -> dict[str, Any]:
    """Return the defaults that are dealt out like given arguments: trees with arrays, and lists of numbers."""
    # A default behind a wrapper such as jax.vmap is a constant too: the wrapper may not accept it as an argument.
    # jax.jit passes all arguments on.
    outermost = next(link for link in links(fn) if not isinstance(link, jax.stages.Wrapped))
    with suppress(TypeError, ValueError):
        if inspect.signature(outermost, follow_wrapped=False) != _signature(outermost):
            return {}
    # Arrays that a functools.partial has bound were given on purpose, as constants.
    bound = {name for link in links(fn) if isinstance(link, functools.partial) for name in link.keywords}
    defaults: dict[str, Any] = {}
    for name, parameter in _signature(fn).parameters.items():
        default = parameter.default
        has_array = any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(default))
        is_list = type(default) is list and default and _is_numbers(default)
        if (has_array or is_list) and name not in bound and parameter.kind != parameter.POSITIONAL_ONLY:
            defaults[name] = default
    return defaults


def told_apart(value: Any) -> Any:
    """Return a key that tells static values apart which are equal and compile to different programs."""
    # 1 equals 1.0 and True, and 0.0 equals -0.0: as keys they would share a program.
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
    # The bytes tell -0.0 from 0.0, and NaN equals itself.
    if isinstance(value, np.generic | float | complex):
        return type(value), np.asarray(value).tobytes()
    return type(value), value


def _has_list(treedef: Any) -> bool:
    node = treedef.node_data()
    return node is not None and (node[0] is list or any(map(_has_list, treedef.children())))


def _is_numbers(value: Any) -> bool:
    if type(value) is list:
        return all(map(_is_numbers, value))
    return isinstance(value, bool | int | float | complex | np.generic)


# The value of num_slices that asks for as many slices as fit into memory.
AUTO = "auto"


def check_slices(num_slices: Any, name: str) -> None:
    if not (isinstance(num_slices, str) and num_slices == AUTO):
        checked_integer(num_slices, f"{name}: num_slices", 1, 'give an integer >= 1, or "auto"')


def no_rows(name: str, argument: str) -> ValueError:
    parameter = re.split(r"[.\[]", argument)[0]
    return ValueError(
        f"{name}: argument {argument} is a scalar and has no rows to scatter. Pass {parameter} as "
        f'"broadcast", inputs={{"{parameter}": "broadcast"}}; or give it a tree of modes, "broadcast" for its scalars.'
    )
