"""Advice: say how synk spells what pmap maps."""

import ast
from collections.abc import Iterable
from typing import Any, NamedTuple

from .mapped import COLLECTIVES, Communication, Mapped
from .names import Program

_UNTOUCHED = "donate_argnums: leave it out; arguments are never overwritten, so one more copy may be in memory"
_BY_HAND = {
    "devices": "devices=: by hand; `with synk.init(devices):` makes a group of some devices",
    "axis_size": "axis_size=: leave it out; rows are counted",
    "backend": "backend=: synk.init(jax.devices(backend))",
    "global_arg_shapes": "global_arg_shapes=: by hand",
}


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
      sure: "certain" or "perhaps".
    """

    line: int
    saw: str
    advice: str
    sure: str


def advice_of(program: Program, mapped: Mapped) -> Finding:
    """Say how synk spells one use of pmap."""
    keywords, notes, are_sure = _keywords(mapped)
    advice, is_sure = _BY_KIND[mapped.kind](program, mapped, "".join(f", {keyword}" for keyword in keywords))
    if isinstance(mapped.node, ast.FunctionDef) and isinstance(program.scope(mapped.node), ast.ClassDef):
        notes.append(f"synk.function decorates no method: make it in __init__, of self.{mapped.target}")
    if any(program.pmap(outer) is not None for outer in program.ancestors(mapped.node)):
        notes, is_sure = [*notes, "A pmap inside another has no counterpart: replicas have one axis"], False
    axis = f"axis {ast.unparse(mapped.axis)}" if mapped.axis is not None else "no axis_name"
    return Finding(
        mapped.node.lineno,
        f"pmap of {mapped.target}, {axis}: {mapped.kind}",
        ". ".join([advice, *notes]),
        "certain" if is_sure and are_sure else "perhaps",
    )


def _keywords(mapped: Mapped) -> tuple[list[str], list[str], bool]:
    """Return keywords for synk's function, what else is to say, and whether all options could be read."""
    options = mapped.options
    modes: dict[str, str] = {}
    keywords: list[str] = []
    notes = [_BY_HAND[option] for option in _BY_HAND if option in options]
    are_sure = not notes
    notes += [_UNTOUCHED] * ("donate_argnums" in options)
    in_axes, out_axes = (_axes(options.get(option)) for option in ("in_axes", "out_axes"))
    statics = _literal(options.get("static_broadcasted_argnums"))
    if in_axes is None or out_axes is None or isinstance(statics, str):
        notes.append('Its axes: "broadcast" or op "same" for None, rows for 0, others by hand; "static" arguments')
        are_sure = False
    else:
        modes |= {_parameter(mapped, i): '"broadcast"' for i, axis in enumerate(in_axes) if axis is None}
        places = (statics,) if isinstance(statics, int) else statics if isinstance(statics, (tuple, list)) else ()
        modes |= {_parameter(mapped, i): '"static"' for i in places}
    if modes:
        keywords.append(f"inputs={{{', '.join(f'{name}: {mode}' for name, mode in modes.items())}}}")
    if out_axes and None in out_axes and mapped.kind not in ("training step", "combines results"):
        ops = ['"same"' if axis is None else '"concat"' for axis in out_axes]
        keywords.append("outputs=" + (ops[0] if len(ops) == 1 else f"({', '.join(ops)})"))
    return keywords, notes, are_sure and all(name[0] == '"' for name in modes)


def _axes(node: ast.expr | None) -> tuple[Any, ...] | None:
    """Read in_axes or out_axes: a tuple of None and 0, empty where there is nothing to say; None for others."""
    if node is None:
        return ()
    axes = _literal(node)
    axes = axes if isinstance(axes, (tuple, list)) else () if axes == 0 else (axes,)
    return tuple(axes) if all(axis is None or axis == 0 for axis in axes) else None


def _parameter(mapped: Mapped, index: int) -> str:
    """Name a parameter of the mapped function as text; its number where the text does not tell."""
    given = mapped.node.args[0] if isinstance(mapped.node, ast.Call) else None
    names = [] if mapped.function is None else [arg.arg for arg in mapped.function.args.args]
    # What a partial gives by position comes before.
    is_shifted = (isinstance(given, ast.Call) and len(given.args) > 1) or isinstance(given, ast.Attribute)
    return f'"{names[index]}"' if index < len(names) and not is_shifted else f"argument {index}"


