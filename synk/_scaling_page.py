"""Scaling page: how a step scales, as HTML that needs nothing beside it."""

import argparse
from html import escape
from typing import Any

from ._base.units import counted, number_text
from ._explain.picture import EMPTY, ROWS, Mark, html, scrolled, svg_of

_WIDTH, _HEIGHT, _LEFT, _BASE = 640, 260, 90, 30


def words(found: list[dict[str, Any]], unit: str) -> str:
    """Say on one line what the last number of replicas did."""
    one, first = found[-1], found[0]
    said = f"{one['rows']} rows in {one['seconds'] * 1e3:.2f} ms, {number_text(one['rate'])} {unit}/s"
    if one is first:
        return said
    efficiency = one["rate"] / first["rate"] * first["replicas"] / one["replicas"]
    return f"{said}, efficiency {100 * efficiency:.0f} %"


def page(options: argparse.Namespace, found: list[dict[str, Any]]) -> str:
    """One page of HTML, which needs nothing beside it."""
    path, name = options.target
    title = escape(f"{path.name}:{name} on up to {counted(found[-1]['replicas'], 'replica')}")
    rows = ""
    for one in found:
        speedup = one["rate"] / found[0]["rate"]
        cells = (
            one["replicas"],
            one["rows"],
            f"{one['seconds'] * 1e3:.3f}",
            number_text(one["rate"]),
            f"{speedup:.2f}",
            f"{100 * speedup * found[0]['replicas'] / one['replicas']:.0f} %",
        )
        rows += f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
    heads = ("replicas", "rows", "ms a step", f"{options.unit}/s", "speed-up", "efficiency")
    kind = "the same rows for any number of replicas" if options.strong else "the same number of rows for each replica"
    cpus = (
        "<p>Replicas on CPU devices share the machine's cores, and one replica may use all of them. So this shows the "
        "cost that synk adds, not the speed that more devices would bring.</p>"
        if found[0]["platform"] == "cpu"
        else ""
    )
    last = found[-1]
    return html(
        title,
        f"<p>Medians of {options.rounds} rounds of {options.steps} steps in a row, {kind}.</p>{cpus}"
        + scrolled(f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{rows}</table>")
        + scrolled(_chart(found, options.unit))
        + f"<h2>One step on {counted(last['replicas'], 'replica')}</h2>{scrolled(last['svg'])}"
        f"<pre>{escape(last['explained'])}</pre><h2>The machine</h2><pre>{escape(last['machine'])}</pre>",
    )


def _chart(found: list[dict[str, Any]], unit: str) -> str:
    """Units a second over replicas: a bar each, and a line where each replica would be as quick as the first."""
    ideal = [found[0]["rate"] / found[0]["replicas"] * one["replicas"] for one in found]
    top = max([one["rate"] for one in found] + ideal)
    step = (_WIDTH - _LEFT) / len(found)

    marks, base = [Mark(0, 14, text=f"{unit}/s; grey: ideal")], _HEIGHT - _BASE
    for i, (one, best) in enumerate(zip(found, ideal, strict=True)):
        x = _LEFT + i * step
        for rate, color, at, width in ((best, EMPTY, 0.1, 0.7), (one["rate"], ROWS, 0.2, 0.5)):
            height = (base - 30) * rate / top
            marks.append(Mark(x + at * step, base - height, width * step, height, color))
        marks.append(Mark(x + 0.2 * step, base - height - 4, text=number_text(one["rate"])))
        marks.append(Mark(x + 0.42 * step, base + 18, text=str(one["replicas"])))
    return svg_of(marks, _HEIGHT, _WIDTH, f"{unit} a second by replicas")
