"""Mapped functions: find what pmap maps, where it communicates, and what it becomes."""

import ast
import builtins
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .names import LOOPS, PMAPS, Function, Program

COLLECTIVES = {
    f"jax.lax.{name}": op
    for name, op in {
        "pmean": '"mean"', "psum": '"sum"', "pmax": '"max"', "pmin": '"min"', "all_gather": '"concat"',
        "all_to_all": "", "ppermute": "", "pshuffle": "", "psum_scatter": "",
    }.items()
}  # fmt: skip
TREE_MAPS = {"jax.tree.map", "jax.tree_map", "jax.tree_util.tree_map"}
_LIBRARIES = set("jax numpy flax optax chex functools time typing math absl logging ml_collections".split())
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_TOLD = {"gather_from_model_output"}  # of clu, over "batch" unless told otherwise
_UPDATES = {"update", "apply_gradients", "apply_gradient", "apply_updates"}
# Methods of arrays, keys, dictionaries and states, which communicate nowhere.
_PLAIN = {
    "replace", "split", "reshape", "mean", "sum", "items", "get", "astype", "append", "value_and_grad", "transpose",
    "squeeze", "keys", "values", "pop", "index", "copy", "any", "all", "_replace", "startswith", "repeat", *_UPDATES,
}  # fmt: skip


class Communication(NamedTuple):
    """A collective, or a call that is told the axis and may communicate over it.

    Attributes:
      place: where it stands: at the "top" of the mapped function, in a "helper" that is called there, "inside" what is
        differentiated or mapped, or in a "loop".
    """

    node: ast.Call
    name: str
    place: str
    is_told: bool


