"""Page: a tree of records as text, or as one HTML page with one drawing."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from .._base.units import UNKNOWN, number_text, seconds_text, size_text

# A tree of mappings and lists of mappings. Names end in "bytes" or "seconds" where values have these units.
Tree = Mapping[str, Any]
# A bar of a chart: its name, its segments (what a segment means, how long it is) and the words after it.
Bar = tuple[str, Sequence[tuple[str, float]], str]
Table = tuple[str, list[str], list[list[str]]]

# None of these means that there is nothing to say. None of another name means that nobody knows.
_OPTIONAL = ("rows", "ranks", "measured", "hidden_seconds", "slowest")
# Text shows so many rows of a table, and a chart so many bars. A page's tables show all.
_MOST = 16
# "light dark" follows the reader's setting; text and lines take their colours from it. A phone's screen is narrow.
_STYLE = (
    ":root{color-scheme:light dark}body{margin:2em auto;max-width:60em;padding:0 1em;font-family:sans-serif}"
    "div{overflow-x:auto}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #8886}"
    "@media(max-width:40em){td,th{padding:.2em .3em;font-size:.7em}td+td{overflow-wrap:anywhere}}"
)
_COLORS = ("#4c78a8", "#f2b447", "#b279a2", "#9d755d", "#a0a0a0", "#5f9ea0", "#e8875a", "#8a9a3f")
# A drawing has the width of a phone's screen, and grows on wider ones. A letter is about 5.5 wide.
_WIDTH, _GROWN, _LETTER, _LINE = 360, 560, 5.5, 16


def text(tree: Tree) -> str:
    lines: list[str] = []
    for title, heads, rows in _tables(tree):
        lines += ["", title] if title else []
        if not heads:
            lines += [f"{name}: {value}" for name, value in rows]
            continue
        shown = [heads, *rows[:_MOST]]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        for row in shown:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  " + "  ".join(cells).rstrip())
        lines += [f"  and {len(rows) - _MOST} more"] if len(rows) > _MOST else []
    return "\n".join(lines)


def page(title: str, tree: Tree, drawing: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>\n{fragment(tree, drawing)}</body></html>\n"
    )


def fragment(tree: Tree, drawing: str) -> str:
    """Write a drawing and the tables of a tree as HTML, for a page or for a cell of a notebook."""
    parts = [f"<div>{drawing}</div>"]
    for name, heads, rows in _tables(tree):
        parts += [f"<h2>{escape(name)}</h2>"] if name else []
        table = [[f"<th>{escape(cell)}</th>" for cell in heads]] if heads else []
        table += [[f"<td>{escape(cell)}</td>" for cell in row] for row in rows]
        # A few records of many fields stand side by side, so that the page shows them whole.
        lines = zip(*table, strict=True) if len(heads) > max(len(rows), 6) else table
        parts += ["<div><table>", *(f"<tr>{''.join(line)}</tr>" for line in lines), "</table></div>"]
    return "\n".join(parts)


def _tables(tree: Tree, title: str = "") -> Iterator[Table]:
    """Yield the tables of a tree: titles, heads of columns, rows of cells. The values of a mapping have no heads."""
    facts, inner = [], []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            inner += _tables(value, _label(name))
        elif _are_records(value):
            inner += _record_tables(_label(name), value)
        elif value is not None or name not in _OPTIONAL:
            facts.append([_label(name), _cell(name, value)])
    if facts:
        yield title, [], facts
    yield from inner


def _record_tables(title: str, records: Sequence[Tree]) -> Iterator[Table]:
    """Yield a table of records, and a table of the records inside them, which repeats the outer record's first cell."""
    nested = [name for name in records[0] if any(_are_records(record[name]) for record in records)]
    empty = [name for name in _OPTIONAL if all(record.get(name) is None for record in records)]
    columns = [name for name in records[0] if name not in (*nested, *empty)]
    rows = [[_cell(name, record[name]) for name in columns] for record in records]
    yield title, [_label(name) for name in columns], rows
    for name in nested:
        inner = [{columns[0]: record[columns[0]], **child} for record in records for child in record[name]]
        yield from _record_tables(_label(name), inner)


def _are_records(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def _label(name: str) -> str:
    return (
        name.replace("was_compiled", "compiled before")
        .replace("_", " ")
        .removesuffix(" bytes")
        .removesuffix(" seconds")
    )


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "" if name in _OPTIONAL else UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        words = [*map(str, value[:_MOST]), *["..."] * (len(value) > _MOST)]
        return ("; " if any(isinstance(entry, str) for entry in value) else ", ").join(words) or "none"
    if name.endswith(("bytes", "limit")):
        return size_text(value)
    if name.endswith("seconds"):
        return seconds_text(value)
    if name == "flops":
        return f"{number_text(value)}flop"
    return str(value)


def chart(label: str, sections: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Draw titled groups of bars as SVG text; the bars of one group share a scale."""
    colors: dict[str, str] = {}
    parts: list[str] = []
    y = 0
    for title, bars in sections:
        parts.append(_words(0, y, title, ' font-weight="bold"'))
        x, y = 0.0, y + _LINE
        for meaning in dict.fromkeys(meaning for _, segments, _ in bars for meaning, _ in segments):
            # A colour keeps its meaning in the whole drawing.
            color = colors.setdefault(meaning, _COLORS[len(colors) % len(_COLORS)])
            width = 28 + _LETTER * len(meaning)
            x, y = (0.0, y + _LINE) if x + width > _WIDTH else (x, y)
            parts += [_box(x, y, 11, 11, color), _words(x + 15, y, meaning)]
            x += width
        y += _LINE + 4
        longest = max([sum(length for _, length in segments) for _, segments, _ in bars], default=0) or 1
        for name, segments, words in bars[:_MOST]:
            parts += [_words(0, y, name), _words(_WIDTH, y, words, ' text-anchor="end"')]
            x, y = 0.0, y + _LINE
            for meaning, length in segments:
                width = _WIDTH * length / longest
                parts.append(_box(x, y, width, 12, colors[meaning]))
                x += width
            y += _LINE + 2
        if len(bars) > _MOST:
            parts.append(_words(0, y, f"and {len(bars) - _MOST} more"))
            y += _LINE
        y += _LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" width="100%" '
        f'style="max-width:{_GROWN}px" font-family="sans-serif" font-size="10" role="img" '
        f'aria-label="{escape(label)}">'
    )
    return "\n".join([head, *parts, "</svg>"])


def _words(x: float, y: float, words: str, how: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y + 10}" fill="currentColor"{how}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{color}"/>'
