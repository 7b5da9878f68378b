"""Picture: a call drawn: rows of the replicas, the schedule of its programs, memory. As SVG, in a page, or as PNG."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .._base.units import number_text, size_text

WIDTH, MARGIN, LINE = 900, 24, 20
_STYLE = (
    "body{margin:2em auto;max-width:60em;padding:0 1em;font-family:sans-serif;color:#222;background:#fff}"
    "pre{overflow-x:auto;padding:1em;background:#f4f4f4}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child{text-align:left}"
)
_BLUE, _RED, _GREEN, _GREY, _DARK = "#4c78a8", "#e45756", "#54a24b", "#d0d0d0", "#333333"
# What a bar of the schedule means, by whether its bytes travel behind computation.
_KINDS = {True: (_GREEN, "behind computation"), False: (_RED, "nothing runs meanwhile"), None: (_GREY, "unknown")}


class Mark(NamedTuple):
    """A rectangle, or where it has a text that: at a point in pixels from the upper left."""

    x: float
    y: float
    width: float = 0
    height: float = 0
    color: str = _DARK
    text: str = ""
    size: int = 12


def draw_svg(e: Any) -> str:
    """An explanation as SVG text."""
    return svg_of(*_marks(e), WIDTH, e.function)


def svg_of(marks: Iterable[Mark], height: int, width: int, label: str) -> str:
    """Marks as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="100%" '
        f'style="max-width:{width}px;background:#ffffff" font-family="sans-serif" role="img" '
        f'aria-label="{escape(label, quote=True)}">'
    ]
    for m in marks:
        place = f'x="{m.x:.1f}" y="{m.y:.1f}" fill="{m.color}"'
        if m.text:
            parts.append(f'<text {place} font-size="{m.size}">{escape(m.text)}</text>')
        else:
            parts.append(f'<rect {place} width="{m.width:.1f}" height="{m.height:.1f}"/>')
    return "\n".join([*parts, "</svg>"])


def html(title: str, body: str) -> str:
    """A page that needs nothing beside it; both are HTML already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>{title}</h1>'
        f"{body}</body></html>\n"
    )


def page(e: Any, text: str) -> str:
    """An explanation as a page of HTML, which needs nothing beside it."""
    title = escape(f"{e.function} on {e.group}")
    rows = "".join(
        f"<tr><td>{escape(p.role)}</td><td>{p.launches}</td><td>{c.kind}</td><td>{c.operand_bytes}</td>"
        f"<td>{c.result_bytes}</td><td>{_KINDS[c.behind][1]}</td></tr>"
        for p in e.programs
        for c in p.collectives
    )
    table = (
        "<table><tr><th>program</th><th>launches</th><th>collective</th><th>bytes given</th><th>bytes got</th>"
        f"<th>overlap</th></tr>{rows}</table>"
    )
    return html(title, f"{draw_svg(e)}<h2>In words</h2><pre>{escape(text)}</pre><h2>Collectives</h2>{table}")


def draw_png(e: Any, path: str | Path) -> None:
    """An explanation as PNG, by matplotlib."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("explain.png: it needs matplotlib, which is not installed; html() needs nothing.") from error
    marks, height = _marks(e)
    figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.axis("off")
    for m in marks:
        if m.text:
            axes.text(m.x, m.y, m.text.replace("$", r"\$"), fontsize=m.size * 0.68, color=m.color)
        else:
            axes.add_patch(Rectangle((m.x, m.y), m.width, m.height, color=m.color, linewidth=0))
    figure.savefig(path)


def _marks(e: Any) -> tuple[list[Mark], int]:
    """All that is drawn, and how high that is."""
    marks: list[Mark] = [Mark(MARGIN, 34, text=f"{e.function}  on  {e.group}"[:110], size=17)]
    y = 60.0
    for draw in (_rows, _schedules, _memory):
        found = list(draw(e, y))
        marks += found
        y = max([y, *(m.y + m.height for m in found)]) + 28
    return marks, int(y)


