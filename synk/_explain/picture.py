"""Picture: a call drawn: rows of the replicas, the schedule of its programs, memory. As SVG, in a page, or as PNG."""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .._base.units import counted, number_text, size_text

WIDTH, MARGIN, LINE = 900, 24, 20
_STYLE = (
    ":root{color-scheme:light dark}body{margin:2em auto;max-width:60em;padding:0 1em;font-family:sans-serif}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;padding:1em;background:#8882}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:right;white-space:nowrap;border-bottom:1px solid #8886}"
    "td:first-child{text-align:left}"
)
# Each colour means one thing; text takes that of the page around it.
TEXT, EMPTY, ROWS, _COMPUTATION = "#333333", "#88888833", "#5f9ea0", "#4c78a8"
_ARGUMENTS, _TEMPORARY, _RESULTS, _RESIDENT = "#b279a2", "#e8b33f", "#9d755d", "#ff9da6"
# What a bar of the schedule means, by whether its bytes travel behind computation.
_KINDS = {
    True: ("#54a24b", "travels behind computation"),
    False: ("#e45756", "travels alone"),
    None: ("#a0a0a0", "travels; beside what is unknown"),
}


class Mark(NamedTuple):
    """A rectangle, or where it has a text that: at a point in pixels from the upper left."""

    x: float
    y: float
    width: float = 0
    height: float = 0
    color: str = TEXT
    text: str = ""
    size: int = 12


def draw_svg(e: Any) -> str:
    """Draw an explanation as SVG text."""
    return svg_of(*_marks(e), WIDTH, title_of(e))


def title_of(e: Any) -> str:
    """Return in words what an explanation is about."""
    where, _, _ = e.group.removeprefix("Group(").removesuffix(")").partition(" on ")
    return f"A call of {e.function} on {where}"


def scrolled(wide: str) -> str:
    """Put HTML in a box of its own to scroll in, so that a narrow page stays where it is."""
    return f'<div style="overflow-x:auto">{wide}</div>'


