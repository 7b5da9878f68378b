"""Scaling page: how a step scales, as HTML that needs nothing beside it."""

import argparse
from html import escape
from typing import Any

from ._base.units import number_text
from ._call.picture import Mark, html, svg_of

_WIDTH, _HEIGHT, _LEFT, _BASE = 640, 260, 90, 30


def words(found: list[dict[str, Any]], unit: str) -> str:
    """The last number of replicas, on one line."""
    one, first = found[-1], found[0]
    efficiency = one["rate"] / first["rate"] * first["replicas"] / one["replicas"]
    return (
        f"{one['rows']} rows in {one['seconds'] * 1e3:.2f} ms, {number_text(one['rate'])} {unit}/s, "
        f"{100 * efficiency:.0f} % of {first['replicas']} replica{'s' * (first['replicas'] > 1)} each"
    )


def page(options: argparse.Namespace, found: list[dict[str, Any]]) -> str:
    """One page of HTML, which needs nothing beside it."""
    path, name = options.target
    title = escape(f"{path.name}:{name} on 1 to {found[-1]['replicas']} replicas")
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
    kind = "as many rows for all" if options.strong else "as many rows for each replica"
    cpus = (
        "<p>Replicas on CPU devices share the machine's cores, all of which one may use: this shows what a program "
        "adds, and not what it would gain.</p>"
        if found[0]["platform"] == "cpu"
        else ""
    )
    last = found[-1]
    return html(
        title,
        f"<p>Medians of {options.rounds} rounds of {options.steps} steps in a row, {kind}.</p>{cpus}"
        f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{rows}</table>"
        f"{_chart(found, options.unit)}<h2>One step on {last['replicas']} replicas</h2>{last['svg']}"
        f"<pre>{escape(last['explained'])}</pre><h2>On</h2><pre>{escape(last['info'])}</pre>",
    )


def _chart(found: list[dict[str, Any]], unit: str) -> str:
    """Units a second over replicas: a bar each, and a line where each replica would be as quick as the first."""
    ideal = [found[0]["rate"] / found[0]["replicas"] * one["replicas"] for one in found]
    top = max([one["rate"] for one in found] + ideal)
    step = (_WIDTH - _LEFT) / len(found)

    marks, base = [Mark(0, 14, text=f"{unit}/s; grey: ideal")], _HEIGHT - _BASE
    for i, (one, best) in enumerate(zip(found, ideal, strict=True)):
        x = _LEFT + i * step
        for rate, color, at, width in ((best, "#d0d0d0", 0.1, 0.7), (one["rate"], "#4c78a8", 0.2, 0.5)):
            height = (base - 30) * rate / top
            marks.append(Mark(x + at * step, base - height, width * step, height, color))
        marks.append(Mark(x + 0.2 * step, base - height - 4, text=number_text(one["rate"])))
        marks.append(Mark(x + 0.42 * step, base + 18, text=str(one["replicas"])))
    return svg_of(marks, _HEIGHT, _WIDTH, f"{unit} a second by replicas")