def _literal(node: ast.expr | None) -> Any:
    """Read a literal; the text of another expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node) if node is not None else None


def _lines(program: Program, mapped: Mapped, communication: list[Communication]) -> str:
    """Name where something communicates: lines of the file, or of others."""
    own_path = program.path(mapped.node)
    places = sorted({(program.path(each.node), each.node.lineno) for each in communication})
    lines = [str(line) if path == own_path else f"{line} of {path}" for path, line in places]
    return f"line {lines[0]}" if len(lines) == 1 else f"lines {', '.join(lines)}"


def _named(mapped: Mapped) -> str:
    return f", axis_name={ast.unparse(mapped.axis)}" if mapped.axis is not None else ""


def _elsewhere(mapped: Mapped) -> str:
    """Say what was not seen."""
    names = [*mapped.unseen]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"Not seen: {', '.join(names[:3])}{more}, which may communicate too" if names else ""


def _not_seen(program: Program, mapped: Mapped, keywords: str) -> tuple[str, bool]:
    text = f"{mapped.target} is defined elsewhere: give that file too"
    return (
        f"{text}. synk.map({mapped.target}{keywords}{_named(mapped)}) does as pmap did, with one row a replica",
        False,
    )


def _independent(program: Program, mapped: Mapped, keywords: str) -> tuple[str, bool]:
    if mapped.is_whole:
        return f"synk.map({mapped.target}{keywords}), for any number of rows", True
    text = f"nothing that was seen communicates: synk.map({mapped.target}{keywords}{_named(mapped)})"
    return f"{text}, without axis_name for any number of rows. {_elsewhere(mapped)}", False


def _in_loops(program: Program, mapped: Mapped, keywords: str) -> tuple[str, bool]:
    inside = [each for each in mapped.communication if each.place in ("loop", "inside")]
    seen = [each for each in inside if not each.is_told]
    lines = _lines(program, mapped, seen or inside)
    where = f"it {'communicates' if seen else 'may communicate'} at {lines}, where nothing can be cut"
    called = f"({mapped.target}{keywords}{_named(mapped)})"
    text = f"{where}: keep {mapped.target} as it is. synk.map{called} does as pmap did, with one row a replica; or"
    return (
        f'{text} synk.function{called} of plain rows, which must divide, and op "same" for what is equal on all',
        bool(seen),
    )


def _training(program: Program, mapped: Mapped, keywords: str) -> tuple[str, bool]:
    cut = mapped.gradients[0]
    op = COLLECTIVES[f"jax.lax.{cut.name}"]
    text = (
        f"synk.function({mapped.target}, inputs=[rows]) that returns what {_lines(program, mapped, [cut])} combines, "
        f"by op {op}, and @f.then for what follows it"
    )
    if cut.name == "pmean":
        text = f"synk.train.step(loss, params, optimizer); or {text}"
    if told := mapped.told:
        names = ", ".join(dict.fromkeys(each.name for each in told))
        text += f". {names} ({_lines(program, mapped, told)}) gets the axis: look at it"
    if helpers := [each for each in mapped.at("helper") if each is not cut]:
        lines = _lines(program, mapped, helpers)
        text += f". What communicates at {lines} becomes ops too, or needs axis_name= and rows that divide"
    # Certain where a gradient is combined under the name that the optimizer then gets.
    statement = next((s for s in program.ancestors(cut.node) if isinstance(s, ast.Assign)), None)
    combined = _names(statement.targets if statement else [])
    used = _names(call for call in mapped.updates if call.lineno >= cut.node.lineno)
    is_plain = not any(isinstance(outer, ast.If) for outer in program.ancestors(cut.node))
    is_plain &= not (mapped.told or mapped.at("helper"))
    return text, mapped.differentiates and is_plain and bool(combined & used)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def _combines(program: Program, mapped: Mapped, keywords: str) -> tuple[str, bool]:
    combined = mapped.at("top", "helper")
    lines = _lines(program, mapped, combined)
    ops = dict.fromkeys(
        f"{each.name}: op {COLLECTIVES[f'jax.lax.{each.name}']}" for each in combined if each.name in _OPS
    )
    text = f"synk.function({mapped.target}{keywords}) without the collectives of {lines} ({', '.join(ops)})"
    # Whether a mapped function sees rows or one entry a device, the text does not tell.
    more = _elsewhere(mapped)
    return f"{text}, for any number of rows; what follows them goes into @f.then" + (f". {more}" if more else ""), False


_OPS = {name.removeprefix("jax.lax.") for name, op in COLLECTIVES.items() if op}


_BY_KIND = {
    "not seen": _not_seen,
    "independent items": _independent,
    "communicates in loops": _in_loops,
    "communicates inside": _in_loops,
    "training step": _training,
    "combines results": _combines,
}
