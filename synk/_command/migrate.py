"""Migrate: what programs with jax.pmap become in synk. Reads files; runs and writes nothing."""

import argparse
import ast
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .advice import Finding, advice_of
from .mapped import Mapped, mapped_functions
from .names import Program
from .uses import axes_inside, elsewhere, uses

# The first that one of a file's functions is, is the file's.
_KINDS = ("communicates in loops", "communicates inside", "training step", "combines results", "independent items")


def migrate(arguments: Sequence[str]) -> int:
    """Print the report; return 1 where something certain was found, 2 where a file cannot be read, else 0."""
    parser = argparse.ArgumentParser("python -m synk migrate", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="a program; give those that it imports too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    program, trees, failed = Program(), dict[str, ast.Module](), False
    for path in options.files:
        try:
            trees[path] = program.add(path, Path(path).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            print(f"{path}: it cannot be read: {error}", file=sys.stderr)
            failed = True
    # Chains of operators nest as deeply as they are long. Frames of Python, unlike those of its parser, need no stack.
    sys.setrecursionlimit(100_000)
    reports = [file_report(program, path, tree) for path, tree in trees.items()]
    print(json.dumps(reports, indent=1) if options.json else "\n\n".join(map(_text, reports)))
    found = any(each["sure"] == "certain" for report in reports for each in report["findings"])
    return 2 if failed else int(found)


def file_report(program: Program, path: str, tree: ast.Module) -> dict[str, Any]:
    """Report on one of a program's files."""
    mapped, foreign = mapped_functions(program, tree), [*elsewhere(program, tree)]
    findings = [*(advice_of(program, each) for each in mapped), *uses(program, tree, mapped), *foreign]
    inside = [] if mapped else [*axes_inside(program, tree)]
    kinds = {each.kind for each in mapped}
    kind = next((kind for kind in _KINDS if kind in kinds), "functions that were not seen" if mapped or foreign else "")
    return {
        "file": path,
        "kind": kind or ("a library with an axis inside" if inside else "no pmap"),
        "mapped": len(mapped) + len(foreign),
        "understood": sum(each.is_understood for each in mapped),
        "rows": _rows(mapped, bool(inside), not foreign),
        "findings": [each._asdict() for each in sorted({*findings, *inside}, key=lambda each: (each.line, each.saw))],
    }


def _rows(mapped: list[Mapped], is_library: bool, are_all_seen: bool) -> str:
    """Say whether numbers of rows will have to divide."""
    if is_library or any(each.kind in _KINDS[:2] for each in mapped):
        return "must divide, for what communicates inside"
    if not are_all_seen or any(not (each.is_whole or each.communication) for each in mapped):
        return "may have to divide"
    return "need not divide" + ("" if all(each.is_whole for each in mapped) else ", as far as can be seen here")


def _text(report: dict[str, Any]) -> str:
    """Write a file's report for people."""
    lines = [f"{report['file']}: {report['kind']}"]
    if report["mapped"]:
        lines[0] += f"; {report['understood']} of {report['mapped']} mapped functions understood; rows {report['rows']}"
    for each in report["findings"]:
        finding = Finding(**each)
        lines.append(f"  {finding.line}: {finding.sure}: {finding.saw}")
        lines += textwrap.wrap(f"{finding.advice}.", 112, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
