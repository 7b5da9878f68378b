"""Names: find what a name in the text of a program stands for, without running it."""

import ast
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import PurePath
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
PMAPS = {"jax.pmap", "flax.nnx.pmap", "equinox.filter_pmap"}
LOOPS = {f"jax.lax.{name}" for name in ("scan", "while_loop", "fori_loop", "cond", "switch", "map", "associative_scan")}
# Calls that return a function which calls their first argument.
_WRAPPERS = {"functools.partial", "functools.wraps", *PMAPS} | {
    f"jax.{name}" for name in ("jit", "vmap", "grad", "value_and_grad", "checkpoint", "remat", "named_call")
}


class Item(NamedTuple):
    """An element of a value that is unpacked."""

    value: ast.expr


# A dotted name for what is imported, an expression or definition, None for a parameter.
Value = str | ast.AST | Item | None


def _once(circle: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Keep what a method finds for a node or a name; what leads back to itself finds `circle`."""

    def keep(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def find(self: "Program", node: ast.AST | str) -> Any:
            key = (method.__name__, node)
            if key not in self.kept:
                self.kept[key] = circle
                self.kept[key] = method(self, node)
            return self.kept[key]

        return find

    return keep


class Program:
    """Files read together. Names of one that another imports are followed."""

    def __init__(self) -> None:
        self.modules: dict[tuple[str, ...], ast.Module] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.kept: dict[tuple[str, ast.AST | str], Any] = {}
        self._bindings: dict[ast.AST, dict[str, list[tuple[ast.AST, Value]]]] = {}

    def add(self, path: str, text: str) -> ast.Module:
        """Read a file; SyntaxError, ValueError or RecursionError where Python cannot."""
        tree = ast.parse(text)
        # jax.pmap(fun=f) is jax.pmap(f).
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and not node.args:
                node.args = [keyword.value for keyword in node.keywords if keyword.arg == "fun"]
                node.keywords = [keyword for keyword in node.keywords if keyword.arg != "fun"]
        self.modules[PurePath(path).with_suffix("").parts] = tree
        self.parents.update({child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)})
        for node in ast.walk(tree):
            for name, value in _bound(node):
                # A definition binds its name outside, its parameters inside.
                scope = node if value is None and isinstance(node, _SCOPES) else self.scope(node)
                self._bindings.setdefault(scope, {}).setdefault(name, []).append((node, value))
        return tree

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what encloses a node, from the inside."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function, class or module in which a node stands."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, _SCOPES)), node)

    def path(self, node: ast.AST) -> str:
        """Return the path of the file in which a node stands."""
        module = [*self.ancestors(node)][-1]
        return next(str(PurePath(*parts)) + ".py" for parts, tree in self.modules.items() if tree is module)

    @_once(None)
    def origin(self, node: ast.AST) -> ast.AST | str | None:
        """Follow names to an expression, a definition, or the dotted name of what is defined elsewhere."""
        if isinstance(node, ast.Name):
            return self._follow(self._value(node))
        if not isinstance(node, ast.Attribute):
            return node
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            return self._member(node)
        base = self.origin(node.value)
        return self._imported(f"{base}.{node.attr}") if isinstance(base, str) else None

    def dotted(self, node: ast.AST) -> str:
        """Return the dotted name of what is imported from a library, or nothing."""
        found = self.origin(node)
        return found if isinstance(found, str) else ""

    @_once((None, False))
    def function(self, node: ast.AST) -> tuple[Function | None, bool]:
        """Find the function that an expression is, calls first or returns; and whether a loop of JAX's runs it."""
        found = self.origin(node)
        if isinstance(found, Function):
            return found, False
        if not isinstance(found, ast.Call):
            return None, False
        callee, args = self.dotted(found.func), found.args
        if callee == "functools.partial" and len(args) > 1 and self.dotted(args[0]) in LOOPS:
            return self.function(args[1])[0], True
        if args and (callee in _WRAPPERS or self.pmap(found) is not None):
            return self.function(args[0])
        returned = self._returned(self.function(found.func)[0])
        return self.function(returned) if returned is not None else (None, False)

    def mapper(self, node: ast.AST) -> list[ast.Call] | None:
        """Return the calls that give keywords to a way to say `jax.pmap`, the outermost first; None for others."""
        found = self.origin(node)
        if isinstance(found, ast.Call) and self.dotted(found.func) == "functools.partial" and len(found.args) == 1:
            inner = self.mapper(found.args[0])
            return None if inner is None else [found, *inner]
        return [] if found in PMAPS else None

    def pmap(self, node: ast.AST) -> list[ast.Call] | None:
        """Return the calls that give keywords to pmap where an expression maps a function; None for others."""
        made = self.mapper(node.func) if isinstance(node, ast.Call) and node.args else None
        return None if made is None else [node, *made]  # pyright: ignore[reportReturnType]

    def is_mapped(self, node: ast.AST) -> bool:
        """Tell whether an expression is a function that pmap made."""
        found = self.origin(node)
        if isinstance(found, ast.FunctionDef):
            return any(self.mapper(decorator) is not None for decorator in found.decorator_list)
        return isinstance(found, ast.Call) and self.pmap(found) is not None

    def bound(self, node: ast.Name) -> ast.AST | str | None:
        """Return the expression that gave a name its value, or an element of it."""
        value = self._value(node)
        return value.value if isinstance(value, Item) else value

    def _value(self, node: ast.Name) -> Value:
        """Return what a name is bound to before its place in the text, or last in a scope around; None if unsure."""
        scopes = [outer for outer in self.ancestors(node) if isinstance(outer, _SCOPES)]
        around = {id(outer) for outer in self.ancestors(node)}
        for scope in scopes:
            bound = self._bindings.get(scope, {}).get(node.id, [])
            if scope is scopes[0]:
                before = [(at, to) for at, to in bound if to is None or getattr(at, "end_lineno", 0) < node.lineno]
                bound = before or bound
            elif isinstance(scope, ast.ClassDef):
                continue
            if bound:
                place, value = bound[-1]
                outer = [each for each in self.ancestors(place) if id(each) not in around]
                is_branch = any(isinstance(each, (ast.If, ast.Try)) and scope in self.ancestors(each) for each in outer)
                return None if is_branch and len(bound) > 1 else value
        return None

    def _follow(self, value: Value) -> ast.AST | str | None:
        if isinstance(value, str):
            return self._imported(value)
        return self.origin(value) if isinstance(value, ast.AST) else None

    def _returned(self, maker: Function | None) -> ast.expr | None:
        """Return the only expression that a function returns."""
        if isinstance(maker, ast.Lambda) or maker is None:
            return maker.body if maker else None
        values = [n.value for n in ast.walk(maker) if isinstance(n, ast.Return) and self.scope(n) is maker]
        return values[0] if len(values) == 1 else None

    def _member(self, node: ast.Attribute) -> ast.AST | str | None:
        """Find a method, or the only value that a class gives to `self.name`."""
        owner = next((outer for outer in self.ancestors(node) if isinstance(outer, ast.ClassDef)), None)
        if owner is None:
            return None
        values = [value for _, value in self._bindings.get(owner, {}).get(node.attr, [])]
        for each in ast.walk(owner):
            if isinstance(each, ast.Assign) and _is_member(each.targets[0], node.attr):
                values.append(each.value)
        return self._follow(values[0]) if len(values) == 1 else None

    @_once(None)
    def _imported(self, dotted: str) -> ast.AST | str | None:
        """Follow a name into another of the files; else return it."""
        *module, name = dotted.split(".")
        trees = [tree for parts, tree in self.modules.items() if module and list(parts[-len(module) :]) == module]
        bound = self._bindings.get(trees[0], {}).get(name, []) if len(trees) == 1 else []
        if not bound:
            return dotted
        return self._follow(bound[-1][1])


def _is_member(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Name)


def _bound(node: ast.AST) -> Iterator[tuple[str, Value]]:
    """Yield the names that a statement or a function binds, and to what."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, node
    if isinstance(node, Function):
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg):
                yield arg.arg, None
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, ".".join(filter(None, (node.module, alias.name)))
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _unpacked(target, node.value)
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from ((name.id, None) for name in ast.walk(node.target) if isinstance(name, ast.Name))
    elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
        yield node.optional_vars.id, None


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Value]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    is_seen = isinstance(value, ast.Tuple) and len(value.elts) == len(names)
    values = value.elts if isinstance(value, ast.Tuple) and is_seen else [Item(value)] * len(names)
    yield from ((name.id, each) for name, each in zip(names, values, strict=True) if isinstance(name, ast.Name))