def svg_of(marks: Iterable[Mark], height: int, width: int, label: str) -> str:
    """Marks as SVG text."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="100%" '
        f'style="min-width:{0.9 * width:.0f}px;max-width:{width}px" font-family="sans-serif" role="img" '
        f'aria-label="{escape(label, quote=True)}">'
    ]
    for m in marks:
        color = "currentColor" if m.color == TEXT else m.color
        place = f'x="{m.x:.1f}" y="{m.y:.1f}" fill="{color}"'
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
    rows = "".join(
        f"<tr><td>{escape(p.role)}</td><td>{p.launches}</td><td>{c.kind}</td>"
        f"<td>{size_text(c.operand_bytes)}</td><td>{size_text(c.result_bytes)}</td><td>{_KINDS[c.behind][1]}</td></tr>"
        for p in e.programs
        for c in p.collectives
    )
    table = (
        "<table><tr><th>program</th><th>launches</th><th>collective</th><th>given</th><th>got</th>"
        f"<th>overlap</th></tr>{rows}</table>"
    )
    found = f"{scrolled(draw_svg(e))}<h2>In words</h2><pre>{escape(text)}</pre><h2>Collectives</h2>{scrolled(table)}"
    return html(escape(title_of(e)), found)


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
    marks: list[Mark] = []
    y = 10.0
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
    sent = f"each call sends {size_text(e.sent_bytes)} from the host"
    yield Mark(MARGIN, y + 12, text=f"{e.function}: {counted(sum(e.lengths), 'row')} by replica; {sent}")
    count, most = len(e.lengths), max(e.lengths)
    step = (WIDTH - 2 * MARGIN) / count
    for rank, rows in enumerate(e.lengths):
        height = 44 * rows / most
        x = MARGIN + rank * step
        yield Mark(x, y + 24 + 44 - height, step * 0.86, height, ROWS)
        if count <= 16:
            yield Mark(x, y + 84, text=f"{rank}: {rows}")


def _schedules(e: Any, y: float) -> Iterator[Mark]:
    """A strip a program: what it computes, and under it what travels meanwhile."""
    width = WIDTH - 2 * MARGIN
    met = {each.behind for program in e.programs for each in program.collectives}
    legend = [(_COMPUTATION, "convolution or matrix product"), *(_KINDS[behind] for behind in _KINDS if behind in met)]
    yield from _legend(legend, y)
    y, is_first = y + 24, True
    for program in e.programs:
        if program.role == "begin":
            continue
        times = f" x {program.launches}" if program.launches > 1 else ""
        yield Mark(MARGIN, y + 12, text=f"{program.role}{times}: {counted(len(program.collectives), 'collective')}")
        y += LINE
        yield Mark(MARGIN, y, width, 16, EMPTY)
        for at in program.heavy:
            yield Mark(MARGIN + at * width, y, max(width / 600, 1.2), 16, _COMPUTATION)
        y += 20
        if is_first:
            for at, words in ((0, "first instruction"), (0.5, "middle"), (1, "last")):
                yield Mark(MARGIN + at * width - 6.2 * len(words) * at, y + 10, text=words)
            y, is_first = y + 18, False
        for each in program.collectives[:40]:
            words = f"{each.kind}, {size_text(each.operand_bytes)}"
            if each.begin is None:
                yield Mark(MARGIN, y, 11, 11, _KINDS[None][0])
                yield Mark(MARGIN + 16, y + 10, text=words)
            else:
                begin, length = MARGIN + each.begin * width, max((each.end - each.begin) * width, 3)
                yield Mark(begin, y, length, 11, _KINDS[each.behind][0])
                right = begin + length + 6
                x = right if right < WIDTH - 190 else begin - 6.6 * len(words)
                yield Mark(x, y + 10, text=words)
            y += 16
        if len(program.collectives) > 40:
            yield Mark(MARGIN, y + 10, text=f"and {len(program.collectives) - 40} more")
            y += 16
        y += 8


def _memory(e: Any, y: float) -> Iterator[Mark]:
    """A bar of the largest program's memory, beside a device's."""
    if e.memory_bytes is None:
        yield Mark(MARGIN, y + 12, text="memory: unknown")
        return
    largest = max(e.programs, key=lambda program: program.total_bytes or 0)
    scale = (WIDTH - 2 * MARGIN) / max(e.memory_bytes, e.memory_limit or 0, 1)
    yield Mark(MARGIN, y + 12, text=f"memory of a device: {e.memory_text}")
    y += 20
    if e.memory_limit is not None:
        yield Mark(MARGIN, y, e.memory_limit * scale, 18, EMPTY)
    x = float(MARGIN)
    parts = [
        (_ARGUMENTS, "arguments", largest.argument_bytes),
        (_TEMPORARY, "temporary", largest.temporary_bytes),
        (_RESULTS, "results not in place", largest.result_bytes - largest.aliased_bytes),
        (_RESIDENT, "kept beside it", largest.resident_bytes),
    ]
    for color, _, size in parts:
        yield Mark(x, y, size * scale, 18, color)
        x += size * scale
    yield from _legend([(color, f"{name} {size_text(size)}") for color, name, size in parts], y + 23)
    if e.lower_bound_seconds is not None:
        words = (
            f"{number_text(e.flops)}flop: no device of this kind takes less than {e.lower_bound_seconds * 1e3:.3g} ms"
        )
        yield Mark(MARGIN, y + 58, text=words)


def _legend(items: Iterable[tuple[str, str]], y: float) -> Iterator[Mark]:
    """Colours and what they mean, in a row."""
    x = float(MARGIN)
    for color, words in items:
        yield Mark(x, y + 2, 11, 11, color)
        yield Mark(x + 16, y + 12, text=words)
        x += 34 + 6.4 * len(words)
