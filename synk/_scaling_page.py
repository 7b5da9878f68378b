"""Scaling page: how a step scales, as HTML that needs nothing beside it."""

import argparse
from html import escape
from typing import Any

from ._base.units import number_text
from ._call.picture import STYLE

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
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f"<p>Medians of {options.rounds} rounds of {options.steps} steps in a row, {kind}.</p>{cpus}"
        f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{rows}</table>"
        f"{_chart(found, options.unit)}<h2>One step on {last['replicas']} replicas</h2>{last['svg']}"
        f"<pre>{escape(last['explained'])}</pre><h2>On</h2><pre>{escape(last['info'])}</pre></body></html>\n"
    )


def _chart(found: list[dict[str, Any]], unit: str) -> str:
    """Units a second over replicas: a bar each, and a line where each replica would be as quick as the first."""
    ideal = [found[0]["rate"] / found[0]["replicas"] * one["replicas"] for one in found]
    top = max([one["rate"] for one in found] + ideal)
    step = (_WIDTH - _LEFT) / len(found)

    def height(rate: float) -> float:
        return (_HEIGHT - _BASE - 30) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'style="max-width:{_WIDTH}px;background:#ffffff" font-family="sans-serif" font-size="12" '
        f'aria-label="{escape(unit, quote=True)} a second by replicas">'
        f'<text x="0" y="14">{escape(unit)}/s; grey: ideal</text>'
    ]
    for i, (one, best) in enumerate(zip(found, ideal, strict=True)):
        x, base = _LEFT + i * step, _HEIGHT - _BASE
        for rate, color, at, width in ((best, "#d0d0d0", 0.1, 0.7), (one["rate"], "#4c78a8", 0.2, 0.5)):
            parts.append(
                f'<rect x="{x + at * step:.1f}" y="{base - height(rate):.1f}" width="{width * step:.1f}" '
                f'height="{height(rate):.1f}" fill="{color}"/>'
            )
        parts.append(
            f'<text x="{x + 0.45 * step:.1f}" y="{base - height(one["rate"]) - 4:.1f}" text-anchor="middle">'
            f"{number_text(one['rate'])}</text>"
            f'<text x="{x + 0.45 * step:.1f}" y="{base + 18}" text-anchor="middle">{one["replicas"]}</text>'
        )
    return "".join([*parts, "</svg>"])
