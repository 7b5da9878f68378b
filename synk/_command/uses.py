"""Uses: find what programs with pmap do around it, and say what it becomes."""

import ast
from collections.abc import Iterator

from .advice import Finding
from .mapped import COLLECTIVES, TREE_MAPS, Mapped, axis_of, short
from .names import PMAPS, Program

_ONE_VALUE = 'synk.shared(state) for what is updated; else pass it as it is, as a "broadcast" argument'
_FIRST = 'w.value, or nothing for what op "same" or "mean" gives; synk.contrib.unstack(state) for a state saved stacked'
_HELPERS = {
    "flax.jax_utils.replicate": _ONE_VALUE,
    "flax.jax_utils.unreplicate": _FIRST,
    "flax.jax_utils.prefetch_to_device": "f.iterate(...) or f.stream(batches, prefetch=2)",
    "flax.jax_utils.pad_shard_unpad": "nothing: any number of rows; f.over(...) for a whole dataset",
    "flax.training.common_utils.shard": "nothing: pass the rows as they are",
    "flax.training.common_utils.shard_prng_key": 'a "broadcast" key, and synk.part_key(key) inside',
    "flax.training.common_utils.get_metrics": "nothing: results are combined already; f.over(...) for a whole dataset",
    "jax.device_put_replicated": _ONE_VALUE,
    "jax.device_put_sharded": 'one array of all rows; synk.data(x, place="scatter") keeps it on the devices',
}
_KEYS = (
    'rows of synk.map as they are; for synk.function "broadcast" keys, and keys[synk.rank()] inside, or synk.row_keys'
)
_COUNTS = {"jax.device_count", "jax.local_device_count"}
_DEVICES = {"jax.devices", "jax.local_devices"}
_NEEDLESS = "needed only for what communicates inside"


def uses(program: Program, tree: ast.Module, mapped: list[Mapped]) -> Iterator[Finding]:
    """Yield what stands around the mapped functions of a file."""
    axes = {axis_of(program, each.axis) for each in mapped if each.axis is not None}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            if advice := _HELPERS.get(program.dotted(node)):
                sure = "perhaps" if _is_for_some_devices(program, node) else "certain"
                yield Finding(node.lineno, ast.unparse(node), advice, sure)
        elif isinstance(node, ast.Call):
            yield from _call(program, node, axes, bool(mapped))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_device_count(program, node.right):
            yield Finding(node.lineno, short(node), _NEEDLESS, "perhaps")


def _call(program: Program, node: ast.Call, axes: set[str], maps: bool) -> Iterator[Finding]:
    name, saw = program.dotted(node.func), short(node)
    last = node.func.attr if isinstance(node.func, ast.Attribute) else name.rpartition(".")[2]
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    first = node.args[0] if node.args else None
    if name == "jax.lax.axis_index" and _axis(program, node, 0) in axes:
        yield Finding(node.lineno, saw, "synk.rank(); or as it is, with axis_name= of the function", "certain")
    elif name == "jax.lax.psum" and isinstance(first, ast.Constant) and _axis(program, node, 1) in axes:
        yield Finding(node.lineno, saw, "synk.size(); or as it is, with axis_name= of the function", "certain")
    elif name == "jax.random.split" and len(node.args) > 1 and _is_device_count(program, node.args[1]):
        yield Finding(node.lineno, saw, _KEYS, "certain" if maps else "perhaps")
    elif last == "reshape" and _makes_an_axis_of_devices(program, node, name):
        yield Finding(node.lineno, saw, "nothing: pass the rows as they are", "perhaps")
    elif name in TREE_MAPS and _takes_first(first) and _is_result(program, node.args[1:2]):
        yield Finding(node.lineno, saw, _FIRST, "certain")
    elif last == "Optimizer" and name.startswith("kfac_jax") and "multi_device" in given:
        yield Finding(node.lineno, saw, "not synk's: K-FAC calls pmap itself. Use jax.shard_map", "certain")
    for keyword, value in given.items():
        is_of_norm = keyword == "axis_name" and (last.endswith("Norm") or last == "DynamicScale")
        if (is_of_norm or keyword == "cross_replica_axis") and axis_of(program, value) in axes:
            advice = "keep it, with axis_name= of the function; numbers of rows must divide"
            yield Finding(value.lineno, f"{last}({keyword}={short(value)})", advice, "certain")
        elif keyword == "drop_remainder" and maps and isinstance(value, ast.Constant) and value.value is True:
            yield Finding(value.lineno, "drop_remainder=True", _NEEDLESS, "perhaps")


def elsewhere(program: Program, tree: ast.Module) -> Iterator[Finding]:
    """Yield the calls of something called pmap that another file has."""
    for node in ast.walk(tree):
        names: list[ast.expr] = [node.func] if isinstance(node, ast.Call) else getattr(node, "decorator_list", [])
        if isinstance(node, ast.Call) and program.dotted(node.func) == "functools.partial":
            names = node.args[:1]
        for name in names:
            dotted = program.dotted(name)
            if dotted.endswith(".pmap") and dotted not in PMAPS:
                yield Finding(name.lineno, short(name), "it comes from another file: give that file too", "perhaps")


def axes_inside(program: Program, tree: ast.Module) -> Iterator[Finding]:
    """Yield the collectives of a file that maps nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and program.dotted(node.func) in COLLECTIVES:
            advice = "keep it; the function that is mapped needs axis_name=, and numbers of rows that divide"
            yield Finding(node.lineno, short(node), advice, "perhaps")


def _is_for_some_devices(program: Program, node: ast.AST) -> bool:
    """Tell whether `device_put_sharded` or the like may be given other than all devices."""
    call = program.parents[node]
    if not isinstance(call, ast.Call) or not program.dotted(node).startswith("jax."):
        return False
    devices = program.origin(call.args[1]) if len(call.args) > 1 else None
    return not (isinstance(devices, ast.Call) and program.dotted(devices.func) in _DEVICES and not devices.args)


def _axis(program: Program, node: ast.Call, index: int) -> str:
    given = [keyword.value for keyword in node.keywords if keyword.arg == "axis_name"] or node.args[index : index + 1]
    return axis_of(program, given[0]) if given else ""


def _is_device_count(program: Program, node: ast.AST) -> bool:
    found = program.origin(node)
    if not isinstance(found, ast.Call):
        return False
    if isinstance(found.func, ast.Name) and found.func.id == "len" and found.args:
        devices = program.origin(found.args[0])
        return isinstance(devices, ast.Call) and program.dotted(devices.func) in _DEVICES
    return program.dotted(found.func) in _COUNTS


def _makes_an_axis_of_devices(program: Program, node: ast.Call, name: str) -> bool:
    """Tell whether a reshape's first axis is that of the devices."""
    shape = node.args[1:] if name.startswith(("jax.numpy.", "numpy.")) else node.args
    first = shape[0] if shape else None
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    if isinstance(first, (ast.Tuple, ast.List)) and first.elts:
        first = first.elts[0]
    return first is not None and _is_device_count(program, first)


def _takes_first(node: ast.AST | None) -> bool:
    body = node.body if isinstance(node, ast.Lambda) else None
    return isinstance(body, ast.Subscript) and isinstance(body.slice, ast.Constant) and body.slice.value == 0


def _is_result(program: Program, nodes: list[ast.expr]) -> bool:
    """Tell whether a mapped call gave a name its value."""
    value = program.bound(nodes[0]) if nodes and isinstance(nodes[0], ast.Name) else None
    return isinstance(value, ast.Call) and program.is_mapped(value.func)