@dataclass
class Mapped:
    """One use of pmap.

    Attributes:
      node: the call, or the function that is decorated.
      target: how the program writes the mapped function.
      options: the keywords of pmap.
      function: the mapped function, None where it is defined elsewhere.
      in_loop: whether a loop of JAX's runs the function, as in `pmap(partial(scan, f))`.
      unseen: calls whose functions are defined elsewhere.
      updates: calls of an optimizer.
    """

    node: ast.Call | ast.FunctionDef
    target: str
    options: dict[str, ast.expr]
    function: Function | None
    in_loop: bool
    communication: list[Communication] = field(default_factory=list)
    unseen: dict[str, None] = field(default_factory=dict)
    updates: list[ast.Call] = field(default_factory=list)
    differentiates: bool = False

    @property
    def axis(self) -> ast.expr | None:
        """Return what the program gives as the name of the axis."""
        return self.options.get("axis_name")

    @property
    def is_understood(self) -> bool:
        """Tell whether the text shows what communicates. Without a name of the axis nothing can."""
        return self.axis is None or self.function is not None

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing that was not seen may communicate."""
        return self.axis is None or (self.function is not None and not self.unseen)

    def at(self, *places: str) -> list[Communication]:
        """Return the collectives that stand in some places."""
        return [each for each in self.communication if each.place in places and not each.is_told]

    @property
    def told(self) -> list[Communication]:
        """Return the calls that are told the axis."""
        return [each for each in self.communication if each.is_told]

    @property
    def gradients(self) -> list[Communication]:
        """Return the collectives after which an optimizer follows, those at the top first."""
        last = max((call.lineno for call in self.updates), default=0)
        combined = [*self.at("top"), *self.at("helper")]
        return [each for each in combined if each.name in ("pmean", "psum") and each.node.lineno <= last]

    @property
    def kind(self) -> str:
        """Name the kind of program that the function is a part of."""
        if not self.is_understood:
            return "not seen"
        if any(each.place == "loop" for each in self.communication):
            return "communicates in loops"
        if self.at("inside"):
            return "communicates inside"
        if self.gradients:
            return "training step"
        return "combines results" if self.at("top", "helper") else "independent items"


def mapped_functions(program: Program, tree: ast.Module) -> list[Mapped]:
    """Find all uses of pmap in a file."""
    found: list[Mapped] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (calls := program.pmap(node)) is not None:
            function, loops = program.function(node.args[0])
            found.append(_read(program, node, node.args[0], calls, (function, loops)))
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(node, ast.FunctionDef) and (calls := program.mapper(decorator)) is not None:
                found.append(_read(program, node, node, calls, (node, False)))
    return sorted(found, key=lambda each: getattr(each.node, "lineno", 0))


def _read(program: Program, node: Any, target: ast.AST, calls: list[ast.Call], found: tuple[Any, bool]) -> Mapped:
    options: dict[str, ast.expr] = {}
    for call in reversed(calls):
        options |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    if isinstance(node, ast.Call) and len(node.args) > 1:
        options["axis_name"] = node.args[1]
    mapped = Mapped(node, _named(target), options, *found)
    if mapped.function is not None and mapped.axis is not None:
        _Reader(program, mapped, axis_of(program, mapped.axis)).read(mapped.function, "loop" if found[1] else "top")
    return mapped


def _named(target: ast.AST) -> str:
    """Name a mapped function as short as text about it needs."""
    if isinstance(target, ast.FunctionDef):
        return target.name
    if isinstance(target, ast.Call) and target.args and last_name(target.func) == "partial":
        return f"partial({', '.join(map(short, target.args))}, ...)"
    return short(target)


class _Reader:
    """Reader of the body of a mapped function, and of what it calls."""

    def __init__(self, program: Program, mapped: Mapped, axis: str) -> None:
        self.program, self.mapped, self.axis = program, mapped, axis
        self.seen = set[tuple[Function, str]]()

    def read(self, function: Function, place: str) -> None:
        """Read a function once for each place."""
        if (function, place) in self.seen:
            return
        self.seen.add((function, place))
        for statement in [function.body] if isinstance(function, ast.Lambda) else function.body:
            self._visit(statement, place)

    def _visit(self, node: ast.AST, place: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            return  # read where it is used
        if isinstance(node, ast.Call):
            self._call(node, place)
        inner = "loop" if isinstance(node, _LOOPS) else place
        for child in ast.iter_child_nodes(node):
            self._visit(child, inner)

    def _call(self, node: ast.Call, place: str) -> None:
        name, last = self.program.dotted(node.func), last_name(node.func)
        if name in COLLECTIVES:
            # psum(1, axis) is the number of devices.
            if self._is_over_the_axis(node) and not (node.args and isinstance(node.args[0], ast.Constant)):
                self._communicates(node, name, place)
            return
        self.mapped.differentiates |= last in ("grad", "value_and_grad")
        if last in _UPDATES and place in ("top", "helper"):
            self.mapped.updates.append(node)
        may_be_told = last in _TOLD or f"jax.lax.{last}" in COLLECTIVES
        if may_be_told or (name != "jax.lax.axis_index" and self._is_told_the_axis(node)):
            self._communicates(node, last, place, is_told=True)
        given = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        callees = [self.program.function(each) for each in given]
        for each, (function, loops) in zip(given, callees, strict=True):
            if function is not None:
                self.read(function, "loop" if loops else self._place(node, each, name, place))
        is_known = name.split(".")[0] in _LIBRARIES or last in _PLAIN or last[:1].isupper()
        if callees[0][0] is None and not is_known and not (isinstance(node.func, ast.Name) and hasattr(builtins, last)):
            self.mapped.unseen[short(node.func)] = None

    def _place(self, node: ast.Call, function: ast.AST, name: str, place: str) -> str:
        """Tell where a function runs that a call at some place calls or gets."""
        if place == "loop" or name in LOOPS:
            return "loop"
        if name in TREE_MAPS:
            return place
        is_called = function is node.func and isinstance(self.program.origin(function), Function)
        return "helper" if is_called and place in ("top", "helper") else "inside"

    def _communicates(self, node: ast.Call, name: str, place: str, is_told: bool = False) -> None:
        found = Communication(node, name.rpartition(".")[2], place, is_told)
        if all(each.node is not node for each in self.mapped.communication):
            self.mapped.communication.append(found)

    def _is_over_the_axis(self, node: ast.Call) -> bool:
        given = [keyword.value for keyword in node.keywords if keyword.arg == "axis_name"] or node.args[1:2]
        names = given[0].elts if given and isinstance(given[0], (ast.Tuple, ast.List)) else given
        # A name that the text does not tell may be that of the axis.
        axes = [axis_of(self.program, each) for each in names]
        return any(axis == self.axis or axis[:1] not in "'\"" for axis in axes)

    def _is_told_the_axis(self, node: ast.Call) -> bool:
        given = [keyword.value for keyword in node.keywords if "axis" in (keyword.arg or "")]
        is_told = any(axis_of(self.program, each) == self.axis for each in given)
        return is_told and self.program.dotted(node.func) not in ("jax.vmap", *PMAPS)


def axis_of(program: Program, node: ast.expr) -> str:
    """Return the name of an axis: in quotes if the text tells it, else what stands there."""
    found = program.origin(node)
    return repr(found.value) if isinstance(found, ast.Constant) else ast.unparse(node)


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 50 and "\n" not in text else text.splitlines()[0][:47] + "..."