def _rows(e: Any, y: float) -> Iterator[Mark]:
    """A bar a replica."""
    if not e.lengths:
        yield Mark(MARGIN, y + 14, text="no rows: each replica runs it once")
        return
    yield Mark(MARGIN, y + 12, text=f"{sum(e.lengths)} rows, {size_text(e.sent_bytes)} sent from the host by each call")
    count, most = len(e.lengths), max(e.lengths)
    step = (WIDTH - 2 * MARGIN) / count
    for rank, rows in enumerate(e.lengths):
        height = 44 * rows / most
        x = MARGIN + rank * step
        yield Mark(x, y + 24 + 44 - height, step * 0.86, height, _BLUE)
        if count <= 16:
            yield Mark(x, y + 84, text=f"{rank}: {rows}", size=11)


def _schedules(e: Any, y: float) -> Iterator[Mark]:
    """A strip a program: what it computes, and under it what travels meanwhile."""
    width = WIDTH - 2 * MARGIN
    yield Mark(MARGIN, y + 12, text="schedule, from left to right:")
    legend = [(_BLUE, "convolution or matrix product"), *_KINDS.values()]
    x = MARGIN + 190.0
    for color, words in legend:
        yield Mark(x, y + 2, 11, 11, color)
        yield Mark(x + 16, y + 12, text=words, size=11)
        x += 26 + 6.2 * len(words)
    y += 24
    for program in e.programs:
        if program.role == "begin":
            continue
        times = f" x {program.launches}" if program.launches > 1 else ""
        yield Mark(MARGIN, y + 12, text=f"{program.role}{times}: {len(program.collectives)} collective(s)", size=11)
        y += LINE
        yield Mark(MARGIN, y, width, 16, "#eeeeee")
        for at in program.heavy:
            yield Mark(MARGIN + at * width, y, max(width / 600, 1.2), 16, _BLUE)
        y += 20
        for each in program.collectives[:40]:
            words = f"{each.kind}, {size_text(each.operand_bytes)}"
            if each.begin is None:
                yield Mark(MARGIN, y, 11, 9, _GREY)
                yield Mark(MARGIN + 16, y + 9, text=words, size=10)
            else:
                begin, length = MARGIN + each.begin * width, max((each.end - each.begin) * width, 3)
                yield Mark(begin, y, length, 9, _KINDS[each.behind][0])
                right = begin + length + 6
                x = right if right < WIDTH - 190 else begin - 6.4 * len(words)
                yield Mark(x, y + 9, text=words, size=10)
            y += 13
        if len(program.collectives) > 40:
            yield Mark(MARGIN, y + 10, text=f"and {len(program.collectives) - 40} more", size=10)
            y += 13
        y += 8


def _memory(e: Any, y: float) -> Iterator[Mark]:
    """A bar of the largest program's memory, beside a device's."""
    if e.memory_bytes is None:
        yield Mark(MARGIN, y + 12, text="memory: unknown")
        return
    largest = max(e.programs, key=lambda program: program.total_bytes or 0)
    scale = (WIDTH - 2 * MARGIN) / max(e.memory_bytes, e.memory_limit or 0, 1)
    fits = {True: "fits in", False: "does not fit in", None: "of"}[e.fits]
    limit = size_text(e.memory_limit)
    yield Mark(MARGIN, y + 12, text=f"memory of a device: {size_text(e.memory_bytes)}, {fits} {limit}")
    y += 20
    if e.memory_limit is not None:
        yield Mark(MARGIN, y, e.memory_limit * scale, 18, "#eeeeee")
    x = float(MARGIN)
    parts = [
        ("arguments", largest.argument_bytes, _GREEN),
        ("temporary", largest.temporary_bytes, _RED),
        ("results not in place", largest.result_bytes - largest.aliased_bytes, _BLUE),
    ]
    for _, size, color in parts:
        yield Mark(x, y, size * scale, 18, color)
        x += size * scale
    x = float(MARGIN)
    for name, size, color in parts:
        words = f"{name} {size_text(size)}"
        yield Mark(x, y + 25, 11, 11, color)
        yield Mark(x + 16, y + 35, text=words, size=11)
        x += 34 + 6.4 * len(words)
    if e.lower_bound_seconds is not None:
        words = f"{number_text(e.flops)}flop; lower bound of the time {e.lower_bound_seconds * 1e3:.3g} ms"
        yield Mark(x, y + 35, text=words, size=11)
